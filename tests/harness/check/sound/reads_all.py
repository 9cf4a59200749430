"""A system that asks for everything, every few milliseconds and at each event, and acts on all of it.

What a view says while many steps are taken at once must not depend on when they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from harness.policy.actions import Action, Admit, Drop, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, Woke
from harness.policy.types import Batch, Cluster, Host, Inst, Option
from harness.policy.view import View

TICK_S = 0.0213


class ReadsAll:
    """Two batches a model; a request joins the one that has been less busy."""

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    def __init__(self, cluster: Cluster) -> None:
        n = len(cluster.gpus)
        self.hears = frozenset({Woke, Arrived, Finished, Prefilled, Preempted, Load, Move})
        self.uses = frozenset(
            {"Load", "Limit", "Run", "Run.chunk_tokens", "Run.seqs", "Admit", "Drop", "Move", "Move.to:none", "Wake"}
        )
        self.options: Mapping[str, Option] = {"kv": "paged"}
        self.cluster = cluster
        self.insts = {
            m: Inst(m, tuple(sorted((k + j) % n for j in range(model.tp))))
            for k, (m, model) in enumerate(cluster.models.items())
        }
        self.live: dict[int, str] = {}
        self.moved: set[int] = set()
        self.seen = 0.0

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Answer one event."""
        self.seen += self.look(view)
        match event:
            case Woke("start"):
                for inst in self.insts.values():
                    yield Load(inst)
                    for tag in (0, 1):
                        yield Run(Batch(inst, tag), chunk_tokens=256 << tag, seqs=8)
            case Arrived(request):
                self.live[request.id] = request.model
                yield Admit(request.id, self.calmer(request.model, view))
                yield Wake(view.now_s + TICK_S)
            case Finished(rid):
                self.live.pop(rid, None)
            case Prefilled(rid, batch) if rid % 5 == 0 and rid not in self.moved:
                self.moved.add(rid)
                yield Move(rid, None)  # once: its KV is made anew
                yield Admit(rid, Batch(batch.inst, 1 - batch.tag))
            case Done(Load(inst) | Run(Batch(inst)), str()):
                yield Wake(view.now_s + TICK_S, f"again {inst.model}")
            case Done(Admit(int(rid)), str()) if rid in self.live:
                yield Drop(rid)
            case Woke("") if self.live:
                slow = min(self.live)
                if int(self.seen * 1e6) % 97 == 0 and slow not in self.moved:
                    self.moved.add(slow)
                    yield Admit(slow, self.calmer(self.live[slow], view))
                model = self.live[slow]
                room = view.kv(model, gpu := self.insts[model].place[0]).room_bytes  # type: ignore[index]
                yield Limit(model, gpu, None if room % 3 else self.cluster.gpus[gpu].mem_bytes)
                yield Wake(view.now_s + TICK_S)
            case Woke(key) if key.startswith("again "):
                inst = self.insts[key.removeprefix("again ")]
                yield Load(inst)
                for tag in (0, 1):
                    if view.lane(Batch(inst, tag), phase="mixed") is None:
                        yield Run(Batch(inst, tag), chunk_tokens=256 << tag, seqs=8)

    def calmer(self, model: str, view: View) -> Batch:
        """Return the batch that has been less busy, by exact numbers."""
        both = [Batch(self.insts[model], tag) for tag in (0, 1)]
        return min(both, key=lambda batch: (view.batch(batch).busy_s, batch.tag))

    def look(self, view: View) -> float:
        """Sum everything that can be asked."""
        total = view.now_s
        for g in range(len(self.cluster.gpus)):
            total += view.free_bytes(g) + len(view.insts(g))
            total += sum(view.kv(m, g).used_bytes for m in self.insts)
        total += view.free_bytes(Host(0))
        for inst in self.insts.values():
            total += len(view.weights(inst))
            for tag in (0, 1):
                state = view.batch(Batch(inst, tag))
                total += state.busy_s + state.seq_steps + state.ctx_tokens + state.prefill_tokens + state.steps
                total += sum(view.request(rid).made_tokens + rid for rid in view.members(Batch(inst, tag)))
                total += view.lane(Batch(inst, tag), "mixed") is not None
        return total
