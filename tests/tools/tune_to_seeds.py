"""A policy that is tuned to the suite's public seeds: `python -m tests.tools.tune_to_seeds prism light,herds 200 DIR`.

It draws fields of a system as `bench tune` does, keeps the draw of the highest mean attainment just above the best
known rate, and prints the command of its scores: on these seeds, and on those of a beacon.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from harness.policy.types import Option
from harness.run import score
from harness.run.slo import SloTarget
from harness.run.spec import Spec
from harness.run.sweep import sweep
from harness.study import grid
from harness.study.tune import drawn
from harness.suite import score as suites
from harness.suite.suite import load, study

ABOVE = 1.6  # times the best known rate, at which draws are told apart
SEEDS = 2


def text(system: str, fields: Mapping[str, Option]) -> str:
    """Return a system with fields, as --systems takes it."""
    return "+".join([system, *(f"{name}={value}" for name, value in fields.items())])


def main() -> None:
    """Search, and print the winner."""
    system, names, draws, out = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[4])
    suite = replace(load().only(names), seeds=SEEDS)
    tried = drawn(system, draws)
    met: list[list[float]] = [[] for _ in tried]
    for scenario in suite.scenario:
        rate = ABOVE * (scenario.best_rps or scenario.at_rps)
        under = SloTarget(**suites.target(suite, scenario, "", out))
        specs = list[Spec]()
        for fields in tried:
            asked = study(suite, scenario, text(system, fields))
            (panel,) = grid.panels(asked, full=False)
            at = grid.Grid(asked, full=False, panels=(replace(panel, targets={panel.scale: under}),))
            (name,) = panel.specs
            specs += [at.point(at.panels[0], name, seed, rate).spec for seed in range(SEEDS)]
        runs = sweep(specs, out, workers=1)
        each = [score.attained(run, under, [scenario.definition])[scenario.definition] for run in runs]
        for k in range(draws):
            met[k].append(fmean(each[SEEDS * k : SEEDS * (k + 1)]))
    best = max(range(draws), key=lambda k: fmean(met[k]))
    print(f"draw {best} of {draws}: {fmean(met[best]):.4f} meet their SLO, by the defaults {fmean(met[0]):.4f}")
    print(f"bench score '{text(system, tried[best])}' --only {','.join(names)} [--beacon HEX]")


if __name__ == "__main__":
    main()
