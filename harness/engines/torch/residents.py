"""The weights of instances: how this engine loads them, by each way to load, and evicts them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from harness.engines.machine import Refusal
from harness.engines.torch.core import Core
from harness.engines.torch.kind import WAYS, Way
from harness.engines.torch.processes import WorkerProcess
from harness.engines.torch.wire import Bytes
from harness.policy.actions import Evict, Load
from harness.policy.events import Done
from harness.policy.types import Host, Inst
from harness.policy.view import Weights


@dataclass(slots=True, eq=False)
class Resident:
    """The weights of an instance that are on a device or being copied to it."""

    load: Load
    granules: list[int]
    state: Weights = "loading"
    evict: Evict | None = None  # the action under which it leaves
    copies: int = 0  # under way
    worker: WorkerProcess | None = None  # a process of its own


class Residents:
    """The instances of an engine whose weights are on a device or being copied to it, in the order of their loads."""

    def __init__(self, engine: Core) -> None:
        self.engine = engine
        self.by_inst: dict[Inst, Resident] = {}
        self.last_granules: dict[Inst, list[int]] = {}  # those of evicted instances, for reuse
        self.claims: dict[int, int] = {}  # bytes by device that refused loads wait for; new prompts leave them free
        self.loads = self.evicts = 0

    def load(self, action: Load) -> Refusal | None:
        """Start a Load; return the reason if it is refused, else None."""
        inst, way = action.inst, WAYS[action.way]
        (device,) = inst.place if not isinstance(inst.place, Host) else (0,)
        if (resident := self.by_inst.get(inst)) is not None:
            self._keep(resident, action)
            return None
        arena, size = self.engine.arenas[device], self.engine.nets[inst.model].weight_bytes
        if arena.whole(size) > arena.size:
            return "never", f"{inst.model} is larger than the device"
        if arena.whole(size) > arena.free_bytes:
            self.claims[device] = self.claims.get(device, 0) + arena.whole(size)
            return "not now", f"no room for {inst.model}"
        resident = self.by_inst[inst] = Resident(action, arena.take(size, self.last_granules.get(inst, ())))
        if way.starts:
            resident.worker = self.engine.workers.worker(device, inst.model, "own", cold=True)
        else:
            for phase in [["prefill"], ["decode"]] if self.engine.layout == "pair" else [[]]:
                self.engine.worker(device, inst.model, *phase)
        parts = self._copy_parts(inst, resident, way)
        if not self.engine.begun:
            self.engine.workers.fill(parts)
            resident.state = "in"
            return None
        links = [f"disk{device}"] if way.source == "disk" else [f"h2d{device}"]
        links = [f"h2d{g}" for g in range(self.engine.config.gpus)] if way.spread else links
        for k, link in enumerate(links):
            if some := parts[k :: len(links)]:
                resident.copies += 1
                self.engine.copy(link, some, partial(self._copied, resident), part=way.part)
        self.loads += 1
        return None

    def _keep(self, resident: Resident, action: Load) -> None:
        """Accept a Load of weights that are on the device or being copied to it; cancel an Evict of these weights."""
        if resident.state == "leaving":
            resident.state = "in"
            self.engine.refuse(Done(resident.evict or action, "gone", "loaded again"))
            resident.evict = None
        if resident.state == "in" and self.engine.begun:
            self.engine.tell([Done(action)])

    def _copy_parts(self, inst: Inst, resident: Resident, way: Way) -> list[Bytes]:
        """Return the copies, part by part, that load an instance's weights into the granules of `resident`."""
        index, place = list(self.engine.nets).index(inst.model), inst.place
        source = len(self.engine.arenas) + index + (len(self.engine.nets) if way.source == "disk" else 0)
        size, at, parts = self.engine.nets[inst.model].weight_bytes, 0, []
        assert not isinstance(place, Host)
        part = self.engine.kind.part
        for offset, length in self.engine.arenas[place[0]].runs(resident.granules):
            for a in range(0, length, part):
                n = min(part, length - a, size - at)
                if n > 0:
                    parts.append((source, at, place[0], offset + a, n))
                at += n
        return parts

    def landed(self) -> None:
        """Report each load whose copies have ended and whose worker is ready; the state of its weights becomes "in"."""
        for resident in list(self.by_inst.values()):
            ready = resident.worker is None or resident.worker.ready
            if ready and resident.state == "loading" and not resident.copies:
                resident.state = "in"
                self.engine.tell([Done(resident.load)])
                self.engine.freed()  # an eviction may have been refused while they were on their way

    def _copied(self, resident: Resident) -> None:
        resident.copies -= 1
        self.landed()

    def evict(self, action: Evict) -> Refusal | None:
        """Start an Evict; return the reason if it is refused, else None."""
        resident = self.by_inst.get(action.inst)
        if resident is None:
            return "gone", "its weights are not in"
        if resident.state == "loading":
            return "not now", "its weights are still on their way"
        if resident.evict is not None:
            if resident.evict.drain <= action.drain:
                return "gone", "it is leaving already"
            self.engine.refuse(Done(resident.evict, "gone", "evicted at its next boundary instead"))
        resident.state, resident.evict = "leaving", action
        self.leave_if_due(action.inst)
        return None

    def leave_if_due(self, inst: Inst) -> None:
        """Free the weights of an instance that is being evicted, unless a step of its batches is being computed.

        If the Evict drains, they are freed only once its batches have no members left.
        """
        resident = self.by_inst.get(inst)
        if resident is None or resident.evict is None:
            return
        if resident.evict.drain and any(
            members for batch, members in self.engine.batches.items() if batch.inst == inst
        ):
            return
        lanes = [lane for lane in self.engine.lanes.values() if lane.batch.inst == inst]
        steps = [lane.step for lane in lanes if lane.step is not None]
        if any(step.worker.step is step for step in steps):
            return
        for step in steps:
            self.engine.retired(step)  # the step is between two slices, and its work is lost
            step.lane.step = None
        assert not isinstance(inst.place, Host)
        (device,) = inst.place
        arena = self.engine.arenas[device]
        for worker in self.engine.workers.processes.values():
            if worker.device == device and inst.model in worker.weights:
                worker.weights.remove(inst.model)
                worker.send("drop", inst.model, len(resident.granules) * arena.granule)
        arena.give(resident.granules)
        self.last_granules[inst] = resident.granules
        del self.by_inst[inst]
        if resident.worker is not None and self.engine.layout != "kept":
            self.engine.dismiss(resident.worker)
        self.evicts += self.engine.begun
        self.engine.tell([Done(resident.evict)])
        self.engine.freed()
