"""A comparison in sentences: what a reader must know before the numbers, after them, and may ask next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from harness.policy import fields
from harness.policy.types import GIB, Inst, Unsupported
from harness.report import sentences
from harness.report.commands import again, explain_command, short_path
from harness.report.formats import by_model
from harness.report.summary import Summary, scores
from harness.rows import record, setting, tidy
from harness.rows.checked import checked, note
from harness.run import room, streams
from harness.run.room import Remedy
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict
from harness.study.measure import Measured
from harness.study.search import LEVEL
from harness.study.study import AA
from harness.study.text import departures, unchecked_lines
from workloads.build import assigned, closed, idle_to_swap, rate_rps, window_fold

if TYPE_CHECKING:
    import pyarrow as pa


def answer(found: Measured, shown: Summary, rule: str) -> str:
    """Say what the comparison was for: who serves more, by how much, and on which models and machine."""
    said = sentences.verdict(found.table, shown, rule, LEVEL)
    spec = found.reference
    where = spec.measured_on or f"{shown.gpus or spec.gpus} x {spec.gpu}"
    return f"{said} ({_name(spec.models)}, {where})" if said else ""


def headline(found: Measured, shown: Summary) -> Iterator[str]:
    """Yield what a reader must know before the numbers: trace, models, load, machine, SLO, seeds and the rate."""
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
    plans = f" · {setting.plans([spec.plan])}"
    machine = f" · {asked}" if (asked := setting.machine(as_dict(spec))) else ""
    cache = {True: " · prefix cache", False: " · no prefix cache", None: ""}[spec.prefix_cache]
    if spec.prefix_cache is None and found.study.spec.get("prefix_cache"):
        cache = " · no prefix cache: the trace has no ids of blocks"
    yield (
        f"{trace.name} · {tier}, {len(models.members)} of {len(trace.models)} models ({_name(spec.models)}), "
        f"{load} · {spec.measured_on or f'{shown.gpus or spec.gpus} x {spec.gpu}'}{machine} · {fidelity} · "
        f"SLO {found.target.rule}{base} · {seeds}{plans}{cache}"
    )
    yield from streams.lines(setup)
    if math.isnan(shown.rate_scale):  # nothing ran; `notes` say why
        return
    of = f", one of {len(found.xs)}" if len(found.xs) > 1 else ""
    offered = "" if math.isnan(shown.offered_rps) else f" = {shown.offered_rps:.3g} req/s"
    yield f"the table is at rate scale {shown.rate_scale:g} by {spec.scaling}{offered}{of}{_gaps(found, shown)}"


def _fit(fit: str | None) -> str:
    """Say how near a synthetic trace comes to what it is fitted to, where that was measured."""
    return f", fit {fit}" if fit else ""


def _gaps(found: Measured, shown: Summary) -> str:
    """Render the ratio of the median idle gap to a swap, which tells whether models idle long enough to be swapped."""
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
    """Yield the lines under the table: the systems that are not in it, what qualifies it, and what it says."""
    yield from failures(found.failed) + _gone(found.table, "skipped")
    yield from departures(found.table)
    yield from invalid(found.table)
    yield from unchecked_lines(found.table)
    yield from served(found, shown)
    yield from idle(found, shown)
    yield from _refused(found, shown)
    if shown.undefined_tpot:
        yield f"{100 * shown.undefined_tpot:.1f} % of requests have one output token: their TPOT counts as met"
    yield from sentences.caps(found.table, as_dict(found.reference))
    copy = next((row.label for row in shown.systems if row.label.endswith(AA)), None)
    for line in (
        sentences.why(found.table, shown, rule, LEVEL),
        copy and sentences.same(found.table, copy.removesuffix(AA), copy, shown.rate_scale, rule),
    ):
        if line:
            yield line


def failures(failed: Mapping[str, str]) -> list[str]:
    """List the systems that left a comparison, a line each: what the policy did."""
    return [f"{label}: {why}" for label, why in failed.items()]


def invalid(rows: pa.Table) -> list[str]:
    """List the labels whose runs on real servers measured something else, a line each with the reason."""
    return [f"invalid: {label}: {why}" for label, why in tidy.invalid(rows).items()]


def served(found: Measured, shown: Summary) -> list[str]:
    """List the server of each model, and results by model; empty where no servers were attached."""
    if fields.asked(found.reference.engine).name != "attach":
        return []
    runs = (record.meta(found.folder.parent / run) for run in found.table.column("run").unique().to_pylist())
    by: Mapping[str, str] = next((about["served"] for about in runs if about.get("served")), {})
    own = found.target.definition
    return [*(f"{model}: {how}" for model, how in by.items()), *by_model(found.table, shown.rate_scale, own)]


def _gone(rows: pa.Table, column: str) -> list[str]:
    """List the labels that are infeasible or skipped, a line each with the reason."""
    pairs = zip(rows.column("label").to_pylist(), rows.column(column).to_pylist(), strict=True)
    return [f"{column}: {label}, {reason}" for label, reason in dict(sorted((a, b) for a, b in pairs if b)).items()]


def unfit(found: Measured) -> tuple[dict[str, str], list[Remedy]]:
    """Say, by label, what each system without room lacks and with what it has room; list the remedies for all of them.

    A remedy is tried on all seeds, at the lowest and the highest rate.
    """
    specs: dict[str, dict[tuple[float, int], Spec]] = {}
    gone = tidy.infeasible(found.table)
    ends = {min(found.xs), max(found.xs)}
    of = dict(zip(found.table["run"].to_pylist(), found.table["label"].to_pylist(), strict=True))
    for task in found.tasks:
        label = of.get(task.spec.folder)
        if label in gone and task.spec.rate_scale in ends:
            specs.setdefault(str(label), {})[task.spec.rate_scale, task.spec.seed] = task.spec
    said, by = {}, dict[str, list[Remedy]]()
    for label, reason in gone.items():
        own = list(specs.get(label, {}).values())
        by[label] = room.remedies(own) if own else []
        untold = [] if "short" in reason else [spec for spec in own if not room.fits(spec)]
        lacks = [most for spec in untold if (most := room.short_bytes(spec)) is not None]
        short = f"{max(lacks) / GIB:.1f} GiB short on each GPU: " if lacks else ""
        ways = " or ".join(shlex.join(one.options) for one in by[label])
        fits = f"fits with {ways}" if ways else "no memory setting or number of GPUs tried makes it fit"
        said[label] = f"does not fit: {short}{reason} ({fits})"
    if len(specs) == 1:
        return said, by[next(iter(specs))]
    every = [spec for own in specs.values() for spec in own.values()]
    return said, room.remedies(every) if every else []


def idle(found: Measured, shown: Summary) -> list[str]:
    """List the systems that left GPUs without a request in some run at the rate shown, a line each.

    Warm-up and drain are included.
    """
    lines = []
    for row in shown.systems:
        if row.infeasible:
            continue
        runs = _runs(found, row.label, shown.rate_scale)
        none = [sorted(set(range(row.gpus)) - _used(found.folder.parent / run)) for run in runs]
        if none and (least := min(none, key=len)):
            every = "" if len(runs) == 1 else " in every run" if len(set(map(tuple, none))) == 1 else " or more"
            which = f" ({_spans(least)})" if every != " or more" else ""
            lines.append(f"{row.label}: {len(least)} of {row.gpus} GPUs served nobody{every}{which}")
    return lines


def _runs(found: Measured, label: str, rate: float) -> list[str]:
    """List the runs of a label at a rate."""
    here = (pc.field("label") == label) & (pc.field("rate_scale") == rate)
    runs: list[str] = found.table.select(["run", "label", "rate_scale"]).filter(here)["run"].unique().to_pylist()
    return runs


def _used(run: Path) -> set[int]:
    """Return the GPUs on which some request of a run had a step: `0+1` is a group, and `0>1` has moved."""
    places = record.read(run, ["gpus"])["gpus"].unique().to_pylist()
    return {int(gpu) for place in places if place for gpu in re.split(r"[+>]", place)}


def _spans(gpus: Sequence[int]) -> str:
    """Render numbers of GPUs in few words: `GPU 3`, `GPUs 14 to 23`, `GPUs 1, 5, 7 to 9`."""
    spans: list[list[int]] = []
    for gpu in gpus:
        if spans and gpu == spans[-1][-1] + 1:
            spans[-1].append(gpu)
        else:
            spans.append([gpu])
    ends = ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in spans)
    return f"GPU{'s' * (len(gpus) > 1)} {ends}"


def _refused(found: Measured, shown: Summary) -> list[str]:
    """List the labels whose actions the engine refused at the rate shown, a line each: how many, and the first."""
    lines = []
    for label in (row.label for row in shown.systems):  # a skipped one is not shown
        every = [record.meta(found.folder.parent / name) for name in _runs(found, label, shown.rate_scale)]
        if hit := [about for about in every if about["refused"]]:
            count = sum(about["refused"] for about in hit)
            of = f" in {len(hit)} of {len(every)} runs" if len(every) > 1 else ""
            what = "1 action refused:" if count == 1 else f"{count} actions refused{of}, the first:"
            lines.append(f"{label}: {what} {hit[0]['first_refused']}")
    return lines


def next_command(found: Measured, shown: Summary, rule: str, words: Sequence[str], ways: Sequence[Remedy] = ()) -> str:
    """Return the command to run next: with room for all systems, with valid runs, or to explain why a system misses.

    Of several systems it explains the one that misses most, in its run nearest to its mean attainment. `ways` give room
    to all.
    """
    if ways:
        return again(words, *ways[0].options)
    if wrong := tidy.invalid(found.table):
        return _valid(" ".join(wrong.values()), found, words)
    ran = [row for row in shown.systems if row.values.get(rule) is not None]
    missing = [row for row in ran if row.mean(rule) < 100 * LEVEL]
    if not missing and ran and shown.rate_scale == max(found.xs) and found.reference.scaling != "none":
        return again(words, "--rate-scale", f"{2 * max(found.xs):g}")
    if not missing and len(found.xs) == 1:
        return f"bench plot {short_path(found.folder)}"
    if not missing:  # why it ends where it does
        first = min((row for row in ran if not row.control), key=lambda row: row.mean("rate_99"), default=None)
        system = ["--system", first.label] if first else []
        return shlex.join(["bench", "explain", short_path(found.folder), "--misses", *system])
    worst = min(missing, key=lambda row: row.mean(rule))
    frame = found.table.select(["run", "label", "rate_scale", "seed"]).to_pandas()
    mine = frame[(frame["label"] == worst.label) & (frame["rate_scale"] == shown.rate_scale)].drop_duplicates("seed")
    met = scores(found.table, worst.label, shown.rate_scale, rule)
    mean = sum(met.values()) / len(met)
    seed = min(met, key=lambda seed: (abs(met[seed] - mean), seed))
    run = found.folder.parent / str(mine.set_index("seed")["run"][seed])
    own = ["--definition", rule] * (rule != found.target.definition)
    return explain_command(run, found.target.rule, *own, "--misses")


def _valid(why: str, found: Measured, words: Sequence[str]) -> str:
    """Say what makes runs on real servers valid, by why they were not; the new runs go to another folder.

    The runs that are there are kept.
    """
    options = ["-o", short_path(found.folder.parent / "again")]
    if "other processes took" in why:
        return f"end what else runs on this machine, then {again(words, *options)}"
    if "was not measured" in why:
        return f"let the client read the load of this machine (/proc), then {again(words, *options)}"
    return f"a rate at which the client keeps up: {again(words, '--rate-scale', f'{min(found.xs) / 2:g}', *options)}"


def facts(found: Measured, rule: str) -> dict[str, Any]:
    """Collect the facts of a comparison for other programs."""
    setup = Setup(found.reference)
    trace = setup.trace
    return {
        "trace": trace.name,
        "tier": trace.tier,
        "fit": setup.realism,
        "models": found.reference.models,
        "gpu": found.reference.gpu,
        "engine": found.reference.engine,
        "fidelity": sorted(found.table.column("fidelity").unique().to_pylist()),
        "host": found.reference.host,
        "checked": checked(found.reference.gpu, found.reference.host),
        "scaling": found.reference.scaling,
        "streams": assigned(trace, setup.models, found.reference.seed, found.reference.assign).rule,
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
        "infeasible": [f"{label}, {why}" for label, why in unfit(found)[0].items()],
        "skipped": _gone(found.table, "skipped"),
        "failed": failures(found.failed),
        "caps": sentences.caps(found.table, as_dict(found.reference)),
    }
