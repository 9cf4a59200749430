"""A policy that is tuned to the suite's public seeds: `python -m tests.tools.tune_to_seeds prism light,herds 200 DIR`.

It draws fields of a system as `bench tune` does, keeps the draw of the highest mean attainment just above the best
known rate, and prints the command of its scores: on these seeds, and on those of a beacon.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from harness.run import score
from harness.run.slo import SloTarget
from harness.run.sweep import sweep
from harness.study import grid
from harness.study.tune import drawn
from harness.suite import score as suites
from harness.suite.suite import load, study

ABOVE = 1.2  # times the best known rate, at which draws are told apart
SEEDS = 2


def main() -> None:
    """Search, and print the winner."""
    system, names, draws, out = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[4])
    suite = replace(load().only(names), seeds=SEEDS)
    tried = drawn(system, draws)
    met: list[list[float]] = [[] for _ in tried]
    for scenario in suite.scenario:
        rate = ABOVE * (scenario.best_rps or scenario.at_rps)
        under = SloTarget(**suites.target(suite, scenario, "", out))
        for k, fields in enumerate(tried):
            text = "+".join([system, *(f"{name}={value}" for name, value in fields.items())])
            asked = study(suite, scenario, text)
            (panel,) = grid.panels(asked, full=False)
            at = grid.Grid(asked, full=False, panels=(replace(panel, targets={panel.scale: under}),))
            (panel,) = at.panels
            (name,) = panel.specs
            runs = sweep([at.point(panel, name, seed, rate).spec for seed in range(SEEDS)], out, workers=1)
            met[k].append(fmean(score.attained(run, under, [scenario.definition])[scenario.definition] for run in runs))
    best = max(range(draws), key=lambda k: fmean(met[k]))
    text = "+".join([system, *(f"{name}={value}" for name, value in tried[best].items())])
    print(f"draw {best} of {draws}: {fmean(met[best]):.4f} meet their SLO, by the defaults {fmean(met[0]):.4f}")
    print(f"bench score '{text}' --only {','.join(names)} [--beacon HEX]")


if __name__ == "__main__":
    main()
