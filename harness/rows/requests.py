"""The rows of a run as arrays, one element per request; latencies, and each request's limits under an SLO.

TTFT, the time to first token, is first token - intended arrival. TPOT, the time per output token, is (last - first) /
(n - n_first): see `tpot_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.rows.waits import STATES, WAITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The times of tokens in ns from their request's intended arrival: those of request i are `ns[at[i]:at[i + 1]]`."""

    ns: NDArray[np.int64]
    at: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of tokens that each request produced."""
        return np.diff(self.at)

    @property
    def owner(self) -> NDArray[np.int64]:
        """The index of the request that each token belongs to."""
        return np.repeat(np.arange(len(self.at) - 1), self.counts)

    def gaps(self) -> tuple[NDArray[np.int64], Floats]:
        """Return each gap between two successive tokens: the index of its request, and its length in seconds."""
        owner = self.owner
        within = owner[1:] == owner[:-1]
        return owner[1:][within], np.diff(self.ns)[within] / 1e9

    def take(self, which: Bools) -> Tokens:
        """Return the token times of the requests that `which` selects."""
        counts = np.diff(self.at)
        return Tokens(self.ns[np.repeat(which, counts)], np.concatenate([[0], np.cumsum(counts[which])]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests as arrays, with one element per request.

    Arrivals are in seconds from the window's start, latencies in seconds from the arrival. A latency is NaN if its
    event never came.
    """

    models: tuple[str, ...]
    model: NDArray[np.int32]  # indexes `models`
    arrival_s: Floats
    ttft_s: Floats  # first token - intended arrival
    e2e_s: Floats  # final state - intended arrival
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]  # asked for
    made_tokens: NDArray[np.int32]
    first_tokens: NDArray[np.int32]  # tokens of the first chunk
    state: NDArray[np.int32]  # indexes record.STATES
    waits_s: Floats  # (requests, causes), in the order of record.WAITS
    ttft_waits_s: Floats  # counts up to the first token
    gap_waits_s: Floats  # counts within the longest gap between two tokens; NaN: not known, or no gap
    alone_s: Floats  # (requests, 2): its prefill's and decode's steps alone; NaN: not known
    tokens: Tokens | None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def done(self) -> Bools:
        """The mask of requests that finished."""
        done: Bools = self.state == STATES.index("done")
        return done

    @property
    def stamps(self) -> Tokens:
        """The token times of a run that stores them."""
        assert self.tokens is not None, "a run without token times"
        return self.tokens


def rows(table: pa.Table) -> Rows:
    """Convert a run's table (record.SCHEMA) to arrays."""
    models, model = _codes(table, "model")
    states, state = _codes(table, "state")
    arrival = _numpy(table, "arrival_ns")
    return Rows(
        models=models,
        model=model,
        arrival_s=arrival / 1e9,
        ttft_s=(_numpy(table, "first_ns") - arrival) / 1e9,
        e2e_s=(_numpy(table, "done_ns") - arrival) / 1e9,
        prompt_tokens=_numpy(table, "prompt_tokens"),
        output_tokens=_numpy(table, "output_tokens"),
        made_tokens=_numpy(table, "made_tokens"),
        first_tokens=_numpy(table, "first_tokens"),
        state=np.array([STATES.index(name) for name in states], np.int32)[state],
        waits_s=np.stack([_numpy(table, f"{wait}_ns") for wait in WAITS], axis=1) / 1e9,
        ttft_waits_s=np.stack([_known(table, f"ttft_{wait}_ns") for wait in WAITS], axis=1) / 1e9,
        gap_waits_s=np.stack([_known(table, f"gap_{wait}_ns") for wait in WAITS], axis=1) / 1e9,
        alone_s=np.stack([_known(table, f"alone_{part}_ns") for part in ("prefill", "decode")], axis=1) / 1e9,
        tokens=_tokens(table),
    )


def extent(pieces: Iterable[pa.Table]) -> tuple[tuple[str, ...], float, int]:
    """Return the sorted models of a run, its last arrival in seconds, and its number of requests.

    The run is read in pieces, which need only the columns model and arrival_ns.
    """
    models, last_ns, n = set[str](), 0, 0
    for table in pieces:
        models.update(_codes(table, "model")[0])
        last_ns, n = max(last_ns, int(_numpy(table, "arrival_ns").max(initial=0))), n + len(table)
    return tuple(sorted(models)), last_ns / 1e9, n


def of_models(rows: Rows, models: tuple[str, ...]) -> Rows:
    """Return the rows with new model codes: indices into `models`, the models of the whole run."""
    if rows.models == models:
        return rows
    return replace(rows, models=models, model=np.array([models.index(m) for m in rows.models], np.int32)[rows.model])


def take(rows: Rows, which: Bools) -> Rows:
    """Return only the requests that `which` selects; `models` stays complete."""
    if which.all():
        return rows
    arrays = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name not in {"models", "tokens"}}
    tokens = rows.tokens.take(which) if rows.tokens is not None else None
    return Rows(models=rows.models, tokens=tokens, **{name: array[which] for name, array in arrays.items()})


def in_window(rows: Rows, window_s: float) -> Bools:
    """Return a mask of the requests that were offered: 0 <= arrival < window."""
    return (rows.arrival_s >= 0.0) & (rows.arrival_s < window_s)


