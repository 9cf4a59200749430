"""A Ray cluster of two nodes on this machine: equal bytes, and what is lost with a worker, a node, a disk, the head."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.policy.types import UserError
from harness.run import cluster, executor, node, sweep
from harness.run.messages import Batch
from harness.run.shard import Shard
from harness.study import load, shards
from harness.study.measure import measure
from tests.cluster.studies import Slow, ended, files, stored, until
from tests.harness.study.test_shards import SEARCHED
from tests.harness.study.test_shards import stored as written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
LATE_S = "5"  # after which Ray takes the head for lost


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """Start a head and a node of one CPU each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="make cluster")
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": LATE_S,
    }
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = {**small, "include_dashboard": False, "dashboard_agent_listen_port": None}  # else Ray takes a fixed port
    nodes = utils.Cluster(initialize_head=True, head_node_args=head)
    nodes.other = nodes.add_node(**small)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def address(two: Any) -> str:
    return f"ray:{two.address}"


def test_any_executor_and_number_of_workers_and_shards_gives_equal_bytes(address: str, tmp_path: Path) -> None:
    study = load.study(str(written(tmp_path, SEARCHED)))
    whole = measure(study, tmp_path / "one", workers=1)
    measure(study, tmp_path / "pool", workers=2)
    with executor.using(cluster.named(address)):
        assert measure(study, tmp_path / "ray").table == whole.table
    for n in (2, 7):
        for k in range(1, n + 1):
            shards.measure_shard(study, tmp_path / str(n), Shard(k, n), workers=1)
        with sweep.stored_only():
            measure(study, tmp_path / str(n))
    every = {name: files(tmp_path / name) for name in ("one", "pool", "ray", "2", "7")}
    assert len(every["one"]) > 20
    assert all(some == every["one"] for some in every.values())


def test_a_file_of_the_user_travels_and_bytes_come_back_without_a_shared_folder(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path, seeds=1)
    study = load.study(str(slow.toml))
    measure(study, tmp_path / "one", workers=1)

    def blind(tasks: tuple[Any, ...], out: str, _token: str, *rest: Any) -> Batch:
        return Batch(tasks, out, "never seen", *rest)

    monkeypatch.setattr("harness.run.cluster.Batch", blind)
    with executor.using(cluster.named(address)):
        measure(study, tmp_path / "ray")
    assert files(tmp_path / "ray") == files(tmp_path / "one")


def test_a_node_that_differs_is_refused_by_name(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = node.facts()
    monkeypatch.setattr(node, "facts", lambda: usual | {"numpy": "0.1"})
    with (
        executor.using(cluster.named(address)),
        pytest.raises(UserError, match=r"node \S+ is refused: numpy is \S+ there, and 0.1 here"),
    ):
        measure(load.study(str(Slow(tmp_path, seeds=1).toml)), tmp_path / "out")


def test_a_full_disk_is_one_line_and_the_next_call_goes_on(address: str, tmp_path: Path) -> None:
    slow = Slow(tmp_path, seeds=2)
    slow.set(most=2000)
    with slow.bench(tmp_path / "out", "--executor", address) as process:
        _, err = process.communicate()
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert process.returncode == 2, err
    assert len(errors) == 1
    assert "cannot write results: File too large" in errors[0]
    assert "Traceback" not in err
    slow.set()
    with slow.bench(tmp_path / "out", "--executor", address) as process:
        process.communicate()
    assert process.returncode == 0
    assert stored(tmp_path / "out") == slow.runs


def test_no_run_is_lost_with_a_worker_or_a_node(two: Any, address: str, tmp_path: Path) -> None:
    slow = Slow(tmp_path, seeds=8)
    measure(load.study(str(slow.toml)), tmp_path / "one", workers=1)
    slow.set(free=2)  # then both nodes hold a run
    with slow.bench(tmp_path / "out", "--executor", address) as process:
        until(lambda: len(slow.begun) > 3, process)
        first, second = slow.begun[2:4]
        os.kill(second, signal.SIGKILL)
        until(lambda: len(slow.begun) > 4, process)
        two.remove_node(two.other, allow_graceful=False)
        until(lambda: ended(first) or ended(slow.begun[4]), process)
        slow.release()
        _, err = process.communicate()
    two.other = two.add_node(num_cpus=1, object_store_memory=100 << 20)
    assert process.returncode == 0, err
    assert files(tmp_path / "out") == files(tmp_path / "one")
    assert len(slow.begun) == slow.runs + 2  # each kill hit one run, which was held


def test_no_cluster_and_no_answer_are_one_line(tmp_path: Path) -> None:
    slow = Slow(tmp_path, seeds=1)
    with slow.bench(
        tmp_path / "out",
        "--executor",
        "ray:127.0.0.1:1",
        RAY_gcs_server_request_timeout_seconds="2",
        RAY_gcs_rpc_server_connect_timeout_s="1",
        RAY_NUM_REDIS_GET_RETRIES="1",
    ) as process:
        _, err = process.communicate()
    assert process.returncode == 2, err
    assert len([line for line in err.splitlines() if line.startswith("error: ray 127.0.0.1:1")]) == 1


def test_a_lost_head_ends_the_command_in_one_line_and_the_next_goes_on(two: Any, address: str, tmp_path: Path) -> None:
    slow = Slow(tmp_path, seeds=8)
    slow.set(free=3)
    with slow.bench(tmp_path / "out", "--executor", address) as process:
        until(lambda: stored(tmp_path / "out") > 2, process)
        begun = time.monotonic()
        two.head_node.kill_gcs_server(check_alive=False)
        _, err = process.communicate(timeout=300)  # an idle machine takes less than 90 s
    print(f"the command ended {time.monotonic() - begun:.0f} s after the head", file=sys.stderr)
    assert process.returncode == 2, err
    assert len([line for line in err.splitlines() if line.startswith("error: ray ")]) == 1
    assert "finished runs are kept" in err
    slow.set()
    with slow.bench(tmp_path / "out", "--workers", "1") as process:
        process.communicate()
    assert process.returncode == 0
    assert stored(tmp_path / "out") == slow.runs
