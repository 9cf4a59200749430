"""A paper's figure, run again: every panel's grid of runs, scored into one table, beside what the paper says.

The table (`record.SWEEP` in the figure's folder) has a row a (panel, x, run, definition) and alone draws the figure;
its metadata holds what panels, caption and claims need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.engines import sim
from harness.experiment import sweep
from harness.experiment.figure import Claim, Figure, Row, Scope
from harness.experiment.lookup import Failed, models_of, trace_of
from harness.experiment.resolve import resolve, traits
from harness.experiment.run import jobs_of
from harness.experiment.spec import MACHINE, Spec, asked, canonical, digest, from_dict
from harness.experiment.sweep import AA, AA_SEED, CONTROLS, LEVEL, LOW, Entry, Judge, Task, Teller
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.report import table
from harness.rows import metrics, record
from harness.rows.metrics import Crossing, Estimate

if TYPE_CHECKING:
    import pyarrow as pa

TOP = 256.0  # rate scale, in multiples of the lowest, at which a search gives up
OCTAVES = 2  # above the lowest rate that a system is run to, though it fell before
AXIS = {"rate_scale": "rate (req/s)", "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
SCORERS = (
    "rows/metrics.py",
    "rows/record.py",
    "experiment/sweep.py",
    "experiment/figure.py",
    "experiment/reproduce.py",
)


class Panel(NamedTuple):
    """One trace and model set of a row, with what its runs share; along `models` a point, else all of a panel."""

    row: int
    column: int
    name: str  # of its sets
    trace: str
    models: str
    window_s: float
    unit_rps: float  # requests per second at rate scale 1
    judges: Mapping[float, Judge]  # by SLO scale

    @property
    def key(self) -> str:
        """How the table names it."""
        return f"{self.row + 1}/{self.column + 1}/{self.name}"

    @property
    def size(self) -> int:
        """How many models."""
        return len(models_of(self.models).members)


class Cell(NamedTuple):
    """A run as a panel shows it at x, judged by its rule; one run may stand in many cells."""

    panel: str
    x: float
    label: str
    under: Judge
    spec: Spec


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
    while True:
        scope = figure.full if full else figure.quick
        work = _Work(figure, out, scope, full, workers, _Counted(teller or sweep.Silent()))
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
    """One call of `reproduce`: its arguments, and the stages that follow from them."""

    figure: Figure
    out: Path
    scope: Scope
    full: bool
    workers: int | None
    teller: _Counted

    # -------------------------------------------------------------- who, on what

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The contestants."""
        by_token = not metrics.BY_TOKEN.isdisjoint(self.figure.definitions)
        common = {name: getattr(self.figure, name) for name in MACHINE} | {"token_times": by_token}
        specs = [from_dict({**asked(text), **common}) for text in self.figure.systems]
        return tuple(Entry(spec.label, spec) for spec in specs)

    def _those(self, panel: Panel) -> tuple[Entry, ...]:
        """The contestants of a panel's row."""
        names = self.figure.rows[panel.row].systems or self.figure.systems
        return tuple(e for e, name in zip(self.entries, self.figure.systems, strict=True) if name in names)

    @cached_property
    def controls(self) -> tuple[Entry, ...]:
        """Those that stand at the ends of each axis, and contend for nothing."""
        label, first = self.entries[0]
        names = {entry.label for entry in self.entries}
        others = [Entry(name, replace(first, system=name, preset=None, fields=())) for name in CONTROLS]
        copy = Entry(label + AA, replace(first, seed=first.seed + AA_SEED))
        return (*(entry for entry in others if entry.label not in names), copy)

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """Every panel; their SLO bases are measured in one sweep."""
        named = {
            (t, m): self._named(t, m) for row in self.figure.rows for t in self._traces(row) for m in self._sets(row)
        }
        pairs = list(dict.fromkeys((trace, m) for (_, m), trace in named.items()))
        for trace, models in pairs:  # a mistake shows before anything is run
            for entry in self.entries:
                jobs_of(resolve(replace(entry.spec, trace=trace, models=models, gpus=_most(self.figure), slo="")))
        if self.figure.slo == "P95":
            with self.teller.step("SLO bases", lambda: f"P95 of {len(pairs)} pairs of trace and models, each alone"):
                bases = [one for t, m in pairs for one in sweep.base_specs(self._spec(t, m))]
                sweep.sweep(bases, self.out, workers=self.workers, teller=self.teller, what="SLO bases")
        judges = {pair: self._judges(*pair) for pair in pairs}
        return tuple(
            Panel(i, k, _family(row, models), trace, models, *self._window(trace, models), judges[trace, models])
            for i, row in enumerate(self.figure.rows)
            for models in self._sets(row)
            for k, trace in enumerate(named[asked_, models] for asked_ in self._traces(row))
        )

    def _traces(self, row: Row) -> tuple[str, ...]:
        return row.traces or self.figure.traces

    def _sets(self, row: Row) -> tuple[str, ...]:
        return row.along(self.full) if row.axis == "models" else row.models

    def _named(self, trace: str, models: str) -> str:
        """The trace as runs of a set know it; a generator's as long as the window asked for."""
        trace = trace.replace("{models}", str(len(models_of(models).members)))
        name = resolve(replace(self._spec(trace, models), gpus=_most(self.figure), slo="")).trace
        found = trace_of(name)
        if found.maker is None or found.span_s >= self.scope.window_s:
            return name
        return f"{found.maker}+span_s={self.scope.window_s:g}"

    def _spec(self, trace: str, models: str) -> Spec:
        return replace(self.entries[0].spec, trace=trace, models=models)

    def _judges(self, trace: str, models: str) -> dict[float, Judge]:
        """The SLO at every scale of a set, --full or not."""
        rows = [row for row in self.figure.rows if models in row.sets]
        scales = {
            float(s) for row in rows for s in (row.along(full=True) if row.axis == "slo_scale" else row.slo_scale)
        }
        quiet = sweep.Silent()
        return {
            s: sweep.judge(self._spec(trace, models), sweep.rule(self.figure.slo, s), self.out, teller=quiet)
            for s in sorted(scales)
        }

    def _window(self, trace: str, models: str) -> tuple[float, float]:
        """Seconds that count, and requests per second at rate scale 1."""
        from workloads.build import rate_rps

        found = trace_of(trace)
        unit_rps = rate_rps(found, models_of(models), self.entries[0].spec.seed)
        asked_s = self.scope.window_s if found.tier == "synthetic" else self.scope.replayed_s
        fixed = [min(row.rate_scale) for row in self.figure.rows if models in row.sets and row.rate_scale]
        needed_s = (self.figure.requests / (rate * unit_rps) for rate in fixed)  # where the rate is no choice
        return max([asked_s, *map(math.ceil, needed_s)]), unit_rps

    # -------------------------------------------------------------- rates

    def _rate_panels(self) -> list[Panel]:
        return [panel for panel in self.panels if self.figure.rows[panel.row].axis == "rate_scale"]

    def _lowest(self, panel: Panel) -> float:
        """The lowest power of 2 at which the window holds the requests asked for."""
        return float(2.0 ** math.ceil(math.log2(self.figure.requests / (panel.window_s * panel.unit_rps))))

    @cached_property
    def rates(self) -> Mapping[tuple[str, str], tuple[float, ...]]:
        """Rate scales of each panel and contestant: as given, or doubled until it falls, then sampled at its knee.

        It has fallen below `LOW`, and `OCTAVES` above the lowest rate at the earliest: a dip is no fall.
        """
        every = [(panel, entry) for panel in self._rate_panels() for entry in self._those(panel)]
        given = {
            (panel.key, entry.label): rates
            for panel, entry in every
            if (rates := self.figure.rows[panel.row].along(self.full))
        }
        seen: dict[tuple[str, str], dict[float, Mapping[str, float]]] = {}
        lowest = {panel.key: self._lowest(panel) for panel in self._rate_panels()}
        open_ = [(panel, entry) for panel, entry in every if (panel.key, entry.label) not in given]
        for times in (2.0**k for k in range(1 + round(math.log2(TOP)))):
            if not open_:
                break
            cells = [
                self._cell(panel, entry, 0, **self._at(panel, times * lowest[panel.key])) for panel, entry in open_
            ]
            scores = self._attained(cells, f"search, rate x {times:g}")
            for cell, score in zip(cells, scores, strict=True):
                seen.setdefault((cell.panel, cell.label), {})[cell.x] = score
            open_ = [
                one
                for one, score in zip(open_, scores, strict=True)
                if score[self.figure.definitions[0]] >= LOW or times < 2**OCTAVES
            ]
        level = self.figure.level
        return given | {key: grid(found, self.scope.rates, level) for key, found in seen.items()}

    @cached_property
    def held(self) -> Mapping[tuple[str, str], float | None]:
        """By trace and set, the highest rate scale at which the first system holds every definition, if any."""
        found: dict[tuple[str, str], float | None] = {}
        first = self.entries[0]
        cells = [
            cell for panel in self._rate_panels() for x in self.rates[panel.key, first.label]
            for cell in self._seeds(panel, first, rate=x, x=x)
        ]  # fmt: skip
        scores = self._attained(cells, f"knee of {first.label}")
        for panel in self._rate_panels():
            own = [(cell.x, score) for cell, score in zip(cells, scores, strict=True) if cell.panel == panel.key]
            found.setdefault((panel.trace, panel.models), highest(own, self.figure.level))  # of the first such row
        return found

    def _attained(self, cells: Sequence[Cell], what: str) -> list[dict[str, float]]:
        """Run cells; their pooled attainment by definition."""
        folders = sweep.sweep(
            [cell.spec for cell in cells], self.out, workers=self.workers, teller=self.teller, what=what
        )
        return [attained(f, cell.under, self.figure.definitions) for f, cell in zip(folders, cells, strict=True)]

    # -------------------------------------------------------------- the grid

    def _cell(self, panel: Panel, entry: Entry, seed: int, *, x: float, rate: float, gpus: int = 0,
              scale: float = 0.0) -> Cell:  # fmt: skip
        row = self.figure.rows[panel.row]
        under = panel.judges[scale or row.slo_scale[0]]
        cut = panel.window_s != trace_of(panel.trace).span_s
        spec = replace(
            entry.spec,
            trace=panel.trace,
            models=panel.models,
            gpus=gpus or row.gpus[0],
            rate_scale=rate,
            seed=entry.spec.seed + seed,
            window_s=panel.window_s if cut else None,
            warmup_s=self.figure.warmup_s if cut else None,
            process=row.process or entry.spec.process,
        )
        if not traits(spec).reads_slo:  # one run for all scales of the row: it drains as long as the largest needs
            scales = row.along(full=True) if row.axis == "slo_scale" else row.slo_scale
            spec = replace(spec, drain_s=max(panel.judges[float(s)].drain_s for s in scales))
        if row.axis == "gpus":
            x = float(traits(spec).gpus)  # dedicated takes as many as it needs
        return Cell(panel.key, x, entry.label, under, under.spec(spec))

    def _seeds(self, panel: Panel, entry: Entry, **at: Any) -> list[Cell]:
        return [self._cell(panel, entry, seed, **at) for seed in range(self.scope.seeds)]

    def _at(self, panel: Panel, x: float) -> dict[str, Any]:
        """What x means on a panel's axis."""
        row = self.figure.rows[panel.row]
        if row.axis == "rate_scale":
            return {"x": x, "rate": x}
        own: dict[str, dict[str, Any]] = {"gpus": {"gpus": int(x)}, "slo_scale": {"scale": x}}
        return {"x": x, "rate": self._fixed(panel), **own.get(row.axis, {})}

    def _fixed(self, panel: Panel) -> float:
        """The rate scale of a panel that does not vary it."""
        row = self.figure.rows[panel.row]
        if row.rate_scale:
            return row.rate_scale[0]
        return self.held[panel.trace, panel.models] or self._lowest(panel)

    def _xs(self, panel: Panel, label: str) -> tuple[float, ...]:
        row = self.figure.rows[panel.row]
        if row.axis == "rate_scale":
            return self.rates[panel.key, label]
        return (float(panel.size),) if row.axis == "models" else row.along(self.full)

    def _ends(self, panel: Panel) -> set[float]:
        """The ends of the first system's axis, so far as they are this panel's."""
        xs = {x for one in self.panels if one.key == panel.key for x in self._xs(one, self.entries[0].label)}
        return {min(xs), max(xs)}.intersection(self._xs(panel, self.entries[0].label))

    def cells(self) -> list[Cell]:
        """Every cell of the figure; controls stand at the ends of the first system's axis, the A/A copy along rates."""
        found: list[Cell] = []
        for panel in self.panels:
            for entry in self._those(panel):
                for x in self._xs(panel, entry.label):
                    found += self._seeds(panel, entry, **self._at(panel, x))
            rated = self.figure.rows[panel.row].axis == "rate_scale"
            for entry in (one for one in self.controls if rated or not one.label.endswith(AA)):
                for x in sorted(self._ends(panel)):
                    found += self._seeds(panel, entry, **self._at(panel, x))
        return list({(one.panel, one.x, one.label, one.spec.seed): one for one in found}.values())

    def announce(self) -> None:
        """Say what the traces are, and which are stand-ins."""
        for line in (*_described(self._asked()), *self._notices()):
            self.teller.say(line)

    def done(self) -> Reproduced:
        """All of it, in order: bases, rates, the grid, the table."""
        if not sim.compiled():
            with self.teller.step("compile", lambda: "the simulator, once"):
                sweep.compile_once()
        panels = self.panels
        with self.teller.step("rates", lambda: "as the figure says, or doubled until each system falls"):
            assert self.held is not None
        cells = self.cells()
        with self.teller.step("grid"):
            sweep.sweep([cell.spec for cell in cells], self.out, workers=self.workers, teller=self.teller,
                        what=self.figure.name)  # fmt: skip
        stood, total = self.teller.phases[self.figure.name]
        if all(done == of for done, of in self.teller.phases.values()):
            self.teller.say(f"{stood} of {total} points current, nothing to do")
        return self._scored(cells, panels)

    def _notices(self) -> list[str]:
        return [notice for name in self._asked() if (notice := trace_of(name).notice)]

    def _stand_ins(self) -> list[str]:
        """Say which fitted trace is there for which real one."""
        return [f"{trace_of(name).name} stands in for {name}." for name in self._asked() if trace_of(name).notice]

    def _asked(self) -> list[str]:
        counts = {row: str(len(models_of(self._sets(row)[-1]).members)) for row in self.figure.rows}
        return list(
            dict.fromkeys(t.replace("{models}", counts[row]) for row in self.figure.rows for t in self._traces(row))
        )

    # -------------------------------------------------------------- the table

    def _scored(self, cells: Sequence[Cell], panels: Sequence[Panel]) -> Reproduced:
        """The figure's folder and table; scored anew only if a run, a rule or the scoring changed."""
        import pyarrow.parquet as pq

        ready = sweep.tasks(cell.spec for cell in cells)
        asked_ = [[c.panel, c.x, c.label, c.under.rule, canonical(t.spec)] for c, t in zip(cells, ready, strict=True)]
        seconds = [[panel.key, scale, one.seconds] for panel in panels for scale, one in panel.judges.items()]
        sources = [(ROOT / "harness" / name).read_bytes().hex() for name in SCORERS]
        folder = self.out / f"{self.figure.name}-{digest(record.dumps([asked_, seconds]))}"
        about = self._about(cells, ready, panels)
        about["key"] = digest(record.dumps([sorted((t.spec.folder, t.code) for t in ready), sources, about]))
        path = folder / record.SWEEP
        if path.is_file():
            with suppress(Exception):  # whatever stands there, it is made anew
                if (pq.read_metadata(path).metadata or {}).get(b"key") == record.dumps(about["key"]).encode():
                    return Reproduced(folder, pq.read_table(path), about)
        with self.teller.step("scores"):
            rows = scored(cells, ready, self.out, self.figure.definitions, self.workers)
        record.write_table(path, rows, about)
        return Reproduced(folder, rows, about)

    def _about(self, cells: Sequence[Cell], ready: Sequence[Task], panels: Sequence[Panel]) -> dict[str, Any]:
        """What readers of the table need to know beside its rows."""
        return {
            "figure": self.figure.name,
            "paper": self.figure.paper,
            "level": self.figure.level,
            "definitions": self.figure.definitions,
            "titles": self.figure.titles,
            "systems": [entry.label for entry in self.entries],
            "controls": [entry.label for entry in self.controls],
            "seeds": self.scope.seeds,
            "panels": list({panel.key: self._panel(panel) for panel in reversed(panels)}.values())[::-1],
            "claims": [asdict(claim) for claim in self.figure.claims],
            "notes": [*self._cuts(panels), *self._unheld(), *self._stand_ins(), *self.figure.notes],
            "judges": sweep.judgements((c.under, t.spec.folder) for c, t in zip(cells, ready, strict=True)),
            "runs": dict(sorted((task.spec.folder, cell.label) for cell, task in zip(cells, ready, strict=True))),
        }

    def _panel(self, panel: Panel) -> dict[str, Any]:
        row, trace = self.figure.rows[panel.row], trace_of(panel.trace)
        fixed = math.nan if row.axis == "rate_scale" else self._fixed(panel)
        usual = next((one.slo_scale[0] for one in self.figure.rows if one.axis != "slo_scale"), row.slo_scale[0])
        held = self.held.get((panel.trace, panel.models)) or self._lowest(panel)
        at = {"rate_scale": held, "slo_scale": usual}.get(row.axis)
        sized = row.axis == "models"
        return {
            "panel": panel.key,
            "row": panel.row,
            "column": panel.column,
            "axis": row.axis,
            "trace": trace.name,
            "tier": trace.tier,
            "note": trace.note,
            "models": panel.name,
            "process": row.process,
            "count": None if sized else panel.size,
            "gpus": None if row.axis == "gpus" else row.gpus[0],
            "slo_scale": None if row.axis == "slo_scale" else row.slo_scale[0],
            "rate_rps": None if row.axis == "rate_scale" else fixed * panel.unit_rps / (panel.size if sized else 1),
            "unit_rps": panel.unit_rps,
            "at": at,
            "window_s": panel.window_s,
        }

    def _cuts(self, panels: Sequence[Panel]) -> list[str]:
        """Say where a window is not the trace's own span."""
        found: dict[str, dict[str, None]] = {}
        for panel in panels:
            trace = trace_of(panel.trace)
            words = ""
            if panel.window_s < trace.span_s:
                words = f"windows cut to {panel.window_s:g} of {trace.span_s:g} s."
            elif panel.window_s > trace.span_s:
                words = f"{trace.span_s:g} s repeated to fill {panel.window_s:g} s."
            found.setdefault(words, {})[trace.name] = None
        if len(found) == 1:
            return [words[:1].upper() + words[1:] for words in found if words]
        return [f"{name}: {words}" for words, names in found.items() if words for name in names]

    def _unheld(self) -> list[str]:
        """Say where the first system holds the level nowhere, so that other rows stand at its lowest rate."""
        first = self.entries[0].label
        return [
            f"{first} holds {100 * self.figure.level:g} % at no rate on {trace_of(p.trace).name}, {_short(p.models)}."
            for p in self._rate_panels()
            if self.held[p.trace, p.models] is None
        ]


