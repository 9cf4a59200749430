"""Lanes in time: spans and their ends, turns on a GPU, memory that comes free."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.lent import demand_on, lend, slowed
from harness.engines.sim.kernel.memory import exceeds, fits, holds, needs, needs_far, put, touches
from harness.engines.sim.state import (
    HALF_NS,
    IDLE,
    INF,
    SPAN,
    batch_at,
    cost_at,
    demand_at,
    gpu_at,
    inst_at,
    lane_at,
    log_at,
    remote_at,
    world,
)

SWEEPS = 3  # over the lanes of a pool, until how much of the time each is on its GPUs hardly changes


@jit
def give_back(S: int, i: int, others: bool) -> None:
    """Cut the spans that hold blocks of an account, or all on its GPUs, so that memory is what begun steps need."""
    W = world(S)
    for p in range(W.n_gpus):
        lane = gpu_at(S, p).head
        while lane >= 0:
            nxt = lane_at(S, lane).next
            if lane_at(S, lane).busy == SPAN and (touches(S, lane >> 1, i) if others else holds(S, lane >> 1, i)):
                cut(S, lane)
            lane = nxt


@jit
def room(S: int, i: int, n: int, grow_: int) -> bool:
    """Tell whether n more blocks fit once nothing is held in advance."""
    if fits(S, i, n, grow_):
        return True
    if exceeds(S, i, n, grow_):
        give_back(S, i, False)
        if exceeds(S, i, n, grow_):
            return False
    give_back(S, i, True)
    return fits(S, i, n, grow_)


@jit
def freed(S: int, i: int) -> None:
    """Let all that wait for memory on the GPUs of an instance try again, since some came free."""
    W = world(S)
    W.grants = 1
    if W.blocked > 0 or W.swap:
        for b in range(W.n_batches):
            B = batch_at(S, b)
            if (B.blocked or B.stalled or B.swapped > 0) and touches(S, b, i):
                wake(S, 2 * b)
                wake(S, 2 * b + 1)


@jit
def dirty(S: int, lane: int) -> None:
    """Mark an open, idle lane to be formed at this instant."""
    W = world(S)
    n = lane_at(S, lane)
    if n.dirty == 0 and n.busy == IDLE and n.open:
        n.dirty = 1
        if W.dirty_head < 0 or lane < W.dirty_head:
            n.next_dirty = W.dirty_head
            W.dirty_head = lane
        else:
            x = W.dirty_head
            while lane_at(S, x).next_dirty >= 0 and lane_at(S, x).next_dirty < lane:
                x = lane_at(S, x).next_dirty
            n.next_dirty = lane_at(S, x).next_dirty
            lane_at(S, x).next_dirty = lane


@jit
def solo_at(S: int, lane: int, j: int) -> float:
    """Return the solo seconds of the first j steps of a span."""
    n = lane_at(S, lane)
    return j * n.first_s + n.slope_s * (0.5 * j * (j - 1))


@jit
def steps_to(S: int, lane: int, done: float) -> int:
    """Return the fewest steps, at least one, whose solo seconds reach `done`."""
    n = lane_at(S, lane)
    h = n.first_s - 0.5 * n.slope_s
    if n.slope_s > 0.0:
        j = int(math.ceil((-h + math.sqrt(h * h + 2.0 * n.slope_s * done)) / n.slope_s))
    else:
        j = int(math.ceil(done / n.first_s))
    j = min(max(j, 1), n.steps)
    while j > 1 and solo_at(S, lane, j - 1) >= done:
        j -= 1
    while j < n.steps and solo_at(S, lane, j) < done:
        j += 1
    return j


@jit
def done_at(S: int, lane: int, t: float) -> float:
    """Return the solo seconds done by t."""
    n = lane_at(S, lane)
    return n.anchor_work + (t - n.anchor_s) * n.rate


@jit
def next_end(S: int, p: int) -> None:
    """Note the lane of a pool that ends first; ties go to the older lane."""
    P = gpu_at(S, p)
    P.end = INF
    P.lane = -1
    lane = P.head
    while lane >= 0:
        n = lane_at(S, lane)
        if n.end < P.end or (n.end == P.end and lane < P.lane):
            P.end = n.end
            P.lane = lane
        lane = n.next


@jit
def step_of(S: int, lane: int) -> int:
    """Return the step, from 1, that a busy lane is in."""
    W = world(S)
    n = lane_at(S, lane)
    if n.busy != SPAN or n.steps == 1 or n.rate <= 0.0:  # rate 0: formed at this instant, not under way yet
        return 1
    now = W.now
    j = steps_to(S, lane, done_at(S, lane, now - HALF_NS))
    begun = lane <= W.formed_lane and now <= W.formed_s + HALF_NS
    if begun and j < n.steps and n.anchor_s + (solo_at(S, lane, j) - n.anchor_work) / n.rate <= now + HALF_NS:
        j += 1  # its step of this instant has begun
    return j


@jit
def cut(S: int, lane: int) -> None:
    """End a span at its next boundary; pages held for later steps go back."""
    cut_at(S, lane, 0)


@jit
def cut_at(S: int, lane: int, ran: int) -> None:
    """End a span at its next boundary, or when its lane has run `ran` steps if that is later."""
    W = world(S)
    n = lane_at(S, lane)
    if n.busy != SPAN or n.steps == 1:
        return
    j = max(step_of(S, lane), ran - n.ran)
    if j < n.steps:
        shorten(S, lane, j)
        if n.rate > 0.0:
            n.end = max(W.now, n.anchor_s + (n.work - n.anchor_work) / n.rate)
            if n.end <= W.now + HALF_NS:
                W.due = 1
            next_end(S, pool_of(S, lane))


@jit
def shorten(S: int, lane: int, j: int) -> None:
    """Plan a span for j steps instead of more."""
    n = lane_at(S, lane)
    b = lane >> 1
    d = batch_at(S, b).tick
    back = needs(S, b, d, n.steps) - needs(S, b, d, j)
    f = n.lent if n.lent < 0 else batch_at(S, b).remote
    while f >= 0:
        put(S, remote_at(S, f).inst, needs_far(S, f, d, j) - needs_far(S, f, d, n.steps))
        f = remote_at(S, f).next
    n.steps = j
    n.work = solo_at(S, lane, j)
    if back > 0:
        put(S, batch_at(S, b).inst, -back)


@jit
def wake(S: int, lane: int) -> None:
    """Form a lane anew after a change: now if it is idle, else at its next boundary."""
    n = lane_at(S, lane)
    if n.busy == IDLE:
        dirty(S, lane)
    elif n.busy == SPAN:
        cut(S, lane)


@jit
def pool_of(S: int, lane: int) -> int:
    """Return the pool in which a lane competes."""
    return gpu_at(S, inst_at(S, batch_at(S, lane >> 1).inst).gpus[0]).pool


@jit
def segment(S: int, lane: int, upto: float) -> None:
    """Log the steps of a lane that are not logged and end by `upto` solo seconds, for token times and their waits."""
    W = world(S)
    n = lane_at(S, lane)
    if not n.decodes:
        return
    j0 = n.logged
    j1 = n.steps
    while j1 > j0 and solo_at(S, lane, j1) > upto:
        j1 -= 1
    if j1 > j0:
        n.logged = j1
        B = batch_at(S, lane >> 1)
        s = log_at(S, W.log_used)
        W.log_used += 1
        s.request = -1
        s.batch = lane >> 1
        s.tick_from = B.tick
        s.step_from = j0
        s.step_to = j1
        s.first_s = n.first_s
        s.slope_s = n.slope_s
        s.anchor_s = n.anchor_s
        s.anchor_work = n.anchor_work
        s.rate = n.rate
        s.part = n.part
        s.clock_load = B.clock_load
        s.clock_stall = B.clock_stall
        s.clock_solo = B.clock_solo + n.anchor_work
        s.clock_wall = B.clock_wall + (n.anchor_s - n.started_s)
        s.clock_slice = B.clock_slice + off_s(S, lane, n.anchor_s)


@jit
def ask(S: int, lane: int, solo: float, compute: float, hbm: float) -> None:
    """Demand as much of each GPU of a lane's instance, and a slice of as many solo seconds."""
    lane_at(S, lane).slice_s = solo
    d = lane_at(S, lane).demand
    for _ in range(inst_at(S, batch_at(S, lane >> 1).inst).gpu_count):
        demand_at(S, d).compute = compute
        demand_at(S, d).hbm = hbm
        d = demand_at(S, d).next


