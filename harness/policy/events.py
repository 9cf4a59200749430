"""What a policy can hear: seven inert values. No event is per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.policy.actions import Action
from harness.policy.types import Batch, Phase, Request


@dataclass(frozen=True, slots=True)
class Woke:
    """A timer fired; "start" is the first event of all."""

    key: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came in."""

    request: Request


@dataclass(frozen=True, slots=True)
class Prefilled:
    """KV whole, first token out; not sent when that token ends the request."""

    rid: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Finished:
    """A request reached its end; `batch` is where it ran last."""

    rid: int
    batch: Batch | None
    state: Literal["done", "dropped", "failed"]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine took a request's pages for want of memory."""

    rid: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A lane's turn is over."""

    batch: Batch
    phase: Phase
    why: Literal["time", "steps", "empty", "stuck"]
    steps: int
    ran_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """End of a Load, Evict or Move (`failed` is None), or the refusal of any action."""

    action: Action
    failed: str | None = None


Event = Woke | Arrived | Prefilled | Finished | Preempted | TurnEnded | Done
