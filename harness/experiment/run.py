"""One spec becomes one run: names are looked up, open numbers decided, the replay done, its rows written.

Which sources decided the rows is read from the imports, so that editing one system makes only its own runs stale.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.engines import machine
from harness.experiment.spec import LINKS, Spec, as_dict, meant
from harness.loop import engine as engines
from harness.loop import system
from harness.loop.guard import Fault, guarded, terminable
from harness.loop.recorder import Log
from harness.loop.replay import Outcome, missing, replay
from harness.loop.system import ROOT
from harness.policy.types import GIB, Cluster, Infeasible, Jobs, Option, Unsupported, UserError
from harness.rows import record

if TYPE_CHECKING:
    import pyarrow as pa

    from traces.fit import Target
    from traces.load import Trace
    from workloads.models import ModelSet

PACKAGES = ("harness", "systems", "workloads", "traces")
DATA = ("harness/engines/costs/tables/*.toml", "workloads/**/*.toml", "traces/*.toml")
TP = (2, 4, 8)  # tensor-parallel degrees to propose


class Failed(UserError):
    """What policies did that raised, answered nonsense or came to no end: by label, with the command to look into it.

    A mistake in one system's file, so it ends that system's runs and no other's.
    """

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)

    def __str__(self) -> str:
        return "\n".join(f"{label}: {what}" for label, what in self.why.items())


@contextmanager
def blamed(spec: Spec) -> Iterator[None]:
    """Turn a Fault of a spec's policy into Failed."""
    try:
        yield
    except Fault as fault:
        name = spec.system
        if name.endswith(".py"):
            near = os.path.relpath(name)
            name = str(Path(name).resolve()) if near.startswith("..") else f"./{near}"
        raise Failed({spec.label: f"{fault}; bench check {shlex.quote(name)}"}) from fault


# ------------------------------------------------------------------ names to things


@lru_cache(8)
def trace_of(name: str) -> Trace:
    """A trace by name or path, or as a generator draws it (NAME+FIELD=VALUE...); UserError where there is none."""
    from traces.load import trace

    return trace(name, drawn)


def drawn(name: str, seed: int = 0, fit: str | None = None) -> pa.Table:
    """The table of what a generator draws. UserError for a name that is none."""
    from traces.convert import synthetic
    from workloads import fitted

    p = fitted.preset(name)
    origin: Any = "uniform" if p.lengths == "uniform" else "sampled"
    return synthetic(p.label, *fitted.draw(p, seed), seed=seed, maker=str(p), length_origin=origin,
                     ordered=p.name in fitted.SIZED, fit=fit)  # fmt: skip


def fit_of(trace: Trace, models: ModelSet | None = None) -> str | None:
    """How near the generator of a trace comes to its target, as a set uses it; of another trace, what its file says."""
    if trace.maker is None:
        return trace.fit
    from workloads import fitted

    p = fitted.preset(trace.maker)
    if models is not None and p.name == "arena-like" and p.models == len(fitted.ARENA_COUNTS):
        used = tuple((one.stream, one.shift_s) for one in models.members)
        if len(used) in fitted.RELEASED and used == fitted.released(len(used)):
            p = replace(p, models=len(used))
    found = judged(str(p))
    return None if found is None else found.verdict


class Judged(NamedTuple):
    """A generator's statistics beside its target's: the mean over many draws, and what follows."""

    target: Target
    mean: Mapping[Any, float]
    verdict: str


@cache
def judged(maker: str) -> Judged | None:
    """Hold the draws of a generator against its target; none where nothing was measured for it."""
    from traces import fit
    from traces.load import of_table
    from workloads import fitted

    p = fitted.preset(maker)
    rate = f"x{p.rate_rps:g}" if p.rate_rps else ""
    stem = p.name.removesuffix("-drift")
    names = (f"{stem}.{p.models}{rate}", stem)
    if not (target := next((fit.targets()[name] for name in names if name in fit.targets()), None)):
        return None
    found = fit.mean(fit.measure(of_table(drawn(maker, seed), maker), target) for seed in range(fit.DRAWS))
    return Judged(target, found, fit.verdict(found, target))


