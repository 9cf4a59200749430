"""SIGINT and SIGTERM as exceptions. Nothing heavy is imported: the command line needs them from its first moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT came while a policy was asked: what it raises by itself is its fault, and no Ctrl-C."""


class Terminated(Interrupted):
    """SIGTERM came. What a Ctrl-C passes through, this does."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated at SIGTERM, so that what is open gets closed. Outside the main thread nothing changes.

    A batch system ends all processes of a job, and the parent its workers: a second SIGTERM disturbs no closing.
    """

    def stop(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which processes that are started now inherit
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
