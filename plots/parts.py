"""Attainment that a system loses without each of its parts: bars in percentage points, a panel per trace and rate."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.policy.types import UserError
from harness.rows import crossings
from harness.rows.about import About
from plots import page, style
from plots.caption import brief, caption, definition, sampling

ROW_IN, ACROSS = 0.26, 6  # height of a part; panels in a line
LOST, MOST = style.BLUE, style.ORANGE


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each (part, condition, x).

    A row has the attainment that a system loses without the part, in percentage points. `model` is the model that loses
    most.
    """
    rows: list[dict[str, Any]] = []
    for claim in facts.claims:
        if claim["what"] != "difference" or not {claim["system"], claim["over"]} <= {*facts.systems}:
            continue
        part, definition = claim["subject"] or claim["over"], claim["definition"] or facts.definitions[0]
        panels = crossings.concerned(facts.panels, claim["on"])
        for loss in crossings.losses(table, panels, claim["system"], claim["over"], definition):
            panel, lost = loss.panel, loss.pooled.times(100.0)
            here = crossings.of_panel(table, panel)
            whole = crossings.by_model(here, claim["system"], definition)[loss.x][""].values()
            row = {"part": part, "without": claim["over"], "condition": panel["condition"], "trace": panel["trace"]}
            row |= {"x": loss.x, "offered_rps": _offered_rps(here, loss.x), "whole": 100 * sum(whole) / len(whole)}
            row |= {"lost": lost.mean, "low": _end(lost.low), "high": _end(lost.high), "n": lost.n}
            rows.append(row | {"model": loss.model, "most": 100 * loss.most.mean})
    return pd.DataFrame(rows)


def _offered_rps(rows: pa.Table, x: float) -> float:
    """Return the offered requests per second at x: the mean over a panel's runs."""
    frame = rows.select(["x", "over", "definition", "value"]).to_pandas()
    offered = frame[(frame["definition"] == "offered_rps") & (frame["over"] == "pooled") & (frame["x"] == x)]
    return float(offered["value"].mean())


def _end(points: float | None) -> float:
    """Return an end of an interval in percentage points, limited to 100 points of loss or gain; NaN for None."""
    return np.nan if points is None else float(np.clip(points, -100, 100))


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the figure, a page wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no part of a system was switched off")
    parts = list(dict.fromkeys(frame["part"]))
    places = list(frame.groupby(["condition", "x"], sort=False))
    above = "Above each panel: what the whole system attains. Intervals are 95 %, paired."
    lost = f"points of {definition(facts.definitions[0])} attainment lost (right: the part helps)"
    names = [textwrap.fill(part, 24) for part in parts]
    heads = [
        f"{bars['trace'].iloc[0].partition('+')[0]}\n{bars['offered_rps'].iloc[0]:.3g} req/s, "
        f"{bars['whole'].iloc[0]:.1f} %"
        for _, bars in places
    ]
    figure, lines = page.panels(
        page.grid(len(places), ACROSS, ROW_IN * len(parts)),
        left_in=page.names_in(names),
        above_in=0.28,
        columns=3,
        handles=[
            Patch(facecolor=LOST, edgecolor=LOST, label="lost without this part, all models"),
            Patch(facecolor="white", edgecolor=LOST, label="its interval covers 0"),
            page.mark("the model that loses most", (MOST, "D")),
        ],
        text=brief(table, facts, note, above),
    )
    ends = frame[["lost", "low", "high", "most"]].to_numpy(np.float64)
    for k, (axis, (_, bars)) in enumerate(zip((axis for line in lines for axis in line), places, strict=True)):
        page.rows(axis, names, labelled=k % ACROSS == 0)
        page.ruler(axis.xaxis, np.nanmin(ends, initial=0.0), np.nanmax(ends, initial=1.0))
        _panel(axis, bars.set_index("part").reindex(parts))
        axis.set_title(heads[k], fontsize=page.fitting(heads[k], page.length_in(axis.xaxis) + 0.08, 6))
    page.shared(lines[-1], lost)
    return figure


def _panel(axis: Axes, bars: pd.DataFrame) -> None:
    """Draw a bar with its interval for each part, and the loss of the model that loses most as a diamond."""
    axis.axvline(0.0, color="#202020", linewidth=0.7)
    for k, (lost, low, high, most) in enumerate(bars[["lost", "low", "high", "most"]].to_numpy(np.float64).tolist()):
        if np.isnan(lost):
            continue
        sure = bool(np.isfinite(low)) and not low <= 0 <= high
        axis.barh(k, lost, 0.6, color=LOST if sure else "white", edgecolor=LOST, linewidth=0.8)
        if np.isfinite(low):
            page.interval(axis, k, (low, high), "#404040")
        axis.plot([most], [k], "D", color=MOST, markersize=2.6, zorder=3)


def full_caption(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption for the CSV."""
    above = "Above each panel: what the whole system attains."
    return caption(table, facts, "mean and 95 % interval, paired,", above, *sampling(table, facts), note=note)
