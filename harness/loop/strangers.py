"""Protection against untrusted code: commands import only code files that their user names.

Stored results name the file of the system that made them, and the results may come from a stranger. So a command
imports a file outside this repository only in two cases: the command line names the file, or it names a TOML file that
names the file. `--trust` lifts this limit. The limit is stored in the environment, which worker processes inherit. A
program that imports the bench as a library has no limit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

LIMIT = "BENCH_CODE"  # file names, separated by os.pathsep; unset: any file
ANY = "*"
END = ".py"


@contextmanager
def limited() -> Iterator[None]:
    """Limit imports of code within the block to files of this repository and files allowed by `name`."""
    before = os.environ.get(LIMIT)
    os.environ[LIMIT] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[LIMIT]
        else:
            os.environ[LIMIT] = before


def name(*words: str) -> None:
    """Allow imports of files named in these words, which come from a command line or are values of a TOML file."""
    limit = os.environ.get(LIMIT, ANY)
    if limit != ANY:
        more = (path for word in words for path in _named(word))
        os.environ[LIMIT] = os.pathsep.join(dict.fromkeys([*filter(None, [limit]), *more]))


def trust() -> None:
    """Lift the limit on imports: allow every file, no matter who names it."""
    if LIMIT in os.environ:
        os.environ[LIMIT] = ANY


def known(file: Path) -> None:
    """Raise UserError for a file of code whose import is limited (`limited`) and that no call of `name` allowed."""
    from harness.policy.types import UserError

    limit = os.environ.get(LIMIT, ANY)
    if limit != ANY and os.path.realpath(file) not in limit.split(os.pathsep):
        raise UserError(
            f"{file} is code that stored results name, and this command does not: bench explain and bench timeline "
            "run it with --trust"
        )


def load(name: str, file: Path) -> ModuleType:
    """Import a file of code as a module with the given name. If the import fails, the module is removed again."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def _named(word: str) -> Iterator[str]:
    """Yield each possible path of a Python file in a word: the word, an item of a list, or an option's value."""
    begins = [0, *(i + 1 for i, c in enumerate(word) if c in ",=")]
    at = word.find(END)
    while at >= 0:
        yield from (os.path.realpath(word[i : at + len(END)]) for i in begins if i < at)
        at = word.find(END, at + 1)
