"""The mock server: routes, timers, and its life as a process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import uvloop

from harness.mock.agenda import Agenda
from harness.mock.ask import ApiError, read
from harness.mock.exchange import Exchange
from harness.mock.faults import Faults, Order, ordered
from harness.mock.http import Connection, Request
from harness.mock.model import LEVELS, Mode, Model, Served
from harness.mock.pacing import Pacing
from harness.mock.settings import Settings
from harness.mock.stats import Row, Stats
from harness.policy.types import UserError

PARENT_S = 0.2  # between looks for the parent
TICK_NS = 1_000_000  # of the loop's timers
MODES: tuple[Mode, ...] = ("abort", "wait", "keep")


class Mock:
    """Models behind OpenAI's API. It reads the clock where bytes come and go; all else happens at agenda times."""

    def __init__(
        self, served: Many[Served], pacing: Callable[[Agenda, int], Pacing], settings: Settings, now_ns: int
    ) -> None:
        self.settings = settings
        self.agenda = Agenda()
        self.models = {
            member.name: Model(member, pacing(self.agenda, k), self.agenda, partial(self._say, member.name))
            for k, member in enumerate(served)
        }
        self.stats = Stats()
        self.faults = Faults(settings.shares, settings.seed)
        self._created = int(time.time())
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ns = 0
        for model in self.models.values():
            model.begin(now_ns)

    # ------------------------------------------------------------------ time

    def read(self, now_ns: int) -> None:
        """Do what was due before bytes that came."""
        self.agenda.advance(now_ns)

    def now(self) -> int:
        """Return the time in ns, after all actions that are due by then."""
        now_ns = time.monotonic_ns()
        self.agenda.advance(now_ns)
        return now_ns

    def _at(self, request: Request) -> int:
        """Return when a request is handled, in ns: as it was read, or after the answer to one before it."""
        return max(request.read_ns, self.agenda.now_ns)

    def arm(self) -> None:
        """Have the loop wake us when the next action is due, by its one timer."""
        next_ns = self.agenda.next_ns
        if next_ns is None or (self._alarm is not None and self._alarm_ns <= next_ns):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        # Up to the next whole tick: a timer that came early would be set again and again.
        ticks = max(1, -(-(next_ns - time.monotonic_ns()) // TICK_NS))
        self._alarm_ns = next_ns
        self._alarm = asyncio.get_running_loop().call_later(ticks * TICK_NS / 1e9, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.now()
        self.arm()

    # ------------------------------------------------------------------ routes

    def handler(self, models: Mapping[str, Model]) -> Callable[[Connection, Request], None]:
        """Answer requests on a port that serves these models."""
        routes: dict[str, tuple[str, Callable[[Connection, Request, Mapping[str, Model]], None]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._list),
            "/v1/completions": ("POST", self._complete),
            "/v1/chat/completions": ("POST", self._complete),
            "/sleep": ("POST", self._sleep),
            "/wake_up": ("POST", self._wake),
            "/is_sleeping": ("GET", self._sleeping),
            "/mock/stats": ("GET", self._tell),
            "/mock/reset": ("POST", self._reset),
        }

        def handle(connection: Connection, request: Request) -> None:
            method, route = routes.get(request.path, ("", None))
            try:
                if route is None:
                    connection.error(ApiError(404, f"There is no {request.path}"))
                elif request.method != method:
                    error = ApiError(405, f"{request.path} takes {method}, not {request.method}")
                    connection.error(error, f"allow: {method}\r\n")
                else:
                    route(connection, request, models)
            except ApiError as error:
                connection.error(error)
            self.arm()

        return handle

    def _health(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:  # noqa: ARG002
        connection.reply(200, b"" if self.settings.flavour == "vllm" else b'{"status":"ok"}')

    def _list(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:  # noqa: ARG002
        about = {"object": "model", "created": self._created, "owned_by": "bench"}
        data = [{"id": m.served.name, **about, "max_model_len": m.served.max_tokens} for m in models.values()]
        connection.reply(200, json.dumps({"object": "list", "data": data}).encode())

    def _complete(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:
        drawn = self.faults.draw()
        row = self.stats.begin(request.headers.get("x-request-id", ""), request.read_ns)
        try:
            exchange = self._exchange(connection, request, models, row, drawn)
        except ApiError as error:
            self.end(row, str(error.status))
            connection.error(error, "retry-after: 1\r\n" if error.status == 429 else "")
        else:
            exchange.begin(self._at(request))

    def _exchange(
        self, connection: Connection, request: Request, models: Mapping[str, Model], row: Row, drawn: Order
    ) -> Exchange:
        headers = request.headers
        ask = read(request.body, chat=request.path == "/v1/chat/completions")
        model = _named(models, ask.model)
        self.stats.name(row, model.served.name)
        order = _ordered(headers["x-mock"]) if "x-mock" in headers else drawn
        if order.fault == "500":
            raise ApiError(500, "The mock fails this request, as --fail asks")
        queue = self.settings.queue
        if order.fault == "429" or (queue is not None and model.waiting + len(ask.prompts) * ask.n > queue):
            raise ApiError(429, f"{row.model} has too many requests waiting", code="rate_limit_exceeded")
        if headers.get("x-mock-stamps") == "1":
            ask = replace(ask, stamps=True)
        return Exchange(connection, row, ask, model, order, self.settings, self)

    def end(self, row: Row, end: str) -> None:
        """Count and log the end of a request."""
        self.stats.end(row, end, time.monotonic_ns())
        self._say(f"{row.number} {row.model} {end} {row.tokens} tokens")

    def _say(self, *words: str) -> None:
        if self.settings.log:
            print(*words, file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ sleep, as vLLM's development endpoints have it

    def _sleep(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:
        level, mode = _parameter(request, "level", "1"), _parameter(request, "mode", "abort")
        if level not in {str(n) for n in LEVELS}:
            raise ApiError(400, f"level must be {_or(LEVELS)}", "level")
        chosen = next((known for known in MODES if known == mode), None)
        if chosen is None:
            raise ApiError(400, f"mode must be {_or(MODES)}", "mode")
        asked = _asked(request, models)
        told = _all(len(asked), connection)
        for model in asked:
            model.sleep(int(level), chosen, self._at(request), told)

    def _wake(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:
        if "tags" in request.query:
            raise ApiError(400, "The mock wakes whole models: it knows no tags", "tags")
        asked = _asked(request, models)
        told = _all(len(asked), connection)
        for model in asked:
            model.wake(self._at(request), told)

    def _sleeping(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:
        asleep = all(model.sleeping for model in _asked(request, models))
        connection.reply(200, json.dumps({"is_sleeping": asleep}).encode())

    # ------------------------------------------------------------------ the mock's own

    def _tell(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:  # noqa: ARG002
        connection.reply(200, json.dumps(self.stats.told()).encode())

    def _reset(self, connection: Connection, request: Request, models: Mapping[str, Model]) -> None:  # noqa: ARG002
        self.stats.reset()
        self.faults.restart()
        connection.reply(200)


def _named(models: Mapping[str, Model], name: str | None) -> Model:
    if name is None:
        if len(models) > 1:
            raise ApiError(400, "model is missing, and there are several", "model")
        return next(iter(models.values()))
    if name not in models:
        raise ApiError(404, f"There is no model {name}", "model", "model_not_found")
    return models[name]


def _asked(request: Request, models: Mapping[str, Model]) -> list[Model]:
    """Return the models of `?model=NAME`, which may be repeated; without one, all of the port."""
    return [_named(models, name) for name in request.query.get("model", [])] or list(models.values())


def _ordered(text: str) -> Order:
    try:
        return ordered(text)
    except ValueError as error:
        raise ApiError(400, f"x-mock: {error}", "x-mock") from None


def _parameter(request: Request, name: str, default: str) -> str:
    return request.query.get(name, [default])[-1]


def _or(values: Many[object]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


def _all(count: int, connection: Connection) -> Callable[[int], None]:
    """Answer when all of so many models have done what they were told to."""
    left = count

    def told(at_ns: int) -> None:  # noqa: ARG001
        nonlocal left
        left -= 1
        if not left and connection.open:
            connection.reply(200)

    return told


# ---------------------------------------------------------------------- a process


def run(mock: Mock, host: str, port: int, *, ports: bool = False, with_parent: bool = False) -> signal.Signals | None:
    """Serve until a signal comes, and name it; None: the parent is gone. With `ports` each model has its own.

    The URL of each port is a line of stdout, with the model's name behind it where there are several.
    """
    # A collection would stop all streams for as long as it takes. None is needed: cycles of references end with them.
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(mock, host, port, ports=ports, with_parent=with_parent))
    finally:
        gc.enable()


@asynccontextmanager
async def listening(mock: Mock, host: str, port: int, *, ports: bool = False) -> AsyncIterator[dict[str, str]]:
    """Open the port, or one a model from `port` on (0: any that is free): URLs, each with its model if it has one.

    At the end ports and connections are closed at once.
    """
    loop = asyncio.get_running_loop()
    sites = [{name: model} for name, model in mock.models.items()] if ports else [mock.models]
    urls: dict[str, str] = {}
    servers: list[asyncio.Server] = []
    connections: set[Connection] = set()
    try:
        for k, models in enumerate(sites):
            at, connect = port + k if port else 0, partial(Connection, mock.handler(models), mock.read, connections)
            try:
                servers.append(await loop.create_server(connect, host, at, backlog=4096))
            except (OSError, OverflowError, UnicodeError) as error:  # a name that is no host
                raise UserError(f"cannot listen on {host} port {at}: {_why(error)}") from None
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{servers[-1].sockets[0].getsockname()[1]}"
            urls[url] = next(iter(models)) if ports else ""
        mock.arm()
        yield urls
    finally:
        for server in servers:
            server.close()
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)  # in which they are


def _why(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    return os.strerror(code) if code is not None and code > 0 else str(error)


async def _serve(mock: Mock, host: str, port: int, *, ports: bool, with_parent: bool) -> signal.Signals | None:
    loop, parent = asyncio.get_running_loop(), os.getppid()
    stopped: asyncio.Future[signal.Signals | None] = loop.create_future()

    def stop(why: signal.Signals | None) -> None:
        if not stopped.done():
            stopped.set_result(why)

    def look() -> None:
        if os.getppid() != parent:
            stop(None)
        loop.call_later(PARENT_S, look)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    try:
        async with listening(mock, host, port, ports=ports) as urls:
            for url, name in urls.items():
                print(f"listening on {url} {name}".rstrip(), flush=True)
            if with_parent:
                look()
            return await stopped
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
