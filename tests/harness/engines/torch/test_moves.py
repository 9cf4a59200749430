"""KV that comes and goes on the torch engine: what workers are told of it, and what happens where it finds no room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines.torch import kind, nets
from harness.engines.torch.kind import CPU
from harness.engines.torch.pages import Account, Arena
from harness.engines.torch.processes import Workers
from harness.policy.actions import Run
from harness.policy.types import MIB
from tests.harness.engines.torch import scenarios
from tests.harness.engines.torch.scenarios import HOME, Scenario, opened, then, to_host
from workloads.models import shape


def test_a_worker_is_told_of_pages_that_it_knows_or_can_use() -> None:
    """A driver fails to unmap what was never mapped: KV that came and left between two steps is no worker's matter."""
    net, arena = nets.net(shape("llama-3.2-1b")), Arena(8 * MIB, CPU.granule)
    account = Account(arena, net, 16, buffer=CPU.buffer)
    workers, told = Workers(CPU, {"m": net}, {0: arena}, {("m", 0): account}), list[tuple[Any, ...]]()
    worker: Any = SimpleNamespace(device=0, accounts={"m"}, send=lambda *message: told.append(message))
    workers.processes = {(0,): worker}

    def what() -> list[str]:
        told.clear()
        workers.sync(worker, "m")
        return [message[0] for message in told]

    account.give(account.take(1))
    assert what() == []
    blocks = account.take(1)
    assert what() == ["map"]
    account.give(blocks)
    account.give(account.take(1))
    assert what() == ["unmap"]
    account.give(account.take(1))
    blocks = account.take(1)
    assert what() == ["map"]
    account.give(blocks)
    account.take(1)
    assert what() == ["unmap", "map"]
    assert what() == []


def test_a_link_that_moves_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(CPU, {}, {}, {})
    monkeypatch.setattr(workers, "_links", SimpleNamespace(send=lambda copy: None), raising=False)
    workers.copy("h2d0", 1e6, [(0, 0, 1, 0, 5_000_000)])  # five seconds of it
    monkeypatch.setitem(workers._moved_s, "h2d0", workers._moved_s["h2d0"] - 60.0)
    assert workers.late_link(100.0) == ""
    assert workers.late_link(30.0).startswith("link h2d0 has moved nothing for 60 s, with 1 copies to do")


@pytest.mark.torch
def test_moves_to_a_full_host_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    net = scenarios.draw(tmp_path)
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))
    monkeypatch.setattr(kind, "CPU", CPU._replace(host_bytes=2 * CPU.granule))
    scenario = Scenario(then(opened(Run(HOME)), to_host))
    with pytest.raises(AssertionError, match="nothing is left that could free memory"):
        scenarios.served(net.shape.name, scenario, end_s=float("inf"))
    assert "the host's 7.63e-06 GiB for KV are full, and moves to it wait" in capfd.readouterr().err
