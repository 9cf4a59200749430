"""Comparisons of two systems on a panel: which is ahead, by the ratio of crossings or by differences of attainment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from harness.rows import by_window, pooled, summaries
from harness.rows.about import About, Panel
from harness.rows.crossings import EASES, RATED, concerned, inverse, of_panel, paired_counts, reciprocal
from harness.rows.estimate import POINTS, RATIO, Estimate
from harness.rows.pooled import Counts

STANDINGS = {  # a standing maps to its sign in tables and its meaning
    "ahead": ("+", "ahead"),
    "ahead, by less than 25 %": ("+<", "ahead, by less than 25 %"),
    "equal within 25 %": ("=", "equal within 25 %"),
    "behind, by less than 25 %": ("-<", "behind, by less than 25 %"),
    "behind": ("-", "behind"),
    "turns": ("+-", "ahead at one rate and behind at another"),
    "not decided": ("?", "not decided"),
    "one case": ("", "one window, of which no chance is known"),
    "no room": ("", "one of them does not fit"),
}
UNDECIDED, CASE, NO_ROOM = "not decided", "one case", "no room"
SIDED = ("ahead", "behind", "turns")  # beginnings of the standings that name a side: chance alone may give them
BESIDE = (2.0, 0.5)  # times the share of misses that the level leaves: 98 and 99.5 % beside 99 %
NEAR = 0.005  # differences of attainment within it are called equal
FALSE = 0.05  # the probability that some verdict of a table names a side where nothing differs


class Standing(NamedTuple):
    """The result of a comparison of two systems, with its evidence.

    The ratio is None if a system's models do not fit, if both systems meet the level at every rate, or if neither meets
    it at any rate. The ratio does not decide if a curve is flat at the level, or if the order changes near it. Then
    differences of attainment at three rates decide.
    """

    ratio: Estimate | None
    says: str  # is a key of STANDINGS
    note: str  # names room or rates that are missing
    p: float = 1.0  # the p-value
    flat: bool = False
    beside: tuple[Estimate | None, ...] = ()  # ratios at the levels of BESIDE
    differences: tuple[tuple[float, Estimate], ...] = ()  # x as shown, and ours less theirs as a share of 1
    shared: float = 0.0  # correlation of their misses by window: the variance that common random numbers save

    @property
    def decisive(self) -> Estimate | None:
        """The ratio of crossings if it decides; None if it is missing, or if a curve is flat and differences decide."""
        return None if self.flat else self.ratio


def verdict_text(standing: Standing, *, between: str = " ") -> str:
    """Say who is ahead: a sign, then the ratio if it decides, else the differences in percentage points."""
    if (ratio := standing.decisive) is not None:
        numbers = ratio.text(RATIO)
    elif gaps := [gap.times(100).text(POINTS, spread=False) for _, gap in standing.differences]:
        numbers = f"{between.join(gaps)} points"
    else:
        numbers = standing.note
    return f"{STANDINGS[standing.says][0]} {numbers}".strip()


def side_by_side(rows: pa.Table, panel: Panel, systems: tuple[str, str], definition: str, level: float) -> Standing:
    """Judge which of two systems is ahead on a panel.

    A note says if a system's models do not fit, or if the rates that were run end too early.
    """
    unfit = {name: gone for name in systems if (gone := by_window.unfit(rows, name))}
    notes = [
        f"{name} does not fit"
        + (f" for {unfit[name].seeds} of {unfit[name].of} seeds" if not unfit[name].every else "")
        for name in systems
        if name in unfit
    ]
    pair = paired_counts(rows, panel["axis"], systems, definition)
    if pair is None:
        return Standing(None, NO_ROOM if notes else UNDECIDED, ", ".join(notes))
    judged = standing(panel, pair, level)
    return judged._replace(note=", ".join(filter(None, [*notes, judged.note])))


def standing(panel: Panel, pair: tuple[Counts, Counts], level: float) -> Standing:
    """Judge which of two systems is ahead on a panel, from their counts of misses."""
    axis = panel["axis"]
    unit = panel["unit_rps"] if axis == "rate_scale" else 1.0
    differences = tuple((x * unit, pooled.difference(*pair, x)) for x in _three(panel, *pair))
    told, p = _by_differences([gap for _, gap in differences])
    if axis in EASES:
        differences = tuple((reciprocal(x), gap) for x, gap in reversed(differences))
    windows = pair[0].units
    few = CASE if windows == 1 else UNDECIDED if windows < pooled.FEWEST else ""
    note = f"{windows} windows, and {pooled.FEWEST} name a side" if few == UNDECIDED else ""
    shared = pooled.correlation(*pair, level)
    signs = {pooled.crossing(c, level).sign for c in pair}
    if signs in ({"<"}, {">"}):
        words = "neither holds" if signs == {"<"} else "both hold"
        edge = (min if signs == {"<"} else max)(float(x) for c in pair for x in c.rates_rps)
        at = f" at {edge * unit:.3g} req/s" if axis in RATED else ""
        note = ", ".join(filter(None, [f"{words} {100 * level:g} %{at}", note]))
        return Standing(None, few or told, note, p, True, (), differences, shared)
    here = pooled.ratio(*pair, level)
    beside = tuple(pooled.ratio(*pair, 1.0 - share * (1.0 - level)) for share in BESIDE)
    flat = pooled.flat(*pair, level)
    words, p = (told, p) if flat else pooled.verdict(here)
    words = few or words
    if axis in EASES:
        here, beside = inverse(here), tuple(map(inverse, beside))
    return Standing(here, words, note, p, flat, beside, differences, shared)


def _three(panel: Panel, ours: Counts, theirs: Counts) -> list[float]:
    """Return the lowest, middle and highest of the rates that both systems ran. The choice does not depend on results.

    If both systems ran at least three of the panel's own rates, only those are used; otherwise all rates are.
    """
    both = sorted(set(ours.rates_rps.tolist()) & set(theirs.rates_rps.tolist()))
    given = {reciprocal(x) for x in panel["xs"]} if panel["axis"] in EASES else set(panel["xs"])
    xs = [x for x in both if x in given] if len(given & set(both)) >= 3 else both
    return xs if len(xs) < 4 else [xs[0], xs[len(xs) // 2], xs[-1]]


def _by_differences(gaps: Sequence[Estimate]) -> tuple[str, float]:
    """Judge two systems by their differences at three rates: return the joint verdict and its p-value.

    The verdict is undecided unless the differences at two rates or more are decided ("ahead", "behind" or "equal").
    "Ahead" and "equal" together give "ahead"; "ahead" and "behind" together give "turns". If only one rate is "ahead"
    or "behind", its p-value is multiplied by the number of rates (Bonferroni).
    """
    told = [pooled.apart(gap, NEAR) for gap in gaps]
    ahead, behind = (
        sorted(pooled.chance(gap) for gap, word in zip(gaps, told, strict=True) if word == side)
        for side in ("ahead", "behind")
    )
    if ahead and behind:
        return "turns", max(ahead[0], behind[0])
    if len(told) - told.count("") < 2:
        return UNDECIDED, 1.0
    if not (ps := ahead or behind):
        return "equal within 25 %", 1.0
    return "ahead" if ahead else "behind", ps[1] if len(ps) > 1 else min(1.0, len(gaps) * ps[0])


def corrected(standings: Sequence[Standing]) -> list[Standing]:
    """Correct the verdicts of one table for multiple comparisons (Holm).

    A verdict "ahead", "behind" or "turns" that may be due to chance is replaced. Comparisons with equal numbers come
    from the same runs under several conditions, so they count once.
    """
    sided = [i for i, s in enumerate(standings) if s.says.startswith(SIDED)]
    ps = {(s.p, s.ratio, s.differences): s.p for s in (standings[i] for i in sided)}
    of = dict(zip(ps, pooled.holm([*ps.values()]), strict=True))
    adjusted = {i: of[standings[i].p, standings[i].ratio, standings[i].differences] for i in sided}
    return [
        s._replace(p=adjusted[i], says=s.says if adjusted[i] <= FALSE else _without_side(s)) if i in adjusted else s
        for i, s in enumerate(standings)
    ]


def _without_side(standing: Standing) -> str:
    """Return the verdict that replaces one that may be due to chance: "equal within 25 %", or undecided.

    It is "equal" if the ratio is within 25 %. It is also "equal" if differences decide, and at least two of the three
    are "equal".
    """
    alike = [pooled.apart(gap, NEAR) for _, gap in standing.differences].count("equal") >= 2
    return "equal within 25 %" if "by less than" in standing.says or (standing.flat and alike) else UNDECIDED


class Cases(NamedTuple):
    """A summary of the ratios of several cases: the least, the most, and the numbers above, near and below 1."""

    least: Estimate
    most: Estimate
    above: int  # ratios above 1
    near: int  # ratios within 25 % of 1, either way
    below: int  # ratios below 1
    of: int  # cases that have a ratio

    def agree(self, says: str) -> int:
        """Count the ratios that agree with a verdict ("ahead", "equal", "behind"); 0 for any other verdict."""
        word = says.partition(",")[0].split()[0]
        return {"ahead": self.above, "equal": self.near, "behind": self.below}.get(word, 0)


def cases(standings: Sequence[Standing]) -> Cases | None:
    """Summarise the ratios of several cases; None if no case has a ratio.

    A bound counts as above or below 1 only if it excludes 1.
    """
    ratios = sorted((standing.ratio for standing in standings if standing.ratio is not None), key=lambda e: e.mean)
    if not ratios:
        return None
    above = sum(e.mean > 1.0 and e.sign in {"=", ">"} for e in ratios)
    below = sum(e.mean < 1.0 and e.sign in {"=", "<"} for e in ratios)
    near = sum(1 / pooled.NEAR <= e.mean <= pooled.NEAR and e.sign == "=" for e in ratios)
    return Cases(ratios[0], ratios[-1], above, near, below, len(ratios))


class Claimed(NamedTuple):
    """A claim of a study about a ratio, with a panel that it is about, and the comparison on that panel."""

    claim: Mapping[str, Any]  # as the study's facts have it
    panel: Panel
    standing: Standing


def claimed(table: pa.Table, facts: About) -> list[Claimed]:
    """List every ratio that a study claims, on each panel that the claim is about.

    All comparisons are corrected together for multiple comparisons (`corrected`).
    """
    each = []
    for claim in facts.claims:
        pair = (claim["system"], claim["over"])
        if claim["what"] != "ratio" or not {*pair} <= {*facts.systems}:
            continue
        definition = claim["definition"] or facts.definitions[0]
        for panel in concerned(facts.panels, claim["on"]):
            rows = of_panel(table, panel)
            if not {*pair} <= {*rows["label"].unique().to_pylist()}:
                continue
            wrong = [name for name in pair if name in summaries.invalid(rows)]
            each.append(
                Claimed(
                    claim,
                    panel,
                    Standing(None, UNDECIDED, f"{' and '.join(wrong)} invalid")
                    if wrong
                    else side_by_side(rows, panel, pair, definition, facts.level),
                )
            )
    standings = corrected([c.standing for c in each])
    return [c._replace(standing=standing) for c, standing in zip(each, standings, strict=True)]
