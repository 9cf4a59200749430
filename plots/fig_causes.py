"""Causes of SLO misses: for each system (or rate) a bar of seconds per miss by cause, and a bar of misses by cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.policy.types import UserError
from plots import page, style

BAR_IN = 0.24


class Look(NamedTuple):
    """Look of a cause, distinct by colour, and in greyscale by lightness and hatch."""

    color: str
    hatch: str
    name: str


LOOKS: Mapping[str, Look] = {  # from the left: what was waited for, then what was run
    "admission": Look("#f0e442", "....", "admission"),
    "load": Look(style.BLUE, "", "weights"),
    "kv": Look(style.ORANGE, "////", "KV memory"),
    "transfer": Look(style.PURPLE, "\\\\\\\\", "KV transfer"),
    "queue": Look(style.SKY, "", "queue"),
    "time_slice": Look(style.RED, "....", "time slices"),
    "contention": Look(style.RED, "xxxx", "contention"),
    "host": Look("#303030", "", "host"),
    "compute": Look("#dcdcdc", "", "running"),
}


def frame(rows: Iterable[Any]) -> pd.DataFrame:
    """Build the table that is drawn, a row for each bar and cause, from records of `harness.study.misses`.

    `seconds` is the mean time of the cause in a miss, `share` the share of misses that the cause explains.
    """
    facts = ("label", "rate_scale", "offered_rps", "runs", "offered", "missed")
    lines = [
        {name: getattr(row, name) for name in facts}
        | {"cause": cause, "seconds": row.seconds[cause]}
        | {"share": row.explained.get(cause, 0) / sum(row.explained.values())}
        for row in rows
        if row.missed
        for cause in LOOKS
    ]
    return pd.DataFrame(lines)


def draw(points: pd.DataFrame, scored: pa.Table, definition: str) -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if no SLO was missed.

    `scored` has those rows of the sweep's table from which the points were computed.
    """
    if not len(points):
        raise UserError("nothing to draw: no request missed")
    by_rate = points["label"].nunique() == 1 and points["rate_scale"].nunique() > 1
    key = "rate_scale" if by_rate else "label"
    bars = points.drop_duplicates(key)
    lost = bars["missed"] / bars["offered"]
    order = list(bars[key].iloc[(bars["rate_scale"] if by_rate else lost).argsort(kind="stable")])
    about = scored.to_pandas()
    about = about[about["skipped"].isna()]
    missed = dict(zip(bars[key], 100 * lost, strict=True))
    names = [f"{f'x {x:g}' if by_rate else style.called(str(x))}\n{missed[x]:.3g} % missed" for x in order]
    shown = [look for cause, look in LOOKS.items() if points[points["cause"] == cause]["share"].max() > 0.0005]
    figure, ((seconds, share),) = page.panels(
        [(2, BAR_IN * len(order))],
        wide_in=style.COLUMN_IN,
        left_in=page.names_in(names),
        beside_in=0.18,
        below_in=0.2,
        handles=[
            Patch(facecolor=look.color, hatch=look.hatch, edgecolor="white", linewidth=0.3, label=look.name)
            for look in shown
        ],
        text=style.caption(about, bars["runs"], _note(points, definition, by_rate), pooled=True),
    )
    for axis, column, unit in ((seconds, "seconds", 1.0), (share, "share", 100.0)):
        page.rows(axis, names, labelled=axis is seconds)
        _bars(axis, points, key, order, column, unit)
    page.title(seconds, "(a) seconds a miss", pad=3)
    page.title(share, "(b) % of misses", pad=3)
    page.ruler(seconds.xaxis, 0, points.groupby(key)["seconds"].sum().max())
    page.ruler(share.xaxis, 0, 100, share=0)
    return figure


def _bars(axis: Axes, points: pd.DataFrame, key: str, order: list[Any], column: str, unit: float) -> None:
    """Draw each bar as a stack of its causes, beginning at the left."""
    for y, name in enumerate(order):
        bars, at = points[points[key] == name].set_index("cause")[column], 0.0
        for cause, look in LOOKS.items():
            value = float(bars[cause]) * unit
            axis.barh(y, value, 0.7, left=at, color=look.color, hatch=look.hatch, edgecolor="white", linewidth=0.3)
            at += value


def _note(points: pd.DataFrame, definition: str, by_rate: bool) -> str:
    first, rps = points.iloc[0], points["offered_rps"].max()
    at = f"At rate scale {first['rate_scale']:g} ({rps:.3g} req/s). "
    if by_rate:
        at = f"Rate scales of {first['label']}. "
    return f"{at}Missed requests ({definition}): (a) time from arrival to end; (b) by cause of the miss."


def render(points: pd.DataFrame, scored: pa.Table, definition: str, stem: Path, command: str) -> list[Path]:
    """Draw the misses to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    with style.theme():
        return style.save(draw(points, scored, definition), stem, points, command)
