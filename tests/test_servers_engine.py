"""The engine of real servers: its books in a world whose clock the test turns, then servers that are processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.client.body import STYLES, Server, Style
from harness.client.client import Told
from harness.client.log import DONE, DROPPED, FAILED, OPEN, WAITING, Book, Log, assemble
from harness.engines.machine import Config, Served
from harness.engines.servers import engine as module
from harness.engines.servers import fleet
from harness.engines.servers.engine import CLIENT, Servers
from harness.engines.servers.fleet import Change, Seat, Up
from harness.loop.engine import Observed
from harness.loop.replay import Outcome, replay
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Freed, Prefilled, Woke
from harness.policy.types import Batch, Cluster, Gpu, Inst, Jobs, Model, Option, UserError
from harness.policy.view import View
from harness.rows import record
from workloads.models import shape

MS = 1_000_000
LAG_NS, PREFILL_NS, STEP_NS = 1 * MS, 50 * MS, 10 * MS  # of the client, and of every server
START_NS, STOP_NS = 500 * MS, 100 * MS
TOKEN_BYTES, PAGE_BYTES, WEIGHTS = 10, 1000, 5000
LONGEST = 999  # tokens: with the one that follows, ten pages


class World:
    """Its time passes only where somebody waits."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0

    def at(self, ns: int, do: Callable[[], None]) -> None:
        """Do something at a time, after what was asked for earlier."""
        self.count += 1
        heapq.heappush(self.agenda, (ns, self.count, do))

    def sleep(self, timeout_s: float) -> None:
        """Until the next thing happens, or the time is over."""
        until_ns = self.now_ns + timeout_s * 1e9
        if not self.agenda:
            assert timeout_s < float("inf"), "it would wait for ever"
        if self.agenda and self.agenda[0][0] <= until_ns:
            ns, _, do = heapq.heappop(self.agenda)
            self.now_ns = max(self.now_ns, ns)
            do()
        else:
            self.now_ns = max(self.now_ns + 1, round(until_ns))


class Sender:
    """The client, and the servers behind it: a prefill, then a token a step, whatever else they have to do.

    `deaf_ns` passes until it has heard of a route, and meanwhile requests leave by the one before.
    """

    def __init__(self, world: World, jobs: Jobs, deaf_ns: int = 0) -> None:
        self.world, self.jobs, self.deaf_ns = world, jobs, deaf_ns
        self.book, self.told = Book(len(jobs)), list[Told]()
        self.routes: dict[str, Server | None] = {}
        self.sent: list[tuple[int, Server]] = []
        self.down: set[str] = set()  # URLs at which nobody listens any more
        self.begun = False

    def start(self) -> None:
        """See Client."""

    def fileno(self) -> int:
        """See Client."""
        return -1

    def begin(self, zero_ns: int, hears: bool) -> None:
        """See Client."""
        assert hears
        self.begun = True
        for rid, at_s in enumerate(self.jobs.arrival_s.tolist()):
            at_ns = self.book.intended_ns[rid] = zero_ns + round(at_s * 1e9)
            self.world.at(at_ns, partial(self.arrive, rid, at_ns))

    def arrive(self, rid: int, at_ns: int) -> None:
        """A request's time has come."""
        to = self.routes.get(self.jobs.models[self.jobs.model.item(rid)])
        self.told.append(Told("arrived", rid, at_ns, int(to is not None)))
        if to is not None:
            self.leave(rid, to, at_ns)

    def route(self, model: str, to: Server | None) -> None:
        """See Client."""

        def heard() -> None:
            self.routes[model] = to
            self.told.append(Told("routed", -1, self.world.now_ns, 0))

        if self.begun:
            self.world.at(self.world.now_ns + self.deaf_ns, heard)
        else:
            self.routes[model] = to

    def send(self, rid: int, to: Server) -> None:
        """See Client."""
        assert self.book.state[rid] == WAITING, "it was sent already"
        self.leave(rid, to, self.world.now_ns)

    def leave(self, rid: int, to: Server, due_ns: int) -> None:
        """It is written a moment later, and answered."""
        self.book.due_ns[rid], self.book.state[rid] = due_ns, OPEN
        self.sent.append((rid, to))
        self.world.at(due_ns + LAG_NS, lambda: self.write(rid, to))

    def write(self, rid: int, to: Server) -> None:
        """The server has it, if there is one."""
        if to.url in self.down:
            self.end(rid, FAILED, "failed", "connection refused")
            return
        self.book.write_ns[rid] = self.world.now_ns
        first_ns, n = self.world.now_ns + PREFILL_NS, self.jobs.output_tokens.item(rid)
        self.world.at(first_ns, lambda: self.chunk(rid, to, min(2, n)))
        for k in range(1, n - 1):
            self.world.at(first_ns + k * STEP_NS, lambda: self.chunk(rid, to, 1))
        self.world.at(first_ns + max(0, n - 2) * STEP_NS, lambda: self.end(rid, DONE, "done"))

    def chunk(self, rid: int, to: Server, tokens: int) -> None:
        """Tokens come, two in the first chunk."""
        if self.book.state[rid] != OPEN:
            return
        if to.url in self.down:
            self.end(rid, FAILED, "failed", "connection reset")
            return
        if self.book.byte_ns[rid] < 0:
            self.book.byte_ns[rid] = self.world.now_ns
            self.told.append(Told("first", rid, self.world.now_ns, tokens))
        self.book.chunks(rid, self.world.now_ns, [tokens])

    def end(self, rid: int, state: int, kind: Any, why: str = "") -> None:
        """It is over."""
        if self.book.state[rid] not in {WAITING, OPEN}:
            return
        self.book.state[rid], self.book.end_ns[rid] = state, self.world.now_ns
        if state == DONE:
            self.book.done_ns[rid], self.book.status[rid] = self.world.now_ns, 200
        if why:
            self.book.errors[rid] = why
        self.told.append(Told(kind, rid, self.world.now_ns, self.jobs.output_tokens.item(rid) if state == DONE else 0))

    def cancel(self, rid: int) -> None:
        """See Client."""
        self.world.at(self.world.now_ns, lambda: self.end(rid, DROPPED, "dropped"))

    def poll(self, timeout_s: float) -> list[Told]:
        """See Client."""
        assert timeout_s == 0.0
        told, self.told = self.told, []
        return told

    def log(self) -> Log:
        """See Client."""
        return assemble(self.book.columns(True, 0.1, 1.0, 1), [self.book.spill()])

    def close(self) -> None:
        """See Client."""


