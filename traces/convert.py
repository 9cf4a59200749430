"""Any table of requests becomes a canonical trace: name its columns, and every trap on the way is an error or a flag.

Read are CSV (also .gz), Parquet, JSON lines, and pickled lists of records (see `unpickle`). A million rows take about a
second, of JSON a few. Released formats, whose columns are known, have a reader each (`traces/readers/`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import checks, schema
from traces.unpickle import unpickle

TimeUnit = Literal["s", "ms", "us", "ns", "clock", "datetime"]
PER_SECOND: Mapping[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
HELP = "bench trace convert --help lists formats"
PICKLED = frozenset({"Request"})
HEADER_BYTES = 1 << 20

# Seconds above 10^8 (three years) are a date's, not a trace's; above 4.1 x 10^9 they are no date before 2100 either.
EPOCH_S, LAST_EPOCH_S = 1e8, 4.1e9
# Mean gaps of public LLM logs lie between 0.5 ms (the largest providers) and 75 s (an image service).
MEAN_GAP_S = (1e-5, 150.0)


class Source(NamedTuple):
    """Raw columns of a file, and the place of each row in it."""

    columns: Mapping[str, pa.Array]
    where: Callable[[int], str]
    line: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # of rows


def convert(
    path: Path,
    columns: Mapping[str, str],
    *,
    time_unit: TimeUnit = "s",
    model: str | None = None,
    name: str | None = None,
    tier: str = "replayed",
    licence: str = "not stated",
    length_origin: Literal["measured", "sampled", "uniform"] = "measured",
    span_s: float | None = None,
    empty: Literal["error", "drop"] = "error",
    untimed: Literal["error", "drop"] = "error",
    max_tokens: int | None = None,
    sort: bool = False,
    trust_times: bool = False,
    jitter_seed: int = 0,
    block_tokens: int | None = None,
) -> pa.Table:
    """Convert a file to a canonical table; `columns` maps canonical names to the file's own.

    Required are arrival_s, prompt_tokens, output_tokens and model (or one `model` for all rows); any other canonical
    column is taken where it is named. Dates, and seconds since an epoch, are counted from the first row.
    Whole-second stamps are spread inside their second by a seeded draw, flagged in the metadata. Rows without tokens,
    and those of a CSV whose stamp is blank (`untimed`), are an error or dropped, those over `max_tokens` are dropped,
    each counted in the metadata.
    `span_s` is the period of circular replay; by default the last stamp plus one mean gap. `block_tokens` is the size
    of the blocks of prefix_hashes, where there are any.
    UserError names file, row, column and value.
    """
    if model is not None and "model" in columns:
        raise UserError("a model column and one model for all rows exclude each other")
    wanted = ("arrival_s", "prompt_tokens", "output_tokens", *(("model",) if model is None else ()))
    if missing := next((key for key in wanted if key not in columns), None):
        raise UserError(f'{path}: name the column of "{missing}" ({HELP})')
    if unknown := next((key for key in columns if key not in schema.COLUMNS), None):
        raise UserError(f'no canonical column "{unknown}"{meant(unknown, schema.COLUMNS)}')
    if (block_tokens is None) is ("prefix_hashes" in columns):
        raise UserError("prefix_hashes and the tokens of their blocks (--block-tokens) are given together")
    if time_unit not in get_args(TimeUnit):
        raise UserError(f'no time unit "{time_unit}" ({", ".join(get_args(TimeUnit))})')
    if tier not in schema.TIERS:
        raise UserError(f'no tier "{tier}" ({", ".join(schema.TIERS)})')
    source = _read(path, columns)
    if not len(next(iter(source.columns.values()))):
        raise UserError(f"{path}: no rows")

    rows = len(next(iter(source.columns.values())))
    if untimed == "drop":
        source = _timed(source, path, columns["arrival_s"])
    when, resolution_s = _times(source, columns["arrival_s"], time_unit, sort, trust_times)
    tokens = {key: _tokens(source, columns[key]) for key in ("prompt_tokens", "output_tokens")}
    if "request_id" in columns:
        ids = source.columns[columns["request_id"]]
        checks.unique(ids.to_numpy(zero_copy_only=False), source.where, columns["request_id"])
    keep = np.ones(len(when), bool)
    for key, counts in tokens.items():
        if empty == "drop":
            keep &= counts != 0
        checks.tokens(np.where(keep, counts, 1), source.where, columns[key], "--empty drop leaves such rows out")
    dropped_empty = int((~keep).sum())
    if max_tokens is not None:
        keep &= tokens["prompt_tokens"] + tokens["output_tokens"] <= max_tokens
    if not keep.any():
        raise UserError(f"{path}: no row is left of {len(keep)}")
    if resolution_s == 1.0:
        when = when + np.random.Generator(np.random.Philox(key=jitter_seed)).uniform(0, 1, len(when))
    order = np.flatnonzero(keep)
    order = order[np.argsort(when[order], kind="stable")]
    when = when[order]
    checks.reached(when, lambda row: source.where(int(order[row])), columns["arrival_s"])
    mean_gap_s = (when[-1] - when[0]) / max(1, len(when) - 1)
    if span_s is None:
        span_s = float(when[-1] + (mean_gap_s or 1.0))
    elif not when[-1] <= span_s <= checks.MOST_S:
        most = f"or after {checks.MOST_S:g} s"
        raise UserError(f"{path}: a span of {span_s:g} s ends before the last request at {when[-1]:g} s, {most}")

    out: dict[str, Any] = {"request_id": _ids(source, columns, order), "arrival_s": when, "src_row": source.line(order)}
    for key, column in columns.items():
        if key not in out and key not in tokens:
            out[key] = _cast(source, column, schema.COLUMNS[key]).take(pa.array(order))
            if pa.types.is_list(out[key].type) and out[key].flatten().null_count:
                row = next(i for i, ids in enumerate(out[key].to_pylist()) if None in (ids or ()))
                raise UserError(f'{source.where(int(order[row]))}: column "{column}" has an empty id')
    if "model" in out:
        models = out["model"].combine_chunks() if isinstance(out["model"], pa.ChunkedArray) else out["model"]
        codes = np.asarray(models.indices.to_numpy(zero_copy_only=False), np.int64)
        checks.names(models.dictionary.to_pylist(), codes, lambda row: source.where(int(order[row])), columns["model"])
    elif not (model and model.isprintable()):
        raise UserError(f'--model "{model}" is no name')
    if model is not None:
        out["model"] = pa.array([model]).dictionary_encode().take(pa.array(np.zeros(len(order), np.int64)))
    out |= {key: counts[order] for key, counts in tokens.items()}
    meta = {
        "name": name or path.name.split(".")[0],
        "tier": tier,
        "licence": licence,
        "length_origin": length_origin,
        "source": path.name,
        "source_sha256": schema.file_sha256(path),
        "span_s": span_s,
        "timestamp_resolution_s": resolution_s,
        "jitter_seed": jitter_seed if resolution_s == 1.0 else None,
        "dropped_empty": dropped_empty,
        "dropped_untimed": rows - len(keep),
        "dropped_long": len(keep) - dropped_empty - len(order),
        "time_scale": 1.0,
    }
    if block_tokens is not None:
        meta["block_tokens"] = block_tokens
    return schema.table(out, meta)


def _read(path: Path, columns: Mapping[str, str]) -> Source:
    wanted = list(dict.fromkeys(columns.values()))
    suffixes = path.suffixes
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if suffixes[-1:] in ([".parquet"], [".pq"]):
        return _parquet(path, wanted)
    if suffixes[-1:] in ([".pkl"], [".pickle"]):
        return _pickle(path, wanted)
    if suffixes[-1:] in ([".jsonl"], [".ndjson"]):
        return _jsonl(path, wanted)
    return _csv(path, wanted)


def _csv(path: Path, wanted: list[str]) -> Source:
    """Read columns as text, so that a bad value can be shown as it stands; the header is line 1."""
    ragged: list[str] = []

    def bad_row(row: Any) -> str:
        ragged.append(f"{path}:{row.number}: {row.actual_columns} columns, the header has {row.expected_columns}")
        return "error"

    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            header = stream.read(HEADER_BYTES).splitlines()[:1]
        names = next(csv.reader([header[0].decode("utf-8-sig")])) if header else []
        if not names:
            raise UserError(f"{path}: no rows")
        _has(path, wanted, names)
        rows = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(use_threads=False),  # only so are rows numbered
            parse_options=pyarrow.csv.ParseOptions(ignore_empty_lines=False, invalid_row_handler=bad_row),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(ragged[0] if ragged else f"{path}: not a readable CSV: {str(error).splitlines()[0]}") from None
    end = rows.num_rows
    while end and not any(rows[name][end - 1].as_py() for name in wanted):
        end -= 1  # blank lines at the end; elsewhere they are errors
    columns = {name: rows[name].slice(0, end).combine_chunks() for name in wanted}
    return Source(columns, lambda row: f"{path}:{row + 2}", lambda index: np.asarray(index, np.int64) + 2)


def _parquet(path: Path, wanted: list[str]) -> Source:
    try:
        names = pq.read_schema(path).names
        _has(path, wanted, names)
        rows = pq.read_table(path, columns=wanted)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {next(iter(str(error).splitlines()), '')}") from None
    return _typed(path, {name: rows[name].combine_chunks() for name in wanted})


def _jsonl(path: Path, wanted: list[str]) -> Source:
    """Read one JSON object a line."""
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line, object_pairs_hook=_once)
                if not isinstance(row, dict):
                    raise UserError(f"{path}:{number}: not a JSON object")
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}:{len(rows) + 1}: not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{path}:{len(rows) + 1}: nested too deeply") from None
    if not rows:
        raise UserError(f"{path}: no rows")
    return _typed(path, _columns(path, rows, wanted))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON from its pairs; ValueError for a key that stands twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'the key "{next(key for key in keys if keys.count(key) > 1)}" is there twice')
    return record


def _pickle(path: Path, wanted: list[str]) -> Source:
    records = unpickle(path, PICKLED)
    if not isinstance(records, list) or not records:
        raise UserError(f"{path}: holds no list of records")
    rows = [record if isinstance(record, dict) else getattr(record, "__dict__", {}) for record in records]
    return _typed(path, _columns(path, rows, wanted))


def _timed(source: Source, path: Path, column: str) -> Source:
    """Return the rows whose stamp is not blank; UserError where all are blank."""
    stamps = source.columns[column]
    if not pa.types.is_string(stamps.type):
        return source
    kept = np.flatnonzero(pc.not_equal(pc.utf8_trim_whitespace(stamps), "").to_numpy(zero_copy_only=False))
    if not len(kept):
        raise UserError(f'{path}: column "{column}" is blank in every row')
    columns = {name: values.take(pa.array(kept)) for name, values in source.columns.items()}
    return Source(columns, lambda row: source.where(int(kept[row])), lambda index: source.line(kept[index]))


def _columns(path: Path, rows: Sequence[Mapping[str, Any]], wanted: list[str]) -> dict[str, pa.Array]:
    """Turn records into columns; one that a record lacks is empty there."""
    _has(path, wanted, list(rows[0]))
    columns = {}
    for name in wanted:
        values = [row.get(name) for row in rows]
        if (array := _inferred(values)) is None:
            row = _first_bad(partial(_alike, values), len(values))
            raise UserError(f'{path}:{row + 1}: column "{name}" is {_quoted(values[row])}, of another kind than before')
        columns[name] = array
    return columns


def _alike(values: list[Any], _low: int, high: int) -> bool:
    return _inferred(values[:high]) is not None


def _first_bad(fine: Callable[[int, int], bool], count: int) -> int:
    """Find the first value that `fine` rejects, by halving: it lies in [low, high), and none lies before."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if fine(low, middle):
            low = middle
        else:
            high = middle
    return low


