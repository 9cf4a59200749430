"""Aegaeon in the simulator: one request's path, switches in time; and that no KV is ever lost."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.check.trial import Stand
from harness.engines import machine
from harness.engines.machine import Config, Served
from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.loop.recorder import Decision
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Move, Run
from harness.policy.events import Event, TurnEnded
from harness.policy.types import GIB, Batch, Host, Inst, Jobs, Plan
from systems.aegaeon import Aegaeon
from tests.harness.loop.scripted import Recorder
from tests.workloads.asked import asked
from workloads.models import shape

SHAPE = shape("llama-3.2-1b")._replace(max_tokens=2048)


def config(models: int = 2, gpus: int = 2, mem_gib: float | None = None, **more: Any) -> Config:
    """Return a config of small models without noise or host costs on H100s, or on what is left of them."""
    served = tuple(Served(f"m{k}", SHAPE, ttft_slo_s=10.0, tpot_slo_s=0.1) for k in range(models))
    plan = {s.name: Plan(1.0, 200.0, 60.0, "test") for s in served}
    fraction = 0.9 if mem_gib is None else mem_gib * 2**30 / 85520809984
    return Config(served, gpus=gpus, host="none", plan=plan, mem_fraction=fraction, process_bytes=GIB // 2, **more)


@cache
def priced(models: int) -> machine.Machine:
    return machine.machine(config(models))


def jobs(rows: list[tuple[float, int, int, int]], models: int) -> Jobs:
    """Return jobs from rows of (arrival, model, prompt, output)."""
    arrival_s, model, prompt, output = zip(*sorted(rows), strict=True)
    return asked((f"m{k}" for k in range(models)), arrival_s, model, prompt, output, 10.0, 0.1)


class Guard(Recorder):
    """A recorder that looks, whenever the policy is asked, at what runs and where KV lies."""

    engine: Sim

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        Recorder.decided(self, event, actions, now_s)
        look(self.engine)


def look(engine: Sim) -> None:
    """Check that no lane steps without its weights, who decodes has its KV there, and holders hold their blocks."""
    S = engine.S
    held: dict[int, int] = {}
    for r in range(int(S.s["arrived"])):
        q = S.requests[r]
        if q["home"] >= 0:
            held[int(q["home"])] = held.get(int(q["home"]), 0) + 1
        if q["state"] == state.RUN:
            assert q["home"] == S.batches[q["batch"]]["inst"], f"request {r} decodes away from its KV"
    for b in range(len(engine.names.batches)):
        i = S.insts[S.batches[b]["inst"]]
        for lane in (2 * b, 2 * b + 1):
            if S.lanes[lane]["busy"]:
                assert i["state"] in (state.IN, state.DRAINING, state.LEAVING), f"lane {lane} steps without weights"


def simulated(
    rows: list[tuple[float, int, int, int]], world: Config, refuse: int = 0, decision_s: float = 0.0, **fields: Any
) -> tuple[Any, list[Decision], Aegaeon, Sim]:
    """Serve rows: requests, decisions, the policy, the engine."""
    n = len(world.models)
    policy = Aegaeon(machine.cluster(world, False, priced(n), "gpu"), **fields)
    engine = Sim(world, policy.options, priced(n))
    log = Guard()
    log.engine = engine
    stand: Any = Stand(engine, refuse, lambda law, what: pytest.fail(f"{law}: {what}"))
    replay(policy, stand, jobs(rows, n), end_s=1000.0, log=log, decision_s=decision_s)
    return engine.S.requests, log.decisions, policy, engine


def test_the_path_of_one_request() -> None:
    """Weights of m0 came with an earlier one. A prefill, KV out over one link and in over the other, then 20 steps."""
    world = config()
    R, did, _, engine = simulated([(1.0, 0, 200, 21), (9.0, 0, 200, 21)], world)
    p, spec = engine.cluster.profile, priced(2).spec
    kv = 13 * machine.block_bytes(world, world.models[0])  # 201 tokens in blocks of 16
    inst = Inst("m0", (0,))
    steps = sum(p.step_s(inst, 1, 201 + k) for k in range(20))
    first = 9.0 + p.prefill_s(inst, 200)
    assert R["first"][1] == pytest.approx(first, rel=1e-9)
    assert R["done"][1] == pytest.approx(first + kv / spec.d2h + kv / spec.h2d + steps, rel=1e-6)
    groups, work = Batch(inst, 1), Batch(Inst("m0", (1,)))
    assert [d.actions for d in did if d.now_s >= 9.0] == [
        (Admit(1, groups), Run(groups, "prefill", steps=8, seqs=1)),
        (Admit(1, work), Move(1, Host()), Move(work, (1,)), Run(work, "decode", for_s=4.0)),
        (),
    ]
    load_s = p.load_s(inst, "host")
    assert R["first"][0] == pytest.approx(1.0 + load_s + p.prefill_s(inst, 200), rel=1e-9)
    assert R["done"][0] == pytest.approx(R["first"][0] + load_s + kv / spec.h2d + steps, rel=1e-6)  # KV overtakes


def test_a_switch_in_time() -> None:
    """Two models decode in turn: steps of the second begin one load after the first's turn, none is prefetched."""
    rows = [(1.0, 0, 200, 1500), (1.0, 1, 200, 1500)]
    R, did, policy, _ = simulated(rows, config(), prefetch=False, qmax_s=0.3)
    turns = [
        (d.now_s, d.event.batch.inst.model, d.event.ran_s)
        for d in did
        if isinstance(d.event, TurnEnded) and d.event.phase == "decode" and d.event.why == "time"
    ]
    S = policy.switch_s["m0"]
    both = [turn for turn in turns if turn[0] < R["done"].min()][1:]  # m0 was alone in the first round
    assert len(both) > 4
    for (t0, m0, _), (t1, m1, ran_s) in pairwise(both):
        assert m0 != m1
        assert t1 - t0 == pytest.approx(S + ran_s, abs=2e-3)  # KV travels beside the weights
    ahead = simulated(rows, config(), qmax_s=0.3)
    assert ahead[0]["done"].max() < R["done"].max()
    assert ahead[3].stats()["loads"] == 4  # once each on either GPU and never again: both fit, one ahead of its turn


