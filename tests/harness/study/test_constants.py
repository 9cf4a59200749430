"""Factors of the machine's constants: where each acts, and that nothing else changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines import machine
from harness.engines.costs.constants import CONSTANTS, GONE
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.engines.sim.kernel import lent
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.placement import footprint
from harness.policy.types import KEPT_PAGES, Jobs, Plan, UserError
from harness.run.resolve import _timed as timed
from harness.run.setup import load_models
from harness.run.spec import Spec, as_dict, from_dict


def test_a_factor_of_one_is_no_factor() -> None:
    plain = Spec("static")
    assert "scaled" not in as_dict(plain)
    unit = from_dict({"system": "static", "scaled": dict.fromkeys(CONSTANTS, 1)})
    assert unit == plain
    assert unit.hash8 == plain.hash8
    two = from_dict({"system": "static", "scaled": {"swap": 2, "disk": 0.5, "pcie": 1}})
    assert two.scaled == (("disk", 0.5), ("swap", 2.0))
    assert as_dict(two)["scaled"] == {"disk": 0.5, "swap": 2.0}
    assert from_dict(as_dict(two)) == two
    assert two.hash8 != plain.hash8


@pytest.mark.parametrize(
    ("scaled", "says"),
    [
        ({"swop": 2.0}, 'scaled has no constant "swop"; did you mean swap?'),
        ({"swap": 0}, "scaled.swap is 0, not above 0"),
        ({"swap": -1.0}, "scaled.swap is -1.0, not above 0"),
        ({"swap": math.inf}, "scaled.swap is inf, not a finite number"),
        ({"swap": True}, "scaled.swap is true, not a number"),
        ({"interference": 1.195}, r"scaled\.interference is no constant any more: kernels .*co_run scales"),
        ({"beside_prefill": 5.4}, r"scaled\.beside_prefill is no constant any more: decode steps .*passes: 1 to 3"),
        (2.0, r"scaled is 2.0, not a table"),
    ],
)
def test_a_wrong_factor_is_named(scaled: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_dict({"system": "static", "scaled": scaled})


def test_where_time_is_real_nothing_scales() -> None:
    with pytest.raises(UserError, match=r"scaled\.swap: on torch the machine is real"):
        timed(Spec("static", engine="torch", scaled=(("swap", 2.0),)))


def config(**scaled: float) -> Config:
    models = (Served(m.name, m.shape, m.tp) for m in load_models("llama-3.1-8b*2").members)
    return Config(tuple(models), gpus=2, host="vllm-0.6", scaled=scaled)


def numbers(c: Config) -> dict[str, float]:
    """Return the numbers that each constant multiplies, and those that none of them does."""
    priced, elastic = machine.machine(c), machine.cluster(c, elastic=True)
    tables, card, ladder, host = priced.tables, priced.spec, priced.ladder, priced.host
    model = elastic.models[c.models[0].name]
    inside, outside = machine.parts(c, c.models[0])
    return {
        "pcie": card.h2d, "pcie back": card.d2h, "nvlink": card.nvlink, "net": card.net, "disk": card.disk,
        "swap": ladder["pool"].fixed_s, "swap cold": ladder["cold"].fixed_s,
        "step": host.host0, "step each": host.host1, "step tp": host.host_tp, "step priced": tables.cost[0]["host0"],
        "process": inside, "process outside": outside,
        "reserve": model.kept_pages, "reserve bytes": footprint(model, elastic=True) - footprint(model, elastic=False),
        "passes": tables.cost[0]["passes"], "decode_fill": tables.cost[0]["dec_fill"],
        "prompt_tokens": tables.cost[0]["few"], "prompt_tokens many": tables.cost[0]["many"],
        "prompts": tables.cost[0]["pre_x"], "prompts attention": tables.cost[0]["pre2"],
        "prompt fill": tables.cost[0]["pre_fill"], "apart": tables.cost[0]["apart"],
        "flops": card.flops, "hbm": card.hbm, "api": host.api_in_s, "gemm": tables.gemm[0][3], "page": model.page_bytes,
    }  # fmt: skip


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", [name for name in CONSTANTS if name != "co_run"])
def test_a_constant_is_multiplied_where_it_acts_and_nothing_else_is(name: str, factor: float) -> None:
    base, scaled = numbers(config()), numbers(config(**{name: factor}))
    expected = {key: value * (factor if key.partition(" ")[0] == name else 1) for key, value in base.items()}
    expected["decode_fill"] = min(1.0, expected["decode_fill"])  # none fills more than the GPU
    assert scaled == pytest.approx(expected, rel=1e-9)
    assert numbers(config(**{name: 1.0})) == base


def test_the_memory_of_processes_leaves_less_for_weights_and_kv() -> None:
    base, double = (machine.cluster(c).models["llama-3.1-8b/1"] for c in (config(), config(process=2.0)))
    assert double.weight_bytes - base.weight_bytes == machine.parts(config(), config().models[0]).inside
    assert base.kept_pages == KEPT_PAGES


def test_a_step_beside_others_takes_its_factor_of_what_it_takes_longer() -> None:
    """Half speed is 1 s longer than 1 s alone; at 0.8 of a GPU alone, 1.25 s."""
    assert lent.slowed(1.0, 0.5, 1.0) == 0.5
    assert lent.slowed(1.0, 0.5, 2.0) == pytest.approx(1 / 3)
    assert lent.slowed(1.0, 0.5, 0.5) == pytest.approx(1 / 1.5)
    assert lent.slowed(0.8, 0.4, 2.0) == pytest.approx(1 / (1.25 + 2 * 1.25))
    assert lent.slowed(0.8, 0.8, 2.0) == 0.8


def test_so_does_a_run_of_two_models_that_saturate_a_gpu() -> None:
    """Each lane goes at one rate all the time, so that the run's length is linear in the factor."""

    half, as_it_is, double = (end_ns(co_run=factor) for factor in (0.5, 1.0, 2.0))
    assert as_it_is > 1.05 * half
    assert double - as_it_is == pytest.approx(2 * (as_it_is - half), rel=1e-6)


def end_ns(gpus: int = 1, models: int = 2, **scaled: float) -> float:
    """Return the time in ns at which the last of one request to each model is done."""
    plan = {m.name: Plan(1.0, 64, 200, "test") for m in config().models}
    c = replace(config(**scaled), gpus=gpus, plan=plan)
    model, prompt, output = np.array([range(models), [64] * models, [200] * models], np.int32)
    names, slo_s = tuple(m.name for m in c.models), np.ones(models)
    jobs = Jobs(names, np.zeros(models), model, prompt, output, slo_s, slo_s)
    engine = Sim(c)
    replay(find("static")(engine.cluster), engine, jobs)
    return max(float(row["done_ns"]) for batch in engine.rows() for row in batch.to_pylist())


@pytest.mark.parametrize(("gpus", "models"), [(1, 1), (2, 2)])
def test_a_step_alone_on_its_gpu_takes_no_longer(gpus: int, models: int) -> None:
    assert end_ns(gpus, models, co_run=2.0, passes=1.5, decode_fill=1.25) == end_ns(gpus, models)


def test_what_no_spec_may_scale_any_more_is_no_constant() -> None:
    assert not set(GONE) & set(CONSTANTS)
