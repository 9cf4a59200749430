"""Staggered ramps: equal models whose request rates rise and fall one after the other, at fixed times.

They are the load of kvcached's latency benchmark (ovg-project/kvcached 06c31e0, benchmarks/bench_latency_benefit,
bench_kvcached_vllm.py, `get_ramp_up_down_requests`; results of 88b6753). In successive seconds a model gets 1, 2, ...
`peak`, ... 2, 1 requests, evenly spaced within each second, so `peak`^2 in all. Model i (from 0) begins after i x (peak
// 4 + 2 x peak) seconds.

All prompts have the same length. After each token, an output ends with a fixed probability; it also ends when it
reaches a cap. The probability follows from the mean length. Arrivals are not random; a seed decides which request has
which output.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from traces import schema


class Ramps(NamedTuple):
    """Requests sorted by arrival; requests that arrive at the same time are in the order of their models."""

    arrival_s: NDArray[np.float64]
    model: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]


def ramps(peak: int, models: int, prompt: int, cap: int, mean: float, seed: int = 0) -> Ramps:
    """Draw the ramps of all models; raises ValueError if no lengths up to `cap` have the mean `mean`."""
    one_s = ramp(peak)
    arrival_s = np.concatenate([one_s + k * (peak // 4 + 2 * peak) for k in range(models)])
    model = np.repeat(np.arange(models, dtype=np.int32), len(one_s))
    rng = np.random.default_rng([seed, peak])
    quantiles = outputs(len(one_s), cap, mean)
    output_tokens = np.concatenate([rng.permutation(quantiles) for _ in range(models)])
    order = np.lexsort((model, arrival_s))
    return Ramps(arrival_s[order], model[order], np.full(len(order), prompt, np.int32), output_tokens[order])


def store(path: Path, peak: int, models: int, prompt: int, cap: int, mean: float) -> Path:
    """Draw the ramps of models m0, m1, ..., write them to `path` as a canonical trace, and return `path`."""
    drawn = ramps(peak, models, prompt, cap, mean)
    note = f"staggered ramps to {peak} requests/s of {models} models, {prompt} + at most {cap} tokens, mean {mean:g}"
    span_s = float(np.ceil(drawn.arrival_s[-1]))
    meta = {"name": path.stem, "tier": "synthetic", "span_s": span_s, "note": note}
    names = [f"m{k}" for k in drawn.model]
    path.parent.mkdir(parents=True, exist_ok=True)
    schema.write(schema.requests(drawn.arrival_s, names, drawn.prompt_tokens, drawn.output_tokens, meta), path)
    return path


def ramp(peak: int) -> NDArray[np.float64]:
    """Return the arrival times of one model, in seconds from its first request."""
    rates = [*range(1, peak + 1), *range(peak - 1, 0, -1)]
    return np.concatenate([second + np.arange(rate) / rate for second, rate in enumerate(rates)])


def outputs(n: int, cap: int, mean: float) -> NDArray[np.int32]:
    """Return n output lengths in tokens: evenly spaced quantiles of min(`cap`, G), where G is geometric.

    The mean of min(`cap`, G) is `mean`; the mean of the n values may differ slightly. Raises ValueError if no geometric
    distribution gives this mean.
    """
    if mean in {1, cap}:
        return np.full(n, int(mean), np.int32)
    if not 1.0 < mean < cap:
        raise ValueError(f"outputs of 1 to {cap} tokens cannot have a mean of {mean:g}")

    def excess(end: float) -> float:
        return float(-np.expm1(cap * np.log1p(-end)) / end - mean)

    end = float(brentq(excess, 1e-12, 1.0 - 1e-12))
    above = 1.0 - (np.arange(n) + 0.5) / n
    lengths: NDArray[np.float64] = np.ceil(np.log(above) / np.log1p(-end))
    return np.minimum(cap, lengths).astype(np.int32)
