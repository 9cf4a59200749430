"""Rows of requests.parquet from an engine's request records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import spilled
from harness.engines.stamps import NAMES, Noted, arrivals
from harness.policy.types import Gpus, Jobs
from harness.rows.record import SCHEMA, WAITS, to_ns

T = TypeVar("T")
OfRows = Callable[[slice], T]


def batches(
    R: NDArray[Any],
    ends: OfRows[NDArray[Any]],
    jobs: Jobs,
    places: Sequence[Gpus],
    *,
    arrivals_s: NDArray[np.float64],
    fidelity: str,
    end_s: float,
    api_in_s: float | NDArray[np.float64],
    api_out_s: float,
    tokens: pa.Array | None = None,
    gaps: Mapping[str, pa.Array] | None = None,
    first_tokens: NDArray[np.int64] | None = None,
    alone_s: OfRows[tuple[NDArray[np.float64], NDArray[np.float64]]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield rows in order of id, in batches of at most 65,536 rows; times are in whole nanoseconds, rounded once.

    `R` has the fields of `stamps.FIELDS`. `ends` and `alone_s` are functions of a slice of rows. `ends` returns indices
    of `stamps.NAMES`. `alone_s` returns the seconds that each request's prefill and its decode take alone (None: not
    known). `api_in_s` are the seconds before the engine sees a request, and `api_out_s` those before the client sees a
    token.

    `tokens`, `gaps` and `first_tokens` have an entry per request. `tokens` has the times of the request's tokens.
    `gaps` has, by cause, the nanoseconds that the request waited within the longest gap between two of its tokens
    (None: not known). `first_tokens` is the number of tokens that arrived together as the first ones (None: one).
    """
    models = pa.array(jobs.models, pa.string())
    api_in_s = np.broadcast_to(api_in_s, len(R))
    for z in spilled.pieces(len(R), R, *jobs.columns):
        q, a = R[z], z.start
        n = len(q)
        arrival_s = arrivals_s[z]
        came = q["arrival"] <= end_s  # the engine saw it
        code = ends(z).astype(np.int32)
        over, done = code > 0, code == NAMES.index("done")
        until_s = np.where(over, q["done"] + np.where(done, api_out_s, 0.0), np.maximum(end_s, arrival_s))
        host_s = np.where(came, api_in_s[z], until_s - arrival_s) + np.where(done, api_out_s, 0.0)
        waits = np.stack([host_s if wait == "host" else q[wait] for wait in WAITS])
        ttft = np.stack([host_s if wait == "host" else q[f"ttft_{wait}"] for wait in WAITS])
        silent = np.isnan(q["first"])  # without a first token, all waits count toward TTFT
        ttft[:, silent] = waits[:, silent]
        arrival_ns = np.rint(arrival_s * 1e9).astype(np.int64)
        until_ns = np.rint(until_s * 1e9).astype(np.int64)
        # a request that ends without its last token has no `api_out_s`: its first token counts when the engine made it
        first_ns = np.rint((np.where(silent, until_s, q["first"]) + np.where(done, api_out_s, 0.0)) * 1e9)
        first_ns = np.where(silent, until_ns, np.minimum(first_ns.astype(np.int64), until_ns))
        ttft_ns = rounded(ttft, first_ns - arrival_ns)
        waits_ns = ttft_ns + rounded(waits - ttft, until_ns - first_ns)
        first, last = q["first_inst"].astype(np.int64), q["last_inst"].astype(np.int64)
        alone = None if alone_s is None else alone_s(z)
        codes, which = np.unique(first * (len(places) + 1) + last, return_inverse=True)
        paths, again = np.unique([path(places, int(code)) for code in codes], return_inverse=True)
        columns = {
            "id": pa.array(np.arange(z.start, z.stop)),
            "model": pa.DictionaryArray.from_arrays(pa.array(jobs.model[z], pa.int32()), models),
            "prompt_tokens": pa.array(jobs.prompt_tokens[z], pa.int32()),
            "output_tokens": pa.array(jobs.output_tokens[z], pa.int32()),
            "made_tokens": pa.array(q["made"].astype(np.int32)),
            "arrival_ns": pa.array(arrival_ns),
            "admit_ns": to_ns(q["admit"]),
            "first_ns": to_ns(q["first"] + api_out_s),
            "done_ns": to_ns(np.where(over, until_s, np.nan)),
            "first_tokens": pa.array(((q["made"] > 0) if first_tokens is None else first_tokens[z]).astype(np.int32)),
            "state": pa.DictionaryArray.from_arrays(pa.array(code), pa.array(NAMES)),
            **{f"{wait}_ns": pa.array(row) for wait, row in zip(WAITS, waits_ns, strict=True)},
            **{f"ttft_{wait}_ns": pa.array(row) for wait, row in zip(WAITS, ttft_ns, strict=True)},
            **{f"gap_{w}_ns": pa.nulls(n, pa.int64()) if gaps is None else gaps[w].slice(a, n) for w in WAITS},
            **{
                f"alone_{part}_ns": pa.nulls(n, pa.int64()) if alone is None else to_ns(alone[k])
                for k, part in enumerate(("prefill", "decode"))
            },
            "preemptions": pa.array(q["preemptions"].astype(np.int32)),
            "gpus": pa.DictionaryArray.from_arrays(
                pa.array(again[which].astype(np.int32)), pa.array(paths.tolist(), pa.string())
            ),
            "fidelity": pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([fidelity])),
            "token_ns": pa.nulls(n, SCHEMA.field("token_ns").type) if tokens is None else tokens.slice(a, n),
        }
        yield pa.RecordBatch.from_arrays([columns[f.name] for f in SCHEMA], schema=SCHEMA)


