"""Elastic memory: it serves first come first served, and sleeps; other systems without their own parts do the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop import system
from harness.policy.types import GIB, Jobs, Plan
from tests.cases import cases
from tests.systems.by_hand import ran
from tests.workloads.asked import asked
from workloads.models import shape

SHAPE = shape("llama-3.1-8b")._replace(max_tokens=2048)
WEIGHTS = 15.0 * GIB + GIB // 2 + 5 * 128 * (1 << 20)  # an 8B takes this, with its process and the pages that it keeps
WITHOUT: dict[str, dict[str, Any]] = {
    "elastic": {"placement": "pressure"},
    "muxserve": {"quotas": "none"},
    "prism": {"placement": "fixed", "start": "alg1", "evict": "never", "order": "fcfs"},
}


def machine(n: int, kv_gib: float, *, gpus: int = 1, rates: tuple[float, ...] = ()) -> Config:
    """Return GPUs that hold `n` 8B models between them, and so much KV memory each."""
    models = tuple(Served(f"m{k}", SHAPE, 1, 0.5, 0.1) for k in range(n))
    plan = {m.name: Plan(rates[k] if rates else 1.0, 300, 200, "test") for k, m in enumerate(models)}
    fraction = (-(-n // gpus) * WEIGHTS + kv_gib * GIB) / quantities.gpu("h100").mem_bytes
    return Config(models, gpus=gpus, mem_fraction=fraction, process_bytes=GIB // 2, noise=0.03, plan=plan)


def poisson(config: Config, seed: int, rate_rps: float, span_s: float) -> Jobs:
    """Return Poisson arrivals for all models alike."""
    rng = np.random.default_rng(seed)
    arrival_s = np.sort(rng.uniform(0.0, span_s, int(rate_rps * span_s)))
    return jobs(config, arrival_s, rng.integers(0, len(config.models), len(arrival_s)), rng)


def jobs(config: Config, arrival_s: Any, model: Any, rng: np.random.Generator) -> Jobs:
    n = len(arrival_s)
    prompt, output = rng.integers(16, 800, n), rng.integers(1, 900, n)
    return asked((m.name for m in config.models), arrival_s, model, prompt, output, 0.5, 0.1)


@cases(("gpus", "rate_rps", "kv_gib"), [(1, 4.0, 16.0), (1, 12.0, 3.0), (2, 30.0, 4.0)])
def test_systems_without_their_own_parts_are_elastic_memory(gpus: int, rate_rps: float, kv_gib: float) -> None:
    config = machine(2 * gpus, kv_gib, gpus=gpus, rates=(9.0, 6.0, 4.0, 1.0)[: 2 * gpus])
    load = poisson(config, 5, rate_rps, 60.0)
    rows = {name: ran(name, config, load, **fields)[0] for name, fields in WITHOUT.items()}
    assert set(rows["elastic"]["gpus"].to_pylist()) == {str(g) for g in range(gpus)}
    assert rows["muxserve"].equals(rows["elastic"])
    assert rows["prism"].equals(rows["elastic"])
    preempted = sum(rows["elastic"]["preemptions"].to_pylist())
    assert (preempted > 0) == (rate_rps > 4.0)  # with memory short and with memory ample


def test_quotas_are_what_the_pool_is_shared_by() -> None:
    config, rng = machine(2, 6.0), np.random.default_rng(5)
    load = jobs(config, np.sort(rng.uniform(0.0, 60.0, 720)), rng.random(720) < 0.2, rng)  # most are of one model
    rows = {quotas: ran("muxserve", config, load, quotas=quotas)[0] for quotas in ("none", "sequences", "bytes")}
    assert not any(a.equals(b) for a, b in combinations(rows.values(), 2))


def test_a_model_without_requests_sleeps_and_the_next_request_waits_for_it() -> None:
    # looks at 60, 120, 180: m1 was last active at 10 s, so that it sleeps from 120 s on; m0 is asked every 5 s
    config = replace(machine(2, 8.0), noise=0.0)
    arrival_s = sorted([*np.arange(0.0, 300.0, 5.0), 10.0, 200.0])
    model = [int(t in (10.0, 200.0) and k > 0 and arrival_s[k - 1] == t) for k, t in enumerate(arrival_s)]
    load = jobs(config, arrival_s, model, np.random.default_rng(1))
    load = replace(load, output_tokens=np.full(len(load), 20, np.int32))
    awake, never, _ = ran("elastic", config, load)
    slept, engine, _ = ran("elastic", config, load, idle_s=100.0)
    m1 = np.flatnonzero(load.model == 1)
    assert load.arrival_s[m1].tolist() == [10.0, 200.0]
    rung = quantities.ladder("h100")["sleep"]
    inst = next(inst for inst in engine.names.insts if inst.model == "m1")
    load_s = engine.cluster.profile.load_s(inst, "sleep")
    assert load_s > rung.fixed_s
    waited_s = np.array(slept["load_ns"].to_pylist()) / 1e9
    assert waited_s[m1[1]] == pytest.approx(load_s, rel=1e-6)
    assert np.delete(waited_s, m1[1]).max() == 0.0
    assert np.array(awake["load_ns"].to_pylist()).max() == 0
    assert (never.stats()["loads"], engine.stats()["loads"]) == (0, 1)
    assert (never.stats()["evicts"], engine.stats()["evicts"]) == (0, 1)


def test_sleep_has_the_seconds_of_kvcacheds_controller() -> None:
    """ovg-project/kvcached 001b7b8, controller/sleep_manager.py, SleepConfig."""
    released = {"idle_threshold_seconds": 300, "check_interval_seconds": 60}
    make = system.find("elastic")
    made: Any = make(Sim(machine(1, 8.0)).cluster, **make.presets["sleep"])
    assert (made.idle_s, made.check_s) == tuple(released.values())
    assert {"Evict", "Load.way:sleep"} <= made.uses  # level 1 keeps weights in host memory
    never: Any = make(Sim(machine(1, 8.0)).cluster, **make.presets["kvcached"])
    assert never.idle_s == 0  # auto_sleep_enabled is False


def test_a_busy_model_never_sleeps() -> None:
    # one request that decodes for longer than idle_s
    config = replace(machine(1, 8.0), noise=0.0)
    load = jobs(config, [0.0], [0], np.random.default_rng(1))
    load = replace(load, output_tokens=np.array([1000], np.int32))
    rows, engine, _ = ran("elastic", config, load, idle_s=2.0, check_s=1.0)
    assert rows["done_ns"].to_pylist()[0] > 5e9
    assert engine.stats()["evicts"] == 0
