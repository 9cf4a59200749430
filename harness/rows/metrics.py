"""What the stored stamps mean: pure functions, the docstring is the formula.

Every share has the *offered* requests as its denominator: those with 0 <= arrival < window. A request that did not end
`done` is a miss under every definition. Percentiles count a latency that never came as infinite, so that overload
cannot improve them. Per-token measures of a run without token times are None, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows.record import STATES, WAITS

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


class Limits(NamedTuple):
    """TTFT and TPOT limits in seconds, one of each per request."""

    ttft_s: Floats
    tpot_s: Floats

    def take(self, which: Bools) -> Limits:
        """Limits of the requests that `which` selects."""
        return Limits(self.ttft_s[which], self.tpot_s[which])


Slo = Mapping[str, tuple[float, float]] | Limits  # model -> (TTFT, TPOT) in seconds (not named: none), or by request


# ------------------------------------------------------------------ rows as arrays


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token stamps: request i's are `ns[at[i]:at[i + 1]]`, from its intended arrival."""

    ns: NDArray[np.int64]
    at: NDArray[np.int64]

    def __iter__(self) -> Iterator[Floats]:
        """Yield each request's stamps in seconds."""
        return (self.ns[a:b] / 1e9 for a, b in zip(self.at[:-1], self.at[1:], strict=True))

    def take(self, which: Bools) -> Tokens:
        """Stamps of the requests that `which` selects."""
        counts = np.diff(self.at)
        return Tokens(self.ns[np.repeat(which, counts)], np.concatenate([[0], np.cumsum(counts[which])]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests as arrays, one element each; NaN where a stamp never came. Seconds from the window's start."""

    models: tuple[str, ...]
    model: NDArray[np.int32]  # indexes `models`
    arrival_s: Floats
    ttft_s: Floats  # first token - intended arrival
    e2e_s: Floats  # final state - intended arrival
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]  # asked for
    made_tokens: NDArray[np.int32]
    first_tokens: NDArray[np.int32]  # in the first chunk
    state: NDArray[np.int32]  # indexes record.STATES
    waits_s: Floats  # (requests, causes), in the order of record.WAITS
    tokens: Tokens | None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def done(self) -> Bools:
        """Which requests finished."""
        done: Bools = self.state == STATES.index("done")
        return done


def rows(table: pa.Table) -> Rows:
    """Arrays of a run's table (record.SCHEMA)."""
    models, model = _codes(table, "model")
    states, state = _codes(table, "state")
    arrival = _numpy(table, "arrival_ns")
    return Rows(
        models=models,
        model=model,
        arrival_s=arrival / 1e9,
        ttft_s=(_numpy(table, "first_ns") - arrival) / 1e9,
        e2e_s=(_numpy(table, "done_ns") - arrival) / 1e9,
        prompt_tokens=_numpy(table, "prompt_tokens"),
        output_tokens=_numpy(table, "output_tokens"),
        made_tokens=_numpy(table, "made_tokens"),
        first_tokens=_numpy(table, "first_tokens"),
        state=np.array([STATES.index(name) for name in states], np.int32)[state],
        waits_s=np.stack([_numpy(table, f"{wait}_ns") for wait in WAITS], axis=1) / 1e9,
        tokens=_tokens(table),
    )


def take(rows: Rows, which: Bools) -> Rows:
    """Keep the requests that `which` selects; `models` stays whole."""
    arrays = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name not in {"models", "tokens"}}
    tokens = rows.tokens.take(which) if rows.tokens is not None else None
    return Rows(models=rows.models, tokens=tokens, **{name: array[which] for name, array in arrays.items()})


def in_window(rows: Rows, window_s: float) -> Bools:
    """Tell which requests were offered: 0 <= arrival < window."""
    return (rows.arrival_s >= 0.0) & (rows.arrival_s < window_s)


def _numpy(table: pa.Table, name: str) -> NDArray[Any]:
    array: NDArray[Any] = table.column(name).to_numpy()  # nulls make it float with NaN: exact below 104 days in ns
    return array


