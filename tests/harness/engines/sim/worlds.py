"""Random small worlds for the simulator's kernel and its oracle: the same machine, workload and script for both.

Over 600 lines: the kinds of worlds are drawn from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np

from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.costs.servers import Admission
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import PIECE_BYTES, Config, Machine, Served, granule_bytes, memory, priced_models
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import KEPT_PAGES, Batch, Gpus, Host, Inst, Jobs, Option, Plan, Prefix, Shape
from tests.harness.engines.sim.oracle import ModelSetup, Setup

NEVER = -math.inf
KERNELS = np.linspace([0.5, 0.25, 0.25, 0.0], [0.125, 0.25, 0.5, 0.125], 5)  # of a layer, by points of the grid
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
SHAPE = Shape("tiny", 2, 64, 2, 2, 16, 128, 100, True, False, 4096)
HEARD: frozenset[type] = frozenset({Woke, Arrived, Finished, Prefilled, Preempted, TurnEnded, Load, Evict, Move})


@dataclass(frozen=True)
class World:
    """A machine and what is done on it."""

    config: Config
    machine: Machine
    options: Mapping[str, Option]
    jobs: Jobs
    script: Sequence[tuple[float, Action]]
    rota: Sequence[Sequence[Action]] = ()  # what follows a turn, or what else is answered
    answered: frozenset[type] = frozenset({TurnEnded})
    handoff: Mapping[Batch, Batch] = field(default_factory=dict)  # where a prefilled request goes on, with its KV
    end_s: float = math.inf
    far: Sequence[Batch] = ()  # of whose members a share has its KV attended on other GPUs
    far_share: float = 0.0

    def answer(self) -> Rota:
        return Rota(self)

    def sim(self) -> Sim:
        return Sim(self.config, self.options, self.machine)

    def setup(self) -> Setup:
        """Return the same for the oracle."""
        c, kinds = self.config, [self.machine.of(kind) for kind in self.config.kinds]
        models, ways, disk_ways = dict[str, ModelSetup](), {}, {}
        two = len({id(kind) for kind in kinds}) > 1
        nodes = tuple(int(kind is not kinds[0]) for kind in kinds) if two else ()
        rung = self.machine.ladder["host"]
        for k, m in enumerate(priced_models(c)):
            size = c.block_tokens * kv_token_bytes(m.shape, m.tp)
            foot = weight_bytes(m.shape, m.tp) + (c.process_bytes or 0) * (1 + (self.options.get("process") == "pair"))
            sizes = ModelSetup(k, foot, size, size, layers=m.shape.layers, max_tokens=m.shape.max_tokens)
            if self.options.get("kv") == "elastic":
                page = granule_bytes(c, m, True)
                reserve = KEPT_PAGES * page
                pages = size, page, max(1, page // size), reserve
                sizes = ModelSetup(k, foot + reserve, *pages, layers=m.shape.layers)
            usual = models.get(m.name, sizes)
            models[m.name] = usual._replace(cut={**usual.cut, m.tp: sizes})
            for place in permutations(range(c.gpus), m.tp):
                size, spec = weight_bytes(m.shape, m.tp), kinds[place[0]].spec
                parts = [(f"h2d{g}", size) for g in place]
                slow_s = [
                    rung.fixed_s + max(0.0, size / rung.bytes_s - s)
                    for s in (size / spec.h2d, max(size / spec.h2d, m.tp * size / spec.disk))
                ]
                ways[Inst(m.name, place), "host"] = (slow_s[0], parts)
                disk = f"disk{nodes[place[0]] if two else 0}"
                disk_ways[Inst(m.name, place), "host"] = (slow_s[1], [*parts, (disk, m.tp * size)])
        links: dict[str, float] = {"disk0": kinds[0].spec.disk, "disk1": kinds[-1].spec.disk}
        for g, spec in enumerate(kind.spec for kind in kinds):
            links |= {f"h2d{g}": spec.h2d, f"d2h{g}": spec.d2h, f"p2p{g}": spec.nvlink, f"net{g}": spec.net}
        text: Any = self.options
        order = sorted(c.models, key=lambda m: c.plan[m.name].rate_rps if c.plan else 0.0)
        return Setup(
            tables=self.machine.stacked,
            models=models,
            gpu_bytes=tuple(memory(c, kind.spec).gpu_bytes for kind in kinds),
            gpu_sms=tuple(kind.spec.sms for kind in kinds),
            gpu_rows=tuple(0 if kind is kinds[0] else len(kinds[0].tables.cost) for kind in kinds) if two else (),
            gpu_nodes=nodes,
            links=links,
            ways=ways,
            host_bytes=c.host_bytes,
            host_order={m.name: weight_bytes(m.shape) for m in order} if c.host_bytes is not None else {},
            disk_ways=disk_ways,
            block_tokens=c.block_tokens,
            batch_cap=c.batch_cap,
            chunk_tokens=c.chunk_tokens,
            prefill_tokens=c.prefill_tokens,
            piece_bytes=c.piece_bytes,
            watermark=c.watermark,
            admission=c.admission,
            sharing=text.get("sharing", "fluid"),
            co_run=c.scaled.get("co_run", 1.0),
            quantum_s=self.machine.quantum_s,
            switching=self.machine.switching,
            poll_s=self.machine.poll_s,
            pairs=text.get("process") == "pair",
            memory=text.get("memory", "real"),
            kv="paged" if text.get("kv") == "elastic" else text.get("kv", "paged"),
            preempt=text.get("preempt", "recompute"),
            sigma=c.noise,
            seed=c.seed,
            lookahead=self.machine.host.lookahead_steps,
            trip_s=self.machine.host.api_in_s + self.machine.host.api_out_s,
        )


class Rota:
    """A policy that answers events with a list's next entry, at most three times an instant; it hands prompts on."""

    def __init__(self, world: World) -> None:
        self.world, self.entries, self.hears, self.handoff = world, world.rota, world.answered, world.handoff
        self.next, self.now_s, self.left = 0, NEVER, 0

    def __call__(self, now_s: float, event: Event) -> Sequence[Action]:
        if isinstance(event, Prefilled) and event.batch in self.handoff:
            to = self.handoff[event.batch]
            return [Admit(event.rid, to), Move(event.rid, to.inst.place)]
        if isinstance(event, Prefilled) and event.batch in self.world.far:
            mine, gpus = on(event.batch.inst), self.world.config.gpus
            if event.rid * 0.6180339887 % 1 < self.world.far_share:
                return [Move(event.rid, tuple((g + event.rid) % gpus for g in mine), attend=True)]
        if type(event) not in self.hears or not self.entries or self.next > 200:  # no policy goes on for ever
            return ()
        if isinstance(event, Done) and (event.failed is not None or type(event.action) not in HEARD):
            return ()
        if now_s > self.now_s + 1e-9:
            self.now_s, self.left = now_s, 3
        self.left -= 1
        self.next += 1
        return self.entries[self.next % len(self.entries)] if self.left >= 0 else ()


