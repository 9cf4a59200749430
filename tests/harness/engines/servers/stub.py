"""A server of OpenAI's API that computes nothing: tokens at set times, and sleep. A program of the tests.

    python -m tests.harness.engines.servers.stub --models a,b --ttft-ms 4 --itl-ms 1

Every request is a streamed completion. Tokens come at absolute times, so that lateness never adds up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httptools
import uvloop

COLUMNS = ("id", "read_ns", "first_ns")  # of a request's row: CLOCK_MONOTONIC, -1 for what has not come
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)
PARENT_S = 0.2  # between two looks for the parent


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; an unknown option ends the program."""
    parser = argparse.ArgumentParser("tests.harness.engines.servers.stub", allow_abbrev=False)
    parser.add_argument("--models", required=True, help="names with commas between them")
    for name in ("ttft-ms", "itl-ms", "sleep-ms", "wake-ms"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true", help="answer requests with an error")
    parser.add_argument("--max-model-len", type=int, default=32768, help="tokens of prompt and output")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true", help="end when the parent has ended")
    return parser.parse_args(argv)


class Model:
    """A model: its requests, and whether it is awake. Requests to one that is not are held."""

    def __init__(self, stub: Stub, name: str) -> None:
        self.stub, self.name = stub, name
        self.live: set[Answer] = set()
        self.held: deque[Answer] = deque()
        self.awake, self._turn = True, asyncio.Lock()
        self._drained = asyncio.Event()
        self._drained.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, answer: Answer) -> None:
        """Answer a request, or hold it."""
        if not self.awake:
            self.held.append(answer)
            return
        self._drained.clear()
        self.live.add(answer)
        answer.begin()

    def ended(self, answer: Answer) -> None:
        """Forget a request that is over."""
        self.live.discard(answer)
        if answer in self.held:
            self.held.remove(answer)
        if not self.live:
            self._drained.set()

    def begin(self, work: Any, link: Connection) -> None:
        """Fall asleep or wake; then answer whoever asked for it."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            link.reply(200, b"")

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    async def sleep(self) -> None:
        """Fall asleep once all requests have ended."""
        async with self._turn:
            if self.awake:
                self.awake = False
                await self._drained.wait()
                await asyncio.sleep(self.stub.asked.sleep_ms / 1e3)

    async def wake(self) -> None:
        """Wake, and go on with what was held."""
        async with self._turn:
            if not self.awake:
                await asyncio.sleep(self.stub.asked.wake_ms / 1e3)
                self.awake = True
                while self.held:
                    self.submit(self.held.popleft())


class Answer:
    """A completion under way: its tokens, each a chunk."""

    def __init__(self, link: Connection, model: Model, body: dict[str, Any], row: list[Any]) -> None:
        self.link, self.model, self.row = link, model, row
        self.prompt, self.wanted, self.made = len(body["prompt"]), int(body.get("max_tokens") or 16), 0
        options = body.get("stream_options") or {}
        self.usage, self.usages = options.get("include_usage"), options.get("continuous_usage_stats")
        self.due_s = 0.0
        about = {"id": f"cmpl-{row[0]}", "object": "text_completion", "created": int(time.time()), "model": model.name}
        self.head = f"data: {json.dumps(about)[:-1]}, "
        self.plain = f'{self.head}"choices": [{{"index": 0, "text": " '
        self.over = False

    def begin(self) -> None:
        """Set the time of the first token."""
        self.link.stream()
        loop, asked = asyncio.get_running_loop(), self.model.stub.asked
        self.due_s = loop.time() + asked.ttft_ms / 1e3
        loop.call_at(self.due_s, self.token)

    def end(self) -> None:
        """Hear that it is over, as its client has left or its last token is out."""
        self.over = True
        self.model.ended(self)

    def token(self) -> None:
        """Send a token, and set the time of the next."""
        if self.over:
            return
        self.made += 1
        if self.made == 1:
            self.row[2] = time.monotonic_ns()
        last = self.made == self.wanted
        reason = '"length"' if last else "null"
        usage = f', "usage": {self.used()}' if self.usages else ""
        chunk = f'{self.plain}{self.made}", "logprobs": null, "finish_reason": {reason}}}]{usage}}}\n\n'.encode()
        if last:
            if self.usage:
                chunk += f'{self.head}"choices": [], "usage": {self.used()}}}\n\n'.encode()
            self.end()
            self.link.send(chunk + b"data: [DONE]\n\n", last=True)
            return
        self.link.send(chunk)
        self.due_s += self.model.stub.asked.itl_ms / 1e3
        asyncio.get_running_loop().call_at(self.due_s, self.token)

    def used(self) -> str:
        """Return the usage so far, as JSON."""
        return (
            f'{{"prompt_tokens": {self.prompt}, "completion_tokens": {self.made}, '
            f'"total_tokens": {self.prompt + self.made}}}'
        )


class Connection(asyncio.Protocol):
    """A client's connection, which has one request at a time."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.answer: Answer | None = None
        self.headers: dict[str, str] = {}
        self.url, self.body, self.read_ns = b"", b"", -1
        self.transport: asyncio.Transport
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.end()

    def data_received(self, data: bytes) -> None:
        self.read_ns = time.monotonic_ns()
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers, self.url, self.body = {}, b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.stub.handle(self)

    def reply(self, status: int, body: bytes) -> None:
        """Answer with a body."""
        keep = self._kept_alive()
        self.transport.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n%b\r\n" % (status, len(body), keep) + body)
        self._answered()

    def stream(self) -> None:
        """Begin to answer with a stream of events."""
        self.transport.write(HEAD + self._kept_alive() + b"\r\n")

    def send(self, events: bytes, *, last: bool = False) -> None:
        """Send events of a stream, in one chunk."""
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(events), events, b"0\r\n\r\n" if last else b""))
        if last:
            self._answered()

    def _kept_alive(self) -> bytes:
        return b"" if self.parser.should_keep_alive() else b"connection: close\r\n"

    def _answered(self) -> None:
        self.answer = None
        if not self.parser.should_keep_alive():
            self.transport.close()


