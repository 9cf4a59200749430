"""The composition of a lane's next step: the members that decode, and the prompts or pieces of prompts in it."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.blocks import piece_blocks, take_blocks, target
from harness.engines.sim.kernel.growth import grow, grow_prompts
from harness.engines.sim.kernel.lanes import dirty, pool_of, room
from harness.engines.sim.kernel.members import end, join, leave_run, set_parked, unlist
from harness.engines.sim.kernel.memory import never, shares_gpu, watermark
from harness.engines.sim.kernel.reuse import held_hits, hits, hold, leading, publish
from harness.engines.sim.kernel.waits import charge, flag, usable
from harness.engines.sim.kernel.walks import lanes_in, pieces_from
from harness.engines.sim.state import *


@jit
def take_pieces(S: int, lane: int, budget: int, whole: int, cap: int, run: int, new: int, ran: int) -> int:
    """Put prompts, or pieces of prompts, from the queue into the lane's next step; return their number.

    The step has at most `budget` prompt tokens and `cap` sequences, of which `run` decode. With `whole`, prompts are
    not cut, and the first may exceed the budget. Prompts without KV are taken only with `new`. Prompts are taken in
    queue order. A prompt whose `joins_step` exceeds `ran` arrived after this step was scheduled: that prompt and all
    later ones are left out. The lane's `bound` records the caps that kept prompts or tokens out of the step, unless
    lack of memory ended the loop first.
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
    blocked = int(B.swapped > 0)  # no prompt overtakes members that are swapped out
    left = 0 if blocked else budget
    short = 0  # 1: the budget of tokens kept something out
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
        most = q.blocks * W.block_tokens - q.prefilled  # a prompt let in earlier may lack blocks that others took
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
    """Choose the members of an idle lane's next step.

    Return the number of members that decode, the number of prompts, and a flag. The flag is 1 if the lane must run one
    step instead of a span of steps, else 0. Return (0, 0, 0) if no step starts now.
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
        for p in lanes_in(S, pool_of(S, lane)):
            if lane_at(S, p).resized and shares_gpu(S, i, batch_at(S, p >> 1).inst):
                return 0, 0, 0
        n.resized = 0
    if n.layers_left > 0:  # the step goes on with its next slice
        pieces = 0
        for r in pieces_from(S, n.pieces):
            charge(S, r, W.now)
            pieces += 1
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
    while True:  # the second time, nothing else could be scheduled: prompts that would join later are taken
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
