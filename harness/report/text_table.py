"""Rows of cells as lines of text, aligned for a terminal or as Markdown, and as many lines as a screen has."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH, MOST = 100, 30  # characters of a line, and lines, where not all is asked for
NARROWEST = 20  # of a last column that is folded


def aligned(rows: Iterable[Sequence[str]], room: int | None = None) -> Iterator[str]:
    """Yield lines of left-aligned columns; fold the last column where a line has more than `room` characters."""
    lines = [list(row) for row in rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 0 if room is None else room - sum(width[:-1]) - 2 * len(width[:-1])
    for line in lines:
        *cells, last = line
        parts = [last] if left < NARROWEST else folded(last, left) or [""]
        yield "  ".join(cell.ljust(w) for cell, w in zip((*cells, parts[0]), width, strict=True)).rstrip()
        yield from (" " * (sum(width[:-1]) + 2 * len(cells)) + part for part in parts[1:])


def joined(names: Sequence[str]) -> str:
    """Return names as a sentence has them: "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def clause(text: str, room: int) -> str:
    """Return the longest start of a sentence, of at most `room` characters, up to a comma, semicolon or colon.

    It is the whole sentence where that fits, or where no part does.
    """
    if len(text) <= room:
        return text
    ends = (match.start() for match in re.finditer(r"[,;:.](?= )", text))
    return text[: max((end for end in ends if end <= room), default=len(text))]


def brief(lines: Iterable[str], *, every: bool, tail: Iterable[str] = (), room: int = WIDTH) -> Iterator[str]:
    """Yield lines for a screen: at most MOST of at most `room` characters, the tail last; with `every` all as they are.

    A command to repeat ("next: ...") stays in one line.
    """
    if every:
        yield from (*lines, *tail)
        return
    told = [part for line in lines for part in _told(line, room)]
    ends = [part for line in tail for part in _told(line, room)]
    most = MOST - len(ends)
    if len(told) > most:
        told[most - 1 :] = [f"... {len(told) - most + 1} more lines: --all"]
    yield from (*told, *ends)


def _told(line: str, room: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return [line] if line.startswith("next: ") else folded(line, room, indent) or [""]


def folded(text: str, room: int, indent: str = "") -> list[str]:
    """Return a text as lines of at most `room` characters, the later ones indented."""
    glued = text.replace(" %", "\0%")  # a number and its sign stay together
    parts = textwrap.wrap(glued, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\0", " ") for part in parts]


def laid(rows: Iterable[Sequence[str]], *, markdown: bool = False) -> Iterator[str]:
    """Yield the lines of a table whose first row is its head: aligned, or as Markdown between blank lines."""
    if not markdown:
        yield from aligned(rows)
        return
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    yield ""
    yield from ("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    yield ""
