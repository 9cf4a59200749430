"""Triton kernels of the probes: paged decode attention, the small kernels of a step, gathers, probes of SMs.

Data is bf16, and sums are fp32. Offsets into KV are int64, because a pool has more than 2^31 numbers. Triton compiles a
kernel again when an integer argument becomes 1, or when it becomes a multiple of 16 or stops being one. So integer
arguments that vary are in tensors, and strides are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

UNIT = 128  # bf16 in the 256 bytes that a block table counts in


def jit(kernel: Callable[..., None]) -> Any:
    """Return `triton.jit(kernel)`, typed as Any; launch the result as `kernel[grid](...)`."""
    return triton.jit(kernel)


@jit
def decode(
    q, kv, table, ctx, acc, ml, table_stride, layer, v_off, scale,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, S: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Compute attention of one token per sequence over one split of its paged KV; grid (sequences, KV heads, splits).

    Inputs: q (B, HKV * G, D); ctx int32 (B,), the tokens of each sequence, 0 for a padded row; scale, which is D **
    -0.5 * log2(e). `table`, int32 (B, blocks), has an offset in `kv` for each block of BS tokens. It is the place of
    the block's K in the first layer, in units of 256 bytes. `layer` is the offset from there to this layer's K, and
    `v_off` the offset from this layer's K to its V. Both count elements.

    Outputs, fp32: acc (B, HKV, S, GP, D), ml (B, HKV, S, GP, 2). GP is at least 16, the smallest size that `tl.dot`
    accepts.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    n = tl.load(ctx + b)
    blocks = tl.cdiv(n, BS)
    per = tl.cdiv(blocks, S)
    first = s * per
    last = tl.minimum(first + per, blocks)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    r = tl.arange(0, BS)
    qv = tl.load(q + ((b * HKV + h) * G + g)[:, None] * D + d[None, :], mask=g[:, None] < G, other=0.0)
    tile = r[:, None] * (HKV * D) + h * D + d[None, :]
    m = tl.full([GP], -1e30, tl.float32)  # not -inf: an empty split would give NaN
    l = tl.zeros([GP], tl.float32)
    sums = tl.zeros([GP, D], tl.float32)
    for j in range(first, last):
        at = kv + tl.load(table + b * table_stride + j).to(tl.int64) * 128 + layer
        ok = j * BS + r < n
        k = tl.load(at + tile, mask=ok[:, None], other=0.0)
        v = tl.load(at + v_off + tile, mask=ok[:, None], other=0.0)
        x = tl.where(ok[None, :], tl.dot(qv, tl.trans(k)) * scale, -1e30)
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - top[:, None])
        fade = tl.exp2(m - top)
        sums = sums * fade[:, None] + tl.dot(p.to(v.dtype), v)
        l = l * fade + tl.sum(p, 1)
        m = top
    o = ((b * HKV + h) * S + s) * GP + g
    tl.store(acc + o[:, None] * D + d[None, :], sums)
    tl.store(ml + o * 2, m)
    tl.store(ml + o * 2 + 1, l)


@jit
def merge(acc, ml, out, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, GP: tl.constexpr):
    """Merge the splits' results, one query head per program; grid (sequences, KV heads, G); out (B, HKV * G, D)."""
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    g = tl.program_id(2)
    s = tl.arange(0, S)
    d = tl.arange(0, D)
    o = (at * S + s) * GP + g
    m = tl.load(ml + o * 2)
    l = tl.load(ml + o * 2 + 1)
    w = tl.where(l > 0.0, tl.exp2(m - tl.max(m, 0)), 0.0)
    sums = tl.sum(tl.load(acc + o[:, None] * D + d[None, :]) * w[:, None], 0)
    tl.store(out + (at * G + g) * D + d, (sums / tl.maximum(tl.sum(l * w, 0), 1e-20)).to(out.dtype.element_ty))


