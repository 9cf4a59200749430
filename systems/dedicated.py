"""Dedicated serving: every model has its GPUs for itself. The base of every scaled SLO, and the cost to beat.

It runs on as many GPUs as its models need, whatever the others are given; tables and figures say how many. Where GPUs
are of several kinds, a model has those of the least memory that hold it with one longest request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.placement import one_request
from harness.policy.types import Batch, Cluster, Gpus, Infeasible, Inst, Model, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Dedicated:
    """Model k runs alone on the next free GPUs."""

    cluster: Cluster
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit"}), init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    mixed: ClassVar[bool] = True
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
        for m, place in homes(self.cluster).items():
            batch = Batch(Inst(m, place))
            yield Load(batch.inst)
            yield Run(batch)
            yield Admit(m, batch)


def homes(cluster: Cluster) -> dict[str, Gpus]:
    """Return GPUs of its own for each model. Infeasible where there are too few."""
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
            k = fit(next_of[kind], model.tp, nodes.count(nodes[0]))
            if k + model.tp <= len(nodes):
                at[m], next_of[kind] = tuple(of[kind][k : k + model.tp]), k + model.tp
                break
        else:
            raise Infeasible(f"one GPU group a model takes more than {len(cluster.gpus)} GPUs")
    return at


def fit(g: int, tp: int, node_gpus: int) -> int:
    """Return the first GPU from g on at which a group of tp stays within its node."""
    left = node_gpus - g % node_gpus
    return g if tp <= left else g + left
