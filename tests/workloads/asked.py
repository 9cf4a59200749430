"""Workloads as tests write them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from harness.policy.types import Jobs


def asked(
    models: Iterable[str],
    arrival_s: Sequence[float] | np.ndarray,
    model: ArrayLike,
    prompt: ArrayLike,
    output: ArrayLike,
    ttft_s: ArrayLike = math.inf,
    tpot_s: ArrayLike = math.inf,
    **more: Any,
) -> Jobs:
    """Return requests; where a number stands for an array, it is that of each of them."""
    n = len(arrival_s)
    ints = [np.array(np.broadcast_to(x, n), np.int32) for x in (model, prompt, output)]
    slo_s = [np.array(np.broadcast_to(x, n), np.float64) for x in (ttft_s, tpot_s)]
    return Jobs(tuple(models), np.array(arrival_s, np.float64), *ints, *slo_s, **more)  # type: ignore[arg-type]
