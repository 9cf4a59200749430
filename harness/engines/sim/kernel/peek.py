"""Answers to a policy's queries, the merging of pools, and the final accounting at the end of a run.

The answers count the finished steps of spans in flight.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.lanes import done_at, next_end, off_s, segment, solo_at, steps_to
from harness.engines.sim.kernel.memory import held_bytes, is_on, kv_bytes, needs, promised
from harness.engines.sim.kernel.steps import tally
from harness.engines.sim.kernel.waits import charge, log_stay, mark, ran_for
from harness.engines.sim.kernel.walks import accounts, lanes_in, pieces_from
from harness.engines.sim.state import *


@jit
def stepped(S: int, lane: int) -> int:
    """Return the number of steps of a lane's span that have ended by now."""
    W = world(S)
    n = lane_at(S, lane)
    if n.busy != SPAN or n.rate <= 0.0:
        return 0
    done = done_at(S, lane, W.now)
    j = steps_to(S, lane, done)
    return j if solo_at(S, lane, j) <= done else j - 1


@jit
def decode_lane(S: int, b: int) -> int:
    """Return the lane whose step in flight includes a batch's running members, or -1 if there is none."""
    if lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).decodes > 0:
        return 2 * b
    if lane_at(S, 2 * b + 1).busy != IDLE:
        return 2 * b + 1
    return -1


@jit
def ahead(S: int, b: int, i: int) -> int:
    """Return the blocks of account i that a batch's span has taken for steps that have not begun."""
    lane = decode_lane(S, b)
    if lane < 0 or lane_at(S, lane).busy != SPAN:
        return 0
    D, k = batch_at(S, b).tick, lane_at(S, lane).steps
    begun = min(k, stepped(S, lane) + 1)
    for f in accounts(S, b):
        if remote_at(S, f).inst == i:
            return needs(S, f, D, k) - needs(S, f, D, begun)
    return 0


@jit
def peek_batch(S: int, b: int) -> tuple[int, int, int, int, int, int, int, int, float, int]:
    """Return the fields of a batch's `BatchState` as of its last step boundary."""
    W = world(S)
    B = batch_at(S, b)
    lane = decode_lane(S, b)
    j = 0
    busy = B.busy_s
    for x in (2 * b, 2 * b + 1):
        if lane_at(S, x).busy != IDLE:
            busy += W.now - lane_at(S, x).started_s
    if lane >= 0:
        j = stepped(S, lane)
    run = B.count[RUNNING]
    return (
        int(B.count[WAITING] - B.started - B.swapped),
        int(run + B.count[PARKED]),
        int(B.count[ELSEWHERE] + B.swapped),
        int(B.left),
        int(B.context + j * run + B.parked_context),
        int(B.steps + j),
        int(B.seq_steps + j * run),
        int(B.prefilled),
        float(busy),
        int(B.asking),
    )


@jit
def peek_free(S: int, g: int) -> int:
    """Return the free bytes of a GPU or host.

    Blocks that spans have taken for steps that have not begun count as free. Memory for which loads and KV moves wait
    does not count as free.
    """
    W = world(S)
    G = gpu_at(S, g)
    free = G.cap - G.used - promised(S, g)
    for b in range(W.n_batches):
        for f in accounts(S, b):
            i = remote_at(S, f).inst
            n = ahead(S, b, i)
            if n > 0 and is_on(S, i, g):
                free += inst_at(S, i).held - held_bytes(S, i, inst_at(S, i).blocks - n)
    return free


@jit
def peek_used(S: int, i: int) -> int:
    """Return the KV bytes per GPU that an account uses for the steps begun so far."""
    W = world(S)
    n = inst_at(S, i).blocks
    for b in range(W.n_batches):
        n -= ahead(S, b, i)
    return kv_bytes(S, i, n)


@jit
def peek_request(S: int, r: int) -> tuple[int, int, int, int, int]:
    """Return a request's output tokens, KV bytes, batch, home account and transit code at the last step boundary.

    The transit code is 1 while the KV waits to be moved, 2 while the KV is being moved, else 0.
    """
    W = world(S)
    q = req_at(S, r)
    made, blocks = q.made, q.blocks
    if q.state == RUN:
        d = batch_at(S, q.batch).tick - q.joined_tick
        lane = decode_lane(S, q.batch)
        if lane >= 0:
            d += stepped(S, lane)
        made += d
        blocks = max(blocks, (q.length + d - 1 + W.block_tokens - 1) // W.block_tokens)
    size = blocks * inst_at(S, q.home).block_bytes if q.home >= 0 else 0
    transit = 0
    if q.state == MOVE:
        x = W.transfer_head
        while xfer_at(S, x).request != r:
            x = xfer_at(S, x).next
        transit = 1 if xfer_at(S, x).stage == GRANT else 2
    return int(made), int(size), int(q.batch), int(q.home), transit


@jit
def tie(S: int, gpu: int, other: int) -> None:
    """Merge the pools of two GPUs from now on, because some lanes use both GPUs."""
    W = world(S)
    to, old = gpu_at(S, gpu).pool, gpu_at(S, other).pool
    if to == old:
        return
    for g in range(W.n_gpus):
        if gpu_at(S, g).pool == old:
            gpu_at(S, g).pool = to
    lane = gpu_at(S, old).head
    while lane >= 0:
        nxt = lane_at(S, lane).next
        lane_at(S, lane).next = gpu_at(S, to).head
        gpu_at(S, to).head = lane
        gpu_at(S, to).lanes += 1
        lane = nxt
    gpu_at(S, old).head = -1
    gpu_at(S, old).lanes = 0
    gpu_at(S, old).end = INF
    gpu_at(S, to).touched = 1
    next_end(S, to)


@jit
def settle(S: int, t: float) -> None:
    """Account for all time up to t at the end of a run, including the time of steps in flight.

    Call `settle_requests` afterwards.
    """
    W = world(S)
    for p in range(W.n_gpus):
        for lane in lanes_in(S, p):
            n = lane_at(S, lane)
            B = batch_at(S, lane >> 1)
            done = done_at(S, lane, t) if n.rate > 0.0 else 0.0
            wall, off = t - n.started_s, off_s(S, lane, t)
            if W.log_tokens and n.busy == SPAN:
                segment(S, lane, done)
            if n.decodes > 0:
                B.clock_solo += done
                B.clock_wall += wall
                B.clock_slice += off
                if n.busy == SPAN:
                    j = stepped(S, lane)
                    B.tick += j
                    tally(S, lane, j)
            for r in pieces_from(S, n.pieces):
                ran_for(S, r, wall, done, off)
                mark(S, r, t)
    for g in range(W.n_gpus):
        G = gpu_at(S, g)
        G.kv_byte_s += G.kv_bytes * (t - G.kv_since)
        G.kv_since = t
        if G.insts > 0:
            G.held_s += t - G.held_since
        G.held_since = t
        if G.active > 0:
            G.busy_s += t - G.busy_since
            G.busy_since = t


@jit
def settle_requests(S: int, t: float, begin: int, end: int) -> None:
    """Account for the time up to t of the requests [begin, end). Call `settle` before."""
    W = world(S)
    for r in range(begin, end):
        q = req_at(S, r)
        if FUTURE < q.state < DONE:
            charge(S, r, t)
            if q.state == RUN:
                d = batch_at(S, q.batch).tick
                if W.log_tokens and d > q.joined_tick:
                    log_stay(S, r, q.batch)
                q.made += d - q.joined_tick
