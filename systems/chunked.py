"""Chunked prefill (Sarathi-Serve): prompts are prefilled in pieces, so that no decode waits for a whole prompt.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, section 4. Where
several models share a GPU, all weights stay loaded, and all models draw KV from the free memory.

    tau   token budget of a step: first the decodes use it, then a piece of the first waiting prompt
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.fields import choice, number
from harness.policy.memory import kv_manager
from harness.policy.placement import spread
from harness.policy.types import Batch, Cluster, Inst, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Chunked:
    """A policy of stall-free batching, in which a step has a budget of tau tokens."""

    cluster: Cluster
    tau: int = number(512, 64, 8192)  # the paper's choice under a strict SLO (section 5.1)
    kv: str = choice("auto", "paged", "elastic")  # how the KV cache is managed; auto: see `kv_manager`
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(
        default=frozenset({"Load", "Run", "Run.chunk_tokens", "Admit", "Cluster.homes"}), init=False
    )
    options: Mapping[str, Option] = field(init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {"strict": {"tau": 512}, "relaxed": {"tau": 2048}}

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {"kv": kv_manager(self.kv, spread(self.cluster).values())})

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load, route and run every model at the start, and do nothing after that."""
        if event != Woke("start"):
            return
        for m, place in spread(self.cluster, self.options["kv"] == "elastic").items():
            batch = Batch(Inst(m, place))
            yield Load(batch.inst)
            yield Run(batch, chunk_tokens=self.tau)
            yield Admit(m, batch)