@jit
def set_rate(S: int, lane: int, rate: float) -> None:
    """Give a lane a new rate from now on."""
    W = world(S)
    n = lane_at(S, lane)
    if rate == n.rate:
        return
    now = W.now
    if n.rate > 0.0:
        done = done_at(S, lane, now)
        if W.log_tokens:
            segment(S, lane, done)
        n.anchor_work = done
    n.anchor_s = now
    n.rate = rate
    if n.busy == SPAN and n.steps > 1 and n.in_turn and n.turn_until < INF:  # no step begins after the end of the turn
        j = steps_to(S, lane, done_at(S, lane, max(now, n.turn_until - HALF_NS)))
        if j < n.steps:
            shorten(S, lane, j)
    n.end = now + (n.work - n.anchor_work) / rate


@jit
def set_part(S: int, lane: int, part: float) -> None:
    """Give a lane's process another part of the time of its GPUs from now on."""
    n = lane_at(S, lane)
    if part != n.part:
        W = world(S)
        now = W.now
        if W.log_tokens and n.rate > 0.0:
            segment(S, lane, done_at(S, lane, now))
        n.off_s = off_s(S, lane, now)
        n.part_since = now
        n.part = part


@jit
def off_s(S: int, lane: int, t: float) -> float:
    """Return the seconds of a step up to t for which other processes had its GPUs to themselves."""
    n = lane_at(S, lane)
    return n.off_s + (t - n.part_since) * (1.0 - n.part)