def _codes(table: pa.Table, name: str) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Sorted values that occur, and codes into them."""
    column = table.column(name)
    column = (column if pa.types.is_dictionary(column.type) else column.dictionary_encode()).combine_chunks()
    words, codes = column.dictionary.to_pylist(), column.indices.to_numpy()
    values = sorted({words[i] for i in np.unique(codes)})
    place = {word: i for i, word in enumerate(values)}
    return tuple(values), np.array([place.get(word, -1) for word in words], np.int32)[codes]


def _tokens(table: pa.Table) -> Tokens | None:
    if "token_ns" not in table.column_names or table.column("token_ns").null_count == len(table):
        return None
    column = table.column("token_ns").combine_chunks()
    counts = np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    return Tokens(column.flatten().to_numpy(), np.concatenate([[0], np.cumsum(counts)]))


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


def itl_s(rows: Rows, by: Literal["chunk", "token"] = "chunk") -> Floats | None:
    """Inter-token latencies, pooled; None without token times.

    `chunk`: gaps between successive chunks (tokens with one stamp are one chunk). `token`: the gap before a chunk of k
    tokens as k gaps of 1/k of it. The first chunk has no gap.
    """
    if rows.tokens is None:
        return None
    parts = []
    for stamps in rows.tokens:
        times, counts = np.unique(stamps, return_counts=True)
        gaps, k = np.diff(times), counts[1:]
        parts.append(gaps if by == "chunk" else np.repeat(gaps / k, k))
    return np.concatenate(parts) if parts else np.empty(0)


def stall_s(rows: Rows) -> Floats | None:
    """Longest gap between successive chunks of each request, 0 for one chunk; None without token times."""
    if rows.tokens is None:
        return None
    return np.array([np.diff(stamps).max(initial=0.0) for stamps in rows.tokens])


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


DEFINITIONS: Mapping[str, Callable[[Rows, Slo], Floats | None]] = {
    "both": met_both,
    "ttft": met_ttft,
    "tpot": met_tpot,
    "e2e": met_e2e,
    "token": token_share,
    "qos": qos,
}
BY_TOKEN = frozenset({"token", "qos"})  # need the time of each token


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


# ------------------------------------------------------------------ rates, queues, causes


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


def waiting(rows: Rows, at_s: Floats) -> NDArray[np.int64]:
    """Count the requests that have arrived and have neither a first token nor an end, at each of `at_s`."""
    return _inside(rows, at_s, np.fmin(rows.ttft_s, rows.e2e_s))


def in_system(rows: Rows, at_s: Floats) -> NDArray[np.int64]:
    """Count the requests that have arrived and not ended, at each of `at_s`."""
    return _inside(rows, at_s, rows.e2e_s)


def _inside(rows: Rows, at_s: Floats, stay_s: Floats) -> NDArray[np.int64]:
    gone = np.sort((rows.arrival_s + stay_s)[~np.isnan(stay_s)])
    come = np.sort(rows.arrival_s)
    return np.searchsorted(come, at_s, "right") - np.searchsorted(gone, at_s, "right")


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


# ------------------------------------------------------------------ statistics over runs

T_BELOW = 8  # runs; with fewer a bootstrap interval is too short, so the t interval stands in
_RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs with its 95 % interval.

    `low` and `high` are None for a single run, or where unbounded. `sign` tells how far the mean can be trusted: "=" it
    is; ">" and "<" it is only a bound (values beyond the grid were cut at its edge); "~" both happened. `cut` runs lie
    beyond the grid, all of them beyond `edge`.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    sign: Literal["=", "<", ">", "~"] = "="
    cut: int = 0
    edge: float | None = None  # None without a cut run, or where runs are cut on both sides

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        low, high, edge = (None if x is None else x * factor for x in (self.low, self.high, self.edge))
        return replace(self, mean=self.mean * factor, low=low, high=high, edge=edge)


def interval(values: Sequence[float] | Floats, within: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """Mean and 95 % interval over runs: t interval below 8 runs, BCa bootstrap (9,999 resamples, fixed seed) from 8.

    Clipped to `within`, the possible range. NaN values make all of it NaN. Raises ValueError on no values.
    """
    x = np.asarray(values, np.float64)
    if not len(x):
        raise ValueError("an interval needs at least one run")
    mean = float(x.mean())
    if len(x) == 1 or not np.isfinite(x).all():
        return Estimate(mean, None, None, len(x))
    low, high = _t(x) if len(x) < T_BELOW else _bca(x)
    return Estimate(mean, float(np.clip(low, *within)), float(np.clip(high, *within)), len(x))


def _t(x: Floats) -> tuple[float, float]:
    """Mean +- t_{0.975, n-1} s / sqrt(n)."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(x) - 1, 0.975)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


