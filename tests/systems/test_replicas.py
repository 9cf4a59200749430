"""Copies of models: where they go, who is sent to them, and AlpaServe's search for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.machine import Config
from harness.engines.sim.engine import Sim
from harness.loop.system import find
from harness.policy.actions import Admit, Drop, Load
from harness.policy.events import Finished, Woke
from harness.policy.placement import busy, copies, footprint, one_request
from harness.policy.types import Cluster, Gpus, Request, Unsupported
from systems.alpaserve import AlpaServe, Copies, Selection, Workload, by_group, with_copy
from tests.cases import cases
from tests.systems.by_hand import ran
from tests.systems.test_elastic import jobs, machine

HOT = (8.0, 2.0, 1.0, 1.0)  # requests per second of four 8B models


def cluster(gpus: int, rates: tuple[float, ...] = HOT, kv_gib: float = 40.0) -> Cluster:
    """Return GPUs that hold two 8B models each, and KV memory for much."""
    return Sim(machine(len(rates), kv_gib, gpus=gpus, rates=rates)).cluster


def loads(known: Cluster, places: dict[str, list[Gpus]]) -> list[float]:
    """Return busy seconds a second of each GPU, as parts of what all do."""
    each = {m: busy(known, m, at[0]) / len(at) for m, at in places.items()}
    whole = sum(busy(known, m, at[0]) for m, at in places.items())
    here = ([m for m, at in places.items() for place in at if g in place] for g in range(len(known.gpus)))
    return [sum(each[m] for m in models) / whole for models in here]


def test_the_hot_model_gets_copies_until_gpus_are_alike() -> None:
    """8, 2, 1, 1 req/s on three GPUs are 8, 3 and 1; a copy of m0 makes 4, 3 and 5, two of m3 then 4.3, 3.3 and 4.3."""
    known = cluster(3)
    homes = {"m0": (0,), "m1": (1,), "m2": (1,), "m3": (2,)}
    assert loads(known, {m: [at] for m, at in homes.items()}) == pytest.approx([8 / 12, 3 / 12, 1 / 12])
    placed = copies(known, homes)
    assert placed == {"m0": [(0,), (2,)], "m1": [(1,)], "m2": [(1,)], "m3": [(2,), (1,), (0,)]}
    assert loads(known, placed) == pytest.approx([(4 + 1 / 3) / 12, (3 + 1 / 3) / 12, (4 + 1 / 3) / 12])


@cases(("gpus", "rates"), [(1, HOT), (2, (3.0, 3.0)), (2, (0.0, 0.0, 0.0))])
def test_no_copy_where_none_helps(gpus: int, rates: tuple[float, ...]) -> None:
    known = cluster(gpus, rates)
    homes = {m: (k % gpus,) for k, m in enumerate(known.models)}
    assert copies(known, homes) == {m: [at] for m, at in homes.items()}


def test_copies_have_room_beside_all_others() -> None:
    """Without KV memory to spare there is room for the homes alone."""
    known = cluster(2, HOT, kv_gib=1.2)
    homes = {"m0": (0,), "m1": (1,), "m2": (1,), "m3": (0,)}
    assert all(len(places) == 1 for places in copies(known, homes).values())
    ample = copies(cluster(2, HOT, kv_gib=40.0), homes)
    assert len(ample["m0"]) == 2
    for g, gpu in enumerate(known.gpus):
        here = [known.models[m] for m, places in ample.items() if any(g in place for place in places)]
        assert sum(footprint(m, False) + one_request(m) for m in here) <= gpu.mem_bytes + 40 * 2**30


@cases("name", ["static", "elastic"])
def test_requests_go_to_the_copy_with_the_fewest(name: str) -> None:
    """Sixty requests of the hot model at once are divided between its copies."""
    config = machine(2, 40.0, gpus=2, rates=(8.0, 1.0))
    load = jobs(config, np.arange(60) * 1e-3, np.zeros(60, int), np.random.default_rng(1))
    rows, *_ = ran(name, config, load, replicas=True)
    counts = [rows["gpus"].to_pylist().count(str(g)) for g in (0, 1)]
    assert sum(counts) == 60
    assert min(counts) >= 25
    alone, *_ = ran(name, config, load)
    assert len(set(alone["gpus"].to_pylist())) == 1


@cases(("models", "expected"), [([0] * 6, "010101"), ([0, 1] * 3, "000"), ([0, 1, 1, 0, 0, 1], "010")])
def test_turns_count_the_requests_of_all_models(models: list[int], expected: str) -> None:
    """production-stack 008a23b, routing_logic.py, RoundRobinRouter: `req_id` is of the router, not of a model."""
    config = machine(2, 40.0, gpus=2, rates=(8.0, 1.0))
    load = jobs(config, np.arange(6) * 1e-3, np.array(models), np.random.default_rng(1))
    rows, *_ = ran("static", config, load, replicas=True, route="turns")
    hot = [row["gpus"] for row in rows.to_pylist() if row["model"] == config.models[0].name]
    assert "".join("01"[gpus != hot[0]] for gpus in hot) == expected


@cases("name", ["static", "elastic"])
def test_where_no_copy_helps_the_row_is_left_out(name: str) -> None:
    config = machine(2, 40.0, gpus=1, rates=(8.0, 1.0))
    with pytest.raises(Unsupported, match="no second copy has room"):
        ran(name, config, jobs(config, [0.0], [0], np.random.default_rng(1)), replicas=True)


# ------------------------------------------------------------------ AlpaServe


def alpaserve(gpus: int, rates: tuple[float, ...] = HOT, **fields: Any) -> AlpaServe:
    config: Config = machine(len(rates), 40.0, gpus=gpus, rates=rates)
    made: AlpaServe = find("alpaserve")(Sim(config, {"kv": "elastic", "process": "gpu"}).cluster, **fields)
    return made


def score(W: Workload, S: Selection) -> float:
    """Return a selection's score, one request after the other: the release's simulate_requests, of one batch."""
    clock, good, spent = [0.0] * len(S), 0, 0.0
    for t, m in zip(W.arrival_s, W.model, strict=True):
        homes = [g for g, here in enumerate(S) if m in here]
        if not homes:
            continue
        g = min(homes, key=clock.__getitem__)
        begin = max(clock[g], t)
        took = begin - t + W.first_s[m, g]
        if took <= W.slo_s[m]:
            good, spent = good + 1, spent + took
            clock[g] = begin + W.held_s[m, g]
    return (good - 1e-4 * spent) / len(W.arrival_s)


def test_scores_are_those_of_a_queue_a_group() -> None:
    rng = np.random.default_rng(4)
    first_s, held_s = rng.uniform(0.02, 0.2, (3, 3)), rng.uniform(0.05, 0.4, (3, 3))
    W = Workload.drawn([8.0, 2.0, 1.0], 300, first_s, held_s, np.array([0.5, 0.3, 1.0]))
    kept = [flags(S, 3) for S in (((0,), (1,), (2,)), ((), (0,), ()), ((0, 2), (0, 1), ()))]
    grown = [(x, i, g) for x, S in enumerate(kept) for i, g in np.argwhere(~S).tolist()]
    selections = [by_group(with_copy(kept[x], i, g)) for x, i, g in grown]
    assert W.scores(kept, grown) == pytest.approx([score(W, S) for S in selections], abs=1e-12)
    assert [W.queues(S)[0] for S in selections] == pytest.approx([score(W, S) for S in selections], abs=1e-12)
    assert len({round(score(W, S), 6) for S in selections}) > 12
    assert max(score(W, S) for S in selections) < W.most() < 1


def flags(S: Selection, models: int) -> Copies:
    """Return which models have a copy on which groups."""
    return np.array([[i in here for here in S] for i in range(models)])


def test_the_workload_has_the_rates_of_the_forecast() -> None:
    W = Workload.drawn([6.0, 3.0, 0.0, 1.0], 4000, np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(4))
    assert len(W.arrival_s) / W.arrival_s[-1] == pytest.approx(10.0, rel=0.05)
    gaps = np.diff(W.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)  # Poisson
    parts = np.bincount(W.model, minlength=4) / 4000
    assert parts == pytest.approx([0.6, 0.3, 0.0, 0.1], abs=0.03)


def best_of_all(policy: AlpaServe, groups: Sequence[Gpus]) -> float:
    """Return the best score of any selection with room."""
    W, n = policy.workload(list(groups)), len(policy.cluster.models)
    every = [tuple(m for m in range(n) if bits >> m & 1) for bits in range(2**n)]

    def fits(here: tuple[int, ...], group: Gpus) -> bool:
        return sum(policy.need(m, len(group)) for m in here) <= policy.cluster.gpus[group[0]].mem_bytes

    first, second = ([here for here in every if fits(here, group)] for group in groups)
    return max(W.queues((a, b))[0] for a in first for b in second)


@cases("rates", [HOT, (20.0, 20.0, 1.0, 1.0), (40.0, 10.0, 5.0, 1.0)])
def test_algorithm_1_comes_close_to_the_best_of_all_selections(rates: tuple[float, ...]) -> None:
    policy = alpaserve(2, rates, samples=400)
    score, S = policy.select([(0,), (1,)])
    assert score == pytest.approx(policy.workload([(0,), (1,)]).queues(S)[0])
    assert score >= best_of_all(policy, [(0,), (1,)]) - 0.01


def test_the_search_ends_where_none_is_better() -> None:
    """Each request as if it were alone is the most that a score can be, which a copy of each model comes close to."""
    policy = alpaserve(4, (1.0, 0.5, 0.2, 0.1), samples=400)
    groups: list[Gpus] = [(0,), (1,), (2,), (3,)]
    most = policy.workload(groups).most()
    for search in (policy.select, policy.select_fast):
        score, S = search(groups)
        assert most - 1e-6 <= score <= most
        assert sum(map(len, S)) == 4


@cases("rates", [HOT, (20.0, 20.0, 1.0, 1.0), (40.0, 10.0, 5.0, 1.0)])
def test_the_fast_heuristic_comes_close_to_algorithm_1(rates: tuple[float, ...]) -> None:
    groups: list[Gpus] = [(0,), (1,)]
    score, S = alpaserve(2, rates, samples=400, search="fast").select_fast(groups)
    assert score == pytest.approx(alpaserve(2, rates, samples=400).workload(groups).queues(S)[0])
    assert score >= 0.98 * alpaserve(2, rates, samples=400).select(groups)[0]


def test_a_beam_search_that_is_too_long_says_so_at_once() -> None:
    """Forty models on 24 groups: 3 x 960 copies a step, 40 steps, 20,000 requests each."""
    policy = alpaserve(24, (1.0,) * 40, samples=20_000)
    with pytest.raises(Unsupported, match=r"search=beam: to place 40 models on 24 groups .* search=fast"):
        policy.place()
    policy.search = "fast"
    groups, S = policy.place()
    assert len(groups) == 24
    assert {i for here in S for i in here} == set(range(40))


def test_every_model_has_a_copy_and_the_hot_one_several() -> None:
    policy = alpaserve(2, (60.0, 2.0, 1.0, 1.0))
    list(policy.on(Woke("start"), None))  # type: ignore[arg-type]  # nothing is read at the start
    assert all(policy.homes.values())
    assert len(policy.homes["m0"]) == 2


def arrival(rid: int, at_s: float, slo_s: float) -> Request:
    return Request(rid, "m0", at_s, 300, slo_s, 0.1)


@cases("late", ["drop", "serve"])
def test_requests_go_to_the_shortest_queue_and_late_ones_are_given_up(late: str) -> None:
    policy = alpaserve(2, (60.0, 2.0, 1.0, 1.0), late=late)
    loads_ = [a for a in policy.on(Woke("start"), None) if isinstance(a, Load)]  # type: ignore[arg-type]
    assert len(loads_) == sum(map(len, policy.homes.values()))
    sent = [next(policy.arrived(arrival(k, 0.0, math.inf), 0.0)) for k in range(4)]
    assert [a.batch.inst.place for a in sent if isinstance(a, Admit)] == [(0,), (1,), (0,), (1,)]
    list(policy.on(Finished(1, None, "done"), None))  # type: ignore[arg-type]
    (next_,) = policy.arrived(arrival(4, 0.0, math.inf), 0.0)
    assert isinstance(next_, Admit)
    assert next_.batch.inst.place == (1,)
    policy.t = [5.0, 5.0]
    (answer,) = policy.arrived(arrival(5, 1.0, 3.0), 1.0)  # could begin 4 s after it came
    assert isinstance(answer, Drop if late == "drop" else Admit)
    (answer,) = policy.arrived(arrival(6, 1.0, 4.5 if late == "drop" else 0.0), 1.0)
    assert isinstance(answer, Admit)


def test_groups_have_the_degree_of_their_models() -> None:
    """Models of two GPUs and of one have groups of their own; those that may run on both take the better size."""
    config = machine(2, 40.0, gpus=4, rates=(8.0, 1.0))
    pair = replace(config, models=(config.models[0]._replace(tp=2), config.models[1]))
    mixed = find("alpaserve")(Sim(pair, {"kv": "elastic", "process": "gpu"}).cluster)
    groups, S = mixed.place()
    assert sorted(map(len, groups), reverse=True) in ([2, 1, 1], [2, 2])
    assert all(len(groups[g]) == (2 if m == 0 else 1) for g, here in enumerate(S) for m in here)
