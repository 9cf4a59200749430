"""Actions that a policy can order: eight inert values. Semantics: docs/semantics.md.

docs/vocabulary.md is written from the docstrings of these classes, with their examples, and from the comments on their
fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from harness.policy.types import Batch, Gpus, Host, Inst, Phase


@dataclass(frozen=True, slots=True)
class Load:
    """Load weights into a place; `Done(Load)` comes when they can be used. Loads get memory in order of issue.

    Example: `Load(Inst("chat", (0,)), way="sleep")`
    """

    inst: Inst  # the model and its GPUs, as many as its tensor-parallel degree
    way: str = "host"  # how the weights come, which decides the seconds


@dataclass(frozen=True, slots=True)
class Evict:
    """Free weights, never KV; `Done(Evict)` comes when their memory is free.

    Example: `Evict(Inst("chat", (0,)), drain=False)`
    """

    inst: Inst  # weights that are in or on their way
    drain: bool = True  # once all members have finished; False: at the next boundary between steps


@dataclass(frozen=True, slots=True)
class Limit:
    """Cap the growth of a model's KV on a GPU. KV that it already has is kept.

    Example: `Limit("chat", 0, kv_bytes=8 * GIB)`
    """

    model: str  # its name
    gpu: int  # its index in `Cluster.gpus`
    kv_bytes: int | None  # None: whatever is free


@dataclass(frozen=True, slots=True)
class Admit:
    """Put a request, or all later arrivals of a model, into a batch. It is served once the batch has an open lane.

    Example: `Admit("chat", Batch(Inst("chat", (0,))))`
    """

    who: int | str  # a request's id, or the name of a model
    batch: Batch  # of the same model


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up on a request: it ends as `dropped`, and misses its SLOs.

    Example: `Drop(17)`
    """

    rid: int  # a request's id


@dataclass(frozen=True, slots=True)
class Run:
    """Open a lane, in which a batch runs one phase, until a later `Run` of the same lane replaces this one.

    `Run(batch)` alone is default continuous batching. With `for_s` or `steps`, the lane is open for a limited turn; the
    event `TurnEnded` reports its end.

    Example: `Run(Batch(Inst("chat", (0,))), phase="decode", for_s=0.5, sms=66)`
    """

    batch: Batch  # with `phase`, the lane
    phase: Phase = "mixed"  # prompts and decodes in the same steps, or one of them; "mixed" excludes the others
    for_s: float | None = None  # the turn's length in seconds, from the start of its first step
    steps: int | None = None  # ... or in steps; 0 closes the lane
    seqs: int | None = None  # most members in one step
    chunk_tokens: int | None = None  # most tokens of a step; 0: whole prompts; None: as the run has it
    slice_layers: int | None = None  # for phase "prefill": layers from one boundary to the next
    op_s: float | None = None  # longest kernel in seconds: after each, attention for other GPUs gets in
    sms: int | None = None  # hard partition of each GPU, in SMs; None: compete freely


@dataclass(frozen=True, slots=True)
class Move:
    """Move the KV of a request, or of all members of a batch; `Done(Move)` comes when all of it has arrived.

    Example: `Move(17, to=Host(0))`
    """

    who: int | Batch  # a request's id, or a batch
    to: Gpus | Host | None  # None: discard the KV; it is computed again
    attend: bool = False  # it stays there, on other GPUs than its batch's, and is attended there


@dataclass(frozen=True, slots=True)
class Wake:
    """Set a timer: `Woke(key)` comes at `at_s`. A later `Wake` with the same key replaces it, and infinity cancels it.

    Example: `Wake(view.now_s + 5.0, key="look")`
    """

    at_s: float  # seconds, on the clock of `view.now_s`
    key: str = ""  # tells timers apart


Action = Load | Evict | Limit | Admit | Drop | Run | Move | Wake


def brief(action: Action) -> str:
    """Return an action as text, without the fields that have their default values."""
    given = [f"{f.name}={x!r}" for f in fields(action) if (x := getattr(action, f.name)) != f.default]
    return f"{type(action).__name__}({', '.join(given)})"
