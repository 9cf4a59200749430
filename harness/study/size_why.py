"""Reasons why fewer GPUs than the answer of `bench size` do not meet the target, and changes with which they do.

The main cause of each miss (rows/causes.py) is a resource. Misses are counted by this resource, by model and by hour of
the window. Then a few changes are run on the same GPUs. A change is advised only if its run confirms it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from harness.policy.types import UserError
from harness.run.teller import Teller
from harness.study.binds import Hour, Hours, merged, summed, total
from harness.study.degrees import with_degrees
from harness.study.size import SizeSearch, own_count, takes
from harness.study.size_kept import Kept
from harness.study.sized import Curve, Outcome, Question, Tried, allowed

OTHERS: Mapping[str, tuple[str, ...]] = {  # strategies to try where a resource binds, the likeliest first
    "weights": ("prism", "elastic", "qlm", "swap"),
    "KV": ("elastic", "prism", "qlm"),
    "load": ("elastic", "prism", "muxserve", "qlm"),
    "admission": ("elastic", "prism", "muxserve"),
    "compute": ("elastic:replicas", "static:replicas", "prism", "alpaserve"),
}
LONGER = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the SLO
MOST = 4  # changes that are run


class Change(NamedTuple):
    """A change to try on the GPUs on which a strategy fails, and its outcome."""

    what: str
    asked: Question
    system: str
    looser: bool  # the change relaxes the SLO
    verdict: Outcome | None = None
    seconds: float = 0.0  # wall-clock seconds that its runs took on this machine


@dataclass(frozen=True)
class Why:
    """A number of GPUs on which a strategy fails: the reasons, and the changes that were tried."""

    kept: Kept
    tried: Tried
    models: Hours  # empty where the strategy has no room
    weights_bytes: int
    memory_bytes: int  # bytes all GPUs have
    changes: tuple[Change, ...]
    met: Mapping[str, float] = field(default_factory=dict)  # least attainment of a model over views, as in the table

    @property
    def total(self) -> Hour:
        """All models together: requests, misses, and misses by the resource that causes them."""
        return total(self.models)

    @property
    def first(self) -> str:
        """The resource that causes most misses. If the models do not fit, it is weights or KV memory."""
        if self.tried.unfit:
            return "weights" if self.weights_bytes > self.memory_bytes else "KV"
        return self.total.first or "compute"

    @property
    def cheapest(self) -> Change | None:
        """The first change that meets the target, or None; those with the same SLO precede those with a longer SLO."""
        target = self.kept.asked.target
        holding = [change for change in self.changes if change.verdict and change.verdict.holds(target)]
        return min(holding, key=lambda change: change.looser, default=None)


def why(
    kept: Kept, out: Path, *, system: str | None = None, workers: int | None = None, teller: Teller | None = None
) -> Why:
    """Explain why a strategy fails on the largest number of GPUs below its answer, and try changes there.

    The strategy is `system`, or the best one if that is None. Raises UserError for an unknown system, and if no number
    of GPUs that was tried fails.
    """
    tried = _failing(kept, system)
    work = SizeSearch(kept.asked, out, workers, teller)
    views = {} if tried.unfit else work.misses(tried.gpu, tried.runs)
    met = dict[str, float]()
    for model, hours in chain.from_iterable(of.items() for of in views.values()):
        met[model] = min(met.get(model, 1.0), summed(hours.values()).met)
    of = work.cluster(tried.gpu, tried.gpus)
    weights = sum(model.weight_bytes * model.tp for model in of.models.values())
    memory = sum(gpu.mem_bytes for gpu in of.gpus)
    reason = Why(kept, tried, merged(views.values()), weights, memory, (), met)
    changes = [_run(change, tried, work) for change in _changes(reason, work)[:MOST]]
    return replace(reason, changes=tuple(changes))


def _failing(kept: Kept, system: str | None) -> Tried:
    """Return the trial of a strategy on the largest number of GPUs below its answer.

    The strategy is `system`, or else the best one. If there is neither, return the trial whose worst model has the
    highest attainment of all trials. Raises UserError for an unknown system, and if no trial is below the answer.
    """
    labels = list(dict.fromkeys(row.label for row in kept.tried))
    if system is not None and system not in labels:
        raise UserError(f'no system "{system}" in this answer (it has: {", ".join(labels)})')
    if name := system or (kept.best and kept.best.system):
        every = [row for row in kept.tried if row.label == name]
        tried_on = {row.gpu for row in every}  # the best's kind may be a mix that this system does not take
        kind = kept.best.gpu if kept.best and kept.best.gpu in tried_on else every[0].gpu
        rows = [row for row in every if row.gpu == kind]
        fewest = next((row.gpus for row in rows if row.answer), math.inf)
        below = [row for row in rows if row.gpus < fewest]
        if not below:
            raise UserError(f"nothing to explain: {name} holds on the fewest GPUs that were tried, {rows[0].gpus}")
        return max(below, key=lambda row: row.gpus)
    rows = [row for row in kept.tried if row.label not in kept.asked.bounds]
    return max(rows, key=lambda row: (row.worst is not None, row.worst or 0.0, row.gpus))


# ------------------------------------------------------------------ changes


def _changes(reason: Why, work: SizeSearch) -> list[Change]:
    """Return the changes to try on the same GPUs.

    A change is a strategy that suits the resource behind most misses, a larger degree of the worst model, or a longer
    SLO.
    """
    asked, tried, binds = reason.kept.asked, reason.tried, reason.first
    done, mine = {row[:3] for row in reason.kept.tried}, tried.label.partition(":")[0]
    names = [f"{mine}:replicas"] * (binds == "compute" and mine in {"static", "elastic"}) + list(OTHERS.get(binds, ()))
    names = [
        name for name in dict.fromkeys(names) if (tried.gpu, name, tried.gpus) not in done and takes(name, tried.gpu)
    ]
    changes = [Change(name, asked, name, looser=False) for name in names[:2]]
    worst = tried.worst_model
    if worst and (degree := _wider(work, tried, worst)):
        path = with_degrees(work.sets[tried.gpu][0], {worst: degree}, work.out, f"{tried.gpu}-tp{degree}")
        wider = replace(asked, setting={**asked.setting, "models": path})
        changes.append(Change(f"{worst} on {degree} GPUs", wider, tried.label, looser=False))
    if not tried.unfit and (times := _longer(tried, work)):
        longer = replace(asked, rule=scaled(asked.rule, times))
        changes.append(Change(f"SLO x {times:g}", longer, tried.label, looser=True))
    return changes


def _wider(work: SizeSearch, tried: Tried, name: str) -> int | None:
    """Return the next larger degree of tensor parallelism of a model on these GPUs; None if there is none."""
    model = work.cluster(tried.gpu, tried.gpus).models.get(name)
    return None if model is None else next((tp for tp in model.degrees if tp > model.tp), None)


def scaled(rule: str, times: float) -> str:
    """Multiply the seconds of an SLO rule. Rules of SLO classes are not allowed, as their seconds are in a file."""
    match = re.fullmatch(r"(?:([\d.]+)(?:/([\d.]+))?x)?(.+)", rule)
    assert match is not None
    second = f"/{float(match[2]) * times:g}" if match[2] else ""
    return f"{float(match[1] or 1) * times:g}{second}x{match[3]}"


def _longer(tried: Tried, work: SizeSearch) -> float | None:
    """Return the smallest factor in LONGER by which the SLO must be longer for the stored runs to meet the target.

    The result is None if no factor suffices, or if the SLO is by class.
    """
    asked = work.asked
    for times in () if asked.rule.startswith("classes:") else LONGER:
        views = work.misses(tried.gpu, tried.runs, scaled(asked.rule, times)).values()
        every = [summed(hours.values()) for of in views for hours in of.values()]
        if all(of.missed <= allowed(asked.target, of.offered) for of in every):
            return times
    return None


def _run(change: Change, tried: Tried, work: SizeSearch) -> Change:
    """Run a change in all windows, and return the change with its outcome.

    A system that sets its number of GPUs itself is not run, and has no outcome.
    """
    begun = perf_counter()
    asked = replace(change.asked, systems=(change.system,), kinds=(tried.gpu,), growth=())
    curve = Curve(tried.gpu, change.system)
    try:
        of = SizeSearch(asked, work.out, work.workers, work.teller)
        if own_count(of.systems[change.system]):
            return change
        of.run_counts([(curve, tried.gpus)], 1.0, f"change: {change.what}")
    except UserError as error:
        curve.tried[tried.gpus] = Outcome(tried.gpus, unfit=str(error))
    return change._replace(verdict=curve.tried[tried.gpus], seconds=perf_counter() - begun)
