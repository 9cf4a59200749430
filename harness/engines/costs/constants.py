"""Constants of a machine that a run may scale, each by a factor, for studies of sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from harness.engines.costs.coef import Tables
    from harness.engines.costs.process import Parts
    from harness.engines.costs.quantities import GpuSpec, HostProfile, Way

Factors = Mapping[str, float]  # a constant maps to its factor; 1 where none is named

CONSTANTS: Mapping[str, str] = {  # a name maps to what is multiplied
    "pcie": "bandwidth between a GPU and its host, each way",
    "nvlink": "bandwidth of copies between GPUs of a node (not of all-reduces within a step)",
    "net": "bandwidth between nodes",
    "disk": "bandwidth of a node's disk",
    "swap": "fixed seconds of a load of weights, beside the copy",
    "co_run": "seconds that a step takes longer beside other steps on its GPU",
    "passes": "layers of a decode step that pass for each layer of prompts beside it",
    "decode_fill": "part of a GPU's time that kernels of decode steps keep from other models, at most all",
    "prompt_tokens": "prompt tokens in a step from which its kernels take turns as those of prompts",
    "prompts": "seconds of kernels in steps with prompts, whatever their tokens",
    "step": "host time of a step",
    "process": "memory of an engine's process beside weights and KV",
    "reserve": "pages that a model with elastic KV memory keeps mapped",
}

GONE: Mapping[str, str] = {  # what a spec may no longer scale, and what stands for it
    "interference": "kernels of models on a GPU take turns, which cost tables state (co_run scales what others add)",
    "beside_prefill": "decode steps wait for prompts by turns, which cost tables state (passes: 1 to 3 layers a turn)",
}

# Where those come from that no table of `tables/` states.
SOURCES: Mapping[str, str] = {
    "process": "its parts by the formula of harness/engines/costs/process.py, which cites each",
    "reserve": "kvcached 0.1.6, KVCACHED_MIN_RESERVED_PAGES",
}


def of(factors: Factors, name: str) -> float:
    """Return the factor of a constant; 1 if `factors` has none for it."""
    return factors.get(name, 1.0)


def links(spec: GpuSpec, factors: Factors) -> GpuSpec:
    """Scale the rates of the links of a card and its node."""
    pcie = of(factors, "pcie")
    return spec._replace(
        h2d=pcie * spec.h2d,
        d2h=pcie * spec.d2h,
        nvlink=of(factors, "nvlink") * spec.nvlink,
        net=of(factors, "net") * spec.net,
        disk=of(factors, "disk") * spec.disk,
    )


def ladder(ways: Mapping[str, Way], factors: Factors) -> Mapping[str, Way]:
    """Return the ways to load, with the fixed seconds of each multiplied by the factor "swap"."""
    return {name: way._replace(fixed_s=of(factors, "swap") * way.fixed_s) for name, way in ways.items()}


def turns(tables: Tables, factors: Factors) -> Tables:
    """Scale the coefficients by which kernels of several models take turns on a GPU."""
    if not {"passes", "decode_fill", "prompt_tokens"} & set(factors):
        return tables
    cost = tables.cost.copy()
    cost["passes"] = np.maximum(1.0, of(factors, "passes") * cost["passes"])
    cost["dec_fill"] = np.minimum(1.0, of(factors, "decode_fill") * cost["dec_fill"])
    for end in ("few", "many"):
        cost[end] *= of(factors, "prompt_tokens")
    return tables._replace(cost=cost)


def host(profile: HostProfile, factors: Factors) -> HostProfile:
    """Scale the host time of an engine's step, and the kernel seconds of steps with prompts.

    The seconds of the engine's API, and of its sampler, which runs on the GPU, are not scaled.
    """
    by = of(factors, "step")
    return profile._replace(
        host0=by * profile.host0,
        host1=by * profile.host1,
        host_tp=by * profile.host_tp,
        scale_prefill=of(factors, "prompts") * profile.scale_prefill,
    )


def process(parts: Parts, factors: Factors) -> Parts:
    """Scale the memory of a process."""
    by = of(factors, "process")
    return parts._replace(inside=round(by * parts.inside), outside=round(by * parts.outside))
