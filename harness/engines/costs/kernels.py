"""Seconds of kernels on a GPU or a part of it: formulas whose constants are quantities of `tables/*.toml`."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike

from harness.engines.costs import experts
from harness.engines.costs.correction import correction
from harness.engines.costs.quantities import F8, GpuSpec, Toml
from harness.engines.costs.shapes import KV_BYTES, format_of, heads_of
from harness.policy.parameters import alike, attention_gpus
from harness.policy.types import Experts, Format, Latent, Shape, UserError

BF16 = 2  # bytes


class Part(NamedTuple):
    """A part of a GPU, as fractions of its arithmetic and of its HBM bandwidth."""

    sms: float | F8 = 1.0
    hbm: float | F8 = 1.0


WHOLE = Part()


def gemm_s(q: Toml, spec: GpuSpec, m: ArrayLike, n: ArrayLike, k: ArrayLike, part: Part = WHOLE) -> F8:
    """Return the seconds of one GEMM of m tokens x n outputs x k inputs, with weights in HBM.

    The GEMM library picks a tile shape, and the number of parts into which it splits k. Each choice takes the longer of
    two times: that of whole waves of tiles over the SMs, and that of its bytes over HBM. The seconds are those of the
    fastest choice, corrected by a coarse table over (m, n, k), and at least those of the roofline. For formats other
    than bf16 the quantity states the bytes of weights and inputs, and the FLOP/s as a multiple of bf16's.
    """
    m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
    if "weight_bytes" in q:
        moved = q["input_bytes"] * m * k + q["weight_bytes"] * n * k + BF16 * m * n
        flops = q["flops_x"] * spec.flops
    else:
        moved, flops = BF16 * (m * k + n * k + m * n), spec.flops
    least = moved / (spec.hbm * part.hbm)
    stream, sms = least / q["hbm_frac"], spec.sms * part.sms
    best: F8 = np.full((), np.inf)
    for tm, tn, flops_frac in q["tiles"]:
        tile = 2 * tm * tn / (flops_frac * flops / spec.sms)
        count = np.ceil(m / tm) * np.ceil(n / tn)
        for split in (1, 2, 4, 8):
            waves = np.ceil(count * split / sms) * (tile * k / split + q["fill_s"])
            partial = 4 * 2 * split * m * n / (spec.hbm * part.hbm) if split > 1 else 0.0  # fp32, out and back
            best = np.minimum(best, np.maximum(stream, waves) + partial)
    physics: F8 = np.maximum(least, 2 * m * n * k / (flops * part.sms))
    seconds: F8 = (q["launch_s"] + best) * correction(q, m, n, k)
    return np.maximum(seconds, physics)


def product_s(
    q: Toml, spec: GpuSpec, stored: Format, m: ArrayLike, n: ArrayLike, k: ArrayLike, part: Part = WHOLE
) -> F8:
    """Return the seconds of a GEMM with weights in the format `stored`; `q` has all quantities of a GPU kind.

    A format without a quantity `gemm_FORMAT` is taken as weight-only: its weights are read from HBM in their own
    format, and multiplied as bf16.
    """
    return gemm_s(gemm_of(q, stored), spec, m, n, k, part)


def gemm_of(q: Toml, stored: Format) -> Toml:
    """Return the quantity that prices GEMMs with weights in the format `stored`."""
    if stored.name == "bf16":
        return cast("Toml", q["gemm"])
    if f"gemm_{stored.name}" in q:
        return {**q[f"gemm_{stored.name}"], "weight_bytes": stored.weight_bytes}
    plain = {key: q["gemm"][key] for key in ("launch_s", "fill_s", "hbm_frac", "tiles")}
    return {**plain, "input_bytes": BF16, "weight_bytes": stored.weight_bytes, "flops_x": 1}


def decode_s(
    q: Toml,
    spec: GpuSpec,
    B: ArrayLike,
    ctx: ArrayLike,
    heads: ArrayLike,
    kv: ArrayLike,
    d: ArrayLike,
    part: Part = WHOLE,
    kv_bytes: int = BF16,
) -> F8:
    """Return the seconds of one layer's decode attention for B sequences of `ctx` tokens each.

    `heads` and `kv` are the numbers of query and KV heads on each GPU, and `d` is the dimension of a head. Query heads
    that each have a KV head (`q["mha"]`) run other kernels than grouped-query heads (`q["gqa"]`).
    """
    B, ctx, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (B, ctx, heads, kv, d))
    mha, gqa = (_decode_s(q[group], spec, B, ctx, heads, kv, d, part, kv_bytes) for group in ("mha", "gqa"))
    return np.where(heads == kv, mha, gqa)


def _decode_s(q: Toml, spec: GpuSpec, B: F8, ctx: F8, heads: F8, kv: F8, d: F8, part: Part, kv_bytes: int) -> F8:
    stream = 2 * kv_bytes * B * ctx * kv * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    lone = q["lone_s"] * ctx * d / 128  # a block that reads its context alone
    arith = 4 * B * ctx * heads * d / (q["flops_frac"] * spec.flops * part.sms)
    blocks = B * (kv * q["kv_head_s"] + heads * q["head_s"]) / part.sms
    tail = q["tail_s"] * np.sqrt(ctx * d / 128) / (B * kv) ** q["tail_power"]  # few blocks, long contexts
    merge = q["merge_s"] * (ctx > 128)  # contexts beyond one block are split and merged
    whole = q["floor_s"] + merge + blocks + np.maximum(stream, lone) + arith + tail
    return cast("F8", whole * correction(q, ctx, B * kv))


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
    """Return the seconds of a layer's causal attention over n prompts of `tokens` tokens.

    The kernels work in tiles of 128 queries.
    """
    n, L, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (n, tokens, heads, kv, d))
    frac = np.interp(np.log(d), np.log(np.array(q["head_dims"], dtype=np.float64)), q["flops_frac"])
    key_s = 4 * 128 * d / (frac * spec.flops / spec.sms)  # one tile against one key
    work = n * heads * np.ceil(L / 128) * (key_s * (L + 128) / 2 + q["tile_s"]) / (spec.sms * part.sms)
    longest = q["longest"] * (key_s * L + q["tile_s"])
    p = q["power"]
    stream = BF16 * n * L * 2 * (heads + kv) * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    body = np.maximum((work**p + longest**p) ** (1 / p), stream)
    return cast("F8", (q["floor_s"] + body) * correction(q, L, n * heads, heads / kv))


def small_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8) -> F8:
    """Return the seconds per layer of the small kernels for `m` tokens: two norms, rope, activation and cache write."""
    each = [(part, heads_of(part, tp)) for part in alike(shape)]
    numbers = sum(part.layers * (heads + 2 * kv) * part.head_dim for part, (heads, kv) in each) / shape.layers
    wide = (3 if shape.gated else 2) * (shape.ffn if shape.experts is None else shape.experts.shared_ffn) / tp
    token = BF16 * (8 * shape.hidden + 2 * numbers)
    moved = in_group(shape, m) * token + m * (BF16 * wide)
    return cast("F8", np.maximum(q["floor_s"], moved / (q["hbm_frac"] * spec.hbm)))


def in_group(shape: Shape, count: ArrayLike) -> F8:
    """Return how many of a step's tokens, prompts or sequences the fullest group of data-parallel attention has.

    Groups are balanced: their numbers differ by one at most.
    """
    counted = np.asarray(count, dtype=np.float64)
    return counted if shape.dp == 1 else np.ceil(counted / shape.dp)


def collective_s(q: Toml, op: str, tp: int, elements: ArrayLike) -> F8:
    """Return the seconds of an all-gather or a reduce-scatter over `tp` GPUs.

    `elements` is the number of bf16 elements of all GPUs' parts together. Raises UserError if the cost table lacks
    `op`.
    """
    if tp > 1 and op not in q:
        raise UserError(f"this machine's cost table has no {op}, which data-parallel attention takes")
    return all_reduce_s(q.get(op, q["all_reduce"]), tp, elements, passes=1)


def all_reduce_s(q: Toml, tp: int, elements: ArrayLike, passes: int = 2) -> F8:
    """Return the seconds of an all-reduce of bf16 `elements` over `tp` GPUs.

    Between measured points, the seconds are interpolated in the logarithms of elements and seconds. Beyond the last
    point, they grow in proportion to the elements. If the quantity states a link's bytes/s (`wire`), the seconds are at
    least those of a ring over this link. All bytes pass a link of the ring `passes` times: twice in an all-reduce, once
    in an all-gather or a reduce-scatter. Raises UserError if no times for `tp` GPUs were measured.
    """
    x, elements = np.array(q["elements"], dtype=np.float64), np.asarray(elements, dtype=np.float64)
    if tp == 1:
        return np.zeros_like(elements)
    if f"tp{tp}_s" not in q:
        raise UserError(f"no times of collectives over {tp} GPUs; tensor parallelism is 1, 2, 4 or 8")
    y = np.array(q[f"tp{tp}_s"], dtype=np.float64)
    inner = np.exp(np.interp(np.log(elements), np.log(x), np.log(y)))
    # A link slower than the one measured: a ring over it, at least.
    ring = passes * (tp - 1) / tp * BF16 * elements / float(q.get("wire", np.inf))
    table: F8 = np.where(elements > x[-1], y[-1] * elements / x[-1], inner)
    return np.maximum(table, ring)


def exchanges_s(q: Toml, shape: Shape, tp: int, m: ArrayLike) -> tuple[F8, F8]:
    """Return the seconds of a layer's collectives for `m` tokens: after attention, and after the FFN or experts.

    Without data-parallel attention, each of the two is an all-reduce over the group. With it, the FFN is still split
    over all GPUs. After attention come an all-reduce within each attention group and an all-gather of the groups'
    tokens. After the FFN come a reduce-scatter of the sums to the groups and an all-reduce within each group.
    """
    m = np.asarray(m, dtype=np.float64)
    if shape.dp == 1:
        reduced = all_reduce_s(q["all_reduce"], tp, m * shape.hidden)
        return reduced, reduced
    within = all_reduce_s(q["all_reduce"], attention_gpus(shape, tp), in_group(shape, m) * shape.hidden)
    gathered, scattered = (collective_s(q, op, shape.dp, m * shape.hidden) for op in ("all_gather", "reduce_scatter"))
    return within + gathered, scattered + within


class Gemms(NamedTuple):
    """A layer's four GEMMs as (n outputs, k inputs) on each GPU."""

    qkv: tuple[float, float]
    out: tuple[float, float]
    up: tuple[float, float]
    down: tuple[float, float]


