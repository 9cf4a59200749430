"""One timer at an absolute time of CLOCK_MONOTONIC.

The timers of event loops tick in milliseconds; the kernel's timerfd does not. Where there is none, the loop's timer
stands in, and `precise` is False: such a run makes no claim below a millisecond.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

NONBLOCK, CLOEXEC, ABSTIME = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0), 1  # TFD_*, in <sys/timerfd.h>


class Timer:
    """A timer that calls `fire` once the clock reaches the last time given to `at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None], kernel: bool = True) -> None:
        self._loop, self._fire = loop, fire
        self._set = kernel_timer() if kernel else None
        self._handle: asyncio.TimerHandle | None = None
        self.precise = self._set is not None
        if self._set is not None:
            loop.add_reader(self._set.fd, self._read)

    def at(self, ns: int) -> None:
        """Fire at a time in ns, at once if it has passed; this replaces the time that was set before."""
        if self._set is not None:
            self._set.at(max(1, ns))  # 0 disarms
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0, ns - time.monotonic_ns()) * 1e-9, self._fire)

    def close(self) -> None:
        """Never fire again."""
        if self._set is not None:
            self._loop.remove_reader(self._set.fd)
            os.close(self._set.fd)
            self._set = None
        if self._handle is not None:
            self._handle.cancel()

    def _read(self) -> None:
        assert self._set is not None
        try:
            os.read(self._set.fd, 8)
        except BlockingIOError:  # set again since it fired
            return
        self._fire()


class Timerfd:
    """A timerfd by the standard library."""

    fd: int

    def __init__(self) -> None:
        if sys.version_info < (3, 13):
            raise OSError("no os.timerfd_create")
        self.fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def at(self, ns: int) -> None:
        """Arm the timer for an absolute time in ns."""
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self.fd, flags=os.TFD_TIMER_ABSTIME, initial=ns)


class Libc(Timerfd):
    """A timerfd by the C library, for Python before 3.13."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, NONBLOCK | CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval, then value, each seconds and nanoseconds

    def at(self, ns: int) -> None:
        """Arm the timer for an absolute time in ns."""
        self._spec[2], self._spec[3] = divmod(ns, 1_000_000_000)
        if self._libc.timerfd_settime(self.fd, ABSTIME, self._spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


def kernel_timer() -> Timerfd | None:
    """Return a timerfd; None if the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    for kind in (Timerfd, Libc):
        try:
            return kind()
        except (OSError, AttributeError):
            continue
    return None
