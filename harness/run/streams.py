"""The assignment of a user's trace's streams to models, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.run.setup import Setup
    from harness.run.spec import Spec

MOST = 8  # models that a line lists
DRAWN = {
    "by traffic": "the busiest, in an order that each seed draws; seed",
    "shuffled": "as each seed draws; seed",
    "square": "each of the busiest meets each size of model once in {} seeds; seed",
}


def lines(setup: Setup, *, every: bool = False) -> list[str]:
    """Say by which rule streams and models meet, and which ones where their names differ; nothing of a shipped trace.

    `every` lists all models, not the first `MOST`. UserError where the trace has too few streams.
    """
    from workloads.picking import assigned, square_seeds

    spec, trace, models = setup.spec, setup.trace, setup.models
    if not spec.trace.endswith(".parquet"):
        return []
    assignment = assigned(trace, models, spec.seed, spec.assign)
    pairs = [
        (name, stream) for name, (stream, _) in zip(models.names, assignment.streams, strict=True) if name != stream
    ]
    head = f"streams {assignment.rule if assignment.rule != 'released' else 'as the set names them'}"
    if not pairs or assignment.rule == "released":
        return [head]
    requests = dict(zip(trace.models, np.bincount(trace.model, minlength=len(trace.models)).tolist(), strict=True))
    shown = pairs if every else pairs[:MOST]
    listed = ", ".join(f"{model} <- {stream} ({requests.get(stream, 0):,} requests)" for model, stream in shown)
    more = f", {len(pairs) - len(shown)} more (--dry-run lists all)" if len(shown) < len(pairs) else ""
    if assignment.rule == "by name":
        equal = len(models.names) - len(pairs)
        return [f"{head}: {equal} of {len(models.names)} models; {trace.name} -> {models.name}: {listed}{more}"]
    how = ""
    if assignment.rule in DRAWN:
        how = f" ({DRAWN[assignment.rule].format(square_seeds(trace, models))} {spec.seed})"
    return [f"{head}{how}: {trace.name} -> {models.name}: {listed}{more}"]


def of_all(specs: Iterable[Spec], *, every: bool = False) -> list[str]:
    """Return the lines of specs, once for each trace, model set and assignment."""
    from harness.run.setup import Setup

    once = {(spec.trace, spec.models, spec.assign): spec for spec in specs}
    return [line for spec in once.values() for line in lines(Setup(spec), every=every)]
