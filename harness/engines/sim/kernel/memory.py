"""KV memory of accounts: units of allocation (granules), limits, checks for room, and the watermark."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import has_chunk, most_bytes
from harness.engines.sim.kernel.walks import remotes, transfers
from harness.engines.sim.state import *


@jit
def kv_bytes(S: int, i: int, blocks: int) -> int:
    """Return the bytes per GPU that an account takes for `blocks` blocks.

    The account takes the granules (blocks or pages) that the blocks need, or all its pages in use if these are more.
    """
    I = inst_at(S, i)
    return I.granule * max(I.pages, packed(S, i, blocks))


@jit
def packed(S: int, i: int, blocks: int) -> int:
    """Return the smallest number of granules that can store `blocks` blocks.

    A granule is a block or, with elastic KV, a page.
    """
    I = inst_at(S, i)
    return (blocks + I.granule_blocks - 1) // I.granule_blocks


@jit
def held_bytes(S: int, i: int, blocks: int) -> int:
    """Return the bytes per GPU that `blocks` blocks take beyond the account's KV reserve.

    Blocks fill the reserve first. The reserve's memory is counted together with the weights.
    """
    return max(0, kv_bytes(S, i, blocks) - inst_at(S, i).kept)


@jit
def put(S: int, i: int, n: int) -> None:
    """Take n blocks for an account on each of its GPUs; if n is negative, free -n blocks."""
    W = world(S)
    I = inst_at(S, i)
    I.blocks += n
    h = held_bytes(S, i, I.blocks)
    d = h - I.held
    if d == 0:
        return
    I.held = h
    now = W.now
    for j in range(I.gpu_count):
        g = gpu_at(S, I.gpus[j])
        g.kv_byte_s += g.kv_bytes * (now - g.kv_since)
        g.kv_since = now
        g.kv_bytes += d
        g.used += d


@jit
def keep(S: int, i: int, nbytes: int) -> None:
    """Set an account's KV reserve to `nbytes` bytes per GPU; KV in the account stays.

    The reserve is counted while the instance's weights are in memory.
    """
    inst_at(S, i).kept = nbytes
    put(S, i, 0)


@jit
def is_on(S: int, i: int, g: int) -> bool:
    """Tell whether GPU g is one of an instance's GPUs."""
    for j in range(inst_at(S, i).gpu_count):
        if inst_at(S, i).gpus[j] == g:
            return True
    return False


@jit
def asked_bytes(S: int, x: int) -> int:
    """Return the bytes per GPU that a load or KV move still waits for."""
    X = xfer_at(S, x)
    if X.kind != SHIFT:
        return int(X.bytes)
    return held_bytes(S, X.inst, inst_at(S, X.inst).blocks + X.blocks) - inst_at(S, X.inst).held


@jit
def promised(S: int, g: int) -> int:
    """Return the bytes of a GPU for which loads and KV moves are waiting; elastic KV counts in whole pages."""
    W = world(S)
    total = gpu_at(S, g).waiting
    if not W.elastic or total == 0:
        return total
    total = 0
    for x in transfers(S, world(S).transfer_head):
        X = xfer_at(S, x)
        if X.stage == GRANT and is_on(S, X.inst, g):
            total += asked_bytes(S, x)
    return total


@jit
def grown_bytes(S: int, i: int, n: int, grow_: int) -> int:
    """Return the bytes per GPU that an account would take beyond its reserve with n more blocks.

    `fits` explains `grow_`.
    """
    I = inst_at(S, i)
    if grow_ == 2:
        return max(0, kv_bytes(S, i, I.blocks + n) - I.granule * (I.gone // I.granule_blocks) - I.kept)
    return held_bytes(S, i, I.blocks + n)


@jit
def exceeds(S: int, i: int, n: int, grow_: int) -> bool:
    """Tell whether n more blocks would exceed an account's KV limit; `fits` explains `grow_`."""
    I = inst_at(S, i)
    return I.limit >= 0 and grown_bytes(S, i, n, grow_) > I.limit


@jit
def fits(S: int, i: int, n: int, grow_: int) -> bool:
    """Tell whether n more KV blocks fit in an account now; contiguous KV needs room for them as one chunk.

    `grow_` is 0 for a new prompt, 1 for growth, and 2 for growth after all KV that is being swapped out has left. A new
    prompt cannot use memory for which a load or KV move waits, but growth can. With 2, the KV that leaves is assumed to
    free as many granules as its blocks fill.
    """
    W = world(S)
    if W.unlimited:
        return True
    if not has_chunk(S, i, n) or exceeds(S, i, n, grow_):
        return False
    I = inst_at(S, i)
    h = grown_bytes(S, i, n, grow_)
    for j in range(I.gpu_count):
        g = gpu_at(S, I.gpus[j])
        if g.used + h - I.held + (0 if grow_ else promised(S, I.gpus[j])) > g.cap:
            return False
    return True


@jit
def needs(S: int, f: int, d0: int, k: int) -> int:
    """Return the number of blocks in account f that a batch's decode steps take at ticks d0 to d0 + k - 1.

    A tick is one decode step of the batch. `f` is the batch's entry for the account.
    """
    W = world(S)
    if W.reserves:
        return 0
    bt = W.block_tokens
    total = (k // bt) * remote_at(S, f).count
    at = (1 - d0) % bt
    for _ in range(k % bt):
        total += remote_at(S, f).residues[at]
        at = at - 1 if at > 0 else bt - 1
    return total


@jit
def shares_gpu(S: int, i: int, j: int) -> bool:
    """Tell whether two instances have a GPU in common."""
    for x in range(inst_at(S, i).gpu_count):
        if is_on(S, j, inst_at(S, i).gpus[x]):
            return True
    return False


@jit
def touches(S: int, b: int, i: int) -> bool:
    """Tell whether a batch uses a GPU of an instance.

    The batch may run on the GPU, or its running members may have remote KV there.
    """
    if shares_gpu(S, i, batch_at(S, b).inst):
        return True
    for f in remotes(S, b):
        if remote_at(S, f).count > 0 and shares_gpu(S, i, remote_at(S, f).inst):
            return True
    return False


@jit
def holds(S: int, b: int, i: int) -> bool:
    """Tell whether a batch uses account i, as its own account or for remote KV of its running members."""
    if batch_at(S, b).inst == i:
        return True
    for f in remotes(S, b):
        if remote_at(S, f).count > 0 and remote_at(S, f).inst == i:
            return True
    return False


@jit
def never(S: int, i: int, n: int) -> bool:
    """Tell whether n blocks can never fit in an account, even if the account is alone on its GPUs."""
    W = world(S)
    if W.unlimited:
        return False
    I = inst_at(S, i)
    h = max(0, I.granule * packed(S, i, n) - I.kept)
    return h > most_bytes(S, i) or (I.limit >= 0 and h > I.limit)


@jit
def watermark(S: int, i: int) -> int:
    """Return the blocks that must stay free when a prompt is admitted to an account that already stores KV."""
    W = world(S)
    if W.unlimited or W.watermark <= 0.0:
        return 0
    I = inst_at(S, i)
    total = I.limit if I.limit >= 0 else most_bytes(S, i)
    return int(math.floor(W.watermark * (total // I.block_bytes)))
