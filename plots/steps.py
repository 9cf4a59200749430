"""From a fair default to a paper's setting: the ratio of rates after each assumption, and after each alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from harness.policy.types import UserError
from harness.rows import crossings
from harness.rows.about import About
from harness.rows.crossings import Standing
from harness.rows.estimate import Estimate
from plots import form, style, verdicts
from plots.caption import CORRECTED, asked, brief, caption, definition, flat

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

# by where an assumption comes from; "": the start
MARKERS: Mapping[str, str] = {"": "D", "paper states": "o", "released code": "s", "unknown": "^"}
ORIGINS = {"paper states": "stated by the paper", "released code": "from the released code",
           "unknown": "stated nowhere"}  # fmt: skip
TOGETHER, ALONE, PAPER, EQUAL = style.BLUE, style.ORANGE, "#202020", "#909090"
NAMED = 28  # letters of a line of a step's name
END = 2.6  # points of the marker of a step's other end
HEAD_IN, FOOT_IN = 0.2, 0.56  # for the titles, and for the axes' words
ROW_IN, WORDS_IN = 0.36, 1.12  # height of a step, and width of what is said beside it
ASIDE = {"base": 0.0, "cumulative": -0.17, "alone": 0.17}  # of a marker from the middle of its step
MARGIN, FAR = 1.15, 5.0  # factors: beside what is drawn; beyond the means, where wider intervals are cut


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (ratio, panel), by the position of its step (0: the start)."""
    told = [{**{key: value for key, value in row.items() if key != "gaps"}, **_gaps(row["gaps"])}
            for row in ratios(table, facts)]  # fmt: skip
    return pd.DataFrame(told)


def _gaps(gaps: Sequence[tuple[float, Estimate]]) -> dict[str, float | None]:
    """Differences of attainment at three rates, in points, as columns."""
    return {
        name: value
        for k, (x, gap) in enumerate(gaps, 1)
        for name, value in ((f"at_{k}", x), (f"gap_{k}", 100 * gap.mean), *(
            (f"gap_{k}_{end}", None if bound is None else 100 * bound)
            for end, bound in (("low", gap.low), ("high", gap.high))))
    }  # fmt: skip


def ratios(table: pa.Table, facts: About) -> list[dict[str, Any]]:
    """Every ratio that the study claims, on each panel that it is about; `mean` is None where `note` says why."""
    names = list(dict.fromkeys(panel["name"] for panel in facts.panels))
    rows = []
    for claim, panel, standing in crossings.claimed(table, facts):
        e = standing.ratio
        rows.append({**{key: panel[key] for key in ("condition", "name", "kind", "origin")},
                     "step": names.index(panel["name"]), "ratio": f"{claim['system']} / {claim['over']}",
                     "paper": claim["paper"], "other_end": panel.get("other_end", False),  # none in facts of before
                     "mean": e and e.mean, "low": e and e.low, "high": e and e.high, "n": facts.seeds,
                     "sign": e.sign if e else "=", "standing": standing.says, "p": standing.p, "flat": standing.flat,
                     "gaps": standing.differences, "note": standing.note})  # fmt: skip
    return rows


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the figure, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = ratios(table, facts)
    if all(row["mean"] is None for row in shown):
        raise UserError("nothing to draw: no condition has a ratio")
    at, names = _rows(facts)
    labels = list(dict.fromkeys(row["ratio"] for row in shown))
    text, foot = style.foot(caption_of_ratios(table, facts, note, shown), 178)
    foot += FOOT_IN
    figure = Figure(figsize=(form.width(style.PAGE_IN), 1))
    firsts = {systems(label, facts)[0].partition("+")[0] for label in labels}
    first = style.called(firsts.pop()) if len(firsts) == 1 else "the first"
    handles: list[Line2D | Patch] = [
        *_handles(shown, names),
        *verdicts.handles({row["standing"] for row in shown}, first),
    ]
    head = style.legend(figure, handles, 7, handlelength=1.8, columnspacing=1.2) + HEAD_IN
    height = head + ROW_IN * len(names) + foot
    figure.set_size_inches(form.width(style.PAGE_IN), height)
    wide = 0.78 / len(labels)
    words = WORDS_IN / form.width(style.PAGE_IN)
    level = f"{100 * facts.level:g} % {definition(facts.definitions[0])}"
    for k, label in enumerate(labels):
        axis = figure.add_axes((0.22 + k * wide, foot / height, wide - words, ROW_IN * len(names) / height))
        style.name_rows(axis, [textwrap.fill(f"+ {name}" if i else name, NAMED) for i, name in enumerate(names)])
        axis.tick_params(axis="y", labelleft=not k, pad=6)  # clear of arrows
        _panel(axis, [row | {"step": at[row["step"]]} for row in shown if row["ratio"] == label])
        over = " / ".join(style.called(name.partition("+")[0]) for name in systems(label, facts))
        axis.set_title(over, loc="left", pad=3)
        axis.set_xlabel(f"ratio of rates at {level}\n(right of 1: {first} is ahead)", fontsize=6)
    style.write_foot(figure, text)
    return figure


def systems(ratio: str, facts: About) -> tuple[str, str]:
    """Return the two systems of a ratio as they are at the start, with presets and fields."""
    first, _, over = ratio.partition(" / ")
    return facts.texts.get(first, first), facts.texts.get(over, over)


