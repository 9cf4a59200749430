"""Arrival processes, the popularity of models by rank, and a random generator for each purpose.

Arrival times are sorted seconds from 0 to below `span_s`. Rates are requests per second. The arrival processes draw
from the generator `rng` that the caller passes.
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

    Generators of different purposes are independent. So an additional draw for one purpose does not change the draws
    for another.
    """
    digest = blake2b(repr((seed, *purpose)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))


def zipf(models: int, s: float) -> F8:
    """Return the popularity of each rank from 1 to `models`: shares proportional to rank^-s, with the sum 1."""
    weight = np.arange(1, positive("models", models) + 1, dtype=np.float64) ** -s
    return np.asarray(weight / weight.sum(), np.float64)


def poisson(rng: np.random.Generator, rate_rps: float, span_s: float) -> F8:
    """Draw Poisson arrivals: gaps are exponential."""
    positive("rate_rps", rate_rps)
    return _renewal(lambda n: rng.exponential(1 / rate_rps, n), 1 / rate_rps, span_s)


def gamma(rng: np.random.Generator, rate_rps: float, span_s: float, cv: float) -> F8:
    """Draw arrivals with Gamma gaps of coefficient of variation `cv`: 1 is a Poisson process, above 1 is bursty."""
    positive("rate_rps", rate_rps)
    positive("cv", cv)
    shape = cv**-2
    return _renewal(lambda n: rng.gamma(shape, 1 / (rate_rps * shape), n), 1 / rate_rps, span_s, cv)


def weibull(rng: np.random.Generator, rate_rps: float, span_s: float, shape: float) -> F8:
    """Draw arrivals with Weibull gaps: shape 1 is a Poisson process, and a smaller shape gives more long gaps."""
    positive("rate_rps", rate_rps)
    positive("shape", shape)
    scale = 1 / (rate_rps * math.gamma(1 + 1 / shape))
    cv = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    return _renewal(lambda n: scale * rng.weibull(shape, n), 1 / rate_rps, span_s, cv)


def on_off(rng: np.random.Generator, on_time_s: F8, span_s: float, duty: float, on_s: float) -> F8:
    """Spread the arrivals of a stream over random on-periods; return their times in [0, `span_s`).

    `on_time_s` gives the arrivals on a clock that runs only while the stream is on; its values lie in [0, `duty` x
    `span_s`). The on-periods together last exactly `duty` x `span_s`. Their mean length is about `on_s`.
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
    """Raise UserError if `requests` is above `most`.

    The message says what has too many requests (`what`) and how to get fewer (`way`).
    """
    if not requests <= most:
        raise UserError(f"{what} is {requests:.3g} requests, above {most:,} ({way})")


def positive(name: str, value: float) -> float:
    """Return the value if it is finite and above 0. Raises UserError otherwise."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}, not above 0")
    return value


def _renewal(draw: Callable[[int], F8], mean_s: float, span_s: float, cv: float = 1.0) -> F8:
    """Return arrival times below `span_s`, each a random gap of mean `mean_s` after the previous one.

    `draw(n)` returns n random gaps. `cv` is the coefficient of variation of the gaps. The first call of `draw` asks for
    enough gaps that a second call is rarely needed.
    """
    positive("span_s", span_s)
    times, last = [], 0.0
    while last < span_s:
        expected = (span_s - last) / mean_s
        times.append(last + np.cumsum(draw(int(expected + 4 * max(1.0, cv) * math.sqrt(expected)) + 16)))
        last = float(times[-1][-1])
    joined = np.concatenate(times)
    return joined[: np.searchsorted(joined, span_s)]
