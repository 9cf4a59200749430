"""Contiguous KV: a buddy allocator of chunks of an account's blocks.

An account's memory is a binary tree. Its root, node 1, is a power of two of blocks. Nodes 2x and 2x + 1 are the halves
of node x, and a leaf is one block; leaves beyond the account's limit are never free. A chunk is a node: its size is a
power of two, and its address a multiple of its size. Each chunk is taken from the smallest free node that has room for
it. Among equally small nodes, the one with the lowest address is chosen. As soon as two halves are free, they become
one free node again (Knuth, The Art of Computer Programming, volume 1, section 2.5).
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def most_bytes(S: int, i: int) -> int:
    """Return the KV bytes per GPU that an account could store if its instance were alone on its GPUs.

    They are the memory of the smallest GPU minus the instance's footprint: its weights, process and KV reserve.
    """
    I = inst_at(S, i)
    cap = gpu_at(S, I.gpus[0]).cap
    for j in range(1, I.gpu_count):
        cap = min(cap, gpu_at(S, I.gpus[j]).cap)
    return int(cap - I.footprint)


@jit
def slots(S: int, i: int) -> int:
    """Return the number of KV blocks that an account can store if it is alone on its GPUs, within its KV limit."""
    I = inst_at(S, i)
    total = most_bytes(S, i)
    if I.limit >= 0:
        total = min(total, I.limit)
    return int(max(0, total) // I.block_bytes)


@jit
def mend(S: int, i: int, x: int, size: int, end: int) -> None:
    """Recompute a tree node's set of free chunk sizes from the sets of its two halves.

    `size` is the node's number of blocks. A leaf can be free only if its number, counted from 0, is below `end`.
    """
    I = inst_at(S, i)
    N = node_at(S, I.nodes + x)
    if N.taken:
        N.free = 0
    elif size == 1:
        N.free = int(x - I.leaves < end)
    else:
        left, right = node_at(S, I.nodes + 2 * x).free, node_at(S, I.nodes + 2 * x + 1).free
        N.free = size if left == right and 2 * left == size else left | right


@jit
def lay_out(S: int, i: int) -> None:
    """Recompute an account's whole tree for its present KV limit; chunks in use stay, even beyond the limit."""
    I = inst_at(S, i)
    if I.nodes < 0:
        return
    end, size = slots(S, i), 1
    first = I.leaves
    while first > 0:
        for x in range(first, 2 * first):
            mend(S, i, x, size, end)
        first //= 2
        size *= 2


@jit
def climb(S: int, i: int, x: int, size: int) -> None:
    """Recompute the sets of free chunk sizes of a tree node and of all its ancestors."""
    end = slots(S, i)
    while x > 0:
        mend(S, i, x, size, end)
        x //= 2
        size *= 2


@jit
def has_chunk(S: int, i: int, n: int) -> bool:
    """Tell whether an account has a free chunk of n blocks, where n is a power of two.

    The answer is always True for an account with paged KV.
    """
    I = inst_at(S, i)
    return I.nodes < 0 or n <= node_at(S, I.nodes + 1).free


@jit
def take_chunk(S: int, i: int, n: int) -> int:
    """Take a free chunk of n blocks and return its tree node, or -1 in an account with paged KV.

    The account must have such a chunk.
    """
    I = inst_at(S, i)
    if I.nodes < 0:
        return -1
    enough = node_at(S, I.nodes + 1).free & -n
    best = enough & -enough  # the size of the smallest free node with room
    x, size = 1, I.leaves
    while size > n:
        x *= 2
        if size > best and not node_at(S, I.nodes + x).free & best:
            x += 1
        size //= 2
    node_at(S, I.nodes + x).taken = 1
    climb(S, i, x, size)
    return int(x)


@jit
def free_chunk(S: int, i: int, x: int, n: int) -> None:
    """Free the chunk of n blocks at tree node x. Do nothing in an account with paged KV."""
    I = inst_at(S, i)
    if I.nodes < 0:
        return
    node_at(S, I.nodes + x).taken = 0
    climb(S, i, x, n)
