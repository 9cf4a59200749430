"""Python policies under each interpreter that is installed: `python -m tests.tools.interpreters [PYTHON ...]`.

Prints simulated requests per CPU-second of the systems that decide most often (median of 3, in turns), and the ratio to
the first interpreter. Each has the locked packages in an environment of its own below `.make/`, which is kept.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT

NAMES = ("python3.11", "python3.12", "python3.13", "python3.14")
DECIDE = ("light8 on 2, prism", "40 models on 16, aegaeon", "heavy8 on 2, static")
REQUESTS, REPEATS = 20_000, 3


def environment(python: str) -> tuple[str, Path] | None:
    """Return the version of an interpreter and one like it with the locked packages; None if it does not start."""
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    try:
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    lock = ROOT / "requirements.lock"
    folder = ROOT / ".make" / f"python-{version}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:8]}"
    inside, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip: list[str | Path] = [
            inside,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            lock,
        ]
        subprocess.run(pip, check=True, capture_output=True)
        made.touch()
    return version, inside


def requests_per_s(python: Path, case: str) -> float:
    """Run a case in a process of its own."""
    words: list[str | Path] = [python, ROOT / "tests/tools/speed.py", case, str(REQUESTS)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


def main(names: Sequence[str]) -> None:
    """Print a line for each case."""
    pythons = dict(filter(None, map(environment, names)))
    if not pythons:
        sys.exit(f"error: none of {', '.join(names)} starts")
    for python in pythons.values():  # compile
        for case in DECIDE:
            requests_per_s(python, case)
    print(f"requests per CPU-second by interpreter, {REQUESTS:,} requests, writer included (median of {REPEATS})")
    print(f"{'case':24} " + " ".join(f"{version:>16}" for version in pythons))
    for case in DECIDE:
        seen: dict[str, list[float]] = {version: [] for version in pythons}
        for _ in range(REPEATS):
            for version, python in pythons.items():
                seen[version].append(requests_per_s(python, case))
        medians = [statistics.median(each) for each in seen.values()]
        print(f"{case:24} " + " ".join(f"{x:8,.0f} ({x / medians[0]:.2f}x)" for x in medians), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