def _most(figure: Figure) -> int:
    return max(gpus for row in figure.rows for gpus in row.gpus)


def _short(models: str) -> str:
    return Path(models).stem if models.endswith(".toml") else models


def _family(row: Row, models: str) -> str:
    """How a panel names its set, or what its sets have in common."""
    heads = {_short(one).partition("+models=")[0] for one in row.sets}
    return _short(models) if row.axis != "models" else heads.pop() if len(heads) == 1 else "models"


def _described(names: Sequence[str]) -> Iterator[str]:
    """What the traces are, a line a kind."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for trace in map(trace_of, names):
        kinds.setdefault((trace.tier, trace.note), []).append(trace)
    for (tier, note), traces in kinds.items():
        text = ", ".join(trace.name for trace in traces) + f": {tier}" + (f" ({note})" if note else "")
        if len(traces) == 1 and (one := traces[0]):
            text += f", {len(one)} requests of {len(one.models)} models in {one.span_s:g} s"
        yield text


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def grid(seen: Mapping[float, Mapping[str, float]], least: int, level: float = LEVEL) -> tuple[float, ...]:
    """Rates of a system whose attainment was seen at octaves: all of these, and finer ones around its knee.

    Finer from the last octave that it holds (`highest`) to the last one seen: halves, then quarters, ... of an octave
    until there are `least`, so that more rates hold the fewer ones. A system that fell at once is followed `OCTAVES`
    further.
    """
    low = min(seen)
    holds = highest(seen.items(), level) or low
    top = max(*seen, low * 2**OCTAVES)
    octaves = {low * 2.0**k for k in range(round(math.log2(top / low)) + 1)}
    span = round(math.log2(top / holds)) or 1
    for density in (2**k for k in count(1)):
        steps = [top * 2.0 ** (-k / density) for k in range(1, span * density) if k % density]
        rates = octaves | {float(f"{step:.3g}") for step in steps}
        if len(rates) >= least:
            return tuple(sorted(rates))
    raise AssertionError


def highest(seen: Iterable[tuple[float, Mapping[str, float]]], level: float) -> float | None:
    """The highest sampled rate at which the fit of the mean over seeds holds the level, by every definition; if any.

    It may dip below the level at a lower rate. `seen` are runs: a rate and what is attained there, by definition.
    """
    by_rate: dict[float, list[Mapping[str, float]]] = {}
    for rate, scores in seen:
        by_rate.setdefault(rate, []).append(scores)
    definitions = next(iter(by_rate.values()))[0]
    means = ({rate: _mean(one[d] for one in runs) for rate, runs in by_rate.items()} for d in definitions)
    held = [metrics.held(mean, level) for mean in means]
    return None if None in held else min(x for x in held if x is not None)


def attained(folder: Path, under: Judge, definitions: Collection[str]) -> dict[str, float]:
    """Pooled attainment of a run by definition; 0 where it could not run."""
    about = record.meta(folder)
    if about["skipped"] or about["infeasible"]:
        return dict.fromkeys(definitions, 0.0)
    spec = from_dict(about["spec"])
    rows = metrics.rows(record.read(folder))
    counted = metrics.in_window(rows, spec.window_s or math.inf)
    slo = metrics.limits(rows, sweep.limits(spec, under)).take(counted)
    offered = metrics.take(rows, counted)
    found = {name: metrics.DEFINITIONS[name](offered, slo) for name in definitions}
    if missing := next((name for name, scores in found.items() if scores is None), None):
        raise UserError(f"{folder.name} has no token times, which {missing} needs")
    return {name: metrics.share(scores) for name, scores in found.items() if scores is not None}


def schema() -> pa.Schema:
    """Columns of a figure's table: panel and x before those of `metrics.TABLE_SCHEMA`."""
    import pyarrow as pa

    word = metrics.TABLE_SCHEMA.field("run").type
    return pa.schema([("panel", word), ("x", pa.float64()), *metrics.TABLE_SCHEMA])


