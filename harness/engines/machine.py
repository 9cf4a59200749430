"""A run's machine: its models, GPUs and settings, its cost tables, and the facts that policies may know.

It configures every engine. This module runs nothing, and none of its code is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import coefficients, constants, process, profiled, quantities, shapes, whole
from harness.engines.costs.coef import Tables
from harness.engines.costs.profile import MixedProfile, TableProfile, row
from harness.engines.costs.servers import Admission
from harness.policy import mix
from harness.policy.actions import Run
from harness.policy.events import Failed
from harness.policy.types import (
    KEPT_PAGES,
    MIB,
    Cluster,
    Gpu,
    Gpus,
    Jobs,
    Model,
    Plan,
    Profile,
    Shape,
    Sizes,
    UserError,
)

# The piece of a transfer that nothing can overtake. Copies from pinned memory are issued in chunks of 16 to 64 MiB, far
# above the 1 MiB from which PCIe runs at full speed; a chunk on the wire is not cut. 64 MiB take 1.2 ms at 55 GB/s.
PIECE_BYTES = 64 * MIB

Refusal = tuple[Failed, str]  # says which kind, and why
Tokens = NDArray[np.int64]
# Values of option `kv` with contiguous KV: all that a request may ever use is reserved when it is let in.
CONTIGUOUS = ("max", "pow2", "oracle")


def unfit(order: Run, sms: int) -> Refusal | None:
    """Return the refusal of a `Run` that no GPU of `sms` SMs can execute; None if one can."""
    if order.slice_layers is not None and (order.slice_layers < 1 or order.phase != "prefill"):
        return "never", "a slice is of a prefill, and has at least one layer"
    if order.op_s is not None and not order.op_s > 0:
        return "never", "kernels of no time"
    if (order.for_s is not None and not order.for_s >= 0) or (order.steps or 0) < 0:
        return "never", "a turn takes a time or a count of steps, none below 0"
    if order.sms is not None and not 0 < order.sms <= sms:
        return "never", f"no partition of {order.sms} SMs"
    return None


class Served(NamedTuple):
    """A model as this run serves it."""

    name: str
    shape: Shape
    tp: int = 1  # its tensor-parallel degree, unless a policy names a place with another number of GPUs
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    degrees: tuple[int, ...] = ()  # at which it may be served beside `tp`

    def at(self, tp: int) -> Served:
        """Return the same model at another tensor-parallel degree.

        Raises ValueError if the model may not be served at that degree.
        """
        if tp != self.tp and tp not in self.degrees:
            raise ValueError(f"{self.name} runs on {self.tp} GPUs, not {tp}")
        return self._replace(tp=tp, degrees=(self.tp, *self.degrees))


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a run's machine, which are the same for all systems."""

    models: tuple[Served, ...]
    gpu: str = "h100"  # the kind of all, or a mix of kinds (policy/mix.py)
    gpus: int = 1
    node_gpus: int = 8
    host: str = "vllm-0.15"
    table: str | None = None
    pcie_gbps: float | None = None  # GB/s in one direction of the links; None: the card's
    nvlink_gbps: float | None = None
    net_gbps: float | None = None
    disk_gbps: float | None = None
    host_bytes: int | None = None  # bytes of a node's memory for the weights used last; None: it holds all weights
    scaled: constants.Factors = field(default_factory=dict)  # multiplies constants of the machine
    block_tokens: int = 16
    batch_cap: int = 256
    chunk_tokens: int = 2048
    prefill_tokens: int = 16384  # most tokens of a step of whole prompts
    piece_bytes: int = PIECE_BYTES
    watermark: float = 0.01
    admission: Admission = "prompt"
    mem_fraction: float = 0.90
    process: Literal["own", "model"] = "own"  # processes as the system's engine has them, or one a model for all
    sharing: Literal["own", "fluid", "turns"] = "own"  # processes share a GPU the system's way, or one way for all
    process_bytes: int | None = None  # bytes of each beside weights; None: by its parts (engines/costs/process.py)
    pool_bytes: int | None = None  # bytes of each GPU for weights and KV, processes beside it; None: by `mem_fraction`
    buffer_bytes: int = 2 * MIB  # kvcached: one page id maps as much in each layer, for K and for V
    kept_pages: float = KEPT_PAGES  # pages of elastic KV that a model keeps mapped while its weights are in
    noise: float = 0.0
    seed: int = 0
    window_s: float = math.inf  # statistics are of [0, window_s)
    start_s: float = 0.0
    token_times: bool = False
    plan: Mapping[str, Plan] = field(default_factory=dict)
    homes: Mapping[str, Gpus] = field(default_factory=dict)  # each model's home; empty: homes are not given
    profile: str = ""  # a file of measured steps that policies see; "": they see the cost table's

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each GPU. Raises UserError if the GPUs are not a whole number of copies of the mix."""
        return mix.kinds(self.gpu, self.gpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each GPU."""
        return mix.nodes(self.gpu, self.gpus, self.node_gpus)

    @property
    def group_gpus(self) -> int:
        """The largest number of GPUs in a tensor-parallel group; a group has GPUs of one node and one kind."""
        return min(self.node_gpus, max(n for _, n in mix.copies(self.gpu, self.gpus)))


