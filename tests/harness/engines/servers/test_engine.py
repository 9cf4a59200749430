"""The engine of real servers: its books, servers that come and go, memory, in a world whose clock the tests turn."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.client.client import Told
from harness.engines import wallclock
from harness.engines.machine import Config, Served
from harness.engines.servers import engine as module
from harness.engines.servers import fleet
from harness.engines.servers.engine import CLIENT
from harness.loop.engine import Observed
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Freed, Prefilled, Woke
from harness.policy.types import UserError
from harness.policy.view import View
from harness.rows import record
from tests.cases import cases
from tests.harness.engines.servers import staged
from tests.harness.engines.servers.staged import (
    MS,
    START,
    WEIGHTS,
    Process,
    Script,
    Sender,
    Small,
    Stage,
    at,
    batch,
    jobs,
    on_demand,
    routed,
    waits,
)
from tests.harness.loop.scripted import Policy
from workloads.models import shape

# ------------------------------------------------------------------ books


def test_a_routed_request_leaves_at_its_time_and_its_books_are_the_clients(stage: Stage) -> None:
    _, (row,) = stage.run(Script(routed("a"), START), jobs((1.0, "a", 6)))
    assert (row["state"], row["fidelity"], row["gpus"], row["made_tokens"]) == ("done", "real", "0", 6)
    assert waits(row) == {"host": 1.0, "compute": 90.0}  # the lag; a prefill of 50 ms, and four steps of 10
    stamps = [row[f"{name}_ns"] for name in ("arrival", "admit", "first", "done")]
    assert stamps == [1000 * MS, 1000 * MS, 1051 * MS, 1091 * MS]
    assert row["first_tokens"] == 2  # so that TPOT is 40 ms over the 4 tokens behind the first chunk
    assert row["token_ns"] == [51 * MS, 51 * MS, 61 * MS, 71 * MS, 81 * MS, 91 * MS]
    assert stage.engine.stats()["loads"] == 0  # what is up at the start is free


def test_a_request_waits_for_its_server_and_its_model_is_loaded_once(stage: Stage) -> None:
    script = Script(on_demand)
    _, rows = stage.run(script, jobs((1.0, "a", 2), (1.2, "a", 2)))
    assert [waits(row) for row in rows] == [
        {"load": 500.0, "host": 1.0, "compute": 50.0},
        {"load": 300.0, "host": 1.0, "compute": 50.0},
    ]
    assert len(stage.kind.seats) == 1
    assert [done.failed for done in script.events(Done)] == [None, None]  # each Load is told
    assert stage.engine.stats()["loads"] == 1.0


def test_a_request_that_nobody_admits_is_held_and_one_without_a_lane_waits_its_turn(stage: Stage) -> None:
    script = Script(at({0.0: [Load(batch("a").inst)], 1.3: [Admit(0, batch("a"))], 1.7: [Run(batch("a"))]}))
    _, (row,) = stage.run(script, jobs((1.0, "a", 2)))
    assert waits(row) == {"admission": 300.0, "queue": 400.0, "host": 1.0, "compute": 50.0}


def test_what_is_under_way_at_the_end_is_unfinished_and_later_tokens_are_none_of_the_runs(stage: Stage) -> None:
    _, (row, other) = stage.run(Script(routed("a"), START), jobs((1.0, "a", 50), (5.0, "a", 2)), end_s=1.2)
    assert (row["state"], other["state"]) == ("unfinished", "unfinished")
    assert row["made_tokens"] == 2 + 14  # a step ends every 10 ms from 1.051 s
    assert (row["done_ns"], other["first_ns"]) == (None, None)
    assert waits(row) == {"host": 1.0, "compute": 199.0}


def test_a_dropped_request_ends_so_wherever_it_is(stage: Stage) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a")(event, view)
        match event:
            case Arrived(request) if request.model == "b":
                yield Drop(request.id)  # never sent
            case Prefilled(0, _):
                yield Drop(0)  # at its server

    script = Script(answers)
    _, rows = stage.run(script, jobs((1.0, "a", 50), (1.1, "b", 2)))
    assert [row["state"] for row in rows] == ["dropped", "dropped"]
    assert [(end.rid, end.state) for end in script.events(Finished)] == [(0, "dropped")]  # the last end is the run's


def test_fewer_tokens_than_asked_for_is_a_failure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(routed("a"), frozenset({Woke, Finished}))
    monkeypatch.setattr(
        Sender, "end", lambda self, rid, state, kind, why="": self.told.append(Told(kind, rid, self.world.now_ns, 1))
    )
    _, rows = stage.run(script, jobs((1.0, "a", 2), (2.0, "a", 1)))
    assert [row["state"] for row in rows] == ["failed", "done"]
    assert script.events(Finished)[0].state == "failed"
    assert stage.engine.errors == {0: "ended after 1 of 2 tokens: the server ignores ignore_eos"}


def test_a_request_leaves_its_batch_without_a_look_at_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 3,000 requests a second thousands are in flight: to compare them all at each end is what falls behind."""

    def compared(*_: object) -> bool:
        raise AssertionError("a request was compared with another")

    monkeypatch.setattr(wallclock.Live, "__eq__", compared)
    _, rows = stage.run(Script(routed("a"), START), jobs(*((1.0 + 0.001 * k, "a", 3) for k in range(20))))
    assert {row["state"] for row in rows} == {"done"}


