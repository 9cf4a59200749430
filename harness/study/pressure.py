"""The KVPR (KV pressure ratio, Prism) of a run's initial placement, and the lowest KVPR of any placement.

The lowest is found by trying all placements, so only small sets of models are possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.run.setup import Setup

F8 = NDArray[np.float64]
MOST = 1 << 17  # placements that are tried


def above(setup: Setup) -> float:
    """Return the ratio of the largest KVPR of Prism's initial placement to the smallest possible one.

    The smallest is taken over all placements in which each GPU has memory for its models and one longest request of
    each. The ratio is NaN if Prism leaves a model out at the start, if models take several GPUs, or if there are too
    many placements to try.
    """
    policy: Any = setup.policy
    for _ in policy.begin(0.0):  # discards the loads: begin() also sets the state that is read below
        pass
    models, room = list(policy.models.values()), [float(gpu.mem_bytes) for gpu in policy.cluster.gpus]
    start = [next(iter(m.home or ()), -1) for m in models]
    if min(start) < 0 or any(m.model.tp > 1 for m in models) or len(room) ** len(models) > MOST:
        return math.nan
    d, w, need = (np.array([getattr(m, key) for m in models], np.float64) for key in ("d", "w", "need"))
    return largest(start, d, w, room) / least(d, w, need, room)


def largest(at: Sequence[int], d: F8, w: F8, room: Sequence[float]) -> float:
    """Return the largest KVPR over the GPUs of a placement; `at` has the GPU of each model.

    The KVPR of a GPU is the total demand `d` of its models, divided by the bytes of `room` that their weights `w` leave
    free.
    """
    here = [np.array(at) == g for g in range(len(room))]
    return max(float(d[on].sum() / (room[g] - w[on].sum())) for g, on in enumerate(here))


def least(d: F8, w: F8, need: F8, room: Sequence[float]) -> float:
    """Return the least value of `largest` over all placements that fit.

    In these, the `need` of a GPU's models in bytes is at most the `room` of the GPU.
    """
    every = np.array(list(product(range(len(room)), repeat=len(d))), np.int8)
    worst, fits = np.zeros(len(every)), np.ones(len(every), bool)
    for g, bytes_ in enumerate(room):
        here = every == g
        fits &= here @ need <= bytes_
        worst = np.maximum(worst, (here @ d) / (bytes_ - here @ w))
    return float(worst[fits].min(initial=math.inf))
