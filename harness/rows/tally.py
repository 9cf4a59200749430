"""Sums over the offered requests of a run. Requests are added in pieces, so that a long run is scored in little memory.

The sums do not depend on the pieces. Latencies are stored until quantiles are computed; those of a long run are stored
in files.

Every share has the number of *offered* requests as its denominator: those with 0 <= arrival < window. A request that
did not end `done` is a miss under every definition. Percentiles count a latency that never came as infinite, so that
overload cannot improve them. Per-token measures of a run without token times are None, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness import spilled
from harness.rows import causes
from harness.rows.definitions import DEFINITIONS, both
from harness.rows.requests import Limits, Rows, interpolated, norm_s, take, tpot_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.rows.requests import Floats

QUANTILES = (50, 95, 99)
LATENCIES = ("ttft", "tpot", "e2e")
BLOCK_S = 150.0  # several times longer than a burst, so that blocks' misses are independent
UNDEFINED = -math.inf  # a TPOT of a request that has none, as all its tokens came at once


def share(scores: Floats, weights: Floats) -> float:
    """Return the weighted mean of the scores of the offered requests; NaN if none was offered."""
    whole = float(weights.sum())
    return float((scores * weights).sum()) / whole if whole else math.nan


def jain(values: Iterable[float]) -> float:
    """Compute Jain's index (sum x)^2 / (n x sum x^2): 1 if all are equal, 1/n if one has all; NaN if all are 0."""
    x = np.fromiter(values, np.float64)
    return float(x.sum() ** 2 / (len(x) * (x**2).sum())) if x.any() else math.nan


def busy(rows: Rows, reach_s: float = -math.inf) -> tuple[float, float]:
    """Return the seconds with at least one request in the system, and the latest end of a request.

    The seconds are the length of the union of all [arrival, end]. `reach_s` is the latest end among the requests of
    earlier calls. A request that never ended lasts as long as the sum of its stored waits, which reach to the run's
    end.
    """
    end = rows.arrival_s + np.where(np.isnan(rows.e2e_s), rows.waits_s.sum(axis=1), rows.e2e_s)
    order = np.argsort(rows.arrival_s, kind="stable")
    start, reach = rows.arrival_s[order], np.maximum.accumulate(np.append(reach_s, end[order]))
    return float((reach[1:] - np.maximum(start, reach[:-1])).sum()), float(reach[-1])


def by_block(rows: Rows, scores: Floats, weights: Floats, window_s: float) -> tuple[Floats, Floats]:
    """Sum the misses and offered requests of each model in each block of the window: (models, blocks).

    Blocks are equal and about `BLOCK_S` long.
    """
    blocks = max(1, round(window_s / BLOCK_S))
    at = np.minimum((rows.arrival_s * (blocks / max(window_s, 1e-9))).astype(np.int64), blocks - 1)
    where, shape = rows.model * blocks + at, (len(rows.models), blocks)
    missed, offered = (
        np.bincount(where, each, shape[0] * blocks).astype(np.float64).reshape(shape)
        for each in ((1.0 - scores) * weights, weights)
    )
    return missed, offered


@dataclass
class Attained:
    """The sums for one definition of attainment."""

    missed: Floats  # has a row for each model and a column for each block of the window, as has `asked`
    asked: Floats
    met: Floats  # has a weighted sum for each model
    scores: float = 0.0  # is weighted
    causes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(causes.CAUSES), np.int64))  # of misses

    @property
    def share(self) -> float:
        """The weighted mean of the scores; NaN if nothing was offered."""
        return self.scores / float(self.asked.sum()) if self.asked.any() else math.nan

    def per_model(self, models: Sequence[str]) -> dict[str, float]:
        """Return the mean score of each model that was offered requests."""
        return {name: float(t / c) for name, t, c in zip(models, self.met, self.asked.sum(axis=1), strict=True) if c}


@dataclass
class Measured:
    """The sums of all measures other than attainment."""

    offered: int = 0
    met: float = 0.0
    done: float = 0.0
    undefined: float = 0.0
    made_tokens: float = 0.0
    busy_s: float = 0.0
    reach_s: float = -math.inf  # the latest end so far
    tpot: tuple[float, int] = (0.0, 0)  # the sum, and the number of its terms
    norm: tuple[float, int] = (0.0, 0)

    def add(self, rows: Rows, slo: Limits) -> None:
        """Add requests. Calls must be in order of arrival."""
        tpot = tpot_s(rows)
        self.offered += len(rows)
        self.met += float(both(rows, slo).astype(np.float64).sum())
        self.done += float(rows.done.astype(np.float64).sum())
        self.undefined += float((rows.done & (rows.made_tokens <= rows.first_tokens)).astype(np.float64).sum())
        self.made_tokens += float(rows.made_tokens.sum())
        seconds, self.reach_s = busy(rows, self.reach_s)
        self.busy_s += seconds
        self.tpot = _more(self.tpot, tpot[~np.isnan(tpot)])
        self.norm = _more(self.norm, norm_s(rows)[rows.done])

    def values(self, window_s: float, quantiles: Mapping[str, float]) -> dict[str, float]:
        """Return the measures; units are in the names."""
        return {
            "offered_rps": self.offered / window_s if window_s else math.nan,
            "goodput_rps": self.met / window_s if window_s else math.nan,
            "throughput_tps": self.made_tokens / self.busy_s if self.busy_s else math.nan,
            "done": self.done / self.offered if self.offered else math.nan,
            "undefined_tpot": self.undefined / self.offered if self.offered else math.nan,
            **quantiles,
            "tpot_mean_s": _mean(self.tpot),  # counts finished requests only, so it stands beside `done`
            "norm_mean_s": _mean(self.norm),  # likewise
        }


