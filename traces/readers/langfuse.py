"""Langfuse's observations (an export of the UI or the API, or rows of its table): those of type GENERATION.

The columns are those of langfuse/langfuse 3d053db
packages/shared/clickhouse/migrations/clustered/0002_observations.up.sql, or those of its API (startTime,
providedModelName or model, usageDetails). No token is in two counts of the usage map. So prompt tokens are the sum of
all counts whose names begin with `input`, cached ones included. Observations of level ERROR are left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traces import log
from traces.log import Lines
from traces.records import Record

KEYS = ({"start_time", "usage_details"}, {"startTime", "usageDetails"}, {"startTime", "usage", "type", "traceId"})
USAGE = ("usage_details", "usageDetails", "usage")
FIELDS = {
    "arrival_s": ("start_time", "startTime"),
    "model": ("provided_model_name", "providedModelName", "model"),
    "prompt_tokens": ("usage_details.input", "promptTokens"),
    "output_tokens": ("usage_details.output", "completionTokens"),
    "session_id": ("session_id", "sessionId", "trace_id", "traceId"),
    "request_id": "id",
}
ALSO = frozenset({*USAGE, "level", "type"})


def skip(record: Record) -> str | None:
    """Return "failed" for a failed generation, "" for an observation that is not a generation, and None for others."""
    if str(record.get("type") or "GENERATION").upper() != "GENERATION":
        return ""
    return "failed" if str(record.get("level")).upper() == "ERROR" else None


def expand(lines: Lines) -> Lines:
    """Add to each record its prompt tokens and output tokens, each summed over separate counts of the usage map."""
    for line, record in lines:
        usage = log.mapping(log.first(record, USAGE))
        counts = {
            "usage_details.input": _sum(usage, "input", "promptTokens"),
            "usage_details.output": _sum(usage, "output", "completionTokens"),
        }
        yield line, {**record, **(counts if usage else {})}


def _sum(usage: Mapping[str, Any], word: str, former: str) -> Any:
    counts = [count for name, count in usage.items() if name.startswith(word) and not name.endswith(("Cost", "_cost"))]
    return log.total(*counts) if counts else usage.get(former)
