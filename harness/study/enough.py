"""Choice of further seeds: as many as are needed to tell systems apart, within a budget of simulated requests.

Nothing is run here. The next runs depend on finished rounds alone, not on the time at which a run ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.rows import by_window, crossings, pooled, ranking
from harness.rows.about import Panel
from harness.rows.by_window import Windows
from harness.rows.ranking import FALSE, UNDECIDED, Standing
from harness.study.study import AA_SEED, HALF_OCTAVE, OCTAVE, QUARTER, rounded

NARROW = 1.02  # no x is sampled between two whose ratio is at most this


class More(NamedTuple):
    """A further run that may help to tell the systems of a panel apart."""

    system: str
    seed: int
    x: float
    requests: float  # as many as the system's first seed was offered at the nearest x


def settled(standing: Standing, precision: float, verdicts: int) -> bool:
    """Tell whether the order of two systems is known well enough to stop adding seeds.

    It is known if it is decided after correction for `verdicts` verdicts. It is also known if the interval of the ratio
    is narrow: each end differs from the mean by at most the fraction `precision` of the mean. If there is no ratio,
    only differences at fixed rates, the interval of each difference must be at most 2 x `ranking.NEAR` wide.
    """
    if standing.says != UNDECIDED and (not standing.p or standing.p * verdicts <= FALSE or "equal" in standing.says):
        return True
    if (e := standing.decisive) is None:
        gaps = [gap for _, gap in standing.differences]
        return all(
            gap.low is not None and gap.high is not None and gap.high - gap.low <= 2 * ranking.NEAR for gap in gaps
        )
    if e.low is None or e.high is None:
        return False
    return e.low >= (1.0 - precision) * e.mean and e.high <= (1.0 + precision) * e.mean


def unsettled(
    curves: Mapping[str, Windows], panel: Panel, pairs: Iterable[tuple[str, str]], level: float, precision: float
) -> dict[str, bool]:
    """Return the systems that are not yet told apart from another system, in at least one of their pairs.

    `curves` has the runs of each system by seed and x. The value of a system is True if one of its pairs has no ratio
    of rates that could decide. Such a pair is judged by its differences at the given rates.
    """
    standings = {pair: standing for pair in pairs if (standing := _standing(curves, panel, pair, level))}
    undecided: dict[str, bool] = {}
    for pair, standing in standings.items():
        if not settled(standing, precision, len(standings)):
            undecided |= {name: undecided.get(name, False) or standing.decisive is None for name in pair}
    return undecided


def _standing(curves: Mapping[str, Windows], panel: Panel, pair: tuple[str, str], level: float) -> Standing | None:
    sides = [curves.get(name, {}) for name in pair]
    seeds = sides[0].keys() & sides[1].keys()
    ours, theirs = (by_window.together(side, seeds) for side in sides)
    return None if ours is None or theirs is None else ranking.standing(panel, (ours, theirs), level)


def more(
    curves: Mapping[str, Windows], panel: Panel, systems: Mapping[str, bool], step: int, level: float, least: float
) -> list[More]:
    """List the next runs of systems that are not yet told apart (see `unsettled`).

    If the interval of some system needs a run at a further x before it can be trusted (`_lacking`), only these x are
    run, with all seeds so far. Otherwise the next `step` seeds run, at the x around each system's crossing (`_around`).
    All systems get the same seeds, so that they stay paired, and all seeds of a system get the same x. The list is
    empty if the next seeds would overlap those of A/A copies. No run has a rate below `least`.
    """
    lacks = {name: x for name in systems if (x := _lacking(curves[name], panel, level, least)) is not None}
    if lacks:
        return [_priced(curves[name], name, seed, x) for name, x in lacks.items() for seed in sorted(curves[name])]
    had = max(max(curves[name], default=-1) for name in systems) + 1
    if had + step > AA_SEED:
        return []
    return [
        _priced(curves[name], name, seed, x)
        for name, given in systems.items()
        for x in _around(curves[name], _harder(panel) if given else (), level)
        for seed in range(had + step)
        if x not in curves[name].get(seed, {})
    ]


def _lacking(of: Windows, panel: Panel, level: float, least: float) -> float | None:
    """Return the x at which a system must run before its interval can be trusted; None if there is no such x.

    If no x within a quarter of an octave of the crossing was run, return the crossing itself. Otherwise, along rates,
    if the interval has no high end, return a rate above all rates that were run.

    If it has no low end, return a rate below all of them, but not below `least`. If the run just below the crossing has
    no misses, however, lower rates would tell nothing. Return then the geometric mean of the two rates around the
    crossing, unless they are close together.
    """
    c = by_window.together(of, of.keys())
    if c is None or (at := pooled.crossing(c, level)).sign != "=":
        return None
    xs, rated = c.rates_rps.tolist(), panel["axis"] in crossings.RATED
    if min(max(at.mean / x, x / at.mean) for x in xs) > QUARTER:
        return rounded(at.mean, 3) if rated else crossings.reciprocal(rounded(1.0 / at.mean, 3))
    if rated and at.high is None:
        return rounded(xs[-1] * HALF_OCTAVE, 3)
    if rated and at.low is None:
        below = max((i for i, x in enumerate(xs) if x < at.mean), default=0)
        if c.missed[below].sum() > 0:
            return rounded(xs[0] / HALF_OCTAVE, 3) if xs[0] / HALF_OCTAVE >= least else None
        return rounded(math.sqrt(xs[below] * xs[below + 1]), 3) if xs[below + 1] / xs[below] > NARROW else None
    return None


def _harder(panel: Panel) -> tuple[float, ...]:
    """Return the given x of a panel, as reciprocals along SLO scales and GPUs, so that load rises with x."""
    return tuple(map(crossings.reciprocal, panel["xs"])) if panel["axis"] in crossings.EASES else tuple(panel["xs"])


def _priced(of: Windows, name: str, seed: int, x: float) -> More:
    first = of[min(of)]
    near = min(first, key=lambda seen: abs(math.log(seen / x)))
    return More(name, seed, x, first[near].offered)


def _around(of: Windows, given: Sequence[float], level: float) -> tuple[float, ...]:
    """Return the sampled x at which more seeds of a system are run.

    These are the x in `given`, the sampled x within an octave of the interval of the crossing, and the next sampled x
    beyond each end of this interval.
    """
    c = by_window.together(of, of.keys())
    if c is None:
        return ()
    at, xs = pooled.crossing(c, level), c.rates_rps.tolist()
    low, high = (xs[0] if at.low is None else at.low), (xs[-1] if at.high is None else at.high)
    around = {x for x in xs if low <= OCTAVE * x * (1 + 1e-9) and x <= OCTAVE * high * (1 + 1e-9)}
    beyond = {*[x for x in xs if x < low][-1:], *[x for x in xs if x > high][:1]}
    return tuple(sorted(around | beyond | {x for x in given if x in of[min(of)]}))
