"""Comparison of a trace with the bench's generators (regimes): the nearest in popularity, idleness and bursts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from traces import synthetic
from traces.load import Trace, trace
from traces.stats import stats

SPAN_S = (600.0, 7200.0)  # bounds the span of a draw that is compared, which is else the trace's own
REGIMES = ("hyperbolic-like", "hyperbolic-like-drift", "arena-like", "aegaeon-like")
# What is compared, and by how much two of one kind differ: shares within 5 points, times and CV within a quarter.
SHARES = ("top1_share", "bottom60_share", "active_fraction")
RATIOS = ("idle_median_s", "minute_cv_models", "idle_per_hour")
POINTS, RATIO = 0.05, math.log(1.25)


class Likeness(NamedTuple):
    """The comparison of a trace's statistics with those of one of the bench's generators (a regime)."""

    regime: str
    distance: float  # mean of how many times its tolerance each statistic is off; about 1 is as near as draws are
    worst: str  # the statistic that is furthest off
    here: float
    there: float


def likenesses(facts: Mapping[str, Any]) -> list[Likeness]:
    """Compare the statistics of a trace with those of each of the bench's regimes, and list the nearest first.

    The list is empty for a trace of one model, and for one shorter than 600 s.
    """
    if facts["models"] < 2 or facts["span_s"] < SPAN_S[0]:
        return []
    return sorted((_likeness(facts, regime) for regime in REGIMES), key=lambda item: item.distance)


def _likeness(facts: Mapping[str, Any], regime: str) -> Likeness:
    preset = synthetic.PRESETS[regime]
    span_s = min(max(facts["span_s"], SPAN_S[0]), SPAN_S[1])
    models = facts["models"] if regime in synthetic.SIZED else preset.models
    drawn: Trace = trace(str(replace(preset, models=models, span_s=span_s)))
    other = stats(drawn)
    off = {key: (abs(facts[key] - other[key]) / POINTS, facts[key], other[key]) for key in SHARES}
    for key in RATIOS:
        here, there = (_middle(item[key]) for item in (facts, other))
        if here > 0 and there > 0:
            off[key] = (abs(math.log(here / there)) / RATIO, here, there)
    worst = max(off, key=lambda key: off[key][0])
    return Likeness(regime, sum(far for far, _, _ in off.values()) / len(off), worst, *off[worst][1:])


def _middle(quartiles: list[float]) -> float:
    return quartiles[1] if quartiles else 0.0


def sentence(facts: Mapping[str, Any], ranked: list[Likeness]) -> str:
    """Return words for a report that name the regime nearest to a trace, and say how near it is."""
    if not ranked:
        why = "one model" if facts["models"] < 2 else f"under {SPAN_S[0]:g} s"
        return f"compared with no regime: {why}"
    near = ranked[0]
    how = "resembles" if near.distance <= 2 else "is nearest to" if near.distance <= 4 else "resembles none of"
    names = near.regime if near.distance <= 4 else ", ".join(REGIMES)
    return (
        f"{how} {names}: {near.regime}'s statistics are {near.distance:.1f} tolerances away, {near.worst} most "
        f"({near.here:.3g} here, {near.there:.3g} there)"
    )
