"""Executors: where the runs of sweeps are executed. Processes of this machine, unless a command chose a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from harness.run.sources import Task

if TYPE_CHECKING:
    from harness.run.cluster import Cluster

Why = Mapping[str, str]  # failures as Failed has them; empty: none


class Ended(NamedTuple):
    """A task that was run, and its failures."""

    task: Task
    why: Why


CHOSEN: ContextVar[Cluster | None] = ContextVar("CHOSEN", default=None)  # None: processes of this machine


@contextmanager
def using(executor: Cluster) -> Iterator[None]:
    """Execute all runs within the block on an executor, and shut it down."""
    token = CHOSEN.set(executor)
    try:
        yield
    finally:
        CHOSEN.reset(token)
        executor.shutdown()
