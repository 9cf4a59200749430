"""States of servers and of requests: every step of their diagrams, and no other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from harness.client.body import Server, Style
from harness.client.frames import Unpacker
from harness.client.log import DONE, STATES, Book
from harness.client.sender import Sender, Setup
from harness.client.states import REQUEST, STRICT, IllegalStepError
from harness.engines.servers.fleet import Fleet, Up
from harness.engines.servers.process import free_port
from harness.engines.servers.states import SERVER, State
from harness.policy.actions import Evict, Load
from harness.policy.types import UserError
from tests.harness.client.scripted import CLOSE, HANG, HEAD, Asked, Pieces, chunked, error, event, scripted, tokens
from tests.harness.client.scripted import DONE as DONE_LINE
from tests.harness.engines.servers import stubbed
from tests.harness.engines.servers.staged import batch
from tests.harness.engines.servers.test_stub import QUICK, config, jobs


class Steps:
    """A fleet of stubs, one of model a, whose steps are noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        self.seen = set[tuple[str, str]]()
        kept = Fleet.step

        def step(fleet: Fleet, up: Up, state: State) -> None:
            before = up.state
            kept(fleet, up, state)
            self.seen.add((before, state))

        monkeypatch.setattr(Fleet, "step", step)
        self.kind = stubbed.Stubbed(config(), (*QUICK, *options))
        self.fleet = Fleet(self.kind)
        self.fleet.open(folder)

    def up(self, way: str = "sleep") -> Up:
        """Start or wake a server by a Load; return it."""
        up = self.fleet.load(Load(batch("a").inst, way), stubbed.TOKENS * stubbed.TOKEN_BYTES)
        self.fleet.start(up)
        return up

    def until(self, up: Up, state: State) -> Up:
        """Wait until a server is in a state; return it."""
        while up.state != state:
            self.fleet.wait(60.0)
            list(self.fleet.changes())
        return up

    def down(self, up: Up) -> Up:
        """Stop a server, or put it to sleep, by an Evict; return it."""
        self.drain(up)
        self.fleet.stop(up)
        return up

    def drain(self, up: Up) -> Up:
        """Let a server take no more requests; return it."""
        self.fleet.evict(up, Evict(up.inst))
        return up

    def kill(self, up: Up) -> Up:
        """Kill a server's process; return the server."""
        assert up.process is not None
        os.kill(up.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, up.process.pid, os.WEXITED | os.WNOWAIT)
        return up


def test_servers_take_every_step_of_their_diagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(tmp_path, monkeypatch)
    up, until = steps.up, steps.until
    try:
        until(steps.down(until(up("host"), "ready")), "stopped")
        stopping = steps.down(until(up("host"), "ready"))
        steps.fleet._ring(stopping, UserError("no limit"))  # before it has stopped
        until(stopping, "dead")
        asleep = until(steps.down(until(up(), "ready")), "asleep")
        assert up() is asleep
        until(steps.kill(until(steps.down(until(asleep, "ready")), "asleep")), "dead")
        until(steps.kill(until(steps.down(until(up(), "ready")), "asleep")) and up(), "dead")  # killed, and then woken
        until(steps.kill(until(up(), "ready")), "dead")
        until(steps.kill(steps.drain(until(up(), "ready"))), "dead")
        until(steps.down(steps.kill(until(up(), "ready"))), "dead")  # it cannot be told to sleep
        with monkeypatch.context() as taken, socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            ports = iter([other.getsockname()[1], free_port()])
            taken.setattr(stubbed, "free_port", lambda: next(ports))
            until(up(), "ready")
        steps.kind.options = ("--no-such-option",)
        steps.fleet.up.clear()
        until(up(), "dead")
    finally:
        for left in steps.kind.processes:
            left.stop()
        steps.fleet.close()
    assert steps.seen == set(SERVER.edges())


def test_requests_take_every_step_of_their_diagram(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[str, str]]()
    kept = Book.step

    def step(book: Book, rid: int, state: int) -> None:
        before = book.state[rid]
        kept(book, rid, state)
        seen.add((STATES[before], STATES[state]))

    monkeypatch.setattr(Book, "step", step)
    stale = iter([tokens(1), (CLOSE,)])  # a server that closes a connection that was idle, then serves the next

    def answer(asked: Asked) -> Pieces:
        match asked.body["model"]:
            case "one":
                return tokens(1)
            case "none":
                return chunked(DONE_LINE)
            case "stale":
                return next(stale, tokens(1))
            case "refuses":
                return error(500, "no")
            case "hangs":
                return (HANG,)
            case "cut":
                return (HEAD, *chunked(event("a"))[1:2], CLOSE)
        return (HEAD, *chunked(event("a"))[1:2], HANG)  # "slow"

    class Parent:
        """The sender's parent, which reads what it is told."""

        def __init__(self) -> None:
            self.told = list[tuple[str, int, int, int]]()
            self.unpacker = Unpacker()

        def write(self, data: bytes) -> None:
            """See Transport."""
            self.told += [event for kind, *what in self.unpacker.feed(data) if kind == "told" for event in what[0]]

    async def run(url: str) -> None:
        parent = Parent()
        setup = Setup(jobs(64, 0.0, 2), 0, 60.0, Style(spare=0))
        sender = Sender(asyncio.get_running_loop(), setup)
        sender.connection_made(parent)  # type: ignore[arg-type]
        rids = iter(range(64))

        def send(model: str) -> int:
            rid = next(rids)
            sender.send(rid, Server(url, model), 0)
            return rid

        async def heard(kind: str, rid: int) -> None:
            while not any(event[:2] == (kind, rid) for event in parent.told):
                await asyncio.sleep(0.001)

        async def after(kind: str, model: str) -> int:
            await heard(kind, rid := send(model))
            return rid

        await after("done", "one")
        await after("done", "one")  # on the connection of the first
        await after("done", "none")
        await after("failed", "refuses")
        await after("done", "stale")
        await after("done", "stale")
        sender.cancel(next(rids))  # held
        dropped = send("hangs")
        while STATES[sender._book.state[dropped]] != "connecting":  # on one idle connection after the other
            dropped = send("hangs")
        sender.cancel(dropped)
        await heard("dropped", dropped)
        sent = send("hangs")
        while STATES[sender._book.state[sent]] != "sent":
            await asyncio.sleep(0.001)
        sender.cancel(sent)
        await after("failed", "cut")
        sender.cancel(await after("first", "slow"))
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            refused = next(rids)
            sender.send(refused, Server(f"http://127.0.0.1:{nobody.getsockname()[1]}", "one"), 0)
            await heard("failed", refused)
        sender.log()
        for pool in sender._pools.values():
            for connection in list(pool.all):
                connection.drop()
        await asyncio.sleep(0)  # its transport closes

    with scripted(answer) as server:
        asyncio.run(run(server.url))
    assert seen == set(REQUEST.edges())


def test_an_illegal_step_raises_in_tests_and_is_among_the_faults_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, up, book = Fleet(stubbed.Stubbed(config())), Up(batch("a").inst), Book(1)
    with pytest.raises(IllegalStepError):
        fleet.step(up, "asleep")
    with pytest.raises(IllegalStepError):
        book.step(0, DONE)
    monkeypatch.delenv(STRICT)
    fleet.step(up, "asleep")
    book.step(0, DONE)
    assert fleet.faults == ["server of a on GPU 0: no legal step from planned to asleep"]
    assert book.illegal == ["request 0: no legal step from waiting to done"]
    assert (up.state, book.state[0]) == ("asleep", DONE)  # the run goes on
