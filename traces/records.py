"""Records of a log file: CSV, Parquet, or JSON in any arrangement; CSV and JSON may be gzipped.

The first bytes of a file tell its kind; a name that ends in .parquet or .pq also means Parquet. Each record comes with
the line where it begins, or with its row in a Parquet. From a CSV or a Parquet, only the columns asked for are read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from harness.policy.types import UserError
from traces.guarded import SAID, reading, regular

Record = Mapping[str, Any]
HEAD_BYTES = 1 << 16
LONGEST_CELL = 1 << 28  # characters: a prompt may stand in one
VLLM_TEXT = re.compile(r"Received request \S+:|Added request \S+\.|Avg prompt throughput:")
NO_VLLM_TEXT = (
    "vLLM's text log has no token counts and names no model: start vLLM with --otlp-traces-endpoint and convert the "
    "spans (--from vllm-otlp), or scrape its /metrics (--from prometheus)"
)
DUMP = re.compile(r"--|PGDMP|(COPY|INSERT INTO|SET|CREATE)\s", re.IGNORECASE)
NO_DUMP = "a PostgreSQL dump, which is not read: psql -c '\\copy \"TABLE\" to log.csv csv header' writes a table as CSV"
PARQUET = frozenset({".parquet", ".pq"})
PICKLES = frozenset({".pkl", ".pickle"})
NO_PICKLE = (
    "a pickle, which is not read, as reading runs code: load it where you trust it, and write its records as CSV or "
    "JSON lines (json.dumps(vars(record)))"
)


def opened(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """Open a file, and unpack it if it is in gzip format. Raises UserError if there is no such file."""
    regular(path)
    if not path.is_file():
        raise UserError(f"{path}: a folder, not a file")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")


def records(path: Path, fields: Collection[str] | None = None) -> Iterator[tuple[int, Record]]:
    """Yield the records of a file, each with its line number, or with its row in a Parquet.

    If `fields` is given, only these columns of a CSV or a Parquet are read. Raises UserError if the file cannot be
    read.
    """
    with reading(path):
        every = _of_kind(path, fields)
        if (first := next(every, None)) is None:
            raise UserError(f"{path}: no rows")
        yield first
        yield from every


def kind(path: Path) -> str:
    """Return the kind of a file: parquet, json or csv. Raises UserError for a file that no reader can read."""
    with reading(path), opened(path) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"PAR1") or path.suffix in PARQUET:
        return "parquet"
    if head.startswith(b"\x80") or path.suffix in PICKLES:
        raise UserError(f"{path}: {NO_PICKLE}")
    text = head.decode("utf-8-sig", "replace").lstrip()
    if not text:
        raise UserError(f"{path}: no rows")
    if VLLM_TEXT.search(text) and not text.startswith(("{", "[")):
        raise UserError(f"{path}: {NO_VLLM_TEXT}")
    if DUMP.match(text):
        raise UserError(f"{path}: {NO_DUMP}")
    return "json" if text[0] in "{[" else "csv"


def _of_kind(path: Path, fields: Collection[str] | None) -> Iterator[tuple[int, Record]]:
    match kind(path):
        case "parquet":
            yield from _parquet(path, fields)
        case "json":
            yield from _json(path)
        case _:
            with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
                yield from _csv(path, text, fields)


def _parquet(path: Path, fields: Collection[str] | None) -> Iterator[tuple[int, Record]]:
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    wanted = names if fields is None else [name for name in names if name in fields]
    row = 0
    for batch in file.iter_batches(columns=wanted):
        for record in batch.to_pylist():
            row += 1
            yield row, record


def _csv(path: Path, text: io.TextIOWrapper, fields: Collection[str] | None) -> Iterator[tuple[int, Record]]:
    csv.field_size_limit(LONGEST_CELL)
    first = text.readline()
    between = max(",;\t", key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=between), [])]
    if twice := next((name for name in names if names.count(name) > 1 and (fields is None or name in fields)), None):
        raise UserError(f'{path}: there are {names.count(twice)} columns "{twice}"')
    reader = csv.reader(text, delimiter=between)
    wanted = [(at, name) for at, name in enumerate(names) if fields is None or name in fields]
    line = 2
    for cells in reader:
        if cells and len(cells) != len(names):
            raise UserError(f"{path}:{line}: {len(cells)} columns, the header has {len(names)}")
        if cells:
            yield line, {name: cells[at] for at, name in wanted}
        line = reader.line_num + 2


def _json(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the objects of a JSON file, each with its line number.

    The file may be a sequence of objects or an array of objects. It may also be one object. If exactly one field of
    that object is a list of objects, the objects in the list are yielded. Otherwise the one object is yielded.
    """
    with opened(path) as file:
        text = file.read().decode("utf-8-sig")
    values_of = _values(path, text)
    first = next(values_of, None)
    second = next(values_of, None)
    if first is None:
        raise UserError(f"{path}: no rows")
    if second is None:
        yield from _unwrapped(path, *first)
        return
    for line, value in chain((first, second), values_of):
        yield line, _object(path, line, value)


def _unwrapped(path: Path, line: int, value: Any) -> Iterator[tuple[int, Record]]:
    if isinstance(value, Mapping):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(x, Mapping) for x in v)]
        value = lists[0] if len(lists) == 1 and "resourceSpans" not in value else [value]
    for number, record in enumerate(value, line):
        yield number, _object(path, number, record)


def _values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    at, line = 0, 1
    blank = re.compile(r"[\s,]*")
    while (values_of := blank.match(text, at)) and (begin := values_of.end()) < len(text):
        line += text.count("\n", at, begin)
        try:
            value, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            end = error.pos if isinstance(error, json.JSONDecodeError) else begin
            where = line + text[begin:end].rstrip().count("\n")  # a cut line ends before the error
            raise UserError(f"{path}:{where}: not JSON: {str(error)[:SAID]}") from None
        yield line, value
        line += text.count("\n", begin, at)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its pairs. Raises ValueError for a key that occurs twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'the key "{next(key for key in keys if keys.count(key) > 1)}" is there twice')
    return record


def _object(path: Path, line: int, value: Any) -> Record:
    if not isinstance(value, Mapping):
        raise UserError(f"{path}:{line}: not a JSON object")
    return value


def dig(record: Record, name: str) -> Any:
    """Return the value under a name, or None; a dot in the name means a field of a nested object."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if isinstance(value, str) and value[:1] == "{":  # an object as a cell of a table
            try:
                value = json.loads(value)
            except ValueError:
                return None
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def paths(record: Record, before: str = "") -> Iterator[str]:
    """Yield the names in a record; a field inside an object is named `object.field`."""
    for name, value in record.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{before}{name}.")
