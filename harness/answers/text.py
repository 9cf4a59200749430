"""A measured study in words: one block per condition, a table of ratios or of parts, then claims with their classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from harness.answers import ideas, measured, ratios, tradeoff, without
from harness.answers.caveats import departures, invalid, own_degrees, unchecked_lines
from harness.answers.ratios import Standings
from harness.answers.table import Table, brief, joined, printed
from harness.answers.without import Ablation
from harness.rows import by_window, crossings, estimate, memo, ranking, record, setting, statistics, summaries, tidy
from harness.rows.about import About, Panel
from harness.rows.crossings import MARK
from harness.rows.estimate import NONE, POINTS, Estimate
from harness.rows.ranking import CASE, STANDINGS, side_by_side, verdict_text
from harness.study import claims
from harness.study.claims import AXES, STYLES
from harness.study.rule import SAYS
from harness.study.study import AA
from harness.study.table import marks

SIDES = {"ahead": "ahead of", "equal": "equal to", "behind": "behind"}
RATES = "slope: power of the rate with which misses grow there; mean, worst: of the models' shares"
_row = itemgetter("row")  # a panel's row


class Shown(NamedTuple):
    """The input of the text: a study's table, its facts, and the folder in which both are stored."""

    table: pa.Table
    about: About
    folder: Path
    markdown: bool = False
    every: bool = False  # all lines, not only those that answer the study's question


def lines(shown: Shown) -> Iterator[str]:
    """Yield the text of a study: one screen that ends with the notes on the study; with `every`, all lines."""
    if shown.about.layout == "claims":
        yield from measured.lines(shown.table, shown.about)
        yield from (*own_degrees(shown.table), *invalid(shown.table), *unchecked_lines(shown.table))
        return
    body, ends = (list(some) for some in parts(shown))
    several = sum(isinstance(part, Table) for part in body) > 1  # of several tables none is cut
    blocks = [list(printed([part], markdown=shown.markdown)) for part in body]
    whole: Iterable[str | list[str]] = blocks if several else chain.from_iterable(blocks)
    yield from brief(whole, every=shown.every or shown.markdown, tail=printed(ends, markdown=shown.markdown))


def parts(shown: Shown) -> tuple[Iterable[str | Table], Iterable[str | Table]]:
    """Return the lines and tables of a study, the answer first, and the lines that end the screen."""
    ends: Iterable[str] = ()
    body: Iterable[str | Table]
    match shown.about.layout:
        case "steps" | "matrix":
            standings = _standings(shown)
            legend = _legend(shown, "the first of a pair", standings)
            body, ends = _matrix(shown, standings), (*legend, f"{len(shown.about.runs)} runs")
        case "parts":
            body = without.parts(shown.about, shown.table, _parts(shown))
        case "tradeoff":
            body = tradeoff.parts(shown.about, shown.table, every=shown.every)
        case "ideas":
            body = ideas.parts(shown.about, shown.table, every=shown.every)
        case _:
            standings = _standings(shown)
            by_row = groupby(sorted(shown.about.panels, key=_row), key=_row)
            blocks = (_block(shown, list(panels), standings) for _, panels in by_row)
            body = chain(_answer("panels", standings), chain.from_iterable(blocks), _ends(shown, standings))
    left_out = filter(None, [setting.left_out(shown.about.panels)])
    notes = chain(shown.about.notes, left_out, unchecked_lines(shown.table))
    return body, chain(ends, notes, _unserved(shown), _claims(shown), _copies(shown))


# ------------------------------------------------------------------ crossings, a block a condition


