"""A comparison in sentences: the setting before the numbers, the notes after them, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from harness.answers.commands import again, short_path
from harness.answers.table import Table
from harness.answers.verdict import verdict
from harness.policy import mix
from harness.rows import estimate, setting, summaries
from harness.rows.checked import note
from harness.rows.vetted import IN_PART, UNCHECKED
from harness.run import streams
from harness.run.room import Remedy
from harness.run.server_line import server_line
from harness.run.setup import Setup
from harness.run.spec import as_dict
from harness.run.streams import stem
from harness.study.compare import clients, planners, replayed, traffic
from harness.study.measure import Measured
from harness.study.summary import Column, Summary, SystemSummary, rate_key

SETTING = 100  # characters of the line below the answer
LOOSE_S = 60.0  # seconds; a TTFT limit above this casts doubt on the SLO's base
MOST_COLUMNS = 8  # columns in a paper's table, with that of the names


def answer(measured: Measured, shown: Summary, rule: str) -> str:
    """Return the first line of a comparison; empty unless some contestant fits on the GPUs and has valid runs.

    It says up to which rate the subject (the system in question) keeps its SLOs, and which systems serve more or less.
    It also names the models and the machine.
    """
    sentence = verdict(measured.table, shown, rule)
    spec = measured.reference
    where = spec.measured_on or mix.told(spec.gpu, shown.gpus or spec.gpus)
    facts = filter(None, (stem(spec.models), where, streams.share(Setup(spec).trace.kept_share)))
    return f"{sentence} ({', '.join(facts)})" if sentence else ""


def headline(measured: Measured, shown: Summary, *, every: bool = False) -> Iterator[str]:
    """Yield the lines above the table: the setting, reasons to doubt it, and the rate for which the table is shown.

    With `every`, the setting is given in full.
    """
    spec = measured.reference
    setup = Setup(spec)
    yield from _setting(measured, shown, setup) if every else _short(measured, setup)
    if _fidelity(measured) == "simulated" and (unchecked := note(spec.gpu, spec.host)):
        yield unchecked
    yield from streams.lines(setup)
    yield from _loose(measured)
    if not math.isnan(shown.rate_scale):  # else nothing ran, and `notes` has the reasons
        yield _load(measured, shown, every=every)


def _short(measured: Measured, setup: Setup) -> Iterator[str]:
    """Yield the setting in a line of at most `SETTING` characters; facts that do not fit are left out.

    Further lines name the replayed part of a log, and the machine of a run on real servers.
    """
    spec, trace, served = measured.reference, setup.trace, len(setup.models.members)
    known = setting.plans([spec.plan]) if spec.plan in {"window", "trace"} and _plans(measured) else ""
    fit = ", unlike real" if (setup.realism or "").startswith("off") else ""
    _, loop = traffic(spec)
    facts = [
        f"{trace.name.partition('+')[0]} ({trace.tier}{fit})",
        f"{served} of {len(trace.models)} models" if served != len(trace.models) else "",
        known,
        clients(loop) if loop else "",
        _fidelity(measured),
        _prefix_cache(measured),
        f"SLO {measured.target.rule}",
        _seeds(measured),
        "--all says more",
    ]
    while len(line := " · ".join(filter(None, facts))) > SETTING and len(facts) > 2:
        del facts[-2]
    yield line
    if part := replayed(spec):
        yield f"replayed: {part}"
    if spec.measured_on:
        yield f"measured on: {spec.measured_on}"


def _loose(measured: Measured) -> Iterator[str]:
    """Yield a warning if an SLO allows so long a TTFT that hardly any request can miss it.

    Only SLO rules based on a P95 are checked: that P95 may have been measured on an overloaded GPU, past the knee.
    """
    limits = [(ttft_s, model) for model, (ttft_s, _) in (measured.target.seconds or {}).items()]
    most_s, model = max(limits, default=(0.0, ""))
    if LOOSE_S < most_s < math.inf and "P95" in measured.target.rule:
        why = "as its base is of a GPU that this load overloads; --slo absolute:ttft=S,tpot=S states one"
        yield f"The SLO lets {model} wait {most_s:,.0f} s for a first token, {why}."


def _plans(measured: Measured) -> bool:
    """Tell whether some system plans ahead from a forecast of the trace's traffic."""
    return bool(planners(measured.study.systems.values(), measured.study.spec))


def _seeds(measured: Measured) -> str:
    return "1 seed, no interval" if measured.about.seeds == 1 else f"{measured.about.seeds} seeds"


def _prefix_cache(measured: Measured) -> str:
    """Say whether the engine caches prefixes.

    A trace may have no ids of prompt blocks, so that no prefix can be cached. Then say so if the study asks for a
    prefix cache, and otherwise return an empty string.
    """
    spec = measured.reference
    if spec.prefix_cache is None:
        wanted = measured.study.spec.get("prefix_cache")
        return "no prefix cache: the trace has no ids of blocks" if wanted else ""
    return "prefix cache" if spec.prefix_cache else "no prefix cache"


