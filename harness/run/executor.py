"""Executors: they execute the runs of sweeps, on processes of this machine or, if a command chose one, on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Protocol

from harness.run.sources import Task

Why = Mapping[str, str]  # failures as Failed has them; empty: none


class Ended(NamedTuple):
    """A task that was executed, and the failures of its policy."""

    task: Task
    why: Why


class Executor(Protocol):
    """Processes that execute the runs of a sweep on many machines."""

    slots: int  # the number of runs that are executed at once

    def submit(self, tasks: Sequence[Task], out: Path) -> None:
        """Accept tasks, most important first. Their runs are to be stored below `out`."""

    def as_completed(self, failed: Why) -> Iterator[Ended]:
        """Yield each executed task, with its failures, until all are done.

        Tasks of systems in `failed` are left out; the caller may add systems to `failed` meanwhile. If the caller stops
        early or an error occurs, all tasks end. Raises a run's own errors, and UserError if processes or machines are
        lost for good.
        """

    def shutdown(self) -> None:
        """End all processes."""


CHOSEN: ContextVar[Executor | None] = ContextVar("CHOSEN", default=None)  # None: processes of this machine


@contextmanager
def using(executor: Executor) -> Iterator[None]:
    """Execute all runs within the block on `executor`; shut it down at the end."""
    token = CHOSEN.set(executor)
    try:
        yield
    finally:
        CHOSEN.reset(token)
        executor.shutdown()
