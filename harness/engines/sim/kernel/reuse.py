"""The prefix cache: KV blocks that requests leave in free memory, hits of later prompts, and the order of eviction.

The cache works as in vLLM's v1/core (kv_cache_manager.py and single_type_kv_cache_manager.py at 003df29, block_pool.py
at 002f349). Other prompts can hit a prompt's blocks from the beginning of the step that fills them; the blocks of a
sliced step can be hit from its end. A request frees its blocks from the last to the first. Of the blocks that no
request uses, those that were freed first are evicted first.

Memory in use is the memory of blocks that requests use; a block that several requests use counts once. Other cached
blocks are in free memory: no request waits because of them, and they are evicted before any request is preempted.
`shed` evicts the cached blocks that no longer fit. It is called before hits are looked up and before memory in use
shrinks. Between two calls, free memory can only shrink.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.lanes import freed, step_of
from harness.engines.sim.kernel.memory import held_bytes, is_on, needs, put
from harness.engines.sim.kernel.waits import loaded
from harness.engines.sim.kernel.walks import accounts
from harness.engines.sim.state import *


@jit
def entry_of(S: int, i: int, r: int, k: int) -> int:
    """Return the row of account i's prefix-cache entry for the k-th block id of a request's prompt."""
    return int(inst_at(S, i).entries + chain_at(S, req_at(S, r).chain + k).entry)


@jit
def entries_of(S: int, r: int) -> int:
    """Count the prefix-cache entries of which a request uses all blocks or, in the last entry, some leading blocks."""
    per = world(S).id_blocks
    return int((req_at(S, r).shared + per - 1) // per)


@jit
def enqueue(S: int, i: int, x: int) -> None:
    """Append an entry that no request uses any more to its account's eviction queue."""
    W = world(S)
    I, E = inst_at(S, i), entry_at(S, x)
    W.released += 1
    E.stamp = W.released
    E.inst = i
    E.prev = I.youngest
    E.next = -1
    if I.youngest >= 0:
        entry_at(S, I.youngest).next = x
    else:
        I.oldest = x
    I.youngest = x
    I.cached += E.blocks


@jit
def dequeue(S: int, x: int) -> None:
    """Remove an entry from its account's eviction queue."""
    E = entry_at(S, x)
    I = inst_at(S, E.inst)
    E.stamp = 0
    I.cached -= E.blocks
    if E.prev >= 0:
        entry_at(S, E.prev).next = E.next
    else:
        I.oldest = E.next
    if E.next >= 0:
        entry_at(S, E.next).prev = E.prev
    else:
        I.youngest = E.prev


@jit
def full_bytes(S: int, i: int) -> int:
    """Return an account's bytes per GPU, beyond its reserve, for the steps begun so far and for its cached blocks."""
    I = inst_at(S, i)
    return held_bytes(S, i, I.blocks - I.unbegun + I.cached)


@jit
def over_limit(S: int, i: int) -> bool:
    """Tell whether an account has cached blocks and exceeds its KV limit when they are counted."""
    I = inst_at(S, i)
    return I.cached > 0 and I.limit >= 0 and full_bytes(S, i) > I.limit


@jit
def note_unbegun(S: int, g: int) -> None:
    """Record, for each account on a GPU, the blocks that spans have taken for steps that have not begun."""
    for i in range(world(S).n_insts):
        inst_at(S, i).unbegun = 0
    for b in range(world(S).n_batches):
        for lane in (2 * b, 2 * b + 1):
            n = lane_at(S, lane)
            d = batch_at(S, b).tick
            for f in accounts(S, b):
                i = remote_at(S, f).inst
                if n.busy == SPAN and is_on(S, i, g):
                    inst_at(S, i).unbegun += needs(S, f, d, n.steps) - needs(S, f, d, step_of(S, lane))


@jit
def shed_gpu(S: int, g: int) -> None:
    """Evict cached KV from a GPU until the remaining KV fits and each account is within its KV limit.

    The entry that was released first is evicted first; within an entry, the last block is evicted first.
    """
    W = world(S)
    note_unbegun(S, g)
    over = gpu_at(S, g).used - gpu_at(S, g).kv_bytes - gpu_at(S, g).cap
    for i in range(W.n_insts):
        if is_on(S, i, g):
            over += full_bytes(S, i)
    less = -1  # an account that has forgotten some
    while True:
        x = -1
        for i in range(W.n_insts):
            y = inst_at(S, i).oldest
            if y >= 0 and is_on(S, i, g) and (over > 0 or over_limit(S, i)):
                x = y if x < 0 or entry_at(S, y).stamp < entry_at(S, x).stamp else x
        if x < 0:
            if less >= 0 and W.piecewise:  # a prompt that finds less takes less for its first piece
                freed(S, less)
            return
        E = entry_at(S, x)
        i = less = E.inst
        while E.blocks > 0 and (over > 0 or over_limit(S, i)):
            over -= full_bytes(S, i)
            E.blocks -= 1
            inst_at(S, i).cached -= 1
            over += full_bytes(S, i)
        if E.blocks == 0:
            dequeue(S, x)


