"""Rows of a run of this bench (requests.parquet): what was offered in its window.

Requests of the warm-up, which are copies of others, are left out and counted. A request that ended early keeps the
output that was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

FILES = ("requests.parquet",)
KEYS = ({"arrival_ns", "admit_ns", "model", "prompt_tokens", "output_tokens"},)
NAMES = {
    "arrival_s": "arrival_ns",
    "model": "model",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
}
FIELDS = frozenset(NAMES.values())


def request(record: Record) -> log.Reading:
    """Read a row; one before the window is of the warm-up."""
    at = record.get("arrival_ns")
    if isinstance(at, int) and at < 0:
        return "of the warm-up"
    return log.Request(at, record.get("model"), record.get("prompt_tokens"), record.get("output_tokens"))


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as nanoseconds from the window's start; the trace has the name of the run's folder."""
    known: dict[str, Any] = {"name": path.parent.name} if path.name == FILES[0] else {}
    return log.read(path, request, NAMES, fields=FIELDS, unit=1e-9, **known | asked)
