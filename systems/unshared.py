"""No sharing: every model is loaded on the same GPUs, with unlimited memory and no interference.

This is not a strategy, but an engine that leaves out what sharing costs (options `memory=unlimited`, `sharing=none`,
which only the simulator offers). It is no upper bound either: requests are served in their order, by one copy, and at
the degree of parallelism of the model set. So a strategy that orders requests, has copies or mixes phases otherwise can
meet more SLOs (`of bound %` has a bound).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Unshared:
    """A policy that puts model k on GPUs k, k + 1, ... (cyclically), or on its given home.

    The place has no effect, because memory is unlimited and models do not slow each other down.
    """

    cluster: Cluster
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit", "Cluster.homes"}), init=False)
    options: Mapping[str, Option] = field(
        default_factory=lambda: {"kv": "paged", "memory": "unlimited", "sharing": "none"}, init=False
    )

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load, route and run every model at the start, and do nothing after that."""
        if event != Woke("start"):
            return
        n = len(self.cluster.gpus)
        for k, (m, model) in enumerate(self.cluster.models.items()):
            place = self.cluster.homes.get(m) or tuple((k + j) % n for j in range(model.tp))
            batch = Batch(Inst(m, place))
            yield Load(batch.inst)
            yield Run(batch)
            yield Admit(m, batch)
