"""The event loop: at each instant it receives arrivals, ends what is due, and starts new steps."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.events import forget, in_order, tell
from harness.engines.sim.kernel.far import ask_elsewhere
from harness.engines.sim.kernel.links import end_part, rank_links
from harness.engines.sim.kernel.orders import admit_now, arrive, next_seq
from harness.engines.sim.kernel.rates import share
from harness.engines.sim.kernel.steps import end_step, form
from harness.engines.sim.kernel.turns import end_turn, settle_turns, spare
from harness.engines.sim.kernel.waits import mark
from harness.engines.sim.kernel.walks import lanes_in, turns
from harness.engines.sim.kernel.weights import serve_grants
from harness.engines.sim.state import *


@jit
def next_arrival(S: int) -> int:
    """Return the request that arrives next, or -1 if none is known yet.

    The workload gives the request's arrival time, or a closed-loop client sends the request after its previous one.
    """
    W = world(S)
    r, x = -1, W.sent_head
    if W.arrived < W.opened:
        r = W.arrived
    if x >= 0 and (r < 0 or req_at(S, x).arrival < req_at(S, r).arrival):
        r = x
    return r


@jit
def receive(S: int, r: int) -> None:
    """Record that a request has arrived, and remove it from the requests to come."""
    W = world(S)
    q = req_at(S, r)
    if r < W.opened:
        W.arrived += 1
    else:
        W.sent_head = q.next
        if W.sent_head < 0:
            W.sent_tail = -1
        else:
            req_at(S, W.sent_head).prev = -1
    q.state = HELD
    mark(S, r, q.arrival)


@jit
def next_time(S: int) -> float:
    """Return the earliest time at which a step, span, transfer, part on a link, or turn of an idle lane ends."""
    W = world(S)
    t = INF
    for p in range(W.n_gpus):
        t = min(t, gpu_at(S, p).end)
    x = W.ending_head
    while x >= 0:
        t = min(t, xfer_at(S, x).due)
        x = xfer_at(S, x).ends_next
    if W.links_busy > 0:
        for k in range(W.n_links):
            t = min(t, link_at(S, k).end)
    for lane in turns(S):
        n = lane_at(S, lane)
        if n.busy == IDLE and n.turn == BEGUN:
            t = min(t, max(n.turn_until, W.now))
    return t


@jit
def end_lanes(S: int) -> bool:
    """End all steps and spans that are due now, in order of their lanes. Return False if a log is full."""
    W = world(S)
    soon = W.now + HALF_NS
    while True:
        lane = -1
        for p in range(W.n_gpus):
            if gpu_at(S, p).end <= soon:
                for x in lanes_in(S, p):
                    if lane_at(S, x).end <= soon and (lane < 0 or x < lane):
                        lane = x
        if lane < 0:
            W.due = 0
            return True
        if not spare(S, 0):
            return False
        end_step(S, lane)


@jit
def form_all(S: int) -> bool:
    """Complete the instant: grant memory, start new steps and set rates. Return False if a log is full."""
    W = world(S)
    if W.formed_s + HALF_NS < W.now:
        W.formed_s = W.now
        W.formed_lane = -1
    if W.grants:
        serve_grants(S)
    if W.due and not end_lanes(S):
        return False
    lane = -1
    while W.dirty_head >= 0:  # in rounds: a lane to be formed again waits for the others' turn
        prev, x = -1, W.dirty_head
        while x >= 0 and x <= lane:
            prev, x = x, lane_at(S, x).next_dirty
        if x < 0:
            lane = -1
            W.formed_lane = W.n_lanes
            if W.grants:
                serve_grants(S)
            continue
        lane = x
        W.formed_lane = max(W.formed_lane, lane)
        if not spare(S, batch_at(S, lane >> 1).count[WAITING]):
            return False
        if prev < 0:
            W.dirty_head = lane_at(S, lane).next_dirty
        else:
            lane_at(S, prev).next_dirty = lane_at(S, lane).next_dirty
        form(S, lane)
        if batch_at(S, lane >> 1).far > 0:
            ask_elsewhere(S, lane)
        if W.due and not end_lanes(S):  # spans at a boundary now were cut for blocks held ahead
            return False
    W.formed_lane = W.n_lanes
    for p in range(W.n_gpus):
        if gpu_at(S, p).touched:
            share(S, p)
    in_order(S)
    return True


@jit
def end_transfers(S: int, soon: float) -> None:
    """End the transfers that are due by time `soon`, in order of issue."""
    W = world(S)
    prev, x = -1, W.ending_head
    while x >= 0:
        nxt = xfer_at(S, x).ends_next
        if xfer_at(S, x).due > soon:
            prev = x
        elif prev >= 0:
            xfer_at(S, prev).ends_next = nxt
            arrive(S, x)
        else:
            W.ending_head = nxt
            arrive(S, x)
        x = nxt


@jit
def end_all(S: int) -> bool:
    """End everything that is due now. Return False if a log is full.

    Parts on links end first, then transfers in order of issue, then steps in order of lanes, then turns in order of
    lanes.
    """
    W = world(S)
    soon = W.now + HALF_NS
    if W.links_busy > 0:
        for k in range(W.n_links):
            if link_at(S, k).end <= soon:
                end_part(S, k)
    end_transfers(S, soon)
    if not end_lanes(S):
        return False
    for lane in turns(S):
        n = lane_at(S, lane)
        if n.busy == IDLE and n.turn == BEGUN and (n.turn_steps >= n.turn_max or n.turn_until <= soon):
            if not spare(S, 0):
                return False
            end_turn(S, lane, STEPS if n.turn_steps >= n.turn_max else TIME)
    in_order(S)
    return True


@jit
def advance(S: int, until: float) -> int:
    """Simulate until an event for the policy, time `until` or the end of the run, whichever comes first.

    Return TOLD if there are events to read, and GROW if a log is full or the next arrival has no record yet. Return
    OVER if `until` is infinite and nothing more can happen before the end of the run. Otherwise return NOTHING.
    """
    W = world(S)
    forever = until == INF
    until = min(until, W.end)
    W.quiet_s = -INF
    look = True
    while True:
        if W.events_read < W.events_told:
            return TOLD
        for e in range(W.events_told):
            if event_at(S, e).kind == E_DONE:
                forget(S, event_at(S, e).subject)
        W.events_read = 0
        W.events_told = 0
        if W.to_come > 0 and W.arrived == W.opened:
            return GROW
        now = W.now
        soon = now + HALF_NS
        t = next_time(S)
        r = next_arrival(S)
        arrival = max(req_at(S, r).arrival, now) if r >= 0 else INF
        if t > soon and arrival > soon:
            if W.dirty_head >= 0 or W.grants:
                if until <= soon:
                    W.now = max(now, until)
                    return NOTHING
                if not form_all(S):
                    return GROW
                continue
            if look and (W.turn_head >= 0 or W.rivals > 0):
                if until <= soon:
                    W.now = max(now, until)
                    return NOTHING
                look = False
                W.formed_s = now
                W.formed_lane = W.n_lanes
                if W.rivals > 0:
                    rank_links(S)
                if not settle_turns(S):
                    return GROW
                continue
            for p in range(W.n_gpus):
                if gpu_at(S, p).touched:
                    share(S, p)
            t = next_time(S)
        first = min(t, arrival)
        if first == INF or (t > until + HALF_NS and arrival > until):
            if forever and first == INF and soon < W.end:
                return OVER
            if until != INF:
                W.now = max(now, until)
            if W.dirty_head < 0 and not W.grants and W.turn_head < 0 and W.rivals == 0:  # nothing to look at before t
                W.quiet_s = min(t - 2.0 * HALF_NS, arrival, W.end)
            return NOTHING
        W.now = max(now, min(first, until))
        look = True
        if t <= W.now + HALF_NS:
            if not end_all(S):
                return GROW
            continue
        receive(S, r)
        b = route_at(S)[req_at(S, r).model]
        if b >= 0:
            admit_now(S, r, b, next_seq(S))
        tell(S, E_ARRIVED, r, -1, 0)