class Process:
    """A server's process that is alive until it is killed."""

    pid = -1

    def __init__(self, url: str) -> None:
        self.url, self.stopped, self.killed = url, False, False

    def start(self) -> None:
        """See process.Process."""

    def alive(self) -> bool:
        """See process.Process."""
        return not (self.stopped or self.killed)

    def stop(self, grace_s: float = 5.0) -> None:
        """See process.Process."""
        self.stopped = True

    def last_lines(self) -> str:
        """See process.Process."""
        return "bad_alloc"


class Small:
    """Servers of models of 5,000 bytes and ten pages of 1,000 bytes for a longest request."""

    name = "small"
    can = frozenset({"Load", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host"})
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",)}
    style: Style = STYLES["openai"]
    facts: Mapping[str, str] = {"small": "1.0"}
    slots = 2

    def __init__(self, config: Config, mem_bytes: int) -> None:
        model = Model(4, 1, WEIGHTS, TOKEN_BYTES, PAGE_BYTES, LONGEST, float("inf"), float("inf"))
        gpus = tuple(Gpu("cpu", 0, mem_bytes, 1, ()) for _ in range(config.gpus))
        self.cluster = Cluster(gpus, {m.name: model for m in config.models}, {}, None)  # type: ignore[arg-type]
        self.seats: list[tuple[Inst, int, Process]] = []

    def ready(self, folder: Path) -> None:
        """See Kind."""
        assert folder.is_dir()

    def seat(self, inst: Inst, kv_bytes: int, log: Path) -> Seat:
        """See Kind."""
        log.write_text("it starts\n")
        process = Process(f"http://127.0.0.1:{len(self.seats) + 1}")
        self.seats.append((inst, kv_bytes, process))
        return Seat(Server(process.url, inst.model), process)  # type: ignore[arg-type]

    def roots(self) -> list[int]:
        """See Kind."""
        return []

    def served(self) -> dict[str, str]:
        """See Kind."""
        return {}


class Script:
    """A policy that answers what a test says."""

    def __init__(self, answers: Callable[[Event, View], Iterable[Action]], hears: set[type] | None = None) -> None:
        self.answers = answers
        self.uses = frozenset({"Load", "Run", "Admit"})
        self.hears = frozenset(hears or {Woke, Arrived, Prefilled, Finished, Load, Evict})
        self.options: Mapping[str, Option] = {}
        self.heard: list[tuple[float, Event]] = []

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """What the test says."""
        self.heard.append((view.now_s, event))
        return tuple(self.answers(event, view))

    def told(self, kind: type) -> list[Any]:
        """Events of a kind."""
        return [event for _, event in self.heard if isinstance(event, kind)]


class Stage:
    """An engine in a world of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, mem_bytes: int = 100_000, deaf_ns: int = 0) -> None:
        self.world = World()
        clock = SimpleNamespace(monotonic=lambda: self.world.now_ns / 1e9, monotonic_ns=lambda: self.world.now_ns)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(fleet, "time", clock)
        monkeypatch.setattr(fleet.Fleet, "wait", lambda _, timeout_s, also=None: self.world.sleep(timeout_s))
        monkeypatch.setattr(fleet.Fleet, "_attend", self.attend)
        config = Config(tuple(Served(m, shape("llama-3.2-1b")) for m in ("a", "b", "c")), token_times=True)
        self.kind = Small(config, mem_bytes)
        self.sender: Sender | None = None
        self.never_ready: set[str] = set()
        self.engine = Servers(config, self.kind, lambda jobs, *_: self.connect(jobs, deaf_ns))  # type: ignore[arg-type]

    def connect(self, jobs: Jobs, deaf_ns: int) -> Sender:
        self.sender = Sender(self.world, jobs, deaf_ns)
        return self.sender

    def attend(self, up: Up, work: Any, what: Any) -> None:
        """A start or a stop takes its time."""
        assert up.process is not None

        def over() -> None:
            if what == "stopped":
                work(up.process)
            if what == "ready" and up.inst.model in self.never_ready:
                self.engine.fleet._ring((up, UserError(f"server {up.inst.model} ended before it was ready")))
            else:
                self.engine.fleet._ring(Change(up, what))

        self.world.at(self.world.now_ns + (START_NS if what == "ready" else STOP_NS), over)

    def run(self, script: Script, jobs: Jobs, end_s: float = float("inf")) -> tuple[Outcome, list[dict[str, Any]]]:
        """Replay a workload; rows, and what the loop counted."""
        try:
            outcome = replay(script, self.engine, jobs, end_s=end_s)
            rows = [row for batch in self.engine.rows() for row in batch.to_pylist()]
        finally:
            self.engine.close()
        for row in rows:
            parts = [row[f"{wait}_ns"] for wait in record.WAITS]
            assert min(parts) >= 0
            if row["done_ns"] is not None:
                assert sum(parts) == row["done_ns"] - row["arrival_ns"]
            assert len(row["token_ns"]) == row["made_tokens"]
        return outcome, rows


def jobs(*requests: tuple[float, str, int]) -> Jobs:
    """Requests: arrival, model, output tokens."""
    arrival_s, models, outputs = zip(*requests, strict=True)
    none = np.full(len(requests), np.inf)
    model = np.array(["abc".index(m) for m in models], np.int32)
    prompts = np.full(len(requests), 8, np.int32)
    return Jobs(("a", "b", "c"), np.array(arrival_s), model, prompts, np.array(outputs, np.int32), none, none)


def batch(model: str) -> Batch:
    """Where a model is served."""
    return Batch(Inst(model, (0,)))


def waits(row: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by cause, where there are any."""
    return {wait: round(row[f"{wait}_ns"] / MS, 3) for wait in record.WAITS if row[f"{wait}_ns"]}


def routed(*models: str) -> Callable[[Event, View], Iterable[Action]]:
    """Models that are up from the start, and need no policy from there on."""

    def answers(event: Event, _: View) -> Iterable[Action]:
        if event == Woke("start"):
            for m in models:
                yield from (Load(batch(m).inst), Run(batch(m)), Admit(m, batch(m)))

    return answers


# ------------------------------------------------------------------ books


def test_a_routed_request_leaves_at_its_time_and_its_books_are_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    _, (row,) = stage.run(Script(routed("a"), {Woke}), jobs((1.0, "a", 6)))
    assert (row["state"], row["fidelity"], row["gpus"], row["made_tokens"]) == ("done", "real", "0", 6)
    assert waits(row) == {"host": 1.0, "solo": 90.0}  # the lag; a prefill of 50 ms, and four steps of 10
    first_ns, done_ns = 1_051 * MS, 1_091 * MS
    assert (row["arrival_ns"], row["admit_ns"], row["first_ns"], row["done_ns"]) == (
        1000 * MS,
        1000 * MS,
        first_ns,
        done_ns,
    )
    assert row["first_tokens"] == 2  # so that TPOT is 40 ms over the 4 tokens behind the first chunk
    assert row["token_ns"] == [51 * MS, 51 * MS, 61 * MS, 71 * MS, 81 * MS, 91 * MS]
    assert stage.engine.stats()["loads"] == 0  # what is up at the start is free


def test_a_request_waits_for_its_server_and_its_model_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(event: Event, _: View) -> Iterable[Action]:
        if isinstance(event, Arrived):
            m = event.request.model
            yield from (Load(batch(m).inst), Run(batch(m)), Admit(event.request.id, batch(m)))

    stage = Stage(monkeypatch)
    script = Script(answers)
    _, rows = stage.run(script, jobs((1.0, "a", 2), (1.2, "a", 2)))
    assert [waits(row) for row in rows] == [
        {"load": 500.0, "host": 1.0, "solo": 50.0}, {"load": 300.0, "host": 1.0, "solo": 50.0},
    ]  # fmt: skip
    assert len(stage.kind.seats) == 1
    assert [one.failed for one in script.told(Done)] == [None, None]  # each Load is told
    assert stage.engine.stats()["loads"] == 1.0


def test_a_request_that_nobody_admits_is_held_and_one_without_a_lane_waits_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(event: Event, _: View) -> Iterable[Action]:
        match event:
            case Woke("start"):
                yield from (Load(batch("a").inst), Wake(1.3, "admit"), Wake(1.7, "run"))
            case Woke("admit"):
                yield Admit(0, batch("a"))
            case Woke("run"):
                yield Run(batch("a"))

    _, (row,) = Stage(monkeypatch).run(Script(answers), jobs((1.0, "a", 2)))
    assert waits(row) == {"held": 300.0, "turn": 400.0, "host": 1.0, "solo": 50.0}


def test_what_is_under_way_at_the_end_is_unfinished_and_later_tokens_are_none_of_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)
    _, (one, other) = stage.run(Script(routed("a"), {Woke}), jobs((1.0, "a", 50), (5.0, "a", 2)), end_s=1.2)
    assert (one["state"], other["state"]) == ("unfinished", "unfinished")
    assert one["made_tokens"] == 2 + 14  # a step ends every 10 ms from 1.051 s
    assert (one["done_ns"], other["first_ns"]) == (None, None)
    assert waits(one) == {"host": 1.0, "solo": 199.0}


def test_a_dropped_request_ends_so_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a")(event, view)
        match event:
            case Arrived(request) if request.model == "b":
                yield Drop(request.id)  # never sent
            case Prefilled(0, _):
                yield Drop(0)  # at its server

    script = Script(answers)
    _, rows = Stage(monkeypatch).run(script, jobs((1.0, "a", 50), (1.1, "b", 2)))
    assert [row["state"] for row in rows] == ["dropped", "dropped"]
    assert [(one.rid, one.state) for one in script.told(Finished)] == [(0, "dropped")]  # the last end is the run's


def test_fewer_tokens_than_asked_for_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    script = Script(routed("a"), {Woke, Finished})
    monkeypatch.setattr(Sender, "end", lambda self, rid, state, kind, why="": self.told.append(
        Told(kind, rid, self.world.now_ns, 1)))  # fmt: skip
    _, rows = stage.run(script, jobs((1.0, "a", 2), (2.0, "a", 1)))
    assert [row["state"] for row in rows] == ["failed", "done"]
    assert script.told(Finished)[0].state == "failed"
    assert stage.engine.errors == {0: "1 tokens, 2 were asked for"}


# ------------------------------------------------------------------ servers that come and go


def swapped(event: Event, _: View) -> Iterable[Action]:
    """One model at a time: whoever is asked for comes, the other leaves."""
    if event == Woke("start"):
        yield from (Load(batch("a").inst), Run(batch("a")), Run(batch("b")))
    if isinstance(event, Arrived):
        mine, other = (batch(m) for m in ("ab" if event.request.model == "a" else "ba"))
        yield from (Admit(event.request.id, mine), Load(mine.inst), Evict(other.inst))


def test_a_server_stops_when_its_requests_have_ended_and_the_next_starts_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, mem_bytes=WEIGHTS + 20_000)  # one server, with KV for two longest requests
    script = Script(swapped)
    outcome, (a, b) = stage.run(script, jobs((1.0, "a", 10), (1.01, "b", 2)))
    assert waits(a) == {"host": 1.0, "solo": 130.0}  # until 1.131 s
    assert waits(b) == {"load": 131.0 - 10.0 + 100.0 + 500.0, "host": 1.0, "solo": 50.0}
    assert (a["state"], b["state"], outcome.refused) == (
        "done",
        "done",
        2,
    )  # an eviction of what is out, a load that stood
    assert {name: stage.engine.stats()[name] for name in ("loads", "evicts", "faults")} == {
        "loads": 1.0, "evicts": 1.0, "faults": 0.0,
    }  # fmt: skip
    assert [(inst.model, kv) for inst, kv, _ in stage.kind.seats] == [("a", 20_000), ("b", 20_000)]


