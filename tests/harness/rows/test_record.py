"""A run is whole or absent, and equal rows are equal bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise, takewhile
from pathlib import Path
from types import FrameType

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from harness.loop.interrupted import Terminated
from harness.policy.types import UserError
from harness.rows import loaded, parts, record, scoring, tidy, whole
from harness.rows.sealed import Damaged
from tests.cases import cases

META = {
    "spec": {"system": "prism", "seed": 3, "fields": {"tau": 0.1}, "slo_s": [["a", 1.0, float("inf")]]},
    "end_s": 9.5,
}


def batch(
    n: int, start: int = 0, words: tuple[str, ...] = ("b", "a", "unused"), tokens: bool = False
) -> pa.RecordBatch:
    """Return `n` made-up rows from id `start` on; ids alone decide the values."""
    at = np.arange(start, start + n)
    arrival = at * 1_000_003 - 60_000_000_000

    def coded(codes: np.ndarray, values: tuple[str, ...]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(values, pa.string()))

    done = at % 5 != 0
    columns = {
        "id": at,
        "model": coded(np.where(at % 3 == 0, words.index("a"), words.index("b")), words),
        "prompt_tokens": at % 700 + 1,
        "output_tokens": at % 90 + 1,
        "made_tokens": np.where(done, at % 90 + 1, 0),
        "arrival_ns": arrival,
        "admit_ns": pa.array(arrival + 5),
        "first_ns": pa.array(arrival + 90, mask=~done),
        "done_ns": pa.array(arrival + 900, mask=~done),
        "first_tokens": done.astype(np.int32),
        "state": coded(np.where(done, 0, 3), record.STATES),
        **{f"{wait}_ns": np.full(n, k) for k, wait in enumerate(record.WAITS)},
        **{f"ttft_{wait}_ns": np.full(n, k // 2) for k, wait in enumerate(record.WAITS)},
        **{f"gap_{wait}_ns": pa.nulls(n) for wait in record.WAITS},
        "alone_prefill_ns": np.full(n, 7),
        "alone_decode_ns": pa.nulls(n),
        "preemptions": at * 0,
        "gpus": coded(at % 2, ("0", "0>1")),
        "fidelity": coded(at * 0, ("simulated",)),
        "token_ns": pa.array([[5, 6, 7 + i] for i in at]) if tokens else pa.nulls(n),
    }
    assert columns.keys() <= {*record.SCHEMA.names}

    def column(field: pa.Field) -> pa.Array:
        values = columns[field.name] if not field.nullable else columns.get(field.name, pa.nulls(n))
        return values if isinstance(values, pa.DictionaryArray) else pa.array(values).cast(field.type)

    return pa.RecordBatch.from_arrays([column(field) for field in record.SCHEMA], schema=record.SCHEMA)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def bytes_of(folder: Path) -> bytes:
    return (folder / record.ROWS).read_bytes()


@cases(
    "kind",
    {
        "in a folder": record.read,
        "in pieces": lambda run: pa.concat_tables(record.Pieces(run / record.ROWS)),
        "in a part": lambda run: record.read(run.parent / "part" / run.name),
    },
)
def test_a_nullable_column_that_stored_runs_lack_is_null_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Path], pa.Table]
) -> None:
    run = tmp_path / "run-0a"
    record.write(run, [batch(10)], META)
    part = tmp_path / "part" / parts.DATASET / "study=x" / "shard=1-1" / "0.parquet"
    record.write_part(part, [run])
    before = kind(run)
    added = [pa.field("planted_tokens", pa.int32()), pa.field("waits", pa.list_(pa.int64()))]
    monkeypatch.setattr(record, "SCHEMA", pa.schema([added[0], *record.SCHEMA, added[1]]))
    after = kind(run)
    assert after.schema.equals(record.SCHEMA)
    assert after.select(before.column_names).equals(before)
    assert [after[field.name].null_count for field in added] == [10, 10]
    assert record.read(run, ["planted_tokens", "id"]).to_pylist()[9] == {"planted_tokens": None, "id": 9}
    assert loaded.load(run).requests.frame()["planted_tokens"].isna().all()
    record.write(tmp_path / "new", [batch(10)], META)
    assert kind(run).equals(record.read(tmp_path / "new"))
    monkeypatch.setattr(record, "SCHEMA", pa.schema([*record.SCHEMA, pa.field("seat", pa.int32(), nullable=False)]))
    with pytest.raises(Damaged, match="column seat is missing"):
        kind(run)


@cases("tokens", [False, True])
def test_what_is_written_is_read(tmp_path: Path, tokens: bool) -> None:
    rows = batch(1000, tokens=tokens)
    record.write(tmp_path / "run", [rows], META, side={"host": "h"})
    table = record.read(tmp_path / "run")
    assert table.schema.equals(record.SCHEMA)
    assert table.to_pylist() == rows.to_pylist()
    assert record.meta(tmp_path / "run") == {**META, "counts": {"done": 800, "unfinished": 200}, "schema": 2}
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["requests.parquet", "run", "side.json"]
    assert record.read(tmp_path / "run", ["id"]).column_names == ["id"]


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 999), max_size=5), group=st.sampled_from([7, 256, 1000, 5000]))
def test_bytes_depend_on_rows_alone(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], group: int) -> None:
    """Not on how batches are cut, nor on the order or surplus of their dictionaries, nor on wall-clock facts."""
    folder = tmp_path_factory.mktemp("r")
    ends = [0, *sorted(cuts), 1000]
    words = [("b", "a", "unused"), ("a", "b"), ("x", "b", "a")]
    parts = [batch(b - a, a, words[a % 3]) for a, b in pairwise(ends)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "ROW_GROUP", group)
        record.write(folder / "one", [batch(1000)], META)
        record.write(folder / "cut", parts, dict(reversed(META.items())), side={"when": 1.5})
    assert bytes_of(folder / "one") == bytes_of(folder / "cut")


def test_rewriting_replaces_with_equal_bytes(tmp_path: Path) -> None:
    record.write(tmp_path / "run", [batch(10)], META, files={"decisions.jsonl": [b"a\n", b"b\n"]})
    first = bytes_of(tmp_path / "run")
    assert (tmp_path / "run" / "decisions.jsonl").read_bytes() == b"a\nb\n"
    record.write(tmp_path / "run", [batch(10)], META)
    assert bytes_of(tmp_path / "run") == first
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["requests.parquet"]


def test_skipped_run_has_no_rows_and_a_reason(tmp_path: Path) -> None:
    record.write(tmp_path / "run", [], {"skipped": "sim cannot Move.to:host"})
    assert record.read(tmp_path / "run").num_rows == 0
    assert record.read(tmp_path / "run").schema.equals(record.SCHEMA)
    assert record.meta(tmp_path / "run") == {"skipped": "sim cannot Move.to:host", "counts": {}, "schema": 2}


def test_other_schemas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not of the schema"):
        record.write(tmp_path / "run", [pa.record_batch({"id": [1]})], {})
    assert names(tmp_path) == []


def test_an_error_while_rows_come_leaves_nothing(tmp_path: Path) -> None:
    def dying() -> object:
        yield batch(100_000)
        raise ConnectionResetError(104, "server gone")  # an engine's error stays what it is

    with pytest.raises(ConnectionResetError):
        record.write(tmp_path / "run", dying(), {})  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_seconds_become_whole_nanoseconds_once() -> None:
    ns = record.to_ns(np.array([0.1, np.nan, -1.0000000006, 86_400.000000001])).to_pylist()
    assert ns == [100_000_000, None, -1_000_000_001, 86_400_000_000_001]


# ------------------------------------------------------------------ kills and full disks

KILLS = """
    import os, shutil, signal, sys
    from pathlib import Path
    sys.path[:0] = [{tests!r}]
    from test_record import META, batch
    from harness.rows import record
    import pyarrow.parquet as pq

    run, old, new = Path(sys.argv[1]), [batch(10)], [batch(70_000), batch(70_000, 70_000)]
    points = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "rmdir"),
              (pq.ParquetWriter, "write"), (pq.ParquetWriter, "close")]

    def write_until(left):
        def mortal(whole):
            def call(*args, **kwargs):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return whole(*args, **kwargs)
            return call
        for owner, name in points:
            setattr(owner, name, mortal(getattr(owner, name)))
        record.write(run, new, META, side={{"pid": 0}})
        os._exit(0)

    for steps in range(40):
        if sys.argv[2] == "replacing":
            record.write(run, old, META)
        if (pid := os.fork()) == 0:
            write_until(steps)
        died = os.WTERMSIG(os.waitpid(pid, 0)[1])
        print(died, pq.read_metadata(run / record.ROWS).num_rows if record.exists(run) else -1)
        if not died:
            break
