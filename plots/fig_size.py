"""Attainment of the worst model over the GPUs that were tried, and over their price a day.

bench size --trace mine.parquet --models mine.toml --gpu h100,l40s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.policy.types import UserError
from plots import style

LINES = ("-", "--", ":", "-.")  # a kind of GPU each


def draw(frame: pd.DataFrame, target: float, caption: str) -> Figure:
    """Draw the figure, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    if not len(frame):
        raise UserError("nothing to draw: no strategy had room")
    priced = bool(frame["usd_day"].notna().any())
    labels = list(dict.fromkeys(frame["label"]))
    looks = style.looks(labels)
    kinds = list(dict.fromkeys(frame["gpu"]))
    figure = Figure(figsize=(2 * style.COLUMN_IN, 2.9))
    grid = figure.add_gridspec(1, 2 if priced else 1, left=0.07, right=0.985, top=0.84, bottom=0.27, wspace=0.2)
    for k, (x, name) in enumerate((("gpus", "GPUs"), ("usd_day", "US dollars a day"))[: 2 if priced else 1]):
        axis = figure.add_subplot(grid[0, k])
        for (label, kind), each in frame.dropna(subset=[x]).groupby(["label", "gpu"], sort=False):
            line = {"linestyle": LINES[kinds.index(kind) % len(LINES)]} if len(kinds) > 1 else {}
            ordered = each.sort_values(x)
            axis.plot(ordered[x], 100 * ordered["worst"], **{**looks[str(label)].marks(), **line})
            rings = ordered[ordered["answer"]]
            axis.plot(rings[x], 100 * rings["worst"], "o", markersize=8, markerfacecolor="none",
                      markeredgecolor=looks[str(label)].color)  # fmt: skip
        axis.axhline(100 * target, color="#606060", linewidth=0.7, linestyle=(0, (4, 2)))
        axis.set_xlabel(name)
        axis.set_ylim(min(80.0, 100 * float(frame["worst"].min()) - 4), 104)
        axis.spines[["top", "right"]].set_visible(False)
        if x == "gpus":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_ylabel("SLO met, worst model, %")
    handles = [style.handle(label, looks[label]) for label in labels]
    style.legend(figure, handles, min(5, len(handles)))
    text, _ = style.foot(caption, 190)
    style.write_foot(figure, text)
    return figure


def render(points: Sequence[Mapping[str, Any]], target: float, caption: str, stem: Path, command: str) -> list[Path]:
    """Draw what was tried to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    frame = pd.DataFrame(points, columns=["gpu", "label", "gpus", "usd_day", "pooled", "worst", "answer"])
    with style.theme():
        return style.save(draw(frame, target, caption), stem, frame, command)
