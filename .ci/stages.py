"""Run targets of the Makefile one after another, each under a time limit: python3 .ci/stages.py TARGET:SECONDS ...

A line for each says its seconds and those of all processors; the last has the sums. It ends with the first that fails.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time


def cpu_s() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stage(target: str, most_s: float) -> int:
    """Make a target in a process group of its own, which ends at the limit and on Ctrl-C. Return its exit status."""
    make = [os.environ.get("MAKE", "make"), "--no-print-directory", target]
    process = subprocess.Popen(make, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(most_s)
    except subprocess.TimeoutExpired:
        print(f"failed: {target} took more than {most_s:.0f} s", file=sys.stderr, flush=True)
        return 124
    except KeyboardInterrupt:
        return 130
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL) if process.returncode is None else ():
            os.killpg(process.pid, number)
            try:
                process.wait(10)
                break
            except subprocess.TimeoutExpired:
                continue


def main(words: list[str]) -> int:
    """Run the stages."""
    begun = time.monotonic()
    for word in words:
        target, _, most_s = word.partition(":")
        before, before_s = time.monotonic(), cpu_s()
        code = stage(target, float(most_s))
        print(f"{target:14} {time.monotonic() - before:5.0f} s {cpu_s() - before_s:6.0f} CPU-s", flush=True)
        if code:
            print(f"failed: make {target}", file=sys.stderr)
            return code
    print(f"{'in all':14} {time.monotonic() - begun:5.0f} s {cpu_s():6.0f} CPU-s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
