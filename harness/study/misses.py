"""Misses of a comparison by cause: the time of all requests that missed, over its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Requests that missed, in one or more runs of a system at a rate."""

    label: str
    rate_scale: float
    offered_rps: float  # mean over runs
    runs: int
    offered: int
    missed: int
    ns: Mapping[str, int]  # time of all that missed, keyed by cause (record.WAITS): sums to their latencies
    explained: Mapping[str, int]  # misses by the cause that explains them (rows/causes.py)
    hollow: bool = False  # the system could not run

    @staticmethod
    def pooled(runs: Sequence[Misses]) -> Misses:
        """Pool the misses of runs of one label and rate."""
        first = runs[0]
        ns, explained = Counter[str](), Counter[str]()
        for run in runs:
            ns.update(run.ns)
            explained.update(run.explained)
        return first._replace(
            offered_rps=sum(run.offered_rps for run in runs) / len(runs),
            runs=sum(run.runs for run in runs),
            offered=sum(run.offered for run in runs),
            missed=sum(run.missed for run in runs),
            ns=dict(ns),
            explained=dict(explained),
            hollow=all(run.hollow for run in runs),
        )

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
    """Tell whether a folder holds the scored table of many runs."""
    return (folder / record.SWEEP).is_file()


def of_sweep(
    sweep: Path, *, definition: str | None = None, system: str | None = None, teller: Teller | None = None
) -> SweepMisses:
    """Collect the misses of a comparison by system, at the rate that `bench compare` shows.

    With `system`, collect the misses of this system alone, at each of its rates. Raises UserError for an unknown
    system, and where the folder is no comparison's or its runs are gone.
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
    offered_rps: dict[tuple[str, float, str], float] = {}
    for row in scored.select(columns).to_pylist():
        key = row["label"], row["rate_scale"], row["run"]
        offered_rps.setdefault(key, math.nan)
        if (row["definition"], row["over"]) == ("offered_rps", "pooled") and row["value"] is not None:
            offered_rps[key] = row["value"]
    points: dict[tuple[str, float], list[Misses]] = {}
    for done, ((label, rate, run), rps) in enumerate(sorted(offered_rps.items())):
        teller.progress("runs read", done, len(offered_rps))
        points.setdefault((label, rate), []).append(_of_run(sweep.parent / run, under, definition, label, rate, rps))
    return SweepMisses([Misses.pooled(runs) for runs in points.values()], scored, under.rule, definition)


def _read(sweep: Path) -> tuple[pa.Table, slos.SloTarget, float]:
    """Read the scored table of a comparison, the SLO target that judged it, and its level of attainment.

    Raises UserError for a study of several conditions, or where nothing was judged.
    """
    path = sweep / record.SWEEP
    scored, footer = tidy.stored(path), record.footer(path)
    judges = footer["judges"]
    if "condition" in scored.column_names and len(scored["condition"].unique()) > 1:
        raise UserError(f"{sweep.name} is a study with SLOs and rates of several conditions: name one of its runs")
    if not judges or not len(scored):
        raise UserError(f"{path}: {NOTHING}")
    return scored, slos.target_of(judges[0]), footer.get("level", LEVEL)


def _of_run(run: Path, under: slos.SloTarget, definition: str, label: str, rate_scale: float, rps: float) -> Misses:
    """Count the misses of one run, and sum their time by cause in whole nanoseconds."""
    about = about_of(run, "bench compare")
    if about["skipped"] or about["infeasible"]:
        return Misses(label, rate_scale, rps, 1, 0, 0, {}, {}, hollow=True)
    of = Judged.read(run, about, under, definition)
    missed = of.missed
    ns = {wait: int(of.table[f"{wait}_ns"].to_numpy()[missed].sum()) for wait in record.WAITS}
    shares = causes.shares(requests.take(of.rows, missed), of.slo.take(missed), definition, of.score[missed])
    explained = Counter({wait: round(share * int(missed.sum())) for wait, share in shares.items()})
    return Misses(label, rate_scale, rps, 1, int(of.offered.sum()), int(missed.sum()), ns, explained)
