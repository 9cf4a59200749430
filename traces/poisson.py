"""Poisson streams with rates of their own: their requests, drawn from one generator.

Stored results depend on the order of its draws, which stays as it is for each family:

hot-cold   of each stream in turn its count, then its stamps; then lengths
power-law  all counts, at least 1 each, then all stamps; then lengths
poisson    the count of its one stream, then lengths, then stamps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I4 = NDArray[np.int32]
Lengths = Callable[[int, np.random.Generator], I4]


class Requests(NamedTuple):
    """Requests in order of arrival; lengths have the shape (n, 2)."""

    arrival_s: NDArray[np.float64]
    model: I4
    lengths: I4


def draw(family: str, rates: Sequence[float], span_s: float, lengths: Lengths, seed: int) -> Requests:
    """Draw the requests of a family's streams; `lengths(n, rng)` draws the tokens of n requests in order."""
    rng = np.random.default_rng(seed)
    early: I4 | None = None
    if family == "hot-cold":
        times = [np.sort(rng.uniform(0, span_s, rng.poisson(rate * span_s))) for rate in rates]
    elif family == "power-law":
        counts = [max(1, int(rng.poisson(rate * span_s))) for rate in rates]
        times = np.split(rng.uniform(0, span_s, sum(counts)), np.cumsum(counts)[:-1])
    else:
        count = int(rng.poisson(rates[0] * span_s))
        early = lengths(count, rng)
        times = [np.sort(rng.uniform(0, span_s, count))]
    arrival_s = np.concatenate(times)
    model = np.repeat(np.arange(len(times), dtype=np.int32), [len(each) for each in times])
    order = np.argsort(arrival_s, kind="stable")
    return Requests(arrival_s[order], model[order], lengths(len(order), rng) if early is None else early)
