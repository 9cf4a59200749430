"""Contiguous KV: chunks of an account's blocks, as a buddy allocator hands them out.

An account's memory is a binary tree. Node 1 is a power of two of blocks, nodes 2x and 2x + 1 are the halves of node x,
and a leaf is a block; leaves beyond the account's limit are never free. A chunk is a node: a power of two of blocks, at
a multiple of its size. It is taken from the smallest free node that has room for it; among equally small nodes, from
that with the lowest address. Two halves become one free node again as soon as both are free (Knuth, The Art of Computer
Programming, volume 1, section 2.5).
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def most_bytes(S: int, i: int) -> int:
    """Return the KV bytes that an account could hold on each GPU if its instance were alone there.

    They are the memory of its smallest GPU less the instance's footprint (its weights and process).
    """
    I = inst_at(S, i)
    cap = gpu_at(S, I.gpus[0]).cap
    for j in range(1, I.gpu_count):
        cap = min(cap, gpu_at(S, I.gpus[j]).cap)
    return int(cap - I.footprint)


@jit
def slots(S: int, i: int) -> int:
    """Return the number of KV blocks that an account can hold alone and within its KV limit."""
    I = inst_at(S, i)
    total = most_bytes(S, i)
    if I.limit >= 0:
        total = min(total, I.limit)
    return int(max(0, total) // I.block_bytes)


@jit
def mend(S: int, i: int, x: int, size: int, end: int) -> None:
    """Recompute the free chunk sizes of a tree node from those of its two halves.

    A leaf can be free only if its number, counted from 0, is below `end`.
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
    """Rebuild an account's tree for its present limit; chunks that are taken stay, even beyond the limit."""
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
    """Recompute the free chunk sizes of a tree node and of all nodes above it."""
    end = slots(S, i)
    while x > 0:
        mend(S, i, x, size, end)
        x //= 2
        size *= 2


@jit
def has_chunk(S: int, i: int, n: int) -> bool:
    """Tell whether an account has a free chunk of n blocks, a power of two; always True for a paged account."""
    I = inst_at(S, i)
    return I.nodes < 0 or n <= node_at(S, I.nodes + 1).free


@jit
def take_chunk(S: int, i: int, n: int) -> int:
    """Take a free chunk of n blocks, which must exist; return its tree node, or -1 in a paged account."""
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
    """Free a chunk of n blocks, unless the account is paged."""
    I = inst_at(S, i)
    if I.nodes < 0:
        return
    node_at(S, I.nodes + x).taken = 0
    climb(S, i, x, n)
