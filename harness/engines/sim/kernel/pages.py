"""Pages of elastic KV as kvcached allocates them: how full each page is, and which requests have blocks in it.

A new block comes from the page in which a block became free most recently (kvcached/kv_cache_manager.py at 020c6ea,
`_alloc`). A page is freed once all its blocks are free (`free`). A request frees its blocks from the last to the first
(vLLM's v1/core/single_type_kv_cache_manager.py, `free`). Requests that end at different times share pages, so some
pages stay mapped for a few blocks.

An account counts blocks when it takes them (`memory.put`). The blocks of a span's steps are assigned to pages only when
necessary: at the span's end, or before other requests take or free blocks of the account. Until then only their number
is counted. They are assumed to fill the free blocks of mapped pages first, and then new pages.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.lanes import cut, pool_of, step_of
from harness.engines.sim.kernel.memory import put
from harness.engines.sim.kernel.walks import accounts, lanes_in
from harness.engines.sim.state import *


@jit
def unlink_page(S: int, i: int, p: int) -> None:
    """Remove a page from an account's list of pages that have a free block."""
    P = page_at(S, p)
    if P.prev >= 0:
        page_at(S, P.prev).next = P.next
    if P.next >= 0:
        page_at(S, P.next).prev = P.prev
    else:
        inst_at(S, i).open = P.prev


@jit
def link_page(S: int, i: int, p: int) -> None:
    """Append a page to an account's list of pages that have a free block; the list's last page is filled next."""
    I, P = inst_at(S, i), page_at(S, p)
    P.prev = I.open
    P.next = -1
    if I.open >= 0:
        page_at(S, I.open).next = p
    I.open = p


@jit
def new_page(S: int, i: int) -> None:
    """Map a page for an account."""
    W = world(S)
    p = W.page_free
    if p >= 0:
        W.page_free = page_at(S, p).next
    else:
        p = W.page_used
        W.page_used += 1
    page_at(S, p).blocks = 0
    inst_at(S, i).pages += 1
    link_page(S, i, p)


@jit
def fill(S: int, i: int, n: int, extents: int) -> int:
    """Assign pages to n blocks that an account has taken for one request; return the request's new last extent.

    An extent is a group of a request's blocks in one page. `extents` is the request's last extent so far (-1: none).
    """
    W, I = world(S), inst_at(S, i)
    if not W.paged or I.granule_blocks == 1:
        return extents
    while n > 0:
        if I.open < 0:
            new_page(S, i)
        p = I.open
        P = page_at(S, p)
        k = min(n, I.granule_blocks - P.blocks)
        P.blocks += k
        n -= k
        if P.blocks == I.granule_blocks:
            unlink_page(S, i, p)
        if extents < 0 or extent_at(S, extents).page != p:
            extents = new_extent(S, p, extents)
        extent_at(S, extents).blocks += k
    return extents


@jit
def new_extent(S: int, p: int, before: int) -> int:
    """Return an empty extent in page p.

    An extent is a group of a request's blocks in one page. `before` is the request's last extent so far (-1: none).
    """
    W = world(S)
    x = W.extent_free
    if x >= 0:
        W.extent_free = extent_at(S, x).next
    else:
        x = W.extent_used
        W.extent_used += 1
    E = extent_at(S, x)
    E.page = p
    E.blocks = 0
    E.next = before
    return x


@jit
def empty(S: int, i: int, extents: int) -> None:
    """Free a request's extents in an account, and the pages that then have no block in use.

    `extents` is the request's last extent there.
    """
    W, I = world(S), inst_at(S, i)
    W.emptied += 1
    x = extents
    while x >= 0:
        E = extent_at(S, x)
        p = E.page
        P = page_at(S, p)
        if P.emptied != W.emptied:  # the last of several extents in a page decides its place in the list
            P.emptied = W.emptied
            if P.blocks < I.granule_blocks:
                unlink_page(S, i, p)
            link_page(S, i, p)
        P.blocks -= E.blocks
        if P.blocks == 0:
            unlink_page(S, i, p)
            P.next = W.page_free
            W.page_free = p
            I.pages -= 1
        nxt = E.next
        E.next = W.extent_free
        W.extent_free = x
        x = nxt


