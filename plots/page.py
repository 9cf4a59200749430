"""Panels under a legend and above a caption, and parts of panels: scales, curves, rows, points along a diagonal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from plots import form, style
from plots.style import Look

Floats = NDArray[np.float64]
Handle = Line2D | Patch

LEVEL: Any = (0, (4, 2))  # dashes of the line of a level to be reached, or of equality
CAPTION_POINTS = 5.0
NO_MISS = 5e-5  # the share missed that stands for none, among some 10,000 requests
STEPS = 20  # points of a line between two rates
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = ((1, 2, 5), (1, 3), (1,))  # digits labelled on a logarithmic axis: the first set that has room is used
GREY = "#606060"  # stands for all systems in a legend

# ------------------------------------------------------------------ a page


def panels(
    lines: Sequence[tuple[int, float]],
    *,
    wide_in: float = style.PAGE_IN,
    left_in: float = 0.5,
    beside_in: float = 0.1,
    right_in: float | None = None,
    head_in: float = 0.0,
    above_in: float = 0.25,
    below_in: float = 0.36,
    foot_in: float = 0.0,
    stretch: bool = False,
    handles: Sequence[Handle] = (),
    columns: int = 4,
    text: str = "",
) -> tuple[Figure, list[list[Axes]]]:
    """Lay out lines of panels below a legend and above a caption; return the figure and its panels by line.

    `lines` has for each line, from the top, its number of panels and their height in inches (0: square panels). All
    panels have the same width; with `stretch`, the panels of a line fill the line's width. The space for words is in
    inches: `left_in` at the left of a line, `beside_in` between panels, and `right_in` at the right of the last panel
    (None: `beside_in`). There are `above_in` above each panel and `below_in` below it, `head_in` above the first line,
    and `foot_in` below the last line.
    """
    width = form.width(wide_in)
    across = max(count for count, _ in lines)
    room = width - left_in + (0.0 if right_in is None else beside_in - right_in)
    cells = [room / (count if stretch else across) for count, _ in lines]
    heights = [high or cell - beside_in for cell, (_, high) in zip(cells, lines, strict=True)]
    figure = Figure(figsize=(width, 1))
    top = style.legend(figure, handles, columns) if handles else 0.0
    text = wrapped(text, 0.98 * width - 0.12, CAPTION_POINTS) if form.ASKED.get().caption else ""
    foot = foot_in + (0.017 * CAPTION_POINTS * (1 + text.count("\n")) + 0.03 if text else 0.0)
    height = top + head_in + sum(above_in + high + below_in for high in heights) + foot
    figure.set_size_inches(width, height)
    at = height - top - head_in
    made: list[list[Axes]] = []
    for (count, _), cell, high in zip(lines, cells, heights, strict=True):
        at -= above_in + high
        places = [(left_in + k * cell) / width for k in range(count)]
        size = (cell - beside_in) / width, high / height
        made.append([figure.add_axes((x, at / height, *size)) for x in places])
        at -= below_in
    for axis in (axis for line in made for axis in line):
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.06 / width, 0.03 / height, text, fontsize=CAPTION_POINTS, color="#404040", va="bottom", linespacing=1.25
    )
    return figure, made


def grid(count: int, across: int, high_in: float) -> list[tuple[int, float]]:
    """Return the `lines` of `panels` for `count` panels of height `high_in`, at most `across` in a line."""
    return [(min(across, count - k), high_in) for k in range(0, count, across)]


def words_in(text: str, points: float) -> float:
    """Return the inches that a line of text takes at a type size of `points`."""
    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)[0]) / 72


def wrapped(text: str, inches: float, points: float) -> str:
    """Wrap a text to lines that fit a width in inches; a longer word has a line of its own."""
    lines = list[str]()
    for part in text.split("\n"):
        lines.append("")
        for word in part.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and words_in(longer, points) > inches:
                lines.append(word)
            else:
                lines[-1] = longer
    return "\n".join(lines)


def title(axis: Axes, text: str, points: float = 6.5, more_in: float = 0.0, **more: Any) -> None:
    """Write a title at the left above a panel, in smaller type if it is wider than the panel plus `more_in` inches."""
    axis.set_title(text, loc="left", fontsize=fitting(text, length_in(axis.xaxis) + more_in, points), **more)


def named(axis: Axes, heading: str, x: str, y: str) -> None:
    """Write the title of a panel and the labels of its axes, in smaller type if the text is longer than the axis."""
    title(axis, heading)
    axis.set_xlabel(x, fontsize=fitting(x, length_in(axis.xaxis) + 0.1, 6.5), labelpad=1)
    axis.set_ylabel(y, fontsize=fitting(y, length_in(axis.yaxis), 6.5), labelpad=1)


def shared(axes: Sequence[Axes], text: str, points: float = 6.5, *, above: bool = False) -> None:
    """Write one x label below a line of panels, or with `above` one title above it.

    The type is smaller if the text is longer than the line.
    """
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    (width, height), first, last = figure.get_size_inches(), axes[0].get_position(), axes[-1].get_position()
    y, va = (first.y1 + 0.15 / height, "baseline") if above else (first.y0 - 0.23 / height, "center")
    size = fitting(text, (last.x1 - first.x0) * width, points)
    figure.text((first.x0 + last.x1) / 2, y, text, ha="center", va=va, fontsize=size)


def fitting(text: str, inches: float, points: float) -> float:
    """Return the type size, at most `points`, at which each line of a text fits a width in inches."""
    return points * min(1.0, inches / max(1e-9, *(words_in(line, points) for line in text.split("\n"))))


# ------------------------------------------------------------------ scales


def length_in(axis: Axis) -> float:
    """Return the length of an axis in inches."""
    axes, figure = axis.axes, axis.axes.get_figure(root=True)
    assert figure is not None
    place, (width, height) = axes.get_position(), figure.get_size_inches()
    return float(place.width * width if axis is axes.xaxis else place.height * height)


def ruler(axis: Axis, low: float, high: float, *, log: bool = False, whole: bool = False, share: float = 0.03) -> None:
    """Scale an axis to its data, with labels at round numbers that do not crowd each other.

    The axis extends beyond the data by a `share` of their span, so that marks are drawn in full. If `low` is 0, the
    axis begins at 0. With `whole` all labels are whole numbers.
    """
    axes, flat = axis.axes, axis is axis.axes.xaxis
    log = log and low > 0
    ends = np.log10([low, high]) if log else np.array([low, high], np.float64)
    space = share * (ends[1] - ends[0]) or (0.5 if whole and not log else 0.04)
    ends += (0.0 if low == 0 else -space, space)
    values = 10**ends if log else ends
    shown = ticks(float(values[0]), float(values[1]), length_in(axis), flat=flat, log=log, whole=whole)
    (axes.set_xscale if flat else axes.set_yscale)("log" if log else "linear")
    (axes.set_xlim if flat else axes.set_ylim)(*values)
    axis.set_major_locator(FixedLocator(shown))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.7g}"))


def ticks(low: float, high: float, inches: float, *, flat: bool, log: bool, whole: bool = False) -> list[float]:
    """Return the round numbers to label on an axis of `inches`: as many as fit without crowding."""
    size = mpl.rcParams["xtick.labelsize" if flat else "ytick.labelsize"]
    first, last = (math.log10(low), math.log10(high)) if log else (low, high)

    def fits(values: Sequence[float]) -> bool:
        at = [((math.log10(x) if log else x) - first) / (last - first) * inches for x in values]
        room = [words_in(f"{x:,.7g}0", size) if flat else 1.6 * size / 72 for x in values]
        return all(b - a >= (p + q) / 2 for a, b, p, q in zip(at, at[1:], room, room[1:], strict=False))

    if log and whole:
        values = [float(2**k) for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
        if len(values) > 2 and fits(values):
            return values
    elif log:
        decades = range(math.floor(first), math.ceil(last) + 1)
        choices = [(digits, 1) for digits in DIGITS] + [((1,), step) for step in (2, 3, 4, 6)]
        for digits, step in choices:
            values = [d * 10.0**k for k in decades if k % step == 0 for d in digits]
            values = [float(f"{x:.6g}") for x in values if low <= x <= high]
            if len(values) > 1 and fits(values):
                return values
    for most in range(9 if whole else 7, 0, -1):
        locator = MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole)
        values = [float(f"{x:.6g}") for x in locator.tick_values(low, high) if low <= x <= high]
        if fits(values):
            return values
    return []


# ------------------------------------------------------------------ marks


def curve(
    axis: Axes,
    x: ArrayLike,
    y: ArrayLike,
    look: Look,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    *,
    bars: bool = False,
    line: bool = True,
    shares: bool = False,
    width: float = 0.9,
    size: float = 3.2,
    least: float = -math.inf,
    z: float = 3.0,
    **marks: Any,
) -> None:
    """Draw a system's line with its markers, and the range between `low` and `high` as a band, or with `bars` as bars.

    Markers below `least`, the lower end of the axis, are left out, and so are values that are not finite. With `shares`
    the line is interpolated by `missing`, as in tables. The line thus crosses a level at the rate that the tables
    print.
    """
    at, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    path = missing if shares and len(at) else lambda *of: of
    if low is not None and high is not None:
        ends = np.asarray(low, np.float64), np.asarray(high, np.float64)
        if bars:
            axis.vlines(at, *ends, color=look.color, linewidth=0.6 * width, alpha=0.7, zorder=z)
        else:
            (fine, lowest), (_, highest) = (path(at, end) for end in ends)
            sure = np.isfinite(lowest) & np.isfinite(path(at, values)[1])
            axis.fill_between(fine, lowest, highest, where=sure, color=look.color, alpha=0.15, linewidth=0)
    if line:
        axis.plot(*path(at, values), linestyle=look.line, color=look.color, linewidth=width, zorder=z)
    some = values >= least
    axis.plot(at[some], values[some], linestyle="", zorder=z, clip_on=False, **look.marks(size=size) | marks)


def missing(x: Floats, met: Floats) -> tuple[Floats, Floats]:
    """Interpolate points of attainment in percent, so that ln(share missed) is linear in ln(rate), as in tables.

    Return the x and the attainment of all points, given and interpolated.
    """
    fine = np.exp(np.interp(np.arange(0, len(x) - 1 + 1e-9, 1 / STEPS), np.arange(len(x)), np.log(x)))
    missed = np.log(np.maximum(1 - met / 100, NO_MISS))
    between = 100 * (1 - np.exp(np.interp(np.log(fine), np.log(x), missed)))
    return fine, np.where(between >= 100 * (1 - NO_MISS), 100.0, between)


def interval(axis: Axes, y: float, ends: tuple[float, float], color: str, width: float = 0.8) -> None:
    """Draw an interval as a thin line along x."""
    axis.plot(ends, [y, y], color=color, linewidth=width, solid_capstyle="butt", zorder=1.5)


def rows(axis: Axes, names: Sequence[str], *, labelled: bool = True, shaded: bool = False, points: float = 6) -> None:
    """Set up an axis with named rows along y, the first row on top; the caller draws values along x."""
    axis.set_yticks(range(len(names)), list(names), fontsize=points)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0, labelleft=labelled)
    for k in range(0, len(names) if shaded else 0, 2):
        axis.axhspan(k - 0.5, k + 0.5, color="#f6f6f6", linewidth=0, zorder=0)


def bars(axis: Axes, rows: Sequence[tuple[float, str, str, float]], most: float) -> None:
    """Draw a bar for each row of (value, colour, text, x).

    The text is to the right of both the bar and x. The last labelled tick is at most `most`.
    """
    for y, (value, color, text, beyond) in enumerate(rows):
        axis.barh(y, value, 0.7, color=color)
        beside(axis, text, (max(value, beyond), y))
    free = [max(0.2, 1 - (0.1 + words_in(text, 5.5)) / length_in(axis.xaxis)) for _, _, text, _ in rows]
    ruler(axis.xaxis, 0, max(most, *(max(row[0], row[3]) / share for row, share in zip(rows, free, strict=True))))
    axis.set_xticks([x for x in axis.get_xticks() if x <= most])


def beside(
    axis: Axes, text: str, at: tuple[float, float], by: tuple[float, float] = (3, 0), points: float = 5.5, **more: Any
) -> None:
    """Write a text next to the place `at`, moved by the offset `by` in points."""
    axis.annotate(text, at, by, textcoords="offset points", fontsize=points, **{"va": "center"} | more)


def names_in(names: Sequence[str], points: float = 6) -> float:
    """Return the inches that the names of rows take at the left of an axis."""
    return 0.12 + max(words_in(line, points) for name in names for line in name.split("\n"))


# ------------------------------------------------------------------ two values of the same thing


def alike(axis: Axes, values: NDArray[np.float64], band: float, least: float = 1.0) -> None:
    """Give both axes the same logarithmic scale, and draw the line of equal values and a band around it.

    The axes include all values, and their ends differ at least by the factor `least`.
    """
    low, high = (values.min(), values.max()) if values.size else (1.0, 10.0)
    wider = max(1.2, (least * low / high) ** 0.5)
    ends = np.array([low / wider, high * wider])
    axis.fill_between(ends, ends / band, ends * band, color="#000000", alpha=0.1, linewidth=0)
    axis.plot(ends, ends, color="#000000", linewidth=0.6)
    for axis_ in (axis.xaxis, axis.yaxis):
        ruler(axis_, float(ends[0]), float(ends[1]), log=True, share=0.0)
    axis.set_yticks(axis.get_xticks())


def alike_key(band: float) -> list[Handle]:
    """Return the entries of a legend for the line and the band that `alike` draws."""
    return [
        Line2D([], [], color="#000000", linewidth=0.6, label="equal"),
        Patch(color="#000000", alpha=0.1, linewidth=0, label=f"within ±{100 * (band - 1):.0f} %"),
    ]


Sign = tuple[str, str | int]  # a colour and a marker


def _signed(look: Sign, hollow: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return matplotlib keywords that draw points; `more` overrides them.

    Points are hollow if they were left out of a fit.
    """
    color, marker = look
    face = "white" if hollow else color
    return {"linestyle": "", "marker": marker, "color": color, "markerfacecolor": face, **more}


