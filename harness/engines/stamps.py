"""The records of requests that engines keep, from which `rows.py` makes rows; this module needs only NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import Gpus, Jobs
from harness.rows.waits import WAITS

ENGINE_WAITS = tuple(wait for wait in WAITS if wait != "host")  # `batches` adds what the host took
NAMES = ("unfinished", "done", "dropped", "failed")
FIELDS = np.dtype(  # what `batches` reads of a request; an engine's own records may hold more
    [
        ("arrival", "f8"),  # seconds: when the engine saw it; infinite where it never came
        ("admit", "f8"),  # when first made a member of a batch; NaN: never. So with the next two
        ("first", "f8"),  # first token
        ("done", "f8"),  # last token, or other end
        *((wait, "f8") for wait in ENGINE_WAITS),  # seconds of its latency, by cause
        *((f"ttft_{wait}", "f8") for wait in ENGINE_WAITS),  # the same up to its first token; 0 where none came
        ("made", "i8"),  # tokens
        ("preemptions", "i8"),
        ("first_inst", "i8"),  # index of its first place, and of its last; -1: it never ran
        ("last_inst", "i8"),
    ]
)


def arrivals(R: NDArray[Any], jobs: Jobs, end_s: float, api_in_s: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the intended arrival of each request, in seconds.

    In a closed loop, a request that follows another arrives when its client sent it, or at `end_s` if its client had
    not sent it by then.
    """
    if jobs.after is None:
        return jobs.arrival_s
    # a request that its client had not sent when the run ended gets that time, outside the window
    return np.where(jobs.after < 0, jobs.arrival_s, np.minimum(R["arrival"] - api_in_s, end_s))


class Noted(NamedTuple):
    """The records of requests that an engine in real time keeps."""

    R: NDArray[Any]  # has the columns of FIELDS
    ends: NDArray[np.int8]  # indices of NAMES
    stamps_s: list[list[float]]  # each request's token times
    places: list[Gpus]
    late_s: NDArray[np.float64]  # from a request's arrival until the engine saw it
    end_s: float
