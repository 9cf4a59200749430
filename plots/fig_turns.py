"""Turns of models on a few GPUs, from a recorded run: which model ran when, and the gaps between turns.

bench run mine.toml --record && bench plot results/aegaeon-3f9c01ab --figure turns
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import checked, record, setting
from harness.rows.forms import TURN_COLUMNS
from harness.rows.record import TURNS as FILE
from plots import page, style

SPAN_S = 60.0  # shown, from the window's start
GPUS = 2
LETTER_S = 0.55  # seconds of an axis of SPAN_S that a digit takes
COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.BROWN, style.SKY)


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a recorded run that had turns."""
    path = folder / FILE
    return path.is_file() and len(record.table(path, TURN_COLUMNS)) > 0


def read(run: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read the turns of a recorded run and its facts (spec, load_s)."""
    frame: pd.DataFrame = record.table(run / FILE, TURN_COLUMNS).to_pandas()
    return frame, record.footer(run / FILE)


def points(turns: pd.DataFrame, phase: str = "decode") -> pd.DataFrame:
    """Return the turns to draw: those of a phase in the first SPAN_S seconds, on at most GPUS values of `gpus`.

    These are the first GPUS values that have such a turn. Raises UserError if there is no such turn.
    """
    rows = turns[(turns["phase"] == phase) & (turns["end_s"] > 0) & (turns["start_s"] < SPAN_S)]
    if not len(rows):
        raise UserError(f"nothing to draw: no {phase} turn in the first {SPAN_S:g} s")
    gpus = sorted(rows["gpus"].unique(), key=lambda x: [int(part) for part in x.split("+")])[:GPUS]
    shown: pd.DataFrame = rows[rows["gpus"].isin(gpus)].sort_values(["gpus", "start_s"], ignore_index=True)
    return shown


def gaps(turns: pd.DataFrame, phase: str = "decode") -> pd.DataFrame:
    """Return the gaps between successive turns on the same GPUs, if the two turns belong to different models.

    Columns are gpus, model (that of the second turn) and gap_s.
    """
    rows = turns[(turns["phase"] == phase) & (turns["end_s"] > 0)].sort_values(["gpus", "start_s"])
    before = rows.groupby("gpus")[["model", "end_s"]].shift()
    other = before["model"].notna() & (before["model"] != rows["model"])
    return rows[other].assign(gap_s=(rows["start_s"] - before["end_s"])[other])[["gpus", "model", "gap_s"]]


def draw(turns: pd.DataFrame, facts: Mapping[str, Any], note: str = "") -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    shown = points(turns)
    gpus = list(dict.fromkeys(shown["gpus"]))
    kinds = sorted({model.partition("/")[0] for model in shown["model"]})
    colors = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(kinds)}
    names = [f"GPU {gpu}" for gpu in gpus]
    figure, ((axis,),) = page.panels(
        [(1, 0.3 * len(gpus))],
        wide_in=style.COLUMN_IN,
        left_in=page.names_in(names),
        above_in=0.06,
        handles=[Patch(color=colors[kind], label=kind) for kind in kinds],
        columns=len(kinds),
        text=caption(turns, facts, note),
    )
    page.rows(axis, names)
    for i, gpu in enumerate(gpus):
        for turn in shown[shown["gpus"] == gpu].itertuples():
            kind, _, number = turn.model.partition("/")
            start, end = max(0.0, turn.start_s), min(SPAN_S, turn.end_s)
            axis.broken_barh(
                [(start, end - start)], (i - 0.36, 0.72), color=colors[kind], linewidth=0.3, edgecolor="white"
            )
            if end - start > LETTER_S * len(number) * 1.6:
                axis.text((start + end) / 2, i, number, ha="center", va="center", fontsize=4.5, color="white")
    page.ruler(axis.xaxis, 0, SPAN_S, share=0)
    axis.set_xlabel("seconds")
    axis.grid(visible=False)
    return figure


def label(spec: Mapping[str, Any]) -> str:
    """Return a run's system and preset as a label."""
    return str(spec["system"]) + (f":{spec['preset']}" if spec["preset"] else "")


def caption(turns: pd.DataFrame, facts: Mapping[str, Any], note: str = "") -> str:
    """Write the caption: the setting of the run, and the count and median time of the turns on all GPUs."""
    spec, decodes, between = facts["spec"], turns[turns["phase"] == "decode"], gaps(turns)
    about = [
        label(spec),
        spec["trace"],
        spec["models"],
        mix.told(spec["gpu"], spec["gpus"]),
        f"simulated ({setting.LAW})",
        checked.note(spec["gpu"], spec["host"]),
        f"seed {spec['seed']}",
    ]
    span_s = decodes["end_s"] - decodes["start_s"]
    took = (
        f"Decode turns: {len(decodes)}, median {span_s.median():.2g} s; between models "
        f"{between['gap_s'].median():.2g} s (median), {between['gap_s'].mean():.2g} s (mean, all)."
    )
    key = "Numbers tell models of a kind apart; white: no model runs, weights or KV are on their way."
    late = style.unvetted_of({label(spec): spec["system"]})
    return " ".join(filter(None, [" · ".join(filter(None, about)) + ".", took, key, note, late]))


def render(run: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the turns of a recorded run to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    turns, facts = read(run)
    with style.theme():
        return style.save(draw(turns, facts, note), stem, points(turns), command)
