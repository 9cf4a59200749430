"""Stored runs of an engine in real time, and the simulator's runs of the same specs with a cost table.

python -m harness.validate.stored results/h200/torch --table results/h200/h200-measured.toml

Writes README.md of the folder: a line a run, measured beside simulated. Nothing that was measured in the runs is in the
table, unless the caller's table was made of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.policy.types import UserError
from harness.rows import record, requests
from harness.rows.attainment import quantile, tpot_s
from harness.rows.requests import Rows
from harness.run import spec as specs
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.spec import Spec


class Seen(NamedTuple):
    """The figures of a run that are compared."""

    attainment: float  # requests that finished within the SLO for TTFT and for TPOT, of those offered
    ttft_ms: tuple[float, float]  # P50 and P95
    tpot_ms: tuple[float, float]


class Pair(NamedTuple):
    """A run and its prediction."""

    spec: Spec
    about: dict[str, Any]
    offered: int
    measured: Seen
    simulated: Seen


class Slo(NamedTuple):
    """The limits of every model, in seconds."""

    ttft_s: float
    tpot_s: float


def seen(rows: Rows, slo: Slo) -> Seen:
    """Reduce the rows of a run."""
    tpot = tpot_s(rows)
    met = rows.done & (rows.ttft_s <= slo.ttft_s) & ~(tpot > slo.tpot_s)  # undefined for one token: met
    ttft_ms, tpot_ms = (
        (1e3 * quantile(values, 0.5), 1e3 * quantile(values, 0.95))
        for values in (rows.ttft_s[rows.done], tpot[rows.done & ~np.isnan(tpot)])
    )
    return Seen(float(met.mean()), ttft_ms, tpot_ms)


def pairs(folder: Path, table: Path, slo: Slo) -> Iterator[Pair]:
    """Yield each stored run of a folder, and its prediction. UserError where there is none."""
    runs = sorted(path.parent for path in folder.glob("*/requests.parquet"))
    if not runs:
        raise UserError(f"{folder} holds no runs")
    with tempfile.TemporaryDirectory() as scratch:
        for run in runs:
            about = record.meta(run)
            spec = specs.stored(about["spec"])
            made = execute(resolve(replace(spec, engine="sim", table=str(table), measured_on="")), Path(scratch), "")
            rows, ours = (requests.rows(record.read(path)) for path in (run, made))
            yield Pair(spec, about, len(rows), seen(rows, slo), seen(ours, slo))


def text(folder: Path, table: Path, slo: Slo, command: str = "") -> str:
    """Return the page; `command` made it."""
    command = command or f"python -m harness.validate.stored {folder} --table {table}"
    every = list(pairs(folder, table, slo))
    first = every[0]
    off = max(abs(p.measured.attainment - p.simulated.attainment) for p in every)
    longer = [p.measured.tpot_ms[0] / p.simulated.tpot_ms[0] for p in every]
    on = ", ".join(f"{key} {value}" for key, value in first.about["measured_on"].items())
    spec = first.spec
    rates, spans = (list(dict.fromkeys(f"{getattr(p.spec, of):g}" for p in every)) for of in ("rate_scale", "window_s"))
    several = len(rates) * len(spans) > 1
    rates_told, windows = " and ".join(rates), f"a window of {' or '.join(spans)} s"
    head = (
        f"The simulator is off by at most {100 * off:.0f} points of attainment in these {len(every)} runs. A"
        f" token takes {min(longer):.1f} to {max(longer):.1f} times as long in truth as it says (P50 of TPOT)."
    )
    how = (
        f"{spec.models} on {spec.gpus} x {spec.gpu}, {spec.trace} at {rates_told} times its rate, {windows}, one run"
        f" each; SLO: TTFT {slo.ttft_s:g} s, TPOT {1e3 * slo.tpot_s:g} ms; fidelity"
        f" {first.about['fidelity']}. Measured on {on}. Simulated with {table} and host profile {spec.host} by"
        f" `{command}`."
    )
    lines = [f"# Runs of engine {spec.engine} beside the simulator's", "", head, "", how, ""]
    columns = f"system | {'rate | window, s | ' * several}requests | SLO met, %"
    columns += " | TTFT P50, ms | P95 | TPOT P50, ms | P95"
    lines += [f"| {columns} |", "|---|" + "---:|" * columns.count("|")]
    for p in every:
        a, b = p.measured, p.simulated
        cells = [f"{100 * a.attainment:.1f} / {100 * b.attainment:.1f}"]
        cells += [f"{x:.1f} / {y:.1f}" for x, y in zip((*a.ttft_ms, *a.tpot_ms), (*b.ttft_ms, *b.tpot_ms), strict=True)]
        load = f"{p.spec.rate_scale:g} | {p.spec.window_s:g} | " * several
        lines.append(f"| {p.spec.label} | {load}{p.offered} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Each cell: measured / simulated."]) + "\n"


def main() -> None:
    """Write the page of a folder of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of runs: FOLDER/RUN/requests.parquet")
    parser.add_argument("--table", type=Path, required=True, help="cost table of the same machine")
    parser.add_argument("--ttft-s", type=float, default=0.5, help="SLO (default 0.5)")
    parser.add_argument("--tpot-s", type=float, default=0.05, help="SLO (default 0.05)")
    args = parser.parse_args()
    page = text(args.folder, args.table, Slo(args.ttft_s, args.tpot_s))
    record.write_bytes(args.folder / "README.md", page.encode())
    print(page, end="")


if __name__ == "__main__":
    main()
