"""Aegaeon: models take turns on GPUs, token by token; some GPUs prefill, the others decode.

Xiang et al., "Aegaeon: Effective GPU Pooling for Concurrent LLM Serving on the Market", SOSP 2025; artifact:
MachineLearningSystem/25SOSP-Aegaeon 1c3b110. An instance is a GPU, or a tensor-parallel group, that holds one model.

    d, t_k  target time between tokens (the model's TPOT SLO, or 100 ms); seconds of a decode step of batch k
    n_k     d / t_k: how much faster than its target batch k decodes
    c       seconds to switch once to each model of a round
    alpha   1 / (share of tokens that a round can have in time): max(c / (min n QMAX) + sum 1 / n, ALPHA)
    q_k     turn of batch k: c / (n_k (alpha - sum 1 / n_k)), at most QMAX (`qmax_s`); slower batches have longer turns

Algorithm 1: a group is up to `group` prompts of one model, prefilled one by one, first come first served. A prompt
joins a group of its model with room. If there is none, it opens one at the end of the queue of the least loaded
instance: the one with fewest estimated seconds of prefill and switches or, with `load=requests`, fewest prompts. With
`refill`, prefilled prompts make room in their group. `prefill` is the share of instances that prefill.
Algorithm 2: a prefilled request's KV goes to host memory. The request joins a decode batch of its model with room, or a
new one on the decode instance with fewest batches. A round gives each batch a turn, batches of one model side by side.
Both use only one node for a model: model k lives on node k mod nodes (the code's llm.py). So its batches stay whole.

A switch is one answer (`begin`). Its parts, and what they stand for in the paper:
    way       host: engine components are reused, and weights come from pinned memory into a buffer of their own
              (explicit memory management); naive: only reuse, with an engine's usual loader; reinit: a new engine
    sync      fine-grained KV synchronisation: KV out, KV in and weights overlap, and a batch starts once its first
              request is there; without it, each stage waits for the one before
    prefetch  the next model's weights come while this one runs, if both and this one's KV fit; needs `sync`
`estimate`: c comes from the profile or, as in the code, from bytes at 15 % of PCIe. `order`: split; or each instance
does both, and prefill or decode goes first. These are the paper's unified baselines, of which it says no more. With
decode first, all waiting groups are prefilled once nothing is left to decode.

Ours: a round of one model has no switch, so its turns are QMAX. Where each instance does both, a prompt goes to one
that has work for its model, else to the one with fewest models. The code's estimate of step times ignores the number of
sequences (it passes a batch of -1); this is not repeated. After a turn that could do nothing, all KV goes to the host.
If there was no KV to send, the turn is tried again after the time of the shortest switch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import instances, one_request
from harness.policy.slot import Slot
from harness.policy.types import GIB, Batch, Cluster, Gpus, Host, Infeasible, Inst, Option
from harness.policy.view import View

DECISION_S = 1.6e-5  # mean of 40 models on 16 H100 at 0.3 to 0.5 req/s each, one busy x86-64 core, 2026-11-21

ALPHA = 0.5  # floor of alpha: the paper and decode_scheduler.py
TBT_S = 0.1  # the paper's target, for models without an SLO
LOOKAHEAD = 64  # tokens that a member may grow by before its batch counts as full: decode_scheduler.py, batch_lookahead
PCIE = {"h800": 64 * GIB}  # bytes/s of utils.py, pcie_bandwidth_in_bytes, 15 % of them reached; 32 GiB/s elsewhere


def quotas(n: Sequence[float], c: float, qmax_s: float = 4.0) -> list[float]:
    """Return the seconds of each batch's turn in a round, q_k; without switches (c = 0) every turn is `qmax_s`."""
    if c <= 0.0:
        return [qmax_s] * len(n)
    total = sum(1 / k for k in n)
    alpha = max(c / (min(n) * qmax_s) + total, ALPHA)
    return [c / (k * (alpha - total)) for k in n]


