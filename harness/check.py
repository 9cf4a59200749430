"""Conformance: laws that every system keeps, tried on small workloads in the simulator.

A law is a function of one trial (a preset of a system in a case). One that is broken is shrunk to the shortest workload
that still breaks it, and comes back with the number of the decision (0 = "start") and a command that repeats it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness import shapes, system
from harness.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake
from harness.engines import cost, sim
from harness.engines.sim import Config, Served, Sim
from harness.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.replay import Decision, Livelock, Read, Unsupported, replay
from harness.system import System
from harness.types import GIB, Batch, Cluster, Host, Infeasible, Inst, Jobs, Option, Plan, UserError
from harness.view import View
from workloads.models import shape

ACTIONS = (Load, Evict, Limit, Admit, Drop, Run, Move, Wake)
EVENTS = (Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done)
QUERIES = {name for name in vars(View) if not name.startswith("_")}
REFUSABLE = (Load, Admit, Limit, Run)  # what can fail on a real engine at any time

PATIENCE_S = 600.0  # of virtual time after the last arrival: every case drains in less than a tenth of it
MOST_DECISIONS = 100_000  # a timer of 10 ms, armed throughout, makes 60,000 in that time
MOST_ACTIONS = 10_000  # in one answer
SEEDS, LONG = 3, 8  # of --full: workloads of each case, and how many times longer they are


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken law: where, since which decision, and how to see it again."""

    law: str
    message: str
    event: int | None  # index of the decision, 0 = "start"
    command: str


class Breach(NamedTuple):
    """What breaks a law, and at which decision."""

    what: str
    event: int | None = None


# ------------------------------------------------------------------ cases


class Case(NamedTuple):
    """A workload on a simulated machine, and what is made hard about it."""

    config: Config
    jobs: Jobs
    ample: bool = True  # memory for every request: none may fail
    refuse: int = 0  # the engine refuses one action in so many; 0: none
    decision_s: float = 0.0
    control_s: float = 0.0


SHAPE, MAX_TOKENS = "llama-3.2-1b", 8192  # small: 2.3 GiB of weights, 32 KiB of KV a token


def _models(n: int, tp: Mapping[int, int] | None = None, max_tokens: int = MAX_TOKENS) -> tuple[Served, ...]:
    small = shape(SHAPE)._replace(max_tokens=max_tokens)
    return tuple(Served(f"m{k}", small, (tp or {}).get(k, 1), ttft_slo_s=1.0, tpot_slo_s=0.05) for k in range(n))


