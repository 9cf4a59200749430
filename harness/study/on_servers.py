"""The part of a figure that an engine in real time can run on this many GPUs, and the reason for each other part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.loop import engine as engines
from harness.loop.replay import missing
from harness.policy.types import Infeasible, Unsupported, UserError
from harness.run.resolve import traits
from harness.run.setup import Setup, blamed
from harness.run.spec import Spec
from harness.study import panels
from harness.study.figure import Figure


def part(figure: Figure, engine: str, table: str | None, gpus: int) -> tuple[Figure, Sequence[str]]:
    """The figure on an engine, with its cost table if there is one. UserError where nothing of it is left.

    SLO bases stay the simulator's, each model alone on a GPU: a host need not have a GPU a model for them.
    """
    engines.path(engine)
    wide = [i for i, row in enumerate(figure.rows, 1) if min(row.gpus) > gpus]
    rows = {
        i: replace(row, gpus=tuple(n for n in row.gpus if n <= gpus))
        for i, row in enumerate(figure.rows, 1)
        if i not in wide
    }
    notes = [f"skipped: row {i} needs {min(figure.rows[i - 1].gpus)} GPUs, there are {gpus}" for i in wide]
    if not rows:
        raise UserError(f"{figure.name}: no row runs on {gpus} GPUs")
    here = replace(figure.with_rows(rows), engine=engine, table=table)
    entries = panels.contestants(here)
    lacks = {name: _lack(entry.spec) for name, entry in zip(here.systems, entries, strict=True)}
    notes += [f"skipped: {name} on {engine}: no {why}" for name, why in lacks.items() if why]
    left = here.without([name for name, why in lacks.items() if why])
    if left is None:
        raise UserError("\n".join([*notes, f"{figure.name}: no system of it runs on {engine}"]))
    return left, notes


def _lack(spec: Spec) -> str:
    """What an engine lacks for a contestant, whatever the trace."""
    asked = replace(spec, trace="sample", gpus=8)
    with blamed(asked):
        try:
            setup = Setup(replace(asked, gpus=traits(asked).gpus))
            return ", ".join(missing(setup.policy, setup.engine))
        except (Unsupported, Infeasible) as why:
            return str(why)
