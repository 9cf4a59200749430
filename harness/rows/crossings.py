"""Estimates of a study's table: systems' crossings of the level, ratios and standings, and losses without a part.

A panel is described by its facts in the table's footer (grid.facts); its rows are those of its `condition`. Misses of
all windows at an x are pooled (pooled.py), over the x that all seeds have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import pooled, statistics, tidy
from harness.rows.about import About, Panel
from harness.rows.estimate import POINTS, RATIO, Estimate
from harness.rows.pooled import Counts
from harness.rows.statistics import Crossing
from harness.rows.tidy import Windows

STANDINGS = {  # of two systems: the sign in tables, and its meaning
    "ahead": ("+", "ahead"),
    "ahead, by less than 25 %": ("+<", "ahead, by less than 25 %"),
    "equal within 25 %": ("=", "equal within 25 %"),
    "behind, by less than 25 %": ("-<", "behind, by less than 25 %"),
    "behind": ("-", "behind"),
    "turns": ("+-", "ahead at one rate and behind at another"),
    "not decided": ("?", "not decided"),
    "one case": ("", "one window, of which no chance is known"),
    "no room": ("", "one of them does not fit"),
}
UNDECIDED, CASE, NO_ROOM = "not decided", "one case", "no room"
SIDED = ("ahead", "behind", "turns")  # beginnings of the standings that name a side: chance alone may give them
BESIDE = (2.0, 0.5)  # times the share of misses that the level leaves: 98 and 99.5 % beside 99 %
NEAR = 0.005  # of attainment: differences within it are called equal
FALSE = 0.05  # the probability that some verdict of a table names a side where nothing differs
SOME = 3  # requests of a model, of which one is met where it is served at all
MARK = "†"  # behind the name of a system that meets no SLO of some model, in tables and figures
RATED = {"rate_scale", "rate_rps"}
EASES = {"slo_scale", "gpus"}  # axes along which attainment rises


def of_panel(table: pa.Table, panel: Panel) -> pa.Table:
    """Return a panel's rows: the same table at each call, so that results derived from it are kept (`tidy.once`)."""
    return _of_condition(table, panel["condition"])


@tidy.once
def _of_condition(table: pa.Table, condition: str) -> pa.Table:
    return table.filter(pc.equal(table["condition"].cast(pa.string()), condition))


def concerned(panels: Sequence[Panel], on: Mapping[str, Any]) -> list[Panel]:
    """Return the panels with these facts, as a claim chooses them."""
    return [panel for panel in panels if all(_matches(panel, key, value) for key, value in on.items())]


