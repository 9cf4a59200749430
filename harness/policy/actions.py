"""Actions that a policy can order: eight inert values. Semantics: docs/semantics.md."""

from __future__ import annotations

from dataclasses import dataclass, fields

from harness.policy.types import Batch, Gpus, Host, Inst, Phase


@dataclass(frozen=True, slots=True)
class Load:
    """Bring weights in by a rung of the cost ladder (`way`); `Done(Load)` when they can be used."""

    inst: Inst
    way: str = "host"


@dataclass(frozen=True, slots=True)
class Evict:
    """Free weights, never KV: after the members finished (`drain`), or at the next boundary."""

    inst: Inst
    drain: bool = True


@dataclass(frozen=True, slots=True)
class Limit:
    """Cap the growth of a model's KV on a GPU; None: whatever is free."""

    model: str
    gpu: int
    kv_bytes: int | None


@dataclass(frozen=True, slots=True)
class Admit:
    """Make a request (by id) or all later arrivals of a model (by name) members of a batch."""

    who: int | str
    batch: Batch


@dataclass(frozen=True, slots=True)
class Drop:
    """Give a request up; it ends `dropped`."""

    rid: int


@dataclass(frozen=True, slots=True)
class Run:
    """Standing order to a lane, in force until a later one replaces it.

    `Run(batch)` alone is default continuous batching. `steps=0` closes the lane.
    """

    batch: Batch
    phase: Phase = "mixed"
    for_s: float | None = None  # the turn's length from the start of its first step
    steps: int | None = None  # ... or in steps
    seqs: int | None = None  # most members in one step
    chunk_tokens: int | None = None  # grain of a step; 0: whole prompts
    slice_layers: int | None = None  # grain of a prefill, of phase "prefill": a boundary every so many layers
    op_s: float | None = None  # grain of kernels: after each, others' attention gets in
    sms: int | None = None  # hard partition; None: compete freely


@dataclass(frozen=True, slots=True)
class Move:
    """Move the KV of a request, or of all members of a batch; None discards it for recompute."""

    who: int | Batch
    to: Gpus | Host | None
    attend: bool = False  # it stays there, on other GPUs than its batch's, and is attended there


@dataclass(frozen=True, slots=True)
class Wake:
    """A timer: `Woke(key)` at `at_s`. The same key replaces, infinity cancels."""

    at_s: float
    key: str = ""


Action = Load | Evict | Limit | Admit | Drop | Run | Move | Wake


def brief(action: Action) -> str:
    """Return an action as text, without the fields that stand at their defaults."""
    given = [f"{f.name}={x!r}" for f in fields(action) if (x := getattr(action, f.name)) != f.default]
    return f"{type(action).__name__}({', '.join(given)})"