def gemms(shape: Shape, tp: int) -> Gemms:
    """Return (n, k) of a layer's GEMMs on each of `tp` GPUs; QKV are one GEMM, and so are gate and up.

    QKV and gate-up are split over the GPUs by columns, the output and down projections by rows.
    """
    heads, kv = heads_of(shape, tp)
    ffn = shape.ffn / tp
    return Gemms(
        ((heads + (1 if shape.keys_as_values else 2) * kv) * shape.head_dim, shape.hidden),
        (shape.hidden, heads * shape.head_dim),
        ((2 if shape.gated else 1) * ffn, shape.hidden),
        (shape.hidden, ffn),
    )


def part_of(q: Toml, share: F8) -> Part:
    """Return the fractions of a GPU's arithmetic and of its HBM bandwidth that a share of its SMs can use."""
    a, p = q["saturation"], q["power"]
    return Part(share ** q["arith_power"], ((1 + a**p) / (1 + (a / share) ** p)) ** (1 / p))


def decode_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, B: F8, ctx: float, part: Part = WHOLE) -> F8:
    """Return the seconds of a decode step's kernels on a part of each GPU.

    A kernel's least seconds, those of its launch, do not depend on the part.
    """
    return _kernels_s(q, spec, shape, tp, B, B, part) + decode_attention_s(q, spec, shape, tp, B, ctx, part)


