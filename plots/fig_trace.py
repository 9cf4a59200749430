"""A trace on one page: requests over time, popularity of models, models used in each minute, idle gaps and lengths.

bench trace stats mine.parquet
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from plots import page, style

BINS = 120  # bins on the time axis
MOST_MODELS = 40  # rows of the strip of models
SHORTEST_GAP_S = 1e-3


def points(
    arrival_s: NDArray[np.float64], model: NDArray[np.int32], models: tuple[str, ...], span_s: float
) -> pd.DataFrame:
    """Count requests by model and bin of the span, the most popular model first.

    Columns are model, begin_s and requests.
    """
    width = span_s / BINS
    counts = np.zeros((len(models), BINS), np.int64)
    np.add.at(counts, (model, np.minimum(BINS - 1, (arrival_s / width).astype(np.int64))), 1)
    order = np.argsort(-counts.sum(1), kind="stable")
    names = [name for k in order for name in [models[k]] * BINS]
    begin = np.tile(np.arange(BINS) * width, len(models))
    return pd.DataFrame({"model": names, "begin_s": begin, "requests": counts[order].ravel()})


def draw(counted: pd.DataFrame, trace: Mapping[str, Any], caption: str) -> Figure:
    """Draw the figure, two columns wide; `trace` has arrival_s, model, prompt_tokens, output_tokens and span_s."""
    figure, ((rates, popular), (used, idle, lengths)) = page.panels(
        [(2, 1.0), (3, 1.0)], left_in=0.5, beside_in=0.5, right_in=0.2, stretch=True, text=caption
    )
    unit, name = (3600.0, "hours") if trace["span_s"] > 4 * 3600 else (60.0, "minutes")
    table = counted.pivot_table(index="model", columns="begin_s", values="requests", sort=False)
    counts, begin = table.to_numpy(), table.columns.to_numpy() / unit
    width_s = trace["span_s"] / BINS

    span, ranks = trace["span_s"] / unit, np.arange(1, len(counts) + 1)
    rates.stairs(counts.sum(0) / width_s, [*begin, span], fill=True, color=style.BLUE, alpha=0.6)
    page.ruler(rates.yaxis, 0, counts.sum(0).max() / width_s)
    page.named(rates, "all requests", name, "requests/s")

    share = 100 * np.sort(counts.sum(1))[::-1] / counts.sum()
    popular.plot(ranks, share, "o-", color=style.BLUE, markersize=2.5)
    page.ruler(popular.xaxis, 1, len(share), whole=True)
    page.ruler(popular.yaxis, share[share > 0].min(), share.max(), log=True, share=0.05)
    page.named(popular, "popularity", "rank of model", "% of requests")

    top = counts[:MOST_MODELS]
    shown = np.log10(np.maximum(top / width_s, np.nan_to_num(0.1 / width_s)))
    cells, extent = np.where(top > 0, shown, np.nan), (0, span, len(top) + 0.5, 0.5)
    used.imshow(cells, aspect="auto", cmap="Blues", extent=extent, interpolation="nearest")
    used.set_yticks(sorted({1, (1 + len(top)) // 2, len(top)}))
    used.grid(visible=False)
    page.named(used, "use of models (white: no request)", name, "rank of model")

    gaps = np.concatenate([np.diff(trace["arrival_s"][trace["model"] == k]) for k in range(len(counts))])
    _share_above(idle, {"": np.maximum(gaps, SHORTEST_GAP_S)})
    idle.axvline(10, color="#808080", linewidth=0.6, linestyle=":")
    page.named(idle, "gaps of a model (dots: idle, 10 s)", "seconds", "% longer")

    _share_above(lengths, {"prompt": trace["prompt_tokens"], "output": trace["output_tokens"]})
    lengths.legend(loc="lower left", handlelength=1.6)
    page.named(lengths, "lengths", "tokens", "% longer")
    for axis in (rates, used):
        page.ruler(axis.xaxis, 0, span, share=0)
    return figure


def _share_above(axis: Axes, of: Mapping[str, NDArray[Any]]) -> None:
    """Draw for each series the percentage of its values that are above x; x is on a logarithmic axis."""
    for (label, values), color, line in zip(of.items(), (style.BLUE, style.ORANGE), ("-", "--"), strict=False):
        ordered = np.sort(values.astype(np.float64))
        above = 100 * (1 - np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
        keep = np.unique(np.linspace(0, max(0, len(ordered) - 1), 400).astype(np.int64))[: len(ordered)]
        axis.plot(ordered[keep], above[keep], line, color=color, label=label)
    every = np.concatenate([values[values > 0] for values in of.values()])
    page.ruler(axis.xaxis, *(every.min(), every.max()) if len(every) else (1, 10), log=True)
    page.ruler(axis.yaxis, 0, 100)


def render(trace: Mapping[str, Any], models: tuple[str, ...], caption: str, stem: Path, command: str) -> list[Path]:
    """Draw a trace to `stem`.pdf, .png and .csv; returns their paths."""
    counted = points(trace["arrival_s"], trace["model"], models, trace["span_s"])
    with style.theme():
        return style.save(draw(counted, trace, caption), stem, counted, command)
