"""Conformance of an engine: laws for a simulator, a GPU and a server alike, tried on small workloads.

A policy that follows a script drives the engine through each case. A law is a function of what the policy and the rows
show. Nothing here looks into an engine: only the interfaces `Engine` and `View` are used. No law is about durations on
the wall clock.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np

from harness.check.cases import SHAPE
from harness.check.engine_cases import (
    MODELS,
    SHORT,
    Case,
    batch,
    beyond,
    blocks,
    cases,
    dropped,
    impossible,
    jobs,
    refused,
    routed,
    sliced,
    swapped,
)
from harness.check.findings import Breach, Failure, known
from harness.check.trial import ACTIONS, EVENTS, USES, held_bytes, needs
from harness.engines import machine
from harness.engines.machine import Config, Served
from harness.loop import engine as engines
from harness.loop.engine import Engine, Observed
from harness.loop.replay import replay
from harness.policy.actions import Action, Evict, Limit, Load, brief
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, Woke
from harness.policy.types import Cluster, Fidelity, Option
from harness.policy.view import View
from harness.rows.record import SCHEMA, STATES, WAITS
from workloads.models import shape

LONGEST_S = 600.0  # s on the engine's clock, within which every case is over
HEARS = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, Load, Evict})


@dataclass
class Trial:
    """A policy that follows the script of a case, and the record of its run: events, rows, memory and breaches."""

    case: Case
    engine: Engine
    options: Mapping[str, Option] = field(default_factory=dict)
    heard: list[tuple[float, Event]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)  # bytes of KV that the script gave to models
    seen: list[tuple[str, str]] = field(default_factory=list)  # law, what breaks it
    rows: Sequence[Mapping[str, Any]] = ()
    end_s: float = 0.0
    kv_bytes: int = 0  # held at the end
    late: Sequence[str] = ()  # processes that close() left, in words

    def __post_init__(self) -> None:
        self.uses = frozenset({"Load", "Run", "Admit"}) | self.case.needs
        self.hears = HEARS & (self.engine.tells | {Woke})

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Check the view and memory, then answer with the script's actions."""
        self.heard.append((view.now_s, event))
        self.seen += looked(event, view, self.engine, len(self.case.jobs))
        actions = tuple(self.case.script(event, self.engine.cluster))
        self.limits |= {a.model: a.kv_bytes for a in actions if isinstance(a, Limit) and a.kv_bytes is not None}
        return actions


# ------------------------------------------------------------------ trials


@cache
def _served() -> tuple[tuple[Served, ...], machine.Machine]:
    served = tuple(Served(m, shape(SHAPE)._replace(max_tokens=2048)) for m in MODELS)
    return served, machine.machine(Config(served))


def made(name: str, gpus: int = 1, room_tokens: int = 0) -> Engine:
    """Make an engine that has two small models on `gpus` GPUs.

    Unless `room_tokens` is 0, GPU memory is just enough for the weights and for the KV of `room_tokens` tokens of each
    model.
    """
    served, priced = _served()
    make, config = engines.find(name), Config(served, gpus=gpus, token_times=True)
    engine = make(config, {}, priced)
    if room_tokens:  # twice, as a model takes other bytes once memory is a pool
        for pool_bytes in (engine.cluster.gpus[0].mem_bytes, 0):
            models = engine.cluster.models.values()
            pool_bytes = pool_bytes or sum(m.weight_bytes + blocks(m, room_tokens) for m in models)
            engine.close()
            engine = make(replace(config, pool_bytes=pool_bytes), {}, priced)
    return engine


def run(name: str, case: Case) -> Trial | None:
    """Run a case; return None if the engine cannot do what the case needs."""
    engine = made(name)
    before = children()
    try:
        if not ({"Load", "Run", "Admit"} | case.needs <= engine.can and case.tells <= engine.tells):
            return None
        if case.room_tokens and isinstance(engine, Observed):
            return None  # a server takes its memory when it starts, and may want more
        if case.gpus > 1 or case.room_tokens:
            engine.close()
            engine = made(name, case.gpus, case.room_tokens)
        trial = Trial(case, engine)
        replay(trial, engine, case.jobs, end_s=LONGEST_S)
        parts = list(engine.rows())
        if not all(part.schema.equals(SCHEMA) for part in parts):
            trial.seen.append(("rows", "rows are not of the schema in harness/rows/record.py"))
        trial.rows = [row for part in parts for row in part.to_pylist()]
        trial.kv_bytes, trial.end_s = sum(kv for _, kv in held_bytes(engine)), engine.view().now_s
        if not all(isinstance(value, float) for value in engine.stats().values()):
            trial.seen.append(("rows", "stats() holds what is no float"))
    finally:
        engine.close()
    engine.close()
    trial.late = [f"process {pid} is left" for pid in sorted(children() - before)]
    return trial