@jit
def set_turn(S: int, lane: int, c: int, tokens: int, duty: float, layer_s: float) -> None:
    """Note what a lane's step takes of rounds: a layer of it takes `layer_s`, and it has so many tokens of prompts."""
    n = lane_at(S, lane)
    k = cost_at(S)[c]
    w = 0.0  # 0: as decode steps, 1: as prompts
    if tokens > 0 and tokens >= k.many:
        w = 1.0
    elif tokens > k.few:
        w = (tokens - k.few) / (k.many - k.few)
    n.duty = duty
    n.fills = k.dec_fill + w * (k.pre_fill - k.dec_fill)
    n.turn_s = (1.0 if k.equal else (k.passes + w * (1.0 - k.passes)) * duty * layer_s) / n.max_rate


@jit
def share(S: int, p: int) -> None:
    """Share the GPUs of a pool out to its lanes."""
    W = world(S)
    P = gpu_at(S, p)
    P.touched = 0
    if W.alone or (P.lanes == 1 and lane_at(S, P.head).lent < 0):
        lane = P.head
        while lane >= 0:
            if W.sliced:
                set_part(S, lane, 1.0)
            set_rate(S, lane, lane_at(S, lane).max_rate)
            lane = lane_at(S, lane).next
    else:
        take_turns(S, p)
        if W.n_remotes > 0:
            lend(S, p)
        lane = P.head
        while lane >= 0:
            set_rate(S, lane, lane_at(S, lane).given)
            lane = lane_at(S, lane).next
    next_end(S, p)


@jit
def take_turns(S: int, p: int) -> None:
    """Give each lane of a pool the rate that it has where kernels take turns, and without MPS processes as well.

    A round has a turn of each lane, or of each process the slice of its longest lane, as often as it is there: kernels
    are on a GPU for a part of their step, `duty`, which grows as others keep them waiting. Three sweeps find it.
    """
    W = world(S)
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        n.stretch = 1.0
        n.given = 1.0
        n.round_s = 0.0
        d = n.demand
        while d >= 0:
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s = 0.0
            d = e.next
        lane = n.next
    for _ in range(SWEEPS):
        add_turns(S, p)
        if not stretch(S, p):
            break
    for _ in range(SWEEPS if W.sliced else 0):
        add_slices(S, p)
        slice_out(S, p)
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        beside = 1.0 - n.duty + n.duty * n.stretch
        if W.sliced:  # `given` is the part of the time of its GPUs in which its kernels wait for no other process
            alone = beside
            beside = 1.0 - n.duty + n.duty * n.stretch / n.given
            set_part(S, lane, alone / beside)
        n.given = n.max_rate / beside
        if n.slow != 1.0 and not W.sliced:
            n.given = slowed(n.max_rate, n.given, n.slow)
        lane = n.next


@jit
def add_turns(S: int, p: int) -> None:
    """Set what the turn of each lane of a pool takes of a round, and add the difference to the rounds of its GPUs."""
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        on = n.duty * n.stretch
        was = n.round_s
        n.round_s = on / (1.0 - n.duty + on) * n.fills * n.turn_s
        d = n.demand
        while d >= 0:
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s += n.round_s - was
            d = e.next
        lane = n.next


@jit
def stretch(S: int, p: int) -> bool:
    """Set how many times as long each lane's kernels take beside those that share its SMs, or its GPU apart.

    Return whether that changed.
    """
    W = world(S)
    changed = False
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        most = 1.0
        d = n.demand
        while d >= 0:
            e = demand_at(S, d)
            if n.partition == 0 and not W.sliced:
                G = gpu_at(S, e.gpu)
                if G.active > 1:
                    most = max(most, n.fills + (G.round_s - n.round_s) / n.turn_s)
            else:
                most = max(most, among(S, p, lane, d))
            d = e.next
        changed = changed or n.stretch != most
        n.stretch = most
        lane = n.next
    return changed


