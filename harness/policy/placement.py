"""What several papers share: placement by pressure on KV memory, sequences by deadline, programs with whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from itertools import chain, combinations

from harness.policy.types import KEPT_PAGES, Cluster, Gpus, Infeasible, Model


def demand(cluster: Cluster, model: str) -> float:
    """KV bytes a second that a model's forecast traffic writes, on each of its GPUs."""
    plan = cluster.plan.get(model)
    if plan is None:
        return 0.0
    return plan.rate_rps * (plan.prompt_tokens + plan.output_tokens) * cluster.models[model].kv_token_bytes


def groups(cluster: Cluster, tp: int) -> Iterator[Gpus]:
    """GPU groups of a tensor-parallel degree, within one node."""
    for node in sorted({g.node for g in cluster.gpus}):
        yield from combinations([k for k, g in enumerate(cluster.gpus) if g.node == node], tp)


def spread(cluster: Cluster, elastic: bool = False) -> Mapping[str, Gpus]:
    """A home for each model: heaviest weights first, each where KV demand over free memory stays lowest.

    Raises Infeasible when some model's weights and one longest request fit nowhere.
    """
    free = [float(g.mem_bytes) for g in cluster.gpus]
    load = [0.0] * len(free)
    homes: dict[str, Gpus] = {}
    order = list(cluster.models)
    for name in sorted(order, key=lambda m: (-cluster.models[m].weight_bytes, order.index(m))):
        model = cluster.models[name]
        need, want = footprint(model, elastic) + one_request(model), demand(cluster, name)
        best: tuple[float, float, Gpus] | None = None
        for place in groups(cluster, model.tp):
            left = min(free[g] for g in place) - need
            if left < 0:
                continue
            pressure = max((load[g] + want) / (free[g] - need + 1.0) for g in place)
            if best is None or (pressure, -left) < best[:2]:
                best = (pressure, -left, place)
        if best is None:
            raise Infeasible(f"{name} finds no {model.tp} GPU(s) with {need / 2**30:.1f} GiB left")
        homes[name] = best[2]
        for g in best[2]:
            free[g] -= need
            load[g] += want
    return {name: homes[name] for name in order}


def footprint(model: Model, elastic: bool) -> int:
    """Bytes that a loaded model takes on each of its GPUs without a request; with elastic KV, the pages kept mapped."""
    return model.weight_bytes + (KEPT_PAGES * model.page_bytes if elastic else 0)


def one_request(model: Model) -> int:
    """KV bytes of one longest request, and a granule to spare."""
    return model.max_tokens * model.kv_token_bytes + model.page_bytes