def prefill_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, n: F8, tokens: F8, part: Part = WHOLE) -> F8:
    """Return the seconds of a prefill step's kernels on a part of each GPU, for n prompts of `tokens` tokens."""
    body = _kernels_s(q, spec, shape, tp, n * tokens, n, part)
    return body + prefill_attention_s(q, spec, shape, tp, n, tokens, part)


def decode_attention_s(
    q: Toml, spec: GpuSpec, shape: Shape, tp: int, B: ArrayLike, ctx: ArrayLike, part: Part = WHOLE
) -> F8:
    """Return the seconds of all layers' decode attention; sliding layers read no more than their window."""
    if shape.latent is not None:
        return shape.layers * _latent_decode_s(spec, shape, tp, B, ctx, part)
    if len(kinds := alike(shape)) > 1:
        return sum((decode_attention_s(q, spec, kind, tp, B, ctx, part) for kind in kinds), start=np.zeros(()))
    (heads, kv), d = heads_of(shape, tp), shape.head_dim
    B, wide = in_group(shape, B), KV_BYTES[shape.kv_format]
    if shape.sliding is None:
        return shape.layers * decode_s(q["decode"], spec, B, ctx, heads, kv, d, part, wide)
    near = decode_s(q["decode"], spec, B, np.minimum(ctx, shape.sliding.tokens), heads, kv, d, part, wide)
    whole = decode_s(q["decode"], spec, B, ctx, heads, kv, d, part, wide)
    return (shape.layers - shape.sliding.layers) * whole + shape.sliding.layers * near


