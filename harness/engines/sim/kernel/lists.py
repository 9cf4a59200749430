"""A batch's lists of members, and its heap of those that decode, by their last tick."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.waits import flag
from harness.engines.sim.state import WAITING, batch_at, req_at


@jit
def push(S: int, b: int, lst: int, r: int, front: int) -> None:
    """Put a request into a list kept in order of Admit; walk from the front for one that returns."""
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
    """Take a request out of a list."""
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
    if lst == WAITING and batch_at(S, b).count[lst] == 0:  # nobody left who was stopped for memory
        flag(S, b, 0, batch_at(S, b).stalled)


@jit
def meld(S: int, x: int, y: int) -> int:
    """Join two pairing heaps of finish ticks; ties by id."""
    if x < 0:
        return y
    if y < 0:
        return x
    if req_at(S, y).tick < req_at(S, x).tick or (req_at(S, y).tick == req_at(S, x).tick and y < x):
        x, y = y, x
    child = req_at(S, x).hc
    req_at(S, y).hn = child
    if child >= 0:
        req_at(S, child).hp = y
    req_at(S, y).hp = x
    req_at(S, x).hc = y
    return x


@jit
def meld_children(S: int, r: int) -> int:
    """The heap of r's children: pairs from the left, then all from the right."""
    c = req_at(S, r).hc
    pairs = -1
    while c >= 0:
        d = req_at(S, c).hn
        req_at(S, c).hn = -1
        req_at(S, c).hp = -1
        e = -1
        if d >= 0:
            e = req_at(S, d).hn
            req_at(S, d).hn = -1
            req_at(S, d).hp = -1
            c = meld(S, c, d)
        req_at(S, c).hn = pairs
        pairs = c
        c = e
    root = -1
    while pairs >= 0:
        d = req_at(S, pairs).hn
        req_at(S, pairs).hn = -1
        root = meld(S, root, pairs)
        pairs = d
    req_at(S, r).hc = -1
    return root


@jit
def heap_insert(S: int, b: int, r: int) -> None:
    """Enter a finish tick."""
    q = req_at(S, r)
    q.hc = -1
    q.hn = -1
    q.hp = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, r)


@jit
def heap_delete(S: int, b: int, r: int) -> None:
    """Remove a finish tick, wherever it is."""
    if batch_at(S, b).root == r:
        batch_at(S, b).root = meld_children(S, r)
        return
    up, nxt = req_at(S, r).hp, req_at(S, r).hn
    if req_at(S, up).hc == r:
        req_at(S, up).hc = nxt
    else:
        req_at(S, up).hn = nxt
    if nxt >= 0:
        req_at(S, nxt).hp = up
    req_at(S, r).hn = -1
    req_at(S, r).hp = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, meld_children(S, r))
