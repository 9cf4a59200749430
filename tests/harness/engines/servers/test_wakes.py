"""Servers that sleep: which requests woke those that do so when idle, what that took; and wakes that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.answers import explain
from harness.client.log import DONE, SENT, Book, Log, assemble
from harness.engines import llamacpp
from harness.engines.commands import LLAMACPP_WAKES
from harness.engines.servers import wakes
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Keep
from harness.loop.replay import replay
from harness.policy.types import Jobs, UserError
from harness.rows import scoring, tidy
from harness.run.resolve import resolve
from harness.run.spec import Spec
from tests.bench import ok
from tests.harness.engines.servers import stubbed
from tests.harness.engines.servers import test_started as test_servers_started
from tests.harness.engines.servers.staged import MS, START, Script, Stage, jobs, routed, waits
from tests.harness.engines.servers.test_stub import BOTH, ONCE, QUICK, config, swapped

S = 1_000_000_000


def log(*requests: tuple[float, float, float, float | None]) -> Log:
    """Return requests by seconds: written, first token, end (-1: none), and prompt by the server's own account."""
    book = Book(len(requests))
    for rid, (write_s, first_s, end_s, prompt_s) in enumerate(requests):
        book.write_ns[rid], book.state[rid] = round(write_s * S), SENT
        if first_s >= 0:
            book.chunks(rid, round(first_s * S), [1])
        if end_s >= 0:
            book.end_ns[rid], book.state[rid] = round(end_s * S), DONE
        if prompt_s is not None:
            book.prompt_ns[rid] = round(prompt_s * S)
    return assemble(book.columns(True, 0.1, 1.0, 1), [book.spill()])


def detected(of: Log, *stays: wakes.Stay, idle_s: float = 5.0) -> tuple[list[wakes.Wake], list[float]]:
    """Return wakes, and the seconds that each request waited for one."""
    woke, waited_s = wakes.find(of, stays, idle_s)
    return woke, [round(x, 9) for x in waited_s.tolist()]


def test_a_request_after_an_idle_time_wakes_its_server_and_waits_what_its_prompt_does_not_explain() -> None:
    requests = log((1.0, 1.1, 2.0, 0.1), (7.0, 7.1, 8.0, 0.1), (13.5, 14.0, 15.0, 0.1))
    woke, waited_s = detected(requests, wakes.Stay("a", 0.0, [0, 1, 2]))
    assert [(w.rid, w.model, round(w.seconds, 9)) for w in woke] == [(2, "a", 0.4)]  # 5 s and no more are no wake
    assert waited_s == [0.0, 0.0, 0.4]


def test_a_server_that_runs_or_was_ready_a_moment_ago_does_not_sleep_and_each_has_its_own_time() -> None:
    long = log((1.0, 1.1, 30.0, 0.1), (20.0, 20.1, 21.0, 0.1), (34.0, 34.1, 34.2, 0.1))
    assert detected(long, wakes.Stay("a", 0.0, [0, 1, 2]))[0] == []  # the first ends at 30 s
    assert detected(long, wakes.Stay("a", -4.5, [0]), wakes.Stay("b", 18.0, [1]), wakes.Stay("a", 31.0, [2])) == (
        [wakes.Wake(0, "a", 0.0)],
        [0.0, 0.0, 0.0],
    )
    endless = log((1.0, 1.1, -1, 0.1), (90.0, 90.1, 91.0, 0.1))
    assert detected(endless, wakes.Stay("a", 0.0, [0, 1]))[0] == []


def test_who_is_written_while_a_server_wakes_waits_for_the_rest_of_it() -> None:
    requests = log((10.0, 10.5, 12.0, 0.1), (10.3, 10.6, 12.0, 0.1), (10.5, 10.7, 12.0, 0.1))
    woke, waited_s = detected(requests, wakes.Stay("a", 0.0, [2, 0, 1]))
    assert [(w.rid, round(w.seconds, 9)) for w in woke] == [(0, 0.4)]
    assert waited_s == [0.4, 0.1, 0.0]


