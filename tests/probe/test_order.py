"""The order of a card's time: its page, its commands, and calls that end, are cut off and go on. No card."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import groupby, product
from pathlib import Path

import pytest

from harness.cli.app import load
from probe import conduct, order
from probe.order import STEPS, Step
from tests.cases import cases


def test_the_page_has_the_steps() -> None:
    page = (order.ROOT / "probe/ORDER.md").read_text("utf-8")
    shown = re.findall(r"^(?:## |\| (?!step |--- )).*$", page, re.MULTILINE)
    want = []
    for call, steps_of in groupby(STEPS, lambda step: step.call):
        mine = list(steps_of)
        stay = sum(step.limit_s for step in mine if step.needed)
        assert stay <= 560
        want.append(f"## Call {call}: {stay} s of steps that stay")
        want += [f"| {x.name} | {x.limit_s} | {x.result}{'' if x.needed else '; dropped first'} |" for x in mine]
    assert shown == want
    assert len({step.name for step in STEPS}) == len(STEPS)


@cases(
    ("step", "device"), product([step for step in STEPS if "-m harness " in step.command and step.dry], ("cpu", "cuda"))
)
def test_every_command_is_one_that_our_command_line_takes(
    step: Step, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "card", lambda: "h200")
    words = order.command(step, Path("/out"), device)
    name, *rest = words[words.index("harness") + 1 :]
    params = load(name).make_context(name, rest).params
    assert params["engine"].partition("+")[0] in ({"sim"} if device == "cpu" else {"vllm", "sglang", "torch"})
    assert params["gpu"] == ("h100" if device == "cpu" else "h200")
    assert str(params["out"]).startswith("/out/")


def steps() -> list[Step]:
    """Return three steps: one that ends well, one that fails, one that is late."""
    run = "{python} -c "
    return [
        Step("well", 1, 60, f"{run}open('{{out}}/well','a').write('x')", ""),
        Step("badly", 1, 60, f"{run}raise(SystemExit(3))", ""),
        Step("late", 1, 1, f"{run}__import__('time').sleep(600)", ""),
        Step("servers", 1, 60, f"{run}0", "", dry=False),
    ]


def test_a_call_ends_whatever_a_step_does_and_a_second_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "LEAST_S", 0.5)
    first = list(order.run(steps(), tmp_path, 100.0, "cpu"))
    ends = [(line["step"], line["state"]) for line in first]
    assert ends == [("well", "done"), ("badly", "failed"), ("late", "late")]
    assert order.done(tmp_path) == {"well"}
    again = list(order.run(steps()[:2], tmp_path, 100.0, "cpu"))
    assert [line["step"] for line in again] == ["badly"]
    assert (tmp_path / "well").read_text() == "x"
    assert [line["step"] for line in conduct.lines(tmp_path / order.JOURNAL)] == ["well", "badly", "late", "badly"]
    assert list(order.run(steps(), tmp_path, 0.0, "cpu")) == []  # no time is left


def test_the_card_is_named_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert order.card() == "h100"


def test_what_is_next_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert order.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("next: rows 0 to 7 (200 s): ")
    every = "".join(json.dumps({"step": step.name, "state": "done"}) + "\n" for step in STEPS)
    (tmp_path / order.JOURNAL).write_text(every)
    assert order.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "all steps are done\n"


@pytest.mark.slow
def test_the_campaign_runs_to_its_end_without_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(order, "STEPS", [step._replace(limit_s=600) for step in STEPS])
    lines = list(order.run([step for step in order.STEPS if step.call == 2], tmp_path, 3600.0, "cpu"))
    assert {line["step"]: line["state"] for line in lines} == dict.fromkeys(
        [step.name for step in STEPS if step.call == 2 and step.dry], "done"
    )
    rows = list((tmp_path / "campaign").glob("*/requests.parquet"))
    assert {path.parent.name.rpartition("-")[0] for path in rows} == {"static", "elastic", "swap"}
