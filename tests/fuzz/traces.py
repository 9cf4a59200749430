"""Files of traces: CSV, JSON lines, Parquet, pickles; converted, looked at, replayed."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import INSTEAD, at, bits, cuts, words, written
from tests.fuzz.options import COLUMNS, DRY, LOG
from traces import schema

HASHES = (*COLUMNS, "--column", "prefix_hashes=h", "--block-tokens", "16")
CELLS = {  # what cannot be right in a column of CSV
    "t": [*words("nan inf -1 x '' 1e400 12:00:99 2024-01-01T00:00:00Z true ² 1,5 0x1 9^400"), "\0"],
    "p": words("0 -1 '' x 1.5 nan inf 9^20 2147483648 true ² 1_0 1e3x"),
    "o": words("0 -1 '' x 1.5 nan inf 9^20 2147483648 true ²"),
    "m": ["", "m\0001"],
}
JSONS = {  # the same of JSON lines, as they are written
    "t": 'true null [50] {} "x" NaN Infinity -1 1e400 "" ' + "9" * 400,
    "p": 'true null [5] {} "x" "5" NaN -1 0 1.5 9999999999999999999999999 1e30',
    "o": 'true null [5] "x" -1 0 1.5',
    "m": 'null {} [] 1 true "" "m\\u0000" "\\ud800"',
    "h": '[-1] [1.5] null 1 "x" {} ["x"] [[1]] [null] [18446744073709551616] [true]',
}
METADATA = {
    "span_s": 'null [ "x" {} -1 1e400 0 NaN 1 true [1] 1e300',
    "streams": '1 {} "x" [1] null [[]]',
    "block_tokens": '"x" -1 null',
    "name": "1 {} null",
    "tier": '1 "x"',
    "maker": '1 "nope" {}',
    "ordered": '"x"',
    "fit": "1 {}",
    "timestamp_resolution_s": '"x" {}',
    "length_origin": "1",
}
ROW, ROWS = 13, 20  # the row that is changed, from 0, of so many
SOUND: dict[str, Any] = {
    "request_id": list(range(ROWS)),
    "arrival_s": [k + 0.5 for k in range(ROWS)],
    "model": [f"m{k % 8}" for k in range(ROWS)],
    "prompt_tokens": [10] * ROWS,
    "output_tokens": [5] * ROWS,
}
META: dict[str, Any] = {"name": "mine", "tier": "replayed", "span_s": 30.0}
BAD: list[tuple[str, Any]] = [("arrival_s", value) for value in (float("nan"), float("inf"), -1.0, 1e300)]
BAD += [("request_id", 0), ("prompt_tokens", 0), ("prompt_tokens", 2**32 - 1), ("output_tokens", 0)]
BAD += [("output_tokens", 2**31), ("model", ""), ("model", "m\0001")]


def _convert(
    what: str, name: str, data: str | bytes, culprit: str, *, accept: bool = False, columns: tuple[str, ...] = COLUMNS
) -> Case:
    argv = ("trace", "convert", f"{{here}}/{name}", "-o", "out.parquet", *columns)
    return Case(f"traces/{what}", argv, culprit, accept, written(name, data))


def _put(lines: list[str], line: str) -> str:
    return "\n".join([*lines[:ROW], line, *lines[ROW + 1 :]])


def _csv() -> list[Case]:
    lines, every = LOG.splitlines(), list[Case]()
    for column, values in CELLS.items():
        for value in values:
            cells = lines[ROW].split(",")
            cells["tmpo".index(column)] = f'"{value}"' if "," in value else value
            text = _put(lines, ",".join(cells))
            every.append(_convert(f"csv {column} {value[:30]!r}", "a.csv", text, f"a.csv:{ROW + 1}"))
    texts: dict[str, str | bytes] = {
        "two columns o": LOG.replace("t,m,p,o", "t,o,p,o"),
        "few": f"{LOG}1\n",
        "many": f"{LOG}99,a,3,4,5\n",
        "open quote": f'{LOG}99,"a,3,4\n',
        "header": "t,m,p,o\n",
        "long stamp": f"{LOG}{'9' * 10_000_000},a,3,4\n",
        "not in order": f"{LOG}1,a,3,4\n",
        "semicolons": LOG.replace(",", ";"),
        "tabs": LOG.replace(",", "\t"),
        "long header": "x," * 700_000 + LOG,
        "utf-16": LOG.encode("utf-16"),
        "utf-16 le": LOG.encode("utf-16-le"),
        "latin": LOG.replace("m1", "é").encode("latin-1"),
        "nul": b"\0" * 1000,
        "empty": b"",
        "random": bytes(range(256)) * 10,
        "gzip": gzip.compress(LOG.encode())[:-9],
    }
    sane: dict[str, str | bytes] = {
        "no newline": LOG.rstrip(),
        "cr": LOG.replace("\n", "\r"),
        "blank": LOG.replace("\n", "\n\n"),
        "long cell": f"{LOG}99,{'a' * (3 << 20)},3,4\n",
        "same time": LOG.replace(".5", "").replace("1", "0"),
    }
    return every + [
        _convert(f"csv {what}", "a.csv", data, "a.csv", accept=what in sane) for what, data in (texts | sane).items()
    ]


def _jsonl() -> list[Case]:
    rows = [{"t": k + 0.5, "m": f"m{k % 2}", "p": 40 + k, "o": 5 + k, "h": [k, k + 1]} for k in range(ROWS)]
    lines, every = [json.dumps(row) for row in rows], list[Case]()
    bad = {
        "twice": lines[ROW].replace('"t"', '"t": 1, "t"'),
        "nested": '{"t": ' + "[" * 3000 + "]" * 3000 + "}",
        "cut": lines[ROW][:20],
        "lacks": '{"t": 1}',
        **{repr(line): line for line in ("[1]", "1", "", "\0", "nope")},
    }
    for column, values in JSONS.items():
        for value in values.split(" "):
            cells = {key: json.dumps(cell) for key, cell in rows[ROW].items()} | {column: value}
            line = "{" + ", ".join(f'"{key}": {cell}' for key, cell in cells.items()) + "}"
            columns = HASHES if column == "h" else COLUMNS
            what = f"jsonl {column} {value[:30]}"
            every.append(_convert(what, "a.jsonl", _put(lines, line), f"a.jsonl:{ROW + 1}", columns=columns))
    for what, line in bad.items():
        every.append(_convert(f"jsonl {what}", "a.jsonl", _put(lines, line), f"a.jsonl:{ROW + 1}"))
    every.append(_convert("jsonl empty", "a.jsonl", "", "a.jsonl"))
    return [*every, _convert("jsonl an array", "a.jsonl", "[" + ",".join(lines) + "]", "a.jsonl")]


def _files() -> list[Case]:
    every = list[Case]()
    ways = INSTEAD | {"junk": lambda path: path.write_bytes(b"\x80\x04junk\xff\0")}
    for what, put in ways.items():
        for suffix in (".csv", ".jsonl", ".parquet", ".pkl", ".csv.gz", ".txt", ""):
            name = f"{what}{suffix}"
            case = _convert(name, name, b"", name)
            every.append(case._replace(put=partial(at, name, put)))
            if suffix == ".parquet":
                for argv in (("trace", "stats", case.argv[2]), (*DRY, "--trace", case.argv[2])):
                    every.append(every[-1]._replace(name=f"traces/{argv[0]} {name}", argv=argv))
    for name in words("'' ' ' nope a¶b x^5000 ¤ sample+x=1 / ."):
        for command in ("stats", "make"):
            every.append(Case(f"traces/{command} {name[:20]!r}", ("trace", command, name), accept=False))
    return every


def _parquet() -> list[Case]:
    every, whole = list[Case](), schema.table(SOUND, META)

    def looked(what: str, table: pa.Table, culprit: str, *, accept: bool = False) -> None:
        def put(here: Path) -> None:
            pq.write_table(table, here / "a.parquet")

        for argv in (("trace", "stats", "{here}/a.parquet"), (*DRY, "--trace", "{here}/a.parquet")):
            every.append(Case(f"traces/{argv[0]} {what}", argv, culprit or "a.parquet", accept, put))

    def changed(column: str, value: Any) -> list[Any]:
        return [*SOUND[column][:ROW], value, *SOUND[column][ROW + 1 :]]

    for column, value in BAD:
        looked(f"{column} {value!r}", schema.table({**SOUND, column: changed(column, value)}, META), column)
    for column, values in SOUND.items():
        at = whole.column_names.index(column)
        looked(f"no {column}", whole.drop_columns([column]), column)
        named = column == "model"
        nulls = pa.array(changed(column, None), pa.string() if named else schema.REQUIRED[column])
        kinds = {
            "a null": nulls.dictionary_encode() if named else nulls,
            "strings": pa.array([str(value) for value in values]),
            "booleans": pa.array([True] * ROWS),
            "lists": pa.array([[1]] * ROWS),
            "nulls": pa.nulls(ROWS),
        }
        for kind, cells in kinds.items():
            looked(f"{column} {kind}", whole.set_column(at, column, cells), column)
    for key, texts in METADATA.items():
        for text in texts.split(" "):
            facts = {**(whole.schema.metadata or {}), key.encode(): text.encode()}
            wrong = key == "span_s" and text not in {"1e300", "true"}
            table = whole.replace_schema_metadata(facts)
            looked(f"metadata {key} {text}", table, key if wrong else "", accept=not wrong)
    looked("no metadata", whole.replace_schema_metadata(None), "", accept=True)
    looked("no rows", whole.slice(0, 0), "no rows")
    looked("hashes alone", schema.table({**SOUND, "prefix_hashes": [[1]] * ROWS}, META), "block_tokens")
    blocks = schema.table({**SOUND, "prefix_hashes": [[1] * 50] * ROWS}, {**META, "block_tokens": 16})
    looked("more hashes than tokens", blocks, "prefix_hashes")
    return every


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw bad rows, bad files, bad columns and bad metadata."""
    pq.write_table(schema.table(SOUND, META), path := here / "a.parquet")
    data, stats = path.read_bytes(), ("trace", "stats", "{here}/a.parquet")
    bit = bits(data).map(lambda of: Case(f"traces/stats {of[0]}", stats, put=written("a.parquet", of[1])))
    cut = cuts(data).map(lambda of: _convert(f"parquet {of[0]}", "a.parquet", of[1], "a.parquet"))
    read = st.sampled_from([("convert", None), ("stats", stats)])
    cut = st.builds(lambda case, how: case._replace(name=f"{case.name} {how[0]}", argv=how[1] or case.argv), cut, read)
    listed = st.sampled_from([*_csv(), *_jsonl(), *_files(), *_parquet()])
    return st.one_of(listed, listed, listed, listed, bit, cut)
