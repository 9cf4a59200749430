"""Estimates from a study's table: where a system's attainment falls below a level, and comparisons of systems.

A study has panels. Each panel has its own curves of attainment along one axis; x is a value on that axis, such as a
rate or a number of GPUs. The table's footer has the facts of each panel (grid.facts). A panel's rows are those with its
`condition`. At each x the misses of all windows are pooled (pooled.py). Only values of x that all seeds have are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import by_window, memo, pooled, statistics
from harness.rows.about import About, Panel
from harness.rows.by_window import Windows
from harness.rows.estimate import Estimate
from harness.rows.pooled import Counts
from harness.rows.statistics import Crossing

SOME = 3  # requests; a model that is offered fewer is never called unserved
MARK = "†"  # behind the name of a system that meets no SLO of some model, in tables and figures
RATED = {"rate_scale", "rate_rps"}
EASES = {"slo_scale", "gpus"}  # axes along which attainment rises


def of_panel(table: pa.Table, panel: Panel) -> pa.Table:
    """Return a panel's rows.

    Each call returns the same table, so that results derived from it stay cached (`memo.once`).
    """
    return _of_condition(table, panel["condition"])


@memo.once
def _of_condition(table: pa.Table, condition: str) -> pa.Table:
    return table.filter(pc.equal(table["condition"].cast(pa.string()), condition))


def concerned(panels: Sequence[Panel], on: Mapping[str, Any]) -> list[Panel]:
    """Return the panels whose facts equal those in `on`, which is the part of a claim that chooses its panels."""
    return [panel for panel in panels if all(_matches(panel, key, value) for key, value in on.items())]


def by_condition(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Group the panels by condition, in order. Several panels in a group are separate cases of that condition."""
    groups: dict[tuple[Any, ...], list[Panel]] = {}
    for panel in panels:
        groups.setdefault((panel["name"], panel["kind"], panel.get("other_end")), []).append(panel)
    return list(groups.values())


def _matches(panel: Panel, key: str, value: Any) -> bool:
    match key:
        case "condition":
            return bool(panel["name"] == value)
        case "trace":  # is compared by its beginning, as the name of a generator goes on with parameters
            return str(panel["trace"]).startswith(value)
        case "column":
            return bool(panel["column"] + 1 == value)
        case _:
            return bool(panel[key] == value)


# ------------------------------------------------------------------ pooled counts


def counts(rows: pa.Table, axis: str, system: str, definition: str, over: str = "pooled") -> Counts | None:
    """Count a system's misses on a panel by x and window, over all seeds; None if the seeds share no x.

    `over` is pooled, mean (all models have equal weight) or worst (the model that misses most at each x). Along the
    axes in EASES, a greater x means less load. For these, the result has 1 / x, so that load always rises with it.
    """
    sides = _windows(rows, axis, system, definition, over)
    return _counts(sides, over, {seed for side in sides for seed in side})


def _windows(rows: pa.Table, axis: str, system: str, definition: str, over: str) -> list[Windows]:
    sides = by_window.windows(rows, system, definition, "pooled" if over == "pooled" else "model")
    if axis not in EASES:
        return list(sides.values())
    return [
        {seed: {reciprocal(x): counted for x, counted in curve.items()} for seed, curve in side.items()}
        for side in sides.values()
    ]


def _counts(sides: Sequence[Windows], over: str, seeds: set[int]) -> Counts | None:
    """Combine counts over `seeds`: pooled, or the mean or the worst of the models. Return None without any counts.

    If a model has no request in some run, it counts in that run with 0 misses of 0 requests. If it has no request in
    any run at some x, it is left out altogether.
    """
    if over == "pooled":
        return by_window.together(sides[0], seeds) if sides else None
    every = [{seed: curve for seed, curve in side.items() if seed in seeds} for side in _filled(sides)]
    asked = [side for side in every if all(sum(curve[x].offered for curve in side.values()) for x in _shared(side))]
    each = [c for side in asked if (c := by_window.together(side, seeds)) is not None]
    return (pooled.mean if over == "mean" else pooled.worst)(each) if each else None


def _filled(sides: Sequence[Windows]) -> list[Windows]:
    """Return the models' windows. If a model had no request in a run, add 0 missed of 0 offered."""
    places = dict.fromkeys((seed, x) for side in sides for seed, curve in side.items() for x in curve)
    filled: list[Windows] = []
    for side in sides:
        windows: Windows = {}
        for seed, x in places:
            windows.setdefault(seed, {})[x] = side.get(seed, {}).get(x, by_window.Counted(0.0, 0.0))
        filled.append(windows)
    return filled


def _shared(side: Windows) -> set[float]:
    """Return the values of x at which every seed has a run."""
    return set.intersection(*(set(curve) for curve in side.values())) if side else set()


