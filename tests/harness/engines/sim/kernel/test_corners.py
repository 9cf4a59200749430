"""Corners, each of which has set kernel and oracle apart once; whose fault a wait is, and which caps bind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.sim import state
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Done
from harness.policy.types import KEPT_PAGES, Batch, Host, Inst, Option
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import CAPS, M0, M1, apart, clock
from tests.harness.engines.sim.world import NEVER, SHAPE, World, drive
from tests.harness.engines.sim.worlds import WILD, world
from tests.workloads.asked import asked


def small(
    rows: Sequence[tuple[float, int, int, int]],
    script: Sequence[tuple[float, Action]],
    *,
    blocks: int = 1000,
    gpus: int = 1,
    models: int = 1,
    options: Mapping[str, Option] | None = None,
    **config: Any,
) -> World:
    """Return a world of rows (arrival, model, prompt, output); links, but the host's, move 4 blocks a second.

    Each GPU has room for all weights and `blocks` blocks of 4 tokens, two to an elastic page. Costs are the clock's.
    """
    w, block = clock(models, gpus=gpus), 4 * kv_token_bytes(SHAPE)
    settings = {"block_tokens": 4, "watermark": 0.0, "process_bytes": 0, "buffer_bytes": block // SHAPE.layers}
    reserve = KEPT_PAGES * 2 * block if options == ELASTIC else 0
    mem_bytes = models * (weight_bytes(SHAPE) + reserve) + blocks * block
    spec = w.machine.spec._replace(mem_bytes=mem_bytes, d2h=4.0 * block, nvlink=4.0 * block)
    jobs, machine = asked(w.jobs.models, *zip(*rows, strict=True)), w.machine._replace(spec=spec)
    changed = replace(w.config, **(settings | config))
    return replace(w, config=changed, machine=machine, options=options or {}, jobs=jobs, script=script)


def agreed(w: World) -> tuple[np.ndarray, list[tuple[float, Action, bool]]]:
    """Return requests, and which actions were done when, and whether they could be; kernel and oracle agree."""
    assert apart(w) == []
    sim, told = drive(w)
    return sim.S.requests, [(t, e.action, e.failed is None) for t, e in told if isinstance(e, Done)]


SWAP: Mapping[str, Option] = {"preempt": "swap"}
ELASTIC: Mapping[str, Option] = {"kv": "elastic"}
FAR, OTHER = Batch(Inst("m0", (1,))), Batch(M0.inst, 1)
ADMIT: list[tuple[float, Action]] = [(NEVER, Load(M0.inst)), (NEVER, Admit("m0", M0))]
SERVE: list[tuple[float, Action]] = [*ADMIT, (NEVER, Run(M0))]
APART: list[tuple[float, Action]] = [*ADMIT, (NEVER, Run(M0, "prefill")), (NEVER, Run(M0, "decode"))]


def test_a_partly_built_kv_does_not_travel() -> None:
    turn: list[tuple[float, Action]] = [(NEVER, Run(M0, steps=1, chunk_tokens=4)), (NEVER, Load(FAR.inst))]
    w = small([(0.0, 0, 12, 1)], [*ADMIT, *turn, (1.0, Admit(0, FAR)), (2.0, Run(FAR))], gpus=2)
    R, _ = agreed(w)
    assert (R["done"][0], R["compute"][0], R["queue"][0], R["transfer"][0]) == (2.125, 0.25, 1.875, 0.0)


def test_who_comes_after_the_last_that_waited_for_memory_does_not_wait_for_it() -> None:
    # the third is swapped out at 0.625 and brought back at 1.625, in a step that began with it in the queue
    w = small([(0.0, 0, 7, 4), (0.0, 0, 7, 9), (0.0, 0, 7, 9), (1.75, 0, 1, 1)], SERVE, blocks=7, options=SWAP)
    R, _ = agreed(w)
    assert (R["kv"][3], R["queue"][3], R["done"][3]) == (0.0, 0.125, 2.0)


def test_who_is_admitted_again_waits_for_memory_from_the_next_look() -> None:
    w = small([(0.0, 0, 7, 9), (0.0, 0, 11, 1)], [*SERVE, (0.5, Admit(1, M0))], blocks=4)
    R, _ = agreed(w)
    assert (R["kv"][1], R["queue"][1], R["done"][1]) == (2.0, 0.125, 2.25)


@cases("begin_s", [k / 10 for k in range(20)])
def test_steps_that_end_together_but_for_rounding_end_together(begin_s: float) -> None:
    """A prefill of 0.3 s and three decode steps of 0.1 s: whom it prefills decodes at once."""
    w = small([(begin_s, 0, 1, 20), (begin_s, 0, 1, 2)], [*ADMIT, (NEVER, Run(M0, "prefill", seqs=1)), APART[-1]])
    cost = w.machine.tables.cost.copy()
    cost["pre0"], cost["dec0"] = 0.3, 0.1
    R, _ = agreed(replace(w, machine=w.machine._replace(tables=w.machine.tables._replace(cost=cost))))
    assert R["done"][1] == pytest.approx(begin_s + 0.7, abs=1e-12)


def test_moves_keep_the_order_in_which_they_were_asked_for() -> None:
    out: list[tuple[float, Action]] = [(0.3, Move(1, Host())), (0.3, Move(0, Host()))]
    _, done = agreed(small([(0.0, 0, 7, 40), (0.0, 0, 7, 40)], [*SERVE, *out]))
    # in a step until 0.5; two blocks take half a second
    assert done == [(1.0, Move(1, Host()), True), (1.5, Move(0, Host()), True)]


def test_a_batch_that_waits_for_a_swap_looks_again_when_a_member_goes() -> None:
    # at 0.625 the last two lack a block each; the third is on its way out until 1.125, the second leaves at 0.8
    away: list[tuple[float, Action]] = [(0.8, Move(1, (1,)))]
    rows = [(0.0, 0, 5, 3), (0.0, 0, 7, 9), (0.0, 0, 7, 9)]
    R, _ = agreed(small(rows, [*SERVE, *away], blocks=6, gpus=2, options=SWAP))
    assert R["done"][0] == 0.8 + 0.25


def test_a_swapped_member_that_goes_lets_the_next_come_back() -> None:
    # the second and the third are swapped out at 0.625; six blocks for the second are never free
    rows = [(0.0, 0, 3, 12), (0.0, 0, 19, 9), (0.0, 0, 3, 3)]
    R, _ = agreed(small(rows, [*APART, (2.2, Admit(1, OTHER))], blocks=7, options=SWAP))
    assert R["preemptions"].tolist() == [0, 1, 1]
    assert R["done"][2] == 2.875


def test_a_move_larger_than_the_account_fails_by_what_the_kv_is_by_then() -> None:
    block = 4 * kv_token_bytes(SHAPE)
    script: list[tuple[float, Action]] = [(NEVER, Limit("m0", 1, 3 * block)), (2.1, Move(0, (1,)))]
    R, done = agreed(small([(0.0, 0, 7, 40), (1.0, 0, 7, 40)], [*SERVE, *script], gpus=2))
    assert done == [(2.25, Move(0, (1,)), False)]  # two blocks at first, four by now
    assert (R["transfer"][0], R["done"][0]) == (0.0, 0.25 + 39 * 0.25)


def test_what_a_move_waits_for_is_counted_in_pages() -> None:
    """A move of 4 blocks, held back by a limit, would take one page of two: with 3 free a prompt is let in."""
    near, beside = Batch(Inst("m1", (1,))), Batch(Inst("m0", (1,)), 1)
    start = Load(FAR.inst), Load(near.inst), Run(beside), Run(near), Admit("m1", near), Limit("m0", 1, 0)
    script = [*SERVE, *((NEVER, action) for action in start), (0.0, Admit(0, beside)), (1.1, Move(1, (1,)))]
    rows = [(0.0, 0, 24, 9), (1.0, 0, 15, 90), (2.0, 1, 1, 1)]
    R, done = agreed(small(rows, script, blocks=3, gpus=2, models=2, options=ELASTIC))
    assert done == [(3.125, Move(1, (1,)), True)]
    assert (R["kv"][2], R["done"][2]) == (0.0, 2.125)


@cases("end_s", [5.0, math.inf])
def test_a_grant_that_nothing_can_serve_fails_at_the_last_event(end_s: float) -> None:
    """Also where the end of the run is still ahead: of two models, the GPU has room for one."""
    w = small([(0.0, 0, 1, 4), (0.5, 1, 1, 1)], [*SERVE, (0.25, Load(M1.inst))], blocks=9, models=2)
    spec = w.machine.spec._replace(mem_bytes=w.machine.spec.mem_bytes - weight_bytes(SHAPE))
    w = replace(w, machine=w.machine._replace(spec=spec), end_s=end_s)
    R, done = agreed(w)
    assert done == [(0.875, Load(M1.inst), False)]
    assert (R["done"][0], R["load"][1], R["admission"][1]) == (0.875, end_s - 0.5 if end_s < math.inf else 0.375, 0.0)


def test_the_end_of_a_run_changes_nothing_before_it() -> None:
    for seed in range(60):
        w = replace(world(WILD + seed), end_s=math.inf)
        end_s = float(np.random.default_rng(seed).uniform(0.0, w.jobs.arrival_s[-1] + 2.0))
        whole, cut = drive(w)[1], drive(w, end_s)[1]
        assert cut == [x for x in whole if x[0] < end_s]


def test_the_order_of_admit_is_that_in_which_they_are_said() -> None:
    # both in a step until 0.25; the second is asked for first, and goes first
    again: list[tuple[float, Action]] = [(0.1, Admit(1, OTHER)), (0.2, Admit(0, OTHER)), (1.0, Run(OTHER, seqs=1))]
    R, _ = agreed(small([(0.0, 0, 4, 2), (0.0, 0, 4, 2)], [*SERVE, *again]))
    assert R["done"].tolist() == [1.5, 1.25]


def test_an_eviction_at_a_boundary_finds_no_step_in_flight() -> None:
    # two prefills of a turn end with a decode step that began with them; the answer evicts and loads again
    script = [*SERVE, *((0.1, Admit(r, OTHER)) for r in (1, 2)), (0.125, Run(OTHER, "prefill", steps=2, seqs=1))]
    w = small([(0.0, 0, 1, 9), (0.1, 0, 1, 9), (0.1, 0, 1, 9)], script)
    _, done = agreed(replace(w, rota=[[Evict(M0.inst, drain=False), Load(M0.inst)]]))
    assert done == [(0.375, Evict(M0.inst, drain=False), True), (1.375, Load(M0.inst), True)]


def test_weights_leave_with_their_last_member_before_the_next_lane_is_formed() -> None:
    # at 0.375 the first model's request finds no second block, alone in its account, and fails; its weights go with it,
    # and the second model's lane, which steps at 0.375 as well, lets in a prompt that needs their room
    both = [*SERVE, *((NEVER, a) for a in (Load(M1.inst), Run(M1, chunk_tokens=8), Admit("m1", M1)))]
    rows = [(0.0, 0, 3, 9), (0.0, 1, 3, 3), (0.25, 1, 7, 1)]
    R, done = agreed(small(rows, [*both, (0.25, Evict(M0.inst))], blocks=2, models=2))
    assert R["state"].tolist() == [state.FAILED, state.DONE, state.DONE]
    assert (R["done"][0], R["kv"][2], done) == (0.375, 0.0, [(0.375, Evict(M0.inst), True)])


def test_the_older_lane_takes_the_last_block_at_a_boundary_of_both() -> None:
    # at 1.375 each needs its third block, and one of five is left; whose span then ends has no meaning
    script = [*SERVE, *((NEVER, a) for a in (Load(M1.inst), Run(M1), Admit("m1", M1)))]
    R, _ = agreed(small([(0.0, 0, 3, 12), (0.0, 1, 3, 12)], script, blocks=5, models=2))
    assert R["state"].tolist() == [state.DONE, state.FAILED]
    assert R["done"].tolist() == [0.125 + 11 * 0.25, 1.375]


# ---------------------------------------------------------------- whose fault a wait is, and which caps bind


def waited(script: Sequence[tuple[float, Action]], **more: Any) -> tuple[float, float]:
    """Return the seconds that a request of 0, admitted at 2, was held back, and those that it waited for weights."""
    every = sorted([*script, (2.0, Run(M0)), (2.0, Admit(0, M0))], key=lambda x: x[0])
    R, _ = agreed(small([(0.0, 0, 1, 1)], every, **more))
    assert R["admission"][0] + R["load"][0] + R["compute"][0] + R["queue"][0] == R["done"][0]
    return float(R["admission"][0]), float(R["load"][0])


def test_who_is_in_no_batch_waits_for_weights_while_they_are_in_nowhere() -> None:
    first: tuple[float, Action] = (NEVER, Load(M0.inst))
    out: list[tuple[float, Action]] = [first, (0.25, Evict(M0.inst, drain=False)), (0.5, Load(M0.inst))]
    assert waited([first]) == (2.0, 0.0)
    assert waited([(0.5, Load(M0.inst))]) == (0.5, 1.5)  # the load takes a second
    assert waited(out) == (0.75, 1.25)  # leaves at 0.25, is back at 1.5
    assert waited([*out, (NEVER, Load(FAR.inst))], gpus=2) == (2.0, 0.0)  # in at another place all the time
    assert waited([*out, (0.25, Load(FAR.inst))], gpus=2) == (1.0, 1.0)  # the first of two loads ends it
    # loaded with the admission: its batch waits on
    assert waited([(2.0, Load(M0.inst))]) == (0.0, 3.0)


def test_weights_that_wait_for_memory_are_out_and_those_that_drain_are_in() -> None:
    spec = clock(2).machine.spec._replace(mem_bytes=weight_bytes(SHAPE) + 9 * 4 * kv_token_bytes(SHAPE))
    # the second model waits for the place of the first, whose only request takes until 1.125
    rows = [(0.0, 0, 1, 5), (0.25, 1, 1, 1), (0.25, 0, 1, 1)]
    leaves: list[tuple[float, Action]] = [(0.0, Admit(0, M0)), (0.5, Evict(M0.inst)), (0.5, Load(M1.inst))]
    script = [*SERVE[:1], (NEVER, Run(M0)), *leaves, (3.0, Run(M1)), (3.0, Admit(1, M1))]
    w = small(rows, script, models=2)
    R, done = agreed(replace(w, machine=w.machine._replace(spec=spec), end_s=4.0))
    assert done == [(1.125, Evict(M0.inst), True), (2.125, Load(M1.inst), True)]
    assert (R["load"][1], R["admission"][1]) == (2.125 - 0.25, 3.0 - 2.125)
    assert (R["load"][2], R["admission"][2]) == (4.0 - 1.125, 1.125 - 0.25)  # in until its last member goes


def test_a_group_of_gpus_has_the_weights_when_all_of_them_do() -> None:
    pair = Batch(Inst("m0", (0, 1)))
    w = small([(0.0, 0, 1, 1)], [(0.5, Load(pair.inst)), (2.0, Run(pair)), (2.0, Admit(0, pair))], gpus=2)
    served = tuple(m._replace(tp=2) for m in w.config.models)
    R, _ = agreed(replace(w, config=replace(w.config, models=served)))
    assert (R["admission"][0], R["load"][0]) == (0.5, 1.5)


def bound(
    rows: Sequence[tuple[float, int, int, int]], script: Sequence[tuple[float, Action]], **config: Any
) -> dict[str, int]:
    """Return steps of a world, and those that a cap of the engine bound; kernel and oracle agree on them."""
    w = small(rows, script, **config)
    assert apart(w) == []
    sim, _ = drive(w)
    counts = {cap: int(sim.S.s[f"by_{cap}"]) for cap in CAPS}
    shares = sim.stats()
    steps = int(sim.S.batches["steps"].sum())
    assert [shares[f"{cap}_bound"] for cap in CAPS] == [n / steps for n in counts.values()]
    return {"all": steps} | {cap: n for cap, n in counts.items() if n}


def test_what_waits_for_its_own_account_leaves_the_spans_of_others_whole() -> None:
    """Eight prompts wait for the limit of m0; m1 has its prompt and 27 decode steps in hardly a span more."""
    both: list[tuple[float, Action]] = [(NEVER, Load(M1.inst)), (NEVER, Admit("m1", M1)), (NEVER, Run(M1))]
    limit = (NEVER, Limit("m0", 0, 8 * 4 * kv_token_bytes(SHAPE)))
    begun = []
    for output in (28, 1):
        rows = [(0.0, 0, 4, 28), (0.0, 1, 4, output), *((0.3 + 0.3 * k, 0, 4, 4) for k in range(8))]
        w = small(rows, [*SERVE, *both, limit], models=2)
        assert apart(w) == []
        sim, _ = drive(w)
        assert (sim.S.requests["kv"][2:] > 0).sum() == 5
        begun.append(sim.stats()["steps"])
    assert begun[0] - begun[1] <= 3


def test_the_batch_cap_binds_where_members_wait_behind_as_many() -> None:
    two = [(0.0, 0, 1, 9), (0.1, 0, 1, 1)]
    # the second comes within the first prefill: all eight decode steps keep it out
    assert bound(two, SERVE, batch_cap=1) == {"all": 10, "cap": 8}
    assert bound(two, SERVE, batch_cap=2) == {"all": 10}
    # it goes at 0.75, within the third of them, in a span: the rest keeps nobody out
    assert bound(two, [*SERVE, (0.75, Drop(1))], batch_cap=1) == {"all": 9, "cap": 3}
    # what an order says is the policy's choice, unless it asks for more than the engine gives
    orders = {seqs: [*ADMIT, (NEVER, Run(M0, seqs=seqs))] for seqs in (1, 2)}
    assert bound(two, orders[1], batch_cap=2) == bound(two, orders[1], batch_cap=1) == {"all": 10}
    assert bound(two, orders[2], batch_cap=1) == {"all": 10, "cap": 8}
    # who waits for memory is not kept out by the cap
    assert bound([(0.0, 0, 1, 3), (0.1, 0, 40, 1)], SERVE, batch_cap=2, blocks=11) == {"all": 4}


def test_the_batch_cap_binds_where_members_with_kv_are_parked() -> None:
    # the second prefill ends at 0.25; the decode steps of the first begin at 0.125, 0.375, ...
    two = [(0.0, 0, 1, 9), (0.0, 0, 1, 9)]
    assert bound(two, APART, batch_cap=1) == {"all": 2 + 16, "cap": 1 + 7}
    assert bound(two, [*APART, (0.75, Drop(1))], batch_cap=1) == {"all": 2 + 8, "cap": 1 + 2}


def test_the_tokens_of_a_step_bind_where_a_prompt_is_cut_or_kept_out() -> None:
    # of 10 tokens in pieces of 4 the last is not cut
    assert bound([(0.0, 0, 10, 1)], SERVE, chunk_tokens=4) == {"all": 3, "chunk": 2}
    assert bound([(0.0, 0, 10, 1)], SERVE, chunk_tokens=10) == {"all": 1}
    # a decode takes the one token that there is, and the second prompt waits for its eight steps
    assert bound([(0.0, 0, 1, 9), (0.1, 0, 1, 1)], SERVE, chunk_tokens=1) == {"all": 10, "chunk": 8}
    assert bound([(0.0, 0, 1, 9), (0.1, 0, 1, 1)], [*SERVE, (0.75, Drop(1))], chunk_tokens=1) == {"all": 9, "chunk": 3}
    # whole prompts: two of 5 fit 12 tokens, the third does not; one alone may be longer
    three = [(0.0, 0, 5, 1)] * 3
    assert bound(three, SERVE, prefill_tokens=12) == {"all": 2, "prefill": 1}
    assert bound(three, SERVE, prefill_tokens=4) == {"all": 3, "prefill": 2}
    # an order's own grain is the policy's choice
    assert bound([(0.0, 0, 10, 1)], [*ADMIT, (NEVER, Run(M0, chunk_tokens=4))], chunk_tokens=10) == {"all": 3}
