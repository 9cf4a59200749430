"""As many seeds as it takes: what is asked next, and that stopping when systems are told apart keeps intervals honest.

Experiments are drawn (tests/harness/rows/bursts.py): systems of known crossing, whose misses come in bursts; rates are
searched and seeds added by the functions that a study uses.
"""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest

from harness.rows import crossings, pooled, ranking
from harness.rows.about import Panel
from harness.rows.by_window import Counted, Windows, together
from harness.rows.estimate import Estimate
from harness.rows.ranking import UNDECIDED, Standing
from harness.study import enough
from harness.study.search import following
from harness.study.study import AA_SEED, Range, Sample
from tests.cases import cases
from tests.harness.rows.bursts import BLOCK_S, BURST, LEVEL

WINDOW_S = 1000.0
SEEDS = 9
GIVEN = (0.8, 3.2, 12.8)
SAMPLE = Sample("bisect", points=6)


class World:
    """Systems of known crossings: their misses thin out the same bursts, whatever the rate and the system."""

    def __init__(self, crossings_rps: dict[str, float], slope: float, rng: np.random.Generator) -> None:
        self.at, self.slope, self.rng = crossings_rps, slope, rng
        self.blocks = round(WINDOW_S / BLOCK_S)
        self.drawn: dict[tuple[int, str], tuple[np.ndarray, ...]] = {}
        self.runs = 0

    def bursts(self, seed: int, whose: str, most: float) -> tuple[np.ndarray, ...]:
        """Return block, mark and size of a seed's bursts: most of them are all systems', some a system's own."""
        if (seed, whose) not in self.drawn:
            share = 0.3 if whose else 0.7
            n = self.rng.poisson(share * most * self.blocks)
            self.drawn[seed, whose] = (
                self.rng.integers(0, self.blocks, n),
                self.rng.random(n) * most,
                self.rng.geometric(1 / BURST, n),
            )
        return self.drawn[seed, whose]

    def run(self, system: str, seed: int, x: float) -> Counted:
        """Run a window at a rate."""
        self.runs += 1
        most = 0.5 * 2 * GIVEN[-1] * BLOCK_S / BURST
        want = min(0.5, (1 - LEVEL) * (x / self.at[system]) ** self.slope) * x * BLOCK_S / BURST
        missed = np.zeros(self.blocks)
        for block, mark, size in (self.bursts(seed, "", most), self.bursts(seed, system, most)):
            missed += np.bincount(block[mark < want], size[mark < want], self.blocks)
        offered = np.full(self.blocks, round(x * BLOCK_S), np.float64)
        return Counted(float(np.minimum(missed, offered).sum()), float(offered.sum()))


def searched(world: World, system: str) -> Windows:
    """Search rates by bisection, as `measure` asks for them."""
    windows: Windows = {}
    for _ in count():
        seen = {seed: {x: {"ttft": counted.met} for x, counted in curve.items()} for seed, curve in windows.items()}
        ask = following(SAMPLE, Range(LEVEL, GIVEN, GIVEN[0] / 8, seeds=SEEDS), {system: seen})
        if not ask.xs:
            return windows
        for x in ask.xs[system]:
            for seed in range(SEEDS):
                windows.setdefault(seed, {})[x] = world.run(system, seed, x)
    raise AssertionError


def experiment(world: World, budget: float, panel: Panel) -> tuple[Standing, float]:
    """Tell two systems apart or spend the budget; return their standing and the ratio of what they offer."""
    curves, spent = {name: searched(world, name) for name in world.at}, 0.0
    first, second = world.at
    pair = first, second
    while True:
        left = enough.unsettled(curves, panel, [pair], LEVEL, 0.1)
        more = enough.more(curves, panel, left, SEEDS, LEVEL, GIVEN[0] / 8) if left else []
        cost = sum(run.requests for run in more)
        if not more or spent + cost > budget:
            break
        spent += cost
        for name, seed, x, _ in more:
            curves[name].setdefault(seed, {})[x] = world.run(name, seed, x)
    shared = curves[first].keys() & curves[second].keys()
    ours, theirs = (together(curves[name], shared) for name in pair)
    assert ours is not None
    assert theirs is not None
    return ranking.standing(panel, (ours, theirs), LEVEL), spent


PANEL = {"axis": "rate_rps", "xs": GIVEN, "unit_rps": 1.0}