def sized(name: str, models: ModelSet) -> str:
    """The name under which a run knows a trace: a generator's with its size, which is the set's where none is given."""
    from traces.load import family, manifest, present
    from workloads import fitted

    if (one := family(name)) is not None:
        return name if present(name) else one.generator
    if name in manifest() and "drawn" in manifest().get(fallback := manifest()[name].get("fallback", ""), {}):
        name = name if present(name) else fallback
    if name.partition("+")[0] not in fitted.PRESETS:
        return name
    p = fitted.preset(name)
    return str(replace(p, models=len(models.members)) if p.name in fitted.SIZED and "+models=" not in name else p)


@cache
def models_of(name: str) -> ModelSet:
    """A model set by name, path or shapes; UserError where there is none."""
    from workloads.models import model_set

    return model_set(name)


def fields_of(make: Any, spec: Spec) -> dict[str, Option]:
    """Keyword arguments of a system: its preset, then the spec's fields. UserError for what it does not take."""
    presets: Mapping[str, Mapping[str, Option]] = make.presets
    if spec.preset is not None and spec.preset not in presets:
        have = ", ".join(presets) or "none"
        raise UserError(f'{spec.system} has no preset "{spec.preset}"{meant(spec.preset, presets)} (it has: {have})')
    takes = {n: p.default for n, p in inspect.signature(make).parameters.items() if n != "cluster"}
    found = dict(presets[spec.preset]) if spec.preset is not None else {}
    for name, value in spec.fields:
        if name not in takes:
            have = ", ".join(takes) or "none"
            raise UserError(f'{spec.system} has no field "{name}"{meant(name, takes)} (it has: {have})')
        found[name] = _fitting(make, name, value, takes[name])
    return found


def _fitting(make: Any, name: str, value: Option, default: Any) -> Option:
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if default is not inspect.Parameter.empty and type(value) is not kind:
        raise UserError(f"field {name} is {value!r}, not of the kind of {default!r}")
    choices = getattr(make, "choices", {}).get(name)
    if choices and value not in choices:
        raise UserError(
            f"field {name} is {value!r}{meant(str(value), map(str, choices))} ({', '.join(map(str, choices))})"
        )
    low_high = getattr(make, "ranges", {}).get(name)
    if low_high and not low_high[0] <= value <= low_high[1]:
        raise UserError(f"field {name} is {value!r}, not in [{low_high[0]:g}, {low_high[1]:g}]")
    return value


def config_of(spec: Spec) -> machine.Config:
    """What engines are told of a spec."""
    from workloads.build import plan

    trace, models = trace_of(spec.trace), models_of(spec.models)
    slo = {model: pair for model, *pair in spec.slo_s}
    longest = longest_tokens(trace)
    return machine.Config(
        models=tuple(
            machine.Served(
                m.name, m.shape._replace(max_tokens=min(m.shape.max_tokens, longest)), m.tp, *slo.get(m.name, ())
            )
            for m in models.members
        ),
        gpu=spec.gpu,
        gpus=spec.gpus,
        node_gpus=spec.node_gpus,
        host=spec.host,
        table=spec.table,
        block_tokens=spec.block_tokens,
        batch_cap=spec.batch_cap,
        chunk_tokens=spec.chunk_tokens,
        prefill_tokens=spec.prefill_tokens,
        watermark=spec.watermark,
        mem_fraction=spec.mem_fraction,
        process=spec.process,  # type: ignore[arg-type]  # checked by Spec
        process_bytes=spec.process_bytes,
        **links_of(spec),
        noise=spec.noise or 0.0,
        seed=spec.seed,
        start_s=-(spec.warmup_s or 0.0),
        token_times=spec.token_times,
        plan=plan(trace, models, spec.rate_scale, "prefix" if spec.plan == "prefix" else "trace", spec.seed),
    )


