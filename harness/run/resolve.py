"""Resolution of a spec: names become canonical, and numbers that the spec leaves open are set. The result is hashed."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.loop import engine, system
from harness.loop.guard import Fault, guarded
from harness.loop.replay import missing
from harness.policy import mix
from harness.policy.fields import asked, meant
from harness.policy.types import GIB, Infeasible, Unsupported, UserError
from harness.run import sources, streams
from harness.run.placement import check as placed
from harness.run.placement import homes, started
from harness.run.setup import SIMULATOR, Setup, blamed, load_models
from harness.run.spec import Spec

if TYPE_CHECKING:
    from traces.load import Trace
    from workloads.build import Origin
    from workloads.models import Served as Member


# fields of the specs with which engines are tried: these GPUs have room for every model
ROOMY: Mapping[str, Any] = {"trace": "sample", "models": "llama-3.2-1b*8", "gpus": 8}
MOST_COPIES = 64  # copies of a mix that are tried for a system with its own number of GPUs
ORACLE = "Cluster.plan:window"  # a system whose forecast knows the window has this in its `uses`
# the origin of such a system's plans, by that of the other systems'
KNOWN: Mapping[Origin, Origin] = {"held-out": "window", "prefix": "trace"}


class Traits(NamedTuple):
    """Facts of a spec's system and engine that resolution needs."""

    gpus: int
    reads_slo: bool
    oracle: bool  # its forecast is the window's own
    decision_s: float
    wall_clock: bool
    measured_on: Mapping[str, str]


def traits(spec: Spec) -> Traits:
    """Return facts about a spec's system and its engine, such as the number of GPUs. Nothing is started.

    The number of GPUs is the spec's, unless the system sets its own. Raises Failed if the system's file fails.
    """
    with blamed(spec):
        return _traits(unloaded(spec))


def unloaded(spec: Spec) -> Spec:
    """Return a spec with default load, SLO and placement, so that one cached result serves all specs of its system."""
    return replace(spec, rate_scale=1.0, scaling="rotate", seed=0, window_s=None, warmup_s=None, drain_s=None, slo="",
                   slo_s=(), placement="", homes=(), workload="trace", noise=None, token_times=False)  # fmt: skip


@cache
def _traits(spec: Spec) -> Traits:
    setup = Setup(spec)
    decision_s = getattr(system.module(spec.system), "DECISION_S", 0.0)
    if type(decision_s) not in (int, float) or not 0 <= decision_s < math.inf:
        raise Fault(f"DECISION_S is {decision_s!r}, not seconds")
    setup = _sized(setup)
    bare = setup.bare_engine
    try:
        uses = setup.policy.uses
    except (Infeasible, Unsupported):
        uses = frozenset[str]()
    return Traits(
        setup.spec.gpus, "Request.slo" in uses, ORACLE in uses, float(decision_s), bare.wall_clock, bare.measured_on
    )


def _sized(setup: Setup) -> Setup:
    """Return a setup with the number of GPUs that its system takes: a new setup if the system sets its own number."""
    if not hasattr(setup.make_policy, "gpus_needed"):
        return setup
    models = setup.cluster.models
    with guarded():
        needed = setup.make_policy.gpus_needed(models, setup.spec.node_gpus)
    return _holding(setup.spec, needed)


def _holding(spec: Spec, needed: int) -> Setup:
    """Return the setup of a system that sets its own number of GPUs, and needs at least `needed` of them.

    For a mix of GPU kinds, copies of the mix are added until the system starts. If the system does not start with any
    number that is tried, the setup has the largest of these numbers.
    """
    for gpus in islice(mix.counts(spec.gpu, needed), MOST_COPIES):
        setup = Setup(replace(spec, gpus=gpus))
        if not mix.mixed(spec.gpu) or _starts(setup):
            break
    return setup


def _starts(setup: Setup) -> bool:
    """Tell whether a policy has room for its models when it starts."""
    try:
        started(setup)
    except Infeasible:
        return False
    return True