def _fidelity(measured: Measured) -> str:
    return " and ".join(sorted(measured.table.column("fidelity").unique().to_pylist()))


def _setting(measured: Measured, shown: Summary, setup: Setup) -> Iterator[str]:
    spec = measured.reference
    trace, models = setup.trace, setup.models
    requests, loop = traffic(spec)
    part = replayed(spec)
    load = f"{requests} requests in {trace.span_s:g} s" + (f"; replayed: {part}" if part else "")
    if spec.warmup_s and loop is None:
        load += f"; before the window {spec.warmup_s:g} s run that are not counted, the last of the same"
    if loop is not None:
        load = clients(loop)
    tier = trace.tier + (f" ({trace.note})" if trace.note else "") + _fit(setup.realism)
    rule, _, kind = measured.target.rule.partition("@")
    base = f" (P95 on dedicated{kind and f' {kind}'})" if rule.endswith("P95") else ""
    plans = f" · {setting.plans([spec.plan])}" if _plans(measured) else ""
    cache = _prefix_cache(measured)
    machine = f" · {machine_text}" if (machine_text := setting.machine(as_dict(spec))) else ""
    yield (
        f"{trace.name} · {tier}, {len(models.members)} of {len(trace.models)} models ({stem(spec.models)}), "
        f"{load} · {spec.measured_on or mix.told(spec.gpu, shown.gpus or spec.gpus)}{machine} · "
        f"{_fidelity(measured)} · SLO {measured.target.rule}{base} · {_seeds(measured)}{plans}{cache and f' · {cache}'}"
    )
    yield server_line(setup)


def _load(measured: Measured, shown: Summary, *, every: bool) -> str:
    """Return a line with the rate for which the table is shown.

    With `every`, the line also has the number of rates that ran, and the warm-up.
    """
    spec, scale = measured.reference, f"{shown.rate_scale:g} x the trace's rate"
    at = [scale] if math.isnan(shown.offered_rps) else [f"{shown.offered_rps:.3g} req/s", scale]
    facts = at[1:] + [f"--scaling {spec.scaling}"] * (spec.scaling != "rotate")
    facts += [f"{len(measured.xs)} rates ran"] * (every and len(measured.xs) > 1)
    details = f" ({', '.join(facts)})" if facts else ""
    warm = f", after {spec.warmup_s:g} s of warm-up" if every and spec.warmup_s and traffic(spec)[1] is None else ""
    return f"Table: at {at[0]}{details}{warm}."


def _fit(fit: str | None) -> str:
    """Say how a synthetic trace differs from the real one; empty if this was not measured."""
    if not fit:
        return ""
    return f", unlike the real one ({fit.removeprefix('off: ')})" if fit.startswith("off") else ", like the real one"


def next_command(
    measured: Measured, shown: Summary, rule: str, words: Sequence[str], ways: Sequence[Remedy] = ()
) -> str:
    """Return the command to run next, about the subject: the system that the comparison's first line is about.

    If `ways` has remedies that make all systems fit, the command applies the first remedy. Otherwise, if runs are
    invalid, the result says how to repeat them. Otherwise the command depends on the subject. If the subject meets the
    level at the highest rate, the command doubles that rate, or plots the comparison if its only rate cannot be scaled.
    In all other cases the command explains the subject's misses at each of its rates. If no system ran, the command
    plots the comparison.
    """
    if ways:
        return again(words, *ways[0].options)
    if wrong := summaries.invalid(measured.table):
        return _valid(" ".join(wrong.values()), measured, words)
    ran = [row for row in shown.systems if row.values.get(rule) is not None]
    if not ran:
        return shlex.join(["bench", "plot", short_path(measured.folder)])
    ours = next((row for row in ran if row.label == shown.subject), ran[0])
    if ours.mean(rule) >= 100 * shown.level:
        if shown.rate_scale == max(measured.xs) and measured.reference.scaling != "none":
            return again(words, "--rate-scale", f"{2 * max(measured.xs):g}")
        if len(measured.xs) == 1:
            return shlex.join(["bench", "plot", short_path(measured.folder)])
    options = ["--definition", rule] * (rule != measured.target.definition)
    return shlex.join(["bench", "explain", short_path(measured.folder), "--misses", "--system", ours.label, *options])


