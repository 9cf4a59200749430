"""A measured study in words: one block a condition, a table of ratios or of parts, then claims beside what came out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from harness.loop import vetted
from harness.report.commands import check_command
from harness.report.summary import dips
from harness.report.text_table import laid
from harness.rows import crossings, estimate, record, statistics, tidy
from harness.rows.crossings import STANDINGS, Panel
from harness.rows.estimate import NONE
from harness.rows.statistics import Crossing, Estimate
from harness.study import claims
from harness.study.claims import AXES, SAYS, STYLES, Verdict
from harness.study.study import AA, START, Claim

ASIDE = ("fails at", "dip %", "worst %", "SLO")  # columns that are left out where they say nothing
KINDS: Mapping[str, str] = {"base": "", "cumulative": "+ ", "alone": "only "}


class Shown(NamedTuple):
    """What text is made of: a study's table, its facts, and the folder of both."""

    table: pa.Table
    about: Mapping[str, Any]
    folder: Path
    markdown: bool = False

    def panels(self, row: int) -> list[Panel]:
        """The panels of a condition."""
        return [panel for panel in self.about["panels"] if panel["row"] == row]


def lines(shown: Shown) -> Iterator[str]:
    """What is printed of a study."""
    match shown.about["layout"]:
        case "steps" | "matrix":
            yield from _matrix(shown)
        case "parts":
            yield from _parts(shown)
        case _:
            yield from _blocks(shown)
    yield from unchecked_lines(shown.table)
    yield from _claims(shown)
    yield from _copies(shown)


# ------------------------------------------------------------------ crossings, a block a condition


def _blocks(shown: Shown) -> Iterator[str]:
    for row in sorted({panel["row"] for panel in shown.about["panels"]}):
        if row:
            yield ""
        yield from _block(shown, shown.panels(row))
    if shown.about["layout"] == "fleet":
        spent = cpu_s(shown.folder, shown.about)
        yield "CPU seconds of all runs: " + ", ".join(f"{name} {spent[name]:.0f}" for name in spent)
    yield from departures(shown.table)
    yield from (f"invalid: {label}: {why}" for label, why in tidy.invalid(shown.table).items())


def _block(shown: Shown, panels: Sequence[Panel]) -> Iterator[str]:
    about, axis = shown.about, panels[0]["axis"]
    level, names = f"{100 * about['level']:g} %", [d.upper() for d in about["definitions"]]
    several = len({panel["gpus"] for panel in panels}) > 1
    given = axis not in crossings.RATED
    yield _title(about, panels)
    head = ["trace", "models", "SLO", *["GPUs"] * several]
    head += [*["req/s each" if axis == "models" else "req/s"] * given, "system"]
    head += [cell for name in names for cell in (f"{level} {name}", "fails at", "dip %", "worst %")]
    head += ["below that", "each seed"] * (axis == "gpus")
    table = [[*head, "|", "at", *(f"{name} %" for name in names), "loads", "evicts", "moved"]]
    unfit: dict[str, tuple[tidy.Unfit, list[str]]] = {}  # by system: why on its first panel, and on which
    slos = {panel["slo"] for panel in about["panels"]}
    for panel in panels:
        rows = crossings.of_panel(shown.table, panel)
        labels = _labels(rows, panel)
        place = [panel["trace"], panel["models"], panel["slo"] if len(slos) > 1 else NONE,
                 *[str(panel["gpus"])] * several]  # fmt: skip
        for name in (*about["systems"], *_bounds(about)):
            crossed = [crossings.crossing(rows, panel, name, d, about["level"]) for d in about["definitions"]]
            if not any(crossed):
                continue  # not of this condition
            cells = [f"{panel['rate_rps']:.3g}", labels[name]] if given else [labels[name]]
            if gone := tidy.unfit(rows, name):
                some = "" if gone.every else f" with {gone.seeds} of {gone.of} seeds"
                unfit.setdefault(name, (gone, []))[1].append(", ".join(x for x in place if x != NONE) + some)
            if gone and gone.every:
                cells += [gone.word, *[NONE] * 3] * len(names) + [NONE] * 2 * (axis == "gpus")
                table.append([*place, *cells, "|", *[NONE] * (1 + len(names) + len(tidy.WEIGHTS))])
                continue
            bound = name not in about["systems"]  # it brings its own number of GPUs: not the least of many
            for d, c in zip(about["definitions"], crossed, strict=True):
                at = _plain(c) if bound else c
                cells += _crossing(at, tidy.worst(rows, _fitted(axis), name, d, about["level"]), axis)
            if axis == "gpus":
                cells += [NONE, NONE] if bound else [_below(rows, name, about), _each_seed(rows, name, about)]
            table.append([*place, *cells, "|", *_beside(rows, panel, name, about)])
    columns = [x for x in zip(*table, strict=True) if x[0] not in ASIDE or set(x[1:]) != {NONE}]
    yield from laid(zip(*columns, strict=True), markdown=shown.markdown)
    if axis in crossings.RATED:
        yield from _plateaus(shown, panels)
    for name, (gone, places) in unfit.items():
        yield f"{name} {gone.word} ({'; '.join(places)}): {gone.why}"


