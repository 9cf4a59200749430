"""Attainment and GPU-hours by setting of one field, in the study's order: a line for each condition."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.policy.types import UserError
from harness.rows import held
from harness.rows.about import About
from harness.rows.estimate import Estimate
from plots import page, style
from plots.caption import brief, caption, definition, floats

COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.RED, style.SKY)
LOOKS = tuple(map(style.Look, COLORS, style.MARKERS, style.LINES))
ENDS = ("mean", "low", "high")


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each (condition, setting).

    Attainment is a share, and GPU-hours are per day.
    """
    rows = [
        {"condition": panel["name"], "trace": panel["trace"], "gpus": setting.gpus, "setting": setting.name}
        | _ends("met", setting.met)
        | {"worst": setting.worst.mean}
        | _ends("gpu_h", setting.gpu_h)
        | {"loads": setting.loads}
        for panel, settings in held.panels(table, facts)
        for setting in settings
    ]
    return pd.DataFrame(rows)


def _ends(name: str, e: Estimate) -> dict[str, float]:
    return {f"{name}_{end}": x for end, x in floats(e).items()}


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw attainment and GPU-hours by setting, and attainment by GPU-hours; call within `style.theme()`.

    Raises UserError if there is nothing to draw.
    """
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this study tells for how long weights held its GPUs")
    names = [name for name in facts.systems if name in set(frame["setting"])]
    share = f"{definition(facts.definitions[0])} SLOs met (%)"
    room = [page.words_in(name, 6) for name in names]
    turned = sum(room) + 0.06 * len(room) > 1.7
    by_name = dict(zip(dict.fromkeys(frame["condition"]), LOOKS, strict=False))
    figure, ((met, spent, both),) = page.panels(
        [(3, 1.75)],
        left_in=0.45,
        beside_in=0.5,
        right_in=0.12,
        above_in=0.12,
        columns=2,
        below_in=0.28 + (max(room) if turned else 0.08),
        handles=[Line2D([], [], linestyle=look.line, label=name, **look.marks()) for name, look in by_name.items()],
        text=brief(table, facts, note, _what(facts)),
    )
    for condition, look in by_name.items():
        mine = frame[frame["condition"] == condition].set_index("setting").reindex(names)
        (y, low, high), hours = (100 * mine[f"met_{end}"] for end in ENDS), [mine[f"gpu_h_{end}"] for end in ENDS]
        page.curve(met, range(len(names)), y, look, low, high, bars=True)
        page.curve(spent, range(len(names)), hours[0], look, *hours[1:], bars=True)
        page.curve(both, hours[0], y, look)
    for axis, label in ((met, share), (spent, "GPU-hours a day")):
        axis.set_xticks(range(len(names)), names, rotation=90 * turned, fontsize=6)
        axis.set_xlabel(next(iter(facts.titles), "setting"), fontsize=6.5, labelpad=1)
        axis.set_ylabel(label, fontsize=6.5)
    page.shared([both], "GPU-hours a day (fewer is better)")
    both.set_ylabel(share, fontsize=6.5)
    page.ruler(both.xaxis, 0.0, frame["gpu_h_mean"].max())
    page.ruler(spent.yaxis, 0.0, np.nanmax(frame[["gpu_h_mean", "gpu_h_high"]].to_numpy(np.float64)))
    least = np.nanmin(frame[["met_mean", "met_low"]].to_numpy(np.float64))
    for axis in (met, both):
        axis.axhline(100 * facts.level, color="#808080", linewidth=0.6, linestyle=page.LEVEL)
        page.ruler(axis.yaxis, 100 * min(facts.level, least), 100.0)
    return figure


def _what(facts: About) -> str:
    settings = f"Settings in the study's order; dashed: {100 * facts.level:g} %."
    return f"{settings} GPU-hours: weights on a GPU or on their way to it, of whole runs. Bars are 95 % intervals."


def full_caption(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption for the CSV."""
    return caption(table, facts, "mean and 95 % interval", _what(facts), note=note)
