"""Prism: GPU memory ballooning, models placed by pressure on KV memory, requests admitted by deadline.

Yu et al., "Prism: Unleashing GPU Sharing for Cost-Efficient Multi-LLM Serving", arXiv 2505.04021 v1; its v3 (OSDI 2026)
changes the numerator. Engines take KV pages on demand. The released code has other rules: prism_released.py.

    r_j, s_j   request rate of model j over the last `window_s`, its SLO         d_j   its weighted rate (`numerator`):
    w_j        its weights, and the KV pages that its engine keeps mapped        v1: r_j / s_j; osdi26: bytes / TPOT SLO
    KVPR_i     sum of d on GPU i over shared_kv_i, its memory beside weights     tau   least gain of a migration
    e_r        seconds of a prefill, p_r / c_r                                   a_r   an arrival; deadline a_r + s_r

Algorithm 1 runs every `interval_s`. A model that moves has a second copy until the first is drained. A model that is
out comes back on its next request, where the fewest models must leave for it; among equal places, where KVPR is lowest.
Models that were idle for `idle_s` leave first, those with lax SLOs before others. Algorithm 2 admits requests, in the
order of Moore and Hodgson, while the next step has room.

The paper leaves some points open. Chosen here: tau has no number: it is 0, plus `z` standard deviations of what Poisson
noise in the rates does to the two ratios. A GPU without room for the weights and one longest request is no candidate
(an overfull one has a negative ratio and would win). If no model was idle for long, any model without requests makes
room; for a model that has waited `idle_s`, a busy one does, once it is drained. `dropped` says what happens to requests
that Algorithm 2 drops. late: they go last. requeue: those that some order could still save are looked at again, and the
others wait until no request runs. drop: all are refused. `clock`: serial sums the prefills of a GPU, as Algorithm 2
does; batched sums those of each engine. `heads`: the number of requests that Algorithm 2 looks at. `chunk`: tokens of
an engine's step. `argmin`: over ratios before placing (as written) or after. `start`: alg1; or searched, the placement
with the least largest KVPR that holds all models with one longest request each, if there is one.

`moves`: copy loads a second copy first. deactivate evicts while it loads, where both copies have room, as the released
code does (scheduling/controller_global.py, execute_actions; scheduling/policy/simple_global.py,
_find_optimal_migrations_by_memory). exchange also lets two models change places, with second copies. If these have no
room, both models leave first, and their requests wait for others to end; this is done only if a request has waited for
`interval_s` anyway. `evict`: pressure, whenever memory is short; or out, only for a model that is out, never for a move
or for requests. Parts to switch off: `elastic` memory (false: the same engines under KV limits fixed by the forecast,
so that Algorithm 1 places as before), the `order` of requests, `placement`, `evict` (never), and the `way` of loading.
If homes are given, models start there, come back there, and never move. Preset `partitioned` is what is left of Prism
if engines take their KV memory when they start (kv=paged): all models are loaded from the start under limits fixed by
the forecast, and nothing moves or leaves. Algorithm 1 then decides once, and Algorithm 2 as always.

Over 600 lines: both algorithms, and each choice that the paper leaves open, on one page.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop, merge
from itertools import chain, islice
from typing import ClassVar, NamedTuple

from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import footprint, groups, one_request, searched, shares, spread
from harness.policy.types import GIB, Batch, Cluster, Gpu, Gpus, Infeasible, Inst, Model, Option, Request
from harness.policy.view import View

DECISION_S = 12e-6  # at most: 7 to 11e-6, heavy8 from 4 to 23 req/s; 2 shared x86-64 cores, CPython 3.11, 2026-11-29


class Demand(NamedTuple):
    """A model as Algorithm 1 sees it.

    `d`, `w` and `reserve` are those of each of its `tp` tensor-parallel parts.
    """

    name: str
    d: float
    w: float
    tp: int = 1
    home: Gpus | None = None
    reserve: float = 0.0


def alg1(
    models: Sequence[Demand], C: Sequence[float], nodes: Sequence[int], tau: float = 0.0, argmin: str = "before"
) -> dict[str, Gpus]:
    """Return the GPUs of each model by Algorithm 1; models that fit nowhere are left out.

    The parts of a model are on distinct GPUs of one node.
    """
    w_req_rate, shared_kv = [0.0] * len(C), list(C)
    placed: dict[str, Gpus] = {}
    for m in sorted(models, key=lambda m: -m.d):
        d, w = (m.d, m.w) if argmin == "after" else (0.0, 0.0)
        fits = [i for i in range(len(C)) if m.w + m.reserve <= shared_kv[i] and shared_kv[i] > w]
        r = {i: (w_req_rate[i] + d) / (shared_kv[i] - w) for i in fits}
        best: Gpus | None = None
        for node in dict.fromkeys(nodes[i] for i in fits):
            parts = sorted((i for i in fits if nodes[i] == node), key=r.__getitem__)[: m.tp]
            if len(parts) == m.tp and (best is None or r[parts[-1]] < max(r[i] for i in best)):
                best = tuple(sorted(parts))
        if best is None:
            continue
        stays = m.home is not None and all(i in r for i in m.home)
        if stays and max(r[i] for i in m.home or ()) - max(r[i] for i in best) <= tau:
            best = m.home or best
        placed[m.name] = best
        for i in best:
            w_req_rate[i] += m.d
            shared_kv[i] -= m.w
    return placed


def alg2(jobs: Iterable[tuple[float, float]], start_s: float = 0.0) -> list[int]:
    """Return the indices of a largest set of requests that can all be prefilled in time (Algorithm 2).

    Each job is (deadline, seconds of prefill); jobs are sorted by deadline. The rule is from Moore, "An n Job, One
    Machine Sequencing Algorithm for Minimizing the Number of Late Jobs", 1968: when a prefill would end too late, the
    longest prefill so far is dropped.
    """
    S: list[tuple[float, int]] = []  # a heap, the longest first
    current_time = start_s
    for k, (due, e) in enumerate(jobs):
        current_time += e
        if current_time > due:
            current_time += heappushpop(S, (-e, k))[0]
        else:
            heappush(S, (-e, k))
    return sorted([k for _, k in S])


class Entry(NamedTuple):
    """A waiting request; entries sort by priority, then by id."""

    priority: float
    id: int
    r: Request
    m: Tenant
    e: float  # seconds of its prefill, p_r / c_r


@dataclass(slots=True, eq=False)
class Tenant:
    """State of a model in Prism."""

    name: str
    model: Model
    c: float  # prefill speed, tokens a second
    w: int  # bytes: weights, and the KV pages that its engine keeps mapped
    need: int  # bytes that a GPU must have for it to be loaded: w, and one longest request
    home: Gpus | None = None  # where its requests go; None: it is out
    next: Gpus | None = None  # where a second copy is on its way
    d: float = 0.0
    var: float = 0.0  # variance of d's estimate
    queue: list[Entry] = field(default_factory=list)  # not let in yet
    late: deque[Entry] = field(default_factory=deque)  # not let in, and late in any order
    filling: int = 0  # prompt tokens let in and not prefilled
    live: int = 0  # requests let in and not finished
    since_s: float = -math.inf  # idle since
    seen: deque[float] = field(default_factory=deque)  # arrivals of the window
    places: list[Gpus] = field(default_factory=list)  # everywhere that it was loaded, ever
    made: deque[tuple[float, int]] = field(default_factory=deque)  # (tick, tokens since the start) of the window

    @property
    def idle(self) -> bool:
        """True if the model has no request, waiting or running."""
        return not (self.live or self.queue or self.late)


@dataclass(slots=True)
class Site:
    """The memory of a GPU beside weights, and the models that are on the GPU now."""

    shared_kv: int  # bytes beside weights
    leaving: int = 0  # bytes of weights that are on their way out
    models: list[Tenant] = field(default_factory=list)  # those that live on it, or have a part there
    serving: list[Tenant] = field(default_factory=list)  # those that take requests and have their first part on it


Ratio = tuple[float, float, int]  # the KVPR of a GPU, the variance of its estimate, the GPU


class Ratios:
    """The KVPR of all GPUs under a placement; after a move, only the GPUs that it concerns are computed again."""

    def __init__(self, gpus: Sequence[Gpu], models: Sequence[Tenant], at: Mapping[str, Gpus]) -> None:
        self.gpus, self.at = gpus, at
        self.models = {m.name: (k, m) for k, m in enumerate(models)}
        self.here: list[list[tuple[int, Tenant]]] = [[] for _ in gpus]  # by GPU, in order
        for each in self.models.values():
            for g in at.get(each[1].name, ()):
                self.here[g].append(each)
        self.ranked = sorted(map(self.ratio, range(len(gpus)), self.here), reverse=True)
        self.largest = self.ranked[0]

    def ratio(self, g: int, here: Sequence[tuple[int, Tenant]]) -> Ratio:
        """Return GPU g's KVPR with the models `here` on it, the variance of the estimate, and g."""
        shared_kv = max(self.gpus[g].mem_bytes - sum([m.w for _, m in here]), 1) / GIB
        return sum([m.d for _, m in here]) / shared_kv, sum([m.var for _, m in here]) / shared_kv**2, g

    def after(self, move: Mapping[str, Gpus]) -> Ratio:
        """Return the largest KVPR of a GPU after models moved to the places in `move`; () as a place means eviction."""
        concerned = dict.fromkeys(g for name, place in move.items() for g in (*self.at.get(name, ()), *place))
        ratios = list(islice((r for r in self.ranked if r[2] not in concerned), 1))
        for g in concerned:
            stay = [each for each in self.here[g] if each[1].name not in move]
            come = [self.models[name] for name, place in move.items() if g in place]
            ratios.append(self.ratio(g, sorted(stay + come)))
        return max(ratios)


