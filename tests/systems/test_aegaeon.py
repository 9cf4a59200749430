"""Aegaeon by hand: quotas, groups, the order of a switch, one request's path; and that no KV is ever lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.check.trial import Stand
from harness.engines import machine
from harness.engines.machine import Config, Served
from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.engines.wallclock import NoProfile
from harness.loop.recorder import Decision, Recorder
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Evict, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, TurnEnded
from harness.policy.types import GIB, Batch, Cluster, Gpu, Host, Infeasible, Inst, Jobs, Model, Phase, Plan, Request
from harness.policy.view import BatchState, RequestState, Weights
from systems.aegaeon import Aegaeon, Group, Instance, Work, quotas
from systems.dedicated import Dedicated
from workloads.models import shape

# ------------------------------------------------------------------ Algorithm 2's quotas, theorem 3.1


def test_the_artifacts_worked_quota() -> None:
    """d = 0.1, t = 0.025, so n = 4 for each of three batches. With c = 3 alpha = 3 / (4 x 4) + 0.75 = 0.9375, q = 4."""
    assert quotas([4.0] * 3, 3.0) == pytest.approx([4.0] * 3)


def test_alpha_has_a_floor() -> None:
    """Two batches of 15 ms, c = 0.5: sum 1/n = 0.3, alpha would be 0.319, so 0.5: q = 0.5 / (6.67 x 0.2)."""
    assert quotas([0.1 / 0.015] * 2, 0.5) == pytest.approx([0.375] * 2)


def test_the_slowest_batch_gets_the_longest_turn() -> None:
    """Above the floor q = QMAX n_min / n."""
    assert quotas([2.0, 4.0, 8.0], 3.0) == pytest.approx([4.0, 2.0, 1.0])


def test_one_batch_switches_nothing() -> None:
    assert quotas([4.0], 0.0) == [4.0]
    assert quotas([4.0], 0.0, 2.5) == [2.5]


@given(st.lists(st.floats(0.05, 100.0), min_size=1, max_size=20), st.floats(0.01, 60.0), st.floats(0.1, 60.0))
def test_quotas_are_what_they_are_for(n: list[float], c: float, qmax_s: float) -> None:
    """No turn is longer than QMAX, no round spares more than ALPHA, and all batches get tokens for the same time."""
    q = quotas(n, c, qmax_s)
    assert all(0.0 < x <= qmax_s * (1 + 1e-9) for x in q)
    alpha = (sum(q) + c) / (q[0] * n[0])  # seconds of a round over seconds of target time that its tokens cover
    assert alpha >= 0.5 - 1e-9
    assert [x * k for x, k in zip(q, n, strict=True)] == pytest.approx([q[0] * n[0]] * len(n))


def active(models: int, rate_rps: float, service_s: float) -> float:
    """Return active models (with a request in service) by Theorem 3.1 of Aegaeon, SOSP 2025.

    As many GPUs are busy under scaling by request, which is why it stops at two or three models a GPU.
    """
    return models * -math.expm1(-rate_rps * service_s)


def test_active_models_of_the_paper() -> None:
    """0.037 a second to each of 100 models: 46.55 of them are active where a request takes 16.93 s. The paper prints
    16.79 s beside it, which gives 46.27."""
    assert active(100, 0.037, 16.93) == pytest.approx(46.55, abs=0.01)
    assert active(100, 0.037, 16.79) == pytest.approx(46.27, abs=0.01)


def test_active_models_in_the_simulator() -> None:
    """Poisson arrivals to eight models alone on their GPUs, 1.5 requests at a time: theorem 3.1 within 3 %."""
    models, n, rate_rps = 8, 4000, 2.0
    rng = np.random.default_rng(3)
    rows = [
        (t, int(m), 100, 400)
        for t, m in zip(np.cumsum(rng.exponential(1 / (rate_rps * models), n)), rng.integers(0, models, n), strict=True)
    ]
    world = config(models, models)
    engine = Sim(world, {}, priced(models))
    policy: Any = Dedicated(engine.cluster)
    replay(policy, engine, jobs(rows, models))
    R = engine.S.requests
    busy_s = 0.0
    for m in range(models):
        until_s = -math.inf
        for arrival, done in R[R["model"] == m][["arrival", "done"]].tolist():
            busy_s += max(0.0, done - max(arrival, until_s))
            until_s = max(until_s, done)
    service_s = float((R["done"] - R["arrival"]).mean())
    assert 0.5 < rate_rps * service_s < 3.0
    assert busy_s / float(R["done"].max()) == pytest.approx(active(models, rate_rps, service_s), rel=0.03)


# ------------------------------------------------------------------ a policy without an engine

LOAD_S, STEP_S = 2.0, 0.02


class Flat(NoProfile):
    """1 ms a prompt token, 20 ms a step, 2 s a load."""

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        return 1e-3 * tokens

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        return STEP_S

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        return LOAD_S

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        return 0.05


class Still:
    """A view of a world in which nothing moves."""

    now_s = 0.0

    def __init__(self, *held: Inst) -> None:
        self.held = held

    def insts(self, home: int) -> tuple[Inst, ...]:
        return self.held

    def weights(self, inst: Inst) -> Weights:
        return "in" if inst in self.held else "out"

    def request(self, rid: int) -> Any:
        return RequestState(None, 10, 0, Host())

    def lane(self, batch: Batch, phase: Phase) -> Run:
        return Run(batch, phase)

    def batch(self, batch: Batch) -> Any:
        return BatchState(0, 0, 0, 0, 0, 0, 0, 0, 0.0)


def cluster(
    gpus: int = 4, models: str = "abcd", tp: Mapping[str, int] | None = None, node_gpus: int = 8, tokens: int = 1000
) -> Cluster:
    """Return a cluster with room for so many tokens beside any model's weights, and for two models."""
    return Cluster(
        tuple(Gpu("flat", k // node_gpus, 1000 + tokens, 100, ()) for k in range(gpus)),
        {m: Model(1, (tp or {}).get(m, 1), 1000, 1, 1, 400, 1.0, 0.1) for m in models},
        {m: Plan(1.0, 100, 100, "test") for m in models},
        Flat(),
    )


def tell(policy: Aegaeon, event: Event, *held: Inst) -> list[Action]:
    return list(policy.on(event, Still(*held)))  # type: ignore[arg-type]


def arrive(policy: Aegaeon, rid: int, model: str, prompt: int = 100) -> list[Action]:
    return tell(policy, Arrived(Request(rid, model, 0.0, prompt, 1.0, 0.1)))


def roles(policy: Aegaeon) -> list[tuple[tuple[int, ...], bool, bool]]:
    return [(x.gpus, x.prefills, x.decodes) for x in policy.all]


def test_six_of_sixteen_prefill() -> None:
    policy = Aegaeon(cluster(16))
    assert sum(x.prefills for x in policy.all) == 6
    assert [x.gpus[0] for x in policy.all if x.prefills] == [0, 1, 2, 8, 9, 10]  # three in each node
    assert all(x.prefills != x.decodes for x in policy.all)


def test_groups_of_gpus_have_both_phases_too() -> None:
    policy = Aegaeon(cluster(8, tp={"a": 2}))
    assert roles(policy)[:2] == [((0, 1), True, False), ((2, 3), False, True)]
    assert [x.prefills for x in policy.all[2:]] == [True, True, False, False]


def test_nodes_too_small_for_both_phases_share() -> None:
    policy = Aegaeon(cluster(3, node_gpus=2))
    assert roles(policy) == [((0,), True, False), ((1,), False, True), ((2,), False, True)]


def test_one_gpu_is_not_enough_for_two_phases() -> None:
    with pytest.raises(Infeasible, match="cannot both prefill and decode"):
        Aegaeon(cluster(1))
    assert roles(Aegaeon(cluster(1), order="prefill")) == [((0,), True, True)]


def test_groups_fill_up_then_the_least_loaded_instance_gets_the_next() -> None:
    policy = Aegaeon(cluster(6), group=3)  # instances 0 and 1 prefill
    for rid, (model, prompt) in enumerate([("a", 900), ("a", 10), ("b", 10), ("a", 10), ("a", 10), ("c", 10)]):
        arrive(policy, rid, model, prompt)
    groups = [[(g.batch.inst.model, list(g.rids)) for g in x.groups] for x in policy.all[:2]]
    assert groups == [[("a", [0, 1, 3]), ("c", [5])], [("b", [2]), ("a", [4])]]
    assert policy.busy(policy.all[0], "d") == pytest.approx(LOAD_S + 0.93)  # a's weights are on their way already
    assert policy.busy(policy.all[1], "d") == pytest.approx(LOAD_S + 0.02)  # was less when 4 came, more when 5 did


def test_models_alternate_over_nodes() -> None:
    """llm.py: a model's index modulo the count of nodes; so all its requests meet in one batch."""
    policy = Aegaeon(cluster(8, models="abc", node_gpus=4))
    nodes = {m: {x.host.node for x in policy.prefill_at[m] + policy.decode_at[m]} for m in "abc"}
    assert nodes == {"a": {0}, "b": {1}, "c": {0}}
    for rid, model in enumerate("abcabc"):
        batch = next(a.batch for a in arrive(policy, rid, model) if isinstance(a, Admit))
        tell(policy, Prefilled(rid, batch))
        tell(policy, TurnEnded(batch, "prefill", "empty", 1, 0.1))
    assert sorted(list(w.rids) for x in policy.all for w in x.works) == [[0, 3], [1, 4], [2, 5]]
    wide = Aegaeon(cluster(6, models="ab", tp={"b": 4}, node_gpus=6), order="prefill")
    homes = {m: [x.gpus for x in wide.all if x in wide.prefill_at[m] + wide.decode_at[m]] for m in "ab"}
    assert homes == {"a": [(0, 1, 2, 3), (4,), (5,)], "b": [(0, 1, 2, 3)]}


def test_load_by_requests_counts_prompts() -> None:
    policy = Aegaeon(cluster(6), load="requests")
    for rid, (model, prompt) in enumerate([("a", 10), ("a", 10), ("b", 900), ("c", 10)]):
        arrive(policy, rid, model, prompt)
    assert [[g.batch.inst.model for g in x.groups] for x in policy.all[:2]] == [["a"], ["b", "c"]]


def test_a_group_counts_all_it_had_or_all_it_has() -> None:
    for refill, groups in ((False, 2), (True, 1)):
        policy = Aegaeon(cluster(2), group=2, refill=refill)
        arrive(policy, 0, "a")
        arrive(policy, 1, "a")
        tell(policy, Prefilled(0, Batch(Inst("a", (0,)), 1)))
        arrive(policy, 2, "a")
        assert len(policy.groups["a"]) == groups


def test_two_groups_of_a_model_on_an_instance_are_two_batches() -> None:
    policy = Aegaeon(cluster(2), group=1)
    batches = [next(a.batch for a in arrive(policy, k, "a") if isinstance(a, Admit)) for k in range(3)]
    assert len(set(batches)) == 3
    tell(policy, Finished(0, batches[0], "failed"))  # the first ends as it is
    tell(policy, TurnEnded(batches[0], "prefill", "empty", 1, 0.1))
    assert next(a.batch for a in arrive(policy, 3, "a") if isinstance(a, Admit)) == batches[0]


def test_a_batch_takes_what_memory_holds() -> None:
    policy = Aegaeon(cluster(5, tokens=1000), group=100)  # instances 2, 3 and 4 decode
    for rid in range(8):
        arrive(policy, rid, "a", 300)
    for rid in range(8):
        tell(policy, Prefilled(rid, Batch(Inst("a", (0,)), 1)))
    assert [[list(w.rids) for w in x.works] for x in policy.all] == [[], [], [[0, 1], [6, 7]], [[2, 3]], [[4, 5]]]


def works(policy: Aegaeon, x: Instance, held: list[tuple[str, int, int]]) -> None:
    """Give an instance batches of (model, requests, tokens of each)."""
    rid = 0
    for model, n, tokens in held:
        tag = 2 * sum(w.batch.inst.model == model for w in x.works)
        batch = Batch(Inst(model, x.gpus[: policy.cluster.models[model].tp]), tag)
        w = Work(x, batch, dict.fromkeys(range(rid, rid + n)), n * tokens)
        x.works.append(w)
        for r in w.rids:
            policy.where[r], policy.tokens[r] = w, tokens - 10  # 10 were made
        rid += n


def test_a_round_has_batches_of_a_model_side_by_side_and_their_quotas() -> None:
    policy = Aegaeon(cluster(2, tokens=1000))
    x = policy.all[1]
    works(policy, x, [("a", 2, 400), ("b", 1, 100), ("a", 2, 400), ("c", 1, 100)])
    list(policy.begin_round(x, Still()))  # type: ignore[arg-type]
    assert [(w.batch.inst.model, w.batch.tag) for w in x.round] == [("a", 0), ("a", 2), ("b", 0), ("c", 0)]
    c, n = 3 * LOAD_S, 0.1 / STEP_S  # distinct models: three; n = 5
    assert [w.q for w in x.round] == pytest.approx(quotas([n] * 4, c))


def test_batches_of_a_model_are_formed_anew_first_come_first_served() -> None:
    policy = Aegaeon(cluster(2, tokens=1000))
    x = policy.all[1]
    works(policy, x, [("a", 1, 300), ("a", 2, 300), ("a", 1, 300)])
    assert [a for a in policy.begin_round(x, Still()) if isinstance(a, Admit)] == [  # type: ignore[arg-type]
        Admit(1, Batch(Inst("a", (1,)), 0)),
        Admit(3, Batch(Inst("a", (1,)), 2)),
    ]
    assert [(list(w.rids), w.ctx) for w in x.works] == [([0, 1], 600), ([2, 3], 600)]


def test_a_switch_is_one_answer_in_the_papers_order() -> None:
    policy = Aegaeon(cluster(2, tokens=1000))
    x = policy.all[1]
    a, b = Batch(Inst("a", (1,))), Batch(Inst("b", (1,)))
    works(policy, x, [("a", 1, 100), ("b", 1, 100)])
    x.models, x.job, x.round, x.home = ["a"], x.works[0], deque([x.works[1]]), {a: None}
    x.works[1].q, x.works[1].t = 0.5, STEP_S
    actions = tell(policy, TurnEnded(a, "decode", "time", 10, 0.2), a.inst)
    assert actions == [
        Move(a, Host()),
        Evict(a.inst, drain=False),
        Load(b.inst),
        Move(b, (1,)),
        Run(b, "decode", for_s=0.5),
    ]


def test_what_comes_next_is_prefetched_where_it_fits() -> None:
    policy = Aegaeon(cluster(2, tokens=3000))
    x = policy.all[1]
    works(policy, x, [("a", 1, 100), ("b", 1, 100)])
    kinds = [type(a).__name__ for a in policy.next(x, Still())]  # type: ignore[arg-type]
    assert kinds == ["Load", "Move", "Run", "Load"]  # the last one ahead of its time
    batches = [w.batch for w in x.works]
    for batch in batches:
        event = TurnEnded(batch, "decode", "time", 10, 0.2)
        kinds = [type(a).__name__ for a in tell(policy, event, *(b.inst for b in batches))]
        assert kinds == ["Move", "Move", "Run"]  # both are in: nothing is loaded any more
    assert set(x.models) == {"a", "b"}
    without = Aegaeon(cluster(2, tokens=3000), prefetch=False)
    works(without, without.all[1], [("a", 1, 100), ("b", 1, 100)])
    begin(without, without.all[1])
    assert without.all[1].models == ["a"]


def begin(policy: Aegaeon, x: Instance) -> None:
    """Begin its first turn."""
    list(policy.next(x, Still()))  # type: ignore[arg-type]


def test_without_synchronisation_stages_wait_for_each_other() -> None:
    policy = Aegaeon(cluster(2), sync=False, prefetch=False)
    x = policy.all[1]
    works(policy, x, [("a", 1, 100), ("b", 1, 100)])
    a, b = (w.batch for w in x.works)
    x.models, x.job, x.home = ["a"], x.works[0], {a: None}
    x.round.append(x.works[1])
    assert tell(policy, TurnEnded(a, "decode", "time", 10, 0.2), a.inst) == [Move(a, Host())]
    assert tell(policy, Done(Move(a, Host()))) == [Evict(a.inst, drain=False), Load(b.inst)]
    assert tell(policy, Done(Load(b.inst))) == [Move(b, (1,))]
    actions = tell(policy, Done(Move(b, (1,))))
    assert [type(s).__name__ for s in actions] == ["Run"]


def test_weights_whose_load_failed_are_asked_for_again() -> None:
    policy = Aegaeon(cluster(2))
    x = policy.all[1]
    works(policy, x, [("a", 1, 100)])
    a = x.works[0].batch
    begin(policy, x)
    turn = Run(a, "decode", for_s=4.0)
    stuck = TurnEnded(a, "decode", "stuck", 0, 0.0)
    assert tell(policy, stuck) == [Move(a, Host()), Load(a.inst), Move(a, (1,)), turn]
    assert tell(policy, stuck, a.inst) == [Move(a, Host()), Move(a, (1,)), turn]  # they are in: only KV goes and comes


def test_the_prefill_first_baseline_interrupts_a_turn() -> None:
    policy = Aegaeon(cluster(1, models="ab"), order="prefill")
    x = policy.all[0]
    works(policy, x, [("a", 1, 100)])
    begin(policy, x)
    x.job.rids = {9: None} if x.job else {}  # type: ignore[union-attr]
    assert Run(Batch(Inst("a", (0,))), "decode", steps=0) in arrive(policy, 7, "b")
    x.works[0].q = 3.0
    actions = tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "steps", 10, 1.0))
    assert isinstance(x.job, Group)
    assert actions[-1] == Run(Batch(Inst("b", (0,)), 1), "prefill", steps=8, seqs=1)
    assert [(w.batch.inst.model, w.q) for w in x.round] == [("a", 2.0)]  # what is left of its turn


