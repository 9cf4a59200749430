"""Logs of gateways and servers become canonical tables: stamps, counts, model names and keyed hashes, nothing else.

A reader says by one function what a record is: a `Request`, a reason why it is left out (a failed one, one that a
cache answered), or none of both (an event of another kind). Prompts, answers, keys and names of users are never read:
what a reader does not put into a `Request` does not leave it.

Conversations and blocks of prompts are numbered by a hash whose key is the log itself (BLAKE2b of its bytes, apart from
the SHA-256 that the metadata has): the same log gives the same numbers, and who has the table alone cannot try names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.policy.types import UserError
from traces import convert, records, schema
from traces.guarded import reading
from traces.records import Record
from traces.served import Source


class Request(NamedTuple):
    """The part of a record that is read; None where the log has nothing."""

    at: Any  # when it came: ISO 8601 (without a zone: UTC), or a number of the reader's unit
    model: Any
    prompt_tokens: Any  # with those that a cache has
    output_tokens: Any
    session: Any = None  # what its conversation, or its client, is called
    blocks: Any = None  # ids of the prompt's blocks, a list in their order
    before_s: float = 0.0  # it came so long before `at`
    id: Any = None  # of the request: further rows with it are left out


Reading = Request | str | None
NAMED = ("at", "model", "prompt_tokens", "output_tokens")


def read(
    path: Path,
    request: Callable[[Record], Reading],
    names: Mapping[str, str],
    *,
    expand: Callable[[Record], Iterable[Record]] | None = None,
    fields: Collection[str] | None = None,
    unit: float = 1.0,
    block_tokens: int | None = None,
    drop_bad: bool = False,
    **known: Any,
) -> pa.Table:
    """Read a log; `names` are the log's own for arrival_s, model, prompt_tokens and output_tokens, for messages.

    `expand` splits a record that holds several. A stamp that is a number counts `unit` seconds. Rows are put in the
    order of their stamps, for logs are written as requests end. UserError names the line of a bad row; with
    `drop_bad` such rows are left out and counted by reason in the metadata's `dropped`, beside those that the reader
    leaves out.
    """
    key = _key(path)
    hashed = _Hashes(key)
    lines: list[int] = []
    read_: list[Request] = []
    dropped: dict[str, int] = {}
    unblocked, ids = 0, set[str]()
    for line, record in records.records(path, fields):
        for part in (record,) if expand is None else expand(record):
            with reading(path, line):
                got = request(part)
            if got is None:
                continue
            if isinstance(got, Request):
                try:
                    at = seconds(got.at, unit)
                    got = got._replace(at=None if at is None else at - float(got.before_s))
                except (TypeError, ValueError, OverflowError):
                    if not drop_bad:
                        column = names["arrival_s"]
                        raise UserError(
                            f'{path}:{line}: "{column}" is {_shown(got.at)}, no time ({convert.DROP})'
                        ) from None
                    got = "whose time cannot be read"
            if isinstance(got, Request) and block_tokens and not _are_ids(got.blocks):
                if not drop_bad:
                    raise UserError(
                        f"{path}:{line}: its blocks are {_shown(got.blocks)}, no list of ids ({convert.DROP})"
                    )
                got = "whose blocks cannot be read"
            if isinstance(got, Request) and not blank(got.id):
                name = str(got.id)
                got = schema.AGAIN if name in ids else got
                ids.add(name)
            if isinstance(got, str):
                dropped[got] = dropped.get(got, 0) + 1
                continue
            lines.append(line)
            read_.append(got)
    if not read_:
        why = "".join(f", {count} {reason}" for reason, count in dropped.items())
        raise UserError(f"{path}: no request that was served{why}")
    columns: dict[str, pa.Array] = {
        "arrival_s": pa.array([got.at for got in read_], pa.float64()),
        "model": pa.array([_name(got.model) for got in read_], pa.string()),
        "prompt_tokens": _counts([got.prompt_tokens for got in read_]),
        "output_tokens": _counts([got.output_tokens for got in read_]),
    }
    if any(not blank(got.session) for got in read_):
        columns["session_id"] = pa.array(
            [hashed.of("session", got.session, row) for row, got in enumerate(read_)], pa.uint64()
        )
    if block_tokens and any(got.blocks for got in read_):
        chains = [hashed.chain(_whole(got, block_tokens)) for got in read_]
        unblocked = sum(not chain for chain in chains)
        columns["prefix_hashes"] = pa.array(chains, pa.list_(pa.uint64()))
    if known.get("model"):
        del columns["model"]
    named = {key: names.get(key, key) for key in columns}
    place = np.asarray(lines, np.int64)
    source = Source(
        {named[key]: values for key, values in columns.items()},
        lambda row: f"{path}:{place[row]}",
        lambda rows: place[rows],
    )
    extra = {"without_blocks": unblocked} if unblocked else {}
    how: dict[str, Any] = {"time_unit": "s", "sort": True} | known
    return convert.canonical(
        path,
        source,
        named,
        **how,
        drop_bad=drop_bad,
        dropped=dropped,
        block_tokens=block_tokens if "prefix_hashes" in columns else None,
        extra=extra,
    )


def seconds(value: Any, unit: float = 1.0) -> float | None:
    """Return a stamp as seconds since 1970, or since the log's beginning; None for a blank one.

    ValueError or TypeError for what is no stamp.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        raise TypeError(value)
    if isinstance(value, int | float):
        return float(value) * unit
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date) or not isinstance(value, str):
        raise TypeError(value)
    try:
        return float(value) * unit
    except ValueError:
        stamp = datetime.fromisoformat(value.strip().removesuffix(" UTC"))
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def _name(model: Any) -> str | None:
    """Return the name of a model; None for what is none."""
    named = isinstance(model, str | int) and not isinstance(model, bool) and not blank(model)
    return str(model).encode("utf-8", "replace").decode() if named else None


