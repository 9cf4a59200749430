"""Studies and systems that the tests of clusters run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.loop.system import ROOT
from harness.rows import record
from tests.harness.study.test_shards import files

# A system that notes each run that begins in a diary, waits while it is held, and caps the files of its process.
SLOW = '''
"""A system of a test."""

import os
import resource
import signal
import time
from pathlib import Path

from systems.static import Static

HERE = Path({folder!r})


class Slow(Static):
    def on(self, event, view):
        if type(event).__name__ == "Woke" and event.key == "start":
            with (HERE / "diary").open("a") as out:
                out.write(f"{{os.getpid()}}\\n")
            begun = len((HERE / "diary").read_text().splitlines())
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # who is held may take longer than a policy's call may
            while begun > float((HERE / "free").read_text() or 0):
                time.sleep(0.02)
            most = int((HERE / "most").read_text())
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most if most else hard, hard))
        return super().on(event, view)
'''

STUDY = """
systems = ["{system}"]
slo = "absolute:ttft=1,tpot=0.1"
sample = {{ rule = "fixed" }}
quick = {{ seeds = {seeds}, window_s = 20.0 }}
spec = {{ trace = "hyperbolic-like+span_s=60", models = "llama-3.2-1b*3", gpus = 1 }}

[[condition]]
name = "rates"
at = [1.0, 2.0]
"""


class Slow:
    """A study of a slow system, and what happens to it."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self.folder = folder
        self.system = folder / "slow.py"
        self.system.write_text(SLOW.format(folder=str(folder)))
        self.toml = folder / "slow.toml"
        self.toml.write_text(STUDY.format(system=self.system, seeds=seeds))
        self.set()
        self.runs = 2 * seeds

    def set(self, *, free: float = math.inf, most: int = 0) -> None:
        """Begin a new diary: after so many runs the others are held, and a process may write files up to a size."""
        (self.folder / "most").write_text(str(most))
        (self.folder / "diary").write_text("")
        self.release(free)

    def release(self, free: float = math.inf) -> None:
        """Let more runs of the diary go on."""
        (self.folder / "free").write_text(str(free))

    @property
    def begun(self) -> list[int]:
        """The processes of the runs that began."""
        return [int(line) for line in (self.folder / "diary").read_text().splitlines()]

    def bench(self, out: Path, *words: str, **env: str) -> subprocess.Popen[str]:
        """Begin the study as a user does."""
        command = [sys.executable, "-m", "harness", "study", str(self.toml), "--no-plot", "-o", str(out), *words]
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def stored(out: Path) -> int:
    """Count the runs that are stored."""
    return len(list(out.glob(f"*/{record.ROWS}")))


def ended(pid: int) -> bool:
    """Tell whether a process is gone, though perhaps nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something holds, while a process runs; the limit of the test ends it."""
    while not holds():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


__all__ = ["STUDY", "Slow", "ended", "files", "stored", "until"]
