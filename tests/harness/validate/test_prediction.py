"""Predictions: kept as they were written, held against runs, and made of requests that a command draws again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.policy.types import UserError
from harness.validate import prediction
from harness.validate.prediction import Cell
from traces import schema

KEPT = {  # sha256 of the TOML
    "max-min": "98044edd10bca4dfae9db5f4328cf970532e8fe710ff0352b00458546964c95a",
    "turns": "00144f349df94a4da4c8652e2b959b91dedf353747b4812d9682f65cb569d15b",
}


def test_no_prediction_is_edited() -> None:
    files = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in prediction.FOLDER.glob("*.toml")}
    assert files.items() >= KEPT.items()
    for name in files:
        path = prediction.FOLDER / f"{name}.toml"
        assert path.with_suffix(".md").read_text("utf-8") == prediction.page(path)
    with pytest.raises(UserError, match="is kept as it is; another law gets another name"):
        prediction.write("max-min")


def test_the_requests_of_the_campaign_are_what_the_command_draws(tmp_path: Path) -> None:
    again, kept = schema.read(prediction.draw(tmp_path / "ramps4.parquet")), schema.read(prediction.REQUESTS)
    assert again.equals(kept)
    assert kept.num_rows == prediction.MODELS * prediction.PEAK**2
    assert prediction.REQUESTS.stat().st_size < 10_000


def test_orders_that_held_are_counted() -> None:
    told = [Cell("a", 1.0, 0.9), Cell("b", 1.0, 0.5), Cell("c", 1.0, 0.895), Cell("a", 2.0, 0.1)]
    right = [Cell("a", 1.0, 0.8), Cell("b", 1.0, 0.7), Cell("c", 1.0, 0.2)]
    assert prediction.orders_held(told, right) == (1, 2)  # a > b; b < c did not hold; a and c had no order
    level = [Cell("a", 1.0, 0.8), Cell("b", 1.0, 0.795)]
    assert prediction.orders_held(told, level) == (0, 1)
    assert prediction.orders_held(told, []) == (0, 0)


def test_runs_of_the_campaign_are_held_against_it() -> None:
    def pair(label: str, attainment: float, models: str = "llama-3.1-8b*4") -> Any:
        spec = SimpleNamespace(label=label, rate_scale=4.0, models=models, trace="elsewhere/ramps4.parquet")
        return spec, attainment

    lines = prediction.compare([pair("static:equal", 0.5), pair("elastic", 0.8)])
    assert lines[0].startswith("max-min.toml (2026-11-28): 1 of 1 predicted orders held")
    assert lines[2] == "  elastic at 4: 91.1 % predicted, 80.0 measured"
    assert lines[3].startswith("turns.toml (2026-11-28): 1 of 1 predicted orders held")
    assert lines[5] == "  elastic at 4: 67.4 % predicted, 80.0 measured"
    assert prediction.compare([pair("elastic", 0.8, "llama-3.2-1b*4")]) == []
