"""A comparison in sentences: the setting before the numbers, the notes after them, and the next command."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from harness.engines.costs import kernels, quantities
from harness.policy import fields, mix
from harness.policy.types import GIB, Inst, Unsupported
from harness.report import sentences
from harness.report.commands import again, explain_command, short_path
from harness.report.formats import by_model
from harness.report.summary import Summary, scores
from harness.rows import record, setting, tidy
from harness.rows.checked import checked, note
from harness.run import room, streams
from harness.run.room import Remedy
from harness.run.server_line import server_line
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict
from harness.study.measure import Measured
from harness.study.search import LEVEL
from harness.study.study import AA
from harness.study.text import departures, own_degrees, unchecked_lines
from workloads.build import closed, idle_to_swap, rate_rps
from workloads.picking import assigned, window_fold

ROOFLINE = 0.01  # of a step: what is less is not told

if TYPE_CHECKING:
    import pyarrow as pa


def answer(measured: Measured, shown: Summary, rule: str) -> str:
    """Say who serves more, by how much, and on which models and machine."""
    verdict = sentences.verdict(measured.table, shown, rule, LEVEL)
    spec = measured.reference
    where = spec.measured_on or mix.told(spec.gpu, shown.gpus or spec.gpus)
    return f"{verdict} ({_name(spec.models)}, {where})" if verdict else ""


def headline(measured: Measured, shown: Summary) -> Iterator[str]:
    """Yield the setting of the numbers: trace, models, load, machine, SLO, seeds and the rate."""
    spec = measured.reference
    setup = Setup(spec)
    trace, models = setup.trace, setup.models
    load = f"{round(trace.span_s * rate_rps(trace, models))} requests in {trace.span_s:g} s"
    if window_fold(trace, spec.seed, spec.plan) is not None:
        load += ", a half of which each seed replays"
    if (loop := closed(trace)) is not None:
        load = f"{loop.clients} clients a model, {loop.sent} requests, {loop.think_s:g} s between them"
    tier = trace.tier + (f" ({trace.note})" if trace.note else "") + _fit(setup.realism)
    seeds = "1 seed, no interval" if measured.seeds == 1 else f"{measured.seeds} seeds"
    fidelity = " and ".join(sorted(measured.table.column("fidelity").unique().to_pylist()))
    if unchecked := note(spec.gpu, spec.host) if fidelity == "simulated" else "":
        fidelity += f" · {unchecked}"
    rule, _, kind = measured.target.rule.partition("@")
    base = f" (P95 on dedicated{kind and f' {kind}'})" if rule.endswith("P95") else ""
    plans = f" · {setting.plans([spec.plan])}"
    machine = f" · {asked}" if (asked := setting.machine(as_dict(spec))) else ""
    cache = {True: " · prefix cache", False: " · no prefix cache", None: ""}[spec.prefix_cache]
    if spec.prefix_cache is None and measured.study.spec.get("prefix_cache"):
        cache = " · no prefix cache: the trace has no ids of blocks"
    yield (
        f"{trace.name} · {tier}, {len(models.members)} of {len(trace.models)} models ({_name(spec.models)}), "
        f"{load} · {spec.measured_on or mix.told(spec.gpu, shown.gpus or spec.gpus)}{machine} · {fidelity} · "
        f"SLO {measured.target.rule}{base} · {seeds}{plans}{cache}"
    )
    yield server_line(setup)
    yield from streams.lines(setup)
    if math.isnan(shown.rate_scale):  # nothing ran; `notes` has the reasons
        return
    of = f", one of {len(measured.xs)}" if len(measured.xs) > 1 else ""
    offered = "" if math.isnan(shown.offered_rps) else f" = {shown.offered_rps:.3g} req/s"
    yield f"the table is at rate scale {shown.rate_scale:g} by {spec.scaling}{offered}{of}{_gaps(measured, shown)}"


def _fit(fit: str | None) -> str:
    """Render the fit of a synthetic trace to its target, where that was measured."""
    return f", fit {fit}" if fit else ""


def _gaps(measured: Measured, shown: Summary) -> str:
    """Render the ratio of the median idle gap to a swap, which tells whether models idle long enough to be swapped."""
    spec = replace(measured.reference, rate_scale=shown.rate_scale, slo="", slo_s=(), window_s=None)
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


def notes(measured: Measured, shown: Summary, rule: str) -> Iterator[str]:
    """Yield the lines under the table: the systems that are not in it, its limits, and its findings."""
    yield from failures(measured.failed) + _gone(measured.table, "skipped")
    yield from departures(measured.table)
    yield from own_degrees(measured.table)
    yield from invalid(measured.table)
    yield from unchecked_lines(measured.table)
    yield from served(measured, shown)
    yield from idle(measured, shown)
    yield from _refused(measured, shown)
    if shown.undefined_tpot:
        yield f"{100 * shown.undefined_tpot:.1f} % of requests have one output token: their TPOT counts as met"
    yield from sentences.caps(measured.table, as_dict(measured.reference))
    yield from rooflines(measured.reference)
    copy = next((row.label for row in shown.systems if row.label.endswith(AA)), None)
    for line in (
        sentences.why(measured.table, shown, rule, LEVEL),
        copy and sentences.same(measured.table, copy.removesuffix(AA), copy, shown.rate_scale, rule),
    ):
        if line:
            yield line


def failures(failed: Mapping[str, str]) -> list[str]:
    """List the systems that left a comparison, a line each with the policy's failure."""
    return [f"{label}: {why}" for label, why in failed.items()]


