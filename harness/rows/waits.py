"""States of a request, and causes of its time, which sum to its latency."""

from __future__ import annotations

STATES = ("done", "dropped", "failed", "unfinished")
WAITS = ("admission", "host", "load", "kv", "transfer", "queue", "compute", "time_slice", "contention")
