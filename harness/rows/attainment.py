"""Where TTFT, TPOT and SLO attainment are defined: pure functions of the stored stamps, the docstring is the formula.

TTFT, the time to first token, is first token - intended arrival. TPOT, the time per output token, is (last - first) /
(n - n_first): see `tpot_s`. A definition of attainment scores each request in [0, 1]: see `SCORES`.

Every share has the *offered* requests as its denominator: those with 0 <= arrival < window. A request that did not end
`done` is a miss under every definition. Percentiles count a latency that never came as infinite, so that overload
cannot improve them. Per-token measures of a run without token times are None, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.rows.record import WAITS
from harness.rows.requests import Rows

if TYPE_CHECKING:
    from harness.rows.requests import Bools, Floats


class Limits(NamedTuple):
    """TTFT and TPOT limits in seconds, one of each per request."""

    ttft_s: Floats
    tpot_s: Floats

    def take(self, which: Bools) -> Limits:
        """Limits of the requests that `which` selects."""
        return Limits(self.ttft_s[which], self.tpot_s[which])


Slo = Mapping[str, tuple[float, float]] | Limits  # model -> (TTFT, TPOT) in seconds (not named: none), or by request


# ------------------------------------------------------------------ latencies


def tpot_s(rows: Rows) -> Floats:
    """(last - first) / (n - n_first) of finished requests, n_first = tokens of the first chunk.

    NaN where undefined: not finished, or all tokens came at once (one-token outputs).
    """
    gaps = rows.made_tokens - rows.first_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows.done & (gaps > 0), (rows.e2e_s - rows.ttft_s) / gaps, np.nan)


def norm_s(rows: Rows) -> Floats:
    """Normalised latency: (last - arrival) / n of finished requests, NaN of others."""
    return np.where(rows.done, rows.e2e_s / np.maximum(rows.made_tokens, 1), np.nan)


def quantile(values: Floats, q: float) -> float:
    """Linear-interpolation quantile in which a missing value (NaN) is infinite; NaN of nothing."""
    ranked = np.sort(np.where(np.isnan(values), np.inf, values))
    if not len(ranked):
        return math.nan
    place = (len(ranked) - 1) * q
    low, share = int(place), place - int(place)
    if share == 0.0 or ranked[low] == ranked[low + 1]:
        return float(ranked[low])
    return float(ranked[low] + share * (ranked[low + 1] - ranked[low]))


# ------------------------------------------------------------------ attainment: one score in [0, 1] per offered request


def limits(rows: Rows, slo: Slo) -> Limits:
    """Limits of each request; infinite for a model without an SLO."""
    if isinstance(slo, Limits):
        return slo
    pairs = np.array([slo.get(name, (math.inf, math.inf)) for name in rows.models]).reshape(-1, 2)
    return Limits(pairs[rows.model, 0], pairs[rows.model, 1])


def met_ttft(rows: Rows, slo: Slo) -> Floats:
    """1 where done and first token - arrival <= TTFT."""
    return _score(rows.done & (rows.ttft_s <= limits(rows, slo).ttft_s))


def met_tpot(rows: Rows, slo: Slo) -> Floats:
    """1 where done and TPOT <= limit; an undefined TPOT (one token) is met."""
    tpot = tpot_s(rows)
    return _score(rows.done & (np.isnan(tpot) | (tpot <= limits(rows, slo).tpot_s)))


def met_both(rows: Rows, slo: Slo) -> Floats:
    """1 where the TTFT and the TPOT limit are both met."""
    return met_ttft(rows, slo) * met_tpot(rows, slo)


def met_e2e(rows: Rows, slo: Slo | Floats) -> Floats:
    """1 where done and last token - arrival <= deadline.

    The deadline is given in seconds per request (MuxServe: scale x the request's isolated latency), or else it is
    that of the last token asked for: TTFT + (n - 1) x TPOT.
    """
    if isinstance(slo, Mapping | Limits):
        ttft, tpot = limits(rows, slo)
        later = rows.output_tokens - 1
        with np.errstate(invalid="ignore"):  # 0 x inf: a one-token output has no TPOT to meet
            deadline_s = ttft + np.where(later > 0, later * tpot, 0.0)
    else:
        deadline_s = slo
    return _score(rows.done & (rows.e2e_s <= deadline_s))


def token_share(rows: Rows, slo: Slo) -> Floats | None:
    """Share of a request's tokens k = 1..n with t_k <= arrival + TTFT + (k - 1) x TPOT; 0 unless done.

    Aegaeon's token-level attainment. None without token times.
    """
    late = _late(rows, slo)
    if late is None or rows.tokens is None:
        return None
    counts = np.diff(rows.tokens.at)
    missed = np.bincount(np.repeat(np.arange(len(rows)), counts), late, len(rows))
    return np.where(rows.done & (counts > 0), 1.0 - missed / np.maximum(counts, 1), 0.0)


def qos(rows: Rows, slo: Slo) -> Floats | None:
    """Time-fraction QoS as Aegaeon's artifact scores it; 0 unless done. None without token times.

    Segments start at the arrival and at each late token. In a segment from s, token k = 0, 1, ... is late if
    t_k - s > TTFT + k x TPOT. A segment cut by late token k counts TTFT + (k - 1) x TPOT if it had a token on time,
    else 0; the last one counts min(TTFT + n x TPOT, t_last - s). The score is the sum over t_last.
    After a late token the allowance is not reset: the rule is lenient there, as released.
    """
    late = _late(rows, slo)
    if late is None or rows.tokens is None:
        return None
    at, (ttft, tpot) = rows.tokens.at, limits(rows, slo)
    scores = _score(rows.done & (np.diff(at) > 0))  # of one segment
    for i in np.unique(np.searchsorted(at, np.flatnonzero(late), "right") - 1):
        if scores[i]:
            scores[i] = _time_fraction(rows.tokens.ns[at[i] : at[i + 1]] / 1e9, float(ttft[i]), float(tpot[i]))
    return scores


def itl_share(rows: Rows, slo: Slo) -> Floats | None:
    """Share of a request's gaps between tokens that are <= TPOT; 1 where one token has none, 0 unless done.

    At 99 % the P99 of the time between tokens (ITL, or TBT) meets the limit, each request counting alike. None without
    token times.
    """
    if rows.tokens is None:
        return None
    counts = np.diff(rows.tokens.at)
    owner = np.repeat(np.arange(len(rows)), counts)
    within = owner[1:] == owner[:-1]
    gaps_s, of = np.diff(rows.tokens.ns)[within] / 1e9, owner[1:][within]
    long = np.bincount(of, gaps_s > limits(rows, slo).tpot_s[of], len(rows))
    return np.where(rows.done & (counts > 0), 1.0 - long / np.maximum(counts - 1, 1), 0.0)


def _score(met: Bools) -> Floats:
    return met.astype(np.float64)


def _late(rows: Rows, slo: Slo) -> Bools | None:
    """Which tokens k = 0, 1, ... come after TTFT + k x TPOT; None without token times."""
    if rows.tokens is None:
        return None
    counts = np.diff(rows.tokens.at)
    k = np.arange(len(rows.tokens.ns)) - np.repeat(rows.tokens.at[:-1], counts)
    ttft, tpot = (np.repeat(x, counts) for x in limits(rows, slo))
    with np.errstate(invalid="ignore"):  # 0 x inf
        return np.asarray(rows.tokens.ns / 1e9 > ttft + np.where(k > 0, k * tpot, 0.0))


def _deadlines(count: int, ttft: float, tpot: float) -> Floats:
    """Seconds allowed to token k = 0, 1, ...: TTFT + k x TPOT, also where TPOT is infinite."""
    return np.concatenate([[ttft], ttft + np.arange(1, count) * tpot])


def _time_fraction(stamps: Floats, ttft: float, tpot: float) -> float:
    n, last = len(stamps), float(stamps[-1])
    if last <= 0.0:
        return 1.0
    allowed = _deadlines(n + 1, ttft, tpot)
    start, first, good = 0.0, 0, 0.0
    while len(late := np.flatnonzero(stamps[first:] - start > allowed[first:n])):
        k = first + int(late[0])
        good += float(allowed[k - 1]) if k > first else 0.0
        start, first = float(stamps[k]), k + 1
    return (good + min(float(allowed[n]), last - start)) / last


SCORES: Mapping[str, Callable[[Rows, Slo], Floats | None]] = {
    "both": met_both,
    "ttft": met_ttft,
    "tpot": met_tpot,
    "e2e": met_e2e,
    "token": token_share,
    "qos": qos,
    "itl": itl_share,
}


# ------------------------------------------------------------------ pooled, per model, fairness


def share(scores: Floats) -> float:
    """Mean score of the offered requests; NaN if none was offered."""
    return float(scores.mean()) if len(scores) else math.nan


def per_model(rows: Rows, scores: Floats) -> dict[str, float]:
    """Mean score of each model that was offered requests."""
    count = np.bincount(rows.model, minlength=len(rows.models))
    total = np.bincount(rows.model, scores, minlength=len(rows.models))
    return {name: float(t / c) for name, t, c in zip(rows.models, total, count, strict=True) if c}


def jain(values: Iterable[float]) -> float:
    """Jain's index (sum x)^2 / (n x sum x^2): 1 if all are equal, 1/n if one has all; NaN if all are 0."""
    x = np.fromiter(values, np.float64)
    return float(x.sum() ** 2 / (len(x) * (x**2).sum())) if x.any() else math.nan


def undefined_tpot(rows: Rows) -> float:
    """Share of offered requests that finished without a TPOT (all tokens at once): they count as met."""
    return share(_score(rows.done & (rows.made_tokens <= rows.first_tokens)))


# ------------------------------------------------------------------ rates, causes


def goodput_rps(rows: Rows, slo: Slo, window_s: float) -> float:
    """Count the offered requests that met both limits, per second of the window."""
    return float(met_both(rows, slo).sum()) / window_s


def busy_s(rows: Rows) -> float:
    """Time with at least one request in the system: length of the union of [arrival, end].

    One without an end counts its stored waits, which reach to the run's end.
    """
    end = rows.arrival_s + np.where(np.isnan(rows.e2e_s), rows.waits_s.sum(axis=1), rows.e2e_s)
    order = np.argsort(rows.arrival_s, kind="stable")
    start, reach = rows.arrival_s[order], np.maximum.accumulate(end[order])
    before = np.concatenate([[-math.inf], reach[:-1]])
    return float((reach - np.maximum(start, before)).sum())


def throughput_tps(rows: Rows) -> float:
    """Output tokens made per second of busy time; NaN if it never was busy."""
    busy = busy_s(rows)
    return float(rows.made_tokens.sum()) / busy if busy else math.nan


def causes(rows: Rows, scores: Floats) -> dict[str, float]:
    """Why requests missed: share of the misses (score < 1) whose longest wait is this cause; {} without a miss.

    `solo`, the time that it would take alone, is no wait. Ties go to the earlier of record.WAITS; the shares sum to 1.
    """
    missed = rows.waits_s[scores < 1.0].copy()
    if not len(missed):
        return {}
    missed[:, WAITS.index("solo")] = -1.0
    main = np.bincount(missed.argmax(axis=1), minlength=len(WAITS)) / len(missed)
    return {wait: float(x) for wait, x in zip(WAITS, main, strict=True) if wait != "solo"}
