"""Every jitted function of the simulator: how work gets done, memory taken and time passed.

Semantics: harness/README.md. `advance` runs from event to event; `form` decides a lane's next step; `share` sets the
rates of lanes that compete; a decode span covers many steps in closed form until something could change its batch.
Pages of a span's later steps are taken in advance and given back when somebody else runs short, so that memory is
exact at every step. One file: numba's cache does not see edits in files that a function calls into.
"""

from __future__ import annotations

import math

from harness.engines.jit import jit
from harness.engines.state import (
    AWAY,
    BEGUN,
    BY_CAP,
    BY_CHUNK,
    BY_PREFILL,
    DISK,
    DONE,
    DRAINING,
    DROPPED,
    E_ARRIVED,
    E_DONE,
    E_FINISHED,
    E_PREEMPTED,
    E_PREFILLED,
    E_TURN,
    ELSEWHERE,
    EMPTY,
    FAILED,
    FREE,
    FUTURE,
    GRANT,
    GROW,
    HELD,
    IDLE,
    IN,
    LEAVING,
    LINK,
    LOAD,
    LOADING,
    MIXED,
    MOVE,
    NO_TURN,
    NOTHING,
    ORDERED,
    OUT,
    OVER,
    P_ADMIT,
    P_DISCARD,
    P_DROP,
    P_MOVE,
    P_NONE,
    PARK,
    PARKED,
    PREFILL,
    QUEUED,
    RUN,
    RUNNING,
    SHIFT,
    SPAN,
    SPREAD,
    STEP,
    STEPS,
    STUCK,
    SWAP_IN,
    SWAP_OUT,
    TAIL,
    TIME,
    TOLD,
    WAIT,
    WAITING,
    Tables,
    action_at,
    batch_at,
    cost_at,
    dec_rate_at,
    event_at,
    gemm_at,
    gpu_at,
    grid_at,
    head_at,
    inst_at,
    lane_at,
    link_at,
    log_at,
    model_at,
    pre_rate_at,
    req_at,
    route_at,
    seqs_at,
    share_at,
    world,
    xfer_at,
)

INF = math.inf
NOISE_TICKS = 64  # decode ticks that share one factor of step noise
ANY = 1 << 62  # more steps than a lane ever runs
HALF_NS = 0.5e-9  # stamps are whole nanoseconds: what ends within half a one belongs to the instant

# ---------------------------------------------------------------- lists, heap, events


@jit
def push(S: int, b: int, lst: int, r: int, front: int) -> None:
    """Put a request into a list kept in order of Admit; walk from the front for one that returns."""
    seq = req_at(S, r).seq
    head, tail = batch_at(S, b).ends[2 * lst], batch_at(S, b).ends[2 * lst + 1]
    if front:
        nxt = head
        while nxt >= 0 and req_at(S, nxt).seq < seq:
            nxt = req_at(S, nxt).next
        prev = tail if nxt < 0 else req_at(S, nxt).prev
    else:
        prev = tail
        while prev >= 0 and req_at(S, prev).seq > seq:
            prev = req_at(S, prev).prev
        nxt = head if prev < 0 else req_at(S, prev).next
    req_at(S, r).prev = prev
    req_at(S, r).next = nxt
    if prev >= 0:
        req_at(S, prev).next = r
    else:
        batch_at(S, b).ends[2 * lst] = r
    if nxt >= 0:
        req_at(S, nxt).prev = r
    else:
        batch_at(S, b).ends[2 * lst + 1] = r
    batch_at(S, b).count[lst] += 1


@jit
def unlink(S: int, b: int, lst: int, r: int) -> None:
    """Take a request out of a list."""
    prev, nxt = req_at(S, r).prev, req_at(S, r).next
    if prev >= 0:
        req_at(S, prev).next = nxt
    else:
        batch_at(S, b).ends[2 * lst] = nxt
    if nxt >= 0:
        req_at(S, nxt).prev = prev
    else:
        batch_at(S, b).ends[2 * lst + 1] = prev
    batch_at(S, b).count[lst] -= 1
    if lst == WAITING and batch_at(S, b).count[lst] == 0:  # nobody left who was stopped for memory
        flag(S, b, 0, batch_at(S, b).stalled)


@jit
def meld(S: int, x: int, y: int) -> int:
    """Join two pairing heaps of finish ticks; ties by id."""
    if x < 0:
        return y
    if y < 0:
        return x
    if req_at(S, y).tick < req_at(S, x).tick or (req_at(S, y).tick == req_at(S, x).tick and y < x):
        x, y = y, x
    child = req_at(S, x).hc
    req_at(S, y).hn = child
    if child >= 0:
        req_at(S, child).hp = y
    req_at(S, y).hp = x
    req_at(S, x).hc = y
    return x


@jit
def meld_children(S: int, r: int) -> int:
    """The heap of r's children: pairs from the left, then all from the right."""
    c = req_at(S, r).hc
    pairs = -1
    while c >= 0:
        d = req_at(S, c).hn
        req_at(S, c).hn = -1
        req_at(S, c).hp = -1
        e = -1
        if d >= 0:
            e = req_at(S, d).hn
            req_at(S, d).hn = -1
            req_at(S, d).hp = -1
            c = meld(S, c, d)
        req_at(S, c).hn = pairs
        pairs = c
        c = e
    root = -1
    while pairs >= 0:
        d = req_at(S, pairs).hn
        req_at(S, pairs).hn = -1
        root = meld(S, root, pairs)
        pairs = d
    req_at(S, r).hc = -1
    return root


@jit
def heap_insert(S: int, b: int, r: int) -> None:
    """Enter a finish tick."""
    q = req_at(S, r)
    q.hc = -1
    q.hn = -1
    q.hp = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, r)


@jit
def heap_delete(S: int, b: int, r: int) -> None:
    """Remove a finish tick, wherever it is."""
    if batch_at(S, b).root == r:
        batch_at(S, b).root = meld_children(S, r)
        return
    up, nxt = req_at(S, r).hp, req_at(S, r).hn
    if req_at(S, up).hc == r:
        req_at(S, up).hc = nxt
    else:
        req_at(S, up).hn = nxt
    if nxt >= 0:
        req_at(S, nxt).hp = up
    req_at(S, r).hn = -1
    req_at(S, r).hp = -1
    batch_at(S, b).root = meld(S, batch_at(S, b).root, meld_children(S, r))


@jit
def tell(S: int, kind: int, a: int, b: int, c: int) -> None:
    """Note an event of this instant, if anybody hears its kind."""
    W = world(S)
    if (W.hear >> kind) & 1:
        e = event_at(S, W.ev_n)
        e.kind = kind
        e.a = a
        e.b = b
        e.c = c
        W.ev_n += 1


@jit
def in_order(S: int) -> None:
    """Sort the instant's events by kind, stable."""
    W = world(S)
    for i in range(W.ev_i + 1, W.ev_n):
        j = i
        while j > W.ev_i and event_at(S, j - 1).kind > event_at(S, j).kind:
            x, y = event_at(S, j - 1), event_at(S, j)
            x.kind, y.kind = y.kind, x.kind
            x.a, y.a = y.a, x.a
            x.b, y.b = y.b, x.b
            x.c, y.c = y.c, x.c
            x.ran, y.ran = y.ran, x.ran
            j -= 1


@jit
def note(S: int, parts: int, heard: int) -> int:
    """Number an action that is done when so many parts of it are."""
    W = world(S)
    a = W.afree
    A = action_at(S, a)
    W.afree = A.next
    W.an -= 1
    A.left = parts
    A.failed = 0
    A.heard = heard
    return a


@jit
def forget(S: int, a: int) -> None:
    """An action is over and read: its number is free again."""
    W = world(S)
    action_at(S, a).next = W.afree
    W.afree = a
    W.an += 1


@jit
def over(S: int, a: int, failed: int) -> bool:
    """A part of an action is over: whether it was the last."""
    A = action_at(S, a)
    A.left -= 1
    A.failed += failed
    return A.left == 0


@jit
def done(S: int, a: int, failed: int) -> None:
    """A part of an action (-1: of none) is over; the last one tells, if anybody hears of it or a part failed."""
    if a >= 0 and over(S, a, failed):
        A = action_at(S, a)
        if A.heard or A.failed > 0:
            tell(S, E_DONE, a, -1, A.failed)
        else:
            forget(S, a)


# ---------------------------------------------------------------- cost


@jit
def noise(sigma: float, seed: int, model: int, slot: int, kind: int, index: int) -> float:
    """One factor of mean 1 by counter: the sum of four uniforms from a 32-bit mix, so no state is carried."""
    h = 0x9E3779B9
    for v in (seed, model, slot, kind, index):
        h ^= v & 0xFFFFFFFF
        h ^= h >> 16
        h = (h * 0x7FEB352D) & 0xFFFFFFFF
        h ^= h >> 15
        h = (h * 0x31848BAB) & 0xFFFFFFFF
        h ^= h >> 16
    g = h ^ 0x85EBCA6B
    g ^= g >> 16
    g = (g * 0x7FEB352D) & 0xFFFFFFFF
    g ^= g >> 15
    g = (g * 0x31848BAB) & 0xFFFFFFFF
    g ^= g >> 16
    u = ((h & 0xFFFF) + (h >> 16) + (g & 0xFFFF) + (g >> 16)) / 65536.0
    return 1.0 + sigma * math.sqrt(3.0) * (u - 2.0)


@jit
def tables(S: int) -> Tables:
    """The cost tables, in place: as arguments their nine arrays would cost more than most calls do."""
    return Tables(
        cost_at(S),
        grid_at(S),
        gemm_at(S),
        head_at(S),
        share_at(S),
        seqs_at(S),
        dec_rate_at(S),
        pre_rate_at(S),
        route_at(S),
    )


@jit
def table(grid, row, m: int) -> float:  # type: ignore[no-untyped-def]
    """A table at m: linear between grid points and beyond the last two; 0 at 0."""
    if m <= 0:
        return 0.0
    lo, hi = 0, grid.size - 1
    if m >= grid[hi]:
        lo = hi - 1
    else:
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if grid[mid] <= m:
                lo = mid
            else:
                hi = mid
    return row[lo] + (row[lo + 1] - row[lo]) * ((m - grid[lo]) / (grid[lo + 1] - grid[lo]))


@jit
def step_s(T: Tables, c: int, B: int, C: float, p: int, n: int, area: float, out: int) -> float:
    """Solo seconds of one step (formula: coef.py)."""
    k = T.cost[c]
    gpu = table(T.grid, T.gemm[c], B + p) + table(T.grid, T.head[c], out)
    if B > 0:
        gpu += max(k.att0 + k.att1 * B, k.dec0 + k.dec1 * B + k.dec2 * C)
    if n > 0:
        gpu += k.pre0 * n + k.pre1 * p + k.pre2 * area
    host = k.host0 + k.host1 * (B + n)
    return gpu + host if k.serial else max(gpu, host)