def paired_counts(rows: pa.Table, axis: str, systems: tuple[str, str], definition: str) -> tuple[Counts, Counts] | None:
    """Return the counts of two systems over the seeds that both ran; None if they share no seed or no x."""
    sides = [_windows(rows, axis, name, definition, "pooled") for name in systems]
    seeds = set.intersection(*({seed for side in of for seed in side} for of in sides))
    ours, theirs = (_counts(of, "pooled", seeds) for of in sides) if seeds else (None, None)
    return None if ours is None or theirs is None else (ours, theirs)


def reciprocal(x: float) -> float:
    """Return 1 / x, which rises with load along the axes in EASES.

    Applied twice, it gives x again (to 12 digits).
    """
    return float(f"{1.0 / x:.12g}")


def inverse(e: Estimate) -> Estimate:
    """Return the estimate of 1 / x from the estimate of x."""
    low, high = (None if x is None or not x else 1.0 / x for x in (e.high, e.low))
    return replace(e, mean=1.0 / e.mean, low=low, high=high, sign=statistics.MIRROR[e.sign])


# ------------------------------------------------------------------ crossings


def crossing(
    rows: pa.Table, panel: Panel, system: str, definition: str, level: float, over: str = "pooled"
) -> Crossing | None:
    """Estimate the x at which a system crosses the level on a panel; None if the system was not run.

    Rates are in requests per second. On an axis of models, the curve leaves out numbers of models that do not fit. If
    attainment is at least the level at every number that fits, the crossing is the largest of these, without an
    interval.
    """
    axis = panel["axis"]
    c = counts(rows, axis, system, definition, over)
    if c is None:
        return _nowhere(rows, system, axis)
    attained = {float(x): 1.0 - float(share) for x, share in zip(c.rates_rps, pooled.shares(c).share, strict=True)}
    points = statistics.fitted(attained)
    fails = min((point.x for point in points if point.attained < level), default=None)
    dip = max(point.fitted - point.attained for point in points)
    if axis == "gpus":
        return statistics.fewest({reciprocal(x): y for x, y in attained.items()}, level, c.units)
    at = pooled.crossing(c, level)
    if axis == "models" and (unfit := _unfit(rows, system)):
        fails = min(unfit if fails is None else [fails, *unfit])
        at = replace(at, sign="=", low=None, high=None) if at.sign == ">" else at
    if axis in EASES:
        return Crossing(inverse(at), None if fails is None else reciprocal(fails), dip)
    return Crossing(at, fails, dip).times(panel["unit_rps"] if axis == "rate_scale" else 1.0)


def _nowhere(rows: pa.Table, system: str, axis: str) -> Crossing | None:
    """Return the easiest x that was tried, as a bound of the crossing, for a system whose models fit at no x.

    None if the system ran at some x, was skipped, or was not tried.
    """
    xs = [] if by_window.ran(rows, system) else _unfit(rows, system)
    if not xs:
        return None
    easiest = max(xs) if axis in EASES else min(xs)
    return Crossing(Estimate(easiest, None, None, 1, ">" if axis in EASES else "<"), easiest, 0.0)


def _unfit(rows: pa.Table, system: str) -> list[float]:
    """List every x at which a system's models did not fit."""
    mine = pc.and_(pc.equal(rows["label"].cast(pa.string()), system), pc.is_valid(rows["infeasible"]))
    return [float(x) for x in pc.unique(rows.filter(mine)[memo.along(rows)]).to_pylist()]


def attained(rows: pa.Table, axis: str, system: str, definition: str, over: str = "pooled") -> dict[float, Estimate]:
    """Return a system's attainment by x, pooled over all windows; 0 at each x where its models did not fit."""
    by_x = {x: Estimate(0.0, None, None, 1) for x in _unfit(rows, system)}
    if (c := counts(rows, axis, system, definition, over)) is None:
        return by_x
    known = c.units >= pooled.FEWEST
    for x, share, low, high in zip(c.rates_rps.tolist(), *pooled.shares(c), strict=True):
        least, most = (1.0 - float(high), 1.0 - float(low)) if known else (None, None)
        by_x[reciprocal(x) if axis in EASES else x] = Estimate(1.0 - float(share), least, most, c.units)
    return by_x


def difference(rows: pa.Table, axis: str, systems: tuple[str, str], definition: str, x: float) -> Estimate | None:
    """Subtract the second system's attainment at x from the first's, paired by window; None unless both ran at x."""
    pair = paired_counts(rows, axis, systems, definition)
    at = reciprocal(x) if axis in EASES else x
    if pair is None or not all(np.isclose(c.rates_rps, at).any() for c in pair):
        return None
    return pooled.difference(*pair, at)


@memo.once
def broad(rows: pa.Table) -> pa.Table:
    """Return the rows of the seeds with the most runs. Seeds added later near one level only are left out."""
    every = rows.select(["seed", "label", memo.along(rows)]).to_pandas().drop_duplicates()
    runs = every.groupby("seed").size()
    widest = runs.index[runs == runs.max()].tolist()
    return rows if len(widest) == len(runs) else rows.filter(pc.is_in(rows["seed"], pa.array(widest)))


