"""Arrival processes and popularity; every draw comes from a generator that its purpose names.

Times are seconds from 0, sorted, below `span_s`; rates are requests per second; `rng` is consumed, never made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import UserError

F8 = NDArray[np.float64]
MOST_IN_FILES = 200_000_000  # a run whose trace and records lie in files takes some 100 GB there
MOST_REQUESTS = 10_000_000  # a run takes some 10 GB then, at 1 kB or so a request


def rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Make the counter-based random generator of a seed and a purpose.

    Each purpose has a stream of its own, so an additional draw for one purpose does not change the draws for another.
    """
    digest = blake2b(repr((seed, *purpose)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))


def zipf(models: int, s: float) -> F8:
    """Return the share of each of `models` ranks, proportional to rank^-s; the shares sum to 1."""
    positive("models", models)
    weight = np.arange(1, models + 1, dtype=np.float64) ** -s
    return np.asarray(weight / weight.sum(), np.float64)


def poisson(rng: np.random.Generator, rate_rps: float, span_s: float) -> F8:
    """Draw Poisson arrivals: gaps are exponential."""
    positive("rate_rps", rate_rps)
    return _renewal(lambda n: rng.exponential(1 / rate_rps, n), 1 / rate_rps, span_s)


def gamma(rng: np.random.Generator, rate_rps: float, span_s: float, cv: float) -> F8:
    """Draw arrivals with Gamma gaps of coefficient of variation `cv`: 1 gives Poisson arrivals, more gives bursts."""
    positive("rate_rps", rate_rps)
    positive("cv", cv)
    shape = cv**-2
    return _renewal(lambda n: rng.gamma(shape, 1 / (rate_rps * shape), n), 1 / rate_rps, span_s, cv)


def weibull(rng: np.random.Generator, rate_rps: float, span_s: float, shape: float) -> F8:
    """Draw arrivals with Weibull gaps: shape 1 is Poisson, and a smaller shape gives gaps with a heavier tail."""
    positive("rate_rps", rate_rps)
    positive("shape", shape)
    scale = 1 / (rate_rps * math.gamma(1 + 1 / shape))
    cv = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    return _renewal(lambda n: scale * rng.weibull(shape, n), 1 / rate_rps, span_s, cv)


def clusters(
    rng: np.random.Generator,
    rate_rps: float,
    span_s: float,
    *,
    size: float = 1.0,
    gap_s: float = 1.0,
    duty: float = 1.0,
    on_s: float = 600.0,
) -> F8:
    """Draw the arrivals of a stream that is on and off in turn and whose requests come in clusters.

    Clusters begin as a Poisson process while the stream is on. Their size is geometric with mean `size`, and the gaps
    within a cluster are exponential with mean `gap_s`. On and off times are lognormal (sigma 1) of means `on_s` and
    `on_s (1 - duty) / duty`. The mean rate over all time is `rate_rps`. Arrivals beyond the span wrap around to its
    start, so that the rate does not fall near either end.
    """
    for name, value in (("rate_rps", rate_rps), ("gap_s", gap_s), ("on_s", on_s)):
        positive(name, value)
    if size < 1:
        raise UserError(f"size is {size}, below one request a cluster")
    if not 0 < duty <= 1:
        raise UserError(f"duty is {duty}, not in (0, 1]")
    starts = poisson(rng, rate_rps / (size * duty), span_s * duty)  # counted in on-time, which `on_off` spreads out
    starts = on_off(rng, starts, span_s, duty, on_s)
    sizes = rng.geometric(1 / size, len(starts))
    gaps = rng.exponential(gap_s, int(sizes.sum()))
    first = np.cumsum(sizes) - sizes
    gaps[first] = 0.0
    inside = np.cumsum(gaps)
    inside -= np.repeat(inside[first], sizes)
    return np.sort((np.repeat(starts, sizes) + inside) % span_s)


def on_off(rng: np.random.Generator, on_time_s: F8, span_s: float, duty: float, on_s: float) -> F8:
    """Map times counted in on-time, in [0, duty x span), to stamps that lie in the on-periods of [0, span).

    The on-periods together are exactly the share `duty` of the span.
    """
    if duty == 1.0 or not len(on_time_s):
        return on_time_s
    periods = max(1, round(span_s * duty / on_s))
    on = rng.lognormal(0.0, 1.0, periods)
    off = rng.lognormal(0.0, 1.0, periods)
    on *= span_s * duty / on.sum()
    off *= span_s * (1 - duty) / off.sum()
    begins = np.cumsum(on) - on  # counted in on-time
    period = np.searchsorted(begins, on_time_s, side="right") - 1
    return np.asarray((on_time_s + np.cumsum(off)[period] + rng.uniform(0, span_s)) % span_s, np.float64)


def bounded(what: str, requests: float, way: str, most: int = MOST_REQUESTS) -> None:
    """Raise UserError if there are more requests than a run can hold."""
    if not requests <= most:
        raise UserError(f"{what} is {requests:.3g} requests, above {most:,} ({way})")


def positive(name: str, value: float) -> None:
    """Raise UserError unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}, not above 0")


def _renewal(draw: Callable[[int], F8], mean_s: float, span_s: float, cv: float = 1.0) -> F8:
    """Return arrival times up to `span_s`; `draw(n)` draws n gaps between them, and nearly always one call suffices."""
    positive("span_s", span_s)
    times, last = [], 0.0
    while last < span_s:
        expected = (span_s - last) / mean_s
        times.append(last + np.cumsum(draw(int(expected + 4 * max(1.0, cv) * math.sqrt(expected)) + 16)))
        last = float(times[-1][-1])
    joined = np.concatenate(times)
    return joined[: np.searchsorted(joined, span_s)]
