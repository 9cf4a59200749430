"""SLINFER: deadlines, quotas, the three tests, turns by deadline, preemption, and what asks again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.engines.machine import Config, Served, cluster
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import Batch, Inst, Request
from systems.slinfer import AHEAD, Job, Slinfer
from tests.cases import cases
from tests.systems.by_hand import Flat, Seen, of, told
from workloads.models import shape

TTFT_S, TPOT_S = 2.0, 0.25
GPU = (0,)


def costs(prefill_s: float, step_s: float) -> Flat:
    return Flat(step_s, 0.5, prompt=prefill_s)


def made(*shapes: str, gpus: int = 1, profile: Any = None, **fields: Any) -> Slinfer:
    served = (Served(f"{k}-{name}", shape(name), 1, TTFT_S, TPOT_S) for k, name in enumerate(shapes))
    known = cluster(Config(tuple(served), gpus=gpus))
    return Slinfer(known if profile is None else replace(known, profile=profile), **fields)


def asks(rid: int, model: str, prompt: int = 100, at_s: float = 0.0, ttft_s: float = TTFT_S) -> Arrived:
    return Arrived(Request(rid, model, at_s, prompt, ttft_s, TPOT_S))


def loaded(policy: Slinfer, *models: str) -> list[Action]:
    return [a for m in models for a in told(policy, Done(Load(Inst(m, GPU))))]


# ------------------------------------------------------------------ deadlines and quotas


def test_a_deadline_has_95_per_cent_of_each_slo_and_excuses_loads() -> None:
    job = Job(Request(1, "m", 10.0, 100, TTFT_S, TPOT_S), excused_s=1.0)
    assert job.due_s(0) == pytest.approx(10 + 1 + 0.95 * 2.0)
    assert job.due_s(4) == pytest.approx(10 + 1 + 0.95 * (2.0 + 4 * 0.25))
    assert Job(Request(1, "m", 0.0, 1, math.inf, math.inf)).due_s(0) == math.inf


@cases(
    ("name", "steps"),
    [("llama-3.2-3b", 4), ("llama-2-7b", 2), ("llama-3.1-8b", 2), ("llama-2-13b", 1), ("llama-3.2-1b", 4)],
)
def test_a_turn_has_as_many_steps_as_the_release_gives_a_model(name: str, steps: int) -> None:
    policy = made(name)
    told(policy, asks(0, f"0-{name}"))
    (worker,) = policy.nodes[0].workers.values()
    assert policy.quota(worker) == 1  # it has a prompt
    worker.decodes(worker.jobs[0], 1)
    assert policy.quota(worker) == steps


# ------------------------------------------------------------------ the three tests


def test_kv_memory_is_of_4096_tokens_at_least_and_grows_to_a_quarter_more() -> None:
    policy = made("llama-3.1-8b")
    m, page = "0-llama-3.1-8b", policy.cluster.models["0-llama-3.1-8b"].page_bytes
    size = policy.cluster.models[m].kv_token_bytes
    (first,) = of(told(policy, asks(0, m, prompt=3000)), Limit)
    assert first.kv_bytes == pytest.approx(1.25 * ((3000 + AHEAD) * size + page), abs=page)
    (second,) = of(told(policy, asks(1, m, prompt=3000)), Limit)
    assert second.kv_bytes == pytest.approx(1.25 * (2 * (3000 + AHEAD) * size + 2 * page), abs=page)
    assert not of(told(policy, asks(2, m, prompt=100)), Limit)  # 612 tokens more are within the quarter
    assert made("llama-3.1-8b").least_tokens == 4096
    small = made("llama-3.1-8b")
    (least,) = of(told(small, asks(0, m, prompt=10)), Limit)
    assert least.kv_bytes == 4096 * size


def test_kv_memory_shrinks_where_it_is_a_quarter_above_what_it_should_be() -> None:
    policy = made("llama-3.1-8b")
    m = "0-llama-3.1-8b"
    for rid in range(3):
        told(policy, asks(rid, m, prompt=5000))
    before = policy.nodes[0].workers[m].kv_bytes
    (less,) = of(told(policy, Finished(0, None, "done")), Limit)
    assert less.kv_bytes == pytest.approx(before * 2 / 3, rel=0.01)
    told(policy, Finished(1, None, "done"))
    told(policy, Finished(2, None, "done"))
    assert policy.nodes[0].workers[m].kv_bytes == 0  # counts for nothing


def test_decode_steps_over_their_tpot_sum_up_to_one_at_most() -> None:
    names = ["llama-3.2-1b"] * 3
    part = 1.05 * 0.1 / (0.95 * TPOT_S)
    assert 2 * part < 1 < 3 * part
    policy = made(*names, profile=costs(0.01, 0.1))
    for k in range(2):
        assert of(told(policy, asks(k, f"{k}-llama-3.2-1b")), Load)
    actions = told(policy, asks(2, "2-llama-3.2-1b"))
    assert of(actions, Wake) == [Wake(0.25, "again")]
    assert not of(actions, Load)


@cases(("prefill_s", "ttft_s", "enters"), [(0.5, 2.0, True), (0.8, 2.0, False), (0.8, 4.0, True)])
def test_prompts_end_in_time_one_worker_after_the_other(prefill_s: float, ttft_s: float, enters: bool) -> None:
    """Two prompts of the neighbour are due after 1.9 s: the third one's own end is 3 x 1.05 x prefill_s."""
    policy = made("llama-3.2-1b", "llama-3.2-1b", profile=costs(prefill_s, 0.001), preempt=False)
    a, b = policy.cluster.models
    told(policy, asks(0, a))
    told(policy, asks(1, b, ttft_s=9.0))
    loaded(policy, a, b)
    for rid in (0, 1):
        told(policy, Prefilled(rid, Batch(Inst((a, b)[rid], GPU))), Seen(made=1))
    policy.nodes[0].turn = None
    for rid in (2, 3):
        policy.jobs[rid] = Job(asks(rid, a).request, policy.nodes[0].workers[a])
        policy.nodes[0].workers[a].jobs[rid] = policy.nodes[0].workers[a].prompts[rid] = policy.jobs[rid]
    admitted = of(told(policy, asks(4, b, ttft_s=ttft_s)), Admit)
    assert bool(admitted) is enters


