"""Make rows of requests from the client's log and the engine's records; client.parquet has each chunk.

Until a request is sent to its server, the engine charges its time to causes. They are `admission` until the request is
admitted, `load` while its server is starting, and `queue` while its lane is closed. After that, the times are those of
the client's log. The time until the request is written is `host` (lag and connection); the time from then to the end is
`compute`. If a request failed without a token, all its time after sending is `host`, because nothing shows that the
request ran.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness.client.log import Log
from harness.engines import rows, stamps
from harness.policy.types import Gpus, Jobs
from harness.rows.record import SCHEMA

NUMBER = re.compile(r"[0-9]+")
SAID = ("intended_ns", "due_ns", "write_ns", "byte_ns", "done_ns", "end_ns")


class Chunks(NamedTuple):
    """The chunks of all answers that came by the run's end, as arrays like those of `Log`."""

    offsets: NDArray[np.int64]
    ns: NDArray[np.int64]  # from the window's start
    tokens: NDArray[np.int64]


def chunks(log: Log, zero_ns: int, end_s: float) -> Chunks:
    """Return the chunks that came by the run's end.

    If a finished request's usage reports another number of tokens than its chunks, the usage's number is spread over
    the chunks.
    """
    ns = log.chunk_ns - zero_ns
    kept = ns <= end_s * 1e9
    of = np.repeat(np.arange(len(log.state)), np.diff(log.offsets))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of[kept], minlength=len(log.state)))]).astype(np.int64)
    tokens = log.chunk_tokens[kept].astype(np.int64)
    whole = log.by_event & (log.done_ns - zero_ns <= end_s * 1e9)
    for i in np.flatnonzero(whole).tolist():
        a, b = offsets[i], offsets[i + 1]
        until = np.maximum(1, np.floor(np.arange(1, b - a + 1) * log.usage_tokens[i] / (b - a) + 0.5)).astype(np.int64)
        tokens[a:b] = np.diff(until, prepend=0)
    return Chunks(offsets, ns[kept], tokens)


def batches(
    R: NDArray[Any],
    ends: NDArray[Any],
    sent_s: NDArray[np.float64],
    log: Log,
    jobs: Jobs,
    places: list[Gpus],
    *,
    zero_ns: int,
    end_s: float,
    token_times: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of requests.parquet in batches.

    `R` has the fields of `stamps.FIELDS`, and `ends` has indices of `stamps.NAMES`. Numbers of tokens, first-token
    times and all times after sending are set here, from the client's log. `sent_s` is the time at which the engine gave
    each request to its server (NaN: never).
    `zero_ns` is the client's clock at 0 s.
    """
    seen = chunks(log, zero_ns, end_s)
    some = np.diff(seen.offsets) > 0
    at = seen.offsets[:-1][some]
    total = np.concatenate([[0], np.cumsum(seen.tokens)])
    R["made"] = total[seen.offsets[1:]] - total[seen.offsets[:-1]]
    R["first"] = np.nan
    R["first"][some] = seen.ns[at] / 1e9
    first_tokens = np.zeros(len(R), np.int64)
    first_tokens[some] = seen.tokens[at]
    until_s = np.where(ends > 0, R["done"], end_s)
    write_s = np.where(log.write_ns >= 0, (log.write_ns - zero_ns) / 1e9, np.inf)
    sent = np.isfinite(sent_s)
    silent = (R["made"] == 0) & (ends == stamps.NAMES.index("failed"))
    leaves_s = np.where(silent, until_s, np.minimum(write_s, until_s))
    host_s = np.where(sent, leaves_s - sent_s, 0.0)
    served_s = np.where(sent, until_s - leaves_s, 0.0)
    for wait in stamps.ENGINE_WAITS:
        R[f"ttft_{wait}"] = R[wait]  # until it was sent
    R["ttft_compute"] = np.where(some & sent, np.minimum(R["first"], until_s) - leaves_s, 0.0).clip(0.0, served_s)
    R["compute"] = served_s
    tokens = None
    if token_times:
        due_ns = np.rint(R["arrival"] * 1e9)
        of = np.repeat(np.arange(len(R)), np.diff(seen.offsets))
        ns = np.repeat(seen.ns - np.where(np.isfinite(due_ns), due_ns, 0)[of].astype(np.int64), seen.tokens)
        offsets = np.concatenate([[0], np.cumsum(R["made"])])
        tokens = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ns, pa.int64()))
        tokens = tokens.cast(SCHEMA.field("token_ns").type)
    yield from rows.batches(
        R,
        ends.__getitem__,
        jobs,
        places,
        arrivals_s=stamps.arrivals(R, jobs, end_s, 0.0),
        fidelity="real",
        end_s=end_s,
        api_in_s=host_s,
        api_out_s=0.0,
        tokens=tokens,
        first_tokens=first_tokens,
    )


def whole(log: Log, errors: Mapping[int, str]) -> list[str]:
    """Return the reason why each request failed; "" for a request that did not.

    The engine's `errors`, keyed by request, take precedence over the errors in the client's log.
    """
    return [errors.get(i, error) for i, error in enumerate(log.error)]


def table(log: Log, zero_ns: int, errors: Mapping[int, str]) -> pa.Table:
    """Return a table of the client's facts about each request that its row in requests.parquet lacks.

    Its columns are stamps in ns from the window's start, status, tries, usage, error and chunks.
    """

    def stamps(ns: NDArray[np.int64]) -> pa.Array:
        return pa.array(ns - zero_ns, mask=ns < 0)

    lists = {"chunk_ns": log.chunk_ns - zero_ns, "chunk_tokens": log.chunk_tokens, "chunk_shared": log.chunk_shared}
    offsets = pa.array(log.offsets, pa.int32())
    return pa.table(
        {
            "id": np.arange(len(log.state)),
            **{name: stamps(getattr(log, name)) for name in SAID},
            "status": log.status,
            "tries": (log.due_ns >= 0).astype(np.int32),  # how often it was sent
            "usage_tokens": pa.array(log.usage_tokens, mask=log.usage_tokens < 0),
            "by_event": log.by_event,
            "cached_tokens": pa.array(log.cached_tokens, mask=log.cached_tokens < 0),
            "prompt_ns": pa.array(log.prompt_ns, mask=log.prompt_ns < 0),
            "error": whole(log, errors),
            **{name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()},
        }
    )


def failures(errors: Iterable[str]) -> dict[str, int]:
    """Count errors by their text.

    Errors that differ only in numbers count together. Their key is "as " and the text of the first one.
    """
    alike = dict[str, Counter[str]]()
    for error in filter(None, errors):
        alike.setdefault(NUMBER.sub("#", error), Counter())[error] += 1
    return {("as " if len(each) > 1 else "") + next(iter(each)): each.total() for each in alike.values()}


def parquet(data: pa.Table) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    out = io.BytesIO()
    pq.write_table(data, out, compression="zstd")
    return out.getvalue()