def shares(total: float, floors: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Split a total by weight with a floor each: whoever would fall below gets the floor, the rest scales down."""
    fixed: set[int] = set()
    while True:
        left = total - sum(floors[i] for i in fixed)
        weight = sum(w for i, w in enumerate(weights) if i not in fixed)
        parts = [
            floors[i] if i in fixed else (left * w / weight if weight > 0 else left / (len(weights) - len(fixed)))
            for i, w in enumerate(weights)
        ]
        low = {i for i, part in enumerate(parts) if part < floors[i]}
        if not low:
            return parts
        fixed |= low


def moore_hodgson(due_s: Sequence[float], seconds: Sequence[float], start_s: float = 0.0) -> list[int]:
    """Jobs of one machine that can end in time, as many as possible: indices in order; jobs come sorted by `due_s`.

    Moore, "An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs", 1968: whenever a job
    ends too late, the longest one so far goes.
    """
    kept: list[tuple[float, int]] = []  # a heap, the longest first
    gone: set[int] = set()
    t_s = start_s
    for k, (due, long) in enumerate(zip(due_s, seconds, strict=True)):
        heappush(kept, (-long, k))
        t_s += long
        if t_s > due:
            longest, which = heappop(kept)
            t_s += longest
            gone.add(which)
    return [k for k in range(len(due_s)) if k not in gone]


def instances(cluster: Cluster, work: Mapping[str, float], least: int = 1) -> list[Gpus]:
    """Disjoint GPU groups to serve one model at a time: the largest tensor-parallel degree first, by its share of work.

    `work` is GPU-seconds a second by model; of each degree there are `least` groups, if they can be had. Raises
    Infeasible where no node holds the largest degree.
    """
    free: dict[int, list[int]] = {}
    for k, gpu in enumerate(cluster.gpus):
        free.setdefault(gpu.node, []).append(k)
    degrees = sorted({model.tp for model in cluster.models.values()}, reverse=True)
    cut: list[Gpus] = []
    for j, tp in enumerate(degrees):
        asked = [sum(work[m] for m, model in cluster.models.items() if model.tp == t) for t in degrees[j:]]
        part = asked[0] / sum(asked) if sum(asked) > 0 else 1 / len(asked)
        want = max(least, round(part * sum(map(len, free.values())) / tp))
        for gpus in free.values():
            for _ in range(min(want, len(gpus) // tp)):
                cut.append(tuple(gpus[:tp]))
                del gpus[:tp]
                want -= 1
    if not cut or len(cut[0]) < degrees[0]:
        raise Infeasible(f"no node has {degrees[0]} GPUs")
    return cut


def phases(cluster: Cluster, work: Mapping[str, float], share: float | None) -> Iterator[tuple[Gpus, bool, bool]]:
    """`instances`, and whether each prefills and decodes: of each size and node the first ones prefill, a `share`.

    One at least does each, over all nodes where some node has a single one of its size; without a share all do both.
    Raises Infeasible where there is only one of the largest size.
    """
    cut = instances(cluster, work, 1 if share is None else 2)
    if share is None:
        yield from ((gpus, True, True) for gpus in cut)
        return
    for size in {len(gpus): None for gpus in cut}:
        nodes: dict[int, list[Gpus]] = {}
        for gpus in (gpus for gpus in cut if len(gpus) == size):
            nodes.setdefault(cluster.gpus[gpus[0]].node, []).append(gpus)
        pools = list(nodes.values())
        for pool in pools if min(map(len, pools)) > 1 else [list(chain(*pools))]:
            if len(pool) < 2 and size == len(cut[0]):
                raise Infeasible(f"one instance of {size} GPU(s) cannot both prefill and decode")
            first = min(max(1, round(share * len(pool))), len(pool) - 1)
            yield from ((gpus, k < first, k >= first) for k, gpus in enumerate(pool))


def active(models: int, rate_rps: float, service_s: float) -> float:
    """Theorem 3.1 of Aegaeon, SOSP 2025: models with a request in service, each of so many a second that take so long.

    As many GPUs are busy under scaling by request, which is why it stops at two or three models a GPU.
    """
    return models * -math.expm1(-rate_rps * service_s)


def milp(
    cost: Sequence[float],
    rows: Sequence[Mapping[int, float]],
    low: Sequence[float],
    high: Sequence[float],
    binaries: int,
    *,
    nodes: int,
    gap: float,
) -> list[float] | None:
    """Least cost x >= 0 with low <= rows x <= high, the first `binaries` of x 0 or 1; None: no point found.

    A row maps columns to coefficients. HiGHS stops by a count of nodes and a relative gap, never by a clock: the same
    problem has the same answer on every machine.
    """
    import numpy as np  # here, for scipy takes half a second to come in and most systems solve nothing
    from scipy import optimize

    A = np.zeros((len(rows), len(cost)))
    for i, row in enumerate(rows):
        A[i, list(row)] = list(row.values())
    whole = np.arange(len(cost)) < binaries
    found = optimize.milp(
        np.asarray(cost),
        integrality=whole.astype(np.int64),
        bounds=optimize.Bounds(0.0, np.where(whole, 1.0, np.inf)),
        constraints=optimize.LinearConstraint(A, np.asarray(low), np.asarray(high)),
        options={"node_limit": nodes, "mip_rel_gap": gap},
    )
    return None if found.x is None else [float(x) for x in found.x]


Place = tuple[AbstractSet[int], float, float]  # jobs, a sum and a largest penalty


def partition(options: Sequence[Sequence[Place]], weight: float, *, nodes: int, gap: float) -> list[int] | None:
    """For each machine one of its options, so that every job is done once: least sum of sums + weight x the largest.

    Options of the same jobs that another beats in both are left out beforehand. None: no answer within the limits.
    """
    keep = [(k, j) for k, places in enumerate(options) for j in unbeaten(places)]
    once: dict[tuple[str, int], dict[int, float]] = {}
    late: list[dict[int, float]] = [{len(keep): -1.0} for _ in options]
    for x, (k, j) in enumerate(keep):
        jobs, _, largest = options[k][j]
        late[k][x] = largest
        for row in (("machine", k), *(("job", job) for job in sorted(jobs))):
            once.setdefault(row, {})[x] = 1.0
    low, high = [1.0] * len(once) + [-math.inf] * len(late), [1.0] * len(once) + [0.0] * len(late)
    cost = [*(options[k][j][1] for k, j in keep), weight]
    found = milp(cost, [*once.values(), *late], low, high, len(keep), nodes=nodes, gap=gap)
    return None if found is None else [j for (_, j), x in zip(keep, found, strict=False) if x > 0.5]


def unbeaten(places: Sequence[Place]) -> list[int]:
    """Indices of the options that no other of the same jobs beats in both sum and largest."""
    same: dict[AbstractSet[int], list[int]] = {}
    for j, (jobs, _, _) in enumerate(places):
        same.setdefault(frozenset(jobs), []).append(j)
    kept: list[int] = []
    for group in same.values():
        least = math.inf
        for j in sorted(group, key=lambda j: places[j][1:]):
            if places[j][2] < least:
                least = places[j][2]
                kept.append(j)
    return kept