def test_a_request_that_left_before_the_client_heard_of_the_end_of_its_route_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a")(event, view)
        match event:
            case Woke("start"):
                yield from (Wake(1.0, "evict"), Wake(2.0, "load"))
            case Woke("evict"):
                yield Evict(batch("a").inst)
            case Woke("load"):
                yield Load(batch("a").inst)

    stage = Stage(monkeypatch, deaf_ns=40 * MS)
    _, (early, late) = stage.run(Script(answers), jobs((1.02, "a", 2), (1.5, "a", 2)))
    assert (early["state"], late["state"]) == ("done", "done")
    assert waits(early) == {"host": 1.0, "solo": 50.0}
    assert waits(late) == {"load": 1000.0, "host": 1.0, "solo": 50.0}  # until the next server is up, at 2.5 s
    assert stage.sender is not None
    assert [rid for rid, _ in stage.sender.sent] == [0, 1]  # nobody is sent twice


def test_the_requests_of_a_server_that_dies_fail_with_the_reason_until_it_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(monkeypatch)

    def kill() -> None:
        _, _, process = stage.kind.seats[0]
        process.killed = True
        assert stage.sender is not None
        stage.sender.down.add(process.url)

    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a", "b")(event, view)
        match event:
            case Woke("start"):
                yield from (Wake(1.1, "kill"), Wake(2.0, "load"))
            case Woke("kill"):
                kill()
            case Woke("load"):
                yield Load(batch("a").inst)

    rows = stage.run(Script(answers), jobs((1.0, "a", 50), (1.5, "a", 2), (1.6, "b", 2), (2.6, "a", 2)))[1]
    assert [row["state"] for row in rows] == ["failed", "failed", "done", "done"]
    why = "the server of a on GPU 0 ended by itself; its log ends with:\nbad_alloc"
    assert stage.engine.errors == {0: why, 1: why}
    assert stage.engine.side()["faults"] == [why]
    assert capsys.readouterr().err == f"{why}\n"
    assert "solo" not in waits(rows[1])  # it never ran


