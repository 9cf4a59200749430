"""The kernel against its independent oracle, against itself as plain Python, and against the laws of time and work.

Over 600 lines: each law has its random worlds, and each kind of wrong kernel its mutation.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import Config, Machine, Served
from harness.engines.sim import kernel, records, state
from harness.engines.sim.engine import Sim
from harness.engines.sim.kernel import peek, reuse
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Done, Event, Finished, Freed, Preempted, Prefilled, TurnEnded
from harness.policy.types import KEPT_PAGES, Batch, Host, Inst, Jobs, Option
from harness.rows.record import WAITS
from tests.cases import cases
from tests.harness.engines.sim.dump import digest
from tests.harness.engines.sim.oracle import CAUSES, Oracle, Req, Result
from tests.harness.engines.sim.worlds import (
    BESIDE,
    CUT,
    HEARD,
    HOSTED,
    LAYERED,
    LENT,
    MEASURED,
    MIXED,
    NEVER,
    RESERVED,
    SHAPE,
    SHARED,
    SLICED,
    TURNED,
    WILD,
    World,
    drive,
    looped,
    world,
)

# Loads that wait; KV that waits or moves; by batch; and weights in the hosts' memories, where that is limited.
Sight = tuple[set[Inst], Mapping[int, str], dict[Batch, int], list[tuple[int, str, str]]]
STATE = {state.DONE: "done", state.DROPPED: "dropped", state.FAILED: "failed"}
END_S = 60.0
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
    return [f"{seed}: {d}" for d in apart(w if seed >= TURNED else replace(w, end_s=END_S))]


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


FULL = bool(os.environ.get("BENCH_FULL"))  # make ci-full: more worlds of each kind
WORLDS = {  # by what they have: the first seed, how many (half in the fast tests), and how many more in the slow ones
    "whole prompts": (0, 100, 400),
    "turns": (TURNED, 50, 400),
    "anything at any time": (WILD, 50, 600),
    "models on several numbers of GPUs": (CUT, 50, 300),
    "processes that take turns": (SLICED, 50, 400),
    "prompts that begin alike": (SHARED, 100, 400),
    "prefills in slices": (LAYERED, 50, 400),
    "KV attended on other GPUs": (LENT, 50, 400),
    "steps that disturb each other": (BESIDE, 50, 400),
    "shares that were measured": (MEASURED, 90, 450),
    "two kinds of GPU": (MIXED, 50, 400),
    "contiguous KV": (RESERVED, 100, 400),
    "weights that hosts have no room for": (HOSTED, 50, 400),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_kernel_agrees_with_the_oracle(kind: str) -> None:
    first, few, _ = WORLDS[kind]
    assert [d for seed in range(first, first + few // 2) for d in differences(seed)] == []


@pytest.mark.full
@pytest.mark.parametrize("kind", WORLDS)
def test_kernel_agrees_with_the_oracle_on_many_worlds(kind: str) -> None:
    first, few, many = WORLDS[kind]
    assert [d for seed in range(first + few // 2, first + few + many) for d in differences(seed)] == []


def test_closed_loops_are_the_oracles() -> None:
    each = 15 if FULL else 5
    seeds = [k + i for k in (0, 50, 100, TURNED, TURNED + 50, WILD, WILD + 50) for i in range(each)]
    assert [f"{seed}: {d}" for seed in seeds for d in apart(looped(seed))] == []


def plain(*args: str) -> str:
    """Run the same code as Python."""
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.harness.engines.sim.dump", *args],
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    ).stdout


def escaped(first: int, last: int, changes: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Return the changes of the kernel that the oracle notices on none of these worlds, each tried on its own.

    A change begins with the number of the world to be tried first, one that is known to show it. One process tries all
    changes: to start it takes longer than to notice one.
    """
    texts = [text for k, old, new in changes for text in (str(first + k), old, new)]
    seeds = plain(str(first), str(last), *texts).split()
    return [change for change, seed in zip(changes, seeds, strict=True) if seed == "none"]


@pytest.mark.slow
def test_compiled_and_plain_python_give_the_same_bits() -> None:
    each = 15 if FULL else 2
    for first in (0, TURNED, WILD, CUT, SLICED, SHARED, LAYERED, LENT, BESIDE, MEASURED, MIXED, RESERVED, HOSTED):
        assert plain(str(first), str(first + each)).split() == [digest(seed) for seed in range(first, first + each)]


@pytest.mark.slow
def test_oracle_notices_a_wrong_kernel() -> None:
    changes = [
        (2, "        n.anchor_work = done\n", ""),  # skips a settle
        (2, "    j = steps_to(S, lane, done_at(S, lane, now - HALF_NS))\n", "    j = 1\n"),  # joins a step early
        (5, "        put(S, batch_at(S, b).inst, -back)\n", "        pass\n"),  # leaks pages
        (
            5,
            "            give(S, i, q.blocks, q.",
            "            give(S, i, q.blocks - 1, q.",
        ),  # leaks one of each request
        (0, "    B.context -= q.length\n", ""),  # forgets a context
        (5, "K.end = W.now + K.stop / K.bytes_per_s", "K.end = W.now"),  # a link without a queue
        (0, "W.now", "W.now"),  # none, after all of these: nothing is left of them
    ]
    assert escaped(0, 30, changes) == changes[-1:]


