"""A table has the same cells in each form, and each form escapes what it must."""

from __future__ import annotations

import csv
import io
import json
import math

from harness.answers.table import BOLD, PLAIN, Table, printed

TABLE = Table(
    ["name", "met", "a"],
    [["x_1", "99.5", "-"], ["y|<z>", "7", "5 %"]],
    notes=["noted"],
    title="at 4 req/s:",
    groups=["", "SLO %", "a long title"],
    strong={(0, 1)},
)


def test_groups_stand_over_their_columns_and_the_best_is_bold() -> None:
    assert list(TABLE.text()) == [
        "at 4 req/s:",
        "       SLO %  a long title",
        "name   met    a",
        "x_1    99.5   -",
        "y|<z>  7      5 %",
        "noted",
    ]
    assert [line for line in TABLE.text(bold=True) if BOLD in line] == [f"x_1    {BOLD}99.5 {PLAIN}  -"]


def test_markdown_and_latex_name_the_group_of_each_column() -> None:
    assert list(TABLE.markdown()) == [
        "| name | SLO % met | a long title a |",
        "| --- | --- | --- |",
        "| x_1 | **99.5** | - |",
        r"| y\|<z> | 7 | 5 % |",
    ]
    assert list(TABLE.markdown("---"))[1] == "|---|---|---|"
    assert list(printed([TABLE], markdown=True)) == ["at 4 req/s:", "", *TABLE.markdown(), "", "noted"]
    text = list(TABLE.latex())
    assert text[:2] == ["% noted", r"\begin{tabular}{lrr}"]
    assert r"name & SLO \% met & a long title a \\" in text
    assert r"x\_1 & \textbf{99.5} & - \\" in text
    assert r"y|$<$z$>$ & 7 & 5 \% \\" in text


def test_programs_read_numbers_and_what_is_missing() -> None:
    raw = Table(["system", "rate", "flat"], [["a, b", 1.5, False], ["c", math.inf, None]])
    assert [*csv.DictReader(io.StringIO(raw.csv()))] == [
        {"system": "a, b", "rate": "1.5", "flat": "False"},
        {"system": "c", "rate": "inf", "flat": ""},
    ]
    assert json.loads(raw.json("rows", {"level": math.nan})) == {
        "level": None,
        "rows": [{"system": "a, b", "rate": 1.5, "flat": False}, {"system": "c", "rate": None, "flat": None}],
    }


def test_a_section_of_a_page_escapes_cells_and_has_keys_to_sort_by() -> None:
    text = TABLE.html()
    assert "<h2>at 4 req/s</h2>" in text
    assert '<th scope="row">y|&lt;z&gt;</th><td data-v="7.0">7</td><td data-v="5.0">5 %</td>' in text


def test_a_column_without_a_value_is_left_out() -> None:
    assert Table(["a", "b"], [["x", "-"]], title="t").filled() == Table(["a"], [["x"]], title="t")
    assert Table(["a", "b"], []).filled() == Table(["a", "b"], [])
