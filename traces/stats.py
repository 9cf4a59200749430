"""Statistics of a trace: popularity, bursts, idle times and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.load import Trace
from traces.prefix import seen_tokens

F8 = NDArray[np.float64]

IDLE_S = 10.0  # the shortest gap that counts as idle (Prism)
ACTIVE_S = 120.0  # how long a model is active after a request (Prism)
MINUTE_S, HOUR_S = 60.0, 3600.0
NEAR_S = 10.0  # most time between returns that come together
BOTTOM = 0.6  # share of the models that are the least popular
LONG_TOKENS = 8192  # what Llama 3 served at first


MEANS = {  # what a trace's name, tier, requests, models, span and rate do not tell
    "iat_cv": "std / mean of the gaps between requests",
    "minute_cv": "std / mean of requests per whole minute",
    "top1_share": "of the requests, those of the hottest model",
    "bottom60_share": "of the requests, those of the floor(0.6 N) least popular models",
    "minute_cv_models": "quartiles over models of minute_cv, for models with a request",
    "idle_median_s": "quartiles over models of the median gap above 10 s, for models with one",
    "idle_per_hour": "quartiles over models of the number of such gaps an hour",
    "active_fraction": "of the models, those with a request in the past 2 minutes: mean over seconds",
    "returns_together": "of a model's requests after 2 idle minutes, those within 10 s of another model's",
    "switches_per_hour": "changes of the set of active models between those seconds",
    "prompt_tokens": "of a request",
    "output_tokens": "of a request",
    "over_8192_share": "of the requests, those of more than 8,192 tokens, prompt and output",
    "block_tokens": "of the blocks whose ids the trace has",
    "hit_share": "of the prompt tokens, those that a prefix cache without limit finds, in whole blocks",
    "one_token_outputs": "requests without a TPOT",
    "peak_hour": "requests of the busiest hour / those of the mean hour",
    "drift_per_hour": "share of the requests that another model gets from one hour to the next: mean",
}


def stats(trace: Trace) -> dict[str, Any]:
    """Measure a trace's popularity, bursts, idleness and lengths: the statistics in MEANS, and facts such as its span.

    Standard deviations are of the population (ddof 0). The time before a model's first request and the time after its
    last one do not count as gaps.
    """
    n, span_s = len(trace), trace.span_s
    counts = np.bincount(trace.model, minlength=len(trace.models))
    order = np.argsort(trace.model, kind="stable")
    by_model = np.split(trace.arrival_s[order], np.cumsum(counts)[:-1])
    idle = [gaps[gaps > IDLE_S] for gaps in map(np.diff, by_model)]
    active = _active(by_model, span_s)
    bottom = np.sort(counts)[: int(BOTTOM * len(counts))]
    return {
        "name": trace.name,
        "tier": trace.tier,
        "note": trace.note,
        "requests": n,
        "models": len(trace.models),
        "span_s": span_s,
        "rate_rps": n / span_s,
        "iat_cv": _cv(np.diff(trace.arrival_s)),
        "minute_cv": _cv(_minutes(trace.arrival_s, span_s)),
        "top1_share": float(counts.max() / n),
        "bottom60_share": float(bottom.sum() / n),
        "minute_cv_models": _quartiles([_cv(_minutes(times, span_s)) for times in by_model if len(times)]),
        "idle_median_s": _quartiles([float(np.median(gaps)) for gaps in idle if len(gaps)]),
        "idle_per_hour": _quartiles([len(gaps) * 3600 / span_s for gaps in idle]),
        "active_fraction": float(active.mean()),
        "returns_together": _together(by_model),
        "switches_per_hour": float(np.any(active[:, 1:] != active[:, :-1], axis=0).sum() * 3600 / span_s),
        "prompt_tokens": _lengths(trace.prompt_tokens),
        "output_tokens": _lengths(trace.output_tokens),
        "over_8192_share": float((trace.prompt_tokens.astype(np.int64) + trace.output_tokens > LONG_TOKENS).mean()),
        "block_tokens": None if trace.prefix is None else trace.prefix.block_tokens,
        "hit_share": _hit_share(trace),
        "one_token_outputs": int((trace.output_tokens == 1).sum()),
        "peak_hour": _peak_hour(trace),
        "drift_per_hour": _drift(trace),
        "counts": {name: int(counts[i]) for i, name in enumerate(trace.models)},
    }


def _hit_share(trace: Trace) -> float | None:
    if trace.prefix is None:
        return None
    return float(seen_tokens(trace.prefix, trace.prompt_tokens).sum() / trace.prompt_tokens.sum(dtype=np.int64))


def _minutes(times: F8, span_s: float) -> NDArray[np.int64]:
    """Count requests in each whole minute of the span; a request at the very end counts in the last minute."""
    whole = max(1, int(span_s // MINUTE_S))
    edges = np.arange(whole + 1) * min(MINUTE_S, span_s)
    return np.histogram(times, edges)[0]


def _active(by_model: list[F8], span_s: float) -> NDArray[np.bool_]:
    """Tell whether each model had a request in the past 2 minutes, for each second; shape (models, seconds)."""
    at = np.arange(0.0, span_s, 1.0)
    before = [
        np.searchsorted(times, at, "right") > np.searchsorted(times, at - ACTIVE_S, "right") for times in by_model
    ]
    return np.stack(before)


def _together(by_model: list[F8]) -> float | None:
    """Return the share of returns that are within 10 s of another model's return.

    A return is a model's first request after more than 2 minutes without any. None if there are fewer than two returns.
    """
    returns = [times[1:][np.diff(times) > ACTIVE_S] for times in by_model]
    when, owner = np.concatenate(returns), np.repeat(np.arange(len(returns)), [len(each) for each in returns])
    if len(when) < 2:
        return None
    order = np.argsort(when)
    when, owner = when[order], owner[order]
    near = np.zeros(len(when), bool)
    close = (np.diff(when) <= NEAR_S) & (np.diff(owner) != 0)
    near[1:] |= close
    near[:-1] |= close
    return float(near.mean())


def _hours(trace: Trace) -> NDArray[np.int64]:
    """Count the requests of each model in each whole hour; shape (models, hours)."""
    whole = int(trace.span_s // HOUR_S)
    inside = trace.arrival_s < whole * HOUR_S
    hour = (trace.arrival_s[inside] // HOUR_S).astype(np.int64)
    counts = np.zeros((len(trace.models), whole), np.int64)
    np.add.at(counts, (trace.model[inside], hour), 1)
    return counts


def _peak_hour(trace: Trace) -> float | None:
    by_hour = _hours(trace).sum(0)
    return float(by_hour.max() / by_hour.mean()) if len(by_hour) > 1 and by_hour.sum() else None


def _drift(trace: Trace) -> float | None:
    """Return the mean change of the models' shares of requests from one hour to the next, as total variation.

    Total variation is half the sum of the absolute changes. None with fewer than two hours that have requests.
    """
    counts = _hours(trace)
    shares = counts[:, counts.sum(0) > 0] / np.maximum(1, counts.sum(0))[counts.sum(0) > 0]
    return float(np.abs(np.diff(shares, axis=1)).sum(0).mean() / 2) if shares.shape[1] > 1 else None


def _cv(values: NDArray[Any]) -> float:
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std() / mean) if mean else float("nan")


def _quartiles(values: list[float]) -> list[float]:
    return [float(x) for x in np.quantile(values, (0.25, 0.5, 0.75))] if values else []


def _lengths(tokens: NDArray[np.int32]) -> dict[str, float]:
    p50, p99 = np.quantile(tokens, (0.5, 0.99))
    ends = {"max": int(tokens.max()), "min": int(tokens.min())}
    return {"mean": float(tokens.mean()), "p50": float(p50), "p99": float(p99), **ends}
