"""Streams dealt by a Latin square: its laws, what a square of seeds balances, and how it crosses a trace's halves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.costs.shapes import weight_bytes
from harness.run.setup import load_models, load_trace
from tests.cases import cases
from tests.workloads.test_workloads import drawn
from traces import drawing
from traces.load import Trace
from workloads.build import build
from workloads.models import model_set, shapes
from workloads.picking import FOLDED_S, assigned, square_seeds, window_fold
from workloads.square import ALIKE, dealt, latin, size_classes, weights_of

SETS = ("aegaeon", "heavy8", "light8", "prism18", "tp4")


@given(st.integers(1, 9), st.integers(0, 2**40))
def test_rows_and_columns_are_permutations(order: int, number: int) -> None:
    square = latin(order, number)
    full = list(range(order))
    assert all(sorted(line) == full for line in [*square.tolist(), *square.T.tolist()])
    assert np.array_equal(square, latin(order, number))


def test_each_next_square_is_drawn_anew() -> None:
    assert len({latin(4, number).tobytes() for number in range(20)}) > 10
    assert len({latin(3, number).tobytes() for number in range(60)}) == 12  # all there are


@cases(
    ("name", "counts"),
    [("light8", [3, 1, 4]), ("heavy8", [3, 3, 2]), ("prism18", [2, 11, 5]), ("aegaeon", [2, 8]), ("tp4", [2, 2])],
)
def test_models_of_like_weight_are_one_class(name: str, counts: list[int]) -> None:
    models = model_set(name)
    classes = size_classes(models)
    assert [len(group) for group in classes] == counts
    assert sorted(k for group in classes for k in group) == list(range(len(models.members)))
    weights = [sorted(weight_bytes(models.members[k].shape) for k in group) for group in classes]
    assert all(b < ALIKE * a for group in weights for a, b in pairwise(group))
    assert all(ALIKE * b[-1] <= a[0] for a, b in pairwise(weights))


@cases("name", sorted(shapes()))
def test_weights_are_those_that_memory_is_priced_by(name: str) -> None:
    assert 2 * weights_of(shapes()[name]) == pytest.approx(weight_bytes(shapes()[name]), rel=1e-3)


def hyperbolic(models: int) -> Trace:
    return load_trace(f"hyperbolic-like+models={models}")


def owners(rows: Trace, name: str, seed: int) -> dict[tuple[str, float], int]:
    """Return the model of each stream."""
    assignment = assigned(rows, model_set(name), seed, "square")
    assert assignment.rule == "square"
    return {stream: k for k, stream in enumerate(assignment.streams)}


@cases("name", SETS)
def test_over_a_square_each_busy_stream_meets_each_size_class_once(name: str) -> None:
    models = model_set(name)
    rows = hyperbolic(len(models.members))
    n = square_seeds(rows, models)
    assert n == len(size_classes(models))
    size_of = {k: size for size, group in enumerate(size_classes(models)) for k in group}
    popular = Counter(rows.models[k] for k in rows.model)
    for square in (0, 1, 7):
        each = [owners(rows, name, seed) for seed in range(square * n, (square + 1) * n)]
        streams = sorted(each[0], key=lambda stream: (-popular[stream[0]], stream))
        assert all(set(owner) == set(streams) and sorted(owner.values()) == list(range(len(streams))) for owner in each)
        for stream in streams[:n]:
            assert sorted(size_of[owner[stream]] for owner in each) == list(range(n))
        assert len({tuple(sorted(owner.items())) for owner in each}) == n  # seeds of a square differ
        assert each == [owners(rows, name, seed) for seed in range(square * n, (square + 1) * n)]


def test_streams_beyond_the_square_go_anywhere() -> None:
    models = model_set("light8")
    rest = [dealt(models, number)[3:] for number in range(300)]
    met = Counter((place, model) for places in rest for place, model in enumerate(places))
    (lone,) = size_classes(models)[1]
    assert min(met[place, model] for place in range(5) for model in range(8) if model != lone) >= 15
    assert all(lone not in places for places in rest)  # a class of one model always has a busy stream


def test_a_set_of_one_size_is_a_square_of_one_seed() -> None:
    models = load_models("llama-3.2-1b*4")
    assert len(size_classes(models)) == 1
    orders = {tuple(dealt(models, number)) for number in range(30)}
    assert len(orders) > 10
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_the_square_crosses_the_halves_of_a_replayed_trace() -> None:
    """Seeds 2k and 2k + 1 deal alike and replay a half each, so either half has whole squares by itself."""
    rows, models = drawn(900, streams=8), model_set("light8")
    assert square_seeds(rows, models) == 2 * len(size_classes(models)) == 6
    by_row: dict[tuple[tuple[str, float], ...], set[int | None]] = {}
    for seed in range(6):
        of = assigned(rows, models, seed, "square").streams
        by_row.setdefault(of, set()).add(window_fold(rows, seed, "held-out"))
    assert list(by_row.values()) == [{0, 1}] * 3
    long = replace(rows, span_s=FOLDED_S)  # every seed replays its second half
    assert square_seeds(long, models) == 3
    assert assigned(long, models, 1, "square").streams == assigned(rows, models, 2, "square").streams


def test_jobs_follow_the_square() -> None:
    rows, models = hyperbolic(8), model_set("light8")
    for seed in (0, 4):
        jobs = build(rows, models, seed=seed, scaling="none", warmup_s=0.0, assign="square")
        counts = np.bincount(drawing.draw("hyperbolic-like", seed).model, minlength=8)
        owner = owners(rows, "light8", seed)
        got = np.bincount(jobs.model, minlength=8)
        assert all(got[k] == counts[rows.models.index(stream)] for (stream, _), k in owner.items())
