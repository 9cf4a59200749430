"""Prefill and decode on GPUs of their own: where instances go, and how a request's KV gets from one to the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.engines.machine import Config, Served, cluster
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.policy.types import Batch, Infeasible, Jobs, Plan
from systems.disaggregated import Disaggregated
from tests.cases import cases
from tests.workloads.asked import asked
from workloads.models import shape

SMALL = shape("llama-3.2-1b")._replace(max_tokens=4096)


def config(*names: str, gpus: int = 2, tp: int = 1, degrees: tuple[int, ...] = (1, 2, 4, 8), **more: Any) -> Config:
    return Config(tuple(Served(m, SMALL, tp, degrees=degrees) for m in names), gpus=gpus, token_times=True, **more)


def places(batches: dict[str, list[Batch]]) -> dict[str, list[Any]]:
    return {m: [b.inst.place for b in of] for m, of in batches.items()}


def jobs(n: int, rate_rps: float, models: tuple[str, ...] = ("a",), prompt: int = 1000, output: int = 20) -> Jobs:
    draw = np.random.default_rng(3)
    arrival_s = np.cumsum(draw.exponential(1 / rate_rps, n))
    return asked(models, arrival_s, draw.integers(0, len(models), n, np.int32), prompt, output)


def served(of: Config, work: Jobs, **fields: Any) -> Sim:
    engine = Sim(of)
    replay(Disaggregated(engine.cluster, **fields), engine, work)
    return engine


def test_one_gpu_of_each_pair_prefills_for_all_models_that_live_there() -> None:
    policy = Disaggregated(cluster(config("a", "b", "c", "d", gpus=4)))
    homes = places(policy.prefills)
    assert sorted(homes.values()) == [[(0,)], [(0,)], [(2,)], [(2,)]]
    assert places(policy.decodes) == {m: [(p[0][0] + 1,)] for m, p in homes.items()}


def test_models_are_spread_by_what_their_traffic_writes() -> None:
    rates = {"a": 9.0, "b": 1.0, "c": 1.0}
    plan = {m: Plan(rate, 500, 100, "test") for m, rate in rates.items()}
    policy = Disaggregated(cluster(config(*rates, gpus=4, plan=plan)))
    home = {m: p[0] for m, p in places(policy.prefills).items()}
    assert home["b"] == home["c"] != home["a"]


def test_a_ratio_of_two_to_one_takes_three_groups() -> None:
    policy = Disaggregated(cluster(config("a", gpus=6, tp=2)), p=2)
    assert places(policy.prefills) == {"a": [(0, 1), (2, 3)]}
    assert places(policy.decodes) == {"a": [(4, 5)]}
    with pytest.raises(Infeasible, match=r"too few GPUs for 2 \+ 1"):
        Disaggregated(cluster(config("a", gpus=2)), p=2)


def test_eight_gpus_of_a_model_become_four_and_four() -> None:
    policy = Disaggregated(cluster(config("a", gpus=8, tp=8)))
    assert (places(policy.prefills), places(policy.decodes)) == ({"a": [(0, 1, 2, 3)]}, {"a": [(4, 5, 6, 7)]})


@cases(("node_gpus", "link"), [(8, "nvlink"), (1, "net")])
def test_kv_crosses_the_link_between_the_first_token_and_the_second(node_gpus: int, link: str) -> None:
    of = config("a", degrees=(1,), node_gpus=node_gpus)
    engine = served(of, jobs(1, 1.0))
    (row,) = [row for part in engine.rows() for row in part.to_pylist()]
    profile, inst = engine.cluster.profile, Disaggregated(engine.cluster).decodes["a"][0].inst
    blocks = -(-1001 // of.block_tokens)  # holds the prompt and a token
    move_s = blocks * of.block_tokens * engine.cluster.models["a"].kv_token_bytes / getattr(engine._machine.spec, link)
    step_s = profile.step_s(inst, 1, 1001)
    assert (row["token_ns"][1] - row["token_ns"][0]) / 1e9 == pytest.approx(move_s + step_s, abs=2e-9)
    assert row["transfer_ns"] == pytest.approx(move_s * 1e9, abs=2)
    assert engine.stats()["moves"] == 1


def test_prefills_go_to_the_instance_with_the_fewest_tokens_to_do() -> None:
    engine = served(config("a", gpus=3), jobs(60, 5000.0), p=2)
    assert (engine.S.requests["state"] == engine.S.requests["state"][0]).all()
    busy_s = engine.S.batches["busy_s"][:2]
    assert busy_s[0] == pytest.approx(busy_s[1], rel=0.2)
    assert engine.stats()["moves"] == 60


def test_decodes_go_to_the_instance_with_the_fewest_members() -> None:
    engine = served(config("a", gpus=3), jobs(60, 5000.0), d=2)
    tokens = engine.S.batches["seq_steps"]
    assert tokens[0] == 0
    assert tokens[1] == pytest.approx(tokens[2], rel=0.2)


def test_whoever_loses_its_kv_where_it_decodes_prefills_anew() -> None:
    """Decodes outgrow their GPU's memory; each victim is prefilled, and moved, once more."""
    tight = config("a", degrees=(1,), mem_fraction=0.07)
    engine = served(tight, jobs(80, 200.0, prompt=600, output=900))
    stats, states = engine.stats(), engine.S.requests["state"]
    assert stats["preemptions"] > 0
    assert (states == states[0]).all()
    assert stats["moves"] == 80 + stats["preemptions"]
