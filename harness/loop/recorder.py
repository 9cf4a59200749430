"""Logs of a replay: decisions with the queries read for them, and the fate of actions refused for now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, Protocol

from harness.policy.actions import Action
from harness.policy.events import Event
from harness.policy.view import View

Fate = Literal["refused", "issued", "withdrawn"]


@dataclass(frozen=True, slots=True)
class Note:
    """An event of a standing order (harness/loop/standing.py).

    The order was refused, with the engine's reason; issued again, and accepted; or withdrawn for a newer action of the
    policy.
    """

    now_s: float
    action: Action
    fate: Fate
    why: str = ""


class Log(Protocol):
    """A listener to decisions; it may stand between a policy and its view."""

    def watch(self, view: View) -> View:
        """Return the view to hand to the policy."""
        ...

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """Record one decision."""
        ...

    def stood(self, note: Note) -> None:
        """Record an event of a standing order."""
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
    """Return a query's arguments in order, whichever way a policy writes them."""
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
    """A log of all notes, and of all decisions with the policy's queries and their answers.

    With these, a new instance of the policy can be asked for the same decisions.
    """

    decisions: list[Decision] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    _reads: list[Read] = field(default_factory=list)

    def watch(self, view: View) -> View:
        """Return a watched view."""
        watched: Any = Watched(view, self._reads)
        return watched  # type: ignore[no-any-return]

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """Close the decision."""
        self.decisions.append(Decision(now_s, event, tuple(self._reads), actions))
        self._reads.clear()

    def stood(self, note: Note) -> None:
        """Keep the note."""
        self.notes.append(note)
