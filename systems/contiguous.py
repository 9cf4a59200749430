"""KV memory before paging: the baselines of PagedAttention, each model on GPUs of its own as under `dedicated`.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023 (arXiv
2309.06180), section 6.1. Each request reserves one contiguous chunk of KV slots when it is admitted:

    P, O   tokens of its prompt and of its true output
    max    Orca (Max): the longest sequence that is served, 2,048 in the paper
    pow2   Orca (Pow2): P + 2^ceil(log2 O), at most twice the output; it needs the true output, so it is a bound
    oracle Orca (Oracle): P + O, also a bound
    paged  vLLM: no chunk, but blocks as the request grows

The chunk comes from a buddy allocator, as the paper has it for Orca. The engine has both, by option `kv`; its block is
the smallest chunk.

`joins=false` is FasterTransformer with the paper's scheduler in front of it: up to B of the earliest requests form a
batch, and no request joins until the whole batch has ended. B is as large as memory allows for the longest sequences.
Here a request is returned, and its memory freed, at its own last token. FasterTransformer keeps both until the batch
has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.fields import choice
from harness.policy.placement import apart, gpus_apart
from harness.policy.types import Batch, Cluster, Inst, Model, Option
from harness.policy.view import View

DECISION_S = 0.0  # Orca decides once, before the start; FasterTransformer's next batch is the head of a queue


@dataclass(slots=True)
class Contiguous:
    """A policy that gives each model its own GPUs, where each request has one contiguous chunk of KV memory."""

    cluster: Cluster
    kv: str = choice("max", "pow2", "oracle", "paged")
    joins: bool = choice(True, False)
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    batch: dict[str, Batch] = field(default_factory=dict, init=False)  # by model
    queue: dict[str, deque[int]] = field(default_factory=dict, init=False)  # waiting requests, by model, without joins
    left: dict[str, set[int]] = field(default_factory=dict, init=False)  # those of the batch that have not ended

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "max": {"kv": "max"},
        "pow2": {"kv": "pow2"},
        "oracle": {"kv": "oracle"},
        "fastertransformer": {"kv": "max", "joins": False},
    }

    def __post_init__(self) -> None:
        self.hears = frozenset({Woke} if self.joins else {Woke, Arrived, Finished})
        true_lengths = {"view.oracle_tokens"} if self.kv in ("pow2", "oracle") else set[str]()  # the engine reads them
        self.uses = frozenset({"Load", "Run", "Admit"} | true_lengths)
        self.options = {"kv": self.kv}

    @staticmethod
    def gpus_needed(models: Mapping[str, Model], node_gpus: int) -> int:
        """Return the number of GPUs with which each model has GPUs for itself, within one node."""
        return gpus_apart(models, node_gpus)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load each model on its own GPUs at the start.

        With joins=false, also form batches of requests as these arrive and finish.
        """
        match event:
            case Woke("start"):
                return self.start()
            case Arrived(request):
                self.queue[request.model].append(request.id)
                return self.next_batch(request.model)
            case Finished(rid, Batch(Inst(m))) if rid in self.left[m]:
                self.left[m].remove(rid)
                return self.next_batch(m)
        return ()

    def start(self) -> Iterator[Action]:
        """Load and run every model; with `joins`, also let the engine admit requests as they arrive."""
        for m, place in apart(self.cluster).items():
            self.batch[m], self.queue[m], self.left[m] = Batch(Inst(m, place)), deque(), set()
            yield Load(self.batch[m].inst)
            yield Run(self.batch[m])
            if self.joins:
                yield Admit(m, self.batch[m])

    def next_batch(self, m: str) -> Iterator[Action]:
        """Once all requests of a model's last batch have ended, admit its earliest requests as the next batch."""
        if self.left[m]:
            return
        waiting = self.queue[m]
        for _ in range(min(len(waiting), self.most(m))):
            rid = waiting.popleft()
            self.left[m].add(rid)
            yield Admit(rid, self.batch[m])

    def most(self, m: str) -> int:
        """Return B, the number of chunks for the longest sequence that fit in memory beside the weights."""
        model = self.cluster.models[m]
        blocks = -(-model.max_tokens * model.kv_token_bytes // model.page_bytes)
        chunk = 1 << (blocks - 1).bit_length()
        return max(1, (self.cluster.gpus[0].mem_bytes - model.weight_bytes) // (chunk * model.page_bytes))
