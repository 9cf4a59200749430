"""Equal models on one card with split or shared memory: measured and simulated TTFT by peak rate and by model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from plots import page, style

MOST = 11  # number of the highest peaks that the panels by instance draw, from light to dark
TITLES = {"mean_ttft_s": "Mean TTFT of all requests", "p99_ttft_s": "P99 TTFT of the worst model"}
CAPTION = (
    "{load} on one card, asked in staggered ramps. Simulated on an MI300X, a guess: kvcached's runs of vLLM 0.14"
    " (88b6753) name no card. Its table is scaled to uncongested instances of these runs, and no other measured run"
    " checks it. Processes take turns on the card."
)
NAMED = {"static": "memory split evenly (static)", "elastic": "memory on demand (elastic)"}
SIMULATED = (0, (3, 1.5))  # dashes


def draw(frame: pd.DataFrame, load: str) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame` is what `harness.validate.staggered.points` returns.

    `load` describes the load in words.
    """
    peaks = sorted(frame["peak"].unique())[-MOST:]
    shown = f"peak {peaks[0]}" if len(peaks) == 1 else f"peaks {peaks[0]} to {peaks[-1]}"
    handles: list[Line2D | Patch] = [
        *(Line2D([], [], color=look.color, label=NAMED[name]) for name, look in style.looks(frame["system"]).items()),
        Line2D([], [], color="#404040", marker="o", markersize=2.5, label="measured"),
        Line2D([], [], color="#404040", linestyle=SIMULATED, label="simulated"),
        Patch(color="#404040", alpha=0.15, linewidth=0, label="simulated: what a process holds, least to most"),
        *(
            Line2D([], [], color=_shade(peak, peaks), label=f"peak {peak} req/s")
            for peak in dict.fromkeys((peaks[0], peaks[-1]))
        ),
    ]
    figure, (above, below) = page.panels(
        [(2, 1.35), (2, 1.35)],
        left_in=0.45,
        beside_in=0.45,
        right_in=0.1,
        handles=handles,
        text=CAPTION.format(load=load),
    )
    for axes, (metric, title) in zip(above, TITLES.items(), strict=True):
        _by_peak(axes, frame, metric)
        page.named(axes, title, "highest rate of the ramp (req/s a model)", "TTFT (s)")
        page.ruler(axes.xaxis, frame["peak"].min(), frame["peak"].max())
    names = [name for name in ("static", "elastic") if name in set(frame["system"])]
    for axes, name in zip(below, names, strict=False):
        mine = frame[(frame["system"] == name) & frame["peak"].isin(peaks)]
        _by_instance(axes, mine, peaks)
        title = f"Median TTFT by model, {name}, {shown} req/s"
        page.named(axes, title, "model, in the order of their ramps", "TTFT (s)")
        page.ruler(axes.xaxis, mine["instance"].min(), mine["instance"].max(), whole=True)
    for axes in (*above, *below[: len(names)]):
        values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
        positive = values[np.isfinite(values) & (values > 0)]
        page.ruler(axes.yaxis, *(positive.min(initial=np.inf), positive.max()) if positive.size else (0.1, 1), log=True)
    for axes in below[len(names) :]:
        axes.set_axis_off()
    return figure


def _by_peak(axes: Axes, frame: pd.DataFrame, metric: str) -> None:
    for name, look in style.looks(frame["system"]).items():
        group = frame[frame["system"] == name].groupby(["who", "peak"])[metric]
        value = group.mean() if metric == "mean_ttft_s" else group.max()
        axes.plot(value["measured"], color=look.color, marker=look.marker, markersize=2.5)
        axes.plot(value["ours"], color=look.color, linestyle=SIMULATED)
        ends = np.sort(np.stack([value["low"], value["high"]]), axis=0)
        axes.fill_between(value["low"].index, *ends, color=look.color, alpha=0.15, linewidth=0)


def _by_instance(axes: Axes, points: pd.DataFrame, peaks: Sequence[int]) -> None:
    for peak, rows in points.groupby("peak"):
        shade = _shade(int(str(peak)), peaks)
        for who, dash in (("measured", "-"), ("ours", SIMULATED)):
            line = rows[rows["who"] == who].set_index("instance")["median_ttft_s"]
            axes.plot(line, color=shade, linestyle=dash, linewidth=0.8)


def _shade(peak: int, peaks: Sequence[int]) -> tuple[float, float, float, float]:
    """Return the colour of a peak, from light (lowest) to dark (highest)."""
    return mpl.colormaps["viridis_r"](0.1 + 0.9 * (peak - peaks[0]) / max(1, peaks[-1] - peaks[0]))


def render(frame: pd.DataFrame, stem: Path, command: str, load: str) -> list[Path]:
    """Draw the points to `stem`.pdf, .png and .csv and return their paths; `load` describes the load in words.

    Raises UserError if a file cannot be written.
    """
    with style.theme():
        return style.save(draw(frame, load), stem, frame, command)
