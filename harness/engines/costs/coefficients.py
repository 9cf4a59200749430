"""Coefficient arrays of `coef.Tables` from quantities: plain numpy, computed once at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from harness.engines.costs import forms, shapes, whole
from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.kernels import (
    BF16,
    Part,
    decode_attention_s,
    decode_kernels_s,
    exchanges_s,
    gemm_s,
    gemms,
    head_s,
    layer_kernels_s,
    part_of,
    prefill_attention_s,
    prefill_kernels_s,
    products_s,
    small_s,
)
from harness.engines.costs.quantities import F8, GpuSpec, HostProfile, Toml, gpu, machine, quantities
from harness.engines.costs.quantities import host as host_profile
from harness.policy import parameters
from harness.policy.types import Shape

CTX_TOKENS = 1024  # context per sequence at which the share curves are drawn: about Arena's P99 prompt + mean output
SHARES = np.array([0.06, 0.09, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
SEQS = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256])
READ = ("attention", "ffn", "shared")  # groups of weights that every step reads
LAYER_KERNELS = 11  # a layer has nine beside attention, and two all-reduces where it is cut over GPUs
LONG, DOUBLE = 2048, 1.02  # a step of LONG tokens or more takes at most DOUBLE times as long as two of half its tokens
# Tokens of a step: every count that a small batch can have, both sides of each tile edge (128), then doubling.
GRID = np.array(
    sorted(
        {*range(1, 9), *range(12, 65, 4), *range(72, 129, 8), *(128 * i + j for i in range(1, 17) for j in (0, 1))}
        | {*(2048 + 512 * i for i in range(1, 13))}
        | {12_288, 16_384}
    ),
    dtype=np.int64,
)


def tables(rows: Sequence[tuple[Shape, int]], kind: str, host: str, table: str | None = None) -> Tables:
    """Return the coefficients of (shape, tensor-parallel degree) pairs on a GPU kind under a host profile.

    `table`: path of a TOML that replaces committed quantities. Raises `UserError` for unknown names.
    """
    if (measured := machine(table)) is not None:
        return whole.tables(rows, measured)
    return coefficients(rows, quantities(kind, table), gpu(kind, table), host_profile(host, kind, table))


def coefficients(rows: Sequence[tuple[Shape, int]], q: Toml, spec: GpuSpec, h: HostProfile) -> Tables:
    """Return the same as `tables`, computed from quantities that the caller passes.

    Code that fits quantities calls this function to evaluate them before it writes them to a file.
    """
    cost = np.zeros(len(rows), dtype=COST)
    gemm, head = np.empty((2, len(rows), len(GRID)))
    dec_rate, pre_rate = np.empty((len(rows), len(SHARES), len(SEQS))), np.empty((len(rows), len(SHARES)))
    kernels = np.zeros((len(rows), len(GRID), LAYER_KERNELS))
    m = GRID.astype(np.float64)
    # What HBM gives at best: to a large GEMM of one token, or to a model's own decode attention.
    large_gemm = BF16 * 16384.0**2 / float(gemm_s(q["gemm"], spec, 1, 16384, 16384))
    for i, (shape, tp) in enumerate(rows):
        if (same := rows.index((shape, tp))) < i:
            for table in (cost, gemm, head, dec_rate, pre_rate, kernels):
                table[i] = table[same]
            continue
        L = shape.layers
        c = cost[i]
        c["kbytes"] = shapes.kv_token_bytes(shape, tp)  # also refuses a degree that heads do not divide by
        kinds = parameters.alike(shape)
        widths = [(kind.layers * kind.head_dim, *shapes.heads_of(kind, tp)) for kind in kinds]
        queries, keys = sum(d * heads for d, heads, _ in widths), sum(d * kv for d, _, kv in widths)
        n, k = np.array(gemms(shape, tp)).T
        plain = shape.experts is None and shape.formats is None and shape.latent is None
        plain = plain and shape.dp == len(kinds) == 1
        products = (
            gemm_s(q["gemm"], spec, m[:, None], n, k).sum(axis=1)
            if plain  # keeps the order of sums, and with it every bit
            else products_s(q, spec, shape, tp, m)
        )
        layer = products + small_s(q["small"], spec, shape, tp, m)
        layer = layer + sum(exchanges_s(q, shape, tp, m))
        gemm[i] = _halved(np.maximum.accumulate(h.scale_decode * L * layer))
        head[i] = np.maximum.accumulate(h.scale_decode * head_s(q, spec, shape, tp, m))
        if shape.sampled:  # each GPU of a group samples from whole rows
            head[i] += h.sample_s * shape.vocab * m
        weights = float((n * k).sum()) * L if plain else _active(shape, tp)
        set_turns(c, forms.Turns(**q["co_run"]))
        c["host0"], c["host1"], c["serial"] = h.host0 + h.host_tp * math.log2(tp), h.host1, h.serial
        dec = h.scale_decode * L * _decode_lines(q, spec, shape, tp, layer)
        c["att0"], c["att1"], c["dec0"], c["dec1"], c["dec2"] = dec
        c["pre_x"] = h.scale_prefill / h.scale_decode
        c["pre0"], c["pre1"], c["pre2"] = h.scale_prefill * L * _prefill_plane(q, spec, shape, tp, layer)
        c["wbytes"] = BF16 * (weights + shape.vocab / tp * shape.hidden) if plain else _read_bytes(shape, tp)
        if (moe := shape.experts) is not None:
            each = parameters.parameters(shape, tp).experts * shapes.format_of(shape, "experts").weight_bytes
            c["xbytes"], c["xmiss"] = each, 1 - moe.top / moe.routed
        c["fl_tok"], c["fl_area"] = 2 * weights, 4 * queries / shape.dp
        c["flops"] = q["gemm"]["best_flops_frac"] * spec.flops
        c["hbm"] = min(spec.hbm, max(large_gemm, h.scale_decode * c["kbytes"] / c["dec2"]))
        dec_rate[i], pre_rate[i] = _share_rates(q, spec, shape, tp, h)
        c["layers"] = L
        c["query_bytes"], c["result_bytes"] = BF16 * (queries + 2 * keys) / shape.dp, BF16 * queries / shape.dp
        before, after = layer_kernels_s(q, spec, shape, tp, GRID)
        parts = np.stack([*before, *after], axis=1)
        kernels[i, :, : parts.shape[1]] = parts / parts.sum(axis=1, keepdims=True)
    return Tables(cost, GRID, gemm, head, SHARES, SEQS, dec_rate, pre_rate, kernels)


def _halved(seconds: F8) -> F8:
    """Return the seconds on `GRID`, limited for long steps.

    A step of LONG tokens or more takes at most DOUBLE times as long as two steps of half its tokens. No step takes
    longer than one of more tokens. Measured products of 4,096 and 8,192 tokens take more time per token than those of
    half as many tokens. The excess is 1.6 to 3.4 % on H100, H200 and B200 (median), and 3.7 to 7.9 % on L40S. The
    reason is that long calls lower the GPU's clock before they end, and short ones do not. A server that computes all
    the time has one clock, whatever the length of its steps.
    """
    out = seconds.copy()
    for j in np.flatnonzero(GRID >= LONG):
        out[j] = min(out[j], DOUBLE * 2 * np.interp(GRID[j] / 2, GRID[:j], out[:j]))
    return np.minimum.accumulate(out[::-1])[::-1]  # no step takes longer than one of more tokens


def set_turns(c: np.void, turns: forms.Turns) -> None:
    """Set the coefficients by which the kernels of a row's steps take turns with those of other models."""
    c["pre_slow"] = c["dec_slow"] = 1.0
    c["pre_fill"], c["dec_fill"], c["passes"] = turns.prompt_fill, turns.decode_fill, turns.passes
    c["few"], c["many"], c["apart"], c["crowd"] = turns.few_tokens, turns.many_tokens, turns.apart, turns.crowd


