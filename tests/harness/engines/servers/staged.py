"""A world for the engine of servers in which time passes only where somebody waits: client, servers and processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.client.body import Server
from harness.client.client import Told
from harness.client.log import CONNECTING, DONE, DROPPED, FAILED, SENT, STREAMING, WAITING, Book, Log, assemble
from harness.engines.machine import Config, Served
from harness.engines.servers import engine as module
from harness.engines.servers import fleet
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Seat, Up
from harness.engines.servers.process import PortTaken
from harness.loop.replay import Outcome, replay
from harness.policy.actions import Action, Admit, Evict, Load, Run, Wake
from harness.policy.events import Arrived, Event, Finished, Prefilled, Woke
from harness.policy.types import Batch, Cluster, Gpu, Inst, Jobs, Model, UserError
from harness.policy.view import View
from harness.rows import record
from tests.harness.engines.servers.stubbed import Plain
from tests.harness.loop.scripted import Policy
from workloads.models import shape

MS = 1_000_000
START = frozenset({Woke})  # what a script hears that orders once and for all
LAG_NS, PREFILL_NS, STEP_NS = 1 * MS, 50 * MS, 10 * MS  # of the client, and of every server
START_NS, STOP_NS = 500 * MS, 100 * MS
TOKEN_BYTES, PAGE_BYTES, WEIGHTS = 10, 1000, 5000
LONGEST = 999  # tokens: with the one that follows, ten pages


class World:
    """Its time passes only where somebody waits."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0

    def at(self, ns: int, do: Callable[[], None]) -> None:
        """Do something at a time, after what was asked for earlier."""
        self.count += 1
        heapq.heappush(self.agenda, (ns, self.count, do))

    def sleep(self, timeout_s: float) -> None:
        """Sleep until the next thing happens, or the time is over."""
        until_ns = self.now_ns + timeout_s * 1e9
        if not self.agenda:
            assert timeout_s < float("inf"), "it would wait for ever"
        if self.agenda and self.agenda[0][0] <= until_ns:
            ns, _, do = heapq.heappop(self.agenda)
            self.now_ns = max(self.now_ns, ns)
            do()
        else:
            self.now_ns = max(self.now_ns + 1, round(until_ns))


