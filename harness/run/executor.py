"""Where the runs of sweeps are executed: in processes of this machine, unless a command chose a cluster."""

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


_CHOSEN: ContextVar[Cluster | None] = ContextVar("_CHOSEN", default=None)


def chosen() -> Cluster | None:
    """Return the cluster that this command chose, if any."""
    return _CHOSEN.get()


@contextmanager
def using(cluster: Cluster) -> Iterator[None]:
    """Execute all runs within the block on a cluster, and shut it down."""
    token = _CHOSEN.set(cluster)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
        cluster.shutdown()