def _active(shape: Shape, tp: int) -> float:
    """Return the number of weights on each GPU that multiply one token, without the weights of the LM head."""
    count, moe = parameters.parameters(shape, tp), shape.experts
    part = count.experts * moe.top / moe.routed if moe is not None else 0.0
    return count.attention / shape.dp + count.ffn + count.shared + count.router + part


def _read_bytes(shape: Shape, tp: int) -> float:
    """Return the bytes of weights that every decode step reads on each GPU: all but embedding and routed experts."""
    count = parameters.parameters(shape, tp)
    stored = sum(getattr(count, group) * shapes.format_of(shape, group).weight_bytes for group in READ)
    head = count.head or count.embedding
    return float(stored + head * shapes.format_of(shape, "head").weight_bytes + BF16 * count.router)


def _decode_lines(q: Toml, spec: GpuSpec, shape: Shape, tp: int, layer: F8) -> F8:
    """Fit the seconds of a layer's decode attention, and return att0, att1, dec0, dec1, dec2 of `coef`.

    The fitted seconds are the larger of att0 + att1 B and dec0 + dec1 B + dec2 C. Errors are relative to the seconds of
    the whole layer, whose other kernels take `layer` seconds on `GRID`.
    """
    B, ctx = (x.ravel() for x in np.meshgrid(SEQS, 2.0 ** np.arange(4, 15)))
    B, ctx = B[B * ctx <= 1 << 20], ctx[B * ctx <= 1 << 20]
    y = decode_attention_s(q, spec, shape._replace(layers=1, sliding=None), tp, B, ctx)
    if shape.sliding is not None:
        y = decode_attention_s(q, spec, shape, tp, B, ctx) / shape.layers
    w = 1 / (y + np.interp(B, GRID, layer))
    ones = np.ones_like(B)
    short, long = np.stack([ones, B], axis=1), np.stack([ones, B, B * ctx], axis=1)
    upper = ctx > 128
    for _ in range(4):
        att = nonnegative(short[~upper], y[~upper], w[~upper])
        dec = nonnegative(long[upper], y[upper], w[upper])
        now = long @ dec > short @ att
        if now.all() or not now.any() or (now == upper).all():
            break
        upper = now
    return np.concatenate([att, dec])


