"""Who is ahead, as figures show it: a colour, a sign, and the ratio or differences of attainment at three rates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.patches import Patch

from harness.rows import estimate
from harness.rows.crossings import STANDINGS, Standing
from harness.rows.estimate import POINTS, RATIO

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Fill(NamedTuple):
    """How a cell is filled: told apart by colour, in grey by lightness and hatch."""

    color: str
    hatch: str


FILLS: Mapping[str, Fill] = {
    "ahead": Fill("#9ecae9", ""),
    "ahead, by less than 25 %": Fill("#bfdcee", ""),
    "equal within 25 %": Fill("#f2f2f2", ""),
    "behind, by less than 25 %": Fill("#fae0cc", "//"),
    "behind": Fill("#f4b183", "////"),
    "turns": Fill("#e3d4ec", "xx"),
    "not decided": Fill("#ffffff", "...."),
    "one case": Fill("#ffffff", ""),
    "no room": Fill("#ffffff", ".."),
}


def beside(axis: Axes, y: float, found: Standing, size: float = 5.2) -> None:
    """Say at the right of an axis who is ahead, on its colour, and by how much."""
    said = f"{STANDINGS[found.says][0]} {told(found)}".strip()
    under = {"facecolor": FILLS[found.says].color, "edgecolor": "none", "pad": 0.9}
    axis.text(1.04, y, said, transform=axis.get_yaxis_transform(), va="center", fontsize=size, bbox=under)


def told(found: Standing) -> str:
    """Say a standing in numbers: the ratio with its interval, or where it is flat the differences in points.

    Differences are those at three rates.
    """
    if (found.flat or found.ratio is None) and found.differences:
        gaps = (estimate.text(gap.times(100), POINTS, spread=False) for _, gap in found.differences)
        return f"{', '.join(gaps)} points"
    return found.note if found.ratio is None else estimate.text(found.ratio, RATIO)


def handles(says: Collection[str], first: str) -> list[Patch]:
    """Return the legend of the verdicts in `says` on the system `first`; a verdict without a sign needs none."""
    return [Patch(facecolor=fill.color, edgecolor="#c4c4c4", linewidth=0.4, label=words(one, first))
            for one, fill in FILLS.items() if one in says and STANDINGS[one][0]]  # fmt: skip


def words(says: str, first: str) -> str:
    """Return the sign of a verdict and what it means for the system `first`."""
    sign, text = STANDINGS[says]
    return f"{sign}  {first} {text}" if text.startswith(("ahead", "behind")) else f"{sign}  {text}".strip()
