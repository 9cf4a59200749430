"""Each request is admitted when it comes. What test_check.py breaks, a line at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class AdmitsEach:
    """Model k on the GPUs from k on."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}
    hears: frozenset[type] = frozenset({Woke, Arrived})
    uses = frozenset({"Load", "Run", "Admit"})
    options: ClassVar[Mapping[str, Option]] = {"kv": "paged"}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.gpu = cluster.gpus[0]
        self.batches = {
            m: Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        }

    def on(self, event: Event, view: View) -> Iterable[Action]:
        match event:
            case Woke("start"):
                for batch in self.batches.values():
                    yield Load(batch.inst)
                    yield Run(batch)
            case Arrived(request):
                yield Admit(request.id, self.batches[request.model])
