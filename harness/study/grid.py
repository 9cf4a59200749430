"""The panels of a study, and the points of their curves: a run at each x, with the SLO that judges it.

Nothing is run here. A panel is made before its SLO is known in seconds; `Panel.targets` adds these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from harness.run.resolve import resolve, traits
from harness.run.setup import load_models, load_trace
from harness.run.slo import SloTarget
from harness.run.spec import Spec, another
from harness.run.streams import stem
from harness.study.study import AA, AA_SEED, BESIDE, CONTROLS, HELD, Condition, Range, Sample, Scope, Study, rounded
from workloads.build import rate_rps, window_span_s
from workloads.picking import window_fold
from workloads.slo import in_full

HALVES = ("first", "second")


@dataclass(frozen=True, eq=False)
class Panel:
    """One setting of a condition: each field that the condition varies has one value."""

    key: str  # how the table names it
    condition: Condition
    row: int  # index of its condition
    column: int  # index of its trace among those that the condition varies
    axis: str
    xs: tuple[float, ...]  # given x; a search adds others
    setting: Mapping[str, Any]  # all its runs share it: fields of a spec, rate_rps and slo_scale
    specs: Mapping[str, Spec]  # keyed by system; x and seed are still to be set
    shown_models: str  # how tables name its model set
    unit_rps: float  # requests per second at rate scale 1, in the mean over the seeds' windows
    window_s: float | None  # None: as the spec says
    warmup_s: float | None
    seeds: tuple[int, ...]  # every curve begins with these, added to the seed of its spec
    half: int | None  # half of a real trace that every seed replays: 0 is the first; None: no halves
    traces: tuple[str, ...]  # as asked for: its own, and missing traces of the condition that it stands in for
    targets: Mapping[float, SloTarget] = field(default_factory=dict)  # keyed by SLO scale

    @property
    def first(self) -> Spec:
        """The spec of the first system."""
        return next(iter(self.specs.values()))

    @property
    def size(self) -> int:
        """The number of models."""
        return len(load_models(self.first.models).members)

    @property
    def scale(self) -> float:
        """The SLO scale at which the panel is judged; it is not used if x is the SLO scale."""
        return float(self.setting.get("slo_scale", 1.0))

    @property
    def span_s(self) -> float:
        """Seconds of the part of the trace that a seed replays."""
        return window_span_s(load_trace(self.first.trace), self.first.plan)

    @property
    def replayed_s(self) -> float:
        """Seconds of a window."""
        return self.span_s if self.window_s is None else self.window_s

    @property
    def rated(self) -> bool:
        """Tell whether x is a rate."""
        return self.axis in {"rate_scale", "rate_rps"}

    @property
    def drawn(self) -> bool:
        """Tell whether each seed draws a window from a generator.

        The windows of a real trace are parts of one log instead.
        """
        return load_trace(self.first.trace).maker is not None

    @property
    def holds_rate(self) -> bool:
        """Tell whether the panel runs at the highest rate at which the study's first system reaches the level."""
        return self.setting.get("rate_scale") == HELD


class Point(NamedTuple):
    """A run at an x of a panel. Several points may share one run."""

    panel: Panel
    x: float
    system: str
    under: SloTarget
    spec: Spec

    @property
    def place(self) -> tuple[str, float, str, int]:
        """The point's panel, x, system and seed."""
        return self.panel.key, self.x, self.system, self.spec.seed


# ------------------------------------------------------------------ panels


def panels(study: Study, full: bool) -> Iterator[Panel]:
    """Yield every panel of a study, without its SLO in seconds. Raises UserError if its trace or models are missing.

    Panels of a condition with the same runs are merged. This happens if a missing trace is replaced by a trace on which
    the condition also runs.
    """
    for row, condition in enumerate(study.steps()):
        distinct = list[Panel]()
        for place in places(study, condition, full):
            for panel in _halves(study, full, row, condition, place):
                same = next((k for k, other in enumerate(distinct) if _runs(other) == _runs(panel)), None)
                if same is None:
                    distinct.append(panel)
                else:
                    distinct[same] = replace(distinct[same], traces=distinct[same].traces + panel.traces)
        yield from distinct


