"""Rows of a run of this bench (requests.parquet): what was offered in its window.

Requests of the warm-up, which are copies of others, are left out and counted. A request that ended early keeps the
number of output tokens that was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traces.records import Record

FILES = ("requests.parquet",)
KEYS = ({"arrival_ns", "admit_ns", "model", "prompt_tokens", "output_tokens"},)
FIELDS = {
    "arrival_s": "arrival_ns",
    "model": "model",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
}
ALSO = frozenset[str]()


def skip(record: Record) -> str | None:
    """Return the reason to leave out a request that arrived before the window; None for others."""
    at = record.get("arrival_ns")
    return "of the warm-up" if isinstance(at, int) and at < 0 else None


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: timestamps in nanoseconds, and the run's folder as the trace's name."""
    return {"unit": 1e-9} | ({"name": path.parent.name} if path.name == FILES[0] else {})
