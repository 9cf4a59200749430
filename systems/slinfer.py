"""SLINFER: instances of several models share a GPU by tokens, and a request is admitted where three tests hold.

Xu, Li, Chen et al., "Towards Resource-Efficient Serverless LLM Inference with SLINFER", HPCA 2026 (arXiv 2507.00507).
The rules are those of its release, BarrinXu/SLINFER e915356, SLINFER_core/scheduler. Its core has no licence, so only
rules were taken. Files are named at each rule. CPU instances, which the paper puts first, are left out: no engine here
serves them.

    node       GPUs that instances share: one, or a tensor-parallel group
    worker     an instance of a model on a node, with KV memory of its own that grows and shrinks
    deadline   when a request's next token is due: arrival + TTFT + TPOT x tokens made, each SLO x 0.95 (config.py), and
               the seconds of a load that it waited for (request_info.py, expect_next_token_time)
    quota      steps of a turn: one while the worker has prompts, else 4, 2 or 1 by the model's size (worker.py,
               get_recommend_quota_size)

Turns (node.py, schedule): when a turn ends, the worker with the earliest deadline is next.

A worker takes a request (node.py, can_add_request_to_worker) if all three tests hold:

    memory     KV for all tokens of its requests, 512 more for each, and at least 4,096 tokens, fits the node beside the
               KV memory of the others and all weights;
    decode     the decode steps of the node's workers, each over its TPOT SLO, sum to at most 1;
    prefill    if the node's workers prefill one after the other by deadline, the prompts of this worker and of those
               after it end in time.

Step times are the profile's, 5 % longer (power_estimator.py, safety_factor). Of a model's workers, the one with most
requests is asked first. If none takes the request, a neighbour may be preempted. It has at most as many requests (those
with fewest come first) and frees enough memory. Its requests lose their KV and are admitted again (pool.py,
preempt_worker_async, save_kv=False). Else a new worker starts on the fullest node that takes it. Else the request asks
again 0.25 s later, and is dropped once its deadline is over (gateway.py). KV memory grows to 1.25 times the need, and
shrinks if it is above that by more than the same factor (worker.py). A worker without requests stays for 1 s.

Left open there, and chosen here: models that are not in its table of quotas have that of the nearest size; a model has
one worker on a node, where the release starts several processes of a type; deadlines of a worker's decodes are compared
by its steps, not by request, which gives the same order while all of them step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import instances
from harness.policy.types import Batch, Cluster, Gpus, Inst, Model, Option, Profile, Request
from harness.policy.view import View

DECISION_S = 2e-5  # mean of 93,290, 23 a request, 6 models on one A100; 2 busy x86-64 cores, CPython 3.11, 2026-11-26

MARGIN = 0.95  # of each SLO: config.py, TTFT_baseline and TPOT
SAFETY = 1.05  # power_estimator.py, estimate_duration
AHEAD = 512  # tokens beside a request's own: worker.py, get_kv_usage
RETRY_S = 0.25  # gateway.py, create_completion
QUOTAS = ((10e9, 4), (20e9, 2))  # (bytes of weights, steps of a turn below); 3B: 4, 7B and 8B: 2, 13B and 22B: 1


@dataclass(slots=True, eq=False)
class Job:
    """A request, in a worker or waiting for one."""

    request: Request
    worker: Worker | None = None
    made: int = 0  # tokens, when it last entered a worker or had its prefill
    excused_s: float = 0.0  # seconds of loads that it waited for
    again_s: float = math.inf  # when it asks again

    def due_s(self, made: float) -> float:
        """Return the time in seconds at which the request's next token is due after `made` tokens."""
        r = self.request
        later_s = r.tpot_slo_s * made if made else 0.0
        return r.arrival_s + self.excused_s + MARGIN * (r.ttft_slo_s + later_s)

    @property
    def tokens(self) -> int:
        """The tokens of the request's context when it last entered a worker or had its prefill."""
        return self.request.prompt_tokens + self.made


