"""Attainment of settings and the GPU-hours that weights hold: counted by the simulator, told and drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.answers import tradeoff
from harness.answers.table import printed
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.policy.types import Jobs, Plan, UserError
from harness.rows import held, scoring
from plots import style
from plots import tradeoff as figure
from systems.swap import Swap
from tests.plots.test_fig_study import about, measured, panel
from workloads.models import shape


def test_gpus_are_held_from_the_order_of_a_load_until_weights_left() -> None:
    # two models, loaded at the start; both stop after 1 s, and a is started again at 10 s
    small = shape("llama-3.2-1b")._replace(max_tokens=2048)
    plan = {m: Plan(2.0 - k, 100, 100, "test") for k, m in enumerate("ab")}
    config = Config(tuple(Served(m, small, 1, 1.0, 0.1) for m in "ab"), gpus=2, plan=plan)
    model, prompt, output = (np.array([x], np.int32) for x in (0, 100, 200))
    jobs = Jobs(("a", "b"), np.array([10.0]), model, prompt, output, np.ones(1), np.full(1, 0.1))
    fields: dict[str, Any] = {**Swap.presets["kubeai"], "look_s": 0.0, "keep_s": 1.0}
    engine = Sim(config, Swap(Sim(config).cluster, **fields).options)
    replay(Swap(engine.cluster, **fields), engine, jobs)
    rows = [row for batch in engine.rows() for row in batch.to_pylist()]
    stats = engine.stats()
    assert stats["span_s"] == pytest.approx(rows[0]["done_ns"] / 1e9, abs=0.01)
    assert stats["gpu_held_s"] == pytest.approx(1.0 + 1.0 + stats["span_s"] - 10.0, abs=0.01)
    assert scoring.utilisation(stats)["gpu_held"] == pytest.approx(stats["gpu_held_s"] / (2 * stats["span_s"]))


FACTS = about(
    "tradeoff",
    panel("calm", rate_rps=0.1),
    panel("bursts", rate_rps=0.1, gpus=1),
    systems=["1 s", "1 h"],
    definitions=["both"],
    titles=["idle time"],
    level=0.95,
)


def cells(condition: str, label: str, met: float, share: float) -> list[dict[str, Any]]:
    pooled, worst = {"both": met, "gpu_held": share, "loads": 3.0, "offered_rps": 0.1}, {"both": met / 2}
    sides = ({"over": "pooled", "values": pooled}, {"over": "model", "model": "rare", "values": worst})
    run = {"condition": condition, "x": 1.0, "label": label}
    return [run | side | {"seed": seed} for seed in range(3) for side in sides]


TABLE = measured(
    *cells("calm", "1 s", 0.5, 0.25),
    *cells("calm", "1 h", 0.99, 0.75),
    *cells("bursts", "1 s", 0.96, 0.5),
    *cells("bursts", "1 h", 0.97, 1.0),
)


def test_the_cheapest_that_attains_the_level_stands_first() -> None:
    answer, _, head, *_, calm, bursts = printed(tradeoff.parts(FACTS, TABLE, every=False))
    assert answer == ("the idle time that meets 95 % of SLOs on the fewest GPU-hours: 1 h under a; 1 s under b")
    assert calm.endswith(": 1 h, 36 of 48 GPU-hours a day, worst model 50 %")
    assert bursts.endswith(": 1 s, 12 of 24 GPU-hours a day, worst model 48 %")
    assert head.split()[:2] == ["idle", "time"]
    answer, *_ = printed(tradeoff.parts(replace(FACTS, level=0.98), TABLE, every=False))
    assert answer == "the idle time that meets 98 % of SLOs on the fewest GPU-hours: 1 h under a; none does under b"
    answer, *_, calm, _ = printed(tradeoff.parts(replace(FACTS, level=0.999), TABLE, every=False))
    assert answer == "no idle time meets 99.9 % of SLOs"
    assert calm.endswith("none, at best 99.0 % with 1 h, 36 of 48 GPU-hours a day, worst model 50 %")


def test_settings_are_drawn_in_the_order_of_the_study() -> None:
    points = figure.points(TABLE, FACTS).set_index(["condition", "setting"])
    assert points.loc[("calm", "1 h"), "gpu_h_mean"] == pytest.approx(0.75 * 2 * held.DAY_H)
    with style.theme():
        drawn = figure.draw(TABLE, FACTS)
        with pytest.raises(UserError, match="nothing to draw"):
            figure.draw(TABLE, replace(FACTS, systems=("2 h",)))
    met, spent, _ = drawn.axes
    assert [label.get_text() for label in met.get_xticklabels()] == ["1 s", "1 h"]
    assert met.get_xlabel() == "idle time"
    hours = [np.asarray(line.get_ydata()).tolist() for line in spent.lines[::2]]
    assert hours == [pytest.approx([12, 36]), pytest.approx([12, 24])]