def _inferred(values: list[Any]) -> pa.Array | None:
    """Values as a column of the type that they have; None where there is none."""
    for kind in (None, pa.list_(pa.uint64())):  # hashes of 64 bits
        with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):
            return pa.array(values, kind)
    return None


def _typed(path: Path, columns: Mapping[str, pa.Array]) -> Source:
    """Give rows their numbers, from 1: there is no header."""

    def where(row: int) -> str:
        return f"{path}:{row + 1}"

    for name, values in columns.items():
        if values.null_count:
            raise UserError(f'{where(values.is_null().index(True).as_py())}: column "{name}" is empty')
    return Source(columns, where, lambda rows: np.asarray(rows, np.int64) + 1)


def _has(path: Path, wanted: list[str], names: list[str]) -> None:
    for name in wanted:
        if name not in names:
            raise UserError(
                f'{path}: no column "{name}"{meant(name, map(str, names))} (it has {", ".join(map(str, names[:12]))})'
            )
        if names.count(name) > 1:
            raise UserError(f'{path}: there are {names.count(name)} columns "{name}"')


def _times(
    source: Source, column: str, unit: TimeUnit, sort: bool, trust: bool
) -> tuple[NDArray[np.float64], float | None]:
    """Seconds from the start, sorted or refused, and 1.0 where the source counts whole seconds."""
    raw = source.columns[column]
    if unit == "datetime":
        when = _dates(source, column, raw)
    elif unit == "clock":
        when = _clock(source, column, raw)
    elif pa.types.is_temporal(raw.type):
        raise UserError(f'{source.where(0)}: column "{column}" holds dates (--time-unit datetime)')
    else:
        name = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}[unit]
        when = _numbers(source, column, pa.float64(), f"not a time in {name} ({HELP})") / PER_SECOND[unit]
        checks.times(when, source.where, column)
    if not sort:
        checks.ordered(when, source.where, column, "--sort puts rows in order")
    first, last = float(when.min()), float(when.max())
    if last > LAST_EPOCH_S and not trust:
        row = int(when.argmax())
        raise UserError(
            f'{source.where(row)}: column "{column}" is {raw[row]}, after the year 2100 as {unit}: a finer unit '
            "(--time-unit ms, us or ns)?"
        )
    if first > EPOCH_S or unit == "datetime":
        when = when - first
        last -= first
        first = 0.0
    mean_gap_s = (last - first) / max(1, len(when) - 1)
    if len(when) > 1 and last > first and not MEAN_GAP_S[0] <= mean_gap_s <= MEAN_GAP_S[1] and not trust:
        raise UserError(
            f'{source.where(0)}: column "{column}" gives {len(when)} requests over {last - first:.6g} s '
            f"as {unit}: another unit (--time-unit)? (--trust-times if it is right)"
        )
    whole = len(when) > 1 and last > first and bool((when == np.floor(when)).all())
    return when, 1.0 if whole else None


