"""Links and weights: transfers in pieces, loads, grants of memory, instances that come and go."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import has_chunk, take_chunk
from harness.engines.sim.kernel.events import done
from harness.engines.sim.kernel.lanes import cut, freed, give_back, wake
from harness.engines.sim.kernel.memory import asked_bytes, held_bytes, keep
from harness.engines.sim.kernel.pages import take
from harness.engines.sim.kernel.reuse import forget_cached, shed
from harness.engines.sim.kernel.waits import clocks, loaded, out_s, usable
from harness.engines.sim.state import (
    DISK,
    DRAINING,
    FREE,
    GRANT,
    HALF_NS,
    IN,
    INF,
    LEAVING,
    LINK,
    LOAD,
    LOADING,
    OK,
    OUT,
    QUEUED,
    SHIFT,
    SPREAD,
    TAIL,
    batch_at,
    gpu_at,
    inst_at,
    lane_at,
    link_at,
    model_at,
    req_at,
    world,
    xfer_at,
)


@jit
def set_weights(S: int, i: int, state: int) -> None:
    """Change the state of an instance's weights: bring its clocks up to date, then cut or wake its lanes."""
    W = world(S)
    for b in range(W.n_batches):
        if batch_at(S, b).inst == i:
            clocks(S, b, W.now)
    M = model_at(S, inst_at(S, i).model)
    M.out_s = out_s(S, inst_at(S, i).model, W.now)
    M.since = W.now
    M.places -= int(loaded(S, i))
    hold(S, i, int(state != OUT) - int(inst_at(S, i).state != OUT))
    inst_at(S, i).state = state
    M.places += int(loaded(S, i))
    for b in range(W.n_batches):
        if batch_at(S, b).inst == i:
            if state == LEAVING:
                cut(S, 2 * b)
                cut(S, 2 * b + 1)
            elif usable(S, i):
                wake(S, 2 * b)
                wake(S, 2 * b + 1)


@jit
def hold(S: int, i: int, n: int) -> None:
    """Add an instance to those that hold its GPUs (n = 1), or take it away (-1); 0 changes nothing."""
    I, now = inst_at(S, i), world(S).now
    for j in range(I.gpu_count if n else 0):
        g = gpu_at(S, I.gpus[j])
        if g.insts > 0:
            g.held_s += now - g.held_since
        g.held_since = now
        g.insts += n


@jit
def place(S: int, i: int) -> bool:
    """Place weights at no cost before the start, if there is room."""
    W = world(S)
    I = inst_at(S, i)
    for j in range(I.gpu_count):
        if gpu_at(S, I.gpus[j]).used + I.footprint > gpu_at(S, I.gpus[j]).cap and not W.unlimited:
            return False
    for j in range(I.gpu_count):
        gpu_at(S, I.gpus[j]).used += I.footprint
    keep(S, i, I.reserve)
    set_weights(S, i, IN)
    return True


@jit
def leave(S: int, i: int) -> None:
    """Remove weights; KV that requests hold stays."""
    W = world(S)
    shed(S, i)
    forget_cached(S, i)
    set_weights(S, i, OUT)
    I = inst_at(S, i)
    for j in range(I.gpu_count):
        gpu_at(S, I.gpus[j]).used -= I.footprint
    keep(S, i, 0)
    W.evicts += 1
    done(S, I.evict, OK)
    freed(S, i)


@jit
def elsewhere(S: int, i: int, first: int, last: int) -> bool:
    """Tell whether the model's weights are on other GPUs, in one of a range of states."""
    j = inst_at(S, i).kin
    while j != i:
        if first <= inst_at(S, j).state <= last:
            return True
        j = inst_at(S, j).kin
    return False


@jit
def just_left(S: int, i: int) -> bool:
    """Tell whether the model left another place at this very instant."""
    j = inst_at(S, i).kin
    while j != i:
        if inst_at(S, j).left_s == world(S).now:
            return True
        j = inst_at(S, j).kin
    return False