def scored(
    cells: Sequence[Cell], ready: Sequence[Task], out: Path, definitions: Collection[str], workers: int | None = None
) -> pa.Table:
    """The rows of all cells, pooled and over models, sorted by panel, x and spec; each run is scored once a rule."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kept = pa.array(
        [*definitions, "both", "offered_rps", "undefined_tpot", *metrics.WEIGHTS, *metrics.CAPS], pa.string()
    )
    plain = pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in schema()])
    keys = [(task.spec.folder, cell.label, cell.under.rule) for cell, task in zip(cells, ready, strict=True)]

    def rows(cell: Cell, folder: str) -> pa.Table:
        found = metrics.score(sweep.scorable(cell.label, out / folder, cell.under), by_model=False)
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
    order = [(name, "ascending") for name in ("panel", "x", *metrics.ORDER)]
    return pa.concat_tables(parts).sort_by(order).cast(schema()).combine_chunks()


# ------------------------------------------------------------------ crossings and claims


def of_panel(rows: pa.Table, panel: str) -> pa.Table:
    """A panel's rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return rows.filter(pc.equal(rows["panel"].cast(pa.string()), panel))


def where(rows: pa.Table, panel: Mapping[str, Any], label: str, definition: str, level: float) -> Crossing | None:
    """Where a label crosses the level on a panel, in units of its axis; None where it was not run."""
    c = metrics.crossed(rows, panel["axis"], label, definition, level)
    return c if c is None or panel["axis"] != "rate_scale" else c.times(panel["unit_rps"])


