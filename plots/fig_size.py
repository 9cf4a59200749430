"""Attainment of the worst model over the GPUs that were tried, and over their price a day.

bench size --trace mine.parquet --models mine.toml --gpu h100,l40s
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.policy.types import UserError
from harness.rows import forms, record
from harness.rows.record import SIZE
from plots import form, style

HEIGHT_IN = 2.3  # without the caption
Dash = Literal["-", "--", ":", "-."]
LINES: tuple[Dash, ...] = get_args(Dash)  # a kind of GPU each
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
    width = form.width(2 * style.COLUMN_IN)
    text, foot = style.foot(caption, 190)
    figure = Figure(figsize=(width, HEIGHT_IN + foot))
    high = HEIGHT_IN + foot
    handles = [style.handle(label, looks[label], line=len(kinds) == 1) for label in labels]
    if len(kinds) > 1:
        handles += [Line2D([], [], color="#606060", linestyle=_line(kinds, kind), label=kind) for kind in kinds]
    top = style.legend(figure, handles, min(5, len(handles)))
    grid = figure.add_gridspec(1, 2 if priced else 1, left=0.47 / width, right=1 - 0.1 / width,
                               top=1 - (top + 0.08) / high, bottom=(0.4 + foot) / high, wspace=0.2)  # fmt: skip
    for k, (x, name) in enumerate((("gpus", "GPUs"), ("usd_day", "US dollars a day"))[: 2 if priced else 1]):
        axis = figure.add_subplot(grid[0, k])
        for (label, kind), each in frame.dropna(subset=[x]).groupby(["label", "gpu"], sort=False):
            line = {"linestyle": _line(kinds, str(kind))} if len(kinds) > 1 else {}
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
    style.write_foot(figure, text)
    return figure


def _line(kinds: list[str], kind: str) -> Dash:
    return LINES[kinds.index(kind) % len(LINES)]


def draws(folder: Path) -> bool:
    """Tell whether a folder holds an answer of `bench size`, of which some count ran."""
    return (folder / SIZE).is_file() and bool(len(_points(folder)))


def _points(folder: Path) -> pd.DataFrame:
    table = form.chosen(record.table(folder / SIZE, forms.SIZE_COLUMNS))
    frame: pd.DataFrame = table.to_pandas()
    ran: pd.DataFrame = frame.loc[frame["unfit"] == "", COLUMNS].reset_index(drop=True)
    return ran


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the answer in a folder to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    frame, about = _points(folder), record.footer(folder / SIZE)
    told = " ".join(filter(None, [f"{about['sentence']}. Rings: the answers. Simulated.", note]))
    with style.theme():
        return style.save(draw(frame, about["asked"]["target"], told), stem, frame, command, told)
