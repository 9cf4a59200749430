"""GPUs that serve one model at a time, and the actions with which they change from one model to the next."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.policy.actions import Action, Evict, Load, Run
from harness.policy.types import Batch, Cluster, Gpus, Inst


@dataclass(slots=True, eq=False)
class Slot:
    """GPUs that serve one model at a time. The weights of the next model may be loaded before its turn."""

    cluster: Cluster
    gpus: Gpus
    models: list[str] = field(default_factory=list)  # in or on their way: the one that is held, then those ahead
    insts: dict[str, Inst] = field(default_factory=dict)  # named so far, by model

    @property
    def model(self) -> str | None:
        """The model whose turn it is, with weights on the GPUs or on their way to them; None before the first model."""
        return self.models[0] if self.models else None

    @property
    def node(self) -> int:
        """The node of the slot's GPUs."""
        return self.cluster.gpus[self.gpus[0]].node

    def fits(self, m: str) -> bool:
        """Tell whether the slot is the model's home or, if no homes are given, has enough GPUs for the model."""
        homes = self.cluster.homes
        return homes[m] == self.gpus if homes else self.cluster.models[m].tp <= len(self.gpus)

    def inst(self, m: str) -> Inst:
        """Return the instance of a model on the slot's first GPUs, as many as the model needs."""
        if m not in self.insts:
            self.insts[m] = Inst(m, self.gpus[: self.cluster.models[m].tp])
        return self.insts[m]

    def batch(self, m: str, tag: int = 0) -> Batch:
        """Return the batch with the number `tag` of a model's instance on this slot."""
        return Batch(self.inst(m), tag)

    def has(self, inst: Inst) -> bool:
        """Tell whether an instance is on the GPUs of this slot."""
        return isinstance(inst.place, tuple) and inst.place[0] in self.gpus

    def hold(self, m: str, way: str, *, keep: Container[str] = (), drain: bool = True) -> Iterator[Action]:
        """Make `m` the model to be served: evict other models' weights, except those in `keep`, and load those of `m`.

        Nothing is loaded if the weights of `m` are on the GPUs or on their way to them.
        """
        for old in self.models:
            if old != m and old not in keep:
                yield Evict(self.inst(old), drain)
        if m not in self.models:
            yield Load(self.inst(m), way)
        self.models = [m, *(old for old in self.models if old != m and old in keep)]

    def fetch(self, m: str, way: str) -> Iterator[Action]:
        """Load the weights of model `m` before its turn; the weights of the present model stay."""
        if m not in self.models:
            self.models.append(m)
            yield Load(self.inst(m), way)


def start(slots: Iterable[Slot], models: Sequence[str], way: str) -> Iterator[Action]:
    """Load a model into each slot, and open that model's lane.

    Slot number k gets the first model from number k on that fits the slot; after the last model comes the first.
    """
    for k, slot in enumerate(slots):
        m = next(m for m in (*models[k % len(models) :], *models) if slot.fits(m))
        yield from slot.hold(m, way)
        yield Run(slot.batch(m))
