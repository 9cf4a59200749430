"""Files that several machines write are whole or absent: other hosts, other PID namespaces, wrong clocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from harness.engines.sim import jit
from harness.policy.types import UserError
from harness.rows import record, whole
from tests.cases import cases
from tests.harness.rows.test_record import META, batch, names

Pods = Callable[[str], None]
DAY_S = 86_400


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    """Return a function that makes this process one of another machine, with the number that it always has."""
    return lambda name: monkeypatch.setattr(whole, "machine", lambda: name.ljust(12, "0"))


def test_a_pid_namespace_is_a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = whole.machine.__wrapped__()
    monkeypatch.setattr(whole, "_namespace", lambda: "pid:[1]")
    assert whole.machine.__wrapped__() != here


def test_two_pods_with_equal_process_numbers_write_at_once(tmp_path: Path, pods: Pods) -> None:
    def meanwhile() -> Iterator[pa.RecordBatch]:
        yield batch(10)
        pods("b")
        record.write(tmp_path / "run", [batch(10)], META)
        assert record.read(tmp_path / "run").num_rows == 10
        pods("a")

    pods("a")
    record.write(tmp_path / "run", meanwhile(), META)
    assert record.read(tmp_path / "run").num_rows == 10
    assert names(tmp_path) == ["run"]


def left_by(pods: Pods, machine: str, folder: Path, pid: int, age_s: float = 0.0) -> Path:
    """Lay what a killed writer leaves, changed so many seconds ago."""
    pods(machine)
    nest = folder / f".run.{whole.machine()}-{pid}-00c0ffee.part"
    (nest / "new").mkdir(parents=True)
    (nest / "new" / record.ROWS).write_bytes(b"half")
    for path in (*nest.rglob("*"), nest):
        os.utime(path, (time.time() - age_s,) * 2)
    return nest


DEAD = 4_194_305  # more than the kernel gives


@cases(
    ("machine", "pid", "age_s", "goes"),
    [
        ("here", DEAD, 0, True),  # of this machine: by its process table alone
        ("here", os.getpid(), 9 * DAY_S, False),
        ("other", DEAD, 0.5 * DAY_S, False),  # of others: by age alone
        ("other", os.getpid(), 2 * DAY_S, True),
        ("other", DEAD, -9 * DAY_S, False),  # by a clock that is ahead
    ],
)
def test_who_is_dead(machine: str, pid: int, age_s: float, goes: bool, tmp_path: Path, pods: Pods) -> None:
    nest = left_by(pods, machine, tmp_path, pid, age_s)
    pods("here")
    record.write(tmp_path / "run", [batch(1)], META)
    whole.clean(tmp_path)
    assert nest.exists() is not goes
    assert record.read(tmp_path / "run").num_rows == 1


def test_the_age_is_set_by_a_variable(tmp_path: Path, pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = left_by(pods, "other", tmp_path, DEAD, age_s=100)
    pods("here")
    monkeypatch.setenv(whole.AGE, "200")
    whole.clean(tmp_path)
    assert nest.exists()
    monkeypatch.setenv(whole.AGE, "50")
    whole.clean(tmp_path)
    assert names(tmp_path) == []
    monkeypatch.setenv(whole.AGE, "a day")
    with pytest.raises(UserError, match=f'{whole.AGE} is "a day", not a number of seconds'):
        record.write(tmp_path / "run", [], {})


def test_a_writer_whose_temporary_is_taken_away_ends_in_one_line(tmp_path: Path, pods: Pods) -> None:
    def meanwhile() -> Iterator[pa.RecordBatch]:
        yield batch(10)
        (nest,) = tmp_path.glob(".run.*.part")
        for path in (nest / "new" / record.ROWS, nest / "new", nest):
            os.utime(path, (0, 0))  # as a machine stamps it whose clock stands at 1970
        pods("b")
        whole.clean(tmp_path)
        pods("a")

    pods("a")
    with pytest.raises(UserError, match="its temporary folder was removed by a machine whose clock differs"):
        record.write(tmp_path / "run", meanwhile(), META, side={"x": 1})
    assert names(tmp_path) == []


def paused(monkeypatch: pytest.MonkeyPatch, n: int, then: Callable[[], object]) -> list[float]:
    """Return the pauses of this process, which take no time; in the n-th of them another does something."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == n:
            then()

    monkeypatch.setattr(time, "sleep", pause)
    return pauses


def test_a_reader_waits_for_the_writer_that_replaces_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, away = tmp_path / "run", tmp_path / ".run.0-1-2.part"
    record.write(run, [batch(3)], META)
    away.mkdir()
    run.rename(away / "old0")
    pauses = paused(monkeypatch, 3, lambda: (away / "old0").rename(run))
    assert record.read(run).num_rows == 3
    assert len(pauses) == 3
    away.rmdir()
    with pytest.raises(UserError, match="no run here"):
        record.read(tmp_path / "nowhere")  # nobody writes it: nothing to wait for
    assert len(pauses) == 3


def test_a_file_of_another_machine_may_be_seen_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / record.ROWS
    pauses = paused(monkeypatch, 4, lambda: record.write(path.parent, [batch(1)], META))
    assert whole.seen(path)
    assert len(pauses) == 4
    monkeypatch.setenv(whole.LATE, "0")
    assert not whole.seen(tmp_path / "never" / record.ROWS)


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / {home} rw,relatime shared:3 - {kind} server:/home rw
"""


@cases(("kind", "local"), [("nfs4", False), ("lustre", False), ("ext4", True), ("overlay", True)])
def test_compiled_code_lies_on_a_disk_of_the_node(
    kind: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(home=tmp_path, kind=kind))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    folder = tmp_path / "checkout" / "engines"
    folder.mkdir(parents=True)
    home = jit.home(folder, str(mounts))
    if local:
        assert home == folder / "__pycache__"
        return
    assert home.parent == tmp_path / "tmp"
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o777)  # anybody could lay code there
    with pytest.raises(UserError, match="open to others"):
        jit.home(folder, str(mounts))