def test_the_ladder_of_switches() -> None:
    """Each part that is switched off makes the same work end later."""
    rows = [(0.02 * k, k % 4, 400, 100) for k in range(40)]
    ends = []
    for preset in ("no-prefetch", "no-sync", "no-memory", "no-reuse"):
        fields: dict[str, Any] = dict(Aegaeon.presets[preset])
        ends.append(float(simulated(rows, config(4, mem_gib=7.0), **fields)[0]["done"].max()))
    assert ends == sorted(ends)
    assert ends[-1] > ends[0] + 17.7


def test_one_decision_a_turn() -> None:
    """Beside the three that a request has: it came, it was prefilled, it ended."""
    rows = [(0.05 * k, k % 4, 100, 200) for k in range(100)]
    _, did, _, _ = simulated(rows, config(4, 4))
    kinds = [type(d.event) for d in did]
    turns = kinds.count(TurnEnded)
    assert turns > 100
    assert len(did) - turns <= 3 * len(rows) + 1


@settings(max_examples=40)
@given(st.data())
def test_no_kv_is_lost(data: st.DataObject) -> None:
    """Random work, memory, refusals, thinking time and parts of Aegaeon: every request ends with all its tokens."""
    models, gpus = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    row = st.tuples(st.floats(0, 2), st.integers(0, models - 1), st.integers(1, 900), st.integers(1, 700))
    rows = data.draw(st.lists(row, min_size=1, max_size=25))
    parts: dict[str, st.SearchStrategy[Any]] = {
        "order": st.sampled_from(["split", "prefill", "decode"]),
        "group": st.integers(1, 8),
        "qmax_s": st.sampled_from([0.1, 4.0]),
        "load": st.sampled_from(["seconds", "requests"]),
        **dict.fromkeys(("refill", "sync", "prefetch"), st.booleans()),
    }
    fields = data.draw(st.fixed_dictionaries(parts))
    world = config(models, gpus, data.draw(st.sampled_from([3.2, 3.6, 7.0, None])), seed=data.draw(st.integers(0, 9)))
    refuse, decision_s = data.draw(st.sampled_from([0, 0, 3, 8])), data.draw(st.sampled_from([0.0, 2e-5, 0.03]))
    R, _, _, engine = simulated(rows, world, refuse, decision_s, **fields)
    assert (R["state"] == state.DONE).all()
    assert not engine.S.insts["blocks"].any()


def test_a_batch_larger_than_the_cap_moves_as_a_whole() -> None:
    """The engine makes room for the moves of any batch: 130 members where two step at once."""
    rows = [(0.001 * k, k % 2, 50, 40) for k in range(260)]
    R, *_, engine = simulated(rows, config(2, 2, batch_cap=2), qmax_s=0.5)
    assert (R["state"] == state.DONE).all()
    assert engine.S.s["transfer_spare"] >= 0