def _valid(why: str, measured: Measured, words: Sequence[str]) -> str:
    """Say how to make invalid runs on real servers valid, given the reason why they are invalid.

    The new runs go to another folder, and the present runs are kept.
    """
    options = ["-o", short_path(measured.folder.parent / "again")]
    if "other processes took" in why:
        return f"end what else runs on this machine, then {again(words, *options)}"
    if "was not measured" in why:
        return f"let the client read the load of this machine (/proc), then {again(words, *options)}"
    return f"a rate at which the client keeps up: {again(words, '--rate-scale', f'{min(measured.xs) / 2:g}', *options)}"


# ------------------------------------------------------------------ tables


def cell(system: SystemSummary, column: Column, *, spread: bool = True) -> str:
    """Render a system's value in a column.

    With `spread`, add the interval. No interval is added in columns in which neither high nor low values are better.
    """
    return estimate.text(system.values[column.key], column.style, spread=spread and column.more is not None)


def terminal(
    shown: Summary, *, bold: bool, room: int = 0, unfit: Mapping[str, str] = MappingProxyType({}), every: bool = False
) -> list[str]:
    """Return the lines of the aligned table: titles of groups, heads of columns, then one line per system.

    With `bold`, the best values are bold. `unfit` has, by label, the reason why a system's models do not fit. Such
    systems are listed last, with this reason in place of values. Without `every`, only the brief columns are shown. If
    a line would be longer than `room` characters, only the last headline column has intervals. That column is the rate,
    or attainment if there is one rate.
    """
    columns = [column for column in shown.columns if every or column.brief]
    systems = [system for system in shown.systems if not system.infeasible]
    without_room = [f"{system.label}  {unfit[system.label]}" for system in shown.systems if system.label in unfit]
    if not systems:
        return without_room
    wide = _table(shown, systems, columns, shown.best)
    if max(map(len, wide.text())) > room:
        wide = _table(shown, systems, columns, shown.best, spread=[c.key for c in columns if c.headline][-1:])
    return [*wide.text(bold=bold), *without_room]


def whole(shown: Summary) -> Table:
    """Return the table of all columns. A column's best value is bold if its interval overlaps none of the others."""
    return _table(shown, shown.systems, shown.columns, shown.decided)


def narrow(shown: Summary) -> Table:
    """Return the table of the brief columns, at most MOST_COLUMNS to fit a paper; headline columns are chosen first."""
    brief = [c for c in shown.columns if c.brief and any(system.values[c.key] is not None for system in shown.systems)]
    first = sorted(brief, key=lambda c: not c.headline)[: MOST_COLUMNS - 1]  # headlines are kept first
    table = _table(shown, shown.systems, [c for c in shown.columns if c in first], shown.decided)
    return replace(
        table, notes=[*shown.marked, "bold: the best of a column, where its 95 % interval lies apart from all others"]
    )


def _table(
    shown: Summary,
    systems: Sequence[SystemSummary],
    columns: Sequence[Column],
    best: Callable[[Column], set[str]],
    *,
    spread: Collection[str] | None = None,
) -> Table:
    rows = [
        [shown.name(row), *(cell(row, c, spread=spread is None or c.key in spread) for c in columns)] for row in systems
    ]
    winners = [best(c) for c in columns]
    strong = {(i, k) for i, row in enumerate(systems) for k, won in enumerate(winners, 1) if row.label in won}
    groups = ["", *(c.group for c in columns)]
    return Table(["system", *(c.name for c in columns)], rows, shown.marked, groups=groups, strong=strong)


def records(shown: Summary, **facts: Any) -> Table:
    """Return a table for other programs, with a row per system: its facts, then mean, low and high of each column.

    Values are in the column's unit. `facts` are repeated in every row.
    """
    rows = [_record(shown, system) | facts for system in shown.systems]
    return Table(list(rows[0]) if rows else [], [list(row.values()) for row in rows])


def _record(shown: Summary, system: SystemSummary) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "system": system.label,
        "gpus": system.gpus,
        "control": system.control,
        "infeasible": system.infeasible,
        "invalid": system.invalid,
        "unchecked": system.check == UNCHECKED,
        "checked_in_part": system.check == IN_PART,
        "unserved": system.unserved,
        "rate_scale": shown.rate_scale,
        "offered_rps": shown.offered_rps,
    }
    for c in shown.columns:
        e = system.values[c.key]
        unit = {"%": "_pct", "ms": "_ms", "req/s": "_rps"}.get(c.unit, "")
        key = f"{c.key.removesuffix('_s')}{unit}" if c.unit == "ms" else f"{c.key}{unit}"
        flat[key] = None if e is None else e.mean
        flat[f"{key}_low"] = None if e is None else e.low
        flat[f"{key}_high"] = None if e is None else e.high
        if c.key == rate_key(shown.level):
            flat[f"{key}_sign"] = None if e is None else e.sign
            flat["flat"] = system.flat
        flat["n"] = max(flat.get("n", 0), 0 if e is None else e.n)
    return flat
