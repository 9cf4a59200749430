"""Verdicts on claims, from the estimates in a study's table. `rule` decides the class of each; nothing is run here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.compute as pc

from harness.policy.fields import asked
from harness.rows import by_window, crossings, estimate, pooled, summaries
from harness.rows.about import About, Panel
from harness.rows.crossings import EASES, Loss, crossing, fewest, inverse, of_panel, reached
from harness.rows.estimate import COUNT, GPUS, NONE, POINTS, RATE, RATIO, SCALE, Estimate, Style
from harness.rows.ranking import Standing, side_by_side
from harness.rows.statistics import interval
from harness.study import measured
from harness.study.rule import (
    CLASSES,
    DECIDED,
    REASONS,
    SEEDS,
    Reading,
    all_of,
    even,
    judged,
    judged_order,
    judged_seeds,
    rule,
    untried,
)
from harness.study.study import BEST, OR, Claim, Study, evidence_of, systems_of

if TYPE_CHECKING:
    import pyarrow as pa

CASE = "a case study, which decides nothing"
LEAST_MISSES, LEAST_WINDOWS = 10, 5  # misses and windows that each side needs for a class not to be weak
AXES = {"rate_scale": "rate", "rate_rps": "rate", "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
STYLES: Mapping[str, Style] = {"rate_scale": RATE, "rate_rps": RATE, "slo_scale": SCALE, "gpus": GPUS, "models": COUNT}


class Support(NamedTuple):
    """The misses and windows behind an estimate.

    If the estimate compares two systems, each number is the smaller of the two systems' numbers.
    """

    misses: int | None  # None: the estimate is no share of requests
    windows: int  # independent ones


class Verdict(NamedTuple):
    """The result of a claim on one panel, or on all panels together (`panel` is None).

    The claim is about one system, alone or in comparison with one other system.
    """

    claim: Claim
    panel: Panel | None
    here: Estimate | None
    text: str  # the result
    says: str  # a word of SAYS; a word of STANDINGS where the paper states nothing
    rule: str  # when a claim of its kind holds
    note: str = ""  # missing data, or limits
    support: Support | None = None
    reading: Reading = frozenset()


# ------------------------------------------------------------------ evidence


def weak(verdict: Verdict) -> str:
    """Return the reason why a verdict's class is based on too few misses or windows; empty if it has enough.

    The result is also empty for classes outside DECIDED, calculations (which have no windows), claims about seeds, and
    estimates that are only bounds. For claims about seeds and for bounds, the verdict's note has the number of runs and
    a confidence limit (`limit_of_seeds`, `limit_of_bound`).
    """
    here = verdict.here
    if verdict.says not in DECIDED or here is None or verdict.claim.what == "value":
        return ""
    if here.sign in {"<", ">"} or here.low == here.high == here.mean:
        return ""
    if verdict.support is None:
        return "misses and windows unknown"
    misses, windows = verdict.support
    few = [f"{misses} of the {LEAST_MISSES} misses"] if misses is not None and misses < LEAST_MISSES else []
    few += [f"{windows} of the {LEAST_WINDOWS} windows"] if windows < LEAST_WINDOWS else []
    return f"{' and '.join(few)} that the rule asks for" if few else ""


def support(rows: pa.Table, panel: Panel, claim: Claim, definition: str, level: float) -> Support:
    """Return the misses and windows behind a claim's estimate.

    If the claim compares two systems, each number is the smaller of the two systems' numbers.
    """
    supports = [crossings.support(rows, panel, name, definition, level) for name in (claim.system, claim.over) if name]
    return Support(*(min(column) for column in zip(*supports, strict=True)))


def limit_of_seeds(paper: str, n: int, of: int) -> str:
    """Describe the one-sided 95 % confidence limit of the share of windows in which the paper's statement is true.

    Of the `of` seeds, `n` reach or meet the level. The limit is that of Clopper and Pearson (1934). It is a lower limit
    if the statement is true for at least one seed, else an upper limit.
    """
    from scipy.special import betaincinv

    reached = n if paper in {"reached", "met"} else of - n
    share = float(betaincinv(reached, of - reached + 1, 0.05)) if reached else 1.0 - 0.05 ** (1.0 / of)
    side = "least" if reached else "most"
    return f"at {side} {100 * share:.0f} % of windows do as the paper says (one-sided 95 % limit)"


def limit_of_bound(here: Estimate, style: Style) -> str:
    """Describe the number of runs and the one-sided 95 % confidence limit of an estimate that is only a bound."""
    end, word = (here.low, "at least") if here.sign == ">" else (here.high, "at most")
    if end is None:
        return f"n = {here.n}"
    scaled = here.mean * (end / here.mean) ** pooled.ONE_SIDED if end > 0 and here.mean > 0 else end
    return f"n = {here.n}; {word} {estimate.number(scaled, style.decimals)}{style.unit} (one-sided 95 % limit)"


# ------------------------------------------------------------------ subjects of claims


def reason(verdict: Verdict) -> str:
    """Return the reason for a verdict.

    It is the verdict's note, else the datum that the claim lacks, else the explanation why our number differs.
    """
    claim = verdict.claim
    return verdict.note or (f"lacks {claim.lacks}" if claim.lacks else claim.why)


def claims_of(about: About) -> list[Claim]:
    """Read the claims of a stored study."""
    return [Claim(**{key: _stored(value) for key, value in stored.items()}) for stored in about.claims]


def _stored(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def concerned(claim: Claim, about: About) -> list[Panel]:
    """List the panels that a claim is about."""
    return crossings.concerned(about.panels, claim.on)


def comparisons(claim: Claim, about: About) -> Iterator[tuple[Claim, Reading]]:
    """Yield a claim for each pair of systems that a claim compares.

    Every name in `system` is paired with every name in `over`. Each pair comes with its reading: the options chosen
    where the paper leaves open which system it means (see Claim).
    """
    ours = [(label, reading) for name, reading in _read(claim.system) for label in of_file(name, about)]
    for (label, mine), (over, theirs) in product(ours, _read(claim.over)):
        yield replace(claim, system=label, over=over), mine | theirs


def _read(text: str) -> Iterator[tuple[str, Reading]]:
    """Yield each system that a claim names, with its reading: the option chosen where the paper leaves the system open.

    The reading is empty for a system that is not one of several options.
    """
    for names in systems_of(text):
        for name in names:
            yield name, frozenset({(OR.join(names), name)} if len(names) > 1 else ())


def of_file(name: str, about: About) -> list[str]:
    """Return the systems of the study that a name in a claim stands for.

    "best NAME" stands for every system of the study that the file NAME defines. Any other name stands for itself.
    """
    if not name.startswith(BEST):
        return [name]
    file = name.removeprefix(BEST)
    return [label for label, text in about.texts.items() if asked(text).name == file]


def lacking(claim: Claim, about: About) -> list[str]:
    """List the systems of a claim that are not in a study."""
    part = {*about.systems, *about.controls}
    names = [name for name in chain(*systems_of(claim.system), *systems_of(claim.over)) if name]
    return [name for name in dict.fromkeys(names) if not {*of_file(name, about)} & part]


# ------------------------------------------------------------------ estimates


def losses(table: pa.Table, about: About, claim: Claim) -> Iterator[Loss]:
    """Yield the attainment that a system loses when a part of it is switched off, paired by seed.

    There is one loss for each x of each panel that the claim is about.
    """
    definition = claim.definition or about.definitions[0]
    return crossings.losses(table, concerned(claim, about), claim.system, claim.over, definition)


def order_text(standing: Standing) -> str:
    """Describe which of two systems is ahead, as the ratio of their crossings.

    If the ratio does not decide, name the system that is ahead and the differences of attainment at fixed rates.
    """
    if (ratio := standing.decisive) is not None:
        return ratio.text(RATIO)
    gaps = ", ".join(f"{gap.times(100.0).text(POINTS)} points at {x:.3g}" for x, gap in standing.differences)
    why = "flat at the level" if standing.ratio is not None else ""
    return ": ".join(filter(None, (", ".join(filter(None, (why, standing.note, standing.says))), gaps)))


def counted(rows: pa.Table, claim: Claim, definition: str, level: float) -> Estimate | None:
    """Estimate the fewest GPUs with which mean attainment over seeds is at least the level.

    The ends of the interval are the fewest and the most GPUs that a single seed needs. There is no interval if there
    are fewer than two seeds, or if the number of GPUs is only a bound, overall or for some seed. If the claim has
    `over`, the estimate is the ratio of the numbers of the two systems.
    """
    whole = fewest(rows, claim.system, claim.over, definition, level)
    seeds = sorted(by_window.curves(rows, claim.system, definition, "x"))
    if whole is None or len(seeds) < 2 or whole.sign != "=":
        return whole
    parts = (rows.filter(pc.equal(rows["seed"], seed)) for seed in seeds)
    of_seeds = [fewest(part, claim.system, claim.over, definition, level) for part in parts]
    if any(e is None or e.sign != "=" for e in of_seeds):
        return whole
    counts = [whole.mean, *(e.mean for e in of_seeds if e)]
    return replace(whole, low=min(counts), high=max(counts))


def lowest(ratios: Mapping[str, Estimate]) -> tuple[str, Estimate]:
    """Return the best of several other systems, and the ratio of the claim's system to this best system.

    The best system is the one with the lowest ratio. The low end of the ratio's interval is the lowest of all low ends,
    and its high end is the lowest of all high ends.
    """
    name = min(ratios, key=lambda other: ratios[other].mean)
    lows = [e.low for e in ratios.values() if e.low is not None]
    highs = [e.high for e in ratios.values() if e.high is not None]
    low = min(lows) if len(lows) == len(ratios) else None
    sign = "~" if any(e.sign == "~" for e in ratios.values()) else ratios[name].sign
    return name, replace(ratios[name], low=low, high=min(highs, default=None), sign=sign)


def met(rows: pa.Table, system: str, definition: str, level: float, at: float) -> tuple[int, int]:
    """Count the seeds whose attainment at x = `at` is at least the level, and all seeds that ran at this x."""
    shares = [
        y for curve in by_window.curves(rows, system, definition, "x").values() for x, y in curve.items() if x == at
    ]
    return sum(y >= level for y in shares), len(shares)


# ------------------------------------------------------------------ verdicts


def verdicts(table: pa.Table, about: About) -> list[Verdict]:
    """Judge every claim whose systems take part, on every panel that it is about."""
    return [verdict for i in range(len(about.claims)) for verdict in of_claim(table, about, i)]


def of_claim(table: pa.Table, about: About, i: int) -> Iterator[Verdict]:
    """Yield the verdicts of the i-th claim, one for each panel and pair of systems.

    Verdicts on further evidence (`claim.also`) come last, and no verdict is repeated.
    """
    seen = set[tuple[str, ...]]()
    stated = claims_of(about)[i]
    for variant in (stated, *(evidence_of(stated, other) for other in stated.also)):
        for claim, reading in comparisons(variant, about):
            for verdict in _of_one(table, about, claim, about.values[i]):
                key = (claim.system, claim.over, claim.definition, verdict.panel["condition"] if verdict.panel else "")
                if key not in seen:
                    seen.add(key)
                    yield verdict._replace(reading=reading)


def _of_one(table: pa.Table, about: About, claim: Claim, value: float | None) -> Iterator[Verdict]:
    match claim.what:
        case "measure":
            yield from _of_measure(table, about, claim)
        case "value":
            here = Estimate(float(value or 0.0), value, value, 1)
            yield by_number(claim, None, here, f"{here.mean:.2f} s")
        case "difference":
            yield from _of_difference(table, about, claim)
        case _:
            for panel in concerned(claim, about) if not lacking(claim, about) else ():
                yield _of_case(_on_panel(claim, panel, of_panel(table, panel), about), panel)


def _of_measure(table: pa.Table, about: About, claim: Claim) -> Iterator[Verdict]:
    """Judge a claim about a measure on each of its panels.

    If nothing was measured, yield a single verdict, without a panel.
    """
    each = list(measured.of_claim(table, about, claim)) if claim.measure else []
    for panel, values in each or [(None, [])]:
        yield by_number(claim, panel, interval(values) if values else None, "" if values else NONE)


def _of_case(verdict: Verdict, panel: Panel) -> Verdict:
    """Return a verdict with its class changed to "open" if its panel is half of a real trace.

    Such a half is a case study of one window, which decides nothing. Other verdicts are returned unchanged.
    """
    if not panel.get("half") or verdict.says not in DECIDED:
        return verdict
    return verdict._replace(says="open", note="; ".join(filter(None, (verdict.note, CASE))))


def _of_difference(table: pa.Table, about: About, claim: Claim) -> Iterator[Verdict]:
    if claim.paper is None or not {claim.system, claim.over} <= set(about.systems):
        return
    worst = max(losses(table, about, claim), key=lambda loss: loss.most.mean, default=None)
    here = worst.most if worst else None
    text = f"{100 * worst.most.mean:.1f} points ({worst.model})" if worst else NONE
    yield by_number(claim, None, here, text)


def by_number(
    claim: Claim, panel: Panel | None, here: Estimate | None, text: str = "", backing: Support | None = None
) -> Verdict:
    """Judge a claim by an estimate. `text` is the measured value in words; if it is empty, the estimate is shown."""
    text = text or estimate.text(here)
    if claim.what == "measure" and here is not None and backing is None:
        backing = Support(None, here.n)
    says = judged(claim, here, backing.windows if backing else None)
    note = ""
    if says in CLASSES and here is not None and here.sign in {"<", ">"}:
        note = limit_of_bound(here, RATIO if claim.over else RATE)
    return Verdict(claim, panel, here, text, says, NONE if says in REASONS else rule(claim), note, backing)


def _on_panel(claim: Claim, panel: Panel, rows: pa.Table, about: About) -> Verdict:
    """Judge a claim about crossings on one panel."""
    definition, level = claim.definition or about.definitions[0], about.level
    others = of_file(claim.over, about) if claim.over else []
    if wrong := {name: why for name, why in summaries.invalid(rows).items() if name in {claim.system, *others}}:
        note = "; ".join(f"{name} is invalid: {why}" for name, why in wrong.items())
        return Verdict(claim, panel, None, NONE, "open", NONE, note)
    if claim.paper is None or panel["kind"]:
        return _standing(claim, panel, rows, about)
    gone = {name: why for name in (claim.system, *others) if (why := by_window.unfit(rows, name)) and why.every}
    fit = [name for name in others if name not in gone]
    if (claim.system in gone or (others and not fit)) and claim.what != "fewest":
        says = untried(claim) or "does not fit"
        return Verdict(claim, panel, None, NONE, says, NONE, "; ".join(f"{name}: {x.why}" for name, x in gone.items()))
    if claim.paper in SEEDS:
        return _by_seeds(claim, panel, rows, definition, level)
    if claim.what == "ratio":
        return _by_ratio(claim, panel, rows, fit, definition, level)
    if claim.what == "fewest":
        here, style = counted(rows, claim, definition, level), RATIO if claim.over else GPUS
    else:
        c = crossing(rows, panel, claim.system, definition, level)
        here, style = None if c is None else c.at, STYLES[panel["axis"]]
    return by_number(claim, panel, here, estimate.text(here, style), support(rows, panel, claim, definition, level))


def _by_ratio(
    claim: Claim, panel: Panel, rows: pa.Table, others: Sequence[str], definition: str, level: float
) -> Verdict:
    """Judge a claim about a ratio to another system, or to the best of several.

    Along SLO scales or GPUs, the ratio is inverted, so that a value above 1 still favors the claim's system. A ratio of
    2 then means half the SLO or half the GPUs. A curve that is flat at the level has no meaningful ratio. Then only the
    order of the systems is judged, not the size of the lead.
    """
    standings = {name: side_by_side(rows, panel, (claim.system, name), definition, level) for name in others}
    if panel["axis"] in EASES:
        standings = {name: s._replace(ratio=s.ratio and inverse(s.ratio)) for name, s in standings.items()}
    standings = {name: s for name, s in standings.items() if s.ratio is not None or s.differences}
    if not standings:
        return by_number(claim, panel, None, NONE)
    ratios = {name: ratio for name, s in standings.items() if (ratio := s.decisive) is not None}
    best = min(standings, key=lambda name: _order(standings[name]))
    backing = support(rows, panel, replace(claim, over=best), definition, level)
    if len(ratios) == len(standings):
        best, here = lowest(ratios)
        named = f" (the best is {best})" if claim.over.startswith(BEST) else ""
        return by_number(claim, panel, here, here.text(RATIO) + named, backing)
    says = all_of([judged_order(claim, standing) for standing in standings.values()])  # behind any is behind the best
    text = "; ".join((f"{name}: " if len(standings) > 1 else "") + order_text(s) for name, s in standings.items())
    holds = NONE if says in REASONS else rule(claim)
    return Verdict(claim, panel, standings[best].ratio, text, says, holds, "", backing)


def _order(standing: Standing) -> float:
    """Return how far a claim's system is ahead: the log of the ratio, or else the mean difference of attainment.

    Of several other systems, the best is the one that the claim's system leads by least.
    """
    if standing.ratio is not None:
        return math.log(standing.ratio.mean)
    return sum(gap.mean for _, gap in standing.differences) / len(standing.differences)


def _by_seeds(claim: Claim, panel: Panel, rows: pa.Table, definition: str, level: float) -> Verdict:
    """Judge a claim about every seed.

    The claim is judged by the number of seeds whose attainment is at least the level: at x = `claim.at`, or at any x if
    the claim has no `at`.
    """
    paper = str(claim.paper)
    if claim.at:
        n, of = met(rows, claim.system, definition, level, claim.at)
    else:
        n, of = reached(rows, panel["axis"], claim.system, definition, level)
    text = f"{'met' if claim.at else 'reached'} by {n} of {of} seed{'s' * (of > 1)}" if of else NONE
    if known := untried(claim):
        return Verdict(claim, panel, None, text, known, NONE)
    note = limit_of_seeds(paper, n, of) if of else ""
    return Verdict(claim, panel, None, text, judged_seeds(paper, n, of), rule(claim), note)


def _standing(claim: Claim, panel: Panel, rows: pa.Table, about: About) -> Verdict:
    """Judge which of two systems is ahead.

    At an end of a cumulative study, the claim is judged by `claim.paper` instead, if the paper states anything. There
    is no ratio if a system does not fit. There is also none if both systems reach the level at every rate that was run,
    or at no rate.
    """
    definition = claim.definition or about.definitions[0]
    pair = (claim.system, claim.over)
    standing = side_by_side(rows, panel, pair, definition, about.level)
    here, says, note = standing.ratio, standing.says, standing.note
    text = note if here is None else here.text(RATIO)
    if not _at_an_end(panel, about) or claim.paper is None:
        return Verdict(claim, panel, here, text, says, NONE, note)
    if here is None:
        return Verdict(claim, panel, None, text, "does not fit" if "does not fit" in note else "open", NONE, note)
    if standing.flat:
        return Verdict(claim, panel, here, order_text(standing), judged_order(claim, standing), rule(claim), note)
    verdict = by_number(claim, panel, here, text, support(rows, panel, claim, definition, about.level))
    return verdict._replace(note="; ".join(filter(None, (note, verdict.note))))


def _at_an_end(panel: Panel, about: About) -> bool:
    """Tell whether a panel is at an end of a cumulative study: without any of its assumptions, or with all of them."""
    last = max((other["row"] for other in about.panels if other["kind"] == "cumulative"), default=None)
    return bool(panel["kind"] == "base" or panel["row"] == last)


# ------------------------------------------------------------------ in words


def claim_text(claim: Claim, of: About | Study, axis: str = "") -> str:
    """Describe the subject of a claim in words; the study gives the level and the usual definition of attainment."""
    level, word = f"{100 * of.level:g} %", (claim.definition or of.definitions[0]).upper()
    match claim.what:
        case "measure":
            return claim.subject or claim.says
        case "value":
            return f"activation of {claim.shape}, TP {claim.tp}"
        case "difference":
            return f"{claim.subject or claim.over}, the model that gains most"
        case "fewest":
            return f"{claim.label}, GPUs for {level} {word}"
        case "ratio" if axis == "slo_scale":
            return f"{claim.label}, how many times shorter P{100 * of.level:g} {word} is"
        case _:
            if claim.at:
                return f"{claim.label}, {level} {word} at {AXES[axis]} {claim.at:g}"
            preposition = "at" if claim.over else "for"
            return f"{claim.label}, {AXES[axis]} {preposition} {level} {word}"


def paper_text(claim: Claim) -> str:
    """Render the paper's number or word, with its bound and unit."""
    unit, factor = {"value": (" s", 1.0), "difference": (" points", 100.0)}.get(
        claim.what, ("x" if even(claim) == 1.0 else "", 1.0)
    )
    if claim.paper is None:
        return NONE
    numbers = claim.paper if isinstance(claim.paper, tuple) else (claim.paper,)
    text = "-".join(x if isinstance(x, str) else f"{factor * x:g}" for x in numbers)
    return " ".join(filter(None, (claim.bound, text + unit * (not isinstance(claim.paper, str)))))