def test_a_server_that_never_answers_is_a_refusal_and_who_waits_for_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a")(event, view)
        if isinstance(event, Arrived) and event.request.model == "b":
            yield from (Load(batch("b").inst), Run(batch("b")), Admit(event.request.id, batch("b")))

    stage, script = Stage(monkeypatch), Script(answers)
    stage.never_ready.add("b")
    _, rows = stage.run(script, jobs((1.0, "b", 2), (1.1, "a", 2)))
    assert [row["state"] for row in rows] == ["failed", "done"]
    assert waits(rows[0]) == {"load": 500.0}
    (refusal,) = (one for one in script.told(Done) if one.failed)
    assert (refusal.failed, refusal.why) == ("never", "server b ended before it was ready")


def test_a_server_of_the_start_that_never_answers_is_told_before_the_clock_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)
    stage.never_ready.add("b")
    with pytest.raises(UserError, match="server b ended before it was ready"):
        stage.run(Script(routed("a", "b")), jobs((1.0, "a", 2)))
    assert all(process.stopped for _, _, process in stage.kind.seats)


# ------------------------------------------------------------------ memory


def test_servers_of_the_start_have_the_kv_memory_of_limits_said_after_their_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a", "b", "c")(event, view)
        if event == Woke("start"):
            yield from (Limit("a", 0, 14_500), Limit("b", 0, 40_000))
        if isinstance(event, Arrived):
            yield from (Limit("a", 0, 14_999), Limit("a", 0, 15_000), Limit("a", 0, 999))

    stage, script = Stage(monkeypatch, mem_bytes=100_000), Script(answers)
    stage.run(script, jobs((1.0, "a", 2)))
    sizes = {inst.model: kv for inst, kv, _ in stage.kind.seats}
    assert sizes == {"a": 14_000, "b": 40_000, "c": 20_000}  # whole pages; c as many longest requests as it has slots
    why = [(one.action.kv_bytes, one.failed, one.why) for one in script.told(Done) if one.failed]
    assert why == [
        (15_000, "never", "small takes its KV memory when it starts"),
        (999, "never", "small takes KV memory by 1000 bytes"),
    ]