@jit
def new_transfer(S: int, kind: int, inst: int, act_: int, fixed: float, nbytes: float) -> int:
    """Append a transfer without parts to the order of issue, and return its row."""
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
    """Add a transfer's part on one link."""
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
    """Tell whether an open lane with members waits for an instance's weights."""
    for b in range(world(S).n_batches):
        B = batch_at(S, b)
        if B.inst == i and (lane_at(S, 2 * b).open or lane_at(S, 2 * b + 1).open):
            for lst in range(4):
                if B.count[lst] > 0:
                    return True
    return False


@jit
def foremost(S: int, link: int) -> int:
    """Return the part that a link moves next: KV, then awaited weights, then prefetches; each in order of issue."""
    K = link_at(S, link)
    if K.kv_head >= 0:
        return K.kv_head
    if K.weights_parts > 1:
        p = K.weights_head
        while p >= 0:
            if awaited(S, xfer_at(S, xfer_at(S, p).transfer).inst):
                return p
            p = xfer_at(S, p).next
    return K.weights_head


@jit
def move_on(S: int, link: int) -> None:
    """Start a link on its foremost part, at a boundary of its pieces; the link is idle if it has none."""
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
    """Stop a link after the piece that is on the wire, for a part that goes before what it moves."""
    W = world(S)
    K = link_at(S, link)
    if K.end > W.now:
        n = int(math.floor((W.now - K.began + HALF_NS) * K.bytes_per_s / W.piece_bytes)) + 1
        if n * W.piece_bytes < K.stop:
            K.stop = n * W.piece_bytes
            K.end = K.began + K.stop / K.bytes_per_s


@jit
def enlist(S: int, link: int, p: int, weights: int) -> None:
    """Put a part behind those of its kind on a link."""
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
    """Rank the weights that came to be awaited before prefetches."""
    for k in range(world(S).n_links):
        K = link_at(S, k)
        if K.weights_parts > 1 and K.kv_head < 0 and foremost(S, k) != K.current:
            interrupt(S, k)


@jit
def set_end(S: int, x: int) -> None:
    """Let a transfer whose parts are all moved end after its tail."""
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
    """Put a transfer's parts on their links."""
    X = xfer_at(S, x)
    X.stage = LINK
    p = X.first_part
    X.first_part = -1
    while p >= 0:
        nxt = xfer_at(S, p).next
        enlist(S, xfer_at(S, p).link, p, X.kind == LOAD)
        p = nxt
    if X.parts == 0:
        set_end(S, x)


@jit
def transfer(S: int, kind: int, r: int, src: int, dst: int, blocks: int) -> int:
    """Send a request's KV, memory granted at both ends, over the links between two accounts."""
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
    """Add a KV transfer's parts: PCIe to and from a host, peer links between GPUs where there are any.

    Between groups of two degrees the KV is split anew: what the new group holds comes in equal parts from the GPUs of
    the old one.
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
def route_weights(S: int, x: int, i: int, source: int) -> None:
    """Add a load's parts: the GPUs' own links, all of the node in equal parts, or the node's disk as well."""
    W = world(S)
    I = inst_at(S, i)
    size = float(I.weight_bytes)
    node = gpu_at(S, I.gpus[0]).node
    if source != SPREAD:
        for j in range(I.gpu_count):
            add_part(S, x, 4 * I.gpus[j], size)
        if source == DISK:
            add_part(S, x, 4 * (W.first_host + node), size * I.gpu_count)
        return
    peers = 0
    for g in range(W.first_host):
        peers += int(gpu_at(S, g).node == node)
    for g in range(W.first_host):
        if gpu_at(S, g).node == node:
            add_part(S, x, 4 * g, size * I.gpu_count / peers)
    if link_at(S, 4 * I.gpus[0] + 2).bytes_per_s > 0.0 and peers > I.gpu_count:  # targets gather what others fetched
        for j in range(I.gpu_count):
            add_part(S, x, 4 * I.gpus[j] + 2, size * (1 - I.gpu_count / peers))


