"""The x that is run next: knees by octaves, bisection of a crossing, bracketing of the fewest; and nothing twice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows import statistics
from harness.rows.estimate import Estimate
from harness.study.search import LEVEL, TOP, Ask, between, following, grid, highest
from harness.study.study import QUARTER, Range, Sample, rounded
from tests.cases import cases

Attained = Callable[[str, float, int], float]  # of a system at an x with a seed
KNEE, COMMON = Sample("knee", points=6), Sample("knee", each="panel")


def rounds(
    sample: Sample, bounds: Range, attained: Attained, *, systems: tuple[str, ...] = ("a",), seeds: int = 1
) -> tuple[list[Ask], dict[str, dict[int, dict[float, dict[str, float]]]]]:
    """Return every round of a search until nothing is asked, and what was seen at last."""
    curves: dict[str, dict[int, dict[float, dict[str, float]]]] = {name: {} for name in systems}
    asked: list[Ask] = []
    while any((ask := following(sample, bounds, curves)).xs.values()):
        asked.append(ask)
        for name, xs in ask.xs.items():
            for x in xs:
                for seed in range(1 if ask.first_seed else seeds):
                    curves[name].setdefault(seed, {})[x] = {"ttft": attained(name, x, seed)}
        if ask.last:
            break
    return asked, curves


def order(sample: Sample, bounds: Range, attained: Attained, seeds: int = 1) -> list[float]:
    """Return the x of one system in the order in which they are asked for."""
    return [x for ask in rounds(sample, bounds, attained, seeds=seeds)[0] for x in ask.xs["a"]]


# ------------------------------------------------------------------ given x


def test_given_x_are_asked_once_and_of_all_seeds() -> None:
    for sample in (Sample(), KNEE, COMMON):
        asked, _ = rounds(sample, Range(LEVEL, (1.0, 2.0), 0.1), lambda *_: 0.5, systems=("a", "b"), seeds=2)
        assert asked == [Ask({"a": (1.0, 2.0), "b": (1.0, 2.0)}, last=True)]


# ------------------------------------------------------------------ around the knee


def seen(holds: int, falls: int, lowest: float = 1.0) -> dict[float, dict[str, float]]:
    """Return attainments by rate: 1 for `holds` octaves, then 0.95, and below 90 % after `falls`."""
    return {
        lowest * 2.0**k: {"ttft": 1.0 if k < holds else 0.95 if k < falls else 0.5, "tpot": 1.0}
        for k in range(falls + 1)
    }


@given(st.integers(0, 6), st.integers(0, 3), st.integers(2, 14), st.sampled_from([0.25, 1.0, 2.0]))
def test_rates_reach_from_the_lowest_to_the_fall(holds: int, more: int, least: int, lowest: float) -> None:
    curve = seen(holds, holds + more, lowest)
    rates = grid(curve, least)
    assert len(rates) >= least
    assert list(rates) == sorted(set(rates))
    assert set(curve) <= set(rates)  # what was searched is not run in vain
    assert (rates[0], rates[-1]) == (lowest, max(*curve, 4 * lowest))
    assert set(rates) <= set(grid(curve, 2 * least))  # --full holds the default


def test_rates_are_finer_around_the_knee() -> None:
    assert grid(seen(3, 4), 6) == (1, 2, 4, 5.66, 8, 11.3, 16)
    assert len(grid(seen(0, 0), 6)) == 9  # fell at once: quarters of the two octaves above


def test_a_dip_at_a_low_rate_is_not_the_knee() -> None:
    """A system that attains 98.4 to 99.3 % at the lowest rates, holds 99 % at 8, and has fallen at 16."""
    shares = {0.5: 0.984, 1.0: 0.993, 2.0: 0.996, 4.0: 0.999, 8.0: 0.995, 16.0: 0.8}
    dips = {rate: {"ttft": share, "tpot": 1.0} for rate, share in shares.items()}
    assert highest(dips.items(), 0.99) == 8.0
    assert {8.0, 11.3, 16.0} <= set(grid(dips, 6))
    assert set(grid(dips, 6)) - set(shares) == {11.3}  # no rate is spent on the dip
    worse = {rate: scores | {"tpot": 1.0 if rate <= 2 else 0.9} for rate, scores in dips.items()}
    assert highest(worse.items(), 0.99) == 2.0  # by every definition
    unlucky = [*dips.items(), *((rate, {"ttft": 0.9, "tpot": 1.0}) for rate in shares)]
    assert highest(unlucky, 0.99) is None  # of the mean over seeds


def test_each_system_is_followed_to_its_own_fall() -> None:
    """Octaves by the first seed from the lowest rate, at least two of them; then each grid, of all seeds."""
    asked, curves = rounds(
        KNEE,
        Range(LEVEL, (), 0.5),
        lambda name, x, _: float(x <= {"a": 4.0, "b": 0.1}[name]),
        systems=("a", "b"),
        seeds=2,
    )
    *search, last = asked
    assert [ask.xs for ask in search] == [
        {"a": (0.5,), "b": (0.5,)},
        {"a": (1.0,), "b": (1.0,)},
        {"a": (2.0,), "b": (2.0,)},
        {"a": (4.0,)},
        {"a": (8.0,)},
    ]
    assert all(ask.first_seed and not ask.last for ask in search)
    assert (last.first_seed, last.last) == (False, True)
    assert last.xs["a"] == (0.5, 1, 2, 4, 5.66, 8)
    assert last.xs["b"] == grid({x: {"ttft": 0.0} for x in (0.5, 1.0, 2.0)}, 6)
    assert set(curves["a"][1]) == set(last.xs["a"])


def test_a_system_that_never_falls_is_given_up_far_out() -> None:
    asked, _ = rounds(KNEE, Range(LEVEL, (), 1.0), lambda *_: 1.0)
    assert asked[-2].xs == {"a": (256.0,)}
    assert asked[-1].xs["a"][-1] == 256.0


def common(knees: Mapping[str, float]) -> tuple[list[float], dict[str, list[float]]]:
    """Return the octaves of a search, and the rates that are run of each system; they fall as 1 / x behind their knees.

    So one whose knee is at k crosses 99 % at k / 0.99, and 90 % at k / 0.9.
    """
    asked, curves = rounds(
        COMMON, Range(LEVEL, (), 1.0), lambda name, x, _: min(1.0, knees[name] / x), systems=(*knees,)
    )
    search = [ask for ask in asked if ask.first_seed]
    assert asked[: len(search)] == search  # one seed looks for where all then run
    assert not any(ask.last for ask in asked)
    return [max(xs) for ask in search for xs in [ask.xs[next(iter(ask.xs))]]], {
        name: sorted(curves[name][0]) for name in knees
    }


@pytest.mark.parametrize(("level", "top"), [(0.99, 4.0), (0.90, 4.0), (0.88, 8.0)])
def test_a_target_is_searched_beyond_where_it_is_crossed(level: float, top: float) -> None:
    """A system that meets 85 % at 4 is past a knee at 90 %, and not yet past one at 88 %: it is run to 8."""
    asked, curves = rounds(
        COMMON,
        Range(level, (), 1.0),
        lambda _, x, __: {1.0: 1.0, 2.0: 0.99, 4.0: 0.845}.get(x, max(0.0, 1.0 - 0.038 * x)),
    )
    assert max(max(ask.xs["a"]) for ask in asked if ask.first_seed) == top
    (curve,) = (of[0] for of in curves.values())
    assert min(of["ttft"] for of in curve.values()) < level <= max(of["ttft"] for of in curve.values())


COMMONLY: list[tuple[dict[str, float], list[float]]] = [
    ({"a": 3.0, "b": 5.0}, [1, 2, 4, 8]),
    ({"a": 3.9}, [1, 2, 4, 8]),  # at 4 still above 90 %
    ({"a": 2.0, "b": 2.0}, [1, 2, 4]),
    ({"a": 1000.0}, [1, 2, 4, 8, 16, 32, TOP]),
    ({"a": 0.3}, [1, 0.5, 0.25]),
    ({"a": 0.0}, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),  # the first below a twentieth
]


@cases(("knees", "searched"), COMMONLY)
def test_a_common_knee_is_found_by_doubling(knees: dict[str, float], searched: list[float]) -> None:
    asked, run = common(knees)
    assert asked == searched
    for rates in run.values():
        assert len(rates) == len(set(rates))


def test_a_system_that_never_meets_the_level_is_run_down_to_its_lowest_octave_and_alone_there() -> None:
    _, run = common({"a": 3.0, "b": 0.0, "unshared": 1000.0})
    assert min(run["b"]) == 1 / 32
    assert min(run["a"]) == 1.0  # an octave below its knee
    assert min(run["unshared"]) == 1.0  # beside the first contestant that meets it


def test_each_contestant_is_run_close_to_where_it_crosses() -> None:
    """Rates up to a quarter of an octave apart stand on both sides of each crossing that lies within the search."""
    draw = random.Random(0)
    for _ in range(100):
        knees = {name: 2 ** draw.uniform(-2, 5) for name in "abc"}
        _, run = common(knees)
        for name, knee in knees.items():
            below = max(x for x in run[name] if x <= knee / LEVEL)
            above = min(x for x in run[name] if x > knee / LEVEL)
            assert above / below <= QUARTER, (knees, name, run[name])


# ------------------------------------------------------------------ bisection


def bisect(attained: Callable[[float], float], points: int, least: float = 1 / 64) -> list[float]:
    return order(Sample("bisect", points=points), Range(LEVEL, (1.0, 4.0, 16.0), least), lambda _, x, __: attained(x))


def test_bisection_by_hand() -> None:
    assert bisect(lambda rate: 1.0 if rate <= 5 else 0.5, 6) == [1, 4, 16, 8, 5.65685, 4.75683]
    assert bisect(lambda rate: 1.0 if rate <= 14 else 0.5, 6) == [1, 4, 16, 8, 11.3137, 13.4543, 22.6274]  # and beyond
    assert bisect(lambda rate: 1.0, 5) == [1, 4, 16, 32, 64]  # holds all
    assert bisect(lambda rate: 0.5, 5) == [1, 4, 16, 0.5, 0.25]  # holds none
    assert bisect(lambda rate: 0.5, 9, least=0.4) == [1, 4, 16, 0.5, 0.4]  # below are too few requests


@given(st.floats(0.05, 500.0), st.integers(4, 16))
def test_bisection_closes_in_on_a_step(knee: float, points: int) -> None:
    rates = bisect(lambda rate: 1.0 if rate <= knee else 0.9, points)
    assert len(set(rates)) == len(rates)  # no rate is sampled twice
    assert len(rates) == points or (len(rates) == points + 1 and rates[-1] == max(rates))  # one beyond a crossing
    rates = rates[:points]
    holds = max((rate for rate in rates if rate <= knee), default=None)
    fails = min((rate for rate in rates if rate > knee), default=None)
    if holds is not None and fails is not None:  # each sample since the first bracket halved it, on a logarithm
        bracket = next(k for k in range(3, points + 1) if min(rates[:k]) <= knee < max(rates[:k]))
        assert fails / holds <= 4.0 ** (0.5 ** (points - bracket)) * (1 + 1e-4)


@given(
    st.dictionaries(st.sampled_from([1.0, 4.0, 16.0]), st.floats(0, 1), min_size=3), st.randoms(), st.integers(3, 12)
)
def test_bisection_of_a_noisy_curve_ends_and_repeats_nothing(
    first: dict[float, float], chance: Random, points: int
) -> None:
    noise = {**first}

    def attained(rate: float) -> float:
        return noise.setdefault(rate, chance.random())

    rates = bisect(attained, points)
    assert len(rates) == len(set(rates)) <= points + 1
    assert len(rates) >= points or statistics.held(noise, LEVEL) is None  # it stops early only at the least rate
    assert min(rates) >= 1 / 64


NEXT: list[tuple[dict[float, float], float | None]] = [
    ({1.0: 1.0, 4.0: 0.5}, 2.0),
    ({1.0: 1.0, 2.0: 1.0, 4.0: 0.5, 64.0: 0.0}, 2.83),
    ({1.0: 1.0, 2.0: 0.98, 4.0: 1.0, 8.0: 0.5}, 5.66),  # a dip: 2 and 4 pool to 0.99
    ({1.0: 1.0, 2.0: 0.9, 4.0: 0.95, 8.0: 0.5}, 1.41),
    ({1.0: 1.0, 4.0: 0.99}, None),  # it holds everywhere
    ({1.0: 0.98, 4.0: 0.5}, None),  # it holds nowhere
    ({1.0: 1.0, 1.2345: 1.0}, None),  # nor is there a rate beside the highest that differs by its digits alone
    ({1.2345: 0.5, 4.0: 0.5}, None),
]


@cases(("curve", "next_"), NEXT)
def test_the_next_rate_halves_the_bracket_of_the_fit(curve: dict[float, float], next_: float | None) -> None:
    assert between(curve, LEVEL, min(curve), max(curve), digits=3) == next_


def test_the_mean_over_seeds_is_bisected() -> None:
    """One seed holds up to 2, the other up to 8: half of 99 % is none."""
    sample, bounds = Sample("bisect", points=4), Range(LEVEL, (1.0, 16.0), 0.1)
    rates = order(sample, bounds, lambda _, x, seed: float(x <= (2.0, 8.0)[seed]), seeds=2)
    assert rates == [1, 16, 4, 2]
    assert rounded(1.234567891) == 1.23457


# ------------------------------------------------------------------ bracketing


def bracketed(
    attained: Callable[[int, int], float], least: int, most: int, seeds: int = 1
) -> tuple[Estimate, list[float]]:
    """Return the answer of a search for the fewest, and the counts that it sampled in order."""
    bounds = Range(LEVEL, (float(least), float(most)), float(least))
    asked, curves = rounds(Sample("bracket"), bounds, lambda _, x, seed: attained(round(x), seed), seeds=seeds)
    of_seeds = list(curves["a"].values())
    mean = {x: sum(curve[x]["ttft"] for curve in of_seeds) / len(of_seeds) for x in of_seeds[0]}
    return statistics.fewest(mean, LEVEL).at, [x for ask in asked for x in ask.xs["a"]]


@cases("least", [1, 4])
def test_a_step_is_found_in_few_counts_and_none_twice(least: int) -> None:
    for step in range(least, 33):
        at, counts = bracketed(lambda n, _, step=step: 1.0 if n >= step else 0.5, least, 32)  # type: ignore[misc]
        assert at.mean == step
        assert at.sign == ("<" if step == least else "=")
        assert len(counts) == len(set(counts)) <= 2 + math.ceil(math.log2(32 - least + 1))
        assert all(least <= n <= 32 for n in counts)
        assert {step - 1, step, step + 1} - {least - 1, 33} <= set(counts)


def test_what_the_most_cannot_do_costs_one_count() -> None:
    at, counts = bracketed(lambda n, _: n / 100, 4, 32)
    assert (at.mean, at.sign, counts) == (32, ">", [32])


def test_a_lone_count_that_holds_by_luck_is_no_answer() -> None:
    """Halving meets 10, which holds; the count above fails by more, so the search goes on above it."""
    lucky: Mapping[int, float] = {10: 0.991, 11: 0.95}
    at, counts = bracketed(lambda n, _: lucky.get(n, 1.0 if n >= 14 else 0.5), 4, 32)
    assert {10, 11} <= set(counts)
    assert at.mean == 14


def test_the_mean_over_seeds_decides() -> None:
    at, _ = bracketed(lambda n, seed: 1.0 if n >= 9 + 2 * seed else 0.98, 4, 32, seeds=3)  # 9, 11 and 13 alone
    assert at.mean == 11  # (1 + 1 + 0.98) / 3 = 0.993; at 10 it is 0.987


def test_under_noise_the_answer_is_sampled_and_holds() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        step, noise = draw.randint(4, 32), {n: draw.gauss(0, 0.01) for n in range(4, 33)}
        curve: dict[float, float] = {}

        def attained(
            n: int, _: int, step: int = step, noise: Mapping[int, float] = noise, curve: dict[float, float] = curve
        ) -> float:
            curve[float(n)] = min(1.0, max(0.0, (0.995 if n >= step else 0.97) + noise[n]))
            return curve[float(n)]

        at, counts = bracketed(attained, 4, 32)
        assert len(counts) == len(set(counts))
        if at.sign == ">":
            assert statistics.fewest(curve, LEVEL).at.sign == ">"
        else:
            assert curve[at.mean] >= LEVEL
            assert at.mean in {4, 32} or {at.mean - 1, at.mean + 1} <= curve.keys()
            assert at.mean == 4 or curve[at.mean - 1] < LEVEL or at.mean == 32
