"""The servers of an engine as they come and go: their processes, their memory, and changes of their states.

For each server that starts or stops, a thread waits and reports the end. All else happens in the caller's thread.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from harness.client.body import Server, Style
from harness.engines.commands import Ask
from harness.engines.machine import Refusal
from harness.engines.servers.process import PortTaken, Process
from harness.engines.servers.states import SERVER, STATES, State
from harness.policy.actions import Action, Evict, Load
from harness.policy.types import Cluster, Infeasible, Inst, Option, UserError
from harness.policy.view import Weights

SILENT_S = 120.0  # without a byte from its server, after which a request fails
READY_S = 300.0  # within which a server must answer, fall asleep or wake
TRIES = 3  # starts of a server whose port is taken meanwhile


class Seat(NamedTuple):
    """The address of a server, and its process if we start it."""

    at: Server
    process: Process | None  # not started yet; None: the server is not ours, and runs already


class Sleep(NamedTuple):
    """The orders that make a server free its GPU memory and take it back, while its process keeps running."""

    down: tuple[Ask, ...]
    up: tuple[Ask, ...]
    rereads: bool = False  # waking reads weights from their files, which drawn weights have not


class Kind:
    """A kind of server: program, abilities and settings. The defaults here suit servers that run already."""

    name: str
    can: frozenset[str]
    ways: frozenset[str]  # ways of Load that it knows
    sleeps: Mapping[str, Sleep] = {}  # keyed by way: its servers sleep when evicted, and wake when loaded again
    offers: Mapping[str, tuple[Option, ...]]
    cluster: Cluster
    apart = False  # a start, a sleep and a wake measure the memory of their GPU, so no two may overlap there
    elastic = False  # servers take KV memory on demand, up to what `resize` says; else all of it when they start
    slots: int  # requests of the longest size for which a server without a limit takes KV memory, if there is room
    style: Style
    lacks: str  # what it needs and is not here, as in Engine
    facts: Mapping[str, str]  # `measured_on` has them too

    def ready(self, folder: Path) -> None:
        """Find programs and models, and start what the servers share.

        The files that the engine needs during the run may be written to `folder`. Raises UserError, or Unsupported if
        this host has too few GPUs.
        """

    def close(self) -> None:
        """End what `ready` started, after the servers have ended. May be called twice, or without `ready`."""

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None) -> Seat:
        """Prepare a server for an instance, on `sms` SMs or, if that is None, on all of them. Raises UserError."""
        raise NotImplementedError

    def resize(self, inst: Inst, kv_bytes: int) -> None:
        """Limit the KV memory of a running server; do nothing if it is fixed from the start. Raises UserError."""

    def roots(self) -> list[int]:
        """Return the process ids of the servers on this machine that we did not start."""
        return []

    def served(self) -> Mapping[str, str]:
        """Return, for each model, a text that describes its server."""
        return {}


@dataclass(slots=True, eq=False)
class Up:
    """A server from its first Load to the end of its process; between two Loads it may be asleep."""

    inst: Inst
    way: str = "host"  # way of the Load by which it came
    state: State = "planned"  # see states.py
    kv_bytes: int = 0
    asked: list[Action] = field(default_factory=list)  # Loads, later Evicts, whose end is to be reported
    seat: Seat | None = None
    since_s: float = 0.0  # when the start or stop under way began, by time.monotonic
    tries: int = 1
    flying: set[int] = field(default_factory=set)  # requests that were sent to it and have not ended
    sms: int | None = None  # SMs with which it was started; None: all

    @property
    def weights(self) -> Weights:
        """The state of the server's weights, as policies see it."""
        return STATES[self.state][0]

    @property
    def process(self) -> Process | None:
        """The server's process; None if we do not start it, or have not yet."""
        return self.seat.process if self.seat is not None else None


What = Literal["ready", "stopped", "asleep"]
DOES: Mapping[State, str] = {"starting": "start", "waking": "wake", "stopping": "stop", "falling asleep": "sleep"}


class Change(NamedTuple):
    """A change of a server's state; `why` is the reason if the server is dead."""

    up: Up
    what: What | Literal["dead"]
    why: str = ""


class Span(NamedTuple):
    """The seconds that a start, a stop, a sleep or a wake of a server took."""

    what: str
    model: str
    gpus: list[int]
    begun_s: float  # read off time.monotonic
    seconds: float


