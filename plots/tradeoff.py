"""Attainment and GPU-hours over settings of one field, in the study's order: a line a condition."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.policy.types import UserError
from harness.rows import held
from harness.rows.about import About
from plots import form, style
from plots.caption import brief, caption, definition

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

PANEL_IN, BELOW_IN = 1.75, 0.62  # height of the panels, and of what stands below them
LOOKS = tuple(zip((style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.RED, style.SKY), style.MARKERS,
                  style.LINES, strict=False))  # fmt: skip
ENDS = ("mean", "low", "high")


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (condition, setting); attainment as a share, GPU-hours a day."""
    rows = [
        {"condition": panel["name"], "trace": panel["trace"], "gpus": setting.gpus, "setting": setting.name}
        | {f"met_{end}": _number(getattr(setting.met, end)) for end in ENDS}
        | {"worst": setting.worst.mean}
        | {f"gpu_h_{end}": _number(getattr(setting.gpu_h, end)) for end in ENDS}
        | {"loads": setting.loads}
        for panel, settings in held.panels(table, facts)
        for setting in settings
    ]
    return pd.DataFrame(rows)


def _number(end: float | None) -> float:
    return math.nan if end is None else end


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw both over the settings, and one over the other; call within `style.theme()`. UserError: nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this study tells for how long weights held its GPUs")
    names = [name for name in facts.systems if name in set(frame["setting"])]
    text, foot = style.foot(brief(table, facts, note, _told(facts)), 178)
    page_in = form.width(style.PAGE_IN)
    figure = Figure(figsize=(page_in, 1))
    by_name = dict(zip(dict.fromkeys(frame["condition"]), LOOKS, strict=False))
    handles = [Line2D([], [], color=color, marker=marker, linestyle=line, label=textwrap.fill(name, 60))
               for name, (color, marker, line) in by_name.items()]  # fmt: skip
    top = style.legend(figure, handles, 2, handlelength=2.6, columnspacing=1.4) + 0.12
    height = top + PANEL_IN + BELOW_IN + foot
    figure.set_size_inches(page_in, height)
    grid = figure.add_gridspec(1, 3, left=0.065, right=0.985, wspace=0.28, top=1 - top / height,
                               bottom=(foot + BELOW_IN) / height)  # fmt: skip
    met, spent, both = (figure.add_subplot(grid[0, k]) for k in range(3))
    share = f"{definition(facts.definitions[0])} SLOs met (%)"
    for condition, (color, marker, line) in by_name.items():
        mine = frame[frame["condition"] == condition].set_index("setting").reindex(names)
        drawn = {"color": color, "marker": marker, "linestyle": line, "linewidth": 0.9, "markersize": 3.2}
        at = range(len(names))
        met.plot(at, 100 * mine["met_mean"], **drawn)
        met.vlines(at, 100 * mine["met_low"], 100 * mine["met_high"], color=color, linewidth=0.6)
        spent.plot(at, mine["gpu_h_mean"], **drawn)
        spent.vlines(at, mine["gpu_h_low"], mine["gpu_h_high"], color=color, linewidth=0.6)
        both.plot(mine["gpu_h_mean"], 100 * mine["met_mean"], **drawn)
    for axis, label in ((met, share), (spent, "GPU-hours a day")):
        axis.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor", fontsize=6)
        axis.set_xlabel(next(iter(facts.titles), "setting"), fontsize=6.5, labelpad=1)
        axis.set_ylabel(label, fontsize=6.5)
    both.set_xlabel("GPU-hours a day (fewer is better)", fontsize=6.5)
    both.set_ylabel(share, fontsize=6.5)
    spent.set_ylim(bottom=0)
    both.set_xlim(left=0)
    for axis in (met, both):
        _level(axis, 100 * facts.level)
    style.write_foot(figure, text)
    return figure


def _level(axis: Axes, percent: float) -> None:
    """Mark the level, and end the axis of attainment at 100 %."""
    axis.axhline(percent, color="#808080", linewidth=0.6, linestyle=(0, (4, 2)))
    axis.set_ylim(top=101.0)


def _told(facts: About) -> str:
    return (
        f"Settings in the study's order; dashed: {100 * facts.level:g} %. GPU-hours: weights on a GPU or on their "
        "way to it, of whole runs. Bars are 95 % intervals."
    )


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, which the CSV holds."""
    return caption(table, facts, "mean and 95 % interval", _told(facts), note=note)
