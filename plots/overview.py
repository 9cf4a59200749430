"""Overview of a study: the point at which each system crosses the level, and which system is ahead by how much."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.rows import by_window, crossings, ranking
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from harness.rows.ranking import Standing
from harness.rows.statistics import Crossing
from plots import page, style
from plots.caption import AND_OR, CORRECTED, brief, claims_of, definition, differences, flat, parts_of

MOST = 8  # panels of a picture
ACROSS = 2  # panels in a line
WHOLE = 0.9995  # attainment that prints as 100.0 %
ROW_IN = 0.135  # height of a system's row
HALVES = {"first": 0.26, "second": -0.26}  # share of a row above its middle
CARETS: Mapping[str, str | int] = {"<": 4, ">": 5}  # point to where a bound may go
UNITS = {
    "rate_scale": "requests per second",
    "rate_rps": "requests per second",
    "slo_scale": "lowest SLO scale",
    "gpus": "fewest GPUs",
    "models": "models",
}
VERDICT_POINTS = 5.2  # type beside a row
GONE: Mapping[str, Any] = {"fontsize": 5.2, "color": page.GREY, "style": "italic"}  # words in place of marks
LEAST = 2.0  # factor that an axis spans
FAR = 30.0  # factor beyond the crossings where intervals and papers are cut


@dataclass(frozen=True)
class Cell:
    """A condition on a trace, drawn as one panel of the overview.

    It has the study's panel on a trace that is fitted to a real one, the panels on the halves of the real trace, or
    both.
    """

    panels: tuple[Panel, ...]  # the fitted one, if any
    halves: Mapping[str, Panel]
    definition: str

    @property
    def every(self) -> tuple[Panel, ...]:
        """The cell's panels, beginning with the one whose facts describe the cell."""
        return (*self.panels, *self.halves.values())

    @property
    def any(self) -> Panel:
        """The panel whose facts describe the cell."""
        return self.every[0]


@dataclass
class Marks:
    """Marks of one system in one cell of the overview."""

    label: str
    at: Crossing | None  # None: it was not run on fitted windows
    halves: dict[str, Crossing]
    gone: str  # "does not fit", where it does not at all
    standing: Standing | None = None  # the study's first system beside it
    paper: list[tuple[float, float]] = field(default_factory=list)  # x that the paper states, from and to


# ------------------------------------------------------------------ what is shown


def cells(facts: About) -> list[Cell]:
    """Return all cells of a study, in the study's order.

    A cell shows the definition of attainment of its first claim, or else the study's first definition. The halves of a
    real trace belong to the cell of the trace that was fitted to it. For example, hyperbolic belongs to the cell of
    hyperbolic-like.
    """
    whole = [panel for panel in facts.panels if not panel.get("half")]
    halves: dict[tuple[Any, ...], dict[str, Panel]] = {}
    for panel in facts.panels:
        if panel.get("half"):
            halves.setdefault((*_place(panel), panel["trace"]), {})[panel["half"]] = panel
    every = []
    for panel in whole:
        real = next((key for key in halves if key[:-1] == _place(panel) and _fitted(panel["trace"], key[-1])), None)
        every.append(Cell((panel,), halves.pop(real) if real else {}, _definition(panel, facts)))
    every += [Cell((), panels, _definition(next(iter(panels.values())), facts)) for panels in halves.values()]
    return sorted(every, key=lambda cell: (cell.any["row"], cell.any["column"]))


def _place(panel: Panel) -> tuple[Any, ...]:
    return tuple(panel[key] for key in ("row", "axis", "models", "gpus", "slo", "slo_scale"))


def _fitted(trace: str, real: str) -> bool:
    """Tell whether a generated trace is fitted to a real one, as hyperbolic-like is to hyperbolic."""
    name, like, _ = trace.partition("-like")
    return bool(like) and re.split(r"[+-]", real)[0] == name


def _definition(panel: Panel, facts: About) -> str:
    definitions = (claim["definition"] for claim in claims_of(panel, facts) if claim["definition"])
    return str(next(definitions, facts.definitions[0]))


def alike(table: pa.Table, panel: Panel, definition: str, labels: Sequence[str]) -> bool:
    """Tell whether every system is at 100.0 %, as printed, at every x of a panel. Such a panel shows no differences."""
    rows = crossings.of_panel(table, panel)
    shares = [e.mean for label in labels for e in crossings.attained(rows, panel["axis"], label, definition).values()]
    return all(share >= WHOLE for share in shares)