def _plateaus(shown: Shown, panels: Sequence[Panel]) -> Iterator[str]:
    """One line for each curve that lies on the level over an octave or more: its crossing is no number to quote."""
    about, level = shown.about, f"{100 * shown.about['level']:g} %"
    for panel in panels:
        rows = crossings.of_panel(shown.table, panel)
        for name in about["systems"]:
            for d in about["definitions"]:
                curves = tidy.curves(rows, name, d, "x")
                seeds = tidy.ran(rows, name)
                flat = statistics.plateau({seed: curve for seed, curve in curves.items() if seed in seeds},
                                          about["level"])  # fmt: skip
                if flat:
                    flat = flat.times(panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0)
                    yield (
                        f"{name} ({panel['trace']}, {panel['models']}) lies on {level} {d.upper()}: "
                        f"{100 * flat.low:.1f} to {100 * flat.high:.1f} % from {estimate.number(flat.first)} to "
                        f"{estimate.number(flat.last)} req/s"
                    )


def _title(about: Mapping[str, Any], panels: Sequence[Panel]) -> str:
    first, axis = panels[0], panels[0]["axis"]
    scales = dict.fromkeys(f"{panel['slo_scale']:g}x" for panel in panels if panel["slo_scale"])
    rate = "at a given rate" if first["given"] else "at the rate that the first system holds"
    fixed = f"SLO {' and '.join(scales)}" if scales else rate if axis == "slo_scale" else f"SLO {first['slo']}"
    counts = dict.fromkeys(panel["gpus"] for panel in panels)
    gpus = "" if axis == "gpus" else f", {' and '.join(map(str, counts))} GPU{'s' * (list(counts) != [1])}"
    holds = "holds" if axis in {*crossings.RATED, "models"} else "reaches"
    unit = " (req/s)" if axis in crossings.RATED else ""
    words = (tidy.machine(first["own"]), tidy.PLANS.get(first["own"].get("plan", "")))
    own = "".join(f", {word}" for word in words if word)
    if about["layout"] == "fleet":
        fixed, own = f"{first['trace']} ({first['tier']}) at {first['rate_rps']:.3g} req/s", ""
    what = f"{first['name']}: " if first["name"] else ""
    return f"{what}{AXES[axis]}{unit} at which each system {holds} {100 * about['level']:g} % ({fixed}{gpus}{own})"


def _fitted(axis: str) -> str:
    return "rate_scale" if axis == "rate_rps" else axis


def _bounds(about: Mapping[str, Any]) -> list[str]:
    """Bounds that stand in the table: of a fleet, whose bounds bring their own number of GPUs."""
    return list(about["controls"]) if about["layout"] == "fleet" else []


