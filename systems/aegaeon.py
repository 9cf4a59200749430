"""Aegaeon: models take turns on GPUs, token by token; some GPUs prefill, the others decode.

Xiang et al., "Aegaeon: Effective GPU Pooling for Concurrent LLM Serving on the Market", SOSP 2025; artifact:
MachineLearningSystem/25SOSP-Aegaeon 1c3b110. An instance is a GPU, or a tensor-parallel group, that holds one model.

    g       a group: at most `group` prompts of one model, prefilled one after the other, first come first served
    d, t_k  target time between tokens (the model's TPOT SLO; 100 ms where it has none); a decode step of batch k
    n_k     d / t_k: how much faster than its target batch k decodes
    c       seconds to switch to each model of a round once
    alpha   1 / (share of tokens that a round can have in time), at least ALPHA
    q_k     turn of batch k: c / (n_k (alpha - sum 1 / n_k)); the slower a batch, the longer
    QMAX    longest turn (`qmax_s`): alpha = max(c / (min n QMAX) + sum 1 / n, ALPHA)

Alg. 1: a prompt joins a group of its model that has room, on any prefill instance; else it opens one at the end of the
queue of the least loaded instance: by estimated seconds of prefill and switches, or (`load=requests`) by prompts.
Alg. 2: its KV goes to host memory and the request to a decode batch of its model that has room for it, else to the
decode instance with fewest batches. A round gives each batch a turn, batches of one model side by side.

A switch is one answer: KV out, weights out, weights in, KV in, run. Its parts, and what of the paper they stand for:
    way       host: component reuse, and weights from pinned memory into a buffer of its own (explicit memory
              management); naive: reuse alone, with an engine's usual loader; reinit: the engine starts anew
    sync      fine-grained KV synchronisation: KV in, KV out and weights overlap, and a batch starts with its first
              request that is there; without it the stages wait for each other
    prefetch  the next model's weights come while this one runs, if both and this one's KV fit; needs `sync`
`refill`: who is prefilled makes room in its group. `estimate`: c by the profile, or the code's, bytes at 15 % of PCIe.
`prefill`: share of instances that prefill (6 of 16 in the paper). `order`: split; or each instance does both, and
prefill or decode goes first: the paper's unified baselines, of which it says no more. Under decode all prompts that
wait are prefilled once nothing is left to decode.

Ours: one model in a round has no switch, so turns of QMAX. Where each instance does both, a prompt goes to one that has
its model to do, else to the one with fewest models. The code's guess of step times leaves the sequences' term out (it
passes a batch of -1): not repeated here. Moves and turns that were refused are mended after the time of a switch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from harness.actions import Action, Admit, Evict, Load, Move, Run, Wake
from harness.algorithms import instances, one_request
from harness.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.types import GIB, Batch, Cluster, Gpus, Host, Infeasible, Inst, Option, Request
from harness.view import View

DECISION_S = 1.6e-5  # mean of 40 models on 16 H100 at 0.3 to 0.5 req/s each, one busy x86-64 core, 2026-11-21

ALPHA = 0.5  # floor of alpha: the paper and decode_scheduler.py
TBT_S = 0.1  # the paper's target, for models without an SLO
LOOKAHEAD = 64  # tokens that a member may grow by before its batch counts as full: decode_scheduler.py
PCIE = {"h800": 64 * GIB}  # bytes a second that the code reckons with, 15 % of them reached; 32 GiB/s elsewhere


def quotas(n: Sequence[float], c: float, qmax_s: float = 4.0) -> list[float]:
    """Seconds of each batch's turn; QMAX for all where nothing is switched (c = 0)."""
    if c <= 0.0:
        return [qmax_s] * len(n)
    total = sum(1 / k for k in n)
    alpha = max(c / (min(n) * qmax_s) + total, ALPHA)
    return [c / (k * (alpha - total)) for k in n]


def active(models: int, rate_rps: float, service_s: float) -> float:
    """Theorem 3.1: models with a request in service at a time, each of so many a second that take so long.

    As many GPUs are busy under scaling by request, which is why it stops at two or three models a GPU.
    """
    return models * -math.expm1(-rate_rps * service_s)