def _bca(x: Floats) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap of the mean (Efron 1987)."""
    from scipy.special import ndtr, ndtri

    mean = float(x.mean())
    if np.ptp(x) == 0.0:
        return mean, mean
    picks = np.random.default_rng(0).integers(0, len(x), (_RESAMPLES, len(x)))
    means = x[picks].mean(axis=1)
    bias = ndtri((np.sum(means < mean) + 0.5 * np.sum(means == mean)) / _RESAMPLES)
    spread = x - mean  # of the leave-one-out means, up to a factor that cancels
    bend = (spread**3).sum() / (6.0 * (spread**2).sum() ** 1.5)
    z = bias + ndtri(np.array([0.025, 0.975]))
    low, high = np.quantile(means, ndtr(bias + z / (1.0 - bend * z)))
    return float(low), float(high)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Mean and 95 % interval of ours - theirs over the seeds that both have. Raises ValueError if there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in seeds])


def wins(difference: Estimate) -> bool:
    """Tell whether a paired difference is above 0 beyond its interval."""
    return difference.low is not None and difference.low > 0.0


# ------------------------------------------------------------------ where a curve crosses a level

Curve = Mapping[float, float]  # x -> attainment, of one seed


class Point(NamedTuple):
    """A sampled x of a curve, what was attained there, and the fit."""

    x: float
    attained: float  # 0 where it is undefined (NaN)
    fitted: float


def falling(values: Sequence[float]) -> list[float]:
    """Non-increasing least-squares fit of a sequence: isotonic regression by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, n = pools.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def fitted(curve: Curve) -> list[Point]:
    """A curve's points by rising x beside its non-increasing fit. Raises ValueError for a curve without points."""
    points = sorted((x, 0.0 if math.isnan(y) else y) for x, y in curve.items())
    if not points:
        raise ValueError("a crossing needs at least one point")
    return [Point(x, y, fit) for (x, y), fit in zip(points, falling([y for _, y in points]), strict=True)]


def held(curve: Curve, level: float) -> float | None:
    """Largest sampled x at which the fit is >= level; None where it is nowhere.

    What is attained there is then >= level too, and at the next sampled x it is below: a pool of the fit ends with
    values of at least its mean, and begins with values of at most its mean.
    """
    return max((point.x for point in fitted(curve) if point.fitted >= level), default=None)