def _labels(rows: pa.Table, panel: Panel) -> dict[str, str]:
    """A panel's systems, with their GPUs where these are not the panel's."""
    took: dict[str, set[int]] = {}
    for name, gpus in zip(rows["label"].to_pylist(), rows["gpus"].to_pylist(), strict=True):
        took.setdefault(name, set()).add(gpus)
    own, late = tidy.own_gpus(took, panel["gpus"]), unchecked(rows)
    shown = {name: tidy.with_gpus(name, counts) if name in own else name for name, counts in took.items()}
    return {name: f"{label} (unchecked)" if name in late else label for name, label in shown.items()}


def _plain(c: Crossing | None) -> Crossing | None:
    """A crossing as a number alone, whatever lies beyond it."""
    return None if c is None else replace(c, at=Estimate(c.at.mean, None, None, c.at.n))


def _crossing(c: Crossing | None, worst: float | None, axis: str) -> list[str]:
    """A crossing, the first x that fails, the deepest dip where there is one, and the worst model."""
    if c is None:
        return [NONE] * 4
    fails = None if c.fails is None else Estimate(c.fails, None, None, c.at.n)
    dip = f"{100 * c.dip:.1f}" if dips(c) else NONE
    least = NONE if worst is None or math.isnan(worst) else f"{100 * worst:.1f}"
    return [estimate.text(c.at, STYLES[axis]), estimate.text(fails, STYLES[axis]), dip, least]


def _below(rows: pa.Table, name: str, about: Mapping[str, Any]) -> str:
    """What ends the fewest GPUs: on the next fewer that were tried the models have no room, or SLOs are missed."""
    at = statistics.fewest(tidy.curves(rows, name, about["definitions"][0], "x"), about["level"]).at
    own = rows.filter(pc.equal(rows["label"].cast(pa.string()), name))
    xs = sorted(set(own["x"].to_pylist()))
    fewer = xs[-1] if at.sign == ">" else max((x for x in xs if x < at.mean), default=None)
    if fewer is None:
        return NONE
    here = own.filter(pc.equal(own["x"], fewer))
    seeds = dict(zip(here["seed"].to_pylist(), here["infeasible"].to_pylist(), strict=True))
    gone = sum(why is not None for why in seeds.values())
    some = f" ({gone} of {len(seeds)} seeds)" if 0 < gone < len(seeds) else ""
    return f"does not fit{some}" if gone else "misses SLOs"


def _each_seed(rows: pa.Table, name: str, about: Mapping[str, Any]) -> str:
    """The fewest GPUs of each seed alone, from the least to the most."""
    curves = tidy.curves(rows, name, about["definitions"][0], "x")
    each = [statistics.fewest({seed: curve}, about["level"]).at for seed, curve in curves.items()]
    every = sorted(each, key=lambda e: (e.sign == ">", e.mean))
    ends = dict.fromkeys(estimate.text(e, STYLES["gpus"]) for e in (every[0], every[-1])) if every else {}
    return " to ".join(ends)


def _beside(rows: pa.Table, panel: Panel, name: str, about: Mapping[str, Any]) -> list[str]:
    """Attainment at a telling x, and how often weights came, went and moved there: means over seeds."""
    curves = {d: tidy.curves(rows, name, d, "x") for d in (*about["definitions"], *tidy.WEIGHTS)}
    xs = sorted(set().union(*(curve for curve in curves[about["definitions"][0]].values())))
    if not xs:
        return [NONE] * (1 + len(curves))
    at = _telling(rows, panel, name, about)
    x = max((x for x in xs if at is None or x <= at), default=xs[0])
    unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
    cells = [f"{x * unit:.3g}"]
    for d, curve in curves.items():
        values = [of_seed[x] for of_seed in curve.values() if x in of_seed and not math.isnan(of_seed[x])]
        mean = sum(values) / len(values) if values else math.nan
        cells.append(NONE if not values else f"{100 * mean:.1f}" if d in about["definitions"] else f"{mean:.0f}")
    return cells


