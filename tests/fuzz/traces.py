"""Files of traces: CSV, JSON lines, Parquet, pickles; converted, looked at, replayed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.case import Case
from tests.fuzz.options import COLUMNS, COMPARE, LOG
from traces import schema

HASHES = (*COLUMNS, "--column", "prefix_hashes=h", "--block-tokens", "16")
CELLS: Mapping[str, tuple[str, ...]] = {  # what cannot be right in a column
    "t": (
        "nan",
        "inf",
        "-1",
        "x",
        "",
        "1e400",
        "12:00:99",
        "2024-01-01T00:00:00Z",
        "true",
        "²",
        "1,5",
        "0x1",
        "9" * 400,
        "\0",
    ),
    "p": ("0", "-1", "", "x", "1.5", "nan", "inf", "9" * 20, "2147483648", "true", "²", "1_0", "1e3x"),
    "o": ("0", "-1", "", "x", "1.5", "nan", "inf", "9" * 20, "2147483648", "true", "²"),
    "m": ("", "m\0001"),
}
JSONS: Mapping[str, tuple[str, ...]] = {  # the same of JSON lines, as they are written
    "t": ("true", "null", "[50]", "{}", '"x"', "NaN", "Infinity", "-1", "1e400", '""', "9" * 400),
    "p": ("true", "null", "[5]", "{}", '"x"', '"5"', "NaN", "-1", "0", "1.5", "9" * 25, "1e30"),
    "o": ("true", "null", "[5]", '"x"', "-1", "0", "1.5"),
    "m": ("null", "{}", "[]", "1", "true", '""', '"m\\u0000"', '"\\ud800"'),
    "h": ("[-1]", "[1.5]", "null", "1", '"x"', "{}", '["x"]', "[[1]]", "[null]", "[18446744073709551616]", "[true]"),
}
ROW = 13  # of those of a file, from 0


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield bad rows, bad files, bad columns and bad metadata."""
    yield from _csv(here)
    yield from _jsonl(here)
    yield from _files(here)
    yield from _parquet(here, draw)


def _convert(what: str, path: Path, culprit: str, *, accept: bool = False, columns: tuple[str, ...] = COLUMNS) -> Case:
    return Case(f"traces/{what}", ("trace", "convert", str(path), "-o", "out.parquet", *columns), culprit, accept)


def _csv(here: Path) -> Iterator[Case]:
    lines = LOG.splitlines()
    for number, (column, values) in enumerate(CELLS.items()):
        for k, value in enumerate(values):
            cells = lines[ROW].split(",")
            cells["tmpo".index(column)] = f'"{value}"' if "," in value else value
            (path := here / f"{number}-{k}.csv").write_text(
                "\n".join([*lines[:ROW], ",".join(cells), *lines[ROW + 1 :]])
            )
            yield _convert(f"csv {column} {value[:30]!r}", path, f"{path.name}:{ROW + 1}")
    texts = {
        "two columns o": LOG.replace("t,m,p,o", "t,o,p,o"),
        "few": f"{LOG}1\n",
        "many": f"{LOG}99,a,3,4,5\n",
        "blank": LOG.replace("\n", "\n\n"),
        "open quote": f'{LOG}99,"a,3,4\n',
        "no newline": LOG.rstrip(),
        "cr": LOG.replace("\n", "\r"),
        "header": "t,m,p,o\n",
        "long cell": f"{LOG}99,{'a' * (3 << 20)},3,4\n",
        "long stamp": f"{LOG}{'9' * 10_000_000},a,3,4\n",
        "not in order": f"{LOG}1,a,3,4\n",
        "semicolons": LOG.replace(",", ";"),
        "tabs": LOG.replace(",", "\t"),
        "long header": "x," * 700_000 + LOG,
        "same time": LOG.replace(".5", "").replace("1", "0"),
    }
    sane = {"no newline", "cr", "blank", "long cell", "same time"}
    for what, text in texts.items():
        (path := here / f"{what}.csv").write_text(text, newline="")
        yield _convert(f"csv {what}", path, path.name, accept=what in sane)
    content: dict[str, bytes] = {
        "utf-16": LOG.encode("utf-16"),
        "utf-16 le": LOG.encode("utf-16-le"),
        "latin": LOG.replace("m1", "é").encode("latin-1"),
        "nul": b"\0" * 1000,
        "empty": b"",
        "random": bytes(range(256)) * 10,
        "gzip": gzip.compress(LOG.encode())[:-9],
    }
    for what, data in content.items():
        (path := here / f"{what}.csv").write_bytes(data)
        yield _convert(f"csv {what}", path, path.name)


