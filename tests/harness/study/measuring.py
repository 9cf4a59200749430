"""Studies about measures, cut short: what tests of Weaver's, MuxServe's and PagedAttention's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.study import load, measured
from harness.study.measure import Measured, measure
from harness.study.study import Study


def short(name: str, only: Mapping[str, str], **spec: float) -> Study:
    """Return a study with these conditions and no others, each with this trace in place of its own."""
    study = load.study(name).only(list(only))
    plain = {key: value for key, value in study.vary.items() if key != "trace"}
    conditions = tuple(
        replace(c, spec={**c.spec, "trace": only[c.name]}, vary={k: v for k, v in c.vary.items() if k != "trace"})
        for c in study.condition
    )
    return replace(study, condition=conditions, vary=plain, spec={**study.spec, **spec})


def run(study: Study, out: Path, seeds: int = 1) -> Measured:
    """Run a study below a folder."""
    return measure(study.only(seeds=seeds), out, workers=1)


def value(of: Measured, condition: str, system: str, measure: str, model: str = "", seed: int = 0) -> float:
    """Return a measure of a system's run in a condition."""
    panels = [panel for panel in of.about.panels if panel["name"] == condition]
    return measured.column(of.about, of.table, panels[:1], system, measure, model)[seed]
