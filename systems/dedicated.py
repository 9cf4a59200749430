"""Dedicated serving: every model has its GPUs for itself. The base of every scaled SLO, and the cost to beat.

It runs on as many GPUs as its models need, whatever the others are given; tables and figures say how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Cluster, Infeasible, Inst, Model, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Dedicated:
    """Model k runs alone on the next free GPUs."""

    cluster: Cluster
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit"}), init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    @staticmethod
    def gpus_needed(models: Mapping[str, Model], node_gpus: int) -> int:
        """GPUs that give every model its own, groups within a node."""
        g = 0
        for model in models.values():
            g = fit(g, model.tp, node_gpus) + model.tp
        return g

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """One model after the other gets its GPUs at the start; nothing after."""
        if event != Woke("start"):
            return
        nodes = [gpu.node for gpu in self.cluster.gpus]
        g = 0
        for m, model in self.cluster.models.items():
            g = fit(g, model.tp, nodes.count(0))
            if g + model.tp > len(nodes):
                raise Infeasible(f"one GPU group a model takes more than {len(nodes)} GPUs")
            batch = Batch(Inst(m, tuple(range(g, g + model.tp))))
            yield Load(batch.inst)
            yield Run(batch)
            yield Admit(m, batch)
            g += model.tp


def fit(g: int, tp: int, node_gpus: int) -> int:
    """Return the first GPU from g on at which a group of tp stays within its node."""
    left = node_gpus - g % node_gpus
    return g if tp <= left else g + left
