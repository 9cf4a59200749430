"""Random worlds by seed: from each of the numbers below on, worlds of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import PIECE_BYTES, Config, Machine, Served
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Move, Run
from harness.policy.types import KEPT_PAGES, Batch, Gpus, Host, Inst, Option, Plan, Prefix
from tests.harness.engines.sim.wild import wild
from tests.harness.engines.sim.world import NEVER, SECONDS, SHAPE, World, admission, on, script, tables, workload

TURNED = 1_000_000  # worlds from here on run in turns
WILD = 2_000_000  # and from here on anything happens at any time
CUT = 3_000_000  # and from here on models are on one, two and four GPUs at a time
SLICED = 4_000_000  # and from here on processes take turns on a GPU, in worlds of all these kinds
SHARED = 5_000_000  # and from here on prompts begin alike, in all of the worlds before
LAYERED = 6_000_000  # and from here on prefills run in slices of layers, in all of the worlds before
LENT = 7_000_000  # and from here on KV is attended on other GPUs, in worlds of all the kinds before slices of layers
BESIDE = 8_000_000  # and from here on steps disturb those beside them, in worlds of all the kinds before
MEASURED = 9_000_000  # and from here on cost tables say what a step asks for, in worlds of all the kinds before
MIXED = 10_000_000  # and from here on GPUs are of two kinds, in worlds of whole prompts, turns, anything and the like
RESERVED = 11_000_000  # and from here on KV is one chunk a request, in worlds of all the kinds before
HOSTED = 12_000_000  # and from here on hosts hold some of the weights, in worlds of whole prompts, turns and the like


def world(seed: int) -> World:
    """Return one world of many kinds: memory pressure, chunks, partitions, phases, loads, evictions, moves, drops."""
    for first, kind in KINDS.items():
        if seed >= first:
            return kind(seed)
    rng = np.random.default_rng(seed)
    gpus = int(rng.integers(1, 3))
    served = tuple(
        Served(f"m{k}", SHAPE, 2 if gpus == 2 and rng.random() < 0.2 else 1) for k in range(int(rng.integers(1, 4)))
    )
    block = 4 * kv_token_bytes(SHAPE, 1)
    foot = weight_bytes(SHAPE) + 1000
    tight = rng.random() < 0.6
    paging = np.random.default_rng([seed, 1])
    elastic = paging.random() < 0.25
    buffer_bytes = block * int(paging.choice([1, 2, 4])) // SHAPE.layers  # pages of 2, 4 or 8 blocks
    extra = KEPT_PAGES * SHAPE.layers * 2 * buffer_bytes if elastic else 0
    mem = len(served) * (foot + extra) + block * int(rng.integers(20, 60) if tight else 4000)
    spec = GpuSpec(
        "test", "test", mem, 100, 2, 1.0, 1.0, foot * 4.0, foot * 3.0, foot * 10.0, foot * 1.0, foot * 1.0, 1 << 50
    )
    priced = Machine(
        tables(rng, len(served), heavy=float(rng.choice([0.1, 1.0, 4.0]))),
        spec,
        {"host": Way(float(rng.choice([0.0, 0.25])), "pcie")},
        HostProfile(0.0, 0.0, 0.0, 0.0, False, 1.0, 1.0, lookahead_steps=seed % 2),
    )
    config = Config(
        served,
        gpus=gpus,
        block_tokens=4,
        batch_cap=int(rng.choice([2, 4, 16])),
        chunk_tokens=int(rng.choice([0, 8, 32])),
        prefill_tokens=64,
        piece_bytes=foot // 7 if seed % 2 else PIECE_BYTES,
        watermark=float(rng.choice([0.0, 0.05])),
        admission=admission(seed),
        mem_fraction=1.0,
        process_bytes=1000,
        buffer_bytes=buffer_bytes,
        noise=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(0, 1000)),
        token_times=True,
    )
    options: dict[str, Option] = {
        "kv": "elastic" if elastic else "paged",
        "sharing": str(rng.choice(["fluid", "fluid", "none"])),
        "memory": "unlimited" if rng.random() < 0.1 else "real",
        "preempt": str(rng.choice(["recompute", "swap"])),
    }
    n = int(rng.integers(5, 40))
    jobs = workload(rng, [m.name for m in served], n, float(rng.choice([2.0, 20.0, 100.0])), int(rng.choice([12, 60])))
    return World(config, priced, options, jobs, script(rng, config, jobs, block, foot, block * 60))


def looped(seed: int) -> World:
    """Return the same world, most of whose requests are sent by clients that had an end."""
    w, rng = world(seed), np.random.default_rng([seed, 3])
    jobs, n = w.jobs, len(w.jobs)
    opened = int(rng.integers(1, max(2, n // 3)))
    after = np.full(n, -1, np.int32)
    free = list(range(opened))  # who has no successor yet
    for r in range(opened, n):
        after[r] = free.pop(int(rng.integers(0, len(free))))
        free.append(r)
    think_s = rng.choice([0.0, 0.125, 0.5], n) * (1.0 if seed % 3 == 0 else rng.uniform(0.5, 1.5, n))
    loop = replace(jobs, arrival_s=np.where(after < 0, jobs.arrival_s, math.inf), after=after, think_s=think_s)
    host = w.machine.host._replace(api_out_s=float(rng.choice([0.0, 0.0625])))
    return replace(w, jobs=loop, machine=w.machine._replace(host=host), end_s=min(w.end_s, 60.0))


def sliced(seed: int) -> World:
    """Return another world, in which processes take turns on a GPU: one an instance, or one for each of its lanes."""
    k, rng = seed - SLICED, np.random.default_rng(seed)
    w = world(k + (0, TURNED, WILD, CUT)[k % 4])
    options = {**w.options, "sharing": "turns", "process": str(rng.choice(["model", "pair"]))}
    spec = w.machine.spec  # a second process an instance has room of its own
    spec = spec._replace(mem_bytes=spec.mem_bytes + len(w.config.models) * (w.config.process_bytes or 0))
    machine = w.machine._replace(spec=spec, quantum_s=float(rng.choice([0.0, 0.003, 0.02])), switching=seed % 2 / 32)
    return replace(w, options=options, machine=machine, end_s=min(w.end_s, 60.0))


def shared(seed: int) -> World:
    """Return a world most of whose prompts begin as an earlier one of their model does, for as long as a draw says."""
    n, rng = seed - SHARED, np.random.default_rng(seed)
    w = world((0, TURNED, WILD, CUT)[n % 4] + n // 4)
    tokens = w.config.block_tokens * int(rng.choice([1, 2, 4]))
    earlier: dict[int, list[list[int]]] = {}
    rows, fresh = [list[int]()], 0
    for model, prompt in zip(w.jobs.model.tolist(), w.jobs.prompt_tokens.tolist(), strict=True):
        before = earlier.setdefault(model, [[]])
        like = before[-int(rng.integers(1, min(len(before), 4) + 1))]
        kept = like[: int(rng.integers(0, len(like) + 2))][: prompt // tokens] if rng.random() < 0.9 else []
        prompt_blocks = kept + list(range(fresh, fresh + prompt // tokens - len(kept)))
        fresh += len(prompt_blocks)
        rows.append(prompt_blocks if rng.random() < 0.9 else [])
        before.append(prompt_blocks)
    prefix = Prefix(tokens, np.cumsum([len(row) for row in rows]), np.array([i for row in rows for i in row], np.int64))
    return replace(w, jobs=replace(w.jobs, prefix=prefix), end_s=min(w.end_s, 60.0))


def layered(seed: int) -> World:
    """Return a world of models with eight layers, most of whose prefills run in slices beside a lane for decodes."""
    k, rng = seed - LAYERED, np.random.default_rng([seed, 5])
    w = world((0, TURNED, WILD, CUT, SLICED, SHARED)[k % 6] + k // 6)

    def orders(action: Action) -> list[Action]:
        """Return an order in whose lane a prefill is sliced; of one for both phases, mostly two."""
        if not isinstance(action, Run) or action.steps == 0:
            return [action]
        some = int(rng.choice([1, 2, 3, 5, 7, 8, 20])) if rng.random() < 0.8 else None
        if action.phase == "mixed" and rng.random() < 0.8:
            sms = int(rng.choice([20, 50, 80])) if rng.random() < 0.4 else action.sms
            return [replace(action, phase="prefill", slice_layers=some, sms=sms), replace(action, phase="decode")]
        return [replace(action, slice_layers=some) if action.phase == "prefill" else action]

    script = [(t, order) for t, action in w.script for order in orders(action)]
    rota = [[order for action in entry for order in orders(action)] for entry in w.rota]
    shapes = [m.shape._replace(layers=8, head_dim=4, ffn=32, vocab=94) for m in w.config.models]  # as many bytes
    models = tuple(m._replace(shape=shape) for m, shape in zip(w.config.models, shapes, strict=True))
    config = replace(w.config, models=models, buffer_bytes=(w.config.buffer_bytes or 0) // 4)
    return replace(w, config=config, script=script, rota=rota, end_s=min(w.end_s, 60.0))


def lent(seed: int) -> World:
    """Return a world in which KV moves to other GPUs to be attended there; orders cut kernels or leave them whole."""
    n, rng = seed - LENT, np.random.default_rng(seed)
    kind, by = ((WILD, 7), (CUT, 7), (SLICED + 2, 28), (SHARED + 2, 28))[n % 4]
    w = next(w for k in range(n, n + 1_000_000, 1_000) if (w := world(kind + by * k)).config.gpus > 1)
    gpus = w.config.gpus

    def attended(action: Action) -> list[Action]:
        """Return the same, and after an Admit or a Move sometimes KV that stays elsewhere."""
        match action:
            case Run() if action.steps != 0 and rng.random() < 0.4:
                return [replace(action, op_s=float(rng.choice([0.0005, 0.002, 0.01, math.inf])))]
            case Move(who, tuple() as to) if rng.random() < 0.8:
                return [Move(who, to, attend=True)]
            case Admit(int() as r, batch) if rng.random() < 0.8:
                away = [g for g in range(gpus) if g not in on(batch.inst)] or [0]
                to = tuple(int(g) for g in rng.permutation(away)[: len(on(batch.inst))])
                return [action, Move(r, to, attend=True)]
            case _:
                return [action]

    script = [(t, a) for t, action in w.script for a in attended(action)]
    rota = [[a for action in entry for a in attended(action)] for entry in w.rota]
    far = tuple(dict.fromkeys(a.batch for _, a in w.script if isinstance(a, Run)))
    machine = w.machine._replace(poll_s=float(rng.choice([0.0, 1e-5, 2e-4])))
    share = float(rng.choice([0.3, 0.7, 1.0]))
    if rng.random() < 0.4:  # little room where KV is attended
        block = w.config.block_tokens * kv_token_bytes(w.config.models[0].shape, 1)
        limits = [(m.name, g, int(rng.integers(3, 25)) * block) for m in w.config.models for g in range(gpus)]
        script = [*((NEVER, Limit(*limit)) for limit in limits if rng.random() < 0.5), *script]
    end_s = min(w.end_s, 60.0)
    return replace(w, machine=machine, script=script, rota=rota, end_s=end_s, far=far, far_share=share)


def beside(seed: int) -> World:
    """Return another world, in which lanes have few partitions to choose from: some share one, some all SMs."""
    n, rng = seed - BESIDE, np.random.default_rng(seed)
    w = world((0, TURNED, WILD, CUT, SHARED, LAYERED, LENT)[n % 7] + n // 7)

    def placed(action: Action) -> Action:
        sms = (None, 30, 30, 50)[int(rng.integers(0, 4))]
        return replace(action, sms=sms) if isinstance(action, Run) and action.steps != 0 else action

    script, rota = [(t, placed(a)) for t, a in w.script], [[placed(a) for a in entry] for entry in w.rota]
    return replace(w, script=script, rota=rota, end_s=min(w.end_s, 60.0))


def measured(seed: int) -> World:
    """Return another world, whose cost tables have a duty for prefills and one for decode steps, as measured whole.

    What others add to a step counts more or less than turns tell, by its phase, and scaled as a whole now and then.
    """
    n, rng = seed - MEASURED, np.random.default_rng(seed)
    w = world((0, TURNED, WILD, CUT, SLICED, SHARED, LAYERED, LENT, BESIDE)[n % 9] + n // 9)
    cost = w.machine.tables.cost.copy()
    for phase in ("pre", "dec"):
        cost[f"{phase}_duty"] = rng.choice([0.0, 0.25, 0.625, 1.0], len(cost))  # 0: as seconds of the GPU tell
        cost[f"{phase}_slow"] = rng.choice([0.0, 0.5, 1.0, 1.5, 3.0], len(cost))
    scaled = {**w.config.scaled, "co_run": float(rng.choice([1.0, 1.0, 0.5, 2.0]))}
    machine = w.machine._replace(tables=w.machine.tables._replace(cost=cost))
    return replace(w, config=replace(w.config, scaled=scaled), machine=machine, end_s=min(w.end_s, 60.0))


def mixed(seed: int) -> World:
    """Return a world of two kinds of GPU: other costs, memory, SMs and links, and no instance on both.

    A place on both keeps its first GPU, as does any place where models are not cut. KV moves to no host: each node has
    its own.
    """
    n, rng = seed - MIXED, np.random.default_rng(seed)
    kind = (0, TURNED, WILD, CUT, SHARED)[n % 5]
    w = next(w for k in range(n // 5, n + 1_000_000, 1_000) if (w := world(kind + k)).config.gpus > 1)
    few, cut = int(rng.integers(1, w.config.gpus)), bool(w.config.models[0].degrees)

    def within(place: Gpus) -> Gpus:
        return place if cut and len({g < few for g in place}) == 1 else place[:1]

    def again(x: Any) -> Any:
        """Return the same on places of one kind."""
        match x:
            case Inst(model, tuple() as place):
                return Inst(model, within(place))
            case Batch(inst, tag):
                return Batch(again(inst), tag)
            case Move(who, to):
                return replace(x, who=again(who), to=within(to) if isinstance(to, tuple) else None)
            case Load(inst) | Evict(inst):
                return replace(x, inst=again(inst))
            case Run(batch):
                return replace(x, batch=again(batch))
            case Admit(_, batch):
                return replace(x, batch=again(batch))
            case _:
                return x

    models = tuple(m if cut else m._replace(tp=1) for m in w.config.models)
    machine, t = w.machine, w.machine.tables
    cost, slower = t.cost.copy(), float(rng.choice([0.5, 2.0, 4.0]))  # powers of two: sums stay exact where they were
    for name in SECONDS:
        cost[name] *= slower
    cost["wbytes"], cost["fl_tok"] = cost["wbytes"] / 2, 2 * cost["fl_tok"]
    tables = t._replace(cost=cost, gemm=slower * t.gemm, head=slower * t.head)
    spec = machine.spec._replace(net=machine.spec.nvlink / 2)
    room, link = int(rng.choice([1, 1, 2])), float(rng.choice([0.5, 1.0, 2.0]))
    other = spec._replace(
        mem_bytes=room * spec.mem_bytes, sms=160, h2d=link * spec.h2d, d2h=spec.d2h / link, net=link * spec.net
    )
    machine = machine._replace(spec=spec, others={"l40s": machine._replace(spec=other, tables=tables)})
    config = replace(w.config, models=models, gpu=f"h100*{few}+l40s*{w.config.gpus - few}")
    handoff = {again(a): again(b) for a, b in w.handoff.items() if again(a) != again(b)}
    script, rota = [(t, again(a)) for t, a in w.script], [[again(a) for a in entry] for entry in w.rota]
    end_s = min(w.end_s, 60.0)
    return replace(w, config=config, machine=machine, script=script, rota=rota, handoff=handoff, end_s=end_s)


def reserved(seed: int) -> World:
    """Return another world, whose requests reserve one chunk of contiguous KV each when they are let in."""
    n, rng = seed - RESERVED, np.random.default_rng(seed)
    w = world((0, TURNED, WILD, CUT, SLICED, SHARED, LAYERED, LENT, BESIDE, MEASURED)[n % 10] + n // 10)
    most = int(rng.choice([8, 30, 64, 120]))  # tokens of a sequence
    models = tuple(m._replace(shape=m.shape._replace(max_tokens=most)) for m in w.config.models)
    options = {**w.options, "kv": str(rng.choice(["max", "pow2", "oracle"]))}
    return replace(w, config=replace(w.config, models=models), options=options, end_s=min(w.end_s, 60.0))


def hosted(seed: int) -> World:
    """Return another world, whose nodes' memory has room for some of the weights, and whose loader may be slow."""
    n, rng = seed - HOSTED, np.random.default_rng(seed)
    w = world((0, TURNED, WILD, CUT, MIXED)[n % 5] + n // 5)
    sizes = [weight_bytes(m.shape) for m in w.config.models]
    room = int(rng.choice([0, 1, 1.5, 2, len(sizes)]) * max(sizes))
    plan = {m.name: Plan(float(rng.random()), 10.0, 10.0, "test") for m in w.config.models}
    disk = float(rng.choice([0.3, 1.0, 8.0])) * max(sizes)

    def slower(machine: Machine) -> Machine:
        """Return the same with that disk, and another loader."""
        way = machine.ladder["host"]._replace(bytes_s=loader)
        spec = machine.spec._replace(disk=disk)
        return machine._replace(spec=spec, ladder={"host": way})

    loader = float(rng.choice([math.inf, 0.5 * max(sizes)]))
    machine = slower(w.machine)._replace(others={kind: slower(x) for kind, x in w.machine.others.items()})
    config = replace(w.config, host_bytes=room, plan=plan)
    return replace(w, config=config, machine=machine, end_s=min(w.end_s, 60.0))


def turned(seed: int) -> World:
    """Return a world whose lanes run in turns, one after the other, with switches of weights and KV between them."""
    w, rng = world(seed - TURNED), np.random.default_rng(seed)
    c, spec, homes = w.config, w.machine.spec, [Host(), None, (0,), (1,)]
    batches = list(dict.fromkeys(a.batch for _, a in w.script if isinstance(a, Run)))

    def turn(batch: Batch) -> Run:
        fields: dict[str, Any] = {}
        if rng.random() < 0.6:
            fields["for_s"] = float(rng.choice([0.0, 0.02, 0.1, 0.5])) * float(rng.uniform(0.5, 1.5))
        if not fields or rng.random() < 0.4:
            fields["steps"] = int(rng.choice([1, 2, 5, 30]))
        if rng.random() < 0.2:
            fields["seqs"] = int(rng.integers(1, 5))
        if rng.random() < 0.2:
            fields["sms"] = int(rng.choice([20, 60]))
        return Run(batch, str(rng.choice(["mixed", "prefill", "decode", "decode"])), **fields)  # type: ignore[arg-type]

    def some() -> Batch:
        return batches[int(rng.integers(0, len(batches)))]

    def switch() -> list[Action]:
        """Return the actions before a turn."""
        old, new, r = some(), some(), int(rng.integers(0, len(w.jobs)))
        what = int(rng.integers(0, 7))
        if what == 0 and old != new:
            return [Evict(old.inst, bool(rng.random() < 0.3)), Load(new.inst), turn(new)]
        if what == 1 and (c.gpus == 2 and c.models[int(w.jobs.model[r])].tp == 1):
            who = old if rng.random() < 0.5 and c.models[int(old.inst.model[1:])].tp == 1 else r
            return [Move(who, homes[int(rng.integers(0, 4))]), turn(new)]
        if what == 2:
            return [Run(old, str(rng.choice(["mixed", "prefill", "decode"])), steps=0), turn(new)]  # type: ignore[arg-type]
        if what == 3:  # a prefetch, and weights that the turn waits for
            both: list[Action] = [Evict(b.inst, drain=False) for b in (old, new)]
            return [*both, Load(old.inst), Load(new.inst), turn(new)]
        return [turn(new)]

    last_s = w.script[-1][0]
    script = [
        (t, turn(a.batch) if isinstance(a, Run) and a.steps is None and t < last_s and rng.random() < 0.7 else a)
        for t, a in w.script
    ]
    span = float(w.jobs.arrival_s[-1]) + 1.0
    script += [(t, a) for t in rng.uniform(0, span, int(rng.integers(2, 12))).tolist() for a in switch()]
    rota = [switch() for _ in range(int(rng.integers(0, 7)))]
    if len(c.models) > 1 and rng.random() < 0.4:  # not all weights fit at a time
        spec = spec._replace(mem_bytes=spec.mem_bytes - weight_bytes(SHAPE) - 1000)
    return replace(w, machine=w.machine._replace(spec=spec), script=sorted(script, key=lambda x: x[0]), rota=rota)


KINDS: dict[int, Callable[[int], World]] = {  # keys are first seeds, the last of them first
    HOSTED: hosted,
    RESERVED: reserved,
    MIXED: mixed,
    MEASURED: measured,
    BESIDE: beside,
    LENT: lent,
    LAYERED: layered,
    SHARED: shared,
    SLICED: sliced,
    CUT: partial(wild, cut=True),
    WILD: partial(wild, cut=False),
    TURNED: turned,
}
