"""Growth of KV: blocks for the next step, and the choice of members to preempt if no block is free."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.blocks import add_blocks, drop_blocks, piece_blocks, target
from harness.engines.sim.kernel.events import tell
from harness.engines.sim.kernel.lanes import room, wake
from harness.engines.sim.kernel.links import transfer
from harness.engines.sim.kernel.lists import push, unlink
from harness.engines.sim.kernel.members import end, in_step, queue, unlist
from harness.engines.sim.kernel.memory import fits, put, watermark
from harness.engines.sim.kernel.pages import fill_step, take
from harness.engines.sim.kernel.waits import charge
from harness.engines.sim.kernel.walks import accounts, listed
from harness.engines.sim.state import *


@jit
def latest(S: int, b: int, i: int) -> int:
    """Return the most recently admitted member of batch b that has KV in account i and is in no step; -1 if none."""
    r = latest_of(S, batch_at(S, b).ends[2 * RUNNING + 1], i) if lane_at(S, 2 * b + 1).busy == IDLE else -1
    p = latest_of(S, batch_at(S, b).ends[2 * PARKED + 1], i)
    if r < 0 or (p >= 0 and req_at(S, p).seq > req_at(S, r).seq):
        r = p
    left = batch_at(S, b).started if batch_at(S, b).inst == i else 0
    w = batch_at(S, b).ends[2 * WAITING]
    while left > 0:
        if req_at(S, w).home == batch_at(S, b).inst:
            left -= 1
            if not in_step(S, w) and (r < 0 or req_at(S, w).seq > req_at(S, r).seq):
                r = w
        w = req_at(S, w).next
    return r


@jit
def latest_of(S: int, r: int, i: int) -> int:
    """Return the first request with KV in account i that a backward search from r finds in r's list; -1 if none."""
    while r >= 0 and req_at(S, r).home != i:
        r = req_at(S, r).prev
    return r


@jit
def preempt(S: int, b: int, r: int) -> None:
    """Preempt a member: swap its KV out to host memory, or free its KV and queue the member for a recompute."""
    W = world(S)
    q = req_at(S, r)
    q.preemptions += 1
    W.preempts += 1
    charge(S, r, W.now)
    whole = q.state != WAIT
    unlist(S, r)
    tell(S, E_PREEMPTED, r, b, 0)
    i = q.home
    host = inst_at(S, i).host
    if W.swap and whole and fits(S, host, q.blocks, 1):
        q.state = MOVE
        push(S, b, ELSEWHERE, r, 1)
        inst_at(S, i).gone += q.blocks - q.shared  # others may hold what it shares
        put(S, host, q.blocks)
        transfer(S, SWAP_OUT, r, i, host, q.blocks)
    else:
        drop_blocks(S, r)
        queue(S, b, r, 1)


@jit
def due_blocks(S: int, b: int, f: int) -> int:
    """Return the number of new KV blocks in account f that a batch's next decode step needs.

    `f` is the batch's entry for the account.
    """
    if world(S).reserves:
        return 0
    at = (1 - batch_at(S, b).tick) % world(S).block_tokens
    return int(remote_at(S, f).residues[at] - remote_at(S, f).brought)


@jit
def grow_prompts(S: int, b: int, left: int, whole: int) -> int:
    """Take blocks for the next pieces of prompts that have KV already; return 1 if a member was preempted, else 0.

    `left` is the step's budget in tokens. With `whole`, prompts are not cut into pieces. If no block is free, the most
    recently admitted member is preempted, even if that member itself needs the block (vLLM 0.8 to 0.18,
    v1/core/sched/scheduler.py, `schedule`).
    """
    B = batch_at(S, b)
    i = B.inst
    lost, first = 0, 1
    r = B.ends[2 * WAITING]
    while r >= 0 and left > 0:
        q = req_at(S, r)
        if q.home == i:
            c = target(S, r) - q.prefilled
            if c > left and not whole:
                c = left
            elif c > left and not first:
                return lost
            left -= c
            first = 0
            n = piece_blocks(S, r, q.prefilled, c) - q.blocks
            while n > 0 and not room(S, i, n, 1):
                if inst_at(S, i).gone > 0:  # victims are on their way: no more until they are out
                    return lost
                v = latest(S, b, i)
                preempt(S, b, v)
                lost = 1
                if v == r:
                    return lost
            if n > 0:
                add_blocks(S, r, i, n)
        r = q.next
    return lost


@jit
def grow_in(S: int, b: int, f: int) -> int:
    """Take blocks in one account for one decode step of a batch's running members with KV there.

    `f` is the batch's entry for the account. If blocks run short, members are preempted. If only one request has KV in
    the account, that request fails instead. Return flags as `grow` does.
    """
    W = world(S)
    B = batch_at(S, b)
    i = remote_at(S, f).inst
    lost = 0
    n = 0
    while B.count[RUNNING] > 0:
        n = due_blocks(S, b, f)
        if n == 0 or (B.stalled and inst_at(S, i).gone > 0):  # victims are on their way: no more until they are out
            break
        if room(S, i, n, 2):
            break
        r = latest(S, b, i)
        lost = 1
        if inst_at(S, i).holders == 1:
            unlist(S, r)
            end(S, r, FAILED, W.now)
        else:
            preempt(S, b, r)
        n = 0
    if n > 0:
        if inst_at(S, i).gone > 0 and not room(S, i, n, 1):
            return 2 + lost
        put(S, i, n)
    return lost


@jit
def grow(S: int, b: int) -> int:
    """Take blocks for one decode step of the running members, in every account that stores their KV.

    Return the sum of two flags: 1 if some member was preempted or failed, and 2 if the step must wait. With flag 2 the
    step has taken no blocks. It waits until KV that is being swapped out has reached host memory.
    """
    B = batch_at(S, b)
    state = 0
    for f in accounts(S, b):
        if remote_at(S, f).count > 0:
            got = grow_in(S, b, f)
            if got >= 2:  # the batch waits, so that the step takes no blocks
                for e in accounts(S, b):
                    if e == f:
                        break
                    put(S, remote_at(S, e).inst, -due_blocks(S, b, e))
                return 2 | got | state
            state |= got
    fill_step(S, b)
    if B.swapped > 0 and inst_at(S, B.inst).gone == 0:
        bring_back(S, b)
    return state


@jit
def bring_back(S: int, b: int) -> None:
    """Start to swap the KV of swapped-out members back in from host memory, in queue order.

    Stop at the first member for which there is no room. New prompts are admitted only after the swaps of all these
    members have started.
    """
    W = world(S)
    B = batch_at(S, b)
    i = B.inst
    for r in listed(S, b, WAITING):
        q = req_at(S, r)
        if B.swapped == 0:
            return
        if q.home >= 0 and q.home != i:
            need = (q.length + W.block_tokens - 1) // W.block_tokens
            if not room(S, i, need + (watermark(S, i) if inst_at(S, i).blocks > 0 else 0), 0):
                return
            charge(S, r, W.now)
            unlink(S, b, WAITING, r)
            B.swapped -= 1
            q.state = MOVE
            push(S, b, ELSEWHERE, r, 1)
            extents = take(S, i, q.blocks)
            inst_at(S, i).holders += 1
            x = transfer(S, SWAP_IN, r, q.home, i, q.blocks)
            xfer_at(S, x).extents = extents
            wake(S, 2 * b)
