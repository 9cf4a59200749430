"""Reference runs: one of each scenario, by whose rows a version can tell that the simulator still says the same."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from harness.rows import record
from harness.run import arithmetic
from harness.run.slo import SloTarget
from harness.run.sweep import sweep
from harness.study import grid
from harness.suite.score import identity, target
from harness.suite.suite import Scenario, Suite, study

SYSTEM = "prism"  # it has room in every scenario


def run(suite: Suite, scenario: Scenario, out: Path) -> tuple[str, str]:
    """Run a scenario once, at the rate at which its search begins, on public seeds.

    Return the SHA-256 of its rows, and digests of the sources and of the arithmetic that made them.
    """
    under = SloTarget(**target(suite, scenario, "", out))
    asked = study(replace(suite, seeds=1), scenario, SYSTEM)
    (panel,) = grid.panels(asked, full=False)
    panel = replace(panel, targets={panel.scale: under})
    spec = grid.Grid(asked, full=False, panels=(panel,)).point(panel, SYSTEM, 0, scenario.at_rps).spec
    (folder,) = sweep([spec], out, workers=1)
    rows = record.read(folder)
    text = record.dumps({name: rows[name].to_pylist() for name in rows.column_names})
    return sha256(text.encode()).hexdigest(), f"{identity(suite)}-{arithmetic.digest()[: arithmetic.SHOWN]}"
