"""The one loop: next event -> system -> actions -> engine. It keeps timers and delays decisions; engines do neither."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from harness.loop.answers import fault
from harness.loop.engine import Engine
from harness.loop.guard import Fault, Watch, error_text, quiet
from harness.loop.interrupted import Interrupted
from harness.loop.recorder import Log
from harness.loop.standing import Standing, is_turn
from harness.loop.system import System
from harness.policy.actions import Action, Evict, Limit, Load, Move, Run, Wake, brief
from harness.policy.events import Arrived, Done, Event, Freed, TurnEnded, Woke
from harness.policy.types import Infeasible, Jobs, Unsupported

MOST_ROUNDS = 1000  # decisions within one instant before it counts as a livelock
MOST_ACTIONS = 1_000_000  # the most of one answer: several for each request of a large backlog

PLACING = frozenset({Load, Evict, Limit, Move})


class Livelock(Fault):
    """The error of a policy that makes decisions, or answers with actions, without end while no time passes."""


@dataclass(slots=True)
class Outcome:
    """The number of actions that the engine refused, and the wall-clock seconds of the policy, which no result uses."""

    refused: int = 0  # actions that failed, or were refused for now: once each
    first_refused: str = ""  # the first of them, when, and the engine's reason
    policy_s: float = 0.0
    policy_calls: int = 0
    slowest_s: float = 0.0


class Agenda:
    """Timers and delayed actions, sorted by time, then by age. A new timer replaces the timer with the same key."""

    due_s = math.inf  # when the first entry in force is due

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str | None, tuple[Action, ...]]] = []
        self._timer: dict[str, int] = {}
        self._seq = 0

    def wake(self, at_s: float, key: str) -> None:
        """Set a timer, replace it, or cancel it (`at_s` infinite)."""
        self._seq += 1
        self._timer[key] = self._seq
        if at_s < math.inf:
            heapq.heappush(self._heap, (at_s, self._seq, key, ()))
        self._look()

    def later(self, at_s: float, actions: tuple[Action, ...]) -> None:
        """Schedule actions that are to be applied at `at_s`."""
        self._seq += 1
        heapq.heappush(self._heap, (at_s, self._seq, None, actions))
        self._look()

    def pop(self) -> tuple[str | None, tuple[Action, ...]]:
        """Remove and return the first valid entry: the key of a timer, or actions."""
        _, _, key, actions = heapq.heappop(self._heap)
        if key is not None:
            del self._timer[key]
        self._look()
        return key, actions

    def _look(self) -> None:
        """Drop replaced and cancelled timers from the front of the heap."""
        heap = self._heap
        while heap:
            self.due_s, seq, key, _ = heap[0]
            if key is None or self._timer.get(key) == seq:
                return
            heapq.heappop(heap)
        self.due_s = math.inf


FORESEES = {("kv", "pow2"), ("kv", "oracle")}  # options with which an engine uses true output lengths
TRUE_LENGTHS = "view.oracle_tokens"


def missing(system: System, engine: Engine) -> list[str]:
    """List the actions, queries, events and options that a system needs and an engine lacks.

    Names that begin with `Request.` or `Cluster.` are skipped: they belong to the policy's input, which engines do not
    provide. An option in FORESEES is also listed if the system does not use TRUE_LENGTHS.
    """
    uses = {u for u in system.uses if not u.startswith(("Request.", "Cluster."))}
    lacks = sorted(uses - engine.can - {"Wake"})
    lacks += sorted(f"event {e.__name__}" for e in system.hears - engine.tells)
    for name, value in sorted(system.options.items()):
        if value not in engine.offers.get(name, ()):
            lacks.append(f"option {name}={value}")
        elif (name, value) in FORESEES and TRUE_LENGTHS not in uses:
            lacks.append(f"option {name}={value} without {TRUE_LENGTHS}")
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

    Each decision takes `decision_s`. A policy decides on one event at a time, and sees the state at the decision's
    start. Loads, evictions, limits and moves take effect a further `control_s` after the decision. Turns in the same
    answer are delayed equally; otherwise they would end as stuck before their loads start. On a wall clock both delays
    are 0, because a decision takes real time.

    This function makes the engine ready; the code that made the engine closes it. Raises Unsupported (before the engine
    is ready), Infeasible, or Fault. Fault means that the policy raised an exception, returned a value other than
    actions, exceeded `guard.LIMIT_S`, or let no time pass (Livelock).
    """
    if lacks := missing(system, engine):
        raise Unsupported(", ".join(lacks))
    if engine.wall_clock and (decision_s or control_s):
        raise ValueError("no seconds can be added to a wall clock")
    engine.ready()
    engine.take(jobs)
    del jobs  # no frame that calls the policy holds future requests
    loop = Replay(system, engine, decision_s, control_s, log)
    with loop.watch, quiet():
        loop.start(end_s)
        loop.run()
    return loop.outcome


