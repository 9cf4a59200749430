"""HTTP/1.1 on a socket: requests in, answers out, in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, cast
from urllib.parse import parse_qs, unquote, urlsplit

import httptools

from harness.mock.ask import ApiError

MOST_HEAD_BYTES = 64 << 10
MOST_BODY_BYTES = 32 << 20
LINGER_S = 1.0  # how long what a refused client goes on to send is read and dropped, so that it can read the answer
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)


class Request(NamedTuple):
    """A request that was read to its end."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]  # by name in lower case
    body: bytes
    keep_alive: bool
    chunked: bool  # whether its client understands chunks: HTTP/1.1
    read_ns: int  # CLOCK_MONOTONIC, when its last byte was read


class Connection(asyncio.Protocol):
    """A client's connection. `handle` answers a request on it, now or later; the next one is handled after that.

    Requests that came before their predecessor was answered wait, and reading stops until they are answered.
    """

    def __init__(
        self,
        handle: Callable[[Connection, Request], None],
        read: Callable[[int], None],
        every: set[Connection],
    ) -> None:
        self._every = every  # connections that are open, this one among them while it is
        self._handle = handle
        self._read = read  # hears the time of each read before what was read is handled
        self.lost: Callable[[], None] | None = None  # is called once if the client leaves before its answer's end
        self.open = False
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._todo: deque[Request | ApiError] = deque()
        self._now: Request | None = None  # what is being answered
        self._deaf = False  # nothing more is parsed: the connection is about to close
        self._read_ns = 0
        self._begin()

    # ------------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport, self.open = cast("asyncio.Transport", transport), True
        self._every.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Give up what is being answered."""
        self.open, self._deaf = False, True
        self._every.discard(self)
        self._todo.clear()
        del self._parser, self._transport  # which refer to this connection
        lost, self.lost = self.lost, None
        if lost is not None:
            lost()

    def data_received(self, data: bytes) -> None:
        """Parse, and handle what is complete."""
        if self._deaf:
            return
        self._read_ns = time.monotonic_ns()
        self._read(self._read_ns)
        self._parse(data)
        if self._heading:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._too_long()
        self._next()

    # ------------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        self._begin()
        self._heading = True

    def on_url(self, url: bytes) -> None:
        """Add a part of the request's target."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add one of the request's headers."""
        self._count(len(name) + len(value))
        if not self._deaf:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Expect the request's body, if it has one."""
        self._heading, self._head_bytes = False, 0
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > MOST_BODY_BYTES:
            self._too_big()
        elif self._headers.get("expect", "").lower() == "100-continue" and self._now is None and not self._todo:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Add a part of the request's body, up to MOST_BODY_BYTES."""
        if self._deaf:
            return
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MOST_BODY_BYTES:
            self._too_big()

    def on_message_complete(self) -> None:
        """Queue the request, which is complete."""
        if self._deaf:
            return
        parser, target = self._parser, self._url.decode("latin-1")
        keep_alive, method = parser.should_keep_alive(), parser.get_method().decode("latin-1")
        try:
            parts = urlsplit(target)
        except ValueError:
            self._refuse(ApiError(400, "The request's target is no URL"))
            return
        path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
        body, chunked = b"".join(self._body), parser.get_http_version() == "1.1"
        self._todo.append(Request(method, path, query, self._headers, body, keep_alive, chunked, self._read_ns))

    # ------------------------------------------------------------------ answers

    def reply(self, status: int, body: bytes = b"", headers: str = "", kind: str = "application/json") -> None:
        """Answer with a body."""
        self._transport.write(self._head(status, len(body), kind, headers) + body)
        self._answered()

    def error(self, error: ApiError, headers: str = "") -> None:
        """Answer with an error."""
        self.reply(error.status, error.body(), headers)

    def stream(self) -> None:
        """Begin to answer with a stream of events."""
        assert self._now is not None
        head = EVENT_STREAM if self._now.chunked else EVENT_STREAM.replace(b"transfer-encoding: chunked\r\n", b"")
        self._transport.write(head + (b"\r\n" if self._keeps() else b"connection: close\r\n\r\n"))

    def send(self, events: bytes, *, last: bool = False) -> None:
        """Send events of a stream, in one chunk."""
        assert self._now is not None
        if self._now.chunked:
            end = b"\r\n0\r\n\r\n" if last else b"\r\n"
            events = b"%x\r\n%b%b" % (len(events), events, end)
        self._transport.write(events)
        if last:
            self._answered()

    def cut(self, body: bytes = b"", whole_bytes: int | None = None) -> None:
        """Send this beginning of a body that was to be longer, if there is one, and close the connection."""
        if whole_bytes is not None:
            self._transport.write(self._head(200, whole_bytes, "application/json", "") + body)
        self.lost, self._deaf = None, True
        self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is still to be sent."""
        self._transport.abort()

    # ------------------------------------------------------------------ within

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:  # an offer, as of h2c, which a server may ignore
            self._parser = httptools.HttpRequestParser(self)
            if self._headers.get("content-length", "0") == "0" and "transfer-encoding" not in self._headers:
                self._parse(data[error.args[0] :])
            elif not self._deaf:  # the parser leaves out the body behind an offer
                self._todo.pop()
                self._refuse(ApiError(400, "A request that offers another protocol cannot have a body"))
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"This is not HTTP: {error}"))

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._heading = False  # its head is being read
        self._head_bytes = 0  # of reads that brought parts of the head alone
        self._counted_bytes = 0  # of its target and headers

    def _count(self, size: int) -> None:
        self._counted_bytes += size
        if self._counted_bytes > MOST_HEAD_BYTES:
            self._too_long()

    def _too_long(self) -> None:
        self._refuse(ApiError(431, f"The request's head is longer than {MOST_HEAD_BYTES} bytes"))

    def _too_big(self) -> None:
        self._refuse(ApiError(413, f"The request's body is longer than {MOST_BODY_BYTES} bytes"))

    def _refuse(self, error: ApiError) -> None:
        if not self._deaf:
            self._deaf = True
            self._todo.append(error)

    def _next(self) -> None:
        while self._todo and self._now is None and self.open:
            item = self._todo.popleft()
            if isinstance(item, ApiError):
                body = item.body()
                self._transport.write(self._head(item.status, len(body), "application/json", "") + body)
                self._leave()
                return
            self._now = item
            self._handle(self, item)
        if self._todo:
            self._transport.pause_reading()

    def _answered(self) -> None:
        self.lost = None
        keeps, self._now = self._keeps(), None
        if not keeps:
            self._leave()
        elif self._todo:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._transport.resume_reading()

    def _leave(self) -> None:
        """Close when the client has, or has had the time to read what was written."""
        self._deaf = True
        self._todo.clear()
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def _keeps(self) -> bool:
        return self._now is not None and self._now.keep_alive

    def _head(self, status: int, length: int, kind: str, headers: str) -> bytes:
        phrase, close = HTTPStatus(status).phrase, "" if self._keeps() else "connection: close\r\n"
        kind = f"content-type: {kind}\r\n" if length else ""
        return f"HTTP/1.1 {status} {phrase}\r\n{kind}content-length: {length}\r\n{headers}{close}\r\n".encode("latin-1")
