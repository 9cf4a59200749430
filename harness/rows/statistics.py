"""Statistics over the runs at one point of a curve: means with 95 % intervals, and where a curve crosses a level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from harness.rows.estimate import Estimate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

T_BELOW = 8  # runs; with fewer a bootstrap interval is too short, so the t interval stands in
_RESAMPLES = 9_999


def interval(values: Sequence[float] | Floats, within: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """Estimate the mean over runs: t interval below 8 runs, BCa bootstrap (9,999 resamples, fixed seed) from 8.

    The interval is clipped to `within`, the possible range. There is no interval for a single value, or if any value is
    not finite. Raises ValueError on no values.
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
    """Return the ends of mean +- t_{0.975, n-1} s / sqrt(n)."""
    half = t_quantile(len(x)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


def t_quantile(n: int) -> float:
    """Return the half width of a 95 % t interval of n values, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 0.975))


def _bca(x: Floats) -> tuple[float, float]:
    """Return the ends of the bias-corrected and accelerated bootstrap of the mean (Efron 1987)."""
    from scipy.special import ndtr, ndtri

    mean = float(x.mean())
    if (most := float(np.ptp(x))) == 0.0:
        return mean, mean
    picks = np.random.default_rng(0).integers(0, len(x), (_RESAMPLES, len(x)))
    means = x[picks].mean(axis=1)
    bias = ndtri((np.sum(means < mean) + 0.5 * np.sum(means == mean)) / _RESAMPLES)
    spread = (x - mean) / most  # is that of the leave-one-out means, up to a factor that cancels
    bend = (spread**3).sum() / (6.0 * (spread**2).sum() ** 1.5)
    z = bias + ndtri(np.array([0.025, 0.975]))
    low, high = np.quantile(means, ndtr(bias + z / (1.0 - bend * z)))
    return float(low), float(high)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Estimate the mean of ours - theirs over the seeds that both have. Raises ValueError if there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in seeds])


def wins(difference: Estimate) -> bool:
    """Tell whether a paired difference is above 0 with its whole interval."""
    return difference.low is not None and difference.low > 0.0


# ------------------------------------------------------------------ where a curve crosses a level

Curve = Mapping[float, float]  # x -> attainment, of one seed


class Point(NamedTuple):
    """A sampled x of a curve, with the attainment there and the value of the non-increasing fit there."""

    x: float
    attained: float  # 0 where it is undefined (NaN)
    fitted: float


def falling(values: Sequence[float]) -> list[float]:
    """Fit a non-increasing sequence by least squares: isotonic regression by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, n = pools.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def fitted(curve: Curve) -> list[Point]:
    """Return a curve's points in order of x, each with its value in the non-increasing fit."""
    points = sorted((x, 0.0 if math.isnan(y) else y) for x, y in curve.items())
    return [Point(x, y, fit) for (x, y), fit in zip(points, falling([y for _, y in points]), strict=True)]


def held(curve: Curve, level: float) -> float | None:
    """Return the largest sampled x at which the fit is >= level; None if the fit is below the level everywhere.

    Attainment itself is also >= level at that x, and below the level at the next sampled x. The reason is that each
    pool of the fit ends with values of at least its mean, and begins with values of at most its mean.
    """
    return max((point.x for point in fitted(curve) if point.fitted >= level), default=None)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The x at which a pooled curve crosses a level, and two numbers that describe the dips of the curve.

    The crossing is that of a non-increasing fit, which smooths over the dips. The first dip below the level would
    understate capacity, and the highest sampled x that meets the level would reward noise. `fails` is the easiest
    sampled x at which attainment is below the level. `dip` is the deepest dip below the fit.
    """

    at: Estimate
    fails: float | None  # the easiest sampled x that is below the level; None: no x is
    dip: float  # largest fitted - attained, in shares of 1

    def times(self, factor: float) -> Crossing:
        """Return the crossing in another unit of x, `factor` times its numbers."""
        return replace(self, at=self.at.times(factor), fails=None if self.fails is None else self.fails * factor)


def fewest(curve: Curve, level: float, n: int = 1) -> Crossing:
    """Return the smallest sampled x at which the non-decreasing fit is >= level, where x counts GPUs.

    GPUs come in whole numbers: nothing is interpolated, and there is no interval. The returned x was sampled, and
    attainment at it is itself >= level (see `held`). If it is the smallest sampled x, the sign is "<". If the fit is
    below the level even at the largest sampled x, that x is returned with the sign ">". `n` is the estimate's n (runs
    or blocks).
    """
    points = fitted({-x: y for x, y in curve.items()})
    x = held({-x: y for x, y in curve.items()}, level)
    sign: Literal["=", "<", ">"] = ">" if x is None else "<" if -x == min(curve) else "="
    at = Estimate(max(curve) if x is None else -x, None, None, n, sign)
    fails = max((-point.x for point in points if point.attained < level), default=None)
    return Crossing(at, fails, max(0.0, *(point.fitted - point.attained for point in points)))


MIRROR: Mapping[str, Literal["=", "<", ">", "~"]] = {"=": "=", "<": ">", ">": "<", "~": "~"}
