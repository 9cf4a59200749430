"""Costs of runs, learnt from stored ones, and what is left of a sweep."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from harness.rows import record
from harness.run import estimates, sweep
from tests.harness.run.test_sweep import GRID, TINY, Heard


def cost(folder: Path, cpu_s: float, requests: int = 100) -> Path:
    """Write the side facts of a run that took so long, on a machine of which it had half a core."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record.SIDE).write_text(json.dumps({"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "requests": requests}))
    return folder


def test_costs_grow_with_the_rate_and_learn_from_stored_runs(tmp_path: Path) -> None:
    unknown = estimates.Costs()
    assert unknown.cpu_s(replace(TINY, rate_scale=9.0)) > unknown.cpu_s(TINY) > estimates.RUN_S
    assert not estimates.Costs.of(tmp_path)
    sweep.sweep([TINY], tmp_path, workers=1)
    assert estimates.Costs.of(tmp_path).heard("static")
    costs, requests = estimates.Costs(), estimates.requests_in(TINY)
    costs.learn(replace(TINY, rate_scale=1.0), cost(tmp_path / "a", estimates.RUN_S + 1.0))  # 10 ms a request
    costs.learn(replace(TINY, rate_scale=4.0), cost(tmp_path / "b", estimates.RUN_S + 3.0))  # 30 ms
    for rate_scale, request_s in ((0.5, 0.01), (1.0, 0.01), (2.0, 0.02), (4.0, 0.03), (8.0, 0.03)):
        expected = estimates.RUN_S + rate_scale * requests * request_s
        assert costs.cpu_s(replace(TINY, rate_scale=rate_scale)) == pytest.approx(expected)
    elsewhere = costs.cpu_s(replace(TINY, gpus=7))  # in the mean over all runs of the system
    assert elsewhere == pytest.approx(estimates.RUN_S + requests * 4.0 / 200)


def test_what_is_left_of_a_sweep_is_the_cost_of_its_runs(tmp_path: Path) -> None:
    points = product(("static", "chunked"), (1.0, 4.0), (0, 1))
    specs = [replace(TINY, system=name, rate_scale=x, seed=seed) for name, x, seed in points]
    todo = sweep.tasks(specs)
    ahead = estimates.Ahead(todo, estimates.Costs(), later=1000.0, slots=2)
    order = ahead.longest(todo)
    assert {(task.spec.system, task.spec.rate_scale) for task in order[:4]} == {(s.system, s.rate_scale) for s in specs}
    assert sorted(task.spec.folder for task in order) == sorted(task.spec.folder for task in todo)
    per = {"static": 0.01, "chunked": 0.02}
    cpu_s = {t: estimates.RUN_S + per[t.spec.system] * estimates.requests_in(t.spec) for t in todo}
    for number, task in enumerate(order):
        cost(tmp_path / task.spec.folder, cpu_s[task])
        ahead.ended(task, tmp_path)
        left, rest = ahead._summed(), order[number + 1 :]
        if {t.spec.system for t in rest} <= {t.spec.system for t in order[: number + 1]}:
            assert left.cpu_s == pytest.approx(sum(cpu_s[t] for t in rest))
            assert left.share == 0.5  # cost() says so
            assert left.most_s is not None
            assert left.seconds is not None
            assert left.most_s - left.seconds == pytest.approx(1000 * per["chunked"] / (2 * 0.5))  # of the slowest
        else:
            assert left.seconds is None
    assert left.seconds == 0.0


def test_a_sweep_tells_what_is_left_of_it(tmp_path: Path) -> None:
    heard = Heard()
    sweep.sweep(GRID[:2], tmp_path, workers=1, teller=heard, later=math.inf)
    first, *_, last = heard.left
    assert first is not None
    assert first.seconds is None  # no run of it is stored
    assert last is not None
    assert (last.cpu_s, last.seconds, last.most_s) == (0.0, 0.0, math.inf)
    assert 0 < last.share <= 1
