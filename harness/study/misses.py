"""Misses by cause: the time of requests that missed, over a comparison's runs; what binds, by model and hour."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows import attainment, causes, record, requests, tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.record import WAITS
from harness.run import slo as slos
from harness.run.teller import Silent, Teller
from harness.study.search import LEVEL
from harness.study.study import AA, CONTROLS
from harness.study.summary import summarize
from harness.study.traffic import HOUR_S, View

if TYPE_CHECKING:
    import pyarrow as pa

Bools = NDArray[np.bool_]

NOTHING = "no requests were scored here (bench compare writes it again)"


class Misses(NamedTuple):
    """Requests that missed, in one or more runs of a system at a rate."""

    label: str
    rate_scale: float
    offered_rps: float  # mean over runs
    runs: int
    offered: int
    missed: int
    ns: Mapping[str, int]  # of all that missed, by cause (record.WAITS): sums to their latencies
    explained: Mapping[str, int]  # how many of them by this cause (rows/causes.py)
    hollow: bool = False  # it could not run

    @staticmethod
    def pooled(runs: Sequence[Misses]) -> Misses:
        """Pool the misses of runs of one label and rate."""
        first = runs[0]
        ns, explained = Counter[str](), Counter[str]()
        for run in runs:
            ns.update(run.ns)
            explained.update(run.explained)
        return first._replace(
            offered_rps=sum(run.offered_rps for run in runs) / len(runs), runs=sum(run.runs for run in runs),
            offered=sum(run.offered for run in runs), missed=sum(run.missed for run in runs), ns=dict(ns),
            explained=dict(explained), hollow=all(run.hollow for run in runs),
        )  # fmt: skip

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds a miss by cause: they sum to its mean latency."""
        return {wait: self.ns.get(wait, 0) / 1e9 / self.missed if self.missed else 0.0 for wait in WAITS}


class SweepMisses(NamedTuple):
    """The misses of a comparison at one rate by label, or of one label by rate."""

    rows: list[Misses]
    scored: pa.Table  # the rows of the comparison's table that these are of
    rule: str
    definition: str  # of a miss: a score below 1


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder holds the scored table of many runs."""
    return (folder / record.SWEEP).is_file()


def of_sweep(
    sweep: Path, *, definition: str | None = None, system: str | None = None, teller: Teller | None = None
) -> SweepMisses:
    """Collect the misses at the rate that `bench compare` shows, by label; those of one `system` at each of its rates.

    Raises UserError where the folder is no comparison's, or its runs are gone.
    """
    scored, under, level = _read(sweep)
    definition, teller = definition or under.definition, teller or Silent()
    labels = sorted(set(scored["label"].to_pylist()))
    if system is not None and system not in labels:
        raise UserError(f'no system "{system}" in {sweep.name}{meant(system, labels)} (it has: {", ".join(labels)})')
    if system is None:
        silent = (*CONTROLS, *(label for label in labels if label.endswith(AA)))
        shown = summarize(scored, labels, definition, level, controls=silent).rate_scale
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
    """Read the scored table of a comparison, its one judge, and its level.

    Raises UserError for a study of several conditions, or where nothing was judged.
    """
    path = sweep / record.SWEEP
    scored, footer = tidy.stored(path), record.footer(path)
    judges = footer["judges"]
    panels = next((name for name in ("condition", "panel") if name in scored.column_names), None)
    if panels and len(scored[panels].unique()) > 1:
        raise UserError(f"{sweep.name} is a study with SLOs and rates of several conditions: name one of its runs")
    if not judges or not len(scored):
        raise UserError(f"{path}: {NOTHING}")
    return scored, slos.target_of(judges[0]), footer.get("level", LEVEL)


def _of_run(run: Path, under: slos.SloTarget, definition: str, label: str, rate_scale: float, rps: float) -> Misses:
    """Count the misses of one run, and sum their time by cause in whole nanoseconds."""
    about = _about(run, "bench compare")
    if about["skipped"] or about["infeasible"]:
        return Misses(label, rate_scale, rps, 1, 0, 0, {}, {}, hollow=True)
    of = Judged.read(run, about, under, definition)
    missed = of.missed
    ns = {wait: int(of.table[f"{wait}_ns"].to_numpy()[missed].sum()) for wait in record.WAITS}
    shares = causes.shares(requests.take(of.rows, missed), of.slo.take(missed), definition, of.score[missed])
    explained = Counter({wait: round(share * int(missed.sum())) for wait, share in shares.items()})
    return Misses(label, rate_scale, rps, 1, int(of.offered.sum()), int(missed.sum()), ns, explained)


def _about(run: Path, maker: str) -> Mapping[str, Any]:
    """Return the facts of a run. UserError where it is gone."""
    if not record.exists(run):
        raise UserError(f"{run} is gone: {maker} makes it again")
    return record.meta(run)


class Judged(NamedTuple):
    """Requests of a run, with their SLOs and scores."""

    table: pa.Table
    rows: requests.Rows
    offered: Bools  # in the window
    slo: attainment.Limits
    score: NDArray[np.float64]

    @classmethod
    def read(cls, run: Path, about: Mapping[str, Any], under: slos.SloTarget, definition: str) -> Judged:
        """Read a run. UserError where the definition needs token times that it lacks."""
        names = [name for name in record.SCHEMA.names if name != "token_ns" or DEFINITIONS[definition].by_token]
        rows = requests.rows(table := record.read(run, names))
        slo = attainment.limits(rows, slos.limits(run, under))
        score = DEFINITIONS[definition].score(rows, slo)
        if score is None:
            raise UserError(f"{run.name} has no token times, which {definition} needs (--definition names another)")
        return cls(table, rows, requests.in_window(rows, about["spec"]["window_s"] or math.inf), slo, score)

    @property
    def missed(self) -> Bools:
        """Tell which requests in the window missed their SLO."""
        return np.asarray(self.offered & (self.score < 1))


# ------------------------------------------------------------------ by model and hour


BINDS: Mapping[str, str] = {  # what is short, by the cause of a wait
    "load": "load", "kv": "KV", "transfer": "KV", "admission": "admission", "host": "compute", "queue": "compute",
    "compute": "compute", "time_slice": "compute", "contention": "compute", "failed": "failed",
}  # fmt: skip


class Hour(NamedTuple):
    """A model's requests in an hour of the windows."""

    offered: int
    missed: int
    binds: Mapping[str, int]  # misses by what binds

    @property
    def met(self) -> float:
        """The share of requests that met their SLO."""
        return 1.0 - self.missed / max(1, self.offered)

    @property
    def first(self) -> str | None:
        """The resource that binds in most misses; None without one."""
        return max(self.binds, key=self.binds.__getitem__, default=None)


