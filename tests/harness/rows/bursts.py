"""Misses that come in bursts, of systems whose crossing is known: what intervals are tested on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.rows.pooled import Counts

LEVEL = 0.99
BLOCK_S = 200.0
BURST = 8.0  # misses, in the mean: geometric, so that the design effect is about twice that
COMMON = 0.7
F8 = NDArray[np.float64]


def rates(at: float, rng: np.random.Generator) -> F8:
    """Return seven rates a quarter octave apart around a crossing, which lies anywhere between the middle ones."""
    return np.asarray(at * 2.0 ** ((np.arange(7) - 3 + rng.uniform(-0.5, 0.5)) / 4))


def worlds(crossings: tuple[float, ...], slope: float, blocks: int, rng: np.random.Generator) -> tuple[Counts, ...]:
    """Draw one experiment: a system a crossing, whose share of misses is (1 - LEVEL) (rate / crossing) ** slope.

    All rates and systems see the same bursts, thinned to each one's share; `COMMON` of them also across systems.
    """
    each = [rates(at, rng) for at in crossings]
    # bursts a block at each rate
    wanted = [(1 - LEVEL) * BLOCK_S / BURST * x * (x / at) ** slope for x, at in zip(each, crossings, strict=True)]
    most = max(float(w.max()) for w in wanted)
    shared = _bursts(most * COMMON, most, blocks, rng)
    out = []
    for x, want in zip(each, wanted, strict=True):
        separate = _bursts(most * (1 - COMMON), most, blocks, rng)
        block, mark, size = (np.concatenate(pair) for pair in zip(shared, separate, strict=True))
        missed = np.array([np.bincount(block[mark < w], size[mark < w], blocks) for w in want])
        steps = rng.poisson(np.diff(x, prepend=0.0)[:, None] * BLOCK_S, (len(x), blocks))
        offered = np.cumsum(steps, axis=0).astype(np.float64)  # a higher rate offers the same requests and more
        out.append(Counts(x, np.minimum(missed, offered), offered))
    return tuple(out)


def _bursts(mean: float, most: float, blocks: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], F8, F8]:
    """Return block, mark (below `most`, evenly) and size of each burst."""
    count = rng.poisson(mean, blocks)
    n = int(count.sum())
    return np.repeat(np.arange(blocks), count), rng.random(n) * most, rng.geometric(1 / BURST, n).astype(np.float64)
