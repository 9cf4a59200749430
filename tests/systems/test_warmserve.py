"""WarmServe by hand: scores, forecasts, scaling, which GPUs an instance takes, and where copies are prewarmed."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from harness.engines.machine import Config, Served, cluster
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Finished, Woke
from harness.policy.placement import one_request
from harness.policy.types import GIB, Infeasible, Inst, Plan, Request
from systems.warmserve import BATCH, Copy, Scored, Traffic, WarmServe, nested, weighted
from tests.cases import cases
from tests.systems.by_hand import Seen, of, told
from workloads.models import shape

SMALL = "llama-3.2-1b"


def made(
    *tps: int, gpus: int = 1, node_gpus: int = 8, rate: float = 0.0, name: str = SMALL, **fields: Any
) -> WarmServe:
    """Models a, b, c... of one shape; each has a forecast if there is a rate."""
    models = tuple(Served(m, shape(name), tp) for m, tp in zip("abcdefgh", tps, strict=False))
    plan = {m.name: Plan(rate, 1000, 200, "test") for m in models} if rate else {}
    return WarmServe(cluster(Config(models, gpus=gpus, node_gpus=node_gpus, plan=plan)), **fields)


def preset(name: str) -> dict[str, Any]:
    return dict(WarmServe.presets[name])


def arrive(policy: WarmServe, rid: int, model: str, at_s: float = 0.0) -> list[Action]:
    return told(policy, Arrived(Request(rid, model, at_s, 100, math.inf, math.inf)), Seen(at_s))


def end(policy: WarmServe, *rids: int, at_s: float) -> None:
    for rid in rids:
        assert told(policy, Finished(rid, None, "done"), Seen(at_s)) == []


def tick(policy: WarmServe, at_s: float, used_bytes: int = 0) -> list[Action]:
    return told(policy, Woke("tick"), Seen(at_s, used_bytes=used_bytes))


def prewarm(policy: WarmServe) -> list[tuple[str, Any]]:
    """Start, and let all copies land."""
    loads = of(told(policy, Woke("start")), Load)
    for load in loads:
        told(policy, Done(load))
    return [(load.inst.model, load.inst.place) for load in loads]


# ------------------------------------------------------------------ scores: scheduler.py, _calc_model_scores


def expect(policy: WarmServe, mean: float, peak: float, *models: str) -> None:
    for m in models or policy.traffic:
        policy.traffic[m].mean, policy.traffic[m].peak = mean, peak


def test_scores_fall_with_each_copy_and_a_burst_counts_by_peak_over_mean() -> None:
    policy = made(1, gpus=4)
    load_s = policy.cluster.models["a"].weight_bytes / (32 * GIB)
    expect(policy, 40.0, 70.0)  # ceil(40 / 32) = 2 of the foundation, ceil(70 / 32) - 2 = 1 of a burst
    assert policy.scores("a") == pytest.approx([load_s, load_s * math.exp(-1 / 3), load_s * math.exp(-2 / 3) * 70 / 40])
    arrive(policy, 0, "a")  # one instance
    assert policy.scores("a") == pytest.approx([load_s, load_s * math.exp(-1 / 2) * 70 / 40])
    for load in (32.0, 0.0):
        expect(policy, load, load)
        assert policy.scores("a") == []


# ------------------------------------------------------------------ forecasts: scheduler.py, update_loads


@cases("past", [0.0, 7.0])
def test_over_a_flat_past_the_mean_error_is_the_weighted_mean_of_windows(past: float) -> None:
    """predicted = past + sum of (recorded - past) x 1/2^delta over the sum of weights, delta from the last window."""
    seen = [5.0, 1.0, 4.0, 2.0]
    weights = [1, 1 / 2, 1 / 4, 1 / 8]
    errors = sum(w * (x - past) for w, x in zip(weights, reversed(seen), strict=True))
    assert weighted(seen) == pytest.approx(past + errors / sum(weights))


def test_ten_windows_count() -> None:
    assert weighted([1.0, 2.0]) == pytest.approx((2 + 0.5) / 1.5)
    assert weighted([1e9, *[3.0] * 10]) == 3.0
    assert weighted([1e9, *[3.0] * 9]) > 3.0


def test_a_window_has_a_mean_load_and_the_highest_after_an_arrival() -> None:
    traffic = Traffic(0.0, 0.0)
    for by, at_s in ((1, 0.0), (1, 10.0), (-1, 20.0)):
        traffic.change(by, at_s)
    traffic.end(300.0, 300.0)
    assert traffic.mean == pytest.approx((10 * 1 + 10 * 2 + 280 * 1) / 300)
    assert traffic.peak == 2
    traffic.end(600.0, 300.0)  # nobody came: the release's peak is 0 beside a mean of 1
    assert traffic.means[1:] == [pytest.approx(1.0)]
    assert traffic.peaks == [2, 0]


def test_the_first_window_expects_the_rate_times_the_seconds_of_a_request() -> None:
    policy = made(1, rate=2.0)
    inst, profile = Inst("a", (0,)), policy.cluster.profile
    alone_s = profile.prefill_s(inst, 1000) + 200 * profile.step_s(inst, 1, 1100)
    traffic = policy.traffic["a"]
    assert traffic.mean == traffic.peak == pytest.approx(2.0 * alone_s)
    assert made(1).traffic["a"].mean == 0.0


def test_windows_begin_with_the_first_request_and_end_in_time() -> None:
    policy = made(1, 1, gpus=2, window_s=10.0)
    arrive(policy, 0, "a", 3.0)
    tick(policy, 12.5)
    assert policy.traffic["a"].means == []
    tick(policy, 13.0)
    assert policy.traffic["a"].means == [pytest.approx(1.0)]
    end(policy, 0, at_s=13.5)
    tick(policy, 34.0)  # two more are over
    assert policy.traffic["a"].means == [pytest.approx(x) for x in (1.0, 0.05, 0.0)]
    assert policy.ends_s == 43.0


def test_a_request_after_a_pause_counts_in_its_own_window() -> None:
    policy = made(1, 1, gpus=2, window_s=10.0)
    arrive(policy, 0, "a", 0.0)
    end(policy, 0, at_s=1.0)
    tick(policy, 1.0)
    tick(policy, 7.0)  # the instance has left, and nothing ticks
    assert not policy.ticks
    arrive(policy, 1, "a", 25.0)
    tick(policy, 30.0)
    assert policy.traffic["a"].peaks == [1, 0, 1]
    assert policy.traffic["a"].means == [pytest.approx(x) for x in (0.1, 0.0, 0.5)]


# ------------------------------------------------------------------ requests: prewarm_manager.py, schedule


def test_a_request_goes_where_fewest_are_and_the_33rd_to_a_new_instance() -> None:
    policy = made(1, gpus=2)
    for rid in range(BATCH):
        assert bool(of(arrive(policy, rid, "a"), Load)) is (rid == 0)
    assert policy.cluster.gpus[0].node == 0
    assert [load.inst.place for load in of(arrive(policy, 32, "a"), Load)] == [(1,)]
    (admit,) = of(arrive(policy, 33, "a"), Admit)
    assert admit.batch.inst.place == (1,)


def test_a_request_without_an_instance_asks_again_each_second() -> None:
    policy = made(1, 1)
    arrive(policy, 0, "a")
    assert Wake(1.25, "again") in arrive(policy, 1, "b", 0.25)
    assert not of(arrive(policy, 2, "b", 0.5), Admit)
    assert told(policy, Woke("again"), Seen(1.25)) == [Wake(2.25, "again")]  # both take part
    end(policy, 0, at_s=2.0)
    tick(policy, 7.0)
    assert not policy.busy
    admits = of(told(policy, Woke("again"), Seen(9.0)), Admit)
    assert [admit.who for admit in admits] == [1, 2]
    assert policy.traffic["b"].requests == 2  # also while they waited


def test_a_request_that_is_given_up_while_it_waits_is_no_load() -> None:
    policy = made(1, 1)
    arrive(policy, 0, "a")
    arrive(policy, 1, "b")
    end(policy, 1, at_s=0.5)
    assert not policy.waiting
    assert policy.traffic["b"].requests == 0


# ------------------------------------------------------------------ which GPUs: _get_available_workers, create_engine


def test_an_instance_takes_its_copy_without_a_load_and_others_there_go() -> None:
    policy = made(1, 1, 1, rate=0.1)
    assert prewarm(policy) == [("a", (0,)), ("b", (0,)), ("c", (0,))]
    actions = arrive(policy, 0, "b")
    assert of(actions, Evict) == [Evict(Inst("a", (0,))), Evict(Inst("c", (0,)))]
    assert not of(actions, Load)
    assert of(actions, Run)
    assert [copy.inst.model for copy in policy.copies] == ["b"]


def test_a_whole_copy_comes_before_one_that_loads_and_both_before_a_new_one() -> None:
    policy = made(1, gpus=3)
    for g, whole in ((2, False), (1, True)):
        policy.copies.append(Copy(Inst("a", (g,)), (g,), whole))
    assert policy.idle("a") == (1,)
    for place in ((2,), (0,)):
        policy.copies.pop()
        assert policy.idle("a") == place


def test_a_new_instance_takes_the_gpus_with_fewest_copies_of_the_first_node_that_has_enough() -> None:
    policy = made(2, 1, gpus=8, node_gpus=4)
    for g in (0, 1):
        policy.copies.append(Copy(Inst("b", (g,)), (g,), whole=True))
    assert policy.idle("a") == (2, 3)
    assert made(2, 1, gpus=8, node_gpus=4, place="turns").idle("a") == (0, 1)
    for rid, m in ((0, "b"), (1, "a")):
        arrive(policy, rid, m)
    assert sorted(policy.busy) == [0, 2, 3]
    assert policy.idle("a") == (4, 5)  # one GPU of the first node is not enough


# ------------------------------------------------------------------ scaling: _check_engines


def test_the_recent_load_is_the_mean_of_five_seconds() -> None:
    """common.py, get_avg_load: what is before the first request counts as 0."""
    traffic = Traffic(0.0, 0.0)
    assert traffic.recent(9.0) == 0.0
    traffic.change(1, 10.0)
    assert traffic.recent(12.0) == pytest.approx(2 * 1 / 5)
    traffic.change(2, 12.0)
    assert traffic.recent(14.0) == pytest.approx((2 * 1 + 2 * 3) / 5)
    assert traffic.recent(20.0) == pytest.approx(3.0)


def test_a_load_that_changed_within_the_five_seconds_counts_from_its_beginning() -> None:
    """common.py, get_avg_load: where st_pos is 1, the first step is last_load x (load_stamp[1] - load_stamp[0])."""
    traffic = Traffic(0.0, 0.0)
    traffic.change(10, 0.0)
    assert traffic.recent(98.0) == pytest.approx(10.0)  # a single step
    traffic.change(-5, 99.0)
    assert traffic.recent(100.0) == pytest.approx((10 * 99 + 5 * 1) / 5)
    assert traffic.recent(104.0) == pytest.approx(5.0)  # the change is five seconds ago


def test_instances_come_above_four_fifths_of_their_load() -> None:
    policy = made(1, gpus=4)
    for rid in range(26):
        arrive(policy, rid, "a")
    assert not of(tick(policy, 4.5), Load)  # 26 x 4.5 / 5 = 23.4 of 25.6
    assert len(of(tick(policy, 5.0), Load)) == 1  # ceil(26 / 0.8 / 32) = 2
    assert not of(tick(policy, 5.5), Load)


@cases(("requests", "starts"), [(30, []), (20, ["b"])])
def test_nothing_more_starts_once_a_model_finds_no_gpus(requests: int, starts: list[str]) -> None:
    """resource_available: where a, the first of the models, lacks an instance of two GPUs, b gets none on the last."""
    policy = made(2, 1, gpus=4)
    for rid in range(requests):
        arrive(policy, rid, "a")
    for rid in range(30):
        arrive(policy, 100 + rid, "b")
    assert sorted(policy.busy) == [0, 1, 2]
    assert [load.inst.model for load in of(tick(policy, 6.0), Load)] == starts


def test_instances_leave_below_half_of_their_load_the_emptiest_first() -> None:
    policy = made(1, gpus=2)
    for rid in range(40):
        arrive(policy, rid, "a")
    first, second = policy.serving["a"]
    assert (first.requests, second.requests) == (32, 8)
    end(policy, *range(30), at_s=1.0)
    tick(policy, 5.0)
    assert not policy.leaving  # nobody within 5 s of its start
    tick(policy, 6.5)
    assert (policy.leaving, policy.serving["a"]) == ([first], [second])  # ceil(10 / 0.5 / 32) = 1 stays
    assert sorted(policy.busy) == [0, 1]
    assert of(arrive(policy, 50, "a", 6.6), Admit)[0].batch == second.batch
    end(policy, 30, 31, at_s=6.7)
    tick(policy, 7.0)
    assert sorted(policy.busy) == [1]


def test_an_instance_stays_while_anything_runs_and_its_weights_stay_behind() -> None:
    policy = made(1)
    arrive(policy, 0, "a")
    told(policy, Done(Load(Inst("a", (0,)))))
    for k in range(1, 40):
        tick(policy, k / 2)
    assert policy.serving["a"]
    end(policy, 0, at_s=20.0)
    tick(policy, 24.5)
    assert policy.serving["a"]  # its load of the last 5 s is above 0
    assert not of(tick(policy, 25.0), Evict)
    assert not policy.busy
    actions = arrive(policy, 1, "a", 30.0)
    assert not of(actions, Load)
    assert of(actions, Admit)


def test_on_demand_leaves_no_weights_behind() -> None:
    policy = made(1, **preset("on-demand"))
    assert not of(told(policy, Woke("start")), Load)
    assert [load.way for load in of(arrive(policy, 0, "a"), Load)] == ["cold"]
    end(policy, 0, at_s=1.0)
    assert of(tick(policy, 6.5), Evict) == [Evict(Inst("a", (0,)))]
    assert not policy.copies


# ------------------------------------------------------------------ KV memory of an instance that leaves


def leaving(**fields: Any) -> WarmServe:
    """Two instances of a, the first leaving with two requests; b lacks a copy."""
    policy = made(1, 1, gpus=2, **fields)
    for rid in range(40):
        arrive(policy, rid, "a")
    end(policy, *range(30), at_s=1.0)
    expect(policy, 1.0, 1.0, "b")
    return policy


def test_an_instance_that_leaves_gives_up_kv_memory_and_others_are_prewarmed_there() -> None:
    """_check_engines: target_free_blocks = total_blocks x num_reqs / BATCH_SIZE, beside those in use."""
    policy = leaving()
    model = policy.cluster.models["a"]
    everything = policy.cluster.gpus[0].mem_bytes - model.weight_bytes
    used = 3 * GIB
    actions = tick(policy, 6.5, used)
    assert of(actions, Limit) == [Limit("a", 0, used + everything * 2 // 32)]
    assert of(actions, Load) == [Load(Inst("b", (0,)))]
    assert policy.idle("b") is None  # its copy is not free, nor is another GPU
    assert not of(tick(policy, 7.0, used), Limit)
    end(policy, 30, at_s=7.2)
    assert of(tick(policy, 7.5, 2 * GIB), Limit) == [Limit("a", 0, 2 * GIB + everything * 1 // 32)]
    end(policy, 31, at_s=7.7)
    assert of(tick(policy, 8.0), Limit) == [Limit("a", 0, None)]
    assert policy.idle("b") == (0,)
    assert {copy.inst.model for copy in policy.copies if copy.gpus == (0,)} == {"a", "b"}


def test_it_keeps_room_for_one_longest_request() -> None:
    policy = leaving()
    room = one_request(policy.cluster.models["a"])
    everything = policy.cluster.gpus[0].mem_bytes - policy.cluster.models["a"].weight_bytes
    end(policy, 30, at_s=1.0)
    assert everything * 1 // 32 < room
    assert of(tick(policy, 6.5), Limit) == [Limit("a", 0, room)]


@cases("fields", [{"kv": False}, {"prewarm": "kept"}])
def test_without_it_nothing_comes_before_the_instance_has_left(fields: dict[str, Any]) -> None:
    policy = leaving(**fields)
    assert "Limit" not in policy.uses
    assert tick(policy, 6.5) == [Wake(7.0, "tick")]
    end(policy, 30, 31, at_s=6.7)
    loads = of(tick(policy, 7.0), Load)
    assert [load.inst for load in loads] == ([Inst("b", (0,))] if policy.prewarm == "forecast" else [])


# ------------------------------------------------------------------ where: scheduler.py, prewarm


def groups_of(policy: WarmServe, m: str, score: float, *there: tuple[float, str, tuple[int, ...]]) -> Any:
    here: list[list[Scored]] = [[] for _ in policy.cluster.gpus]
    for points, model, gpus in there:
        scored = Scored(points, Copy(Inst(model, gpus), gpus))
        for g in gpus:
            here[g].append(scored)
    return policy.group(m, score, [float(gpu.mem_bytes) for gpu in policy.cluster.gpus], here)


def test_a_group_is_of_copies_within_it_or_around_it() -> None:
    policy = made(1, 2, 4, 2, gpus=8)
    assert groups_of(policy, "b", 1.0) == (0, 1)
    assert groups_of(policy, "b", 1.0, (0.5, "c", (1, 2, 3, 4))) == (0, 5)  # with nobody: the sum is 0
    four = made(1, 2, 4, 2, gpus=4)
    assert groups_of(four, "b", 1.0, (0.5, "d", (0, 2))) == (1, 3)
    assert groups_of(four, "b", 1.0, (0.5, "d", (0, 2)), (0.7, "a", (1,))) == (0, 2)
    assert groups_of(four, "c", 1.0, (0.5, "d", (0, 2)), (0.7, "a", (1,))) == (0, 1, 2, 3)
    assert groups_of(four, "c", 1.0, (0.5, "c", (0, 1, 2, 3))) is None  # two of a model
    assert nested((0,), (0, 1))
    assert not nested((0, 1), (1, 2))


def test_a_group_where_it_scores_highest_comes_first_then_the_least_sum() -> None:
    policy = made(1, 1, 1, 1, gpus=2)
    there = (0.6, "b", (0,)), (0.6, "c", (0,)), (0.9, "d", (1,))
    assert groups_of(policy, "a", 0.7, *there) == (0,)  # 1.2 in sum, but each below 0.7
    assert groups_of(policy, "a", 0.5, *there) == (1,)  # nowhere the highest: 0.9 is less than 1.2
    assert groups_of(policy, "a", 0.9, *there) == (0,)  # equal to the highest is not above it


def test_every_group_that_may_be_chosen_is_and_no_other() -> None:
    """By what is stated of each GPU's copies, over all pairs of copies of two and four of eight GPUs."""
    policy = made(1, 2, 4, 2, gpus=8)
    draw = np.random.default_rng(0)
    for _ in range(30):
        two, four = (tuple(sorted(draw.choice(8, n, replace=False).tolist())) for n in (2, 4))
        if not nested(two, four) and set(two) & set(four):
            continue
        chosen = groups_of(policy, "b", 1.0, (0.3, "d", two), (0.4, "c", four))
        fit = {}
        for at in combinations(range(8), 2):
            over = [(s, c) for s, c in ((0.3, set(two)), (0.4, set(four))) if c & set(at)]
            if all(set(at) == c if len(c) == 2 else set(at) <= c for _, c in over):
                fit[at] = sum(s for s, _ in over)
        assert chosen == min(fit, key=fit.__getitem__)


