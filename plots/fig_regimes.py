"""Where one system holds a higher rate than another: a coloured table of conditions and pairs of systems.

python -m plots.fig_regimes results/regimes-prism-3f9c21ab plots/out/regimes-prism
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from harness.rows import ratios
from plots import style
from plots.fig_bridge import caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN, HEAD_IN, NAMES = 0.34, 0.22, 0.2  # height of a row and of the legend; share of the width for names


class Fill(NamedTuple):
    """How a cell is filled: told apart by colour, in grey by lightness and hatch."""

    color: str
    hatch: str


FILLS: Mapping[str, Fill] = {
    "ahead": Fill("#9ecae9", ""),
    "behind": Fill("#f4b183", "////"),
    "even": Fill("#f2f2f2", ""),
    "open": Fill("#ffffff", "...."),
}


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Figure:
    """Draw the table, two columns wide; call within `style.theme()`."""
    own = [row for row in rows if row["over"] is not None]
    names, labels = list(dict.fromkeys(row["name"] for row in own)), facts["ratios"]
    text = textwrap.fill(caption(facts), 178)
    foot = 0.06 + 0.085 * (1 + text.count("\n"))
    height = HEAD_IN + 0.2 + ROW_IN * len(names) + foot
    figure = Figure(figsize=(style.PAGE_IN, height))
    axis = figure.add_axes((NAMES, foot / height, 0.995 - NAMES, ROW_IN * len(names) / height))
    for row in own:
        _cell(axis, labels.index(f"{row['first']} / {row['over']}"), names.index(row["name"]), row)
    axis.set_xlim(0, len(labels))
    axis.set_ylim(len(names), 0)
    axis.set_xticks([k + 0.5 for k in range(len(labels))], labels)
    axis.set_yticks([k + 0.5 for k in range(len(names))], [textwrap.fill(name, 24) for name in names])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    handles: list[Any] = [
        Patch(facecolor=fill.color, hatch=fill.hatch, edgecolor="#909090", linewidth=0.4,
              label=f"{ratios.SIGNS[key]}  {ratios.MEANS[key]}")
        for key, fill in FILLS.items()
    ]  # fmt: skip
    style.legend(figure, handles, len(handles), handlelength=1.8, columnspacing=1.6)
    figure.text(0.01, 0.006, text, fontsize=5, color="#404040", va="bottom", linespacing=1.25)
    return figure


def _cell(axis: Axes, x: int, y: int, row: Mapping[str, Any]) -> None:
    """A ratio over its interval, on the colour and behind the sign of its verdict."""
    fill = FILLS[row["verdict"]]
    axis.add_patch(Rectangle((x, y), 1, 1, facecolor=fill.color, hatch=fill.hatch, edgecolor="#c4c4c4", linewidth=0.5))
    value, _, bounds = ratios.text(row).partition(" [")
    said = value if row["mean"] is not None else textwrap.fill(str(row["note"]), 20)
    under = {"facecolor": fill.color, "edgecolor": "none", "pad": 1.0}  # no hatch behind the words
    axis.text(x + 0.5, y + (0.36 if bounds else 0.5), f"{ratios.SIGNS[row['verdict']]} {said}", ha="center",
              va="center", fontsize=5.2 if row["mean"] is None else 7, bbox=under)  # fmt: skip
    if bounds:
        axis.text(x + 0.5, y + 0.72, f"[{bounds}", ha="center", va="center", fontsize=5.2, color="#303030", bbox=under)


def draws(folder: Path) -> bool:
    """The ratios of `bench regimes`."""
    return (folder / ratios.FILE).is_file() and ratios.read(folder)[1]["study"] == "regimes"


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the ratios in `folder` to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    rows, facts = ratios.read(folder)
    facts["notes"] += [note] * bool(note)
    with style.theme():
        return style.save(draw(rows, facts), stem, pd.DataFrame(rows), command)


def main(arguments: Sequence[str]) -> None:
    """FOLDER STEM."""
    render(Path(arguments[0]), Path(arguments[1]), "python -m plots.fig_regimes " + " ".join(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
