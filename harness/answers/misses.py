"""Misses of several runs as a table: their number, the seconds per miss, and each cause's share of these seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.answers.explain import CAUSES
from harness.answers.table import Table
from harness.rows.estimate import NONE
from harness.rows.record import WAITS
from harness.study.misses import Misses

LEAST = 0.01  # share of a row's seconds; smaller causes have no column unless all are asked for


def answer(rows: Sequence[Misses], by: str) -> Iterator[str]:
    """Yield a sentence on the systems or rates with the least and the most misses, and their causes.

    If nothing ran, yield nothing.
    """
    ran = sorted((row for row in rows if not row.hollow), key=lambda row: row.missed / max(1, row.offered))
    if not ran:
        return
    ends = [ran[0], ran[-1]] if len(ran) > 1 else ran
    lines = []
    for row in ends:
        name = f"rate scale {row.rate_scale:g}" if by == "rate" else row.label
        why = max(row.explained, key=lambda wait: row.explained[wait], default="")
        cause = f", mostly {CAUSES[why].phrase}" if why and row.missed else ""
        lines.append(f"{name} misses {100 * row.missed / max(1, row.offered):.1f} %{cause}")
    yield "; ".join(lines) if any(row.missed for row in rows) else "no request missed its SLO"


def table(rows: Sequence[Misses], by: str, *, every: bool = True) -> Table:
    """Return the table of misses, with a note on what its columns mean.

    There is a row for each system or, if `by` is "rate", for each rate. Rates come in rising order, systems by rising
    share of misses. A cause has a column if it takes more than the share LEAST of the seconds in some row. With
    `every`, it has a column if it takes any time.
    """
    least = 0.0 if every else LEAST
    shown = [wait for wait in WAITS if any(row.ns.get(wait, 0) > least * sum(row.ns.values()) for row in rows)]
    ordered = sorted(rows, key=lambda row: row.rate_scale if by == "rate" else row.missed / max(1, row.offered))
    head = ["rate scale" if by == "rate" else "system", "req/s", "missed", "of", "%", "s per miss", *shown, "mostly"]
    causes = "; ".join(f"{wait}: {CAUSES[wait].phrase}" for wait in shown)
    meant = f"seconds per miss by cause, in the mean, which sum to its latency (a few long ones weigh most): {causes}"
    meant += "; mostly: the cause of most misses, by the time beyond a request alone in the part that missed"
    return Table(head, [_cells(row, by, shown) for row in ordered], [meant] if shown else [])


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
    """Render seconds with three digits; NONE if they round to 0.0 ms."""
    return NONE if seconds < 5e-5 else f"{seconds:.3g}"
