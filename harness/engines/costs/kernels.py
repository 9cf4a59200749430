"""Seconds of kernels on a GPU or a part of it: formulas whose constants are quantities of `tables/*.toml`."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.engines.costs.quantities import F8, GpuSpec, Toml
from harness.engines.costs.shapes import gemms
from harness.policy.types import Shape, UserError

BF16 = 2  # bytes


class Part(NamedTuple):
    """A part of a GPU, as fractions of its arithmetic and of its HBM bandwidth."""

    sms: float | F8 = 1.0
    hbm: float | F8 = 1.0


WHOLE = Part()


def gemm_s(q: Toml, spec: GpuSpec, m: ArrayLike, n: ArrayLike, k: ArrayLike, part: Part = WHOLE) -> F8:
    """Return the seconds of one bf16 GEMM, m tokens x n outputs x k inputs, weights in HBM.

    The library picks a tile shape and how often to split k; a choice costs whole waves of tiles over the SMs, or the
    bytes, whichever is more; we take the cheapest choice, and correct it by a coarse table over (m, n, k).
    """
    m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
    least = BF16 * (m * k + n * k + m * n) / (spec.hbm * part.hbm)
    stream, sms = least / q["hbm_frac"], spec.sms * part.sms
    best: F8 = np.full((), np.inf)
    for tm, tn, flops_frac in q["tiles"]:
        tile = 2 * tm * tn / (flops_frac * spec.flops / spec.sms)
        count = np.ceil(m / tm) * np.ceil(n / tn)
        for split in (1, 2, 4, 8):
            waves = np.ceil(count * split / sms) * (tile * k / split + q["fill_s"])
            partial = 4 * 2 * split * m * n / (spec.hbm * part.hbm) if split > 1 else 0.0  # fp32, out and back
            best = np.minimum(best, np.maximum(stream, waves) + partial)
    physics: F8 = np.maximum(least, 2 * m * n * k / (spec.flops * part.sms))
    seconds: F8 = (q["launch_s"] + best) * _correction(q, m, n, k)
    return np.maximum(seconds, physics)


def decode_s(
    q: Toml,
    spec: GpuSpec,
    B: ArrayLike,
    ctx: ArrayLike,
    heads: ArrayLike,
    kv: ArrayLike,
    d: ArrayLike,
    part: Part = WHOLE,
) -> F8:
    """Return the seconds of one layer's decode attention: B sequences of `ctx` tokens, per-GPU heads of `d` numbers.

    With one query head a KV head (`q["mha"]`) other kernels run than with grouped ones (`q["gqa"]`).
    """
    B, ctx, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (B, ctx, heads, kv, d))
    mha, gqa = (_decode_s(q[group], spec, B, ctx, heads, kv, d, part) for group in ("mha", "gqa"))
    return np.where(heads == kv, mha, gqa)


def _decode_s(q: Toml, spec: GpuSpec, B: F8, ctx: F8, heads: F8, kv: F8, d: F8, part: Part) -> F8:
    stream = 2 * BF16 * B * ctx * kv * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    lone = q["lone_s"] * ctx * d / 128  # a block that reads its context alone
    arith = 4 * B * ctx * heads * d / (q["flops_frac"] * spec.flops * part.sms)
    blocks = B * (kv * q["kv_head_s"] + heads * q["head_s"]) / part.sms
    tail = q["tail_s"] * np.sqrt(ctx * d / 128) / (B * kv) ** q["tail_power"]  # few blocks, long contexts
    merge = q["merge_s"] * (ctx > 128)  # contexts beyond one block are split and merged
    whole = q["floor_s"] + merge + blocks + np.maximum(stream, lone) + arith + tail
    return cast("F8", whole * _correction(q, ctx, B * kv))


def prefill_s(
    q: Toml,
    spec: GpuSpec,
    n: ArrayLike,
    tokens: ArrayLike,
    heads: ArrayLike,
    kv: ArrayLike,
    d: ArrayLike,
    part: Part = WHOLE,
) -> F8:
    """Return seconds of a layer's causal attention over n prompts of `tokens` tokens: tiles of 128 queries."""
    n, L, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (n, tokens, heads, kv, d))
    frac = np.interp(np.log(d), np.log(np.array(q["head_dims"], dtype=np.float64)), q["flops_frac"])
    key_s = 4 * 128 * d / (frac * spec.flops / spec.sms)  # one tile against one key
    work = n * heads * np.ceil(L / 128) * (key_s * (L + 128) / 2 + q["tile_s"]) / (spec.sms * part.sms)
    longest = q["longest"] * (key_s * L + q["tile_s"])
    p = q["power"]
    stream = BF16 * n * L * 2 * (heads + kv) * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    body = np.maximum((work**p + longest**p) ** (1 / p), stream)
    return cast("F8", (q["floor_s"] + body) * _correction(q, L, n * heads, heads / kv))