def _dates(source: Source, column: str, raw: pa.Array) -> NDArray[np.float64]:
    import pandas as pd  # only for dates

    stamps = pd.to_datetime(raw.to_pandas(), format="ISO8601", errors="coerce", utc=True)
    bad = stamps.isna().to_numpy()
    if bad.any():
        row = int(bad.argmax())
        raise UserError(f'{source.where(row)}: column "{column}" is "{raw[row]}", not a date as in ISO 8601 ({HELP})')
    ns = stamps.dt.as_unit("ns").astype("int64").to_numpy()
    return np.asarray((ns - ns.min()) / 1e9, np.float64)


def _clock(source: Source, column: str, raw: pa.Array) -> NDArray[np.float64]:
    """Seconds of HH:MM:SS[.mmm]."""
    text = raw.cast(pa.string())
    parts = pc.extract_regex(text, r"^\s*(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d(?:\.\d+)?)\s*$")
    if parts.null_count:
        row = parts.is_null().index(True).as_py()
        raise UserError(f'{source.where(row)}: column "{column}" is "{text[row]}", not HH:MM:SS[.mmm] ({HELP})')
    h, m, s = (pc.struct_field(parts, name).cast(pa.float64()).to_numpy(zero_copy_only=False) for name in "hms")
    return np.asarray(3600 * h + 60 * m + s, np.float64)


