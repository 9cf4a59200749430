"""vLLM's spans (--otlp-traces-endpoint, a collector's file of JSON lines): `llm_request`, one a request.

Attributes as in vllm-project/vllm vllm/tracing/utils.py, SpanAttributes. A span starts when its request arrives; one
that is refused or aborted has none. With `n` > 1 each answer has a span. The spans of vLLM 0.32 name no model
(v1/engine/output_processor.py, do_tracing): a server's OTEL_SERVICE_NAME is then its model, or `--model NAME`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.readers import _otel
from traces.records import Record

KEYS = ({"resourceSpans"},)
UNNAMED = "unknown_service"  # what the SDK calls a service without OTEL_SERVICE_NAME
MARK = "llm_request"  # in a file of this kind
NAMES = {
    "arrival_s": "startTimeUnixNano",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
}


def request(span: Record) -> log.Reading:
    """Read a span of the engine; None for those around it."""
    if span["name"] != "llm_request":
        return None
    if span["failed"]:
        return "failed"
    told, service = span["attributes"], span.get("service")
    named = service if isinstance(service, str) and not service.startswith(UNNAMED) else None
    return log.Request(
        span["start"],
        _otel.first({"service": named, **told}, "gen_ai.response.model", "gen_ai.request.model", "service"),
        _otel.first(told, "gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"),
        _otel.first(told, "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
        id=span["id"],
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as nanoseconds since 1970."""
    return log.read(path, request, NAMES, expand=_otel.spans, **asked)