class Machine(NamedTuple):
    """The costs of a run's machine: cost tables, GPU specification, ways to load, host costs, time slices and polls.

    For a mix of GPU kinds it is the machine of the first kind, and `others` has those of the other kinds.
    """

    tables: Tables
    spec: quantities.GpuSpec
    ladder: Mapping[str, quantities.Way]
    host: quantities.HostProfile
    quantum_s: float = 0.0  # least seconds of a process's slice of a GPU where processes take turns
    poll_s: float = 0.0  # seconds of a look for others' attention after a kernel, in orders with `op_s`
    switching: float = 0.0  # share of a slice that a switch to another process takes in addition
    others: Mapping[str, Machine] = {}  # a kind maps to its machine

    def of(self, kind: str) -> Machine:
        """Return the machine of a kind."""
        return self.others.get(kind, self)

    @property
    def all(self) -> tuple[Machine, ...]:
        """The machines of all kinds."""
        return self, *self.others.values()

    @property
    def stacked(self) -> Tables:
        """The cost tables of all kinds as one: the rows of the first kind, then those of the other kinds."""
        if not self.others:
            return self.tables
        each = [machine.tables for machine in self.all]
        by_row = {
            name: np.concatenate([getattr(t, name) for t in each])
            for name in ("cost", "gemm", "head", "dec_rate", "pre_rate", "kernels")
        }
        return self.tables._replace(**by_row)


def machine(config: Config, host: quantities.HostProfile | None = None) -> Machine:
    """Return the machine that a configuration names.

    A fit, which tries several host profiles, passes `host` in place of the configuration's. Raises UserError for a mix
    with a cost table, and for a mix whose kinds differ in the costs of API calls.
    """
    if mix.mixed(config.gpu):
        return _mixed(config, host)
    rows = [(m.shape, m.tp) for m in priced_models(config)]
    c, spec = config, quantities.gpu(config.gpu, config.table)
    rates = {"h2d": c.pcie_gbps, "d2h": c.pcie_gbps, "nvlink": c.nvlink_gbps, "net": c.net_gbps, "disk": c.disk_gbps}
    links: dict[str, Any] = {link: 1e9 * rate for link, rate in rates.items() if rate is not None}
    q, host = quantities.quantities(c.gpu, c.table), host or quantities.host(c.host, c.gpu, c.table)
    host = constants.host(host, c.scaled)
    measured = quantities.machine(c.table)
    priced = coefficients.coefficients(rows, q, spec, host) if measured is None else whole.tables(rows, measured)
    return Machine(
        constants.turns(priced, c.scaled),
        constants.links(spec._replace(**links), c.scaled),
        constants.ladder(quantities.ladder(c.gpu, c.table), c.scaled),
        host,
        quantities.quantum_s(),
        quantities.poll_s(),
        quantities.switching(),
    )