def _correction(q: Toml, *at: F8) -> F8:
    """Return the factors by which measured times differ from the mechanism's; 1 where the quantity has none.

    They lie on a coarse log2 grid. Their logarithms are interpolated linearly, and are constant beyond its edges.
    """
    if not q.get("factors"):
        return np.ones(())
    table = np.log(np.array(q["factors"], dtype=np.float64)).reshape([len(axis) for axis in q["axes"]])
    out: F8 = np.zeros(())
    corners: list[tuple[F8, tuple[NDArray[np.int64], ...]]] = [(np.ones(()), ())]
    for x, axis in zip(at, q["axes"], strict=True):
        knots = np.log2(np.array(axis, dtype=np.float64))
        u = np.interp(np.log2(np.maximum(x, 1.0)), knots, np.arange(len(knots), dtype=np.float64))
        i = np.minimum(u.astype(np.int64), len(knots) - 2)
        corners = [(w * v, (*at_, j)) for w, at_ in corners for v, j in ((1 - (u - i), i), (u - i, i + 1))]
    for w, index in corners:
        out = out + w * table[index]
    return np.exp(out)


def small_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8) -> F8:
    """Return the seconds a layer of the two norms, rope, activation and cache write of `m` tokens."""
    heads = shape.q_heads / tp + 2 * max(1.0, shape.kv_heads / tp)
    wide = (3 if shape.gated else 2) * shape.ffn / tp
    token = BF16 * (8 * shape.hidden + 2 * heads * shape.head_dim + wide)
    return cast("F8", np.maximum(q["floor_s"], m * token / (q["hbm_frac"] * spec.hbm)))


def all_reduce_s(q: Toml, tp: int, elements: ArrayLike) -> F8:
    """Return seconds of an all-reduce of bf16 `elements` over `tp` GPUs: log-log between knots, linear beyond."""
    x, elements = np.array(q["elements"], dtype=np.float64), np.asarray(elements, dtype=np.float64)
    if tp == 1:
        return np.zeros_like(elements)
    if f"tp{tp}_s" not in q:
        raise UserError(f"no all-reduce times over {tp} GPUs; tensor parallelism is 1, 2, 4 or 8")
    y = np.array(q[f"tp{tp}_s"], dtype=np.float64)
    inner = np.exp(np.interp(np.log(elements), np.log(x), np.log(y)))
    # A link slower than the one measured: a ring over it, at least.
    ring = 2 * (tp - 1) / tp * BF16 * elements / float(q.get("wire", np.inf))
    table: F8 = np.where(elements > x[-1], y[-1] * elements / x[-1], inner)
    return np.maximum(table, ring)


def part_of(q: Toml, share: F8) -> Part:
    """Return the part of a GPU that a share of its SMs is: its arithmetic, and the HBM bandwidth that it can pull."""
    a, p = q["saturation"], q["power"]
    return Part(share ** q["arith_power"], ((1 + a**p) / (1 + (a / share) ** p)) ** (1 / p))


def decode_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, B: F8, ctx: float, part: Part = WHOLE) -> F8:
    """Return the seconds of a decode step's kernels on a part of each GPU; the launch floors do not shrink."""
    return _kernels_s(q, spec, shape, tp, B, B, part) + shape.layers * decode_s(
        q["decode"], spec, B, ctx, shape.q_heads / tp, max(1.0, shape.kv_heads / tp), shape.head_dim, part
    )


def prefill_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, n: F8, tokens: F8, part: Part = WHOLE) -> F8:
    """Return the seconds of a prefill step's kernels, n prompts of `tokens` tokens, on a part of each GPU."""
    return _kernels_s(q, spec, shape, tp, n * tokens, n, part) + shape.layers * prefill_s(
        q["prefill"], spec, n, tokens, shape.q_heads / tp, max(1.0, shape.kv_heads / tp), shape.head_dim, part
    )


def _kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8, out: F8, part: Part) -> F8:
    layer = sum((gemm_s(q["gemm"], spec, m, n, k, part) for n, k in gemms(shape, tp)), start=np.zeros(()))
    layer = layer + np.maximum(q["small"]["floor_s"], small_s(q["small"], spec, shape, tp, m) / part.hbm)
    layer = layer + 2 * all_reduce_s(q["all_reduce"], tp, m * shape.hidden)
    head = gemm_s(q["gemm"], spec, out, shape.vocab / tp, shape.hidden, part)
    return cast("F8", shape.layers * layer + head)


def layer_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: int) -> tuple[list[float], list[float]]:
    """Return seconds of a layer's kernels for `m` tokens, in order of running: before attention, and after it.

    Norm, QKV, rope, cache write; output, norm, gate and up, activation, down. The output and the down projection are
    each followed by an all-reduce where the layer is cut over GPUs. The five small ones count as equally long: in steps
    of few tokens each costs little more than its launch.
    """
    n, k = np.array(gemms(shape, tp)).T
    qkv, out, up, down = gemm_s(q["gemm"], spec, m, n, k).tolist()
    small = float(small_s(q["small"], spec, shape, tp, np.array(m))) / 5
    reduced = [float(all_reduce_s(q["all_reduce"], tp, m * shape.hidden))] * (tp > 1)
    return [small, qkv, small, small], [out, *reduced, small, up, small, down, *reduced]
