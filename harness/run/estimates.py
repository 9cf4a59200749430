"""Estimates of the time that runs will take, from the CPU seconds of stored runs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.policy.types import UserError
from harness.rows import parts, record
from harness.run.setup import load_trace
from harness.run.sources import Task
from harness.run.spec import Spec, stored
from harness.run.teller import Left

REQUESTS_PER_S, RUN_S = 150_000.0, 0.06  # requests/s assumed for an unknown run; measured s to start and write a run
READ = 200  # stored runs from which the costs of a folder are learnt
EVERY_S, PART = 0.25, 20.0  # least time between two sums of the remaining time: s, and times a sum's own time


class CostKind(NamedTuple):
    """A kind of runs. Among runs of one kind, the cost per request depends only on the rate."""

    label: str
    models: str
    gpus: int
    trace: str

    @classmethod
    def of(cls, spec: Spec) -> CostKind:
        """Return the kind of a spec's run."""
        return cls(spec.label, spec.models, spec.gpus, spec.trace.partition("+")[0])


class Costs:
    """CPU seconds by system, setting and rate, learned from stored runs."""

    def __init__(self) -> None:
        # Seconds beyond RUN_S, and nominal requests.
        self._sums: dict[str, dict[CostKind, dict[float, list[float]]]] = {}
        self._each: dict[CostKind, tuple[np.ndarray, np.ndarray]] = {}  # rates' logarithms, seconds a nominal request
        self._mean: dict[str, float] = {}

    @classmethod
    def of(cls, out: Path) -> Costs:
        """Learn costs from a sample of the runs that are stored in a folder."""
        costs = cls()
        folders = sorted(path.parent for path in out.glob(f"*/{record.SIDE}"))
        some = folders[:: max(1, math.ceil(len(folders) / READ))]
        for run in (*some, *parts.sample(out, READ)):
            with suppress(UserError, KeyError):
                costs.learn(stored(record.meta(run)["spec"]), run)
        return costs

    def __bool__(self) -> bool:
        """Tell whether anything was learned."""
        return bool(self._sums)

    def heard(self, label: str) -> bool:
        """Tell whether costs were learned from any run of this system, in any setting."""
        return label in self._sums

    def knows(self, kind: CostKind) -> bool:
        """Tell whether costs were learned from any run of this kind."""
        return kind in self._sums.get(kind.label, {})

    def learn(self, spec: Spec, folder: Path, requests: float | None = None) -> tuple[float, float]:
        """Update the costs from one stored run. `requests` replaces the number of requests in the run's facts.

        Returns the CPU seconds and the wall-clock seconds that the run took; zeros if its facts lack them.
        """
        side = record.side(folder)
        with suppress(ValueError, KeyError, TypeError):
            cpu_s, wall_s = float(side["cpu_s"]), float(side["wall_s"])
            requests = float(side["requests"]) if requests is None else requests
            if cpu_s >= 0 and requests > 0:
                kind = CostKind.of(spec)
                rates = self._sums.setdefault(kind.label, {}).setdefault(kind, {})
                sums = rates.setdefault(math.log2(spec.rate_scale), [0.0, 0.0])
                sums[0] += max(0.0, cpu_s - RUN_S)
                sums[1] += requests
                self._each.pop(kind, None)
                self._mean.pop(kind.label, None)
            return cpu_s, wall_s
        return 0.0, 0.0

    def cpu_s(self, spec: Spec) -> float:
        """Estimate the CPU seconds of a run from stored runs of its kind, or else from all runs of its system.

        The estimate is `RUN_S` plus a cost per request. Within a kind, the cost per request is interpolated between
        rates. Otherwise it is the mean over the system's runs. For a system without stored runs, it is that of the
        slowest other system. If no system has stored runs, one second covers `REQUESTS_PER_S` requests.
        """
        return RUN_S + requests_in(spec) * self._request_s(spec)

    def dearest_s(self, labels: Iterable[str]) -> float:
        """Return the mean CPU seconds per request of the slowest of these systems."""
        return max((self._mean_s(label) for label in labels if label in self._sums), default=1 / REQUESTS_PER_S)

    def _request_s(self, spec: Spec) -> float:
        kinds, kind = self._sums.get(spec.label, {}), CostKind.of(spec)
        if kind in kinds:
            if kind not in self._each:
                rates = sorted(kinds[kind])
                speeds = [kinds[kind][x][0] / kinds[kind][x][1] for x in rates]
                self._each[kind] = np.array(rates), np.array(speeds)
            return float(np.interp(math.log2(spec.rate_scale), *self._each[kind]))
        if kinds:
            return self._mean_s(spec.label)
        return self.dearest_s(self._sums)

    def _mean_s(self, label: str) -> float:
        if label not in self._mean:
            sums = [pair for rates in self._sums[label].values() for pair in rates.values()]
            self._mean[label] = sum(s for s, _ in sums) / sum(n for _, n in sums)
        return self._mean[label]


