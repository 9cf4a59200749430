"""The part of a study that an engine in real time can run on a number of GPUs, and why the rest is skipped."""

from __future__ import annotations

from dataclasses import replace

from harness.loop import engine as engines
from harness.policy.types import UserError
from harness.run.resolve import lacking
from harness.run.spec import Spec
from harness.study.study import Condition, Study


def part(study: Study, engine: str, table: str | None, gpus: int) -> tuple[Study, list[str]]:
    """Return the part of a study that an engine runs on these GPUs, and lines that say why the rest is skipped.

    The returned study has the engine's cost table if there is one. Raises UserError if no part of the study can run.
    SLO bases are still measured on the simulator, each model alone. The host therefore does not need one GPU for each
    model.
    """
    engines.path(engine)
    conditions, notes = list[Condition](), list[str]()
    for condition in study.condition:
        least = min(counts(study, condition))
        if least > gpus:
            notes.append(f'skipped: condition "{condition.name}" needs {least} GPUs, there are {gpus}')
        else:
            conditions.append(_narrowed(study, condition, gpus))
    if not conditions:
        raise UserError(f"{study.name}: no condition runs on {gpus} GPUs")
    spec = {**study.spec, "engine": engine, **({} if table is None else {"table": table})}
    here = replace(study.restricted(conditions), spec=spec, base_engine="sim")
    tried = {name: replace(here.spec_of(here.condition[0], name), trace="sample", gpus=8) for name in here.systems}
    lacks = {name: ", ".join(lacking(spec)) for name, spec in tried.items()}
    notes += [f"skipped: {name} on {engine}: no {why}" for name, why in lacks.items() if why]
    runnable = here.without([name for name, why in lacks.items() if why])
    if runnable is None:
        raise UserError(*notes, f"{study.name}: no system of it runs on {engine}")
    return runnable, notes


def counts(study: Study, condition: Condition) -> tuple[int, ...]:
    """Return the numbers of GPUs on which a condition runs.

    These are its x if x is the number of GPUs, else the numbers of its panels.
    """
    if study.axis(condition) == "gpus":
        return tuple(int(x) for x in study.along_x(condition, full=True))
    return study.varied(condition).get("gpus", (study.settings(condition).get("gpus", Spec("").gpus),))


def _narrowed(study: Study, condition: Condition, gpus: int) -> Condition:
    """Return the condition without the numbers of GPUs that exceed `gpus`."""
    fits = tuple(count for count in counts(study, condition) if count <= gpus)
    if study.axis(condition) == "gpus":
        return replace(condition, at=fits, full=())
    if "gpus" in study.varied(condition):
        return replace(condition, vary={**condition.vary, "gpus": fits})
    return condition
