"""Files that are no logs, or damaged ones, end in one line with the file and the row; archives have a limit."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from harness.policy.types import UserError
from tests.bench import bench, mistake
from tests.cases import cases
from traces import guarded, readers
from traces.readers import prometheus

ROW = {"startTime": "2026-04-27 18:00:00", "model_group": "m", "prompt_tokens": 5, "completion_tokens": 5}


def test_a_cut_archive_is_a_mistake_and_no_interrupt(tmp_path: Path) -> None:
    packed = gzip.compress("\n".join([json.dumps(ROW)] * 5000).encode())
    (path := tmp_path / "log.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    for reader in ((), ("--from", "litellm")):
        mistake(bench("trace", "convert", path, "-o", tmp_path / "o.parquet", *reader), path.name, "not readable")


def test_an_archive_unpacks_to_no_more_than_is_allowed(tmp_path: Path) -> None:
    text = "time,model,prompt_tokens,output_tokens\n" + "".join(f"{k},a,100,3\n" for k in range(100_000))
    (path := tmp_path / "log.csv.gz").write_bytes(gzip.compress(text.encode()))
    argv = ("trace", "convert", path, "-o", tmp_path / "o.parquet", "--unpack-gb")
    mistake(bench(*argv, "0.001"), "unpacks to more than 0.001 GB", "--unpack-gb")
    assert bench(*argv, "0.1").exit_code == 0
    assert guarded.MOST_GB.get() == guarded.UNPACKED


def test_a_pipe_and_a_device_are_named_as_such(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.csv")
    for path, says in ((tmp_path / "p.csv", "a pipe, not a file"), (Path("/dev/zero"), "a device, not a file")):
        for name in (None, "litellm", "prometheus"):
            with pytest.raises(UserError, match=says):
                readers.converted(path) if name is None else readers.read(name, path)


@cases(
    "error",
    [EOFError(), ValueError("x"), KeyError("x"), OverflowError("x"), RecursionError(), MemoryError(), IndexError()],
)
def test_an_error_within_a_reader_names_file_and_row(error: Exception) -> None:
    with pytest.raises(UserError, match=r"^log\.csv:7: ") as caught, guarded.reading(Path("log.csv"), 7):
        raise error
    assert "\n" not in str(caught.value)


def test_counters_add_up_over_servers_and_restarts() -> None:
    curve = prometheus._summed([{0.0: 5.0, 10.0: 9.0, 20.0: 2.0}, {5.0: 100.0, 15.0: 107.0}])
    assert curve.at_s.tolist() == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert curve.value.tolist() == [0.0, 0.0, 4.0, 11.0, 13.0]
