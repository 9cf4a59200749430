"""Events that a policy can hear: seven inert values, and an eighth for the loop alone. Steps send no events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.policy.actions import Action
from harness.policy.types import Batch, Phase, Request

# Why an action failed. never: it cannot be carried out here; gone: what it names does not exist any more, or is taken
# by another action; not now: memory, a link or a lane is lacking; the loop issues it again, and no policy hears it.
Failed = Literal["never", "not now", "gone"]


@dataclass(frozen=True, slots=True)
class Woke:
    """A timer fired. "start" is the key of the very first event, before the clock starts; its loads take no time.

    Example: `Woke("start")`
    """

    key: str  # of the `Wake` that set it


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came in.

    Example: `Arrived(Request(17, "chat", 12.5, 400, 0.5, 0.05))`
    """

    request: Request  # all that is known of it


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request's prefill is complete and its first token is out; not sent if this token ends the request.

    Example: `Prefilled(17, Batch(Inst("chat", (0,))))`
    """

    rid: int  # the request's id
    batch: Batch  # of which it is a member


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended, and has left its batch.

    Example: `Finished(17, Batch(Inst("chat", (0,))), "done")`
    """

    rid: int  # the request's id
    batch: Batch | None  # the one that it ran in last; None: it was in none
    state: Literal["done", "dropped", "failed"]  # failed: it could never fit, or its server died


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine took a request's KV pages because memory was short; the request stays in its batch.

    Example: `Preempted(17, Batch(Inst("chat", (0,))))`
    """

    rid: int  # the request's id
    batch: Batch  # of which it is a member


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A lane's turn is over, and the lane is closed.

    Example: `TurnEnded(Batch(Inst("chat", (0,))), "decode", "time", 12, 0.503)`
    """

    batch: Batch  # with `phase`, the lane
    phase: Phase  # as in its `Run`
    why: Literal["time", "steps", "empty", "stuck"]  # empty: no member for it; stuck: none can step, nor will by itself
    steps: int  # of the turn
    ran_s: float  # seconds since its first step began


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a Load, Evict or Move (`failed` is None), or the refusal of any action, with its reason in words.

    Policies do not receive the refusal "not now". The loop keeps such an action and issues it again when something
    comes free, until the policy gives a newer action on the same subject (harness/loop/standing.py). All other refusals
    are sent. A successful end is sent if the action's type is in `hears`.

    Example: `Done(Load(Inst("chat", (0,))), "never", "chat needs 90.1 GiB, more than the GPU has")`
    """

    action: Action  # as the policy ordered it
    failed: Failed | None = None  # None: it succeeded
    why: str = ""  # in words


@dataclass(frozen=True, slots=True)
class Freed:
    """Memory came free, or another resource that an action refused "not now" may lack. No policy gets this event."""


Event = Woke | Arrived | Prefilled | Finished | Preempted | TurnEnded | Done | Freed