Hours = Mapping[str, Mapping[int, Hour]]  # by model and hour


def summed(hours: Iterable[Hour]) -> Hour:
    """Return the requests, misses and what binds of several hours together."""
    every, binds = list(hours), Counter[str]()
    for hour in every:
        binds.update(hour.binds)
    return Hour(sum(hour.offered for hour in every), sum(hour.missed for hour in every), binds)


def merged(parts: Iterable[Hours]) -> dict[str, dict[int, Hour]]:
    """Add the hours of several parts, by model and hour."""
    every: dict[str, dict[int, list[Hour]]] = {}
    for part in parts:
        for model, hours in part.items():
            for at, hour in hours.items():
                every.setdefault(model, {}).setdefault(at, []).append(hour)
    return {model: {at: summed(each) for at, each in hours.items()} for model, hours in every.items()}


def by_view(
    runs: Iterable[Path], views: Sequence[View], under: Callable[[View], slos.SloTarget], definition: str
) -> dict[str, dict[str, dict[int, Hour]]]:
    """Count misses of runs by view, model, hour and what binds. UserError for a run that is gone."""
    every = {view.trace: view for view in views}
    parts: dict[str, list[Hours]] = {}
    for run in runs:
        about = _about(run, "bench size")
        view = every.get(str(about["spec"]["trace"]), views[0])
        parts.setdefault(view.name, []).append(_hours(Judged.read(run, about, under(view), definition), definition))
    return {name: merged(each) for name, each in parts.items()}


def _hours(of: Judged, definition: str) -> Hours:
    """Count the misses of a run by model, hour and the main cause of each."""
    at = np.maximum(0, of.rows.arrival_s // HOUR_S).astype(int)
    keys = np.array([of.rows.model, at])
    binds: dict[tuple[int, int], Counter[str]] = {}
    main = causes.main(requests.take(of.rows, of.missed), of.slo.take(of.missed), definition)
    for (model, hour), k in zip(keys[:, of.missed].T.tolist(), main.tolist(), strict=True):
        binds.setdefault((model, hour), Counter())[BINDS[causes.CAUSES[k]]] += 1
    hours: dict[str, dict[int, Hour]] = {}
    for (model, hour), n in Counter(map(tuple, keys[:, of.offered].T.tolist())).items():
        short = binds.get((model, hour), Counter[str]())
        hours.setdefault(of.rows.models[model], {})[hour] = Hour(n, short.total(), short)
    return hours
