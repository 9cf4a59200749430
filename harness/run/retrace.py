"""A stored run is made again from its spec, with a recorder: what happened in it, in order of time.

A simulated run is deterministic, so nothing of this is stored. The rows that come out are held against those that are.
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
from harness.engines.sim.trace import Stretch, Trace, Traced, Transfer
from harness.loop.replay import replay
from harness.policy.types import Infeasible, Unsupported, UserError
from harness.report.timeline import Part, folded
from harness.rows import record
from harness.run import spec as specs
from harness.run.setup import Setup, blamed
from harness.run.teller import Silent, Teller

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_REQUEST = -1
CARRYING = ("grant_s", "link_s", "tail_s")  # of a transfer: until its memory, on its links, what it takes beside


class Lost(UserError):
    """A run cannot be made again: real time passed in it, or its sources have changed."""


def retrace(run: Path, stored: pa.Table, *, look_at: int = NO_REQUEST, teller: Teller | None = None) -> Trace:
    """Make a run again and record it; `stored` are its rows. Of the request `look_at`, and of no other, more is noted.

    Raises Lost, and UserError where its spec is refused.
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
        replay(setup.policy, traced, setup.jobs(), end_s=setup.end_s, decision_s=spec.decision_s or 0.0,
               control_s=spec.control_s or 0.0)  # fmt: skip
    trace = traced.recorder.trace()
    made = pa.Table.from_batches(list(traced.rows()), record.SCHEMA)
    if not _equal(made, stored):
        raise Lost(_otherwise(run, "its requests come out otherwise"))
    return trace


@contextmanager
def _again(run: Path) -> Iterator[None]:
    """Tell of which run it is that has no room now, or whose spec is refused."""
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


def _equal(a: pa.Table, b: pa.Table) -> bool:
    """Tell whether two tables have the same rows, however their words are coded."""
    plain = record.plain(record.SCHEMA)
    return bool(a.cast(plain).equals(b.cast(plain)))


# ------------------------------------------------------------------ requests


def parts(row: Mapping[str, Any], own: Iterable[Stretch], transfers: Iterable[Transfer] = ()) -> list[Part]:
    """Divide a request's time from arrival to end into parts that follow each other without a gap; folded.

    `row` is the request's row of requests.parquet and `own` its stretches in order. `transfers` explain its waits for
    loads and moves.
    """
    loads, moves = list[Transfer](), list[Transfer]()
    for one in transfers:
        if one.request == row["id"]:
            moves.append(one)
        elif (one.kind, one.model) == ("load", row["model"]):
            loads.append(one)
    start_ns = row["arrival_ns"]
    end_ns = start_ns + sum(row[f"{wait}_ns"] for wait in record.WAITS)
    found: list[Part] = []
    for stretch in own:
        a, b = (min(max(round(x * 1e9), start_ns), end_ns) for x in (stretch.start_s, stretch.end_s))
        a = found[-1].end_ns if found else a  # stamps within an instant
        if b > a:
            facts = dict(stretch.facts)
            if stretch.doing in {"load", "transfer"}:
                facts |= _carrying(loads if stretch.doing == "load" else moves, stretch)
            found.append(Part(stretch.doing, a, b, _whole(stretch.seconds, b - a), 0, stretch.inst, facts))
    first = found[0].start_ns if found else end_ns
    last = found[-1].end_ns if found else end_ns
    ahead = [Part("host", start_ns, first, {"host": first - start_ns})] * (first > start_ns)
    behind = [Part("host", last, end_ns, {"host": end_ns - last})] * (end_ns > last)
    return folded([*ahead, *found, *behind])


def _whole(seconds: Mapping[str, float], total_ns: int) -> dict[str, int]:
    """Seconds as nanoseconds that sum to a total: what rounding leaves goes to the longest."""
    found = {name: round(x * 1e9) for name, x in seconds.items()}
    longest = max(found, key=lambda name: found[name])
    found[longest] += total_ns - sum(found.values())
    return found


def _carrying(transfers: Sequence[Transfer], wait: Stretch) -> dict[str, float]:
    """Divide a wait for weights or KV: before a transfer was asked for, until its memory, on links, and the rest.

    Weights are those of the batch's instance; without a batch, those of the model that came first.
    """
    own = [one for one in transfers if one.asked_s < wait.end_s and not one.end_s <= wait.start_s]
    if wait.doing == "load":
        own = [one for one in own if wait.inst is None or one.to == wait.inst.place]
        if wait.inst is None:
            own = sorted(own, key=lambda one: (not one.done, one.end_s))[:1]
    found = dict.fromkeys(CARRYING, 0.0)
    for one in own:
        found["size_bytes"] = float(one.size_bytes)
        times = [wait.end_s if math.isnan(t) else t for t in (one.asked_s, one.granted_s, one.moved_s, one.end_s)]
        for key, a, b in zip(CARRYING, times[:-1], times[1:], strict=True):
            found[key] += max(0.0, min(b, wait.end_s) - max(a, wait.start_s))
    absent_s = wait.end_s - wait.start_s - sum(found[key] for key in CARRYING)
    return {"absent_s": max(0.0, absent_s), **found}


def by_request(trace: Trace) -> dict[int, list[Stretch]]:
    """Return the stretches of each request, in order, by the request's id."""
    found: dict[int, list[Stretch]] = {}
    for stretch in trace.stretches:
        found.setdefault(stretch.request, []).append(stretch)
    return found


def every(trace: Trace, stored: pa.Table) -> Iterator[tuple[Mapping[str, Any], list[Part]]]:
    """Each request's row, and its parts."""
    own = by_request(trace)
    columns = [
        "id",
        "model",
        "prompt_tokens",
        "output_tokens",
        "arrival_ns",
        "state",
        *(f"{x}_ns" for x in record.WAITS),
    ]
    for row in stored.select(columns).to_pylist():
        yield row, parts(row, own.get(row["id"], ()))


def first_ns(trace: Trace, rid: int) -> int | None:
    """Return the time in ns at which the engine made a request's first token; None for never."""
    first_s = float(trace.first_s[rid])
    return None if np.isnan(first_s) else round(first_s * 1e9)
