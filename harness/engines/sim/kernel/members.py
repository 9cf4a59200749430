"""Members of batches: requests are admitted, parked, moved, dropped and ended.

Over 600 lines: all changes of a membership keep the same lists, heaps and counters, so they stand together.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import free_chunk, take_chunk
from harness.engines.sim.kernel.events import done, over, tell
from harness.engines.sim.kernel.lanes import cut, cut_at, dirty, freed, step_of, unbound, wake
from harness.engines.sim.kernel.links import leave, new_transfer, release, route_kv, set_weights
from harness.engines.sim.kernel.lists import heap_delete, heap_insert, push, unlink
from harness.engines.sim.kernel.memory import never, put
from harness.engines.sim.kernel.pages import enlist, fill, fill_begun, give, strike, take
from harness.engines.sim.kernel.reuse import give_up
from harness.engines.sim.kernel.waits import charge, log_stay, mark
from harness.engines.sim.state import (
    AWAY,
    DRAINING,
    DROPPED,
    E_FINISHED,
    ELSEWHERE,
    GONE,
    GRANT,
    HALF_NS,
    HELD,
    IDLE,
    IN,
    LOAD,
    MIXED,
    MOVE,
    NEVER,
    OK,
    OUT,
    P_ADMIT,
    P_DISCARD,
    P_DROP,
    P_MOVE,
    P_NONE,
    PARK,
    PARKED,
    RUN,
    RUNNING,
    SHIFT,
    SWAP_OUT,
    WAIT,
    WAITING,
    batch_at,
    gpu_at,
    inst_at,
    lane_at,
    remote_at,
    req_at,
    world,
    xfer_at,
)


@jit
def target(S: int, r: int) -> int:
    """Return the tokens that a request's prefill has to go through: its prompt, and what a recompute repeats."""
    return req_at(S, r).prompt + req_at(S, r).made


@jit
def drop_blocks(S: int, r: int) -> None:
    """Free a request's KV, wherever it is."""
    q = req_at(S, r)
    if q.home >= 0:
        i = q.home
        inst_at(S, i).holders -= 1
        if world(S).reuse:
            give_up(S, r)
        else:
            free_chunk(S, i, q.node, q.blocks)
            give(S, i, q.blocks, q.extents)
        freed(S, i)
    q.home = -1
    q.node = -1
    q.extents = -1
    q.attend = 0
    q.blocks = 0


@jit
def remote_of(S: int, b: int, r: int) -> int:
    """Return the row of the account elsewhere in which a batch attends to a request's KV, or -1."""
    q = req_at(S, r)
    f = batch_at(S, b).remote if q.attend and q.home != batch_at(S, b).inst else -1
    while f >= 0 and remote_at(S, f).inst != q.home:
        f = remote_at(S, f).next
    return f


@jit
def within_reach(S: int, b: int, r: int) -> bool:
    """Tell whether a request's KV is where its batch is, or is attended where it is."""
    return req_at(S, r).home == batch_at(S, b).inst or remote_of(S, b, r) >= 0


@jit
def take_blocks(S: int, r: int, i: int, n: int, held: int) -> None:
    """Give a request its first n blocks in an account, of which others hold so many."""
    q = req_at(S, r)
    q.home = i
    q.blocks = n
    q.node = take_chunk(S, i, n)
    inst_at(S, i).holders += 1
    q.extents = take(S, i, n - held)


@jit
def add_blocks(S: int, r: int, i: int, n: int) -> None:
    """Give a request whose prompt is computed piece by piece n blocks more in an account."""
    fill_begun(S, i)
    put(S, i, n)
    q = req_at(S, r)
    q.blocks += n
    q.extents = fill(S, i, n, q.extents)


