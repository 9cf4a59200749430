"""What the rows of a sweep say in sentences: who is ahead, why requests miss, which caps of the engine bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.report.causes import CAUSES
from harness.report.summary import Summary, SystemSummary, scores
from harness.rows import estimate, statistics, tidy
from harness.rows.crossings import ALIKE
from harness.rows.estimate import POINTS, RATIO
from harness.rows.statistics import Estimate

if TYPE_CHECKING:
    import pyarrow as pa

FINE = POINTS._replace(decimals=2)  # near 100 % a tenth of a point is much


def verdict(table: pa.Table, shown: Summary, definition: str, level: float) -> str | None:
    """Say who meets the level at the highest rate, by how much over the next, and whether that is significant.

    Of systems that ran, and whose runs are valid. Where one of the two lies on the level instead of crossing it, say
    who meets more at the rate of the table; where that is not who is ahead in rates, say both.
    """
    rivals = [system for system in shown.systems if system.judged]
    if len(rivals) < 2:
        return None
    if any(system.values["rate_99"] is None for system in rivals):  # a single rate crosses nothing
        return _difference(table, rivals, shown.rate_scale, definition)
    ranked = sorted(rivals, key=lambda system: -system.mean("rate_99"))
    best, second = ranked[:2]
    here = f"at {estimate.number(shown.offered_rps)} req/s"
    if best.flat or second.flat:
        said = _difference(table, rivals, shown.rate_scale, definition)
        return said and f"{here} {said}"
    ours, theirs = best.values["rate_99"], second.values["rate_99"]
    assert ours is not None
    assert theirs is not None
    if ours.sign == theirs.sign and ours.sign in {"<", ">"} and all(e.cut == e.n for e in (ours, theirs)):
        where = "neither, not even at the lowest rate" if ours.sign == "<" else "both up to the highest rate asked"
        return f"{100 * level:g} % is met by {where}: {best.label}, {second.label}"
    of = {system.label: tidy.curves(table, system.label, definition) for system in ranked}
    ratios = {one.label: statistics.crossing_ratio(of[best.label], of[one.label], level) for one in ranked[1:]}
    alike = [one for one in ranked[1:] if not one.flat and _alike(ratios[one.label])]
    same = ""
    if alike:
        names = _listed([one.label for one in (best, *alike)])
        same = f"{names} meet {100 * level:g} % up to the same rate, within {100 * ALIKE:g} %"
        second = next((one for one in ranked[1:] if one not in alike), best)
        if second is best or second.flat:
            return same
        same += "; "
    ratio = ratios[second.label]
    beyond = f"{ratio.cut} of {_seeds(ratio.n)} beyond the rates asked" if ratio.cut else ""
    shown_ratio = estimate.text(replace(ratio, cut=0), RATIO)  # how many are cut stands behind
    text = f"{same}{best.label} meets {100 * level:g} % at {shown_ratio} the rate of {second.label}"
    text += _doubt(ratio, ratio.low is not None and ratio.low > 1, beyond)
    behind = _gap(table, second, best, shown.rate_scale, definition)
    if behind is not None and behind.mean > 0:
        text += f"; {here} {_more(second, best, behind)}"
    return text


def _alike(ratio: Estimate) -> bool:
    """Tell whether the whole interval of a ratio is within `ALIKE` of 1."""
    if ratio.sign != "=" or ratio.low is None or ratio.high is None:
        return False
    return ratio.low >= 1 - ALIKE and ratio.high <= 1 + ALIKE


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def plateaus(shown: Summary, level: float) -> list[str]:
    """One line a system that lies on the level over an octave or more: from where to where, and what it attains."""
    return [
        f"{one.label} crosses {100 * level:g} % nowhere in particular: {100 * one.flat.low:.1f} to "
        f"{100 * one.flat.high:.1f} % from {estimate.number(one.flat.first)} to {estimate.number(one.flat.last)} req/s"
        for one in shown.systems
        if one.flat
    ]


def _difference(table: pa.Table, rivals: Sequence[SystemSummary], rate: float, definition: str) -> str | None:
    best, second = sorted(rivals, key=lambda system: -system.mean(definition))[:2]
    gap = _gap(table, best, second, rate, definition)
    if gap is None:
        return None
    return _more(best, second, gap) if gap.mean else f"{best.label} and {second.label} meet the same share"


def _gap(table: pa.Table, ours: SystemSummary, theirs: SystemSummary, rate: float, definition: str) -> Estimate | None:
    """Ours less theirs at a rate, paired by seed, in shares; None where they share no seed."""
    sides = [scores(table, system.label, rate, definition) for system in (ours, theirs)]
    return statistics.paired(*sides) if sides[0].keys() & sides[1].keys() else None


def _more(best: SystemSummary, second: SystemSummary, gap: Estimate) -> str:
    """How many points more one meets than the other, and how sure that is."""
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
