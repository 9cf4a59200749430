"""The conductor with fake probes: order, time boxes, faults, hangs, and going on. No GPU, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.calibrate import card
from harness.policy.types import UserError
from probe import __main__ as command
from probe import conduct
from probe.plan import PLAN, Plan, Probe
from tests import ROOT

FAKES = "tests.probe.fakes"
Play = Callable[..., list[dict[str, Any]]]
LONG, SHORT = 60.0, 0.05  # seconds; only a probe that never answers is given the short one


def fake(name: str, *, alone: bool = False, box_s: float = LONG, grace_s: float = LONG) -> Probe:
    return Probe(name, FAKES, box_s, "nothing", alone, grace_s)


def hanging(name: str = "hangs", *, alone: bool = False) -> Probe:
    return fake(name, alone=alone, box_s=SHORT, grace_s=SHORT)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Conduct fake probes in one folder; return the lines that this call added."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    raw = tmp_path / "fake-1" / conduct.RAW

    def run(*probes: Probe, minutes: float = 10, **more: Any) -> list[dict[str, Any]]:
        before = len(list(conduct.lines(raw)))
        plan = Plan(FAKES, probes)
        assert conduct.conduct(plan, tmp_path, minutes, **more) == tmp_path / "fake-1"
        return list(conduct.lines(raw))[before:]

    return run


def states(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["source"]: line["state"] for line in lines if "state" in line}


def test_a_sample_is_a_line(play: Play, tmp_path: Path) -> None:
    first = play(fake("good"))[0]
    want = {"source": "good", "quantity": "seconds", "at": {"i": 0}, "sms": 64, "facts": {"bytes": 8}, "call": 1}
    assert {key: first[key] for key in want} == want
    assert (first["n"], first["min"], first["seconds"], first["p95"]) == (3, 1.0, 2.0, pytest.approx(2.9))
    assert first["t"] > 0
    host = json.loads((tmp_path / "fake-1" / conduct.HOST).read_text())
    assert [(call["call"], call["name"]) for call in host["calls"]] == [(1, "NVIDIA Fake 1")]


def test_what_ends_badly_costs_itself_alone(play: Play) -> None:
    lines = play(fake("raises"), fake("crashes"), hanging(), fake("leaves"), fake("good"))
    assert states(lines) == {"raises": "raise", "crashes": "fault", "hangs": "hang", "leaves": "fault", "good": "done"}
    why = {line["source"]: line.get("why", "") for line in lines if "state" in line}
    assert why["raises"] == "ValueError: it cannot be"
    assert "killed by signal 9" in why["crashes"]
    assert why["leaves"] == "exit code 3: some library says why"
    kept = [line["source"] for line in lines if line.get("quantity") == "before"]
    assert kept == ["raises", "crashes", "hangs", "leaves"]  # what they measured before is not lost


def test_probes_that_may_fault_run_in_processes_of_their_own(play: Play) -> None:
    shared = play(fake("also"), fake("again"))
    assert len({line["value"] for line in shared if "quantity" in line}) == 1
    alone = play(fake("also", alone=True), fake("again", alone=True), hanging(alone=True), again=["also", "again"])
    assert len({line["value"] for line in alone if line.get("quantity") == "worker"}) == 2
    assert states(alone)["hangs"] == "hang"


def test_a_second_call_goes_on(play: Play) -> None:
    probes = (fake("good"), fake("raises"), fake("crashes"), hanging())
    assert play(*probes)
    assert states(play(*probes)) == {"raises": "raise"}  # the only one that may fare better
    assert states(play(*probes, again=["crashes"])) == {"raises": "raise", "crashes": "fault"}
    assert [line["at"] for line in play(*probes, only=["good"], again=["good"]) if "quantity" in line] == [
        {"i": i} for i in range(3)
    ]
    assert play(*probes, only=["good"]) == []


def test_a_time_box_ends_a_probe_and_the_next_call_starts_behind(play: Play) -> None:
    boxed = fake("endless", box_s=0.0)
    assert [states([line]) or line["at"]["i"] for line in play(boxed)] == [1, {"endless": "boxed"}]
    assert [line["at"]["i"] for line in play(boxed) if "quantity" in line] == [2]
    assert [line["at"]["i"] for line in play(boxed) if "quantity" in line] == [3]


def test_nothing_starts_when_the_minutes_are_over(play: Play) -> None:
    assert play(fake("good"), minutes=0) == []
    assert states(play(fake("good"))) == {"good": "done"}


def test_a_broken_context_is_not_the_next_probes_fault(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BROKEN", str(tmp_path / "broken"))
    assert states(play(fake("breaks"), fake("good"))) == {"breaks": "done", "good": "done"}


def test_a_line_that_a_kill_cut_off_is_nothing(play: Play, tmp_path: Path) -> None:
    play(fake("good"))
    raw = tmp_path / "fake-1" / conduct.RAW
    whole = raw.read_bytes().split(b"\n")
    raw.write_bytes(b"\n".join(whole[:1]) + b"\n" + whole[1][:20])
    lines = play(fake("good"))
    assert [line["at"]["i"] for line in lines if "quantity" in line] == [1, 2]
    assert all(line["call"] == 2 for line in lines)


def test_a_machine_without_a_gpu_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_NO_GPU", "torch 9 sees no CUDA device")
    monkeypatch.setattr(command, "PLAN", Plan(FAKES, (fake("good"),)))
    assert command.main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no GPU can be probed here: RuntimeError: torch 9 sees no CUDA device (")
    assert "make gpu PYTHON=" in error
    assert not list(tmp_path.iterdir())


def test_safe_probes_come_first() -> None:
    alone = [probe.alone for probe in PLAN.probes]
    assert alone == sorted(alone)
    assert len({probe.name for probe in PLAN.probes}) == len(PLAN.probes)


def test_rows_of_an_earlier_form_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"probe": "gemm", "what": "gemm", "params": {}, "p50": 1.0}\n')
    (tmp_path / "host.json").write_text('{"calls": [{"name": "x"}]}')
    assert command.main(["--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        f"error: {raw}: its rows are of an earlier version; move it away, and measure again\n"
    )
    with pytest.raises(UserError, match="move it away, and measure again"):
        card.table(tmp_path)
