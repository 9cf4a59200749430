"""Lanes with their turns and steps, and how the members of a batch form a step (docs/semantics.md, "A step")."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.engines.torch.core import Core
from harness.engines.torch.pages import Account
from harness.engines.torch.processes import WorkerProcess
from harness.engines.wallclock import Live
from harness.policy.actions import Run
from harness.policy.events import Event
from harness.policy.types import Batch, Host, Phase


@dataclass(slots=True)
class Turn:
    """The limits of a lane's turn: `for_s` seconds after its first step begins, or `most` steps."""

    for_s: float | None
    most: int | None
    steps: int = 0
    began_s: float | None = None

    @property
    def until_s(self) -> float:
        """The time at which the turn's `for_s` seconds are over; infinite without `for_s` or before the first step."""
        return math.inf if self.for_s is None or self.began_s is None else self.began_s + self.for_s

    def over(self, now_s: float) -> Literal["steps", "time"] | None:
        """Return the limit that the turn has reached; None if it has reached neither."""
        if self.most is not None and self.steps >= self.most:
            return "steps"
        return "time" if now_s >= self.until_s else None


class MemberPart(NamedTuple):
    """The part of a step that computes tokens of one batch member."""

    request: Live
    cached_tokens: int
    tokens: int  # those that the step computes


@dataclass(slots=True, eq=False)
class Step:
    """A step that is being computed, or that waits between two of its slices."""

    number: int
    lane: Lane
    worker: WorkerProcess
    order: Run  # the order under which it began
    turn: Turn | None
    parts: list[MemberPart]
    layers: int = 0  # layers that are done or in flight
    begun_s: float = 0.0
    to_free: list[tuple[Account, list[int]]] = field(default_factory=list)  # blocks of members that left meanwhile


class TimedStep(NamedTuple):
    """A step that has ended, with the times that calibrations read."""

    model: str
    parts: tuple[tuple[int, int], ...]  # each member's cached tokens, and those computed
    ordered_s: float
    ended_s: float
    kernels_s: float | None = None  # seconds of its kernels back to back, if the engine repeats them


@dataclass(slots=True, eq=False)
class Lane:
    """A lane of a batch: the `Run` order that it follows, its turn, and its step."""

    batch: Batch
    phase: Phase
    order: Run | None = None
    turn: Turn | None = None
    step: Step | None = None
    last: int = 0  # the number of its last step; the lane with the lowest goes first


def form_step(engine: Core, lane: Lane, order: Run) -> tuple[list[MemberPart], list[Event]]:
    """Return the parts of a lane's next step, and events of members that failed or were preempted for lack of room."""
    c, batch = engine.config, lane.batch
    place = batch.inst.place
    assert not isinstance(place, Host)
    cap = c.batch_cap if order.seqs is None else min(order.seqs, c.batch_cap)
    chunk = c.chunk_tokens if order.chunk_tokens is None else order.chunk_tokens
    members = [request for request in engine.members(batch) if request.rid not in engine.stepping]
    members = [request for request in members if request.rid not in engine.moves.moving]
    events, parts = list[Event](), list[MemberPart]()
    swapped = any(request.rid in engine.kv and engine.kv[request.rid].swapped for request in engine.members(batch))
    if c.admission == "chunk" and lane.phase != "decode" and not swapped:
        decoding = sum(request.kv_tokens > 0 for request in members) if lane.phase == "mixed" else 0
        budget = max(0, chunk - min(decoding, cap)) if chunk else c.prefill_tokens
        _grow(engine, members, budget, events, whole=not chunk)
    if lane.phase != "decode" and not chunk and not swapped and not events:
        parts = _prompts(engine, members, cap, c.prefill_tokens, events, whole=True)
    if lane.phase != "prefill" and not parts:
        decodes = [request for request in members if request.kv_tokens and engine.attendable(request, place)][:cap]
        parts += _decodes(engine, members, decodes, events)
    if lane.phase != "decode" and chunk and not events and not swapped:
        parts += _prompts(engine, members, cap - len(parts), chunk - len(parts), events, whole=False)
    return parts, events


def _decodes(engine: Core, members: list[Live], decodes: list[Live], events: list[Event]) -> list[MemberPart]:
    """Return the parts of those decodes that have a block for their next token; each part is one token.

    If a decode finds no free block, a request of its model with KV on the device is preempted: the one that was
    admitted last. While KV of this model is moving to or from the device, nobody is preempted. If no other request of
    the model has KV on the device, the decode fails.
    """
    for request in decodes:
        while request.kv_tokens and not engine.hold(request, request.ctx_tokens):
            kv = engine.kv[request.rid]
            if kv.account.used_blocks == len(kv.blocks):
                events.append(engine.end(request, "failed"))
                break
            if engine.moves.in_transit(kv.account):
                break  # a swap is in flight; evict nobody until it completes
            events.append(engine.preempt(_latest(engine, members, kv.account)))
    return [
        MemberPart(request, request.ctx_tokens - 1, 1)
        for request in decodes
        if request.rid in engine.live
        and request.kv_tokens
        and request.rid not in engine.moves.moving
        and engine.hold(request, request.ctx_tokens)
    ]


