"""Arrival processes: rates, variation, bursts, and draws that stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.policy.types import UserError
from tests.cases import cases
from tests.workloads.test_workloads import seeds
from traces.arrivals import gamma, on_off, poisson, rng, weibull, zipf

Purpose = tuple[int, *tuple[str | int, ...]]
Process = Callable[[np.random.Generator], NDArray[np.float64]]


def test_draws_are_named_by_their_purpose() -> None:
    assert rng(1, "a").integers(1 << 32) == rng(1, "a").integers(1 << 32)
    purposes: list[Purpose] = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", "0"), (-1, "a")]
    assert len({int(rng(*purpose).integers(1 << 62)) for purpose in purposes}) == len(purposes)
    assert rng(7, "pinned").integers(1 << 32, size=3).tolist() == PINNED


PINNED = [733260363, 1259725416, 1358109423]  # the same on every platform


@cases(
    ("process", "cv"),
    [
        (lambda g: poisson(g, 5, 20_000), 1.0),
        (lambda g: gamma(g, 5, 20_000, 2.0), 2.0),
        (lambda g: gamma(g, 5, 20_000, 0.5), 0.5),
        (lambda g: weibull(g, 5, 20_000, 1.0), 1.0),
        (lambda g: weibull(g, 5, 20_000, 0.5), math.sqrt(5)),  # cv^2 = 4! / 2!^2 - 1
    ],
)
def test_renewal_processes_have_their_rate_and_variation(process: Process, cv: float) -> None:
    times = process(rng(3, "arrivals"))
    gaps = np.diff(times)
    assert ((times >= 0) & (times < 20_000)).all()
    assert (gaps >= 0).all()
    assert len(times) == pytest.approx(100_000, abs=5 * cv * math.sqrt(100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


@given(st.floats(0.05, 0.95), st.floats(1, 1000), seeds)
def test_on_time_is_spread_over_exactly_its_duty(duty: float, on_s: float, seed: int) -> None:
    span = 1000.0
    on_time = np.linspace(0, span * duty, 2001)[:-1]
    times = np.sort(on_off(rng(seed, "o"), on_time, span, duty, on_s))
    assert ((times >= 0) & (times < span)).all()
    assert len(times) == 2000
    periods = max(1, round(span * duty / on_s))
    gaps = np.sort(np.diff(np.append(times, times[0] + span)))  # all but the off-periods are one grid step
    step = span * duty / 2000
    assert (gaps[: 2000 - periods] <= step + 1e-6).all()


@given(st.integers(1, 300), st.floats(0, 3))
def test_popularity(models: int, s: float) -> None:
    share = zipf(models, s)
    assert share.sum() == pytest.approx(1)
    assert share[0] / share[-1] == pytest.approx(models**s)


def test_rates_that_are_no_rates() -> None:
    calls: list[Process] = [
        lambda g: poisson(g, 0, 1),
        lambda g: poisson(g, -1, 1),
        lambda g: gamma(g, 1, 1, 0),
        lambda g: weibull(g, math.nan, 1, 1),
        lambda g: zipf(0, 1),
    ]
    for call in calls:
        with pytest.raises(UserError):
            call(rng(0, "x"))
