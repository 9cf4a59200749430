"""Predictions of the simulator that are stored before the servers run: `results/predictions/NAME.toml` and its page.

    python -m harness.validate.prediction requests      # rewrites the file REQUESTS, with equal rows
    python -m harness.validate.prediction NAME          # simulates CAMPAIGN; stops if prediction NAME exists

CAMPAIGN is the campaign that `probe/ORDER.md` runs on real servers. A prediction is never edited; tests check its
digest. If the simulator's law of GPU sharing changes, the new prediction gets a file of its own. `bench validate
FOLDER` prints the predictions for the runs in the folder, next to what was measured.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate.tables import dumps
from harness.policy.types import UserError
from harness.rows import record, requests
from harness.rows.record import write_bytes
from harness.rows.requests import Rows, quantile, tpot_s
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.spec import Spec
from workloads import ramps
from workloads.slo import Absolute, parse

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results/predictions"
REQUESTS = ROOT / "traces/sample/ramps4.parquet"
PEAK, MODELS, PROMPT, CAP, MEAN = 12, 4, 512, 256, 128.0  # requests a second, models, tokens
SYSTEMS = ("static:equal", "elastic", "swap:sleep")
RATES = (2.0, 4.0, 6.0)
SLO = "absolute:ttft=1,tpot=0.05"
SAME = 0.01  # systems that differ by at most this in attainment have no order
CAMPAIGN: dict[str, Any] = {
    "models": "llama-3.1-8b*4",
    "trace": str(REQUESTS.relative_to(ROOT)),
    "gpu": "h100",
    "gpus": 1,
    "scaling": "time",
    "plan": "trace",
    "warmup_s": 0.0,
    "served": 1024,
    "chunk_tokens": 2048,
    "batch_cap": 256,
    "mem_fraction": 0.9,
    "admission": "prompt",
}


class Seen(NamedTuple):
    """A run's attainment and latencies, the figures that are compared."""

    attainment: float  # requests that finished within the SLO for TTFT and for TPOT, of those offered
    ttft_ms: tuple[float, float]  # P50 and P95
    tpot_ms: tuple[float, float]


class Cell(NamedTuple):
    """A system's attainment at a rate: the share of the offered requests that meet the SLO."""

    system: str
    rate: float
    attainment: float


def draw(path: Path = REQUESTS) -> Path:
    """Write the campaign's requests, which are staggered ramps of equal models, to a file; return the file's path."""
    return ramps.store(path, PEAK, MODELS, PROMPT, CAP, MEAN)


def seen(rows: Rows, slo: Absolute) -> Seen:
    """Return a run's attainment of `slo`, and the P50 and P95 of its TTFT and TPOT."""
    tpot = tpot_s(rows)
    met = rows.done & (rows.ttft_s <= slo.ttft_s) & ~(tpot > slo.tpot_s)  # a TPOT of NaN, of one token, meets it
    ttft_ms, tpot_ms = (
        (1e3 * quantile(values, 0.5), 1e3 * quantile(values, 0.95))
        for values in (rows.ttft_s[rows.done], tpot[rows.done & ~np.isnan(tpot)])
    )
    return Seen(float(met.mean()), ttft_ms, tpot_ms)


def offered(run: Path, spec: Spec) -> Rows:
    """Return the requests that arrived in a run's window.

    The warm-up, in which models are still loading, is left out.
    """
    rows = requests.rows(record.read(run))
    return requests.take(rows, requests.in_window(rows, spec.window_s or math.inf))


def simulate() -> Iterator[Cell]:
    """Simulate the campaign: every system at every rate, seed 0."""
    slo = parse(SLO)
    assert isinstance(slo, Absolute)
    with tempfile.TemporaryDirectory() as scratch:
        for rate, text in product(RATES, SYSTEMS):
            name, _, preset = text.partition(":")
            spec = Spec(name, preset or None, rate_scale=rate, slo=SLO, **CAMPAIGN)
            run = execute(resolve(spec), Path(scratch), "")
            yield Cell(text, rate, seen(offered(run, spec), slo).attainment)


