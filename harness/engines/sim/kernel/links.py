"""Links, each of which moves its parts of transfers piece by piece, the most urgent part first."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.walks import transfers
from harness.engines.sim.state import *


@jit
def new_transfer(S: int, kind: int, inst: int, act_: int, fixed: float, nbytes: float) -> int:
    """Create a transfer without parts, put it last in the order of issue, and return its row.

    After its last part has been moved, the transfer takes another `fixed` seconds.
    """
    W = world(S)
    x = W.transfer_free
    X = xfer_at(S, x)
    W.transfer_free = X.next
    W.transfer_spare -= 1
    X.next = -1
    X.kind = kind
    X.stage = LINK
    X.inst = inst
    X.action = act_
    X.tail_s = fixed
    X.bytes = nbytes
    X.due = INF
    X.parts = 0
    X.first_part = -1
    X.request = -1
    X.source = -1
    X.blocks = 0
    X.node = -1
    X.extents = -1
    X.attend = 0
    X.prev = W.transfer_tail
    X.issued = W.issued
    W.issued += 1
    if W.transfer_tail >= 0:
        xfer_at(S, W.transfer_tail).next = x
    else:
        W.transfer_head = x
    W.transfer_tail = x
    return x


@jit
def add_part(S: int, x: int, link: int, nbytes: float) -> None:
    """Add a part of `nbytes` bytes on one link to a transfer."""
    W = world(S)
    p = W.transfer_free
    Q = xfer_at(S, p)
    W.transfer_free = Q.next
    W.transfer_spare -= 1
    Q.bytes = nbytes
    Q.link = link
    Q.transfer = x
    Q.next = xfer_at(S, x).first_part
    xfer_at(S, x).first_part = p
    xfer_at(S, x).parts += 1


@jit
def awaited(S: int, i: int) -> bool:
    """Tell whether some batch of an instance has members and an open lane, and therefore needs the weights."""
    for b in range(world(S).n_batches):
        B = batch_at(S, b)
        if B.inst == i and (lane_at(S, 2 * b).open or lane_at(S, 2 * b + 1).open):
            for lst in range(4):
                if B.count[lst] > 0:
                    return True
    return False


@jit
def foremost(S: int, link: int) -> int:
    """Return the part that a link moves next: KV first, then weights that lanes await, then other weights.

    Parts of the same urgency keep the order of the link's queue. Return -1 if no part is queued.
    """
    K = link_at(S, link)
    if K.kv_head >= 0:
        return K.kv_head
    if K.weights_parts > 1:
        for p in transfers(S, K.weights_head):
            if awaited(S, xfer_at(S, xfer_at(S, p).transfer).inst):
                return p
    return K.weights_head


@jit
def move_on(S: int, link: int) -> None:
    """Start the most urgent part in a link's queue; if the queue is empty, the link becomes idle."""
    W = world(S)
    K = link_at(S, link)
    K.current = foremost(S, link)
    if K.current >= 0:
        K.began = W.now
        K.stop = xfer_at(S, K.current).bytes
        K.end = W.now + K.stop / K.bytes_per_s
    else:
        K.end = INF
        W.links_busy -= 1


@jit
def interrupt(S: int, link: int) -> None:
    """Stop a link after the piece that it is moving, so that a more urgent part can go next."""
    W = world(S)
    K = link_at(S, link)
    if K.end > W.now:
        n = int(math.floor((W.now - K.began + HALF_NS) * K.bytes_per_s / W.piece_bytes)) + 1
        if n * W.piece_bytes < K.stop:
            K.stop = n * W.piece_bytes
            K.end = K.began + K.stop / K.bytes_per_s


@jit
def append_part(S: int, link: int, p: int, weights: int) -> None:
    """Queue a part on a link behind the parts of its kind, KV or weights.

    An idle link starts the part at once. KV interrupts a link that is moving weights.
    """
    W = world(S)
    K = link_at(S, link)
    xfer_at(S, p).next = -1
    if weights:
        K.weights_parts += 1
        if K.weights_parts == 2:
            W.rivals += 1
        if K.weights_head < 0:
            K.weights_head = p
        else:
            xfer_at(S, K.weights_tail).next = p
        K.weights_tail = p
    else:
        if K.kv_head < 0:
            K.kv_head = p
        else:
            xfer_at(S, K.kv_tail).next = p
        K.kv_tail = p
    if K.current < 0:
        W.links_busy += 1
        move_on(S, link)
    elif K.current != K.kv_head and not weights:
        interrupt(S, link)


@jit
def rank_links(S: int) -> None:
    """Interrupt each link that is moving weights although more urgent weights are in its queue.

    Weights are more urgent if a lane awaits them.
    """
    for k in range(world(S).n_links):
        K = link_at(S, k)
        if K.weights_parts > 1 and K.kv_head < 0 and foremost(S, k) != K.current:
            interrupt(S, k)


