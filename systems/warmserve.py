"""WarmServe: weights are loaded before they are needed, by forecasts of load, also beside a leaving instance.

Lou et al., "WarmServe: Enabling One-for-Many GPU Prewarming for Multi-LLM Serving", ICML 2026 (arXiv 2512.09472v2). The
rules are those of its release, LLMServe/WarmServe a601215, which has no licence: rules only. They are in
vllm-0.6.3.post1/vllm/entrypoints/controller, whose files are named at each rule: scheduler.py says what is prewarmed
and where, prewarm_manager.py the rest.

    copy        weights of a model on a group of GPUs: of an instance, or prewarmed. A GPU holds several
    instance    a copy that serves, with all KV memory of its GPUs, up to B = 32 requests; a GPU holds one
    load        requests of a model that have come and not ended, also those that wait
    n           copies beside its instances: those of the foundation bring these to ceil(mean / B), of a burst to
                ceil(peak / B)
    score       of copy i of n: e^(-i/n) x t, of a burst x peak / mean; t = the seconds of its weights at 32 GiB/s

Requests (schedule): a request goes to the model's instance with fewest requests, if that has less than B. Otherwise it
goes to a new instance, which may still load. Otherwise it asks again a second later. A new instance takes a copy of the
model whose GPUs are idle, even one that is loading. Otherwise it takes idle GPUs of the first node that has enough,
those with fewest copies (_get_available_workers). Other copies on its GPUs are evicted at once (create_engine).

Twice a second (_check_engines), instances leave if the mean load of the last 5 s is below B/2 for each. Those with
fewest requests leave first, and none within 5 s of its start. New ones start if the load is above 0.8 B. A leaving
instance takes no more requests. With r requests left, it keeps the KV memory in use and r/32 of all, and gives the rest
to copies, at each check. When it is gone its weights stay as a copy.

Then copies are prewarmed (Scheduler.prewarm), the highest score first. A group of GPUs must have room, and each copy on
it must be of another model and lie within the group or around it. A group where all scores are lower comes first, then
the least sum of scores. A model's first scores count as met by the copies that it has, instances included.

Forecast (update_loads): a window's mean and peak are those of the same window on past days (trace_generator.py), plus
the mean error of the last 10 windows, weighted by 1, 1/2, 1/4... A policy here knows no past days, only one rate for
each model. So the past is flat, and the rule gives the weighted mean of the windows that were seen. The mean and peak
of the first window are the rate times the seconds of a request alone.

Open there, or not possible by this interface: a load is not cut short, so a copy evicted while it loads is loaded
first. All parts of a copy on several GPUs leave together; the release keeps parts on other GPUs until these are needed.
The rest of a start (mapping KV memory, joining the group) takes no time. A leaving instance keeps KV memory for one
longest request, and gives up the rest at once, not when the next request ends. Copies count in the order in which they
came; in the release, in that of a set. Waiting requests ask together, the oldest first. While nothing is served no
window ends: all that have passed end before the next request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from harness.policy.actions import Action, Admit, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import groups, one_request
from harness.policy.types import GIB, Batch, Cluster, Gpus, Infeasible, Inst, Option, Request
from harness.policy.view import View

DECISION_S = 5e-5  # mean of 40 models on 16 H100 at 0.1 req/s each, 4 a request, CPU time, x86-64, 2026-11-27

BATCH = 32  # common.py, BATCH_SIZE
LOWER, UPPER = 0.5, 0.8  # SCALE_LOWER_BOUND, SCALE_UPPER_BOUND
PROTECT_S = 5.0  # PROTECT_PERIOD
RECENT_S = 5.0  # SCALE_WINDOW
LOAD_BYTES_S = 32 * GIB  # PCIE_BANDWIDTH
SAMPLES = 10  # scheduler.py, num_sample_point
TICK_S = 0.5  # prewarm_manager.py, check_engine_loop and prewarm_model_loop
RETRY_S = 1.0  # request_handler


@dataclass(slots=True)
class Traffic:
    """A model's load over time (released: common.py, ModelStatus; scheduler.py, update_loads)."""

    mean: float  # forecast for this window
    peak: float
    requests: int = 0
    area: float = 0.0  # requests x seconds, in this window up to `last_s`
    last_s: float = 0.0
    highest: int = 0  # largest load of this window, just after an arrival
    steps: deque[tuple[float, int]] = field(default_factory=deque)  # (when the load changed, to what)
    means: list[float] = field(default_factory=list)  # of the windows that are over
    peaks: list[float] = field(default_factory=list)

    def change(self, by: int, now_s: float) -> None:
        """Count a request that came or ended."""
        self.area += (now_s - self.last_s) * self.requests
        self.requests += by
        self.last_s = now_s
        if by > 0:
            self.highest = max(self.highest, self.requests)
        self.steps.append((now_s, self.requests))

    def recent(self, now_s: float) -> float:
        """Return the mean load of the last `RECENT_S` seconds (released: common.py, get_avg_load).

        If the load changed in that time, the load at its start counts for its whole duration, including the part
        before. The release does so too.
        """
        since_s, until_s, area = now_s - RECENT_S, now_s, 0.0
        while len(self.steps) > 1 and self.steps[1][0] <= since_s:
            self.steps.popleft()
        for at_s, load in reversed(self.steps):
            area += load * (until_s - (at_s if len(self.steps) > 1 else max(at_s, since_s)))
            until_s = at_s
        return area / RECENT_S

    def end(self, now_s: float, window_s: float) -> None:
        """End a window, and forecast the next one."""
        self.means.append((self.area + (now_s - self.last_s) * self.requests) / window_s)
        self.peaks.append(self.highest)
        self.area, self.last_s, self.highest = 0.0, now_s, 0
        self.mean, self.peak = weighted(self.means), weighted(self.peaks)


