"""KV policies of PagedAttention's paper: what each reserves, how many requests that lets in; batches without joins.

Chunks of a buddy allocator are worked by hand in tests/harness/engines/sim/test_oracle.py; kernel and oracle agree on
worlds of contiguous KV in kernel/test_kernel.py beside it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import Config, Served, power_above, reserved_blocks
from harness.engines.sim.engine import Sim
from harness.loop.replay import missing
from harness.policy.types import Jobs, Prefix
from systems.contiguous import Contiguous
from tests.cases import cases
from tests.systems import by_hand
from tests.workloads.asked import asked
from workloads.models import shape

OPT = shape("opt-13b")
SLOTS = 15_700  # OPT-13B leaves this for KV on 40 GB (table 1 of the paper)


def config(slots: int = SLOTS, models: int = 1) -> Config:
    """Return GPUs that have so many KV slots each beside the weights of OPT-13B."""
    served = tuple(Served(f"m{k}", OPT) for k in range(models))
    pool = weight_bytes(OPT) + slots * kv_token_bytes(OPT)
    return Config(served, gpu="a100-40g", gpus=models, chunk_tokens=0, pool_bytes=pool)


def jobs(*rows: tuple[float, int, int]) -> Jobs:
    """Return a workload of one model from rows of (arrival, prompt, output)."""
    arrival_s, prompt, output = zip(*rows, strict=True)
    return asked(["m0"], arrival_s, 0, prompt, output)


def ran(on: Config, load: Jobs, preset: str | None = None, **fields: Any) -> pa.Table:
    """Return the rows of the system with a preset."""
    return by_hand.ran(Contiguous, on, load, **{**Contiguous.presets.get(preset or "", {}), **fields})[0]


def spans(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the times of first tokens and of ends, in ns."""
    return rows["first_ns"].to_numpy(), rows["done_ns"].to_numpy()


def test_tokens_that_are_reserved() -> None:
    """The paper's example (section 6.1): an output of 25 tokens has 32 positions under pow2."""
    load, c = jobs((0.0, 100, 25), (0.0, 100, 32), (0.0, 100, 33), (0.0, 2000, 500)), config()
    assert power_above(load.output_tokens.astype(np.int64)).tolist() == [32, 32, 64, 512]
    # blocks of 16: 2048 tokens are 128; a request longer than the model's longest sequence has what it needs
    assert reserved_blocks(c, "max", load).tolist() == [128, 128, 128, 256]
    assert reserved_blocks(c, "pow2", load).tolist() == [16, 16, 16, 256]  # 132, 132, 164, 2512 tokens
    assert reserved_blocks(c, "oracle", load).tolist() == [8, 16, 16, 256]  # 125, 132, 133, 2500 tokens


@cases(("kv", "batch", "held"), [("max", 7, 7 * 2048), ("pow2", 15, 15 * 673), ("oracle", 30, 30 * 499)])
def test_requests_that_fit_opt_13b(kv: str, batch: int, held: int) -> None:
    """Prompts of 161 and outputs of 338 tokens in 981 blocks: chunks of 128, of 64 (673 tokens) and of 32 (499)."""
    assert held <= SLOTS
    ttft, done = spans(ran(config(), jobs(*[(0.0, 161, 338)] * 40), kv))
    assert (ttft < done.min()).sum() == batch


def test_paged_takes_blocks_as_it_grows() -> None:
    rows = ran(config(), jobs(*[(0.0, 161, 338)] * 60), kv="paged")
    ttft, done = spans(rows)
    assert (ttft < done.min()).sum() > 30  # 11 blocks each at first
    assert sum(rows["preemptions"].to_pylist()) > 0
    assert sum(ran(config(), jobs(*[(0.0, 161, 338)] * 60), "max")["preemptions"].to_pylist()) == 0


def test_fastertransformer_forms_batches_of_the_earliest() -> None:
    """Batches of 7, each of which begins when the last of the one before has ended."""
    load = jobs(*[(0.001 * k, 100, 20 * (k % 7) + 10) for k in range(20)])
    rows = ran(config(), load, "fastertransformer")
    first, done = spans(rows)
    batches = [range(1), range(1, 8), range(8, 15), range(15, 20)]  # the first comes alone
    for before, after in pairwise(batches):
        assert done[list(before)].max() <= first[list(after)].min()
        assert first[list(after)].max() < done[list(after)].max()
    assert spans(ran(config(), load, "max"))[0].max() < first.max()


def test_fastertransformer_keeps_models_apart() -> None:
    load = jobs(*[(0.0, 100, 50)] * 8)
    both = replace(load, models=("m0", "m1"), model=np.arange(8, dtype=np.int32) % 2)
    rows = ran(config(models=2), both, "fastertransformer")
    assert set(rows["gpus"].to_pylist()) == {"0", "1"}
    assert set(rows["state"].to_pylist()) == {"done"}


@cases(("kv", "foresees"), [("max", False), ("pow2", True), ("oracle", True), ("paged", False)])
def test_policies_that_foresee_need_the_capability(kv: str, foresees: bool) -> None:
    engine = Sim(config(), {"kv": kv})
    policy = Contiguous(engine.cluster, kv=kv)
    assert ("view.oracle_tokens" in policy.uses) == foresees
    assert missing(policy, engine) == []
    policy.uses -= {"view.oracle_tokens"}
    assert missing(policy, engine) == ([f"option kv={kv} without view.oracle_tokens"] if foresees else [])


def test_a_prefix_cache_finds_nothing_in_contiguous_kv() -> None:
    load = jobs((0.0, 1024, 4), (10.0, 1024, 4))
    load = replace(load, prefix=Prefix(16, np.array([0, 64, 128]), np.arange(128) % 64))
    for kv, cached in (("max", False), ("paged", True)):
        first, second = spans(ran(config(), load, kv=kv))[0] - 1e9 * load.arrival_s
        assert (second < 0.9 * first) == cached
