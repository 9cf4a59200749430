"""Members of batches: how requests enter and leave their batches' lists, heaps and counters."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.blocks import account_of, drop_blocks, target
from harness.engines.sim.kernel.events import done, tell
from harness.engines.sim.kernel.lanes import cut_at, dirty, unbound, wake, wake_both
from harness.engines.sim.kernel.links import release
from harness.engines.sim.kernel.lists import heap_delete, heap_insert, push, unlink
from harness.engines.sim.kernel.pages import enlist, strike
from harness.engines.sim.kernel.waits import charge, log_stay
from harness.engines.sim.kernel.weights import leave
from harness.engines.sim.state import *


@jit
def quit_batch(S: int, r: int) -> None:
    """Decrease the member count of a request's instance by one.

    If no member is left and the instance is draining, remove the instance's weights.
    """
    i = batch_at(S, req_at(S, r).batch).inst
    inst_at(S, i).members -= 1
    if inst_at(S, i).state == DRAINING and inst_at(S, i).members == 0:
        leave(S, i)


@jit
def end(S: int, r: int, state: int, t: float) -> None:
    """End a request that is in no list: free its KV blocks, fail its pending action and report the request's end.

    `state` is DONE, DROPPED or FAILED. In a closed loop, the client's next request is scheduled.
    """
    W = world(S)
    q = req_at(S, r)
    charge(S, r, t)
    drop_blocks(S, r)
    q.done = t
    was = q.batch
    if was >= 0:
        quit_batch(S, r)
        if q.pending_batch >= 0:
            q.pending_batch = -1
            batch_at(S, was).pending -= 1
        if q.pending != P_NONE:
            turn_down(S, q.pending, q.pending_arg)
            q.pending = P_NONE
            batch_at(S, was).pending -= 1
    q.state = state
    W.left -= 1
    if q.heir >= 0:
        send(S, q.heir, t)
    tell(S, E_FINISHED, r, was, state)


@jit
def send(S: int, r: int, t: float) -> None:
    """Schedule the arrival of a closed-loop client's request r; the client's previous request ended at time t.

    Requests that were sent but have not arrived form a list in order of arrival.
    """
    W = world(S)
    q = req_at(S, r)
    q.arrival = t + W.round_trip_s + q.think
    prev, nxt = W.sent_tail, -1
    while prev >= 0:  # the lower id is first among requests that arrive within an instant
        ahead_s = req_at(S, prev).arrival - q.arrival
        if ahead_s < -HALF_NS or (ahead_s <= HALF_NS and prev < r):
            break
        prev, nxt = req_at(S, prev).prev, prev
    q.prev = prev
    q.next = nxt
    if prev >= 0:
        req_at(S, prev).next = r
    else:
        W.sent_head = r
    if nxt >= 0:
        req_at(S, nxt).prev = r
    else:
        W.sent_tail = r


@jit
def join(S: int, b: int, r: int) -> None:
    """Move a parked member to the running members, so that it takes part in the batch's decode steps."""
    W = world(S)
    q = req_at(S, r)
    B = batch_at(S, b)
    charge(S, r, W.now)
    unlink(S, b, PARKED, r)
    B.parked_context -= q.length
    q.state = RUN
    q.joined_tick = B.tick
    q.last_tick = B.tick + q.output - q.made
    B.context += q.length
    brings = int(q.length % W.block_tokens == 1 and q.blocks * W.block_tokens >= q.length)
    F = remote_at(S, account_of(S, b, r))
    B.far += int(F.inst != B.inst)
    F.count += 1
    F.context += q.length
    F.residues[(q.length - B.tick) % W.block_tokens] += 1
    F.brought += brings
    push(S, b, RUNNING, r, 0)
    heap_insert(S, b, r)
    enlist(S, b, r)


