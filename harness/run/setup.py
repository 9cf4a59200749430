"""The setup of a run: the trace, models, machine, engine and policy that its spec names, each looked up once.

An unknown name raises UserError.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import machine as machines
from harness.engines.costs import profiled, quantities, servers, shapes
from harness.loop import engine as engines
from harness.loop import system
from harness.loop.guard import Fault
from harness.policy import fields, mix
from harness.policy.types import Cluster, Infeasible, Inst, Jobs, Option, Plan, Shape, Unsupported, UserError
from harness.run.spec import LINKS, Spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from traces.load import Trace
    from workloads.build import Origin
    from workloads.models import ModelSet, Served
    from workloads.picking import Assign

    F8 = NDArray[np.float64]
    I4 = NDArray[np.int32]


SIMULATOR = "sim"  # the engine that takes GPUs of several kinds


class Failed(UserError):
    """The error for policies that raised an exception, returned an invalid answer or did not end.

    `why` has, by label, the failure and the command that checks the system. An error in one system's file ends that
    system's runs and no others.
    """

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)

    @property
    def lines(self) -> list[str]:
        """A line for each system."""
        return [f"{label}: {what}" for label, what in self.why.items()]


@contextmanager
def blamed(spec: Spec) -> Iterator[None]:
    """Turn a Fault that a spec's policy causes within the block into Failed."""
    try:
        yield
    except Fault as fault:
        name = spec.system
        if name.endswith(".py"):
            near = os.path.relpath(name)
            name = str(Path(name).resolve()) if near.startswith("..") else f"./{near}"
        raise Failed({spec.label: f"{fault}; bench check {shlex.quote(name)}"}) from fault


@lru_cache(8)
def load_trace(name: str) -> Trace:
    """Load or draw a trace by name (for a generator NAME+FIELD=VALUE...) or path. Raises UserError if it is missing."""
    from traces.load import trace

    return trace(name)


@cache
def load_models(name: str) -> ModelSet:
    """Load a model set by name, path or shapes; UserError if it does not exist."""
    from workloads.models import model_set

    return model_set(name)


