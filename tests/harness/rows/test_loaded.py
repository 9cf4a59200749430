"""Stored runs as frames: attainment at once, requests in parts; too many are refused before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import harness
from harness.policy.types import UserError
from harness.rows import loaded, record
from tests.bench import ok


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loaded")
    ok("compare", "--systems", "static,elastic", "--trace", "sample", "--models", "llama-3.2-1b*2", "--rate-scale",
       "1,8", "--seeds", "2", "--slo", "absolute:ttft=0.2,tpot=0.02", "--no-plot", "-o", out)  # fmt: skip
    return out


def test_runs_have_their_attainment(folder: Path) -> None:
    (sweep,) = (path.parent for path in folder.glob(f"*/{record.SWEEP}"))
    for path in (folder, sweep):
        runs = harness.load(path).runs
        assert sorted(zip(runs["label"], runs["x"], runs["seed"], strict=True)) == [
            (label, x, seed) for label in ("elastic", "static") for x in (1.0, 8.0) for seed in (0, 1)
        ]
        assert set(runs["sweep"]) == {sweep.name}
        row: Any
        for row in runs.to_dict("records"):
            rows = harness.load(path).requests.of(row["run"])
            inside = rows[(rows["arrival_s"] >= 0) & (rows["arrival_s"] < row["p_window_s"])]
            ttft = inside["first_s"] - inside["arrival_s"]
            tpot = (inside["done_s"] - inside["first_s"]) / (inside["output_tokens"] - 1).clip(lower=1)
            met = (inside["state"] == "done") & (ttft <= 0.2) & ((tpot <= 0.02) | (inside["output_tokens"] == 1))
            assert row["attainment"] == pytest.approx(met.mean())
            assert row["worst_model"] <= row["attainment"]


def test_requests_are_read_by_run_as_a_scan_or_whole(folder: Path) -> None:
    runs, requests = harness.load(folder)
    each = dict(requests)
    assert list(each) == list(runs["run"])
    whole, name = requests.frame(), runs["run"][0]
    assert len(whole) == len(requests) == sum(map(len, each.values())) == runs[["n_done"]].sum().item()
    assert whole[whole["run"] == name]["first_s"].tolist() == each[name]["first_s"].tolist()
    scan = requests.scan()
    assert scan.count_rows() == len(requests)
    assert scan.to_table(columns=["id"], filter=pc.field("run") == name).num_rows == len(each[name])
    few = harness.load(folder, ["id", "model"]).requests
    assert few.frame().columns.tolist() == ["id", "model", "run"]
    with pytest.raises(UserError, match='no run "static-0" here'):
        requests.of("static-0")


def test_more_than_the_limit_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,498,764 rows took 17.5 GB and were killed: their size is known from facts of the runs alone."""
    requests = harness.load(folder).requests
    monkeypatch.setattr(loaded.Requests, "__len__", lambda self: 20_498_764)
    monkeypatch.setattr(record, "read", None)
    with pytest.raises(UserError) as caught:
        requests.frame()
    text = str(caught.value)
    assert text.startswith("20,498,764 requests of ")
    assert "and the limit is 2 GB" in text
    assert "requests.scan()" in text
    assert "\n" not in text
