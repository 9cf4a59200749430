"""Lengths drawn from laws, where a paper gives the means of a data set and no table of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

LAWS: Mapping[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {  # numbers of mean 1, before rounding
    "geometric": lambda rng, n: rng.exponential(1.0, n),
    "lognormal": lambda rng, n: rng.lognormal(-0.5, 1.0, n),  # coefficient of variation 1.31
}
MEANS: Mapping[str, tuple[float, float]] = {  # prompt and output tokens (PagedAttention, section 6.1, figure 11)
    "sharegpt": (161.31, 337.99),
    "alpaca": (19.31, 58.45),
}


def lengths(data: str, law: str, n: int, rng: np.random.Generator, *, longest: int) -> NDArray[np.int32]:
    """Draw prompt and output tokens of n requests, shape (n, 2), with the means of a data set.

    Pairs beyond `longest` tokens are drawn again. The law is of a mean so much larger that those which stay have the
    data set's own.
    """
    draw, means = LAWS[law], np.array(MEANS[data])
    pairs = np.stack([draw(np.random.default_rng(k), 1 << 16) for k in (1, 2)], 1)
    scale = means.copy()
    for _ in range(20):
        whole = np.ceil(pairs * scale)
        scale *= means / whole[whole.sum(1) <= longest].mean(0)
    kept = np.empty((0, 2))
    while len(kept) < n:
        some = np.ceil(np.stack([draw(rng, n), draw(rng, n)], 1) * scale)
        kept = np.concatenate([kept, some[some.sum(1) <= longest]])
    return kept[:n].astype(np.int32)
