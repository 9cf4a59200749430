"""vLLM's spans (--otlp-traces-endpoint, a collector's file of JSON lines): `llm_request`, one a request.

The attributes are those of vllm-project/vllm vllm/tracing/utils.py, SpanAttributes. A span starts when its request
arrives; a request that is refused or aborted has no span. With `n` > 1 each answer has a span. The spans of vLLM 0.32
name no model (v1/engine/output_processor.py, do_tracing). The model is then the server's OTEL_SERVICE_NAME, or `--model
NAME`.
"""

from __future__ import annotations

from traces.readers import _otel
from traces.records import Record

KEYS = ({"resourceSpans"},)
MARK = "llm_request"  # a file of this kind has it
FIELDS = {
    "arrival_s": "startTimeUnixNano",
    "model": ("gen_ai.response.model", "gen_ai.request.model", "service"),
    "prompt_tokens": ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"),
    "output_tokens": ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
    "request_id": "span",
}
expand = _otel.spans


def skip(span: Record) -> str | None:
    """Return "failed" for a failed request, and None for one that was served.

    Spans that are not the engine's span of a request give "".
    """
    return "" if span["name"] != "llm_request" else "failed" if span["failed"] else None
