"""An engine of constant steps in virtual time, in one file: `--engine tests/harness/engines/constant.py+step_s=0.05`.

One GPU. A step gives each member of a lane a token, whatever it computes; lanes take turns. A request holds the KV of
its last token from its first step on, so nobody is preempted. `limited=false` is a mistake for tests: it lets in
whoever comes, into whatever memory.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from harness.engines import machine as machines
from harness.engines.machine import Config, Machine, Refusal
from harness.engines.wallclock import Counts, Live, WallClock, WallView
from harness.policy.actions import Action, Admit, Drop, Limit, Load, Run
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, Woke
from harness.policy.fields import number
from harness.policy.types import Batch, Fidelity, Host, Inst, Option, Phase
from harness.policy.view import KvState, View, Weights


@dataclass(frozen=True, slots=True)
class Fields:
    """Settings by +FIELD=VALUE."""

    step_s: float = number(0.02, 0.0001, 10)
    limited: bool = True


class Constant(WallClock):
    """The books of an engine in real time, under a clock that jumps."""

    can = frozenset({"Load", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    tells = frozenset({Woke, Arrived, Prefilled, Finished, Done, Load})
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}
    fidelity: Fidelity = "simulated"
    wall_clock = exclusive = False
    measured_on: Mapping[str, str] = {}

    def __init__(self, config: Config, machine: Machine, fields: Fields) -> None:
        super().__init__(config)
        self.fields = fields
        self.cluster = machines.cluster(replace(config, gpus=1), priced=machine)
        self.loaded: list[Inst] = []
        self.limits: dict[str, int | None] = {}
        self.lanes: deque[Batch] = deque()  # the next one to step first
        self.held: dict[int, int] = {}  # bytes of KV by request
        self.flight: tuple[float, float, Batch, list[Live]] | None = None  # the step under way: from when to when

    def ready(self) -> None:
        """See Engine."""

    def close(self) -> None:
        """See Engine."""

    def view(self) -> View:
        """See Engine."""
        return Seen(self)

    def clock(self) -> float:
        """See WallClock: it moves in `poll` alone."""
        return self.now_s

    def poll(self, until_s: float) -> Event | None:
        """See Engine."""
        until_s = min(until_s, self._end_s)
        while True:
            while self._future and self._future[0][0] <= self.now_s:
                self._arrive(*heapq.heappop(self._future))
            if self._told:
                return self._told.popleft()
            if self.now_s >= until_s or self.idle():
                return None
            self.step()
            if self._told:
                continue
            ends_s = self.flight[1] if self.flight else math.inf
            next_s = min(until_s, ends_s, self._future[0][0] if self._future else math.inf)
            if next_s == math.inf:
                return None
            self.now_s = next_s
            if self.flight and next_s == ends_s:
                (begun_s, _, batch, members), self.flight = self.flight, None
                self.stepped(batch, [req for req in members if req.rid in self.live and req.batch == batch], begun_s)

    def step(self) -> None:
        """Begin a step, unless one is under way."""
        for _ in range(0 if self.flight else len(self.lanes)):
            batch = self.lanes[0]
            self.lanes.rotate(-1)
            asking = list(self.members(batch)) if batch.inst in self.loaded else ()
            members = [req for req in asking if self.takes(req)]
            if members:
                self.charge(members)
                self.flight = self.now_s, self.now_s + self.fields.step_s, batch, members
                return

    def charge(self, stepping: Iterable[Live] = ()) -> None:
        """See WallClock: from now on the requests in `stepping` count as computing, and the others as waiting."""
        rids = {req.rid for req in stepping}
        for req in self.live.values():
            self._book(req)
            waits = "admission" if req.batch is None else self.waits_for(req)
            req.cause = "compute" if req.rid in rids else waits

    def stepped(self, batch: Batch, stepping: Iterable[Live], begun_s: float) -> None:
        """Record a step from `begun_s` to now, in which each of its requests made its next token.

        The requests now hold the KV of all tokens before that one.
        """
        counts, events = self.counts.setdefault(batch, Counts()), list[Event]()
        counts.steps += 1
        counts.busy_s += self.now_s - begun_s
        for request in stepping:
            fresh = not request.kv_tokens
            counts.prefilled_tokens += request.ctx_tokens * fresh
            counts.decoded_tokens += not fresh
            request.kv_tokens = request.ctx_tokens
            self._token(request, batch)
            if request.made == request.output_tokens:
                events.append(self.end(request, "done"))
            elif fresh:
                events.append(Prefilled(request.rid, batch))
        self.tell(events)

    def takes(self, req: Live) -> bool:
        """Return whether a request holds its KV, from now on if it did not; fail one that never can."""
        model = self.cluster.models[req.model]
        need = -(-(req.prompt_tokens + req.output_tokens) * model.kv_token_bytes // model.page_bytes) * model.page_bytes
        limit, every = self.limits.get(req.model), self.cluster.gpus[0].mem_bytes - self.weight_bytes()
        if self.fields.limited and req.rid not in self.held:
            if need > (every if limit is None else limit):
                self.tell([self.end(req, "failed")])
                return False
            if need > self.room_bytes(req.model):
                return False
        self.held[req.rid] = need
        return True

    def weight_bytes(self) -> int:
        """Return the bytes of the loaded weights."""
        return sum(self.cluster.models[inst.model].weight_bytes for inst in self.loaded)

    def free_bytes(self) -> int:
        """Return the bytes that neither weights nor KV take."""
        return max(0, self.cluster.gpus[0].mem_bytes - self.weight_bytes() - sum(self.held.values()))

    def room_bytes(self, model: str) -> int:
        """Return the bytes of KV that a model may still take."""
        free, limit = self.free_bytes(), self.limits.get(model)
        return free if limit is None else max(0, min(free, limit - self.used_bytes(model)))

    def used_bytes(self, model: str) -> int:
        """Return the bytes of the KV of a model's requests."""
        return sum(self.kv_bytes(request) for request in self.live.values() if request.model == model)

    def kv_bytes(self, req: Live) -> int:
        """See WallClock."""
        return self.held.get(req.rid, 0)

    def release(self, req: Live) -> None:
        """See WallClock."""
        if self.held.pop(req.rid, 0):
            self.freed()
        req.kv_tokens = 0

    def waits_for(self, req: Live) -> str:
        """See WallClock."""
        if req.batch is None or req.batch.inst not in self.loaded:
            return "load"
        return "queue" if req.rid in self.held else "kv"

    def act(self, action: Action) -> Refusal | None:
        """See WallClock."""
        match action:
            case Load(inst, "host") if self.is_here(inst):
                if inst not in self.loaded:
                    if self.free_bytes() < self.cluster.models[inst.model].weight_bytes:
                        return "not now", f"no room for {inst.model}"
                    self.loaded.append(inst)
                if self.begun:
                    self.tell([Done(action)])
            case Limit(model, 0, kv_bytes) if model in self.cluster.models:
                self.limits[model] = kv_bytes
            case Admit(_, batch) if self.is_here(batch.inst):
                return self.admit(action)
            case Drop(rid):
                if failed := self.gone(rid):
                    return failed
                self.tell([self.end(self.live[rid], "dropped")])
            case Run(batch) if action == Run(batch) and self.is_here(batch.inst):
                if batch not in self.lanes:
                    self.lanes.append(batch)
            case _:
                return "never", "engines of constant steps cannot do that"
        return None

    def is_here(self, inst: Inst) -> bool:
        """Return whether there is such a model and such a place."""
        return inst.model in self.cluster.models and inst.place == (0,)


class Seen(WallView):
    """The state as policies see it."""

    engine: Constant

    def weights(self, inst: Inst) -> Weights:
        """See View."""
        return "in" if isinstance(inst.place, Host) or inst in self.engine.loaded else "out"

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """See View."""
        models = self.engine.cluster.models
        return tuple(Inst(m, home) for m in models) if isinstance(home, Host) else tuple(self.engine.loaded)

    def free_bytes(self, home: int | Host) -> int:
        """See View."""
        return 0 if isinstance(home, Host) else self.engine.free_bytes()

    def kv(self, model: str, gpu: int) -> KvState:
        """See View."""
        return KvState(self.engine.used_bytes(model), self.engine.limits.get(model), self.engine.room_bytes(model))

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """See View."""
        return Run(batch) if phase == "mixed" and batch in self.engine.lanes else None


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Constant:
    """Return the engine of this file; see harness/loop/engine.py."""
    return Constant(config, machine, fields)