"""


def child(source: str, *args: object) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(source).format(tests=str(Path(__file__).parent))
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", ["new", "replacing"])
def test_killed_anywhere_the_run_is_whole_or_absent(tmp_path: Path, case: str) -> None:
    result = child(KILLS, tmp_path / "run", case)
    lines = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(lines) > 10, result.stderr  # there are that many points to die at
    assert lines[-1] == (0, 140_000)
    before = {"new": {-1}, "replacing": {-1, 10}}[case]
    assert {rows for _, rows in lines} <= {140_000, *before}
    record.write(tmp_path / "run", [batch(140_000)], META)
    record.write(tmp_path / "whole", [batch(140_000)], META)
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")
    assert names(tmp_path) == ["run", "whole"]  # what killed writers left is gone


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what was about to be used in a `with`
def test_a_signal_at_any_moment_of_a_write_leaves_no_temporary(tmp_path: Path) -> None:
    """Python raises a signal's exception where a function begins or a built-in one returns."""

    def stopped(at: int) -> bool:
        moments = count(1)

        def stop(_frame: FrameType, event: str, _arg: object) -> None:
            if event in {"call", "c_return"} and next(moments) == at:
                sys.setprofile(None)
                raise Terminated

        sys.setprofile(stop)
        try:
            record.write_files(tmp_path / "run", {"a": b"1", "b": b"2"})
        except Terminated:
            pass
        finally:
            sys.setprofile(None)
        return next(moments) > at

    assert not stopped(10_000)  # what is done once, such as compiling a pattern, is done
    assert not stopped(10_000)
    last = 0
    for last in takewhile(stopped, count(1)):
        assert names(tmp_path) in ([], ["run"]), f"stopped at moment {last}"
    assert last > 200


