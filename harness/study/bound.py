"""The rate at which the attainment bound of a comparison (run/bound.py) falls below the level.

The rate is searched once and stored next to the runs. The bound is computed for the windows that all systems replay,
over the requests of all seeds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.policy.types import Infeasible, Unsupported, UserError
from harness.rows import estimate, record, whole
from harness.rows.about import About
from harness.rows.stored import NOTES
from harness.run import bound
from harness.run.resolve import resolve
from harness.run.setup import SIMULATOR, Setup
from harness.run.slo import SloTarget
from harness.run.sources import code, scoring
from harness.run.spec import Spec, canonical, digest
from harness.study.study import UNSHARED
from workloads.picking import in_pieces

FOLDER = "bounds"
NEAR = 1.02  # the rate that is kept is less than this factor above the crossing
MOST = 400_000  # requests of a window, beyond which no crossing is searched
LEAST = 2.0**-8  # rate scale


def crossing(
    of: Callable[[float, int], Spec],
    specs: Iterable[Spec],
    seeds: Sequence[int],
    target: SloTarget,
    definition: str,
    level: float,
    out: Path,
) -> dict[str, Any] | None:
    """Return the rate scale above which no policy attains `level`, with the definition and the number of GPUs.

    `of` returns the spec at a rate scale and seed. `specs` are the specs of the systems, which decide how GPUs may be
    shared. The result is stored below `out`.

    The result is None if the search finds no rate scale (`searched`). It is also None for definitions without
    deadlines, closed loops, traces that are read in pieces, and engines other than the simulator.
    """

    def at(x: float, seed: int) -> Setup:
        return Setup(resolve(replace(of(x, seed), system=UNSHARED, preset=None, fields=())))

    first = at(1.0, seeds[0])
    if definition not in bound.BOUNDED or first.spec.engine != SIMULATOR or in_pieces(first.trace):
        return None
    if first.jobs().after is not None:
        return None
    sharing = allowed(specs)
    key = {
        "specs": [canonical(at(1.0, seed).spec) for seed in seeds],
        "rule": target.identity,
        "seconds": target.seconds,
        "definition": definition,
        "level": level,
        "sharing": sharing,
        "code": code(first.spec),
        "search": scoring(__file__),
    }

    @cache
    def prices() -> bound.Prices:
        return bound.prices(first.config, first.machine)

    @cache
    def share(x: float, seed: int) -> bound.Share:
        setup = Setup(target.spec(at(x, seed).spec))  # all requests have SLOs, also where a system reads none
        window_s = math.inf if setup.spec.window_s is None else setup.spec.window_s
        return bound.share(prices(), setup.jobs(), definition, window_s, setup.end_s, sharing)

    path = out / FOLDER / f"{digest(record.dumps(key))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.clean(path.parent)
    rate = NOTES.kept(path, key, lambda: {"rate_scale": searched(share, seeds, level)})["rate_scale"]
    return None if rate is None else {"definition": definition, "rate_scale": rate, "gpus": first.spec.gpus}


def searched(share: Callable[[float, int], bound.Share], seeds: Sequence[int], level: float) -> float | None:
    """Return the rate scale at which the bound on attainment falls below the level.

    At the returned rate scale the bound is below the level; at this rate scale divided by NEAR it is not. The result is
    None if the bound never falls below the level, or is below it at all rates. Doubling and bisection first bracket the
    rate scale, with the first seed alone. The bracket is then moved until it is correct for all seeds together.
    """

    def holds(x: float, some: Sequence[int]) -> bool:
        shares = [share(x, seed) for seed in some]
        offered = sum(s.offered for s in shares)
        return sum(s.met * s.offered for s in shares) >= level * offered

    single, high = seeds[:1], 1.0
    while holds(high, single):
        if share(high, seeds[0]).offered > MOST:
            return None
        high *= 2.0
    low = high / 2.0
    while not holds(low, single):
        if low < LEAST:
            return None
        low, high = low / 2.0, low
    while high / low > NEAR:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle, single) else (low, middle)
    while holds(high, seeds):
        high *= NEAR
    while not holds(high / NEAR, seeds):
        high /= NEAR
        if high < LEAST:
            return None
    return high


def line(about: About) -> str | None:
    """Describe the bound of a comparison in words; return None if the comparison has no bound."""
    if (most := about.bound) is None:
        return None
    (panel,) = about.panels
    gpus = f"{most['gpus']} GPU{'s' * (most['gpus'] > 1)}"
    rate = estimate.number(most["rate_scale"] * panel["unit_rps"])
    return f"bound: no policy on {gpus} serves more than {rate} req/s at {100 * about.level:g} % ({most['definition']})"


def allowed(specs: Iterable[Spec]) -> bound.Sharing:
    """Return the ways in which any of these systems shares a GPU: by SMs, by time slices, both or neither.

    For a system that does not fit, or whose policy cannot be made, only the sharing that its spec sets is counted.
    """
    parted = sliced = False
    for spec in specs:
        sliced |= spec.sharing == "turns"
        with suppress(Infeasible, Unsupported, UserError):
            policy = Setup(resolve(spec)).policy
            parted |= "Run.sms" in policy.uses
            sliced |= policy.options.get("sharing") == "turns"
    return bound.Sharing(parted, sliced)
