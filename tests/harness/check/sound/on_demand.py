"""Weights come in when a request asks for them and go when the last one left: a system that decides all the time.

tick_s: how soon a refused action is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Evict, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Woke
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View


class OnDemand:
    """Model k lives on GPUs from k on, while it has work."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {"eager": {"tick_s": 0.01}, "elastic": {"kv": "elastic"}}

    def __init__(self, cluster: Cluster, tick_s: float = 0.1, kv: str = "paged") -> None:  # kv: the allocator
        n = len(cluster.gpus)
        self.hears = frozenset({Woke, Arrived, Finished, Load, Evict})
        self.uses = frozenset({"Load", "Evict", "Run", "Admit", "Wake"})
        self.options: Mapping[str, Option] = {"kv": kv}
        self.tick_s = tick_s
        self.batch = {
            m: Batch(Inst(m, tuple(sorted((k + j) % n for j in range(model.tp)))))
            for k, (m, model) in enumerate(cluster.models.items())
        }
        self.held: dict[str, list[int]] = {m: [] for m in cluster.models}
        self.model: dict[int, str] = {}  # of requests that have not ended

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Answer one event."""
        match event:
            case Arrived(request):
                self.model[request.id] = request.model
                self.held[request.model].append(request.id)
                yield from self.push(request.model, view)
            case Finished(rid):
                m = self.model.pop(rid)
                if m not in self.model.values():
                    yield Evict(self.batch[m].inst)
            case Done(Load(inst), None):
                yield from self.push(inst.model, view)
            case Done(Admit(int(rid))) if rid in self.model:
                self.held[self.model[rid]].append(rid)
                yield Wake(view.now_s + self.tick_s)
            case Done(Load() | Run()):
                yield Wake(view.now_s + self.tick_s)
            case Done(Evict(inst)):
                yield from self.push(inst.model, view)
            case Woke(""):
                for m in self.batch:
                    yield from self.push(m, view)

    def push(self, m: str, view: View) -> Iterable[Action]:
        """Yield the orders that model m's held requests still lack."""
        batch = self.batch[m]
        if m not in self.model.values():
            return
        if view.weights(batch.inst) != "in":
            yield Load(batch.inst)
        if view.lane(batch, "mixed") is None:
            yield Run(batch)
        for rid in self.held[m]:
            yield Admit(rid, batch)
        self.held[m] = []
