"""List the places that break the house's style, then their counts: `python -m tests.tools.style`.

A comment is a clause with a verb, or a unit: those that begin like the end of a sentence are fragments. Functions
that ruff calls complex are listed too, but for kernels, which are flat by design.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.tools.lines import code

PRODUCT = ("harness", "plots", "probe", "systems", "traces", "workloads")
FRAGMENT = re.compile(r"#:? *(of|by|where|in|that)\b")
RULES = "C901"
KERNEL = "harness/engines/sim/kernel/"


class Comment(NamedTuple):
    """A comment and its place."""

    path: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """FILE:LINE."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def files(*folders: str) -> list[Path]:
    """List the Python files of folders."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def comments(*folders: str) -> tuple[Comment, ...]:
    """Return every comment of the Python files of folders."""
    return tuple(
        Comment(path, token.start[0], token.string)
        for path in files(*folders)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        if token.type == tokenize.COMMENT
    )


def fragments(*folders: str) -> list[Comment]:
    """List comments that begin like the end of a sentence; the second line of a comment may."""
    every = comments(*folders)
    alone = {(each.path, each.line) for each in every if _line(each).lstrip().startswith("#")}
    return [
        each
        for each in every
        if FRAGMENT.match(each.text) and not ({(each.path, each.line), (each.path, each.line - 1)} <= alone)
    ]


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def _line(comment: Comment) -> str:
    return _lines(comment.path)[comment.line - 1]


def skips(*folders: str) -> list[Comment]:
    """List where the formatter is told to leave the layout."""
    return [comment for comment in comments(*folders) if "fmt: skip" in comment.text]


def code_lines(*folders: str) -> int:
    """Count lines of code, without blank lines, comments and docstrings."""
    return sum(len(code(path.read_text("utf-8"))) for path in files(*folders))


def complex_functions() -> Iterator[str]:
    """Yield the functions that ruff calls complex, but for kernels."""
    ruff = f"ruff check --isolated --exit-zero --output-format concise --select {RULES} ."
    command = [sys.executable, "-m", *ruff.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    yield from (line for line in done.stdout.splitlines() if ":" in line and not line.startswith(KERNEL))


def main() -> None:
    """Print the places, then the counts."""
    counts = Counter[str]()
    for side in (PRODUCT, ("tests",)):
        for what, of in (("fragment", fragments), ("fmt: skip", skips)):
            for comment in of(*side):
                counts[f"{what} in {'tests' if side == ('tests',) else 'the product'}"] += 1
                print(f"{comment.place}: {what}: {comment.text}")
    for line in complex_functions():
        counts[f"{line.split()[1]} outside kernels"] += 1
        print(line)
    print(*(f"{n:6,}  {what}" for what, n in counts.items()), sep="\n")


if __name__ == "__main__":
    main()