def _latest(engine: Core, members: list[Live], account: Account) -> Live:
    """Return the member to preempt when blocks are short: the last admitted one that has KV in the account."""
    return [v for v in members if v.rid in engine.kv and engine.kv[v.rid].account is account][-1]


def _tokens(engine: Core, request: Live, done: int) -> int:
    """Return the number of tokens for which a prompt needs blocks once `done` of its tokens are computed.

    With `admission=output`, these are the prompt and the whole output. With `admission=chunk`, they are the `done`
    tokens, as long as the prompt is not complete. In all other cases, they are the context and one more token.
    """
    if engine.config.admission == "output":
        return request.prompt_tokens + request.output_tokens
    return done if engine.config.admission == "chunk" and done < request.ctx_tokens else request.ctx_tokens + 1


def _grow(engine: Core, members: list[Live], budget: int, events: list[Event], *, whole: bool) -> None:
    """Take blocks for the next pieces of prompts that already have KV.

    If a piece finds no free block, the request that was admitted last is preempted.
    """
    prompts = [request for request in members if not request.kv_tokens and request.rid in engine.kv]
    for request in prompts:
        kv = engine.kv.get(request.rid)
        if kv is None or budget <= 0:
            return
        rest = request.ctx_tokens - kv.tokens
        if whole and request is not prompts[0] and rest > budget:
            return
        count = rest if whole else min(rest, budget)
        while not engine.hold(request, _tokens(engine, request, kv.tokens + count)):
            if engine.moves.in_transit(kv.account):
                return  # a swap is in flight; evict nobody until it completes
            victim = _latest(engine, members, kv.account)
            events.append(engine.preempt(victim))
            if victim is request:
                return
        budget -= count


def _prompts(
    engine: Core, members: list[Live], cap: int, budget: int, events: list[Event], *, whole: bool
) -> list[MemberPart]:
    """Return a step's prompt pieces or, with `whole`, its whole prompts: at most `cap` parts and about `budget` tokens.

    Stop at the first prompt that does not fit.
    """
    parts, remaining = list[MemberPart](), budget
    for request in members:
        if request.kv_tokens or request.rid not in engine.live:
            continue
        if len(parts) >= cap or remaining <= 0:
            break
        if request.rid not in engine.kv:
            if not engine.could_hold(request):
                events.append(engine.end(request, "failed"))
                continue
            done = request.ctx_tokens if whole else min(remaining, request.ctx_tokens)
            if (whole and request.ctx_tokens > remaining < budget) or not engine.enter(
                request, _tokens(engine, request, done)
            ):
                break
        kv = engine.kv[request.rid]
        start, most = kv.tokens, len(kv.blocks) * kv.account.pages.block_tokens - kv.tokens
        count = request.ctx_tokens - start if whole else min(remaining, request.ctx_tokens - start)
        if most < count and (whole or most == 0):
            break
        count = min(count, most)
        parts.append(MemberPart(request, start, count))
        remaining -= count
    return parts


def turn_end_reason(engine: Core, lane: Lane) -> Literal["time", "steps", "empty", "stuck"] | None:
    """Return the reason why the turn of a lane is over; None if it is not over."""
    turn, inst = lane.turn, lane.batch.inst
    assert turn is not None
    if why := turn.over(engine.now_s):
        return why
    if lane.step is not None:
        return None
    members = engine.members(lane.batch)
    phase_members = [
        request for request in members if lane.phase == "mixed" or bool(request.kv_tokens) == (lane.phase == "decode")
    ]
    if not phase_members:
        return "empty"
    resident = engine.residents.by_inst.get(inst)
    if resident is None or (resident.evict is not None and not resident.evict.drain):
        return "stuck"
    if resident.state == "loading" or any(
        request.rid in engine.moves.moving or request.rid in engine.stepping for request in phase_members
    ):
        return None
    assert not isinstance(inst.place, Host)
    if all(request.kv_tokens and not engine.attendable(request, inst.place) for request in phase_members):
        return "stuck"
    device = inst.place[0]
    busy = any(
        worker.device == device and (worker.step is not None or not worker.ready)
        for worker in engine.workers.processes.values()
    )
    moving = bool(engine.moves.moving) or any(
        weights.state == "loading" and i.place == inst.place for i, weights in engine.residents.by_inst.items()
    )
    return None if busy or moving else "stuck"