def test_the_decode_first_baseline_lets_prompts_wait() -> None:
    policy = Aegaeon(cluster(1, models="ab"), order="decode")
    x = policy.all[0]
    works(policy, x, [("a", 1, 100)])
    begin(policy, x)
    assert arrive(policy, 7, "b") == [Admit(7, Batch(Inst("b", (0,)), 1))]
    tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "time", 10, 4.0))
    assert isinstance(x.job, Work)
    tell(policy, Finished(0, Batch(Inst("a", (0,))), "done"))
    tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "empty", 10, 1.0))
    assert isinstance(x.job, Group)


# ------------------------------------------------------------------ in the simulator

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
    a, m, p, o = (np.array(column) for column in zip(*sorted(rows), strict=True))
    slo = np.full(len(rows), 10.0)
    names = tuple(f"m{k}" for k in range(models))
    return Jobs(names, a.astype(float), m.astype(np.int32), p.astype(np.int32), o.astype(np.int32), slo, slo / 100)


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
    rows: list[tuple[float, int, int, int]],
    world: Config,
    refuse: int = 0,
    decision_s: float = 0.0,
    **fields: Any,
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


def test_phases_have_gpus_of_their_own() -> None:
    rows = [(0.01 * k, k % 3, 100, 40) for k in range(60)]
    _, did, policy, _ = simulated(rows, config(3, 5))
    prefills = {g for x in policy.all if x.prefills for g in x.gpus}
    for d in did:
        for a in d.actions:
            if isinstance(a, Run):
                assert (a.batch.inst.place[0] in prefills) == (a.phase == "prefill")  # type: ignore[index]