@dataclass(slots=True, eq=False)
class Copy:
    """Weights of a model on a group of GPUs, loaded or being loaded."""

    inst: Inst
    gpus: Gpus
    whole: bool = False


@dataclass(slots=True, eq=False)
class Instance:
    """A copy of a model's weights that serves requests."""

    copy: Copy
    since_s: float
    kv_bytes: int  # of each of its GPUs, beside weights
    keeps: int  # those that it has not given up to copies
    requests: int = 0

    @property
    def batch(self) -> Batch:
        """The instance's only batch."""
        return Batch(self.copy.inst)


class Scored(NamedTuple):
    """A copy, and its score."""

    score: float
    copy: Copy


@dataclass(slots=True)
class WarmServe:
    """A policy that scales instances by load, and loads further copies where the forecast expects load.

    These copies go on idle GPUs, and on GPUs whose instance is leaving.
    """

    cluster: Cluster
    prewarm: str = choice("forecast", "kept", "none")  # kept: --disable-prewarm; none: --disable-all-prewarm
    kv: bool = choice(True, False)  # False: --disable-kv-prewarm
    place: str = choice("scores", "turns")  # turns: --disable-placement
    counts: str = choice("all", "spare")  # copies that count for a model's scores; spare: ours, without instances
    window_s: float = number(300.0, 1, 86400)  # --window-size
    way: str = choice("host", "pool", "disk", "cold")
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Finished, Load}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged", "process": "gpu"}, init=False)
    nodes: list[list[int]] = field(init=False)
    groups: Mapping[int, Sequence[Gpus]] = field(init=False)  # by tensor-parallel degree
    traffic: dict[str, Traffic] = field(init=False)
    copies: list[Copy] = field(default_factory=list, init=False)  # in the order in which they came
    serving: dict[str, list[Instance]] = field(init=False)  # by model
    leaving: list[Instance] = field(default_factory=list, init=False)
    busy: dict[int, Instance] = field(default_factory=dict, init=False)  # by GPU
    at: dict[int, Instance] = field(default_factory=dict, init=False)  # by request
    waiting: dict[int, Request] = field(default_factory=dict, init=False)  # in order of arrival
    ends_s: float = field(default=math.inf, init=False)  # end of this window
    ticks: bool = field(default=False, init=False)
    changed: bool = field(default=True, init=False)  # True if inputs of prewarming changed since it ran

    leaves_idle: ClassVar[str] = "a request that finds no instance asks again a second later (request_handler)"
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "no-kv": {"kv": False},
        "no-placement": {"place": "turns"},
        "no-forecast": {"prewarm": "kept"},
        "on-demand": {"prewarm": "none", "way": "cold"},
        "spare": {"counts": "spare"},
    }

    def __post_init__(self) -> None:
        models, gpus = self.cluster.models, self.cluster.gpus
        self.uses = frozenset(
            {"Load", "Evict", "Admit", "Run", "Wake"}
            | ({f"Load.way:{self.way}"} if self.way != "host" else set())
            | ({"Limit"} if self.kv and self.prewarm == "forecast" else set())
        )
        self.nodes = [[g for g, gpu in enumerate(gpus) if gpu.node == n] for n in sorted({gpu.node for gpu in gpus})]
        self.groups = {tp: list(groups(self.cluster, tp)) for tp in {model.tp for model in models.values()}}
        for m, model in models.items():
            if not self.groups[model.tp]:
                raise Infeasible(f"no node has {model.tp} GPUs")
            if min(gpu.mem_bytes for gpu in gpus) - model.weight_bytes < one_request(model):
                raise Infeasible(f"{m} and one longest request do not fit {model.tp} GPU(s)")
        load = {m: self.load(m) for m in models}
        self.traffic = {m: Traffic(load[m], load[m]) for m in models}
        self.serving = {m: [] for m in models}

    def load(self, m: str) -> float:
        """Return the forecast load of a model: its rate times the seconds of one request alone on its GPUs."""
        if (plan := self.cluster.plan.get(m)) is None:
            return 0.0
        inst, profile = Inst(m, self.groups[self.cluster.models[m].tp][0]), self.cluster.profile
        step_s = profile.step_s(inst, 1, int(plan.prompt_tokens + plan.output_tokens / 2))
        return plan.rate_rps * (profile.prefill_s(inst, max(1, int(plan.prompt_tokens))) + plan.output_tokens * step_s)

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Send requests to instances; every half second, scale the instances and prewarm copies."""
        match event:
            case Arrived(r):
                return self.arrived(r, view.now_s)
            case Finished(rid):
                self.finished(rid, view.now_s)
            case Done(Load(inst), failed):
                self.loaded(inst, failed is None, view)
            case Woke("tick"):
                return self.tick(view)
            case Woke("again"):
                return self.again(view.now_s)
            case Woke("start"):  # README.md, 3.3: initial prewarming comes before the workload
                return self.prewarmed()
        return ()

    def arrived(self, r: Request, now_s: float) -> Iterator[Action]:
        """Count a request and send it to an instance; the first request of the run begins the first window."""
        if self.ends_s == math.inf:
            self.ends_s = now_s + self.window_s
            for traffic in self.traffic.values():
                traffic.last_s = now_s
        if not self.ticks:
            self.end_windows(now_s)
        self.traffic[r.model].change(1, now_s)
        yield from self.send(r, now_s)
        if r.id in self.waiting and len(self.waiting) == 1:
            yield Wake(now_s + RETRY_S, "again")
        if not self.ticks:
            self.ticks = True
            yield self.next_tick(now_s)

    def send(self, r: Request, now_s: float) -> Iterator[Action]:
        """Send a request to its model's instance with fewest requests, or to a new one (released: schedule).

        If there is no room for either, the request waits.
        """
        mine = [x for x in self.serving[r.model] if x.requests < BATCH]
        if not mine:
            if (gpus := self.idle(r.model)) is None:
                self.waiting[r.id] = r
                return
            yield from self.begin(r.model, gpus, now_s)
            mine = self.serving[r.model][-1:]
        self.waiting.pop(r.id, None)
        self.at[r.id] = x = min(mine, key=lambda x: x.requests)
        x.requests += 1
        yield Admit(r.id, x.batch)

    def again(self, now_s: float) -> Iterator[Action]:
        """Send waiting requests, oldest first; once a request finds no instance, skip the others of its model."""
        lacking = set[str]()
        for r in list(self.waiting.values()):
            if r.model not in lacking:
                yield from self.send(r, now_s)
                if r.id in self.waiting:
                    lacking.add(r.model)
        if self.waiting:
            yield Wake(now_s + RETRY_S, "again")

    def finished(self, rid: int, now_s: float) -> None:
        """Note that a request has ended."""
        if (x := self.at.pop(rid, None)) is not None:
            x.requests -= 1
            self.traffic[x.copy.inst.model].change(-1, now_s)
        elif rid in self.waiting:
            self.traffic[self.waiting.pop(rid).model].change(-1, now_s)

    def loaded(self, inst: Inst, whole: bool, view: View) -> None:
        """Note that the load of a copy has ended; if it failed, forget the copy, unless it serves."""
        copy = next((copy for copy in self.copies if copy.inst == inst), None)
        if copy is not None:
            copy.whole = whole or view.weights(inst) == "in"
            if view.weights(inst) == "out" and all(x.copy is not copy for x in self.busy.values()):
                self.copies.remove(copy)

    def tick(self, view: View) -> Iterator[Action]:
        """Scale instances, end windows and prewarm copies; repeat half a second later while there are requests."""
        now_s = view.now_s
        yield from self.scaled(now_s)
        yield from self.left(view)
        self.end_windows(now_s)
        yield from self.prewarmed()
        self.ticks = bool(self.busy or self.waiting)
        if self.ticks:
            yield self.next_tick(now_s)

    def end_windows(self, now_s: float) -> None:
        """End the forecast windows whose time is over (released: update_loads)."""
        while self.ends_s <= now_s:
            self.ends_s += self.window_s
            self.changed = True
            for traffic in self.traffic.values():
                traffic.end(now_s, self.window_s)

    def next_tick(self, now_s: float) -> Wake:
        """Return a timer for the next multiple of half a second."""
        return Wake((math.floor(now_s / TICK_S) + 1) * TICK_S, "tick")

    # ------------------------------------------------------------ instances: prewarm_manager.py

    def idle(self, m: str) -> Gpus | None:
        """Return the GPUs for a new instance of a model; None if too few are idle (_get_available_workers)."""
        tp, busy = self.cluster.models[m].tp, self.busy
        mine = [copy for copy in self.copies if copy.inst.model == m and not any(g in busy for g in copy.gpus)]
        if mine:
            return next((copy for copy in mine if copy.whole), mine[0]).gpus
        for node in self.nodes:
            free = [g for g in node if g not in busy]
            if len(free) >= tp:
                if self.place == "scores":
                    free.sort(key=lambda g: sum(copy.whole and g in copy.gpus for copy in self.copies))
                return tuple(sorted(free[:tp]))
        return None

    def begin(self, m: str, gpus: Gpus, now_s: float) -> Iterator[Action]:
        """Start an instance on a copy of its model, which is loaded if there is none (released: create_engine).

        Other copies on its GPUs are evicted.
        """
        inst = Inst(m, gpus)
        touched = [copy for copy in self.copies if not set(copy.gpus).isdisjoint(gpus)]
        chosen = next((copy for copy in touched if copy.inst == inst), None)
        for copy in touched:
            if copy is not chosen:
                yield from self.drop(copy)
        if chosen is None:
            chosen = Copy(inst, gpus)
            self.copies.append(chosen)
            yield Load(inst, self.way)
        kv_bytes = min(self.cluster.gpus[g].mem_bytes for g in gpus) - self.cluster.models[m].weight_bytes
        x = Instance(chosen, now_s, kv_bytes, kv_bytes)
        self.serving[m].append(x)
        self.busy |= dict.fromkeys(gpus, x)
        self.changed = True
        yield Run(x.batch)

    def drop(self, copy: Copy) -> Iterator[Action]:
        """Evict a copy."""
        self.copies.remove(copy)
        yield Evict(copy.inst)

    def scaled(self, now_s: float) -> Iterator[Action]:
        """Let instances of models with low load leave, and start instances of models with high load.

        In the release: _check_engines.
        """
        lacking = list[str]()
        for m, traffic in self.traffic.items():
            mine, load = self.serving[m], traffic.recent(now_s)
            if load < LOWER * BATCH * len(mine):
                old = sorted((x for x in mine if now_s - x.since_s > PROTECT_S), key=lambda x: x.requests)
                for x in old[: len(mine) - math.ceil(load / LOWER / BATCH)]:
                    mine.remove(x)
                    self.leaving.append(x)
                    self.changed = True
            elif load > UPPER * BATCH * len(mine):
                lacking += [m] * (math.ceil(load / UPPER / BATCH) - len(mine))
        for m in lacking:
            if (gpus := self.idle(m)) is None:
                return
            yield from self.begin(m, gpus, now_s)

    def left(self, view: View) -> Iterator[Action]:
        """Remove leaving instances that have no requests left; let other leaving instances give up KV memory."""
        for x in list(self.leaving):
            m, gpus = x.copy.inst.model, x.copy.gpus
            if not x.requests:
                self.leaving.remove(x)
                self.changed = True
                for g in gpus:
                    del self.busy[g]
                if x.keeps < x.kv_bytes:
                    yield from (Limit(m, g, None) for g in gpus)
                if self.prewarm == "none":
                    yield from self.drop(x.copy)
            elif self.kv and self.prewarm == "forecast":
                used = max(view.kv(m, g).used_bytes for g in gpus)
                keeps = max(used + x.kv_bytes * x.requests // BATCH, one_request(self.cluster.models[m]))
                if keeps < x.keeps:
                    x.keeps, self.changed = keeps, True
                    yield from (Limit(m, g, keeps) for g in gpus)

    # ------------------------------------------------------------ copies: scheduler.py

    def scores(self, m: str) -> list[float]:
        """Return the scores of the copies that a model should have in addition to its instances.

        In the release: _calc_model_scores.
        """
        traffic, instances = self.traffic[m], len(self.serving[m])
        first = max(math.ceil(traffic.mean / BATCH) - instances, 0)
        n = first + max(math.ceil(traffic.peak / BATCH) - instances - first, 0)
        load_s = self.cluster.models[m].weight_bytes / LOAD_BYTES_S
        burst = traffic.peak / traffic.mean if traffic.mean else 1.0
        return [math.exp(-i / n) * load_s * (burst if i >= first else 1.0) for i in range(n)]

    def prewarmed(self) -> Iterator[Action]:
        """Load the copies that models lack, by falling score, where they fit (released: prewarm)."""
        if self.prewarm != "forecast" or not self.changed:
            return
        self.changed = False
        scores = {m: self.scores(m) for m in self.traffic}
        free = [float(gpu.mem_bytes) for gpu in self.cluster.gpus]
        here: list[list[Scored]] = [[] for _ in free]
        left = {m: iter(each) for m, each in scores.items()}
        for copy in self.copies:
            m = copy.inst.model
            spare = all(x.copy is not copy for x in self.serving[m])
            score = next(left[m], 0.0) if spare or self.counts == "all" else 0.0
            for g in copy.gpus:
                here[g].append(Scored(score, copy))
                free[g] -= self.cluster.models[m].weight_bytes
        for g, x in self.busy.items():
            free[g] = free[g] - x.keeps if x in self.leaving else 0.0
        if self.place == "turns":
            wanted = self.in_turns({m: len(each) for m, each in scores.items()}, free, here)
        else:
            lacking = [(score, m) for m in scores for score in left[m]]
            lacking.sort(key=lambda pair: -pair[0])
            wanted = ((m, score, self.group(m, score, free, here)) for score, m in lacking)
        for m, score, gpus in wanted:
            if gpus is not None:
                copy = Copy(Inst(m, gpus), gpus)
                self.copies.append(copy)
                self.changed = self.place == "turns"
                for g in gpus:
                    here[g].append(Scored(score, copy))
                    free[g] -= self.cluster.models[m].weight_bytes
                yield Load(copy.inst, self.way)

    def group(self, m: str, score: float, free: Sequence[float], here: Sequence[Sequence[Scored]]) -> Gpus | None:
        """Return the GPUs for a new copy of a model, or None if no group has room.

        Groups on which all copies have lower scores come first. Among these, or else among all groups, the least sum of
        scores decides.
        """
        model, best = self.cluster.models[m], None
        for gpus in self.groups[model.tp]:
            if any(free[g] < model.weight_bytes for g in gpus):
                continue
            there = {scored.copy: scored.score for g in gpus for scored in here[g]}
            if all(copy.inst.model != m and nested(copy.gpus, gpus) for copy in there):
                key = max(there.values(), default=0.0) >= score, sum(there.values())
                if best is None or key < best[0]:
                    best = key, gpus
        return None if best is None else best[1]

    def in_turns(
        self, lacking: dict[str, int], free: Sequence[float], here: Sequence[Sequence[Scored]]
    ) -> Iterator[tuple[str, float, Gpus | None]]:
        """Yield (model, score 0, GPUs) for new copies, one for each model in turn.

        The GPUs are the first with room and without a copy of the model. Stop when a model lacks no copy or has no
        room. As in the release, copies that a model has are not subtracted from those in `lacking`.
        """
        models = list(lacking)
        for k in range(sum(lacking.values())):
            m = models[k % len(models)]
            model = self.cluster.models[m]
            if not lacking[m]:
                return
            lacking[m] -= 1
            for node in self.nodes:
                fit = [g for g in node if free[g] >= model.weight_bytes and all(c.inst.model != m for _, c in here[g])]
                if len(fit) >= model.tp:
                    yield m, 0.0, tuple(fit[: model.tp])
                    break
            else:
                return


def weighted(values: Sequence[float]) -> float:
    """Return the weighted mean of the last `SAMPLES` values; each weighs half as much as the value after it."""
    last = values[-SAMPLES:]
    weights = [0.5**k for k in reversed(range(len(last)))]
    return sum(w * x for w, x in zip(weights, last, strict=True)) / sum(weights)


def nested(a: Gpus, b: Gpus) -> bool:
    """Tell whether one group lies within the other."""
    return set(a) <= set(b) or set(b) <= set(a)
