"""Six models on one card, memory split or shared: a measured run against ours, by peak and by instance."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PEAKS = (30, 40)  # of the panels by instance, whose lines go from light to dark
TITLES = {"mean_ttft_s": "Mean TTFT over all", "p99_ttft_s": "P99 TTFT of the worst instance"}
CAPTION = (
    "Six Qwen2.5-7B on one card, asked in staggered ramps: memory split evenly (static) or shared on demand (elastic)."
    " Solid: measured (kvcached 88b6753, vLLM 0.14, an AMD card of 192 GB). Dashed: simulated. That the card is an"
    " MI300X is a guess, and its table is scaled to uncongested instances of these rows; the band is the interval of"
    " what a process holds. All is fitted on this one set of one model. Processes take turns on the card. No other"
    " measured run checks this card."
)


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame` is what `harness.validate.staggered.points` returns."""
    figure = Figure(figsize=(style.PAGE_IN, 4.4), layout="constrained")
    cells = figure.subplots(2, 2)
    for axes, (metric, title) in zip(cells[0], TITLES.items(), strict=True):
        _by_peak(axes, frame, metric)
        axes.set(title=title, xlabel="peak (req/s a model)", ylabel="TTFT (s)", yscale="log")
    for axes, name in zip(cells[1], ("static", "elastic"), strict=True):
        _by_instance(axes, frame[(frame["system"] == name) & frame["peak"].between(*PEAKS)])
        axes.set(title=f"Median TTFT, {name}, peaks {PEAKS[0]} to {PEAKS[1]}", xlabel="instance, by start",
                 ylabel="TTFT (s)", yscale="log")  # fmt: skip
    key = [
        *(Line2D([], [], color=look.color, label=name) for name, look in _looks(frame).items()),
        Line2D([], [], color="#404040", label="measured"),
        Line2D([], [], color="#404040", linestyle=(0, (3, 1.5)), label="simulated"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), frameon=False)
    text = textwrap.fill(CAPTION, 170)
    figure.supxlabel(text, fontsize=5.5, color="#404040", ha="left", x=0.01, linespacing=1.25)
    return figure


def _looks(frame: pd.DataFrame) -> dict[str, style.Look]:
    return style.looks(frame["system"].unique())


def _by_peak(axes: Axes, frame: pd.DataFrame, metric: str) -> None:
    for name, look in _looks(frame).items():
        own = frame[frame["system"] == name].groupby(["who", "peak"])[metric]
        value = own.mean() if metric == "mean_ttft_s" else own.max()
        axes.plot(value["measured"], color=look.color, marker=look.marker, markersize=2.5)
        axes.plot(value["ours"], color=look.color, linestyle=(0, (3, 1.5)))
        ends = np.sort(np.stack([value["low"], value["high"]]), axis=0)
        axes.fill_between(value["low"].index, *ends, color=look.color, alpha=0.15, linewidth=0)


def _by_instance(axes: Axes, own: pd.DataFrame) -> None:
    shades = mpl.colormaps["viridis_r"]
    for peak, rows in own.groupby("peak"):
        shade = shades(0.1 + 0.9 * (int(str(peak)) - PEAKS[0]) / (PEAKS[1] - PEAKS[0]))
        for who, dash in (("measured", "-"), ("ours", (0, (3, 1.5)))):
            line = rows[rows["who"] == who].set_index("instance")["median_ttft_s"]
            axes.plot(line, color=shade, linestyle=dash, linewidth=0.8)


def render(frame: pd.DataFrame, stem: Path, command: str) -> list[Path]:
    """Draw points to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame), stem, frame, command)
