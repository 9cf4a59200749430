"""What several papers share: placement by pressure on KV memory, sequencing by deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations

from harness.types import Cluster, Gpus, Infeasible, Model


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


def spread(cluster: Cluster) -> Mapping[str, Gpus]:
    """A home for each model: heaviest weights first, each where KV demand over free memory stays lowest.

    Raises Infeasible when some model's weights and one longest request fit nowhere.
    """
    free = [float(g.mem_bytes) for g in cluster.gpus]
    load = [0.0] * len(free)
    homes: dict[str, Gpus] = {}
    order = list(cluster.models)
    for name in sorted(order, key=lambda m: (-cluster.models[m].weight_bytes, order.index(m))):
        model = cluster.models[name]
        need, want = model.weight_bytes + one_request(model), demand(cluster, name)
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