class Verdict(NamedTuple):
    """A claim beside what came out on one panel."""

    claim: Claim
    panel: Mapping[str, Any]
    here: str
    says: str  # of SAYS
    rule: str  # when it agrees


SAYS = {
    "agrees": "the rule in the last column holds",
    "differs": "it does not",
    "open": "it may, beyond the grid or with more seeds",
    "not comparable": "the paper leaves out what a comparison needs",
    "not run": "this system has no runs here",
}
RULES = {  # when a claim agrees, by what the paper gives and whether ours has an interval
    "reached": "every seed reaches it",
    "never": "no seed reaches it",
    "value": "ours is the paper's",
    "range": "ours lies in the paper's range",
    "value, interval": "our interval holds the paper's",
    "range, interval": "our interval meets the paper's",
}


def verdicts(found: Reproduced) -> list[Verdict]:
    """Every claim on every panel that it is about; of systems that take part."""
    about = found.about
    out = []
    for claim in (Claim(**one) for one in about["claims"]):
        who = {claim.system, claim.over or claim.system}
        if not who <= set(about["systems"]) or claim.definition not in about["definitions"]:
            continue
        for panel in about["panels"]:
            if panel["axis"] != claim.axis or not panel["trace"].startswith(claim.trace):
                continue
            anywhere = panel["row"] + 1 if panel.get("process") else 0  # the papers' rows have processes of their own
            if claim.row not in {anywhere, panel["row"] + 1} or claim.column not in {0, panel["column"] + 1}:
                continue
            here, says, rule = _verdict(claim, panel, of_panel(found.table, panel["panel"]), about["level"])
            if not claim.comparable:
                says, rule = "not comparable", table.NONE
            out.append(Verdict(claim, panel, here, says, rule))
    return out


