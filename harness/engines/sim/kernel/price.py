"""The price of a step: its seconds without competition, and its demands on its GPUs."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.cost import attend_s, read_bytes, table
from harness.engines.sim.kernel.far import cut_kernels, far_s
from harness.engines.sim.state import *


@jit
def ask(S: int, lane: int, solo: float, compute: float, hbm: float) -> None:
    """Set a lane's demand on each GPU of its instance, and its step's seconds without competition (`solo`).

    `compute` and `hbm` are the shares of a GPU's compute and memory bandwidth that the step uses.
    """
    lane_at(S, lane).slice_s = solo
    d = lane_at(S, lane).demand
    for _ in range(inst_at(S, batch_at(S, lane >> 1).inst).gpu_count):
        demand_at(S, d).compute = compute
        demand_at(S, d).hbm = hbm
        d = demand_at(S, d).next


@jit
def set_turn(S: int, lane: int, c: int, tokens: int, duty: float, layer_s: float) -> None:
    """Set the fields from which `rates` computes a lane's share of a round: `duty`, `fills` and `turn_s`.

    In a round, each lane that competes for a GPU has one turn. The lane's next step has `tokens` prompt tokens and
    takes `layer_s` seconds per layer.
    """
    n = lane_at(S, lane)
    k = cost_at(S)[c]
    w = 0.0  # 0: as decode steps, 1: as prompts
    if tokens > 0 and tokens >= k.many:
        w = 1.0
    elif tokens > k.few:
        w = (tokens - k.few) / (k.many - k.few)
    n.duty = duty
    n.fills = k.dec_fill + w * (k.pre_fill - k.dec_fill)
    n.turn_s = (1.0 if k.equal else (k.passes + w * (1.0 - k.passes)) * duty * layer_s) / n.max_rate


@jit
def price(
    S: int, lane: int, decodes: int, pieces: int, tokens: int, area: float, out: int, context: float, each: float
) -> tuple[float, float, float]:
    """Price a lane's next step by the formulas of `coef.py`, and record its kernels and its demands.

    The step has `decodes` members that decode, and `pieces` prompts or pieces of prompts. These pieces have `tokens`
    tokens in total, and `area` token pairs of causal attention. The step samples `out` tokens. Decode attention covers
    `context` tokens of local KV, and `each` tokens per member with remote KV (-1: the member's own context). Return
    three durations in seconds: of the matrix products and polls, of the host's work, and of the whole step (or slice)
    without competition. In a poll, the lane checks whether remote attention waits.
    """
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    i = batch_at(S, b).inst
    c = inst_at(S, i).cost
    k = cost_at(S)[c]
    far = batch_at(S, b).far if decodes > 0 else 0
    near = attend_s(S, c, decodes - far, context)
    decode = max(near, far_s(S, b, c, each)) if far > 0 else near
    gemm = table(grid_at(S), gemm_at(S)[c], decodes + tokens)
    if pieces > 0:
        gemm *= k.pre_x
    base = gemm + table(grid_at(S), head_at(S)[c], out)
    pre = k.pre0 * pieces + k.pre1 * tokens + k.pre2 * area
    gpu = base + decode + pre
    n.kernel_s[0] = gpu - decode + near if pieces > 0 else base + near
    n.kernel_count[0] = 1
    n.kernels = 1
    if n.op_s >= 0.0:
        polls = W.poll_s * cut_kernels(S, lane, c, decodes + tokens, out, gemm, near + pre)
        base += polls
        gpu = gpu + polls if pieces > 0 else base + decode  # another order of sums rounds differently, and changes rows
    host = k.host0 + k.host1 * (decodes + pieces)
    solo = gpu + host if k.serial else max(gpu, host)
    duty = k.pre_duty if pieces > 0 else k.dec_duty
    if duty <= 0.0:
        duty = min(1.0, gpu / solo)
    flops = k.fl_tok * (decodes + tokens) + k.fl_area * area
    nbytes = read_bytes(S, c, decodes + tokens) + k.kbytes * context
    compute, hbm = min(1.0, flops / (k.flops * solo)), min(1.0, nbytes / (k.hbm * solo))
    layers = model_at(S, inst_at(S, i).model).layers
    left = n.layers_left if n.layers_left > 0 else layers
    part = min(n.slice_layers, left) if n.slice_layers > 0 else left
    n.layers_left = left - part
    set_turn(S, lane, c, tokens, duty, solo / layers)
    solo *= part / layers
    ask(S, lane, solo, compute, hbm)
    return base, host, solo