def chosen(table: pa.Table, facts: About) -> list[Cell]:
    """Return the cells to draw, at most `MOST`, in the study's order.

    Cells in which all systems are at 100 % are left out. If too many remain, those on fitted traces are preferred to
    those with halves only. Among these, cells with claims are preferred. Then, of cells that differ only in the
    parameters of their trace, the first one is preferred.
    """
    telling = [
        cell
        for cell in cells(facts)
        if not all(alike(table, panel, cell.definition, facts.systems) for panel in cell.every)
    ]
    kin: dict[tuple[str, str], int] = {}
    ranks = list[tuple[bool, bool, int, int]]()
    for cell in telling:
        key = (cell.any["name"], cell.any["trace"].partition("+")[0])
        kin[key] = kin.get(key, -1) + 1
        ranks.append((not cell.panels, not claims_of(cell.any, facts), kin[key], len(ranks)))
    return [telling[k] for k in sorted(k for *_, k in sorted(ranks)[:MOST])]


def rows(table: pa.Table, facts: About, shown: Sequence[Cell]) -> list[list[Marks]]:
    """Return for each cell the marks of its systems; the verdicts of all cells are corrected together (Holm)."""
    by_cell = [_rows(table, facts, cell) for cell in shown]
    judged = [row for cell_rows in by_cell for row in cell_rows if row.standing is not None]
    standings = ranking.corrected([row.standing for row in judged if row.standing is not None])
    for row, standing in zip(judged, standings, strict=True):
        row.standing = standing
    return by_cell


def _rows(table: pa.Table, facts: About, cell: Cell) -> list[Marks]:
    level, first = facts.level, facts.systems[0]
    every = [(crossings.of_panel(table, panel), panel) for panel in cell.every]
    at, made = dict[str, Crossing](), list[Marks]()
    for label in facts.systems:
        if not any(label in part["label"].unique().to_pylist() for part, _ in every):
            continue
        gone = all((lost := by_window.unfit(part, label)) is not None and lost.every for part, _ in every)
        held = [
            None if gone else crossings.crossing(part, panel, label, cell.definition, level) for part, panel in every
        ]
        fitted = held.pop(0) if cell.panels else None
        halves = {half: c for half, c in zip(cell.halves, held, strict=True) if c is not None}
        row = Marks(label, fitted, halves, "does not fit" * gone)
        if _judged(cell) and label != first and not gone and first in at:
            row.standing = ranking.side_by_side(*every[0], (first, label), cell.definition, level)
        if row.at is not None:
            at[label] = row.at
        made.append(row)
    for row in made:
        row.paper = list(_papers(row.label, cell, at, facts))
    return made


def _papers(label: str, cell: Cell, at: Mapping[str, Crossing], facts: About) -> Iterator[tuple[float, float]]:
    """Yield the ranges of x, as (from, to), in which a paper's claims place a system.

    A range is the crossing that the paper states. If the paper states a ratio instead, it is our crossing of the other
    system, divided by that ratio.
    """
    static = [name for name in at if name.partition(":")[0] == "static"]
    best = max(static, key=lambda name: at[name].at.mean, default="")
    for claim in claims_of(cell.any, facts):
        ends = claim["paper"] if isinstance(claim["paper"], list | tuple) else [claim["paper"]] * 2
        if (claim["definition"] or facts.definitions[0]) != cell.definition:
            continue
        systems, others = (
            [best if name.startswith("best static") else name for name in AND_OR.split(claim[key])]
            for key in ("system", "over")
        )
        first = next((name for name in systems if name in at), "")
        if not claim["over"] and label in systems:
            yield min(ends), max(ends)
        elif label in others and first and min(ends) > 0:
            ours = at[first].at.mean
            yield ours / max(ends), ours / min(ends)


