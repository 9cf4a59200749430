"""Ranks of predictions: judged on runs made up so that the answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import pytest

from harness.validate import ranks
from harness.validate.predicted import cause
from harness.validate.ranks import SERVERS, SIMULATOR
from tests.cases import cases

SEEDS = range(5)
WOBBLE = (-0.02, -0.01, 0.0, 0.01, 0.02)  # over repeats


def runs(
    servers: Mapping[str, float],
    simulator: Mapping[str, float],
    *,
    measure: str = "both",
    condition: str = "2 models",
    invalid: Sequence[tuple[str, int]] = (),
    wobble: Sequence[float] = WOBBLE,
    apart: float = 0.0,
) -> pd.DataFrame:
    """Return a frame of a line a run: systems wobble together over repeats; `apart`: in opposite ways."""
    lines = []
    for side, values in ((SERVERS, servers), (SIMULATOR, simulator)):
        for k, (label, value) in enumerate(values.items()):
            for seed, off in zip(SEEDS, wobble, strict=True):
                offset = off + apart * off * (-1) ** k if side == SERVERS else off
                bad = side == SERVERS and (label, seed) in invalid
                lines.append((condition, label, seed, side, measure, value + offset, bad))
    return pd.DataFrame(lines, columns=["condition", "label", "seed", "side", "measure", "value", "invalid"])


def only(frame: pd.DataFrame) -> ranks.Pair:
    (pair,) = ranks.pairs(frame, "both")
    return pair


def test_a_known_order_is_found_again() -> None:
    frame = runs({"a": 0.5, "b": 0.9, "c": 0.7}, {"a": 0.4, "b": 0.85, "c": 0.8})
    by_pair = {(pair.first, pair.second): pair for pair in ranks.pairs(frame, "both")}
    assert set(by_pair) == {("b", "a"), ("c", "a"), ("b", "c")}
    assert {pair.verdict for pair in by_pair.values()} == {"alike"}
    assert by_pair["b", "a"].servers.mean == pytest.approx(0.4)
    assert by_pair["b", "a"].simulator.mean == pytest.approx(0.45)
    assert [key for key, pair in by_pair.items() if pair.far] == [("b", "a"), ("c", "a")]


@cases(("a", "b", "verdict"), [(0.6, 0.5, "wrong"), (0.5, 0.6, "alike"), (0.5, 0.5, "no difference")])
def test_what_the_simulator_says_of_a_pair_that_the_servers_tell_apart(a: float, b: float, verdict: str) -> None:
    pair = only(runs({"a": 0.5, "b": 0.8}, {"a": a, "b": b}))
    assert (pair.first, pair.second, pair.verdict) == ("b", "a", verdict)


def test_what_servers_do_not_tell_apart_judges_nothing() -> None:
    tie = only(runs({"a": 0.70, "b": 0.705}, {"a": 0.9, "b": 0.1}, apart=1.0))
    assert tie.verdict == "not told apart"
    assert tie.servers.low is not None
    assert tie.servers.low < 0.0 < tie.servers.mean
    assert only(runs({"a": 0.7, "b": 0.7}, {"a": 0.9, "b": 0.1})).verdict == "not told apart"


def test_an_invalid_run_is_in_no_number() -> None:
    frame = runs({"a": 0.5, "b": 0.8}, {"a": 0.4, "b": 0.9}, invalid=[("b", 3)])
    pair = only(frame)
    assert (pair.servers.n, pair.invalid, pair.verdict) == (4, 1, "too few")
    assert ranks.summary([pair])[1] == "1 pairs have fewer than 5 valid repeats, and count for nothing"
    (a, b) = ranks.cells(frame, "both")
    assert (a.label, a.n, b.label, b.n) == ("a", 5, "b", 4)
    assert b.servers == pytest.approx(0.8 + (-0.02 - 0.01 + 0.0 + 0.02) / 4)


def test_a_system_that_ran_on_one_side_alone_is_in_no_pair() -> None:
    assert ranks.pairs(runs({"a": 0.5}, {"a": 0.4, "b": 0.9}), "both") == []
    none = runs({}, {"a": 0.4}).iloc[:0]
    assert (ranks.pairs(none, "both"), ranks.cells(none, "both")) == ([], [])


def test_conditions_are_apart() -> None:
    both = [runs({"a": 0.5, "b": 0.8}, {"a": 0.4, "b": 0.9}, condition=c) for c in ("2 models", "4 models")]
    pairs = ranks.pairs(pd.concat(both), "both")
    assert [(pair.condition, pair.first) for pair in pairs] == [("2 models", "b"), ("4 models", "b")]


def test_errors_are_relative_and_stand_beside_the_servers_spread() -> None:
    both = runs({"a": 0.5}, {"a": 0.6})
    fast = runs({"a": 0.200}, {"a": 0.220}, measure="ttft_p50_s", wobble=(0.0,) * 5)
    attainment, ttft = ranks.cells(pd.concat([both, fast]), "both")
    assert attainment.error == pytest.approx(0.1)
    assert attainment.spread == pytest.approx(0.0158, abs=1e-4)
    assert (ttft.servers, ttft.simulator, ttft.spread) == pytest.approx((0.2, 0.22, 0.0))
    assert ttft.error == pytest.approx(0.1)
    assert ranks.aims([ttft._replace(error=0.09), ttft._replace(error=-0.21)]) == [
        "P50 of TTFT: error 15 % in the median cell; 1 of 2 within 10 %"
    ]
    endless = runs({"a": math.inf}, {"a": 0.2}, measure="tpot_p99_s", wobble=(0.0,) * 5)
    (cell,) = ranks.cells(endless, "both")
    assert math.isnan(cell.error)


def test_a_summary_says_whether_the_pairs_are_enough() -> None:
    few = ranks.pairs(runs({"a": 0.5, "b": 0.8}, {"a": 0.4, "b": 0.9}), "both")
    apart, enough = ranks.summary(few)
    assert apart == (
        "1 of 1 pairs are told apart by the servers: the simulator ranks 1 alike, 0 wrongly, sees no difference in 0"
    )
    assert enough.startswith("1 of these 1 were predicted to differ by 10 points or more: too few to judge by")
    many = {name: 0.1 + 0.15 * k for k, name in enumerate("abcde")}
    assert ranks.summary(ranks.pairs(runs(many, many), "both"))[1].endswith("enough to judge by")
    rows = list(ranks.pair_rows(few))
    assert rows[1] == ("2 models", "b", "a", "5", "+30.0 [30.0, 30.0]", "+50.0 [50.0, 50.0]", "alike")


def cell(measure: str, error: float, spread: float, n: int = 5) -> ranks.Cell:
    return ranks.Cell("2 models", "a", measure, n, 1.0, spread, 1.0 + error, error)


def test_an_aim_counts_cells_whose_own_repeats_tell_it() -> None:
    # 2.776 standard deviations over the root of five: a spread of 0.08 is an interval of 0.099, 0.09 one of 0.112
    scored = [cell("both", error, spread) for error, spread in ((0.04, 0.01), (0.06, 0.01), (0.5, 0.5))]
    scored += [cell("ttft_p50_s", 0.09, 0.08), cell("ttft_p50_s", 0.3, 0.09)]
    scored += [cell("ttft_p95_s", 0.1, 0.05, n=1), cell("tpot_p50_s", math.nan, 0.0)]
    lines = ranks.verdict_lines(scored, "both", judged=True)
    assert lines[0].startswith("attainment: 1 of 2 cells within 5 points; 1 of 3 cells have a wider interval")
    assert lines[0].endswith("the aim is missed")
    assert lines[1].startswith("P50 of TTFT: 1 of 1 cells within 10 %; 1 of 2 cells have")
    assert lines[1].endswith("the aim is met")
    assert lines[2].startswith("P95 of TTFT: 0 of 0 cells within 20 %")
    assert "lengthen --window-s" in lines[2]
    assert lines[3].startswith("P50 of TPOT: 0 of 0 cells within 10 %; 0 of 0 cells")
    unjudged = ranks.verdict_lines(scored, "both", judged=False)
    assert not [line for line in unjudged if "the aim is" in line]
    assert unjudged[-1] == "no aim is judged in this tier (--full judges them)"


def test_misses_are_those_beyond_a_bound_furthest_first() -> None:
    latencies = cell("ttft_p50_s", 0.5, 0.1), cell("tpot_p99_s", 9.0, 0.1)
    scored = [cell("both", -0.06, 0.01), cell("both", 0.05, 0.0), *latencies]
    first, second = ranks.misses(scored, "both")
    assert ranks.miss(first, "both") == "a, 2 models: P50 of TTFT +50 % (±10)"
    assert ranks.miss(second, "both") == "a, 2 models: attainment -6.0 points (±1)"


def test_a_miss_stands_with_the_wait_that_differs_most() -> None:
    lines = [
        ("2 models", "a", SERVERS, 1.0, 0.5),
        ("2 models", "a", SERVERS, 3.0, 0.5),
        ("2 models", "a", SIMULATOR, 1.9, 0.1),
        ("4 models", "a", SERVERS, 9.0, 0.0),
    ]
    waits = pd.DataFrame(lines, columns=["condition", "label", "side", "load", "queue"])
    assert cause(waits, "2 models", "a") == "queue 0.1 s a request, measured 0.5 s"
    assert cause(waits, "4 models", "a") == ""
