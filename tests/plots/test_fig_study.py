"""Figures of studies: each layout from a table and its facts alone, to the byte, with one caption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import plots
from harness.policy.types import UserError
from harness.rows import ranking, record, tidy
from harness.rows.about import About
from plots import caption, fewest, fig_study, lines, matrix, parts, style
from tests.harness.study.study_table import met
from tests.plots.test_plots import GRID, PLAIN, rows, xs
from tests.plots.test_style import lightness


def measured(*runs: dict[str, Any], offered: float = 0.0) -> pa.Table:
    """Return made-up rows of a study, as `table.Scores.table` makes them; `offered` are requests of each window."""
    first = [("condition", pa.string()), ("x", pa.float64())]
    word = tidy.TABLE_SCHEMA.field("run").type
    made = rows(*({"trace": "hyperbolic-like", "tier": "synthetic"} | run for run in runs), windows=4)
    for row in made if offered else ():
        row |= {"missed": [offered * (1.0 - (row["value"] or 0.0))], "offered": [offered]}
    table = pa.Table.from_pylist(made, schema=pa.schema([*first, *PLAIN]))
    return table.cast(pa.schema([("condition", word), first[1], *tidy.TABLE_SCHEMA]))


def panel(condition: str, **facts: Any) -> dict[str, Any]:
    """Return facts of a panel, as `grid.facts` has them."""
    usual = {"condition": condition, "name": condition, "kind": "", "origin": "", "row": 0, "column": 0,
             "axis": "rate_scale", "trace": "hyperbolic-like", "tier": "synthetic", "models": "heavy8", "own": {},
             "plan": "trace", "half": "", "halves": [],
             "count": 8, "gpus": 2, "slo": "P95", "slo_scale": 5.0, "rate_rps": None, "unit_rps": 1.5,
             "rates_rps": [], "xs": [], "seen": []}  # fmt: skip
    return usual | facts


def about(layout: str, *panels: dict[str, Any], **facts: Any) -> About:
    """Return facts of a study, as its table's footer has them."""
    usual = {"study": "mine", "layout": layout, "paper": "A paper, figure 7", "level": 0.99, "definitions": ["ttft"],
             "systems": ["prism", "static"], "controls": [], "seeds": 3, "titles": [], "claims": [], "notes": [],
             "sample": {"rule": "fixed", "each": "system"}, "slo": "5xP95", "values": [], "judges": [], "runs": {},
             "panels": list(panels)}  # fmt: skip
    return About.of(usual | facts)


def claim(what: str, system: str, over: str, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"definition": "", "on": {}, "paper": None, "subject": ""}
    return {"what": what, "system": system, "over": over} | usual | more


def fleet(loads: Iterable[object], rules: Sequence[str], rate_rps: float = 6.0, **facts: Any) -> About:
    """Return facts of a fleet: a panel for each load and SLO."""
    usual = {"axis": "gpus", "gpus": None, "slo_scale": None, "rate_rps": rate_rps, "xs": [2.0, 16.0]}
    panels = (panel(f"{load} / {slo}", slo=slo, row=k, **usual) for k, load in enumerate(loads) for slo in rules)
    return about("fleet", *panels, **facts)


def of_fleet(facts: About, least: Mapping[tuple[str, str], int], counts: Sequence[int] = (2, 4, 16)) -> pa.Table:
    """Return runs of a fleet in which systems hold the level from some number of GPUs on, by SLO and label."""
    return measured(
        *(
            {"condition": of["condition"], "slo": slo, "x": float(gpus), "gpus": gpus, "label": label}
            | {"values": {"ttft": 1.0 if gpus >= needed else 0.97}}
            for of in facts.panels
            for (slo, label), needed in least.items()
            for gpus in counts
            if slo == of["slo"]
        )
    )


