"""Placements that ignore load, as baselines: a comparison with them shows the gain from a system's own placement.

first-fit  each model, in the set's order, on the first GPUs with room, at the least degree that has such GPUs
random     each model on GPUs chosen by a hash of the seed among those with room
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.policy.chance import draw
from harness.policy.placement import footprint, one_request
from harness.policy.types import Cluster, Gpus, UserError


def places(cluster: Cluster, name: str) -> list[Gpus]:
    """Return the groups of GPUs that may hold a model: adjacent GPUs of one node, for each of its degrees."""
    gpus = len(cluster.gpus)
    return [
        tuple(range(g, g + tp))
        for tp in cluster.models[name].degrees
        for g in range(0, gpus - tp + 1, tp)
        if cluster.gpus[g].node == cluster.gpus[g + tp - 1].node
    ]


def first_fit(cluster: Cluster, seed: int = 0) -> dict[str, Gpus]:  # noqa: ARG001 - one of `FLOORS`
    """Place each model, in the set's order, on the first GPUs with room. Raises UserError if one has no room."""
    return _fitted(cluster, lambda name, _: places(cluster, name))


def random(cluster: Cluster, seed: int) -> dict[str, Gpus]:
    """Place each model on GPUs drawn by the seed among those with room. Raises UserError if a model has no room."""

    def shuffled(name: str, k: int) -> list[Gpus]:
        every = places(cluster, name)
        return sorted(every, key=lambda place: draw(seed, 1000 * k + every.index(place)))

    return _fitted(cluster, shuffled)


FLOORS: Mapping[str, Callable[[Cluster, int], dict[str, Gpus]]] = {"first-fit": first_fit, "random": random}


def _fitted(cluster: Cluster, ordered: Callable[[str, int], Sequence[Gpus]]) -> dict[str, Gpus]:
    """Place each model on the first group of GPUs in `ordered` with room for its weights and one longest request.

    Raises UserError if no group has room for a model.
    """
    free = [float(gpu.mem_bytes) for gpu in cluster.gpus]
    homes: dict[str, Gpus] = {}
    for k, (name, model) in enumerate(cluster.models.items()):
        for place in ordered(name, k):
            at = model.at(len(place))
            need = footprint(at, elastic=False) + one_request(at)
            if all(free[g] >= need for g in place):
                homes[name] = place
                for g in place:
                    free[g] -= need
                break
        else:
            raise UserError(f"no room is left for {name} on {len(free)} GPUs")
    return homes