def test_a_living_writer_is_not_cleaned_away(tmp_path: Path) -> None:
    def meanwhile() -> object:
        yield batch(10)
        record.write(tmp_path / "other", [batch(3)], {})
        left = next(tmp_path.glob(".run.*.part"))
        whole.clean(tmp_path, "run")
        assert left.exists()

    record.write(tmp_path / "run", meanwhile(), {})  # type: ignore[arg-type]
    assert record.read(tmp_path / "run").num_rows == 10


FULL = """
    import resource, sys
    sys.path[:0] = [{tests!r}]
    from test_record import META, batch
    from harness.rows import record
    from harness.policy.types import UserError
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        record.write(sys.argv[1], [batch(70_000, 70_000 * i) for i in range(4)], META, side={{"x": "y" * 5000}})
    except UserError as error:
        print(error)
        sys.exit(2)
"""


@cases("limit", [0, 1000, 100_000])
def test_a_full_disk_is_one_line(tmp_path: Path, limit: int) -> None:
    run = tmp_path / "run"
    result = child(FULL, run, limit)
    assert result.returncode == 2, result.stderr
    assert result.stderr == ""
    assert result.stdout == f"{run}: cannot write results: File too large (free the disk, or choose another folder)\n"
    assert names(tmp_path) == []


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run: cannot write results: a file is in the way"):
        record.write(tmp_path / "file" / "run", [], {})
    writes: list[Callable[[Path], object]] = [
        lambda p: record.write_bytes(p, b""),
        lambda p: record.write_table(p, pa.table({"a": [1]}), {}),
    ]
    for write in writes:
        with pytest.raises(UserError, match="cannot write results"):
            write(tmp_path / "file" / "x")


