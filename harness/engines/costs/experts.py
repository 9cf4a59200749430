"""Seconds of a layer's routed experts, and which of their weights a step reads.

A step of m tokens, `top` of `routed` experts each, has m x top rows. How they spread is assumed, one of `SPREADS`:

    balanced          every expert has as many: min(routed, m top) experts are touched
    power_law_ALPHA   an expert's part is a draw of the density x^-ALPHA on [1, 0.8 m], as the measured calls drew
                      it (AIConfigurator, `_generate_power_law_distribution`); here its quantiles: nothing is random

The weights of the experts touched are read once, whatever their rows; rows count in tiles.

    seconds = (launch + max(touched x expert bytes / hbm, tiled rows x flops) + touched x expert_s) x factors
"""

from __future__ import annotations

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
    """Return the rows of each expert in steps of so many tokens, (..., routed), the largest last."""
    m = np.asarray(tokens, dtype=np.float64)[..., None]
    if spread == "balanced":
        return m * top / routed + np.zeros(routed)
    alpha = float(spread.removeprefix("power_law_"))
    u = (np.arange(routed) + 0.5) / routed
    most = np.maximum(2.0, 0.8 * m)
    part = ((most ** (1 - alpha) - 1) * u + 1) ** (1 / (1 - alpha))
    return cast("F8", np.minimum(m, m * top * part / part.sum(axis=-1, keepdims=True)))


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
    """Return the seconds of one layer's routed experts of `width` on each GPU, in steps of so many tokens.

    With expert parallelism a GPU has one of `ep` parts of them, dealt by load, and the step waits for the fullest.
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