def test_one_decision_a_turn() -> None:
    """Beside the three that a request has: it came, it was prefilled, it ended."""
    rows = [(0.05 * k, k % 4, 100, 200) for k in range(100)]
    _, did, _, _ = simulated(rows, config(4, 4))
    kinds = [type(d.event) for d in did]
    turns = kinds.count(TurnEnded)
    assert turns > 100
    assert len(did) - turns <= 3 * len(rows) + 1


def test_preset_released_differs_only_where_it_says() -> None:
    policy = Aegaeon(cluster(2), **Aegaeon.presets["released"])  # type: ignore[arg-type]
    assert policy.refill
    assert policy.load == "requests"
    assert policy.switch_s["a"] == pytest.approx(1000 / (0.15 * 32 * 2**30))


@settings(max_examples=40)
@given(st.data())
def test_no_kv_is_lost(data: st.DataObject) -> None:
    """Random work, memory, refusals, thinking time and parts of Aegaeon: every request ends with all its tokens."""
    models, gpus = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    row = st.tuples(st.floats(0, 2), st.integers(0, models - 1), st.integers(1, 900), st.integers(1, 700))
    rows = data.draw(st.lists(row, min_size=1, max_size=25))
    fields = data.draw(
        st.fixed_dictionaries(
            {
                "order": st.sampled_from(["split", "prefill", "decode"]),
                "group": st.integers(1, 8),
                "refill": st.booleans(),
                "qmax_s": st.sampled_from([0.1, 4.0]),
                "sync": st.booleans(),
                "prefetch": st.booleans(),
                "load": st.sampled_from(["seconds", "requests"]),
            }
        )
    )
    world = config(models, gpus, data.draw(st.sampled_from([3.2, 3.6, 7.0, None])), seed=data.draw(st.integers(0, 9)))
    refuse, decision_s = data.draw(st.sampled_from([0, 0, 3, 8])), data.draw(st.sampled_from([0.0, 2e-5, 0.03]))
    R, _, _, engine = simulated(rows, world, refuse, decision_s, **fields)
    assert (R["state"] == state.DONE).all()
    assert not engine.S.insts["blocks"].any()


def test_noise_and_overload() -> None:
    """Three times more than the GPUs can do: everything ends, in the order of turns."""
    rows = [(0.002 * k, k % 6, 300, 150) for k in range(600)]
    R, *_ = simulated(rows, replace(config(6, 3), noise=0.05))
    assert (R["state"] == state.DONE).all()
    assert math.isfinite(R["first"].max())


def test_a_batch_larger_than_the_cap_moves_as_a_whole() -> None:
    """The engine makes room for the moves of any batch: 130 members where two step at once."""
    rows = [(0.001 * k, k % 2, 50, 40) for k in range(260)]
    R, *_, engine = simulated(rows, config(2, 2, batch_cap=2), qmax_s=0.5)
    assert (R["state"] == state.DONE).all()
    assert engine.S.s["transfer_spare"] >= 0
