"""More seeds for systems that are not yet told apart, until they are or a budget of requests is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from harness.rows import by_window
from harness.rows.crossings import EASES, RATED, reciprocal
from harness.study import enough
from harness.study.grid import Grid, Panel, Point
from harness.study.search import contends
from harness.study.study import BEST, Study, named, systems_of

Windows = dict[str, by_window.Windows]  # keyed by system: misses of its runs by seed and x


def refined(
    grid: Grid,
    points: Sequence[Point],
    run: Callable[[Sequence[Point], str, float], None],
    add: Callable[[Sequence[Point], dict[str, Windows]], None],
) -> list[Point]:
    """Run more seeds of systems that are not yet told apart, and return the added points.

    `points` are the runs so far. Each panel may spend the scope's budget of simulated requests, so that no panel
    depends on what is run for another. If the remaining budget does not suffice for all systems, it is spent on the
    study's own systems, without those that --full adds. `run` is called with points to run, a line that describes them,
    and the number of requests that may follow. `add` adds the misses of points to curves by panel.
    """
    panels, budget = {panel.key: panel for panel in grid.panels if tells(panel)}, grid.scope.budget
    new = [point for point in points if point.panel.key in panels]
    spent, known = dict.fromkeys(panels, 0.0), {(point.panel.key, point.spec) for point in points}
    curves, added, had = dict[str, Windows](), list[Point](), {point.place for point in points}
    for turn in count(1):
        add(new, curves)
        new, left = list[Point](), list[float]()  # the rest of the budget of each panel that goes on
        for key, panel in panels.items():
            for undecided in _more(grid, panel, curves.get(key, {})):
                more = [pair for pair in undecided if pair[0].place not in had]
                costs = {point.spec: requests for point, requests in more if (key, point.spec) not in known}
                if more and spent[key] + sum(costs.values()) <= budget:  # a run at several points counts once
                    spent[key] += sum(costs.values())
                    left.append(budget - spent[key])
                    new += [point for point, _ in more]
                    break
        if not new:
            break
        known |= {(point.panel.key, point.spec) for point in new}
        had |= {point.place for point in new}
        added += new
        what = f"{grid.study.name}, more seeds {turn}: {len(left)} of {len(panels)} panels not decided"
        run(new, what, sum(left))
    return added


def _more(grid: Grid, panel: Panel, curves: Mapping[str, by_window.Windows]) -> Iterator[list[tuple[Point, float]]]:
    """Yield batches of runs that may tell a panel's systems apart; each run comes with its number of requests.

    The first batch is for all systems, the second for the study's own systems. The caller takes the second batch if the
    first needs too many requests. Nothing is yielded if all systems are told apart.
    """
    study, scope = grid.study, grid.scope
    contend = [name for name in panel.specs if name in curves and contends(name)]
    usual = [name for name in contend if name not in set(named(study.more))]
    facts = {"axis": panel.axis, "xs": panel.xs, "unit_rps": panel.unit_rps}
    least, shown = grid.bounds(panel).least, reciprocal if panel.axis in EASES else float
    for names in dict.fromkeys((tuple(contend), tuple(usual))):
        if undecided_names := enough.unsettled(curves, facts, pairs(study, names), study.level, scope.precision):
            more = enough.more(curves, facts, dict(sorted(undecided_names.items())), scope.seeds, study.level, least)
            yield [(grid.point(panel, m.system, m.seed, shown(m.x)), m.requests) for m in more]


def tells(panel: Panel) -> bool:
    """Tell whether more seeds help to tell the systems of a panel apart.

    They help if each seed draws a window of its own, and if x is a rate or an SLO scale.
    """
    return panel.drawn and panel.axis in (*RATED, "slo_scale")


def pairs(study: Study, names: Sequence[str]) -> list[tuple[str, str]]:
    """List the pairs of systems to tell apart.

    These are the pairs of the first system and each other one, and the pairs whose ratios the study claims.
    """
    first, *others = names or [""]
    listed = [(first, name) for name in others]
    for claim in (c for c in study.claim if c.what == "ratio"):
        ours, theirs = ([name for part in systems_of(text) for name in part] for text in (claim.system, claim.over))
        files = {name.removeprefix(BEST) for name in theirs if name.startswith(BEST)}
        best = [name for name in names if study.systems.get(name, "").partition(":")[0].partition("+")[0] in files]
        listed += [(a, b) for a in ours for b in (*theirs, *best) if a in names and b in names]
    return list(dict.fromkeys(listed))
