"""Placement of models on GPUs, shared by systems: groups of GPUs, homes, copies, shares, instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations

from harness.policy.search import Part, search
from harness.policy.types import GIB, Batch, Cluster, Gpus, Infeasible, Inst, Model, Unsupported
from harness.policy.view import View


def demand(cluster: Cluster, model: str) -> float:
    """Return the KV bytes per second that a model's forecast traffic writes on each of its GPUs."""
    plan = cluster.plan.get(model)
    if plan is None:
        return 0.0
    return plan.rate_rps * (plan.prompt_tokens + plan.output_tokens) * cluster.models[model].kv_token_bytes


def groups(cluster: Cluster, tp: int) -> list[Gpus]:
    """Return every group of `tp` GPUs within one node, for tensor parallelism; groups may overlap."""
    nodes = [
        [k for k, g in enumerate(cluster.gpus) if g.node == node] for node in sorted({g.node for g in cluster.gpus})
    ]
    return [group for gpus in nodes for group in combinations(gpus, tp)]


def gpus_apart(models: Mapping[str, Model], node_gpus: int) -> int:
    """Return how many GPUs of one kind give each model a separate group; each group lies within one node."""
    g = 0
    for model in models.values():
        g = _within_node(g, model.tp, node_gpus) + model.tp
    return g


def apart(cluster: Cluster) -> dict[str, Gpus]:
    """Give each model a separate group of GPUs: the next free ones.

    If there are several kinds of GPU, the model gets GPUs of the kind with the least memory that suffices for it and
    one longest request. If too few of that kind are free, it gets the next larger kind. Raises Infeasible if there are
    too few GPUs.
    """
    of: dict[str, list[int]] = {}  # GPUs by kind
    for g, gpu in enumerate(cluster.gpus):
        of.setdefault(gpu.kind, []).append(g)
    next_of, at = dict.fromkeys(of, 0), dict[str, Gpus]()
    room = {kind: cluster.gpus[gpus[0]].mem_bytes for kind, gpus in of.items()}
    for m, model in cluster.models.items():
        need = model.weight_bytes + one_request(model)
        holding = [kind for kind in of if room[kind] >= need] or [max(of, key=room.__getitem__)]
        for kind in sorted(holding, key=room.__getitem__):
            nodes = [cluster.gpus[g].node for g in of[kind]]
            k = _within_node(next_of[kind], model.tp, nodes.count(nodes[0]))
            if k + model.tp <= len(nodes):
                at[m], next_of[kind] = tuple(of[kind][k : k + model.tp]), k + model.tp
                break
        else:
            raise Infeasible(f"one GPU group a model takes more than {len(cluster.gpus)} GPUs")
    return at


def _within_node(g: int, tp: int, node_gpus: int) -> int:
    """Return the first GPU, `g` or a later one, at which a group of `tp` GPUs can begin without leaving its node."""
    left = node_gpus - g % node_gpus
    return g if tp <= left else g + left


def spread(cluster: Cluster, elastic: bool = False, by: str = "pressure") -> Mapping[str, Gpus]:
    """Place each model on GPUs with room for its weights and one longest request, in addition to their other models.

    by   pressure   models with the heaviest weights first, each where KV demand / free memory stays lowest
         rate       of all placements, the one whose busiest GPU has the fewest forecast requests
         searched   of all placements, the one whose largest KV demand / free memory on a GPU is lowest

    If `pressure` leaves a model without room, the placement is that of `searched`. If homes are given
    (`Cluster.homes`), return these instead. Raises Infeasible if no placement is found, or if a GPU cannot hold its
    models in the given homes.
    """
    if cluster.homes:
        return given(cluster, elastic)
    homes = _heaviest_first(cluster, elastic) if by == "pressure" else None
    if homes is None and by == "rate":
        plan = cluster.plan
        rate = {name: plan[name].rate_rps if name in plan else 0.0 for name in cluster.models}
        homes = searched(cluster, rate, elastic, free=False)
    elif homes is None:
        homes = searched(cluster, {name: demand(cluster, name) for name in cluster.models}, elastic)
    if homes is None:
        need = {name: footprint(m, elastic) + one_request(m) for name, m in cluster.models.items()}
        total = sum(need[name] * m.tp for name, m in cluster.models.items())
        most = max(need, key=lambda name: (need[name], cluster.models[name].tp))
        raise Infeasible(
            f"no placement found of {len(need)} models, {total / GIB:.1f} GiB with one request each, on "
            f"{len(cluster.gpus)} GPU(s) of {_memory(cluster)}; {most} alone takes "
            f"{need[most] / GIB:.1f} on each of {cluster.models[most].tp}"
        )
    return {name: homes[name] for name in cluster.models}


