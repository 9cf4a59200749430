"""The record of a run: the causes of each request's waits over time, and the use of lanes, links and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import Batch, Gpus, Host, Inst

DOING = ("admission", "load", "transfer", "queue", "prefill", "decode")  # what a request does in a stretch of its time
ADMISSION, LOAD, TRANSFER, QUEUE, PREFILL, DECODE = range(6)
# kinds of a stretch's seconds, see Stretch
SECONDS = ("admission", "load", "transfer", "queue", "kv", "closed", "compute", "time_slice", "contention")
Link = Literal["from host", "to host", "to GPUs of its node", "to other nodes", "disk"]
# those of a GPU, in the kernel's order
LINKS: tuple[Link, ...] = ("from host", "to host", "to GPUs of its node", "to other nodes")
_, _, _, _, KV, CLOSED, COMPUTE, TIME_SLICE, CONTENTION = range(9)
KINDS = ("load", "swap out", "swap in", "move")  # indexed by the kernel's code of a transfer


class Stretch(NamedTuple):
    """An interval in which a request awaits admission, awaits weights, is in transfer, awaits a step, or is in steps.

    Its seconds by kind (SECONDS) sum to its length. A stretch in a queue ends at the latest when a step includes the
    request. Seconds of the kind "closed" passed while the request's lane was closed. A prefill or decode stretch covers
    consecutive steps without a gap; after a gap a new stretch begins.
    """

    request: int
    start_s: float
    end_s: float
    doing: str  # is one of DOING
    inst: Inst | None  # its batch's instance; None: it is in no batch
    seconds: Mapping[str, float]  # those above 0
    facts: Mapping[str, float]  # figures of the wait, if the request is looked at


class Step(NamedTuple):
    """A step of a lane, or a span of decode steps."""

    batch: Batch
    decode_lane: bool  # its lane only decodes
    phase: str  # prefill, decode or mixed
    start_s: float
    end_s: float
    steps: int
    decodes: int  # members that decode in it
    prompts: int  # members with a piece of their prompt in it
    tokens: int  # prompt tokens in it
    sms: int  # SMs of its partition; -1: all
    solo_s: float


class Turn(NamedTuple):
    """A turn of a lane, from the beginning of the turn's first step to the turn's end."""

    batch: Batch
    phase: str
    start_s: float
    end_s: float
    steps: int


@dataclass(slots=True)
class Transfer:
    """A transfer of weights or KV; the time of a stage that it did not reach is NaN."""

    kind: str  # is one of KINDS
    model: str
    source: Gpus | Host | None  # KV comes from there; None: weights, or a move that has not begun
    to: Gpus | Host
    request: int  # whose KV it is; -1: weights, or a move that has not begun
    size_bytes: int
    asked_s: float
    granted_s: float = math.nan  # when it got its memory
    moved_s: float = math.nan  # when its last part left the links
    end_s: float = math.nan
    done: bool = False  # else it was withdrawn, or the run ended


class Carried(NamedTuple):
    """An interval in which a link carried a transfer."""

    link: int  # LINKS of each GPU, then four rows a host, of which the first is its disk
    transfer: int  # index into the trace's transfers
    start_s: float
    end_s: float


class Memory(NamedTuple):
    """A GPU's memory in use, from `at_s` until that GPU's next record."""

    gpu: int
    at_s: float
    weights_bytes: int  # with the memory of processes
    kv_bytes: int  # with the blocks that spans hold for steps to come


@dataclass(slots=True)
class Trace:
    """The record of a run; times are in seconds from the window's start.

    Stretches, steps, turns and the use of links are in order of their ends. Transfers and memory are in order of their
    beginnings.
    """

    start_s: float
    end_s: float = math.nan
    gpu_bytes: tuple[int, ...] = ()
    sms: int = 0  # SMs of each GPU
    stretches: list[Stretch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    arrival_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # at the engine, by request
    first_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # first token made; NaN: never
    done_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


def link_of(link: int, gpus: int) -> tuple[int | Host, Link]:
    """Return the GPU or host to which a link belongs, and the link's name at that GPU or host."""
    whose, which = divmod(link, 4)
    if whose >= gpus:
        return Host(whose - gpus), "disk"
    return whose, LINKS[which]
