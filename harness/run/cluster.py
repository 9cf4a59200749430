"""Ray as an executor: tasks are sent in batches of about ten seconds, longest first, to whatever machines there are.

If a node can reach the results folder, it writes results there; otherwise it sends them back as bytes. If a batch is
lost with its worker or node, another executes it again, except for runs that are already in a shared folder.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import target
from harness.loop.guard import LIMIT_S
from harness.loop.system import ROOT
from harness.policy import fields
from harness.policy.types import UserError
from harness.run import driver, node, sources
from harness.run.estimates import Costs
from harness.run.executor import Ended, Why
from harness.run.messages import Answer, Batch, Refused
from harness.run.setup import load_trace
from harness.run.sources import Task, relocate
from harness.run.spec import FILES, Spec

BATCH_S = 10.0  # s of work in a batch
SHARES = 4  # batches that each slot gets at least, so that none waits long for the last one
AHEAD = 2  # batches sent for each slot
BASE_BYTES, REQUEST_BYTES = 700 << 20, 1_000  # bytes a worker takes, and bytes a request of its trace adds
DATA = ("TRACES_DIR", "PROFILES_DIR", "MEASURED_DIR", "MODELS_DIR", "BENCH_PART_AGE_S", "BENCH_LATE_S")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "data", "node_modules")


def named(text: str) -> Cluster:
    """Return the cluster that a text names: ray or ray:ADDRESS. Raises UserError for another text."""
    kind, _, address = text.partition(":")
    if kind != "ray":
        raise UserError(f'--executor "{text}" is not ray or ray:ADDRESS; shards (--shard) need no cluster')
    return Cluster(address)


class Cluster:
    """An executor (`executor.Executor`) on Ray; it connects when the first tasks come."""

    def __init__(self, address: str) -> None:
        if find_spec("ray") is None:
            raise UserError("ray is not here: make cluster, then .venv-cluster/bin/python -m harness for bench")
        self.address = address
        self._pipe: Connection | None = None
        self._process: BaseProcess | None = None
        self.slots = 1
        self._queue: list[list[Task]] = []
        self._out = Path()
        self._temporary: Path | None = None

    def submit(self, tasks: Sequence[Task], out: Path) -> None:
        """See Executor. Raises UserError for a run in real time, and if the cluster cannot be reached."""
        if real := next((task.spec.engine for task in tasks if fields.asked(task.spec.engine).name != "sim"), None):
            raise UserError(f"--executor is for the simulator, and {real} runs in real time on this machine")
        out.mkdir(parents=True, exist_ok=True)
        self._out = out.resolve()
        self._connect(tasks)
        self._queue = self._batches(tasks)

    def as_completed(self, failed: Why) -> Iterator[Ended]:
        """See Executor."""
        token = f".shared-{secrets.token_hex(8)}"
        (self._out / token).touch()
        sent: dict[int, list[Task]] = {}
        number = 0
        try:
            while self._queue or sent:
                while self._queue and len(sent) < AHEAD * self.slots:
                    tasks = [task for task in self._queue.pop(0) if task.spec.label not in failed]
                    if tasks:
                        number += 1
                        sent[number] = tasks
                        self._send(number, tasks, token)
                if sent:
                    done, answers = self._heard()
                    yield from self._stored(sent.pop(done), answers)
        except BaseException:
            self.shutdown()
            raise
        finally:
            (self._out / token).unlink(missing_ok=True)

    def shutdown(self) -> None:
        """See Executor."""
        pipe, process, self._pipe, self._process = self._pipe, self._process, None, None
        if pipe is not None and process is not None:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(5.0)
            process.kill()
            process.join()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    # -------------------------------------------------------------- the process that talks to it

    def _connect(self, tasks: Sequence[Task]) -> None:
        """Start the driver with all files that the tasks need. If the running driver lacks one of them, restart it."""
        files = {path for task in tasks for path in _files(task.spec).values()}
        if self._process is not None:
            if all((self._staged / _travelling(path)).exists() for path in files):
                return
            self.shutdown()
        self._temporary = Path(tempfile.mkdtemp(prefix="bench-driver-"))
        _stage(self._staged, files)
        variables = {
            key: os.environ[key]
            for key in (*DATA, *target.variables(target.name(), target.flags()))
            if key in os.environ
        }
        place = driver.Place(self.address, str(self._staged), variables)
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=driver.main, args=(theirs, place, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        word, self.slots = self._received()
        assert word == "slots"

    @property
    def _staged(self) -> Path:
        assert self._temporary is not None
        return self._temporary / "sources"

    @property
    def _log(self) -> Path:
        assert self._temporary is not None
        return self._temporary / "log"

    def _received(self) -> tuple[Any, Any]:
        """Receive a message. Raises UserError if the cluster is lost."""
        assert self._pipe is not None
        try:
            word, value = self._pipe.recv()
        except (EOFError, OSError):
            word, value = "lost", "its head node is gone"
        if word == "lost":
            where = self.address or "of this machine"
            self.shutdown()
            raise UserError(f"ray {where}: {value} (finished runs are kept; the same command resumes there)")
        return word, value

    def _heard(self) -> tuple[int, list[Answer]]:
        number, answers = self._received()
        if isinstance(answers, Refused):
            raise UserError(f"node {answers.node} is refused: {answers.why}")
        return number, answers

    # -------------------------------------------------------------- batches

    def _batches(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Cut tasks, longest first, into batches."""
        costs = Costs.of(self._out)
        seconds = [costs.cpu_s(task.spec) for task in tasks]
        most_s = min(BATCH_S, sum(seconds) / (SHARES * self.slots))
        batches: list[list[Task]] = []
        room_s = 0.0
        for task, each_s in sorted(zip(tasks, seconds, strict=True), key=lambda pair: -pair[1]):
            if not batches or each_s > room_s:
                batches.append([])
                room_s = most_s
            batches[-1].append(task)
            room_s -= each_s
        return batches

    def _send(self, number: int, tasks: Sequence[Task], token: str) -> None:
        assert self._pipe is not None
        moved = tuple(task._replace(spec=_moved(task.spec)) for task in tasks)
        batch = Batch(moved, str(self._out), token, self._facts, LIMIT_S.get())
        longest = max(len(load_trace(task.spec.trace)) * task.spec.rate_scale for task in tasks)
        with suppress(OSError):  # it died: `_received` reports it
            self._pipe.send((number, batch, BASE_BYTES + int(REQUEST_BYTES * longest)))

    @cached_property
    def _facts(self) -> dict[str, str]:
        return node.facts()

    def _stored(self, tasks: Sequence[Task], answers: Sequence[Answer]) -> Iterator[Ended]:
        """Store the runs of answers; yield each task with its failures. Raises the first error after all are stored."""
        error: BaseException | None = None
        for task, answer in zip(tasks, answers, strict=True):
            if answer.error:
                error = error or pickle.loads(answer.error)
                continue
            if not answer.why:
                node.store(answer, self._out)
                if _files(task.spec):
                    relocate(task.spec, self._out)
            yield Ended(task, answer.why)
        if error is not None:
            raise error


# ------------------------------------------------------------------ files that travel


def _files(spec: Spec) -> dict[str, Path]:
    """Return the paths of the user's files that a spec names, keyed by the spec's field."""
    values = {key: str(getattr(spec, key) or "").rpartition("classes:")[2] for key in FILES if key != "engine"}
    return {key: Path(value) for key, value in values.items() if value.endswith(FILES[key])}


def _travelling(path: Path) -> Path:
    """Return the path that a user's file gets among the sources that are sent to the cluster.

    The path has a hash of the file's content, followed by the file's name, because labels show that name.
    """
    return Path("files") / sha256(path.read_bytes()).hexdigest()[:16] / path.name


def _moved(spec: Spec) -> Spec:
    """Return the spec with the path of each user's file replaced by its path on a node of the cluster."""
    changes: dict[str, Any] = {}
    for key, path in _files(spec).items():
        rule, colon, _ = str(getattr(spec, key)).rpartition("classes:")
        changes[key] = f"{rule}{colon}{_travelling(path)}"
    return replace(spec, **changes) if changes else spec


def _stage(folder: Path, files: set[Path]) -> None:
    """Copy our packages and a user's files into a folder."""
    for name in sources.PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for path in files:
        to = folder / _travelling(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