def requests_in(spec: Spec) -> float:
    """Estimate the number of requests of a run from its trace, its rate and the length of its window."""
    scale = 1.0 if spec.scaling == "time" else spec.rate_scale
    return scale * _at_once(spec.trace, spec.window_s, spec.warmup_s or 0.0)


@cache
def _at_once(name: str, window_s: float | None, warmup_s: float) -> float:
    """Return the mean number of requests that a trace has in a warm-up and a window at rate scale 1.

    Without a window, return the number of all its requests.
    """
    trace = load_trace(name)
    return len(trace) * ((window_s + warmup_s) / trace.span_s if window_s and trace.span_s else 1.0)


# ------------------------------------------------------------------ what is left of a sweep


class Ahead:
    """The runs that a sweep still has to execute, and an estimate of the time that they will take.

    `later` is the number of requests in further runs that may follow: 0 if there are none, inf if it has no bound.
    `slots` is the number of runs executed at once.
    """

    def __init__(self, todo: Sequence[Task], costs: Costs, later: float = 0.0, slots: int = 1) -> None:
        self.slots = slots
        self._costs, self._later = costs, later
        self._labels = dict.fromkeys(task.spec.label for task in todo)
        self._groups = Counter(map(_group, todo))
        self._specs = {_group(task): task.spec for task in todo}
        self._cpu_s, self._wall_s = 0.0, 0.0  # seconds of the runs that ended
        self._last, self._next_s = Left(0.0, None, None, 1.0), 0.0

    def order(self, tasks: Sequence[Task]) -> list[Task]:
        """Move some tasks to the front: of each kind whose costs are unknown, the longest and the shortest task."""
        of: dict[CostKind, list[tuple[float, int]]] = {}
        for place, task in enumerate(tasks):
            if not self._costs.knows(kind := CostKind.of(task.spec)):
                of.setdefault(kind, []).append((self._costs.cpu_s(task.spec), place))
        early = dict.fromkeys(place for costs in of.values() for _, place in (max(costs), min(costs)))
        return [tasks[place] for place in (*early, *(p for p in range(len(tasks)) if p not in early))]

    def longest(self, tasks: Sequence[Task]) -> list[Task]:
        """Sort tasks by estimated time, longest first, but keep those at the front that `order` moves there."""
        return self.order(sorted(tasks, key=lambda task: -self._costs.cpu_s(task.spec)))

    def ended(self, task: Task, out: Path) -> None:
        """Remove an ended run from the remaining runs, and learn its cost if it was stored."""
        self._groups[_group(task)] -= 1
        cpu_s, wall_s = self._costs.learn(task.spec, out / task.folder, requests_in(task.spec))
        self._cpu_s, self._wall_s = self._cpu_s + cpu_s, self._wall_s + wall_s

    def without(self, labels: Iterable[str]) -> None:
        """Remove the runs of systems whose policy failed from the remaining runs."""
        for label in labels:
            self._groups = Counter({key: n for key, n in self._groups.items() if self._specs[key].label != label})

    def left(self) -> Left:
        """Return an estimate of the time left. It is updated from time to time, and when no run is left."""
        if (begun_s := time.monotonic()) >= self._next_s or not any(self._groups.values()):
            self._last = self._summed()
            now_s = time.monotonic()
            self._next_s = now_s + max(EVERY_S, PART * (now_s - begun_s))
        return self._last

    def _summed(self) -> Left:
        counts = {key: n for key, n in self._groups.items() if n > 0}
        runs = sum(counts.values())
        cpu_s = sum(n * self._costs.cpu_s(self._specs[key]) for key, n in counts.items())
        share = min(1.0, self._cpu_s / self._wall_s) if self._wall_s else 1.0
        if not all(self._costs.heard(self._specs[key].label) for key in counts):
            return Left(cpu_s, None, None, share)
        at_once = max(1, min(self.slots, runs))
        # Runs at work are half done in the mean.
        seconds = cpu_s * (1.0 - at_once / 2.0 / runs) / (at_once * share) if runs else 0.0
        if not self._later:
            return Left(cpu_s, seconds, None, share)
        each_s = self._costs.dearest_s(self._labels)  # 0 if no run took longer than RUN_S
        more_s = self._later * each_s / (self.slots * share) if math.isfinite(self._later) else math.inf
        return Left(cpu_s, seconds, seconds + more_s, share)


def _group(task: Task) -> tuple[CostKind, float]:
    """Return what the estimate for a task's run depends on: its kind and its rate."""
    return CostKind.of(task.spec), task.spec.rate_scale
