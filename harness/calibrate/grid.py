"""Fit a kernel: first the few parameters of a model of the kernel, then correction factors on a grid.

The parameters minimise a robust error of ln(seconds). The correction factors take up the remaining error. They are
fitted by ridge regression, so that factors far from any measured row keep their starting values. The stored errors are
those of the rounded numbers, computed by the functions that the simulator uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import coo_matrix, csr_matrix, identity
from scipy.sparse.linalg import spsolve

from harness.calibrate.rows import F8, Rows
from harness.calibrate.tables import Quantity, error
from harness.engines.costs.quantities import ERRORS, sig

CAP = 0.95  # no fraction of a peak is more
PRIOR = 0.02  # standard deviation of ln(scale): a scale that the rows do not determine stays at 1
STEPS = (1e-3, 1e-2, 3e-2, 1e-1, 1e-2)  # large steps of the derivative see past the plateaus of whole waves

Axis = tuple[str, Sequence[float], F8]  # what it counts, its knots, and its value at each row


def minimise(
    seconds: Callable[[F8], F8],
    y: F8,
    starts: Sequence[Sequence[float]],
    steps: Sequence[float] = (1e-4,),
    most: int = 80,
) -> F8:
    """Return the positive parameters whose predictions have the least robust error of ln(seconds / y).

    The search is repeated from each start, and the best result is returned. `steps` are step sizes of the numerical
    derivative. The search from one start uses them one after another, with at most `most` evaluations for each step
    size.
    """

    def residuals(x: F8) -> F8:
        return np.clip(np.log(seconds(np.exp(x)) / y), -1, 1)

    best: Any = None
    for start in starts:
        at = np.log(np.array(start))
        for step in steps:
            got = least_squares(
                residuals,
                at,
                loss="soft_l1",
                f_scale=0.1,
                diff_step=np.full(len(at), step),
                bounds=(np.log(1e-9), np.log(1e4)),
                max_nfev=most,
            )
            at = got.x
            best = got if best is None or got.cost < best.cost else best
    return cast("F8", np.exp(best.x))


def factors(axes: Sequence[Sequence[float]], at: Sequence[F8], log_error: F8) -> list[float]:
    """Return the correction factors at the points of a grid, fitted to the errors `log_error` of the rows.

    The fit is a ridge regression, reweighted towards the median. `at` has the rows' values along each axis.
    """
    A, w = _weights(axes, at), np.ones(len(log_error))
    c = np.zeros(A.shape[1])
    for _ in range(5):
        At = A.multiply(w[:, None]).T
        c = spsolve((At @ A + identity(A.shape[1])).tocsc(), At @ log_error)
        w = 1 / np.maximum(np.abs(log_error - A @ c), 0.02)
        w /= w.max()
    return [round(float(f), 3) for f in np.exp(c)]


def _weights(axes: Sequence[Sequence[float]], at: Sequence[F8]) -> csr_matrix:
    """Return the weights with which each row interpolates the grid points.

    The interpolation is multilinear, the same as in `kernels`.
    """
    parts = []
    for x, axis in zip(at, axes, strict=True):
        u = np.interp(np.log2(np.maximum(x, 1)), np.log2(axis), np.arange(len(axis)))
        i: NDArray[np.int64] = np.minimum(u.astype(np.int64), len(axis) - 2)
        parts.append(((i, 1 - (u - i)), (i + 1, u - i)))
    cols, vals = [], []
    for corner in product(*parts):
        cols.append(np.ravel_multi_index([i for i, _ in corner], [len(a) for a in axes]))
        vals.append(np.prod([w for _, w in corner], axis=0))
    n = len(at[0])
    entries = (np.concatenate(vals), (np.tile(np.arange(n), len(cols)), np.concatenate(cols)))
    return coo_matrix(entries, shape=(n, int(np.prod([len(a) for a in axes])))).tocsr()


def finish(q: Quantity, axes: Sequence[Axis], rows: Rows, seconds: Callable[[Quantity], F8]) -> Quantity:
    """Return a fitted quantity: its rounded parameters, correction factors for the remaining error, and errors."""
    q, fit, knots = rounded(q), ~rows.out, [list(k) for _, k, _ in axes]
    missed = np.log(rows.seconds / seconds(q))[fit]
    grid = factors(knots, [x[fit] for _, _, x in axes], missed)
    q |= {"axes_of": [name for name, _, _ in axes], "axes": knots, "factors": grid}
    return q | errors(seconds(q), rows)


def rescaled(
    q: Quantity, names: Sequence[str], rows: Rows, seconds: Callable[[Quantity, Rows], F8], axes: Sequence[F8] = ()
) -> Quantity:
    """Return a quantity scaled to the fitted rows, with its errors.

    The parameters in `names` are scaled first, then the correction factors. `axes` are the values of the fitted rows
    along the axes of these factors.
    """
    few = rows.fitted
    x = minimise(
        lambda x: np.concatenate([seconds(_times(q, names, x), few), x**PRIOR]),
        np.concatenate([few.seconds, np.ones(len(names))]),
        [[1.0] * len(names)],
        STEPS,
    )
    new: Quantity = rounded(_times({k: v for k, v in q.items() if k not in ERRORS}, names, x))
    if q.get("factors") and axes:
        more = factors(q["axes"], axes, np.log(few.seconds / seconds(new, few)))
        new["factors"] = [round(a * b, 3) for a, b in zip(q["factors"], more, strict=True)]
    predicted = seconds(new, rows)
    return new | (errors(predicted, rows) if rows.out.any() else {"fit": error(predicted, rows.seconds)})


def _times(q: Quantity, names: Sequence[str], x: F8) -> Quantity:
    """Return a copy of a quantity in which the numbers `names` are multiplied by the factors `x`.

    Fractions of a peak are capped just below the peak.
    """
    out = dict(q)
    for name, by in zip(names, x, strict=True):
        if name == "tiles":
            out[name] = [[tm, tn, min(CAP, rate * by)] for tm, tn, rate in q[name]]
        elif isinstance(q[name], list):
            out[name] = [min(CAP, value * by) for value in q[name]]
        else:
            out[name] = min(CAP, q[name] * by) if name == "hbm_frac" else q[name] * by
    return out


def errors(predicted: F8, rows: Rows) -> Quantity:
    """Return three errors: on the fitted rows, on all held-out rows, and on the held-out rows of each reason."""
    out: Quantity = {"fit": error(predicted[~rows.out], rows.seconds[~rows.out])}
    out["held"] = error(predicted[rows.out], rows.seconds[rows.out])
    out["held_parts"] = {why: error(predicted[s], rows.seconds[s]) for why, s in rows.held_out.items() if s.any()}
    return out


def rounded(q: Any) -> Any:
    """Round every number of a quantity to the significant digits of cost tables."""
    if isinstance(q, float | np.floating):
        return sig(float(q))
    if isinstance(q, dict):
        return {k: rounded(v) for k, v in q.items()}
    return [rounded(v) for v in q] if isinstance(q, list | tuple) else q
