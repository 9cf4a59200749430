"""Runs of a large study lie in parts, many a file, under the same names, laws and kills as in folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness import load
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import parts, record
from harness.rows.parts import Partition
from harness.run import estimates, sweep
from harness.run.resolve import resolve
from tests.cases import cases
from tests.harness.rows.test_record import META, batch
from tests.harness.run.test_sweep import TINY, Heard, compared, files

GRID = [resolve(replace(TINY, system=name, seed=seed)) for name in ("static", "chunked") for seed in range(3)]
INTO = Partition("mine", "1-1", 600)  # a digit: at most 16 parts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results with a folder a run."""
    sweep.sweep(GRID, out := tmp_path_factory.mktemp("folders"), workers=1)
    return out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results with the same runs in parts."""
    sweep.sweep(GRID, out := tmp_path_factory.mktemp("packed"), workers=1, into=INTO)
    return out


@pytest.fixture
def mine(packed: Path, tmp_path: Path) -> Path:
    """Return results in parts that a test may change."""
    return shutil.copytree(packed, tmp_path / "out")


def kept(out: Path) -> dict[str, str]:
    """Return the digests of the files of results that equal specs share."""
    shared = {name: data for name, data in files(out).items() if not Path(name).name.startswith("_")}
    return {name: sha256(data).hexdigest() for name, data in shared.items()}


def test_runs_in_parts_read_as_those_in_folders(folders: Path, packed: Path) -> None:
    assert {path.parent.parent.name for path in packed.rglob("*.parquet")} == {"study=mine"}
    assert not list(packed.glob("static-*"))
    assert [run.name for run in record.runs(packed)] == [run.name for run in record.runs(folders)]
    for run in record.runs(folders):
        there = packed / run.name
        assert record.exists(there)
        assert record.read(there).equals(record.read(run))
        assert record.read(there, ["id", "first_ns"]).equals(record.read(run, ["id", "first_ns"]))
        assert record.meta(there) == record.whole(there) == record.meta(run)
        assert record.side(there)["requests"] == record.side(run)["requests"]
    assert not record.exists(packed / "static-00000000")
    with pytest.raises(UserError, match="no run here"):
        record.read(packed / "static-00000000")


def test_load_reads_parts_as_folders(folders: Path, packed: Path) -> None:
    a, b = load(folders), load(packed)
    assert a.runs.equals(b.runs)
    assert a.requests.frame().equals(b.requests.frame())
    lines = [of.scan().to_table(columns=["run", "id", "first_ns"]).to_pylist() for of in (a.requests, b.requests)]
    assert sorted(map(repr, lines[0])) == sorted(map(repr, lines[1]))
    assert len(lines[0]) == len(a.requests)
    for within in ("runs", "runs/study=mine", "runs/study=mine/shard=1-1"):
        assert load(packed / within).runs.equals(a.runs)
    run = record.runs(folders)[0].name
    assert load(packed / run).requests.of(run).equals(load(folders / run).requests.of(run))


def test_any_reader_takes_them_as_one_dataset(folders: Path, packed: Path) -> None:
    table = pq.read_table(packed / parts.DATASET)
    assert set(table["study"].to_pylist()) == {"mine"}
    assert set(table["shard"].to_pylist()) == {"1-1"}
    every = {run.name: record.read(run).num_rows for run in record.runs(folders)}
    names = table["run"].to_pylist()
    assert {name: names.count(name) for name in every} == every


def test_bytes_depend_on_the_runs_alone(packed: Path, tmp_path: Path) -> None:
    sweep.sweep(GRID[:2], tmp_path, workers=1, into=INTO)
    sweep.sweep(GRID[::-1], tmp_path, workers=2, into=INTO)
    assert kept(tmp_path) == kept(packed)


def test_what_is_current_is_not_run_again(mine: Path) -> None:
    before, heard = {path: path.stat().st_mtime_ns for path in mine.rglob("*")}, Heard()
    sweep.sweep(GRID, mine, workers=1, into=INTO, teller=heard)
    sweep.sweep(GRID, mine, workers=1, teller=heard)  # whether or not the study is still large
    assert heard.steps == [("runs", 6, 6), ("runs", 6, 6)]
    assert {path: path.stat().st_mtime_ns for path in mine.rglob("*")} == before


def test_a_stale_run_is_rewritten_without_its_neighbours_being_lost(packed: Path, mine: Path) -> None:
    for path in record.runs(mine)[:2]:
        record.restate(path, {"code_hash": "of older sources"})
    assert kept(mine) != kept(packed)
    heard = Heard()
    sweep.sweep(GRID, mine, workers=1, into=INTO, teller=heard)
    assert heard.steps[0] == ("runs", 4, 6)
    assert kept(mine) == kept(packed)


def test_runs_of_another_partition_are_rewritten_where_they_lie(packed: Path, mine: Path) -> None:
    record.restate(record.runs(mine)[0], {"code_hash": "of older sources"})
    sweep.sweep(GRID, mine, workers=1, into=Partition("mine", "2-7", 600))
    assert kept(mine) == kept(packed)


def test_a_stale_folder_stays_a_folder(folders: Path, tmp_path: Path) -> None:
    out = shutil.copytree(folders, tmp_path / "out")
    record.restate(out / GRID[0].folder, {"code_hash": "of older sources"})
    sweep.sweep(GRID, out, workers=1, into=INTO)
    assert files(out) == files(folders)


@cases("harm", ["cut", "flipped", "absent"])
def test_a_damaged_part_is_made_again(harm: str, packed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(packed, tmp_path / "out")
    path = max(out.rglob("*.parquet"), key=lambda path: len(parts.names(path)))
    data = path.read_bytes()
    if harm == "absent":
        path.unlink()
    else:
        path.write_bytes(data[:-100] if harm == "cut" else data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    parts.forget()
    sweep.sweep(GRID, out, workers=1, into=INTO)
    assert kept(out) == kept(packed)


class Stops(Heard):
    """A teller that interrupts after so many runs."""

    def progress(self, what: str, done: int, total: int, left: object = None) -> None:
        if done >= 2:
            raise KeyboardInterrupt


def test_an_interrupted_sweep_resumes(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(GRID, tmp_path, workers=1, into=INTO, teller=Stops())
    beside = list(INTO.staged(tmp_path).glob("*-*"))  # whole runs of a part that is not complete
    stood = len(set(parts.under(tmp_path))) + len(beside)
    assert beside
    assert stood >= 2
    heard = Heard()
    sweep.sweep(GRID, tmp_path, workers=1, into=INTO, teller=heard)
    # those beside the parts count from the start, and then each run as it ends
    assert [done for _, done, _ in heard.steps] == list(range(stood, len(GRID) + 1))
    assert kept(tmp_path) == kept(packed)


def test_two_calls_of_a_study_at_once_are_one_line(packed: Path, tmp_path: Path) -> None:
    class Rival(Heard):
        """A call that has stored each run just before this one does."""

        def progress(self, what: str, done: int, total: int, left: object = None) -> None:
            shutil.rmtree(INTO.staged(tmp_path), ignore_errors=True)

    with pytest.raises(UserError, match="another call runs the same study"):
        sweep.sweep(GRID, tmp_path, workers=1, into=INTO, teller=Rival())
    sweep.sweep(GRID, tmp_path, workers=1, into=INTO)
    assert kept(tmp_path) == kept(packed)


def test_few_folders_wait_for_their_parts(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MANY", 1)  # a part at a time
    waiting: list[int] = []
    write = record.write_part

    def counted(part: Path, runs: list[Path]) -> None:
        waiting.append(len(list(INTO.staged(tmp_path).iterdir())))
        write(part, runs)

    monkeypatch.setattr(record, "write_part", counted)
    sweep.sweep(GRID, tmp_path, workers=1, into=INTO)
    assert max(waiting) <= max(len(parts.names(path)) for path in packed.rglob("*.parquet"))
    assert kept(tmp_path) == kept(packed)
    assert not INTO.staged(tmp_path).exists()


def test_many_runs_are_read_part_after_part() -> None:
    names = [f"{name}-{digest}" for name in ("static", "chunked-x") for digest in ("3f9", "0a1", "3e2", "0b7")]
    order = sorted((Path("out", name) for name in names), key=sweep.part_order)
    assert [path.name.rpartition("-")[2][0] for path in order] == ["0"] * 4 + ["3"] * 4


def test_costs_are_learned_from_parts(packed: Path) -> None:
    assert estimates.Costs.of(packed).heard("chunked")


def test_a_study_of_many_runs_has_the_table_of_one_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = compared(tmp_path / "few", "static", "chunked")
    monkeypatch.setattr(parts, "MANY", 3)
    many = compared(tmp_path / "many", "static", "chunked")
    assert not list((tmp_path / "many").glob("static-*"))  # the bases, of dedicated, have folders
    assert list((tmp_path / "many").glob("dedicated-*"))
    assert many.table.equals(few.table)
    heard = Heard()
    again = compared(tmp_path / "many", "static", "chunked", teller=heard)
    assert again.table.equals(few.table)
    assert not heard.steps  # by its receipt
    part = next(path for path in (tmp_path / "many" / parts.DATASET).rglob("*.parquet"))
    part.unlink()
    parts.forget()
    compared(tmp_path / "many", "static", "chunked", teller=heard)
    assert any(done < total for what, done, total in heard.steps if what == "comparison")


@cases(
    ("runs", "shard", "digits"),
    [(10_001, "1-1", 2), (1_000_000, "1-1", 3), (1_000_000, "3-64", 2), (1_000_000, "3-1000", 1), (10**9, "1-1", 4)],
)
def test_a_part_holds_a_few_hundred_runs(runs: int, shard: str, digits: int) -> None:
    assert Partition("s", shard, runs).digits == digits


def test_a_run_without_rows_has_a_place_in_a_part(tmp_path: Path) -> None:
    for name, rows, facts in (
        ("a-1f", [batch(70_000)], META),
        ("b-1e", [], {"spec": {}, "skipped": "no room"}),
        ("c-10", [batch(3)], META),
    ):
        record.write(tmp_path / "staged" / name, rows, facts)
    runs = sorted((tmp_path / "staged").iterdir())
    part = tmp_path / "runs" / "study=s" / "shard=1-1" / "1.parquet"
    record.write_part(part, runs[:2])
    record.write_part(part, runs[2:])
    for run in runs:
        assert record.read(tmp_path / run.name).equals(record.read(run))
        assert record.meta(tmp_path / run.name) == record.meta(run)


SWEEP = """
from pathlib import Path
from tests.harness.rows.test_parts import GRID, INTO
from harness.run import sweep

def compare(out, workers):
    sweep.sweep(GRID, Path(out), workers=workers, into=INTO)
"""


CALLS = {"write": (2, 7), "replace": (1, 4, 7, 9), "fsync": (3, 20), "mkdir": (3,), "rmdir": (3, 8)}


@pytest.mark.full
@cases(("name", "n"), [(name, n) for name, counts in CALLS.items() for n in counts])
def test_killed_at_any_write_it_ends_with_the_same_bytes(name: str, n: int, packed: Path, tmp_path: Path) -> None:
    from tests.harness.run.test_kill import AT_CALL

    (path := tmp_path / "script.py").write_text(SWEEP + AT_CALL)
    command = [sys.executable, str(path), str(tmp_path / "out"), name, str(n)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, f"{name} was called fewer than {n} times"
    for run in filter(record.exists, (tmp_path / "out" / spec.folder for spec in GRID)):
        assert record.read(run).equals(record.read(packed / run.name))  # whole, or absent
    sweep.sweep(GRID, tmp_path / "out", workers=1, into=INTO)
    assert kept(tmp_path / "out") == kept(packed)
    assert not list((tmp_path / "out").rglob("*.part"))
