"""Intervals, fits of curves, and the fewest that hold: by hand, and against other implementations."""

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
from harness.rows.estimate import Estimate
from tests.cases import cases
from tests.there import there


def test_t_interval_by_hand() -> None:
    """1..5: mean 3, s = sqrt(2.5), t_{.975,4} = 2.776445: half 1.963243."""
    e = statistics.interval([1, 2, 3, 4, 5])
    assert (e.mean, e.low, e.high, e.n) == pytest.approx((3, 1.036757, 4.963243, 5), abs=1e-6)
    assert statistics.interval([0.99, 1.0, 0.98], (0, 1)).high == 1.0


def test_one_run_has_no_interval() -> None:
    assert statistics.interval([0.5]) == Estimate(0.5, None, None, 1)
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
    assert 0 <= there(e.low) <= e.mean + 1e-12
    assert e.mean - 1e-12 <= there(e.high) <= 1
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


@given(CURVES)
def test_the_last_that_holds_holds_by_itself_and_the_next_fails(curve: dict[float, float]) -> None:
    rates, last = sorted(curve), statistics.held(curve, 0.5)
    if last is None:
        assert curve[rates[0]] < 0.5
        return
    assert curve[last] >= 0.5 - 1e-12
    after = rates[rates.index(last) + 1 :]
    assert not after or curve[after[0]] < 0.5 + 1e-12


@given(CURVES)
def test_a_curve_that_falls_is_its_own_fit(curve: dict[float, float]) -> None:
    falls = dict(zip(sorted(curve), sorted(curve.values(), reverse=True), strict=True))
    assert all(point.fitted == pytest.approx(point.attained) for point in statistics.fitted(falls))
    assert statistics.held(falls, 0.5) == max((x for x, y in falls.items() if y >= 0.5), default=None)


@cases(
    ("attained", "holds"),
    [
        ([1.0, 1.0, 0.98, 0.5], 2.0),
        ([0.985, 1.0, 1.0, 0.5], 4.0),  # .995 up to rate 4: a first dip is no capacity
        ([1.0, 0.96, 0.995, 0.5], 1.0),  # .9775 at rates 2 and 4: a late success is none either
        ([0.97, 0.995, 0.9, 0.5], None),  # .9825 at the lowest two
        ([1.0, 1.0, 1.0, math.nan], 4.0),  # what is not defined is missed
    ],
)
def test_what_holds_by_hand(attained: list[float], holds: float | None) -> None:
    curve = dict(zip([1.0, 2.0, 4.0, 8.0], attained, strict=True))
    assert statistics.held(curve, 0.99) == holds
    assert statistics.held(dict(reversed(curve.items())), 0.99) == holds


# ------------------------------------------------------------------ the fewest of what is counted


def test_the_fewest_gpus_that_hold() -> None:
    curve = {1.0: 0.5, 2.0: 0.98, 4.0: 1.0, 8.0: 1.0}
    few = statistics.fewest(curve, 0.99, 12)
    assert (few.at, few.fails, few.dip) == (Estimate(4.0, None, None, 12), 2.0, 0.0)
    dip = statistics.fewest(curve | {8.0: 0.98}, 0.985)  # 4 and 8 on average .99
    assert (dip.at, dip.fails) == (Estimate(4.0, None, None, 1), 8.0)
    assert dip.dip == pytest.approx(0.01)
    assert dip.times(2.0).at.mean == 8.0
    assert statistics.fewest(curve | {8.0: 0.9}, 0.99).at == Estimate(8.0, None, None, 1, ">")
    assert statistics.fewest({2.0: 1.0, 3.0: 1.0}, 0.99).at == Estimate(2.0, None, None, 1, "<")


@given(CURVES)
def test_the_fewest_gpus_hold_by_themselves(curve: dict[float, float]) -> None:
    at = statistics.fewest(curve, 0.9).at
    assert at.mean in curve
    assert (curve[at.mean] >= 0.9 - 1e-12) == (at.sign != ">")
