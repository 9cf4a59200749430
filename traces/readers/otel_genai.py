"""OpenTelemetry's GenAI client spans (a collector's file, or the SDK's console) of calls that generate text.

Attributes are named as in open-telemetry/semantic-conventions-genai docs/gen-ai/client-inference.md, or by their former
names. The model is the one that the client asked for. Input tokens include cached ones. Messages that a span may carry
are not read.
"""

from __future__ import annotations

from traces.readers import _otel
from traces.records import Record

KEYS = ({"resourceSpans"}, {"name", "attributes", "start_time"})
MARK = "gen_ai."
FIELDS = {
    "arrival_s": "startTimeUnixNano",
    "model": ("gen_ai.request.model", "gen_ai.response.model"),
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "session_id": ("gen_ai.conversation.id", "trace"),
    "request_id": "span",
}
TEXT = {"chat", "text_completion", "generate_content"}
AGENTS = {"invoke_agent", "create_agent", "execute_tool", "invoke_workflow"}
expand = _otel.spans


def skip(span: Record) -> str | None:
    """Return the reason to leave a call out, "" for a span that is no model call, and None for a call that is kept."""
    operation = span.get("gen_ai.operation.name")
    operation = operation if isinstance(operation, str) else "chat"
    if span["name"] == "llm_request" or not any(name.startswith("gen_ai.") for name in span) or operation in AGENTS:
        return ""
    if operation not in TEXT:
        return "of another call than text generation"
    return "failed" if span["failed"] or span.get("error.type") else None
