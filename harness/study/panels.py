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

from harness.rows.definitions import DEFINITIONS
from harness.run.resolve import traits
from harness.run.setup import load_models, load_trace
from harness.run.slo import SloTarget
from harness.run.spec import MACHINE, Spec, another, asked, from_dict
from harness.study.compare import AA, AA_SEED, CONTROLS, Entry
from harness.study.figure import Figure, Row, Scope
from harness.study.rates import rounded
from workloads.build import requests_seen, window_fold, window_span_s


class Panel(NamedTuple):
    """One trace and model set of a row, with what its runs share; along `models` a point, else all of a panel."""

    row: int
    column: int
    name: str  # of its sets
    trace: str
    models: str
    gpus: int  # along `gpus` the row's first
    window_s: float
    unit_rps: float  # requests per second at rate scale 1, in the mean over what seeds replay
    judges: Mapping[float, SloTarget]  # by SLO scale
    alone: bool = True  # no panel of the row differs in its GPUs alone

    @property
    def key(self) -> str:
        """How the table names it."""
        return f"{self.row + 1}/{self.column + 1}/{self.name}" + ("" if self.alone else f"/{self.gpus}")

    @property
    def size(self) -> int:
        """How many models."""
        return len(load_models(self.models).members)


class Cell(NamedTuple):
    """A run as a panel shows it at x, judged by its rule; one run may stand in many cells."""

    panel: str
    x: float
    label: str
    under: SloTarget
    spec: Spec


def contestants(figure: Figure) -> tuple[Entry, ...]:
    """The systems of a figure, on its machine."""
    by_token = any(DEFINITIONS[name].by_token for name in figure.definitions)
    common = {name: getattr(figure, name) for name in (*MACHINE, "engine", "table")} | {"token_times": by_token}
    specs = [from_dict({**asked(text), **common}) for text in figure.systems]
    return tuple(Entry(spec.label, spec) for spec in specs)


