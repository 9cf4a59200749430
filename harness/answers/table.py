"""Tables in every form that is printed, and text as lines for a screen."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, groupby
from typing import Any, TypeAlias

from harness.rows.estimate import NONE

WIDTH, MOST = 100, 30  # characters of a line, and lines of a screen, without --all
NARROWEST = 20  # characters of a last column that is folded
LONG = 24  # characters; a longer cell is text, in a wider column
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
NUMBER = re.compile(r"^[<>≤≥~$ ]*([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)")
LATEX = {"\\": r"\textbackslash{}", "<": "$<$", ">": "$>$", "≤": r"$\le$", "~": r"$\sim$"}
LATEX |= {sign: f"\\{sign}" for sign in "%_&#"}

Rows: TypeAlias = Sequence[Sequence[str]]  # rows hold cells; the first row is the head


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head. Programs read `csv` and `json`, where a cell may be a number, or None."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()  # lines below the table
    title: str = ""  # line above the table
    groups: Sequence[str] = ()  # a title over each column, once over neighbours that share it
    strong: Collection[tuple[int, int]] = ()  # row and column of the best cells

    @classmethod
    def of(cls, rows: Iterable[Sequence[str]]) -> Table:
        """Make a table from rows, the first of which is the head."""
        head, *rest = rows
        return cls(head, rest)

    def filled(self) -> Table:
        """Return the table without the columns in which no row has a value."""
        columns = [k for k in range(len(self.head)) if not self.rows or any(row[k] != NONE for row in self.rows)]
        return replace(
            self, head=[self.head[k] for k in columns], rows=[[row[k] for k in columns] for row in self.rows]
        )

    # -------------------------------------------------------------- for a terminal

    def text(self, room: int | None = None, *, bold: bool = False) -> Iterator[str]:
        """Yield lines of left-aligned columns between title and notes; fold the last column beyond `room` characters.

        With `bold` the best cells are bold, by a terminal's escape codes.
        """
        lines = [self.head, *self.rows]
        width = [max(map(len, column)) for column in zip(*lines, strict=True)]
        yield from filter(None, (self.title, self._spanned(width)))
        last_width = 0 if room is None else room - sum(width[:-1]) - 2 * len(width[:-1])
        for i, line in enumerate(lines, -1):
            *cells, last = line
            parts = [last] if last_width < NARROWEST else folded(last, last_width) or [""]
            padded = (cell.ljust(w) for cell, w in zip((*cells, parts[0]), width, strict=True))
            yield "  ".join(
                f"{BOLD}{x}{PLAIN}" if bold and (i, k) in self.strong else x for k, x in enumerate(padded)
            ).rstrip()
            yield from (" " * (sum(width[:-1]) + 2 * len(cells)) + part for part in parts[1:])
        yield from self.notes

    def _spanned(self, width: list[int]) -> str:
        """Return the line of the groups' titles. If a title is wider than its group, widen the group's last column."""
        spans, at = list[str](), 0
        for title, same in groupby(self.groups):
            end = at + len(list(same))
            taken = sum(width[at:end]) + 2 * (end - at - 1)
            width[end - 1] += max(0, len(title) - taken)
            spans.append(title.ljust(taken))
            at = end
        return "  ".join(spans).rstrip()

    # -------------------------------------------------------------- for a paper

    def markdown(self, rule: str = " --- ") -> Iterator[str]:
        """Yield the lines of a Markdown table; the line below the head has `rule` in each cell.

        The best cells are bold.
        """
        lines = [self._heads(), *self._marked("**{}**".format, lambda cell: cell)]
        rows = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]
        yield from (rows[0], "|" + f"{rule}|" * len(self.head), *rows[1:])

    def latex(self) -> Iterator[str]:
        """Yield the notes as comments, then the lines of a LaTeX tabular (booktabs).

        The best cells are bold.
        """
        yield from (f"% {note}" for note in self.notes)
        head, *rows = [map(_latex, self._heads()), *self._marked(r"\textbf{{{}}}".format, _latex)]
        yield rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"
        yield r"\toprule"
        yield " & ".join(head) + r" \\"
        yield r"\midrule"
        yield from (" & ".join(row) + r" \\" for row in rows)
        yield r"\bottomrule"
        yield r"\end{tabular}"

    def _heads(self) -> list[str]:
        groups = self.groups or [""] * len(self.head)
        return [" ".join(filter(None, pair)) for pair in zip(groups, self.head, strict=True)]

    def _marked(self, mark: Callable[[str], str], written: Callable[[str], str]) -> Iterator[list[str]]:
        for i, row in enumerate(self.rows):
            yield [mark(written(cell)) if (i, k) in self.strong else written(cell) for k, cell in enumerate(row)]

    # -------------------------------------------------------------- for another program

    def records(self) -> list[dict[str, Any]]:
        """Return each row as a dict, keyed by the names in the head."""
        return [dict(zip(self.head, row, strict=True)) for row in self.rows]

    def csv(self) -> str:
        """Render as CSV; cells are empty where there is no value."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([self.head, *(["" if cell is None else cell for cell in row] for row in self.rows)])
        return out.getvalue()

    def json(self, key: str, facts: Mapping[str, Any]) -> str:
        """Render facts, and the records under `key`, as JSON; infinities and NaN, which JSON lacks, become null."""
        return json.dumps(_plain({**facts, key: self.records()}), indent=1)

    def html(self) -> str:
        """Render as a section of a page whose script sorts the rows by a column."""
        return section(
            self.title.rstrip(":"), self.head, ("".join(map(_html, row, range(len(row)))) for row in self.rows)
        )


