"""Causes of misses. A miss is explained by the cause with the most excess time in the part that missed a limit.

A request's time has two parts: until its first token, and after it. The second part contains the longest gap between
two tokens. Each part is divided among causes (record.WAITS), whose times sum to the part. If the gaps are not known
(runs without token times, real servers, older files), all time after the first token replaces the longest gap.

A cause's excess is its time beyond what the request takes alone: on an idle GPU under the same batching limits. Alone,
a request takes only the time of its own steps and of the host. So the excess of `compute` is the extra time of the
request's steps, because they were batched with others or computed again. The excess of any other cause is all of its
time, with one exception. If the engine reports the time alone, a finished request has no excess of `host`, because that
time includes the host's.

For the longest gap, the time alone is the request's mean decode step alone. If no engine reports the time alone (real
servers), `compute` has no excess. A request that failed, because a server refused it or stopped early, has the cause
`failed`, whatever it waited for.

If any gap between two tokens exceeds a limit, then so does the longest gap. So the longest gap explains the miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.rows.definitions import DEFINITIONS, tpot, ttft
from harness.rows.requests import late, limits, take
from harness.rows.waits import STATES, WAITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.rows.requests import Bools, Floats, Limits, Rows, Slo

CAUSES = (*WAITS, "failed")  # a miss has one of them
HOST, COMPUTE = WAITS.index("host"), WAITS.index("compute")


def excess_s(rows: Rows) -> Floats:
    """Compute how many seconds each request took beyond its time alone: (requests, parts, causes).

    The parts are the time until the first token, the time after it, and the longest gap.
    """
    first, after = rows.ttft_waits_s, rows.waits_s - rows.ttft_waits_s
    told = ~np.isnan(rows.gap_waits_s)
    parts = np.stack([first, after, np.where(told, rows.gap_waits_s, after)], axis=1)
    step_s = rows.alone_s[:, 1] / np.where(told[:, COMPUTE], np.maximum(rows.output_tokens - 1, 1), 1)
    alone_s = np.column_stack([rows.alone_s, step_s])
    alone = ~np.isnan(alone_s)
    parts[:, :, COMPUTE] = np.where(alone, parts[:, :, COMPUTE] - alone_s, 0.0)
    parts[:, :, HOST] = np.where(alone & rows.done[:, None], 0.0, parts[:, :, HOST])
    excess: Floats = np.maximum(parts, 0.0)
    return excess


def parts_missed(rows: Rows, slo: Limits, definition: str) -> Bools:
    """Mark the parts that explain each request's miss, in the order of `excess_s`: (requests, 3).

    If a request did not finish, its miss is explained by the part in which it was at the end.
    """
    none, no = rows.first_tokens == 0, np.zeros(len(rows), bool)
    match DEFINITIONS[definition].part:
        case "limits":
            done = np.stack([~ttft(rows, slo), ~tpot(rows, slo), no], axis=1)
        case "ttft":
            done = np.tile([True, False, False], (len(rows), 1))
        case "decode":
            done = np.tile([False, True, False], (len(rows), 1))
        case "longest gap":
            done = np.tile([False, False, True], (len(rows), 1))
        case "whole":
            done = np.tile([True, True, False], (len(rows), 1))
        case "first late token":
            stamps = rows.stamps
            begun = stamps.counts > 0
            first = np.ones(len(rows), bool)
            first[begun] = late(rows, slo)[stamps.at[:-1][begun]]
            done = np.stack([first, ~first, no], axis=1)
    return np.where(rows.done[:, None], done, np.stack([none, ~none, no], axis=1))


def main(rows: Rows, slo: Slo, definition: str) -> NDArray[np.int64]:
    """Return each request's cause as an index of CAUSES.

    The cause is `failed` for a failed request. Otherwise it is the cause with the most excess in the parts that missed
    a limit. Ties go to the earlier cause. A request without excess is too slow even alone: its cause is `compute`.
    """
    excess = (excess_s(rows) * parts_missed(rows, limits(rows, slo), definition)[:, :, None]).sum(axis=1)
    waited = np.where(excess.any(axis=1), excess.argmax(axis=1), COMPUTE)
    return np.where(rows.state == STATES.index("failed"), CAUSES.index("failed"), waited)


def shares(rows: Rows, slo: Slo, definition: str, scores: Floats) -> dict[str, float]:
    """Return each cause's share of a definition's misses (score < 1); the shares sum to 1. {} without a miss."""
    return of_counts(counts(rows, slo, definition, scores))


def of_counts(count: NDArray[np.int64]) -> dict[str, float]:
    """Return each cause's share of all misses, from the number of misses by cause; {} without any."""
    whole = int(count.sum())
    return {wait: float(x / whole) for wait, x in zip(CAUSES, count, strict=True)} if whole else {}


def counts(rows: Rows, slo: Slo, definition: str, scores: Floats) -> NDArray[np.int64]:
    """Count a definition's misses (score < 1) by the cause that explains each."""
    which = scores < 1.0
    if not which.any():
        return np.zeros(len(CAUSES), np.int64)
    missed = main(take(rows, which), limits(rows, slo).take(which), definition)
    return np.bincount(missed, minlength=len(CAUSES))
