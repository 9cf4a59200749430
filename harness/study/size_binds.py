"""Causes that bind where requests miss: by model and hour of the window, the main one of each miss (rows/causes.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.policy.types import UserError
from harness.rows import attainment, causes, record, requests
from harness.rows.definitions import DEFINITIONS
from harness.run import slo as slos
from harness.run.slo import SloTarget
from harness.study.traffic import HOUR_S, View

BINDS: Mapping[str, str] = {  # what is short, by the cause of a wait
    "load": "load", "kv": "KV", "transfer": "KV", "admission": "admission", "host": "compute", "queue": "compute",
    "compute": "compute", "time_slice": "compute", "contention": "compute", "failed": "failed",
}  # fmt: skip


class Hour(NamedTuple):
    """A model's requests in an hour of the windows."""

    offered: int
    missed: int
    binds: Mapping[str, int]  # misses by what binds


def summed(hours: Iterable[Hour]) -> Hour:
    """Return the requests, misses and what binds of several hours together."""
    every, binds = list(hours), Counter[str]()
    for hour in every:
        binds.update(hour.binds)
    return Hour(sum(hour.offered for hour in every), sum(hour.missed for hour in every), binds)


def by_view(
    runs: Iterable[Path], views: Iterable[View], under: Callable[[View], SloTarget], definition: str
) -> dict[str, dict[str, dict[int, Hour]]]:
    """Count misses of runs by view, model, hour and what binds. UserError for a run that is gone."""
    every = {view.trace: view for view in views}
    counts: dict[str, dict[str, dict[int, Hour]]] = {}
    for run in runs:
        if not record.exists(run):
            raise UserError(f"{run} is gone: bench size makes it again")
        trace = str(record.meta(run)["spec"]["trace"])
        view = every.get(trace) or next(iter(every.values()))
        for (model, hour), counted in _of_run(run, under(view), definition).items():
            hours = counts.setdefault(view.name, {}).setdefault(model, {})
            hours[hour] = summed([*([hours[hour]] if hour in hours else []), counted])
    return counts


def misses(hours: Iterable[Hour]) -> Counter[str]:
    """Return the misses of several hours by what binds."""
    return Counter(summed(hours).binds)


def _of_run(run: Path, under: SloTarget, definition: str) -> dict[tuple[str, int], Hour]:
    names = [name for name in record.SCHEMA.names if name != "token_ns" or DEFINITIONS[definition].by_token]
    rows = requests.rows(record.read(run, names))
    inside = requests.in_window(rows, record.meta(run)["spec"]["window_s"] or math.inf)
    slo = attainment.limits(rows, slos.limits(run, under)).take(inside)
    rows = requests.take(rows, inside)
    score = DEFINITIONS[definition].score(rows, slo)
    if score is None:
        raise UserError(f"{run.name} has no token times, which {definition} needs")
    missed = np.flatnonzero(score < 1)
    main = causes.main(requests.take(rows, score < 1), slo.take(score < 1), definition)
    hours = np.maximum(0, rows.arrival_s // HOUR_S).astype(int)
    keys = [(rows.models[code], hour) for code, hour in zip(rows.model.tolist(), hours.tolist(), strict=True)]
    binds: dict[tuple[str, int], Counter[str]] = {key: Counter() for key in keys}
    for at, k in zip(missed.tolist(), main.tolist(), strict=True):
        binds[keys[at]][BINDS[causes.CAUSES[k]]] += 1
    return {key: Hour(n, binds[key].total(), binds[key]) for key, n in Counter(keys).items()}
