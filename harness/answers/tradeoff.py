"""Attainment and GPU-hours of each setting, and which setting reaches the level with the fewest GPU-hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import pyarrow as pa

from harness.answers.table import Table, joined
from harness.rows import held as helds
from harness.rows.about import About
from harness.rows.estimate import NONE, SHARE
from harness.rows.held import DAY_H, Held


def parts(about: About, table: pa.Table, *, every: bool) -> Iterator[str | Table]:
    """Yield the answer, what the columns mean, a table with a row per setting, and each condition's best setting.

    With `every` the table has intervals, the worst model and loads too.
    """
    named = list(zip(ascii_lowercase, helds.panels(table, about), strict=False))
    level, first = about.level, about.panels[0]
    chosen = dict[str, list[str]]()
    for letter, (_, settings) in named:
        cheapest = helds.cheapest(settings, level)
        chosen.setdefault(cheapest.name if cheapest else "", []).append(letter)
    title, share = next(iter(about.titles), "setting"), f"{100 * level:g} % of SLOs"
    never = chosen.pop("", [])
    clauses = [f"{name} under {joined(letters)}" for name, letters in chosen.items()]
    clauses += [f"none does under {joined(never)}"] if never else []
    best = f"the {title} that meets {share} on the fewest GPU-hours: {'; '.join(clauses)}"
    yield best if chosen else f"no {title} meets {share}"
    met = "TTFT and TPOT" if about.definitions[0] == "both" else str(about.definitions[0]).upper()
    yield (
        f"share of requests that meet {met} (SLO {first['slo']}), and GPU-hours a day with weights on a GPU or on their"
        f" way; {about.seeds} seeds"
    )
    head, by_name = [title], {name: [name] for name in about.systems}
    for letter, (_, settings) in named:
        head += [f"{letter} met %", "GPU-h", *["worst", "loads"] * every]
        of = {setting.name: setting for setting in settings}
        for name, row in by_name.items():
            row += _cells(of[name], every) if name in of else [NONE] * (2 + 2 * every)
    yield Table(head, list(by_name.values()))
    yield from (f"{letter}  {_place(panel)}: {_answer(settings, level)}" for letter, (panel, settings) in named)


def _answer(settings: Sequence[Held], level: float) -> str:
    """Say which setting reaches the level with the fewest GPU-hours or, if none does, comes nearest to it."""
    if not settings:
        return "ran nowhere"
    if (best := helds.cheapest(settings, level)) is not None:
        return f"{best.name}, {_spent(best)}"
    nearest = max(settings, key=lambda s: s.met.mean)
    return f"none, at best {100 * nearest.met.mean:.1f} % with {nearest.name}, {_spent(nearest)}"


def _spent(setting: Held) -> str:
    worst = f", worst model {100 * setting.worst.mean:.0f} %"
    return f"{setting.gpu_h.mean:.0f} of {setting.gpus * DAY_H} GPU-hours a day{worst}"


def _cells(setting: Held, every: bool) -> list[str]:
    numbers = (setting.met.times(100), setting.gpu_h, *[setting.worst.times(100)] * every)
    return [*(e.text(SHARE, spread=every) for e in numbers), *[f"{setting.loads:.0f}"] * every]


def _place(panel: Mapping[str, Any]) -> str:
    """Name a condition, its traffic and its GPUs."""
    rate = panel["rate_rps"] or next(iter(panel["xs"]), None)
    offered = "" if rate is None else f", {rate:.3g} req/s"
    trace = str(panel["trace"]).partition("+")[0]
    return f"{panel['name']} ({panel['models']} on {panel['gpus']} GPUs, {trace}{offered})"
