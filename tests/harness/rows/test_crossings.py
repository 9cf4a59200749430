"""Crossings of a study's table: pooled over windows, paired by block, along rates, SLO scales and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows import by_window, crossings, pooled, ranking, tally
from harness.rows.crossings import of_panel
from harness.rows.estimate import Estimate
from harness.rows.ranking import CASE, FALSE, NEAR, UNDECIDED, Standing, corrected, side_by_side
from harness.rows.ranking import cases as of_cases
from harness.rows.requests import Rows
from tests.cases import cases
from tests.harness.study.study_table import counted, met, panel, table
from tests.there import there

RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
PANEL = panel("p", 0, "rate_scale", unit_rps=2.0)
LEVEL = 0.99
Curve = Callable[[float], float]  # attainment by x


def rows(curves: Mapping[str, Curve], xs: tuple[float, ...] = RATES, seeds: int = 3, **facts: Any) -> pa.Table:
    return table(
        [
            {"condition": "p", "x": x, "label": label, "seed": seed, "ttft": curve(x)} | facts
            for label, curve in curves.items()
            for x in xs
            for seed in range(seeds)
        ]
    )


def knee(at: float, slope: float = 4.0) -> Curve:
    return lambda x: met(x, at, slope)


# ------------------------------------------------------------------ blocks


@given(st.integers(1, 60), st.integers(1, 4), st.floats(1.0, 2000.0), st.integers(0, 999))
def test_blocks_add_up_to_what_was_missed_and_offered(n: int, models: int, window_s: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, arrival_s = rng.integers(0, models, n), rng.uniform(0.0, window_s, n)
    arrival_s[0] = window_s  # the very end belongs to the last block
    scores, weights = rng.integers(0, 2, n).astype(float), rng.integers(1, 9, n).astype(float)
    offered = Rows.__new__(Rows)
    for name, value in (("models", tuple(map(str, range(models)))), ("model", model), ("arrival_s", arrival_s)):
        object.__setattr__(offered, name, value)
    missed, asked = tally.by_block(offered, scores, weights, window_s)
    assert missed.shape == asked.shape == (models, max(1, round(window_s / tally.BLOCK_S)))
    for k in range(models):
        assert asked[k].sum() == pytest.approx(weights[model == k].sum())
        assert missed[k].sum() == pytest.approx(((1.0 - scores) * weights)[model == k].sum())
    assert (missed <= asked).all()


def test_windows_stand_side_by_side_at_the_x_that_all_have() -> None:
    made = rows({"a": knee(10.0)}, seeds=2).to_pylist()
    gone = [row for row in made if not (row["seed"] == 1 and row["x"] == 4.0)]
    (curves,) = by_window.windows(pa.Table.from_pylist(gone, schema=rows({}).schema), "a", "ttft").values()
    without = {seed: sorted(curve) for seed, curve in curves.items()}
    assert without == {seed: [1.0, 2.0, 8.0, 16.0] if seed == 1 else [*RATES] for seed in range(8)}
    both, first = (there(by_window.together(curves, seeds)) for seeds in (range(8), {0}))
    assert both.rates_rps.tolist() == [1.0, 2.0, 8.0, 16.0]
    assert both.offered.tolist() == [[225.0] * 8] * 4
    assert both.missed.sum(axis=1) == pytest.approx([1800 * (1.0 - met(x, 10.0)) for x in both.rates_rps])
    assert first.rates_rps.tolist() == [*RATES]
    assert by_window.together(curves, {8}) is None


def test_a_window_is_a_unit_however_many_stretches_it_has() -> None:
    """Stretches of 75 requests that miss 3, 0 and 0 are one window that misses 3 of 225."""
    made = rows({"a": knee(10.0)}, (4.0,)).to_pylist()
    stretches = {"missed": [3.0, 0.0, 0.0], "offered": [75.0] * 3}
    cut = [row | stretches if row["definition"] == "ttft" else row for row in made]
    (curves,) = by_window.windows(pa.Table.from_pylist(cut, schema=rows({}).schema), "a", "ttft").values()
    c = there(by_window.together(curves, curves.keys()))
    assert (c.units, c.missed.tolist(), c.offered.tolist()) == (12, [[3.0] * 12], [[225.0] * 12])


# ------------------------------------------------------------------ by hand


def test_below_eight_windows_no_side_is_named_and_one_is_a_case() -> None:
    """The same rows give the same ratio, and it has an interval from eight windows on."""
    curves = [(label, x, met(x, at)) for label, at in (("ours", 8.0), ("theirs", 2.0)) for x in RATES]
    runs = [
        {"condition": "p", "x": x, "label": label, "seed": 0, "ttft": share, "n": 9000} for label, x, share in curves
    ]
    verdicts = {}
    for windows in (1, 2, 7, 8, 36):
        standing = side_by_side(of_panel(table(runs, windows), PANEL), PANEL, ("ours", "theirs"), "ttft", LEVEL)
        ratio = there(standing.ratio)
        assert ratio.mean == pytest.approx(4.0)
        assert (ratio.low is not None) == (windows >= 8)
        verdicts[windows] = standing.says, standing.note
    few = {n: (UNDECIDED, f"{n} windows, and 8 name a side") for n in (2, 7)}
    assert verdicts == {1: (CASE, ""), **few, 8: ("ahead", ""), 36: ("ahead", "")}


def test_cases_are_told_by_their_ends_and_sides() -> None:
    def case(mean: float, sign: Any = "=") -> Standing:
        return Standing(Estimate(mean, None, None, 1, sign), CASE, "")

    standings = [case(1.1), case(0.9), case(3.0), case(0.5, "<"), case(1.05, "<"), Standing(None, CASE, "both hold")]
    c = there(of_cases(standings))
    assert (c.least.mean, c.most.mean, c.of) == (0.5, 3.0, 5)
    assert (c.above, c.near, c.below) == (2, 2, 2)  # below 1.05 is on no side of 1
    words = ("ahead", "ahead, by less than 25 %", "equal within 25 %", "behind", "turns")
    assert [c.agree(says) for says in words] == [2, 2, 2, 2, 0]
    assert of_cases(standings[-1:]) is None


def test_counts_add_the_windows_of_a_rate() -> None:
    c = there(crossings.counts(rows({"a": knee(10.0)}), "rate_scale", "a", "ttft"))
    assert c.rates_rps.tolist() == [*RATES]
    assert (c.units, c.offered.sum(axis=1).tolist()) == (12, [2700.0] * 5)
    assert crossings.counts(rows({"a": knee(10.0)}), "rate_scale", "b", "ttft") is None


def test_of_an_x_that_eases_the_inverse_stands() -> None:
    """SLO scales 1, 2, 5: misses of 1 % at 2, in a curve that falls along 1 / x."""
    made = rows({"a": lambda x: met(2.0, x)}, (1.0, 2.0, 5.0))
    c = there(crossings.counts(made, "slo_scale", "a", "ttft"))
    assert c.rates_rps.tolist() == [0.2, 0.5, 1.0]
    crossing = there(crossings.crossing(made, {"axis": "slo_scale"}, "a", "ttft", LEVEL))
    assert (crossing.at.mean, crossing.fails) == pytest.approx((2.0, 1.0))
    assert there(crossing.at.low) < 2.0 < there(crossing.at.high)
    assert sorted(crossings.attained(made, "slo_scale", "a", "ttft")) == [1.0, 2.0, 5.0]


def test_the_fewest_gpus_are_a_number_that_was_run() -> None:
    made = rows({"a": lambda x: 1.0 if x >= 4 else 0.5}, (2.0, 3.0, 4.0, 5.0))
    crossing = there(crossings.crossing(made, {"axis": "gpus"}, "a", "ttft", LEVEL))
    assert (crossing.at, crossing.fails) == (Estimate(4.0, None, None, 12), 3.0)


@cases(
    ("axis", "at"),
    [
        ("rate_scale", Estimate(1.0, None, None, 1, "<")),
        ("gpus", Estimate(16.0, None, None, 1, ">")),
        ("slo_scale", Estimate(16.0, None, None, 1, ">")),
    ],
)
def test_without_room_the_easiest_x_is_not_enough(axis: str, at: Estimate) -> None:
    crossing = there(
        crossings.crossing(rows({"a": knee(10.0)}, infeasible="no room"), {"axis": axis}, "a", "ttft", LEVEL)
    )
    assert (crossing.at, crossing.fails) == (at, at.mean)


def test_attainment_is_that_of_all_windows_together() -> None:
    e = crossings.attained(rows({"a": knee(10.0)}), "rate_scale", "a", "ttft")[16.0]
    assert (e.mean, e.n) == pytest.approx((1.0 - 0.01 * 1.6**4, 12))
    assert there(e.low) < e.mean < there(e.high)
    none = crossings.attained(rows({"a": knee(10.0)}, infeasible="no room"), "rate_scale", "a", "ttft")
    assert none == dict.fromkeys(RATES, Estimate(0.0, None, None, 1))


def test_differences_take_the_seeds_that_both_ran() -> None:
    ours, theirs = rows({"a": knee(10.0)}, seeds=2), rows({"b": knee(2.5)}, seeds=3)
    both = pa.concat_tables([ours, theirs]).unify_dictionaries()
    gap = there(crossings.difference(both, "rate_scale", ("a", "b"), "ttft", 2.0))
    assert (gap.mean, gap.n) == pytest.approx((0.01 * (0.8**4 - 0.2**4), 8))
    assert crossings.difference(both, "rate_scale", ("a", "b"), "ttft", 3.0) is None
    assert crossings.difference(both, "rate_scale", ("a", "c"), "ttft", 2.0) is None


# ------------------------------------------------------------------ standings

STANDS: list[tuple[Curve, Curve, str, bool]] = [
    (knee(10.0), knee(2.5), "ahead", False),
    (knee(2.5), knee(10.0), "behind", False),
    (knee(8.0), knee(8.0), "equal within 25 %", False),
    (knee(9.0), knee(8.0), UNDECIDED, False),
    (knee(4.0, 0.5), knee(4.0), "turns", True),  # flat: worse at low rates, better at high ones
    (knee(8.0, 1.0), knee(2.0, 1.0), "ahead", True),
    (knee(99.0), knee(90.0), "equal within 25 %", True),  # both hold at all rates
    (knee(0.5), knee(0.4), "ahead", True),  # neither holds: ahead at one rate, equal at others
]


@cases(("ours", "theirs", "says", "flat"), STANDS)
def test_who_is_ahead(ours: Curve, theirs: Curve, says: str, flat: bool) -> None:
    standing = side_by_side(rows({"a": ours, "b": theirs}), PANEL, ("a", "b"), "ttft", LEVEL)
    assert (standing.says, standing.flat) == (says, flat)
    assert [x for x, _ in standing.differences] == [2.0, 8.0, 32.0]  # in requests per second
    assert (standing.p < FALSE) == says.startswith(("ahead", "behind", "turns"))
    turned = side_by_side(rows({"a": ours, "b": theirs}), PANEL, ("b", "a"), "ttft", LEVEL)
    assert turned.says == {"ahead": "behind", "behind": "ahead"}.get(says, says)


def test_along_slo_scales_less_is_ahead() -> None:
    shown = panel("p", 0, "slo_scale", xs=(1.0, 2.0, 5.0))
    made = rows({"a": lambda x: met(1.5, x), "b": lambda x: met(3.0, x)}, (1.0, 2.0, 5.0))
    standing = side_by_side(made, shown, ("a", "b"), "ttft", LEVEL)
    assert there(standing.ratio).mean == pytest.approx(0.5)
    assert standing.says == "ahead"
    assert [x for x, _ in standing.differences] == [1.0, 2.0, 5.0]  # as shown
    assert standing.differences[0][1].mean == pytest.approx(met(1.5, 1.0) - met(3.0, 1.0))


DIFFERENCES: list[tuple[list[float], str]] = [
    ([1, 1, 0], "ahead"),
    ([1, 1, 1], "ahead"),
    ([-1, -1, 0], "behind"),
    ([1, -1, 0], "turns"),
    ([1, 9, 9], UNDECIDED),  # decided at one of three
    ([9, 9, 9], UNDECIDED),
    ([0, 0, 9], "equal within 25 %"),
    ([0, 0, 1], "ahead"),  # equal at two rates, ahead at the third
    ([0, 1, 9], "ahead"),
    ([1], UNDECIDED),
    ([], UNDECIDED),
]


@cases(("signs", "says"), DIFFERENCES)
def test_two_of_three_differences_decide(signs: list[float], says: str) -> None:
    """1, -1: far from 0, one way or the other; 0: near it; 9: anywhere."""
    gaps = {1: (0.02, 0.01), -1: (-0.02, 0.01), 0: (0.0, 0.5 * NEAR), 9: (0.01, 0.05)}
    told = [Estimate(mean, mean - half, mean + half, 40) for mean, half in (gaps[round(x)] for x in signs)]
    assert ranking._by_differences(told)[0] == says  # worked by hand


def test_of_one_difference_alone_chance_had_three_tries() -> None:
    apart, near = Estimate(0.02, 0.01, 0.03, 40), Estimate(0.0, -0.001, 0.001, 40)
    assert ranking._by_differences([near, near, apart])[1] == pytest.approx(3 * pooled.chance(apart))
    other = Estimate(-0.02, -0.039, -0.001, 40)
    assert ranking._by_differences([apart, other, near])[1] == pooled.chance(other)  # both must hold


def test_verdicts_of_one_table_are_corrected_together() -> None:
    """Holm: 0.01 x 3, 0.03 x 2, then no less than what was before; what has no side is left alone."""
    given = [("ahead", 0.01), ("behind", 0.04), ("ahead, by less than 25 %", 0.03), ("equal within 25 %", 1.0)]
    standings = corrected([Standing(None, says, "", p) for says, p in given])
    assert [standing.p for standing in standings] == pytest.approx([0.03, 0.06, 0.06, 1.0])
    assert [standing.says for standing in standings] == ["ahead", UNDECIDED, "equal within 25 %", "equal within 25 %"]
    assert corrected([]) == []


def test_a_verdict_that_stands_twice_is_corrected_as_one() -> None:
    """Conditions that share their runs share their verdict; two verdicts of equal probability are two."""
    first = Standing(Estimate(1.5, 1.01, 2.0, 60), "ahead", "", 0.03)
    other = first._replace(ratio=Estimate(1.6, 1.01, 2.5, 60))
    assert [standing.says for standing in corrected([first, first, first])] == ["ahead"] * 3
    assert [standing.p for standing in corrected([first, first, other])] == pytest.approx([0.06] * 3)


def test_a_side_that_chance_may_give_leaves_what_stands_without_it() -> None:
    """Two differences within half a point are an equality, whatever becomes of the third."""
    near, far = Estimate(0.0, -0.001, 0.001, 60), Estimate(-0.013, -0.024, -0.002, 60)
    flat = Standing(None, "behind", "", 0.2, True, differences=((0.8, near), (3.2, near), (12.8, far)))
    steep = Standing(Estimate(0.9, 0.8, 0.99, 60), "behind, by less than 25 %", "", 0.2)
    open_ = flat._replace(differences=((0.8, near), (3.2, far), (12.8, far)))
    assert [standing.says for standing in corrected([flat, steep, open_])] == ["equal within 25 %"] * 2 + [UNDECIDED]
    assert [standing.says for standing in corrected([flat._replace(p=1e-6)])] == ["behind"]


# ------------------------------------------------------------------ models


def test_models_weigh_alike_and_the_worst_stands_alone() -> None:
    """Two models that cross at 10 and 5: the mean where half of (x/10)^4 + (x/5)^4 is 1."""
    each = [rows({"a": knee(at)}, over="model", model=model) for model, at in (("s", 10.0), ("l", 5.0))]
    made = pa.concat_tables([rows({"a": knee(9.0)}), *each]).unify_dictionaries()
    at = {over: crossings.crossing(made, PANEL, "a", "ttft", LEVEL, over) for over in ("pooled", "mean", "worst")}
    rates = {over: c and c.at.mean for over, c in at.items()}
    assert rates == {
        "pooled": pytest.approx(18.0),
        "worst": pytest.approx(10.0),
        "mean": pytest.approx(2 * (2 / (1 / 10**4 + 1 / 5**4)) ** 0.25),
    }


def test_a_model_that_some_windows_never_asked_for_may_be_the_worst() -> None:
    """A model that one of three seeds asked for, and that met nothing, at every rate."""
    often = rows({"a": knee(10.0)}, over="model", model="often")
    rare = rows({"a": lambda _: 0.0}, seeds=1, over="model", model="rare")
    made = pa.concat_tables([often, rare]).unify_dictionaries()
    c = there(crossings.counts(made, PANEL["axis"], "a", "ttft", "worst"))
    assert (c.missed.sum(axis=1) == c.offered.sum(axis=1)).all()
    alone = there(crossings.counts(often, PANEL["axis"], "a", "ttft", "worst"))
    assert (alone.missed.sum(axis=1) < alone.offered.sum(axis=1)).any()


def test_a_model_without_requests_at_some_rate_is_left_out_of_the_mean() -> None:
    lone = {"over": "model", "model": "rare", "x": 16.0, "label": "a", "seed": 0, "ttft": 0.0, "condition": "p"}
    often = rows({"a": knee(10.0)}, over="model", model="often")
    made = pa.concat_tables([often, table([lone])]).unify_dictionaries()
    c = there(crossings.crossing(made, PANEL, "a", "ttft", LEVEL, "worst"))
    assert c.at.mean == pytest.approx(20.0)
    assert counted("loads", 3.0, {"n": 9, "over": "pooled"}) == {}
