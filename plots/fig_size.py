"""Attainment of the worst model by the number of GPUs that were tried, and by their price per day.

bench size --trace mine.parquet --models mine.toml --gpu h100,l40s
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.policy.types import UserError
from harness.rows import forms, record
from harness.rows.record import SIZE
from plots import form, page, style

COLUMNS = ["gpu", "label", "gpus", "usd_day", "pooled", "low", "high", "worst", "worst_model", "answer"]
CHOOSES = frozenset({"--only", "--rename"})


def draw(frame: pd.DataFrame, target: float, caption: str) -> Figure:
    """Draw the figure, two columns wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    if not len(frame):
        raise UserError("nothing to draw: no strategy had room")
    priced = bool(frame["usd_day"].notna().any())
    labels = list(dict.fromkeys(frame["label"]))
    looks = style.looks(labels)
    kinds = list(dict.fromkeys(frame["gpu"]))
    dashes = dict(zip(kinds, cycle((style.LINES[0], *style.LINES[2:])), strict=False))  # LINES[1] is like the target's
    by_kind = len(kinds) > 1  # with one kind, the price only scales the number of GPUs
    xs = {"gpus": "GPUs", "usd_day": "US dollars a day"} if priced and by_kind else {"gpus": "GPUs"}
    handles = [style.handle(label, looks[label], line=not by_kind) for label in labels]
    handles += [Line2D([], [], color=page.GREY, linestyle=line, label=kind) for kind, line in dashes.items() if by_kind]
    handles += [page.dashed(f"target, {100 * target:g} %"), page.mark("the answer", (page.GREY, "o"), hollow=True)]
    figure, (axes,) = page.panels(
        [(len(xs), 1.5)],
        left_in=0.45,
        beside_in=0.3,
        right_in=0.1,
        above_in=0.12,
        handles=handles,
        columns=6,
        text=caption,
    )
    for axis, (x, name) in zip(axes, xs.items(), strict=True):
        shown = frame.dropna(subset=[x])
        for (label, kind), rows in shown.groupby(["label", "gpu"], sort=False):
            look, ordered = looks[str(label)], rows.sort_values(x)
            y = 100 * ordered["worst"]
            page.curve(axis, ordered[x], y, look, line=False, size=4)
            dash = dashes[str(kind)] if by_kind else look.line
            faint: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}  # between counts nothing was run
            axis.plot(ordered[x], y, color=look.color, linestyle=dash, **faint)
            answer = ordered["answer"]
            page.scatter(axis, ordered[x][answer], y[answer], (look.color, "o"), markersize=8, fillstyle="none")
        axis.axhline(100 * target, color=page.GREY, linewidth=0.7, linestyle=page.LEVEL)
        axis.set_xlabel(name)
        page.ruler(axis.xaxis, shown[x].min(), shown[x].max(), whole=x == "gpus", share=0.05)
        page.ruler(axis.yaxis, min(80.0, 100 * float(frame["worst"].min())), 100, share=0.06)
    axes[0].set_ylabel("SLO met, worst model (%)")
    return figure


def draws(folder: Path) -> bool:
    """Tell whether a folder holds an answer of `bench size` for which at least one GPU count was run."""
    return (folder / SIZE).is_file() and bool(len(_points(folder)))


def _points(folder: Path) -> pd.DataFrame:
    table = form.chosen(record.table(folder / SIZE, forms.SIZE_COLUMNS))
    frame: pd.DataFrame = table.to_pandas()
    ran: pd.DataFrame = frame.loc[frame["unfit"] == "", COLUMNS].reset_index(drop=True)
    return ran


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the answer in a folder to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    frame, about = _points(folder), record.footer(folder / SIZE)
    text = " ".join(filter(None, [f"{about['sentence']}. Only counts with a marker were run. Simulated.", note]))
    with style.theme():
        return style.save(draw(frame, about["asked"]["target"], text), stem, frame, command, text)