def _verdict(claim: Claim, panel: Mapping[str, Any], rows: pa.Table, level: float) -> tuple[str, str, str]:
    """What came out, what it says of the claim, and by which rule; both from one estimate."""
    if isinstance(claim.paper, str):
        n, of = reached(rows, claim, level)
        here = f"reached by {n} of {of} seed{'s' * (of > 1)}" if of else table.NONE
        return here, judged_reach(claim.paper, n, of), RULES[claim.paper]
    if claim.over is None:
        c = where(rows, panel, claim.system, claim.definition, level)
        e = None if c is None else c.at
        here = _at(e, claim.axis)
    else:
        ours, theirs = (metrics.curves(rows, x, claim.definition, "x") for x in (claim.system, claim.over))
        e = metrics.crossing_ratio(ours, theirs, level) if ours.keys() & theirs.keys() else None
        here = _ratio(e)
    if e is None or (e.low is None and e.high is None):
        rule = RULES["range" if isinstance(claim.paper, tuple) else "value"]
    else:
        rule = RULES["range, interval" if isinstance(claim.paper, tuple) else "value, interval"]
    return here, judged(claim.paper, e), rule


def reached(rows: pa.Table, claim: Claim, level: float) -> tuple[int, int]:
    """How many seeds reach the level anywhere on the axis, by the fit of each, and of how many."""
    curves = metrics.curves(rows, claim.system, claim.definition, "x").values()
    harder = 1.0 if claim.axis in {"rate_scale", "models"} else -1.0  # the direction in which attainment falls
    held = [metrics.held({harder * x: y for x, y in curve.items()}, level) for curve in curves]
    return sum(x is not None for x in held), len(held)