def invalid(rows: pa.Table) -> list[str]:
    """List the labels whose runs on real servers are not valid, a line each with the reason."""
    return [f"invalid: {label}: {why}" for label, why in tidy.invalid(rows).items()]


def served(measured: Measured, shown: Summary) -> list[str]:
    """List the server of each model, and results by model; empty where no servers were attached."""
    if fields.asked(measured.reference.engine).name != "attach":
        return []
    runs = (record.meta(measured.folder.parent / run) for run in measured.table.column("run").unique().to_pylist())
    by: Mapping[str, str] = next((about["served"] for about in runs if about.get("served")), {})
    definition = measured.target.definition
    return [*(f"{model}: {how}" for model, how in by.items()), *by_model(measured.table, shown.rate_scale, definition)]


def _gone(rows: pa.Table, column: str) -> list[str]:
    """List the labels that are infeasible or skipped, a line each with the reason."""
    pairs = zip(rows.column("label").to_pylist(), rows.column(column).to_pylist(), strict=True)
    return [f"{column}: {label}, {reason}" for label, reason in dict(sorted((a, b) for a, b in pairs if b)).items()]


def unfit(measured: Measured) -> tuple[dict[str, str], list[Remedy]]:
    """Describe, by label, the memory that each system without room lacks and its remedies; list the remedies for all.

    A remedy is tried on all seeds, at the lowest and the highest rate.
    """
    specs: dict[str, dict[tuple[float, int], Spec]] = {}
    gone = tidy.infeasible(measured.table)
    ends = {min(measured.xs), max(measured.xs)}
    of = dict(zip(measured.table["run"].to_pylist(), measured.table["label"].to_pylist(), strict=True))
    for task in measured.tasks:
        label = of.get(task.spec.folder)
        if label in gone and task.spec.rate_scale in ends:
            specs.setdefault(str(label), {})[task.spec.rate_scale, task.spec.seed] = task.spec
    texts, by = {}, dict[str, list[Remedy]]()
    for label, reason in gone.items():
        runs = list(specs.get(label, {}).values())
        by[label] = room.remedies(runs) if runs else []
        untold = [] if "short" in reason else [spec for spec in runs if not room.fits(spec)]
        lacks = [most for spec in untold if (most := room.short_bytes(spec)) is not None]
        short = f"{max(lacks) / GIB:.1f} GiB short on each GPU: " if lacks else ""
        ways = " or ".join(shlex.join(remedy.options) for remedy in by[label])
        fits = f"fits with {ways}" if ways else "no memory setting or number of GPUs tried makes it fit"
        texts[label] = f"does not fit: {short}{reason} ({fits})"
    if len(specs) == 1:
        return texts, by[next(iter(specs))]
    every = [spec for runs in specs.values() for spec in runs.values()]
    return texts, room.remedies(every) if every else []


