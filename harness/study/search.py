"""Choice of the next x of a curve by one function, `following`, from the attainment so far.

The x is a rate, an SLO scale or a number of GPUs. A curve is sampled alone or together with others (Sample.each). The
search only needs to know that attainment falls along rates and rises along GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from harness.rows import statistics
from harness.study.study import AA, CONTROLS, HALF_OCTAVE, OCTAVE, QUARTER, Range, Sample, rounded

LEVEL, LOW = 0.99, 0.90  # the usual target; attainment below which a system is past its knee, unless the target is near
PAST = 0.05  # past the knee, attainment is at least this far below the target
TOP, FLOOR = 64.0, 1 / 20  # rate scales beyond which no octave follows in the search for a common knee
FAR = 256.0  # multiples of the lowest rate, at which the search for the knee of one system gives up
OCTAVES = 2  # every system is run to this many octaves above the lowest rate, even if it falls earlier

Shares = Mapping[str, float]  # attainment by definition; the first definition decides
Curve = Mapping[float, Shares]  # x -> attainment, of one seed
Curves = Mapping[str, Mapping[int, Curve]]  # system -> seed -> curve


class Ask(NamedTuple):
    """The x to run next, for curves that are sampled together."""

    xs: Mapping[str, tuple[float, ...]]  # keyed by system
    first_seed: bool = False  # only the first seed runs: a coarse search
    last: bool = False  # nothing follows


def following(sample: Sample, bounds: Range, curves: Curves) -> Ask:
    """Choose the next x of each system in `curves`, by its attainment so far; no x if its search is over."""
    if sample.rule == "knee" and not bounds.given:
        return common_knee(bounds, curves) if sample.each == "panel" else knees(sample, bounds, curves)
    if not any(seeds for seeds in curves.values()):
        first = bounds.given[-1:] if sample.rule == "bracket" else bounds.given
        return Ask(dict.fromkeys(curves, first), last=sample.rule in {"fixed", "knee"})
    search = {"bisect": bisected, "bracket": bracketed}[sample.rule]
    asks = {name: search(sample, bounds, seeds) for name, seeds in curves.items()}
    return Ask({name: (x,) for name, x in asks.items() if x is not None})


def mean(seeds: Mapping[int, Curve]) -> dict[float, Shares]:
    """Average attainment over seeds, at each x that all of them have."""
    shared = set.intersection(*(set(curve) for curve in seeds.values())) if seeds else set[float]()
    of_seeds = {x: [curve[x] for curve in seeds.values()] for x in sorted(shared)}
    return {x: {d: sum(s[d] for s in each) / len(each) for d in each[0]} for x, each in of_seeds.items()}


def past(level: float) -> float:
    """Return the attainment below which a system is past its knee; `level` is the target attainment."""
    return min(LOW, level - PAST)


def deciding(curve: Curve) -> dict[float, float]:
    """Return attainment by x, by the first definition of attainment; the search ends by this definition."""
    return {x: next(iter(shares.values())) for x, shares in curve.items()}


# ------------------------------------------------------------------ around the knee


def common_knee(bounds: Range, curves: Curves) -> Ask:
    """Choose the next rates of systems that are searched together around their knees.

    The search has three stages. First, the first seed alone runs at octaves. Higher octaves follow while some system is
    not past its knee, and lower ones for each contestant that does not meet the level yet. Then all seeds run on a
    grid. Finally, for each contestant, the two rates around its crossing of the level are bisected until they are a
    quarter of an octave apart.
    """
    level = bounds.level
    first = {name: deciding(seeds[min(seeds)]) if seeds else {} for name, seeds in curves.items()}
    octaves = {name: {x: y for x, y in curve.items() if math.log2(x).is_integer()} for name, curve in first.items()}
    contend = {name: curve for name, curve in octaves.items() if contends(name)} or octaves
    if not all(octaves.values()):
        return Ask(dict.fromkeys(curves, (1.0,)), first_seed=True)
    high = max(map(max, octaves.values()))
    holds = [name for name, curve in octaves.items() if curve.get(high, 0.0) >= past(level)]
    if holds and high < TOP:
        return Ask(dict.fromkeys(holds, (2 * high,)), first_seed=True)
    lowest = {name: min(curve) for name, curve in contend.items() if curve[min(curve)] < level}
    if deeper := {name: (x / 2,) for name, x in lowest.items() if x > FLOOR}:
        return Ask(deeper, first_seed=True)
    grid, every = around(octaves, level), {name: mean(seeds) for name, seeds in curves.items()}
    if any(len(curves[name]) < bounds.seeds or not set(rates) <= set(every[name]) for name, rates in grid.items()):
        return Ask(grid)
    nearer = {name: x for name in contend if (x := _between(deciding(every[name]), level, min(grid[name]))) is not None}
    return Ask({name: (x,) for name, x in nearer.items()})


def contends(name: str) -> bool:
    """Tell whether a system is neither a control nor an A/A copy."""
    return not (name in CONTROLS or name.endswith(AA))


def _between(curve: Mapping[float, float], level: float, least: float) -> float | None:
    """Return the geometric mean of the two rates around a crossing of `level`.

    It is None if one of the two was not run, or if they are at most a quarter of an octave apart.
    """
    last = statistics.held(curve, level)
    fails = min((x for x in curve if last is not None and x > last), default=None)
    if last is None or fails is None or fails / last <= QUARTER:
        return None
    return between(curve, level, least, digits=3)


def around(seen: Mapping[str, Mapping[float, float]], level: float) -> dict[str, tuple[float, ...]]:
    """Return the rates of each system around its knee, given its attainment at octaves.

    A system's knee is the highest octave such that it meets the level at this and all lower octaves. A contestant's
    rates begin an octave below its knee. A contestant without a knee begins at the lowest octave of all. Controls and
    A/A copies begin at the lowest rate at which a contestant with a knee begins. No rates begin below the lowest knee,
    controls included.

    All rates end an octave above the highest rate at which a contestant meets the level, so that systems can be
    compared there. If a system ran at higher octaves, its rates end at the highest of these instead.
    """
    met = [
        x for x in sorted(set().union(*seen.values())) if all(min(_to(curve, x)) >= level for curve in seen.values())
    ]
    contend = {name: curve for name, curve in seen.items() if contends(name)} or seen
    low, high = max(met, default=min(map(min, seen.values()))), max(map(max, seen.values()))
    tell = max((OCTAVE * x for curve in contend.values() for x, y in curve.items() if y >= level), default=low)
    octaves = round(math.log2(high / low))
    steps = octaves * max(2, math.ceil(5 / octaves)) if octaves else 0
    exact = [low * 2 ** (k * octaves / max(1, steps)) for k in range(steps + 1)]
    rates = [x if math.log2(x).is_integer() else float(f"{x:.3g}") for x in exact]
    holds = {name: max((x for x in curve if min(_to(curve, x)) >= level), default=None) for name, curve in seen.items()}
    begins = {name: x / OCTAVE if (x := holds[name]) else low for name in contend}
    nearest = min((begins[name] for name in contend if holds[name]), default=low)
    return {
        name: tuple(x for x in rates if begins.get(name, nearest) <= x <= max(min(tell, high), *curve))
        for name, curve in seen.items()
    }


def _to(curve: Mapping[float, float], x: float) -> list[float]:
    """List a system's attainment at its rates up to x.

    If x is below the system's lowest rate, the list has the attainment at the lowest rate. If x is above the highest
    rate, the list is a single 0.
    """
    return [share for at, share in curve.items() if at <= max(x, min(curve))] if x <= max(curve) else [0.0]


def knees(sample: Sample, bounds: Range, curves: Curves) -> Ask:
    """Search rates of each system: double the rate until the system is past its knee, then run a grid around it."""
    asks: dict[str, tuple[float, ...]] = {}
    grids: dict[str, tuple[float, ...]] = {}
    for name, seeds in curves.items():
        seen = mean(seeds)
        times = max(seen) / bounds.least if seen else 0.0
        falls = seen and deciding(seen)[max(seen)] < past(bounds.level) and times >= 2**OCTAVES
        if seen and (falls or times >= FAR):
            grids[name] = grid(seen, sample.points, bounds.level)
        else:
            asks[name] = (2 * max(seen) if seen else bounds.least,)
    return Ask(asks, first_seed=True) if asks else Ask(grids, last=True)


def grid(seen: Curve, least: int, level: float = LEVEL) -> tuple[float, ...]:
    """Return the rates at which to run a system, given its attainment at octaves.

    They are all octaves, and finer rates from the highest octave that reaches the level (`highest`) to the top octave.
    The finer rates split octaves into 2, 4, 8 or more parts, until there are at least `least` rates. A finer grid thus
    contains each coarser one. The top octave is at least `OCTAVES` above the lowest, even if attainment is low at once.
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


