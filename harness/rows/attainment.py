"""The parts of attainment: latencies, limits, and means over scores. The docstring of a function is its formula.

TTFT, the time to first token, is first token - intended arrival. TPOT, the time per output token, is (last - first) /
(n - n_first): see `tpot_s`. A definition of attainment scores each request in [0, 1]: see `definitions`.

Every share has the *offered* requests as its denominator: those with 0 <= arrival < window. A request that did not end
`done` is a miss under every definition. Percentiles count a latency that never came as infinite, so that overload
cannot improve them. Per-token measures of a run without token times are None, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.rows.requests import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.rows.requests import Bools, Floats


class Limits(NamedTuple):
    """TTFT and TPOT limits in seconds, one of each per request."""

    ttft_s: Floats
    tpot_s: Floats

    def take(self, which: Bools | slice) -> Limits:
        """Return the limits of the requests that `which` selects."""
        return Limits(self.ttft_s[which], self.tpot_s[which])


Slo = Mapping[str, tuple[float, float]] | Limits  # model -> (TTFT, TPOT) in seconds (not named: none), or by request


# ------------------------------------------------------------------ latencies


def tpot_s(rows: Rows) -> Floats:
    """Compute (last - first) / (n - n_first) of finished requests, n_first = tokens of the first chunk.

    NaN where undefined: not finished, or all tokens came at once (one-token outputs).
    """
    gaps = rows.made_tokens - rows.first_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows.done & (gaps > 0), (rows.e2e_s - rows.ttft_s) / gaps, np.nan)


def norm_s(rows: Rows) -> Floats:
    """Compute the normalised latency: (last - arrival) / n of finished requests, NaN of others."""
    return np.where(rows.done, rows.e2e_s / np.maximum(rows.made_tokens, 1), np.nan)


def quantile(values: Floats, q: float) -> float:
    """Return the linear-interpolation quantile in which a missing value (NaN) is infinite; NaN of nothing."""
    ranked = np.sort(np.where(np.isnan(values), np.inf, values))
    if not len(ranked):
        return math.nan
    return interpolated((len(ranked) - 1) * q, ranked)


def interpolated(place: float, ranked: Mapping[int, float] | Floats) -> float:
    """Return the value at a place, from 0, among ranked values, between those of the ranks below and above."""
    low, share = int(place), place - int(place)
    if share == 0.0 or ranked[low] == ranked[low + 1]:
        return float(ranked[low])
    return float(ranked[low] + share * (ranked[low + 1] - ranked[low]))


# ------------------------------------------------------------------ limits and deadlines, for the definitions


def limits(rows: Rows, slo: Slo) -> Limits:
    """Return the limits of each request; infinite for a model without an SLO."""
    if isinstance(slo, Limits):
        return slo
    pairs = np.array([slo.get(name, (math.inf, math.inf)) for name in rows.models]).reshape(-1, 2)
    return Limits(pairs[rows.model, 0], pairs[rows.model, 1])


def deadline_s(slo: Limits, k: NDArray[Any]) -> Floats:
    """Return the seconds from arrival to the deadline of token k = 0, 1, ...: TTFT + k x TPOT.

    The first token's is TTFT, also where TPOT is infinite.
    """
    with np.errstate(invalid="ignore"):  # 0 x inf
        return slo.ttft_s + np.where(k > 0, k * slo.tpot_s, 0.0)


def late(rows: Rows, slo: Limits) -> Bools:
    """Mark the tokens that come after their deadline."""
    stamps, counts = rows.stamps, rows.stamps.counts
    k = np.arange(len(stamps.ns)) - np.repeat(stamps.at[:-1], counts)
    each = Limits(*(np.repeat(seconds, counts) for seconds in slo))
    return np.asarray(stamps.ns / 1e9 > deadline_s(each, k))


def time_fraction(stamps: Floats, ttft: float, tpot: float) -> float:
    """Return the share of a request's time to its last token that counts as good: see the definition `qos`."""
    n, last = len(stamps), float(stamps[-1])
    if last <= 0.0:
        return 1.0
    allowed = np.concatenate([[ttft], ttft + np.arange(1, n + 1) * tpot])
    start, first, good = 0.0, 0, 0.0
    while len(behind := np.flatnonzero(stamps[first:] - start > allowed[first:n])):
        k = first + int(behind[0])
        good += float(allowed[k - 1]) if k > first else 0.0
        start, first = float(stamps[k]), k + 1
    return (good + min(float(allowed[n]), last - start)) / last


# ------------------------------------------------------------------ pooled, per model, fairness


def share(scores: Floats, weights: Floats | None = None) -> float:
    """Average the scores of the offered requests, each by its weight (1); NaN if none was offered."""
    if weights is None:
        return float(scores.mean()) if len(scores) else math.nan
    whole = float(weights.sum())
    return float((scores * weights).sum()) / whole if whole else math.nan


def per_model(rows: Rows, scores: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Average the scores of each model that was offered requests, each by its weight (1)."""
    each = np.ones(len(rows)) if weights is None else weights
    count = np.bincount(rows.model, each, minlength=len(rows.models))
    total = np.bincount(rows.model, scores * each, minlength=len(rows.models))
    return {name: float(t / c) for name, t, c in zip(rows.models, total, count, strict=True) if c}


def jain(values: Iterable[float]) -> float:
    """Compute Jain's index (sum x)^2 / (n x sum x^2): 1 if all are equal, 1/n if one has all; NaN if all are 0."""
    x = np.fromiter(values, np.float64)
    return float(x.sum() ** 2 / (len(x) * (x**2).sum())) if x.any() else math.nan


def undefined_tpot(rows: Rows) -> float:
    """Return the share of offered requests that finished without a TPOT (all tokens at once): they count as met."""
    return share((rows.done & (rows.made_tokens <= rows.first_tokens)).astype(np.float64))


# ------------------------------------------------------------------ rates


def busy(rows: Rows, reach_s: float = -math.inf) -> tuple[float, float]:
    """Return the seconds with at least one request in the system, the union of [arrival, end], and the latest end.

    `reach_s` is that of requests which came before. A request without an end counts its stored waits, which reach to
    the run's end.
    """
    end = rows.arrival_s + np.where(np.isnan(rows.e2e_s), rows.waits_s.sum(axis=1), rows.e2e_s)
    order = np.argsort(rows.arrival_s, kind="stable")
    start, reach = rows.arrival_s[order], np.maximum.accumulate(np.append(reach_s, end[order]))
    return float((reach[1:] - np.maximum(start, reach[:-1])).sum()), float(reach[-1])


def busy_s(rows: Rows) -> float:
    """Return the seconds with at least one request in the system."""
    return busy(rows)[0]


def throughput_tps(rows: Rows) -> float:
    """Return the output tokens made per second of busy time; NaN if the system never was busy."""
    seconds = busy_s(rows)
    return float(rows.made_tokens.sum()) / seconds if seconds else math.nan
