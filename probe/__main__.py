"""`python3 -m probe`: probe this machine's GPU within some minutes; call it again to resume.

With DEVICE=cpu, run only the duels, without a card. The law of rounds then predicts their times, so that the logic of
the duels can be tried.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from probe import conduct, duels, report, worker
from probe.plan import DRY, PLAN


def main(argv: list[str]) -> int:
    """Run the probes of this machine, or the worker or lane that the arguments name, and return the exit code.

    The code is 0 once the probes have run, even if some failed; the printed table shows which. It is 2 if there is no
    GPU to probe or if the folder's rows have an older form. It is 130 if interrupted.
    """
    if argv[:1] == ["worker"]:
        worker.main(argv[1], int(argv[2]))
        return 0
    if argv[:1] == ["lane"]:
        duels.lane(argv[1])
        return 0
    plan = DRY if os.environ.get("DEVICE") == "cpu" else PLAN
    names = [probe.name for probe in plan.probes]
    parser = argparse.ArgumentParser("probe", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all probes of this call (default 8)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of results (default results)")
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PROBE", help="no other probe")
    parser.add_argument("--again", nargs="+", default=(), choices=names, metavar="PROBE", help="also if it is done")
    parser.add_argument("--list", action="store_true", help="the probes, their seconds and what to expect")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write the README of a folder")
    args = parser.parse_args(argv)
    if args.list:
        for p in plan.probes:
            print(f"{p.name:10} {p.box_s:4.0f} s  {'alone  ' if p.alone else '       '}{p.expect}")
        return 0
    try:
        folder = args.report or conduct.conduct(plan, args.out, args.minutes, again=args.again, only=args.only)
        print(report.write(folder, plan))
    except (conduct.NoGpuError, conduct.OldRows) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: measurements are kept; the same command resumes there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
