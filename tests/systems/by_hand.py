"""Constant costs, and views of what a test says, for policies that tests drive by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.engines.wallclock import NoProfile
from harness.policy.actions import Action
from harness.policy.types import Batch, Host, Inst
from harness.policy.view import BatchState, KvState

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

    def batch(self, batch: Batch) -> BatchState:
        return self.batches.get(batch.inst.model, EMPTY)

    def kv(self, model: str, gpu: int) -> KvState:
        return KvState(0, None, self.room)


def of(actions: Iterable[Action], kind: type) -> list[Any]:
    """Return the actions of a kind."""
    return [action for action in actions if isinstance(action, kind)]
