"""Figures as a stranger sees them: no words cut or on each other, round ticks, axes that end with the data."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from harness.rows import pooled
from plots import form, page, style
from tests.cases import cases
from tests.plots.figures import FIGURES

TOUCH = 1.0  # pixels by which boxes may overlap, and leave the figure

# ------------------------------------------------------------------ what is wrong with a figure


def words(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Return the words that a figure shows, with their boxes in pixels."""
    figure.draw_without_rendering()
    hidden = {id(text) for axis in figure.axes if not axis.axison for text in axis.findobj(Text)}
    hidden -= {id(text) for axis in figure.axes for text in axis.texts}
    for axis in figure.axes:
        for each, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
            ends = sorted((low, high))
            beyond = [tick for tick in each.get_major_ticks() if not ends[0] <= tick.get_loc() <= ends[1]]
            hidden |= {id(text) for tick in beyond for text in (tick.label1, tick.label2)}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent()) for text in shown if id(text) not in hidden]


def overlap(first: Bbox, other: Bbox) -> bool:
    both = Bbox.intersection(first, other)
    return both is not None and both.width > TOUCH and both.height > TOUCH


def faults(figure: Figure) -> list[str]:
    """Name the words that leave the figure, lie on each other, or lie below another panel than their own."""
    every, whole = words(figure), figure.bbox.padded(TOUCH)
    cut = [
        f"cut: {text.get_text()}"
        for text, box in every
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1
    ]
    on = [
        f"on each other: {first.get_text()} | {other.get_text()}"
        for (first, a), (other, b) in combinations(every, 2)
        if overlap(a, b)
    ]
    panels = [axis for axis in figure.axes if axis.axison]
    under = [
        f"below another panel: {text.get_text()}"
        for text, box in every
        for axis in panels
        if text.axes is not axis and overlap(box, axis.get_window_extent())
    ]
    return cut + on + under


# ------------------------------------------------------------------ every kind of figure


@cases("name", [*FIGURES])
def test_no_words_of_a_figure_are_cut_or_lie_on_others(name: str) -> None:
    with style.theme():
        figure = FIGURES[name]()
        assert faults(figure) == []
        narrow = form.LEAST * figure.get_figwidth() + 0.01  # the least that --width takes
        with form.on(form.Form(width_in=narrow)):
            assert faults(FIGURES[name]()) == []


def test_planted_words_that_collide_are_found() -> None:
    with style.theme():
        figure = FIGURES["weaver"]()
        (word, box) = max(words(figure), key=lambda pair: pair[1].width)
        x, y = figure.transFigure.inverted().transform((box.x0, box.y0))
        figure.text(x, y, "planted", fontsize=word.get_fontsize())
        figure.text(0.98, 0.5, "planted beyond the edge")
        axis = figure.axes[0]
        axis.text(1.5, 0.5, "planted", transform=axis.transAxes)
        planted = {fault.partition(":")[0] for fault in faults(figure) if "planted" in fault}
    assert planted == {"on each other", "cut", "below another panel"}


# ------------------------------------------------------------------ scales

LOW = st.floats(1e-3, 1e4)


@given(LOW, st.floats(1.001, 1e6), st.floats(0.6, 6.0), st.booleans(), st.booleans())
def test_ticks_are_round_ascend_and_leave_each_other_room(
    low: float, factor: float, inches: float, flat: bool, log: bool
) -> None:
    with style.theme():
        shown = page.ticks(low, low * factor, inches, flat=flat, log=log)
    assert shown == sorted(set(shown))
    assert all(low <= x <= low * factor for x in shown)
    gaps = np.diff(shown)
    even = len(shown) < 3 or np.allclose(gaps, gaps[0], rtol=1e-3)
    if even and len(shown) > 1:  # steps of 1, 2 or 5, of a power of ten
        assert f"{gaps[0]:.3e}"[:5] in {"1.000", "2.000", "5.000"} or log
    assert even or all(f"{x:.3e}"[:5] in {"1.000", "2.000", "3.000", "5.000"} for x in shown)


@cases("axis", ["x", "y"])
def test_an_axis_ends_where_the_data_end(axis: str) -> None:
    for low, high, log in ((0.7, 47.0, True), (3.0, 8.5, False), (0.0, 30.0, False)):
        with style.theme():
            _, ((axes,),) = page.panels([(1, 1.0)])
            page.ruler(getattr(axes, f"{axis}axis"), low, high, log=log)
        ends = getattr(axes, f"get_{axis}lim")()
        length = math.log(high / low) if log else high - low
        beyond = math.log(ends[1] / high) if log else ends[1] - high
        assert 0 <= beyond <= 0.031 * length
        assert ends[0] == low == 0 or ends[0] < low


@given(st.text("abcdefg hijk", max_size=300))
def test_a_caption_keeps_its_words_and_its_lines_fit(text: str) -> None:
    with style.theme():
        lines_of = page.wrapped(text, 2.0, 5.0).split("\n")
        assert " ".join(lines_of).split() == text.split()
        assert all(page.words_in(line, 5.0) <= 2.0 or " " not in line for line in lines_of)


@given(st.floats(0.01, 0.3), st.floats(1.1, 8.0))
def test_a_line_of_attainment_crosses_a_level_where_the_table_does(missed: float, times: float) -> None:
    """Misses grow from 1e-3 to `missed` between two rates: 99 % is crossed where ln(missed) is, linear in ln(rate)."""
    x, met = np.array([1.0, times]), 100 * (1 - np.array([1e-3, max(missed, 0.02)]))
    at, between = page.missing(x, met)
    offered = np.full((2, 4), 100_000.0)
    counts = pooled.Counts(x, offered * (1 - met[:, None] / 100), offered)
    crossed = float(np.interp(-99.0, -between, at))
    assert crossed == pytest.approx(pooled.crossing(counts, 0.99).mean, rel=0.01)
    assert (between[0], between[-1]) == pytest.approx(tuple(met))
