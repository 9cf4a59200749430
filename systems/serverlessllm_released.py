"""ServerlessLLM in Aegaeon's artifact: whole requests, least recently used worker; its variant + interrupts.

Xiang et al., "Aegaeon: Effective GPU Pooling for Concurrent LLM Serving on the Market", SOSP 2025; its artifact
MachineLearningSystem/25SOSP-Aegaeon 1c3b110, aegaeon/sim: `SeLLMPolicy` (`V02Policy`) here, `SeLLMPlusPolicy` as preset
`plus`. Lines are those of the same files in Zyyeric/Aegaeon 6409f04.

    worker   a GPU, or a tensor-parallel group, with one model at a time and a queue of requests
    front    the first requests of a queue that are for one model: they run together
    batch    (plus) at most QS requests of one model that are sorted as one
    QS       `most`, 4 (scheduler.py:169)

Rules, with their lines:
    start    workers are empty (worker.py:70); nothing is loaded before a request needs it
    arrival  the only time when requests are dropped, placed or sorted (scheduler.py:77-81)
    drop     requests without a token more than `drop_s`, 15 s, after they came (43-45); this arrival still counts them
             as queued, because a worker removes its own later (worker.py:119, 184-191)
    place    a queue ends with a run of requests of one model; an empty queue has the worker's model, and a run of 0
             (scheduler.py:197-205). If all runs of the request's model are QS long (212-213), the request goes to the
             first worker without a model, else to the worker of another model whose last step ended first (217-224).
             Whether that worker is loading, or has a long queue, does not matter. Otherwise, or if there is no such
             worker, it goes to the shortest run of its model (233-239), however long that is.
    LRU      the clock of a worker is the end of its last step (worker.py:242); a load does not change it
    run      the front runs (157-180); if it is for another model, that is loaded from host memory: there is no other
             tier, and no engine to start (245-267, simulate.py:46)

`plus` (the true output lengths are an oracle):
    batches  at each arrival each queue is cut again, each request into the first batch with room (scheduler.py:272-284)
    place    the first batch of its model with room on any worker, else a new one where there are fewest (291-306)
    sort     the batches of each worker, shortest first: a batch with prompts to compute by the prefill of these, else
             by what its first request has left to decode, alone, at its mean context (309-325)
    evict    requests that ran and are not in the front lose their KV, and so does the whole queue when a model is
             loaded (worker.py:193-204, 254-256): KV is computed again (request.py:91-94). A load is not cut short.

What differs: step and load times are those of the run, not the artifact's fits and its 16 GB/s. The engine forms the
steps of the front, in chunks if the run says so. The prompts of a batch are priced as one. A worker is interrupted by
the answer to an arrival, not at its next step, and a dropped request leaves its queue right after that arrival. No
event reports the end of a step, so all steps since a worker's last event are assumed to be as long as its next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from harness.policy.actions import Action, Admit, Drop, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled
from harness.policy.fields import choice, number
from harness.policy.placement import instances
from harness.policy.slot import Slot
from harness.policy.types import Cluster, Inst, Option, Request
from harness.policy.view import View

DECISION_S = 3e-5  # mean of 40 models on 16 H100 at 0.1 req/s each (6e-5 at 0.25), CPU time, x86-64, 2026-11-22
LONG_AGO_S = -1e9  # the last step of a worker that never made one
PARKED = 1  # tag of the batch of interrupted requests, which has no lane


@dataclass(slots=True, eq=False)
class Worker(Slot):
    """GPUs that hold one model at a time, and their queue."""

    queue: list[Entry] = field(default_factory=list)
    cut: list[Group] = field(default_factory=list)  # (plus) the same in batches, as they were sorted last
    loading: bool = False
    runs: dict[int, None] = field(default_factory=dict)  # requests in the running batch
    stepped_s: float = LONG_AGO_S  # the last time at which a step is known to have ended


@dataclass(slots=True, eq=False)
class Entry:
    """A request in a worker's queue."""

    request: Request
    worker: Worker
    group: Group  # (plus) its batch; else it is alone in one
    token: bool = False  # its first token is made
    kv: bool = False  # its prompt is computed and kept
    dropped: bool = False  # it is on its way out


@dataclass(slots=True, eq=False)
class Group:
    """A batch in a worker's queue (preset plus): requests of one model that are sorted as one."""

    model: str
    entries: list[Entry] = field(default_factory=list)
    prefill_s: float | None = None  # seconds of its prompts to compute; None: unknown, or no prompts

    def add(self, e: Entry) -> None:
        """Add a request at the end of the batch."""
        self.entries.append(e)
        e.group, self.prefill_s = self, None