@jit
def lerp(xs, ys, x: float) -> float:  # type: ignore[no-untyped-def]
    """Piecewise linear, clamped at both ends."""
    if x <= xs[0]:
        return ys[0]
    for i in range(1, xs.size):
        if x <= xs[i]:
            return ys[i - 1] + (ys[i] - ys[i - 1]) * ((x - xs[i - 1]) / (xs[i] - xs[i - 1]))
    return ys[xs.size - 1]


@jit
def speed(T: Tables, c: int, x: float, B: int, prefill: int) -> float:
    """Speed of a step at a share x of the SMs."""
    if prefill:
        return lerp(T.share, T.pre_rate[c], x)
    n = T.seqs.size
    j = 0
    while j < n - 2 and T.seqs[j + 1] < B:
        j += 1
    w = 0.0
    if n > 1:
        w = min(max((B - T.seqs[j]) / (T.seqs[j + 1] - T.seqs[j]), 0.0), 1.0)
    y0 = lerp(T.share, T.dec_rate[c][:, j], x)
    y1 = lerp(T.share, T.dec_rate[c][:, min(j + 1, n - 1)], x)
    return y0 + (y1 - y0) * w


# ---------------------------------------------------------------- memory


@jit
def kv_bytes(S: int, i: int, blocks: int) -> int:
    """Bytes that so many blocks of an account take: whole granules, with fragmentation."""
    I = inst_at(S, i)
    d = 1024 * I.gblocks
    return I.granule * ((blocks * (1024 + I.frag) + d - 1) // d)


@jit
def held_bytes(S: int, i: int, blocks: int) -> int:
    """What they take beyond the account's reserve: that is charged with the weights and used first."""
    return max(0, kv_bytes(S, i, blocks) - inst_at(S, i).kept)


@jit
def put(S: int, i: int, n: int) -> None:
    """Take (n > 0) or free blocks of an account on each of its GPUs."""
    W = world(S)
    I = inst_at(S, i)
    I.blocks += n
    h = held_bytes(S, i, I.blocks)
    d = h - I.held
    if d == 0:
        return
    I.held = h
    now = W.now
    for j in range(I.n):
        g = gpu_at(S, I.at[j])
        g.kv_s += g.kv * (now - g.kv_t)
        g.kv_t = now
        g.kv += d
        g.used += d


@jit
def keep(S: int, i: int, nbytes: int) -> None:
    """An account's reserve comes with its weights and goes with them; the KV in it stays."""
    inst_at(S, i).kept = nbytes
    put(S, i, 0)


@jit
def asked_bytes(S: int, x: int) -> int:
    """What a load or move that waits for memory takes on each of its GPUs."""
    X = xfer_at(S, x)
    if X.kind != SHIFT:
        return int(X.bytes)
    return held_bytes(S, X.inst, inst_at(S, X.inst).blocks + X.blocks) - inst_at(S, X.inst).held


@jit
def promised(S: int, g: int) -> int:
    """Bytes of a GPU that loads and moves wait for: in whole granules, if KV comes in more than blocks."""
    W = world(S)
    total = gpu_at(S, g).waiting
    if not W.elastic or total == 0:
        return total
    total = 0
    x = W.xhead
    while x >= 0:
        X = xfer_at(S, x)
        if X.stage == GRANT:
            for j in range(inst_at(S, X.inst).n):
                if inst_at(S, X.inst).at[j] == g:
                    total += asked_bytes(S, x)
        x = X.next
    return total


@jit
def fits(S: int, i: int, n: int, grow_: int) -> bool:
    """Whether n more blocks fit now. Memory that a load or move waits for is closed to prompts, not to growth."""
    W = world(S)
    if W.unlimited:
        return True
    I = inst_at(S, i)
    h = held_bytes(S, i, I.blocks + n)
    if I.limit >= 0 and h > I.limit:
        return False
    for j in range(I.n):
        g = gpu_at(S, I.at[j])
        if g.used + h - I.held + (0 if grow_ else promised(S, I.at[j])) > g.cap:
            return False
    return True


@jit
def needs(S: int, b: int, d0: int, k: int) -> int:
    """Blocks that the running members take at ticks d0 .. d0 + k - 1."""
    W = world(S)
    bt = W.bt
    total = (k // bt) * batch_at(S, b).count[RUNNING]
    for d in range(d0, d0 + k % bt):
        total += batch_at(S, b).h[(1 - d) % bt]
    return total


@jit
def shares_gpu(S: int, i: int, j: int) -> bool:
    """Whether two instances have a GPU in common."""
    for x in range(inst_at(S, i).n):
        for y in range(inst_at(S, j).n):
            if inst_at(S, i).at[x] == inst_at(S, j).at[y]:
                return True
    return False


@jit
def give_back(S: int, i: int) -> None:
    """Cut all spans on the GPUs of an instance, so that memory is what the steps begun so far need."""
    W = world(S)
    for p in range(W.nG):
        lane = gpu_at(S, p).head
        while lane >= 0:
            nxt = lane_at(S, lane).next
            if lane_at(S, lane).busy == SPAN and shares_gpu(S, i, batch_at(S, lane >> 1).inst):
                cut(S, lane)
            lane = nxt


@jit
def room(S: int, i: int, n: int, grow_: int) -> bool:
    """Whether n more blocks fit once nothing is held in advance."""
    if fits(S, i, n, grow_):
        return True
    give_back(S, i)
    return fits(S, i, n, grow_)


@jit
def never(S: int, i: int, n: int) -> bool:
    """Whether an account could not even hold n blocks alone on its GPUs."""
    W = world(S)
    if W.unlimited:
        return False
    I = inst_at(S, i)
    h = held_bytes(S, i, n)
    if I.limit >= 0 and h > I.limit:
        return True
    for j in range(I.n):
        if h > gpu_at(S, I.at[j]).cap - I.foot:
            return True
    return False


@jit
def watermark(S: int, i: int) -> int:
    """Blocks kept free when a prompt is let in beside others."""
    W = world(S)
    if W.unlimited or W.watermark <= 0.0:
        return 0
    I = inst_at(S, i)
    total = I.limit
    if total < 0:
        total = gpu_at(S, I.at[0]).cap - I.foot
        for j in range(1, I.n):
            total = min(total, gpu_at(S, I.at[j]).cap - I.foot)
    return int(math.floor(W.watermark * (total // I.bbytes)))


@jit
def freed(S: int, i: int) -> None:
    """Memory came free on the GPUs of an instance: whoever waited for it looks again."""
    W = world(S)
    W.grants = 1
    if W.blocked > 0 or W.swap:
        for b in range(W.nB):
            B = batch_at(S, b)
            if (B.kvblock or B.stalled or B.swapped > 0) and shares_gpu(S, i, B.inst):
                wake(S, 2 * b)
                wake(S, 2 * b + 1)


# ---------------------------------------------------------------- lanes and time


@jit
def dirty(S: int, lane: int) -> None:
    """A lane is to be formed at this instant."""
    W = world(S)
    n = lane_at(S, lane)
    if n.dirty == 0 and n.busy == IDLE and n.open:
        n.dirty = 1
        if W.dirty < 0 or lane < W.dirty:
            n.dnext = W.dirty
            W.dirty = lane
        else:
            x = W.dirty
            while lane_at(S, x).dnext >= 0 and lane_at(S, x).dnext < lane:
                x = lane_at(S, x).dnext
            n.dnext = lane_at(S, x).dnext
            lane_at(S, x).dnext = lane


@jit
def solo_at(S: int, lane: int, j: int) -> float:
    """Solo seconds of the first j steps of a span."""
    n = lane_at(S, lane)
    return j * n.a + n.b * (0.5 * j * (j - 1))


@jit
def steps_to(S: int, lane: int, done: float) -> int:
    """Fewest steps, at least one, whose solo seconds reach `done`."""
    n = lane_at(S, lane)
    h = n.a - 0.5 * n.b
    if n.b > 0.0:
        j = int(math.ceil((-h + math.sqrt(h * h + 2.0 * n.b * done)) / n.b))
    else:
        j = int(math.ceil(done / n.a))
    j = min(max(j, 1), n.k)
    while j > 1 and solo_at(S, lane, j - 1) >= done:
        j -= 1
    while j < n.k and solo_at(S, lane, j) < done:
        j += 1
    return j


@jit
def done_at(S: int, lane: int, t: float) -> float:
    """Solo seconds done by t."""
    n = lane_at(S, lane)
    return n.wa + (t - n.ta) * n.rate


@jit
def next_end(S: int, p: int) -> None:
    """The first lane of a pool to end; ties go to the older lane."""
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
    """Which of its steps, from 1, a busy lane is in."""
    W = world(S)
    n = lane_at(S, lane)
    if n.busy != SPAN or n.k == 1 or n.rate <= 0.0:  # rate 0: formed at this instant, not under way yet
        return 1
    now = W.now
    j = steps_to(S, lane, done_at(S, lane, now - HALF_NS))
    begun = lane <= W.formed and now <= W.over + HALF_NS
    if begun and j < n.k and n.ta + (solo_at(S, lane, j) - n.wa) / n.rate <= now + HALF_NS:
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
    if n.busy != SPAN or n.k == 1:
        return
    j = max(step_of(S, lane), ran - n.ran)
    if j < n.k:
        shorten(S, lane, j)
        if n.rate > 0.0:
            n.end = max(W.now, n.ta + (n.work - n.wa) / n.rate)
            if n.end <= W.now + HALF_NS:
                W.due = 1
            next_end(S, pool_of(S, lane))


@jit
def shorten(S: int, lane: int, j: int) -> None:
    """Plan a span for j steps instead of more."""
    n = lane_at(S, lane)
    b = lane >> 1
    d = batch_at(S, b).D
    back = needs(S, b, d, n.k) - needs(S, b, d, j)
    n.k = j
    n.work = solo_at(S, lane, j)
    if back > 0:
        put(S, batch_at(S, b).inst, -back)


@jit
def wake(S: int, lane: int) -> None:
    """Something changed for a lane: form it if idle, else at its next boundary."""
    n = lane_at(S, lane)
    if n.busy == IDLE:
        dirty(S, lane)
    elif n.busy == SPAN:
        cut(S, lane)


@jit
def pool_of(S: int, lane: int) -> int:
    """The pool in which a lane competes."""
    return gpu_at(S, inst_at(S, batch_at(S, lane >> 1).inst).at[0]).pool


@jit
def segment(S: int, lane: int, upto: float) -> None:
    """Log the steps of a lane that end after its anchor and by `upto` solo seconds, for token times."""
    W = world(S)
    n = lane_at(S, lane)
    if not n.dec:
        return
    j0 = 0
    while j0 < n.k and solo_at(S, lane, j0 + 1) <= n.wa:
        j0 += 1
    j1 = n.k
    while j1 > j0 and solo_at(S, lane, j1) > upto:
        j1 -= 1
    if j1 > j0:
        s = log_at(S, W.logs)
        W.logs += 1
        s.rid = -1
        s.batch = lane >> 1
        s.d0 = batch_at(S, lane >> 1).D
        s.j0 = j0
        s.j1 = j1
        s.a = n.a
        s.b = n.b
        s.ta = n.ta
        s.wa = n.wa
        s.rate = n.rate


@jit
def on_gpu(S: int, lane: int, g: int) -> bool:
    """Whether a lane runs on a GPU."""
    i = batch_at(S, lane >> 1).inst
    for j in range(inst_at(S, i).n):
        if inst_at(S, i).at[j] == g:
            return True
    return False


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
        if W.tokens:
            segment(S, lane, done)
        n.wa = done
    n.ta = now
    n.rate = rate
    if n.busy == SPAN and n.k > 1 and n.mine and n.until < INF:  # no step begins after the end of the turn
        j = steps_to(S, lane, done_at(S, lane, max(now, n.until - HALF_NS)))
        if j < n.k:
            shorten(S, lane, j)
    n.end = now + (n.work - n.wa) / rate


@jit
def share(S: int, p: int) -> None:
    """Max-min: raise all rates of a pool together; a lane stops at its cap or where a GPU is used up."""
    W = world(S)
    P = gpu_at(S, p)
    P.touched = 0
    if P.n == 1 or W.alone:
        lane = P.head
        while lane >= 0:
            set_rate(S, lane, lane_at(S, lane).cap)
            lane = lane_at(S, lane).next
        next_end(S, p)
        return
    left = P.n
    lane = P.head
    while lane >= 0:
        lane_at(S, lane).frozen = 0
        lane = lane_at(S, lane).next
    while left > 0:
        level = INF
        lane = P.head
        while lane >= 0:
            n = lane_at(S, lane)
            if not n.frozen:
                level = min(level, n.cap)
            lane = n.next
        for g in range(W.nG):
            if gpu_at(S, g).pool == p:
                gpu_at(S, g).level = saturation(S, p, g)
                level = min(level, gpu_at(S, g).level)
        lane = P.head
        while lane >= 0:
            n = lane_at(S, lane)
            if not n.frozen:
                stop = n.cap <= level
                i = batch_at(S, lane >> 1).inst
                for j in range(inst_at(S, i).n):
                    if gpu_at(S, inst_at(S, i).at[j]).level <= level:
                        stop = True
                if stop:
                    n.goal = level
                    n.frozen = 1
                    left -= 1
            lane = n.next
    lane = P.head
    while lane >= 0:
        set_rate(S, lane, lane_at(S, lane).goal)
        lane = lane_at(S, lane).next
    next_end(S, p)


@jit
def saturation(S: int, p: int, g: int) -> float:
    """The common rate of the lanes not yet frozen at which a GPU's compute or bandwidth is used up."""
    c_left, h_left, c, h = 1.0, 1.0, 0.0, 0.0
    lane = gpu_at(S, p).head
    while lane >= 0:
        n = lane_at(S, lane)
        if on_gpu(S, lane, g):
            if n.frozen:
                c_left -= n.comp * n.goal
                h_left -= n.hbm * n.goal
            else:
                c += n.comp
                h += n.hbm
        lane = n.next
    level = INF
    if c > 0.0:
        level = max(c_left / c, 0.0)
    if h > 0.0:
        level = min(level, max(h_left / h, 0.0))
    return level


# ---------------------------------------------------------------- waits by cause


@jit
def usable(S: int, i: int) -> bool:
    """Whether lanes of an instance may step."""
    return inst_at(S, i).state == IN or inst_at(S, i).state == DRAINING


@jit
def loaded(S: int, i: int) -> bool:
    """Whether an instance's weights are in: also those that leave, behind a last step that is still under way."""
    return inst_at(S, i).state >= IN


@jit
def out_s(S: int, k: int, t: float) -> float:
    """Seconds up to t, which is now, for which a model's weights were in nowhere."""
    M = model_at(S, k)
    return M.out_s + (t - M.since) if M.places == 0 else M.out_s


@jit
def clocks(S: int, b: int, t: float) -> None:
    """Bring a batch's clocks of causes up to t; exactly one cause holds for its waiting members at a time."""
    B = batch_at(S, b)
    dt = t - B.c_t
    B.c_t = t
    if not loaded(S, B.inst):
        B.c_load += dt
    else:
        if B.kvblock:
            B.c_kv += dt
        if B.stalled:
            B.c_stall += dt


@jit
def flag(S: int, b: int, kvblock: int, stalled: int) -> None:
    """Say whether a batch's prompts, or its decodes, wait for memory."""
    W = world(S)
    B = batch_at(S, b)
    if B.kvblock != kvblock or B.stalled != stalled:
        clocks(S, b, W.now)
        was = B.kvblock | B.stalled
        B.kvblock = kvblock
        B.stalled = stalled
        W.blocked += (kvblock | stalled) - was


@jit
def mark(S: int, r: int, t: float) -> None:
    """Start a new stretch of time for a request."""
    q = req_at(S, r)
    q.m_t = t
    if q.batch >= 0:
        clocks(S, q.batch, t)
        B = batch_at(S, q.batch)
        q.m_load = B.c_load
        q.m_kv = B.c_kv
        q.m_stall = B.c_stall
        q.m_solo = B.c_solo
        q.m_wall = B.c_wall
    else:
        q.m_load = out_s(S, q.model, t)


@jit
def charge(S: int, r: int, t: float) -> None:
    """Book the time since the last mark under its causes, and mark."""
    q = req_at(S, r)
    dt = t - q.m_t
    if q.state == HELD:
        load = out_s(S, q.model, t) - q.m_load
        q.load += load
        q.held += dt - load
    else:
        clocks(S, q.batch, t)
        B = batch_at(S, q.batch)
        load = B.c_load - q.m_load
        q.load += load
        rest = dt - load
        if q.state == WAIT:
            kv = B.c_kv - q.m_kv
            q.kv += kv
            rest -= kv
        elif q.state == RUN:
            solo = B.c_solo - q.m_solo
            wall = B.c_wall - q.m_wall
            stall = B.c_stall - q.m_stall
            q.solo += solo
            q.slow += wall - solo
            q.kv += stall
            rest -= wall + stall
        if q.state == MOVE or q.state == AWAY:
            q.move += rest
        else:
            q.turn += rest
    mark(S, r, t)


# ---------------------------------------------------------------- members


@jit
def target(S: int, r: int) -> int:
    """Tokens that a request's prefill has to go through: its prompt, and what a recompute repeats."""
    return req_at(S, r).prompt + req_at(S, r).made


@jit
def drop_blocks(S: int, r: int) -> None:
    """Free a request's KV, wherever it is."""
    q = req_at(S, r)
    if q.home >= 0:
        i = q.home
        inst_at(S, i).holders -= 1
        put(S, i, -q.blocks)
        freed(S, i)
    q.home = -1
    q.blocks = 0


@jit
def take_blocks(S: int, r: int, i: int, n: int) -> None:
    """Give a request its first n blocks in an account."""
    q = req_at(S, r)
    q.home = i
    q.blocks = n
    inst_at(S, i).holders += 1
    put(S, i, n)


@jit
def quit_batch(S: int, r: int) -> None:
    """A request is no longer a member: its instance may be waiting for the last one to go."""
    i = batch_at(S, req_at(S, r).batch).inst
    inst_at(S, i).members -= 1
    if inst_at(S, i).state == DRAINING and inst_at(S, i).members == 0:
        leave(S, i)


@jit
def end(S: int, r: int, state: int, t: float) -> None:
    """A request, unlinked by now, reaches its end."""
    W = world(S)
    q = req_at(S, r)
    charge(S, r, t)
    drop_blocks(S, r)
    q.done = t
    was = q.batch
    if was >= 0:
        quit_batch(S, r)
        if q.pend_batch >= 0:
            q.pend_batch = -1
            batch_at(S, was).pend -= 1
        if q.pend != P_NONE:
            turn_down(S, q.pend, q.pend_arg)
            q.pend = P_NONE
            batch_at(S, was).pend -= 1
    q.state = state
    W.left -= 1
    if q.heir >= 0:
        send(S, q.heir, t)
    tell(S, E_FINISHED, r, was, state)


@jit
def send(S: int, r: int, t: float) -> None:
    """A client that has the end of its last request sends the next, in its place among those that are on their way."""
    W = world(S)
    q = req_at(S, r)
    q.arr = t + W.trip + q.think
    prev, nxt = W.stail, -1
    while prev >= 0:  # of those that come within an instant the earlier id is first
        ahead_s = req_at(S, prev).arr - q.arr
        if ahead_s < -HALF_NS or (ahead_s <= HALF_NS and prev < r):
            break
        prev, nxt = req_at(S, prev).prev, prev
    q.prev = prev
    q.next = nxt
    if prev >= 0:
        req_at(S, prev).next = r
    else:
        W.shead = r
    if nxt >= 0:
        req_at(S, nxt).prev = r
    else:
        W.stail = r


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
def join(S: int, b: int, r: int) -> None:
    """A parked member takes part in decode steps from now on."""
    W = world(S)
    q = req_at(S, r)
    B = batch_at(S, b)
    charge(S, r, W.now)
    unlink(S, b, PARKED, r)
    B.parked_ctx -= q.l
    q.state = RUN
    q.jd = B.D
    q.tick = B.D + q.out - q.made
    B.h[(q.l - B.D) % W.bt] += 1
    B.ctx += q.l
    if q.l % W.bt == 1 and q.blocks * W.bt >= q.l:
        B.skip += 1
    push(S, b, RUNNING, r, 0)
    heap_insert(S, b, r)


@jit
def leave_run(S: int, b: int, r: int) -> None:
    """A running member stops taking part, at a boundary; its state is left to the caller."""
    W = world(S)
    q = req_at(S, r)
    B = batch_at(S, b)
    charge(S, r, W.now)
    unlink(S, b, RUNNING, r)
    heap_delete(S, b, r)
    B.h[(q.l - q.jd) % W.bt] -= 1
    steps = B.D - q.jd
    if steps == 0 and q.l % W.bt == 1 and q.blocks * W.bt >= q.l:
        B.skip -= 1
    if W.tokens and steps > 0:
        s = log_at(S, W.logs)
        W.logs += 1
        s.rid = r
        s.batch = b
        s.d0 = q.jd
        s.d1 = B.D
    q.made += steps
    q.l += steps
    B.ctx -= q.l
    q.blocks = max(q.blocks, (q.l - 1 + W.bt - 1) // W.bt)


@jit
def set_parked(S: int, b: int, r: int) -> None:
    """A member with KV here, out of any list, goes to those that no lane steps."""
    q = req_at(S, r)
    q.state = PARK
    batch_at(S, b).parked_ctx += q.l
    push(S, b, PARKED, r, 0)


@jit
def park(S: int, b: int, r: int) -> None:
    """A member with KV here, out of any list, waits for a decode lane to take it."""
    set_parked(S, b, r)
    wake(S, 2 * b + 1)
    if lane_at(S, 2 * b).kind == MIXED:
        wake(S, 2 * b)


@jit
def queue(S: int, b: int, r: int, front: int) -> None:
    """A member without KV, out of any list, waits for its prefill."""
    q = req_at(S, r)
    q.state = WAIT
    q.pre = q.cached
    q.piece = 0
    batch_at(S, b).left += target(S, r) - q.pre
    push(S, b, WAITING, r, front)
    if batch_at(S, b).ends[2 * WAITING] == r:
        dirty(S, 2 * b)
        cut_at(S, 2 * b, q.joins)


@jit
def unbound(S: int, b: int) -> None:
    """The last who waited, or was parked, goes: from the next boundary on no cap keeps anybody out."""
    for lane in (2 * b, 2 * b + 1):
        if lane_at(S, lane).bound:
            cut(S, lane)


@jit
def unlist(S: int, r: int) -> None:
    """Take a request, not in a step, out of its batch's list; its blocks stay."""
    q = req_at(S, r)
    b = q.batch
    if q.state == WAIT:
        was_head = batch_at(S, b).ends[2 * WAITING] == r
        unlink(S, b, WAITING, r)
        batch_at(S, b).left -= target(S, r) - q.pre
        if q.home == batch_at(S, b).inst:
            batch_at(S, b).parts -= 1
        elif q.home >= 0:
            batch_at(S, b).swapped -= 1  # whoever it held up may be brought back, or let in
            wake(S, 2 * b)
            wake(S, 2 * b + 1)
        if batch_at(S, b).count[WAITING] == 0:
            unbound(S, b)
        elif was_head:
            wake(S, 2 * b)
    elif q.state == RUN:
        leave_run(S, b, r)
        if batch_at(S, b).stalled:  # the others may need less than what the batch waits for
            wake(S, 2 * b)
            wake(S, 2 * b + 1)
    elif q.state == PARK:
        unlink(S, b, PARKED, r)
        batch_at(S, b).parked_ctx -= q.l
        if batch_at(S, b).count[PARKED] == 0:
            unbound(S, b)
    elif q.state == AWAY or q.state == MOVE:
        unlink(S, b, ELSEWHERE, r)


# ---------------------------------------------------------------- forming a step


@jit
def latest(S: int, b: int) -> int:
    """The latest admitted member of a batch that has KV here and is not in a step."""
    r = batch_at(S, b).ends[2 * RUNNING + 1]
    p = batch_at(S, b).ends[2 * PARKED + 1]
    if r < 0 or (p >= 0 and req_at(S, p).seq > req_at(S, r).seq):
        r = p
    left = batch_at(S, b).parts
    w = batch_at(S, b).ends[2 * WAITING]
    while left > 0:
        if req_at(S, w).home == batch_at(S, b).inst:
            left -= 1
            if req_at(S, w).piece == 0 and (r < 0 or req_at(S, w).seq > req_at(S, r).seq):
                r = w
        w = req_at(S, w).next
    return r


@jit
def preempt(S: int, b: int, r: int) -> None:
    """Take a member's pages: it recomputes from the queue, or its KV goes to host memory."""
    W = world(S)
    q = req_at(S, r)
    q.npre += 1
    W.preempts += 1
    charge(S, r, W.now)
    whole = q.state != WAIT
    unlist(S, r)
    tell(S, E_PREEMPTED, r, b, 0)
    i = q.home
    host = inst_at(S, i).host
    if W.swap and whole and fits(S, host, q.blocks, 1):
        q.state = MOVE
        push(S, b, ELSEWHERE, r, 1)
        inst_at(S, i).gone += q.blocks
        put(S, host, q.blocks)
        transfer(S, SWAP_OUT, r, i, host, q.blocks)
    else:
        drop_blocks(S, r)
        queue(S, b, r, 1)


@jit
def grow(S: int, b: int) -> int:
    """Pages for one decode step of the running members.

    0: had room, 1: some member lost its own, 2: must wait for a swap under way, 3: for one that began now.
    """
    W = world(S)
    B = batch_at(S, b)
    i = B.inst
    lost = 0
    n = 0
    while B.count[RUNNING] > 0:
        n = B.h[(1 - B.D) % W.bt] - B.skip
        if n == 0 or (B.stalled and inst_at(S, i).gone > 0):  # victims are on their way: no more until they are out
            break
        if room(S, i, n - inst_at(S, i).gone, 1):
            break
        r = latest(S, b)
        lost = 1
        if inst_at(S, i).holders == 1:
            unlist(S, r)
            end(S, r, FAILED, W.now)
        else:
            preempt(S, b, r)
        n = 0
    if n > 0:
        if inst_at(S, i).gone > 0 and not room(S, i, n, 1):
            return 2 + lost
        put(S, i, n)
    if B.swapped > 0 and inst_at(S, i).gone == 0:
        bring_back(S, b)
    return lost


@jit
def bring_back(S: int, b: int) -> None:
    """The engine's own victims come back from host memory, in their order, before any new prompt."""
    W = world(S)
    B = batch_at(S, b)
    i = B.inst
    r = B.ends[2 * WAITING]
    while r >= 0 and B.swapped > 0:
        q = req_at(S, r)
        nxt = q.next
        if q.home >= 0 and q.home != i:
            need = (q.l + W.bt - 1) // W.bt
            if not room(S, i, need + (watermark(S, i) if inst_at(S, i).blocks > 0 else 0), 0):
                return
            charge(S, r, W.now)
            unlink(S, b, WAITING, r)
            B.swapped -= 1
            q.state = MOVE
            push(S, b, ELSEWHERE, r, 1)
            put(S, i, q.blocks)
            inst_at(S, i).holders += 1
            transfer(S, SWAP_IN, r, q.home, i, q.blocks)
            wake(S, 2 * b)
        r = nxt


@jit
def take_pieces(S: int, lane: int, budget: int, whole: int, cap: int, run: int, new: int) -> int:
    """Walk the queue and put prompts, or pieces of them, into the lane's next step; returns how many.

    A prompt that came after this step was scheduled stops the queue, unless nothing else was there to be scheduled.
    Notes which caps kept out what the step would else have had; a queue that stops for memory does not get that far.
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
    kvblock = int(B.swapped > 0)  # nobody passes those swapped out
    left = 0 if kvblock else budget
    ran = n.ran
    short = 0  # of tokens
    r = B.ends[2 * WAITING]
    while r >= 0 and run + count < cap and left > 0:
        q = req_at(S, r)
        nxt = q.next
        goal = target(S, r)
        if q.joins > ran:
            if count > 0 or run > 0 or not new:
                break
            ran = ANY
        if q.home < 0:
            if not new:
                break
            need = (goal + 1 + W.bt - 1) // W.bt
            if never(S, i, need):
                unlist(S, r)
                end(S, r, FAILED, W.now)
                r = nxt
                continue
            extra = watermark(S, i) if inst_at(S, i).blocks > 0 else 0
            if not room(S, i, need + extra, 0):
                kvblock = 1
                break
            if whole and count > 0 and tokens + goal - q.pre > budget:
                short = 1
                break
            take_blocks(S, r, i, need)
            B.parts += 1
        c = goal - q.pre
        if whole:
            if count > 0 and tokens + c > budget:
                short = 1
                break
        elif c > left:
            short = 1
            c = left
        left -= c
        charge(S, r, W.now)
        q.piece = c
        q.pnext = -1
        if last < 0:
            n.pieces = r
        else:
            req_at(S, last).pnext = r
        last = r
        count += 1
        tokens += c
        r = nxt
    flag(S, b, kvblock, B.stalled)
    if r >= 0 and not kvblock and req_at(S, r).joins <= ran:
        if run + count >= cap:
            n.bound |= BY_CAP
        if left <= 0:
            short = 1
    if short:
        n.bound |= BY_CHUNK | BY_PREFILL
    return count


@jit
def power_below(C: int) -> int:
    """The largest power of two <= C."""
    x = 1
    while x * 2 <= C:
        x *= 2
    return x


@jit
def form(S: int, T: Tables, lane: int) -> None:
    """Decide what an idle lane does next, and start it."""
    W = world(S)
    n = lane_at(S, lane)
    n.dirty = 0
    if n.busy != IDLE or not n.open:
        return
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    first = 2 * b
    if not usable(S, i):
        return
    if lane == first:
        if n.kind == MIXED and lane_at(S, first + 1).busy != IDLE:
            return
    elif lane_at(S, first).busy != IDLE and lane_at(S, first).was == MIXED:
        return
    if n.resized:  # partitions of a GPU change together, at the last of their boundaries
        p = gpu_at(S, pool_of(S, lane)).head
        while p >= 0:
            if lane_at(S, p).resized and shares_gpu(S, i, batch_at(S, p >> 1).inst):
                return
            p = lane_at(S, p).next
        n.resized = 0
    dec = lane != first or n.kind == MIXED
    pre = lane == first
    cap = W.cap if n.seqs < 0 else min(n.seqs, W.cap)
    chunk = W.chunk if n.chunk < 0 else n.chunk
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
    if pre and not dec:
        pieces = take_pieces(S, lane, chunk if chunk > 0 else W.prefill, int(chunk == 0), cap, 0, 1)
    elif pre and chunk == 0:
        pieces = take_pieces(S, lane, W.prefill, 1, cap, B.count[RUNNING], 1)
        dec = pieces == 0
    elif pre:
        state = grow(S, b)
        grown = 1
        if state < 2:
            run = B.count[RUNNING]
            pieces = take_pieces(S, lane, chunk - run, 0, cap, run, int(state == 0))
    if dec and not grown:
        state = grow(S, b)
    flag(S, b, B.kvblock, int(state >= 2) if dec else B.stalled)
    if state >= 2:
        if state == 3:
            dirty(S, lane)
        return
    run = B.count[RUNNING] if dec else 0
    if pieces == 0 and run == 0:
        if state == 1:  # all lost their pages: whoever waits may try again, after the others
            dirty(S, lane)
        return
    if run == cap and B.count[PARKED] > 0:
        n.bound |= BY_CAP
    n.bound &= n.own
    n.dec = run
    n.was = n.kind if pre else PREFILL
    n.t0 = W.now
    n.ta = W.now
    n.wa = 0.0
    n.rate = 0.0
    c = inst_at(S, i).cost
    k = T.cost[c]
    share_ = 1.0
    if n.sms > 0:
        share_ = n.sms / gpu_at(S, inst_at(S, i).at[0]).sms
    W.steps += 1
    if pieces > 0:
        tokens, area, out = 0, 0.0, run
        r = n.pieces
        while r >= 0:
            q = req_at(S, r)
            tokens += q.piece
            area += q.piece * (q.pre + 0.5 * q.piece)
            if q.pre + q.piece == target(S, r):
                out += 1
            r = q.pnext
        C = float(B.ctx) if run > 0 else 0.0
        solo = step_s(T, c, run, C, tokens, pieces, area, out)
        n.comp = min(1.0, (k.fl_tok * (run + tokens) + k.fl_area * area) / (k.flops * solo))
        n.hbm = min(1.0, (k.wbytes + k.kbytes * C) / (k.hbm * solo))
        if W.sigma > 0.0:
            solo *= noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 1, B.P)
        B.P += 1
        n.busy = STEP
        n.k = 1
        n.a = solo
        n.b = 0.0
        n.work = solo
        n.cap = 1.0 if n.sms <= 0 else speed(T, c, share_, run, 1)
    else:
        span(S, T, lane, run, c, int(state == 1 or B.swapped != swapped))
        n.cap = 1.0 if n.sms <= 0 else speed(T, c, share_, run, 0)
    if run > 0:
        B.skip = 0
    if n.turn != NO_TURN:
        n.mine = 1
        if n.turn == ORDERED:
            n.turn = BEGUN
            n.began = W.now
            n.until = W.now + n.quota
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
    steps = req_at(S, B.root).tick - B.D
    base = table(T.grid, T.gemm[c], run) + table(T.grid, T.head[c], run)
    host = k.host0 + k.host1 * run
    flat = base + (k.att0 + k.att1 * run)
    slope = k.dec2 * run
    if k.serial:
        flat += host
        line = base + (k.dec0 + k.dec1 * run) + host
    else:
        flat = max(flat, host)
        line = base + (k.dec0 + k.dec1 * run)
    y = line + k.dec2 * B.ctx
    if y >= flat:
        n.a = y
        n.b = slope
    else:  # a floor holds until the context reaches its knee
        n.a = flat
        n.b = 0.0
        if slope > 0.0:
            knee = int(math.floor((flat - y) / slope)) + 1
            while knee > 1 and line + k.dec2 * (B.ctx + (knee - 1) * run) > flat:
                knee -= 1
            steps = min(steps, knee)
    if W.sigma > 0.0:
        f = noise(W.sigma, W.seed, inst_at(S, i).model, 2 * B.tag + (lane & 1), 0, B.D // NOISE_TICKS)
        n.a *= f
        n.b *= f
        steps = min(steps, NOISE_TICKS - B.D % NOISE_TICKS)
    q = power_below(B.ctx)
    solo = step_s(T, c, run, float(q), 0, 0, 0.0, run)
    n.comp = min(1.0, (k.fl_tok * run) / (k.flops * solo))
    n.hbm = min(1.0, (k.wbytes + k.kbytes * q) / (k.hbm * solo))
    steps = min(steps, (2 * q - B.ctx + run - 1) // run)
    if n.turn != NO_TURN:
        steps = min(steps, n.most - n.took)
    if W.lookahead > 0 and lane == 2 * b and B.count[WAITING] > 0:
        young = req_at(S, B.ends[2 * WAITING + 1]).joins - n.ran
        if young > 0:  # the latest prompt joins then
            steps = min(steps, young)
    steps = 1 if once else max(steps, 1)  # once: whoever lost its pages is let in again at the next boundary
    first = B.h[(1 - B.D) % W.bt]  # taken by `grow`, but for members that brought theirs
    more = needs(S, b, B.D, steps) - first
    if more > 0 and not fits(S, i, more, 1):
        lo, hi = 1, steps
        while hi - lo > 1:
            mid = (lo + hi) // 2
            if fits(S, i, needs(S, b, B.D, mid) - first, 1):
                lo = mid
            else:
                hi = mid
        steps = lo
        more = needs(S, b, B.D, steps) - first
    put(S, i, more)
    n.busy = SPAN
    n.k = steps
    n.work = solo_at(S, lane, steps)
    W.spans += 1


@jit
def activate(S: int, lane: int) -> None:
    """A lane starts to compete."""
    W = world(S)
    n = lane_at(S, lane)
    i = batch_at(S, lane >> 1).inst
    p = pool_of(S, lane)
    P = gpu_at(S, p)
    n.end = INF
    n.next = P.head
    P.head = lane
    P.n += 1
    P.touched = 1
    inst_at(S, i).busy += 1
    for j in range(inst_at(S, i).n):
        g = gpu_at(S, inst_at(S, i).at[j])
        if g.active == 0:
            g.busy_t = W.now
        g.active += 1


@jit
def retire(S: int, lane: int) -> None:
    """A lane's step is over: it competes no more."""
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
    P.n -= 1
    P.touched = 1
    next_end(S, p)
    n.busy = IDLE
    inst_at(S, i).busy -= 1
    now = W.now
    for j in range(inst_at(S, i).n):
        g = gpu_at(S, inst_at(S, i).at[j])
        g.hbm_s += n.hbm * n.work
        g.flop_s += n.comp * n.work
        g.active -= 1
        if g.active == 0:
            g.busy_s += now - g.busy_t


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
    """A step, or the last of a span, ends now."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    t = W.now
    if W.tokens:
        segment(S, lane, INF)
    wall = t - n.t0
    B.busy_s += wall
    tally(S, lane, n.k)
    n.ran += n.k
    retire(S, lane)
    if n.dec > 0:
        B.c_solo += n.work
        B.c_wall += wall
        B.D += n.k
        B.ctx += n.dec * n.k
        B.seq_steps += n.dec * n.k
        while B.root >= 0 and req_at(S, B.root).tick == B.D:
            r = B.root
            leave_run(S, b, r)
            end(S, r, DONE, t)
    r = n.pieces
    n.pieces = -1
    while r >= 0:
        q = req_at(S, r)
        nxt = q.pnext
        q.solo += n.work
        q.slow += wall - n.work
        mark(S, r, t)
        q.pre += q.piece
        B.left -= q.piece
        B.prefilled += q.piece
        q.piece = 0
        if q.pre == target(S, r):
            unlink(S, b, WAITING, r)
            B.parts -= 1
            if q.made == 0:
                q.first = t
            q.made += 1
            q.l = target(S, r)
            if W.tokens:
                s = log_at(S, W.logs)
                W.logs += 1
                s.rid = r
                s.batch = -1
                s.ta = t
            q.state = PARK
            if q.first_inst < 0:
                q.first_inst = B.inst
            q.last_inst = B.inst
            if q.made == q.out:
                end(S, r, DONE, t)
            else:
                set_parked(S, b, r)
                tell(S, E_PREFILLED, r, b, 0)
                wake(S, 2 * b + 1)
        r = nxt
    if B.pend > 0:
        pending(S, b)
    if n.mine:
        n.mine = 0
        n.took += n.k
    if B.count[RUNNING] > 0:
        rest(S, b)
    dirty(S, 2 * b)
    dirty(S, 2 * b + 1)
    if n.resized:
        for x in range(W.nN):
            if lane_at(S, x).resized:
                dirty(S, x)
    if inst_at(S, B.inst).state == LEAVING and inst_at(S, B.inst).busy == 0:
        leave(S, B.inst)


@jit
def rest(S: int, b: int) -> None:
    """No lane decodes any more: running members keep their KV and park."""
    if lane_at(S, 2 * b + 1).busy != IDLE or (lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).dec > 0):
        return
    if lane_at(S, 2 * b + 1).open or (lane_at(S, 2 * b).open and lane_at(S, 2 * b).kind == MIXED):
        return
    while batch_at(S, b).count[RUNNING] > 0:
        r = batch_at(S, b).ends[2 * RUNNING]
        leave_run(S, b, r)
        set_parked(S, b, r)


@jit
def in_step(S: int, r: int) -> bool:
    """Whether a request is part of a step in flight."""
    q = req_at(S, r)
    if q.state == WAIT:
        return q.piece > 0
    if q.state == RUN:
        b = q.batch
        return lane_at(S, 2 * b + 1).busy != IDLE or (lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).dec > 0)
    return False


@jit
def catch_up(S: int, r: int) -> None:
    """Do what waited for a request to come to rest: membership first."""
    q = req_at(S, r)
    b, what, arg = q.pend_batch, q.pend, q.pend_arg
    if b >= 0:
        q.pend_batch = -1
        batch_at(S, q.batch).pend -= 1
    if what != P_NONE:
        q.pend = P_NONE
        batch_at(S, q.batch).pend -= 1
    if b >= 0:
        admit_now(S, r, b, q.pend_seq)
    if what != P_NONE:
        act(S, r, what, arg)


@jit
def pending(S: int, b: int) -> None:
    """Do what waited for this boundary to members of a batch."""
    for lst in (WAITING, RUNNING, PARKED):
        r = batch_at(S, b).ends[2 * lst]
        while r >= 0:
            nxt = req_at(S, r).next
            if not in_step(S, r):
                catch_up(S, r)
            r = nxt


@jit
def act(S: int, r: int, what: int, arg: int) -> None:
    """Apply an action on a request that is in no step."""
    W = world(S)
    if what == P_ADMIT:
        admit_now(S, r, arg, next_seq(S))
    elif what == P_DROP:
        unlist(S, r)
        end(S, r, DROPPED, W.now)
    elif what == P_DISCARD:
        discard_now(S, r, arg)
    elif what == P_MOVE:
        move_now(S, r, arg)


@jit
def on_request(S: int, r: int, what: int, arg: int) -> None:
    """An action on a request: now, or at the boundary of the step it is in."""
    q = req_at(S, r)
    if q.state != MOVE and not in_step(S, r):
        act(S, r, what, arg)
        return
    B = batch_at(S, q.batch)
    if what == P_ADMIT:
        if q.pend_batch < 0:
            B.pend += 1
        q.pend_batch = arg
        q.pend_seq = next_seq(S)
    elif q.pend == P_NONE:
        B.pend += 1
        q.pend = what
        q.pend_arg = arg
    elif what == P_DROP:
        turn_down(S, q.pend, q.pend_arg)
        q.pend = what
    else:
        turn_down(S, what, arg)
    cut(S, 2 * q.batch)
    cut(S, 2 * q.batch + 1)


@jit
def refuse(S: int, x: int) -> None:
    """A move that cannot be."""
    act_ = xfer_at(S, x).act
    release(S, x)
    done(S, act_, 1)


@jit
def turn_down(S: int, what: int, arg: int) -> None:
    """Something asked of a request cannot be any more."""
    if what == P_MOVE:
        refuse(S, arg)
    elif what == P_DISCARD:
        done(S, arg, 1)


@jit
def next_seq(S: int) -> int:
    """The next place in the order of Admit: taken when it is said, though it may wait for a boundary."""
    W = world(S)
    W.seq += 1
    return W.seq


@jit
def admit_now(S: int, r: int, b: int, seq: int) -> None:
    """Membership: the old batch loses the request; KV stays where it is."""
    W = world(S)
    q = req_at(S, r)
    i = batch_at(S, b).inst
    charge(S, r, W.now)
    if q.state != HELD:
        unlist(S, r)
        old = q.batch
        q.batch = b
        inst_at(S, i).members += 1
        q2 = batch_at(S, old).inst
        inst_at(S, q2).members -= 1
        if inst_at(S, q2).state == DRAINING and inst_at(S, q2).members == 0:
            leave(S, q2)
    else:
        q.batch = b
        inst_at(S, i).members += 1
        q.admit = W.now
    q.seq = seq
    if W.lookahead > 0:
        n = lane_at(S, 2 * b)
        q.joins = n.ran + W.lookahead
        if n.busy != IDLE:
            q.joins += step_of(S, 2 * b)
    state = q.state
    whole = state == RUN or state == PARK or state == AWAY
    if state == MOVE:
        push(S, b, ELSEWHERE, r, 0)
    elif whole and q.home == i:
        park(S, b, r)
    elif whole:
        q.state = AWAY
        push(S, b, ELSEWHERE, r, 0)
    elif q.home >= 0 and (q.home == i or inst_at(S, q.home).is_host):
        batch_at(S, b).left += target(S, r) - q.pre  # partly built, or swapped out: it stays so
        push(S, b, WAITING, r, 0)
        if q.home == i:
            batch_at(S, b).parts += 1
        else:
            batch_at(S, b).swapped += 1
        wake(S, 2 * b)
        wake(S, 2 * b + 1)
    else:
        drop_blocks(S, r)  # a partly built KV does not travel
        queue(S, b, r, 0)
    mark(S, r, W.now)


@jit
def swapped_out(S: int, r: int) -> None:
    """A victim's KV is in host memory: it waits, in its old place, to be brought back."""
    q = req_at(S, r)
    b = q.batch
    unlink(S, b, ELSEWHERE, r)
    batch_at(S, b).swapped += 1
    q.state = WAIT
    q.pre = target(S, r)
    q.piece = 0
    push(S, b, WAITING, r, 1)
    wake(S, 2 * b)
    wake(S, 2 * b + 1)
    catch_up(S, r)


@jit
def discard_now(S: int, r: int, act_: int) -> None:
    """Forget a member's KV; it recomputes from its old place in the queue."""
    W = world(S)
    q = req_at(S, r)
    done(S, act_, int(q.home < 0))
    if q.home < 0:
        return
    charge(S, r, W.now)
    unlist(S, r)
    drop_blocks(S, r)
    queue(S, q.batch, r, 1)
    mark(S, r, W.now)


# ---------------------------------------------------------------- weights, moves, links


@jit
def set_weights(S: int, i: int, state: int) -> None:
    """An instance's weights change state: the clocks of its batches and model turn, its lanes look again."""
    W = world(S)
    for b in range(W.nB):
        if batch_at(S, b).inst == i:
            clocks(S, b, W.now)
    M = model_at(S, inst_at(S, i).model)
    M.out_s = out_s(S, inst_at(S, i).model, W.now)
    M.since = W.now
    M.places -= int(loaded(S, i))
    inst_at(S, i).state = state
    M.places += int(loaded(S, i))
    for b in range(W.nB):
        if batch_at(S, b).inst == i:
            if state == LEAVING:
                cut(S, 2 * b)
                cut(S, 2 * b + 1)
            elif usable(S, i):
                wake(S, 2 * b)
                wake(S, 2 * b + 1)


@jit
def place(S: int, i: int) -> bool:
    """Before the start weights are there at no cost, if there is room."""
    W = world(S)
    I = inst_at(S, i)
    for j in range(I.n):
        if gpu_at(S, I.at[j]).used + I.foot > gpu_at(S, I.at[j]).cap and not W.unlimited:
            return False
    for j in range(I.n):
        gpu_at(S, I.at[j]).used += I.foot
    keep(S, i, I.reserve)
    set_weights(S, i, IN)
    return True


@jit
def leave(S: int, i: int) -> None:
    """Weights go; KV stays."""
    W = world(S)
    set_weights(S, i, OUT)
    I = inst_at(S, i)
    for j in range(I.n):
        gpu_at(S, I.at[j]).used -= I.foot
    keep(S, i, 0)
    W.evicts += 1
    done(S, I.evict, 0)
    freed(S, i)


@jit
def elsewhere(S: int, i: int, first: int, last: int) -> bool:
    """Whether the model's weights are on other GPUs, in one of a range of states."""
    j = inst_at(S, i).kin
    while j != i:
        if first <= inst_at(S, j).state <= last:
            return True
        j = inst_at(S, j).kin
    return False


@jit
def just_left(S: int, i: int) -> bool:
    """Whether the model left another place at this very instant."""
    j = inst_at(S, i).kin
    while j != i:
        if inst_at(S, j).left_s == world(S).now:
            return True
        j = inst_at(S, j).kin
    return False


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
        for lane in range(W.nN):  # a span may be at a boundary just now
            n = lane_at(S, lane)
            if n.busy == SPAN and batch_at(S, lane >> 1).inst == i and n.end <= W.now + HALF_NS:
                end_step(S, lane)
    if I.state != OUT and I.busy == 0 and (not drain or I.members == 0):
        leave(S, i)


@jit
def new_transfer(S: int, kind: int, inst: int, act_: int, fixed: float, nbytes: float) -> int:
    """A transfer without parts yet, last in the order of issue."""
    W = world(S)
    x = W.xfree
    X = xfer_at(S, x)
    W.xfree = X.next
    W.xn -= 1
    X.next = -1
    X.kind = kind
    X.stage = LINK
    X.inst = inst
    X.act = act_
    X.fixed = fixed
    X.bytes = nbytes
    X.due = INF
    X.parts = 0
    X.first = -1
    X.rid = -1
    X.src = -1
    X.blocks = 0
    if W.xtail >= 0:
        xfer_at(S, W.xtail).next = x
    else:
        W.xhead = x
    W.xtail = x
    return x


@jit
def add_part(S: int, x: int, link: int, nbytes: float) -> None:
    """Part of a transfer on one link."""
    W = world(S)
    p = W.xfree
    Q = xfer_at(S, p)
    W.xfree = Q.next
    W.xn -= 1
    Q.bytes = nbytes
    Q.link = link
    Q.xfer = x
    Q.next = xfer_at(S, x).first
    xfer_at(S, x).first = p
    xfer_at(S, x).parts += 1


@jit
def awaited(S: int, i: int) -> bool:
    """Whether an open lane with members waits for an instance's weights."""
    for b in range(world(S).nB):
        B = batch_at(S, b)
        if B.inst == i and (lane_at(S, 2 * b).open or lane_at(S, 2 * b + 1).open):
            for lst in range(4):
                if B.count[lst] > 0:
                    return True
    return False


@jit
def foremost(S: int, link: int) -> int:
    """The part that a link moves next: KV, then weights that are awaited, then prefetches; each in order of issue."""
    K = link_at(S, link)
    if K.head >= 0:
        return K.head
    if K.weights > 1:
        p = K.whead
        while p >= 0:
            if awaited(S, xfer_at(S, xfer_at(S, p).xfer).inst):
                return p
            p = xfer_at(S, p).next
    return K.whead


@jit
def move_on(S: int, link: int) -> None:
    """A link begins with its foremost part, at a boundary of its pieces."""
    W = world(S)
    K = link_at(S, link)
    K.cur = foremost(S, link)
    if K.cur >= 0:
        K.began = W.now
        K.stop = xfer_at(S, K.cur).bytes
        K.end = W.now + K.stop / K.bw
    else:
        K.end = INF
        W.links -= 1


@jit
def interrupt(S: int, link: int) -> None:
    """A link stops after the piece that is on the wire: something goes before what it moves."""
    W = world(S)
    K = link_at(S, link)
    if K.end > W.now:
        n = int(math.floor((W.now - K.began + HALF_NS) * K.bw / W.piece)) + 1
        if n * W.piece < K.stop:
            K.stop = n * W.piece
            K.end = K.began + K.stop / K.bw


@jit
def enlist(S: int, link: int, p: int, weights: int) -> None:
    """Put a part behind those of its kind on a link."""
    W = world(S)
    K = link_at(S, link)
    xfer_at(S, p).next = -1
    if weights:
        K.weights += 1
        if K.weights == 2:
            W.rivals += 1
        if K.whead < 0:
            K.whead = p
        else:
            xfer_at(S, K.wtail).next = p
        K.wtail = p
    else:
        if K.head < 0:
            K.head = p
        else:
            xfer_at(S, K.tail).next = p
        K.tail = p
    if K.cur < 0:
        W.links += 1
        move_on(S, link)
    elif K.cur != K.head and not weights:
        interrupt(S, link)


@jit
def rank_links(S: int) -> None:
    """Weights that came to be awaited go before prefetches."""
    for k in range(world(S).nK):
        K = link_at(S, k)
        if K.weights > 1 and K.head < 0 and foremost(S, k) != K.cur:
            interrupt(S, k)


@jit
def launch(S: int, x: int) -> None:
    """Put a transfer's parts on their links."""
    W = world(S)
    X = xfer_at(S, x)
    X.stage = LINK
    p = X.first
    X.first = -1
    while p >= 0:
        nxt = xfer_at(S, p).next
        enlist(S, xfer_at(S, p).link, p, X.kind == LOAD)
        p = nxt
    if X.parts == 0:
        X.stage = TAIL
        X.due = W.now + X.fixed


@jit
def transfer(S: int, kind: int, r: int, src: int, dst: int, blocks: int) -> int:
    """Send a request's KV, memory granted at both ends, over the links between two accounts."""
    x = new_transfer(S, kind, dst, -1, 0.0, 0.0)
    X = xfer_at(S, x)
    X.rid = r
    X.src = src
    X.blocks = blocks
    route_kv(S, x, src, dst, blocks)
    launch(S, x)
    return x


@jit
def route_kv(S: int, x: int, src: int, dst: int, blocks: int) -> None:
    """The links that KV takes: PCIe to and from a host, peer links between GPUs where there are any."""
    I, J = inst_at(S, src), inst_at(S, dst)
    for j in range(J.n if I.is_host else I.n):
        if I.is_host:
            add_part(S, x, 4 * inst_at(S, dst).at[j], float(blocks * J.bbytes))
            continue
        g = inst_at(S, src).at[j]
        size = float(blocks * I.bbytes)
        if J.is_host:
            add_part(S, x, 4 * g + 1, size)
            continue
        h = inst_at(S, dst).at[j % J.n]
        link = 4 * g + (2 if gpu_at(S, g).node == gpu_at(S, h).node else 3)
        if link_at(S, link).bw > 0.0:
            add_part(S, x, link, size)
        else:
            add_part(S, x, 4 * g + 1, size)
            add_part(S, x, 4 * h, size)


@jit
def route_weights(S: int, x: int, i: int, source: int) -> None:
    """The links that weights take: the GPUs' own, all of the node in equal parts, or the node's disk as well."""
    W = world(S)
    I = inst_at(S, i)
    size = float(I.weights)
    node = gpu_at(S, I.at[0]).node
    if source != SPREAD:
        for j in range(I.n):
            add_part(S, x, 4 * I.at[j], size)
        if source == DISK:
            add_part(S, x, 4 * (W.gpus + node), size * I.n)
        return
    peers = 0
    for g in range(W.gpus):
        peers += int(gpu_at(S, g).node == node)
    for g in range(W.gpus):
        if gpu_at(S, g).node == node:
            add_part(S, x, 4 * g, size * I.n / peers)
    if link_at(S, 4 * I.at[0] + 2).bw > 0.0 and peers > I.n:  # each target gathers what the others fetched
        for j in range(I.n):
            add_part(S, x, 4 * I.at[j] + 2, size * (1 - I.n / peers))


@jit
def load(S: int, i: int, act_: int, source: int, tail_s: float) -> None:
    """Queue a load for memory: weights that go over the links of a source, then take `tail_s` more."""
    W = world(S)
    W.migrations += int(elsewhere(S, i, DRAINING, LEAVING) or just_left(S, i))
    x = new_transfer(S, LOAD, i, act_, tail_s, float(inst_at(S, i).foot))
    route_weights(S, x, i, source)
    X = xfer_at(S, x)
    set_weights(S, i, QUEUED)
    X.stage = GRANT
    for j in range(inst_at(S, i).n):
        gpu_at(S, inst_at(S, i).at[j]).waiting += int(X.bytes)
    W.grants = 1


@jit
def move(S: int, r: int, to: int, act_: int) -> None:
    """Move a request's KV to an account, or forget it (-1): now, or at the boundary of the step that it is in."""
    if to < 0:
        on_request(S, r, P_DISCARD, act_)
    else:
        on_request(S, r, P_MOVE, new_transfer(S, SHIFT, to, act_, 0.0, 0.0))


@jit
def movable(S: int, r: int, discard: int) -> bool:
    """Whether a member has KV that can move; what is partly built can only be forgotten."""
    return req_at(S, r).home >= 0 and (discard != 0 or req_at(S, r).state != WAIT)


@jit
def movables(S: int, b: int, discard: int) -> int:
    """How many members of a batch have such KV."""
    n = 0
    for lst in range(4):
        r = batch_at(S, b).ends[2 * lst]
        while r >= 0:
            n += int(movable(S, r, discard))
            r = req_at(S, r).next
    return n


@jit
def members(S: int, b: int) -> int:
    """Begin to walk the members of a batch in order of Admit: the first, or -1."""
    for lst in range(4):
        world(S).walk[lst] = batch_at(S, b).ends[2 * lst]
    return next_member(S)


@jit
def next_member(S: int) -> int:
    """The next member, or -1. Whoever was visited may change lists meanwhile: those are in order of Admit."""
    W = world(S)
    at, r = -1, -1
    for lst in range(4):
        x = W.walk[lst]
        if x >= 0 and (r < 0 or req_at(S, x).seq < req_at(S, r).seq):
            at, r = lst, x
    if r >= 0:
        W.walk[at] = req_at(S, r).next
    return r


@jit
def move_batch(S: int, b: int, to: int, act_: int) -> None:
    """Move, or forget, the KV of all members of a batch."""
    r = members(S, b)
    while r >= 0:
        if movable(S, r, int(to < 0)):
            move(S, r, to, act_)
        r = next_member(S)


@jit
def move_now(S: int, r: int, x: int) -> None:
    """Queue a request's KV for memory at its new home."""
    W = world(S)
    q = req_at(S, r)
    X = xfer_at(S, x)
    dst = X.inst
    if q.home == dst and q.state != WAIT:
        act_ = X.act
        release(S, x)
        done(S, act_, 0)
        return
    b = q.batch
    blocks = q.blocks
    if q.state == RUN:  # those taken since it joined are its own from when it leaves
        blocks = max(blocks, (q.l + batch_at(S, b).D - q.jd - 1 + W.bt - 1) // W.bt)
    if q.home < 0 or q.state == WAIT or never(S, dst, blocks):
        refuse(S, x)
        return
    charge(S, r, W.now)
    unlist(S, r)
    q.state = MOVE
    push(S, b, ELSEWHERE, r, 0)
    X.rid = r
    X.src = q.home
    X.blocks = q.blocks
    X.bytes = float(q.blocks * inst_at(S, dst).bbytes)
    route_kv(S, x, q.home, dst, q.blocks)
    X.stage = GRANT
    for j in range(inst_at(S, dst).n):
        gpu_at(S, inst_at(S, dst).at[j]).waiting += int(X.bytes)
    W.grants = 1
    mark(S, r, W.now)


@jit
def granted(S: int, x: int) -> bool:
    """Whether the memory that a transfer asks for is free, less nobody's wishes but earlier ones'."""
    W = world(S)
    X = xfer_at(S, x)
    i = X.inst
    if W.unlimited:
        return True
    if X.kind == SHIFT:
        h = held_bytes(S, i, inst_at(S, i).blocks + X.blocks)
        if inst_at(S, i).limit >= 0 and h > inst_at(S, i).limit:
            return False
    for j in range(inst_at(S, i).n):
        g = gpu_at(S, inst_at(S, i).at[j])
        if g.barred or g.used + asked_bytes(S, x) > g.cap:
            return False
    return True


@jit
def serve_grants(S: int) -> None:
    """Give free memory to waiting loads and moves, in order on each GPU."""
    W = world(S)
    W.grants = 0
    for g in range(W.nG):
        gpu_at(S, g).barred = 0
    x = W.xhead
    while x >= 0:
        X = xfer_at(S, x)
        if X.stage == GRANT:
            i = X.inst
            if not granted(S, x):
                give_back(S, i)
            if granted(S, x):
                for j in range(inst_at(S, i).n):
                    g = gpu_at(S, inst_at(S, i).at[j])
                    g.waiting -= int(X.bytes)
                    if X.kind == LOAD:
                        g.used += int(X.bytes)
                if X.kind == LOAD:
                    keep(S, i, inst_at(S, i).reserve)
                    set_weights(S, i, LOADING)
                else:
                    put(S, i, X.blocks)
                    inst_at(S, i).holders += 1
                launch(S, x)
            else:
                for j in range(inst_at(S, i).n):
                    gpu_at(S, inst_at(S, i).at[j]).barred = 1
        x = X.next


@jit
def withdraw(S: int, x: int) -> bool:
    """Take back a transfer that still waits for memory; whether its action is over, which is not told."""
    X = xfer_at(S, x)
    i = X.inst
    last = over(S, X.act, 1)
    for j in range(inst_at(S, i).n):
        gpu_at(S, inst_at(S, i).at[j]).waiting -= int(X.bytes)
    r = X.rid
    if X.kind == LOAD:
        set_weights(S, i, OUT)
    release(S, x)
    if r >= 0:
        back_from_move(S, r)
    freed(S, i)  # what it had waited for is open to others
    return last


@jit
def back_from_move(S: int, r: int) -> None:
    """A request's KV is at rest again, at its home; what was asked of it meanwhile happens now."""
    W = world(S)
    q = req_at(S, r)
    b = q.batch
    charge(S, r, W.now)
    unlink(S, b, ELSEWHERE, r)
    if batch_at(S, b).inst == q.home:
        park(S, b, r)
    else:
        q.state = AWAY
        push(S, b, ELSEWHERE, r, 0)
    mark(S, r, W.now)
    catch_up(S, r)


@jit
def release(S: int, x: int) -> None:
    """A transfer is over: its row is free again."""
    W = world(S)
    prev = -1
    y = W.xhead
    while y != x:
        prev = y
        y = xfer_at(S, y).next
    nxt = xfer_at(S, x).next
    if prev >= 0:
        xfer_at(S, prev).next = nxt
    else:
        W.xhead = nxt
    if W.xtail == x:
        W.xtail = prev
    p = xfer_at(S, x).first
    while p >= 0:
        q = xfer_at(S, p).next
        xfer_at(S, p).next = W.xfree
        W.xfree = p
        W.xn += 1
        p = q
    xfer_at(S, x).stage = FREE
    xfer_at(S, x).next = W.xfree
    W.xfree = x
    W.xn += 1


@jit
def end_part(S: int, link: int) -> None:
    """A link has moved a part, or as many pieces of it as it was let; it goes on with what is foremost."""
    W = world(S)
    K = link_at(S, link)
    p = K.cur
    Q = xfer_at(S, p)
    K.busy_s += K.stop / K.bw
    Q.bytes -= K.stop
    if Q.bytes > 0.0:
        move_on(S, link)
        return
    if p == K.head:
        K.head = Q.next
    else:
        prev = -1
        x = K.whead
        while x != p:
            prev = x
            x = xfer_at(S, x).next
        if prev < 0:
            K.whead = Q.next
        else:
            xfer_at(S, prev).next = Q.next
        if K.wtail == p:
            K.wtail = prev
        K.weights -= 1
        if K.weights == 1:
            W.rivals -= 1
    move_on(S, link)
    X = xfer_at(S, Q.xfer)
    X.parts -= 1
    if X.parts == 0:
        X.stage = TAIL
        X.due = W.now + X.fixed
    Q.next = W.xfree
    W.xfree = p
    W.xn += 1


@jit
def arrive(S: int, x: int) -> None:
    """A transfer is whole: weights can be used, KV has a new home."""
    W = world(S)
    X = xfer_at(S, x)
    kind, i, r, src, blocks, act_ = X.kind, X.inst, X.rid, X.src, X.blocks, X.act
    release(S, x)
    if kind == LOAD:
        W.loads += 1
        set_weights(S, i, IN)
        done(S, act_, 0)
        return
    if r >= 0:
        q = req_at(S, r)
        charge(S, r, W.now)
        inst_at(S, src).holders -= 1
        put(S, src, -q.blocks)
        q.blocks = blocks
        q.home = i
        if kind == SWAP_OUT:
            inst_at(S, src).gone -= blocks
            inst_at(S, i).holders += 1
            swapped_out(S, r)
            mark(S, r, W.now)
        else:
            back_from_move(S, r)
        freed(S, src)
        W.moves += 1
    done(S, act_, 0)


# ---------------------------------------------------------------- turns


@jit
def open_turn(S: int, lane: int, for_s: float, steps: int) -> None:
    """Give a lane a turn, which begins with its first step; turns are kept in the order of lanes."""
    W = world(S)
    n = lane_at(S, lane)
    n.turn = ORDERED
    n.quota = for_s
    n.most = steps if steps > 0 else 1 << 62
    n.took = 0
    n.until = INF
    if W.thead < 0 or lane < W.thead:
        n.tnext = W.thead
        W.thead = lane
    else:
        x = W.thead
        while lane_at(S, x).tnext >= 0 and lane_at(S, x).tnext < lane:
            x = lane_at(S, x).tnext
        n.tnext = lane_at(S, x).tnext
        lane_at(S, x).tnext = lane


@jit
def forget_turn(S: int, lane: int) -> None:
    """A lane has no turn any more; nobody is told. A step in flight is nobody's."""
    W = world(S)
    n = lane_at(S, lane)
    n.mine = 0
    if n.turn == NO_TURN:
        return
    n.turn = NO_TURN
    if W.thead == lane:
        W.thead = n.tnext
    else:
        x = W.thead
        while lane_at(S, x).tnext != lane:
            x = lane_at(S, x).tnext
        lane_at(S, x).tnext = n.tnext


@jit
def shut(S: int, lane: int) -> None:
    """Close a lane; whom it kept waiting for memory waits for a turn now."""
    b = lane >> 1
    lane_at(S, lane).open = 0
    if lane == 2 * b:
        flag(S, b, 0, batch_at(S, b).stalled)


@jit
def end_turn(S: int, lane: int, why: int) -> None:
    """A turn is over: its lane closes, and its end is told."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    ran = W.now - n.began if n.turn == BEGUN else 0.0
    forget_turn(S, lane)
    shut(S, lane)
    if batch_at(S, b).count[RUNNING] > 0:
        rest(S, b)
    if (W.hear >> E_TURN) & 1:
        event_at(S, W.ev_n).ran = ran
        tell(S, E_TURN, n.took, b, 4 * (2 if lane & 1 else n.kind) + why)


@jit
def deserted(S: int, lane: int) -> bool:
    """Whether no member of its batch could ever step in a lane."""
    b = lane >> 1
    B = batch_at(S, b)
    prompts = B.count[WAITING] - B.swapped
    decodes = B.count[RUNNING] + B.count[PARKED] + B.count[ELSEWHERE] + B.swapped
    if lane != 2 * b:
        return decodes == 0
    return prompts == 0 and (lane_at(S, lane).kind == PREFILL or decodes == 0)


@jit
def stuck(S: int, lane: int) -> bool:
    """Whether nothing is under way that could let an idle lane with members step."""
    W = world(S)
    n = lane_at(S, lane)
    b = lane >> 1
    B = batch_at(S, b)
    i = B.inst
    if not usable(S, i):
        return inst_at(S, i).state != QUEUED and inst_at(S, i).state != LOADING
    if n.resized:
        return False
    if lane != 2 * b or n.kind == MIXED:
        r = B.ends[2 * ELSEWHERE]
        while r >= 0:
            if req_at(S, r).state == MOVE:
                return False
            r = req_at(S, r).next
        here = B.count[RUNNING] + B.count[PARKED] + (B.swapped if lane != 2 * b else B.count[WAITING])
        if here == 0:
            return True
    for j in range(inst_at(S, i).n):
        if gpu_at(S, inst_at(S, i).at[j]).active > 0:
            return False
    x = W.xhead
    while x >= 0:
        X = xfer_at(S, x)
        begun = X.stage != LINK or X.parts > 0  # a move may still wait for its request's step
        if begun and (shares_gpu(S, i, X.inst) or (X.src >= 0 and shares_gpu(S, i, X.src))):
            return False
        x = X.next
    return True


@jit
def settle_turns(S: int) -> bool:
    """At the end of an instant: end the turns of idle lanes that are deserted or stuck. False: a log is full."""
    lane = world(S).thead
    while lane >= 0:
        n = lane_at(S, lane)
        nxt = n.tnext
        if n.busy == IDLE:
            if not spare(S, 0):
                return False
            if deserted(S, lane):
                end_turn(S, lane, EMPTY)
            elif stuck(S, lane):
                end_turn(S, lane, STUCK)
        lane = nxt
    return True


# ---------------------------------------------------------------- orders


@jit
def own_caps(S: int, seqs: int, chunk: int) -> int:
    """The caps on a step that an order leaves to the engine; those that it names are the policy's choice."""
    W = world(S)
    caps = BY_CAP if seqs < 0 or seqs > W.cap else 0
    if chunk == 0 or (chunk < 0 and W.chunk == 0):
        caps |= BY_PREFILL
    elif chunk < 0:
        caps |= BY_CHUNK
    return caps


@jit
def run_lane(S: int, b: int, phase: int, close: int, for_s: float, steps: int, seqs: int, chunk: int, sms: int) -> None:
    """A standing order: phase 0 mixed, 1 prefill, 2 decode; -1 where a field is not named, INF for no `for_s`."""
    lane = 2 * b + (phase == 2)
    n = lane_at(S, lane)
    other = lane_at(S, 2 * b + (phase != 2))
    if close:
        if phase == 2 or n.kind == (PREFILL if phase == 1 else MIXED):
            if n.mine:  # a step of its turn is in flight, and the last
                n.most = 0
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
        n.own = own_caps(S, seqs, chunk)
        if for_s < INF or steps > 0:
            open_turn(S, lane, for_s, steps)
    cut(S, lane)
    if batch_at(S, b).count[RUNNING] > 0:
        rest(S, b)
    dirty(S, lane)


@jit
def limit(S: int, i: int, nbytes: int) -> None:
    """Cap the growth of an account; nothing is taken back."""
    W = world(S)
    was = inst_at(S, i).limit
    inst_at(S, i).limit = nbytes
    if was >= 0 and (nbytes < 0 or nbytes > was):
        freed(S, i)
    for lane in range(W.nN):  # steps not begun lose what they held; prompts that fit no more fail
        if batch_at(S, lane >> 1).inst == i:
            wake(S, lane)


# ---------------------------------------------------------------- the loop


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
def spare(S: int, waiting: int) -> bool:
    """Whether the logs have room for whatever one lane's step can produce."""
    W = world(S)
    most = 4 * W.cap + 64 + waiting
    if W.nE - W.ev_n < most or W.xn < 9 * (W.cap + 8):
        return False
    return W.tokens == 0 or W.nL - W.logs > most + W.nN


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


@jit
def stepped(S: int, lane: int) -> int:
    """Whole steps of a span that are done by now."""
    W = world(S)
    n = lane_at(S, lane)
    if n.busy != SPAN or n.rate <= 0.0:
        return 0
    done = done_at(S, lane, W.now)
    j = steps_to(S, lane, done)
    return j if solo_at(S, lane, j) <= done else j - 1


@jit
def decode_lane(S: int, b: int) -> int:
    """The lane in which a batch's running members step, or -1."""
    if lane_at(S, 2 * b).busy != IDLE and lane_at(S, 2 * b).dec > 0:
        return 2 * b
    if lane_at(S, 2 * b + 1).busy != IDLE:
        return 2 * b + 1
    return -1


@jit
def ahead(S: int, b: int) -> int:
    """Blocks that a batch's span holds for steps not begun."""
    lane = decode_lane(S, b)
    if lane < 0 or lane_at(S, lane).busy != SPAN:
        return 0
    D, k = batch_at(S, b).D, lane_at(S, lane).k
    return needs(S, b, D, k) - needs(S, b, D, min(k, stepped(S, lane) + 1))


@jit
def peek_batch(S: int, b: int) -> tuple[int, int, int, int, int, int, int, int, float]:
    """A batch at the last boundary: the nine numbers of `BatchState`."""
    W = world(S)
    B = batch_at(S, b)
    lane = decode_lane(S, b)
    j = 0
    busy = B.busy_s
    for x in (2 * b, 2 * b + 1):
        if lane_at(S, x).busy != IDLE:
            busy += W.now - lane_at(S, x).t0
    if lane >= 0:
        j = stepped(S, lane)
    run = B.count[RUNNING]
    return (
        int(B.count[WAITING] - B.parts - B.swapped),
        int(run + B.count[PARKED]),
        int(B.count[ELSEWHERE] + B.swapped),
        int(B.left),
        int(B.ctx + j * run + B.parked_ctx),
        int(B.steps + j),
        int(B.seq_steps + j * run),
        int(B.prefilled),
        float(busy),
    )


@jit
def peek_free(S: int, g: int) -> int:
    """Free bytes of a GPU: what spans hold ahead counts as free, what grants wait for does not."""
    W = world(S)
    G = gpu_at(S, g)
    free = G.cap - G.used - promised(S, g)
    for b in range(W.nB):
        n = ahead(S, b)
        if n > 0:
            i = batch_at(S, b).inst
            for j in range(inst_at(S, i).n):
                if inst_at(S, i).at[j] == g:
                    free += inst_at(S, i).held - held_bytes(S, i, inst_at(S, i).blocks - n)
    return free


@jit
def peek_used(S: int, i: int) -> int:
    """Bytes that an account holds for the steps begun so far."""
    W = world(S)
    n = inst_at(S, i).blocks
    for b in range(W.nB):
        if batch_at(S, b).inst == i:
            n -= ahead(S, b)
    return kv_bytes(S, i, n)


@jit
def peek_request(S: int, r: int) -> tuple[int, int, int, int]:
    """A request at the last boundary: tokens made, KV bytes, batch, home."""
    W = world(S)
    q = req_at(S, r)
    made, blocks = q.made, q.blocks
    if q.state == RUN:
        d = batch_at(S, q.batch).D - q.jd
        lane = decode_lane(S, q.batch)
        if lane >= 0:
            d += stepped(S, lane)
        made += d
        blocks = max(blocks, (q.l + d - 1 + W.bt - 1) // W.bt)
    size = blocks * inst_at(S, q.home).bbytes if q.home >= 0 else 0
    return int(made), int(size), int(q.batch), int(q.home)


@jit
def merge_pools(S: int, i: int) -> None:
    """An instance ties its GPUs together: their lanes compete as one pool from now on."""
    W = world(S)
    I = inst_at(S, i)
    to = gpu_at(S, I.at[0]).pool
    for j in range(1, I.n):
        old = gpu_at(S, I.at[j]).pool
        if old == to:
            continue
        for g in range(W.nG):
            if gpu_at(S, g).pool == old:
                gpu_at(S, g).pool = to
        lane = gpu_at(S, old).head
        while lane >= 0:
            nxt = lane_at(S, lane).next
            lane_at(S, lane).next = gpu_at(S, to).head
            gpu_at(S, to).head = lane
            gpu_at(S, to).n += 1
            lane = nxt
        gpu_at(S, old).head = -1
        gpu_at(S, old).n = 0
        gpu_at(S, old).end = INF
        gpu_at(S, to).touched = 1
        next_end(S, to)


@jit
def settle(S: int, t: float) -> None:
    """At the end of a run: book all time up to t, also of steps in flight."""
    W = world(S)
    for p in range(W.nG):
        lane = gpu_at(S, p).head
        while lane >= 0:
            n = lane_at(S, lane)
            B = batch_at(S, lane >> 1)
            done = done_at(S, lane, t) if n.rate > 0.0 else 0.0
            wall = t - n.t0
            if n.dec > 0:
                B.c_solo += done
                B.c_wall += wall
                if n.busy == SPAN:
                    if W.tokens:
                        segment(S, lane, done)
                    j = stepped(S, lane)
                    B.D += j
                    tally(S, lane, j)
            r = n.pieces
            while r >= 0:
                req_at(S, r).solo += done
                req_at(S, r).slow += wall - done
                mark(S, r, t)
                r = req_at(S, r).pnext
            lane = n.next
    for g in range(W.nG):
        G = gpu_at(S, g)
        G.kv_s += G.kv * (t - G.kv_t)
        G.kv_t = t
        if G.active > 0:
            G.busy_s += t - G.busy_t
            G.busy_t = t
    for r in range(W.n):
        q = req_at(S, r)
        if FUTURE < q.state < DONE:
            if q.state == RUN:
                d = batch_at(S, q.batch).D
                if W.tokens and d > q.jd:
                    y = log_at(S, W.logs)
                    W.logs += 1
                    y.rid, y.batch, y.d0, y.d1 = r, q.batch, q.jd, d
                q.made += d - q.jd
            charge(S, r, t)
