"""A comparison as a study: systems on one trace, at several rates, under one SLO rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

from harness.engines.costs import kernels, quantities
from harness.policy import fields, mix
from harness.run.forecast import reads_plan
from harness.run.setup import Setup, load_models, load_trace
from harness.run.spec import Spec, from_dict
from harness.run.spec import asked as asked_system
from harness.run.streams import stem
from harness.study.bases import judged_by
from harness.study.study import AA, CONTROLS, Condition, Sample, Scope, Study, named
from workloads.build import closed, rate_rps
from workloads.picking import FOLDED_S, assigned, window_fold
from workloads.usual import TRACE, WORLD, memory

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.rows.about import About
    from harness.study.summary import Summary
    from traces.synthetic import Preset

NAME = "comparison"
SPEC_KEYS = frozenset(field.name for field in fields_of(Spec))


def filled(setting: Mapping[str, Any], unsaid: Collection[str] = ()) -> dict[str, Any]:
    """Return a setting with defaults for the keys that it lacks: models, their traffic, GPUs and host memory.

    `unsaid` names keys whose values are defaults that no user set. If the trace or the number of GPUs is among them,
    its default is chosen again for this setting.
    """
    given = {**setting, **{key: value for key, value in WORLD.items() if key not in setting}}
    if "trace" not in setting or "trace" in unsaid:
        given["trace"] = load_models(given["models"]).trace or given.get("trace", TRACE)
    if "gpus" not in setting or "gpus" in unsaid:
        given["gpus"] = mix.size(given["gpu"])
    return {**given, **memory(given)}


def stem_of(asked: Study) -> str:
    """Return the start of a comparison's folder name: its trace."""
    return stem(str(asked.spec["trace"])).partition("+")[0].replace("/", "-")


def comparison(
    systems: Sequence[str],
    setting: Mapping[str, Any],
    *,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None = None,
    controls: bool = False,
    budget: int = 0,
) -> Study:
    """Make the study of systems (as --systems takes them) under one `setting`, the common fields of their specs.

    If no rates are given, they are searched around the knee. `definition` is the definition of attainment (None: that
    of the SLO rule). With `controls`, the study also has CONTROLS and an A/A copy of the first system: the same system
    on other seeds. `budget` is a number of simulated requests. If it is not 0, more seeds are run until the systems are
    told apart or the budget is spent. Raises UserError for a system that is listed twice.
    """
    listed = named(systems)
    if controls:
        listed |= {name: text for name, text in named(CONTROLS).items() if name not in listed}
        first = next((name for name in listed if name not in CONTROLS), next(iter(listed)))
        listed[first + AA] = listed[first]
    fixed = (1.0,) if rates is None and setting.get("scaling") == "none" else rates
    once = setting.get("scaling") == "none" and "plan" not in setting
    if once and load_trace(str(setting["trace"])).maker is None and not planners(listed.values(), setting):
        setting = {**setting, "plan": "trace"}  # no system plans from its requests
    return Study(
        name=NAME,
        systems=listed,
        condition=(Condition(""),),
        spec=setting,
        at=tuple(fixed or ()),
        sample=Sample("fixed" if fixed else "knee", each="panel"),
        quick=Scope(seeds, budget=budget),
        definitions=(definition or judged_by(rule),),
        slo=rule,
        by_model=True,
        layout="table",
    )


def planners(texts: Iterable[str], setting: Mapping[str, Any]) -> list[str]:
    """Return the systems, as --systems takes them, that plan from past requests of the trace."""
    given = {key: value for key, value in setting.items() if key in SPEC_KEYS}
    return [text for text in texts if reads_plan(from_dict({**given, **asked_system(text)}))]


def repeats(setting: Mapping[str, Any]) -> bool:
    """Tell whether all seeds replay the same requests of the trace.

    The result is valid only for a setting that replays the trace without scaling its rate.
    """
    trace, plan = load_trace(str(setting["trace"])), str(setting.get("plan", Spec("").plan))
    return trace.maker is None and window_fold(trace, 0, plan) == window_fold(trace, 1, plan)


def replayed(spec: Spec) -> str:
    """Describe the part of a replayed trace that each seed replays; return "" for a trace that a generator draws."""
    trace = Setup(spec).trace
    if trace.maker is not None:
        return ""
    if window_fold(trace, spec.seed, spec.plan) is None:
        return "all of it" + (" once, as it came" if spec.scaling == "none" else "")
    if trace.span_s < FOLDED_S:
        return "even seeds its second half, odd ones its first"
    return "its second half"


def silent(systems: Collection[str]) -> tuple[str, ...]:
    """Return the names that do not count as contestants: all controls, and the A/A copies among `systems`."""
    return (*CONTROLS, *(name for name in systems if name.endswith(AA)))


def summary(table: pa.Table, about: About, rule: str) -> Summary:
    """Summarize a comparison, from its table and facts, at the highest rate at which a contestant meets the level."""
    from harness.study.summary import summarize
    from harness.study.table import marks

    names = list(about.systems)
    (panel,) = about.panels
    return summarize(
        table,
        names,
        rule,
        about.level,
        controls=silent(names),
        checks=marks(table),
        halves=panel["halves"],
        bound=about.bound,
        subject=asker(about),
    )


def asker(about: About) -> str:
    """Return the system that a comparison is about: the first contestant given as a file, else the first contestant."""
    contend = [name for name in about.systems if name not in silent(about.systems)] or [*about.systems]
    files = (name for name in contend if fields.asked(about.texts.get(name, name)).name.endswith(".py"))
    return next(files, contend[0])


def traffic(spec: Spec) -> tuple[int, Preset | None]:
    """Return the number of requests in the unscaled trace, and the generator of its closed loop.

    The generator is None if the trace is not a closed loop.
    """
    setup = Setup(spec)
    requests = round(setup.trace.span_s * rate_rps(setup.trace, setup.models))
    return requests, closed(setup.trace)


def clients(loop: Preset) -> str:
    """Describe the load of a closed loop: clients per model, requests, and seconds between the requests of a client."""
    return f"{loop.clients} clients a model, {loop.sent} requests, {loop.think_s:g} s between them"


def stream_rule(spec: Spec) -> str:
    """Describe the rule that assigns streams of the trace to models."""
    setup = Setup(spec)
    return assigned(setup.trace, setup.models, spec.seed, spec.assign).rule


def rooflines(spec: Spec) -> dict[str, float]:
    """Return, by model, the share of a decode step's kernel time that is a roofline estimate and not measured.

    Only models with quantised formats, experts or latent KV are listed. The result is empty for a measured cost table.
    """
    if quantities.machine(spec.table) is not None:
        return {}
    shares: dict[str, float] = {}
    for kind in mix.names(spec.gpu):
        q, card = quantities.quantities(kind, spec.table), quantities.gpu(kind, spec.table)
        for member in Setup(spec).models.members:
            shape = member.shape
            if shape.formats is not None or shape.experts is not None or shape.latent is not None:
                share = kernels.roofline_share(q, card, shape, member.tp)
                shares[shape.name] = max(share, shares.get(shape.name, 0.0))
    return shares
