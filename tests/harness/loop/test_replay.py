"""The loop: order within an instant, timers, thinking time, and what happens when nothing can."""

from __future__ import annotations

import gc
import math
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, get_args

import numpy as np
import pytest

from harness.engines.costs.shapes import weight_bytes
from harness.engines.sim.engine import Sim
from harness.loop import replay as loop
from harness.loop.answers import fault
from harness.loop.guard import LIMIT_S, Fault, _collecting
from harness.loop.interrupted import Interrupted
from harness.loop.replay import Livelock, replay
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, TurnEnded, Woke
from harness.policy.types import Batch, Host, Infeasible, Inst, Jobs, Unsupported
from harness.policy.view import View
from tests.cases import cases
from tests.harness.engines.sim.kernel.test_laws import prefill_queue
from tests.harness.engines.sim.world import SHAPE
from tests.harness.loop.scripted import Policy

A = Batch(Inst("m0", (0,)))


def engine(arrivals: list[float]) -> tuple[Sim, Jobs]:
    """Return one model of one-token requests, each taking a second."""
    w = prefill_queue(1.0, 1.0, len(arrivals))
    return w.sim(), replace(w.jobs, arrival_s=np.array(arrivals))


def played(policy: Policy, arrivals: list[float], **how: Any) -> Sim:
    """Serve such requests by a policy; return the engine."""
    sim, jobs = engine(arrivals)
    replay(policy, sim, jobs, **how)
    return sim


def serve(event: Event, _: View) -> Iterable[Action]:
    """Admit everything to one batch, request by request."""
    if event == Woke("start"):
        yield Load(A.inst)
        yield Run(A)
    if isinstance(event, Arrived):
        yield Admit(event.request.id, A)


def done_s(sim: Sim) -> list[float]:
    return [float(x) for x in sim.S.requests["done"]]


def test_start_comes_first_and_its_loads_are_free() -> None:
    policy = Policy(serve)
    sim = played(policy, [0.0, 4.0])
    assert policy.heard[0] == (0.0, Woke("start"))
    assert done_s(sim) == [1.0, 5.0]
    assert sim.stats()["loads"] == 0


def test_thinking_delays_answers_and_queues_events() -> None:
    policy = Policy(serve)
    sim = played(policy, [0.0, 0.0, 4.0], decision_s=0.25)
    # heard at 0; the second waits until the first is answered; each lands a quarter later
    arrivals = [(t, e.request.id) for t, e in policy.heard if isinstance(e, Arrived)]
    assert arrivals == [(0.0, 0), (0.25, 1), (4.0, 2)]
    assert done_s(sim) == [1.25, 2.25, 5.25]


