"""At which rates systems are compared: found by doubling, then sampled around the knee; or by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from harness.rows import statistics

LEVEL, LOW = 0.99, 0.90  # the target; where a system is past its knee
TOP, FLOOR = 64.0, 1 / 8  # rate scales between which the knee of a comparison is searched
OCTAVES = 2  # above the lowest rate that a figure's system is run to, though it fell before


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace at a rate."""

    trace: str
    rate_scale: float = 1.0


def knee(attained: Callable[[float], Mapping[str, float]]) -> tuple[float, ...]:
    """Rates around the knees: doubled from 1 until all are below `LOW` (or halved, if all are at 1), then sampled.

    At least 6 rates, from the last at which all meet `LEVEL` to the first at which none meets `LOW`.
    """
    seen = {1.0: attained(1.0)}
    while max(seen[max(seen)].values()) >= LOW and max(seen) < TOP:
        rate = 2 * max(seen)
        seen[rate] = attained(rate)
    while max(seen[min(seen)].values()) < LOW and min(seen) > FLOOR:
        rate = min(seen) / 2
        seen[rate] = attained(rate)
    met = [rate for rate in sorted(seen) if all(min(seen[r].values()) >= LEVEL for r in seen if r <= rate)]
    low, high = max(met, default=min(seen)), max(seen)
    octaves = round(math.log2(high / low))
    if octaves == 0:
        return tuple(sorted(seen))
    steps = octaves * max(2, math.ceil(5 / octaves))
    return tuple(float(f"{low * 2 ** (k * octaves / steps):.3g}") for k in range(steps + 1))


def grid(seen: Mapping[float, Mapping[str, float]], least: int, level: float = LEVEL) -> tuple[float, ...]:
    """Rates of a system whose attainment was seen at octaves: all of these, and finer ones around its knee.

    Finer from the last octave that it holds (`highest`) to the last one seen: halves, then quarters, ... of an octave
    until there are `least`, so that more rates hold the fewer ones. A system that fell at once is followed `OCTAVES`
    further.
    """
    low = min(seen)
    holds = highest(seen.items(), level) or low
    top = max(*seen, low * 2**OCTAVES)
    octaves = {low * 2.0**k for k in range(round(math.log2(top / low)) + 1)}
    span = round(math.log2(top / holds)) or 1
    for density in (2**k for k in count(1)):
        steps = [top * 2.0 ** (-k / density) for k in range(1, span * density) if k % density]
        rates = octaves | {float(f"{step:.3g}") for step in steps}
        if len(rates) >= least:
            return tuple(sorted(rates))
    raise AssertionError


def between(
    seen: Mapping[float, float], level: float, least: float, most: float = math.inf, digits: int = 6
) -> float | None:
    """The rate to sample next, of a curve that was seen at some: bisection of where it crosses the level.

    The geometric mean of the last rate that holds the level, by the fit, and of the next, which does not. Twice the
    highest where it holds, but at most `most`, and half the lowest where none does, but at least `least`. None: nothing
    is left.
    """
    last = statistics.held(seen, level)
    fails = min((rate for rate in seen if last is None or rate > last), default=None)
    if last is None:
        x = max(min(seen) / 2, least)
        if x > min(seen):
            return None
    else:
        x = min(2 * last, max(most, last)) if fails is None else math.sqrt(last * fails)
    found = rounded(x, digits)
    return None if x in seen or found in seen else found


def rounded(rate: float, digits: int = 6) -> float:
    """A rate as specs have it, with few digits."""
    return float(f"{rate:.{digits}g}")


def highest(seen: Iterable[tuple[float, Mapping[str, float]]], level: float) -> float | None:
    """The highest sampled rate at which the fit of the mean over seeds holds the level, by every definition; if any.

    It may dip below the level at a lower rate. `seen` are runs: a rate and what is attained there, by definition.
    """
    by_rate: dict[float, list[Mapping[str, float]]] = {}
    for rate, scores in seen:
        by_rate.setdefault(rate, []).append(scores)
    definitions = next(iter(by_rate.values()))[0]
    means = ({rate: sum(one[d] for one in runs) / len(runs) for rate, runs in by_rate.items()} for d in definitions)
    held = [statistics.held(mean, level) for mean in means]
    return None if None in held else min(x for x in held if x is not None)
