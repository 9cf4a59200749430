"""A newcomer's first steps: `make` in a fresh clone with nothing beside it, again on a terminal, then tests.

python3 -m tests.tools.bare [all]   # all: `make test` in place of the tests that would read data
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.tools.first_screen import fresh

FIGURES = "plots/out/compare-*.png"
PYTEST = (".venv/bin/python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")
# What only this stage can show: tests and documents where no data lie beside the clone and no CI variable is set.
TESTS = (
    (*PYTEST, "-m", "data and not (slow or torch or servers or cluster)"),
    (*PYTEST, "tests/repository/test_documents.py", "tests/repository/test_cases.py"),
)
SIZED = "import os, sys, termios; termios.tcsetwinsize(1, (24, 80)); os.execvp(sys.argv[1], sys.argv[1:])"


def run(command: Sequence[str], clone: Path, env: Mapping[str, str]) -> None:
    """Run a command in the clone; end with its status where that is not 0."""
    print(f"$ {' '.join(command)}", flush=True)
    if code := subprocess.run(command, cwd=clone, env=env, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(code)


def on_a_terminal(command: Sequence[str], clone: Path, env: Mapping[str, str]) -> str:
    """Run a command on a terminal of 80 columns and return what it prints there; end where it fails."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SIZED, *command]
    process = subprocess.Popen(command, cwd=clone, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = bytearray()
    try:
        while part := os.read(ours, 65536):
            told += part
    except OSError:  # the other side has closed it
        pass
    if code := process.wait():
        print(told.decode(errors="replace"))
        sys.exit(code)
    return told.decode()


def main(words: Sequence[str]) -> None:
    """Do it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        clone, env = fresh(Path(folder))
        run(("make",), clone, env)
        if not any(clone.glob(FIGURES)):
            sys.exit(f"make draws no {FIGURES}")
        again = on_a_terminal(("make",), clone, {**env, "TERM": "xterm"})
        if "static:equal" not in again:
            sys.exit(f"make shows no table on a terminal:\n{again}")
        for command in (("make", "test"),) if [*words] == ["all"] else TESTS:
            run(command, clone, env)


if __name__ == "__main__":
    main(sys.argv[1:])
