"""Receivers of progress reports: a terminal, or one that shows nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Left(NamedTuple):
    """The time left in a sweep, estimated from stored runs of the same kinds."""

    cpu_s: float  # s of the runs that are known to follow
    seconds: float | None  # until they are done on this machine; None: a system has no stored run yet
    most_s: float | None  # with the further runs that a budget allows; inf: nothing bounds them; None: as `seconds`
    share: float  # share of a core that each running run gets


class Teller(Protocol):
    """A receiver of a sweep's progress."""

    def say(self, line: str) -> None:
        """Print a line for the user."""
        ...

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        """Report that `done` of `total` runs of a phase are finished, including those that were stored before it.

        `left` is None if there is no estimate, so that the count alone shows how much is left.
        """
        ...


class Silent:
    """A `Teller` that reports nothing."""

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        """See Teller."""
