"""Steps of a batch, from their formation to their end: pieces of prompts, spans of decode steps."""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.cost import attend_s, noise, power_below, read_bytes, speed, table
from harness.engines.sim.kernel.events import tell
from harness.engines.sim.kernel.far import cut_kernels, far_context, far_s, hold_far, span_far
from harness.engines.sim.kernel.growth import grow, grow_prompts
from harness.engines.sim.kernel.lanes import (
    activate,
    ask,
    dirty,
    off_s,
    pool_of,
    retire,
    room,
    segment,
    set_turn,
    solo_at,
    wake,
)
from harness.engines.sim.kernel.links import elsewhere, leave, set_weights
from harness.engines.sim.kernel.lists import unlink
from harness.engines.sim.kernel.members import (
    end,
    join,
    leave_run,
    pending,
    piece_blocks,
    rest,
    set_parked,
    take_blocks,
    target,
    unlist,
)
from harness.engines.sim.kernel.memory import fits, needs, needs_far, never, put, shares_gpu, watermark
from harness.engines.sim.kernel.pages import alternates, fill_steps
from harness.engines.sim.kernel.reuse import held_hits, hits, hold, leading, publish
from harness.engines.sim.kernel.waits import charge, flag, log_stay, made_first, mark, ran_for, usable
from harness.engines.sim.state import (
    ANY,
    BEGUN,
    BY_CAP,
    BY_CHUNK,
    BY_PREFILL,
    DONE,
    DRAINING,
    E_PREFILLED,
    FAILED,
    HALF_NS,
    IDLE,
    IN,
    INF,
    LEAVING,
    MIXED,
    NO_TURN,
    NOISE_TICKS,
    ORDERED,
    OUT,
    PARK,
    PARKED,
    PREFILL,
    QUEUED,
    RUNNING,
    SPAN,
    STEP,
    WAITING,
    Tables,
    batch_at,
    gpu_at,
    inst_at,
    lane_at,
    model_at,
    remote_at,
    req_at,
    world,
)