@dataclass(slots=True, eq=False)
class Instance:
    """GPUs that hold one model at a time, and what they have to do."""

    gpus: Gpus
    node: int
    pool: int  # instances that hand requests to each other
    prefills: bool = True
    decodes: bool = True
    groups: deque[Group] = field(default_factory=deque)
    works: list[Work] = field(default_factory=list)
    round: deque[Work] = field(default_factory=deque)  # still to have their turn
    job: Group | Work | None = None  # whose turn it is
    held: list[str] = field(default_factory=list)  # models in, or on their way
    want: tuple[str, ...] = ()  # of these, the one that runs and the next
    stages: deque[list[Action]] = field(default_factory=deque)  # of a switch under way, without `sync`
    waits: list[Action] = field(default_factory=list)  # what the next stage waits for
    seconds: float = 0.0  # of prefill queued, and the switches between
    queued: int = 0  # prompts
    owed: int = 0  # groups that waited when the last decode ended, where decode goes first
    cut: bool = False  # the turn was asked to end
    rests_s: float = -math.inf  # a turn that could do nothing is followed at once, but not twice in so long


@dataclass(slots=True, eq=False)
class Group:
    """Prompts of one model that are prefilled one after the other."""

    at: Instance
    batch: Batch
    switch_s: float
    rids: dict[int, float] = field(default_factory=dict)  # not yet prefilled: seconds of each
    joined: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """A decode batch: requests of one model that decode together."""

    at: Instance
    batch: Batch
    rids: dict[int, None] = field(default_factory=dict)
    ctx: int = 0  # tokens of context in all
    t: float = math.inf  # seconds of a step, at the start of the round
    q: float = 0.0  # what is left of its turn in this round
    home: bool = False  # its KV is to be on the GPUs
    strays: bool = False  # ... some of it is, though it is not to be