def write(name: str, folder: Path = FOLDER) -> Path:
    """Simulate the campaign and store it as prediction `name`, with today's date.

    Raises UserError if there is a prediction of this name.
    """
    path = folder / f"{name}.toml"
    if path.exists():
        raise UserError(f"{path} is kept as it is; another law gets another name")
    cells = [{"system": c.system, "rate": c.rate, "attainment": round(c.attainment, 4)} for c in simulate()]
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "law": name, "slo": SLO, **CAMPAIGN}
    folder.mkdir(parents=True, exist_ok=True)
    lines = [dumps(about), *(f"\n[[cell]]\n{dumps(cell)}" for cell in cells)]
    write_bytes(path, "".join(lines).encode())
    write_bytes(path.with_suffix(".md"), page(path).encode())
    return path


def cells(path: Path) -> list[Cell]:
    """Read the cells of a stored prediction."""
    return [Cell(**cell) for cell in tomllib.loads(path.read_text("utf-8"))["cell"]]


def page(path: Path) -> str:
    """Return the Markdown page of a stored prediction."""
    about, told = tomllib.loads(path.read_text("utf-8")), cells(path)
    by = {(cell.system, cell.rate): cell.attainment for cell in told}
    rates, systems = sorted({c.rate for c in told}), list(dict.fromkeys(c.system for c in told))
    head = ["system", *(f"{rate:g} times the rate" for rate in rates)]
    table = [head, ["---"] * len(head)]
    table += [[system, *(f"{100 * by[system, rate]:.1f}" for rate in rates)] for system in systems]
    command = f"`python -m harness.validate.prediction {path.stem}`"
    return "\n".join(
        [
            f"# What the simulator says by {about['law']}, {about['date']}",
            "",
            f"SLO attainment in per cent, {about['slo']}: {about['models']} on {about['gpus']} x {about['gpu']},",
            f"{about['trace']}. No card had run it. Written by {command}; never",
            "edited.",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
        ]
    )


def orders_held(predicted: Sequence[Cell], measured: Sequence[Cell]) -> tuple[int, int]:
    """Return how many predicted orders the measurements confirm, and how many could be checked.

    An order says which of two systems attains more at one rate. It is checked if both systems were measured, and if
    their predictions differ by more than SAME. It is not confirmed if the measured attainments differ by at most SAME.
    """
    seen = {(cell.system, cell.rate): cell.attainment for cell in measured}
    held = pairs = 0
    for a, b in combinations(predicted, 2):
        keys = (a.system, a.rate), (b.system, b.rate)
        if a.rate != b.rate or not set(keys) <= set(seen) or abs(a.attainment - b.attainment) <= SAME:
            continue
        pairs += 1
        difference = seen[keys[0]] - seen[keys[1]]
        held += abs(difference) > SAME and (difference > 0) == (a.attainment > b.attainment)
    return held, pairs


def compare(ran: Sequence[tuple[Spec, float]], folder: Path = FOLDER) -> list[str]:
    """Return lines that compare stored predictions with the measured attainments of runs.

    `ran` has a spec and an attainment for each run. A prediction is compared with those runs that have its models and
    its trace.
    """
    lines = []
    for path in sorted(folder.glob("*.toml")):
        about = tomllib.loads(path.read_text("utf-8"))
        measured = [
            Cell(spec.label, spec.rate_scale, attainment)
            for spec, attainment in ran
            if spec.models == about["models"] and Path(spec.trace).name == Path(about["trace"]).name
        ]
        by_cell = {(cell.system, cell.rate): cell.attainment for cell in measured}
        told = [cell for cell in cells(path) if (cell.system, cell.rate) in by_cell]
        if told:
            right, of = orders_held(told, measured)
            lines.append(f"{path.name} ({about['date']}): {right} of {of} predicted orders held")
            lines += [
                f"  {c.system} at {c.rate:g}: {100 * c.attainment:.1f} % predicted,"
                f" {100 * by_cell[c.system, c.rate]:.1f} measured"
                for c in told
            ]
    return lines


if __name__ == "__main__":
    try:
        print(draw() if sys.argv[1:] == ["requests"] else write(sys.argv[1]))
    except UserError as error:
        sys.exit(f"error: {error}")
