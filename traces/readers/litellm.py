"""LiteLLM's log: the table LiteLLM_SpendLogs (CSV, JSON, Parquet), or its callback's JSON.

Fields as in BerriAI/litellm schema.prisma, model LiteLLM_SpendLogs, and litellm/types/utils.py,
StandardLoggingPayload. `startTime` has no zone and is UTC; the callback's is seconds since 1970. `model_group` is the
name that clients ask for, `model` that of the backend, and stands where there is no group. Left out and counted:
requests that failed, that LiteLLM's own cache answered, and calls that generate no text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

FILES = ("*SpendLogs*",)
KEYS = ({"startTime", "prompt_tokens", "completion_tokens"},)
NAMES = {
    "arrival_s": "startTime",
    "model": "model_group",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
}
FIELDS = frozenset(
    {
        *NAMES.values(),
        "model",
        "status",
        "cache_hit",
        "call_type",
        "session_id",
        "trace_id",
        "end_user",
        "request_id",
        "id",
    }
)
TEXT = ("completion", "responses", "messages", "generate_content")  # in the names of calls that generate text


def request(record: Record) -> log.Reading:
    """Read a row, or say why it is left out."""
    call = str(record.get("call_type") or "completion")
    if not any(word in call for word in TEXT):
        return "of another call than text generation"
    if str(record.get("status") or "success").lower() not in {"success", "none"}:
        return "failed"
    if str(record.get("cache_hit")).lower() == "true":
        return "answered by the gateway's cache"
    return log.Request(
        record.get("startTime"),
        record.get("model_group") or record.get("model"),
        record.get("prompt_tokens"),
        record.get("completion_tokens"),
        record.get("session_id") or record.get("trace_id") or record.get("end_user"),
        id=record.get("request_id") or record.get("id"),
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as dates in UTC, or as seconds since 1970."""
    return log.read(path, request, NAMES, fields=FIELDS, **asked)
