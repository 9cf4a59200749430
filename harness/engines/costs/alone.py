"""Seconds that requests take alone on idle GPUs, according to the cost table and the run's chunk size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.coef import Tables

F8 = NDArray[np.float64]
I8 = NDArray[np.integer[Any]]


def alone_s(t: Tables, row: I8, prompt: I8, output: I8, chunk_tokens: int) -> tuple[F8, F8]:
    """Return the seconds that the prefill and the decode steps of each request take alone on idle GPUs.

    Prompts are computed in pieces of `chunk_tokens` (0: whole). `row` is the row of each request's model in the tables.
    All decode steps of a request are priced at their mean context, because a step's seconds are nearly affine in its
    context.
    """
    prefill_s, decode_s = np.zeros(len(row)), np.zeros(len(row))
    for k in np.unique(row).tolist():
        mine = np.flatnonzero(row == k)
        prefill_s[mine] = _prefill_s(t, k, prompt[mine].astype(np.int64), chunk_tokens)
        steps = np.maximum(output[mine].astype(np.float64) - 1, 0.0)
        decode_s[mine] = steps * _decode_s(t, k, prompt[mine] + (steps + 1) / 2)
    return prefill_s, decode_s


def _prefill_s(t: Tables, k: int, prompt: I8, chunk_tokens: int) -> F8:
    """Return the seconds of the prefill of prompts alone, computed piece after piece."""
    c = t.cost[k]
    seconds, done = np.zeros(len(prompt)), 0
    left = np.flatnonzero(prompt > 0)
    while len(left):
        piece = prompt[left] - done
        piece = np.minimum(piece, chunk_tokens) if chunk_tokens else piece
        last = prompt[left] == done + piece
        gpu_s = c["pre_x"] * _at(t.grid, t.gemm[k], piece) + np.where(last, _at(t.grid, t.head[k], np.ones(1)), 0.0)
        gpu_s += c["pre0"] + c["pre1"] * piece + c["pre2"] * piece * (done + piece / 2)
        seconds[left] += _on_host(c, gpu_s)
        done, left = done + chunk_tokens, left[~last]
    return seconds


def _decode_s(t: Tables, k: int, context: F8) -> F8:
    """Return the seconds of a decode step of one sequence."""
    c = t.cost[k]
    attention_s = np.maximum(c["att0"] + c["att1"], c["dec0"] + c["dec1"] + c["dec2"] * context)
    return _on_host(c, _at(t.grid, t.gemm[k], np.ones(1)) + _at(t.grid, t.head[k], np.ones(1)) + attention_s)


def _on_host(c: np.void, gpu_s: F8) -> F8:
    host_s = c["host0"] + c["host1"]
    step_s: F8 = gpu_s + host_s if c["serial"] else np.maximum(gpu_s, host_s)
    return step_s


def _at(grid: NDArray[np.int64], f: F8, x: NDArray[Any]) -> F8:
    """Return `f` at `x`, which is at least 1.

    `f` is linear between grid points. Beyond the last point it continues the line through the last two.
    """
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    values: F8 = f[i] + (f[i + 1] - f[i]) * (x - grid[i]) / (grid[i + 1] - grid[i])
    return values
