"""Wakes of servers that sleep by themselves when idle and wake with the next request: times and seconds.

These wakes are not ordered, and no answer of a server tells of one. They are inferred from the client's log: a request
that was written more than `idle_s` after its server had ended its last one, or was ready, woke it. The wake's seconds
are those from the request's writing to its first token, less the server's own seconds of its prompt where these are
known. Requests written in the meantime waited for the rest of it. The server's log has a line for each wake; a count
that differs is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.client.log import Log


class Stay(NamedTuple):
    """A server's time from ready to stopped, with the requests that it was sent."""

    model: str
    ready_s: float  # read off time.monotonic
    rids: Sequence[int]  # the requests that it was sent


class Wake(NamedTuple):
    """A wake of a server."""

    rid: int  # the request that woke it
    model: str
    seconds: float


def find(log: Log, stays: Iterable[Stay], idle_s: float) -> tuple[list[Wake], NDArray[np.float64]]:
    """Find the wakes of servers that sleep after `idle_s`, and the seconds that each request waited for one."""
    first_ns, waited_s = log.first_ns, np.zeros(len(log.state))
    wakes = list[Wake]()
    for stay in stays:
        quiet_ns, awake_ns = 1e9 * stay.ready_s, -math.inf
        for rid in sorted((r for r in stay.rids if log.write_ns[r] >= 0), key=lambda r: int(log.write_ns[r])):
            at_ns, end_ns = int(log.write_ns[rid]), int(log.end_ns[rid])
            if at_ns - quiet_ns > 1e9 * idle_s:
                came_ns = next((ns for ns in (int(first_ns[rid]), end_ns) if ns >= 0), at_ns)
                awake_ns = max(at_ns, came_ns - max(0, int(log.prompt_ns[rid])))
                wakes.append(Wake(rid, stay.model, (awake_ns - at_ns) / 1e9))
            waited_s[rid] = max(0.0, awake_ns - at_ns) / 1e9
            quiet_ns = max(quiet_ns, end_ns if end_ns >= 0 else math.inf)
    return wakes, waited_s


def count_lines(logs: Iterable[Path], line: str) -> int:
    """Return the number of wakes in the servers' logs, each of which is a line that contains `line`."""
    return sum(log.read_bytes().count(line.encode()) for log in logs if log.is_file())


def summary(wakes: Sequence[Wake], idle_s: float, logged: int) -> dict[str, Any]:
    """Return a run's account of its wakes, in words and numbers."""
    seconds = sorted(wake.seconds for wake in wakes)
    text = f"server's own: {len(wakes)} {'wake' if len(wakes) == 1 else 'wakes'} after {idle_s:g} s without a request"
    if seconds:
        text += f", {np.median(seconds):.2f} s each (median; longest {seconds[-1]:.2f})"
    if logged != len(wakes):
        text += f"; their logs tell of {logged}"
    models = {model: sum(wake.model == model for wake in wakes) for model in sorted({wake.model for wake in wakes})}
    return {"text": text, "by_model": models, "logged": logged}
