"""The load of the processors during a run: of the engine's main process, of its other processes, and of all others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Load:
    """Processor seconds since this object was created: of this process, of given processes, and of all others.

    They are read from Linux's `/proc`.
    """

    def __init__(self, pids: list[int]) -> None:
        self._since_s, self._busy_s, self._here_s = time.monotonic(), _busy_s(), time.process_time()
        self._pids = {pid: _spent_s(pid) for pid in pids}  # what each had spent at the start
        self._gone_s = 0.0

    def join(self, pid: int) -> None:
        """Count a process that was started after this object was created."""
        self._pids.setdefault(pid, 0.0)

    def leave(self, pid: int) -> None:
        """Stop watching a process that is about to end; its processor seconds stay in the total."""
        if pid in self._pids:
            self._gone_s += max(0.0, _spent_s(pid) - self._pids.pop(pid))

    def cores(self) -> tuple[float, float]:
        """Return two numbers of cores: those that this process kept busy, and those that strangers kept busy.

        Strangers are processes outside the engine.
        """
        span_s = max(time.monotonic() - self._since_s, TICK_S)
        here_s = time.process_time() - self._here_s
        others_s = sum(max(0.0, _spent_s(pid) - before_s) for pid, before_s in self._pids.items())
        strangers_s = _busy_s() - self._busy_s - here_s - others_s - self._gone_s
        return here_s / span_s, max(0.0, strangers_s) / span_s


def _spent_s(pid: int) -> float:
    """Return the processor seconds of a process, in user mode and in the kernel; 0 if the process is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return TICK_S * (int(fields[11]) + int(fields[12]))
    return 0.0


def _busy_s() -> float:
    """Return the seconds that all processors were busy since boot, without time stolen by a hypervisor."""
    with suppress(OSError, ValueError, IndexError):
        user, nice, system, _idle, _wait, irq, soft = map(
            int, Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:8]
        )
        return TICK_S * (user + nice + system + irq + soft)
    return 0.0