def judged_reach(paper: str, n: int, of: int) -> str:
    """`agrees` where all seeds do as the paper says, `differs` where none does, else `open`; `n` of them reach."""
    as_said = n if paper == "reached" else of - n
    return "not run" if not of else "agrees" if as_said == of else "open" if as_said else "differs"


def judged(paper: float | tuple[float, float], here: Estimate | None) -> str:
    """`agrees` where the paper's value, or part of its range, lies in the interval (is it, without), else `differs`.

    `open` where a crossing lies beyond the grid and may be the paper's.
    """
    if here is None:
        return "not run"
    if here.sign == "~":
        return "open"
    low = -math.inf if here.sign == "<" else here.mean if here.low is None else here.low
    high = math.inf if here.sign == ">" else here.mean if here.high is None else here.high
    least, most = paper if isinstance(paper, tuple) else (paper, paper)
    if not (low <= most and least <= high):
        return "differs"
    return "agrees" if here.sign == "=" else "open"


# ------------------------------------------------------------------ text


def lines(found: Reproduced) -> Iterator[str]:
    """What is printed: a block of crossings a row, the claims beside the paper's, the controls."""
    for row in sorted({panel["row"] for panel in found.about["panels"]}):
        yield from _block(found, [panel for panel in found.about["panels"] if panel["row"] == row])
        yield ""
    yield from _claims(found)
    yield from _copies(found)