class Replay:
    """A run in progress: the events that wait for a decision, the agenda, and the standing orders."""

    def __init__(self, system: System, engine: Engine, decision_s: float, control_s: float, log: Log | None) -> None:
        self.system, self.engine, self.log = system, engine, log
        self.decision_s, self.control_s, self.end_s = decision_s, control_s, math.inf
        self.outcome, self.agenda, self.watch = Outcome(), Agenda(), Watch()
        self.standing = Standing([], log)
        self.view = engine.view()
        self.seen = log.watch(self.view) if log else self.view  # the view that the policy reads
        self.heard: deque[Event] = deque()
        self.thinking: tuple[Action, ...] = ()  # the answer that lands at `free_s`
        self.free_s = -math.inf  # no next decision before it
        self.rounds, self.instant = 0, -math.inf  # decisions in the instant of the last one

    def start(self, end_s: float) -> None:
        """Apply the policy's answer to "start", then start the clock."""
        self.end_s = end_s
        actions = self.decide(Woke("start")) if Woke in self.system.hears else ()
        self.apply([a for a in actions if not isinstance(a, Wake)], 0.0)
        self.engine.begin(self.system.hears, TRUE_LENGTHS in self.system.uses, end_s)
        self.apply([a for a in actions if isinstance(a, Wake)], 0.0)

    def run(self) -> None:
        """Let the policy decide on events, and let time pass between decisions, until nothing more can happen."""
        idle, heard, view = self.engine.idle, self.heard, self.view
        while not idle():
            if heard and not self.thinking and view.now_s >= self.free_s:
                actions = self.decide(heard.popleft())
                if not self.decision_s:
                    if actions:
                        self.apply(actions, self.control_s)
                    continue
                self.thinking, self.free_s = actions, view.now_s + self.decision_s
            if not self.wait():
                return

    def wait(self) -> bool:
        """Let time pass until something happens; return False if nothing will happen any more.

        The wait stops at the end of a decision if its answer takes effect then, if another event waits for a decision,
        or if the agenda is empty.
        """
        due_s, free_s = self.agenda.due_s, self.free_s
        lands = free_s <= due_s and (self.thinking or self.heard or (due_s == math.inf and self.view.now_s < free_s))
        if lands:
            due_s = free_s
        event = self.engine.poll(due_s)
        if event is not None:
            self.hear(event)
        elif due_s > self.end_s or due_s == math.inf:
            return False
        elif lands:
            if self.thinking:
                self.apply(self.thinking, self.control_s)
                self.thinking = ()
        else:
            key, actions = self.agenda.pop()
            if key is not None:
                self.heard.append(Woke(key))
            else:
                self.apply(actions, 0.0)
        return True

    def hear(self, event: Event) -> None:
        """Queue an event for the policy. `Freed` is not queued: it makes the engine retry the standing orders."""
        if type(event) is Freed:
            self.standing.again(self.engine.do, self.view.now_s)
            return
        self.heard.append(event)
        if type(event) is Done and event.failed is not None:
            self.count(event)

    def decide(self, event: Event) -> tuple[Action, ...]:
        """Call the policy with an event, and return the actions of its answer."""
        now_s, outcome, watch = self.view.now_s, self.outcome, self.watch
        if now_s > self.instant:
            self.rounds, self.instant = 0, now_s
        elif self.rounds < MOST_ROUNDS:
            self.rounds += 1
        else:
            raise Livelock(f"{MOST_ROUNDS} decisions at {now_s:.6g} s without time passing; the last event: {event}")
        outcome.policy_calls += 1
        t = perf_counter()
        try:
            watch.call = outcome.policy_calls
            actions = tuple(islice(self.system.on(event, self.seen), MOST_ACTIONS))
            watch.call = 0
        except (Infeasible, Unsupported, Interrupted):
            raise
        except BaseException as error:  # SystemExit too
            watch.call = 0
            raise Fault(f"{error_text(error)}, {_when(now_s, event)}") from error
        t = perf_counter() - t
        outcome.policy_s += t
        if t > outcome.slowest_s:  # noqa: PLR1730 - a call of `max` takes three times as long
            outcome.slowest_s = t
        if actions:
            if wrong := fault(actions):
                raise Fault(f"{wrong}, {_when(now_s, event)}")
            if len(actions) == MOST_ACTIONS:
                raise Livelock(f"answered {MOST_ACTIONS:,} actions at once, {_when(now_s, event)}")
        if self.log:
            self.log.decided(event, actions, now_s)
        return actions

    def apply(self, actions: Sequence[Action], delay_s: float) -> None:
        """Set timers and issue actions.

        Actions of the types in PLACING are issued `delay_s` later. If `actions` contains any of these, the turns in
        `actions` are issued `delay_s` later too.
        """
        standing, do = self.standing, self.engine.do
        placing = delay_s > 0.0 and not PLACING.isdisjoint(map(type, actions))
        for action in actions:
            if type(action) is Wake:
                self.agenda.wake(max(action.at_s, self.view.now_s), action.key)
                continue
            if standing.orders:
                self.withdraw(action)
            if placing and (type(action) in PLACING or is_turn(action)):
                self.agenda.later(self.view.now_s + delay_s, (action,))
            elif standing.orders and standing.awaited(action):
                standing.add(action, "the load of its weights was refused", self.view.now_s)
            elif (refusal := do(action)) is not None:
                self.count(refusal)
                standing.add(action, refusal.why, self.view.now_s)

    def withdraw(self, newer: Action) -> None:
        """Withdraw the standing orders that a newer action replaces.

        If the newer action closes a lane, the lane's standing turn is withdrawn. A policy that hears `TurnEnded` then
        gets that event, just as an engine would report it.
        """
        closes = isinstance(newer, Run) and newer.steps == 0 and TurnEnded in self.system.hears
        for gone in self.standing.withdraw(newer, self.view.now_s):
            if closes and is_turn(gone):
                self.heard.append(TurnEnded(gone.batch, gone.phase, "steps", 0, 0.0))

    def count(self, refusal: Done) -> None:
        """Count a refused action; for the first one, also store what was refused, when and why."""
        outcome = self.outcome
        outcome.refused += 1
        if outcome.refused == 1:
            reason = f"{refusal.failed}, {refusal.why}" if refusal.why else refusal.failed
            outcome.first_refused = f"{brief(refusal.action)} at t = {self.view.now_s:.6g} s: {reason}"


def _when(now_s: float, event: Event) -> str:
    """Return the time and the event of a call of the policy, as text."""
    told = f"Arrived(id={event.request.id})" if isinstance(event, Arrived) else str(event)
    return f"t = {now_s:.6g} s, {told}"
