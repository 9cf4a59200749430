"""The time that runs take, from the side facts of stored runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.rows import record
from harness.run.setup import load_trace
from harness.run.spec import Spec

REQUESTS_PER_S, RUN_S = 150_000.0, 0.06  # of an unknown run: its slowest speed asked for; start and write measured


def speeds(out: Path) -> dict[str, float]:
    """Return the seconds per request of each system, from the side facts of stored runs."""
    spent: dict[str, list[float]] = {}
    for path in sorted(out.glob(f"*/{record.SIDE}"))[:200]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            side = json.loads(path.read_text("utf-8"))
            sums = spent.setdefault(path.parent.name.rpartition("-")[0], [0.0, 0.0])
            sums[0] += max(0.0, side["cpu_s"] - RUN_S)
            sums[1] += side["requests"]
    return {name: seconds / requests for name, (seconds, requests) in spent.items() if requests}


def estimate_s(spec: Spec, known: Mapping[str, float] | None = None) -> float:
    """Estimate the seconds of a run: from stored runs of its system where there are any."""
    scale = 1.0 if spec.scaling == "time" else spec.rate_scale
    each = (known or {}).get(spec.folder.rpartition("-")[0], 1 / REQUESTS_PER_S)
    return RUN_S + len(load_trace(spec.trace)) * scale * each