def _runs(panel: Panel) -> tuple[Any, ...]:
    """Return the values that decide which runs a panel has and how they are judged.

    Two panels with equal values have the same runs.
    """
    setting = {key: value for key, value in panel.setting.items() if key != "trace"}
    return panel.axis, panel.xs, panel.specs, panel.window_s, panel.warmup_s, panel.seeds, panel.half, setting


def planned(study: Study, full: bool, panels: Iterable[Panel]) -> int:
    """Return the number of runs that `panels` need; a searched curve counts the points that its search may run."""
    points = study.scope(full).points or study.sample.points
    return sum(len(p.specs) * len(p.seeds) * max(len(p.xs), points, 1) for p in panels)


def places(study: Study, condition: Condition, full: bool) -> Iterator[dict[str, Any]]:
    """Yield the combinations of a condition's varied values: model sets outermost, then traces, GPUs innermost."""
    fields = study.varied(condition)
    if study.axis(condition) == "models":
        fields |= {"models": study.along_x(condition, full)}
    order = sorted(fields, key=lambda name: {"models": 0, "trace": 1, "gpus": 3}.get(name, 2))
    for values in product(*(fields[name] for name in order)):
        yield dict(zip(order, values, strict=True))


def _halves(study: Study, full: bool, row: int, condition: Condition, place: Mapping[str, Any]) -> Iterator[Panel]:
    """Yield the panel for one combination of varied fields; for a real trace, yield a panel for each of its halves.

    Systems plan each half from the requests of the other half. The two halves are separate case studies. A condition
    with one seed gets a panel only for the half that this seed replays. Comparisons (layout `table`) are not split into
    halves.
    """
    whole = _panel(study, full, row, condition, place)
    spec = whole.first
    trace = load_trace(spec.trace)
    folds = {window_fold(trace, spec.seed + k, spec.plan): k for k in whole.seeds[:2]}
    seed_of = {half: k for half, k in folds.items() if half is not None}
    if not seed_of or (len(seed_of) < 2 and condition.seeds != 1) or study.layout == "table":
        yield whole
        return
    for half, seed in sorted(seed_of.items()):
        unit = rate_rps(trace, load_models(spec.models), spec.seed + seed, spec.plan)
        given = tuple(sorted(rounded(rps / unit) for rps in condition.at_rps)) or whole.xs
        key, window_s = f"{whole.key} / {HALVES[half]} half", condition.window_s or study.scope(full).replayed_s
        yield replace(whole, key=key, half=half, seeds=(seed,), unit_rps=unit, xs=given, window_s=window_s or None)


def _panel(study: Study, full: bool, row: int, condition: Condition, place: Mapping[str, Any]) -> Panel:
    setting = {**study.settings(condition), **place}
    axis, scope = study.axis(condition), study.scope(full)
    specs = {
        name: _placed(study.spec_of(condition, name), place, axis, study.along_x(condition))
        for name in study.contestants(condition)
    }
    first = next(iter(specs.values()))
    trace = _trace(first, most_gpus(study, full), condition.window_s or scope.window_s)
    specs = {name: replace(spec, trace=trace) for name, spec in specs.items()}
    first = next(iter(specs.values()))
    unit = unit_rps(first)
    window_s = _window_s(study, scope, condition, first, unit)
    traces = study.varied(condition).get("trace", (setting.get("trace", ""),))
    sets = study.sets(condition)
    given = tuple(sorted(rounded(rps / unit) for rps in condition.at_rps)) or study.along_x(condition, full)
    return Panel(
        _key(condition, place, axis, sets),
        condition,
        row,
        traces.index(place.get("trace", traces[0])),
        axis,
        (float(len(load_models(first.models).members)),) if axis == "models" else given,
        setting,
        specs,
        family(sets) if axis == "models" else stem(first.models),
        unit,
        window_s,
        None if window_s is None else study.warmup_s,
        tuple(range(condition.seeds or scope.seeds)),
        None,
        (str(setting.get("trace", first.trace)),),
    )


