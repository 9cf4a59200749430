"""Causes of a request's time, which sum to its latency."""

from __future__ import annotations

WAITS = ("admission", "host", "load", "kv", "transfer", "queue", "compute", "time_slice", "contention")