def children() -> set[int]:
    """Return the ids of the processes that this process started, as far as /proc shows them."""
    paths = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in paths for pid in path.read_text("ascii").split()}


def looked(event: Event, view: View, engine: Engine, n: int) -> Iterator[tuple[str, str]]:
    """Yield (law, error) for each error in the view, and in memory use, at an event."""
    have = engine.cluster.gpus[0].mem_bytes
    for g, (weights, kv) in enumerate(held_bytes(engine)):
        if kv < 0 or weights + kv > have:
            yield "memory", f"GPU {g} holds {weights} bytes of weights and {kv} of KV, of {have}"
    if not 0 <= view.free_bytes(0) <= have:
        yield "memory", f"{view.free_bytes(0)} of {have} bytes are free"
    for m in MODELS:
        yield from _looked_at_model(m, view)
    yield from _looked_at_requests(event, view, n)
    try:
        view.oracle_tokens(0)
    except PermissionError:
        return
    yield "view", "oracle_tokens is open to a policy that did not declare it"


def _looked_at_model(m: str, view: View) -> Iterator[tuple[str, str]]:
    """Yield (law, error) for each error in the view of a model: of its KV, its batch and the requests in it."""
    account, members, state = view.kv(m, 0), view.members(batch(m)), view.batch(batch(m))
    if account.limit_bytes is not None and account.used_bytes > account.limit_bytes:
        yield "memory", f"{m} holds {account.used_bytes} bytes of KV, its limit is {account.limit_bytes}"
    if any(view.request(r).batch != batch(m) for r in members) or len(set(members)) != len(members):
        yield "view", f"members of {m} are {members}, and some say otherwise"
    if state.waiting + state.decoding + state.away > len(members):
        yield "view", f"{state} counts more than the {len(members)} members of {m}"
    if state.waiting_to_move != sum(view.request(r).transit == "waiting" for r in members):
        yield "view", f"{state} counts other moves of {m} that wait for memory than its members do"


def _looked_at_requests(event: Event, view: View, n: int) -> Iterator[tuple[str, str]]:
    """Yield (law, error) for each error in the view of requests.

    The view must show the request that has just arrived, and no request with an id outside 0 to n - 1.
    """
    if isinstance(event, Arrived):
        try:
            state_of = view.request(event.request.id)
        except KeyError:
            yield "view", f"request {event.request.id} has arrived, and the view does not know it"
        else:
            if state_of.made_tokens > 0 and state_of.batch is None:
                yield "view", f"request {event.request.id} is in no batch and has tokens"
    for r in (-1, n):
        try:
            view.request(r)
        except KeyError:
            continue
        yield "view", f"request {r} does not exist, and the view knows it"


# ------------------------------------------------------------------ laws


def inert(name: str) -> Iterator[Breach]:
    """Check that without a call of `ready` an engine can be made, its fields can be read, and it can be closed twice.

    Its fields must have allowed values, and making it must start no process.
    """
    before = children()
    engine = made(name)
    for use in sorted(engine.can):
        if not re.fullmatch(USES, use):
            yield Breach(f'can "{use}", which names no action, field or query')
    for kind in engine.tells - {*EVENTS, *ACTIONS}:
        yield Breach(f"tells {kind!r}, which is no event")
    if engine.fidelity not in get_args(Fidelity):
        yield Breach(f"fidelity is {engine.fidelity!r}")
    if bool(engine.measured_on) == (engine.fidelity == "simulated"):
        yield Breach("a real or emulated engine says what machine it is measured on, a simulated one none")
    if engine.wall_clock == (engine.fidelity == "simulated"):
        yield Breach("time is simulated or real, not both")
    if set(engine.cluster.models) != set(MODELS) or not engine.cluster.gpus:
        yield Breach("its cluster has other models than its config, or no GPU")
    for _ in range(2):
        engine.close()
    if left := children() - before:
        yield Breach(f"making it started process {min(left)}")


