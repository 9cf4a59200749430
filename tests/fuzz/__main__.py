"""Draw bad input and judge each end: `python -m tests.fuzz [GROUP ...] [--examples N] [--only TEXT] [--workers N]`.

Prints every bad end with its command, then the counts. A seed draws the same cases each time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import judge
from tests.fuzz.judge import Case

GROUPS = "options commands forms traces logs measured checkpoints results strangers servers process".split()
EXAMPLES = 800  # most cases that a group draws
EVERY = 100  # cases between two lines of progress


def drawn(group: str, here: Path, examples: int, start: int = 0) -> list[Case]:
    """Draw cases of a group, the same ones for a seed. What all of them read is written into an empty folder."""
    cases = list[Case]()
    (folder := here / group).mkdir(parents=True)

    @seed(start)
    @settings(max_examples=examples, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(import_module(f"tests.fuzz.{group}").cases(folder))
    def note(case: Case) -> None:
        cases.append(case)

    note()
    return list({case.name: case for case in cases}.values())


def main() -> int:
    """Run what was asked for; return 1 where any end is bad."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help="cases of a group, at most")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draw others")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    given_words = parser.parse_args()
    if unknown := set(given_words.groups) - {*GROUPS}:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    judge.warm()
    ended, bad = Counter[str](), Counter[str]()
    with TemporaryDirectory(prefix="fuzz-") as name:
        for group in given_words.groups or GROUPS:
            cases = drawn(group, Path(name).resolve(), given_words.examples, given_words.seed)
            cases = [case for case in cases if given_words.only in case.name]
            for end in judge.ends(cases, Path(name).resolve() / f"{group}-runs", given_words.workers):
                ended[group] += 1
                if end.bad:
                    bad[group] += 1
                    print(f"BAD {end.case.name}: {end.bad}\n  {end.command}\n  {end.line[:300]}", flush=True)
                if ended[group] % EVERY == 0:
                    print(f"{group}: {ended[group]} of {len(cases)}, {bad[group]} bad", flush=True)
            print(f"{group}: {ended[group]} cases, {bad[group]} bad", flush=True)
    print(f"{ended.total()} cases, {bad.total()} bad")
    return int(bad.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