@jit
def piece_blocks(S: int, r: int, known: int, piece: int) -> int:
    """Return the blocks of a request once a piece of its prompt is computed; the last has a token more."""
    tokens = known + piece
    if tokens == target(S, r):
        tokens += 1
    return int((tokens + world(S).block_tokens - 1) // world(S).block_tokens)


@jit
def quit_batch(S: int, r: int) -> None:
    """Count a request out of its batch; a draining instance leaves after its last member."""
    i = batch_at(S, req_at(S, r).batch).inst
    inst_at(S, i).members -= 1
    if inst_at(S, i).state == DRAINING and inst_at(S, i).members == 0:
        leave(S, i)


@jit
def end(S: int, r: int, state: int, t: float) -> None:
    """End a request that is in no list any more: free its KV blocks, refuse what is pending and tell its end."""
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
    """Send a client's next request at the end of its last one; requests on their way are kept in order of arrival."""
    W = world(S)
    q = req_at(S, r)
    q.arrival = t + W.round_trip_s + q.think
    prev, nxt = W.sent_tail, -1
    while prev >= 0:  # of those that come within an instant the earlier id is first
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
    """Let a parked member take part in decode steps from now on."""
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
    f = remote_of(S, b, r)
    if f < 0:
        B.residues[(q.length - B.tick) % W.block_tokens] += 1
        B.brought += brings
    else:
        F = remote_at(S, f)
        B.far += 1
        F.count += 1
        F.context += q.length
        F.residues[(q.length - B.tick) % W.block_tokens] += 1
        F.brought += brings
    push(S, b, RUNNING, r, 0)
    heap_insert(S, b, r)
    enlist(S, b, r)


@jit
def leave_run(S: int, b: int, r: int) -> None:
    """Take a running member out of the decode steps, at a boundary; its next state is left to the caller."""
    W = world(S)
    q = req_at(S, r)
    B = batch_at(S, b)
    charge(S, r, W.now)
    unlink(S, b, RUNNING, r)
    heap_delete(S, b, r)
    strike(S, b, r)
    steps = B.tick - q.joined_tick
    brought = int(steps == 0 and q.length % W.block_tokens == 1 and q.blocks * W.block_tokens >= q.length)
    f = remote_of(S, b, r)
    if f < 0:
        B.residues[(q.length - q.joined_tick) % W.block_tokens] -= 1
        B.brought -= brought
    else:
        F = remote_at(S, f)
        B.far -= 1
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
    """List a member as parked, where no lane steps it; it has KV here and is in no list."""
    q = req_at(S, r)
    q.state = PARK
    batch_at(S, b).parked_context += q.length
    push(S, b, PARKED, r, 0)


@jit
def park(S: int, b: int, r: int) -> None:
    """Park a member that has KV here and is in no list; wake the lanes that could decode it."""
    set_parked(S, b, r)
    wake(S, 2 * b + 1)
    if lane_at(S, 2 * b).kind == MIXED:
        wake(S, 2 * b)


@jit
def settle_kv(S: int, b: int, r: int) -> None:
    """Park a member whose whole KV is at rest, or list it as away while its KV is out of reach; it is in no list."""
    if within_reach(S, b, r):
        park(S, b, r)
    else:
        req_at(S, r).state = AWAY
        push(S, b, ELSEWHERE, r, 0)


@jit
def queue(S: int, b: int, r: int, front: int) -> None:
    """Queue a member that has no KV and is in no list for its prefill."""
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
    """Take a request out of a step that is between two slices: what they did for it is lost."""
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
    if n.pieces < 0:  # all have left it: it is over
        n.layers_left = 0
        n.ran += 1


@jit
def unlist(S: int, r: int) -> None:
    """Take a request, not in a step, out of its batch's list; its blocks stay."""
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
            wake(S, 2 * b)
            wake(S, 2 * b + 1)
        if batch_at(S, b).count[WAITING] == 0:
            unbound(S, b)
        elif was_head:
            wake(S, 2 * b)
    elif q.state == RUN:
        leave_run(S, b, r)
        if batch_at(S, b).stalled:  # the others may need less than what the batch waits for
            wake(S, 2 * b)
            wake(S, 2 * b + 1)
    elif q.state == PARK:
        unlink(S, b, PARKED, r)
        batch_at(S, b).parked_context -= q.length
        if batch_at(S, b).count[PARKED] == 0:
            unbound(S, b)
    elif q.state == AWAY or q.state == MOVE:
        unlink(S, b, ELSEWHERE, r)


@jit
def rest(S: int, b: int) -> None:
    """Park the running members, with their KV, when no lane decodes any more."""
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
    """Tell whether a request is part of a step in flight."""
    q = req_at(S, r)
    if q.state == WAIT:
        return q.piece > 0 and lane_at(S, 2 * q.batch).busy != IDLE
    if q.state == RUN:
        b = q.batch
        return lane_at(S, 2 * b + 1).busy != IDLE or (lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).decodes > 0)
    return False


@jit
def catch_up(S: int, r: int) -> None:
    """Do what waited for a request to come to rest: membership first."""
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
    """Do what waited for this boundary to members of a batch."""
    for lst in (WAITING, RUNNING, PARKED):
        r = batch_at(S, b).ends[2 * lst]
        while r >= 0:
            nxt = req_at(S, r).next
            if not in_step(S, r):
                catch_up(S, r)
            r = nxt


