"""Weights: loads, evictions, and the memory that is granted to waiting loads and KV moves."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import has_chunk, take_chunk
from harness.engines.sim.kernel.events import done
from harness.engines.sim.kernel.lanes import cut_both, freed, give_back, wake_both
from harness.engines.sim.kernel.links import add_part, launch, new_transfer
from harness.engines.sim.kernel.memory import asked_bytes, exceeds, keep
from harness.engines.sim.kernel.pages import take
from harness.engines.sim.kernel.reuse import forget_cached, shed
from harness.engines.sim.kernel.waits import clocks, loaded, out_s, usable
from harness.engines.sim.state import *


@jit
def set_weights(S: int, i: int, state: int) -> None:
    """Set the state of an instance's weights, then cut or wake the lanes of its batches as needed.

    The batches' wait clocks are advanced to the present before the change.
    """
    W = world(S)
    for b in range(W.n_batches):
        if batch_at(S, b).inst == i:
            clocks(S, b, W.now)
    M = model_at(S, inst_at(S, i).model)
    M.out_s = out_s(S, inst_at(S, i).model, W.now)
    M.since = W.now
    M.places -= int(loaded(S, i))
    count_on_gpus(S, i, int(state != OUT) - int(inst_at(S, i).state != OUT))
    inst_at(S, i).state = state
    M.places += int(loaded(S, i))
    for b in range(W.n_batches):
        if batch_at(S, b).inst == i:
            if state == LEAVING:
                cut_both(S, b)
            elif usable(S, i):
                wake_both(S, b)


@jit
def count_on_gpus(S: int, i: int, n: int) -> None:
    """Add n (1, 0 or -1) to the count of instances on each GPU of an instance.

    The count includes instances whose weights are on their way. Before the change, update `held_s`, the seconds for
    which each GPU had instances, to the present time.
    """
    I, now = inst_at(S, i), world(S).now
    for j in range(I.gpu_count if n else 0):
        g = gpu_at(S, I.gpus[j])
        if g.insts > 0:
            g.held_s += now - g.held_since
        g.held_since = now
        g.insts += n


@jit
def place(S: int, i: int) -> bool:
    """Place an instance's weights at no cost before the run starts; return False if there is no room."""
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
    """Remove an instance's weights from its GPUs; the KV of requests stays."""
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
    """Tell whether another instance of the same model has a weights state from code `first` to code `last`."""
    j = inst_at(S, i).kin
    while j != i:
        if first <= inst_at(S, j).state <= last:
            return True
        j = inst_at(S, j).kin
    return False


@jit
def just_left(S: int, i: int) -> bool:
    """Tell whether the eviction of another instance of the same model was ordered at this instant."""
    j = inst_at(S, i).kin
    while j != i:
        if inst_at(S, j).left_s == world(S).now:
            return True
        j = inst_at(S, j).kin
    return False


@jit
def route_weights(S: int, x: int, i: int, source: int) -> None:
    """Create the parts of a load on the links of its source.

    PCIE uses the links from the host to the instance's GPUs. DISK uses these links and the node's disk. SPREAD uses the
    links from the host to all GPUs of the node, in equal parts. The instance's GPUs also gather what the other GPUs
    fetch, over peer links if there are any.
    """
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
    """Queue a load of an instance's weights.

    The load waits for memory, moves the weights over the links of `source`, and then takes another `tail_s` seconds.
    """
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
    """Tell whether a transfer can get its memory now: enough is free, and no earlier load or move waits for it."""
    W = world(S)
    X = xfer_at(S, x)
    i = X.inst
    if W.unlimited:
        return True
    if X.kind == SHIFT and (exceeds(S, i, X.blocks, 1) or not has_chunk(S, i, X.blocks)):
        return False
    for j in range(inst_at(S, i).gpu_count):
        g = gpu_at(S, inst_at(S, i).gpus[j])
        if g.barred or g.used + asked_bytes(S, x) > g.cap:
            return False
    return True


@jit
def barred(S: int, i: int) -> bool:
    """Tell whether an earlier load or KV move waits for memory on every GPU of an instance.

    If so, the instance can get no memory now.
    """
    for j in range(inst_at(S, i).gpu_count):
        if not gpu_at(S, inst_at(S, i).gpus[j]).barred:
            return False
    return True


@jit
def serve_grants(S: int) -> None:
    """Grant free memory to waiting loads and KV moves, in order of issue on each GPU."""
    W = world(S)
    W.grants = 0
    left = 0  # GPUs on which a transfer waits for memory and may still get it
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
