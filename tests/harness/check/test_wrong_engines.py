"""Engines and loops that are wrong are found by the same laws as systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.check.check import check
from harness.engines.sim.engine import Sim
from harness.loop import engine as engines
from harness.loop.standing import Standing
from harness.policy.actions import Action, Admit
from harness.policy.events import Event, Finished
from tests.cases import cases

HERE = Path(__file__).resolve().parent
AGAIN = Standing.again


class Leaks(Sim):
    """An engine that keeps a block of what a request had."""

    def poll(self, until_s: float) -> Event | None:
        event = super().poll(until_s)
        if isinstance(event, Finished):
            self.S.insts["blocks"][-1] += 1
        return event


class Overfills(Sim):
    """An engine that takes a GPU for larger than it is."""

    def do(self, action: Action) -> None:
        super().do(action)
        if isinstance(action, Admit):
            self.S.insts["blocks"][-1] = 1 << 40


class Repeats(Sim):
    """An engine that tells the end of every request twice."""

    last: Event | None = None

    def poll(self, until_s: float) -> Event | None:
        if isinstance(self.last, Finished):
            event, self.last = self.last, None
            return event
        self.last = super().poll(until_s)
        return self.last

    def idle(self) -> bool:
        return super().idle() and not isinstance(self.last, Finished)


@cases(
    ("engine", "law", "says"),
    [
        (Leaks, "memory", "bytes of KV are held although"),
        (Overfills, "memory", "holds"),
        (Repeats, "served", "finished twice"),
    ],
)
def test_a_wrong_engine_is_found_too(engine: type[Sim], law: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find", lambda _: engine)
    failures = check(str(HERE / "sound" / "on_demand.py"), only=law, case="simultaneous")
    assert says in failures[0].message


@cases(
    ("again", "says"),
    [
        (lambda self, do, now_s: None, "was not issued again when something came free"),
        (lambda self, do, now_s: (self.orders.reverse(), AGAIN(self, do, now_s)), "before "),
    ],
)
def test_a_wrong_loop_is_found_too(again: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "again", again)
    (failure,) = check("chunked", only="stands", case="refused")
    assert says in failure.message