def written(figure: Figure) -> str:
    """Return all words of a figure that belong to no panel."""
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def cells() -> Iterator[dict[str, Any]]:
    """Return made-up scores: prism crosses 99 % at 4 x static's rate, from SLO scale 2 and 4 GPUs; static neither."""

    def cell(condition: str, x: float, label: str, seed: int, ttft: float, **more: Any) -> dict[str, Any]:
        shares = {"ttft": ttft, "tpot": 1.0, "both": ttft, "loads": 7.0, "evicts": 6.0, "migrations": 2.0}
        return {"condition": condition, "x": x, "label": label, "seed": seed, "values": shares, **more}

    for seed in range(3):
        for label, knee in (("prism", 10.0), ("static", 2.5)):
            for x in (1.0, 2.0, 4.0, 8.0, 16.0):
                yield cell("rates", x, label, seed, met(x, knee))
            for x in (1.0, 2.0, 5.0):
                yield cell("scales", x, label, seed, met(2.0, x) if label == "prism" else 0.8)
            for x in (2.0, 3.0, 4.0, 5.0):
                no_room = "no room" if label == "static" and x == 2 else None
                share = 1.0 if label == "prism" and x >= 4 else 0.0 if no_room else 0.8
                yield cell("GPUs", x, label, seed, share, gpus=int(x), infeasible=no_room)
        yield cell("rates", 1.0, "dedicated", seed, 1.0, gpus=8)  # a GPU a model, whatever is asked
        yield cell("GPUs", 8.0, "dedicated", seed, 1.0, gpus=8)
        for label in ("unshared", "prism (A/A)"):
            for x in (1.0, 16.0):
                yield cell("rates", x, label, seed, 1.0)


CURVES = measured(*cells())
ABOUT = about(
    "lines",
    panel("rates"),
    panel("scales", row=1, axis="slo_scale", slo_scale=None, rate_rps=6.0),
    panel("GPUs", row=2, axis="gpus", gpus=None, rate_rps=1.5),
    definitions=["ttft", "tpot"],
    controls=["dedicated", "unshared", "prism (A/A)"],
    notes=["hyperbolic-like: windows cut to 600 of 7200 s."],
)


def stored(path: Path, table: pa.Table, facts: About) -> Path:
    record.write_table(path / record.SWEEP, table, vars(facts))
    return path


def drawn_lines(table: pa.Table = CURVES, facts: About = ABOUT) -> Figure:
    with style.theme():
        return lines.draw(table, facts, "2 runs are stale.")


def drops(line: Line2D) -> bool:
    """Tell whether a line leads from the top of a panel to its bottom."""
    return list(np.asarray(line.get_ydata(), np.float64)) == [0, 1]


