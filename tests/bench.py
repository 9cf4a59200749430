"""The command line as tests call it, in this process, and Python in another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from harness.cli.app import main
from harness.loop.system import ROOT


def bench(*args: object) -> Result:
    """Run `bench` with these words; an exception that is no user's mistake is raised."""
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def ok(*args: object) -> str:
    """Return what `bench` prints, if it succeeds."""
    result = bench(*args)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def python(
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a process of its own."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, check=check, capture_output=True, text=True)


def mistake(result: Result, *says: object) -> None:
    """Check for one line on stderr, and exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in says:
        assert str(text) in result.stderr
    assert result.stdout == ""
