"""An upper bound on the share of requests whose SLOs any policy on these GPUs can meet.

A request needs resources within a window of time. This need is charged to every interval that contains the window, and
each interval has a limited capacity. A linear program finds the largest share of requests whose SLOs can be met. The
program may serve a request in part and divide its work at will, so its answer is an upper bound. The program assumes
the following, which is true of every policy:

1. *Windows.* The prompt of a request that meets its TTFT is computed between its arrival and arrival + TTFT. Its last
   token comes by arrival + TTFT + (n - 1) TPOT. If a definition of attainment ignores a limit, the end of the run
   takes its place. All steps that serve a request lie between its arrival and its last token.
2. *Kernels.* Fill x kernel seconds, summed over all steps, <= GPUs x time. The law of turns (docs/semantics.md, Sharing
   a GPU) has a presence b <= 1, a fill f and a length of turn w for each lane. It slows the kernels of lane i by a
   factor s_i >= (sum over all lanes j of b_j f_j w_j) / w_i. So the sum over lanes of f_i b_i / s_i is at most 1,
   whatever steps are mixed in a lane, and whichever lanes share the GPU. A step counts in full on each GPU of
   its group. Attention on other GPUs has a GPU to itself, at the same price. Each piece of work costs at least the
   result of `costs.least`, for the degree and the kind of GPU with the least cost.
   The simulator solves the law in three sweeps. If duties are at least u, the presences that a sweep assumes are at
   least z times those that it computes. In the first sweep z = u, in each further one (1 - u) z + u, so 1 - (1 - u)^3
   in the third. So the time of GPUs is multiplied by 1 / z. For processes that take turns by time slices, it is
   multiplied by 1 / u^2. If a run scales the slowdown that lanes cause each other by a factor below 1, the time is also
   divided by that factor.
3. *Weights.* A token comes from a step of at most `batch_cap` members. These are requests of one model whose windows
   all contain one instant. So at most as many members of a step can meet their SLO as there are such windows, and the
   step reads the weights once for them. Members that miss their SLO only add work.
4. *Partitions.* Lanes on disjoint SMs may overlap kernels that compute with kernels that read. If a policy may cut GPUs
   in this way, two separate resources replace item 2. One is FLOP / (FLOP/s of the best GEMM) <= GPUs x
   time. The other is bytes of KV and weights (by item 3) / (bytes/s) <= GPUs x time. Neither is counted
   at more than item 2's price. These are limits of the card. The simulator's law of partitions enforces neither limit:
   it trusts a policy not to assign more than the GPU has.
5. *Memory.* The KV of a request is on GPUs during each step that serves the request. So tokens x bytes x seconds of
   a step with one member, summed over the request's steps, <= memory of all GPUs x time. While the request waits, its
   KV may be on the host, and weights may leave the GPUs.
6. *Prefixes.* If another request of the model has the same leading blocks of a prompt, these blocks cost no work and
   no memory. The other request may have left them in the cache, whichever of the two came first.
7. *Noise.* A step's seconds are multiplied by a random factor of at least 1 - 2 sqrt(3) sigma (`cost.noise`, a sum of
   four uniforms). A policy may put more work into steps whose factor is low, so the bound uses the least factor, not
   the mean.
8. *Alone.* A request cannot meet its SLO if its prompt, or its steps, exceed a limit even on idle GPUs at the
   best degree.

All else costs nothing: gaps of the host, blocks and pages, loads of weights, links. A run without interference
(`sharing=none`) or with unlimited memory may exceed the bound, because no real GPUs could execute it.

The program is solved for groups of similar requests. Its dual prices are then applied to each request by itself. By
weak duality, any prices >= 0 give a valid bound, so validity depends neither on the groups nor on the solver's
tolerance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.engines.costs import shapes
from harness.engines.costs.least import CUTS, Least, least
from harness.engines.machine import Config, Machine, priced_models

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.policy.types import Jobs

    F8 = NDArray[np.float64]
    I8 = NDArray[np.int64]
    B1 = NDArray[np.bool_]

BOUNDED = ("both", "ttft", "tpot", "e2e")  # definitions that limit when work is done
CELLS = 32  # marks of time; fewer where that makes more than MOST intervals
MOST = 200  # intervals
CLASSES = 8  # classes of cost that requests with like windows share
MARGIN_S = 5e-9  # stamps are whole nanoseconds


class Sharing(NamedTuple):
    """The ways in which policies may divide a GPU, in addition to lanes that share it kernel by kernel."""

    parted: bool = False  # cut it into partitions of SMs
    sliced: bool = False  # let processes take turns by slices of time


WHOLE = Sharing()


class Share(NamedTuple):
    """An upper bound on the share of offered requests that can meet their SLO, and the number of offered requests."""

    met: float
    offered: int


class _Model(NamedTuple):
    """The least cost of each kind of work on a model: the minimum over all degrees and kinds of GPU.

    Costs are in GPU seconds unless a field's comment names another unit.
    """

    token_s: float
    member_s: F8  # (cuts, cap + 1)
    head_s: float
    decode_s: F8  # (2,)
    piece_s: F8  # (3,)
    flop_s: F8  # (2,)
    hbm_s: F8  # (2,)
    clock_s: F8  # (2,) on the clock: of a step, and of each new token of a prompt
    held: F8  # (2,) bytes x seconds for a token held: through a step, and for each new token of a prompt


class _Need(NamedTuple):
    """The resources that each request needs, and the windows of time in which it needs them.

    A request needs `prompt` in the window of its prompt, and `decode` in the window of all its steps.
    """

    prompt: F8  # (requests, resources)
    decode: F8  # (requests, resources)
    begin_s: F8
    first_s: F8  # the window of the prompt ends
    end_s: F8  # the window of all steps ends
    possible: B1  # False: the request misses even alone on idle GPUs


class Prices(NamedTuple):
    """The least costs of work on a run's machine. They depend neither on the rate of requests nor on the seed."""

    config: Config
    machine: Machine
    rows: dict[str, list[tuple[Least, int]]]  # keyed by model: each degree and kind, with bytes of KV a token