@jit
def load(S: int, i: int, act_: int, source: int, tail_s: float) -> None:
    """Queue a load for memory: weights that go over the links of a source, then take `tail_s` more."""
    W = world(S)
    W.migrations += int(elsewhere(S, i, DRAINING, LEAVING) or just_left(S, i))
    x = new_transfer(S, LOAD, i, act_, tail_s, float(inst_at(S, i).footprint))
    route_weights(S, x, i, source)
    X = xfer_at(S, x)
    set_weights(S, i, QUEUED)
    X.stage = GRANT
    for j in range(inst_at(S, i).gpu_count):
        gpu_at(S, inst_at(S, i).gpus[j]).waiting += int(X.bytes)
    W.grants = 1


@jit
def granted(S: int, x: int) -> bool:
    """Tell whether the memory that a transfer asks for is free, and no earlier load or move waits for it."""
    W = world(S)
    X = xfer_at(S, x)
    i = X.inst
    if W.unlimited:
        return True
    if X.kind == SHIFT:
        h = held_bytes(S, i, inst_at(S, i).blocks + X.blocks)
        if (inst_at(S, i).limit >= 0 and h > inst_at(S, i).limit) or not has_chunk(S, i, X.blocks):
            return False
    for j in range(inst_at(S, i).gpu_count):
        g = gpu_at(S, inst_at(S, i).gpus[j])
        if g.barred or g.used + asked_bytes(S, x) > g.cap:
            return False
    return True


@jit
def barred(S: int, i: int) -> bool:
    """Tell whether earlier loads or moves wait for memory of every GPU of an instance: what it could give is given."""
    for j in range(inst_at(S, i).gpu_count):
        if not gpu_at(S, inst_at(S, i).gpus[j]).barred:
            return False
    return True


@jit
def serve_grants(S: int) -> None:
    """Give free memory to waiting loads and moves, in order on each GPU."""
    W = world(S)
    W.grants = 0
    left = 0  # GPUs of which memory is asked for and may be given
    for g in range(W.n_gpus):
        gpu_at(S, g).barred = 0
        left += int(gpu_at(S, g).waiting > 0)
    x = W.transfer_head
    while x >= 0 and left > 0:
        X = xfer_at(S, x)
        if X.stage == GRANT and not barred(S, X.inst):
            i = X.inst
            if not granted(S, x):
                give_back(S, i, True)
            if granted(S, x):
                for j in range(inst_at(S, i).gpu_count):
                    g = gpu_at(S, inst_at(S, i).gpus[j])
                    g.waiting -= int(X.bytes)
                    left -= int(g.waiting == 0 and not g.barred)
                    if X.kind == LOAD:
                        g.used += int(X.bytes)
                if X.kind == LOAD:
                    keep(S, i, inst_at(S, i).reserve)
                    set_weights(S, i, LOADING)
                else:
                    batch_at(S, req_at(S, X.request).batch).asking -= 1
                    X.node = take_chunk(S, i, X.blocks)
                    X.extents = take(S, i, X.blocks)
                    inst_at(S, i).holders += 1
                launch(S, x)
            else:
                for j in range(inst_at(S, i).gpu_count):
                    g = gpu_at(S, inst_at(S, i).gpus[j])
                    left -= int(not g.barred)
                    g.barred = 1
        x = X.next


@jit
def release(S: int, x: int) -> None:
    """Free the row of a transfer that is over, and those of its parts."""
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
    p = xfer_at(S, x).first_part
    while p >= 0:
        q = xfer_at(S, p).next
        xfer_at(S, p).next = W.transfer_free
        W.transfer_free = p
        W.transfer_spare += 1
        p = q
    xfer_at(S, x).stage = FREE
    xfer_at(S, x).next = W.transfer_free
    W.transfer_free = x
    W.transfer_spare += 1


@jit
def end_part(S: int, link: int) -> None:
    """End the part, or the pieces of it, that a link has moved; the link goes on with what is foremost."""
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
