"""An estimate as text, the same wherever one is printed: `m [low, high]`.

A bound stands before the mean, and an interval with an open end shows where the quantity ends:

    RATE    22.5 [18.1, 26.9]      >20.0 [15.2, inf]
    RATIO   1.39x [0.84, 2.29]     <4.75x [0, 4.75]
    GPUS    12 [10, 14]            ≤4
    POINTS  +1.3 [-0.2, 2.8]
"""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.rows.statistics import Estimate

NONE = "-"


class Style(NamedTuple):
    """The print format of a quantity's estimates."""

    decimals: int | None = None  # None: three significant digits
    unit: str = ""  # behind the mean: "x", "%"
    signed: bool = False  # a difference: "+" before a mean above 0, and no end at 0
    reached: bool = False  # the level was already met at the least value tried: "<" reads "≤"


RATE = Style()
RATIO = Style(decimals=2, unit="x")
COUNT = Style(decimals=0)
GPUS = Style(decimals=0, reached=True)
SCALE = Style(unit="x", reached=True)  # of SLOs
SHARE = Style(decimals=1)  # in percent
POINTS = Style(decimals=1, signed=True)  # differences of shares in percent


def text(e: Estimate | None, style: Style = RATE, *, spread: bool = True) -> str:
    """Print an estimate; without `spread` its mean alone.

    A latency that never came is infinite.
    """
    if e is None or math.isnan(e.mean):
        return NONE
    if math.isinf(e.mean):
        return "never"
    shown = f"{_sign(e, style)}{number(e.mean, style.decimals, signed=style.signed)}{style.unit}"
    return f"{shown} {interval(e, style)}" if spread and _informs(e) else shown


def span(least: Estimate, most: Estimate, style: Style = RATE) -> str:
    """Print the means of two estimates as a range."""
    low, high = (text(e, style, spread=False) for e in (least, most))
    return low if low == high else f"{low.removesuffix(style.unit)} to {high}"


def _informs(e: Estimate) -> bool:
    """Tell whether the interval says more than the mean and its sign: `>24.0 [24.0, inf]` does not."""
    ends = [x for x in (e.low, e.high) if x is not None]
    return len(ends) == 2 or any(not math.isclose(x, e.mean) for x in ends)


def interval(e: Estimate, style: Style = RATE) -> str:
    """Print the interval alone; an open end is 0 (of a difference -inf) or inf."""
    low = _bound(e.low, e, style, "-inf" if style.signed else "0")
    return f"[{low}, {_bound(e.high, e, style, 'inf')}]"


def _bound(x: float | None, e: Estimate, style: Style, end: str) -> str:
    if x is None:
        return end
    fixed = style.decimals is not None
    return number(x, style.decimals if fixed else min(_digits(x), _digits(e.mean)))  # no finer than the mean


def number(x: float, decimals: int | None = None, *, signed: bool = False) -> str:
    """Print a number with so many decimals, or three significant digits; from a million on as a power of ten."""
    if math.isinf(x) or abs(x) >= 1e6:  # a bound from two seeds that differ much
        return f"{x:{'+' * signed}.0e}" if math.isfinite(x) else f"{x}"
    digits = _digits(x) if decimals is None else decimals
    x = round(x, digits) or 0.0  # no "-0.0"
    return f"{x:{'+' * (signed and x != 0)}.{digits}f}"


def _sign(e: Estimate, style: Style) -> str:
    if e.sign == "=":
        return ""
    return "≤" if e.sign == "<" and style.reached else e.sign


def _digits(x: float) -> int:
    """Return the decimals that show three significant digits, of the number as it is then rounded."""
    return max(0, 2 - math.floor(math.log10(abs(float(f"{x:.2e}"))))) if math.isfinite(x) and x else 0
