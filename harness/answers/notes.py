"""Notes below the table of a comparison: systems that are not in it, its limits, and why requests miss."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from harness.answers import explain
from harness.answers.caveats import departures, invalid, own_degrees, stated, unchecked_lines
from harness.answers.explain import CAUSES
from harness.answers.table import Table, printed
from harness.answers.verdict import FINE
from harness.policy import fields
from harness.policy.types import GIB
from harness.rows import estimate, record, statistics, summaries
from harness.rows.checked import checked
from harness.rows.estimate import Estimate
from harness.run import room
from harness.run.room import Remedy
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict
from harness.study import bound
from harness.study.compare import replayed, rooflines, stream_rule
from harness.study.measure import Measured
from harness.study.study import AA
from harness.study.summary import Summary, scores

if TYPE_CHECKING:
    import pyarrow as pa

ROOFLINE = 0.01  # share of a step; a smaller one is left out


def notes(measured: Measured, shown: Summary, rule: str, *, every: bool = False) -> Iterator[str]:
    """Yield the lines under the table: the systems that are not in it, its limits, and its findings.

    With `every`, they include the upper bound for all policies. They then also include engine caps that limited only
    control systems.
    """
    if every and (above := bound.line(measured.about)):
        yield above
    yield from failures(measured.failed) + stated(measured.table, "skipped", "skipped")
    yield from departures(measured.table)
    yield from own_degrees(measured.table)
    yield from invalid(measured.table)
    yield from unchecked_lines(measured.table)
    yield from failed(measured, shown)
    yield from served(measured, shown)
    yield from idle(measured, shown)
    yield from _refused(measured, shown)
    if shown.undefined_tpot:
        yield f"{100 * shown.undefined_tpot:.1f} % of requests have one output token: their TPOT counts as met"
    quiet = {row.label for row in shown.systems if row.control and not every}
    yield from caps([b for b in summaries.bound(measured.table) if b.label not in quiet], as_dict(measured.reference))
    yield from roofline(measured.reference)
    copy = next((row.label for row in shown.systems if row.label.endswith(AA)), None)
    alike = copy and same(measured.table, copy.removesuffix(AA), copy, shown.rate_scale, rule)
    yield from filter(None, (why(measured.table, shown, rule), alike))


def failures(failed: Mapping[str, str]) -> list[str]:
    """Return a line for each system that left a comparison because its policy failed: the label and the failure."""
    return [f"{label}: {why}" for label, why in failed.items()]


def failed(measured: Measured, shown: Summary) -> Iterator[str]:
    """Yield a line for each system with failed requests at the rate shown: their number and the reasons."""
    for label in (row.label for row in shown.systems if not row.infeasible):
        if failures := explain.failed([*map(record.meta, _runs(measured, label, shown.rate_scale))]):
            yield f"{label}: {failures}"


def served(measured: Measured, shown: Summary) -> list[str]:
    """List the server of each model, and results by model; empty unless the engine is `attach`."""
    if fields.asked(measured.reference.engine).name != "attach":
        return []
    runs = (record.meta(measured.folder.parent / run) for run in measured.table.column("run").unique().to_pylist())
    by: Mapping[str, str] = next((about["served"] for about in runs if about.get("served")), {})
    definition = measured.target.definition
    models = by_model(measured.table, shown.rate_scale, definition)
    return [*(f"{model}: {how}" for model, how in by.items()), *printed(models)]


def unfit(measured: Measured) -> tuple[dict[str, str], list[Remedy]]:
    """Return, by label, why each system does not fit, and the remedies that make all of these systems fit.

    Each reason states the lacking memory and the remedies for that system. A remedy is tried on all seeds, at the
    lowest and the highest rate.
    """
    specs: dict[str, dict[tuple[float, int], Spec]] = {}
    gone = summaries.infeasible(measured.table)
    ends = {min(measured.xs), max(measured.xs)}
    of = dict(zip(measured.table["run"].to_pylist(), measured.table["label"].to_pylist(), strict=True))
    for task in measured.tasks:
        label = of.get(task.folder)
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
    """Return a line for each system that left at least one GPU without a request in every run at the rate shown.

    Warm-up and drain are included. Only GPUs that prefilled a request count as used, because rows do not tell where a
    moved request decodes. If requests moved, the line says "prefilled" in place of "served".
    """
    lines = []
    for row in shown.systems:
        if row.infeasible:
            continue
        runs = _runs(measured, row.label, shown.rate_scale)
        none = [sorted(set(range(row.gpus)) - _used(run)) for run in runs]
        if none and (least := min(none, key=len)):
            every = "" if len(runs) == 1 else " in every run" if len(set(map(tuple, none))) == 1 else " or more"
            which = f" ({_spans(least)})" if every != " or more" else ""
            moved = any(record.meta(run)["stats"].get("moves") for run in runs)
            did = "prefilled" if moved else "served"
            lines.append(f"{row.label}: {len(least)} of {row.gpus} GPUs {did} no request{every}{which}")
    return lines


def _runs(measured: Measured, label: str, rate: float) -> list[Path]:
    """List the folders of a label's runs at a rate scale."""
    here = (pc.field("label") == label) & (pc.field("rate_scale") == rate)
    runs = measured.table.select(["run", "label", "rate_scale"]).filter(here)["run"].unique().to_pylist()
    return [measured.folder.parent / run for run in runs]


