"""The card of an entry, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.answers.table import Table
from harness.rows import vetted
from harness.rows.estimate import NONE
from harness.suite.score import Card, Row, told
from harness.suite.suite import Suite

HEADS = (
    "scenario|req/s at 99 %|[low, high]|worst model|of best|best known|of bound|misses wait for|µs a decision|"
    "failed requests"
).split("|")
POOL = (
    "unified KV: models of a GPU draw KV from one pool of blocks (kv=paged without limits), as in MuxServe's engine. "
    "Separate processes lack such a pool and share memory by pages (kv=elastic)."
)
MICROSECONDS = 1e6


def cells(row: Row, suite: Suite) -> list[str]:
    """Return the cells of a scenario's row on the card."""
    scenario = next(s for s in suite.scenario if s.name == row["scenario"])
    best = NONE if scenario.best_rps is None else f"{scenario.best_rps:.3g} {scenario.best}"
    share = NONE if row.get("share") is None else f"{row['share']:.2f}"
    bound = NONE if scenario.bound_rps is None else f"{row.get('rps', 0.0) / scenario.bound_rps:.2f}"
    if row.get("failed"):
        return [row["scenario"], NONE, "", NONE, share, best, bound, str(row["failed"]), NONE, NONE]
    short = next(iter(row["binds"]), NONE)
    charged = f" charged {MICROSECONDS * row['charged_s']:.0f}" if row["charged_s"] else ""
    return [
        row["scenario"],
        told(row).removesuffix(" req/s"),
        interval(row["low_rps"], row["high_rps"]),
        f"{row['worst_rps']:.3g}",
        share,
        best,
        bound,
        f"{short} {100 * row['binds'][short]:.0f} %" if short in row["binds"] else short,
        f"{MICROSECONDS * row['decision_s']:.0f}{charged}",
        str(row["never"]),
    ]


def interval(low: float | None, high: float | None) -> str:
    """Render an interval; an open end is a dash."""
    return f"[{NONE if low is None else f'{low:.3g}'}, {NONE if high is None else f'{high:.3g}'}]"


def summed(of: Card) -> str:
    """Return a card's total in words, with its interval and the number of scenarios that count as 0."""
    if of.total is None:
        return "no total: this version has no best known rates yet"
    zero = sum(not row["share"] for row in of.rows)
    ends = interval(of.low, of.high).replace("[-, -]", "without an interval")
    counted = f", {zero} of which count{'s' if zero == 1 else ''} 0" if zero else ""
    return f"total {of.total:.3f} {ends}, the mean of {len(of.rows)} scenarios{counted}"


def seeds(of: Card) -> str:
    """Say in words which seeds a card was scored on: those of a beacon, or the public ones."""
    return f"seeds of beacon {of.beacon}" if of.beacon else "public seeds, for development: no ranking"


def lines(of: Card, suite: Suite) -> Iterator[str]:
    """Yield the card as text."""
    yield f"{of.label} on {of.version}: {summed(of)} ({seeds(of)})"
    yield from Table(HEADS, [cells(row, suite) for row in of.rows]).text()
    if suite.seeds == 1:
        yield "--quick: one window a scenario; its rates may be 20 % off those of eight, so compare none with the best"
    if any(row.get("pool") for row in of.rows):
        yield POOL
    if unreached := vetted.unreached(of.label):
        yield f"no case of its check reached {unreached}"


def facts(of: Card, suite: Suite) -> dict[str, Any]:
    """Return the card as JSON values."""
    lists = {"rows": list(of.rows), "refused": list(of.refused)}
    return {**of._asdict(), **lists, "scenarios": [s.name for s in suite.scenario]}
