"""Prism as released: worked numbers of its rules, and what it does where the paper does otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.engines.costs import quantities
from harness.engines.sim.engine import Sim
from harness.policy.actions import Admit, Evict, Load
from harness.policy.placement import groups
from harness.policy.types import GIB, Infeasible, Inst, Request
from systems.prism_released import PrismReleased, need, priority
from tests.cases import cases
from tests.systems.test_prism import of, run, states, work, world


@cases(("prompt", "guess_s"), [(1, 0.2), (410, 410 / 2048), (1024, 0.5), (4096, 2.0), (9000, 2.0)])
def test_priority_is_arrival_and_slo_less_a_bounded_guess_of_the_prefill(prompt: int, guess_s: float) -> None:
    assert priority(Request(0, "m", 100.0, prompt, 3.0, 0.1)) == pytest.approx(103.0 - guess_s)


def test_a_long_prompt_goes_before_one_that_came_a_little_earlier() -> None:
    config = world(1, 3.0)
    jobs = work(config, [(0.0, 0)] * 20 + [(0.001, 0)] * 10, prompt=100)
    jobs.prompt_tokens[20:] = 1500  # 0.73 s less, not 0.2 s
    log, _ = run(config, jobs, PrismReleased)
    let_in = [a.who for _, a in of(Admit, log)]
    assert let_in == [*range(11), *range(20, 30), *range(11, 20)]  # the first eleven were alone


def test_no_more_than_eleven_prompts_wait_in_an_engine() -> None:
    config = world(2, 4.0)
    log, engine = run(config, work(config, [(0.0, k % 2) for k in range(60)], prompt=1000), PrismReleased)
    first_s = of(Admit, log)[0][0]
    at_once = [a.who for t, a in of(Admit, log) if t == first_s]
    assert sorted(at_once) == list(range(22))  # each model has 10 and one more
    assert states(engine) == ["done"] * 60


def test_an_idle_model_goes_at_the_tick_after_50_s_though_nobody_wants_its_memory() -> None:
    config = world(2, 4.0)
    log, _ = run(config, work(config, [(0.0, 0), (12.0, 1), (200.0, 1)]), PrismReleased)
    gone = {a.inst.model: t for t, a in reversed(of(Evict, log))}  # the first of each
    assert gone == {"m0": 55.0, "m1": 65.0}  # done within 5 s: at the first tick 50 s later


def test_a_model_that_is_out_waits_for_the_tick() -> None:
    config = world(2, 4.0)
    log, engine = run(config, work(config, [(0.0, 0), (61.0, 0)]), PrismReleased)
    assert [(t, a) for t, a in of(Load, log)] == [(65.0, Load(Inst("m0", (0,)), "pool"))]
    here_s = 61.0 + quantities.host("vllm-0.15", "h100").api_in_s
    (_, row) = [row for batch in engine.rows() for row in batch.to_pylist()]
    load_s = engine.cluster.profile.load_s(Inst("m0", (0,)), "pool")
    assert row["load_ns"] / 1e9 == pytest.approx(65.0 - here_s + load_s, abs=2e-9)


def placed(room: float, workers: int = 4) -> PrismReleased:
    """Return models m0 and m1 on GPU 0 and m2 on GPU 1, with 30, 2 and 1 requests."""
    policy = PrismReleased(Sim(world(3, room, gpus=2), {"kv": "elastic"}).cluster, workers=workers)
    for name, g, requests in (("m0", 0, 30), ("m1", 0, 2), ("m2", 1, 1)):
        m = policy.models[name]
        m.live = requests
        list(policy.bring(m, (g,), "in"))
    return policy


def test_the_model_with_fewest_requests_whose_move_steadies_a_pair_moves() -> None:
    policy = placed(8.0)
    C, w = policy.cluster.gpus[0].mem_bytes, need(policy.models["m0"])
    # memory per request: (C - 2w) / 32 beside C - w; after m1's move (C - w) / 30 beside (C - 2w) / 3
    assert (C - w) / ((C - 2 * w) / 32) > 15 > ((C - 2 * w) / 3) / ((C - w) / 30)
    assert list(policy.balance(0.0)) == [Evict(Inst("m1", (0,)))]
    assert policy.out == {"m1": (1,)}  # it comes there once it has left
    assert policy.unstable(policy.active(), {"m0": (0,), "m2": (1,)}) == 1  # 30 beside 1


def test_a_gpu_without_a_free_worker_gets_no_model() -> None:
    policy = placed(8.0, workers=1)
    assert list(policy.balance(0.0)) == []
    assert policy.out == {}


def test_a_pair_within_the_threshold_is_left_alone() -> None:
    policy = placed(8.0)
    policy.models["m0"].live = 5  # (C - 2w) / 7 beside C - w
    assert list(policy.balance(0.0)) == []


def test_models_start_by_falling_demand_where_demand_over_free_memory_is_lowest() -> None:
    config = world(3, 3.0, gpus=2, rates=[1.0, 4.0, 2.0])
    policy = PrismReleased(Sim(config, {"kv": "elastic"}).cluster)
    loads = [a.inst for a in policy.start(0.0) if isinstance(a, Load)]
    assert loads == [Inst("m1", (0,)), Inst("m2", (1,)), Inst("m0", (1,))]  # 4; 2 on the other; 1 beside the 2
    kv = policy.models["m1"].model.kv_token_bytes
    assert policy.models["m1"].demand == pytest.approx(4.0 * 150 * kv / 0.1)  # 150 tokens a request, TPOT SLO 0.1 s
    assert set(groups(policy.cluster, 1)) == {(0,), (1,)}
    assert policy.free(0) < policy.cluster.gpus[0].mem_bytes - 2 * GIB


def test_models_of_unlike_degrees_are_refused() -> None:
    alike = world(3, 8.0, gpus=4)

    def made(*degrees: int) -> PrismReleased:
        models = tuple(m._replace(tp=tp) for m, tp in zip(alike.models, degrees, strict=True))
        return PrismReleased(Sim(replace(alike, models=models)).cluster)

    assert made(1, 1, 1).models.keys() == made(2, 2, 2).models.keys()
    with pytest.raises(Infeasible, match=r"one tensor-parallel degree in Prism's release, not 1 and 2$"):
        made(1, 2, 1)
