"""The commands as functions, and the files to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import compare, size
from harness.cli.python import _trace as traced
from harness.policy.types import UserError
from harness.study.compare import filled
from harness.study.load import study
from tests.bench import bench
from traces.load import trace
from workloads import slo
from workloads.models import model_set
from workloads.usual import POOL_BYTES, TRACE, WORLD


def test_the_commands_are_functions_too(tmp_path: Path) -> None:
    slo = "absolute:ttft=1,tpot=1"
    common: dict[str, Any] = {"trace": "sample", "models": "llama-3.2-1b*8", "slo": slo, "out": tmp_path}
    compared = compare("prism,static", gpus=1, rate_scale=[1, 2], seeds=2, **common)
    runs = compared.runs
    assert list(runs.columns) == "run label x gpus seed infeasible skipped attainment mean_model worst_model".split()
    assert len(runs) == 2 * 2 * 2
    assert (runs["worst_model"] <= runs["mean_model"]).all()
    assert runs["attainment"].between(0, 1).all()
    assert set(runs["run"]) == {path.name for path in tmp_path.iterdir() if (path / "requests.parquet").is_file()}
    requests = compared.requests
    assert set(requests["label"]) == {"prism", "static"}
    assert not [name for name in requests.columns if name.startswith("p_")]
    answer = size(gpus=(1, 4), systems="prism,static", windows=1, grow=(2,), price={"h100": 2.5}, **common)
    assert answer.best is not None
    assert answer.sentence == answer.facts["sentence"]
    priced = answer.tried[answer.tried["gpu"] == "h100"]
    assert (priced["usd_day"] == 60.0 * priced["gpus"]).all()


def test_functions_have_the_defaults_of_the_commands() -> None:
    assert filled({}) == {**WORLD, "trace": TRACE, "pool_bytes": POOL_BYTES}
    assert filled({"gpu": "h100*2+l40s*4"}) == {**WORLD, "trace": TRACE, "gpu": "h100*2+l40s*4", "gpus": 6}
    assert filled({"models": "quant3"})["trace"] == model_set("quant3").trace
    assert filled({"models": "quant3", "trace": "sample", "gpus": 2}, ["trace"])["trace"] == model_set("quant3").trace
    assert [
        slo.in_full(text) for text in ("P95", "P95@l40s", "2xP95", "absolute:ttft=1,tpot=1")
    ] == "5xP95 5xP95@l40s 2xP95 absolute:ttft=1,tpot=1".split()
    assert slo.in_full("P95", 3) == "3xP95"


def test_a_log_is_read_from_python_too_and_stderr_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("timestamp,model,prompt_tokens,completion_tokens\n0,a,10,5\n1.5,b,20,6\n3,a,10,5\n")
    path = traced(str(log), None, tmp_path)
    assert list(trace(path).models) == ["a", "b"]
    assert path in capsys.readouterr().err
    assert traced("sample", None, tmp_path) == "sample"
    assert len(trace(traced(str(log), "3:zipf=1", tmp_path)).models) <= 3
    with pytest.raises(UserError, match="--spread splits logs of one stream and files"):
        traced("sample", "3", tmp_path)


def test_files_to_begin_with_are_read_as_what_they_are(tmp_path: Path) -> None:
    for name in ("classes.toml", "my-set.toml", "my-study.toml"):
        made = bench("new", tmp_path / name)
        assert made.exit_code == 0, made.output
        assert f"{name}" in made.stdout.splitlines()[-1]
    chosen = slo.resolve(slo.parse(f"classes:{tmp_path / 'classes.toml'}"), model_set(str(tmp_path / "my-set.toml")))
    assert chosen == {"chat": (0.5, 0.05), "code": (10.0, 0.2), "rag": (10.0, 0.2)}
    assert len(study(str(tmp_path / "my-study.toml")).condition) == 2
    assert "overwrites nothing" in bench("new", tmp_path / "classes.toml").stderr
    refused = bench("new", tmp_path / "mine.toml")
    assert (refused.exit_code, "classes.toml, set.toml, study.toml" in refused.stderr) == (2, True)