@pytest.mark.full
def test_oracle_notices_a_wrong_turn_or_link() -> None:
    changes = [
        (
            2,
            "steps = min(steps, n.turn_max - n.turn_steps)",
            "steps = min(steps, n.turn_max - n.turn_steps + 1)",
        ),  # a step too long
        (
            0,
            "n.turn_until - HALF_NS)))\n        if j < n.steps",
            "n.turn_until - HALF_NS))) + 1\n        if j < n.steps",
        ),  # or a time
        (
            0,
            "    n.turn_until = INF\n",
            "    n.turn, n.turn_began, n.turn_until = BEGUN, W.now, W.now + for_s\n",
        ),  # from the order
        (0, "    if (W.heard >> E_TURN) & 1:\n", "    if (W.heard >> E_TURN) & 1 and why != TIME:\n"),  # never told
        (0, "            elif stuck(S, lane):\n", "            elif False:\n"),
        (0, "            if deserted(S, lane):\n", "            if False:\n"),
        (0, "    n.in_turn = 0\n    if n.turn == NO_TURN:\n", "    if n.turn == NO_TURN:\n"),  # counts the order before
        (
            15,
            "    if K.kv_head >= 0:\n        return K.kv_head\n",  # KV waits
            "    if K.kv_head >= 0 > K.weights_head:\n        return K.kv_head\n",
        ),
        (1, "            if awaited(S, xfer_at(S, xfer_at(S, p).transfer).inst):\n", "            if False:\n"),
        (1, "/ W.piece_bytes)) + 1\n", "/ W.piece_bytes)) + 2\n"),  # a piece more
        (
            1,
            "        if K.weights_parts > 1 and K.kv_head < 0 and",
            "        if K.weights_parts > 99 and",
        ),  # once begun, to the end
    ]
    assert escaped(TURNED, TURNED + 60, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_pages() -> None:
    changes = [
        (144, "        if P.emptied != W.emptied:", "        if True:"),  # a page in two extents stands by the first
        (144, "    fill_begun(S, i)\n    put(S, i, n)\n", "    put(S, i, n)\n"),  # prompts before the steps under way
        (340, "    batch_at(S, b).filled = batch_at(S, b).tick  # again", "    pass  # again"),
    ]
    assert escaped(0, 400, changes) == []
    full = [(13, "I.granule * (I.gone // I.granule_blocks)", "0")]  # pages of whom goes out stay
    assert escaped(WILD, WILD + 30, full) == []


@pytest.mark.full
def test_oracle_notices_a_wrong_prefix_cache() -> None:
    changes = [
        (10, "        if entry_at(S, x).refs == 0:\n            dequeue(S, x)\n", ""),  # in line although it is held
        (3, "        if E.refs == 0:\n            n += E.blocks\n", "        if E.refs == 0:\n"),  # never freed
        (10, "            take_blocks(S, r, i, need, held)\n", "            take_blocks(S, r, i, need, 0)\n"),  # twice
        (0, "            publish(S, r)\n", "            pass\n"),
        (21, "    forget_cached(S, i)\n", ""),  # weights come back to a warm cache
        (24, "        x = y if x < 0 or entry_at(S, y).stamp < ", "        x = y if x < 0 or entry_at(S, y).stamp > "),
        (109, "I.blocks - I.unbegun + I.cached", "I.blocks + I.cached"),  # for steps that never begin
        (
            54,
            "    for k in range(entries_of(S, r) - 1, -1, -1):\n",
            "    for k in range(entries_of(S, r)):\n",
        ),  # heads first
        (1, "min(cached, (goal - 1) // W.block_tokens)", "min(cached, goal // W.block_tokens)"),  # nothing to compute
    ]
    assert escaped(SHARED, SHARED + 120, changes) == []


@pytest.mark.full
def test_oracle_notices_a_wrong_wait_or_cap() -> None:
    changes = [
        (1, "    M.since = W.now\n", ""),  # counts the time with weights as well
        (1, "        load = out_s(S, q.model, t) - q.mark_load\n", "        load = 0.0\n"),  # all of it is the policy's
        (0, "    return inst_at(S, i).state >= IN\n", "    return inst_at(S, i).state == IN\n"),  # forgets who drains
        (0, "    n.bound &= n.own\n", ""),  # the policy's caps as well
        (12, "        if left <= 0:\n            short = 1\n", ""),  # sees only prompts that are cut
        (13, "    if r >= 0 and not blocked and", "    if r >= 0 and"),  # who waits for memory as well
        (14, "                    tally(S, lane, j)\n", ""),  # forgets steps of a span that the end cuts
        (0, "    q.ttft_compute = q.compute\n", ""),  # all of it is decode
        (0, "                made_first(S, r, t)\n", "                q.first = t\n"),
    ]
    assert escaped(WILD, WILD + 30, changes) == []


@pytest.mark.full
def test_oracle_notices_a_wrong_cut_or_a_move_that_hides() -> None:
    changes = [
        (
            29,
            "    size = float(blocks * J.block_bytes * J.gpu_count) / pairs\n",
            "    size = float(blocks * J.block_bytes)\n",
        ),
        (0, "    batch_at(S, b).asking += 1\n", ""),
        (1, "        transit = 1 if xfer_at(S, x).stage == GRANT else 2\n", "        transit = 2\n"),
    ]
    assert escaped(CUT, CUT + 60, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_turns_of_kernels() -> None:
    changes = [
        (0, "2 * n.sms + (lane & 1)", "2 * n.sms"),  # a prefill's partition is a decode's
        (
            0,
            "n.partition > 0 and y.partition > 0 and n.partition != y.partition",
            "n.partition > 0 and y.partition > 0",
        ),
        (0, "max(most, k.apart, k.crowd * asked)", "max(most, k.crowd * asked)"),
        (0, "max(most, k.apart, k.crowd * asked)", "max(most, k.apart)"),
        (0, "most = n.fills + meet / n.turn_s if", "most = 1.0 + meet / n.turn_s if"),  # all of the GPU
        (0, "k.passes + w * (1.0 - k.passes)", "k.passes"),  # prompts pass as decodes do
        (0, "        w = (tokens - k.few) / (k.many - k.few)\n", "        w = 0.0\n"),
        (0, "on / (1.0 - n.duty + on) * n.fills", "n.fills"),  # always there
        (0, "for _ in range(SWEEPS):", "for _ in range(1):"),
        (0, "n.fills + (G.round_s - n.round_s) / n.turn_s", "n.fills + G.round_s / n.turn_s"),
    ]
    assert escaped(BESIDE, BESIDE + 60, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_experts() -> None:
    changes = [
        (0, "read_bytes(S, c, decodes + tokens)", "read_bytes(S, c, decodes)"),  # prompts touch none
    ]
    assert escaped(0, 60, changes) == []
    crowding = [  # which lanes on partitions of their own show
        (62, "k.xbytes * (1.0 - k.xmiss ** float(m))", "k.xbytes"),  # a step reads all of them
        (290, "read_bytes(S, c, decodes + tokens)", "read_bytes(S, c, 1 + tokens)"),  # one sequence's
    ]
    assert escaped(BESIDE, BESIDE + 300, crowding) == []


@pytest.mark.full
def test_oracle_notices_products_that_do_not_go_by_phase() -> None:
    assert escaped(0, 60, [(0, "gemm *= k.pre_x", "gemm *= 1.0")]) == []


@pytest.mark.full
def test_oracle_notices_wrong_shares() -> None:
    changes = [
        (0, "(k.pre_slow if pieces > 0 else k.dec_slow)", "k.dec_slow"),
        (0, "    n.slow = W.co_run * ", "    n.slow = 1.0 * "),
        (0, "duty = k.pre_duty if pieces > 0 else k.dec_duty", "duty = k.dec_duty"),
        (0, "k.pre_duty if pieces > 0 else k.dec_duty", "k.pre_duty if pieces > 0 else 0.5 * k.dec_duty"),
        (0, "slowed(n.max_rate, n.given, n.slow)", "slowed(n.max_rate, n.given, 1.0)"),
        (178, "n.slow * n.layers * late", "n.layers * late"),
        (7, "slowed(n.given, n.given * part, n.slow)", "n.given * part"),
    ]
    assert escaped(MEASURED, MEASURED + 90, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_turns_of_processes() -> None:
    changes = [
        (4, "* max(turn, W.quantum_s) * (1.0 + W.switching) if", "* turn * (1.0 + W.switching) if"),  # knows no quantum
        (0, "            slice_ = max(turn, W.quantum_s) *", "            slice_ = turn *"),
        (1, "            longest = turn\n", "            longest = turn + W.quantum_s\n"),  # one alone yields
        (7, "        if x != lane and y.process == n.process:\n", "        if False:\n"),  # lanes of one in sequence
        (0, "                    longest = max(longest, ", "                    longest = min(longest, "),  # no rivals
        (0, "on = n.duty * (n.stretch / n.given)\n", "on = n.duty * n.stretch\n"),  # waits make none be there longer
        (0, " and not (W.sliced and y.process != n.process)", ""),  # processes by kernels, too
        (0, "    q.time_slice += off\n    q.contention += wall - solo - off\n", "    q.contention += wall - solo\n"),
        (0, "            set_part(S, lane, alone / beside)\n", "            pass\n"),  # no time slices
        (0, "        n.off_s = off_s(S, lane, now)\n", ""),  # forgets those before the last change
    ]
    assert escaped(SLICED, SLICED + 60, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_waits_between_two_tokens() -> None:
    changes = [
        (0, "        s.clock_load = B.clock_load\n", ""),
        (0, "        s.clock_stall = B.clock_stall\n", ""),
        (0, "        s.clock_solo = B.clock_solo + n.anchor_work\n", "        s.clock_solo = B.clock_solo\n"),
        (
            0,
            "        s.clock_wall = B.clock_wall + (n.anchor_s - n.started_s)\n",
            "        s.clock_wall = B.clock_wall\n",
        ),
        (
            0,
            "        s.clock_slice = B.clock_slice + off_s(S, lane, n.anchor_s)\n",
            "        s.clock_slice = B.clock_slice\n",
        ),
        (0, "        s.part = n.part\n", ""),
        (
            4,
            "        if W.log_tokens and n.rate > 0.0:\n            segment(S, lane, done_at(S, lane, now))\n",
            "",
        ),  # a slice that changes while the rate stays
        (5, "    s.clock_stall = q.mark_stall\n", ""),
        (5, "    s.transfer = q.transfer\n", ""),
        (0, "    s.queue = q.queue\n", ""),
        (0, "            if W.log_tokens and n.busy == SPAN:\n", "            if False:\n"),
    ]
    assert escaped(SLICED, SLICED + 60, changes) == []


@pytest.mark.full
def test_oracle_notices_wrong_slices() -> None:
    changes = [
        (31, "        if q.piece > 0:\n            leave_step(S, r)\n", ""),  # computed for nobody
        (70, "        n.layers_left = 0\n        n.ran += 1\n", "        n.layers_left = 0\n"),  # a step without an end
        (2, "        return q.piece > 0 and lane_at", "        return q.piece > 0 or lane_at"),  # only whole steps end
        (23, "        if W.reuse and not n.sliced:\n", "        if W.reuse:\n"),  # found before it is there
        (17, "        if W.reuse and n.sliced:\n            publish(S, r)\n", ""),  # never found
        (31, "n.busy != IDLE or n.layers_left > 0:", "n.busy != IDLE:"),  # joins a step early
        (
            0,
            "    solo *= part / layers\n",
            "    solo *= n.slice_layers / layers if n.slice_layers > 0 else 1\n",
        ),
        (0, "        n.steps = int(n.layers_left == 0)\n", "        n.steps = 1\n"),  # a step a slice
        (25, "            charge(S, r, W.now)\n            pieces += 1\n", "            pieces += 1\n"),  # runs closed
    ]
    assert escaped(LAYERED, LAYERED + 240, changes) == []


# ---------------------------------------------------------------- laws


@cases("seed", range(20))
def test_twice_every_duration_is_twice_every_stamp(seed: int) -> None:
    w = world(seed)
    cost = w.machine.tables.cost.copy()
    for name in ("host0", "host1", "att0", "att1", "dec0", "dec1", "dec2", "pre0", "pre1", "pre2"):
        cost[name] *= 2
    cost["flops"] /= 2
    cost["hbm"] /= 2
    tables = w.machine.tables._replace(cost=cost, gemm=w.machine.tables.gemm * 2, head=w.machine.tables.head * 2)
    spec = w.machine.spec
    links = {k: getattr(spec, k) / 2 for k in ("h2d", "d2h", "nvlink", "net", "disk")}
    ladder = {k: way._replace(fixed_s=2 * way.fixed_s) for k, way in w.machine.ladder.items()}
    slow = replace(
        w,
        machine=w.machine._replace(tables=tables, spec=spec._replace(**links), ladder=ladder),
        jobs=replace(w.jobs, arrival_s=w.jobs.arrival_s * 2),
        script=[(2 * t, a) for t, a in w.script],
    )
    R, R2 = drive(w, 50.0)[0].S.requests, drive(slow, 100.0)[0].S.requests
    for name in ("first", "done", "admit", *CAUSES):
        np.testing.assert_array_equal(2 * R[name], R2[name])


@cases("seed", range(20))
def test_new_names_change_nothing_else(seed: int) -> None:
    w = world(seed)
    new = {m.name: f"z{9 - k}" for k, m in enumerate(w.config.models)}

    def named(x: object) -> object:
        if isinstance(x, Inst):
            return Inst(new[x.model], x.place)
        if isinstance(x, Batch):
            return Batch(Inst(new[x.inst.model], x.inst.place), x.tag)
        return new.get(x, x) if isinstance(x, str) else x

    script = [
        (t, type(a)(**{f: named(getattr(a, f)) for f in a.__dataclass_fields__}))  # type: ignore[arg-type]
        for t, a in w.script
    ]
    config = replace(w.config, models=tuple(m._replace(name=new[m.name]) for m in w.config.models))
    other = replace(w, config=config, script=script, jobs=replace(w.jobs, models=tuple(new[m] for m in w.jobs.models)))
    R, R2 = drive(w, END_S)[0].S.requests, drive(other, END_S)[0].S.requests
    for name in ("first", "done", *CAUSES):
        np.testing.assert_array_equal(R[name], R2[name])


@cases("seed", range(20))
def test_idle_model_with_memory_to_spare_changes_no_stamp(seed: int) -> None:
    w = world(seed)
    t = w.machine.tables
    more = t._replace(
        **{
            k: np.concatenate([getattr(t, k), getattr(t, k)[:1]])
            for k in ("cost", "gemm", "head", "dec_rate", "pre_rate")
        }
    )
    roomy = w.machine._replace(spec=w.machine.spec._replace(mem_bytes=1 << 40))
    idle = Batch(Inst("idle", (0,)))
    crowded = replace(
        w,
        config=replace(w.config, models=(*w.config.models, Served("idle", SHAPE))),
        machine=roomy._replace(tables=more),
        jobs=replace(w.jobs, models=(*w.jobs.models, "idle")),
        script=[(NEVER, Load(idle.inst)), (NEVER, Run(idle)), (NEVER, Admit("idle", idle)), *w.script],
    )
    R, R2 = drive(replace(w, machine=roomy), END_S)[0].S.requests, drive(crowded, END_S)[0].S.requests
    for name in ("first", "done", *CAUSES):
        np.testing.assert_array_equal(R[name], R2[name])


@cases("seed", range(60))
def test_tokens_pages_waits_and_link_bytes_are_conserved(seed: int) -> None:
    w = world(seed)
    sim, _ = drive(w, END_S)
    R, S = sim.S.requests, sim.S
    ended = R["state"] >= state.DONE
    waited = sum(R[cause] for cause in CAUSES)
    spent = np.where(ended, R["done"], END_S) - R["arrival"]
    np.testing.assert_allclose(waited, spent, atol=1e-9)
    assert (R["made"] <= R["output"]).all()
    assert (R["made"][R["state"] == state.DONE] == R["output"][R["state"] == state.DONE]).all()
    assert (S.gpus["used"] <= S.gpus["cap"]).all() or w.options["memory"] == "unlimited"
    assert (S.insts["blocks"] >= 0).all()
    assert (S.gpus["used"] >= 0).all()
    if ended.all():
        assert (S.insts["blocks"] == 0).all()
        assert (S.insts["holders"] == 0).all()
        assert (S.gpus["kv_bytes"] == 0).all()
        assert (S.batches["count"] == 0).all()
    # decode tokens: what batches count is what requests made beyond the token of each prefill; whoever loses its KV
    # to a preemption, or by order, prefills again
    discards = sum(isinstance(a, Move) and a.to is None for _, a in w.script) * len(R)
    decoded = (R["made"] - 1 - R["preemptions"])[R["made"] > 0].clip(0).sum()
    assert discards or not ended.all() or S.batches["seq_steps"].sum() >= decoded


def prefill_queue(prompt_s: float, rate: float, n: int, *, models: int = 1, cap: int = 1) -> World:
    """Return one-token requests whose prefill takes `prompt_s`, on one GPU; each model alone would use all of it."""
    cost = np.zeros(models, COST)
    cost["pre0"], cost["flops"], cost["hbm"], cost["fl_tok"], cost["pre_slow"] = prompt_s, 1.0, 1.0, 10.0, 1.0
    cost["pre_fill"] = cost["dec_fill"] = cost["passes"] = cost["apart"] = cost["many"] = cost["pre_x"] = 1.0
    grid = np.array([1, 2])
    zero = np.zeros((models, 2))
    t = Tables(
        cost,
        grid,
        zero,
        zero,
        np.array([0.5, 1.0]),
        np.array([1.0]),
        np.ones((models, 2, 1)),
        np.ones((models, 2)),
        np.ones((models, 2, 1)),
    )
    spec = GpuSpec("test", "test", 1 << 40, 100, 2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1 << 50)
    served = tuple(Served(f"m{k}", SHAPE) for k in range(models))
    rng = np.random.default_rng(5)
    tokens, never = np.ones(n, np.int32), np.full(n, math.inf)
    jobs = Jobs(
        tuple(m.name for m in served),
        np.cumsum(rng.exponential(1 / rate, n)),
        rng.integers(0, models, n).astype(np.int32),
        tokens,
        tokens,
        never,
        never,
    )
    script: list[tuple[float, Action]] = []
    for m in served:
        b = Batch(Inst(m.name, (0,)))
        script += [(NEVER, Load(b.inst)), (NEVER, Run(b, seqs=cap)), (NEVER, Admit(m.name, b))]
    config = Config(served, batch_cap=cap, chunk_tokens=0, process_bytes=0, mem_fraction=1.0)
    return World(
        config, Machine(t, spec, {"host": Way(0.0, "pcie")}, HostProfile(0, 0, 0, 0, False, 1, 1)), {}, jobs, script
    )


def latency(w: World) -> np.ndarray:
    sim, _ = drive(w)
    assert (sim.S.requests["state"] == state.DONE).all()
    return np.asarray(sim.S.requests["done"] - sim.S.requests["arrival"])


def test_one_server_with_fixed_service_waits_as_m_d_1() -> None:
    S, rho, n = 0.5, 0.8, 100_000
    w = prefill_queue(S, rho / S, n)
    got = latency(w)
    free, want = 0.0, np.empty(n)
    for k, a in enumerate(w.jobs.arrival_s.tolist()):  # Lindley
        free = max(free, a) + S
        want[k] = free - a
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert got.mean() - S == pytest.approx(rho * S / (2 * (1 - rho)), rel=0.05)


def test_models_that_share_a_gpu_share_it_equally() -> None:
    """Many models, each one request at a time and compute-bound: M/G/1 processor sharing, mean S / (1 - rho)."""
    S, rho, n, models = 0.5, 0.5, 20_000, 60
    got = latency(prefill_queue(S, rho / S, n, models=models))
    assert got.mean() == pytest.approx(S / (1 - rho), rel=0.08)


@cases(
    ("layout", "quantum_s", "ends_s"),
    [
        ("model", 0.0, (0.75, 0.75)),  # a round is .25 + .5: one step of each
        ("model", 0.375, (0.875, 0.875)),  # the shorter keeps the GPU for the quantum: .375 + .5
        ("model", 1.0, (2.0, 2.0)),
        ("gpu", 1.0, (0.75, 0.75)),  # one process: its kernels take turns
    ],
)
def test_processes_take_turns_by_step_of_at_least_a_quantum(
    layout: str, quantum_s: float, ends_s: tuple[float, float]
) -> None:
    """Steps of .25 and .5 s begin together; one of .5 s comes when nobody else is left."""
    w = prefill_queue(0.25, 1.0, 3, models=2)
    w.machine.tables.cost["pre0"] = 0.25, 0.5
    jobs = replace(w.jobs, arrival_s=np.array([0.0, 0.0, 5.0]), model=np.array([0, 1, 1], np.int32))
    options = {"sharing": "turns", "process": layout}
    w = replace(w, jobs=jobs, options=options, machine=w.machine._replace(quantum_s=quantum_s))
    sim, _ = drive(w)
    assert sim.S.requests["done"].tolist() == pytest.approx([*ends_s, 5.5])
    waited = [ends_s[0] - 0.25, ends_s[1] - 0.5, 0.0]  # in slices of the other, or beside it in one process
    causes = [sim.S.requests[cause].tolist() for cause in ("time_slice", "contention")]
    assert causes == [pytest.approx(x) for x in ([[0.0] * 3, waited] if layout == "gpu" else [waited, [0.0] * 3])]


def test_a_run_that_says_how_a_gpu_is_shared_says_it_for_all_but_who_leaves_it_out() -> None:
    w = prefill_queue(0.5, 1.0, 2, models=2)
    w = replace(w, jobs=replace(w.jobs, arrival_s=np.zeros(2), model=np.arange(2, dtype=np.int32)))
    w = replace(w, machine=w.machine._replace(quantum_s=2.0))

    def ends_s(asked: Any, **options: str) -> float:
        return float(latency(replace(w, config=replace(w.config, sharing=asked), options=options)).max())

    assert ends_s("own") == ends_s("fluid", sharing="turns") == pytest.approx(1.0)
    assert ends_s("turns") == ends_s("own", sharing="turns") == pytest.approx(4.0)
    assert ends_s("turns", sharing="none") == pytest.approx(0.5)


@cases("part", [0.25, 0.5, 1.0])
def test_a_lane_slows_and_is_slowed_on_a_gpu_that_is_not_its_instances(part: float) -> None:
    """Two lanes on GPUs of their own, of which the first has kernels on the other's as well."""
    w = prefill_queue(0.5, 1.0, 2, models=2)
    sim = Sim(replace(w.config, gpus=2), {}, w.machine)
    for m, g in (("m0", 0), ("m1", 1)):
        b = Batch(Inst(m, (g,)))
        for action in (Load(b.inst), Run(b), Admit(m, b)):
            sim.do(action)
    assert [sim.S.demands["gpu"][sim.S.lanes["demand"][lane]] for lane in range(4)] == [0, 0, 1, 1]
    more = np.zeros(len(sim.S.demands) + 1, records.DEMAND)
    more[:-1] = sim.S.demands
    more[-1] = part, 0.0, 0.0, 0.0, 1, -1
    more["next"][sim.S.lanes["demand"][0]] = len(more) - 1
    sim.S.put(demands=more)
    kernel.tie(sim.S.at, 0, 1)
    zero, two = np.zeros(2), np.arange(2, dtype=np.int32)
    sim.take(replace(w.jobs, arrival_s=zero, model=two))
    sim.begin(HEARD, oracle=False)
    while sim.poll(math.inf) is not None:
        pass
    end_s = 1.0  # a turn each on GPU 1: the first lane's own GPU has room left
    assert sim.S.requests["done"].tolist() == pytest.approx([end_s, end_s])
    gpus = sim.S.gpus
    assert gpus["flop_s"][:2].tolist() == pytest.approx([0.5, 0.5 * (1 + part)])
    assert gpus["busy_s"][:2].tolist() == pytest.approx([end_s, end_s])


def test_littles_law() -> None:
    w = prefill_queue(0.5, 1.2, 20_000)
    got, a = latency(w), w.jobs.arrival_s
    span = float((a + got).max())
    stamps = np.concatenate([np.stack([a, np.ones_like(a)], 1), np.stack([a + got, -np.ones_like(a)], 1)])
    stamps = stamps[np.argsort(stamps[:, 0], kind="stable")]
    inside = float((np.cumsum(stamps[:-1, 1]) * np.diff(stamps[:, 0])).sum()) / span
    assert inside == pytest.approx(len(a) / span * got.mean(), rel=1e-9)


def test_a_view_shows_the_last_boundary_and_advancing_in_pieces_changes_nothing() -> None:
    for seed in range(30):
        w = world(seed)
        whole = drive(w, END_S)[0].S.requests
        sim: Sim = w.sim()
        for t, action in w.script:
            if t == NEVER:
                sim.do(action)
        sim.take(w.jobs)
        sim.begin(frozenset(), oracle=False)
        view, todo = sim.view(), [x for x in w.script if x[0] > NEVER]
        made = 0
        for at in np.linspace(0.0, END_S, 97):
            while todo and todo[0][0] <= at:
                while sim.poll(todo[0][0]) is not None:
                    pass
                sim.do(todo.pop(0)[1])
            while sim.poll(float(at)) is not None:
                pass
            now = sum(view.request(r).made_tokens for r in range(int(sim.S.s["arrived"])))
            assert now >= made
            made = now
            for g in range(w.config.gpus):
                assert view.free_bytes(g) >= 0 or w.options["memory"] == "unlimited" or sim.S.gpus[g]["waiting"] > 0
        sim.finish()
        for name in ("first", "done"):
            np.testing.assert_allclose(whole[name], sim.S.requests[name], atol=1e-9)


@cases("seed", [LAYERED + 6 * k + kind for k in range(4) for kind in range(6)])
def test_slices_of_all_layers_are_none(seed: int) -> None:
    def stored(slice_layers: int | None) -> list[bytes]:
        def order(a: Action) -> Action:
            return replace(a, slice_layers=slice_layers) if isinstance(a, Run) and a.phase == "prefill" else a

        w = world(seed)
        script, rota = [(t, order(a)) for t, a in w.script], [[order(a) for a in entry] for entry in w.rota]
        sim, _ = drive(replace(w, script=script, rota=rota), 30.0)
        return [np.ascontiguousarray(sim.S.requests[name]).tobytes() for name in records.REQUEST.names or ()]

    assert stored(8) == stored(20) == stored(None)


# ---------------------------------------------------------------- turns, by hand


def clock(models: int = 2, *, prompt: int = 1, output: int = 1000, n: int = 1, gpus: int = 1) -> World:
    """Return a world: prefills of 1/8 s a request, decode steps of 1/4 s, loads of 1 s; n requests a model at 0."""
    cost = np.zeros(models, COST)
    cost["pre0"], cost["dec0"], cost["flops"], cost["hbm"] = 0.125, 0.25, 1.0, 1.0
    cost["pre_x"] = cost["pre_slow"] = cost["dec_slow"] = 1.0
    zero = np.zeros((models, 2))
    t = Tables(
        cost,
        np.array([1, 2]),
        zero,
        zero,
        np.array([0.5, 1.0]),
        np.array([1.0]),
        np.ones((models, 2, 1)),
        np.ones((models, 2)),
        np.ones((models, 2, 1)),
    )
    spec = GpuSpec("test", "test", 1 << 40, 100, 2, 1.0, 1.0, math.inf, math.inf, math.inf, 1.0, 1.0, 1 << 50)
    names = tuple(f"m{k}" for k in range(models))
    config = Config(
        tuple(Served(m, SHAPE) for m in names), gpus=gpus, chunk_tokens=0, mem_fraction=1.0, token_times=True
    )
    never = np.full(models * n, math.inf)
    jobs = Jobs(
        names,
        np.zeros(models * n),
        np.repeat(np.arange(models, dtype=np.int32), n),
        np.full(models * n, prompt, np.int32),
        np.full(models * n, output, np.int32),
        never,
        never,
    )
    priced = Machine(t, spec, {"host": Way(1.0, "pcie")}, HostProfile(0, 0, 0, 0, False, 1, 1))
    batches = [Batch(Inst(m, (0,))) for m in names]
    script: list[tuple[float, Action]] = [(NEVER, a) for b in batches for a in (Load(b.inst), Admit(b.inst.model, b))]
    return World(config, priced, {}, jobs, script)


def turns(w: World, rota: Sequence[Sequence[Action]], end_s: float) -> list[tuple[float, TurnEnded]]:
    """Return the turns that end, each followed at once by the next of a list; the first starts at 0."""
    w = replace(w, script=[*w.script, *((NEVER, a) for a in rota[0])], rota=rota)
    sim, told = drive(w, end_s)
    want = Oracle(w.setup()).run(w.jobs, w.script, end_s, w.answer())
    ours = [(t, e) for t, e in told if isinstance(e, TurnEnded)]
    assert ours == [(t, e) for t, e in want.told if isinstance(e, TurnEnded)]
    assert sim.S.gpus["busy_s"][0] <= end_s
    return ours


M0, M1 = (Batch(Inst(f"m{k}", (0,))) for k in range(2))


def test_two_batches_take_turns_of_whole_steps_without_a_gap() -> None:
    both: list[list[Action]] = [[Run(b, "prefill", steps=1)] for b in (M0, M1)]
    decodes: list[list[Action]] = [[Run(M0, "decode", for_s=0.6)], [Run(M1, "decode", for_s=0.5)]]
    rota = [*both, *decodes * 3]
    w = clock()
    ends = turns(w, rota, 2.9)
    # a turn of 0.6 s takes three steps of 1/4 s: the first boundary at or after it; one of 0.5 s takes two
    assert [(t, e.batch, e.why, e.steps, e.ran_s) for t, e in ends] == [
        (0.125, M0, "steps", 1, 0.125),
        (0.25, M1, "steps", 1, 0.125),
        (1.0, M0, "time", 3, 0.75),
        (1.5, M1, "time", 2, 0.5),
        (2.25, M0, "time", 3, 0.75),
        (2.75, M1, "time", 2, 0.5),
    ]
    sim, _ = drive(replace(w, script=[*w.script, *((NEVER, a) for a in rota[0])], rota=rota), 2.75)
    assert sim.S.requests["compute"].tolist() == [0.125 + 1.5, 0.125 + 1.0]
    assert sim.S.requests["queue"].tolist() == [0.125 + 1.0, 0.125 + 0.75 * 2 + 0.0]
    assert sim.S.gpus["busy_s"][0] == 2.75


def prefill(*script: tuple[float, Action], n: int = 1, **order: Any) -> tuple[Sim, Result]:
    """Return a lane for prompts, whose steps of 1/8 s a prompt have two layers at half the speed on 50 of 100 SMs."""
    w = clock(1, prompt=4, output=1, n=n)
    tables = w.machine.tables._replace(pre_rate=np.array([[0.5, 1.0]]))
    first = (NEVER, Run(M0, "prefill", **order))
    w = replace(w, machine=w.machine._replace(tables=tables), script=[*w.script, first, *script], end_s=9.0)
    assert apart(w) == []
    return drive(w)[0], Oracle(w.setup()).run(w.jobs, w.script, w.end_s)


def test_a_long_prefill_gives_its_sms_back_between_slices() -> None:
    wider = (0.01, Run(M0, "prefill", slice_layers=1))
    sim, _ = prefill(wider, sms=50, slice_layers=1)
    assert sim.S.requests["first"].tolist() == [0.125 + 0.0625]  # a layer on half of the SMs, one on all
    assert sim.S.requests["compute"][0] == 0.125
    assert sim.S.requests["contention"][0] == 0.0625
    sim, _ = prefill(wider, sms=50)
    assert sim.S.requests["first"].tolist() == [0.25]  # whole: the order waits for the end of the step
    assert sim.S.batches["steps"].tolist() == [1]


@cases(("layers", "done_s"), [(1, 3.75), (2, 4.75)])
def test_partitions_that_change_together_wait_for_a_slice_not_for_the_prefill(layers: int, done_s: float) -> None:
    w = clock(2, prompt=4, output=9, n=8)
    half = np.array([[0.5, 1.0]] * 2)
    tables = w.machine.tables._replace(pre_rate=half, dec_rate=half[:, :, None])
    split = [Run(M0, "decode", sms=50), Run(M1, "prefill", sms=50, slice_layers=layers)]
    whole = [Run(M0, "decode"), Run(M1, "prefill", slice_layers=layers)]
    script = [*w.script, (NEVER, Run(M0, "prefill")), *((1.0, a) for a in split), *((1.2, a) for a in whole)]
    w = replace(w, machine=w.machine._replace(tables=tables), script=script, end_s=9.0)
    assert apart(w) == []
    sim, _ = drive(w)
    # M0's first step takes 1/2 s from 1.0 on, and then waits for M1: a layer of it ends at 2.0, both at 3.0
    assert sim.S.requests["done"][:8].tolist() == [done_s] * 8
    assert sim.S.requests["first"][8:].tolist() == [2.5 if layers == 1 else 3.0] * 8


def test_a_request_is_dropped_between_slices() -> None:
    for layers, end_s in ((1, 0.0625), (2, 0.125)):
        sim, _ = prefill((0.01, Drop(0)), slice_layers=layers)
        assert sim.S.requests["done"].tolist() == [end_s]
    sim, _ = prefill((0.01, Drop(0)), n=2, slice_layers=1)
    assert sim.S.requests["done"].tolist() == [0.125, 0.125 + 0.0625]  # the other's second slice is for it alone


def test_a_step_between_two_slices_goes_on_when_its_lane_opens_again() -> None:
    sim, _ = prefill((0.01, Run(M0, "prefill", steps=0)), (1.0, Run(M0, "prefill")), slice_layers=1)
    assert sim.S.requests["first"].tolist() == [1.0 + 0.0625]
    assert sim.S.requests["queue"].tolist() == [1.0 - 0.0625]
    sim, _ = prefill((0.01, Run(M0)), slice_layers=1)  # an order for both phases ends the step first
    assert sim.S.requests["first"].tolist() == [0.125]


def test_a_turn_of_time_ends_between_slices_one_of_steps_does_not() -> None:
    for order, want in (({"for_s": 0.05}, (0.0625, "time", 0)), ({"steps": 1}, (0.125, "steps", 1))):
        _, told = prefill(slice_layers=1, **order)[1][:2]
        (at, turn), *_ = [(t, e) for t, e in told if isinstance(e, TurnEnded)]
        assert (at, turn.why, turn.steps) == want


def test_who_leaves_its_step_between_slices_is_computed_anew() -> None:
    sim, _ = prefill((0.01, Admit(0, M0)), slice_layers=1)  # a new place in the order: what was done is lost
    assert sim.S.requests["first"].tolist() == [0.0625 + 0.125]


def test_a_request_between_two_slices_may_lose_its_kv() -> None:
    w = clock(1, prompt=16, output=40, n=2)
    arrival_s = np.array([0.0, 1.0])  # the later one is halted behind its first layer
    orders = [
        (NEVER, Run(M0, "prefill", slice_layers=1)),
        (NEVER, Run(M0, "decode")),
        (1.01, Run(M0, "prefill", steps=0)),
    ]
    limit = (NEVER, Limit("m0", 0, 4 * 16 * kv_token_bytes(SHAPE)))
    script = [*w.script, *orders, limit, (9.0, Run(M0, "prefill"))]
    w = replace(w, jobs=replace(w.jobs, arrival_s=arrival_s), script=script, end_s=30.0)
    assert apart(w) == []
    _, told = drive(w)
    # 17 tokens are there at 0.125; sixteen steps later a third block is wanted, and both have two of the four
    assert [(t, e.rid) for t, e in told if isinstance(e, Preempted)] == [(0.125 + 16 * 0.25, 1)]
    done_s = 0.125 + 39 * 0.25  # of the first, whose blocks the other needs
    assert [t for t, e in told if isinstance(e, Prefilled)] == [0.125, done_s + 0.125]


@cases("order", [Run(M0, slice_layers=1), Run(M0, "decode", slice_layers=1)])
def test_only_a_prefill_runs_in_slices(order: Run) -> None:
    _, told = drive(replace(clock(1), script=[*clock(1).script, (1.0, order)]), 2.0)
    assert [(e.action, e.failed) for _, e in told if isinstance(e, Done)] == [(order, "never")]


def test_a_turn_of_as_many_steps() -> None:
    ends = turns(clock(1), [[Run(M0, "prefill", steps=1)], [Run(M0, "decode", steps=7)], [Run(M0, steps=2)]], 5.0)
    assert [(t, e.phase, e.why, e.steps) for t, e in ends[:3]] == [
        (0.125, "prefill", "steps", 1),
        (0.125 + 7 / 4, "decode", "steps", 7),
        (0.125 + 9 / 4, "mixed", "steps", 2),
    ]


def test_prompts_one_a_turn_in_round_robin() -> None:
    rota: list[list[Action]] = [[Run(b, "prefill", steps=1, seqs=1)] for b in (M0, M1)]
    ends = turns(clock(n=3), rota, 0.8)
    assert [(t, e.batch, e.why) for t, e in ends[:6]] == [((k + 1) / 8, (M0, M1)[k % 2], "steps") for k in range(6)]
    assert [(t, e.why, e.steps, e.ran_s) for t, e in ends[6:]] == [(0.75, "empty", 0, 0.0)] * 3


def test_weights_that_come_late_cost_no_quota() -> None:
    w = clock(1)
    assert turns(w, [[Run(M0, for_s=0.3)]], 9.0)[0] == (0.375, TurnEnded(M0, "mixed", "time", 2, 0.375))
    out: list[tuple[float, Action]] = [x for x in w.script if not isinstance(x[1], Load)]
    _, told = drive(replace(w, script=[*out, (0.5, Run(M0, for_s=0.3)), (0.5, Load(M0.inst))]), 9.0)
    assert [x for x in told if isinstance(x[1], TurnEnded)] == [(1.875, TurnEnded(M0, "mixed", "time", 2, 0.375))]


def test_a_turn_ends_empty_or_stuck_when_nothing_can_step() -> None:
    w = clock(output=2)
    ends = turns(w, [[Run(M0, for_s=9.0)], [Run(M0, "decode", for_s=9.0)]], 5.0)
    # one prefill, one decode step, and then nobody is left; a turn for nobody ends at once
    assert ends[0] == (0.375, TurnEnded(M0, "mixed", "empty", 2, 0.375))
    assert ends[1] == (0.375, TurnEnded(M0, "decode", "empty", 0, 0.0))
    out = replace(w, script=[x for x in w.script if not isinstance(x[1], Load)])
    assert turns(out, [[Run(M0, for_s=9.0)]], 5.0)[0] == (0.0, TurnEnded(M0, "mixed", "stuck", 0, 0.0))
    away = [*w.script, (NEVER, Run(M0, "prefill")), (1.0, Move(0, Host())), (2.0, Run(M0, "decode", steps=3))]
    _, told = drive(replace(w, script=[*away, (2.0, Move(0, (0,)))]), 5.0)
    assert [e.why for _, e in told if isinstance(e, TurnEnded)] == ["empty"]  # waits for its KV, and finishes
    _, told = drive(replace(w, script=away), 5.0)
    assert [e.why for _, e in told if isinstance(e, TurnEnded)] == ["stuck"]


def test_orders_that_end_a_turn() -> None:
    w = clock(1)
    start: list[tuple[float, Action]] = [*w.script, (NEVER, Run(M0, steps=100))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, for_s=0.1))]), 5.0)
    # replaced: silent; the step in flight until 0.625 is nobody's, the new turn starts behind it
    assert told[2:] == [(0.875, TurnEnded(M0, "mixed", "time", 1, 0.25))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, steps=0))]), 5.0)
    assert told[2:] == [(0.625, TurnEnded(M0, "mixed", "steps", 3, 0.625))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, "prefill", steps=0))]), 5.0)
    assert told[2:] == []  # there is no such lane
    sim, _ = drive(replace(w, script=[*start, (0.5, Run(M0, "decode")), (0.5, Run(M0, "decode", steps=0))]), 5.0)
    assert sim.view().lane(M0, "mixed") is None
    assert sim.view().lane(M0, "decode") is None