def _block(found: Reproduced, panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    about, axis = found.about, panels[0]["axis"]
    names = [d.upper() for d in about["definitions"]]
    each = [f"{panel['slo_scale']:g}x" for panel in panels if panel["slo_scale"]]
    fixed = f"SLO {' and '.join(dict.fromkeys(each))}" if each else "at the rate that the first system holds"
    gpus = "" if axis == "gpus" else f", {panels[0]['gpus']} GPUs"
    level = f"{100 * about['level']:g} %"
    holds = "holds" if axis in {"rate_scale", "models"} else "reaches"
    processes = f", processes: {process}" if (process := panels[0].get("process")) else ""
    yield f"{AXIS[axis]} at which each system {holds} {level} ({fixed}{gpus}{processes})"
    given = axis != "rate_scale"
    head = ["trace", "models", *["req/s each" if axis == "models" else "req/s"] * given, "system"]
    head += [cell for n in names for cell in (f"{level} {n}", "fails at", "dip %")]
    rows = [[*head, "|", "at", *(f"{n} %" for n in names), "loads", "evicts", "moved"]]
    for panel in panels:
        own = of_panel(found.table, panel["panel"])
        shown = _named(own, panel)
        for label in about["systems"]:
            crossed = [where(own, panel, label, d, about["level"]) for d in about["definitions"]]
            if not any(crossed):
                continue  # not of this row
            cells = [f"{panel['rate_rps']:.3g}", shown[label]] if given else [shown[label]]
            cells += [cell for c in crossed for cell in _crossing(c, axis)]
            rows.append([panel["trace"], panel["models"], *cells, "|", *_beside(own, panel, label, about)])
    columns = [x for x in zip(*rows, strict=True) if x[0] not in ASIDE or set(x[1:]) != {table.NONE}]
    yield from table.aligned(zip(*columns, strict=True))


ASIDE = ("fails at", "dip %")  # columns that are left out where they say nothing


def _named(rows: pa.Table, panel: Mapping[str, Any]) -> dict[str, str]:
    """A panel's labels, with their GPUs where these are not the panel's."""
    took: dict[str, set[int]] = {}
    for label, gpus in zip(rows["label"].to_pylist(), rows["gpus"].to_pylist(), strict=True):
        took.setdefault(label, set()).add(gpus)
    own = metrics.own_gpus(took, panel["gpus"])
    return {label: metrics.with_gpus(label, counts) if label in own else label for label, counts in took.items()}


def _crossing(c: Crossing | None, axis: str) -> list[str]:
    """A crossing, the first x that fails, and the deepest dip where there is one."""
    if c is None:
        return [table.NONE] * 3
    fails = None if c.fails is None else Estimate(c.fails, None, None, c.at.n)
    return [_at(c.at, axis), table.text(fails, COLUMN[axis]), f"{100 * c.dip:.1f}" if table.dips(c) else table.NONE]


def _at(e: Estimate | None, axis: str) -> str:
    """A crossing; where all that was asked is enough, "<" is "at most"."""
    text = table.text(e, COLUMN[axis])
    return text.replace("<", "≤") if axis in {"slo_scale", "gpus"} else text


COLUMN = {
    axis: table.Column(axis, "", "", unit, 1, True, "")
    for axis, unit in (("rate_scale", "req/s"), ("slo_scale", "x"), ("gpus", ""), ("models", ""))
}
SHARE = table.Column("", "", "", "%", 1, True, "")


def _beside(rows: pa.Table, panel: Mapping[str, Any], label: str, about: Mapping[str, Any]) -> list[str]:
    """Attainment at a telling x, and how often weights came, went and moved there: means over seeds."""
    curves = {d: metrics.curves(rows, label, d, "x") for d in (*about["definitions"], *metrics.WEIGHTS)}
    xs = sorted(set().union(*(curve for curve in curves[about["definitions"][0]].values())))
    if not xs:
        return ["-"] * (1 + len(curves))
    at = panel["at"]
    if at is None:  # where the first system crosses
        first = where(rows, panel, about["systems"][0], about["definitions"][0], about["level"])
        at = first.at.mean if first else xs[-1]
    x = max((one for one in xs if one <= at), default=xs[0])
    unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
    cells = [f"{x * unit:.3g}"]
    for d, curve in curves.items():
        values = [one[x] for one in curve.values() if x in one and not math.isnan(one[x])]
        share = d in about["definitions"]
        cells.append("-" if not values else f"{100 * _mean(values):.1f}" if share else f"{_mean(values):.0f}")
    return cells


def _claims(found: Reproduced) -> Iterator[str]:
    every = verdicts(found)
    if not every:
        return
    rows = [[f"claim ({found.about['paper']})", "trace", "models", "paper", "here", "verdict", "agrees if"]]
    for one in every:
        c = one.claim
        what = f"{100 * found.about['level']:g} % {c.definition.upper()}"
        kind = "rate" if c.axis == "rate_scale" else AXIS[c.axis]
        said = f"{c.system} / {c.over}, {kind} at {what}" if c.over else f"{c.system}, {AXIS[c.axis]} for {what}"
        numbers = c.paper if isinstance(c.paper, tuple) else (c.paper,)
        paper = "-".join(x if isinstance(x, str) else f"{x:g}{'x' if c.over else ''}" for x in numbers)
        rows.append([said, one.panel["trace"], one.panel["models"], paper, one.here, one.says, one.rule])
    yield from table.aligned(rows)
    for says, words in (("differs", "where it differs"), ("not comparable", "not comparable")):
        for why in dict.fromkeys(one.claim.why for one in every if one.claim.why and one.says == says):
            yield f"{words}: {why}"
    counts = {says: sum(one.says == says for one in every) for says in SAYS}
    yield "; ".join(f"{n} {says}: {SAYS[says]}" for says, n in counts.items() if n)


def _ratio(e: Estimate | None) -> str:
    if e is None:
        return table.NONE
    low, high = ("" if x is None else f"{x:.2f}" for x in (e.low, e.high))
    spread = (
        f" [{low} - {high}]" if low and high else f" [{low} or more]" if low else f" [up to {high}]" if high else ""
    )
    sign = "" if e.sign == "=" else e.sign
    part = f" ({e.cut} of {e.n} seeds)" if 0 < e.cut < e.n else ""
    value = e.edge if part and e.edge is not None else e.mean
    return f"{sign}{' ' * bool(part)}{value:.2f}x{part}{spread}"


def _copies(found: Reproduced) -> Iterator[str]:
    """The A/A line: how often the first system differs from its copy on other seeds by more than chance."""
    label = found.about["systems"][0]
    covers, worst = [], 0.0
    for panel in found.about["panels"]:
        rows = of_panel(found.table, panel["panel"])
        for d in found.about["definitions"]:
            ours, theirs = (metrics.curves(rows, name, d, "x") for name in (label, label + AA))
            for x in sorted({x for curve in theirs.values() for x in curve}):
                pair = [[curve[x] for curve in side.values() if x in curve] for side in (ours, theirs)]
                gap = metrics.paired(*(dict(enumerate(values)) for values in pair))
                worst = max(worst, abs(gap.mean))
                if gap.low is not None and gap.high is not None:
                    covers.append(gap.low <= 0 <= gap.high)
    if covers:
        yield (
            f"A/A: {label} against its copy on other seeds: {sum(covers)} of {len(covers)} differences cover 0, "
            f"the largest is {100 * worst:.2f} points"
        )