def _tokens(source: Source, column: str) -> NDArray[np.int64]:
    return np.asarray(_numbers(source, column, pa.int64(), "not a whole number of tokens"), np.int64)


def _numbers(source: Source, column: str, kind: pa.DataType, why: str) -> NDArray[Any]:
    return np.asarray(_cast(source, column, kind, why).to_numpy(zero_copy_only=False))


def _cast(source: Source, column: str, kind: pa.DataType, why: str | None = None) -> pa.Array:
    """Cast a column; the first value that does not go is found by halving."""
    values = source.columns[column]
    if pa.types.is_boolean(values.type):
        raise UserError(f'{source.where(0)}: column "{column}" holds truth values, {why or f"not {kind}"}')
    if pa.types.is_string(values.type) and not (kind == schema.NAMES or pa.types.is_string(kind)):
        values = pc.utf8_trim_whitespace(values)
    try:
        return _as(values, kind)
    except pa.ArrowException:

        def fine(low: int, high: int) -> bool:
            part = values.take(pa.array(range(low, high)))  # a slice of lists would be cast with all around it
            with suppress(pa.ArrowException):
                return bool(_as(part, kind).type)
            return False

        low = _first_bad(fine, len(values))
        value = _quoted(source.columns[column][low].as_py())
        raise UserError(f'{source.where(low)}: column "{column}" is {value}, {why or f"not {kind}"}') from None


def _as(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind == schema.NAMES:
        return values.cast(pa.string()).dictionary_encode()
    return values.cast(kind)


def _ids(source: Source, columns: Mapping[str, str], order: NDArray[np.int64]) -> pa.Array:
    """Keep the source's ids where they are whole numbers, else number the rows."""
    if "request_id" in columns:
        try:
            return source.columns[columns["request_id"]].cast(pa.uint64()).take(pa.array(order))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            pass
    return pa.array(np.arange(len(order), dtype=np.uint64))


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