def _placed(spec: Spec, place: Mapping[str, Any], axis: str, xs: tuple[Any, ...]) -> Spec:
    """Return a system's spec with the varied fields of `place`.

    If x is the number of GPUs, the spec has the smallest x as its number.
    """
    fields = {key: value for key, value in place.items() if key not in BESIDE}
    if axis == "gpus":
        fields["gpus"] = int(min(xs))
    spec = replace(spec, **fields)
    return replace(spec, trace=spec.trace.replace("{models}", str(len(load_models(spec.models).members))))


def _trace(spec: Spec, gpus: int, window_s: float) -> str:
    """Return the resolved name of a spec's trace. A generated trace lasts at least `window_s`."""
    name = resolve(replace(spec, gpus=gpus, rate_scale=1.0, slo="")).trace
    if not window_s:
        return name
    trace = load_trace(name)
    if trace.maker is None:
        return name
    if trace.span_s < window_s:
        return f"{trace.maker}+span_s={window_s:g}"
    return trace.maker if trace.notice else name  # a trace with a notice stands in for the one of that name


def most_gpus(study: Study, full: bool) -> int:
    """Return the number of GPUs of the largest cluster of a study."""
    counts = [study.spec.get("gpus", Spec("").gpus)]
    for condition in study.condition:
        counts += [condition.spec.get("gpus", 1), *study.varied(condition).get("gpus", ())]
        if study.axis(condition) == "gpus":
            counts += study.along_x(condition, full)
    return int(max(counts))


def unit_rps(spec: Spec) -> float:
    """Compute the requests per second at rate scale 1: the mean over the windows of the seeds."""
    trace, models, plan = load_trace(spec.trace), load_models(spec.models), spec.plan
    folds = {window_fold(trace, spec.seed + k, plan): spec.seed + k for k in (1, 0)}
    rates = [rate_rps(trace, models, seed, plan) for seed in folds.values()]
    return sum(rates) / len(rates)


def _window_s(study: Study, scope: Scope, condition: Condition, spec: Spec, unit: float) -> float | None:
    """Return the seconds of a window; None for the usual length, that of the trace or its half.

    The condition or the scope may set another length. The length grows if the study's number of requests takes longer.
    """
    trace = load_trace(spec.trace)
    usual_s = scope.window_s if trace.tier == "synthetic" else scope.replayed_s
    if not (condition.window_s or usual_s or study.requests):
        return None
    span_s = window_span_s(trace, spec.plan)
    seeds = condition.seeds or scope.seeds
    needed_s = (study.requests / (seeds * rps) for rps in _fixed_rps(study, spec.models, unit))
    window_s = max([condition.window_s or usual_s or span_s, *map(math.ceil, needed_s)])
    return None if window_s == span_s else window_s


def _fixed_rps(study: Study, models: str, unit: float) -> Iterator[float]:
    """Yield, for each condition that runs a model set at given rates, the lowest of these rates in req/s."""
    for condition in study.condition:
        if models not in study.sets(condition):
            continue
        setting = study.settings(condition)
        if condition.at_rps:
            yield min(condition.at_rps)
        elif "rate_rps" in setting:
            yield setting["rate_rps"]
        elif study.axis(condition) == "rate_scale" and study.along_x(condition):
            yield min(study.along_x(condition)) * unit
        elif isinstance(scale := setting.get("rate_scale"), int | float):
            yield scale * unit


