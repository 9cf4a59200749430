"""Verdicts in figures: a colour and a sign for who is ahead, and the ratio or differences of attainment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.patches import Patch

from harness.rows.crossings import STANDINGS, Standing, verdict_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Fill(NamedTuple):
    """Fill of a cell: told apart by colour, in grey by lightness and hatch."""

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


def beside(axis: Axes, y: float, standing: Standing, size: float = 5.2) -> None:
    """Say at the right of an axis who is ahead, on its colour, and by how much."""
    under = {"facecolor": FILLS[standing.says].color, "edgecolor": "none", "pad": 0.9}
    text = verdict_text(standing, between=", ")
    axis.text(1.04, y, text, transform=axis.get_yaxis_transform(), va="center", fontsize=size, bbox=under)


def handles(says: Collection[str], first: str) -> list[Patch]:
    """Return the legend of the verdicts in `says` on the system `first`; a verdict without a sign needs none."""
    return [Patch(facecolor=fill.color, edgecolor="#c4c4c4", linewidth=0.4, label=words(verdict, first))
            for verdict, fill in FILLS.items() if verdict in says and STANDINGS[verdict][0]]  # fmt: skip


def words(says: str, first: str) -> str:
    """Return the sign of a verdict and what it means for the system `first`."""
    sign, text = STANDINGS[says]
    return f"{sign}  {first} {text}" if text.startswith(("ahead", "behind")) else f"{sign}  {text}".strip()
