"""The workloads on which systems are checked, each small and difficult in one way, and their simulated machines."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines import machine
from harness.engines.costs import quantities, shapes
from harness.engines.machine import Config, Served
from harness.policy.types import KEPT_PAGES, Jobs, Plan
from workloads.models import shape


class Case(NamedTuple):
    """A workload on a simulated machine, and the difficulties that a system meets in it."""

    config: Config
    jobs: Jobs
    ample: bool = True  # memory for every request: none may fail
    refuse: int = 0  # the engine refuses about one action in this many; 0: none
    decision_s: float = 0.0
    control_s: float = 0.0
    size: int = 1  # how many times longer than its shortest form


IDLE = Config(())
SHAPE, MAX_TOKENS = "llama-3.2-1b", 8192  # small: 2.3 GiB of weights, 32 KiB of KV a token


def _models(n: int, tp: Mapping[int, int] | None = None, max_tokens: int = MAX_TOKENS) -> tuple[Served, ...]:
    small = shape(SHAPE)._replace(max_tokens=max_tokens)
    return tuple(Served(f"m{k}", small, (tp or {}).get(k, 1), ttft_slo_s=1.0, tpot_slo_s=0.05) for k in range(n))


def _case(
    name: str,
    seed: int,
    n: int,
    config: Config,
    *,
    span_s: float,
    prompt: tuple[int, int] = (16, 1024),
    output: tuple[int, int] = (2, 128),
    burst: int = 1,
    asked: int | None = None,
    **hard: Any,
) -> Case:
    """Draw a case of `n` requests over `span_s` seconds, in bursts of `burst`.

    Lengths are uniform in the ranges `prompt` and `output`. Only the first `asked` models have requests; if it is None,
    all have. `hard` sets further fields of the case.
    """
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
    names = tuple(m.name for m in config.models)
    arrival_s = np.sort(draw.uniform(0.0, span_s, -(-n // burst))).repeat(burst)[:n]
    model = draw.integers(0, asked or len(names), n, np.int32)
    prompts, outputs = (draw.integers(*bounds, n, np.int32, endpoint=True) for bounds in (prompt, output))
    plan = {
        m: Plan(float((model == k).sum()) / span_s, float(np.mean(prompt)), float(np.mean(output)), "check")
        for k, m in enumerate(names)
    }
    slo = (np.full(n, getattr(config.models[0], limit)) for limit in ("ttft_slo_s", "tpot_slo_s"))
    jobs = Jobs(names, arrival_s, model, prompts, outputs, *slo)
    return Case(replace(config, plan=plan, seed=seed), jobs, **hard)


def _tight(models: Sequence[Served], gpus: int, requests: float) -> Config:
    """Return a config whose GPUs just have the memory for the idle models and some longest requests of each model.

    `requests` is the number of these requests for each model; it may be a fraction.
    """
    m = models[0]
    process = machine.memory(Config((m,)), quantities.gpu("h100")).process_bytes[0]
    idle = shapes.weight_bytes(m.shape) + process + KEPT_PAGES * machine.granule_bytes(Config(()), m, True)
    each = idle + requests * m.shape.max_tokens * shapes.kv_token_bytes(m.shape)
    return Config(
        tuple(models), gpus=gpus, mem_fraction=-(-len(models) // gpus) * each / quantities.gpu("h100").mem_bytes
    )


def cases(seed: int = 0, size: int = 1) -> dict[str, Case]:
    """Return every case by name.

    `size` multiplies the number of requests and the duration of each case; 1 gives its shortest form.
    """
    three, n = _models(3), 32 * size
    two, tight = Config(three, gpus=2), _tight(_models(3, max_tokens=2048), gpus=2, requests=3)

    def case(name: str, config: Config = two, span_s: float = 1.0, **kind: Any) -> Case:
        return _case(name, seed, n, config, span_s=span_s * size, size=size, **kind)

    def crunch(name: str, config: Config, **kind: Any) -> Case:
        return _case(name, seed, 2 * n, config, span_s=0.2 * size, size=size, ample=False, **kind)

    return {
        "calm": case("calm", replace(two, noise=0.02), span_s=30.0),
        "one-gpu": case("one-gpu", Config(three)),
        "crowd": case("crowd", Config(_models(8), gpus=3, node_gpus=2)),
        "tensor-parallel": case("tensor-parallel", Config(_models(2, {0: 2}), gpus=2)),
        "overload": case("overload", replace(two, batch_cap=2), span_s=0.25),
        "pressure": crunch("pressure", tight, prompt=(64, 256), output=(1024, 1792)),
        "one-token": case("one-token", output=(1, 1)),
        "long-prompts": case("long-prompts", prompt=(5000, 8000)),
        "simultaneous": case("simultaneous", burst=8),
        "room": case("room", Config(_models(5, {0: 4, 1: 4}), gpus=12), span_s=200.0),
        "idle-model": case("idle-model", asked=2),
        "no-requests": case("no-requests")._replace(jobs=case("none").jobs.first(0)),
        "refused": case("refused", Config(_models(6), gpus=3), ample=False, refuse=4),
        "late": case("late", decision_s=0.05, control_s=0.02),
        "drift": _drifting(case("drift", Config(_models(4), gpus=3), span_s=60.0)),
        "spare-gpu": _hot(case("spare-gpu", Config(three, gpus=3), span_s=25.0)),
    }


def _drifting(case: Case) -> Case:
    """Return a case in which the most popular model changes over time.

    The requests are split into as many consecutive parts as there are models. In each part, 7 of 8 requests are for one
    model.
    """
    n, k = len(case.jobs), len(case.config.models)
    popular = np.arange(n, dtype=np.int32) * k // n
    return _to(case, np.where(np.arange(n) % 8 == 7, case.jobs.model, popular))


def _hot(case: Case) -> Case:
    """Return a case in which all requests after the first few are for one model, so other GPUs are idle for 20 s."""
    last = np.arange(len(case.jobs)) >= len(case.config.models)
    model = np.where(last, 0, np.arange(len(case.jobs)) % len(case.config.models))
    together = np.where(last, np.maximum(case.jobs.arrival_s, 1.0), 0.01 * np.arange(len(case.jobs)))
    return _to(case._replace(jobs=replace(case.jobs, arrival_s=np.sort(together))), model)


def _to(case: Case, model: NDArray[Any]) -> Case:
    """Return a case in which request k is for model number `model[k]`, with a forecast of each model's new rate."""
    span_s = float(case.jobs.arrival_s[-1])
    plan = {
        m: case.config.plan[m]._replace(rate_rps=float((model == k).sum()) / span_s)
        for k, m in enumerate(case.jobs.models)
    }
    return case._replace(jobs=replace(case.jobs, model=model.astype(np.int32)), config=replace(case.config, plan=plan))