def machine_of(spec: Spec) -> machine.Machine:
    """The cost tables of a spec, computed once for all runs of a process."""
    return _machine(spec.gpu, spec.host, spec.models, spec.table, tuple(links_of(spec).items()))


@cache
def _machine(
    gpu: str, host: str, models: str, table: str | None, links: tuple[tuple[str, float | None], ...]
) -> machine.Machine:
    served = tuple(machine.Served(m.name, m.shape, m.tp) for m in models_of(models).members)
    rates: dict[str, Any] = dict(links)
    return machine.machine(machine.Config(models=served, gpu=gpu, host=host, table=table, **rates))


def links_of(spec: Spec) -> dict[str, Any]:
    """The link rates of a spec, by the name of their field."""
    return {name: getattr(spec, name) for name in LINKS}


def engine_of(spec: Spec, options: Mapping[str, Option] | None = None) -> engines.Engine:
    """The engine of a spec, made and no more, with a system's options; UserError where there is none of that name."""
    return engines.find(spec.engine)(config_of(spec), options or {}, machine_of(spec))


def cluster_of(spec: Spec) -> Cluster:
    """What policies may know of a spec's machine, with pages as small as they come and a process a model."""
    return engine_of(spec).cluster


def longest_tokens(trace: Trace) -> int:
    """The longest prompt + output that is served: the trace's, up to a power of two, as an operator would set it."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    if trace.maker is not None:  # other seeds draw other rows
        from workloads import fitted

        longest = fitted.preset(trace.maker).longest_tokens
    return 1 << (longest - 1).bit_length()


def assemble(spec: Spec) -> tuple[system.System, engines.Engine]:
    """The policy and the engine of a spec, which is not ready yet.

    Raises Unsupported where the engine has fewer GPUs, Infeasible where the policy says so at once, Fault where it
    fails.
    """
    make, config = system.find(spec.system), config_of(spec)
    keywords = fields_of(make, spec)

    def made(options: Mapping[str, Option]) -> engines.Engine:
        return engines.find(spec.engine)(config, options, machine_of(spec))

    if big := next((m for m in config.models if m.tp > spec.gpus), None):
        raise Infeasible(f"{big.name} takes {big.tp} GPUs, there are {spec.gpus}")
    cluster = made({}).cluster
    if len(cluster.gpus) < spec.gpus:
        raise Unsupported(f"{spec.gpus} GPUs")
    try:
        policy = system.build(make, cluster, keywords)
    except Infeasible as why:  # one process a GPU takes least memory, and only a policy that exists can ask for it
        try:
            cluster = made({"process": "gpu"}).cluster
            policy = system.build(make, cluster, keywords)
        except Infeasible:
            raise why from None
    found = made(policy.options)
    if (found.cluster.gpus, found.cluster.models) != (cluster.gpus, cluster.models):
        policy = system.build(make, found.cluster, keywords)  # options decide the pages and processes it may know of
    return policy, found


def gaps(name: str, preset: str | None, engine: str) -> list[str]:
    """What an engine lacks for a system, tried on the committed sample with room for every model."""
    spec = Spec(name, preset=preset, engine=engine, trace="sample", gpus=8)
    with blamed(spec):
        spec = replace(spec, gpus=min(spec.gpus, len(cluster_of(spec).gpus)))
        try:
            return missing(*assemble(replace(spec, gpus=traits(spec).gpus)))
        except Unsupported as why:
            return [str(why)]
        except Infeasible as why:
            return [f"room: {why}"]


# ------------------------------------------------------------------ open numbers


class Traits(NamedTuple):
    """What a spec needs to know of its system and its engine."""

    gpus: int
    reads_slo: bool
    decision_s: float
    wall_clock: bool
    measured_on: Mapping[str, str]


def traits(spec: Spec) -> Traits:
    """GPUs that the system takes (some bring their own count), whether it reads SLOs, what a decision costs it.

    Of the engine: whether its time is real, and where. Nothing is started for it. Raises Failed where the system's
    file does.
    """
    same = replace(spec, rate_scale=1.0, scaling="rotate", seed=0, window_s=None, warmup_s=None, drain_s=None, slo="",
                   slo_s=(), workload="trace", noise=None, token_times=False)  # fmt: skip
    with blamed(spec):
        return _traits(same)


@cache
def _traits(spec: Spec) -> Traits:
    make = system.find(spec.system)
    fields_of(make, spec)
    decision_s = getattr(system.module(spec.system), "DECISION_S", 0.0)
    if type(decision_s) not in (int, float) or not 0 <= decision_s < math.inf:
        raise Fault(f"DECISION_S is {decision_s!r}, not seconds")
    if hasattr(make, "gpus_needed"):
        models = cluster_of(spec).models
        with guarded():
            spec = replace(spec, gpus=make.gpus_needed(models, spec.node_gpus))
    bare = engine_of(spec)
    try:
        reads_slo = "Request.slo" in assemble(spec)[0].uses
    except (Infeasible, Unsupported):
        reads_slo = False
    return Traits(spec.gpus, reads_slo, float(decision_s), bare.wall_clock, bare.measured_on)


def resolve(spec: Spec) -> Spec:
    """The spec with names made canonical and nothing left open; what is hashed. UserError for what does not exist."""
    from harness.engines.costs import cost
    from workloads.build import FIRST_S, WARMUP_S, WARMUP_SHARE, closed

    spec = replace(
        spec,
        system=_located(spec.system, ".py"),
        engine=_located(spec.engine, ".py"),
        trace=_located(sized(spec.trace, models_of(spec.models)), ".parquet"),
        models=_located(spec.models, ".toml"),
        table=spec.table and _located(spec.table, ".toml"),
        gpu=cost.gpu(spec.gpu).kind,
    )
    if (policy := Path(spec.system)).is_absolute() and policy.is_file():
        _imported(policy, policy.stat().st_mtime_ns)  # one line for a file that is not Python
    trace = trace_of(spec.trace)
    if spec.trace_sha256 not in {"", trace.sha256}:
        raise UserError(f"trace {spec.trace} is not the one of this spec: its rows' sha256 is {trace.sha256}")
    names = models_of(spec.models).names
    if unknown := next((model for model, *_ in spec.slo_s if model not in names), None):
        raise UserError(f'slo_s."{unknown}": no such model in {spec.models}{meant(unknown, names)}')
    _fit(spec)
    known = traits(spec)
    if known.wall_clock:
        spec = _timed(spec)
    measured_on = ", ".join(f"{key} {value}" for key, value in known.measured_on.items())
    if spec.measured_on not in {"", measured_on}:
        raise UserError(f"this spec is of a run measured on {spec.measured_on}; here is {measured_on or spec.engine}")
    host = cost.host(spec.host, spec.gpu)
    span_s = trace.span_s / (spec.rate_scale if spec.scaling == "time" else 1.0)
    reads = known.reads_slo and spec.workload == "trace"
    window_s: float | None = span_s
    warmup_s, scaling = min(span_s, max(WARMUP_S, WARMUP_SHARE * span_s)), spec.scaling
    if closed(trace) is not None:
        window_s, warmup_s, scaling = None, FIRST_S, "clients" if scaling == "rotate" else scaling
    return replace(
        spec,
        trace_sha256=trace.sha256,
        gpus=known.gpus,
        scaling=scaling,
        window_s=window_s if spec.window_s is None else spec.window_s,
        warmup_s=warmup_s if spec.warmup_s is None else spec.warmup_s,
        slo=spec.slo if reads else "",
        slo_s=spec.slo_s if reads else (),
        decision_s=known.decision_s if spec.decision_s is None else spec.decision_s,
        control_s=host.api_in_s if spec.control_s is None else spec.control_s,
        noise=cost.noise(spec.gpu, spec.host) if spec.noise is None else spec.noise,
        measured_on=measured_on,
    )


def _timed(spec: Spec) -> Spec:
    """The spec of a run on a wall clock, where decisions, calls and noise take the time that they take."""
    for name in ("decision_s", "control_s", "noise"):
        if getattr(spec, name):
            raise UserError(f"{name} is {getattr(spec, name):g}: on {spec.engine} time is real, and none can be added")
    return replace(spec, decision_s=0.0, control_s=0.0, noise=0.0)


def _located(name: str, suffix: str) -> str:
    """A path that holds from any folder; names stay."""
    return str(Path(name).resolve()) if name.endswith(suffix) else name


def _fit(spec: Spec) -> None:
    """UserError where a model, alone on GPUs of this kind, exceeds them at its tensor-parallel degree."""
    from harness.engines import shapes

    card = machine_of(spec).spec

    def alone(m: Any, tp: int) -> tuple[int, int]:
        """Bytes that the model takes on each GPU, and those that engines may use."""
        config = machine.Config(
            models=(machine.Served(m.name, m.shape, tp),), gpus=tp, host=spec.host, mem_fraction=spec.mem_fraction,
            chunk_tokens=spec.chunk_tokens, prefill_tokens=spec.prefill_tokens, batch_cap=spec.batch_cap,
            process_bytes=spec.process_bytes,
        )  # fmt: skip
        held = machine.memory(config, card)
        return shapes.weight_bytes(m.shape, tp) + held.process_bytes[0], held.gpu_bytes

    for m in models_of(spec.models).members:
        need, have = alone(m, m.tp)
        if need <= have:
            continue
        way = "no tensor-parallel degree helps"
        for tp in (t for t in TP if m.tp < t <= spec.node_gpus):
            with suppress(UserError):
                more, room = alone(m, tp)
                if more <= room:
                    way = f"tp = {tp} in a model set would fit: --models FILE.toml"
                    break
        raise UserError(
            f"{m.name} needs {need / GIB:.1f} GiB on each GPU, {spec.gpu} has {have / GIB:.1f} for the engine ({way})"
        )


# ------------------------------------------------------------------ sources


def code(spec: Spec) -> str:
    """SHA-256 over the sources that decide a run's rows: this file, the engine, the system, and all that they import.

    Cost tables, model sets and the trace manifest are among them; so are the files that the spec itself names.
    """
    policy = Path(spec.system) if spec.system.endswith(".py") else ROOT / "systems" / f"{spec.system}.py"
    files = {*_closure((Path(__file__).resolve(), engines.path(spec.engine), policy)), *_data()}
    files |= {Path(name) for name in (spec.models, spec.table or "", spec.slo[8:]) if name.endswith(".toml")}
    total = sha256()
    for name, path in sorted((_relative(path), path) for path in files):
        total.update(f"{name}\0{_file_hash(path, path.stat().st_mtime_ns)}\n".encode())
    return total.hexdigest()


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@cache
def _file_hash(path: Path, stamp: int) -> str:  # noqa: ARG001 - the stamp is part of the key
    return sha256(path.read_bytes()).hexdigest()


@cache
def _data() -> tuple[Path, ...]:
    return tuple(path for pattern in DATA for path in ROOT.glob(pattern))


def _closure(roots: tuple[Path, ...]) -> set[Path]:
    found: set[Path] = set()
    todo = list(roots)
    while todo:
        path = todo.pop()
        if path not in found and path.is_file():
            found.add(path)
            todo += _imported(path, path.stat().st_mtime_ns)
    return found


@cache
def _imported(path: Path, stamp: int) -> tuple[Path, ...]:  # noqa: ARG001
    """Files of ours that a file imports, wherever in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, or nested too deep
        raise UserError(f"{path}: not Python: {error}") from None
    return tuple({file for name in _names(tree) for file in _files(name)})


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> Iterator[Path]:
    """The module or package that a dotted name is, or lies in."""
    parts = name.split(".")
    if parts[0] in PACKAGES:
        for k in (len(parts), len(parts) - 1):
            stem = ROOT.joinpath(*parts[:k])
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if k > 1 and path.is_file():
                    yield path
                    return


