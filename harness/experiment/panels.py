"""The panels of a figure and the cells of its grid: which run stands at each x, and who judges it. Nothing is run here.

A `Grid` begins with the contestants and panels; the rates that a search finds, and then those that the first system
holds, complete it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from harness.experiment.compare import AA, AA_SEED, CONTROLS, Entry
from harness.experiment.figure import Figure, Row, Scope
from harness.experiment.lookup import models_of, trace_of
from harness.experiment.resolve import traits
from harness.experiment.slo import Judge
from harness.experiment.spec import MACHINE, Spec, asked, from_dict
from harness.rows import definitions


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


def contestants(figure: Figure) -> tuple[Entry, ...]:
    """The systems of a figure, on its machine."""
    by_token = not definitions.BY_TOKEN.isdisjoint(figure.definitions)
    common = {name: getattr(figure, name) for name in MACHINE} | {"token_times": by_token}
    specs = [from_dict({**asked(text), **common}) for text in figure.systems]
    return tuple(Entry(spec.label, spec) for spec in specs)


def controls(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Systems that contend for nothing, and the A/A copy of the first contestant."""
    label, first = entries[0]
    names = {entry.label for entry in entries}
    bounds = [from_dict({"trace": first.trace, **asked(name)}) for name in CONTROLS]
    others = [Entry(b.label, replace(first, system=b.system, preset=b.preset, fields=b.fields)) for b in bounds]
    copy = Entry(label + AA, replace(first, seed=first.seed + AA_SEED))
    return (*(entry for entry in others if entry.label not in names), copy)


def traces(figure: Figure, row: Row) -> tuple[str, ...]:
    """The traces of a row, as it or the figure names them."""
    return row.traces or figure.traces


def sets(row: Row, full: bool) -> tuple[str, ...]:
    """The model sets of a row: along its axis, or one a panel."""
    return row.along(full) if row.axis == "models" else row.models


def most_gpus(figure: Figure) -> int:
    """The largest machine of a figure."""
    return max(gpus for row in figure.rows for gpus in row.gpus)


def short(models: str) -> str:
    """A model set as panels and notes name it."""
    return Path(models).stem if models.endswith(".toml") else models


def family(row: Row, models: str) -> str:
    """How a panel names its set, or what its sets have in common."""
    heads = {short(one).partition("+models=")[0] for one in row.sets}
    return short(models) if row.axis != "models" else heads.pop() if len(heads) == 1 else "models"