def resolve(spec: Spec) -> Spec:
    """Return the spec to be hashed: names are canonical, open numbers are set. Raises UserError for unknown names."""
    from harness.engines.costs import quantities
    from traces.load import sized
    from workloads.models import with_files

    models = load_models(spec.models)
    if spec.profile.startswith("$"):
        raise UserError(f"profile {spec.profile}: the environment variable {spec.profile[1:].split('/')[0]} is not set")
    spec = replace(
        spec,
        system=_located(spec.system, ".py"),
        engine=engine.canonical(spec.engine),
        trace=_located(sized(spec.trace, len(models.members)), ".parquet"),
        models=with_files(_located(spec.models, ".toml"), os.path.abspath),
        table=spec.table and _located(spec.table, ".toml"),
        profile=_located(spec.profile, ".json"),
    )
    spec = _measured(spec)
    if (policy := Path(spec.system)).is_absolute() and policy.is_file():
        sources.imported(policy)  # one line for a file that is not Python
    setup = Setup(spec)
    trace = setup.trace
    streams.check(setup)
    if trace.greedy:
        spec = replace(spec, sampling="greedy")
    _contradict(spec, trace, models.names)
    streams.halves(setup)
    _hold(setup)
    known = traits(spec)
    if known.wall_clock:
        spec = _timed(spec)
    measured_on = ", ".join(f"{key} {value}" for key, value in known.measured_on.items())
    if spec.measured_on not in {"", measured_on}:
        raise UserError(f"this spec is of a run measured on {spec.measured_on}; here is {measured_on or spec.engine}")
    kinds = mix.names(spec.gpu)
    host = quantities.host(spec.host, kinds[0], spec.table)  # all kinds of a mix have the same costs of calls
    plan: Origin = KNOWN.get(spec.plan, spec.plan) if known.oracle else spec.plan
    plan = "trace" if spec.workload == "base" else plan
    reads = known.reads_slo and spec.workload == "trace"
    windowed, placement, at = _windowed(spec, trace, plan), spec.placement, spec.homes
    if placement and not at:
        placement = _located(placement, ".toml")
        at = homes(Setup(replace(spec, placement=placement, gpus=known.gpus, plan=plan)))
    elif at:
        placed(dict(at), Setup(replace(spec, gpus=known.gpus)), "homes: ")
    return replace(
        windowed,
        trace_sha256=trace.sha256,
        prefix_cache=None if trace.prefix is None else spec.prefix_cache is not False,
        gpus=known.gpus,
        plan=plan,
        placement=placement,
        homes=at,
        slo=spec.slo if reads else "",
        slo_s=spec.slo_s if reads else (),
        decision_s=known.decision_s if spec.decision_s is None else spec.decision_s,
        control_s=host.api_in_s if spec.control_s is None else spec.control_s,
        noise=spec.noise if spec.noise is not None else max(quantities.noise(k, spec.host, spec.table) for k in kinds),
        measured_on=measured_on,
        **setup.settings._asdict(),
    )


def _contradict(spec: Spec, trace: Trace, models: Sequence[str]) -> None:
    """Raise UserError if the spec contradicts its trace, its models or its engine."""
    if spec.trace_sha256 not in {"", trace.sha256}:
        raise UserError(f"trace {spec.trace} is not the one of this spec: its rows' sha256 is {trace.sha256}")
    if unknown := next((model for model, *_ in spec.slo_s if model not in models), None):
        raise UserError(f'slo_s."{unknown}": no such model in {spec.models}{meant(unknown, models)}')
    if spec.profile and (mix.mixed(spec.gpu) or asked(spec.engine).name != SIMULATOR):
        raise UserError("profile: policies see measured steps on the simulator alone, and on one kind of GPU")
    if spec.profile and not spec.profile.endswith(".json"):
        raise UserError(f'profile is "{spec.profile}", not the path of a .json')
    if spec.host_bytes is not None and asked(spec.engine).name != SIMULATOR:
        raise UserError(f"host_bytes: on {spec.engine} weights lie where they lie; {SIMULATOR} alone takes it")


def _windowed(spec: Spec, trace: Trace, plan: Origin) -> Spec:
    """Return the spec with its scaling, window and warm-up set; the trace decides those that the spec leaves open.

    Raises UserError if the run would have too many requests to fit in memory.
    """
    from workloads.build import FIRST_S, WARMUP_S, WARMUP_SHARE, closed, hold, window_span_s

    span_s = window_span_s(trace, plan) / (spec.rate_scale if spec.scaling == "time" else 1.0)
    window_s: float | None = span_s
    warmup_s, scaling = min(span_s, max(WARMUP_S, WARMUP_SHARE * span_s)), spec.scaling
    if scaling == "none":  # a warm-up would consist of the same requests
        warmup_s = 0.0
    if closed(trace) is not None:
        window_s, warmup_s, scaling = None, FIRST_S, "clients" if scaling == "rotate" else scaling
    window_s = window_s if spec.window_s is None else spec.window_s
    warmup_s = warmup_s if spec.warmup_s is None else spec.warmup_s
    if spec.workload == "trace":
        hold(trace, spec.rate_scale, scaling, window_s, warmup_s)
    return replace(spec, scaling=scaling, window_s=window_s, warmup_s=warmup_s)


