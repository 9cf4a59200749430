"""Steps of a batch, from their formation to their end: steps with prompts, and spans of decode steps."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.blocks import target
from harness.engines.sim.kernel.compose import compose
from harness.engines.sim.kernel.cost import noise, power_below, speed
from harness.engines.sim.kernel.events import tell
from harness.engines.sim.kernel.far import hold_far, span_far
from harness.engines.sim.kernel.lanes import activate, dirty, off_s, retire, segment, solo_at, wake
from harness.engines.sim.kernel.lists import unlink
from harness.engines.sim.kernel.members import end, leave_run, rest, set_parked
from harness.engines.sim.kernel.memory import fits, needs, put
from harness.engines.sim.kernel.orders import pending
from harness.engines.sim.kernel.pages import alternates, fill_steps
from harness.engines.sim.kernel.price import price
from harness.engines.sim.kernel.reuse import publish
from harness.engines.sim.kernel.waits import log_stay, made_first, mark, ran_for
from harness.engines.sim.kernel.walks import accounts, pieces_from, remotes
from harness.engines.sim.kernel.weights import elsewhere, leave, set_weights
from harness.engines.sim.state import *


@jit
def form(S: int, lane: int) -> None:
    """Compose an idle lane's next step or span, and start it."""
    decodes, pieces, single = compose(S, lane)
    if pieces == 0 and decodes == 0:
        return
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    n.decodes = decodes
    n.was = n.kind if lane == 2 * b else PREFILL  # compose asks whether it was MIXED, which no decode lane is
    n.started_s = W.now
    n.anchor_s = W.now
    n.anchor_work = 0.0
    n.rate = 0.0
    n.logged = 0
    n.off_s = 0.0
    n.part = 1.0
    n.part_since = W.now
    n.lent = -1
    c = inst_at(S, i).cost
    k = cost_at(S)[c]
    n.partition = 0
    n.max_rate = 1.0
    if n.sms > 0:
        n.partition = 2 * n.sms + (lane & 1)
        n.max_rate = speed(S, c, n.sms / gpu_at(S, inst_at(S, i).gpus[0]).sms, decodes, int(pieces > 0))
    n.slow = W.co_run * (k.pre_slow if pieces > 0 else k.dec_slow)
    W.steps += int(n.layers_left == 0)  # a later slice of a step is not counted as a step
    if pieces > 0:
        tokens, area, out = 0, 0.0, decodes  # area: pairs of causal attention; out: tokens that are sampled
        for r in pieces_from(S, n.pieces):
            q = req_at(S, r)
            tokens += q.piece
            area += q.piece * (q.prefilled + 0.5 * q.piece)
            if q.prefilled + q.piece == target(S, r):
                out += 1
        context = float(remote_at(S, B.near).context) if decodes > 0 else 0.0
        # `price` also sets the lane's demands, and takes the layers of this slice off `layers_left`.
        _, _, solo = price(S, lane, decodes, pieces, tokens, area, out, context, -1.0)
        if W.sigma > 0.0:
            solo *= noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 1, B.prefills)
        n.busy = STEP
        n.steps = int(n.layers_left == 0)  # the last slice ends the step
        n.first_s = solo
        n.slope_s = 0.0
        n.work = solo
    else:
        span(S, lane, decodes, c, single)
    if decodes > 0:
        for f in accounts(S, b):
            remote_at(S, f).brought = 0
    if n.turn != NO_TURN:
        n.in_turn = 1
        if n.turn == ORDERED:
            n.turn = BEGUN
            n.turn_began = W.now
            n.turn_until = W.now + n.quota
    activate(S, lane)


