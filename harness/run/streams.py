"""A description of how the streams of a user's trace are assigned to models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.policy.types import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.run.setup import Setup
    from harness.run.spec import Spec

MOST = 8  # models that a line lists
DRAWN = {
    "by traffic": "no model is named as a stream is, so each seed draws which of the busiest it gets; seed",
    "shuffled": "as each seed draws; seed",
    "square": "each of the busiest meets each size of model once in {} seeds; seed",
}


def check(setup: Setup) -> None:
    """Raise UserError, with the counts, if a log file has requests of streams that no model of the set serves.

    Named traces and generators are not checked, because there models may have only some of the streams.
    """
    from traces.chosen import listed
    from workloads.picking import assigned

    trace, models = setup.trace, setup.models
    if trace.maker is not None or not (setup.spec.trace.endswith(".parquet") or Path(setup.spec.trace).is_file()):
        return
    served = {stream for stream, _ in assigned(trace, models, setup.spec.seed, setup.spec.assign).streams}
    if served >= {*trace.models}:
        return
    counts = _requests(setup)
    if unserved := {name: n for name, n in counts.items() if n and name not in served}:
        count, of = sum(unserved.values()), sum(counts.values())
        raise UserError(
            f"log {trace.name}: {count:,} of {of:,} requests are of streams for which set {stem(models.name)} has no "
            "model: "
            f"{listed(unserved)} (--rename OLD=NEW, or --drop-streams NAME,... leaves them out, '*' all of them)"
        )


def _requests(setup: Setup) -> dict[str, int]:
    """Count the requests of each stream."""
    trace = setup.trace
    return dict(zip(trace.models, np.bincount(trace.model, minlength=len(trace.models)).tolist(), strict=True))


def stem(text: str) -> str:
    """Return the name of a file without folder and ending; return any other name unchanged."""
    return Path(text).stem if text.endswith((".toml", ".parquet", ".py")) else text


def halves(setup: Setup) -> None:
    """Raise UserError if a spec plans from one half of a log and replays the other, but one half has no request."""
    from workloads.picking import window_fold

    trace, spec = setup.trace, setup.spec
    if spec.workload == "base" or window_fold(trace, spec.seed, spec.plan) is None:
        return
    early = int(np.searchsorted(trace.arrival_s, trace.span_s / 2))
    if early in {0, len(trace)}:
        half = "second" if early else "first"
        raise UserError(
            f"{trace.name}: its {half} half, of {trace.span_s / 2:g} s, has no request, and each half is planned "
            "from the other (--plan trace replays all of it)"
        )


def share(kept: float) -> str:
    """Return a phrase with the share of a log's requests that is replayed; empty if all of them are."""
    return "" if kept >= 1 else f"of {min(99.9, 100 * kept):.3g} % of the log's requests"


def lines(setup: Setup, *, every: bool = False) -> list[str]:
    """Describe the rule by which models get streams, and list the models whose stream has another name.

    Return [] unless the trace is a .parquet file. With `every`, list all models, else only the first `MOST` whose
    stream has another name. Raises UserError if the trace has too few streams.
    """
    from workloads.picking import assigned, square_seeds

    spec, trace, models = setup.spec, setup.trace, setup.models
    if not spec.trace.endswith(".parquet"):
        return []
    assignment = assigned(trace, models, spec.seed, spec.assign)
    dealt = [(name, stream) for name, (stream, _) in zip(models.names, assignment.streams, strict=True)]
    pairs = [(name, stream) for name, stream in dealt if name != stream]
    head = f"streams {assignment.rule if assignment.rule != 'released' else 'as the set names them'}"
    if not pairs or assignment.rule == "released":
        return [f"{head}: {_listed(dealt, _requests(setup))}"] if every else [head]
    if assignment.rule in DRAWN:
        head += f" ({DRAWN[assignment.rule].format(square_seeds(trace, models))} {spec.seed}):"
    elif assignment.rule == "by name" and not every:
        head += f": {len(dealt) - len(pairs)} of {len(dealt)} models;"
    else:
        head, pairs = f"{head}:", dealt if assignment.rule == "by name" else pairs
    shown = pairs if every else pairs[:MOST]
    more = f", {len(pairs) - len(shown)} more (--dry-run lists all)" if len(shown) < len(pairs) else ""
    return [f"{head} {trace.name} -> {models.name}: {_listed(shown, _requests(setup))}{more}"]


def _listed(pairs: Iterable[tuple[str, str]], requests: Mapping[str, int]) -> str:
    """List models with their numbers of requests, and with the stream's name if it is not the model's."""
    return ", ".join(
        f"{model + f' <- {stream}' * (model != stream)} ({requests.get(stream, 0):,} requests)"
        for model, stream in pairs
    )


def of_all(specs: Iterable[Spec], *, every: bool = False) -> list[str]:
    """Return the `lines` of several specs. Those of each combination of trace, model set and assignment come once."""
    from harness.run.setup import Setup

    once = {(spec.trace, spec.models, spec.assign): spec for spec in specs}
    return [line for spec in once.values() for line in lines(Setup(spec), every=every)]
