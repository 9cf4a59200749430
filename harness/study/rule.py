"""The rule that assigns a claim its class: pure functions of a paper's number and an estimate.

    input         the paper's number is a constant that we take from the paper, so the claim is not tested
    size          the estimate lies within a factor 1.25 of the paper's number (or of the nearer end of its range), and
                  its interval lies within a factor 1.5. The factors multiply the distance from no difference: for a
                  ratio, the ratio minus 1. If the paper says "at least", there is no limit on the far side. If the
                  paper states a direction, the condition of the class direction must be met as well
    up to         the paper says "up to", and the estimate has the paper's direction and is not larger than the paper's
                  number (by the same factors), but is too small for the class size
    direction     the whole interval lies on the paper's side of no difference. A claim about seeds (reached, never,
                  met, missed) has this class if it is true for all seeds
    contradicted  the whole interval lies on the other side, or the claim is true for no seed. If the paper states no
                  direction: the interval predicted for one more window lies beyond the factor 1.25
    open          everything else

A claim that there is no difference (`equal`) has the class size if the interval lies within 0.8 to 1.25 (two one-sided
tests). It is contradicted if the whole interval lies outside. A statement about several systems is contradicted if it
is contradicted for one of them.

A paper may leave open which of two systems, or which workload, it means. Then each option is a reading, and a statement
has the class that all readings share. Size and "up to" together give "up to". Either of them together with direction
gives direction. Any other mixture is open (`of_statement`). If a reading has no class, the statement has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from harness.rows.estimate import Estimate
from harness.rows.ranking import UNDECIDED, Standing
from harness.study.study import Claim

CLASSES = {
    "size": "the paper's number, within a factor 1.25 (the interval within 1.5)",
    "up to": "no more than the paper's 'up to', which any gain below it meets",
    "direction": "the paper's direction, not shown to be its size",
    "contradicted": "the opposite, or another size where there is no direction",
    "open": "not decided",
    "input": "the number is a constant of ours, so nothing is tested",
}
REASONS = {  # why a statement has no class
    "not comparable": "the paper leaves out what a comparison needs",
    "not testable": "a datum is missing, which is named",
    "does not fit": "the models do not fit for a system here",
    "full form": "only --full runs its condition, and this ledger is of the quick form",
    "not run": "no run decides it",
}
SAYS = {**CLASSES, **REASONS}
DECIDED = ("size", "up to", "direction", "contradicted")
SEEDS = {  # words of a paper about every run, with the condition under which a statement holds
    "reached": "every seed reaches it",
    "never": "no seed reaches it",
    "met": "every seed meets it",
    "missed": "no seed meets it",
}
NEAR, WIDE = 1.25, 1.5  # factors within which the point and the interval are of the paper's size
Reading = frozenset[tuple[str, str]]  # choices that a paper leaves open, each with the option taken


class Goal(NamedTuple):
    """The range that a paper states and, if there is one, the value that means no difference."""

    least: float
    most: float
    even: float | None

    @property
    def side(self) -> int:
        """The side of the range with respect to the value of no difference.

        It is 1 for a range above that value, -1 for a range below it, else 0.
        """
        if self.even is None or self.least < self.even < self.most or self.least == self.most == self.even:
            return 0
        return 1 if self.least >= self.even else -1

    def within(self, factor: float) -> tuple[float, float]:
        """Return the range widened by a factor.

        The factor applies to the distance of each end from the value of no difference. If the range lies on neither
        side of that value, or if there is no such value, the factor applies to the distance from 0.
        """
        base = (self.even or 0.0) if self.side else 0.0
        low, high = self.least - base, self.most - base
        return base + min(low / factor, low * factor), base + max(high / factor, high * factor)


def even(claim: Claim) -> float | None:
    """Return the value at which a claim's quantity shows no difference, such as 1 for a ratio; None without one."""
    if claim.even is not None:
        return claim.even
    return 0.0 if claim.what == "difference" else 1.0 if claim.over else None


def goal(claim: Claim) -> Goal:
    """Return the range of values that a claim's paper states."""
    none, paper = even(claim), claim.paper
    start = none or 0.0
    match paper:
        case "ahead":
            return Goal(start, math.inf, none)
        case "behind":
            return Goal(-math.inf, start, none)
        case (least, most):
            return Goal(float(least), float(most), none)
    assert isinstance(paper, float | int)
    far = math.inf if paper >= start else -math.inf
    other = {"": float(paper), "up to": start, "at least": far}[claim.bound]
    return Goal(min(paper, other), max(paper, other), none)