class Sender:
    """The client, and the servers behind it: a prefill, then a token a step, whatever else they have to do.

    `deaf_ns` passes until it has heard of a route, and meanwhile requests leave by the one before.
    """

    def __init__(self, world: World, jobs: Jobs, deaf_ns: int = 0) -> None:
        self.world, self.jobs, self.deaf_ns = world, jobs, deaf_ns
        self.book, self.told = Book(len(jobs)), list[Told]()
        self.routes: dict[str, Server | None] = {}
        self.sent: list[tuple[int, Server]] = []
        self.down: set[str] = set()  # URLs at which nobody listens any more
        self.begun = False

    def start(self) -> None:
        """See Client."""

    def fileno(self) -> int:
        """See Client."""
        return -1

    def begin(self, zero_ns: int) -> None:
        """See Client."""
        self.begun = True
        for rid, at_s in enumerate(self.jobs.arrival_s.tolist()):
            at_ns = self.book.intended_ns[rid] = zero_ns + round(at_s * 1e9)
            self.world.at(at_ns, partial(self.arrive, rid, at_ns))

    def arrive(self, rid: int, at_ns: int) -> None:
        """Let a request's time come."""
        to = self.routes.get(self.jobs.models[self.jobs.model.item(rid)])
        self.told.append(Told("arrived", rid, at_ns, int(to is not None)))
        if to is not None:
            self.leave(rid, to, at_ns)

    def route(self, model: str, to: Server | None) -> None:
        """See Client."""

        def heard() -> None:
            self.routes[model] = to
            self.told.append(Told("routed", -1, self.world.now_ns, 0))

        if self.begun:
            self.world.at(self.world.now_ns + self.deaf_ns, heard)
        else:
            self.routes[model] = to

    def send(self, rid: int, to: Server) -> None:
        """See Client."""
        assert self.book.state[rid] == WAITING, "it was sent already"
        self.leave(rid, to, self.world.now_ns)

    def leave(self, rid: int, to: Server, due_ns: int) -> None:
        """Send it a moment later, and have it answered."""
        self.book.step(rid, CONNECTING)
        self.book.due_ns[rid] = due_ns
        self.sent.append((rid, to))
        self.world.at(due_ns + LAG_NS, lambda: self.write(rid, to))

    def write(self, rid: int, to: Server) -> None:
        """Let the server have it, if there is one."""
        if to.url in self.down:
            self.end(rid, FAILED, "failed", "connection refused")
            return
        if self.book.state[rid] != CONNECTING:
            return
        self.book.step(rid, SENT)
        self.book.write_ns[rid] = self.world.now_ns
        first_ns, n = self.world.now_ns + PREFILL_NS, self.jobs.output_tokens.item(rid)
        self.world.at(first_ns, lambda: self.chunk(rid, to, min(2, n)))
        for k in range(1, n - 1):
            self.world.at(first_ns + k * STEP_NS, lambda: self.chunk(rid, to, 1))
        self.world.at(first_ns + max(0, n - 2) * STEP_NS, lambda: self.end(rid, DONE, "done"))

    def chunk(self, rid: int, to: Server, tokens: int) -> None:
        """Send tokens, two in the first chunk."""
        if self.book.state[rid] not in {SENT, STREAMING}:
            return
        if to.url in self.down:
            self.end(rid, FAILED, "failed", "connection reset")
            return
        if self.book.byte_ns[rid] < 0:
            self.book.step(rid, STREAMING)
            self.book.byte_ns[rid] = self.world.now_ns
            self.told.append(Told("first", rid, self.world.now_ns, tokens))
        self.book.chunks(rid, self.world.now_ns, [tokens])

    def end(self, rid: int, state: int, kind: Any, why: str = "") -> None:
        """End it."""
        if self.book.state[rid] in {DONE, FAILED, DROPPED}:
            return
        self.book.step(rid, state)
        self.book.end_ns[rid] = self.world.now_ns
        if state == DONE:
            self.book.done_ns[rid], self.book.status[rid] = self.world.now_ns, 200
        if why:
            self.book.errors[rid] = why
        self.told.append(Told(kind, rid, self.world.now_ns, self.jobs.output_tokens.item(rid) if state == DONE else 0))

    def cancel(self, rid: int) -> None:
        """See Client."""
        self.world.at(self.world.now_ns, lambda: self.end(rid, DROPPED, "dropped"))

    def poll(self, timeout_s: float) -> list[Told]:
        """See Client."""
        assert timeout_s == 0.0
        told, self.told = self.told, []
        return told

    def log(self) -> Log:
        """See Client."""
        return assemble(self.book, [self.book.spill()])

    def close(self) -> None:
        """See Client."""


class Process:
    """A server's process that is alive until it is killed."""

    pid = -1

    def __init__(self, url: str) -> None:
        self.url, self.stopped, self.killed = url, False, False

    def start(self) -> None:
        """See process.Process."""

    def alive(self) -> bool:
        """See process.Process."""
        return not (self.stopped or self.killed)

    def stop(self, grace_s: float = 5.0) -> None:
        """See process.Process."""
        self.stopped = True

    def last_lines(self) -> str:
        """See process.Process."""
        return "bad_alloc"


