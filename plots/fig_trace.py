"""A trace on a page: requests over time, popularity, use of models by minute, idle gaps and lengths.

bench trace stats mine.parquet
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from plots import form, style

BINS = 120  # of the time axis
MOST_MODELS = 40  # rows of the strip of models
SHORTEST_GAP_S = 1e-3


def points(arrival_s: NDArray[np.float64], model: NDArray[np.int32], models: tuple[str, ...], span_s: float
           ) -> pd.DataFrame:  # fmt: skip
    """Count requests by model and bin of the span: columns model, begin_s, requests; the most popular model first."""
    width = span_s / BINS
    counts = np.zeros((len(models), BINS), np.int64)
    np.add.at(counts, (model, np.minimum(BINS - 1, (arrival_s / width).astype(np.int64))), 1)
    order = np.argsort(-counts.sum(1), kind="stable")
    names = [name for k in order for name in [models[k]] * BINS]
    begin = np.tile(np.arange(BINS) * width, len(models))
    return pd.DataFrame({"model": names, "begin_s": begin, "requests": counts[order].ravel()})


def draw(counted: pd.DataFrame, trace: Mapping[str, Any], caption: str) -> Figure:
    """Draw the figure, two columns wide; `trace` has arrival_s, model, prompt_tokens, output_tokens and span_s."""
    figure = Figure(figsize=(form.width(2 * style.COLUMN_IN), 3.6))
    grid = figure.add_gridspec(2, 3, left=0.07, right=0.985, top=0.94, bottom=0.24, wspace=0.32, hspace=0.62)
    unit, name = (3600.0, "hours") if trace["span_s"] > 4 * 3600 else (60.0, "minutes")
    table = counted.pivot_table(index="model", columns="begin_s", values="requests", sort=False)
    counts, begin = table.to_numpy(), table.columns.to_numpy() / unit
    width_s = trace["span_s"] / BINS

    axis = figure.add_subplot(grid[0, :2])
    axis.stairs(counts.sum(0) / width_s, [*begin, trace["span_s"] / unit], fill=True, color=style.BLUE, alpha=0.6)
    axis.set_xlim(0, trace["span_s"] / unit)
    axis.set_title("all requests", loc="left")
    axis.set_ylabel("requests/s")
    axis.set_xlabel(name)

    axis = figure.add_subplot(grid[0, 2])
    share = np.sort(counts.sum(1))[::-1] / counts.sum()
    axis.plot(np.arange(1, len(share) + 1), 100 * share, "o-", color=style.BLUE, markersize=2.5)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.set_title("popularity", loc="left")
    axis.set_xlabel("rank of model")
    axis.set_ylabel("% of requests")

    axis = figure.add_subplot(grid[1, 0])
    shown = np.log10(np.maximum(counts[:MOST_MODELS] / width_s, np.nan_to_num(0.1 / width_s)))
    axis.imshow(np.where(counts[:MOST_MODELS] > 0, shown, np.nan), aspect="auto", cmap="Blues",
                extent=(0, trace["span_s"] / unit, min(len(counts), MOST_MODELS) + 0.5, 0.5),
                interpolation="nearest")  # fmt: skip
    axis.set_title("use of models (white: no request)", loc="left")
    axis.set_xlabel(name)
    axis.set_ylabel("rank of model")
    axis.grid(visible=False)

    axis = figure.add_subplot(grid[1, 1])
    gaps = np.concatenate([np.diff(trace["arrival_s"][trace["model"] == k]) for k in range(len(counts))])
    _share_above(axis, np.maximum(gaps, SHORTEST_GAP_S), style.BLUE, "", "-")
    axis.axvline(10, color="#808080", linewidth=0.6, linestyle=":")
    axis.set_title("gaps of a model (dots: idle, 10 s)", loc="left")
    axis.set_xlabel("seconds")
    axis.set_ylabel("% longer")

    axis = figure.add_subplot(grid[1, 2])
    _share_above(axis, trace["prompt_tokens"], style.BLUE, "prompt", "-")
    _share_above(axis, trace["output_tokens"], style.ORANGE, "output", "--")
    axis.legend(frameon=False, loc="lower left", handlelength=1.6)
    axis.set_title("lengths", loc="left")
    axis.set_xlabel("tokens")
    axis.set_ylabel("% longer")
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
    text, _ = style.foot(caption, 190)
    style.write_foot(figure, text)
    return figure


def _share_above(axis: Any, values: NDArray[Any], color: str, label: str, line: str) -> None:
    ordered = np.sort(values.astype(np.float64))
    above = 100 * (1 - np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
    keep = np.unique(np.linspace(0, max(0, len(ordered) - 1), 400).astype(np.int64))[: len(ordered)]
    axis.plot(ordered[keep], above[keep], line, color=color, label=label)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_ylim(0, 101)


def render(trace: Mapping[str, Any], models: tuple[str, ...], caption: str, stem: Path, command: str) -> list[Path]:
    """Draw a trace to `stem`.pdf, .png and .csv; returns their paths."""
    counted = points(trace["arrival_s"], trace["model"], models, trace["span_s"])
    with style.theme():
        return style.save(draw(counted, trace, caption), stem, counted, command)
