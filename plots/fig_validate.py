"""Measured end-to-end runs against ours, log-log, a panel a metric, a colour an engine (`bench validate`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import style

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.axes import Axes

PANELS = {  # title; unit of both axes; its factor
    "ttft": ("Mean TTFT", "ms", 1e3),
    "tpot": ("Mean TPOT", "ms", 1e3),
    "e2e": ("Mean E2E", "s", 1.0),
    "throughput": ("Throughput", "tokens/s", 1.0),
    "kv_blocks": ("KV memory", "blocks of 16 tokens", 1.0),
}
COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.BROWN, style.SKY, style.GREY)
SHAPES = "os^Dv<>p"
BAND = 1.15
ACROSS = 3
SIDE_IN = 2.1
LEAST_SPAN = 10**0.6  # of an axis
Look = tuple[str, str]  # colour, marker


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame` has the columns of `harness.validate.validate.points`."""
    frame = frame[frame["unscored"] == ""]
    shown = [metric for metric in PANELS if (frame["metric"] == metric).any()]
    engines = sorted(frame["engine"].unique())
    looks = {engine: (COLORS[k % len(COLORS)], SHAPES[k % len(SHAPES)]) for k, engine in enumerate(engines)}
    down, across = -(-len(shown) // ACROSS), min(ACROSS, len(shown))
    full = len(shown) == down * across  # no cell is left for the key
    figure = Figure(figsize=(SIDE_IN * across, SIDE_IN * down + 0.15 + 0.4 * full), layout="constrained")
    cells = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, metric in zip(cells, shown, strict=False):
        _panel(axes, frame[frame["metric"] == metric], metric, looks)
    for axes in cells[len(shown) :]:
        axes.set_axis_off()
    key = [
        *(Line2D([], [], linestyle="", marker=mark, markersize=3.5, color=color, label=engine)
          for engine, (color, mark) in looks.items()),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="#606060", label="used in the fit"),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="#606060", markerfacecolor="white",
               label="left out of the fit"),
        *style.alike_key(BAND),
    ]  # fmt: skip
    if full:
        figure.legend(handles=key, loc="outside upper center", ncols=4, frameon=False)
    else:
        cells[-1].legend(handles=key, loc="center", frameon=False)
    style.below(figure, _caption(frame), 54 * across)
    return figure


def _panel(axes: Axes, points: pd.DataFrame, metric: str, looks: Mapping[str, Look]) -> None:
    title, unit, factor = PANELS[metric]
    both = factor * points[["measured", "ours"]].to_numpy(np.float64)
    wider = max(1.3, (LEAST_SPAN * both.min() / both.max()) ** 0.5)
    low, high = both.min() / wider, both.max() * wider
    style.alike(axes, low, high, BAND)
    for (engine, fitted), rows in points.groupby(["engine", "fitted"]):
        color, mark = looks[str(engine)]
        axes.plot(factor * rows["measured"], factor * rows["ours"], mark, markersize=2.6, markeredgewidth=0.5,
                  color=color, markerfacecolor=color if fitted else "white", alpha=0.8)  # fmt: skip
    axes.set(title=title, xlabel=f"measured ({unit})", ylabel=f"simulated ({unit})")


def _caption(frame: pd.DataFrame) -> str:
    """Write the caption: the number of measured cases, their engines and GPUs."""
    pairs = sorted(set(zip(frame["engine"], frame["gpu"], strict=True)))
    which = ", ".join(f"{engine} on {gpu}" for engine, gpu in pairs)
    cases = frame.groupby(["file", "row"]).ngroups
    return f"{cases} measured cases: {which}. Each is replayed under its own conditions."


def render(frame: pd.DataFrame, stem: Path, command: str) -> list[Path]:
    """Draw points to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame), stem, frame, command)
