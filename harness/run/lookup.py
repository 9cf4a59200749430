"""The names in a spec become things: trace, model set, machine, engine, policy; UserError for a name of nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import machine
from harness.engines.costs import quantities, shapes
from harness.loop import engine as engines
from harness.loop import system
from harness.loop.guard import Fault
from harness.policy import fields
from harness.policy.types import Cluster, Infeasible, Option, Plan, Shape, Unsupported, UserError
from harness.run.spec import LINKS, Spec

if TYPE_CHECKING:
    from traces.load import Trace
    from workloads.build import Assign, Origin
    from workloads.models import ModelSet


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


@lru_cache(8)
def trace_of(name: str) -> Trace:
    """A trace by name or path, or as a generator draws it (NAME+FIELD=VALUE...); UserError where there is none."""
    from traces.load import trace

    return trace(name)


def fit_of(spec: Spec) -> str | None:
    """How near a synthetic trace with a stream a model comes to what it is fitted to; None: nothing was measured."""
    from traces import realism

    return realism.fit_of(trace_of(spec.trace), models_of(spec.models).streams)


@cache
def models_of(name: str) -> ModelSet:
    """A model set by name, path or shapes; UserError where there is none."""
    from workloads.models import model_set

    return model_set(name)


def served_of(spec: Spec) -> ModelSet:
    """The models of a spec with the longest prompt + output that each serves: what it can, and the trace needs.

    The trace needs its longest, up to a power of two, as an operator would set it.
    """
    most = spec.served
    if most is None:
        most = 1 << (trace_of(spec.trace).longest_tokens - 1).bit_length()
    return models_of(spec.models).serving(most)


def fields_of(make: Any, spec: Spec) -> dict[str, Option]:
    """Keyword arguments of a system: its preset, then the spec's fields. UserError for what it does not take."""
    return fields.values(fields.Asked(spec.system, spec.preset, dict(spec.fields)), fields.domains(make), make.presets)


def config_of(spec: Spec) -> machine.Config:
    """What engines are told of a spec."""
    models = served_of(spec)
    slo = {model: pair for model, *pair in spec.slo_s}
    served = (
        machine.Served(m.name, m.shape, m.tp, *slo.get(m.name, ()))._replace(degrees=_degrees(m.shape, spec.table))
        for m in models.members
    )
    return machine.Config(
        models=tuple(served),
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
        process=spec.process,
        process_bytes=spec.process_bytes,
        pool_bytes=spec.pool_bytes,
        sharing=spec.sharing,
        **links_of(spec),
        scaled=dict(spec.scaled),
        noise=spec.noise or 0.0,
        seed=spec.seed,
        start_s=-(spec.warmup_s or 0.0),
        token_times=spec.token_times,
        plan=_plan(spec.trace, models, spec.rate_scale, spec.plan, spec.seed, spec.assign),
        homes=dict(spec.homes),
    )


def _degrees(shape: Shape, table: str | None) -> tuple[int, ...]:
    """The degrees at which a model may be served beside its own; none on a machine that was measured whole."""
    return shapes.degrees(shape) if quantities.machine(table) is None else ()


@lru_cache(16)
def _plan(
    trace: str, models: ModelSet, rate_scale: float, origin: Origin, seed: int, assign: Assign
) -> Mapping[str, Plan]:
    """What planners are told, once for all that ask while a run is made."""
    from workloads.build import plan

    return plan(trace_of(trace), models, rate_scale, origin, seed, assign)


def machine_of(spec: Spec) -> machine.Machine:
    """The cost tables of a spec, computed once for all runs of a process."""
    return _machine(spec.gpu, spec.host, spec.models, spec.table, tuple(links_of(spec).items()), spec.scaled)


@cache
def _machine(
    gpu: str,
    host: str,
    models: str,
    table: str | None,
    links: tuple[tuple[str, float | None], ...],
    scaled: tuple[tuple[str, float], ...],
) -> machine.Machine:
    members = models_of(models).members
    served = tuple(machine.Served(m.name, m.shape, m.tp, degrees=_degrees(m.shape, table)) for m in members)
    rates: dict[str, Any] = dict(links)
    return machine.machine(machine.Config(models=served, gpu=gpu, host=host, table=table, scaled=dict(scaled), **rates))


def links_of(spec: Spec) -> dict[str, Any]:
    """The link rates of a spec, by the name of their field."""
    return {name: getattr(spec, name) for name in LINKS}


def engine_of(spec: Spec) -> engines.Engine:
    """The engine of a spec, made and no more, without options; UserError where there is none of that name."""
    return engines.find(spec.engine)(config_of(spec), {}, machine_of(spec))


def cluster_of(spec: Spec) -> Cluster:
    """What policies may know of a spec's machine, with pages as small as they come and a process a model."""
    return engine_of(spec).cluster


def assemble(spec: Spec) -> tuple[system.System, engines.Engine]:
    """The policy and the engine of a spec, which is not ready yet.

    Raises Unsupported where the engine has fewer GPUs, Infeasible where the policy says so at once, Fault where it
    fails.
    """
    make, config = system.find(spec.system), config_of(spec)
    keywords, make_engine, tables = fields_of(make, spec), engines.find(spec.engine), machine_of(spec)

    def made(options: Mapping[str, Option]) -> engines.Engine:
        return make_engine(config, options, tables)

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
    if spec.homes and "Cluster.homes" not in policy.uses:
        raise Unsupported("Cluster.homes: it places models by itself")
    found = made(policy.options)
    if (found.cluster.gpus, found.cluster.models) != (cluster.gpus, cluster.models):
        policy = system.build(make, found.cluster, keywords)  # options decide the pages and processes it may know of
    return policy, found


def departs(spec: Spec, options: Mapping[str, Option]) -> str | None:
    """How the engine of a run is not that of its system's paper; None where it is, or the paper needs none of its own.

    A system whose `options` name a way of sharing needs it; "none" is kept whatever a run says.
    """
    own = options.get("sharing", "none")
    if own == "none" or spec.sharing in ("own", own):
        return None
    return f"its paper has sharing={own}, this run sharing={spec.sharing}"
