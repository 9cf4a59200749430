"""A policy that a test writes as a function, and a log of what it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.loop.recorder import Decision, Note
from harness.policy.actions import Action
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.types import Option
from harness.policy.view import View


@dataclass
class Policy:
    """A policy that answers events by a function, and keeps what it heard."""

    answer: Callable[[Event, View], Iterable[Action]]
    hears: frozenset[type] = frozenset({Woke, Arrived, Finished})
    uses: frozenset[str] = frozenset({"Load", "Run", "Admit", "Wake", "Evict"})
    options: Mapping[str, Option] = field(default_factory=dict)
    heard: list[tuple[float, Event]] = field(default_factory=list)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        self.heard.append((view.now_s, event))
        return self.answer(event, view)

    def events(self, kind: type) -> list[Any]:
        """Return events of a kind."""
        return [event for _, event in self.heard if isinstance(event, kind)]


@dataclass
class Recorder:
    """A log of all decisions, without what was read for them, and of all notes."""

    decisions: list[Decision] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def watch(self, view: View) -> View:
        return view

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        self.decisions.append(Decision(now_s, event, (), actions))

    def stood(self, note: Note) -> None:
        self.notes.append(note)
