"""Conformance: laws that every system keeps, tried on small workloads in the simulator.

A law is a function of one trial (a preset of a system in a case). One that is broken is shrunk to the shortest workload
that still breaks it, and comes back with the number of the decision (0 = "start") and a command that repeats it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.engines import machine, shapes
from harness.engines.costs import cost
from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop import system
from harness.loop.answers import fault
from harness.loop.engine import Engine
from harness.loop.guard import Endless, Fault, quiet, said
from harness.loop.recorder import Decision, Read, positions
from harness.loop.replay import Livelock, replay
from harness.loop.system import System
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake, brief
from harness.policy.events import Arrived, Done, Event, Finished, Freed, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import KEPT_PAGES, Batch, Cluster, Host, Infeasible, Jobs, Plan, Shape, Unsupported, UserError
from harness.policy.view import View
from workloads.models import shape

ACTIONS = (Load, Evict, Limit, Admit, Drop, Run, Move, Wake)
EVENTS = (Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done)
USES = rf"(Request\.slo|view\.\w+|Wake|({'|'.join(a.__name__ for a in ACTIONS[:-1])})(\.\w+(:\w+)?)?)"
QUERIES = {name for name in vars(View) if not name.startswith("_")}
REFUSABLE = (Load, Admit, Limit, Run)  # what can fail on a real engine at any time
LACK_S = 0.05  # for so long something is lacking then

PATIENCE_S = 120.0  # of virtual time after the last arrival: several times what the slowest case takes to drain
SWAPS = 16  # and so many loads by the slowest rung that a system uses: eight models, each twice
MOST_PER_S, MOST_PER_REQUEST, MOST = 500, 100, 1000  # decisions; polling every 10 ms makes 100 a second
MOST_ACTIONS, LONGEST_S = 10_000, 20.0  # of one answer; processor time, a view's first compilation included
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
    size: int = 1  # how many times longer than its shortest form


IDLE = Config(())
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
    """GPUs just large enough for what their models hold while idle, and so many of the longest requests each."""
    m = models[0]
    process = machine.memory(Config((m,)), cost.gpu("h100")).process_bytes[0]
    idle = shapes.weight_bytes(m.shape) + process + KEPT_PAGES * machine.granule_bytes(Config(()), m, True)
    each = idle + requests * m.shape.max_tokens * shapes.kv_token_bytes(m.shape)
    return Config(tuple(models), gpus=gpus, mem_fraction=-(-len(models) // gpus) * each / cost.gpu("h100").mem_bytes)


def cases(seed: int = 0, size: int = 1) -> dict[str, Case]:
    """Every case by name, `size` times as long."""
    three, n = _models(3), 32 * size
    two, tight = Config(three, gpus=2), _tight(_models(3, max_tokens=2048), gpus=2, requests=3)

    def case(name: str, config: Config = two, span_s: float = 1.0, **kind: Any) -> Case:
        return _case(name, seed, n, config, span_s=span_s * size, size=size, **kind)

    def crunch(name: str, config: Config, **kind: Any) -> Case:
        return _case(name, seed, 2 * n, config, span_s=0.2 * size, size=size, ample=False, **kind)

    return {
        "calm": case("calm", replace(two, noise=0.02), span_s=30.0),
        "one-gpu": case("one-gpu", Config(three)),
        "crowd": case("crowd", Config(_models(8), gpus=3, node_gpus=2)),
        "tensor-parallel": case("tensor-parallel", Config(_models(2, {0: 2}), gpus=2)),
        "overload": case("overload", replace(two, batch_cap=2), span_s=0.25),
        "pressure": crunch("pressure", tight, prompt=(64, 256), output=(1024, 1792)),
        "one-token": case("one-token", output=(1, 1)),
        "long-prompts": case("long-prompts", prompt=(5000, 8000)),
        "simultaneous": case("simultaneous", burst=8),
        "idle-model": case("idle-model", asked=2),
        "no-requests": case("no-requests")._replace(jobs=_first(case("none").jobs, 0)),
        "refused": case("refused", Config(_models(6), gpus=3), ample=False, refuse=4),
        "late": case("late", decision_s=0.05, control_s=0.02),
    }


def _first(jobs: Jobs, n: int) -> Jobs:
    """The first n requests of a workload."""
    return jobs.first(n)


# ------------------------------------------------------------------ trials


class Subject(NamedTuple):
    """A preset of a system in a case."""

    make: Any
    preset: str | None
    name: str  # of the case
    case: Case

    def __str__(self) -> str:
        return f"case {self.name}" + (f", preset {self.preset}" if self.preset else "")

    def policy(self, cluster: Cluster) -> System:
        """A fresh policy. Raises Infeasible where it says so, Fault where it fails."""
        return system.build(self.make, cluster, self.make.presets[self.preset] if self.preset else {})

    def assemble(self) -> tuple[System, Engine]:
        """A fresh policy and its engine, whose page size the policy's options decide."""
        config = self.case.config
        priced = _priced(tuple((m.shape, m.tp) for m in config.models), config.gpu, config.host)
        policy = self.policy(machine.cluster(config, priced=priced))
        engine = Sim(config, policy.options, priced)
        return self.policy(engine.cluster), engine