def phases(cluster: Cluster, work: Mapping[str, float], share: float | None) -> Iterator[tuple[Gpus, bool, bool]]:
    """Yield each instance's GPUs, whether it prefills, and whether it decodes.

    Without a `share` every instance does both. Otherwise, among the instances of each size on each node, the first
    `share` prefill and the others decode, at least one each. If some node has a single instance of a size, that size is
    split over all nodes together. Raises Infeasible if there is only one instance of the largest size.
    """
    cut = instances(cluster, work, 1 if share is None else 2)
    if share is None:
        yield from ((gpus, True, True) for gpus in cut)
        return
    for size in {len(gpus): None for gpus in cut}:
        nodes: dict[int, list[Gpus]] = {}
        for gpus in (gpus for gpus in cut if len(gpus) == size):
            nodes.setdefault(cluster.gpus[gpus[0]].node, []).append(gpus)
        pools = list(nodes.values())
        for pool in pools if min(map(len, pools)) > 1 else [list(chain(*pools))]:
            if len(pool) < 2 and size == len(cut[0]):
                raise Infeasible(f"one instance of {size} GPU(s) cannot both prefill and decode")
            first = min(max(1, round(share * len(pool))), len(pool) - 1)
            yield from ((gpus, k < first, k >= first) for k, gpus in enumerate(pool))


@dataclass(slots=True, eq=False)
class Group:
    """Prompts of one model that are prefilled one after the other."""

    at: Instance
    batch: Batch
    rids: dict[int, float] = field(default_factory=dict)  # requests not yet prefilled, with the seconds of each
    joined: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """Requests of one model that decode together."""

    at: Instance
    batch: Batch
    rids: dict[int, None] = field(default_factory=dict)
    ctx: int = 0  # tokens of context in all
    t: float = math.inf  # seconds of a step, at the start of the round
    q: float = 0.0  # seconds left of its turn in this round


@dataclass(slots=True, eq=False)
class Instance(Slot):
    """GPUs that hold one model at a time, with their prefill groups and decode batches."""

    prefills: bool = True
    decodes: bool = True
    host: Host = field(init=False)  # where KV goes
    home: dict[Batch, None] = field(default_factory=dict)  # batches whose KV is on the GPUs
    stages: deque[list[Action]] = field(default_factory=deque)  # left of a switch under way, without `sync`
    waits: list[Action] = field(default_factory=list)  # actions that the next stage waits for
    groups: deque[Group] = field(default_factory=deque)
    works: list[Work] = field(default_factory=list)
    round: deque[Work] = field(default_factory=deque)  # batches whose turn is still to come
    job: Group | Work | None = None  # has its turn now
    owed: int = 0  # order=decode: groups left of those that waited when the last batch ended

    def __post_init__(self) -> None:
        self.host = Host(self.node)

    def out(self, stay: Container[Batch] = ()) -> list[Action]:
        """Return moves to host memory for the KV of all batches on the GPUs except `stay`, and record that it left."""
        gone = [batch for batch in self.home if batch not in stay]
        for batch in gone:
            del self.home[batch]
        return [Move(batch, self.host) for batch in gone]

    def take(self, rid: int, batch: Batch, view: View) -> list[Action]:
        """Return the moves that bring a request's KV to its batch's KV: to host memory or, through it, to the GPUs."""
        now = view.request(rid).home
        path = (self.host, batch.inst.place) if batch in self.home else (self.host,)
        return [Move(rid, place) for place in path if place != now] if now != path[-1] else []

    def advance(self) -> Iterator[Action]:
        """Yield the actions of a switch's next stages, up to and including the first that takes time."""
        while self.stages and not self.waits:
            stage = self.stages.popleft()
            self.waits = [a for a in stage if isinstance(a, Move | Load)]
            yield from stage

    def done(self, action: Action) -> Iterator[Action]:
        """Note that an action has ended, and continue this instance's switch if it was waiting for it."""
        if action in self.waits:
            self.waits.remove(action)
            yield from self.advance()


