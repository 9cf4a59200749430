"""Options of every command, one odd value each beside a sound command line, and two at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz import odd
from tests.fuzz.judge import Case
from tests.fuzz.odd import words

COMPARE = tuple(words("compare --systems static !setting"))
DRY = (*COMPARE, "--dry-run")
COLUMNS = tuple(words("!columns"))  # name the columns of LOG
LOG = "t,m,p,o\n" + "".join(f"{k}.5,m{k % 2},{10 + k},{5 + k}\n" for k in range(20))
HERE = Path(__file__).parent
PAIRED = "compare study convert".split()


def put(here: Path) -> None:
    """Write the files that the command lines name."""
    shutil.copy(HERE / "sound/study.toml", here / "mine.toml")
    (here / "log.csv").write_text(LOG)
    (here / "empty").mkdir()


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw one odd value of one option, or two."""
    single, paired, shared = list[Case](), list[st.SearchStrategy[Case]](), dict[str, str]()
    for section in (HERE / "options.txt").read_text("utf-8").split("\n\n[")[1:]:
        (command, _, base), table = section.split("\n", 1)[0].partition("]"), section.split("\n", 1)[1]
        for name, rows in shared.items():
            table = table.replace(name, rows)
        if command.startswith("!"):
            shared[command] = table
            continue
        argv, options = tuple(words(base)), odd.options(table)
        single += [_case(command, argv, option, value) for option in options for value in (*option.wrong, *option.odd)]
        if command in PAIRED:
            two = st.lists(st.sampled_from(options).flatmap(_given), min_size=2, max_size=2)
            paired.append(two.map(partial(_pair, command, argv)))
    return st.one_of(*[st.sampled_from(single)] * 9, st.one_of(paired))


def _case(command: str, argv: tuple[str, ...], option: odd.Option, value: str) -> Case:
    name, wrong = f"options/{command} {option.name} {value[:40]!r} {len(value)}", value in option.wrong
    culprit = "UTF-8" if wrong and "\udcff" in value else option.culprit
    return Case(name, (*argv, option.name, value), culprit, accept=not wrong, put=put)


def _given(option: odd.Option) -> st.SearchStrategy[tuple[str, str]]:
    return st.sampled_from([*option.wrong, *option.odd]).map(lambda value: (option.name, value))


def _pair(command: str, argv: tuple[str, ...], given: Sequence[tuple[str, str]]) -> Case:
    more = [word for pair in given for word in pair]
    return Case(f"options/{command} pair {more!r:.150}", (*argv, *more), put=put)
