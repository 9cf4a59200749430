"""Processor load of processes that do not belong to a run: neither its client nor its servers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


class OtherLoad:
    """The mean load of all processes except `pids` and their descendants, in cores, since this object was made.

    The processor time of the excepted processes is subtracted from the busy time of all processors. The difference,
    divided by the time passed, is the load. The processor time of an ended child is counted only once its parent has
    waited for it.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = list(pids)
        self._since_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), own_s(self._roots)

    def cores(self) -> float:
        """Return the mean number of cores that other processes kept busy since this object was made."""
        span_s = time.monotonic() - self._since_s
        others_s = _busy_s() - self._busy_s - (own_s(self._roots) - self._own_s)
        return max(0.0, others_s) / span_s if span_s > 0 else 0.0


def own_s(pids: Iterable[int]) -> float:
    """Return the processor seconds of processes and their descendants; each process counts once."""
    family = dict[int, psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            family |= {process.pid: process for process in (root, *root.children(recursive=True))}
    total = 0.0
    for process in family.values():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def _busy_s() -> float:
    """Return the seconds that all processors were busy since boot, without time stolen by a hypervisor."""
    spent = psutil.cpu_times()
    return float(sum(getattr(spent, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))
