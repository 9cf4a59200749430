"""The code of a cluster's node: compare the node's software with the caller's, execute a batch, and answer."""

from __future__ import annotations

import os
import pickle
import platform
import sys
import tempfile
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.loop.guard import LIMIT_S
from harness.policy.types import UserError
from harness.rows import whole
from harness.run import arithmetic, sources
from harness.run.execute import execute
from harness.run.messages import Answer, Batch, Refused
from harness.run.setup import Failed
from harness.run.sources import Task, current

# Packages that a result may depend on.
PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "numba", "llvmlite", "pydantic")


def facts() -> dict[str, str]:
    """Return what must be equal on every node: Python, packages, our sources, and arithmetic."""
    about = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            about[name] = "not there"
    about["sources of the bench"] = sources.tree(*sources.PACKAGES)[:12]
    return about | {"arithmetic": arithmetic.digest()[: arithmetic.SHOWN]}


def work(batch: Batch) -> list[Answer] | Refused:
    """Execute the tasks of a batch. Refuse them if facts of this node differ from the caller's.

    Tasks whose runs are already in a shared folder are not executed again.
    """
    here = facts()
    if differs := [name for name in batch.asked if here.get(name) != batch.asked[name]]:
        name = differs[0]
        return Refused(platform.node(), f"{name} is {here.get(name)} there, and {batch.asked[name]} here")
    token = LIMIT_S.set(batch.limit_s)
    try:
        out = Path(batch.out)
        if _shared(out, batch.token):
            return [_done(task, out, shared=True) for task in batch.tasks]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            return [_done(task, Path(folder), shared=False) for task in batch.tasks]
    finally:
        LIMIT_S.reset(token)


def _shared(out: Path, token: str) -> bool:
    """Tell whether a folder is the same as the caller's folder, in which the caller wrote a file named `token`."""
    try:
        return token in os.listdir(out)  # noqa: PTH208 - which asks the server of a network file system
    except OSError:
        return False


def _done(task: Task, out: Path, *, shared: bool) -> Answer:
    try:
        if not (shared and current(task, out)):  # a current run was left by a worker that died
            execute(task.spec, out, task.code)
    except Failed as failed:
        return Answer(task.folder, dict(failed.why))
    except UserError as error:
        return Answer(task.folder, {}, pickle.dumps(UserError(f"node {platform.node()}: {error}")))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return Answer(task.folder, {}, pickle.dumps(RuntimeError(f"on node {platform.node()}:\n{text}")))
    files = None if shared else {path.name: path.read_bytes() for path in (out / task.folder).iterdir()}
    return Answer(task.folder, {}, files=files)


def store(answer: Answer, out: Path) -> None:
    """Store the files of a run that a node sent, or wait until its files appear in the shared folder.

    Raises UserError if they do not appear in time.
    """
    from harness.rows import record

    if answer.files is not None:
        record.write_files(out / answer.folder, answer.files)
    elif not whole.seen(out / answer.folder / record.ROWS):
        raise UserError(f"{out / answer.folder} was written by a node and is not seen here ({whole.LATE} is the wait)")