def idle(measured: Measured, shown: Summary) -> list[str]:
    """List the systems that left GPUs without a request in some run at the rate shown, a line each.

    Warm-up and drain are included. Rows tell where requests were prefilled, not where they decode after a move.
    """
    lines = []
    for row in shown.systems:
        if row.infeasible:
            continue
        runs = _runs(measured, row.label, shown.rate_scale)
        none = [sorted(set(range(row.gpus)) - _used(measured.folder.parent / run)) for run in runs]
        if none and (least := min(none, key=len)):
            every = "" if len(runs) == 1 else " in every run" if len(set(map(tuple, none))) == 1 else " or more"
            which = f" ({_spans(least)})" if every != " or more" else ""
            moved = any(record.meta(measured.folder.parent / run)["stats"].get("moves") for run in runs)
            did = "prefilled" if moved else "served"
            lines.append(f"{row.label}: {len(least)} of {row.gpus} GPUs {did} no request{every}{which}")
    return lines


def _runs(measured: Measured, label: str, rate: float) -> list[str]:
    """List the runs of a label at a rate."""
    here = (pc.field("label") == label) & (pc.field("rate_scale") == rate)
    runs: list[str] = measured.table.select(["run", "label", "rate_scale"]).filter(here)["run"].unique().to_pylist()
    return runs


def _used(run: Path) -> set[int]:
    """Return the GPUs on which some request of a run was prefilled: `0+1` is a group, `0>1` its first and last ones."""
    rows = record.read_by_pieces(run)
    of = rows.columns(["gpus"]) if isinstance(rows, record.Pieces) else [rows]
    places = {place for piece in of for place in piece["gpus"].unique().to_pylist()}
    return {int(gpu) for place in places if place for gpu in re.split(r"[+>]", place)}


def _spans(gpus: Sequence[int]) -> str:
    """Render numbers of GPUs in few words: `GPU 3`, `GPUs 14 to 23`, `GPUs 1, 5, 7 to 9`."""
    spans: list[list[int]] = []
    for gpu in gpus:
        if spans and gpu == spans[-1][-1] + 1:
            spans[-1].append(gpu)
        else:
            spans.append([gpu])
    ends = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)
    return f"GPU{'s' * (len(gpus) > 1)} {ends}"


def _refused(measured: Measured, shown: Summary) -> list[str]:
    """List the labels whose actions the engine refused at the rate shown, a line each: their number, and the first."""
    lines = []
    for label in (row.label for row in shown.systems):  # a skipped one is not shown
        every = [record.meta(measured.folder.parent / name) for name in _runs(measured, label, shown.rate_scale)]
        if hit := [about for about in every if about["refused"]]:
            count = sum(about["refused"] for about in hit)
            of = f" in {len(hit)} of {len(every)} runs" if len(every) > 1 else ""
            what = "1 action refused:" if count == 1 else f"{count} actions refused{of}, the first:"
            lines.append(f"{label}: {what} {hit[0]['first_refused']}")
    return lines


