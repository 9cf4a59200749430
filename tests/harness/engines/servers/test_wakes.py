"""Servers whose wakes fail: who is told what, and what comes of the requests that waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import ok
from tests.harness.engines.servers import stubbed
from tests.harness.engines.servers.test_stub import ONCE, QUICK, swapped

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