def controls(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Systems that contend for nothing, and the A/A copy of the first contestant."""
    label, first = entries[0]
    names = {entry.label for entry in entries}
    others = [Entry(bound.label, bound) for bound in (another(first, name) for name in CONTROLS)]
    copy = Entry(label + AA, replace(first, seed=first.seed + AA_SEED))
    return (*(entry for entry in others if entry.label not in names), copy)


def traces(figure: Figure, row: Row) -> tuple[str, ...]:
    """The traces of a row, as it or the figure names them."""
    return row.traces or figure.traces


def sets(row: Row, full: bool) -> tuple[str, ...]:
    """The model sets of a row: along its axis, or one a panel."""
    return row.along(full) if row.axis == "models" else row.models


def counts(row: Row) -> tuple[int, ...]:
    """The GPUs of a row's panels, one each; along them, a panel begins with the first."""
    return row.gpus[:1] if row.axis == "gpus" else row.gpus


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
    # by panel of rates: the highest rate scale at which the first system holds every definition, if any
    held: Mapping[str, float | None] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """Every cell of the figure; controls stand at the ends of the first system's axis, the A/A copy along rates.

        Where rates come by bisection the lower end is the highest that the first system holds.
        """
        found: list[Cell] = []
        for panel in self.panels:
            for entry in self.of_row(panel):
                for x in self._xs(panel, entry.label):
                    found += self.seeds(panel, entry, **self.at(panel, x))
            rated = self.row(panel).axis == "rate_scale"
            for entry in (one for one in controls(self.entries) if rated or not one.label.endswith(AA)):
                for x in sorted(self._ends(panel)):
                    found += self.seeds(panel, entry, **self.at(panel, x))
        return list({(one.panel, one.x, one.label, one.spec.seed): one for one in found}.values())

    def of_row(self, panel: Panel) -> tuple[Entry, ...]:
        """The contestants of a panel's row."""
        names = self.row(panel).systems or self.figure.systems
        return tuple(e for e, name in zip(self.entries, self.figure.systems, strict=True) if name in names)

    @cached_property
    def rated(self) -> tuple[Panel, ...]:
        """The panels along request rates."""
        return tuple(panel for panel in self.panels if self.row(panel).axis == "rate_scale")

    def least(self, panel: Panel) -> float:
        """The rate scale at which the windows of a point hold the requests asked for."""
        return self.figure.requests / (self.scope.seeds * panel.window_s * panel.unit_rps)

    def lowest(self, panel: Panel) -> float:
        """The lowest rate scale of a panel: the first fixed one, or the lowest power of 2 with requests enough."""
        return min(self.fixed(panel), default=2.0 ** math.ceil(math.log2(self.least(panel))))

    def fixed(self, panel: Panel) -> tuple[float, ...]:
        """The rate scales of the rates that a panel's row gives in requests per second."""
        return tuple(sorted(rounded(rps / panel.unit_rps) for rps in self.row(panel).rate_rps))

    def seeds(self, panel: Panel, entry: Entry, **at: Any) -> list[Cell]:
        """The cells of a contestant at a place of a panel, one a seed."""
        return [self.cell(panel, entry, seed, **at) for seed in range(self.scope.seeds)]

    def cell(self, panel: Panel, entry: Entry, seed: int, *, x: float, rate: float, gpus: int = 0,
             scale: float = 0.0) -> Cell:  # fmt: skip
        """One cell of a contestant at a place of a panel."""
        row = self.row(panel)
        under = panel.judges[scale or row.slo_scale[0]]
        cut = panel.window_s != self.span_s(panel)
        spec = replace(
            entry.spec,
            trace=panel.trace,
            models=panel.models,
            gpus=gpus or panel.gpus,
            rate_scale=rate,
            seed=entry.spec.seed + seed,
            window_s=panel.window_s if cut else None,
            warmup_s=self.figure.warmup_s if cut else None,
            **row.spec,
        )
        if not traits(spec).reads_slo:  # one run for all scales of the row: it drains as long as the largest needs
            scales = row.along(full=True) if row.axis == "slo_scale" else row.slo_scale
            spec = replace(spec, drain_s=max(panel.judges[float(s)].drain_s for s in scales))
        if row.axis == "gpus":
            x = float(traits(spec).gpus)  # dedicated takes as many as it needs
        return Cell(panel.key, x, entry.label, under, under.spec(spec))

    def at(self, panel: Panel, x: float) -> dict[str, Any]:
        """What x means on a panel's axis."""
        row = self.row(panel)
        if row.axis == "rate_scale":
            return {"x": x, "rate": x}
        own: dict[str, dict[str, Any]] = {"gpus": {"gpus": int(x)}, "slo_scale": {"scale": x}}
        return {"x": x, "rate": self._still(panel), **own.get(row.axis, {})}

    def row(self, panel: Panel) -> Row:
        """The row of a panel."""
        return self.figure.rows[panel.row]

    def plan(self, panel: Panel) -> str:
        """What planners see in a panel's row."""
        return self.row(panel).plan or self.entries[0].spec.plan

    def span_s(self, panel: Panel) -> float:
        """Seconds of a panel's trace that a seed replays."""
        return window_span_s(load_trace(panel.trace), self.plan(panel))

    def _held(self, panel: Panel) -> float:
        """The highest rate scale that the first system holds on a panel, or on the first one of its trace and set."""
        same = (one.key for one in self.rated if (one.trace, one.models) == (panel.trace, panel.models))
        key = panel.key if panel.key in self.held else next(same, "")
        return self.held.get(key) or self.lowest(panel)

    def _still(self, panel: Panel) -> float:
        """The rate scale of a panel that does not vary it."""
        row = self.row(panel)
        return row.rate_scale[0] if row.rate_scale else next(iter(self.fixed(panel)), 0.0) or self._held(panel)

    def _xs(self, panel: Panel, label: str) -> tuple[float, ...]:
        row = self.row(panel)
        if row.axis == "rate_scale":
            return self.rates[panel.key, label]
        return (float(panel.size),) if row.axis == "models" else row.along(self.full)

    def _ends(self, panel: Panel) -> set[float]:
        """The ends of the first system's axis, so far as they are this panel's."""
        xs = {x for one in self.panels if one.key == panel.key for x in self._xs(one, self.entries[0].label)}
        if self.row(panel).axis == "rate_scale" and self.row(panel).rate_rps:
            return {self._held(panel), max(xs)}
        return {min(xs), max(xs)}.intersection(self._xs(panel, self.entries[0].label))

    # -------------------------------------------------------------- what readers of the table need to know

    def facts(self) -> list[dict[str, Any]]:
        """Facts of each panel by name, in order; sets along an axis share a panel, told as its first one."""
        return list({panel.key: self._facts(panel) for panel in reversed(self.panels)}.values())[::-1]

    def _facts(self, panel: Panel) -> dict[str, Any]:
        row, trace, plan = self.row(panel), load_trace(panel.trace), self.plan(panel)
        fixed = math.nan if row.axis == "rate_scale" else self._still(panel)
        usual = next((one.slo_scale[0] for one in self.figure.rows if one.axis != "slo_scale"), row.slo_scale[0])
        at = {"rate_scale": self._held(panel), "slo_scale": usual}.get(row.axis)
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
            "own": row.own,
            "given": bool(row.rate_rps or row.rate_scale),
            "plan": plan,
            "count": None if sized else panel.size,
            "gpus": None if row.axis == "gpus" else panel.gpus,
            "slo_scale": None if row.axis == "slo_scale" else row.slo_scale[0],
            "rate_rps": None if row.axis == "rate_scale" else fixed * panel.unit_rps / (panel.size if sized else 1),
            "unit_rps": panel.unit_rps,
            "rates_rps": row.rate_rps if row.axis == "rate_scale" else (),
            "at": at,
            "window_s": panel.window_s,
            "seen": self._seen(panel),
        }

    def _seen(self, panel: Panel) -> list[list[int]]:
        """How many requests of each model planners see, most first: a list a fold where seeds replay either."""
        trace, models, plan = load_trace(panel.trace), load_models(panel.models), self.plan(panel)
        assign = self.row(panel).assign or self.entries[0].spec.assign
        found = {
            window_fold(trace, k, plan): requests_seen(trace, models, plan, k, assign)  # type: ignore[arg-type]  # checked
            for k in range(min(2, self.scope.seeds))
        }
        return [sorted(each, reverse=True) for each in found.values()]

    def notes(self) -> list[str]:
        """Say where a window is not the trace's own span, and where the first system holds the level nowhere."""
        return [*self._cuts(), *self._unheld()]

    def _cuts(self) -> list[str]:
        """Say where a window is not what a seed replays, or that not all of the trace."""
        found: dict[str, dict[str, None]] = {}
        for panel in self.panels:
            trace, span_s = load_trace(panel.trace), self.span_s(panel)
            words = ""
            if panel.window_s < span_s:
                words = f"windows cut to {panel.window_s:g} of {span_s:g} s."
            elif panel.window_s > span_s:
                words = f"{span_s:g} s repeated to fill {panel.window_s:g} s."
            elif span_s < trace.span_s:
                words = f"windows of {span_s:g} s, a half of the trace."
            found.setdefault(words, {})[trace.name] = None
        if len(found) == 1:
            return [words[:1].upper() + words[1:] for words in found if words]
        return [f"{name}: {words}" for words, names in found.items() if words for name in names]

    def _unheld(self) -> list[str]:
        """Say where the first system holds the level nowhere, so that other rows stand at its lowest rate."""
        first = self.entries[0].label
        found = (
            f"{first} holds {100 * self.figure.level:g} % at no rate on {load_trace(p.trace).name}, {short(p.models)}, "
            f"{p.gpus} GPU{'s' * (p.gpus > 1)}."
            for p in self.rated
            if self.held[p.key] is None
        )
        return list(dict.fromkeys(found))