def prefill_attention_s(
    q: Toml, spec: GpuSpec, shape: Shape, tp: int, n: ArrayLike, tokens: ArrayLike, part: Part = WHOLE
) -> F8:
    """Return the seconds of all layers' causal attention over n prompts of `tokens` tokens."""
    if shape.latent is not None:
        return shape.layers * _latent_prefill_s(spec, shape, tp, n, tokens, part)
    if len(kinds := alike(shape)) > 1:
        return sum((prefill_attention_s(q, spec, kind, tp, n, tokens, part) for kind in kinds), start=np.zeros(()))
    (heads, kv), d = heads_of(shape, tp), shape.head_dim
    whole = prefill_s(q["prefill"], spec, in_group(shape, n), tokens, heads, kv, d, part)
    if shape.sliding is None:
        return shape.layers * whole
    window = np.minimum(tokens, shape.sliding.tokens)
    area = window * (2 * np.asarray(tokens, dtype=np.float64) - window) / np.asarray(tokens, dtype=np.float64) ** 2
    near = q["prefill"]["floor_s"] + area * np.maximum(0.0, whole - q["prefill"]["floor_s"])
    return cast("F8", (shape.layers - shape.sliding.layers) * whole + shape.sliding.layers * near)


# Latent attention is not measured here. It is a roofline: bytes at the share of HBM's bandwidth, and arithmetic at the
# share of the peak, that cost models take where they know no better (AIConfigurator's, InferSim's and BLIS's 0.8).
LATENT_HBM, LATENT_FLOPS, LATENT_FLOOR_S = 0.8, 0.6, 10e-6


def _latent_decode_s(spec: GpuSpec, shape: Shape, tp: int, B: ArrayLike, ctx: ArrayLike, part: Part) -> F8:
    """Return the seconds of a layer's decode attention over latent KV, with the up-projection absorbed.

    Every head then reads the same latent vector of a token.
    """
    B, ctx = in_group(shape, B), np.asarray(ctx, dtype=np.float64)
    mla = cast("Latent", shape.latent)
    wide = mla.kv_rank + mla.rope_dim
    stream = KV_BYTES[shape.kv_format] * B * ctx * wide / (LATENT_HBM * spec.hbm * part.hbm)
    arith = 2 * B * ctx * heads_of(shape, tp)[0] * (wide + mla.kv_rank) / (LATENT_FLOPS * spec.flops * part.sms)
    return cast("F8", LATENT_FLOOR_S + np.maximum(stream, arith))


