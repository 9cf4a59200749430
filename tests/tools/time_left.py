"""The estimate of the time left, beside what was left: `python -m tests.tools.time_left`.

A fixed sample of fast and slow systems at four rates begins with nothing stored. After each run the estimate of the CPU
seconds left is compared with those that the rest then took.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from itertools import product
from pathlib import Path

from harness.rows import record
from harness.run import sweep
from harness.run.resolve import resolve
from harness.run.spec import Spec
from harness.run.teller import Left

SYSTEMS = ("static", "elastic", "prism", "qlm")
RATES, SEEDS = (4.0, 8.0, 16.0), range(3)
TRACE = "hyperbolic-like+span_s=120"
WITHIN = 1.5
LEAST_S = 0.5  # of work left: with less, nothing is said


class Heard:
    """A teller that keeps the estimates, by the number of runs that were done."""

    def __init__(self) -> None:
        self.left: dict[int, Left] = {}

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        """See Teller."""
        if left is not None:
            self.left[done] = left


def main() -> int:
    """Print the table; return 1 where an estimate is off by more than `WITHIN`."""
    specs = [
        resolve(Spec(name, trace=TRACE, rate_scale=rate, seed=seed, slo="absolute:ttft=1,tpot=0.1"))
        for rate, seed, name in product(RATES, SEEDS, SYSTEMS)
    ]
    sweep.compile_once()
    heard = Heard()
    with tempfile.TemporaryDirectory() as folder:
        for path in sweep.sweep(specs, Path(folder), workers=1, teller=heard):
            assert record.exists(path)
        in_order = sorted(Path(folder).glob(f"*/{record.SIDE}"), key=lambda path: path.stat().st_mtime_ns)
        ended = [json.loads(path.read_text("utf-8"))["cpu_s"] for path in in_order]
    rest = [sum(ended[done:]) for done in range(len(ended) + 1)]
    told = {done: left for done, left in heard.left.items() if left.seconds is not None and rest[done] >= LEAST_S}
    ratios = {done: left.cpu_s / rest[done] for done, left in told.items()}
    worst = max(ratios.values(), key=lambda ratio: abs(math.log(ratio)))
    off = max(worst, 1 / worst)
    print(f"time left: within {off:.2f} of what the rest took, from run {min(told)} of {len(specs)} on")
    print(f"{'done':>6} {'CPU s left':>11} {'estimate':>9} {'ratio':>6}")
    for done in sorted(ratios)[:: max(1, len(ratios) // 12)]:
        print(f"{done:6} {rest[done]:11.1f} {told[done].cpu_s:9.1f} {ratios[done]:6.2f}")
    return int(off > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
