"""Ratios of the rates that two systems sustain, as a coloured table: rows are conditions or steps, columns are pairs.

Steps lead from a fair default to a paper's setting. One column has the ratio under all assumptions so far, another the
ratio under each assumption alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from harness.policy.types import UserError
from harness.rows import estimate, ranking
from harness.rows.about import About
from harness.rows.estimate import NONE, RATIO
from harness.rows.ranking import NO_ROOM, Claimed, Standing
from plots import page, style
from plots.caption import CORRECTED, brief, caption, definition, differences, flat, sampling

Pair = tuple[str, str]  # the systems of a ratio
Column = tuple[Pair, bool]  # a ratio, with all steps so far (False) or with each alone
Cells = dict[tuple[Column, str], list[Claimed]]  # keyed by column and a condition's name
ROW_IN, HEAD_IN = 0.3, 0.11  # heights of a row, and of a line of the pairs' names
NAMED = 28  # letters of a line of a row's name
CASES = "single windows: least to most, no interval"
SO_FAR, ALONE = "all steps so far", "this step alone"


# ------------------------------------------------------------------ what is drawn


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each (ratio, panel), with the number of the panel's step from 0 on."""
    steps = _steps(facts)
    return pd.DataFrame([_row(claimed, steps, facts.seeds) for claimed in ranking.claimed(table, facts)])


def _steps(facts: About) -> list[str]:
    """List the conditions' names, in the order of the study."""
    return list(dict.fromkeys(panel["name"] for panel in facts.panels))


def _row(claimed: Claimed, steps: Sequence[str], seeds: int) -> dict[str, Any]:
    """Return one panel's ratio as cells of a table; if `mean` is None, `note` says why."""
    claim, panel, standing = claimed
    e = standing.ratio
    row = {key: panel[key] for key in ("condition", "name", "kind", "origin")}
    row |= {"step": steps.index(panel["name"]), "ratio": " / ".join(_pair(claimed)), "paper": claim["paper"]}
    row |= {"other_end": panel.get("other_end", False)}  # is absent from older facts
    row |= {"mean": e and e.mean, "low": e and e.low, "high": e and e.high, "n": seeds, "sign": e.sign if e else "="}
    row |= {"standing": standing.says, "p": standing.p, "flat": standing.flat, "note": standing.note}
    return row | differences("gap", standing)


def _pair(claimed: Claimed) -> Pair:
    return claimed.claim["system"], claimed.claim["over"]


def _cells(shown: Sequence[Claimed], facts: About) -> tuple[Cells, list[str]]:
    """Group ratios by cell of the figure, and list the names of rows and columns that are left out.

    A cell has several ratios if its condition has several cases. A row or column is left out if, in every one of its
    cases, the models do not fit on the GPUs. If this is so for all rows, none is left out. A step may have a second
    panel, for the other end of its band. This panel has no cell if the step's own panel is shown.
    """
    names, steps = {each.panel["name"] for each in shown}, _steps(facts)
    cells: Cells = {}
    for each in sorted(shown, key=lambda each: steps.index(each.panel["name"])):
        name = each.panel["name"]
        base, end, _ = name.partition("; ")
        if not (each.panel.get("other_end") and end and base in names):
            cells.setdefault(((_pair(each), each.panel["kind"] == "alone"), name), []).append(each)
    some = {key for key, cases in cells.items() if any(c.standing.says != NO_ROOM for c in cases)} or cells.keys()
    columns, named = {column for column, _ in some}, {name for _, name in some}
    pairs = {pair for pair, _ in columns}
    gone = [name for _, name in cells if name not in named]
    gone += [" / ".join(pair) for (pair, _), _ in cells if pair not in pairs]
    kept = {key: cases for key, cases in cells.items() if key[0] in columns and key[1] in named}
    return kept, list(dict.fromkeys(gone))


