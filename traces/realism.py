"""Realism of synthetic traces: a generator's mean statistics, compared with measured values (`traces/targets.toml`).

Single draws scatter, so the mean over `DRAWS` draws is compared. The measured values come from a window of known
length, so every draw is cut into windows of this length. If the trace is shorter than the window, its generator makes
longer draws for the comparison.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traces import drawing, synthetic
from traces.load import Trace, of_table
from traces.stats import stats

DRAWS = 10  # seeds 0 .. 9
WITHIN = "within"
POINTS, SHARE = 0.03, 0.30  # a share may be 3 points off, a quartile 30 %
SHOWN = 3  # the worst of what is off


class Statistic(NamedTuple):
    """A statistic that generators are fitted to, and how its deviation is judged.

    `key` is its key in `stats`, and `at` the index of the quartile, or None for a single value. If `points` is true,
    the deviation is a difference, else a relative error. If `judged` is false, the deviation is shown but does not
    affect the verdict.
    """

    key: str
    at: int | None
    name: str
    points: bool = False
    judged: bool = True


QUARTILES = ("P25", "P50", "P75")
ROWS = (
    Statistic("top1_share", None, "share of the hottest", points=True),
    Statistic("bottom60_share", None, "share of the bottom 60 %", points=True),
    Statistic("active_fraction", None, "active share", points=True),
    *(Statistic("idle_median_s", i, f"idle {q} s") for i, q in enumerate(QUARTILES)),
    *(Statistic("minute_cv_models", i, f"CV {q}") for i, q in enumerate(QUARTILES)),
    *(Statistic("idle_per_hour", i, f"idle gaps/h {q}", judged=False) for i, q in enumerate(QUARTILES)),
    Statistic("switches_per_hour", None, "switches/h", judged=False),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The measured values with which a generator is compared, keyed by the statistics in `ROWS`.

    It also has the length of the measured window and the streams that are compared.
    """

    window_s: float
    streams: tuple[str, ...]  # the streams that are compared; empty: all
    source: str
    values: Mapping[Statistic, float]


@cache
def targets() -> Mapping[str, Target]:
    """Read every target of `targets.toml` by name."""
    data = tomllib.loads((Path(__file__).parent / "targets.toml").read_text("utf-8"))
    by_name = {}
    for name, entry in data.items():
        rows = {row: float(pick(entry[row.key], row)) for row in ROWS if row.key in entry}
        by_name[name] = Target(entry["window_s"], tuple(entry.get("streams", ())), entry["source"], rows)
    return by_name


class Realism(NamedTuple):
    """The comparison of a generator with its target: means over several draws, and a verdict."""

    target: Target
    mean: Mapping[Statistic, float]
    verdict: str


@cache
def realism(maker: str) -> Realism | None:
    """Compare the draws of a generator with its target; None if it has no target."""
    p = synthetic.preset(maker)
    rate = f"x{p.rate_rps:g}" if p.rate_rps else ""
    stem = p.name.removesuffix("-drift")
    names = (f"{stem}.{p.models}{rate}", stem)
    if not (target := next((targets()[name] for name in names if name in targets()), None)):
        return None
    p = replace(p, span_s=max(p.span_s, target.window_s))  # in a shorter draw fewer models would seem active
    means = mean(measure(of_table(drawing.table(p, seed), maker), target) for seed in range(DRAWS))
    return Realism(target, means, verdict(means, target))


def fit_of(trace: Trace, used: Sequence[tuple[str | None, float]] = ()) -> str | None:
    """Return the verdict of the comparison of a trace's generator with its target; None if there is no verdict.

    For a trace without a generator, return the verdict in its file. `used` has the stream and shift of each model of a
    set. If these are the streams of a released set of Arena-Chat, the generator is compared with that set's target.
    """
    if trace.maker is None:
        return trace.fit
    p = synthetic.preset(trace.maker)
    if p.name == "arena-like" and p.models == len(synthetic.ARENA_COUNTS):
        n = len(used)
        p = replace(p, models=n) if n in synthetic.RELEASED and tuple(used) == synthetic.released(n) else p
    fit = realism(str(p))
    return None if fit is None else fit.verdict


