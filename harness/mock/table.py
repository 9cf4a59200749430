"""A mock's models with the latency of a cost table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from harness.engines import machine
from harness.mock.agenda import Agenda
from harness.mock.model import Served
from harness.mock.pacing import Gpu, Pacing, ns
from harness.policy.types import Host, Inst, Shape

# By which weights come back from a level of sleep, as the ladder of loads names them: the first that a table has.
WAYS = {1: ("sleep", "host"), 2: ("disk", "cold")}


class Table:
    """Prices of models on a kind of GPU. A model of a higher tensor-parallel degree is served by a group of such."""

    def __init__(self, models: Iterable[tuple[str, Shape, int]], gpu: str, host: str, table: str | None) -> None:
        self._models = tuple(machine.Served(name, shape, tp) for name, shape, tp in models)
        config = machine.Config(models=self._models, gpu=gpu, host=host, table=table)
        priced = machine.machine(config)
        self._profile, self._ladder = machine.profile(config, priced), priced.ladder

    def served(self) -> list[Served]:
        """Return the models with the times to put them to sleep and to wake them.

        Asleep at level 1 their weights are in host memory; at level 2 they are gone.
        """
        models = []
        for model in self._models:
            inst = _inst(model)
            out_s = self._profile.move_s(self._profile.weight_bytes[inst.model, model.tp], 0, Host())
            ways = {level: next((w for w in ways if w in self._ladder), ways[0]) for level, ways in WAYS.items()}
            wakes = {level: ns(self._profile.load_s(inst, way)) for level, way in ways.items()}
            models.append(Served(model.name, model.shape.max_tokens, {0: 0, 1: ns(out_s), 2: 0}, {0: 0, **wakes}))
        return models

    def pacing(self, gpus: int, batch_cap: int) -> Callable[[Agenda, int], Pacing]:
        """Deal the models over so many GPUs in turn."""
        made: dict[int, Gpu] = {}

        def pacing(agenda: Agenda, k: int) -> Pacing:
            gpu = made.setdefault(k % gpus, Gpu(agenda, batch_cap))
            inst = _inst(self._models[k])
            return gpu.lane(partial(self._profile.prefill_s, inst), partial(self._profile.step_s, inst))

        return pacing


def _inst(model: machine.Served) -> Inst:
    return Inst(model.name, tuple(range(model.tp)))
