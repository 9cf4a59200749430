"""Factors that correct the seconds of a formula to measured ones, on a coarse grid of the formula's arguments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.quantities import F8, Toml


def correction(q: Toml, *at: F8) -> F8:
    """Return the factors by which the seconds of a formula are multiplied; 1 if the quantity has no factors.

    The factors lie on a coarse log2 grid of the formula's arguments `at`. Between grid points their logarithms are
    interpolated linearly, and beyond the edges of the grid they are constant.
    """
    if not q.get("factors"):
        return np.ones(())
    table = np.log(np.array(q["factors"], dtype=np.float64)).reshape([len(axis) for axis in q["axes"]])
    out: F8 = np.zeros(())
    corners: list[tuple[F8, tuple[NDArray[np.int64], ...]]] = [(np.ones(()), ())]
    for x, axis in zip(at, q["axes"], strict=True):
        knots = np.log2(np.array(axis, dtype=np.float64))
        u = np.interp(np.log2(np.maximum(x, 1.0)), knots, np.arange(len(knots), dtype=np.float64))
        i = np.minimum(u.astype(np.int64), len(knots) - 2)
        corners = [(w * v, (*at_, j)) for w, at_ in corners for v, j in ((1 - (u - i), i), (u - i, i + 1))]
    for w, index in corners:
        out = out + w * table[index]
    return np.exp(out)