def _mixed(config: Config, host: quantities.HostProfile | None) -> Machine:
    """Return the machine of a mix."""
    if config.table is not None:
        raise UserError(f"table: a cost table is of one kind of GPU, and {config.gpu} is a mix")
    each = {kind: machine(replace(config, gpu=kind, gpus=1), host) for kind in mix.names(config.gpu)}
    first, *others = each.values()
    for other in others:
        calls = [(h.api_in_s, h.api_out_s, h.lookahead_steps) for h in (first.host, other.host)]
        if calls[0] != calls[1]:
            kinds = f"{first.spec.kind} and {other.spec.kind}"
            raise UserError(f"host {config.host} has other costs of calls on {kinds}: {config.gpu} needs equal ones")
    return first._replace(others=dict(list(each.items())[1:]))


def power_above(n: Tokens) -> Tokens:
    """Round each of these numbers, which are at least 1, up to a power of two."""
    exact: Tokens = 1 << np.ceil(np.log2(n)).astype(np.int64)
    return exact


def reserved_blocks(config: Config, kv: str, jobs: Jobs) -> Tokens:
    """Return the KV blocks that each request reserves when it is admitted, under the option `kv`.

    Contiguous KV (`max`, `pow2`, `oracle`) is one chunk, whose number of blocks is rounded up to a power of two. With
    `max`, the chunk fits the longest sequence of the request's model, or the request itself if that is longer. With
    `pow2`, it fits the prompt, and the output rounded up to a power of two of tokens. With `oracle`, it fits the prompt
    and the output. These are the three versions of Orca in PagedAttention (SOSP 2023, section 6.1). Paged KV reserves
    the blocks of the prompt and the output.
    """
    prompt, output = jobs.prompt_tokens.astype(np.int64), jobs.output_tokens.astype(np.int64)
    tokens = prompt + (power_above(output) if kv == "pow2" else output)
    if kv == "max":
        tokens = np.maximum(tokens, np.array([m.shape.max_tokens for m in config.models], np.int64)[jobs.model])
    blocks: Tokens = -(-tokens // config.block_tokens)
    return power_above(blocks) if kv in CONTIGUOUS else blocks


def priced_models(config: Config) -> list[Served]:
    """List the models to which the rows of the cost tables belong.

    First comes every model at its own tensor-parallel degree, then each model at its other degrees.
    """
    return [*config.models, *(m.at(tp) for m in config.models for tp in m.degrees if tp != m.tp)]


def block_bytes(config: Config, model: Served) -> int:
    """Return the bytes of one KV block on each GPU of a model's group."""
    return config.block_tokens * shapes.kv_token_bytes(model.shape, model.tp)


def granule_bytes(config: Config, model: Served, elastic: bool) -> int:
    """Return the least bytes of KV memory that a model takes at a time.

    That is one block. With elastic KV memory it is one page id of kvcached, which maps memory for K and for V in every
    layer.
    """
    return model.shape.layers * 2 * config.buffer_bytes if elastic else block_bytes(config, model)


def kept_pages(config: Config) -> float:
    """Return the pages that a model with elastic KV memory keeps mapped while its weights are in."""
    return constants.of(config.scaled, "reserve") * config.kept_pages


def memory(config: Config, spec: quantities.GpuSpec, layout: process.Layout = "model") -> process.Memory:
    """Return the bytes of each GPU that engines may use, and the part that each model's process takes of them.

    A process is priced at its model's own tensor-parallel degree.
    """
    if config.pool_bytes is not None:
        return process.Memory(config.pool_bytes, (0,) * len(config.models))
    processes = [(parts(config, m), m.tp) for m in config.models]
    return process.memory(spec.mem_bytes, config.mem_fraction, processes, config.gpus, laid_out(config, layout))


def footprint_bytes(config: Config, model: Served, layout: process.Layout = "model") -> int:
    """Return the bytes that a model's weights and process together take on each GPU while the model is loaded."""
    if config.pool_bytes is not None:
        return shapes.weight_bytes(model.shape, model.tp)
    layout = laid_out(config, layout)
    configured = next(parts(config, m) for m in config.models if m.name == model.name)
    every = [parts(config, m) for m in config.models] if layout == "gpu" else [configured]  # only "gpu" reads more
    held = process.process_bytes(parts(config, model), configured, every, layout)
    return shapes.weight_bytes(model.shape, model.tp) + held


def parts(config: Config, model: Served) -> process.Parts:
    """Return the bytes that a model's process takes in addition to weights and KV."""
    if config.process_bytes is not None:
        taken = process.Parts(config.process_bytes, 0)
    else:
        tokens, graphs = config.chunk_tokens or config.prefill_tokens, "eager" not in config.host
        taken = process.parts(model.shape, model.tp, tokens, config.batch_cap, graphs)
    return constants.process(taken, config.scaled)


def laid_out(config: Config, layout: process.Layout) -> process.Layout:
    """Return the layout of the processes in this run, given the layout that the system's engine asks for.

    If the run sets one process per model for all systems, "gpu" becomes "kept", and every other layout becomes "model".
    """
    if config.process == "model":
        return "kept" if layout == "gpu" else "model"
    return layout


def cluster(
    config: Config, elastic: bool = False, priced: Machine | None = None, layout: process.Layout = "model"
) -> Cluster:
    """Return the GPUs, models and costs that policies may know before the start."""
    priced = priced or machine(config)

    def gpu(kind: str, node: int) -> Gpu:
        spec = priced.of(kind).spec
        choices = tuple(range(spec.sm_step, spec.sms, spec.sm_step))
        return Gpu(kind, node, memory(config, spec, layout).gpu_bytes, spec.sms, choices)

    at = list(zip(config.kinds, config.nodes, strict=True))
    each = {kind_node: gpu(*kind_node) for kind_node in dict.fromkeys(at)}
    gpus = tuple(each[kind_node] for kind_node in at)

    def sizes(m: Served) -> Sizes:
        return Sizes(
            m.tp,
            footprint_bytes(config, m, layout),
            shapes.kv_token_bytes(m.shape, m.tp),
            granule_bytes(config, m, elastic),
        )

    most = config.group_gpus
    models = {
        m.name: Model(
            m.shape.layers,
            *sizes(m),
            m.shape.max_tokens,
            m.ttft_slo_s,
            m.tpot_slo_s,
            tuple(sizes(m.at(tp)) for tp in sorted({m.tp, *m.degrees}) if tp in {m.tp, *range(1, most + 1)}),
            kept_pages(config),
        )
        for m in config.models
    }
    shared = MappingProxyType  # read-only, since the engine reads the same objects as policies
    return Cluster(
        gpus,
        shared(models),
        shared(dict(config.plan)),
        _profile(config, priced),
        shared(dict(config.homes)),
        config.host_bytes,
    )


def _profile(config: Config, priced: Machine) -> Profile:
    """Return the profile that policies query: measured steps if the run names their file, else the cost tables."""
    if config.profile:
        models = {m.name: (m.shape, m.tp) for m in config.models}
        return profiled.measured_profile(config.profile, models, priced.spec.sms, profile(config, priced))
    if not priced.others:
        return profile(config, priced)
    by_kind = {
        kind: profile(replace(config, gpu=kind, gpus=n), priced.of(kind))
        for kind, n in mix.copies(config.gpu, config.gpus)
    }
    return MixedProfile([by_kind[kind] for kind in config.kinds], config.nodes)


def profile(config: Config, priced: Machine) -> TableProfile:
    """Return the cost table of one kind of GPU as a profile that policies can query."""
    models = priced_models(config)
    return TableProfile(
        {(m.name, m.tp): row(priced.tables, k) for k, m in enumerate(models)},
        priced.spec,
        priced.ladder,
        {(m.name, m.tp): shapes.weight_bytes(m.shape, m.tp) for m in models},
        {m.name: m.shape for m in config.models},
        quantities.quantities(config.gpu, config.table),
        min(config.node_gpus, config.gpus),
    )
