"""The devices of a run before it starts: engine fields, memory, link rates, and what policies may know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.engines.costs import quantities
from harness.engines.costs.profile import TableProfile
from harness.engines.machine import Config, machine, profile
from harness.engines.torch import costs
from harness.engines.torch.kind import Kind
from harness.engines.torch.nets import Net
from harness.engines.torch.pages import Arena
from harness.policy.fields import number
from harness.policy.types import Cluster, Gpu, Model


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of the engine, which a user sets as in `--engine torch+wide=...`."""

    wide: int = number(1, 1, 16)  # widths of a twin, in sixteenths of its shape's
    stuck_s: int = number(60, 1, 86400)  # seconds without an answer after which a worker is killed


def rates(config: Config, on: Kind) -> dict[str, float]:
    """Return each link's rate in GB/s: as the run sets it, or else the cost table, or else the device kind."""
    given, measured = on.links, quantities.machine(config.table)
    if measured is not None:
        spec = measured.spec
        values = {"h2d": spec.h2d, "d2h": spec.d2h, "peer": spec.nvlink, "disk": spec.disk}
        given = {link: value.value / 1e9 for link, value in values.items()}
    asked = {"h2d": config.pcie_gbps, "d2h": config.pcie_gbps, "peer": config.nvlink_gbps, "disk": config.disk_gbps}
    return {**given, **{link: rate for link, rate in asked.items() if rate is not None}}


def cluster(config: Config, on: Kind, nets: Mapping[str, Net], page_bytes: Mapping[str, int], arena: Arena) -> Cluster:
    """Return the devices and models in the form that policies read.

    `page_bytes` has the bytes of a KV page for each model.
    """
    gpu = Gpu("cpu" if on.name == "cpu" else config.gpu, 0, arena.size, on.sms, on.sm_choices)
    models = {}
    for m in config.models:
        net = nets[m.name]
        sizes = 1, arena.whole(net.weight_bytes), net.kv_token_bytes, page_bytes[m.name]
        models[m.name] = Model(net.shape.layers, *sizes, m.shape.max_tokens, m.ttft_slo_s, m.tpot_slo_s, kept_pages=0.0)
    known = _profile(config, on, nets, arena.size)
    return Cluster((gpu,) * config.gpus, models, dict(config.plan), known, dict(config.homes))


def _profile(config: Config, on: Kind, nets: Mapping[str, Net], mem_bytes: int) -> TableProfile:
    """Return the profile of step seconds that policies read.

    On cards, it is made from the run's cost table. On a CPU core, that table is used only if it describes a machine
    that was measured as a whole. Otherwise the profile is made from the coefficients for a core that come with the
    engine.
    """
    if on.name != "cpu" or quantities.machine(config.table) is not None:
        return profile(config, machine(config))
    shapes = {m.name: m.shape for m in config.models}
    return costs.profile(nets, shapes, rates(config, on), mem_bytes, config.gpus)