def unserved(rows: pa.Table, axis: str, system: str, definition: str) -> str:
    """Say for how many models a system meets no SLO: "4 of 16 models at 0 %"; empty if there is none.

    A model is counted if it had at least `SOME` requests at the lowest load, summed over all runs, and all of them
    missed.
    """
    sides = _windows(rows, axis, system, definition, "model")
    least = min((x for side in sides for curve in side.values() for x in curve), default=0.0)
    gone = 0
    for side in sides:
        each = [curve[least] for curve in side.values() if least in curve]
        missed, offered = (sum(counts) for counts in zip(*each, strict=True)) if each else (0.0, 0.0)
        gone += offered >= SOME and missed >= offered * (1 - 1e-12)
    return f"{gone} of {len(sides)} models at 0 %" if gone else ""


def all_unserved(table: pa.Table, facts: About) -> dict[str, list[str]]:
    """List the systems that meet no SLO for some model, each with the texts of `unserved` for its panels."""
    gone: dict[str, list[str]] = {}
    for panel in facts.panels:
        rows = of_panel(table, panel)
        for name in facts.systems:
            if words := unserved(rows, panel["axis"], name, facts.definitions[0]):
                gone.setdefault(name, []).append(words)
    return gone


def slope(rows: pa.Table, panel: Panel, system: str, definition: str, level: float) -> Estimate | None:
    """Estimate the slope of ln(share missed) against ln(x) where a system crosses the level; None if it does not."""
    c = counts(rows, panel["axis"], system, definition)
    return None if c is None else pooled.slope(c, level)


def support(rows: pa.Table, panel: Panel, system: str, definition: str, level: float) -> tuple[int, int]:
    """Return the number of misses at the sampled x nearest to a crossing, and the number of windows.

    Both are 0 if the system has no counts.
    """
    c = counts(rows, panel["axis"], system, definition)
    return (0, 0) if c is None else (round(float(c.missed[pooled.nearest(c, 1.0 - level)].sum())), c.units)


# ------------------------------------------------------------------ whole numbers, seeds


def fewest(rows: pa.Table, system: str, over: str, definition: str, level: float) -> Estimate | None:
    """Estimate the fewest GPUs on which a system's attainment is at least the level.

    If `over` names another system, return the ratio of the first system's number to that of `over`.
    """
    c = crossing(rows, {"axis": "gpus"}, system, definition, level)
    if not over or c is None:
        return None if c is None else c.at
    theirs = fewest(rows, over, "", definition, level)
    return None if theirs is None else of_counts(c.at, theirs)


def of_counts(ours: Estimate, theirs: Estimate) -> Estimate:
    """Divide two estimated numbers of GPUs.

    The ratio is a bound if either number is a bound. It has the sign "~" if the two bounds point in opposite
    directions.
    """
    signs = {ours.sign, statistics.MIRROR[theirs.sign]} - {"="}
    sign = "=" if not signs else "~" if len(signs) > 1 else signs.pop()
    return Estimate(ours.mean / theirs.mean, None, None, ours.n, sign)


def reached(rows: pa.Table, axis: str, system: str, definition: str, level: float) -> tuple[int, int]:
    """Return the number of seeds whose fitted curve is at least the level at some x, and the number of all seeds."""
    curves = by_window.curves(rows, system, definition, "x").values()
    harder = 1.0 if axis in {*RATED, "models"} else -1.0  # the direction in which attainment falls
    held = [statistics.held({harder * x: y for x, y in curve.items()}, level) for curve in curves]
    return sum(x is not None for x in held), len(held)


class Loss(NamedTuple):
    """The attainment that a system loses at one x of a panel when one of its parts is switched off, in shares of 1."""

    panel: Panel
    x: float
    pooled: Estimate  # the whole's attainment less that without the part
    model: str  # the one that loses most
    most: Estimate


def losses(table: pa.Table, panels: Sequence[Panel], system: str, without: str, definition: str) -> Iterator[Loss]:
    """Yield the attainment that a system loses, at each x of each panel, when one of its parts is switched off.

    `without` names the variant of the system that lacks this part. The system and the variant are paired by seed.
    """
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
    """Return a system's attainment by x, by model ("": pooled) and by seed; undefined values are left out."""
    shares: dict[float, dict[str, dict[int, float]]] = {}
    columns = ["label", "x", "seed", "over", "model", "definition", "value"]
    for row in rows.select(columns).to_pylist():
        chosen = (row["label"], row["definition"]) == (system, definition) and row["over"] in {"pooled", "model"}
        if chosen and row["value"] is not None:
            models = shares.setdefault(row["x"], {})
            models.setdefault(row["model"] or "", {})[row["seed"]] = row["value"]
    return shares