def _answer(cells: str, standings: Standings) -> Iterator[str]:
    """Yield a line that says, for each system, which others it is ahead of, equal to or behind on most panels.

    The line also names the systems against which there is no verdict. A panel of a single window has no interval, so it
    has no verdict and does not count.
    """
    standings = {key: standing for key, standing in standings.items() if standing.says != CASE}
    many = len({cell for cell, *_ in standings})
    where, which = (f"on most of {many} {cells} ", f" that holds on most of {many}") if many > 1 else ("", "")
    clauses = []
    for ours in dict.fromkeys(key[1] for key in standings):
        named, mixed = dict[str, list[str]](), list[str]()
        for theirs in dict.fromkeys(key[2] for key in standings if key[1] == ours):
            of = [standing for key, standing in standings.items() if key[1:] == (ours, theirs)]
            word, count = Counter(standing.says.split()[0].strip(",") for standing in of).most_common(1)[0]
            (named.setdefault(SIDES[word], []) if word in SIDES and 2 * count > len(of) else mixed).append(theirs)
        phrases = [f"{phrase} {joined(named[phrase])}" for phrase in SIDES.values() if phrase in named]
        clauses += [f"{where}{ours}, pooled over models, is {', '.join(phrases)}"] if phrases else []
        clauses += [f"against {joined(mixed)} {ours} has no verdict{which}"] if mixed else []
    if clauses:
        yield "; ".join(clauses)


def _ends(shown: Shown, standings: Standings) -> Iterator[str]:
    if any(panel["axis"] in crossings.RATED for panel in shown.about.panels):
        yield RATES
    yield from _legend(shown, shown.about.systems[0], standings)
    if shown.about.layout == "fleet":
        spent = cpu_s(shown.folder, shown.about)
        yield "CPU seconds of all runs: " + ", ".join(f"{name} {spent[name]:.0f}" for name in spent)
    yield from departures(shown.table)
    yield from own_degrees(shown.table)
    yield from invalid(shown.table)


def _block(shown: Shown, panels: Sequence[Panel], standings: Standings) -> Iterator[str | Table]:
    """Yield a condition's text: a table per panel with a row per system; with `every`, loads of weights too."""
    about, axis = shown.about, panels[0]["axis"]
    bounds = about.controls if about.layout == "fleet" else ()  # bring their own number of GPUs
    place, title = _place(about, panels), _title(about, panels)
    if place:
        yield title
        title = ""
    unfit: dict[str, tuple[by_window.Unfit, list[str]]] = {}  # why on the first panel, and all such panels
    for panel in panels:
        rows = crossings.of_panel(shown.table, panel)
        labels = _labels(rows, panel, about)
        at = ", ".join(cell(panel) for cell in place.values() if cell(panel) != NONE)
        cells, loads, heads = list[list[str]](), list[list[str]](), _heads(shown, axis)
        for name in (*about.systems, *bounds):
            if name not in labels:
                continue  # not of this condition
            if gone := by_window.unfit(rows, name):
                some = "" if gone.every else f" with {gone.seeds} of {gone.of} seeds"
                unfit.setdefault(name, (gone, []))[1].append(f"{at or panel['trace']}{some}")
            if gone and gone.every:
                cells.append([labels[name], gone.word, *[NONE] * (len(heads) - 1)])
                continue
            cells.append([labels[name], *_cells(shown, rows, panel, name, standings)])
            if shown.every:
                loads.append([labels[name], *_loads(rows, panel, name, about)])
        yield Table(["system", *heads], cells, title=f"{at}:" if at else title).filled()
        title = ""
        if loads:
            shares = (f"{name.upper()} %" for name in about.definitions)
            yield Table(["system", "at", *shares, "loads", "evicts", "moved"], loads).filled()
    for name, (gone, places) in unfit.items():
        yield f"{name} {gone.word} ({'; '.join(places)}): {gone.why}"


def _place(about: About, panels: Sequence[Panel]) -> dict[str, Callable[[Panel], str]]:
    """Return the columns in which a condition's panels differ, each with a function that renders a panel's cell."""
    every: dict[str, Callable[[Panel], str]] = {
        "trace": lambda panel: str(panel["trace"]).partition("+")[0],
        "half": lambda panel: str(panel["half"]) or NONE,
        "models": lambda panel: str(panel["models"]),
        "SLO": lambda panel: str(panel["slo"]),
        "GPUs": lambda panel: str(panel["gpus"]),
        "req/s": lambda panel: NONE if panel["rate_rps"] is None else f"{panel['rate_rps']:.3g}",
    }
    judged = [panel for panel in panels if about.layout != "fleet"] or panels
    return {name: cell for name, cell in every.items() if len(set(map(cell, judged))) > 1}


