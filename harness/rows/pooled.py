"""Estimates from the pooled misses of many windows: the rate that meets a level, ratios of such rates, differences.

The quantity estimated is the crossing of the *pooled* curve. At each rate, the pooled share is the number of requests
that missed their SLO, divided by the number offered, both summed over all windows. The sampling unit is the window, for
two reasons. The streams are assigned to models at random for each window. And a placement planned for the window
affects all of it, so stretches of one window are not independent draws. All rates and systems are run on the same
windows, so comparisons are paired.

Intervals are 95 %. The interval of a share of misses treats the number of independent episodes as a Poisson count and
uses its exact limits (Garwood 1936). The number of episodes is the inverse of the squared relative standard error,
clustered by unit. This number is lowered, at each rate, to that at the next higher rate if that is less. The interval
of a crossing is by inversion. It ends at the rates at which the upper and the lower limit of the share, each made
monotone, cross the level. The interval of a ratio combines those of two crossings (MOVER, Zou and Donner 2008) with the
correlation of their units. `tests/harness/rows/test_pooled.py` measures the coverage of intervals, also on misses of
the bench's own runs (`misses.parquet` in the same folder).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from harness.rows.estimate import Estimate
from harness.rows.statistics import MIRROR, falling, t_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.rows.statistics import Floats

Z = 1.959963984540054  # gives 95 %
ONE_SIDED = 1.6448536269514722 / Z  # half width of a one-sided 95 % limit over that of a 95 % interval
NEAR = 1.25  # ratios within it, either way, are called equal
STEEP = 2.0  # the slope of ln(share missed) over ln(rate) below which a curve is flat at the level
HALF_OCTAVE = math.log(2.0) / 2
FEWEST = 8  # units; fewer give no interval, and no side is named


@dataclass(frozen=True, slots=True)
class Counts:
    """Missed and offered requests of a system by rate and unit; a unit is a window, or a block of one log.

    `rates_rps` is in ascending order; `missed` and `offered` are (rates, units). If the definition counts tokens, they
    are numbers of tokens.
    """

    rates_rps: Floats
    missed: Floats
    offered: Floats

    def __post_init__(self) -> None:
        if (self.offered.sum(axis=1) <= 0).any():
            raise ValueError("nothing is offered at some rate")

    @property
    def units(self) -> int:
        """The number of units."""
        return int(self.missed.shape[1])


def mean(models: Sequence[Counts]) -> Counts:
    """Average models with equal weight: return counts whose pooled share of misses is the mean of the models' shares.

    In each unit the misses are the mean share plus each model's deviation from its own share. So intervals of the
    result are those of the mean. All counts must have the same rates and units.
    """
    offered = np.sum([c.offered for c in models], axis=0)
    total = offered.sum(axis=1, keepdims=True)
    each = [c.missed.sum(axis=1, keepdims=True) / c.offered.sum(axis=1, keepdims=True) for c in models]
    beyond = [
        (c.missed - share * c.offered) / c.offered.sum(axis=1, keepdims=True)
        for c, share in zip(models, each, strict=True)
    ]
    missed = (np.sum(each, axis=0) * offered + np.sum(beyond, axis=0) * total) / len(models)
    return Counts(models[0].rates_rps, missed, offered)


def worst(models: Sequence[Counts]) -> Counts:
    """Return the counts of the model that misses most at each rate."""
    share = np.array([c.missed.sum(axis=1) / c.offered.sum(axis=1) for c in models])
    at = share.argmax(axis=0)
    missed, offered = (
        np.array([getattr(models[k], name)[i] for i, k in enumerate(at)]) for name in ("missed", "offered")
    )
    return Counts(models[0].rates_rps, missed, offered)


class Shares(NamedTuple):
    """The pooled share of misses at each rate, with its interval: three arrays (rates)."""

    share: Floats
    low: Floats
    high: Floats


def shares(c: Counts) -> Shares:
    """Pool the misses at each rate. With fewer than `FEWEST` units the interval is 0 to 1."""
    from scipy.special import gammaincinv

    missed, offered = c.missed.sum(axis=1), c.offered.sum(axis=1)
    share = missed / offered
    if c.units < FEWEST:
        return Shares(share, np.zeros_like(share), np.ones_like(share))
    some = missed > 0
    few = (t_quantile(c.units) / Z) ** 2  # a variance from few units is itself uncertain
    variance = np.maximum((_residuals(c) ** 2).sum(axis=1) * few, missed)  # an episode has at least one miss
    events = np.divide(missed**2, variance, out=np.zeros_like(missed), where=some)
    # A window that is rare and bad may not show until the next rate.
    events[:-1] = np.minimum(events[:-1], np.where(some[1:], events[1:], np.inf))
    size = np.divide(missed, events, out=np.ones_like(missed), where=some)
    for i in np.flatnonzero(~some)[::-1]:  # no miss: an episode is as large as at the next rate, or the one before
        near = size[i + 1 :] if i + 1 < len(size) else size[some][-1:]
        size[i] = near[0] if len(near) else 1.0
    low = np.where(some, gammaincinv(np.where(some, events, 1.0), 0.025), 0.0)
    high = gammaincinv(events + 1.0, 0.975)
    high = np.minimum(high * size / offered, 1.0)
    for i in np.flatnonzero(~some[:-1])[::-1]:  # a lower rate misses no more than a higher
        high[i] = min(high[i], high[i + 1])
    return Shares(share, low * size / offered, high)


def crossing(c: Counts, level: float) -> Estimate:
    """Find the rate at which the pooled share of requests that met their SLO falls below the level.

    The rate is interpolated linearly in logarithms between the rates that were run. The sign is "<" if the share is
    below the level at all of them, and ">" if it is above. An end of the interval is None if it lies beyond the rates
    that were run.
    """
    at, early, late = _crossings(c, 1.0 - level)
    low, high = (None if math.isinf(x) else math.exp(x) for x in (early, late))
    n, sign = c.units, _sign(at)
    return Estimate(math.exp(_edge(at, c)), low, high, n, sign)


def slope(c: Counts, level: float) -> Estimate | None:
    """Estimate the slope of ln(share missed) against ln(rate) at the crossing; None if there is no crossing.

    The slope is taken between two rates: the nearest ones at least half an octave below and above the crossing. If
    there is none on a side, the lowest or highest rate is used. The sign is ">" if nothing was missed at the lower of
    the two.
    """
    bracket = _bracket(c, 1.0 - level)
    if bracket is None:
        return None
    i, j = bracket
    missed = c.missed.sum(axis=1)
    run = math.log(c.rates_rps[j] / c.rates_rps[i])
    if missed[i] <= 0:  # half a miss at most: a bound
        rise = math.log(missed[j] / c.offered[j].sum()) - math.log(0.5 / c.offered[i].sum())
        return Estimate(rise / run, None, None, c.units, ">")
    relative = _residuals(c) / missed[:, None].clip(1e-300)
    rise = math.log(missed[j] / c.offered[j].sum()) - math.log(missed[i] / c.offered[i].sum())
    n = c.units
    if n < FEWEST:
        return Estimate(rise / run, None, None, n)
    half = t_quantile(n) * float(np.sqrt(((relative[j] - relative[i]) ** 2).sum()))
    return Estimate(rise / run, (rise - half) / run, (rise + half) / run, n)


def ratio(ours: Counts, theirs: Counts, level: float) -> Estimate:
    """Divide our crossing by theirs, paired by unit."""
    (a, a_low, a_high), (b, b_low, b_high) = _crossings(ours, 1.0 - level), _crossings(theirs, 1.0 - level)
    n = ours.units
    signs = [_sign(a), MIRROR[_sign(b)]]
    a, b = (_edge(x, c) for x, c in ((a, ours), (b, theirs)))
    r = correlation(ours, theirs, level)
    low = _mover(a - b, a - a_low, b_high - b, r)
    high = -_mover(b - a, b - b_low, a_high - a, r)
    beyond = set(signs) - {"="}
    sign: Literal["=", "<", ">", "~"] = "~" if len(beyond) > 1 else signs[0] if signs[0] != "=" else signs[1]
    if sign == "~":
        return Estimate(math.exp(a - b), None, None, n, "~")
    lower = None if math.isinf(low) or sign == "<" else math.exp(low)
    upper = None if math.isinf(high) or sign == ">" else math.exp(high)
    return Estimate(math.exp(a - b), lower, upper, n, sign)


def correlation(ours: Counts, theirs: Counts, level: float) -> float:
    """Correlate the units' misses of two systems, each at the rate nearest to its crossing."""
    mine, other = (_residuals(c)[nearest(c, 1.0 - level)] for c in (ours, theirs))
    norm = float(np.sqrt((mine**2).sum() * (other**2).sum()))
    most = max(float(c.missed.sum(axis=1).max()) for c in (ours, theirs))  # far below it, sums are rounding errors
    return float((mine * other).sum()) / norm if norm > 1e-12 * most**2 else 0.0