@dataclass(frozen=True)
class Setup:
    """A spec with the objects that its fields name. Each object is looked up or made once, at its first use.

    The engine and the policy serve one run only. For another run of the same spec, make another Setup.
    """

    spec: Spec

    @cached_property
    def trace(self) -> Trace:
        """The trace that is replayed."""
        return load_trace(self.spec.trace)

    @cached_property
    def models(self) -> ModelSet:
        """The models of the set, in the shapes in which a cost table's machine serves them, if there is one."""
        return _models(self.spec.models, self.spec.table, self.spec.sampling)

    @cached_property
    def served(self) -> ModelSet:
        """The models, each with its limit on the tokens of prompt + output.

        That is the model's own limit or, if it is less, `spec.served`. If the spec leaves `served` open, the longest
        request of the trace is used, rounded up to a power of two, as an operator would set it.
        """
        most = self.spec.served
        if most is None:
            most = 1 << (self.trace.longest_tokens - 1).bit_length()
        return self.models.serving(most)

    def _longest(self) -> int:
        return max(m.shape.max_tokens for m in self.served.members)

    @property
    def realism(self) -> str | None:
        """A text on how closely a synthetic trace matches its target, for the models' streams; None if not measured."""
        from traces import realism

        return realism.fit_of(self.trace, self.models.streams)

    @property
    def end_s(self) -> float:
        """The latest end of the run, in seconds from the window's start."""
        window_s, drain_s = self.spec.window_s, self.spec.drain_s
        return math.inf if window_s is None or drain_s is None else window_s + drain_s

    # ------------------------------------------------------------ machine

    @property
    def measured(self) -> bool:
        """True if the cost table describes a machine that was measured as a whole (engines/costs/whole.py)."""
        return quantities.machine(self.spec.table) is not None

    @cached_property
    def settings(self) -> servers.Settings:
        """The settings of the servers: the spec's own values, and for the rest those of the host profile's release.

        A release's settings depend on the card; for a mix of GPU kinds, each setting is the least over the kinds. Real
        servers, and a machine that was measured as a whole, get the bench's own settings instead of a release's. If the
        spec states `mem_fraction`, the bytes of a process are computed from the parts of the process.
        """
        spec = self.spec
        if fields.asked(spec.engine).name != SIMULATOR or self.measured:
            usual = [servers.bench()]
        else:
            tp = max(m.tp for m in self.models.members)
            cards = (quantities.gpu(kind, spec.table) for kind in mix.names(spec.gpu))
            usual = [servers.settings(spec.host, card, tp, self._longest) for card in cards]
        parts = zip(*usual, strict=True)
        least = servers.Settings._make(None if None in each else min(each) for each in parts)
        if spec.mem_fraction is not None:
            least = least._replace(process_bytes=None)
        stated: dict[str, Any] = {name: getattr(spec, name) for name in least._fields}
        return least._replace(**{name: value for name, value in stated.items() if value is not None})

    @cached_property
    def machine(self) -> machines.Machine:
        """The cost tables, computed once for all runs of a process."""
        spec = self.spec
        links = tuple(_links(spec).items())
        models = spec.models, spec.table, spec.sampling
        return _machine(spec.gpu, spec.host, models, links, spec.scaled, spec.profile)

    @cached_property
    def config(self) -> machines.Config:
        """The configuration of the engine."""
        spec, models = self.spec, self.served
        slo = {model: pair for model, *pair in spec.slo_s}
        served = (
            machines.Served(m.name, m.shape, m.tp, *slo.get(m.name, ()))._replace(
                degrees=_degrees(m.shape, spec.table, spec.profile)
            )
            for m in models.members
        )
        return machines.Config(
            models=tuple(served),
            gpu=spec.gpu,
            gpus=spec.gpus,
            node_gpus=spec.node_gpus,
            host=spec.host,
            table=spec.table,
            block_tokens=spec.block_tokens,
            watermark=spec.watermark,
            process=spec.process,
            pool_bytes=spec.pool_bytes,
            host_bytes=spec.host_bytes,
            sharing=spec.sharing,
            **self.settings._asdict(),
            **_links(spec),
            scaled=dict(spec.scaled),
            noise=spec.noise or 0.0,
            seed=spec.seed,
            start_s=-(spec.warmup_s or 0.0),
            window_s=spec.window_s or math.inf,
            token_times=spec.token_times,
            plan=_plan(spec.trace, models, spec.rate_scale, spec.plan, spec.seed, spec.assign),
            homes=dict(spec.homes),
            profile=spec.profile,
            **_grains(spec),
        )

    def alone(self, m: Served, tp: int, card: quantities.GpuSpec) -> tuple[int, int]:
        """Return the bytes that a model alone takes on each of `tp` cards, and the bytes that engines may use there."""
        spec = self.spec
        config = machines.Config(
            models=(machines.Served(m.name, m.shape, tp),),
            gpus=tp,
            host=spec.host,
            pool_bytes=spec.pool_bytes,
            scaled=dict(spec.scaled),
            **self.settings._asdict(),
        )
        held = machines.memory(config, card)
        return shapes.weight_bytes(m.shape, tp) + held.process_bytes[0], held.gpu_bytes

    def kv_bytes(self, m: Served, card: quantities.GpuSpec) -> int:
        """Return the KV memory that a model alone, at its own degree, has on each card; below 0 if it has none."""
        taken, room = self.alone(m, m.tp, card)
        return room - taken

    def base_gpu(self, asked: str = "") -> str:
        """Return the kind of GPU for the latencies of a model alone, which an SLO multiplies.

        The kind is `asked`, if given, or else that of the run. For a mix it is the first kind on which each model fits
        with one longest request. Raises UserError for an unknown kind, and if no kind of a mix is large enough. Also
        raises UserError if `asked` is not the kind of the cost table, or of an engine other than the simulator.
        """
        spec = self.spec
        if asked:
            try:
                kind = quantities.gpu(asked).kind
            except UserError as error:
                raise UserError(f"SLO base: {error}") from None
            bound = spec.table is not None or fields.asked(spec.engine).name != SIMULATOR
            if bound and kind != (here := quantities.gpu(spec.gpu, spec.table).kind):
                has = "the cost table" if spec.table is not None else f"engine {spec.engine}"
                raise UserError(f"SLO base on {kind}: {has} has {here}")
            return kind
        if not mix.mixed(spec.gpu):
            return spec.gpu
        for card in (kind.spec for kind in self.machine.all):
            if all(self._holds(m, card) for m in self.served.members):
                return card.kind
        ways = "--slo P95@KIND, or seconds"
        raise UserError(f"no kind of {spec.gpu} holds every model alone: say which is the base of the SLO ({ways})")

    def _holds(self, m: Served, card: quantities.GpuSpec) -> bool:
        """Tell whether a model with one longest request fits, at its own degree, on cards that serve no other model."""
        return m.shape.max_tokens * shapes.kv_token_bytes(m.shape, m.tp) <= self.kv_bytes(m, card)

    # ------------------------------------------------------------ engine and policy

    def make_engine(self, options: Mapping[str, Option]) -> engines.Engine:
        """Make an engine with a system's options, without starting it. Raises UserError for an unknown name.

        Also raises UserError for a mix of GPU kinds on an engine other than the simulator, because only the simulator
        accepts a mix.
        """
        if mix.mixed(self.spec.gpu) and fields.asked(self.spec.engine).name != SIMULATOR:
            raise UserError(f"engine {self.spec.engine}: {SIMULATOR} alone takes a mix of kinds, as {self.spec.gpu}")
        return engines.find(self.spec.engine)(self.config, options, self.machine)

    @cached_property
    def bare_engine(self) -> engines.Engine:
        """The engine, made without any option of a system."""
        return self.make_engine({})

    @property
    def cluster(self) -> Cluster:
        """The cluster that a policy without options gets, with the smallest pages and one process per model."""
        return self.bare_engine.cluster

    @cached_property
    def make_policy(self) -> Any:
        """The class of the system, a `system.Make`."""
        return system.find(self.spec.system)

    @cached_property
    def keywords(self) -> dict[str, Option]:
        """The keyword arguments of the system: its preset, then the spec's fields. UserError if one is not accepted."""
        asked = fields.Asked(self.spec.system, self.spec.preset, dict(self.spec.fields))
        return fields.values(asked, fields.domains(self.make_policy), self.make_policy.presets)

    @property
    def policy(self) -> system.System:
        """The policy. Raises the errors of `engine`."""
        return self._assembled[0]

    @property
    def engine(self) -> engines.Engine:
        """The engine with the options of the policy, not ready yet.

        Raises Unsupported if the engine has fewer GPUs than the spec, Infeasible if the policy finds no room when it is
        made, and Fault if the policy fails.
        """
        return self._assembled[1]

    @cached_property
    def _assembled(self) -> tuple[system.System, engines.Engine]:
        spec, keywords, most = self.spec, self.keywords, self.config.group_gpus
        if mix.mixed(spec.gpu) and not getattr(self.make_policy, "mixed", False):
            raise Unsupported(f"GPUs of several kinds: {spec.label} takes all for one kind")
        if big := next((m for m in self.config.models if m.tp > spec.gpus), None):
            raise Infeasible(f"{big.name} takes {big.tp} GPUs, there are {spec.gpus}")
        if mix.mixed(spec.gpu) and (big := next((m for m in self.config.models if m.tp > most), None)):
            raise Infeasible(f"{big.name} takes {big.tp} GPUs of one kind and node, {spec.gpu} has at most {most}")
        cluster = self.cluster
        if len(cluster.gpus) < spec.gpus:
            raise Unsupported(f"{spec.gpus} GPUs")
        try:
            policy = system.build(self.make_policy, cluster, keywords)
        except Infeasible as why:  # one process a GPU takes least memory, and only a policy that exists can ask for it
            try:
                cluster = self.make_engine({"process": "gpu"}).cluster
                policy = system.build(self.make_policy, cluster, keywords)
            except Infeasible:
                raise why from None
        if spec.homes and "Cluster.homes" not in policy.uses:
            raise Unsupported("Cluster.homes: it places models by itself")
        engine = self.make_engine(policy.options) if policy.options else self.bare_engine
        if (engine.cluster.gpus, engine.cluster.models) != (cluster.gpus, cluster.models):
            # its options decide the pages and processes that it may know of
            policy = system.build(self.make_policy, engine.cluster, keywords)
        simulated = fields.asked(spec.engine).name == SIMULATOR
        if spec.served is not None and simulated and policy.options.get("memory") != "unlimited":
            _serving(engine.cluster, spec.block_tokens)
        return policy, engine

    # ------------------------------------------------------------ requests

    def jobs(self) -> Jobs:
        """Build the requests of a resolved spec. Raises UserError if they cannot be served, scaled or stored."""
        from workloads import slo
        from workloads.base import base
        from workloads.build import build, hold
        from workloads.picking import in_pieces, window_fold

        spec, trace, models = self.spec, self.trace, self.served
        if spec.workload == "base":
            return _cached(base(trace, models, spec.seed, spec.assign), spec)
        hold(trace, spec.rate_scale, spec.scaling, spec.window_s, spec.warmup_s or 0.0)
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
            if in_pieces(trace):
                raise UserError(
                    f"{trace.name}: {len(trace):,} requests are too many for an SLO by each one's solo latency"
                )
            alone = self.solo_s(jobs.model, jobs.prompt_tokens, jobs.output_tokens, gpu=rule.gpu)
            jobs = slo.by_isolated(jobs, rule, *alone)
        return _cached(jobs, spec)

    def solo_s(self, model: I4, prompt_tokens: I4, output_tokens: I4, *, gpu: str = "") -> tuple[F8, F8]:
        """Compute TTFT and TPOT in seconds of each request alone on an idle GPU, by the cost table and without noise.

        `model` has indices into the spec's set; `gpu` has the meaning of `asked` in `base_gpu`. The spec's scaled
        constants and the profile that policies see are ignored. So runs that differ in these have the same SLOs.
        """
        import numpy as np

        spec, kind = self.spec, self.base_gpu(gpu)
        alone = replace(spec, scaled=(), profile="")
        if kind != spec.gpu:
            alone = replace(alone, gpu=kind, gpus=max(m.tp for m in self.models.members))
        profile = (self if alone == spec else Setup(alone)).cluster.profile
        host = quantities.host(spec.host, kind, spec.table)
        insts = [Inst(m.name, tuple(range(m.tp))) for m in self.models.members]
        keys = np.stack((model, prompt_tokens, output_tokens), axis=1)
        unique, back = np.unique(keys, axis=0, return_inverse=True)
        pairs = []
        for m, prompt, output in unique.tolist():
            try:
                ttft_s = host.api_in_s + profile.prefill_s(insts[m], prompt) + host.api_out_s
                tpot_s = profile.step_s(insts[m], 1, prompt + max(1, output) / 2)  # affine in the context
                pairs.append((ttft_s, tpot_s))
            except Unsupported as why:
                raise UserError(f"no SLO by solo latency on {spec.engine}: it has no {why}") from None
        first_s, later_s = np.array(pairs).reshape(-1, 2)[back.reshape(-1)].T
        return first_s, later_s


