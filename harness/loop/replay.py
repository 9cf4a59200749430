"""The one loop: next event -> system -> actions -> engine. Timers and thinking time live here, engines know neither."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice
from typing import Any, Protocol

from harness.loop.answers import fault
from harness.loop.engine import Engine
from harness.loop.guard import Fault, Watch, quiet, said
from harness.loop.system import System
from harness.policy.actions import Action, Evict, Limit, Load, Move, Run, Wake, brief
from harness.policy.events import Arrived, Done, Event, Woke
from harness.policy.types import Infeasible, Jobs, Unsupported
from harness.policy.view import View

MOST_ROUNDS = 1000  # decisions within one instant before it counts as a livelock
MOST_ACTIONS = 1_000_000  # of one answer: several for each request of a large backlog

PLACING = frozenset({Load, Evict, Limit, Move})


class Livelock(Fault):
    """A policy went on deciding, or answering, without time passing."""


@dataclass(slots=True)
class Outcome:
    """What the engine refused, and what the policy cost on the wall clock; the latter enters no result."""

    refused: int = 0  # actions that came back as Done(failed)
    first_refused: str = ""  # the first of them, when, and the engine's reason
    policy_s: float = 0.0
    policy_calls: int = 0
    slowest_s: float = 0.0


class Log(Protocol):
    """Hears each decision; may stand between a policy and its view."""

    def watch(self, view: View) -> View:
        """The view to hand to the policy."""
        ...

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """One decision."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """One query of a policy and its answer."""

    query: str
    args: tuple[Any, ...]
    answer: Any


@dataclass(frozen=True, slots=True)
class Decision:
    """An event, what the policy read, and what it answered."""

    now_s: float
    event: Event
    reads: tuple[Read, ...]
    actions: tuple[Action, ...]


def positions(query: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A query's arguments in order, whichever way a policy writes them."""
    return signature(getattr(View, query)).bind(None, *args, **named).args[1:] if named else args


class Watched:
    """A view that notes each query and its answer."""

    def __init__(self, view: View, reads: list[Read]) -> None:
        self._view, self._reads = view, reads

    @property
    def now_s(self) -> float:
        """The clock, noted like any query."""
        now_s: float = self._note("now_s", ())
        return now_s

    def _note(self, query: str, args: tuple[Any, ...]) -> Any:
        answer = getattr(self._view, query)
        if query != "now_s":
            answer = answer(*args)
        self._reads.append(Read(query, args, answer))
        return answer

    def __getattr__(self, query: str) -> Callable[..., Any]:
        if query.startswith("_") or not hasattr(self._view, query):
            raise AttributeError(query)
        return lambda *args, **named: self._note(query, positions(query, args, named))


@dataclass(slots=True)
class Recorder:
    """Keeps every decision with what was read for it: enough to ask a fresh policy again."""

    decisions: list[Decision] = field(default_factory=list)
    _reads: list[Read] = field(default_factory=list)

    def watch(self, view: View) -> View:
        """A watched view."""
        watched: Any = Watched(view, self._reads)
        return watched  # type: ignore[no-any-return]

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """Close the decision."""
        self.decisions.append(Decision(now_s, event, tuple(self._reads), actions))
        self._reads.clear()


class Agenda:
    """Timers and delayed answers by (time, order of asking); a key's later timer replaces its earlier one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str | None, tuple[Action, ...]]] = []
        self._timer: dict[str, int] = {}
        self._seq = 0

    def wake(self, at_s: float, key: str) -> None:
        """Arm, move or (at infinity) cancel a timer."""
        self._seq += 1
        self._timer[key] = self._seq
        if at_s < math.inf:
            heapq.heappush(self._heap, (at_s, self._seq, key, ()))

    def later(self, at_s: float, actions: tuple[Action, ...]) -> None:
        """Apply actions at a time."""
        self._seq += 1
        heapq.heappush(self._heap, (at_s, self._seq, None, actions))

    def next_s(self) -> float:
        """When the first entry in force is due; infinity when there is none."""
        while self._heap:
            at_s, seq, key, _ = self._heap[0]
            if key is None or self._timer.get(key) == seq:
                return at_s
            heapq.heappop(self._heap)
        return math.inf

    def pop(self) -> tuple[str | None, tuple[Action, ...]]:
        """The entry that `next_s` spoke of: a timer's key, or actions."""
        _, _, key, actions = heapq.heappop(self._heap)
        if key is not None:
            del self._timer[key]
        return key, actions


def is_turn(action: Action) -> bool:
    """Whether an action is a turn: an order that ends by itself."""
    return isinstance(action, Run) and (action.for_s is not None or bool(action.steps))


