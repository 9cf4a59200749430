"""A policy's orders to open or close a lane, and the ends of turns.

A turn keeps a lane open for a limited time or number of steps. It ends early if the lane is stuck or has no members.
"""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import lay_out
from harness.engines.sim.kernel.events import tell
from harness.engines.sim.kernel.lanes import cut, dirty, freed, wake
from harness.engines.sim.kernel.members import rest
from harness.engines.sim.kernel.memory import touches
from harness.engines.sim.kernel.reuse import shed
from harness.engines.sim.kernel.waits import flag, usable
from harness.engines.sim.kernel.walks import listed, remotes, transfers, turns
from harness.engines.sim.state import *


@jit
def open_turn(S: int, lane: int, for_s: float, steps: int) -> None:
    """Give a lane a turn of at most `for_s` seconds and `steps` steps; the turn begins with the lane's next step.

    If `steps` is not positive, the number of steps is not limited. The list of turns is sorted by lane.
    """
    W = world(S)
    n = lane_at(S, lane)
    n.turn = ORDERED
    n.quota = for_s
    n.turn_max = steps if steps > 0 else 1 << 62
    n.turn_steps = 0
    n.turn_until = INF
    if W.turn_head < 0 or lane < W.turn_head:
        n.next_turn = W.turn_head
        W.turn_head = lane
    else:
        x = W.turn_head
        while lane_at(S, x).next_turn >= 0 and lane_at(S, x).next_turn < lane:
            x = lane_at(S, x).next_turn
        n.next_turn = lane_at(S, x).next_turn
        lane_at(S, x).next_turn = lane


@jit
def forget_turn(S: int, lane: int) -> None:
    """Cancel a lane's turn without a report; a step in flight no longer counts toward the turn."""
    W = world(S)
    n = lane_at(S, lane)
    n.in_turn = 0
    if n.turn == NO_TURN:
        return
    n.turn = NO_TURN
    if W.turn_head == lane:
        W.turn_head = n.next_turn
    else:
        x = W.turn_head
        while lane_at(S, x).next_turn != lane:
            x = lane_at(S, x).next_turn
        lane_at(S, x).next_turn = n.next_turn


@jit
def shut(S: int, lane: int) -> None:
    """Close a lane. From now on, its prompts no longer wait for memory but for the lane to open."""
    b = lane >> 1
    lane_at(S, lane).open = 0
    if lane == 2 * b:
        flag(S, b, 0, batch_at(S, b).stalled)


