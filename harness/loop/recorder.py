"""Logs of a replay: each decision with the queries that the policy made for it, and events of standing orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, Protocol

from harness.policy.actions import Action
from harness.policy.events import Event
from harness.policy.view import View

Fate = Literal["refused", "issued", "withdrawn"]


@dataclass(frozen=True, slots=True)
class Note:
    """An event of a standing order (harness/loop/standing.py).

    One of three things happened. The engine refused the order, for the reason `why`. Or the order was issued again and
    accepted. Or it was withdrawn, because a newer action of the policy replaces it.
    """

    now_s: float
    action: Action
    fate: Fate
    why: str = ""


class Log(Protocol):
    """A listener to decisions and to events of standing orders. It may replace the view that a policy reads."""

    def watch(self, view: View) -> View:
        """Return the view that the policy reads: the engine's `view`, or an object that wraps it."""
        ...

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """Record a decision: the event, the policy's actions and the time."""
        ...

    def stood(self, note: Note) -> None:
        """Record an event of a standing order."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """A query of a policy, and its answer."""

    query: str
    args: tuple[Any, ...]
    answer: Any


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: the event, the policy's queries, and the actions of its answer."""

    now_s: float
    event: Event
    reads: tuple[Read, ...]
    actions: tuple[Action, ...]


def positions(query: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a query's arguments by position, also if a policy passed some by name."""
    return signature(getattr(View, query)).bind(None, *args, **named).args[1:] if named else args
