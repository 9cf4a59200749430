"""The simulator with a recorder of its run (`trace.py`).

A recorded run produces the same rows as an unrecorded one. It stops at every instant, after the steps of that instant
have begun, and reads the kernel's records. Runs without a trace do not use this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.sim import kernel, state
from harness.engines.sim import trace as record
from harness.engines.sim.engine import PHASE, Sim
from harness.engines.sim.kernel.loop import next_arrival, next_time
from harness.engines.sim.trace import Trace
from harness.policy.actions import Action, Load
from harness.policy.events import Done, Event
from harness.policy.types import Inst

QUIET_S = 1e-9  # so long after an instant, all that is formed at it has been formed
TOLD_EVERY = 2000  # instants between two reports of progress
BOUNDARY, GRANT, LINK, TAIL = range(4)  # stages of a transfer: a move waits for the boundary of its request first
Ints = NDArray[np.int64]


class _Running(NamedTuple):
    """A step in flight, with the number of steps and the work that its lane had completed before it."""

    ran: int
    work: float
    step: record.Step


Progress = Callable[[int, int], None]


def silent(_done: int, _total: int) -> None:
    """Ignore a report of a run's progress."""


class Traced(Sim):
    """A simulator that records its run."""

    recorder: Recorder

    @classmethod
    def of(cls, sim: Sim, look_at: int = -1, progress: Progress = silent) -> Traced:
        """Return a new recording engine with the settings of `sim`, whose run must not have begun.

        If `look_at` is a request's id, the trace contains only that request's stretches and the use of links during its
        life. `progress` is called with the number of ended requests and the number of all requests.
        """
        traced = cls(sim.config, sim._options, sim._machine)  # noqa: SLF001 - of its class
        traced.recorder = Recorder(traced, look_at, progress)
        return traced

    def poll(self, until_s: float) -> Event | None:
        """Return the next event due by `until_s`, or None if there is none; record each instant until then.

        See Engine.
        """
        S = self.S
        while True:
            now = S.now[0]
            if until_s <= now + QUIET_S:
                return super().poll(until_s)
            if (wakes_s := self.recorder.asleep_until()) > now:
                target = min(until_s, wakes_s)
                event = super().poll(target)
                if event is not None or target == until_s or S.now[0] < target:
                    return event
                continue
            if (event := super().poll(now + QUIET_S)) is not None:
                return event
            if S.s["dirty_head"] >= 0 or S.s["grants"]:
                continue  # something ended within QUIET_S: what follows from it is formed first
            S.now[0] = now
            self.recorder.note(now)
            target = min(until_s, self._next_s())
            event = super().poll(target)
            if event is not None or target == until_s or S.now[0] < target:
                return event

    def do(self, action: Action) -> Done | None:
        """Start an action; see Engine."""
        if isinstance(action, Load) and self.view().weights(action.inst) == "out":
            self.recorder.asked.add(action.inst)
        return super().do(action)

    def _next_s(self) -> float:
        """Return the time of the next arrival, or the result of `next_time` if that is earlier.

        Call it after the steps of this instant have begun.
        """
        S = self.S
        r = next_arrival(S.at)
        arrival_s = float(S.requests["arrival"][r]) if r >= 0 else math.inf
        return max(float(S.s["now"]), min(float(next_time(S.at)), arrival_s))


