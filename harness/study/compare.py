"""A comparison as a study: contestants on one trace, at several rates, under one SLO rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.policy import mix
from harness.run.setup import load_models
from harness.study.study import AA, CONTROLS, PRECISION, Condition, Sample, Scope, Study, named
from workloads import slo
from workloads.usual import TRACE, WORLD, memory

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.report.summary import Summary

NAME = "comparison"


def filled(setting: Mapping[str, Any], unsaid: Collection[str] = ()) -> dict[str, Any]:
    """Return a setting with what is compared where nothing is said: models, their traffic, a machine with its memory.

    Keys of `unsaid` have a default that no user has set.
    """
    given = {**setting, **{key: value for key, value in WORLD.items() if key not in setting}}
    if "trace" not in setting or "trace" in unsaid:
        given["trace"] = load_models(given["models"]).trace or given.get("trace", TRACE)
    if "gpus" not in setting or "gpus" in unsaid:
        given["gpus"] = mix.size(given["gpu"])
    return {**given, **memory(given)}


def stem_of(asked: Study) -> str:
    """Return the start of a comparison's folder name: its trace."""
    trace = str(asked.spec["trace"])
    return (Path(trace).stem if trace.endswith(".parquet") else trace).partition("+")[0].replace("/", "-")


def comparison(
    systems: Sequence[str],
    setting: Mapping[str, Any],
    *,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None = None,
    controls: bool = False,
    precision: float = PRECISION,
    budget: int = 0,
) -> Study:
    """Make the study of systems (as --systems takes them) that share `setting`, fields of a spec.

    Without rates they are searched around the knee of the definition of attainment (None: the rule's). With controls,
    CONTROLS and an A/A copy of the first system stand beside the others. With a budget of simulated requests, systems
    that are not yet told apart get more seeds. UserError for a system that stands twice.
    """
    listed = named(systems)
    if controls:
        listed |= {name: text for name, text in named(CONTROLS).items() if name not in listed}
        first = next((name for name in listed if name not in CONTROLS), next(iter(listed)))
        listed[first + AA] = listed[first]
    fixed = (1.0,) if rates is None and setting.get("scaling") == "none" else rates
    return Study(
        name=NAME,
        systems=listed,
        condition=(Condition(""),),
        spec=setting,
        at=tuple(fixed or ()),
        sample=Sample("fixed" if fixed else "knee", each="panel"),
        quick=Scope(seeds, budget=budget, precision=precision),
        definitions=(definition or judged_by(rule),),
        slo=rule,
        by_model=True,
        layout="table",
    )


def judged_by(rule: str) -> str:
    """Return the definition of attainment that an SLO rule is about."""
    parsed = slo.parse(rule)
    return "e2e" if isinstance(parsed, slo.Scaled) and parsed.base == "solo" else "both"


def silent(systems: Collection[str]) -> tuple[str, ...]:
    """Return the names that contend for nothing: controls, and the copies of A/A."""
    return (*CONTROLS, *(name for name in systems if name.endswith(AA)))


def summary(table: pa.Table, about: Mapping[str, Any], rule: str, unchecked: Collection[str]) -> Summary:
    """Summarize a comparison at its most telling rate, from its table and facts; `unchecked` labels are marked so."""
    from harness.report.summary import summarize
    from harness.study.search import LEVEL

    names = list(about["systems"])
    (panel,) = about["panels"]
    return summarize(table, names, rule, LEVEL, controls=silent(names), unchecked=unchecked,
                     halves=panel["halves"], bound=about.get("bound"))  # fmt: skip
