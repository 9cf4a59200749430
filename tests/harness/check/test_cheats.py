"""Policies that reach for the true lengths: each is told what it may not name, whatever it would have got by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.check.cases import cases
from harness.check.check import check
from harness.check.purity import impure
from harness.check.trial import subject
from harness.loop import system
from harness.loop.replay import replay
from tests.harness.check.cheats import CHEATS, DIG, cheat

# What no law about decisions sees: under a check they meet a view that is lent, which has nothing to give, and behave.
BEHAVE = {"gc", "object.__getattribute__", "bound method", "globals of a method"}


def served(name: str, folder: Path) -> list[int]:
    """Return the second at which each request is admitted under a policy that nothing guards."""
    case = cases()["overload"]
    policy, engine = subject(system.find(str(cheat(name, folder))), None, "overload", case).assemble()
    replay(policy, engine, case.jobs, end_s=500.0)
    return [row["admit_ns"] for batch in engine.rows() for row in batch.to_pylist()]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_told_what_it_may_not_name(name: str, tmp_path: Path) -> None:
    text = cheat(name, tmp_path).read_text("utf-8")
    mine = text.partition(DIG)[0].count("\n") + 1  # what digs in frames would be refused too
    assert [what for line, what in impure(text) if line <= mine]


def test_shortest_first_by_leave_names_nothing_else(tmp_path: Path) -> None:
    for name in ("fifo", "oracle"):
        assert list(impure(cheat(name, tmp_path).read_text("utf-8"))) == []


def test_what_a_run_that_nothing_guards_gives_away(tmp_path: Path) -> None:
    fifo, oracle = (served(name, tmp_path) for name in ("fifo", "oracle"))
    assert fifo != oracle
    assert {name for name in CHEATS if served(name, tmp_path) != oracle} == {
        "jobs of a frame"
    }  # they lie in the engine


@pytest.mark.parametrize("name", CHEATS)
def test_the_check_names_a_cheat(name: str, tmp_path: Path) -> None:
    laws = {failure.law for failure in check(str(cheat(name, tmp_path)), case="one-gpu", twice=False)}
    assert "pure" in laws
    assert (laws == {"pure"}) == (name in BEHAVE)
