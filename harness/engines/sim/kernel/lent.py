"""Remote attention (to KV on other GPUs): how it delays the lanes of those GPUs, and how long it waits for them."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.walks import demands, lanes_in
from harness.engines.sim.state import *


@jit
def demand_on(S: int, lane: int, g: int) -> int:
    """Return the row of a lane's demand on a GPU, or -1 if it has none there."""
    d = lane_at(S, lane).demand
    while d >= 0 and demand_at(S, d).gpu != g:
        d = demand_at(S, d).next
    return d


@jit
def slowed(alone: float, beside: float, factor: float) -> float:
    """Return a lane's rate after the delay that other lanes cause is multiplied by `factor`.

    `alone` is the lane's rate without other lanes. `beside` is its rate with other lanes before the multiplication.
    """
    return alone / (1.0 + factor * (alone / beside - 1.0))


@jit
def late_s(S: int, lane: int, slack_s: float) -> float:
    """Return the expected seconds beyond `slack_s` that remote attention waits until a lane's GPU kernel ends.

    The attention arrives at a random time. If a GPU kernel of T seconds is running then, its remaining time is uniform
    between 0 and T.
    """
    n = lane_at(S, lane)
    area = 0.0
    for x in range(n.kernels):
        over = n.kernel_s[x] / n.max_rate - slack_s
        if over > 0.0:
            area += n.kernel_count[x] * over * over
    return area * n.max_rate / (2.0 * n.slice_s)


@jit
def lent_on(S: int, lane: int, g: int) -> float:
    """Return the share of GPU g's time that a lane on other GPUs needs for its attention to KV on g.

    The share is computed from the lane's present rate.
    """
    n = lane_at(S, lane)
    part = 0.0
    for d in demands(S, n.lent):
        if demand_at(S, d).gpu == g:
            part += demand_at(S, d).time * n.given
    return part


@jit
def share_time(S: int, p: int, g: int) -> None:
    """Divide a GPU's time by max-min fairness.

    All lanes of the GPU itself form one party. Each lane on other GPUs that attends to KV on this GPU is another party.
    """
    G = gpu_at(S, g)
    local, parties = 0, 0
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        n.frozen = int(lent_on(S, lane, g) <= 0.0)
        parties += 1 - n.frozen
        if demand_on(S, lane, g) >= 0:
            local = 1
    left, level, more = 1.0, INF, 1
    while parties > 0 and more:  # a lane that asks for no more than an equal part gets all of it
        level = left / (parties + local)
        more = 0
        for lane in lanes_in(S, p):
            n = lane_at(S, lane)
            if not n.frozen:
                asked = lent_on(S, lane, g)
                if asked <= level:
                    n.frozen = 1
                    left -= asked
                    parties -= 1
                    more = 1
    G.lent_most = level if parties > 0 else INF
    G.own = left / (parties + local) if local else 1.0


@jit
def lend(S: int, p: int) -> None:
    """Reduce the rates of a pool's lanes by the delays that remote attention causes.

    Remote attention waits for the GPU kernel that is running, and then has the GPU to itself. The GPU's time is divided
    by max-min fairness. Each lane on other GPUs asks for the time of its remote attention, and the GPU's own lanes
    together ask for all of the time.
    """
    W = world(S)
    lent = 0
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        if n.lent >= 0:
            lent = 1
            late = 0.0
            for d in demands(S, n.lent):
                for x in lanes_in(S, p):
                    if x != lane and demand_on(S, x, demand_at(S, d).gpu) >= 0:
                        late = max(late, late_s(S, x, demand_at(S, d).slack_s))
            n.given *= n.slice_s / (n.slice_s + n.slow * n.layers * late)
    if not lent:
        return
    for g in range(W.n_gpus):
        if gpu_at(S, g).pool == p:
            share_time(S, p, g)
    for lane in lanes_in(S, p):
        n = lane_at(S, lane)
        part = 1.0
        for d in demands(S, n.demand):
            part = min(part, gpu_at(S, demand_at(S, d).gpu).own)
        for d in demands(S, n.lent):
            g = demand_at(S, d).gpu
            if lent_on(S, lane, g) > gpu_at(S, g).lent_most:
                part = min(part, gpu_at(S, g).lent_most / lent_on(S, lane, g))
        n.new_rate = n.given * part if n.slow == 1.0 else slowed(n.given, n.given * part, n.slow)
    for lane in lanes_in(S, p):
        lane_at(S, lane).given = lane_at(S, lane).new_rate
