"""A random world of the simulator: a machine, models, requests and a script, as kernel and oracle take it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.servers import Admission
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import Config, Machine, granule_bytes, memory, priced_models
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import KEPT_PAGES, Batch, Gpus, Host, Inst, Jobs, Option, Shape
from tests.harness.engines.sim.oracle import ModelSetup, Setup
from tests.workloads.asked import asked

NEVER = -math.inf
SECONDS = ("host0", "host1", "att0", "att1", "dec0", "dec1", "dec2", "pre0", "pre1", "pre2")  # columns of cost tables
KERNELS = np.linspace([0.5, 0.25, 0.25, 0.0], [0.125, 0.25, 0.5, 0.125], 5)  # of a layer, by points of the grid
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

    def begun(self, hears: frozenset[type]) -> Sim:
        """Return the simulator, which tells these, after the script's actions before the start."""
        sim = self.sim()
        for t, action in self.script:
            if t == NEVER:
                sim.do(action)
        sim.take(self.jobs)
        sim.begin(hears, oracle=False)
        return sim

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
    scales = 0.004, 2e-4, 0.002, 1e-4, 0.001, 2e-5, 2e-5, 1e-3, 1e-5, 1e-6
    for key, scale in zip(SECONDS, scales, strict=True):
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
    model, prompt = rng.integers(0, len(models), n), rng.integers(1, longest, n)
    return asked(models, np.cumsum(gaps), model, prompt, np.where(rng.random(n) < 0.15, 1, rng.integers(1, longest, n)))


def flat(cost: np.ndarray) -> Tables:
    """Return tables of costs alone: nothing grows with context, and a share of a GPU costs nothing."""
    zero, unit = np.zeros((len(cost), 2)), np.ones((len(cost), 2, 1))
    return Tables(cost, np.array([1, 2]), zero, zero, np.array([0.5, 1.0]), np.array([1.0]), unit, zero + 1, unit)


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


def on(inst: Inst) -> Gpus:
    assert not isinstance(inst.place, Host)
    return inst.place


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