def test_missing_and_broken_runs_are_one_line(tmp_path: Path) -> None:
    for use in (record.read, record.meta, loaded.load):
        with pytest.raises(UserError, match="no run"):
            use(tmp_path / "nowhere")
    (tmp_path / record.ROWS).write_bytes(b"PAR1 torn PAR1")
    with pytest.raises(UserError, match="not a Parquet file of bench"):
        record.meta(tmp_path)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    record.write(tmp_path / "warm", (batch(65_536, 65_536 * i) for i in range(2)), {})
    before = pa.default_memory_pool().max_memory()
    record.write(tmp_path / "run", (batch(65_536, 65_536 * i) for i in range(12)), {})
    assert pa.default_memory_pool().max_memory() < max(2 * before, 64 << 20)


# ------------------------------------------------------------------ tidy frames


def test_load_gives_tidy_frames(tmp_path: Path) -> None:
    record.write(tmp_path / "prism-00", [batch(10, tokens=True)], {**META, "stats": {"loads": 4.0}})
    record.write(tmp_path / "qlm-00", [], {"spec": {"system": "qlm", "seed": 3}, "skipped": "no torch"})
    (tmp_path / "chat-00").mkdir()
    runs, requests = harness.load(tmp_path / "prism-00")
    assert list(runs["run"]) == ["prism-00"]
    assert runs["s_loads"].item() == 4.0
    assert runs["n_done"].item() == 8
    assert runs["p_fields.tau"].item() == 0.1
    assert runs["p_seed"].item() == 3
    assert runs["label"].isna().all()  # no comparison has it
    rows = requests.of("prism-00")
    assert rows["arrival_s"].iloc[1] == pytest.approx(1_000_003e-9 - 60)
    assert np.isnan(rows["done_s"].iloc[0])
    assert list(rows["token_s"].iloc[1]) == [5e-9, 6e-9, 8e-9]
    record.write(tmp_path / "prism-01", [batch(10, words=("b", "a", "c"))], META)
    assert isinstance(harness.load(tmp_path).requests.frame()["gpus"].dtype, pd.CategoricalDtype)
    shutil.rmtree(tmp_path / "prism-01")
    everything = harness.load(tmp_path)
    assert list(everything.runs["skipped"].fillna("")) == ["", "no torch"]
    assert len(everything.requests) == len(everything.requests.frame()) == 10
    assert [run for run, _ in everything.requests] == ["prism-00", "qlm-00"]
    record.write_table(tmp_path / "chat-00" / record.SWEEP, pa.table({"run": ["prism-00", "prism-00"]}), {})
    assert [p.name for p in record.runs(tmp_path / "chat-00")] == ["prism-00"]
    (tmp_path / "chat-00" / record.SWEEP).unlink()
    assert len(harness.load(tmp_path / "qlm-00").requests.frame()) == 0


@cases(
    ("schema", "why"),
    {
        "earlier": (None, "is of schema 1: release 0.2.0 reads it"),
        "later": ("3", "is of schema 3, and this release reads 2: update it"),
    },
)
def test_files_of_another_schema_are_refused(tmp_path: Path, schema: str | None, why: str) -> None:
    record.write(tmp_path / "run", [batch(1)], META)
    scored = tmp_path / "run" / record.SWEEP
    for path, table in ((tmp_path / "run" / record.ROWS, record.read(tmp_path / "run")), (scored, scoring.scores([]))):
        pq.write_table(table.replace_schema_metadata({"schema": schema} if schema else {}), path)
    for refused in (partial(record.read, tmp_path / "run"), partial(tidy.stored, scored)):
        with pytest.raises(UserError, match=why):
            refused()