class Queue(NamedTuple):
    """Totals of the prompts that a worker has still to prefill."""

    tokens: int
    took_s: float  # seconds that they take by the profile
    due_s: float  # the earliest deadline


@dataclass(slots=True, eq=False)
class Worker:
    """An instance of a model on a node."""

    node: Node
    batch: Batch
    model: Model
    jobs: dict[int, Job] = field(default_factory=dict)
    prompts: dict[int, Job] = field(default_factory=dict)  # the jobs whose KV is not whole
    kv_bytes: int = 0  # most KV bytes on each of its GPUs
    loading: bool = True
    idle_s: float = math.inf  # since when it has no request
    steps: int = 0  # steps of all its turns
    turns: int = 0  # the number of its last turn, of all on its node
    order: list[tuple[float, int, Job]] = field(default_factory=list)  # a heap of its decodes; some have left
    queue: Queue | None = None  # kept by `queued`; None once prompts have changed

    def queued(self, profile: Profile) -> Queue:
        """Return the totals of the worker's prompts.

        They are cached, because each arrival needs them and they rarely change under overload.
        """
        if self.queue is None:
            jobs = self.prompts.values()
            self.queue = Queue(
                sum(job.tokens for job in jobs),
                sum(SAFETY * profile.prefill_s(self.batch.inst, job.tokens) for job in jobs),
                min((job.due_s(job.made) for job in jobs), default=math.inf),
            )
        return self.queue

    def tokens(self, view: View, profile: Profile) -> int:
        """Return the context tokens of all the worker's requests."""
        return self.queued(profile).tokens + view.batch(self.batch).ctx_tokens

    def deadline_s(self, view: View, profile: Profile) -> float:
        """Return the earliest deadline among the worker's requests (released: worker.py, get_next_token_ddl)."""
        due_s = self.queued(profile).due_s
        while self.order and (self.order[0][2].worker is not self or self.order[0][1] in self.prompts):
            heappop(self.order)
        if self.order:
            _, rid, job = self.order[0]
            due_s = min(due_s, job.due_s(view.request(rid).made_tokens))
        return due_s

    def decodes(self, job: Job, made: int) -> None:
        """Move a request whose prefill is complete from the worker's prompts to its decodes."""
        if self.prompts.pop(job.request.id, None) is not None:
            job.made, self.queue = made, None
            tpot_s = job.request.tpot_slo_s
            key = job.due_s(made - self.steps) if tpot_s < math.inf else math.inf
            heappush(self.order, (key, job.request.id, job))


@dataclass(slots=True, eq=False)
class Node:
    """GPUs that instances share."""

    gpus: Gpus
    room: int  # bytes of each GPU
    workers: dict[str, Worker] = field(default_factory=dict)
    turn: Worker | None = None  # the worker whose lane is open
    since_s: float | None = None  # when its turn began; none: it has no end
    turns: int = 0
    leaving: set[str] = field(default_factory=set)  # models whose weights are not gone yet
    stuck: set[str] = field(default_factory=set)  # models that could do nothing in a turn, until something changes

    @property
    def busy(self) -> bool:
        """True if the node has a worker, even one that is leaving."""
        return bool(self.workers or self.leaving)

    @property
    def used(self) -> int:
        """Bytes of the workers' weights and KV, per GPU (node.py, cal_node_memory_budget_with_target_worker)."""
        return sum(w.model.weight_bytes + w.kv_bytes for w in self.workers.values())


