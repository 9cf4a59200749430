"""A policy's code at arm's length: its time is limited, its prints stay off stdout, what it raises becomes one line.

A policy's mistake comes out as `Fault`, whatever it was, so that a caller can tell it from a mistake of the bench.
"""

from __future__ import annotations

import gc
import importlib
import math
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from harness.loop.interrupted import Interrupted
from harness.policy.types import Infeasible, Unsupported

HERE = Path(__file__).resolve().parents[1]
IMPORTS = Path(importlib.__file__).parent
# Wall-clock seconds that one call into a policy may take. It is a context variable because policies are called where
# specs are resolved, in workers and in checks, and no result depends on it.
LIMIT_S: ContextVar[float] = ContextVar("LIMIT_S", default=60.0)
TICKS = 8  # times that the timer fires within the limit
LONGEST = 120  # characters of an exception's text


class Fault(Exception):
    """A policy raised, answered something that is no action, or did not end. `__cause__` is what it raised, if any."""


class Endless(BaseException):
    """Raised into a policy at its limit. Not an Exception: `except Exception` in a policy must let it through."""


class Watch:
    """A watch that raises `Endless` into a call beyond the limit.

    `call` is the number of the call under way, or 0. A repeating timer looks whether the call is still the same one, so
    a call costs two assignments. Ticks are counted, not seconds: a process that was stopped gets one tick for all the
    time it slept. Without SIGALRM, or outside the main thread, there is no limit: Python cannot interrupt code there.
    Nor does it interrupt a call into C.
    """

    __slots__ = ("_before", "_on", "_seen", "_ticks", "_told", "call", "limit_s")

    def __init__(self) -> None:
        self.limit_s = LIMIT_S.get()
        self.call = 0
        self._seen = self._ticks = 0
        self._before: Any = None
        in_main = threading.current_thread() is threading.main_thread()
        self._told = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._on = in_main and hasattr(signal, "setitimer") and self.limit_s < math.inf

    def __enter__(self) -> Self:
        if self._told:
            signal.signal(signal.SIGINT, _interrupt)
        if self._on:
            self._before = signal.signal(signal.SIGALRM, self._tick)
            signal.setitimer(signal.ITIMER_REAL, self.limit_s / TICKS, self.limit_s / TICKS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.call = 0
        if self._on:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)
        if self._told:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _tick(self, _signum: int, frame: FrameType | None) -> None:
        if self.call != self._seen:
            self._seen, self._ticks = self.call, 0
        elif self.call:
            self._ticks += 1
            if self._ticks >= TICKS and not _collecting(frame):
                self._ticks = 0  # a policy that catches it has the whole limit again
                raise Endless(f"no answer within {self.limit_s:g} s")


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _collecting(frame: FrameType | None) -> bool:
    """Tell whether a callback of the garbage collector runs: Python drops what is raised there."""
    callbacks = [code for callback in gc.callbacks if (code := getattr(callback, "__code__", None))]
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


@contextmanager
def guarded() -> Iterator[None]:
    """Turn exceptions of the block into a Fault. The block calls code of a policy's file, other than `on`.

    Fault, Infeasible, Unsupported and Interrupted pass unchanged. The block has the limit of `Watch`, and what it
    prints goes to stderr.
    """
    with Watch() as watch, quiet():
        watch.call = 1
        try:
            yield
        except (Fault, Infeasible, Unsupported, Interrupted):
            raise
        except BaseException as error:
            watch.call = 0  # what follows is not the policy's
            raise Fault(error_text(error)) from error


def quiet() -> redirect_stdout[Any]:
    """Send what a policy prints to stderr: stdout is for results."""
    return redirect_stdout(sys.stderr)


def error_text(error: BaseException) -> str:
    """Describe an exception in one line, by the innermost line of the policy's own file.

    For example `KeyError at mine.py:33 ('m9')`.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _foreign(frame.filename)]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    at = f" at {Path(frames[0].filename).name}:{lines[-1]}" if lines else ""
    if isinstance(error, Endless):
        return f"{error}{at}"
    text = next(iter(str(error).encode("utf-8", "backslashreplace").decode().splitlines()), "")
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return f"{type(error).__name__}{at}" + (f" ({text})" if text else "")


def _foreign(filename: str) -> bool:
    """Tell whether a file is foreign: not of the bench or the import system, and not made up by the interpreter."""
    return not filename.startswith("<") and not {HERE, IMPORTS} & set(Path(filename).parents)
