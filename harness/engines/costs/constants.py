"""Constants of a machine that a run may scale, each by a factor, for studies of sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.engines.costs.process import Parts
    from harness.engines.costs.quantities import GpuSpec, HostProfile, Way

Factors = Mapping[str, float]  # by constant; 1 where none is named

CONSTANTS: Mapping[str, str] = {  # by name: what is multiplied
    "pcie": "bandwidth between a GPU and its host, each way",
    "nvlink": "bandwidth of copies between GPUs of a node (not of all-reduces within a step)",
    "net": "bandwidth between nodes",
    "disk": "bandwidth of a node's disk",
    "swap": "fixed seconds of a load of weights, beside the copy",
    "co_run": "seconds that a step takes longer beside other steps on its GPU",
    "interference": "seconds of a step beside other steps on its GPU, after their shares; at least 1",
    "beside_prefill": "seconds of a decode step beside a prefill on the same SMs, after their shares; at least 1",
    "step": "host time of a step",
    "process": "memory of an engine's process beside weights and KV",
    "reserve": "pages that a model with elastic KV memory keeps mapped",
}

BESIDE = ("interference", "beside_prefill")  # of steps beside others: at least 1

# Where those come from that no table of `tables/` states.
SOURCES: Mapping[str, str] = {
    "process": "its parts by the formula of harness/engines/costs/process.py, which cites each",
    "reserve": "kvcached 0.1.6, KVCACHED_MIN_RESERVED_PAGES",
    "co_run": "max-min shares of compute and HBM bandwidth among the steps on a GPU, as under MPS; a model, not fitted",
    # 1.195 is all that a server of that pair loses; by shares alone a light pair loses 1.06 (`fit.anchors`), so that
    # 1.195 after shares reads it high.
    "interference": "none beyond shares. Tried are 1.195 and 1.5, an assumption. The former is the TPOT of two vLLM "
    "servers (Qwen3-4B-FP8, A100-80GB, MPS, 60 % of the SMs each) over that of one alone (medians 62.5 and 52.3 ms). "
    "Its source is gopebble.com, case study NVIDIA MPS vs dedicated GPU allocation for LLM inference",
    "beside_prefill": "none beyond shares. Tried is 5.4, measured on an H200 for llama-3.1-8b and a prompt of 2,048 "
    "tokens on another stream. A decode step of 1 sequence takes 5.97 times as long as alone, one of 64 "
    "sequences 4.83 times (results/h200/corun.md)",
}


def of(factors: Factors, name: str) -> float:
    """Return the factor of a constant."""
    return factors.get(name, 1.0)


def links(spec: GpuSpec, factors: Factors) -> GpuSpec:
    """Scale the links of a card and its node."""
    pcie = of(factors, "pcie")
    return spec._replace(
        h2d=pcie * spec.h2d,
        d2h=pcie * spec.d2h,
        nvlink=of(factors, "nvlink") * spec.nvlink,
        net=of(factors, "net") * spec.net,
        disk=of(factors, "disk") * spec.disk,
    )


def ladder(ways: Mapping[str, Way], factors: Factors) -> Mapping[str, Way]:
    """Return the ways to load with scaled fixed seconds."""
    return {name: way._replace(fixed_s=of(factors, "swap") * way.fixed_s) for name, way in ways.items()}


def host(profile: HostProfile, factors: Factors) -> HostProfile:
    """Scale the host time of an engine's step; its API and its sampler, which runs on the GPU, stay."""
    by = of(factors, "step")
    return profile._replace(host0=by * profile.host0, host1=by * profile.host1, host_tp=by * profile.host_tp)


def process(parts: Parts, factors: Factors) -> Parts:
    """Scale the memory of a process."""
    by = of(factors, "process")
    return parts._replace(inside=round(by * parts.inside), outside=round(by * parts.outside))
