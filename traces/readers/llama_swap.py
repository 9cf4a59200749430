"""llama-swap's activity (GET /api/metrics/activity, or its rows): one a request that a server answered.

The fields are those of mostlygeek/llama-swap aecf92e internal/store/activity.go. A row is stored when its answer has
ended, so the request arrived `duration_ms` before `timestamp`. Input tokens are only those that were computed. The
prompt tokens are their sum with the cached tokens (`cache_tokens`, -1 if unknown).
"""

from __future__ import annotations

from typing import Any

from traces import log
from traces.log import Lines
from traces.records import Record

KEYS = ({"timestamp", "model", "tokens", "duration_ms"}, {"timestamp", "model", "input_tokens", "duration_ms"})
FIELDS = {
    "arrival_s": "timestamp",
    "model": "model",
    "prompt_tokens": "tokens.input_tokens",
    "output_tokens": ("tokens.output_tokens", "output_tokens"),
}
TEXT = ("completion", "responses", "messages", "infill")  # paths of calls that generate text have one of these


def skip(record: Record) -> str | None:
    """Return the reason to leave a row out; None for a row that is kept."""
    path = str(record.get("req_path") or "completions")
    if not any(word in path for word in TEXT):
        return "of another call than text generation"
    status = record.get("resp_status_code")
    return "failed" if record.get("error_msg") or str(200 if status is None else status) not in {"200", "0"} else None


def expand(lines: Lines) -> Lines:
    """Add cached tokens to the prompt tokens of each record, and change its timestamp from the end to the arrival."""
    for line, record in lines:
        tokens = log.mapping(record["tokens"]) if "tokens" in record else record
        prompt = log.total(tokens.get("input_tokens"), tokens.get("cache_tokens"))
        yield line, {**record, "timestamp": _arrival(record), "tokens.input_tokens": prompt}


def _arrival(record: Record) -> Any:
    ended, lasted_ms = record.get("timestamp"), record.get("duration_ms")
    try:
        ended_s = log.seconds(ended)
    except (TypeError, ValueError, OverflowError):
        return ended  # the check of rows refuses it
    try:
        return None if ended_s is None else ended_s - float(lasted_ms or 0.0) / 1e3
    except (TypeError, ValueError):
        return f"{ended} behind {lasted_ms} ms"
