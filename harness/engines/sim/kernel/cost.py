"""Seconds of a step: lookups in the cost tables, noise, and the speed on a share of the SMs."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def noise(sigma: float, seed: int, model: int, slot: int, kind: int, index: int) -> float:
    """Return a random factor of mean 1 and standard deviation `sigma` for the seconds of a step.

    The factor is a scaled sum of four uniform numbers. They come from 32-bit hashes of the other arguments, so that no
    random state is stored.
    """
    h = 0x9E3779B9
    for v in (seed, model, slot, kind, index):
        h ^= v & 0xFFFFFFFF
        h ^= h >> 16
        h = (h * 0x7FEB352D) & 0xFFFFFFFF
        h ^= h >> 15
        h = (h * 0x31848BAB) & 0xFFFFFFFF
        h ^= h >> 16
    g = h ^ 0x85EBCA6B
    g ^= g >> 16
    g = (g * 0x7FEB352D) & 0xFFFFFFFF
    g ^= g >> 15
    g = (g * 0x31848BAB) & 0xFFFFFFFF
    g ^= g >> 16
    u = ((h & 0xFFFF) + (h >> 16) + (g & 0xFFFF) + (g >> 16)) / 65536.0
    return 1.0 + sigma * math.sqrt(3.0) * (u - 2.0)


@jit
def table(grid, row, m: int) -> float:  # type: ignore[no-untyped-def]
    """Return a table's value at m, interpolated linearly between grid points; 0 if m is not positive.

    Beyond the last grid point, the value is extrapolated from the last two points.
    """
    if m <= 0:
        return 0.0
    lo, hi = 0, grid.size - 1
    if m >= grid[hi]:
        lo = hi - 1
    else:
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if grid[mid] <= m:
                lo = mid
            else:
                hi = mid
    return row[lo] + (row[lo + 1] - row[lo]) * ((m - grid[lo]) / (grid[lo + 1] - grid[lo]))


@jit
def attend_s(S: int, c: int, B: int, C: float) -> float:
    """Return the seconds of decode attention for B sequences with C tokens of context in total (formula: coef.py)."""
    k = cost_at(S)[c]
    return max(k.att0 + k.att1 * B, k.dec0 + k.dec1 * B + k.dec2 * C) if B > 0 else 0.0


@jit
def read_bytes(S: int, c: int, m: int) -> float:
    """Return the bytes of weights that a step of m tokens reads.

    `float(m)` makes compiled code and plain Python call the same `pow` function.
    """
    k = cost_at(S)[c]
    return k.wbytes + k.xbytes * (1.0 - k.xmiss ** float(m)) if k.xbytes > 0.0 else k.wbytes


@jit
def lerp(xs, ys, x: float) -> float:  # type: ignore[no-untyped-def]
    """Return the value at x of a function that is linear between the points (xs, ys) and constant beyond them."""
    if x <= xs[0]:
        return ys[0]
    for i in range(1, xs.size):
        if x <= xs[i]:
            return ys[i - 1] + (ys[i] - ys[i - 1]) * ((x - xs[i - 1]) / (xs[i] - xs[i - 1]))
    return ys[xs.size - 1]


@jit
def speed(S: int, c: int, x: float, B: int, prefill: int) -> float:
    """Return the speed of a step on a share x of the SMs, relative to its speed on all SMs.

    `B` is the number of members that decode. The speed of a step with prompts (`prefill`) does not depend on `B`.
    """
    if prefill:
        return lerp(share_at(S), pre_rate_at(S)[c], x)
    seqs, rate = seqs_at(S), dec_rate_at(S)[c]
    n = seqs.size
    j = 0
    while j < n - 2 and seqs[j + 1] < B:
        j += 1
    w = 0.0
    if n > 1:
        w = min(max((B - seqs[j]) / (seqs[j + 1] - seqs[j]), 0.0), 1.0)
    y0 = lerp(share_at(S), rate[:, j], x)
    y1 = lerp(share_at(S), rate[:, min(j + 1, n - 1)], x)
    return y0 + (y1 - y0) * w


@jit
def power_below(C: int) -> int:
    """Return the largest power of two <= C."""
    x = 1
    while x * 2 <= C:
        x *= 2
    return x