def test_a_study_is_drawn_by_its_layout_and_equal_tables_are_equal_bytes(tmp_path: Path) -> None:
    shuffled = CURVES.take(pa.array(np.random.default_rng(0).permutation(len(CURVES))))
    first = fig_study.render(stored(tmp_path / "a", CURVES, ABOUT), tmp_path / "a" / "fig7", "bench plot x")
    mpl.rcParams["font.size"] = 30  # another's settings change nothing
    second = fig_study.render(stored(tmp_path / "b", shuffled, ABOUT), tmp_path / "b" / "fig7", "bench plot x")
    mpl.rcdefaults()
    assert [path.name for path in first] == ["fig7.pdf", "fig7.png", "fig7.csv"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    csv = first[2].read_text().splitlines()
    assert csv[0] == "# bench plot x"
    assert {"loads", "evicts", "migrations", "ttft_mean", "ttft_low", "infeasible"} <= set(csv[1].split(","))
    assert list(plots.of(tmp_path / "a")[0]) == ["study"]


def test_what_is_no_study_and_a_table_alone_have_no_figure(tmp_path: Path) -> None:
    assert not fig_study.draws(tmp_path)
    compared = stored(tmp_path / "compared", GRID, about("table", study="comparison"))
    assert fig_study.render(compared, tmp_path / "f", "x") == []
    assert list(plots.of(compared)[0]) == ["compare"]
    with pytest.raises(UserError, match="every run of this study was skipped"):
        lines.draw(CURVES.slice(0, 0), ABOUT)


def test_curves_say_what_they_show() -> None:
    facts = """After A paper, figure 7 | hyperbolic-like (synthetic) | heavy8 | 2 to 5 x h100 | simulated | SLO 5 x P95
        | mean and 95 % interval of 3 seeds | oracle: plans know the trace | at 6 (heavy8, hyperbolic-like)
        | windows cut to 600 of 7200 s
        | Not drawn where the models do not fit: static. | 2 runs are stale
        | requests per second (8 models, 2 GPUs, SLO scale 5)
        | Markers without a line: bounds and the A/A copy, at the ends.
        | At least 2,700 requests a point, over its seeds."""
    text = written(drawn_lines())
    for fact in map(str.strip, facts.split("|")):
        assert " ".join(fact.split()) in text, fact
    axes = drawn_lines().axes
    assert [axis.get_ylabel() for axis in axes[::2]] == [f"models: heavy8\n({x}) SLO met (%)" for x in "abc"]
    assert len(axes) == 6  # 3 conditions x (1 trace x 2 definitions)


def test_a_caption_says_how_rates_were_chosen_and_what_of_the_setting_differs() -> None:
    given = panel("rates", rates_rps=[1.0, 8.0], own={"pool_bytes": 72_241_349_919, "assign": "shuffled"})
    bisected = {"rule": "bisect", "each": "system"}
    changed = replace(ABOUT, panels=(given, *ABOUT.panels[1:]), sample=bisected, controls=(), fuller="12 seeds")
    text = written(drawn_lines(facts=changed))
    assert "Rates: 1, 8 req/s, then by bisection of each system's crossing." in text
    assert "streams as released, processes inside 0.90)" in text
    assert "preliminary (--full: 12 seeds)" in text
    assert "Markers without a line" not in text
    again = drawn_lines(facts=replace(ABOUT, panels=(*ABOUT.panels[1:], given)))
    assert "SLO scale 5, streams shuffled, 67.28 GiB a GPU for weights and KV)" in written(again)


def test_slo_rules_in_few_words() -> None:
    assert caption.slos(["20xP95", "5xP95", "1.25xP95"]) == "1.25 to 20 x P95 alone"
    assert caption.slos(["5xP95@mi300x", "9xsolo@h100"]) == "9 x solo on h100, 5 x P95 alone on mi300x"
    assert caption.slos(["5/2xP95", "30/2xP95", "absolute:ttft=2,tpot=0.1"]) == (
        "TTFT 5 x, TPOT 2 x P95 alone, TTFT 30 x, TPOT 2 x P95 alone, TTFT 2 s, TPOT 0.1 s"
    )


def test_crossings_are_dashed_and_what_does_not_fit_is_not_drawn() -> None:
    figure = drawn_lines()
    upright = [xs(line)[0] for axis in figure.axes for line in axis.lines if drops(line) and line.is_dashed()]
    assert sorted({round(x, 2) for x in upright}) == [2.0, 3.75, 4.0, 15.0]
    assert "white" not in {line.get_markerfacecolor() for line in figure.axes[4].lines}
    static = [line for line in figure.axes[5].lines if line.get_color() == style.SYSTEMS["static"].color]
    assert all(2.0 not in xs(line) for line in static)  # of TPOT, which all that ran meet
    assert any(3.0 in xs(line) for line in static)


def test_a_system_with_its_own_gpus_is_never_drawn_above_another_count() -> None:
    figure = drawn_lines()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["prism", "static", "dedicated (8 GPUs)", "unshared", "prism (A/A)", "crosses 99 %"]
    axis = figure.axes[4]
    shown = dict(zip(axis.get_xticks(), (x.get_text() for x in axis.get_xticklabels()), strict=True))
    markers = [line for line in axis.lines if line.get_marker() == style.SYSTEMS["dedicated"].marker]
    (place,) = {x for line in markers for x in xs(line)}
    assert all(line.get_transform() == axis.transData for line in markers)  # at its place, not beside it
    assert place > 5  # beyond those asked for
    assert shown[place] == "8"
    assert [text.get_text() for text in axis.texts] == ["//"]
    assert not figure.axes[0].texts


def test_panels_that_differ_in_a_field_stand_below_each_other() -> None:
    twins = [panel("a", column=1), panel("b", slo="P99"), panel("c"), panel("d", own={"plan": "window"})]
    arranged = [{column: entry["condition"] for column, entry in line.items()} for line in lines.arranged(twins)]
    assert arranged == [{1: "a", 0: "c"}, {0: "b"}, {0: "d"}]


def test_what_planners_saw_is_told_of_both_halves() -> None:
    held_out = {"trace": "hyperbolic", "models": "heavy8", "axis": "rate_scale", "plan": "held-out"}
    text = " ".join(caption.seen([held_out | {"seen": [[539, 132, 3], [619, 118, 0]]}]))
    assert "heavy8 on hyperbolic: 539 132 3 or 619 118 0." in text
    assert text.endswith("Where planners saw 0 requests, a prior of one decides.")
    assert "prior" not in " ".join(caption.seen([held_out | {"seen": [[5, 1]]}]))
    assert not list(caption.seen([held_out | {"plan": "trace", "seen": [[5, 1]]}]))


def ratio_rows(condition: str, prism: float, static: float, **more: Any) -> Iterator[dict[str, Any]]:
    """Yield runs of which two systems cross 99 % at these rates."""
    for label, knee in (("prism", prism), ("static", static)):
        for x in (1.0, 2.0, 4.0, 8.0, 16.0):
            for seed in range(3):
                shares = {"ttft": met(x, knee), "both": 1.0}
                gone = more if label == "static" else {}
                yield {"condition": condition, "x": x, "label": label, "seed": seed, "values": shares, **gone}


def walk(condition: str, name: str, kind: str, **more: Any) -> dict[str, Any]:
    return panel(condition, name=name, kind=kind, origin="unknown", axis="rate_rps", **more)


KNOWN = "plans know the window"
STEPS = about(
    "steps",
    walk("fair default", "fair default", "base", xs=[1.0, 16.0]),
    walk("known (cumulative)", KNOWN, "cumulative", row=1),
    walk("most (cumulative)", "most", "cumulative", other_end=True),
    walk("known (alone)", KNOWN, "alone", row=2),
    claims=[claim("ratio", "prism", "static", paper=2.0), claim("ratio", "prism", "gone")],
    sample={"rule": "bisect", "each": "system"},
)
STEPPED = measured(
    *ratio_rows("fair default", 4.0, 4.0),
    *ratio_rows("known (cumulative)", 8.0, 2.0),
    *ratio_rows("most (cumulative)", 8.0, 1.0),
    *ratio_rows("known (alone)", 8.0, 4.0),
)


def test_steps_walk_from_the_start_and_stand_alone(tmp_path: Path) -> None:
    table, facts = STEPPED, STEPS
    points = matrix.points(table, facts)
    assert list(points["ratio"].unique()) == ["prism / static"]  # of systems that take part
    assert list(points["step"]) == [0, 1, 2, 1]
    assert list(points["standing"]) == ["equal within 25 %", "ahead", "ahead", "ahead"]
    assert list(points["mean"]) == pytest.approx([1.0, 4.0, 8.0, 2.0])
    assert [points.loc[1, f"at_{k}"] for k in (1, 2, 3)] == [1.0, 4.0, 16.0]  # differences stand in the CSV
    assert points.loc[1, "gap_2"] == pytest.approx(100 * (met(4.0, 8.0) - met(4.0, 2.0)))
    with style.theme():
        figure = matrix.draw(table, facts)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["fair default", f"+ {KNOWN}", "+ most"]
    assert [label.get_text() for label in axis.get_xticklabels()] == [
        f"prism /\nstatic\n{after}\n(paper: 2x)" for after in (matrix.SO_FAR, matrix.ALONE)
    ]
    written_in = {text.get_position(): text.get_text() for text in axis.texts if text.get_text()}
    ratios = {(x, round(y)): text for (x, y), text in written_in.items() if text.endswith("x")}
    assert ratios == {(0, 0): "= 1.00x", (0, 1): "+ 4.00x", (0, 2): "+ >8.00x", (1, 1): "+ 2.00x"}
    for fact in (
        "Rates: 1, 16 req/s, then by bisection of each system's crossing.",
        "At least 2,700 requests a point, over its seeds.",
        "Ratios of the rates at which 99 % TTFT is held.",
    ):
        assert fact in written(figure)
    assert len(fig_study.render(stored(tmp_path / "s", table, facts), tmp_path / "f", "x")) == 3
    with pytest.raises(UserError, match="no claim of this study is a ratio"):
        matrix.draw(table, replace(facts, claims=()))


MATRIX = about(
    "matrix",
    panel("8B, TTFT 10 s", axis="rate_rps"),
    panel("narrow", axis="rate_rps", row=1),
    panel("32B, TTFT 2 min", axis="rate_rps", row=2, xs=[16.0]),
    claims=[claim("ratio", "prism", "static")],
)
RATIOS = measured(
    *ratio_rows("8B, TTFT 10 s", 8.0, 2.0),
    *ratio_rows("narrow", 8.0, 1.0, infeasible="no room"),
    *ratio_rows("32B, TTFT 2 min", 90.0, 90.0),
)


def test_a_matrix_is_filled_by_who_is_ahead() -> None:
    with style.theme():
        figure = matrix.draw(RATIOS, MATRIX)
    (axis,) = figure.axes
    assert "Verdicts are corrected together (Holm)." in written(figure)
    texts = [text.get_text() for text in axis.texts]
    assert texts[:1] + texts[2:] == ["+ 4.00x", "=  (0.0, 0.0, 0.0)", "points at 1, 4, 16 req/s"]
    filled = [patch.get_facecolor() for patch in axis.patches]
    assert len(set(filled)) == 2  # what has no room is no row
    assert "Left out, as one of the two never fits: narrow." in written(figure)


def test_cases_of_a_condition_are_one_cell_of_a_matrix() -> None:
    """Two halves of a log in one row: the span of their ratios, on no colour; the caption counts what was left out."""
    log = {"axis": "rate_rps", "name": "a log", "tier": "composed", "trace": "log", "xs": [1.0, 16.0]}
    log |= {"left_out": "5 of 90 requests beyond 8 tokens"}
    facts = about(
        "matrix",
        panel("one", half="first", **log),
        panel("two", half="second", **log),
        claims=[claim("ratio", "prism", "static")],
    )
    table = measured(*ratio_rows("one", 8.0, 2.0), *ratio_rows("two", 4.0, 8.0))
    with style.theme():
        figure = matrix.draw(table, facts)
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == ["0.50 to 4.00x", "1 of 2 above 1"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a log"]
    assert [patch.get_facecolor() for patch in axis.patches] == [mpl.colors.to_rgba(style.FILLS["one case"].color)]
    assert "Left out: 5 of 90 requests beyond 8 tokens of log." in written(figure)
    assert "Left out: 5 of 90 requests beyond 8 tokens of log." in matrix.full_caption(table, facts)
    assert len(matrix.points(table, facts)) == 2  # apart


def test_hatches_and_lightness_tell_standings_apart_in_grey() -> None:
    kinds = {(fill.hatch, int(lightness(fill.color)) // 4) for fill in style.FILLS.values()}
    assert len(kinds) == len(style.FILLS) == len(ranking.STANDINGS)


def test_a_fleet_begins_with_the_fewest_gpus_of_each_system_beside_the_papers() -> None:
    claims = [claim("fewest", "static", "prism", paper=2.0, on={"slo": "5xP95"})]
    facts = fleet(range(8), ("5xP95", "10xP95"), claims=claims)
    needed = {("5xP95", "prism"): 4, ("5xP95", "static"): 16, ("10xP95", "prism"): 2, ("10xP95", "static"): 99}
    table = of_fleet(facts, needed)
    with style.theme():
        first, curves = lines.pages(table, facts)
    assert len(first.axes) == fewest.LOADS
    axis = first.axes[0]
    marks = [(xs(line)[0], line.get_marker(), line.get_markerfacecolor()) for line in axis.lines]
    assert [x for x, marker, _ in marks if marker in fewest.MARKS[:2]] == [4.0, 2.0, 16.0, 16.0]
    assert [x for x, marker, _ in marks if marker == "x"] == [8.0]  # half of static's 16, in prism's row
    assert marks[-1][2] == "white"  # a bound
    assert [text.get_text() for text in axis.texts] == ["4 / ≤2", "16 / >16"]
    assert axis.get_title("left") == "(a) hyperbolic-like, 6 req/s"
    assert "Fewest GPUs on which the mean of 3 seeds meets 99 % of TTFT SLOs" in written(first)
    assert max(len(text.get_text().split()) for text in first.texts) <= caption.WORDS
    prism = lines.points(table, facts).query("label == 'prism'").drop_duplicates("slo")
    assert dict(zip(prism["slo"], prism["crossing"], strict=True)) == {"5xP95": 4, "10xP95": 2}
    ours = style.SYSTEMS["prism"].color
    dropped = [[xs(line)[0] for line in axis.lines if drops(line) and line.get_color() == ours] for axis in curves.axes]
    assert dropped == [[4.0], []] * 8  # 2 is the least that was tried: a bound
    assert "SLO 5 x P95 alone SLO 10 x P95 alone" in written(curves)
    assert "GPUs (8 models, hyperbolic-like, 6 req/s)" in written(curves)


def part_rows(label: str, small: float, large: float) -> Iterator[dict[str, Any]]:
    for seed in range(3):
        run = {"condition": "busy", "x": 4.0, "label": label, "seed": seed}
        pooled = (small + large) / 2 - seed / 1000
        yield {**run, "values": {"ttft": pooled, "offered_rps": 6.0}}
        for model, share in (("small", small), ("large", large)):
            yield {**run, "over": "model", "model": model, "values": {"ttft": share}}


PARTS = about(
    "parts",
    panel("busy"),
    systems=["prism", "prism+evict=never", "prism+way=cold"],
    claims=[
        claim("difference", "prism", "prism+evict=never", subject="eviction"),
        claim("difference", "prism", "prism+way=cold"),
    ],
)
WITHOUT = measured(
    *part_rows("prism", 1.0, 0.9), *part_rows("prism+evict=never", 0.9, 0.4), *part_rows("prism+way=cold", 1.0, 0.9)
)


def test_parts_lose_points_and_name_the_model_that_loses_most() -> None:
    table, facts = WITHOUT, PARTS
    points = parts.points(table, facts).set_index("part")
    lost = points.loc["eviction"]
    assert (lost["lost"], lost["most"], lost["model"]) == (pytest.approx(30.0), pytest.approx(50.0), "large")
    assert (lost["whole"], lost["offered_rps"], lost["n"]) == (pytest.approx(94.9), 6.0, 12)
    assert points.loc["prism+way=cold", "lost"] == 0.0  # without words of its own it is called by its system
    with style.theme():
        figure = parts.draw(table, facts)
    (axis,) = figure.axes
    assert axis.get_title() == "hyperbolic-like\n6 req/s, 94.9 %"
    assert [label.get_text() for label in axis.get_yticklabels()] == ["eviction", "prism+way=cold"]
    told, chance = axis.patches
    assert (told.get_facecolor(), chance.get_facecolor()) == (mpl.colors.to_rgba(parts.LOST), (1.0, 1.0, 1.0, 1.0))
    with pytest.raises(UserError, match="no part of a system was switched off"):
        parts.draw(table, replace(facts, claims=()))
