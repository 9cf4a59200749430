"""Breaks `replayed`: what one run learnt changes the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Drop, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class Broken:
    """Model k on the GPUs from k on."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke, Arrived})
    uses = frozenset({"Load", "Run", "Admit", "Drop"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.batches = [
            Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        ]

    known: ClassVar[list[int]] = []

    def batch(self, model: str) -> Batch:
        return next(b for b in self.batches if b.inst.model == model)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            for batch in self.batches:
                yield Load(batch.inst)
                yield Run(batch)
        if isinstance(event, Arrived):
            self.known.append(event.request.id)
            yield Admit(event.request.id, self.batch(event.request.model))
            if len(self.known) != len(set(self.known)):
                yield Drop(event.request.id)
