"""Counts of misses and offered requests by window, and curves of attainment, from a table of scores."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.rows.memo import along, column, once, places
from harness.rows.pooled import Counts
from harness.rows.statistics import Curve


def curves(table: pa.Table, label: str, definition: str, axis: str) -> dict[int, Curve]:
    """Return a curve for each seed: a label's pooled values of a definition, keyed by the column `axis`."""
    xs, seeds, values = (column(table, name) for name in (axis, "seed", "value"))
    by_seed: dict[int, dict[float, float]] = {}
    for i in places(table).get((label, definition, "pooled"), ()):
        if not math.isnan(xs[i]):
            by_seed.setdefault(seeds[i], {})[float(xs[i])] = math.nan if values[i] is None else values[i]
    return {seed: by_seed[seed] for seed in sorted(by_seed)}


class Counted(NamedTuple):
    """Misses and offered requests of a window."""

    missed: float
    offered: float

    @property
    def met(self) -> float:
        """Attainment: the share of offered requests that met their SLO; 0 where none was offered."""
        return 1.0 - self.missed / self.offered if self.offered else 0.0


Windows = dict[int, dict[float, Counted]]  # a seed maps x to its counts


def windows(table: pa.Table, label: str, definition: str, over: str = "pooled") -> dict[str, Windows]:
    """Return misses and offered requests of each run of a label, keyed by model ("" if pooled), then seed, then x.

    If the table has no column x, the rate scale of a run takes its place. `over` is pooled or model. Infeasible and
    skipped runs are left out. If a row stores no counts, they are computed from its number of requests and its value.
    """
    names = ("infeasible", "skipped", "model", "seed", along(table), "n", "value")
    columns = [column(table, name) for name in names]
    stored = _counted(table)
    by_model: dict[str, Windows] = {}
    for i in places(table).get((label, definition, over), ()):
        infeasible, skipped, model, seed, x, n, value = (values[i] for values in columns)
        if infeasible is not None or skipped is not None:
            continue
        counted = stored.get(i) or Counted(n * (1.0 - (value or 0.0)), float(n))
        if counted.offered > 0:
            by_model.setdefault(model or "", {}).setdefault(seed, {})[x] = counted
    return by_model


@once
def _counted(table: pa.Table) -> dict[int, Counted]:
    """Return the counts of each row that stores counts, summed over the time blocks of its window."""
    missed, offered = (table[name].combine_chunks() for name in ("missed", "offered"))
    ends = zip(*(each.offsets.to_numpy() for each in (missed, offered)), strict=True)
    values = [each.values.to_numpy() for each in (missed, offered)]
    return {
        i: Counted(*(float(all_[low:high].sum()) for all_, low, high in zip(values, lows, highs, strict=True)))
        for i, (there, (lows, highs)) in enumerate(zip(offered.is_valid().to_pylist(), pairwise(ends), strict=True))
        if there
    }


def together(of: Windows, seeds: Collection[int]) -> Counts | None:
    """Return `of` as arrays (x, seeds), for the given seeds and each x that they share; None if they share no x.

    Seeds that `of` lacks are ignored.
    """
    mine = {seed: of[seed] for seed in sorted(seeds) if seed in of}
    xs = sorted(set.intersection(*(set(curve) for curve in mine.values()))) if mine else []
    if not xs:
        return None
    counted = np.array([[curve[x] for curve in mine.values()] for x in xs], np.float64)
    return Counts(np.array(xs), counted[:, :, 0], counted[:, :, 1])


class Unfit(NamedTuple):
    """The number of seeds with which a system has no value at any x, and the reason."""

    word: str  # "does not fit" (its models have no room) or "skipped" (it cannot run in this setting)
    why: str  # is the reason of the first such seed
    seeds: int
    of: int

    @property
    def every(self) -> bool:
        """True if the system has no value with any seed."""
        return self.seeds == self.of


def unfit(table: pa.Table, label: str) -> Unfit | None:
    """Return the seeds with which a label has no value at any x, and why; None if it has a value with every seed."""
    seeds = _reasons(table).get(label, {})
    for k, word in enumerate(("does not fit", "skipped")):
        gone = [str(why[0][k]) for _, why in sorted(seeds.items()) if all(reason[k] is not None for reason in why)]
        if gone:
            return Unfit(word, gone[0], len(gone), len(seeds))
    return None


def ran(table: pa.Table, label: str) -> set[int]:
    """Return the seeds for which at least one run of a label was neither skipped nor infeasible."""
    return {seed for seed, why in _reasons(table).get(label, {}).items() if (None, None) in why}


@once
def _reasons(table: pa.Table) -> dict[str, dict[int, list[tuple[str | None, str | None]]]]:
    """Collect the reasons why runs are infeasible or skipped, by label and seed.

    Each pair is (reason for "infeasible", reason for "skipped"). A pair is listed once, in the order of rows.
    """
    reasons: dict[str, dict[int, dict[tuple[str | None, str | None], None]]] = {}
    columns = (column(table, name) for name in ("label", "seed", "infeasible", "skipped"))
    for label, seed, *why in zip(*columns, strict=True):
        reasons.setdefault(label, {}).setdefault(seed, {})[tuple(why)] = None
    return {label: {seed: list(why) for seed, why in seeds.items()} for label, seeds in reasons.items()}
