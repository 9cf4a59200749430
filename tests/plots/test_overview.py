"""A study's findings on one page: its panels, rows, words and marks, from hand-made tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.rows.about import About
from harness.rows.ranking import verdict_text
from plots import caption, fig_compare, fig_study, lines, matrix, overview, style
from tests.cases import cases
from tests.plots import test_fig_study as studies
from tests.plots.test_fig_study import about, claim, panel, stored, written

XS = (1.0, 2.0, 4.0, 8.0, 16.0)


measured = partial(studies.measured, offered=2500.0)


def steep(x: float, knee: float) -> float:
    """Return attainment that crosses 99 % at the knee, misses growing with the cube of the rate."""
    return max(0.0, 1.0 - 0.01 * (x / knee) ** 3)


def curve(condition: str, of: Mapping[str, float], seeds: int = 3, **more: Any) -> Iterator[dict[str, Any]]:
    for label, knee in of.items():
        for x in XS:
            for seed in range(seeds):
                met = {"ttft": steep(x, knee), "tpot": 1.0, "both": steep(x, knee)}
                yield {"condition": condition, "x": x, "label": label, "seed": seed, "values": met, **more}


def pair(name: str, row: int = 0, column: int = 0, **facts: Any) -> dict[str, Any]:
    return panel(name, row=row, column=column, axis="rate_rps", window_s=1800.0, half="", **facts)


FITTED = pair("open")
HALVES = [
    pair(f"open / {half} half", column=1, trace="hyperbolic") | {"half": half, "name": "open"}
    for half in ("first", "second")
]
TABLE = measured(
    *curve("open", {"prism": 8.0, "static": 2.0}),
    *curve("open / first half", {"prism": 6.0, "static": 5.0}, seeds=1, windows=1),
    *curve("open / second half", {"prism": 12.0, "static": 3.0}, seeds=1, windows=1),
)
FACTS = about(
    "lines",
    FITTED,
    *HALVES,
    definitions=["ttft", "tpot"],
    claims=[claim("ratio", "prism", "static", definition="ttft", paper=2.0)],
)


def drawn(table: pa.Table = TABLE, facts: About = FACTS, note: str = "") -> Figure:
    with style.theme():
        figure = overview.draw(table, facts, note)
    assert figure is not None
    return figure


def widths(axis: Axes) -> list[float]:
    """Return the widths of the curves of a panel."""
    curves = (line for line in axis.lines if line.get_linestyle() not in {"None", ""})
    return [line.get_linewidth() for line in curves if len(np.asarray(line.get_xdata())) >= len(XS)]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_halves_of_a_real_trace_stand_beside_the_trace_that_was_fitted_to_it() -> None:
    (cell,) = overview.cells(FACTS)
    assert [entry["condition"] for entry in cell.panels] == ["open"]
    assert list(cell.halves) == ["first", "second"]
    arena = pair("open", trace="arena-like")
    cells = overview.cells(replace(FACTS, panels=(arena, *HALVES)))
    assert [(len(c.panels), len(c.halves)) for c in cells] == [(1, 0), (0, 2)]


def test_a_row_has_its_crossing_the_halves_and_the_papers_mark() -> None:
    (rows,) = overview.rows(TABLE, FACTS, overview.chosen(TABLE, FACTS))
    prism, static = rows
    assert prism.at is not None
    assert static.at is not None
    assert (prism.at.at.mean, static.at.at.mean) == pytest.approx((8.0, 2.0), rel=0.02)
    assert [c.at.mean for c in static.halves.values()] == pytest.approx([5.0, 3.0], rel=0.02)
    assert static.paper == [pytest.approx((4.0, 4.0), rel=0.02)]  # where the paper's ratio of 2 puts it
    assert static.standing is not None
    assert prism.standing is None
    assert static.standing.says == "ahead"


def test_a_papers_ratio_to_the_best_static_stands_at_the_one_that_crosses_highest() -> None:
    facts = about(
        "lines",
        FITTED,
        systems=["prism", "static", "static:rate"],
        claims=[claim("ratio", "gone or prism", "best static and static", paper=[2.0, 4.0])],
    )
    table = measured(*curve("open", {"prism": 8.0, "static": 2.0, "static:rate": 3.0}))
    (rows,) = overview.rows(table, facts, overview.chosen(table, facts))
    span = pytest.approx((2.0, 4.0), rel=0.02)
    assert {row.label: row.paper for row in rows} == {"prism": [], "static": [span], "static:rate": [span]}


def test_beside_a_row_stands_who_is_ahead_and_halves_have_neither_interval_nor_verdict() -> None:
    figure = drawn()
    assert [text for text in texts(figure) if text.startswith("+ ")] == [
        verdict_text(row.standing, between=", ")
        for row in overview.rows(TABLE, FACTS, overview.cells(FACTS))[0]
        if row.standing is not None
    ]
    alone = replace(FACTS, panels=tuple(HALVES))
    assert not [text for text in texts(drawn(TABLE, alone)) if "x" in text]
    legend = [text.get_text() for text in drawn(TABLE, alone).legends[0].get_texts()]
    assert legend == ["real trace: first half above, second below"]


def test_a_flat_cell_shows_three_differences_instead_of_a_ratio() -> None:
    def run(label: str, x: float, seed: int) -> dict[str, Any]:
        lost = {"prism": 0.008, "static": 0.011}[label] * x**0.2
        return {"condition": "open", "x": x, "label": label, "seed": seed, "values": {"ttft": 1.0 - lost}}

    table = measured(*(run(label, x, seed) for label in ("prism", "static") for x in XS for seed in range(3)))
    (words,) = [text for text in texts(drawn(table, about("lines", FITTED))) if text.endswith("points)")]
    assert words.count(",") == 2
    assert "x" not in words


def test_at_most_eight_panels_are_shown_and_what_is_100_percent_for_everyone_is_not() -> None:
    panels = [pair(f"c{k}", row=k) for k in range(11)]
    table = measured(
        *(
            run
            for k in range(11)
            for run in curve(f"c{k}", {"prism": 1e4, "static": 1e4} if k == 1 else {"prism": 8.0, "static": 2.0})
        )
    )
    facts = about("lines", *panels, claims=[claim("ratio", "prism", "static", paper=3.0, on={"condition": "c10"})])
    shown = [cell.any["condition"] for cell in overview.chosen(table, facts)]
    assert shown == ["c0", "c2", "c3", "c4", "c5", "c6", "c7", "c10"]  # what a paper states comes before the rest
    assert len(drawn(table, facts).axes) == overview.MOST
    with style.theme():
        pages = lines.pages(table, facts)
    assert all(len(page.axes) <= lines.MOST for page in pages[1:])
    assert "Left out, as all systems are at 100 %: TTFT of c1." in " ".join(map(written, pages))


def test_curves_of_both_halves_are_thin_lines_in_one_panel_from_90_percent_on() -> None:
    with style.theme():
        first, *pages = lines.pages(TABLE, FACTS)
    assert len(first.axes) == 1
    (page,) = pages  # TPOT is 100 % for everyone
    fitted, real = page.axes
    wide, thin = widths(fitted), widths(real)
    assert (len(wide), len(thin)) == (2, 4)  # two systems, of the real trace twice
    assert max(thin) < min(wide)
    assert [axis.get_ylim()[0] for axis in page.axes] == [90.0, 90.0]


def test_axes_begin_at_ten_times_the_misses_that_the_level_leaves() -> None:
    assert [lines._floor(replace(FACTS, level=level)) for level in (0.99, 0.95, 0.9)] == [90.0, 50.0, 0.0]


LONG = "A note " + "of many words " * 40


@cases("note", ["", "2 runs are stale.", LONG])
def test_captions_have_few_words_and_what_must_be_said(note: str) -> None:
    notes = ["A share of SMs is unmeasured."]
    steps_of = about("steps", pair("open") | {"kind": "base"}, claims=[claim("ratio", "prism", "static")], notes=notes)
    with style.theme():
        figures = [
            overview.draw(TABLE, replace(FACTS, notes=tuple(notes)), note),
            matrix.draw(TABLE, steps_of, note),
            matrix.draw(TABLE, replace(steps_of, layout="matrix"), note),
        ]
    for figure in figures:
        assert figure is not None
        words = written(figure)
        assert len(words.split()) <= caption.WORDS
        setting = ("Simulated", "unchecked end to end", "2 x h100", "SLO 5 x P95", "12 windows of 1,800 s")
        for fact in (*setting, caption.CORRECTED, *notes):
            assert fact in words, fact
        assert ("stale" in words) == ("stale" in note)


def test_what_a_caption_leaves_out_stands_in_the_csv(tmp_path: Path) -> None:
    pdf, png, csv = fig_study.render(stored(tmp_path / "s", TABLE, FACTS), tmp_path / "f", "bench plot x", LONG)
    told = [line.removeprefix("# ") for line in csv.read_text().splitlines() if line.startswith("#")]
    assert LONG.strip() in " ".join(told)
    assert pdf.read_bytes().count(b"/Type /Page\n") + pdf.read_bytes().count(b"/Type /Page ") == 2
    assert png.stat().st_size > 0
    frame = lines.points(TABLE, FACTS)
    row = frame[(frame["condition"] == "open") & (frame["label"] == "static")].iloc[0]
    assert (row["standing"], row["over_it"]) == ("ahead", "prism")
    assert row["ratio_low"] < row["ratio"] == pytest.approx(4.0, rel=0.05)


def test_words_that_do_not_fit_are_left_out_in_order() -> None:
    assert caption.within(4, "one two", "", "three four five", "six") == "one two six"


# ------------------------------------------------------------------ comparisons


def compared(seeds: int = 4) -> pa.Table:
    def run(label: str, x: float, seed: int) -> dict[str, Any]:
        met = steep(x, 4.0 if seed % 2 else 8.0)
        values = {"both": met, "ttft": met, "tpot": 1.0, "ttft_p95_s": 0.1, "tpot_p95_s": 0.02, "offered_rps": x}
        return {"condition": "", "x": x, "rate_scale": x, "label": label, "seed": seed, "values": values}

    return measured(*(run(label, x, seed) for label in ("prism", "static") for x in XS for seed in range(seeds)))


def test_a_comparison_pools_its_windows_and_draws_halves_as_thin_lines() -> None:
    table = compared()
    points = fig_compare.points(table)
    at = points[(points["label"] == "prism") & (points["rate_scale"] == 4) & (points["definition"] == "both")].iloc[0]
    assert at["mean"] == pytest.approx((steep(4, 4) + steep(4, 8)) / 2)
    assert at["low"] < at["mean"] < at["high"]
    halves = [fig_compare.points(half) for half in fig_compare.parts(table, [[0, 2], [1, 3]])]
    with style.theme():
        whole, apart = fig_compare.draw(table), fig_compare.draw(table, every=halves)
    assert [len(widths(figure.axes[0])) for figure in (whole, apart)] == [2, 4]
    assert not any(band.get_paths() for band in apart.axes[0].collections)  # no intervals of a case
    assert whole.axes[0].get_ylim()[0] == 90.0
    words = written(apart)
    assert "case studies" in words
    assert len(words.split()) <= caption.WORDS + 8  # with the words of the axis
