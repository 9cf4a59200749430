"""Who hears how work goes on: a terminal, or nobody."""

from __future__ import annotations

from typing import Protocol


class Teller(Protocol):
    """Who hears how a sweep goes on."""

    def say(self, line: str) -> None:
        """One line for the user."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` runs of a phase stand; a phase begins with those that stood before."""
        ...


class Silent:
    """Hears nothing."""

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int) -> None:
        """See Teller."""
