"""The engine on the processor: its model against itself, and runs in real time, of which no test asserts a duration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from harness.check.engine import run  # noqa: E402
from harness.check.engine_cases import cases  # noqa: E402
from harness.engines import llama  # noqa: E402
from harness.engines.machine import Config, Served, machine  # noqa: E402
from harness.loop import engine, system  # noqa: E402
from harness.loop.replay import replay  # noqa: E402
from harness.loop.system import ROOT  # noqa: E402
from harness.policy.types import Jobs, Plan  # noqa: E402
from harness.rows import record  # noqa: E402
from harness.run.execute import execute  # noqa: E402
from harness.run.resolve import resolve  # noqa: E402
from harness.run.spec import Spec  # noqa: E402
from tests.test_cli import ok  # noqa: E402
from workloads.models import shape  # noqa: E402


def step(kv: Any, *pieces: tuple[list[int], int, Any], seed: int = 0, first: int = 0) -> list[int]:
    """Take one step of requests (all tokens, those with KV, slots); contexts begin at a position `first`."""
    tokens, at, parts = list[int](), list[int](), []
    for ids, have, slots in pieces:
        parts.append((len(tokens), len(tokens) + len(ids) - have, slots[: len(ids)]))
        tokens += ids[have:]
        at += range(first + have, first + len(ids))
    with torch.inference_mode():
        return llama.forward(llama.weights(seed), torch.tensor(tokens), torch.tensor(at), parts, kv)


PROMPTS = ([5, 900, 31, 7, 7, 250], [1, 2, 3], [77])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_token_by_cached_kv_is_the_one_by_the_whole_context(prompt: list[int]) -> None:
    scattered = torch.tensor([40, 3, 17, 8, 25, 60, 1, 33, 2, 50, 12, 9])
    kv, ids = llama.pool(64), list(prompt)
    ids += step(kv, (ids, 0, scattered))
    for _ in range(4):
        (cached,) = step(kv, (ids, len(ids) - 1, scattered))
        (whole,) = step(llama.pool(64), (ids, 0, torch.arange(64)))
        assert cached == whole
        ids.append(cached)


def test_requests_that_step_together_get_what_each_gets_alone() -> None:
    kv, slots = llama.pool(96), [torch.arange(32 * k, 32 * k + 32) for k in range(3)]
    alone = [step(llama.pool(96), (ids, 0, where))[0] for ids, where in zip(PROMPTS, slots, strict=True)]
    first = step(kv, (PROMPTS[0], 0, slots[0]))
    after = [*PROMPTS[0], *first]
    mixed = step(kv, (after, len(PROMPTS[0]), slots[0]), (PROMPTS[1], 0, slots[1]), (PROMPTS[2], 0, slots[2]))
    assert first + mixed[1:] == alone
    assert mixed[0] == step(llama.pool(96), (after, 0, slots[0]))[0]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_only_the_distance_of_positions_counts(prompt: list[int]) -> None:
    """The law of rotary positions: attention turns queries and keys alike."""
    ids, slots = prompt * 3, torch.arange(32)
    near, far = (step(llama.pool(32), (ids, 0, slots), first=first) for first in (0, 50))
    assert near == far


def test_models_differ_by_their_weights() -> None:
    ids, slots = list(range(20)), torch.arange(32)
    assert (
        len({tuple(step(llama.pool(32), (ids[: k + 1], 0, slots), seed=seed)[0] for k in range(20)) for seed in (0, 1)})
        == 2
    )


def test_its_bytes_are_those_of_its_tensors() -> None:
    assert sum(w.numel() * w.element_size() for w in llama.weights(0)) == llama.WEIGHT_BYTES
    kv = llama.pool(7)
    assert kv.numel() * kv.element_size() == 7 * llama.KV_TOKEN_BYTES


def test_fifty_requests_of_two_models_under_static() -> None:
    n, draw = 50, np.random.default_rng(0)
    served = tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b"))
    config = Config(served, plan={m.name: Plan(25.0, 36.0, 8.0, "test") for m in served}, token_times=True)
    lengths = draw.integers(8, 65, n, np.int32), draw.integers(1, 17, n, np.int32)
    models, none = draw.integers(0, 2, n, np.int32), np.full(n, np.inf)
    jobs = Jobs(("a", "b"), np.sort(draw.uniform(0.0, 0.5, n)), models, *lengths, none, none)
    made = engine.find("torchcpu")(config, {}, machine(config))
    try:
        outcome = replay(system.build(system.find("static"), made.cluster, {}), made, jobs)
        (table,) = made.rows()
    finally:
        made.close()
    rows = table.to_pylist()
    assert outcome.refused == 0
    assert table.schema == record.SCHEMA
    assert [row["state"] for row in rows] == ["done"] * n
    assert [row["model"] for row in rows] == [("a", "b")[m] for m in models]
    for row, asked in zip(rows, lengths[1].tolist(), strict=True):
        assert (row["made_tokens"], len(row["token_ns"]), row["fidelity"]) == (asked, asked, "emulated")
        assert 0 <= row["arrival_ns"] <= row["admit_ns"] <= row["first_ns"] <= row["done_ns"]
        assert row["token_ns"] == sorted(row["token_ns"])
        assert row["token_ns"][-1] == row["done_ns"] - row["arrival_ns"] == sum(row[f"{w}_ns"] for w in record.WAITS)
        assert row["compute_ns"] > 0 == row["load_ns"]
    assert {row["gpus"] for row in rows} == {"0"}


def test_a_member_without_room_takes_that_of_the_latest() -> None:
    trial = run("torchcpu", cases()["squeezed"])
    assert trial is not None
    assert sum(row["preemptions"] for row in trial.rows) == trial.engine.stats()["preemptions"] > 0
    assert {row["state"] for row in trial.rows} == {"done", "failed"}  # some are longer than the limit


def test_a_run_by_its_spec_says_what_it_is(tmp_path: Path) -> None:
    spec = resolve(Spec("static", engine="torchcpu", trace="sample", models="llama-3.2-1b*2", gpus=1, window_s=0.5,
                        warmup_s=0.1, drain_s=0.5, slo=""))  # fmt: skip
    about = record.meta(execute(spec, tmp_path, ""))
    assert (about["skipped"], about["infeasible"], about["fidelity"]) == (None, None, "emulated")
    assert about["measured_on"]["torch"] == torch.__version__
    assert about["measured_on"]["every model a"] == "tiny"
    assert spec.measured_on.startswith("host ")
    skipped = record.meta(execute(resolve(Spec("static", engine="torchcpu", trace="sample", models="llama-3.2-1b*2",
                                               gpus=2, slo="")), tmp_path, ""))  # fmt: skip
    assert skipped["skipped"] == "2 GPUs"


def test_a_comparison_says_what_it_was_measured_on(tmp_path: Path) -> None:
    text = ok("compare", "--systems", "static,qlm", "--engine", "torchcpu", "--gpus", "1", "--models", "llama-3.2-1b*2",
              "--trace", "sample", "--slo", "absolute:ttft=9,tpot=9", "--seeds", "1", "--rate-scale", "1", "--no-plot",
              "--set", "window_s=1", "--set", "warmup_s=0.1", "-o", tmp_path)  # fmt: skip
    assert f"torch {torch.__version__}, every model a tiny · emulated" in text
    assert "h100" not in text.splitlines()[0]
    assert re.search("qlm.*cost table", text)


def test_it_imports_torch_when_it_is_made_ready() -> None:
    code = """
import sys
from harness.loop import engine
from harness.engines.machine import Config
made = engine.find("torchcpu")(Config(()), {}, None)
made.cluster, made.view(), made.close()
print("torch" in sys.modules, end=" ")
made.ready()
print("torch" in sys.modules)
made.close(), made.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["False", "True"]
