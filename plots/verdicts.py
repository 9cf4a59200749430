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
    "not decided": Fill("#ffffff", ".."),
    "one case": Fill("#ffffff", ""),
    "no room": Fill("#e3e3e3", ""),
}


BESIDE_POINTS = 5.2


def beside(axis: Axes, y: float, standing: Standing) -> None:
    """Say at the right of an axis who is ahead, on its colour, and by how much."""
    under = {"facecolor": FILLS[standing.says].color, "edgecolor": "none", "pad": 0.9}
    axis.annotate(text(standing), (1.0, y), xycoords=axis.get_yaxis_transform(), xytext=(6, 0), va="center",
                  textcoords="offset points", fontsize=BESIDE_POINTS, bbox=under)  # fmt: skip


def text(standing: Standing) -> str:
    """Return the words of a verdict; differences, which have signs of their own, stand apart from the verdict's."""
    sign, blank, rest = verdict_text(standing, between=", ").partition(" ")
    return f"{sign}  ({rest})" if rest.endswith("points") else sign + blank + rest


def handles(says: Collection[str], first: str) -> list[Patch]:
    """Return the legend of the verdicts in `says` on the system `first`; a verdict without a sign needs none."""
    return [Patch(facecolor=fill.color, edgecolor="#c4c4c4", linewidth=0.4, label=words(verdict, first))
            for verdict, fill in FILLS.items() if verdict in says and STANDINGS[verdict][0]]  # fmt: skip


def words(says: str, first: str) -> str:
    """Return the sign of a verdict and what it means for the system `first`."""
    sign, text = STANDINGS[says]
    return f"{sign}  {first} {text}" if text.startswith(("ahead", "behind")) else f"{sign}  {text}".strip()
