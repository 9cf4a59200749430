"""A log of one stream is dealt to models: whole sessions, or bursts, so that each model has a stated share of requests.

A name is a log of the manifest and how it is dealt, as in "azure-conv+models=8+deal=1+max_tokens=8192": to how many
models, which deal of many, and the longest prompt + output that is kept.

What stays together: of a log with ids of prompts' blocks, requests that share a block beyond those that all of them
begin with (a conversation's turns, each with the last one's prompt before its own); of another one, requests between
which no gap is longer than the mean gap of the log. Dealt one by one, requests would come at every model as Poisson's.

Shares are those of hyperbolic-like's streams, in its order, so that the k-th stream is that of a set's k-th model in
both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import UserError
from traces import schema, synthetic
from traces.arrivals import rng

I8 = NDArray[np.int64]
F8 = NDArray[np.float64]
FIELDS = {"models": 1, "deal": 0, "max_tokens": 2}  # and the least of each
COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A log with the fields of a trace's name; `str` gives the name back."""

    log: str
    models: int | None = None  # None: it stays one stream
    deal: int = 0
    max_tokens: int | None = None  # what is longer is left out, and counted

    def __str__(self) -> str:
        parts = [f"+models={self.models}"] if self.models else []
        parts += [f"+deal={self.deal}"] if self.deal else []
        parts += [f"+max_tokens={self.max_tokens}"] if self.max_tokens else []
        return self.log + "".join(parts)


def asked(name: str) -> Asked:
    """Read LOG[+models=N][+deal=K][+max_tokens=N]; UserError for another field, or a value that is none."""
    log, *pairs = name.split("+")
    fields: dict[str, int] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in FIELDS:
            raise UserError(
                f'trace "{name}": "+{pair}" is not +FIELD=VALUE of a log ({", ".join(FIELDS)}): its rows are what they '
                "are"
            )
        if key in fields:
            raise UserError(f'trace "{name}": {key} is there twice')
        if not (COUNT.fullmatch(value) and int(value) >= FIELDS[key]):
            raise UserError(f'trace "{name}": {key} is "{value}", not a whole number from {FIELDS[key]} on')
        fields[key] = int(value)
    if "deal" in fields and "models" not in fields:
        raise UserError(f'trace "{name}": deal without models: into how many is it split (+models=8)?')
    if fields.get("models", 0) > synthetic.MOST_MODELS:
        raise UserError(f'trace "{name}": models is {fields["models"]}, above {synthetic.MOST_MODELS}')
    return Asked(log, **fields)


def deal(rows: pa.Table, models: int, number: int = 0) -> pa.Table:
    """Deal the rows of a canonical table to so many models, in one of many ways; its own streams are left aside.

    The same number deals the same way. A model's count is off its share by at most the requests of the largest unit.
    The units are numbered in `session_id`; times, lengths and blocks stay.
    """
    unit = units(rows)
    streams = synthetic.preset(f"hyperbolic-like+models={models}").streams
    model = owners(np.bincount(unit), synthetic.popularity(models), number)[unit]
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names if name in schema.COLUMNS}
    columns["model"] = pa.DictionaryArray.from_arrays(pa.array(model, pa.int32()), pa.array(streams, pa.string()))
    columns["session_id"] = unit.astype(np.uint64)
    meta = schema.metadata(rows) | {"tier": "composed", "ordered": True, "streams": list(streams), "deal": number}
    return schema.table(columns, meta)


def units(rows: pa.Table) -> I8:
    """Return the number of each request's unit, which stays together: a session by prefix chains, else a burst.

    Units are numbered in order of their first request.
    """
    unit = _chains(rows["prefix_hashes"]) if "prefix_hashes" in rows.column_names else _bursts(rows["arrival_s"])
    first, back = np.unique(unit, return_index=True, return_inverse=True)[1:]
    return np.asarray(np.argsort(np.argsort(first))[back], np.int64)


def owners(sizes: I8, shares: F8, number: int) -> I8:
    """Draw the owner of each unit of so many requests: units in random order, cut where the shares add up."""
    order = rng(number, "deal", len(shares)).permutation(len(sizes))
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    owner = np.empty(len(sizes), np.int64)
    owner[order] = np.searchsorted(np.cumsum(shares)[:-1] * sizes.sum(), middle, "right")
    return owner


def _chains(hashes: pa.ChunkedArray) -> I8:
    """Group prompts by the first block that not all of them have; a prompt without one is alone."""
    lists = hashes.combine_chunks()
    begin = lists.offsets.to_numpy().astype(np.int64)
    ids, count = lists.values.to_numpy(), np.diff(begin)
    alike = 0
    while count.min() > alike and (ids[begin[:-1] + alike] == ids[begin[0] + alike]).all():
        alike += 1
    unit = np.arange(len(count), dtype=np.int64)
    long = np.flatnonzero(count > alike)
    unit[long] = len(count) + np.unique(ids[begin[long] + alike], return_inverse=True)[1]
    return unit


def _bursts(arrival_s: pa.ChunkedArray) -> I8:
    """Group arrivals by the gaps between them that are longer than the mean one."""
    gaps_s = np.diff(arrival_s.to_numpy())
    return np.concatenate(([0], np.cumsum(gaps_s > gaps_s.mean()))) if len(gaps_s) else np.zeros(1, np.int64)
