"""Mock servers in a thread of the test's process, and clients of theirs."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import uvloop

from harness.mock.model import Served
from harness.mock.pacing import Fixed
from harness.mock.server import Mock, listening
from harness.mock.settings import Settings


class Server:
    """A mock that serves in a thread of this process."""

    def __init__(self, mock: Mock, ports: bool) -> None:
        self.urls: dict[str, str] = {}
        ready, self._mock, self._ports = threading.Event(), mock, ports
        self._thread = threading.Thread(target=self._run, args=(ready,))
        self._thread.start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with listening(self._mock, "127.0.0.1", 0, ports=self._ports) as self.urls:
                ready.set()
                await self._stop.wait()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(next(iter(self.urls)))
        return str(parts.hostname), int(parts.port or 0)

    def connect(self) -> HTTPConnection:
        return HTTPConnection(*self.address)

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """Send one request on a connection of its own."""
        with self.sent(path, body, **headers) as answer:
            return answer.status, answer.read()

    @contextmanager
    def sent(self, path: str, body: object = None, **headers: str) -> Iterator[HTTPResponse]:
        connection = self.connect()
        send(connection, path, body, **headers)
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def stats(self, until: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """Ask for its counts until they are as they must become; the test's timeout is the limit."""
        connection = self.connect()
        while True:
            send(connection, "/mock/stats")
            counts: dict[str, Any] = json.loads(connection.getresponse().read())
            if until(counts):
                connection.close()
                return counts


def send(connection: HTTPConnection, path: str, body: object = None, **headers: str) -> None:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    posts = body is not None or path.split("?", maxsplit=1)[0] in {"/sleep", "/wake_up", "/mock/reset"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST" if posts else "GET", path, data, names)


@contextmanager
def serving(*names: str, ports: bool = False, settings: Settings | None = None, **served: Any) -> Iterator[Server]:
    mock = Mock(
        [Served(name, 1000, **served) for name in names or ("a", "b")],
        lambda agenda, _: Fixed(agenda, 0, 0),
        settings or Settings(),
        time.monotonic_ns(),
    )
    server = Server(mock, ports)
    try:
        yield server
    finally:
        server.close()


def events(body: bytes) -> list[Any]:
    """Return the events of a stream, each as JSON, without the [DONE] that must end it."""
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


ASK = {"model": "a", "prompt": [1, 2, 3], "max_tokens": 4}


def raw(server: Server, data: bytes) -> bytes:
    """Return all that the server says to these bytes, until it closes."""
    with socket.create_connection(server.address) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def answered(server: Server, data: bytes, count: int = 1) -> list[bytes]:
    """Return so many bodies that the server answers to these bytes on an open connection, or all until it closes."""
    with socket.create_connection(server.address) as connection:
        connection.sendall(data)
        bodies, kept = [], Kept(connection)
        for _ in range(count):
            answer = HTTPResponse(kept)  # type: ignore[arg-type]  # all that it asks of a socket
            answer.begin()
            bodies.append(answer.read())
        kept.file.end()
        return bodies


class Kept:
    """A socket whose bytes one answer after the other reads from the same buffer."""

    class File(io.BufferedReader):
        """A file that stays open when an answer has been read."""

        def close(self) -> None:
            pass

        def end(self) -> None:
            super().close()

    def __init__(self, connection: socket.socket) -> None:
        self.file = self.File(socket.SocketIO(connection, "r"))

    def makefile(self, _mode: str) -> io.BufferedReader:
        return self.file


def post(body: bytes, path: str = "/v1/completions", head: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body