def blank(value: Any) -> bool:
    """Tell whether a log has nothing there."""
    return value is None or (isinstance(value, str) and not value.strip())


def total(*counts: Any) -> Any:
    """Add counts that may be blank, or -1 where unknown; what is no number stays, for the check of rows."""
    known = [count for count in counts if not blank(count)]
    if len(known) <= 1 or not all(isinstance(count, int | float) or str(count).isdecimal() for count in known[1:]):
        return known[0] if known else None
    try:
        return int(known[0]) + sum(max(0, int(count)) for count in known[1:])
    except (TypeError, ValueError):
        return known[0]


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, also one that is a cell of a table as JSON; an empty one for everything else."""
    if isinstance(value, str) and value[:1] == "{":
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if isinstance(value, list):  # pairs, as Parquet has maps
        value = {pair[0]: pair[1] for pair in value if isinstance(pair, tuple | list) and len(pair) == 2}
    return value if isinstance(value, Mapping) else {}


def _are_ids(blocks: Any) -> bool:
    """Tell whether the blocks of a prompt are whole numbers in a list, or are not told."""
    return blocks is None or (isinstance(blocks, list) and all(type(block) is int for block in blocks))


def _whole(got: Request, block_tokens: int) -> Sequence[int]:
    """Return the blocks of a prompt that are full; none where the log does not have them all."""
    blocks: Sequence[int] = got.blocks or ()
    try:
        whole = int(got.prompt_tokens) // block_tokens
    except (TypeError, ValueError):
        return ()
    return blocks[:whole] if len(blocks) >= whole else ()


def _counts(values: list[Any]) -> pa.Array:
    """Return counts as numbers where all are, else as text, in which what is wrong can be shown."""
    numbers = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    if numbers:
        try:
            return pa.array(values, pa.float64() if any(isinstance(v, float) for v in values) else pa.int64())
        except (OverflowError, pa.ArrowException):
            pass
    return pa.array(["" if value is None else str(value) for value in values], pa.string())


def _key(path: Path) -> bytes:
    digest = blake2b(digest_size=32, person=b"sessions")
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


class _Hashes:
    """Numbers for names, by a key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[tuple[int, int], int] = {}

    def of(self, what: str, name: Any, row: int) -> int:
        """Return the number of a name; a row without one is a kind of its own."""
        text = f"row {row}" if blank(name) else f"{what} {name}"
        return int.from_bytes(blake2b(text.encode("utf-8", "replace"), key=self._key, digest_size=8).digest())

    def chain(self, blocks: Sequence[int]) -> list[int]:
        """Return a number for each block together with all before it."""
        numbers, before = [], 0
        for block in blocks:
            if (number := self._known.get((before, block))) is None:
                text = f"block {before} {block}".encode()
                number = int.from_bytes(blake2b(text, key=self._key, digest_size=8).digest())
                self._known[before, block] = number
            numbers.append(number)
            before = number
        return numbers


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
