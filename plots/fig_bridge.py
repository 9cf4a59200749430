"""From a fair default to a paper's setting: the ratio of rates after each assumption, and after each alone.

python -m plots.fig_bridge results/bridge-prism-3f9c21ab plots/out/bridge-prism
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from harness.policy.types import UserError
from harness.rows import ratios
from plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# by where an assumption comes from; "": the start
MARKERS: Mapping[str, str] = {"": "D", "paper states": "o", "released code": "s", "unknown": "^"}
TOGETHER, ALONE, PAPER, EQUAL = style.BLUE, style.ORANGE, "#202020", "#909090"
ROW_IN, HEAD_IN, GAP = 0.3, 0.26, 0.17  # height of a step and of the legend; of a marker from the middle of its step
MARGIN, FAR = 1.15, 5.0  # factors: beside what is drawn; beyond the means, where wider intervals are cut


def points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is drawn: the ratios, by the position of their step (0: the start)."""
    own = [row for row in rows if row["over"] is not None]
    steps = {name: k for k, name in enumerate(dict.fromkeys(row["name"] for row in own))}
    return [{"step": steps[row["name"]], **row} for row in own]


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Figure:
    """Draw the figure, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = points(rows)
    if all(row["mean"] is None for row in shown):
        raise UserError("nothing to draw: no condition has a ratio")
    names = list(dict.fromkeys(row["name"] for row in shown))
    text = textwrap.fill(caption(facts), 178)
    foot = 0.46 + 0.085 * (1 + text.count("\n"))
    height = HEAD_IN + ROW_IN * len(names) + foot
    figure = Figure(figsize=(style.PAGE_IN, height))
    wide = 0.77 / len(facts["ratios"])
    for k, label in enumerate(facts["ratios"]):
        axis = figure.add_axes((0.22 + k * wide, foot / height, wide - 0.025, ROW_IN * len(names) / height))
        _panel(axis, [row for row in shown if f"{row['first']} / {row['over']}" == label], label, len(names))
        axis.set_yticks(
            range(len(names)), [f"+ {name}" if i else name for i, name in enumerate(names)] if k == 0 else []
        )
    origins = {row["origin"] for row in shown}
    handles = [Line2D([], [], color=TOGETHER, marker="D", label="all steps so far"),
               Line2D([], [], color=ALONE, marker="D", markerfacecolor="white", linestyle="none", label="this alone"),
               *(Line2D([], [], color="#606060", marker=MARKERS[x], linestyle="none", label=x)
                 for x in MARKERS if x and x in origins),
               Line2D([], [], color=PAPER, linestyle=(0, (4, 2)), linewidth=0.9, label="the paper"),
               Line2D([], [], color=EQUAL, linewidth=0.9, label="equal")]  # fmt: skip
    style.legend(figure, handles, len(handles), handlelength=1.8, columnspacing=1.2)
    figure.text(0.01, 0.006, text, fontsize=5, color="#404040", va="bottom", linespacing=1.25)
    return figure


def _panel(axis: Axes, own: Sequence[Mapping[str, Any]], label: str, steps: int) -> None:
    """One ratio: the walk as steps, each change alone beside it, intervals as lines, and arrows where unbounded."""
    papers = {row["paper"] for row in own if row["paper"] is not None}
    means = [row["mean"] for row in own if row["mean"] is not None] + [1.0, *papers]
    bounds = [x for row in own for x in (row["low"], row["high"]) if x]
    left = max(min([*means, *bounds]), min(means) / FAR) / MARGIN
    right = min(max([*means, *bounds]), max(means) * FAR) * MARGIN
    axis.set_xscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(steps - 0.5, -0.5)
    axis.axvline(1.0, color=EQUAL, linewidth=0.9, zorder=0.5)
    for paper in papers:
        axis.axvline(paper, color=PAPER, linestyle=(0, (4, 2)), linewidth=0.9, zorder=0.5)
    walk = [row for row in own if row["kind"] != "alone" and row["mean"] is not None]
    axis.step(
        [row["mean"] for row in walk],
        [row["step"] + _aside(row) for row in walk],
        where="post",
        color=TOGETHER,
        linewidth=1.1,
        zorder=2,
    )
    for row in own:
        alone = row["kind"] == "alone"
        y, color = row["step"] + _aside(row), ALONE if alone else TOGETHER
        if row["mean"] is None:
            axis.text(left * 1.05, y, row["note"], fontsize=5, color=color, va="center")
            continue
        _interval(axis, y, row, (left, right), color)
        axis.plot([row["mean"]], [y], marker=MARKERS[row["origin"]], color=color, zorder=3, markersize=4.0,
                  markerfacecolor="white" if alone else color)  # fmt: skip
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"{label}, ratio of rates")
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _aside(row: Mapping[str, Any]) -> float:
    """Where in its step a ratio is drawn: all steps so far above this one alone."""
    return {"base": 0.0, "cumulative": -GAP, "alone": GAP}[row["kind"]]


def _interval(axis: Axes, y: float, row: Mapping[str, Any], within: tuple[float, float], color: str) -> None:
    """The interval as a line, with an arrow on a side on which it has no bound or leaves the panel."""
    left, right = within
    low = row["mean"] if row["n"] == 1 else left if row["low"] is None else max(row["low"], left)
    high = row["mean"] if row["n"] == 1 else right if row["high"] is None else min(row["high"], right)
    axis.plot([low, high], [y, y], color=color, linewidth=0.8, solid_capstyle="butt", zorder=1.5)
    for end, edge, arrow in ((low, left, "<"), (high, right, ">")):
        if end == edge:
            axis.plot([end], [y], marker=arrow, markersize=3.2, color=color, clip_on=False, zorder=3)


def caption(facts: Mapping[str, Any]) -> str:
    """Say what a reader must know of the runs, and how rates were chosen."""
    runs = pd.DataFrame(facts["facts"])
    runs["gpus"] = " and ".join(map(str, sorted(runs["gpus"].unique())))
    if runs["machine"].nunique(dropna=False) > 1:
        runs["machine"] = "memory and processes by condition"
    least, level = facts["requests"], f"{100 * facts['level']:g} %"
    rates = ", ".join(f"{rate:g}" for rate in facts["rates_rps"])
    what = f"{facts['paper']}: ratio of the rates at which {level} {facts['definition'].upper()} is held"
    how = f"rates {rates} req/s and {facts['bisections']} more by bisection for each seed"
    count = [f"at least {least:,} requests at each rate over the seeds"] if least else []
    notes = [what, how, *count, *facts["notes"]]
    return style.caption(runs, [facts["seeds"]], "; ".join(notes) + ".")


def draws(folder: Path) -> bool:
    """The ratios of `bench bridge`."""
    return (folder / ratios.FILE).is_file() and ratios.read(folder)[1]["study"] == "bridge"


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the ratios in `folder` to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    rows, facts = ratios.read(folder)
    facts["notes"] += [note] * bool(note)
    with style.theme():
        return style.save(draw(rows, facts), stem, pd.DataFrame(rows), command)


def main(arguments: Sequence[str]) -> None:
    """FOLDER STEM."""
    render(Path(arguments[0]), Path(arguments[1]), "python -m plots.fig_bridge " + " ".join(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
