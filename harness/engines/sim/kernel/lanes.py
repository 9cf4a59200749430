"""Lanes over time: ends of steps and spans, KV blocks taken for later steps, and retries after memory was freed.

A batch's steps run one after another in a lane. A span is a sequence of decode steps that is computed at once.
"""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.memory import exceeds, fits, holds, needs, put, touches
from harness.engines.sim.kernel.walks import accounts, demands, lanes_in
from harness.engines.sim.state import *


@jit
def give_back(S: int, i: int, others: bool) -> None:
    """Cut short the decode spans that use account i or, with `others`, all decode spans that use its GPUs.

    Each span ends at its next step boundary, and frees the KV blocks of its steps that have not begun.
    """
    W = world(S)
    for p in range(W.n_gpus):
        for lane in lanes_in(S, p):
            if lane_at(S, lane).busy == SPAN and (touches(S, lane >> 1, i) if others else holds(S, lane >> 1, i)):
                cut(S, lane)


@jit
def room(S: int, i: int, n: int, grow_: int) -> bool:
    """Tell whether n more blocks fit in an account, after cutting decode spans short if necessary.

    A span that is cut short frees the KV blocks of its steps that have not begun. `fits` explains `grow_`.
    """
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
    """Retry everything that waits for memory on an instance's GPUs, after some of that memory was freed.

    Batches, loads and KV moves can wait for memory.
    """
    W = world(S)
    W.grants = 1
    if W.blocked > 0 or W.swap:
        for b in range(W.n_batches):
            B = batch_at(S, b)
            lacks = W.swap and W.piecewise and B.started > 0  # another batch's victims may have to leave first
            if (B.blocked or B.stalled or B.swapped > 0 or lacks) and touches(S, b, i):
                wake_both(S, b)


@jit
def dirty(S: int, lane: int) -> None:
    """If a lane is open and idle, mark it, so that its next step is composed at this instant."""
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
    """Return the seconds that the first j steps of a span take without competition."""
    n = lane_at(S, lane)
    return j * n.first_s + n.slope_s * (0.5 * j * (j - 1))


@jit
def steps_to(S: int, lane: int, done: float) -> int:
    """Return the smallest number of a span's steps that together take at least `done` seconds without competition.

    The result is at least 1 and at most the number of steps in the span.
    """
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
    """Return the work that a lane's step or span has completed by time t, in seconds without competition."""
    n = lane_at(S, lane)
    return n.anchor_work + (t - n.anchor_s) * n.rate


@jit
def next_end(S: int, p: int) -> None:
    """Record which lane of a pool ends its step or span first, and when; ties go to the lane with the lower row."""
    P = gpu_at(S, p)
    P.end = INF
    P.lane = -1
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        if n.end < P.end or (n.end == P.end and lane < P.lane):
            P.end = n.end
            P.lane = lane


@jit
def step_of(S: int, lane: int) -> int:
    """Return the number of the step that a busy lane is running; the first step of the lane's span has number 1."""
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
    """End a lane's span at its next step boundary, and free the KV blocks of the span's later steps."""
    cut_at(S, lane, 0)


@jit
def cut_at(S: int, lane: int, ran: int) -> None:
    """End a lane's span at its next step boundary, or after the lane's `ran`-th step in total if that is later."""
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
    """Shorten a lane's span to j steps, and free the KV blocks of its other steps."""
    n = lane_at(S, lane)
    b = lane >> 1
    d = batch_at(S, b).tick
    for f in accounts(S, b):
        put(S, remote_at(S, f).inst, needs(S, f, d, j) - needs(S, f, d, n.steps))
    n.steps = j
    n.work = solo_at(S, lane, j)


@jit
def wake(S: int, lane: int) -> None:
    """Make a lane compose a new step after a change: now if it is idle, else at its next step boundary."""
    n = lane_at(S, lane)
    if n.busy == IDLE:
        dirty(S, lane)
    elif n.busy == SPAN:
        cut(S, lane)


@jit
def wake_both(S: int, b: int) -> None:
    """Call `wake` for both lanes of a batch."""
    wake(S, 2 * b)
    wake(S, 2 * b + 1)


@jit
def cut_both(S: int, b: int) -> None:
    """Call `cut` for both lanes of a batch."""
    cut(S, 2 * b)
    cut(S, 2 * b + 1)


@jit
def pool_of(S: int, lane: int) -> int:
    """Return a lane's pool: the group of GPUs whose lanes may compete with this lane."""
    return gpu_at(S, inst_at(S, batch_at(S, lane >> 1).inst).gpus[0]).pool


@jit
def segment(S: int, lane: int, upto: float) -> None:
    """Log those steps of a lane's decode span that end within the span's first `upto` seconds without competition.

    Steps that were logged before are left out. Token times, and the waits between tokens, are computed from this log.
    """
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
def off_s(S: int, lane: int, t: float) -> float:
    """Return the seconds of a lane's step, up to time t, in which time slices of other processes occupied its GPUs."""
    n = lane_at(S, lane)
    return n.off_s + (t - n.part_since) * (1.0 - n.part)


@jit
def unbound(S: int, b: int) -> None:
    """End a batch's spans at their next step boundary, if a cap kept members or tokens out of their steps.

    Call it when the batch's last waiting member, or its last parked member, has left: the cap then keeps no member out.
    """
    for lane in (2 * b, 2 * b + 1):
        if lane_at(S, lane).bound:
            cut(S, lane)


@jit
def occupy(S: int, g: int) -> None:
    """Count one more lane that has a demand on a GPU."""
    G = gpu_at(S, g)
    if G.active == 0:
        G.busy_since = world(S).now
    G.active += 1


@jit
def activate(S: int, lane: int) -> None:
    """Add a lane whose step begins to the lanes that compete for its GPUs."""
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
    for d in demands(S, n.demand):
        occupy(S, demand_at(S, d).gpu)


@jit
def retire(S: int, lane: int) -> None:
    """Remove a lane whose step has ended from the lanes that compete for its GPUs."""
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
    for first in (n.demand, n.lent):
        for d in demands(S, first):
            g = gpu_at(S, demand_at(S, d).gpu)
            g.hbm_s += demand_at(S, d).hbm * n.work
            g.flop_s += demand_at(S, d).compute * n.work
            g.active -= 1
            if g.active == 0:
                g.busy_s += now - g.busy_since
