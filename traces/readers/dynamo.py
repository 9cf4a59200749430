"""NVIDIA Dynamo's request trace (DYN_REQUEST_TRACE=1, JSON lines): with the hashes of its blocks, where it has them.

Fields as in ai-dynamo/dynamo 04daeb0 docs/fern/pages/use-cases/agents/agent-tracing.md. A sink may wrap each record
under `event`. Rows are those of `event_type` request_end; `request_received_ms` is milliseconds since 1970. All records
must have blocks of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.policy.types import UserError
from traces import log, records
from traces.records import Record

FILES = ("dynamo-request-trace*.jsonl*", "*request-trace*.jsonl*")
KEYS = ({"event_type", "request"}, {"event"})
NAMES = {
    "arrival_s": "request.request_received_ms",
    "model": "request.model",
    "prompt_tokens": "request.input_tokens",
    "output_tokens": "request.output_tokens",
}


def expand(record: Record) -> Iterable[Record]:
    """Take a record out of its envelope."""
    inner = record.get("event")
    yield inner if isinstance(inner, Mapping) else record


def request(record: Record) -> log.Reading:
    """Read a request that ended; None for the other events."""
    if record.get("event_type") != "request_end":
        return None
    asked = log.mapping(record.get("request"))
    replay = log.mapping(asked.get("replay"))
    context = log.mapping(record.get("agent_context"))
    blocks = replay.get("input_sequence_hashes")
    if str(log.mapping(asked.get("finish_reason_metadata")).get("finish_reason")) in {"error", "cancelled"}:
        return "failed"
    return log.Request(
        asked.get("request_received_ms"),
        asked.get("model"),
        asked.get("input_tokens"),
        asked.get("output_tokens"),
        context.get("session_id"),
        blocks,
        id=asked.get("request_id"),
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as milliseconds since 1970."""
    sizes: dict[int, int] = {}  # with the line where each stands first
    for line, record in records.records(path):
        for part in expand(record):
            size = records.dig(part, "request.replay.trace_block_size")
            if size is not None and (type(size) is not int or size < 1):
                raise UserError(f"{path}:{line}: trace_block_size is {str(size)[:40]}, not a number of tokens")
            if size is not None:
                sizes.setdefault(size, line)
    if len(sizes) > 1:
        raise UserError(f"{path}: trace_block_size is {', '.join(map(str, sorted(sizes)))}, not one size of blocks")
    known: dict[str, Any] = {"block_tokens": next(iter(sizes), None)}
    return log.read(path, request, NAMES, expand=expand, unit=1e-3, **known | asked)