def test_without_the_servers_own_time_all_is_the_wakes_and_a_request_without_a_token_waits_to_its_end() -> None:
    requests = log((10.0, 10.5, 12.0, None), (20.0, -1, 23.0, None), (-1, -1, 40.0, None))
    woke, waited_s = detected(requests, wakes.Stay("a", 0.0, [0, 1, 2]))
    assert [w.seconds for w in woke] == [0.5, 3.0]
    assert waited_s == [0.5, 3.0, 0.0]


def keeping(monkeypatch: pytest.MonkeyPatch, lines: int) -> tuple[Stage, list[dict[str, Any]]]:
    """Return a staged run whose server sleeps after 400 ms; its log has so many lines of wakes."""
    stage = Stage(monkeypatch)
    stage.kind.keep = Keep(0.4, LLAMACPP_WAKES)
    seat = stage.kind.seat

    def logged(inst: Any, kv_bytes: int, path: Path, sms: int | None) -> Any:
        placed = seat(inst, kv_bytes, path, sms)
        path.write_text(f"srv {LLAMACPP_WAKES}\n" * lines)
        return placed

    monkeypatch.setattr(stage.kind, "seat", logged)
    work = jobs((0.1, "a", 2), (1.0, "a", 6), (1.3, "a", 2), (2.0, "a", 2))
    monkeypatch.setattr(stage.engine, "close", lambda: None)  # its logs are still to be read
    return stage, stage.run(Script(routed("a"), START), work)[1]


def test_wakes_are_no_loads_and_their_wait_is_charged_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, rows = keeping(monkeypatch, 2)
    assert [waits(row) for row in rows] == [
        {"host": 1.0, "compute": 50.0},
        {"host": 1.0, "load": 50.0, "compute": 40.0},  # nobody says how long the prompt took
        {"host": 1.0, "compute": 50.0},
        {"host": 1.0, "load": 50.0},
    ]
    stats = stage.engine.stats()
    assert (stats["loads"], stats["evicts"], stats["wakes"]) == (0.0, 0.0, 2.0)
    assert stats["wake_s"] == pytest.approx(0.1)
    about = stage.engine.about()
    assert about["wakes"]["by_model"] == {"a": 2}
    text = "server's own: 2 wakes after 0.4 s without a request, 0.05 s each (median; longest 0.05)"
    assert about["wakes"]["text"] == text
    assert list(explain.verdict({"wakes": about["wakes"]})) == [text]
    assert scoring.utilisation(stats)[tidy.WAKES] == 2.0
    Servers.close(stage.engine)


def test_a_log_that_tells_of_other_wakes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = keeping(monkeypatch, 3)
    assert stage.engine.about()["wakes"]["text"].endswith("; their logs tell of 3")
    Servers.close(stage.engine)


def test_servers_that_never_sleep_say_nothing_of_wakes(stage: Stage) -> None:
    stage.run(Script(routed("a"), START), jobs((1.0, "a", 2), (90.0, "a", 2)))
    assert "wakes" not in {**stage.engine.stats(), **stage.engine.about()}


