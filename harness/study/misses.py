"""Misses of a comparison by cause: the time that all missed requests spent on each cause, summed over the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.compute as pc

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows import causes, record, requests, tidy
from harness.rows.record import WAITS
from harness.run import slo as slos
from harness.run.teller import Silent, Teller
from harness.study.binds import Judged, about_of
from harness.study.compare import silent
from harness.study.search import LEVEL
from harness.study.summary import summarize

if TYPE_CHECKING:
    import pyarrow as pa

NOTHING = "no requests were scored here (bench compare writes it again)"


class Misses(NamedTuple):
    """The requests of a system that missed their SLO, over its runs at one rate."""

    label: str
    rate_scale: float
    offered_rps: float  # mean over runs
    runs: int
    offered: int
    missed: int
    ns: Mapping[str, int]  # time of all that missed, keyed by cause (record.WAITS): sums to their latencies
    explained: Mapping[str, int]  # misses by the cause that explains them (rows/causes.py)
    hollow: bool = False  # the system could not run

    @property
    def seconds(self) -> dict[str, float]:
        """The mean seconds per missed request by cause; they sum to the mean latency of these requests."""
        return {wait: self.ns.get(wait, 0) / 1e9 / self.missed if self.missed else 0.0 for wait in WAITS}


class SweepMisses(NamedTuple):
    """The misses of a comparison: of each system at one rate, or of one system at each rate."""

    rows: list[Misses]
    scored: pa.Table  # rows of the comparison's table that the misses come from
    rule: str
    definition: str  # a score below 1 is a miss


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder has the scored table of many runs."""
    return (folder / record.SWEEP).is_file()


def of_sweep(
    sweep: Path, *, definition: str | None = None, system: str | None = None, teller: Teller | None = None
) -> SweepMisses:
    """Collect the misses of a comparison by system, at the rate that `bench compare` shows.

    With `system`, collect the misses of this system alone, at each of its rates. Raises UserError for an unknown
    system, if the folder is not a comparison, or if its runs are gone.
    """
    scored, under, level = _read(sweep)
    definition, teller = definition or under.definition, teller or Silent()
    labels = sorted(set(scored["label"].to_pylist()))
    if system is not None and system not in labels:
        raise UserError(f'no system "{system}" in {sweep.name}{meant(system, labels)} (it has: {", ".join(labels)})')
    if system is None:
        shown = summarize(scored, labels, definition, level, controls=silent(labels)).rate_scale
        scored = scored.filter(pc.equal(scored["rate_scale"], shown))
    else:
        scored = scored.filter(pc.equal(scored["label"].cast("string"), system))
    if not len(scored):
        raise UserError(f"{sweep / record.SWEEP}: {NOTHING}")
    columns = ["label", "rate_scale", "run", "definition", "over", "value"]
    points: dict[tuple[str, float], dict[str, float]] = {}  # requests per second of each run
    for row in scored.select(columns).to_pylist():
        runs = points.setdefault((row["label"], row["rate_scale"]), {})
        runs.setdefault(row["run"], math.nan)
        if (row["definition"], row["over"]) == ("offered_rps", "pooled") and row["value"] is not None:
            runs[row["run"]] = row["value"]
    rows, done, total = list[Misses](), 0, sum(map(len, points.values()))
    for (label, rate_scale), runs in sorted(points.items()):
        teller.progress("runs read", done, total)
        rows.append(_of_runs(sweep.parent, label, rate_scale, runs, under, definition))
        done += len(runs)
    return SweepMisses(rows, scored, under.rule, definition)


def _read(sweep: Path) -> tuple[pa.Table, slos.SloTarget, float]:
    """Read the scored table of a comparison, with the SLO target that judged it and its level of attainment.

    Raises UserError for a study of several conditions, or if no run was judged.
    """
    path = sweep / record.SWEEP
    scored, footer = tidy.stored(path), record.footer(path)
    judges = footer["judges"]
    if "condition" in scored.column_names and len(scored["condition"].unique()) > 1:
        raise UserError(f"{sweep.name} is a study with SLOs and rates of several conditions: name one of its runs")
    if not judges or not len(scored):
        raise UserError(f"{path}: {NOTHING}")
    return scored, slos.target_of(judges[0]), footer.get("level", LEVEL)


def _of_runs(
    out: Path, label: str, rate_scale: float, runs: Mapping[str, float], under: slos.SloTarget, definition: str
) -> Misses:
    """Count the misses of a system's runs at a rate, and sum the missed requests' time by cause in whole nanoseconds.

    `runs` has the requests per second that arrived in each run.
    """
    ns, explained, offered, missed, hollow = Counter[str](), Counter[str](), 0, 0, True
    for name in sorted(runs):
        about = about_of(out / name, "bench compare")
        if about["skipped"] or about["infeasible"]:
            continue
        of = Judged.read(out / name, about, under, definition)
        mine, count = of.missed, int(of.missed.sum())
        ns.update({wait: int(of.table[f"{wait}_ns"].to_numpy()[mine].sum()) for wait in record.WAITS})
        shares = causes.shares(requests.take(of.rows, mine), of.slo.take(mine), definition, of.score[mine])
        explained.update({wait: round(share * count) for wait, share in shares.items()})
        offered, missed, hollow = offered + int(of.offered.sum()), missed + count, False
    return Misses(label, rate_scale, sum(runs.values()) / len(runs), len(runs), offered, missed, ns, explained, hollow)
