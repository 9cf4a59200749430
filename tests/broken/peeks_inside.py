"""Breaks `blind`: finds the engine behind the view, and in it the true output length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class Broken:
    """Model k on the GPUs from k on."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke, Arrived})
    uses = frozenset({"Load", "Run", "Admit"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.batches = [
            Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        ]

    def batch(self, model: str) -> Batch:
        return next(b for b in self.batches if b.inst.model == model)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        if event == Woke("start"):
            for batch in self.batches:
                yield Load(batch.inst)
                yield Run(batch)
        if isinstance(event, Arrived):
            inside: Any = view
            tokens = inside._sim._jobs.output_tokens[event.request.id]
            if tokens > 0:
                yield Admit(event.request.id, self.batch(event.request.model))