def _jsonl(here: Path) -> Iterator[Case]:
    rows = [{"t": k + 0.5, "m": f"m{k % 2}", "p": 40 + k, "o": 5 + k, "h": [k, k + 1]} for k in range(20)]
    lines = [json.dumps(row) for row in rows]
    for column, values in JSONS.items():
        for k, value in enumerate(values):
            cells = {key: json.dumps(cell) for key, cell in rows[ROW].items()} | {column: value}
            line = "{" + ", ".join(f'"{key}": {cell}' for key, cell in cells.items()) + "}"
            (path := here / f"{column}-{k}.jsonl").write_text("\n".join([*lines[:ROW], line, *lines[ROW + 1 :]]))
            columns = HASHES if column == "h" else COLUMNS
            yield _convert(f"jsonl {column} {value[:30]}", path, f"{path.name}:{ROW + 1}", columns=columns)
    bad = {
        "twice": lines[ROW].replace('"t"', '"t": 1, "t"'),
        "nested": '{"t": ' + "[" * 3000 + "]" * 3000 + "}",
        "list": "[1]",
        "number": "1",
        "cut": lines[ROW][:20],
        "blank": "",
        "lacks": '{"t": 1}',
        "nul": "\0",
        "word": "nope",
    }
    for what, line in bad.items():
        (path := here / f"{what}.jsonl").write_text("\n".join([*lines[:ROW], line, *lines[ROW + 1 :]]))
        yield _convert(f"jsonl {what}", path, f"{path.name}:{ROW + 1}")
    (path := here / "empty.jsonl").write_text("")
    yield _convert("jsonl empty", path, path.name)
    (path := here / "one.jsonl").write_text("[" + ",".join(lines) + "]")
    yield _convert("jsonl an array", path, path.name)


def _files(here: Path) -> Iterator[Case]:
    for suffix in (".csv", ".jsonl", ".parquet", ".pkl", ".csv.gz", ".txt", ""):
        (path := here / f"junk{suffix}").write_bytes(b"\x80\x04junk\xff\0")
        yield _convert(f"junk{suffix}", path, path.name)
        (zero := here / f"zero{suffix}").symlink_to("/dev/zero")
        yield _convert(f"zero{suffix}", zero, zero.name)
        (folder := here / f"folder{suffix}").mkdir()
        yield _convert(f"folder{suffix}", folder, folder.name)
        yield _convert(f"none{suffix}", here / f"none{suffix}", f"none{suffix}")
    for what in ("zero.parquet", "junk.parquet", "folder.parquet", "none.parquet"):
        yield Case(f"traces/stats {what}", ("trace", "stats", str(here / what)), what, accept=False)
        yield Case(f"traces/compare {what}", (*COMPARE, "--trace", str(here / what), "--dry-run"), what, accept=False)
    for name in ("", " ", "nope", "a\nb", "x" * 5000, "\udcff", "sample+x=1", "/", "."):
        yield Case(f"traces/stats {name[:20]!r}", ("trace", "stats", name), "", accept=False)
        yield Case(f"traces/make {name[:20]!r}", ("trace", "make", name), "", accept=False)


