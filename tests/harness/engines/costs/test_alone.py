"""Latencies of requests alone: the prices of their steps, one after another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.engines.costs.alone import alone_s
from harness.engines.costs.profile import row, step_s
from harness.engines.machine import Config, Served, machine
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.types import Plan
from tests.cases import cases
from tests.workloads.asked import asked
from workloads.models import shape

CONFIG = Config(models=(Served("small", shape("llama-3.2-1b")), Served("large", shape("llama-3.1-8b"))), gpu="h100")


@cases("chunk_tokens", [0, 512, 2048])
def test_alone_is_the_sum_of_its_steps(chunk_tokens: int) -> None:
    tables = machine(CONFIG).tables
    models, prompts, outputs = np.array([0, 1, 1, 0]), np.array([100, 5000, 2048, 1]), np.array([10, 1, 400, 2])
    prefill_s, decode_s = alone_s(tables, models, prompts, outputs, chunk_tokens)
    for i, (k, prompt, output) in enumerate(zip(models.tolist(), prompts.tolist(), outputs.tolist(), strict=True)):
        cost_row, done, seconds = row(tables, k), 0, 0.0
        while done < prompt:
            piece = min(chunk_tokens or prompt, prompt - done)
            area = piece * (done + piece / 2)
            seconds += step_s(cost_row, p=piece, n=1, area=area, out=int(done + piece == prompt))
            done += piece
        assert prefill_s[i] == pytest.approx(seconds)
        steps = [step_s(cost_row, B=1, C=prompt + j) for j in range(1, output)]
        assert decode_s[i] == pytest.approx(sum(steps), rel=1e-4, abs=1e-12)


def test_who_is_alone_computes_as_long_as_that() -> None:
    """Requests that meet nobody, of prompts in several pieces: the kernel's steps of each part are those alone."""
    k = np.arange(6)
    jobs = asked(("small", "large"), 100.0 * k, k % 2, 700 * (k + 1), 50 * k + 1)
    sim = Sim(replace(CONFIG, gpus=2, plan={m.name: Plan(1.0, 100, 50, "trace") for m in CONFIG.models}))
    replay(find("dedicated")(sim.cluster), sim, jobs)
    for row_ in (row_ for batch in sim.rows() for row_ in batch.to_pylist()):
        assert row_["ttft_compute_ns"] == pytest.approx(row_["alone_prefill_ns"], abs=3)
        later = row_["compute_ns"] - row_["ttft_compute_ns"]
        assert later == pytest.approx(row_["alone_decode_ns"], rel=1e-3, abs=3)
