"""Facts about a study that are stored beside the rows of its table: its panels, and data for captions and claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from harness.policy.types import Inst
from harness.rows.about import About
from harness.rows.sealed import Facts
from harness.run.server_line import server_line
from harness.run.setup import Setup, load_models, load_trace
from harness.run.slo import judgements
from harness.run.sources import Task
from harness.study.grid import HALVES, Grid, Panel, Point, bounding
from harness.study.study import Claim, Study
from workloads.build import requests_seen
from workloads.picking import window_fold

if TYPE_CHECKING:
    from traces.load import Trace

# fields of a condition that captions name
SETTING = tuple("process sharing sampling scaling assign plan placement pool_bytes host_bytes scaled".split())


def facts(grid: Grid) -> list[dict[str, Any]]:
    """Collect the facts of each panel, in order.

    If x is the model set, the panels of all these sets have the same key. Such panels share one item of the list, with
    the facts of the first panel.
    """
    every = {panel.key: _facts(grid, panel) for panel in reversed(grid.panels)}
    return list(every.values())[::-1]


def _facts(grid: Grid, panel: Panel) -> dict[str, Any]:
    study, spec, condition = grid.study, panel.first, panel.condition
    trace, rated = load_trace(spec.trace), panel.rated
    scales = [p.setting["slo_scale"] for p in grid.panels if "slo_scale" in p.setting]
    usual = next(iter(scales), min(panel.xs, default=1.0))  # the SLO scale of the other panels
    at = {"rate_scale": grid.held_rate(panel), "slo_scale": usual}.get(panel.axis)
    fixed = math.nan if rated else grid.fixed_rate(panel)
    return {
        "condition": panel.key,
        "name": condition.name,
        "kind": condition.kind,
        "other_end": condition.other_end,
        "origin": condition.origin,
        "source": condition.source,
        "row": panel.row,
        "column": panel.column,
        "axis": panel.axis,
        "trace": trace.name,
        "half": "" if panel.half is None else HALVES[panel.half],
        "halves": _seeds_by_half(panel),
        "tier": trace.tier,
        "note": trace.note,
        "left_out": trace.left_out,
        "models": panel.shown_models,
        "own": {name: value for name, value in condition.spec.items() if name in SETTING},
        "given": bool(panel.xs) if rated else not panel.holds_rate,
        "plan": spec.plan,
        "count": None if panel.axis == "models" else panel.size,
        "gpus": None if panel.axis == "gpus" else spec.gpus,
        "gpu": spec.gpu,
        "host": spec.host,
        "server": server_line(Setup(spec)),
        "slo": str(panel.setting.get("slo", study.slo)),
        "slo_scale": panel.setting.get("slo_scale"),
        "rate_rps": None if rated else fixed * panel.unit_rps / (panel.size if panel.axis == "models" else 1),
        "unit_rps": panel.unit_rps,
        "rates_rps": condition.at_rps,
        "xs": panel.xs,
        "at": at,
        "window_s": panel.replayed_s,
        "seen": _seen(panel),
    }


def _seeds_by_half(panel: Panel) -> list[list[int]]:
    """Return the seeds that replay each half of a real trace, the first half first.

    The list is empty unless both halves are replayed.
    """
    spec, halves = panel.first, dict[int, list[int]]()
    trace = load_trace(spec.trace)
    for seed in (spec.seed + k for k in panel.seeds):
        if (half := window_fold(trace, seed, spec.plan)) is not None:
            halves.setdefault(half, []).append(seed)
    return [halves[half] for half in sorted(halves)] if len(halves) > 1 else []


def _seen(panel: Panel) -> list[list[int]]:
    """Return the numbers of past requests that planners see in each part (fold) of the trace that seeds replay.

    There is one list for each part. It has one number for each model, the largest first.
    """
    spec = panel.first
    trace, models, plan = load_trace(spec.trace), load_models(spec.models), spec.plan
    counts = {window_fold(trace, k, plan): requests_seen(trace, models, plan, k, spec.assign) for k in panel.seeds[:2]}
    return [sorted(seen, reverse=True) for seen in counts.values()]


def _cuts(grid: Grid) -> list[str]:
    """Return sentences on windows that are shorter than their trace, repeat their trace, or are half of it."""
    by_words: dict[str, dict[str, None]] = {}
    for panel in grid.panels:
        trace, span_s, window_s = load_trace(panel.first.trace), panel.span_s, panel.replayed_s
        words = ""
        if window_s < span_s:
            words = f"windows cut to {window_s:g} of {span_s:g} s."
        elif window_s > span_s:
            words = f"{span_s:g} s repeated to fill {window_s:g} s."
        elif span_s < trace.span_s:
            words = f"windows of {span_s:g} s, a half of the trace."
        by_words.setdefault(words, {})[trace.name] = None
    if len(by_words) == 1:
        return [words[:1].upper() + words[1:] for words in by_words if words]
    return [f"{name}: {words}" for words, names in by_words.items() if words for name in names]


def _unheld(grid: Grid) -> list[str]:
    """Return a sentence for each panel along rates in which the study's first system reaches the level at no rate.

    Panels that take their rate from such a panel run at its lowest rate.
    """
    level = f"{100 * grid.study.level:g} % of {' and of '.join(map(str.upper, grid.study.definitions))}"
    lines = (
        f"{grid.study.first} holds {level} at no rate on {load_trace(p.first.trace).name}, {p.shown_models}, "
        f"{p.first.gpus} GPU{'s' * (p.first.gpus > 1)}."
        for p in grid.panels
        if p.axis == "rate_scale" and grid.held.get(p.key, 0.0) is None
    )
    return list(dict.fromkeys(lines))


# ------------------------------------------------------------------ facts of the study


def about(
    grid: Grid, stem: str, points: Sequence[Point], runs: Sequence[Task], stand_ins: Mapping[str, Trace], bound: Any
) -> About:
    """Collect the facts about a study that its table alone does not state.

    `runs` are the tasks of `points`, in the same order. `stand_ins` are the traces that replace missing ones, keyed by
    the name of the missing trace. `bound` is the bound on all policies, as `bound.crossing` returns it.
    """
    study = grid.study
    stood_in = [f"{trace.name} stands in for {name}." for name, trace in stand_ins.items()]
    limits = [*_cuts(grid), *_unheld(grid)] if study.layout == "lines" else []
    placed = list(zip(points, runs, strict=True))
    return About(
        study=study.name,
        layout=study.layout,
        paper=study.paper,
        level=study.level,
        definitions=study.definitions,
        slo=study.slo,
        titles=study.titles,
        systems=tuple(study.systems),
        texts=dict(study.systems),
        controls=tuple(bounding(study, None)),
        seeds=grid.scope.seeds,
        sample=asdict(study.sample),
        fuller="" if grid.full else fuller(study),
        setting=study.setting,
        headline=study.headline,
        shown=study.shown,
        panels=tuple(facts(grid)),
        claims=tuple(asdict(claim) for claim in study.claim),
        values=tuple(activation_s(study, claim) if claim.what == "value" else None for claim in study.claim),
        notes=(*limits, *stood_in, *study.notes),
        judges=tuple(Facts(stem, judge) for judge in judgements((p.under, run.folder) for p, run in placed)),
        bound=bound,
        runs=dict(sorted((run.folder, p.system) for p, run in placed)),
    )


def activation_s(study: Study, claim: Claim) -> float:
    """Compute the seconds in which a system loads a model, on idle links of a whole node."""
    spec = study.spec_of(study.steps()[0], claim.system)
    spec = replace(
        spec, models=claim.shape, trace="sample", gpus=spec.node_gpus, pool_bytes=None, placement="", homes=()
    )
    cluster = Setup(spec).cluster
    way = dict(spec.fields).get("way", "parallel")
    return cluster.profile.load_s(Inst(next(iter(cluster.models)), tuple(range(claim.tp))), str(way))


def fuller(study: Study) -> str:
    """Describe the larger numbers of seeds and rates that --full runs; return "" if --full has none."""
    full = study.full
    return ", ".join(
        f"{more} {name}"
        for name, key in (("seeds", "seeds"), ("rates", "points"))
        if full and (more := getattr(full, key)) > getattr(study.quick, key)
    )


def described(traces: Sequence[Trace]) -> Iterator[str]:
    """Describe the traces, with one line for all traces of the same tier and note."""
    kinds: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        kinds.setdefault((trace.tier, trace.note), []).append(trace)
    for (tier, note), of_kind in kinds.items():
        text = ", ".join(dict.fromkeys(trace.name for trace in of_kind)) + f": {tier}" + (f" ({note})" if note else "")
        if len(of_kind) == 1:
            (trace,) = of_kind
            text += f", {len(trace)} requests of {len(trace.models)} models in {trace.span_s:g} s"
        yield text
