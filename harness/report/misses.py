"""Misses of several runs as a table: their number, their time, and its shares by cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.report.causes import CAUSES
from harness.report.text_table import aligned
from harness.rows.estimate import NONE
from harness.rows.record import WAITS

LEAST = 0.01  # of a row's seconds, where not all is asked for


class Misses(NamedTuple):
    """Requests that missed, in one or more runs of a system at a rate."""

    label: str
    rate_scale: float
    offered_rps: float  # mean over runs
    runs: int
    offered: int
    missed: int
    ns: Mapping[str, int]  # of all that missed, by cause (record.WAITS): sums to their latencies
    explained: Mapping[str, int]  # how many of them by this cause (rows/causes.py)
    hollow: bool = False  # it could not run

    @staticmethod
    def pooled(runs: Sequence[Misses]) -> Misses:
        """Pool the misses of runs of one label and rate."""
        first = runs[0]
        ns, explained = Counter[str](), Counter[str]()
        for run in runs:
            ns.update(run.ns)
            explained.update(run.explained)
        return first._replace(
            offered_rps=sum(run.offered_rps for run in runs) / len(runs), runs=sum(run.runs for run in runs),
            offered=sum(run.offered for run in runs), missed=sum(run.missed for run in runs), ns=dict(ns),
            explained=dict(explained), hollow=all(run.hollow for run in runs),
        )  # fmt: skip

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds a miss by cause: they sum to its mean latency."""
        return {wait: self.ns.get(wait, 0) / 1e9 / self.missed if self.missed else 0.0 for wait in WAITS}


def answer(rows: Sequence[Misses], by: str) -> Iterator[str]:
    """Yield a sentence on the systems or rates with least and most misses, and their causes; none where nothing ran."""
    ran = sorted((row for row in rows if not row.hollow), key=lambda row: row.missed / max(1, row.offered))
    if not ran:
        return
    ends = [ran[0], ran[-1]] if len(ran) > 1 else ran
    told = []
    for row in ends:
        name = f"rate scale {row.rate_scale:g}" if by == "rate" else row.label
        why = max(row.explained, key=lambda wait: row.explained[wait], default="")
        cause = f", mostly {CAUSES[why].phrase}" if why and row.missed else ""
        told.append(f"{name} misses {100 * row.missed / max(1, row.offered):.1f} %{cause}")
    yield "; ".join(told) if any(row.missed for row in rows) else "no request missed its SLO"


def lines(rows: Sequence[Misses], by: str, *, every: bool = True) -> Iterator[str]:
    """Yield the table, a row a system or (by "rate") a rate, then what the columns mean.

    Rates come in rising order, systems by rising share of misses. Without `every` a cause has a column only where it
    took more than LEAST of a row's seconds.
    """
    least = 0.0 if every else LEAST
    shown = [wait for wait in WAITS if any(row.ns.get(wait, 0) > least * sum(row.ns.values()) for row in rows)]
    ordered = sorted(rows, key=lambda row: row.rate_scale if by == "rate" else row.missed / max(1, row.offered))
    cells = [
        [
            "rate scale" if by == "rate" else "system",
            "req/s",
            "missed",
            "of",
            "%",
            "s per miss",
            *shown,
            "most for",
        ]
    ]
    cells += [_cells(row, by, shown) for row in ordered]
    yield from aligned(cells)
    if shown:
        causes = "; ".join(f"{wait}: {CAUSES[wait].phrase}" for wait in shown)
        yield f"seconds per miss by cause, in the mean, which sum to its latency: {causes}"


def _cells(row: Misses, by: str, shown: Sequence[str]) -> list[str]:
    name = f"{row.rate_scale:g}" if by == "rate" else row.label
    rate = NONE if math.isnan(row.offered_rps) else f"{row.offered_rps:.3g}"
    if row.hollow:
        return [name, rate, *[NONE] * (5 + len(shown) - 1), "could not run"]
    counts = [rate, f"{row.missed:,}", f"{row.offered:,}", f"{100 * row.missed / max(1, row.offered):.1f}"]
    if not row.missed:
        return [name, *counts, *[NONE] * (1 + len(shown)), NONE]
    seconds = row.seconds
    wait = max(row.explained, key=lambda key: row.explained[key])
    most = f"{wait} ({100 * row.explained[wait] / row.missed:.0f} %)"
    return [name, *counts, f"{sum(seconds.values()):.3g}", *(_three(seconds[x]) for x in shown), most]


def _three(seconds: float) -> str:
    """Render seconds with three digits; NONE where a tenth of a millisecond does not show them."""
    return NONE if seconds < 5e-5 else f"{seconds:.3g}"