def _measured(spec: Spec) -> Spec:
    """Return the spec with the canonical name of its GPU kind and, for a measured machine, that machine's settings.

    If the cost table describes a whole machine, it sets the fields that the spec leaves open. Raises UserError if the
    spec names a GPU or host other than the table's, or if it has both a table and a mix of GPU kinds.
    """
    from harness.engines.costs import quantities, servers

    if mix.mixed(spec.gpu):
        if spec.table is not None:
            raise UserError(f"table: a cost table is of one kind of GPU, and {spec.gpu} is a mix")
        mix.copies(spec.gpu, spec.gpus)
        return replace(spec, gpu=mix.canonical(spec.gpu, lambda kind: quantities.gpu(kind).kind))
    kind = quantities.gpu(spec.gpu, spec.table).kind
    if quantities.machine(spec.table) is None:
        return spec if spec.gpu == kind else replace(spec, gpu=kind)
    given = {"gpu": kind, "host": kind, **quantities.settings(spec.table)}
    plain = servers.bench()._asdict()  # the bench's settings give way too, to those that the machine was measured under
    open_ = {f.name for f in dataclasses.fields(Spec) if getattr(spec, f.name) in (f.default, plain.get(f.name), None)}
    for name in ("gpu", "host"):
        if name not in open_ and getattr(spec, name) != kind:
            raise UserError(f'{name} is "{getattr(spec, name)}", and cost table {spec.table} is of {kind}')
    return replace(spec, **{name: value for name, value in given.items() if name in open_})


def _timed(spec: Spec) -> Spec:
    """Return the spec of a run on a wall clock, where decisions, calls and noise take their real time.

    Raises UserError if the spec sets seconds for any of these, or scales a part of the machine.
    """
    for name in ("decision_s", "control_s", "noise"):
        if getattr(spec, name):
            raise UserError(f"{name} is {getattr(spec, name):g}: on {spec.engine} time is real, and none can be added")
    if spec.scaled:
        raise UserError(f"scaled.{spec.scaled[0][0]}: on {spec.engine} the machine is real, and nothing of it scales")
    return replace(spec, decision_s=0.0, control_s=0.0, noise=0.0)


def _located(name: str, suffix: str) -> str:
    """Make a file's path absolute, so that it is valid from any folder; return any other name unchanged."""
    return os.path.abspath(name) if name.endswith(suffix) else name  # noqa: PTH100 - a link keeps its name


def alone(setup: Setup, m: Member, tp: int) -> tuple[int, int]:
    """Return the bytes that a model alone takes on each of `tp` GPUs, and the bytes that engines may use there.

    For a mix of GPU kinds, take the GPUs with the most memory.
    """
    most = max((kind.spec for kind in setup.machine.all), key=lambda card: card.mem_bytes)
    return setup.alone(m, tp, most)


def _hold(setup: Setup) -> None:
    """Raise UserError if a model alone does not fit on its GPUs, or if the spec states more memory than there is.

    The model is taken at its own degree. The spec's `pool_bytes` may not exceed a GPU's memory, and its `host_bytes`
    may not exceed a node's.
    """
    from harness.engines.costs import shapes

    spec = setup.spec
    for card in (kind.spec for kind in setup.machine.all):
        if spec.pool_bytes is not None and spec.pool_bytes > card.mem_bytes:
            raise UserError(f"pool_bytes is {spec.pool_bytes}: {card.kind} has {card.mem_bytes}")
        if spec.host_bytes is not None and spec.host_bytes > card.host_bytes:
            raise UserError(f"host_bytes is {spec.host_bytes}: a node of {card.kind} has {card.host_bytes}")
    for m in setup.models.members:
        need, have = alone(setup, m, m.tp)
        if need <= have:
            continue
        way = "no tensor-parallel degree helps"
        for tp in (t for t in shapes.degrees(m.shape) if m.tp < t <= spec.node_gpus):
            more, room = alone(setup, m, tp)
            if more <= room:
                way = f"tp = {tp} in a model set would fit: --models FILE.toml"
                break
        raise UserError(
            f"{m.name} needs {need / GIB:.1f} GiB on each GPU, {spec.gpu} has {have / GIB:.1f} for the engine ({way})"
        )


@cache
def gaps(name: str, preset: str | None, engine: str) -> tuple[str, ...]:
    """Return the names that an engine lacks for a system with a preset; each combination is tried once per process.

    The trial is a run of the committed sample trace, with room for every model.
    """
    return lacking(Spec(name, preset=preset, engine=engine, **ROOMY))


def lacking(spec: Spec) -> tuple[str, ...]:
    """Return the names that a spec's engine lacks for its system, or any other reason why it cannot run."""
    with blamed(spec):
        setup = Setup(spec)
        if (have := len(setup.cluster.gpus)) < spec.gpus:
            setup = Setup(replace(spec, gpus=have))
        try:
            setup = _sized(setup)
            return tuple(missing(setup.policy, setup.engine))
        except Unsupported as why:
            return (str(why),)
        except Infeasible as why:
            return (f"room: {why}",)
