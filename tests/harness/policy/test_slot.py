"""GPUs that hold one model at a time: what comes and goes, and with what each starts."""

from __future__ import annotations

from harness.engines.wallclock import NoProfile
from harness.policy.actions import Evict, Load, Run
from harness.policy.slot import Slot, start
from harness.policy.types import Batch, Cluster, Gpu, Host, Inst, Model

DEGREES = {"a": 1, "b": 2, "c": 1}
CLUSTER = Cluster(
    tuple(Gpu("flat", k // 4, 1000, 100, ()) for k in range(8)),
    {m: Model(1, tp, 100, 1, 1, 400, 1.0, 0.1) for m, tp in DEGREES.items()},
    {},
    NoProfile(),
)


def test_a_model_takes_as_many_of_the_gpus_as_it_needs() -> None:
    slot = Slot(CLUSTER, (4, 5))
    assert slot.batch("a") == Batch(Inst("a", (4,)))
    assert slot.batch("b", 3) == Batch(Inst("b", (4, 5)), 3)
    assert slot.node == 1
    assert [Slot(CLUSTER, (0,)).fits(m) for m in "abc"] == [True, False, True]
    assert [slot.has(Inst("b", place)) for place in ((4, 5), (0, 1), Host(1))] == [True, False, False]


def test_a_model_comes_when_the_one_before_goes_and_only_then() -> None:
    slot = Slot(CLUSTER, (0,))
    a, c = (slot.batch(m).inst for m in "ac")
    assert slot.model is None
    assert list(slot.hold("a", "disk")) == [Load(a, "disk")]
    assert list(slot.hold("a", "disk")) == []
    assert list(slot.hold("c", "host")) == [Evict(a), Load(c)]
    assert list(slot.hold("a", "host", drain=False)) == [Evict(c, drain=False), Load(a)]
    assert slot.model == "a"


def test_what_came_ahead_of_its_turn_is_not_loaded_again() -> None:
    slot = Slot(CLUSTER, (0,))
    a, c = (slot.batch(m).inst for m in "ac")
    list(slot.hold("a", "host"))
    assert list(slot.fetch("c", "host")) == [Load(c)]
    assert list(slot.fetch("c", "host")) == []
    assert slot.model == "a"
    assert list(slot.hold("c", "host", keep=["a"])) == []
    assert slot.models == ["c", "a"]
    assert list(slot.hold("c", "host")) == [Evict(a)]
    assert slot.models == ["c"]


def test_slots_start_with_the_models_in_turn_each_with_one_that_fits() -> None:
    slots = [Slot(CLUSTER, gpus) for gpus in ((0, 1), (2,), (3,), (4, 5))]
    actions = list(start(slots, ["a", "b", "c"], "host"))
    assert [slot.model for slot in slots] == ["a", "c", "c", "a"]  # b has not one GPU: the next after it
    assert actions == [
        x for slot in slots if slot.model for x in (Load(slot.batch(slot.model).inst), Run(slot.batch(slot.model)))
    ]
