r"""Tables of a plain-text PostgreSQL dump, by COPY, as records.

Read are the statements of https://www.postgresql.org/docs/current/app-pgdump.html: `COPY name (columns) FROM stdin;`
with tab-separated lines up to `\.`. One without a list of columns takes them from the table's CREATE TABLE. All other
statements are passed over, and so are other tables; INSERT into a table of logs (pg_dump --inserts) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from harness.policy.types import UserError

COPY = re.compile(r"COPY\s+(?P<table>[^\s(]+)\s*(?:\((?P<columns>[^)]*)\))?\s*FROM\s+stdin", re.IGNORECASE)
INSERT = re.compile(r"INSERT\s+INTO\s+(?P<table>[^\s(]+)", re.IGNORECASE)
CREATE = re.compile(r"CREATE\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?(?P<table>[^\s(]+)\s*\(", re.IGNORECASE)
CONSTRAINTS = ("CONSTRAINT", "PRIMARY", "UNIQUE", "FOREIGN", "CHECK", "EXCLUDE", "LIKE")
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}
LOGS = re.compile(r"SpendLogs|observations|traces?|logs?|requests?", re.IGNORECASE)  # of a table that holds a log


COPIES = "dump it without --inserts, or psql -c '\\copy \"{}\" to log.csv csv header'"


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
            if LOGS.search(table := _name(put["table"])):
                raise UserError(f"{path}:{number}: {table} by INSERT, which is not read: {COPIES.format(table)}")
            passed[table] = None
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
