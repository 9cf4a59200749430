"""The canonical table: one row per request, sorted by arrival; an optional column is present only if the source has it.

Schema metadata (JSON values): name, tier, licence, source_sha256, span_s, timestamp_resolution_s, length_origin, seed,
time_scale, block_tokens, time_unit and whether it was guessed. There are also `dropped` (rows that a converter left
out, by reason), whether streams are `ordered`, and for synthetic traces maker and fit. Rows are hashed by content, so
the hash does not depend on the Parquet writer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness import spilled
from harness.policy.types import UserError
from traces.guarded import reading

NAMES = pa.dictionary(pa.int32(), pa.string())
REQUIRED = {
    "request_id": pa.uint64(),
    "arrival_s": pa.float64(),  # from 0
    "model": NAMES,
    "prompt_tokens": pa.uint32(),
    "output_tokens": pa.uint32(),
}
OPTIONAL = {
    "slo_class": NAMES,
    "ttft_slo_s": pa.float32(),
    "tpot_slo_s": pa.float32(),
    "e2e_slo_s": pa.float32(),
    "tenant": NAMES,
    "session_id": pa.uint64(),
    "turn": pa.uint16(),
    "parent_id": pa.uint64(),  # closed loop: sent `think_s` after this one ended
    "think_s": pa.float32(),
    "prefix_hashes": pa.list_(pa.uint64()),  # a hash covers a block (`block_tokens` of the metadata) and all before
    "shared_prefix_tokens": pa.uint32(),  # sources have it where only counts survive
    "sampling": NAMES,  # greedy (temperature 0), or checkpoint: by the defaults of the checkpoint
    "kind": NAMES,  # chat, api, code, agent, reason, image
    "status": NAMES,
    "src": NAMES,
    "src_row": pa.uint64(),  # line of the source, for messages
    "clone_of": pa.uint64(),
}
COLUMNS = REQUIRED | OPTIONAL
TIERS = ("replayed", "composed", "synthetic")


AGAIN = "with the id of an earlier row"  # why a row is left out


def longer(tokens: int) -> str:
    """Return the key under which `dropped` counts the rows left out for having more than `tokens` tokens."""
    return f"of more than {tokens} tokens"


def table(columns: Mapping[str, Any], meta: Mapping[str, Any]) -> pa.Table:
    """Make a canonical table from arrays by name; columns get the types and the order of the schema."""
    fields = [(name, kind) for name, kind in COLUMNS.items() if name in columns]
    arrays = [_array(columns[name], kind) for name, kind in fields]
    schema = pa.schema(
        [pa.field(name, kind, nullable=name in OPTIONAL) for name, kind in fields],
        _encoded(meta),
    )
    return pa.Table.from_arrays(arrays, schema=schema)


def _encoded(meta: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {key.encode(): json.dumps(value, sort_keys=True).encode() for key, value in sorted(meta.items())}


def write(rows: pa.Table, path: Path) -> None:
    """Write a canonical table as Parquet, first under a temporary name, so that no reader sees an incomplete file."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        pq.write_table(rows, part, compression="zstd")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None


def requests(
    arrival_s: Any, model: Any, prompt_tokens: Any, output_tokens: Any, meta: Mapping[str, Any], **more: Any
) -> pa.Table:
    """Make a canonical table of requests that are given in order of arrival, and number them in this order."""
    columns = {"request_id": np.arange(len(arrival_s), dtype=np.uint64), "arrival_s": arrival_s, "model": model}
    return table(columns | {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens} | more, meta)


def read(path: Path) -> pa.Table:
    """Read a canonical Parquet; UserError if the file is not one."""
    with reading(path):
        rows = pq.read_table(path)
        rows.validate(full=True)
    _canonical(path, rows.schema)
    return rows


def long(path: Path) -> tuple[pa.Schema, int] | None:
    """Return the schema and number of rows of a canonical Parquet that must be read in pieces; None for any other file.

    Such a file is too long for memory, and has neither clients nor shared prefixes. Also None for a file that is not
    Parquet; `read` raises the error for it.
    """
    try:
        with pq.ParquetFile(path) as file:
            form, rows = file.schema_arrow, file.metadata.num_rows
    except (OSError, ValueError, MemoryError, pa.ArrowException):
        return None
    if rows <= spilled.MOST_HELD or {"tenant", "prefix_hashes"} & {*form.names}:
        return None
    _canonical(path, form)
    return form, rows


def pieces(path: Path) -> Iterator[pa.Table]:
    """Yield the rows of a canonical Parquet piece by piece, with the required columns and `src_row` alone.

    Raises UserError if the file cannot be read.
    """
    with reading(path), pq.ParquetFile(path) as file:
        names = [name for name in (*REQUIRED, "src_row") if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):  # one iteration over all groups would read ahead without bound
            for batch in file.iter_batches(spilled.PIECE, row_groups=[group], columns=names):
                batch.validate(full=True)
                yield pa.Table.from_batches([batch])


def _canonical(path: Path, form: pa.Schema) -> None:
    """Raise UserError if required columns are missing, or if a canonical column has the wrong type."""
    with reading(path):
        names = form.names  # some may not be UTF-8
    for name in REQUIRED:
        if name not in names:
            raise UserError(f'{path}: no column "{name}" (bench trace convert makes a canonical trace of any table)')
    for name in names:
        if name in COLUMNS and form.field(name).type != COLUMNS[name]:
            raise UserError(
                f'{path}: column "{name}" is {form.field(name).type}, not {COLUMNS[name]} (bench trace convert)'
            )


def noted(rows: pa.Table, note: str, **more: Any) -> pa.Table:
    """Return a canonical table with `note` appended to its metadata's note, and with `more` added to the metadata."""
    meta = metadata(rows) | more
    notes = [str(meta["note"])] if meta.get("note") else []
    meta["note"] = "; ".join([*notes, note] if note else notes)
    return rows.replace_schema_metadata(_encoded(meta))


def foreign(path: Path) -> bool:
    """Tell whether a Parquet file is not a canonical trace.

    Such a file has a run's requests (column arrival_ns), or has none of the columns request_id, arrival_s and
    output_tokens. False for a file that cannot be read.
    """
    try:
        names = set(pq.read_schema(path).names)
    except (OSError, ValueError, MemoryError, pa.ArrowException):
        return False
    return "arrival_ns" in names or not names & {*REQUIRED} - {"model", "prompt_tokens"}


def metadata(rows: pa.Table) -> dict[str, Any]:
    """Read the JSON metadata of a canonical table; keys whose values are not JSON are skipped."""
    meta = {}
    for key, value in (rows.schema.metadata or {}).items():
        try:
            meta[key.decode()] = json.loads(value)
        except ValueError:
            continue
    return meta


def content_sha256(models: tuple[str, ...], arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the hash of the names and arrays that a workload is built from.

    Files of different formats with the same content have the same hash.
    """
    digest = sha256("\n".join(models).encode())
    for name, values in sorted(arrays.items()):
        digest.update(f"\0{name}:{values.dtype.str}\0".encode())
        for piece in spilled.pieces(len(values), values):
            digest.update(np.ascontiguousarray(values[piece]).data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if kind == NAMES:
        array = array if pa.types.is_dictionary(array.type) else array.cast(pa.string()).dictionary_encode()
    return array.cast(kind)