class Fleet:
    """The servers of an engine, with their limits, faults and logs."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.gpus, self.models = kind, kind.cluster.gpus, kind.cluster.models
        self.up: dict[Inst, Up] = {}  # their order is that of Load
        self.asleep: dict[Inst, Up] = {}
        self.dead: dict[Inst, str] = {}  # servers that ended by themselves, and why, until they are loaded again
        self.limits: dict[tuple[str, int], int | None] = {}
        self.sms: dict[Inst, int | None] = {}  # SMs with which servers start; None, and for others: all
        self.faults: list[str] = []  # sorted by time
        self.spans: list[Span] = []
        self.logs: dict[Path, None] = {}  # one per server that was ever started; a later start appends to it
        self._folder = Path()
        self._bell: tuple[int, int] | None = None  # a pipe by which threads wake `wait`
        self._word: SimpleQueue[tuple[Up, What | UserError]] = SimpleQueue()  # what became of servers
        self._threads: list[Thread] = []
        self._turns = [Lock() for _ in self.gpus]  # starts, sleeps and wakes of a GPU may take turns
        self._closing = False

    def open(self, folder: Path) -> None:
        """Prepare to start servers, whose logs are written to `folder`."""
        self._folder, self._bell, self._closing = folder, os.pipe(), False
        self.kind.ready(folder)

    def close(self) -> None:
        """Stop all servers at once, whatever they are doing. Servers that wait for their turn to start do not start."""
        self._closing = True
        every = (*self.up.values(), *self.asleep.values())
        stops = [Thread(target=up.process.stop) for up in every if up.process is not None]
        for stop in stops:
            stop.start()
        for thread in (*stops, *self._threads):
            thread.join()
        self.kind.close()
        self.up, self.asleep, self._threads = {}, {}, []
        for end in self._bell or ():
            os.close(end)
        self._bell = None

    # ------------------------------------------------------------ memory

    def limit(self, inst: Inst) -> int | None:
        """Return the limit on an instance's KV bytes on each of its GPUs, in whole pages; None if it has no limit."""
        page = self.models[inst.model].page_bytes
        limits = [limit for g in _gpus(inst) if (limit := self.limits.get((inst.model, g))) is not None]
        return min(limits) // page * page if limits else None

    def kv_bytes(self, inst: Inst, room: int) -> int:
        """Return the KV bytes of a server that starts with `room` bytes free for KV; the result may exceed `room`."""
        if (limit := self.limit(inst)) is not None:
            return limit
        model = self.models[inst.model]
        page = model.page_bytes
        longest = -(-(model.max_tokens + 1) * model.kv_token_bytes // page) * page
        return min(self.kind.slots * longest, max(longest, room // page * page)) if self.kind.slots else 0

    def free_bytes(self, gpu: int) -> int:
        """Return the bytes of a GPU that servers have not taken.

        Servers take their weights and, unless KV memory is elastic, their KV memory.
        """
        mine = (up for up in self.up.values() if gpu in _gpus(up.inst))
        kv = 0 if self.kind.elastic else 1
        return self.gpus[gpu].mem_bytes - sum(self.models[up.inst.model].weight_bytes + kv * up.kv_bytes for up in mine)

    def room(self, inst: Inst, sized: bool) -> tuple[int, Refusal | None]:
        """Return the KV bytes of a server to be started (0 if not `sized`), and a refusal if it does not fit."""
        weights, place = self.models[inst.model].weight_bytes, _gpus(inst)
        free, have = min(self.free_bytes(g) for g in place), min(self.gpus[g].mem_bytes for g in place)
        kv = self.kv_bytes(inst, free - weights) if sized else 0
        least = weights + (self.kv_bytes(inst, 0) if sized and not self.kind.elastic else 0)
        if least > have:
            return kv, ("never", f"{inst.model} takes {least} bytes, GPU {_gpu_text(inst)} has {have}")
        if least > free:
            return kv, ("not now", f"{inst.model} takes {least} bytes, {free} are free on GPU {_gpu_text(inst)}")
        return kv, None

    def size(self) -> None:
        """Set the KV memory of the servers that start with the run, once all their limits are known.

        Servers without a limit share the remaining memory equally; if memory is elastic, each may take all the rest.
        Raises Infeasible if the servers together take more than a GPU has.
        """
        shared = [up for up in self.up.values() if self.limit(up.inst) is None]
        for up in self.up.values():
            up.kv_bytes = self.limit(up.inst) or 0
        alike = [1 if self.kind.elastic else sum(g in _gpus(up.inst) for up in shared) for g in range(len(self.gpus))]
        share = [self.free_bytes(g) // max(1, alike[g]) for g in range(len(self.gpus))]
        for up in shared:
            up.kv_bytes = self.kv_bytes(up.inst, min(share[g] for g in _gpus(up.inst)))
        for g, gpu in enumerate(self.gpus):
            if (free := self.free_bytes(g)) < 0:
                raise Infeasible(
                    f"the servers of the start take {gpu.mem_bytes - free} bytes of GPU {g}, which has {gpu.mem_bytes}"
                )

    # ------------------------------------------------------------ starts and stops

    def step(self, up: Up, state: State) -> None:
        """Move a server to a state. An illegal step is recorded as a fault, or raises an error (see Diagram)."""
        if wrong := SERVER.illegal(up.state, state, f"of {up.inst.model} on GPU {_gpu_text(up.inst)}"):
            self.faults.append(wrong)
        up.state = state

    def load(self, action: Load, kv_bytes: int) -> Up:
        """Register and return the server for a Load: the instance's sleeping one or a new one. Call `start` next."""
        up = self.asleep.pop(action.inst, None) or Up(action.inst, action.way)
        up.kv_bytes, up.asked = kv_bytes, [action]
        self.dead.pop(up.inst, None)
        self.up[up.inst] = up
        return up

    def evict(self, up: Up, action: Evict) -> None:
        """Mark a server as draining: it gets no more requests. Call `stop` once its requests have ended."""
        self.step(up, "draining")
        up.asked = [action]

    def start(self, up: Up) -> None:
        """Start a server, or wake it if it sleeps; once it answers, `changes` reports it as ready."""
        if up.state == "asleep":
            self.step(up, "waking")
            up.since_s = time.monotonic()
            self._attend(up, lambda process: tell(process, self.kind.sleeps[up.way].up), "ready")
            return
        self.step(up, "starting")
        log = self._folder / f"{re.sub('[^a-zA-Z0-9.-]+', '-', up.inst.model)}-gpu{_gpu_text(up.inst)}.log"
        self.logs[log] = None
        up.since_s, up.sms = time.monotonic(), self.sms.get(up.inst)
        try:
            up.seat = self.kind.seat(up.inst, up.kv_bytes, log, up.sms)
            if up.seat.process is not None and not self.kind.apart:
                up.seat.process.start()
        except UserError as error:
            self._ring(up, error)
            return

        def ready(process: Process) -> None:
            if self.kind.apart:
                process.start()
                if self._closing:  # `close` may have come before it was there to stop
                    process.stop()
                    return
            process.wait_ready(READY_S)

        self._attend(up, ready, "ready")

    def stop(self, up: Up) -> None:
        """Stop a server, or put it to sleep if its `Load` named a way that allows sleep; `changes` reports the end."""
        sleep = self.kind.sleeps.get(up.way)
        self.step(up, "falling asleep" if sleep else "stopping")
        up.since_s = time.monotonic()
        if sleep:
            self._attend(up, lambda process: tell(process, sleep.down), "asleep")
        else:
            self._attend(up, lambda process: process.stop(), "stopped")

    def _attend(self, up: Up, work: Callable[[Process], None], what: What) -> None:
        """Do lengthy `work` with a server's process in a thread, and report its end as `what`."""
        process = up.process
        if process is None:
            self._ring(up, what)
            return

        turns = [self._turns[g] for g in sorted(_gpus(up.inst))] if self.kind.apart and what != "stopped" else []

        def attend() -> None:
            try:
                with ExitStack() as stack:
                    for turn in turns:
                        stack.enter_context(turn)
                    if turns:
                        if self._closing:
                            return
                        up.since_s = time.monotonic()
                    work(process)
                self._ring(up, what)
            except UserError as error:
                self._ring(up, error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(Thread(target=attend, daemon=True))
        self._threads[-1].start()

    def resize(self, up: Up, kv_bytes: int) -> None:
        """Change the limit on an elastic server's KV memory; if that fails, report the server as dead."""
        up.kv_bytes = kv_bytes
        if up.state == "ready":
            try:
                self.kind.resize(up.inst, kv_bytes)
            except UserError as error:
                self._ring(up, UserError(f"no limit for the server of {up.inst.model}: {error}"))

    def _ring(self, up: Up, came: What | UserError) -> None:
        self._word.put((up, came))
        if self._bell is not None:
            os.write(self._bell[1], b"!")

    # ------------------------------------------------------------ what became of them

    def wait(self, timeout_s: float, also: int | None = None) -> None:
        """Sleep until a server changes, the file descriptor `also` is readable, or `timeout_s` is over."""
        assert self._bell is not None
        poll, ends = select.poll(), list[int]()
        for fd in (self._bell[0], also):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        try:
            for up in (*self.up.values(), *self.asleep.values()):
                if up.process is not None and up.state in {"ready", "draining", "asleep"}:
                    with suppress(ProcessLookupError):
                        ends.append(os.pidfd_open(up.process.pid))
                        poll.register(ends[-1], select.POLLIN)
            poll.poll(None if timeout_s == float("inf") else 1000 * max(0.0, timeout_s))
        finally:
            for fd in ends:
                os.close(fd)

    def changes(self) -> Iterator[Change]:
        """Yield the changes of servers since the last call, and remove from `up` the servers that have ended."""
        yield from self._ended()
        while True:
            try:
                up, came = self._word.get_nowait()
            except Empty:
                return
            if self._bell is not None:
                os.read(self._bell[0], 1)
            if self.up.get(up.inst) is not up:
                continue
            if not isinstance(came, UserError):
                yield self._changed(up, came)
            elif isinstance(came, PortTaken) and up.tries < TRIES:
                up.tries += 1
                self.start(up)
            else:
                yield self._dead(up, self._refused(up, came))

    def _ended(self) -> Iterator[Change]:
        """Yield the changes of servers that ended by themselves.

        If a server ended while asleep, it is dropped without a change, and the next Load of its instance starts a new
        one.
        """
        for inst, up in list(self.asleep.items()):
            if up.process is not None and not up.process.alive():
                self.step(up, "dead")
                del self.asleep[inst]
                self.faults.append(f"the server of {inst.model} on GPU {_gpu_text(inst)} ended in its sleep")
        for up in list(self.up.values()):
            process = up.process
            if up.state in {"ready", "draining"} and process is not None and not process.alive():
                yield self._dead(up, _with_log(up, "ended by itself"))

    def _refused(self, up: Up, error: UserError) -> str:
        """Return the reason why a server is given up.

        If it did not sleep or wake as ordered, the reason names the server and the order, and ends with the last lines
        of the server's log.
        """
        if up.state not in {"waking", "falling asleep"}:
            return str(error)
        return _with_log(up, f"did not {DOES[up.state]}: {error}")

    def _changed(self, up: Up, what: What) -> Change:
        taken_s = time.monotonic() - up.since_s
        self.spans.append(Span(DOES.get(up.state, what), up.inst.model, list(_gpus(up.inst)), up.since_s, taken_s))
        self.step(up, what)
        if what == "ready":
            if self.kind.elastic:
                self.resize(up, up.kv_bytes)
        else:
            del self.up[up.inst]
            if what == "asleep":
                self.asleep[up.inst] = up
        return Change(up, what)

    def _dead(self, up: Up, why: str) -> Change:
        """Drop a server that ended by itself or failed an order, and stop the rest of its processes."""
        self.step(up, "dead")
        del self.up[up.inst]
        self.dead[up.inst] = why
        self.faults.append(why)
        if up.process is not None:
            up.process.stop()
        return Change(up, "dead", why)

    def about(self, zero_s: float) -> list[dict[str, Any]]:
        """Return the starts, stops, sleeps and wakes as plain values, with their times from the window's start."""
        return [{**span._asdict(), "begun_s": span.begun_s - zero_s} for span in self.spans]


def tell(process: Process, asks: tuple[Ask, ...]) -> None:
    """Send orders to a running server, one after the other. Raises UserError unless each is answered with HTTP 200."""
    url = urlsplit(process.ready_url)
    for ask in asks:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=READY_S)
        try:
            connection.request("POST", ask.path, ask.body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = " ".join(answer.read(200).decode(errors="replace").split())
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"server {process.name} does not answer {ask.path}: {error}") from None
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise UserError(f"server {process.name} answers {ask.path} with HTTP {answer.status}: {text}")


def _with_log(up: Up, what: str) -> str:
    """Return a text that says what a server did, followed by the last lines of its log."""
    why = f"the server of {up.inst.model} on GPU {_gpu_text(up.inst)} {what}"
    last = up.process.last_lines() if up.process is not None else ""
    return f"{why}; its log ends with:\n{last}" if last else why


def _gpus(inst: Inst) -> tuple[int, ...]:
    assert isinstance(inst.place, tuple)
    return inst.place


def _gpu_text(inst: Inst) -> str:
    return "+".join(map(str, _gpus(inst)))
