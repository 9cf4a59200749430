"""A paper's figure, run again: every panel's grid of runs, scored into one table.

The table (`record.SWEEP` in the figure's folder) has a row a (panel, x, run, definition) and alone draws the figure;
its metadata holds what panels, caption and claims need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from harness.engines import sim
from harness.rows import record, tidy
from harness.run import score, sweep
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup, load_models, load_trace
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import Spec, canonical, digest
from harness.run.teller import Silent, Teller
from harness.study import panels, rates
from harness.study.bases import base_specs, slo_target
from harness.study.compare import Entry
from harness.study.figure import Figure, Row, Scope
from harness.study.panels import Cell, Grid, Panel
from workloads.slo import scaled

if TYPE_CHECKING:
    import pyarrow as pa

    from traces.load import Trace

TOP = 256.0  # rate scale, in multiples of the lowest, at which a search gives up


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A scored figure."""

    folder: Path
    table: pa.Table
    about: Mapping[str, Any]
    failed: Mapping[str, str] = field(default_factory=dict)  # systems that left the figure, as Failed has them


class _Counted:
    """A teller that remembers how much of a phase stood before."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self.phases: dict[str, tuple[int, int]] = {}

    def say(self, line: str) -> None:
        """See Teller."""
        self._teller.say(line)

    def progress(self, what: str, done: int, total: int) -> None:
        """See Teller."""
        self.phases.setdefault(what, (done, total))
        self._teller.progress(what, done, total)

    @contextmanager
    def step(self, name: str, words: Callable[[], str] = str) -> Iterator[None]:
        """Say a step's seconds once it is done, unless there was nothing to do."""
        before, begun = dict(self.phases), perf_counter()
        yield
        new = {what: phase for what, phase in self.phases.items() if what not in before}
        if not new or any(done < total for done, total in new.values()):
            self.say(f"{name:<12} {perf_counter() - begun:4.0f} s  {words()}".rstrip())


def reproduce(
    figure: Figure, out: Path, *, full: bool = False, workers: int | None = None, teller: Teller | None = None
) -> Reproduced:
    """Run and score a figure; what stands in `out` and is current is kept. Raises UserError.

    A system whose policy fails leaves the figure; Failed where none is left to stand first.
    """
    failed: dict[str, str] = {}
    figure, scope = figure.of(full), figure.full if full else figure.quick
    while True:
        work = _Work(figure, out, scope, full, workers, _Counted(teller or Silent()))
        try:
            if not failed:
                work.announce()
            return replace(work.done(), failed=failed)
        except Failed as why:  # again without it: finished runs cost nothing
            failed |= why.why
            gone = [x for x, entry in zip(figure.systems, work.entries, strict=True) if entry.label in failed]
            left = figure.without(gone) if gone else None
            if left is None:
                raise Failed(failed) from why
            figure = left