def test_what_is_late_before_the_target_does_not_count() -> None:
    policy = made("llama-3.2-1b", "llama-3.2-1b", profile=costs(0.1, 0.001))
    a, b = policy.cluster.models
    told(policy, asks(0, a, ttft_s=0.01))  # it is late already
    told(policy, asks(1, b, ttft_s=9.0))
    loaded(policy, a, b)
    assert of(told(policy, asks(2, b, ttft_s=9.0), Seen(1.0)), Admit)


# ------------------------------------------------------------------ who is next


def test_the_worker_whose_next_token_is_due_first_has_the_next_turn() -> None:
    policy = made("llama-3.2-3b", "llama-3.2-3b", profile=costs(0.01, 0.001))
    a, b = policy.cluster.models
    told(policy, asks(0, a, ttft_s=2.0))
    told(policy, asks(1, b, ttft_s=1.0))
    (run,) = of(loaded(policy, a), Run)
    assert (run.batch.inst.model, run.steps) == (a, None)  # alone
    (last,) = of(loaded(policy, b), Run)
    assert (last.batch.inst.model, last.steps) == (a, 1)  # it is not alone any more
    (run,) = of(told(policy, TurnEnded(run.batch, "mixed", "steps", 1, 0.1)), Run)
    assert (run.batch.inst.model, run.steps) == (b, 1)  # due at 0.95 s, the other at 1.9 s; a prompt: one step
    told(policy, Prefilled(1, run.batch), Seen(made=1))
    (run,) = of(told(policy, TurnEnded(run.batch, "mixed", "steps", 1, 0.1), Seen(made=1)), Run)
    assert run.batch.inst.model == b  # due at 0.95 x 1.25 s
    (run,) = of(told(policy, TurnEnded(run.batch, "mixed", "steps", 4, 0.1), Seen(made=5)), Run)
    assert run.batch.inst.model == a  # the other's is due at 0.95 x 2.25 s now


def test_who_could_do_nothing_is_passed_over_until_something_changes() -> None:
    policy = made("llama-3.2-3b", "llama-3.2-3b", profile=costs(0.01, 0.001))
    a, b = policy.cluster.models
    told(policy, asks(0, a, ttft_s=1.0))
    told(policy, asks(1, b, ttft_s=2.0))
    (run, *_) = of(loaded(policy, a, b), Run)
    (run,) = of(told(policy, TurnEnded(run.batch, "mixed", "stuck", 0, 0.0)), Run)
    assert run.batch.inst.model == b
    told(policy, Finished(1, None, "done"))
    (run,) = of(told(policy, TurnEnded(run.batch, "mixed", "empty", 1, 0.0)), Run)
    assert run.batch.inst.model == a


# ------------------------------------------------------------------ preemption, waiting, workers