class Small(Plain):
    """Servers of models of 5,000 bytes and ten pages of 1,000 bytes for a longest request."""

    name = "small"
    can = frozenset({"Load", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host"})
    slots = 2

    def __init__(self, config: Config, mem_bytes: int) -> None:
        model = Model(4, 1, WEIGHTS, TOKEN_BYTES, PAGE_BYTES, LONGEST, float("inf"), float("inf"))
        gpus = tuple(Gpu("cpu", 0, mem_bytes, 1, ()) for _ in range(config.gpus))
        self.cluster = Cluster(gpus, {m.name: model for m in config.models}, {}, None)  # type: ignore[arg-type]
        self.seats: list[tuple[Inst, int, Process]] = []
        self.sms: list[int | None] = []  # of each seat

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None = None) -> Seat:
        """See Kind."""
        log.write_text("it starts\n")
        self.sms.append(sms)
        process = Process(f"http://127.0.0.1:{len(self.seats) + 1}")
        self.seats.append((inst, kv_bytes, process))
        return Seat(Server(process.url, inst.model), process)  # type: ignore[arg-type]


@dataclass
class Script(Policy):
    """A policy that hears all that servers tell, unless a test says otherwise."""

    hears: frozenset[type] = frozenset({Woke, Arrived, Prefilled, Finished, Load, Evict})


class Stage:
    """An engine in a world of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, mem_bytes: int = 100_000, deaf_ns: int = 0) -> None:
        self.world = World()
        clock = SimpleNamespace(monotonic=lambda: self.world.now_ns / 1e9, monotonic_ns=lambda: self.world.now_ns)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(fleet, "time", clock)
        monkeypatch.setattr(fleet.Fleet, "wait", lambda _, timeout_s, also=None: self.world.sleep(timeout_s))
        monkeypatch.setattr(fleet.Fleet, "_attend", self.attend)
        config = Config(tuple(Served(m, shape("llama-3.2-1b")) for m in ("a", "b", "c")), token_times=True)
        self.kind = Small(config, mem_bytes)
        self.sender: Sender | None = None
        self.never_ready: set[str] = set()
        self.taken = 0  # starts that find their port taken
        monkeypatch.setattr(module, "Client", lambda jobs, **_: self.connect(jobs, deaf_ns))
        self.engine = Servers(config, self.kind)

    def connect(self, jobs: Jobs, deaf_ns: int) -> Sender:
        self.sender = Sender(self.world, jobs, deaf_ns)
        return self.sender

    def attend(self, up: Up, work: Any, what: Any) -> None:
        """Take a start's or a stop's time."""
        assert up.process is not None

        def over() -> None:
            if what == "stopped":
                work(up.process)
            if what == "ready" and self.taken:
                self.taken -= 1
                self.engine.fleet._ring(up, PortTaken("its port is taken"))
            elif what == "ready" and up.inst.model in self.never_ready:
                self.engine.fleet._ring(up, UserError(f"server {up.inst.model} ended before it was ready"))
            else:
                self.engine.fleet._ring(up, what)

        self.world.at(self.world.now_ns + (START_NS if what == "ready" else STOP_NS), over)

    def run(self, script: Policy, jobs: Jobs, end_s: float = float("inf")) -> tuple[Outcome, list[dict[str, Any]]]:
        """Replay a workload; rows, and what the loop counted."""
        try:
            outcome = replay(script, self.engine, jobs, end_s=end_s)
            rows = [row for batch in self.engine.rows() for row in batch.to_pylist()]
        finally:
            self.engine.close()
        for row in rows:
            parts = [row[f"{wait}_ns"] for wait in record.WAITS]
            assert min(parts) >= 0
            if row["done_ns"] is not None:
                assert sum(parts) == row["done_ns"] - row["arrival_ns"]
            assert len(row["token_ns"]) == row["made_tokens"]
        return outcome, rows


def jobs(*requests: tuple[float, str, int]) -> Jobs:
    """Return jobs from requests: arrival, model, output tokens."""
    arrival_s, models, outputs = zip(*requests, strict=True)
    none = np.full(len(requests), np.inf)
    model = np.array(["abc".index(m) for m in models], np.int32)
    prompts = np.full(len(requests), 8, np.int32)
    return Jobs(("a", "b", "c"), np.array(arrival_s), model, prompts, np.array(outputs, np.int32), none, none)


def batch(model: str) -> Batch:
    """Return the batch in which a model is served."""
    return Batch(Inst(model, (0,)))


def waits(row: Mapping[str, Any]) -> dict[str, float]:
    """Return milliseconds by cause, where there are any."""
    return {wait: round(row[f"{wait}_ns"] / MS, 3) for wait in record.WAITS if row[f"{wait}_ns"]}


def on_demand(event: Event, _: View) -> Iterable[Action]:
    """Load the model of each request when it comes, and admit it."""
    if isinstance(event, Arrived):
        to = batch(event.request.model)
        yield from (Load(to.inst), Run(to), Admit(event.request.id, to))


def at(says: Mapping[float, Sequence[Action]]) -> Callable[[Event, View], Iterable[Action]]:
    """Order actions at their times; those of 0 s are the start's."""
    orders = {str(at_s) if at_s else "start": actions for at_s, actions in says.items()}

    def answers(event: Event, _: View) -> Iterable[Action]:
        if isinstance(event, Woke):
            yield from orders.get(event.key, ())
        if event == Woke("start"):
            yield from (Wake(at_s, str(at_s)) for at_s in says if at_s)

    return answers


def routed(*models: str) -> Callable[[Event, View], Iterable[Action]]:
    """Route models that are up from the start, and need no policy from there on."""
    lanes = {m: batch(m) for m in models}
    return at({0.0: [x for m, lane in lanes.items() for x in (Load(lane.inst), Run(lane), Admit(m, lane))]})
