"""Rates of lanes that compete for a GPU, in rounds in which GPU kernels, or processes, take turns."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.lanes import done_at, next_end, off_s, segment, shorten, steps_to
from harness.engines.sim.kernel.lent import demand_on, lend, slowed
from harness.engines.sim.kernel.walks import demands, lanes_in
from harness.engines.sim.state import *

SWEEPS = 3  # over the lanes of a pool, after which the part of the time that each is on its GPUs hardly changes


@jit
def set_rate(S: int, lane: int, rate: float) -> None:
    """Set a lane's rate from now on: its work, in seconds without competition, per second."""
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
    """Set the share of the GPUs' time that a lane's process has from now on."""
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
def share(S: int, p: int) -> None:
    """Set the rates of a pool's busy lanes, which share the pool's GPUs."""
    W = world(S)
    P = gpu_at(S, p)
    P.touched = 0
    if W.alone or (P.lanes == 1 and lane_at(S, P.head).lent < 0):
        for lane in lanes_in(S, p):
            if W.sliced:
                set_part(S, lane, 1.0)
            set_rate(S, lane, lane_at(S, lane).max_rate)
    else:
        take_turns(S, p)
        if W.n_remotes > W.n_batches:
            lend(S, p)
        for lane in lanes_in(S, p):
            set_rate(S, lane, lane_at(S, lane).given)
    next_end(S, p)


@jit
def take_turns(S: int, p: int) -> None:
    """Set the rate (`given`) of each lane of a pool in which GPU kernels of different lanes take turns.

    A round has one turn of each lane. Without MPS, processes take turns as well, and a round has one time slice of each
    process. The process's step with the most GPU seconds sets the length of the slice. The length of a turn or slice is
    weighted by the share of time in which its kernels are on the GPU or wait for it. That share is `duty` for a step
    without competition, and grows as other lanes keep the kernels waiting. The shares of all lanes depend on each
    other. They are approximated in up to SWEEPS passes over the lanes.
    """
    W = world(S)
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        n.stretch = 1.0
        n.given = 1.0
        n.round_s = 0.0
        for d in demands(S, n.demand):
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s = 0.0
    for _ in range(SWEEPS):
        add_turns(S, p)
        if not stretch(S, p):
            break
    for _ in range(SWEEPS if W.sliced else 0):
        add_slices(S, p)
        slice_out(S, p)
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        beside = 1.0 - n.duty + n.duty * n.stretch
        if W.sliced:  # `given` is the part of the time of its GPUs in which its kernels wait for no other process
            alone = beside
            beside = 1.0 - n.duty + n.duty * n.stretch / n.given
            set_part(S, lane, alone / beside)
        n.given = n.max_rate / beside
        if n.slow != 1.0 and not W.sliced:
            n.given = slowed(n.max_rate, n.given, n.slow)


@jit
def add_turns(S: int, p: int) -> None:
    """Compute the seconds of each lane's turn, and update the length of the rounds on the lane's GPUs."""
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        on = n.duty * n.stretch
        was = n.round_s
        n.round_s = on / (1.0 - n.duty + on) * n.fills * n.turn_s
        for d in demands(S, n.demand):
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s += n.round_s - was


@jit
def stretch(S: int, p: int) -> bool:
    """Set each lane's `stretch`, the factor by which other lanes on its GPUs slow its GPU kernels.

    The other lanes may run on the same SMs or on other SMs. Return whether any factor changed.
    """
    W = world(S)
    changed = False
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        most = 1.0
        for d in demands(S, n.demand):
            e = demand_at(S, d)
            if n.partition == 0 and not W.sliced:
                G = gpu_at(S, e.gpu)
                if G.active > 1:
                    most = max(most, n.fills + (G.round_s - n.round_s) / n.turn_s)
            else:
                most = max(most, among(S, p, lane, d))
        changed = changed or n.stretch != most
        n.stretch = most
    return changed


@jit
def among(S: int, p: int, lane: int, d: int) -> float:
    """Return a lane's `stretch` on the GPU of its demand `d`.

    Lanes on the same SMs take turns with this lane. Lanes on other SM partitions take no turns with it, but slow it
    through the shared memory bandwidth. If processes run in time slices, lanes of other processes are left out.
    """
    W = world(S)
    n = lane_at(S, lane)
    meet, asked, apart = 0.0, demand_at(S, d).hbm * n.max_rate, 0
    for x in lanes_in(S, p):
        y = lane_at(S, x)
        e = demand_on(S, x, demand_at(S, d).gpu)
        if x != lane and e >= 0 and not (W.sliced and y.process != n.process):
            if n.partition > 0 and y.partition > 0 and n.partition != y.partition:
                asked += demand_at(S, e).hbm * y.max_rate
                apart = 1
            else:
                meet += y.round_s
    most = n.fills + meet / n.turn_s if meet > 0.0 else 1.0
    if apart:
        k = cost_at(S)[inst_at(S, batch_at(S, lane >> 1).inst).cost]
        most = max(most, k.apart, k.crowd * asked)
    return most


@jit
def slice_s(S: int, p: int, lane: int) -> float:
    """Return the GPU seconds of a lane's step if this step sets the time slice of the lane's process, else 0.

    The process's step with the most GPU seconds sets the slice. Of equally long steps, the one of the lowest lane does.
    """
    n = lane_at(S, lane)
    turn = n.duty * n.stretch * n.slice_s / n.max_rate
    for x in lanes_in(S, p):
        y = lane_at(S, x)
        if x != lane and y.process == n.process:
            other = y.duty * y.stretch * y.slice_s / y.max_rate
            if other > turn or (other == turn and x < lane):
                return 0.0
    return turn


@jit
def add_slices(S: int, p: int) -> None:
    """Set the round of each GPU of a pool to the sum of the time slices of the GPU's processes."""
    W = world(S)
    for g in range(W.n_gpus):
        if gpu_at(S, g).pool == p:
            gpu_at(S, g).round_s = 0.0
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        turn = slice_s(S, p, lane)
        on = n.duty * (n.stretch / n.given)
        n.round_s = on / (1.0 - n.duty + on) * max(turn, W.quantum_s) * (1.0 + W.switching) if turn > 0.0 else 0.0
        for d in demands(S, n.demand):
            e = demand_at(S, d)
            gpu_at(S, e.gpu).round_s += n.round_s


@jit
def slice_out(S: int, p: int) -> None:
    """Set each lane's `given` to the share of time in which its process's kernels wait for no other process.

    The share is the GPU seconds of the process's longest step, divided by the seconds of the longest round on its GPUs.
    It is 1 if the process is alone on its GPUs.
    """
    W = world(S)
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        turn = slice_s(S, p, lane)
        if turn > 0.0:
            slice_ = max(turn, W.quantum_s) * (1.0 + W.switching)
            longest = turn
            for d in demands(S, n.demand):
                others = gpu_at(S, demand_at(S, d).gpu).round_s - n.round_s
                if others > 0.0:
                    longest = max(longest, slice_ + others)
            for x in lanes_in(S, p):
                if lane_at(S, x).process == n.process:
                    lane_at(S, x).given = turn / longest
