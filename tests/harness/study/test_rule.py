"""The rule by which a claim has its class, with a worked number a branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows.estimate import RATIO, Estimate
from harness.rows.statistics import interval
from harness.study import claims
from harness.study.claims import Support, Verdict, by_number, weak
from harness.study.rule import CLASSES, SAYS, judged, judged_seeds, of_statement, predicted, together
from harness.study.study import Claim
from tests.cases import cases


def gain(paper: Any = 3.0, bound: Any = "", **fields: Any) -> Claim:
    """Return a claim of a ratio, which has a direction."""
    return Claim("ratio", "prism", "static", paper=paper, bound=bound, **fields)


def plain(paper: Any = 100.0, bound: Any = "") -> Claim:
    """Return a claim of a quantity without one."""
    return Claim("measure", "weaver", paper=paper, bound=bound)


def here(mean: float, low: float | None, high: float | None, sign: Any = "=", n: int = 8) -> Estimate:
    return Estimate(mean, low, high, n, sign)


RULE = [
    # 3x is an excess of 2: within 1.25 from 2.6 to 3.5, within 1.5 from 2.333 to 4
    (gain(), here(2.7, 2.4, 3.1), "size"),
    (gain(), here(3.5, 3.1, 3.9), "size"),
    (gain(), here(3.6, 3.2, 3.9), "direction"),  # the point lies beyond
    (gain(), here(2.7, 2.3, 3.1), "direction"),  # the interval does
    (gain(), here(1.3, 1.01, 1.7), "direction"),
    (gain(), here(1.3, 0.99, 1.7), "open"),
    (gain(), here(0.7, 0.5, 0.99), "contradicted"),
    (gain(), here(0.7, 0.5, 1.01), "open"),
    (gain(), None, "not run"),
    (gain(), here(3.0, None, None, n=1), "open"),  # one run has no interval
    (gain(), here(3.0, None, None, "~"), "open"),
    (gain(), here(3.0, 2.4, None, ">"), "direction"),  # it may be far more
    (gain(), here(0.5, None, 0.8, "<"), "contradicted"),
    # a loss of 39 %: within 1.25 from 0.5125 to 0.688, within 1.5 from 0.415 to 0.74
    (gain(0.61), here(0.68, 0.6, 0.73), "size"),
    (gain(0.61), here(0.70, 0.6, 0.73), "direction"),
    (gain(0.61), here(1.2, 1.1, 1.3), "contradicted"),
    # a range: the nearer end
    (gain((2.0, 2.5)), here(1.81, 1.7, 2.0), "size"),
    (gain((2.0, 2.5)), here(2.87, 2.6, 3.2), "size"),
    (gain((2.0, 2.5)), here(2.88, 2.6, 3.2), "direction"),
    (gain((1.0, 1.1)), here(1.02, 1.01, 1.03), "size"),
    (gain((1.0, 1.1)), here(1.02, 0.99, 1.03), "open"),
    (gain((0.9, 1.06)), here(1.0, 0.95, 1.05), "size"),  # on both sides: no direction
    (gain((0.9, 1.06)), here(1.5, 1.35, 1.65, n=2), "open"),  # one window: from 1.25
    (gain((0.9, 1.06)), here(1.5, 1.4, 1.6, n=2), "contradicted"),  # from 1.33
    # "up to" is an upper bound, which anything between 1 and it meets; "at least" is a lower one
    (gain(1.6, "up to"), here(1.1, 1.05, 1.2), "up to"),
    (gain(1.6, "up to"), here(1.47, 1.2, 1.7), "up to"),  # the point lies below 1.48
    (gain(1.6, "up to"), here(1.49, 1.41, 1.7), "size"),
    (gain(1.6, "up to"), here(1.76, 1.6, 1.9), "direction"),
    (gain(1.6, "up to"), here(1.1, 0.9, 1.2), "open"),
    (gain(1.6, "up to"), here(0.8, 0.7, 0.9), "contradicted"),
    (gain(0.61, "up to"), here(0.9, 0.8, 0.95), "up to"),
    (gain(0.61, "up to"), here(0.45, 0.4, 0.5), "direction"),
    (gain(2.0, "at least"), here(9.0, 7.0, 12.0), "size"),
    (gain(2.0, "at least"), here(1.8, 1.7, 2.0), "size"),
    (gain(2.0, "at least"), here(1.7, 1.65, 2.0), "direction"),
    (gain(2.0, "at least"), here(4.0, 3.0, None, ">"), "size"),
    # a word in place of a number has no size
    (gain("ahead"), here(3.0, 2.9, 3.1), "direction"),
    (gain("ahead"), here(0.95, 0.82, 1.11), "open"),  # "1x-100x" was no licence
    (gain("ahead"), here(0.95, 0.92, 0.98), "contradicted"),
    (gain("behind"), here(0.95, 0.92, 0.98), "direction"),
    # nothing differs: two one-sided tests
    (gain("equal"), here(1.02, 0.81, 1.24), "size"),
    (gain("equal"), here(1.02, 0.79, 1.24), "open"),
    (gain("equal"), here(1.4, 1.26, 1.6), "contradicted"),
    # differences: 3.7 ms longer
    (Claim("measure", "weaver", paper=3.7, even=0.0), here(4.1, 2.5, 5.5), "size"),
    (Claim("measure", "weaver", paper=3.7, even=0.0), here(6.3, 4.7, 7.8), "direction"),
    (Claim("measure", "weaver", paper=3.7, even=0.0), here(-1.0, -2.0, -0.1), "contradicted"),
    (Claim("difference", "a", "b", paper=0.4, bound="at least"), here(0.5, 0.4, 0.6), "size"),
    # without a direction: 80 to 125
    (plain(), here(110.0, 100.0, 120.0), "size"),
    (plain(), here(124.0, 110.0, 151.0), "open"),
    (plain(), here(143.0, 139.0, 147.0, n=3), "contradicted"),  # one window: 135 to 151
    (plain(), here(143.0, 129.0, 158.0, n=3), "open"),  # one window: 116 to 176
    (plain(32.0, "up to"), here(20.0, 18.0, 22.0), "up to"),
    # a calculation is its own interval
    (plain(1.3), here(0.78, 0.78, 0.78, n=1), "contradicted"),
    (plain(0.266), here(0.257, 0.257, 0.257, n=3), "size"),
    # constants of ours, and what cannot be compared, whatever came out
    (gain(input="poll_s"), here(3.0, 2.9, 3.1), "input"),
    (gain(lacks="its trace"), here(3.0, 2.9, 3.1), "not testable"),
    (gain(comparable=False, why="no rate"), here(3.0, 2.9, 3.1), "not comparable"),
]


@cases(("claim", "estimate", "says"), RULE)
def test_the_rule_with_worked_numbers(claim: Claim, estimate: Estimate | None, says: str) -> None:
    assert judged(claim, estimate) == says
    assert says in SAYS


def test_every_class_but_that_of_seeds_has_a_number() -> None:
    assert {says for *_, says in RULE} >= set(CLASSES)


@cases("paper", ["reached", "never", "met", "missed"])
def test_a_claim_of_every_run_is_judged_seed_by_seed(paper: str) -> None:
    says = [judged_seeds(paper, n, 3) for n in range(4)]
    turn = 1 if paper in {"reached", "met"} else -1
    assert says == ["contradicted", "open", "open", "direction"][::turn]
    assert judged_seeds(paper, 0, 0) == "not run"


def test_seeds_and_bounds_state_their_number_and_limit() -> None:
    assert claims.limit_of_seeds("reached", 5, 5).startswith("at least 55 %")  # 0.05 ** (1 / 5)
    assert claims.limit_of_seeds("never", 0, 5) == claims.limit_of_seeds("reached", 5, 5)
    assert claims.limit_of_seeds("met", 0, 5).startswith("at most 45 %")  # 1 - 0.05 ** (1 / 5)
    assert claims.limit_of_seeds("met", 3, 5).startswith("at least 19 %")  # of Clopper and Pearson: 18.9 %
    bound = claims.limit_of_bound(here(4.0, 2.0, None, ">", 30), RATIO)
    assert bound == f"n = 30; at least {4.0 * 0.5 ** (1.6449 / 1.96):.2f}x (one-sided 95 % limit)"


@cases(
    ("parts", "says"),
    [
        (["size", "size"], "size"),
        (["size", "direction"], "direction"),
        (["contradicted"] * 2, "contradicted"),
        (["size", "up to"], "up to"),
        (["size", "up to", "direction"], "direction"),
        (["up to", "open"], "open"),
        (["size", "contradicted"], "open"),
        (["direction", "open"], "open"),
        (["size", "not run"], "not run"),
        (["does not fit", "not run"], "does not fit"),
        (["input"], "input"),
        ([], "not run"),
    ],
)
def test_a_statement_has_the_class_that_all_of_its_parts_have(parts: Sequence[str], says: str) -> None:
    assert together(parts) == says == together(parts[::-1])


def test_one_of_several_contradicts_and_readings_have_to_agree() -> None:
    """About a and c, or b and c: what c contradicts is contradicted, what a alone does is open."""
    a, b = (frozenset({("a or b", choice)}) for choice in "ab")
    both = frozenset[tuple[str, str]]()

    def verdict_of(*words: str) -> str:
        return of_statement(list(zip(words, (a, b, both), strict=True)))

    assert verdict_of("size", "size", "direction") == "direction"
    assert verdict_of("size", "contradicted", "size") == "open"
    assert verdict_of("contradicted", "contradicted", "size") == "contradicted"
    assert verdict_of("size", "direction", "contradicted") == "contradicted"
    assert verdict_of("direction", "open", "size") == "open"
    assert verdict_of("contradicted", "direction", "not run") == "not run"
    there = a | {("where", "x")}, a | {("where", "y")}  # workloads that the paper leaves open
    assert of_statement([("size", there[0]), ("contradicted", there[1])]) == "open"
    assert of_statement([]) == "not run"


def test_a_single_run_of_a_paper_is_compared_with_a_prediction_interval() -> None:
    """Of a t interval it is the usual one: mean +- t s sqrt(1 + 1/n)."""
    runs = [-1.0, 0.0, 1.0, 2.0]
    e = interval(runs)
    assert e.low is not None
    spread = math.sqrt(sum((x - 0.5) ** 2 for x in runs) / 3)
    low, high = predicted(e)
    assert high - 0.5 == pytest.approx(3.182446 * spread * math.sqrt(1 + 1 / 4), rel=1e-4)
    assert low == pytest.approx(1.0 - high)
    assert predicted(here(4.0, 2.0, 8.0, n=3)) == pytest.approx((1.0, 16.0))  # in logarithms: twice as far
    assert predicted(here(4.0, 2.0, 8.0, n=3), windows=8) == pytest.approx((0.5, 32.0))
    assert predicted(here(4.0, 2.0, None, ">", n=3)) == (1.0, math.inf)


@given(st.floats(1.1, 20), st.floats(0.05, 20), st.floats(1, 3), st.floats(1, 3))
def test_size_is_within_direction_and_never_contradicted(paper: float, mean: float, down: float, up: float) -> None:
    estimate = here(mean, mean / down, mean * up)
    number, word = judged(gain(paper), estimate), judged(gain("ahead"), estimate)
    assert (number == "size") <= (word == "direction")
    assert (number == "contradicted") == (word == "contradicted")
    turned = Estimate(1 / estimate.mean, 1 / (mean * up), 1 / (mean / down), 8)
    assert (word == "direction") == (judged(gain("behind"), turned) == "direction")


@cases(
    ("support", "short"),
    [
        (Support(10, 5), ""),
        (Support(9, 5), "9 of the 10 misses that"),
        (Support(10, 4), "4 of the 5 windows that"),
        (Support(0, 1), "0 of the 10 misses and 1 of the 5 windows that the rule asks for"),
        (Support(None, 5), ""),
        (Support(None, 3), "3 of the 5 windows"),
        (None, "misses and windows unknown"),
    ],
)
def test_a_class_rests_on_ten_misses_and_five_windows(support: Support | None, short: str) -> None:
    v = by_number(gain(), None, here(3.0, 2.6, 3.4), "", support)
    assert v.says == "size"
    assert weak(v).startswith(short) if short and "not" not in short else short in weak(v)
    assert bool(weak(v)) == bool(short)


def test_what_states_its_limit_needs_no_misses() -> None:
    few = Support(0, 1)
    assert weak(by_number(gain(), None, here(4.0, 2.0, None, ">"), "", few)) == ""
    assert weak(by_number(gain(), None, here(1.3, 0.9, 2.0), "", few)) == ""  # open
    assert weak(by_number(gain(input="a constant"), None, here(3.0, 2.6, 3.4), "", few)) == ""
    assert weak(Verdict(gain("never"), None, None, "0 of 5", "direction", "", "n = 5")) == ""
    assert weak(by_number(plain(0.266), None, here(0.257, 0.257, 0.257, n=3))) == ""  # a calculation
    assert "3 of the 5 windows" in weak(by_number(plain(), None, here(110.0, 100.0, 120.0, n=3)))  # a driver's runs