def share(
    prices: Prices, jobs: Jobs, definition: str, window_s: float, end_s: float, sharing: Sharing = WHOLE
) -> Share:
    """Return an upper bound on the share of offered requests whose SLOs any policy can meet (module docstring).

    `definition` is one of BOUNDED; the limits of the SLO are those of the jobs. Raises ValueError for any other
    definition, and for closed loops, whose arrivals depend on the policy.
    """
    if definition not in BOUNDED:
        raise ValueError(f"no bound by {definition}: it limits no request's end")
    if jobs.after is not None:
        raise ValueError("no bound for closed loops: when requests come depends on the policy")
    offered = np.flatnonzero((jobs.arrival_s >= 0.0) & (jobs.arrival_s < window_s))
    if not len(offered):
        return Share(0.0, 0)
    need = _needs(prices, jobs, offered, definition, end_s, sharing.parted)
    return Share(_most(need, _capacity(prices, sharing)), len(offered))


# ------------------------------------------------------------------ least costs


def prices(config: Config, machine: Machine) -> Prices:
    """Return the least costs of each model at the degrees at which a group of GPUs may serve it."""
    models, cap = priced_models(config), config.batch_cap
    rows: dict[str, list[tuple[Least, int]]] = {}
    known: dict[Any, list[tuple[Least, int]]] = {}  # models of one shape have equal rows
    for name in (m.name for m in config.models):
        each = [(k, m) for k, m in enumerate(models) if m.name == name]
        fitting = [(k, m) for k, m in each if m.tp <= config.group_gpus] or each
        mine = [(t, k, m) for t in (kind.tables for kind in machine.all) for k, m in fitting]
        key = tuple((m.shape, m.tp, *(x[k].tobytes() for x in (t.cost, t.gemm, t.head))) for t, k, m in mine)
        if key not in known:
            token_s = min(least(t, k, m.tp, cap).token_s for t, k, m in mine)
            known[key] = [
                (least(t, k, m.tp, cap, token_s), m.tp * shapes.kv_token_bytes(m.shape, m.tp)) for t, k, m in mine
            ]
        rows[name] = known[key]
    return Prices(config, machine, rows)


