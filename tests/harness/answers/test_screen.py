"""Lines and cells as a screen, a paper and a program have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers.commands import again
from harness.answers.table import MOST, WIDTH, aligned, brief, clause
from harness.rows import estimate
from harness.rows.estimate import GPUS, POINTS, RATE, RATIO, SCALE, Estimate, Style
from tests.cases import cases


@cases(
    ("e", "style", "text"),
    [
        (Estimate(22.5, 18.1, 26.9, 5), RATE, "22.5 [18.1, 26.9]"),
        (Estimate(1.39, 0.84, 2.294, 5), RATIO, "1.39x [0.84, 2.29]"),
        (Estimate(1.3, -0.2, 2.8, 5), POINTS, "+1.3 [-0.2, 2.8]"),
        # three significant digits of the mean, and no finer bounds
        (Estimate(0.01234, 0.01, 0.2, 5), RATE, "0.0123 [0.0100, 0.200]"),
        (Estimate(9.934, 0.004, 1234.5, 5), RATE, "9.93 [0.00, 1234]"),
        # one run has no interval
        (Estimate(4.0, None, None, 1, "<"), GPUS, "≤4"),
        (Estimate(4.0, None, None, 1, ">"), GPUS, ">4"),
        # bounds, with open ends of the interval
        (Estimate(80.0, 79.0, None, 5, ">"), RATE, ">80.0 [79.0, inf]"),
        (Estimate(1.0, None, 4.75, 2, "<"), RATIO, "<1.00x [0, 4.75]"),
        (Estimate(0.9, 0.83, None, 2, ">"), RATIO, ">0.90x [0.83, inf]"),
        (Estimate(-1.0, None, 4.75, 2, "<"), POINTS, "<-1.0 [-inf, 4.8]"),
        (Estimate(11.2, None, None, 3, "~"), RATE, "~11.2"),
        (Estimate(1.25, None, 30.0, 2, "<"), SCALE, "≤1.25x [0, 30.0]"),
        # no value, no sign of nothing, and what two seeds far apart give
        (None, RATE, "-"),
        (Estimate(float("nan"), None, None, 5), RATE, "-"),
        (Estimate(float("inf"), None, None, 5), RATE, "never"),
        (Estimate(-0.04, -0.04, 0.04, 5), POINTS, "0.0 [0.0, 0.0]"),
        (Estimate(2.0, 0.1, 4.2e13, 2), RATIO, "2.00x [0.10, 4e+13]"),
    ],
)
def test_an_estimate_is_its_mean_and_its_interval(e: Estimate | None, style: Style, text: str) -> None:
    assert estimate.text(e, style) == text


def test_an_estimate_without_its_interval_keeps_what_qualifies_its_mean() -> None:
    assert estimate.text(Estimate(22.5, 18.1, 26.9, 5), spread=False) == "22.5"
    assert estimate.text(Estimate(20.0, 0.5, None, 2, ">"), spread=False) == ">20.0"


@given(st.floats(-1e5, 1e5), st.integers(0, 3))
def test_a_number_is_printed_to_its_last_digit(x: float, decimals: int) -> None:
    assert abs(float(estimate.number(x, decimals)) - x) <= 0.5000001 * 10.0**-decimals
    assert not estimate.number(x, decimals).startswith("-0.0") or float(estimate.number(x, decimals)) < 0
    assert float(estimate.number(x)) == pytest.approx(x, rel=0.005, abs=1e-300)


def test_a_command_is_repeated_with_other_values() -> None:
    words = ["compare", "--systems", "a,b", "--gpus=2", "--set", "mem_fraction=0.9", "--set=seed=3", "-o", "out"]
    assert again(words, "--gpus", "3") == (
        "bench compare --systems a,b --set mem_fraction=0.9 --set=seed=3 -o out --gpus 3"
    )
    assert again(words, "--set", "mem_fraction=0.95").endswith("--gpus=2 --set seed=3 -o out --set mem_fraction=0.95")


def test_a_screen_keeps_its_tail_and_says_how_much_is_left_out() -> None:
    lines = [f"line {k}" for k in range(40)]
    shown = list(brief(lines, every=False, tail=["next: bench list"]))
    assert (len(shown), shown) == (MOST, [*lines[:28], "... 12 more lines: --all", "next: bench list"])
    assert list(brief(lines, every=True, tail=["end"])) == [*lines, "end"]
    assert list(brief(lines[:30], every=False)) == lines[:30]
    table, notes = lines[:20], [f"note {k}" for k in range(25)]  # the first table stands, however long the tail is
    assert list(brief([table, *lines], every=False, tail=notes)) == [*table, "... 40 more lines: --all", *notes]


def test_long_lines_are_folded_at_words_and_lose_none() -> None:
    text = "  " + "word 12 % " * 30
    parts = list(brief([text], every=False))
    assert max(map(len, parts)) <= WIDTH
    assert " ".join(parts).split() == text.split()
    assert all(part.startswith("    ") for part in parts[1:])
    assert not any(part.lstrip().startswith("%") for part in parts)
    command = "next: bench explain " + "x" * WIDTH + " --misses"
    assert list(brief([command], every=False)) == [command]


def test_the_last_column_is_folded_under_itself() -> None:
    rows = [("name", "what it is"), ("a", "one two three four five six seven eight")]
    lines = list(aligned(rows, 30))
    assert lines == ["name  what it is", "a     one two three four five", "      six seven eight"]
    assert list(aligned(rows)) == ["name  what it is", "a     one two three four five six seven eight"]


def test_a_clause_is_the_longest_part_that_fits() -> None:
    text = "Prism: memory ballooning, models placed by pressure; the rest."
    assert [clause(text, room) for room in (100, 52, 30, 10, 3)] == [
        text,
        "Prism: memory ballooning, models placed by pressure",
        "Prism: memory ballooning",
        "Prism",
        text,
    ]
