"""Where time passes: a simulator jumps, a GPU waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from harness.actions import Action
from harness.events import Event
from harness.types import Cluster, Fidelity, Jobs, Option
from harness.view import View

if TYPE_CHECKING:
    import pyarrow as pa


class Engine(Protocol):
    """What `replay` needs of a simulator, a GPU or a server. All fields belong to the configured object."""

    can: frozenset[str]
    tells: frozenset[type]
    offers: Mapping[str, tuple[Option, ...]]
    fidelity: Fidelity
    cluster: Cluster

    def begin(self, jobs: Jobs, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Take the workload, and pass no time beyond `end_s`.

        Actions done before are the answers to "start": their Loads are free and silent.
        """
        ...

    def poll(self, until_s: float) -> Event | None:
        """Next event due by `until_s` and the end of the run; None when there is none, and the clock stands there.

        Without an `until_s` (infinity) no action comes any more unless an event does: where nothing can happen, the
        first load or move that waits for memory fails, at the time of the last event.
        """
        ...

    def do(self, action: Action) -> None:
        """Start an action; its end, or its refusal, comes back as an event."""
        ...

    def view(self) -> View:
        """Read-only queries on the state now."""
        ...

    def idle(self) -> bool:
        """True when nothing will ever happen again without a new action."""
        ...

    def rows(self) -> Iterator[pa.RecordBatch]:
        """What happened to each request, in order of id (schema: harness/record.py)."""
        ...
