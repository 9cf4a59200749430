"""Streams assigned to models by a Latin square: over its seeds each busy stream goes once to each size class.

The models of a set fall into n classes of size. With every seed the n busiest streams go to n models, one of each
class. Over the n seeds of a square each of these streams goes to every class once. The seed also draws the model within
the class, and the models that get the other streams. So a busy stream goes to every class equally often, however many
models the class has. With the rule `shuffled` a busy stream goes to every model equally often, on average.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.policy.parameters import parameters, stored_bytes
from harness.policy.types import Shape
from traces.arrivals import rng
from workloads.models import ModelSet

I8 = NDArray[np.int64]
# Weights of one class differ by less than this factor from one model to the next. In the sets that come with the bench
# neighbours of a class are 1.15 apart at most, classes 1.47 at least.
ALIKE = 1.25


def size_classes(models: ModelSet) -> tuple[tuple[int, ...], ...]:
    """Group the models of a set by the bytes of their weights, the largest models first.

    Models of similar size are in one class. A class is a tuple of the models' indices in the set.
    """
    weights = np.array([weights_of(member.shape) for member in models.members], np.float64)
    order = np.argsort(-weights, kind="stable")
    cuts = np.flatnonzero(weights[order][:-1] >= ALIKE * weights[order][1:]) + 1
    return tuple(tuple(part.tolist()) for part in np.split(order, cuts))


def latin(order: int, number: int) -> I8:
    """Draw Latin square `number`: its rows are seeds, its columns streams (busiest first), its entries size classes."""
    draw = rng(number, "square")
    rows, columns, names = (draw.permutation(order) for _ in range(3))
    return np.asarray(names[(rows[:, None] + columns[None, :]) % order], np.int64)


def dealt(models: ModelSet, number: int) -> list[int]:
    """Return for each stream, the busiest first, the index of the model that gets it.

    With n size classes, `number` // n is the number of the square and `number` % n is its row.
    """
    classes = size_classes(models)
    square, row = divmod(number, len(classes))
    draw = rng(number, "square", "models")
    first = [int(draw.choice(classes[k])) for k in latin(len(classes), square)[row]]
    rest = draw.permutation([k for k in range(len(models.members)) if k not in first])
    return [*first, *(int(k) for k in rest)]


def weights_of(shape: Shape) -> int:
    """Return the size of a model's weights in units of 16 bits, without norms and biases."""
    return stored_bytes(shape) // 2 - parameters(shape).norms
