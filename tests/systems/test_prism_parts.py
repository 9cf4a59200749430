"""Prism with a part switched off is worse where the paper says so: figures 8 to 11 in small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from harness.engines import llamacpp
from harness.engines.costs import quantities
from harness.engines.machine import Config, machine
from harness.engines.sim.engine import Sim
from harness.loop import system
from harness.loop.replay import missing
from harness.policy.types import GIB, Infeasible, Jobs
from systems.prism import Prism
from tests.cases import cases
from tests.systems.by_hand import ran
from tests.systems.test_elastic import WEIGHTS
from tests.systems.test_elastic import machine as eights
from tests.workloads.asked import asked


def served(n: int, kv_gib: float, *, gpus: int = 1, ttft_s: Sequence[float] = (), rates: Sequence[float]) -> Config:
    """Return GPUs that hold `n` 8B models between them, and so much KV memory each."""
    config = eights(n, kv_gib, gpus=gpus, rates=tuple(rates))
    models = tuple(m._replace(ttft_slo_s=s) for m, s in zip(config.models, ttft_s or [0.5] * n, strict=True))
    # loads below are sized for this host: on one that schedules a step ahead a prompt waits for another step
    return replace(config, models=models, noise=0.0, host="vllm-graph")


def arrivals(config: Config, parts: Sequence[tuple[int, float, float, float, int, int]]) -> Jobs:
    """Return Poisson streams: (model, from, to, requests a second, prompt tokens, output tokens)."""
    rng = np.random.default_rng(11)
    rows = []
    for m, begin, end, rate, prompt, output in parts:
        at = begin + np.cumsum(rng.exponential(1 / rate, int((end - begin) * rate)))
        rows += [(t, m, prompt, output) for t in at if t < end]
    rows.sort()
    slo_s = zip(*((config.models[m].ttft_slo_s, config.models[m].tpot_slo_s) for _, m, *_ in rows), strict=True)
    return asked((m.name for m in config.models), *zip(*rows, strict=True), *slo_s)


def outcome(config: Config, jobs: Jobs, **fields: object) -> tuple[np.ndarray, np.ndarray, Sim]:
    """Return whether each request met its TTFT, its end, and the engine; tuned fields stand as before."""
    _, engine, _ = ran(Prism, config, jobs, **{**Prism.untuned, **fields})
    R = engine.S.requests
    return R["first"] - jobs.arrival_s <= jobs.ttft_slo_s, R["done"], engine


@cache
def surge() -> tuple[Config, Jobs]:
    """Return the load of figure 8: after 20 s model 1 falls silent and model 2 surges."""
    config = served(2, 6.0, rates=[6.0, 1.0])
    return config, arrivals(config, [(0, 0, 20, 6.0, 300, 200), (1, 0, 20, 1.0, 300, 200), (1, 20, 60, 12.0, 300, 400)])


def test_memory_on_demand_gives_a_surging_model_what_the_other_does_not_use() -> None:
    config, jobs = surge()
    on, done, _ = outcome(config, jobs)
    off, done_off, _ = outcome(config, jobs, elastic=False)
    assert on.mean() > off.mean() + 0.2
    assert done.max() < done_off.max()  # the same tokens in less time


def test_each_step_of_the_ladder_activates_sooner() -> None:
    # figure 9: a model that is out comes back on its first request
    mem_fraction = (2 * WEIGHTS + 4 * GIB) / quantities.gpu("h100").mem_bytes  # two of three are in
    config = replace(served(3, 4.0, rates=[1.0, 1.0, 1.0]), mem_fraction=mem_fraction)
    jobs = arrivals(config, [(0, 0, 5, 1.0, 300, 20), (1, 0, 200, 0.5, 300, 20), (2, 100, 110, 1.0, 300, 20)])
    first = {}
    for way in ("host", "parallel", "pool", "sleep", "disk", "cold"):
        *_, engine = outcome(config, jobs, way=way)
        R = engine.S.requests
        first[way] = float((R["first"] - R["arrival"])[jobs.model == 2][0])
    assert first["host"] < first["parallel"] <= first["pool"] < first["sleep"] < first["disk"] < first["cold"]


def test_the_global_scheduler_spreads_load_that_the_forecast_did_not_see() -> None:
    # figure 10: two of four models get all the traffic, and the forecast has put them on one GPU
    config = served(4, 2.0, gpus=2, rates=[4.0, 3.0, 2.9, 2.8])
    jobs = arrivals(config, [(0, 0, 120, 8.0, 600, 300), (3, 0, 120, 8.0, 600, 300)])
    start = Prism(Sim(config, {"kv": "elastic"}).cluster, **Prism.untuned)  # type: ignore[arg-type]
    list(start.begin(0.0))
    assert start.models["m0"].home == start.models["m3"].home
    on, _, engine = outcome(config, jobs)
    off, _, still = outcome(config, jobs, placement="fixed")
    assert engine.stats()["migrations"] >= 1
    assert still.stats()["migrations"] == 0
    assert on.mean() > off.mean() + 0.05


def test_the_local_scheduler_lets_the_requests_of_a_strict_slo_go_first() -> None:
    # figure 11: two models share a GPU's memory; the second has shorter requests and a tenth of the SLO
    config = served(2, 4.0, ttft_s=[20.0, 2.0], rates=[5.0, 5.0])
    jobs = arrivals(config, [(0, 0, 60, 24.0, 300, 400), (1, 0, 60, 8.0, 300, 200)])
    on, *_ = outcome(config, jobs)
    off, *_ = outcome(config, jobs, order="fcfs")
    second = jobs.model == 1
    # the paper: by more than 40 points, at a load that it does not give
    assert on[second].mean() > off[second].mean() + 0.25
    assert on[~second].mean() > off[~second].mean()


def test_partitioned_engines_have_their_memory_from_the_start_and_nothing_comes_or_goes() -> None:
    config, jobs = surge()
    fields = dict(Prism.presets["partitioned"])
    on, done, engine = outcome(config, jobs, **fields)
    stats = engine.stats()
    assert (stats["loads"], stats["evicts"], stats["migrations"]) == (0, 0, 0)
    assert np.isfinite(done).all()
    assert Prism(engine.cluster, **fields).options == {"kv": "paged"}  # type: ignore[arg-type]
    assert on.mean() < outcome(config, jobs)[0].mean()  # the surge cannot have what the other does not use
    with pytest.raises(Infeasible, match="kv=paged takes elastic=false"):
        Prism(engine.cluster, kv="paged")
    with pytest.raises(Infeasible, match="no place for"):
        outcome(replace(config, mem_fraction=(WEIGHTS + 4 * GIB) / quantities.gpu("h100").mem_bytes), jobs, **fields)


@cases(("name", "preset", "fields"), [("prism", "partitioned", {}), ("qlm", "reload", {"evict": "drain"})])
def test_with_parts_switched_off_a_server_that_starts_and_stops_lacks_nothing(
    name: str, preset: str, fields: dict[str, str]
) -> None:
    config = served(2, 6.0, rates=[1.0, 1.0])
    make = system.find(name)
    policy = system.build(make, Sim(config, {}).cluster, {**make.presets[preset], **fields})
    engine = llamacpp.make(config, policy.options, machine(config))
    assert missing(policy, engine) == []
    assert missing(system.build(make, Sim(config, {}).cluster, {}), engine) != []