def _heads(shown: Shown, axis: str) -> list[str]:
    level, (first, *others) = f"{100 * shown.about.level:g} %", [d.upper() for d in shown.about.definitions]
    rest = [f"{level} {name}" for name in others] if shown.every or axis == "gpus" else []
    if axis == "gpus":
        return [f"{level} {first}", "worst", "fails at", "below that", "each seed", *rest]
    slope = ["slope"] * (axis in crossings.RATED)
    return [f"{level} {first}", *slope, "mean", "worst", *rest, f"{shown.about.systems[0]} over it"]


def _cells(shown: Shown, rows: pa.Table, panel: Panel, name: str, standings: Standings) -> list[str]:
    """Render the x at which a system's attainment crosses the level on a panel, as the cells of the system's row.

    The first cells have the crossing by the first definition of attainment, and the columns that explain it. The
    crossings by other definitions follow. Unless the axis is GPUs, the last cell says whether the study's first system
    is ahead of this one.
    """
    about, axis = shown.about, panel["axis"]
    (first, *others), level, style = about.definitions, about.level, STYLES[axis]

    def at(definition: str, over: str = "pooled", *, spread: bool = False) -> str:
        c = crossings.crossing(rows, panel, name, definition, level, over)
        return NONE if c is None else c.at.text(style, spread=spread or shown.every)

    rest = [at(definition) for definition in others] if shown.every or axis == "gpus" else []
    if axis == "gpus":
        c = crossings.crossing(rows, panel, name, first, level)
        if c is None:
            return [NONE] * (5 + len(rest))
        if name not in about.systems:  # a bound has its own number of GPUs, not the least of many
            return [replace(c.at, sign="=").text(style), *[NONE] * 4, *rest]
        fails = NONE if c.fails is None else estimate.number(c.fails, 0)
        below, by_seed = _below(rows, name, about), _each_seed(rows, name, about)
        return [c.at.text(style), at(first, "worst"), fails, below, by_seed, *rest]
    steep = crossings.slope(rows, panel, name, first, level) if axis in crossings.RATED else None
    slope = [estimate.text(steep, spread=shown.every)] if axis in crossings.RATED else []
    standing = standings.get((panel["condition"], about.systems[0], name))
    over = NONE if standing is None else verdict_text(standing)
    return [at(first, spread=True), *slope, at(first, "mean"), at(first, "worst"), *rest, over]


def _standings(shown: Shown) -> Standings:
    """Judge pairs of systems on every panel along rates, scales or models; all verdicts are corrected together.

    Each pair is the study's first system and another one. In a study of ratios, the pairs are those of its claims.
    """
    about = shown.about
    if about.layout in {"steps", "matrix"}:
        every = ranking.claimed(shown.table, about)
        return {(panel["condition"], claim["system"], claim["over"]): judged for claim, panel, judged in every}
    first, *others = about.systems
    pairs = [(first, name) for name in others]
    keys, standings = [], []
    for panel in about.panels:
        rows = crossings.of_panel(shown.table, panel)
        ran = set(rows["label"].unique().to_pylist())
        for pair in pairs:
            gone = any((lack := by_window.unfit(rows, name)) and lack.every for name in pair)
            if panel["axis"] != "gpus" and ran.issuperset(pair) and not gone:
                keys.append((panel["condition"], *pair))
                standings.append(side_by_side(rows, panel, pair, about.definitions[0], about.level))
    return dict(zip(keys, ranking.corrected(standings), strict=True))


