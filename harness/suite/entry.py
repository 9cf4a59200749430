"""A separate process for one entry: it checks the policy, then runs scenarios, and writes a JSON line for each.

`score.py` starts it with almost no environment variables, and it limits itself (`guard.py`). What the policy prints
goes to a file. If the process fails, the last line of that file is shown.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import toml
from harness.check.check import check
from harness.check.purity import impure
from harness.engines.sim.jit import CACHE
from harness.loop.guard import LIMIT_S
from harness.loop.system import path
from harness.policy.types import UserError
from harness.rows import crossings, pooled, record, summaries
from harness.run.setup import Failed, Setup
from harness.run.slo import SloTarget
from harness.study import binds
from harness.study.measure import Measured, measure
from harness.study.size import own_count
from harness.study.traffic import View
from harness.suite import guard
from harness.suite.suite import Scenario, Suite, study

ALLOWANCE = 4.0  # multiple of its budget that a decision may take on a busy machine
UNIFIED = "unified KV"  # the mark of an entry whose models have one pool
OFTEN = 0.1  # decisions per request, below which their time is not charged


@dataclass(frozen=True)
class Job:
    """The work for an entry's process, which it reads as JSON from standard input."""

    system: str  # as --systems takes it
    file: str  # the policy's file, or the name of a shipped system
    suite: Suite
    beacon: str
    folder: str  # holds its runs
    cache: str  # holds compiled code
    targets: Mapping[str, Mapping[str, Any]]  # an SLO by scenario
    checked: bool  # the policy has passed its check already
    window: bool = False  # its forecasts know the window
    names: tuple[str, ...] = ()  # scenarios, in order
    cpu_s: int = 0  # s that this process may compute
    answer_s: float = 120.0  # s on the wall that one answer of the policy may take


