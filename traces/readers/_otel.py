"""Spans of OpenTelemetry in the three forms that people have: OTLP's JSON, that of the SDK's console, and flat rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from traces import log
from traces.records import Record

ERROR = {2, "2", "STATUS_CODE_ERROR", "ERROR", "error"}  # opentelemetry-proto, trace.proto, Status.StatusCode


def spans(record: Record) -> Iterable[Record]:
    """Yield spans as name, start (seconds since 1970, or ISO), trace, whether it failed, and attributes by name.

    OTLP also has the name of the service that a span is from.
    """
    if "resourceSpans" in record:
        for resource in _list(record["resourceSpans"]):
            service = _attributes(log.mapping(resource.get("resource")).get("attributes")).get("service.name")
            for scope in _list(resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans")):
                for span in _list(scope.get("spans")):
                    yield {**_span(span), "service": service}
    elif isinstance(record.get("spans"), list):
        for span in _list(record["spans"]):
            yield _span(span)
    else:
        yield _span(record)


def _list(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())


def _span(span: Mapping[str, Any]) -> Record:
    start: Any = span.get("startTimeUnixNano", span.get("start_time_unix_nano"))
    if start is not None and not isinstance(start, bool):
        with suppress(TypeError, ValueError, OverflowError):  # else it is shown as it stands
            start = int(start) / 1e9
    else:
        start = span.get("start_time") or span.get("startTime")
    trace = span.get("traceId") or span.get("trace_id") or log.mapping(span.get("context")).get("trace_id")
    status = log.mapping(span.get("status"))
    code = status.get("code", status.get("status_code"))
    return {
        "name": span.get("name"),
        "start": start,
        "trace": trace,
        "failed": code in ERROR,
        "id": span.get("spanId") or span.get("span_id") or log.mapping(span.get("context")).get("span_id"),
        "attributes": _attributes(span.get("attributes")),
    }


def _attributes(value: Any) -> dict[str, Any]:
    """Return attributes by name: OTLP has pairs of a key and a value that says its type."""
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


def first(attributes: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of some names that is there."""
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def text(attributes: Mapping[str, Any], name: str, usual: str = "") -> str:
    """Return an attribute that is a text; `usual` where there is none."""
    value = attributes.get(name)
    return value if isinstance(value, str) else usual