class Stub:
    """The models of a server, and what came."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.models = {name: Model(self, name) for name in asked.models.split(",")}
        self.rows: deque[list[Any]] = deque(maxlen=250_000)

    def handle(self, link: Connection) -> None:
        """Answer a request, now or later."""
        parts = urlsplit(link.url.decode("latin-1"))
        names = parse_qs(parts.query).get("model", list(self.models))
        match parts.path:
            case "/health":
                link.reply(200, b"")
            case "/v1/models":
                about = {"object": "model", "owned_by": "vllm", "max_model_len": self.asked.max_model_len}
                link.reply(200, json.dumps({"data": [{"id": name, **about} for name in self.models]}).encode())
            case "/v1/completions":
                self._complete(link)
            case "/wake_up" if "tags=" in parts.query:
                print("a wake was refused", flush=True)
                link.reply(400, _error("It wakes whole models: it knows no tags"))
            case "/sleep" | "/wake_up":
                model = self.models[names[0]]  # a server that sleeps has one
                model.begin(model.sleep() if parts.path == "/sleep" else model.wake(), link)
            case "/stub/rows":
                columns = zip(COLUMNS, zip(*self.rows, strict=True), strict=True) if self.rows else ()
                link.reply(200, json.dumps(dict(columns)).encode())
            case "/stub/reset":
                self.rows.clear()
                link.reply(200, b"")
            case _:
                link.reply(404, b"")

    def _complete(self, link: Connection) -> None:
        row = [link.headers.get("x-request-id", ""), link.read_ns, -1]
        self.rows.append(row)
        body = json.loads(link.body)
        if body["model"] not in self.models:
            link.reply(404, _error(f"There is no model {body['model']}"))
        elif self.asked.fail:
            link.reply(500, _error("It fails"))
        elif (tokens := len(body["prompt"]) + int(body.get("max_tokens") or 16)) > self.asked.max_model_len:
            link.reply(400, _error(f"{tokens} tokens are more than {self.asked.max_model_len}"))
        else:
            link.answer = Answer(link, self.models[body["model"]], body, row)
            link.answer.model.submit(link.answer)


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


async def _serve(asked: argparse.Namespace) -> None:
    loop, parent, stub = asyncio.get_running_loop(), os.getppid(), Stub(asked)
    server = await loop.create_server(lambda: Connection(stub), "127.0.0.1", asked.port, backlog=4096)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    while not asked.with_parent or os.getppid() == parent:
        await asyncio.sleep(PARENT_S)


def main(argv: Sequence[str]) -> None:
    """Serve until a signal comes; its URL is a line of stdout."""
    asked = arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.disable()  # a collection would stop all streams
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(asked))


if __name__ == "__main__":
    main(sys.argv[1:])