def _models(prices: Prices) -> list[_Model]:
    """Return the least costs of each model: the minimum over all its degrees and all kinds of GPU."""

    def of(each: list[tuple[Least, int]]) -> _Model:
        some = [row for row, _ in each]

        def low(name: str) -> F8:
            return np.min([getattr(row, name) for row in some], axis=0)  # type: ignore[no-any-return]

        return _Model(
            float(low("token_s")),
            low("member_s"),
            float(low("head_s")),
            low("decode_s"),
            low("piece_s"),
            low("flop_s"),
            low("hbm_s"),
            low("wall_s"),
            np.min([[size * row.wall_s[0], size * row.wall_s[1]] for row, size in each], axis=0),
        )

    return [of(prices.rows[m.name]) for m in prices.config.models]


def _capacity(prices: Prices, sharing: Sharing) -> F8:
    """Return the amount of each resource that the cluster provides in one second.

    The last entry is the memory in bytes. All other entries are GPU seconds, the same number for each resource that
    takes GPU time. This number is divided by the least factors of noise and interference, so that the bound stays
    valid.
    """
    config, machine = prices.config, prices.machine
    every = [row for each in prices.rows.values() for row, _ in each]
    u = min(row.duty for row in every)
    lag = (u**2 if sharing.sliced else 1.0 - (1.0 - u) ** 3) if u < 1.0 else 1.0
    slow = min(1.0, config.scaled.get("co_run", 1.0) * min(row.slow for row in every))
    floor = lag * slow * max(0.0, least_factor(config.noise))
    gpus = config.gpus / floor if floor > 0.0 else math.inf
    kinds = [machine.of(kind).spec for kind in config.kinds]
    memory = sum(spec.mem_bytes if config.pool_bytes is None else config.pool_bytes for spec in kinds)
    return np.array([gpus] * (2 if sharing.parted else len(CUTS)) + [float(memory)])


def least_factor(sigma: float) -> float:
    """Return the least factor by which noise of standard deviation `sigma` can multiply a step's seconds.

    The factor is least if all four uniform draws of the noise are 0 (kernel/cost.py).
    """
    return 1.0 - 2.0 * math.sqrt(3.0) * sigma


# ------------------------------------------------------------------ needs