def ends(trial: Trial) -> Iterator[Breach]:
    """Check that every request ends once, in the state that was reported, and is done unless something prevents that.

    The policy may drop requests, and memory may be too small for them. The event for the last end may be missing,
    because the run is over then.
    """
    told, last_ns = dict[int, list[str]](), max((row["done_ns"] or 0 for row in trial.rows), default=0)
    for _, event in trial.heard:
        if isinstance(event, Finished):
            told.setdefault(event.rid, []).append(event.state)
    for row in trial.rows:
        r, state = row["id"], row["state"]
        if state not in STATES or state == "unfinished":
            yield Breach(f"request {r} is {state}")
        if trial.case.all_done and state != "done":
            yield Breach(f"request {r} is {state}, and nothing was in its way")
        heard = told.get(r, [])
        if Finished in trial.engine.tells and heard != [state] and (heard or row["done_ns"] != last_ns):
            yield Breach(f"request {r} is {state}, and its end was reported as {heard}")
    if trial.case.script is dropped:
        want = {r for r in range(len(trial.rows)) if r % 4 == 1}
        if lost := want - {row["id"] for row in trial.rows if row["state"] == "dropped"}:
            yield Breach(f"request {min(lost)} was dropped, and is not")


def tokens(trial: Trial) -> Iterator[Breach]:
    """Check that output lengths are those of the workload, and that each token has a time."""
    for row in trial.rows:
        count, want = row["made_tokens"], row["output_tokens"]
        if count > want or (row["state"] == "done" and count != want):
            yield Breach(f"request {row['id']} is {row['state']} with {count} of {want} tokens")
        times = row["token_ns"]
        if times is None or len(times) != count or times != sorted(times):
            yield Breach(f"request {row['id']} has {count} tokens, and their times are {times}")


def stamps(trial: Trial) -> Iterator[Breach]:
    """Check that arrival, admission, first token and end come in this order, none after the run's end."""
    arrival_s, end_ns = trial.case.jobs.arrival_s, round(trial.end_s * 1e9)
    for row in trial.rows:
        marks = [row[f"{name}_ns"] for name in ("arrival", "admit", "first", "done")]
        there = [mark for mark in marks if mark is not None]
        if row["state"] != "done" and marks[2] is not None:  # its client may get a token after it was dropped
            there.remove(marks[2])
        if any(a > b + 1 for a, b in pairwise(there)):
            yield Breach(f"request {row['id']} has stamps {marks}")
        if np.isfinite(arrival_s[row["id"]]) and marks[0] != round(arrival_s[row["id"]] * 1e9):
            yield Breach(f"request {row['id']} was to arrive at {arrival_s[row['id']]} s, its row says {marks[0]} ns")
        if (row["made_tokens"] > 0) != (marks[2] is not None):
            yield Breach(f"request {row['id']} has {row['made_tokens']} tokens, and its first at {marks[2]}")
        if row["state"] == "done" and row["token_ns"] and row["token_ns"][0] != marks[2] - marks[0]:
            yield Breach(f"request {row['id']} has two times of its first token")
        if row["state"] != "done" and there[-1] > end_ns + 1:
            yield Breach(f"request {row['id']} ended after the run")


def waits(trial: Trial) -> Iterator[Breach]:
    """Check that no wait is negative, that waits sum to the latency, and that a request with tokens has compute time.

    The part of each wait before the first token is at most the whole wait. For a request that is done, these parts sum
    to its TTFT. If an engine reports the waits in the longest gap between tokens, they sum to that gap. A request
    without tokens has compute time only if it was dropped, after a piece of its prompt or some of its layers.
    """
    for row in trial.rows:
        parts = {wait: row[f"{wait}_ns"] for wait in WAITS}
        if row["done_ns"] is not None and sum(parts.values()) != row["done_ns"] - row["arrival_ns"]:
            yield Breach(f"request {row['id']} waited {sum(parts.values())} of {row['done_ns'] - row['arrival_ns']} ns")
        idle = row["made_tokens"] == 0 and row["state"] != "dropped"
        if (
            min(parts.values()) < -8
            or (row["made_tokens"] > 0 and not parts["compute"] > 0)
            or (idle and parts["compute"] > 0)
        ):
            yield Breach(f"request {row['id']} with {row['made_tokens']} tokens waited {parts}")
        first = {wait: row[f"ttft_{wait}_ns"] for wait in WAITS}
        if None in first.values() or any(not -8 <= first[wait] <= parts[wait] + 8 for wait in WAITS):
            yield Breach(f"request {row['id']} waited {parts}, and until its first token {first}")
        elif row["state"] == "done" and abs(sum(first.values()) - (row["first_ns"] - row["arrival_ns"])) > 1:
            yield Breach(f"request {row['id']} waited {sum(first.values())} ns until its first token, not its TTFT")
        gap = [row[f"gap_{wait}_ns"] for wait in WAITS if row[f"gap_{wait}_ns"] is not None]
        gaps_ns = [b - a for a, b in pairwise(row["token_ns"] or ())]
        if gap and (min(gap) < -8 or sum(gap) != max(gaps_ns, default=None)):
            yield Breach(f"request {row['id']} waited {gap} ns in its longest gap of {gaps_ns}")


