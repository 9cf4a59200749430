"""Averages of a table are over one span, the window: equal busy seconds are equal shares, however long a run drains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from harness.loop import system
from harness.loop.replay import replay
from harness.policy.types import Infeasible
from harness.rows import scoring
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec

SHARES = ("gpu_busy", "hbm_busy", "gpu_held", "kv_used")
WINDOW_S = 60.0
NAMES = system.names()


@cache
def ready(name: str) -> Spec:
    fields = (("search", "fast"),) if name == "alpaserve" else ()
    spec = Spec(name, fields=fields, trace="arena-like+models=4", models="llama-3.2-1b*4", gpus=2, rate_scale=12.0)
    return resolve(replace(spec, window_s=WINDOW_S, warmup_s=20.0, slo="absolute:ttft=1,tpot=0.05"))


def ran(spec: Spec, window_s: float | None = None) -> tuple[Mapping[str, float], list[Any]]:
    """Run a spec; with statistics over another window than its own, where that is given."""
    setup = Setup(spec)
    if window_s is not None:
        vars(setup)["config"] = replace(setup.config, window_s=window_s)
    engine, decision_s, control_s = setup.engine, spec.decision_s or 0.0, spec.control_s or 0.0
    replay(setup.policy, engine, setup.jobs(), end_s=setup.end_s, decision_s=decision_s, control_s=control_s)
    rows = [row for batch in engine.rows() for row in batch.to_pylist()]
    return engine.stats(), rows


@pytest.mark.parametrize("name", NAMES)
def test_equal_busy_seconds_are_equal_shares_of_the_window(name: str) -> None:
    """A run that ends with its window, one that drains to its last request, and one that waits a day for nothing more:
    all did the same in the window. What is noted in passing changes no request."""
    spec = ready(name)
    try:
        long, rows = ran(spec)
    except Infeasible:
        pytest.skip("no room")
    whole, same = ran(spec, math.inf)
    assert rows == same
    short, _ = ran(replace(spec, drain_s=0.0))
    assert long["span_s"] == short["span_s"] == WINDOW_S
    shares = [scoring.utilisation(stats) for stats in (long, short)]
    for key in SHARES:
        assert shares[0][key] == pytest.approx(shares[1][key], rel=1e-9), key
        assert 0 <= shares[0][key] <= 1 + 1e-9
    assert shares[0]["gpu_busy"] * spec.gpus * WINDOW_S == pytest.approx(long["gpu_busy_s"])
    assert long["gpu_busy_s"] <= whole["gpu_busy_s"]


def test_a_run_that_ends_before_its_window_is_idle_for_the_rest() -> None:
    """Few requests and weights that stay: busy for their time, held for all of it, over the window, not the run."""
    spec = replace(ready("static"), rate_scale=0.05)
    stats, rows = ran(spec)
    done_s = max(row["done_ns"] for row in rows) / 1e9
    assert done_s < WINDOW_S
    shares = scoring.utilisation(stats)
    assert shares["gpu_held"] == pytest.approx(1.0)
    assert 0 < shares["gpu_busy"] < done_s / WINDOW_S
