"""What the rows of a sweep say in sentences: who is ahead, why requests miss, which caps of the engine bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.report.causes import CAUSES
from harness.report.summary import Summary, SystemSummary, scores
from harness.rows import estimate, statistics, tidy
from harness.rows.estimate import POINTS, RATIO
from harness.rows.statistics import Estimate

if TYPE_CHECKING:
    import pyarrow as pa

FINE = POINTS._replace(decimals=2)  # near 100 % a tenth of a point is much


def verdict(table: pa.Table, shown: Summary, definition: str, level: float) -> str | None:
    """Say who meets the level at the highest rate, by how much over the next, and whether that is significant."""
    rivals = [system for system in shown.systems if not system.control]
    if len(rivals) < 2:
        return None
    if any(system.values["rate_99"] is None for system in rivals):  # a single rate crosses nothing
        return _difference(table, rivals, shown.rate_scale, definition)
    best, second = sorted(rivals, key=lambda system: -system.mean("rate_99"))[:2]
    ours, theirs = best.values["rate_99"], second.values["rate_99"]
    assert ours is not None
    assert theirs is not None
    if ours.sign == theirs.sign and ours.sign in {"<", ">"} and all(e.cut == e.n for e in (ours, theirs)):
        where = "neither, not even at the lowest rate" if ours.sign == "<" else "both up to the highest rate asked"
        return f"{100 * level:g} % is met by {where}: {best.label}, {second.label}"
    curves = [tidy.curves(table, system.label, definition) for system in (best, second)]
    ratio = statistics.crossing_ratio(curves[0], curves[1], level)
    beyond = f"{ratio.cut} of {_seeds(ratio.n)} beyond the rates asked" if ratio.cut else ""
    shown_ratio = estimate.text(replace(ratio, cut=0), RATIO)  # how many are cut stands behind
    text = f"{best.label} meets {100 * level:g} % at {shown_ratio} the rate of {second.label}"
    return text + _doubt(ratio, ratio.low is not None and ratio.low > 1, beyond)


def _difference(table: pa.Table, rivals: Sequence[SystemSummary], rate: float, definition: str) -> str | None:
    best, second = sorted(rivals, key=lambda system: -system.mean(definition))[:2]
    ours, theirs = (scores(table, system.label, rate, definition) for system in (best, second))
    if not ours.keys() & theirs.keys():
        return None
    gap = statistics.paired(ours, theirs)
    if gap.mean == 0:
        return f"{best.label} and {second.label} meet the same share"
    text = f"{best.label} meets {estimate.text(gap.times(100), FINE)} points more than {second.label}"
    return text + _doubt(gap, statistics.wins(gap))


def _doubt(e: Estimate, significant: bool, beyond: str = "") -> str:
    """What keeps an estimate from being certain, in brackets; empty where nothing does."""
    bounded = e.low is not None or e.high is not None
    why = "no interval" if not bounded else "" if significant else "not significant"
    parts = [beyond or _seeds(e.n), why] if why else [beyond]
    return f" ({', '.join(parts)})" if any(parts) else ""


def same(table: pa.Table, label: str, copy: str, rate: float, definition: str) -> str | None:
    """The A/A line: a system against its copy on other seeds; the interval should cover 0."""
    ours, theirs = (list(scores(table, x, rate, definition).values()) for x in (label, copy))
    n = min(len(ours), len(theirs))
    if not n:
        return None
    gap = statistics.paired(dict(enumerate(ours[:n])), dict(enumerate(theirs[:n])))
    text = f"A/A: {label} against its copy on other seeds {estimate.text(gap.times(100), FINE)} points"
    if gap.low is None or gap.high is None:
        return f"{text} ({_seeds(gap.n)}, no interval)"
    covers = gap.low <= 0 <= gap.high
    return f"{text}: " + ("covers 0, as it should" if covers else "does not cover 0: differences so small mean nothing")


def why(table: pa.Table, shown: Summary, definition: str, level: float) -> str | None:
    """Say why most requests of each contestant that falls short missed (rows/causes.py)."""
    reasons = []
    for system in shown.systems:
        if system.control or system.infeasible or system.mean(definition) >= 100 * level:
            continue
        shares = {
            cause: sum(seen.values()) / len(seen)
            for cause in CAUSES
            if (seen := scores(table, system.label, shown.rate_scale, f"missed_{definition}_{cause}"))
        }
        if shares:
            cause = max(shares, key=lambda x: shares[x])
            reasons.append(f"{system.label} {100 * shares[cause]:.0f} % {CAUSES[cause].phrase}")
    return "Why requests miss: " + ", ".join(reasons) if reasons else None


def caps(table: pa.Table, spec: Mapping[str, Any]) -> list[str]:
    """A line for each cap of the engine that bound more than 1 % of steps: where, and how to lift it."""
    bound = tidy.bound(table)
    lines = []
    for cap in dict.fromkeys(b.cap for b in bound):
        mine = [b for b in bound if b.cap == cap]
        where = ", ".join(
            f"{b.label} from {estimate.number(b.offered_rps)} req/s ({100 * b.share:.1f} %)" for b in mine
        )
        over = f"more than {100 * tidy.BINDS:g} % of steps"
        lines.append(f"{cap} = {spec[cap]} bound {over}: {where}; --set {cap}={2 * spec[cap]}")
    return lines


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"
