"""Breaks `memory`, `served`: every model on GPU 0, whether it has room or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class Broken:
    """All models on the first GPUs."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke})
    uses = frozenset({"Load", "Run", "Admit"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        self.batches = [Batch(Inst(m, tuple(range(model.tp)))) for m, model in cluster.models.items()]

    def on(self, event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            for batch in self.batches:
                yield Load(batch.inst)
                yield Run(batch)
                yield Admit(batch.inst.model, batch)
