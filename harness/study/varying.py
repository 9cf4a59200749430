"""Runs of two systems of a comparison under changed constants, one constant at a time, paired by seed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.policy.types import UserError
from harness.rows import by_window, crossings, forms, record, statistics
from harness.rows.estimate import Estimate
from harness.run import score
from harness.run.resolve import resolve
from harness.run.setup import Failed
from harness.run.spec import Spec
from harness.run.teller import Teller
from harness.study.constants import Setting, constants, settings
from harness.study.measure import Measured, measure
from harness.study.sensitivity import Leads, key_of, leads_in
from harness.study.study import Condition, Sample, Study
from harness.study.summary import rate_key, scores, summarize

if TYPE_CHECKING:
    import pyarrow as pa

AS_IS = Setting("", "as it is", {})


def leading(base: Measured, silent: Collection[str]) -> tuple[str, str]:
    """Return the two systems of a comparison with the highest rates at its level.

    If some contestant has no such rate, systems are ordered by attainment instead. Systems in `silent` are not
    contestants, except in a comparison of two systems. Raises UserError for fewer than two contestants.
    """
    names, (definition,) = list(base.about.systems), base.about.definitions
    silent = silent if len(names) > 2 else ()
    summary = summarize(base.table, names, definition, base.about.level, controls=silent)
    rivals = [system for system in summary.systems if not system.control]
    if len(rivals) < 2:
        raise UserError("an order takes two systems: --systems a,b")
    rate = rate_key(base.about.level)
    key = definition if any(system.values.get(rate) is None for system in rivals) else rate
    first, second = sorted(rivals, key=lambda system: -system.mean(key))[:2]
    return first.label, second.label


def telling(base: Measured, pair: tuple[str, str]) -> float:
    """Return the rate of a comparison at which the attainment of two systems differs most."""
    (definition,) = base.about.definitions

    def apart(rate: float) -> float:
        ours, theirs = (scores(base.table, name, rate, definition) for name in pair)
        return abs(statistics.paired(ours, theirs).mean)

    return max(base.xs, key=apart)


def sensitivity(
    base: Measured,
    out: Path,
    *,
    silent: Collection[str] = (),
    only: Collection[str] | None = None,
    workers: int | None = None,
    teller: Teller | None = None,
) -> Leads:
    """Vary constants for the two leading systems of a comparison, and store their leads next to the comparison.

    `only` limits this to some constants (None: all). The two systems are compared at the rate at which they differ
    most. A change is not run if a model no longer fits a GPU under it. Raises UserError for fewer than two contestants.
    """
    pair = leading(base, silent)
    rate_scale = telling(base, pair)
    specs = [base.study.spec_of(base.study.condition[0], name) for name in pair]
    changes, unchanged = settings(specs, only)
    every = varying(base, pair, rate_scale, changes, specs[0])
    misfits = {c.name: why for c in every.condition[1:] if (why := _misfit(every, c, rate_scale, base))}
    varied = every.restricted(c for c in every.condition if c.name not in misfits)
    measured = measure(varied, out, stem="constants", target=base.target, workers=workers, teller=teller)
    unfit = (change for change in changes if change.name in misfits)
    lines = [*_leads(measured, changes), *(_line(change, note=misfits[change.name]) for change in unfit)]
    lines += [_line(Setting(name, "", {}), note=why) for name, why in unchanged.items()]
    described = {name: {"means": means, "value": value, "source": why} for name, means, value, why in constants(specs)}

    def make() -> pa.Table:
        import pyarrow as pa

        rows = [line | described.get(line["constant"], {}) for line in lines]
        return pa.Table.from_pylist(rows, schema=forms.LEAD_COLUMNS)

    about = {
        "first": pair[0],
        "second": pair[1],
        "definition": base.about.definitions[0],
        "rates": [rate_scale],
        "sweep": key_of(base.folder / record.SWEEP),
        "asked": sorted(only or ()),
    }
    made = score.table(base.folder / record.SENSITIVITY, about, measured.tasks, __file__, make)
    return leads_in(about, made)


def varying(base: Measured, pair: tuple[str, str], rate_scale: float, changes: Sequence[Setting], spec: Spec) -> Study:
    """Make the study of two systems of a comparison with unchanged constants, and under each change of them."""
    conditions = (Condition(change.name, spec=change.fields(spec)) for change in (AS_IS, *changes))
    systems = {name: base.study.systems[name] for name in pair}
    return replace(
        base.study,
        name="constants",
        systems=systems,
        condition=tuple(conditions),
        at=(rate_scale,),
        sample=Sample("fixed"),
        by_model=False,
    )


def _misfit(every: Study, condition: Condition, rate_scale: float, base: Measured) -> str:
    """Return the reason why a model alone does not fit under a change; empty if all models fit."""
    try:
        for name in every.systems:
            resolve(base.target.spec(replace(every.spec_of(condition, name), rate_scale=rate_scale)))
    except Failed:
        raise
    except UserError as why:
        return str(why)
    return ""


def _leads(measured: Measured, changes: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Yield the lead of the first system with unchanged constants, and under each change that was run."""
    by_name = {change.name: change for change in (AS_IS, *changes)}
    first, second = measured.about.systems
    definition = measured.about.definitions[0]
    for panel in measured.about.panels:
        rows = crossings.of_panel(measured.table, panel)
        gone = ((name, by_window.unfit(rows, name)) for name in (first, second))
        note = ", ".join(f"{name} does not fit" for name, unfit in gone if unfit and unfit.word == "does not fit")
        lead = lead_of(rows, (first, second), definition)
        yield _line(by_name[panel["name"]], lead, note)


def _line(change: Setting, lead: Estimate | None = None, note: str = "") -> dict[str, Any]:
    """Return a row of the stored table of leads."""
    named = {key: getattr(lead, key) for key in ("mean", "low", "high", "n", "sign")} if lead else {}
    return {"constant": change.constant, "setting": change.setting, **named, "note": note}


def lead_of(rows: pa.Table, pair: tuple[str, str], definition: str) -> Estimate | None:
    """Estimate the lead of the first system of a pair at the one rate of a panel.

    It is the difference of attainment, in shares of 1. A system that does not fit attains 0, and the lead then has no
    interval. The result is None if neither system ran.
    """
    (x,) = rows["x"].unique().to_pylist()
    if (gap := crossings.difference(rows, "rate_scale", pair, definition, x)) is not None:
        return gap
    shares = [crossings.attained(rows, "rate_scale", name, definition).get(x) for name in pair]
    ours, theirs = (0.0 if e is None else e.mean for e in shares)  # without room nothing is attained
    return Estimate(ours - theirs, None, None, 1) if any(shares) else None
