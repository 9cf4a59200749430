"""An engine for every action of the vocabulary: real kernels on CPU devices, one worker process a device.

The policy and all bookkeeping are in this process, which imports no torch: memory in granules (pages.py), lanes and
their steps (lanes.py), requests (wallclock.py). A worker maps what it is told to and steps what it is ordered to
(worker.py); the links copy (links.py). Times of steps are the workers' own.

A worker steps one lane after the other. `process=gpu` is one worker a device; `model` and `kept` have one a model on
it, `pair` one a model and phase, and lanes with a partition (`Run.sms`) have one each. All workers of a device share
its core, as the kernel gives it to them (`sharing=fluid`), or one step at a time (`sharing=turns`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from harness.engines.machine import Config, Refusal, laid_out
from harness.engines.stamps import Noted
from harness.engines.torch import kind, nets
from harness.engines.torch.core import Core, Kv
from harness.engines.torch.lanes import Lane, Step, Turn, Watched, ended, formed
from harness.engines.torch.moves import Moves, Transfer
from harness.engines.torch.pages import Account, Arena
from harness.engines.torch.processes import Seat, Workers
from harness.engines.torch.residents import WAYS, Residents
from harness.engines.torch.setting import Fields, cluster, rates
from harness.engines.torch.verdict import Share, verdict
from harness.engines.torch.view import Seen
from harness.engines.torch.wire import Copied, Order, Part, Stepped
from harness.engines.wallclock import Counts, Live, machine_facts
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import MIB, Batch, Fidelity, Host, Option, UserError
from harness.policy.view import View

CHECK_S = 0.1  # between two looks for workers that are stuck
MOST_LOST = 3  # workers one after the other
CHARGE_S = 0.01  # between two looks at why those who do not step wait


class Torch(Core):
    """Steps the networks of a run's models."""

    can = frozenset(
        {
            "Load", "Evict", "Evict.drain", "Limit", "Admit", "Drop", "Run", "Run.phase:prefill", "Run.phase:decode",
            "Run.for_s", "Run.steps", "Run.steps:0", "Run.seqs", "Run.chunk_tokens", "Run.sms", "Run.slice_layers",
            "Run.op_s", "Move", "Move.to:gpu", "Move.to:host", "Move.to:none", "Move.attend", "view.oracle_tokens",
            *(f"Load.way:{way}" for way in WAYS),
        }
    )  # fmt: skip
    tells = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done, Load, Evict, Move})
    offers: Mapping[str, tuple[Option, ...]] = {
        "kv": ("paged", "elastic"),
        "preempt": ("recompute", "swap"),
        "sharing": ("fluid", "turns"),
        "process": ("model", "pair", "gpu", "kept"),
        "memory": ("real",),
    }
    fidelity: Fidelity = "emulated"
    wall_clock = exclusive = True
    residents: Residents
    moves: Moves

    def __init__(self, config: Config, options: Mapping[str, Option], fields: Fields | None = None) -> None:
        super().__init__(config)
        self.fields = fields or Fields()
        self.lacks = "" if find_spec("torch") else "torch: pip install torch"
        k = self.kind = kind.kind(config)
        self.fidelity = k.fidelity
        if not k.starts:
            self.can = self.can - {f"Load.way:{name}" for name, way in WAYS.items() if way.starts}
        self.nets = {m.name: nets.net(m.shape, k.as_it_is, k.float_bytes, self.fields.wide) for m in config.models}
        self.logits: dict[int, list[Any]] | None = None  # of each request's tokens, where a test asks for them
        self.watched: list[Watched] | None = None  # every step, where a measurement asks for them
        self.repeat = 0  # times that its kernels run again, likewise
        layout: Any = options.get("process", "model")
        self.layout = laid_out(config, layout)
        self.turns = "turns" in {options.get("sharing") if config.sharing == "own" else config.sharing}
        self.swap = options.get("preempt") == "swap"
        self.mem_bytes = config.pool_bytes or k.mem_bytes
        self.links = rates(config, k)
        places: list[int | Host] = [*range(config.gpus), Host(0)]
        self.arenas = {
            place: Arena(k.host_bytes if isinstance(place, Host) else self.mem_bytes, k.granule) for place in places
        }
        buffer = k.buffer if options.get("kv") == "elastic" else 0
        block = max(config.block_tokens, k.block_tokens)
        self.accounts = {
            (m, place): Account(arena, net, block, buffer=0 if isinstance(place, Host) else buffer)
            for m, net in self.nets.items()
            for place, arena in self.arenas.items()
        }
        self.workers = Workers(k, self.arenas, self.accounts)
        page_bytes = {m: account.page_bytes for (m, place), account in self.accounts.items() if place == 0}
        self.cluster = cluster(config, k, self.nets, page_bytes, self.arenas[0])
        self.measured_on: Mapping[str, str] = {
            **machine_facts("torch"),
            "a GPU": f"{k.on}; {self.mem_bytes // MIB} MiB",
            "GB/s": " ".join(f"{link} {rate:g}" for link, rate in self.links.items()),
            **{f"{m.shape.name} by": self.nets[m.name].text for m in config.models},
        }
        self.residents, self.moves = Residents(self), Moves(self)
        self.lanes: dict[tuple[Batch, bool], Lane] = {}  # by batch, and whether it is that for decodes alone
        self.kv: dict[int, Kv] = {}
        self.made: dict[int, list[int]] = {}  # tokens of requests
        self.stepping: dict[int, Step] = {}  # whose result a request waits for
        self.lost: list[str] = []  # what happened to workers
        self._numbers = 0
        self._charged_s = -math.inf
        self._check_s = 0.0  # by the clock of the machine, when workers are looked after next
        self._in_a_row = 0  # workers lost, and no step between them
        self._got: dict[tuple[Batch, int], tuple[float, float]] = {}  # by lane and SMs: CPU seconds of its steps, all

    def ready(self) -> None:
        """Start the nursery and the links, take memory, draw weights; see Engine."""
        if self.lacks:
            raise UserError(f"torch needs {self.lacks}")
        self.workers.logits = self.logits is not None
        self.workers.start(self.nets)

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Wait until the workers that were asked for are there, and start the clock; see Engine."""
        if self.layout == "gpu":
            for device in range(self.config.gpus):
                self.workers.seat(device)
        while not all(seat.ready for seat in self.workers.seats.values()):
            self._hear(self.fields.stuck_s)
        super().begin(hears, oracle, end_s)
        self.workers.watch_load()

    def close(self) -> None:
        """End every process and give memory back; see Engine."""
        self.workers.close()

    def view(self) -> View:
        """See Engine."""
        return Seen(self)

    def stats(self) -> dict[str, float]:
        """See Engine; `policy_core` is this process's share of a core, beside the workers."""
        here, others = self._cores
        return {
            **super().stats(),
            "moves": float(self.moves.count),
            "loads": float(self.residents.loads),
            "evicts": float(self.residents.evicts),
            "policy_core": here,
            "other_cores": others,
            "workers_lost": float(len(self.lost)),
        }

    @cached_property
    def _cores(self) -> tuple[float, float]:
        """Cores that this process kept busy, and those that strangers did, once the run is over."""
        return (0.0, 0.0) if self.workers.load is None else self.workers.load.cores()

    def about(self) -> Mapping[str, Any]:
        """Return whether the run measured its devices; see Observed."""
        if self.kind.name != "cpu":  # a card is in nobody's way, and its kernels in none of a processor's accounts
            return {}
        lanes = (Share(b.inst.model, sms / self.kind.sms, *seconds) for (b, sms), seconds in self._got.items())
        return {"verdict": verdict(*self._cores, len(self.workers.cores), self.config.gpus, lanes)}

    def side(self) -> Mapping[str, Any]:
        """Return what happened to workers; see Observed."""
        return {"workers_lost": self.lost} if self.lost else {}

    def files(self) -> Mapping[str, Iterable[bytes]]:
        """Return no further files; see Observed."""
        return {}

    def _place(self, batch: Batch, phase: str, sms: int | None) -> Seat:
        """Return the worker of a lane."""
        assert not isinstance(batch.inst.place, Host)
        (device,), model = batch.inst.place, batch.inst.model
        held = self.residents.held.get(batch.inst)
        if held is not None and held.seat is not None and sms is None:
            return held.seat
        key: tuple[Any, ...] = () if self.layout == "gpu" else (model,)
        if sms is not None or self.layout == "pair":
            key = (*key, phase)
        return self.workers.seat(device, *key)

    def unseat(self, seat: Seat) -> None:
        """Let a worker end; what it was loaded into is others' from now on."""
        self.workers.unseat(seat)
        for held in self.residents.held.values():
            if held.seat is seat:
                held.seat = None

    def _lost(self, seat: Seat) -> None:
        """Go on without a worker that ended by itself: those whom it was stepping fail, and another one comes.

        UserError where MOST_LOST ended in a row, none of which did a step.
        """
        self.lost.append(f"worker {seat.pid} of device {seat.device} ended at {self.now_s:.3f} s")
        print(f"torch: {self.lost[-1]}; the requests of its step fail", file=sys.stderr, flush=True)
        self._in_a_row += 1
        if self._in_a_row >= MOST_LOST:
            raise UserError(f"torch: {MOST_LOST} workers ended one after the other and did no step: {self.lost[-1]}")
        steps = [lane.step for lane in self.lanes.values() if lane.step is not None and lane.step.seat is seat]
        failed = [row.request for step in steps for row in step.rows if self.stepping.get(row.request.rid) is step]
        for step in steps:
            step.lane.step = None
            self.retired(step)
        self.unseat(seat)
        self.tell([self.end(request, "failed") for request in failed])
        self.residents.landed(list(self.residents.held))
        self.freed()

    def _unstick(self) -> None:
        """Name and kill the workers that have not answered for too long. UserError for a link that is stuck."""
        if late := self.workers.late_link(self.fields.stuck_s):
            raise UserError(f"torch: {late}")
        for seat in self.workers.overdue(self.fields.stuck_s):
            doing = "its start" if not seat.ready else f"a step of {seat.step.lane.batch.inst.model}"
            text = f"worker {seat.pid} has not answered for {self.fields.stuck_s} s, in {doing}; it is killed"
            print(f"torch: device {seat.device} is stuck: {text}", file=sys.stderr, flush=True)
            seat.kill()

    def clock(self) -> float:
        """Read the clock, once all that happened before is taken in."""
        if self.begun:
            self._hear(0.0)
        return super().clock()

    def _hear(self, wait_s: float | None) -> None:
        """Take in what the processes have to say, at its times; wait for it so long, or for ever."""
        heard = self.workers.hear(wait_s)
        if (clock_s := time.monotonic()) >= self._check_s:
            self._check_s = clock_s + CHECK_S
            self._unstick()
        for at_s, seat, what in heard:
            if self.begun and 0 < at_s < math.inf:
                self.now_s = max(self.now_s, min(at_s - self._zero_s, self._end_s))
            if isinstance(what, Copied):
                if not self.residents.copied(what.number):
                    self.moves.copied(what.number)
                continue
            assert seat is not None
            if isinstance(what, Stepped):
                self._stepped(seat, what)
            elif what is None:
                self._lost(seat)
            else:
                seat.ready, seat.since_s = True, math.inf
                self.residents.landed(list(self.residents.held))

    def poll(self, until_s: float) -> Event | None:
        """See Engine."""
        until_s = min(until_s, self._end_s)
        while True:
            self.clock()
            self.arrivals()
            if not self._told and self.now_s < until_s and not self.idle():
                self._go_on()
            if self._told:
                return self._told.popleft()
            if self.now_s >= until_s or self.idle():
                return None
            due_s = min([until_s, *(arrival[0] for arrival in self._future[:1]), *self._turns_end()])
            if due_s == math.inf and not self._under_way():
                if not self.moves.stalled():
                    return None
                continue
            self._hear(min(self.fields.stuck_s, max(0.0, due_s - self.now_s)))

    def _under_way(self) -> bool:
        """Tell whether something happens without a new action."""
        busy = any(seat.step is not None or not seat.ready for seat in self.workers.seats.values())
        return bool(
            busy or self.moves.under_way or any(held.state == "loading" for held in self.residents.held.values())
        )

    def act(self, action: Action) -> Refusal | None:
        """See WallClock."""
        match action:
            case Load(inst, way) if way in WAYS:
                return self.nowhere(inst) or self.residents.load(action)
            case Evict(inst):
                return self.nowhere(inst) or self.residents.evict(action)
            case Limit(model, gpu, kv_bytes) if (model, gpu) in self.accounts:
                self.accounts[model, gpu].limit_bytes = kv_bytes
                self.freed()
            case Admit(_, batch):
                return self.nowhere(batch.inst) or self.admit(action)
            case Drop(rid):
                if failed := self.gone(rid):
                    return failed
                self.tell([self.end(self.live[rid], "dropped")])
            case Run(batch):
                return self.nowhere(batch.inst) or self._run(action)
            case Move():
                return self.moves.move(action)
            case _:
                return "never", "there is no such model, GPU or way to load"
        return None

    def _run(self, order: Run) -> Refusal | None:
        if order.slice_layers is not None and (order.slice_layers < 1 or order.phase != "prefill"):
            return "never", "a slice is of a prefill, and has at least one layer"
        if order.op_s is not None and not order.op_s > 0:
            return "never", "kernels of no time"
        if (order.for_s is not None and not order.for_s >= 0) or (order.steps or 0) < 0:
            return "never", "a turn takes a time or a count of steps, none below 0"
        if order.sms is not None and not 0 < order.sms <= self.kind.sms:
            return "never", f"no partition of {order.sms} SMs"
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
        self._place(batch, order.phase, order.sms)  # started before it is needed
        return None

    def _in_flight(self, lane: Lane) -> bool:
        step = lane.step
        return step is not None and step.seat.step is step and step.turn is lane.turn

    def release(self, request: Live) -> None:
        """Take a request's KV, once the step or the copy that uses it is over; see WallClock."""
        request.kv_tokens = 0
        if (transfer := self.moves.moving.pop(request.rid, None)) is not None:
            self.moves.leave(transfer)
        kv = self.kv.pop(request.rid, None)
        step = self.stepping.pop(request.rid, None)
        if kv is None or (transfer is not None and transfer.kv is not None):
            return  # the copy frees both ends
        if step is not None:
            step.left.append((kv.account, kv.blocks))
        else:
            kv.account.give(kv.blocks)
            self.freed()

    def freed(self) -> None:
        """See WallClock; moves that wait for memory go first."""
        for transfer in [
            transfer
            for transfer in self.moves.moving.values()
            if transfer.kv is None and transfer.request.rid not in self.stepping
        ]:
            self.moves.depart(transfer)
        self.residents.claims.clear()
        super().freed()

    def withdrawn(self, request: Live) -> None:
        """See WallClock: KV stays where it is."""
        if request.batch is not None:
            batch, kv = request.batch, self.kv.get(request.rid)
            del self.batches[batch][request.rid]
            if kv is not None and not request.kv_tokens and request.rid not in self.stepping:
                self.release(request)  # of a prompt that has begun
            self.residents.leave_if_due(batch.inst)

    def preempt(self, request: Live) -> Preempted:
        """Take the KV of a member that lacks memory: it is computed anew, or comes back from the host."""
        if self.swap and request.kv_tokens:
            self.moves.begin(Transfer(request, Host(0), attend=False, under=None))
        else:
            self.release(request)
        return self.preempted(request)

    def _go_on(self) -> None:
        """Let every idle worker step what it can, and end the turns that are over."""
        for lane in sorted(self.lanes.values(), key=lambda lane: lane.last):
            self._go(lane)
        for request in list(self.live.values()) if self.swap else ():
            if request.rid not in self.kv or not self.kv[request.rid].swapped:
                continue
            if request.batch is not None and request.rid not in self.moves.moving:  # it comes back after those who grow
                place = request.batch.inst.place
                if self.account(request.model, place).fits(len(self.kv[request.rid].blocks) + 1):
                    self.moves.begin(Transfer(request, place, attend=False, under=None))
        for lane in list(self.lanes.values()):
            if lane.turn is not None and not self._in_flight(lane) and (why := ended(self, lane)):
                self._end_turn(lane, why)

    def _taken(self, seat: Seat) -> bool:
        """Tell whether another worker steps on this device, where they take turns."""
        return self.turns and any(s.step is not None and s.device == seat.device for s in self.workers.seats.values())

    def _go(self, lane: Lane) -> None:
        """Send a lane's next step, if it has one and its worker is idle."""
        order, step, inst = lane.order, lane.step, lane.batch.inst
        held = self.residents.held.get(inst)
        if order is None or held is None or held.state not in {"in", "leaving"} or self._over(lane):
            return
        if held.evict is not None and not held.evict.drain:
            return
        seat = step.seat if step is not None else self._place(lane.batch, lane.phase, order.sms)
        if not seat.ready or seat.step is not None or self._taken(seat):
            return
        if step is None:
            rows, events = formed(self, lane, order)
            self.tell(events)
            if not rows:
                return
            self._numbers += 1
            step = lane.step = Step(self._numbers, lane, seat, order, lane.turn, rows)
            for row in rows:
                self.stepping[row.request.rid] = step
        if lane.turn is not None and lane.turn.began_s is None:
            lane.turn.began_s = self.now_s
        self._numbers += 1
        lane.last = self._numbers
        self._send(seat, step)

    def _send(self, seat: Seat, step: Step) -> None:
        inst, order = step.lane.batch.inst, step.order
        model = inst.model
        if model not in seat.weights:
            seat.weights.add(model)
            granules = self.residents.held[inst].granules
            seat.send("weights", model, self.arenas[seat.device].runs(granules))
        self.workers.sync(seat, model)
        layers = self.nets[model].shape.layers
        parts = []
        for request, start, count in step.rows if not step.layers else ():
            kv = self.kv[request.rid]
            made = self.made.get(request.rid, [])[
                max(0, start - request.prompt_tokens) : start + count - request.prompt_tokens
            ]
            if start + count <= request.prompt_tokens:
                made = []
            far = -1
            if kv.home != inst.place:
                assert not isinstance(kv.home, Host)
                far = kv.home[0]
                there = self.workers.seat(far, *(() if self.layout == "gpu" else (model,)))
                self.workers.sync(there, model)
                self.workers.introduce(seat, there)
            blocks = tuple(kv.blocks)
            parts.append(Part(request.rid, request.prompt_tokens, start, count, tuple(made), blocks, far))
        until = layers if order.slice_layers is None else min(layers, step.layers + order.slice_layers)
        share = None if order.sms is None else order.sms / self.kind.sms
        self._begun(step)
        seat.step, seat.since_s = step, time.monotonic()
        seat.send("step", Order(step.number, model, tuple(parts), until, share, order.op_s, order.phase, self.repeat))
        step.layers = until

    def _begun(self, step: Step) -> None:
        """Book those who step now."""
        step.begun_s = self.now_s
        for row in step.rows:
            if self.stepping.get(row.request.rid) is step:
                self._book(row.request)
                row.request.cause = "compute"

    def _stepped(self, seat: Seat, done: Stepped) -> None:
        """Take in a step, or a slice, that a worker has done."""
        step, seat.step, seat.since_s = seat.step, None, math.inf
        self._in_a_row = 0
        lane, inst = step.lane, step.lane.batch.inst
        at_s = self.now_s
        counts = self.counts.setdefault(lane.batch, Counts())
        counts.busy_s += done.ended_s - done.begun_s
        if (sms := step.order.sms) is not None:
            spent_s, all_s = self._got.get((lane.batch, sms), (0.0, 0.0))
            self._got[lane.batch, sms] = spent_s + done.cpu_s, all_s + done.ended_s - done.begun_s
        if not self.over:
            if done.tokens:
                if self.watched is not None:
                    rows = tuple((row.start, row.tokens) for row in step.rows)
                    self.watched.append(Watched(inst.model, rows, step.begun_s, at_s, done.kernels_s))
                counts.steps += 1
                self._tokens(step, done)
                if lane.step is step:
                    lane.step = None
                self.retired(step)
                self._count_turn(step, at_s)
            else:
                for row in step.rows:
                    if self.stepping.get(row.request.rid) is step:
                        self._book(row.request)
                        row.request.cause = "queue"
        self.residents.leave_if_due(inst)

    def _tokens(self, step: Step, done: Stepped) -> None:
        """Give each member what the step made for it."""
        batch, events = step.lane.batch, list[Event]()
        counts = self.counts[batch]
        for k, (request, start, count) in enumerate(step.rows):
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
                self.made.setdefault(request.rid, []).append(done.tokens[k])
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
        """Nothing touches a step's KV any more."""
        for row in step.rows:
            if self.stepping.get(row.request.rid) is step:
                del self.stepping[row.request.rid]
        for account, blocks in step.left:
            account.give(blocks)
        if step.left:
            step.left = []
            self.freed()

    def _count_turn(self, step: Step, at_s: float) -> None:
        lane, turn = step.lane, step.turn
        if turn is None or lane.turn is not turn:
            return
        turn.steps += 1
        if turn.most is not None and turn.steps >= turn.most:
            self._end_turn(lane, "steps")
        elif turn.over(at_s):
            self._end_turn(lane, "time")

    def _over(self, lane: Lane) -> bool:
        return lane.turn is not None and (lane.turn.over(self.now_s) or lane.turn.most == 0)

    def _turns_end(self) -> Iterator[float]:
        """Yield when turns of idle lanes are over."""
        for lane in self.lanes.values():
            turn = lane.turn
            if turn is not None and turn.for_s is not None and turn.began_s is not None and not self._in_flight(lane):
                yield turn.began_s + turn.for_s

    def _end_turn(self, lane: Lane, why: Literal["time", "steps", "empty", "stuck"]) -> None:
        turn = lane.turn
        assert turn is not None
        lane.turn = lane.order = None
        ran_s = 0.0 if turn.began_s is None else self.now_s - turn.began_s
        self.tell([TurnEnded(lane.batch, lane.phase, why, turn.steps, ran_s)])

    def waits_for(self, request: Live) -> str:
        """See WallClock."""
        assert request.batch is not None
        held = self.residents.held.get(request.batch.inst)
        if held is None or held.state == "loading":
            return "load"
        if request.rid in self.moves.moving:
            return "transfer"
        lanes = (self.lanes.get((request.batch, decode)) for decode in (False, True))
        if all(lane is None or lane.order is None for lane in lanes) or request.rid in self.kv:
            return "queue"
        account = self.account(request.model, request.batch.inst.place)
        return "queue" if account.fits(account.blocks_for(request.ctx_tokens + 1)) else "kv"

    def charge(self, stepping: Iterable[Live]) -> None:
        """See WallClock: those who step are booked as they begin and end; here all others are, at intervals."""
        if self.now_s < self._charged_s + CHARGE_S and math.isfinite(self._charged_s) and stepping == ():
            return
        self._charged_s = self.now_s
        for request in self.live.values():
            running = self.stepping.get(request.rid)
            self._book(request)
            if running is None or running.seat.step is not running:
                request.cause = "admission" if request.batch is None else self.waits_for(request)

    def admit(self, action: Admit) -> Refusal | None:
        """See WallClock."""
        refusal = super().admit(action)
        if refusal is None and isinstance(action.who, int):
            request = self.live[action.who]
            self._book(request)
            if request.rid not in self.stepping:
                request.cause = self.waits_for(request)
        return refusal

    def noted(self) -> Noted:
        """See WallClock."""
        self._charged_s = -math.inf
        return super().noted()

    def end(self, request: Live, state: Literal["done", "dropped", "failed"]) -> Finished:
        """See WallClock."""
        self._book(request)
        batch, finished = request.batch, super().end(request, state)
        self.made.pop(request.rid, None)
        if batch is not None:
            self.residents.leave_if_due(batch.inst)
        return finished