def test_servers_without_limits_share_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, mem_bytes=3 * WEIGHTS + 36_000)
    stage.run(Script(routed("a", "b", "c")), jobs((1.0, "a", 2)))
    assert [kv for _, kv, _ in stage.kind.seats] == [12_000] * 3


def test_a_load_without_room_stands_until_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[float, int]]()

    def answers(event: Event, view: View) -> Iterable[Action]:
        seen.append((view.now_s, view.free_bytes(0)))
        match event:
            case Woke("start"):
                yield from (Load(batch("a").inst), Wake(2.0, "evict"))
            case Arrived(request):
                yield from (Load(batch("b").inst), Run(batch("b")), Admit(request.id, batch("b")))
            case Woke("evict"):
                yield Evict(batch("a").inst)

    stage, script = Stage(monkeypatch, mem_bytes=WEIGHTS + 20_000), Script(answers)
    outcome, (row,) = stage.run(script, jobs((1.0, "b", 2)))
    assert row["state"] == "done"
    assert waits(row)["load"] == 1000.0 + 100.0 + 500.0
    assert "b takes 15000 bytes, 0 are free on GPU 0" in outcome.first_refused
    assert not any(isinstance(event, Freed) for _, event in script.heard)
    assert all(0 <= free <= WEIGHTS + 20_000 for _, free in seen)