def _latent_prefill_s(spec: GpuSpec, shape: Shape, tp: int, n: ArrayLike, tokens: ArrayLike, part: Part) -> F8:
    n, L = in_group(shape, n), np.asarray(tokens, dtype=np.float64)
    mla = cast("Latent", shape.latent)
    wide, heads = mla.nope_dim + mla.rope_dim + mla.v_dim, heads_of(shape, tp)[0]
    arith = n * L * L * heads * wide / (LATENT_FLOPS * spec.flops * part.sms)
    stream = BF16 * n * L * heads * wide * 2 / (LATENT_HBM * spec.hbm * part.hbm)
    return LATENT_FLOOR_S + np.maximum(stream, arith)


def _kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8, out: F8, part: Part) -> F8:
    layer = products_s(q, spec, shape, tp, m, part)
    layer = layer + np.maximum(q["small"]["floor_s"], small_s(q["small"], spec, shape, tp, m) / part.hbm)
    layer = layer + sum(exchanges_s(q, shape, tp, m))
    return cast("F8", shape.layers * layer + head_s(q, spec, shape, tp, out, part))


def head_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, out: ArrayLike, part: Part = WHOLE) -> F8:
    """Return the seconds of the LM head for `out` rows."""
    return product_s(q, spec, format_of(shape, "head"), out, shape.vocab / tp, shape.hidden, part)


def products_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8, part: Part = WHOLE) -> F8:
    """Return the seconds of a layer's matrix products for `m` tokens: the mean over layers, routed experts included."""
    return sum(kernel_products_s(q, spec, shape, tp, m, part), start=np.zeros(()))


def kernel_products_s(
    q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8, part: Part = WHOLE
) -> tuple[F8, F8, F8, F8]:
    """Return the seconds of a layer's matrix products, as means over layers: QKV, output, gate and up, down.

    In a mixture of experts, the router counts as part of the output. Two thirds of the routed experts' seconds count as
    gate and up, and one third as down.
    """
    attention, dense = format_of(shape, "attention"), format_of(shape, "ffn")
    _, _, up, down = gemms(shape, tp)
    mine = in_group(shape, m)
    first, after = np.zeros(()), np.zeros(())
    for kind in alike(shape):
        share, (qkv, out, _, _) = kind.layers / shape.layers, gemms(kind, tp)
        first = first + share * product_s(q, spec, attention, mine, *qkv, part)
        after = after + share * product_s(q, spec, attention, mine, *out, part)
    if (mla := shape.latent) is not None:
        heads = heads_of(shape, tp)[0]
        query = heads * (mla.nope_dim + mla.rope_dim)
        wide = (mla.q_rank or query) + mla.kv_rank + mla.rope_dim
        first = product_s(q, spec, attention, mine, wide, shape.hidden, part)
        if mla.q_rank:
            first = first + product_s(q, spec, attention, mine, query, mla.q_rank, part)
        first = first + product_s(q, spec, attention, mine, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, part)
        after = product_s(q, spec, attention, mine, shape.hidden, heads * mla.v_dim, part)
    if (moe := shape.experts) is None:
        return first, after, product_s(q, spec, dense, m, *up, part), product_s(q, spec, dense, m, *down, part)
    share = moe.layers / shape.layers
    wide_up = np.zeros(())
    wide_down = np.zeros(())
    if share < 1:
        wide_up = (1 - share) * product_s(q, spec, dense, m, *up, part)
        wide_down = (1 - share) * product_s(q, spec, dense, m, *down, part)
    if moe.shared_ffn:
        shared, width = format_of(shape, "shared"), moe.shared_ffn / tp
        wide_up = wide_up + share * product_s(q, spec, shared, m, 2 * width, shape.hidden, part)
        wide_down = wide_down + share * product_s(q, spec, shared, m, shape.hidden, width, part)
    routed = share * routed_s(q, spec, shape, tp, m, part)
    router = share * gemm_s(q["gemm"], spec, m, moe.routed, shape.hidden, part)
    return first, after + router, wide_up + routed * (2 / 3), wide_down + routed / 3


