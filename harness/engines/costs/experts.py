"""Seconds of a layer's routed experts, and which of their weights a step reads.

In a step of m tokens, each token goes to `top` of `routed` experts, which gives m x top rows. These are assumed to
spread over the experts by one of `SPREADS`:

    balanced          every expert gets equally many rows, and min(routed, m top) experts are touched
    power_law_ALPHA   an expert's part of the rows is a quantile of the density x^-ALPHA on [1, 0.8 m] if
                      m top > routed, else on [0.01, 2]. Rows are rounded, and an expert gets at most m. Missing rows
                      go to the experts with the fewest, and excess ones are taken from those with the most. The
                      measured calls drew parts of this density at random (AIConfigurator, collector/helper.py,
                      `_generate_power_law_distribution`)

The weights of each touched expert are read once, whatever its rows; an expert's rows are rounded up to whole tiles.

    seconds = (launch + max(touched x expert bytes / hbm, tiled rows x flops) + touched x expert_s + moves) x factors

where moves are the seconds in which the rows are gathered and put back. The seconds are at least the roofline's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from harness.engines.costs.correction import correction
from harness.engines.costs.quantities import F8, GpuSpec, Toml

SPREADS = ("balanced", "power_law_1.01", "power_law_1.2")
SPREAD = "power_law_1.01"  # assumed of a served model: the nearest to uniform of those measured that is not ideal
TILE = 16  # rows
MATRICES = 3  # gate, up and down
BF16 = 2


def loads(tokens: ArrayLike, top: int, routed: int, spread: str = SPREAD) -> F8:
    """Return the number of tokens that each expert computes in steps of `tokens` tokens.

    The result has the dimensions (..., routed), with the largest number last.
    """
    m = np.asarray(tokens, dtype=np.float64)
    if spread == "balanced":
        return m[..., None] * top / routed + np.zeros(routed)
    alpha = float(spread.removeprefix("power_law_"))
    each = [_power_law(int(n), top, routed, alpha) for n in np.ceil(m).ravel()]
    return np.array(each, dtype=np.float64).reshape(*m.shape, routed)


@lru_cache(maxsize=20_000)
def _power_law(m: int, top: int, routed: int, alpha: float) -> F8:
    """Return the number of tokens of each expert in a step of `m` tokens, the largest last.

    The numbers follow the quantiles of a power law.
    """
    least, most = (1.0, 0.8 * m) if m * top > routed else (0.01, 2.0)
    u = (np.arange(routed) + 0.5) / routed
    part = ((most ** (1 - alpha) - least ** (1 - alpha)) * u + least ** (1 - alpha)) ** (1 / (1 - alpha))
    rows = np.minimum(np.round(m * top * part / part.sum()), m)
    while lacks := int(m * top - rows.sum()):
        end = rows == (rows.min() if lacks > 0 else rows.max())
        rows[np.flatnonzero(end)[-abs(lacks) :]] += np.sign(lacks)
    return cast("F8", np.sort(rows))


def touched(tokens: ArrayLike, top: int, routed: int, spread: str = SPREAD) -> F8:
    """Return the number of distinct experts to which the tokens of a step go."""
    return cast("F8", np.minimum(1.0, loads(tokens, top, routed, spread)).sum(axis=-1))


def experts_s(
    q: Toml,
    spec: GpuSpec,
    tokens: ArrayLike,
    hidden: float,
    width: float,
    top: int,
    routed: int,
    weight_bytes: float,
    spread: str = SPREAD,
    part_sms: ArrayLike = 1.0,
    part_hbm: ArrayLike = 1.0,
    ep: int = 1,
) -> F8:
    """Return the seconds of one layer's routed experts of `width` on each GPU, in steps of `tokens` tokens.

    With expert parallelism, the experts are sorted by load and dealt to `ep` parts in turn. Each GPU has one part, and
    the seconds are those of the part with the largest load.
    """
    m = np.asarray(tokens, dtype=np.float64)
    every = loads(m, top, routed, spread)
    rows, mine = every[..., ep - 1 :: ep], m * top
    if ep > 1:
        mine = mine * rows.sum(axis=-1) / every.sum(axis=-1)
    read = np.minimum(1.0, rows).sum(axis=-1)
    tiled = np.maximum(np.minimum(1.0, rows), np.ceil(rows / TILE - 1e-9) * (rows >= 1)).sum(axis=-1) * TILE
    expert = MATRICES * hidden * width
    least = (read * expert * weight_bytes + BF16 * 2 * m * hidden) / (spec.hbm * np.asarray(part_hbm))
    arithmetic = 2 * mine * expert / (q["flops_x"] * spec.flops * np.asarray(part_sms))
    body = np.maximum(
        least / q["hbm_frac"], 2 * tiled * expert / (q["flops_frac"] * q["flops_x"] * spec.flops * np.asarray(part_sms))
    )
    move = mine * (hidden + width) * BF16 * 2 / (spec.hbm * np.asarray(part_hbm))  # rows gathered, and put back
    whole = q["launch_s"] + read * q["expert_s"] + body + q["move_x"] * move
    seconds = whole * correction(q, m, np.asarray(float(routed // ep)), np.asarray(expert * weight_bytes / 1024))
    return cast("F8", np.maximum(seconds, np.maximum(least, arithmetic)))
