"""The simulator compared with servers: how each of them ranks systems, then errors of attainment and latencies.

The comparison takes scored runs of the same specs on both. A condition is a spec without its system and seed. Each seed
is a repeat. A pair of systems counts only if the servers rank it: at least REPEATS repeats are valid, and the 95 %
interval of the paired difference in attainment excludes 0. Invalid runs (column `invalid`) are left out, because their
numbers do not describe the servers. The table of pairs says how many repeats of a pair were left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from harness.rows.estimate import POINTS, Estimate
from harness.rows.statistics import paired

REPEATS = 5
FAR = 0.10  # a predicted difference of attainment counts as large from here on
PAIRS = 8  # pairs that the servers must tell apart, at least
LATENCIES = {f"{m}_p{q}_s": (m, q) for m in ("ttft", "tpot") for q in (50, 95, 99)}  # metric, quantile by measure
AIMS = {50: 0.10, 95: 0.20}  # aims for the error of each quantile
ATTAINED, SHARE_ATTAINED = 0.05, 0.9  # aims for the error of attainment, and the share of cells that keep it
SERVERS, SIMULATOR = "servers", "sim"
KEYS = ["condition", "label", "seed"]

Verdict = Literal["alike", "wrong", "no difference", "not told apart", "too few"]


class Pair(NamedTuple):
    """A pair of systems under a condition; `first` is the better one on the servers.

    `servers` and `simulator` are the differences of attainment, `first` - `second`.
    """

    condition: str
    first: str
    second: str
    servers: Estimate
    simulator: Estimate
    invalid: int  # repeats that are left out

    @property
    def verdict(self) -> Verdict:
        """The simulator's ranking compared with the servers', or the reason why the servers do not rank the pair."""
        if self.servers.n < REPEATS:
            return "too few"
        if self.servers.low is None or not self.servers.low > 0.0:
            return "not told apart"
        if self.simulator.mean == 0.0:
            return "no difference"
        return "alike" if self.simulator.mean > 0.0 else "wrong"

    @property
    def far(self) -> bool:
        """True if the simulator predicts a difference of at least FAR."""
        return abs(self.simulator.mean) >= FAR


class Cell(NamedTuple):
    """A measure of one system under one condition, on the servers and in the simulator, as means over repeats."""

    condition: str
    label: str
    measure: str
    n: int
    servers: float
    spread: float  # the servers' over repeats: standard deviation / mean; attainment has the standard deviation
    simulator: float
    error: float  # mean over repeats of simulator / servers - 1; of attainment, of simulator - servers


def valid(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the measures of runs that are valid and have values of both sides, with a column for each side.

    `frame` has a row for each run, side and measure, with the columns condition, label, seed, side, measure, value and
    invalid. The sides are servers and simulator.
    """
    bad = {key for key, _ in frame[frame["invalid"]].groupby(KEYS)}
    kept = frame[~frame.set_index(KEYS).index.isin([*bad])]
    wide = kept.pivot_table(index=[*KEYS, "measure"], columns="side", values="value", aggfunc="first", dropna=False)
    return wide.reindex(columns=[SERVERS, SIMULATOR]).dropna().reset_index()


def pairs(frame: pd.DataFrame, measure: str) -> list[Pair]:
    """Compare every pair of systems under each condition; `measure` names the attainment to compare."""
    kept, compared = valid(frame), list[Pair]()
    kept = kept[kept["measure"] == measure]
    for condition, group in frame[frame["measure"] == measure].groupby("condition", sort=False):
        seeds = {label: set(rows["seed"]) for label, rows in group.groupby("label", sort=False)}
        runs = {
            (label, side): dict(zip(rows["seed"].tolist(), rows[side].tolist(), strict=True))
            for label, rows in kept[kept["condition"] == condition].groupby("label", sort=False)
            for side in (SERVERS, SIMULATOR)
        }
        for left, right in combinations(seeds, 2):
            common = runs.get((left, SERVERS), {}).keys() & runs.get((right, SERVERS), {}).keys()
            if not common:
                continue
            theirs, ours = (paired(runs[left, side], runs[right, side]) for side in (SERVERS, SIMULATOR))
            first, second = str(left), str(right)
            if theirs.mean < 0.0:
                theirs, ours, first, second = _exchanged(theirs), _exchanged(ours), second, first
            left_out = len(seeds[left] | seeds[right]) - len(common)
            compared.append(Pair(str(condition), first, second, theirs, ours, left_out))
    return compared


