"""A test of many cases runs them all, and names each that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

TESTS = """
import os
from pathlib import Path

import pytest

from harness.policy.types import UserError
from tests.cases import cases


@cases(("a", "b"), [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_pairs(a, b):
    assert a == b


@cases("raises", {"nothing": None, "a bug": ZeroDivisionError("why"), "a mistake": UserError("of theirs")})
def test_errors(raises):
    if raises is not None:
        raise raises


@cases("n", range(3))
def test_one_is_skipped(n):
    if n == 1:
        pytest.skip("no such row")


@cases("n", range(3))
def test_what_is_fresh(n, tmp_path, monkeypatch, shared):
    assert "HEARD" not in os.environ
    monkeypatch.setenv("HEARD", "yes")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").write_text("")
    shared.append(n)
    assert shared == [*range(n + 1)]


@pytest.fixture
def shared():
    return []


@cases("n", [0, 1, 2])
def test_that_is_interrupted(n):
    if n == 1:
        raise KeyboardInterrupt
    assert n == 1
"""


def test_every_case_runs_and_each_failure_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("")
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}  # narrower, its lines are cut
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", "test_x.py"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    told = [line for line in run.stdout.splitlines() if line.startswith(("SUB", "FAILED", "PASSED"))]
    assert told == [
        "PASSED test_x.py::test_one_is_skipped",
        "PASSED test_x.py::test_what_is_fresh",
        "SUBSKIPPED(n=1) [1] test_x.py:25: no such row",
        "SUBFAILED(a=1, b=2) test_x.py::test_pairs - assert 1 == 2",
        "SUBFAILED(a=3, b=4) test_x.py::test_pairs - assert 3 == 4",
        "FAILED test_x.py::test_pairs - contains 2 failed subtests",
        "SUBFAILED[a bug] test_x.py::test_errors - ZeroDivisionError: why",
        "SUBFAILED[a mistake] test_x.py::test_errors - harness.policy.types.UserError: of theirs",
        "FAILED test_x.py::test_errors - contains 2 failed subtests",
        "SUBFAILED(n=0) test_x.py::test_that_is_interrupted - assert 0 == 1",
        "SUBFAILED(n=1) test_x.py::test_that_is_interrupted - KeyboardInterrupt",
    ]
    assert "KeyboardInterrupt" in run.stdout
    assert run.returncode == 2