@jit
def end_turn(S: int, lane: int, why: int) -> None:
    """End a lane's turn for the reason `why`: close the lane and report the end."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    ran = W.now - n.turn_began if n.turn == BEGUN else 0.0
    forget_turn(S, lane)
    shut(S, lane)
    if batch_at(S, b).count[RUNNING] > 0:
        rest(S, b)
    if (W.heard >> E_TURN) & 1:
        event_at(S, W.events_told).ran_s = ran
        tell(S, E_TURN, n.turn_steps, b, 4 * (2 if lane & 1 else n.kind) + why)


@jit
def deserted(S: int, lane: int) -> bool:
    """Tell whether a lane's batch has no member that could take part in the lane's steps, now or later."""
    b = lane >> 1
    B = batch_at(S, b)
    prompts = B.count[WAITING] - B.swapped
    decodes = B.count[RUNNING] + B.count[PARKED] + B.count[ELSEWHERE] + B.swapped
    if lane != 2 * b:
        return decodes == 0
    return prompts == 0 and (lane_at(S, lane).kind == PREFILL or decodes == 0)


@jit
def busy(S: int, i: int) -> bool:
    """Tell whether a GPU of an instance runs a step, or attends to KV for a step on other GPUs."""
    for j in range(inst_at(S, i).gpu_count):
        if gpu_at(S, inst_at(S, i).gpus[j]).active > 0:
            return True
    return False


@jit
def stuck(S: int, lane: int) -> bool:
    """Tell whether an idle lane with members cannot run a step, and nothing under way could change this."""
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    if not usable(S, i):
        return inst_at(S, i).state != QUEUED and inst_at(S, i).state != LOADING
    if n.resized:
        return False
    if lane != 2 * b or n.kind == MIXED:
        for r in listed(S, b, ELSEWHERE):
            if req_at(S, r).state == MOVE:
                return False
        here = B.count[RUNNING] + B.count[PARKED] + (B.swapped if lane != 2 * b else B.count[WAITING])
        if here == 0:
            return True
    if busy(S, i):
        return False
    for f in remotes(S, b):
        if remote_at(S, f).count > 0 and busy(S, remote_at(S, f).inst):
            return False
    for x in transfers(S, world(S).transfer_head):
        X = xfer_at(S, x)
        begun = X.stage != LINK or X.parts > 0  # a move may still wait for its request's step
        if begun and (touches(S, b, X.inst) or (X.source >= 0 and touches(S, b, X.source))):
            return False
    return True


@jit
def settle_turns(S: int) -> bool:
    """End the turns of idle lanes that are deserted or stuck. Return False if a log is full.

    Call it at the end of an instant.
    """
    for lane in turns(S):
        n = lane_at(S, lane)
        if n.busy == IDLE:
            if not spare(S, 0):
                return False
            if deserted(S, lane):
                end_turn(S, lane, EMPTY)
            elif stuck(S, lane):
                end_turn(S, lane, STUCK)
    return True


@jit
def own_caps(S: int, seqs: int, chunk: int) -> int:
    """Return the caps on a lane's steps that come from the engine's settings, as BY_* bits.

    `seqs` and `chunk` are the caps in the policy's order (-1: none). A cap that the order sets has no bit, because it
    is the policy's choice.
    """
    W = world(S)
    caps = BY_CAP if seqs < 0 or seqs > W.batch_cap else 0
    if chunk == 0 or (chunk < 0 and W.chunk_tokens == 0):
        caps |= BY_PREFILL
    elif chunk < 0:
        caps |= BY_CHUNK
    return caps


@jit
def run_lane(
    S: int,
    b: int,
    phase: int,
    close: int,
    for_s: float,
    steps: int,
    seqs: int,
    chunk: int,
    sms: int,
    slice_layers: int,
    op_s: float,
) -> None:
    """Open or close a lane as a policy's order says.

    `phase` is 0 for mixed, 1 for prefill and 2 for decode. A field that the order leaves out is -1, except that `for_s`
    is then INF.
    """
    lane = 2 * b + (phase == 2)
    n = lane_at(S, lane)
    other = lane_at(S, 2 * b + (phase != 2))
    if close:
        if phase == 2 or n.kind == (PREFILL if phase == 1 else MIXED):
            if n.in_turn:  # a step of its turn is in flight, and will be the last of the turn
                n.turn_max = 0
                shut(S, lane)
            elif n.turn != NO_TURN:
                end_turn(S, lane, STEPS)
            else:
                shut(S, lane)
    else:
        forget_turn(S, lane)
        n.open = 1
        n.kind = PREFILL if phase == 1 else MIXED
        if other.open and (phase == 0 or (phase == 2 and other.kind == MIXED)):
            forget_turn(S, 2 * b + (phase != 2))
            shut(S, 2 * b + (phase != 2))
            cut(S, 2 * b + (phase != 2))
        if n.sms != sms:
            n.resized = 1
        n.seqs = seqs
        n.chunk = chunk
        n.sms = sms
        n.slice_layers = slice_layers
        n.op_s = op_s
        n.own = own_caps(S, seqs, chunk)
        if for_s < INF or steps > 0:
            open_turn(S, lane, for_s, steps)
    cut(S, lane)
    if batch_at(S, b).count[RUNNING] > 0:
        rest(S, b)
    dirty(S, lane)


@jit
def limit(S: int, i: int, nbytes: int) -> None:
    """Set the KV limit of an account to `nbytes` bytes per GPU (-1: no limit).

    Requests keep their KV, even beyond the limit. Cached blocks that no request uses are evicted if they exceed the
    limit.
    """
    W = world(S)
    if inst_at(S, i).cached > 0:  # cached blocks that have lost their room stay lost under a higher limit
        shed(S, i)
    was = inst_at(S, i).limit
    inst_at(S, i).limit = nbytes
    lay_out(S, i)
    if inst_at(S, i).cached > 0:
        shed(S, i)
    if was >= 0 and (nbytes < 0 or nbytes > was):
        freed(S, i)
    for lane in range(W.n_lanes):  # steps not begun lose what they held; prompts that fit no more fail
        if batch_at(S, lane >> 1).inst == i or (lane_at(S, lane).lent >= 0 and touches(S, lane >> 1, i)):
            wake(S, lane)


@jit
def spare(S: int, waiting: int) -> bool:
    """Tell whether the logs have room for everything that one lane's step can produce.

    `waiting` is the number of waiting members that could fail while the step is formed.
    """
    W = world(S)
    most = 4 * W.batch_cap + 64 + waiting
    if W.n_events - W.events_told < most or W.transfer_spare < 9 * (W.batch_cap + 8):
        return False
    return W.log_tokens == 0 or W.n_log - W.log_used > most + W.n_lanes