def _case(
    name: str,
    seed: int,
    n: int,
    config: Config,
    *,
    span_s: float,
    prompt: tuple[int, int] = (16, 1024),
    output: tuple[int, int] = (2, 128),
    burst: int = 1,
    asked: int | None = None,
    **hard: Any,
) -> Case:
    """`n` requests in bursts of `burst` over a span, to the first `asked` models; lengths uniform."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
    names = tuple(m.name for m in config.models)
    arrival_s = np.sort(draw.uniform(0.0, span_s, -(-n // burst))).repeat(burst)[:n]
    model = draw.integers(0, asked or len(names), n, np.int32)
    prompts, outputs = (draw.integers(*bounds, n, np.int32, endpoint=True) for bounds in (prompt, output))
    plan = {
        m: Plan(float((model == k).sum()) / span_s, float(np.mean(prompt)), float(np.mean(output)), "check")
        for k, m in enumerate(names)
    }
    slo = (np.full(n, getattr(config.models[0], limit)) for limit in ("ttft_slo_s", "tpot_slo_s"))
    jobs = Jobs(names, arrival_s, model, prompts, outputs, *slo)
    return Case(replace(config, plan=plan, seed=seed), jobs, **hard)


def _tight(models: Sequence[Served], gpus: int, requests: float) -> Config:
    """GPUs just large enough for their models and so many of the longest requests each."""
    m = models[0]
    each = shapes.weight_bytes(m.shape) + GIB + requests * m.shape.max_tokens * shapes.kv_token_bytes(m.shape)
    whole = cost.gpu("h100").mem_bytes
    return Config(tuple(models), gpus=gpus, mem_fraction=-(-len(models) // gpus) * each / whole)


def cases(seed: int = 0, size: int = 1) -> dict[str, Case]:
    """Every case by name, `size` times as long."""
    three, n = _models(3), 32 * size
    two = Config(three, gpus=2)

    def case(name: str, config: Config = two, **kind: Any) -> Case:
        return _case(name, seed, n, config, **({"span_s": 8.0 * size} | kind))

    return {
        "calm": case("calm", replace(two, noise=0.02), span_s=32.0 * size),
        "one-gpu": case("one-gpu", Config(three)),
        "crowd": case("crowd", Config(_models(8), gpus=3, node_gpus=2)),
        "tensor-parallel": case("tensor-parallel", Config(_models(2, {0: 2}), gpus=2)),
        "overload": case("overload", replace(two, batch_cap=2), span_s=1.2 * size),
        "pressure": case("pressure", _tight(_models(3, max_tokens=2048), 2, 4), prompt=(64, 256),
                         output=(1024, 1792), span_s=0.5, ample=False),  # fmt: skip
        "one-token": case("one-token", output=(1, 1)),
        "long-prompts": case("long-prompts", prompt=(5000, 8000)),
        "simultaneous": case("simultaneous", burst=8),
        "idle-model": case("idle-model", asked=2),
        "no-requests": case("no-requests")._replace(jobs=_first(case("none").jobs, 0)),
        "refused": case("refused", Config(_models(6), gpus=3), ample=False, refuse=6),
        "late": case("late", decision_s=0.05, control_s=0.02),
    }  # fmt: skip


def _first(jobs: Jobs, n: int) -> Jobs:
    """The first n requests of a workload."""
    return Jobs(jobs.models, *(getattr(jobs, f.name)[:n] for f in fields(jobs)[1:]))


# ------------------------------------------------------------------ trials


class Subject(NamedTuple):
    """A preset of a system in a case."""

    make: Any
    preset: str | None
    name: str  # of the case
    case: Case

    def __str__(self) -> str:
        return f"case {self.name}" + (f", preset {self.preset}" if self.preset else "")


class Trial(NamedTuple):
    """What happened to a subject."""

    subject: Subject
    jobs: Jobs
    uses: frozenset[str]
    decisions: Sequence[Decision]
    rows: Sequence[Mapping[str, Any]]  # of requests.parquet
    table: pa.Table
    notes: Mapping[str, list[Breach]]  # by law: what was seen while it ran
    refused: Sequence[Action]  # by injection
    seen: int  # requests that had come by the end
    kv_blocks: int  # still held at the end
    error: BaseException | None
    impossible: str | None  # why it could not run at all

    def index(self, *events: Event) -> int | None:
        """The first decision on one of these events."""
        return next((k for k, d in enumerate(self.decisions) if d.event in events), None)


class Stale(Exception):
    """A view was used after its decision."""


class Lent:
    """A view for the time of one decision: every use goes through `ask`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Lent
        ask = object.__getattribute__(self, "_ask")
        if name == "now_s":
            return ask(name)
        ask(name, only_look=True)
        return lambda *args: ask(name, *args)