def tables(rng: np.random.Generator, rows: int, *, heavy: float = 1.0) -> Tables:
    """Return costs with floors, knees, host time and demands that make co-runners slow each other."""
    cost = np.zeros(rows, COST)
    cost["serial"] = rng.integers(0, 2, rows)
    for key, scale in {
        "host0": 0.004,
        "host1": 2e-4,
        "att0": 0.002,
        "att1": 1e-4,
        "dec0": 0.001,
        "dec1": 2e-5,
        "dec2": 2e-5,
        "pre0": 1e-3,
        "pre1": 1e-5,
        "pre2": 1e-6,
    }.items():
        cost[key] = scale * rng.uniform(0.3, 2.0, rows)
    cost["wbytes"], cost["kbytes"] = rng.uniform(0.3, 2.0, rows) * heavy, rng.uniform(0, 2e-3, rows)
    cost["fl_tok"], cost["fl_area"] = rng.uniform(0.001, 0.1, rows) * heavy, rng.uniform(0, 1e-4, rows)
    cost["flops"], cost["hbm"], cost["pre_slow"], cost["dec_slow"] = 100.0, 100.0, 1.0, 1.0
    cost["layers"], cost["query_bytes"], cost["result_bytes"] = 2, 384.0, 128.0
    grid = np.array([1, 8, 32, 128, 512])
    rise = np.cumsum(rng.uniform(0.001, 0.01, (rows, 5)), axis=1)
    (moe,) = rng.spawn(1)  # draws of its own: what else a world has is as it was before there were mixtures
    mixed = np.arange(rows) % 2 == 1  # every other model is a mixture of experts
    (met,) = rng.spawn(1)  # and so it was before kernels took turns
    cost["pre_fill"], cost["dec_fill"] = met.uniform(0.7, 1.0, rows), met.choice([0.3, 0.8, 1.0], rows)
    cost["passes"], cost["apart"], cost["crowd"] = met.uniform(1, 3, rows), met.uniform(1, 1.5, rows), 1.2
    cost["few"], cost["many"] = met.choice([0, 4], rows), met.choice([4, 12, 30], rows)
    cost["equal"] = met.random() < 0.1
    (phased,) = rng.spawn(1)  # and before products went by phase
    cost["pre_x"] = phased.uniform(0.8, 1.5, rows)
    cost["xbytes"], cost["xmiss"] = mixed * moe.uniform(0.3, 4.0, rows) * heavy, moe.uniform(0.5, 0.99, rows)
    return Tables(
        cost,
        grid,
        rise,
        0.1 * rise,
        np.array([0.1, 0.5, 1.0]),
        np.array([1.0, 8.0, 64.0]),
        np.sort(rng.uniform(0.2, 1.0, (rows, 3, 3)), axis=1),
        np.sort(rng.uniform(0.1, 1.0, (rows, 3)), axis=1),
        KERNELS * np.ones((rows, 1, 1)),
    )


