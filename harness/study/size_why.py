"""Reasons why fewer GPUs than the answer of `bench size` do not hold, and changes with which they do.

What binds is counted where requests miss: by model and hour of the window, the main cause of each miss
(rows/causes.py). Then a few changes are run on the same GPUs; what a run does not confirm is not advised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from harness.policy.types import GIB, UserError
from harness.report.text_table import aligned
from harness.rows import attainment, causes, record, requests
from harness.rows.definitions import DEFINITIONS
from harness.rows.record import WAITS
from harness.run import slo as slos
from harness.run.slo import SloTarget
from harness.run.teller import Silent, Teller
from harness.study.size import BOUNDS, HOUR_S, Asked, Curve, Verdict, Work, own_count, takes, with_degrees
from harness.study.size_kept import Kept, Tried
from harness.study.size_words import DAY_H, NONE, WIDTH, cluster

BINDS: Mapping[str, str] = {  # what is short, by the cause of a wait
    "load": "load", "kv": "KV", "transfer": "KV", "admission": "admission", "host": "compute", "queue": "compute",
    "compute": "compute", "time_slice": "compute", "contention": "compute",
}  # fmt: skip
MEANS: Mapping[str, str] = {
    "load": "waiting for weights that are out, or on their way in",
    "KV": "waiting for KV memory, or for KV on its way",
    "admission": "held by the strategy while the weights were in",
    "compute": "waiting for a step, or in steps slower than alone",
    "weights": "no room for all weights",
}
OTHERS: Mapping[str, tuple[str, ...]] = {  # strategies to try where a resource binds, the likeliest first
    "weights": ("prism", "elastic", "qlm", "swap"),
    "KV": ("elastic", "prism", "qlm"),
    "load": ("elastic", "prism", "muxserve", "qlm"),
    "admission": ("elastic", "prism", "muxserve"),
    "compute": ("elastic:replicas", "static:replicas", "prism", "alpaserve"),
}
LONGER = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the SLO
MOST = 4  # changes that are run
MODELS = 12  # rows of models
NEVER = 1e-9


class Hour(NamedTuple):
    """A model's requests in an hour of the windows."""

    offered: int
    missed: int
    binds: Mapping[str, int]  # misses by what binds


def summed(hours: Iterable[Hour]) -> Hour:
    """Return the requests, misses and what binds of several hours together."""
    every, binds = list(hours), Counter[str]()
    for hour in every:
        binds.update(hour.binds)
    return Hour(sum(hour.offered for hour in every), sum(hour.missed for hour in every), binds)


class Change(NamedTuple):
    """A change on the same GPUs, and its outcome."""

    what: str
    asked: Asked
    system: str
    looser: bool  # the SLO is longer: a promise less
    verdict: Verdict | None = None
    seconds: float = 0.0  # on this machine, of its runs


@dataclass(frozen=True)
class Why:
    """A number of GPUs on which a strategy fails: the reasons, and changes that were run."""

    kept: Kept
    kind: str
    system: str
    gpus: int
    tried: Tried
    models: Mapping[str, Mapping[int, Hour]]  # by model and hour; none where it has no room
    weights_bytes: int
    memory_bytes: int  # of all GPUs
    changes: tuple[Change, ...]

    @property
    def binds(self) -> Counter[str]:
        """Misses of all models by what binds."""
        return Counter(summed(hour for hours in self.models.values() for hour in hours.values()).binds)

    @property
    def cheapest(self) -> Change | None:
        """The first change that holds the target; one that keeps the SLO comes before one that does not."""
        target = self.kept.asked.target
        held = [change for change in self.changes if change.verdict and change.verdict.holds(target, "each")]
        return min(held, key=lambda change: change.looser, default=None)


def why(kept: Kept, out: Path, *, system: str | None = None, workers: int | None = None,
        teller: Teller | None = None) -> Why:  # fmt: skip
    """Explain the largest count below the answer, of the best strategy or of one that was asked for, and try changes.

    UserError where nothing was tried that fails.
    """
    tried = _failing(kept, system)
    work = Work(kept.asked, out, workers, teller or Silent())
    models = {} if tried.unfit else _by_hour(kept, work, tried)
    of = work.cluster(tried.gpu, tried.gpus)
    weights = sum(model.weight_bytes * model.tp for model in of.models.values())
    memory = sum(gpu.mem_bytes for gpu in of.gpus)
    reason = Why(kept, tried.gpu, tried.label, tried.gpus, tried, models, weights, memory, ())
    changes = [_run(change, tried, out, workers, teller) for change in _changes(reason, work, out)[:MOST]]
    return replace(reason, changes=tuple(changes))