def _key(condition: Condition, place: Mapping[str, Any], axis: str, sets: tuple[str, ...]) -> str:
    """Return the key of a panel: the condition's name and the values of its varied fields.

    If x is the model set, panels that differ only in their model set share a key.
    """
    values = [
        family(sets) if name == "models" and axis == "models" else stem(str(value)) for name, value in place.items()
    ]
    name = condition.name + (f" ({condition.kind})" if condition.kind in {"cumulative", "alone"} else "")
    return " / ".join([name, *dict.fromkeys(values)])


def family(sets: tuple[str, ...]) -> str:
    """Return the name that model sets along x have in common."""
    heads = {stem(name).partition("+models=")[0] for name in sets}
    return heads.pop() if len(heads) == 1 else "models"


def scales(study: Study, panel: Panel) -> tuple[float, ...]:
    """Return the SLO scales at which a panel is judged.

    If x is the SLO scale, these include the scales of --full, because a run that reads no SLO is judged at every scale.
    """
    return study.along_x(panel.condition, full=True) if panel.axis == "slo_scale" else (panel.scale,)


def rule(study: Study, panel: Panel, scale: float) -> str:
    """Return the SLO rule of a panel at one of its scales."""
    base = str(panel.setting.get("slo", study.slo))
    return in_full(base, scale) if panel.axis == "slo_scale" or "slo_scale" in panel.setting else base


# ------------------------------------------------------------------ points


