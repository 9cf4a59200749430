"""The cost of a large study beside its runs: `python -m tests.tools.collected [RUNS]`, in CPU ms a run, on one core.

Each run has about 1,000 requests. They are named and checked as a sweep does, executed, written into parts, checked
again as a second call does, and scored.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness.rows import parts, record
from harness.rows.parts import Partition
from harness.run import score, sweep
from harness.run.sources import current
from harness.run.spec import Spec
from harness.study.bases import slo_target
from harness.study.table import Place, table_of

SPEC = Spec("static", trace="hyperbolic-like+span_s=600", rate_scale=1.0, slo="absolute:ttft=1,tpot=0.1")


def main(runs: int = 128) -> None:
    """Print the table."""
    out = Path(tempfile.mkdtemp())
    into = Partition("cost", "1-1", runs)
    specs = [replace(SPEC, seed=seed) for seed in range(runs)]
    sweep.compile_once()
    under = slo_target(SPEC, SPEC.slo, out, workers=1)
    spent: dict[str, float] = {}

    def timed(what: str, act: Callable[[], object]) -> object:
        begun = time.process_time()
        made = act()
        spent[what] = time.process_time() - begun
        return made

    tasks = sweep.tasks(specs)
    timed("resolved and named", lambda: sweep.tasks(replace(spec, seed=spec.seed + runs) for spec in specs))
    timed("executed, into folders", lambda: sweep.sweep(specs, into.staged(out), workers=1))
    names = [task.spec.folder for task in tasks]
    requests = sum(sum(record.meta(into.staged(out) / name)["counts"].values()) for name in names) / runs
    by_part: dict[Path, list[Path]] = {}
    for name in names:
        by_part.setdefault(into.part(out, name), []).append(into.staged(out) / name)

    def write() -> None:
        for part, each in by_part.items():
            record.write_part(part, each)

    timed("written into parts", write)
    timed("checked by a second call", lambda: [current(task, out) for task in tasks])
    timed("counted, for a search", lambda: [score.attained(out / name, under, ["ttft"]) for name in names])
    places = [Place("cost", 1.0, "static", under, name) for name in names]
    timed("scored, for the table", lambda: table_of(places, out, ["ttft", "tpot"], by_model=True, workers=1))
    size = sum(path.stat().st_size for path in (out / parts.DATASET).rglob("*.parquet")) / runs
    print(f"CPU ms a run of {requests:,.0f} requests, mean of {runs}; {size / 1e3:.0f} kB a run, {len(by_part)} parts")
    for what, seconds in spent.items():
        print(f"{what:26} {1e3 * seconds / runs:8.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