def subject(make: Any, preset: str | None, name: str, case: Case) -> Subject:
    """A subject; a system that brings its own number of GPUs gets it."""
    config = case.config
    if hasattr(make, "gpus_needed"):
        config = replace(config, gpus=make.gpus_needed(machine.cluster(config).models, config.node_gpus))
    return Subject(make, preset, name, case._replace(config=config))


@cache
def _priced(shapes: tuple[tuple[Shape, int], ...], gpu: str, host: str) -> machine.Machine:
    return machine.machine(Config(tuple(Served("", *each) for each in shapes), gpu=gpu, host=host))


class Trial(NamedTuple):
    """What happened to a subject."""

    subject: Subject
    jobs: Jobs
    uses: frozenset[str]
    decisions: Sequence[Decision]
    notes: Sequence[tuple[str, Breach]]  # laws broken while it ran
    error: BaseException | None = None  # what ended the run
    impossible: str | None = None  # why there was no run
    rows: Sequence[Mapping[str, Any]] = ()  # of requests.parquet
    refused: Sequence[Action] = ()  # by injection
    seen: int = 0  # requests that had come by the end
    kv_bytes: int = 0  # held at the end, on GPUs


Note = Callable[[str, str], None]  # law, what breaks it


class TooLong(Livelock):
    """A policy thought for too long."""


class Stale(Exception):
    """A view was used after its decision."""


class Lent:
    """A view for the time of one decision: whatever is asked of it goes through one function."""

    def __init__(self, ask: Callable[..., Any], look: Callable[[str], None]) -> None:
        self._ask, self._look = ask, look

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Lent
        object.__getattribute__(self, "_look")(name)
        ask = object.__getattribute__(self, "_ask")
        if name == "now_s":
            return ask(name)
        return lambda *args, **named: ask(name, *positions(name, args, named))