def main() -> None:
    """Read the job from standard input, run it, and write a JSON line for each result."""
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull if len(sys.argv) < 2 else sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    data = sys.stdin.read()
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    job = toml.convert(json.loads(data), Job)

    def tell(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")
        out.flush()

    network = guard.limit(job.cpu_s)
    close = guard.watch(Path(job.folder), Path(job.cache), CACHE)
    LIMIT_S.set(job.answer_s)
    if not job.checked:
        refused = tuple(refusals(job.file))
        tell(refused=refused, network=network)
        if refused:
            return
    close()
    for scenario in job.suite.scenario:
        if scenario.name in job.names:
            tell(begun=scenario.name)
            tell(row=scored(job, scenario))


def refusals(name: str) -> Iterator[str]:
    """Yield the reasons for which `bench check` refuses a policy; `name` is its name or path.

    A policy that is not pure, as its source shows, is refused without being run.
    """
    try:
        if reached := list(impure(path(name).read_text("utf-8"))):
            yield from (f"pure: line {line}: {what}" for line, what in reached)
        else:
            yield from (f"{failure.law}: {failure.message}" for failure in check(name))
    except (SyntaxError, ValueError) as error:
        yield f"starts: {error}"
    except UserError as error:
        yield str(error)


def scored(job: Job, scenario: Scenario) -> dict[str, Any]:
    """Run a scenario and return its row; if the policy decides too slowly, run it again and charge its decisions.

    A policy decides too slowly if its mean decision takes more than ALLOWANCE times a budget. The budget is the time
    that the policy declares or the time that the suite allows, whichever is longer. In the second run each decision
    takes the time that is charged. A policy with fewer than OFTEN decisions per request is not charged.
    """
    target = SloTarget(**job.targets[scenario.name])
    work = Path(job.folder) / scenario.name
    try:
        measured = _measured(job, scenario, target, work, None)
        mean_s, often = decisions(measured)
        declared_s = measured.tasks[0].spec.decision_s or 0.0
        charged_s = charge(mean_s, max(declared_s, job.suite.decision_s)) if often >= OFTEN else 0.0
        if charged_s:
            measured = _measured(job, scenario, target, work / "charged", charged_s)
        row = {**_row(measured, scenario, target), "decision_s": mean_s, "charged_s": charged_s}
        row["pool"] = UNIFIED * unified(Setup(measured.tasks[0].spec))
    except Failed as failed:
        row = {"failed": next(iter(failed.why.values()))}
    except UserError as error:
        row = {"failed": str(error)}
    shutil.rmtree(work, ignore_errors=True)
    return {"scenario": scenario.name, **row}


def unified(setup: Setup) -> bool:
    """Tell whether models that share a GPU draw KV from one pool of blocks without limits, as in MuxServe's engine.

    Models in separate processes have no such pool.
    """
    asks = setup.policy.options
    apart = asks.get("process", "model") in {"model", "pair"} and len(setup.cluster.models) > len(setup.cluster.gpus)
    return apart and asks.get("kv", "paged") == "paged" and "Limit" not in setup.policy.uses


def charge(mean_s: float, budget_s: float) -> float:
    """Return the seconds charged per decision, given a decision's mean time.

    Nothing is charged if the mean is at most ALLOWANCE times `budget_s`. Otherwise it is the mean, rounded up to the
    budget times a power of 2.
    """
    return 0.0 if mean_s <= ALLOWANCE * budget_s else budget_s * 2.0 ** math.ceil(math.log2(mean_s / budget_s))


def _measured(job: Job, scenario: Scenario, target: SloTarget, out: Path, decision_s: float | None) -> Measured:
    if own_count(job.system):
        raise UserError("it takes GPUs of its own, however few the scenario has")
    asked = study(job.suite, scenario, job.system, job.beacon, decision_s, window=job.window)
    return measure(asked, out, target=target, workers=1)


def decisions(measured: Measured) -> tuple[float, float]:
    """Return the mean processor time of a decision in seconds, and the number of decisions per request.

    The mean leaves out each run's slowest decision, which is the first one: it searches for a placement before the
    window. Decisions are measured in wall time. This time is multiplied by the run's ratio of processor time to wall
    time.
    """
    sides = [record.side(measured.folder.parent / run) for run in measured.about.runs]
    sides = [side for side in sides if side.get("policy_calls")]
    spent = sum((s["policy_s"] - s["slowest_s"]) * min(1.0, s["cpu_s"] / s["wall_s"]) for s in sides)
    calls, offered = (sum(s[name] for s in sides) for name in ("policy_calls", "requests"))
    return spent / max(1, calls - len(sides)), calls / max(1, offered)


def _row(measured: Measured, scenario: Scenario, target: SloTarget) -> dict[str, Any]:
    """Return the results of a measured scenario, or the reason for which it failed."""
    (panel,), rows = measured.about.panels, measured.table
    (system,) = measured.study.systems
    rule, level = scenario.definition, measured.study.level
    if why := dict(summaries.infeasible(rows)).get(system):
        return {"failed": f"does not fit: {why}"}
    counts = crossings.counts(rows, panel["axis"], system, rule)
    if counts is None:
        reasons = {str(why) for why in rows["skipped"].to_pylist() if why}
        return {"failed": f"cannot run: {', '.join(sorted(reasons)) or 'nothing was offered'}"}
    at = pooled.crossing(counts, level)
    worst = crossings.crossing(rows, panel, system, rule, level, "worst")
    curve = crossings.attained(rows, panel["axis"], system, rule)
    fails = min((x for x, e in curve.items() if e.mean < level and x >= at.mean * (1 - 1e-9)), default=max(curve))
    runs = _runs_at(rows, fails)
    every = binds.by_view((measured.folder.parent / run for run in runs), [View("", "", ())], lambda _: target, rule)
    short = binds.total(every[""])
    return {
        "rps": at.mean if at.sign != "<" else 0.0,
        "sign": at.sign,
        "tried_rps": at.mean,
        "low_rps": at.low,
        "high_rps": at.high,
        "worst_rps": worst.at.mean if worst and worst.at.sign != "<" else 0.0,
        "curve": [[x, e.mean] for x, e in sorted(curve.items())],
        "unserved": crossings.unserved(rows, panel["axis"], system, rule),
        "binds": {name: n / max(1, short.missed) for name, n in sorted(short.binds.items(), key=lambda of: -of[1])},
        "offered": int(counts.offered.sum()),
        "missed": int(counts.missed.sum()),
        "never": never(measured),
    }


def _runs_at(rows: Any, x: float) -> Sequence[str]:
    at = np.isclose(np.asarray(rows["x"]), x)
    return list(dict.fromkeys(name for name, here in zip(rows["run"].to_pylist(), at, strict=True) if here))


def never(measured: Measured) -> int:
    """Count the failed and the dropped requests of all runs."""
    counts = (record.meta(measured.folder.parent / run)["counts"] for run in measured.about.runs)
    return sum(each.get("failed", 0) + each.get("dropped", 0) for each in counts)


if __name__ == "__main__":
    main()