class Probe:
    """A system that lends its views to another one, and notes what that does with them."""

    def __init__(self, policy: System, notes: dict[str, list[Breach]]) -> None:
        self.hears, self.uses, self.options = policy.hears, policy.uses, policy.options
        self.decisions: list[Decision] = []
        self._policy, self._notes, self._ended = policy, notes, set[int]()

    def note(self, law: str, what: str) -> None:
        """A law was broken in the decision under way."""
        self._notes.setdefault(law, []).append(Breach(what, len(self.decisions)))

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """The other's answer."""
        if len(self.decisions) >= MOST_DECISIONS:
            raise Livelock(f"{MOST_DECISIONS} decisions, the last at {view.now_s:g} s, and no end")
        now_s, reads, at = view.now_s, list[Read](), len(self.decisions)

        def ask(query: str, *args: Any, only_look: bool = False) -> Any:
            if len(self.decisions) != at:
                self.note("fresh-view", f"used the view of decision {at} (its {query})")
                raise Stale(query)
            if query not in QUERIES:
                self.note("blind", f"reached for {query} of the view")
                raise AttributeError(query)
            if query == "oracle_tokens" and "view.oracle_tokens" not in self.uses:
                self.note("declared", 'asked view.oracle_tokens, which is not in "uses"')
                raise PermissionError(query)
            if only_look:
                return None
            answer = getattr(view, query)
            reads.append(Read(query, args, answer(*args) if query != "now_s" else answer))
            return reads[-1].answer

        lent: Any = Lent(ask)
        self._heard(event)
        actions = tuple(islice(self._policy.on(event, lent), MOST_ACTIONS))
        if len(actions) == MOST_ACTIONS:
            raise Livelock(f"an answer of {MOST_ACTIONS} actions")
        for action in actions:
            self._asked(action, {g: x.mem_bytes for g, x in enumerate(self._cluster.gpus)})
        self.decisions.append(Decision(now_s, event, tuple(reads), actions))
        return actions

    _cluster: Cluster

    def _heard(self, event: Event) -> None:
        kinds = {type(event), *([type(event.action)] if isinstance(event, Done) else [])}
        if not kinds & self.hears and not (isinstance(event, Done) and event.failed):
            self.note("declared", f'heard {event}, which is not in "hears"')
        if isinstance(event, Finished):
            if event.rid in self._ended:
                self.note("served", f"request {event.rid} finished twice")
            self._ended.add(event.rid)

    def _asked(self, action: Action, mem_bytes: Mapping[int, int]) -> None:
        if not isinstance(action, ACTIONS):
            self.note("declared", f"answered {action!r}, which is no action")
            raise TypeError(f"{action!r} is no action")
        for need in needs(action):
            if need not in self.uses and need.partition(":")[0] not in self.uses:
                self.note("declared", f'answered {action}, but "{need}" is not in "uses"')
        named = getattr(action, "who", getattr(action, "rid", None))
        if isinstance(named, int) and named in self._ended:
            self.note("served", f"answered {action} after request {named} had finished")
        if isinstance(action, Limit) and (action.kv_bytes or 0) > mem_bytes.get(action.gpu, 0):
            self.note("memory", f"{action}, on a GPU with {mem_bytes.get(action.gpu, 0)} bytes")


class Stand:
    """The simulator, refusing some actions; its memory is looked at after everything that happens."""

    def __init__(self, engine: Sim, case: Case, note: Callable[[str, str], None]) -> None:
        self.can, self.tells, self.offers = engine.can, engine.tells, engine.offers
        self.fidelity, self.cluster = engine.fidelity, engine.cluster
        self.refused: list[Action] = []
        self._engine, self._case, self._note = engine, case, note
        self._told: list[Event] = []
        self._done = 0
        self._begin_loads: set[Load] | None = set()

    def begin(self, jobs: Jobs, hears: frozenset[type], oracle: bool) -> None:
        """See Engine."""
        self._engine.begin(jobs, hears, oracle)

    def poll(self, until_s: float) -> Event | None:
        """See Engine."""
        event = self._told.pop(0) if self._told else self._engine.poll(until_s)
        if isinstance(event, Done) and event.failed and event not in map(_injected, self.refused):
            if event.action in self._at_start and self._engine.view().now_s <= self._case.config.start_s:
                self._note("memory", f"at the start, {event.action}: {event.failed}")
        self._look()
        return event

    def do(self, action: Action) -> None:
        """See Engine."""
        self._done += 1
        draw = zlib.crc32(f"{self._case.config.seed}/{self._done}".encode())
        if self._case.refuse and isinstance(action, REFUSABLE) and draw % self._case.refuse == 0:
            self.refused.append(action)
            self._told.append(_injected(action))
        else:
            self._engine.do(action)
        self._look()
