"""The torch engine's cost table: the simulator counts by it what the engine counts; a user's path through both."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.calibrate import steps, tables
from harness.calibrate import torch as source
from harness.calibrate.rows import RAW, Journal, Measurement, measured, read
from harness.engines.costs import quantities, shapes
from harness.engines.machine import Config, Served
from harness.engines.torch import costs, nets
from harness.engines.torch.engine import Torch
from harness.engines.torch.kind import CPU, WAYS, kind
from harness.engines.torch.links import CHUNK_S
from harness.engines.torch.setting import Fields, rates
from harness.engines.torch.verdict import Share, verdict
from harness.loop import engine as engines
from harness.policy.types import MIB, Inst, Shape, UserError
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.validate import predicted, tiers, torch_timed
from tests.bench import ok
from tests.cases import cases
from workloads.models import shape

NAMES = ("llama-3.2-1b", "qwen-3-32b")


def journal(names: Sequence[str], wide: int = 1) -> list[Measurement]:
    """Return a journal in which steps are linear in tokens and contexts, and loads take 10 ms beyond their bytes."""
    lines = list[Measurement]()

    def add(what: str, at: dict[str, Any], seconds: float, **facts: float) -> None:
        lines.append(measured(what, at, [seconds], what, wide=wide, other_cores=0.0, **facts))

    for name in names:
        for tokens in torch_timed.PROMPTS:
            params: dict[str, Any] = {"shape": name, "tokens": tokens, "held": tokens in torch_timed.HELD_PROMPTS}
            add("prefill", params, 0.004 + 1e-4 * tokens + 1e-8 * tokens**2)
        for seqs, ctx in product(torch_timed.SEQS, torch_timed.CONTEXTS):
            params = {"shape": name, "seqs": seqs, "ctx": ctx, "held": False}
            add("decode", params, 0.004 + 2e-4 * seqs + 1e-6 * seqs * ctx, ctx_tokens=float(seqs * ctx))
        for count, seqs in product((2, 4), (0, 8)):
            add("beside", {"shape": name, "servers": count, "seqs": seqs}, 0.01 * count, alone_s=0.01)
    gbps = source.link_gbps(lines, named(names), wide)
    for name, (way, how) in product(names, WAYS.items()):
        size = nets.net(shape(name), wide=wide).weight_bytes
        rate = 1e9 * how.part * gbps["pcie_gbps" if how.source == "host" else "disk_gbps"]
        add("load", {"shape": name, "gbps": gbps["pcie_gbps"], "way": way}, 0.01 + size / rate, bytes=size)
    return lines


def named(names: Sequence[str]) -> dict[str, Shape]:
    return {name: shape(name) for name in names}


def written(folder: Path, names: Sequence[str], wide: int = 1) -> str:
    table, _ = source.table(journal(names, wide), named(names), wide)
    path = folder / "torch-cpu.toml"
    path.write_text(tables.dumps(table.file))
    quantities.forget()
    return str(path)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("table"), NAMES)


def card_rows(names: Sequence[str], known: quantities.GpuSpec) -> list[Measurement]:
    """Return a journal of a card: loads at its link's rate, no starts of processes, and kernels back to back."""
    kept = [row for row in journal(names) if row.at.get("way") not in {"cold", "reinit"}]
    rows = [r._replace(at={**r.at, "gbps": known.h2d / 1e9}) if r.quantity == "load" else r for r in kept]
    for name, (seqs, seconds) in product(names, ((1, 0.005), (8, 0.007))):
        at = {"shape": name, "phase": "decode", "seqs": seqs, "ctx": 128}
        rows.append(measured("kernels", at, [seconds], wide=1, other_cores=0.0, step_s=0.01))
    return rows


