"""Attainment that a system loses without each of its parts: bars in points, a panel a trace and rate."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.policy.types import UserError
from harness.rows import crossings
from harness.rows.about import About
from plots import form, style
from plots.caption import asked, brief, caption, definition

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

ROW_IN, HEAD_IN, NAMES_IN, ACROSS = 0.26, 0.46, 1.25, 6  # heights of a part and of what stands above; panels in a line
LOST, MOST = style.BLUE, style.ORANGE


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (part, condition, x), in points; `model` loses most."""
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
            rows.append({"part": part, "without": claim["over"], "condition": panel["condition"],
                         "trace": panel["trace"], "x": loss.x, "offered_rps": _offered_rps(here, loss.x),
                         "whole": 100 * sum(whole) / len(whole), "lost": lost.mean, "low": _end(lost.low),
                         "high": _end(lost.high), "n": lost.n, "model": loss.model,
                         "most": 100 * loss.most.mean})  # fmt: skip
    return pd.DataFrame(rows)


def _offered_rps(rows: pa.Table, x: float) -> float:
    """Return the mean of requests per second that the runs of a panel were offered at x."""
    frame = rows.select(["x", "over", "definition", "value"]).to_pandas()
    offered = frame[(frame["definition"] == "offered_rps") & (frame["over"] == "pooled") & (frame["x"] == x)]
    return float(offered["value"].mean())


def _end(points: float | None) -> float:
    """Return the end of an interval in points, cut at 100 points of loss or gain; NaN for None."""
    return np.nan if points is None else float(np.clip(points, -100, 100))


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the figure, a page wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no part of a system was switched off")
    parts = list(dict.fromkeys(frame["part"]))
    places = list(frame.groupby(["condition", "x"], sort=False))
    above = "Above each panel: what the whole system attains. Intervals are 95 %, paired."
    text, foot = style.foot(brief(table, facts, note, above), 178)
    lines = -(-len(places) // ACROSS)
    body = HEAD_IN + ROW_IN * len(parts)
    height = lines * body + 0.45 + foot
    page_in = form.width(style.PAGE_IN)
    figure = Figure(figsize=(page_in, height))
    ends = frame[["lost", "low", "high", "most"]].to_numpy(np.float64)
    low, high = np.nanmin(ends, initial=0.0), np.nanmax(ends, initial=1.0)
    wide = (page_in - NAMES_IN) / min(ACROSS, len(places))
    for k, (_, bars) in enumerate(places):
        line, column = divmod(k, ACROSS)
        bottom = height - 0.05 - (line + 1) * body
        axis = figure.add_axes(((NAMES_IN + column * wide) / page_in, bottom / height,
                                (wide - 0.08) / page_in, ROW_IN * len(parts) / height))  # fmt: skip
        style.name_rows(axis, [textwrap.fill(part, 24) for part in parts], fontsize=6)
        axis.tick_params(labelleft=not column)
        axis.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        _panel(axis, bars.set_index("part").reindex(parts))
        at = bars.iloc[0]
        axis.set_title(
            f"{at['trace'].partition('+')[0]}\n{at['offered_rps']:.3g} req/s, {at['whole']:.1f} %", fontsize=6
        )
    left = NAMES_IN / page_in
    lost = f"points of {definition(facts.definitions[0])} attainment lost (right: the part helps)"
    figure.text((1 + left) / 2, (foot + 0.12) / height, lost, ha="center", fontsize=6.5)
    style.legend(figure, [
        Patch(facecolor=LOST, edgecolor=LOST, label="lost without this part, all models"),
        Patch(facecolor="white", edgecolor=LOST, label="its interval covers 0"),
        Line2D([], [], color=MOST, marker="D", linestyle="none", markersize=3, label="the model that loses most"),
    ], 3, handlelength=1.6, columnspacing=1.6)  # fmt: skip
    style.write_foot(figure, text)
    return figure


def _panel(axis: Axes, bars: pd.DataFrame) -> None:
    """Draw a bar for each part with its interval, and the model that loses most as a diamond."""
    axis.axvline(0.0, color="#202020", linewidth=0.7)
    for k, (lost, low, high, most) in enumerate(bars[["lost", "low", "high", "most"]].to_numpy(np.float64).tolist()):
        if np.isnan(lost):
            continue
        told = bool(np.isfinite(low)) and not low <= 0 <= high
        axis.barh(k, lost, 0.6, color=LOST if told else "white", edgecolor=LOST, linewidth=0.8)
        if np.isfinite(low):
            style.interval(axis, k, (low, high), "#404040")
        axis.plot([most], [k], "D", color=MOST, markersize=2.6, zorder=3)


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, which the CSV holds."""
    above = "Above each panel: what the whole system attains."
    return caption(table, facts, "mean and 95 % interval, paired,", above, *asked(table, facts), note=note)