@jit
def enlist(S: int, b: int, r: int) -> None:
    """Add a new running member to the ring of members that need a new block at the same ticks.

    A tick is one decode step of the batch. The ring is in order of admission.
    """
    W, B, q = world(S), batch_at(S, b), req_at(S, r)
    if not W.paged:
        return
    at = (q.length - q.joined_tick) % W.block_tokens
    first = B.due[at]
    if first < 0:
        q.due_prev = r
        q.due_next = r
        B.due[at] = r
        return
    prev = req_at(S, first).due_prev
    while prev != first and req_at(S, prev).seq > q.seq:
        prev = req_at(S, prev).due_prev
    if req_at(S, prev).seq > q.seq:  # the first of all
        prev = req_at(S, first).due_prev
        B.due[at] = r
    q.due_prev = prev
    q.due_next = req_at(S, prev).due_next
    req_at(S, q.due_next).due_prev = r
    req_at(S, prev).due_next = r


@jit
def strike(S: int, b: int, r: int) -> None:
    """Remove a member from the ring to which `enlist` added it."""
    W, B, q = world(S), batch_at(S, b), req_at(S, r)
    if not W.paged:
        return
    at = (q.length - q.joined_tick) % W.block_tokens
    if q.due_next == r:
        B.due[at] = -1
        return
    if B.due[at] == r:
        B.due[at] = q.due_next
    req_at(S, q.due_next).due_prev = q.due_prev
    req_at(S, q.due_prev).due_next = q.due_next


@jit
def fill_steps(S: int, b: int, until: int) -> None:
    """Assign pages to the blocks of a batch's decode steps before tick `until`.

    A tick is one decode step of the batch. The accounts' counts of blocks include these blocks already.
    """
    W, B = world(S), batch_at(S, b)
    if not W.paged:
        return
    tokens = W.block_tokens
    at = (1 - B.filled) % tokens
    while B.filled < until:
        first = B.due[at]
        r = first
        while r >= 0:
            q = req_at(S, r)
            if q.blocks * tokens < q.length + B.filled - q.joined_tick:  # else it had the block when it joined
                q.blocks += 1
                q.extents = fill(S, q.home, 1, q.extents)
            r = q.due_next if q.due_next != first else -1
        B.filled += 1
        at = at - 1 if at > 0 else tokens - 1


@jit
def fill_begun(S: int, i: int) -> None:
    """Assign pages to all blocks of account i that were taken by steps that have begun."""
    if not world(S).paged or inst_at(S, i).is_host:
        return
    for lane in lanes_in(S, gpu_at(S, inst_at(S, i).gpus[0]).pool):
        n = lane_at(S, lane)
        b = lane >> 1
        if n.busy == SPAN and (batch_at(S, b).inst == i or batch_at(S, b).far > 0):
            fill_steps(S, b, batch_at(S, b).tick + step_of(S, lane))


@jit
def fill_step(S: int, b: int) -> None:
    """Assign pages to the blocks of a batch's next step.

    The blocks of other batches' steps that began earlier get their pages first.
    """
    if not world(S).paged:
        return
    for f in accounts(S, b):
        fill_begun(S, remote_at(S, f).inst)
    batch_at(S, b).filled = batch_at(S, b).tick  # a step of this tick may have been filled and then lost all members
    fill_steps(S, b, batch_at(S, b).tick + 1)


@jit
def take(S: int, i: int, n: int) -> int:
    """Take n blocks of an account for one request; return its last extent there, or -1 if pages are not tracked."""
    fill_begun(S, i)
    put(S, i, n)
    return fill(S, i, n, -1)


@jit
def give(S: int, i: int, n: int, extents: int) -> None:
    """Free the n blocks that one request has in an account; `extents` is the request's last extent there."""
    fill_begun(S, i)
    empty(S, i, extents)
    put(S, i, -n)


@jit
def alternates(S: int, lane: int) -> bool:
    """End the spans of a lane's rivals at their next step boundary; return whether the lane has rivals.

    Rivals are other decoding batches of the same model in the lane's pool. Rivals can take blocks of the same account.
    In that account, each new page goes to the batch that needs a page first.
    """
    b = lane >> 1
    some = False
    for x in lanes_in(S, pool_of(S, lane)):
        n = lane_at(S, x)
        if x >> 1 != b and n.decodes > 0 and model_of(S, x >> 1) == model_of(S, b):
            some = True
            cut(S, x)
    return some


@jit
def model_of(S: int, b: int) -> int:
    """Return the row of a batch's model."""
    return int(inst_at(S, batch_at(S, b).inst).model)
