"""KVPR of Prism's starts by Algorithm 1 and by search, over the least of any placement, beside the rate they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from harness.rows import by_window, crossings, record, tidy
from harness.rows.about import About
from plots import page, style

MEASURE = "kvpr_above"
COLORS = (style.BLUE, style.ORANGE, style.GREEN)
CAPTION = (
    "Simulated: prism on hyperbolic-like, streams given to models by Latin squares; mean of {n} seeds. KVPR: of all "
    "placements that hold every model with one longest request. No bar: in some windows the start leaves a model out."
)


def points(table: pa.Table, about: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each condition and start of the search.

    A row has the start's KVPR relative to the least KVPR, and the highest rate that it holds.
    """
    rows = []
    for panel in about.panels:
        drawn = crossings.of_panel(table, panel)
        for name in about.systems:
            # a start is the same at all rates: each seed counts once
            curves = by_window.curves(drawn, name, MEASURE, "x").values()
            above = np.array([next(iter(curve.values())) for curve in curves], np.float64)
            at = crossings.crossing(drawn, panel, name, about.definitions[0], about.level)
            mean, most = (float(above.mean()), float(above.max())) if len(above) else (np.nan, np.nan)
            rps, words = (np.nan, "") if at is None else (at.at.mean, at.at.text())
            row = {"condition": panel["name"], "start": name, "kvpr_above": mean, "kvpr_most": most}
            rows.append(row | {"rps": rps, "rps_told": words})
    return pd.DataFrame(rows)


def draw(frame: pd.DataFrame, seeds: int) -> Figure:
    """Draw KVPR and the rate, a bar for each condition and start; call within `style.theme()`."""
    starts = list(dict.fromkeys(frame["start"]))
    colors = [COLORS[starts.index(start)] for start in frame["start"]]
    pairs = zip(frame["kvpr_above"], frame["kvpr_most"], strict=True)
    above = ["" if np.isnan(mean) else f"{mean:.2f}, at most {most:.2f}" for mean, most in pairs]
    words = {"kvpr_above": above, "rps": list(frame["rps_told"])}
    names = [f"{row.condition}\n{row.start}" for row in frame.itertuples()]
    figure, ((pressure, rate),) = page.panels(
        [(2, 0.3 * len(frame))],
        left_in=page.names_in(names, 5.5),
        right_in=0.15,
        above_in=0.3,
        text=CAPTION.format(n=seeds),
    )
    for axis, column, heading, unit in (
        (pressure, "kvpr_above", "(a) largest KVPR over the least", "times"),
        (rate, "rps", "(b) rate that it holds", "requests per second"),
    ):
        page.rows(axis, names, labelled=axis is pressure, points=5.5)
        values = frame[column].fillna(0.0)
        bars = zip(values, colors, words[column], strict=True)
        page.bars(axis, [(value, color, text, -1.0) for value, color, text in bars], max(values))
        page.named(axis, heading, unit, "")
    return figure


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a study that measures KVPR."""
    if not (folder / record.SWEEP).is_file():
        return False
    return record.footer(folder / record.SWEEP).get("study") == "placement"


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:  # noqa: ARG001 - its caption is its own
    """Draw the study in a folder to `stem`.pdf, .png and .csv; return their paths. Raises UserError."""
    about = About.read(folder / record.SWEEP)
    frame = points(tidy.stored(folder / record.SWEEP), about)
    with style.theme():
        return style.save(draw(frame, about.seeds), stem, frame, command)