def missing(system: System, engine: Engine) -> list[str]:
    """What a system asks for that an engine cannot do, tell or offer."""
    uses = {u for u in system.uses if not u.startswith("Request.")}
    lacks = sorted(uses - engine.can - {"Wake"})
    lacks += sorted(f"event {e.__name__}" for e in system.hears - engine.tells)
    for name, value in sorted(system.options.items()):
        if value not in engine.offers.get(name, ()):
            lacks.append(f"option {name}={value}")
    return lacks


def replay(
    system: System,
    engine: Engine,
    jobs: Jobs,
    *,
    end_s: float = math.inf,
    decision_s: float = 0.0,
    control_s: float = 0.0,
    log: Log | None = None,
) -> Outcome:
    """Run a workload through a system on an engine until every request has ended, or until `end_s`.

    Each decision takes `decision_s`; a policy decides one event at a time and sees the view of its start. Loads,
    evictions, limits and moves take effect `control_s` later still, and with them the turns of the same answer, which
    would else end before what they wait for is under way. On a wall clock both are 0: thinking takes its own time.

    The engine is made ready here, and closed by whoever made it. Raises Unsupported (before the engine is ready),
    Infeasible, and Fault where the policy raises, answers what is no action, exceeds `guard.LIMIT_S`, or lets no time
    pass (Livelock).
    """
    if lacks := missing(system, engine):
        raise Unsupported(", ".join(lacks))
    if engine.wall_clock and (decision_s or control_s):
        raise ValueError("no seconds can be added to a wall clock")
    engine.ready()
    outcome, agenda, watch = Outcome(), Agenda(), Watch()
    view = engine.view()
    seen = log.watch(view) if log else view
    heard: deque[Event] = deque()
    thinking: tuple[Action, ...] | None = None
    rounds, instant = 0, -math.inf

    def decide(event: Event) -> tuple[Action, ...]:
        nonlocal rounds, instant
        now_s = view.now_s
        rounds = rounds + 1 if now_s == instant else 0
        instant = now_s
        if rounds > MOST_ROUNDS:
            raise Livelock(f"{MOST_ROUNDS} decisions at {now_s:.6g} s without time passing; the last event: {event}")
        outcome.policy_calls += 1
        t = time.perf_counter()
        try:
            watch.call = outcome.policy_calls
            actions = tuple(islice(system.on(event, seen), MOST_ACTIONS))
            watch.call = 0
        except (Infeasible, Unsupported, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too
            watch.call = 0
            raise Fault(f"{said(error)}, {_when(now_s, event)}") from error
        t = time.perf_counter() - t
        outcome.policy_s += t
        outcome.slowest_s = max(outcome.slowest_s, t)
        if actions:
            if wrong := fault(actions):
                raise Fault(f"{wrong}, {_when(now_s, event)}")
            if len(actions) == MOST_ACTIONS:
                raise Livelock(f"answered {MOST_ACTIONS:,} actions at once, {_when(now_s, event)}")
        if log:
            log.decided(event, actions, now_s)
        return actions

    def count_refusal(done: Done) -> None:
        if done.failed is not None:
            outcome.refused += 1
            if outcome.refused == 1:
                outcome.first_refused = f"{brief(done.action)} at t = {view.now_s:.6g} s: {done.failed}"

    def apply(actions: Sequence[Action], delay_s: float) -> None:
        placing = delay_s > 0.0 and not PLACING.isdisjoint(map(type, actions))
        for action in actions:
            if isinstance(action, Wake):
                agenda.wake(max(action.at_s, view.now_s), action.key)
            elif placing and (type(action) in PLACING or is_turn(action)):
                agenda.later(view.now_s + delay_s, (action,))
            else:
                engine.do(action)

    with watch, quiet():
        start = decide(Woke("start")) if Woke in system.hears else ()
        apply([a for a in start if not isinstance(a, Wake)], 0.0)
        engine.begin(jobs, system.hears, "view.oracle_tokens" in system.uses, end_s)
        apply([a for a in start if isinstance(a, Wake)], 0.0)
        free_s = math.inf  # when the answer being thought of lands
        while not engine.idle():
            if thinking is None and heard:
                actions = decide(heard.popleft())
                if decision_s > 0.0:
                    thinking, free_s = actions, view.now_s + decision_s
                elif actions:
                    apply(actions, control_s)
                continue
            due_s = min(agenda.next_s(), free_s)
            event = engine.poll(due_s)
            if event is not None:
                heard.append(event)
                if type(event) is Done:
                    count_refusal(event)
            elif due_s > end_s or due_s == math.inf:
                break
            elif free_s <= due_s and thinking is not None:
                apply(thinking, control_s)
                thinking, free_s = None, math.inf
            else:
                key, actions = agenda.pop()
                if key is not None:
                    heard.append(Woke(key))
                apply(actions, 0.0)
    return outcome


def _when(now_s: float, event: Event) -> str:
    """Which call of a policy it was."""
    told = f"Arrived(id={event.request.id})" if isinstance(event, Arrived) else str(event)
    return f"t = {now_s:.6g} s, {told}"
