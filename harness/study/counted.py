"""Progress of a study: phases with the runs that were stored before, and steps with their seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from harness.run.teller import Left, Teller

LONG_S = 5.0  # s of a step that a quiet teller reports too


class Counted:
    """A reporter of progress that also counts the runs of each phase that were stored before.

    With `quiet`, it leaves out notes, and steps that take less than `LONG_S` seconds.
    """

    def __init__(self, teller: Teller, *, quiet: bool) -> None:
        self._teller, self._quiet = teller, quiet
        self.phases: dict[str, tuple[int, int]] = {}
        self._worked: bool | None = None  # whether this step did work; None: no phase has begun

    def say(self, line: str) -> None:
        """Report a line; see Teller."""
        self._teller.say(line)

    def note(self, line: str) -> None:
        """Report a line about the study's inputs and steps, unless this teller is quiet."""
        if not self._quiet:
            self.say(line)

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        """Report that `done` of `total` parts of a phase are finished; see Teller."""
        self.phases.setdefault(what, (done, total))
        self._worked = bool(self._worked) or done < total
        self._teller.progress(what, done, total, left)

    def planning(self, done: int, total: int) -> None:
        """Report the progress of planning. It does not count as a phase, since every call of a study plans again."""
        self._teller.progress("planning", done, total)

    def current(self, total: int) -> None:
        """Report that all points are current, so that nothing is left to do."""
        self.note(f"{total} of {total} points current, nothing to do")

    @contextmanager
    def step(self, name: str, words: Callable[[], str] = str) -> Iterator[None]:
        """Report the seconds that a step took, unless it had nothing to do.

        `words` returns the rest of the line that is reported.
        """
        self._worked, begun = None, perf_counter()
        yield
        if self._worked is not False:
            took_s = perf_counter() - begun
            if not self._quiet or took_s >= LONG_S:
                self.say(f"{name:<12} {took_s:4.0f} s  {words()}".rstrip())
