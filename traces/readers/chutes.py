"""The trace of Chutes (chutes_trace.parquet, or a cut of it): one row a call of a marketplace for models.

Columns as in HarvardMadSys/chutes_workload 1f61bfb README.md. `started_at` counts from the trace's first request: in
seconds, or as a duration. Input tokens have the cached ones (`ct`) in them. A user is (`user_id`, `rehash_round`), for
ids change every three months.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

FILES = ("chutes_trace*",)
KEYS = ({"started_at", "chute_id", "it", "ot"},)
NAMES = {"arrival_s": "started_at", "model": "chute_id", "prompt_tokens": "it", "output_tokens": "ot"}
FIELDS = frozenset({*NAMES.values(), "user_id", "rehash_round"})


def request(record: Record) -> log.Reading:
    """Read a row."""
    at = record.get("started_at")
    user = record.get("user_id")
    return log.Request(
        at.total_seconds() if isinstance(at, timedelta) else at,
        record.get("chute_id"),
        record.get("it"),
        record.get("ot"),
        None if log.blank(user) else f"{user} {record.get('rehash_round')}",
    )


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as seconds from the first request."""
    known: dict[str, Any] = {"licence": "CC-BY-4.0"}
    return log.read(path, request, NAMES, fields=FIELDS, **known | asked)