@dataclass(frozen=True)
class Grid:
    """Contestants, panels and rates of a figure; `cells` are the runs that follow."""

    figure: Figure
    scope: Scope
    full: bool
    entries: tuple[Entry, ...]
    panels: tuple[Panel, ...]
    # by panel and contestant: its rate scales
    rates: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    # by trace and set: the highest rate scale at which the first system holds every definition, if any
    held: Mapping[tuple[str, str], float | None] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """Every cell of the figure; controls stand at the ends of the first system's axis, the A/A copy along rates."""
        found: list[Cell] = []
        for panel in self.panels:
            for entry in self.of_row(panel):
                for x in self._xs(panel, entry.label):
                    found += self.seeds(panel, entry, **self.at(panel, x))
            rated = self._row(panel).axis == "rate_scale"
            for entry in (one for one in controls(self.entries) if rated or not one.label.endswith(AA)):
                for x in sorted(self._ends(panel)):
                    found += self.seeds(panel, entry, **self.at(panel, x))
        return list({(one.panel, one.x, one.label, one.spec.seed): one for one in found}.values())

    def of_row(self, panel: Panel) -> tuple[Entry, ...]:
        """The contestants of a panel's row."""
        names = self._row(panel).systems or self.figure.systems
        return tuple(e for e, name in zip(self.entries, self.figure.systems, strict=True) if name in names)

    @cached_property
    def rated(self) -> tuple[Panel, ...]:
        """The panels along request rates."""
        return tuple(panel for panel in self.panels if self._row(panel).axis == "rate_scale")

    def lowest(self, panel: Panel) -> float:
        """The lowest power of 2 at which the window holds the requests asked for."""
        return float(2.0 ** math.ceil(math.log2(self.figure.requests / (panel.window_s * panel.unit_rps))))

    def seeds(self, panel: Panel, entry: Entry, **at: Any) -> list[Cell]:
        """The cells of a contestant at a place of a panel, one a seed."""
        return [self.cell(panel, entry, seed, **at) for seed in range(self.scope.seeds)]

    def cell(self, panel: Panel, entry: Entry, seed: int, *, x: float, rate: float, gpus: int = 0,
             scale: float = 0.0) -> Cell:  # fmt: skip
        """One cell of a contestant at a place of a panel."""
        row = self._row(panel)
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
            sharing=row.sharing or entry.spec.sharing,
        )
        if not traits(spec).reads_slo:  # one run for all scales of the row: it drains as long as the largest needs
            scales = row.along(full=True) if row.axis == "slo_scale" else row.slo_scale
            spec = replace(spec, drain_s=max(panel.judges[float(s)].drain_s for s in scales))
        if row.axis == "gpus":
            x = float(traits(spec).gpus)  # dedicated takes as many as it needs
        return Cell(panel.key, x, entry.label, under, under.spec(spec))

    def at(self, panel: Panel, x: float) -> dict[str, Any]:
        """What x means on a panel's axis."""
        row = self._row(panel)
        if row.axis == "rate_scale":
            return {"x": x, "rate": x}
        own: dict[str, dict[str, Any]] = {"gpus": {"gpus": int(x)}, "slo_scale": {"scale": x}}
        return {"x": x, "rate": self._fixed(panel), **own.get(row.axis, {})}

    def _row(self, panel: Panel) -> Row:
        return self.figure.rows[panel.row]

    def _fixed(self, panel: Panel) -> float:
        """The rate scale of a panel that does not vary it."""
        row = self._row(panel)
        if row.rate_scale:
            return row.rate_scale[0]
        return self.held[panel.trace, panel.models] or self.lowest(panel)

    def _xs(self, panel: Panel, label: str) -> tuple[float, ...]:
        row = self._row(panel)
        if row.axis == "rate_scale":
            return self.rates[panel.key, label]
        return (float(panel.size),) if row.axis == "models" else row.along(self.full)

    def _ends(self, panel: Panel) -> set[float]:
        """The ends of the first system's axis, so far as they are this panel's."""
        xs = {x for one in self.panels if one.key == panel.key for x in self._xs(one, self.entries[0].label)}
        return {min(xs), max(xs)}.intersection(self._xs(panel, self.entries[0].label))

    # -------------------------------------------------------------- what readers of the table need to know

    def facts(self) -> list[dict[str, Any]]:
        """Facts of each panel by name, in order; sets along an axis share a panel, told as its first one."""
        return list({panel.key: self._facts(panel) for panel in reversed(self.panels)}.values())[::-1]

    def _facts(self, panel: Panel) -> dict[str, Any]:
        row, trace = self._row(panel), trace_of(panel.trace)
        fixed = math.nan if row.axis == "rate_scale" else self._fixed(panel)
        usual = next((one.slo_scale[0] for one in self.figure.rows if one.axis != "slo_scale"), row.slo_scale[0])
        held = self.held.get((panel.trace, panel.models)) or self.lowest(panel)
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
            "sharing": row.sharing,
            "count": None if sized else panel.size,
            "gpus": None if row.axis == "gpus" else row.gpus[0],
            "slo_scale": None if row.axis == "slo_scale" else row.slo_scale[0],
            "rate_rps": None if row.axis == "rate_scale" else fixed * panel.unit_rps / (panel.size if sized else 1),
            "unit_rps": panel.unit_rps,
            "at": at,
            "window_s": panel.window_s,
        }

    def notes(self) -> list[str]:
        """Say where a window is not the trace's own span, and where the first system holds the level nowhere."""
        return [*self._cuts(), *self._unheld()]

    def _cuts(self) -> list[str]:
        """Say where a window is not the trace's own span."""
        found: dict[str, dict[str, None]] = {}
        for panel in self.panels:
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
            f"{first} holds {100 * self.figure.level:g} % at no rate on {trace_of(p.trace).name}, {short(p.models)}."
            for p in self.rated
            if self.held[p.trace, p.models] is None
        ]
