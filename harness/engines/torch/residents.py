"""Weights that come, are in, and leave: the ladder of loads as it is done here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.engines.machine import Refusal
from harness.engines.torch.core import Core
from harness.engines.torch.processes import Seat
from harness.engines.torch.wire import Bytes
from harness.policy.actions import Evict, Load
from harness.policy.events import Done
from harness.policy.types import Host, Inst
from harness.policy.view import Weights


class Way(NamedTuple):
    """A rung of the ladder of loads, as it is done here."""

    source: Literal["host", "disk"] = "host"
    starts: bool = False  # a process of its own, with all that it loads
    spread: bool = False  # equal parts over every device's link
    part: float = 1.0  # of the link's rate that its loader reaches: 2.83 of 55 GB/s (Aegaeon; tables/hosts.toml)


WAYS: Mapping[str, Way] = {
    "host": Way(),
    "pool": Way(),
    "sleep": Way(),
    "parallel": Way(spread=True),
    "disk": Way("disk"),
    "sleep2": Way("disk"),
    "cold": Way("disk", starts=True),
    "naive": Way(part=0.05),
    "reinit": Way(starts=True, part=0.05),
}


@dataclass(slots=True, eq=False)
class Held:
    """An instance's weights on a device."""

    granules: list[int]
    state: Weights = "loading"
    load: Load | None = None
    evict: Evict | None = None  # under which it leaves
    copies: set[int] = field(default_factory=set)
    seat: Seat | None = None  # of its own


class Residents:
    """The instances of an engine that are in or under way, in order of Load."""

    def __init__(self, engine: Core) -> None:
        self.engine = engine
        self.held: dict[Inst, Held] = {}
        self.before: dict[Inst, list[int]] = {}  # granules of those that have left
        self.copies: dict[int, Inst] = {}  # under way, by number
        self.claims: dict[int, int] = {}  # bytes by device that refused loads wait for: closed to prompts
        self.loads = self.evicts = 0

    def load(self, action: Load) -> Refusal | None:
        """Start a Load; the reason where it cannot be."""
        inst, way = action.inst, WAYS[action.way]
        (device,) = inst.place if not isinstance(inst.place, Host) else (0,)
        held, size = self.held.get(inst), self.engine.nets[inst.model].weight_bytes
        if held is not None:
            if held.state == "leaving":
                held.state = "in"
                self.engine.refuse(Done(held.evict or action, "gone", "loaded again"))
                held.evict = None
            if held.state == "in" and self.engine.begun:
                self.engine.tell([Done(action)])
            return None
        arena = self.engine.arenas[device]
        if arena.whole(size) > arena.size:
            return "never", f"{inst.model} is larger than the device"
        if arena.whole(size) > arena.free_bytes:
            self.claims[device] = self.claims.get(device, 0) + arena.whole(size)
            return "not now", f"no room for {inst.model}"
        held = self.held[inst] = Held(arena.take(size, self.before.get(inst, ())), load=action)
        if way.starts:
            held.seat = self.engine.workers.seat(device, inst.model, "own", cold=True)
        elif self.engine.layout == "pair":
            for phase in ("prefill", "decode"):
                self.engine.workers.seat(device, inst.model, phase)
        else:
            self.engine.workers.seat(device, *(() if self.engine.layout == "gpu" else (inst.model,)))
        parts = self._copy_parts(inst, held, way)
        if not self.engine.begun:
            self.engine.workers.fill(parts)
            held.state = "in"
            return None
        links = [f"disk{device}"] if way.source == "disk" else [f"h2d{device}"]
        links = [f"h2d{g}" for g in range(self.engine.config.gpus)] if way.spread else links
        for k, link in enumerate(links):
            number = self.engine.copy(link, parts[k :: len(links)], part=way.part)
            if number is not None:
                held.copies.add(number)
                self.copies[number] = inst
        self.loads += 1
        return None

    def _copy_parts(self, inst: Inst, held: Held, way: Way) -> list[Bytes]:
        """Return the copies of a model's weights to the memory that it has taken, in parts."""
        index, place = list(self.engine.nets).index(inst.model), inst.place
        source = len(self.engine.arenas) + index + (len(self.engine.nets) if way.source == "disk" else 0)
        size, at, parts = self.engine.nets[inst.model].weight_bytes, 0, []
        assert not isinstance(place, Host)
        part = self.engine.kind.part
        for offset, length in self.engine.arenas[place[0]].runs(held.granules):
            for a in range(0, length, part):
                n = min(part, length - a, size - at)
                if n > 0:
                    parts.append((source, at, place[0], offset + a, n))
                at += n
        return parts

    def landed(self, insts: Iterable[Inst]) -> None:
        """Weights whose copies, and whose process, are there can be used."""
        for inst in insts:
            held = self.held[inst]
            if held.state == "loading" and not held.copies and (held.seat is None or held.seat.ready):
                held.state = "in"
                if held.load is not None:
                    self.engine.tell([Done(held.load)])
                self.engine.freed()  # an eviction was refused while they were on their way

    def copied(self, number: int) -> bool:
        """Note that a copy is done; False where it is none of weights."""
        if (inst := self.copies.pop(number, None)) is None:
            return False
        self.held[inst].copies.discard(number)
        self.landed([inst])
        return True

    def evict(self, action: Evict) -> Refusal | None:
        """Let weights leave; the reason where they cannot."""
        held = self.held.get(action.inst)
        if held is None:
            return "gone", "its weights are not in"
        if held.state == "loading":
            return "not now", "its weights are still on their way"
        if held.evict is not None:
            if held.evict.drain <= action.drain:
                return "gone", "it is leaving already"
            self.engine.refuse(Done(held.evict, "gone", "evicted at its next boundary instead"))
        held.state, held.evict = "leaving", action
        self.leave_if_due(action.inst)
        return None

    def leave_if_due(self, inst: Inst) -> None:
        """Free weights that are to leave: once no member is left, or once no step of theirs is in flight."""
        held = self.held.get(inst)
        if held is None or held.evict is None:
            return
        if held.evict.drain and any(members for batch, members in self.engine.batches.items() if batch.inst == inst):
            return
        if any(
            seat.step is not None and seat.step.lane.batch.inst == inst for seat in self.engine.workers.seats.values()
        ):
            return
        for step in [
            lane.step for lane in self.engine.lanes.values() if lane.batch.inst == inst and lane.step is not None
        ]:
            self.engine.retired(step)  # between two slices: what they did is lost
            step.lane.step = None
        assert not isinstance(inst.place, Host)
        (device,) = inst.place
        arena = self.engine.arenas[device]
        for seat in self.engine.workers.seats.values():
            if seat.device == device and inst.model in seat.weights:
                seat.weights.remove(inst.model)
                seat.send("drop", inst.model, len(held.granules) * arena.granule)
        arena.give(held.granules)
        self.before[inst] = held.granules
        del self.held[inst]
        if held.seat is not None and self.engine.layout != "kept":
            self.engine.unseat(held.seat)
        self.evicts += self.engine.begun
        self.engine.tell([Done(held.evict)])
        self.engine.freed()
