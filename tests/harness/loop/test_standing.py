"""Actions refused for now: when they are issued again, in which order, and until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.engines.costs.shapes import weight_bytes
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.engines.torch.core import Kv
from harness.engines.torch.engine import Torch
from harness.engines.torch.processes import Workers
from harness.engines.torch.wire import Bytes
from harness.engines.wallclock import Live
from harness.loop.recorder import Note
from harness.loop.replay import Outcome, replay
from harness.loop.standing import same_subject
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Freed, TurnEnded, Woke
from harness.policy.types import Batch, Host, Inst
from harness.policy.view import View
from tests.cases import cases
from tests.harness.engines.sim.kernel.test_laws import prefill_queue
from tests.harness.engines.sim.world import SHAPE
from tests.harness.loop.scripted import Policy, Recorder
from tests.harness.loop.test_replay import done_s

A, B = Batch(Inst("m0", (0,))), Batch(Inst("m0", (0,)), 1)
NEW = Inst("m1", (0,))
LIMIT = Limit("m0", 0, 1 << 40)
ADMIT = Admit(0, A)
Issued = list[tuple[float, Action, bool]]


class Short(Sim):
    """A simulator that lacks something for each of some actions until a time."""

    comes_s: Mapping[Action, float]
    issued: Issued
    free_s = math.inf

    def do(self, action: Action) -> Done | None:
        now_s = self.view().now_s
        taken = now_s >= self.comes_s.get(action, -math.inf)
        self.issued.append((now_s, action, taken))
        if taken:
            return super().do(action)
        self.free_s = min(self.free_s, self.comes_s[action])
        return Done(action, "not now", "it is short")

    def poll(self, until_s: float) -> Event | None:
        event = super().poll(min(until_s, self.free_s))
        if event is None and self.view().now_s >= self.free_s:
            self.free_s = math.inf
            return Freed()
        return event


def short(
    says: Mapping[float, Sequence[Action]],
    comes_s: Mapping[Action, float],
    hears: frozenset[type] = frozenset({Woke, Arrived, Finished, TurnEnded}),
    start: Sequence[Action] = (Load(A.inst), Run(A)),
    **seconds: float,
) -> tuple[Issued, Policy, Recorder, Outcome, Sim]:
    """Replay one request of a second, which comes at 0.5 s. `says`: the answers to it, and to timers at other times."""
    w = prefill_queue(1.0, 1.0, 1)
    engine = Short(w.config, w.options, w.machine)
    engine.comes_s, engine.issued = comes_s, []

    def answer(event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            yield from (*start, *(Wake(t, str(t)) for t in says if t != 0.5))
        elif isinstance(event, Woke | Arrived):
            yield from says[view.now_s]

    policy, log = Policy(answer, hears), Recorder()
    jobs = replace(w.jobs, arrival_s=np.array([0.5]))
    outcome = replay(policy, engine, jobs, end_s=20.0, log=log, **seconds)
    return engine.issued, policy, log, outcome, engine


def test_orders_are_issued_again_oldest_first_when_something_comes_free() -> None:
    issued, policy, log, outcome, sim = short({0.5: (LIMIT, ADMIT)}, {LIMIT: 1.5, ADMIT: 1.0})
    assert issued[2:] == [
        (0.5, LIMIT, False),
        (0.5, ADMIT, False),
        (1.0, LIMIT, False),
        (1.0, ADMIT, True),
        (1.5, LIMIT, True),
    ]
    assert done_s(sim) == [2.0]
    assert not any(isinstance(event, Done | Freed) for _, event in policy.heard)
    assert outcome.refused == 2
    assert outcome.first_refused == f"{LIMIT} at t = 0.5 s: not now, it is short"
    assert log.notes == [
        Note(0.5, LIMIT, "refused", "it is short"),
        Note(0.5, ADMIT, "refused", "it is short"),
        Note(1.0, LIMIT, "refused", "it is short"),
        Note(1.0, ADMIT, "issued"),
        Note(1.5, LIMIT, "issued"),
    ]


def test_an_order_stands_until_the_policy_speaks_of_the_same_thing() -> None:
    says: dict[float, Sequence[Action]] = {0.5: (ADMIT, LIMIT), 0.75: (Admit(0, B), Run(B))}
    issued, _, log, _, sim = short(says, {ADMIT: 1.0, LIMIT: 1.0})
    assert issued[4:] == [(0.75, Admit(0, B), True), (0.75, Run(B), True), (1.0, LIMIT, True)]
    assert log.notes[2] == Note(0.75, ADMIT, "withdrawn")
    assert done_s(sim) == [1.75]


@cases(("said_s", "decision_s", "control_s"), [(1.125, 0.125, 0.0), (1.0, 0.0, 0.125)])
def test_what_lands_later_withdraws_as_soon_as_it_is_said(said_s: float, decision_s: float, control_s: float) -> None:
    """An answer is said when it has been thought of; where control takes time it lands after that."""
    other = Limit("m0", 0, None)
    says: dict[float, Sequence[Action]] = {0.5: (LIMIT, ADMIT), 1.0: (other,)}
    issued, _, log, *_ = short(says, {LIMIT: 1.25}, decision_s=decision_s, control_s=control_s)
    assert log.notes == [Note(0.625, LIMIT, "refused", "it is short"), Note(said_s, LIMIT, "withdrawn")]
    assert issued[-1] == (1.125, other, True)


def test_a_turn_waits_for_the_load_of_its_weights() -> None:
    turn, load = Run(A, steps=1), Load(A.inst)
    issued, policy, log, outcome, sim = short({0.5: (ADMIT, load, turn)}, {load: 1.0}, start=())
    assert sim.S.insts["footprint"].max() > 20.0  # a byte a second: it is under way at the end
    assert issued == [(0.5, ADMIT, True), (0.5, load, False), (1.0, load, True), (1.0, turn, True)]
    assert not any(isinstance(event, TurnEnded) for _, event in policy.heard)  # it did not end "stuck"
    assert outcome.refused == 1
    assert [note.fate for note in log.notes] == ["refused", "refused", "issued", "issued"]


def test_a_turn_that_is_closed_while_it_stands_ends_like_any_other() -> None:
    turn, close = Run(A, "decode", for_s=1.0), Run(A, "decode", steps=0)
    script = {0.5: (turn,), 0.75: (close,)}
    issued, policy, *_ = short(script, {turn: 1.0})
    assert (0.75, TurnEnded(A, "decode", "steps", 0, 0.0)) in policy.heard
    assert [action for t, action, _ in issued if t >= 0.75] == [close]
    _, deaf, *_ = short(script, {turn: 1.0}, frozenset({Woke, Arrived}))
    assert not any(isinstance(event, TurnEnded) for _, event in deaf.heard)


@cases(
    ("asked", "stands", "same"),
    [
        (Evict(NEW), Load(NEW), True),
        (Load(NEW, "pool"), Evict(NEW, drain=False), True),
        (Load(NEW), Load(A.inst), False),
        (Limit("m0", 0, None), LIMIT, True),
        (Limit("m0", 1, None), LIMIT, False),
        (Admit(3, B), Admit(3, A), True),
        (Admit("m0", B), Admit("m0", A), True),
        (Admit(3, A), Admit("m0", A), False),
        (Drop(3), Admit(3, A), True),
        (Drop(3), Move(3, None), True),
        (Drop(3), Admit(4, A), False),
        (Move(3, None), Admit(3, A), False),  # where it is a member and where its KV lies are two things
        (Admit(3, A), Move(3, None), False),
        (Move(3, Host()), Move(3, None), True),
        (Run(A, "decode"), Run(A, "decode", steps=4), True),
        (Run(A, "decode"), Run(A, "prefill"), False),
        (Run(A), Run(A, "prefill"), True),  # one lane excludes the other
        (Run(A, "prefill"), Run(A), True),
        (Run(B), Run(A), False),
        (Load(A.inst), Run(A), False),
        (Wake(1.0), LIMIT, False),
    ],
)
def test_what_speaks_of_the_same_thing(asked: Action, stands: Action, same: bool) -> None:
    assert same_subject(asked, stands) is same


# ---------------------------------------------------------------- an engine in real time


class Workerless(Workers):
    """Starts no process and copies nothing."""

    def worker(self, device: int, *key: Any, cold: bool = False) -> Any:
        """See Workers."""

    def fill(self, parts: Iterable[Bytes]) -> None:
        """See Workers."""


def test_blocks_that_come_free_are_told_once_after_a_refusal_for_now() -> None:
    served = tuple(Served(f"m{k}", SHAPE) for k in range(64))
    engine = Torch(Config(served, pool_bytes=16 << 20), {})  # not made ready: no process is started
    engine.workers = Workerless(engine.kind, engine.nets, engine.arenas, engine.accounts)
    refusals = [engine.do(Load(Inst(m.name, (0,)))) for m in served]
    first = next(refusal for refusal in refusals if refusal is not None)
    assert first == Done(first.action, "not now", f"no room for {first.action.inst.model}")  # type: ignore[union-attr]
    assert engine.idle()
    account = engine.accounts["m0", 0]
    for rid in (1, 2):
        engine.kv[rid] = Kv(account, (0,), account.take(1))
        engine.release(Live(rid, "m0", 1, 1, 0.0))
    assert [engine.poll(0.0), engine.poll(0.0)] == [Freed(), None]
    engine.do(Load(Inst("m64", (0,))))
    event = engine.poll(0.0)
    assert isinstance(event, Done)
    assert event.failed == "never"


# ---------------------------------------------------------------- the simulator's own


def two(answer: Callable[[Event, View], Iterable[Action]], hears: frozenset[type], **spec: Any) -> tuple[Any, ...]:
    """Replay a request of each of two models, whose weights take a second."""
    w = prefill_queue(1.0, 1.0, 2, models=2)
    machine = w.machine._replace(spec=w.machine.spec._replace(h2d=float(weight_bytes(SHAPE)), **spec))
    jobs = replace(w.jobs, arrival_s=np.array([1.0, 1.0]), model=np.array([0, 1], np.int32))
    policy, sim, log = Policy(answer, hears), replace(w, machine=machine).sim(), Recorder()
    replay(policy, sim, jobs, end_s=9.0, log=log)
    return policy, sim, log


@cases("hears", [{Load, Evict}, {Evict}, set()])
def test_weights_on_their_way_are_evicted_when_they_land(hears: set[type]) -> None:
    """Refused at 1.5 s, issued again at 2 s, whatever the policy hears."""

    def answer(event: Event, _: View) -> Iterable[Action]:
        if isinstance(event, Arrived) and event.request.id == 0:
            yield from (Load(NEW), Wake(1.5, "evict"))
        if event == Woke("evict"):
            yield Evict(NEW)

    policy, sim, log = two(answer, frozenset({Woke, Arrived, *hears}))
    why = "its weights are still on their way"
    assert log.notes == [Note(1.5, Evict(NEW), "refused", why), Note(2.0, Evict(NEW), "issued")]
    ends = [(t, event) for t, event in policy.heard if isinstance(event, Done)]
    assert ends == [(2.0, Done(action)) for action in (Load(NEW), Evict(NEW)) if type(action) in hears]
    assert (sim.stats()["loads"], sim.stats()["evicts"]) == (1, 1)


def test_a_load_withdraws_the_eviction_of_what_is_on_its_way() -> None:
    def answer(event: Event, _: View) -> Iterable[Action]:
        if isinstance(event, Arrived) and event.request.id == 0:
            yield from (Load(NEW), Wake(1.5, "evict"))
        if event == Woke("evict"):
            yield from (Evict(NEW), Load(NEW))

    _, sim, log = two(answer, frozenset({Woke, Arrived}))
    assert [note.fate for note in log.notes] == ["refused", "withdrawn"]
    assert sim.view().weights(NEW) == "in"


def test_a_load_without_room_before_the_start_waits_from_the_start_on() -> None:
    """The GPU holds one model. The other waits for it like any load, and comes when it has gone."""

    def answer(event: Event, _: View) -> Iterable[Action]:
        if event == Woke("start"):
            yield from (Load(A.inst), Load(NEW), Wake(3.0, "evict"))
        if event == Woke("evict"):
            yield Evict(A.inst)

    policy, sim, log = two(answer, frozenset({Woke, Load}), mem_bytes=weight_bytes(SHAPE) + 4096)
    assert [(note.now_s, note.fate) for note in log.notes] == [(0.0, "refused"), (0.0, "issued")]
    assert [(t, event) for t, event in policy.heard if isinstance(event, Done)] == [(4.0, Done(Load(NEW)))]
    assert sim.view().insts(0) == (NEW,)
