"""The workload on which SLO bases are measured: the trace's requests, and drawn ones for models with few requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.policy.types import Jobs, Prefix
from traces.arrivals import rng
from traces.load import Trace
from traces.prefix import picked
from workloads.build import build, closed
from workloads.models import ModelSet
from workloads.picking import Assign, in_pieces

RARE = 100  # requests in the trace; a P95 of fewer depends on the slowest five
DRAWN = 1000  # requests that stand in for a rare model's


def base(trace: Trace, models: ModelSet, seed: int, assign: Assign = "released") -> Jobs:
    """Return the jobs on which SLO bases are measured: the trace at rate scale 1, without SLOs.

    A model with fewer than `RARE` requests gets `DRAWN` Poisson arrivals instead. They come at the model's mean rate,
    or at one request per span if the model has no request. Their pairs of lengths are drawn from all rows of the trace
    that are short enough for the model. The drawn arrivals may go on after the span, and share no prefix blocks. The
    jobs of a closed loop are not changed. If a trace is too long for memory, only its first `MOST_HELD` requests are
    used.
    """
    if in_pieces(trace):
        trace = trace.first(spilled.MOST_HELD)
    jobs = build(trace, models, seed=seed, assign=assign)
    if closed(trace) is not None:
        return jobs
    counts = np.bincount(jobs.model[jobs.arrival_s >= 0], minlength=len(models.members))
    rare = np.flatnonzero(counts < RARE)
    keep = ~np.isin(jobs.model, rare)
    parts: list[tuple[NDArray[Any], ...]] = [
        tuple(column[keep] for column in (jobs.arrival_s, jobs.model, jobs.prompt_tokens, jobs.output_tokens))
    ]
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    for i in rare:
        member = models.members[i]
        draw = rng(seed, "base", member.name)
        servable = np.flatnonzero(total <= member.shape.max_tokens)
        row = servable[draw.integers(0, len(servable), DRAWN)]
        when = np.cumsum(draw.exponential(trace.span_s / max(1, counts[i]), DRAWN))
        parts.append((when, np.full(DRAWN, i, np.int32), trace.prompt_tokens[row], trace.output_tokens[row]))
    arrival, model, prompt, output = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(arrival, kind="stable")
    none = np.full(len(arrival), np.inf)
    prefix = jobs.prefix and _behind(jobs.prefix, np.flatnonzero(keep), order)
    return Jobs(models.names, arrival[order], model[order], prompt[order], output[order], none, none, prefix=prefix)


def _behind(prefix: Prefix, kept: NDArray[np.int64], order: NDArray[np.int64]) -> Prefix:
    """Append requests without blocks to the prefix blocks of the rows `kept`, and return all in the order `order`."""
    blocks = picked(prefix, kept)
    drawn = np.full(len(order) - len(kept), blocks.offsets[-1])
    return picked(blocks._replace(offsets=np.append(blocks.offsets, drawn)), order)
