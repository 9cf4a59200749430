"""A study that is done is not looked through again: a receipt stands for it while all that it rests on is as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.rows import memo, record, sealed, tidy, whole
from harness.run import sources
from harness.study import receipt
from harness.study.measure import Measured, measure
from tests.harness.run.test_sweep import SYSTEM, Heard, files
from tests.harness.study.test_measure import study, told
from traces import load

SMALL = """
paper = "A test"
systems = ["chunked", "%s"]
definitions = ["ttft", "tpot"]
slo = "2xP95"
warmup_s = 10.0
quick = { seeds = 2, window_s = 50.0, replayed_s = 50.0 }
spec = { trace = "%s", models = "llama-3.1-8b*3", gpus = 1 }
at = [1.0, 2.0]
condition = [{ name = "rates" }]
"""


class Opened:
    """Runs whose rows were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[Path] = set()
        held = sealed.intact

        def intact(path: Path, *, rows: bool) -> None:
            self.paths |= {path} if path.name == record.ROWS else set()
            held(path, rows=rows)

        monkeypatch.setattr(sealed, "intact", intact)
        record._facts.cache_clear()  # else what this process has read already would not be opened again


class Case:
    """A study of a system and a trace that are a user's files, done once."""

    def __init__(self, folder: Path) -> None:
        self.system, self.trace, self.out = folder / "mine.py", folder / "mine.parquet", folder / "out"
        self.system.write_text(SYSTEM % "")
        sample = load.present("sample")
        assert sample is not None
        self.trace.write_bytes(sample.read_bytes())
        for path in (self.system, self.trace):
            os.utime(path, (1.0, 1.0))
        self.study = study(folder, SMALL % (self.system, self.trace))
        self.first = self.again(Heard())

    def again(self, heard: Heard) -> Measured:
        return measure(self.study, self.out, workers=1, teller=heard)

    @property
    def receipt(self) -> Path:
        return self.first.folder / receipt.FILE

    @property
    def run(self) -> Path:
        """The rows of a run of the user's system."""
        return next(path for path in sorted(self.out.glob(f"*/{record.ROWS}")) if path.parent.name.startswith("mine-"))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_second_call_opens_no_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, heard, kept = Opened(monkeypatch), Heard(), files(case.out)
    again = case.again(heard)
    assert not opened.paths
    total = len(case.first.about.runs)
    assert heard.lines[-1] == f"{total} of {total} points current, nothing to do"
    assert files(case.out) == kept
    assert again.table.equals(case.first.table)
    assert again.about == case.first.about
    assert (again.folder, again.target, again.reference) == (case.first.folder, case.first.target, case.first.reference)
    assert told(again, every=True) == told(case.first, every=True)
    assert again.tasks == case.first.tasks  # read where they are asked for
    assert opened.paths


def test_what_a_writer_left_that_was_killed_once_its_file_was_in_place_goes_with_the_next_call(case: Case) -> None:
    left = case.first.folder / f".{receipt.FILE}.{whole.machine()}-{2**22 + 1}-ab.part"  # no process has this number
    left.mkdir()
    case.again(Heard())
    assert not left.exists()


def cut(path: Path, n: int) -> None:
    path.write_bytes(path.read_bytes()[:-n])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CHANGES: Mapping[str, Callable[[Case, pytest.MonkeyPatch], object]] = {
    "system": lambda case, _: case.system.write_text(SYSTEM % "" + "\nEDITED = True\n"),
    "source": lambda _, patch: patch.setattr(sources, "tree", lambda *_: "edited"),
    "trace": lambda case, _: os.utime(case.trace, (2.0, 2.0)),
    "damaged run": lambda case, _: damage(case.run),
    "lost run": lambda case, _: case.run.unlink(),
    "table": lambda case, _: cut(case.first.folder / record.SWEEP, 1),
    "killed": lambda case, _: case.receipt.unlink(),  # it is written last
    "cut": lambda case, _: cut(case.receipt, 10),
    "earlier": lambda case, _: case.receipt.write_text(
        json.dumps({"call": json.loads(case.receipt.read_bytes())["call"]})
    ),
}


@pytest.mark.parametrize("change", [*CHANGES])
def test_whatever_changed_is_looked_through(case: Case, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    CHANGES[change](case, monkeypatch)
    opened, heard = Opened(monkeypatch), Heard()
    again = case.again(heard)
    assert opened.paths
    assert bool(heard.ran) == (change in {"system", "damaged run", "lost run", "table"})  # the last is scored again
    if change != "system":
        assert again.table.equals(case.first.table)


def test_a_file_that_changes_meanwhile_is_not_vouched_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(case.system, (2e9, 2e9))
    opened = Opened(monkeypatch)
    for _ in range(2):
        opened.paths.clear()
        assert case.again(Heard()).table.equals(case.first.table)
        assert opened.paths


def test_another_question_is_not_answered(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    fewer = measure(case.study.only(seeds=1), case.out, workers=1)
    assert fewer.about.seeds == 1
    assert opened.paths
    assert case.again(Heard()).about.seeds == 2


def test_a_source_that_changes_meanwhile_is_not_vouched_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.receipt.unlink()
    trees = iter(["before", "after"])
    monkeypatch.setattr(sources, "tree", lambda *_: next(trees))
    case.again(Heard())
    assert not case.receipt.exists()


def test_a_trace_that_comes_takes_the_place_of_its_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path / "none"))
    assert receipt._trace_file("arena-chat") is None
    (name,) = [source["path"] for source in load.manifest()["arena-chat"]["from"]][:1]
    there = tmp_path / "none" / name
    there.parent.mkdir(parents=True)
    there.touch()
    assert receipt._trace_file("arena-chat") == str(there)


def test_figures_are_drawn_where_something_changed(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, drawn = tmp_path / "figure.csv", list[int]()

    def draw() -> list[Path]:
        drawn.append(1)
        path.write_text(str(len(drawn)))
        return [path]

    def asked(*words: str) -> int:
        before = len(drawn)
        assert receipt.drawn(case.first.folder, words, draw) == [path]
        return len(drawn) - before

    assert asked("a") == 1
    assert asked("a") == 0
    assert asked("b") == 1
    path.write_text("mine, and longer")
    assert asked("b") == 1
    path.unlink()
    assert asked("b") == 1
    table = case.first.folder / record.SWEEP
    record.write_table(table, tidy.stored(table).slice(1), record.footer(table))
    assert asked("b") == 1
    monkeypatch.setattr(sources, "tree", lambda *_: "edited")
    assert asked("b") == 1
    assert asked("b") == 0


def test_a_table_is_read_once_as_long_as_it_lives() -> None:
    read: list[Any] = []

    @memo.once
    def work(table: pa.Table, name: str) -> int:
        read.append(name)
        return len(table)

    first, other = pa.table({"a": [1]}), pa.table({"a": [1]})
    assert [work(first, "x"), work(first, "x"), work(first, "y"), work(other, "x")] == [1, 1, 1, 1]
    assert read == ["x", "y", "x"]
    del first
    again = pa.table({"a": [1, 2]})  # may stand where the first one stood
    assert work(again, "x") == 2
