"""Three tasks of a newcomer, done by the documents' own blocks in a fresh clone, with the seconds that each takes.

python -m tests.tools.tasks [NAME ...]     # NAME of TASKS; all of them unless named
python -m tests.tools.tasks --script NAME  # only print what would be done
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OURS = {"CI", "TRACES_DIR", "PROFILES_DIR", "MEASURED_DIR", "PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS"}  # no newcomer has


class Task(NamedTuple):
    """Sections of a document whose blocks do a task."""

    minutes: int  # minutes on idle cores
    path: str
    sections: tuple[str, ...]
    lines: int | None = None  # only so many of each block


TASKS = {
    "figure-7": Task(10, "docs/papers/prism.md", ("Commands",), 1),
    "own-log": Task(5, "docs/traffic.md", ("A log", "A set of models", "SLOs", "Which system?")),
    "new-system": Task(15, "docs/contributing.md", ("A system, step by step",)),
}


def script(task: Task) -> str:
    """Join a task's blocks to a shell script: files that have a name are written, commands follow in order."""
    return "".join(part for section in task.sections for part in _section(task, section))


def _section(task: Task, heading: str) -> Iterator[str]:
    whole = (ROOT / task.path).read_text("utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}\n", whole, maxsplit=1, flags=re.MULTILINE)[1]
    for block in BLOCK.finditer(re.split(r"^#+ .*\n", section, maxsplit=1, flags=re.MULTILINE)[0]):
        kind, name, content = block.groups()
        if name:
            yield f"cat >{name} <<'END'\n{content}END\n"
        elif kind == "sh":
            yield "".join(content.splitlines(keepends=True)[: task.lines])


def timed(command: list[str], folder: Path, most_s: float) -> None:
    """Run a command as a newcomer would; print its seconds, and those of all processors. Raises CalledProcessError."""
    print(f"$ {' '.join(command)}", flush=True)
    begun, before_s = time.monotonic(), cpu_s()
    env = {name: value for name, value in os.environ.items() if name not in OURS}
    subprocess.run(command, cwd=folder, env=env, check=True)
    took_s = time.monotonic() - begun
    print(f"{took_s:.0f} s of {most_s:.0f} s ({cpu_s() - before_s:.0f} CPU seconds)", flush=True)


def cpu_s() -> float:
    """Return the CPU seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(words: list[str]) -> None:
    """Do tasks in one clone, after its set-up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*TASKS], metavar="NAME")
    parser.add_argument("--script", action="store_true")
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.names if name not in TASKS]:
        parser.error(f"no task {unknown[0]} (there are {', '.join(TASKS)})")
    if asked.script:
        print("".join(script(TASKS[name]) for name in asked.names), end="")
        return
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        timed(["make", "setup"], clone, 240)
        for name in asked.names:
            (clone / f"{name}.sh").write_text(f"set -e\n. .venv/bin/activate\n{script(TASKS[name])}", "utf-8")
            timed(["bash", f"{name}.sh"], clone, 60.0 * TASKS[name].minutes)


if __name__ == "__main__":
    main(sys.argv[1:])
