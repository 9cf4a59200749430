"""A run's devices before anything starts: fields of the engine, memory, link rates, and what policies may know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.engines.costs import quantities
from harness.engines.costs.profile import TableProfile
from harness.engines.machine import Config, machine, profile
from harness.engines.torch import costs
from harness.engines.torch.costs import SM_STEP, SMS
from harness.engines.torch.nets import Net
from harness.engines.torch.pages import whole
from harness.policy.fields import number
from harness.policy.types import MIB, Cluster, Gpu, Model

MEMORY = 512 * MIB  # of a device, unless `pool_bytes` says otherwise
LINKS = {"h2d": 0.1, "d2h": 0.1, "peer": 0.8, "disk": 0.01}  # GB/s; H100's 55, 55, 450 and 5.5 less the same part


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields that `--engine torch+wide=...` sets."""

    wide: int = number(1, 1, 16)  # sixteenths of a shape's widths that its twin has
    stuck_s: int = number(60, 1, 86400)  # a worker that does not answer for so long is stuck, and is killed


def rates(config: Config) -> dict[str, float]:
    """Return GB/s of the links: as the run says, else as its cost table was measured, else LINKS."""
    given, measured = LINKS, quantities.machine(config.table)
    if measured is not None:
        spec = measured.spec
        values = {"h2d": spec.h2d, "d2h": spec.d2h, "peer": spec.nvlink, "disk": spec.disk}
        given = {link: value.value / 1e9 for link, value in values.items()}
    asked = {"h2d": config.pcie_gbps, "d2h": config.pcie_gbps, "peer": config.nvlink_gbps, "disk": config.disk_gbps}
    return {**given, **{link: rate for link, rate in asked.items() if rate is not None}}


def cluster(config: Config, nets: Mapping[str, Net], page_bytes: Mapping[str, int], mem_bytes: int) -> Cluster:
    """Return what policies may know of devices that serve these networks; pages are of KV, by model."""
    gpu = Gpu("cpu", 0, mem_bytes, SMS, tuple(range(SM_STEP, SMS, SM_STEP)))
    models = {}
    for m in config.models:
        net = nets[m.name]
        sizes = 1, whole(net.weight_bytes), net.kv_token_bytes, page_bytes[m.name]
        models[m.name] = Model(net.shape.layers, *sizes, m.shape.max_tokens, m.ttft_slo_s, m.tpot_slo_s, kept_pages=0.0)
    known = _profile(config, nets, mem_bytes)
    return Cluster((gpu,) * config.gpus, models, dict(config.plan), known, dict(config.homes))


def _profile(config: Config, nets: Mapping[str, Net], mem_bytes: int) -> TableProfile:
    """Return what policies may know of steps: of the cost table that the run names, else of the shipped one."""
    if quantities.machine(config.table) is not None:
        return profile(config, machine(config))
    shapes = {m.name: m.shape for m in config.models}
    return costs.profile(nets, shapes, rates(config), mem_bytes, config.gpus)