def rate_at(curve: Curve, level: float) -> tuple[float, Literal["=", "<", ">"]]:
    """Rate at which the non-increasing fit of one seed's attainment crosses the level.

    Linear between the last rate at which the fit is >= level and the next one. (lowest, "<") if the fit is below the
    level already there, (highest, ">") if it is nowhere.
    """
    points = fitted(curve)
    passed = sum(point.fitted >= level for point in points)
    if passed == 0:
        return points[0].x, "<"
    if passed == len(points):
        return points[-1].x, ">"
    last, next_ = points[passed - 1 : passed + 1]
    return last.x + (last.fitted - level) / (last.fitted - next_.fitted) * (next_.x - last.x), "="


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the curves of all seeds cross a level, and what the fit smooths over.

    A first dip is no capacity, and the highest sampled rate that holds rewards noise; so the fit decides, and the first
    x that fails and the deepest dip stand beside it.
    """

    at: Estimate
    fails: float | None  # the easiest sampled x that is below the level in any seed; None: no x is
    dip: float  # largest fitted - attained of any seed, in shares of 1

    def times(self, factor: float) -> Crossing:
        """In another unit of x."""
        return replace(self, at=self.at.times(factor), fails=None if self.fails is None else self.fails * factor)


def crossing(curves: Mapping[int, Curve], level: float) -> Crossing:
    """Mean over seeds (seed -> curve) of `rate_at`; crossings beyond the grid are cut at its edge."""
    each = [curve for _, curve in sorted(curves.items())]
    found = [rate_at(curve, level) for curve in each]
    values = [value for value, _ in found]
    return _crossing(_cut(interval(values), [sign for _, sign in found], values), each, level)


def _crossing(at: Estimate, curves: Iterable[Curve], level: float) -> Crossing:
    points = [point for curve in curves for point in fitted(curve)]
    fails = min((point.x for point in points if point.attained < level), default=None)
    return Crossing(at, fails, max(0.0, *(point.fitted - point.attained for point in points)))


def least(curves: Mapping[int, Curve], level: float) -> Crossing:
    """`crossing` where a larger x is easier (SLO scales): the fit never falls, `fails` is the largest x that does."""
    return _mirrored(crossing({seed: {-x: y for x, y in curve.items()} for seed, curve in curves.items()}, level))


def fewest(curves: Mapping[int, Curve], level: float) -> Crossing:
    """Smallest sampled x at which the non-decreasing fit of the mean over seeds is >= level, for an x that counts GPUs.

    One buys a whole number of them, the same for every seed: so the mean is fitted, nothing is interpolated, and there
    is no interval. That number was sampled and holds by itself (see `held`). (largest, ">") if even that is below.
    """
    n, xs = len(curves), set.intersection(*(set(curve) for curve in curves.values()))
    mean = {-x: float(np.mean([curve[x] for curve in curves.values()])) for x in xs}
    x = held(mean, level)
    if x is None:
        at = Estimate(min(mean), None, None, n, "<", n, min(mean))
    elif x == max(mean):
        at = Estimate(x, None, None, n, ">", n, x)
    else:
        at = Estimate(x, None, None, n)
    return _mirrored(_crossing(at, [mean], level))


_MIRROR: Mapping[str, Literal["=", "<", ">", "~"]] = {"=": "=", "<": ">", ">": "<", "~": "~"}


def _mirrored(c: Crossing) -> Crossing:
    at = c.at.times(-1.0)
    return replace(c.times(-1.0), at=replace(at, low=at.high, high=at.low, sign=_MIRROR[at.sign]))


FIND: Mapping[str, Callable[[Mapping[int, Curve], float], Crossing]] = {  # where a level is crossed, by axis
    "rate_scale": crossing,
    "models": crossing,
    "slo_scale": least,
    "gpus": fewest,
}


def crossed(table: pa.Table, axis: str, label: str, definition: str, level: float) -> Crossing | None:
    """Where a label crosses the level along column x; None where it was not run.

    More models than fit are no point of a curve: of those that fit, the most that hold are the answer.
    """
    own = table.filter(pc.equal(table["label"].cast(pa.string()), label))
    if axis != "models" or not (unfit := pc.unique(own.filter(pc.is_valid(own["infeasible"]))["x"]).to_pylist()):
        found = curves(own, label, definition, "x")
        return FIND[axis](found, level) if found else None
    fit = curves(own.filter(pc.is_null(own["infeasible"])), label, definition, "x")
    c = crossing(fit or curves(own, label, definition, "x"), level)
    at = Estimate(c.at.mean, None, None, c.at.n) if c.at.sign == ">" else c.at
    return replace(c, at=at, fails=min(unfit if c.fails is None else [c.fails, *unfit]))


def crossing_ratio(ours: Mapping[int, Curve], theirs: Mapping[int, Curve], level: float) -> Estimate:
    """Geometric mean over common seeds of our crossing / theirs, with its interval (t or BCa on logarithms)."""
    logs, signs = [], []
    for seed in sorted(ours.keys() & theirs.keys()):
        (a, above), (b, below) = rate_at(ours[seed], level), rate_at(theirs[seed], level)
        logs.append(math.log(a / b))
        beyond = {above, _MIRROR[below]} - {"="}
        signs.append("~" if len(beyond) > 1 else beyond.pop() if beyond else "=")
    e = interval(logs)
    low, high = (None if x is None else math.exp(x) for x in (e.low, e.high))
    return _cut(Estimate(math.exp(e.mean), low, high, e.n), signs, [math.exp(x) for x in logs])


def _cut(e: Estimate, signs: Sequence[str], values: Sequence[float]) -> Estimate:
    """Mark an estimate from values cut at the edge of the grid: unbounded on the side where they were cut."""
    beyond = [value for value, sign in zip(values, signs, strict=True) if sign != "="]
    kinds = set(signs) - {"="}
    if not beyond:
        return e
    if kinds == {">"}:
        return Estimate(e.mean, min(values) if e.low is None else e.low, None, e.n, ">", len(beyond), min(beyond))
    if kinds == {"<"}:
        return Estimate(e.mean, None, max(values) if e.high is None else e.high, e.n, "<", len(beyond), max(beyond))
    return Estimate(e.mean, None, None, e.n, "~", len(beyond))


# ------------------------------------------------------------------ the tidy table of a sweep

WEIGHTS = ("loads", "evicts", "migrations")  # how often weights came, went, and changed their place
CAPS: Mapping[str, str] = {
    "cap_bound": "batch_cap",
    "chunk_bound": "chunk_tokens",
    "prefill_bound": "prefill_tokens",
}  # the share of steps that this field of the spec bound
BINDS = 0.01  # above this share a cap is part of the result, and told


@dataclass(frozen=True, slots=True)
class Run:
    """A run to score: its folder's name, facts (record.meta), rows (record.read) and the SLO seconds that apply."""

    name: str
    meta: Mapping[str, Any]
    table: pa.Table
    slo_s: Slo
    label: str = ""  # in tables and legends; the system's name (and preset) if empty
    deadline_s: Floats | None = field(default=None, repr=False)  # end-to-end, per row of `table`


