"""Conversion of logs of gateways and servers to canonical tables: times, counts, model names and keyed hashes only.

A reader maps the fields of a record to canonical columns. It may also leave a record out and say why, for example that
the request failed or that a cache answered it. Prompts, answers, keys and names of users do not reach the table: it has
the mapped fields alone, and sessions only as hashes.

Sessions and prompt blocks are numbered by keyed hashes. The key is the BLAKE2b hash of the log's bytes, so the same log
always gives the same numbers. The table alone does not reveal the names: the key cannot be computed from the SHA-256
hash in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.policy.types import UserError
from traces import convert, records, schema
from traces.guarded import reading
from traces.records import Record
from traces.served import Source, count

Lines = Iterator[tuple[int, Record]]  # records with the lines where they stand
Fields = Mapping[str, str | tuple[str, ...]]  # the log's name of a canonical column, or several: the first not blank


def read(
    path: Path,
    fields: Fields,
    *,
    skip: Callable[[Record], str | None] | None = None,
    expand: Callable[[Lines], Lines] | None = None,
    also: Collection[str] | None = None,
    unit: float = 1.0,
    block_tokens: int | None = None,
    drop_bad: bool = False,
    **known: Any,
) -> pa.Table:
    """Read a log as a canonical table; `fields` gives the log's own name, or several names, of each canonical column.

    Of several names, the first one with a value in the record is used. `expand` may split records, or add fields to
    them. `skip` returns None to keep a record, "" for a record that is not a request, or else the reason to leave it
    out. If the log is CSV or Parquet and `also` is given, only the columns in `fields` and `also` are read.

    A numeric timestamp is multiplied by `unit` to give seconds. Rows are sorted by time, because logs are written when
    requests end. Rows that repeat a request id are left out. UserError names the line of a bad row; with `drop_bad`
    such rows are left out instead. The metadata's `dropped` counts the rows that are left out, by reason.
    """
    names = {key: (name,) if isinstance(name, str) else name for key, name in fields.items()}
    wanted = None if also is None else {*also, *(name.split(".")[0] for each in names.values() for name in each)}
    hashed, dropped = _Hashes(_key(path)), dict[str, int]()
    places, rows = list[int](), list[dict[str, Any]]()
    ids = set[str]()
    lines = records.records(path, wanted)
    for line, record in lines if expand is None else expand(lines):
        with reading(path, line):
            reason = None if skip is None else skip(record)
        row = {key: first(record, each) for key, each in names.items()} if reason is None else {}
        if row and (wrong := _wrong(row, names, unit, block_tokens)):
            reason, text = wrong
            if not drop_bad:
                raise UserError(f"{path}:{line}: {text} ({convert.DROP})")
        if reason is None and (name := row.get("request_id")) is not None:
            reason = schema.AGAIN if str(name) in ids else None
            ids.add(str(name))
        if reason is None:
            places.append(line)
            rows.append(row)
        elif reason:
            count(dropped, reason)
    if not rows:
        why = "".join(f", {n} {reason}" for reason, n in dropped.items())
        raise UserError(f"{path}: no request that was served{why}")
    columns = _columns(rows, hashed, block_tokens)
    if known.get("model"):
        del columns["model"]
    unblocked = columns["prefix_hashes"].value_lengths().to_pylist().count(0) if "prefix_hashes" in columns else 0
    named = {key: names.get(key, (key,))[0] for key in columns}
    source = Source(path, {named[key]: values for key, values in columns.items()}, np.asarray(places, np.int64))
    how: dict[str, Any] = {"time_unit": "s", "sort": True} | known
    return convert.canonical(
        source,
        named,
        **how,
        drop_bad=drop_bad,
        dropped=dropped,
        block_tokens=block_tokens if "prefix_hashes" in columns else None,
        extra={"without_blocks": unblocked} if unblocked else {},
    )


def _columns(rows: Sequence[Mapping[str, Any]], hashed: _Hashes, block_tokens: int | None) -> dict[str, pa.Array]:
    """Return rows as columns, with keyed hashes in place of the names of sessions and blocks."""
    columns: dict[str, pa.Array] = {
        "arrival_s": pa.array([row["arrival_s"] for row in rows], pa.float64()),
        "model": pa.array([_name(row.get("model")) for row in rows], pa.string()),
    }
    for key in ("prompt_tokens", "output_tokens"):  # as text, so that messages can show a bad one
        columns[key] = pa.array([None if row[key] is None else str(row[key]) for row in rows], pa.string())
    if any(row.get("session_id") is not None for row in rows):
        sessions = [hashed.session(row["session_id"], k) for k, row in enumerate(rows)]
        columns["session_id"] = pa.array(sessions, pa.uint64())
    if block_tokens and any(row.get("prefix_hashes") for row in rows):
        chains = [hashed.chain(_whole(row, block_tokens)) for row in rows]
        columns["prefix_hashes"] = pa.array(chains, pa.list_(pa.uint64()))
    return columns


def _wrong(
    row: dict[str, Any], names: Mapping[str, tuple[str, ...]], unit: float, block_tokens: int | None
) -> tuple[str, str] | None:
    """Turn a row's timestamp into seconds, in place, and check its prompt blocks.

    Return None if both can be read. Otherwise return the reason under which the row is counted, and the text of the
    error.
    """
    at, blocks = row["arrival_s"], row.get("prefix_hashes")
    try:
        row["arrival_s"] = seconds(at, unit)
    except (TypeError, ValueError, OverflowError):
        return "whose time cannot be read", f'"{names["arrival_s"][0]}" is {_shown(at)}, no time'
    if block_tokens and not _are_ids(blocks):
        return "whose blocks cannot be read", f"its blocks are {_shown(blocks)}, no list of ids"
    return None


def first(record: Record, names: Collection[str]) -> Any:
    """Return the first value under `names` that is not blank, else None; a dot in a name means a nested object."""
    return next((value for name in names if not blank(value := records.dig(record, name))), None)


def seconds(value: Any, unit: float = 1.0) -> float | None:
    """Return a timestamp as seconds; None for a blank one.

    A date gives seconds since 1970, in UTC if it states no time zone. A number is multiplied by `unit`. Raises
    ValueError or TypeError for a value that is not a timestamp.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str | datetime):
        raise TypeError(value)
    if isinstance(value, datetime):
        stamp = value
    else:
        with suppress(ValueError):
            return float(value) * unit
        stamp = datetime.fromisoformat(str(value).strip().removesuffix(" UTC"))
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def _name(model: Any) -> str | None:
    """Return the name of a model; None for a value that is not a name."""
    named = isinstance(model, str | int) and not isinstance(model, bool) and not blank(model)
    return str(model).encode("utf-8", "replace").decode() if named else None


