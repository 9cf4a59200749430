"""A server as a process: start it, wait until it answers, and stop it with all processes that it started.

Each server leads a separate session and process group, so that Ctrl-C reaches only the run, which then stops its
servers. If the run cannot stop them, the run's guard does (guard.py). A server's output goes to its log. Every message
about the server ends with the last lines of this log. Needs Linux (pidfd).
"""

from __future__ import annotations

import atexit
import http.client
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import psutil

from harness.engines.servers import guard
from harness.policy.types import UserError

ASK_S, ASK = 0.02, 0.01  # between two checks of readiness: seconds, or a part of the time gone by if that is more
ANSWER_S = 1.0  # seconds for the answer to a check
LAST_LINES = 12
# The command waits until the guard knows it: it starts when it gets a line on its standard input, and never without.
HELD = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh")
MEMORY = re.compile(r"out of memory|cannot allocate memory|bad_alloc|MemoryError|failed to allocate", re.IGNORECASE)
TAKEN = re.compile(r"address already in use|couldn't bind|EADDRINUSE", re.IGNORECASE)
LOWEST_PORT = 10_000


class PortTaken(UserError):
    """The error of a server whose port another process has taken; the server can be started again on another port."""


class Process:
    """A server's main process and its children."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, ready_url: str) -> None:
        self.command, self.env, self.log, self.ready_url = tuple(command), dict(env), log, ready_url
        self._child: subprocess.Popen[bytes] | None = None
        self._closing = threading.Lock()
        self._seen = set[psutil.Process]()  # its processes, as far as they were seen
        self._logged_before = 0

    @property
    def pid(self) -> int:
        """The id of the server's main process, also after that process has ended."""
        assert self._child is not None, "not started"
        return self._child.pid

    def start(self) -> None:
        """Start the server, without waiting until it is ready. When the calling process ends, so does the server."""
        assert self._child is None, "a Process starts once"
        watch = _guard(os.getpid())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._logged_before = log.tell()
            child = subprocess.Popen(
                [*HELD, *self.command],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._leader = psutil.Process(child.pid)
        self._pidfd = os.pidfd_open(child.pid)
        self._child = child
        _tell(watch, f"+{child.pid}")
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(b"go\n")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until `ready_url` answers 200; if no answer comes in time, stop the server and raise UserError."""
        began = time.monotonic()
        while not self._answers(min(ANSWER_S, max(ASK_S, began + timeout_s - time.monotonic()))):
            gone_s = time.monotonic() - began
            if self._wait(max(ASK_S, ASK * gone_s)):
                self._fail(f"ended before it was ready ({self._exit()})")
            if gone_s > timeout_s:
                self._fail(f"was not ready within {timeout_s:g} s")
        if not self._listens():
            self._fail(f"is not what answers at {self.ready_url}", PortTaken)

    def alive(self) -> bool:
        """Tell whether the server's main process runs; its children may outlive it."""
        return self._child is not None and self._child.poll() is None

    def stop(self, grace_s: float = 5.0) -> None:
        """End the server and its children: SIGTERM, then SIGKILL after `grace_s`.

        May be called twice, or without `start`. Raises UserError if a process survives.
        """
        child = self._child
        if child is None:
            return
        deadline = time.monotonic() + grace_s
        members = self.members()
        guard.signal_all(members, signal.SIGTERM)
        self._wait(grace_s)
        others = [member for member in members if member.pid != child.pid]
        psutil.wait_procs(others, timeout=max(0.0, deadline - time.monotonic()))
        child.kill()
        child.wait()  # before other code asks for its exit code
        left = guard.kill(self._leader, self._seen)
        with self._closing:  # a thread that waits for readiness may stop it too
            pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
            _tell(_guard(os.getpid()), f"-{child.pid}")
        if left:
            raise UserError(f"{self.name}: processes {', '.join(str(member.pid) for member in left)} survive SIGKILL")

    @property
    def name(self) -> str:
        """The server's name in messages, which is the name of its log."""
        return self.log.stem

    def members(self) -> list[psutil.Process]:
        """Return the server's living processes, so that their use of resources can be measured."""
        if self._child is None:
            return []
        living = guard.family(self._leader, self._seen)
        self._seen.update(living)
        return living

    def last_lines(self) -> str:
        """Return the last lines that the server wrote to its log since its latest start."""
        with suppress(OSError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._logged_before, end - 16_384))
            return "\n".join(log.read().decode(errors="replace").rstrip().split("\n")[-LAST_LINES:])
        return ""

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the end of the main process, and tell whether it has ended in time."""
        if self.alive():
            ended = select.poll()  # one for each call: two threads may wait at once
            with suppress(ValueError):  # closed: it has just been stopped
                ended.register(self._pidfd, select.POLLIN)
                ended.poll(1000 * timeout_s)
        return not self.alive()

    def _answers(self, timeout_s: float) -> bool:
        url = urlsplit(self.ready_url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
        try:
            connection.request("GET", url.path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _listens(self) -> bool:
        """Tell whether a process of this server listens at the port; if none does, another server may be answering."""
        port = urlsplit(self.ready_url).port
        for process in self.members():
            with suppress(psutil.NoSuchProcess):
                listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
                if any(c.laddr.port == port for c in listening):
                    return True
        return False

    def _exit(self) -> str:
        assert self._child is not None
        code = self._child.returncode
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, as the kernel does when memory runs out"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _fail(self, what: str, kind: type[UserError] = UserError) -> NoReturn:
        self.stop()
        lines = self.last_lines()
        if TAKEN.search(lines):
            kind, what = PortTaken, f"{what}: its port is taken"
        elif MEMORY.search(lines):
            what += ": out of memory"
        raise kind(
            f"server {self.name} {what}; {self.log} ends with:\n{lines}" if lines else f"server {self.name} {what}"
        )


def free_port() -> int:
    """Return a TCP port on which no process listens now.

    The server will open its port seconds later. The port lies below the range from which the kernel takes ports for
    outgoing connections. A port within that range could by then belong to one of the client's thousands of connections.
    """
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(LOWEST_PORT, lowest_outgoing)
    for port in random.sample(ports, min(100, len(ports))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no free port between {LOWEST_PORT} and {lowest_outgoing} on 127.0.0.1")


@cache
def _guard(pid: int) -> subprocess.Popen[bytes]:
    """Return the guard of this process, which the first call starts; a forked process starts another guard."""
    started = subprocess.Popen(
        [sys.executable, "-I", guard.__file__, str(pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    atexit.register(_dismiss, started, pid)
    return started


def _tell(guarding: subprocess.Popen[bytes], line: str) -> None:
    assert guarding.stdin is not None
    try:
        guarding.stdin.write(f"{line}\n".encode())
        guarding.stdin.flush()
    except BrokenPipeError:
        raise UserError("the process that ends our servers with us was killed; start again") from None


def _dismiss(guarding: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner and guarding.poll() is None:
        with suppress(UserError):
            _tell(guarding, "end")
        guarding.wait()