def _failing(kept: Kept, system: str | None) -> Tried:
    """Return the largest count below the answer; where there is no answer, what came nearest to one."""
    labels = list(dict.fromkeys(row.label for row in kept.tried))
    if system is not None and system not in labels:
        raise UserError(f'no system "{system}" in this answer (it has: {", ".join(labels)})')
    name = system or (kept.best[1] if kept.best else None)
    if name is not None:
        every = [row for row in kept.tried if row.label == name]
        tried_on = {row.gpu for row in every}  # not the best's kind, where that is a mix that it does not take
        kind = kept.best[0] if kept.best and kept.best[0] in tried_on else every[0].gpu
        rows = [row for row in every if row.gpu == kind]
        fewest = next((row.gpus for row in rows if row.answer), math.inf)
        below = [row for row in rows if row.gpus < fewest]
        if below:
            return max(below, key=lambda row: row.gpus)
        raise UserError(f"{name} holds on {rows[0].gpus} GPUs, the fewest that were tried: nothing fails to explain")
    rows = [row for row in kept.tried if row.label.partition(":")[0] not in BOUNDS]
    return max(rows, key=lambda row: (row.worst is not None, row.worst or 0.0, row.gpus))


# ------------------------------------------------------------------ what binds


def _by_hour(kept: Kept, work: Work, tried: Tried) -> dict[str, dict[int, Hour]]:
    """Count misses by model, hour and what binds, over all runs of what was tried."""
    views = {view.trace: view for view in work.views}
    by_model: dict[str, dict[int, Hour]] = {}
    for run in tried.runs:
        if not record.exists(run):
            raise UserError(f"{run} is gone: bench size makes it again")
        trace = str(record.meta(run)["spec"]["trace"])
        view = views.get(trace) or next(iter(views.values()))
        for (model, hour), counted in _of_run(run, work.under(tried.gpu, view), kept.asked.definition).items():
            hours = by_model.setdefault(model, {})
            hours[hour] = summed([*([hours[hour]] if hour in hours else []), counted])
    return by_model