def admission(seed: int) -> Admission:
    """Draw what a prompt needs to be let in."""
    drawn: Sequence[Admission] = "prompt", "chunk", "output"
    return drawn[int(np.random.default_rng([seed, 2]).choice(3, p=[0.4, 0.4, 0.2]))]


def workload(rng: np.random.Generator, models: Sequence[str], n: int, rate: float, longest: int) -> Jobs:
    """Return Poisson arrivals, some at equal stamps, of short and one-token requests."""
    gaps = rng.exponential(1 / rate, n)
    gaps[rng.random(n) < 0.1] = 0.0
    inf = np.full(n, math.inf)
    return Jobs(
        tuple(models),
        np.cumsum(gaps),
        rng.integers(0, len(models), n).astype(np.int32),
        rng.integers(1, longest, n).astype(np.int32),
        np.where(rng.random(n) < 0.15, 1, rng.integers(1, longest, n)).astype(np.int32),
        inf,
        inf,
    )


def world(seed: int) -> World:
    """Return one world of many kinds: memory pressure, chunks, partitions, phases, loads, evictions, moves, drops."""
    if seed >= HOSTED:
        return hosted(seed)
    if seed >= RESERVED:
        return reserved(seed)
    if seed >= MIXED:
        return mixed(seed)
    if seed >= MEASURED:
        return measured(seed)
    if seed >= BESIDE:
        return beside(seed)
    if seed >= LENT:
        return lent(seed)
    if seed >= LAYERED:
        return layered(seed)
    if seed >= SHARED:
        return shared(seed)
    if seed >= SLICED:
        return sliced(seed)
    if seed >= TURNED:
        return turned(seed) if seed < WILD else wild(seed, cut=seed >= CUT)
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


