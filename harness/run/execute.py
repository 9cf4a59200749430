"""One resolved spec is run: its workload is built and replayed, and its rows are written."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.loop import engine as engines
from harness.loop.guard import terminable
from harness.loop.recorder import Log
from harness.loop.replay import Outcome, replay
from harness.policy.types import Infeasible, Jobs, Unsupported, UserError
from harness.rows import record
from harness.run.lookup import (
    assemble,
    blamed,
    cluster_of,
    departs,
    engine_of,
    fit_of,
    machine_of,
    models_of,
    served_of,
    trace_of,
)
from harness.run.spec import Spec, as_dict

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    F8 = NDArray[np.float64]
    I4 = NDArray[np.int32]


def jobs_of(spec: Spec) -> Jobs:
    """The workload of a resolved spec. UserError where the trace cannot be served or scaled so."""
    from workloads import slo
    from workloads.base import base
    from workloads.build import build, window_fold

    trace, models = trace_of(spec.trace), served_of(spec)
    if spec.workload == "base":
        return _cached(base(trace, models, spec.seed, spec.assign), spec)
    jobs = build(
        trace,
        models,
        rate_scale=spec.rate_scale,
        scaling=spec.scaling,
        seed=spec.seed,
        window_s=spec.window_s,
        warmup_s=spec.warmup_s,
        slo={model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s},
        fold=window_fold(trace, spec.seed, spec.plan),
        assign=spec.assign,
    )
    rule = slo.parse(spec.slo) if spec.slo and not spec.slo_s else None
    if isinstance(rule, slo.Scaled) and rule.base == "solo":
        jobs = slo.own(jobs, rule, *solo_s(spec, jobs.model, jobs.prompt_tokens, jobs.output_tokens))
    return _cached(jobs, spec)


def _cached(jobs: Jobs, spec: Spec) -> Jobs:
    """The workload with what a prefix cache may find, where the spec has one."""
    if jobs.prefix is None or not spec.prefix_cache:
        return replace(jobs, prefix=None)
    if jobs.prefix.block_tokens % spec.block_tokens:
        raise UserError(
            f"block_tokens is {spec.block_tokens}, no divisor of the {jobs.prefix.block_tokens} of which the trace has "
            "ids: no prefix cache (--no-prefix-cache)"
        )
    return jobs


def solo_s(spec: Spec, model: I4, prompt_tokens: I4, output_tokens: I4) -> tuple[F8, F8]:
    """TTFT and TPOT in seconds of each request alone on an idle GPU, by the cost table and without noise.

    `model` indexes the spec's set. Constants are taken unscaled: what an SLO allows does not move with a guess.
    """
    import numpy as np

    from harness.engines.costs import quantities
    from harness.policy.types import Inst

    profile = cluster_of(replace(spec, scaled=())).profile
    host = quantities.host(spec.host, spec.gpu, spec.table)
    insts = [Inst(m.name, tuple(range(m.tp))) for m in models_of(spec.models).members]
    keys = np.stack((model, prompt_tokens, output_tokens), axis=1)
    unique, back = np.unique(keys, axis=0, return_inverse=True)
    pairs = []
    for m, prompt, output in unique.tolist():
        try:
            ttft_s = host.api_in_s + profile.prefill_s(insts[m], prompt) + host.api_out_s
            pairs.append((ttft_s, profile.step_s(insts[m], 1, prompt + max(1, output) / 2)))  # affine in the context
        except Unsupported as why:
            raise UserError(f"no SLO by solo latency on {spec.engine}: it has no {why}") from None
    ttft_s, tpot_s = np.array(pairs).reshape(-1, 2)[back.reshape(-1)].T
    return ttft_s, tpot_s


def current(spec: Spec, out: Path, code_hash: str) -> bool:
    """Tell whether the run of a resolved spec stands in `out`, made by these sources."""
    folder = out / spec.folder
    if not record.exists(folder):
        return False
    try:
        about = record.meta(folder)
    except UserError:  # not ours, or cut: it is written anew
        return False
    return bool(about.get("code_hash") == code_hash and about.get("spec") == as_dict(spec))


def recorded(spec: Spec, out: Path, code_hash: str) -> Path:
    """`execute`, and store the turns beside the rows (turns.FILE); its metadata say what loads took on idle links.

    Nothing of loads is said for an engine without a cost table.
    """
    from harness.run import turns

    log = turns.Turns()
    folder = execute(spec, out, code_hash, log)
    fixed_s = {name: way.fixed_s for name, way in machine_of(spec).ladder.items()}
    loads: Mapping[str, tuple[float, float]] = {}
    with suppress(Unsupported):
        loads = turns.load_s(log.loads, cluster_of(spec).profile, fixed_s)
    facts: dict[str, Any] = {"spec": as_dict(spec), "load_s": loads, "orders": log.orders}
    if partitions := log.partitioned():
        facts |= {"partitions": partitions, "sms": machine_of(spec).spec.sms}
    record.write_table(folder / turns.FILE, log.table(), facts)
    return folder


def execute(spec: Spec, out: Path, code_hash: str, log: Log | None = None) -> Path:
    """Run a resolved spec and write its folder below `out`; returns the folder.

    What the engine cannot do, or the system cannot hold, is a run without rows and with the reason. Raises Failed, and
    writes nothing, where the policy fails. The engine is closed however the run ends; SIGTERM ends it as Ctrl-C does.
    """
    begun = time.time()
    t, cpu = time.perf_counter(), time.process_time()
    trace, bare = trace_of(spec.trace), engine_of(spec)
    about: dict[str, Any] = {
        "spec": as_dict(spec),
        "spec_hash": spec.hash8,
        "code_hash": code_hash,
        "fidelity": bare.fidelity,
        "tier": trace.tier,
        "fit": fit_of(spec),
        "plan_origin": spec.plan,
        "stats": {},
        "skipped": None,
        "infeasible": None,
        "refused": 0,
        "first_refused": "",
        "end_s": None,
    }
    if bare.measured_on:
        about["measured_on"] = dict(bare.measured_on)
    jobs = jobs_of(spec)
    outcome, rows, files, side = Outcome(), iter(()), dict[str, Iterable[bytes]](), dict[str, Any]()
    with ExitStack() as stack:
        stack.enter_context(terminable())
        try:
            with blamed(spec):
                policy, engine = assemble(spec)
                stack.callback(engine.close)
                if said := departs(spec, policy.options):
                    about["departs"] = said
                end_s = float("inf") if spec.drain_s is None or spec.window_s is None else spec.window_s + spec.drain_s
                outcome = replay(
                    policy, engine, jobs, end_s=end_s, decision_s=spec.decision_s or 0.0,
                    control_s=spec.control_s or 0.0, log=log,
                )  # fmt: skip
            about |= {"refused": outcome.refused, "first_refused": outcome.first_refused}
            rows = _rows(engine, about, side)
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
            "requests": len(jobs),
            "replay_s": time.perf_counter() - t,
            "cpu_s": time.process_time() - cpu,
            "policy_s": outcome.policy_s,
            "policy_calls": outcome.policy_calls,
            "slowest_s": outcome.slowest_s,
        }
        record.write(folder, rows, about, side=side, files=files)
    return folder


def _rows(engine: engines.Engine, about: dict[str, Any], side: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """The engine's rows; what is whole only once these were asked for goes into `about` and `side`."""
    yield from engine.rows()
    if isinstance(engine, engines.Observed):
        about |= engine.about()
        side |= engine.side()
    about["end_s"] = engine.view().now_s
    about["stats"] = dict(engine.stats())