@dataclass(slots=True)
class Aegaeon:
    """Aegaeon's policy: Algorithm 1 for prefills and Algorithm 2 for decodes."""

    cluster: Cluster
    order: str = choice("split", "prefill", "decode")
    prefill: float = number(0.375, 0.05, 0.95)  # 3 of a node's 8 GPUs: benchmark_e2e.py, num_prefill_engines
    load: str = choice("seconds", "requests")
    group: int = number(8, 1, 256)  # prefill_scheduler.py, max_group_size
    refill: bool = False
    qmax_s: float = number(4.0, 0.1, 60)  # decode_scheduler.py, max_batch_quota
    estimate: str = choice("profile", "released")
    way: str = choice("host", "naive", "reinit", "sleep", "pool", "disk", "cold")
    sync: bool = True
    prefetch: bool = True
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(
        default_factory=lambda: {"kv": "paged", "preempt": "swap", "process": "gpu"}, init=False
    )
    all: list[Instance] = field(init=False)
    on_gpu: dict[int, Instance] = field(init=False)
    prefill_at: dict[str, list[Instance]] = field(default_factory=dict, init=False)  # instances that prefill a model
    decode_at: dict[str, list[Instance]] = field(default_factory=dict, init=False)
    room: Mapping[str, int] = field(init=False)  # tokens of KV beside a model's weights
    switch_s: Mapping[str, float] = field(init=False)
    groups: dict[str, list[Group]] = field(init=False)  # by model, in order of forming
    where: dict[int, Group | Work] = field(default_factory=dict, init=False)
    tokens: dict[int, int] = field(default_factory=dict, init=False)  # of a request's latest prefill, done or to come

    leaves_idle: ClassVar[str] = (
        "a new group goes to the end of the queue of the least loaded prefill instance, which takes one group after "
        "the other. GPUs that decode prefill nothing (SOSP 2025, Alg. 1; artifact 1c3b110, prefill_dispatcher.py)"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "released": {"load": "requests", "refill": True, "estimate": "released"},
        "prefill-first": {"order": "prefill"},
        "decode-first": {"order": "decode"},
        "no-prefetch": {"prefetch": False},
        "no-sync": {"prefetch": False, "sync": False},
        "no-memory": {"prefetch": False, "sync": False, "way": "naive"},
        "no-reuse": {"prefetch": False, "sync": False, "way": "reinit"},
    }

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
        self.room = {m: (gpu.mem_bytes - x.weight_bytes) // x.kv_token_bytes for m, x in models.items()}
        self.groups = {m: [] for m in models}
        self.switch_s = {m: profile.load_s(Inst(m, tuple(range(x.tp))), self.way) for m, x in models.items()}
        if self.estimate == "released":
            speed = 0.15 * PCIE.get(gpu.kind, 32 * GIB)
            self.switch_s = {m: x.weight_bytes / speed for m, x in models.items()}
        work = {m: self.cluster.plan[m].rate_rps * x.tp if m in self.cluster.plan else 0.0 for m, x in models.items()}
        share = self.prefill if self.order == "split" else None
        self.all = [
            Instance(self.cluster, gpus, prefills=p, decodes=d) for gpus, p, d in phases(self.cluster, work, share)
        ]
        self.on_gpu = {g: x for x in self.all for g in x.gpus}
        for k, m in enumerate(models):
            fit = [x for x in self.all if x.fits(m)]
            hosts = list(dict.fromkeys(x.host for x in fit))
            near = [x for x in fit if x.host == hosts[k % len(hosts)]]
            both = any(x.prefills for x in near) and any(x.decodes for x in near)
            homes = near if both else fit
            self.prefill_at[m] = [x for x in homes if x.prefills]
            self.decode_at[m] = [x for x in homes if x.decodes]

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Handle requests that arrive, end their prefill or finish; begin the next turn when one ends."""
        match event:
            case Arrived(request):
                return self.join(request.id, request.model, request.prompt_tokens, view)
            case Prefilled(rid):
                return self.prefilled(rid, view)
            case Finished(rid):
                self.leave(rid)
                self.tokens.pop(rid, None)
            case TurnEnded():
                return self.ended(event, view)
            case Preempted(rid) if view.request(rid).home is None:
                return self.lost(rid, view)
            case Done(action):
                return (a for x in self.all for a in x.done(action))
            case Woke("again"):
                return (a for x in self.all if x.job is None for a in self.next(x, view))
        return ()

    def batch(self, x: Instance, m: str, others: Iterable[Group | Work], first: int = 0) -> Batch:
        """Return a new batch of model m on an instance, with the first free tag of first, first + 2, first + 4 ...

        A tag is free if no batch of `others` has it on that instance.
        """
        inst = x.inst(m)
        taken = {y.batch.tag for y in others if y.batch.inst == inst}
        return x.batch(m, next(tag for tag in count(first, 2) if tag not in taken))

    # ------------------------------------------------------------ Algorithm 1: prefill

    def join(self, rid: int, m: str, tokens: int, view: View) -> Iterator[Action]:
        """Add a prompt to a group of its model that has room, or to a new one on the least loaded instance."""
        self.tokens[rid] = tokens
        g = next((g for g in self.groups[m] if (len(g.rids) if self.refill else g.joined) < self.group), None)
        if g is None:
            x = min(self.prefill_at[m], key=lambda x: self.busy(x, m))
            g = Group(x, self.batch(x, m, self.groups[m], 1))
            x.groups.append(g)
            self.groups[m].append(g)
        x = g.at
        g.rids[rid] = self.cluster.profile.prefill_s(g.batch.inst, tokens)
        g.joined += 1
        self.where[rid] = g
        yield Admit(rid, g.batch)
        if x.job is None:
            yield from self.next(x, view)
        elif self.order == "prefill" and isinstance(x.job, Work) and view.lane(x.job.batch, "decode"):
            yield Run(x.job.batch, "decode", steps=0)

    def busy(self, x: Instance, m: str) -> float:
        """Return the load of an instance; a new group for model m goes to the instance with the least.

        With order=split it is the instance's seconds of prefill and switches or, with load=requests, its number of
        prompts. Otherwise it is 0 if the instance has work for model m, else 1 + the number of its models.
        """
        if self.order != "split":
            models = {g.batch.inst.model for g in x.groups} | {w.batch.inst.model for w in x.works}
            return 0 if m in models else 1 + len(models)
        if self.load == "requests":
            return sum(len(g.rids) for g in x.groups)
        prefill_s = switch_s = 0.0
        before = x.model
        for g in x.groups:
            prefill_s += sum(g.rids.values())
            if before not in (model := g.batch.inst.model, None):
                switch_s += self.switch_s[model]
            before = model
        return prefill_s + switch_s

    def leave(self, rid: int) -> None:
        """Remove a request from its group or batch; close the group or batch if it is empty and it is not its turn."""
        job = self.where.pop(rid, None)
        if job is None:
            return
        if isinstance(job, Work):
            job.ctx -= job.ctx // len(job.rids)
        job.rids.pop(rid)
        if not job.rids and job is not job.at.job:
            self.close(job)

    def close(self, job: Group | Work) -> None:
        """Remove a group or batch that has no request left."""
        if isinstance(job, Work):
            job.at.works.remove(job)
            job.at.home.pop(job.batch, None)
        else:
            job.at.groups.remove(job)
            self.groups[job.batch.inst.model].remove(job)

    # ------------------------------------------------------------ Algorithm 2: decode

    def prefilled(self, rid: int, view: View) -> Iterator[Action]:
        """Give a prefilled request to a decode batch.

        Its KV cache goes to host memory, and from there to the GPUs if the batch's KV is on them.
        """
        g = self.where.get(rid)
        if not isinstance(g, Group):
            return
        self.leave(rid)
        w = self.dispatch(g, self.tokens[rid] + 1)
        w.rids[rid], self.where[rid] = None, w
        w.ctx += self.tokens[rid] + 1
        yield from self.admit(rid, view)
        if w.at.job is None:
            yield from self.next(w.at, view)

    def admit(self, rid: int, view: View) -> Iterator[Action]:
        """Admit a request to its group or batch; for a batch, move the request's KV cache to it as well."""
        if job := self.where.get(rid):
            yield Admit(rid, job.batch)
            if isinstance(job, Work):
                yield from job.at.take(rid, job.batch, view)

    def dispatch(self, g: Group, tokens: int) -> Work:
        """Return a decode batch of the group's model with room, or a new one on the instance with fewest batches."""
        inst = g.batch.inst
        near = [g.at] if g.at.decodes else self.decode_at[inst.model]
        works = (w for x in near for w in x.works if w.batch.inst.model == inst.model and self.fits(w, tokens))
        w = next(works, None)
        if w is None:
            x = min(near, key=lambda x: len(x.works))
            w = Work(x, self.batch(x, inst.model, x.works))
            x.works.append(w)
            if x is g.at:
                x.home[w.batch] = None
        return w

    def fits(self, w: Work, tokens: int) -> bool:
        """Tell whether a batch with one more request, of `tokens` tokens, would still fit in KV memory."""
        return w.ctx + tokens + LOOKAHEAD * (len(w.rids) + 1) <= self.room[w.batch.inst.model]

    def begin_round(self, x: Instance, view: View) -> Iterator[Action]:
        """Begin a round: put batches of one model side by side, and set the quotas of all batches.

        If a model has several batches, its requests are reassigned to them first.
        """
        models = list(dict.fromkeys(w.batch.inst.model for w in x.works))
        if len(models) < len(x.works):
            yield from self.reform(x, view)
        x.works.sort(key=lambda w: models.index(w.batch.inst.model))
        n = []
        for w in x.works:
            w.t = self.cluster.profile.step_s(w.batch.inst, len(w.rids), w.ctx)
            d = self.cluster.models[w.batch.inst.model].tpot_slo_s
            n.append((d if d < math.inf else TBT_S) / w.t)
        c = sum(self.switch_s[m] for m in models) if len(models) > 1 else 0.0
        for w, q in zip(x.works, quotas(n, c, self.qmax_s), strict=True):
            w.q = q
        x.round.extend(x.works)

    def reform(self, x: Instance, view: View) -> Iterator[Action]:
        """Reassign all decoding requests, first come first served, each to its model's first batch that has room."""
        members = sorted((rid, w.batch) for w in x.works for rid in w.rids)
        for w in x.works:
            w.rids, w.ctx = {}, 0
        for rid, old in members:
            tokens = self.tokens[rid] + view.request(rid).made_tokens
            same = [w for w in x.works if w.batch.inst == old.inst]
            w = next(w for w in same if not w.rids or self.fits(w, tokens) or w is same[-1])
            w.rids[rid], self.where[rid] = None, w
            w.ctx += tokens
            if w.batch != old:
                yield from self.admit(rid, view)
        for w in [w for w in x.works if not w.rids]:
            self.close(w)

    # ------------------------------------------------------------ turns

    def ended(self, turn: TurnEnded, view: View) -> Iterator[Action]:
        """End a turn and begin the next one. If the turn could do nothing, first move all KV to host memory."""
        assert isinstance(turn.batch.inst.place, tuple)
        x = self.on_gpu[turn.batch.inst.place[0]]
        job = x.job
        if job is None or job.batch != turn.batch or x.stages:
            return
        x.job = None
        if not job.rids:
            self.close(job)
        elif turn.why in ("stuck", "empty"):
            if view.weights(job.batch.inst) == "out":  # its load failed
                x.models.remove(job.batch.inst.model)
            out = x.out()
            yield from out
            if not out:
                yield Wake(view.now_s + min(self.switch_s.values()), "again")
                return
        elif isinstance(job, Work):
            s = view.batch(job.batch)
            job.ctx = s.ctx_tokens * len(job.rids) // s.decoding if s.decoding else job.ctx
            job.q -= turn.ran_s
            if turn.why == "steps" and job.q > 0.0:  # a prompt came
                x.round.appendleft(job)
        yield from self.next(x, view)

    def next(self, x: Instance, view: View) -> Iterator[Action]:
        """Choose the group or batch that has the next turn, and switch to its model."""
        if self.order == "decode" and not x.works:
            x.owed = len(x.groups)
        if x.groups and (self.order == "prefill" or x.owed or not x.works):
            x.job, x.owed = x.groups[0], max(0, x.owed - 1)
        elif x.works:
            while x.round and not x.round[0].rids:
                x.round.popleft()
            if not x.round:
                yield from self.begin_round(x, view)
            x.job = x.round.popleft()
        if x.job is not None:
            yield from self.begin(x, x.job)

    def begin(self, x: Instance, job: Group | Work) -> Iterator[Action]:
        """Switch to a turn: move other KV out, swap weights, move its own KV in, run, then prefetch the next weights.

        Before a prefill, decode batches of the same model keep their KV on the GPUs.
        """
        batch, ahead = job.batch, self.ahead(x, job)
        into: list[Action] = []
        if isinstance(job, Group):
            turn = Run(batch, "prefill", steps=self.group, seqs=1)
            stay = [w.batch for w in x.works if w.batch.inst == batch.inst]
        else:
            turn = Run(batch, "decode", for_s=job.q)
            into, stay = [] if batch in x.home else [Move(batch, batch.inst.place)], [batch]
        out = x.out(stay)
        if into:
            x.home[batch] = None
        weights = list(x.hold(batch.inst.model, self.way, keep=ahead, drain=False))
        if self.sync:
            yield from (*out, *weights, *into, turn)
        else:
            x.stages.extend((out, weights, into, [turn]))
            yield from x.advance()
        for m in ahead:
            yield from x.fetch(m, self.way)

    def ahead(self, x: Instance, job: Group | Work) -> tuple[str, ...]:
        """Return the model whose weights are prefetched during a turn, as a tuple of at most one name.

        It is the next other model, if its weights fit beside the weights and KV of this turn's model.
        """
        if not (self.prefetch and self.sync):
            return ()
        m, models = job.batch.inst.model, self.cluster.models
        queue = (*x.round, *x.works) if isinstance(job, Work) else x.groups
        after = next((y.batch.inst.model for y in queue if y.batch.inst.model != m), m)
        if after == m or models[after].tp != models[m].tp:
            return ()
        grows = LOOKAHEAD + (math.ceil(job.q / job.t) if isinstance(job, Work) else 0)
        tokens = sum(w.ctx + grows * len(w.rids) for w in x.works if w.batch.inst.model == m)
        kv = tokens * models[m].kv_token_bytes + one_request(models[m])
        weights = models[m].weight_bytes + models[after].weight_bytes
        return (after,) if weights + kv <= self.cluster.gpus[x.gpus[0]].mem_bytes else ()

    def lost(self, rid: int, view: View) -> Iterator[Action]:
        """Prefill a request again after its KV was discarded; its output so far becomes part of the prompt."""
        w = self.where.get(rid)
        if isinstance(w, Work):
            self.leave(rid)
            yield from self.join(rid, w.batch.inst.model, self.tokens[rid] + view.request(rid).made_tokens, view)