def judged(claim: Claim, here: Estimate | None, windows: int | None = None) -> str:
    """Return the class of a claim about a number, or about which system is ahead, by its estimate (rule: see module).

    `windows` is the number of independent windows behind the estimate (None: the estimate's n). The prediction interval
    depends on it.
    """
    if known := untried(claim):
        return known
    if here is None:
        return "not run"
    if here.sign == "~" or math.isnan(here.mean):
        return "open"
    low, high = ends(here)
    if claim.paper == "equal":
        near = ((even(claim) or 1.0) / NEAR, (even(claim) or 1.0) * NEAR)
        return "size" if _inside((low, high), near) else "contradicted" if _apart((low, high), near) else "open"
    stated = goal(claim)
    none = stated.even or 0.0
    if stated.side and (high < none if stated.side > 0 else low > none):
        return "contradicted"
    holds = bool(stated.side) and (low > none if stated.side > 0 else high < none)
    point = (-math.inf if here.sign == "<" else here.mean, math.inf if here.sign == ">" else here.mean)
    sized = _inside(point, stated.within(NEAR)) and _inside((low, high), stated.within(WIDE))
    if sized and not isinstance(claim.paper, str) and (holds or not stated.side):
        number = goal(replace(claim, bound="")) if claim.bound == "up to" else stated
        of_size = _inside(point, number.within(NEAR)) and _inside((low, high), number.within(WIDE))
        return "size" if of_size else "up to"
    if holds:
        return "direction"
    if not stated.side and _apart(predicted(here, windows), stated.within(NEAR)):
        return "contradicted"
    return "open"


def judged_order(claim: Claim, standing: Standing) -> str:
    """Return the class of a claim about a ratio by the systems' order alone, where a curve is too flat for a ratio."""
    if (ratio := standing.decisive) is not None:
        word = judged(claim, ratio)
        return "direction" if word in {"size", "up to"} else word
    if known := untried(claim):
        return known
    if claim.paper == "equal":
        return "size" if standing.says == "equal within 25 %" else "open"
    side = goal(claim).side
    ours, theirs = ("ahead", "behind") if side > 0 else ("behind", "ahead")
    if not side or standing.says == UNDECIDED:
        return "open"
    if standing.says.startswith(ours):
        return "direction"
    return "contradicted" if standing.says.startswith(theirs) else "open"


def untried(claim: Claim) -> str:
    """Return the class of a claim that is decided without an estimate; return "" if the estimate decides.

    The class is "input", "not testable" or "not comparable".
    """
    if claim.input:
        return "input"
    return "not testable" if claim.lacks else "" if claim.comparable else "not comparable"


def judged_seeds(paper: str, n: int, of: int) -> str:
    """Return the class of a claim about every seed, for example the claim that every seed reaches the level.

    `paper` is a word of SEEDS. Of the `of` seeds, `n` reach or meet the level.
    """
    as_stated = n if paper in {"reached", "met"} else of - n
    return "not run" if not of else "direction" if as_stated == of else "open" if as_stated else "contradicted"


def together(words: Sequence[str]) -> str:
    """Return the class of a statement from its classes under each reading, an option that the paper leaves open."""
    kinds = set(words)
    if len(kinds) == 1:
        return words[0]
    if lacks := next((why for why in REASONS if why in kinds), ""):
        return lacks
    weakest = next((word for word in ("direction", "up to") if word in kinds), "open")
    return weakest if kinds and kinds <= {"size", "up to", "direction"} else "open" if kinds else "not run"


def all_of(words: Sequence[str]) -> str:
    """Return the class of a statement about several systems, from its class for each of them.

    If the class for any system is "contradicted", so is the class of the statement.
    """
    return "contradicted" if "contradicted" in words else together(words)


def of_statement(parts: Sequence[tuple[str, Reading]]) -> str:
    """Return the class of a statement from the classes of its parts.

    The parts of each reading are joined first (`all_of`), then the readings (`together`).
    """
    choices = dict[str, dict[str, None]]()
    for _, reading in parts:
        for choice, taken in sorted(reading):
            choices.setdefault(choice, {})[taken] = None
    each = product(*([(choice, taken) for taken in every] for choice, every in choices.items()))
    classes = [[says for says, reading in parts if reading <= {*readings}] for readings in each]
    return together([all_of(words) for words in classes if words])


def ends(here: Estimate) -> tuple[float, float]:
    """Return the ends of the interval of an estimate; a missing end is infinite."""
    return (-math.inf if here.low is None else here.low, math.inf if here.high is None else here.high)


def predicted(here: Estimate, windows: int | None = None) -> tuple[float, float]:
    """Compute the interval in which one more window would lie in 95 of 100 cases.

    A paper's single run is compared with this interval. Each end of the interval of the mean of n windows is moved
    sqrt(n + 1) times as far from the mean, in logarithms if all values are above 0. For a t interval over n runs, the
    result is the usual prediction interval.
    """
    low, high = ends(here)
    far = math.sqrt((here.n if windows is None else windows) + 1)
    if low > 0 and here.mean > 0:
        ratios = (here.mean * (x / here.mean) ** far if math.isfinite(x) else x for x in (low, high))
        return next(ratios), next(ratios)
    return here.mean - far * (here.mean - low), here.mean + far * (high - here.mean)


def _inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _apart(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[1] < second[0] or second[1] < first[0]


def rule(claim: Claim) -> str:
    """Describe in a few words what our number must be for a claim of this kind to be true."""
    if isinstance(claim.paper, str):
        words = {"ahead": "the interval lies above", "behind": "the interval lies below", "equal": "within 0.8 to 1.25"}
        return {**SEEDS, **words}[claim.paper]
    return "within a factor 1.25, its interval within 1.5"