def blank(value: Any) -> bool:
    """Tell whether a value of a log is None, empty text, or text of spaces alone."""
    return value is None or (isinstance(value, str) and not value.strip())


def total(*counts: Any) -> Any:
    """Return the sum of token counts; blank counts are skipped, and None is returned if all are blank.

    The first count is added as it is. A later count that is negative means unknown and adds nothing. If a count is not
    a number, return the first count unchanged; the later check of the row accepts or refuses it.
    """
    known = [count for count in counts if not blank(count)]
    if len(known) <= 1 or not all(isinstance(count, int | float) or str(count).isdecimal() for count in known[1:]):
        return known[0] if known else None
    try:
        return int(known[0]) + sum(max(0, int(count)) for count in known[1:])
    except (TypeError, ValueError):
        return known[0]


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value as a mapping.

    The value may be a mapping, the text of a JSON object, or a list of pairs. Any other value gives an empty mapping.
    """
    if isinstance(value, str) and value[:1] == "{":
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if isinstance(value, list):  # pairs, as Parquet has maps
        value = {pair[0]: pair[1] for pair in value if isinstance(pair, tuple | list) and len(pair) == 2}
    return value if isinstance(value, Mapping) else {}


def _are_ids(blocks: Any) -> bool:
    """Tell whether the blocks of a prompt are a list of whole numbers, or are missing."""
    return blocks is None or (isinstance(blocks, list) and all(type(block) is int for block in blocks))


def _whole(row: Mapping[str, Any], block_tokens: int) -> Sequence[int]:
    """Return the full blocks of a prompt; empty if the log lists fewer blocks than the prompt fills."""
    blocks: Sequence[int] = row["prefix_hashes"] or ()
    try:
        whole = int(row["prompt_tokens"]) // block_tokens
    except (TypeError, ValueError):
        return ()
    return blocks[:whole] if len(blocks) >= whole else ()


def _key(path: Path) -> bytes:
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=32, person=b"sessions")).digest()


class _Hashes:
    """Keyed hashes that replace the names of sessions and blocks."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[tuple[int, int], int] = {}

    def session(self, name: Any, row: int) -> int:
        """Return the number of a session; a row without a session gets a number of its own."""
        return self._hash(f"row {row}" if name is None else f"session {name}")

    def _hash(self, text: str) -> int:
        return int.from_bytes(blake2b(text.encode("utf-8", "replace"), key=self._key, digest_size=8).digest())

    def chain(self, blocks: Sequence[int]) -> list[int]:
        """Return a number for each block of a prompt; it identifies the block together with all blocks before it."""
        numbers = [0]
        for block in blocks:
            key = numbers[-1], block
            if key not in self._known:
                self._known[key] = self._hash(f"block {key[0]} {block}")
            numbers.append(self._known[key])
        return numbers[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
