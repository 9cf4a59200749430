"""A comparison in sentences: what a reader must know before the numbers, after them, and may ask next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.policy import fields
from harness.policy.types import Inst, Unsupported
from harness.report import sentences
from harness.report.commands import again, explain_command, short_path
from harness.report.formats import by_model
from harness.report.summary import Summary, scores
from harness.rows import record, tidy
from harness.rows.checked import checked, note
from harness.run.setup import Setup, load_trace
from harness.run.spec import as_dict
from harness.study.measure import Measured
from harness.study.search import LEVEL
from harness.study.study import AA
from harness.study.text import departures, unchecked_lines
from workloads.build import closed, idle_to_swap, rate_rps, window_fold

if TYPE_CHECKING:
    import pyarrow as pa


def headline(found: Measured, shown: Summary) -> Iterator[str]:
    """What a reader must know before the numbers."""
    spec = found.reference
    setup = Setup(spec)
    trace, models = setup.trace, setup.models
    load = f"{round(trace.span_s * rate_rps(trace, models))} requests in {trace.span_s:g} s"
    if window_fold(trace, spec.seed, spec.plan) is not None:
        load += ", a half of which each seed replays"
    if (loop := closed(trace)) is not None:
        load = f"{loop.clients} clients a model, {loop.sent} requests, {loop.think_s:g} s between them"
    tier = trace.tier + (f" ({trace.note})" if trace.note else "") + _fit(setup.realism)
    seeds = "1 seed, no interval" if found.seeds == 1 else f"{found.seeds} seeds"
    fidelity = " and ".join(sorted(found.table.column("fidelity").unique().to_pylist()))
    if said := note(spec.gpu, spec.host) if fidelity == "simulated" else "":
        fidelity += f" · {said}"
    base = " (P95 on dedicated)" if found.target.rule.endswith("P95") else ""
    plans = f" · {tidy.plans([spec.plan])}"
    machine = f" · {asked}" if (asked := tidy.machine(as_dict(spec))) else ""
    cache = {True: " · prefix cache", False: " · no prefix cache", None: ""}[spec.prefix_cache]
    if spec.prefix_cache is None and found.study.spec.get("prefix_cache"):
        cache = " · no prefix cache: the trace has no ids of blocks"
    yield (
        f"{trace.name} · {tier}, {len(models.members)} of {len(trace.models)} models ({_name(spec.models)}), "
        f"{load} · {spec.measured_on or f'{shown.gpus} x {spec.gpu}'}{machine} · {fidelity} · "
        f"SLO {found.target.rule}{base} · {seeds}{plans}{cache}"
    )
    rates = ", ".join(f"{rate:g}" for rate in found.xs)
    of = f", of {rates}" if len(found.xs) > 1 else ""
    offered = "" if math.isnan(shown.offered_rps) else f" = {shown.offered_rps:.3g} req/s"
    yield f"at rate scale {shown.rate_scale:g} by {spec.scaling}{offered}{of}{_gaps(found, shown)}"


def _fit(fit: str | None) -> str:
    """How near a synthetic trace comes to what it is fitted to, where that was measured."""
    return f", fit {fit}" if fit else ""


def _gaps(found: Measured, shown: Summary) -> str:
    """The ratio that says whether models idle long enough to be swapped."""
    spec = replace(found.reference, rate_scale=shown.rate_scale, slo="", slo_s=(), window_s=None)
    setup = Setup(spec)
    cluster = setup.cluster
    try:
        swaps = [cluster.profile.load_s(Inst(n, tuple(range(m.tp))), "host") for n, m in cluster.models.items()]
    except Unsupported:  # an engine without a cost table
        return ""
    ratio = idle_to_swap(setup.jobs(), sum(swaps) / len(swaps))
    return "" if math.isnan(ratio) else f"; median idle gap {ratio:.3g} x a swap from the host"


def _name(text: str) -> str:
    return Path(text).stem if text.endswith((".toml", ".parquet", ".py")) else text


def notes(found: Measured, shown: Summary, rule: str) -> Iterator[str]:
    """What stands under the table: who is not in it, what qualifies it, and what it says."""
    yield from failures(found.failed) + _gone(found.table, "infeasible") + _gone(found.table, "skipped")
    yield from departures(found.table)
    yield from invalid(found.table)
    yield from unchecked_lines(found.table)
    yield from served(found, shown)
    yield from _refused(found, shown)
    if shown.undefined_tpot:
        yield f"{100 * shown.undefined_tpot:.1f} % of requests have one output token: their TPOT counts as met"
    yield from sentences.caps(found.table, as_dict(found.reference))
    copy = next((row.label for row in shown.systems if row.label.endswith(AA)), None)
    for line in (
        sentences.verdict(found.table, shown, rule, LEVEL),
        sentences.why(found.table, shown, rule, LEVEL),
        copy and sentences.same(found.table, copy.removesuffix(AA), copy, shown.rate_scale, rule),
    ):
        if line:
            yield line


def failures(failed: Mapping[str, str]) -> list[str]:
    """One line a system that left a comparison: what its policy did."""
    return [f"{label}: {why}" for label, why in failed.items()]


def invalid(rows: pa.Table) -> list[str]:
    """One line a label of which runs on real servers measured something else, and why."""
    return [f"invalid: {label}: {why}" for label, why in tidy.invalid(rows).items()]


def served(found: Measured, shown: Summary) -> list[str]:
    """Which server served which model, and results by model; nothing where no servers were attached."""
    if fields.asked(found.reference.engine).name != "attach":
        return []
    runs = (record.meta(found.folder.parent / run) for run in found.table.column("run").unique().to_pylist())
    by: Mapping[str, str] = next((about["served"] for about in runs if about.get("served")), {})
    own = found.target.definition
    return [*(f"{model}: {how}" for model, how in by.items()), *by_model(found.table, shown.rate_scale, own)]


def _gone(rows: pa.Table, column: str) -> list[str]:
    """One line a label that is infeasible or skipped, with its reason."""
    pairs = zip(rows.column("label").to_pylist(), rows.column(column).to_pylist(), strict=True)
    return [f"{column}: {label}, {reason}" for label, reason in dict(sorted((a, b) for a, b in pairs if b)).items()]


def _refused(found: Measured, shown: Summary) -> list[str]:
    """One line a label whose actions the engine refused at the rate shown: how many, and the first."""
    runs: dict[str, dict[str, None]] = {row.label: {} for row in shown.systems}
    for run, label, rate in zip(*(found.table[x].to_pylist() for x in ("run", "label", "rate_scale")), strict=True):
        if rate == shown.rate_scale and label in runs:  # a skipped one is not shown
            runs[label][run] = None
    lines = []
    for label, names in runs.items():
        every = [record.meta(found.folder.parent / name) for name in names]
        if hit := [about for about in every if about["refused"]]:
            count = sum(about["refused"] for about in hit)
            of = f" in {len(hit)} of {len(every)} runs" if len(every) > 1 else ""
            what = "1 action refused:" if count == 1 else f"{count} actions refused{of}, the first:"
            lines.append(f"{label}: {what} {hit[0]['first_refused']}")
    return lines


def next_command(found: Measured, shown: Summary, rule: str, words: Iterable[str]) -> str:
    """What to ask now: why the system that misses most misses, in its run nearest to its mean attainment."""
    missing = [row for row in shown.systems if not row.infeasible and (e := row.values[rule]) and e.mean < 100]
    if not missing and any(row.infeasible for row in shown.systems):
        return again(words, "--gpus", str(2 * shown.gpus))
    if not missing and found.reference.scaling == "none":
        return f"bench plot {short_path(found.folder)}"
    if not missing:
        more = again(words, "--rate-scale", f"{2 * max(found.xs):g}")
        return more if len(found.xs) == 1 else f"bench plot {short_path(found.folder)}"
    worst = min(missing, key=lambda row: row.values[rule].mean)  # type: ignore[union-attr]
    frame = found.table.select(["run", "label", "rate_scale", "seed"]).to_pandas()
    mine = frame[(frame["label"] == worst.label) & (frame["rate_scale"] == shown.rate_scale)].drop_duplicates("seed")
    met = scores(found.table, worst.label, shown.rate_scale, rule)
    mean = sum(met.values()) / len(met)
    seed = min(met, key=lambda seed: (abs(met[seed] - mean), seed))
    run = found.folder.parent / str(mine.set_index("seed")["run"][seed])
    own = ["--definition", rule] * (rule != found.target.definition)
    return explain_command(run, found.target.rule, *own, "--misses")


def facts(found: Measured, rule: str) -> dict[str, Any]:
    """Facts of a comparison for other programs."""
    trace = load_trace(found.reference.trace)
    return {
        "trace": trace.name,
        "tier": trace.tier,
        "fit": Setup(found.reference).realism,
        "models": found.reference.models,
        "gpu": found.reference.gpu,
        "engine": found.reference.engine,
        "fidelity": sorted(found.table.column("fidelity").unique().to_pylist()),
        "host": found.reference.host,
        "checked": checked(found.reference.gpu, found.reference.host),
        "scaling": found.reference.scaling,
        "plan_origin": found.reference.plan,
        "slo": found.target.rule,
        "slo_s": found.target.seconds,
        "definition": rule,
        "rates": found.xs,
        "seeds": found.seeds,
        "folder": str(found.folder),
        "departs": departures(found.table),
        "invalid": invalid(found.table),
        "unchecked": unchecked_lines(found.table),
        "infeasible": _gone(found.table, "infeasible"),
        "skipped": _gone(found.table, "skipped"),
        "failed": failures(found.failed),
        "caps": sentences.caps(found.table, as_dict(found.reference)),
    }