# ------------------------------------------------------------------ parts


def _serving(cluster: Cluster, block_tokens: int) -> None:
    """Raise Infeasible if KV memory is too small for a model's longest request. The message has the length that fits.

    A server would not start with so little memory. Each model is considered alone, on GPUs with the most memory, at the
    degree that leaves room for the most tokens.
    """
    most = max(gpu.mem_bytes for gpu in cluster.gpus)
    for name, model in cluster.models.items():
        each = [model.at(tp) for tp in model.degrees if tp <= len(cluster.gpus)] or [model]
        tokens = max((most - its.weight_bytes) // its.kv_token_bytes for its in each)
        if tokens < model.max_tokens:
            fits = max(0, tokens) // block_tokens * block_tokens
            raise Infeasible(
                f"{name} serves {model.max_tokens:,} tokens, and KV memory has room for {fits:,} (--served {fits})"
                if fits
                else f"{name} has no room for KV"
            )


def _degrees(shape: Shape, table: str | None, profile: str) -> tuple[int, ...]:
    """Return the degrees at which a model may be served in addition to its own; empty on a machine measured as a whole.

    If policies see a profile, these are the degrees at which the profile was measured.
    """
    every = shapes.degrees(shape) if quantities.machine(table) is None else ()
    return tuple(tp for tp in every if tp in profiled.degrees(profile, shape)) if profile else every


def _models(name: str, table: str | None, sampling: str) -> ModelSet:
    models, measured = load_models(name), quantities.machine(table)

    def served(shape: Shape) -> Shape:
        shape = shape._replace(sampled=False) if sampling == "greedy" else shape
        return shape if measured is None else measured.served(shape)

    return replace(models, members=tuple(replace(m, shape=served(m.shape)) for m in models.members))


@lru_cache(16)
def _plan(
    trace: str, models: ModelSet, rate_scale: float, origin: Origin, seed: int, assign: Assign
) -> Mapping[str, Plan]:
    """Return the forecasts that planners see, by model. They are cached: several callers need them for a run."""
    from workloads.build import plan

    return plan(load_trace(trace), models, rate_scale, origin, seed, assign)


@cache
def _machine(
    gpu: str,
    host: str,
    models: tuple[str, str | None, str],
    links: tuple[tuple[str, float | None], ...],
    scaled: tuple[tuple[str, float], ...],
    profile: str,
) -> machines.Machine:
    members, table = _models(*models).members, models[1]
    served = tuple(machines.Served(m.name, m.shape, m.tp, degrees=_degrees(m.shape, table, profile)) for m in members)
    rates: dict[str, Any] = dict(links)
    return machines.machine(
        machines.Config(models=served, gpu=gpu, host=host, table=table, scaled=dict(scaled), **rates)
    )


def _grains(spec: Spec) -> dict[str, Any]:
    """Return the config fields that a cost table's machine sets: sizes of elastic KV pages and of copied pieces."""
    measured, grains = quantities.machine(spec.table), dict[str, Any]()
    if measured is not None and measured.pages is not None:
        grains |= {"buffer_bytes": measured.pages.buffer_bytes, "kept_pages": float(measured.pages.kept)}
    if measured is not None and measured.piece_bytes is not None:
        grains |= {"piece_bytes": measured.piece_bytes}
    return grains


def _links(spec: Spec) -> dict[str, Any]:
    """Return the link rates of a spec, by the name of their field."""
    return {name: getattr(spec, name) for name in LINKS}


def _cached(jobs: Jobs, spec: Spec) -> Jobs:
    """Keep the prefix blocks of a workload if the spec has a prefix cache; drop them otherwise.

    The trace has an id for each block of a fixed number of tokens. Raises UserError if the spec's `block_tokens` does
    not divide this number.
    """
    if jobs.prefix is None or not spec.prefix_cache:
        return replace(jobs, prefix=None)
    if jobs.prefix.block_tokens % spec.block_tokens:
        raise UserError(
            f"block_tokens is {spec.block_tokens}, no divisor of the {jobs.prefix.block_tokens} of which the trace has "
            "ids: no prefix cache (--no-prefix-cache)"
        )
    return jobs
