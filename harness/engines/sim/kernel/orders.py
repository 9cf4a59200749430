"""Actions on requests: they take effect at once or, if the request is in a step or a KV move, after its end."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.blocks import drop_blocks, target
from harness.engines.sim.kernel.buddy import free_chunk
from harness.engines.sim.kernel.events import done, over
from harness.engines.sim.kernel.lanes import cut_both, freed, step_of, wake_both
from harness.engines.sim.kernel.links import new_transfer, release, route_kv
from harness.engines.sim.kernel.lists import push, unlink
from harness.engines.sim.kernel.members import end, in_step, queue, quit_batch, refuse, settle_kv, turn_down, unlist
from harness.engines.sim.kernel.memory import never
from harness.engines.sim.kernel.pages import give
from harness.engines.sim.kernel.reuse import give_up
from harness.engines.sim.kernel.waits import charge, mark
from harness.engines.sim.kernel.walks import listed
from harness.engines.sim.kernel.weights import set_weights
from harness.engines.sim.state import *


@jit
def catch_up(S: int, r: int) -> None:
    """Carry out a request's pending actions after its step or KV move has ended; an admission comes first."""
    q = req_at(S, r)
    b, what, arg = q.pending_batch, q.pending, q.pending_arg
    if b >= 0:
        q.pending_batch = -1
        batch_at(S, q.batch).pending -= 1
    if what != P_NONE:
        q.pending = P_NONE
        batch_at(S, q.batch).pending -= 1
    if b >= 0:
        admit_now(S, r, b, q.pending_seq)
    if what != P_NONE:
        act(S, r, what, arg)


@jit
def pending(S: int, b: int) -> None:
    """Carry out the pending actions of those members of a batch that are no longer in a step."""
    for lst in (WAITING, RUNNING, PARKED):
        for r in listed(S, b, lst):
            if not in_step(S, r):
                catch_up(S, r)


@jit
def act(S: int, r: int, what: int, arg: int) -> None:
    """Apply an action to a request that is in no step.

    `what` is the action's code (P_*), and `arg` is its argument.
    """
    W = world(S)
    if what == P_ADMIT:
        admit_now(S, r, arg, next_seq(S))
    elif what == P_DROP:
        unlist(S, r)
        end(S, r, DROPPED, W.now)
    elif what == P_DISCARD:
        discard_now(S, r, arg)
    elif what == P_MOVE:
        move_now(S, r, arg)


@jit
def on_request(S: int, r: int, what: int, arg: int) -> None:
    """Apply an action to a request now or, if the request is in a step or a KV move, after its end.

    At most one admission and one other action can be pending. A new admission replaces the pending admission. While
    another action is pending, a drop replaces that action, and every other new action fails.
    """
    q = req_at(S, r)
    if q.state != MOVE and not in_step(S, r):
        act(S, r, what, arg)
        return
    B = batch_at(S, q.batch)
    if what == P_ADMIT:
        if q.pending_batch < 0:
            B.pending += 1
        q.pending_batch = arg
        q.pending_seq = next_seq(S)
    elif q.pending == P_NONE:
        B.pending += 1
        q.pending = what
        q.pending_arg = arg
    elif what == P_DROP:
        turn_down(S, q.pending, q.pending_arg)
        q.pending = what
    else:
        turn_down(S, what, arg)
    cut_both(S, q.batch)


@jit
def next_seq(S: int) -> int:
    """Return the next number in the order of admissions.

    An admission gets its number when the action is issued, even if the admission then waits for a step boundary.
    """
    W = world(S)
    W.seq += 1
    return W.seq


