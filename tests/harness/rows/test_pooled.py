"""Pooled crossings: worked numbers, laws, and that intervals cover what they are to cover."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows.estimate import Estimate
from harness.rows.pooled import (
    Counts,
    apart,
    correlation,
    crossing,
    difference,
    flat,
    holm,
    mean,
    ratio,
    shares,
    slope,
    verdict,
    worst,
)
from tests.cases import cases
from tests.harness.rows import misses
from tests.harness.rows.bursts import BLOCK_S, LEVEL, worlds
from tests.there import there

SIZES = (1.0, 3.0, 10.0)  # crossings, in requests per second
SLOPES = (1.5, 3.0, 6.0)
BLOCKS = int(5 * 1800 / BLOCK_S)  # five windows of half an hour


def even(rates: list[float], missed: list[float], units: int = 40, offered: float = 1000.0) -> Counts:
    """Return misses spread evenly over units."""
    each = np.repeat(np.array(missed)[:, None] / units, units, axis=1)
    return Counts(np.array(rates), each, np.full_like(each, offered / units))


def test_the_crossing_is_where_the_pooled_share_of_misses_passes_the_level() -> None:
    """Misses of 5 and 20 in 1,000 at 2 and 8 req/s: 10 lie half way between the logarithms."""
    assert crossing(even([2.0, 8.0], [5.0, 20.0]), LEVEL).mean == pytest.approx(4.0)
    assert crossing(even([2.0, 8.0, 16.0], [5.0, 20.0, 80.0]), 0.98).mean == pytest.approx(8.0)


def test_windows_are_pooled_not_averaged() -> None:
    """A window with 10 misses of 100, one with none of 1,900: 0.5 % in all, where the mean of windows says 5 %."""
    counts = Counts(np.array([1.0, 2.0]), np.array([[10.0, 0.0], [20.0, 20.0]]), np.array([[100.0, 1900.0]] * 2))
    assert shares(counts).share.tolist() == [0.005, 0.02]
    assert crossing(counts, LEVEL).mean == pytest.approx(math.sqrt(2.0))


@cases(
    ("missed", "offered", "sign", "low", "high"),
    [
        ([50.0, 90.0], 1000.0, "<", None, 2.0),  # too many for chance at the lowest rate
        ([12.0, 90.0], 1000.0, "<", None, 4.0),  # perhaps not
        ([1.0, 2.0], 2000.0, ">", 8.0, None),  # few enough at the highest
        ([0.0, 0.0], 200.0, ">", None, None),  # of 200, none says nothing of 1 %
    ],
)
def test_a_crossing_beyond_the_rates_is_a_bound(
    missed: list[float], offered: float, sign: str, low: float | None, high: float | None
) -> None:
    estimate = crossing(even([2.0, 8.0], missed, offered=offered), LEVEL)
    assert estimate.sign == sign
    assert estimate.mean == pytest.approx({"<": 2.0, ">": 8.0}[sign])
    assert estimate.low == pytest.approx(low)
    assert (estimate.high is None) == (high is None)
    assert high is None or 1.999 <= (estimate.high or 0.0) <= high


def test_limits_of_a_share_are_those_of_a_count_of_episodes() -> None:
    """Ten misses, one in each of ten blocks of many: exact Poisson limits of 10 are 4.80 and 18.39 (Garwood)."""
    missed = np.zeros((1, 2000))
    missed[0, :10] = 1.0
    limits = shares(Counts(np.array([1.0]), missed, np.full((1, 2000), 5.0)))
    assert limits.low[0] * 10_000 == pytest.approx(4.80, abs=0.05)
    assert limits.high[0] * 10_000 == pytest.approx(18.39, abs=0.1)
    missed[0, :10] = 8.0  # bursts of eight say as much as ten misses
    bursts = shares(Counts(np.array([1.0]), missed, np.full((1, 2000), 5.0)))
    assert bursts.low[0] / bursts.share[0] == pytest.approx(limits.low[0] / limits.share[0], rel=0.03)


def test_where_nothing_was_missed_the_upper_limit_is_that_of_no_episode() -> None:
    """Of 0 the upper limit is 3.69 episodes, each as large as elsewhere."""
    missed = np.zeros((2, 2000))
    missed[1, :10] = 8.0
    limits = shares(Counts(np.array([1.0, 2.0]), missed, np.full((2, 2000), 5.0)))
    assert limits.low[0] == 0.0
    assert limits.high[0] * 10_000 == pytest.approx(3.69 * 8.0, rel=0.02)


def test_a_rate_rests_on_no_more_episodes_than_the_next() -> None:
    """Ten windows with a miss each; at the next rate two windows have them all, which may be bad here as well."""
    missed = np.zeros((2, 2000))
    missed[0, :10], missed[1, :2] = 1.0, 40.0
    limits = shares(Counts(np.array([1.0, 2.0]), missed, np.full((2, 2000), 5.0)))
    assert limits.high[0] * 10_000 == pytest.approx(7.22 * 5.0, rel=0.02)  # 2 episodes are 7.22 at most (Garwood)
    assert limits.low[0] * 10_000 == pytest.approx(0.242 * 5.0, rel=0.02)


def test_a_slope_is_that_of_logarithms() -> None:
    estimate = there(slope(even([1.0, 2.0, 4.0, 8.0], [1.0, 4.0, 16.0, 64.0]), LEVEL))
    assert estimate.mean == pytest.approx(2.0)
    assert slope(even([1.0, 2.0], [1.0, 2.0]), LEVEL) is None


def test_a_difference_is_paired_by_unit() -> None:
    """Pairs that miss in the same units differ as certainly as 40 misses do; those that take turns, less."""
    n = 40
    hits = np.tile([4.0, 0.0], n // 2)
    offered = np.full((1, n), 100.0)
    a, b, c = (Counts(np.array([3.0]), x[None], offered) for x in (hits, hits + 1.0, 4.0 - hits))
    same, turned = difference(a, b, 3.0), difference(a, c, 3.0)
    half = 2.0227 * math.sqrt(40) / 4000  # t of 39, and a Poisson count
    assert (same.mean, same.low, same.high) == pytest.approx((0.01, 0.01 - half, 0.01 + half), rel=1e-4)
    assert turned.mean == pytest.approx(0.0)
    assert there(turned.low) < -0.01
    assert correlation(a, b, LEVEL) == pytest.approx(1.0)
    assert correlation(a, c, LEVEL) == pytest.approx(-1.0)


def test_where_nothing_was_missed_equals_need_many_requests() -> None:
    """0 of 100 and 0 of 100 may differ by two points; 0 of 10,000 each do not differ by half a point."""
    few, many = (even([3.0], [0.0], offered=offered) for offered in (100.0, 10_000.0))
    assert apart(difference(few, few, 3.0), 0.005) == ""
    assert apart(difference(many, many, 3.0), 0.005) == "equal"


@cases(
    ("ends", "words"),
    [
        ((1.3, 1.1, 1.6), "ahead"),
        ((0.6, 0.4, 0.9), "behind"),
        ((1.0, 0.9, 1.2), "equal within 25 %"),
        ((1.1, 1.05, 1.2), "ahead, by less than 25 %"),
        ((0.9, 0.85, 0.95), "behind, by less than 25 %"),
        ((1.1, 0.7, 1.6), "not decided"),
        ((3.0, 2.0, None), "ahead"),
        ((0.3, None, 0.5), "behind"),
        ((3.0, None, None), "not decided"),
    ],
)
def test_a_ratio_has_one_word(ends: tuple[float, float | None, float | None], words: str) -> None:
    judged = verdict(Estimate(*ends, 40))
    assert judged.words == words
    assert (judged.p < 0.05) == words.startswith(("ahead", "behind"))


@cases(
    ("ends", "word"),
    [
        ((0.0, -0.004, 0.004), "equal"),
        ((0.01, 0.002, 0.02), "ahead"),
        ((0.0, -0.01, 0.01), ""),
        ((-0.03, -0.04, -0.02), "behind"),
    ],
)
def test_a_difference_has_one_word(ends: tuple[float, float, float], word: str) -> None:
    assert apart(Estimate(*ends, 40), 0.005) == word


def test_curves_that_cross_beside_the_level_are_flat() -> None:
    steep = even([1.0, 2.0, 4.0, 8.0], [0.5, 4.0, 32.0, 256.0])
    assert not flat(steep, even([1.0, 2.0, 4.0, 8.0], [1.0, 8.0, 64.0, 512.0]), LEVEL)
    turned = even([1.0, 2.0, 4.0, 8.0], [4.0, 9.0, 12.0, 20.0])  # worse below the level, better above
    assert flat(steep, turned, LEVEL)
    assert flat(turned, turned, LEVEL)  # its slope is 1


def test_holm_multiplies_the_least_by_all() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# ------------------------------------------------------------------ over models


def test_the_mean_weighs_models_alike_whatever_they_are_asked() -> None:
    """1 % of 100 requests and 3 % of 1,900: 2 % in the mean, where the pooled share is 2.9 %."""
    small, large = even([1.0], [1.0], offered=100.0), even([1.0], [57.0], offered=1900.0)
    assert shares(mean([small, large])).share[0] == pytest.approx(0.02)
    assert shares(worst([small, large])).share[0] == pytest.approx(0.03)


def test_the_worst_model_is_another_at_each_rate() -> None:
    a, b = even([1.0, 2.0], [1.0, 30.0]), even([1.0, 2.0], [5.0, 10.0])
    assert shares(worst([a, b])).share.tolist() == [0.005, 0.03]


@given(st.integers(0, 999), st.integers(1, 4))
def test_the_mean_of_equal_models_is_one_of_them(seed: int, models: int) -> None:
    """They miss together: as many models tell no more than one."""
    (counts,) = worlds((3.0,), 3.0, BLOCKS, np.random.default_rng(seed))
    every = mean([counts] * models)
    assert shares(every).share == pytest.approx(shares(counts).share)
    assert crossing(every, LEVEL).mean == pytest.approx(crossing(counts, LEVEL).mean)
    spread = (every.missed - counts.missed * models).ravel()
    assert spread == pytest.approx(np.zeros_like(spread), abs=1e-9 * counts.offered.max())


@given(st.integers(0, 999), st.lists(st.floats(1.0, 9.0), min_size=1, max_size=4))
def test_the_share_of_the_mean_is_the_mean_of_shares(seed: int, sizes: list[float]) -> None:
    rng = np.random.default_rng(seed)
    offered = [rng.poisson(50 * size, (3, 12)).astype(np.float64) + 1.0 for size in sizes]
    rates = np.array([1.0, 2.0, 4.0])
    models = [Counts(rates, np.minimum(rng.poisson(2.0, (3, 12)), n).astype(np.float64), n) for n in offered]
    each = np.array([shares(model).share for model in models])
    assert shares(mean(models)).share == pytest.approx(each.mean(axis=0))
    assert shares(worst(models)).share == pytest.approx(each.max(axis=0))


@cases("units", [1, 7, 8])
def test_few_units_give_no_interval(units: int) -> None:
    c = even([1.0, 2.0, 4.0, 8.0], [1.0, 8.0, 64.0, 512.0], units)
    for estimate in (crossing(c, LEVEL), ratio(c, c, LEVEL), difference(c, c, 2.0), slope(c, LEVEL)):
        ends = (estimate.low, estimate.high) if estimate is not None else (None, None)
        assert [end is not None for end in ends] == [units == 8] * 2


@given(st.integers(0, 999), st.sampled_from(SIZES), st.sampled_from(SLOPES))
def test_turned_around_a_ratio_is_its_inverse(seed: int, at: float, steep: float) -> None:
    ours, theirs = worlds((at, 1.5 * at), steep, BLOCKS, np.random.default_rng(seed))
    there, back = ratio(ours, theirs, LEVEL), ratio(theirs, ours, LEVEL)
    assert there.mean * back.mean == pytest.approx(1.0)
    for end, other in ((there.low, back.high), (there.high, back.low)):
        assert (end is None) == (other is None)
        assert end is None or other is None or end * other == pytest.approx(1.0)


@given(st.integers(0, 999), st.sampled_from(SIZES), st.sampled_from(SLOPES))
def test_an_estimate_lies_in_its_interval(seed: int, at: float, steep: float) -> None:
    ours, theirs = worlds((at, at), steep, BLOCKS, np.random.default_rng(seed))
    for estimate in (crossing(ours, LEVEL), ratio(ours, theirs, LEVEL)):
        assert (estimate.low or 0.0) <= estimate.mean <= (estimate.high or math.inf)


class Tally:
    """Coverage of intervals, and errors of estimates."""

    def __init__(self) -> None:
        self.covered: list[bool] = []
        self.logs: list[float] = []

    def add(self, estimate: Estimate, truth: float) -> None:
        self.covered.append((estimate.low or 0.0) <= truth <= (math.inf if estimate.high is None else estimate.high))
        if estimate.sign == "=":
            self.logs.append(math.log(estimate.mean / truth))

    @property
    def coverage(self) -> float:
        return float(np.mean(self.covered))

    @property
    def bias(self) -> float:
        return float(np.mean(self.logs))


@pytest.mark.parametrize(
    ("reps", "least", "off", "off_flat", "wrong"),
    [(60, 0.85, 0.05, 0.12, 0.08), pytest.param(1000, 0.92, 0.03, 0.05, 0.05, marks=pytest.mark.full)],
)
def test_intervals_cover(reps: int, least: float, off: float, off_flat: float, wrong: float) -> None:
    """Intervals of crossings and ratios cover, estimates are unbiased, and equals are rarely told apart."""
    rng = np.random.default_rng(11)
    told = pairs = 0
    for at in SIZES:
        for steep in SLOPES:
            alone, three, same = Tally(), Tally(), 0
            for _ in range(reps):
                ours, third, other = worlds((at, at / 3, at), steep, BLOCKS, rng)
                alone.add(crossing(ours, LEVEL), at)
                three.add(ratio(ours, third, LEVEL), 3.0)
                same += verdict(ratio(ours, other, LEVEL)).p < 0.05
            where = f"crossing {at:g} req/s, slope {steep:g}"
            assert alone.coverage >= least, f"{where}: {alone.coverage:.3f} of crossings"
            assert three.coverage >= least, f"{where}: {three.coverage:.3f} of ratios"
            scarce = steep < 2 or at < 2
            assert abs(alone.bias) <= (off_flat if scarce else off), f"{where}: bias {alone.bias:+.3f}"
            told, pairs = told + same, pairs + reps
    assert told / pairs <= wrong, f"{told} of {pairs} equals are told apart"


def ours() -> dict[tuple[str, str], Counts]:
    """Return the misses of the bench's own runs, by models and system: a unit a window (misses.py)."""
    rows = pq.read_table(misses.FILE).to_pandas()
    out = dict[tuple[str, str], Counts]()
    for (models, system), each in rows.groupby(["models", "system"], observed=True):
        both = each.pivot_table(index="rate_scale", columns="seed", values=["missed", "offered"], aggfunc="sum")
        counts = (both[name].to_numpy(np.float64) for name in ("missed", "offered"))
        out[str(models), str(system)] = Counts(both.index.to_numpy(np.float64), *counts)
    return out


