"""Servers timed from outside: in a world where a known table makes every stamp, then against a stub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.calibrate import servers, steps
from harness.calibrate.rows import HOST, RAW, Measurement, read
from harness.client.body import OPENAI, Server
from harness.client.log import DONE, Log
from harness.engines import commands
from harness.engines.costs import quantities
from harness.engines.servers import timed
from harness.engines.servers.fleet import Seat, Sleep
from harness.engines.servers.process import Process, free_port
from harness.engines.servers.timed import Rig, Subject, Wanted
from harness.policy.types import Inst, UserError
from tests import ROOT
from tests.bench import ok
from tests.cases import cases
from tests.harness.calibrate.test_fit_whole import API_S, AREA_S, CTX_S, SEQ_S, Known

KNOWN, SHARE = Known(1.0), 0.6
SERVERS = [Inst(f"m/{k}", (0,)) for k in (1, 2, 3, 4)]
ABOUT = {"host": "here"}


def seat(inst: Inst, log: Path) -> Seat:
    return Seat(Server("http://127.0.0.1:1", inst.model), None)


def subject(**changed: Any) -> Subject:
    return Subject({"m": SERVERS}, seat, lambda: (), OPENAI, 4, 1000, ABOUT)._replace(**changed)


def stamped(self: Rig, sizes: Sequence[tuple[int, int]], insts: Sequence[Inst], rounds: int) -> Log:
    """Log servers whose steps take what KNOWN says: all prompts of a round at once, then steps of all streams."""
    n, slow = len(sizes), max(1.0, SHARE * len(insts))
    prompt, output = np.array(sizes).T
    write_ns, at = np.empty(n, np.int64), 10**9
    chunks: list[list[int]] = [[] for _ in range(n)]
    for batch in np.split(np.arange(n), rounds):
        mine = batch[:: len(insts)]
        write_ns[batch] = at
        now_s = API_S + slow * KNOWN.step_s(0, 0, int(prompt[mine[0]]))
        for made in range(int(output[mine[0]])):
            if made:
                now_s += slow * KNOWN.step_s(len(mine), float((prompt[mine] + made).sum()))
            for rid in batch:
                chunks[rid].append(at + round(1e9 * now_s))
        at += 10**10
    offsets = np.concatenate([[0], np.cumsum([len(stamps) for stamps in chunks])])
    none = np.full(n, -1, np.int64)
    every = np.array([ns for stamps in chunks for ns in stamps], np.int64)
    return Log(
        none, none, write_ns, none, none, none, np.full(n, 200, np.int16), np.full(n, DONE, np.int8), [""] * n,
        output, none, none, offsets, every, np.ones(len(every), np.int32),
        np.zeros(len(every), bool), True, 0.0, 0.0, 0,
    )  # fmt: skip


class Quiet:
    """The load of other processes, as a test says it."""

    def __init__(self, cores: Callable[[], float] = lambda: 0.0) -> None:
        self._cores = cores

    def __call__(self, pids: Sequence[int]) -> Quiet:
        return self

    def cores(self) -> float:
        return self._cores()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "_log", stamped)
    monkeypatch.setattr(timed, "OtherLoad", Quiet())


def rows_of(
    folder: Path, say: Callable[[str], None] = lambda _: None, **changed: Any
) -> tuple[list[Measurement], list[servers.Gap]]:
    with Rig(subject(**changed), folder) as rig:
        return servers.timed(rig, folder, say, timed.ROUNDS)


def profiled(folder: Path, **changed: Any) -> tuple[list[Measurement], list[str]]:
    notes = list[str]()
    return rows_of(folder, notes.append, **changed)[0], notes


def tabled(lines: Sequence[Measurement]) -> tuple[dict[str, Any], steps.Fitted]:
    spec = dict.fromkeys(quantities.GpuSpec._fields[2:], (1.0, "by hand"))
    return steps.table(lines, steps.About("desk", "a desk", "by hand", {}, spec, ["host"], {}))


def test_what_is_measured_of_a_known_table_gives_it_back(tmp_path: Path) -> None:
    lines, _ = profiled(tmp_path)
    file, fitted = tabled(lines)
    q = file["steps"]["m"]
    assert q["seconds"] == pytest.approx([KNOWN.seconds(m) for m in q["tokens"]], rel=1e-3)
    assert (q["seq_s"], q["ctx_s"], q["area_s"]) == pytest.approx((SEQ_S, CTX_S, AREA_S), rel=1e-2)
    assert file["host"]["api_in_s"] == pytest.approx(API_S, rel=1e-2)
    for beside in file["co_run"].values():
        assert beside["share"] == pytest.approx(SHARE, rel=0.05)  # first tokens also wait for the API
    assert file["ladder"]["host"]["fixed_s"] == 0.0  # they ran already
    assert {row.quantity for row, _ in fitted.points} == {"prefill", "decode"}
    assert q["held"]["p95"] < 1e-3


def test_a_second_call_measures_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = list[Wanted](), Rig._take

    def take(self: Rig, step: Wanted) -> Any:
        if len(taken) == 7:
            raise KeyboardInterrupt
        taken.append(step)
        return real(self, step)

    monkeypatch.setattr(Rig, "_take", take)
    with pytest.raises(KeyboardInterrupt):
        profiled(tmp_path)

    def on(self: Rig, step: Wanted) -> Any:
        taken.append(step)
        return real(self, step)

    monkeypatch.setattr(Rig, "_take", on)
    lines, notes = profiled(tmp_path)
    made = [
        (step.text, step.source) for step in taken if step.quantity not in {"start", "stop"}
    ]  # of servers that run there is none
    assert len(made) == len(set(made)) == len(lines) == len(timed.plan(subject())) - 2 * timed.ROUNDS
    assert notes[0].startswith("5 of ")
    before = (tmp_path / RAW).read_bytes()
    taken.clear()
    assert profiled(tmp_path)[0] == lines
    assert {step.quantity for step in taken} == {"start", "stop"}
    assert (tmp_path / RAW).read_bytes() == before


@cases(("loads", "tries", "kept"), [((0.1,), 1, 0.1), ((0.9, 0.1), 2, 0.1), ((0.9, 0.4, 0.7), 3, 0.4)])
def test_what_others_disturbed_is_measured_again_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: tuple[float, ...], tries: int, kept: float
) -> None:
    left = list(loads)
    monkeypatch.setattr(timed, "OtherLoad", Quiet(lambda: left.pop(0)))
    line = Rig(subject(), tmp_path).measured(Wanted("prefill", {"shape": "m", "tokens": 8, "held": False}))
    assert (line.facts["tries"], line.facts["other_cores"], left) == (tries, kept, [])
    assert len(line.seconds) == timed.REPEATS
    assert line.seconds == pytest.approx([API_S + KNOWN.step_s(0, 0, 8)] * timed.REPEATS, abs=1e-8)


def hidden(monkeypatch: pytest.MonkeyPatch, hides: Callable[[int, int], bool]) -> None:
    """Let no step be seen of so many servers with so many requests each."""
    real = Rig._decodes

    def decodes(self: Rig, insts: Sequence[Inst], seqs: int, ctx: int) -> tuple[list[float], float]:
        if hides(len(insts), seqs):
            raise timed.Unseen("nothing came")
        return real(self, insts, seqs, ctx)

    monkeypatch.setattr(Rig, "_decodes", decodes)


def test_a_cell_that_shows_nothing_is_left_out_and_the_table_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden(monkeypatch, lambda servers, seqs: (servers, seqs) == (4, 1))
    notes = list[str]()
    lines, gaps = rows_of(tmp_path, notes.append)
    assert [(gap.wanted.quantity, gap.wanted.at["servers"], gap.why) for gap in gaps] == [
        ("beside", 4, "nothing came")
    ] * timed.ROUNDS
    assert sum("left out: nothing came" in line for line in notes) == timed.ROUNDS
    file, _ = tabled(lines)
    assert file["co_run"]["decode"]["share"] == pytest.approx(SHARE, rel=0.05)
    told, again = servers.lacking(lines, gaps)
    assert told.startswith("left out 3 x: beside shape m, servers 4, seqs 1, ctx 19: nothing came; no round has it")
    assert "again measures" in again
    assert servers.lacking(lines, []) == []
    monkeypatch.undo()  # a second call measures what was left out
    monkeypatch.setattr(Rig, "_log", stamped)
    monkeypatch.setattr(timed, "OtherLoad", Quiet())
    more, none = rows_of(tmp_path, notes.append)
    assert (len(more) - len(lines), none) == (timed.ROUNDS, [])


def test_a_cell_that_one_round_has_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([True] * timed.TRIES)
    hidden(monkeypatch, lambda servers, seqs: (servers, seqs) == (1, 2) and next(turns, False))
    lines, gaps = rows_of(tmp_path)
    assert [gap.wanted.source for gap in gaps] == ["round 1"]
    assert "other rounds have it" in servers.lacking(lines, gaps)[0]


def test_without_any_decode_step_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden(monkeypatch, lambda servers, seqs: True)
    lines, gaps = rows_of(tmp_path)
    assert gaps
    with pytest.raises(UserError, match=r"\d+ measured steps do not tell \d+ numbers apart"):
        tabled(lines)


def test_requests_one_after_the_other_show_no_step_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def restamp(change: Callable[[Any], Any]) -> None:
        def log(*given: Any) -> Log:
            made = stamped(*given)
            return made._replace(chunk_ns=change(made.chunk_ns))

        monkeypatch.setattr(Rig, "_log", log)

    rig = Rig(subject(), tmp_path)
    restamp(lambda ns: ns + np.arange(len(ns)) // timed.STEPS * 10**12)
    rig._decodes(SERVERS[:1], 1, 8)
    for count, seqs, says in ((4, 1, "4 servers with a request each"), (1, 3, "3 requests of a server were never")):
        with pytest.raises(timed.Unseen, match=says):
            rig._decodes(SERVERS[:count], seqs, 8)
    restamp(np.zeros_like)
    with pytest.raises(timed.Unseen, match="all tokens of its request came at once"):
        rig._decodes(SERVERS[:1], 1, 8)


def test_another_machine_is_refused(tmp_path: Path) -> None:
    profiled(tmp_path)
    with pytest.raises(UserError, match=rf"{HOST}: measured with host 'here', here it is 'there'"):
        profiled(tmp_path, about={"host": "there"})


def test_the_plan_stays_within_what_servers_take() -> None:
    for slots, most in ((1, 64), (4, 1000), (64, 8191)):
        probes = timed.plan(subject(slots=slots, most=most))
        assert len({step.text for step in probes}) == len(probes)
        numbers = [{name: value for name, value in step.at.items() if isinstance(value, int)} for step in probes]
        assert max(at.get("tokens", 0) for at in numbers) == most
        assert all(at.get("ctx", 0) + timed.STEPS <= most + 1 for at in numbers)
        assert max(at.get("seqs", 0) for at in numbers) <= slots
        assert any(step.at.get("held") for step in probes)


# ------------------------------------------------------------------ against a server


@pytest.fixture
def stub() -> Iterator[str]:
    """Yield the URL of a stub that serves two of a model, each on a GPU of its own."""
    models = ",".join(f"llama-tiny/{k}" for k in (1, 2, 3, 4))
    words = f"-m tests.harness.engines.servers.stub --models {models} --ttft-ms 20 --itl-ms 4 --with-parent".split()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as running:
        assert running.stdout is not None
        yield running.stdout.readline().rpartition(" ")[2].strip()
        running.send_signal(signal.SIGTERM)


@pytest.mark.full
def test_a_stub_is_calibrated_from_start_to_table(tmp_path: Path, stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a real client
    monkeypatch.setattr(timed, "OtherLoad", Quiet())
    monkeypatch.setattr(timed, "PROMPTS", (1, 2, 3, 8, 64))
    monkeypatch.setattr(timed, "SEQS", (1, 2))
    monkeypatch.setattr(timed, "REPEATS", 2)
    monkeypatch.setattr(steps, "KNOTS", (1,))
    text = ok("calibrate", f"attach+urls={stub}", "--models", "llama-tiny", "--slots", "2", "-o", tmp_path)
    machine = quantities.machine(str(tmp_path / "attach-h100.toml"))
    assert machine is not None
    assert machine.settings["batch_cap"] == 2
    lines = read(tmp_path / RAW)
    # no server is faster than it is: a token comes when it is due, or later
    assert min(row.seconds for row in lines if row.quantity == "prefill") >= 0.020
    for row in lines:
        if row.quantity == "decode":
            at = row.at
            assert at["seqs"] * (at["ctx"] + 1) <= row.facts["ctx_tokens"] <= at["seqs"] * (at["ctx"] + timed.STEPS)
    drawn = (tmp_path / "calibrate.csv").read_text().splitlines()
    assert sum(not line.startswith("#") for line in drawn) == 1 + sum(row.quantity in steps.PHASES for row in lines)
    assert "a step of decode asks for" in text


def test_a_server_that_obeys_is_put_to_sleep_and_woken(tmp_path: Path) -> None:
    ports = list[int]()

    def stub_seat(inst: Inst, log: Path) -> Seat:
        ports.append(free_port())
        words = f"--models m --ttft-ms 1 --sleep-ms 30 --wake-ms 50 --with-parent --port {ports[-1]}"
        command = [sys.executable, "-m", "tests.harness.engines.servers.stub", *words.split()]
        url = f"http://127.0.0.1:{ports[-1]}"
        process = Process(command, os.environ | {"PYTHONPATH": str(ROOT)}, log, f"{url}/health")
        return Seat(Server(url, "m"), process)

    nap = Sleep((commands.vllm_sleep(1),), commands.vllm_wake(1))
    with Rig(subject(seat=stub_seat, sleeps={"sleep": nap}), tmp_path) as rig:
        taken = {what: rig.measured(Wanted(what, {"shape": "m", "way": "sleep"})) for what in ("sleep", "wake")}
    assert len(ports) == 1  # one server takes all orders
    for what, least_s in (("sleep", 0.030), ("wake", 0.050)):
        assert taken[what].seconds[0] >= least_s


def test_others_may_take_as_many_cores_as_in_a_runs_verdict() -> None:
    assert servers.MOST_OTHERS == timed.MOST_OTHERS
    assert max(timed.BESIDE) == servers.SIDE_BY_SIDE
