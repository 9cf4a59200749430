"""A sweep's findings in sentences: who is ahead, why requests miss, which caps of the engine bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.answers.causes import CAUSES
from harness.answers.table import joined
from harness.rows import estimate, statistics, tidy
from harness.rows.crossings import CASE, NEAR, STANDINGS, Standing, corrected, difference, side_by_side
from harness.rows.estimate import POINTS, RATIO
from harness.rows.statistics import Estimate
from harness.study.summary import Summary, SystemSummary, panel_of, scores

if TYPE_CHECKING:
    import pyarrow as pa

FINE = POINTS._replace(decimals=2)  # near 100 % a tenth of a point is much


def verdict(table: pa.Table, shown: Summary, definition: str, level: float) -> str | None:
    """Say who serves the highest rate at the level, by how much over the next, and whether chance explains it.

    Only systems that ran count, whose runs are valid. Where a curve is flat at the level, or the order changes beside
    it, say who meets more at three rates instead.
    """
    rivals = [system for system in shown.systems if system.judged]
    if len(rivals) < 2:
        return None
    if any(system.values["rate_99"] is None for system in rivals):  # a single rate crosses nothing
        return _difference(table, rivals, shown.rate_scale, definition)
    first, *others = sorted(rivals, key=lambda system: -system.mean("rate_99"))
    if shown.halves:
        return _by_halves(rivals, level)
    panel = panel_of(table)
    every = [side_by_side(table, panel, (first.label, rival.label), definition, level) for rival in others]
    standings = dict(zip((rival.label for rival in others), corrected(every), strict=True))
    alike = [name for name, standing in standings.items() if standing.says == "equal within 25 %" and not standing.flat]
    goal, lines = f"{100 * level:g} %", []
    if alike:
        lines.append(f"{joined([first.label, *alike])} serve equal rates at {goal}, within 25 %")
    if second := next((name for name in standings if name not in alike), ""):
        lines.append(paired(first.label, second, standings[second], level))
    return "; ".join(lines)


def _by_halves(rivals: Sequence[SystemSummary], level: float) -> str:
    """Say who serves the highest rate in either half of a real trace, each by itself."""
    told = []
    for key, name in (("half_0", "first"), ("half_1", "second")):
        first, second = sorted(rivals, key=lambda system: -system.mean(key))[:2]
        ours, theirs = (estimate.text(system.values[key], spread=False) for system in (first, second))
        told.append(f"in the {name} half {first.label} {ours} req/s, {second.label} {theirs}")
    return f"{100 * level:g} %: {'; '.join(told)} (two case studies, no interval)"


def paired(ours: str, theirs: str, standing: Standing, level: float) -> str:
    """Describe the standing of two systems in one clause."""
    goal = f"{100 * level:g} %"
    if standing.flat or standing.ratio is None:
        why = standing.note if standing.ratio is None else f"a ratio of rates at {goal} does not decide"
        points = [f"{estimate.text(gap.times(100), FINE)} at {estimate.number(x)}" for x, gap in standing.differences]
        gaps = f"attainment of {ours} minus that of {theirs}, in points by req/s: {', '.join(points)}"
        return f"{why}; {gaps} ({FLAT[standing.says]})" if points else why
    text = f"{ours} serves {estimate.text(standing.ratio, RATIO)} the rate of {theirs} at {goal}"
    return (
        text if standing.says in {"ahead", "behind"} else f"{text}: {FEW if standing.says == CASE else standing.says}"
    )


FEW = "too few windows for an interval"
FLAT = {  # of differences at three rates
    **{word: word for word in STANDINGS},
    "equal within 25 %": f"equal within {100 * NEAR:g} points",
    "turns": "ahead at one rate and behind at another",
    CASE: FEW,
}


def _difference(table: pa.Table, rivals: Sequence[SystemSummary], rate: float, definition: str) -> str | None:
    best, second = sorted(rivals, key=lambda system: -system.mean(definition))[:2]
    gap = difference(table, "rate_scale", (best.label, second.label), definition, rate)
    if gap is None:
        return None
    return _more(best, second, gap) if gap.mean else f"{best.label} and {second.label} meet the same share"


def _more(best: SystemSummary, second: SystemSummary, gap: Estimate) -> str:
    """Say how many points more one system meets than the other, and how sure that is."""
    text = f"{best.label} meets {estimate.text(gap.times(100), FINE)} points more than {second.label}"
    if gap.low is None:
        return f"{text} (no interval)"
    return text if statistics.wins(gap) else f"{text} (not decided)"


def same(table: pa.Table, label: str, copy: str, rate: float, definition: str) -> str | None:
    """Render the A/A line: a system against its copy on other seeds; the interval should cover 0."""
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
        if not system.judged or system.mean(definition) >= 100 * level:
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
    """List the caps of the engine that bound more than 1 % of steps, a line each: where, and how to lift it."""
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
