"""The comparison of two trees of results: what it takes for equal, and that it finds every kind of change."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.rows import record, tidy
from tests.equal_tables import main

Line = dict[str, Any]


def line(x: float, seed: int, label: str, value: float | None, definition: str = "both") -> Line:
    run = {"run": f"{label}-0a1b2c3d", "label": label, "trace": "t", "rate_scale": x, "seed": seed, "slo": "5xP95"}
    says = {"definition": definition, "over": "pooled", "n": 100, "value": value}
    return {"panel": "1 a", "x": x, **run, **says}


def lines() -> list[Line]:
    every = [line(x, seed, label, 0.9 + 0.01 * seed) for x in (1.0, 2.0) for seed in (0, 1) for label in ("a", "b")]
    return [*every, line(1.0, 0, "a", None, "tpot"), line(2.0, 0, "b", float("inf"), "ttft_p50_s")]


def store(root: Path, study: str, rows: list[Line], beside: tuple[str, ...] = ("panel", "x")) -> Path:
    """Store a study's table; beside the tidy columns it has some of its own."""
    kinds = {"panel": pa.string(), "condition": pa.string(), "x": pa.float64()}
    plain = pa.schema([(name, kinds[name]) for name in beside] + list(record.plain(tidy.TABLE_SCHEMA)))
    path = root / study / f"{study}-{'0' * 8}" / record.SWEEP
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=plain), path)
    return root


def claims(root: Path, **changed: Any) -> Path:
    """Write a study's claims as a CSV of estimates."""
    root.mkdir(exist_ok=True)
    row = {"what": "ratio", "condition": "rate", "system": "a", "over": "b", "definition": "ttft", "value": 1.39,
           "low": "", "high": 2.29, "n": 5, "sign": "<", "verdict": "open"} | changed  # fmt: skip
    with (root / "fig.estimates.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return root


def test_a_tree_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = claims(store(tmp_path / "ref", "fig", lines()))
    assert main([str(root), str(root)]) == 0
    assert capsys.readouterr().out == "attainment of fig: 10 rows, equal\nestimates of fig: 1 rows, equal\n"


def test_names_of_runs_panels_and_folders_order_and_the_last_digits_do_not_count(tmp_path: Path) -> None:
    ref = store(tmp_path / "ref", "ablate-prism", lines())
    again = [
        row | {"run": "other", "condition": "another", "value": row["value"] and row["value"] * (1 + 1e-12)}
        for row in reversed(lines())
    ]
    twice = [*again, again[0]]  # a run that stands in two panels
    new = store(tmp_path / "new", "prism-ablations", [{k: v for k, v in row.items() if k != "panel"} for row in twice],
                ("condition", "x"))  # fmt: skip
    assert main([str(ref), str(new)]) == 0
    assert main([str(ref), str(new), "--rename", "ablate-prism=else"]) == 1


CHANGES: dict[str, Callable[[list[Line]], list[Line]]] = {
    "value 0.9 is 0.9000009": lambda rows: [rows[0] | {"value": 0.9000009}, *rows[1:]],
    "value None is 0.0": lambda rows: [row | ({"value": 0.0} if row["value"] is None else {}) for row in rows],
    "n 100 is 101": lambda rows: [rows[0] | {"n": 101}, *rows[1:]],
    "infeasible None is 'no room'": lambda rows: [*rows[:-1], rows[-1] | {"infeasible": "no room"}],
    "lacks x=1 label=a": lambda rows: rows[1:],
    "too much: x=4 label=a": lambda rows: [*rows, line(4.0, 0, "a", 0.5)],
    "lacks x=1 label=a trace=t": lambda rows: [rows[0] | {"trace": "u"}, *rows[1:]],
    "is new": lambda rows: [*rows, rows[0] | {"value": 0.5}],
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_planted_change_is_found_and_named(says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ref = store(tmp_path / "ref", "fig", lines())
    new = store(tmp_path / "new", "fig", CHANGES[says](lines()))
    assert main([str(ref), str(new)]) == 1
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"sign": ">"}, {"verdict": "agrees"}, {"low": 0.5}, {"high": 2.2900001}, {"n": 4}])
def test_a_claim_is_equal_in_value_interval_sign_and_verdict(changed: Line, tmp_path: Path) -> None:
    assert main([str(claims(tmp_path / "ref")), str(claims(tmp_path / "new", **changed))]) == 1


def test_the_interval_of_a_rate_ends_at_0_and_that_of_a_difference_does_not(tmp_path: Path) -> None:
    for what, status in (("claim crossing", 0), ("difference", 1)):
        ref = claims(tmp_path / f"ref {what}", what=what, low=-4.23)
        assert main([str(ref), str(claims(tmp_path / f"new {what}", what=what, low=0.0))]) == status


def test_measures_beyond_the_references_are_only_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ref = store(tmp_path / "ref", "fig", lines())
    new = store(tmp_path / "new", "fig", [*lines(), line(1.0, 0, "a", 3.0, "norm_mean_s")])
    assert main([str(ref), str(new)]) == 0
    assert "1 rows of measures that the reference has not: norm_mean_s pooled" in capsys.readouterr().out


def test_a_study_lies_anywhere_in_the_new_tree(tmp_path: Path) -> None:
    ref = store(tmp_path / "ref", "fig", lines())
    store(tmp_path / "new" / "deep", "fig", lines())
    assert main([str(ref), str(tmp_path / "new")]) == 0
    store(tmp_path / "new" / "deep", "ablations", lines())
    assert main([str(ref), str(tmp_path / "new"), "--rename", "fig=ablations"]) == 0


def test_a_study_that_is_missing_is_a_difference_and_so_is_nothing_at_all(tmp_path: Path) -> None:
    ref = store(tmp_path / "ref", "fig", lines())
    (tmp_path / "new").mkdir()
    assert main([str(ref), str(tmp_path / "new")]) == 1
    assert main([str(tmp_path / "new"), str(ref)]) == 1
