"""A sweep killed at any moment goes on to the bytes of an undisturbed one, and leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.loop.system import ROOT
from harness.rows import record
from harness.run import sweep
from tests.harness.run.test_sweep import TINY, files

pytestmark = pytest.mark.slow

# A comparison with its SLO bases, its runs and its table: 5 + 4 run folders and one of the sweep.
COMPARE = """
from pathlib import Path
from tests.harness.run.test_sweep import compared

def compare(out, workers):
    return compared(Path(out), "static", "chunked", rates=(1.0, 2.0), workers=workers)
"""

# Kills itself when a function of `os`, or the Parquet writer's write, is called for the n-th time.
AT_CALL = """
import os, signal, sys
import pyarrow.parquet as pq
out, name, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner = pq.ParquetWriter if name == "write" else os
real, calls = getattr(owner, name), 0

def deadly(*args, **named):
    global calls
    calls += 1
    if calls == n:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **named)

setattr(owner, name, deadly)
compare(out, 1)
"""

# Says when it is about to begin, so that what is killed at a random time is the sweep and not the imports.
AT_TIME = """
import sys
if __name__ == "__main__":
    print("ready", flush=True)
    compare(sys.argv[1], int(sys.argv[2]))
"""

POINTS = {
    "write": (1, 5, 6, 9, 10),  # Parquet: first and last base, first and last run, the table
    "replace": (1, 5, 6, 9, 10),  # into place
    "fsync": (1, 2, 3, 4, 5, 30),  # rows, side file, folder, parent, the next run's
    "mkdir": (1, 4),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a comparison that nobody disturbed."""
    return go_on(tmp_path_factory.mktemp("whole"))


def go_on(out: Path) -> dict[str, bytes]:
    """Run the comparison, or what is left of it, here; its files."""
    namespace: dict[str, object] = {}
    exec(COMPARE, namespace)
    namespace["compare"](out, 1)  # type: ignore[operator]
    return files(out)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(COMPARE + text)
    return path


def child(path: Path, *args: object, **named: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path), *map(str, args)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, **named)  # type: ignore[call-overload, no-any-return]


def leftovers(out: Path) -> Iterator[Path]:
    return out.rglob("*.part")


def killed(folder: Path, whole: dict[str, bytes], name: str, n: int) -> None:
    """Kill a comparison at the n-th call of a function: what it left is whole, and the next goes on to all of it."""
    out = folder / "out"
    with child(script(folder, AT_CALL), out, name, n) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL, f"{name} was called fewer than {n} times"
    left = {name: data for name, data in files(out).items() if ".part" not in name}
    assert left.items() < whole.items()  # whole runs, each as it should be, and not all of them
    assert go_on(out) == whole  # the same files: what was left half-written is gone
    assert not list(leftovers(out))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "replace" else pytest.mark.full) for name in POINTS]
)
def test_killed_at_a_write_or_rename(
    name: str, tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], subtests: pytest.Subtests
) -> None:
    for n in POINTS[name]:
        with subtests.test(n=n):
            killed(tmp_path_factory.mktemp(name), whole, name, n)


def undisturbed_s(tmp_path: Path, workers: int) -> float:
    with child(script(tmp_path, AT_TIME), tmp_path / "timed", workers) as process:
        assert process.stdout is not None
        process.stdout.readline()
        begun = time.monotonic()
        process.communicate()
    assert process.returncode == 0
    return time.monotonic() - begun


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_times(workers: int, tmp_path: Path, whole: dict[str, bytes]) -> None:
    span_s = undisturbed_s(tmp_path, workers)
    assert files(tmp_path / "timed") == whole
    draw = random.Random(workers)
    for i in range(5):
        out = tmp_path / str(i)
        with child(script(tmp_path, AT_TIME), out, workers) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(draw.uniform(0, span_s))
            except subprocess.TimeoutExpired:
                process.kill()
            # the pipe closes when the last process that holds it has ended: no worker outlives its parent
            process.communicate(timeout=60)
        assert go_on(out) == whole
        assert not list(leftovers(out))


def test_interrupted_sweeps_end_their_workers_and_keep_what_is_done(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    with child(script(tmp_path, AT_TIME), out, 2, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
        process.communicate(timeout=60)
    kept = {name: data for name, data in files(out).items() if ".part" not in name}
    assert kept.items() <= whole.items()
    assert go_on(out) == whole


def test_two_sweeps_at_once_do_no_harm(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out, path = tmp_path / "out", script(tmp_path, AT_TIME)
    with child(path, out, 1) as first, child(path, out, 1) as second:
        first.communicate()
        second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert files(out) == whole


def test_what_a_killed_writer_left_is_no_run(tmp_path: Path) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    nest = tmp_path / f".{folder.name}.12345.part" / "new"
    nest.mkdir(parents=True)
    (nest / record.ROWS).write_bytes(b"half")
    assert record.runs(tmp_path) == [folder]
    assert sweep.sweep([TINY], tmp_path, workers=1) == [folder]
