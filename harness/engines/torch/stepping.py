"""The `Run` orders, turns and steps of lanes, and the workers that compute the steps; lanes.py forms the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from harness.engines.machine import Config, Refusal, unfit
from harness.engines.torch.core import Core
from harness.engines.torch.lanes import Lane, Step, TimedStep, Turn, form_step, turn_end_reason
from harness.engines.torch.moves import Transfer
from harness.engines.torch.processes import WorkerProcess
from harness.engines.torch.setting import Fields
from harness.engines.torch.wire import Order, Part, Stepped
from harness.engines.wallclock import Counts, Live
from harness.policy.actions import Run
from harness.policy.events import Event, Prefilled, TurnEnded
from harness.policy.types import Batch, Host, Option


class Stepping(Core):
    """The part of the engine that starts and ends the turns and steps of lanes."""

    def __init__(self, config: Config, options: Mapping[str, Option], fields: Fields) -> None:
        super().__init__(config, options, fields)
        self.lanes: dict[tuple[Batch, bool], Lane] = {}  # keyed by batch, and whether the lane is for decodes alone
        self.stepping: dict[int, Step] = {}  # keyed by request: the step whose result it waits for
        self.generated: dict[int, list[int]] = {}  # output tokens by request
        self.logits: dict[int, list[Any]] | None = None  # logits of tokens by request, if a test asks for them
        self.timed_steps: list[TimedStep] | None = None  # every step, if a measurement asks for them
        self.repeat = 0  # times that a step's kernels are run again to be timed
        self._numbers = 0
        self._lost_in_a_row = 0  # workers lost with no step between them
        self._share_s: dict[tuple[Batch, int], tuple[float, float]] = {}  # CPU and all seconds of steps, by SMs

    def _worker(self, batch: Batch, phase: str, sms: int | None) -> WorkerProcess:
        """Return the worker that computes the steps of a lane."""
        assert not isinstance(batch.inst.place, Host)
        (device,), model = batch.inst.place, batch.inst.model
        resident = self.residents.by_inst.get(batch.inst)
        if resident is not None and resident.worker is not None and sms is None:
            return resident.worker
        return self.worker(device, model, *([phase] if sms is not None or self.layout == "pair" else []))

    def run(self, order: Run) -> Refusal | None:
        """Make a lane follow a `Run` order; return the reason if the order is refused, else None."""
        if refusal := unfit(order, self.kind.sms):
            return refusal
        batch, decode = order.batch, order.phase == "decode"
        lane = self.lanes.setdefault((batch, decode), Lane(batch, order.phase))
        if order.steps == 0:
            if lane.phase == order.phase:
                if lane.turn is not None and self._in_flight(lane):
                    lane.turn.most = 0  # its step is the last
                elif lane.turn is not None:
                    self._end_turn(lane, "steps")
                lane.order = None
            return None
        lane.phase, lane.order = order.phase, order
        lane.turn = None if order.for_s is None and order.steps is None else Turn(order.for_s, order.steps)
        other = self.lanes.get((batch, not decode))
        if other is not None and "mixed" in {order.phase, other.phase}:
            other.order = other.turn = None
        self._worker(batch, order.phase, order.sms)  # starts the worker before it is needed
        return None

    def _in_flight(self, lane: Lane) -> bool:
        step = lane.step
        return step is not None and step.worker.step is step and step.turn is lane.turn

    def _start_steps(self) -> None:
        """Start the next step on each idle worker, move swapped KV back to devices, and end the turns that are over."""
        for lane in sorted(self.lanes.values(), key=lambda lane: lane.last):
            self._start_step(lane)
        for request in list(self.live.values()) if self.swap else ():
            if request.rid not in self.kv or not self.kv[request.rid].swapped:
                continue
            if request.batch is not None and request.rid not in self.moves.moving:  # growing members go first
                place = request.batch.inst.place
                if self.account(request.model, place).fits(len(self.kv[request.rid].blocks) + 1):
                    self.moves.begin(Transfer(request, place, attend=False, under=None))
        for lane in list(self.lanes.values()):
            if lane.turn is not None and not self._in_flight(lane) and (why := turn_end_reason(self, lane)):
                self._end_turn(lane, why)

    def _busy(self, worker: WorkerProcess) -> bool:
        """Tell whether a worker must wait, because another worker of its device is computing a step.

        This is so only with `sharing=turns`.
        """
        return self.turns and any(
            s.step is not None and s.device == worker.device for s in self.workers.processes.values()
        )

    def _start_step(self, lane: Lane) -> None:
        """Send a lane's next step or slice to its worker, if the lane has one and the worker is idle."""
        order, step, inst = lane.order, lane.step, lane.batch.inst
        resident = self.residents.by_inst.get(inst)
        if order is None or resident is None or resident.state not in {"in", "leaving"}:
            return
        if (lane.turn is not None and lane.turn.over(self.now_s)) or (resident.evict and not resident.evict.drain):
            return
        worker = step.worker if step is not None else self._worker(lane.batch, lane.phase, order.sms)
        if not worker.ready or worker.step is not None or self._busy(worker):
            return
        if step is None:
            parts, events = form_step(self, lane, order)
            self.tell(events)
            if not parts:
                return
            self._numbers += 1
            step = lane.step = Step(self._numbers, lane, worker, order, lane.turn, parts)
            for part in parts:
                self.stepping[part.request.rid] = step
        if lane.turn is not None and lane.turn.began_s is None:
            lane.turn.began_s = self.now_s
        self._numbers += 1
        lane.last = self._numbers
        self._send(worker, step)

    def _send(self, worker: WorkerProcess, step: Step) -> None:
        inst, order = step.lane.batch.inst, step.order
        model = inst.model
        if model not in worker.weights:
            worker.weights.add(model)
            granules = self.residents.by_inst[inst].granules
            worker.send("weights", model, self.arenas[worker.device].runs(granules))
        self.workers.sync(worker, model)
        layers = self.nets[model].shape.layers
        parts = []
        for request, start, count in step.parts if not step.layers else ():
            kv = self.kv[request.rid]
            behind = max(0, start - request.prompt_tokens), max(0, start + count - request.prompt_tokens)
            generated = tuple(self.generated.get(request.rid, [])[slice(*behind)])
            remote = -1
            if kv.home != inst.place:
                assert not isinstance(kv.home, Host)
                remote = kv.home[0]
                peer = self.worker(remote, model)
                self.workers.sync(peer, model)
                self.workers.introduce(worker, peer)
            parts.append(Part(request.rid, request.prompt_tokens, start, count, generated, tuple(kv.blocks), remote))
        until = layers if order.slice_layers is None else min(layers, step.layers + order.slice_layers)
        share = None if order.sms is None else order.sms / self.kind.sms
        step.begun_s = self.now_s
        self._charge_members(step, "compute")
        worker.step, worker.since_s = step, time.monotonic()
        worker.send("step", Order(step.number, model, tuple(parts), until, share, order.op_s, order.phase, self.repeat))
        step.layers = until

    def _members_of(self, step: Step) -> list[Live]:
        """List the requests that wait for the result of a step, without those that have left since it began."""
        return [part.request for part in step.parts if self.stepping.get(part.request.rid) is step]

    def _charge_members(self, step: Step, cause: str) -> None:
        """Charge the members of a step, then set their waiting cause to `cause`.

        To charge a member is to add its time up to now to its present waiting cause.
        """
        for request in self._members_of(step):
            self._book(request)
            request.cause = cause

    def _finish_step(self, worker: WorkerProcess, done: Stepped) -> None:
        """Record the result that a worker sent for a step, or for a slice of a step."""
        step, worker.step, worker.since_s = worker.step, None, math.inf
        self._lost_in_a_row = 0
        lane, inst = step.lane, step.lane.batch.inst
        at_s = self.now_s
        counts = self.counts.setdefault(lane.batch, Counts())
        counts.busy_s += done.ended_s - done.begun_s
        if (sms := step.order.sms) is not None:
            spent_s, all_s = self._share_s.get((lane.batch, sms), (0.0, 0.0))
            self._share_s[lane.batch, sms] = spent_s + done.cpu_s, all_s + done.ended_s - done.begun_s
        if not self.over:
            if done.tokens:
                if self.timed_steps is not None:
                    parts = tuple((part.cached_tokens, part.tokens) for part in step.parts)
                    self.timed_steps.append(TimedStep(inst.model, parts, step.begun_s, at_s, done.kernels_s))
                counts.steps += 1
                self._tokens(step, done)
                if lane.step is step:
                    lane.step = None
                self.retired(step)
                self._count_turn(step, at_s)
            else:
                self._charge_members(step, "queue")
        self.residents.leave_if_due(inst)

    def _tokens(self, step: Step, done: Stepped) -> None:
        """Record the new tokens of a step's members, and report the prompts and requests that are complete."""
        batch, events = step.lane.batch, list[Event]()
        counts = self.counts[batch]
        for k, (request, start, count) in enumerate(step.parts):
            if self.stepping.get(request.rid) is not step:
                continue
            del self.stepping[request.rid]
            self._book(request)
            kv = self.kv[request.rid]
            kv.tokens = start + count
            fresh = not request.kv_tokens
            counts.prefilled_tokens += count * fresh
            counts.decoded_tokens += not fresh
            if kv.tokens == request.ctx_tokens:
                request.kv_tokens = kv.tokens
                self.generated.setdefault(request.rid, []).append(done.tokens[k])
                if self.logits is not None:
                    self.logits.setdefault(request.rid, []).append(done.logits[k])
                self._token(request, batch)
                if request.made == request.output_tokens:
                    events.append(self.end(request, "done"))
                elif fresh:
                    events.append(Prefilled(request.rid, batch))
            request.cause = self.waits_for(request) if request.batch is not None else "admission"
            if (transfer := self.moves.moving.get(request.rid)) is not None:
                self.moves.depart(transfer)
        self.tell(events)

    def retired(self, step: Step) -> None:
        """Forget a step that has ended, and free the blocks of members that left their batch while it ran."""
        for request in self._members_of(step):
            del self.stepping[request.rid]
        for account, blocks in step.to_free:
            account.give(blocks)
        if step.to_free:
            step.to_free = []
            self.freed()

    def _count_turn(self, step: Step, at_s: float) -> None:
        lane, turn = step.lane, step.turn
        if turn is None or lane.turn is not turn:
            return
        turn.steps += 1
        if why := turn.over(at_s):
            self._end_turn(lane, why)

    def _turns_end(self) -> Iterator[float]:
        """Yield, for each turn that has no step in flight, the time in seconds at which it is over."""
        for lane in self.lanes.values():
            if lane.turn is not None and not self._in_flight(lane):
                yield lane.turn.until_s

    def _end_turn(self, lane: Lane, why: Literal["time", "steps", "empty", "stuck"]) -> None:
        turn = lane.turn
        assert turn is not None
        lane.turn = lane.order = None
        ran_s = 0.0 if turn.began_s is None else self.now_s - turn.began_s
        self.tell([TurnEnded(lane.batch, lane.phase, why, turn.steps, ran_s)])
