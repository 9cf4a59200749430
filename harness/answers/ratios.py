"""A study of ratios in words: a table with a row per condition, and sentences on which system is ahead where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from harness.answers.table import Table, joined
from harness.rows import by_window, crossings, estimate, ranking
from harness.rows.about import About, Panel
from harness.rows.estimate import NONE, RATIO
from harness.rows.ranking import STANDINGS, Standing, verdict_text
from harness.study import claims
from harness.study.study import START

Standings = Mapping[tuple[str, str, str], Standing]  # keyed by panel and the two systems
KINDS: Mapping[str, str] = {"base": "", "cumulative": "+ ", "alone": "only "}


def parts(about: About, table: pa.Table, standings: Standings, *, every: bool) -> Iterator[str | Table]:
    """Yield a table of ratios with a row per condition, and sentences on it; with `every` the rates too."""
    rules = dict.fromkeys(panel.get("slo", about.slo) for panel in about.panels)
    rule = about.slo if len(rules) == 1 else "each condition's SLO"
    goal = f"{100 * about.level:g} % {about.definitions[0].upper()} attainment at {rule}"
    yield f"{about.systems[0]} over each: ratios of the rates that hold {goal}"
    pairs = list(dict.fromkeys(key[1:] for key in standings))
    rated = list(about.systems) if every else []
    heads = [theirs if ours == about.systems[0] else f"{ours} / {theirs}" for ours, theirs in pairs]
    spread = every or about.layout == "steps"
    steps = every and about.layout == "steps"
    head = ["condition", *["origin"] * steps, *(f"{name} {of}" for name in rated for of in ("req/s", "worst")), *heads]
    lines = list[list[str]]()
    for panels in crossings.by_condition(about.panels):
        if len(panels) > 1 and not every:
            lines.append([panels[0]["name"], *(_range(_of_pair(standings, panels, pair)) for pair in pairs)])
            continue
        for panel in (panel for panel in panels if every or not panel.get("other_end")):
            rows = crossings.of_panel(table, panel)
            cells = [_short(standings.get((panel["condition"], *pair)), spread=spread) for pair in pairs]
            name = panel["name"] if len(panels) == 1 else panel["condition"]
            rates = [_rate(rows, panel, name, about, over) for name in rated for over in ("pooled", "worst")]
            lines.append([f"{KINDS.get(panel['kind'], '')}{name}", *[panel["origin"]] * steps, *rates, *cells])
    yield Table(head, lines).filled()
    for panel, *_ in crossings.by_condition(about.panels) if every else ():
        if not panel["source"] or panel["kind"] == "alone":
            continue
        origin = f"{panel['origin']}, " if panel["origin"] else ""
        slo = f"{panel['slo']}, " if panel["slo"] != about.slo else ""
        yield f"{panel['name']}: {origin}{slo}{panel['source']}"
    yield from sentences(about, standings)
    if any(len(panels) > 1 for panels in crossings.by_condition(about.panels)):
        yield "a range: cases of a real log, one window each, without interval (--all lists each)"


def _of_pair(standings: Standings, panels: Sequence[Panel], pair: Sequence[str]) -> list[Standing]:
    """Return the standings of a pair of systems, one for each of `panels` on which both ran."""
    ours, theirs = pair
    keys = ((panel["condition"], ours, theirs) for panel in panels)
    return [standings[key] for key in keys if key in standings]


def _range(standings: Sequence[Standing]) -> str:
    """Render the least and the greatest ratio of several standings."""
    c = ranking.cases(standings)
    return NONE if c is None else estimate.span(c.least, c.most, RATIO)


def borne_out(panels: Sequence[Panel], standings: Standings) -> Iterator[str]:
    """Yield a line that counts how many verdicts on synthetic traces are confirmed by real logs in the same setting.

    Only cases in which both systems fit are compared. Verdicts for which the logs have no such case are counted
    separately. Yield nothing if no verdict can be compared.
    """
    shares, apart = [], 0
    for panel in (panel for panel in panels if panel["tier"] == "synthetic"):
        logs = [
            log
            for log in panels
            if log["tier"] != "synthetic" and all(log[key] == panel[key] for key in ("models", "gpus", "own"))
        ]
        for (key, *pair), standing in standings.items():
            if key != panel["condition"] or not standing.says.startswith(("ahead", "behind", "equal")):
                continue
            every = _of_pair(standings, logs, pair)
            if (c := ranking.cases([s for s in every if "does not fit" not in s.note])) is not None:
                shares.append(c.agree(standing.says) / c.of)
            apart += bool(every) and c is None
    if shares:
        every_case, most = sum(share == 1.0 for share in shares), sum(0.5 < share < 1.0 for share in shares)
        yield (
            f"real logs on which both systems fit confirm {every_case} of {len(shares)} fitted verdicts in every case, "
            f"{most} in most, {len(shares) - every_case - most} in half or fewer"
            + (f"; {apart} more have none" if apart else "")
        )


def _short(pair: Standing | None, *, spread: bool) -> str:
    """Render the standing of two systems in a few letters, or "-" if one of them does not fit.

    With `spread`, intervals and differences are shown.
    """
    if pair is None or pair.says == ranking.NO_ROOM:
        return NONE
    if spread or pair.ratio is None:
        return verdict_text(pair)
    return f"{STANDINGS[pair.says][0]} {'flat' if pair.flat else pair.ratio.text(RATIO, spread=False)}"


def _rate(rows: pa.Table, panel: Panel, name: str, about: About, over: str) -> str:
    """Render the highest rate at which a system's attainment reaches the level.

    `over` says whether attainment is over all requests or that of the worst model. If the system's models fit with no
    seed, return a word that says so.
    """
    gone = by_window.unfit(rows, name)
    if gone and gone.every:
        return gone.word
    c = crossings.crossing(rows, panel, name, about.definitions[0], about.level, over)
    return NONE if c is None else c.at.text(spread=False)


def sentences(about: About, standings: Standings) -> Iterator[str]:
    """Say under which conditions the first system of each pair is ahead, behind, or neither."""
    panels = {panel["condition"]: panel for panel in about.panels}
    conditions = crossings.by_condition(about.panels)
    several = {panel["condition"] for of in conditions if len(of) > 1 for panel in of}
    for pair in dict.fromkeys(key[1:] for key in standings):
        ours = {key[0]: standing for key, standing in standings.items() if key[1:] == pair}
        by: dict[str, list[str]] = {word: [] for word in STANDINGS}
        for key, standing in ours.items():
            panel = panels[key]
            if key in several:
                continue
            named = START if panel["kind"] == "base" else f"{KINDS.get(panel['kind'], '')}{panel['name']}"
            by.setdefault(standing.note if "does not fit" in standing.note else standing.says, []).append(named)
        text = "; ".join(f"{word} under {joined(names)}" for word, names in by.items() if names)
        sides = {word.split(",")[0].split()[0] for word, names in by.items() if names and word in STANDINGS}
        turns = "depends on the condition: " if len(sides & {"ahead", "behind", "equal", "turns"}) > 1 else ""
        if (c := ranking.cases([standing for key, standing in ours.items() if key in several])) is not None:
            text += f"; in {c.of} cases of real logs above 1 in {c.above}, below in {c.below}"
        yield f"{' / '.join(pair)}: {turns}{text}."


def reached(about: About, standings: Standings) -> Iterator[str]:
    """Yield a line for each ratio that a paper states, with two numbers of conditions.

    The first number counts conditions whose whole interval is at or above the paper's ratio. The second counts
    conditions whose interval contains that ratio.
    """
    for claim in claims.claims_of(about):
        pair, paper = (claim.system, claim.over), claim.paper
        ours = [standing for key, standing in standings.items() if key[1:] == pair]
        if claim.what != "ratio" or not ours or not isinstance(paper, float | int):
            continue
        ratios = [ratio for standing in ours if (ratio := standing.decisive) is not None]
        there = sum(e.low is not None and e.low >= paper for e in ratios)
        may = sum((e.low is None or e.low < paper) and (e.high is None or e.high >= paper) for e in ratios)
        of = f"{len(ours)} condition{'s' * (len(ours) > 1)}"
        yield f"{' / '.join(pair)}, {paper:g} in the paper: reached under {there} of {of}, not excluded under {may}"
