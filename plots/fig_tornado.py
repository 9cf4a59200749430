"""Sensitivity of the lead of one system over another: a bar per constant of the machine that is halved and doubled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.policy.types import UserError
from harness.rows import record, tidy
from harness.rows.forms import LEAD_COLUMNS
from harness.rows.record import SENSITIVITY, SWEEP
from plots import page, style

LESS, MORE, OTHER = style.SKY, style.ORANGE, style.GREY  # colours of a factor below 1, above 1, and another mode
BAR_IN = 0.24  # height of a constant's bars
THICK = 0.34  # height of one bar, where a constant's row is 1


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a comparison with stored results of `bench sensitivity`."""
    return (folder / SENSITIVITY).is_file()


def read(sweep: Path) -> tuple[pd.DataFrame, dict[str, Any], pd.DataFrame]:
    """Read the leads that bench sensitivity stored in a comparison's folder, their facts, and the comparison's runs.

    A lead is how far the first system is ahead of the second.
    """
    path = sweep / SENSITIVITY
    facts = record.footer(path)
    if len(facts["rates"]) > 1:
        raise UserError(f"{path}: a lead over several rates, which 0.3.0 stored: run bench sensitivity again")
    runs: pd.DataFrame = tidy.stored(sweep / SWEEP).to_pandas()
    runs = runs[runs["label"].isin([facts["first"], facts["second"]]) & runs["rate_scale"].isin(facts["rates"])]
    frame: pd.DataFrame = record.table(path, LEAD_COLUMNS).to_pandas()
    return frame, facts, runs


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows to draw, with leads in percentage points.

    The row of the unchanged machine comes first. The constants follow: the more a constant changes the lead, the
    earlier.
    """
    leads = frame[frame["mean"].notna()].copy()
    for name in ("mean", "low", "high"):
        leads[name] *= 100.0
    base = float(leads.loc[leads["constant"] == "", "mean"].iloc[0])

    def swing(means: pd.Series) -> float:
        return float(max(base, means.max()) - min(base, means.min()))

    swings = leads.groupby("constant")["mean"].agg(swing)
    order = sorted(swings.index, key=lambda name: (name != "", -swings[name]))
    leads["rank"] = leads["constant"].map({name: k for k, name in enumerate(order)})
    columns = ["constant", "value", "setting", "mean", "low", "high", "n", "note"]
    ordered: pd.DataFrame = leads.sort_values("rank", kind="stable")[columns].reset_index(drop=True)
    return ordered


def draw(frame: pd.DataFrame, facts: Mapping[str, Any], runs: pd.DataFrame, note: str = "") -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = points(frame)
    if len(shown) < 2:
        raise UserError("nothing to draw: no constant was varied")
    base, leads = shown.iloc[0], shown.iloc[1:]
    names = list(dict.fromkeys(leads["constant"]))
    values, keys = dict(zip(leads["constant"], leads["value"], strict=True)), dict.fromkeys(leads["setting"])
    labels = [f"{name}\n{values[name].partition(',')[0]}" for name in names]
    figure, ((axis,),) = page.panels(
        [(1, BAR_IN * len(names))],
        wide_in=style.COLUMN_IN,
        left_in=page.names_in(labels, 5.5),
        above_in=0.08,
        below_in=0.5,
        columns=5,
        text=style.caption(runs, [int(base["n"])], f"{_notes(leads)} {note}".strip()),
        handles=[
            *(Line2D([], [], linewidth=4, color=_color(key), label=key) for key in keys),
            Line2D([], [], color="#202020", linewidth=0.8, label="as it is"),
            page.dashed("equal", "#202020"),
        ],
    )
    low, high = (x if np.isfinite(x) else base["mean"] for x in (base["low"], base["high"]))
    axis.axvspan(low, high, color="#000000", alpha=0.08, linewidth=0)
    axis.axvline(0.0, color="#202020", linewidth=0.8, linestyle=page.LEVEL)
    axis.axvline(base["mean"], color="#202020", linewidth=0.8)
    for k, name in enumerate(names):
        rows = leads[leads["constant"] == name]
        for j, row in enumerate(rows.itertuples()):
            _bar(axis, k + THICK * (j - (len(rows) - 1) / 2), row, float(base["mean"]))
    ends = shown[["mean", "low", "high"]].to_numpy(np.float64)
    ends = ends[np.isfinite(ends)]
    page.ruler(axis.xaxis, min(0.0, ends.min()), max(0.0, ends.max()))
    page.rows(axis, labels, points=5.5)
    what = f"points of SLO attainment, rate scale {facts['rates'][0]:g}"
    words = f"{facts['first']} ahead of {facts['second']}\n({what})"
    axis.set_xlabel(words, fontsize=page.fitting(words, page.length_in(axis.xaxis), 6.5))
    return figure


def _bar(axis: Axes, y: float, row: Any, base: float) -> None:
    """Draw a bar from the unchanged machine's lead `base` to the lead in `row`, with the interval of the latter.

    The bar is hollow if the row has a note. It is outlined in black if the order of the systems reverses, and the
    interval excludes 0.
    """
    turned = base * row.mean < 0 and (row.high < 0.0 if row.mean < 0.0 else row.low > 0.0)
    color = _color(row.setting)
    face, edge = "white" if row.note else color, "black" if turned else color
    axis.barh(y, row.mean - base, THICK, left=base, color=face, linewidth=0.8, edgecolor=edge)
    low, high = (x if np.isfinite(x) else row.mean for x in (row.low, row.high))
    page.interval(axis, y, (low, high), "#404040", 0.6)


def _notes(leads: pd.DataFrame) -> str:
    """Write the sentences that explain hollow bars, outlined bars and thin lines."""
    why = [f"{row['constant']} {row['setting']}: {row['note']}" for row in leads.to_dict("records") if row["note"]]
    hollow = f"Hollow: {', '.join(why)}." if why else ""
    return f"{hollow} Thin lines: intervals; outlined in black: the order reverses.".strip()


def _color(setting: str) -> str:
    """Return the colour of a changed constant, which depends on the kind of change.

    The kinds are a factor below 1, a factor above 1, and another mode.
    """
    return str((LESS if float(setting[2:]) < 1 else MORE) if setting.startswith("x ") else OTHER)


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the leads in folder `sweep` to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    frame, facts, runs = read(sweep)
    with style.theme():
        return style.save(draw(frame, facts, runs, note), stem, points(frame), command)
