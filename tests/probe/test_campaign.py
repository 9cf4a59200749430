"""The campaign of real servers on a card (`probe/ORDER.md`), its own command against stand-ins for the servers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from harness.engines.servers import environments, host, kvcached
from harness.rows import record
from harness.validate import prediction
from probe import order
from tests import ROOT
from tests.bench import bench

SYSTEMS = ("static:equal", "elastic", "swap:sleep")


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a card, on a host whose .venv-vllm has vLLM and kvcached by name alone."""
    card, venv = tmp_path / "card", tmp_path / "root/.venv-vllm"
    for package, version in (("vllm", "0.24.0"), ("kvcached", "0.1.6")):
        about = venv / f"lib/python3.12/site-packages/{package}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (venv / "bin").mkdir()
    python = venv / "bin/python"
    words = shlex.join(["exec", sys.executable, "-m", "tests.probe.stand_in", str(card)])
    python.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))}\n{words} "$@"\n')
    python.chmod(0o755)
    card.mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(environments, "ROOT", tmp_path / "root")
    monkeypatch.setattr(host, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(host, "MOUNTED", tmp_path)
    monkeypatch.setattr(kvcached, "FOLDER", card)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    return card


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_systems_serve_the_campaigns_requests_on_stand_ins(card: Path, tmp_path: Path) -> None:
    step = order.ramp(",".join(SYSTEMS), "llama-3.2-1b*4", 12, "vllm")
    words = step.format(python="", gpu="h100", out=tmp_path).split()
    result = bench(*words[words.index("compare") :])
    assert result.exit_code == 0, result.output + result.stderr
    folders = [path.parent for path in tmp_path.glob(f"campaign/*/{record.ROWS}")]
    runs = {record.meta(folder)["spec"]["system"]: folder for folder in folders}
    assert runs.keys() == {name.partition(":")[0] for name in SYSTEMS}
    for run in runs.values():
        assert record.meta(run)["fidelity"] == "real"
        states = record.read(run).column("state").to_pylist()
        assert len(states) == prediction.MODELS * prediction.PEAK**2
        assert set(states) == {"done"}
    told = [json.loads(path.read_text()) for path in sorted(card.glob("*.json"))]
    assert len(told) >= 3 * 4
    elastic = [x for x in told if "ENABLE_KVCACHED" in x["env"]]
    assert len(elastic) == 4
    assert all(x["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "0" for x in told)  # what is compared has one runner
    assert all("--kv-cache-memory-bytes" in x["argv"] for x in told if x not in elastic)