@jit
def set_end(S: int, x: int) -> None:
    """Schedule the end of a transfer whose parts have all been moved.

    The transfer ends `tail_s` seconds from now.
    """
    W = world(S)
    X = xfer_at(S, x)
    X.stage = TAIL
    X.due = W.now + X.tail_s
    prev, nxt = -1, W.ending_head
    while nxt >= 0 and xfer_at(S, nxt).issued < X.issued:
        prev, nxt = nxt, xfer_at(S, nxt).ends_next
    X.ends_next = nxt
    if prev >= 0:
        xfer_at(S, prev).ends_next = x
    else:
        W.ending_head = x


@jit
def launch(S: int, x: int) -> None:
    """Queue a transfer's parts on their links."""
    X = xfer_at(S, x)
    X.stage = LINK
    for p in transfers(S, X.first_part):
        append_part(S, xfer_at(S, p).link, p, X.kind == LOAD)
    X.first_part = -1
    if X.parts == 0:
        set_end(S, x)


@jit
def transfer(S: int, kind: int, r: int, src: int, dst: int, blocks: int) -> int:
    """Start the transfer of a request's KV from account `src` to account `dst`; return the transfer's row.

    Both accounts must have memory for the KV.
    """
    x = new_transfer(S, kind, dst, -1, 0.0, 0.0)
    X = xfer_at(S, x)
    X.request = r
    X.source = src
    X.blocks = blocks
    route_kv(S, x, src, dst, blocks)
    launch(S, x)
    return x


@jit
def route_kv(S: int, x: int, src: int, dst: int, blocks: int) -> None:
    """Create the parts of a KV transfer on the links that it uses.

    A transfer from or to a host uses PCIe. A transfer between GPUs uses their direct link, or PCIe through the host if
    they have none. If the old and the new group have different numbers of GPUs, the KV is split anew. Each new GPU then
    gets its KV in equal parts from GPUs of the old group.
    """
    I, J = inst_at(S, src), inst_at(S, dst)
    if I.is_host:
        for j in range(J.gpu_count):
            add_part(S, x, 4 * inst_at(S, dst).gpus[j], float(blocks * J.block_bytes))
        return
    if J.is_host:
        for j in range(I.gpu_count):
            add_part(S, x, 4 * inst_at(S, src).gpus[j] + 1, float(blocks * I.block_bytes))
        return
    pairs = max(I.gpu_count, J.gpu_count)
    size = float(blocks * J.block_bytes * J.gpu_count) / pairs
    for j in range(pairs):
        g = inst_at(S, src).gpus[j % I.gpu_count]
        h = inst_at(S, dst).gpus[j % J.gpu_count]
        link = 4 * g + (2 if gpu_at(S, g).node == gpu_at(S, h).node else 3)
        if link_at(S, link).bytes_per_s > 0.0:
            add_part(S, x, link, size)
        else:
            add_part(S, x, 4 * g + 1, size)
            add_part(S, x, 4 * h, size)


@jit
def release(S: int, x: int) -> None:
    """Free the row of a transfer that has ended, and the rows of its parts that were not moved."""
    W = world(S)
    prev, nxt = xfer_at(S, x).prev, xfer_at(S, x).next
    if prev >= 0:
        xfer_at(S, prev).next = nxt
    else:
        W.transfer_head = nxt
    if nxt >= 0:
        xfer_at(S, nxt).prev = prev
    else:
        W.transfer_tail = prev
    for p in transfers(S, xfer_at(S, x).first_part):
        xfer_at(S, p).next = W.transfer_free
        W.transfer_free = p
        W.transfer_spare += 1
    xfer_at(S, x).stage = FREE
    xfer_at(S, x).next = W.transfer_free
    W.transfer_free = x
    W.transfer_spare += 1


@jit
def end_part(S: int, link: int) -> None:
    """Subtract the bytes that a link has just moved from its current part, and start the link's most urgent part.

    If the current part has no bytes left, that part ends.
    """
    W = world(S)
    K = link_at(S, link)
    p = K.current
    Q = xfer_at(S, p)
    K.busy_s += K.stop / K.bytes_per_s
    Q.bytes -= K.stop
    if Q.bytes > 0.0:
        move_on(S, link)
        return
    if p == K.kv_head:
        K.kv_head = Q.next
    else:
        prev = -1
        x = K.weights_head
        while x != p:
            prev = x
            x = xfer_at(S, x).next
        if prev < 0:
            K.weights_head = Q.next
        else:
            xfer_at(S, prev).next = Q.next
        if K.weights_tail == p:
            K.weights_tail = prev
        K.weights_parts -= 1
        if K.weights_parts == 1:
            W.rivals -= 1
    move_on(S, link)
    X = xfer_at(S, Q.transfer)
    X.parts -= 1
    if X.parts == 0:
        set_end(S, Q.transfer)
    Q.next = W.transfer_free
    W.transfer_free = p
    W.transfer_spare += 1