def test_a_run_that_falls_behind_its_client_ends_and_is_invalid(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND_S", -1e9)  # so that every event is late
    _, rows = stage.run(Script(routed("a"), START), jobs((1.0, "a", 50), (5.0, "a", 2)))
    assert {row["state"] for row in rows} == {"unfinished"}
    judged = stage.engine.about()["verdict"]
    assert not judged["valid"]
    assert "s behind its client's events: it is the limit, not the servers" in judged["text"]


# ------------------------------------------------------------------ servers that come and go


def swapped(event: Event, _: View) -> Iterable[Action]:
    """Serve one model at a time: whoever is asked for comes, the other leaves."""
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
    assert waits(a) == {"host": 1.0, "compute": 130.0}  # until 1.131 s
    assert waits(b) == {"load": 131.0 - 10.0 + 100.0 + 500.0, "host": 1.0, "compute": 50.0}
    assert (a["state"], b["state"]) == ("done", "done")
    assert outcome.refused == 2  # an eviction of what is out, a load that stood
    assert [stage.engine.stats()[name] for name in ("loads", "evicts", "faults")] == [1.0, 1.0, 0.0]
    assert [(inst.model, kv) for inst, kv, _ in stage.kind.seats] == [("a", 20_000), ("b", 20_000)]


def test_a_request_that_left_before_the_client_heard_of_the_end_of_its_route_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, stage = batch("a"), Stage(monkeypatch, deaf_ns=40 * MS)
    script = Script(at({0.0: [Load(a.inst), Run(a), Admit("a", a)], 1.0: [Evict(a.inst)], 2.0: [Load(a.inst)]}))
    _, (early, late) = stage.run(script, jobs((1.02, "a", 2), (1.5, "a", 2)))
    assert (early["state"], late["state"]) == ("done", "done")
    assert waits(early) == {"host": 1.0, "compute": 50.0}
    assert waits(late) == {"load": 1000.0, "host": 1.0, "compute": 50.0}  # until the next server is up, at 2.5 s
    assert stage.sender is not None
    assert [rid for rid, _ in stage.sender.sent] == [0, 1]  # nobody is sent twice


def test_the_requests_of_a_server_that_dies_fail_with_the_reason_until_it_is_loaded_again(
    stage: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
    assert "compute" not in waits(rows[1])  # it never ran
    (tmp_path / CLIENT).write_bytes(b"".join(stage.engine.files()[CLIENT]))
    assert pq.read_table(tmp_path / CLIENT)["error"].to_pylist() == [why, why, "", ""]


def test_a_server_that_never_answers_is_a_refusal_and_who_waits_for_it_fails(stage: Stage) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a")(event, view)
        if isinstance(event, Arrived) and event.request.model == "b":
            yield from (Load(batch("b").inst), Run(batch("b")), Admit(event.request.id, batch("b")))

    script = Script(answers)
    stage.never_ready.add("b")
    _, rows = stage.run(script, jobs((1.0, "b", 2), (1.1, "a", 2)))
    assert [row["state"] for row in rows] == ["failed", "done"]
    assert waits(rows[0]) == {"load": 500.0}
    (refusal,) = (done for done in script.events(Done) if done.failed)
    assert (refusal.failed, refusal.why) == ("never", "server b ended before it was ready")


@cases(("taken", "state"), [(2, "done"), (3, "failed")])
def test_a_server_whose_port_is_taken_starts_on_another_twice(
    taken: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch)
    stage.taken = taken
    _, (row,) = stage.run(Script(on_demand), jobs((1.0, "a", 2)))
    assert (row["state"], len(stage.kind.seats)) == (state, 3)
    assert waits(row)["load"] == 1500.0
    assert stage.engine.side()["faults"] == ([] if state == "done" else ["its port is taken"])


def test_a_server_of_the_start_that_never_answers_is_told_before_the_clock_runs(stage: Stage) -> None:
    stage.never_ready.add("b")
    with pytest.raises(UserError, match="server b ended before it was ready"):
        stage.run(Script(routed("a", "b")), jobs((1.0, "a", 2)))
    assert all(process.stopped for _, _, process in stage.kind.seats)


# ------------------------------------------------------------------ memory


def test_servers_of_the_start_have_the_kv_memory_of_limits_said_after_their_loads(stage: Stage) -> None:
    def answers(event: Event, view: View) -> Iterable[Action]:
        yield from routed("a", "b", "c")(event, view)
        if event == Woke("start"):
            yield from (Limit("a", 0, 14_500), Limit("b", 0, 40_000))
        if isinstance(event, Arrived):
            yield from (Limit("a", 0, 14_999), Limit("a", 0, 15_000), Limit("a", 0, 999))

    script = Script(answers)
    stage.run(script, jobs((1.0, "a", 2)))
    sizes = {inst.model: kv for inst, kv, _ in stage.kind.seats}
    assert sizes == {"a": 14_000, "b": 40_000, "c": 20_000}  # whole pages; c as many longest requests as it has slots
    why = [(done.action.kv_bytes, done.failed, done.why) for done in script.events(Done) if done.failed]
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
        yield from on_demand(event, view)
        yield from at({0.0: [Load(batch("a").inst)], 2.0: [Evict(batch("a").inst)]})(event, view)

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
    (refusal,) = script.events(Done)
    assert (refusal.failed, refusal.why) == ("never", "a takes 15000 bytes, GPU 0 has 14999")


# ------------------------------------------------------------------ what it says of itself


def test_a_run_says_what_its_client_saw_and_whether_it_measured_its_servers(stage: Stage, tmp_path: Path) -> None:
    engine = stage.engine
    assert isinstance(engine, Observed)
    try:
        replay(Script(routed("a"), START), engine, jobs((1.0, "a", 6), (1.1, "b", 2)), end_s=3.0)
        rows, about = list(engine.rows()), engine.about()
        record.write(tmp_path / "run", rows, about, side=engine.side(), files=engine.files())
    finally:
        engine.close()
    seen = pq.read_table(tmp_path / "run" / CLIENT).to_pylist()
    assert [row["write_ns"] for row in seen] == [1001 * MS, None]
    assert seen[0]["chunk_ns"] == [1051 * MS, 1061 * MS, 1071 * MS, 1081 * MS, 1091 * MS]
    assert seen[0]["chunk_tokens"] == [2, 1, 1, 1, 1]
    assert (tmp_path / "run" / "server-a-gpu0.log").read_text() == "it starts\n"
    worth = record.meta(tmp_path / "run")["verdict"]
    assert worth["lag_p99_s"] == pytest.approx(0.001)
    assert worth["valid"] == (not worth["reasons"])


# ------------------------------------------------------------------ cards


def test_a_part_of_the_sms_is_taken_at_the_start_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Small, "can", Small.can | {"Run.sms"})
    refused: list[str] = []

    def answers(event: Event, view: View) -> Iterable[Action]:
        match event:
            case Woke("start"):
                yield from (Load(batch("a").inst), Run(batch("a"), sms=1), Wake(1.0, "again"), Wake(2.0, "other"))
            case Woke("again"):
                assert view.lane(batch("a"), "mixed") == Run(batch("a"), sms=1)
                yield Run(batch("a"), sms=1)
            case Woke("other"):
                yield from (Run(batch("a")), Run(batch("b"), sms=2))
            case Done(Run(), _, why):
                refused.append(why)

    stage = Stage(monkeypatch)
    stage.run(Policy(answers), jobs((3.0, "a", 2)), end_s=4.0)
    assert stage.kind.sms == [1]
    assert refused == ["small takes its part of the SMs when it starts", "GPU 0 has 1 SMs, not 2"]


def test_elastic_memory_is_limited_while_a_server_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = list[tuple[str, int]]()
    monkeypatch.setattr(Small, "elastic", True)
    monkeypatch.setattr(Small, "resize", lambda self, inst, kv_bytes: told.append((inst.model, kv_bytes)))

    def answers(event: Event, view: View) -> Iterable[Action]:
        match event:
            case Woke("start"):
                yield from (Load(batch("a").inst), Load(batch("b").inst), Limit("a", 0, 20_000), Limit("b", 0, 20_000))
                yield from (Run(batch("a")), Run(batch("b")), Wake(1.0, "less"))
            case Woke("less"):
                assert view.free_bytes(0) == 25_000  # of 35,000 beside weights: KV takes nothing yet
                assert view.kv("a", 0).limit_bytes == 20_000
                yield Limit("a", 0, 7_500)

    stage = Stage(monkeypatch, mem_bytes=2 * WEIGHTS + 25_000)
    outcome, _ = stage.run(Policy(answers), jobs((2.0, "a", 2)))
    assert outcome.refused == 0
    assert [kv_bytes for model, kv_bytes in told if model == "a"][-1] == 7000  # whole pages
    assert {kv_bytes for model, kv_bytes in told if model == "b"} == {20_000}


@cases(
    ("apart", "order"),
    [(True, ["start 0", "ready 0", "start 1", "ready 1"]), (False, ["start 0", "start 1", "ready 0", "ready 1"])],
)
def test_servers_that_measure_their_gpu_start_one_after_the_other(
    apart: bool, order: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, both = list[str](), threading.Event()

    class Noted(Process):
        """A server's process that notes its start, and when it is asked to be ready."""

        def start(self) -> None:
            self.number = sum(line.startswith("start") for line in log)
            log.append(f"start {self.number}")
            if self.number == 1:
                both.set()

        def wait_ready(self, timeout_s: float) -> None:
            assert apart or both.wait(timeout_s)
            log.append(f"ready {self.number}")

    monkeypatch.setattr(staged, "Process", Noted)
    kind = Small(Config(tuple(Served(m, shape("llama-3.2-1b")) for m in "ab")), 100_000)
    kind.apart = apart
    servers = fleet.Fleet(kind)
    servers.open(tmp_path)
    ups = [servers.load(Load(batch(model).inst), 10_000) for model in "ab"]
    for up in ups:
        servers.start(up)
    for thread in servers._threads:
        thread.join()
    assert (log if apart else [*log[:2], *sorted(log[2:])]) == order
    servers.close()


def test_a_server_that_waits_for_its_turn_does_not_start_once_the_fleet_closes(tmp_path: Path) -> None:
    kind = Small(Config(tuple(Served(m, shape("llama-3.2-1b")) for m in "a")), 100_000)
    kind.apart = True
    servers = fleet.Fleet(kind)
    servers.open(tmp_path)
    servers._closing = True
    servers.start(servers.load(Load(batch("a").inst), 10_000))
    servers._threads[0].join()
    assert not hasattr(kind.seats[0][2], "wait_ready")  # it would have been called
    servers.close()
