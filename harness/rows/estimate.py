"""The text form of an estimate, the same in every table and figure: `m [low, high]`.

A bound has its sign before the mean. An open end of an interval is shown as the limit of the quantity:

    RATE    22.5 [18.1, 26.9]      >20.0 [15.2, inf]
    RATIO   1.39x [0.84, 2.29]     <4.75x [0, 4.75]
    GPUS    12 [10, 14]            ≤4
    POINTS  +1.3 [-0.2, 2.8]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

NONE = "-"


class Style(NamedTuple):
    """The print format of a quantity's estimates."""

    decimals: int | None = None  # None: three significant digits
    unit: str = ""  # behind the mean: "x", "%"
    signed: bool = False  # a difference: "+" before a mean above 0, and -inf as the open lower end
    reached: bool = False  # the level was already met at the least value tried: "<" reads "≤"


RATE = Style()
RATIO = Style(decimals=2, unit="x")
COUNT = Style(decimals=0)
GPUS = Style(decimals=0, reached=True)
SCALE = Style(unit="x", reached=True)  # scales SLOs
SHARE = Style(decimals=1)  # percent
POINTS = Style(decimals=1, signed=True)  # differences of shares in percent


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval, computed from `n` runs or blocks of windows.

    `low` or `high` is None if the interval is open at that end; both are None if there is no interval. `sign` is "=" if
    `mean` estimates the quantity itself. It is ">" or "<" if `mean` is only a bound, because the quantity lies above or
    below what the runs cover. It is "~" for the ratio of two bounds that point in opposite directions.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    sign: Literal["=", "<", ">", "~"] = "="

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit, `factor` times its numbers."""
        low, high = (None if x is None else x * factor for x in (self.low, self.high))
        return replace(self, mean=self.mean * factor, low=low, high=high)

    def text(self, style: Style = RATE, *, spread: bool = True) -> str:
        """Return the estimate as text; without `spread`, only its mean.

        An infinite mean is shown as "never", because it belongs to a latency that never ended.
        """
        if math.isnan(self.mean):
            return NONE
        if math.isinf(self.mean):
            return "never"
        sign = "" if self.sign == "=" else "≤" if self.sign == "<" and style.reached else self.sign
        shown = f"{sign}{number(self.mean, style.decimals, signed=style.signed)}{style.unit}"
        return f"{shown} {self.ends(style)}" if spread and self._informs else shown

    @property
    def _informs(self) -> bool:
        """True if the interval adds to the mean and its sign. The interval of `>24.0 [24.0, inf]` adds nothing."""
        ends = [x for x in (self.low, self.high) if x is not None]
        return len(ends) == 2 or any(not math.isclose(x, self.mean) for x in ends)

    def ends(self, style: Style = RATE) -> str:
        """Return the interval as text, with no more decimals than the mean.

        An open end is 0 (for a difference, -inf) or inf.
        """

        def shown(x: float | None, end: str) -> str:
            if x is None:
                return end
            return number(x, min(_digits(x), _digits(self.mean)) if style.decimals is None else style.decimals)

        return f"[{shown(self.low, '-inf' if style.signed else '0')}, {shown(self.high, 'inf')}]"


def text(e: Estimate | None, style: Style = RATE, *, spread: bool = True) -> str:
    """Return an estimate as text (`Estimate.text`); "-" for None."""
    return NONE if e is None else e.text(style, spread=spread)


def span(least: Estimate, most: Estimate, style: Style = RATE) -> str:
    """Print the means of two estimates as a range."""
    low, high = (e.text(style, spread=False) for e in (least, most))
    return low if low == high else f"{low.removesuffix(style.unit)} to {high}"


def number(x: float, decimals: int | None = None, *, signed: bool = False) -> str:
    """Return a number as text, with `decimals` or three significant digits; from 1e6 on as a power of ten."""
    if math.isinf(x) or abs(x) >= 1e6:  # a bound from two seeds that differ much
        return f"{x:{'+' * signed}.0e}" if math.isfinite(x) else f"{x}"
    digits = _digits(x) if decimals is None else decimals
    x = round(x, digits) or 0.0  # no "-0.0"
    return f"{x:{'+' * (signed and x != 0)}.{digits}f}"


def _digits(x: float) -> int:
    """Return the number of decimals that show three significant digits of a number rounded to three digits."""
    return max(0, 2 - math.floor(math.log10(abs(float(f"{x:.2e}"))))) if math.isfinite(x) and x else 0