_WORD = pa.dictionary(pa.int32(), pa.string())
RUN_SCHEMA = [
    ("run", _WORD),
    ("label", _WORD),
    ("system", _WORD),
    ("preset", _WORD),
    ("trace", _WORD),
    ("models", _WORD),
    ("gpu", _WORD),
    ("gpus", pa.int32()),
    ("machine", _WORD),  # its processes and links where they are not the default; else null
    ("engine", _WORD),
    ("host", _WORD),
    ("scaling", _WORD),
    ("rate_scale", pa.float64()),
    ("seed", pa.int64()),
    ("slo", _WORD),
    ("plan_origin", _WORD),
    ("tier", _WORD),
    ("fit", _WORD),  # of a synthetic trace to its target: "within" or where it is off; null where nothing was measured
    ("fidelity", _WORD),
    ("skipped", _WORD),  # reason; its rows have no value
    ("infeasible", _WORD),  # reason; its attainment is 0
]
TABLE_SCHEMA = pa.schema(
    [
        *RUN_SCHEMA,
        ("definition", _WORD),  # of attainment (DEFINITIONS), or a measure with its unit in the name
        ("over", _WORD),  # pooled | model | mean (over models) | worst (model) | jain
        ("model", _WORD),  # null unless over = model
        ("n", pa.int64()),  # offered requests under the value
        ("value", pa.float64()),  # null: not defined for this run, shown as "-"; infinite: did not come
    ]
)
ORDER = ("trace", "models", "gpu", "label", "gpus", "rate_scale", "seed", "run", "over", "definition", "model")