# ------------------------------------------------------------------ the figure


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the table, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = ranking.claimed(table, facts)
    if not shown:
        raise UserError("nothing to draw: no claim of this study is a ratio of two of its systems")
    cells, gone = _cells(shown, facts)
    columns, names = list(dict.fromkeys(key[0] for key in cells)), list(dict.fromkeys(key[1] for key in cells))
    columns.sort(key=lambda column: [_pair(each) for each in shown].index(column[0]))
    steps = {pair for pair, alone in columns if alone}
    after = {False: [SO_FAR], True: [ALONE]}
    heads = [
        "\n".join([*_names(pair, facts), *(after[alone] if pair in steps else ()), *_paper(shown, pair)])
        for pair, alone in columns
    ]
    rows = [textwrap.fill(f"+ {name}" if steps and k else name, NAMED) for k, name in enumerate(names)]
    firsts = {style.called(facts.texts.get(ours, ours).partition("+")[0]) for (ours, _), _ in columns}
    first = firsts.pop() if len(firsts) == 1 else "the first"
    drawn = {each.standing.says for cases in cells.values() for each in cases}
    labels = {says: CASES if says == ranking.CASE else style.signed(says, first) for says in drawn}
    handles = [
        Patch(facecolor=fill.color, hatch=fill.hatch, edgecolor="#909090", linewidth=0.4, label=labels[says])
        for says, fill in style.FILLS.items()
        if says in drawn
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
        cell(axis, columns.index(column), names.index(name), [each.standing for each in cases], wide)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_xticks(range(len(columns)), heads, fontsize=page.fitting("\n".join(heads), wide, 6.5))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    return figure


def _names(pair: Pair, facts: About) -> list[str]:
    """Return the lines of a column's head: the names of the two systems whose ratio the column shows.

    In a study of steps, the names leave out the fields that the steps change. In a matrix, the names have all fields.
    """
    texts = (facts.texts.get(name, name) for name in pair)
    first, over = (text.partition("+")[0] if facts.layout == "steps" else text for text in texts)
    return [f"{style.called(first)} /", style.called(over)]


def _paper(shown: Sequence[Claimed], pair: Pair) -> list[str]:
    """Return the line of a column's head that states the paper's ratio; no line if the paper has several or none."""
    papers = (each.claim["paper"] for each in shown if _pair(each) == pair)
    stated = {x for x in papers if isinstance(x, int | float)}
    return [f"(paper: {stated.pop():g}x)"] if len(stated) == 1 else []


def _range(axis: Axes, x: int, y: int, standings: Sequence[Standing], wide_in: float) -> None:
    """Write the range of several cases' ratios in a cell and, below it, the number of ratios above 1."""
    alike = {standing.says for standing in standings} == {NO_ROOM}
    c, noted = ranking.cases(standings), {standing.note for standing in standings}
    text = estimate.span(c.least, c.most, RATIO) if c else noted.pop() if len(noted) == 1 else ""
    under = f"{c.above} of {c.of} above 1" if c else ""
    _fill(axis, x, y, NO_ROOM if alike else ranking.CASE, text or NONE, under, wide_in)


def _cell(axis: Axes, x: int, y: int, standings: Sequence[Standing], wide_in: float) -> None:
    """Draw a cell with a ratio, the ratio's interval below, and the colour and the sign of the cell's verdict."""
    (standing,) = standings
    e = standing.ratio
    bare = standing._replace(ratio=e and replace(e, low=None, high=None))
    text, under = style.verdict(bare).removesuffix(" points)"), ""
    if standing.flat and standing.differences:  # a ratio says nothing
        text, under = f"{text})", f"points at {', '.join(f'{x:.3g}' for x, _ in standing.differences)} req/s"
    elif e is not None and (e.low, e.high) != (None, None):
        under = e.ends(RATIO)
    _fill(axis, x, y, standing.says, text, under, wide_in)


def _fill(axis: Axes, x: int, y: int, says: str, text: str, under: str, wide_in: float) -> None:
    """Fill a cell with the colour and hatch of its verdict, and write its text on a plain background."""
    fill = style.FILLS[says]
    look: dict[str, Any] = {"facecolor": fill.color, "hatch": fill.hatch, "edgecolor": "#c4c4c4", "linewidth": 0.5}
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
    box = {"facecolor": fill.color, "edgecolor": "none", "pad": 0.8}
    for words, at, most in ((text, -0.16 if under else 0.0, 7), (under, 0.24, 5.2)):
        points = page.fitting(words, wide_in, most)
        axis.text(x, y + at, words, ha="center", va="center", fontsize=points, bbox=box if words else None)


# ------------------------------------------------------------------ the caption


def full_caption(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption for the CSV; it also says how rates were chosen."""
    return caption(table, facts, "mean and 95 % interval", _what(facts), *sampling(table, facts), CORRECTED, note=note)


def _caption(table: pa.Table, facts: About, note: str, shown: Sequence[Claimed], gone: Sequence[str]) -> str:
    """Write the short caption below the figure."""
    varied = [style.called(text) for text in facts.texts.values() if "+" in text]
    return brief(
        table,
        facts,
        _what(facts),
        CORRECTED,
        note,
        f"Left out, as one of the two never fits: {', '.join(gone)}." * bool(gone),
        flat((each.standing for each in shown), facts.panels),
        f"At the start: {', '.join(varied)}." * bool(varied and facts.layout == "steps"),
        *facts.notes,
        *sampling(table, facts),
        "Intervals are 95 %.",
    )


def _what(facts: About) -> str:
    return f"Ratios of the rates at which {100 * facts.level:g} % {definition(facts.definitions[0])} is held."
