"""Ratios of the rates that two systems hold: a coloured table of conditions and pairs of systems."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from harness.policy.types import UserError
from harness.rows import crossings, estimate
from harness.rows.about import About
from harness.rows.crossings import STANDINGS, Standing
from harness.rows.estimate import NONE, POINTS, RATIO, Estimate
from plots import form, style, verdicts
from plots.steps import caption_of_ratios, points, ratios, systems, told
from plots.verdicts import FILLS, Fill

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

__all__ = ["FILLS", "draw", "points", "told"]  # what is drawn are the ratios that steps have

Row = Mapping[str, Any]  # of `ratios`
ROW_IN, HEAD_IN, NAMES = (
    0.34,
    0.13,
    0.2,
)  # height of a row and of a line of the pairs' names; share of the width for names
CASES = "single windows: least to most, no interval"
NAMED = 14  # letters of a line of a pair's name
LETTERS = 120.0  # of 1 point, to an inch


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the table, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = ratios(table, facts)
    if not shown:
        raise UserError("nothing to draw: no claim of this study is a ratio of two of its systems")
    names, labels = (list(dict.fromkeys(row[key] for row in shown)) for key in ("name", "ratio"))
    text, foot = style.foot(caption_of_ratios(table, facts, note, shown), 178)
    foot += 0.06
    figure = Figure(figsize=(form.width(style.PAGE_IN), 1))
    pairs = [systems(label, facts) for label in labels]
    called = [
        "\n".join([f"{style.called(first)} /", *textwrap.wrap(style.called(over), NAMED)]) for first, over in pairs
    ]
    firsts = {first for first, _ in pairs}
    handles = _handles(
        {row["standing"] for row in shown}, style.called(firsts.pop()) if len(firsts) == 1 else "the first"
    )
    head = style.legend(figure, handles, min(4, len(handles)), handlelength=1.8, columnspacing=1.6)
    head += HEAD_IN * (1 + max(name.count("\n") for name in called))
    height = head + ROW_IN * len(names) + foot
    figure.set_size_inches(form.width(style.PAGE_IN), height)
    axis = figure.add_axes((NAMES, foot / height, 0.995 - NAMES, ROW_IN * len(names) / height))
    for (label, name), rows in _cells(shown).items():
        cell = _cell if len(rows) == 1 else _range
        cell(axis, labels.index(label), names.index(name), rows, len(labels))
    axis.set_xlim(0, len(labels))
    axis.set_ylim(len(names), 0)
    letters = max(len(line) for name in called for line in name.split("\n"))
    axis.set_xticks([k + 0.5 for k in range(len(labels))], called, fontsize=_size(6.5, letters, len(labels)))
    axis.set_yticks([k + 0.5 for k in range(len(names))], [textwrap.fill(name, 24) for name in names])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    style.write_foot(figure, text)
    return figure


def _handles(shown: set[str], first: str) -> list[Patch]:
    return [
        Patch(facecolor=fill.color, hatch=fill.hatch, edgecolor="#909090", linewidth=0.4,
              label=CASES if says == crossings.CASE else verdicts.words(says, first))
        for says, fill in FILLS.items()
        if says in shown
    ]  # fmt: skip


def _cells(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group the rows by cell, a ratio and a condition: several are the cases of one."""
    by_cell: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row["ratio"], row["name"]), []).append(row)
    return by_cell


def _range(axis: Axes, x: int, y: int, rows: Sequence[Row], columns: int) -> None:
    """Draw the range of several cases over how many of them are above 1."""
    alike = {row["standing"] for row in rows} == {crossings.NO_ROOM}
    under = _filled(axis, x, y, FILLS[crossings.NO_ROOM if alike else crossings.CASE])
    c = crossings.cases([Standing(Estimate(row["mean"], None, None, 1, row["sign"]), row["standing"], "")
                         for row in rows if row["mean"] is not None])  # fmt: skip
    noted = {row["note"] for row in rows}
    text = estimate.span(c.least, c.most, RATIO) if c else noted.pop() if len(noted) == 1 else ""
    text = text or NONE
    axis.text(x + 0.5, y + 0.36, text, ha="center", va="center", fontsize=_size(7, len(text), columns), bbox=under)
    if c is not None:
        axis.text(x + 0.5, y + 0.72, f"{c.above} of {c.of} above 1", ha="center", va="center", fontsize=5.2,
                  color="#303030", bbox=under)  # fmt: skip


def _filled(axis: Axes, x: int, y: int, fill: Fill) -> dict[str, Any]:
    """Fill a cell; returns what lies under its words, so that no hatch is behind them."""
    axis.add_patch(Rectangle((x, y), 1, 1, facecolor=fill.color, hatch=fill.hatch, edgecolor="#c4c4c4", linewidth=0.5))
    return {"facecolor": fill.color, "edgecolor": "none", "pad": 1.0}


def _cell(axis: Axes, x: int, y: int, rows: Sequence[Row], columns: int) -> None:
    """Draw a ratio over its interval, on the colour and behind the sign of its standing."""
    (row,) = rows
    under = _filled(axis, x, y, FILLS[row["standing"]])
    text, bounds, size = textwrap.fill(row["note"], 20), "", 5.2
    if row["flat"] and row["gaps"]:  # a ratio says nothing
        text = ", ".join(gap.times(100).text(POINTS, spread=False) for _, gap in row["gaps"])
        bounds = f"points at {', '.join(f'{x:.3g}' for x, _ in row['gaps'])} req/s"
        size = _size(7, len(text) + 4, columns)
    elif row["mean"] is not None:
        e = Estimate(row["mean"], row["low"], row["high"], row["n"], row["sign"])
        text, size = e.text(RATIO, spread=False), 7
        bounds = e.ends(RATIO) if (e.low, e.high) != (None, None) else ""
    axis.text(x + 0.5, y + (0.36 if bounds else 0.5), f"{STANDINGS[row['standing']][0]} {text}".strip(), ha="center",
              va="center", fontsize=size, bbox=under)  # fmt: skip
    if bounds:
        axis.text(x + 0.5, y + 0.72, bounds, ha="center", va="center", fontsize=_size(5.2, len(bounds), columns),
                  color="#303030", bbox=under)  # fmt: skip


def _size(points: float, letters: int, columns: int) -> float:
    """Return the type size in points at which so many letters fit one of the columns, at most `points`."""
    return min(points, LETTERS * (1.0 - NAMES) * form.width(style.PAGE_IN) / columns / max(1, letters))