def nearest(c: Counts, share: float) -> int:
    """Find the crossing, where misses rise above a share; return the index of the rate nearest to it in octaves."""
    return int(np.abs(np.log(c.rates_rps) - _edge(_crossings(c, share)[0], c)).argmin())


def difference(ours: Counts, theirs: Counts, rate_rps: float) -> Estimate:
    """Subtract their attainment from ours at a rate that both ran, in shares of 1; the two are paired by unit."""
    i, j = (int(np.flatnonzero(np.isclose(c.rates_rps, rate_rps))[0]) for c in (ours, theirs))
    total = ours.offered[i].sum(), theirs.offered[j].sum()
    gap = float(theirs.missed[j].sum() / total[1] - ours.missed[i].sum() / total[0])
    if (n := ours.units) < FEWEST:
        return Estimate(gap, None, None, n)
    least = max(abs(gap), 1.0 / min(total)) / min(total)  # a miss is an event by itself, and one more may come
    variance = max(float(((_residuals(theirs)[j] / total[1] - _residuals(ours)[i] / total[0]) ** 2).sum()), least)
    half = t_quantile(n) * math.sqrt(variance)
    return Estimate(gap, gap - half, gap + half, n)


class Verdict(NamedTuple):
    """A verdict on a ratio: its words, and the p-value of the ratio's difference from 1."""

    words: str  # ahead; behind; equal within 25 %; ahead, by less than 25 %; behind, by less than 25 %; not decided
    p: float


