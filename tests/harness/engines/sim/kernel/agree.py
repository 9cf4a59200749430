"""The kernel beside its independent oracle on one world: what of the two differs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from harness.engines.costs.coef import COST
from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.machine import Config, Machine, Served
from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Evict, Load, Move
from harness.policy.events import Done, Event, Finished, Freed, Preempted, Prefilled, TurnEnded
from harness.policy.types import Batch, Host, Inst
from harness.rows.record import WAITS
from tests.harness.engines.sim.oracle import CAUSES, Oracle, Req
from tests.harness.engines.sim.world import NEVER, SHAPE, World, drive, flat
from tests.harness.engines.sim.worlds import TURNED, world
from tests.workloads.asked import asked

# Loads that wait; KV that waits or moves; by batch; and weights in the hosts' memories, where that is limited.
Sight = tuple[set[Inst], Mapping[int, str], dict[Batch, int], list[tuple[int, str, str]]]
STATE = {state.DONE: "done", state.DROPPED: "dropped", state.FAILED: "failed"}
END_S = 60.0
LONGEST_S = 120.0  # two prompts of some worlds preempt each other for ever
M0, M1 = (Batch(Inst(f"m{k}", (0,))) for k in range(2))
FULL = bool(os.environ.get("BENCH_FULL"))  # make ci-full: more worlds of each kind
CAPS = ("cap", "chunk", "prefill")


def same(a: float, b: float, tol: float = 1e-9) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tol


def heard(event: Event, kind: type) -> bool:
    """Return whether an event is of a kind; of ends, those of loads, evictions and moves."""
    return isinstance(event, kind) and (not isinstance(event, Done) or isinstance(event.action, Load | Evict | Move))


def bare(event: Event) -> Event:
    """Return an event without the words in which a refusal gives its reason."""
    return replace(event, why="") if isinstance(event, Done) else event


def alike(a: tuple[float, Event], b: tuple[float, Event]) -> bool:
    """Return whether two events are one and the same, told at one time."""
    (t, e), (u, f) = a, b
    if isinstance(e, TurnEnded) and isinstance(f, TurnEnded) and same(e.ran_s, f.ran_s):
        e = replace(e, ran_s=f.ran_s)
    return e == f and same(t, u)


def differences(seed: int) -> list[str]:
    """List the differences of kernel and oracle on one random world."""
    w = world(seed)
    return [f"{seed}: {d}" for d in apart(replace(w, end_s=min(w.end_s, LONGEST_S) if seed >= TURNED else END_S))]


class Watched(Oracle):
    """An oracle that keeps what waits for memory, and what is on its way, when each action of the script is done."""

    def __init__(self, w: World) -> None:
        super().__init__(w.setup())
        self.script = {id(action) for t, action in w.script if t > NEVER}
        self.sights: list[Sight] = []

    def do(self, action: Action) -> None:
        if id(action) in self.script:
            loads = {inst for inst, weights in self.weights.items() if weights == "waiting"}
            kv = {r.id: how for r in self.live if (how := self.under_way(r)) != "none"}
            batches = Counter(r.batch for r in self.live if kv.get(r.id) == "waiting" and r.batch)
            hosts = [
                (node, model, "loading" if self.far(reader) else "in")
                for node, kept in self.memories.items()
                for model, reader in kept
            ]
            self.sights.append((loads, kv, dict(batches), hosts))
        super().do(action)


def sight(w: World, sim: Sim) -> Sight:
    """Return the state as a policy sees it."""
    view = sim.view()
    loads = {inst for g in range(w.config.gpus) for inst in view.insts(g) if view.weights(inst) == "waiting"}
    there = [r for r in range(len(w.jobs)) if sim.came(r)]
    kv = {r: how for r in there if (how := view.request(r).transit) != "none"}
    nodes = w.config.nodes[-1] + 1 if w.config.host_bytes is not None else 0
    hosts = [(k, inst.model, str(view.weights(inst))) for k in range(nodes) for inst in view.insts(Host(k))]
    return loads, kv, {b: n for b in sim.names.batch if (n := view.batch(b).waiting_to_move)}, hosts


def apart(w: World) -> list[str]:
    """List the differences of kernel and oracle on a world."""
    oracle, sights = Watched(w), list[Sight]()
    want = oracle.run(w.jobs, w.script, w.end_s, w.answer())
    sim, told = drive(w, look=lambda sim: sights.append(sight(w, sim)))
    lines = []
    if sights != oracle.sights:
        k = next((k for k, (a, b) in enumerate(zip(sights, oracle.sights, strict=False)) if a != b), -1)
        lines.append(f"sight {k}: {sights[k:][:1]}, not {oracle.sights[k:][:1]}")
    for kind in (Prefilled, Finished, Preempted, TurnEnded, Done, Freed):
        ours, theirs = ([(max(t, 0.0), bare(e)) for t, e in of if heard(e, kind)] for of in (told, want.told))
        for of in (ours, theirs):  # of requests that end at one instant, the order has no meaning
            of.sort(key=lambda x: repr(getattr(x[1], "rid", x[1] if isinstance(x[1], Done) else 0)))
        if not all(map(alike, ours, theirs)) or len(ours) != len(theirs):
            k = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if not alike(a, b)), -1)
            lines.append(f"{kind.__name__} {k}: {ours[k:][:1]}, not {theirs[k:][:1]}")
    for q, r in zip(want.requests, sim.S.requests, strict=True):
        got = STATE.get(int(r["state"]), "unfinished")
        if (got, int(r["made"]), int(r["preemptions"])) != (q.state, q.made, q.preemptions):
            want_ = f"{q.state}, {q.made} made, {q.preemptions} times preempted"
            lines.append(f"request {q.id} is {got}, {r['made']} made, {r['preemptions']} times preempted; not {want_}")
        if int(r["found"]) != q.found:
            lines.append(f"request {q.id} found {r['found']} tokens, not {q.found}")
        for name, at in (("admit", q.admit_s), ("first", q.first_s), ("done", q.done_s)):
            if not same(float(r[name]), at):
                lines.append(f"request {q.id} {name} at {r[name]}, not {at}")
        lines += [
            f"request {q.id} waited {r[cause]} for {cause}, not {q.waits[cause]}"
            for cause in CAUSES
            if not same(float(r[cause]), q.waits[cause])
        ]
        lines += [
            f"request {q.id} waited {r[f'ttft_{cause}']} for {cause} until its first token, not {q.ttft_waits[cause]}"
            for cause in CAUSES
            if not same(float(r[f"ttft_{cause}"]), q.ttft_waits[cause])
        ]
    if w.config.token_times:
        lines += gaps_apart(sim, want.requests)
    steps = {"all": int(sim.S.batches["steps"].sum())} | {cap: int(sim.S.s[f"by_{cap}"]) for cap in CAPS}
    lines += [f"{n} steps {cap}, not {want.steps[cap]}" for cap, n in steps.items() if n != want.steps[cap]]
    return lines


def gaps_apart(sim: Sim, want: Sequence[Req]) -> Iterator[str]:
    """List requests whose waits in their longest gap are not that gap, or not what the oracle has."""
    try:
        rows = [row for batch in sim.rows() for row in batch.to_pylist()]
    except IndexError as error:  # the log of a wrong kernel
        yield f"there are no rows: {error}"
        return
    for q, row in zip(want, rows, strict=True):
        ns, parts = row["token_ns"], {wait: row[f"gap_{wait}_ns"] for wait in WAITS}
        gaps_ns = [b - a for a, b in pairwise(ns)]
        if not gaps_ns:
            if any(part is not None for part in parts.values()):
                yield f"request {q.id} has no gap, and it was {parts}"
            continue
        k = gaps_ns.index(max(gaps_ns))
        if sum(parts.values()) != gaps_ns[k]:
            yield f"request {q.id} waited {parts} in a gap of {gaps_ns[k]} ns"
        if k + 1 < len(q.token_waits):
            passed = {cause: q.token_waits[k + 1][cause] - q.token_waits[k][cause] for cause in CAUSES}
            if any(abs(parts[cause] - passed.get(cause, 0.0) * 1e9) > 8 for cause in WAITS):
                yield f"request {q.id} waited {parts} in its longest gap, not {passed}"


def clock(models: int = 2, *, prompt: int = 1, output: int = 1000, n: int = 1, gpus: int = 1) -> World:
    """Return a world: prefills of 1/8 s a request, decode steps of 1/4 s, loads of 1 s; n requests a model at 0."""
    cost = np.zeros(models, COST)
    cost["pre0"], cost["dec0"], cost["flops"], cost["hbm"] = 0.125, 0.25, 1.0, 1.0
    cost["pre_x"] = cost["pre_slow"] = cost["dec_slow"] = 1.0
    t = flat(cost)
    spec = GpuSpec("test", "test", 1 << 40, 100, 2, 1.0, 1.0, math.inf, math.inf, math.inf, 1.0, 1.0, 1 << 50)
    names = tuple(f"m{k}" for k in range(models))
    served = tuple(Served(m, SHAPE) for m in names)
    config = Config(served, gpus=gpus, chunk_tokens=0, mem_fraction=1.0, token_times=True)
    jobs = asked(names, np.zeros(models * n), np.repeat(np.arange(models), n), prompt, output)
    priced = Machine(t, spec, {"host": Way(1.0, "pcie")}, HostProfile(0, 0, 0, 0, False, 1, 1))
    batches = [Batch(Inst(m, (0,))) for m in names]
    script: list[tuple[float, Action]] = [(NEVER, a) for b in batches for a in (Load(b.inst), Admit(b.inst.model, b))]
    return World(config, priced, {}, jobs, script)


def plain(*args: str) -> str:
    """Run the same code as Python."""
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.harness.engines.sim.dump", *args],
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=1100 if FULL else 280,
    ).stdout


def escaped(first: int, last: int, changes: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Return the changes of the kernel that the oracle notices on none of these worlds, each tried on its own.

    A change begins with the number of the world to be tried first, one that is known to show it. One process tries all
    changes: to start it takes longer than to notice one.
    """
    texts = [text for k, old, new in changes for text in (str(first + k), old, new)]
    seeds = plain(str(first), str(last), *texts).split()
    return [change for change, seed in zip(changes, seeds, strict=True) if seed == "none"]