def machine(spec: Mapping[str, Any]) -> str | None:
    """Processes and links of a run's spec as a caption names them, where they are not the default; else none."""
    links = {"pcie_gbps": "PCIe", "nvlink_gbps": "NVLink", "net_gbps": "network", "disk_gbps": "disk"}
    held = spec.get("process_bytes")
    facts = [
        "one process a model for all" if spec.get("process") == "model" else "",
        "" if held is None else f"{held / 2**30:.3g} GiB a process beside weights",
        *(f"{name} {spec[key]:g} GB/s" for key, name in links.items() if spec.get(key) is not None),
    ]
    return ", ".join(fact for fact in facts if fact) or None


def attainment(runs: Iterable[Run]) -> pa.Table:
    """Tidy table (run x model x definition, `TABLE_SCHEMA`) of all runs, sorted by spec; reads one run at a time."""
    table = pa.concat_tables([TABLE_SCHEMA.empty_table(), *map(score, runs)])
    plain = pa.schema([(f.name, pa.string() if f.type == _WORD else f.type) for f in TABLE_SCHEMA])
    # strings while sorting, so that the dictionaries come out in the order of the sorted rows: equal runs, equal bytes
    return table.cast(plain).sort_by([(name, "ascending") for name in ORDER]).cast(TABLE_SCHEMA).combine_chunks()


def score(run: Run, *, by_model: bool = True) -> pa.Table:
    """Rows of one run in the tidy table: every definition and measure, pooled and (on request) per model."""
    spec = run.meta.get("spec") or {}
    skipped, infeasible = run.meta.get("skipped"), run.meta.get("infeasible")
    values: list[tuple[str, str, str | None, int, float | None]] = []
    if skipped:
        values += [(name, "pooled", None, 0, None) for name in DEFINITIONS]
    elif infeasible:
        values += [(name, over, None, 0, 0.0) for name in DEFINITIONS for over in ("pooled", "mean", "worst")]
    else:
        values += _values(run, spec, by_model)
    about = {
        **spec,
        "run": run.name,
        "label": run.label or ":".join(x for x in (spec.get("system"), spec.get("preset")) if x and x != "default"),
        "plan_origin": run.meta.get("plan_origin") or spec.get("plan"),
        "tier": run.meta.get("tier"),
        "fit": run.meta.get("fit"),
        "machine": machine(spec),
        "fidelity": run.meta.get("fidelity"),
        "skipped": skipped,
        "infeasible": infeasible,
    }
    count = len(values)
    columns = {name: _repeat(about.get(name), kind, count) for name, kind in RUN_SCHEMA}
    names = TABLE_SCHEMA.names[len(RUN_SCHEMA) :]
    columns |= dict(zip(names, zip(*values, strict=True), strict=True))
    arrays = [_array(columns[f.name], f.type) for f in TABLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)