@jit
def leave_run(S: int, b: int, r: int) -> None:
    """Remove a member from the running members, at a step boundary. The caller sets its next state."""
    W = world(S)
    q = req_at(S, r)
    B = batch_at(S, b)
    charge(S, r, W.now)
    unlink(S, b, RUNNING, r)
    heap_delete(S, b, r)
    strike(S, b, r)
    steps = B.tick - q.joined_tick
    brought = int(steps == 0 and q.length % W.block_tokens == 1 and q.blocks * W.block_tokens >= q.length)
    F = remote_at(S, account_of(S, b, r))
    B.far -= int(F.inst != B.inst)
    F.count -= 1
    F.context -= q.length + steps
    F.residues[(q.length - q.joined_tick) % W.block_tokens] -= 1
    F.brought -= brought
    if W.log_tokens and steps > 0:
        log_stay(S, r, b)
    q.made += steps
    q.length += steps
    B.context -= q.length
    q.blocks = max(q.blocks, (q.length - 1 + W.block_tokens - 1) // W.block_tokens)


@jit
def set_parked(S: int, b: int, r: int) -> None:
    """Put a member into its batch's parked list, whose members are in no step.

    The member must be in no other list, and its batch must be able to attend to its KV.
    """
    q = req_at(S, r)
    q.state = PARK
    batch_at(S, b).parked_context += q.length
    push(S, b, PARKED, r, 0)


@jit
def park(S: int, b: int, r: int) -> None:
    """Call `set_parked` for a member, and wake the lanes that could decode for it."""
    set_parked(S, b, r)
    wake(S, 2 * b + 1)
    if lane_at(S, 2 * b).kind == MIXED:
        wake(S, 2 * b)


@jit
def settle_kv(S: int, b: int, r: int) -> None:
    """Park a member that has its whole KV and is in no list.

    If its batch cannot attend to the KV where it is stored, put the member into the list ELSEWHERE instead.
    """
    if account_of(S, b, r) >= 0:
        park(S, b, r)
    else:
        req_at(S, r).state = AWAY
        push(S, b, ELSEWHERE, r, 0)


@jit
def queue(S: int, b: int, r: int, front: int) -> None:
    """Queue a member for its prefill. The member must have no KV and be in no list.

    Search for its place in the queue from the tail or, with `front`, from the head.
    """
    q = req_at(S, r)
    q.state = WAIT
    q.prefilled = 0
    q.piece = 0
    batch_at(S, b).left += target(S, r) - q.prefilled
    push(S, b, WAITING, r, front)
    if batch_at(S, b).ends[2 * WAITING] == r:
        dirty(S, 2 * b)
        cut_at(S, 2 * b, q.joins_step)


@jit
def leave_step(S: int, r: int) -> None:
    """Remove a request from a sliced step that is between two slices.

    A slice of a step runs some of the model's layers. The work that earlier slices have done for the request is lost.
    """
    q = req_at(S, r)
    n = lane_at(S, 2 * q.batch)
    if n.pieces == r:
        n.pieces = q.next_piece
    else:
        x = n.pieces
        while req_at(S, x).next_piece != r:
            x = req_at(S, x).next_piece
        req_at(S, x).next_piece = q.next_piece
    q.piece = 0
    if n.pieces < 0:  # all requests have left the step: it is over
        n.layers_left = 0
        n.ran += 1


@jit
def unlist(S: int, r: int) -> None:
    """Remove a request that is not in a running step from its batch's list; the request keeps its KV blocks."""
    q = req_at(S, r)
    b = q.batch
    if q.state == WAIT:
        if q.piece > 0:
            leave_step(S, r)
        was_head = batch_at(S, b).ends[2 * WAITING] == r
        unlink(S, b, WAITING, r)
        batch_at(S, b).left -= target(S, r) - q.prefilled
        if q.home == batch_at(S, b).inst:
            batch_at(S, b).started -= 1
        elif q.home >= 0:
            batch_at(S, b).swapped -= 1  # members that it held up may be brought back, or let in
            wake_both(S, b)
        if batch_at(S, b).count[WAITING] == 0:
            unbound(S, b)
        elif was_head:
            wake(S, 2 * b)
    elif q.state == RUN:
        leave_run(S, b, r)
        if batch_at(S, b).stalled:  # the others may need less than what the batch waits for
            wake_both(S, b)
    elif q.state == PARK:
        unlink(S, b, PARKED, r)
        batch_at(S, b).parked_context -= q.length
        if batch_at(S, b).count[PARKED] == 0:
            unbound(S, b)
    elif q.state == AWAY or q.state == MOVE:
        unlink(S, b, ELSEWHERE, r)


@jit
def rest(S: int, b: int) -> None:
    """Park a batch's running members, with their KV, if no lane decodes for them.

    That is the case if no lane is open for decodes and no step with decodes is in flight.
    """
    if lane_at(S, 2 * b + 1).busy != IDLE or (lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).decodes > 0):
        return
    if lane_at(S, 2 * b + 1).open or (lane_at(S, 2 * b).open and lane_at(S, 2 * b).kind == MIXED):
        return
    while batch_at(S, b).count[RUNNING] > 0:
        r = batch_at(S, b).ends[2 * RUNNING]
        leave_run(S, b, r)
        set_parked(S, b, r)


@jit
def in_step(S: int, r: int) -> bool:
    """Tell whether a request takes part in a step in flight."""
    q = req_at(S, r)
    if q.state == WAIT:
        return q.piece > 0 and lane_at(S, 2 * q.batch).busy != IDLE
    if q.state == RUN:
        b = q.batch
        return lane_at(S, 2 * b + 1).busy != IDLE or (lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).decodes > 0)
    return False


@jit
def refuse(S: int, x: int, how: int) -> None:
    """Fail a KV move that cannot take place, because the KV is gone or can never fit at its target.

    `how` is GONE or NEVER.
    """
    act_ = xfer_at(S, x).action
    release(S, x)
    done(S, act_, how)


@jit
def turn_down(S: int, what: int, arg: int) -> None:
    """Fail a pending KV move or discard, because it can no longer take place.

    `what` is the code of the pending action (P_*). `arg` is the row of the move's transfer, or the number of the
    discard's action. Other pending actions need no report.
    """
    if what == P_MOVE:
        refuse(S, arg, GONE)
    elif what == P_DISCARD:
        done(S, arg, GONE)
