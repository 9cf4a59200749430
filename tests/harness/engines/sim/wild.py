"""Random worlds in which anything happens at any time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import PIECE_BYTES, Config, Machine, Served
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Done, Finished, Preempted, TurnEnded
from harness.policy.types import KEPT_PAGES, Batch, Gpus, Host, Inst, Option
from tests.harness.engines.sim.world import NEVER, SHAPE, World, admission, even, tables, workload


def wild(seed: int, *, cut: bool) -> World:
    """Return a world of anything at any time: up to four GPUs, groups of two, several places and batches of a model.

    Actions fall on the stamps of others; in one world of three all durations are dyadic, so that boundaries coincide.
    Where models are cut, each place has a number of GPUs of its own.
    """
    rng, cuts = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 4])

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    def pick(*xs: Any) -> Any:
        return xs[int(rng.integers(0, len(xs)))]

    gpus, exact = int(rng.integers(1, 5)), chance(1 / 3)
    shape = SHAPE._replace(q_heads=4, kv_heads=int(cuts.choice([1, 2, 4]))) if cut else SHAPE
    degrees = tuple(n for n in (1, 2, 4) if n <= gpus) if cut else ()
    served = tuple(
        Served(f"m{k}", shape, 2 if gpus > 1 and chance(0.25) else 1, degrees=degrees)
        for k in range(pick(1, 2, 2, 3, 4))
    )
    block, foot = 4 * kv_token_bytes(shape, 1), weight_bytes(shape) + 1000
    elastic, paging = chance(0.25), int(np.random.default_rng([seed, 1]).choice([1, 2, 4]))  # pages of 2, 4 or 8 blocks
    foot_all = foot + (KEPT_PAGES * 2 * paging * block if elastic else 0)
    mem = foot_all * pick(1, 1, 2, 2, 3, len(served)) + block * int(rng.integers(6, 50) if chance(0.8) else 4000)
    h2d, d2h, nvlink = (float(pick(1 << 18, 1 << 20, 1 << 22) if exact else foot * pick(1, 4, 20)) for _ in range(3))
    spec = GpuSpec("test", "test", mem, 100, 2, 1.0, 1.0, h2d, d2h, nvlink, 1.0, 1.0, 1 << 50)
    t = tables(rng, len(served) * max(1, len(degrees)), heavy=pick(0.1, 1.0, 4.0))
    if exact:
        t = even(t)
    host = HostProfile(0.0, 0.0, 0.0, 0.0, False, 1.0, 1.0, lookahead_steps=seed % 2)
    priced = Machine(t, spec, {"host": Way(pick(0.0, 0.25), "pcie")}, host)
    config = Config(
        served,
        gpus=gpus,
        block_tokens=4,
        batch_cap=pick(2, 4, 16),
        chunk_tokens=pick(0, 8, 32),
        prefill_tokens=64,
        piece_bytes=pick(1 << 14, foot // 7, PIECE_BYTES),
        watermark=pick(0.0, 0.05),
        admission=admission(seed),
        mem_fraction=1.0,
        process_bytes=1000,
        buffer_bytes=paging * block // shape.layers,
        noise=0.0 if exact else pick(0.0, 0.05),
        seed=int(rng.integers(0, 1000)),
        token_times=True,
    )
    options: dict[str, Option] = {
        "kv": "elastic" if elastic else "paged",
        "sharing": "none" if exact and chance(0.7) else pick("fluid", "fluid", "none"),
        "memory": "unlimited" if chance(0.05) else "real",
        "preempt": pick("recompute", "swap"),
    }
    jobs = workload(rng, [m.name for m in served], int(rng.integers(2, 40)), pick(10.0, 50.0, 200.0), pick(12, 60, 100))
    if exact:
        jobs = replace(jobs, arrival_s=np.floor(jobs.arrival_s * 64) / 64)
    span, turning = float(jobs.arrival_s[-1]) + pick(0.1, 0.5), chance(0.5)

    def place(m: Served) -> Gpus:
        return tuple(int(g) for g in rng.permutation(gpus)[: int(cuts.choice(degrees)) if cut else m.tp])

    homes = {m.name: list(dict.fromkeys(place(m) for _ in range(pick(1, 2, 2)))) for m in served}
    batches = [Batch(Inst(m, p), tag) for m in homes for p in homes[m] for tag in range(pick(1, 1, 2))]

    def batch(of: str | None = None) -> Batch:
        return pick(*(b for b in batches if of in (None, b.inst.model)))  # type: ignore[no-any-return]

    def order(b: Batch) -> Run:
        fields: dict[str, Any] = {}
        if turning and chance(0.7):
            if chance(0.6):
                fields["for_s"] = pick(0.0, 0.0625, 0.125, 0.5) * (1.0 if exact else float(rng.uniform(0.5, 1.5)))
            if not fields or chance(0.4):
                fields["steps"] = pick(1, 2, 5, 30)
        for name, values in (("seqs", (1, 2, 4)), ("chunk_tokens", (0, 4, 16)), ("sms", (20, 50, 60))):
            if chance(0.2):
                fields[name] = pick(*values)
        return Run(b, pick("mixed", "mixed", "prefill", "decode", "decode"), **fields)

    def both(b: Batch) -> list[Action]:
        """Return the two lanes of a batch, side by side."""
        return [replace(order(b), phase="prefill"), replace(order(b), phase="decode")]

    def some(at: float) -> list[Action]:
        """Return anything, mostly to one of the latest requests."""
        here = int(np.searchsorted(jobs.arrival_s, at, "right"))
        b, r = batch(), max(0, here - int(rng.integers(1, 12)))
        mine = served[int(jobs.model[r])].name
        to = pick(Host(), Host(), None, *homes[mine], *homes[mine])
        match int(rng.integers(0, 16)):
            case 0:
                return [Drop(r)]
            case 1:
                return [Evict(b.inst, chance(0.5))]
            case 2 | 3:
                return [Load(b.inst)]
            case 4:
                return [Evict(batch().inst, chance(0.5)), Load(b.inst), order(b)]
            case 5:
                return [Run(b, pick("mixed", "prefill", "decode"), steps=0)]
            case 6:
                size = pick(None, int(block * rng.integers(1, 40)))
                return [Limit(b.inst.model, g, size) for g in b.inst.place]  # type: ignore[union-attr]
            case 7:
                return [Admit(r, batch(mine))]
            case 8:
                new = batch(mine)
                return [Admit(r, new), Move(r, new.inst.place)]
            case 9 | 10:
                return [Move(r, to)]
            case 11:
                return [Move(b, pick(Host(), None, *homes[b.inst.model]))]
            case 12:
                return [Admit(b.inst.model, b)]
            case 13:
                return both(b)
            case 14:
                return [Move(r, to), pick(Drop(r), Admit(r, batch(mine)), Move(r, None))]
            case _:
                return [order(b)]

    script: list[tuple[float, Action]] = []
    for m in served:
        b = batch(m.name)
        if chance(0.95):
            script.append((NEVER, Load(b.inst)))
        script += [(NEVER, a) for a in ([order(b)] if chance(0.6) else both(b))]
        if chance(0.9):
            script.append((NEVER, Admit(m.name, b)))
        if chance(0.2):
            script += [(NEVER, Limit(m.name, g, int(block * rng.integers(5, 60)))) for g in b.inst.place]  # type: ignore[union-attr]
    stamps = jobs.arrival_s.tolist()
    for _ in range(int(rng.integers(0, 25))):
        at = pick(*stamps) if chance(0.25) else float(rng.uniform(0, span))
        stamps.append(math.floor(at * 64) / 64 if exact else at)
        script += [(stamps[-1], a) for a in some(stamps[-1])]
    if chance(0.5):
        script += [(span + 5.0, a) for b in batches for a in (Load(b.inst), Run(b))]
    entries = int(rng.integers(0, 7))
    rota = [[*some(float(rng.uniform(0, span))), order(batch())] for _ in range(entries)]
    answered = frozenset({TurnEnded, *(kind for kind in (Done, Finished, Preempted) if chance(0.25))})
    handoff = {b: to for b in batches if chance(0.3) and (to := batch(b.inst.model)) != b}
    end_s = pick(math.inf, math.inf, span, span + 7.0, span * float(rng.random()))
    return World(config, priced, options, jobs, sorted(script, key=lambda x: x[0]), rota, answered, handoff, end_s)
