"""Intervals, crossings of a level, and ratios paired by seed: by hand, and against other implementations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import isotonic_regression

from harness.rows import statistics
from tests.cases import cases


def test_t_interval_by_hand() -> None:
    """1..5: mean 3, s = sqrt(2.5), t_{.975,4} = 2.776445: half 1.963243."""
    e = statistics.interval([1, 2, 3, 4, 5])
    assert (e.mean, e.low, e.high, e.n) == pytest.approx((3, 1.036757, 4.963243, 5), abs=1e-6)
    assert statistics.interval([0.99, 1.0, 0.98], (0, 1)).high == 1.0


def test_one_run_has_no_interval() -> None:
    assert statistics.interval([0.5]) == statistics.Estimate(0.5, None, None, 1)
    with pytest.raises(ValueError, match="at least one run"):
        statistics.interval([])


def test_bootstrap_agrees_with_another_implementation() -> None:
    x = np.random.default_rng(1).gamma(1.5, size=12)
    low, high = stats.bootstrap((x,), np.mean, n_resamples=9_999, rng=np.random.default_rng(2)).confidence_interval
    e = statistics.interval(x)
    assert (e.low, e.high) == pytest.approx((low, high), rel=0.03)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.randoms())
def test_intervals_hold_their_mean_and_forget_order(values: list[float], seed: Any) -> None:
    e = statistics.interval(values, (0, 1))
    assert e.low is not None
    assert e.high is not None
    assert 0 <= e.low <= e.mean + 1e-12
    assert e.mean - 1e-12 <= e.high <= 1
    if len(values) < statistics.T_BELOW:
        seed.shuffle(values)
        assert (statistics.interval(values, (0, 1)).low, e.mean) == pytest.approx((e.low, np.mean(values)))


def test_pairing_by_seed() -> None:
    """A system against its copy covers 0; a constant gain is a win however much seeds differ."""
    noisy = dict(enumerate([0.2, 0.9, 0.5, 0.7, 0.4]))
    same = statistics.paired(noisy, noisy)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    assert not statistics.wins(same)
    better = statistics.paired({s: x + 0.01 for s, x in noisy.items()} | {99: 5.0}, noisy)
    assert better.n == 5
    assert better.mean == pytest.approx(0.01)
    assert statistics.wins(better)
    assert not statistics.wins(statistics.paired({0: 1.0}, {0: 0.0}))  # one run proves nothing


CURVES = st.dictionaries(st.integers(1, 60).map(float), st.floats(0, 1), min_size=1, max_size=12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_fit_is_isotonic_regression(values: list[float]) -> None:
    assert statistics.falling(values) == pytest.approx(list(isotonic_regression(values, increasing=False).x), abs=1e-12)


@cases(("attained", "expected"), [
    ([1.0, 1.0, 0.98, 0.5], (3.0, "=")),  # halfway from 1.0 at rate 2 to .98 at 4
    ([1.0, 0.99, 0.98, 0.5], (2.0, "=")),
    ([0.985, 1.0, 1.0, 0.5], (4.0 + 4.0 / 99, "=")),  # .995 up to rate 4: a first dip is no capacity
    ([1.0, 0.96, 0.995, 0.5], (1.0 + 10.0 / 22.5, "=")),  # .9775 at rates 2 and 4: a late success is none either
    ([0.97, 0.995, 0.9, 0.5], (1.0, "<")),  # .9825 at the lowest two
    ([0.98, 1.0, 1.0, 1.0], (8.0, ">")),
    ([1.0, 1.0, 1.0, 0.99], (8.0, ">")),
    ([1.0, 1.0, 1.0, math.nan], (4.04, "=")),
])  # fmt: skip
def test_rate_at_by_hand(attained: list[float], expected: tuple[float, str]) -> None:
    rate, sign = statistics.rate_at(dict(zip([1.0, 2.0, 4.0, 8.0], attained, strict=True)), 0.99)
    assert rate == pytest.approx(expected[0])
    assert sign == expected[1]
    assert statistics.rate_at(dict(zip([8.0, 4.0, 2.0, 1.0], attained[::-1], strict=True)), 0.99) == (rate, sign)


@given(CURVES)
def test_a_crossing_lies_between_a_rate_that_holds_and_the_next_that_fails(curve: dict[float, float]) -> None:
    rate, sign = statistics.rate_at(curve, 0.5)
    rates, last = sorted(curve), statistics.held(curve, 0.5)
    if sign == "<":
        assert (rate, last) == (rates[0], None)
        assert curve[rate] < 0.5
        return
    assert last is not None
    assert curve[last] >= 0.5 - 1e-12
    if sign == ">":
        assert rate == last == rates[-1]
        return
    after = rates[rates.index(last) + 1]
    assert last <= rate <= after
    assert curve[after] < 0.5 + 1e-12


@given(CURVES)
def test_a_curve_that_falls_crosses_at_its_first_failure_and_has_no_dip(curve: dict[float, float]) -> None:
    falling = dict(zip(sorted(curve), sorted(curve.values(), reverse=True), strict=True))
    c = statistics.crossing({0: falling}, 0.5)
    assert c.dip == 0.0
    assert c.fails == min((x for x, y in falling.items() if y < 0.5), default=None)
    assert c.at.mean <= (c.fails or max(curve))
    assert statistics.held(falling, 0.5) == max((x for x, y in falling.items() if y >= 0.5), default=None)


def test_what_the_fit_smooths_over_stands_beside_it() -> None:
    """A system that dips to 98.4 to 99.3 % at the lowest rate and holds up to 12 requests a second."""
    dips = {0.7: 0.984, 1.4: 0.996, 2.8: 0.995, 5.7: 0.996, 11.3: 0.993, 22.6: 0.9}
    good = dict.fromkeys(dips, 1.0) | {0.7: 0.993, 22.6: 0.9}
    c = statistics.crossing({0: dips, 1: good}, 0.99)
    assert 11.3 < c.at.mean < 13.0
    assert c.fails == 0.7  # of any seed
    assert c.dip == pytest.approx((0.984 + 0.996 + 0.995 + 0.996 + 0.993) / 5 - 0.984)  # the fit is flat up to 11.3
    assert c.times(2.0).fails == 1.4
    assert statistics.crossing({0: {1.0: 1.0}}, 0.99).fails is None


def test_crossings_over_seeds() -> None:
    def curve(*y: float) -> dict[float, float]:
        return dict(zip([1.0, 2.0, 4.0], y, strict=True))

    both = statistics.crossing({0: curve(1, 1, 0.98), 1: curve(1, 0.98, 0.5)}, 0.99).at
    assert both.mean == pytest.approx(2.25)
    assert (both.sign, both.n, both.cut) == ("=", 2, 0)
    above = statistics.crossing({0: curve(1, 1, 1), 1: curve(1, 1, 0.98)}, 0.99).at
    assert (above.mean, above.sign, above.high) == (3.5, ">", None)
    assert (above.cut, above.edge) == (1, 4.0)  # one seed beyond 4
    assert statistics.crossing({0: curve(0, 0, 0)}, 0.99).at == statistics.Estimate(1.0, None, 1.0, 1, "<", 1, 1.0)
    mixed = statistics.crossing({0: curve(0, 0, 0), 1: curve(1, 1, 1)}, 0.99).at
    assert (mixed.sign, mixed.cut, mixed.edge) == ("~", 2, None)


def test_ratio_of_crossings_is_paired_by_seed() -> None:
    def seeds(*crossings: float) -> dict[int, dict[float, float]]:
        return {s: {x: 1.0, x + 1: 0.0, 0.5: 1.0} for s, x in enumerate(crossings)}

    ratio = statistics.crossing_ratio(seeds(4, 8, 12), seeds(2, 4, 6), 1.0)
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.sign == "="
    high = {0: {1.0: 1.0, 2.0: 1.0}}
    low = {0: {1.0: 1.0, 2.0: 0.5}}
    assert statistics.crossing_ratio(high, low, 1.0).sign == ">"
    assert statistics.crossing_ratio(high | {1: low[0]}, low | {1: low[0]}, 1.0).cut == 1
    assert statistics.crossing_ratio(low, high, 1.0).sign == "<"
    assert statistics.crossing_ratio(high, high, 1.0).sign == "~"
