"""SIGINT and SIGTERM as exceptions. This module imports nothing heavy, because the command line imports it first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The exception for SIGINT. It has its own class, because a policy can raise a plain KeyboardInterrupt."""


class Terminated(Interrupted):
    """The exception for SIGTERM. It passes all handlers that let Ctrl-C pass."""


DEAF_S = 10  # s for which a library may keep Python from handling a signal
AGAIN_S = 0.01  # s after which a signal whose exception was swallowed is sent again
_CAME: set[int] = set()  # signals whose exceptions were raised within `terminable`


def came(*numbers: int) -> bool:
    """Tell whether this process has received a signal with one of these numbers since `terminable` began."""
    return not _CAME.isdisjoint(numbers)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated at SIGTERM, and Interrupted at SIGINT, so that the block can close its files and processes.

    Outside the main thread nothing changes. A worker may get SIGTERM twice: from the batch system, which ends all
    processes of a job, and from its parent. So a second SIGTERM does not interrupt the closing. Python swallows an
    exception in a `__del__`; the exception is raised again a moment later. If a library does not return for `DEAF_S`
    seconds, Python cannot run the signal's handler, and the process ends without an exception.
    """

    def stop(_signum: int, _frame: FrameType | None) -> None:
        _CAME.add(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which processes that are started now inherit
        raise Terminated

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        _CAME.add(signal.SIGINT)
        raise Interrupted

    def swallowed(args: sys.UnraisableHookArgs) -> None:
        if not isinstance(args.exc_value, KeyboardInterrupt):
            hook(args)
            return
        number = signal.SIGTERM if isinstance(args.exc_value, Terminated) else signal.SIGINT
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, stop)
        timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))  # not at once: it would be swallowed here too
        timer.daemon = True
        timer.start()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, hook, usual = signal.signal(signal.SIGTERM, stop), sys.unraisablehook, signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # elsewhere it is ignored, or a caller's
        _CAME.clear()
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = swallowed
    try:
        with _watched({signal.SIGTERM} | ({signal.SIGINT} if usual is signal.default_int_handler else set())):
            yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, usual)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _watched(numbers: set[signal.Signals]) -> Iterator[None]:
    """End the process at a signal if Python's handler cannot run because the main thread is inside a library call."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    over = threading.Event()

    def watch() -> None:
        while heard := os.read(reads, 1):
            number = heard[0]
            for _ in range(DEAF_S if number in numbers else 0):  # each wait takes the GIL from a library that has it
                if over.wait(1.0) or number in _CAME:
                    break
            else:
                if number in numbers:
                    os.write(2, b"interrupted: a library did not return; finished runs are kept\n")
                    os._exit(128 + number)

    thread = threading.Thread(target=watch, daemon=True)
    with suppress(RuntimeError):  # no room for a thread
        thread.start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writes)
        if thread.ident is not None:
            thread.join()
        os.close(reads)
