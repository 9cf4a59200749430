"""The shape of a step's cost: what cost tables give and what every core of the simulator consumes.

One row of `COST` is one (model, GPU kind, tensor-parallel degree). All seconds are solo seconds.

    m    = tokens in the step = B decodes + p prefill tokens        n   = prompt pieces in the step
    C    = sum of contexts of the decodes                           out = rows sampled (decodes + prompts ending here)
    area = sum over pieces of c * (s + c / 2): c new tokens after s cached ones

    gpu  = gemm(m) + head(out)
         + [B > 0] max(att0 + att1 B, dec0 + dec1 B + dec2 C)
         + [n > 0] (pre0 n + pre1 p + pre2 area)
    host = host0 + host1 (B + n)
    step = gpu + host if serial else max(gpu, host)

`gemm` and `head` are tables over the grid `Tables.grid`, linear between its points and beyond the last two; f(0) = 0.
`head` includes a sampler that sorts the vocabulary; host0 includes what a host takes for more GPUs.

Demands of a step on each of its GPUs, both <= 1 (the fluid sharing of the simulator):
    compute = min(1, (fl_tok m + fl_area area) / (flops step)),   hbm = min(1, (wbytes + kbytes C) / (hbm step))
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COST = np.dtype(
    [
        ("host0", "f8"),  # s a step
        ("host1", "f8"),  # s a sequence
        ("serial", "i8"),  # 1: host time is added; 0: hidden behind the GPU
        ("att0", "f8"),  # decode attention, floor: s, s a sequence
        ("att1", "f8"),
        ("dec0", "f8"),  # decode attention, streaming: s, s a sequence, s a token of context
        ("dec1", "f8"),
        ("dec2", "f8"),
        ("pre0", "f8"),  # prefill attention: s a piece, s a token, s a unit of area
        ("pre1", "f8"),
        ("pre2", "f8"),
        ("wbytes", "f8"),  # HBM bytes a step: weights
        ("kbytes", "f8"),  # HBM bytes a token of context
        ("fl_tok", "f8"),  # FLOPs a token, a unit of area
        ("fl_area", "f8"),
        ("flops", "f8"),  # achievable FLOP/s and bytes/s of the GPU
        ("hbm", "f8"),
    ],
    align=True,
)


class Tables(NamedTuple):
    """Coefficients of a run as arrays; row i belongs to the i-th (model, GPU kind, tp) asked for."""

    cost: NDArray[np.void]  # (rows,) COST
    grid: NDArray[np.int64]  # (points,) tokens, ascending from 1
    gemm: NDArray[np.float64]  # (rows, points) s: all layers' GEMMs, small kernels and all-reduces
    head: NDArray[np.float64]  # (rows, points) s: LM head by rows sampled
    share: NDArray[np.float64]  # (shares,) fraction of SMs, ascending to 1
    seqs: NDArray[np.float64]  # (batches,) decode batch sizes, ascending
    dec_rate: NDArray[np.float64]  # (rows, shares, batches) speed of a decode step at that share, of 1
    pre_rate: NDArray[np.float64]  # (rows, shares) speed of a step with prefill tokens at that share