def test_stopping_once_systems_are_told_apart_keeps_intervals_honest() -> None:
    """Intervals of ratios cover and equals are rarely told apart, though experiments stop on a verdict."""
    rng = np.random.default_rng(5)
    covered, told, pairs = list[bool](), 0, 0
    for slope in (3.0, 6.0):
        for ours, theirs in ((3.0, 3.0), (4.5, 3.0), (3.0, 3.3)):
            for _ in range(20):
                standing, _ = experiment(World({"ours": ours, "theirs": theirs}, slope, rng), 300_000, PANEL)
                if standing.ratio is None or standing.flat:
                    continue
                low, high = standing.ratio.low or 0.0, math.inf if standing.ratio.high is None else standing.ratio.high
                covered.append(low <= ours / theirs <= high)
                if ours == theirs:
                    pairs, told = pairs + 1, told + (standing.says.startswith(("ahead", "behind")))
    assert np.mean(covered) >= 0.85, f"{np.mean(covered):.3f} of {len(covered)} ratios are covered"
    assert told / pairs <= 0.15, f"{told} of {pairs} equal systems are told apart"


def standing(mean: float, low: float | None, high: float | None, p: float = 0.001) -> Standing:
    says = pooled.verdict(Estimate(mean, low, high, 60)).words
    return Standing(Estimate(mean, low, high, 60), says, "", p)


@cases(
    ("standing", "verdicts", "enough_"),
    [
        (standing(1.5, 1.3, 1.7), 1, True),  # its sign is known
        (standing(1.5, 1.01, 2.2, 0.04), 1, True),
        (standing(1.5, 1.01, 2.2, 0.04), 9, False),  # not among nine
        (standing(1.0, 0.9, 1.1, 1.0), 9, True),  # equal
        (standing(1.2, 0.9, 1.6, 0.2), 1, False),
        (standing(1.02, 0.94, 1.1, 0.6), 1, True),  # narrow
        (standing(1.0, None, None, 1.0), 1, False),
    ],
)
def test_enough_is_a_sign_an_equality_or_a_narrow_interval(standing: Standing, verdicts: int, enough_: bool) -> None:
    assert enough.settled(standing, 0.1, verdicts) == enough_


def test_flat_curves_are_enough_by_their_differences() -> None:
    narrow, wide = (tuple((x, Estimate(0.0, -end, end, 60)) for x in GIVEN) for end in (0.004, 0.02))
    assert enough.settled(Standing(None, UNDECIDED, "", flat=True, differences=narrow), 0.1, 1)
    assert not enough.settled(Standing(None, UNDECIDED, "", flat=True, differences=wide), 0.1, 1)


def asked(more: list[enough.More]) -> dict[str, tuple[set[int], set[float]]]:
    """Return the seeds and the x that are asked for, by system."""
    wanted: dict[str, tuple[set[int], set[float]]] = {}
    for name, seed, x, _ in more:
        seeds, xs = wanted.setdefault(name, (set(), set()))
        seeds.add(seed)
        xs.add(x)
    assert len(more) == sum(len(seeds) * len(xs) for seeds, xs in wanted.values())
    return wanted


def test_more_seeds_keep_pairs_paired() -> None:
    """A system that lacks seeds of an earlier round gets these too; the same rates, near its crossing and the given."""
    world = World({"a": 3.0, "b": 4.0}, 4.0, np.random.default_rng(1))
    curves = {name: searched(world, name) for name in world.at}
    curves["a"] |= dict.fromkeys(range(9, 18), curves["a"][0])
    left = {"a": True, "b": False}
    while (more := enough.more(curves, PANEL, left, 5, LEVEL, GIVEN[0] / 8)) and all(run.seed < 18 for run in more):
        for name, seed, x, _ in more:  # what an interval lacks comes first
            curves[name][seed][x] = world.run(name, seed % 9, x)
    runs = asked(more)
    assert {name: seeds for name, (seeds, _) in runs.items()} == {"a": {*range(18, 23)}, "b": {*range(9, 23)}}
    xs = {name: xs for name, (_, xs) in runs.items()}
    assert set(GIVEN) <= xs["a"] <= set(curves["a"][0])
    assert {x for x in curves["b"][0] if 2.5 < x < 6.0} <= xs["b"] <= set(curves["b"][0])
    offered = {name: sum(curves[name][0][x].offered for x in xs[name]) for name in xs}
    assert sum(run.requests for run in more) == pytest.approx(5 * offered["a"] + 14 * offered["b"])


def test_more_seeds_never_lose_the_ends_of_an_interval() -> None:
    """Of a coarse curve the next x beyond either end is run too, however far it is."""
    of = {x: Counted(round(8000 * min(0.9, 0.01 * (x / 4.0) ** 6.0)), 8000.0) for x in (0.5, 4.0, 30.0)}
    curves: dict[str, Windows] = {"a": dict.fromkeys(range(9), of)}
    more = enough.more(curves, {"axis": "rate_rps", "xs": (), "unit_rps": 1.0}, {"a": False}, 3, LEVEL, 0.1)
    assert asked(more) == {"a": ({9, 10, 11}, {0.5, 4.0, 30.0})}