def _prefill_plane(q: Toml, spec: GpuSpec, shape: Shape, tp: int, layer: F8) -> F8:
    """Fit the seconds of a layer's prefill attention, and return pre0, pre1, pre2 of `coef`.

    Errors are relative to the seconds of the whole layer, whose other kernels take `layer` seconds on `GRID`.
    """
    n, L = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(5), 2.0 ** np.arange(4, 15)))
    n, L = n[n * L <= 1 << 14], L[n * L <= 1 << 14]
    y = prefill_attention_s(q, spec, shape._replace(layers=1, sliding=None), tp, n, L)
    if shape.sliding is not None:
        y = prefill_attention_s(q, spec, shape, tp, n, L) / shape.layers
    w = 1 / (y + np.interp(n * L, GRID, layer))
    return nonnegative(np.stack([n, n * L, n * L * L / 2], axis=1), y, w)


def nonnegative(X: F8, y: F8, w: F8) -> F8:
    """Return coefficients >= 0, fitted by weighted least squares.

    The most negative coefficient is set to 0 and the others are fitted again, until no coefficient is negative.
    """
    use = np.ones(X.shape[1], dtype=bool)
    while True:
        got = np.linalg.lstsq(X[:, use] * w[:, None], y * w, rcond=None)[0]
        out = np.zeros(len(use))
        out[use] = got
        if out.min() >= 0:
            return out
        use[int(out.argmin())] = False


def _share_rates(q: Toml, spec: GpuSpec, shape: Shape, tp: int, h: HostProfile) -> tuple[F8, F8]:
    """Return the speeds of decode and prefill steps at SHARES of the SMs, as fractions of the speed on all SMs.

    The host time of a step is the same at every share, and no step is faster on fewer SMs.
    """

    def speed(kernels_s: F8, seqs: F8 | float) -> F8:
        host_s = h.host0 + h.host1 * seqs
        step = kernels_s + host_s if h.serial else np.maximum(kernels_s, host_s)
        return cast("F8", np.minimum.accumulate((step[-1] / step)[::-1])[::-1])  # never faster on fewer SMs

    part = part_of(q["share"], SHARES)
    wide = Part(*(np.asarray(x)[:, None] for x in part))
    decode = h.scale_decode * decode_kernels_s(q, spec, shape, tp, SEQS[None, :], CTX_TOKENS, wide)
    prefill = h.scale_prefill * prefill_kernels_s(q, spec, shape, tp, np.ones(()), np.array(2048.0), part)
    return speed(decode, SEQS), speed(prefill, 1.0)
