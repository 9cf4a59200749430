"""Seconds of servers' steps, measured against fitted, log-log, a panel a model (`bench calibrate ENGINE`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LOOKS = {"prefill": (style.BLUE, "o"), "decode": (style.ORANGE, "s")}  # colour, marker
MEANS = {"prefill": "first token of a prompt", "decode": "step of a batch"}
BAND = 1.1
ACROSS = 3
SIDE_IN = 2.3


def draw(frame: pd.DataFrame, note: str) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame`: `points` of `harness.calibrate.steps`."""
    models = list(dict.fromkeys(frame["model"]))
    across, down = min(ACROSS, len(models)), -(-len(models) // ACROSS)
    figure = Figure(figsize=(max(style.COLUMN_IN, SIDE_IN * across), SIDE_IN * down + 0.45), layout="constrained")
    cells = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, model in zip(cells, models, strict=False):
        _panel(axes, frame[frame["model"] == model], model)
    for axes in cells[len(models) :]:
        axes.set_axis_off()
    key = [
        *(Line2D([], [], linestyle="", marker=mark, markersize=3.5, color=color, label=MEANS[what])
          for what, (color, mark) in LOOKS.items()),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="#606060", markerfacecolor="white",
               label="left out of the fit"),
        *style.alike_key(BAND),
    ]  # fmt: skip
    figure.legend(handles=key, loc="outside upper center", ncols=2, frameon=False)
    style.below(figure, note, 54 * across)
    return figure


def _panel(axes: Axes, points: pd.DataFrame, model: str) -> None:
    both = 1e3 * points[["measured_s", "fitted_s"]].to_numpy(np.float64)
    low, high = both.min() / 1.3, both.max() * 1.3
    style.alike(axes, low, high, BAND)
    for (what, held), rows in points.groupby(["what", "held"]):
        color, mark = LOOKS[str(what)]
        axes.plot(1e3 * rows["measured_s"], 1e3 * rows["fitted_s"], mark, markersize=3.0, markeredgewidth=0.6,
                  color=color, markerfacecolor="white" if held else color)  # fmt: skip
    axes.set(title=model, xlabel="measured (ms)", ylabel="fitted (ms)")


def render(frame: pd.DataFrame, stem: Path, command: str, note: str) -> list[Path]:
    """Draw points to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame, note), stem, frame, command)