def test_the_order_in_force_is_none_after_the_turn() -> None:
    w = clock(1)
    order = Run(M0, for_s=0.1)
    sim = w.sim()
    for a in (*(a for _, a in w.script), order):
        sim.do(a)
    sim.take(w.jobs)
    sim.begin(frozenset({TurnEnded}), oracle=False)
    assert sim.view().lane(M0, "mixed") == order
    assert sim.poll(9.0) == TurnEnded(M0, "mixed", "time", 1, 0.125)
    assert sim.view().lane(M0, "mixed") is None
    for bad in (Run(M0, for_s=-1.0), Run(M0, for_s=math.nan), Run(M0, steps=-1)):
        sim.do(bad)
        event = sim.poll(9.0)
        assert isinstance(event, Done)
        assert event.failed is not None


# ---------------------------------------------------------------- links, by hand


def link(script: list[tuple[float, Action]], pieces: int = 8) -> list[tuple[float, Action]]:
    """Load three models of 1 s on one link, in 8 pieces; return when each load or move is done, in both simulators."""
    w = clock(3)
    size = weight_bytes(SHAPE)
    spec = w.machine.spec._replace(h2d=float(size), d2h=float(size))
    machine = w.machine._replace(spec=spec, ladder={"host": Way(0.0, "pcie")})
    free = [x for x in w.script if not isinstance(x[1], Load) or x[1].inst == M0.inst]
    w = replace(w, machine=machine, config=replace(w.config, piece_bytes=size // pieces), script=[*free, *script])
    want = [
        (t, e.action)
        for t, e in Oracle(w.setup()).run(w.jobs, w.script, 9.0).told
        if isinstance(e, Done) and e.failed is None and t > NEVER
    ]
    sim = w.sim()
    for t, a in w.script:
        if t == NEVER:
            sim.do(a)
    sim.take(w.jobs)
    sim.begin(frozenset({Load, Move}), oracle=False)
    done, view = list[tuple[float, Action]](), sim.view()
    for t, a in [*((t, a) for t, a in w.script if t > NEVER), (9.0, Drop(0))]:
        while (event := sim.poll(t)) is not None:
            assert isinstance(event, Done)
            assert event.failed is None
            done.append((view.now_s, event.action))
        sim.do(a)
    assert [a for _, a in done] == [a for _, a in want]
    assert [t for t, _ in done] == pytest.approx([t for t, _ in want], abs=1e-12)
    return done


M2 = Batch(Inst("m2", (0,)))


def test_weights_that_somebody_waits_for_overtake_a_prefetch() -> None:
    two: list[tuple[float, Action]] = [(0.0, Load(M1.inst)), (0.0, Load(M2.inst))]
    assert link(two) == [(1.0, Load(M1.inst)), (2.0, Load(M2.inst))]
    # asked for at 0.3: the piece on the wire, the third, is not cut
    assert link([*two, (0.3, Run(M2))]) == [(1.375, Load(M2.inst)), (2.0, Load(M1.inst))]
    # closed again at 0.6, when its second piece is on the wire
    assert link([*two, (0.3, Run(M2)), (0.6, Run(M2, steps=0))]) == [(1.25, Load(M1.inst)), (2.0, Load(M2.inst))]
    # both awaited at 0.45: in order of issue again
    assert link([*two, (0.3, Run(M2)), (0.45, Run(M1))]) == [(1.125, Load(M1.inst)), (2.0, Load(M2.inst))]
    assert link([*two, (0.3, Run(M2))], pieces=1) == [(1.0, Load(M1.inst)), (2.0, Load(M2.inst))]


def test_kv_overtakes_weights() -> None:
    kv_s = 16 * kv_token_bytes(SHAPE) / weight_bytes(SHAPE)  # a block
    out: list[tuple[float, Action]] = [(NEVER, Run(M0, "prefill")), (0.5, Move(0, Host())), (1.0, Load(M1.inst))]
    done = link([*out, (1.3, Move(0, (0,)))])
    assert [a for _, a in done] == [Move(0, Host()), Move(0, (0,)), Load(M1.inst)]
    assert [t for t, _ in done] == pytest.approx([0.5 + kv_s, 1.375 + kv_s, 2.0 + kv_s], abs=1e-12)


# ---------------------------------------------------------------- books


def books(sim: Sim) -> None:
    """Check that each block belongs to a request at rest or a move's end, each byte to an account or weights."""
    S = sim.S
    owned = np.zeros(len(S.insts), np.int64)
    for r in S.requests[: int(S.s["arrived"])]:
        if r["state"] >= state.DONE:
            assert (r["home"], r["blocks"]) == (-1, 0)
        elif r["home"] >= 0:
            blocks = int(r["blocks"])
            if r["state"] == state.RUN:
                b = int(r["batch"])
                lane = peek.decode_lane(S.at, b)
                made = int(S.batches[b]["tick"]) - int(r["joined_tick"])
                made += peek.stepped(S.at, lane) + 1 if lane >= 0 else 0  # a step begun writes one token more
                blocks = max(blocks, -(-(int(r["length"]) + made - 1) // sim.config.block_tokens))
            owned[r["home"]] += blocks - int(r["shared"])
    x = int(S.s["transfer_head"])
    while x >= 0:
        X = S.transfers[x]
        if X["request"] >= 0 and X["stage"] in (state.LINK, state.TAIL):
            owned[X["inst"]] += X["blocks"]  # both ends are charged until it is there
            assert S.requests[X["request"]]["home"] == X["source"]
        x = int(X["next"])
    cached = cache_books(sim) if sim.names.prompt_ids else 0
    owned += cached
    ahead = np.zeros(len(S.insts), np.int64)
    for b in range(len(S.batches)):
        for i in range(len(S.insts)):
            ahead[i] += peek.ahead(S.at, b, i)
    assert (owned == S.insts["blocks"] - ahead).all()
    used = np.where(np.arange(len(S.gpus)) < sim.config.gpus, 0, S.gpus["used"] - S.gpus["kv_bytes"])
    kv = np.zeros(len(S.gpus), np.int64)
    for i in S.insts:
        for g in i["gpus"][: i["gpu_count"]]:
            kv[g] += i["held"]
            used[g] += i["footprint"] * (i["state"] not in (state.OUT, state.QUEUED))
    assert (kv == S.gpus["kv_bytes"]).all()
    assert (used + kv == S.gpus["used"]).all()
    assert (S.gpus["used"] <= S.gpus["cap"]).all() or S.s["unlimited"]
    told = S.events[: int(S.s["events_told"])]
    under_way = [  # an action's number is free exactly when no transfer, eviction, request or event has it
        *told["subject"][told["kind"] == state.E_DONE],
        *S.insts["evict"][np.isin(S.insts["state"], (state.DRAINING, state.LEAVING))],
        *S.requests["pending_arg"][S.requests["pending"] == state.P_DISCARD],
    ]
    x = int(S.s["transfer_head"])
    while x >= 0:
        under_way += [a] if (a := S.transfers[x]["action"]) >= 0 else []
        x = int(S.transfers[x]["next"])
    assert len(S.actions) - S.s["action_spare"] == len(set(under_way))
    for b, batch in enumerate(sim.names.batches):
        mine = np.flatnonzero((S.requests["batch"] == b) & (S.requests["state"] < state.DONE))
        queue = S.requests[mine][S.requests["state"][mine] == state.WAIT]
        assert S.batches[b]["left"] == (queue["prompt"] + queue["made"] - queue["prefilled"]).sum()
        assert sim.view().members(batch) == tuple(mine[np.argsort(S.requests["seq"][mine])])


def cache_books(sim: Sim) -> np.ndarray:
    """Check the blocks of entries that requests hold, by account; the others are in line, each once, oldest first."""
    S, per, held = sim.S, int(sim.S.s["id_blocks"]), np.zeros(len(sim.S.insts), np.int64)
    refs = np.zeros(len(S.entries), np.int64)
    for r in S.requests[S.requests["shared"] > 0]:
        ids = S.chains["entry"][r["chain"] : r["chain"] + -(-int(r["shared"]) // per)]
        refs[S.insts["entries"][r["home"]] + ids] += 1
    assert (refs == S.entries["refs"]).all()
    assert (S.entries["blocks"] >= 0).all()
    assert (S.entries["blocks"][len(S.requests) :] <= per).all()
    lined = set[int]()
    for i, inst in enumerate(S.insts):
        if inst["entries"] < 0:
            continue
        span = slice(int(inst["entries"]), int(inst["entries"]) + sim.names.prompt_ids[inst["model"]])
        held[i] = S.entries["blocks"][span][refs[span] > 0].sum()
        x, before, total = int(inst["oldest"]), -1, 0
        while x >= 0:
            entry = S.entries[x]
            assert (entry["inst"], entry["prev"], refs[x]) == (i, before, 0)
            assert entry["blocks"] > 0
            assert before < 0 or entry["stamp"] > S.entries["stamp"][before]
            lined.add(x)
            total += int(entry["blocks"])
            x, before = int(entry["next"]), x
        assert (before, total) == (inst["youngest"], inst["cached"])
    assert lined == set(np.flatnonzero(S.entries["stamp"] > 0).tolist())
    idle = np.flatnonzero((S.entries["blocks"][len(S.requests) :] > 0) & (refs[len(S.requests) :] == 0))
    assert set((idle + len(S.requests)).tolist()) <= lined
    return held


def shed_all(sim: Sim) -> None:
    """Forget what has lost its room: what is left has some."""
    S = sim.S
    for i in range(len(S.insts)):
        reuse.shed(S.at, i)
    for g in range(sim.config.gpus):
        on = [i for i, inst in enumerate(S.insts) if g in inst["gpus"][: inst["gpu_count"]]]
        reuse.note_unbegun(S.at, g)
        kv = sum(int(reuse.full_bytes(S.at, i)) for i in on)
        fits = S.gpus["used"][g] - S.gpus["kv_bytes"][g] + kv <= S.gpus["cap"][g]
        assert fits or S.s["unlimited"] or all(S.insts["cached"][i] == 0 for i in on)
        assert S.s["unlimited"] or not any(reuse.over_limit(S.at, i) for i in on)


@cases("seed", range(TURNED, TURNED + 40))
def test_who_listens_changes_nothing(seed: int) -> None:
    w = world(seed)

    def run(hears: frozenset[type]) -> tuple[list[tuple[float, Event]], bytes]:
        sim, told = w.sim(), list[tuple[float, Event]]()
        for _, action in (x for x in w.script if x[0] == NEVER):
            sim.do(action)
        sim.take(w.jobs)
        sim.begin(hears, oracle=False)
        for t, action in [*(x for x in w.script if x[0] > NEVER), (30.0, Drop(0))]:
            while (event := sim.poll(t)) is not None:
                told.append((sim.view().now_s, event))
            sim.do(action)
        return told, b"".join(
            np.array(sim.S.requests[c]).tobytes() for c in sim.S.requests.dtype.names or () if c != "pending_arg"
        )

    def kind(event: Event) -> type:
        return type(event.action) if isinstance(event, Done) else type(event)

    few = frozenset({Finished, Move})
    told, rows = run(HEARD)
    heard = [(t, e) for t, e in told if kind(e) in {*few, Freed} or (isinstance(e, Done) and e.failed)]
    assert run(few) == (heard, rows)


@cases("first", [*range(TURNED, TURNED + 40, 20), *range(WILD, WILD + 40, 20), *range(SHARED, SHARED + 40, 20)])
def test_no_kv_is_lost_or_counted_twice_in_any_order_of_turns_moves_and_evictions(first: int) -> None:
    for seed in range(first, first + (20 if FULL else 8)):
        w = world(seed)
        sim, answer, rng = w.sim(), w.answer(), np.random.default_rng(seed)
        view = sim.view()

        def hear(until: float) -> None:
            while (event := sim.poll(until)) is not None:  # noqa: B023 - called at once
                for action in answer(view.now_s, event):  # noqa: B023
                    sim.do(action)  # noqa: B023
                    books(sim)  # noqa: B023

        for t, action in w.script:
            if t == NEVER:
                sim.do(action)
        sim.take(w.jobs)
        sim.begin(frozenset({TurnEnded}), oracle=False)
        stops = [(t, a) for t, a in w.script if t > NEVER]
        looks = [(float(t), None) for t in rng.uniform(0, w.jobs.arrival_s[-1] + 3.0, 40)]
        for t, a in sorted([*stops, *looks], key=lambda x: x[0]):
            hear(t)
            books(sim)
            if a is None and sim.names.prompt_ids:
                shed_all(sim)
                books(sim)
            if a is not None:
                sim.do(a)
                books(sim)
        hear(math.inf)
        books(sim)
        lost = sim.S.requests["state"] == state.DONE
        assert (sim.S.requests["made"][lost] == sim.S.requests["output"][lost]).all()


# ---------------------------------------------------------------- corners: each once told kernel and oracle apart


def small(
    rows: Sequence[tuple[float, int, int, int]],
    script: Sequence[tuple[float, Action]],
    *,
    blocks: int = 1000,
    gpus: int = 1,
    models: int = 1,
    options: Mapping[str, Option] | None = None,
    **config: Any,
) -> World:
    """Return a world of rows (arrival, model, prompt, output); links, but the host's, move 4 blocks a second.

    Each GPU has room for all weights and `blocks` blocks of 4 tokens, two to an elastic page. Costs are the clock's.
    """
    w, block = clock(models, gpus=gpus), 4 * kv_token_bytes(SHAPE)
    settings = {"block_tokens": 4, "watermark": 0.0, "process_bytes": 0, "buffer_bytes": block // SHAPE.layers}
    reserve = KEPT_PAGES * 2 * block if options == ELASTIC else 0
    spec = w.machine.spec._replace(
        mem_bytes=models * (weight_bytes(SHAPE) + reserve) + blocks * block, d2h=4.0 * block, nvlink=4.0 * block
    )
    arrival, model, prompt, output = (np.array(x) for x in zip(*rows, strict=True))
    never = np.full(len(rows), math.inf)
    jobs = Jobs(
        w.jobs.models,
        arrival.astype(float),
        model.astype(np.int32),
        prompt.astype(np.int32),
        output.astype(np.int32),
        never,
        never,
    )
    return replace(
        w,
        config=replace(w.config, **(settings | config)),
        machine=w.machine._replace(spec=spec),
        options=options or {},
        jobs=jobs,
        script=script,
    )


def agreed(w: World) -> tuple[np.ndarray, list[tuple[float, Action, bool]]]:
    """Return requests, and which actions were done when, and whether they could be; kernel and oracle agree."""
    assert apart(w) == []
    sim, told = drive(w)
    return sim.S.requests, [(t, e.action, e.failed is None) for t, e in told if isinstance(e, Done)]


SWAP: Mapping[str, Option] = {"preempt": "swap"}
ELASTIC: Mapping[str, Option] = {"kv": "elastic"}
FAR, OTHER = Batch(Inst("m0", (1,))), Batch(M0.inst, 1)
ADMIT: list[tuple[float, Action]] = [(NEVER, Load(M0.inst)), (NEVER, Admit("m0", M0))]
SERVE: list[tuple[float, Action]] = [*ADMIT, (NEVER, Run(M0))]
APART: list[tuple[float, Action]] = [*ADMIT, (NEVER, Run(M0, "prefill")), (NEVER, Run(M0, "decode"))]


def test_a_partly_built_kv_does_not_travel() -> None:
    turn: list[tuple[float, Action]] = [(NEVER, Run(M0, steps=1, chunk_tokens=4)), (NEVER, Load(FAR.inst))]
    w = small([(0.0, 0, 12, 1)], [*ADMIT, *turn, (1.0, Admit(0, FAR)), (2.0, Run(FAR))], gpus=2)
    R, _ = agreed(w)
    assert (R["done"][0], R["compute"][0], R["queue"][0], R["transfer"][0]) == (2.125, 0.25, 1.875, 0.0)


def test_who_comes_after_the_last_that_waited_for_memory_does_not_wait_for_it() -> None:
    # the third is swapped out at 0.625 and brought back at 1.625, in a step that began with it in the queue
    w = small([(0.0, 0, 7, 4), (0.0, 0, 7, 9), (0.0, 0, 7, 9), (1.75, 0, 1, 1)], SERVE, blocks=7, options=SWAP)
    R, _ = agreed(w)
    assert (R["kv"][3], R["queue"][3], R["done"][3]) == (0.0, 0.125, 2.0)


def test_who_is_admitted_again_waits_for_memory_from_the_next_look() -> None:
    w = small([(0.0, 0, 7, 9), (0.0, 0, 11, 1)], [*SERVE, (0.5, Admit(1, M0))], blocks=4)
    R, _ = agreed(w)
    assert (R["kv"][1], R["queue"][1], R["done"][1]) == (2.0, 0.125, 2.25)


@cases("begin_s", [k / 10 for k in range(20)])
def test_steps_that_end_together_but_for_rounding_end_together(begin_s: float) -> None:
    """A prefill of 0.3 s and three decode steps of 0.1 s: whom it prefills decodes at once."""
    w = small([(begin_s, 0, 1, 20), (begin_s, 0, 1, 2)], [*ADMIT, (NEVER, Run(M0, "prefill", seqs=1)), APART[-1]])
    cost = w.machine.tables.cost.copy()
    cost["pre0"], cost["dec0"] = 0.3, 0.1
    R, _ = agreed(replace(w, machine=w.machine._replace(tables=w.machine.tables._replace(cost=cost))))
    assert R["done"][1] == pytest.approx(begin_s + 0.7, abs=1e-12)


def test_moves_keep_the_order_in_which_they_were_asked_for() -> None:
    out: list[tuple[float, Action]] = [(0.3, Move(1, Host())), (0.3, Move(0, Host()))]
    _, done = agreed(small([(0.0, 0, 7, 40), (0.0, 0, 7, 40)], [*SERVE, *out]))
    # in a step until 0.5; two blocks take half a second
    assert done == [(1.0, Move(1, Host()), True), (1.5, Move(0, Host()), True)]


def test_a_batch_that_waits_for_a_swap_looks_again_when_a_member_goes() -> None:
    # at 0.625 the last two lack a block each; the third is on its way out until 1.125, the second leaves at 0.8
    away: list[tuple[float, Action]] = [(0.8, Move(1, (1,)))]
    rows = [(0.0, 0, 5, 3), (0.0, 0, 7, 9), (0.0, 0, 7, 9)]
    R, _ = agreed(small(rows, [*SERVE, *away], blocks=6, gpus=2, options=SWAP))
    assert R["done"][0] == 0.8 + 0.25


def test_a_swapped_member_that_goes_lets_the_next_come_back() -> None:
    # the second and the third are swapped out at 0.625; six blocks for the second are never free
    rows = [(0.0, 0, 3, 12), (0.0, 0, 19, 9), (0.0, 0, 3, 3)]
    R, _ = agreed(small(rows, [*APART, (2.2, Admit(1, OTHER))], blocks=7, options=SWAP))
    assert R["preemptions"].tolist() == [0, 1, 1]
    assert R["done"][2] == 2.875


def test_a_move_larger_than_the_account_fails_by_what_the_kv_is_by_then() -> None:
    block = 4 * kv_token_bytes(SHAPE)
    script: list[tuple[float, Action]] = [(NEVER, Limit("m0", 1, 3 * block)), (2.1, Move(0, (1,)))]
    R, done = agreed(small([(0.0, 0, 7, 40), (1.0, 0, 7, 40)], [*SERVE, *script], gpus=2))
    assert done == [(2.25, Move(0, (1,)), False)]  # two blocks at first, four by now
    assert (R["transfer"][0], R["done"][0]) == (0.0, 0.25 + 39 * 0.25)


def test_what_a_move_waits_for_is_counted_in_pages() -> None:
    """A move of 4 blocks, held back by a limit, would take one page of two: with 3 free a prompt is let in."""
    near, beside = Batch(Inst("m1", (1,))), Batch(Inst("m0", (1,)), 1)
    script: list[tuple[float, Action]] = [
        *SERVE,
        (NEVER, Load(FAR.inst)),
        (NEVER, Load(near.inst)),
        (NEVER, Run(beside)),
        (NEVER, Run(near)),
        (NEVER, Admit("m1", near)),
        (NEVER, Limit("m0", 1, 0)),
        (0.0, Admit(0, beside)),
        (1.1, Move(1, (1,))),
    ]
    rows = [(0.0, 0, 24, 9), (1.0, 0, 15, 90), (2.0, 1, 1, 1)]
    R, done = agreed(small(rows, script, blocks=3, gpus=2, models=2, options=ELASTIC))
    assert done == [(3.125, Move(1, (1,)), True)]
    assert (R["kv"][2], R["done"][2]) == (0.0, 2.125)


@cases("end_s", [5.0, math.inf])
def test_a_grant_that_nothing_can_serve_fails_at_the_last_event(end_s: float) -> None:
    """Also where the end of the run is still ahead: of two models, the GPU has room for one."""
    w = small([(0.0, 0, 1, 4), (0.5, 1, 1, 1)], [*SERVE, (0.25, Load(M1.inst))], blocks=9, models=2)
    spec = w.machine.spec._replace(mem_bytes=w.machine.spec.mem_bytes - weight_bytes(SHAPE))
    w = replace(w, machine=w.machine._replace(spec=spec), end_s=end_s)
    R, done = agreed(w)
    assert done == [(0.875, Load(M1.inst), False)]
    assert (R["done"][0], R["load"][1], R["admission"][1]) == (0.875, end_s - 0.5 if end_s < math.inf else 0.375, 0.0)


def test_the_end_of_a_run_changes_nothing_before_it() -> None:
    for seed in range(60):
        w = replace(world(WILD + seed), end_s=math.inf)
        end_s = float(np.random.default_rng(seed).uniform(0.0, w.jobs.arrival_s[-1] + 2.0))
        whole, cut = drive(w)[1], drive(w, end_s)[1]
        assert cut == [x for x in whole if x[0] < end_s]


def test_the_order_of_admit_is_that_in_which_they_are_said() -> None:
    # both in a step until 0.25; the second is asked for first, and goes first
    again: list[tuple[float, Action]] = [(0.1, Admit(1, OTHER)), (0.2, Admit(0, OTHER)), (1.0, Run(OTHER, seqs=1))]
    R, _ = agreed(small([(0.0, 0, 4, 2), (0.0, 0, 4, 2)], [*SERVE, *again]))
    assert R["done"].tolist() == [1.5, 1.25]


def test_an_eviction_at_a_boundary_finds_no_step_in_flight() -> None:
    # two prefills of a turn end with a decode step that began with them; the answer evicts and loads again
    script = [*SERVE, *((0.1, Admit(r, OTHER)) for r in (1, 2)), (0.125, Run(OTHER, "prefill", steps=2, seqs=1))]
    w = small([(0.0, 0, 1, 9), (0.1, 0, 1, 9), (0.1, 0, 1, 9)], script)
    _, done = agreed(replace(w, rota=[[Evict(M0.inst, drain=False), Load(M0.inst)]]))
    assert done == [(0.375, Evict(M0.inst, drain=False), True), (1.375, Load(M0.inst), True)]


def test_weights_leave_with_their_last_member_before_the_next_lane_is_formed() -> None:
    # at 0.375 the first model's request finds no second block, alone in its account, and fails; its weights go with it,
    # and the second model's lane, which steps at 0.375 as well, lets in a prompt that needs their room
    both = [*SERVE, *((NEVER, a) for a in (Load(M1.inst), Run(M1, chunk_tokens=8), Admit("m1", M1)))]
    rows = [(0.0, 0, 3, 9), (0.0, 1, 3, 3), (0.25, 1, 7, 1)]
    R, done = agreed(small(rows, [*both, (0.25, Evict(M0.inst))], blocks=2, models=2))
    assert R["state"].tolist() == [state.FAILED, state.DONE, state.DONE]
    assert (R["done"][0], R["kv"][2], done) == (0.375, 0.0, [(0.375, Evict(M0.inst), True)])


def test_the_older_lane_takes_the_last_block_at_a_boundary_of_both() -> None:
    # at 1.375 each needs its third block, and one of five is left; whose span then ends has no meaning
    script = [*SERVE, *((NEVER, a) for a in (Load(M1.inst), Run(M1), Admit("m1", M1)))]
    R, _ = agreed(small([(0.0, 0, 3, 12), (0.0, 1, 3, 12)], script, blocks=5, models=2))
    assert R["state"].tolist() == [state.DONE, state.FAILED]
    assert R["done"].tolist() == [0.125 + 11 * 0.25, 1.375]


# ---------------------------------------------------------------- whose fault a wait is, and which caps bind


def waited(script: Sequence[tuple[float, Action]], **more: Any) -> tuple[float, float]:
    """Return the seconds that a request of 0, admitted at 2, was held back, and those that it waited for weights."""
    every = sorted([*script, (2.0, Run(M0)), (2.0, Admit(0, M0))], key=lambda x: x[0])
    R, _ = agreed(small([(0.0, 0, 1, 1)], every, **more))
    assert R["admission"][0] + R["load"][0] + R["compute"][0] + R["queue"][0] == R["done"][0]
    return float(R["admission"][0]), float(R["load"][0])


def test_who_is_in_no_batch_waits_for_weights_while_they_are_in_nowhere() -> None:
    first: tuple[float, Action] = (NEVER, Load(M0.inst))
    out: list[tuple[float, Action]] = [first, (0.25, Evict(M0.inst, drain=False)), (0.5, Load(M0.inst))]
    assert waited([first]) == (2.0, 0.0)
    assert waited([(0.5, Load(M0.inst))]) == (0.5, 1.5)  # the load takes a second
    assert waited(out) == (0.75, 1.25)  # leaves at 0.25, is back at 1.5
    assert waited([*out, (NEVER, Load(FAR.inst))], gpus=2) == (2.0, 0.0)  # in at another place all the time
    assert waited([*out, (0.25, Load(FAR.inst))], gpus=2) == (1.0, 1.0)  # the first of two loads ends it
    # loaded with the admission: its batch waits on
    assert waited([(2.0, Load(M0.inst))]) == (0.0, 3.0)


def test_weights_that_wait_for_memory_are_out_and_those_that_drain_are_in() -> None:
    spec = clock(2).machine.spec._replace(mem_bytes=weight_bytes(SHAPE) + 9 * 4 * kv_token_bytes(SHAPE))
    # the second model waits for the place of the first, whose only request takes until 1.125
    rows = [(0.0, 0, 1, 5), (0.25, 1, 1, 1), (0.25, 0, 1, 1)]
    leaves: list[tuple[float, Action]] = [(0.0, Admit(0, M0)), (0.5, Evict(M0.inst)), (0.5, Load(M1.inst))]
    script = [*SERVE[:1], (NEVER, Run(M0)), *leaves, (3.0, Run(M1)), (3.0, Admit(1, M1))]
    w = small(rows, script, models=2)
    R, done = agreed(replace(w, machine=w.machine._replace(spec=spec), end_s=4.0))
    assert done == [(1.125, Evict(M0.inst), True), (2.125, Load(M1.inst), True)]
    assert (R["load"][1], R["admission"][1]) == (2.125 - 0.25, 3.0 - 2.125)
    assert (R["load"][2], R["admission"][2]) == (4.0 - 1.125, 1.125 - 0.25)  # in until its last member goes


def test_a_group_of_gpus_has_the_weights_when_all_of_them_do() -> None:
    pair = Batch(Inst("m0", (0, 1)))
    w = small([(0.0, 0, 1, 1)], [(0.5, Load(pair.inst)), (2.0, Run(pair)), (2.0, Admit(0, pair))], gpus=2)
    served = tuple(m._replace(tp=2) for m in w.config.models)
    R, _ = agreed(replace(w, config=replace(w.config, models=served)))
    assert (R["admission"][0], R["load"][0]) == (0.5, 1.5)


def bound(
    rows: Sequence[tuple[float, int, int, int]], script: Sequence[tuple[float, Action]], **config: Any
) -> dict[str, int]:
    """Return steps of a world, and those that a cap of the engine bound; kernel and oracle agree on them."""
    w = small(rows, script, **config)
    assert apart(w) == []
    sim, _ = drive(w)
    counts = {cap: int(sim.S.s[f"by_{cap}"]) for cap in CAPS}
    shares = sim.stats()
    steps = int(sim.S.batches["steps"].sum())
    assert [shares[f"{cap}_bound"] for cap in CAPS] == [n / steps for n in counts.values()]
    return {"all": steps} | {cap: n for cap, n in counts.items() if n}


def test_what_waits_for_its_own_account_leaves_the_spans_of_others_whole() -> None:
    """Eight prompts wait for the limit of m0; m1 has its prompt and 27 decode steps in hardly a span more."""
    both: list[tuple[float, Action]] = [(NEVER, Load(M1.inst)), (NEVER, Admit("m1", M1)), (NEVER, Run(M1))]
    limit = (NEVER, Limit("m0", 0, 8 * 4 * kv_token_bytes(SHAPE)))
    begun = []
    for output in (28, 1):
        rows = [(0.0, 0, 4, 28), (0.0, 1, 4, output), *((0.3 + 0.3 * k, 0, 4, 4) for k in range(8))]
        w = small(rows, [*SERVE, *both, limit], models=2)
        assert apart(w) == []
        sim, _ = drive(w)
        assert (sim.S.requests["kv"][2:] > 0).sum() == 5
        begun.append(sim.stats()["steps"])
    assert begun[0] - begun[1] <= 3


def test_the_batch_cap_binds_where_members_wait_behind_as_many() -> None:
    two = [(0.0, 0, 1, 9), (0.1, 0, 1, 1)]
    # the second comes within the first prefill: all eight decode steps keep it out
    assert bound(two, SERVE, batch_cap=1) == {"all": 10, "cap": 8}
    assert bound(two, SERVE, batch_cap=2) == {"all": 10}
    # it goes at 0.75, within the third of them, in a span: the rest keeps nobody out
    assert bound(two, [*SERVE, (0.75, Drop(1))], batch_cap=1) == {"all": 9, "cap": 3}
    # what an order says is the policy's choice, unless it asks for more than the engine gives
    orders = {seqs: [*ADMIT, (NEVER, Run(M0, seqs=seqs))] for seqs in (1, 2)}
    assert bound(two, orders[1], batch_cap=2) == bound(two, orders[1], batch_cap=1) == {"all": 10}
    assert bound(two, orders[2], batch_cap=1) == {"all": 10, "cap": 8}
    # who waits for memory is not kept out by the cap
    assert bound([(0.0, 0, 1, 3), (0.1, 0, 40, 1)], SERVE, batch_cap=2, blocks=11) == {"all": 4}


def test_the_batch_cap_binds_where_members_with_kv_are_parked() -> None:
    # the second prefill ends at 0.25; the decode steps of the first begin at 0.125, 0.375, ...
    two = [(0.0, 0, 1, 9), (0.0, 0, 1, 9)]
    assert bound(two, APART, batch_cap=1) == {"all": 2 + 16, "cap": 1 + 7}
    assert bound(two, [*APART, (0.75, Drop(1))], batch_cap=1) == {"all": 2 + 8, "cap": 1 + 2}


def test_the_tokens_of_a_step_bind_where_a_prompt_is_cut_or_kept_out() -> None:
    # of 10 tokens in pieces of 4 the last is not cut
    assert bound([(0.0, 0, 10, 1)], SERVE, chunk_tokens=4) == {"all": 3, "chunk": 2}
    assert bound([(0.0, 0, 10, 1)], SERVE, chunk_tokens=10) == {"all": 1}
    # a decode takes the one token that there is, and the second prompt waits for its eight steps
    assert bound([(0.0, 0, 1, 9), (0.1, 0, 1, 1)], SERVE, chunk_tokens=1) == {"all": 10, "chunk": 8}
    assert bound([(0.0, 0, 1, 9), (0.1, 0, 1, 1)], [*SERVE, (0.75, Drop(1))], chunk_tokens=1) == {"all": 9, "chunk": 3}
    # whole prompts: two of 5 fit 12 tokens, the third does not; one alone may be longer
    three = [(0.0, 0, 5, 1)] * 3
    assert bound(three, SERVE, prefill_tokens=12) == {"all": 2, "prefill": 1}
    assert bound(three, SERVE, prefill_tokens=4) == {"all": 3, "prefill": 2}
    # an order's own grain is the policy's choice
    assert bound([(0.0, 0, 10, 1)], [*ADMIT, (NEVER, Run(M0, chunk_tokens=4))], chunk_tokens=10) == {"all": 3}
