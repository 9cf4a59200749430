"""Fill in what was found when a version of the suite is frozen: `python -m tests.tools.freeze_suite suite-1 DIR`.

From the table in results/suite: the best known rate, by whom, and the bound of each scenario. From runs below DIR: the
digest of each reference run. It prints the SHA-256 that harness/suite/suite.py holds from then on.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from harness import toml
from harness.rows import record
from harness.run import arithmetic
from harness.run.slo import SloTarget
from harness.run.sweep import sweep
from harness.study import grid
from harness.suite import table
from harness.suite.score import identity, target
from harness.suite.suite import HERE, Scenario, Suite, study
from tests import ROOT

FOUND = re.compile(r"^(best_rps|best|bound_rps|reference) = .*\n", re.MULTILINE)
SYSTEM = "prism"  # it has room in every scenario


def reference_run(suite: Suite, scenario: Scenario, out: Path) -> tuple[str, str]:
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


def main() -> None:
    """Write the file of a version."""
    version, out = sys.argv[1], Path(sys.argv[2])
    path = HERE / f"{version}.toml"
    text = FOUND.sub("", path.read_text("utf-8")).partition("\n[inputs]")[0]
    text = re.sub(r"^reference_code = .*\n", "", text, flags=re.MULTILINE)
    suite, rows = toml.read(path, Suite), table.read(ROOT / "results" / "suite" / f"{version}.parquet")
    code = ""
    for scenario in suite.scenario:
        digest, code = reference_run(suite, scenario, out)
        top = table.best(rows, scenario.name)
        most = next((row["bound_rps"] for row in rows if row["scenario"] == scenario.name), None)
        lines = [f'reference = "{digest}"']
        if top is not None:
            lines += [f"best_rps = {top['rps']:.4g}", f'best = "{top["entry"]}"']
        lines += [f"bound_rps = {most:.4g}"] if most else []
        spec = f'name = "{scenario.name}"\n'
        text = text.replace(spec, spec + "".join(f"{line}\n" for line in lines))
    text = text.replace("\n[[scenario]]", f'\nreference_code = "{code}"\n\n[[scenario]]', 1)
    text = text.replace("\n\nreference_code", "\nreference_code")
    names = {str(s.spec["models"]).partition("+")[0] for s in suite.scenario}
    gpus = {str(s.spec.get("gpu", "h100")) for s in suite.scenario}
    files = [*(f"workloads/sets/{name}.toml" for name in sorted(names)), *_beside(version)]
    files += [f"harness/engines/costs/tables/{gpu}.toml" for gpu in sorted(gpus)]
    inputs = (f'"{name}" = "{sha256((ROOT / name).read_bytes()).hexdigest()}"\n' for name in files)
    path.write_text(text + "\n[inputs]\n" + "".join(inputs), "utf-8")
    print(f'FROZEN = {{"{version}": "{sha256(path.read_bytes()).hexdigest()}"}}')


def _beside(version: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (*HERE.glob(f"{version}-*.toml"), *HERE.glob("*.parquet")))


if __name__ == "__main__":
    main()
