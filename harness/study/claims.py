"""Claims beside what came out: estimates of a study's table, and one verdict each by one rule. Nothing is run here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.rows import crossings, estimate, tidy
from harness.rows.crossings import (
    Loss,
    Panel,
    crossing,
    fewest,
    of_panel,
    ratio,
    reached,
    side_by_side,
)
from harness.rows.estimate import COUNT, GPUS, NONE, POINTS, RATE, RATIO, SCALE, Style
from harness.rows.statistics import Estimate
from harness.study.study import Claim, Paper

if TYPE_CHECKING:
    import pyarrow as pa

About = Mapping[str, Any]  # facts of a study, as its table's metadata has them

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
AXES = {"rate_scale": "rate", "rate_rps": "rate", "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
STYLES: Mapping[str, Style] = {"rate_scale": RATE, "rate_rps": RATE, "slo_scale": SCALE, "gpus": GPUS, "models": COUNT}


class Verdict(NamedTuple):
    """A claim beside what came out on one panel; on all of its panels together where `panel` is None."""

    claim: Claim
    panel: Panel | None
    here: Estimate | None
    text: str  # what came out
    says: str  # of SAYS; of STANDINGS where the paper states no number
    rule: str  # when it agrees
    note: str = ""  # what lacks


# ------------------------------------------------------------------ one rule


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


def rule(paper: float | tuple[float, float], here: Estimate | None) -> str:
    """When a claim agrees, by what the paper gives and whether ours has an interval."""
    kind = "range" if isinstance(paper, tuple) else "value"
    return RULES[kind if here is None or (here.low is None and here.high is None) else f"{kind}, interval"]


def judged_reach(paper: str, n: int, of: int) -> str:
    """`agrees` where all seeds do as the paper says, `differs` where none does, else `open`; `n` of them reach."""
    as_stated = n if paper == "reached" else of - n
    return "not run" if not of else "agrees" if as_stated == of else "open" if as_stated else "differs"


# ------------------------------------------------------------------ estimates


def losses(table: pa.Table, about: About, claim: Claim) -> Iterator[Loss]:
    """What a system loses without a part at every x of every panel of a claim, paired by seed."""
    definition = claim.definition or about["definitions"][0]
    return crossings.losses(table, concerned(claim, about), claim.system, claim.over, definition)


# ------------------------------------------------------------------ verdicts


def verdicts(table: pa.Table, about: About) -> list[Verdict]:
    """Every claim on every panel that it is about; of systems that take part."""
    return [verdict for i in range(len(about["claims"])) for verdict in of_claim(table, about, i)]


def claims_of(about: About) -> list[Claim]:
    """The claims of a stored study."""
    return [Claim(**{**stored, "paper": _paper(stored["paper"])}) for stored in about["claims"]]


def _paper(value: Any) -> Paper:
    return tuple(value) if isinstance(value, list | tuple) else value


def of_claim(table: pa.Table, about: About, i: int) -> Iterator[Verdict]:
    """The verdicts of the i-th claim: one a panel, or one of all panels together."""
    claim = claims_of(about)[i]
    match claim.what:
        case "value":
            here = Estimate(about["values"][i], None, None, 1)
            yield by_number(claim, None, here, f"{here.mean:.2f} s")
        case "difference":
            yield from _of_difference(table, about, claim)
        case _:
            takes_part = {claim.system, claim.over or claim.system} <= {*about["systems"], *about["controls"]}
            for panel in concerned(claim, about) if takes_part else ():
                yield _on_panel(claim, panel, of_panel(table, panel), about)


def concerned(claim: Claim, about: About) -> list[Panel]:
    """The panels that a claim is about."""
    return crossings.concerned(about["panels"], claim.on)


def _of_difference(table: pa.Table, about: About, claim: Claim) -> Iterator[Verdict]:
    if claim.paper is None or not {claim.system, claim.over} <= set(about["systems"]):
        return
    worst = max(losses(table, about, claim), key=lambda loss: loss.most.mean, default=None)
    here = worst.most if worst else None
    text = f"{100 * worst.most.mean:.1f} points ({worst.model})" if worst else NONE
    yield by_number(claim, None, here, text)


def by_number(claim: Claim, panel: Panel | None, here: Estimate | None, text: str = "") -> Verdict:
    """The verdict on a claim with a number, or a range; `text` says what came out (empty: the estimate)."""
    assert isinstance(claim.paper, float | int | tuple)
    text = text or estimate.text(here)
    if not claim.comparable:
        return Verdict(claim, panel, here, text, "not comparable", NONE)
    return Verdict(claim, panel, here, text, judged(claim.paper, here), rule(claim.paper, here))


def _on_panel(claim: Claim, panel: Panel, rows: pa.Table, about: About) -> Verdict:
    """The verdict on a claim about crossings on one panel."""
    definition, level = claim.definition or about["definitions"][0], about["level"]
    systems = [name for name in (claim.system, claim.over) if name]
    unfit = {name: gone for name in systems if (gone := tidy.unfit(rows, name))}
    if wrong := {name: why for name, why in tidy.invalid(rows).items() if name in systems}:
        note = "; ".join(f"{name} is invalid: {why}" for name, why in wrong.items())
        return Verdict(claim, panel, None, NONE, "open", NONE, note)
    if claim.paper is None or panel["kind"]:
        return _standing(claim, panel, rows, about)
    if any(gone.every for gone in unfit.values()) and claim.what != "fewest":
        says = "does not fit" if claim.comparable else "not comparable"
        note = "; ".join(f"{name}: {gone.why}" for name, gone in unfit.items() if gone.every)
        return Verdict(claim, panel, None, NONE, says, NONE, note)
    if isinstance(claim.paper, str):
        n, of = reached(rows, panel["axis"], claim.system, definition, level)
        text = f"reached by {n} of {of} seed{'s' * (of > 1)}" if of else NONE
        says = judged_reach(claim.paper, n, of) if claim.comparable else "not comparable"
        return Verdict(claim, panel, None, text, says, RULES[claim.paper] if claim.comparable else NONE)
    here, text = estimated(claim, panel, rows, definition, level)
    return by_number(claim, panel, here, text)


def estimated(claim: Claim, panel: Panel, rows: pa.Table, definition: str, level: float) -> tuple[Estimate | None, str]:
    """What came out on a panel, and its text."""
    match claim.what:
        case "ratio":
            here = ratio(rows, panel["axis"], (claim.system, claim.over), definition, level)
            return here, estimate.text(here, RATIO)
        case "fewest":
            here = fewest(rows, claim.system, claim.over, definition, level)
            return here, estimate.text(here, RATIO if claim.over else GPUS)
        case _:
            c = crossing(rows, panel, claim.system, definition, level)
            here = None if c is None else c.at
            return here, estimate.text(here, STYLES[panel["axis"]])


def _standing(claim: Claim, panel: Panel, rows: pa.Table, about: About) -> Verdict:
    """Who is ahead, or the paper's number at both ends of a cumulative study.

    No ratio where a system has no room, or both are beyond the rates that were run for every seed.
    """
    definition = claim.definition or about["definitions"][0]
    pair = (claim.system, claim.over)
    here, says, note, *_ = side_by_side(rows, panel, pair, definition, about["level"])
    text = note if here is None else estimate.text(here, RATIO)
    if not _at_an_end(panel, about) or claim.paper is None:
        return Verdict(claim, panel, here, text, says, NONE, note)
    if here is None:
        return Verdict(claim, panel, None, text, "does not fit" if "does not fit" in note else "open", NONE, note)
    return by_number(claim, panel, here, text)._replace(note=note)


def _at_an_end(panel: Panel, about: About) -> bool:
    """Tell whether a panel is the start of a cumulative study, or has all of its assumptions."""
    last = max((one["row"] for one in about["panels"] if one["kind"] == "cumulative"), default=None)
    return bool(panel["kind"] == "base" or panel["row"] == last)


# ------------------------------------------------------------------ in words


def claim_text(claim: Claim, about: About, axis: str = "") -> str:
    """What a claim is about."""
    goal = f"{100 * about['level']:g} % {(claim.definition or about['definitions'][0]).upper()}"
    match claim.what:
        case "value":
            return f"activation of {claim.shape}, TP {claim.tp}"
        case "difference":
            return f"{claim.subject or claim.over}, the model that gains most"
        case "fewest":
            return f"{claim.label}, GPUs for {goal}"
        case _:
            return (
                f"{claim.label}, {AXES[axis]} at {goal}" if claim.over else f"{claim.system}, {AXES[axis]} for {goal}"
            )


def paper_text(claim: Claim) -> str:
    """What the paper says."""
    unit, factor = {"value": (" s", 1.0), "difference": (" points", 100.0)}.get(
        claim.what, ("x" if claim.over else "", 1.0)
    )
    if claim.paper is None:
        return NONE
    numbers = claim.paper if isinstance(claim.paper, tuple) else (claim.paper,)
    return "-".join(x if isinstance(x, str) else f"{factor * x:g}" for x in numbers) + unit * (
        not isinstance(claim.paper, str)
    )


def points_text(share: Estimate) -> str:
    """A difference of attainment in points."""
    return estimate.text(share.times(100.0), POINTS)
