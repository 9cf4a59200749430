"""Studies about measures, cut short: what tests of Weaver's, MuxServe's and PagedAttention's run; systems that drop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.study import load, measured
from harness.study.measure import Measured, measure
from harness.study.study import Study

# A system that drops every so manieth request: `share` of all, an expression of the rate of the forecast.
DROPS = '''
"""Drops some requests."""

from dataclasses import dataclass

from harness.policy.actions import Admit, Drop, Load, Run
from harness.policy.events import Arrived, Woke
from harness.policy.fields import number
from harness.policy.types import Batch, Cluster, Inst


@dataclass
class Drops:
    cluster: Cluster
    most_rps: float = number(1.0, 0, 1000)
    presets = {}
    hears = frozenset({Arrived, Woke})
    uses = frozenset({"Load", "Run", "Admit", "Drop"})
    options = {"kv": "paged"}

    def on(self, event, view):
        if event == Woke("start"):
            for name in self.cluster.models:
                batch = Batch(Inst(name, (0,)))
                yield Load(batch.inst)
                yield Run(batch)
        if isinstance(event, Arrived):
            rid = event.request.id
            rate = sum(one.rate_rps for one in self.cluster.plan.values())
            share = %s
            over = int(share * (rid + 1)) > int(share * rid)
            yield Drop(rid) if over else Admit(rid, Batch(Inst(event.request.model, (0,))))
'''


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
