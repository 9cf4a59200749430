"""A server that sends what a test says, byte for byte: what a client must stand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

HANG, CLOSE, RESET = object(), object(), object()  # in place of bytes
Pieces = Sequence[object]


class Asked(NamedTuple):
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def event(text: str = "", usage: int | None = None, **more: Any) -> bytes:
    """Return a chunk of a completion; without text, and with usage alone where that is said."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}
    if usage is not None:
        chunk |= {"usage": {"prompt_tokens": 3, "completion_tokens": usage}}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage_only(tokens: int) -> bytes:
    """Return the chunk that vLLM sends last."""
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> list[bytes]:
    """Return a stream in chunked transfer coding, a piece a part."""
    return [HEAD, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def tokens(n: int) -> list[bytes]:
    """Return an ordinary answer of n tokens with its usage."""
    return chunked(*(event("a") for _ in range(n)), usage_only(n), DONE)


def error(status: int, body: str) -> list[bytes]:
    """Return an HTTP error."""
    return [b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body.encode()), body.encode())]


class Scripted:
    """A server that answers each request with the pieces that `answer` says for it."""

    def __init__(self, answer: Callable[[Asked], Pieces]) -> None:
        self._answer = answer
        self.asked: list[Asked] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.connections += 1
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                asked = Asked(first.split()[1], headers, body)
                self.asked.append(asked)
                for piece in self._answer(asked):
                    if piece is HANG:
                        await reader.read()
                        return
                    if piece is RESET:
                        writer.transport.abort()
                        return
                    if piece is CLOSE:
                        return
                    assert isinstance(piece, bytes)
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def scripted(answer: Callable[[Asked], Pieces]) -> Iterator[Scripted]:
    """Run a scripted server on a port of its own."""
    server, loop, ready = Scripted(answer), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # their transports close

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