@dataclass(slots=True)
class ServerlessLlmReleased:
    """A policy that queues each request at a worker on arrival; a worker serves the front of its queue."""

    cluster: Cluster
    order: str = choice("fcfs", "srtf")
    most: int = number(4, 1, 256)  # scheduler.py:169, QS
    drop_s: float = number(15.0, 0, 3600)  # scheduler.py:43-45
    way: str = choice("host", "pool", "sleep", "naive", "reinit", "disk", "cold")
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged", "process": "gpu"}, init=False)
    workers: list[Worker] = field(init=False)
    entries: dict[int, Entry] = field(default_factory=dict, init=False)  # in order of arrival
    prefills_s: dict[tuple[str, int], float] = field(default_factory=dict, init=False)  # (plus) by model and tokens

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {"plus": {"order": "srtf"}}

    def __post_init__(self) -> None:
        self.hears = frozenset({Arrived, Prefilled, Preempted, Finished, Load})
        self.uses = frozenset({"Load", "Evict", "Evict.drain", "Admit", "Drop", "Run"})
        self.uses |= {f"Load.way:{self.way}"} if self.way != "host" else set()
        self.uses |= {"Move", "Move.to:none", "view.oracle_tokens"} if self.order == "srtf" else set()
        plan = self.cluster.plan
        work = {m: plan[m].rate_rps * x.tp if m in plan else 0.0 for m, x in self.cluster.models.items()}
        self.workers = [Worker(self.cluster, gpus) for gpus in instances(self.cluster, work)]

    # ------------------------------------------------------------ events

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place a request when it arrives; after other events, let the worker concerned follow its queue."""
        match event:
            case Arrived(request):
                return self.arrived(request, view)
            case Prefilled(rid) if rid in self.entries:  # a dropped request ends first
                self.prefilled(rid, view.now_s)
            case Preempted(rid) if rid in self.entries:
                self.keeps(self.entries[rid], kv=False)
            case Finished(rid, _, state):
                return self.finished(rid, state, view)
            case Done(Load(inst), None):
                return self.loaded(inst, view)
        return ()

    def arrived(self, r: Request, view: View) -> Iterator[Action]:
        """Drop requests that waited too long, and place the new one; with preset plus, also sort all queues."""
        touched = set()
        for e in takewhile(lambda e: view.now_s - e.request.arrival_s > self.drop_s, self.entries.values()):
            if not e.token and not e.dropped:
                e.dropped, e.group.prefill_s = True, None
                touched.add(e.worker)
                yield Drop(e.request.id)
        fit = [x for x in self.workers if x.fits(r.model)]
        if self.order == "fcfs":
            x = self.place(r.model, fit, view)
            x.queue.append(self.entry(r, x, Group(r.model)))
            yield from self.follow(x, view)
            return
        cuts = {x: self.batches(x.cut) for x in self.workers}
        x, batch = self.join(r.model, fit, cuts)
        self.entry(r, x, batch)
        touched.add(x)
        for x, cut in cuts.items():
            cut.sort(key=lambda batch: batch.prefill_s or self.left_s(batch, view))
            if cut != x.cut or x in touched:
                x.cut, x.queue = cut, [e for batch in cut for e in batch.entries]
                yield from self.follow(x, view)

    def entry(self, r: Request, x: Worker, group: Group) -> Entry:
        """Add a request to a batch of a worker's queue, and return its entry."""
        self.entries[r.id] = e = Entry(r, x, group)
        group.add(e)
        return e

    def keeps(self, e: Entry, *, kv: bool) -> None:
        """Record whether a request's KV is kept, and discard the stale estimate of its batch's prefill seconds."""
        e.kv, e.group.prefill_s = kv, None

    def prefilled(self, rid: int, now_s: float) -> None:
        """Note that a request has its first token, and has KV unless it was interrupted meanwhile."""
        e = self.entries[rid]
        e.token, e.worker.stepped_s = True, now_s
        self.keeps(e, kv=rid in e.worker.runs)

    def finished(self, rid: int, state: str, view: View) -> Iterator[Action]:
        """Remove a request that has ended from its queue, and let the worker follow the queue."""
        e = self.entries.pop(rid)
        x = e.worker
        x.queue.remove(e)
        e.group.entries.remove(e)
        e.group.prefill_s = None
        x.runs.pop(rid, None)
        if state == "done":
            x.stepped_s = view.now_s
        yield from self.follow(x, view)

    def loaded(self, inst: Inst, view: View) -> Iterator[Action]:
        """Note that a worker's model is loaded, and follow its queue; its front may be for another model by now."""
        x = next(x for x in self.workers if x.has(inst))
        x.loading = False
        yield from self.follow(x, view)

    # ------------------------------------------------------------ ServerlessLLM: where

    def place(self, m: str, fit: Sequence[Worker], view: View) -> Worker:
        """Return the worker for a new request of a model.

        Of the workers whose queue ends with requests for the model, it is the one with the fewest of them in a row. If
        all have QS of them, it is instead a worker without a model, or else the least recently used worker of another
        model.
        """
        runs = {x: self.last_run(x) for x in fit}
        mine = [x for x in fit if runs[x][0] == m]
        others = [x for x in fit if runs[x][0] != m]
        if others and sum(max(0, self.most - runs[x][1]) for x in mine) < 1:
            empty = (x for x in others if runs[x][0] is None)
            return next(empty, None) or min(others, key=lambda x: self.used_s(x, view))
        return min(mine, key=lambda x: runs[x][1])

    def last_run(self, x: Worker) -> tuple[str | None, int]:
        """Return the model of the last request in a worker's queue, and the length of the run of its requests there.

        For an empty queue, return the worker's model and 0.
        """
        m = x.queue[-1].request.model if x.queue else x.model
        return m, sum(1 for _ in takewhile(lambda e: e.request.model == m, reversed(x.queue)))

    def used_s(self, x: Worker, view: View) -> float:
        """Estimate the time at which a worker's last step ended."""
        if x.model is None or not (now := view.batch(x.batch(x.model))).decoding:
            return x.stepped_s
        step_s = self.cluster.profile.step_s(x.batch(x.model).inst, now.decoding, now.ctx_tokens)
        return view.now_s - (view.now_s - x.stepped_s) % step_s

    # ------------------------------------------------------------ ServerlessLLM+: where, and in which order

    def batches(self, cut: Iterable[Group]) -> list[Group]:
        """Return a queue's batches after forming them again: each request joins its model's first batch with room."""
        new: list[Group] = []
        last: dict[str, Group] = {}  # by model; those before it are full
        for batch in filter(lambda batch: batch.entries, cut):
            room = last.get(m := batch.model)
            if room is None or len(room.entries) == self.most:
                new.append(batch)
                last[m] = batch
                continue
            for e in batch.entries:
                if len(room.entries) == self.most:
                    new.append(room := Group(m))
                room.add(e)
            last[m] = room
        return new

    def join(self, m: str, fit: Sequence[Worker], cuts: Mapping[Worker, list[Group]]) -> tuple[Worker, Group]:
        """Return the worker and batch for a new request.

        It joins the first batch of its model with room. If there is none, it gets a new batch on the worker with the
        fewest batches.
        """
        for x in fit:
            for batch in cuts[x]:
                if batch.model == m and len(batch.entries) < self.most:
                    return x, batch
        x = min(fit, key=lambda x: len(cuts[x]))
        cuts[x].append(batch := Group(m))
        return x, batch

    def left_s(self, batch: Group, view: View) -> float:
        """Return the seconds by which a batch is sorted; batches with fewer come first.

        If some prompts are not computed yet, they are the seconds to prefill those. Otherwise they are the seconds that
        the batch's first request has left to decode.
        """
        head, profile = batch.entries[0], self.cluster.profile
        inst = head.worker.inst(batch.model)
        tokens = sum(e.request.prompt_tokens for e in batch.entries if not e.kv and not e.dropped)
        if tokens:
            if (what := (batch.model, tokens)) not in self.prefills_s:
                self.prefills_s[what] = profile.prefill_s(inst, tokens)
            batch.prefill_s = self.prefills_s[what]
            return batch.prefill_s
        rid, prompt = head.request.id, head.request.prompt_tokens
        made, output = view.request(rid).made_tokens, view.oracle_tokens(rid)
        return profile.step_s(inst, 1, prompt + (made + output) // 2) * (output - made)

    # ------------------------------------------------------------ a worker

    def follow(self, x: Worker, view: View) -> Iterator[Action]:
        """Run the front of a worker's queue, and interrupt the worker's other running requests.

        If the front is for another model, load that model first.
        """
        first = next((e.request.model for e in x.queue if not e.dropped), None)
        swap = first not in (None, x.model) and not x.loading
        m = first if swap else x.model
        queue = (e for e in x.queue if not e.dropped)
        front = dict.fromkeys(e.request.id for e in takewhile(lambda e: e.request.model == m, queue))
        for rid in [rid for rid in x.runs if rid not in front and not self.entries[rid].dropped]:
            yield from self.interrupt(rid, view)
        if m is None or not front:
            return
        if swap:
            x.loading = True
            yield from x.hold(m, self.way, drain=False)
            yield Run(x.batch(m))
        for rid in front:
            if rid not in x.runs:
                x.runs[rid] = None
                yield Admit(rid, x.batch(m))

    def interrupt(self, rid: int, view: View) -> Iterator[Action]:
        """Take a request out of the running batch and discard its KV, which is computed again when it returns."""
        e = self.entries[rid]
        del e.worker.runs[rid]
        self.keeps(e, kv=False)
        yield Admit(rid, e.worker.batch(e.request.model, PARKED))
        if view.request(rid).kv_bytes:
            yield Move(rid, None)
