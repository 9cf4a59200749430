"""Stored runs of an engine in real time, and simulated runs of the same specs with a cost table.

`bench validate results/h200/torch --table results/h200/h200-measured.toml` is an example; it prints a line for each
run. The cost table is independent of the runs, unless the caller made it from them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.costs import quantities
from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import record
from harness.run import spec as specs
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.spec import Spec
from harness.validate import prediction
from harness.validate.page import Comparison
from harness.validate.prediction import Seen, offered, seen
from workloads.slo import Absolute, parse


class Pair(NamedTuple):
    """A stored run, and the simulated run of the same spec."""

    spec: Spec
    about: dict[str, Any]
    offered: int
    measured: Seen
    simulated: Seen


SLO = "absolute:ttft=0.5,tpot=0.05"


def holds(folder: Path) -> bool:
    """Tell whether a folder contains stored runs."""
    return any(folder.glob(f"*/{record.ROWS}"))


def pairs(folder: Path, table: str, slo: Absolute, tell: Callable[[int, int], None]) -> Iterator[Pair]:
    """Yield each stored run of a folder with its simulated one; `tell` gets the number of runs done and of all runs."""
    runs, timed = sorted(path.parent for path in folder.glob(f"*/{record.ROWS}")), quantities.machine(table)
    on: dict[str, Any] = {} if timed is None else {"gpu": timed.kind, "host": timed.kind}
    with tempfile.TemporaryDirectory() as scratch:
        for done, run in enumerate(runs):
            tell(done, len(runs))
            about = record.meta(run)
            spec = specs.stored(about["spec"])
            made = execute(resolve(replace(spec, engine="sim", table=table, measured_on="", **on)), Path(scratch), "")
            rows, ours = (offered(run_of, spec) for run_of in (run, made))
            yield Pair(spec, about, len(rows), seen(rows, slo), seen(ours, slo))
        tell(len(runs), len(runs))


def compare(folder: Path, table: str, rule: str, tell: Callable[[int, int], None]) -> Comparison:
    """Compare the stored runs of a folder with the simulator. Raises UserError if `rule` is not an SLO in seconds."""
    slo = parse(rule)
    if not isinstance(slo, Absolute):
        raise UserError(f"--slo {rule} needs a base; stored runs are judged by seconds, such as {SLO}")
    every = sorted(pairs(folder, table, slo, tell), key=lambda p: (p.spec.label, p.spec.rate_scale))
    about, spec = every[0].about, every[0].spec
    off = max(abs(p.measured.attainment - p.simulated.attainment) for p in every)
    longer = [p.measured.tpot_ms[0] / p.simulated.tpot_ms[0] for p in every]
    each = {key: dict.fromkeys(p.about["measured_on"].get(key, "-") for p in every) for key in about["measured_on"]}
    on = ", ".join(f"{key} {' or '.join(values)}" for key, values in each.items())
    timed = quantities.machine(table)
    host = f" and host profile {spec.host}" if timed is None else ", which has the engine's own steps and loads"
    answer = (
        f"The simulator is off by at most {100 * off:.0f} points of attainment in these {len(every)} runs. Measured"
        f" tokens take {min(longer):.1f} to {max(longer):.1f} times as long as simulated ones (P50 of TPOT)."
    )
    rates, spans = (list(dict.fromkeys(f"{getattr(p.spec, of):g}" for p in every)) for of in ("rate_scale", "window_s"))
    loads = len(rates) * len(spans) > 1
    how = (
        f"{spec.models} on {mix.told(spec.gpu, spec.gpus)}, {spec.trace} at {' and '.join(rates)} times its rate, a"
        f" window of {' or '.join(spans)} s, one run each; SLO: TTFT {slo.ttft_s:g} s, TPOT {1e3 * slo.tpot_s:g} ms;"
        f" fidelity {about['fidelity']}. Measured on {on}. Simulated with {table}{host}."
    )
    latencies = "TTFT P50, ms", "P95", "TPOT P50, ms", "P95"
    rows = [("system", *("rate", "window, s") * loads, "requests", "SLO met, %", *latencies)]
    for p in every:
        a, b = p.measured, p.simulated
        times = zip((*a.ttft_ms, *a.tpot_ms), (*b.ttft_ms, *b.tpot_ms), strict=True)
        met = f"{100 * a.attainment:.1f} / {100 * b.attainment:.1f}"
        ttft, ttft_95, tpot, tpot_95 = (f"{x:.1f} / {y:.1f}" for x, y in times)
        load = (f"{p.spec.rate_scale:g}", f"{p.spec.window_s:g}") * loads
        rows.append((p.spec.label, *load, str(p.offered), met, ttft, ttft_95, tpot, tpot_95))
    title = f"Runs of engine {spec.engine} beside the simulator's"
    predictions = prediction.compare([(p.spec, p.measured.attainment) for p in every])
    return Comparison(title, answer, how, rows, "Each cell: measured / simulated.", predictions)
