"""The first line of a comparison: the highest rate at which one system keeps its SLOs, and who serves more or less.

This system is the subject: the one that the user gave as a file, else the first that was named. Rates are judged on all
requests together ("pooled"). The line adds the rate up to which every single model meets the level, if that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pyarrow as pa

from harness.answers.table import joined
from harness.rows import estimate, pooled, statistics
from harness.rows.about import Panel
from harness.rows.crossings import broad, difference, inverse
from harness.rows.estimate import POINTS, RATIO, SHARE, Estimate
from harness.rows.ranking import CASE, NEAR, STANDINGS, UNDECIDED, Standing, corrected, side_by_side
from harness.study.summary import Summary, SystemSummary, levels, panel_of, rate_key

ALIKE = 1.01  # factor within which the worst model's rate counts as equal to the pooled one
EQUAL = "equal within 25 %"
FINE = POINTS._replace(decimals=2)  # near 100 % a tenth of a point is much
FEW = "too few windows for an interval"
FLAT = {  # words for differences at three rates
    **{word: word for word in STANDINGS},
    EQUAL: f"equal within {100 * NEAR:g} points",
    "turns": "ahead at one rate and behind at another",
    CASE: FEW,
}


def verdict(table: pa.Table, shown: Summary, definition: str) -> str | None:
    """Return the answer of a comparison as a sentence; None if no contestant fits and has valid runs.

    It says up to which rate the subject meets the level, and which systems serve more or less. If a lead is reversed or
    nearly vanishes at another usual level, the sentence names that level. Only contestants that fit and have valid runs
    count. At a single rate the sentence compares attainment. If a curve is flat at the level, or the order changes near
    the level, it compares attainment at three rates.
    """
    rivals = [system for system in shown.systems if system.judged]
    if not rivals:
        return None
    ours = next((system for system in rivals if system.label == shown.subject), rivals[0])
    others = [system for system in rivals if system is not ours]
    key = rate_key(shown.level)
    if any(system.values[key] is None for system in rivals):  # a single rate crosses nothing
        clauses = [_at_one_rate(table, shown, ours, others, definition)]
    elif shown.halves:
        clauses = [_by_halves(ours, others, shown.level)]
    else:
        clauses = list(_along_rates(table, shown, ours, others, definition))
    gone = [x for x in shown.systems if x.label == shown.subject and not (x.judged or x.control)]
    lacks = [f"{x.label} {'does not fit' if x.infeasible else 'has invalid runs'}" for x in gone]
    return "; ".join((*lacks, *clauses))


# ------------------------------------------------------------------ along rates

Beside = tuple[SystemSummary, Standing]  # a system, and the subject's standing beside it


def _along_rates(
    table: pa.Table, shown: Summary, ours: SystemSummary, others: Sequence[SystemSummary], definition: str
) -> Iterator[str]:
    panel, key = panel_of(table), rate_key(shown.level)
    standings = _standings(table, panel, ours, others, definition, shown.level)
    alike = [system for system in others if (s := standings[system.label]).says == EQUAL and not s.flat]
    by_rate = sorted((system for system in others if system not in alike), key=lambda system: -system.mean(key))
    more = [system for system in by_rate if system.mean(key) > ours.mean(key)][:1]
    less = [system for system in by_rate if system not in more and system.mean(key) <= ours.mean(key)][:1]
    text = f"{_named(ours)} keeps {100 * shown.level:g} % {_up_to(ours.values[key])}{_each_model(ours, key)}"
    if alike:
        text += f", {joined([_named(x) for x in alike])} within 25 % of it"
    yield text
    for system in (*less, *more):
        is_ = "that is " * (system in less and standings[system.label].decisive is not None)
        yield f"{is_}{_compared(ours, system, standings[system.label], key, shown.level)}"
    sided = [(x, standings[x.label]) for x in others if standings[x.label].says in {"ahead", "behind"}]
    yield from _turns(table, panel, shown, ours, sided, definition)


def _standings(
    table: pa.Table, panel: Panel, ours: SystemSummary, others: Sequence[SystemSummary], definition: str, level: float
) -> dict[str, Standing]:
    """Return the subject's standing against every other system, keyed by that system's label.

    All standings are corrected together for multiple comparisons.
    """
    every = [side_by_side(table, panel, (ours.label, other.label), definition, level) for other in others]
    return dict(zip((other.label for other in others), corrected(every), strict=True))


def _up_to(e: Estimate | None) -> str:
    """Return in words the rate up to which a system meets the level: "up to 8.94 req/s"."""
    assert e is not None
    rate = f"{estimate.number(e.mean)} req/s"
    bounds = {"<": f"at no rate that ran, from {rate} on", ">": f"at all rates that ran, up to {rate}"}
    return bounds.get(e.sign, f"up to {rate}")


def _each_model(system: SystemSummary, key: str) -> str:
    """Return a note that a rate is pooled, with the worst model's rate; empty if the two rates are about the same."""
    all_, worst = system.values[key], system.values["worst_rate"]
    if all_ is None or all_.sign == "<":
        return ""
    if worst is None:
        return " (pooled)"
    if worst.sign == all_.sign and worst.mean * ALIKE >= all_.mean:
        return ""
    return f" (pooled; worst model {_up_to(worst).removeprefix('up to ').removesuffix(' req/s')})"