@jit
def admit_now(S: int, r: int, b: int, seq: int) -> None:
    """Admit a request to a batch, and remove it from its previous batch if it has one.

    The KV of a completed prefill, and KV in host memory, stay where they are. The KV of an unfinished prefill is
    dropped if the batch runs on other GPUs.
    """
    W = world(S)
    q = req_at(S, r)
    i = batch_at(S, b).inst
    charge(S, r, W.now)
    inst_at(S, i).members += 1
    if q.state == HELD:
        q.admit = W.now
    else:
        unlist(S, r)
        quit_batch(S, r)
    q.batch = b
    q.seq = seq
    if W.lookahead_steps > 0:
        n = lane_at(S, 2 * b)
        q.joins_step = n.ran + W.lookahead_steps
        if n.busy != IDLE or n.layers_left > 0:  # a step between two slices is under way
            q.joins_step += step_of(S, 2 * b)
    state = q.state
    whole = state == RUN or state == PARK or state == AWAY
    if state == MOVE:
        push(S, b, ELSEWHERE, r, 0)
    elif whole:
        settle_kv(S, b, r)
    elif q.home >= 0 and (q.home == i or inst_at(S, q.home).is_host):
        batch_at(S, b).left += target(S, r) - q.prefilled  # partly built, or swapped out: it stays so
        push(S, b, WAITING, r, 0)
        if q.home == i:
            batch_at(S, b).started += 1
        else:
            batch_at(S, b).swapped += 1
        wake_both(S, b)
    else:
        drop_blocks(S, r)  # a partly built KV does not travel
        queue(S, b, r, 0)
    mark(S, r, W.now)


@jit
def swapped_out(S: int, r: int) -> None:
    """Put a preempted member, whose KV is now in host memory, back into its old place in the queue.

    The member waits there until its KV is swapped in.
    """
    q = req_at(S, r)
    b = q.batch
    unlink(S, b, ELSEWHERE, r)
    batch_at(S, b).swapped += 1
    q.state = WAIT
    q.prefilled = target(S, r)
    q.piece = 0
    push(S, b, WAITING, r, 1)
    wake_both(S, b)
    catch_up(S, r)


@jit
def discard_now(S: int, r: int, act_: int) -> None:
    """Free a member's KV, and put the member back into its old place in the queue to recompute the KV."""
    W = world(S)
    q = req_at(S, r)
    done(S, act_, GONE if q.home < 0 else OK)
    if q.home < 0:
        return
    charge(S, r, W.now)
    unlist(S, r)
    drop_blocks(S, r)
    queue(S, q.batch, r, 1)
    mark(S, r, W.now)


@jit
def move(S: int, r: int, to: int, attend: int, act_: int) -> None:
    """Move a request's KV to the account `to`, or discard the KV if `to` is -1.

    If the request is in a step or another KV move, the action starts after that step or move has ended. With `attend`,
    the request's batch attends to the KV at its new place. `act_` is the action's number.
    """
    if to < 0:
        on_request(S, r, P_DISCARD, act_)
    else:
        x = new_transfer(S, SHIFT, to, act_, 0.0, 0.0)
        xfer_at(S, x).attend = attend
        on_request(S, r, P_MOVE, x)


@jit
def movable(S: int, r: int, discard: int) -> bool:
    """Tell whether a member has KV that can be moved or, with `discard`, dropped.

    The KV of a queued member (swapped out, or of an unfinished prefill) can only be dropped.
    """
    return req_at(S, r).home >= 0 and (discard != 0 or req_at(S, r).state != WAIT)


@jit
def movables(S: int, b: int, discard: int) -> int:
    """Count the members of a batch for which `movable` is true."""
    n = 0
    for lst in range(4):
        for r in listed(S, b, lst):
            n += int(movable(S, r, discard))
    return n


@jit
def members(S: int, b: int) -> int:
    """Start an iteration over a batch's members in order of admission; return the first member, or -1."""
    for lst in range(4):
        world(S).walk[lst] = batch_at(S, b).ends[2 * lst]
    return next_member(S)


@jit
def next_member(S: int) -> int:
    """Return the next member of the iteration that `members` started, or -1.

    Members that were returned before may change lists meanwhile.
    """
    W = world(S)
    at, r = -1, -1
    for lst in range(4):
        x = W.walk[lst]
        if x >= 0 and (r < 0 or req_at(S, x).seq < req_at(S, r).seq):
            at, r = lst, x
    if r >= 0:
        W.walk[at] = req_at(S, r).next
    return r


@jit
def move_batch(S: int, b: int, to: int, attend: int, act_: int) -> None:
    """Move the KV of all members of a batch to the account `to`, or discard their KV if `to` is -1.

    With `attend`, the batch attends to the KV at its new place. `act_` is the action's number.
    """
    r = members(S, b)
    while r >= 0:
        if movable(S, r, int(to < 0)):
            move(S, r, to, attend, act_)
        r = next_member(S)


