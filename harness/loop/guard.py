"""Call a policy's code with a time limit. Its prints do not reach stdout, and its exceptions become one line of text.

Any error of a policy becomes a `Fault`, which callers can distinguish from an error of the bench.
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
    """The error of a policy that raised an exception, returned a value other than actions, or did not end.

    `__cause__` is the exception that the policy raised, if any.
    """


class Endless(BaseException):
    """The exception raised inside a policy that reaches its time limit.

    It is not an Exception, so `except Exception` in a policy does not catch it.
    """


class Watch:
    """A watch that raises `Endless` inside a call that exceeds its time limit.

    `call` is the number of the call in progress, or 0. A repeating timer checks whether `call` has changed, so that a
    call costs only two assignments. The limit counts ticks of the timer, not seconds: a process that was stopped gets
    one tick for the whole pause. Without SIGALRM, or outside the main thread, there is no limit, because Python cannot
    interrupt code there. Calls into C are not interrupted either.
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
    """Tell whether a callback of the garbage collector is running; Python drops exceptions that are raised there."""
    callbacks = [code for callback in gc.callbacks if (code := getattr(callback, "__code__", None))]
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


@contextmanager
def guarded() -> Iterator[None]:
    """Turn exceptions of the block into a Fault. The block calls a policy's code outside the method `on`.

    Fault, Infeasible, Unsupported and Interrupted pass unchanged. The block has the time limit of `Watch`, and its
    prints go to stderr.
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
    """Return a context in which prints of a policy go to stderr, because stdout is for results."""
    return redirect_stdout(sys.stderr)


def error_text(error: BaseException) -> str:
    """Describe an exception in one line, with the last line of the policy's file in the exception's traceback.

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
    """Tell whether a file is foreign: not of the bench, not of the import system, no pseudo-file like `<string>`."""
    return not filename.startswith("<") and not {HERE, IMPORTS} & set(Path(filename).parents)