def _more(sums: tuple[float, int], values: Floats) -> tuple[float, int]:
    return sums[0] + float(values.sum()), sums[1] + len(values)


def _mean(sums: tuple[float, int]) -> float:
    return sums[0] / sums[1] if sums[1] else math.nan


class Tally:
    """Sums over a run's offered requests, added in order of arrival. There is room to measure `most` requests."""

    def __init__(self, models: tuple[str, ...], window_s: float, most: int, definitions: Sequence[str]) -> None:
        self.models, self.window_s = models, window_s
        n, blocks = len(models), max(1, round(window_s / BLOCK_S))
        self.attained = {
            name: Attained(np.zeros((n, blocks)), np.zeros((n, blocks)), np.zeros(n)) for name in definitions
        }
        self.lacks: set[str] = set()  # definitions that need token times, of a run without
        self.offered = np.zeros(n, np.int64)  # counts the requests of each model
        self.pooled, self.each = Measured(), [Measured() for _ in models]
        self._model = spilled.like(most, np.int32)
        self._seconds = {name: spilled.like(most, np.float64) for name in LATENCIES}

    def add(self, rows: Rows, slo: Limits, *, why: bool = True) -> None:
        """Add offered requests to the sums of attainment and, with `why`, to the sums of the causes of SLO misses."""
        self.offered += np.bincount(rows.model, minlength=len(self.models))
        for name in self.attained:
            self._score(name, rows, slo, why)

    def measure(self, rows: Rows, slo: Limits, *, by_model: bool) -> None:
        """Add offered requests, in order of arrival, to the measures other than attainment."""
        tpot = tpot_s(rows)
        seconds = {
            "ttft": rows.ttft_s,
            "tpot": np.where(rows.done & np.isnan(tpot), UNDEFINED, tpot),
            "e2e": np.where(rows.done, rows.e2e_s, np.inf),
        }
        here = slice(self.pooled.offered, self.pooled.offered + len(rows))
        self._model[here] = rows.model
        for name, values in seconds.items():
            self._seconds[name][here] = np.where(np.isnan(values), np.inf, values)  # one that never came
        self.pooled.add(rows, slo)
        for code in np.unique(rows.model).tolist() if by_model else ():
            which = rows.model == code
            self.each[code].add(take(rows, which), slo.take(which))
        spilled.release(self._model, *self._seconds.values())

    def _score(self, name: str, rows: Rows, slo: Limits, why: bool) -> None:
        definition, sums = DEFINITIONS[name], self.attained[name]
        if (scores := definition.score(rows, slo)) is None:
            self.lacks.add(name)
            return
        weights = definition.weights(rows)
        missed, asked = by_block(rows, scores, weights, self.window_s)
        sums.missed += missed
        sums.asked += asked
        sums.met += np.bincount(rows.model, scores * weights, len(self.models))
        sums.scores += float((scores * weights).sum())
        if why:
            sums.causes += causes.counts(rows, slo, name, scores)

    def quantiles(self) -> dict[str, float]:
        """Return the quantiles of each latency, by names such as `ttft_p50_s`."""
        quantiles: dict[str, float] = {}
        for name, stored in self._seconds.items():
            seconds = spilled.like(self.pooled.offered, np.float64)
            seconds[:] = stored[: len(seconds)]
            spilled.release(stored)
            quantiles |= _quantiles(name, seconds)
        return quantiles

    def by_model(self) -> dict[int, dict[str, float]]:
        """Return for each model that was offered requests the same quantiles as `quantiles`."""
        begins = np.cumsum(self.offered) - self.offered
        quantiles: dict[int, dict[str, float]] = {code: {} for code in np.flatnonzero(self.offered).tolist()}
        for name, stored in self._seconds.items():
            seconds, ends = spilled.like(self.pooled.offered, np.float64), begins.copy()  # lie together by model
            for z in spilled.pieces(len(seconds), seconds, self._model, stored):
                model = self._model[z]
                counts = np.bincount(model, minlength=len(ends))
                first = ends - (np.cumsum(counts) - counts)
                seconds[np.repeat(first, counts) + np.arange(len(model))] = stored[z][np.argsort(model, kind="stable")]
                ends += counts
            for code, of in quantiles.items():
                of |= _quantiles(name, seconds[begins[code] : ends[code]])
        return quantiles


def _quantiles(name: str, seconds: Floats) -> dict[str, float]:
    """Return the quantiles of a latency; undefined values do not count.

    `seconds` is sorted in place; for a long run, it lies in a file.
    """
    seconds.sort()
    defined = seconds[np.searchsorted(seconds, UNDEFINED, "right") :]
    return {f"{name}_p{q}_s": interpolated(defined, q / 100) for q in QUANTILES}
