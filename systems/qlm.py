"""QLM: requests of one model and SLO form groups, groups queue for instances, an instance swaps models to serve them.

Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving", SoCC 2024 (arXiv 2407.00047v2): request
groups, virtual queues, the waiting time (RWT) estimator, the global scheduler, the serving operations (LSOs).

    g, n_g    a group; its requests not yet pulled       q   a virtual queue: groups in the order of service
    O, sigma  output tokens, mean and deviation          B   requests that an instance runs at once
    Theta     tokens a second: B O / (B P + O d)         P   seconds of a prefill; d of a decode step of B requests
    W_g       seconds until n_g are pulled: O n / Theta, under rwt=clt + z sigma sqrt(n) / Theta
    S_m, D_m  seconds to load model m; until its last requests leave, O d
    C_g       all W up to g's in its queue, + S_m where model m enters, + D_m where it leaves; + P
    p_g       penalty: C_g less what is left of g's SLO
    delta     a group takes delta x mean batch size requests, then another opens

    minimise  sum p_g + M v   such that  p_g <= v,  v >= 0,  each g in one slot of one q

v = 0 is the paper's program (p <= 0). As released it cannot hold with two queues (it fills every slot of each) nor when one
SLO is lost, which swaps of seconds make the rule; here the bound yields for all alike, as little as it can, so no group
starves and EDF, which is its heuristic, always satisfies it. The paper's x[g,q,slot] are taken together: a binary for
each order of groups that q may serve. Its slots know their completions, so no transition bits and no big constants are
left. Orders later than EDF's v are not listed; beyond `columns` of them, and under solver=edf, EDF it is. The scheduler
is asked when groups came or went and the estimator sees a penalty above the last v, or a queue is empty.

    way       rung of the swap ladder. Default sleep: the paper keeps weights in host memory under vLLM, whose own way to
              do that today is its sleep mode. What Prism compared with restarts the engine (`reload`)
    evict     what running requests do when another model's group is put in front of theirs: KV to the host (paper),
              recompute, or drain (they finish first); between groups in their order they always finish
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import ClassVar, NamedTuple

from harness.actions import Action, Admit, Evict, Load, Move, Run, Wake
from harness.algorithms import milp, one_request
from harness.events import Arrived, Done, Event, Finished, Woke
from harness.types import Batch, Cluster, Gpus, Host, Infeasible, Inst, Option, Plan, Request
from harness.view import View

DECISION_S = 0.0

Z = 2.326  # 99 % of a normal distribution: the paper's SLOs are 99th percentiles of TTFT
CV = 1.0  # sigma / O of an exponential: a forecast has the mean alone
LOOSEST_S = 3600.0  # the paper's loosest class, Batch-2: a request without an SLO counts as one of it
M = 100.0  # a second that all SLOs are relaxed weighs as so many of penalty
NODES, GAP = 100, 1e-3  # where the solver stops


class Rates(NamedTuple):
    """What profile and forecast say of a model; symbols above."""

    B: int
    O: float  # noqa: E741
    Theta: float
    P: float
    S: float
    D: float
    move_s: float  # of one request's KV to the host
    work: float  # GPU-seconds a second
    rate_rps: float


@dataclass(slots=True, eq=False)
class Group:
    """Requests of one model and SLO, first come first served."""

    id: int
    model: str
    slo_s: float
    due_s: float  # of its first request
    room: int  # how many may still join
    n: deque[int] = field(default_factory=deque)  # not yet pulled
    running: int = 0  # pulled and not finished; from the first on the group stays in its queue


@dataclass(slots=True, eq=False)
class Queue:
    """A virtual queue, and its instance: GPUs that hold one model at a time."""

    gpus: Gpus
    groups: list[Group] = field(default_factory=list)
    model: str | None = None  # in or on its way
    in_s: float | None = None  # when it should be in; None: it is

    def running(self) -> list[Group]:
        """Groups with requests on the GPUs."""
        return [g for g in self.groups if g.running and g.model == self.model]


class After(NamedTuple):
    """Where a queue stands after some of its groups, by the estimator."""

    at_s: float  # from now
    model: str | None
    leave_s: float  # before another model can come
    sum_s: float = 0.0  # of penalties
    late_s: float = -math.inf  # the largest


@dataclass(slots=True)
class Qlm:
    """Groups, virtual queues, and who is served where and when."""

    cluster: Cluster
    way: str = "sleep"
    evict: str = "host"
    solver: str = "milp"
    rwt: str = "clt"
    delta: float = 4.0  # assumed, the paper's value is not at hand
    batch: int = 256  # most requests pulled at once: vLLM's batch cap (released: 10)
    columns: int = 400  # most orders that the solver is given
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Finished, Load}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "sleep": {"way": "sleep"},
        "reload": {"way": "cold"},
        "pool": {"way": "pool"},
        "edf": {"solver": "edf"},
    }
    choices: ClassVar[Mapping[str, tuple[Option, ...]]] = {
        "way": ("cold", "disk", "sleep", "host", "pool", "parallel"),
        "evict": ("host", "recompute", "drain"),
        "solver": ("milp", "edf"),
        "rwt": ("clt", "mean"),
    }
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"delta": (0.5, 16.0)}

    rates: dict[str, Rates] = field(init=False)
    queues: list[Queue] = field(init=False)
    open: dict[tuple[str, float], Group] = field(default_factory=dict, init=False)  # by model and SLO
    home: dict[int, Queue] = field(default_factory=dict, init=False)  # by group
    pulled: dict[int, Group] = field(default_factory=dict, init=False)  # by request, until it ends
    formed: int = field(default=0, init=False)
    v: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        moves = {"host": {"Move.to:host", "Move.to:gpu"}, "recompute": {"Move.to:none"}, "drain": set[str]()}[
            self.evict
        ]
        self.uses = frozenset(
            {"Load", "Evict", "Run", "Admit", "Wake", "Request.slo"}
            | ({f"Load.way:{self.way}"} if self.way != "host" else set())
            | ({"Run.steps:0", "Evict.drain", "Move", *moves} if moves else set())
        )
        self.rates = {m: self.rated(m) for m in self.cluster.models}
        self.queues = [Queue(gpus) for gpus in instances(self.cluster, self.rates)]

    def rated(self, m: str) -> Rates:
        """The symbols of model m. Raises Infeasible where its GPUs do not hold it."""
        model, profile, some = self.cluster.models[m], self.cluster.profile, self.cluster.models[m].max_tokens / 2
        plan = self.cluster.plan.get(m) or Plan(0.0, some, some, "none")
        prompt, O = max(1.0, plan.prompt_tokens), max(1.0, plan.output_tokens)  # noqa: E741
        room = self.cluster.gpus[0].mem_bytes - model.weight_bytes
        if room < one_request(model) or model.tp > len(self.cluster.gpus):
            raise Infeasible(f"{m} and one longest request do not fit {model.tp} GPU(s)")
        inst, context = Inst(m, tuple(range(model.tp))), prompt + O / 2
        B = max(1, min(self.batch, int(room / model.kv_token_bytes / (prompt + O))))
        P, d = profile.prefill_s(inst, int(prompt)), profile.step_s(inst, B, int(B * context))
        Theta, move_s = B * O / (B * P + O * d), profile.move_s(int(context * model.kv_token_bytes), 0, Host())
        work = plan.rate_rps * O / Theta * model.tp
        return Rates(B, O, Theta, P, profile.load_s(inst, self.way), O * d, move_s, work, plan.rate_rps)

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Groups form and empty; what there is room for is pulled; the scheduler is asked once an instant."""
        match event:
            case Arrived(request):
                return self.join(request, view)
            case Finished(rid):
                return self.leave(rid, view.now_s)
            case Woke("schedule"):
                self.schedule(view.now_s)
                return [action for q in self.queues for action in self.pull(q, view.now_s)]
            case Done(Load(inst), None):
                return self.loaded(inst, view.now_s)
            case Done(action):
                return self.refused(action, view.now_s)
            case Woke("mend"):
                return self.mend(view)
            case Woke("start"):
                return self.start()
        return ()

    def start(self) -> Iterator[Action]:
        """The models with most work come first, each on one instance, and again where there are more instances."""
        models = sorted(self.cluster.models, key=lambda m: -self.rates[m].work)
        for q, turn in zip(self.queues, cycle(range(len(models))), strict=False):
            order = models[turn:] + models[:turn]
            q.model = next(m for m in order if self.cluster.models[m].tp <= len(q.gpus))
            yield Load(self.batch_of(q, q.model).inst, self.way)
            yield Run(self.batch_of(q, q.model))

    def join(self, request: Request, view: View) -> Iterator[Action]:
        """A request joins its open group, or forms one, which goes behind the queue that reaches it first."""
        m, slo_s = request.model, min(request.ttft_slo_s, LOOSEST_S)
        g = self.open.get((m, slo_s))
        if g is not None and g.room > 0:
            g.n.append(request.id)
            g.room -= 1
            yield from self.pull(self.home[g.id], view.now_s)
            return
        self.formed += 1
        room = max(1, round(self.delta * self.mean_batch(m, view)))
        g = Group(self.formed, m, slo_s, request.arrival_s + slo_s, room - 1, deque([request.id]))
        q = min(self.fitting(g), key=lambda q: self.follow(self.after(q, q.groups, view.now_s), g, view.now_s).at_s)
        q.groups.append(g)
        self.open[m, slo_s], self.home[g.id] = g, q
        yield Wake(view.now_s, "schedule")

    def leave(self, rid: int, now_s: float) -> Iterator[Action]:
        """A request ended; the last of a group takes it off the queue."""
        g = self.pulled.pop(rid)
        g.running -= 1
        q = self.home[g.id]
        if not g.running and not g.n:
            q.groups.remove(g)
            del self.home[g.id]
            if self.open.get((g.model, g.slo_s)) is g:
                del self.open[g.model, g.slo_s]
            if not q.groups and any(not g.running for p in self.queues for g in p.groups):
                yield Wake(now_s, "schedule")
        yield from self.pull(q, now_s)

    # ------------------------------------------------------------ LSO agent: pulling, swapping, eviction

    def pull(self, q: Queue, now_s: float) -> Iterator[Action]:
        """Requests of the groups at the head, as many as fit; then the next model, when nothing of this one runs."""
        if q.in_s is not None or not q.groups:
            return
        if q.groups[0].model != q.model:
            yield from self.swap(q, now_s)
            return
        batch = self.batch_of(q, q.model)
        running = sum(g.running for g in q.running())
        for g in q.groups:
            if g.model != q.model:
                return
            while g.n and running < self.rates[g.model].B:
                rid = g.n.popleft()
                self.pulled[rid] = g
                g.running += 1
                running += 1
                yield Admit(rid, batch)

    def swap(self, q: Queue, now_s: float) -> Iterator[Action]:
        """The head's model for the one that is in; what runs, when the scheduler put the head in front, is evicted."""
        if q.model is not None:
            batch, running = self.batch_of(q, q.model), q.running()
            if running:
                yield Run(batch, steps=0)
                to = Host(self.cluster.gpus[q.gpus[0]].node) if self.evict == "host" else None
                for rid in self.of(running):
                    yield Move(rid, to)
            yield Evict(batch.inst, drain=not running)
        q.model = q.groups[0].model
        q.in_s = now_s + self.rates[q.model].S
        yield Load(self.batch_of(q, q.model).inst, self.way)

    def loaded(self, inst: Inst, now_s: float) -> Iterator[Action]:
        """A model is in: evicted requests come home first."""
        for q in self.queues:
            if q.in_s is not None and q.model == inst.model and inst.place == self.batch_of(q, inst.model).inst.place:
                q.in_s = None
                yield Run(Batch(inst))
                if self.evict == "host":
                    for rid in self.of(q.running()):
                        yield Move(rid, inst.place)
                yield from self.pull(q, now_s)

    def refused(self, action: Action, now_s: float) -> Iterator[Action]:
        """What could not be is tried again after the time of a swap."""
        match action:
            case Admit(int(rid)) if rid in self.pulled:
                g = self.pulled.pop(rid)
                g.running -= 1
                g.n.appendleft(rid)
            case Load(Inst(m, place)):
                for q in self.queues:
                    if q.model == m and q.gpus[: len(place)] == place:
                        q.model = q.in_s = None
            case Move(_, None | Host()):
                return  # it had no KV
        yield Wake(now_s + min(r.S for r in self.rates.values()), "mend")

    def mend(self, view: View) -> Iterator[Action]:
        """Whatever instances still lack after refusals."""
        for q in self.queues:
            for inst in view.insts(q.gpus[0]):
                if inst.model != q.model and view.weights(inst) == "in":
                    yield Evict(inst, drain=self.evict == "drain")
            if q.model is not None and q.in_s is None:
                batch = self.batch_of(q, q.model)
                if view.lane(batch, "mixed") is None:
                    yield Run(batch)
                for rid in self.of(q.running()):
                    if isinstance(view.request(rid).home, Host):
                        yield Move(rid, q.gpus[: len(batch.inst.place)])
            yield from self.pull(q, view.now_s)

    # ------------------------------------------------------------ RWT estimator

    def W(self, g: Group) -> float:
        """Seconds until all that wait in g are pulled. Deviations add up group by group: more than they would."""
        n, r = len(g.n), self.rates[g.model]
        return (n + (Z * CV * math.sqrt(n) if self.rwt == "clt" else 0.0)) * r.O / r.Theta

    def follow(self, s: After, g: Group, now_s: float) -> After:
        """Serve one more group."""
        r = self.rates[g.model]
        at_s = s.at_s + (0.0 if g.model == s.model else s.leave_s + r.S) + self.W(g)
        p = at_s + r.P - (g.due_s - now_s)
        return After(at_s, g.model, r.D, s.sum_s + p, max(s.late_s, p))

    def after(self, q: Queue, groups: Sequence[Group], now_s: float) -> After:
        """Serve groups in an order, from what the instance does now; who is overtaken while running is evicted."""
        n = sum(g.running for g in q.running())
        leave_s = n * self.rates[q.model].move_s if q.model and self.evict == "host" else 0.0
        s = After(max(0.0, q.in_s - now_s) if q.in_s is not None else 0.0, q.model, leave_s)
        for g in groups:
            s = self.follow(s, g, now_s)
        return s

    # ------------------------------------------------------------ global scheduler

    def schedule(self, now_s: float) -> None:
        """New orders, where some group waits and an SLO, as far as relaxed, would be missed or an instance is idle."""
        free = [g for q in self.queues for g in q.groups[len(self.fixed(q)) :] if not g.running]
        if not free:
            self.v = 0.0
            return
        late_s = max(self.after(q, q.groups, now_s).late_s for q in self.queues)
        if late_s <= self.v and all(q.groups for q in self.queues):
            return
        orders = self.edf(now_s)
        v = self.relaxed(orders, now_s)
        if self.solver == "milp" and len(free) > 1:
            orders = self.solved(v, now_s) or orders
            v = self.relaxed(orders, now_s)
        self.v = v
        for q, order in zip(self.queues, orders, strict=True):
            q.groups = order
            self.home.update((g.id, q) for g in order)

    def relaxed(self, orders: Sequence[Sequence[Group]], now_s: float) -> float:
        """The v of an order for each queue."""
        return max(0.0, *(self.after(q, order, now_s).late_s for q, order in zip(self.queues, orders, strict=True)))

    def fixed(self, q: Queue) -> list[Group]:
        """Groups at the head that cannot be overtaken: the one whose model comes in; under drain, those that run."""
        return q.groups[:1] if q.in_s is not None else q.running() if self.evict == "drain" else []

    def edf(self, now_s: float) -> list[list[Group]]:
        """By deadline, each to the queue that reaches it first; before running groups only what that saves."""
        lead = [[*(f := self.fixed(q)), *(g for g in q.running() if g not in f)] for q in self.queues]
        ends = [self.after(q, groups, now_s) for q, groups in zip(self.queues, lead, strict=True)]
        orders = [list(groups) for groups in lead]
        todo = [g for q, first in zip(self.queues, lead, strict=True) for g in q.groups if g not in first]
        for g in sorted(todo, key=lambda g: (g.due_s, g.id)):
            can = [(self.follow(ends[k], g, now_s), k) for k, q in enumerate(self.queues) if q in self.fitting(g)]
            end, k = min(can, key=lambda at: (at[0].at_s, at[1]))
            ends[k] = end
            orders[k].append(g)
        for k, q in enumerate(self.queues):
            fixed, behind = self.fixed(q), orders[k][len(lead[k]) :]
            if lead[k] != fixed and behind and behind[0].due_s < lead[k][len(fixed)].due_s:
                g = behind[0]
                late_s, soon_s = (self.penalty(q, first, g, now_s) for first in (lead[k], fixed))
                if late_s > 0.0 >= soon_s:
                    orders[k] = [*fixed, g, *(h for h in orders[k][len(fixed) :] if h is not g)]
        return orders

    def penalty(self, q: Queue, first: Sequence[Group], g: Group, now_s: float) -> float:
        """p of g behind others."""
        s = self.after(q, first, now_s)
        return self.follow(s._replace(late_s=-math.inf), g, now_s).late_s

    def solved(self, v: float, now_s: float) -> list[list[Group]] | None:
        """The program over all orders whose largest penalty is at most v; None: too many of them, or no answer."""
        orders: list[tuple[int, tuple[Group, ...], After]] = []
        todo = {g.id: g for q in self.queues for g in q.groups[len(self.fixed(q)) :]}
        for k, q in enumerate(self.queues):
            fixed = self.fixed(q)
            mine = [g for g in todo.values() if q in self.fitting(g)]
            for order in self.listed(self.after(q, fixed, now_s), mine, v, now_s):
                orders.append((k, (*fixed, *order[0]), order[1]))
                if len(orders) > self.columns:
                    return None
        n, Q = len(orders), len(self.queues)
        rows: dict[tuple[str, int], dict[int, float]] = {}
        for j, (k, groups, end) in enumerate(orders):
            for g in groups:
                if g.id in todo:
                    rows.setdefault(("group", g.id), {})[j] = 1.0
            rows.setdefault(("queue", k), {})[j] = 1.0
            rows.setdefault(("late", k), {n: -1.0})[j] = max(0.0, end.late_s)
        upper = [0.0 if what == "late" else 1.0 for what, _ in rows]
        lower = [-math.inf if what == "late" else 1.0 for what, _ in rows]
        x = milp([*(end.sum_s for *_, end in orders), M], list(rows.values()), lower, upper, n, nodes=NODES, gap=GAP)
        if x is None or len(rows) < len(todo) + 2 * Q:
            return None
        return [list(groups) for (_, groups, _), taken in zip(orders, x, strict=False) if taken > 0.5]

    def listed(
        self, s: After, todo: Sequence[Group], v: float, now_s: float, order: tuple[Group, ...] = ()
    ) -> Iterator[tuple[tuple[Group, ...], After]]:
        """Orders of any of the groups behind s, each with where it ends; alike groups stay first come first served."""
        yield order, s
        for g in todo:
            if not any((h.model, h.slo_s) == (g.model, g.slo_s) and h.id > g.id for h in order):
                end = self.follow(s, g, now_s)
                if end.late_s <= v + 1e-9:
                    yield from self.listed(end, [h for h in todo if h is not g], v, now_s, (*order, g))

    # ------------------------------------------------------------ words

    def batch_of(self, q: Queue, m: str) -> Batch:
        """The batch of model m on an instance: the first of its GPUs, as many as m needs."""
        return Batch(Inst(m, q.gpus[: self.cluster.models[m].tp]))

    def of(self, groups: Sequence[Group]) -> list[int]:
        """Requests of groups that were pulled and have not ended."""
        return [rid for rid, g in self.pulled.items() if g in groups]

    def fitting(self, g: Group) -> list[Queue]:
        """Queues that may serve a group: its own once it has begun."""
        tp = self.cluster.models[g.model].tp
        return [self.home[g.id]] if g.running else [q for q in self.queues if len(q.gpus) >= tp]

    def mean_batch(self, m: str, view: View) -> float:
        """Requests in a decode step of model m so far; before the first, those of its forecast (Little)."""
        steps = [view.batch(self.batch_of(q, m)) for q in self.queues if len(q.gpus) >= self.cluster.models[m].tp]
        r = self.rates[m]
        if total := sum(s.steps for s in steps):
            return sum(s.seq_steps for s in steps) / total
        return r.rate_rps * (r.P + r.D)


def instances(cluster: Cluster, rates: Mapping[str, Rates]) -> list[Gpus]:
    """GPUs cut into instances: of the largest tensor-parallel degree first, as many as the work of its models asks for."""
    free = {
        node: [k for k, g in enumerate(cluster.gpus) if g.node == node] for node in {g.node: 0 for g in cluster.gpus}
    }
    degrees = sorted({model.tp for model in cluster.models.values()}, reverse=True)
    cut: list[Gpus] = []
    for tp in degrees:
        work = {t: sum(rates[m].work for m, x in cluster.models.items() if x.tp == t) for t in degrees if t <= tp}
        left = sum(len(gpus) for gpus in free.values())
        share = work[tp] / sum(work.values()) if sum(work.values()) > 0 else 1 / len(work)
        want = left if tp == degrees[-1] else max(1, round(share * left / tp))
        for gpus in free.values():
            while want and len(gpus) >= tp:
                cut.append(tuple(gpus[:tp]))
                del gpus[:tp]
                want -= 1
    if not any(len(gpus) == degrees[0] for gpus in cut):
        raise Infeasible(f"no node has {degrees[0]} GPUs")
    return cut
