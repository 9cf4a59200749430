"""Attainment of the systems that a study compares at one x, and the GPU time for which they keep or load weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from harness.rows import by_window, crossings, tidy
from harness.rows.estimate import Estimate
from harness.rows.statistics import interval

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.rows.about import About, Panel

DAY_H = 24


class Held(NamedTuple):
    """A system on a panel: its attainment, as a share of 1, and its cost in GPU-hours and loads."""

    name: str  # is the study's name of the system
    met: Estimate
    worst: Estimate  # attainment of the model that has least
    gpu_h: Estimate  # GPU-hours a day for which weights were on a GPU or on their way, over the window
    loads: float  # loads of weights in a whole run, in the mean over runs
    gpus: int  # GPUs of the panel


def held(table: pa.Table, panel: Panel, names: Iterable[str], definition: str) -> Iterator[Held]:
    """Yield the results of the systems `names` of a panel, in order, at the panel's only x.

    Systems that did not run, or have no measure `tidy.HELD`, are left out.
    """
    rows = crossings.of_panel(table, panel)
    for name in names:
        met = next(iter(crossings.attained(rows, panel["axis"], name, definition).values()), None)
        worst = crossings.attained(rows, panel["axis"], name, definition, "worst")
        shares, loads = (_values(rows, name, measure) for measure in (tidy.HELD, "loads"))
        if met and worst and shares:
            of = interval([share * panel["gpus"] * DAY_H for share in shares], (0.0, float(panel["gpus"] * DAY_H)))
            yield Held(name, met, next(iter(worst.values())), of, sum(loads) / max(1, len(loads)), panel["gpus"])


def _values(rows: pa.Table, name: str, measure: str) -> list[float]:
    """Return a measure of each run of a system."""
    curves = by_window.curves(rows, name, measure, "x")
    return [value for of_seed in curves.values() for value in of_seed.values()]


def cheapest(settings: Iterable[Held], level: float) -> Held | None:
    """Return the entry with the fewest GPU-hours whose attainment is at least the level; None if there is none."""
    return min((s for s in settings if s.met.mean >= level), key=lambda s: s.gpu_h.mean, default=None)


def panels(table: pa.Table, about: About) -> Iterator[tuple[Panel, list[Held]]]:
    """Yield each panel of a study, with the results of its systems."""
    for panel in about.panels:
        yield panel, list(held(table, panel, about.systems, about.definitions[0]))
