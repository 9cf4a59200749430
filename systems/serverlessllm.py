"""ServerlessLLM: a model keeps its GPU until its requests are done, and starts where that is soonest.

Fu et al., "ServerlessLLM: Low-Latency Serverless Inference for Large Language Models", OSDI 2024, as a scheduler of
whole requests. Its variant + is the oracle of Xiang et al., "Aegaeon", SOSP 2025, without interruptions. The rules of
Aegaeon's artifact, which drops and interrupts requests, are another algorithm: serverlessllm_released.py.

    x     an instance: a GPU or a tensor-parallel group, with one model at a time and a queue of jobs
    job   requests of one model that came in a row and run together, at most `most` at a time
    S_m   seconds of a request of model m by the forecast: its prefill and O_m decode steps

A request joins the last job of an instance if that job is its model's. Otherwise it opens a job at the end of an
instance's queue. `place` chooses the instance:
    startup   the one where it starts soonest, after the rest of the jobs before it and a load from host memory or disk.
              Among equals: the instance that has been idle longest; busy ones come last
    fewest    (+) any job of the model with room, else the instance with the fewest jobs
`order=sjf` (+, with the true output lengths: an oracle) runs the shortest job first. A job is as long as its longest
request. A job that runs is not interrupted.

Tiers: if host memory is limited (`host_bytes` of the run's spec), a node keeps the models loaded last, and others come
from its disk. A load from disk is assumed to begin when earlier loads from the same disk end, as in the release
(ServerlessLLM/ServerlessLLM, sllm/schedulers/storage_aware_scheduler.py 10851ff, `_get_model_loading_time`;
sllm/store_manager.py 1848fac, `get_store_info` and `load_to_host`). `way` says how weights are
loaded. By default a load does not start an engine.

Live migration (section 5) is left out. There, the new instance computes the KV of a request's tokens while the old one
continues to decode, in rounds, until few tokens are missing and the request changes over. Here a request is in one
batch, so migration would need a request in two batches, and a prefill of tokens that another batch makes. To discard KV
by `Move` and `Admit` the request elsewhere would stop it for its whole prefill, which the paper's rounds avoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from harness.policy.actions import Action, Admit, Run
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import instances
from harness.policy.slot import Slot, start
from harness.policy.types import Cluster, Host, Inst, Option, Plan, Request
from harness.policy.view import View

DECISION_S = 1.3e-5  # mean of 40 models on 16 H100 at 0.1 req/s each, one busy x86-64 core, 2026-11-21


@dataclass(slots=True, eq=False)
class Job:
    """Requests of one model that run together."""

    model: str
    rids: dict[int, None] = field(default_factory=dict)
    long_s: float = 0.0  # seconds of its longest request, under `sjf`
    cost_s: float = 0.0  # seconds that it was estimated to take when it was opened, its load included
    runs: bool = False
    until_s: float = 0.0  # when its last request should be done, once it runs


@dataclass(slots=True, eq=False)
class Instance(Slot):
    """GPUs that hold one model at a time, and the queue of their jobs."""

    jobs: list[Job] = field(default_factory=list)  # the first one runs
    behind_s: float = 0.0  # estimated seconds of jobs that do not run yet
    used_s: float = -math.inf  # when a request last ended on it


@dataclass(slots=True)
class ServerlessLlm:
    """A policy of whole requests, first come first served, each on the instance where its model starts soonest."""

    cluster: Cluster
    place: str = choice("startup", "fewest")
    order: str = choice("fcfs", "sjf")
    most: int = number(4, 1, 256)
    way: str = choice("host", "pool", "sleep", "naive", "reinit", "disk", "cold")
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged", "process": "gpu"}, init=False)
    all: list[Instance] = field(init=False)
    S: Mapping[str, float] = field(init=False)
    load_s: Mapping[str, float] = field(init=False)  # from host memory
    disk_s: Mapping[str, float] = field(init=False)  # from disk; empty where hosts hold all
    disk_until_s: dict[int, float] = field(default_factory=dict, init=False)  # when loads from its disk end, by node
    where: dict[int, tuple[Instance, Job]] = field(default_factory=dict, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {"plus": {"place": "fewest", "order": "sjf"}}

    def __post_init__(self) -> None:
        models, profile = self.cluster.models, self.cluster.profile
        self.hears = frozenset({Woke, Arrived, Finished})
        self.uses = frozenset(
            {"Load", "Evict", "Admit", "Run"}
            | ({f"Load.way:{self.way}"} if self.way != "host" else set())
            | ({"view.oracle_tokens"} if self.order == "sjf" else set())
        )
        insts = {m: Inst(m, tuple(range(x.tp))) for m, x in models.items()}
        self.load_s = {m: profile.load_s(insts[m], self.way) for m in models}
        limited = self.cluster.host_bytes is not None
        self.disk_s = {m: profile.load_s(insts[m], self.way, from_disk=True) for m in models if limited}
        plans = {m: self.cluster.plan.get(m) or Plan(0.0, 1.0, x.max_tokens / 2, "none") for m, x in models.items()}
        self.S = {m: self.seconds(m, plan.prompt_tokens, plan.output_tokens) for m, plan in plans.items()}
        work = {m: plan.rate_rps * models[m].tp for m, plan in plans.items()}
        self.all = [Instance(self.cluster, gpus) for gpus in instances(self.cluster, work)]

    def seconds(self, m: str, prompt: float, output: float) -> float:
        """Return the seconds of one request of model m that is alone on its GPUs."""
        inst, profile = Inst(m, tuple(range(self.cluster.models[m].tp))), self.cluster.profile
        step_s = profile.step_s(inst, 1, int(prompt + output / 2))
        return profile.prefill_s(inst, max(1, int(prompt))) + max(0.0, output - 1) * step_s

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Assign requests to jobs, and run the jobs of each instance one after another."""
        match event:
            case Arrived(request):
                return self.arrived(request, view)
            case Finished(rid):
                return self.finished(rid, view)
            case Woke("start"):  # with the models of the highest rates
                return start(self.all, sorted(self.cluster.models, key=lambda m: -self.rate(m)), self.way)
        return ()

    def arrived(self, r: Request, view: View) -> Iterator[Action]:
        """Add a request to the job that the field `place` chooses, or to a new job on the instance that it chooses."""
        m = r.model
        fit = [x for x in self.all if x.fits(m)]
        job: Job | None = None
        if self.place == "startup":
            _, x, job = min((self.startup_s(x, m, view) for x in fit), key=lambda choice: choice[0])
        else:
            same = [(x, j) for x in fit for j in x.jobs if j.model == m and len(j.rids) < self.most]
            x, job = same[0] if same else (min(fit, key=lambda x: len(x.jobs)), None)
        if job is None:
            model = x.jobs[-1].model if x.jobs else x.model
            job = Job(m, cost_s=self.S[m] + (0.0 if m == model else self.loading_s(x, m, view)))
            x.jobs.append(job)
            x.behind_s += job.cost_s
        job.rids[r.id] = None
        self.where[r.id] = x, job
        if self.order == "sjf":
            job.long_s = max(job.long_s, self.seconds(m, r.prompt_tokens, view.oracle_tokens(r.id)))
        if job.runs:
            job.until_s = view.now_s + self.S[m]
            yield Admit(r.id, x.batch(m))
        yield from self.next(x, view)

    def finished(self, rid: int, view: View) -> Iterator[Action]:
        """Remove a request that has ended; if it was the last of its job, begin the instance's next job."""
        x, job = self.where.pop(rid)
        del job.rids[rid]
        x.used_s = view.now_s
        if not job.rids:
            x.jobs.remove(job)
            yield from self.next(x, view)

    def next(self, x: Instance, view: View) -> Iterator[Action]:
        """Begin the next job of an instance unless a job runs: load its model and admit its requests."""
        if not x.jobs or x.jobs[0].runs:
            return
        if self.order == "sjf":
            job = min(x.jobs, key=lambda j: j.long_s)
            x.jobs.remove(job)
            x.jobs.insert(0, job)
        job = x.jobs[0]
        m, job.runs, job.until_s = job.model, True, view.now_s + self.S[job.model]
        x.behind_s -= job.cost_s
        if x.model != m:
            if not self.here(x, m, view):
                self.disk_until_s[x.node] = view.now_s + self.loading_s(x, m, view)
            yield from x.hold(m, self.way)
            yield Run(x.batch(m))
        for rid in job.rids:
            yield Admit(rid, x.batch(m))

    # ------------------------------------------------------------ where

    def startup_s(self, x: Instance, m: str, view: View) -> tuple[tuple[float, float], Instance, Job | None]:
        """Estimate when a request of model m would start on an instance.

        Return (seconds until then, time of last use), the instance, and the job that the request would join. The time
        of last use breaks ties. The job is None if it would be a new one.
        """
        now_s, runs = view.now_s, x.jobs[0] if x.jobs and x.jobs[0].runs else None
        wait_s = x.behind_s + (max(0.0, runs.until_s - now_s) if runs else 0.0)
        used_s = now_s if x.jobs else x.used_s
        if (x.jobs[-1].model if x.jobs else x.model) != m:
            return (wait_s + self.loading_s(x, m, view), used_s), x, None
        last = x.jobs[-1] if x.jobs else None
        if last and len(last.rids) < self.most:  # the request joins it
            wait_s -= max(0.0, last.until_s - now_s) if last.runs else self.S[m]
        return (wait_s, used_s), x, last

    def rate(self, m: str) -> float:
        """Return the forecast rate of a model in requests per second."""
        plan = self.cluster.plan.get(m)
        return plan.rate_rps if plan else 0.0

    def loading_s(self, x: Instance, m: str, view: View) -> float:
        """Estimate the seconds to load model m on an instance, from its node's host memory or else from disk.

        A load from disk waits for earlier loads from the same disk.
        """
        if self.here(x, m, view):
            return self.load_s[m]
        return max(0.0, self.disk_until_s.get(x.node, 0.0) - view.now_s) + self.disk_s[m]

    def here(self, x: Instance, m: str, view: View) -> bool:
        """Tell whether the host memory of an instance's node holds the weights of model m."""
        return not self.disk_s or view.weights(Inst(m, Host(x.node))) == "in"