@jit
def among(S: int, p: int, lane: int, d: int) -> float:
    """Return the same on one GPU, where some lanes do not meet: they have disjoint partitions or other processes."""
    W = world(S)
    n = lane_at(S, lane)
    meet, asked, apart = 0.0, demand_at(S, d).hbm * n.max_rate, 0
    x = gpu_at(S, p).head
    while x >= 0:
        y = lane_at(S, x)
        e = demand_on(S, x, demand_at(S, d).gpu)
        if x != lane and e >= 0 and not (W.sliced and y.process != n.process):
            if n.partition > 0 and y.partition > 0 and n.partition != y.partition:
                asked += demand_at(S, e).hbm * y.max_rate
                apart = 1
            else:
                meet += y.round_s
        x = y.next
    most = n.fills + meet / n.turn_s if meet > 0.0 else 1.0
    if apart:
        k = cost_at(S)[inst_at(S, batch_at(S, lane >> 1).inst).cost]
        most = max(most, k.apart, k.crowd * asked)
    return most


@jit
def slice_s(S: int, p: int, lane: int) -> float:
    """Return the GPU seconds of a lane's step, its process's slice; 0 if another lane of it has a longer one."""
    n = lane_at(S, lane)
    turn = n.duty * n.stretch * n.slice_s / n.max_rate
    x = gpu_at(S, p).head
    while x >= 0:
        y = lane_at(S, x)
        if x != lane and y.process == n.process:
            other = y.duty * y.stretch * y.slice_s / y.max_rate
            if other > turn or (other == turn and x < lane):
                return 0.0
        x = y.next
    return turn


@jit
def add_slices(S: int, p: int) -> None:
    """Add up the rounds of a pool's GPUs where they have a slice of each process."""
    W = world(S)
    for g in range(W.n_gpus):
        if gpu_at(S, g).pool == p:
            gpu_at(S, g).round_s = 0.0
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        turn = slice_s(S, p, lane)
        on = n.duty * (n.stretch / n.given)
        n.round_s = on / (1.0 - n.duty + on) * max(turn, W.quantum_s) * (1.0 + W.switching) if turn > 0.0 else 0.0
        d = n.demand
        while d >= 0:
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s += n.round_s
            d = e.next
        lane = n.next


@jit
def slice_out(S: int, p: int) -> None:
    """Give each process of a pool its slice's part of a round, on the GPU with the longest; alone it has all of it."""
    W = world(S)
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        turn = slice_s(S, p, lane)
        if turn > 0.0:
            slice_ = max(turn, W.quantum_s) * (1.0 + W.switching)
            longest = turn
            d = n.demand
            while d >= 0:
                others = gpu_at(S, demand_at(S, d).gpu).round_s - n.round_s
                if others > 0.0:
                    longest = max(longest, slice_ + others)
                d = demand_at(S, d).next
            x = gpu_at(S, p).head
            while x >= 0:
                if lane_at(S, x).process == n.process:
                    lane_at(S, x).given = turn / longest
                x = lane_at(S, x).next
        lane = n.next


@jit
def unbound(S: int, b: int) -> None:
    """Cut the lanes that a cap binds, after the last waiting or parked member has gone: the cap binds no more."""
    for lane in (2 * b, 2 * b + 1):
        if lane_at(S, lane).bound:
            cut(S, lane)


@jit
def occupy(S: int, g: int) -> None:
    """Count one more lane with a demand of a GPU."""
    G = gpu_at(S, g)
    if G.active == 0:
        G.busy_since = world(S).now
    G.active += 1


@jit
def activate(S: int, lane: int) -> None:
    """Let a lane start to compete."""
    n = lane_at(S, lane)
    i = batch_at(S, lane >> 1).inst
    p = pool_of(S, lane)
    P = gpu_at(S, p)
    n.end = INF
    n.next = P.head
    P.head = lane
    P.lanes += 1
    P.touched = 1
    inst_at(S, i).busy += 1
    d = n.demand
    while d >= 0:
        occupy(S, demand_at(S, d).gpu)
        d = demand_at(S, d).next


@jit
def retire(S: int, lane: int) -> None:
    """Take a lane whose step is over out of the competition."""
    W = world(S)
    n = lane_at(S, lane)
    i = batch_at(S, lane >> 1).inst
    p = pool_of(S, lane)
    P = gpu_at(S, p)
    if P.head == lane:
        P.head = n.next
    else:
        x = P.head
        while lane_at(S, x).next != lane:
            x = lane_at(S, x).next
        lane_at(S, x).next = n.next
    P.lanes -= 1
    P.touched = 1
    next_end(S, p)
    n.busy = IDLE
    inst_at(S, i).busy -= 1
    now = W.now
    elsewhere = 0
    d = n.demand
    while d >= 0:
        g = gpu_at(S, demand_at(S, d).gpu)
        g.hbm_s += demand_at(S, d).hbm * n.work
        g.flop_s += demand_at(S, d).compute * n.work
        g.active -= 1
        if g.active == 0:
            g.busy_s += now - g.busy_since
        d = demand_at(S, d).next
        if d < 0 and not elsewhere:
            elsewhere = 1
            d = n.lent
