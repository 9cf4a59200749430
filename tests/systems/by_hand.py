"""Constant costs, and views of what a test says, for policies that tests drive by hand; and runs in the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from harness.engines.machine import Config
from harness.engines.sim.engine import Sim
from harness.engines.wallclock import NoProfile
from harness.loop import system
from harness.loop.replay import replay
from harness.policy.actions import Action
from harness.policy.events import Event
from harness.policy.types import Batch, Host, Inst, Jobs
from harness.policy.view import BatchState, KvState, RequestState, Weights

EMPTY = BatchState(0, 0, 0, 0, 0, 0, 0, 0, 0.0)


@dataclass
class Flat(NoProfile):
    """Costs in seconds, the same of each model: a step, a load, a prompt and each of its tokens, a load from disk."""

    step: float
    load: float
    prompt: float = 0.0
    token: float = 0.0
    disk: float | None = None

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        return self.prompt + self.token * tokens

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        return self.step

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        return self.load if self.disk is None or not from_disk else self.disk

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        return 0.05


@dataclass
class Seen:
    """A view that answers what a test says."""

    now_s: float = 0.0
    batches: dict[str, BatchState] = field(default_factory=dict)
    room: int = 1 << 40
    used_bytes: int = 0
    made: int = 0  # tokens of every request
    state: Weights = "in"  # bytes of all weights

    def batch(self, batch: Batch) -> BatchState:
        return self.batches.get(batch.inst.model, EMPTY)

    def kv(self, model: str, gpu: int) -> KvState:
        return KvState(self.used_bytes, None, self.room)

    def request(self, rid: int) -> RequestState:
        return RequestState(None, self.made, 0, None)

    def weights(self, inst: Inst) -> Weights:
        return self.state


def told(policy: Any, event: Event, view: Seen | None = None) -> list[Action]:
    """Return a policy's answer to an event."""
    return list(policy.on(event, view or Seen()))


def ran(make: Any, config: Config, jobs: Jobs, *, log: Any = None, **fields: Any) -> tuple[pa.Table, Sim, Any]:
    """Run a system, by name or class, with the engine's options that it asks for; return rows, engine and policy."""
    make = system.find(make) if isinstance(make, str) else make
    engine = Sim(config, make(Sim(config, {"kv": "elastic"}).cluster, **fields).options)
    policy = make(engine.cluster, **fields)
    replay(policy, engine, jobs, log=log)
    return pa.Table.from_batches(engine.rows()), engine, policy


def of(actions: Iterable[Action], kind: type) -> list[Any]:
    """Return the actions of a kind."""
    return [action for action in actions if isinstance(action, kind)]
