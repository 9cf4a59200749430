"""Dedicated serving: every model has GPUs for itself. The base of every scaled SLO, and the cost to beat.

It runs on as many GPUs as its models need, whatever number other systems get; tables and figures state the number.
Where GPUs are of several kinds, a model gets those with the least memory that hold it with one longest request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.placement import apart, gpus_apart
from harness.policy.types import Batch, Cluster, Inst, Model, Option
from harness.policy.view import View

DECISION_S = 0.0  # decides once, before the start


@dataclass(frozen=True, slots=True)
class Dedicated:
    """A policy that gives each model in turn the next free GPUs for itself."""

    cluster: Cluster
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit"}), init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    mixed: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    @staticmethod
    def gpus_needed(models: Mapping[str, Model], node_gpus: int) -> int:
        """Return the number of GPUs with which each model has GPUs for itself, within one node."""
        return gpus_apart(models, node_gpus)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Load, route and run every model on its own GPUs at the start, and do nothing after that."""
        if event != Woke("start"):
            return
        for m, place in apart(self.cluster).items():
            batch = Batch(Inst(m, place))
            yield Load(batch.inst)
            yield Run(batch)
            yield Admit(m, batch)
