"""Measurement of a study: SLO bases, then rounds of runs until every curve is sampled, then one table of all points.

The table (`record.SWEEP` in the study's folder) has the rows of `tidy`. Two columns precede those of `tidy`: the key of
the panel (`condition`) and x. Figures are drawn from this table alone; its metadata has the facts of panels, captions
and claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.policy.types import UserError
from harness.rows import by_window, parts, record, tidy, whole
from harness.rows.about import About
from harness.rows.crossings import EASES, reciprocal
from harness.rows.stored import Stamp, stamp
from harness.run import crew, score, streams, sweep
from harness.run.setup import Failed, load_trace
from harness.run.slo import SloTarget
from harness.run.sources import Task
from harness.run.spec import Spec, canonical, digest, stored
from harness.run.teller import Silent, Teller
from harness.study import bound, facts, judges, receipt, seeds, table
from harness.study import grid as grids
from harness.study.counted import Counted
from harness.study.grid import Grid, Panel, Point
from harness.study.search import Ask, Shares, following, highest
from harness.study.study import Study

if TYPE_CHECKING:
    import pyarrow as pa

    from traces.load import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """A scored study."""

    study: Study
    folder: Path
    table: pa.Table
    about: About
    target: SloTarget  # the SLO of the first panel, at the scale that does not run along x
    reference: Spec  # the resolved spec of the first point, whose setting all runs of a comparison share
    failed: Mapping[str, str] = field(default_factory=dict)  # systems that left it, with reasons as in Failed

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of all runs: resolved specs and source hashes, as their folders store them."""
        facts_of_runs = (record.meta(self.folder.parent / run) for run in self.about.runs)
        return tuple(Task.of(stored(about["spec"]), about["code_hash"]) for about in facts_of_runs)

    @property
    def xs(self) -> tuple[float, ...]:
        """Every x at which some curve has a point."""
        return tuple(sorted(set(self.table["x"].to_pylist())))


def measure(
    study: Study,
    out: Path,
    *,
    full: bool = False,
    stem: str = "",
    target: SloTarget | None = None,
    workers: int | None = None,
    teller: Teller | None = None,
    watch: Callable[[Measured], None] | None = None,
) -> Measured:
    """Run and score a study below `out`. Stored results that are still current are used again.

    If there is a current receipt of the same call, only the table is read. The name of the study's folder begins with
    `stem` (empty: the study's name). `target` replaces the SLO of all panels. A system whose policy fails is dropped
    from the study. After each round of runs, `watch` is called with the results so far, which are not stored. Raises
    UserError; raises Failed as `without_failing` does.
    """
    failed: dict[str, str] = {}
    asked = study.of(full)
    counted = Counted(teller or Silent(), quiet=study.layout == "table")
    call = receipt.Call(asked, full, stem or study.name, target)
    if (stored := receipt.lookup(call, out)) and (done := _vouched(call, stored, counted)):
        return done
    begun_ns, digested = time_ns(), call.digest
    whole_work = Work(asked, out, full, call.stem, target, workers, counted, watch)

    def act(work: Work) -> Measured:
        for line in work.inputs if not failed else ():
            counted.note(line)
        with crew.shared():
            return replace(work.done(), failed=failed)

    measured = without_failing(whole_work, failed, act)
    if not failed:
        whole_work.vouch(call, digested, begun_ns, measured)
    return measured


def without_failing(work: Work, failed: dict[str, str], act: Callable[[Work], T]) -> T:
    """Return the result of `act` on a study's work; if a system's policy fails, repeat `act` without this system.

    The failing systems are added to `failed`. Raises Failed if no remaining system occurs in every condition, or if no
    system of the study is to blame. Also raises Failed if the study has the layout `parts` and its first system fails.
    """
    study = work.study
    while True:
        try:
            return act(work)
        except Failed as why:  # again without it: finished runs cost nothing
            known = set(failed)
            failed |= why.why
            gone = work.blamed(set(failed) - known)
            rest = work.study.without(gone)
            if not gone or rest is None or (study.layout == "parts" and study.first in gone):
                raise Failed(failed) from why
            work = replace(work, study=rest)


