"""The engine on the processor: its memory, processes and runs in real time, of which no test asserts a duration."""

from __future__ import annotations

import math
import os
import signal
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
from harness.engines.costs.shapes import beyond_dense  # noqa: E402
from harness.engines.machine import Config, Served  # noqa: E402
from harness.engines.torch import cpu, nets  # noqa: E402
from harness.engines.torch.engine import Torch  # noqa: E402
from harness.engines.torch.kind import CPU  # noqa: E402
from harness.engines.torch.pages import Account, Arena  # noqa: E402
from harness.loop import system  # noqa: E402
from harness.loop.replay import replay  # noqa: E402
from harness.loop.system import ROOT  # noqa: E402
from harness.policy.types import MIB, Jobs, Plan  # noqa: E402
from harness.rows import record  # noqa: E402
from harness.run.execute import execute  # noqa: E402
from harness.run.resolve import resolve  # noqa: E402
from harness.run.spec import Spec  # noqa: E402
from workloads.models import shape, shapes  # noqa: E402

GRANULE = CPU.granule
DENSE = sorted(name for name, its in shapes().items() if beyond_dense(its) is None)

# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_shape_has_a_network_whose_parts_are_near_its_own(name: str) -> None:
    made = nets.net(shape(name))
    if name in {"llama-tiny", "llama-small"}:
        assert made.shape == shape(name)
        return
    assert made.shape.name == f"twin of {name}"
    assert made.weight_bytes < (400 if name == "opt-175b" else 160) * MIB  # 96 layers of 96 heads

    def parts(net: nets.Net) -> np.ndarray[Any, Any]:
        sizes = dict.fromkeys(("embed", "attn", "mlp"), 0)
        for tensor, size in nets.tensors(net):
            for part in sizes:
                sizes[part] += math.prod(size) * (part in tensor)
        return np.array(list(sizes.values())) / sum(sizes.values())

    assert np.abs(parts(made) - parts(nets.Net(shape(name)))).max() < 0.25
    ratio = made.shape.q_heads / made.shape.kv_heads
    assert ratio == shape(name).q_heads / shape(name).kv_heads


def test_prompts_are_tokens_of_the_vocabulary_and_differ() -> None:
    ids = [nets.prompt_ids(rid, 0, 500, 1000) for rid in range(3)]
    assert all(tokens.min() >= 0 and tokens.max() < 1000 for tokens in ids)
    assert np.array_equal(np.concatenate([nets.prompt_ids(1, 0, 77, 1000), nets.prompt_ids(1, 77, 500, 1000)]), ids[1])
    assert (ids[0] == ids[1]).mean() < 0.05
    assert len(np.unique(ids[2])) > 300


# ---------------------------------------------------------------- memory


def test_a_page_goes_from_one_model_to_another_without_a_copy() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, 4 * GRANULE)
    spaces = [cpu.Space(memory, 8 * GRANULE) for _ in range(2)]
    spaces[0].map(GRANULE, 2 * GRANULE, GRANULE)
    floats = GRANULE // 4
    spaces[0].tensor()[floats : 2 * floats] = 7.0
    spaces[0].unmap(GRANULE, GRANULE)
    spaces[1].map(5 * GRANULE, 2 * GRANULE, GRANULE)
    assert (spaces[1].tensor()[5 * floats : 6 * floats] == 7.0).all()
    for space in spaces:
        space.close()
    os.close(memory)


@pytest.mark.parametrize(("do", "ends"), [("", 0), ("space.unmap(0, 4096)", -signal.SIGSEGV)])
def test_what_is_not_mapped_cannot_be_read(do: str, ends: int) -> None:
    code = f"""
import os
from harness.engines.torch.cpu import Space
memory = os.memfd_create("test")
os.ftruncate(memory, 4096)
space = Space(memory, 4096)
space.map(0, 0, 4096)
{do}
float(space.tensor()[5])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert run.returncode == ends, run.stderr


@pytest.mark.parametrize("elastic", [False, True])
def test_memory_is_conserved_whatever_is_taken_and_given(elastic: bool) -> None:
    draw, arena = np.random.default_rng(3), Arena(8 * MIB, GRANULE)
    first, second = (Account(arena, nets.net(shape("llama-3.2-1b")), 16, buffer=CPU.buffer * elastic) for _ in range(2))
    held: list[tuple[Account, list[int]]] = []
    weights: list[list[int]] = []
    for _ in range(600):
        account, count = (first, second)[draw.integers(2)], int(draw.integers(1, 40))
        match draw.integers(4):
            case 0 | 1 if account.fits(count):
                blocks = account.take(count)
                assert not set(blocks) & {b for a, taken in held if a is account for b in taken}
                held.append((account, blocks))
            case 2 if held:
                account, blocks = held.pop(int(draw.integers(len(held))))
                account.give(blocks)
            case 3 if arena.free_bytes >= count * GRANULE:
                weights.append(arena.take(count * GRANULE))
            case 3 if weights:
                arena.give(weights.pop())
        used = first.used_bytes + second.used_bytes + GRANULE * sum(map(len, weights))
        assert arena.free_bytes + used == arena.size
        granules = [g for taken in weights for g in taken]
        for a in (first, second):
            granules += [
                at // GRANULE + k for page in a.mapped for at, size in a.runs(page) for k in range(size // GRANULE)
            ]
        assert len(granules) == len(set(granules))
    assert weights
    assert held


# ---------------------------------------------------------------- runs


def test_fifty_requests_of_two_models_under_static() -> None:
    n, draw = 50, np.random.default_rng(0)
    served = tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b"))
    config = Config(served, plan={m.name: Plan(25.0, 36.0, 8.0, "test") for m in served}, token_times=True)
    lengths = draw.integers(8, 65, n, np.int32), draw.integers(1, 17, n, np.int32)
    models, none = draw.integers(0, 2, n, np.int32), np.full(n, np.inf)
    made = Torch(config, {})
    try:
        policy = system.build(system.find("static"), made.cluster, {})
        outcome = replay(
            policy, made, Jobs(("a", "b"), np.sort(draw.uniform(0.0, 0.5, n)), models, *lengths, none, none)
        )
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
    trial = run("torch", cases()["squeezed"])
    assert trial is not None
    assert sum(row["preemptions"] for row in trial.rows) == trial.engine.stats()["preemptions"] > 0
    assert {row["state"] for row in trial.rows} == {"done", "failed"}  # some are longer than the limit


def test_a_run_by_its_spec_says_what_it_is(tmp_path: Path) -> None:
    spec = resolve(
        Spec(
            "static",
            engine="torch",
            trace="sample",
            models="llama-3.2-1b*2",
            gpus=1,
            window_s=0.5,
            warmup_s=0.1,
            drain_s=0.5,
            slo="",
        )
    )
    about = record.meta(execute(spec, tmp_path, ""))
    assert (about["skipped"], about["infeasible"], about["fidelity"]) == (None, None, "emulated")
    assert about["measured_on"]["torch"] == torch.__version__
    assert about["measured_on"]["llama-3.2-1b by"] == "twin of llama-3.2-1b, 2 layers of 128, 8/2 heads of 16"
    assert "SMs by sleeping" in about["measured_on"]["a GPU"]
    assert spec.measured_on.startswith("host ")


def test_the_process_of_a_run_never_imports_torch() -> None:
    code = """
import sys
from harness.engines.machine import Config, Served
from harness.engines.torch.engine import Torch
from workloads.models import shape
made = Torch(Config((Served("a", shape("llama-3.2-1b")),)), {})
made.cluster, made.view(), made.close()
made.ready()
made.close(), made.close()
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["False"]
