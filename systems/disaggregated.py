"""Prefill and decode on separate GPUs: a prompt's KV goes over a link to where it is decoded.

Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving", OSDI
2024; as SGLang and vLLM serve it, with a fixed ratio of instances:

    P : D   instances of a model that prefill, and that decode
    cell    P + D groups of GPUs of one size; a model lives in one cell and has an instance in each group

A group lies in one node. A cell does too, and its KV goes over NVLink. If nodes hold no whole cells, a cell spans nodes
and its KV goes over the network. Several models: cells are filled as `static` fills GPUs. So at 1 : 1, one GPU of each
pair prefills for all models that live there. If there are too few GPUs for a model's degree on both sides, each side
has the largest degree that fits (TP8 becomes 4 + 4). A request goes to the prefill instance with the fewest tokens to
do, then to the decode instance with the fewest requests. If its KV is lost (preempted, or refused by the decode
instance), it is prefilled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from harness.policy.actions import Action, Admit, Drop, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Preempted, Prefilled, Woke
from harness.policy.fields import choice, number
from harness.policy.memory import kv_manager
from harness.policy.placement import demand, footprint, one_request
from harness.policy.types import Batch, Cluster, Gpus, Infeasible, Inst, Option
from harness.policy.view import View

DECISION_S = 3e-6  # mean of 30,000 at 80 % load of one A100; 2 busy x86-64 cores, CPython 3.11, 2026-11-22


@dataclass(slots=True)
class Cell:
    """A set of GPU groups of one size: in the first groups models prefill, in the others they decode."""

    groups: list[Gpus]
    free: float  # bytes on each GPU beside weights and one longest request of each model
    load: float = 0.0  # KV bytes a second that its models write


@dataclass(slots=True)
class Disaggregated:
    """A policy that prefills on some instances, decodes on others, and moves the KV cache between them."""

    cluster: Cluster
    p: int = number(1, 1, 8)
    d: int = number(1, 1, 8)
    kv: str = choice("auto", "paged", "elastic")  # how the KV cache is managed; auto: see `kv_manager`
    hears: frozenset[type] = field(default=frozenset({Woke, Prefilled, Preempted}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    prefills: dict[str, list[Batch]] = field(default_factory=dict, init=False)
    decodes: dict[str, list[Batch]] = field(default_factory=dict, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {"2-1": {"p": 2}, "1-2": {"d": 2}}

    def __post_init__(self) -> None:
        self.uses = frozenset(
            {"Load", "Admit", "Run", "Run.phase:prefill", "Run.phase:decode", "Move", "Move.to:gpu", "Drop"}
        )
        self.hears |= {Arrived} if self.p > 1 else set()
        kv = kv_manager(self.kv, chain.from_iterable(self.placed().values()))
        self.options = {"kv": kv}
        for m, groups in self.placed(kv == "elastic").items():
            batches = [Batch(Inst(m, gpus)) for gpus in groups]
            self.prefills[m], self.decodes[m] = batches[: self.p], batches[self.p :]

    # ------------------------------------------------------------ placement

    def placed(self, elastic: bool = False) -> Mapping[str, Sequence[Gpus]]:
        """Return, by model, the groups of GPUs on which it has instances; the groups for prefill come first.

        Models are placed heaviest first, each in the cell where KV demand over free memory stays lowest. Raises
        Infeasible if no cell has room for a model.
        """
        models = self.cluster.models
        degrees = {m: self.degree(m) for m in models}
        cells = list(self.cells(max(degrees.values())))
        homes: dict[str, Sequence[Gpus]] = {}
        for m in sorted(models, key=lambda m: -models[m].weight_bytes):
            model = models[m].at(degrees[m])
            need, want = footprint(model, elastic) + one_request(model), demand(self.cluster, m)
            fit = [cell for cell in cells if cell.free >= need]
            if not fit:
                raise Infeasible(
                    f"{m} finds no {self.p} + {self.d} groups of {model.tp} GPU(s) with {need / 2**30:.1f} GiB"
                )
            cell = min(fit, key=lambda cell: ((cell.load + want) / (cell.free - need + 1.0), -cell.free))
            cell.free -= need
            cell.load += want
            homes[m] = [gpus[: model.tp] for gpus in cell.groups]
        return {m: homes[m] for m in models}

    def degree(self, m: str) -> int:
        """Return the tensor-parallel degree of a model's instances. Raises Infeasible if there are too few GPUs."""
        model = self.cluster.models[m]
        fit = [tp for tp in model.degrees if tp <= model.tp and len(self.groups(tp)) >= self.p + self.d]
        if not fit:
            raise Infeasible(f"too few GPUs for {self.p} + {self.d} instances of {m}")
        return max(fit)

    def groups(self, size: int) -> list[Gpus]:
        """Return disjoint groups of `size` GPUs, node by node."""
        nodes: dict[int, list[int]] = {}
        for g, gpu in enumerate(self.cluster.gpus):
            nodes.setdefault(gpu.node, []).append(g)
        return [tuple(gpus[k : k + size]) for gpus in nodes.values() for k in range(0, len(gpus) - size + 1, size)]

    def cells(self, size: int) -> Iterator[Cell]:
        """Yield disjoint cells, each of P + D groups of `size` GPUs."""
        groups, n = self.groups(size), self.p + self.d
        for k in range(0, len(groups) - n + 1, n):
            yield Cell(groups[k : k + n], float(self.cluster.gpus[0].mem_bytes))

    # ------------------------------------------------------------ requests

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Prefill each prompt on one instance, move its KV cache to another, and decode it there."""
        match event:
            case Woke("start"):
                for m, batches in self.prefills.items():
                    yield from (Load(b.inst) for b in (*batches, *self.decodes[m]))
                    yield from (Run(b, "prefill") for b in batches)
                    yield from (Run(b, "decode") for b in self.decodes[m])
                    if self.p == 1:
                        yield Admit(m, batches[0])
            case Arrived(r):
                yield Admit(r.id, self.idlest(r.model, view))
            case Prefilled(rid, batch):
                to = min(self.decodes[batch.inst.model], key=lambda b: members(b, view))
                yield from (Admit(rid, to), Move(rid, to.inst.place))
            case Preempted(rid, batch):
                yield Admit(rid, self.idlest(batch.inst.model, view))
            case Done(Move(int(rid)), "never"):
                yield Drop(rid)
            case Done(Move(int(rid)), "gone"):
                now = view.request(rid)
                if now.batch is not None and now.batch in self.decodes[now.batch.inst.model] and not now.kv_bytes:
                    yield Admit(rid, self.idlest(now.batch.inst.model, view))

    def idlest(self, m: str, view: View) -> Batch:
        """Return the batch of a model's prefill instance that has the fewest prompt tokens left to compute."""
        return min(self.prefills[m], key=lambda b: view.batch(b).prefill_tokens)


def members(batch: Batch, view: View) -> int:
    """Return the number of requests in a decode batch, including those whose KV is still on its way."""
    s = view.batch(batch)
    return s.decoding + s.away
