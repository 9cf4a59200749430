"""Misses that come in bursts and by window, of systems whose crossing is known: what intervals are tested on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.rows.pooled import Counts

LEVEL = 0.99
BLOCK_S = 200.0
BURST = 8.0  # misses, in the mean: geometric, so that the design effect is about twice that
F8 = NDArray[np.float64]


def rates(at: float, rng: np.random.Generator, points: int = 7) -> F8:
    """Return rates a quarter octave apart around a crossing, which lies anywhere between the middle ones."""
    return np.asarray(at * 2.0 ** ((np.arange(points) - points // 2 + rng.uniform(-0.5, 0.5)) / 4))


def worlds(
    crossings: tuple[float, ...],
    slope: float,
    blocks: int,
    rng: np.random.Generator,
    *,
    common: float = 0.7,
    block_s: float = BLOCK_S,
    points: int = 7,
    spread: float = 0.0,
) -> tuple[Counts, ...]:
    """Draw one experiment: a system a crossing, whose share of misses is (1 - LEVEL) (rate / crossing) ** slope.

    All rates and systems see the same bursts, thinned to each one's share; `common` of them also across systems. With
    `spread`, what is drawn for a window multiplies its misses at all rates: by a factor of mean 1 and variance `spread`
    that all systems share (which model meets which stream), and one of each system (its start).
    """
    each = [rates(at, rng, points) for at in crossings]
    # bursts a block at each rate
    wanted = [(1 - LEVEL) * block_s / BURST * x * (x / at) ** slope for x, at in zip(each, crossings, strict=True)]
    drawn = _factors(spread, len(crossings), blocks, rng)
    most = max(float(w.max()) for w in wanted) * float(drawn.max())
    shared = _bursts(most * common, most, blocks, rng)
    out = []
    for x, want, factor in zip(each, wanted, drawn, strict=True):
        separate = _bursts(most * (1 - common), most, blocks, rng)
        block, mark, size = (np.concatenate(pair) for pair in zip(shared, separate, strict=True))
        here = mark / factor[block]
        missed = np.array([np.bincount(block[here < w], size[here < w], blocks) for w in want])
        steps = rng.poisson(np.diff(x, prepend=0.0)[:, None] * block_s, (len(x), blocks))
        offered = np.cumsum(steps, axis=0).astype(np.float64)  # a higher rate offers the same requests and more
        out.append(Counts(x, np.minimum(missed, offered), offered))
    return tuple(out)


def _factors(spread: float, systems: int, blocks: int, rng: np.random.Generator) -> F8:
    """Return (systems, blocks) factors of misses of mean 1: a common one by each system's own."""
    if not spread:
        return np.ones((systems, blocks))
    shared, separate = (rng.gamma(1 / spread, spread, size) for size in ((1, blocks), (systems, blocks)))
    return np.asarray(shared * separate)


def _bursts(mean: float, most: float, blocks: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], F8, F8]:
    """Return block, mark (below `most`, evenly) and size of each burst."""
    count = rng.poisson(mean, blocks)
    n = int(count.sum())
    return np.repeat(np.arange(blocks), count), rng.random(n) * most, rng.geometric(1 / BURST, n).astype(np.float64)
