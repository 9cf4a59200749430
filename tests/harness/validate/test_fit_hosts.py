"""Fits of host profiles: the constants that made the rows are found, and which rows a fit may use and names."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.calibrate.tables import dumps
from harness.engines.costs import quantities
from harness.validate import hosts as source
from harness.validate import unnamed_card
from harness.validate.loads import Batch, Closed, Poisson, Setting
from harness.validate.measured import Case, cases
from harness.validate.staggered import Load, Measured
from harness.validate.validate import ours
from workloads.models import shape

BASE = quantities.host("vllm-0.6", "h100")._replace(host0=0.0, host1=0.0, host_tp=0.0)
TRUE = BASE._replace(host0=2e-3, host1=8e-5)
START = {"host0": 1e-3, "host1": 5e-5}


def batches(host: quantities.HostProfile, sizes: Sequence[int] = (1, 4, 16, 64)) -> list[Case]:
    """Return batches as a host profile would have made them."""
    bare = list[Case]()
    for k, size in enumerate(sizes):
        setting = Setting("vllm-0.6", "h100", "llama-3.1-8b", 1, Batch(size, 128, 64))
        values = {"Batch Size": str(size), "Length": "128"}
        bare.append(Case("made.csv", k, setting, None, {}, False, values))
    return [c._replace(measured=metrics) for c, metrics in zip(bare, ours(bare, host), strict=True)]


def test_a_fit_finds_the_constants_that_made_its_rows_and_leaves_groups_out() -> None:
    synthetic = batches(TRUE)
    fit = source.whole_requests(BASE, START)
    got = fit(synthetic)
    assert got.host0 == pytest.approx(TRUE.host0, rel=0.02)
    assert got.host1 == pytest.approx(TRUE.host1, rel=0.02)
    alike = [c._replace(setting=c.setting._replace(model=m)) for c in synthetic for m in ("llama-3.1-8b", "mistral-7b")]
    sizes = {f"batch {b}" for b in (1, 4, 16, 64)}
    assert {g for c in alike for g in source.groups(c)} == {"llama-3.1-8b", "mistral-7b"} | sizes


def test_rows_are_predicted_by_fits_without_them() -> None:
    synthetic = batches(TRUE)
    seen: list[set[int]] = []

    def fit(some: Sequence[Case]) -> quantities.HostProfile:
        seen.append({c.row for c in some})
        return TRUE

    sizes = [c._replace(setting=c.setting._replace(model=f"{c.row}")) for c in synthetic]
    assert [source.groups(c)[0] for c in sizes] == ["0", "1", "2", "3"]
    rows, predicted = source.left_out(synthetic[1:], fit)
    # the model is all there is, then one size after the other
    assert seen == [set(), {2, 3}, {1, 3}, {1, 2}]
    assert [c.row for c in rows] == [1, 2, 3, 1, 2, 3]
    assert source.errors(rows, predicted)["throughput"] == {"median": 0.0, "p95": 0.0, "bias": 0.0, "n": 6}
    slower = [{k: v / 1.25 for k, v in metrics.items()} for metrics in predicted]
    assert source.errors(rows, slower)["throughput"] == {"median": 0.2, "p95": 0.2, "bias": -0.2, "n": 6}


def test_a_profile_keeps_its_errors_and_names_its_rows() -> None:
    synthetic = batches(TRUE, (1, 4))
    short = synthetic[0]._replace(setting=synthetic[0].setting._replace(load=Batch(200, 4000, 4000)))
    host, table = source.profile([*synthetic, short], lambda _: TRUE, "made", "-", ("Batch Size",))
    assert host == TRUE
    assert table["source"] == "made; 2 rows of 3"
    assert table["rows"] == [{"file": "made.csv", "Batch Size": [1, 4]}]
    assert table["held"] == {"median": 0.0, "p95": 0.0, "n": 4}
    assert set(table["held_parts"]) == {"throughput fit", "throughput held"}
    assert source.whole(synthetic[0]) == "throughput"


def loop(clients: int, engine: str = "vllm-0.12") -> Setting:
    return Setting(engine, "h100", "qwen-3-32b", 2, Closed(clients, 4096, 128))


def test_rows_that_the_host_does_not_decide_are_not_fitted() -> None:
    most = loop(1).kv_blocks * 16 // (4096 + 128)  # that fit its KV memory
    assert source.usable(loop(most))
    assert not source.usable(loop(most + 1))
    assert not source.usable(loop(1)._replace(load=None))
    old = Setting("vllm-0.6", "h100", "mistral-7b", 2, Batch(32, 64, 64))
    assert source.usable(old)  # 32 sequences x 16 heads
    assert not source.usable(old._replace(load=Batch(33, 64, 64)))
    assert source.usable(old._replace(load=Batch(33, 64, 64), model="llama-2-7b"))
    assert source.usable(old._replace(load=Batch(33, 64, 64), engine="vllm-0.15"))


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 3)), min_size=1))
def test_tables_hold_of_the_rows_that_they_are_made_of_and_of_no_others(chosen: set[tuple[str, int, int]]) -> None:
    columns = ("model", "batch", "length")
    setting = Setting("vllm-0.6", "h100", "llama-2-7b", 1, None)
    rows = [dict(zip(columns, map(str, row), strict=True)) for row in sorted(chosen)]
    made = source.tables([Case("f", 1, setting, None, {}, False, values) for values in rows], columns)
    held: list[Any] = [row for box in made for row in product(*(box[column] for column in columns))]
    assert sorted(held) == sorted(chosen)  # each of them once


def test_the_profiles_name_the_rows_that_they_were_fitted_on(measured_dir: Path) -> None:
    """Conditions that change which rows are usable want a new fit."""
    batch_cases = [c for c in cases(measured_dir) if c.setting.load is not None]
    assert [c.fitted for c in batch_cases] == [source.usable(c.setting) for c in batch_cases]


def test_what_went_into_a_fit_has_one_hash() -> None:
    """Conditions, loads and measurements count; names of files as they lie on a machine, and the simulator, do not."""
    (made,) = batches(TRUE, (4,))
    longer = made._replace(setting=made.setting._replace(load=Batch(4, 256, 64)))
    capped = made._replace(setting=made.setting._replace(flags=(("batch_cap", 2),)))
    slower = made._replace(measured={"throughput": 1.0})
    assert source.inputs([made]) == source.inputs([made])
    assert len({source.inputs([case]) for case in (made, longer, capped, slower)}) == 4


def test_the_table_carries_the_hash_of_what_it_was_fitted_with(measured_dir: Path) -> None:
    """Other rows, other conditions of ours or another table of kernels want `make fit-hosts`."""
    fitted_with = tomllib.loads((quantities.TABLES / "hosts.toml").read_text("utf-8"))["fitted_with"]
    assert fitted_with["inputs"] == source.inputs(cases(measured_dir))
    assert fitted_with["card"] == unnamed_card.inputs(unnamed_card.measured_ramps(measured_dir))


@pytest.mark.full
def test_a_refit_of_one_constant_gives_what_its_table_has(measured_dir: Path) -> None:
    """The simulator is none of the hash: whether it still gives the same constant is seen by fitting it."""
    host = quantities.host("vllm-0.15", "h100")
    got = source.first_token(host._replace(api_in_s=0.0))(source.stages(cases(measured_dir)))
    assert float(f"{got.api_in_s:.3g}") == host.api_in_s
    assert quantities.host("vllm-0.14", "h100").api_in_s == host.api_in_s


def test_the_newest_engine_is_fitted_on_stages() -> None:
    load = Poisson(((1.0, 9.0),), 16, 32, 8)
    run = Case("f", 1, Setting("vllm-0.15", "h100", "llama-2-7b", 1, load), None, {}, False, {})
    stage = run._replace(stage=0)
    assert source.stages([run, stage, stage._replace(setting=loop(1))]) == [stage]


def test_a_refit_that_gives_what_stands_changes_nothing_but_its_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = (quantities.TABLES / "hosts.toml").read_text("utf-8")
    hosts, turns = (tomllib.loads(committed)[name] for name in ("host", "turns"))
    shutil.copytree(quantities.TABLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(quantities, "TABLES", tmp_path)
    fitted = {name: dict(hosts[name]) for name in ("vllm-0.15", "vllm-0.12", "sglang-0.5", "vllm-0.6")}
    monkeypatch.setattr(source, "fit", lambda: fitted)
    monkeypatch.setattr(source, "measured_rows", lambda: batches(TRUE, (4,)))
    load = Load(shape("qwen-2.5-7b"), 6, 256, 1024, 943.0)
    monkeypatch.setattr(source, "measured_ramps", lambda: Measured(load, pd.DataFrame({"system": []})))
    card = dict(hosts["vllm-0.14"]["on"]["mi300x"])
    monkeypatch.setattr(unnamed_card, "tables", lambda _run, _day: (card, turns))

    def write() -> str:
        text = dumps(source.table().file)
        (tmp_path / "hosts.toml").write_text(text, "utf-8")
        return text

    first = write()
    file = tomllib.loads(first)
    assert file.pop("fitted_with")["inputs"] == source.inputs(batches(TRUE, (4,)))
    before = tomllib.loads(committed)
    before.pop("fitted_with")
    assert file == before
    assert list(file["host"]) == list(hosts)
    assert write() == first
    fitted["vllm-0.15"]["api_in_s"] = 1.0
    card["scale_decode"] = 2.0
    after = tomllib.loads(write())["host"]
    assert after["vllm-0.14"]["api_in_s"] == 1.0  # the next release follows
    assert after["vllm-0.14"]["on"] == {"mi300x": card}  # but for what its own rows gave
