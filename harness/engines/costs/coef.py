"""The form of a step's cost: cost tables state its coefficients, and the simulator's kernel uses them.

One row of `COST` is one (model, GPU kind, tensor-parallel degree). All seconds are those of a step alone on its GPUs.

    m    = tokens in the step = B decodes + p prefill tokens        n   = prompt pieces in the step
    C    = sum of contexts of the decodes                           out = rows sampled (decodes + prompts ending here)
    area = sum over pieces of c * (s + c / 2): c new tokens after s cached ones

    gpu  = gemm(m) ([n = 0] + [n > 0] pre_x) + head(out)
         + [B > 0] max(att0 + att1 B, dec0 + dec1 B + dec2 C)
         + [n > 0] (pre0 n + pre1 p + pre2 area)
    host = host0 + host1 (B + n)
    step = gpu + host if serial else max(gpu, host)

`gemm` and `head` are tables over the grid `Tables.grid`, linear between its points and beyond the last two; f(0) = 0.
An engine's matrix products take `pre_x` times as long in steps with prompts as in steps of decodes alone. The factor
applies from the first prompt token, because the number at which it begins was not measured (row 5 of probe/ORDER.md).
`head` includes a sampler that sorts the vocabulary; host0 includes the host time that more GPUs add.

If B' decodes attend to KV on other GPUs, the attention takes max(att0 + att1 B', dec0 + dec1 B' + dec2 C') on those
GPUs. The transfers add the seconds in which query_bytes B' go out and result_bytes B' come back. `Tables.kernels` has
each kernel's part of a layer's seconds: gemm(m) / layers, times pre_x in a step with prompts.

Demands of a step on each of its GPUs, both <= 1:
    compute = min(1, (fl_tok m + fl_area area) / (flops step)),   hbm = min(1, (weights + kbytes C) / (hbm step))
    weights = wbytes + xbytes (1 - xmiss^m), xmiss = 1 - top/all: m tokens touch a fraction 1 - xmiss^m of the experts,
              if all experts are equally likely

Steps of several models on a GPU take turns, kernel by kernel (docs/semantics.md, Sharing a GPU). A step has
    w = 0 to 1 as p goes from few to many,   fill = dec_fill + w (pre_fill - dec_fill)
    turn = (passes + w (1 - passes)) duty step / layers;   if `equal` is set, every turn is 1
    duty = pre_duty with prefill tokens, dec_duty without, if that is above 0; else min(1, gpu / step)

While steps run on other, disjoint partitions of the SMs, a step takes at least max(apart, crowd H) times as long as
alone. H is the sum of the hbm demands of all these steps, including its own. Turns and this minimum together slow a
step down by a factor t. The factor used is 1 + slow (t - 1), where slow is pre_slow or dec_slow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.layout import record

COST = record(
    """The coefficients of a step, named as in the formulas above.

    host0          f8  s             of a step on the host
    host1          f8  s/sequence    of a step on the host
    serial         i8  flag          host time is added; else it is hidden behind the GPU
    att0           f8  s             of decode attention, the floor
    att1           f8  s/sequence    of decode attention, the floor
    dec0           f8  s             of decode attention, streaming
    dec1           f8  s/sequence    of decode attention, streaming
    dec2           f8  s/token       of context, of decode attention, streaming
    pre_x          f8  ratio         of gemm(m) in a step with prompts
    pre0           f8  s/piece       of prefill attention
    pre1           f8  s/token       of prefill attention
    pre2           f8  s/token^2     of area, of prefill attention
    wbytes         f8  bytes         of weights that a step reads from HBM, whatever its tokens
    xbytes         f8  bytes         of all routed experts, of which a step reads those that its tokens go to
    xmiss          f8  ratio         of tokens that do not go to a given expert
    kbytes         f8  bytes/token   of context that a step reads from HBM
    fl_tok         f8  FLOP/token    of a step
    fl_area        f8  FLOP/token^2  of area, of a step
    flops          f8  FLOP/s        that the GPU achieves
    hbm            f8  bytes/s       that the GPU achieves from HBM
    pre_duty       f8  ratio         of a step with prefill in which its kernels run; 0: as `gpu` tells
    dec_duty       f8  ratio         the same of a decode step
    pre_fill       f8  ratio         of the GPU's time that kernels of a step with many prompt tokens keep from others
    dec_fill       f8  ratio         the same of a decode step
    passes         f8  layers        of a decode step that pass in a turn; of prompts one does
    few            f8  tokens        of prompts up to which a step takes turns as decodes do
    many           f8  tokens        of prompts from which it takes turns as prompts do
    equal          i8  flag          turns of all steps are equally long: a scheduler's, not kernels'
    apart          f8  ratio         of a step's time beside one on a disjoint partition, at least
    crowd          f8  ratio         of a step's time beside those, for each time that all ask for the whole bandwidth
    pre_slow       f8  ratio         of what other steps slow a step with prefill down: 1 as turns tell
    dec_slow       f8  ratio         the same of a decode step
    layers         i8  count         of the model
    query_bytes    f8  bytes/sequence that a step sends to where KV is attended: a token's query, key and value
    result_bytes   f8  bytes/sequence that come back
    """
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
    kernels: NDArray[np.float64]  # (rows, points, kernels) parts of gemm(m) / layers; attention is none of them