@jit
def act(S: int, r: int, what: int, arg: int) -> None:
    """Apply an action on a request that is in no step."""
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
    """Apply an action to a request now, or when the step or the KV move that it is in has ended."""
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
    cut(S, 2 * q.batch)
    cut(S, 2 * q.batch + 1)


@jit
def refuse(S: int, x: int, how: int) -> None:
    """Fail a move that cannot take place: its KV is gone, or can never go there."""
    act_ = xfer_at(S, x).action
    release(S, x)
    done(S, act_, how)


@jit
def turn_down(S: int, what: int, arg: int) -> None:
    """Fail an action on a request that cannot take place any more."""
    if what == P_MOVE:
        refuse(S, arg, GONE)
    elif what == P_DISCARD:
        done(S, arg, GONE)


@jit
def next_seq(S: int) -> int:
    """Take the next place in the order of Admit: at the action, though the admission may wait for a boundary."""
    W = world(S)
    W.seq += 1
    return W.seq


@jit
def admit_now(S: int, r: int, b: int, seq: int) -> None:
    """Change a request's batch: the old one loses it; KV stays where it is."""
    W = world(S)
    q = req_at(S, r)
    i = batch_at(S, b).inst
    charge(S, r, W.now)
    if q.state != HELD:
        unlist(S, r)
        old = q.batch
        q.batch = b
        inst_at(S, i).members += 1
        q2 = batch_at(S, old).inst
        inst_at(S, q2).members -= 1
        if inst_at(S, q2).state == DRAINING and inst_at(S, q2).members == 0:
            leave(S, q2)
    else:
        q.batch = b
        inst_at(S, i).members += 1
        q.admit = W.now
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
        wake(S, 2 * b)
        wake(S, 2 * b + 1)
    else:
        drop_blocks(S, r)  # a partly built KV does not travel
        queue(S, b, r, 0)
    mark(S, r, W.now)


@jit
def swapped_out(S: int, r: int) -> None:
    """Put a victim whose KV is now in host memory back into the queue, in its old place, to be swapped in."""
    q = req_at(S, r)
    b = q.batch
    unlink(S, b, ELSEWHERE, r)
    batch_at(S, b).swapped += 1
    q.state = WAIT
    q.prefilled = target(S, r)
    q.piece = 0
    push(S, b, WAITING, r, 1)
    wake(S, 2 * b)
    wake(S, 2 * b + 1)
    catch_up(S, r)


@jit
def discard_now(S: int, r: int, act_: int) -> None:
    """Forget a member's KV; it recomputes from its old place in the queue."""
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
    """Move a request's KV to an account, or forget it (-1): now, or at the boundary of the step that it is in."""
    if to < 0:
        on_request(S, r, P_DISCARD, act_)
    else:
        x = new_transfer(S, SHIFT, to, act_, 0.0, 0.0)
        xfer_at(S, x).attend = attend
        on_request(S, r, P_MOVE, x)


@jit
def movable(S: int, r: int, discard: int) -> bool:
    """Tell whether a member has KV that can move; what is partly built can only be forgotten."""
    return req_at(S, r).home >= 0 and (discard != 0 or req_at(S, r).state != WAIT)


@jit
def movables(S: int, b: int, discard: int) -> int:
    """Count the members of a batch that have such KV."""
    n = 0
    for lst in range(4):
        r = batch_at(S, b).ends[2 * lst]
        while r >= 0:
            n += int(movable(S, r, discard))
            r = req_at(S, r).next
    return n


@jit
def members(S: int, b: int) -> int:
    """Begin to walk the members of a batch in order of Admit: the first, or -1."""
    for lst in range(4):
        world(S).walk[lst] = batch_at(S, b).ends[2 * lst]
    return next_member(S)


@jit
def next_member(S: int) -> int:
    """Return the next member in the order of Admit, or -1; members visited before may change lists meanwhile."""
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
    """Move, or forget, the KV of all members of a batch."""
    r = members(S, b)
    while r >= 0:
        if movable(S, r, int(to < 0)):
            move(S, r, to, attend, act_)
        r = next_member(S)


@jit
def move_now(S: int, r: int, x: int) -> None:
    """Queue a request's KV for memory at its new home."""
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
    if q.state == RUN:  # those taken since it joined are its own from when it leaves
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
    """Take back a transfer that still waits for memory; return whether its action, untold, is over."""
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
    freed(S, i)  # what it had waited for is open to others
    return last


@jit
def back_from_move(S: int, r: int) -> None:
    """Settle a request whose KV is at rest at its home again, then do what was asked of it meanwhile."""
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
    """Complete a transfer: loaded weights can be used, moved KV has its new home."""
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
