"""Splitting of a log of one stream among models: each gets whole sessions or bursts, and a given share of the requests.

A trace's name may state such a split, as in "azure-conv+models=8+deal=1+max_tokens=8192". The name has a log of the
manifest, the number of models, and the seed of the split (`deal`). It may also limit prompt + output tokens
(`max_tokens`); longer requests are left out. For a user's own log, the option `--spread` states the split, as in
12:zipf=1.2,idle=some,together=pairs.

Requests that belong together go to one model. These are the requests of a session if the log numbers its sessions, else
those of a client. In a log without either, prompts belong together if they have the same first block after the blocks
that all prompts share. The turns of a conversation are such prompts. A log without blocks is cut into bursts wherever a
gap is longer than the mean gap. Such a log does not say which requests belong together, and the trace's note says so.
Requests are not dealt one by one, because every model would then see a Poisson process.

By default the k-th model gets the share of requests that the k-th stream of the generator hyperbolic-like has. With
`zipf` a model's share is proportional to rank^-zipf. A split log has one stream for each model. Its k-th stream goes to
the k-th model of a set, as the streams of hyperbolic-like do.

By default no model is ever idle. With `idle`, every model but the hottest alternates between times of use and of rest.
A time of use lasts on average twenty minutes, or a sixth of the log if that is shorter. While a model rests, new
sessions go to other models. With `together`, groups of models have the same times of use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import schema, synthetic
from traces.arrivals import rng, zipf

I8 = NDArray[np.int64]
F8 = NDArray[np.float64]
LEAST = {"models": 1, "deal": 0, "max_tokens": 2}  # least values of the fields that are whole numbers
COUNT = re.compile(r"[0-9]{1,9}")
SHARE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,6})?")
IDLE = {"none": 0.0, "some": 0.5, "much": 0.8}  # share of the time in which a model rests
TOGETHER = {"none": 1, "pairs": 2, "groups": 4}  # models that are in use at the same times
USE_S = 1200.0  # mean length of a time of use
NO_SESSIONS = "no sessions in the log: correlation assumed"


@dataclass(frozen=True, slots=True)
class Asked:
    """A trace's name in parts: a log, and the fields that state how its requests are split among models.

    `str` joins the parts to the name.
    """

    log: str
    models: int | None = None  # None: it stays one stream
    zipf: float | None = None  # None: shares of hyperbolic-like
    idle: str = "none"  # a key of IDLE
    together: str = "none"  # a key of TOGETHER
    deal: int = 0
    max_tokens: int | None = None  # longer requests are left out, and counted

    def __str__(self) -> str:
        parts = ((f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name != "log")
        return self.log + "".join(f"+{name}={value}" for name, value, usual in parts if value != usual)


FIELDS = tuple(f.name for f in fields(Asked) if f.name != "log")


def parsed(name: str) -> Asked:
    """Parse LOG[+models=N][+zipf=S][+idle=HOW][+together=HOW][+deal=K][+max_tokens=N]; UserError for anything else."""
    log, *pairs = name.split("+")
    return _parsed(f'trace "{name}"', log, pairs, "+")


def spread(text: str) -> Asked:
    """Parse the value of `--spread`, MODELS[:FIELD=VALUE,...]; UserError names the mistake."""
    models, _, more = text.partition(":")
    pairs = [f"models={models}", *(pair for pair in more.split(",") if pair)]
    return _parsed(f'--spread "{text}"', "", pairs, "")


def _parsed(where: str, log: str, pairs: list[str], sign: str) -> Asked:
    given: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in FIELDS:
            raise UserError(
                f'{where}: "{sign}{pair}" is not {sign}FIELD=VALUE of a log ({", ".join(FIELDS)}): its rows are what '
                "they are"
            )
        if key in given:
            raise UserError(f"{where}: {key} is there twice")
        given[key] = _value(where, key, value)
    if given.keys() & {"deal", "zipf", "idle", "together"} and "models" not in given:
        raise UserError(f"{where}: {next(iter(given))} without models: among how many is it split (+models=8)?")
    if given.get("models", 0) > synthetic.MOST_MODELS:
        raise UserError(f"{where}: models is {given['models']}, above {synthetic.MOST_MODELS}")
    return Asked(log, **given)


def _value(where: str, key: str, value: str) -> Any:
    if key in LEAST:
        if not (COUNT.fullmatch(value) and int(value) >= LEAST[key]):
            raise UserError(f'{where}: {key} is "{value}", not a whole number from {LEAST[key]} on')
        return int(value)
    if key == "zipf":
        if not SHARE.fullmatch(value):
            raise UserError(f'{where}: zipf is "{value}", not a number from 0 on, as 1.2')
        return float(value)
    known = IDLE if key == "idle" else TOGETHER
    if value not in known:
        raise UserError(f'{where}: {key} is "{value}"{meant(value, known)} ({", ".join(known)})')
    return value


def dealt(rows: pa.Table, how: Asked) -> tuple[pa.Table, str]:
    """Split a table among models; return the new table and a note.

    The note says how the table was split. If requests were grouped into bursts, it also says that the log has no
    sessions.
    """
    unit, kind = units(rows)
    shares = "with the shares of hyperbolic-like" if how.zipf is None else f"shares ~ rank^-{how.zipf:g}"
    note = f"split among {how.models} models by {kind}, {shares}"
    if how.idle != "none":
        note += f", {how.idle} of the time idle" + (f", in {how.together}" if how.together != "none" else "")
    return deal(rows, unit, how), note + (f"; {NO_SESSIONS}" if kind == "bursts" else "")


def deal(rows: pa.Table, unit: I8, how: Asked) -> pa.Table:
    """Split the rows of a canonical table at random among models. The streams of the table are ignored.

    `unit` has the unit number of each row; all rows of a unit go to the same model. `how.deal` is the seed. If no model
    is ever idle, a model's number of requests is nearly its share of all requests. The difference is at most the size
    of the largest unit. The unit numbers become the column `session_id`. Arrival times, lengths and prefix blocks are
    kept.
    """
    assert how.models is not None
    streams = synthetic.preset(f"hyperbolic-like+models={how.models}").streams
    shares = synthetic.popularity(how.models) if how.zipf is None else zipf(how.models, how.zipf)
    sizes = np.bincount(unit)
    if how.idle == "none":
        owner = owners(sizes, shares, how.deal)
    else:
        begin = np.full(len(sizes), np.inf)
        np.minimum.at(begin, unit, rows["arrival_s"].to_numpy())
        owner = rested(sizes, shares, begin, how.deal, IDLE[how.idle], TOGETHER[how.together])
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names if name in schema.COLUMNS}
    columns["model"] = pa.DictionaryArray.from_arrays(pa.array(owner[unit], pa.int32()), pa.array(streams, pa.string()))
    columns["session_id"] = unit.astype(np.uint64)
    facts = {"tier": "composed", "ordered": True, "streams": list(streams), "deal": how.deal}
    return schema.table(columns, schema.metadata(rows) | facts)


def rested(sizes: I8, shares: F8, begin_s: F8, number: int, idle: float, together: int) -> I8:
    """Draw the model of each unit, where models alternate between times of use and idle times.

    `sizes` has each unit's number of requests, and `begin_s` each unit's start time. `number` is the seed. `idle` is
    the share of the time in which a model is idle.

    Each unit goes to a model that is in use when the unit begins. A model that lacks n requests to reach its share is
    drawn with a chance proportional to n. If no model in use lacks requests, an idle model may get the unit.

    Times of use and idle times are exponential. Models in the same group of `together` models have the same times. The
    hottest model is in no group and is never idle.
    """
    draw = rng(number, "rest", len(shares))
    span_s = float(begin_s.max()) + 1.0
    use_s = min(USE_S, span_s / 6)
    in_use = np.ones((len(shares), len(begin_s)), bool)
    order = np.argsort(begin_s, kind="stable")
    for first in range(1, len(shares), together):
        edges = _edges(draw, span_s, use_s, idle)
        in_use[first : first + together] = np.searchsorted(edges, begin_s, "right") % 2 == 1
    left = shares * sizes.sum()
    owner = np.empty(len(sizes), np.int64)
    chance = draw.uniform(0, 1, len(sizes))
    for unit in order:
        weight = np.maximum(left, 0) * in_use[:, unit]
        if not weight.sum():
            weight = np.maximum(left, 0)
        total = np.cumsum(weight)
        chosen = int(np.searchsorted(total, chance[unit] * total[-1], "right")) if total[-1] else int(left.argmax())
        owner[unit] = min(chosen, len(shares) - 1)
        left[owner[unit]] -= sizes[unit]
    return owner


def _edges(draw: np.random.Generator, span_s: float, use_s: float, idle: float) -> F8:
    """Draw the alternating begins and ends of a model's times of use; the first of them may lie before 0."""
    rest_s = use_s * idle / (1 - idle)
    pairs = int(4 * span_s / (use_s + rest_s)) + 16
    lengths = np.stack([draw.exponential(rest_s, pairs), draw.exponential(use_s, pairs)], 1).ravel()
    edges = np.cumsum(lengths) - draw.uniform(0, 2 * (use_s + rest_s))
    return np.asarray(edges, np.float64)


