"""Plans of `bench validate --engine torch`: a short tier of some 40 minutes, and a full one that also judges aims.

The full tier takes hours. In both, the models are equal and get equal Poisson rates. Each device has memory for the
weights of its models and for the KV of a few requests of each. Memory and time are thus both scarce. The SLO allows for
the time of one load of weights from the host.
"""

from __future__ import annotations

import os
from dataclasses import replace

from harness.engines.costs import quantities
from harness.loop import system
from harness.policy.types import Infeasible, Unsupported, UserError
from harness.run.resolve import resolve
from harness.run.setup import blamed
from harness.run.spec import Spec, another
from harness.validate.predicted import Memory, Plan

# The seven that figure 7 and its neighbours compare, and dedicated serving.
EIGHT = ("dedicated", "static", "prism", "muxserve:plusplus", "qlm", "aegaeon", "weaver", "pdmux")
SHARES = (0.7, 1.0)
MEMORY = Memory(requests=8)
AGAIN = 2


def plan(engine: str, table: str, *, full: bool) -> Plan:
    """Return the plan of the full or the short tier, for the first shape in the cost table.

    Raises UserError if `table` is not a table that `bench calibrate torch` writes.
    """
    measured = quantities.machine(table)
    if measured is None:
        raise UserError(f"{table} is no table of devices; bench calibrate torch writes one")
    shape = next(iter(measured.steps))
    tier = Plan(
        engine, table, shape, EIGHT, (4,), SHARES, 5, 20.0, AGAIN, gpus=2, memory=MEMORY, drain_s=20.0, way="host"
    )
    if not full:
        return tier._replace(judged=False)
    systems = tuple(name for name in system.names() if name != "unshared")
    return tier._replace(systems=systems, counts=(4, 8), window_s=60.0, drain_s=30.0)


def runnable(tier: Plan) -> tuple[Plan, list[str]]:
    """Return the plan without the systems that this machine cannot run, and a line with the reason for each of them."""
    cores, reasons = len(os.sched_getaffinity(0)), dict[str, str]()
    for count in tier.counts:
        base = tier.spec(count, tier.engine)
        for text in tier.systems:
            if text not in reasons and (why := _lack(another(base, text), cores)):
                reasons[text] = why
    left = tuple(text for text in tier.systems if text not in reasons)
    return tier._replace(systems=left), [f"{text} is not run: {why}" for text, why in reasons.items()]


def _lack(spec: Spec, cores: int) -> str:
    """Return why a system cannot be measured on `cores` cores; "" if it can."""
    try:
        with blamed(spec):
            gpus = resolve(replace(spec, slo="absolute:ttft=1,tpot=1")).gpus
    except (Infeasible, Unsupported) as why:
        return str(why)
    return f"it takes {gpus} devices, each a core, and there are {cores}" if gpus > cores else ""
