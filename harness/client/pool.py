"""Connections to one server: kept alive between requests, opened ahead for bursts, and closed after idle time."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from contextlib import suppress
from typing import Protocol, cast
from urllib.parse import urlsplit

from harness.client.body import Server, Style
from harness.client.wire import Response

IDLE_S = 4.0  # uvicorn closes a connection after 5 s without a request
AT_ONCE = 16  # connections opened ahead at a time


class Owner(Protocol):
    """The object to which connections report received bytes and losses, and which handles the requests accordingly."""

    def heard(self, connection: Connection, tokens: list[int], now_ns: int) -> None:
        """Handle bytes of the response to `connection.rid`; `tokens` has the token count of each completed chunk."""

    def lost(self, connection: Connection, why: str) -> None:
        """Handle the loss of a connection that closed before its request `connection.rid` had ended."""


class Connection(asyncio.Protocol):
    """A connection to a server, and the request that is open on it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.rid = -1  # the request that is open here; -1: none
        self.to = Server("", "")  # the server to which that request was sent
        self.served = False  # it has carried a request before this one
        self.response = Response(pool.style.counts)
        self.last_ns = time.monotonic_ns()  # when the last bytes went either way
        self._fd = -1  # written to directly where it is plain TCP, so that the stamp says when the kernel had it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the new connection to its pool; see asyncio."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop has classes of its own
        self.pool.all.add(self)
        if not self.pool.tls:
            self._fd = transport.get_extra_info("socket").fileno()

    def ask(self, rid: int, to: Server, request: bytes, most: int) -> int:
        """Send a request for at most `most` tokens; return the time in ns right after the kernel took the bytes."""
        self.rid, self.to = rid, to
        self.response.begin(most)
        sent = 0
        if self._fd >= 0:
            try:
                sent = os.write(self._fd, request)
            except BlockingIOError:
                pass
            except OSError:  # the server has closed it, as `connection_lost` will say
                self.transport.abort()
                sent = len(request)
        if sent < len(request):
            self.transport.write(request[sent:])
        self.last_ns = time.monotonic_ns()
        return self.last_ns

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response and report them to the owner; see asyncio."""
        self.last_ns = now_ns = time.monotonic_ns()
        response = self.response
        tokens = response.feed(data)
        if self.rid >= 0:
            self.pool.owner.heard(self, tokens, now_ns)
        if response.complete and self.rid < 0:
            self.served = True
            self.pool.back(self)
        elif response.broken:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from its pool, and report the loss of an open request; see asyncio."""
        self._fd = -1
        self.pool.gone(self)
        if self.rid >= 0:
            self.pool.owner.lost(self, "connection reset" if exc else "connection closed early")
        self.response.close()

    def drop(self) -> None:
        """Close the connection without reporting the loss of its request."""
        self.rid = -1
        self.transport.abort()


class Pool:
    """The connections to one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, base_url: str, style: Style, owner: Owner) -> None:
        self._loop, self.style, self.owner = loop, style, owner
        url = urlsplit(base_url)
        self.tls = url.scheme == "https"
        self._host, self._port = url.hostname or "", url.port or (443 if self.tls else 80)
        self._tls = ssl.create_default_context() if self.tls else None
        self.all: set[Connection] = set()
        self._idle: list[Connection] = []  # ordered by last use
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self) -> Connection | None:
        """Take an idle connection; return None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def back(self, connection: Connection) -> None:
        """Make a connection idle after a complete response; close the connection if it cannot carry another request."""
        if connection.response.reusable and self.style.keep_alive and not connection.transport.is_closing():
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def gone(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self.all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def connect(self) -> Connection:
        """Open a new connection, and return it without adding it to the idle ones."""
        _, new = await self._loop.create_connection(lambda: Connection(self), self._host, self._port, ssl=self._tls)
        return new

    def tend(self, now_ns: int) -> None:
        """Close used connections that have been idle for IDLE_S, and open spare ones ahead of bursts."""
        for connection in [c for c in self._idle if c.served and now_ns - c.last_ns > IDLE_S * 1e9]:
            self._idle.remove(connection)
            connection.transport.abort()
        lacking = self.style.spare - len(self._idle) - self._opening
        for _ in range(min(AT_ONCE, lacking)):
            self._opening += 1
            task = self._loop.create_task(self._spare())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _spare(self) -> None:
        with suppress(OSError):  # a request will report that the server is not there
            connection = await self.connect()
            if not connection.transport.is_closing():
                self._idle.append(connection)
        self._opening -= 1
