"""`make gpu-servers`: what it would run, read by our own command line; and what of a study an engine runs. No GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.cli.app import load, main
from harness.engines.servers import host
from harness.policy.types import UserError
from harness.study.load import study
from harness.study.on_engine import counts, part
from tests import ROOT

SMI = """#!/bin/sh
case "$1" in *name*) echo "NVIDIA H200";; *) echo 0; esac
"""


def make(path: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run make; only print what it would do where `-n` is among the arguments."""
    env = {**os.environ, "PATH": path}
    return subprocess.run(
        ["make", *more, "gpu-servers"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def with_smi(folder: Path, script: str) -> str:
    """Return a PATH on which nvidia-smi is a script."""
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def card(tmp_path: Path) -> str:
    """Return a PATH on which nvidia-smi finds a card."""
    return with_smi(tmp_path, SMI)


def test_without_a_gpu_it_refuses_in_a_line(tmp_path: Path) -> None:
    run = make(with_smi(tmp_path, "#!/bin/sh\nexit 9\n"))
    assert run.returncode
    assert run.stderr.splitlines()[0] == "error: make gpu-servers needs a GPU, and nvidia-smi finds none here"
    assert "calibrate" not in run.stdout


def test_every_command_is_one_that_our_command_line_takes(card: str) -> None:
    run = make(card, "-n")
    assert run.returncode == 0, run.stderr
    lines = [shlex.split(line) for line in run.stdout.splitlines() if "-m harness " in line]
    asked = [words[words.index("harness") + 1 :] for words in lines]
    assert [words[0] for words in asked] == ["calibrate", "validate", "study"]
    for name, *words in asked:
        command = load(name)
        params = command.make_context(name, list(words), **main.context_settings).params
        assert params.get("engine", params.get("source")) == "vllm"
        assert str(params["out"]).startswith("results/nvidia-h200")
    assert "--gpu h200" in run.stdout
    assert f"--table {Path('results/nvidia-h200/vllm-h200.toml')}" in run.stdout


def test_a_study_on_servers_is_its_conditions_and_systems_that_they_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    whole = study("fig7")
    here, notes = part(whole, "vllm", None, 1)
    assert {gpus for condition in here.condition for gpus in counts(here, condition)} == {1}
    assert (here.spec["engine"], here.base_engine) == ("vllm", "sim")
    assert {"static:rate", "static:equal"} <= set(here.systems)
    assert all(
        any(f"skipped: {name} on vllm: no " in note for note in notes)
        for name in set(whole.systems) - set(here.systems)
    )
    wide = [
        f'skipped: condition "{c.name}" needs 2 GPUs, there are 1' for c in whole.condition if min(counts(whole, c)) > 1
    ]
    assert wide == [note for note in notes if "condition" in note]
    with pytest.raises(UserError, match="aegaeon: no condition runs on 1 GPUs"):
        part(study("aegaeon"), "vllm", None, 1)
    two, _ = part(whole, "vllm", None, 2)
    assert {gpus for condition in two.condition for gpus in counts(two, condition)} == {1, 2}
