"""Predicted against measured seconds of the cost tables (`bench calibrate profiles`): kernels, and whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import form, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"a100-80g": style.BLUE, "h100": style.ORANGE, "h200": style.GREEN, "l40s": style.RED}
COLORS |= {"h800": style.PURPLE, "h20": style.BROWN, "b200": style.SKY, "rtx-pro-6000": style.GREY}
MARKERS = {
    "a100-80g": "o",
    "h100": "s",
    "h200": "D",
    "l40s": "^",
    "h800": "v",
    "h20": "P",
    "b200": "X",
    "rtx-pro-6000": "<",
}
PANELS = {"kernels": "Kernels of a layer (GEMM, attention)", "steps": "Whole steps, eager vLLM"}
MOST = 250  # points drawn of one GPU, op and side; errors count all
BAND = 1.25  # the target: 95 % of the rows within it


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what is drawn: an even selection by measured time of each (panel, GPU, op, held-out or not)."""
    frame = frame.sort_values(["panel", "gpu", "op", "held", "measured_s", "predicted_s"], ignore_index=True)
    keep = [
        rows[np.unique(np.linspace(0, len(rows) - 1, MOST).astype(np.int64))]
        for rows in frame.groupby(["panel", "gpu", "op", "held"]).indices.values()
    ]
    return frame.loc[np.sort(np.concatenate(keep))]


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the figure; call within `style.theme()`. `frame` has the columns of `harness.calibrate.kernels.points`."""
    figure = Figure(figsize=(form.width(2 * style.COLUMN_IN), style.COLUMN_IN * 1.02), layout="constrained")
    shown = points(frame)
    for axes, (panel, title) in zip(figure.subplots(1, 2).flat, PANELS.items(), strict=True):
        _panel(axes, shown[shown["panel"] == panel], frame[frame["panel"] == panel], title)
    return figure


def _panel(axes: Axes, shown: pd.DataFrame, every: pd.DataFrame, title: str) -> None:
    low, high = every["measured_s"].min() / 1.5, every["measured_s"].max() * 1.5
    line = np.array([low, high])
    axes.fill_between(line, line / BAND, line * BAND, color="#000000", alpha=0.08, linewidth=0)
    axes.plot(line, line, color="#000000", linewidth=0.6)
    fitted = shown[~shown["held"]]
    axes.plot(fitted["measured_s"], fitted["predicted_s"], ".", color="#b9b9b9", markersize=1.6, rasterized=True)
    names = [Line2D([], [], marker=".", linestyle="", color="#b9b9b9", label="used in the fit")]
    for gpu in sorted(set(shown["gpu"])):
        held, rows = shown[shown["held"] & (shown["gpu"] == gpu)], every[every["held"] & (every["gpu"] == gpu)]
        off = (rows["predicted_s"] / rows["measured_s"] - 1).abs()
        label = f"{gpu}: median {off.median():.1%}, P95 {off.quantile(0.95):.1%}"
        look: dict[str, Any] = {"marker": MARKERS[gpu], "color": COLORS[gpu], "linestyle": ""}
        axes.plot(
            held["measured_s"],
            held["predicted_s"],
            **look,
            markersize=1.9,
            markeredgewidth=0,
            alpha=0.75,
            rasterized=True,
        )
        names.append(Line2D([], [], **look, markersize=3.5, label=label))
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title)
    axes.set(xlabel="measured (s)", ylabel="predicted (s)")
    axes.legend(
        handles=[*names, *style.alike_key(BAND)],
        loc="upper left",
        frameon=False,
        handlelength=1.2,
        title="GPUs: absolute error of rows left out of the fit",
        title_fontsize=6.5,
        alignment="left",
        handletextpad=0.2,
        borderaxespad=0.2,
    )


def render(frame: pd.DataFrame, stem: Path, command: str) -> list[Path]:
    """Draw points to `stem`.pdf, .png and .csv; returns their paths. Raises UserError where the disk refuses."""
    with style.theme():
        return style.save(draw(frame), stem, points(frame), command)