@jit
def add_norm(x, add, weight, out, H: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr = 1e-5):
    """Set x += add, out = RMS norm of x times weight; one row per program; x, add, out (rows, H)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < H
    v = tl.load(x + row * H + i, mask=ok, other=0.0).to(tl.float32)
    v += tl.load(add + row * H + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(x + row * H + i, v.to(x.dtype.element_ty), mask=ok)
    v *= tl.rsqrt(tl.sum(v * v, 0) / H + EPS)
    w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * H + i, (v * w).to(out.dtype.element_ty), mask=ok)


@jit
def rope_write(
    qkv, cosine, sine, position, slot, q, k, v, layer, v_off, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr
):
    """Apply rotary embedding to a token's heads, and write its K and V to paged KV; grid (tokens, HQ + HKV).

    Shapes: qkv (tokens, HQ + 2 HKV, D); cosine and sine (positions, D / 2), fp32; q (tokens, HQ, D). `slot`, int64
    (tokens,), is the offset, in elements, from `k` to the token's K in the first layer. If it is negative, K and V are
    not written. If K and V are in the same pages, pass `k` as `v` too.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, D // 2)
    at = tl.load(position + t)
    c = tl.load(cosine + at * (D // 2) + i)
    s = tl.load(sine + at * (D // 2) + i)
    src = qkv + (t * (HQ + 2 * HKV) + h) * D
    a = tl.load(src + i).to(tl.float32)
    b = tl.load(src + D // 2 + i).to(tl.float32)
    first = (a * c - b * s).to(q.dtype.element_ty)
    second = (b * c + a * s).to(q.dtype.element_ty)
    if h < HQ:
        dst = q + (t * HQ + h) * D
        tl.store(dst + i, first)
        tl.store(dst + D // 2 + i, second)
    else:
        to = tl.load(slot + t)
        keep = to >= 0
        place = to + layer + (h - HQ) * D
        tl.store(k + place + i, first, mask=keep & (i < D // 2))
        tl.store(k + place + D // 2 + i, second, mask=keep & (i < D // 2))
        full = tl.arange(0, D)
        value = tl.load(src + HKV * D + full)
        tl.store(v + place + v_off + full, value, mask=keep & (full < D))


@jit
def silu_mul(both, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """Set out = silu(gate) * up; both (rows, 2 F), gate first; grid (rows, blocks of F)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < F
    gate = tl.load(both + row * 2 * F + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * F + F + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * F + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


@jit
def gather(src, offset, dst, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy pieces of N int64 words from `offset` (in words) of src to dst, packed; grid (pieces, N / BLOCK)."""
    p = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(offset + p)
    tl.store(dst + p * N + i, tl.load(src + at + i, mask=i < N, other=0), mask=i < N)


@jit
def scatter(src, offset, dst, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy pieces of N int64 words, packed in src, to `offset` (in words) of dst; grid (pieces, N / BLOCK)."""
    p = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(offset + p)
    tl.store(dst + at + i, tl.load(src + p * N + i, mask=i < N, other=0), mask=i < N)


@jit
def where(out, spin_ns, N: tl.constexpr):
    """Store the number of the SM on which each program runs.

    Each program first waits `spin_ns` nanoseconds (int64 tensor), so that all programs run at the same time.
    """
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    end = now + tl.load(spin_ns)
    while now < end:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0), sm, mask=tl.program_id(0) < N)


@jit
def touch(x):
    """Add 1 to a single number. This is the smallest kernel."""
    tl.store(x, tl.load(x) + 1)


@jit
def peek(base, offset, out):
    """Read one int64 word at `offset` (int64 tensor, in words) from `base`, even if no memory is mapped there."""
    tl.store(out, tl.load(base + tl.load(offset)))


@jit
def volley(mine, other, rounds, cap, bad, SERVES: tl.constexpr):
    """Pass a counter to and fro by polling, between two copies of this kernel on disjoint partitions.

    `mine` and `other` are int32 flags that only increase; `rounds` and `cap` are int32 tensors. The copy with SERVES
    begins each round. A wait gives up after `cap` polls, and all later waits give up at once. `bad` counts the rounds
    in which a wait gave up.
    """
    n = tl.load(rounds)
    most = tl.load(cap)
    failed = 0
    for i in range(n):
        if SERVES:
            tl.atomic_xchg(mine, i + 1, sem="release", scope="gpu")
        looks = 0
        seen = tl.atomic_add(other, 0, sem="acquire", scope="gpu")
        while (seen < i + 1) & (looks < most) & (failed == 0):
            looks += 1
            seen = tl.atomic_add(other, 0, sem="acquire", scope="gpu")
        if seen < i + 1:
            failed += 1
        if not SERVES:
            tl.atomic_xchg(mine, i + 1, sem="release", scope="gpu")
    tl.store(bad, failed)