def ordered(trial: Trial) -> Iterator[Breach]:
    """Check that the clock never goes back, and that a request's events lie between its arrival and its end."""
    for (a_s, _), (b_s, event) in pairwise(trial.heard):
        if b_s < a_s:
            yield Breach(f"{event} came at {b_s} s, after {a_s} s")
    stage: dict[int, str] = {}
    for now_s, event in trial.heard:
        match event:
            case Arrived(request):
                if request.id in stage or now_s < request.arrival_s - 1e-9:
                    yield Breach(f"request {request.id}, due at {request.arrival_s} s, arrived at {now_s} s, or twice")
                stage[request.id] = "came"
            case Prefilled(rid, _) | Preempted(rid, _) | Finished(rid, _, _):
                if stage.get(rid) != "came":
                    yield Breach(f"{event} is of a request that had not come or had ended")
                if isinstance(event, Finished):
                    stage[rid] = "ended"


def memory(trial: Trial) -> Iterator[Breach]:
    """Check that memory use never exceeds the GPU's memory or a limit, and that no KV is left at the end."""
    if trial.kv_bytes:
        yield Breach(f"{trial.kv_bytes} bytes of KV are held although every request has ended")


def capacity(trial: Trial) -> Iterator[Breach]:
    """Check from token times alone that the KV of all requests that run at the same time fits in memory.

    A model's KV must fit its Limit. The KV of all models, plus the weights of each model that has KV, must fit the
    memory of all GPUs. From its first token to its last, a request needs KV for its prompt and for all its tokens but
    the newest. Requests that were preempted are left out. Runs on real servers are left out too, because a server may
    preempt requests without reporting it.
    """
    models, have = trial.engine.cluster.models, sum(gpu.mem_bytes for gpu in trial.engine.cluster.gpus)
    held = dict.fromkeys(models, 0)
    for ns, m, more in sorted(() if isinstance(trial.engine, Observed) else _taken(trial)):
        held[m] += more * models[m].kv_token_bytes
        if held[m] > (limit := trial.limits.get(m, have)):
            yield Breach(f"at {ns / 1e9:.6f} s those of {m} who run hold {held[m]} bytes of KV, its limit is {limit}")
        if (total := sum(kv + models[k].weight_bytes for k, kv in held.items() if kv)) > have:
            yield Breach(f"at {ns / 1e9:.6f} s those who run hold {total} bytes with their models' weights, of {have}")


def _taken(trial: Trial) -> Iterator[tuple[int, str, int]]:
    """Yield (time in ns, model, tokens) for each change in the least KV that requests must have in memory.

    `tokens` is negative where a request frees its KV.
    """
    for row in trial.rows:
        stamps = [row["arrival_ns"] + ns for ns in row["token_ns"] or ()]
        if len(stamps) > 1 and not row["preemptions"]:
            yield stamps[0], row["model"], row["prompt_tokens"]
            yield from ((ns, row["model"], 1) for ns in stamps[1:-1])
            yield stamps[-1], row["model"], -(row["prompt_tokens"] + len(stamps) - 2)


def refusals(trial: Trial) -> Iterator[Breach]:
    """Check that impossible actions, and no others, come back as Done(failed) with a reason.

    The script `swapped` is an exception: its loads and evictions may be refused.
    """
    failed = [event for _, event in trial.heard if isinstance(event, Done) and event.failed is not None]
    if trial.case.script is not refused:
        # the script `swapped` evicts models that are out, and loads models that are leaving
        explained: tuple[type[Action], ...] = (Load, Evict) if trial.case.script is swapped else ()
        odd = (done for done in failed if not isinstance(done.action, explained))
        yield from (Breach(f"{brief(done.action)} was refused: {done.failed}") for done in odd)
        return
    arrivals = sum(isinstance(event, Arrived) for _, event in trial.heard)
    for action, why in impossible(trial.engine.cluster).items():
        if (times := sum(done.action == action for done in failed)) != arrivals:
            yield Breach(f"{brief(action)} was refused {times} of {arrivals} times: {why}")