# ------------------------------------------------------------------ as a table


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each (condition, system).

    A row has the system's crossing, and its comparison with the first system: a ratio of crossings, and differences of
    attainment in points.
    """
    shown = chosen(table, facts)
    by_cell = zip(shown, rows(table, facts, shown), strict=True)
    pairs = [(cell, row) for cell, cell_rows in by_cell for row in cell_rows]
    return pd.DataFrame([line for cell, row in pairs for line in _lines(cell, row, facts.systems[0])])


def _lines(cell: Cell, row: Marks, first: str) -> Iterator[dict[str, Any]]:
    sides = {cell.panels[0]["condition"]: row.at} if cell.panels else {}
    sides |= {panel["condition"]: row.halves.get(half) for half, panel in cell.halves.items()}
    for condition, c in sides.items():
        line = {"condition": condition, "label": row.label, "crossing_of": cell.definition, "note": row.gone}
        line |= parts_of("crossing", c.at if c else None)
        standing = row.standing if cell.panels and condition == cell.panels[0]["condition"] else None
        if standing is not None:
            line |= {"over_it": first, "standing": standing.says, "p": standing.p, "flat": standing.flat}
            line |= parts_of("ratio", standing.ratio) | differences("points", standing)
        yield line


# ------------------------------------------------------------------ the figure


def draw(table: pa.Table, facts: About, note: str = "") -> Figure | None:
    """Draw the picture, a page wide; None where every system is at 100 % everywhere. Call within `style.theme()`."""
    shown = chosen(table, facts)
    if not shown:
        return None
    by_cell = rows(table, facts, shown)
    looks = style.looks(facts.systems)
    lines = [range(k, min(k + ACROSS, len(shown))) for k in range(0, len(shown), ACROSS)]
    names = [
        [label for label in facts.systems if any(row.label == label for k in line for row in by_cell[k])]
        for line in lines
    ]
    judged = [row.standing for rows in by_cell for row in rows if row.standing is not None]
    room = [page.words_in(style.verdict(standing), VERDICT_POINTS) for standing in judged]
    verdict_in = 0.15 + (0.15 + max(room) if room else 0.0)
    called = [style.called(name) for line in names for name in line]
    figure, axes = page.panels(
        [(len(line), ROW_IN * len(of)) for line, of in zip(lines, names, strict=True)],
        left_in=page.names_in(called),
        beside_in=verdict_in,
        above_in=0.34,
        below_in=0.32,
        handles=_handles(by_cell, facts.systems[0]),
        text=_caption(table, facts, judged, note),
    )
    for line, of, panels in zip(lines, names, axes, strict=True):
        for k, axis in zip(line, panels, strict=True):
            page.rows(axis, [style.called(name) for name in of], labelled=axis is panels[0], shaded=True)
            _panel(axis, shown[k], {row.label: row for row in by_cell[k]}, of, looks)
            _title(axis, page.LETTERS[k], shown[k], shown, facts, verdict_in)
    return figure


def _title(axis: Axes, letter: str, cell: Cell, shown: Sequence[Cell], facts: About, beside_in: float) -> None:
    panel, first = cell.any, style.called(facts.systems[0])
    name = f"({letter}) {_name(cell, facts)}"
    if sum(_name(other, facts) == _name(cell, facts) for other in shown) > 1 and panel["gpus"]:
        name += f", {panel['gpus']} GPU{'s' * (panel['gpus'] > 1)}"
    page.title(axis, name, more_in=beside_in - 0.1, pad=10)
    if _judged(cell):
        page.beside(axis, f"{first} / row", (1, 1), (6, 2), xycoords="axes fraction", va="bottom", color="#404040")
    better = "lower" if panel["axis"] in {"slo_scale", "gpus"} else "higher"
    met = f"{100 * facts.level:g} % {definition(cell.definition)}"
    axis.set_xlabel(f"{UNITS[panel['axis']]} at {met} ({better} is better)", fontsize=6, labelpad=1)


def _name(cell: Cell, facts: About) -> str:
    panel = cell.any
    trace = facts.titles[panel["column"]] if facts.titles else panel["trace"].partition("+")[0]
    name = f"{panel['name']} · {trace}" + ("" if cell.panels else ", each half")
    if panel["axis"] != "slo_scale":
        return name
    return f"{name}, {panel['models']}" + (f" at {panel['rate_rps']:.3g} req/s" if panel["rate_rps"] else "")


def _judged(cell: Cell) -> bool:
    return bool(cell.panels) and cell.panels[0]["axis"] != "gpus"


def _panel(
    axis: Axes, cell: Cell, by_name: Mapping[str, Marks], names: Sequence[str], looks: Mapping[str, style.Look]
) -> None:
    """Draw a row for each system: its crossings and their intervals, the paper's numbers, and the verdict.

    The crossings are those on the fitted trace and on the halves of the real one.
    """
    counts, (low, high) = cell.any["axis"] in {"gpus", "models"}, _ends(by_name.values())
    page.ruler(axis.xaxis, low, high, log=not counts, whole=counts, share=0.05)
    low, high = axis.get_xlim()
    for k, row in ((k, by_name[name]) for k, name in enumerate(names) if name in by_name):
        look = looks[row.label]
        for start, end in row.paper:
            ends = [x for x in (start, end) if low <= x <= high]
            axis.plot(np.clip([start, end], low, high), [k, k], color=page.PAPER[0], linewidth=0.6, zorder=1.4)
            page.stated(axis, ends, [k] * len(ends))
        for half, c in row.halves.items():
            sign = (look.color, CARETS.get(c.at.sign, "|"))
            page.scatter(axis, [c.at.mean], [k - HALVES[half]], sign, zorder=2, markersize=3.6, markeredgewidth=0.9)
        if row.at is not None:
            _mark(axis, k, row.at.at, look, (low, high))
        if row.gone:
            axis.text(0.02, k, row.gone, transform=axis.get_yaxis_transform(), va="center", **GONE)
        if row.standing is not None:
            under = {"facecolor": style.FILLS[row.standing.says].color, "edgecolor": "none", "pad": 0.9}
            words, aside = style.verdict(row.standing), axis.get_yaxis_transform()
            page.beside(axis, words, (1, k), (6, 0), VERDICT_POINTS, xycoords=aside, bbox=under)


def _mark(axis: Axes, y: float, e: Estimate, look: style.Look, within: tuple[float, float]) -> None:
    """Draw a crossing with its interval. A crossing that is only a bound is hollow and has an arrow."""
    low, high = within
    first = low if e.sign == "<" or (e.low is None and e.high is not None) else e.low
    right = high if e.sign == ">" or (e.high is None and e.low is not None) else e.high
    ends = [e.mean if first is None else max(first, low), e.mean if right is None else min(right, high)]
    page.interval(axis, y, (ends[0], ends[1]), look.color, 1.0)
    for end, edge, arrow in ((ends[0], low, "<"), (ends[1], high, ">")):
        if end == edge:
            axis.plot([end], [y], marker=CARETS[arrow], markersize=4, color=look.color, clip_on=False, zorder=3)
    axis.plot([e.mean], [y], linestyle="none", zorder=3, **look.marks(hollow=e.sign != "=", size=3.6))


def _ends(shown: Iterable[Marks]) -> tuple[float, float]:
    """Return the lower and upper end of a panel's x axis.

    The axis includes all crossings. It also includes ends of intervals and numbers of papers, if these are near a
    crossing.
    """
    listed = list(shown)
    at = [c.at for row in listed for c in (row.at, *row.halves.values()) if c is not None]
    means = [e.mean for e in at if e.mean > 0] or [1.0]
    others = [x for e in at for x in (e.low, e.high) if x] + [x for row in listed for pair in row.paper for x in pair]
    near = [*means, *(x for x in others if min(means) / FAR < x < max(means) * FAR and x > 0)]
    few, many = min(near), max(near)
    wider = max(1.0, LEAST * few / many) ** 0.5  # what differs by less is drawn near each other
    return few / wider, many * wider


def _handles(by_cell: Sequence[Sequence[Marks]], first: str) -> list[Line2D | Patch]:
    """Return the entries of the legend, only for marks and verdicts that are drawn."""
    every = [row for cell_rows in by_cell for row in cell_rows]
    at = [row.at.at for row in every if row.at is not None]
    line: dict[str, Any] = {"linestyle": "-", "linewidth": 1.0}
    handles: list[Line2D | Patch] = []
    if at:
        sure = any(e.low is not None or e.high is not None for e in at)
        handles.append(page.mark("crossing" + ", 95 % interval" * sure, **line))
    if any(e.sign != "=" for e in at):
        handles.append(page.mark("a bound: beyond what was run", hollow=True, **line))
    if any(row.halves for row in every):
        words = "real trace: first half above, second below"
        handles.append(page.mark(words, (page.GREY, "|"), markeredgewidth=0.9))
    if any(c.at.sign != "=" for row in every for c in row.halves.values()):
        handles.append(page.mark("a half, beyond what was run", (page.GREY, 5)))
    if any(row.paper for row in every):
        handles.append(page.stated_key())
    handles += style.fills({row.standing.says for row in every if row.standing is not None}, style.called(first))
    return handles


def _caption(table: pa.Table, facts: About, judged: Sequence[Standing], note: str) -> str:
    cases = "Halves of a real trace are case studies, without interval or verdict."
    halves = any(panel.get("half") for panel in facts.panels)
    return brief(table, facts, CORRECTED * bool(judged), note, cases * halves, flat(judged, facts.panels), *facts.notes)