def _legend(shown: Shown, first: str, standings: Standings) -> Iterator[str]:
    """Yield lines that explain the signs of the printed verdicts, and the numbers beside these signs.

    `first` names, in words, the systems whose lead or lag the verdicts state.
    """
    judged = [s for s in standings.values() if s.says not in {CASE, ranking.NO_ROOM}]
    if judged:
        decided = sum(s.says != ranking.UNDECIDED for s in judged)
        shared = sorted(max(0.0, s.shared) for s in judged)[len(judged) // 2]
        of = f"{decided} of {len(judged)} verdicts are decided, corrected together (Holm)"
        says = {s.says for s in judged}
        signs = "; ".join(f"{sign} {words}" for word, (sign, words) in STANDINGS.items() if word in says)
        yield f"verdicts on {first}: {signs}; {of if len(judged) > 1 else 'one verdict'}"
        yield f"common random numbers save {100 * shared:.0f} % of a difference's variance (median)"
    points = {key: s for key, s in standings.items() if s.differences and s.decisive is None}
    if points:
        axes = {panel["condition"]: panel["axis"] for panel in shown.about.panels}
        at = dict.fromkeys(_at([x for x, _ in s.differences], axes[key[0]]) for key, s in points.items())
        yield f"points: difference of attainment at {', or '.join(at)}, where a ratio of rates does not decide"
        if any(s.says == "equal within 25 %" for s in points.values()):
            yield f"= with points: equal within {100 * ranking.NEAR:g} points"


def _at(xs: Sequence[float], axis: str) -> str:
    """Render several values of an axis, with its unit."""
    shown = joined([f"{x:.3g}" for x in xs])
    return f"{shown} req/s" if axis in crossings.RATED else f"{AXES[axis]} {shown}"


def _title(about: About, panels: Sequence[Panel]) -> str:
    first, axis = panels[0], panels[0]["axis"]
    scales = dict.fromkeys(f"{panel['slo_scale']:g}x" for panel in panels if panel["slo_scale"])
    rate = "at a given rate" if first["given"] else "at the rate that the first system holds"
    fixed = f"SLO {' and '.join(scales)}" if scales else rate if axis == "slo_scale" else f"SLO {first['slo']}"
    counts = dict.fromkeys(panel["gpus"] for panel in panels)
    gpus = "" if axis == "gpus" else f", {' and '.join(map(str, counts))} GPU{'s' * (list(counts) != [1])}"
    holds = "holds" if axis in {*crossings.RATED, "models"} else "reaches"
    unit = " (req/s)" if axis in crossings.RATED else ""
    words = (setting.machine(first["own"]), setting.PLANS.get(first["own"].get("plan", "")))
    extra = "".join(f", {word}" for word in words if word)
    if about.layout == "fleet":
        fixed, extra = f"{first['trace']} ({first['tier']}) at {first['rate_rps']:.3g} req/s", ""
    what = f"{first['name']}: " if first["name"] else ""
    return f"{what}{AXES[axis]}{unit} at which each system {holds} {100 * about.level:g} % ({fixed}{gpus}{extra})"


def _labels(rows: pa.Table, panel: Panel, about: About) -> dict[str, str]:
    """Return the label of each system of a panel: its name, its GPU count if the panel has another, and its marks.

    The marks are "(unchecked)" and "(checked in part)". MARK is added if all requests of some model miss their SLO,
    even at the least load.
    """
    took: dict[str, set[int]] = {}
    for name, gpus in zip(memo.column(rows, "label"), memo.column(rows, "gpus"), strict=True):
        took.setdefault(name, set()).add(gpus)
    free, late = summaries.own_gpus(took, panel["gpus"]), marks(rows)
    shown = {name: summaries.with_gpus(name, counts) if name in free else name for name, counts in took.items()}
    gone = {name for name in shown if crossings.unserved(rows, panel["axis"], name, about.definitions[0])}
    marked = {name: f" ({mark})" for name, mark in late.items()}
    return {name: label + marked.get(name, "") + MARK * (name in gone) for name, label in shown.items()}


def _below(rows: pa.Table, name: str, about: About) -> str:
    """Return the reason why the next smaller number of GPUs tried is too few: models do not fit, or SLOs are missed.

    If no number suffices, return the reason for the largest number tried.
    """
    at = crossings.fewest(rows, name, "", about.definitions[0], about.level)
    runs = rows.filter(pc.equal(rows["label"].cast(pa.string()), name))
    xs = sorted(set(runs["x"].to_pylist()))
    lacks = at is None or at.sign == ">"
    fewer = xs[-1] if lacks else max((x for x in xs if at and x < at.mean), default=None)
    if fewer is None:
        return NONE
    gone = by_window.unfit(runs.filter(pc.equal(runs["x"], fewer)), name)
    some = f" ({gone.seeds} of {gone.of} seeds)" if gone and not gone.every else ""
    return f"{gone.word}{some}" if gone else "misses SLOs"


def _each_seed(rows: pa.Table, name: str, about: About) -> str:
    """Render the range, over seeds, of the fewest GPUs that reach the level, judged by each seed alone."""
    curves = by_window.curves(rows, name, about.definitions[0], "x")
    counts = [statistics.fewest(curve, about.level).at for curve in curves.values()]
    every = sorted(counts, key=lambda e: (e.sign == ">", e.mean))
    ends = dict.fromkeys(e.text(STYLES["gpus"]) for e in (every[0], every[-1])) if every else {}
    return " to ".join(ends)


def _loads(rows: pa.Table, panel: Panel, name: str, about: About) -> list[str]:
    """Render a value x of the axis, and at x the attainment and the numbers of loads, evictions and moves of weights.

    Attainment and numbers are means over seeds. The value x is the largest sampled one that is not above the result of
    `_telling`. If that result is None, it is the largest of all.
    """
    curves = {d: by_window.curves(rows, name, d, "x") for d in (*about.definitions, *tidy.WEIGHTS)}
    xs = sorted(set().union(*(curve for curve in curves[about.definitions[0]].values())))
    if not xs:
        return [NONE] * (1 + len(curves))
    at = _telling(rows, panel, name, about)
    x = max((x for x in xs if at is None or x <= at), default=xs[0])
    unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
    cells = [f"{x * unit:.3g}"]
    for d, curve in curves.items():
        values = [of_seed[x] for of_seed in curve.values() if x in of_seed and not math.isnan(of_seed[x])]
        mean = sum(values) / len(values) if values else math.nan
        cells.append(NONE if not values else f"{100 * mean:.1f}" if d in about.definitions else f"{mean:.0f}")
    return cells


def _telling(rows: pa.Table, panel: Panel, name: str, about: About) -> float | None:
    """Return the x at which loads of weights are shown: the panel's `at`, else where attainment crosses the level.

    The attainment is that of the study's first system or, in the layout "fleet", of the system `name`. Return None if
    it does not cross the level.
    """
    if panel["at"] is not None:
        return float(panel["at"])
    first = name if about.layout == "fleet" else about.systems[0]
    c = crossings.crossing(rows, panel, first, about.definitions[0], about.level)
    return c.at.mean if c else None


def _unserved(shown: Shown) -> Iterator[str]:
    """Yield a line for each system that has MARK: even at the least load, all requests of some model miss their SLO."""
    of = len(shown.about.panels)
    for name, words in crossings.all_unserved(shown.table, shown.about).items():
        yield f"{MARK} {name}: {max(words)} even where load is least, on {len(words)} of {of} panels"


def _matrix(shown: Shown, standings: Standings) -> Iterator[str | Table]:
    about = shown.about
    yield from ratios.borne_out(about.panels, standings)
    yield from dict.fromkeys(ratios.reached(about, standings))
    if about.layout == "matrix" and all(panel["tier"] == "synthetic" for panel in about.panels):
        yield from _answer("conditions", standings)
    yield from ratios.parts(about, shown.table, standings, every=shown.every)


# ------------------------------------------------------------------ parts of a system, switched off


def _parts(shown: Shown) -> list[Ablation]:
    about, takes_part, parts = shown.about, set(shown.about.systems), list[Ablation]()
    for claim in claims.claims_of(about):
        if claim.what != "difference" or not {claim.system, claim.over} <= takes_part:
            continue
        if losses := list(claims.losses(shown.table, about, claim)):
            worst = max(losses, key=lambda loss: loss.most.mean)
            most = f"; {worst.model} loses most, {without.points(worst.most)}" if worst.model else ""
            lost = {(loss.panel["condition"], loss.x): loss.pooled for loss in losses}
            parts.append(Ablation(claim.subject, claim.says, lost, most))
    return parts


# ------------------------------------------------------------------ claims and controls


def _claims(shown: Shown) -> Iterator[str | Table]:
    """Yield the number of claims of each class.

    If the paper has few numbers, yield a table of these numbers and the results here. With `every`, yield all claims.
    """
    every = [v for v in claims.verdicts(shown.table, shown.about) if v.claim.paper is not None and v.says in SAYS]
    stated = [claim for claim in claims.claims_of(shown.about) if claim.paper is not None]
    if absent := dict.fromkeys(name for claim in stated for name in claims.lacking(claim, shown.about)):
        yield f"claims about systems that took no part are not judged: {', '.join(absent)}"
    if not every:
        return
    if shown.every:
        yield ""
        of = f" ({shown.about.paper})" if shown.about.paper else ""
        head, table = [f"claim{of}", "on", "paper", "here", "class", "holds if"], list[list[str]]()
        for v in every:
            axis, on = (v.panel["axis"], v.panel["condition"]) if v.panel else ("", NONE)
            what = claims.claim_text(v.claim, shown.about, axis)
            table.append([what, on, claims.paper_text(v.claim), v.text, v.says, v.rule])
        yield Table(head, table)
        reasons = dict[str, dict[str, None]]()  # each once, however many panels it is about
        for v in every:
            reasons.setdefault(v.claim.why, {})[v.says] = None
        yield from (f"{', '.join(says)}: {why}" for why, says in reasons.items() if why)
    elif 0 < len(few := [v for v in every if type(v.claim.paper) is float and v.here and not v.claim.evidence]) <= 8:
        rows = [[v.claim.label, claims.paper_text(v.claim), v.text.partition(" (")[0], v.says] for v in few]
        yield Table(["the paper's numbers", "paper", "here", "class"], rows)
    counts = {says: sum(v.says == says for v in every) for says in SAYS}
    whose = "the paper's claims" if shown.about.paper else "claims"
    yield f"{whose}, a panel each: " + "; ".join(f"{n} {says}" for says, n in counts.items() if n)


def _copies(shown: Shown) -> Iterator[str]:
    """Yield the A/A line: how many differences of the first system from its copy have an interval that covers 0.

    The copy runs on other seeds. The line also has the largest difference and its place, and the range of attainment of
    single windows at that place. Past the knee, this range is wide. Differences of single windows have no interval and
    do not count.
    """
    name = shown.about.systems[0]
    covers, largest = list[bool](), list[tuple[Estimate, str]]()
    for panel in shown.about.panels:
        rows = crossings.of_panel(shown.table, panel)
        for d in shown.about.definitions:
            ours, theirs = (by_window.curves(rows, system, d, "x") for system in (name, name + AA))
            for x in sorted({x for curve in theirs.values() for x in curve}):
                pair = [[curve[x] for curve in side.values() if x in curve] for side in (ours, theirs)]
                gap = statistics.paired(*(dict(enumerate(values)) for values in pair))
                if gap.low is not None and gap.high is not None:
                    covers.append(gap.low <= 0 <= gap.high)
                    ends = [100 * end for end in (min(map(min, pair)), max(map(max, pair)))]
                    unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
                    where = f"{d.upper()} of {panel['condition'].strip()} at {_at([x * unit], panel['axis'])}"
                    largest.append((gap, f"{where}, where single windows attain {ends[0]:.0f} to {ends[1]:.0f} %"))
    if covers:
        gap, where = max(largest, key=lambda entry: abs(entry[0].mean))
        yield (
            f"A/A: {name} against its copy on other seeds: {sum(covers)} of {len(covers)} differences cover 0; "
            f"the largest is {gap.times(100).text(POINTS)} points, {where}"
        )


def cpu_s(folder: Path, about: About) -> dict[str, float]:
    """Sum the CPU seconds of each system's runs, as stored in their folders."""
    spent: dict[str, float] = {}
    for run, name in about.runs.items():
        with suppress(ValueError, KeyError, TypeError):
            spent[name] = spent.get(name, 0.0) + float(record.side(folder.parent / run)["cpu_s"])
    return spent
