"""The process that sends requests: its event loop runs only the schedule and the connections.

The client is open-loop: a request leaves at its time whatever the server does, and any number of requests may be open
at once. A late request leaves at once, and the log shows its lag. Garbage collection is off, and all prompts are
prepared as bytes before the clock starts. The process ends with the run, with its parent, or at SIGTERM. It ignores
Ctrl-C, because its parent may still want the log.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import heapq
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import uvloop

from harness.client.body import Bodies, Server, Style
from harness.client.frames import Unpacker, packed
from harness.client.log import CONNECTING, DONE, DROPPED, FAILED, SENT, STATES, STREAMING, WAITING, Book
from harness.client.pool import Connection, Pool
from harness.client.slice import hurry
from harness.client.timer import Timer
from harness.policy.types import Jobs, UserError

SWEEP_S = 1.0  # s between two looks for silent servers, and for connections to open or close
ENDS = {DONE, FAILED, DROPPED}
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Setup(NamedTuple):
    """The sender's settings, which the parent sends before anything else."""

    jobs: Jobs
    seed: int
    timeout_s: float
    style: Style


class Sender(asyncio.Protocol):
    """A sender that lets requests leave at their times (see the module) and reports events to its parent in batches.

    It is also the asyncio protocol of the connection to its parent, over which the parent calls its methods.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, setup: Setup) -> None:
        jobs = setup.jobs
        self._loop, self._jobs, self._style = loop, jobs, setup.style
        self._unpacker = Unpacker()
        self.ended: asyncio.Future[None] = loop.create_future()  # done once the parent is gone
        self._timeout_ns = round(setup.timeout_s * 1e9)
        self._sweep_s = min(SWEEP_S, setup.timeout_s / 4)
        self._bodies = Bodies(jobs, setup.seed, setup.style)
        self._book = Book(len(jobs))
        self._timer = Timer(loop, self._due)
        self._book.precise = self._timer.precise
        self._heirs = {} if jobs.after is None else {b: i for i, b in enumerate(jobs.after.tolist()) if b >= 0}
        self._opened = np.flatnonzero(np.isfinite(jobs.arrival_s))  # others come after the end of another
        self._arrival_ns = np.rint(1e9 * jobs.arrival_s[self._opened]).astype(np.int64)
        # A heap of the requests that are to come: ns from 0 s, and request.
        self._later = sorted(zip(self._arrival_ns.tolist(), self._opened.tolist(), strict=True))
        self._routes: dict[str, Server] = {}
        self._pools: dict[str, Pool] = {}
        self._open: dict[int, Connection] = {}  # keyed by request that is sent or streaming
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: list[tuple[str, int, int, int]] = []
        self._zero_ns = self._begun_ns = 0
        self._begun_cpu_s = 0.0

    # ------------------------------------------------------------ what the parent asks for

    def begin(self, zero_ns: int) -> None:
        """Start the run, whose second 0 is at `zero_ns`; see Client."""
        self._zero_ns = zero_ns
        np.frombuffer(self._book.intended_ns, np.int64)[self._opened] = zero_ns + self._arrival_ns
        self._begun_ns, self._begun_cpu_s = time.monotonic_ns(), time.process_time()
        self._sweep()
        self._arm()

    def route(self, model: str, to: Server | None) -> None:
        """Send later arrivals of a model to the server `to`, or hold them if it is None; see Client."""
        if self._zero_ns:
            self._tell("routed", -1, time.monotonic_ns(), 0)
        if to is None:
            self._routes.pop(model, None)
            return
        self._routes[model] = to
        self._pool(to).tend(time.monotonic_ns())

    def send(self, rid: int, to: Server, asked_ns: int) -> None:
        """Send a held request that the parent ordered at the time `asked_ns`; see Client."""
        if self._book.state[rid] == WAITING:  # not given up meanwhile
            self._book.due_ns[rid] = asked_ns
            self._leave(rid, to)

    def cancel(self, rid: int) -> None:
        """End a request as dropped, unless it has ended; see Client."""
        if self._book.state[rid] not in ENDS:
            self._end(rid, DROPPED, time.monotonic_ns())

    def log(self) -> None:
        """Stop the schedule of arrivals, and send the log to the parent."""
        self._timer.close()
        self._flush()
        self._spill()
        book = self._book
        book.cpu_s = time.process_time() - self._begun_cpu_s
        book.wall_s = (time.monotonic_ns() - self._begun_ns) * 1e-9
        book.peak_bytes = peak_bytes()
        self._parent.write(packed(("log", book)))

    # ------------------------------------------------------------ the schedule

    def _due(self) -> None:
        """Handle the arrival of all requests that are due, and set the timer for the next arrival."""
        while self._later and self._later[0][0] <= time.monotonic_ns() - self._zero_ns:
            self._arrive(heapq.heappop(self._later)[1])
        self._arm()

    def _arm(self) -> None:
        if self._later:
            self._timer.at(self._zero_ns + self._later[0][0])

    def _arrive(self, rid: int) -> None:
        book, at_ns = self._book, self._book.intended_ns[rid]
        to = self._routes.get(self._jobs.models[self._jobs.model.item(rid)])
        self._tell("arrived", rid, at_ns, int(to is not None))
        if to is not None and book.state[rid] == WAITING:  # not given up before its time
            book.due_ns[rid] = at_ns
            self._leave(rid, to)

    # ------------------------------------------------------------ a request

    def _pool(self, to: Server) -> Pool:
        if to.url not in self._pools:
            self._pools[to.url] = Pool(self._loop, to.url, self._style, self)
        return self._pools[to.url]

    def _leave(self, rid: int, to: Server, fresh: bool = False) -> None:
        """Send a request on an idle connection; open a new one if `fresh` or if no connection is idle."""
        pool = self._pool(to)
        connection = None if fresh else pool.take()
        if connection is not None:
            self._write(rid, to, connection)
            return
        self._book.step(rid, CONNECTING)
        task = self._loop.create_task(self._connect(rid, to, pool))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, rid: int, to: Server, pool: Pool) -> None:
        connection, why = None, ""
        try:
            async with asyncio.timeout(self._timeout_ns * 1e-9):
                connection = await pool.connect()
        except TimeoutError:
            why = f"no connection for {self._timeout_ns * 1e-9:g} s"
        except ConnectionRefusedError:
            why = "connection refused"
        except OSError as error:
            why = f"no connection: {error.strerror or type(error).__name__}"
        if self._book.state[rid] != CONNECTING:  # given up in the meantime
            if connection is not None:
                connection.drop()
        elif connection is not None:
            self._write(rid, to, connection)
        else:
            self._end(rid, FAILED, time.monotonic_ns(), why)

    def _write(self, rid: int, to: Server, connection: Connection) -> None:
        self._book.step(rid, SENT)
        self._open[rid] = connection
        at_ns = connection.ask(rid, to, self._bodies.request(rid, to), self._jobs.output_tokens.item(rid))
        if self._book.write_ns[rid] < 0:
            self._book.write_ns[rid] = at_ns

    def heard(self, connection: Connection, tokens: list[int], now_ns: int) -> None:
        """Record the bytes of a response; end the request if the response is complete or wrong; see Owner."""
        rid, book, response = connection.rid, self._book, connection.response
        if book.byte_ns[rid] < 0:
            book.byte_ns[rid] = now_ns
        if tokens:
            book.chunks(rid, now_ns, tokens)
            if book.state[rid] == SENT:
                book.step(rid, STREAMING)
                self._tell("first", rid, now_ns, tokens[0])
        book.status[rid] = response.status
        book.usage_tokens[rid], book.prompt_ns[rid] = response.usage_tokens, response.prompt_ns
        book.cached_tokens[rid] = response.cached_tokens
        if response.error:
            connection.rid = -1
            self._end(rid, FAILED, now_ns, response.error)
        elif response.ended:
            connection.rid = -1
            book.done_ns[rid] = now_ns
            self._end(rid, DONE, now_ns)

    def lost(self, connection: Connection, why: str) -> None:
        """Handle a request whose connection closed: send the request again, or end it as failed (see Owner).

        A server may close an idle connection just when a request is sent on it, and then never reads the request. So a
        request on a reused connection is sent again, on a new connection, if no byte of a response came.
        """
        rid = connection.rid
        if connection.served and self._book.byte_ns[rid] < 0:
            del self._open[rid]
            self._leave(rid, connection.to, fresh=True)
        else:
            self._end(rid, FAILED, time.monotonic_ns(), why)

    def _end(self, rid: int, state: int, now_ns: int, why: str = "") -> None:
        """End a request; in a closed loop, schedule its successor one think time later."""
        book, connection, tokens = self._book, self._open.pop(rid, None), 0
        if connection is not None:
            tokens = connection.response.made
            if tokens and state == DONE and connection.response.usage_tokens > 0:
                tokens = connection.response.usage_tokens  # an event may hold several
            if connection.rid == rid:  # it is still open there
                connection.drop()
        book.step(rid, state)
        book.end_ns[rid] = now_ns
        if why:
            book.errors[rid] = self._bodies.redacted(why)
        self._tell(STATES[state], rid, now_ns, tokens)
        heir = self._heirs.pop(rid, None)
        if heir is not None and self._jobs.think_s is not None:
            book.intended_ns[heir] = now_ns + round(self._jobs.think_s.item(heir) * 1e9)
            heapq.heappush(self._later, (book.intended_ns[heir] - self._zero_ns, heir))
            self._arm()

    # ------------------------------------------------------------ silence, and the parent

    def _sweep(self) -> None:
        now_ns = time.monotonic_ns()
        why = f"no bytes for {self._timeout_ns * 1e-9:g} s"
        for pool in self._pools.values():
            for connection in list(pool.all):
                if now_ns - connection.last_ns <= self._timeout_ns:
                    continue
                if connection.rid >= 0:
                    self._end(connection.rid, FAILED, now_ns, why)
                elif connection.response.ended and not connection.response.complete:
                    connection.drop()
            pool.tend(now_ns)
        self._spill()
        self._loop.call_later(self._sweep_s, self._sweep)

    def _spill(self) -> None:
        self._parent.write(packed(("chunks", self._book.spill())))

    def _tell(self, kind: str, rid: int, at_ns: int, tokens: int) -> None:
        if not self._told:
            self._loop.call_soon(self._flush)
        self._told.append((kind, rid, at_ns, tokens))

    def _flush(self) -> None:
        if self._told:
            self._parent.write(packed(("told", self._told)))
            self._told = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report to the parent that the process is ready; see asyncio."""
        self._parent = cast("asyncio.Transport", transport)  # uvloop has classes of its own
        self._parent.write(packed(("ready",)))

    def data_received(self, data: bytes) -> None:
        """Call the method that each message of the parent names, with the message's arguments; see asyncio."""
        for verb, *values in self._unpacker.feed(data):
            getattr(self, verb)(*values)

    def connection_lost(self, _: Exception | None) -> None:
        """Let the process end, because the parent is gone; see asyncio."""
        if not self.ended.done():
            self.ended.set_result(None)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes.

    It is read from /proc, because Linux's ru_maxrss includes the parent's memory at the fork.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text("ascii").splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


async def serve(line: socket.socket, setup: Setup) -> None:
    """Send requests until the parent closes its end of `line`."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_die)
    try:
        sender = Sender(loop, setup)
    except UserError as error:
        line.sendall(packed(("refused", str(error))))
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    await loop.create_unix_connection(lambda: sender, sock=line)
    await sender.ended


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process after an uncaught error in the event loop, so that the parent notices the error.

    Otherwise the loop would go on, and the request concerned would never end.
    """
    loop.default_exception_handler(context)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Run the sender for the parent, over the file descriptor in the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    hurry()
    with suppress(ValueError, OSError):  # a connection is a file
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    unpacker, line_open = Unpacker(), True
    while line_open:
        data = line.recv(1 << 20)
        line_open = bool(data)
        for setup in unpacker.feed(data):
            uvloop.run(serve(line, setup))
            return