def section(title: str, heads: Sequence[str], rows: Iterable[str], note: str = "") -> str:
    """Render table rows, whose cells are HTML, as a section of a page whose script sorts them by a column."""
    head = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    above, below = title and f"<h2>{escape(title)}</h2>", note and f"<p>{escape(note)}</p>"
    return f'<section>{above}<div class="table" tabindex="0">{table}</div>{below}</section>'


def value(cell: str) -> float | None:
    """Return the number by which to sort a cell, or None if the cell does not begin with a number.

    Signs such as "<" may precede the number.
    """
    match = NUMBER.match(cell)
    number = float(match[1].replace(",", "")) if match else None
    return number if number is not None and math.isfinite(number) else None


def _html(cell: str, at: int) -> str:
    number = value(cell)
    key = "" if number is None else f' data-v="{number!r}"'
    key += ' class="long"' if len(cell) > LONG else ""
    return f"<td{key}>{escape(cell)}</td>" if at else f'<th scope="row"{key}>{escape(cell)}</th>'


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------ lines


def printed(parts: Iterable[str | Table | Rows], *, markdown: bool = False) -> Iterator[str]:
    """Yield lines as they are, and tables aligned, or as Markdown between blank lines."""
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        table = part if isinstance(part, Table) else Table.of(part)
        if markdown:
            yield from (*filter(None, [table.title]), "", *table.markdown(), "", *table.notes)
        else:
            yield from table.text()


def laid(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows as a Markdown table between blank lines; the first row is the head."""
    return printed([Table.of(rows)], markdown=True)


def aligned(rows: Iterable[Sequence[str]], room: int | None = None) -> Iterator[str]:
    """Yield rows as lines of left-aligned columns (Table.text); the first row is the head."""
    return Table.of(rows).text(room)


def joined(names: Sequence[str]) -> str:
    """Return names as a sentence has them: "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def clause(text: str, room: int) -> str:
    """Return the longest start of a sentence, of at most `room` characters, up to a comma, semicolon or colon.

    If the whole sentence fits, or if no such start fits, return the whole sentence.
    """
    if len(text) <= room:
        return text
    ends = (match.start() for match in re.finditer(r"[,;:.](?= )", text))
    return text[: max((end for end in ends if end <= room), default=len(text))]


def brief(
    lines: Iterable[str | list[str]], *, every: bool, tail: Iterable[str] = (), room: int = WIDTH
) -> Iterator[str]:
    """Yield lines for a screen: at most MOST lines of at most `room` characters, the tail last.

    With `every`, all lines are yielded as they are. A list of lines is shown whole, or left out. The first list is
    shown even if the tail is long, up to 2 x MOST lines. A command to repeat ("next: ...") stays in one line.
    """
    blocks = [[block] if isinstance(block, str) else block for block in lines]
    if every:
        yield from (*chain.from_iterable(blocks), *tail)
        return
    folded_blocks = [[part for line in block for part in _wrapped(line, room)] for block in blocks]
    ends = [part for line in tail for part in _wrapped(line, room)]
    first = next((k + 1 for k, block in enumerate(blocks) if len(block) > 1), 0)  # is shown however long the tail is
    most = max(MOST - len(ends), min(sum(map(len, folded_blocks[:first])) + 1, 2 * MOST))
    shown = list(chain.from_iterable(folded_blocks))
    if (count := len(shown)) > most:
        shown = []
        for block, parts in zip(blocks, folded_blocks, strict=True):
            if len(block) > 1 and len(shown) + len(parts) > most - 1:
                break
            shown += parts[: most - 1 - len(shown)]
        shown.append(f"... {count - len(shown)} more lines: --all")
    yield from (*shown, *ends)


def _wrapped(line: str, room: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return [line] if line.startswith("next: ") else folded(line, room, indent) or [""]


def folded(text: str, room: int, indent: str = "") -> list[str]:
    """Return a text as lines of at most `room` characters, the later ones indented."""
    glued = text.replace(" %", "\0%")  # a number and its sign stay together
    parts = textwrap.wrap(glued, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\0", " ") for part in parts]