def highest(runs: Iterable[tuple[float, Shares]], level: float) -> float | None:
    """Find the highest sampled x that reaches the level by every definition of attainment; None if there is no such x.

    Attainment is a monotone fit to the mean over seeds, so the mean itself may be below the level at a lower x. `runs`
    has the x and the attainment of each run.
    """
    by_x: dict[float, list[Shares]] = {}
    for x, shares in runs:
        by_x.setdefault(x, []).append(shares)
    definitions = next(iter(by_x.values()))[0]
    means = ({x: sum(s[d] for s in each) / len(each) for x, each in by_x.items()} for d in definitions)
    crossings = [statistics.held(curve, level) for curve in means]
    return None if None in crossings else min(x for x in crossings if x is not None)


# ------------------------------------------------------------------ where the level is crossed


def bisected(sample: Sample, bounds: Range, seeds: Mapping[int, Curve]) -> float | None:
    """Return the next x near the crossing of the level by the mean over seeds; None if enough x are sampled.

    The crossing is bisected until `sample.points` x are sampled. One more x above the crossing may follow (`_beyond`),
    so that an interval can end there.
    """
    seen = deciding(mean(seeds))
    if len(seen) >= sample.points:
        return _beyond(seen, bounds.level, sample.digits)
    return between(seen, bounds.level, bounds.least, bounds.most, sample.digits)


