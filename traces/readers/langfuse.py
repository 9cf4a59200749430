"""Langfuse's observations (an export of the UI or the API, or rows of its table): those of type GENERATION.

Columns as in langfuse/langfuse 3d053db packages/shared/clickhouse/migrations/clustered/0002_observations.up.sql, or as
its API writes them (startTime, providedModelName or model, usageDetails). The map of usage holds disjoint counts: a
prompt is the sum of all that begin with `input`, cached ones too. Left out and counted: those of level ERROR.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

KEYS = (
    {"start_time", "usage_details"},
    {"startTime", "usageDetails"},
    {"startTime", "usage", "type", "traceId"},
)
NAMES = {
    "arrival_s": "start_time",
    "model": "provided_model_name",
    "prompt_tokens": "usage_details.input",
    "output_tokens": "usage_details.output",
}
FIELDS = frozenset(
    {"start_time", "startTime", "provided_model_name", "providedModelName", "model", "usage_details", "usageDetails",
     "usage", "promptTokens", "completionTokens", "level", "type", "trace_id", "traceId", "session_id", "sessionId",
     "id"}
)  # fmt: skip


def request(record: Record) -> log.Reading:
    """Read a generation, or say why it is left out; None for other observations."""
    if str(record.get("type") or "GENERATION").upper() != "GENERATION":
        return None
    if str(record.get("level")).upper() == "ERROR":
        return "failed"
    usage = log.mapping(_first(record, "usage_details", "usageDetails", "usage"))
    return log.Request(
        _first(record, "start_time", "startTime"),
        _first(record, "provided_model_name", "providedModelName", "model"),
        _sum(usage, "input", "promptTokens") if usage else record.get("promptTokens"),
        _sum(usage, "output", "completionTokens") if usage else record.get("completionTokens"),
        _first(record, "session_id", "sessionId", "trace_id", "traceId"),
        id=record.get("id"),
    )


def _first(record: Record, *names: str) -> Any:
    return next(
        (
            record[name]
            for name in names
            if not log.blank(record.get(name)) or isinstance(record.get(name), Mapping | list)
        ),
        None,
    )


def _sum(usage: Mapping[str, Any], word: str, former: str) -> Any:
    counts = [count for name, count in usage.items() if name.startswith(word) and not name.endswith(("Cost", "_cost"))]
    if not counts:
        return usage.get(former)
    return log.total(*counts)


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as dates."""
    return log.read(path, _safe, NAMES, fields=FIELDS, **asked)


def _safe(record: Record) -> log.Reading:
    """Read a record whose cells may be objects."""
    return request(
        {
            key: value if not isinstance(value, Mapping | list) else dict(log.mapping(value))
            for key, value in record.items()
        }
    )