class Recorder:
    """A recorder that reads the kernel's records at each instant, and notes changes in a trace."""

    def __init__(self, sim: Sim, look_at: int, progress: Progress) -> None:
        self._sim, self._look_at, self._progress = sim, look_at, progress
        self._trace = Trace(sim.config.start_s)
        self._noted = 0  # instants noted so far
        self._at = sim.config.start_s  # the last instant noted
        self._work, self._rate, self._part, self._since, self._began = (np.zeros(0) for _ in range(5))  # by lane
        self._running: dict[int, _Running] = {}  # a lane maps to its step in flight
        self._turns: dict[int, tuple[float, int]] = {}  # a lane maps to when its turn began, and its steps before
        self._lowest = 0  # no request before this one is alive
        self._key, self._start, self._spent = np.zeros(0, np.int64), np.zeros(0), np.zeros((0, len(record.SECONDS)))
        # Each has a row for each request that is alive.
        self._live, self._column, self._lane = (np.zeros(0, np.int64) for _ in range(3))
        self._facts: dict[str, float] = {}
        self.asked: set[Inst] = set()  # instances whose load was asked for at this instant
        self._transfers: dict[int, int] = {}  # transfers under way: a row of the kernel maps to an index of the trace
        self._stages: dict[int, int] = {}  # an index of the trace maps to the stage
        self._carried: dict[int, tuple[int, float]] = {}  # a link maps to the index of its transfer, and since when
        self._memory: list[tuple[int, int]] = []  # each GPU's bytes in use, and those of KV

    def trace(self) -> Trace:
        """Return the trace. Call it once, after the run."""
        S, trace = self._sim.S, self._trace
        now = float(S.s["now"])
        self.note(now)
        for r in np.flatnonzero(self._key >= 0).tolist():
            self._close(r, now)
        for lane in list(self._running):
            self._end_step(lane, now)
        for lane in list(self._turns):
            self._end_turn(lane, now)
        for link in list(self._carried):
            self._end_carried(link, now)
        trace.end_s = now
        gpus = S.gpus[: self._sim.config.gpus]
        trace.gpu_bytes, trace.sms = tuple(gpus["cap"].tolist()), int(gpus["sms"][0])
        R = S.requests
        trace.arrival_s, trace.first_s, trace.done_s = (np.array(R[name]) for name in ("arrival", "first", "done"))
        return trace

    def asleep_until(self) -> float:
        """Return the time until which no instant has to be recorded, or -infinity if every instant has to be.

        When only one request is recorded, return its arrival time before it arrives, and infinity after its end has
        been recorded.
        """
        if self._look_at < 0:
            return -math.inf
        R, r = self._sim.S.requests, self._look_at
        if R["state"].item(r) == state.FUTURE and math.isfinite(arrival_s := float(R["arrival"][r])):
            return arrival_s
        over = R["state"].item(r) >= state.DONE and len(self._key) and self._key[r] < 0
        return math.inf if over else -math.inf

    # ------------------------------------------------------------ an instant

    def note(self, now: float) -> None:
        """Record the state of requests, lanes, links and memory that lasts from `now` until the next instant."""
        L = self._sim.S.lanes.view(np.ndarray)
        for name in ("_work", "_rate", "_part", "_since", "_began"):
            if len(rows := getattr(self, name)) < len(L):
                fresh = np.full(len(L) - len(rows), 0.0 if name in {"_work", "_rate", "_part"} else -math.inf)
                setattr(self, name, np.concatenate([rows, fresh]))
        self._work += self._rate * (now - self._at)
        self._spend(now - self._at)
        self._at = now
        self._note_lanes(L, now)
        self._note_requests(L, now)
        self._note_links(now)
        if self._look_at < 0:
            self._note_memory(now)
        self._noted += 1
        if self._noted % TOLD_EVERY == 0:
            total = len(self._sim.S.requests)
            self._progress(total - self._sim.S.left[0], total)

    def _note_lanes(self, L: NDArray[Any], now: float) -> None:
        busy = L["busy"] != state.IDLE
        self._rate = np.where(busy, L["rate"], 0.0)
        self._part = np.array(L["part"])
        if self._look_at >= 0:
            return
        since = np.where(busy, L["started_s"], -math.inf)
        for lane in np.flatnonzero(since != self._since).tolist():
            if lane in self._running:
                self._end_step(lane, now)
            if busy[lane]:
                self._begin_step(L, lane)
        self._since = since
        began = np.where(L["turn"] == state.BEGUN, L["turn_began"], -math.inf)
        for lane in np.flatnonzero(began != self._began).tolist():
            if lane in self._turns:
                self._end_turn(lane, now)
            if began[lane] > -math.inf:
                self._turns[lane] = float(began[lane]), int(L["ran"][lane])
        self._began = began

    def _begin_step(self, L: NDArray[Any], lane: int) -> None:
        R, n = self._sim.S.requests, L[lane]
        prompts = tokens = 0
        r = int(n["pieces"])
        while r >= 0:
            prompts, tokens = prompts + 1, tokens + int(R["piece"][r])
            r = int(R["next_piece"][r])
        decodes = int(n["decodes"])
        phase = "mixed" if prompts and decodes else "prefill" if prompts else "decode"
        step = record.Step(
            self._sim.names.batches[lane >> 1],
            bool(lane & 1),
            phase,
            float(n["started_s"]),
            math.nan,
            0,
            decodes,
            prompts,
            tokens,
            int(n["sms"]),
            0.0,
        )
        self._running[lane] = _Running(int(n["ran"]), float(self._work[lane]), step)

    def _end_step(self, lane: int, now: float) -> None:
        begun = self._running.pop(lane)
        ran = self._sim.S.lanes["ran"].item(lane) - begun.ran
        solo_s = float(self._work[lane]) - begun.work
        self._trace.steps.append(begun.step._replace(end_s=now, steps=ran, solo_s=solo_s))

    def _end_turn(self, lane: int, now: float) -> None:
        began, ran = self._turns.pop(lane)
        kind = 2 if lane & 1 else self._sim.S.lanes["kind"].item(lane)
        steps = self._sim.S.lanes["ran"].item(lane) - ran
        self._trace.turns.append(record.Turn(self._sim.names.batches[lane >> 1], PHASE[kind], began, now, steps))

    # ------------------------------------------------------------ requests

    def _note_requests(self, L: NDArray[Any], now: float) -> None:
        """End the stretches of requests whose activity or batch has changed, and begin new stretches."""
        S = self._sim.S
        R, w = S.requests.view(np.ndarray), S.s
        if len(self._key) < len(R):
            self._key, self._start = np.full(len(R), -1), np.zeros(len(R))
            self._spent = np.zeros((len(R), len(record.SECONDS)))
        low, high = self._lowest, int(w["arrived"]) if w["opened"] == len(R) else len(R)
        states = R["state"][low:high]
        for r in (low + np.flatnonzero((states >= state.DONE) & (self._key[low:high] >= 0))).tolist():
            self._close(r, float(R["done"][r]))
        live = low + np.flatnonzero((states > state.FUTURE) & (states < state.DONE))
        if w["opened"] == len(R):
            self._lowest = int(live[0]) if len(live) else high
        if self._look_at >= 0:
            live = live[live == self._look_at]
            self._lowest = 0
        doing, self._column, self._lane = self._doing(L, R, live)
        self._live = live
        key = doing << 32 | R["batch"][live] + 1
        for i in np.flatnonzero(self._key[live] != key).tolist():
            r = int(live[i])
            arrived = self._key[r] < 0
            if not arrived:
                self._close(r, now)
            self._start[r] = R["arrival"][r] if arrived else now
            self._key[r] = key[i]
        if self._look_at >= 0 and len(live):
            self._look(int(doing[0]), int(self._column[0]))

    def _spend(self, passed_s: float) -> None:
        """Add the time since the last instant to each request's seconds of the kind that was noted at that instant."""
        live, column = self._live, self._column
        if len(live):
            self._spent[live, column] += passed_s
            steps = column == record.COMPUTE
            r, lane = live[steps], self._lane[steps]
            solo_s, had_s = self._rate[lane] * passed_s, self._part[lane] * passed_s
            self._spent[r, record.COMPUTE] += solo_s - passed_s
            self._spent[r, record.TIME_SLICE] += passed_s - had_s
            self._spent[r, record.CONTENTION] += had_s - solo_s

    def _doing(self, L: NDArray[Any], R: NDArray[Any], live: Ints) -> tuple[Ints, Ints, Ints]:
        """Return each live request's activity, the kind of its present seconds (SECONDS), and its lane (-1: no lane).

        For requests in steps the kind is COMPUTE; `_spend` later splits it into compute, time slices and contention.
        For a wait with several causes, the kind is the one that the kernel's `waits.charge` charges.
        """
        S = self._sim.S
        B, I, M = (rows.view(np.ndarray) for rows in (S.batches, S.insts, S.models))
        at, b = R["state"][live], R["batch"][live]
        doing, column, lane = np.full(len(live), record.QUEUE), np.full(len(live), record.QUEUE), np.full(len(live), -1)
        if len(B):
            wait, run = at == state.WAIT, at == state.RUN
            first, busy = 2 * np.arange(len(B)), L["busy"] != state.IDLE
            mixed = busy[0::2] & (L["decodes"][0::2] > 0)
            lane = np.where(run, np.where(mixed, first, np.where(busy[1::2], first + 1, -1))[b], -1)
            prompts = wait & (R["piece"][live] > 0) & busy[2 * b]
            lane[prompts] = 2 * b[prompts]
            opened = L["open"][0::2]
            decodes = L["open"][1::2] | (opened & (L["kind"][0::2] == state.MIXED))
            column[np.where(wait, opened[b], decodes[b]) == 0] = record.CLOSED
            column[(wait & (B["blocked"][b] != 0)) | (run & (B["stalled"][b] != 0))] = record.KV
            away = (at == state.AWAY) | (at == state.MOVE)
            doing[away], column[away] = record.TRANSFER, record.TRANSFER
            steps = lane >= 0
            doing[steps], column[steps] = np.where(wait[steps], record.PREFILL, record.DECODE), record.COMPUTE
            out = I["state"][B["inst"]][b] < state.IN
            doing[out], column[out] = record.LOAD, record.LOAD
        held = at == state.HELD
        doing[held] = column[held] = np.where(M["places"][R["model"][live[held]]] == 0, record.LOAD, record.ADMISSION)
        return doing, column, lane

    def _close(self, r: int, end_s: float) -> None:
        key, start_s = int(self._key[r]), float(self._start[r])
        seconds = {name: x for name, x in zip(record.SECONDS, self._spent[r].tolist(), strict=True) if x > 0.0}
        self._key[r], self._spent[r] = -1, 0.0
        facts, self._facts = (self._facts, {}) if r == self._look_at else ({}, self._facts)
        if end_s > start_s:
            b = (key & 0xFFFFFFFF) - 1
            inst = self._sim.names.batches[b].inst if b >= 0 else None
            self._trace.stretches.append(
                record.Stretch(r, start_s, end_s, record.DOING[key >> 32], inst, seconds, facts)
            )

    def _look(self, doing: int, column: int) -> None:
        """Record figures about the present wait of the one recorded request, such as the number of prompts ahead of it.

        Each figure is recorded once, at the first instant of the wait.
        """
        S, facts = self._sim.S, self._facts
        q = S.requests[self._look_at]
        if doing == record.QUEUE and q["state"] == state.WAIT:
            R = S.requests
            ahead = (R["batch"] == q["batch"]) & (R["state"] == state.WAIT) & (R["seq"] < q["seq"])
            facts.setdefault("ahead", float(np.count_nonzero(ahead)))
            if column == record.KV and "need_bytes" not in facts:
                i = int(S.batches["inst"][q["batch"]])
                tokens, per = q["prompt"] + q["made"] + 1, int(S.s["block_tokens"])
                facts["need_bytes"] = float(-(-tokens // per) * S.insts["block_bytes"][i])
                facts["free_bytes"] = float(min(kernel.peek_free(S.at, g) for g in self._sim.names.places[i]))
                if (limit := int(S.insts["limit"][i])) >= 0:
                    facts |= {"limit_bytes": float(limit), "used_bytes": float(kernel.peek_used(S.at, i))}

    # ------------------------------------------------------------ links and memory

    def _note_links(self, now: float) -> None:
        S = self._sim.S
        X, x = S.transfers, int(S.s["transfer_head"])
        if x < 0 and not self._transfers:
            return
        seen = set[int]()
        while x >= 0:
            seen.add(x)
            self._note_transfer(X[x], x, now)
            x = int(X["next"][x])
        self.asked.clear()
        for gone in self._transfers.keys() - seen:
            self._end_transfer(gone, now)
        carries = dict[int, int]()
        for link, part in enumerate(S.links["current"].tolist()):
            if part >= 0:
                carries[link] = self._transfers[int(X["transfer"][part])]
        for link, (index, _) in list(self._carried.items()):
            if carries.get(link) != index:
                self._end_carried(link, now)
        for link, index in carries.items():
            self._carried.setdefault(link, (index, now))

    def _note_transfer(self, X: Any, x: int, now: float) -> None:
        kind, request, to = int(X["kind"]), int(X["request"]), self._sim.names.insts[X["inst"]]
        stage = int(X["stage"])
        if kind == state.SHIFT and request < 0:
            stage = BOUNDARY
        index = self._transfers.get(x, -1)
        if index >= 0:
            was = self._trace.transfers[index]
            same = (was.kind, was.model, was.to) == (record.KINDS[kind], to.model, to.place)
            same = same and not (kind == state.LOAD and to in self.asked)
            if not same or stage < self._stages[index] or was.request not in {-1, request}:
                self._end_transfer(x, now)  # its row was taken by another at this instant
                index = -1
        if index < 0:
            index = self._transfers[x] = len(self._trace.transfers)
            self._trace.transfers.append(record.Transfer(record.KINDS[kind], to.model, None, to.place, request, 0, now))
        transfer, I = self._trace.transfers[index], self._sim.S.insts
        if kind == state.LOAD:
            transfer.size_bytes = int(I["weight_bytes"][X["inst"]] * I["gpu_count"][X["inst"]])
        elif request >= 0:
            transfer.request, transfer.source = request, self._sim.names.insts[X["source"]].place
            transfer.size_bytes = int(X["blocks"] * I["block_bytes"][X["inst"]] * I["gpu_count"][X["inst"]])
        if stage >= LINK and math.isnan(transfer.granted_s):
            transfer.granted_s = now
        if stage == TAIL and math.isnan(transfer.moved_s):
            transfer.moved_s = now
        self._stages[index] = stage

    def _end_transfer(self, x: int, now: float) -> None:
        index = self._transfers.pop(x)
        transfer = self._trace.transfers[index]
        transfer.end_s = now
        transfer.done = self._stages.pop(index) >= LINK
        if transfer.done and math.isnan(transfer.moved_s):
            transfer.moved_s = now

    def _end_carried(self, link: int, now: float) -> None:
        index, since = self._carried.pop(link)
        if now > since:
            self._trace.carried.append(record.Carried(link, index, since, now))

    def _note_memory(self, now: float) -> None:
        gpus = self._sim.S.gpus[: self._sim.config.gpus].view(np.ndarray)
        for g, pair in enumerate(zip(gpus["used"].tolist(), gpus["kv_bytes"].tolist(), strict=True)):
            if g == len(self._memory):
                self._memory.append((-1, -1))
            if self._memory[g] != pair:
                self._memory[g] = pair
                self._trace.memory.append(record.Memory(g, now, pair[0] - pair[1], pair[1]))
