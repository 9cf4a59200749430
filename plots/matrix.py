"""Ratios of the rates that two systems hold: a coloured table of conditions, or of steps, and pairs of systems.

Steps lead from a fair default to a paper's setting: one column has the ratio after all assumptions so far, another the
ratio after each assumption alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.patches import Patch, Rectangle

from harness.policy.types import UserError
from harness.rows import estimate, ranking
from harness.rows.about import About
from harness.rows.estimate import NONE, RATIO, Estimate
from harness.rows.ranking import NO_ROOM, Standing
from plots import page, style
from plots.caption import CORRECTED, brief, caption, definition, flat, sampling

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # a row of `ratios`
ROW_IN, HEAD_IN = 0.3, 0.11  # heights of a row, and of a line of the pairs' names
NAMED = 28  # letters of a line of a row's name
CASES = "single windows: least to most, no interval"
SO_FAR, ALONE = "all steps so far", "this step alone"


# ------------------------------------------------------------------ what is drawn


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row for each (ratio, panel), with the position of its step (0: the start)."""
    rows = [
        {**{key: value for key, value in row.items() if key != "gaps"}, **_gaps(row["gaps"])}
        for row in ratios(table, facts)
    ]
    return pd.DataFrame(rows)


def _gaps(gaps: Sequence[tuple[float, Estimate]]) -> dict[str, float | None]:
    """Return differences of attainment at three rates, in points, as columns."""
    columns: dict[str, float | None] = {}
    for k, (x, gap) in enumerate(gaps, 1):
        columns |= {f"at_{k}": x, f"gap_{k}": 100 * gap.mean}
        ends = {"low": gap.low, "high": gap.high}
        columns |= {f"gap_{k}_{end}": None if bound is None else 100 * bound for end, bound in ends.items()}
    return columns


def ratios(table: pa.Table, facts: About) -> list[dict[str, Any]]:
    """Return every ratio that the study claims, on each of its panels; if `mean` is None, `note` says why."""
    names = list(dict.fromkeys(panel["name"] for panel in facts.panels))
    rows = []
    for claim, panel, standing in ranking.claimed(table, facts):
        e = standing.ratio
        rows.append({**{key: panel[key] for key in ("condition", "name", "kind", "origin")},
                     "step": names.index(panel["name"]), "ratio": f"{claim['system']} / {claim['over']}",
                     "paper": claim["paper"], "other_end": panel.get("other_end", False),  # absent from older facts
                     "mean": e and e.mean, "low": e and e.low, "high": e and e.high, "n": facts.seeds,
                     "sign": e.sign if e else "=", "standing": standing.says, "p": standing.p, "flat": standing.flat,
                     "gaps": standing.differences, "note": standing.note})  # fmt: skip
    return rows


Cells = dict[tuple[tuple[str, bool], str], list[Row]]  # keyed by column (a ratio, alone or not) and a condition's name


def _cells(rows: Sequence[Row]) -> tuple[Cells, list[str]]:
    """Group the rows by cell, which has several if a condition has several cases; return too what is left out.

    Left out are rows and columns of the figure in which nothing fits. The other end of a step has no cell.
    """
    names = {row["name"] for row in rows}
    cells: Cells = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        base, end, _ = row["name"].partition("; ")
        if not (row["other_end"] and end and base in names):
            cells.setdefault(((row["ratio"], row["kind"] == "alone"), row["name"]), []).append(row)
    some = {key for key, cases in cells.items() if any(row["standing"] != NO_ROOM for row in cases)} or cells.keys()
    columns, named = {column for column, _ in some}, {name for _, name in some}
    gone = [name for _, name in cells if name not in named] + [
        ratio for (ratio, _), _ in cells if ratio not in {ratio for ratio, _ in columns}
    ]
    shown = {key: cases for key, cases in cells.items() if key[0] in columns and key[1] in named}
    return shown, list(dict.fromkeys(gone))


# ------------------------------------------------------------------ the figure


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the table, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = ratios(table, facts)
    if not shown:
        raise UserError("nothing to draw: no claim of this study is a ratio of two of its systems")
    cells, gone = _cells(shown)
    columns, names = list(dict.fromkeys(key[0] for key in cells)), list(dict.fromkeys(key[1] for key in cells))
    columns.sort(key=lambda column: [row["ratio"] for row in shown].index(column[0]))
    steps = {ratio for ratio, alone in columns if alone}
    after = {False: [SO_FAR], True: [ALONE]}
    heads = [
        "\n".join([*_pair(ratio, facts), *(after[alone] if ratio in steps else ()), *_paper(shown, ratio)])
        for ratio, alone in columns
    ]
    rows = [textwrap.fill(f"+ {name}" if steps and k else name, NAMED) for k, name in enumerate(names)]
    firsts = {style.called(systems(ratio, facts)[0].partition("+")[0]) for ratio, _ in columns}
    first = firsts.pop() if len(firsts) == 1 else "the first"
    handles = [
        Patch(
            facecolor=fill.color,
            hatch=fill.hatch,
            edgecolor="#909090",
            linewidth=0.4,
            label=CASES if says == ranking.CASE else style.signed(says, first),
        )
        for says, fill in style.FILLS.items()
        if says in {row["standing"] for cases in cells.values() for row in cases}
    ]
    high = 0.08 + HEAD_IN * (1 + max(head.count("\n") for head in heads))
    figure, ((axis,),) = page.panels(
        [(1, ROW_IN * len(names))],
        left_in=page.names_in(rows, 6.5),
        right_in=0.05,
        above_in=high,
        below_in=0.06,
        handles=handles,
        text=_caption(table, facts, note, shown, gone),
    )
    page.rows(axis, rows, points=6.5)
    wide = page.length_in(axis.xaxis) / len(columns) - 0.08
    for (column, name), cases in cells.items():
        cell = _cell if len(cases) == 1 else _range
        cell(axis, columns.index(column), names.index(name), cases, wide)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_xticks(range(len(columns)), heads, fontsize=page.fitting("\n".join(heads), wide, 6.5))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    return figure


