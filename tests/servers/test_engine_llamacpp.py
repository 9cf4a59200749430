"""The engine of llama.cpp's servers, for real: rows of requests that two of them serve."""

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


def test_two_servers_answer_what_they_are_asked(llamacpp: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config = Config(tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b")))
    engine = Servers(config, module.LlamaCpp(config, machine(config)))
    none, prompts, outputs = np.full(4, np.inf), np.full(4, 40, np.int32), np.full(4, 4, np.int32)
    work = Jobs(("a", "b"), np.linspace(0.0, 1.0, 4), np.arange(4, dtype=np.int32) % 2, prompts, outputs, none, none)
    try:
        replay(Script(routed("a", "b")), engine, work)
        rows = [row for part in engine.rows() for row in part.to_pylist()]
    finally:
        engine.close()
    assert [(row["state"], row["made_tokens"]) for row in rows] == [("done", 4)] * 4
    assert engine.log is not None
    assert (engine.log.prompt_ns > 0).all()