@jit
def span(S: int, lane: int, decodes: int, c: int, single: int) -> None:
    """Plan a span of decode steps, up to the point where the batch could change, and take KV blocks for it.

    Step j, counted from 0, takes first_s + j slope_s seconds without competition. With `single`, the span has one step.
    """
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    k = cost_at(S)[c]
    steps = req_at(S, B.root).last_tick - B.tick
    # Demands and attention elsewhere stay as priced in a span, so it ends when the context doubles.
    power = power_below(B.context)
    each = power / decodes
    near_context = each * (decodes - B.far) if B.far > 0 else float(power)
    base, host, _ = price(S, lane, decodes, 0, 0, 0.0, decodes, near_context, each)
    if B.far > 0:
        steps = min(steps, span_far(S, lane, c, base, host))  # it sets first_s and slope_s as the other branch does
    else:
        floor_s = base + (k.att0 + k.att1 * decodes)  # a step takes the larger of a floor and a line over context
        floor_s = floor_s + host if k.serial else max(floor_s, host)
        empty_s = base + (k.dec0 + k.dec1 * decodes) + (host if k.serial else 0.0)
        slope = k.dec2 * decodes
        now_s = empty_s + k.dec2 * B.context
        if now_s >= floor_s:
            n.first_s = now_s
            n.slope_s = slope
        else:  # the floor holds until the line exceeds it, after `knee` steps
            n.first_s = floor_s
            n.slope_s = 0.0
            if slope > 0.0:
                knee = int(math.floor((floor_s - now_s) / slope)) + 1
                while knee > 1 and empty_s + k.dec2 * (B.context + (knee - 1) * decodes) > floor_s:
                    knee -= 1
                steps = min(steps, knee)
    if W.sigma > 0.0:
        factor = noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 0, B.tick // NOISE_TICKS)
        n.first_s *= factor
        n.slope_s *= factor
        steps = min(steps, NOISE_TICKS - B.tick % NOISE_TICKS)
    steps = min(steps, (2 * power - B.context + decodes - 1) // decodes)
    if n.turn != NO_TURN:
        steps = min(steps, n.turn_max - n.turn_steps)  # rates.py ends a span where the turn's time is up
    if W.lookahead_steps > 0 and lane == 2 * b and B.count[WAITING] > 0:
        joins_in = req_at(S, B.ends[2 * WAITING + 1]).joins_step - n.ran
        if joins_in > 0:  # the last prompt of the queue joins then
            steps = min(steps, joins_in)
    steps = 1 if single else max(steps, 1)  # single: a member that lost its pages is let in at the next boundary
    if W.paged and alternates(S, lane):  # batches of a model on these GPUs take pages in turn, a step at a time
        steps = 1
    if B.far > 0:
        for f in remotes(S, b):
            steps = hold_far(S, b, f, steps)
    # `grow` has taken the blocks of the first step, or members brought them
    first = needs(S, B.near, B.tick, 1)
    more = needs(S, B.near, B.tick, steps) - first
    if more > 0 and not fits(S, i, more, 1):
        lo, hi = 1, steps
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if fits(S, i, needs(S, B.near, B.tick, mid) - first, 1):
                lo = mid
            else:
                hi = mid
        steps = lo
        more = needs(S, B.near, B.tick, steps) - first
    put(S, i, more)
    if B.far > 0:
        for f in remotes(S, b):  # an account elsewhere gets back blocks that it took for more steps than these
            F = remote_at(S, f)
            put(S, F.inst, needs(S, f, B.tick, steps) - needs(S, f, B.tick, F.ahead))
    n.busy = SPAN
    n.steps = steps
    n.work = solo_at(S, lane, steps)


@jit
def tally(S: int, lane: int, k: int) -> None:
    """Add k finished steps of a lane to its batch's total, and to the count of each cap that limited the steps."""
    W = world(S)
    batch_at(S, lane >> 1).steps += k
    bound = lane_at(S, lane).bound
    if bound:
        W.by_cap += k * int(bound & BY_CAP > 0)
        W.by_chunk += k * int(bound & BY_CHUNK > 0)
        W.by_prefill += k * int(bound & BY_PREFILL > 0)


@jit
def end_step(S: int, lane: int) -> None:
    """End a lane's step, or its whole span, at the current time."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    t = W.now
    if W.log_tokens:
        segment(S, lane, INF)
    wall, off = t - n.started_s, off_s(S, lane, t)
    B.busy_s += wall
    tally(S, lane, n.steps)
    n.ran += n.steps
    retire(S, lane)
    if n.decodes > 0:
        B.clock_solo += n.work
        B.clock_wall += wall
        B.clock_slice += off
        B.tick += n.steps
        B.context += n.decodes * n.steps
        for f in accounts(S, b):
            remote_at(S, f).context += remote_at(S, f).count * n.steps
        B.seq_steps += n.decodes * n.steps
        fill_steps(S, b, B.tick)
        while B.root >= 0 and req_at(S, B.root).last_tick == B.tick:
            r = B.root
            leave_run(S, b, r)
            end(S, r, DONE, t)
    r = n.pieces
    if n.layers_left == 0:
        B.prefills += int(r >= 0)
        n.pieces = -1
    while r >= 0:
        q = req_at(S, r)
        nxt = q.next_piece
        ran_for(S, r, wall, n.work, off)
        mark(S, r, t)
        if n.layers_left > 0:
            r = nxt
            continue
        if W.reuse and n.sliced:
            publish(S, r)
        q.prefilled += q.piece
        B.left -= q.piece
        B.prefilled += q.piece
        q.piece = 0
        if q.prefilled == target(S, r):
            unlink(S, b, WAITING, r)
            B.started -= 1
            if q.made == 0:
                made_first(S, r, t)
            q.made += 1
            q.length = target(S, r)
            if W.log_tokens:
                log_stay(S, r, -1)
            q.state = PARK
            if q.first_inst < 0:
                q.first_inst = B.inst
            q.last_inst = B.inst
            if q.made == q.output:
                end(S, r, DONE, t)
            else:
                set_parked(S, b, r)
                tell(S, E_PREFILLED, r, b, 0)
                wake(S, 2 * b + 1)
        r = nxt
    if B.pending > 0:
        pending(S, b)
    if n.in_turn:
        n.in_turn = 0
        n.turn_steps += n.steps
    if B.count[RUNNING] > 0:
        rest(S, b)
    dirty(S, 2 * b)
    dirty(S, 2 * b + 1)
    if n.resized:  # lanes change their partitions together, in compose
        for x in range(W.n_lanes):
            if lane_at(S, x).resized:
                dirty(S, x)
    if inst_at(S, B.inst).state == LEAVING and inst_at(S, B.inst).busy == 0:
        leave(S, B.inst)


@jit
def evict(S: int, i: int, drain: int, action: int) -> None:
    """Order the eviction of an instance's weights.

    With `drain`, the weights leave once the instance has no member left. Otherwise they leave at the next step boundary
    of its lanes.
    """
    W = world(S)
    I = inst_at(S, i)
    if I.state != DRAINING:  # else it was counted when its drain was ordered
        W.migrations += int(elsewhere(S, i, QUEUED, IN))
        I.left_s = W.now
    I.evict = action
    set_weights(S, i, DRAINING if drain else LEAVING)
    if not drain:
        for lane in range(W.n_lanes):  # a span may be at a boundary just now
            n = lane_at(S, lane)
            if n.busy == SPAN and batch_at(S, lane >> 1).inst == i and n.end <= W.now + HALF_NS:
                end_step(S, lane)
    if I.state != OUT and I.busy == 0 and (not drain or I.members == 0):
        leave(S, i)
