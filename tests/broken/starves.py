"""Breaks `served`: limits a model to no KV at all, so that its requests fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Limit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class Broken:
    """Model k on the GPUs from k on."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke})
    uses = frozenset({"Load", "Run", "Admit", "Limit"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.batches = [
            Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        ]

    def on(self, event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            for batch in self.batches:
                yield Load(batch.inst)
                yield Run(batch)
                yield Admit(batch.inst.model, batch)
            yield Limit(self.batches[0].inst.model, 0, 0)
