"""llama-swap's activity (GET /api/metrics/activity, or its rows): one a request that a server answered.

Fields as in mostlygeek/llama-swap aecf92e internal/store/activity.go. A row is stored when its answer has ended, so the
request came `duration_ms` before `timestamp`. Input tokens are those that were computed; those of the cache
(`cache_tokens`, -1 where unknown) are added, for a prompt is both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

KEYS = ({"timestamp", "model", "tokens", "duration_ms"}, {"timestamp", "model", "input_tokens", "duration_ms"})
NAMES = {
    "arrival_s": "timestamp",
    "model": "model",
    "prompt_tokens": "tokens.input_tokens",
    "output_tokens": "tokens.output_tokens",
}
TEXT = ("completion", "responses", "messages", "infill")  # in the paths of calls that generate text


def request(record: Record) -> log.Reading:
    """Read a row, or say why it is left out."""
    path = str(record.get("req_path") or "completions")
    if not any(word in path for word in TEXT):
        return "of another call than text generation"
    status = record.get("resp_status_code")
    if record.get("error_msg") or str(status if status is not None else 200) not in {"200", "0"}:
        return "failed"
    tokens = log.mapping(record["tokens"]) if "tokens" in record else record
    lasted = record.get("duration_ms")
    return log.Request(
        record.get("timestamp"),
        record.get("model"),
        log.total(tokens.get("input_tokens"), tokens.get("cache_tokens")),
        tokens.get("output_tokens"),
        before_s=float(lasted) / 1e3 if isinstance(lasted, int | float | str) and lasted != "" else 0.0,
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as dates."""
    return log.read(path, _request, NAMES, **asked)


def _request(record: Record) -> log.Reading:
    """Read a row; one whose duration is no number has no time."""
    try:
        return request(record)
    except ValueError:
        return log.Request("no duration", record.get("model"), None, None)
