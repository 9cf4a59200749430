"""Systems that plan from requests. For these, a trace is cut in two: one part to plan from, one part to replay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from harness.loop import system
from harness.policy.types import Infeasible, Plan, Unsupported
from harness.run.placement import started
from harness.run.resolve import unloaded
from harness.run.setup import Setup, blamed, load_models
from harness.run.spec import Spec
from traces.load import sized

NAMED = re.compile(r"\.plan\b")  # a file that names these may read forecasts later too


class Watched(Mapping[str, Plan]):
    """Forecasts that remember whether they were read."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans, self.read = plans, False

    def __getitem__(self, model: str) -> Plan:
        self.read = True
        return self._plans[model]

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)


def reads_plan(spec: Spec) -> bool:
    """Tell whether a spec's system uses forecasts: its file mentions `.plan`, or it reads forecasts at its start.

    Return True also if the system cannot start, because it is then unknown what it would read. Raises Failed if the
    system's file fails.
    """
    trace = sized(spec.trace, len(load_models(spec.models).members))
    with blamed(spec):
        return _reads(replace(unloaded(spec), engine="sim", trace=trace, plan="trace"))


@cache
def _reads(spec: Spec) -> bool:
    if NAMED.search(system.path(spec.system).read_text("utf-8")):
        return True
    setup = Setup(spec)
    try:
        plan = Watched(setup.cluster.plan)
        started(setup, system.build(setup.make_policy, replace(setup.cluster, plan=plan), setup.keywords))
    except (Infeasible, Unsupported):
        return True  # whether it reads them is not known
    return plan.read
