"""A scored sweep at one rate, the highest at which a contestant meets the level: an estimate by system and column."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import by_window, crossings, pooled, summaries, tidy
from harness.rows.about import Panel
from harness.rows.crossings import MARK, of_counts
from harness.rows.definitions import DEFINITIONS
from harness.rows.estimate import Estimate, Style

LEVELS = (0.99, 0.97, 0.90)  # levels of attainment whose rates stand beside each other
CONTEST = 2  # where at least this many have the same number of GPUs, systems on other numbers do not contend
OPTIONAL = {tidy.HITS, tidy.WAKES}  # columns of runs with a prefix cache, or (0.3.0) servers that slept


class Column(NamedTuple):
    """A column of a summary: its measure, its heading, and whether more is better (None: neither)."""

    key: str
    group: str
    name: str
    unit: str
    factor: float
    more: bool | None
    definition: str  # a definition of the tidy table; empty: a value of the crossing
    over: str = "pooled"
    headline: bool = False  # it keeps its interval where there is little room
    brief: bool = False  # it is among the few that answer at a glance

    @property
    def style(self) -> Style:
        """The number format of the column, without units.

        Shares and counts have fixed decimals, other numbers significant digits.
        """
        return Style(decimals={"%": 1, "": 0}.get(self.unit))


def levels(level: float) -> tuple[float, ...]:
    """Return the level of a comparison, followed by the other usual levels."""
    return (level, *(usual for usual in LEVELS if usual != level))


def rate_key(level: float) -> str:
    """Return the key of the column with the rates at a level, such as `rate_99`."""
    return f"rate_{100 * level:g}"


def columns(definition: str, level: float) -> tuple[Column, ...]:
    """Return the columns of a comparison; the first are about attainment by `definition` and the rate at `level`."""
    at, *others = (f"{100 * each:g} %" for each in levels(level))
    crosses, rates = f"req/s at {at}", levels(level)
    share = f"SLOs met ({definition}) %"
    shares = [
        Column(definition, share, "pooled", "%", 100, True, definition, headline=True, brief=True),
        Column("mean", share, "mean", "%", 100, True, definition, "mean"),
        Column("worst", share, "worst", "%", 100, True, definition, "worst", brief=True),
    ]
    shares += [Column(x, "of each %", x.upper(), "%", 100, True, x) for x in DEFINITIONS[definition].beside]
    return (
        *shares,
        Column(rate_key(level), crosses, "pooled", "req/s", 1, True, "", headline=True, brief=True),
        Column("worst_rate", crosses, "worst", "req/s", 1, True, "", "worst", brief=True),
        Column("half_0", crosses, "1st half", "req/s", 1, None, "", brief=True),
        Column("half_1", crosses, "2nd half", "req/s", 1, None, "", brief=True),
        *(
            Column(rate_key(each), "pooled at", name, "req/s", 1, True, "", brief=True)
            for each, name in zip(rates[1:], others, strict=True)
        ),
        Column("of_bound", "", "of bound %", "%", 100, None, ""),
        Column("slope", crosses, "slope", "power", 1, None, ""),
        Column("fails", crosses, "fails at", "req/s", 1, None, ""),
        Column("dip", "deepest", "dip %", "%", 1, None, ""),
        Column("ttft_p50_s", "TTFT s", "P50", "s", 1, False, "ttft_p50_s"),
        Column("ttft_p95_s", "TTFT s", "P95", "s", 1, False, "ttft_p95_s", brief=True),
        Column("ttft_p99_s", "TTFT s", "P99", "s", 1, False, "ttft_p99_s"),
        Column("tpot_p50_s", "TPOT ms", "P50", "ms", 1e3, False, "tpot_p50_s"),
        Column("tpot_p95_s", "TPOT ms", "P95", "ms", 1e3, False, "tpot_p95_s", brief=True),
        Column(tidy.HITS, "prefix", "hits %", "%", 100, None, tidy.HITS, brief=True),
        Column("kv_used", "KV %", "used", "%", 100, None, "kv_used"),
        Column("loads", "weights", "loads", "", 1, None, "loads"),
        Column("evicts", "weights", "evicts", "", 1, None, "evicts"),
        Column("migrations", "weights", "moved", "", 1, None, "migrations"),
        Column(tidy.WAKES, "server's own", "wakes", "", 1, None, tidy.WAKES),
    )


@dataclass(frozen=True, slots=True)
class SystemSummary:
    """One system at the rate of the summary; values in the columns' units, None where a value is missing."""

    label: str
    gpus: int
    control: bool
    infeasible: bool  # some run has no room: then there are no values
    values: Mapping[str, Estimate | None]  # keyed by the column's key
    invalid: bool = False  # some run on real servers measured something else
    check: str = ""  # the mark of its file: "unchecked" by `bench check` as it is now, or "checked in part"
    unserved: str = ""  # the models of which it meets no SLO, in words: "4 of 16 models at 0 %"

    @property
    def judged(self) -> bool:
        """Tell whether the system counts in sentences and when best values are chosen.

        It counts if it is a contestant, and if all of its runs fit and are valid.
        """
        return not (self.control or self.infeasible or self.invalid)

    @property
    def flat(self) -> bool:
        """Tell whether the system's misses hardly grow with the rate where its attainment crosses the level."""
        steep = self.values.get("slope")
        return steep is not None and steep.high is not None and steep.high < pooled.STEEP

    def mean(self, key: str) -> float:
        """Return the system's mean in a column; -inf if the value is missing, so that it sorts last."""
        e = self.values[key]
        return -math.inf if e is None else e.mean


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a sweep: values of systems at one rate, and their crossings over all rates."""

    rate_scale: float
    offered_rps: float
    columns: tuple[Column, ...]
    systems: tuple[SystemSummary, ...]
    gpus: int  # number of GPUs of most contending systems
    undefined_tpot: float  # share of offered requests with a TPOT that is not defined
    level: float
    subject: str  # the label that the answer is about: of a system given as a file, else the first
    halves: tuple[tuple[int, ...], ...] = ()  # seeds that replay each half of a real trace, which is no random draw

    def name(self, system: SystemSummary) -> str:
        """Return the system's label; with its GPUs, as in `dedicated (8 GPUs)`, if most systems have another number.

        Marks are added if the system does not fit, is invalid, is unchecked, or is checked in part. MARK is added if
        all requests of some model miss their SLO even at the lowest rate.
        """
        label = system.label if system.gpus == self.gpus else summaries.with_gpus(system.label, [system.gpus])
        marks = {"does not fit": system.infeasible, "invalid": system.invalid, system.check: bool(system.check)}
        return label + "".join(f" ({mark})" for mark, holds in marks.items() if holds) + MARK * bool(system.unserved)

    @property
    def marked(self) -> list[str]:
        """A line that explains MARK and lists the systems with it; empty if no system has it."""
        unserved = [f"{s.label}: {s.unserved}" for s in self.systems if s.unserved]
        return [f"{MARK} {', '.join(unserved)} at the lowest rate that ran"] if unserved else []

    def best(self, column: Column) -> set[str]:
        """Return the labels of the contestants with the best value of a column.

        The result is empty if neither high nor low values of the column are better, or if all values are equal.
        """
        values = {s.label: s.mean(column.key) for s in self.systems if s.judged and s.values[column.key] is not None}
        if column.more is None or len(set(values.values())) < 2:
            return set()
        top = max(values.values()) if column.more else min(values.values())
        return {label for label, value in values.items() if value == top}

    def decided(self, column: Column) -> set[str]:
        """Return the label of the contestant with the best value of a column, as a set; empty if it is not decided.

        The best value is decided if its interval does not overlap the interval of any other contestant. It is not
        decided if an interval is missing.
        """
        best = self.best(column)
        values = {s.label: e for s in self.systems if s.judged and (e := s.values[column.key]) is not None}
        if len(best) != 1 or column.more is None:
            return set()
        first = values.pop(next(iter(best)))
        sign = 1 if column.more else -1
        near = first.low if column.more else first.high
        ends = [e.high if column.more else e.low for e in values.values()]
        apart = near is not None and all(end is not None and sign * near > sign * end for end in ends)
        return best if apart else set()


def summarize(
    table: pa.Table,
    order: Sequence[str],
    definition: str,
    level: float,
    *,
    controls: Collection[str] = (),
    checks: Mapping[str, str] = MappingProxyType({}),
    halves: Sequence[Collection[int]] = (),
    bound: Mapping[str, Any] | None = None,
    subject: str = "",
) -> Summary:
    """Summarise a sweep at the highest rate at which a contestant still meets `level`.

    `order` lists the labels, and `controls` those that are not contestants. If two or more contestants share the most
    frequent number of GPUs, systems with any other number are no contestants. For example, `contiguous` takes one GPU
    per model, which may be another number. `checks` has the marks of systems' files by label.

    `halves` are the seeds that replay each half of a real trace. The halves are two case studies, so there are no
    intervals. `bound` is the result of run/bound.py: above its `rate_scale`, no policy attains `level` on its `gpus`.
    `subject` is the label that the answer is about; if it is empty, it is the first contestant.
    """
    wanted, panel = columns(definition, level), panel_of(table)
    points = _points(table, wanted)
    sides = [table.filter(pc.is_in(table["seed"], pa.array(list(seeds)))) for seeds in halves]
    labels = [label for label in order if label in points.gpus]
    contend = [label for label in labels if label not in controls] or labels
    counts = [points.gpus[label] for label in contend]
    gpus = max(sorted(set(counts)), key=counts.count) if counts else 0  # ties: the fewest
    apart = {label for label in contend if points.gpus[label] != gpus} if counts.count(gpus) >= CONTEST else set()
    contend = [label for label in contend if label not in apart]
    shown = points.telling_rate(contend, definition, level)
    invalid, unfit = summaries.invalid(table), summaries.infeasible(table)
    systems, key = list[SystemSummary](), rate_key(level)
    for label in labels:
        silent, gone = label in controls or label in apart, label in unfit
        values: dict[str, Estimate | None] = {c.key: None for c in wanted}
        if not gone:
            crossed = [_crossing(part, label, definition, level, panel) for part in (table, *sides)]
            values |= _values(points.row(label, shown, wanted), crossed, key)
        if bound is not None and not silent and points.gpus[label] == bound["gpus"]:
            values["of_bound"] = _of_bound(values[key], bound["rate_scale"] * panel["unit_rps"])
        unserved = "" if gone else crossings.unserved(table, "rate_scale", label, definition)
        check = checks.get(label, "")
        systems.append(
            SystemSummary(label, points.gpus[label], silent, gone, values, label in invalid, check, unserved)
        )
    offered = [e.mean for label in labels if (e := points.at(label, shown, "offered_rps"))]
    undefined = [e.mean for label in labels if (e := points.at(label, shown, "undefined_tpot"))]
    return Summary(
        shown,
        sum(offered) / len(offered) if offered else math.nan,
        tuple(c for c in wanted if _always(c) or any(system.values[c.key] for system in systems)),
        tuple(systems),
        gpus,
        max(undefined, default=0.0),
        level,
        subject or next(iter(contend), ""),
        tuple(map(tuple, halves)),
    )


def _of_bound(at: Estimate | None, above_rps: float) -> Estimate | None:
    """Return a system's rate in % of the bound's rate, without an interval."""
    share = at and of_counts(replace(at, low=None, high=None), Estimate(above_rps, None, None, at.n))
    return share and share.times(100)


def _values(
    row: dict[str, Estimate | None], crossed: Sequence[Mapping[str, Estimate]], key: str
) -> dict[str, Estimate | None]:
    """Return a system's values at one rate, and the rates at which it crosses the level (`key`).

    The first item of `crossed` is for all runs. Further items are for the halves of a real trace; if there are any, no
    value has an interval.
    """
    whole, *halves = crossed
    values = row | dict(whole)
    for k, half in enumerate(halves):
        values[f"half_{k}"] = half.get(key)
    if not halves:
        return values
    return {key: e and replace(e, low=None, high=None) for key, e in values.items()}


def _always(column: Column) -> bool:
    """Tell whether a column is shown even if no system has a value in it."""
    return bool(column.definition) and column.key not in OPTIONAL


@dataclass(frozen=True, slots=True)
class _Points:
    """The estimates at every point of a sweep."""

    estimates: Mapping[tuple[str, float, str, str], Estimate]  # keyed by label, rate scale, definition, over
    gpus: Mapping[str, int]

    def at(self, label: str, rate: float, name: str, over: str = "pooled") -> Estimate | None:
        """Return an estimate of a system at a rate; None if it is missing or NaN."""
        e = self.estimates.get((label, rate, name, over))
        return None if e is None or math.isnan(e.mean) else e

    def row(self, label: str, rate: float, wanted: Sequence[Column]) -> dict[str, Estimate | None]:
        """Return a system's estimates at one rate, in the columns' units.

        Columns about the crossing of the level are None.
        """
        values = ((c, self.at(label, rate, c.definition, c.over) if c.definition else None) for c in wanted)
        return {c.key: e and e.times(c.factor) for c, e in values}

    def telling_rate(self, contend: Sequence[str], definition: str, level: float) -> float:
        """Return the highest rate that all contestants ran and at which some contestant meets the level.

        If no such rate exists, return the lowest rate that all contestants ran. If no rate is common to all
        contestants, all rates of the sweep are considered instead.
        """
        each = [{rate for label, rate, _, _ in self.estimates if label == name} for name in contend]
        rates = sorted(set.intersection(*each) if each else set()) or sorted({rate for _, rate, _, _ in self.estimates})
        met = [
            rate
            for rate in rates
            if any(e is not None and e.mean >= level for e in (self.at(x, rate, definition) for x in contend))
        ]
        return max(met, default=rates[0]) if rates else math.nan


def _points(table: pa.Table, wanted: Sequence[Column]) -> _Points:
    names = [*dict.fromkeys(c.definition for c in wanted if c.definition), "offered_rps", "undefined_tpot"]
    estimates: dict[tuple[str, float, str, str], Estimate] = {}
    gpus: dict[str, int] = {}
    for p in summaries.summary(table, names, ("pooled", "mean", "worst")).to_dict("records"):
        low, high = (None if math.isnan(x) else float(x) for x in (p["low"], p["high"]))
        estimates[p["label"], p["rate_scale"], p["definition"], p["over"]] = Estimate(p["mean"], low, high, p["n"])
        gpus[p["label"]] = int(p["gpus"])
    shares = {(c.definition, c.over) for c in wanted if c.definition in DEFINITIONS}
    for label in gpus:  # attainment is that of all windows together
        for definition, over in shares:
            for rate, e in crossings.attained(table, "rate_scale", label, definition, over).items():
                if (label, rate, definition, over) in estimates:
                    estimates[label, rate, definition, over] = e
    return _Points(estimates, gpus)


def _crossing(table: pa.Table, label: str, definition: str, level: float, panel: Panel) -> dict[str, Estimate]:
    """Return a system's rates at `level` and at the other usual levels, keyed by column.

    The result also has the worst model's rate, the slope at the crossing, the lowest rate that fails, and the dip: how
    far attainment falls below its fit, in %. It is empty if a single rate was run.
    """
    c = crossings.crossing(table, panel, label, definition, level)
    if c is None or len(panel["xs"]) < 2:
        return {}
    values = {rate_key(level): c.at}
    if (worst := crossings.crossing(table, panel, label, definition, level, "worst")) is not None:
        values["worst_rate"] = worst.at
    wide = crossings.broad(table)
    for each in levels(level)[1:]:
        if (other := crossings.crossing(wide, panel, label, definition, each)) is not None:
            values[rate_key(each)] = other.at
    if (steep := crossings.slope(table, panel, label, definition, level)) is not None:
        values["slope"] = steep
    if c.fails is not None:
        values["fails"] = Estimate(c.fails, None, None, c.at.n)
    if c.dip >= 0.0005:  # it is more than 0 where it is shown with one decimal of a percent
        values["dip"] = Estimate(100 * c.dip, None, None, c.at.n)
    return values


def panel_of(table: pa.Table) -> Panel:
    """Describe a comparison's table as a panel: its rates, and the mean requests per second at rate scale 1."""
    frame = table.select(["rate_scale", "definition", "over", "value"]).to_pandas()
    offered = frame[(frame["definition"] == "offered_rps") & (frame["over"] == "pooled") & frame["value"].notna()]
    scales = float(offered["rate_scale"].sum())
    return {
        "axis": "rate_scale",
        "xs": sorted(frame["rate_scale"].unique().tolist()),
        "unit_rps": float(offered["value"].sum()) / scales if scales else 1.0,
    }


def scores(table: pa.Table, label: str, rate: float, definition: str) -> dict[int, float]:
    """Return the attainment of all requests together, by seed, at one rate."""
    curves = by_window.curves(table, label, definition, "rate_scale")
    return {seed: curve[rate] for seed, curve in curves.items() if rate in curve}
