"""Prism as its authors released it: memory balanced by requests, idle models evicted, requests sorted by deadline.

Yu et al., "Prism: Unleashing GPU Sharing for Cost-Efficient Multi-LLM Serving"; released code Multi-LLM/prism-research
595ec1f, python/sglang/multi_model/scheduling, where the files below are. It has neither of the paper's two algorithms.

    tick      every `interval_s` (controller_global.py, SCHEDULE_INTERVAL); models leave and move only then
    evict     a model that was idle for `idle_s` leaves, whether its memory is needed or not (policy/simple_global.py,
              _check_idle_instance_eviction, MODEL_IDLE_THRESHOLD)
    balance   memory per request: what a GPU has beside its models, over the mean number of their requests in the last
              30 s (_calculate_memory_per_request, ModelRequestTracker); a pair of GPUs is unstable if one has more
              than 15 times as much as the other (_count_unstable_pairs, MEMORY_PER_REQUEST_RATIO_THRESHOLD)
    migrate   one model at a tick, those with few requests first, if that leaves fewer pairs unstable
              (_find_optimal_migrations_by_memory) and its target has a free worker (gen_actions, `valid_migrations`);
              it leaves its GPU before it is loaded on the other one
    activate  a model that is out comes back at the tick after its first request (_find_inactive_models_with_requests)
    worker    one of a GPU's `workers` pooled engines (README.md, --workers-per-gpu); a model needs one
              (gpu/worker_pool.py, handle_activate_model)
    admit     in the order of arrival + SLO - estimated seconds of prefill; a request is admitted while at most 10
              others of its model wait in its engine (gpu/request_queue.py, RequestWrapper, MAX_QUEUE_LEN); free memory
              does not matter (admission_control, net_available)

Models that share GPUs have one parallel configuration (an author in prism-research's issue 4). So sets with several
tensor-parallel degrees are refused: any model may come to any GPU.

What differs. The release starts from a file of placements; here models start by falling demand, each where demand over
free memory is lowest. A model also comes back where that is lowest, and models come back in order of their first
requests. The release takes models by their share of late requests; of the GPUs within 5 GB of the emptiest, it takes
the one whose requests have most time left (_place_inactive_model). Here a model that has waited `idle_s` for room
evicts busy models, which drain; the release lets it wait. A model is idle since its last request ended, not since it
arrived. At a tick, models come back before one moves, not after. A GPU needs room for a model's longest request beside
its weights. The release moves a model only from the GPU with less memory per request to the other one of an unstable
pair. It moves no model without requests and none that is alone, and a pair without any request is unstable. Here any
move is allowed that helps, tensor-parallel models stay, and a pair without requests is stable. Requests wait outside
until weights are loaded. Those in a model's engine end there when it leaves.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from harness.policy.actions import Action, Admit, Evict, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import footprint, groups, one_request
from harness.policy.types import Batch, Cluster, Gpus, Infeasible, Inst, Model, Option, Request
from harness.policy.view import View

DECISION_S = 12e-6  # as prism.py, whose events these are

BACKEND_MOST = 10  # gpu/request_queue.py, MAX_QUEUE_LEN
PREFILL_S = (0.2, 2.0)  # gpu/request_queue.py, bounds of the guess of a prefill's seconds
PREFILL_TOKENS = 2048.0  # gpu/request_queue.py: tokens a second of that guess
UNSTABLE = 15.0  # policy/simple_global.py, MEMORY_PER_REQUEST_RATIO_THRESHOLD
SMOOTHED = 6  # policy/simple_global.py, window_size_seconds = 30: ticks
DEMAND_S = 60.0  # ours: tokens are counted over this time
Entry = tuple[float, int, Request]  # by priority, then id


@dataclass(slots=True)
class Tenant:
    """State of a model in Prism's release."""

    name: str
    model: Model
    home: Gpus | None = None  # where its requests go; None: it is out
    queue: list[Entry] = field(default_factory=list)  # not let in yet
    waiting: set[int] = field(default_factory=set)  # let in and not prefilled
    live: int = 0  # let in and not finished
    since_s: float = -math.inf  # idle since
    flight: deque[int] = field(default_factory=lambda: deque(maxlen=SMOOTHED))  # requests at the last ticks
    demand: float = 0.0  # KV bytes a second over the TPOT SLO
    made: deque[tuple[float, int]] = field(default_factory=deque)  # (tick, tokens since the start) of the window
    places: dict[Gpus, None] = field(default_factory=dict)  # everywhere that it was loaded, ever


