"""Rows of cells as lines of text: aligned for a terminal, or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of left-aligned columns."""
    lines = [list(row) for row in rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield from ("  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip() for line in lines)


def laid(rows: Iterable[Sequence[str]], *, markdown: bool = False) -> Iterator[str]:
    """Lines of a table whose first row is its head: aligned, or as Markdown between blank lines."""
    if not markdown:
        yield from aligned(rows)
        return
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    yield ""
    yield from ("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    yield ""
