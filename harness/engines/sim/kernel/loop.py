"""The loop: arrivals, and everything that is due, instant by instant."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.cost import tables
from harness.engines.sim.kernel.events import forget, in_order, tell
from harness.engines.sim.kernel.lanes import share
from harness.engines.sim.kernel.links import end_part, rank_links, serve_grants
from harness.engines.sim.kernel.members import admit_now, arrive, next_seq
from harness.engines.sim.kernel.steps import end_step, form
from harness.engines.sim.kernel.turns import end_turn, settle_turns, spare
from harness.engines.sim.kernel.waits import mark
from harness.engines.sim.state import (
    BEGUN,
    E_ARRIVED,
    E_DONE,
    GROW,
    HALF_NS,
    HELD,
    IDLE,
    INF,
    NOTHING,
    OVER,
    STEPS,
    TAIL,
    TIME,
    TOLD,
    WAITING,
    Tables,
    batch_at,
    event_at,
    gpu_at,
    lane_at,
    link_at,
    req_at,
    world,
    xfer_at,
)


@jit
def next_arrival(S: int) -> int:
    """The request that comes next, by itself or sent by a client; -1: none is known."""
    W = world(S)
    r, x = -1, W.shead
    if W.nxt < W.opened:
        r = W.nxt
    if x >= 0 and (r < 0 or req_at(S, x).arr < req_at(S, r).arr):
        r = x
    return r


@jit
def receive(S: int, r: int) -> None:
    """A request is here."""
    W = world(S)
    q = req_at(S, r)
    if r < W.opened:
        W.nxt += 1
    else:
        W.shead = q.next
        if W.shead < 0:
            W.stail = -1
        else:
            req_at(S, W.shead).prev = -1
    q.state = HELD
    mark(S, r, q.arr)


@jit
def next_time(S: int) -> float:
    """When the next step or transfer ends."""
    W = world(S)
    t = INF
    for p in range(W.nG):
        t = min(t, gpu_at(S, p).end)
    x = W.xhead
    while x >= 0:
        if xfer_at(S, x).stage == TAIL:
            t = min(t, xfer_at(S, x).due)
        x = xfer_at(S, x).next
    if W.links > 0:
        for k in range(W.nK):
            t = min(t, link_at(S, k).end)
    lane = W.thead
    while lane >= 0:
        n = lane_at(S, lane)
        if n.busy == IDLE and n.turn == BEGUN:
            t = min(t, max(n.until, W.now))
        lane = n.tnext
    return t


@jit
def end_lanes(S: int) -> bool:
    """End the steps that end now, older lanes first. False: a log is full."""
    W = world(S)
    soon = W.now + HALF_NS
    while True:
        lane = -1
        for p in range(W.nG):
            if gpu_at(S, p).end <= soon:
                x = gpu_at(S, p).head
                while x >= 0:
                    if lane_at(S, x).end <= soon and (lane < 0 or x < lane):
                        lane = x
                    x = lane_at(S, x).next
        if lane < 0:
            W.due = 0
            return True
        if not spare(S, 0):
            return False
        end_step(S, lane)


@jit
def form_all(S: int, T: Tables) -> bool:
    """The instant is over: serve memory, form the steps that start now, set rates. False: a log is full."""
    W = world(S)
    if W.over + HALF_NS < W.now:
        W.over = W.now
        W.formed = -1
    if W.grants:
        serve_grants(S)
    if W.due and not end_lanes(S):
        return False
    lane = -1
    while W.dirty >= 0:  # in rounds: whoever is to be formed again waits for the others' turn
        prev, x = -1, W.dirty
        while x >= 0 and x <= lane:
            prev, x = x, lane_at(S, x).dnext
        if x < 0:
            lane = -1
            W.formed = W.nN
            if W.grants:
                serve_grants(S)
            continue
        lane = x
        W.formed = max(W.formed, lane)
        if not spare(S, batch_at(S, lane >> 1).count[WAITING]):
            return False
        if prev < 0:
            W.dirty = lane_at(S, lane).dnext
        else:
            lane_at(S, prev).dnext = lane_at(S, lane).dnext
        form(S, T, lane)
        if W.due and not end_lanes(S):  # spans at a boundary just now, cut for what they held ahead
            return False
    W.formed = W.nN
    for p in range(W.nG):
        if gpu_at(S, p).touched:
            share(S, p)
    in_order(S)
    return True


@jit
def end_all(S: int) -> bool:
    """End what ends now: links and transfers in order of issue, then lanes in their order. False: a log is full."""
    W = world(S)
    soon = W.now + HALF_NS
    if W.links > 0:
        for k in range(W.nK):
            if link_at(S, k).end <= soon:
                end_part(S, k)
    x = W.xhead
    while x >= 0:
        nxt = xfer_at(S, x).next
        if xfer_at(S, x).stage == TAIL and xfer_at(S, x).due <= soon:
            arrive(S, x)
        x = nxt
    if not end_lanes(S):
        return False
    lane = W.thead
    while lane >= 0:
        n = lane_at(S, lane)
        nxt = n.tnext
        if n.busy == IDLE and n.turn == BEGUN and (n.took >= n.most or n.until <= soon):
            if not spare(S, 0):
                return False
            end_turn(S, lane, STEPS if n.took >= n.most else TIME)
        lane = nxt
    in_order(S)
    return True


@jit
def advance(S: int, until: float) -> int:
    """Run to the next event that is heard, to `until` or to the end of the run.

    NOTHING, TOLD, GROW when a log is full, or OVER: with no `until`, nothing can ever happen any more.
    """
    W, T = world(S), tables(S)
    forever = until == INF
    until = min(until, W.end)
    look = True
    while True:
        if W.ev_i < W.ev_n:
            return TOLD
        for e in range(W.ev_n):
            if event_at(S, e).kind == E_DONE:
                forget(S, event_at(S, e).a)
        W.ev_i = 0
        W.ev_n = 0
        now = W.now
        soon = now + HALF_NS
        t = next_time(S)
        r = next_arrival(S)
        arrival = max(req_at(S, r).arr, now) if r >= 0 else INF
        if t > soon and arrival > soon:
            if W.dirty >= 0 or W.grants:
                if until <= soon:
                    W.now = max(now, until)
                    return NOTHING
                if not form_all(S, T):
                    return GROW
                continue
            if look and (W.thead >= 0 or W.rivals > 0):
                if until <= soon:
                    W.now = max(now, until)
                    return NOTHING
                look = False
                W.over = now
                W.formed = W.nN
                if W.rivals > 0:
                    rank_links(S)
                if not settle_turns(S):
                    return GROW
                continue
            for p in range(W.nG):
                if gpu_at(S, p).touched:
                    share(S, p)
            t = next_time(S)
        first = min(t, arrival)
        if first == INF or (t > until + HALF_NS and arrival > until):
            if forever and first == INF and soon < W.end:
                return OVER
            if until != INF:
                W.now = max(now, until)
            return NOTHING
        W.now = max(now, min(first, until))
        look = True
        if t <= W.now + HALF_NS:
            if not end_all(S):
                return GROW
            continue
        receive(S, r)
        b = T.route[req_at(S, r).model]
        if b >= 0:
            admit_now(S, r, b, next_seq(S))
        tell(S, E_ARRIVED, r, -1, 0)
