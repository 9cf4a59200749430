"""Synthetic traces fitted to measured ones: `MAKERS[name](seed)` draws one, the same for the same seed.

`arena-like` stands in for Arena-Chat: its 27 streams with their counts and its length quantiles are the trace's own;
arrival times, pairs of lengths and which stream pauses when are drawn. Duty, clusters and always-on share were fitted
by a grid over them, 6 seeds each. Mean of the fit / measured: CV of gaps 1.08 / 1.10, of minutes 0.11 / 0.13, its
quartiles over streams 0.63, 1.12, 1.58 / 0.63, 0.93, 1.73, active share 0.66 / 0.61, median idle gap 18.6 / 18.3 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workloads.arrivals import on_off, rng, zipf

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]


class Drawn(NamedTuple):
    """A drawn trace: arrays of one element a request, sorted by arrival."""

    span_s: float
    models: tuple[str, ...]
    arrival_s: F8
    model: I4  # index into `models`
    prompt_tokens: I4
    output_tokens: I4


# Requests of rank 0 .. 26 in Arena-Chat's 600 s; 1,500 in all.
ARENA_COUNTS = (
    199,
    40,
    296,
    22,
    66,
    120,
    67,
    56,
    36,
    23,
    262,
    26,
    43,
    44,
    22,
    46,
    25,
    3,
    12,
    19,
    31,
    2,
    19,
    11,
    2,
    7,
    1,
)
ARENA_SPAN_S = 600.0
ARENA_DUTY = (0.1, 1.0)  # of a stream's time, the share in which it is used: uniform
ARENA_CLUSTER, ARENA_GAP_S = 1.3, 1.0  # requests of a cluster, seconds between them
ARENA_ALWAYS_ON = 0.25  # of the streams, the hottest
# Quantiles of its lengths in tokens; between them the logarithm is linear. 513 outputs are an eighth of all.
QUANTILE = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
ARENA_PROMPT = (2, 5, 13, 40, 161, 432, 653.15, 902.27, 1021)
ARENA_OUTPUT = (2, 17.9, 62, 211, 458.25, 513, 513, 785, 977)
ARENA_RANK_CORRELATION = 0.264  # Spearman's, of prompt and output


def arena_like(seed: int) -> Drawn:
    """1,500 requests of 27 streams in 600 s."""
    names = tuple(f"dummy-lora-7b-rank-8-{rank}" for rank in range(len(ARENA_COUNTS)))  # its own, so that sets fit both
    return _draw("arena-like", seed, names, np.array(ARENA_COUNTS, np.float64), sum(ARENA_COUNTS), ARENA_SPAN_S)


def sample(seed: int) -> Drawn:
    """200 requests of 8 streams in 60 s, to try things on: Zipf popularity (s = 1), lengths as in Arena-Chat."""
    return _draw("sample", seed, tuple(f"stream-{rank}" for rank in range(8)), zipf(8, 1.0), 200, 60.0)


def _draw(name: str, seed: int, models: tuple[str, ...], weight: F8, requests: int, span_s: float) -> Drawn:
    """Draw exactly `requests`, shared out by weight; each stream is used in one period of its duty, in clusters."""
    streams = len(models)
    counts = rng(seed, name, "counts").multinomial(requests, weight / weight.sum())
    duty = rng(seed, name, "duty").uniform(*ARENA_DUTY, streams)
    duty[np.argsort(-weight, kind="stable")[: round(streams * ARENA_ALWAYS_ON)]] = 1.0
    times = [
        _times(rng(seed, name, "times", stream), int(count), span_s, float(duty[stream]))
        for stream, count in enumerate(counts)
    ]
    arrival_s = np.concatenate(times)
    order = np.argsort(arrival_s, kind="stable")
    model = np.repeat(np.arange(streams, dtype=np.int32), counts)
    prompt, output = _lengths(rng(seed, name, "lengths"), requests)
    return Drawn(span_s, models, arrival_s[order], model[order], prompt, output)


def _times(draw: np.random.Generator, count: int, span_s: float, duty: float) -> F8:
    """Draw `count` stamps: heads of clusters uniform over the on-time, the others an exponential gap after the last."""
    head = draw.uniform(0, 1, count) < 1 / ARENA_CLUSTER
    head[:1] = True
    gaps = np.where(head, 0.0, draw.exponential(ARENA_GAP_S, count))
    since = np.cumsum(gaps)
    starts = on_off(draw, draw.uniform(0, span_s * duty, int(head.sum())), span_s, duty, span_s)
    cluster = np.cumsum(head) - 1
    return np.asarray((starts[cluster] + since - since[head][cluster]) % span_s, np.float64)


def _lengths(rng: np.random.Generator, n: int) -> tuple[I4, I4]:
    """Pairs with the measured marginals and rank correlation."""
    r = 2 * np.sin(np.pi / 6 * ARENA_RANK_CORRELATION)  # of the normals whose ranks correlate so
    a, b = rng.standard_normal((2, n))
    return _quantile(_cdf(a), ARENA_PROMPT), _quantile(_cdf(r * a + np.sqrt(1 - r * r) * b), ARENA_OUTPUT)


def _cdf(x: F8) -> F8:
    """Return the standard normal's."""
    return np.array([0.5 + 0.5 * math.erf(one / math.sqrt(2)) for one in x])


def _quantile(u: F8, tokens: tuple[float, ...]) -> I4:
    return np.rint(np.exp(np.interp(u, QUANTILE, np.log(tokens)))).astype(np.int32)


MAKERS: Mapping[str, Callable[[int], Drawn]] = {"arena-like": arena_like, "sample": sample}