def able(name: str) -> Iterator[Breach]:
    """Check that an engine refuses actions that need a feature missing from its `can`."""
    asks = beyond(made(name))

    def script(event: Event, cluster: Cluster) -> Iterator[Action]:
        if event == Woke("start"):
            yield from asks
        yield from routed(event, cluster)

    trial = run(name, Case(script, jobs(10, 4, 0.1, *SHORT)))
    if trial is None:
        return
    failed = [event.action for _, event in trial.heard if isinstance(event, Done) and event.failed is not None]
    for action in asks:
        if action not in failed:
            yield Breach(f"{brief(action)} was not refused, and {sorted(needs(action))} are not all among what it can")


def view(trial: Trial) -> Iterator[Breach]:
    """Check that a view is consistent, shows only requests that have arrived, and never reveals output lengths."""
    yield from _seen(trial, "view")


def rows(trial: Trial) -> Iterator[Breach]:
    """Check that rows have the schema, one for each request in order of id, and name the engine's fidelity."""
    if [row["id"] for row in trial.rows] != list(range(len(trial.case.jobs))):
        yield Breach(f"rows are of requests {[row['id'] for row in trial.rows]}")
    if any(row["fidelity"] != trial.engine.fidelity for row in trial.rows):
        yield Breach(f"rows are not all {trial.engine.fidelity}")


def closes(trial: Trial) -> Iterator[Breach]:
    """Check that no process of the engine is left after `close`, which may be called twice."""
    yield from map(Breach, trial.late)


def repeats(name: str) -> Iterator[Breach]:
    """Check that two runs of the same workload give the same rows and events, if time is simulated."""
    if made(name).wall_clock:
        return
    for case in cases().values():
        first, second = run(name, case), run(name, case)
        if first and second and (first.rows, first.heard) != (second.rows, second.heard):
            yield Breach("the same workload brought other rows or events")


def slices(name: str) -> Iterator[Breach]:
    """Check that a prefill in one slice of all layers gives the same rows and events as a prefill without slices.

    This is checked only if time is simulated.
    """
    engine, case = made(name), cases()["sliced"]
    most = max(model.layers for model in engine.cluster.models.values())
    if engine.wall_clock or not case.needs <= engine.can:
        return
    whole, uncut = (run(name, case._replace(script=sliced(n))) for n in (None, most))
    if whole and uncut and (whole.rows, whole.heard) != (uncut.rows, uncut.heard):
        yield Breach(f"slices of all {most} layers brought other rows or events than none")


def _seen(trial: Trial, law: str) -> Iterator[Breach]:
    yield from (Breach(what) for name, what in trial.seen if name == law)


OF_ENGINE: Mapping[str, Callable[[str], Iterator[Breach]]] = {
    law.__name__: law for law in (inert, able, repeats, slices)
}
OF_TRIAL: Mapping[str, Callable[[Trial], Iterator[Breach]]] = {
    law.__name__: law for law in (ends, tokens, stamps, waits, ordered, memory, capacity, refusals, view, rows, closes)
}
LAWS: Mapping[str, str] = {law: inspect.getdoc(f) or "" for law, f in {**OF_ENGINE, **OF_TRIAL}.items()}


def check(name: str, *, only: str | None = None, case: str | None = None) -> list[Failure]:
    """Return the failures of an engine: for each law that it breaks, the first breach found. Empty if it conforms.

    `name` is the engine's name or path. `only` names the one law to test, `case` the one case. Raises UserError if
    there is no such engine, law or case, or if something that the engine needs is missing.
    """
    engines.path(name)
    known("law", only, LAWS)
    known("case", case, cases())
    failures: dict[str, Failure] = {}

    def fail(law: str, where: str, breach: Breach, of: str = "") -> None:
        command = f"bench check --engine {shlex.quote(name)} --law {law}{of}"
        failures.setdefault(law, Failure(law, where + breach.what, None, command))

    for law, of_engine in OF_ENGINE.items():
        for breach in of_engine(name) if only in {None, law} and case is None else ():
            fail(law, "", breach)
    for key, workload in cases().items():
        if case not in {None, key} or only in OF_ENGINE or (trial := run(name, workload)) is None:
            continue
        for law in (law for law in OF_TRIAL if only in {None, law}):
            for breach in (*OF_TRIAL[law](trial), *_seen(trial, law)):
                fail(law, f"case {key}: ", breach, f" --case {key}")
    return [failures[law] for law in LAWS if law in failures]
