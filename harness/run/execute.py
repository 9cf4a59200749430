"""The execution of a resolved spec: build the workload, replay it, and write the rows."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.loop import engine as engines
from harness.loop.interrupted import terminable
from harness.loop.recorder import Log
from harness.loop.replay import Outcome, replay
from harness.policy.types import Infeasible, Option, Unsupported
from harness.rows import record
from harness.run import arithmetic
from harness.run.setup import Setup, blamed
from harness.run.spec import Spec, as_dict

if TYPE_CHECKING:
    import pyarrow as pa


OWN_DEGREES = "Cluster.degrees"  # a system that chooses degrees of parallelism has this in its `uses`


def _departure(spec: Spec, options: Mapping[str, Option]) -> str | None:
    """Describe how a run's way of sharing GPUs differs from that of its system's paper; None if it does not.

    The paper's way is the option `sharing` in the system's `options`. If that is "none", no run differs from it.
    """
    needed = options.get("sharing", "none")
    if needed == "none" or spec.sharing in ("own", needed):
        return None
    return f"its paper has sharing={needed}, this run sharing={spec.sharing}"


def recorded(spec: Spec, out: Path, code_hash: str) -> Path:
    """Execute a run as `execute` does, and store a table of its turns (turns.FILE) in the run's folder.

    The table's footer also has the mean seconds of each model's loads on idle links, unless the engine has no cost
    table.
    """
    from harness.run import turns

    setup, log = Setup(spec), turns.Turns()
    folder = _run(setup, out, code_hash, log)
    fixed_s = {name: way.fixed_s for name, way in setup.machine.ladder.items()}
    loads: Mapping[str, tuple[float, float]] = {}
    with suppress(Unsupported):
        loads = turns.load_s(log.loads, setup.cluster.profile, fixed_s)
    facts: dict[str, Any] = {"spec": as_dict(spec), "load_s": loads, "orders": log.orders}
    record.write_table(folder / turns.FILE, log.table(), facts)
    return folder


def execute(spec: Spec, out: Path, code_hash: str) -> Path:
    """Run a resolved spec, and write the run's folder below `out`; return that folder.

    If the engine lacks something or the system has no room, the run is stored without rows, and its facts have the
    reason. If the policy fails, nothing is written, and Failed is raised. The engine is always closed; SIGTERM ends the
    run in the same way as Ctrl-C.
    """
    return _run(Setup(spec), out, code_hash)


def _run(setup: Setup, out: Path, code_hash: str, log: Log | None = None) -> Path:
    begun = time.time()
    t, cpu = time.perf_counter(), time.process_time()
    spec, bare = setup.spec, setup.bare_engine
    about: dict[str, Any] = {
        "spec": as_dict(spec),
        "spec_hash": spec.hash8,
        "code_hash": code_hash,
        "fidelity": bare.fidelity,
        "tier": setup.trace.tier,
        "fit": setup.realism,
        "plan_origin": spec.plan,
        "stats": {},
        "skipped": None,
        "infeasible": None,
        "refused": 0,
        "first_refused": "",
        "end_s": None,
    }
    if bare.fidelity == "simulated":
        about["arithmetic"] = arithmetic.digest()[: arithmetic.SHOWN]
    if bare.measured_on:
        about["measured_on"] = dict(bare.measured_on)

    def spent() -> dict[str, float]:
        """Return the wall-clock seconds and the CPU seconds of this process so far."""
        return {"wall_s": time.perf_counter() - t, "cpu_s": time.process_time() - cpu}

    jobs = [setup.jobs()]  # popped below: no frame that calls the policy holds future requests
    requests = len(jobs[0])
    outcome, rows, files, side = Outcome(), iter(()), dict[str, Iterable[bytes]](), dict[str, Any]()
    with ExitStack() as stack:
        stack.enter_context(terminable())
        try:
            with blamed(spec):
                policy, engine = setup.policy, setup.engine
                stack.callback(engine.close)
                if departure := _departure(spec, policy.options):
                    about["departs"] = departure
                if OWN_DEGREES in policy.uses:
                    about["degrees"] = "own"
                outcome = replay(
                    policy,
                    engine,
                    jobs.pop(),
                    end_s=setup.end_s,
                    decision_s=spec.decision_s or 0.0,
                    control_s=spec.control_s or 0.0,
                    log=log,
                )
            about |= {"refused": outcome.refused, "first_refused": outcome.first_refused}
            rows = _rows(engine, about, side, spent)
            files |= engine.files() if isinstance(engine, engines.Observed) else {}
        except Infeasible as why:
            about["infeasible"] = str(why)
        except Unsupported as why:
            about["skipped"] = str(why)
        folder = out / spec.folder
        side |= {
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
            "host": platform.node(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "requests": requests,
            "replay_s": time.perf_counter() - t,
            **spent(),
            "policy_s": outcome.policy_s,
            "policy_calls": outcome.policy_calls,
            "slowest_s": outcome.slowest_s,
        }
        record.write(folder, rows, about, side=side, files=files)
    return folder


def _rows(
    engine: engines.Engine, about: dict[str, Any], side: dict[str, Any], spent: Callable[[], Mapping[str, float]]
) -> Iterator[pa.RecordBatch]:
    """Yield the engine's rows. After the last row, add the facts that are complete only then to `about` and `side`."""
    yield from engine.rows()
    if isinstance(engine, engines.Observed):
        about |= engine.about()
        side |= engine.side()
    about["end_s"] = engine.view().now_s
    about["stats"] = dict(engine.stats())
    side |= spent()