@dataclass(frozen=True)
class _Work:
    """One call of `reproduce`: its arguments, and its stages in order, each a method that runs what it needs."""

    figure: Figure
    out: Path
    scope: Scope
    full: bool
    workers: int | None
    teller: _Counted

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The contestants."""
        return panels.contestants(self.figure)

    def announce(self) -> None:
        """Say what the traces are, and which are stand-ins."""
        named = [load_trace(name) for name in self._asked()]
        for line in (*_described(named), *(trace.notice for trace in named if trace.notice)):
            self.teller.say(line)

    def done(self) -> Reproduced:
        """All of it, in order: bases, rates, the grid, the table."""
        if not sim.compiled():
            with self.teller.step("compile", lambda: "the simulator, once"):
                sweep.compile_once()
        grid = Grid(self.figure, self.scope, self.full, self.entries, self.measure_bases())
        with self.teller.step("rates", lambda: "as the figure says, by bisection, or doubled until each system falls"):
            grid = replace(grid, rates=self.search_rates(grid))
            grid = replace(grid, held=self.measure_held(grid))
        cells = grid.cells()
        with self.teller.step("grid"):
            self._run([cell.spec for cell in cells], self.figure.name)
        stood, total = self.teller.phases[self.figure.name]
        if all(done == of for done, of in self.teller.phases.values()):
            self.teller.say(f"{stood} of {total} points current, nothing to do")
        return self.score(grid, cells)

    # -------------------------------------------------------------- panels and their SLOs

    def measure_bases(self) -> tuple[Panel, ...]:
        """Every panel; their SLO bases are measured in one sweep."""
        asked = [
            (i, k, row, self._named(trace, models), models)
            for i, row in enumerate(self.figure.rows)
            for models in panels.sets(row, self.full)
            for k, trace in enumerate(panels.traces(self.figure, row))
        ]
        for _, _, row, trace, models in asked:  # a mistake shows before anything is run
            for entry in self.entries:
                here = replace(entry.spec, trace=trace, models=models, **row.spec)
                Setup(resolve(replace(here, gpus=max(row.gpus), slo=""))).jobs()
        scales: dict[Spec, set[float]] = {}  # of the SLO, by what its base is measured for; --full or not
        for _, _, row, trace, models in asked:
            all_of_row = row.along(full=True) if row.axis == "slo_scale" else row.slo_scale
            scales.setdefault(self._based(row, trace, models), set()).update(map(float, all_of_row))
        if self.figure.slo == "P95":
            with self.teller.step("SLO bases", lambda: f"P95 of {len(scales)} pairs of trace and models, each alone"):
                self._run([one for spec in scales for one in base_specs(spec)], "SLO bases")
        judges = {spec: self._judges(spec, each) for spec, each in scales.items()}
        return tuple(
            Panel(
                i, k, panels.family(row, models), trace, models, gpus, *self._window(row, trace, models),
                judges[self._based(row, trace, models)], len(panels.counts(row)) == 1,
            )
            for i, k, row, trace, models in asked
            for gpus in panels.counts(row)
        )  # fmt: skip

    def _named(self, trace: str, models: str) -> str:
        """The trace as runs of a set know it; a generator's as long as the window asked for."""
        trace = trace.replace("{models}", str(len(load_models(models).members)))
        first = replace(self.entries[0].spec, trace=trace, models=models)
        name = resolve(replace(first, gpus=panels.most_gpus(self.figure), slo="")).trace
        found = load_trace(name)
        if found.maker is None or found.span_s >= self.scope.window_s:
            return name
        return f"{found.maker}+span_s={self.scope.window_s:g}"

    def _based(self, row: Row, trace: str, models: str) -> Spec:
        """What the SLO base of a row's panel is measured for, on the simulator whatever the engine."""
        own = {key: value for key, value in row.spec.items() if key in {"assign", "pool_bytes"}}
        return replace(self.entries[0].spec, engine="sim", trace=trace, models=models, **own)

    def _judges(self, spec: Spec, scales: Iterable[float]) -> dict[float, SloTarget]:
        """The SLO at every scale."""
        quiet = Silent()
        return {s: slo_target(spec, scaled(self.figure.slo, s), self.out, teller=quiet) for s in sorted(scales)}

    def _window(self, row: Row, trace: str, models: str) -> tuple[float, float]:
        """Seconds that count, and requests per second at rate scale 1, in the mean over what seeds replay."""
        from workloads.build import rate_rps, window_fold, window_span_s

        found, first = load_trace(trace), self.entries[0].spec
        plan = row.plan or first.plan
        folds = {window_fold(found, first.seed + k, plan): first.seed + k for k in (1, 0)}
        each = [
            rate_rps(found, load_models(models), seed, plan)  # type: ignore[arg-type]  # checked by Spec
            for seed in folds.values()
        ]
        unit_rps = sum(each) / len(each)
        usual_s = self.scope.window_s if found.tier == "synthetic" else self.scope.replayed_s
        asked_s = row.window_s or usual_s or window_span_s(found, plan)
        fixed = [  # where the rate is no choice
            min(one.rate_rps) if one.rate_rps else min(one.rate_scale) * unit_rps
            for one in self.figure.rows
            if models in one.sets and (one.rate_rps or one.rate_scale)
        ]
        needed_s = (self.figure.requests / (self.scope.seeds * rps) for rps in fixed)
        return max([asked_s, *map(math.ceil, needed_s)]), unit_rps

    # -------------------------------------------------------------- rates

    def search_rates(self, grid: Grid) -> dict[tuple[str, str], tuple[float, ...]]:
        """Rate scales of each panel and contestant: as given, bisected, or doubled until it falls and sampled there.

        It has fallen below `LOW`, and `OCTAVES` above the lowest rate at the earliest: a dip is no fall.
        """
        every = [(panel, entry) for panel in grid.rated for entry in grid.of_row(panel)]
        given = {
            (panel.key, entry.label): found for panel, entry in every if (found := grid.row(panel).along(self.full))
        }
        given |= self.bisect_rates(grid)
        seen: dict[tuple[str, str], dict[float, Mapping[str, float]]] = {}
        rising = [(panel, entry) for panel, entry in every if (panel.key, entry.label) not in given]
        for times in (2.0**k for k in range(1 + round(math.log2(TOP)))):
            if not rising:
                break
            rated = [(panel, entry, times * grid.lowest(panel)) for panel, entry in rising]
            cells = [grid.cell(panel, entry, 0, **grid.at(panel, rate)) for panel, entry, rate in rated]
            scores = self._attained(cells, f"search, rate x {times:g}")
            for cell, shares in zip(cells, scores, strict=True):
                seen.setdefault((cell.panel, cell.label), {})[cell.x] = shares
            rising = [
                one
                for one, shares in zip(rising, scores, strict=True)
                if shares[self.figure.definitions[0]] >= rates.LOW or times < 2**rates.OCTAVES
            ]
        level = self.figure.level
        return given | {key: rates.grid(found, self.scope.rates, level) for key, found in seen.items()}

    def bisect_rates(self, grid: Grid) -> dict[tuple[str, str], tuple[float, ...]]:
        """Rate scales of each panel and contestant whose row gives rates in requests per second: these, then others.

        A step is a sweep of all seeds of the next rate of each (`rates.between`), until the scope's number of rates
        stands. One whose models do not fit is asked for no more.
        """
        decides = self.figure.definitions[:1]
        every = {(p.key, e.label): (p, e) for p in grid.rated if grid.row(p).rate_rps for e in grid.of_row(p)}
        seen: dict[tuple[str, str], dict[float, float]] = {key: {} for key in every}
        asked = {key: list(grid.fixed(panel)) for key, (panel, _) in every.items()}
        while any(asked.values()):
            cells = [
                cell
                for key, scales in asked.items()
                for x in scales
                for cell in grid.seeds(*every[key], **grid.at(every[key][0], x))
            ]
            rated = max(len(seen[key]) + len(scales) for key, scales in asked.items() if scales)
            folders = self._run([cell.spec for cell in cells], f"rates, up to {rated} each")
            shares: dict[tuple[str, str, float], list[float]] = {}
            ran: set[tuple[str, str]] = set()
            for cell, folder in zip(cells, folders, strict=True):
                share = score.attained(folder, cell.under, decides)[decides[0]]
                shares.setdefault((cell.panel, cell.label, cell.x), []).append(share)
                if score.ran(folder):
                    ran.add((cell.panel, cell.label))
            for (panel, label, x), each in shares.items():
                seen[panel, label][x] = sum(each) / len(each)
            asked = {key: self._next(grid, every[key][0], seen[key]) for key in asked if key in ran}
        return {key: tuple(sorted(found)) for key, found in seen.items()}

    def _next(self, grid: Grid, panel: Panel, seen: Mapping[float, float]) -> list[float]:
        """The rate scale to sample next, if any."""
        found = rates.between(seen, self.figure.level, rates.rounded(grid.least(panel)))
        return [] if found is None or len(seen) >= self.scope.rates else [found]

    def measure_held(self, grid: Grid) -> dict[str, float | None]:
        """By panel of rates, the highest rate scale at which the first system holds every definition, if any."""
        first = self.entries[0]
        cells = [
            cell
            for panel in grid.rated
            for x in grid.rates[panel.key, first.label]
            for cell in grid.seeds(panel, first, **grid.at(panel, x))
        ]
        scores = self._attained(cells, f"knee of {first.label}")
        own: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
        for cell, one in zip(cells, scores, strict=True):
            own.setdefault(cell.panel, []).append((cell.x, one))
        return {panel: rates.highest(found, self.figure.level) for panel, found in own.items()}

    def _attained(self, cells: Sequence[Cell], what: str) -> list[dict[str, float]]:
        """Run cells; their pooled attainment by definition."""
        folders = self._run([cell.spec for cell in cells], what)
        return [
            score.attained(folder, cell.under, self.figure.definitions)
            for folder, cell in zip(folders, cells, strict=True)
        ]

    def _run(self, specs: Sequence[Spec], what: str) -> list[Path]:
        return sweep.sweep(specs, self.out, workers=self.workers, teller=self.teller, what=what)

    # -------------------------------------------------------------- the table

    def score(self, grid: Grid, cells: Sequence[Cell]) -> Reproduced:
        """The figure's folder and table; scored anew only if a run, a rule or the scoring changed."""
        ready = sweep.tasks(cell.spec for cell in cells)
        pairs = list(zip(cells, ready, strict=True))
        asked = [[c.panel, c.x, c.label, c.under.rule, canonical(t.spec)] for c, t in pairs]
        seconds = [[panel.key, scale, one.seconds] for panel in grid.panels for scale, one in panel.judges.items()]
        folder = self.out / f"{self.figure.name}-{digest(record.dumps([asked, seconds]))}"
        about = self._about(grid, cells, ready)

        def make() -> pa.Table:
            with self.teller.step("scores"):
                return scored(cells, ready, self.out, self.figure.definitions, self.workers)

        table = score.kept(folder / record.SWEEP, about, ready, __file__, make)
        return Reproduced(folder, table, about)

    def _about(self, grid: Grid, cells: Sequence[Cell], ready: Sequence[Task]) -> dict[str, Any]:
        """What readers of the table need to know beside its rows."""
        named = {name: load_trace(name) for name in self._asked()}
        stand_ins = [f"{trace.name} stands in for {name}." for name, trace in named.items() if trace.notice]
        return {
            "figure": self.figure.name,
            "paper": self.figure.paper,
            "level": self.figure.level,
            "definitions": self.figure.definitions,
            "titles": self.figure.titles,
            "systems": [entry.label for entry in self.entries],
            "controls": [entry.label for entry in panels.controls(self.entries)],
            "seeds": self.scope.seeds,
            "fuller": "" if self.full else fuller(self.figure),
            "panels": grid.facts(),
            "claims": [asdict(claim) for claim in self.figure.claims],
            "notes": [*grid.notes(), *stand_ins, *self.figure.notes],
            "judges": judgements((c.under, t.spec.folder) for c, t in zip(cells, ready, strict=True)),
            "runs": dict(sorted((task.spec.folder, cell.label) for cell, task in zip(cells, ready, strict=True))),
        }

    def _asked(self) -> list[str]:
        """The traces as they were asked for, each once."""
        found: dict[str, None] = {}
        for row in self.figure.rows:
            count = str(len(load_models(panels.sets(row, self.full)[-1]).members))
            found |= dict.fromkeys(t.replace("{models}", count) for t in panels.traces(self.figure, row))
        return list(found)


