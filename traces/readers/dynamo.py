"""NVIDIA Dynamo's request trace (DYN_REQUEST_TRACE=1, JSON lines): with the hashes of its blocks, where it has them.

The fields are described in ai-dynamo/dynamo 04daeb0 docs/fern/pages/use-cases/agents/agent-tracing.md. A sink may wrap
each record in a field `event`. Only records whose `event_type` is request_end are requests. `request_received_ms` is
milliseconds since 1970. All records must have blocks of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.policy.types import UserError
from traces import records
from traces.log import Lines
from traces.records import Record

FILES = ("dynamo-request-trace*.jsonl*", "*request-trace*.jsonl*")
KEYS = ({"event_type", "request"}, {"event"})
FIELDS = {
    "arrival_s": "request.request_received_ms",
    "model": "request.model",
    "prompt_tokens": "request.input_tokens",
    "output_tokens": "request.output_tokens",
    "session_id": "agent_context.session_id",
    "prefix_hashes": "request.replay.input_sequence_hashes",
    "request_id": "request.request_id",
}


def expand(lines: Lines) -> Lines:
    """Yield the record in the field `event` of each envelope; a record without an envelope is yielded as it is."""
    for line, record in lines:
        inner = record.get("event")
        yield line, inner if isinstance(inner, Mapping) else record


def skip(record: Record) -> str | None:
    """Return "failed" for a failed request, "" for an event that is not a request's end, and None for others."""
    if record.get("event_type") != "request_end":
        return ""
    reason = records.dig(record, "request.finish_reason_metadata.finish_reason")
    return "failed" if str(reason) in {"error", "cancelled"} else None


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: timestamps in milliseconds, and the size of prefix blocks in tokens.

    Raises UserError for records with different sizes of blocks.
    """
    sizes = set[int]()
    for line, record in expand(records.records(path)):
        size = records.dig(record, "request.replay.trace_block_size")
        if size is not None and (type(size) is not int or size < 1):
            raise UserError(f"{path}:{line}: trace_block_size is {str(size)[:40]}, not a number of tokens")
        sizes |= set() if size is None else {size}
    if len(sizes) > 1:
        raise UserError(f"{path}: trace_block_size is {', '.join(map(str, sorted(sizes)))}, not one size of blocks")
    return {"unit": 1e-3, "block_tokens": next(iter(sizes), None)}