def _vouched(call: receipt.Call, kept: receipt.Receipt, teller: Counted) -> Measured | None:
    """Read the results of a study that has a current receipt; return None if its table is incomplete.

    Files that a killed process left unfinished in the study's folder are removed first.
    """
    whole.clean(kept.folder)  # a writer may have been killed once its file was in place
    path = kept.folder / record.SWEEP
    try:
        table, about = tidy.stored(path), About.read(path)
    except (OSError, UserError):
        return None
    for line in kept.notes:
        teller.note(line)
    teller.current(len(about.runs))
    return Measured(call.study, kept.folder, table, about, kept.target, kept.reference)


Curves = dict[tuple[str, str], dict[int, dict[float, Shares]]]  # keyed by panel and system: seed -> x -> attainment


class _Group(NamedTuple):
    """Systems of a panel whose curves are sampled together."""

    panel: Panel
    systems: tuple[str, ...]


class _Round(NamedTuple):
    """A run of a round: its group, the `Ask` that chose its x, and its point."""

    group: _Group
    ask: Ask
    x: float  # as asked; a system may take more GPUs
    seed: int
    point: Point


@dataclass(frozen=True, eq=False)
class Work:
    """One call of `measure`: its arguments, and one method for each of its stages."""

    study: Study
    out: Path
    full: bool
    stem: str
    target: SloTarget | None
    workers: int | None
    teller: Counted
    watch: Callable[[Measured], None] | None = None
    only: frozenset[str] | None = None  # keys of the panels that are worked on; None: all
    shard: str = "1-1"  # names the shard whose runs these are, in a partition
    _specs: dict[Spec, None] = field(init=False, default_factory=dict)  # specs that were run, or were current
    _stamps: dict[str, Stamp] = field(init=False, default_factory=dict)  # their rows' stamps by path below `out`
    _ran: dict[str, bool] = field(init=False, default_factory=dict)  # whether a run had room, by folder
    _bounds: dict[str, dict[str, Any] | None] = field(init=False, default_factory=dict)  # keyed by panel

    def done(self) -> Measured:
        """Run all stages: first panels and their SLOs, then curves, then bounds, and last the table."""
        grid = self.begun()
        with self.teller.step("runs"):
            points, grid = self.sampled(grid)
        measured = self.scored(grid, points)
        if all(done == of for done, of in self.teller.phases.values()):
            self.teller.current(len(measured.about.runs))
        return measured

    def begun(self) -> Grid:
        """Return the panels with their SLOs."""
        return Grid(self.study, self.full, self.judged())

    @cached_property
    def every(self) -> tuple[Panel, ...]:
        """All panels of the study, without their SLOs in seconds."""
        return tuple(grids.panels(self.study, self.full))

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The panels that this call measures, without their SLOs in seconds."""
        return tuple(panel for panel in self.every if self.only is None or panel.key in self.only)

    @cached_property
    def into(self) -> parts.Partition | None:
        """The partition that stores the runs of a study with more than `parts.MANY` runs.

        None for any other study: each of its runs has a folder.
        """
        runs = grids.planned(self.study, self.full, self.every)
        return parts.Partition(self.stem.replace("/", "-"), self.shard, runs) if runs > parts.MANY else None

    @cached_property
    def scores(self) -> table.Scores:
        """The scores of this call's runs."""
        return table.Scores(self.study, self.out, self.workers)

    @property
    def made(self) -> int:
        """The number of runs finished so far."""
        return len(self._stamps)

    def blamed(self, labels: Collection[str]) -> set[str]:
        """Return the systems of the study whose specs have one of these labels."""
        specs = ((name, spec) for panel in self.panels for name, spec in panel.specs.items())
        return {name for name, spec in specs if spec.label in labels}

    @cached_property
    def inputs(self) -> list[str]:
        """Lines that describe the traces, then those that replace missing traces, then the streams of the panels."""
        traces = [load_trace(name) for name in dict.fromkeys(panel.first.trace for panel in self.panels)]
        notices = dict.fromkeys(trace.notice for trace in self._traces().values() if trace.notice)
        return [*facts.described(traces), *notices, *streams.of_all(panel.first for panel in self.panels)]

    def vouch(self, call: receipt.Call, digested: str, begun_ns: int, measured: Measured) -> None:
        """Write the receipt of a finished call."""
        rules = {judge["rule"] for judge in measured.about.judges}
        traces = [name.replace("{models}", str(panel.size)) for panel in self.panels for name in panel.traces]
        answer = receipt.Receipt(measured.folder, measured.reference, measured.target, self.inputs)
        receipt.write(call, digested, begun_ns, answer, self._specs, rules, self._stamps, traces)

    def _traces(self) -> dict[str, Trace]:
        """Load the traces that panels ask for, keyed by the name that was asked for.

        Names with a placeholder, such as {models}, are left out.
        """
        names = dict.fromkeys(name for panel in self.panels for name in panel.traces)
        return {name: load_trace(name) for name in names if "{" not in name}

    def judged(self) -> tuple[Panel, ...]:
        """Return every panel with its SLO in seconds.

        If base runs are needed, those of all panels are done in one batch.
        """
        every = [(panel, spec) for panel in self.panels for spec in panel.specs.values()]
        for done, (panel, spec) in enumerate(every):  # a mistake shows before anything is run
            self.teller.planning(done, len(every))
            judges.check(self.study, panel, spec)
        self.teller.planning(len(every), len(every))
        if self.target is not None:
            return tuple(replace(panel, targets={panel.scale: self.target}) for panel in self.panels)
        by = judges.Judges(self.study, self.out, self.workers)
        if bases := by.base_runs(self.panels):
            words = f"P95 of each model alone, pairs of trace and models: {len(bases)}"
            with self.teller.step("SLO bases", lambda: words):
                self.run([base for pair in bases for base in pair], "SLO bases", shared=True)
        return tuple(map(by.judged, self.panels))

    # -------------------------------------------------------------- curves

    def sampled(self, grid: Grid) -> tuple[list[Point], Grid]:
        """Run every point of the study, and return the points and the grid with the rates found.

        A panel whose rate is the result of another panel's search runs after that search.
        """
        curves: Curves = {}
        points = self._searched(grid, [panel for panel in grid.panels if not panel.holds_rate], curves)
        grid = replace(grid, held=self._highest_held(grid, curves, points))
        points += self._searched(grid, [panel for panel in grid.panels if panel.holds_rate], curves)
        points += self._refined(grid, points)
        bounds = [point for panel in grid.panels for point in grid.bounding(panel, self.xs_of_first(panel, points))]
        if bounds:
            self.run([point.spec for point in bounds], "bounds")
        return list({point.place: point for point in (*points, *bounds)}.values()), grid

    def xs_of_first(self, panel: Panel, points: Sequence[Point]) -> tuple[float, ...]:
        """List the x of the study's first system in a panel, in rising order."""
        return tuple(sorted({p.x for p in points if p.panel is panel and p.system == self.study.first}))

    def _searched(self, grid: Grid, panels: Sequence[Panel], curves: Curves) -> list[Point]:
        """Run the curves of panels in rounds, until no curve needs another run. Return the final points."""
        groups = [group for panel in panels for group in self.groups(panel)]
        final: list[Point] = []
        seen: list[Point] = []
        for turn in count(1):
            asks = {group: self.ask(grid, group, curves) for group in groups}
            runs = [run for group, ask in asks.items() for run in runs_of(grid, group, ask)]
            if not runs:
                return final
            what = self.study.name if turn == 1 else f"{self.study.name}, round {turn}"
            searched = any(not ask.last for ask in asks.values())
            folders = self.run([run.point.spec for run in runs], what, math.inf if searched else self._budget(grid))
            room = self._heard(runs, folders, curves)
            seen += [run.point for run in runs]
            self._shown(grid, seen)
            final += [run.point for run in runs if not run.ask.first_seed]
            bisects = self.study.sample.rule == "bisect"  # a group without room is searched no further
            groups = [
                group for group in groups if group in room and not asks[group].last and (room[group] or not bisects)
            ]
        raise AssertionError

    def groups(self, panel: Panel) -> list[_Group]:
        """Split a panel's systems into the groups that are sampled together."""
        names = tuple(panel.specs)
        together = [names] if self.study.sample.each == "panel" else [(name,) for name in names]
        return [_Group(panel, some) for some in together]

    def ask(self, grid: Grid, group: _Group, curves: Curves) -> Ask:
        """Choose the next x to run for a group."""
        panel = group.panel
        sample = grid.sample(panel)
        known = {} if sample.rule == "fixed" else curves
        return following(sample, grid.bounds(panel), {name: known.get((panel.key, name), {}) for name in group.systems})

    def _heard(self, runs: Sequence[_Round], folders: Sequence[Path], curves: Curves) -> dict[_Group, bool]:
        """Add the attainment of a round's runs to `curves`, if later runs depend on it.

        Return, for each group, whether the models fit on the GPUs in at least one of its runs.
        """
        room: dict[_Group, bool] = {}
        new = {folder for folder in folders if folder.name not in self._ran}
        self._ran.update((folder.name, score.ran(folder)) for folder in sorted(new, key=sweep.part_order))
        decide = [k for k, run in enumerate(runs) if not run.ask.last or self._decides(run.point)]
        places = {k: self._place(runs[k].point, folders[k].name) for k in decide}
        self.scores.add(places.values(), Silent())
        for k, run in enumerate(runs):
            room[run.group] = room.get(run.group, False) or self._ran[folders[k].name]
            if k in places:
                scores = self.scores.known[places[k].key]
                counts = {name: table.counted(scores, name) for name in self.study.definitions}
                shares = {name: of.met if of else 0.0 for name, of in counts.items()}
                curves.setdefault((run.point.panel.key, run.point.system), {}).setdefault(run.seed, {})[run.x] = shares
        return room

    def _decides(self, point: Point) -> bool:
        """Tell whether a point's attainment helps to choose the rates at which controls run.

        This is true for the first system's points along rates, if the study has controls.
        """
        return bool(point.system == self.study.first and point.panel.axis == "rate_scale" and self.study.controls)

    def _budget(self, grid: Grid) -> float:
        """Return the number of simulated requests that this call may spend on more seeds, over all panels."""
        return float(grid.scope.budget * sum(map(seeds.tells, grid.panels)))

    def _refined(self, grid: Grid, points: Sequence[Point]) -> list[Point]:
        """Run more seeds of systems that are not yet told apart."""
        if not grid.scope.budget:
            return []
        so_far = list(points)

        def run(more: Sequence[Point], what: str, later: float) -> None:
            self.run([point.spec for point in more], what, later)
            so_far.extend(more)
            self._shown(grid, so_far)

        return seeds.refined(grid, points, run, self._counted)

    def _counted(self, points: Sequence[Point], curves: dict[str, dict[str, by_window.Windows]]) -> None:
        """Add the misses of the runs at `points` to `curves`, by panel and system.

        Misses are counted by the study's first definition of attainment.
        """
        definition = self.study.definitions[0]
        ready = sweep.tasks(point.spec for point in points)
        places = [self._place(point, task.folder) for point, task in zip(points, ready, strict=True)]
        self.scores.add(places, Silent())
        for point, place in zip(points, places, strict=True):
            counted = table.counted(self.scores.known[place.key], definition)
            if counted is not None and counted.offered:
                of = curves.setdefault(point.panel.key, {}).setdefault(point.system, {})
                seed = point.spec.seed - point.panel.specs[point.system].seed
                x = reciprocal(point.x) if point.panel.axis in EASES else point.x
                of.setdefault(seed, {})[x] = counted

    def _highest_held(self, grid: Grid, curves: Curves, points: Sequence[Point]) -> dict[str, float | None]:
        """Find, for each panel along rates, the highest x at which the first system reaches the level.

        It must reach the level by every definition of attainment; None if there is no such x.
        """
        highest_x: dict[str, float | None] = {}
        for panel in grid.panels:
            seen = curves.get((panel.key, self.study.first))
            if panel.axis == "rate_scale" and seen:
                xs = self.xs_of_first(panel, points)
                runs = [(x, curve[x]) for _, curve in sorted(seen.items()) for x in xs if x in curve]
                highest_x[panel.key] = highest(runs, self.study.level)
        return highest_x

    def run(self, specs: Sequence[Spec], what: str, later: float = 0.0, *, shared: bool = False) -> list[Path]:
        """Run specs and return their folders.

        `later` is the number of requests expected in later rounds, for the estimate of the remaining time. With
        `shared`, each run gets its own folder, even if this study stores runs in partitions, because other studies or
        shards use these runs too.
        """
        into = None if shared else self.into
        folders = sweep.sweep(
            specs, self.out, workers=self.workers, teller=self.teller, what=what, later=later, into=into
        )
        self._specs.update(dict.fromkeys(specs))
        files = {record.file(folder) for folder in set(folders)}
        self._stamps.update({path.relative_to(self.out).as_posix(): stamp(path) for path in files})
        return folders

    # -------------------------------------------------------------- the table

    def scored(self, grid: Grid, points: Sequence[Point]) -> Measured:
        """Write the study's folder and table; score the runs again only if a run, a rule or the scoring changed."""
        ready = sweep.tasks(point.spec for point in points)
        placed = [
            [p.panel.key, p.x, p.system, p.under.identity, canonical(t.spec)]
            for p, t in zip(points, ready, strict=True)
        ]
        seconds = [[panel.key, x, judge.seconds] for panel in grid.panels for x, judge in sorted(panel.targets.items())]
        folder = self.out / f"{self.stem}-{digest(record.dumps([sorted(placed, key=record.dumps), seconds]))}"
        about = self._about(grid, points, ready)

        def make() -> pa.Table:
            with self.teller.step("scores"):
                return self._table(points, ready, self.teller)

        made = score.table(folder / record.SWEEP, vars(about), ready, table.__file__, make)
        about = About.read(folder / record.SWEEP)
        return Measured(self.study, folder, made, about, _target(grid, points), ready[0].spec)

    def _place(self, point: Point, folder: str) -> table.Place:
        return table.Place(point.panel.key, point.x, point.system, point.under, folder)

    def _table(self, points: Sequence[Point], ready: Sequence[Task], teller: Teller) -> pa.Table:
        places = [self._place(p, t.folder) for p, t in zip(points, ready, strict=True)]
        return self.scores.table(places, teller)

    def _shown(self, grid: Grid, points: Sequence[Point]) -> None:
        """Call `watch` with the study's results so far."""
        if self.watch is not None:
            ready = sweep.tasks(point.spec for point in points)
            so_far = self._table(points, ready, Silent())
            about = replace(self._about(grid, points, ready), seeds=len({point.spec.seed for point in points}))
            self.watch(Measured(self.study, self.out, so_far, about, _target(grid, points), ready[0].spec))

    def _about(self, grid: Grid, points: Sequence[Point], ready: Sequence[Task]) -> About:
        stand_ins = {name: trace for name, trace in self._traces().items() if trace.notice}
        return facts.about(grid, self.stem, points, ready, stand_ins, self._bound(grid))

    def _bound(self, grid: Grid) -> dict[str, Any] | None:
        """Return the bound of a comparison along rates, as `bound.crossing` does; None if there is no bound."""
        (panel, *others), study = grid.panels, self.study
        if others or study.layout != "table" or panel.axis != "rate_scale" or len(panel.xs) == 1:
            return None
        if panel.key not in self._bounds:
            self._bounds[panel.key] = bound.crossing(
                lambda x, seed: grid.point(panel, study.first, seed, x).spec,
                panel.specs.values(),
                panel.seeds,
                panel.targets[panel.scale],
                study.definitions[0],
                study.level,
                self.out,
            )
        return self._bounds[panel.key]


def _target(grid: Grid, points: Sequence[Point]) -> SloTarget:
    """Return the SLO of the first panel at the panel's SLO scale; if it has none, return the SLO of the first point."""
    first = grid.panels[0]
    return first.targets.get(first.scale, points[0].under)


def runs_of(grid: Grid, group: _Group, ask: Ask) -> Iterator[_Round]:
    """Yield the runs that `ask` requests for a group."""
    for name, xs in ask.xs.items():
        for x in xs:
            for seed in group.panel.seeds[:1] if ask.first_seed else group.panel.seeds:
                yield _Round(group, ask, x, seed, grid.point(group.panel, name, seed, x))