def verdict(e: Estimate) -> Verdict:
    """Judge a ratio by its interval.

    The verdict is "ahead" or "behind" if the interval excludes 1. It is "equal" if the ratio's one-sided limits are
    within 25 % of 1. If both are true, it is "ahead (or behind), by less than 25 %"; if neither is, "not decided".
    """
    low, high = e.low or 0.0, math.inf if e.high is None else e.high
    side = "ahead" if low > 1.0 else "behind" if high < 1.0 else ""
    least, most = (e.mean * (end / e.mean) ** ONE_SIDED for end in (low, high))
    near = least >= 1.0 / NEAR and most <= NEAR
    word = f"{side}, by less than 25 %" if side and near else side or ("equal within 25 %" if near else "not decided")
    return Verdict(word, _p(math.log(e.mean), math.log(low) if low else -math.inf, math.log(high)))


def apart(e: Estimate, within: float) -> str:
    """Judge a difference of attainment: "equal", "ahead", "behind", or "" if it is undecided.

    It is "equal" if both one-sided limits are at most `within` from 0. Otherwise it is "ahead" or "behind" if its
    interval excludes 0.
    """
    if e.low is None or e.high is None:
        return ""
    if max(abs(e.mean + (end - e.mean) * ONE_SIDED) for end in (e.low, e.high)) <= within:
        return "equal"
    return "ahead" if e.low > 0 else "behind" if e.high < 0 else ""


def chance(e: Estimate) -> float:
    """Return the two-sided p-value of a difference from 0; 1 if it has no interval."""
    return 1.0 if e.low is None or e.high is None else _p(e.mean, e.low, e.high)