@dataclass(frozen=True)
class Grid:
    """The panels of a study with their SLOs.

    For each panel along rates, `held` has the highest x at which the study's first system reaches the level.
    """

    study: Study
    full: bool
    panels: tuple[Panel, ...]
    held: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def scope(self) -> Scope:
        """The scope of what is run: seeds, windows, points and budget."""
        return self.study.scope(self.full)

    def sample(self, panel: Panel) -> Sample:
        """Return the rule that chooses the x of a panel.

        With the rule `bracket`, a study searches only along GPUs. With any other rule, it searches only along rates.
        Panels along other axes run at the given x.
        """
        sample = self.study.sample
        if panel.axis != "gpus" if sample.rule == "bracket" else not panel.rated:
            return replace(sample, rule="fixed")
        return replace(sample, points=self.scope.points or sample.points)

    def bounds(self, panel: Panel) -> Range:
        """Return the range in which the curves of a panel are searched."""
        sample, study = self.sample(panel), self.study
        if sample.below and panel.xs:
            return Range(study.level, panel.xs, min(panel.xs) / sample.below, max(panel.xs), len(panel.seeds))
        least = self.lowest(panel) if sample.rule == "knee" else rounded(self.least(panel))
        return Range(study.level, panel.xs, least, seeds=len(panel.seeds))

    def least(self, panel: Panel) -> float:
        """Return the lowest rate scale at which the windows of a point have as many requests as the study asks for.

        Half of a real trace has a fixed number of requests, so for it the result is an eighth of the lowest x given.
        """
        if panel.half is not None:
            return min(panel.xs, default=1.0) / 8
        return self.study.requests / (len(panel.seeds) * panel.replayed_s * panel.unit_rps)

    def point(self, panel: Panel, system: str, seed: int, x: float) -> Point:
        """Return a system's run at an x of a panel."""
        spec = panel.specs[system]
        return self._point(panel, system, replace(spec, seed=spec.seed + seed), x)

    def _point(self, panel: Panel, system: str, spec: Spec, x: float) -> Point:
        changes: dict[str, Any] = {"rate_scale": self._rate_scale(panel, spec, x)}
        if panel.axis == "gpus":
            changes["gpus"] = int(x)
        if panel.window_s is not None:
            changes |= {"window_s": panel.window_s, "warmup_s": panel.warmup_s}
        spec = replace(spec, **changes)
        under = panel.targets[x if panel.axis == "slo_scale" else panel.scale]
        if panel.axis == "slo_scale" and not traits(spec).reads_slo:  # one run serves all scales: the longest drain
            spec = replace(spec, drain_s=max(target.drain_s for target in panel.targets.values()))
        if panel.axis == "gpus":
            x = float(traits(spec).gpus)  # dedicated takes as many as it needs
        return Point(panel, x, system, under, under.spec(spec))

    def _rate_scale(self, panel: Panel, spec: Spec, x: float) -> float:
        if panel.axis == "rate_scale":
            return x
        rps = x if panel.axis == "rate_rps" else panel.setting.get("rate_rps")
        if rps is not None:
            return rounded(rps / panel.unit_rps)
        return self.held_rate(panel) if panel.holds_rate else spec.rate_scale

    def held_rate(self, panel: Panel) -> float:
        """Return the highest rate scale at which the study's first system reaches the level.

        The rate scale is that of the panel itself, or else that of the first panel along rates with the same trace and
        model set. If the system reaches the level at no rate, return the panel's lowest rate scale.
        """
        rated = [p for p in self.panels if p.axis == "rate_scale"]
        of = (panel.first.trace, panel.first.models)
        same = next((p.key for p in rated if (p.first.trace, p.first.models) == of), "")
        rate = self.held.get(panel.key if panel.key in self.held else same)
        return rate or self.lowest(panel)

    def lowest(self, panel: Panel) -> float:
        """Return the lowest rate scale of a panel.

        This is the lowest given x if x is a rate and rates are given. Otherwise it is the lowest power of 2 with enough
        requests.
        """
        if panel.axis == "rate_scale" and panel.xs:
            return min(panel.xs)
        least = self.least(panel)
        return 2.0 ** math.ceil(math.log2(least)) if least else 1.0

    def fixed_rate(self, panel: Panel) -> float:
        """Return the rate scale of a panel whose x is not a rate."""
        return self._rate_scale(panel, panel.first, math.nan)

    # -------------------------------------------------------------- bounds and copies

    def bounding(self, panel: Panel, xs: tuple[float, ...]) -> Iterator[Point]:
        """Yield the runs of bounds and controls, at the lowest and the highest x at which the first system runs.

        If x is a rate, the runs of the A/A copy at these x are yielded too.
        """
        ends = sorted(self._ends(panel, xs))
        for name, spec in bounding(self.study, panel).items():
            if name.endswith(AA) and not panel.rated:
                continue
            for x in ends:
                for seed in panel.seeds:
                    yield self._point(panel, name, replace(spec, seed=spec.seed + seed), x)

    def _ends(self, panel: Panel, xs: tuple[float, ...]) -> set[float]:
        """Return the x at which bounds and controls run: usually the lowest and the highest x of the first system.

        If rates are given in req/s (`at_rps`), the highest rate scale at which the first system reaches the level
        replaces the lowest x. For the search rule `bracket`, the only x is the largest number of GPUs. If x is the
        model set, the lowest and highest x are taken over all panels that share a key. A panel then returns those of
        them that are its own x.
        """
        if self.study.sample.rule == "bracket":
            return {max(panel.xs)}
        shared = [x for p in self.panels if p.key == panel.key for x in p.xs] if panel.axis == "models" else xs
        if panel.condition.at_rps and panel.axis == "rate_scale":
            return {self.held_rate(panel), max(xs)}
        return {min(shared), max(shared)}.intersection(xs)


def bounding(study: Study, panel: Panel | None) -> dict[str, Spec]:
    """Return the specs of bounds, controls and A/A copies, keyed by name.

    Without a panel, only the names and systems in the result are valid.
    """
    first = panel.first if panel else study.spec_of(study.steps()[0], study.first)
    names = (*study.bounds, *(CONTROLS if study.controls else ()))
    specs = {(spec := another(first, name)).label: spec for name in names}
    specs = {name: spec for name, spec in specs.items() if name not in study.systems}
    if study.controls:
        specs[study.first + AA] = replace(first, seed=first.seed + AA_SEED)
    return specs
