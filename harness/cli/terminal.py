"""How a long command goes on: lines and a bar on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any, Self

import click

PROGRESS_HZ = 4


class Terminal:
    """Tells the user how a sweep goes on: lines and a bar on stderr, the bar only where someone watches.

    What is done is counted in `unit`; runs are kept when the user interrupts, other work is not.
    """

    def __init__(self, unit: str = "run") -> None:
        self._unit = unit
        self._bar: Any = None
        self._phase = ""
        self._quiet = not sys.stderr.isatty() or bool(os.environ.get("CI"))
        self.kept: tuple[int, int] = (0, 0)

    def say(self, line: str) -> None:
        """Print one line."""
        click.echo(line, err=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bar of a phase; a new phase starts a new one."""
        if what != self._phase:
            self.close()
        self._phase, self.kept = what, (done, total)
        if self._quiet or done == total:
            self.close()
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=what, unit=self._unit, mininterval=1 / PROGRESS_HZ,
                             leave=False, file=sys.stderr, dynamic_ncols=True)  # fmt: skip
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is KeyboardInterrupt and self._unit == "run":
            self.say(f"{self._phase or 'runs'}: {self.kept[0]} of {self.kept[1]} done and kept")
