"""QLM: requests of one model and SLO form groups, groups queue for instances, an instance swaps models to serve them.

Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving", SoCC 2024 (arXiv 2407.00047v2): request
groups, virtual queues, the waiting time (RWT) estimator, the global scheduler, the serving operations (LSOs). Released
code: QLM-project/QLM eea5b62.

    g, n_g    a group; its requests not yet pulled       q   a virtual queue: groups in the order of service
    O, sigma  output tokens, mean and deviation          B   requests that an instance runs at once
    Theta     tokens a second: B O / (B P + O d)         P   seconds of a prefill; d of a decode step of B requests
    W_g       seconds until n_g are pulled: O n / Theta, under rwt=clt + z sigma sqrt(n) / Theta
    S_m, D_m  seconds to load model m; until its last requests leave, O d
    C_g       all W up to g's in its queue, + S_m where model m enters, + D_m where it leaves; + P
    p_g       penalty: C_g less what is left of g's SLO
    delta     a group takes delta x mean batch size requests, then another opens

    minimise  sum p_g + M v   such that  p_g <= v,  v >= 0,  each g in one slot of one q

All times are whole multiples of 2^-20 s (WHOLE), so their sums are exact in any order. Plans of equal cost are then
equal on every machine, although processors differ in the last bit of a logarithm. Of equal plans the first listed is
taken.

v = 0 is the paper's program (p <= 0). As released, it has no solution with two queues (it fills every slot of each),
nor once one SLO is lost, which is usual when swaps take seconds. Here the bound v is raised for all groups alike, by as
little as possible: EDF always satisfies it, and no group starves. The paper's x[g,q,slot] are taken together: there is
one binary for each order of groups that q may serve. The slots of an order have known completion times, so neither
transition bits nor big constants are needed. Orders with a penalty above EDF's v are not listed, nor are worse orders
of the same groups. If there are too many (GROUPS, ORDERS), or with solver=edf, EDF's order is used. The scheduler is
called when groups were formed or have ended. It acts if the estimator sees a penalty above the last v, or if an
instance is idle.

    way       rung of the swap ladder. Default sleep: the paper keeps weights in host memory under vLLM, whose way to do
              so today is its sleep mode. Prism (OSDI 2026) compared with an engine restart (`reload`: 41 s and
              the disk). The released code waits 120 s; no measured rung is that slow, so there is no such preset
    evict     what running requests do when the scheduler puts another model in front of theirs: KV to the host (the
              paper), recompute, or drain (they finish first). Where one group follows another they always finish
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, takewhile
from typing import ClassVar, NamedTuple

from harness.policy.actions import Action, Admit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import instances
from harness.policy.slot import Slot, start
from harness.policy.types import Cluster, Host, Inst, Option, Plan, Request
from harness.policy.view import View

DECISION_S = 1.2e-4  # mean of arena-chat on heavy8 at its own rate (3e-5 at 8 x), one busy x86-64 core, 2026-11-21

Z = 2.326  # 99 % of a normal distribution: the paper's SLOs are 99th percentiles of TTFT
CV = 1.0  # sigma / O of an exponential: a forecast has the mean alone
LOOSEST_S = 3600.0  # the paper's loosest class, Batch-2: a request without an SLO counts as one of it
M = 100.0  # weight of v, the seconds by which all SLOs are relaxed, beside a second of one penalty
GROUPS, ORDERS = 10, 400  # most groups that the program takes, and orders a queue: five groups have 326
WHOLE = 2.0**-20  # seconds


class Rates(NamedTuple):
    """A model's speeds and times from its profile and forecast; the module docstring defines the symbols."""

    B: int
    O: float
    Theta: float
    P: float
    S: float
    D: float
    move_s: float  # seconds to move one request's KV to the host
    rate_rps: float


@dataclass(slots=True, eq=False)
class Queue(Slot):
    """A virtual queue, and its instance: GPUs that hold one model at a time."""

    groups: list[Group] = field(default_factory=list)
    in_s: float | None = None  # when its model should be loaded; None: it is

    def running(self) -> list[Group]:
        """Return the groups that have requests on the GPUs."""
        return [g for g in self.groups if g.running and g.model == self.model]


@dataclass(slots=True, eq=False)
class Group:
    """Requests of one model and SLO, first come first served."""

    id: int
    model: str
    slo_s: float
    due_s: float  # deadline of its first request
    room: int  # how many may still join
    n: deque[int]  # requests not yet pulled
    home: Queue  # stays the same once requests run: the paper moves no group that has begun
    running: int = 0  # pulled and not ended