def test_a_load_that_no_room_is_enough_for_can_never_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(event: Event, _: View) -> Iterable[Action]:
        if isinstance(event, Arrived):
            yield from (Load(batch("a").inst), Drop(event.request.id))

    script = Script(answers)
    Stage(monkeypatch, mem_bytes=WEIGHTS + 9_999).run(script, jobs((1.0, "a", 2)))
    (refusal,) = script.told(Done)
    assert (refusal.failed, refusal.why) == ("never", "a takes 15000 bytes, GPU 0 has 14999")


# ------------------------------------------------------------------ what it says of itself


def test_a_run_says_what_its_client_saw_and_whether_it_measured_its_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    stage = Stage(monkeypatch)
    engine = stage.engine
    assert isinstance(engine, Observed)
    try:
        replay(Script(routed("a"), {Woke}), engine, jobs((1.0, "a", 6), (1.1, "b", 2)), end_s=3.0)
        rows, about = list(engine.rows()), engine.about()
        record.write(tmp_path / "run", rows, about, side=engine.side(), files=engine.files())
    finally:
        engine.close()
    seen = pq.read_table(tmp_path / "run" / CLIENT).to_pylist()
    assert [one["write_ns"] for one in seen] == [1001 * MS, None]
    assert seen[0]["chunk_ns"] == [1051 * MS, 1061 * MS, 1071 * MS, 1081 * MS, 1091 * MS]
    assert seen[0]["chunk_tokens"] == [2, 1, 1, 1, 1]
    assert (tmp_path / "run" / "server-000-a.log").read_text() == "it starts\n"
    worth = record.meta(tmp_path / "run")["verdict"]
    assert worth["lag_p99_s"] == pytest.approx(0.001)
    assert worth["valid"] == (not worth["reasons"])
