"""Ratios of the rates at which systems hold a level, under many conditions: few rates each, the rest by bisection.

Each seed of a system has its own bracket, so that a seed's crossing lies between near rates, and ratios are paired by
seed. The runs of all conditions go into one sweep a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.policy.types import UserError
from harness.rows import ratios, record, statistics, tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.statistics import Curve, Estimate
from harness.run import score
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_models, load_trace
from harness.run.slo import SloTarget
from harness.run.spec import Spec, canonical, digest
from harness.run.sweep import sweep
from harness.run.teller import Silent, Teller
from harness.study.bases import base_specs, slo_target
from harness.study.conditions import Condition, Ratio, Study, told
from harness.study.rates import between

if TYPE_CHECKING:
    import pyarrow as pa


DIGITS = 3  # of a rate (req/s) that is found
BELOW = 4.0  # how far below the lowest fixed rate a curve is followed that does not hold the level there


class Ground(NamedTuple):
    """What a condition's runs have in common beside their spec."""

    under: SloTarget
    unit_rps: float  # requests per second at rate scale 1


class Cell(NamedTuple):
    """A curve: of a condition (by position) and a system's name, for one seed."""

    condition: int
    system: str
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The ratios of a study, as its table and the facts beside it have them."""

    folder: Path
    table: pa.Table  # ratios.SCHEMA
    about: Mapping[str, Any]


@dataclass(slots=True)
class Curves:
    """What was attained at which rate (req/s), and which runs had no room."""

    seen: dict[Cell, dict[float, float]]
    misfits: set[Cell]  # those that have no room, or cannot run at all
    runs: set[str]  # folders
    facts: dict[str, dict[str, Any]]  # of runs, each combination once


def measure(study: Study, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Measured:
    """Run what a study needs, and keep its ratios; stored runs that are current cost nothing. Raises UserError."""
    teller = teller or Silent()
    conditions = study.conditions()
    grounds = _grounds(conditions, out, workers, teller)
    curves = _curves(study, conditions, grounds, out, workers, teller)
    rows = [row for k, one in enumerate(conditions) for row in _rows(study, k, one, curves)]
    specs = [
        [one.kind, one.change.name, name, canonical(spec)] for one in conditions for name, spec in one.specs.items()
    ]
    asked = [specs, study.definition, study.slo, study.level, study.rates_rps, study.bisections, study.seeds]
    folder = out / f"{study.kind}-{study.name}-{digest(record.dumps(asked))}"
    about = _about(study, conditions, curves)
    import pyarrow as pa

    table = pa.Table.from_pylist(rows, schema=ratios.SCHEMA)
    record.write_table(folder / ratios.FILE, table, about)
    return Measured(folder, table, about)


def _grounds(conditions: Sequence[Condition], out: Path, workers: int | None, teller: Teller) -> list[Ground]:
    """Who judges each condition, and the rate of its trace; the SLO bases of all are measured in one sweep."""
    from workloads.build import rate_rps

    firsts = []
    for one in conditions:
        try:
            ready = [resolve(replace(spec, slo="")) for spec in one.specs.values()]
            Setup(ready[0]).jobs()  # a mistake shows before anything is run
        except UserError as error:
            raise UserError(f'"{one.change.name}": {error}') from None
        firsts.append(ready[0])
    pairs = [(one, next(iter(one.specs.values()))) for one in conditions]
    bases = [base for one, spec in pairs if "P95" in one.slo for base in base_specs(spec)]
    if bases:
        sweep(bases, out, workers=workers, teller=teller, what="SLO bases")
    judges = (slo_target(spec, one.slo, out, workers=workers, teller=Silent()) for one, spec in pairs)
    rates = (rate_rps(load_trace(spec.trace), load_models(spec.models)) for spec in firsts)
    return [Ground(under, unit_rps) for under, unit_rps in zip(judges, rates, strict=True)]


def _curves(
    study: Study, conditions: Sequence[Condition], grounds: Sequence[Ground], out: Path, workers: int | None,
    teller: Teller,
) -> Curves:  # fmt: skip
    """Attainment at the fixed rates, and then where each seed's curve is bisected, down to a part of the lowest."""
    cells = [
        Cell(k, name, seed) for k, one in enumerate(conditions) for name in one.specs for seed in range(study.seeds)
    ]
    found = Curves({cell: {} for cell in cells}, set(), set(), {})
    asked: dict[Cell, tuple[float, ...]] = dict.fromkeys(cells, study.rates_rps)
    least, most = min(study.rates_rps) / BELOW, max(study.rates_rps)
    for step in range(1 + study.bisections):
        points = [(cell, rps) for cell, rates in asked.items() for rps in rates]
        specs = [_spec(study, conditions[cell.condition], grounds[cell.condition], cell, rps) for cell, rps in points]
        what = f"bisection {step} of {study.bisections}" if step else "fixed rates"
        folders = sweep(specs, out, workers=workers, teller=teller, what=what)
        for (cell, rps), run in zip(points, folders, strict=True):
            under, about = grounds[cell.condition].under, record.meta(run)
            if about["infeasible"] or about["skipped"]:
                found.misfits.add(cell)
            found.runs.add(run.name)
            facts = _facts(about, under)
            found.facts[record.dumps(facts)] = facts
            found.seen[cell][rps] = score.attained(run, under, [study.definition])[study.definition]
        curves = {cell: curve for cell, curve in found.seen.items() if cell not in found.misfits}
        nexts = {cell: between(curve, study.level, least, most, DIGITS) for cell, curve in curves.items()}
        asked = {cell: (x,) for cell, x in nexts.items() if x is not None}
        if not asked:
            break
    return found


