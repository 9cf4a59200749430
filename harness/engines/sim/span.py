"""Sums over the measurement window of a run, [0, window_s), which excludes warm-up and drain.

All runs of a table use the same window, however long each run drains. The clock stops at both ends of the window, and
the sums so far are recorded there. If a run ends before the window does, the run's last state is assumed to last
until the window's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUMS = {  # a name in the statistics maps to the field of a GPU that has it
    "gpu_busy_s": "busy_s",
    "gpu_hbm_s": "hbm_s",
    "gpu_flop_s": "flop_s",
    "gpu_held_s": "held_s",
    "kv_byte_s": "kv_byte_s",
}


class Span:
    """A recorder of the GPUs' running sums at both ends of a run's window.

    A window without an end lasts until the run ends.
    """

    def __init__(self, window_s: float) -> None:
        self._marks = [0.0, window_s] if math.isfinite(window_s) else [0.0]
        self._window_s = window_s
        self._noted = dict[float, dict[str, float]]()

    @property
    def next_s(self) -> float:
        """The next time at which the sums must be recorded; infinite after the last such time."""
        return self._marks[0] if self._marks else math.inf

    def note(self, gpus: NDArray[Any]) -> None:
        """Record the sums at `next_s`; the simulated clock must be at that time."""
        at_s = self._marks.pop(0)
        self._noted[at_s] = sums(gpus, at_s)

    def stats(self, gpus: NDArray[Any], now_s: float) -> Mapping[str, float]:
        """Return the sums over the window, and the window's length `span_s`. Call it after the run."""
        end_s = self._window_s if math.isfinite(self._window_s) else max(0.0, now_s)
        begin, end = (self._noted.get(at_s) or sums(gpus, at_s) for at_s in (0.0, end_s))
        return {name: end[name] - begin[name] for name in SUMS} | {"kv_cap_bytes": end["kv_cap_bytes"], "span_s": end_s}


def sums(gpus: NDArray[Any], at_s: float) -> dict[str, float]:
    """Return the sums over all GPUs up to `at_s`, and the bytes of GPU memory that KV can use.

    The GPUs' present state is assumed to last until `at_s`.
    """
    each = {name: gpus[key].copy() for name, key in SUMS.items()}
    each["gpu_busy_s"] += np.where(gpus["active"] > 0, at_s - gpus["busy_since"], 0.0)
    each["gpu_held_s"] += np.where(gpus["insts"] > 0, at_s - gpus["held_since"], 0.0)
    each["kv_byte_s"] += gpus["kv_bytes"] * (at_s - gpus["kv_since"])
    each["kv_cap_bytes"] = gpus["cap"] - (gpus["used"] - gpus["kv_bytes"])
    return {name: float(values.sum()) for name, values in each.items()}
