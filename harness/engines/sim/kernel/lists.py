"""A batch's lists of members, and its heap of decoding members, ordered by the tick at which they finish.

A batch's tick is the number of decode steps that it has run.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.waits import flag
from harness.engines.sim.state import *


@jit
def push(S: int, b: int, lst: int, r: int, front: int) -> None:
    """Insert a request into one of a batch's lists, in order of admission.

    Search for its place from the tail or, with `front`, from the head.
    """
    seq = req_at(S, r).seq
    head, tail = batch_at(S, b).ends[2 * lst], batch_at(S, b).ends[2 * lst + 1]
    if front:
        nxt = head
        while nxt >= 0 and req_at(S, nxt).seq < seq:
            nxt = req_at(S, nxt).next
        prev = tail if nxt < 0 else req_at(S, nxt).prev
    else:
        prev = tail
        while prev >= 0 and req_at(S, prev).seq > seq:
            prev = req_at(S, prev).prev
        nxt = head if prev < 0 else req_at(S, prev).next
    req_at(S, r).prev = prev
    req_at(S, r).next = nxt
    if prev >= 0:
        req_at(S, prev).next = r
    else:
        batch_at(S, b).ends[2 * lst] = r
    if nxt >= 0:
        req_at(S, nxt).prev = r
    else:
        batch_at(S, b).ends[2 * lst + 1] = r
    batch_at(S, b).count[lst] += 1


@jit
def unlink(S: int, b: int, lst: int, r: int) -> None:
    """Remove a request from one of a batch's lists."""
    prev, nxt = req_at(S, r).prev, req_at(S, r).next
    if prev >= 0:
        req_at(S, prev).next = nxt
    else:
        batch_at(S, b).ends[2 * lst] = nxt
    if nxt >= 0:
        req_at(S, nxt).prev = prev
    else:
        batch_at(S, b).ends[2 * lst + 1] = prev
    batch_at(S, b).count[lst] -= 1
    if lst == WAITING and batch_at(S, b).count[lst] == 0:  # no member is left whose prompt waits for memory
        flag(S, b, 0, batch_at(S, b).stalled)


@jit
def meld(S: int, x: int, y: int) -> int:
    """Merge two pairing heaps of requests, and return the root.

    Requests are ordered by the tick at which they finish, then by id.
    """
    if x < 0:
        return y
    if y < 0:
        return x
    if req_at(S, y).last_tick < req_at(S, x).last_tick or (req_at(S, y).last_tick == req_at(S, x).last_tick and y < x):
        x, y = y, x
    child = req_at(S, x).heap_child
    req_at(S, y).heap_next = child
    if child >= 0:
        req_at(S, child).heap_prev = y
    req_at(S, y).heap_prev = x
    req_at(S, x).heap_child = y
    return x


@jit
def meld_children(S: int, r: int) -> int:
    """Merge the heaps of r's children, and return the root.

    Neighbours are first merged in pairs from the left; the results are then merged one by one from the right.
    """
    c = req_at(S, r).heap_child
    pairs = -1
    while c >= 0:
        d = req_at(S, c).heap_next
        req_at(S, c).heap_next = -1
        req_at(S, c).heap_prev = -1
        e = -1
        if d >= 0:
            e = req_at(S, d).heap_next
            req_at(S, d).heap_next = -1
            req_at(S, d).heap_prev = -1
            c = meld(S, c, d)
        req_at(S, c).heap_next = pairs
        pairs = c
        c = e
    root = -1
    while pairs >= 0:
        d = req_at(S, pairs).heap_next
        req_at(S, pairs).heap_next = -1
        root = meld(S, root, pairs)
        pairs = d
    req_at(S, r).heap_child = -1
    return root


@jit
def heap_insert(S: int, b: int, r: int) -> None:
    """Insert a request into its batch's heap of decoding members."""
    q = req_at(S, r)
    q.heap_child = -1
    q.heap_next = -1
    q.heap_prev = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, r)


@jit
def heap_delete(S: int, b: int, r: int) -> None:
    """Remove a request from its batch's heap of decoding members, at any position in the heap."""
    if batch_at(S, b).root == r:
        batch_at(S, b).root = meld_children(S, r)
        return
    up, nxt = req_at(S, r).heap_prev, req_at(S, r).heap_next
    if req_at(S, up).heap_child == r:
        req_at(S, up).heap_child = nxt
    else:
        req_at(S, up).heap_next = nxt
    if nxt >= 0:
        req_at(S, nxt).heap_prev = up
    req_at(S, r).heap_next = -1
    req_at(S, r).heap_prev = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, meld_children(S, r))