def _exchanged(x: Estimate) -> Estimate:
    """Return the estimate of b - a from that of a - b."""
    low, high = (None if bound is None else -bound for bound in (x.high, x.low))
    return replace(x, mean=-x.mean, low=low, high=high)


def cells(frame: pd.DataFrame, attainment: str) -> list[Cell]:
    """Return a cell for each measure, system and condition: first attainment, then quantiles of each latency.

    A quantile is infinite if too many requests never end. If this happens on either side, the cell has no error.
    """
    kept, scored = valid(frame), list[Cell]()
    for measure in (attainment, *LATENCIES):
        for (condition, label), group in kept[kept["measure"] == measure].groupby(["condition", "label"], sort=False):
            theirs, ours = group[SERVERS].to_numpy(np.float64), group[SIMULATOR].to_numpy(np.float64)
            spread = error = math.nan
            if np.isfinite(theirs).all() and np.isfinite(ours).all():
                unit = 1.0 if measure == attainment else theirs
                error = float(((ours - theirs) / unit).mean())
                if len(theirs) > 1:
                    spread = float(np.std(theirs, ddof=1)) / float(np.mean(unit))
            values = float(theirs.mean()), spread, float(ours.mean()), error
            scored.append(Cell(str(condition), str(label), measure, len(group), *values))
    return scored


# ------------------------------------------------------------------ in words


def summary(compared: Sequence[Pair]) -> list[str]:
    """Say how many pairs the simulator ranks as the servers do, and whether the pairs are enough to judge by."""
    counts = Counter(pair.verdict for pair in compared)
    apart = [pair for pair in compared if pair.verdict in {"alike", "wrong", "no difference"}]
    far = sum(pair.far for pair in apart)
    ranks = f"ranks {counts['alike']} alike, {counts['wrong']} wrongly, sees no difference in {counts['no difference']}"
    lines = [f"{len(apart)} of {len(compared)} pairs are told apart by the servers: the simulator {ranks}"]
    if few := counts["too few"]:
        lines.append(f"{few} pairs have fewer than {REPEATS} valid repeats, and count for nothing")
    enough = "enough to judge by"
    if len(apart) < PAIRS or 2 * far < len(apart):
        enough = f"too few to judge by (at least {PAIRS} pairs, half of them so far apart)"
    lines.append(f"{far} of these {len(apart)} were predicted to differ by {100 * FAR:.0f} points or more: {enough}")
    return lines