@dataclass(slots=True)
class Aegaeon:
    """Algorithms 1 and 2, and how an instance switches."""

    cluster: Cluster
    order: str = "split"
    prefill: float = 0.375
    load: str = "seconds"
    group: int = 8
    refill: bool = False
    qmax_s: float = 4.0
    estimate: str = "profile"
    way: str = "host"
    sync: bool = True
    prefetch: bool = True
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged", "preempt": "swap"}, init=False)
    all: list[Instance] = field(init=False)
    by_gpu: dict[int, Instance] = field(init=False)
    room: Mapping[str, int] = field(init=False)  # tokens of KV beside a model's weights
    switch_s: Mapping[str, float] = field(init=False)
    groups: dict[str, list[Group]] = field(init=False)  # by model, in order of forming
    where: dict[int, Group | Work] = field(default_factory=dict, init=False)
    tokens: dict[int, int] = field(default_factory=dict, init=False)  # of a request when it was last (to be) prefilled
    refused: dict[int, None] = field(default_factory=dict, init=False)  # requests to admit again

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "released": {"load": "requests", "refill": True, "estimate": "released"},
        "prefill-first": {"order": "prefill"},
        "decode-first": {"order": "decode"},
        "no-prefetch": {"prefetch": False},
        "no-sync": {"prefetch": False, "sync": False},
        "no-memory": {"prefetch": False, "sync": False, "way": "naive"},
        "no-reuse": {"prefetch": False, "sync": False, "way": "reinit"},
    }
    choices: ClassVar[Mapping[str, tuple[Option, ...]]] = {
        "order": ("split", "prefill", "decode"),
        "load": ("seconds", "requests"),
        "estimate": ("profile", "released"),
        "way": ("host", "naive", "reinit", "sleep", "pool", "disk", "cold"),
    }
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "prefill": (0.05, 0.95), "group": (1, 256), "qmax_s": (0.1, 60.0),
    }  # fmt: skip

    def __post_init__(self) -> None:
        models, profile, gpu = self.cluster.models, self.cluster.profile, self.cluster.gpus[0]
        self.hears = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded})
        self.hears |= set() if self.sync else {Load, Move}
        self.uses = frozenset(
            {"Load", "Evict", "Evict.drain", "Admit", "Move", "Move.to:host", "Move.to:gpu", "Run", "Run.phase:prefill",
             "Run.phase:decode", "Run.for_s", "Run.steps", "Run.seqs", "Wake", "Request.slo"}
            | ({"Run.steps:0"} if self.order == "prefill" else set())
            | ({f"Load.way:{self.way}"} if self.way != "host" else set())
        )  # fmt: skip
        for m, model in models.items():
            if gpu.mem_bytes - model.weight_bytes < one_request(model):
                raise Infeasible(f"{m} and one longest request do not fit {model.tp} GPU(s)")
        self.room = {m: (gpu.mem_bytes - x.weight_bytes) // x.kv_token_bytes for m, x in models.items()}
        self.groups = {m: [] for m in models}
        self.switch_s = {m: profile.load_s(Inst(m, tuple(range(x.tp))), self.way) for m, x in models.items()}
        if self.estimate == "released":
            speed = 0.15 * PCIE.get(gpu.kind, 32 * GIB)
            self.switch_s = {m: x.weight_bytes / speed for m, x in models.items()}
        self.all = self.divide()
        self.by_gpu = {g: x for x in self.all for g in x.gpus}

    def divide(self) -> list[Instance]:
        """Instances, those that prefill first in each node; over all nodes where one has a single instance."""
        nodes = [g.node for g in self.cluster.gpus]
        cut = instances(self.cluster, {m: self.rate(m) for m in self.cluster.models}, 1 if self.order != "split" else 2)
        found = [Instance(gpus, nodes[gpus[0]], nodes[gpus[0]]) for gpus in cut]
        for size in {len(x.gpus): None for x in found} if self.order == "split" else ():
            same = [x for x in found if len(x.gpus) == size]
            if len(same) < 2 and size == len(found[0].gpus):
                raise Infeasible(f"one instance of {size} GPU(s) cannot both prefill and decode under order=split")
            if any(sum(x.node == y.node for y in same) < 2 for x in same):
                for x in same:
                    x.pool = -1
            for pool in {x.pool: None for x in same}:
                here = [x for x in same if x.pool == pool]
                p = min(max(1, round(self.prefill * len(here))), len(here) - 1)
                for k, x in enumerate(here):
                    x.prefills, x.decodes = k < p, k >= p
        return found

    def rate(self, m: str) -> float:
        """GPU-requests a second that a model's forecast asks for."""
        plan = self.cluster.plan.get(m)
        return (plan.rate_rps if plan else 0.0) * self.cluster.models[m].tp

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Requests come, pass from prefill to decode and go; a turn ends and the next one begins."""
        match event:
            case Arrived(request):
                return self.arrived(request, view)
            case Prefilled(rid):
                return self.prefilled(rid, view)
            case Finished(rid):
                self.leave(rid)
                self.tokens.pop(rid, None)
            case TurnEnded(batch, phase, why):
                return self.ended(batch, phase, why, event.ran_s, view)
            case Preempted(rid) if view.request(rid).home is None:
                return self.lost(rid, view)
            case Done(action, failed):
                return self.done(action, failed, view)
            case Woke("mend"):
                return self.mend(view)
            case Woke("start"):
                return self.start()
        return ()

    def start(self) -> Iterator[Action]:
        """Each instance starts with a model, those of the highest rates first."""
        for role in ("prefills", "decodes") if self.order == "split" else ("prefills",):
            models = sorted(self.cluster.models, key=lambda m: -self.rate(m))
            for k, x in enumerate([x for x in self.all if getattr(x, role)]):
                m = next(m for m in models[k % len(models) :] + models if self.cluster.models[m].tp <= len(x.gpus))
                x.held, x.want = [m], (m,)
                yield Load(self.batch(x, m).inst, self.way)

    def batch(self, x: Instance, m: str, tag: int = 0) -> Batch:
        """A batch of model m on an instance."""
        return Batch(Inst(m, x.gpus[: self.cluster.models[m].tp]), tag)

    # ------------------------------------------------------------ Algorithm 1: prefill

    def arrived(self, r: Request, view: View) -> Iterator[Action]:
        """A prompt joins a group."""
        self.tokens[r.id] = r.prompt_tokens
        yield from self.join(r.id, r.model, view)

    def join(self, rid: int, m: str, view: View) -> Iterator[Action]:
        """A prompt joins a group of its model that has room, or opens one on the least loaded instance."""
        g = next((g for g in self.groups[m] if (len(g.rids) if self.refill else g.joined) < self.group), None)
        if g is None:
            tp = self.cluster.models[m].tp
            x = min((x for x in self.all if x.prefills and len(x.gpus) >= tp), key=lambda x: self.busy(x, m))
            last = x.groups[-1].batch.inst.model if x.groups else x.want[0] if x.want else None
            taken = {g.batch.tag for g in self.groups[m] if g.at is x}
            tag = next(k for k in range(len(taken) + 1) if 2 * k + 1 not in taken)
            g = Group(x, self.batch(x, m, 2 * tag + 1), 0.0 if last == m else self.switch_s[m])
            x.seconds += g.switch_s
            x.groups.append(g)
            self.groups[m].append(g)
        x = g.at
        g.rids[rid] = self.cluster.profile.prefill_s(g.batch.inst, self.tokens[rid])
        g.joined += 1
        x.seconds += g.rids[rid]
        x.queued += 1
        self.where[rid] = g
        yield Admit(rid, g.batch)
        if x.job is None:
            yield from self.next(x, view)
        elif self.order == "prefill" and isinstance(x.job, Work) and not x.cut and not x.stages:
            x.cut = True
            yield Run(x.job.batch, "decode", steps=0)

    def busy(self, x: Instance, m: str) -> tuple[float, ...]:
        """How loaded an instance is, for a new group of model m."""
        if self.order != "split":
            models = {g.batch.inst.model for g in x.groups} | {w.batch.inst.model for w in x.works}
            return float(m not in models), float(len(models)), x.seconds
        return (x.seconds,) if self.load == "seconds" else (float(x.queued),)

    def leave(self, rid: int) -> None:
        """A request is in its group or batch no more."""
        job = self.where.pop(rid, None)
        if isinstance(job, Group):
            x = job.at
            x.seconds -= job.rids.pop(rid)
            x.queued -= 1
            if not job.rids and job is not x.job:
                self.close(job)
        elif job is not None:
            job.ctx -= job.ctx // len(job.rids)
            del job.rids[rid]
            if not job.rids and job is not job.at.job:
                job.at.works.remove(job)

    def close(self, g: Group) -> None:
        """A group has no prompt left."""
        g.at.seconds = g.at.seconds - g.switch_s if len(g.at.groups) > 1 else 0.0
        g.at.groups.remove(g)
        g.at.owed = max(0, g.at.owed - 1)
        self.groups[g.batch.inst.model].remove(g)

    # ------------------------------------------------------------ Algorithm 2: decode

    def prefilled(self, rid: int, view: View) -> Iterator[Action]:
        """A request's KV goes to the host, the request to a decode batch; if that one runs, the KV goes on to it."""
        g = self.where.get(rid)
        if not isinstance(g, Group):
            return
        self.leave(rid)
        w = self.dispatch(g.at, g.batch.inst.model, self.tokens[rid] + 1)
        w.rids[rid] = None
        w.ctx += self.tokens[rid] + 1
        self.where[rid] = w
        yield Admit(rid, w.batch)
        if w.at is g.at and not self.crowded(w.at, w.batch.inst.model):
            w.strays = True
        else:
            yield Move(rid, Host(w.at.node))
            if w.home:
                yield Move(rid, w.batch.inst.place)
        if w.at.job is None:
            yield from self.next(w.at, view)

    def dispatch(self, x: Instance, m: str, tokens: int) -> Work:
        """A decode batch of model m with room, or a new one where batches are fewest."""
        fit = [y for y in self.all if y.decodes and len(y.gpus) >= self.cluster.models[m].tp]
        near = [x] if x.decodes else [y for y in fit if y.pool == x.pool] or fit
        for y in near:
            for w in y.works:
                if w.batch.inst.model == m and self.fits(w, tokens):
                    return w
        y = min(near, key=lambda y: len(y.works))
        taken = {w.batch.tag for w in y.works if w.batch.inst.model == m}
        w = Work(y, self.batch(y, m, 2 * next(k for k in range(len(taken) + 1) if 2 * k not in taken)))
        y.works.append(w)
        return w

    def fits(self, w: Work, tokens: int) -> bool:
        """Whether a batch still fits memory with one request more."""
        return w.ctx + tokens + LOOKAHEAD * (len(w.rids) + 1) <= self.room[w.batch.inst.model]

    def crowded(self, x: Instance, m: str) -> bool:
        """Whether KV of model m on an instance that also prefills leaves no room for a longest prompt."""
        here = [w for w in x.works if w.batch.inst.model == m and (w.home or w.strays)]
        used = sum(w.ctx + LOOKAHEAD * len(w.rids) for w in here)
        return used + self.cluster.models[m].max_tokens + LOOKAHEAD > self.room[m]

    def begin_round(self, x: Instance, view: View) -> Iterator[Action]:
        """Batches formed anew where a model has several; those of one model side by side; and their quotas."""
        models = list(dict.fromkeys(w.batch.inst.model for w in x.works))
        if len(models) < len(x.works):
            yield from self.reform(x, models, view)
        x.works.sort(key=lambda w: models.index(w.batch.inst.model))
        n = []
        for w in x.works:
            w.t = self.cluster.profile.step_s(w.batch.inst, len(w.rids), w.ctx)
            d = self.cluster.models[w.batch.inst.model].tpot_slo_s
            n.append((d if d < math.inf else TBT_S) / w.t)
        c = sum(self.switch_s[m] for m in models) if len(models) > 1 else 0.0
        for w, q in zip(x.works, quotas(n, c, self.qmax_s), strict=True):
            w.q = q
        x.round = deque(x.works)

    def reform(self, x: Instance, models: Sequence[str], view: View) -> Iterator[Action]:
        """First come, first served into the first batch that has room."""
        for m in models:
            works = [w for w in x.works if w.batch.inst.model == m]
            length = {rid: self.tokens[rid] + view.request(rid).made_tokens for w in works for rid in w.rids}
            if len(works) < 2:
                continue
            for w in works:
                w.rids, w.ctx = {}, 0
            for rid in sorted(length):
                old = self.where[rid]
                assert isinstance(old, Work)
                w = next((w for w in works if not w.rids or self.fits(w, length[rid])), old)
                w.rids[rid] = None
                w.ctx += length[rid]
                if w is not old:
                    w.strays, w.home = w.strays or w.home or old.strays or old.home, False
                    self.where[rid] = w
                    yield Admit(rid, w.batch)
        x.works = [w for w in x.works if w.rids]

    # ------------------------------------------------------------ turns and switches

    def ended(self, batch: Batch, phase: str, why: str, ran_s: float, view: View) -> Iterator[Action]:
        """A turn is over: the next one."""
        x = self.by_gpu[batch.inst.place[0]]  # type: ignore[index]
        job = x.job
        if job is None or job.batch != batch or x.stages:
            return
        x.job, x.cut = None, False
        idle = why == "stuck" or (why == "empty" and bool(job.rids))
        if isinstance(job, Group):
            if not job.rids:
                self.close(job)
        elif not job.rids:
            x.works.remove(job)
        else:
            s = view.batch(batch)
            job.ctx = s.ctx_tokens * len(job.rids) // s.decoding if s.decoding else job.ctx
            job.q -= ran_s
            if why == "steps" and job.q > 0.0:
                x.round.appendleft(job)
            if idle:
                job.home, job.strays = False, True  # not all KV came
        if idle and view.now_s < x.rests_s:
            yield Wake(x.rests_s, "mend")
            return
        if idle:
            x.rests_s = view.now_s + min(self.switch_s.values())
        yield from self.next(x, view)

    def next(self, x: Instance, view: View) -> Iterator[Action]:
        """Whose turn it is, and the switch to it."""
        group = x.groups[0] if x.groups else None
        if self.order == "decode" and not x.works:
            x.owed = len(x.groups)
        if group is None or (x.works and self.order != "prefill" and not x.owed):
            while x.round and x.round[0] not in x.works:
                x.round.popleft()
            if not x.round and x.works:
                yield from self.begin_round(x, view)
            if x.round:
                x.job = x.round.popleft()
        if x.job is None:
            x.job = group
        if x.job is not None:
            yield from self.switch(x, x.job)

    def switch(self, x: Instance, job: Group | Work) -> Iterator[Action]:
        """KV out, weights out, weights in, KV in, run; and what to prefetch."""
        new, host = job.batch.inst.model, Host(x.node)
        stays = isinstance(job, Group) and not self.crowded(x, new)
        out: list[Action] = []
        for w in x.works:
            if w is not job and (w.home or w.strays) and not (stays and w.batch.inst.model == new):
                w.home = w.strays = False
                out.append(Move(w.batch, host))
        soon = self.soon(x, job)
        x.want = (new, soon) if soon else (new,)
        load = list(self.clear(x))
        if new not in x.held:
            x.held.append(new)
            load.append(Load(job.batch.inst, self.way))
        if isinstance(job, Group):
            into: list[Action] = []
            run = Run(job.batch, "prefill", steps=self.group, seqs=1)
        else:
            into = [] if job.home else [Move(job.batch, job.batch.inst.place)]
            job.home, job.strays = True, False
            run = Run(job.batch, "decode", for_s=job.q)
        ahead: list[Action] = []
        if soon and soon not in x.held:
            x.held.append(soon)
            ahead.append(Load(self.batch(x, soon).inst, self.way))
        if self.sync:
            yield from (*out, *load, *into, run, *ahead)
        else:
            x.stages = deque([out, load, into, [run]])
            yield from self.advance(x)

    def clear(self, x: Instance) -> Iterator[Action]:
        """Models that have no business here go."""
        for m in [m for m in x.held if m not in x.want]:
            x.held.remove(m)
            yield Evict(self.batch(x, m).inst, drain=False)

    def advance(self, x: Instance) -> Iterator[Action]:
        """Without fine-grained synchronisation: the next stages of a switch, up to one that has to be waited for."""
        while x.stages and not x.waits:
            stage = x.stages.popleft()
            x.waits = [a for a in stage if isinstance(a, Move | Load)]
            yield from stage

    def soon(self, x: Instance, job: Group | Work) -> str | None:
        """The next model, if its weights fit beside this one's and the KV of this turn."""
        if not (self.prefetch and self.sync):
            return None
        m, models = job.batch.inst.model, self.cluster.models
        queue = (*x.round, *x.works) if isinstance(job, Work) else x.groups
        soon = next((y.batch.inst.model for y in queue if y.batch.inst.model != m), None)
        if soon is None or models[soon].tp != models[m].tp:
            return None
        here = [w for w in x.works if w.batch.inst.model == m]
        grows = LOOKAHEAD
        if isinstance(job, Work):
            grows += math.ceil(job.q / job.t)
        kv = sum(w.ctx + grows * len(w.rids) for w in here) * models[m].kv_token_bytes + one_request(models[m])
        fits = models[m].weight_bytes + kv + models[soon].weight_bytes <= self.cluster.gpus[x.gpus[0]].mem_bytes
        return soon if fits else None

    # ------------------------------------------------------------ what went otherwise

    def done(self, action: Action, failed: str | None, view: View) -> Iterator[Action]:
        """A stage of a switch is over; or something could not be done."""
        later = view.now_s + min(self.switch_s.values())
        match action:
            case Load(Inst(m, tuple(place))):
                x = self.by_gpu[place[0]]
                if failed is not None and m in x.held:
                    x.held.remove(m)
            case Evict(Inst(m, tuple(place)) as inst) if view.weights(inst) in ("loading", "in"):
                x = self.by_gpu[place[0]]  # it was to come next, and is not to any more
                if m not in x.held:
                    x.held.append(m)
                    yield Wake(later if view.weights(inst) == "loading" else view.now_s, "mend")
            case Move(who):
                w = self.where.get(who) if isinstance(who, int) else self.named(who)
                if isinstance(w, Work) and failed is not None:
                    w.home, w.strays = False, True
                x = w.at if w else self.all[0]
            case Admit(int(rid)) if rid in self.where:
                self.refused[rid] = None
                yield Wake(later, "mend")
                return
            case Run(batch, steps=steps) if steps != 0:
                x = self.by_gpu[batch.inst.place[0]]  # type: ignore[index]
                if x.job is not None and x.job.batch == batch:
                    x.job = None
                    yield Wake(later, "mend")
                return
            case _:
                return
        if action in x.waits:
            x.waits.remove(action)
            yield from self.advance(x)

    def named(self, batch: Batch) -> Work | None:
        """The decode batch of that name."""
        works = self.by_gpu[batch.inst.place[0]].works  # type: ignore[index]
        return next((w for w in works if w.batch == batch), None)

    def lost(self, rid: int, view: View) -> Iterator[Action]:
        """A request's KV found no place: what it had is prefilled again."""
        w = self.where.get(rid)
        if isinstance(w, Work):
            self.leave(rid)
            self.tokens[rid] += view.request(rid).made_tokens
            yield from self.join(rid, w.batch.inst.model, view)

    def mend(self, view: View) -> Iterator[Action]:
        """Refused requests are admitted again, instances without a turn get one."""
        refused, self.refused = self.refused, {}
        for rid in refused:
            if job := self.where.get(rid):
                yield Admit(rid, job.batch)
                if isinstance(job, Work) and job.home:
                    yield Move(rid, job.batch.inst.place)
        for x in self.all:
            yield from self.clear(x)
            if x.job is None:
                yield from self.next(x, view)
