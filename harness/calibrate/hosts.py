"""Fit the constants of a host profile: the time that an engine adds to its kernels, from whole simulated workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from harness.calibrate.rows import F8
from harness.engines.costs.quantities import HostProfile


def fit(
    base: HostProfile,
    start: Mapping[str, float],
    log_error: Callable[[HostProfile], F8],
    *,
    step: float,
    most: int,
    robust: float | None = None,
) -> HostProfile:
    """Fit constants of a host profile by least squares of `log_error`, and return the fitted profile.

    `start` has the names and the start values of the constants to fit. The search makes at most `most` evaluations.
    `step` is the relative step of the numerical derivative. It must be wide, because requests end at whole steps of the
    engine. If `robust` is given, rows with an error above `robust` count less.
    """
    names, scale = list(start), np.array(list(start.values()))

    def with_(x: F8) -> HostProfile:
        constants: dict[str, Any] = dict(zip(names, (np.abs(x) * scale).tolist(), strict=True))
        return base._replace(**constants)

    def residuals(x: F8) -> F8:
        return log_error(with_(x))

    got = least_squares(
        residuals,
        np.ones(len(names)),
        loss="linear" if robust is None else "soft_l1",
        f_scale=robust or 1.0,
        diff_step=np.full(len(names), step),
        max_nfev=most,
    )
    return with_(got.x)


def rounded(host: HostProfile, names: Sequence[str] | None = None) -> HostProfile:
    """Round constants of a host profile to three digits: those in `names` or, without `names`, all floats."""
    chosen = [k for k, v in host._asdict().items() if isinstance(v, float)] if names is None else names
    numbers: dict[str, Any] = {name: float(f"{getattr(host, name):.3g}") for name in chosen}
    return host._replace(**numbers)