class Probe:
    """A system around another: records its decisions, lends it views, and notes what it does with them."""

    def __init__(self, policy: System, cluster: Cluster, requests: int) -> None:
        self.hears, self.uses, self.options = policy.hears, policy.uses, policy.options
        self.decisions: list[Decision] = []
        self.notes: list[tuple[str, Breach]] = []
        self._policy, self._cluster, self._ended = policy, cluster, set[int]()
        self._most = MOST + MOST_PER_REQUEST * requests

    def note(self, law: str, what: str) -> None:
        """A law was broken in the decision under way."""
        self.notes.append((law, Breach(what, len(self.decisions))))

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """The other's answer."""
        now_s, reads, at = view.now_s, list[Read](), len(self.decisions)
        if at >= self._most + MOST_PER_S * max(0.0, now_s):
            raise Livelock(f"{at} decisions by {now_s:g} s")

        def look(query: str) -> None:
            if len(self.decisions) != at:
                self.note("fresh-view", f"{query} was asked of the view of decision {at}")
                raise Stale(query)
            if query not in QUERIES:
                self.note("blind", f"reached for {query} of the view")
                raise AttributeError(query)
            if query == "oracle_tokens" and "view.oracle_tokens" not in self.uses:
                self.note("declared", 'asked oracle_tokens, but "view.oracle_tokens" is not in uses')
                raise PermissionError(query)

        def ask(query: str, *args: Any) -> Any:
            look(query)
            answer = view.now_s if query == "now_s" else getattr(view, query)(*args)
            reads.append(Read(query, args, answer))
            return answer

        self._heard(event)
        lent: Any = Lent(ask, look)
        with _limited(LONGEST_S):
            actions = tuple(islice(self._policy.on(event, lent), MOST_ACTIONS))
        for action in actions:
            self._answered(action)
        if len(actions) == MOST_ACTIONS:
            raise Livelock(f"an answer of {MOST_ACTIONS} actions or more to {event}")
        self.decisions.append(Decision(now_s, event, tuple(reads), actions))
        return actions

    def _heard(self, event: Event) -> None:
        done = isinstance(event, Done) and (event.failed or type(event.action) in self.hears)
        if type(event) not in self.hears and not done:
            self.note("declared", f"was told {event}, and {type(event).__name__} is not in hears")
        if isinstance(event, Finished):
            if event.rid in self._ended:
                self.note("served", f"request {event.rid} finished twice")
            self._ended.add(event.rid)

    def _answered(self, action: Action) -> None:
        if not isinstance(action, ACTIONS):
            self.note("declared", f"answered {action!r}, which is no action")
            raise TypeError(f"{action!r} is no action")
        if wrong := fault((action,)):
            raise Fault(wrong)
        for need in needs(action):
            if not {need, need.partition(":")[0]} & self.uses:
                self.note("declared", f'answered {brief(action)}, but "{need}" is not in uses')
        named = getattr(action, "who", getattr(action, "rid", None))
        if isinstance(named, int) and named in self._ended:
            self.note("served", f"answered {brief(action)} after request {named} had ended")
        if isinstance(action, Limit) and action.gpu < len(gpus := self._cluster.gpus):
            have = gpus[action.gpu].mem_bytes
            if (action.kv_bytes or 0) > have:
                self.note("memory", f"answered {brief(action)}, and the GPU has {have} bytes")


def held_bytes(engine: Engine) -> list[tuple[int, int]]:
    """What a policy can see of each GPU's memory: bytes of the weights that are in or coming, and of KV."""
    view, models = engine.view(), engine.cluster.models
    found = []
    for g in range(len(engine.cluster.gpus)):
        insts = [inst for inst in view.insts(g) if view.weights(inst) not in {"out", "waiting"}]
        weights = sum(models[inst.model].weight_bytes for inst in insts)
        found.append((weights, sum(view.kv(m, g).used_bytes for m in models)))
    return found


