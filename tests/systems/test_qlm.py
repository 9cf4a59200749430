"""QLM by hand: the estimator, the program against brute force, swaps, fairness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.machine import Config, Served
from harness.engines.wallclock import NoProfile
from harness.policy.actions import Action, Admit, Evict, Load, Move
from harness.policy.placement import instances
from harness.policy.types import Cluster, Gpu, Host, Infeasible, Inst, Model, Plan
from systems.qlm import Group, M, Qlm, Z, partition
from tests.cases import cases
from tests.harness.loop.scripted import Recorder
from tests.systems.by_hand import Flat, ran
from tests.there import there
from tests.workloads.asked import asked
from workloads.models import shape

LOAD_S, STEP_S, PREFILL_S = 2.0, 0.02, 0.1
O, B = 100.0, 10
D = O * STEP_S


FLAT = Flat(STEP_S, LOAD_S, prompt=PREFILL_S)


class LastBits(Flat):
    """The same costs on another processor: each differs in its last bits."""

    def __init__(self, seed: int) -> None:
        super().__init__(STEP_S, LOAD_S, prompt=PREFILL_S)
        rng = np.random.default_rng(seed)
        self.off = {(m, what): 1.0 + float(rng.integers(-4, 5)) * 2.0**-52 for m in "abcde" for what in "psl"}

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        return PREFILL_S * self.off[inst.model, "p"]

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        return STEP_S * self.off[inst.model, "s"]

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        return LOAD_S * self.off[inst.model, "l"]


def cluster(
    gpus: int = 1,
    models: str = "abcde",
    tp: dict[str, int] | None = None,
    node_gpus: int = 8,
    profile: NoProfile | None = None,
) -> Cluster:
    """Return GPUs with room for B requests of 100 + 100 tokens beside any model's weights."""
    return Cluster(
        tuple(Gpu("flat", k // node_gpus, 1000 + 200 * B, 100, ()) for k in range(gpus)),
        {m: Model(1, (tp or {}).get(m, 1), 1000, 1, 1, 1000, 1.0, 1.0) for m in models},
        {m: Plan(1.0, 100, O, "test") for m in models},
        profile or FLAT,
    )


def policy(
    gpus: int, groups: list[list[tuple[str, int, float]]], profile: NoProfile | None = None, **fields: Any
) -> Qlm:
    """Return a policy with groups of (model, requests, seconds to the deadline) queued; a is in on every instance."""
    q = Qlm(cluster(gpus, profile=profile), **fields)
    rid = iter(range(10_000))
    for queue, held in zip(q.queues, groups, strict=True):
        queue.models = ["a"]
        for m, n, due_s in held:
            q.formed += 1
            g = Group(q.formed, m, float(q.formed), due_s, 0, deque(next(rid) for _ in range(n)), queue)
            queue.groups.append(g)
    return q


# ------------------------------------------------------------------ RWT estimator


def test_symbols_by_hand() -> None:
    r = Qlm(cluster()).rates["a"]
    assert (r.B, r.O) == (B, O)
    assert pytest.approx((PREFILL_S, LOAD_S, D), rel=1e-5) == (r.P, r.S, r.D)  # whole multiples of 2^-20 s
    assert r.Theta == pytest.approx(1000 / 3)


def test_waiting_time_by_hand() -> None:
    q = policy(1, [[("a", 5, 1.0)]], rwt="mean")
    assert q.waiting_s(q.queues[0].groups[0]) == pytest.approx(5 * 100 / (1000 / 3))  # 1.5 s
    q = policy(1, [[("a", 5, 1.0)]])
    assert q.waiting_s(q.queues[0].groups[0]) == pytest.approx(1.5 + Z * math.sqrt(5) * 0.3)  # sigma = O


def test_completions_count_swaps_and_drains() -> None:
    q = policy(1, [[("a", 5, 1.0), ("b", 5, 3.0), ("b", 2, 9.0)]], rwt="mean")
    ends = [q.after(q.queues[0], q.queues[0].groups[:k], 0.0) for k in range(4)]
    assert [end.at_s for end in ends] == pytest.approx([0.0, 1.5, 1.5 + D + LOAD_S + 1.5, 7.0 + 0.6])
    assert ends[1].sum_s == pytest.approx(1.5 + PREFILL_S - 1.0)
    assert ends[3].late_s == pytest.approx(7.0 + PREFILL_S - 3.0)


# ------------------------------------------------------------------ the program


def value(q: Qlm, orders: list[list[Group]]) -> float:
    """Return the sum of penalties + M v of an order for each queue."""
    ends = [q.after(queue, groups, 0.0) for queue, groups in zip(q.queues, orders, strict=True)]
    return sum(end.sum_s for end in ends) + M * max(0.0, *(end.late_s for end in ends))


def every(q: Qlm) -> Iterator[list[list[Group]]]:
    """Yield all ways to order all groups in all queues."""
    groups = [g for queue in q.queues for g in queue.groups]
    for where in product(range(len(q.queues)), repeat=len(groups)):
        split = [[g for g, k in zip(groups, where, strict=True) if k == j] for j in range(len(q.queues))]
        yield from ([list(order) for order in orders] for orders in product(*(permutations(part) for part in split)))


def drawn(seed: int, n: int, queues: int, profile: NoProfile | None = None) -> Qlm:
    rng = np.random.default_rng(seed)
    kinds = [(str(rng.choice(list("abc"))), int(rng.integers(1, 8)), float(rng.uniform(-4, 12))) for _ in range(n)]
    return policy(queues, [kinds, *([] for _ in range(queues - 1))], profile, rwt="mean")


@cases("seed", range(12))
def test_program_is_brute_force(seed: int) -> None:
    q = drawn(seed, 2 + seed % 4, 2)
    edf = q.edf(0.0)
    solution = there(q.solved(q.relaxed(edf, 0.0), 0.0))
    assert sorted(g.id for order in solution for g in order) == list(range(1, q.formed + 1))
    least = min(value(q, orders) for orders in every(q))
    assert value(q, solution) == least


@cases("seed", range(12))
def test_last_bits_of_costs_decide_nothing(seed: int) -> None:
    """Cost tables differ in their last bits between processors, which must not choose between plans as good."""
    plans = []
    for profile in (FLAT, *map(LastBits, range(4))):
        q = drawn(seed, 2 + seed % 6, 3, profile)
        edf = q.edf(5.0)
        best = there(q.solved(q.relaxed(edf, 5.0), 5.0))
        plans.append([[[g.id for g in order] for order in orders] for orders in (edf, best)])
    assert plans == [plans[0]] * len(plans)


def test_one_model_with_loose_slos_edf_is_as_good() -> None:
    q = policy(2, [[("a", 4, 900.0 + k) for k in range(5)], []], rwt="mean")
    edf = q.edf(0.0)
    solution = there(q.solved(q.relaxed(edf, 0.0), 0.0))
    assert value(q, edf) == pytest.approx(value(q, solution), rel=1e-3)
    assert q.relaxed(solution, 0.0) == 0.0


def test_too_many_groups_are_left_to_edf() -> None:
    q = policy(2, [[("abcde"[k % 5], 3, float(k)) for k in range(11)], []])
    assert q.solved(1e9, 0.0) is None
    q.schedule(0.0)
    assert sorted(g.id for queue in q.queues for g in queue.groups) == list(range(1, 12))


def test_partition_does_every_job_once() -> None:
    full, left, right = (frozenset(x) for x in ((1, 2), (1,), (2,)))
    none: frozenset[int] = frozenset()
    first = [(none, 0.0, 0.0), (left, 1.0, 1.0), (full, 3.0, 1.0), (full, 2.0, 9.0)]
    second = [(none, 0.0, 0.0), (right, 1.5, 4.0)]
    assert partition([first, second], 1.0) == (2, 0)  # 3 + 1, not 2 + 9 nor 2.5 + 4
    assert partition([first, second], 0.125) == (1, 1)  # 2.5 + .5, not 2 + 1.125
    assert partition([first[:1], second], 1.0) == (0, 1)
    assert partition([first[1:2], [(full, 1.0, 1.0)]], 1.0) is None


def test_instances_share_gpus_by_degree_and_work() -> None:
    alike = dict.fromkeys("abcde", 1.0)
    assert instances(cluster(3), alike) == [(0,), (1,), (2,)]
    assert instances(cluster(2, tp={"a": 2}), alike) == [(0, 1)]
    assert instances(cluster(6, tp={"a": 4}), alike) == [(0, 1, 2, 3), (4,), (5,)]
    assert instances(cluster(8, tp={"a": 4}), alike | {"a": 20.0}) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    both = {"a": 4, "b": 4}
    each = [(0, 1, 2, 3), (4, 5, 6, 7), (8,), (9,), (10,)]
    assert instances(cluster(11, tp=both), alike | {"c": 40.0}) == each  # one for each, though a and b have little work
    assert instances(cluster(10, tp=both), alike | {"c": 40.0}) == [(0, 1, 2, 3), *((g,) for g in range(4, 10))]
    assert len(instances(cluster(10, tp=both), alike | {"c": 40.0}, homes=True)) == 4  # no more than models
    assert instances(cluster(4, tp={"a": 2}, node_gpus=3), alike | {"a": 9.0}) == [(0, 1), (2,), (3,)]
    with pytest.raises(Infeasible, match="no node has 2 GPUs"):
        instances(cluster(2, tp={"a": 2}, node_gpus=1), alike)


# ------------------------------------------------------------------ in the simulator

SHAPE = shape("llama-3.2-1b")


def simulated(
    rows: list[tuple[float, int, int, int, float]], models: int = 2, gpus: int = 1, **fields: Any
) -> tuple[Any, list[tuple[float, Action]], Qlm, Any]:
    """Serve rows of (arrival, model, prompt, output, SLO): requests, actions with times, the policy, counts."""
    served = tuple(Served(f"m{k}", SHAPE._replace(max_tokens=2048)) for k in range(models))
    arrival_s, model, prompt, output, slo_s = zip(*rows, strict=True)
    jobs = asked((s.name for s in served), arrival_s, model, prompt, output, slo_s, slo_s)
    means = float(np.mean(jobs.prompt_tokens)), float(np.mean(jobs.output_tokens))
    plan = {s.name: Plan(1.0, *means, "test") for s in served}
    config = Config(served, gpus=gpus, host="none", plan=plan)
    log = Recorder()
    _, engine, q = ran(Qlm, config, jobs, log=log, **fields)
    did = [(d.now_s, action) for d in log.decisions for action in d.actions]
    assert not any(g.n for queue in q.queues for g in queue.groups)
    return engine.S.requests, did, q, engine.stats()


def test_a_swap_step_by_step() -> None:
    """Model 1 is asked for while model 0 serves: it waits for the drain, then for its load; 0 comes back after it."""
    R, did, q, stats = simulated([(1.0, 0, 200, 100, 0.2), (1.1, 1, 200, 50, 0.2), (1.2, 0, 200, 30, 0.2)], delta=0.001)
    S = q.rates["m1"].S
    order: list[tuple[float, str, Any]] = []
    for t, action in did:
        match action:
            case Load(inst) | Evict(inst):
                order.append((t, type(action).__name__, inst))
            case Admit(who):
                order.append((t, "Admit", who))
    m0, m1 = Inst("m0", (0,)), Inst("m1", (0,))
    done = R["done"].tolist()
    swaps = [("Evict", m0), ("Load", m1), ("Admit", 1)], [("Evict", m1), ("Load", m0), ("Admit", 2)]
    assert [o[1:] for o in order] == [("Load", m0), ("Admit", 0), *swaps[0], *swaps[1]]
    assert [o[0] for o in order] == pytest.approx([0.0, 1.0, *[done[0]] * 3, *[done[1]] * 3])
    first = [q.rates[m].P for m in ("m1", "m0")]
    assert R["first"][1] == pytest.approx(done[0] + S + first[0], abs=2e-3)
    assert R["first"][2] == pytest.approx(done[1] + S + first[1], abs=2e-3)
    assert stats["loads"] == 2


def test_each_rung_of_the_ladder_is_slower_than_the_last() -> None:
    rows = [(0.5 * k, k % 3, 100, 50, 0.2) for k in range(60)]
    first = [float(np.median(simulated(rows, 3, way=w)[0]["first"])) for w in ("host", "pool", "sleep", "disk", "cold")]
    assert first == sorted(first)


LOOSE = [(0.01 * k, 0, 100, 1500, 3600.0) for k in range(40)]  # a batch class that would run for seconds
TIGHT = (1.0, 1, 100, 20, 3.0)  # an interactive request of another model


def test_a_tight_group_evicts_a_loose_one_and_its_kv_comes_home() -> None:
    R, did, _, stats = simulated([*LOOSE, TIGHT])
    out = [t for t, a in did if isinstance(a, Move) and a.to == Host()]
    back = [t for t, a in did if isinstance(a, Move) and a.to == (0,)]
    assert len(out) == len(back) == len(LOOSE)
    assert stats["preemptions"] == 0
    assert R["first"][-1] - 1.0 < 3.0
    assert out[0] == pytest.approx(1.0)


def test_drain_waits_and_recompute_moves_nothing() -> None:
    drain = simulated([*LOOSE, TIGHT], evict="drain")
    assert not [a for _, a in drain[1] if isinstance(a, Move)]
    assert drain[0]["first"][-1] > drain[0]["done"][: len(LOOSE)].max()
    again = simulated([*LOOSE, TIGHT], evict="recompute")
    assert {a.to for _, a in again[1] if isinstance(a, Move)} == {None}
    assert again[0]["first"][-1] - 1.0 < 3.0


def test_a_cold_model_does_not_starve_behind_a_hot_one() -> None:
    hot = [(0.002 * k, 0, 400, 600, 0.2) for k in range(6000)]
    R, *_ = simulated(sorted([*hot, (3.0, 1, 100, 20, 0.2)]), delta=1.0)
    cold = int(np.flatnonzero(R["model"] == 1)[0])
    assert R["first"][cold] < 0.7 * R["done"].max()
    # nearly all that come after it, came after it
    assert (R["arrival"][R["first"] > R["first"][cold]] > 3.0).mean() > 0.9


@settings(max_examples=25)
@given(st.data())
def test_no_request_is_lost(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 25))
    lengths, slo_s = (st.integers(1, 600), st.integers(1, 80)), st.sampled_from([0.1, 5.0, math.inf])
    row = st.tuples(st.floats(0, 3), st.integers(0, 3), *lengths, slo_s)
    rows = sorted(data.draw(st.lists(row, min_size=n, max_size=n)))
    parts: dict[str, st.SearchStrategy[Any]] = {
        "way": st.sampled_from(["host", "pool", "sleep"]),
        "evict": st.sampled_from(["host", "recompute", "drain"]),
        "solver": st.sampled_from(["milp", "edf"]),
        "delta": st.sampled_from([0.5, 4.0]),
    }
    fields = data.draw(st.fixed_dictionaries(parts))
    R, *_ = simulated(rows, 4, data.draw(st.integers(1, 3)), **fields)
    assert np.isfinite(R["done"]).all()