def routed_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: ArrayLike, part: Part = WHOLE) -> F8:
    """Return the seconds of one layer's routed experts.

    Without expert parallelism, each expert is split over all `tp` GPUs. With it, each expert is split over the GPUs
    that store its part of the experts.
    """
    moe = cast("Experts", shape.experts)
    stored = format_of(shape, "experts")
    quantity, dealt = experts_of(q, stored), min(shape.ep, tp)
    return experts.experts_s(
        quantity,
        spec,
        m,
        shape.hidden,
        moe.ffn / (tp / dealt),
        moe.top,
        moe.routed,
        stored.weight_bytes,
        part_sms=part.sms,
        part_hbm=part.hbm,
        ep=dealt,
    )


def experts_of(q: Toml, stored: Format) -> Toml:
    """Return the quantity that prices routed experts of a format; if none was measured, return a roofline.

    The roofline counts bytes and 16-bit arithmetic, at the rates that the card's large GEMMs reach.
    """
    if f"experts_{stored.name}" in q:
        return cast("Toml", q[f"experts_{stored.name}"])
    return {
        "launch_s": 2 * q["gemm"]["launch_s"],
        "expert_s": 0.0,
        "move_x": 1.0,
        "flops_x": 1,
        "hbm_frac": q["gemm"]["hbm_frac"],
        "flops_frac": q["gemm"]["best_flops_frac"],
    }


def layer_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: ArrayLike) -> tuple[list[F8], list[F8]]:
    """Return the seconds of a layer's kernels for `m` tokens, as a list before attention and a list after it.

    Kernels are in the order in which they run. The first list has norm, QKV, rope and cache write. The second list has
    output, norm, gate and up, activation, and down. With tensor parallelism, collectives follow the output and the down
    projection. The five small kernels (norms, rope, cache write, activation) count as equally long: in steps of few
    tokens each takes little more than its launch.
    """
    m = np.asarray(m, dtype=np.float64)
    qkv, out, up, down = kernel_products_s(q, spec, shape, tp, m)
    small = small_s(q["small"], spec, shape, tp, m) / 5
    after, last = ([seconds] * (tp > 1) for seconds in exchanges_s(q, shape, tp, m))
    return [small, qkv, small, small], [out, *after, small, up, small, down, *last]


TYPICAL_SEQS, TYPICAL_CTX = 32, 1024  # the decode step that `roofline_share` looks at


def roofline_share(q: Toml, spec: GpuSpec, shape: Shape, tp: int) -> float:
    """Return the share of a decode step's kernel seconds that come from rooflines of unknown error.

    The step has 32 sequences of 1,024 tokens. Small kernels and the router count as measured.
    """
    B = np.array(float(TYPICAL_SEQS))
    attention_s = float(decode_attention_s(q, spec, shape, tp, B, TYPICAL_CTX))
    whole_s = float(_kernels_s(q, spec, shape, tp, B, B, WHOLE)) + attention_s
    bare_s = attention_s if shape.latent is not None or not _measured(q["decode"]) else 0.0
    first, after, up, down = (float(x) * shape.layers for x in kernel_products_s(q, spec, shape, tp, B))
    if not _measured(gemm_of(q, format_of(shape, "attention"))):
        bare_s += first + after
    routed_part_s = 0.0
    if shape.experts is not None:
        routed_part_s = shape.experts.layers * float(routed_s(q, spec, shape, tp, B))
        if not _measured(experts_of(q, format_of(shape, "experts"))):
            bare_s += routed_part_s
    if not _measured(gemm_of(q, format_of(shape, "ffn"))):
        bare_s += up + down - routed_part_s
    if not _measured(gemm_of(q, format_of(shape, "head"))):
        bare_s += float(head_s(q, spec, shape, tp, B))
    if shape.dp > 1 and not _measured(q["all_gather"]):
        bare_s += shape.layers * float(sum(exchanges_s(q, shape, tp, B)))
    return min(1.0, bare_s / whole_s)


def _measured(q: Toml) -> bool:
    return "fit" in q or "held" in q