def next_command(
    measured: Measured, shown: Summary, rule: str, words: Sequence[str], ways: Sequence[Remedy] = ()
) -> str:
    """Return the command to run next: with room for all systems, with valid runs, or to explain why a system misses.

    Of several systems it explains the one that misses most, in its run nearest to its mean attainment. `ways` give room
    to all.
    """
    if ways:
        return again(words, *ways[0].options)
    if wrong := tidy.invalid(measured.table):
        return _valid(" ".join(wrong.values()), measured, words)
    ran = [row for row in shown.systems if row.values.get(rule) is not None]
    missing = [row for row in ran if row.mean(rule) < 100 * LEVEL]
    if not missing and ran and shown.rate_scale == max(measured.xs) and measured.reference.scaling != "none":
        return again(words, "--rate-scale", f"{2 * max(measured.xs):g}")
    if not missing and len(measured.xs) == 1:
        return f"bench plot {short_path(measured.folder)}"
    if not missing:  # explain the misses at the highest rate
        first = min((row for row in ran if not row.control), key=lambda row: row.mean("rate_99"), default=None)
        system = ["--system", first.label] if first else []
        return shlex.join(["bench", "explain", short_path(measured.folder), "--misses", *system])
    worst = min(missing, key=lambda row: row.mean(rule))
    frame = measured.table.select(["run", "label", "rate_scale", "seed"]).to_pandas()
    mine = frame[(frame["label"] == worst.label) & (frame["rate_scale"] == shown.rate_scale)].drop_duplicates("seed")
    met = scores(measured.table, worst.label, shown.rate_scale, rule)
    mean = sum(met.values()) / len(met)
    seed = min(met, key=lambda seed: (abs(met[seed] - mean), seed))
    run = measured.folder.parent / str(mine.set_index("seed")["run"][seed])
    options = ["--definition", rule] * (rule != measured.target.definition)
    return explain_command(run, measured.target.rule, *options, "--misses")


def _valid(why: str, measured: Measured, words: Sequence[str]) -> str:
    """Say how to make runs on real servers valid, by the reason why they were not.

    The new runs go to another folder, and the present runs are kept.
    """
    options = ["-o", short_path(measured.folder.parent / "again")]
    if "other processes took" in why:
        return f"end what else runs on this machine, then {again(words, *options)}"
    if "was not measured" in why:
        return f"let the client read the load of this machine (/proc), then {again(words, *options)}"
    return f"a rate at which the client keeps up: {again(words, '--rate-scale', f'{min(measured.xs) / 2:g}', *options)}"


def rooflines(spec: Spec) -> Iterator[str]:
    """Yield a line on kernels of quantised models and mixtures of which nothing was measured, if there are any."""
    if quantities.machine(spec.table) is not None:
        return
    shares: dict[str, float] = {}
    for kind in mix.names(spec.gpu):
        q, card = quantities.quantities(kind, spec.table), quantities.gpu(kind, spec.table)
        for member in Setup(spec).models.members:
            shape = member.shape
            if shape.formats is not None or shape.experts is not None or shape.latent is not None:
                share = kernels.roofline_share(q, card, shape, member.tp)
                shares[shape.name] = max(share, shares.get(shape.name, 0.0))
    told = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= ROOFLINE]
    if told:
        yield f"roofline, error unknown, of a decode step of 32 x 1,024 tokens: {', '.join(told)}"


def facts(measured: Measured, rule: str) -> dict[str, Any]:
    """Collect the facts of a comparison for other programs."""
    setup = Setup(measured.reference)
    trace = setup.trace
    return {
        "trace": trace.name,
        "tier": trace.tier,
        "fit": setup.realism,
        "models": measured.reference.models,
        "gpu": measured.reference.gpu,
        "engine": measured.reference.engine,
        "fidelity": sorted(measured.table.column("fidelity").unique().to_pylist()),
        "host": measured.reference.host,
        "checked": checked(measured.reference.gpu, measured.reference.host),
        "scaling": measured.reference.scaling,
        "streams": assigned(trace, setup.models, measured.reference.seed, measured.reference.assign).rule,
        "plan_origin": measured.reference.plan,
        "slo": measured.target.rule,
        "slo_s": measured.target.seconds,
        "definition": rule,
        "rates": measured.xs,
        "seeds": measured.seeds,
        "folder": str(measured.folder),
        "departs": departures(measured.table),
        "degrees": own_degrees(measured.table),
        "invalid": invalid(measured.table),
        "unchecked": unchecked_lines(measured.table),
        "infeasible": [f"{label}, {why}" for label, why in unfit(measured)[0].items()],
        "skipped": _gone(measured.table, "skipped"),
        "failed": failures(measured.failed),
        "caps": sentences.caps(measured.table, as_dict(measured.reference)),
    }
