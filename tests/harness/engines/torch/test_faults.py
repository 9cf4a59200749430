"""Faults under a run of the torch engine: its rows are complete, a line says what it was, and no process is left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from harness.check.engine import children  # noqa: E402
from harness.engines.machine import Config, Served  # noqa: E402
from harness.engines.torch.engine import Torch  # noqa: E402
from harness.engines.torch.processes import WorkerProcess  # noqa: E402
from harness.engines.torch.setting import Fields  # noqa: E402
from harness.loop.replay import replay  # noqa: E402
from harness.loop.system import ROOT  # noqa: E402
from harness.policy.actions import Action, Admit, Load, Run  # noqa: E402
from harness.policy.events import Arrived, Woke  # noqa: E402
from harness.policy.types import Batch, Inst, Jobs, UserError  # noqa: E402
from harness.policy.view import View  # noqa: E402
from harness.rows import record  # noqa: E402
from tests.harness.loop.scripted import Policy  # noqa: E402
from workloads.models import shape  # noqa: E402

BATCH = Batch(Inst("a", (0,)))
REQUESTS, HIT = 8, 3  # the request at whose arrival it happens


def jobs(prompt: int) -> Jobs:
    """Return requests of 40 tokens, but for the one at whose arrival it happens."""
    none = np.full(REQUESTS, np.inf)
    model, prompts, output = (np.full(REQUESTS, n, np.int32) for n in (0, 40, 30))
    prompts[HIT] = prompt
    return Jobs(("a",), np.linspace(0.0, 0.4, REQUESTS), model, prompts, output, none, none)


def run(
    what: Callable[[Torch, WorkerProcess], None], prompt: int = 40, **fields: Any
) -> tuple[list[Mapping[str, Any]], Torch]:
    """Return the rows of a run in which something happened, once its processes are gone."""
    before = children()
    made = Torch(Config((Served("a", shape("llama-3.2-1b")),)), {"process": "gpu"}, Fields(**fields))

    def answer(event: Any, _: View) -> Iterable[Action]:
        if event == Woke("start"):
            return [Load(BATCH.inst), Run(BATCH)]
        if event.request.id == HIT:
            what(made, made.workers.processes[0,])
        return [Admit(event.request.id, BATCH)]

    policy = Policy(answer, frozenset({Woke, Arrived}), options={"process": "gpu"})
    try:
        replay(policy, made, jobs(prompt), end_s=120.0)
        rows = [row for part in made.rows() for row in part.to_pylist()]
    finally:
        made.close()
    assert children() == before
    assert len(rows) == REQUESTS
    for row in rows:
        assert row["state"] in {"done", "failed"}
        assert sum(row[f"{wait}_ns"] for wait in record.WAITS) == row["done_ns"] - row["arrival_ns"]
    return rows, made


def killed(_: Torch, worker: WorkerProcess) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def without_memory(_: Torch, worker: WorkerProcess) -> None:
    """Leave the worker no address more than it has, so that the next tensor of a new size finds none."""
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0])
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)


def broken_kernel(engine: Torch, _: WorkerProcess) -> None:
    """Let the next step read a block that the model does not have."""
    send = WorkerProcess.send

    def once(worker: WorkerProcess, *message: Any) -> None:
        if message[0] == "step":
            WorkerProcess.send = send  # type: ignore[method-assign]
            order = message[1]
            parts = tuple(part._replace(blocks=(1 << 30,) * len(part.blocks)) for part in order.parts)
            message = ("step", order._replace(parts=parts))
        send(worker, *message)

    WorkerProcess.send = once  # type: ignore[method-assign, assignment]


def stopped(_: Torch, worker: WorkerProcess) -> None:
    os.kill(worker.pid, signal.SIGSTOP)


@pytest.mark.parametrize("what", [killed, broken_kernel])
def test_a_worker_that_ends_costs_its_step_and_says_so(what: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rows, made = run(what)
    text = capfd.readouterr().err
    (lost,) = made.lost
    assert f"torch: {lost}; the requests of its step fail" in text
    assert "Traceback" not in text
    assert rows[-1]["state"] == "done"  # another worker came
    assert made.stats()["workers_lost"] == 1
    if what is broken_kernel:
        assert "failed" in {row["state"] for row in rows}
        (line,) = [line for line in text.splitlines() if line.startswith("torch: process")]
        assert "Error: " in line
        assert ".py:" in line


def test_a_worker_without_memory_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    rows, made = run(without_memory, prompt=4000)
    text = capfd.readouterr().err
    assert made.lost
    assert "memory" in text.lower()
    assert "Traceback" not in text
    assert rows[HIT]["state"] == "failed"
    assert rows[-1]["state"] == "done"


def test_a_stuck_device_is_named_after_the_time_that_was_set(capfd: pytest.CaptureFixture[str]) -> None:
    rows, made = run(stopped, stuck_s=2)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "stuck" in line]
    assert line.startswith("torch: device 0 is stuck: worker ")
    assert line.endswith("has not answered for 2 s, in a step of a; it is killed")
    assert len(made.lost) == 1
    assert {row["state"] for row in rows} == {"done", "failed"}


def test_workers_that_end_one_after_the_other_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def always(engine: Torch, _: WorkerProcess) -> None:
        go = engine.workers.worker

        def dying(device: int, *key: Any, cold: bool = False) -> WorkerProcess:
            worker = go(device, *key, cold=cold)
            os.kill(worker.pid, signal.SIGKILL)
            return worker

        engine.workers.worker = dying  # type: ignore[method-assign]
        killed(engine, engine.workers.processes[0,])

    with pytest.raises(UserError, match="3 workers ended one after the other and did no step: worker"):
        run(always)
    assert "ended at" in capfd.readouterr().err


def below(pid: int) -> list[psutil.Process]:
    """Return the processes that one has started."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_run_leaves_whole_runs_alone_and_no_process(which: signal.Signals, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "harness", "compare", "--systems", "static,static:equal", "--engine", "torch",
        "--gpus", "1", "--models", "llama-3.2-1b*2", "--trace", "sample", "--slo", "absolute:ttft=9,tpot=9",
        "--seeds", "1", "--rate-scale", "1", "--no-plot", "--set", "window_s=4",
        "--set", "warmup_s=0", "--set", "drain_s=1", "-o", str(tmp_path),
    ]  # fmt: skip
    run = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )

    def stored_runs() -> list[Path]:
        return sorted(path for path in tmp_path.glob("static-*") if record.exists(path))

    try:
        while not stored_runs() and run.poll() is None:
            time.sleep(0.05)
        while len(workers := below(run.pid)) < 3 and run.poll() is None:  # the nursery, links, a worker
            time.sleep(0.05)
        whole = [path.read_bytes() for path in stored_runs()[0].glob("*.parquet")]
        run.send_signal(which)
        out, err = run.communicate(timeout=120)
    finally:
        run.kill()
    assert workers
    assert run.returncode not in {0, 1}
    assert "Traceback" not in out + err
    assert len(stored_runs()) == 1
    assert [path.read_bytes() for path in stored_runs()[0].glob("*.parquet")] == whole
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".static")]
    assert not psutil.wait_procs(workers, timeout=60)[1]