def by_condition(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Group the panels by condition, in order; several of one are its cases."""
    groups: dict[tuple[Any, ...], list[Panel]] = {}
    for panel in panels:
        groups.setdefault((panel["name"], panel["kind"], panel.get("other_end")), []).append(panel)
    return list(groups.values())


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


# ------------------------------------------------------------------ pooled counts


def counts(rows: pa.Table, axis: str, system: str, definition: str, over: str = "pooled") -> Counts | None:
    """Count a system's misses on a panel by x and window, over all seeds; None where they share no x.

    `over` is pooled, mean (models weigh alike) or worst (the model that misses most at each x). Along an axis of EASES
    x is inverted, so that load always rises with it.
    """
    sides = _windows(rows, axis, system, definition, over)
    return _counts(sides, over, {seed for side in sides for seed in side})


def _windows(rows: pa.Table, axis: str, system: str, definition: str, over: str) -> list[Windows]:
    sides = tidy.windows(rows, system, definition, "pooled" if over == "pooled" else "model")
    if axis not in EASES:
        return list(sides.values())
    return [
        {seed: {turned(x): counted for x, counted in curve.items()} for seed, curve in side.items()}
        for side in sides.values()
    ]


def _counts(sides: Sequence[Windows], over: str, seeds: set[int]) -> Counts | None:
    """Combine counts over `seeds`: pooled, or the mean or the worst of the models; None where there are none.

    A model without a request in some run counts there with no misses of none. One without any at some x is left out.
    """
    if over == "pooled":
        return tidy.together(sides[0], seeds) if sides else None
    every = [{seed: curve for seed, curve in side.items() if seed in seeds} for side in _filled(sides)]
    asked = [side for side in every if all(sum(curve[x].offered for curve in side.values()) for x in _shared(side))]
    each = [c for side in asked if (c := tidy.together(side, seeds)) is not None]
    return (pooled.mean if over == "mean" else pooled.worst)(each) if each else None


def _filled(sides: Sequence[Windows]) -> list[Windows]:
    """Return the windows of models, with none missed of none offered where a model had no request in a run."""
    places = dict.fromkeys((seed, x) for side in sides for seed, curve in side.items() for x in curve)
    filled: list[Windows] = []
    for side in sides:
        windows: Windows = {}
        for seed, x in places:
            windows.setdefault(seed, {})[x] = side.get(seed, {}).get(x, tidy.Counted(0.0, 0.0))
        filled.append(windows)
    return filled


def _shared(side: Windows) -> set[float]:
    """Return the x that all seeds have."""
    return set.intersection(*(set(curve) for curve in side.values())) if side else set()


def _pair(
    rows: pa.Table, axis: str, systems: tuple[str, str], definition: str, over: str = "pooled"
) -> tuple[Counts, Counts] | None:
    """Return the counts of two systems over the seeds that both ran; None where there is none."""
    sides = [_windows(rows, axis, name, definition, over) for name in systems]
    seeds = set.intersection(*({seed for side in of for seed in side} for of in sides))
    ours, theirs = (_counts(of, over, seeds) for of in sides) if seeds else (None, None)
    return None if ours is None or theirs is None else (ours, theirs)


def turned(x: float) -> float:
    """Map x to 1 / x, so that load increases with it on an axis of EASES; applied twice it returns x (12 digits)."""
    return float(f"{1.0 / x:.12g}")


def inverse(e: Estimate) -> Estimate:
    """Return an estimate of 1 over the quantity."""
    low, high = (None if x is None or not x else 1.0 / x for x in (e.high, e.low))
    return replace(e, mean=1.0 / e.mean, low=low, high=high, sign=statistics.MIRROR[e.sign])


# ------------------------------------------------------------------ crossings


def crossing(
    rows: pa.Table, panel: Panel, system: str, definition: str, level: float, over: str = "pooled"
) -> Crossing | None:
    """Estimate where a system crosses the level on a panel, rates in requests per second; None where it was not run.

    A number of models that does not fit is no point of the curve: the answer is the most models that fit and hold.
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
        return statistics.fewest({turned(x): y for x, y in attained.items()}, level, c.units)
    at = pooled.crossing(c, level)
    if axis == "models" and (unfit := _unfit(rows, system)):
        fails = min(unfit if fails is None else [fails, *unfit])
        at = replace(at, sign="=", low=None, high=None) if at.sign == ">" else at
    if axis in EASES:
        return Crossing(inverse(at), None if fails is None else turned(fails), dip)
    return Crossing(at, fails, dip).times(panel["unit_rps"] if axis == "rate_scale" else 1.0)


def _nowhere(rows: pa.Table, system: str, axis: str) -> Crossing | None:
    """Return the crossing of a system that had room at no x, as a bound; None where it was not run, or skipped."""
    xs = [] if tidy.ran(rows, system) else _unfit(rows, system)
    if not xs:
        return None
    easiest = max(xs) if axis in EASES else min(xs)
    return Crossing(Estimate(easiest, None, None, 1, ">" if axis in EASES else "<"), easiest, 0.0)


def _unfit(rows: pa.Table, system: str) -> list[float]:
    """List every x at which a system had no room."""
    mine = pc.and_(pc.equal(rows["label"].cast(pa.string()), system), pc.is_valid(rows["infeasible"]))
    return [float(x) for x in pc.unique(rows.filter(mine)[tidy.along(rows)]).to_pylist()]


def attained(rows: pa.Table, axis: str, system: str, definition: str, over: str = "pooled") -> dict[float, Estimate]:
    """Return a system's attainment by x, of all windows together: 0 where it had no room."""
    by_x = {x: Estimate(0.0, None, None, 1) for x in _unfit(rows, system)}
    if (c := counts(rows, axis, system, definition, over)) is None:
        return by_x
    known = c.units >= pooled.FEWEST
    for x, share, low, high in zip(c.rates_rps.tolist(), *pooled.shares(c), strict=True):
        least, most = (1.0 - float(high), 1.0 - float(low)) if known else (None, None)
        by_x[turned(x) if axis in EASES else x] = Estimate(1.0 - float(share), least, most, c.units)
    return by_x


def difference(rows: pa.Table, axis: str, systems: tuple[str, str], definition: str, x: float) -> Estimate | None:
    """Subtract the second system's attainment at x from the first's, by window; None where they share no seed."""
    pair = _pair(rows, axis, systems, definition)
    at = turned(x) if axis in EASES else x
    if pair is None or not all(np.isclose(c.rates_rps, at).any() for c in pair):
        return None
    return pooled.difference(*pair, at)


@tidy.once
def broad(rows: pa.Table) -> pa.Table:
    """Return the rows of the seeds that ran at the most rates: those that came later ran near one level alone."""
    every = rows.select(["seed", "label", tidy.along(rows)]).to_pandas().drop_duplicates()
    runs = every.groupby("seed").size()
    widest = runs.index[runs == runs.max()].tolist()
    return rows if len(widest) == len(runs) else rows.filter(pc.is_in(rows["seed"], pa.array(widest)))


def unserved(rows: pa.Table, axis: str, system: str, definition: str) -> str:
    """Count in words the models of which a system meets no SLO: "4 of 16 models at 0 %"; empty where there is none.

    Where load is least, no request met it in any run, of at least `SOME` in all.
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
    """List the systems of a study that meet no SLO of some model, with the words of `unserved` for each panel."""
    gone: dict[str, list[str]] = {}
    for panel in facts.panels:
        rows = of_panel(table, panel)
        for name in facts.systems:
            if words := unserved(rows, panel["axis"], name, facts.definitions[0]):
                gone.setdefault(name, []).append(words)
    return gone


def slope(rows: pa.Table, panel: Panel, system: str, definition: str, level: float) -> Estimate | None:
    """Estimate the power of x with which a system's misses grow at its crossing of the level; None without one."""
    c = counts(rows, panel["axis"], system, definition)
    return None if c is None else pooled.slope(c, level)


def support(rows: pa.Table, panel: Panel, system: str, definition: str, level: float) -> tuple[int, int]:
    """Return the misses and windows on which a crossing rests: at the x of the curve that is nearest to it."""
    sides = _windows(rows, panel["axis"], system, definition, "pooled")
    c = _counts(sides, "pooled", {seed for side in sides for seed in side})
    if c is None:
        return 0, 0
    return round(float(c.missed[pooled.nearest(c, 1.0 - level)].sum())), len(sides[0])


def ratio(
    rows: pa.Table, axis: str, systems: tuple[str, str], definition: str, level: float, over: str = "pooled"
) -> Estimate | None:
    """Estimate the ratio of two systems' crossings, paired by window; None where they share no seed.

    Along an axis of EASES the ratio is that of the x themselves: 0.5 is half the SLO scale.
    """
    pair = _pair(rows, axis, systems, definition, over)
    if pair is None:
        return None
    quotient = pooled.ratio(*pair, level)
    return inverse(quotient) if axis in EASES else quotient


class Standing(NamedTuple):
    """The order of two systems and its evidence.

    The ratio is None where a system has no room, or no rate tells the two apart. Where a curve is flat at the level, or
    the order changes beside it, differences of attainment at three rates decide in place of the ratio.
    """

    ratio: Estimate | None
    says: str  # of STANDINGS
    note: str  # room or rates that are missing
    p: float = 1.0  # the p-value
    flat: bool = False
    beside: tuple[Estimate | None, ...] = ()  # ratios at the levels of BESIDE
    differences: tuple[tuple[float, Estimate], ...] = ()  # by x as shown, ours less theirs in shares of 1
    shared: float = 0.0  # correlation of their misses by window: the variance that common random numbers save

    @property
    def decisive(self) -> Estimate | None:
        """The ratio where it decides; None where it is missing or a curve is flat, and differences stand for it."""
        return None if self.flat else self.ratio


def verdict_text(standing: Standing, *, between: str = " ") -> str:
    """Say who is ahead: the sign with the ratio, or with differences in points where the ratio does not decide."""
    if (ratio := standing.decisive) is not None:
        numbers = ratio.text(RATIO)
    elif gaps := [gap.times(100).text(POINTS, spread=False) for _, gap in standing.differences]:
        numbers = f"{between.join(gaps)} points"
    else:
        numbers = standing.note
    return f"{STANDINGS[standing.says][0]} {numbers}".strip()


def side_by_side(rows: pa.Table, panel: Panel, systems: tuple[str, str], definition: str, level: float) -> Standing:
    """Judge who is ahead on a panel; a note says where a system lacks room, or the rates run end too early."""
    unfit = {name: gone for name in systems if (gone := tidy.unfit(rows, name))}
    notes = [
        f"{name} does not fit"
        + (f" for {unfit[name].seeds} of {unfit[name].of} seeds" if not unfit[name].every else "")
        for name in systems
        if name in unfit
    ]
    pair = _pair(rows, panel["axis"], systems, definition)
    if pair is None:
        return Standing(None, NO_ROOM if notes else UNDECIDED, ", ".join(notes))
    judged = standing(panel, pair, level)
    return judged._replace(note=", ".join(filter(None, [*notes, judged.note])))


def standing(panel: Panel, pair: tuple[Counts, Counts], level: float) -> Standing:
    """Judge who is ahead, by the counts of both on a panel."""
    axis = panel["axis"]
    unit = panel["unit_rps"] if axis == "rate_scale" else 1.0
    differences = tuple((x * unit, pooled.difference(*pair, x)) for x in _three(panel, *pair))
    told, p = _by_differences([gap for _, gap in differences])
    if axis in EASES:
        differences = tuple((turned(x), gap) for x, gap in reversed(differences))
    windows = pair[0].units
    few = CASE if windows == 1 else UNDECIDED if windows < pooled.FEWEST else ""
    note = f"{windows} windows, and {pooled.FEWEST} name a side" if few == UNDECIDED else ""
    shared = pooled.correlation(*pair, level)
    signs = {pooled.crossing(c, level).sign for c in pair}
    if signs in ({"<"}, {">"}):
        words = "neither holds" if signs == {"<"} else "both hold"
        edge = (min if signs == {"<"} else max)(float(x) for c in pair for x in c.rates_rps)
        at = f" at {edge * unit:.3g} req/s" if axis in RATED else ""
        note = ", ".join(filter(None, [f"{words} {100 * level:g} %{at}", note]))
        return Standing(None, few or told, note, p, True, (), differences, shared)
    here = pooled.ratio(*pair, level)
    beside = tuple(pooled.ratio(*pair, 1.0 - share * (1.0 - level)) for share in BESIDE)
    flat = pooled.flat(*pair, level)
    words, p = (told, p) if flat else pooled.verdict(here)
    words = few or words
    if axis in EASES:
        here, beside = inverse(here), tuple(map(inverse, beside))
    return Standing(here, words, note, p, flat, beside, differences, shared)


def _three(panel: Panel, ours: Counts, theirs: Counts) -> list[float]:
    """Return three rates that both ran, fixed in advance: ends and middle of the given rates, else of all."""
    both = sorted(set(ours.rates_rps.tolist()) & set(theirs.rates_rps.tolist()))
    given = {turned(x) for x in panel["xs"]} if panel["axis"] in EASES else set(panel["xs"])
    xs = [x for x in both if x in given] if len(given & set(both)) >= 3 else both
    return xs if len(xs) < 4 else [xs[0], xs[len(xs) // 2], xs[-1]]


def _by_differences(gaps: Sequence[Estimate]) -> tuple[str, float]:
    """Judge two systems by their differences at three rates: the joint standing and its probability by chance.

    Two of the rates decide. Ahead at one rate and equal at another is ahead. Where a single rate has a sign, its
    probability is multiplied by the number of rates (Bonferroni).
    """
    told = [pooled.apart(gap, NEAR) for gap in gaps]
    ahead, behind = (
        sorted(pooled.chance(gap) for gap, word in zip(gaps, told, strict=True) if word == side)
        for side in ("ahead", "behind")
    )
    if ahead and behind:
        return "turns", max(ahead[0], behind[0])
    if len(told) - told.count("") < 2:
        return UNDECIDED, 1.0
    if not (ps := ahead or behind):
        return "equal within 25 %", 1.0
    return "ahead" if ahead else "behind", ps[1] if len(ps) > 1 else min(1.0, len(gaps) * ps[0])


def corrected(standings: Sequence[Standing]) -> list[Standing]:
    """Correct the standings of one table: those that chance alone may give become undecided (Holm's correction).

    Standings with equal numbers rest on the same runs under several conditions: they count once.
    """
    sided = [i for i, s in enumerate(standings) if s.says.startswith(SIDED)]
    ps = {(s.p, s.ratio, s.differences): s.p for s in (standings[i] for i in sided)}
    of = dict(zip(ps, pooled.holm([*ps.values()]), strict=True))
    adjusted = {i: of[standings[i].p, standings[i].ratio, standings[i].differences] for i in sided}
    return [
        s._replace(p=adjusted[i], says=s.says if adjusted[i] <= FALSE else _without_side(s)) if i in adjusted else s
        for i, s in enumerate(standings)
    ]


def _without_side(standing: Standing) -> str:
    """Return the verdict that is left where chance alone may give the side: an equality, or undecided.

    The equality is that of the ratio, or of the differences at two of the three rates.
    """
    alike = [pooled.apart(gap, NEAR) for _, gap in standing.differences].count("equal") >= 2
    return "equal within 25 %" if "by less than" in standing.says or (standing.flat and alike) else UNDECIDED


class Cases(NamedTuple):
    """Ratios of several cases, which have no interval: the least, the most, and the number on either side of 1."""

    least: Estimate
    most: Estimate
    above: int  # 1
    near: int  # within 25 % of 1, either way
    below: int  # 1
    of: int  # that have a ratio

    def agree(self, says: str) -> int:
        """Count the ratios on the side that a verdict names; 0 for a verdict without a side."""
        word = says.partition(",")[0].split()[0]
        return {"ahead": self.above, "equal": self.near, "behind": self.below}.get(word, 0)


def cases(standings: Sequence[Standing]) -> Cases | None:
    """Join the ratios of several cases; None where none has one. A bound counts where it lies beyond 1."""
    ratios = sorted((standing.ratio for standing in standings if standing.ratio is not None), key=lambda e: e.mean)
    if not ratios:
        return None
    above = sum(e.mean > 1.0 and e.sign in {"=", ">"} for e in ratios)
    below = sum(e.mean < 1.0 and e.sign in {"=", "<"} for e in ratios)
    near = sum(1 / pooled.NEAR <= e.mean <= pooled.NEAR and e.sign == "=" for e in ratios)
    return Cases(ratios[0], ratios[-1], above, near, below, len(ratios))


class Claimed(NamedTuple):
    """A ratio that a study claims, on one of its panels."""

    claim: Mapping[str, Any]  # as the study's facts have it
    panel: Panel
    standing: Standing


def claimed(table: pa.Table, facts: About) -> list[Claimed]:
    """List every ratio that a study claims, on each panel that it is about; corrected together."""
    each = []
    for claim in facts.claims:
        pair = (claim["system"], claim["over"])
        if claim["what"] != "ratio" or not {*pair} <= {*facts.systems}:
            continue
        definition = claim["definition"] or facts.definitions[0]
        for panel in concerned(facts.panels, claim["on"]):
            rows = of_panel(table, panel)
            if not {*pair} <= {*rows["label"].unique().to_pylist()}:
                continue
            wrong = [name for name in pair if name in tidy.invalid(rows)]
            each.append(
                Claimed(
                    claim,
                    panel,
                    Standing(None, UNDECIDED, f"{' and '.join(wrong)} invalid")
                    if wrong
                    else side_by_side(rows, panel, pair, definition, facts.level),
                )
            )
    standings = corrected([c.standing for c in each])
    return [c._replace(standing=standing) for c, standing in zip(each, standings, strict=True)]


# ------------------------------------------------------------------ whole numbers, seeds


def fewest(rows: pa.Table, system: str, over: str, definition: str, level: float) -> Estimate | None:
    """Estimate the fewest GPUs on which a system holds the level; with `over` that number over another system's."""
    c = crossing(rows, {"axis": "gpus"}, system, definition, level)
    if not over or c is None:
        return None if c is None else c.at
    theirs = fewest(rows, over, "", definition, level)
    return None if theirs is None else of_counts(c.at, theirs)


def of_counts(ours: Estimate, theirs: Estimate) -> Estimate:
    """Divide two estimates of counts: a bound where either is a bound, "~" where the bounds oppose each other."""
    signs = {ours.sign, statistics.MIRROR[theirs.sign]} - {"="}
    sign = "=" if not signs else "~" if len(signs) > 1 else signs.pop()
    return Estimate(ours.mean / theirs.mean, None, None, ours.n, sign)


def reached(rows: pa.Table, axis: str, system: str, definition: str, level: float) -> tuple[int, int]:
    """Count the seeds that reach the level anywhere on the axis, by the fit of each, and all seeds."""
    curves = tidy.curves(rows, system, definition, "x").values()
    harder = 1.0 if axis in {*RATED, "models"} else -1.0  # the direction in which attainment falls
    held = [statistics.held({harder * x: y for x, y in curve.items()}, level) for curve in curves]
    return sum(x is not None for x in held), len(held)


class Loss(NamedTuple):
    """The loss by switching a part off at one x of a panel, in shares of 1."""

    panel: Panel
    x: float
    pooled: Estimate  # the whole's attainment less that without the part
    model: str  # the one that loses most
    most: Estimate  # of it


def losses(table: pa.Table, panels: Sequence[Panel], system: str, without: str, definition: str) -> Iterator[Loss]:
    """Estimate a system's loss without a part at every x of every panel, paired by seed."""
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
