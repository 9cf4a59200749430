"""`python -m tests.fuzz [--group G] [--sample N] [--workers N]`: every bad end with its command, then the counts."""

from __future__ import annotations

import argparse
import pkgutil
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import tests.fuzz as package
from tests.fuzz import judge
from tests.fuzz.case import Case

SEED = 26
EVERY = 100  # cases between two lines of progress


def groups() -> list[str]:
    """Return the modules that hold cases, a group each."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "__main__")
    return [name for name in names if hasattr(import_module(f"tests.fuzz.{name}"), "cases")]


def cases(group: str, here: Path) -> Iterator[Case]:
    """Yield the cases of a group, the same ones always; files that they need are written below a folder."""
    (folder := here / group).mkdir(parents=True)
    yield from import_module(f"tests.fuzz.{group}").cases(folder, random.Random(f"{SEED} {group}"))


def main() -> int:
    """Run what was asked for; return 1 where any end is bad."""
    known = groups()
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("--group", choices=known, action="append", help="only this one (repeat)")
    asked.add_argument("--sample", type=int, metavar="N", help="so many of all, drawn alike in each call")
    asked.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    asked.add_argument("--workers", type=int, default=1, metavar="N")
    given = asked.parse_args()
    judge.warm()
    with TemporaryDirectory(prefix="fuzz-") as name:
        here = Path(name).resolve()
        every = [case for group in given.group or known for case in cases(group, here / "files")]
        every = [case for case in every if given.only in case.name]
        if given.sample is not None:
            every = random.Random(SEED).sample(every, min(given.sample, len(every)))
        ended, bad, cpu_s = Counter[str](), Counter[str](), 0.0
        for done, end in enumerate(judge.ends(every, here / "runs", given.workers), 1):
            group = end.case.name.partition("/")[0]
            ended[group] += 1
            cpu_s += end.cpu_s
            if why := end.bad:
                bad[group] += 1
                print(f"BAD {end.case.name}: {why}\n  {end.command}\n  {end.line[:300]}", flush=True)
            if done % EVERY == 0:
                print(f"{done} of {len(every)}, {bad.total()} bad, {cpu_s:.0f} s of processor time", flush=True)
    for group in ended:
        print(f"{group}: {ended[group]} cases, {bad[group]} bad")
    print(f"{ended.total()} cases, {bad.total()} bad")
    return int(bad.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