def _used(run: Path) -> set[int]:
    """Return the GPUs on which some request of a run was prefilled.

    In a row, `0+1` is a tensor-parallel group. `0>1` are the first and the last GPU of a request that was prefilled
    again.
    """
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
    """List the labels whose actions the engine refused at the rate shown, one line each.

    A line has the number of refused actions, and the first one.
    """
    lines = []
    for label in (row.label for row in shown.systems):  # a skipped one is not shown
        every = [*map(record.meta, _runs(measured, label, shown.rate_scale))]
        if hit := [about for about in every if about["refused"]]:
            count = sum(about["refused"] for about in hit)
            of = f" in {len(hit)} of {len(every)} runs" if len(every) > 1 else ""
            what = "1 action refused:" if count == 1 else f"{count} actions refused{of}, the first:"
            lines.append(f"{label}: {what} {hit[0]['first_refused']}")
    return lines


def roofline(spec: Spec) -> Iterator[str]:
    """Yield a line with the models whose decode steps are priced in part by a roofline, and that part's share.

    The roofline prices kernels that were not measured. Such models have quantised formats, experts or latent KV.
    """
    shares = [f"{name} {100 * share:.0f} %" for name, share in rooflines(spec).items() if share >= ROOFLINE]
    if shares:
        yield f"roofline, error unknown, of a decode step of 32 x 1,024 tokens: {', '.join(shares)}"


def same(table: pa.Table, label: str, copy: str, rate: float, definition: str) -> str:
    """Render the A/A line, which compares a system with its copy on other seeds.

    The interval of the difference should cover 0. The line is empty if either of the two did not run.
    """
    ours, theirs = (list(scores(table, x, rate, definition).values()) for x in (label, copy))
    n = min(len(ours), len(theirs))
    if not n:
        return ""
    gap = statistics.paired(dict(enumerate(ours[:n])), dict(enumerate(theirs[:n])))
    text = f"A/A: {label} against its copy on other seeds {gap.times(100).text(FINE)} points"
    if gap.low is None or gap.high is None:
        return f"{text} ({'one seed' if gap.n == 1 else f'{gap.n} seeds'}, no interval)"
    covers = gap.low <= 0 <= gap.high
    return f"{text}: " + ("covers 0, as it should" if covers else "does not cover 0: differences so small mean nothing")


def why(table: pa.Table, shown: Summary, definition: str) -> str:
    """Name the most frequent cause of misses (rows/causes.py) of each contestant that is below the level.

    The line is empty if there is no such contestant.
    """
    reasons = []
    for system in shown.systems:
        if not system.judged or system.mean(definition) >= 100 * shown.level:
            continue
        shares = {
            cause: sum(seen.values()) / len(seen)
            for cause in CAUSES
            if (seen := scores(table, system.label, shown.rate_scale, f"missed_{definition}_{cause}"))
        }
        if shares:
            cause = max(shares, key=lambda x: shares[x])
            reasons.append(f"{system.label} {100 * shares[cause]:.0f} % {CAUSES[cause].phrase}")
    return "Why requests miss: " + ", ".join(reasons) if reasons else ""


def caps(binding: Sequence[summaries.Bound], spec: Mapping[str, Any]) -> list[str]:
    """Return a line for each engine cap that limited more than 1 % of a system's steps.

    The line names each such system, the rate from which the cap limited it, and the share of its steps. It also has the
    option that raises the cap.
    """
    lines = []
    for cap in dict.fromkeys(b.cap for b in binding):
        mine = [b for b in binding if b.cap == cap]
        where = ", ".join(
            f"{b.label} from {estimate.number(b.offered_rps)} req/s ({100 * b.share:.1f} %)" for b in mine
        )
        over = f"more than {100 * summaries.BINDS:g} % of steps"
        lines.append(f"{cap} = {spec[cap]} bound {over}: {where}; --set {cap}={2 * spec[cap]}")
    return lines


def by_model(scored: pa.Table, rate_scale: float, definition: str) -> Iterator[Table]:
    """Yield the table of models at a rate, over all seeds: offered requests, attainment and latencies.

    Yield nothing if the scores have no rows by model.
    """
    wanted = {definition: 100.0, "ttft_p50_s": 1.0, "ttft_p95_s": 1.0, "tpot_p50_s": 1e3, "tpot_p95_s": 1e3}
    offered = scored.select(["label", "model", "rate_scale", "definition", "n"]).to_pandas()
    offered = offered[(offered["definition"] == definition) & (offered["rate_scale"] == rate_scale)]
    counts = offered.groupby(["label", "model"], observed=True)["n"].sum()
    frame = summaries.summary(scored, [*wanted], ("model",))
    frame = frame[frame["rate_scale"] == rate_scale]
    rows = []
    for (label, model), values in frame.groupby(["label", "model"], observed=True, sort=False):
        means = dict(zip(values["definition"], values["mean"], strict=True))
        estimates = (Estimate(factor * means.get(name, math.nan), None, None, 1) for name, factor in wanted.items())
        rows.append([label, model, str(counts[label, model]), *(e.text() for e in estimates)])
    heads = [f"{definition} %", "TTFT P50 s", "P95 s", "TPOT P50 ms", "P95 ms"]
    if rows:
        yield Table(["system", "model", "offered", *heads], rows)


# ------------------------------------------------------------------ for another program


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
        "replayed": replayed(measured.reference),
        "warmup_s": measured.reference.warmup_s,
        "streams": stream_rule(measured.reference),
        "plan_origin": measured.reference.plan,
        "slo": measured.target.rule,
        "slo_s": measured.target.seconds,
        "definition": rule,
        "rates": measured.xs,
        "seeds": measured.about.seeds,
        "folder": str(measured.folder),
        "departs": departures(measured.table),
        "degrees": own_degrees(measured.table),
        "invalid": invalid(measured.table),
        "unchecked": unchecked_lines(measured.table),
        "infeasible": [f"{label}, {why}" for label, why in unfit(measured)[0].items()],
        "skipped": stated(measured.table, "skipped", "skipped"),
        "failed": failures(measured.failed),
        "caps": caps(summaries.bound(measured.table), as_dict(measured.reference)),
    }