def test_a_card_has_a_table_of_its_own_from_what_lies_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.torch.kind.cards", lambda: ["NVIDIA H200"])
    monkeypatch.setenv("DEVICE", "cuda")
    assert torch_timed.measure(tmp_path, {}, print, Fields(), {}) == []  # writes down which card it is
    name, known = NAMES[0], quantities.gpu("h200")
    Journal(tmp_path / RAW).add(*card_rows([name], known))
    mine = tmp_path / "torch-h200.toml"
    assert f"wrote {mine} (--table takes it)" in ok("calibrate", tmp_path)
    made = quantities.machine(str(mine))
    assert made is not None
    assert (made.spec.h2d.value, made.spec.sms.value) == pytest.approx((known.h2d, known.sms))
    assert "cold" not in made.ladder
    assert made.co_run.decode.duty == {name: pytest.approx(0.6)}
    assert made.co_run.turns is not None
    assert made.co_run.turns.passes == quantities.quantities("h200")["co_run"]["passes"]
    assert made.served(shape(name)) == shape(name)  # as it is, not a twin
    assert "NVIDIA H200" in made.name
    raw = tmp_path / RAW
    raw.write_text("".join(line for line in raw.read_text().splitlines(keepends=True) if '"load"' not in line))
    with pytest.raises(UserError, match="no load was measured; the same command again measures it"):
        source.of_folder(tmp_path, shape)


def h2d(table: str) -> float:
    """Return a table's bytes a second from the host."""
    machine = quantities.machine(table)
    assert machine is not None
    return machine.spec.h2d.value


@cases(("name", "kv"), [(name, kv) for name in NAMES for kv in ("paged", "elastic")])
def test_the_simulator_counts_the_bytes_that_the_engine_counts(table: str, name: str, kv: str) -> None:
    spec = resolve(Spec("static", table=table, models=f"{name}*3", trace="sample", pool_bytes=256 * MIB, gpus=2))
    setup = Setup(spec)
    simulated, real = (
        engines.find(where)(setup.config, {"kv": kv}, setup.machine).cluster for where in ("sim", "torch")
    )
    for model, theirs in real.models.items():
        ours = simulated.models[model]
        assert ours.weight_bytes == pytest.approx(theirs.weight_bytes, abs=4096)  # in whole pages there
        assert (ours.kv_token_bytes, ours.kept_pages) == (theirs.kv_token_bytes, theirs.kept_pages)
        assert ours.page_bytes == theirs.page_bytes
    assert simulated.gpus[0].mem_bytes == real.gpus[0].mem_bytes == 256 * MIB
    assert simulated.gpus[0].sm_choices == real.gpus[0].sm_choices
    assert setup.config.piece_bytes / h2d(table) == pytest.approx(CHUNK_S, rel=0.01)
    inst = Inst(f"{name}/1", (0,))
    asks = {"step_s": (3, 500, 64), "prefill_s": (200, 64), "load_s": ("parallel",), "kernels_s": (2, 90)}
    for ask, arguments in asks.items():
        here, there = (getattr(cluster.profile, ask)(inst, *arguments) for cluster in (simulated, real))
        assert here == there


def test_the_table_has_the_steps_it_was_made_of_and_loads_their_extra(table: str) -> None:
    profile = Setup(resolve(Spec("static", table=table, models=NAMES[0], trace="sample", gpus=1))).cluster.profile
    inst = Inst(f"{NAMES[0]}/1", (0,))
    assert profile.step_s(inst, 8, 8 * 512) == pytest.approx(0.004 + 8 * 2e-4 + 8 * 512e-6, rel=0.02)
    assert profile.prefill_s(inst, 512) == pytest.approx(0.004 + 512e-4 + 512**2 * 1e-8, rel=0.05)
    size = nets.net(shape(NAMES[0])).weight_bytes
    assert profile.load_s(inst, "host") == pytest.approx(0.01 + size / h2d(table), rel=0.01)
    half = profile.step_s(inst, 8, 8 * 512, sms=66) / profile.step_s(inst, 8, 8 * 512)
    assert half == pytest.approx(2.0)  # its lane sleeps the rest


def test_a_load_over_a_decode_step_is_that_of_a_gpu(table: str) -> None:
    ratios = {ratio.shape: ratio for ratio in source.ratios(journal(NAMES), Path(table), named(NAMES))}
    largest = ratios["qwen-3-32b"]
    assert largest.measured == pytest.approx(largest.gpu, rel=source.RATIO_OFF)
    assert ", within 10 %; by this table " in largest.text
    assert "not within 10 %" in ratios["llama-3.2-1b"].text  # its step is the engine's own time, mostly


def test_links_are_those_of_the_run_then_of_the_table_then_the_usual_ones(table: str) -> None:
    assert rates(Config(()), CPU) == CPU.links
    by_table = rates(Config((), table=table), CPU)
    assert by_table["h2d"] == pytest.approx(h2d(table) / 1e9)
    assert rates(Config((), table=table, pcie_gbps=3.0), CPU) == by_table | {"h2d": 3.0, "d2h": 3.0}


