"""Breaks `deterministic`: places models in the order of a set of strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class Broken:
    """Model k on the GPUs from k on."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke})
    uses = frozenset({"Load", "Run", "Admit"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.batches = [
            Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        ]

    def on(self, event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            for batch in {b.inst.model: b for b in set(self.batches)}.values():
                yield Load(batch.inst)
                yield Run(batch)
                yield Admit(batch.inst.model, batch)