def test_every_seed_gets_the_same_x() -> None:
    """A rate that some seeds lack is run by them too, once it counts: only rates that all have are pooled."""
    world = World({"a": 3.0}, 4.0, np.random.default_rng(1))
    curves, left = {"a": searched(world, "a")}, {"a": True}
    while (more := enough.more(curves, PANEL, left, 5, LEVEL, GIVEN[0] / 8)) and all(run.seed < 9 for run in more):
        for name, seed, x, _ in more:
            curves[name][seed][x] = world.run(name, seed, x)
    lacking = max(run.x for run in more if run.x not in GIVEN)
    del curves["a"][3][lacking]
    assert lacking not in {run.x for run in enough.more(curves, PANEL, left, 5, LEVEL, GIVEN[0] / 8)}
    del curves["a"][3][GIVEN[0]]
    assert ("a", 3, GIVEN[0]) in {run[:3] for run in enough.more(curves, PANEL, left, 5, LEVEL, GIVEN[0] / 8)}


@cases(
    ("at", "xs", "axis", "x"),
    [
        (4.0, (1.0, 3.6, 4.2), "rate_rps", 5.94),  # misses at the last one may be fewer than 1 % yet
        (0.9, (1.0, 2.0, 8.0), "rate_rps", None),  # crossed below all that ran, which the search answers for
        (3.0, (0.5, 1.0, 8.0), "rate_rps", 3.0),  # no x is near to the crossing
        (0.55, (0.05, 0.2, 0.8), "slo_scale", 0.55),
    ],
)
def test_an_interval_that_lacks_an_x_asks_for_it_by_all_seeds(
    at: float, xs: tuple[float, ...], axis: str, x: float | None
) -> None:
    few = {seed: 0.0 if seed % 6 else 6.0 for seed in range(36)}  # a steep curve, whose misses come in few windows
    curves: dict[str, Windows] = {
        "a": {
            seed: {k: Counted(round(2000 * times * min(0.9, 0.01 * (k / at) ** 6.0)), 2000.0) for k in xs}
            for seed, times in few.items()
        }
    }
    given = tuple(crossings.reciprocal(k) for k in xs) if axis == "slo_scale" else xs
    more = enough.more(curves, {"axis": axis, "xs": given, "unit_rps": 1.0}, {"a": False}, 3, LEVEL, 0.1)
    seeds, asked_xs = asked(more)["a"]
    if x is None:
        assert asked_xs <= set(xs)
    else:
        assert sorted(asked_xs) == [pytest.approx(x, rel=0.25)]
        assert seeds == {*few}


@cases("knee", [18.3, 19.0, 19.6])
def test_a_knee_without_misses_below_it_is_narrowed_and_no_lower_rate_is_asked_for(knee: float) -> None:
    def window(seed: int, x: float) -> Counted:
        """Every other window misses what exceeds the knee: nothing below it, a third soon after."""
        offered = round(x * 200.0)
        return Counted(round(offered * min(0.6, 20.0 * max(0.0, x / knee - 1.0)) * (seed % 2)), offered)

    curves: dict[str, Windows] = {"a": {seed: {x: window(seed, x) for x in (4.5, 18.0, 21.5)} for seed in range(60)}}
    panel = {"axis": "rate_rps", "xs": GIVEN, "unit_rps": 1.0}

    def interval() -> Estimate:
        c = together(curves["a"], curves["a"].keys())
        assert c is not None
        return pooled.crossing(c, LEVEL)

    assert interval().low is None
    while interval().low is None:
        ((_, _, x, _), *_) = more = enough.more(curves, panel, {"a": False}, 3, LEVEL, 0.1)
        assert {run.x for run in more} == {x}
        assert 18.0 < x < 21.5
        for run in more:
            curves["a"][run.seed][x] = window(run.seed, x)
    assert len(curves["a"][0]) <= 8
    low, high = interval().low, interval().high
    assert low is not None
    assert high is not None
    assert low / enough.NARROW <= knee <= high * enough.NARROW


def test_seeds_never_meet_those_of_copies() -> None:
    world = World({"a": 3.0}, 4.0, np.random.default_rng(1))
    curves: dict[str, Windows] = {"a": {AA_SEED - 3: {x: world.run("a", 0, x) for x in GIVEN}}}
    while more := enough.more(curves, PANEL, {"a": False}, 5, LEVEL, GIVEN[0] / 8):
        for _, seed, x, _ in more:
            assert seed == AA_SEED - 3
            curves["a"][seed][x] = world.run("a", 0, x)
