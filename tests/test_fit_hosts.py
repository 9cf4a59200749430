"""The replay by which host profiles are fitted: worked numbers, and the same times as the simulator's own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.actions import Admit, Load, Run
from harness.engines import cost
from harness.engines.fit_hosts import Case, Served, Times, errors, left_out, priced, replay, whole_requests
from harness.engines.sim import Config, Sim
from harness.engines.sim import Served as Model
from harness.types import Batch, Inst, Jobs, Shape

LLAMA = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192, True)
HOSTS = ("vllm-0.15", "vllm-0.12", "vllm-0.6")


def alone(host: cost.HostProfile, prompt: int, output: int) -> tuple[float, float]:
    """First token and end of a lone request."""
    row = priced(LLAMA, 1, host)
    first = host.api_in_s + cost.step_s(row, p=prompt, n=1, area=prompt * prompt / 2) + host.api_out_s
    return first, first + sum(cost.step_s(row, B=1, C=prompt + 1 + j) for j in range(output - 1))


@pytest.mark.parametrize("name", HOSTS)
def test_a_lone_request_takes_the_sum_of_its_steps(name: str) -> None:
    host = cost.host(name, "h100")
    first, whole = alone(host, 500, 20)
    got = replay(Served(500, 20, clients=1, rounds=3), priced(LLAMA, 1, host), host)
    assert got.ttft == pytest.approx(first)
    assert got.e2e == pytest.approx(whole, rel=1e-6)
    assert got.tpot == pytest.approx((whole - first) / 19, rel=1e-6)


def test_cached_tokens_are_attended_to_but_not_computed() -> None:
    host = cost.host("none", "h100")
    row = priced(LLAMA, 1, host)
    got = replay(Served(500, 1, clients=1, rounds=1, cached=496), row, host)
    assert got.ttft == pytest.approx(cost.step_s(row, p=4, n=1, area=4 * 498))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_waits_for_the_steps_scheduled_before_it(ahead: int) -> None:
    host = cost.host("none", "h100")._replace(lookahead_steps=ahead)
    row = priced(LLAMA, 1, host)
    ends = np.cumsum([cost.step_s(row, p=64, n=1, area=2048), *(cost.step_s(row, B=1, C=65 + j) for j in range(9))])
    arrival_s = np.array([0.0, (ends[2] + ends[3]) / 2])
    got = replay(Served(64, 10, arrival_s), row, host)
    joined = ends[3 + ahead]
    own = cost.step_s(row, B=1, C=68 + ahead, p=64, n=1, area=2048)
    assert got.ttft == pytest.approx((ends[0] + joined + own - arrival_s[1]) / 2)


@pytest.mark.parametrize("name", HOSTS)
def test_it_serves_as_the_simulator_does(name: str) -> None:
    host = cost.host(name, "h100")
    arrival_s = np.cumsum(np.random.default_rng(5).exponential(0.2, 40))
    n, far = len(arrival_s), np.full(len(arrival_s), math.inf)
    sim = Sim(Config((Model("m", LLAMA),), host=name))
    where = Batch(Inst("m", (0,)))
    for action in (Load(where.inst), Admit("m", where), Run(where)):
        sim.do(action)
    whole = np.ones(n, np.int32)
    sim.begin(Jobs(("m",), arrival_s, 0 * whole, 300 * whole, 40 * whole, far, far), frozenset(), False)
    while sim.poll(math.inf) is not None:
        pass
    R = sim.S.R
    got = replay(Served(300, 40, arrival_s, step_tokens=2048), priced(LLAMA, 1, host), host)
    assert got.ttft == pytest.approx(float(np.mean(R["first"] - arrival_s)) + host.api_out_s, rel=0.01)
    assert got.e2e == pytest.approx(float(np.mean(R["done"] - arrival_s)) + host.api_out_s, rel=0.01)


def test_a_fit_finds_the_constants_that_made_its_rows_and_leaves_groups_out() -> None:
    base = cost.host("vllm-0.12", "h100")._replace(host0=0.0, host1=0.0, scale_prefill=1.0)
    true = base._replace(host0=2e-3, host1=8e-5)
    runs = [Served(128, 64, clients=b, rounds=1) for b in (1, 4, 16, 64)]
    cases = [Case(LLAMA, 1, r, replay(r, priced(LLAMA, 1, true), true), (f"batch {r.clients}",)) for r in runs]
    fit = whole_requests(base, {"host0": 1e-3, "host1": 5e-5})
    found = fit(cases)
    assert found.host0 == pytest.approx(true.host0, rel=0.02)
    assert found.host1 == pytest.approx(true.host1, rel=0.02)
    rows, predicted = left_out(cases, fit)
    assert [c.run.clients for c in rows] == [1, 4, 16, 64]
    assert errors(rows, predicted)["e2e"]["p95"] < 0.01
    wrong = np.array([Times(*(1.1 * x for x in c.measured)) for c in rows])
    assert errors(rows, wrong)["e2e"] == {"median": 0.1, "p95": 0.1, "bias": 0.1, "n": 4}