def units(rows: pa.Table) -> tuple[I8, str]:
    """Return each request's unit number, and a word for the kind of unit, such as "sessions".

    All requests of a unit go to one model. A unit is a session if the log has sessions, else a client if it has
    clients. In any other log with prefix blocks, prompts that share a prefix are a unit, and the word is "sessions"
    too. In a log without any of these, a unit is a burst. Units are numbered in the order of their first requests.
    """
    kinds = {"session_id": "sessions", "tenant": "clients", "prefix_hashes": "sessions"}
    column = next((name for name in kinds if name in rows.column_names and not rows[name].null_count), "")
    if column == "prefix_hashes":
        unit = _chains(rows[column])
    else:
        unit = _codes(rows[column]) if column else _bursts(rows["arrival_s"])
    first, back = np.unique(unit, return_index=True, return_inverse=True)[1:]
    return np.asarray(np.argsort(np.argsort(first))[back], np.int64), kinds.get(column, "bursts")


def owners(sizes: I8, shares: F8, number: int) -> I8:
    """Draw the model of each unit; `sizes` has the units' numbers of requests, and `number` is the seed.

    The units are shuffled and cut into one part per model, in proportion to the models' shares.
    """
    order = rng(number, "deal", len(shares)).permutation(len(sizes))
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    owner = np.empty(len(sizes), np.int64)
    owner[order] = np.searchsorted(np.cumsum(shares)[:-1] * sizes.sum(), middle, "right")
    return owner


def _codes(names: pa.ChunkedArray) -> I8:
    plain = names.combine_chunks()
    coded = plain if pa.types.is_dictionary(plain.type) else plain.dictionary_encode()
    return np.asarray(coded.indices.to_numpy(zero_copy_only=False), np.int64)


def _chains(hashes: pa.ChunkedArray) -> I8:
    """Group prompts by their first block after the blocks that all prompts share; return each prompt's group number.

    A prompt that has no such block is a group by itself.
    """
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
    """Return the burst number of each arrival; a gap longer than the mean gap begins a new burst."""
    gaps_s = np.diff(arrival_s.to_numpy())
    return np.concatenate(([0], np.cumsum(gaps_s > gaps_s.mean()))) if len(gaps_s) else np.zeros(1, np.int64)
