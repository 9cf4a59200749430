"""Aegaeon by hand: quotas, groups, and the order of a switch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.actions import Action, Admit, Evict, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, TurnEnded
from harness.policy.types import Batch, Cluster, Gpu, Host, Infeasible, Inst, Model, Phase, Plan, Request
from harness.policy.view import BatchState, RequestState, Weights
from systems.aegaeon import Aegaeon, Group, Instance, Work, quotas
from tests.systems.by_hand import Flat

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


# ------------------------------------------------------------------ a policy without an engine

LOAD_S, STEP_S = 2.0, 0.02


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
        Flat(STEP_S, LOAD_S, token=1e-3),
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


def decoding(*held: tuple[str, int, int], world: Cluster | None = None, **fields: Any) -> tuple[Aegaeon, Instance]:
    """Return a policy and its last instance, which decodes batches of (model, requests, tokens of each)."""
    policy = Aegaeon(world or cluster(2), **fields)
    x, rid = policy.all[-1], 0
    for model, n, tokens in held:
        tag = 2 * sum(w.batch.inst.model == model for w in x.works)
        batch = Batch(Inst(model, x.gpus[: policy.cluster.models[model].tp]), tag)
        w = Work(x, batch, dict.fromkeys(range(rid, rid + n)), n * tokens)
        x.works.append(w)
        for r in w.rids:
            policy.where[r], policy.tokens[r] = w, tokens - 10  # 10 were made
        rid += n
    return policy, x


def test_a_round_has_batches_of_a_model_side_by_side_and_their_quotas() -> None:
    policy, x = decoding(("a", 2, 400), ("b", 1, 100), ("a", 2, 400), ("c", 1, 100))
    list(policy.begin_round(x, Still()))  # type: ignore[arg-type]
    assert [(w.batch.inst.model, w.batch.tag) for w in x.round] == [("a", 0), ("a", 2), ("b", 0), ("c", 0)]
    c, n = 3 * LOAD_S, 0.1 / STEP_S  # distinct models: three; n = 5
    assert [w.q for w in x.round] == pytest.approx(quotas([n] * 4, c))


def test_batches_of_a_model_are_formed_anew_first_come_first_served() -> None:
    policy, x = decoding(("a", 1, 300), ("a", 2, 300), ("a", 1, 300))
    assert [a for a in policy.begin_round(x, Still()) if isinstance(a, Admit)] == [  # type: ignore[arg-type]
        Admit(1, Batch(Inst("a", (1,)), 0)),
        Admit(3, Batch(Inst("a", (1,)), 2)),
    ]
    assert [(list(w.rids), w.ctx) for w in x.works] == [([0, 1], 600), ([2, 3], 600)]


def test_a_switch_is_one_answer_in_the_papers_order() -> None:
    policy, x = decoding(("a", 1, 100), ("b", 1, 100))
    a, b = Batch(Inst("a", (1,))), Batch(Inst("b", (1,)))
    x.models, x.job, x.round, x.home = ["a"], x.works[0], deque([x.works[1]]), {a: None}
    x.works[1].q, x.works[1].t = 0.5, STEP_S
    out, turn = Evict(a.inst, drain=False), Run(b, "decode", for_s=0.5)
    actions = tell(policy, TurnEnded(a, "decode", "time", 10, 0.2), a.inst)
    assert actions == [Move(a, Host()), out, Load(b.inst), Move(b, (1,)), turn]


def test_what_comes_next_is_prefetched_where_it_fits() -> None:
    policy, x = decoding(("a", 1, 100), ("b", 1, 100), world=cluster(2, tokens=3000))
    kinds = [type(a).__name__ for a in policy.next(x, Still())]  # type: ignore[arg-type]
    assert kinds == ["Load", "Move", "Run", "Load"]  # the last one ahead of its time
    batches = [w.batch for w in x.works]
    for batch in batches:
        event = TurnEnded(batch, "decode", "time", 10, 0.2)
        kinds = [type(a).__name__ for a in tell(policy, event, *(b.inst for b in batches))]
        assert kinds == ["Move", "Move", "Run"]  # both are in: nothing is loaded any more
    assert set(x.models) == {"a", "b"}
    without, x = decoding(("a", 1, 100), ("b", 1, 100), world=cluster(2, tokens=3000), prefetch=False)
    begin(without, x)
    assert x.models == ["a"]


def begin(policy: Aegaeon, x: Instance) -> None:
    """Begin its first turn."""
    list(policy.next(x, Still()))  # type: ignore[arg-type]


def test_without_synchronisation_stages_wait_for_each_other() -> None:
    policy, x = decoding(("a", 1, 100), ("b", 1, 100), sync=False, prefetch=False)
    a, b = (w.batch for w in x.works)
    x.models, x.job, x.home = ["a"], x.works[0], {a: None}
    x.round.append(x.works[1])
    assert tell(policy, TurnEnded(a, "decode", "time", 10, 0.2), a.inst) == [Move(a, Host())]
    assert tell(policy, Done(Move(a, Host()))) == [Evict(a.inst, drain=False), Load(b.inst)]
    assert tell(policy, Done(Load(b.inst))) == [Move(b, (1,))]
    actions = tell(policy, Done(Move(b, (1,))))
    assert [type(s).__name__ for s in actions] == ["Run"]


def test_weights_whose_load_failed_are_asked_for_again() -> None:
    policy, x = decoding(("a", 1, 100))
    a = x.works[0].batch
    begin(policy, x)
    turn = Run(a, "decode", for_s=4.0)
    stuck = TurnEnded(a, "decode", "stuck", 0, 0.0)
    assert tell(policy, stuck) == [Move(a, Host()), Load(a.inst), Move(a, (1,)), turn]
    assert tell(policy, stuck, a.inst) == [Move(a, Host()), Move(a, (1,)), turn]  # they are in: only KV goes and comes


def test_the_prefill_first_baseline_interrupts_a_turn() -> None:
    policy, x = decoding(("a", 1, 100), world=cluster(1, models="ab"), order="prefill")
    begin(policy, x)
    x.job.rids = {9: None} if x.job else {}  # type: ignore[union-attr]
    assert Run(Batch(Inst("a", (0,))), "decode", steps=0) in arrive(policy, 7, "b")
    x.works[0].q = 3.0
    actions = tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "steps", 10, 1.0))
    assert isinstance(x.job, Group)
    assert actions[-1] == Run(Batch(Inst("b", (0,)), 1), "prefill", steps=8, seqs=1)
    assert [(w.batch.inst.model, w.q) for w in x.round] == [("a", 2.0)]  # what is left of its turn


def test_the_decode_first_baseline_lets_prompts_wait() -> None:
    policy, x = decoding(("a", 1, 100), world=cluster(1, models="ab"), order="decode")
    begin(policy, x)
    assert arrive(policy, 7, "b") == [Admit(7, Batch(Inst("b", (0,)), 1))]
    tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "time", 10, 4.0))
    assert isinstance(x.job, Work)
    tell(policy, Finished(0, Batch(Inst("a", (0,))), "done"))
    tell(policy, TurnEnded(Batch(Inst("a", (0,))), "decode", "empty", 10, 1.0))
    assert isinstance(x.job, Group)


def test_preset_released_differs_only_where_it_says() -> None:
    policy = Aegaeon(cluster(2), **Aegaeon.presets["released"])  # type: ignore[arg-type]
    assert policy.refill
    assert policy.load == "requests"
    assert policy.switch_s["a"] == pytest.approx(1000 / (0.15 * 32 * 2**30))