def _telling(rows: pa.Table, panel: Panel, name: str, about: Mapping[str, Any]) -> float | None:
    """The x at which systems are shown beside their crossings: where the first one, or of a fleet each, crosses."""
    if panel["at"] is not None:
        return float(panel["at"])
    first = name if about["layout"] == "fleet" else about["systems"][0]
    c = crossings.crossing(rows, panel, first, about["definitions"][0], about["level"])
    return c.at.mean if c else None


def unchecked(rows: pa.Table) -> dict[str, str]:
    """Labels of systems whose file, as it is now, has not passed `bench check`, with the command that tries it."""
    pairs = dict(zip(rows.column("label").to_pylist(), rows.column("system").to_pylist(), strict=True))
    late = set(vetted.unchecked(pairs.values()))
    return {label: check_command(name) for label, name in pairs.items() if name in late}


def unchecked_lines(rows: pa.Table) -> list[str]:
    """One line a label that is marked `unchecked`: nothing says yet that it keeps the rules."""
    return [f"unchecked: {label}, {command}" for label, command in sorted(unchecked(rows).items())]


def departures(rows: pa.Table) -> list[str]:
    """One line a label whose engine is not its paper's."""
    pairs = zip(rows.column("label").to_pylist(), rows.column("departs").to_pylist(), strict=True)
    return [f"not as published: {label}, {why}" for label, why in dict(sorted((a, b) for a, b in pairs if b)).items()]


# ------------------------------------------------------------------ ratios, a row a condition


def _matrix(shown: Shown) -> Iterator[str]:
    about = shown.about
    goal = f"{100 * about['level']:g} % {about['definitions'][0].upper()} attainment at {about['slo']}"
    seeds = about["seeds"]
    yield f"rates (req/s) that hold {goal}, and their ratios: mean and 95 % interval of {seeds} seeds"
    ratios = [claim for claim in claims.claims_of(about) if claim.what == "ratio"]
    verdicts = {(v.claim.label, v.panel["condition"]): v for v in _ratios(shown) if v.panel}
    steps = about["layout"] == "steps"
    head = ["condition", *["origin"] * steps, *(f"{name} req/s" for name in about["systems"]),
            *(claim.label for claim in ratios)]  # fmt: skip
    table = [head]
    for panel in about["panels"]:
        rows = crossings.of_panel(shown.table, panel)
        rates = [_rate(rows, panel, name, about) for name in about["systems"]]
        cells = [_signed(verdicts[claim.label, panel["condition"]]) for claim in ratios]
        table.append([f"{KINDS.get(panel['kind'], '')}{panel['name']}", *[panel["origin"]] * steps, *rates, *cells])
    yield from laid(table, markdown=shown.markdown)
    for panel in (one for one in about["panels"] if one["source"] and one["kind"] != "alone"):
        origin = f"{panel['origin']}, " if panel["origin"] else ""
        slo = f"{panel['slo']}, " if panel["slo"] != about["slo"] else ""
        yield f"{panel['name']}: {origin}{slo}{panel['source']}"
    yield from sentences(shown)
    legend = ", ".join(f"{sign} {words}" for sign, words in STANDINGS.values())
    yield f"{len(about['runs'])} runs; {legend}"


def _ratios(shown: Shown) -> list[Verdict]:
    about = shown.about
    every = enumerate(claims.claims_of(about))
    return [v for i, claim in every if claim.what == "ratio" for v in claims.of_claim(shown.table, about, i)]


def stands(verdict: Verdict) -> str:
    """Who is ahead in a ratio, whatever the paper says of it."""
    if verdict.says in STANDINGS and verdict.rule == NONE and verdict.says != "open":
        return verdict.says
    return "open" if verdict.here is None else crossings.standing(verdict.here)


def _signed(verdict: Verdict) -> str:
    return f"{STANDINGS[stands(verdict)][0]} {verdict.text}"