def noted(of: Noted, jobs: Jobs, fidelity: str, *, token_times: bool) -> Iterator[pa.RecordBatch]:
    """Yield rows, as `batches` does, from the records of an engine that ran in real time."""
    arrivals_s, tokens = arrivals(of.R, jobs, of.end_s, of.late_s), None
    if token_times:
        pairs = zip(of.stamps_s, arrivals_s.tolist(), strict=True)
        ns = [[round(t * 1e9) - round(due * 1e9) for t in stamps] for stamps, due in pairs]
        tokens = pa.array(ns, SCHEMA.field("token_ns").type)
    yield from batches(
        of.R,
        of.ends.__getitem__,
        jobs,
        of.places,
        arrivals_s=arrivals_s,
        fidelity=fidelity,
        end_s=of.end_s,
        api_in_s=of.late_s,
        api_out_s=0.0,
        tokens=tokens,
    )


def rounded(seconds: NDArray[np.float64], total_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round the seconds of each cause to nanoseconds, so that the nanoseconds of each request sum to its `total_ns`.

    `seconds` has the dimensions (causes, requests). The longest cause of a request absorbs the difference that rounding
    leaves.
    """
    ns = np.rint(seconds * 1e9).astype(np.int64)
    ns[np.argmax(ns, axis=0), np.arange(ns.shape[1])] += total_ns - ns.sum(axis=0)
    return ns


def path(places: Sequence[Gpus], code: int) -> str:
    """Return the GPUs of a request: "0", "0+1" for a group, "0>1" if the request moved, "" if it never ran.

    `code` is `first * (len(places) + 1) + last`, where `first` and `last` are indices of the request's places (-1:
    none).
    """
    first, last = divmod(code, len(places) + 1)
    if first < 0 or code < 0:
        return ""
    names = ["+".join(map(str, places[i])) for i in (first, last)]
    return names[0] if first == last else ">".join(names)


def token_times(
    R: NDArray[Any], arrivals_s: NDArray[Any], log: NDArray[Any], api_out_s: float
) -> tuple[pa.Array, dict[str, pa.Array]]:
    """Return the time of each token since the intended arrival of its request, as a list<int64> in ns per request.

    The times are computed from the log of an engine, whose rows are segments (`request` below 0) and stays. A segment
    states when every decode tick of a batch ends. A stay states the ticks in which a request took part, or the time at
    which a prefill made a token of the request.

    Return also, by cause, the nanoseconds that each request waited within the longest gap between two of its tokens
    (the first of equally long ones). They sum to that gap, and are null for a request that made fewer than two tokens.
    """
    seg, stay = log[log["request"] < 0], log[log["request"] >= 0]
    last = np.zeros(int(log["batch"].max(initial=-1)) + 1, np.int64)  # each batch's last tick
    np.maximum.at(last, seg["batch"], seg["tick_from"] + seg["step_to"])
    base = np.concatenate([[0], np.cumsum(last + 1)])  # each batch's ticks begin there
    at, j = spelled(seg["step_to"] - seg["step_from"], seg["step_from"] + 1)
    a, b, done, rate, since = (
        seg[name].copy()[at] for name in ("first_s", "slope_s", "anchor_work", "rate", "anchor_s")
    )
    ticks, made = np.full(int(base[-1]), np.nan), np.zeros(int(base[-1]), np.int64)
    tick = (base[seg["batch"]] + seg["tick_from"])[at] + j
    solo_s = j * a + b * (0.5 * j * (j - 1)) - done  # since the anchor
    ticks[tick], made[tick] = since + solo_s / rate, np.arange(len(at))
    decodes = stay["batch"] >= 0
    of, k = spelled(
        np.where(decodes, stay["tick_to"] - stay["tick_from"], 1), base[stay["batch"]] + stay["tick_from"] + 1
    )
    times, mine = stay["anchor_s"].copy()[of], decodes[of]
    times[mine] = ticks[k[mine]]
    rid = stay["request"].copy()[of]
    order = np.argsort(rid, kind="stable")
    ns = np.rint((times[order] + api_out_s) * 1e9).astype(np.int64)
    ns -= np.rint(arrivals_s[rid[order]] * 1e9).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rid, minlength=len(R)))])
    stamps = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ns)).cast(SCHEMA.field("token_ns").type)

    def waited_s(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return, by cause, the seconds that each token's request had waited by the time of the token.

        The result has the dimensions (causes, tokens).
        """
        stays = stay[of[tokens]]
        waited = np.stack([stays[wait] if wait != "host" else np.zeros(len(stays)) for wait in WAITS])
        ran = np.flatnonzero(stays["batch"] >= 0)  # what passed from the tick to the end of the stay is subtracted
        end, step = stays[ran], made[k[tokens[ran]]]
        tick = seg[at[step]]
        since_s = times[tokens[ran]] - tick["anchor_s"]
        load = end["clock_load"] - tick["clock_load"]
        kv = end["clock_stall"] - tick["clock_stall"]
        wall = end["clock_wall"] - tick["clock_wall"] - since_s
        solo = end["clock_solo"] - tick["clock_solo"] - solo_s[step]
        off = end["clock_slice"] - tick["clock_slice"] - since_s * (1.0 - tick["part"])
        passed = {"load": load, "kv": kv, "compute": solo, "time_slice": off, "contention": wall - solo - off}
        passed["queue"] = end["anchor_s"] - times[tokens[ran]] - load - kv - wall
        for wait, seconds in passed.items():
            waited[WAITS.index(wait), ran] -= seconds
        return waited

    who, which = longest(rid[order], ns)
    parts = rounded(waited_s(order[which + 1]) - waited_s(order[which]), ns[which + 1] - ns[which])
    waits_ns, none = np.zeros((len(WAITS), len(R)), np.int64), np.ones(len(R), bool)
    waits_ns[:, who], none[who] = parts, False
    return stamps, {wait: pa.array(row, mask=none) for wait, row in zip(WAITS, waits_ns, strict=True)}


def longest(owner: NDArray[np.int64], ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each owner of at least two time stamps, and the index of the stamp before that owner's longest gap.

    `owner` has the owner of each stamp in `ns`. Owners ascend, and the stamps of each owner are in order. Of equally
    long gaps, the first counts.
    """
    before = np.flatnonzero(owner[1:] == owner[:-1])
    whose, gap_ns = owner[before], ns[before + 1] - ns[before]
    begins = np.flatnonzero(np.diff(whose, prepend=-1))
    most_ns = np.maximum.reduceat(gap_ns, begins) if len(begins) else gap_ns
    at_most = np.flatnonzero(gap_ns == np.repeat(most_ns, np.diff(begins, append=len(whose))))
    who, first = np.unique(whose[at_most], return_index=True)
    return who, before[at_most[first]]


def spelled(count: NDArray[Any], first: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Expand each row to the `count` consecutive positions that begin at its `first`.

    Return two arrays with an entry per position: the index of its row, and the position.
    """
    at = np.repeat(np.arange(len(count)), count)
    return at, np.arange(len(at)) + np.repeat(first - np.cumsum(count) + count, count)