def _repeat(value: Any, kind: pa.DataType, count: int) -> Any:
    return pa.array([value] * count, pa.string() if kind == _WORD else kind)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if kind == _WORD:
        return pa.array(values, pa.string()).dictionary_encode()
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _values(
    run: Run, spec: Mapping[str, Any], by_model: bool
) -> Iterator[tuple[str, str, str | None, int, float | None]]:
    """(definition, over, model, n, value)."""
    every = rows(run.table)
    window_s = spec.get("window_s") or float(every.arrival_s.max(initial=0.0))
    counted = in_window(every, spec.get("window_s") or math.inf)
    offered, slo = take(every, counted), limits(every, run.slo_s).take(counted)
    n = len(offered)
    counts = np.bincount(offered.model, minlength=len(offered.models))
    for name, rule in DEFINITIONS.items():
        if name == "e2e" and run.deadline_s is not None:
            scores: Floats | None = met_e2e(offered, run.deadline_s[counted])
        else:
            scores = rule(offered, slo)
        if scores is None:
            yield name, "pooled", None, n, None
            continue
        each = per_model(offered, scores)
        yield name, "pooled", None, n, _known(share(scores))
        yield name, "mean", None, n, _known(share(np.array(list(each.values()))))
        yield name, "worst", None, n, _known(min(each.values(), default=math.nan))
        yield name, "jain", None, n, _known(jain(each.values()))
        for model, value in each.items() if by_model else ():
            yield name, "model", model, int(counts[offered.models.index(model)]), value
    for name, value in measures(offered, slo, window_s).items():
        yield name, "pooled", None, n, _known(value)
    for code in np.flatnonzero(counts) if by_model else ():
        own = offered.model == code
        for name, value in measures(take(offered, own), slo.take(own), window_s).items():
            yield name, "model", offered.models[code], int(counts[code]), _known(value)
    for wait, value in causes(offered, met_both(offered, slo)).items():
        yield f"missed_{wait}", "pooled", None, n, value
    for name, value in utilisation(run.meta.get("stats") or {}).items():
        yield name, "pooled", None, n, _known(value)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def measures(rows: Rows, slo: Slo, window_s: float) -> dict[str, float]:
    """Compute what stands beside attainment, of offered rows: rates, latencies, shares; units in the names."""
    tpot = tpot_s(rows)
    defined = tpot[~(rows.done & np.isnan(tpot))]  # unfinished ones stay, as infinite
    finished = norm_s(rows)[rows.done]
    latencies = {"ttft": rows.ttft_s, "tpot": defined, "e2e": np.where(rows.done, rows.e2e_s, np.nan)}
    return {
        "offered_rps": len(rows) / window_s if window_s else math.nan,
        "goodput_rps": goodput_rps(rows, slo, window_s) if window_s else math.nan,
        "throughput_tps": throughput_tps(rows),
        "done": share(_score(rows.done)),
        "undefined_tpot": undefined_tpot(rows),
        **{f"{name}_p{q}_s": quantile(x, q / 100) for name, x in latencies.items() for q in (50, 95, 99)},
        "tpot_mean_s": share(tpot[~np.isnan(tpot)]),  # of finished requests only: stands beside `done`
        "norm_mean_s": share(finished),  # likewise
    }


def utilisation(stats: Mapping[str, float]) -> dict[str, float]:
    """Compute shares of what there was (KV bytes x seconds, GPU seconds) from an engine's statistics; others as is.

    The engine's span is the whole run, warm-up and drain included.
    """
    gpu_s = stats.get("gpus", 0.0) * stats.get("span_s", 0.0)
    kv_byte_s = stats.get("kv_cap_bytes", 0.0) * stats.get("span_s", 0.0)
    shares = {"kv_used": ("kv_byte_s", kv_byte_s), "gpu_busy": ("gpu_busy_s", gpu_s), "hbm_busy": ("gpu_hbm_s", gpu_s)}
    found = {name: stats[part] / whole for name, (part, whole) in shares.items() if part in stats and whole > 0.0}
    return found | {name: stats[name] for name in (*WEIGHTS, "moves", "preemptions", *CAPS) if name in stats}


def own_gpus(took: Mapping[str, Collection[int]], asked: int | None) -> set[str]:
    """Labels of a panel whose systems take GPUs of their own accord (`dedicated`: one a model), not as many as asked.

    `took` are the counts of each label; `asked` is None on an axis of GPUs, where such a label has one count alone.
    """
    several = len(set().union(*took.values())) > 1
    return {label for label, counts in took.items()
            if (several and len(counts) == 1 if asked is None else set(counts) != {asked})}  # fmt: skip


def with_gpus(label: str, counts: Collection[int]) -> str:
    """A label with the GPUs that it took: `dedicated (8 and 18 GPUs)`."""
    every = sorted(counts)
    text = " and ".join(map(str, every)) if len(every) < 3 else f"{every[0]} to {every[-1]}"
    return f"{label} ({text} GPUs)"


# ------------------------------------------------------------------ over the runs of a sweep

_SAME = ["trace", "models", "gpu", "engine", "scaling", "slo", "tier", "fidelity", "plan_origin"]
POINT = [*_SAME, "label", "system", "gpus", "rate_scale", "over", "model", "definition"]