class After(NamedTuple):
    """The estimated state of a queue after all requests of some groups have been pulled."""

    at_s: float
    model: str | None
    leave_s: float  # seconds before another model can be loaded
    sum_s: float = 0.0  # sum of penalties
    late_s: float = -math.inf  # largest penalty


@dataclass(slots=True)
class Qlm:
    """A policy of request groups in virtual queues, with a scheduler that orders the groups."""

    cluster: Cluster
    way: str = choice("sleep", "cold", "disk", "host", "pool", "parallel")
    evict: str = choice("host", "recompute", "drain")
    solver: str = choice("milp", "edf")
    rwt: str = choice("clt", "mean")
    # The paper's value is not at hand. More groups, more loads; below 1 a group is less than one batch.
    delta: float = number(28.3, 1, 32, tuned=True)
    batch: int = number(256, 1, 4096)  # pulled at once: vLLM's batch cap (released: config.yaml, max_batch_size 10)
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Finished, Load}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=dict, init=False)
    rates: Mapping[str, Rates] = field(init=False)
    queues: list[Queue] = field(init=False)
    fits: Mapping[str, list[int]] = field(init=False)  # by model: indices of queues
    open: dict[tuple[str, float], Group] = field(default_factory=dict, init=False)  # by model and SLO
    pulled: dict[int, Group] = field(default_factory=dict, init=False)  # by request, until it ends
    formed: int = field(default=0, init=False)
    v: float = field(default=0.0, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "sleep": {"way": "sleep", "delta": 4.0},
        "reload": {"way": "cold", "delta": 4.0},
        "pool": {"way": "pool", "delta": 4.0},
        "edf": {"solver": "edf", "delta": 4.0},
    }

    def __post_init__(self) -> None:
        to = {"host": {"Move.to:host", "Move.to:gpu"}, "recompute": {"Move.to:none"}, "drain": set[str]()}[self.evict]
        evict = {"Run.steps:0", "Evict.drain", "Move"} | to if to else to
        way = set[str]() if self.way == "host" else {f"Load.way:{self.way}"}
        self.uses = frozenset({"Load", "Evict", "Run", "Admit", "Wake", "Request.slo", "Cluster.homes"} | evict | way)
        self.options = {
            "kv": "paged",
            "process": "kept" if self.way == "sleep" else "gpu",
        }  # a model that sleeps keeps its process
        self.rates = {m: self.rated(m) for m in self.cluster.models}
        work = {m: self.work(m) for m in self.rates}
        self.queues = [Queue(self.cluster, gpus) for gpus in instances(self.cluster, work)]
        self.fits = {m: [k for k, q in enumerate(self.queues) if q.fits(m)] for m in work}

    def rated(self, m: str) -> Rates:
        """Compute the speeds and times of model m from its profile and forecast."""
        model, profile = self.cluster.models[m], self.cluster.profile
        plan = self.cluster.plan.get(m) or Plan(0.0, model.max_tokens / 2, model.max_tokens / 2, "none")
        prompt, O = max(1.0, plan.prompt_tokens), max(1.0, plan.output_tokens)
        room = self.cluster.gpus[0].mem_bytes - model.weight_bytes
        inst, context = Inst(m, tuple(range(model.tp))), prompt + O / 2
        B = max(1, min(self.batch, int(room / model.kv_token_bytes / (prompt + O))))
        P, d = profile.prefill_s(inst, int(prompt)), profile.step_s(inst, B, int(B * context))
        move_s = profile.move_s(int(context * model.kv_token_bytes), 0, Host())
        Theta, S = B * O / (B * P + O * d), profile.load_s(inst, self.way)
        return Rates(B, O, Theta, whole(P), whole(S), whole(O * d), whole(move_s), plan.rate_rps)

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Let requests join and leave groups, admit those that have room, and schedule at most once per instant."""
        match event:
            case Arrived(request):
                return self.join(request, view)
            case Finished(rid):
                return self.leave(rid, view.now_s)
            case Woke("schedule"):
                self.schedule(view.now_s)
                return [action for q in self.queues for action in self.pull(q, view.now_s)]
            case Done(Load(inst), None):
                return self.ready(next(q for q in self.queues if q.has(inst)), view)
            case Woke("start"):  # with the models that have most work
                return start(self.queues, sorted(self.cluster.models, key=lambda m: -self.work(m)), self.way)
        return ()

    def join(self, request: Request, view: View) -> Iterator[Action]:
        """Add a request to the open group of its model and SLO.

        If there is none with room, form a new group at the end of the queue that would reach it first.
        """
        m, slo_s = request.model, min(request.ttft_slo_s, LOOSEST_S)
        g = self.open.get((m, slo_s))
        if g is not None and g.room > 0:
            g.n.append(request.id)
            g.room -= 1
            yield from self.pull(g.home, view.now_s)
            return
        self.formed += 1
        room = max(1, round(self.delta * self.mean_batch(m, view)))
        due_s = whole(request.arrival_s + slo_s)
        g = Group(self.formed, m, slo_s, due_s, room - 1, deque([request.id]), self.queues[0])
        ends = [
            (self.after(q, [*q.groups, g], view.now_s).at_s, k) for k, q in enumerate(self.queues) if k in self.fits[m]
        ]
        g.home = self.queues[min(ends)[1]]
        g.home.groups.append(g)
        self.open[m, slo_s] = g
        yield Wake(view.now_s, "schedule")

    def leave(self, rid: int, now_s: float) -> Iterator[Action]:
        """Remove a request that has ended; if it was the last of its group, remove the group from its queue."""
        g = self.pulled.pop(rid)
        g.running -= 1
        q = g.home
        if not g.running and not g.n:
            q.groups.remove(g)
            if self.open.get((g.model, g.slo_s)) is g:
                del self.open[g.model, g.slo_s]
            if not q.groups and any(not h.running for p in self.queues for h in p.groups):
                yield Wake(now_s, "schedule")
        yield from self.pull(q, now_s)

    # ------------------------------------------------------------ LSOs: pulling, swapping, eviction

    def pull(self, q: Queue, now_s: float) -> Iterator[Action]:
        """Admit as many requests as fit from the first groups of a queue that are for the loaded model.

        If the first group is for another model, swap that model in first.
        """
        if q.groups and q.groups[0].model != q.model and q.in_s is None:
            yield from self.swap(q, now_s)
        running = sum(g.running for g in q.running())
        for g in takewhile(lambda g: g.model == q.model, q.groups):
            for _ in range(min(len(g.n), self.rates[g.model].B - running)):
                rid = g.n.popleft()
                self.pulled[rid] = g
                g.running += 1
                running += 1
                yield Admit(rid, q.batch(g.model))

    def swap(self, q: Queue, now_s: float) -> Iterator[Action]:
        """Swap in the model of a queue's first group, and swap out the present model.

        Requests that still run are evicted, because the scheduler has put the first group in front of theirs.
        """
        running, m = q.running(), q.groups[0].model
        if running:
            yield Run(q.batch(running[0].model), steps=0)
            to = Host(q.node) if self.evict == "host" else None
            yield from (Move(rid, to) for rid in self.of(running))
        q.in_s = now_s + self.rates[m].S
        yield from q.hold(m, self.way, drain=not running)

    def ready(self, q: Queue, view: View) -> Iterator[Action]:
        """Open the lane of a model that was loaded, move its evicted KV back to the GPUs, and admit more requests."""
        assert q.model is not None
        batch, q.in_s = q.batch(q.model), None
        if view.lane(batch, "mixed") is None:
            yield Run(batch)
        for rid in self.of(q.running()):
            if isinstance(view.request(rid).home, Host):
                yield Move(rid, batch.inst.place)
        yield from self.pull(q, view.now_s)

    # ------------------------------------------------------------ RWT estimator

    def waiting_s(self, g: Group) -> float:
        """Return W_g, the seconds until all requests of a group are pulled.

        With rwt=clt it includes z deviations. Their sum over several groups is more than the deviation of the groups
        together.
        """
        n, r = len(g.n), self.rates[g.model]
        return whole((n + (Z * CV * math.sqrt(n) if self.rwt == "clt" else 0.0)) * r.O / r.Theta)

    def after(self, q: Queue, groups: Sequence[Group], now_s: float) -> After:
        """Return the state of a queue after it has served `groups` in this order.

        It begins with what the queue's instance does now. Running requests whose group is overtaken are evicted first.
        """
        n = sum(g.running for g in q.running())
        leave_s = n * self.rates[q.model].move_s if q.model and self.evict == "host" else 0.0
        at_s = now_s if q.in_s is None else max(now_s, q.in_s)
        return self.follow(After(whole(at_s), q.model, leave_s), groups)

    def follow(self, s: After, groups: Sequence[Group]) -> After:
        """Return the state of a queue that serves `groups`, in this order, from state s on."""
        at_s, model, leave_s, sum_s, late_s = s
        for g in groups:
            r = self.rates[g.model]
            at_s += (0.0 if g.model == model else leave_s + r.S) + self.waiting_s(g)
            p = at_s + r.P - g.due_s
            model, leave_s, sum_s, late_s = g.model, r.D, sum_s + p, max(late_s, p)
        return After(at_s, model, leave_s, sum_s, late_s)

    # ------------------------------------------------------------ global scheduler

    def schedule(self, now_s: float) -> None:
        """Reorder all queues if some group may move, and if a penalty exceeds v or a queue is empty."""
        free = sum(not g.running for q in self.queues for g in q.groups[len(self.fixed(q)) :])
        if not free:
            self.v = 0.0
        elif self.relaxed([q.groups for q in self.queues], now_s) > self.v or not all(q.groups for q in self.queues):
            orders = self.edf(now_s)
            self.v = self.relaxed(orders, now_s)
            if self.solver == "milp" and free > 1 and (solved := self.solved(self.v, now_s)) is not None:
                orders, self.v = solved, self.relaxed(solved, now_s)
            for q, order in zip(self.queues, orders, strict=True):
                q.groups = order
                for g in order:
                    g.home = q

    def relaxed(self, orders: Sequence[Sequence[Group]], now_s: float) -> float:
        """Return the least v, in seconds, that no penalty exceeds if the queues have these orders."""
        return max(0.0, *(self.after(q, groups, now_s).late_s for q, groups in zip(self.queues, orders, strict=True)))

    def fixed(self, q: Queue) -> list[Group]:
        """Return the groups at the head of a queue that no other group may overtake.

        While a model is loaded, this is its group. Otherwise, with evict=drain, these are the running groups. Otherwise
        there is none.
        """
        return q.groups[:1] if q.in_s is not None else q.running() if self.evict == "drain" else []

    def edf(self, now_s: float) -> list[list[Group]]:
        """Return an order for each queue: groups sorted by deadline, each in the queue that would reach it first.

        A group goes in front of running groups only if it meets its SLO there and would miss it behind them.
        """
        orders = [list(self.fixed(q)) for q in self.queues]
        leads = [[g for g in q.running() if g not in order] for q, order in zip(self.queues, orders, strict=True)]
        ends = [self.after(q, order, now_s) for q, order in zip(self.queues, orders, strict=True)]
        placed = {g.id for groups in (*orders, *leads) for g in groups}
        todo = [g for q in self.queues for g in q.groups if g.id not in placed]
        for g in sorted(todo, key=lambda g: (g.due_s, g.id)):
            ways: list[tuple[float, int, bool]] = []
            for k in self.fitting(g):
                first = behind = self.follow(ends[k], [g])
                if leads[k]:
                    lead = self.follow(ends[k], leads[k])
                    behind = self.follow(lead, [g])
                    if first.sum_s - ends[k].sum_s <= 0.0 < behind.sum_s - lead.sum_s:
                        ways.append((first.at_s, k, True))
                        continue
                ways.append((behind.at_s, k, False))
            _, k, over = min(ways)
            order = [g] if over else [*leads[k], g]
            leads[k] = leads[k] if over else []
            orders[k] += order
            ends[k] = self.follow(ends[k], order)
        return [order + lead for order, lead in zip(orders, leads, strict=True)]

    def solved(self, v: float, now_s: float) -> list[list[Group]] | None:
        """Return the orders of groups, one for each queue, that the integer program chooses with no penalty above v.

        Return None if there are too many groups or orders to list, or if the program has no solution.
        """
        loose = [g for q in self.queues for g in q.groups[len(self.fixed(q)) :]]
        if len(loose) > GROUPS:
            return None
        listed: list[list[tuple[list[Group], After]]] = []
        for k, q in enumerate(self.queues):
            start, todo = self.after(q, self.fixed(q), now_s), [g for g in loose if k in self.fitting(g)]
            listed.append(list(islice(self.listed(start, todo, v), ORDERS)))
            if len(listed[-1]) == ORDERS:
                return None
        places = [[(ids(order), end.sum_s, max(0.0, end.late_s)) for order, end in of] for of in listed]
        taken = partition(places, M)
        if taken is None:
            return None
        return [self.fixed(q) + of[j][0] for q, of, j in zip(self.queues, listed, taken, strict=True)]

    def listed(
        self, s: After, todo: Sequence[Group], v: float, order: Sequence[Group] = ()
    ) -> Iterator[tuple[list[Group], After]]:
        """Yield the possible orders of some of the groups `todo` after state s, each with its end state.

        No penalty may exceed v, and groups of one model and SLO stay first come first served.
        """
        yield list(order), s
        for g in todo:
            end = self.follow(s, [g])
            younger = (h for h in order if h.id > g.id)
            if end.late_s <= v and (g.model, g.slo_s) not in {(h.model, h.slo_s) for h in younger}:
                yield from self.listed(end, [h for h in todo if h is not g], v, (*order, g))

    # ------------------------------------------------------------ words

    def of(self, groups: Sequence[Group]) -> list[int]:
        """Return the requests of these groups that were pulled and have not ended."""
        return [rid for rid, g in self.pulled.items() if g in groups]

    def fitting(self, g: Group) -> Sequence[int]:
        """Return the indices of the queues that may serve a group; if the group runs, only its present queue may."""
        return self.fits[g.model] if not g.running else [self.queues.index(g.home)]

    def mean_batch(self, m: str, view: View) -> float:
        """Return the mean number of requests in a decode step of model m so far.

        Before the first step, Little's law gives it from the forecast.
        """
        r, seen = self.rates[m], [view.batch(self.queues[k].batch(m)) for k in self.fits[m]]
        steps = sum(b.steps for b in seen)
        return sum(b.seq_steps for b in seen) / steps if steps else r.rate_rps * (r.P + r.D)

    def work(self, m: str) -> float:
        """Return the GPU-seconds per second that model m needs for its forecast requests."""
        r = self.rates[m]
        return r.rate_rps * r.O / r.Theta * self.cluster.models[m].tp


# ---------------------------------------------------------------- the program


Place = tuple[frozenset[int], float, float]  # jobs, a sum and a largest penalty
Way = tuple[float, float, tuple[int, ...]]  # a sum, that + weight x the largest, and the option of each machine so far
Ways = Mapping[frozenset[int], Sequence[Way]]  # by the jobs that are done


def partition(options: Sequence[Sequence[Place]], weight: float) -> tuple[int, ...] | None:
    """Choose an option for each machine so that every job is done once, at the least cost; None if impossible.

    The cost is the sum of the options' sums + weight x their largest penalty. The search is exact, machine by machine.
    Among choices of equal cost, the one with the first options is taken.
    """
    each = [gathered((jobs, (t, t + weight * late, (j,))) for j, (jobs, t, late) in enumerate(of)) for of in options]
    every = frozenset[int]().union(*(jobs for ways in each for jobs in ways))
    done = reduce(joined, each).get(every, ())
    return min((way[1:] for way in done), default=(0.0, None))[1]


def joined(some: Ways, more: Ways) -> Ways:
    """Combine choices of options for some machines with those for one more machine.

    Combinations that do a job twice are left out.
    """
    return gathered(
        (jobs | new, (t + u, max(value + u, t + added), (*taken, *j)))
        for jobs, ways in some.items()
        for new, these in more.items()
        if jobs.isdisjoint(new)
        for t, value, taken in ways
        for u, added, j in these
    )


def gathered(pairs: Iterable[tuple[frozenset[int], Way]]) -> Ways:
    """Group choices (ways) by the set of jobs that they do; of each group keep those that may still become the best."""
    by_jobs: dict[frozenset[int], list[Way]] = {}
    for jobs, way in pairs:
        by_jobs.setdefault(jobs, []).append(way)
    return {jobs: unbeaten(ways) for jobs, ways in by_jobs.items()}


def unbeaten(ways: Iterable[Way]) -> list[Way]:
    """Keep, in order of rising sum, each way whose value is lower than the values of all ways before it.

    A way that is left out cannot become the best, because further machines add the same to it as to the ways that are
    kept.
    """
    kept: list[Way] = []
    for way in sorted(ways):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept


def ids(groups: Iterable[Group]) -> frozenset[int]:
    """Return the set of the groups' ids."""
    return frozenset(g.id for g in groups)


def whole(s: float) -> float:
    """Return seconds rounded to a whole multiple of WHOLE."""
    return round(s / WHOLE) * WHOLE