class Stand:
    """An engine that lacks something for LACK_S now and then; its memory is looked at after whatever happens."""

    def __init__(self, engine: Engine, refuse: int, note: Note, config: Config = IDLE, limitless: bool = False) -> None:
        self.can, self.tells, self.offers = engine.can, engine.tells, engine.offers
        self.fidelity, self.cluster = engine.fidelity, engine.cluster
        self.wall_clock, self.exclusive, self.measured_on = engine.wall_clock, engine.exclusive, engine.measured_on
        self.refused: list[Action] = []
        self._engine, self._refuse, self._note = engine, refuse, note
        self._start_s, self._seed, self._limitless = config.start_s, config.seed, limitless
        self._count, self._free_s = 0, math.inf  # when what is lacking comes free
        self._start_loads: list[Action] | None = []  # None: past the start

    def ready(self) -> None:
        """See Engine."""
        self._engine.ready()

    def close(self) -> None:
        """See Engine."""
        self._engine.close()

    def begin(self, jobs: Jobs, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """See Engine."""
        self._engine.begin(jobs, hears, oracle, end_s)

    def poll(self, until_s: float) -> Event | None:
        """See Engine."""
        event = self._engine.poll(min(until_s, self._free_s))
        if event is None and self._free_s <= until_s:
            self._free_s, event = math.inf, Freed()
        if self._start_loads and isinstance(event, Done) and event.failed and event.action in self._start_loads:
            self._note("memory", f"answered {brief(event.action)} to the start: {event.why}")
        elif self._engine.view().now_s > self._start_s:
            self._start_loads = None
        self._look()
        return event

    def do(self, action: Action) -> Done | None:
        """See Engine."""
        self._count += 1
        draw = sha256(f"{self._seed}/{self._count}".encode()).digest()[0]
        if self._refuse and isinstance(action, REFUSABLE) and draw % self._refuse == 0:
            self.refused.append(action)
            self._free_s = min(self._free_s, max(self._start_s, self._engine.view().now_s) + LACK_S)
            return Done(action, "not now", "refused by the test")
        refusal = self._engine.do(action)
        if isinstance(action, Load) and self._start_loads is not None:
            self._start_loads.append(action)
            if refusal is not None:
                self._note("memory", f"answered {brief(action)} to the start: {refusal.why}")
        self._look()
        return refusal

    def view(self) -> View:
        """See Engine."""
        return self._engine.view()

    def idle(self) -> bool:
        """See Engine."""
        return self._engine.idle()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """See Engine."""
        return self._engine.rows()

    def stats(self) -> Mapping[str, float]:
        """See Engine."""
        return self._engine.stats()

    def _look(self) -> None:
        for g, (weights, kv) in enumerate(held_bytes(self._engine)):
            have = self.cluster.gpus[g].mem_bytes
            if kv < 0 or (weights + kv > have and not self._limitless):
                self._note("memory", f"GPU {g} holds {weights} bytes of weights and {kv} of KV, of {have}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """TooLong after so much processor time. Only the main thread can be stopped so."""

    def stop(*_: object) -> None:
        raise TooLong(f"thought for {seconds:g} s without an answer")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def run(subject: Subject, jobs: Jobs | None = None, end_s: float | None = None) -> Trial:
    """Try a subject, on its case's workload or another one, to its end or to an earlier time."""
    case = subject.case
    jobs = case.jobs if jobs is None else jobs
    try:
        policy, engine = subject.assemble()
    except Infeasible as why:
        return Trial(subject, jobs, frozenset(), (), (), impossible=str(why))
    except Fault as fault:
        return Trial(subject, jobs, frozenset(), (), (), error=fault.__cause__ or fault)
    probe = Probe(policy, engine.cluster, len(jobs))
    limitless = policy.options.get("memory") == "unlimited"
    stand = Stand(engine, case.refuse, probe.note, case.config, limitless)
    if end_s is None:
        end_s = patience_s(probe.uses, case.size) + (float(jobs.arrival_s[-1]) if len(jobs) else 0.0)
    trial = Trial(subject, jobs, probe.uses, probe.decisions, probe.notes)
    try:
        replay(probe, stand, jobs, end_s=end_s, decision_s=case.decision_s, control_s=case.control_s)
    except (Infeasible, Unsupported) as why:
        return trial._replace(impossible=str(why))
    except Fault as fault:
        return trial._replace(error=fault.__cause__ or fault)
    return trial._replace(
        rows=[row for batch in stand.rows() for row in batch.to_pylist()],
        refused=stand.refused,
        seen=_seen(engine, len(jobs)),
        kv_bytes=sum(kv for _, kv in held_bytes(engine)),
    )


def _seen(engine: Engine, n: int) -> int:
    """How many of n requests have come; those that have are the first ones."""
    view = engine.view()

    def there(r: int) -> bool:
        with suppress(KeyError):
            return bool(view.request(r))
        return False

    return bisect_left(range(n), True, key=lambda r: not there(r))


def patience_s(uses: frozenset[str], size: int = 1) -> float:
    """Seconds after the last arrival by which every request must have ended; a longer case takes longer to drain."""
    ways = cost.ladder("h100")
    return size * PATIENCE_S + SWAPS * max((ways[w].fixed_s for w in ways if f"Load.way:{w}" in uses), default=0.0)


def needs(action: Action) -> Iterator[str]:
    """What an action must find in `uses`: its name, each field off its default, and of closed sets the value."""
    kind = type(action).__name__
    match action:
        case Wake():
            return  # replay's own
        case Move(to=to):
            yield f"Move.to:{'none' if to is None else 'host' if isinstance(to, Host) else 'gpu'}"
    yield kind
    for f in fields(action):
        if f.default is not MISSING and (value := getattr(action, f.name)) != f.default:
            closed = f.name in {"way", "phase"} or (f.name, value) == ("steps", 0)
            yield f"{kind}.{f.name}" + (f":{value}" if closed else "")


# ------------------------------------------------------------------ laws of a file


def starts(name: str) -> Iterator[Breach]:
    """The file can be imported, its presets build a system, and its fields are explained."""
    try:
        make = system.find(name)
    except UserError as error:
        if not _source(name):
            raise
        yield Breach(str(error))
        return
    except Fault as fault:
        yield Breach(f"cannot be imported: {fault}" if fault.__cause__ else str(fault))
        return
    source, told = _source(name) or "", inspect.getdoc(inspect.getmodule(make)) or ""
    if not told:
        yield Breach("the file has no docstring that says what the system does")
    presets = make.presets
    takes = [field for field in inspect.signature(make).parameters if field != "cluster"]
    for preset, values in presets.items():
        if unknown := sorted(set(values) - set(takes)):
            yield Breach(f"preset {preset} sets {unknown[0]}, which is no field")
    for field in takes:
        said = re.search(rf"\b{re.escape(field)}\b", f"{told} {make.__doc__}") or re.search(
            rf"\b{re.escape(field)}\b.*#", source
        )
        if not said and field not in {**getattr(make, "choices", {}), **getattr(make, "ranges", {})}:
            yield Breach(f"field {field} is explained nowhere: say in the file's docstring what it means")
    for preset in (None, *presets):
        try:
            policy = subject(make, preset, "calm", cases()["calm"]).assemble()[0]
        except Infeasible:
            continue
        except Fault as fault:
            yield Breach(f"{f'preset {preset}' if preset else 'its default'} does not build: {fault}")
            continue
        for kind in policy.hears - {*EVENTS, *ACTIONS}:
            yield Breach(f"hears {kind!r}, which is no event")
        for use in sorted(policy.uses):
            if not re.fullmatch(USES, use):
                yield Breach(f'uses "{use}", which names no action, field or query')


def pure(name: str) -> Iterator[Breach]:
    """The file holds pure policy: no clock, randomness, threads or I/O, no engine and no other system."""
    try:
        yield from (Breach(f"line {line}: {what}") for line, what in impure(_source(name) or ""))
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return  # `starts` says so


OURS = ("harness.policy",)
NUMERIC = ("numpy", "scipy")
STANDARD = {  # modules without clock, randomness, threads, files or a way into the interpreter
    *("__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "hashlib"),
    *("heapq", "itertools", "math", "operator", "statistics", "string", "types", "typing"),
}
IMPURE_CALLS = {
    *("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open", "print"),
    *("hash", "id"),  # differ between two processes
}
IMPURE_NUMPY = {
    *("fromfile", "genfromtxt", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"),
    *("savez_compressed", "tofile"),
}


def impure(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a system's source with what it may not import or call. Raises SyntaxError."""
    tree = ast.parse(source)
    numpy: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [a.name for a in aliases]
                numpy |= {a.asname or a.name for a in aliases if a.name == "numpy"}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                names = ["." * level + f"{module or ''}.{a.name}" for a in aliases]
            case ast.Call(func=ast.Name(id=call)) if call in IMPURE_CALLS:
                yield node.lineno, f"calls {call}()"
        yield from ((node.lineno, f"imports {name}") for name in names if not _importable(name))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=np), attr=name) if np in numpy and name in IMPURE_NUMPY:
                yield node.lineno, f"uses numpy.{name}"


def _importable(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in NUMERIC:
        return rest.partition(".")[0] not in IMPURE_NUMPY
    return top in STANDARD or any(name == ours or name.startswith(f"{ours}.") for ours in OURS)


# ------------------------------------------------------------------ laws of a trial


def declared(trial: Trial) -> Iterator[Breach]:
    """Every action, query and SLO read is within `uses`, every event heard within `hears`."""
    yield from _noted(trial, "declared")
    if trial.error or "Request.slo" in trial.uses:
        return
    case = trial.subject.case
    served = tuple(m._replace(ttft_slo_s=1e-3, tpot_slo_s=1e-3) for m in case.config.models)
    strict = np.full(len(trial.jobs), 1e-3)
    other = run(
        trial.subject._replace(case=case._replace(config=replace(case.config, models=served))),
        replace(trial.jobs, ttft_slo_s=strict, tpot_slo_s=strict),
    )
    k = _differ([(d.reads, d.actions) for d in trial.decisions], [(d.reads, d.actions) for d in other.decisions])
    if k is not None and _steady(trial):
        yield Breach('other SLOs change its decisions, but "Request.slo" is not in uses', k)


def fresh_view(trial: Trial) -> Iterator[Breach]:
    """A view is used in the decision that it was given for, never later."""
    yield from _noted(trial, "fresh-view")


def livelock(trial: Trial) -> Iterator[Breach]:
    """Time passes: no 1,000 decisions in one instant, no 500 a second for ever, no answer without end."""
    if isinstance(trial.error, Livelock | Endless):
        yield Breach(str(trial.error), len(trial.decisions))


def survives(trial: Trial) -> Iterator[Breach]:
    """Nothing makes it raise, and a refused action costs only what it was for."""
    if trial.error and not trial.notes and not isinstance(trial.error, Livelock | Endless):
        what = str(trial.error) if isinstance(trial.error, Fault) else f"raised {said(trial.error)}"
        yield Breach(what, len(trial.decisions))
        return
    case = trial.subject.case
    if case.refuse and (lost := list(_lost(trial))):
        spared = run(trial.subject._replace(case=case._replace(refuse=0)), trial.jobs)
        if not any(_lost(spared)):
            yield from lost


def memory(trial: Trial) -> Iterator[Breach]:
    """What GPUs hold stays between nothing and the card; no plan asks for more; at the end no KV is left."""
    yield from _noted(trial, "memory")
    if trial.kv_bytes and all(row["state"] != "unfinished" for row in trial.rows):
        yield Breach(f"{trial.kv_bytes} bytes of KV are held although every request has ended")


def served(trial: Trial) -> Iterator[Breach]:
    """Every request ends once, with all its tokens, or dropped; it fails only for want of memory."""
    yield from _noted(trial, "served")
    for row in trial.rows:
        made, asked = row["made_tokens"], row["output_tokens"]
        if made > asked or (row["state"] == "done" and made != asked):
            yield _about(trial, row, f"is {row['state']} with {made} of {asked} tokens")
        if row["state"] == "failed" and trial.subject.case.ample:
            yield _about(trial, row, "failed although there was memory for it")
    if not trial.subject.case.refuse:
        yield from _lost(trial)


def replayed(trial: Trial) -> Iterator[Breach]:
    """The same events and answers, told to a fresh policy, bring the same queries and actions."""
    if trial.error or trial.notes:
        return
    policy, _ = trial.subject.assemble()
    for k, d in enumerate(trial.decisions):
        tape = deque(d.reads)

        def ask(query: str, *args: Any, tape: deque[Read] = tape) -> Any:
            if not tape or (tape[0].query, tape[0].args) != (query, args):
                raise Stale(query)
            return tape.popleft().answer

        lent: Any = Lent(ask, lambda _: None)
        try:
            with quiet():
                actions = tuple(policy.on(d.event, lent))
        except Stale as query:
            yield Breach(f"a fresh policy, told the same, asks {query} here", k)
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            yield Breach(f"a fresh policy, told the same, raises {said(error)} here", k)
            return
        if actions != d.actions or tape:
            yield Breach(f"a fresh policy, told the same, {'asks less' if tape else 'answers otherwise'} here", k)
            return


def blind(trial: Trial) -> Iterator[Breach]:
    """With another future after t (arrivals, output lengths), every decision before t is the same."""
    yield from _noted(trial, "blind")
    jobs = trial.jobs
    if trial.error or trial.notes:
        return
    for t_s in sorted({float(jobs.arrival_s[len(jobs) * k // 4]) for k in range(4)} if len(jobs) else ()):
        until = run(trial.subject, jobs, t_s)
        other = run(trial.subject, _otherwise(until), t_s)
        before = ([d for d in x.decisions if d.now_s < t_s] for x in (trial, other))
        if (k := _differ(*before)) is not None and _steady(trial):
            yield Breach(f"what comes after {t_s:.6f} s changes this decision", k)
            return


def _otherwise(until: Trial) -> Jobs:
    """The same past as a trial that was stopped, and another future: lengths, arrivals and their order.

    Requests that ended keep their length, others get one that they had not reached; what had not come, comes reversed.
    A system that asked for the true lengths is told them truly.
    """
    jobs, n = until.jobs, until.seen
    model, prompt, output = jobs.model.copy(), jobs.prompt_tokens.copy(), jobs.output_tokens.copy()
    arrival_s = jobs.arrival_s.copy()
    most = until.subject.case.config.models[0].shape.max_tokens
    if n < len(jobs):
        model[n:], prompt[n:] = model[n:][::-1].copy(), prompt[n:][::-1].copy()
        gaps = np.diff(arrival_s[n:])[::-1] + 0.25
        arrival_s[n:] += 1.0
        arrival_s[n + 1 :] = arrival_s[n] + np.cumsum(gaps)
    if "view.oracle_tokens" not in until.uses:
        for row in until.rows:
            if row["state"] != "done":
                r, made = row["id"], row["made_tokens"]
                room = max(1, most - int(prompt[r]) - made)
                output[r] = made + 1 + (int(output[r]) - made + 7 * r + 12) % room
    return replace(jobs, arrival_s=arrival_s, model=model, prompt_tokens=prompt, output_tokens=output)


def _steady(trial: Trial) -> bool:
    """Whether the very same world brings the same decisions: if not, no change of the world is to blame."""
    return _differ(trial.decisions, run(trial.subject, trial.jobs).decisions) is None


def _noted(trial: Trial, law: str) -> Iterator[Breach]:
    yield from (breach for name, breach in trial.notes if name == law)


def _about(trial: Trial, row: Mapping[str, Any], what: str) -> Breach:
    """A breach that concerns a request: at its arrival, where that was heard."""
    r = row["id"]
    at = (k for k, d in enumerate(trial.decisions) if isinstance(d.event, Arrived) and d.event.request.id == r)
    return Breach(f"request {r} of {row['model']} {what}", next(at, None))


def _lost(trial: Trial) -> Iterator[Breach]:
    """Requests without an end, but for those that an injected refusal hit."""
    case, excused = trial.subject.case, set[str | int]()
    for action in trial.refused:
        match action:
            case Load(inst) | Run(Batch(inst)):
                excused.add(inst.model)
            case Admit(who):
                excused.add(who)
    for row in trial.rows:
        if row["state"] == "unfinished" and not excused & {row["id"], row["model"]}:
            stood = "in no batch" if row["admit_ns"] is None else f"with {row['made_tokens']} of its tokens"
            left_s = patience_s(trial.uses, case.size)
            yield _about(trial, row, f"stands {stood}, {left_s:g} s after the last arrival")


def _differ(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Index of the first difference of two sequences."""
    k = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return None if k == len(one) == len(other) else k


# ------------------------------------------------------------------ the law of two processes

Prints = Mapping[str, Sequence[str]]  # by subject: a short hash of each decision, then of all rows


def deterministic(here: Prints, there: Prints) -> Iterator[tuple[str, Breach]]:
    """Two processes with different hash seeds make the same decisions and rows."""
    for key, mine in here.items():
        if (k := _differ(mine, there.get(key, ()))) is not None:
            what = "the rows are others" if k == len(mine) - 1 else "this decision is another"
            yield key, Breach(f"under another PYTHONHASHSEED {what}", min(k, max(0, len(mine) - 2)))


def prints(trial: Trial) -> list[str]:
    """What two processes compare of a trial."""
    rows = sha256(repr((trial.rows, trial.impossible)).encode()).hexdigest()
    return [*(f"{zlib.crc32(repr(d).encode()):08x}" for d in trial.decisions), rows]


def print_all(name: str, quick: bool, case: str | None) -> None:
    """The other process: prints of every trial, as JSON on a descriptor that the system does not know."""
    with os.fdopen(os.dup(1), "w") as out, Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        with redirect_stderr(nowhere):
            found = {key: prints(run(one)) for key, one in subjects(name, quick, case).items()}
        json.dump(found, out)


def _other_process(name: str, quick: bool, case: str | None, out: IO[bytes]) -> subprocess.Popen[bytes]:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join([str(system.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"from harness.check.check import print_all; print_all({name!r}, {quick!r}, {case!r})"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=out, env=env)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# ------------------------------------------------------------------ the check

FILE_LAWS: Mapping[str, Callable[[str], Iterator[Breach]]] = {"pure": pure, "starts": starts}
TRIAL_LAWS: Mapping[str, Callable[[Trial], Iterator[Breach]]] = {
    "declared": declared,
    "fresh-view": fresh_view,
    "livelock": livelock,
    "survives": survives,
    "memory": memory,
    "served": served,
    "replayed": replayed,
    "blind": blind,
}
LAWS: Mapping[str, str] = {  # what each says, in the order in which they are reported
    law: inspect.getdoc(f) or "" for law, f in {**FILE_LAWS, **TRIAL_LAWS, "deterministic": deterministic}.items()
}


def subjects(name: str, quick: bool = True, case: str | None = None) -> dict[str, Subject]:
    """What a system is tried on: each preset, and none, in each case; by a name that two processes agree on.

    Long workloads are for its default: presets of one file share its code, and eight of them take ten minutes.
    """
    make = system.find(name)
    sizes = [(0, 1)] if quick else [(0, 1), *((seed, LONG) for seed in range(1, SEEDS + 1))]
    return {
        f"{one}/{preset}/{seed}": subject(make, preset, one, workload)
        for seed, size in sizes
        for one, workload in cases(seed, size).items()
        if case in {None, one}
        for preset in (None, *(make.presets if size == 1 else ()))
    }


def check(name: str, *, quick: bool = True, only: str | None = None, case: str | None = None) -> list[Failure]:
    """Broken laws of a system, by name or path; the first breach of each, shrunk. None: it conforms.

    `only` one law, only one case. Raises UserError where there is no such system, law or case.
    """
    known("law", only, LAWS)
    known("case", case, cases())
    wanted = {only} if only else set(LAWS)
    found: dict[str, Failure] = {}

    def fail(law: str, where: str, breach: Breach, of: str | None = None) -> None:
        options = [f"--law {law}", *([f"--case {of}"] if of else []), *([] if quick else ["--full"])]
        command = f"bench check {shlex.quote(name)} {' '.join(options)}"
        found.setdefault(law, Failure(law, where + breach.what, breach.event, command))

    for law, of_file in FILE_LAWS.items():
        for breach in islice(of_file(name), 1):
            fail(law, "", breach)
    if "starts" in found or only == "pure":
        return [f for law, f in found.items() if law in wanted | {"starts"}]
    here: dict[str, list[str]] = {}
    trials = subjects(name, quick, case)
    reasons = []  # for no run
    with tempfile.TemporaryFile() as out, ExitStack() as stack:
        other = None
        for key, one in trials.items():
            trial = run(one)
            if other is None and "deterministic" in wanted:  # the kernel is compiled by now
                other = _other_process(name, quick, case, out)
                stack.callback(_end, other)
            here[key] = prints(trial)
            if trial.impossible is not None:
                reasons.append(f"{one}: {trial.impossible}")
                continue
            for law in (law for law in TRIAL_LAWS if law in wanted - set(found)):
                for breach in islice(TRIAL_LAWS[law](trial), 1):
                    slow = isinstance(trial.error, TooLong | Endless)  # so would be each shorter workload
                    n, breach = (len(one.case.jobs), breach) if slow else shrunk(one, TRIAL_LAWS[law], breach)
                    fail(law, f"{one}, {_prefix(n)}: ", breach, one.name)
            if "livelock" in found:  # every further trial would take its time
                break
        else:
            if len(reasons) == len(trials):
                fail("starts", "runs in no case: ", Breach(reasons[0]), case)
            if other is not None and other.wait():
                fail("deterministic", "the same in a second process: ", Breach("an error"), case)
            elif other is not None:
                out.seek(0)
                for key, breach in islice(deterministic(here, json.load(out)), 1):
                    fail("deterministic", f"{trials[key]}: ", breach, trials[key].name)
    return [found[law] for law in LAWS if law in found and law in wanted]


def shrunk(one: Subject, law: Callable[[Trial], Iterator[Breach]], found: Breach) -> tuple[int, Breach]:
    """The fewest first requests of a subject's workload that still break a law, by bisection, and how they do."""
    low, high = 0, len(one.case.jobs)
    while low < high:
        middle = (low + high) // 2
        breach = next(law(run(one, _first(one.case.jobs, middle))), None)
        if breach is None:
            low = middle + 1
        else:
            high, found = middle, breach
    return high, found


def _prefix(n: int) -> str:
    return {0: "without a request", 1: "its first request"}.get(n, f"its first {n} requests")


def known(kind: str, name: str | None, names: Iterable[str]) -> None:
    """UserError, with a suggestion, for a name that is none of these."""
    if name is not None and name not in (have := list(names)):
        near = difflib.get_close_matches(name, have, 1)
        raise UserError(f'no {kind} "{name}"{f"; did you mean {near[0]}?" if near else ""} ({", ".join(have)})')


def _source(name: str) -> str | None:
    """A system's source; None where there is no file."""
    path = Path(name) if name.endswith(".py") else system.ROOT / "systems" / f"{name}.py"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
