"""The names of the modules that were this file, for the two that still say `metrics`."""

from __future__ import annotations

from harness.rows.attainment import SCORES, Limits, Slo, limits, quantile, share, tpot_s
from harness.rows.definitions import BY_TOKEN
from harness.rows.requests import in_window, rows, take
from harness.rows.statistics import Crossing, Estimate, crossing_ratio, held, paired
from harness.rows.tidy import (
    CAPS,
    ORDER,
    TABLE_SCHEMA,
    WEIGHTS,
    Run,
    crossed,
    curves,
    own_gpus,
    score,
    scores,
    with_gpus,
)  # fmt: skip

DEFINITIONS, attainment = SCORES, scores
__all__ = [
    "BY_TOKEN",
    "CAPS",
    "DEFINITIONS",
    "ORDER",
    "TABLE_SCHEMA",
    "WEIGHTS",
    "Crossing",
    "Estimate",
    "Limits",
    "Run",
    "Slo",
    "attainment",
    "crossed",
    "crossing_ratio",
    "curves",
    "held",
    "in_window",
    "limits",
    "own_gpus",
    "paired",
    "quantile",
    "rows",
    "score",
    "share",
    "take",
    "tpot_s",
    "with_gpus",
]
