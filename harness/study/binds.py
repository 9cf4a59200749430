"""The requests and misses of a run by model and hour, as an SLO judges them, and the resource that causes each miss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import UserError
from harness.rows import causes, record, requests
from harness.rows.definitions import DEFINITIONS
from harness.run import slo as slos
from harness.study.traffic import HOUR_S, View

if TYPE_CHECKING:
    import pyarrow as pa

Bools = NDArray[np.bool_]


def about_of(run: Path, maker: str) -> Mapping[str, Any]:
    """Return the facts stored with a run.

    Raises UserError if the run is gone; `maker` is the command that makes it again.
    """
    if not record.exists(run):
        raise UserError(f"{run} is gone: {maker} makes it again")
    return record.meta(run)


class Judged(NamedTuple):
    """Requests of a run, with their SLOs and scores."""

    table: pa.Table
    rows: requests.Rows
    offered: Bools  # whether each request arrived in the window, and so counts
    slo: requests.Limits
    score: NDArray[np.float64]

    @classmethod
    def read(cls, run: Path, about: Mapping[str, Any], under: slos.SloTarget, definition: str) -> Judged:
        """Read a run with its SLOs and scores.

        Raises UserError if the definition of attainment needs token times and the run has no such times.
        """
        names = [name for name in record.SCHEMA.names if name != "token_ns" or DEFINITIONS[definition].by_token]
        rows = requests.rows(table := record.read(run, names))
        slo = requests.limits(rows, slos.limits(run, under))
        score = DEFINITIONS[definition].score(rows, slo)
        if score is None:
            raise UserError(f"{run.name} has no token times, which {definition} needs (--definition names another)")
        return cls(table, rows, requests.in_window(rows, about["spec"]["window_s"] or math.inf), slo, score)

    @property
    def missed(self) -> Bools:
        """Tell for each request whether it arrived in the window and missed its SLO."""
        return np.asarray(self.offered & (self.score < 1))


# ------------------------------------------------------------------ by model and hour


BINDS: Mapping[str, str] = {  # the resource that binds, keyed by the cause of a wait
    "load": "load",
    "kv": "KV",
    "transfer": "KV",
    "admission": "admission",
    "host": "compute",
    "queue": "compute",
    "compute": "compute",
    "time_slice": "compute",
    "contention": "compute",
    "failed": "failed",
}


class Hour(NamedTuple):
    """A model's requests and misses in one hour of the window, of one run or summed over several."""

    offered: int
    missed: int
    binds: Mapping[str, int]  # misses by what binds

    @property
    def met(self) -> float:
        """The share of requests that met their SLO."""
        return 1.0 - self.missed / max(1, self.offered)

    @property
    def first(self) -> str | None:
        """The resource that causes the most misses; None if no request missed."""
        return max(self.binds, key=self.binds.__getitem__, default=None)


Hours = Mapping[str, Mapping[int, Hour]]  # keyed by model and hour


def summed(hours: Iterable[Hour]) -> Hour:
    """Return the sum of several hours: their requests, misses, and misses by the resource that causes them."""
    every, binds = list(hours), Counter[str]()
    for hour in every:
        binds.update(hour.binds)
    return Hour(sum(hour.offered for hour in every), sum(hour.missed for hour in every), binds)


def total(hours: Hours) -> Hour:
    """Return the sum over all models and hours: requests, misses, and misses by the resource that causes them."""
    return summed(hour for each in hours.values() for hour in each.values())


def merged(parts: Iterable[Hours]) -> dict[str, dict[int, Hour]]:
    """Add up several results: each hour of each model is summed over all of them."""
    every: dict[str, dict[int, list[Hour]]] = {}
    for part in parts:
        for model, hours in part.items():
            for at, hour in hours.items():
                every.setdefault(model, {}).setdefault(at, []).append(hour)
    return {model: {at: summed(each) for at, each in hours.items()} for model, hours in every.items()}


def by_view(
    runs: Iterable[Path], views: Sequence[View], under: Callable[[View], slos.SloTarget], definition: str
) -> dict[str, dict[str, dict[int, Hour]]]:
    """Count requests and misses of runs by view, model and hour; a view is a stretch of the trace that is replayed.

    The misses of an hour are also counted by the resource that causes them. Raises UserError for a run that is gone.
    """
    every = {view.trace: view for view in views}
    parts: dict[str, list[Hours]] = {}
    for run in runs:
        about = about_of(run, "bench size")
        view = every.get(str(about["spec"]["trace"]), views[0])
        parts.setdefault(view.name, []).append(_hours(Judged.read(run, about, under(view), definition), definition))
    return {name: merged(each) for name, each in parts.items()}


def _hours(of: Judged, definition: str) -> Hours:
    """Count the requests and misses of a run by model and hour.

    Misses are also counted by the resource that causes them.
    """
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
