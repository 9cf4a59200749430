"""What a newcomer does: `make` in a fresh clone with nothing beside it, again on a terminal, then tests without data.

python3 -m tests.bare [all]   # all: `make test` in place of the tests that would read data
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
        "no_proxy")  # fmt: skip
FIGURES = "plots/out/compare-*.png"
PYTEST = (".venv/bin/python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")
# What no other stage can show: documents without data, what data decide, and a run that nobody's CI variable helps.
TESTS = (
    (*PYTEST, "-m", "data and not (slow or torch or servers or cluster)"),
    (*PYTEST, "tests/test_documents.py", "tests/test_cases.py"),
)


def run(command: tuple[str, ...], folder: Path, home: Path) -> None:
    """Run a command in an environment that has next to nothing; end with its status where that is not 0."""
    print(f"$ {' '.join(command)}", flush=True)
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | {"HOME": str(home)}
    if code := subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(code)


def on_a_terminal(command: tuple[str, ...], folder: Path, home: Path) -> str:
    """Run a command on a terminal of 80 columns and return what it prints there; it must succeed."""
    size = "import os, sys, termios; termios.tcsetwinsize(1, (24, 80)); os.execvp(sys.argv[1], sys.argv[1:])"
    read, child = pty.openpty()
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | {"HOME": str(home), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", size, *command], cwd=folder, env=env, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    told = bytearray()
    while True:
        try:
            part = os.read(read, 65536)
        except OSError:  # Linux says so where the other side has closed
            break
        if not part:
            break
        told += part
    if code := process.wait():
        print(told.decode(errors="replace"))
        sys.exit(code)
    return told.decode()


def main(words: list[str]) -> None:
    """Do it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "clone", Path(folder) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        run(("make",), clone, home)
        if not [*clone.glob(FIGURES)]:
            sys.exit(f"make draws no {FIGURES}")
        again = on_a_terminal(("make",), clone, home)
        if "static:equal" not in again:
            sys.exit(f"make shows no table on a terminal:\n{again}")
        for command in (("make", "test"),) if words == ["all"] else TESTS:
            run(command, clone, home)


if __name__ == "__main__":
    main(sys.argv[1:])
