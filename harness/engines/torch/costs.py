"""Seconds of a device's steps and loads that policies may know before a run: seven numbers for all networks.

    step = step_s + layer_s L + seq_s (B + n) + byte_s W + flop_s 2 (P (m - 1) + H (B + n - 1))
           + kv_s K C + area_s A area

The network has L layers, P weights in its layers and H weights in its LM head. W is the bytes of the weights that a
step reads. K is the bytes of KV per token. A is the FLOPs of attention for one query token and one key token.

The step has B decodes with C tokens of context in all, n prompts, and m tokens in all; `area` is as in
engines/costs/coef.py. The seven numbers are fitted to steps that `bench calibrate torch-steps` times on an idle
machine. On a share s of a device, a step takes 1 / s of these seconds, because its lane sleeps for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import forms, quantities
from harness.engines.costs.coef import COST
from harness.engines.costs.forms import Number, Quantity
from harness.engines.costs.profile import Row, TableProfile
from harness.engines.costs.quantities import GpuSpec
from harness.engines.torch.kind import CPU, WAYS
from harness.engines.torch.nets import Net
from harness.policy.types import Shape

TABLE = Path(__file__).parent / "cpu.toml"
SHARES = np.arange(1, CPU.sms + 1) / CPU.sms
F8 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Numbers(Quantity):
    """The fitted coefficients of a step's seconds, and the seconds that a worker process takes to start."""

    step_s: Number
    layer_s: Number
    seq_s: Number
    byte_s: Number
    flop_s: Number
    kv_s: Number
    area_s: Number
    start_s: Number


NAMES = ("step_s", "layer_s", "seq_s", "byte_s", "flop_s", "kv_s", "area_s")  # `features` gives them in this order


class Work(NamedTuple):
    """The work of a step: its decodes and their context tokens, its prompts and their tokens and attention area."""

    decodes: int = 0
    ctx_tokens: float = 0.0
    prompts: int = 0
    prompt_tokens: int = 0
    area: float = 0.0


def numbers() -> Numbers:
    """Read the fitted numbers."""
    return forms.read(TABLE, Numbers)


def features(net: Net, work: Work) -> list[float]:
    """Return the factors by which the coefficients in NAMES are multiplied, in the order of NAMES.

    The seconds of a step are the sum of these products.
    """
    s, rows = net.shape, work.decodes + work.prompts
    tokens = work.decodes + work.prompt_tokens
    head = s.vocab * s.hidden
    layers = net.weight_bytes // net.float_bytes - head * (1 if s.tied else 2)
    pairs = 4 * s.layers * s.q_heads * s.head_dim
    multiplied = 2.0 * (layers * (tokens - 1) + head * (rows - 1))
    return [
        1.0,
        s.layers,
        rows,
        net.float_bytes * (layers + head),
        multiplied,
        net.kv_token_bytes * work.ctx_tokens,
        pairs * work.area,
    ]


def row(net: Net, fitted: Numbers) -> Row:
    """Return the coefficients of a network's steps as a row of a cost table."""
    rates = [getattr(fitted, name) for name in NAMES]

    def seconds(work: Work) -> float:
        return float(np.dot(features(net, work), rates))

    base, more = seconds(Work(1)), seconds(Work(0, 0.0, 1, 2)) - seconds(Work(0, 0.0, 1, 1))
    per_seq_s = seconds(Work(2)) - base - more  # what a sequence adds, with its part of the LM head
    cost = dict.fromkeys(COST.names or (), 0.0) | {
        "host1": per_seq_s,
        "serial": 1.0,
        "dec2": net.kv_token_bytes * fitted.kv_s,
        "pre2": seconds(Work(0, 0.0, 1, 1, 1.0)) - seconds(Work(0, 0.0, 1, 1)),
    }
    gemm = [base - per_seq_s, base - per_seq_s + more]
    rate = SHARES.copy()
    return Row(cost, [1, 2], gemm, [0.0, 0.0], SHARES, np.ones(1), rate[:, None], rate)


def profile(
    nets: Mapping[str, Net], shapes: Mapping[str, Shape], links: Mapping[str, float], mem_bytes: int, devices: int
) -> TableProfile:
    """Return the profile from which policies read the seconds of steps, loads and moves of these networks.

    `links` has the rate of each link in GB/s.
    """
    fitted = numbers()
    h2d, d2h, peer, disk = (1e9 * links[name] for name in ("h2d", "d2h", "peer", "disk"))
    spec = GpuSpec(
        "cpu", "a core", mem_bytes, CPU.sms, 1, math.inf, math.inf, h2d, d2h, peer, peer, disk, CPU.host_bytes
    )
    ways = {
        name: quantities.Way(
            fitted.start_s if way.starts else 0.0,
            "spread" if way.spread else "disk" if way.source == "disk" else "pcie",
            way.part * h2d,
        )
        for name, way in WAYS.items()
    }
    weight_bytes = {(name, 1): net.weight_bytes for name, net in nets.items()}
    rows = {(name, 1): row(net, fitted) for name, net in nets.items()}
    return TableProfile(rows, spec, ways, weight_bytes, shapes, {}, devices)
