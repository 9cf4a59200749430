"""An engine for every action of a policy: worker processes on cores, or threads on cards, run real kernels.

The policy and all bookkeeping run in this process, which does not import torch: memory in granules (pages.py), lanes
and their steps (lanes.py, stepping.py), requests (wallclock.py). This process sends orders to workers, which map memory
and compute steps (worker.py), and to links, which copy (links.py). The workers measure the times of steps.

A worker computes one step at a time; one worker may serve several lanes. With `process=gpu` a device has one worker.
With `process=model` and `process=kept` it has one for each model; with `process=pair`, one for each model and phase.
Lanes with a partition (`Run.sms`) have separate workers, one for each phase. With `sharing=fluid` the operating system
or the card schedules the workers of a device. With `sharing=turns` only one of them computes a step at a time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from harness.engines.machine import Config, Refusal
from harness.engines.stamps import Noted
from harness.engines.torch.kind import WAYS
from harness.engines.torch.moves import Moves, Transfer
from harness.engines.torch.processes import WorkerProcess
from harness.engines.torch.residents import Residents
from harness.engines.torch.setting import Fields, cluster
from harness.engines.torch.stepping import Stepping
from harness.engines.torch.verdict import Share, verdict
from harness.engines.torch.view import Seen
from harness.engines.torch.wire import Copied, Stepped
from harness.engines.wallclock import Live, machine_facts
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import MIB, Fidelity, Host, Option, UserError
from harness.policy.view import View

CHECK_S = 0.1  # seconds between two checks for stuck workers
MOST_LOST = 3  # workers lost in a row, without a step between them, that end a run
CHARGE_S = 0.01  # seconds between two bookings of why requests that are in no step wait


class Torch(Stepping):
    """The engine that computes real networks for the models of a run."""

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
        super().__init__(config, options, fields or Fields())
        self.lacks = "" if find_spec("torch") else "torch: pip install torch"
        k = self.kind
        self.fidelity = k.fidelity
        if not k.starts:
            self.can = self.can - {f"Load.way:{name}" for name, way in WAYS.items() if way.starts}
        page_bytes = {m: account.page_bytes for (m, place), account in self.accounts.items() if place == 0}
        self.cluster = cluster(config, k, self.nets, page_bytes, self.arenas[0])
        self.measured_on: Mapping[str, str] = {
            **machine_facts("torch"),
            "a GPU": f"{k.on}; {self.mem_bytes // MIB} MiB",
            "GB/s": " ".join(f"{link} {rate:g}" for link, rate in self.links.items()),
            **{f"{m.shape.name} by": self.nets[m.name].text for m in config.models},
        }
        self.residents, self.moves = Residents(self), Moves(self)
        self.lost: list[str] = []  # what happened to workers
        self._charged_s = -math.inf
        self._check_s = 0.0  # when workers are checked next, by the monotonic clock

    def ready(self) -> None:
        """Start the nursery and the links, allocate memory and draw weights; see Engine."""
        if self.lacks:
            raise UserError(f"torch needs {self.lacks}")
        self.workers.logits = self.logits is not None
        self.workers.start()

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Wait until all workers that were started are ready, then start the clock; see Engine."""
        if self.layout == "gpu":
            for device in range(self.config.gpus):
                self.workers.worker(device)
        while not all(worker.ready for worker in self.workers.processes.values()):
            self._receive(self.fields.stuck_s)
        super().begin(hears, oracle, end_s)
        self.workers.watch_load()

    def close(self) -> None:
        """End every process and free all memory; see Engine."""
        self.workers.close()

    def view(self) -> View:
        """Return the view that policies read; see Engine."""
        return Seen(self)

    def stats(self) -> dict[str, float]:
        """Return the run's counters; see Engine.

        `policy_core` is the number of cores that this process, without the workers, kept busy.
        """
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
        """The number of cores that this process kept busy, and the number that processes outside the engine kept busy.

        Both are measured once, at the end of the run.
        """
        return (0.0, 0.0) if self.workers.load is None else self.workers.load.cores()

    def about(self) -> Mapping[str, Any]:
        """Return the verdict: whether a run's times are those of its devices; see Observed.

        For cards, the result is empty.
        """
        if self.kind.name != "cpu":  # CPU interference checks do not apply to cards
            return {}
        lanes = (Share(b.inst.model, sms / self.kind.sms, *seconds) for (b, sms), seconds in self._share_s.items())
        return {"verdict": verdict(*self._cores, len(self.workers.cores), self.config.gpus, lanes)}

    def side(self) -> Mapping[str, Any]:
        """Return the workers that ended unexpectedly, each as a line of text; see Observed."""
        return {"workers_lost": self.lost} if self.lost else {}

    def files(self) -> Mapping[str, Iterable[bytes]]:
        """Return no files; see Observed."""
        return {}

    def dismiss(self, worker: WorkerProcess) -> None:
        """Let a worker end. From then on, other workers compute the steps of its instances."""
        self.workers.dismiss(worker)
        for resident in self.residents.by_inst.values():
            if resident.worker is worker:
                resident.worker = None

    def _lost(self, worker: WorkerProcess) -> None:
        """Continue after a worker ended unexpectedly: the requests of its step fail.

        From then on, other workers compute the steps of its instances. Raises UserError if MOST_LOST workers ended one
        after another, and no worker finished a step in between.
        """
        self.lost.append(f"worker {worker.pid} of device {worker.device} ended at {self.now_s:.3f} s")
        print(f"torch: {self.lost[-1]}; the requests of its step fail", file=sys.stderr, flush=True)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MOST_LOST:
            raise UserError(f"torch: {MOST_LOST} workers ended one after the other and did no step: {self.lost[-1]}")
        steps = [lane.step for lane in self.lanes.values() if lane.step is not None and lane.step.worker is worker]
        failed = [request for step in steps for request in self._members_of(step)]
        for step in steps:
            step.lane.step = None
            self.retired(step)
        self.dismiss(worker)
        self.tell([self.end(request, "failed") for request in failed])
        self.residents.landed()
        self.freed()

    def _unstick(self) -> None:
        """Kill workers that have not answered for `stuck_s`, and report them; raise UserError if a link is stuck."""
        if late := self.workers.late_link(self.fields.stuck_s):
            raise UserError(f"torch: {late}")
        for worker in self.workers.overdue(self.fields.stuck_s):
            doing = "its start" if not worker.ready else f"a step of {worker.step.lane.batch.inst.model}"
            text = f"worker {worker.pid} has not answered for {self.fields.stuck_s} s, in {doing}; it is killed"
            print(f"torch: device {worker.device} is stuck: {text}", file=sys.stderr, flush=True)
            worker.kill()

    def clock(self) -> float:
        """Return the time, after handling all messages that the processes have sent."""
        if self.begun:
            self._receive(0.0)
        return super().clock()

    def _receive(self, wait_s: float | None) -> None:
        """Handle the messages of the processes; for each message, first set the clock to its time.

        Wait up to `wait_s` seconds for a message; None means no limit.
        """
        heard = self.workers.receive(wait_s)
        if (clock_s := time.monotonic()) >= self._check_s:
            self._check_s = clock_s + CHECK_S
            self._unstick()
        for at_s, worker, what in heard:
            if self.begun and 0 < at_s < math.inf:
                self.now_s = max(self.now_s, min(at_s - self._zero_s, self._end_s))
            if isinstance(what, Copied):
                self.copying.pop(what.number)()
                continue
            assert worker is not None
            if isinstance(what, Stepped):
                self._finish_step(worker, what)
            elif what is None:
                self._lost(worker)
            else:
                worker.ready, worker.since_s = True, math.inf
                self.residents.landed()

    def poll(self, until_s: float) -> Event | None:
        """Return the next event, or None if there is none until the time `until_s`; see Engine."""
        until_s = min(until_s, self._end_s)
        while True:
            self.clock()
            self.arrivals()
            if not self._told and self.now_s < until_s and not self.idle():
                self._start_steps()
            if self._told:
                return self._told.popleft()
            if self.now_s >= until_s or self.idle():
                return None
            due_s = min([until_s, *(arrival[0] for arrival in self._future[:1]), *self._turns_end()])
            if due_s == math.inf and not self._under_way():
                if not self.moves.stalled():
                    return None
                continue
            self._receive(min(self.fields.stuck_s, max(0.0, due_s - self.now_s)))

    def _under_way(self) -> bool:
        """Tell whether anything is under way that will end without a new action: a step, a start, a load or a copy."""
        busy = any(worker.step is not None or not worker.ready for worker in self.workers.processes.values())
        loading = any(resident.state == "loading" for resident in self.residents.by_inst.values())
        return busy or loading or bool(self.moves.under_way)

    def act(self, action: Action) -> Refusal | None:
        """Carry out an action, or return the reason why it is refused; see WallClock."""
        match action:
            case Load(inst, way) if way in WAYS:
                return self.place_refusal(inst) or self.residents.load(action)
            case Evict(inst):
                return self.place_refusal(inst) or self.residents.evict(action)
            case Limit(model, gpu, kv_bytes) if (model, gpu) in self.accounts:
                self.accounts[model, gpu].limit_bytes = kv_bytes
                self.freed()
            case Admit(_, batch):
                return self.place_refusal(batch.inst) or self.admit(action)
            case Drop(rid):
                if failed := self.gone(rid):
                    return failed
                self.tell([self.end(self.live[rid], "dropped")])
            case Run(batch):
                return self.place_refusal(batch.inst) or self.run(action)
            case Move():
                return self.moves.move(action)
            case _:
                return "never", "there is no such model, GPU or way to load"
        return None

    def release(self, request: Live) -> None:
        """Free a request's KV, once no step and no copy uses it; see WallClock."""
        request.kv_tokens = 0
        if (transfer := self.moves.moving.pop(request.rid, None)) is not None:
            self.moves.over(transfer)
        kv = self.kv.pop(request.rid, None)
        step = self.stepping.pop(request.rid, None)
        if kv is None or (transfer is not None and transfer.kv is not None):
            return  # the copy frees both ends
        if step is not None:
            step.to_free.append((kv.account, kv.blocks))
        else:
            kv.account.give(kv.blocks)
            self.freed()

    def freed(self) -> None:
        """Start the waiting moves that now fit, then report that memory became free; see WallClock."""
        for rid, transfer in list(self.moves.moving.items()):
            waits = transfer.kv is None and self.moves.moving.get(rid) is transfer  # one that departs may free memory
            if waits and rid not in self.stepping:
                self.moves.depart(transfer)
        self.residents.claims.clear()
        super().freed()

    def withdrawn(self, request: Live) -> None:
        """Take a request out of its batch; see WallClock.

        Its KV stays where it is, with one exception: the KV of a partly computed prompt is freed, unless a step is
        computing the prompt now.
        """
        if request.batch is not None:
            batch, kv = request.batch, self.kv.get(request.rid)
            del self.batches[batch][request.rid]
            if kv is not None and not request.kv_tokens and request.rid not in self.stepping:
                self.release(request)  # its prompt has begun
            self.residents.leave_if_due(batch.inst)

    def preempt(self, request: Live) -> Preempted:
        """Preempt a batch member to free its KV memory, and return the event that reports it.

        Later, its KV is computed again. With `preempt=swap`, its KV is moved to the host and back instead.
        """
        if self.swap and request.kv_tokens:
            self.moves.begin(Transfer(request, Host(0), attend=False, under=None))
        else:
            self.release(request)
        return self.preempted(request)

    def waits_for(self, request: Live) -> str:
        """Return the reason why a request waits: "load", "transfer", "queue" or "kv"; see WallClock."""
        assert request.batch is not None
        resident = self.residents.by_inst.get(request.batch.inst)
        if resident is None or resident.state == "loading":
            return "load"
        if request.rid in self.moves.moving:
            return "transfer"
        lanes = (self.lanes.get((request.batch, decode)) for decode in (False, True))
        if all(lane is None or lane.order is None for lane in lanes) or request.rid in self.kv:
            return "queue"
        account = self.account(request.model, request.batch.inst.place)
        return "queue" if account.fits(account.blocks_for(request.ctx_tokens + 1)) else "kv"

    def charge(self) -> None:
        """Add the time since the last charge to the cause for which each request now waits; see WallClock.

        All requests are charged at most once per CHARGE_S. The requests of a step are also charged at its beginning and
        its end.
        """
        if self.now_s < self._charged_s + CHARGE_S:
            return
        self._charged_s = self.now_s
        for request in self.live.values():
            running = self.stepping.get(request.rid)
            self._book(request)
            if running is None or running.worker.step is not running:
                request.cause = "admission" if request.batch is None else self.waits_for(request)

    def admit(self, action: Admit) -> Refusal | None:
        """Admit one request, or all later arrivals of a model, to a batch; see WallClock."""
        refusal = super().admit(action)
        if refusal is None and isinstance(action.who, int):
            request = self.live[action.who]
            self._book(request)
            if request.rid not in self.stepping:
                request.cause = self.waits_for(request)
        return refusal

    def noted(self) -> Noted:
        """Charge all requests, and return the run's records; see WallClock.

        To charge is to add the time of a request up to now to its present waiting cause.
        """
        self._charged_s = -math.inf
        return super().noted()

    def end(self, request: Live, state: Literal["done", "dropped", "failed"]) -> Finished:
        """End a request, free its memory, and return the event that reports it; see WallClock."""
        self._book(request)
        batch, finished = request.batch, super().end(request, state)
        self.generated.pop(request.rid, None)
        if batch is not None:
            self.residents.leave_if_due(batch.inst)
        return finished
