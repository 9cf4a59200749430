"""The open-loop load client: `Client` controls a separate process, which sends the requests."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, Self

from harness.client.body import Server, Style
from harness.client.frames import Unpacker, packed
from harness.client.log import Log, assemble
from harness.client.sender import Setup
from harness.policy.types import Jobs, UserError

START_S = 60.0  # the longest that the process may take to start
END_S = 2.0  # the longest that it may take to end by itself

Kind = Literal["routed", "arrived", "first", "done", "failed", "dropped"]


class Told(NamedTuple):
    """An event of a request or of a route, reported by the process that sends.

    A "routed" event confirms a change of a model's route, which applies to requests that arrive after the event; its
    `rid` is -1. The meaning of `tokens` depends on the kind. For "arrived" it is 1 if the request left at once by its
    model's route, else 0. For "first" it is the tokens of the first chunk. For "failed" and "dropped" it is the tokens
    of all chunks. For "done" it is the number in the server's usage, or the tokens of all chunks if there is no usage.
    """

    kind: Kind
    rid: int
    at_ns: int  # read off CLOCK_MONOTONIC; "arrived" has the intended time
    tokens: int


class Client:
    """A client that sends a workload's requests to the servers of their models, each at its time; see `sender.py`.

    A request leaves at its arrival time if its model has a route by then; otherwise it is held until `send`. A separate
    process sends the requests. That process ends at `close`, or when this process ends. Call `start` from a thread that
    outlives the run, because the kernel ends the sending process together with that thread.
    """

    def __init__(self, jobs: Jobs, *, seed: int, timeout_s: float, style: Style) -> None:
        none = jobs.ttft_slo_s[:0]
        jobs = replace(jobs, ttft_slo_s=none, tpot_slo_s=none, prefix=None)  # which the process has no use for
        self._setup = Setup(jobs, seed, timeout_s, style)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._unpacker = Unpacker()
        self._told: list[Told] = []
        self._spilt: list[tuple[bytes, ...]] = []  # chunks, as they crossed
        self._log: Log | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Id of the process that sends."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process; no connection is opened yet."""
        self._line, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        code = "from harness.client.sender import main; main()"
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=self._errors
            )
        self._ask(self._setup)
        if self._wait("ready", START_S) is None:
            self.close()
            raise UserError(f"the client's process was not ready after {START_S:g} s")

    def begin(self, zero_ns: int) -> None:
        """Start the run, whose second 0 is the CLOCK_MONOTONIC time `zero_ns`.

        From now on, `poll` reports each change of a route as an event.
        """
        self._ask(("begin", zero_ns))

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when `poll` has something to return."""
        assert self._line is not None
        return self._line.fileno()

    def route(self, model: str, to: Server | None) -> None:
        """Send the model's later requests to the server `to` when they arrive; if `to` is None, hold them."""
        self._ask(("route", model, to))

    def send(self, rid: int, to: Server) -> None:
        """Send a held request now; do nothing if the request was sent or cancelled before."""
        self._ask(("send", self._known(rid), to, time.monotonic_ns()))

    def cancel(self, rid: int) -> None:
        """Cancel a request: close its connection, and end it as "dropped"; do nothing if it has ended already."""
        self._ask(("cancel", self._known(rid)))

    def poll(self, timeout_s: float) -> list[Told]:
        """Return the events since the last call in order of time; if there are none, wait up to `timeout_s` for one."""
        if not self._told:
            self._wait("told", timeout_s)
        while self._wait("told", 0.0) is not None:
            pass
        told, self._told = self._told, []
        told.sort(key=lambda event: event.at_ns)
        return told

    def log(self) -> Log:
        """End the run and return the log of its requests. Events that were not polled yet can still be polled."""
        if self._log is None:
            self._ask(("log",))
            message = self._wait("log", float("inf"))
            assert message is not None
            self._log = assemble(message[1], self._spilt)
            self.close()
        return self._log

    def close(self) -> None:
        """End the process that sends, and close its connections."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    # ------------------------------------------------------------ the line to the process

    def _known(self, rid: int) -> int:
        if not 0 <= rid < len(self._setup.jobs):
            raise ValueError(f"no request {rid}")
        return rid

    def _ask(self, message: Any) -> None:
        if self._line is None:
            raise UserError("the client is closed")
        try:
            self._line.sendall(packed(message))
        except OSError:
            self._died()

    def _wait(self, kind: str, timeout_s: float) -> tuple[Any, ...] | None:
        """Return the next message of a kind; None if none comes within `timeout_s`.

        Events that come meanwhile are stored for `poll`.
        """
        until_s = time.monotonic() + timeout_s
        while self._line is not None:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._line], [], [], None if left_s == float("inf") else left_s)[0]:
                return None
            data = self._line.recv(1 << 18)
            if not data:
                self._died()
            answer: tuple[Any, ...] | None = None
            for message in self._unpacker.feed(data):
                if message[0] == "told":
                    self._told += [Told(*event) for event in message[1]]
                elif message[0] == "chunks":
                    self._spilt.append(message[1])
                elif message[0] == "refused":
                    self.close()
                    raise UserError(message[1])
                answer = message if message[0] == kind else answer
            if answer is not None:
                return answer
        return None

    def _died(self) -> None:
        """Raise an error that says how the process ended."""
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self.close()
        raise UserError(f"the client's process ended with code {code}{f': {lines[-1]}' if lines else ''}")
