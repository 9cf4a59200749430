"""Static partitioning (S-Partition): every model keeps a fixed share of its GPU's KV memory for the whole run.

The baseline of Prism (Yu et al., "Prism: Unleashing GPU Sharing for Cost-Efficient Multi-LLM Serving",
arXiv 2505.04021, section 7.1), sized as its released get_memory_pool_size.py does (`rate`; prism-research 595ec1f) or
evenly, as kvcached's benchmark does (`equal`).

    r_m   forecast request rate of model m          s_m   KV bytes of one token
    F_g   memory of GPU g left beside weights       K_m   KV memory of model m, its limit for ever

    rate:   K_m = F_g r_m s_m / sum over g of r s         equal:  K_m = F_g / number of models on g
    each at least `floor` longest requests, each with a granule to spare; the others scale down

The paper leaves open, and `bench tune` chooses: how shares are sized by default, the floor (where it does not fit, as
much of it as does), and the `placement`: by `pressure` of KV demand on memory, heaviest weights first, as in the other
systems that place once; by `rate`, so that the busiest GPU has the fewest requests; `searched`, the lowest pressure of
all placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Limit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import one_request, shares, spread
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Static:
    """Models stay where the plan puts them, with the KV memory that the plan gives them."""

    cluster: Cluster
    size: str = choice("rate", "equal", tuned=True)
    floor: float = number(2.65, 1, 8, tuned=True)  # longest requests
    placement: str = choice("rate", "pressure", "searched", tuned=True)
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    oracle: bool = False  # the forecast is the window's own: a bound
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "rate": {"size": "rate", "floor": 1.0, "placement": "pressure"},
        "equal": {"size": "equal", "floor": 1.0, "placement": "pressure"},
        "oracle": {"size": "rate", "floor": 1.0, "placement": "pressure", "oracle": True},
    }

    def __post_init__(self) -> None:
        uses = {"Load", "Limit", "Run", "Admit", "Cluster.homes"} | ({"Cluster.plan:window"} if self.oracle else set())
        object.__setattr__(self, "uses", frozenset(uses))

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place, limit, route and run every model at the start; nothing after."""
        if event != Woke("start"):
            return
        homes = spread(self.cluster, by=self.placement)
        for m, place in homes.items():
            batch = Batch(Inst(m, place))
            yield Load(batch.inst)
            yield Run(batch)
            yield Admit(m, batch)
        for g in range(len(self.cluster.gpus)):
            yield from self.partition(g, [m for m, place in homes.items() if g in place])

    def partition(self, g: int, tenants: list[str]) -> Iterable[Action]:
        """The limits K_m of the models on GPU g."""
        models = self.cluster.models
        F_g = self.cluster.gpus[g].mem_bytes - sum(models[m].weight_bytes for m in tenants)
        if self.size == "rate":
            weight = [self.cluster.plan[m].rate_rps * models[m].kv_token_bytes for m in tenants]
        else:
            weight = [1.0] * len(tenants)
        one = [float(one_request(models[m])) for m in tenants]
        floor = [each * min(self.floor, F_g / sum(one)) for each in one]
        for m, K_m in zip(tenants, shares(F_g, floor, weight), strict=True):
            yield Limit(m, g, int(K_m))
