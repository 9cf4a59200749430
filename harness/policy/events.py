"""Events that a policy can hear: seven inert values, and an eighth for the loop alone. No event is per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.policy.actions import Action
from harness.policy.types import Batch, Phase, Request

# Why an action failed: it can never be carried out here; not until something comes free (memory, a link, a lane); or
# what it names does not exist any more, or is taken by another action.
Failed = Literal["never", "not now", "gone"]


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
    """End of a Load, Evict or Move (`failed` is None), or the refusal of any action, with its reason in words.

    No policy hears "not now": the loop keeps the action and issues it again when something comes free, until the
    policy speaks of the same thing (harness/loop/standing.py).
    """

    action: Action
    failed: Failed | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Freed:
    """Something came free that an action refused "not now" may have lacked. No policy hears it."""


Event = Woke | Arrived | Prefilled | Finished | Preempted | TurnEnded | Done | Freed
