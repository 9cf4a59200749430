"""Caveats of a table: systems that are unchecked, depart from their paper, or have no valid runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from harness.answers.commands import check_command
from harness.rows import memo, setting, summaries, vetted
from harness.study.table import labels


def unchecked_lines(rows: pa.Table) -> list[str]:
    """Return a line for each system that has not passed `bench check`, or has passed only a part of it.

    If a system has not passed, its line has the command that checks it.
    """
    return list(map(": ".join, unchecked(dict(sorted(labels(rows).items())))))


def unchecked(systems: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a heading and a line for each system that has not passed `bench check`, or has passed only a part of it.

    `systems` has the name or path of each system by label.
    """
    failing = set(vetted.unchecked(systems.values()))
    for label, name in systems.items():
        if name in failing:
            yield "unchecked", f"{label}, {check_command(name)}"
    for label, name in systems.items():
        if part := vetted.unreached(name):
            yield "checked in part", f"{label}: no case of bench check reached {part}"


def stated(rows: pa.Table, column: str, word: str) -> list[str]:
    """Return a line for each label for which `column` has a reason; the line has `word`, the label and the reason."""
    pairs = zip(memo.column(rows, "label"), memo.column(rows, column), strict=True)
    return [f"{word}: {label}, {why}" for label, why in dict(sorted((a, b) for a, b in pairs if b)).items()]


def departures(rows: pa.Table) -> list[str]:
    """Return a line for each label whose engine differs from its paper's engine; the line states the difference."""
    return stated(rows, "departs", "not as published")


def invalid(rows: pa.Table) -> list[str]:
    """Return a line for each label whose runs on real servers are invalid: the label and the reason."""
    return [f"invalid: {label}: {why}" for label, why in summaries.invalid(rows).items()]


def own_degrees(rows: pa.Table) -> list[str]:
    """Return one line that says which labels chose their own degrees of parallelism; empty if there are none."""
    if "degrees" not in rows.column_names:
        return []
    degrees = setting.degrees(zip(memo.column(rows, "label"), memo.column(rows, "degrees"), strict=True))
    return [degrees] if degrees else []
