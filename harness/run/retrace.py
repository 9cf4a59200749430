"""Replays of stored runs from their specs, with a recorder that collects the run's events in order of time.

A simulated run is deterministic, so its events are not stored. The rows of the replay must equal the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from harness.engines.sim.engine import Sim
from harness.engines.sim.recorder import Traced
from harness.engines.sim.trace import Stretch, Trace, Transfer
from harness.loop.replay import replay
from harness.policy.types import Infeasible, Unsupported, UserError
from harness.rows import record
from harness.run import spec as specs
from harness.run.setup import Setup, blamed
from harness.run.stretches import Part, folded
from harness.run.teller import Silent, Teller

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_REQUEST = -1
CARRYING = ("grant_s", "link_s", "tail_s")  # a transfer waits for memory, then takes its links, then fixed seconds


class Lost(UserError):
    """The error for a run that cannot be replayed: it was in real time, or its sources have changed."""


def retrace(run: Path, stored: pa.Table, *, look_at: int = NO_REQUEST, teller: Teller | None = None) -> Trace:
    """Replay a run and record it; `stored` are its rows. With `look_at` only that request is recorded, in more detail.

    Raises Lost, and UserError if its spec is refused.
    """
    about, teller = record.meta(run), teller or Silent()
    spec = specs.stored(about["spec"])
    if about["fidelity"] != "simulated":
        raise Lost(
            f"{run.name} is {about['fidelity']}: only simulated runs can be made again, to see their order in time"
        )
    setup = Setup(spec)
    with blamed(spec), _again(run):
        assert isinstance(setup.engine, Sim)  # no other engine simulates
        traced = Traced.of(setup.engine, look_at, lambda done, total: teller.progress("replay", done, total))
        replay(
            setup.policy,
            traced,
            setup.jobs(),
            end_s=setup.end_s,
            decision_s=spec.decision_s or 0.0,
            control_s=spec.control_s or 0.0,
        )
    trace = traced.recorder.trace()
    made = pa.Table.from_batches(list(traced.rows()), record.SCHEMA)
    if not _equal(made, stored):
        raise Lost(_otherwise(run, "its requests come out otherwise"))
    return trace


@contextmanager
def _again(run: Path) -> Iterator[None]:
    """Turn the errors of a replay into errors that name the run.

    Raises Lost if the system has no room or the engine lacks something, and UserError if the run's spec is refused.
    """
    try:
        yield
    except Infeasible as why:
        raise Lost(_otherwise(run, f"it is infeasible: {why}")) from None
    except Unsupported as why:
        raise Lost(_otherwise(run, f"it is skipped: {why}")) from None
    except UserError as why:
        raise UserError(f"{run / record.ROWS}: spec: {why}") from None


def _otherwise(run: Path, how: str) -> str:
    return f"{run.name} was made by other sources: made again, {how} (bench compare or bench run stores it again)"


def _equal(made: pa.Table, stored: pa.Table) -> bool:
    """Tell whether two tables have the same rows, with or without dictionaries for their strings.

    Columns that are null throughout in the stored table are not compared: they may be newer than the run.
    """
    plain = record.plain(record.SCHEMA)
    names = [name for name in stored.column_names if stored[name].null_count < len(stored)]
    return bool(made.cast(plain).select(names).equals(stored.cast(plain).select(names)))


# ------------------------------------------------------------------ requests


def parts(row: Mapping[str, Any], stretches: Iterable[Stretch], transfers: Iterable[Transfer] = ()) -> list[Part]:
    """Divide a request's time from arrival to end into adjacent parts without gaps; join similar parts (`folded`).

    `row` is the request's row of requests.parquet; `stretches` are the request's waits and steps, in order. `transfers`
    explain waits for loads and moves.
    """
    loads, moves = list[Transfer](), list[Transfer]()
    for transfer in transfers:
        if transfer.request == row["id"]:
            moves.append(transfer)
        elif (transfer.kind, transfer.model) == ("load", row["model"]):
            loads.append(transfer)
    start_ns = row["arrival_ns"]
    end_ns = start_ns + sum(row[f"{wait}_ns"] for wait in record.WAITS)
    middle: list[Part] = []
    for stretch in stretches:
        a, b = (min(max(round(x * 1e9), start_ns), end_ns) for x in (stretch.start_s, stretch.end_s))
        a = middle[-1].end_ns if middle else a  # parts are adjacent; stamps may differ within an instant
        if b > a:
            facts = dict(stretch.facts)
            if stretch.doing in {"load", "transfer"}:
                facts |= _carrying(loads if stretch.doing == "load" else moves, stretch)
            middle.append(Part(stretch.doing, a, b, _whole(stretch.seconds, b - a), 0, stretch.inst, facts))
    first = middle[0].start_ns if middle else end_ns
    last = middle[-1].end_ns if middle else end_ns
    ahead = [Part("host", start_ns, first, {"host": first - start_ns})] * (first > start_ns)
    behind = [Part("host", last, end_ns, {"host": end_ns - last})] * (end_ns > last)
    return folded([*ahead, *middle, *behind])


def _whole(seconds: Mapping[str, float], total_ns: int) -> dict[str, int]:
    """Convert seconds to nanoseconds that sum to `total_ns`. The longest gets the remainder of rounding."""
    ns = {name: round(x * 1e9) for name, x in seconds.items()}
    longest = max(ns, key=lambda name: ns[name])
    ns[longest] += total_ns - sum(ns.values())
    return ns


def _carrying(transfers: Sequence[Transfer], wait: Stretch) -> dict[str, float]:
    """Divide a wait for weights or KV by the state of its transfer: return the seconds by state, and the bytes.

    The states are: not yet asked for, waiting for memory, on links, and the fixed seconds at the end. For a wait for
    weights, the transfer is the load to the instance of the request's batch. If there is no batch, it is the load of
    the model that ends first.
    """
    carriers = [x for x in transfers if x.asked_s < wait.end_s and not x.end_s <= wait.start_s]
    if wait.doing == "load":
        carriers = [transfer for transfer in carriers if wait.inst is None or transfer.to == wait.inst.place]
        if wait.inst is None:
            carriers = sorted(carriers, key=lambda transfer: (not transfer.done, transfer.end_s))[:1]
    seconds = dict.fromkeys(CARRYING, 0.0)
    for transfer in carriers:
        seconds["size_bytes"] = float(transfer.size_bytes)
        stamps = (transfer.asked_s, transfer.granted_s, transfer.moved_s, transfer.end_s)
        times = [wait.end_s if math.isnan(stamp) else stamp for stamp in stamps]
        for key, a, b in zip(CARRYING, times[:-1], times[1:], strict=True):
            seconds[key] += max(0.0, min(b, wait.end_s) - max(a, wait.start_s))
    absent_s = wait.end_s - wait.start_s - sum(seconds[key] for key in CARRYING)
    return {"absent_s": max(0.0, absent_s), **seconds}


def by_request(trace: Trace) -> dict[int, list[Stretch]]:
    """Return the stretches of each request, in order, by the request's id."""
    stretches: dict[int, list[Stretch]] = {}
    for stretch in trace.stretches:
        stretches.setdefault(stretch.request, []).append(stretch)
    return stretches


def every(trace: Trace, stored: pa.Table) -> Iterator[tuple[Mapping[str, Any], list[Part]]]:
    """Yield each request's row, and its parts."""
    stretches = by_request(trace)
    facts = "id model prompt_tokens output_tokens arrival_ns state".split()
    columns = [*facts, *(f"{wait}_ns" for wait in record.WAITS)]
    for row in stored.select(columns).to_pylist():
        yield row, parts(row, stretches.get(row["id"], ()))


def first_ns(trace: Trace, rid: int) -> int | None:
    """Return the time in ns at which the engine made a request's first token; None if it made none."""
    first_s = float(trace.first_s[rid])
    return None if np.isnan(first_s) else round(first_s * 1e9)