def _memory(cluster: Cluster) -> str:
    """Return the memory sizes of the GPUs in GiB as text, without repetitions."""
    return " and ".join(dict.fromkeys(f"{gpu.mem_bytes / GIB:.1f}" for gpu in cluster.gpus))


def _heaviest_first(cluster: Cluster, elastic: bool) -> dict[str, Gpus] | None:
    """Place models as `spread` does by pressure; return None if a model finds no room."""
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
            return None
        homes[name] = best[2]
        for g in best[2]:
            free[g] -= need
            load[g] += want
    return homes


def searched(
    cluster: Cluster,
    d: Mapping[str, float],
    elastic: bool,
    *,
    free: bool = True,
    known: Mapping[str, Gpus] | None = None,
) -> dict[str, Gpus] | None:
    """Return the placement in which the largest pressure on a GPU is lowest; None if no placement is found.

    A GPU's pressure is the sum of `d` over its models, divided by the memory that their weights leave. Without `free`,
    it is the sum alone.

    Each GPU of the placement has room for its models with one longest request each. If a placement `known` has this
    room too, the result is no worse.
    """
    parts = {}
    for name, model in cluster.models.items():
        held = footprint(model, elastic)
        parts[name] = Part(model.tp, held + one_request(model), held if free else 0, d[name])
    return search(parts, [gpu.mem_bytes for gpu in cluster.gpus], [gpu.node for gpu in cluster.gpus], known)


def given(cluster: Cluster, elastic: bool) -> Mapping[str, Gpus]:
    """Return the given placement (`Cluster.homes`).

    Raises Infeasible if a GPU cannot hold its models with one longest request each.
    """
    for g, gpu in enumerate(cluster.gpus):
        here = [m.at(len(at)) for name, m in cluster.models.items() if g in (at := cluster.homes[name])]
        need = sum(footprint(m, elastic) + one_request(m) for m in here)
        if need > gpu.mem_bytes:
            raise Infeasible(
                f"{(need - gpu.mem_bytes) / GIB:.1f} GiB short on GPU {g}: the placement takes {need / GIB:.1f} of its "
                f"{gpu.mem_bytes / GIB:.1f}"
            )
    return cluster.homes


def busy(cluster: Cluster, model: str, place: Gpus) -> float:
    """Return the share of time for which a model's forecast traffic keeps each GPU of a place busy.

    Its unit is GPU-seconds per second. All tokens of a request are priced as one prefill. This is their cost in large
    batches, in which the costs of parts of the traffic add up to the cost of the whole.
    """
    plan = cluster.plan.get(model)
    tokens = 0 if plan is None else round(plan.prompt_tokens + plan.output_tokens)
    return plan.rate_rps * cluster.profile.prefill_s(Inst(model, place), tokens) if plan and tokens else 0.0


def copies(cluster: Cluster, homes: Mapping[str, Gpus], elastic: bool = False) -> dict[str, list[Gpus]]:
    """Return each model's places: its home and its copies, which are added as long as they lower the highest loads.

    A model's copies have equal parts of its traffic, and `busy` forecasts the load of each GPU. Each copy has room for
    its weights and one longest request in addition to the GPU's other models. A new copy is always of a model on the
    busiest GPU. The copy is chosen that leaves the lowest load on the busiest GPU. If copies tie, the load of the
    second busiest GPU decides, and so on. If all loads tie, the first copy is chosen. Loads are compared in whole
    hundredths of the load of all GPUs together, because a smaller gain is not worth a copy's memory.
    """
    board = _Copies(cluster, homes, elastic)
    while board.whole > 0 and (copy := board.best()):
        board.add(*copy)
    return board.places


