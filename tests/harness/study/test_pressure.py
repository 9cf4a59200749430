"""KVPR of a start beside the least of all placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.search import Part, search
from harness.study.pressure import F8, largest, least


def array(*values: float) -> F8:
    return np.array(values, np.float64)


def test_a_worked_case() -> None:
    # 10 bytes each: the hot model alone is at 3 / 6, the two others together at 2 / 2; one of them beside it at 4 / 2
    d, w = array(3, 1, 1), array(4, 4, 4)
    assert largest([0, 1, 1], d, w, [10, 10]) == pytest.approx(1.0)
    assert largest([0, 0, 1], d, w, [10, 10]) == pytest.approx(2.0)
    assert least(d, w, w, [10, 10]) == pytest.approx(1.0)


def test_a_placement_without_room_is_none() -> None:
    d, w = array(1, 1), array(4, 4)
    assert least(d, w, array(6, 6), [10, 10]) == pytest.approx(1 / 6)  # both on one GPU take 12
    assert least(d, w, array(11, 6), [10, 10]) == float("inf")


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(1, 4)), min_size=1, max_size=5), st.integers(1, 3))
def test_no_placement_is_below_it_and_the_search_reaches_it(models: list[tuple[float, int]], gpus: int) -> None:
    d, w = array(*(each for each, _ in models)), array(*(each for _, each in models))
    room, nodes = [24.0] * gpus, [0] * gpus
    best = search({str(k): Part(1, w[k] + 0.5, w[k], d[k]) for k in range(len(d))}, room, nodes)
    assert best is not None
    at = [best[str(k)][0] for k in range(len(d))]
    assert largest(at, d, w, room) == pytest.approx(least(d, w, w + 0.5, room))
    assert largest([0] * len(d), d, w, room) >= least(d, w, w + 0.5, room) * (1 - 1e-9)
