"""Seconds of a switch of models by stage, from recorded runs of a system with its optimisations on and off.

bench plot FOLDER --figure switch    # FOLDER has runs stored by bench run SPEC.toml --record -o FOLDER

A bar is the time from the end of a turn to the start of the next turn of another model. It is averaged over the middle
half of the switches, so that idle gaps do not count. Two of its parts are seconds of a load on idle links, from the
cost table. One is the start of an engine (engine start), which does not depend on the size of the weights; the other is
the copy of the weights (weights). The rest of the bar is KV and waiting. Seconds of the load that were hidden behind
the previous turn (prefetch, overlap) are drawn hollow.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from plots import fig_turns, page, style

STAGES = ("engine start", "weights", "KV and waiting")
COLORS = dict(zip(STAGES, (style.RED, style.BLUE, style.ORANGE), strict=True))


def recorded(folder: Path) -> list[Path]:
    """List the recorded runs in a folder that had turns."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and fig_turns.draws(path))


def draws(folder: Path) -> bool:
    """Tell whether a folder holds at least two recorded runs that can be compared."""
    return len(recorded(folder)) > 1


def points(runs: Iterable[Path]) -> pd.DataFrame:
    """Return the table of the figure, with a row for each run.

    A row has the seconds of each stage of a switch, the hidden seconds, and the number of switches.
    """
    rows = []
    for run in runs:
        turns, facts = fig_turns.read(run)
        spec, every = facts["spec"], fig_turns.gaps(turns)
        gaps = every.sort_values("gap_s", kind="stable").iloc[len(every) // 4 : max(1, 3 * len(every) // 4)]
        seen = gaps["gap_s"].to_numpy(np.float64)
        fixed, copy = np.array([facts["load_s"][model] for model in gaps["model"]], np.float64).reshape(-1, 2).T
        engine = np.minimum(fixed, seen)
        weights = np.minimum(copy, seen - engine)
        parts = (engine, weights, seen - engine - weights, fixed + copy - engine - weights)
        row: dict[str, Any] = {"system": fig_turns.label(spec), "switches": len(every)}
        row |= {name: float(x.mean()) if len(seen) else 0.0 for name, x in zip((*STAGES, "hidden"), parts, strict=True)}
        rows.append(row)
    return pd.DataFrame(rows).sort_values("system", kind="stable", ignore_index=True)


def draw(shown: pd.DataFrame, note: str = "") -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`."""
    handles = [Patch(color=COLORS[stage], label=stage) for stage in STAGES]
    handles.append(Patch(facecolor="white", edgecolor="#808080", linewidth=0.5, label="hidden"))
    names = list(shown["system"])
    figure, ((axis,),) = page.panels(
        [(1, 0.24 * len(shown))],
        wide_in=style.COLUMN_IN,
        left_in=page.names_in(names),
        right_in=0.3,
        above_in=0.06,
        handles=handles,
        text=note,
    )
    at, bottom = np.arange(len(shown)), np.zeros(len(shown))
    for stage in STAGES:
        axis.barh(at, shown[stage], 0.62, bottom, color=COLORS[stage], edgecolor="white", linewidth=0.3)
        bottom = bottom + shown[stage].to_numpy(np.float64)
    hidden = [0.0 if x < 1e-6 else 0.5 for x in shown["hidden"]]
    axis.barh(at, shown["hidden"], 0.62, bottom, color="white", edgecolor="#808080", linewidth=hidden)
    for i, (total, beyond) in enumerate(zip(bottom, shown["hidden"], strict=True)):
        page.beside(axis, f"{total:.2g} s", (total + beyond, i), (2, 0))
    page.rows(axis, names)
    page.ruler(axis.xaxis, 0, float((bottom + shown["hidden"]).max()))
    page.shared([axis], "seconds of a switch, mean of the middle half (simulated)", 6)
    return figure


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the recorded runs in a folder to `stem`.pdf, .png and .csv, and return their paths. Raises UserError."""
    shown = points(recorded(folder))
    with style.theme():
        return style.save(draw(shown, note), stem, shown, command)
