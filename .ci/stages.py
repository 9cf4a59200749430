"""Run targets of the Makefile one after another, each under a time limit: python3 .ci/stages.py TARGET:SECONDS ...

TARGET:SECONDS+TARGET:SECONDS run side by side; what they print comes when they end. A line for each stage says its
seconds and those of all processors; the last has the sums. The first that fails ends the run with its status.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO


def cpu_s() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Stage:
    """A target that is being made, in a process group of its own."""

    def __init__(self, word: str, into: IO[bytes] | None) -> None:
        """Start it; its output goes into a file, if one is given."""
        self.target, _, most_s = word.partition(":")
        self.most_s, self.into, self.begun = float(most_s), into, time.monotonic()
        make = [os.environ.get("MAKE", "make"), "--no-print-directory", self.target]
        self.process = subprocess.Popen(
            make, stdin=subprocess.DEVNULL, stdout=into, stderr=into and subprocess.STDOUT, start_new_session=True
        )
        self.timer = threading.Timer(self.most_s, self.end)
        self.timer.start()

    def wait(self) -> int:
        """Wait for its end; print what it kept back. Return its exit status, 124 at its limit."""
        code = self.process.wait()
        self.timer.cancel()
        if self.into is not None:
            self.into.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(self.into.read())
        seconds = time.monotonic() - self.begun
        if code and seconds >= self.most_s:
            print(f"failed: {self.target} took more than {self.most_s:.0f} s", flush=True)
            return 124
        return code

    def end(self) -> None:
        """End all its processes, by force 10 s later; nothing where it has ended."""
        self.timer.cancel()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def together(words: Sequence[str]) -> int:
    """Run stages side by side; return the status of the first that failed, else 0."""
    begun, before_s = time.monotonic(), cpu_s()
    with ExitStack() as stack:
        stages = []
        for word in words:
            kept = stack.enter_context(tempfile.TemporaryFile()) if len(words) > 1 else None
            stages.append(Stage(word, kept))
            stack.callback(stages[-1].end)
        codes = [stage.wait() for stage in stages]
    name = " + ".join(stage.target for stage in stages)
    print(f"{name:28} {time.monotonic() - begun:5.0f} s {cpu_s() - before_s:6.0f} CPU-s", flush=True)
    for stage, code in zip(stages, codes, strict=True):
        if code:
            print(f"failed: make {stage.target}", flush=True)
    return next(filter(None, codes), 0)


def main(groups: Sequence[str]) -> int:
    """Run the stages; return the status of the first group that fails, else 0."""
    begun = time.monotonic()
    for group in groups:
        if code := together(group.split("+")):
            return code
    print(f"{'in all':28} {time.monotonic() - begun:5.0f} s {cpu_s():6.0f} CPU-s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
