"""Logs of a replay: decisions with the queries read for them, and the fate of actions refused for now."""

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