def scatter(axis: Axes, x: ArrayLike, y: ArrayLike, look: Sign, *, hollow: bool = False, **more: Any) -> None:
    """Draw points of a colour and a marker, hollow where they were left out of a fit."""
    axis.plot(x, y, **_signed(look, hollow, {"markersize": 2.8, "markeredgewidth": 0.5} | more))


def mark(label: str, look: Sign = (GREY, "o"), *, hollow: bool = False, **more: Any) -> Line2D:
    """Return the entry of a legend for points of `scatter`; keywords in `more` can turn it into a line with markers."""
    return Line2D([], [], label=label, **_signed(look, hollow, {"markersize": 3.5} | more))


PAPER: Sign = ("#202020", "x")
PAPER_MARK: Mapping[str, Any] = {"markersize": 3.8, "markeredgewidth": 0.9}


def stated(axis: Axes, x: ArrayLike, y: ArrayLike) -> None:
    """Mark the numbers that a paper states."""
    scatter(axis, x, y, PAPER, zorder=3.5, **PAPER_MARK)


def stated_key() -> Line2D:
    """Return the entry of a legend for `stated`."""
    return mark("where the paper's number puts it", PAPER, **PAPER_MARK)


def dashed(label: str, color: str = GREY) -> Line2D:
    """Return the entry of a legend for the dashed line of a level."""
    return Line2D([], [], color=color, linewidth=0.7, linestyle=LEVEL, label=label)