@cases("name", ["gpt-oss-20b", "deepseek-v2-lite", "llama-3.1-8b:dtype=fp8", "gemma-3-1b", "qwen-1.5-moe-a2.7b"])
def test_a_model_that_the_engine_does_not_compute_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"has .*: engine torch serves (models in 16 bits|routed experts)"):
        nets.net(shape(name))


def test_a_mixture_has_a_twin_of_as_many_experts_on_cores_and_no_cost_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nets.net(shape("qwen-3-30b-a3b"))
    assert made.shape.experts == (made.shape.layers, 128, 8, 768 // 16, 0)
    experts = sum(math.prod(size) for name, size in nets.tensors(made) if ".experts." in name)
    assert experts == made.shape.layers * 128 * 3 * made.shape.hidden * 48
    with pytest.raises(UserError, match="qwen-3-30b-a3b is a mixture of experts: a table of steps has dense models"):
        source.networks(named(["qwen-3-30b-a3b"]))
    monkeypatch.setattr("harness.engines.torch.kind.cards", lambda: ["H200"])
    monkeypatch.setenv("DEVICE", "cuda")
    with pytest.raises(UserError, match="a mixture of experts: engine torch serves those with DEVICE=cpu"):
        kind(Config((Served("m", shape("qwen-3-30b-a3b")),)))


def test_a_wider_twin_has_wider_matrices_and_as_many_layers() -> None:
    thin, wide = (nets.net(shape("llama-3.1-8b"), wide=n).shape for n in (1, 4))
    assert wide == thin._replace(hidden=4 * thin.hidden, ffn=4 * thin.ffn, head_dim=4 * thin.head_dim)
    served = source.networks(named(["llama-3.1-8b"]), 4)["llama-3.1-8b"]
    assert shapes.weight_bytes(served) == pytest.approx(nets.net(shape("llama-3.1-8b"), wide=4).weight_bytes, rel=0.01)
    assert nets.net(served).shape == served  # by a table it is served as it stands there


def test_a_tier_leaves_out_who_takes_more_devices_than_there_are_cores(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    tier, left_out = tiers.runnable(tiers.plan("torch", table, full=False))
    assert tier.systems == tuple(name for name in tiers.EIGHT if name != "dedicated")
    assert left_out == ["dedicated is not run: it takes 4 devices, each a core, and there are 2"]
    runs = predicted.spans(tier, Path(table).parent)
    assert len(runs) == 7 * 2 * 5
    assert sum(span.least_s for span in runs) < 40 * 60
    full = tiers.plan("torch", table, full=True)
    assert {"unshared"}.isdisjoint(full.systems)
    assert len(full.systems) > 15
    assert (full.counts, full.window_s, full.judged, tier.judged) == ((4, 8), 60.0, True, False)


def test_figure_7_on_devices_takes_minutes(tmp_path: Path) -> None:
    file = written(tmp_path, ("nemo-12b", "llama-3.1-8b", "mistral-7b", "llama-3.2-3b"), 4)
    study = ("study", "fig7-torch", "--gpus", "2", "--table", file, "--dry-run", "-o", tmp_path)
    text = ok(*study, "--engine", "torch")
    assert "30 runs x (5 s of warm-up + 30 s + up to 20 s of drain): 17 to 28 min of real time" in text
    assert "skipped" not in text
    assert "real time" not in ok(*study)  # the simulator, by the same table


def test_memory_of_a_tier_holds_its_models_and_some_requests(table: str) -> None:
    tier = tiers.plan("torch", table, full=False)
    spec = tier.spec(4, "sim")
    net = source.networks(named([tier.model]))[tier.model]
    room = spec.pool_bytes or 0
    assert room >= 2 * (shapes.weight_bytes(net) + 8 * predicted.SERVED * shapes.kv_token_bytes(net))
    assert room < 3 * shapes.weight_bytes(net) + 16 * predicted.SERVED * shapes.kv_token_bytes(net) + 8192


def test_a_folder_of_other_networks_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / RAW).add(measured("load", {}, [1.0], "loads", wide=4))
    with (tmp_path / RAW).open("a") as file:
        file.write('{"cut')
    with pytest.raises(UserError, match="is of networks with wide=4; take another folder for wide=1"):
        torch_timed.Bench(tmp_path, {}, print, Torch(Config(()), {}).fields, {})


def test_what_policies_know_is_found_from_steps_that_it_tells() -> None:
    names, true = ("llama-tiny", "llama-3.1-8b", "qwen-2.5-14b", *NAMES), costs.numbers()
    made, numbers = {name: nets.net(shape(name)) for name in names}, [getattr(true, name) for name in costs.NAMES]
    rows = [
        row._replace(seconds=float(np.dot(costs.features(made[row.at["shape"]], source._work(row)), numbers)))
        for row in journal(names)
        if row.quantity in steps.PHASES
    ]
    table = source.known(rows, named(names), true.start_s)
    assert [table.file[name] for name in costs.NAMES] == pytest.approx(numbers, rel=0.01, abs=1e-12)
    assert (table.file["start_s"], table.file["fit"]["p95"]) == (true.start_s, 0.0)
    assert table.name == costs.TABLE.stem


@cases(
    ("here", "others", "devices", "lanes", "reasons"),
    [
        (0.04, 0.09, 2, [], []),
        (0.06, 0.0, 2, [], ["the run's own process took 6.0% of a core, the limit 5%"]),
        (0.0, 0.11, 2, [], ["other processes took 11.0% of a core, the limit 5% of each of 2"]),
        (0.0, 0.0, 4, [], ["4 devices share 2 cores"]),
        (0.0, 0.0, 2, [Share("a", 0.5, 0.55, 1.0)], []),
        (0.0, 0.0, 2, [Share("a", 0.5, 0.39, 1.0)], ["a got 39% of its device, asked were 50%"]),
        (0.0, 0.0, 2, [Share("a", 0.5, 0.03, 0.1)], []),  # too short to judge
    ],
)
def test_a_run_that_was_disturbed_is_invalid(
    here: float, others: float, devices: int, lanes: list[Share], reasons: list[str]
) -> None:
    judged = verdict(here, others, 2, devices, lanes)
    assert judged["reasons"] == reasons
    assert judged["text"].startswith("invalid: " if reasons else "valid: own process ")


@pytest.mark.full
@pytest.mark.torch
def test_the_way_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    few = {
        "PROMPTS": (1, 2, 4, 8, 16, 32, 64),
        "SEQS": (1, 2, 4, 8),
        "CONTEXTS": (16, 64),
        "REPEATS": 1,
        "OUTPUT": 4,
        "BESIDE": (2,),
        "BESIDE_PROMPT": 32,
        "BESIDE_SEQS": (1,),
        "TRIES": 1,
    }
    for name, value in few.items():
        monkeypatch.setattr(torch_timed, name, value)
    monkeypatch.setattr(source, "CTX", 64)
    for way in ("disk", "sleep2", "naive", "reinit"):  # slow by their rates
        monkeypatch.delitem(WAYS, way)
    command = ("calibrate", "torch", "--models", "llama-3.2-1b", "-o", tmp_path)
    text = ok(*command)
    assert "a load over a decode step is " in text
    raw, rows = (tmp_path / RAW).read_text(), read(tmp_path / RAW)
    assert {row.quantity for row in rows} == {"prefill", "decode", "beside", "load"}
    for row in rows:  # no copy is faster than its link
        if row.quantity == "load" and row.at["way"] == "host":
            assert min(row.facts["all"]) >= row.facts["bytes"] / (1e9 * row.at["gbps"]) * (1 - 1e-6)
    file = tmp_path / "torch-cpu.toml"
    first = file.read_bytes()
    ok(*command)
    assert ((tmp_path / RAW).read_text(), file.read_bytes()) == (raw, first)  # nothing is done again
    check = (
        "validate", "--engine", "torch", "--table", file, "--systems", "static,qlm", "--loads", "70", "--seeds", "1",
        "--window-s", "1", "--again", "0", "--runs", tmp_path / "runs", "-o", tmp_path / "validate",
    )  # fmt: skip
    text = ok(*check)
    assert "no aim is judged in this tier" in text
    page = (tmp_path / "validate.md").read_text()
    assert "| 4 models, 70 % | static | 1 |" in page
    assert all((tmp_path / f"validate.{ending}").is_file() for ending in ("csv", "png", "pdf"))
    folders = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    ok(*check)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == folders  # all was kept