def _rows(facts: About) -> tuple[list[int], list[str]]:
    """Return the row of each step and the rows' names; the other end of a step has the step's own row."""
    ends = {panel["name"] for panel in facts.panels if panel.get("other_end")}
    steps = list(dict.fromkeys(panel["name"] for panel in facts.panels))
    of = {name: base if name in ends and (base := name.partition("; ")[0]) in steps else name for name in steps}
    names = [name for name in steps if of[name] == name]
    return [names.index(of[name]) for name in steps], names


def _handles(shown: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Line2D]:
    """Return the legend of what is drawn, and of nothing else."""
    origins = {row["origin"] for row in shown}
    alone = [
        Line2D([], [], color=ALONE, marker="D", markerfacecolor="white", linestyle="none", label="this step alone")
    ]
    paper = [Line2D([], [], color=PAPER, linestyle=(0, (4, 2)), linewidth=0.9, label="the paper's ratio")]
    ends = dict.fromkeys(
        row["name"].partition("; ")[2] for row in shown if row["other_end"] and row["name"] not in names
    )
    return [
        Line2D([], [], color=TOGETHER, marker="D", label="all steps so far"),
        *alone * any(row["kind"] == "alone" for row in shown),
        *(Line2D([], [], color=TOGETHER, marker="D", markerfacecolor="white", markersize=END, linestyle="none",
                 label=f"the same, {end}") for end in ends),
        *(Line2D([], [], color="#606060", marker=MARKERS[x], linestyle="none", label=ORIGINS[x])
          for x in MARKERS if x and x in origins),
        *paper * any(row["paper"] is not None for row in shown),
        Line2D([], [], color=EQUAL, linewidth=0.9, label="equal"),
    ]  # fmt: skip


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """One ratio: the walk as steps, each change alone beside it, intervals as lines, and arrows where unbounded."""
    stated = {x for row in rows for x in (row["paper"] if isinstance(row["paper"], list) else [row["paper"]])}
    papers = {x for x in stated if isinstance(x, int | float)}
    means = [row["mean"] for row in rows if row["mean"] is not None] + [1.0, *papers]
    bounds = [x for row in rows for x in (row["low"], row["high"]) if x]
    left = max(min([*means, *bounds]), min(means) / FAR) / MARGIN
    right = min(max([*means, *bounds]), max(means) * FAR) * MARGIN
    axis.set_xscale("log")
    axis.set_xlim(left, right)
    axis.axvline(1.0, color=EQUAL, linewidth=0.9, zorder=0.5)
    for paper in papers:
        axis.axvline(paper, color=PAPER, linestyle=(0, (4, 2)), linewidth=0.9, zorder=0.5)
    walk = [(row["mean"], _y(row)) for row in rows
            if row["kind"] != "alone" and not row["other_end"] and row["mean"] is not None]  # fmt: skip
    axis.step(*zip(*walk, strict=True), where="post", color=TOGETHER, linewidth=1.1, zorder=2)
    for row in rows:
        alone = row["kind"] == "alone"
        y, color = _y(row), ALONE if alone else TOGETHER
        if not row["other_end"]:
            verdicts.beside(axis, y, _standing(row), 4.8)
        if row["mean"] is None:
            continue
        _interval(axis, y, row, (left, right), color)
        axis.plot([row["mean"]], [y], marker=MARKERS[row["origin"]], color=color, zorder=3,
                  markersize=END if row["other_end"] else 4.0,
                  markerfacecolor="white" if alone or row["other_end"] else color)  # fmt: skip
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _standing(row: Mapping[str, Any]) -> Standing:
    """Return the standing of a row with its mean alone, as the interval is drawn and not told."""
    e = None if row["mean"] is None else Estimate(row["mean"], None, None, row["n"], row["sign"])
    return Standing(e, row["standing"], row["note"], flat=row["flat"], differences=row["gaps"])


def _y(row: Mapping[str, Any]) -> float:
    """Return the y at which a ratio is drawn: from the top the other end, all steps so far, and this step alone."""
    return float(row["step"] + ASIDE.get(row["kind"], 0.0) - 0.2 * row["other_end"])


def _interval(axis: Axes, y: float, row: Mapping[str, Any], within: tuple[float, float], color: str) -> None:
    """Draw the interval as a line, with an arrow on a side where it has no bound or leaves the panel."""
    left, right = within
    low = row["mean"] if row["n"] == 1 else left if row["low"] is None else max(row["low"], left)
    high = row["mean"] if row["n"] == 1 else right if row["high"] is None else min(row["high"], right)
    style.interval(axis, y, (low, high), color)
    for end, edge, arrow in ((low, left, "<"), (high, right, ">")):
        if end == edge:
            axis.plot([end], [y], marker=arrow, markersize=3.2, color=color, clip_on=False, zorder=3)


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, with the choice of rates, which the CSV holds."""
    return caption(table, facts, "mean and 95 % interval", _what(facts), *asked(table, facts), CORRECTED, note=note)


def caption_of_ratios(table: pa.Table, facts: About, note: str, shown: Sequence[Mapping[str, Any]]) -> str:
    """Write the short caption below the figure."""
    points = flat(_standing(row) for row in shown)
    return brief(
        table,
        facts,
        _what(facts),
        CORRECTED,
        note,
        points,
        _start(facts),
        *facts.notes,
        *asked(table, facts),
        "Intervals are 95 %.",
    )


def _start(facts: About) -> str:
    """Say which systems start with fields that steps change."""
    varied = [style.called(text) for text in facts.texts.values() if "+" in text]
    return f"At the start: {', '.join(varied)}." * bool(varied and facts.layout == "steps")


def _what(facts: About) -> str:
    return f"Ratios of the rates at which {100 * facts.level:g} % {definition(facts.definitions[0])} is held."