def systems(ratio: str, facts: About) -> tuple[str, str]:
    """Return the two systems of a ratio as they are at the start, with presets and fields."""
    first, _, over = ratio.partition(" / ")
    return facts.texts.get(first, first), facts.texts.get(over, over)


def _pair(ratio: str, facts: About) -> list[str]:
    """Return the lines of a column's head: the two systems, without fields that steps change."""
    first, over = (name.partition("+")[0] if facts.layout == "steps" else name for name in systems(ratio, facts))
    return [f"{style.called(first)} /", style.called(over)]


def _paper(rows: Sequence[Row], ratio: str) -> list[str]:
    """Say which ratio the paper has, where that is one number for all of a column."""
    stated = {x for row in rows if row["ratio"] == ratio and isinstance(x := row["paper"], int | float)}
    return [f"(paper: {stated.pop():g}x)"] if len(stated) == 1 else []


def _range(axis: Axes, x: int, y: int, rows: Sequence[Row], wide_in: float) -> None:
    """Draw the range of several cases over how many of them are above 1."""
    alike = {row["standing"] for row in rows} == {NO_ROOM}
    c = ranking.cases(
        [
            Standing(Estimate(row["mean"], None, None, 1, row["sign"]), row["standing"], "")
            for row in rows
            if row["mean"] is not None
        ]
    )
    noted = {row["note"] for row in rows}
    text = estimate.span(c.least, c.most, RATIO) if c else noted.pop() if len(noted) == 1 else ""
    under = f"{c.above} of {c.of} above 1" if c else ""
    _fill(axis, x, y, NO_ROOM if alike else ranking.CASE, text or NONE, under, wide_in)


def _cell(axis: Axes, x: int, y: int, rows: Sequence[Row], wide_in: float) -> None:
    """Draw a ratio over its interval, on the colour and behind the sign of its standing."""
    (row,) = rows
    text, under = style.verdict(_standing(row)).removesuffix(" points)"), ""
    if row["flat"] and row["gaps"]:  # a ratio says nothing
        text, under = f"{text})", f"points at {', '.join(f'{x:.3g}' for x, _ in row['gaps'])} req/s"
    elif row["mean"] is not None and (row["low"], row["high"]) != (None, None):
        under = Estimate(row["mean"], row["low"], row["high"], row["n"], row["sign"]).ends(RATIO)
    _fill(axis, x, y, row["standing"], text, under, wide_in)


def _fill(axis: Axes, x: int, y: int, says: str, text: str, under: str, wide_in: float) -> None:
    """Fill a cell by its verdict, and write its words, with no hatch behind them."""
    fill = style.FILLS[says]
    axis.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=fill.color, hatch=fill.hatch, edgecolor="#c4c4c4", linewidth=0.5)
    )
    box = {"facecolor": fill.color, "edgecolor": "none", "pad": 0.8}
    for words, at, most in ((text, -0.16 if under else 0.0, 7), (under, 0.24, 5.2)):
        points = page.fitting(words, wide_in, most)
        axis.text(x, y + at, words, ha="center", va="center", fontsize=points, bbox=box if words else None)


# ------------------------------------------------------------------ the caption


def _standing(row: Row) -> Standing:
    """Return the standing of a row with its mean alone, as the interval is told below it."""
    e = None if row["mean"] is None else Estimate(row["mean"], None, None, row["n"], row["sign"])
    return Standing(e, row["standing"], row["note"], flat=row["flat"], differences=row["gaps"])


def full_caption(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, with the choice of rates, which the CSV holds."""
    return caption(table, facts, "mean and 95 % interval", _what(facts), *sampling(table, facts), CORRECTED, note=note)


def _caption(table: pa.Table, facts: About, note: str, shown: Sequence[Row], gone: Sequence[str]) -> str:
    """Write the short caption below the figure."""
    varied = [style.called(text) for text in facts.texts.values() if "+" in text]
    return brief(
        table,
        facts,
        _what(facts),
        CORRECTED,
        note,
        f"Left out, as one of the two never fits: {', '.join(gone)}." * bool(gone),
        flat(_standing(row) for row in shown),
        f"At the start: {', '.join(varied)}." * bool(varied and facts.layout == "steps"),
        *facts.notes,
        *sampling(table, facts),
        "Intervals are 95 %.",
    )


def _what(facts: About) -> str:
    return f"Ratios of the rates at which {100 * facts.level:g} % {definition(facts.definitions[0])} is held."