def test_placement_takes_effect_later_still() -> None:
    def late(event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            yield Run(A)
            yield Admit("m0", A)
            yield Wake(1.0, "load")
        if event == Woke("load"):
            yield Load(A.inst)

    sim = played(Policy(late, frozenset({Woke})), [0.0], decision_s=0.25, control_s=0.5)
    load_s = float(sim.S.insts[1]["footprint"]) / 1.0  # the link carries a byte a second
    assert done_s(sim) == [1.0 + 0.25 + 0.5 + load_s + 1.0]


def test_timers_are_keyed_fire_last_and_can_be_cancelled() -> None:
    def timers(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if event == Woke("start"):
            yield Wake(1.0, "moved")
            yield Wake(2.0, "moved")
            yield Wake(3.0, "cancelled")
            yield Wake(math.inf, "cancelled")
            yield Wake(1.0, "tie")
            yield Wake(-5.0, "past")

    policy = Policy(timers)
    played(policy, [0.0, 1.0, 4.0])
    woke = [(t, e.key) for t, e in policy.heard if isinstance(e, Woke)]
    assert woke == [(0.0, "start"), (0.0, "past"), (1.0, "tie"), (2.0, "moved")]
    at_one = [type(e).__name__ for t, e in policy.heard if t == 1.0]
    assert at_one == ["Finished", "Arrived", "Woke"]


def test_a_turn_lands_with_the_weights_that_it_waits_for() -> None:
    def switch(event: Event, view: View) -> Iterable[Action]:
        if isinstance(event, Arrived):
            yield from (Admit(event.request.id, A), Load(A.inst), Run(A, steps=1))

    policy = Policy(switch, hears=frozenset({Arrived, TurnEnded, Done}))
    sim = played(policy, [0.0, 1e6], control_s=0.5)
    ready_s = 0.5 + sim.S.insts["footprint"].max()  # a byte a second
    assert done_s(sim) == [ready_s + 1.0, 1e6 + 1.5]
    assert policy.heard[1] == (ready_s + 1.0, TurnEnded(A, "mixed", "steps", 1, 1.0))


def test_timers_keep_no_run_alive() -> None:
    def ticking(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if isinstance(event, Woke):
            yield Wake(view.now_s + 10.0, "tick")

    assert played(Policy(ticking), [0.0]).view().now_s == 1.0


def test_a_request_that_nobody_admits_ends_the_run_unfinished() -> None:
    table = next(iter(played(Policy(lambda e, v: ()), [0.0, 1.0], end_s=50.0).rows()))
    assert table.column("state").to_pylist() == ["unfinished"] * 2
    assert table.column("load_ns").to_pylist() == [50_000_000_000, 49_000_000_000]  # no weights anywhere


@cases("end_s", [50.0, math.inf])
def test_a_load_that_nothing_can_make_room_for_fails_wherever_the_run_ends(end_s: float) -> None:
    """GPU 0 holds one of two models, and lets no prompt in before a load that waits. A timer is something to come."""

    def greedy(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if event == Woke("start"):
            yield Wake(3.0, "tick")
        if isinstance(event, Arrived) and event.request.id == 0:
            yield Load(Inst("m1", (0,)))

    w = prefill_queue(1.0, 1.0, 2, models=2)
    full = w.machine._replace(spec=w.machine.spec._replace(mem_bytes=weight_bytes(SHAPE) + 4096))
    jobs = replace(w.jobs, arrival_s=np.array([0.0, 1.0]), model=np.array([0, 1], np.int32))
    policy, sim = Policy(greedy), replace(w, machine=full).sim()
    replay(policy, sim, jobs, end_s=end_s)
    refused = [(t, e.action) for t, e in policy.heard if isinstance(e, Done) and isinstance(e.action, Load)]
    assert refused == [(3.0, Load(Inst("m1", (0,))))]
    assert done_s(sim)[0] == 4.0
    assert sim.view().now_s == (4.0 if end_s == math.inf else end_s)


def test_deciding_for_ever_is_an_error() -> None:
    with pytest.raises(Livelock, match="1000 decisions at 0"):
        played(Policy(lambda e, v: [Wake(v.now_s, "again")]), [0.0])


def test_an_answer_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MOST_ACTIONS", 1000)
    with pytest.raises(Livelock, match=r"answered 1,000 actions at once, t = 0 s, Woke\(key='start'\)"):
        played(Policy(lambda e, v: repeat(Wake(1.0))), [0.0])


def forever() -> Iterable[Action]:
    """Loop for ever: survive every Exception, but not the time limit."""
    while True:
        with suppress(Exception):
            math.sqrt(2.0)


@cases("at", [Woke("start"), Arrived])
def test_a_call_without_end_is_interrupted_at_its_limit(at: Event | type) -> None:
    def stuck(event: Event, view: View) -> Iterable[Action]:
        return forever() if at in {event, type(event)} else serve(event, view)

    before, token = signal.getsignal(signal.SIGALRM), LIMIT_S.set(0.1)
    try:
        with pytest.raises(Fault, match=r"^no answer within 0\.1 s at scripted\.py:\d+, t = 0 s, "):
            played(Policy(stuck), [0.0])
    finally:
        LIMIT_S.reset(token)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def raising(error: BaseException) -> Callable[[Event, View], Iterable[Action]]:
    def answer(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if isinstance(event, Arrived) and event.request.id == 1:
            raise error

    return answer


def test_a_fault_names_what_the_policy_did_and_when() -> None:
    told = r"^SystemExit at test_replay\.py:\d+ \(0\), t = 1\.25 s, Arrived\(id=1\)$"
    with pytest.raises(Fault, match=told) as caught:
        played(Policy(raising(SystemExit(0))), [0.0, 1.25])
    assert isinstance(caught.value.__cause__, SystemExit)


def test_an_interrupt_that_a_policy_raises_by_itself_is_its_fault() -> None:
    with pytest.raises(Fault, match="KeyboardInterrupt"):
        played(Policy(raising(KeyboardInterrupt())), [0.0, 1.25])


@cases("error", [Infeasible("too small"), Interrupted()])
def test_what_is_no_fault_comes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        played(Policy(raising(error)), [0.0, 1.25])


N: Any = np.int64(0)
RIGHT: list[Any] = [
    *(Load(A.inst), Load(A.inst, "pool"), Load(Inst("m0", Host())), Evict(A.inst, False), Limit("m0", 0, None)),
    *(Limit("m0", N, N), Admit(0, A), Admit("m0", A), Drop(N), Run(A), Run(A, "decode", 1, 2, 3, 4, 5, 0.5, 6)),
    *(Move(0, None), Move(A, (0, N)), Move(N, Host(0)), Wake(1), Wake(math.inf, "x"), Wake(float(N))),
]
X: Any = "x"
WRONG: list[Any] = [
    *(5, None, "Load", Load, (Load(A.inst),), Load(X), Load(Inst("m0", X)), Load(Inst("m0", (X,)))),
    *(Load(("m0", (0,))), Load(Inst("m0", [0])), Load(Inst(N, (0,))), Load(A.inst, N), Evict(A.inst, X)),  # type: ignore[arg-type]
    *(Limit(N, 0, None), Limit("m0", X, 1), Limit("m0", 0, 1.5), Admit(0, None), Admit(N, A), Admit(0.5, A)),  # type: ignore[arg-type]
    *(Admit(0, (A.inst, 0)), Admit(0, Batch(X)), Admit(0, Batch(A.inst, X)), Drop(X), Drop(1.0)),  # type: ignore[arg-type]
    *(Run(X), Run(A, X), Run(A, for_s=X), Run(A, for_s=math.nan), Run(A, steps=X), Run(A, seqs=2.5)),  # type: ignore[arg-type]
    *(Run(A, chunk_tokens=X), Run(A, slice_layers=X), Run(A, op_s=X), Run(A, sms=X)),
    *(Move(X, None), Move(0, N), Move(0, (X,)), Move(0, None, X), Wake(X), Wake(math.nan), Wake(1.0, N)),
]


@cases("action", RIGHT)
def test_an_action_whose_fields_have_their_types_is_an_answer(action: Any) -> None:
    assert fault([action]) is None


@cases("wrong", WRONG)
def test_anything_else_is_none(wrong: Any) -> None:
    told = fault([RIGHT[0], wrong])
    assert told is not None
    assert told.startswith("answered ")


def test_every_class_of_action_has_its_types() -> None:
    assert {type(action) for action in RIGHT} == set(get_args(Action))


def test_refusals_are_counted_and_the_first_is_kept() -> None:
    def asks(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if isinstance(event, Arrived):
            yield Evict(Inst("m0", (7,)))

    policy, (sim, jobs) = Policy(asks), engine([1.5, 2.0, 9.0])
    outcome = replay(policy, sim, jobs)
    assert outcome.refused == 3
    assert outcome.first_refused.startswith("Evict(inst=Inst(model='m0', place=(7,))) at t = 1.5 s: ")
    policy, (sim, jobs) = Policy(serve), engine([1.5, 2.0, 9.0])
    outcome = replay(policy, sim, jobs)
    assert (outcome.refused, outcome.first_refused) == (0, "")


def test_what_an_engine_lacks_is_named() -> None:
    for policy, name in (
        (Policy(serve, uses=frozenset({"Load.way:tape"})), "Load.way:tape"),
        (Policy(serve, hears=frozenset({int})), "event int"),
        (Policy(serve, options={"kv": "buddy"}), "option kv=buddy"),
    ):
        with pytest.raises(Unsupported, match=name):
            played(policy, [0.0])


def test_impossible_actions_come_back_and_change_nothing() -> None:
    def wrong(event: Event, view: View) -> Iterable[Action]:
        yield from serve(event, view)
        if event == Woke("start"):
            yield Evict(Inst("m0", (7,)))
        if isinstance(event, Arrived):
            yield Admit(99, A)
            yield Admit("m0", Batch(Inst("nobody", (0,))))
            yield Load(Inst("m0", (0, 1)))
            yield Run(A, slice_layers=3)

    policy = Policy(wrong, frozenset({Woke, Arrived, Done}))
    sim = played(policy, [0.0])
    refused = [e for _, e in policy.heard if isinstance(e, Done)]
    assert [type(e.action).__name__ for e in refused] == ["Evict", "Admit", "Admit", "Load", "Run"]
    assert all(e.failed for e in refused)
    assert done_s(sim) == [1.0]


def test_the_time_limit_does_not_strike_within_the_garbage_collector() -> None:
    # what is raised in one of its callbacks is dropped: the policy would go on, and a warning stand on the screen
    collecting = []

    def callback(_phase: str, _info: dict[str, int]) -> None:
        collecting.append(_collecting(sys._getframe()))

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)
    assert collecting == [True, True]  # as it starts and as it stops
    assert not _collecting(sys._getframe())