@dataclass(slots=True)
class PrismReleased:
    """A policy that balances memory per request at intervals, and admits requests on each GPU by deadline."""

    cluster: Cluster
    idle_s: float = number(50.0, 1, 600)  # policy/simple_global.py, MODEL_IDLE_THRESHOLD
    interval_s: float = number(5.0, 0.5, 60)  # controller_global.py, SCHEDULE_INTERVAL
    workers: int = number(4, 1, 64)  # README.md, --workers-per-gpu of the full run
    way: str = choice("pool", "parallel", "host", "sleep", "disk", "cold")
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Prefilled, Finished, Load, Evict}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "elastic"}, init=False)
    models: dict[str, Tenant] = field(init=False)
    copies: dict[tuple[str, Gpus], str] = field(default_factory=dict, init=False)  # loading, in, leaving
    out: dict[str, Gpus | None] = field(default_factory=dict, init=False)  # models to load, and where to if decided
    inside: dict[int, Tenant] = field(default_factory=dict, init=False)
    start_s: float = field(default=0.0, init=False)

    leaves_idle: ClassVar[str] = (
        'models come back at ticks alone: "SCHEDULE_INTERVAL = 5" and "time.sleep(5)" between calls of gen_actions '
        "(prism-research 595ec1f, multi_model/scheduling/controller_global.py, run_scheduling_loop)"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    def __post_init__(self) -> None:
        self.uses = frozenset({"Load", "Evict", "Run", "Admit", "Request.slo"}
                              | ({f"Load.way:{self.way}"} if self.way != "host" else set()))  # fmt: skip
        self.models = {m: Tenant(m, x) for m, x in self.cluster.models.items()}
        if len(degrees := sorted({x.tp for x in self.cluster.models.values()})) > 1:
            unlike = " and ".join(map(str, degrees))
            raise Infeasible(f"models that share GPUs have one tensor-parallel degree in Prism's release, not {unlike}")

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Answer an event: arrivals and ends of requests, loads and evictions that ended, and timers."""
        if isinstance(event, Woke):  # the most frequent first; patterns would take five times as long
            if event.key.startswith("gpu"):
                return self.let_in(int(event.key[4:]))
            then = self.start(view.now_s) if event.key == "start" else self.tick(view)
            return chain([Wake(view.now_s + self.interval_s, "tick")], then)
        if isinstance(event, Arrived):
            m = self.models[event.request.model]
            insort(m.queue, (priority(event.request), event.request.id, event.request))
            if m.home is None:
                self.out.setdefault(m.name, None)
            return self.ask(m, view)
        if isinstance(event, Prefilled):
            m = self.inside[event.rid]
            m.waiting.discard(event.rid)
            return self.ask(m, view)
        match event:
            case Finished(rid) if rid in self.inside:
                m = self.inside.pop(rid)
                m.waiting.discard(rid)
                m.live -= 1
                m.since_s = view.now_s
                return self.ask(m, view)
            case Done(Load(Inst(name, tuple(place))), None):
                self.copies[name, place] = "in"
                return [Wake(view.now_s, f"gpu {place[0]}")]
            case Done(Evict(Inst(name, tuple(place)))):
                self.copies.pop((name, place), None)
                return chain(self.load_all(view), (Wake(view.now_s, f"gpu {g}") for g in place))
        return ()

    # ------------------------------------------------------------ ticks

    def tick(self, view: View) -> Iterator[Action]:
        """Evict models that have been idle for long, load models that are out and have requests, and move one model."""
        for m in self.models.values():
            made = [view.batch(Batch(Inst(m.name, place))) for place in m.places]
            m.made.append((view.now_s, sum(s.prefilled_tokens + s.seq_steps for s in made)))
            while m.made[1][0] <= view.now_s - DEMAND_S:
                m.made.popleft()
            self.weigh(m, view.now_s)
        for m in self.active():
            if self.spare(m, view.now_s):
                yield from self.leave(m)
        yield from self.load_all(view)
        yield from self.balance(view.now_s)

    def balance(self, now_s: float) -> Iterator[Action]:
        """Move one model if that leaves fewer pairs of GPUs unstable; models with few requests are tried first."""
        homes = self.active()
        for m in homes:
            m.flight.append(m.live + len(m.queue))
        at = {m.name: m.home or () for m in homes}
        now = self.unstable(homes, at)
        for m in sorted((m for m in homes if m.model.tp == 1), key=lambda m: m.flight[-1]):
            for g in range(len(self.cluster.gpus)):
                if self.unstable(homes, at | {m.name: (g,)}) < now:
                    if (m.name, (g,)) not in self.copies and self.victims(m, g, now_s) is not None:
                        yield from self.leave(m)
                        self.out[m.name] = (g,)
                    return

    def unstable(self, homes: Sequence[Tenant], at: Mapping[str, Gpus]) -> int:
        """Return the number of unstable pairs of GPUs.

        A pair is unstable if one of its GPUs has over UNSTABLE times as much memory per request as the other GPU.
        """
        each = []
        for g, gpu in enumerate(self.cluster.gpus):
            here = [m for m in homes if g in at[m.name]]
            free = gpu.mem_bytes - sum(map(need, here))
            requests = sum(sum(m.flight) / len(m.flight) for m in here)
            each.append((free / requests if requests else math.inf) if free >= 0 else 0.0)
        return sum(a > UNSTABLE * b for a in each for b in each)

    def active(self) -> list[Tenant]:
        """Return the models that are loaded and not leaving."""
        return [m for m in self.models.values() if m.home and self.copies[m.name, m.home] == "in"]

    def spare(self, m: Tenant, now_s: float) -> bool:
        """Tell whether a model has been idle for `idle_s`, and so is to be evicted."""
        return not m.live and not m.queue and now_s - m.since_s >= self.idle_s

    # ------------------------------------------------------------ where models live

    def start(self, now_s: float) -> Iterator[Action]:
        """Load all models, those of highest forecast demand first, each where demand over free memory is lowest."""
        self.start_s = now_s
        for m in self.models.values():
            m.since_s = now_s
            m.made.append((now_s, 0))
            self.weigh(m, now_s)
        for m in sorted(self.models.values(), key=lambda m: -m.demand):
            places = [p for p in groups(self.cluster, m.model.tp) if all(self.free(g) >= need(m) for g in p)]
            if places:
                yield from self.bring(m, min(places, key=self.pressures), "in")

    def weigh(self, m: Tenant, now_s: float) -> None:
        """Estimate a model's demand: the KV bytes a second that it wrote, over its TPOT SLO.

        The last DEMAND_S seconds count. For the part of that time before the start, the forecast counts.
        """
        plan = self.cluster.plan[m.name]
        before = plan.rate_rps * max(0.0, DEMAND_S - (now_s - self.start_s))
        tokens = m.made[-1][1] - m.made[0][1] + before * (plan.prompt_tokens + plan.output_tokens)
        m.demand = tokens / DEMAND_S * m.model.kv_token_bytes / m.model.tpot_slo_s

    def free(self, g: int, *, soon: bool = False) -> int:
        """Return the bytes of GPU g beside weights; with `soon`, weights that are leaving do not count."""
        used = (footprint(self.models[name].model, elastic=True) for (name, place), state in self.copies.items()
                if g in place and not (soon and state == "leaving"))  # fmt: skip
        return self.cluster.gpus[g].mem_bytes - sum(used)

    def pressures(self, place: Gpus) -> list[float]:
        """Return demand over free memory of each GPU in a group, in descending order."""
        return sorted((sum(m.demand for m in self.at(g)) / max(self.free(g), 1) for g in place), reverse=True)

    def at(self, g: int) -> list[Tenant]:
        """Return the models that live on GPU g, or have a part there."""
        return [m for m in self.models.values() if m.home is not None and g in m.home]

    def bring(self, m: Tenant, place: Gpus, state: str = "loading") -> Iterator[Action]:
        """Load a model at a place that becomes its home, and open its lane there."""
        self.copies[m.name, place] = state
        self.out.pop(m.name, None)
        m.places[place] = None
        m.home = place
        yield Load(Inst(m.name, place), self.way)
        yield Run(Batch(Inst(m.name, place)))

    def leave(self, m: Tenant) -> Iterator[Action]:
        """Evict a model once its admitted requests have finished; its waiting requests go to its next home."""
        assert m.home is not None
        self.copies[m.name, m.home] = "leaving"
        yield Evict(Inst(m.name, m.home))
        m.home = None
        if m.queue:
            self.out[m.name] = None

    def load_all(self, view: View) -> Iterator[Action]:
        """Load the models that are out and have requests."""
        for name in list(self.out):
            if name in self.out:
                yield from self.load(self.models[name], view)

    def load(self, m: Tenant, view: View) -> Iterator[Action]:
        """Load a model that is out where the fewest models must leave for it.

        If some must leave first, it is loaded once they have left.
        """
        decided = self.out[m.name]
        self.weigh(m, view.now_s)
        best: tuple[tuple[float, ...], Gpus, list[Tenant]] | None = None
        for place in groups(self.cluster, m.model.tp) if decided is None else (decided,):
            victims = [self.victims(m, g, view.now_s) for g in place]
            if (m.name, place) in self.copies or None in victims:
                continue
            gone = list({v.name: v for some in victims for v in some or ()}.values())
            full = sum(view.free_bytes(g) < need(m) for g in place)
            key = len(gone), full, self.pressures(place)[0]
            if best is None or key < best[0]:
                best = key, place, gone
        if best is None:
            self.out[m.name] = None  # if not at the place decided, it is loaded anywhere else
            return
        for v in best[2]:
            yield from self.leave(v)
        if all(self.free(g) >= need(m) for g in best[1]):  # otherwise it comes once they have left
            yield from self.bring(m, best[1])

    def victims(self, m: Tenant, g: int, now_s: float) -> list[Tenant] | None:
        """Choose models to evict from GPU g so that model m has room there; None if no choice is enough.

        It is None too if all workers of the GPU are in use.
        """
        if sum(g in place for _, place in self.copies) >= self.workers:
            return None
        here = [v for v in self.active() if v.home and g in v.home]
        long = sorted((v for v in here if self.spare(v, now_s)), key=lambda v: -v.model.ttft_slo_s)
        busy = sorted((v for v in here if v.live or v.queue), key=lambda v: v.live)
        starves = m.home is None and m.queue and now_s - m.queue[0][2].arrival_s > self.idle_s
        evicted, lacks = [], need(m) - self.free(g, soon=True)
        for v in [*long, *(busy if starves else [])]:
            if lacks <= 0:
                break
            evicted.append(v)
            lacks -= footprint(v.model, elastic=True)
        return evicted if lacks <= 0 else None

    # ------------------------------------------------------------ who is let in

    def ask(self, m: Tenant, view: View) -> Sequence[Action]:
        """Wake the GPU of a model that has waiting requests, so that it admits some.

        The GPU wakes after all other events of the instant.
        """
        if m.home and m.queue and len(m.waiting) <= BACKEND_MOST:
            return [Wake(view.now_s, f"gpu {m.home[0]}")]
        return ()

    def let_in(self, g: int) -> Iterator[Action]:
        """Admit requests to the engines of GPU g; at most BACKEND_MOST others may wait in an engine before each."""
        here = [m for m in self.active() if m.home and m.home[0] == g]
        for e in sorted(e for m in here for e in m.queue[: max(0, BACKEND_MOST + 1 - len(m.waiting))]):
            r = e[2]
            m = self.models[r.model]
            assert m.home is not None
            m.queue.remove(e)
            self.inside[r.id] = m
            m.waiting.add(r.id)
            m.live += 1
            yield Admit(r.id, Batch(Inst(m.name, m.home)))


def need(m: Tenant) -> int:
    """Return the bytes that a GPU must have for a model: weights, mapped KV pages, and one longest request."""
    return footprint(m.model, elastic=True) + one_request(m.model)


def priority(r: Request) -> float:
    """Return a request's deadline (arrival + TTFT SLO) minus an estimate of the seconds of its prefill."""
    guess_s = min(max(r.prompt_tokens / PREFILL_TOKENS, PREFILL_S[0]), PREFILL_S[1])
    return r.arrival_s + r.ttft_slo_s - guess_s