def pair_rows(compared: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of all pairs: largest measured difference first, pairs with too few repeats last."""
    yield "condition", "better on servers", "worse", "repeats", "servers, points", "simulator", "ranked"
    for pair in sorted(compared, key=lambda pair: (pair.verdict == "too few", -pair.servers.mean)):
        invalid = f" ({pair.invalid} left out)" if pair.invalid else ""
        points = (difference.times(100).text(POINTS) for difference in (pair.servers, pair.simulator))
        yield pair.condition, pair.first, pair.second, f"{pair.servers.n}{invalid}", *points, pair.verdict


def cell_rows(scored: Sequence[Cell], attainment: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of each system under each condition: attainment, then errors in %.

    Each error is followed by the spread of the servers' own repeats.
    """
    heads = (f"{metric.upper()} P{q} %" for metric, q in LATENCIES.values())
    yield "condition", "system", "repeats", "servers", "simulator", "off", *heads
    by = {(cell.condition, cell.label, cell.measure): cell for cell in scored}
    for cell in (cell for cell in scored if cell.measure == attainment):
        others = [by.get((cell.condition, cell.label, name)) for name in LATENCIES]
        off = f"{100 * cell.error:+.1f} (±{100 * cell.spread:.1f})"
        both = f"{100 * cell.servers:.1f}", f"{100 * cell.simulator:.1f}"
        yield cell.condition, cell.label, str(cell.n), *both, off, *map(_error, others)


def _error(cell: Cell | None) -> str:
    if cell is None or math.isnan(cell.error):
        return "-"
    return f"{100 * cell.error:+.0f} (±{100 * cell.spread:.0f})"


def verdict_lines(scored: Sequence[Cell], attainment: str, *, judged: bool) -> list[str]:
    """Return a line for each aim: how many cells meet it, among the cells that are precise enough to tell.

    A cell is precise enough if the 95 % interval of its measured mean extends to each side by at most the aim's bound.
    If most cells are not, the line advises longer windows.
    """
    lines = []
    for measure, bound in _bounds(attainment).items():
        cells_of = [c for c in scored if c.measure == measure and not math.isnan(c.error)]
        sure = [c for c in cells_of if c.n > 1 and c.spread * float(t.ppf(0.975, c.n - 1)) / math.sqrt(c.n) <= bound]
        met = sum(abs(c.error) <= bound for c in sure)
        unit = f"{100 * bound:.0f} {'points' if measure == attainment else '%'}"
        text = f"{_what(measure)}: {met} of {len(sure)} cells within {unit}; {len(cells_of) - len(sure)} of"
        text += f" {len(cells_of)} cells have a wider interval of their own and count for nothing"
        if 2 * len(sure) < len(cells_of):
            text += " (more than half: lengthen --window-s)"
        if judged and sure:
            need = SHARE_ATTAINED if measure == attainment else 1.0
            text += f": the aim is {'met' if met >= need * len(sure) else 'missed'}"
        lines.append(text)
    return lines if judged else [*lines, "no aim is judged in this tier (--full judges them)"]


def _bounds(attainment: str) -> dict[str, float]:
    """Return the largest error that is allowed, for each measure that has an aim."""
    return {attainment: ATTAINED} | {measure: AIMS[q] for measure, (_, q) in LATENCIES.items() if q in AIMS}


def _what(measure: str) -> str:
    """Return the name of a measure in words."""
    metric, q = LATENCIES.get(measure, ("", 0))
    return f"P{q} of {metric.upper()}" if metric else "attainment"


def misses(scored: Sequence[Cell], attainment: str) -> list[Cell]:
    """Return the cells with an error above the bound of their aim, in descending order of error / bound."""
    bounds = _bounds(attainment)
    beyond = [c for c in scored if c.measure in bounds and abs(c.error) > bounds[c.measure]]
    return sorted(beyond, key=lambda c: -abs(c.error) / bounds[c.measure])


def miss(cell: Cell, attainment: str) -> str:
    """Say in one line by how much a cell is off."""
    off = f"{100 * cell.error:+.1f} points" if cell.measure == attainment else f"{100 * cell.error:+.0f} %"
    return f"{cell.label}, {cell.condition}: {_what(cell.measure)} {off} (±{100 * cell.spread:.0f})"


def aims(scored: Sequence[Cell]) -> list[str]:
    """Return a line for each quantile of a latency: the median error of cells, and how many are within the aim."""
    lines = []
    for measure, (_, q) in LATENCIES.items():
        off = np.abs([c.error for c in scored if c.measure == measure and not math.isnan(c.error)])
        if len(off):
            aim = AIMS.get(q)
            within = "no aim" if aim is None else f"{int((off <= aim).sum())} of {len(off)} within {100 * aim:.0f} %"
            lines.append(f"{_what(measure)}: error {100 * np.median(off):.0f} % in the median cell; {within}")
    return lines