def _rate(rows: pa.Table, panel: Panel, name: str, about: Mapping[str, Any]) -> str:
    """The rate at which a system holds the level; a note where it has no room for some seeds."""
    gone = tidy.unfit(rows, name)
    if gone and gone.every:
        return gone.word
    c = crossings.crossing(rows, panel, name, about["definitions"][0], about["level"])
    return NONE if c is None else estimate.text(c.at, spread=False)


def sentences(shown: Shown) -> Iterator[str]:
    """Where a claim of the paper holds; without one where the first system is ahead."""
    verdicts = _ratios(shown)
    for claim in (one for one in claims.claims_of(shown.about) if one.what == "ratio"):
        own = [v for v in verdicts if v.claim == claim]
        yield _ahead(claim, own) if claim.paper is None else _reached(claim, own)


def _reached(claim: Claim, own: Sequence[Verdict]) -> str:
    """Under which conditions a ratio is the paper's: beyond its interval, by its mean, or not excluded by it."""
    paper = claim.paper[0] if isinstance(claim.paper, tuple) else float(claim.paper or 0)
    kinds: dict[str, list[str]] = {"beyond the interval": [], "by the mean": [], "not excluded by the interval": []}
    beyond, mean, covers = kinds.values()
    for v in own:
        if v.here is None or v.panel is None or stands(v) == "open":
            continue
        name = START if v.panel["kind"] == "base" else f"{KINDS.get(v.panel['kind'], '')}{v.panel['name']}"
        if v.here.low is not None and v.here.low >= paper:
            beyond.append(name)
        elif v.here.mean >= paper:
            mean.append(name)
        elif v.here.high is None or v.here.high >= paper:
            covers.append(name)
    under = "; ".join(f"{words}: {', '.join(names)}" for words, names in kinds.items() if names)
    return f"{claim.label}, {paper:g} in the paper, of {len(own)} conditions: " + (under or "under none") + "."


def _ahead(claim: Claim, own: Sequence[Verdict]) -> str:
    """Where the first system is ahead, behind, or neither."""
    words = {"ahead": "ahead", "behind": "behind", "even": "no difference", "open": "undecided"}
    by: dict[str, list[str]] = {word: [] for word in words.values()}
    for v in own:
        if v.panel:
            none = v.here is None and "does not fit" in v.note
            by.setdefault(f"not compared ({v.note})" if none else words[stands(v)], []).append(str(v.panel["name"]))
    return f"{claim.label}: " + "; ".join(f"{word} under {_listed(names)}" for word, names in by.items() if names) + "."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


# ------------------------------------------------------------------ parts of a system, switched off


def _parts(shown: Shown) -> Iterator[str]:
    about, table = shown.about, shown.table
    definition, first = about["definitions"][0], about["systems"][0]
    seeds = f"{about['seeds']} seeds"
    yield (
        f"{definition.upper()} attainment (SLO {about['slo']}, {about['panels'][0]['models']}) with all parts, and the "
        f"points by which it changes without each [95 % interval, {seeds} paired]"
    )
    whole = {
        (panel["condition"], x): shares[""]
        for panel in about["panels"]
        for x, shares in sorted(crossings.by_model(crossings.of_panel(table, panel), first, definition).items())
    }
    rates = offered_rps(table)
    head = [f"{trace} {rates[trace, x]:.3g} req/s" for trace, x in _places(about, whole)]
    cells = [["switched off", *head, "loses most"],
             ["nothing", *(f"{100 * _mean(list(share.values())):.1f}" for share in whole.values()), ""]]  # fmt: skip
    for claim in _differences(about):
        losses = {(loss.panel["condition"], loss.x): loss for loss in claims.losses(table, about, claim)}
        if not losses:
            continue
        worst = max(losses.values(), key=lambda loss: loss.most.mean)
        most = f"{worst.model} {_points(-worst.most.mean)}" if worst.model else NONE
        cells.append([claim.subject, *(_change(losses[at].pooled) for at in whole), most])
    yield from laid(cells, markdown=shown.markdown)
    yield from (f"the paper, of {claim.subject}: {claim.says}" for claim in _differences(about) if claim.says)