def fuller(figure: Figure) -> str:
    """What --full has more of; empty where the quick scope is all there is."""
    return ", ".join(
        f"{more} {name}"
        for name in ("seeds", "rates")
        if (more := getattr(figure.full, name)) > getattr(figure.quick, name)
    )


def _described(named: Sequence[Trace]) -> Iterator[str]:
    """What the traces are, a line a kind."""
    kinds: dict[tuple[str, str], list[Trace]] = {}
    for trace in named:
        kinds.setdefault((trace.tier, trace.note), []).append(trace)
    for (tier, note), traces in kinds.items():
        text = ", ".join(trace.name for trace in traces) + f": {tier}" + (f" ({note})" if note else "")
        if len(traces) == 1 and (one := traces[0]):
            text += f", {len(one)} requests of {len(one.models)} models in {one.span_s:g} s"
        yield text


def schema() -> pa.Schema:
    """Columns of a figure's table: panel and x before those of `tidy.TABLE_SCHEMA`."""
    import pyarrow as pa

    word = tidy.TABLE_SCHEMA.field("run").type
    return pa.schema([("panel", word), ("x", pa.float64()), *tidy.TABLE_SCHEMA])


def scored(
    cells: Sequence[Cell], ready: Sequence[Task], out: Path, definitions: Collection[str], workers: int | None = None
) -> pa.Table:
    """The rows of all cells, pooled and over models, sorted by panel, x and spec; each run is scored once a rule."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kept = pa.array([*definitions, "both", "offered_rps", "undefined_tpot", *tidy.WEIGHTS, *tidy.CAPS], pa.string())
    plain = record.plain(schema())
    keys = [(task.spec.folder, cell.label, cell.under.rule) for cell, task in zip(cells, ready, strict=True)]

    def rows(cell: Cell, folder: str) -> pa.Table:
        found = tidy.score(score.scorable(cell.label, out / folder, cell.under), by_model=False)
        found = found.filter(pc.is_in(found["definition"].cast(pa.string()), kept))
        return found.cast(pa.schema([f for f in plain if f.name not in {"panel", "x"}]))

    with ThreadPoolExecutor(
        workers or sweep.cpus()
    ) as pool:  # threads: files and arrays leave the interpreter to the others
        once = {key: pool.submit(rows, cell, key[0]) for key, cell in dict(zip(keys, cells, strict=True)).items()}
    parts = []
    for cell, key in zip(cells, keys, strict=True):
        own = once[key].result()
        place = [pa.array([cell.panel] * len(own), pa.string()), pa.array([cell.x] * len(own), pa.float64())]
        parts.append(pa.Table.from_arrays([*place, *own.columns], schema=plain))
    order = [(name, "ascending") for name in ("panel", "x", *tidy.ORDER)]
    return pa.concat_tables(parts).sort_by(order).cast(schema()).combine_chunks()
