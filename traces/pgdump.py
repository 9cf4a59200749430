r"""Tables of a plain-text PostgreSQL dump, by COPY or INSERT, as records.

Read are the statements of https://www.postgresql.org/docs/current/app-pgdump.html: `COPY name (columns) FROM stdin;`
with tab-separated lines up to `\.`, and `INSERT INTO name (columns) VALUES (...), ...;`. One without a list of columns
takes them from the table's CREATE TABLE. All other statements are passed over, and so are other tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from harness.policy.types import UserError

COPY = re.compile(r"COPY\s+(?P<table>[^\s(]+)\s*(?:\((?P<columns>[^)]*)\))?\s*FROM\s+stdin", re.IGNORECASE)
INSERT = re.compile(
    r"INSERT\s+INTO\s+(?P<table>[^\s(]+)\s*(?:\((?P<columns>[^)]*)\))?\s*(?:OVERRIDING\s+\w+\s+VALUE\s+)?VALUES",
    re.IGNORECASE,
)
CREATE = re.compile(r"CREATE\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?(?P<table>[^\s(]+)\s*\(", re.IGNORECASE)
CONSTRAINTS = ("CONSTRAINT", "PRIMARY", "UNIQUE", "FOREIGN", "CHECK", "EXCLUDE", "LIKE")
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}
LITERAL = re.compile(
    r"\s*(?:(?P<text>E?'(?:[^']|'')*')|(?P<word>[^\s,()']+))(?:::\"?[\w ]+\"?(?:\(\d+\))?(?:\[\])?)?\s*", re.IGNORECASE
)
LOGS = re.compile(r"SpendLogs|observations|traces?|logs?|requests?", re.IGNORECASE)  # of a table that holds a log


def is_dump(text: str) -> bool:
    """Tell whether a file begins as a plain dump does."""
    head = text[:4096].lstrip()
    return head.startswith("--") or bool(re.match(r"(COPY|INSERT INTO|SET|CREATE)\s", head, re.IGNORECASE))


def rows(path: Path, text: TextIO, fields: Collection[str] | None) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of the dump's tables that hold logs, with their lines; NULL is blank. UserError where none do."""
    created: dict[str, list[str]] = {}
    passed: dict[str, None] = {}
    match = False
    lines = enumerate(text, 1)
    for number, line in lines:
        if (begun := CREATE.match(line)) is not None:
            created[_name(begun["table"])] = list(_created(lines))
        elif (copied := COPY.match(line)) is not None:
            table, names = _head(path, number, copied, created)
            wanted = _wanted(table, names, fields)
            for at, row in lines:
                if row.rstrip("\r\n") == "\\.":
                    break
                if wanted is None:
                    continue
                cells = row.rstrip("\r\n").split("\t")
                if len(cells) != len(names):
                    raise UserError(f"{path}:{at}: {len(cells)} columns, COPY has {len(names)}")
                match = True
                yield at, {name: _unescaped(cells[place]) for place, name in wanted}
            else:
                raise UserError(f"{path}: ends within COPY {table}: cut off")
            if wanted is None:
                passed[table] = None
        elif (put := INSERT.match(line)) is not None:
            table, names = _head(path, number, put, created)
            wanted = _wanted(table, names, fields)
            statement = line[put.end() :]
            last = number
            while not _closed(statement):
                last, more = next(lines, (last, ""))
                if not more:
                    raise UserError(f"{path}:{number}: ends within INSERT INTO {table}: cut off")
                statement += more
            if wanted is None:
                passed[table] = None
                continue
            for values in _tuples(path, number, statement):
                if len(values) != len(names):
                    raise UserError(f"{path}:{number}: {len(values)} values, INSERT INTO {table} has {len(names)}")
                match = True
                yield number, {name: values[place] for place, name in wanted}
    if not match:
        there = f" (it has rows of {', '.join(list(passed)[:8])})" if passed else ""
        raise UserError(f"{path}: a dump without rows of a log{there}")


def _name(quoted: str) -> str:
    return quoted.rpartition(".")[2].strip('"')


def _head(path: Path, number: int, match: re.Match[str], created: dict[str, list[str]]) -> tuple[str, list[str]]:
    table = _name(match["table"])
    if match["columns"] is not None:
        return table, [name.strip().strip('"') for name in match["columns"].split(",")]
    if table not in created:
        raise UserError(f"{path}:{number}: {table} without names of columns, and no CREATE TABLE before it")
    return table, created[table]


def _created(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, line in lines:
        words = line.split()
        if line.lstrip().startswith(")"):
            return
        if words and words[0].upper() not in CONSTRAINTS:
            yield words[0].strip('"')


def _wanted(table: str, names: list[str], fields: Collection[str] | None) -> list[tuple[int, str]] | None:
    """Return place and name of the columns to keep; None for a table that holds no log."""
    if not LOGS.search(table):
        return None
    return [(at, name) for at, name in enumerate(names) if fields is None or name in fields]


def _unescaped(cell: str) -> str:
    if cell == "\\N":
        return ""
    if "\\" not in cell:
        return cell
    return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), cell)


def _closed(statement: str) -> bool:
    """Tell whether a statement ends here: a semicolon at the end, outside of quotes."""
    return statement.rstrip().endswith(";") and statement.count("'") % 2 == 0


def _tuples(path: Path, line: int, statement: str) -> Iterator[list[str]]:
    at, end = 0, len(statement)
    while (at := _past(statement, at, " \t\r\n,")) < end and statement[at] == "(":
        values: list[str] = []
        at += 1
        while True:
            match = LITERAL.match(statement, at)
            if match is None:
                raise UserError(f"{path}:{line}: INSERT has a value that is no literal: {statement[at : at + 30]!r}")
            values.append(_literal(match))
            at = match.end()
            if statement[at : at + 1] == ")":
                break
            if statement[at : at + 1] != ",":
                raise UserError(f"{path}:{line}: INSERT has a value that is no literal: {statement[at : at + 30]!r}")
            at += 1
        at += 1
        yield values


def _past(text: str, at: int, blank: str) -> int:
    while at < len(text) and text[at] in blank:
        at += 1
    return at


def _literal(match: re.Match[str]) -> str:
    text = match["text"]
    if text is None:
        return "" if match["word"].upper() == "NULL" else match["word"]
    escaped = text[0] in "eE"
    inner = text[2 if escaped else 1 : -1].replace("''", "'")
    return _unescaped(inner) if escaped else inner
