"""Attention to KV on other GPUs, and kernels cut to a grain: worked by hand, each also by the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.coef import COST
from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.costs.shapes import kv_token_bytes
from harness.engines.machine import Config, Machine, Served
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Drop, Limit, Load, Move, Run
from harness.policy.events import Done, Event
from harness.policy.types import Batch, Host, Inst
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import apart
from tests.harness.engines.sim.world import NEVER, SHAPE, World, drive, flat
from tests.workloads.asked import asked

HOT, COLD = Batch(Inst("hot", (0,))), Batch(Inst("cold", (1,)))
STEP = 1 / 8  # s of attention a sequence
Told = list[tuple[float, Event]]


def woven(rows: Sequence[tuple[float, int, int]], script: Sequence[tuple[float, Action]], **over: Any) -> World:
    """Return a world of requests (arrival, model, output) of one token each, hot on GPU 0 and cold on GPU 1.

    A prompt takes 1/8 s, a decode 1/8 s of attention a sequence in two layers, and nothing else.
    """
    cost = np.zeros(2, COST)
    cost["pre0"], cost["dec1"], cost["flops"], cost["hbm"], cost["layers"] = 1 / 8, STEP, 1.0, 1.0, 2
    cost["query_bytes"], cost["result_bytes"] = 48.0, 16.0
    cost["pre_x"] = cost["pre_slow"] = cost["dec_slow"] = 1.0
    t = flat(cost)
    nvlink = over.pop("nvlink", math.inf)
    spec = GpuSpec("test", "test", 1 << 40, 100, 2, 1.0, 1.0, math.inf, math.inf, nvlink, 1.0, 1.0, 1 << 50)
    priced = Machine(t, spec, {"host": Way(1.0, "pcie")}, HostProfile(0, 0, 0, 0, False, 1, 1))
    priced = priced._replace(poll_s=over.pop("poll_s", 0.0))
    served = tuple(Served(m, SHAPE) for m in ("hot", "cold"))
    config = Config(served, gpus=2, block_tokens=4, chunk_tokens=0, mem_fraction=1.0)
    arrival_s, model, output = zip(*rows, strict=True)
    jobs = asked(("hot", "cold"), arrival_s, model, 1, output)
    start = (action for b in (HOT, COLD) for action in (Load(b.inst), Admit(b.inst.model, b), Run(b)))
    return World(config, priced, over, jobs, [*((NEVER, action) for action in start), *script])


def weave(
    rows: Sequence[tuple[float, int, int]], script: Sequence[tuple[float, Action]], **over: Any
) -> tuple[Sim, Told]:
    """Run them, as the oracle does too."""
    w = woven(rows, script, **over)
    assert apart(w) == []
    return drive(w)


def far(at: float, *rids: int) -> list[tuple[float, Action]]:
    return [(at, Move(r, (1,), attend=True)) for r in rids]


def test_attention_here_and_there_at_once_takes_the_longer_of_both() -> None:
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9)], far(0.25, 1))
    # two prefills of 1/8 s, then eight steps: 1/8 s each, where both here would take 1/4 s; the first is that of one
    # alone, while the KV of the other is on its way
    assert sim.S.requests["done"].tolist() == [1.25, 1.375]
    assert sim.S.requests["contention"].tolist() == [0.0, 0.0]
    assert sim.S.gpus["busy_s"][:2].tolist() == [1.375, 1.0]  # the other GPU has nothing but their attention
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9)], [])
    assert sim.S.requests["done"].tolist() == [2.25, 2.25]


def test_queries_and_results_take_the_link() -> None:
    # 64 bytes a sequence at 1,024 bytes a second are 1/16 s, of KV itself one block of 4 tokens is moved before
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9)], far(0.25, 1), nvlink=1024.0)
    moved_s = 4 * kv_token_bytes(SHAPE, 1) / 1024
    alone = math.ceil(moved_s / STEP)  # steps of the one that stays, until the KV is there; it then has eight in all
    assert sim.S.requests["first"].tolist() == [0.25, 0.25]
    begins = 0.25 + min(8, alone) * STEP if alone < 8 else max(1.25, 0.25 + moved_s)
    assert sim.S.requests["done"][1] == pytest.approx(begins + 8 * (STEP + 1 / 16))


def test_it_waits_for_the_step_that_it_finds_and_then_has_the_time() -> None:
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9), (0.125, 1, 1000)], far(0.25, 1))
    # of a step of 1/8 s there are 1/16 s left in the mean, in each of two layers: 1/4 s a step; half of it is attention
    assert sim.S.requests["done"][:2].tolist() == [0.375 + 7 / 4, 0.375 + 8 / 4]
    assert sim.S.requests["contention"][:2].tolist() == [7 / 8, 8 / 8]
    # the model there makes half of its speed meanwhile
    assert sim.S.requests["compute"][2] - 1 / 8 == pytest.approx(999 / 8)
    assert sim.S.requests["contention"][2] == pytest.approx(1.0)


def test_kernels_cut_shorter_keep_it_waiting_less_and_polls_lengthen_a_step() -> None:
    rows = [(0.0, 0, 40), (0.0, 0, 9), (0.0, 0, 40), (0.125, 1, 1000)]
    slow: list[float] = []
    for op_s in (None, math.inf, 1 / 64):
        cut = [] if op_s is None else [(NEVER, Run(COLD, op_s=op_s))]
        sim, _ = weave(rows, [*cut, *far(0.375, 1)])
        slow.append(float(sim.S.requests["contention"][1]))
    # two here, one there: 1/4 s a step, and (1/4 - 1/8) / 2 s of slack a layer. Late, in each of two layers: of a whole
    # step there (T = 1/8 s) (T - 1/16)^2 / 2T; of its two kernels of 1/16 s nothing
    late = 2 * (1 / 16) ** 2 / (2 * 1 / 8)
    assert slow == [pytest.approx(8 * late), 0.0, 0.0]
    sim, _ = weave([(0.0, 1, 9)], [(NEVER, Run(COLD, op_s=1 / 64))], poll_s=1 / 1024)
    assert sim.S.requests["done"][0] == pytest.approx(1 / 8 + 1 / 1024 * 8 + 8 * (1 / 8 + 8 / 1024))


def test_it_is_not_waited_for_without_interference() -> None:
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9), (0.125, 1, 1000)], far(0.25, 1), sharing="none")
    assert sim.S.requests["done"][:2].tolist() == [1.25, 1.375]
    assert sim.S.requests["contention"].tolist() == [0.0] * 3


def test_kv_is_charged_where_it_lies_and_grows_there() -> None:
    block = 4 * kv_token_bytes(SHAPE, 1)
    script = [*far(0.25, 1), (0.3, Drop(10**6)), (1.0, Drop(10**6))]  # the drops only make it look
    used: list[tuple[int, ...]] = []
    drive(
        woven([(0.0, 0, 30), (0.0, 0, 30)], script),
        look=lambda sim: used.append(tuple(sim.view().kv("hot", g).used_bytes for g in (0, 1))),
    )
    # both have a block for their two tokens at first, and two blocks for 1 + 1 + 6 and one more at 1.0
    assert used == [(2 * block, 0), (block, block), (2 * block, 2 * block)]


def test_whoever_lacks_a_block_there_loses_its_pages_and_recomputes_at_home() -> None:
    block = 4 * kv_token_bytes(SHAPE, 1)
    script = [(NEVER, Limit("hot", 1, 2 * block)), *far(0.5, 1, 2)]
    sim, _ = weave([(0.0, 0, 8)] * 4, script)
    assert sim.S.requests["preemptions"].tolist() == [0, 0, 1, 0]
    assert (sim.S.requests["state"] == 6).all()


def test_kv_that_comes_home_is_attended_there() -> None:
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9)], [*far(0.25, 1), (0.75, Move(1, (0,)))])
    assert sim.S.requests["done"].tolist() == [0.875 + 3 / 4, 0.875 + 3 / 4 + 2 / 8]


def test_without_attend_kv_elsewhere_waits() -> None:
    sim, _ = weave([(0.0, 0, 9), (0.0, 0, 9)], [*far(0.25, 1), (0.75, Move(1, (1,))), *far(2.0, 1)])
    assert sim.S.requests["done"].tolist() == [1.25, 2.0 + 5 / 8]
    assert sim.S.requests["transfer"].tolist() == [0.0, 1.25]


@cases("to", [(0,), (1, 0), Host(), None])
def test_where_nothing_can_be_attended_a_move_is_refused(to: Any) -> None:
    _, told = weave([(0.0, 0, 9)], [(0.25, Move(0, to, attend=True))])
    assert [e.failed for _, e in told if isinstance(e, Done)] == ["never"]