def flat(ours: Counts, theirs: Counts, level: float) -> bool:
    """Tell whether crossings cannot rank two systems: a curve is flat at the level, or their order changes nearby.

    A curve is flat if its slope at the crossing is below 2, even at the upper end of the slope's interval. For the
    order, crossings are compared at three levels: they allow half, once and twice the misses that `level` allows. A
    level is skipped if either curve does not cross it. Crossings within 1 % of each other count as equal.
    """
    slopes = [slope(c, level) for c in (ours, theirs)]
    if any(s is not None and s.high is not None and s.high < STEEP for s in slopes):
        return True
    gaps = []
    for share in (2.0 * (1.0 - level), 1.0 - level, 0.5 * (1.0 - level)):
        a, b = _crossings(ours, share)[0], _crossings(theirs, share)[0]
        gaps += [a - b] if math.isfinite(a) and math.isfinite(b) else []
    return bool(gaps) and min(gaps) < -math.log(1.01) and max(gaps) > math.log(1.01)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust the p-values of the verdicts in one table for multiple comparisons (Holm 1979)."""
    adjusted = [0.0] * len(ps)
    most = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        most = max(most, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = most
    return adjusted


def _p(gap: float, low: float, high: float) -> float:
    """Return the two-sided p-value of a gap whose 95 % interval is [low, high]."""
    from scipy.special import ndtr

    reach = gap - low if gap > 0 else high - gap
    if gap == 0.0 or math.isinf(reach):
        return 1.0
    return 2.0 * float(ndtr(-Z * abs(gap) / reach)) if reach > 0 else 0.0


def _residuals(c: Counts) -> Floats:
    """Return each unit's misses less those that the pooled share predicts.

    They are scaled so that their squares sum to the variance.
    """
    share = c.missed.sum(axis=1) / c.offered.sum(axis=1)
    return np.asarray((c.missed - share[:, None] * c.offered) * math.sqrt(c.units / max(1, c.units - 1)))


def _crossings(c: Counts, share: float) -> tuple[float, float, float]:
    """Return the logarithm of the rate at which misses rise above a share, and those of its interval's two ends.

    -inf and inf represent rates below and above all that were run. The interval's lower end is at most the highest of
    the rates that were run, and its upper end is at least the lowest.
    """
    missed = shares(c)
    x, goal = np.log(c.rates_rps), math.log(share)
    half = np.minimum(0.5 / c.offered.sum(axis=1), 0.5 * share)  # stands for a share of 0, which has no logarithm
    at, late, early = (
        _rising(x, np.log(np.maximum(y, least)), goal)
        for y, least in ((missed.share, half), (missed.low, half * 1e-3), (missed.high, half))
    )
    return at, min(early, at, float(x[-1])), max(late, at, float(x[0]))


def _rising(x: Floats, y: Floats, goal: float) -> float:
    """Return the x at which the non-decreasing fit of y crosses the goal.

    It is -inf if the whole fit lies above the goal, and inf if the whole fit lies below.
    """
    fit = falling(y[::-1].tolist())[::-1]
    j = sum(value < goal for value in fit)
    if j == 0:
        return -math.inf
    if j == len(fit):
        return math.inf
    return float(x[j - 1] + (goal - fit[j - 1]) / (fit[j] - fit[j - 1]) * (x[j] - x[j - 1]))


def _sign(at: float) -> Literal["=", "<", ">"]:
    return "=" if math.isfinite(at) else "<" if at < 0 else ">"


def _edge(at: float, c: Counts) -> float:
    """Clip the logarithm of a crossing to the range of the rates that were run."""
    return float(np.clip(at, math.log(c.rates_rps[0]), math.log(c.rates_rps[-1])))


def _bracket(c: Counts, share: float) -> tuple[int, int] | None:
    """Return the indices of the two rates between which the slope at the crossing is taken; None without a crossing.

    On each side of the crossing, the nearest rate at least half an octave away is taken. If there is no such rate, the
    lowest or highest rate of all is taken.
    """
    at = _crossings(c, share)[0]
    if math.isinf(at):
        return None
    x = np.log(c.rates_rps)
    below, above = np.flatnonzero(x <= at - HALF_OCTAVE), np.flatnonzero(x >= at + HALF_OCTAVE)
    return int(below[-1]) if len(below) else 0, int(above[0]) if len(above) else len(x) - 1


def _mover(gap: float, below: float, above: float, r: float) -> float:
    """Return the lower end of the interval of a difference between two estimates with correlation `r` (MOVER).

    `gap` is the first estimate minus the second. `below` is the distance from the first estimate down to its interval's
    lower end. `above` is that from the second estimate up to its interval's upper end.
    """
    if math.isinf(below) or math.isinf(above):
        return -math.inf
    return gap - math.sqrt(max(0.0, below**2 + above**2 - 2.0 * r * below * above))
