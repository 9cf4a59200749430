"""OpenTelemetry's GenAI client spans (a collector's file, or the SDK's console) of calls that generate text.

Attributes as in open-telemetry/semantic-conventions-genai docs/gen-ai/client-inference.md, and their former names. The
model is the one that was asked for. Input tokens have those of a cache in them. Messages that a span may carry are not
read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.readers import _otel
from traces.records import Record

KEYS = ({"resourceSpans"}, {"name", "attributes", "start_time"})
MARK = "gen_ai."
NAMES = {
    "arrival_s": "startTimeUnixNano",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
TEXT = {"chat", "text_completion", "generate_content"}


def request(span: Record) -> log.Reading:
    """Read a span of a call; None for spans of something else."""
    told = span["attributes"]
    if span["name"] == "llm_request" or not any(name.startswith("gen_ai.") for name in told):
        return None
    operation = _otel.text(told, "gen_ai.operation.name", "chat")
    if operation in {"invoke_agent", "create_agent", "execute_tool", "invoke_workflow"}:
        return None
    if operation not in TEXT:
        return "of another call than text generation"
    if span["failed"] or told.get("error.type"):
        return "failed"
    return log.Request(
        span["start"],
        _otel.first(told, "gen_ai.request.model", "gen_ai.response.model"),
        _otel.first(told, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        _otel.first(told, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
        told.get("gen_ai.conversation.id") or span["trace"],
        id=span["id"],
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as nanoseconds since 1970, or as dates."""
    return log.read(path, request, NAMES, expand=_otel.spans, **asked)
