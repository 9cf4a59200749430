"""Servers against the simulator on the same specs: attainment, and quantiles of TTFT and TPOT (`bench validate`)."""

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

PANELS = {"ttft": "TTFT", "tpot": "TPOT"}
QUANTILES = {50: (style.BLUE, "o"), 95: (style.ORANGE, "s"), 99: (style.GREY, "^")}  # colour, marker
BAND = 1.1
SIDE_IN = 2.3


def draw(frame: pd.DataFrame, attainment: str, note: str) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame`: `cells` of `harness.validate.ranks`."""
    figure = Figure(figsize=(SIDE_IN * 3, SIDE_IN + 0.45), layout="constrained")
    share, *others = figure.subplots(1, 3).flat
    _attainment(share, frame[frame["measure"] == attainment])
    for axes, (metric, title) in zip(others, PANELS.items(), strict=True):
        _latency(axes, frame, metric, title)
    key = [
        *(Line2D([], [], linestyle="", marker=mark, markersize=3.5, color=color, label=f"P{q}")
          for q, (color, mark) in QUANTILES.items()),
        *style.alike_key(BAND),
        Line2D([], [], color="#606060", linewidth=0.8, label="servers over repeats (±1 s.d.)"),
    ]  # fmt: skip
    figure.legend(handles=key, loc="outside upper center", ncols=6, frameon=False)
    style.below(figure, note, 165)
    return figure


def _attainment(axes: Axes, points: pd.DataFrame) -> None:
    axes.plot([0, 100], [0, 100], color="#000000", linewidth=0.6)
    x, y = 100 * points["servers"], 100 * points["simulator"]
    axes.errorbar(x, y, xerr=100 * points["spread"].fillna(0), fmt="o", markersize=3, linewidth=0.8, color=style.GREEN)
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel="servers (%)", ylabel="simulator (%)", title="Attainment")
    axes.set_box_aspect(1)


def _latency(axes: Axes, frame: pd.DataFrame, metric: str, title: str) -> None:
    drawn = []
    for q, (color, mark) in QUANTILES.items():
        rows = frame[(frame["measure"] == f"{metric}_p{q}_s") & frame["error"].notna()]
        x, y = 1e3 * rows["servers"].to_numpy(np.float64), 1e3 * rows["simulator"].to_numpy(np.float64)
        spread = x * np.minimum(
            rows["spread"].fillna(0).to_numpy(np.float64), 0.95
        )  # a bar to 0 has no end on this axis
        axes.errorbar(x, y, xerr=spread, fmt=mark, markersize=3, linewidth=0.8, color=color)
        drawn += [x, y]
    both = np.concatenate(drawn) if drawn else np.empty(0)
    low, high = (both.min() / 1.5, both.max() * 1.5) if len(both) else (1.0, 10.0)
    style.alike(axes, low, high, BAND)
    axes.set(title=title, xlabel="servers (ms)", ylabel="simulator (ms)")


def render(frame: pd.DataFrame, attainment: str, stem: Path, command: str, note: str) -> list[Path]:
    """Draw cells to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame, attainment, note), stem, frame, command)