def summary(
    table: pa.Table, definitions: Sequence[str], over: Sequence[str] = ("pooled",), by: Sequence[str] = POINT
) -> pd.DataFrame:
    """Mean and interval over seeds of each point (`by`, the definition last): columns mean, low, high, n, infeasible.

    A point without a value has NaN, one without an interval NaN bounds.
    """
    import pandas as pd

    wanted = pc.and_(
        pc.is_in(table.column("definition").cast(pa.string()), pa.array(list(definitions), pa.string())),
        pc.is_in(table.column("over").cast(pa.string()), pa.array(list(over), pa.string())),
    )
    frame = table.filter(pc.and_(wanted, pc.is_null(table.column("skipped")))).to_pandas()
    points = []
    for key, group in frame.groupby(list(by), dropna=False, observed=True, sort=True):
        values = group["value"].to_numpy(np.float64)
        bounds = (0.0, 1.0) if key[-1] in DEFINITIONS else (0.0, math.inf)
        e = interval(values, bounds)
        hollow = bool(group["infeasible"].notna().any())
        points.append((*key, e.mean, *(math.nan if x is None else x for x in (e.low, e.high)), e.n, hollow))
    return pd.DataFrame(points, columns=[*by, "mean", "low", "high", "n", "infeasible"])


class Bound(NamedTuple):
    """A cap of the engine that bound more than `BINDS` of a system's steps, in the mean over seeds."""

    cap: str  # the field of the spec
    label: str
    offered_rps: float  # the lowest rate at which it did
    share: float  # of steps at that rate
    most: float  # of steps at any point


def bound(table: pa.Table) -> list[Bound]:
    """Find the caps that bound, in the order of `CAPS`, and in which systems, by name."""
    names = pa.array([*CAPS, "offered_rps"])
    pooled = pc.equal(table.column("over").cast(pa.string()), "pooled")
    wanted = pc.and_(pooled, pc.is_in(table.column("definition").cast(pa.string()), names))
    frame = table.filter(wanted).to_pandas()
    by = [*(name for name in ("panel", "x") if name in frame), *POINT]  # a paper's figure has panels
    means = frame.groupby(by, dropna=False, observed=True)["value"].mean().reset_index()
    means = means.sort_values(["label", "rate_scale"], kind="stable")
    offered = (
        means[means["definition"] == "offered_rps"].groupby(["label", "rate_scale"], observed=True)["value"].mean()
    )
    found = []
    for name, cap in CAPS.items():
        binds = means[(means["definition"] == name) & (means["value"] > BINDS)]
        for label, own in binds.groupby("label", observed=True):
            first = own.iloc[0]
            rate = float(offered.get((label, first["rate_scale"]), math.nan))
            found.append(Bound(cap, str(label), rate, float(first["value"]), float(own["value"].max())))
    return found


def curves(table: pa.Table, label: str, definition: str = "both", axis: str = "offered_rps") -> dict[int, Curve]:
    """Attainment by rate of each seed, for `crossing`: pooled values of `definition` over `axis`.

    `axis` is offered_rps or a column of numbers; an infeasible run, which offered nothing, takes the rate of its peers.
    """
    by = "rate_scale" if axis == "offered_rps" else axis
    frame = table.select(["label", by, "seed", "definition", "over", "value"]).to_pandas()
    frame = frame[frame["over"] == "pooled"].rename(columns={by: "rate_scale"})
    offered = frame[(frame["definition"] == "offered_rps") & frame["value"].notna()]
    rate = dict(zip(zip(offered["seed"], offered["rate_scale"], strict=True), offered["value"], strict=True))
    rate |= dict(zip(*_own(offered[offered["label"] == label]), strict=True))
    found: dict[int, dict[float, float]] = {}
    mine = frame[(frame["label"] == label) & (frame["definition"] == definition)]
    for seed, scale, value in zip(mine["seed"], mine["rate_scale"], mine["value"], strict=True):
        x = rate.get((seed, scale), math.nan) if axis == "offered_rps" else scale
        if not math.isnan(x):
            found.setdefault(int(seed), {})[float(x)] = float(value)
    return {seed: found[seed] for seed in sorted(found)}


def _own(offered: pd.DataFrame) -> tuple[list[tuple[int, float]], list[float]]:
    return list(zip(offered["seed"], offered["rate_scale"], strict=True)), list(offered["value"])