@jit
def move_now(S: int, r: int, x: int) -> None:
    """Queue transfer x of a request's KV; the transfer then waits for memory in its target account.

    If the target account stores the KV already, the move ends at once. The move fails if there is no KV to move, or if
    the KV can never fit.
    """
    W = world(S)
    q = req_at(S, r)
    X = xfer_at(S, x)
    dst = X.inst
    b = q.batch
    if q.home == dst and q.state != WAIT:
        act_, attend = X.action, X.attend
        release(S, x)
        if attend != q.attend:
            charge(S, r, W.now)
            unlist(S, r)
            q.attend = attend
            settle_kv(S, b, r)
            mark(S, r, W.now)
        done(S, act_, OK)
        return
    blocks = q.blocks
    if q.state == RUN:  # blocks that it took since it joined are added to its own when it leaves
        length = q.length + batch_at(S, b).tick - q.joined_tick
        blocks = max(blocks, (length - 1 + W.block_tokens - 1) // W.block_tokens)
    if q.home < 0 or q.state == WAIT:
        refuse(S, x, GONE)
        return
    if never(S, dst, blocks):
        refuse(S, x, NEVER)
        return
    charge(S, r, W.now)
    unlist(S, r)
    q.state = MOVE
    push(S, b, ELSEWHERE, r, 0)
    X.request = r
    X.source = q.home
    X.blocks = q.blocks
    X.bytes = float(q.blocks * inst_at(S, dst).block_bytes)
    route_kv(S, x, q.home, dst, q.blocks)
    X.stage = GRANT
    batch_at(S, b).asking += 1
    for j in range(inst_at(S, dst).gpu_count):
        gpu_at(S, inst_at(S, dst).gpus[j]).waiting += int(X.bytes)
    W.grants = 1
    mark(S, r, W.now)


@jit
def withdraw(S: int, x: int) -> bool:
    """Cancel a transfer that still waits for memory; return whether all parts of its action have now ended.

    The end of the action is not reported.
    """
    X = xfer_at(S, x)
    i = X.inst
    last = over(S, X.action, NEVER)
    for j in range(inst_at(S, i).gpu_count):
        gpu_at(S, inst_at(S, i).gpus[j]).waiting -= int(X.bytes)
    r = X.request
    if X.kind == LOAD:
        set_weights(S, i, OUT)
    release(S, x)
    if r >= 0:
        batch_at(S, req_at(S, r).batch).asking -= 1
        back_from_move(S, r)
    freed(S, i)  # others may have the memory for which it waited
    return last


@jit
def back_from_move(S: int, r: int) -> None:
    """Put a request back into its batch's lists after a KV move, then carry out the request's pending actions."""
    W = world(S)
    q = req_at(S, r)
    b = q.batch
    charge(S, r, W.now)
    unlink(S, b, ELSEWHERE, r)
    settle_kv(S, b, r)
    mark(S, r, W.now)
    catch_up(S, r)


@jit
def arrive(S: int, x: int) -> None:
    """Complete a transfer: loaded weights become usable, or moved KV now belongs to its target account."""
    W = world(S)
    X = xfer_at(S, x)
    kind, i, r, src, blocks, act_ = X.kind, X.inst, X.request, X.source, X.blocks, X.action
    attend, node, extents = X.attend, X.node, X.extents
    release(S, x)
    if kind == LOAD:
        W.loads += 1
        set_weights(S, i, IN)
        done(S, act_, OK)
        return
    if r >= 0:
        q = req_at(S, r)
        charge(S, r, W.now)
        inst_at(S, src).holders -= 1
        if kind == SWAP_OUT:
            inst_at(S, src).gone -= q.blocks - q.shared
        if W.reuse:
            give_up(S, r)
        else:
            free_chunk(S, src, q.node, q.blocks)
            give(S, src, q.blocks, q.extents)
        q.node = node
        q.extents = extents
        q.blocks = blocks
        q.home = i
        q.attend = attend
        if kind == SWAP_OUT:
            inst_at(S, i).holders += 1
            swapped_out(S, r)
            mark(S, r, W.now)
        else:
            back_from_move(S, r)
        freed(S, src)
        W.moves += 1
    done(S, act_, OK)
