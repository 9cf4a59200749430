"""The engine contract: found by file name, light until asked, readied once and closed however a run ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.system import ROOT

HEAVY = ("numba", "torch")


def imported(code: str) -> str:
    """Which of the heavy libraries a fresh interpreter has imported after `code`."""
    tail = f"\nimport sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True, cwd=ROOT)
    return run.stdout.strip()


@pytest.mark.parametrize("module", ["machine", "rows"])
def test_what_every_engine_needs_is_not_compiled(module: str) -> None:
    assert imported(f"from harness.engines import {module}") == ""
