"""A Dask cluster of two workers on this machine: equal bytes, a worker that is killed, a scheduler that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.policy.types import UserError
from harness.run import cluster, executor
from harness.study import load
from harness.study.measure import measure
from tests.cluster.studies import Slow, files, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """Start a scheduler and two workers of one thread each, on loopback."""
    distributed = pytest.importorskip("distributed", reason="make cluster")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1", silence_logs=50
    ) as nodes:
        yield nodes


def test_the_bytes_are_those_of_one_machine_though_a_worker_is_killed(two: Any, tmp_path: Path) -> None:
    slow = Slow(tmp_path, seeds=6)
    measure(load.study(str(slow.toml)), tmp_path / "one", workers=1)
    slow.set(free=1)
    with slow.bench(tmp_path / "out", "--executor", f"dask:{two.scheduler_address}") as process:
        until(lambda: len(slow.begun) > 1, process)
        os.kill(slow.begun[-1], signal.SIGKILL)
        slow.release()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert files(tmp_path / "out") == files(tmp_path / "one")
    assert len(slow.begun) == slow.runs + 1  # the kill hit one, which was held


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="make cluster")
    slow = Slow(tmp_path, seeds=1)
    with (
        executor.using(cluster.named("dask:tcp://127.0.0.1:1")),
        pytest.raises(UserError, match=r"dask tcp://127\.0\.0\.1:1: "),
    ):
        measure(load.study(str(slow.toml)), tmp_path / "out")