def _needs(prices: Prices, jobs: Jobs, offered: I8, definition: str, end_s: float, parted: bool) -> _Need:
    """Return the resources that each offered request needs, and its windows of time.

    With `parted` the resources are those of GPUs that may be cut into partitions (item 4 of the module's docstring).
    """
    config = prices.config
    arrival, which = jobs.arrival_s[offered], np.asarray(jobs.model)[offered]
    prompt, n = (np.asarray(x)[offered].astype(np.float64) for x in (jobs.prompt_tokens, jobs.output_tokens))
    ttft_s, tpot_s = (np.asarray(x)[offered].astype(np.float64) for x in (jobs.ttft_slo_s, jobs.tpot_slo_s))
    allowed_s = (n - 1) * np.where(n > 1, tpot_s, 0.0)  # from the first token to the last
    first = np.minimum(arrival + ttft_s + MARGIN_S, end_s)
    last = np.minimum(arrival + ttft_s + allowed_s + MARGIN_S, end_s)
    end = np.full(len(arrival), end_s)
    windows = {"both": (first, last), "e2e": (last, last), "ttft": (first, end), "tpot": (end, end)}
    by_prompt, by_end = windows[definition]
    spared = _spared(jobs, config.block_tokens)[offered]
    resources = (2 if parted else len(CUTS)) + 1
    early, late = np.zeros((2, len(arrival), resources))
    need = _Need(early, late, arrival, by_prompt, by_end, np.ones(len(arrival), dtype=bool))
    factor = max(0.0, least_factor(config.noise))
    for k, m in enumerate(_models(prices)):
        mine = np.flatnonzero(which == k)
        most = np.minimum(_overlaps(arrival[mine], by_end[mine]), config.batch_cap)
        length, new, later = prompt[mine], prompt[mine] - spared[mine], n[mine] - 1
        area, ends = 0.5 * (length**2 - spared[mine] ** 2), (length, length + np.maximum(0.0, later - 1))
        if parted:
            read_s = _mean(ends, 0.0, m.hbm_s[1], m.piece_s[0], m.piece_s[2])
            need.prompt[mine, :2] = np.stack([m.flop_s[0] * new + m.flop_s[1] * area, m.hbm_s[0] / most], axis=1)
            need.decode[mine, :2] = later[:, None] * np.stack(
                [np.full(len(mine), m.flop_s[0]), m.hbm_s[0] / most + read_s], axis=1
            )
        else:
            attention_s = _mean(ends, m.decode_s[0], m.decode_s[1], m.piece_s[0] + m.piece_s[1], m.piece_s[2])
            piece_s = m.piece_s[0] + m.piece_s[1] * new + m.piece_s[2] * area
            for cut, part in enumerate(CUTS):
                member_s = m.member_s[cut][most] + m.head_s
                need.prompt[mine, cut] = part * m.token_s * (new - 1) + member_s + piece_s
                need.decode[mine, cut] = later * (member_s + attention_s)
        need.prompt[mine, -1] = factor * m.held[1] * new**2
        need.decode[mine, -1] = factor * m.held[0] * later * (0.5 * sum(ends) - spared[mine])
        prompt_s = factor * np.maximum(m.clock_s[0], m.clock_s[1] * new)
        steps_s = factor * later * m.clock_s[0]
        waits = prompt_s <= by_prompt[mine] - arrival[mine], prompt_s + steps_s <= by_end[mine] - arrival[mine]
        need.possible[mine] = np.logical_and(*waits)
        if definition in ("both", "tpot"):
            need.possible[mine] &= steps_s <= allowed_s[mine] + MARGIN_S
    return need


def _mean(ends: tuple[F8, F8], once: float, each: float, other_once: float, other_each: float) -> F8:
    """Return a lower bound on the mean, over the contexts between `ends`, of the lower of two lines.

    At a context of x tokens, the lines are `once + each x` and `other_once + other_each x`. Their minimum is concave,
    so the mean of its chord is a lower bound.
    """
    first, last = (np.minimum(once + each * x, other_once + other_each * x) for x in ends)
    return 0.5 * (first + last)


def _overlaps(begin: F8, end: F8) -> I8:
    """Return, for each window, the largest number of windows open at one instant within it; `begin` ascends.

    That number rises only when a window begins. So it is largest at an instant within the window at which some window
    begins.
    """
    here = np.searchsorted(begin, begin, "right") - np.searchsorted(np.sort(end), begin, "left")
    low, high = np.searchsorted(begin, begin, "left"), np.searchsorted(begin, end, "right")
    spans = np.frexp(np.maximum(1, high - low))[1] - 1  # two ranges of 2^span cover the window
    most, result = np.maximum(1, here), np.ones(len(begin), np.int64)
    for span in range(int(spans.max(initial=0)) + 1):
        mine = np.flatnonzero(spans == span)
        result[mine] = np.maximum(most[low[mine]], most[np.maximum(high[mine] - (1 << span), 0)])
        most = np.maximum(most[: -(1 << span)], most[1 << span :])
    return result


def _spared(jobs: Jobs, block_tokens: int) -> F8:
    """Return, for each prompt, the number of leading tokens that another prompt of the same model has as well.

    The last token of a prompt is never counted.
    """
    spared = np.zeros(len(jobs))
    if (prefix := jobs.prefix) is None or not len(prefix.ids):
        return spared
    counts = np.diff(prefix.offsets)
    owner = np.repeat(np.arange(len(jobs)), counts)
    _, name, times = np.unique(
        np.stack([np.asarray(jobs.model)[owner], prefix.ids], axis=1), axis=0, return_inverse=True, return_counts=True
    )
    place = np.arange(len(prefix.ids)) - prefix.offsets[owner]
    leading = counts.copy()
    np.minimum.at(leading, owner, np.where(times[name.reshape(-1)] > 1, counts[owner], place))
    last = (np.asarray(jobs.prompt_tokens, np.int64) - 1) // block_tokens * block_tokens
    spared[:] = np.minimum(leading * prefix.block_tokens, last)
    return spared