def test_a_stub_that_sleeps_wakes_as_its_log_says() -> None:
    options = ("--ttft-ms", "20", "--itl-ms", "1", "--sleep-idle-s", "0.3", "--wake-ms", "150")
    kind = stubbed.Stubbed(config(), options)
    kind.keep = Keep(0.3, LLAMACPP_WAKES)
    kind.style = kind.style._replace(keep_alive=False, spare=0)
    at_s = np.array([0.0, 0.05, 3.0, 3.02, 3.1])
    model = np.array([0, 1, 0, 0, 1], np.int32)
    none, tokens = np.full(5, np.inf), np.full(5, 4, np.int32)
    engine = Servers(kind.config, kind)
    try:
        replay(Script(BOTH), engine, Jobs(("a", "b"), at_s, model, tokens, tokens, none, none))
        rows = [row for part in engine.rows() for row in part.to_pylist()]
        facts = engine.about()["wakes"]
    finally:
        engine.close()
    assert [row["state"] for row in rows] == ["done"] * 5
    assert {wake.rid for wake in engine.wakes} >= {2, 4}
    woken = {wake.rid: wake.seconds for wake in engine.wakes}
    assert min(woken[2], woken[4]) >= 0.149  # what the stub waits, but for its clock's millisecond
    assert rows[2]["load_ns"] >= 149 * MS
    assert rows[2]["load_ns"] + rows[2]["compute_ns"] + rows[2]["host_ns"] == rows[2]["done_ns"] - rows[2]["arrival_ns"]
    assert engine.stats()["wakes"] == len(engine.wakes)
    assert facts["logged"] >= 2
    assert ("their logs tell of" in facts["text"]) == (facts["logged"] != len(engine.wakes))


# ------------------------------------------------------------------ wakes that fail

REFUSES = """
from tests.harness.engines.servers import stubbed
from harness.engines.servers.engine import Servers

def make(config, options, machine):
    return Servers(config, stubbed.Stubbed(config, ("--ttft-ms", "3", "--itl-ms", "0"), sleeps=stubbed.NO_WAKE))
"""


def test_a_wake_that_fails_names_server_model_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The requests that waited for it fail with the reason; the model's next load starts a server anew."""
    engine, rows = swapped("sleep", options=QUICK, sleeps=stubbed.NO_WAKE)
    assert [row["state"] for row in rows] == ["done", "done", "failed", "failed", "done"]
    assert [span["what"] for span in engine.side()["servers"]].count("start") == 3
    why = "the server of {0} on GPU 0 did not wake: server {0}-gpu0 answers /wake_up?tags=weights with HTTP 400: "
    faults = engine.side()["faults"]
    assert [engine.errors[rid] for rid in (2, 3)] == faults
    for fault, model in zip(faults, "ab", strict=True):
        assert fault.startswith(why.format(model))
        assert "knows no tags" in fault.splitlines()[0]
        assert "its log ends with:" in fault
    assert capsys.readouterr().err.count("did not wake") == 2


def test_a_row_says_that_a_wake_failed(tmp_path: Path) -> None:
    (tmp_path / "refuses.py").write_text(REFUSES)
    words = "compare", "--systems", "swap+way=sleep+queue=fifo", "--engine", tmp_path / "refuses.py", "--models"
    output = ok(*words, "llama-3.2-1b*2", *ONCE, "--set", "window_s=4", "-o", tmp_path / "out")
    line = next(line for line in output.splitlines() if " requests failed: " in line)
    assert line.startswith("swap+queue=fifo+way=sleep: ")
    assert " on GPU 0 did not wake: server llama-3.2-1b" in line
    assert " answers /wake_up?tags=weights with HTTP 400: " in line


def test_llama_cpp_is_told_to_sleep_and_only_it_can_be() -> None:
    config, priced = test_servers_started.CONFIG, test_servers_started.PRICED
    kind = llamacpp.LlamaCpp(config, priced, llamacpp.Fields(keep_s=7))
    assert kind.keep == Keep(7.0, "server is exiting sleeping state")
    assert llamacpp.LlamaCpp(config, priced, llamacpp.Fields()).keep is None
    spec = Spec("static", engine="llamacpp+keep_s=7", models="llama-3.2-1b*2", trace="sample")
    never = resolve(replace(spec, engine="llamacpp+keep_s=0"))
    assert never == resolve(replace(spec, engine="llamacpp"))
    assert resolve(spec).hash8 != never.hash8
    with pytest.raises(UserError, match='sim has no field "keep_s"'):
        resolve(replace(spec, engine="sim+keep_s=7"))
