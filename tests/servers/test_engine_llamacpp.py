"""The engine of llama.cpp's servers, for real: servers that sleep by themselves, and are woken by requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.engines import llamacpp as module
from harness.engines.machine import Config, Served, machine
from harness.engines.servers.engine import Servers
from harness.loop.replay import replay
from harness.policy.types import Jobs
from tests.harness.engines.servers.staged import Script, routed
from workloads.models import shape

pytestmark = pytest.mark.servers


def test_its_own_wakes_are_those_of_its_log(llamacpp: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    models = tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b"))
    config = Config(models)
    kind = module.LlamaCpp(config, machine(config), module.Fields(keep_s=1))
    assert kind.keep is not None
    engine = Servers(config, kind)
    at_s, model = np.array([0.0, 0.1, 6.0, 6.1, 12.0]), np.array([0, 1, 0, 1, 0], np.int32)
    none, prompts, outputs = np.full(5, np.inf), np.full(5, 40, np.int32), np.full(5, 4, np.int32)
    try:
        replay(Script(routed("a", "b")), engine, Jobs(("a", "b"), at_s, model, prompts, outputs, none, none))
        rows = [row for part in engine.rows() for row in part.to_pylist()]
        stats, wakes = engine.stats(), engine.about()["wakes"]
    finally:
        engine.close()
    assert [row["state"] for row in rows] == ["done"] * 5
    assert {wake.rid for wake in engine.wakes} >= {2, 3, 4}
    assert engine.log is not None
    assert (engine.log.prompt_ns > 0).all()
    assert (stats["loads"], stats["wakes"]) == (0.0, float(wakes["logged"]))
    assert all(rows[wake.rid]["load_ns"] == pytest.approx(1e9 * wake.seconds, abs=10) for wake in engine.wakes)
    assert all(wake.seconds > 0.0 for wake in engine.wakes)
