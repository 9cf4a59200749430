"""A paper's claims beside what came out: crossings of a level on each panel, and a verdict with its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.report import estimate
from harness.report.estimate import NONE, Style
from harness.rows import statistics, tidy
from harness.rows.statistics import Crossing, Estimate
from harness.study.figure import Claim
from harness.study.reproduce import Reproduced

if TYPE_CHECKING:
    import pyarrow as pa


def of_panel(rows: pa.Table, panel: str) -> pa.Table:
    """A panel's rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return rows.filter(pc.equal(rows["panel"].cast(pa.string()), panel))


def where(rows: pa.Table, panel: Mapping[str, Any], label: str, definition: str, level: float) -> Crossing | None:
    """Where a label crosses the level on a panel, in units of its axis; None where it was not run."""
    c = tidy.crossed(rows, panel["axis"], label, definition, level)
    return c if c is None or panel["axis"] != "rate_scale" else c.times(panel["unit_rps"])


class Verdict(NamedTuple):
    """A claim beside what came out on one panel."""

    claim: Claim
    panel: Mapping[str, Any]
    here: str
    says: str  # of SAYS
    rule: str  # when it agrees


SAYS = {
    "agrees": "the rule in the last column holds",
    "differs": "it does not",
    "open": "it may, beyond the grid or with more seeds",
    "not comparable": "the paper leaves out what a comparison needs",
    "does not fit": "one of its systems finds no room for the models here",
    "not run": "this system has no runs here",
}
RULES = {  # when a claim agrees, by what the paper gives and whether ours has an interval
    "reached": "every seed reaches it",
    "never": "no seed reaches it",
    "value": "ours is the paper's",
    "range": "ours lies in the paper's range",
    "value, interval": "our interval holds the paper's",
    "range, interval": "our interval meets the paper's",
}


def verdicts(found: Reproduced) -> list[Verdict]:
    """Every claim on every panel that it is about; of systems that take part."""
    about = found.about
    out = []
    for claim in (Claim(**one) for one in about["claims"]):
        who = {claim.system, claim.over or claim.system}
        if not who <= set(about["systems"]) or claim.definition not in about["definitions"]:
            continue
        for panel in about["panels"]:
            if panel["axis"] != claim.axis or not panel["trace"].startswith(claim.trace):
                continue
            apart = panel.get("own")  # a claim that names no row is about those as the figure has them
            anywhere = panel["row"] + 1 if apart else 0
            if claim.row not in {anywhere, panel["row"] + 1} or claim.column not in {0, panel["column"] + 1}:
                continue
            rows = of_panel(found.table, panel["panel"])
            here, says, rule = _verdict(claim, panel, rows, about["level"])
            if any((gone := tidy.unfit(rows, label)) and gone.every for label in who):
                here, says, rule = NONE, "does not fit", NONE
            if not claim.comparable:
                says, rule = "not comparable", NONE
            out.append(Verdict(claim, panel, here, says, rule))
    return out


def _verdict(claim: Claim, panel: Mapping[str, Any], rows: pa.Table, level: float) -> tuple[str, str, str]:
    """What came out, what it says of the claim, and by which rule; both from one estimate."""
    if isinstance(claim.paper, str):
        n, of = reached(rows, claim, level)
        here = f"reached by {n} of {of} seed{'s' * (of > 1)}" if of else NONE
        return here, judged_reach(claim.paper, n, of), RULES[claim.paper]
    if claim.over is None:
        c = where(rows, panel, claim.system, claim.definition, level)
        e = None if c is None else c.at
        here = at_text(e, claim.axis)
    else:
        ours, theirs = (tidy.curves(rows, x, claim.definition, "x") for x in (claim.system, claim.over))
        e = statistics.crossing_ratio(ours, theirs, level) if ours.keys() & theirs.keys() else None
        here = ratio_text(e)
    return here, judged(claim.paper, e), rule(claim.paper, e)


def rule(paper: float | tuple[float, float], here: Estimate | None) -> str:
    """When a claim agrees, by what the paper gives and whether ours has an interval."""
    kind = "range" if isinstance(paper, tuple) else "value"
    return RULES[kind if here is None or (here.low is None and here.high is None) else f"{kind}, interval"]


def reached(rows: pa.Table, claim: Claim, level: float) -> tuple[int, int]:
    """How many seeds reach the level anywhere on the axis, by the fit of each, and of how many."""
    curves = tidy.curves(rows, claim.system, claim.definition, "x").values()
    harder = 1.0 if claim.axis in {"rate_scale", "models"} else -1.0  # the direction in which attainment falls
    held = [statistics.held({harder * x: y for x, y in curve.items()}, level) for curve in curves]
    return sum(x is not None for x in held), len(held)


def judged_reach(paper: str, n: int, of: int) -> str:
    """`agrees` where all seeds do as the paper says, `differs` where none does, else `open`; `n` of them reach."""
    as_said = n if paper == "reached" else of - n
    return "not run" if not of else "agrees" if as_said == of else "open" if as_said else "differs"


def judged(paper: float | tuple[float, float], here: Estimate | None) -> str:
    """`agrees` where the paper's value, or part of its range, lies in the interval (is it, without), else `differs`.

    `open` where a crossing lies beyond the grid and may be the paper's.
    """
    if here is None:
        return "not run"
    if here.sign == "~":
        return "open"
    low = -math.inf if here.sign == "<" else here.mean if here.low is None else here.low
    high = math.inf if here.sign == ">" else here.mean if here.high is None else here.high
    least, most = paper if isinstance(paper, tuple) else (paper, paper)
    if not (low <= most and least <= high):
        return "differs"
    return "agrees" if here.sign == "=" else "open"


STYLES: Mapping[str, Style] = {
    "rate_scale": estimate.RATE,
    "slo_scale": estimate.SCALE,
    "gpus": estimate.GPUS,
    "models": estimate.COUNT,
}


def at_text(e: Estimate | None, axis: str) -> str:
    """A crossing in units of its axis."""
    return estimate.text(e, STYLES[axis])


def ratio_text(e: Estimate | None) -> str:
    """A ratio of crossings."""
    return estimate.text(e, estimate.RATIO)
