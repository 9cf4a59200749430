"""Measured end-to-end runs against ours, log-log, a panel a metric, a colour an engine (`bench validate`)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from plots import style

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes

PANELS = {  # title; unit of both axes
    "ttft": ("Mean TTFT", "s"),
    "tpot": ("Mean TPOT", "s"),
    "e2e": ("Mean E2E", "s"),
    "throughput": ("Throughput", "tokens/s"),
    "kv_blocks": ("KV memory", "blocks of 16 tokens"),
}
COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.BROWN, style.SKY, style.GREY)
BAND = 1.15
ACROSS = 3
SIDE_IN = 1.95


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame` has the columns of `harness.validate.points`."""
    shown = [metric for metric in PANELS if (frame["metric"] == metric).any()]
    colors = dict(zip(sorted(frame["engine"].unique()), COLORS * (1 + len(frame) // len(COLORS)), strict=False))
    down, across = -(-len(shown) // ACROSS), min(ACROSS, len(shown))
    figure = Figure(figsize=(SIDE_IN * across, SIDE_IN * down + 0.5), layout="constrained")
    cells = figure.subplots(down, across, squeeze=False).flat
    for axes, metric in zip(cells, shown, strict=False):
        _panel(axes, frame[frame["metric"] == metric], metric, colors)
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_visible(False)
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 3.5}
    names = [Line2D([], [], color=color, label=engine, **look) for engine, color in colors.items()]
    if frame["fitted"].any():
        names.append(Line2D([], [], color="#606060", markerfacecolor="white", label="fitted", **look))
    figure.legend(handles=names, loc="outside upper center", ncols=len(names), frameon=False, handletextpad=0.2)
    text = textwrap.fill(_caption(frame), 50 * across)
    figure.supxlabel(text, fontsize=5.5, color="#404040", ha="left", x=0.01, linespacing=1.25)
    return figure


def _panel(axes: Axes, own: pd.DataFrame, metric: str, colors: Mapping[str, str]) -> None:
    title, unit = PANELS[metric]
    both = own[["measured", "ours"]].to_numpy(np.float64)
    low, high = both.min() / 1.5, both.max() * 1.5
    line = np.array([low, high])
    axes.fill_between(line, line / BAND, line * BAND, color="#000000", alpha=0.08, linewidth=0)
    axes.plot(line, line, color="#000000", linewidth=0.6)
    for (engine, fitted), rows in own.groupby(["engine", "fitted"]):
        color = colors[str(engine)]
        axes.plot(rows["measured"], rows["ours"], "o", markersize=2.2, markeredgewidth=0.5, color=color,
                  markerfacecolor="white" if fitted else color, alpha=0.8)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=f"measured ({unit})", ylabel=f"ours ({unit})")


def _caption(frame: pd.DataFrame) -> str:
    """What is drawn, and what priced it."""
    pairs = sorted(set(zip(frame["engine"], frame["gpu"], frame["host"], strict=True)))
    which = ", ".join(f"{engine} on {gpu}" + (f" (priced as {host})" * (host != engine)) for engine, gpu, host in pairs)
    cases = frame.groupby(["file", "row"]).ngroups
    return f"{cases} measured cases: {which}. Simulated. Grey: within {100 * (BAND - 1):.0f} %."


def render(frame: pd.DataFrame, stem: Path, command: str) -> list[Path]:
    """Draw points to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame), stem, frame, command)
