"""States of a request, and the causes to which its time is attributed; the times of the causes sum to its latency."""

from __future__ import annotations

STATES = ("done", "dropped", "failed", "unfinished")
WAITS = ("admission", "host", "load", "kv", "transfer", "queue", "compute", "time_slice", "contention")