@dataclass(slots=True)
class Prism:
    """A policy of two levels: Algorithm 1 places models on GPUs, and Algorithm 2 admits requests."""

    cluster: Cluster
    numerator: str = choice("osdi26", "v1")
    argmin: str = choice("before", "after")
    tau: float = number(0.0, 0, 10)  # in the units of KVPR: 1 / (s^2 GiB), osdi26: 1 / s^2
    z: float = number(4.07, 0, 5, tuned=True)
    idle_s: float = number(45.0, 1, 600)  # OSDI 2026, appendix A.4
    window_s: float = number(60.0, 5, 600)  # OSDI 2026, appendix A.4
    interval_s: float = number(5.0, 0.5, 60)  # released: scheduling/controller_global.py, SCHEDULE_INTERVAL
    dropped: str = choice("requeue", "late", tuned=True, undrawn=("drop",))  # no other system refuses requests
    clock: str = choice("serial", "batched", tuned=True)
    heads: int = number(12, 1, 1024, tuned=True)
    chunk: int = number(2048, 64, 8192)
    elastic: bool = True
    kv: str = choice("elastic", "paged")
    order: str = choice("moore-hodgson", "fcfs")
    placement: str = choice("kvpr", "fixed")
    start: str = choice("searched", "alg1", tuned=True)
    moves: str = choice("deactivate", "exchange", "copy", tuned=True)
    evict: str = choice("pressure", "out", tuned=True, undrawn=("never",))
    way: str = choice("parallel", "pool", "host", "sleep", "disk", "cold")
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Prefilled, Finished, Load, Evict}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    models: dict[str, Tenant] = field(init=False)
    copies: dict[tuple[str, Gpus], str] = field(default_factory=dict, init=False)  # loading, in, leaving
    out: dict[str, Gpus | None] = field(default_factory=dict, init=False)  # models to load, and where to if decided
    sites: list[Site] = field(default_factory=list, init=False)  # by GPU; empty until they are computed again
    inside: dict[int, Tenant] = field(default_factory=dict, init=False)
    prefilling: dict[int, int] = field(default_factory=dict, init=False)  # prompt tokens of requests let in
    short: set[int] = field(default_factory=set, init=False)  # GPUs on which a request waits for memory
    start_s: float = field(default=0.0, init=False)

    untuned: ClassVar[Mapping[str, Option]] = {  # what the paper leaves open, as it stood before it was tuned
        "z": 2.0, "dropped": "late", "clock": "serial", "heads": 64, "start": "alg1", "moves": "copy",
        "evict": "pressure",
    }  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "osdi26": {"numerator": "osdi26", **untuned},
        "v1": {"numerator": "v1", **untuned},
        "partitioned": {
            "kv": "paged", "elastic": False, "placement": "fixed", "evict": "never", "way": "host", "z": 1.15,
            "dropped": "late", "clock": "serial", "heads": 9, "start": "searched", "moves": "exchange",
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        profile, homes = self.cluster.profile, self.cluster.homes
        self.options = {"kv": self.kv}
        models = {m: x.at(len(homes[m])) if homes else x for m, x in self.cluster.models.items()}
        stays = self.placement == "fixed" and self.evict == "never"
        if self.kv == "paged" and (self.elastic or not stays):
            raise Infeasible("kv=paged takes elastic=false, placement=fixed and evict=never: its limits are fixed")
        self.uses = frozenset({"Load", "Evict", "Limit", "Run", "Admit", "Drop", "Request.slo", "Cluster.homes"}
                              | ({f"Load.way:{self.way}"} if self.way != "host" else set()))  # fmt: skip
        c = {m: self.chunk / profile.prefill_s(Inst(m, tuple(range(x.tp))), self.chunk) for m, x in models.items()}
        w = {m: footprint(x, elastic=self.kv == "elastic") for m, x in models.items()}
        self.models = {m: Tenant(m, x, c[m], w[m], w[m] + one_request(x)) for m, x in models.items()}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Answer an event: arrivals and ends of requests, loads and evictions that ended, and timers."""
        if isinstance(event, Woke):  # the most frequent first; patterns would take five times as long
            if event.key.startswith("gpu"):
                return self.let_in(int(event.key[4:]), view)
            then = self.begin(view.now_s) if event.key == "start" else self.tick(view)
            return chain([Wake(view.now_s + self.interval_s, "tick")], then)
        if isinstance(event, Arrived):
            return self.arrived(event.request, view)
        if isinstance(event, Prefilled):
            m = self.inside[event.rid]
            m.filling -= self.prefilling.pop(event.rid, 0)
            return [Wake(view.now_s, f"gpu {m.home[0]}")] if m.home and (m.queue or m.late) else ()
        if isinstance(event, Finished):
            return self.finished(event.rid, view) if event.rid in self.inside else ()
        match event:
            case Done(Load(Inst(name, tuple(place))), None):
                return self.loaded(self.models[name], place, view)
            case Done(Evict(Inst(name, tuple(place)))):
                self.copies.pop((name, place), None)
                self.sites.clear()
                return chain(self.load_all(view), (Wake(view.now_s, f"gpu {g}") for g in place))
        return ()

    # ------------------------------------------------------------ where models live

    def site(self, g: int) -> Site:
        """Return the `Site` of GPU g. All sites are computed again after a model was loaded, evicted or moved."""
        if not self.sites:
            self.sites += [Site(gpu.mem_bytes) for gpu in self.cluster.gpus]
            for (name, place), state in self.copies.items():
                for i in place:
                    self.sites[i].shared_kv -= self.models[name].w
                    self.sites[i].leaving += self.models[name].w if state == "leaving" else 0
            for m in self.models.values():
                for i in m.home or ():
                    self.sites[i].models.append(m)
                if m.home and self.copies[m.name, m.home] == "in":
                    self.sites[m.home[0]].serving.append(m)
        return self.sites[g]

    def weigh(self, m: Tenant, now_s: float) -> None:
        """Estimate a model's weighted rate d_j from the last `window_s` seconds.

        For the part of the window before the start, the forecast counts.
        """
        while m.seen and m.seen[0] < now_s - self.window_s:
            m.seen.popleft()
        plan = self.cluster.plan[m.name]
        before = plan.rate_rps * max(0.0, self.window_s - (now_s - self.start_s))
        n = len(m.seen) + before
        if self.numerator == "v1":
            m.d = n / self.window_s / m.model.ttft_slo_s
        else:
            tokens = m.made[-1][1] - m.made[0][1] + before * (plan.prompt_tokens + plan.output_tokens)
            m.d = tokens / self.window_s * m.model.kv_token_bytes / GIB / m.model.tpot_slo_s
        m.var = m.d * m.d / max(n, 1.0)  # of Poisson arrivals

    def place(self, models: Sequence[Tenant]) -> dict[str, Gpus]:
        """Return the GPUs that Algorithm 1 gives to models by their present demand, with all sizes in GiB."""
        demands = [Demand(m.name, m.d, m.w / GIB, m.model.tp, m.home, one_request(m.model) / GIB) for m in models]
        gpus = self.cluster.gpus
        return alg1(demands, [g.mem_bytes / GIB for g in gpus], [g.node for g in gpus], self.tau, self.argmin)

    def begin(self, now_s: float) -> Iterator[Action]:
        """Load every model that has a place at the start."""
        self.start_s = now_s
        models = list(self.models.values())
        for m in models:
            m.since_s = now_s
            m.made.append((now_s, 0))
            self.weigh(m, now_s)
        homes: Mapping[str, Gpus] = self.place(models)
        if self.cluster.homes:
            homes = spread(self.cluster, elastic=self.kv == "elastic")
        elif self.start == "searched":
            homes = searched(self.cluster, {m.name: m.d for m in models}, self.kv == "elastic", known=homes) or homes
        if self.kv == "paged" and (left := [m.name for m in models if m.name not in homes]):
            raise Infeasible(f"no place for {left[0]} beside the others, and nothing leaves")
        for name, place in homes.items():
            yield from self.bring(self.models[name], place, "in")
        yield from self.partition()

    def bring(self, m: Tenant, place: Gpus, state: str = "loading") -> Iterator[Action]:
        """Load a copy of a model at a place and open its lane.

        The place becomes its home or, if it still has another home, its next home.
        """
        self.copies[m.name, place] = state
        m.home, m.next = (place, None) if m.home is None else (m.home, place)
        self.sites.clear()
        self.out.pop(m.name, None)
        m.places += [] if place in m.places else [place]
        yield Load(Inst(m.name, place), self.way)
        yield Run(Batch(Inst(m.name, place)))

    def leave(self, m: Tenant) -> Iterator[Action]:
        """Evict a model from its home once the requests admitted there have finished.

        Its waiting requests go to its next home.
        """
        assert m.home is not None
        place, m.home, m.next = m.home, m.next, None
        self.copies[m.name, place] = "leaving"
        self.sites.clear()
        yield Evict(Inst(m.name, place))
        if m.home is None and (m.queue or m.late):
            self.out[m.name] = None

    def load_all(self, view: View) -> Iterator[Action]:
        """Load the models that are out and have requests."""
        for name in list(self.out):
            if name in self.out:
                yield from self.load(self.models[name], view)

    def load(self, m: Tenant, view: View) -> Iterator[Action]:
        """Load a model that is out where the fewest other models must leave for it.

        Among equal places, one with enough free memory comes first, then the one of lowest KVPR. If models must leave
        first, this model is loaded once they have left.
        """
        need, home = m.need, self.out[m.name] or self.cluster.homes.get(m.name)
        self.weigh(m, view.now_s)
        best: tuple[tuple[float, ...], Gpus, list[Tenant]] | None = None
        for place in groups(self.cluster, m.model.tp) if home is None else (home,):
            if (m.name, place) in self.copies:  # a copy is leaving there
                continue
            victims = [self.victims(m, g, need, view.now_s) for g in place]
            gone = list({v.name: v for some in victims for v in some or ()}.values())
            if None not in victims:
                full = sum(view.free_bytes(g) < need for g in place)
                kvpr = max(sum(x.d for x in self.site(g).models) / max(self.site(g).shared_kv, 1) for g in place)
                if best is None or (len(gone), full, kvpr) < best[0]:
                    best = (len(gone), full, kvpr), place, gone
        if best is None:
            self.out[m.name] = None  # if not at that home, it is loaded anywhere else
            return
        for v in best[2]:
            yield from self.leave(v)
        if all(self.site(g).shared_kv >= need for g in best[1]):  # otherwise it comes once they have left
            yield from self.bring(m, best[1])

    def victims(self, m: Tenant, g: int, need: int, now_s: float, *, hurry: bool = True) -> list[Tenant] | None:
        """Choose models to evict from GPU g so that model m has `need` bytes there; None if no choice is enough.

        `hurry` means that the model is out; otherwise it moves there. Models idle for `idle_s` leave first. Other idle
        models leave only if `hurry`, and busy ones only if a request of the model has waited for longer than `idle_s`.
        """
        site = self.site(g)
        here = [v for v in site.models if v.home and self.copies[v.name, v.home] == "in"]
        long = sorted((v for v in here if self.spare(v, now_s)), key=lambda v: -v.model.ttft_slo_s)
        rest = sorted((v for v in here if v.idle and v not in long), key=lambda v: v.since_s)
        busy = sorted((v for v in here if not v.idle), key=lambda v: v.live)
        starves = m.home is None and m.queue and now_s - m.queue[0].r.arrival_s > self.idle_s
        evicted, lacks = [], need - site.shared_kv - site.leaving
        for v in [*long, *(rest if hurry else []), *(busy if starves else [])]:
            if lacks <= 0 or self.evict == "never" or not (hurry or self.evict == "pressure"):
                break
            evicted.append(v)
            lacks -= v.w
        return evicted if lacks <= 0 else None

    def spare(self, m: Tenant, now_s: float) -> bool:
        """Tell whether a model has been idle for `idle_s`, so that it may be evicted."""
        return m.idle and now_s - m.since_s >= self.idle_s

    def loaded(self, m: Tenant, place: Gpus, view: View) -> Iterator[Action]:
        """Serve a model from the place where it has just been loaded; if that was its next home, leave the old one."""
        self.copies[m.name, place] = "in"
        self.sites.clear()
        if m.next == place:
            yield from self.leave(m)
        yield from self.partition()
        yield Wake(view.now_s, f"gpu {place[0]}")

    def tick(self, view: View) -> Iterator[Action]:
        """Run the global scheduler: estimate demands, load models that are out, and move models."""
        for m in self.models.values():
            made = [view.batch(Batch(Inst(m.name, place))) for place in m.places]
            m.made.append((view.now_s, sum(s.prefilled_tokens + s.seq_steps for s in made)))
            while m.made[1][0] <= view.now_s - self.window_s:
                m.made.popleft()
            self.weigh(m, view.now_s)
        for g in sorted({m.home[0] for m in self.models.values() if m.home and (m.queue or m.late)}):
            yield Wake(view.now_s, f"gpu {g}")
        yield from self.load_all(view)
        on_the_way = "loading" in self.copies.values() or any(self.out.values())
        if self.placement == "kvpr" and not self.cluster.homes and (self.moves == "copy" or not on_the_way):
            homes = [m for m in self.models.values() if m.home and self.copies[m.name, m.home] == "in"]
            at = {m.name: m.home or () for m in homes}
            yield from self.migrate(homes, at, view) if self.moves == "copy" else self.change(homes, at, view)

    def migrate(self, homes: Sequence[Tenant], at: dict[str, Gpus], view: View) -> Iterator[Action]:
        """Move models to their places by Algorithm 1, if there is room for a second copy.

        If there is none, models that have been idle for long are evicted first, if that makes room. Each move by itself
        must lower the largest KVPR by more than tau and the noise. For other moves of the placement may have to wait
        for room, and Algorithm 1 shuffles models of similar rates at each interval.
        """
        taken, ratios = dict.fromkeys(range(len(self.cluster.gpus)), 0), Ratios(self.cluster.gpus, homes, at)
        for name, place in self.place(homes).items():
            m = self.models[name]
            if m.home == place or m.next or (name, place) in self.copies:
                continue
            fits = all(min(self.site(g).shared_kv, view.free_bytes(g) - taken[g]) >= m.need for g in place)
            gone = [self.victims(m, g, m.need, view.now_s, hurry=False) for g in place]
            spare = {v.name: v for some in gone for v in some or () if not fits}
            move: dict[str, Gpus] = {**dict.fromkeys(spare, ()), name: place}
            if None in gone or not self.better(ratios.largest, ratios.after(move)):
                continue
            for v in spare.values():  # the move follows once they have left
                yield from self.leave(v)
            if fits:
                taken |= {g: taken[g] + m.need for g in place}
                yield from self.bring(m, place)
            at = at | (move if fits else dict.fromkeys(spare, ()))
            ratios = Ratios(self.cluster.gpus, homes, at)

    def better(self, now: Ratio, then: Ratio) -> bool:
        """Tell whether the largest KVPR falls by more than tau and the noise."""
        return now[0] - then[0] > self.tau + self.z * math.sqrt(now[1] + then[1])

    def change(self, homes: Sequence[Tenant], at: dict[str, Gpus], view: View) -> Iterator[Action]:
        """Make the best move: one model to its place by Algorithm 1, or two models exchanged.

        It must lower the largest KVPR by more than tau and the noise, and the move that lowers it most is made. One
        model of an exchange is on the GPU with the largest KVPR. A move that fits now comes before an exchange for
        which both models have to leave first.
        """
        ratios = Ratios(self.cluster.gpus, homes, at)
        *_, worst = ratios.largest
        free = [min(self.site(g).shared_kv, view.free_bytes(g)) for g in range(len(self.cluster.gpus))]
        moves = [{name: place} for name, place in self.place(homes).items()]
        swaps = [{m.name: at[x.name], x.name: at[m.name]} for m in homes if worst in at[m.name] for x in homes
                 if worst not in at[x.name] and self.exchanges(m, x) and self.exchanges(x, m)]  # fmt: skip
        fits = [move for move in moves + swaps if all(self.fits(name, place, free) for name, place in move.items())]
        held = [e.r.arrival_s for m in self.site(worst).models for e in chain(m.queue, m.late)] if swaps else []
        waits = view.now_s - min(held, default=math.inf) > self.interval_s
        move = self.lowest(ratios, fits) or self.lowest(ratios, swaps if waits else [])
        for name in move:
            yield from self.leave(self.models[name]) if move not in fits or self.moves == "deactivate" else ()
            yield from self.bring(self.models[name], move[name]) if move in fits else ()
        self.out.update({} if move in fits else move)

    def lowest(self, ratios: Ratios, moves: Iterable[dict[str, Gpus]]) -> dict[str, Gpus]:
        """Return the move after which the largest KVPR is lowest; empty if no move is `better` than none."""
        now, then = ratios.largest, [(ratios.after(move), move) for move in moves]
        return min([x for x in then if self.better(now, x[0])], key=lambda x: x[0], default=(now, {}))[1]

    def fits(self, name: str, place: Gpus, free: Sequence[int]) -> bool:
        """Tell whether a model has room at a place beside all copies that are there or still leaving."""
        return (name, place) not in self.copies and all(free[g] >= self.models[name].need for g in place)

    def exchanges(self, m: Tenant, x: Tenant) -> bool:
        """Tell whether model m may take the place of model x, and would have room there without x."""
        if self.moves != "exchange" or x.home is None or len(x.home) != m.model.tp:
            return False
        room = all(s.shared_kv + s.leaving + x.w >= m.need for s in map(self.site, x.home))
        return room and not {*x.home} & {*(m.home or ())} and (m.name, x.home) not in self.copies

    def partition(self) -> Iterator[Action]:
        """Set KV limits by the forecast; do nothing if memory is on demand (`elastic`).

        On each GPU, the memory beside weights and mapped KV pages is split among its models.
        """
        for g in range(len(self.cluster.gpus)) if not self.elastic else ():
            if here := self.site(g).models:
                floor = [float(one_request(m.model)) for m in here]
                weight = [self.cluster.plan[m.name].rate_rps * m.model.kv_token_bytes for m in here]
                for m, part in zip(here, shares(self.site(g).shared_kv, floor, weight), strict=True):
                    yield Limit(m.name, g, int(part))

    # ------------------------------------------------------------ who is let in

    def priority(self, r: Request) -> float:
        """Return the time by which waiting requests are sorted: the deadline or, with order=fcfs, the arrival."""
        return r.arrival_s + (r.ttft_slo_s if self.order == "moore-hodgson" else 0.0)

    def arrived(self, r: Request, view: View) -> Iterable[Action]:
        """Queue a request; then load its model if it is out, or else wake its GPU to admit requests.

        The GPU wakes after all other events of the instant, so that Algorithm 2 runs once for all of them.
        """
        m = self.models[r.model]
        m.seen.append(r.arrival_s)
        insort(m.queue, Entry(self.priority(r), r.id, r, m, r.prompt_tokens / m.c))
        if m.home is None:
            self.out.setdefault(m.name, None)
            return self.load(m, view)
        return [Wake(view.now_s, f"gpu {m.home[0]}")] if self.room(m, 1) else ()

    def finished(self, rid: int, view: View) -> Iterable[Action]:
        """Note that a request finished, and wake the GPUs and models that wait for memory."""
        m = self.inside.pop(rid)
        m.filling -= self.prefilling.pop(rid, 0)
        m.live -= 1
        m.since_s = view.now_s
        gpus = sorted(self.short)
        if m.home and not gpus and (m.queue or m.late) and self.room(m, 1):
            gpus = [m.home[0]]
        wakes = [Wake(view.now_s, f"gpu {g}") for g in gpus]
        return chain(wakes, self.load_all(view)) if self.out and m.idle else wakes

    def let_in(self, g: int, view: View) -> Iterator[Action]:
        """Admit requests to the engines of GPU g, in order, while their next steps and the memory have room."""
        here = self.site(g).serving
        open_ = [m for m in here if (m.queue or m.late) and self.room(m, 1)]
        self.short.discard(g)
        if not open_:
            return
        S, dropped = self.sequence(here, open_, view.now_s)
        if self.dropped == "drop":
            for e in dropped:
                self.take(e)
                yield Drop(e.id)
            dropped = []
        free, paged = dict[tuple[str, int], int](), self.kv == "paged"
        for e in chain(S, dropped):
            r, m = e.r, e.m
            if m not in open_ or not m.home:
                continue
            if not self.room(m, r.prompt_tokens):
                open_.remove(m)
                continue
            if self.order != "fcfs" and self.lacks(e, free, view) and any(x.live for x in ([m] if paged else here)):
                self.short.add(g)
                if paged:
                    open_.remove(m)
                    continue
                idle = [v for v in here if self.spare(v, view.now_s)]
                if idle and self.evict != "never":
                    yield from self.leave(max(idle, key=lambda v: v.model.ttft_slo_s))
                return
            self.take(e)
            self.inside[r.id], self.prefilling[r.id] = m, r.prompt_tokens
            m.filling += r.prompt_tokens
            m.live += 1
            yield Admit(r.id, Batch(Inst(m.name, m.home)))

    def room(self, m: Tenant, tokens: int) -> bool:
        """Tell whether the next step of a model's engine has room for a prompt, so that the prompt would not wait."""
        return self.order == "fcfs" or not m.filling or m.filling + tokens <= self.chunk

    def lacks(self, e: Entry, free: dict[tuple[str, int], int], view: View) -> bool:
        """Subtract a request's KV from the `free` memory, and tell whether less than a page is left."""
        owner = e.m.name if self.kv == "paged" else ""  # otherwise all models share the free memory
        keys = [(owner, i) for i in e.m.home or ()]
        for key in keys:
            if key not in free:
                free[key] = view.kv(*key).room_bytes if owner else view.free_bytes(key[1])
            free[key] -= (e.r.prompt_tokens + 1) * e.m.model.kv_token_bytes
        return min([free[key] for key in keys]) < e.m.model.page_bytes

    def take(self, e: Entry) -> None:
        """Remove a request from its model's queue."""
        if e.m.late and e.m.late[0] is e:
            e.m.late.popleft()
        else:
            e.m.queue.remove(e)

    def sequence(self, here: list[Tenant], open_: list[Tenant], now_s: float) -> tuple[list[Entry], Iterable[Entry]]:
        """Return the requests to admit, in order, and the requests that Algorithm 2 drops."""
        R = sorted([e for m in open_ for e in m.queue[: self.heads]])[: self.heads]
        if self.order == "fcfs":
            return R, []
        if self.clock == "serial":
            engines = [(R, now_s + sum([m.filling / m.c for m in here if m.filling]))]
        else:
            engines = [(m.queue[: bisect(m.queue, R[-1])], now_s + m.filling / m.c) for m in open_ if R]
        S = sorted([mine[k] for mine, start_s in engines for k in alg2([(e.priority, e.e) for e in mine], start_s)])
        dropped, on_time = [], {e.id for e in S}
        for e in R if len(S) < len(R) else ():
            if self.dropped != "drop" and now_s + e.e > e.priority:  # no order can save it
                e.m.queue.remove(e)
                e.m.late.append(e)
            elif e.id not in on_time:
                dropped.append(e)
        if self.dropped == "requeue" and any(m.live for m in here):  # they wait for another look
            return S, []
        return S, merge(dropped, *(list(islice(m.late, self.heads)) for m in open_ if m.late))