def _numpy(table: pa.Table, name: str) -> NDArray[Any]:
    array: NDArray[Any] = table.column(name).to_numpy()  # nulls make it float with NaN: exact below 104 days in ns
    return array


def _known(table: pa.Table, name: str) -> Floats:
    """Return a column that may have nulls as floats, NaN for null; all NaN if the table lacks the column."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    known: Floats = table.column(name).to_numpy().astype(np.float64)
    return known


def _codes(table: pa.Table, name: str) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the sorted values that occur in a column, and for each row the index of its value."""
    column = table.column(name)
    column = (column if pa.types.is_dictionary(column.type) else column.dictionary_encode()).combine_chunks()
    words, codes = column.dictionary.to_pylist(), column.indices.to_numpy()
    values = sorted({words[i] for i in np.unique(codes)})
    place = {word: i for i, word in enumerate(values)}
    return tuple(values), np.array([place.get(word, -1) for word in words], np.int32)[codes]


def _tokens(table: pa.Table) -> Tokens | None:
    if "token_ns" not in table.column_names or table.column("token_ns").null_count == len(table):
        return None
    column = table.column("token_ns").combine_chunks()
    counts = np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    return Tokens(column.flatten().to_numpy(), np.concatenate([[0], np.cumsum(counts)]))


# ------------------------------------------------------------------ latencies


def tpot_s(rows: Rows) -> Floats:
    """Compute (last - first) / (n - n_first) of finished requests, n_first = tokens of the first chunk.

    NaN where undefined: not finished, or all tokens came at once (one-token outputs).
    """
    gaps = rows.made_tokens - rows.first_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows.done & (gaps > 0), (rows.e2e_s - rows.ttft_s) / gaps, np.nan)


def norm_s(rows: Rows) -> Floats:
    """Compute the normalised latency: (last - arrival) / n of finished requests, NaN of others."""
    return np.where(rows.done, rows.e2e_s / np.maximum(rows.made_tokens, 1), np.nan)


def quantile(values: Floats, q: float) -> float:
    """Return the linear-interpolation quantile; a missing value (NaN) counts as infinite. NaN without any values."""
    return interpolated(np.sort(np.where(np.isnan(values), np.inf, values)), q)


def interpolated(ranked: Floats, q: float) -> float:
    """Return the linear-interpolation quantile of values in ascending order; NaN if there are none."""
    if not len(ranked):
        return math.nan
    place = (len(ranked) - 1) * q
    low, share = int(place), place - int(place)
    if share == 0.0 or ranked[low] == ranked[low + 1]:
        return float(ranked[low])
    return float(ranked[low] + share * (ranked[low + 1] - ranked[low]))


# ------------------------------------------------------------------ limits and deadlines


class Limits(NamedTuple):
    """TTFT and TPOT limits in seconds, with one element per request."""

    ttft_s: Floats
    tpot_s: Floats

    def take(self, which: Bools | slice) -> Limits:
        """Return the limits of the requests that `which` selects."""
        return Limits(self.ttft_s[which], self.tpot_s[which])


Slo = Mapping[str, tuple[float, float]] | Limits  # model -> (TTFT, TPOT) in seconds (not named: none), or by request


def limits(rows: Rows, slo: Slo) -> Limits:
    """Return the limits of each request; infinite for a model without an SLO."""
    if isinstance(slo, Limits):
        return slo
    pairs = np.array([slo.get(name, (math.inf, math.inf)) for name in rows.models]).reshape(-1, 2)
    return Limits(pairs[rows.model, 0], pairs[rows.model, 1])


def deadline_s(slo: Limits, k: NDArray[Any]) -> Floats:
    """Return the seconds from arrival to the deadline of token k = 0, 1, ...: TTFT + k x TPOT.

    For the first token (k = 0) this is TTFT, even if TPOT is infinite.
    """
    with np.errstate(invalid="ignore"):  # 0 x inf
        return slo.ttft_s + np.where(k > 0, k * slo.tpot_s, 0.0)


def late(rows: Rows, slo: Limits) -> Bools:
    """Mark the tokens that come after their deadline."""
    stamps, counts = rows.stamps, rows.stamps.counts
    k = np.arange(len(stamps.ns)) - np.repeat(stamps.at[:-1], counts)
    each = Limits(*(np.repeat(seconds, counts) for seconds in slo))
    return np.asarray(stamps.ns / 1e9 > deadline_s(each, k))


def time_fraction(stamps: Floats, ttft: float, tpot: float) -> float:
    """Return the share of a request's time to its last token that counts as good: see the definition `qos`."""
    n, last = len(stamps), float(stamps[-1])
    if last <= 0.0:
        return 1.0
    allowed = np.concatenate([[ttft], ttft + np.arange(1, n + 1) * tpot])
    start, first, good = 0.0, 0, 0.0
    while len(behind := np.flatnonzero(stamps[first:] - start > allowed[first:n])):
        k = first + int(behind[0])
        good += float(allowed[k - 1]) if k > first else 0.0
        start, first = float(stamps[k]), k + 1
    return (good + min(float(allowed[n]), last - start)) / last