def full(**fields: Any) -> tuple[Slinfer, list[str]]:
    """Two workers whose KV memory fills a GPU: the first with four requests of 27,000 tokens, the second with one."""
    policy = made("llama-3.1-8b", "llama-3.1-8b", profile=costs(0.001, 0.001), growth=0.0, **fields)
    models = list(policy.cluster.models)
    room, weights = policy.nodes[0].room, policy.cluster.models[models[0]].weight_bytes
    tokens = (room - 2 * weights) // policy.cluster.models[models[0]].kv_token_bytes
    told(policy, asks(9, models[1], prompt=3000))
    for rid in range(4):
        told(policy, asks(rid, models[0], prompt=(tokens - 5000) // 4 - AHEAD - 16))
    return policy, models


def test_a_neighbour_with_fewer_requests_makes_room_and_its_requests_enter_anew() -> None:
    policy, (a, b) = full()
    actions = told(policy, asks(5, a, prompt=3000))
    assert of(actions, Evict) == [Evict(Inst(b, GPU), drain=False)]
    assert of(actions, Admit) == [Admit(5, Batch(Inst(a, GPU)))]
    assert list(policy.waiting) == [9]  # its GPU is left by its own weights first
    assert not of(actions, Move)  # it had no KV
    told(policy, Done(Evict(Inst(b, GPU), drain=False)))
    again = told(policy, Woke("again"), Seen(0.25))
    assert list(policy.waiting) == [9]
    assert of(again, Wake) == [Wake(0.5, "again")] * 2


@cases("fields", [{"preempt": False}, {"packing": False}])
def test_presets_preempt_nobody(fields: dict[str, bool]) -> None:
    policy, (a, _) = full(**fields)
    actions = told(policy, asks(5, a, prompt=3000))
    assert not of(actions, Evict)
    assert list(policy.waiting) == [5]


def test_what_no_worker_takes_asks_each_quarter_of_a_second_and_is_dropped_when_it_is_due() -> None:
    policy, (a, _) = full(preempt=False)
    told(policy, asks(5, a, prompt=3000))
    for now_s in (0.25, 0.5):
        assert not of(told(policy, Woke("again"), Seen(now_s)), Drop)
    assert of(told(policy, Woke("again"), Seen(0.95 * TTFT_S + 0.1)), Drop) == [Drop(5)]
    assert not policy.waiting


def test_a_new_worker_goes_to_the_fullest_node_that_takes_it() -> None:
    policy = made(*["llama-3.2-1b"] * 4, gpus=3)
    names = list(policy.cluster.models)
    for rid, m in enumerate(names):
        told(policy, asks(rid, m))
    assert sorted(len(node.workers) for node in policy.nodes) == [0, 0, 4]
    spread = made(*["llama-3.2-1b"] * 4, gpus=3, packing=False)
    for rid, m in enumerate(names):
        told(spread, asks(rid, m))
    assert [len(node.workers) for node in spread.nodes] == [2, 2, 0]  # as the release's loop leaves empty nodes
    alone = made(*["llama-3.2-1b"] * 4, gpus=3, sharing=False)
    for rid, m in enumerate(names):
        told(alone, asks(rid, m))
    assert [len(node.workers) for node in alone.nodes] == [1, 1, 1]


def test_a_worker_without_requests_stays_for_a_second() -> None:
    policy = made("llama-3.2-1b")
    (m,) = policy.cluster.models
    told(policy, asks(0, m))
    loaded(policy, m)
    assert Wake(4.0, "idle") in told(policy, Finished(0, None, "done"), Seen(3.0))
    assert not of(told(policy, Woke("idle"), Seen(3.9)), Evict)
    told(policy, asks(1, m, at_s=3.95), Seen(3.95))
    assert not of(told(policy, Woke("idle"), Seen(4.0)), Evict)
    told(policy, Finished(1, None, "done"), Seen(5.0))
    assert of(told(policy, Woke("idle"), Seen(6.0)), Evict) == [Evict(Inst(m, GPU), drain=True)]


def test_a_request_that_was_dropped_in_its_step_is_told_to_be_prefilled_after_its_end() -> None:
    """Events of an instant come in the order of their kinds, in which `Finished` stands before `Prefilled`."""
    policy = made("llama-3.2-1b", profile=costs(0.1, 0.01))
    model = next(iter(policy.cluster.models))
    view: Any = Seen()
    (batch,) = {
        action.batch
        for action in policy.on(Arrived(Request(7, model, 0.0, 100, TTFT_S, TPOT_S)), view)
        if isinstance(action, Admit)
    }
    list(policy.on(Finished(7, batch, "dropped"), view))
    assert list(policy.on(Prefilled(7, batch), view)) == []
    assert list(policy.on(Preempted(7, batch), view)) == []
