"""An agenda of actions due at absolute times, in order; the caller moves the clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Actions with absolute due times in nanoseconds; those of one time in the order in which they were entered.

    It owns no clock. An action is called with its own due time, however late that is, so lateness never adds up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[Any, int], None], Any]] = []
        self._entered = 0
        self.now_ns = 0  # up to which all that was due is done

    def at(self, due_ns: int, action: Callable[[Any, int], None], subject: Any) -> None:
        """Call `action(subject, due_ns)` once the clock has reached `due_ns`."""
        self._entered += 1
        heappush(self._heap, (due_ns, self._entered, action, subject))

    @property
    def next_ns(self) -> int | None:
        """The time of the next action; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def advance(self, now_ns: int) -> None:
        """Do all that is due by `now_ns`, also what these actions enter for a time by then."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            due_ns, _, action, subject = heappop(heap)
            action(subject, due_ns)
        self.now_ns = now_ns