def test_copies_come_by_score_and_only_where_they_fit() -> None:
    policy = made(1, 1, 1, gpus=1, name="llama-3.1-8b")
    expect(policy, 1.0, 1.0, "b", "c")
    expect(policy, 1.0, 200.0, "a")  # seven copies, the last six with a burst of 200: one GPU takes one
    room = policy.cluster.gpus[0].mem_bytes // policy.cluster.models["a"].weight_bytes
    loads = [load.inst.model for load in of(told(policy, Woke("start")), Load)]
    assert loads == ["a", "b", "c"][:room]


def test_a_running_instance_counts_as_a_copy_unless_spares_alone_do() -> None:
    """node_models has the copies of running instances too, so one of them takes the score of the first copy."""
    for counts, prewarmed in (("all", 0), ("spare", 1)):
        policy = made(1, gpus=2, counts=counts)
        arrive(policy, 0, "a")
        expect(policy, 1.0, 33.0)  # a burst of one beside the instance
        assert len(of(tick(policy, 0.5), Load)) == prewarmed


def test_turns_place_a_model_after_the_other_on_the_first_gpus_without_it() -> None:
    policy = made(1, 2, gpus=3, place="turns")
    expect(policy, 64.0, 64.0)
    assert prewarm(policy) == [("a", (0,)), ("b", (0, 1)), ("a", (1,))]  # b finds no two GPUs without it
    policy = made(1, 1, gpus=2, place="turns")
    expect(policy, 64.0, 64.0, "b")
    assert prewarm(policy) == []  # a, which is first, lacks none


def test_what_cannot_be_loaded_is_forgotten_and_comes_again_when_something_changes() -> None:
    policy = made(1, 1, gpus=2, rate=0.1)
    first, _ = of(told(policy, Woke("start")), Load)
    told(policy, Done(first, "never"), Seen(state="out"))
    assert [copy.inst.model for copy in policy.copies] == ["b"]
    assert of(arrive(policy, 0, "b"), Admit)
    assert of(tick(policy, 0.5), Load) == [first]


@cases(
    ("tps", "fields", "says"),
    [((2,), {"gpus": 1}, "no node has 2 GPUs"), ((1,), {"name": "llama-3.3-70b"}, "do not fit 1 GPU")],
)
def test_what_never_fits_is_infeasible(tps: tuple[int, ...], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Infeasible, match=says):
        made(*tps, **fields)


# ------------------------------------------------------------------ on the engine
