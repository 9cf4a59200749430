"""SMs of a model's prefill and decode over time, from a recorded run.

bench run mine.toml --record && bench plot results/pdmux-3f9c01ab --figure split
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.policy.types import UserError
from harness.rows import record
from harness.rows.record import TURNS as FILE
from plots import fig_turns, page, style

SPAN_S = 30.0  # shown, from the window's start


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a recorded run in which lanes were given numbers of SMs."""
    path = folder / FILE
    return path.is_file() and "partitions" in record.footer(path)


def points(facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return the SMs of the first model's prefill and decode over time: columns time_s, prefill, decode.

    A row is valid from its time until the next row. A phase for which no number was set gets all SMs that the other
    phase does not have.
    """
    sms, first = int(facts["sms"]), facts["partitions"][0][1]
    known: dict[str, int | None] = {"prefill": 0, "decode": None}
    rows = []
    for now_s, model, phase, count in facts["partitions"]:
        if model == first and phase in known:
            known[phase] = count
            prefill = known["prefill"]
            if prefill is None:
                prefill = sms - (known["decode"] or 0)
            rows.append({"time_s": now_s, "prefill": prefill, "decode": sms - prefill})
    return pd.DataFrame(rows).drop_duplicates("time_s", keep="last", ignore_index=True)


def draw(facts: Mapping[str, Any], note: str = "") -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw."""
    every = points(facts)
    shown = every[(every["time_s"] >= 0) & (every["time_s"] <= SPAN_S)]
    if not len(shown):
        raise UserError(f"nothing to draw: no division of SMs in the first {SPAN_S:g} s")
    shown = every.iloc[max(0, shown.index[0] - 1) : shown.index[-1] + 1]  # begins with the division in force at 0
    times = [*shown["time_s"].clip(lower=0.0), SPAN_S]
    prefill = [*shown["prefill"], shown["prefill"].iloc[-1]]
    spec, looks = facts["spec"], {"prefill": style.BLUE, "decode": style.ORANGE}
    text = [
        fig_turns.setting_text(spec),
        "Ordered; in force from both phases' next boundary.",
        note,
        style.unvetted_of({fig_turns.label(spec): spec["system"]}),
    ]
    figure, ((axis,),) = page.panels(
        [(1, 0.75)],
        wide_in=style.COLUMN_IN,
        left_in=0.4,
        above_in=0.06,
        text=" ".join(filter(None, text)),
        handles=[Patch(color=color, label=phase) for phase, color in looks.items()],
    )
    axis.fill_between(times, 0, prefill, step="post", color=looks["prefill"], linewidth=0)
    axis.fill_between(times, prefill, facts["sms"], step="post", color=looks["decode"], linewidth=0)
    page.ruler(axis.xaxis, 0, SPAN_S, share=0)
    page.ruler(axis.yaxis, 0, facts["sms"], share=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("SMs")
    return figure


def render(run: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw how a recorded run divided SMs, to `stem`.pdf, .png and .csv; return their paths. Raises UserError."""
    facts = record.footer(run / FILE)
    with style.theme():
        return style.save(draw(facts, note), stem, points(facts), command)