class _Copies:
    """The places of models with their copies, and the load and the free memory of each GPU."""

    def __init__(self, cluster: Cluster, homes: Mapping[str, Gpus], elastic: bool) -> None:
        self.cluster, self.rank = cluster, {m: k for k, m in enumerate(homes)}
        self.places = {m: [home] for m, home in homes.items()}
        self.need = {m: footprint(model, elastic) + one_request(model) for m, model in cluster.models.items()}
        self.works: dict[tuple[str, str, int], float] = {}
        self.here = [{m: home for m, home in homes.items() if g in home} for g in range(len(cluster.gpus))]
        self.free = [gpu.mem_bytes - sum(self.need[m] for m in self.here[g]) for g, gpu in enumerate(cluster.gpus)]
        self.whole = sum(self.work(m, home) * len(home) for m, home in homes.items())
        self.loads = [self.load(at) for at in self.here]

    def work(self, m: str, place: Gpus) -> float:
        """Return `busy` of a model at a place; it is computed once for each GPU kind and degree."""
        key = m, self.cluster.gpus[place[0]].kind, len(place)
        if key not in self.works:
            self.works[key] = busy(self.cluster, m, place)
        return self.works[key]

    def beside(self, g: int, m: str, place: Gpus) -> dict[str, Gpus]:
        """Return the models on GPU `g` and their places, with model `m` added, in order of `homes`."""
        return dict(sorted([*self.here[g].items(), (m, place)], key=lambda x: self.rank[x[0]]))

    def load(self, at: Mapping[str, Gpus], shared: str = "", parts: int = 0) -> float:
        """Return the load of a GPU with the models in `at`, if the traffic of `shared` is split into `parts`."""
        return sum(self.work(m, p) / (parts if m == shared else len(self.places[m])) for m, p in at.items())

    def best(self) -> tuple[str, Gpus] | None:
        """Return the model and the place of the copy that lowers the highest loads most; None if no copy does.

        Only models on the busiest GPU are copied.
        """
        busiest = max(range(len(self.loads)), key=self.loads.__getitem__)
        now = [round(100 * x / self.whole) for x in self.loads]
        copies = (copy for m in self.here[busiest] for copy in self._one_more(m, now))
        _, m, place = min(chain([(sorted(now, reverse=True), "", ())], copies), key=lambda copy: copy[0])
        return (m, place) if place else None

    def _one_more(self, m: str, now: Sequence[int]) -> Iterator[tuple[list[int], str, Gpus]]:
        """Yield (loads, model, place) for each possible copy of a model; loads are in hundredths, highest first."""
        parts, lighter = len(self.places[m]) + 1, list(now)
        taken = {g for place in self.places[m] for g in place}
        for g in taken:
            lighter[g] = round(100 * self.load(self.here[g], m, parts) / self.whole)
        for place in groups(self.cluster, self.cluster.models[m].tp):
            if all(g not in taken and self.free[g] >= self.need[m] for g in place):
                then = lighter.copy()
                for g in place:
                    then[g] = round(100 * self.load(self.beside(g, m, place), m, parts) / self.whole)
                yield sorted(then, reverse=True), m, place

    def add(self, m: str, place: Gpus) -> None:
        """Add a copy of a model at a place."""
        self.places[m].append(place)
        for g in place:
            self.free[g] -= self.need[m]
            self.here[g] = self.beside(g, m, place)
        for g in (g for each in self.places[m] for g in each):
            self.loads[g] = self.load(self.here[g])


def replicas(cluster: Cluster, homes: Mapping[str, Gpus], elastic: bool = False) -> dict[str, list[Gpus]]:
    """Return the places of each model, as `copies` does.

    Raises Unsupported if no model has a second place, because the result would then be a placement without copies.
    """
    places = copies(cluster, homes, elastic)
    if all(len(each) == 1 for each in places.values()):
        raise Unsupported("replicas: no second copy has room and lightens the busiest GPU")
    return places