# ------------------------------------------------------------------ the program


def _most(need: _Need, capacity: F8) -> float:
    """Return an upper bound on the share of requests that can be met with the capacity of every interval of time."""
    from scipy.optimize import linprog

    points = _points(np.concatenate([need.begin_s, need.first_s, need.end_s]))
    a = np.searchsorted(points, need.begin_s, "right") - 1
    by = [np.searchsorted(points, ends, "left") for ends in (need.first_s, need.end_s)]  # len(points): in no interval
    intervals = _intervals(len(points))
    limited = np.flatnonzero(np.isfinite(capacity))
    lasts = points[intervals[:, 1]] - points[intervals[:, 0]]
    costs = [x[:, limited] / capacity[limited] for x in (need.prompt, need.decode)]  # seconds of all GPUs
    able = np.flatnonzero(need.possible)
    if not len(able):
        return 0.0
    whole = (costs[0] + costs[1]).max(axis=1)
    edges = np.quantile(whole[able], np.linspace(0.0, 1.0, CLASSES + 1)[1:-1])
    alike = [k[able] for k in (a, *by, np.searchsorted(edges, whole))]
    counts = (len(points) + 1,) * 3 + (CLASSES,)
    keys, of, sizes = np.unique(np.ravel_multi_index(alike, counts), return_inverse=True, return_counts=True)
    groups = np.stack(np.unravel_index(keys, counts), axis=1)
    means = [np.stack([np.bincount(of, x) / sizes for x in cost[able].T]) for cost in costs]
    inside = [(groups[:, 0] >= intervals[:, :1]) & (ends <= intervals[:, 1:]) for ends in groups[:, 1:3].T]
    rows = np.concatenate([inside[0] * early + inside[1] * late for early, late in zip(*means, strict=True)])
    solved = linprog(
        -np.ones(len(groups)),
        A_ub=rows,
        b_ub=np.tile(lasts, len(limited)),
        bounds=[(0.0, float(size)) for size in sizes],
        method="highs",
    )
    dual = np.zeros((len(intervals), len(limited)))
    if solved.status == 0:
        dual = np.maximum(0.0, -solved.ineqlin.marginals).reshape(len(limited), -1).T
    over = np.zeros((len(points), len(points) + 1, len(limited)))  # prices of all intervals that hold a window
    for (i, j), price in zip(intervals.tolist(), dual, strict=True):
        over[i:, : j + 1] += price
    charged = sum((over[a, ends] * cost).sum(axis=1) for ends, cost in zip(by, costs, strict=True))
    met = float(lasts @ dual.sum(axis=1)) + float(np.maximum(0.0, 1.0 - charged)[able].sum())
    return min(met, float(len(able))) / len(a)


def _points(times: F8) -> F8:
    """Return the instants that bound the intervals: every time at which a window begins or ends.

    If these times would make more than MOST intervals, return CELLS + 1 quantiles of them instead.
    """
    every = np.unique(times[np.isfinite(times)])
    if len(every) * (len(every) - 1) // 2 <= MOST:
        return every
    return np.unique(np.quantile(every, np.linspace(0.0, 1.0, CELLS + 1)))


def _intervals(points: int) -> I8:
    """Return the intervals between points, as pairs of indices of points.

    If there are at most MOST intervals, return all. Otherwise return the whole span, and intervals of 1, 2, 4, ...
    cells. Intervals of one length begin at every multiple of half that length.
    """
    if points * (points - 1) // 2 <= MOST:
        return np.array([(i, j) for j in range(points) for i in range(j)], np.int64).reshape(-1, 2)
    spans = [1 << k for k in range((points - 1).bit_length())]
    pairs = [(i, min(i + span, points - 1)) for span in spans for i in range(0, points - 1, max(1, span // 2))]
    return np.array(sorted({*pairs, (0, points - 1)}), np.int64)