def _spec(study: Study, condition: Condition, ground: Ground, cell: Cell, rps: float) -> Spec:
    """The run of a cell at a rate."""
    spec = replace(condition.specs[cell.system], rate_scale=float(f"{rps / ground.unit_rps:.6g}"), seed=cell.seed,
                   token_times=DEFINITIONS[study.definition].by_token)  # fmt: skip
    return ground.under.spec(spec)


def _facts(about: Mapping[str, Any], under: SloTarget) -> dict[str, Any]:
    """What a caption says of a run."""
    spec = about["spec"]
    beside = {name: about.get(name) for name in ("tier", "fit", "fidelity", "plan_origin")}
    own = {name: spec[name] for name in ("trace", "models", "gpu", "gpus", "host", "window_s")}
    return {**own, **beside, "slo": under.rule, "machine": tidy.machine(spec)}


# ------------------------------------------------------------------ rows


def _rows(study: Study, k: int, condition: Condition, curves: Curves) -> Iterator[dict[str, Any]]:
    """The rates of a condition's systems, then its ratios."""
    change = condition.change
    head = {
        "condition": k,
        "kind": condition.kind,
        "name": change.name,
        "origin": change.origin,
        "source": change.source,
    }
    for name in condition.specs:
        yield {**head, "first": name, **_rate(study, k, name, curves)}
    for ratio in study.ratios:
        yield {
            **head,
            "first": ratio.first,
            "over": ratio.over,
            "paper": ratio.paper,
            **_ratio(study, k, ratio, curves),
        }


def _rate(study: Study, k: int, name: str, curves: Curves) -> dict[str, Any]:
    """The rate at which a system holds the level; none where it has no room."""
    without = sum(Cell(k, name, seed) in curves.misfits for seed in range(study.seeds))
    if without == study.seeds:
        return {"n": study.seeds, "note": "infeasible"}
    e = statistics.crossing(_own(curves.seen, k, name), study.level).at
    return {**_values(e), "note": f"infeasible for {without} of {study.seeds} seeds" if without else ""}


def _own(seen: Mapping[Cell, Curve], k: int, name: str) -> dict[int, Curve]:
    return {cell.seed: curve for cell, curve in seen.items() if cell.condition == k and cell.system == name}


def _values(e: Estimate) -> dict[str, Any]:
    return {"mean": e.mean, "low": e.low, "high": e.high, "n": e.n, "sign": e.sign}


def _misfit(curves: Curves, k: int, name: str, seeds: int) -> str:
    """Say that a system has no room, and for how many seeds; empty where it always has."""
    own = [cell for cell in curves.misfits if cell.condition == k and cell.system == name]
    part = f" for {len(own)} of {seeds} seeds" if len(own) < seeds else ""
    return f"{name} is infeasible{part}" if own else ""


def _ratio(study: Study, k: int, ratio: Ratio, curves: Curves) -> dict[str, Any]:
    """A ratio with its verdict; without one where a system has no room, or both are beyond the rates that were run."""
    ours, theirs = (_own(curves.seen, k, name) for name in (ratio.first, ratio.over))
    notes = [note for name in (ratio.first, ratio.over) if (note := _misfit(curves, k, name, study.seeds))]
    signs = [[statistics.rate_at(curve, study.level)[1] for curve in side.values()] for side in (ours, theirs)]
    none = [
        all(Cell(k, name, seed) in curves.misfits for seed in range(study.seeds)) for name in (ratio.first, ratio.over)
    ]
    level, n = f"{100 * study.level:g} %", study.seeds
    if any(none):
        other = signs[0] if none[1] else signs[1]
        holds = not all(none) and "<" not in other
        found = ("ahead" if none[1] else "behind") if holds else "open"
        return {"n": n, "verdict": found, "note": ", ".join(notes)}
    lowest = max(min(curve) for side in (ours, theirs) for curve in side.values())
    for sign, at, words in (("<", lowest, "neither holds"), (">", max(study.rates_rps), "both hold")):
        both = sum(pair == (sign, sign) for pair in zip(*signs, strict=True))
        if both == n:
            return {"n": n, "verdict": "open", "note": f"{words} {level} at {at:g} req/s"}
        if both:
            notes.append(f"{words} {level} at {at:g} req/s for {both} of {n} seeds")
    e = statistics.crossing_ratio(ours, theirs, study.level)
    return {**_values(e), "verdict": ratios.verdict(e), "note": ", ".join(notes)}


def _about(study: Study, conditions: Sequence[Condition], curves: Curves) -> dict[str, Any]:
    """What readers of the table need to know beside its rows."""
    facts = [curves.facts[key] for key in sorted(curves.facts)]
    shortest_s = min(one["window_s"] or math.inf for one in facts)
    lowest_rps = min(min(curve) for curve in curves.seen.values())
    return {
        "study": study.kind,
        "name": study.name,
        "paper": study.paper,
        "definition": study.definition,
        "slo": study.slo,
        "level": study.level,
        "seeds": study.seeds,
        "rates_rps": study.rates_rps,
        "bisections": study.bisections,
        "requests": math.floor(lowest_rps * shortest_s * study.seeds) if shortest_s < math.inf else None,
        "systems": dict(study.systems),
        "ratios": [one.label for one in study.ratios],
        "changes": [told(one.change) for one in conditions if one.kind != "alone"],
        "facts": facts,
        "runs": len(curves.runs),
        "notes": study.notes,
    }
