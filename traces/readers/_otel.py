"""OpenTelemetry spans in three forms: OTLP's JSON, the output of the SDK's console exporter, and flat rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from traces import log
from traces.log import Lines
from traces.records import Record

ERROR = {2, "2", "STATUS_CODE_ERROR", "ERROR", "error"}  # opentelemetry-proto, trace.proto, Status.StatusCode
UNNAMED = "unknown_service"  # what the SDK calls a service without OTEL_SERVICE_NAME


def spans(lines: Lines) -> Lines:
    """Yield each span as one record: its attributes, and facts under names that are the same for all forms of spans.

    The facts are `name`, `startTimeUnixNano` (seconds since 1970, or a date), `trace`, `span` (the span's id) and
    `failed`. Spans of OTLP files have `service` too.
    """
    for line, record in lines:
        if "resourceSpans" in record:
            for resource in _list(record["resourceSpans"]):
                service = _attributes(log.mapping(resource.get("resource")).get("attributes")).get("service.name")
                known = isinstance(service, str) and not service.startswith(UNNAMED)
                for scope in _list(resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans")):
                    for span in _list(scope.get("spans")):
                        yield line, {**_span(span), "service": service if known else None}
        else:
            for span in _list(record["spans"]) if isinstance(record.get("spans"), list) else (record,):
                yield line, _span(span)


def _list(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())


def _span(span: Mapping[str, Any]) -> Record:
    start: Any = span.get("startTimeUnixNano", span.get("start_time_unix_nano"))
    if start is not None and not isinstance(start, bool):
        with suppress(TypeError, ValueError, OverflowError):  # the check of rows shows a bad one as it is
            start = int(start) / 1e9
    else:
        start = span.get("start_time") or span.get("startTime")
    context, status = log.mapping(span.get("context")), log.mapping(span.get("status"))
    return {
        **_attributes(span.get("attributes")),
        "name": span.get("name"),
        "startTimeUnixNano": start,
        "trace": span.get("traceId") or span.get("trace_id") or context.get("trace_id"),
        "failed": status.get("code", status.get("status_code")) in ERROR,
        "span": span.get("spanId") or span.get("span_id") or context.get("span_id"),
    }


def _attributes(value: Any) -> dict[str, Any]:
    """Return attributes as a mapping by name; OTLP writes them as a list of keys and typed values."""
    if not isinstance(value, list):
        return dict(log.mapping(value))
    named = {}
    for pair in _list(value):
        typed = pair.get("value")
        if isinstance(typed, Mapping):
            kind, typed = next(iter(typed.items()), ("", None))
            if kind == "intValue" and isinstance(typed, str):
                typed = int(typed) if typed.lstrip("-").isdecimal() else typed
        if isinstance(pair.get("key"), str):
            named[pair["key"]] = typed
    return named
