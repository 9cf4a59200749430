"""Statistics over the runs of a point: means with 95 % intervals, and where a curve crosses a level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from harness.rows.requests import Floats

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


def crossing(curves: Mapping[int, Curve], level: float, within: tuple[float, float] = (0.0, math.inf)) -> Crossing:
    """Mean over seeds (seed -> curve) of `rate_at`; crossings beyond the grid are cut at its edge.

    The interval is clipped to `within`, the possible range of x.
    """
    each = [curve for _, curve in sorted(curves.items())]
    at = [rate_at(curve, level) for curve in each]
    values = [value for value, _ in at]
    return _crossing(_cut(interval(values, within), [sign for _, sign in at], values), each, level)


def _crossing(at: Estimate, curves: Iterable[Curve], level: float) -> Crossing:
    points = [point for curve in curves for point in fitted(curve)]
    fails = min((point.x for point in points if point.attained < level), default=None)
    return Crossing(at, fails, max(0.0, *(point.fitted - point.attained for point in points)))


def least(curves: Mapping[int, Curve], level: float) -> Crossing:
    """`crossing` where a larger x is easier (SLO scales): the fit never falls, `fails` is the largest x that does."""
    mirrored = {seed: {-x: y for x, y in curve.items()} for seed, curve in curves.items()}
    return _mirrored(crossing(mirrored, level, (-math.inf, 0.0)))


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


class Plateau(NamedTuple):
    """Sampled x between which a curve lies on the level, and what any seed attains there, in shares of 1."""

    first: float
    last: float
    low: float
    high: float

    def times(self, factor: float) -> Plateau:
        """In another unit of x."""
        return self._replace(first=self.first * factor, last=self.last * factor)


FLAT = 0.002  # of a share: what no run of some hundred requests tells from the level
OCTAVE = 2.0


def plateau(curves: Mapping[int, Curve], level: float) -> Plateau | None:
    """Where the fit of some seed lies within `FLAT` of the level over an octave of x or more; None: nowhere.

    There `FLAT` moves a crossing by an octave: it is no number to quote, nor to make a ratio of.
    """
    spans = []
    for curve in curves.values():
        near = [point.x for point in fitted(curve) if abs(point.fitted - level) <= FLAT]
        if near and near[-1] >= OCTAVE * near[0]:
            spans.append((near[0], near[-1]))
    if not spans:
        return None
    first, last = min(x for x, _ in spans), max(x for _, x in spans)
    attained = [y for curve in curves.values() for x, y in curve.items() if first <= x <= last and not math.isnan(y)]
    return Plateau(first, last, min(attained), max(attained))


MIRROR: Mapping[str, Literal["=", "<", ">", "~"]] = {"=": "=", "<": ">", ">": "<", "~": "~"}


def _mirrored(c: Crossing) -> Crossing:
    at = c.at.times(-1.0)
    return replace(c.times(-1.0), at=replace(at, low=at.high, high=at.low, sign=MIRROR[at.sign]))


def crossing_ratio(ours: Mapping[int, Curve], theirs: Mapping[int, Curve], level: float) -> Estimate:
    """Geometric mean over common seeds of our crossing / theirs, with its interval (t or BCa on logarithms)."""
    logs, signs = [], []
    for seed in sorted(ours.keys() & theirs.keys()):
        (a, above), (b, below) = rate_at(ours[seed], level), rate_at(theirs[seed], level)
        logs.append(math.log(a / b))
        beyond = {above, MIRROR[below]} - {"="}
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