def picked(c: Counts, windows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Counts:
    return Counts(c.rates_rps, c.missed[:, windows], c.offered[:, windows])


def of_our_runs(trials: int, windows: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Draw windows of the bench's own runs, of which all together are the truth; return coverage and A/A.

    Coverage is of the crossing of each system, by models and system, and of its ratio to static:rate; the last is the
    share of trials in which a system, on windows of its own, is told apart from itself.
    """
    rng, told = np.random.default_rng(5), list[bool]()
    crossings, ratios = dict[str, float](), dict[str, float]()
    for (models, system), c in (all_ := ours()).items():
        base = all_[models, "static:rate"]
        at, over = crossing(c, LEVEL).mean, ratio(c, base, LEVEL).mean
        alone, pair = Tally(), Tally()
        for _ in range(trials):
            drawn_ = rng.integers(0, c.units, windows)
            alone.add(crossing(picked(c, drawn_), LEVEL), at)
            pair.add(ratio(picked(c, drawn_), picked(base, drawn_), LEVEL), over)
            other = picked(c, rng.integers(0, c.units, windows))
            told.append(verdict(ratio(picked(c, drawn_), other, LEVEL)).p < 0.05)
        name = f"{system} on {models}"
        crossings[name] = alone.coverage
        if system != "static:rate":
            ratios[name] = pair.coverage
    return crossings, ratios, float(np.mean(told))


def test_intervals_cover_misses_of_our_own_runs() -> None:
    crossings, ratios, told = of_our_runs(40, 36)
    assert np.mean([*crossings.values(), *ratios.values()]) >= 0.88, f"{crossings}, {ratios}"
    assert told <= 0.1


@pytest.mark.full
@cases(("windows", "least"), [(36, 0.92), (18, 0.88), (9, 0.88)])
def test_intervals_cover_misses_of_our_own_runs_closely(windows: int, least: float) -> None:
    crossings, ratios, told = of_our_runs(300, windows)
    assert min(ratios.values()) >= least, ratios
    assert min(crossings.values()) >= least, crossings
    assert told <= 0.075