def _parquet(here: Path, draw: random.Random) -> Iterator[Case]:
    count = 20
    sound: dict[str, Any] = {
        "request_id": list(range(count)),
        "arrival_s": [k + 0.5 for k in range(count)],
        "model": [f"m{k % 8}" for k in range(count)],
        "prompt_tokens": [10] * count,
        "output_tokens": [5] * count,
    }
    meta: dict[str, Any] = {"name": "mine", "tier": "replayed", "span_s": 30.0}

    def changed(column: str, value: Any) -> list[Any]:
        return [*sound[column][:ROW], value, *sound[column][ROW + 1 :]]

    number = 0

    def looked(what: str, table: pa.Table, culprit: str, accept: bool = False) -> Iterator[Case]:
        nonlocal number
        number += 1
        pq.write_table(table, path := here / f"p{number}.parquet")
        yield Case(f"traces/stats {what}", ("trace", "stats", str(path)), culprit or path.name, accept)
        yield Case(
            f"traces/compare {what}", (*COMPARE, "--trace", str(path), "--dry-run"), culprit or path.name, accept
        )

    wrong: list[tuple[str, Any]] = [
        *(("arrival_s", arrival_s) for arrival_s in (float("nan"), float("inf"), -1.0, 1e300)),
        ("request_id", 0),
        ("prompt_tokens", 0),
        ("prompt_tokens", 2**32 - 1),
        ("output_tokens", 0),
        ("output_tokens", 2**31),
        ("model", ""),
        ("model", "m\0001"),
    ]
    for column, value in wrong:
        yield from looked(f"{column} {value!r}", schema.table({**sound, column: changed(column, value)}, meta), column)
    for column, values in sound.items():
        table = schema.table(sound, meta)
        yield from looked(f"no {column}", table.drop_columns([column]), column)
        nulls = pa.array(changed(column, None), pa.string() if column == "model" else schema.REQUIRED[column])
        at = table.column_names.index(column)
        yield from looked(
            f"null in {column}",
            table.set_column(at, column, nulls.dictionary_encode() if column == "model" else nulls),
            column,
        )
        kinds: Mapping[str, Callable[[Any], pa.Array]] = {
            "strings": lambda v: pa.array([str(x) for x in v]),
            "booleans": lambda v: pa.array([True] * len(v)),
            "lists": lambda v: pa.array([[1]] * len(v)),
            "nulls": lambda v: pa.nulls(len(v)),
        }
        for kind, make in kinds.items():
            yield from looked(f"{column} {kind}", table.set_column(at, column, make(values)), column)
    for key, value in {
        "span_s": ("null", "[", '"x"', "{}", "-1", "1e400", "0", "NaN", "1", "true", "[1]", "1e300"),
        "streams": ("1", "{}", '"x"', "[1]", "null", "[[]]"),
        "block_tokens": ('"x"', "-1", "null"),
        "name": ("1", "{}", "null"),
        "tier": ("1", '"x"'),
        "maker": ("1", '"nope"', "{}"),
        "ordered": ('"x"',),
        "fit": ("1", "{}"),
        "timestamp_resolution_s": ('"x"', "{}"),
        "length_origin": ("1",),
    }.items():
        for text in value:
            table = schema.table(sound, meta)
            facts = {**(table.schema.metadata or {}), key.encode(): text.encode()}
            wrong_span = key == "span_s" and text not in {"1e300", "true"}
            yield from looked(
                f"metadata {key} {text}",
                table.replace_schema_metadata(facts),
                key if wrong_span else "",
                accept=not wrong_span,
            )
    yield from looked("no metadata", schema.table(sound, meta).replace_schema_metadata(None), "", accept=True)
    yield from looked("no rows", schema.table(sound, meta).slice(0, 0), "no rows")
    yield from looked(
        "hashes without blocks", schema.table({**sound, "prefix_hashes": [[1]] * count}, meta), "block_tokens"
    )
    yield from looked(
        "more hashes than tokens",
        schema.table({**sound, "prefix_hashes": [[1] * 50] * count}, {**meta, "block_tokens": 16}),
        "prefix_hashes",
    )
    pq.write_table(schema.table(sound, meta), path := here / "sound.parquet")
    whole = path.read_bytes()
    for k in range(60):
        at, bit = draw.randrange(len(whole)), draw.randrange(8)
        data = bytearray(whole)
        data[at] ^= 1 << bit
        (path := here / f"bit{k}.parquet").write_bytes(bytes(data))
        yield Case(f"traces/stats bit {at}.{bit}", ("trace", "stats", str(path)), "")
    for k in range(10):
        (path := here / f"cut{k}.parquet").write_bytes(whole[: len(whole) * k // 10])
        yield Case(f"traces/stats cut {k}", ("trace", "stats", str(path)), path.name, accept=False)
        yield _convert(f"parquet cut {k}", path, path.name)