# ------------------------------------------------------------------ the run


def jobs_of(spec: Spec) -> Jobs:
    """The workload of a resolved spec. UserError where the trace cannot be served or scaled so."""
    from workloads import slo
    from workloads.base import base
    from workloads.build import build

    trace, models = trace_of(spec.trace), models_of(spec.models)
    if spec.workload == "base":
        return base(trace, models, spec.seed)
    jobs = build(
        trace,
        models,
        rate_scale=spec.rate_scale,
        scaling=spec.scaling,  # type: ignore[arg-type]  # checked by Spec
        seed=spec.seed,
        window_s=spec.window_s,
        warmup_s=spec.warmup_s,
        slo={model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s},
    )
    rule = slo.parse(spec.slo) if spec.slo and not spec.slo_s else None
    if isinstance(rule, slo.Scaled) and rule.base == "solo":
        jobs = slo.own(jobs, rule, lambda jobs: solo(spec, jobs))
    return jobs


def rate_of(spec: Spec) -> float:
    """Requests per second of a resolved spec at rate scale 1: as its generator means them, or as counted."""
    from workloads import fitted

    trace = trace_of(spec.trace)
    if trace.maker is not None and (each := fitted.preset(trace.maker).rate_rps):
        return each * len(models_of(spec.models).members)
    return len(jobs_of(replace(spec, rate_scale=1.0, window_s=None, warmup_s=0.0))) / trace.span_s