@dataclass(slots=True)
class Slinfer:
    """A policy of turns by deadline, three admission tests, preemption of small neighbours, and workers on demand."""

    cluster: Cluster
    sharing: bool = choice(True, False)  # config.py, enable_sharing; False: one worker a node
    preempt: bool = choice(True, False)  # enable_preempt
    packing: bool = choice(True, False)  # enable_defragmentation; False: least full first, without preemption
    least_tokens: int = number(4096, 0, 1 << 20)  # minimal_tokens_per_instance
    growth: float = number(0.25, 0, 1)  # kv_scale_watermark
    keep_s: float = number(1.0, 0, 3600)  # keep_alive_time
    way: str = choice("host", "pool", "disk", "cold")
    hears: frozenset[type] = field(
        default=frozenset({Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Load, Evict}), init=False
    )
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)
    nodes: list[Node] = field(init=False)
    at: dict[int, Node] = field(init=False)  # by GPU
    jobs: dict[int, Job] = field(default_factory=dict, init=False)
    waiting: dict[int, Job] = field(default_factory=dict, init=False)  # no worker took them; in order of `again_s`

    leaves_idle: ClassVar[str] = "what no worker takes asks again 0.25 s later (gateway.py, create_completion)"
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "alone": {"sharing": False},
        "unpreempted": {"preempt": False},
        "spread": {"packing": False},
    }

    def __post_init__(self) -> None:
        self.uses = frozenset(
            {"Load", "Evict", "Evict.drain", "Limit", "Admit", "Drop", "Move", "Move.to:none", "Run", "Run.steps"}
            | {"Run.steps:0", "Run.chunk_tokens", "Wake", "Request.slo"}
            | ({f"Load.way:{self.way}"} if self.way != "host" else set())
        )
        plan, memory = self.cluster.plan, [gpu.mem_bytes for gpu in self.cluster.gpus]
        work = {m: plan[m].rate_rps * x.tp if m in plan else 0.0 for m, x in self.cluster.models.items()}
        self.nodes = [Node(at, min(memory[g] for g in at)) for at in instances(self.cluster, work)]
        self.at = {g: node for node in self.nodes for g in node.gpus}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Find workers for requests, give turns to workers, and grow, shrink and stop them."""
        match event:
            case Arrived(r):
                self.jobs[r.id] = Job(r)
                yield from self.enter(self.jobs[r.id], view)
            case Woke("again"):
                yield from self.again(view)
            case Woke("idle"):
                yield from self.expire(view.now_s)
            case Prefilled(rid) if (job := self.jobs.get(rid)) and (worker := job.worker):  # a dropped one ends first
                worker.decodes(job, view.request(rid).made_tokens)
            case Preempted(rid) if (job := self.jobs.get(rid)) and (worker := job.worker):
                job.made = view.request(rid).made_tokens
                worker.prompts[rid], worker.queue = job, None
            case Finished(rid):
                yield from self.finished(self.jobs.pop(rid), view)
            case TurnEnded(batch, _, why, steps):
                yield from self.ended(batch, why in ("stuck", "empty"), steps, view)
            case Done(Load(inst), None) if (worker := self.worker(inst)) is not None:
                yield from self.loaded(worker, view)
            case Done(Evict(inst)):
                yield from self.gone(inst, view)

    def loaded(self, worker: Worker, view: View) -> Iterator[Action]:
        """Let a loaded worker take turns, and extend its requests' deadlines by the seconds of the load."""
        worker.loading, worker.queue = False, None
        for job in worker.jobs.values():  # worker.py, delay_requests_due_to_model_loading
            job.excused_s += self.cluster.profile.load_s(worker.batch.inst, self.way)
        yield from self.turn(worker.node, view)

    def gone(self, inst: Inst, view: View) -> Iterator[Action]:
        """Forget an instance whose weights are gone; if it had the turn, begin the next."""
        node = self.node(inst)
        node.leaving.discard(inst.model)
        if node.turn is not None and node.turn.batch.inst == inst and node.turn is not self.worker(inst):
            node.turn = None
            yield from self.turn(node, view)

    def node(self, inst: Inst) -> Node:
        """Return the node of an instance."""
        assert isinstance(inst.place, tuple)
        return self.at[inst.place[0]]

    def worker(self, inst: Inst) -> Worker | None:
        """Return the worker of an instance, unless it is leaving."""
        return self.node(inst).workers.get(inst.model)

    # ------------------------------------------------------------ turns: node.py, schedule

    def turn(self, node: Node, view: View) -> Iterator[Action]:
        """Give the next turn to the worker with the earliest deadline.

        If only one worker is ready, it keeps its turn until another one is.
        """
        ready = [w for m, w in node.workers.items() if w.jobs and not w.loading and m not in node.stuck]
        if node.turn is not None:
            if node.since_s is None and any(w is not node.turn for w in ready):
                node.since_s = view.now_s
                yield Run(node.turn.batch, steps=1, chunk_tokens=0)
            return
        if not ready:
            return
        first = min(ready, key=lambda w: (w.deadline_s(view, self.cluster.profile), w.turns))
        node.turns += 1
        node.turn, first.turns = first, node.turns
        node.since_s = view.now_s if len(ready) > 1 else None
        yield Run(first.batch, steps=self.quota(first) if len(ready) > 1 else None, chunk_tokens=0)

    def quota(self, w: Worker) -> int:
        """Return the number of steps in a worker's turn (released: worker.py, get_recommend_quota_size)."""
        size = w.model.weight_bytes * w.model.tp
        return 1 if w.prompts else next((steps for most, steps in QUOTAS if size < most), 1)

    def ended(self, batch: Batch, stuck: bool, steps: int, view: View) -> Iterator[Action]:
        """End a turn and begin the next."""
        node = self.node(batch.inst)
        worker = node.turn
        if worker is None or worker.batch != batch:
            return
        node.turn, worker.steps = None, worker.steps + steps
        if stuck:
            node.stuck.add(batch.inst.model)
        yield from self.turn(node, view)

    # ------------------------------------------------------------ requests: pool.py, schedule_incoming_request

    def enter(self, job: Job, view: View) -> Iterator[Action]:
        """Put a request into a worker of its model; if none takes it, let it wait and ask again.

        A worker that takes it is tried first, then one that takes it once a neighbour is preempted, then a new worker.
        """
        m, sign = job.request.model, -1 if self.packing else 1
        model = self.cluster.models[m]
        mine = [node.workers[m] for node in self.nodes if m in node.workers]
        mine.sort(key=lambda w: sign * len(w.jobs))
        if w := next((w for w in mine if self.takes(w, job, view)), None):
            yield from self.join(w, job, view)
            return
        for w in mine if self.packing and self.preempt else ():
            if self.takes(w, job, view, memory=False) and (v := self.victim(w, job, view)) is not None:
                yield from self.stop(v, drain=False)
                yield from self.join(w, job, view)
                for other in v.jobs.values():
                    if other.request.id not in v.prompts:
                        yield Move(other.request.id, None)
                    other.made = view.request(other.request.id).made_tokens
                    yield from self.enter(other, view)
                return
        for node in self.order():
            if m in node.workers or m in node.leaving or len(node.gpus) < model.tp or (node.busy and not self.sharing):
                continue
            w = Worker(node, Batch(Inst(m, node.gpus[: model.tp])), model)
            if self.takes(w, job, view):
                node.workers[m] = w
                yield from self.join(w, job, view, Load(w.batch.inst, self.way))
                return
        job.again_s = view.now_s + RETRY_S
        self.waiting[job.request.id] = job
        yield self.next_ask()

    def order(self) -> list[Node]:
        """Return the nodes in the order in which new workers try them; empty nodes are last.

        As in the release (pool.py, try_allocate_worker), nodes are removed from the list while a loop passes through
        it. So of two empty nodes side by side, the second keeps its place.
        """
        nodes = sorted(self.nodes, key=lambda n: n.used, reverse=True)
        if not self.packing:
            nodes.reverse()
        empty = []
        for node in nodes:
            if not node.busy:
                nodes.remove(node)
                empty.append(node)
        return nodes + empty

    def join(self, w: Worker, job: Job, view: View, *first: Action) -> Iterator[Action]:
        """Add a request to a worker, and enlarge the worker's KV memory if the request needs more.

        The actions `first` come before the request is admitted.
        """
        need = self.need(w, job, view)
        if need > w.kv_bytes:  # node.py, check_worker_need_kv_scale_up
            spare = w.node.room - w.node.used + w.kv_bytes
            yield from self.sized(w, max(need, min(self.need(w, job, view, 1 + self.growth), spare)))
        yield from first
        rid = job.request.id
        w.jobs[rid] = w.prompts[rid] = job
        w.idle_s, job.worker, w.queue = math.inf, w, None
        w.node.stuck.discard(w.batch.inst.model)
        yield Admit(rid, w.batch)
        yield from self.turn(w.node, view)

    def sized(self, w: Worker, kv_bytes: int) -> Iterator[Action]:
        """Set the size of a worker's KV memory, in bytes on each of its GPUs."""
        w.kv_bytes = kv_bytes
        assert isinstance(w.batch.inst.place, tuple)
        yield from (Limit(w.batch.inst.model, g, kv_bytes) for g in w.batch.inst.place)

    def again(self, view: View) -> Iterator[Action]:
        """Ask workers again for waiting requests whose time to ask has come; drop those whose deadline has passed."""
        while self.waiting and (job := next(iter(self.waiting.values()))).again_s <= view.now_s:
            rid = job.request.id
            del self.waiting[rid]
            yield from (Drop(rid),) if job.due_s(job.made) < view.now_s else self.enter(job, view)
        yield self.next_ask()

    def next_ask(self) -> Wake:
        """Return the timer for the waiting request that asks next."""
        return Wake(next((job.again_s for job in self.waiting.values()), math.inf), "again")

    def finished(self, job: Job, view: View) -> Iterator[Action]:
        """Forget a request that has ended, and shrink its worker's KV memory if the worker needs much less.

        A worker without requests is stopped after `keep_s` seconds.
        """
        rid, w = job.request.id, job.worker
        self.waiting.pop(rid, None)
        job.worker = None
        if w is None:
            return
        del w.jobs[rid]
        w.prompts.pop(rid, None)
        w.queue = None
        w.node.stuck.clear()
        if w.jobs:
            more = self.need(w, None, view, 1 + self.growth)
            if more < w.kv_bytes / (1 + self.growth):  # worker.py, check_whether_need_kv_scale_in
                yield from self.sized(w, more)
        else:  # its engine's limit stays: a limit of 0 would hold until a request is let in, and would let none in
            w.kv_bytes, w.idle_s = 0, view.now_s
            yield Wake(view.now_s + self.keep_s, "idle")
        yield from self.turn(w.node, view)

    def expire(self, now_s: float) -> Iterator[Action]:
        """Stop the workers that have had no request for `keep_s` seconds."""
        idle = [w for node in self.nodes for w in node.workers.values() if w.idle_s < math.inf]
        for w in idle:
            if now_s >= w.idle_s + self.keep_s:
                yield from self.stop(w, drain=True)
        left_s = [w.idle_s + self.keep_s for w in idle if now_s < w.idle_s + self.keep_s]
        yield Wake(min(left_s, default=math.inf), "idle")

    def stop(self, w: Worker, *, drain: bool) -> Iterator[Action]:
        """Stop a worker. Its requests then have no worker."""
        del w.node.workers[w.batch.inst.model]
        w.node.leaving.add(w.batch.inst.model)
        for job in w.jobs.values():
            job.worker = None
        if w.node.turn is w:
            yield Run(w.batch, steps=0)
        yield Evict(w.batch.inst, drain)

    # ------------------------------------------------------------ the three tests: node.py, can_add_request_to_worker

    def takes(self, w: Worker, job: Job, view: View, *, memory: bool = True) -> bool:
        """Tell whether a worker, which may be new, passes the three tests for taking a request.

        With memory=False the test of memory is left out.
        """
        if memory and self.lacking(w, job, view) > 0:
            return False
        others = (self.part(o, None, view) for o in w.node.workers.values() if o is not w)
        return sum(others) + self.part(w, job, view) <= 1 and self.in_time(w, job, view)

    def lacking(self, w: Worker, job: Job, view: View) -> int:
        """Return the bytes per GPU that a node lacks for a worker to take a request; 0 or less if there is room."""
        need, new = self.need(w, job, view), w.batch.inst.model not in w.node.workers
        if need <= w.kv_bytes:
            return 0
        return w.node.used + (w.model.weight_bytes if new else 0) - w.kv_bytes + need - w.node.room

    def part(self, w: Worker, job: Job | None, view: View) -> float:
        """Divide the seconds of a worker's decode step by its TPOT SLO (in the release: worker.py, update_time_slice).

        If `job` is given, its request counts as if it were on the worker.
        """
        seqs = len(w.jobs) + (job is not None)
        if not seqs or w.model.tpot_slo_s == math.inf:
            return 0.0
        tokens = w.tokens(view, self.cluster.profile) + (job.tokens if job else 0)
        return SAFETY * self.cluster.profile.step_s(w.batch.inst, seqs, tokens) / (MARGIN * w.model.tpot_slo_s)

    def in_time(self, target: Worker, job: Job, view: View) -> bool:
        """Tell whether the prompts of `target`, with `job`, and of the workers after it end before their deadlines.

        The workers of a node prefill one after the other by deadline (node.py, check_prefill_DDLs_with_target_worker).
        While `target` is loading, the answer is True.
        """
        if target.loading:  # its lateness is excused
            return True
        node, profile, prompts = target.node, self.cluster.profile, list[tuple[float, float, bool]]()
        for w in node.workers.values():
            if w.loading or not (w.prompts or w is target):
                continue
            due_s, took_s = w.deadline_s(view, profile), w.queued(profile).took_s
            if w is target:
                due_s = min(due_s, job.due_s(job.made))
                took_s += SAFETY * profile.prefill_s(w.batch.inst, job.tokens)
            prompts.append((due_s, took_s, w is target))
        at_s, matters = node.since_s if node.turn and node.since_s is not None else view.now_s, False
        for due_s, took_s, is_target in sorted(prompts):
            matters, at_s = matters or is_target, at_s + took_s
            if matters and at_s > due_s:
                return False
        return True

    def victim(self, w: Worker, job: Job, view: View) -> Worker | None:
        """Return the neighbour to preempt for a request (node.py, find_memory_preemption_with_target_worker)."""
        lacking = self.lacking(w, job, view)
        others = [v for v in w.node.workers.values() if v is not w and len(v.jobs) <= len(w.jobs) + 1]
        others.sort(key=lambda v: len(v.jobs))
        return next((v for v in others if v.model.weight_bytes + v.kv_bytes >= lacking), None)

    def need(self, w: Worker, job: Job | None, view: View, times: float = 1.0) -> int:
        """Return the KV bytes per GPU that a worker needs (released: worker.py, get_kv_usage).

        If `job` is given, the worker is counted with that request too. The bytes of its tokens are multiplied by
        `times`. The result is at most what the node has beside the weights, so a request that fits alone is taken.
        """
        seqs = len(w.jobs) + (job is not None)
        tokens = w.tokens(view, self.cluster.profile) + (job.tokens if job else 0) + AHEAD * seqs
        size = max(times * (tokens * w.model.kv_token_bytes + seqs * w.model.page_bytes),
                   self.least_tokens * w.model.kv_token_bytes)  # fmt: skip
        pages = math.ceil(min(size, w.node.room - w.model.weight_bytes) / w.model.page_bytes)
        return pages * w.model.page_bytes
