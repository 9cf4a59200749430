"""Long workloads: in pieces, with records in files, all comes out as in memory."""

from __future__ import annotations

import errno
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import spilled
from harness.policy.types import Jobs, Prefix, UserError
from harness.rows import record, scoring
from harness.run import score
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.spec import Spec
from harness.study.bases import slo_target
from tests.workloads.test_workloads import drawn, fixed
from traces import schema
from traces.load import Trace, trace
from workloads.build import SCALINGS, Scaling, build, plan, rate_rps, requests_seen

PIECE = 64


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let 100 requests be many."""
    patch.setattr(spilled, "MOST_HELD", 100)
    patch.setattr(spilled, "PIECE", PIECE)


def test_what_is_released_is_there_when_it_is_looked_at() -> None:
    rows = spilled.spilled(100_000, np.float64)
    assert not rows.any()
    for piece in spilled.pieces(len(rows), rows):
        rows[piece] = np.arange(piece.start, piece.stop)
    spilled.release(rows, None, np.zeros(3))
    assert np.array_equal(rows, np.arange(100_000))
    assert len(spilled.spilled(0, np.float64)) == 0


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="1,000,000,000 requests take 7"):
        spilled.spilled(1_000_000_000, np.float64)


# ------------------------------------------------------------------ workloads


def equal(a: Jobs, b: Jobs) -> None:
    assert a.models == b.models
    for field in fields(a)[1:]:
        assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s != "none"])
@pytest.mark.parametrize(("rate_scale", "fold", "window_s"), [(1.0, None, None), (2.5, 1, None), (0.4, 0, 700.0)])
def test_a_workload_in_pieces_is_that_of_a_whole(
    scaling: Scaling, rate_scale: float, fold: int | None, window_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    rows = ties(drawn(1000))
    slo = {"m0": (1.0, 0.1), "m2": (2.0, 0.2)}
    made = [
        build(source, fixed(), rate_scale=rate_scale, scaling=scaling, seed=3, window_s=window_s, fold=fold, slo=slo)
        for source in (rows, replace(rows, prefix=none(rows)))  # with prefixes it is taken as a whole
    ]
    assert len(made[0]) > 100
    equal(made[0], replace(made[1], prefix=None))


def ties(rows: Trace) -> Trace:
    """Let some requests of different streams come at one instant."""
    when = rows.arrival_s.copy()
    when[1:400:2] = when[0:399:2]
    return replace(rows, arrival_s=when)


def none(rows: Trace) -> Prefix:
    """Return prefixes of no block."""
    return Prefix(16, np.zeros(len(rows.model) + 1, np.int64), np.zeros(0, np.int64))


@pytest.mark.parametrize("origin", ["held-out", "window", "trace", "prefix"])
def test_plans_of_a_trace_in_pieces_are_those_of_a_whole(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn(1000)

    def told() -> object:
        return (
            plan(rows, fixed(), 2.0, origin, seed=4),  # type: ignore[arg-type]
            requests_seen(rows, fixed(), origin, 4),  # type: ignore[arg-type]
            rate_rps(rows, fixed(), 4, origin),  # type: ignore[arg-type]
        )

    whole = told()
    shorten(monkeypatch)
    assert told() == whole


# ------------------------------------------------------------------ traces


def written(path: Path, n: int = 1000, **other: Any) -> Path:
    """Write a canonical trace of two streams."""
    draw = np.random.default_rng(2)
    columns = {
        "request_id": np.arange(n),
        "arrival_s": np.sort(draw.uniform(0, 900, n)),
        "model": [f"s{k}" for k in draw.integers(0, 12, n)],
        "prompt_tokens": draw.integers(1, 500, n),
        "output_tokens": draw.integers(1, 50, n),
        "src_row": np.arange(n) + 2,
        **other,
    }
    schema.write(schema.table(columns, {"name": "mine", "span_s": 1000.0}), path)
    return path


def same(a: Trace, b: Trace) -> bool:
    names = [field.name for field in fields(a)]
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def test_a_trace_in_pieces_is_that_of_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "mine.parquet")
    whole = trace(str(path))
    shorten(monkeypatch)
    assert same(trace(str(path)), whole)
    assert trace(str(path)).longest_tokens == whole.longest_tokens
    shuffled = written(tmp_path / "other.parquet", request_id=np.random.default_rng(1).permutation(1000))
    assert np.array_equal(trace(str(shuffled)).arrival_s, whole.arrival_s)


BAD = [
    ({"arrival_s": np.r_[np.arange(900.0), 5.0, np.arange(99.0) + 900]}, "parquet:902.*earlier than the row before"),
    ({"prompt_tokens": np.r_[np.ones(700), 0, np.ones(299)].astype(int)}, "mine.parquet:702.*no tokens at all"),
    ({"request_id": np.r_[np.arange(990), 3, np.arange(9) + 2000]}, "parquet:992.*is 3, as in .*parquet:5 already"),
    ({"model": ["a"] * 800 + [""] * 200}, "mine.parquet:802.*no name"),
]


@pytest.mark.parametrize(("column", "message"), BAD, ids=[next(iter(column)) for column, _ in BAD])
def test_a_bad_row_of_any_piece_is_named_by_its_line(
    column: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    with pytest.raises(UserError, match=message):
        trace(str(written(tmp_path / "mine.parquet", **column)))


# ------------------------------------------------------------------ runs


@pytest.mark.parametrize("system", ["static", "prism", "swap"])
@pytest.mark.parametrize("drain_s", [None, 0.0])
def test_a_run_in_pieces_has_the_rows_of_a_whole(
    system: str, drain_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "mine.parquet", 3000)
    models = "llama-3.2-1b*8,llama-3.2-3b*4"
    asked = Spec(system, trace=str(path), models=models, gpus=2, rate_scale=2.0, scaling="rotate", drain_s=drain_s)
    asked = replace(asked, slo="absolute:ttft=1,tpot=0.1", window_s=600.0)
    spec = resolve(asked)
    whole = execute(spec, tmp_path / "whole", "x")
    shorten(monkeypatch)
    pieces = execute(spec, tmp_path / "pieces", "x")
    assert record.read(pieces).equals(record.read(whole))
    stats = [record.meta(run)["stats"] for run in (whole, pieces)]
    assert stats[0] == stats[1]


def test_scores_in_pieces_are_those_of_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "mine.parquet", 3000)
    asked = Spec("swap", trace=str(path), models="llama-3.2-1b*8,llama-3.2-3b*4", gpus=1, scaling="rotate")
    spec = resolve(replace(asked, slo="absolute:ttft=1,tpot=0.01"))
    run = execute(spec, tmp_path, "x")
    under = slo_target(spec, "absolute:ttft=1,tpot=0.01", tmp_path)
    whole = score.scorable("swap", run, under)
    monkeypatch.setattr(record, "ROW_GROUP", PIECE)
    again = execute(spec, tmp_path / "groups", "x")  # in row groups of a piece each
    shorten(monkeypatch)
    pieces = score.scorable("swap", again, under)
    assert isinstance(pieces.table, record.Pieces)
    assert len(list(pieces.table)) > 10
    want, got = scoring.score(whole), scoring.score(pieces)
    for name in ("definition", "over", "model", "n"):
        assert got[name].to_pylist() == want[name].to_pylist()
    for here, there in zip(got["value"].to_pylist(), want["value"].to_pylist(), strict=True):
        assert here == there if here is None or math.isinf(there) else here == pytest.approx(there, rel=1e-12)
    assert got["missed"].to_pylist() == want["missed"].to_pylist()
    counts = [score.by_model(folder, under, ["both"])["both"] for folder in (run, again)]
    assert all(np.array_equal(a, b) for a, b in zip(*counts, strict=True))
