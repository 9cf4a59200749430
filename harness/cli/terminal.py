"""Progress of a long command: lines and a bar on stderr."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import click

from harness.answers.table import WIDTH, brief

if TYPE_CHECKING:
    from harness.run.teller import Left

ROOM = 100  # characters of a line where the width of the terminal is not known
PROGRESS_HZ = 4
TICK_S = 1.0  # seconds after which a bar's clock moves, however long a step takes
COUNTS = 52  # characters of a bar that are not its name
LINE_S, OFTEN_S = 30.0, 1.0  # seconds between two lines of a stage that has no bar; with --verbose
FIRST_S = 5.0  # seconds until a stage without a bar prints a line: an earlier error is then the only line
LEVEL: ContextVar[str] = ContextVar("level", default="")  # "quiet" or "verbose", as options say
STAGES = frozenset({"planning", "scores"})  # phases of which nothing is kept when the user interrupts
BUSY = 0.7  # share of a core; with less, the machine counts as busy
LEFT_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
UP = "\x1b[{}A\x1b[J"  # moves up by this number of lines, and clears what is below
MANY = 20  # runs; if a phase has fewer, the number of stored ones is not printed


def duration(seconds: float) -> str:
    """Format a duration: in seconds below two minutes, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


def room() -> int:
    """Return the number of characters that fit a line on stdout: the terminal's columns, or ROOM in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else ROOM


def screen(lines: Iterable[str], *, every: bool, tail: Iterable[str] = ()) -> None:
    """Print the lines that fit one screen, with `tail` as the last ones; with `every` print all lines unchanged."""
    for line in brief(lines, every=every, tail=tail, room=min(WIDTH, room())):
        click.echo(line)


def prose(line: str) -> None:
    """Print a line; on a terminal it is folded between words, in a pipe it stays whole."""
    for part in brief([line], every=not sys.stdout.isatty(), room=room()):
        click.echo(part)


def folded(lines: Iterable[str], width: int) -> None:
    """Print lines; lines of more than `width` characters are folded as prose, and shorter ones are left whole."""
    for line in lines:
        (prose if len(line) > width else click.echo)(line)


class Terminal:
    """A reporter of progress on stderr: a bar on a terminal, else a line per stage and then one every `LINE_S`.

    `unit` names the things that are counted. After an interrupt, finished runs stay stored; work in any other unit is
    lost.
    """

    def __init__(self, unit: str = "run") -> None:
        self._unit = unit
        self._bar: Any = None
        self._at = ("", 0, 0)  # the phase, the work done in it, and its total
        self._ahead: tuple[Left | None, float] = (None, 0.0)  # the work left in it, and when that was estimated
        self._stage_s, self._stage_told = 0.0, False  # when the stage began; whether it has had a line
        self._level = LEVEL.get()
        self._quiet = not sys.stderr.isatty() or bool(os.environ.get("CI")) or bool(self._level)
        self._line_s, self._zero = OFTEN_S if self._level == "verbose" else LINE_S, time.monotonic()
        self._begun, self._told = (0, 0.0), time.monotonic()  # work done before the phase, and its start; last line
        self._worked = False  # whether this command did any work
        self._shown: list[str] = []  # lines above the bar
        self._kept_of = "runs"
        self._kept = (0, 0)
        self._lock, self._over = threading.RLock(), threading.Event()

    @property
    def redraws(self) -> bool:
        """True if stdout and stderr are a terminal on which lines can be replaced."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
        return not self._quiet and sys.stdout.isatty() and not plain

    def say(self, line: str) -> None:
        """Print one line."""
        with self._lock:
            self._told = time.monotonic()
            shown = self._wiped()
            if self._level != "quiet":
                clock = f"{self._told - self._zero:7.1f} s  " if self._level == "verbose" else ""
                click.echo(clock + line, err=True)
            self._draw(shown)

    def show(self, lines: Iterable[str]) -> None:
        """Replace the lines above the bar by these, if the terminal redraws lines."""
        if self.redraws:
            room = shutil.get_terminal_size()
            with self._lock:
                self._wiped()
                self._draw([line[: room.columns - 1] for line in lines][: room.lines - 2])

    def _wiped(self) -> list[str]:
        """Clear the bar and the lines above it; return those lines."""
        if self._bar is not None:
            self._bar.clear()
        shown, self._shown = self._shown, []
        if shown:
            click.echo(UP.format(len(shown)), nl=False, err=True, color=True)
        return shown

    def _draw(self, lines: list[str]) -> None:
        self._shown = lines
        if lines:
            click.echo("\n".join(lines), err=True)
        if self._bar is not None:
            self._bar.refresh()

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        """Report by a bar or by lines that `done` of `total` units of the phase `what` are done.

        A new phase starts a new bar.
        """
        with self._lock:
            now = time.monotonic()
            self._ahead = (left, now)
            if what != self._at[0]:
                self.close()
                if _stage(what) != _stage(self._at[0]):
                    self._stage_s, self._stage_told = now, False
                self._begun = (done, now)
                if 0 < done < total >= MANY and self._unit == "run" and not self._worked:  # else this command made them
                    self._stage_told = True
                    self.say(f"{what}: {done:,} of {total:,} are stored")
            self._worked |= done > self._begun[0]
            self._at = (what, done, total)
            if what not in STAGES:
                self._kept_of, self._kept = what, (done, total)
            if self._quiet or done == total:
                self.close()
                self._tell(now)
            else:
                self._move(what, done, total, now)

    def _move(self, what: str, done: int, total: int, now: float) -> None:
        """Move the bar to the work done, and fit it to the terminal's present width."""
        columns = shutil.get_terminal_size().columns
        if self._bar is None:
            from tqdm import tqdm

            name = what if len(what) <= (most := max(columns - COUNTS, COUNTS // 3)) else what[: most - 1] + "…"
            self._bar = tqdm(
                total=total,
                initial=done,
                desc=name,
                unit=self._unit,
                mininterval=1 / PROGRESS_HZ,
                leave=False,
                file=sys.stderr,
                ncols=columns,
                nrows=2,
                bar_format=None if self._ahead[0] is None else LEFT_BAR,
            )
        self._bar.ncols = columns
        self._hint(now)
        self._bar.update(done - self._bar.n)

    def _hint(self, now: float) -> None:
        """Write the time left next to the bar, if it is estimated from the cost of the runs."""
        if self._ahead[0] is not None and self._bar is not None:
            self._bar.set_postfix_str(_of_work(*self._ahead, now), refresh=False)

    def _tell(self, now: float) -> None:
        """Print how far the phase is, if a line is due: FIRST_S after a stage begins, then every `_line_s` seconds."""
        what, done, total = self._at
        early = not self._stage_told and now - self._stage_s >= FIRST_S
        again = now - self._told >= self._line_s and (total > 1 or self._level == "verbose")
        if done < total and (early or again):
            self._stage_told = True
            text = ", ".join(filter(None, [f"{what}: {done:,} of {total:,}", self._remaining(now)]))
            self.say(text if total > 1 else f"{what} ...")

    def _ticks(self) -> None:
        """Update the bar's time, or print the progress if a line is due, while one step takes long."""
        while not self._over.wait(TICK_S):
            with self._lock:
                if self._bar is not None:
                    self._hint(time.monotonic())
                    self._bar.refresh()
                elif self._quiet:
                    self._tell(time.monotonic())

    def _remaining(self, now: float) -> str:
        """Return in words the time left in a phase: by the cost of its runs if known, else by its pace so far."""
        rest, since = self._ahead
        if rest is not None:
            return _of_work(rest, since, now)
        (_, done, total), (stood, begun) = self._at, self._begun
        return f"about {duration((now - begun) / (done - stood) * (total - done))} left" if done > stood else ""

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def __enter__(self) -> Self:
        if self._level != "quiet":
            threading.Thread(target=self._ticks, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self.close()
        self._wiped()
        if kind is KeyboardInterrupt and self._unit == "run":
            self.say(f"{self._kept_of}: {self._kept[0]} of {self._kept[1]} done and kept")


def _of_work(left: Left | None, since: float, now: float) -> str:
    """Return in words the time left for known work, how much a budget may add, and whether other work slows it.

    The estimate in `left` was made at the time `since`.
    """
    if left is None or left.seconds is None:
        return ""
    past = now - since
    text = f"about {duration(max(0.0, left.seconds - past))} left"
    if left.most_s == math.inf:
        text += ", then rates between those if they decide more"
    elif left.most_s is not None:
        text += f", at most {duration(max(0.0, left.most_s - past))} with more seeds"
    return text + (f"; other work slows it: {100 * left.share:.0f} % of a core a run" if left.share < BUSY else "")


def _stage(phase: str) -> str:
    """Return the stage to which a phase belongs: the part of the phase's name before a comma and a round's number."""
    return phase.partition(",")[0]
