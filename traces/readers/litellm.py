"""LiteLLM's log: the table LiteLLM_SpendLogs (CSV, JSON, Parquet), or its callback's JSON.

The fields are those of BerriAI/litellm schema.prisma, model LiteLLM_SpendLogs, and litellm/types/utils.py,
StandardLoggingPayload. In the table `startTime` is a date in UTC without a zone; in the callback's JSON it is seconds
since 1970. `model_group` is the name that clients ask for. Without it, the backend's name `model` is used. Requests
that failed or that LiteLLM's own cache answered are left out and counted. So are calls that generate no text.
"""

from __future__ import annotations

from traces.records import Record

FILES = ("*SpendLogs*",)
KEYS = ({"startTime", "prompt_tokens", "completion_tokens"},)
FIELDS = {
    "arrival_s": "startTime",
    "model": ("model_group", "model"),
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "session_id": ("session_id", "trace_id", "end_user"),
    "request_id": ("request_id", "id"),
}
ALSO = frozenset({"status", "cache_hit", "call_type"})
TEXT = ("completion", "responses", "messages", "generate_content")  # calls that generate text are named so


def skip(record: Record) -> str | None:
    """Return the reason to leave a row out; None for a row that is kept."""
    call = str(record.get("call_type") or "completion")
    if not any(word in call for word in TEXT):
        return "of another call than text generation"
    if str(record.get("status") or "success").lower() not in {"success", "none"}:
        return "failed"
    return "answered by the gateway's cache" if str(record.get("cache_hit")).lower() == "true" else None
