"""Memory of an engine's process beside weights: against logged KV pools, and laws of its parts."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers.caveats import departures
from harness.engines.costs import process, quantities
from harness.engines.costs.process import Layout, Parts
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import Config, Served, cluster, memory
from harness.engines.sim.engine import Sim
from harness.policy.types import GIB, MIB, Inst, UserError
from harness.rows import record, scoring
from harness.rows.setting import machine
from harness.run import score
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict
from harness.study.bases import slo_target
from plots import style
from tests.cases import cases
from workloads.models import shape

SHAPES = {"llama-3.1-70b": "llama-3.3-70b"}  # equal dimensions
NAMES = st.sampled_from(["llama-2-7b", "nemo-12b", "llama-3.2-1b", "phi-2", "gemma-2b"])
TOKENS, SEQS = st.integers(1, 16384), st.integers(1, 1024)
PROCESSES = st.lists(
    st.tuples(st.builds(Parts, st.integers(0, 4 * GIB), st.integers(0, 2 * GIB)), st.sampled_from([1, 2])),
    min_size=1,
    max_size=12,
)


def test_logged_kv_pools(measured_dir: Path) -> None:
    """vLLM 0.15.1 on H100: the pool of each row within 1 %, at the batch cap that the bench defaults to."""
    with (measured_dir / "single" / "kv_pools.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row in rows:
        tp, dims = int(row["tp"]), shape(SHAPES.get(row["model"], row["model"]))
        fraction, chunk = float(row["gpu_memory_utilization"]), int(row["max_num_batched_tokens"])
        config = Config((Served("m", dims, tp),), gpu=row["gpu"], gpus=tp, mem_fraction=fraction, chunk_tokens=chunk)
        held = memory(config, quantities.gpu(row["gpu"]))
        pool = held.gpu_bytes - held.process_bytes[0] - weight_bytes(dims, tp)
        logged = int(row["kv_blocks"]) * int(row["block_tokens"]) * kv_token_bytes(dims, tp)
        assert pool == pytest.approx(logged, rel=0.01), row["model"]


def test_worked_numbers() -> None:
    """Llama-2-7B, 2,048 tokens, 256 sequences: 256 x 32,000 x 38 B of the sampler beside 16 MiB of hidden states."""
    parts = process.parts(shape("llama-2-7b"), 1, 2048, 256, graphs=True)
    assert parts.inside == process.LIBRARIES + 2048 * 2 * 4096 + 256 * 32000 * 38
    assert parts.outside == process.CONTEXT + 32 * 16 * MIB
    wide = process.parts(shape("llama-2-7b"), 1, 8192, 256, graphs=False)
    assert wide.inside == process.LIBRARIES + 8192 * 2 * (4096 + 4096 + 3 * 11008)  # the FFN is wider than the sampler
    assert wide.outside == process.CONTEXT


@given(NAMES, TOKENS, TOKENS, SEQS, SEQS, st.booleans())
def test_monotone(name: str, tokens: int, more: int, seqs: int, most: int, graphs: bool) -> None:
    """A larger budget, batch cap or vocabulary, or graphs, never takes less; tensor parallelism splits the layer."""
    dims = shape(name)
    base = process.parts(dims, 1, tokens, seqs, graphs)
    assert process.parts(dims, 1, max(tokens, more), seqs, graphs).inside >= base.inside
    assert process.parts(dims, 1, tokens, max(seqs, most), graphs).inside >= base.inside
    assert process.parts(dims._replace(vocab=2 * dims.vocab), 1, tokens, seqs, graphs).inside >= base.inside
    assert process.parts(dims, 1, tokens, seqs, True).outside >= base.outside
    if not dims.q_heads % 2:
        pair = process.parts(dims, 2, tokens, seqs, graphs)
        assert pair.inside <= base.inside
        assert pair.outside == base.outside + process.COLLECTIVES


@given(PROCESSES, st.integers(1, 8), st.sampled_from(process.LAYOUTS), st.floats(0.5, 0.99))
def test_nothing_beyond_the_card(
    processes: list[tuple[Parts, int]], gpus: int, layout: Layout, fraction: float
) -> None:
    """Never more than the share asked for; contexts cost nothing while the rest of the card holds them."""
    card = 80 * GIB
    held = process.memory(card, fraction, processes, gpus, layout)
    assert 0 <= held.gpu_bytes <= int(card * fraction)
    assert len(held.process_bytes) == len(processes)
    inside, outside = [parts.inside for parts, _ in processes], [parts.outside for parts, _ in processes]
    if layout == "kept":
        assert held.process_bytes == tuple(inside)
        assert held.gpu_bytes == min(int(card * fraction), card - sum(outside))
    if layout == "gpu":
        assert not any(held.process_bytes)
        assert held.gpu_bytes == min(int(card * fraction), card - max(outside)) - max(inside)
    if layout == "pair":
        assert held.process_bytes == tuple(2 * x for x in inside)


@given(PROCESSES, st.integers(1, 8))
def test_layouts_in_order(processes: list[tuple[Parts, int]], gpus: int) -> None:
    """More processes leave no more: one a GPU, one a model, two a model; and one a model on every GPU."""
    gpu, model, pair, kept = (
        process.memory(80 * GIB, 0.9, processes, gpus, x) for x in ("gpu", "model", "pair", "kept")
    )
    assert pair.gpu_bytes <= model.gpu_bytes
    if gpus > max(tp for _, tp in processes):
        assert kept.gpu_bytes <= model.gpu_bytes + GIB
    largest = max(range(len(processes)), key=lambda k: processes[k][0].inside)
    assert gpu.gpu_bytes >= kept.gpu_bytes - kept.process_bytes[largest]  # the largest model finds as much or more


def test_policy_and_engine_count_the_same_bytes() -> None:
    """A model takes of a GPU what the policy reads of it; under one process a GPU its weights alone."""
    config = Config((Served("m", shape("llama-3.1-8b")), Served("n", shape("mistral-7b"))), gpus=2)
    for layout in process.LAYOUTS:
        engine = Sim(config, {"process": layout})
        engine.names.inst_row(Inst("n", (1,)))
        assert int(engine.S.insts["footprint"][-1]) == engine.cluster.models["n"].weight_bytes
        assert {gpu.mem_bytes for gpu in engine.cluster.gpus} == set(engine.S.gpus["cap"][:2].tolist())
    shared = Sim(config, {"process": "gpu"}).cluster
    assert shared.models["n"].weight_bytes == weight_bytes(shape("mistral-7b"))
    every = Sim(replace(config, process="model"), {"process": "gpu"}).cluster
    assert every.models["n"].weight_bytes > shared.models["n"].weight_bytes


def test_given_bytes_replace_the_formula() -> None:
    spec = Spec("static", models="heavy8", gpus=2, process_bytes=GIB, chunk_tokens=2048)
    models = Setup(resolve(spec)).cluster.models
    assert models["nemo-12b/1"].weight_bytes == weight_bytes(shape("nemo-12b")) + GIB
    more, fewer = (Setup(replace(spec, process_bytes=None, batch_cap=cap)).cluster.models for cap in (256, 64))
    assert all(more[m].weight_bytes > fewer[m].weight_bytes for m in more)


@cases("system", ["static", "muxserve"])
def test_processes_too_large_are_infeasible(system: str, tmp_path: Path) -> None:
    """Processes of 4 GiB leave no room for eight models on two GPUs: a run without rows, and with the reason."""
    spec = Spec(system, models="heavy8", gpus=2, trace="sample", window_s=5.0, warmup_s=0.0, drain_s=5.0)
    full = execute(resolve(replace(spec, process_bytes=4 * GIB)), tmp_path, "code")
    assert record.meta(full)["infeasible"]
    assert not len(record.read(full))
    held = execute(resolve(replace(spec, process_bytes=GIB // 2)), tmp_path, "code")
    assert record.meta(held)["infeasible"] is None


def test_a_model_that_fits_no_gpu_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"needs \d+\.\d GiB on each GPU, h100 has 71\.\d"):
        resolve(Spec("static", models="llama-3.3-70b", gpus=2))


def test_links_are_the_cards_unless_given() -> None:
    config = Config((Served("m", shape("llama-3.1-8b")),))
    usual, slow = cluster(config).profile, cluster(replace(config, pcie_gbps=10.0)).profile
    size = weight_bytes(shape("llama-3.1-8b"))
    inst = Inst("m", (0,))
    longer_s = slow.load_s(inst, "host") - usual.load_s(inst, "host")
    assert longer_s == pytest.approx(size / 10e9 - size / quantities.gpu("h100").h2d)
    assert slow.move_s(GIB, 0, 1) == usual.move_s(GIB, 0, 1)
    fast = cluster(replace(config, gpus=16, nvlink_gbps=900.0, net_gbps=50.0, disk_gbps=6.0)).profile
    assert fast.move_s(9 * 10**9, 0, 1) == pytest.approx(0.01)
    assert fast.move_s(10**9, 0, 8) == pytest.approx(0.02)
    assert fast.load_s(inst, "disk") == pytest.approx(quantities.ladder("h100")["disk"].fixed_s + size / 6e9)


def test_processes_and_links_are_part_of_a_run() -> None:
    """They are in captions where they are off their default; wrong ones are refused."""
    base = Spec("static")
    assert machine(as_dict(base)) is None
    other = replace(base, process="model", process_bytes=3 * GIB // 2, pcie_gbps=25.0, disk_gbps=6.0)
    says = "one process a model for all, 1.5 GiB a process beside weights, PCIe 25 GB/s, disk 6 GB/s"
    assert machine(as_dict(other)) == says
    wrong: dict[str, Any] = {"process": "none", "process_bytes": -1, "pcie_gbps": 0.0}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name):
            replace(base, **{name: value})


@cases(
    ("system", "sharing", "departs"),
    [
        ("muxserve", "own", None),
        ("muxserve", "fluid", None),
        ("muxserve", "turns", "its paper has sharing=fluid, this run sharing=turns"),
        ("static", "turns", None),  # needs none of its own
        ("unshared", "turns", None),  # leaves it out in any run
    ],
)
def test_a_run_says_where_its_engine_is_not_the_papers(
    system: str, sharing: Literal["fluid", "turns"], departs: str | None, tmp_path: Path
) -> None:
    spec = Spec(system, models="light8", gpus=2, trace="sample", window_s=5.0, warmup_s=0.0, drain_s=5.0)
    spec = replace(spec, sharing=sharing)
    folder = execute(resolve(spec), tmp_path, "code")
    assert record.meta(folder).get("departs") == departs
    rows = scoring.scores([score.scorable("one", folder, slo_target(spec, "absolute:ttft=1,tpot=1", tmp_path))])
    assert set(rows["departs"].to_pylist()) == {departs}
    assert departures(rows) == ([f"not as published: one, {departs}"] if departs else [])
    text = style.departs(rows.to_pandas())
    assert text == (f"Not as published: one ({departs})." if departs else "")
    assert ("processes take turns on a GPU" in set(rows["machine"].to_pylist())) == (sharing == "turns")
