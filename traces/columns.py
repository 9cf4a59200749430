"""Raw columns of a table in a CSV, Parquet or JSON file, with the line number of each row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import records
from traces.served import Source

HEADER_BYTES = 1 << 20
HEAD_RECORDS = 1000  # names of columns are looked for in these


def names_of(path: Path) -> list[str]:
    """List the names of a file's columns; a field inside a JSON object is named `object.field`."""
    match records.kind(path):
        case "parquet":
            return list(pq.read_schema(path).names)
        case "csv":
            return _header(path)
    return _names(record for _, record in records.records(path))


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """List all names that occur in the first HEAD_RECORDS records; a record may lack some of them."""
    return list(dict.fromkeys(name for row in islice(rows, HEAD_RECORDS) for name in records.paths(row)))


def read(path: Path, columns: Mapping[str, str]) -> Source:
    """Read those columns of a file that the values of `columns` name; the keys (canonical names) are not used.

    Raises UserError if a column is missing. Errors of the CSV and Parquet libraries are passed on.
    """
    wanted = list(dict.fromkeys(columns.values()))
    match records.kind(path):
        case "csv":
            return _csv(path, wanted)
        case "parquet":
            _has(path, wanted, pq.read_schema(path).names)
            table = pq.read_table(path, columns=wanted)
            return Source(path, {name: table[name].combine_chunks() for name in wanted}, np.arange(len(table)) + 1)
    lines, rows = zip(*records.records(path), strict=True)
    return Source(path, _columns(path, lines, rows, wanted), np.asarray(lines, np.int64))


def _csv(path: Path, wanted: list[str]) -> Source:
    """Read columns of a CSV as text, so that a message can show a bad value unchanged; the header is line 1."""
    ragged: list[str] = []

    def bad_row(row: Any) -> str:
        ragged.append(f"{path}:{row.number}: {row.actual_columns} columns, the header has {row.expected_columns}")
        return "error"

    _has(path, wanted, _header(path))
    try:
        rows = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(use_threads=False),  # rows are numbered only without threads
            parse_options=pyarrow.csv.ParseOptions(ignore_empty_lines=False, invalid_row_handler=bad_row),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, strings_can_be_null=False
            ),
        )
    except pa.ArrowException:
        if ragged:
            raise UserError(ragged[0]) from None
        raise
    end = rows.num_rows
    while end and not any(rows[name][end - 1].as_py() for name in wanted):
        end -= 1  # blank lines at the end; elsewhere they are errors
    columns = {name: rows[name].slice(0, end).combine_chunks() for name in wanted}
    return Source(path, columns, np.arange(end) + 2)


def _header(path: Path) -> list[str]:
    """Read the names of a CSV's columns."""
    with pa.input_stream(str(path), compression="detect") as stream:
        header = stream.read(HEADER_BYTES).splitlines()[0]
    return next(csv.reader([header.decode("utf-8-sig")]))


def _columns(
    path: Path, lines: Sequence[int], rows: Sequence[Mapping[str, Any]], wanted: list[str]
) -> dict[str, pa.Array]:
    """Turn records into one column for each name in `wanted`; a field that a record lacks becomes null.

    Raises UserError for a name that none of the first HEAD_RECORDS records has. Also raises it for a column whose
    values differ in type.
    """
    _has(path, wanted, _names(rows))
    columns = {}
    for name in wanted:
        values = [records.dig(row, name) for row in rows]
        if (array := _inferred(values)) is None:
            row = first_bad(lambda _, high, values=values: _inferred(values[:high]) is not None, len(values))  # type: ignore[misc]
            raise UserError(
                f'{path}:{lines[row]}: column "{name}" is {quoted(values[row])}, of another kind than before'
            )
        columns[name] = array
    return columns


def _alike(values: list[Any], _low: int, high: int) -> bool:
    return _inferred(values[:high]) is not None


def first_bad(fine: Callable[[int, int], bool], count: int) -> int:
    """Return the index of the first bad value, by bisection.

    `fine(low, high)` tells whether all values in [low, high) are good.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if fine(low, middle):
            low = middle
        else:
            high = middle
    return low


def _inferred(values: list[Any]) -> pa.Array | None:
    """Return values as a column of their common type; None if they have no common type."""
    for kind in (None, pa.list_(pa.uint64())):  # hashes of 64 bits
        with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):
            return pa.array(values, kind)
    return None


def _has(path: Path, wanted: list[str], names: list[str]) -> None:
    for name in wanted:
        if name not in names:
            raise UserError(
                f'{path}: no column "{name}"{meant(name, map(str, names))} (it has {", ".join(map(str, names[:12]))})'
            )
        if names.count(name) > 1:
            raise UserError(f'{path}: there are {names.count(name)} columns "{name}"')


def quoted(value: object) -> str:
    """Return a value as text for a message; a string is put in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)