@jit
def take_pieces(S: int, lane: int, budget: int, whole: int, cap: int, run: int, new: int, ran: int) -> int:
    """Walk the queue and put prompts, or pieces of them, into the lane's next step; returns how many.

    A prompt that joins after more steps than `ran` came when this one was scheduled, and stops the queue. Notes which
    caps kept out what the step would else have had; a queue that stops for memory does not get that far.
    """
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    n.pieces = -1
    last = -1
    count = 0
    tokens = 0
    blocked = int(B.swapped > 0)  # no prompt passes those swapped out
    left = 0 if blocked else budget
    short = 0  # of tokens
    r = B.ends[2 * WAITING]
    while r >= 0 and run + count < cap and left > 0:
        q = req_at(S, r)
        nxt = q.next
        goal = target(S, r)
        if q.joins_step > ran:
            break
        if q.home < 0:
            if not new:
                break
            need = q.chunk if W.reserves else (goal + 1 + W.block_tokens - 1) // W.block_tokens
            if never(S, i, need):
                unlist(S, r)
                end(S, r, FAILED, W.now)
                r = nxt
                continue
            extra = watermark(S, i) if inst_at(S, i).blocks > 0 else 0
            if W.piecewise and not whole:
                known = min(leading(S, r, i), (goal - 1) // W.block_tokens) * W.block_tokens if W.reuse else 0
                need = piece_blocks(S, r, known, min(goal - known, left))
            held = held_hits(S, r, i) if W.reuse else 0
            if not room(S, i, need - held + extra, 0):
                blocked = 1
                break
            cached = hits(S, r, i) if W.reuse else 0
            known = min(cached, (goal - 1) // W.block_tokens) * W.block_tokens  # the last token is computed
            if whole and count > 0 and tokens + goal - known > budget:
                short = 1
                break
            take_blocks(S, r, i, need, held)
            if W.reuse:
                hold(S, r, i, cached)
                q.prefilled = known
                B.left -= known
                if q.found < 0:
                    q.found = known
            B.started += 1
        c = goal - q.prefilled
        if whole:
            if count > 0 and tokens + c > budget:
                short = 1
                break
        elif c > left:
            short = 1
            c = left
        most = q.blocks * W.block_tokens - q.prefilled  # of a prompt that is in, where others took what it lacks
        if most < c:
            if whole or most == 0:
                break
            c = most
        left -= c
        charge(S, r, W.now)
        q.piece = c
        q.next_piece = -1
        if W.reuse and not n.sliced:
            publish(S, r)
        if last < 0:
            n.pieces = r
        else:
            req_at(S, last).next_piece = r
        last = r
        count += 1
        tokens += c
        r = nxt
    flag(S, b, blocked, B.stalled)
    if r >= 0 and not blocked and req_at(S, r).joins_step <= ran:
        if run + count >= cap:
            n.bound |= BY_CAP
        if left <= 0:
            short = 1
    if short:
        n.bound |= BY_CHUNK | BY_PREFILL
    return count


@jit
def compose(S: int, lane: int) -> tuple[int, int, int]:
    """Compose an idle lane's next step: (members that decode, prompts, 1 if it is one step alone).

    Without any, (0, 0, 0), nothing starts now.
    """
    W = world(S)
    n = lane_at(S, lane)
    n.dirty = 0
    if n.busy != IDLE or not n.open:
        return 0, 0, 0
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    first = 2 * b
    if not usable(S, i):
        return 0, 0, 0
    if lane == first:
        if n.kind == MIXED and lane_at(S, first + 1).busy != IDLE:
            return 0, 0, 0
    elif lane_at(S, first).busy != IDLE and lane_at(S, first).was == MIXED:
        return 0, 0, 0
    if n.resized:  # partitions of a GPU change together, at the last of their boundaries
        p = gpu_at(S, pool_of(S, lane)).head
        while p >= 0:
            if lane_at(S, p).resized and shares_gpu(S, i, batch_at(S, p >> 1).inst):
                return 0, 0, 0
            p = lane_at(S, p).next
        n.resized = 0
    if n.layers_left > 0:  # the step goes on with its next slice
        pieces = 0
        r = n.pieces
        while r >= 0:
            charge(S, r, W.now)
            pieces += 1
            r = req_at(S, r).next_piece
        return 0, pieces, 0
    n.sliced = int(0 < n.slice_layers < model_at(S, inst_at(S, i).model).layers)
    both = lane != first or n.kind == MIXED
    dec = both
    pre = lane == first
    cap = W.batch_cap if n.seqs < 0 else min(n.seqs, W.batch_cap)
    chunk = W.chunk_tokens if n.chunk < 0 else n.chunk
    if dec:
        while B.count[PARKED] > 0 and B.count[RUNNING] < cap:
            join(S, b, B.ends[2 * PARKED])
        while B.count[RUNNING] > cap:
            r = B.ends[2 * RUNNING + 1]
            leave_run(S, b, r)
            set_parked(S, b, r)
    pieces = 0
    grown = 0
    state = 0
    swapped = B.swapped
    n.pieces = -1
    n.bound = 0
    ran = n.ran
    lost = 0
    if W.piecewise and pre and B.started > 0:
        if chunk > 0:
            lost = grow_prompts(S, b, chunk - B.count[RUNNING] if both else chunk, 0)
        else:
            lost = grow_prompts(S, b, W.prefill_tokens, 1)
        state = lost
    while True:  # once more, for prompts that would join later, where nothing else was there to be scheduled
        if pre and not both:
            pieces = take_pieces(
                S, lane, chunk if chunk > 0 else W.prefill_tokens, int(chunk == 0), cap, 0, 1 - lost, ran
            )
        elif pre and chunk == 0:
            pieces = take_pieces(S, lane, W.prefill_tokens, 1, cap, B.count[RUNNING], 1 - lost, ran)
            dec = pieces == 0
        elif pre:
            if not grown:
                state = grow(S, b) | lost
                grown = 1
            if state < 2:
                run = B.count[RUNNING]
                pieces = take_pieces(S, lane, chunk - run, 0, cap, run, int(state == 0), ran)
        if dec and not grown:
            state = grow(S, b) | lost
            grown = 1
        flag(S, b, B.blocked, int(state >= 2) if dec else B.stalled)
        if state >= 2:
            if state == 3:
                dirty(S, lane)
            return 0, 0, 0
        run = B.count[RUNNING] if dec else 0
        if not pre or pieces > 0 or run > 0 or state > 0 or W.lookahead_steps == 0 or ran == ANY:
            break
        ran = ANY
    if pieces == 0 and run == 0:
        if state == 1:  # all lost their pages: waiting members may try again, after the others
            dirty(S, lane)
        return 0, 0, 0
    if run == cap and B.count[PARKED] > 0:
        n.bound |= BY_CAP
    n.bound &= n.own
    return run, pieces, int(state == 1 or B.swapped != swapped)


@jit
def form(S: int, T: Tables, lane: int) -> None:
    """Decide what an idle lane does next, and start it."""
    run, pieces, once = compose(S, lane)
    if pieces == 0 and run == 0:
        return
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    n.decodes = run
    n.was = n.kind if lane == 2 * b else PREFILL
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
    k = T.cost[c]
    n.partition = 0
    n.max_rate = 1.0
    if n.sms > 0:
        n.partition = 2 * n.sms + (lane & 1)
        n.max_rate = speed(T, c, n.sms / gpu_at(S, inst_at(S, i).gpus[0]).sms, run, int(pieces > 0))
    n.slow = W.co_run * (k.pre_slow if pieces > 0 else k.dec_slow)
    W.steps += int(n.layers_left == 0)
    if pieces > 0:
        tokens, area, out = 0, 0.0, run
        r = n.pieces
        while r >= 0:
            q = req_at(S, r)
            tokens += q.piece
            area += q.piece * (q.prefilled + 0.5 * q.piece)
            if q.prefilled + q.piece == target(S, r):
                out += 1
            r = q.next_piece
        far = B.far if run > 0 else 0
        C = float(B.context - far_context(S, b)) if run > 0 else 0.0
        near = attend_s(S, c, run - far, C)
        decode = max(near, far_s(S, b, c, -1.0)) if far > 0 else near
        gemm = table(T.grid, T.gemm[c], run + tokens) * k.pre_x
        gpu = gemm + table(T.grid, T.head[c], out) + decode
        pre = k.pre0 * pieces + k.pre1 * tokens + k.pre2 * area
        gpu += pre
        n.kernel_s[0] = gpu - decode + near
        n.kernel_count[0] = 1
        n.kernels = 1
        if n.op_s >= 0.0:
            gpu += W.poll_s * cut_kernels(S, lane, c, run + tokens, out, gemm, near + pre)
        host = k.host0 + k.host1 * (run + pieces)
        solo = gpu + host if k.serial else max(gpu, host)
        flops = k.fl_tok * (run + tokens) + k.fl_area * area
        duty = k.pre_duty if k.pre_duty > 0.0 else min(1.0, gpu / solo)
        compute = flops / (k.flops * solo)
        hbm = (read_bytes(S, c, run + tokens) + k.kbytes * C) / (k.hbm * solo)
        layers = model_at(S, inst_at(S, i).model).layers
        left = n.layers_left if n.layers_left > 0 else layers
        part = min(n.slice_layers, left) if n.slice_layers > 0 else left
        n.layers_left = left - part
        set_turn(S, lane, c, tokens, duty, solo / layers)
        solo *= part / layers
        ask(S, lane, solo, min(1.0, compute), min(1.0, hbm))
        if W.sigma > 0.0:
            solo *= noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 1, B.prefills)
        n.busy = STEP
        n.steps = int(n.layers_left == 0)
        n.first_s = solo
        n.slope_s = 0.0
        n.work = solo
    else:
        span(S, T, lane, run, c, once)
    if run > 0:
        B.brought = 0
        f = B.remote
        while f >= 0:
            remote_at(S, f).brought = 0
            f = remote_at(S, f).next
    if n.turn != NO_TURN:
        n.in_turn = 1
        if n.turn == ORDERED:
            n.turn = BEGUN
            n.turn_began = W.now
            n.turn_until = W.now + n.quota
    activate(S, lane)


@jit
def span(S: int, T: Tables, lane: int, run: int, c: int, once: int) -> None:
    """Decode steps until the batch could change, in closed form: solo seconds of step j are a + b j."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    k = T.cost[c]
    steps = req_at(S, B.root).last_tick - B.tick
    q = power_below(B.context)
    each = q / run
    near_context = each * (run - B.far) if B.far > 0 else float(q)
    near = attend_s(S, c, run - B.far, near_context)
    decode = max(near, far_s(S, b, c, each)) if B.far > 0 else near
    gemm = table(T.grid, T.gemm[c], run)
    base = gemm + table(T.grid, T.head[c], run)
    n.kernel_s[0] = base + near
    n.kernel_count[0] = 1
    n.kernels = 1
    if n.op_s >= 0.0:
        base += W.poll_s * cut_kernels(S, lane, c, run, run, gemm, near)
    host = k.host0 + k.host1 * run
    if B.far > 0:
        steps = min(steps, span_far(S, lane, c, base, host))
    else:
        flat = base + (k.att0 + k.att1 * run)
        slope = k.dec2 * run
        if k.serial:
            flat += host
            line = base + (k.dec0 + k.dec1 * run) + host
        else:
            flat = max(flat, host)
            line = base + (k.dec0 + k.dec1 * run)
        y = line + k.dec2 * B.context
        if y >= flat:
            n.first_s = y
            n.slope_s = slope
        else:  # a floor holds until the context reaches its knee
            n.first_s = flat
            n.slope_s = 0.0
            if slope > 0.0:
                knee = int(math.floor((flat - y) / slope)) + 1
                while knee > 1 and line + k.dec2 * (B.context + (knee - 1) * run) > flat:
                    knee -= 1
                steps = min(steps, knee)
    if W.sigma > 0.0:
        f = noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 0, B.tick // NOISE_TICKS)
        n.first_s *= f
        n.slope_s *= f
        steps = min(steps, NOISE_TICKS - B.tick % NOISE_TICKS)
    solo = base + decode
    solo = solo + host if k.serial else max(solo, host)
    duty = k.dec_duty if k.dec_duty > 0.0 else min(1.0, (base + decode) / solo)
    set_turn(S, lane, c, 0, duty, solo / model_at(S, inst_at(S, i).model).layers)
    compute = (k.fl_tok * run) / (k.flops * solo)
    ask(S, lane, solo, min(1.0, compute), min(1.0, (read_bytes(S, c, run) + k.kbytes * near_context) / (k.hbm * solo)))
    steps = min(steps, (2 * q - B.context + run - 1) // run)
    if n.turn != NO_TURN:
        steps = min(steps, n.turn_max - n.turn_steps)
    if W.lookahead_steps > 0 and lane == 2 * b and B.count[WAITING] > 0:
        young = req_at(S, B.ends[2 * WAITING + 1]).joins_step - n.ran
        if young > 0:  # the latest prompt joins then
            steps = min(steps, young)
    steps = 1 if once else max(steps, 1)  # once: a member that lost its pages is let in again at the next boundary
    if W.paged and alternates(S, lane):
        steps = 1
    f = B.remote if B.far > 0 else -1
    while f >= 0:
        steps = hold_far(S, b, f, steps)
        f = remote_at(S, f).next
    # taken by `grow`, but for members that brought theirs
    first = 0 if W.reserves else B.residues[(1 - B.tick) % W.block_tokens]
    more = needs(S, b, B.tick, steps) - first
    if more > 0 and not fits(S, i, more, 1):
        lo, hi = 1, steps
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if fits(S, i, needs(S, b, B.tick, mid) - first, 1):
                lo = mid
            else:
                hi = mid
        steps = lo
        more = needs(S, b, B.tick, steps) - first
    put(S, i, more)
    f = B.remote if B.far > 0 else -1
    while f >= 0:  # what an account holds for more steps than the others have room for goes back
        F = remote_at(S, f)
        put(S, F.inst, needs_far(S, f, B.tick, steps) - needs_far(S, f, B.tick, F.ahead))
        f = F.next
    n.busy = SPAN
    n.steps = steps
    n.work = solo_at(S, lane, steps)


@jit
def tally(S: int, lane: int, k: int) -> None:
    """Count steps of a lane that are over, and those that a cap bound."""
    W = world(S)
    batch_at(S, lane >> 1).steps += k
    bound = lane_at(S, lane).bound
    if bound:
        W.by_cap += k * int(bound & BY_CAP > 0)
        W.by_chunk += k * int(bound & BY_CHUNK > 0)
        W.by_prefill += k * int(bound & BY_PREFILL > 0)


@jit
def end_step(S: int, lane: int) -> None:
    """End a step, or the last of a span, now."""
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
        f = B.remote
        while f >= 0:
            remote_at(S, f).context += remote_at(S, f).count * n.steps
            f = remote_at(S, f).next
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
    if n.resized:
        for x in range(W.n_lanes):
            if lane_at(S, x).resized:
                dirty(S, x)
    if inst_at(S, B.inst).state == LEAVING and inst_at(S, B.inst).busy == 0:
        leave(S, B.inst)


@jit
def evict(S: int, i: int, drain: int, act_: int) -> None:
    """Free weights once no member is left, or at the next boundary."""
    W = world(S)
    I = inst_at(S, i)
    if I.state != DRAINING:  # else it was counted when it began to leave
        W.migrations += int(elsewhere(S, i, QUEUED, IN))
        I.left_s = W.now
    I.evict = act_
    set_weights(S, i, DRAINING if drain else LEAVING)
    if not drain:
        for lane in range(W.n_lanes):  # a span may be at a boundary just now
            n = lane_at(S, lane)
            if n.busy == SPAN and batch_at(S, lane >> 1).inst == i and n.end <= W.now + HALF_NS:
                end_step(S, lane)
    if I.state != OUT and I.busy == 0 and (not drain or I.members == 0):
        leave(S, i)