def _of_run(run: Path, under: SloTarget, definition: str) -> dict[tuple[str, int], Hour]:
    names = [name for name in record.SCHEMA.names if name != "token_ns" or DEFINITIONS[definition].by_token]
    rows = requests.rows(record.read(run, names))
    inside = requests.in_window(rows, record.meta(run)["spec"]["window_s"] or math.inf)
    slo = attainment.limits(rows, slos.limits(run, under)).take(inside)
    rows = requests.take(rows, inside)
    score = DEFINITIONS[definition].score(rows, slo)
    if score is None:
        raise UserError(f"{run.name} has no token times, which {definition} needs")
    missed = np.flatnonzero(score < 1)
    main = causes.main(requests.take(rows, score < 1), slo.take(score < 1), definition)
    hours = np.maximum(0, rows.arrival_s // HOUR_S).astype(int)
    keys = [(rows.models[code], hour) for code, hour in zip(rows.model.tolist(), hours.tolist(), strict=True)]
    binds: dict[tuple[str, int], Counter[str]] = {key: Counter() for key in keys}
    for at, k in zip(missed.tolist(), main.tolist(), strict=True):
        binds[keys[at]][BINDS[WAITS[k]]] += 1
    return {key: Hour(n, binds[key].total(), binds[key]) for key, n in Counter(keys).items()}


# ------------------------------------------------------------------ changes


def _changes(reason: Why, work: Work, out: Path) -> list[Change]:
    """Return the changes to try on the same GPUs, by what binds: strategies, a degree, a longer SLO."""
    asked, done = reason.kept.asked, {(row.gpu, row.label, row.gpus) for row in reason.kept.tried}
    binds = _first(reason)
    mine = reason.system.partition(":")[0]
    names = [f"{mine}:replicas"] * (binds == "compute" and mine in {"static", "elastic"}) + list(OTHERS[binds])
    names = [
        name
        for name in dict.fromkeys(names)
        if (reason.kind, name, reason.gpus) not in done and takes(name, reason.kind)
    ]
    changes = [Change(name, asked, name, looser=False) for name in names if name != reason.system][:2]
    worst = reason.tried.worst_model
    if worst and (degree := _wider(work, reason, worst)):
        path = with_degrees(work.sets[reason.kind][0], {worst: degree}, out, f"{reason.kind}-tp{degree}")
        setting = {**asked.setting, "models": path}
        changes.append(
            Change(f"{worst} on {degree} GPUs", replace(asked, setting=setting), reason.system, looser=False)
        )
    if not reason.tried.unfit and (times := _longer(reason, work)):
        longer = replace(asked, rule=scaled(asked.rule, times))
        changes.append(Change(f"SLO x {times:g}", longer, reason.system, looser=True))
    return changes


def _first(reason: Why) -> str:
    """Return what binds most."""
    if reason.tried.unfit:
        return "weights" if reason.weights_bytes > reason.memory_bytes else "KV"
    return reason.binds.most_common(1)[0][0] if reason.binds else "compute"


def _wider(work: Work, reason: Why, name: str) -> int | None:
    """Return the next degree of parallelism of a model that these GPUs can hold."""
    model = work.cluster(reason.kind, reason.gpus).models.get(name)
    if model is None:
        return None
    return next((tp for tp in model.degrees if tp > model.tp), None)


def scaled(rule: str, times: float) -> str:
    """Return a rule whose seconds are so many times as long. UserError for classes, whose file has them."""
    match = re.fullmatch(r"(?:([\d.]+)(?:/([\d.]+))?x)?(.+)", rule)
    assert match is not None
    if rule.startswith("classes:"):
        raise UserError(f"{rule} has its seconds in a file")
    second = f"/{float(match[2]) * times:g}" if match[2] else ""
    return f"{float(match[1] or 1) * times:g}{second}x{match[3]}"


def _longer(reason: Why, work: Work) -> float | None:
    """Return the least of some multiples of the SLO at which the stored runs would hold; None where none does."""
    if reason.kept.asked.rule.startswith("classes:"):
        return None
    target = reason.kept.asked.target
    for times in LONGER:
        asked = replace(reason.kept.asked, rule=scaled(reason.kept.asked.rule, times), kinds=(reason.kind,),
                        systems=(reason.system,))  # fmt: skip
        other = Work(asked, work.out, work.workers, work.teller)
        by_model = _by_hour(reason.kept._replace(asked=asked), other, reason.tried).values()
        totals = [summed(by.values()) for by in by_model]
        if all(of.missed <= math.ceil((1 - target) * of.offered - NEVER) for of in totals):
            return times
    return None


def _run(change: Change, tried: Tried, out: Path, workers: int | None, teller: Teller | None) -> Change:
    """Run a change in all windows."""
    begun = perf_counter()
    asked = replace(change.asked, systems=(change.system,), kinds=(tried.gpu,), growth=())
    try:
        work = Work(asked, out, workers, teller or Silent())
        if own_count(work.systems[change.system]):
            return change
        curve = Curve(tried.gpu, change.system)
        work.run_counts([(curve, tried.gpus)], 1.0, f"change: {change.what}")
    except UserError as error:
        return change._replace(verdict=Verdict(tried.gpus, {}, {}, {}, (), str(error)), seconds=perf_counter() - begun)
    return change._replace(verdict=curve.tried[tried.gpus], seconds=perf_counter() - begun)


# ------------------------------------------------------------------ in words


def lines(reason: Why) -> Iterator[str]:
    """Yield what binds, the cheapest change that was confirmed, the models, and all changes that were run."""
    asked, tried = reason.kept.asked, reason.tried
    yield _sentence(reason)
    yield _advice(reason)
    yield ""
    if not tried.unfit:
        yield from aligned(list(_rows(reason)), WIDTH)
        meant = "; ".join(f"{name}: {MEANS[name]}" for name in reason.binds)
        yield f"misses by their main cause; {meant}; hours count from the start of a window"
        yield ""
    yield from aligned(list(_tried(reason)), WIDTH)
    spent = sum(change.seconds for change in reason.changes)
    count = len(reason.changes)
    told = f"{count} change{' was' if count == 1 else 's were'} run in {spent:.1f} s, at most {MOST} are"
    yield f"{told}; target: {100 * asked.target:g} % for every model"


def _sentence(reason: Why) -> str:
    tried = reason.tried
    what = f"{tried.label} on {cluster(tried.gpu, tried.gpus)}"
    weights = f"{reason.weights_bytes / GIB:.1f} GiB of weights on {reason.memory_bytes / GIB:.1f} GiB"
    if tried.unfit:
        return f"{what} has no room: {_first(reason)} binds ({weights}; {tried.unfit})"
    total = reason.binds.total()
    shares = ", ".join(f"{name} binds in {100 * n / total:.0f} % of misses" for name, n in reason.binds.most_common())
    more = f"; {weights}" if reason.weights_bytes > reason.memory_bytes else ""
    worst = f"{tried.worst_model} meets {100 * (tried.worst or 0):.1f} % of its SLOs"
    return f"{what} fails: {worst}; {shares}{more}"


def _advice(reason: Why) -> str:
    target = reason.kept.asked.target
    here, dearer = cluster(reason.kind, reason.gpus), ""
    answers = [row.gpus for row in reason.kept.tried
               if row.answer and (row.gpu, row.label) == (reason.kind, reason.system)]  # fmt: skip
    if answers:
        enough = min(answers)
        mine, its = (reason.kept.asked.usd_hour(reason.kind, n) for n in (reason.gpus, enough))
        usd = "" if mine is None or its is None else f", ${(its - mine) * DAY_H:,.0f} more a day"
        more = enough - reason.gpus
        dearer = f"{more} GPU{'s' * (more > 1)} more ({cluster(reason.kind, enough)}{usd})"
    if (cheapest := reason.cheapest) is not None:
        assert cheapest.verdict is not None
        name, share = cheapest.verdict.worst
        looser = ", a longer promise" if cheapest.looser else ""
        told = f"{cheapest.what}, on the same {here}{looser} ({name} least, {100 * share:.1f} %)"
        return f"the cheapest change that a run confirms: {told}" + (f"; else {dearer}" if dearer else "")
    count = len(reason.changes)
    none = "the one change that was run does not hold" if count == 1 else f"none of {count} changes holds"
    none += f" {100 * target:g} % on {here}"
    return f"{none}; {f'the cheapest that runs confirm is {dearer}' if dearer else 'no count of GPUs tried does'}"


def _rows(reason: Why) -> Iterator[tuple[str, ...]]:
    yield ("model", "met %", "requests", "binds", "hours below", "worst hour")
    target = reason.kept.asked.target

    def met(hours: Sequence[Hour]) -> float:
        total = summed(hours)
        return 1 - total.missed / max(1, total.offered)

    ordered = sorted(reason.models.items(), key=lambda pair: met([*pair[1].values()]))
    for name, hours in ordered[:MODELS]:
        every = [*hours.values()]
        at, worst = min(hours.items(), key=lambda pair: met([pair[1]]))
        below = sum(met([hour]) < target for hour in every)
        yield (name, f"{100 * met(every):.1f}", f"{sum(h.offered for h in every):,}", _binding(every),
               f"{below} of {len(every)}", f"hour {at}: {100 * met([worst]):.1f} %, {_binding([worst])}")  # fmt: skip
    if len(ordered) > MODELS:
        yield (f"{len(ordered) - MODELS} more", f">= {100 * met([*ordered[MODELS][1].values()]):.1f}", *(NONE,) * 4)


def _binding(hours: Sequence[Hour]) -> str:
    total = Counter(summed(hours).binds)
    first = total.most_common(1)
    return f"{first[0][0]} {100 * first[0][1] / total.total():.0f} %" if first else NONE


def _tried(reason: Why) -> Iterator[tuple[str, ...]]:
    yield ("change", "GPUs", "$/day", "worst model %", "seconds", "verdict")
    usd = reason.kept.asked.usd_hour(reason.kind, reason.gpus)
    day = NONE if usd is None else f"{usd * DAY_H:,.0f}"
    for change in reason.changes:
        verdict = change.verdict
        if verdict is None:
            continue
        outcome = "holds" if verdict.holds(reason.kept.asked.target, "each") else f"fails: {verdict.worst[0]}"
        if verdict.unfit:
            outcome = f"no room: {verdict.unfit}" if len(verdict.unfit) < WIDTH else f"no room: {verdict.unfit[:60]}..."
        worst = NONE if verdict.unfit else f"{100 * verdict.worst[1]:.1f}"
        yield (change.what, str(reason.gpus), day, worst, f"{change.seconds:.1f}", outcome)
    for row in reason.kept.tried:  # known already
        if row.gpu == reason.kind and row.gpus == reason.gpus and row.label != reason.system:
            outcome = (
                f"no room: {row.unfit[:60]}" if row.unfit else "holds" if row.answer else f"fails: {row.worst_model}"
            )
            yield (
                row.label,
                str(row.gpus),
                day,
                NONE if row.worst is None else f"{100 * row.worst:.1f}",
                "stored",
                outcome,
            )
