"""Estimates of a study's table: where systems cross the level, their ratios and standings, and what a part is worth.

A panel is what its facts in the table's footer say (grid.facts); its rows are those of its `condition`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import statistics, tidy
from harness.rows.statistics import Crossing, Estimate

Panel = Mapping[str, Any]

ALIKE = 0.01  # what no reader would call a difference: crossings are interpolated between sampled rates
STANDINGS = {  # of a ratio: its sign in tables, and what it means
    "ahead": ("+", "the first holds a higher rate"),
    "behind": ("-", "a lower rate"),
    "even": ("=", "no difference told: the interval covers 1, or ends within 1 % of it"),
    "open": ("?", "undecided"),
}
RATED = {"rate_scale", "rate_rps"}


def of_panel(table: pa.Table, panel: Panel) -> pa.Table:
    """A panel's rows."""
    return table.filter(pc.equal(table["condition"].cast(pa.string()), panel["condition"]))


def concerned(panels: Sequence[Panel], on: Mapping[str, Any]) -> list[Panel]:
    """The panels with these facts, as a claim chooses them."""
    return [panel for panel in panels if all(_matches(panel, key, value) for key, value in on.items())]


def _matches(panel: Panel, key: str, value: Any) -> bool:
    match key:
        case "condition":
            return bool(panel["name"] == value)
        case "trace":  # by the beginning of its name: a generator's has parameters
            return str(panel["trace"]).startswith(value)
        case "column":
            return bool(panel["column"] + 1 == value)
        case _:
            return bool(panel[key] == value)


def crossing(rows: pa.Table, panel: Panel, system: str, definition: str, level: float) -> Crossing | None:
    """Where a system crosses the level on a panel, rates in requests per second; None where it was not run."""
    axis = "rate_scale" if panel["axis"] == "rate_rps" else panel["axis"]
    c = tidy.crossed(rows, axis, system, definition, level)
    return c if c is None or panel["axis"] != "rate_scale" else c.times(panel["unit_rps"])


def ratio(rows: pa.Table, system: str, over: str, definition: str, level: float) -> Estimate | None:
    """The ratio of two systems' crossings, paired by seed; None where they share no seed."""
    ours, theirs = (tidy.curves(rows, name, definition, "x") for name in (system, over))
    return statistics.crossing_ratio(ours, theirs, level) if ours.keys() & theirs.keys() else None


def standing(ratio: Estimate) -> str:
    """Judge a ratio by its interval; one run, or one with bounds on both sides, says nothing.

    A winner's interval lies beyond 1 by more than `ALIKE`.
    """
    if ratio.n == 1 or ratio.sign == "~":
        return "open"
    if ratio.low is not None and ratio.low > 1.0 + ALIKE:
        return "ahead"
    if ratio.high is not None and ratio.high < 1.0 - ALIKE:
        return "behind"
    return "even"


class Standing(NamedTuple):
    """A ratio of crossings and what it says; no ratio where a system has no room, or no rate tells the two apart."""

    ratio: Estimate | None
    says: str  # of STANDINGS
    note: str  # what lacks


def side_by_side(
    rows: pa.Table, panel: Panel, systems: tuple[str, str], definition: str, level: float, seeds: int
) -> Standing:
    """Who is ahead on a panel; a note where a system lacks room, or the rates that were run end too early."""
    unfit = {name: gone for name in systems if (gone := tidy.unfit(rows, name))}
    sides = [tidy.curves(rows, name, definition, "x") for name in systems]
    ran = set.intersection(*(tidy.ran(rows, name) for name in systems))  # a seed without room gives no ratio
    sides = [{seed: curve for seed, curve in side.items() if seed in ran} for side in sides]
    signs = [[statistics.rate_at(curve, level)[1] for curve in side.values()] for side in sides]
    notes = [
        f"{name} does not fit" + (f" for {unfit[name].seeds} of {seeds} seeds" if not unfit[name].every else "")
        for name in systems
        if name in unfit
    ]
    if not ran:
        return Standing(None, "open", ", ".join(notes))
    lowest = max(min(curve) for side in sides for curve in side.values())
    goal = f"{100 * level:g} %"
    for sign, at, words in (("<", lowest, "neither holds"), (">", max(panel["xs"], default=math.inf), "both hold")):
        both = sum(pair == (sign, sign) for pair in zip(*signs, strict=True))
        if both == len(ran):
            return Standing(None, "open", f"{words} {goal} at {at:g} req/s")
        if both:
            notes.append(f"{words} {goal} at {at:g} req/s for {both} of {seeds} seeds")
    here = statistics.crossing_ratio(sides[0], sides[1], level)
    return Standing(here, standing(here), ", ".join(notes))


def fewest(rows: pa.Table, system: str, over: str, definition: str, level: float) -> Estimate | None:
    """The fewest GPUs on which a system holds the level; with `over` that number over another system's."""
    curves = tidy.curves(rows, system, definition, "x")
    ours = statistics.fewest(curves, level).at if curves else None
    if not over or ours is None:
        return ours
    theirs = fewest(rows, over, "", definition, level)
    return None if theirs is None else of_counts(ours, theirs)


def of_counts(ours: Estimate, theirs: Estimate) -> Estimate:
    """A ratio of counts: a bound where one of them is, "~" where both pull apart."""
    signs = {ours.sign, statistics.MIRROR[theirs.sign]} - {"="}
    sign = "=" if not signs else "~" if len(signs) > 1 else signs.pop()
    return Estimate(ours.mean / theirs.mean, None, None, ours.n, sign)


def reached(rows: pa.Table, axis: str, system: str, definition: str, level: float) -> tuple[int, int]:
    """How many seeds reach the level anywhere on the axis, by the fit of each, and of how many."""
    curves = tidy.curves(rows, system, definition, "x").values()
    harder = 1.0 if axis in {*RATED, "models"} else -1.0  # the direction in which attainment falls
    held = [statistics.held({harder * x: y for x, y in curve.items()}, level) for curve in curves]
    return sum(x is not None for x in held), len(held)


class Loss(NamedTuple):
    """What switching a part off changes at one x of a panel, in shares of 1."""

    panel: Panel
    x: float
    pooled: Estimate  # the whole's attainment less that without the part
    model: str  # the one that loses most
    most: Estimate  # of it


def losses(table: pa.Table, panels: Sequence[Panel], system: str, without: str, definition: str) -> Iterator[Loss]:
    """What a system loses without a part at every x of every panel, paired by seed."""
    for panel in panels:
        rows = of_panel(table, panel)
        whole, less = (by_model(rows, name, definition) for name in (system, without))
        for x in sorted(whole.keys() & less.keys()):
            each = {
                model: statistics.paired(shares, less[x][model])
                for model, shares in whole[x].items()
                if shares.keys() & less[x].get(model, {}).keys()
            }
            model = max((name for name in each if name), key=lambda name: each[name].mean, default="")
            yield Loss(panel, x, each[""], model, each[model])


def by_model(rows: pa.Table, system: str, definition: str) -> dict[float, dict[str, dict[int, float]]]:
    """Attainment of a system by x, by model ("": pooled) and by seed; undefined values are left out."""
    shares: dict[float, dict[str, dict[int, float]]] = {}
    columns = ["label", "x", "seed", "over", "model", "definition", "value"]
    for row in rows.select(columns).to_pylist():
        own = (row["label"], row["definition"]) == (system, definition) and row["over"] in {"pooled", "model"}
        if own and row["value"] is not None:
            models = shares.setdefault(row["x"], {})
            models.setdefault(row["model"] or "", {})[row["seed"]] = row["value"]
    return shares
