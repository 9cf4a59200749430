"""Conversion of any table of requests to a canonical trace, given the names of its columns.

The file may be CSV, Parquet or JSON; CSV and JSON may be gzipped. JSON may be an array, a sequence of objects, or one
object with a list of objects. A dot in a column's name means a field of a nested object, as in `usage.input`. Columns
with a usual name need not be named (`traces/usual.py`). A doubtful value raises an error or is noted in the metadata. A
million rows take about a second from CSV, and a few seconds from JSON. Each format with known columns has a reader of
its own (`traces/readers/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import checks, prefix, schema, usual
from traces.columns import first_bad, names_of, quoted, read
from traces.guarded import reading, regular
from traces.served import Source, answered, count
from traces.usual import EPOCH_S, LAST_EPOCH_S, MEAN_GAP_S, PER_SECOND, TimeUnit

if TYPE_CHECKING:
    import pandas as pd

HELP = "bench trace convert --help lists formats"
CLOCK = r"^\s*(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d(?:\.\d+)?)\s*$"

DROP = "--drop-bad leaves such rows out"


def convert(
    path: Path,
    columns: Mapping[str, str] | None = None,
    *,
    model: str | None = None,
    block_tokens: int | None = None,
    **how: Any,
) -> pa.Table:
    """Convert a file to a canonical table; `columns` gives the file's own name for each canonical name.

    The columns arrival_s, prompt_tokens and output_tokens are required. So is model, unless the argument `model` names
    one model for all rows. For a required column that `columns` lacks, a column with a usual name is used. Other
    canonical columns are read only if `columns` has them. `how` is passed on to `canonical`. UserError names all
    missing columns, or the file, row, column and value of a fault.
    """
    columns = dict(columns or {})
    if model is not None and "model" in columns:
        raise UserError("a model column and one model for all rows exclude each other")
    if unknown := next((key for key in columns if key not in schema.COLUMNS), None):
        raise UserError(f'no canonical column "{unknown}"{meant(unknown, schema.COLUMNS)}')
    if (block_tokens is None) is ("prefix_hashes" in columns):
        raise UserError("prefix_hashes and the tokens of their blocks (--block-tokens) are given together")
    wanted = ("arrival_s", "prompt_tokens", "output_tokens", *(("model",) if model is None else ()))
    regular(path)
    with reading(path):
        if missing := [key for key in wanted if key not in columns]:
            columns |= usual.named(path, missing, names_of(path))
        source = read(path, columns)
        return canonical(source, columns, model=model, block_tokens=block_tokens, **how)


def table(path: Path, columns: Mapping[str, str] | None = None, **how: Any) -> pa.Table:
    """Convert a table whose format no reader knows; the arguments are those of `convert`.

    Unlike `convert`, this also finds the columns of request ids and of request states by their usual names. Rows of
    failed requests are left out, and so are rows that repeat the id of an earlier row. The metadata's `dropped` counts
    both.
    """
    with reading(path):
        more = usual.optional(names_of(path))
    return convert(path, more | dict(columns or {}), **how)


def canonical(
    source: Source,
    columns: Mapping[str, str],
    *,
    time_unit: TimeUnit | None = None,
    model: str | None = None,
    name: str | None = None,
    tier: str = "replayed",
    licence: str = "not stated",
    length_origin: Literal["measured", "sampled", "uniform"] = "measured",
    span_s: float | None = None,
    drop_bad: bool = False,
    max_tokens: int | None = None,
    sort: bool = False,
    trust_times: bool = False,
    jitter_seed: int = 0,
    block_tokens: int | None = None,
    dropped: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> pa.Table:
    """Make a canonical table from a file's raw columns; `columns` gives the file's own name for each canonical name.

    Without `time_unit` the unit is guessed (`usual.unit`), and the metadata says so. Dates, and seconds since an epoch,
    are counted from the earliest row. If all timestamps are whole seconds, each row is moved later by a random fraction
    of a second, and the metadata says so. `jitter_seed` is the seed of these moves.

    A row without a valid time, number of tokens or model is an error; with `drop_bad` it is left out. Rows of more than
    `max_tokens` tokens, prompt and output together, are always left out. The metadata's `dropped` counts the rows left
    out by reason, and includes the counts in the argument `dropped`. UserError names file, row, column and value.

    `span_s` is the period of circular replay; its default is the last arrival plus one mean gap. `block_tokens` is the
    size of the blocks in prefix_hashes, and is needed if that column is given.
    """
    path = source.path
    if not len(source.lines):
        raise UserError(f"{path}: no rows")
    unit = time_unit or usual.unit(columns["arrival_s"], source.columns[columns["arrival_s"]], trusted=trust_times)
    left = dict(dropped or {})
    source = answered(source, columns, left)
    if drop_bad:
        source = _sound(source, columns, unit, left)
    else:
        _filled(source, columns)
    when, resolution_s = _times(source, columns["arrival_s"], unit, sort, trust_times)
    tokens = {key: _tokens(source, columns[key]) for key in ("prompt_tokens", "output_tokens")}
    for key, counts in tokens.items():
        checks.tokens(counts, source.where, columns[key], DROP)
    keep = np.ones(len(when), bool)
    if max_tokens is not None:
        keep = tokens["prompt_tokens"] + tokens["output_tokens"] <= max_tokens
        count(left, schema.longer(max_tokens), int((~keep).sum()))
    if drop_bad and block_tokens is not None:
        hashes = _cast(source, columns["prefix_hashes"], schema.COLUMNS["prefix_hashes"])
        bad = keep & prefix.odd(hashes, block_tokens, tokens["prompt_tokens"])
        count(left, "whose blocks cannot be read", int(bad.sum()))
        keep &= ~bad
    if not keep.any():
        raise UserError(f"{path}: no row is left of {len(keep)}")
    if resolution_s == 1.0:
        when = when + np.random.Generator(np.random.Philox(key=jitter_seed)).uniform(0, 1, len(when))
    order = np.flatnonzero(keep)
    order = order[np.argsort(when[order], kind="stable")]
    source, when = source.take(order), when[order]
    checks.reached(when, source.where, columns["arrival_s"])
    out: dict[str, Any] = {"request_id": _ids(source, columns), "arrival_s": when, "src_row": source.lines}
    out |= {key: counts[order] for key, counts in tokens.items()} | {"model": _models(source, columns, model)}
    for key in [key for key in columns if key not in out]:
        out[key] = _cast(source, columns[key], schema.COLUMNS[key])
    meta = {
        "name": name or path.name.split(".")[0],
        "tier": tier,
        "licence": licence,
        "length_origin": length_origin,
        "source": path.name,
        "source_sha256": schema.file_sha256(path),
        "span_s": _span_s(path, when, span_s),
        "time_unit": unit,
        "time_unit_guessed": time_unit is None,
        "timestamp_resolution_s": resolution_s,
        "jitter_seed": jitter_seed if resolution_s == 1.0 else None,
        "dropped": left,
        "time_scale": 1.0,
        **(extra or {}),
    }
    if block_tokens is None:
        return schema.table(out, meta)
    made = schema.table(out, meta | {"block_tokens": block_tokens})
    code = np.asarray(made["model"].combine_chunks().indices.to_numpy(), np.int32)
    prompt = made["prompt_tokens"].to_numpy().astype(np.int32)
    prefix.read(made["prefix_hashes"], block_tokens, code, prompt, source.where, columns["prefix_hashes"], DROP)
    return made


def _models(source: Source, columns: Mapping[str, str], model: str | None) -> pa.Array:
    """Return the model of each row; if `model` is given, it is the model of all rows.

    Raises UserError for a name that is empty or not printable.
    """
    if model is not None:
        if not (model and model.isprintable()):
            raise UserError(f'--model "{model}" is no name')
        return pa.DictionaryArray.from_arrays(np.zeros(len(source.lines), np.int32), [model])
    models = _cast(source, columns["model"], schema.COLUMNS["model"])
    codes = np.asarray(models.indices.to_numpy(zero_copy_only=False), np.int64)
    checks.names(models.dictionary.to_pylist(), codes, source.where, columns["model"], DROP)
    return models


def _span_s(path: Path, when: NDArray[np.float64], span_s: float | None) -> float:
    """Return the period of circular replay: `span_s`, or by default the last arrival plus one mean gap.

    Raises UserError for a `span_s` that ends before the last arrival, or is above `MOST_S`.
    """
    if span_s is None:
        mean_gap_s = (when[-1] - when[0]) / max(1, len(when) - 1)
        return float(when[-1] + (mean_gap_s or 1.0))
    if not when[-1] <= span_s <= checks.MOST_S:
        most = f"or after {checks.MOST_S:g} s"
        raise UserError(f"{path}: a span of {span_s:g} s ends before the last request at {when[-1]:g} s, {most}")
    return span_s


def _filled(source: Source, columns: Mapping[str, str]) -> None:
    """Raise UserError for an empty value in any column except those of request ids and request states."""
    for key, name in columns.items():
        if key not in usual.OPTIONAL and (values := source.columns.get(name)) is not None and values.null_count:
            row = values.is_null().index(True).as_py()
            way = f"--model NAME gives all rows one; {DROP}" if key == "model" else DROP
            raise UserError(f'{source.where(row)}: column "{name}" is empty ({way})')


def _sound(source: Source, columns: Mapping[str, str], unit: TimeUnit, left: dict[str, int]) -> Source:
    """Return the rows that are valid requests. Each other row is counted in `left` under its first fault."""
    keep = np.ones(len(source.lines), bool)
    for key in [key for key in ("arrival_s", "prompt_tokens", "output_tokens", "model") if key in columns]:
        values = source.columns[columns[key]]
        blank = _blank(values)
        if key == "model":
            names = ["" if name is None else str(name) for name in values.to_pylist()]
            wrong = ~blank & np.array([not name.isprintable() for name in names])
        elif key == "arrival_s":
            wrong = ~_are_times(values, unit) & ~blank
        else:
            numbers = usual.floats(values)
            zero = ~blank & (numbers == 0)
            blank |= zero
            wrong = ~blank & ~((numbers >= 1) & (numbers <= checks.MOST_TOKENS) & (numbers == np.floor(numbers)))
        what = {"arrival_s": "time", "model": "model"}.get(key, key.replace("_", " "))
        for mask, reason in ((blank, f"without {what}"), (wrong, f"whose {what} cannot be read")):
            count(left, reason, int((mask & keep).sum()))
            keep &= ~mask
    return source.only(keep, left)


def _blank(values: pa.Array) -> NDArray[np.bool_]:
    empty = values.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_string(values.type):
        empty = empty | pc.equal(pc.fill_null(pc.utf8_trim_whitespace(values), ""), "").to_numpy(zero_copy_only=False)
    return np.asarray(empty, bool)


def _are_times(values: pa.Array, unit: TimeUnit) -> NDArray[np.bool_]:
    if unit == "datetime":
        return ~_stamps(values).isna().to_numpy()
    if unit == "clock":
        fits = pc.fill_null(pc.match_substring_regex(values.cast(pa.string()), CLOCK), False)
        return np.asarray(fits.to_numpy(zero_copy_only=False), bool)
    numbers = usual.floats(values)
    return np.isfinite(numbers) & (numbers >= 0)


def _times(
    source: Source, column: str, unit: TimeUnit, sort: bool, trust: bool
) -> tuple[NDArray[np.float64], float | None]:
    """Return each row's arrival in seconds, and the resolution of the timestamps.

    Dates, and seconds since an epoch, are counted from the earliest row. The resolution is 1.0 s if all timestamps are
    whole seconds, else None. Raises UserError for rows out of order, unless `sort` is true. Also raises it if the unit
    seems wrong, unless `trust` is true.
    """
    raw = source.columns[column]
    if unit == "datetime":
        when = _dates(source, column, raw)
    elif unit == "clock":
        when = _clock(source, column, raw)
    elif pa.types.is_temporal(raw.type):
        raise UserError(f'{source.where(0)}: column "{column}" holds dates (--time-unit datetime)')
    else:
        why = f"not a time in {usual.UNIT_NAMES[unit]} ({HELP}; {DROP})"
        when = _numbers(source, column, pa.float64(), why) / PER_SECOND[unit]
        checks.times(when, source.where, column, DROP)
    if not sort:
        dated = np.array(raw.to_pylist(), object) if unit in {"datetime", "clock"} else None
        checks.ordered(when, source.where, column, "--sort puts rows in order", shown=dated)
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
    stamps = _stamps(raw)
    bad = stamps.isna().to_numpy()
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f'{source.where(row)}: column "{column}" is "{raw[row]}", not a date as in ISO 8601 ({HELP}; {DROP})'
        )
    ns = stamps.dt.as_unit("ns").astype("int64").to_numpy()
    return np.asarray((ns - ns.min()) / 1e9, np.float64)


def _stamps(raw: pa.Array) -> pd.Series:
    """Parse dates; a date without a time zone is taken as UTC, and a value that is not a date becomes NaT."""
    import pandas as pd  # only for dates

    stamps: pd.Series = pd.to_datetime(raw.to_pandas(), format="ISO8601", errors="coerce", utc=True)
    return stamps


def _clock(source: Source, column: str, raw: pa.Array) -> NDArray[np.float64]:
    """Convert clock times HH:MM:SS[.mmm] to seconds since midnight."""
    text = raw.cast(pa.string())
    parts = pc.extract_regex(text, CLOCK)
    if parts.null_count:
        row = parts.is_null().index(True).as_py()
        raise UserError(f'{source.where(row)}: column "{column}" is "{text[row]}", not HH:MM:SS[.mmm] ({HELP}; {DROP})')
    h, m, s = (pc.struct_field(parts, name).cast(pa.float64()).to_numpy(zero_copy_only=False) for name in "hms")
    return np.asarray(3600 * h + 60 * m + s, np.float64)


def _tokens(source: Source, column: str) -> NDArray[np.int64]:
    return np.asarray(_numbers(source, column, pa.int64(), f"not a whole number of tokens ({DROP})"), np.int64)


def _numbers(source: Source, column: str, kind: pa.DataType, why: str) -> NDArray[Any]:
    return np.asarray(_cast(source, column, kind, why).to_numpy(zero_copy_only=False))


def _cast(source: Source, column: str, kind: pa.DataType, why: str | None = None) -> pa.Array:
    """Cast a column to the type `kind`. UserError names the first value that cannot be cast, and says `why`."""
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

        low = first_bad(fine, len(values))
        value = quoted(source.columns[column][low].as_py())
        raise UserError(f'{source.where(low)}: column "{column}" is {value}, {why or f"not {kind}"}') from None


def _as(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind == schema.NAMES:
        return values.cast(pa.string()).dictionary_encode()
    if pa.types.is_integer(kind) and pa.types.is_string(values.type):
        with suppress(pa.ArrowException):
            return values.cast(kind)
        return values.cast(pa.float64()).cast(kind)  # 63.0 is 63
    return values.cast(kind)


def _ids(source: Source, columns: Mapping[str, str]) -> pa.Array:
    """Return the file's request ids if they are whole numbers; otherwise number the rows from 0."""
    if "request_id" in columns:
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return source.columns[columns["request_id"]].cast(pa.uint64())
    return pa.array(np.arange(len(source.lines), dtype=np.uint64))
