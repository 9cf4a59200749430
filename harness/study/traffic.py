"""The traffic of a question of size: the stretches of a trace that are replayed, and the tokens sent to its models."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.run.setup import load_trace
from traces import schema
from traces.load import Trace
from workloads.models import ModelSet
from workloads.picking import Assign, Picking

HOUR_S = 3600.0
WHOLE = "whole log"  # the view of a log under two hours


class View(NamedTuple):
    """A stretch of a trace that is replayed."""

    name: str  # whole log, busiest hour
    trace: str
    seeds: tuple[int, ...]


def views(name: str, windows: int, out: Path) -> tuple[View, ...]:
    """Return the stretches of a trace to replay.

    A log is a real trace. A log shorter than two hours is replayed whole, in two halves; each half is planned from the
    other. A log of two hours or more is replayed in its second half alone. A log file longer than two hours has a
    further stretch, its busiest hour. For a generator, the only stretch consists of the `windows` windows that it
    draws.
    """
    trace = load_trace(name)
    if trace.maker is not None:
        return (View("trace", name, tuple(range(windows))),)
    short = trace.span_s < 2 * HOUR_S
    whole = View(WHOLE, name, (0, 1)) if short else View("second half of the log", name, (0,))
    if trace.span_s <= 2 * HOUR_S or not name.endswith(".parquet"):
        return (whole,)
    edges = np.arange(0, trace.span_s - HOUR_S + 1, 600.0)
    counts = np.searchsorted(trace.arrival_s, edges + HOUR_S) - np.searchsorted(trace.arrival_s, edges)
    begin = float(edges[counts.argmax()])
    rows = schema.read(Path(name))
    inside = pc.and_(pc.greater_equal(rows["arrival_s"], begin), pc.less(rows["arrival_s"], begin + HOUR_S))
    hour = rows.filter(inside)
    at = hour.schema.get_field_index("arrival_s")
    hour = hour.set_column(at, hour.schema.field(at), pc.subtract(hour["arrival_s"], pa.scalar(begin)))
    hour = schema.noted(
        hour,
        f"the busiest hour, from {begin / HOUR_S:.2f} h on",
        span_s=HOUR_S,
        name=f"{trace.name}-hour",
        streams=list(trace.models),
    )
    path = out / "traces" / f"{Path(name).stem}-hour.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    schema.write(hour, path)
    return (whole, View("busiest hour", str(path), (0, 1)))


def million_tokens_hour(trace: Trace, models: ModelSet, assign: Assign = "released") -> float:
    """Return how many million tokens (prompt and output) a trace sends to a set of models in an hour."""
    every = Picking(trace, models, 0, assign=assign).rows()
    tokens = sum(int(rows.prompt_tokens.sum(dtype=np.int64) + rows.output_tokens.sum(dtype=np.int64)) for rows in every)
    return tokens / trace.span_s * HOUR_S / 1e6
