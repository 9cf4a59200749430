"""Decode steps with remote KV (on other GPUs): their seconds, their remote KV blocks, and their GPU kernels.

The remote attention of one step can begin on a GPU when a GPU kernel of another step ends there.
"""

from __future__ import annotations

import math

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.cost import attend_s, power_below, table
from harness.engines.sim.kernel.lanes import occupy
from harness.engines.sim.kernel.memory import fits, needs, put
from harness.engines.sim.kernel.walks import accounts, remotes
from harness.engines.sim.state import *


@jit
def there_s(S: int, f: int, c: int, each: float) -> float:
    """Return the seconds of a decode step's attention to the KV in one remote account.

    `f` is the batch's entry for that account. Each member with KV there attends to `each` tokens, or to its own context
    if `each` is -1.
    """
    F = remote_at(S, f)
    return attend_s(S, c, F.count, F.count * each if each >= 0.0 else float(F.context))


@jit
def far_s(S: int, b: int, c: int, each: float) -> float:
    """Return the seconds until all results of a decode step's remote attention have arrived, without competition.

    Each member attends to `each` tokens, or to its own context if `each` is -1.
    """
    longest = 0.0
    for f in remotes(S, b):
        if remote_at(S, f).count > 0:
            longest = max(longest, there_s(S, f, c, each) + remote_at(S, f).link_s * remote_at(S, f).count)
    return longest


@jit
def ask_elsewhere(S: int, lane: int) -> None:
    """Add a lane's demands on the remote GPUs that store KV of its decode step; each demand has a slack.

    The slack is the number of seconds per layer by which attention on that GPU can be late without delaying the step.
    """
    n = lane_at(S, lane)
    if n.busy == IDLE or n.decodes == 0 or n.lent >= 0:
        return
    b = lane >> 1
    B = batch_at(S, b)
    c = inst_at(S, B.inst).cost
    k = cost_at(S)[c]
    each = power_below(B.context) / n.decodes if n.busy == SPAN else -1.0
    seqs = n.decodes - B.far
    near = attend_s(S, c, seqs, each * seqs if each >= 0.0 else float(remote_at(S, B.near).context))
    decode = max(near, far_s(S, b, c, each))
    n.layers = k.layers
    for f in remotes(S, b):
        F = remote_at(S, f)
        if F.count > 0:
            there = there_s(S, f, c, each)
            context = F.count * each if each >= 0.0 else float(F.context)
            for j in range(inst_at(S, F.inst).gpu_count):
                D = demand_at(S, F.demand + j)
                D.time = there / n.slice_s
                D.hbm = min(1.0, k.kbytes * context / (k.hbm * n.slice_s))
                D.slack_s = (decode - there - F.link_s * F.count) / k.layers
                D.next = n.lent
                n.lent = F.demand + j
                occupy(S, D.gpu)


@jit
def overtakes(y: float, slope: float, z: float, rise: float) -> int:
    """Return the number of steps until time Z exceeds time Y, or ANY if Z never does.

    Z starts at `z` and grows by `rise` per step. Y starts at `y`, which is at least `z`, and grows by `slope` per step.
    """
    if rise <= slope:
        return ANY
    j = int(math.floor((y - z) / (rise - slope))) + 1
    while j > 1 and z + rise * (j - 1) > y + slope * (j - 1):
        j -= 1
    return j


@jit
def span_far(S: int, lane: int, c: int, base: float, host: float) -> int:
    """Set `first_s` and `slope_s` of a decode span with remote KV; return for how many steps they are valid.

    `first_s` is the duration of the first step, and `slope_s` the increase from each step to the next. A step takes as
    long as its longest part. The parts are attention to local KV, attention to the KV in each remote account, and the
    host's work. The two values are valid until another part becomes the longest (ANY: always). Attention takes a
    minimum time, however short the contexts are. Serial host work is not a part: it is added to the longest part.
    """
    n = lane_at(S, lane)
    b = lane >> 1
    k = cost_at(S)[c]
    added = host if k.serial else 0.0
    y, slope = base + added if k.serial else max(base, host), 0.0
    steps = ANY
    for again in range(2):  # find the part that is longest now, then the step at which another overtakes it
        for f in accounts(S, b):
            F = remote_at(S, f)
            if F.count > 0:
                link = F.link_s * F.count
                flat = base + (k.att0 + k.att1 * F.count) + link + added
                line = base + (k.dec0 + k.dec1 * F.count) + link + added + k.dec2 * F.context
                rise = k.dec2 * F.count
                if again:
                    steps = min(steps, overtakes(y, slope, line, rise))
                else:
                    if flat > y:
                        y, slope = flat, 0.0
                    if line > y or (line == y and rise > slope):
                        y, slope = line, rise
    n.first_s = y
    n.slope_s = slope
    return steps


@jit
def hold_far(S: int, b: int, f: int, steps: int) -> int:
    """Take blocks in a remote KV account for as many decode steps as fit; return the number of steps.

    The result is from 1 to `steps`. The first step's blocks have been taken already.
    """
    B, F = batch_at(S, b), remote_at(S, f)
    first = needs(S, f, B.tick, 1)
    lo, hi = 1, steps + 1
    while hi - lo > 1:
        mid = (lo + hi) // 2 if hi <= steps else steps  # all steps are tried first: mostly they fit
        if fits(S, F.inst, needs(S, f, B.tick, mid) - first, 1):
            lo = mid
        else:
            hi = mid
    put(S, F.inst, needs(S, f, B.tick, lo) - first)
    F.ahead = lo
    return lo


@jit
def cut_kernels(S: int, lane: int, c: int, m: int, out: int, gemm: float, attention: float) -> int:
    """Record the GPU kernels of a lane's step, cut into pieces of at most `op_s` seconds (set by the lane's order).

    Return the number of pieces. A kernel is halved until its pieces are short enough. After each piece, the lane checks
    whether remote attention waits for the lane's GPU. A lane whose order has no `op_s` never checks; remote attention
    then waits for the whole step. The step has `m` tokens and samples `out` tokens. `gemm` and `attention` are the
    step's seconds of matrix products and attention.
    """
    n = lane_at(S, lane)
    grid, kernels = grid_at(S), kernels_at(S)[c]
    k = cost_at(S)[c]
    layer = gemm / k.layers
    at = min(m, grid[grid.size - 1])
    last = kernels.shape[1]
    polls = 0
    n.kernels = 0
    for x in range(last + 2):
        long, count = layer, k.layers
        if x < last:
            long *= table(grid, kernels[:, x], at)
        elif x == last:
            long = attention / k.layers
        else:
            long, count = table(grid, head_at(S)[c], out), 1
        if long > 0.0:
            while long > n.op_s:
                long *= 0.5
                count *= 2
            n.kernel_s[n.kernels] = long
            n.kernel_count[n.kernels] = count
            n.kernels += 1
            polls += count
    return polls
