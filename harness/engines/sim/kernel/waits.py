"""Causes of waits: the wait clocks of batches, the time without weights in memory, and charges to requests."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def usable(S: int, i: int) -> bool:
    """Tell whether an instance's weights are in memory and its lanes may run steps."""
    return inst_at(S, i).state == IN or inst_at(S, i).state == DRAINING


@jit
def loaded(S: int, i: int) -> bool:
    """Tell whether an instance's weights are in memory.

    They stay in memory while the instance drains. After an order to evict, they stay until the last step has ended.
    """
    return inst_at(S, i).state >= IN


@jit
def out_s(S: int, k: int, t: float) -> float:
    """Return the seconds, up to the current time t, during which no GPU had the weights of model k."""
    M = model_at(S, k)
    return M.out_s + (t - M.since) if M.places == 0 else M.out_s


@jit
def clocks(S: int, b: int, t: float) -> None:
    """Advance the wait clocks of a batch to time t.

    One clock counts the wait for weights, one the prompts' wait for KV memory, and one the decodes' wait for KV memory.
    No member is charged for two of these waits at the same time.
    """
    B = batch_at(S, b)
    dt = t - B.clock_at
    B.clock_at = t
    if not loaded(S, B.inst):
        B.clock_load += dt
    else:
        if B.blocked:
            B.clock_kv += dt
        if B.stalled:
            B.clock_stall += dt


@jit
def flag(S: int, b: int, blocked: int, stalled: int) -> None:
    """Record whether a batch's prompts (`blocked`) and its decodes (`stalled`) wait for KV memory."""
    W = world(S)
    B = batch_at(S, b)
    if B.blocked != blocked or B.stalled != stalled:
        clocks(S, b, W.now)
        was = B.blocked | B.stalled
        B.blocked = blocked
        B.stalled = stalled
        W.blocked += (blocked | stalled) - was


@jit
def mark(S: int, r: int, t: float) -> None:
    """Start a new accounting interval of a request at time t.

    Record the present wait clocks, from which the request's next charge counts.
    """
    q = req_at(S, r)
    q.mark_at = t
    if q.batch >= 0:
        clocks(S, q.batch, t)
        B = batch_at(S, q.batch)
        q.mark_load = B.clock_load
        q.mark_kv = B.clock_kv
        q.mark_stall = B.clock_stall
        q.mark_solo = B.clock_solo
        q.mark_wall = B.clock_wall
        q.mark_slice = B.clock_slice
    else:
        q.mark_load = out_s(S, q.model, t)


@jit
def ran_for(S: int, r: int, wall: float, solo: float, off: float) -> None:
    """Add `wall` seconds in steps to a request's times.

    Of these, `solo` seconds are compute, `off` seconds are time slices of other processes, and the rest is contention.
    """
    q = req_at(S, r)
    q.compute += solo
    q.time_slice += off
    q.contention += wall - solo - off


@jit
def made_first(S: int, r: int, t: float) -> None:
    """Record that a request's first token came at time t; all its waits so far count toward its TTFT."""
    q = req_at(S, r)
    q.first = t
    q.ttft_admission = q.admission
    q.ttft_load = q.load
    q.ttft_kv = q.kv
    q.ttft_transfer = q.transfer
    q.ttft_queue = q.queue
    q.ttft_compute = q.compute
    q.ttft_time_slice = q.time_slice
    q.ttft_contention = q.contention


@jit
def log_stay(S: int, r: int, b: int) -> None:
    """Log the decode steps that a request took part in as a member of batch b.

    If b is -1, log the token that ended its prefill instead. The log entry's time is that of the request's latest mark.
    """
    W = world(S)
    q = req_at(S, r)
    s = log_at(S, W.log_used)
    W.log_used += 1
    s.request = r
    s.batch = b
    s.tick_from = q.joined_tick
    if b >= 0:
        s.tick_to = batch_at(S, b).tick
    s.anchor_s = q.mark_at
    s.clock_load = q.mark_load
    s.clock_stall = q.mark_stall
    s.clock_solo = q.mark_solo
    s.clock_wall = q.mark_wall
    s.clock_slice = q.mark_slice
    s.admission = q.admission
    s.load = q.load
    s.kv = q.kv
    s.transfer = q.transfer
    s.queue = q.queue
    s.compute = q.compute
    s.time_slice = q.time_slice
    s.contention = q.contention


@jit
def charge(S: int, r: int, t: float) -> None:
    """Charge the time since a request's latest mark to the causes of its waits, and mark the request at time t."""
    q = req_at(S, r)
    dt = t - q.mark_at
    if q.state == HELD:
        load = out_s(S, q.model, t) - q.mark_load
        q.load += load
        q.admission += dt - load
    else:
        clocks(S, q.batch, t)
        B = batch_at(S, q.batch)
        load = B.clock_load - q.mark_load
        q.load += load
        rest = dt - load
        if q.state == WAIT:
            kv = B.clock_kv - q.mark_kv
            q.kv += kv
            rest -= kv
        elif q.state == RUN:
            solo = B.clock_solo - q.mark_solo
            wall = B.clock_wall - q.mark_wall
            stall = B.clock_stall - q.mark_stall
            ran_for(S, r, wall, solo, B.clock_slice - q.mark_slice)
            q.kv += stall
            rest -= wall + stall
        if q.state == MOVE or q.state == AWAY:
            q.transfer += rest
        else:
            q.queue += rest
    mark(S, r, t)