def solo(spec: Spec, jobs: Jobs) -> tuple[Any, Any]:
    """TTFT and TPOT in seconds of each request alone on an idle GPU, by the cost table and without noise."""
    import numpy as np

    from harness.engines.costs import cost
    from harness.policy.types import Inst

    profile = cluster_of(spec).profile
    host = cost.host(spec.host, spec.gpu)
    insts = [Inst(m.name, tuple(range(m.tp))) for m in models_of(spec.models).members]
    keys = np.stack((jobs.model, jobs.prompt_tokens, jobs.output_tokens), axis=1)
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
    from harness.engines.costs import cost
    from harness.rows import turns

    log = turns.Turns()
    folder = execute(spec, out, code_hash, log)
    fixed_s = {name: way.fixed_s for name, way in cost.ladder(spec.gpu).items()}
    loads: Mapping[str, tuple[float, float]] = {}
    with suppress(Unsupported):
        loads = turns.load_s(log.loads, cluster_of(spec).profile, fixed_s)
    record.write_table(folder / turns.FILE, log.table(), {"spec": as_dict(spec), "load_s": loads, "orders": log.orders})
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
        "fit": fit_of(trace, models_of(spec.models)),
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
    outcome, rows = Outcome(), iter(())
    with ExitStack() as stack:
        stack.enter_context(terminable())
        try:
            with blamed(spec):
                policy, engine = assemble(spec)
                stack.callback(engine.close)
                end_s = float("inf") if spec.drain_s is None or spec.window_s is None else spec.window_s + spec.drain_s
                outcome = replay(
                    policy, engine, jobs, end_s=end_s, decision_s=spec.decision_s or 0.0,
                    control_s=spec.control_s or 0.0, log=log,
                )  # fmt: skip
            about |= {"refused": outcome.refused, "first_refused": outcome.first_refused}
            rows = _rows(engine, about)
        except Infeasible as why:
            about["infeasible"] = str(why)
        except Unsupported as why:
            about["skipped"] = str(why)
        folder = out / spec.folder
        side = {
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
        record.write(folder, rows, about, side=side)
    return folder


def _rows(engine: engines.Engine, about: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """The engine's rows; its statistics, whole only once these were asked for, go into `about`."""
    yield from engine.rows()
    about["end_s"] = engine.view().now_s
    about["stats"] = dict(engine.stats())