def idlest(model: str, places: Sequence[Gpus], view: View) -> Batch:
    """Return the batch of a model at its place with the fewest requests; the first such place if several tie."""
    batches = [Batch(Inst(model, place)) for place in places]
    return min(batches, key=lambda batch: sum(view.batch(batch)[:3]))


def footprint(model: Model, elastic: bool) -> int:
    """Return the bytes that a loaded model takes on each of its GPUs while it has no request.

    With elastic KV (`elastic`), these include the KV pages that its process keeps mapped.
    """
    return model.weight_bytes + (int(model.kept_pages * model.page_bytes) if elastic else 0)


def one_request(model: Model) -> int:
    """Return the KV bytes of one request of the greatest length that is served, plus one page."""
    return model.max_tokens * model.kv_token_bytes + model.page_bytes


def shares(total: float, floors: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Split a total in proportion to weights, with a floor for each share.

    A share below its floor is raised to it, and the other shares are scaled down.
    """
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


def _given_groups(cluster: Cluster) -> list[Gpus]:
    """Return the GPU groups of the given homes.

    Raises Infeasible if two of them overlap, or if the degree of a group is not that of its model.
    """
    cut = list(dict.fromkeys(cluster.homes.values()))
    if len({g for place in cut for g in place}) < sum(map(len, cut)):
        raise Infeasible("the placement has groups of GPUs that overlap: each is to serve one model at a time")
    for m, at in cluster.homes.items():
        if len(at) != (tp := cluster.models[m].tp):
            raise Infeasible(f"the placement gives {m} {len(at)} GPU(s), not {tp}")
    return cut


def instances(cluster: Cluster, work: Mapping[str, float], least: int = 1, *, homes: bool = False) -> list[Gpus]:
    """Return disjoint GPU groups that serve one model at a time.

    `work` has GPU-seconds per second by model. Groups are formed by tensor-parallel degree, the largest first, on the
    nodes whose GPUs have most memory. The number of a degree's groups follows from the degree's share of the work. This
    number is at least `least`, if there are enough GPUs. It is also at least the number of models of this degree, as
    long as lower degrees have enough GPUs left for theirs. With `homes` there are at most as many groups as models of a
    degree, because each model then lives in one group. If the cluster has given homes, return their groups instead.

    Raises Infeasible if no node holds the largest degree, or GPUs lack room for a model and one longest request. Raises
    Infeasible also if given homes overlap, or if the number of GPUs of a home is not its model's degree.
    """
    for m, model in cluster.models.items():
        if max(gpu.mem_bytes for gpu in cluster.gpus) - model.weight_bytes < one_request(model):
            raise Infeasible(f"{m} and one longest request do not fit {model.tp} GPU(s)")
    if cluster.homes:
        return _given_groups(cluster)
    free: dict[int, list[int]] = {}
    for k, gpu in sorted(enumerate(cluster.gpus), key=lambda pair: -pair[1].mem_bytes):  # the largest are cut first
        free.setdefault(gpu.node, []).append(k)
    count = Counter(model.tp for model in cluster.models.values())
    degrees = sorted(count, reverse=True)
    cut = list[Gpus]()
    for j, tp in enumerate(degrees):
        asked = [sum(work[m] for m, model in cluster.models.items() if model.tp == t) for t in degrees[j:]]
        part = asked[0] / sum(asked) if sum(asked) > 0 else 1 / len(asked)
        left = sum(map(len, free.values()))
        spare = left - sum(t * max(least, count[t]) for t in degrees[j + 1 :])
        want = max(least, round(part * left / tp), min(count[tp], spare // tp))
        if homes:
            want = min(want, count[tp])
        for gpus in free.values():
            for _ in range(min(want, len(gpus) // tp)):
                cut.append(tuple(gpus[:tp]))
                del gpus[:tp]
                want -= 1
    if not cut or len(cut[0]) < degrees[0]:
        raise Infeasible(f"no node has {degrees[0]} GPUs")
    return cut