def between(
    seen: Mapping[float, float], level: float, least: float, most: float = math.inf, digits: int = 6
) -> float | None:
    """Return the next x of a falling curve, by bisection of its crossing of the level; None if no new x is left.

    The next x is the geometric mean of the last x at which the fit reaches the level, and the sampled x after it. If
    the highest sampled x reaches the level, the next x is twice that, but at most `most`. If no x reaches the level,
    the next x is half the lowest x, but at least `least`.
    """
    last = statistics.held(seen, level)
    fails = min((x for x in seen if last is None or x > last), default=None)
    if last is None:
        x = max(min(seen) / 2, least)
        if x > min(seen):
            return None
    else:
        x = min(2 * last, max(most, last)) if fails is None else math.sqrt(last * fails)
    near = rounded(x, digits)
    return None if x in seen or near in seen else near


def _beyond(seen: Mapping[float, float], level: float, digits: int) -> float | None:
    """Return the x half an octave above the highest sampled x, or None.

    It is None if the highest sampled x, or no x at all, reaches the level. It is also None if the highest sampled x is
    already half an octave above the last x that reaches the level.
    """
    last, top = statistics.held(seen, level), max(seen)
    if last is None or last == top or top >= last * HALF_OCTAVE:
        return None
    return rounded(top * HALF_OCTAVE, digits)


def bracketed(sample: Sample, bounds: Range, seeds: Mapping[int, Curve]) -> float | None:  # noqa: ARG001
    """Return the next whole number to sample of a rising curve; None if the fewest that reach the level are known.

    The largest count is sampled first, since simulation is slow at counts far below the answer. Then the gap is
    bisected between the answer so far and the largest smaller count that failed (`least` - 1 if none failed). Finally,
    the count above the answer is sampled to confirm the answer. If that count fails, the fit over all counts rejects
    the answer, and the search continues above it.
    """
    least, most = (round(x) for x in bounds.given)
    means = deciding(mean(seeds))
    at = statistics.fewest(means, bounds.level).at if means else None
    answer = None if at is None or at.sign == ">" else round(at.mean)
    n = bracket([round(x) for x in means if answer is None or x < answer], answer, least, most, begin=most)
    if n is None and answer is not None and answer < most and answer + 1 not in means:
        return answer + 1
    return n


def bracket(failed: Collection[int], held: int | None, least: int, most: int, *, begin: int) -> int | None:
    """Return the next whole number to try of a rising curve; None if the search is over.

    `failed` has the counts that failed, and `held` is the smallest count that succeeded, if any. The search begins with
    `begin`. It doubles the largest count that failed, until a count succeeds. It then bisects between `held` and the
    largest count that failed, or `least` - 1 if no count failed.
    """
    low = max(failed, default=least - 1)
    if held is not None:
        return (held + low) // 2 if held - low > 1 else None
    n = max(low + 1, min(2 * low if failed else begin, most))
    return n if n <= most else None