@jit
def shed(S: int, i: int) -> None:
    """Call `shed_gpu` for each GPU of an instance.

    Do nothing without a prefix cache or with unlimited memory.
    """
    W = world(S)
    if inst_at(S, i).entries >= 0 and not W.unlimited:
        for j in range(inst_at(S, i).gpu_count):
            shed_gpu(S, inst_at(S, i).gpus[j])


@jit
def forget_cached(S: int, i: int) -> None:
    """Evict all cached KV of an instance, because its weights are leaving."""
    while inst_at(S, i).oldest >= 0:
        x = inst_at(S, i).oldest
        dequeue(S, x)
        entry_at(S, x).blocks = 0


@jit
def held_hits(S: int, r: int, i: int) -> int:
    """Count a prompt's prefix-cache hits in blocks that other requests are using.

    Hits in these blocks take no more memory.
    """
    n = 0
    for k in range(req_at(S, r).ids):
        E = entry_at(S, entry_of(S, i, r, k))
        if E.refs == 0:
            break
        n += E.blocks
        if E.blocks < world(S).id_blocks:
            break
    return n


@jit
def hits(S: int, r: int, i: int) -> int:
    """Evict the cached blocks that no longer fit, then count a prompt's prefix-cache hits in account i."""
    shed(S, i)
    return leading(S, r, i)


@jit
def leading(S: int, r: int, i: int) -> int:
    """Count the cached blocks at the beginning of a prompt, up to the first block that is not cached."""
    n = 0
    for k in range(req_at(S, r).ids):
        blocks = entry_at(S, entry_of(S, i, r, k)).blocks
        n += blocks
        if blocks < world(S).id_blocks:
            break
    return n


@jit
def hold(S: int, r: int, i: int, n: int) -> None:
    """Let a request use the first n blocks of its prompt, which are in the prefix cache."""
    q = req_at(S, r)
    q.shared = n
    for k in range(entries_of(S, r)):
        x = entry_of(S, i, r, k)
        if entry_at(S, x).refs == 0:
            dequeue(S, x)
        entry_at(S, x).refs += 1


@jit
def publish(S: int, r: int) -> None:
    """Add the full prompt blocks of a request's step to the prefix cache, so that other prompts can hit them.

    If the cache already has a block from another request, this request's copy of the block stays private.
    """
    W = world(S)
    q = req_at(S, r)
    last = min((q.prefilled + q.piece) // W.block_tokens, q.ids * W.id_blocks)
    while q.shared < last:
        E = entry_at(S, entry_of(S, q.home, r, q.shared // W.id_blocks))
        if E.blocks != q.shared % W.id_blocks:
            break
        if E.blocks == 0:
            E.refs = 1
        E.blocks += 1
        q.shared += 1


@jit
def give_up(S: int, r: int) -> None:
    """Free the blocks that a request has in its home account.

    If the instance's weights are in memory, the freed blocks stay cached until they are evicted. The private blocks,
    which other prompts cannot hit, are freed first. The prompt's other blocks follow, from the last to the first.
    Private blocks that the same request left in the cache at an earlier preemption are dropped.
    """
    q = req_at(S, r)
    i = q.home
    n = q.blocks - q.shared
    shed(S, i)
    keeps = inst_at(S, i).entries >= 0 and loaded(S, i)
    if keeps:
        if entry_at(S, r).stamp > 0:
            dequeue(S, r)
        entry_at(S, r).blocks = n
        enqueue(S, i, r)
    for k in range(entries_of(S, r) - 1, -1, -1):
        x = entry_of(S, i, r, k)
        E = entry_at(S, x)
        E.refs -= 1
        if E.refs == 0:
            n += E.blocks
            if keeps:
                enqueue(S, i, x)
            else:
                E.blocks = 0
    q.shared = 0
    put(S, i, -n)
