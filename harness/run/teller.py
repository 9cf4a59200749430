"""Receivers of progress: a terminal, or none."""

from __future__ import annotations

from typing import Protocol


class Teller(Protocol):
    """A receiver of a sweep's progress."""

    def say(self, line: str) -> None:
        """Print a line for the user."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """Report that `done` of `total` runs of a phase are finished; a phase begins with those stored before."""
        ...


class Silent:
    """A receiver that ignores all."""

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int) -> None:
        """See Teller."""
