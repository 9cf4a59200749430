"""Causes of SLO misses: for each system (or rate) a bar of seconds a miss by cause, and the misses each explains."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.policy.types import UserError
from plots import form, style

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

BAR_IN = 0.24


class Look(NamedTuple):
    """Look of a cause: told apart by colour, in grey by lightness and hatch."""

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

    `seconds` is the mean of the cause in a miss, `share` that of the misses that the cause explains.
    """
    return pd.DataFrame(
        [
            {"label": row.label, "rate_scale": row.rate_scale, "offered_rps": row.offered_rps, "runs": row.runs,
             "offered": row.offered, "missed": row.missed, "cause": cause, "seconds": row.seconds[cause],
             "share": row.explained.get(cause, 0) / sum(row.explained.values())}
            for row in rows if row.missed for cause in LOOKS
        ]
    )  # fmt: skip


def draw(points: pd.DataFrame, scored: pa.Table, definition: str) -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if nothing missed.

    `scored` are the rows of the sweep's table that the points are of.
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
    text = textwrap.fill(style.caption(about, bars["runs"], _note(points, definition, by_rate), pooled=True), 92)

    below = 0.3 + 0.085 * (1 + text.count("\n"))
    height = below + 0.62 + BAR_IN * len(order)
    figure = Figure(figsize=(form.width(style.COLUMN_IN), height))
    grid = figure.add_gridspec(1, 2, width_ratios=(1.15, 1), wspace=0.1)
    seconds, share = (figure.add_subplot(grid[0, i]) for i in (0, 1))
    for axis, column, unit in ((seconds, "seconds", 1.0), (share, "share", 100.0)):
        _bars(axis, points, key, order, column, unit)
    seconds.set_title("(a) seconds a miss", loc="left", pad=3)
    share.set_title("(b) % of misses", loc="left", pad=3)
    missed = dict(zip(bars[key], 100 * bars["missed"] / bars["offered"], strict=True))
    seconds.set_xlim(left=0)
    seconds.set_yticks(range(len(order)), [f"{_name(x)}\n{missed[x]:.3g} % missed" for x in order], fontsize=6)
    share.set_yticks([])
    share.set_xlim(0, 100)
    if by_rate:
        seconds.set_ylabel(f"rate scale of {points['label'].iloc[0]}")
    top = 1 - (_legend(figure, points) + 0.22) / height
    figure.subplots_adjust(left=_room(figure, seconds), right=0.965, top=top, bottom=below / height)
    figure.text(0.01, 0.006, text, fontsize=5, color="#404040", va="bottom", linespacing=1.25)
    return figure


def _legend(figure: Figure, points: pd.DataFrame) -> float:
    """Put the causes that show on top; returns their height in inches."""
    shown = {cause: look for cause, look in LOOKS.items() if points[points["cause"] == cause]["share"].max() > 0.0005}
    handles = [
        Patch(facecolor=look.color, hatch=look.hatch, edgecolor="white", linewidth=0.3, label=look.name)
        for look in shown.values()
    ]
    return style.legend(figure, handles, 4, handlelength=1.5, columnspacing=1.0, labelspacing=0.3)


def _room(figure: Figure, axis: Axes) -> float:
    """Return the share of the figure's width that the words at the left of an axis take, with a margin of 0.02."""
    figure.draw_without_rendering()
    words = [*axis.get_yticklabels(), axis.yaxis.label]
    left = min(word.get_window_extent().x0 for word in words if word.get_text())
    return float((axis.get_window_extent().x0 - left) / figure.bbox.width) + 0.02


def _name(value: Any) -> str:
    return f"x {value:g}" if isinstance(value, float) else str(value)


def _bars(axis: Axes, points: pd.DataFrame, key: str, order: list[Any], column: str, unit: float) -> None:
    """Stack the causes of each bar from the left."""
    for y, name in enumerate(order):
        bars, at = points[points[key] == name].set_index("cause")[column], 0.0
        for cause, look in LOOKS.items():
            value = float(bars[cause]) * unit
            axis.barh(y, value, 0.7, left=at, color=look.color, hatch=look.hatch, edgecolor="white", linewidth=0.3)
            at += value
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _note(points: pd.DataFrame, definition: str, by_rate: bool) -> str:
    first = points.iloc[0]
    at = "" if by_rate else f"At rate scale {first['rate_scale']:g} ({points['offered_rps'].max():.3g} req/s). "
    return f"{at}Missed requests ({definition}): (a) time from arrival to end; (b) by cause of the miss."


def render(points: pd.DataFrame, scored: pa.Table, definition: str, stem: Path, command: str) -> list[Path]:
    """Draw the misses to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    with style.theme():
        return style.save(draw(points, scored, definition), stem, points, command)