def script(
    rng: np.random.Generator, config: Config, jobs: Jobs, block: int, foot: int, room: int
) -> list[tuple[float, Action]]:
    """Return the actions: a start that serves everybody, then disturbances."""
    start: list[tuple[float, Action]] = []
    batches: dict[str, list[Batch]] = {}
    for m in config.models:
        place = (0, 1) if m.tp == 2 else (int(rng.integers(0, config.gpus)),)
        batch = Batch(Inst(m.name, place), int(rng.integers(0, 2)))
        batches[m.name] = [batch]
        fields: dict[str, Any] = {}
        if rng.random() < 0.3:
            fields["chunk_tokens"] = int(rng.choice([0, 4, 16]))
        if rng.random() < 0.3:
            fields["seqs"] = int(rng.integers(1, 5))
        if rng.random() < 0.3:
            fields["sms"] = int(rng.choice([10, 30, 50, 80]))
        start.append((NEVER, Load(batch.inst)))
        if rng.random() < 0.7:
            start.append((NEVER, Run(batch, **fields)))
        else:
            start += [(NEVER, Run(batch, "prefill", **fields)), (NEVER, Run(batch, "decode", **fields))]
        if rng.random() < 0.3:
            start += [(NEVER, Limit(m.name, g, int(block * rng.integers(5, 60)))) for g in place]
        start.append((NEVER, Admit(m.name, batch)))
    later: list[tuple[float, Action]] = []
    homes: list[Gpus | Host] = [(0,), (1,), Host()]
    span = float(jobs.arrival_s[-1]) + 1.0
    for _ in range(int(rng.integers(0, 8))):
        m = config.models[int(rng.integers(0, len(config.models)))]
        batch, t = batches[m.name][0], float(rng.uniform(0, span))
        r = int(rng.integers(0, len(jobs)))
        mine = config.models[int(jobs.model[r])]
        what = int(rng.integers(0, 9))
        if what == 0:
            later.append((t, Drop(r)))
        elif what == 1:
            later += [
                (t, Evict(batch.inst, bool(rng.random() < 0.5))),
                (t + float(rng.uniform(0, 2)), Load(batch.inst)),
            ]
        elif what == 2:
            later.append((t, Run(batch, str(rng.choice(["mixed", "prefill", "decode"])), seqs=int(rng.integers(1, 6)))))  # type: ignore[arg-type]
        elif what == 3:
            phase = str(rng.choice(["mixed", "prefill", "decode"]))
            later += [(t, Run(batch, phase, steps=0)), (t + 0.5, Run(batch))]  # type: ignore[arg-type]
        elif what == 4:
            later += [(t, Limit(m.name, g, int(block * rng.integers(1, 80)))) for g in batch.inst.place]  # type: ignore[union-attr]
        elif what == 5:
            later.append((t, Run(batch, chunk_tokens=int(rng.choice([0, 8])), sms=int(rng.choice([20, 60])))))
        elif what == 6:
            later.append((t, Move(r, None)))
        elif what == 7:
            later.append((t, Admit(r, Batch(batches[mine.name][0].inst, 1))))
        elif mine.tp == 1 and config.gpus == 2:
            later.append((t, Move(r, homes[int(rng.integers(0, 3))])))
    last: list[tuple[float, Action]] = [(span + 5.0, Run(b)) for bs in batches.values() for b in bs]
    last += [(span + 5.0, Run(Batch(b.inst, 1))) for bs in batches.values() for b in bs if b.tag != 1]
    return start + sorted(later + last, key=lambda x: x[0])


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
    loop = replace(
        jobs,
        arrival_s=np.where(after < 0, jobs.arrival_s, math.inf),
        after=after,
        think_s=think_s,
    )
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
    for name in ("host0", "host1", "att0", "att1", "dec0", "dec1", "dec2", "pre0", "pre1", "pre2"):
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
    return replace(
        w, config=config, machine=machine, script=script, rota=rota, handoff=handoff, end_s=min(w.end_s, 60.0)
    )


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


def on(inst: Inst) -> Gpus:
    assert not isinstance(inst.place, Host)
    return inst.place


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


def even(t: Tables) -> Tables:
    """Return the same costs as multiples of 2**-12, and speeds as multiples of 1/8: their sums are exact."""
    cost = t.cost.copy()
    for name in ("host0", "host1", "att0", "att1", "dec0", "dec1", "dec2", "pre0", "pre1"):
        cost[name] = np.ceil(cost[name] * 4096) / 4096
    cost["pre2"], cost["pre_x"] = 0.0, np.ceil(cost["pre_x"])
    grid = np.array([1, 2, 34, 546])
    rise = np.array([4.0, 5.0, 13.0, 141.0]) / 4096 * np.ones((len(cost), 1))
    ups = [np.ceil(x * 4) / 4 for x in (t.dec_rate, t.pre_rate)]
    kernels = KERNELS[:4] * np.ones((len(cost), 1, 1))
    edges = np.array([0.25, 0.5, 1.0]), np.array([1.0, 9.0, 73.0])
    return Tables(cost, grid, rise, 0.5 * rise, edges[0], edges[1], ups[0], ups[1], kernels)


def drive(
    world: World, end_s: float = math.inf, look: Callable[[Sim], None] = lambda sim: None
) -> tuple[Sim, list[tuple[float, Event]]]:
    """Run a world on the simulator: the script's actions come after the arrivals of their instant, as timers do.

    `look` is called before each of them that comes after the start.
    """
    end_s = min(end_s, world.end_s)
    sim, told = world.sim(), list[tuple[float, Event]]()
    view, answer = sim.view(), world.answer()

    def do(action: Action) -> None:
        if (refusal := sim.do(action)) is not None:
            told.append((view.now_s, refusal))

    for t, action in world.script:
        if t == NEVER:
            do(action)
    sim.take(world.jobs)
    sim.begin(HEARD, oracle=False, end_s=end_s)

    def hear(until: float) -> None:
        while (event := sim.poll(until)) is not None:
            told.append((view.now_s, event))
            for action in answer(view.now_s, event):
                do(action)

    for t, action in world.script:
        if t > NEVER:
            hear(t)
            if t > end_s:
                break
            look(sim)
            do(action)
    else:
        hear(math.inf)
    sim.finish()
    return sim, told
