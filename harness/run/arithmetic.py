"""A hash of this machine's arithmetic: transcendental functions, random draws, least squares, and numba's target.

Sums, products and roots are the same on every processor, and the simulator's kernel uses nothing else. But a run also
uses `exp`, gamma variates and fits, whose last digit depends on processor, libm and BLAS. So a simulated run stores
this hash among its facts. A command that finds runs with another hash says so.
"""

from __future__ import annotations

import math
from functools import cache
from hashlib import sha256

import numpy as np

from harness import target

SIZE = 2000  # values of each function
SHOWN = 12  # characters of the digest in a run's facts


@cache
def digest() -> str:
    """Return the SHA-256 of what this machine computes for fixed arguments, and of numba's target."""
    total = sha256(target.compiled().encode())
    for values in results():
        total.update(np.ascontiguousarray(values, np.float64).tobytes())
    return total.hexdigest()


def results() -> list[np.ndarray]:
    """Return what this machine computes for fixed arguments: an array for each function or draw."""
    x, u = np.linspace(1e-3, 30.0, SIZE), np.linspace(1e-6, 1 - 1e-6, SIZE)
    vectors = [np.exp(x), np.log(x), np.log2(x), np.log1p(-u), np.expm1(u), np.sin(x), x**0.37, x**-2.0]
    scalars = [[f(v) for v in x.tolist()] for f in (math.exp, math.log, math.log2, math.gamma)]
    power = [v**0.37 for v in x.tolist()]
    rng = np.random.default_rng(31)
    draws = [
        rng.standard_normal(SIZE),
        rng.standard_exponential(SIZE),
        rng.gamma(0.3, 2.0, SIZE),
        rng.lognormal(1.0, 2.0, SIZE),
    ]
    columns = np.stack([np.ones(SIZE), x, u, x * u], axis=1)
    fit = np.linalg.lstsq(columns, x**0.5, rcond=None)[0]
    return [*vectors, *map(np.asarray, scalars), np.asarray(power), *draws, fit, columns @ fit]
