"""Static partitioning (S-Partition): every model keeps a fixed share of its GPU's KV memory for the whole run.

The baseline of Prism (Yu et al., "Prism: Unleashing GPU Sharing for Cost-Efficient Multi-LLM Serving", arXiv
2505.04021, section 7.1). Shares are sized as in its released get_memory_pool_size.py (`rate`; prism-research 595ec1f),
or are equal, as in kvcached's benchmark (`equal`).

    r_m   forecast request rate of model m          s_m   KV bytes of one token
    F_g   memory of GPU g left beside weights       K_m   KV memory of model m, its limit for the whole run

    rate:   K_m = F_g r_m s_m / sum over g of r s         equal:  K_m = F_g / number of models on g
    each at least `floor` longest requests, each with a granule to spare; the others scale down

The paper leaves some choices open, which `bench tune` makes: how shares are sized by default; the floor (if it does not
fit, as much of it as does); and the `placement`. `pressure`: by KV demand over free memory, heaviest weights first, as
in the other systems that place once. `rate`: the busiest GPU gets as few requests as possible. `searched`: the lowest
pressure of all placements.

`replicas` is what an operator does with room to spare: models have as many copies as the forecast asks for (`copies` in
harness/policy/placement.py), and a request goes to the copy with the fewest requests. r_m is then the rate of a copy.
Where no copy helps, the run is skipped, since it would equal that of `static`.

`production-stack` sends requests to copies as vLLM's router does by default (vllm-project/production-stack 008a23b,
src/vllm_router/routers/routing_logic.py, RoundRobinRouter, and the same in 5ae0b10). Requests of all models are
numbered from 0, and request k goes to copy k mod n of the n copies of its model. Copies are ordered by URL there, and
by placement here. The router's other rules need what no trace here has: sessions, prompts, or prefixes kept between
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from harness.policy.actions import Action, Admit, Limit, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import idlest, one_request, replicas, shares, spread
from harness.policy.types import Batch, Cluster, Gpus, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start; with `replicas`, a look at a few queues a request


@dataclass(frozen=True, slots=True)
class Static:
    """A policy that places models once by the forecast, each with a fixed limit on its KV memory."""

    cluster: Cluster
    size: str = choice("equal", "rate", tuned=True)
    floor: float = number(1.66, 1, 8, tuned=True)  # longest requests
    placement: str = choice("searched", "rate", "pressure", tuned=True)
    oracle: bool = False  # the forecast is the window's own: a bound
    replicas: bool = False
    route: str = choice("fewest", "turns")  # to the copy with the fewest requests, or to each in turn
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    places: dict[str, list[Gpus]] = field(default_factory=dict, init=False)  # by model: its home, then its copies
    requests: Iterator[int] = field(default_factory=count, init=False)  # numbers of requests
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    mixed: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "rate": {"size": "rate", "floor": 1.0, "placement": "pressure"},
        "equal": {"size": "equal", "floor": 1.0, "placement": "pressure"},
        "oracle": {"size": "rate", "floor": 1.0, "placement": "pressure", "oracle": True},
        "replicas": {"replicas": True},
        "production-stack": {"replicas": True, "route": "turns"},
    }

    def __post_init__(self) -> None:
        uses = {"Load", "Limit", "Run", "Admit", "Cluster.homes"} | ({"Cluster.plan:window"} if self.oracle else set())
        object.__setattr__(self, "uses", frozenset(uses))
        object.__setattr__(self, "hears", frozenset({Woke, Arrived} if self.replicas else {Woke}))

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load, route and run every model at the start; then route the requests of models that have copies."""
        match event:
            case Woke("start"):
                yield from self.start()
            case Arrived(request):
                m, places, k = request.model, self.places[request.model], next(self.requests)
                if len(places) > 1 and self.route == "turns":
                    yield Admit(request.id, Batch(Inst(m, places[k % len(places)])))
                elif len(places) > 1:
                    yield Admit(request.id, idlest(m, places, view))

    def start(self) -> Iterable[Action]:
        """Load every model and its copies, and set their limits; route all requests of a model without copies."""
        homes = spread(self.cluster, by=self.placement)
        self.places.update(replicas(self.cluster, homes) if self.replicas else {m: [at] for m, at in homes.items()})
        for m, places in self.places.items():
            for place in places:
                yield Load(Inst(m, place))
                yield Run(Batch(Inst(m, place)))
            if len(places) == 1:
                yield Admit(m, Batch(Inst(m, places[0])))
        for g in range(len(self.cluster.gpus)):
            yield from self.partition(g, [m for m, places in self.places.items() if any(g in at for at in places)])

    def partition(self, g: int, tenants: list[str]) -> Iterable[Action]:
        """Yield the limits K_m on the KV memory of the models on GPU g."""
        models = self.cluster.models
        F_g = self.cluster.gpus[g].mem_bytes - sum(models[m].weight_bytes for m in tenants)
        if self.size == "rate":
            r = {m: self.cluster.plan[m].rate_rps / len(self.places[m]) for m in tenants}
            weight = [r[m] * models[m].kv_token_bytes for m in tenants]
        else:
            weight = [1.0] * len(tenants)
        longest = [float(one_request(models[m])) for m in tenants]
        floor = [each * min(self.floor, F_g / sum(longest)) for each in longest]
        for m, K_m in zip(tenants, shares(F_g, floor, weight), strict=True):
            yield Limit(m, g, int(K_m))