def pick(value: Any, row: Statistic) -> float:
    """Return one number from a statistic's value: the value itself, or the quartile at the index `row.at`.

    NaN if the list of quartiles is empty.
    """
    if row.at is None:
        return float(value)
    return float(value[row.at]) if value else math.nan


def measure(draw: Trace, target: Target) -> dict[Statistic, float]:
    """Return each statistic of the target as measured in a draw: its mean over the windows of the draw."""
    each = [stats(window) for window in _windows(draw, target)]
    return {row: _mean(pick(statistics[row.key], row) for statistics in each) for row in target.values}


def mean(draws: Iterable[Mapping[Statistic, float]]) -> dict[Statistic, float]:
    """Return each statistic's mean over draws; draws in which it is NaN are left out."""
    every = list(draws)
    return {row: _mean(draw[row] for draw in every) for row in every[0]}


def off(means: Mapping[Statistic, float], target: Target) -> dict[Statistic, float]:
    """Return each statistic's deviation from its target: a difference if `points` is true, else the relative error."""
    return {
        row: means[row] - value if row.points else means[row] / value - 1 if value else math.nan
        for row, value in target.values.items()
    }


def verdict(means: Mapping[Statistic, float], target: Target) -> str:
    """Return `within`, or the judged statistics that deviate too much, worst first: "off: idle P75 +48 %"."""
    far = {row: x / (POINTS if row.points else SHARE) for row, x in off(means, target).items() if row.judged}
    worst = sorted((row for row, x in far.items() if not abs(x) <= 1), key=lambda row: -abs(far[row]))
    if not worst:
        return WITHIN
    words = [f"{row.name.removesuffix(' s')} {shown(row, off(means, target)[row])}" for row in worst[:SHOWN]]
    more = f" and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
    return f"off: {', '.join(words)}{more}"


def shown(row: Statistic, x: float) -> str:
    """Format a deviation: in points if the statistic's `points` is true, else in per cent; "-" for NaN."""
    if math.isnan(x):
        return "-"
    return f"{100 * x:+.1f} points" if row.points else f"{100 * x:+.0f} %"


def table(
    draw: Mapping[Statistic, float], means: Mapping[Statistic, float], target: Target
) -> Iterator[tuple[str, ...]]:
    """Yield a heading, and a row of cells for each statistic.

    The cells are the name, the target, the mean over draws, its deviation, the value of this draw, and a note.
    """
    yield ("statistic", "target", f"mean of {DRAWS}", "off", "this draw", "")
    far = off(means, target)
    for row, value in target.values.items():
        unit = 100 if row.points else 1
        cells = (f"{unit * x:.3g}{' %' if row.points else ''}" for x in (value, means[row]))
        note = "" if row.judged else "not judged"
        yield (row.name, *cells, shown(row, far[row]), f"{unit * draw[row]:.3g}{' %' if row.points else ''}", note)


def _windows(draw: Trace, target: Target) -> Iterator[Trace]:
    """Yield windows of the target's length from a draw, with only the streams that the target compares."""
    keep = np.ones(len(draw), bool)
    if target.streams:
        keep = np.isin(draw.model, [i for i, name in enumerate(draw.models) if name in target.streams])
    for k in range(max(1, int(draw.span_s // target.window_s))):
        begin_s = k * target.window_s
        here = np.flatnonzero(keep & (draw.arrival_s >= begin_s) & (draw.arrival_s < begin_s + target.window_s))
        used, model = np.unique(draw.model[here], return_inverse=True)
        if len(here):
            yield replace(
                draw,
                span_s=min(target.window_s, draw.span_s),
                models=tuple(draw.models[i] for i in used),
                arrival_s=draw.arrival_s[here] - begin_s,
                model=model.astype(np.int32),
                prompt_tokens=draw.prompt_tokens[here],
                output_tokens=draw.output_tokens[here],
                src_row=draw.src_row[here],
                tenant=None,
                prefix=None,
            )


def _mean(values: Iterable[float]) -> float:
    numbers = [x for x in values if not math.isnan(x)]
    return sum(numbers) / len(numbers) if numbers else math.nan