def _differences(about: Mapping[str, Any]) -> list[Claim]:
    takes_part = set(about["systems"])
    return [c for c in claims.claims_of(about) if c.what == "difference" and {c.system, c.over} <= takes_part]


def _places(about: Mapping[str, Any], whole: Mapping[tuple[str, float], Any]) -> list[tuple[str, float]]:
    traces = {panel["condition"]: panel["trace"] for panel in about["panels"]}
    return [(traces[key], x) for key, x in whole]


def offered_rps(table: pa.Table) -> dict[tuple[str, float], float]:
    """Requests a second offered, by trace and x, mean over the runs."""
    frame = table.select(["trace", "x", "definition", "over", "value"]).to_pandas()
    own = frame[(frame["definition"] == "offered_rps") & (frame["over"] == "pooled")]
    return {(str(trace), float(x)): float(rows["value"].mean())
            for (trace, x), rows in own.groupby(["trace", "x"], observed=True)}  # fmt: skip


def _change(lost: Estimate) -> str:
    """What switching the part off makes of attainment, in points."""
    low, high = (None if x is None else -x for x in (lost.high, lost.low))
    return claims.points_text(Estimate(-lost.mean, low, high, lost.n))


def _points(share: float) -> str:
    return claims.points_text(Estimate(share, None, None, 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ------------------------------------------------------------------ claims and controls


def _claims(shown: Shown) -> Iterator[str]:
    every = [v for v in claims.verdicts(shown.table, shown.about) if v.claim.paper is not None and v.says in SAYS]
    if not every:
        return
    yield ""
    table = [[f"claim ({shown.about['paper']})", "on", "paper", "here", "verdict", "agrees if"]]
    for v in every:
        what = claims.claim_text(v.claim, shown.about, v.panel["axis"] if v.panel else "")
        table.append([what, on_text(v), claims.paper_text(v.claim), v.text, v.says, v.rule])
    yield from laid(table, markdown=shown.markdown)
    for says, words in (("differs", "where it differs"), ("not comparable", "not comparable")):
        yield from (f"{words}: {why}" for why in dict.fromkeys(v.claim.why for v in every if v.says == says) if why)
    counts = {says: sum(v.says == says for v in every) for says in SAYS}
    yield "; ".join(f"{n} {says}: {SAYS[says]}" for says, n in counts.items() if n)


def on_text(verdict: Verdict) -> str:
    """The panel of a verdict in few words."""
    return NONE if verdict.panel is None else str(verdict.panel["condition"])


def _copies(shown: Shown) -> Iterator[str]:
    """The A/A line: how often the first system differs from its copy on other seeds by more than chance."""
    name = shown.about["systems"][0]
    covers, worst = [], 0.0
    for panel in shown.about["panels"]:
        rows = crossings.of_panel(shown.table, panel)
        for d in shown.about["definitions"]:
            ours, theirs = (tidy.curves(rows, system, d, "x") for system in (name, name + AA))
            for x in sorted({x for curve in theirs.values() for x in curve}):
                pair = [[curve[x] for curve in side.values() if x in curve] for side in (ours, theirs)]
                gap = statistics.paired(*(dict(enumerate(values)) for values in pair))
                worst = max(worst, abs(gap.mean))
                if gap.low is not None and gap.high is not None:
                    covers.append(gap.low <= 0 <= gap.high)
    if covers:
        yield (
            f"A/A: {name} against its copy on other seeds: {sum(covers)} of {len(covers)} differences cover 0, "
            f"the largest is {100 * worst:.2f} points"
        )


def cpu_s(folder: Path, about: Mapping[str, Any]) -> dict[str, float]:
    """CPU seconds that the runs of each system took, as their folders say."""
    spent: dict[str, float] = {}
    for run, name in about["runs"].items():
        with suppress(OSError, ValueError, KeyError, TypeError):
            side = json.loads((folder.parent / run / record.SIDE).read_text("utf-8"))
            spent[name] = spent.get(name, 0.0) + float(side["cpu_s"])
    return spent