def _named(system: SystemSummary) -> str:
    """Return a system's label, and the number of models for which it meets no SLO, if there are any."""
    return f"{system.label} ({system.unserved})" if system.unserved else system.label


def _compared(ours: SystemSummary, theirs: SystemSummary, standing: Standing, key: str, level: float) -> str:
    """Return a clause that compares the rates of the subject and of another system, or else their attainment."""
    if (ratio := standing.decisive) is None:
        return points(ours.label, _named(theirs), standing, level)
    sure = f", {FEW if standing.says == CASE else ', '.join(filter(None, [standing.says, standing.note]))}"
    sure *= standing.says in {CASE, UNDECIDED}
    rate = _up_to(theirs.values[key])
    if theirs.mean(key) > ours.mean(key):
        return f"{_named(theirs)} keeps it {rate} ({_ratio(inverse(ratio))} that of {ours.label}{sure})"
    return f"{_ratio(ratio)} the rate of {_named(theirs)}{sure}"


def _ratio(ratio: Estimate) -> str:
    """Render a ratio with its interval, even if both ends of the interval are open."""
    text = ratio.text(RATIO)
    return text if "[" in text or ratio.n < pooled.FEWEST or ratio.sign != "=" else f"{text} {ratio.ends(RATIO)}"


def points(ours: str, theirs: str, standing: Standing, level: float) -> str:
    """Say why the ratio of two systems' rates gives no verdict, and compare their attainment at three rates."""
    why = standing.note if standing.ratio is None else f"a ratio of rates at {100 * level:g} % does not decide"
    differences = [f"{gap.times(100).text(FINE)} at {estimate.number(x)}" for x, gap in standing.differences]
    gaps = f"attainment of {ours} minus that of {theirs}, in points by req/s: {', '.join(differences)}"
    return f"{why}; {gaps} ({FLAT[standing.says]})" if differences else f"{theirs}: {why}"


def _turns(
    table: pa.Table, panel: Panel, shown: Summary, ours: SystemSummary, sided: Sequence[Beside], definition: str
) -> Iterator[str]:
    """Yield a clause on another usual level at which a lead shrinks most, or is reversed.

    Leads are those at the comparison's level, of the subject over another system or of another system over the subject.
    Yield nothing if all leads stay above the factor `pooled.NEAR` at all levels.
    """
    turned_by: list[tuple[float, float, SystemSummary, Standing]] = []
    for level in levels(shown.level)[1:]:
        there = _standings(broad(table), panel, ours, [system for system, _ in sided], definition, level)
        for system, beside in sided:
            here, ratio = beside.decisive, there[system.label].ratio
            if here is not None and ratio is not None and ratio.sign == "=":
                lead = math.log(ratio.mean) * math.copysign(1.0, math.log(here.mean))
                if lead < math.log(pooled.NEAR):  # the ratio decides, also where a curve is flat
                    turned_by.append((lead, level, system, Standing(ratio, pooled.verdict(ratio).words, "")))
    if turned_by:
        _, level, system, standing = min(turned_by, key=lambda entry: entry[0])
        word = "it is " * (ours.mean(rate_key(level)) > system.mean(rate_key(level)))
        yield f"at {100 * level:g} % {word}{_compared(ours, system, standing, rate_key(level), level)}"


# ------------------------------------------------------------------ halves of a real trace, a single rate


def _by_halves(ours: SystemSummary, others: Sequence[SystemSummary], level: float) -> str:
    """State, for each half of a real trace, the rates up to which the subject and its best rival meet the level."""
    halves = []
    for key, name in (("half_0", "first"), ("half_1", "second")):
        best = sorted(others, key=lambda system: -system.mean(key))[:1]
        rates = [f"{_named(system)} {estimate.text(system.values[key], spread=False)}" for system in (ours, *best)]
        halves.append(f"in the {name} half {rates[0]} req/s{''.join(f', {rate}' for rate in rates[1:])}")
    return f"{100 * level:g} % (pooled): {'; '.join(halves)} (two case studies, no interval)"


def _at_one_rate(
    table: pa.Table, shown: Summary, ours: SystemSummary, others: Sequence[SystemSummary], definition: str
) -> str:
    """Say which share of its SLOs the subject meets, and how many points more or less than the best other system."""
    met, worst = (estimate.text(ours.values[key], SHARE, spread=False) for key in (definition, "worst"))
    of = {met: "", estimate.NONE: " (pooled)"}.get(worst, f" (pooled; worst model {worst})")
    at = "" if math.isnan(shown.offered_rps) else f" at {estimate.number(shown.offered_rps)} req/s"
    text = f"{_named(ours)} meets {met} % of SLOs{at}{of}"
    best = max(others, key=lambda system: system.mean(definition), default=None)
    if best is None:
        return text
    pair = difference(table, "rate_scale", (ours.label, best.label), definition, shown.rate_scale)
    if pair is None:
        return text
    if not pair.mean:
        return f"{text}, as {_named(best)} does"
    low, high = (pair.low, pair.high) if pair.mean > 0 else (x if x is None else -x for x in (pair.high, pair.low))
    gap = Estimate(abs(pair.mean), low, high, pair.n)
    sure = " (no interval)" if gap.low is None else "" if statistics.wins(gap) else " (not decided)"
    words = f"{gap.times(100).text(FINE)} points more"
    return f"{text}, {words} than {_named(best)}{sure}" if pair.mean > 0 else f"{text}; {_named(best)} {words}{sure}"
