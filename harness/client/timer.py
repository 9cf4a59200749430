"""One timer for an absolute time of CLOCK_MONOTONIC.

Timers of event loops have a resolution of milliseconds; the kernel's timerfd is finer. On a system without timerfd the
loop's timer is used, and `precise` is False: such a run makes no claim below a millisecond.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

NONBLOCK, CLOEXEC, ABSTIME = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0), 1  # TFD_*, in <sys/timerfd.h>


class Timer:
    """A timer that calls `fire` when CLOCK_MONOTONIC reaches the time that was last passed to `at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._loop, self._fire = loop, fire
        self._kernel = kernel_timer()
        self._handle: asyncio.TimerHandle | None = None
        self.precise = self._kernel is not None
        if self._kernel is not None:
            loop.add_reader(self._kernel.fd, self._read)

    def at(self, ns: int) -> None:
        """Set the timer to a time in ns, which replaces an earlier one; it fires at once if the time has passed."""
        if self._kernel is not None:
            self._kernel.at(max(1, ns))  # 0 disarms
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0, ns - time.monotonic_ns()) * 1e-9, self._fire)

    def close(self) -> None:
        """Stop the timer, so that it never fires again."""
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fd)
            os.close(self._kernel.fd)
        if self._handle is not None:
            self._handle.cancel()

    def _read(self) -> None:
        assert self._kernel is not None
        try:
            os.read(self._kernel.fd, 8)
        except BlockingIOError:  # set again since it fired
            return
        self._fire()


class Timerfd:
    """A timer of the Linux kernel (timerfd), called through the C library because Python has none before 3.13."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, NONBLOCK | CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def at(self, ns: int) -> None:
        """Arm the timer for an absolute time in ns."""
        spec = (ctypes.c_long * 4)(0, 0, *divmod(ns, 1_000_000_000))  # struct itimerspec: interval, then value
        if self._libc.timerfd_settime(self.fd, ABSTIME, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


def kernel_timer() -> Timerfd | None:
    """Return a timerfd; None if the system has none."""
    try:
        return Timerfd()
    except (OSError, AttributeError):  # the C library of a system other than Linux lacks the functions
        return None
