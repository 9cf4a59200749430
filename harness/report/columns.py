"""The columns of a comparison: which measures stand beside each other, in which units, and how they print."""

from __future__ import annotations

from typing import NamedTuple

from harness.rows import tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.estimate import Style


class Column(NamedTuple):
    """A column: its measure, its heading, and whether more is better (None: neither)."""

    key: str
    group: str
    name: str
    unit: str
    factor: float
    more: bool | None
    definition: str  # of the tidy table; empty: it comes from the crossing
    over: str = "pooled"
    headline: bool = False  # it keeps its interval where there is little room
    brief: bool = False  # it is among the few that answer at a glance

    @property
    def style(self) -> Style:
        """Shares and counts by decimals, others by significant digits; units stand in the head."""
        return Style(decimals={"%": 1, "": 0}.get(self.unit))


def columns(definition: str) -> tuple[Column, ...]:
    """Return the columns of a comparison whose headline is this definition of attainment."""
    share = f"SLO attainment ({definition}) %"
    shares = [
        Column(definition, share, "pooled", "%", 100, True, definition, headline=True, brief=True),
        Column("mean", share, "mean", "%", 100, True, definition, "mean"),
        Column("worst", share, "worst", "%", 100, True, definition, "worst", brief=True),
    ]
    shares += [Column(x, "of each %", x.upper(), "%", 100, True, x) for x in DEFINITIONS[definition].beside]
    return (
        *shares,
        Column("rate_99", "req/s at 99 %", "crosses", "req/s", 1, True, "", headline=True, brief=True),
        Column("half_0", "req/s at 99 %", "1st half", "req/s", 1, None, "", brief=True),
        Column("half_1", "req/s at 99 %", "2nd half", "req/s", 1, None, "", brief=True),
        Column("of_bound", "req/s at 99 %", "of bound %", "%", 100, None, "", brief=True),
        Column("slope", "req/s at 99 %", "slope", "power", 1, None, "", brief=True),
        Column("fails_99", "req/s at 99 %", "fails at", "req/s", 1, None, ""),
        Column("dip", "deepest", "dip %", "%", 1, None, ""),
        Column("ttft_p50_s", "TTFT s", "P50", "s", 1, False, "ttft_p50_s"),
        Column("ttft_p95_s", "TTFT s", "P95", "s", 1, False, "ttft_p95_s", brief=True),
        Column("tpot_p50_s", "TPOT ms", "P50", "ms", 1e3, False, "tpot_p50_s"),
        Column("tpot_p95_s", "TPOT ms", "P95", "ms", 1e3, False, "tpot_p95_s", brief=True),
        Column(tidy.HITS, "prefix", "hits %", "%", 100, None, tidy.HITS, brief=True),
        Column("kv_used", "KV %", "used", "%", 100, None, "kv_used"),
        Column("loads", "weights", "loads", "", 1, None, "loads", brief=True),
        Column("evicts", "weights", "evicts", "", 1, None, "evicts"),
        Column("migrations", "weights", "moved", "", 1, None, "migrations"),
        Column(tidy.WAKES, "server's own", "wakes", "", 1, None, tidy.WAKES),
    )
