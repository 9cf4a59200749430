"""Swapping: servers of more models than fit, started on request and stopped for others, as routers of today do it.

A router holds a request until the server of its model is up. The rule of each preset, and the file that has it:

    llama-swap   mostlygeek/llama-swap 8eb1d58, internal/router/scheduler/fifo.go: requests for a server that is up, or
                 starting, are sent at once, past all that wait; a swap begins when the servers that it stops have no
                 requests (conflictsWithInFlight). internal/router/group.go 141b395: a member of a group with `swap`
                 stops its other members, and those of other groups only if it is `exclusive`. Users write groups and
                 CUDA_VISIBLE_DEVICES, to keep some models loaded for good while others are swapped out
                 (config.example.yaml cd46f56). Here each model has GPUs of its own while there are enough on some
                 host; else those of one tensor-parallel degree share theirs, in groups with `swap` that are not
                 `exclusive`. Users also set how many requests a server may have, by default 10; more are refused (429).
                 Here there is no such limit
    llama-swap-exclusive   the same groups, each `exclusive`, as they are by default (internal/config/config.go 032d741,
                 GroupConfig): a server that starts also stops those of all other groups, except `persistent` ones
                 (group.go, EvictionFor). So one server runs at a time, however many GPUs are free. One that is up also
                 stops the others before it takes a request (fifo.go, OnRequest)
    llama-swap-matrix   `matrix` instead of groups, internal/router/matrix_solver.go 9433523, Solve: a model's server
                 runs beside those of a set that contains it. The set of least cost is chosen, the sum over running
                 servers outside of it; these stop, once none has requests. Other requests do not wait for that
                 (scheduler/fifo.go, drainQueue). Users write the sets. Here they are all sets of models that fit on
                 their GPUs together with KV memory for 4 requests each, as for `router`. Of sets of equal cost, the one
                 that keeps more servers, then those with higher rates, is taken
    llama-swap-fifo   before PR 784 of May 2026, proxy/processgroup.go 031580d and process.go 026ab8d: a lock taken in
                 order of arrival, and held until the previous server has served its last request
    router       ggml-org/llama.cpp f2dc72b, tools/server/server-models.cpp, server_lru_sched: at most models_max
                 servers, 4 (common/common.h 001d906). Of those without requests, the one whose last request came first
                 stops; requests for a server that is up pass others; the model that waits longest starts first. Users
                 set how much KV memory a server reserves; here it is as much as with Ollama
    ollama       ollama/ollama 09f1587, server/sched.go: 3 a GPU (defaultModelsPerGPU), on the GPU with most free memory
                 that holds weights and KV of 4 requests, else of 1 (defaultParallel). Of those without requests, the
                 first by name stops; else the first of all takes no more and is awaited (findRunnerToUnload: by
                 keep-alive, equal here; since PR 10185 then by path). envconfig/config.go: keep-alive of 5 minutes.
                 Requests for a server that is up pass the others, as in 0.31.1 (issue 17408); in 09f1587 they queue
    kubeai       kubeai-project/kubeai, scale to zero: a server has GPUs of its own (resourceProfiles), starts when a
                 request comes (modelclient/scale.go 1dbb673, ScaleAtLeastOneReplica) and waits for free GPUs, as no
                 other stops for it. Every 10 s (config/system.go 0d7de29, Interval) each model's requests are counted.
                 The mean of the last 60 counts (TimeWindow, 10 min), over 100 (model_types.go 094b02b, TargetRequests)
                 and rounded up, is the number of replicas; a lower one must come three times in a row
                 (ScaleDownDelaySeconds, 30 s; scale.go, consecutiveScaleDowns). So none are left at the 63rd count of
                 zero. One replica at most here (maxReplicas). modelautoscaler/autoscaler.go is read in the fork
                 thehonker/kubeai 9c88521
    sleep        doublewordai/llmux 036de96, src/policy/fifo.rs, and switcher.rs 032221c: one vLLM is awake. The oldest
                 request's model is next, after at least 5 s awake and once the last request is served. During these
                 5 s requests for the one awake pass, later they wait. Level 1 of vLLM's sleep; `sleep-2`: level 2

    queue     which requests pass older ones: those of any server that is up, or only during its first `stay_s`
    stay_s    with queue=fifo: seconds for which a server that came up takes requests past others, and is not stopped
    most      servers on each of the pool's GPUs or groups; if it is 1, servers share no GPU
    victim    which server without requests stops for another: the least recently used, the first by name, those outside
              of the set of least cost, those of its group (and with `exclusive` of others), or none
    pools     a router for each group of GPUs, with models of its own, or one router for all GPUs
    slots     longest requests for which a server reserves KV memory; 0: it takes the memory that is free
    keep_s    seconds without a request after which a server stops; 0: never
    look_s    seconds between two looks that find servers without requests; 0: they are found at once
    keep      `keep_s` of some models, as "a=60 b=0" (llama-swap: ttl; docs/config.example.yaml 04abb85, and the next)
    priority  of some models, whose requests wait before those of lower ones; else 0 (llama-swap: scheduler.settings.
              fifo.priority; fifo.go 0811ad0, enqueue)
    exclusive   1 for models whose group is exclusive, with victim=group; else 0
    persistent   1 for models whose server no other group stops, with victim=group; else 0
    pinned    1 for models whose servers start first and stay for good, beside those that swap on the same GPUs, with
              victim=group; else 0 (a group with `swap: false` and `persistent`; config.example.yaml cd46f56). Servers
              then reserve KV memory for `slots` requests
    costs     of stopping some models, with victim=cost; else 1 (llama-swap: matrix.evict_costs)
    way       rung of a start. A stop and start of the engine that all systems share is `cold`
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar

from harness.policy.actions import Action, Admit, Evict, Limit, Load, Run, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Woke
from harness.policy.fields import by_model, choice, number, numbers
from harness.policy.placement import groups, instances, one_request
from harness.policy.types import GIB, Batch, Cluster, Gpus, Infeasible, Inst, Option, Request, UserError
from harness.policy.view import View

FOR_EVER_S = 1e9  # more than any run
DECISION_S = 8e-6  # mean of arena-chat on heavy8, one GPU, at its own rate and a quarter of it, busy x86-64, 2026-11-22


@dataclass(slots=True, eq=False)
class Server:
    """The server of a model: up, or starting."""

    batch: Batch
    need: int  # bytes of weights and reserved KV on each of its GPUs
    used_s: float  # when its last request was sent to it
    seen_s: float  # when a look last saw it with requests, or it began to start
    up_s: float = math.inf  # since when it is up; infinity: it is starting
    serving: int = 0  # requests sent to it and not ended


@dataclass(slots=True, eq=False)
class Pool:
    """The GPUs of a router, with its queue of requests and its servers."""

    places: Mapping[str, Sequence[Gpus]]  # where each of its models may be served
    most: int
    queue: OrderedDict[int, Request] = field(default_factory=OrderedDict)  # those that wait, in order of arrival
    waiting: Counter[str] = field(default_factory=Counter)  # the same, counted by model
    servers: dict[str, Server] = field(default_factory=dict)  # in order of their start
    leaving: str | None = None  # the server whose last request is awaited; it takes no more
    stopping: set[str] = field(default_factory=set)  # models whose server is not gone yet


@dataclass(slots=True)
class Swap:
    """A policy with a queue for each router, and rules by which servers stop to make room for others."""

    cluster: Cluster
    queue: str = choice("collated", "fifo")
    stay_s: float = number(0.0, 0, 3600)
    most: int = number(1, 1, 64)
    victim: str = choice("lru", "name", "cost", "group", "none")
    pools: str = choice("each", "one")
    slots: int = number(0, 0, 256)
    keep_s: float = number(0.0, 0, FOR_EVER_S)
    look_s: float = number(0.0, 0, 3600)
    keep: str = by_model(0, FOR_EVER_S)
    priority: str = by_model(-1e6, 1e6)
    exclusive: str = by_model(0, 1)
    persistent: str = by_model(0, 1)
    pinned: str = by_model(0, 1)
    costs: str = by_model(0, 1e6)
    way: str = choice("cold", "disk", "sleep", "sleep2", "host", "pool")
    spread: str = choice("rate", "weights", tuned=True)  # of models over pools, if no placement is given
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Finished, Load, Evict}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    need: Mapping[str, int] = field(init=False)  # bytes by model, as in `Server`
    keeps_s: Mapping[str, float] = field(init=False)  # by model, as `ranks` and `cost`
    ranks: Mapping[str, float] = field(init=False)
    alone: Mapping[str, float] = field(init=False)  # as `exclusive` and `persistent` say
    lasting: Mapping[str, float] = field(init=False)
    pins: Mapping[str, float] = field(init=False)  # as `pinned` says
    cost: Mapping[str, float] = field(init=False)
    home: dict[str, Pool] = field(default_factory=dict, init=False)  # by model
    sent: dict[int, str] = field(default_factory=dict, init=False)  # the model of each request that is being served

    mixed: ClassVar[bool] = True
    leaves_idle: ClassVar[Mapping[str, str]] = {
        "llama-swap-exclusive": "members of other groups are stopped if a group is exclusive (group.go 141b395)"
    }
    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "llama-swap": {"spread": "rate"},
        "llama-swap-fifo": {"queue": "fifo", "spread": "rate"},
        "llama-swap-exclusive": {"victim": "group", "exclusive": "*=1", "spread": "rate"},
        "llama-swap-matrix": {"most": 4, "victim": "cost", "slots": 4, "spread": "rate"},
        "router": {"most": 4, "slots": 4, "spread": "rate"},
        "ollama": {"most": 3, "victim": "name", "pools": "one", "slots": 4, "keep_s": 300.0, "spread": "rate"},
        "kubeai": {"victim": "none", "pools": "one", "keep_s": 630.0, "look_s": 10.0, "spread": "rate"},
        "sleep": {"queue": "fifo", "stay_s": 5.0, "way": "sleep", "spread": "rate"},
        "sleep-2": {"queue": "fifo", "stay_s": 5.0, "way": "sleep2", "spread": "rate"},
    }

    def __post_init__(self) -> None:
        asked = {"Limit"} if self.slots else set[str]()
        asked |= set[str]() if self.way == "host" else {f"Load.way:{self.way}"}
        self.uses = frozenset({"Load", "Evict", "Run", "Admit", "Wake", "Cluster.homes"} | asked)
        beside = self.most > 1 or self.pinned
        process = "kept" if "sleep" in self.way else "model" if beside else "gpu"
        self.options = {"kv": "paged", "process": process}
        self.keeps_s = numbers(self, "keep", self.cluster.models, self.keep_s)
        self.ranks = numbers(self, "priority", self.cluster.models, 0.0)
        self.alone = numbers(self, "exclusive", self.cluster.models, 0.0)
        self.lasting = numbers(self, "persistent", self.cluster.models, 0.0)
        self.pins = numbers(self, "pinned", self.cluster.models, 0.0)
        self.cost = numbers(self, "costs", self.cluster.models, 1.0)
        self.need = {m: self.cluster.models[m].weight_bytes + self.kv_bytes(m) for m in self.cluster.models}
        most = self.most * (len(self.cluster.gpus) if self.pools == "one" or self.victim == "group" else 1)
        for places in self.routers():
            self.home |= dict.fromkeys(places, Pool(places, most))
        self.refuse()

    def refuse(self) -> None:
        """Raise UserError for a setting without effect, and Infeasible if pinned models leave no room for another."""
        grouped = {"exclusive": self.exclusive, "persistent": self.persistent, "pinned": self.pinned}
        if self.victim != "group" and (idle := next((name for name, text in grouped.items() if text), None)):
            raise UserError(f"field {idle}: it has an effect with victim=group alone")
        if self.victim != "cost" and self.costs:
            raise UserError("field costs: it has an effect with victim=cost alone")
        if self.pinned and not self.slots:
            raise UserError("field pinned: servers beside each other reserve KV memory: slots=N, the requests of each")
        for m in self.cluster.models if self.pinned else ():
            stays = [n for n in self.cluster.models if n != m and self.pins[n] and self.shared(m, n)]
            have = min(self.cluster.gpus[g].mem_bytes for g in self.home[m].places[m][0])
            if sum(self.need[n] for n in (m, *stays)) > have:
                raise Infeasible(
                    f"{m} has no room beside the pinned {', '.join(stays)} on GPUs of {have / GIB:.1f} GiB"
                )
        for m in (m for m in self.cluster.models if self.lasting[m]):
            if all(not self.alone[n] or self.shared(m, n) for n in self.cluster.models if n != m):
                raise UserError(
                    f"field persistent: {m} shares its GPUs with all that could stop it, and members of a group swap: "
                    f"pinned={m}=1 keeps it"
                )

    def shared(self, m: str, n: str) -> bool:
        """Tell whether two models are in one group, which means that they have GPUs in common."""
        mine, its = ({g for at in self.home[x].places[x] for g in at} for x in (m, n))
        return bool(mine & its)

    def kv_bytes(self, m: str) -> int:
        """Return the KV bytes that a server reserves on each GPU: for `slots` requests or, if too much, for one."""
        model = self.cluster.models[m]
        free = max(gpu.mem_bytes for gpu in self.cluster.gpus) - model.weight_bytes
        reserved = next((kv for n in (self.slots or 1, 1) if (kv := n * one_request(model)) <= free), None)
        if reserved is None:
            raise Infeasible(f"{m} and one longest request do not fit {model.tp} GPU(s) of {free / GIB:.1f} GiB beside")
        return reserved

    def routers(self) -> Iterator[dict[str, Sequence[Gpus]]]:
        """Yield, for each router, its models and the groups of GPUs where each of them may be served.

        With pools=one, a single router has all groups. With victim=group, a single router has the models of all groups,
        so that one may stop another. Otherwise each router has the models of one group. Models are placed in order of
        falling weight (`spread`), each in the group with the least weight so far.
        """
        cluster, models = self.cluster, self.cluster.models
        if self.pools == "one":
            yield {m: [cluster.homes[m]] if cluster.homes else list(groups(cluster, models[m].tp)) for m in models}
            return
        weight = {m: self.rate(m) if self.spread == "rate" else float(models[m].weight_bytes) for m in models}
        places = instances(cluster, weight, homes=True)
        held = dict.fromkeys(places, 0.0)
        by_group: dict[Gpus, dict[str, Sequence[Gpus]]] = {at: {} for at in places}
        for m in sorted(models, key=lambda m: -weight[m]):
            fit = [cluster.homes[m]] if cluster.homes else [at for at in places if self.holds(at, m)]
            if not fit:
                raise Infeasible(f"{m} finds no group of {models[m].tp} GPU(s) with {self.need[m] / GIB:.1f} GiB each")
            at = min(fit, key=lambda at: (len(at), held[at], len(by_group[at])))
            held[at] += weight[m]
            by_group[at][m] = [at[: models[m].tp]]
        if self.victim == "group":
            yield {m: at for places in by_group.values() for m, at in places.items()}
        else:
            yield from by_group.values()

    def holds(self, place: Gpus, m: str) -> bool:
        """Tell whether a group of GPUs is large enough, and has the memory, for a model's server."""
        model, gpus = self.cluster.models[m], self.cluster.gpus
        return len(place) >= model.tp and min(gpus[g].mem_bytes for g in place) >= self.need[m]

    # ------------------------------------------------------------ what happens

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Handle requests, servers that come up or stop, and timers."""
        now_s = view.now_s
        match event:
            case Arrived(request):
                return self.arrived(request, now_s)
            case Finished(rid):
                return self.finished(m, now_s) if (m := self.sent.pop(rid, None)) is not None else ()
            case Done(Load(Inst(m)), None):
                self.home[m].servers[m].up_s = now_s
                return self.serve(self.home[m], now_s)
            case Done(Load(Inst(m)), "never"):
                return self.lost(m, now_s)
            case Done(Evict(Inst(m))):
                self.home[m].stopping.discard(m)
                return self.serve(self.home[m], now_s)
            case Woke("start"):
                return self.start(now_s)
            case Woke("look"):
                return self.look(now_s)
            case Woke(key):
                m = key.partition(" ")[2]
                return self.expire(m, now_s) if key.startswith("idle") else self.serve(self.home[m], now_s)
        return ()

    def start(self, now_s: float) -> Iterator[Action]:
        """Start servers until no more fit, those of the models with the highest forecast rates first."""
        for m in sorted(self.cluster.models, key=lambda m: (-self.pins[m], -self.rate(m))):
            pool = self.home[m]
            if self.slots:
                gpus = {g for place in pool.places[m] for g in place}
                kv = self.need[m] - self.cluster.models[m].weight_bytes
                yield from (Limit(m, g, kv) for g in sorted(gpus))
            if (place := self.room(pool, m)) is not None:
                yield from self.bring(pool, m, place, now_s)
                pool.servers[m].up_s = now_s
                yield from self.idle(m, now_s)
        if self.look_s:
            yield Wake(now_s + self.look_s, "look")

    def lost(self, m: str, now_s: float) -> Iterator[Action]:
        """Forget a server that could not start or wake, with its requests; the model's next request starts another."""
        pool = self.home[m]
        del pool.servers[m]
        self.sent = {rid: n for rid, n in self.sent.items() if n != m}
        if pool.leaving == m:
            pool.leaving = None
        yield from self.serve(pool, now_s)

    def finished(self, m: str, now_s: float) -> Iterator[Action]:
        """Note that a request ended; a server without requests may stop."""
        pool = self.home[m]
        pool.servers[m].serving -= 1
        if not pool.servers[m].serving:
            yield from self.idle(m, now_s)
            yield from self.serve(pool, now_s)

    def look(self, now_s: float) -> Iterator[Action]:
        """Stop servers that had no request at this look and at all looks of the last `keep_s` seconds."""
        yield Wake(now_s + self.look_s, "look")
        for pool in dict.fromkeys(self.home.values()):
            for m, server in list(pool.servers.items()):
                if server.serving:
                    server.seen_s = now_s
                elif self.keeps_s[m] and now_s - server.seen_s >= self.keeps_s[m] and server.up_s <= now_s:
                    yield from self.stop(pool, m)
            yield from self.serve(pool, now_s)

    def expire(self, m: str, now_s: float) -> Iterator[Action]:
        """Stop a server that has had no request for `keep_s`."""
        pool = self.home[m]
        yield from self.stop(pool, m)
        yield from self.serve(pool, now_s)

    # ------------------------------------------------------------ the queue

    def arrived(self, request: Request, now_s: float) -> Iterator[Action]:
        """Queue a request by priority; send it at once, past older requests, if the rule of its server allows it."""
        m, pool = request.model, self.home[request.model]
        pool.queue[request.id] = request
        pool.waiting[m] += 1
        for other in [r for r in pool.queue.values() if self.ranks[r.model] < self.ranks[m]] if self.priority else ():
            pool.queue.move_to_end(other.id)
        yield from self.serve(pool, now_s)
        if request.id in pool.queue and self.takes(pool, m) and self.passes(pool.servers[m], now_s):
            yield from self.send(pool, request, now_s)

    def serve(self, pool: Pool, now_s: float) -> Iterator[Action]:
        """Send queued requests to servers, oldest first, and start the server that the first waiting request needs.

        With victim=cost, group or none, start servers for all models with waiting requests.
        """
        if pool.leaving is not None and not pool.servers[pool.leaving].serving:
            yield from self.stop(pool, pool.leaving)
        while pool.queue:
            first = next(iter(pool.queue.values()))
            if not self.takes(pool, first.model):
                yield from self.make_way(pool, first.model, now_s)
            if not self.takes(pool, first.model):
                break
            if first.id in pool.queue:
                yield from self.send(pool, first, now_s)
        if self.victim in ("cost", "group", "none"):  # the first that waits holds up no other
            for m in sorted(pool.waiting, key=lambda m: -self.ranks[m]):
                yield from self.make_way(pool, m, now_s)

    def takes(self, pool: Pool, m: str) -> bool:
        """Tell whether a model's requests may be sent to its server, which may still be starting.

        With victim=group, a server that is up takes no request until the servers that it excludes have stopped.
        """
        if m not in pool.servers or m == pool.leaving:
            return False
        return self.victim != "group" or pool.servers[m].up_s == math.inf or self.room(pool, m) is not None

    def passes(self, server: Server, now_s: float) -> bool:
        """Tell whether requests for a server may pass older requests for other servers."""
        return self.queue == "collated" or (self.stay_s > 0.0 and now_s < server.up_s + self.stay_s)

    def send(self, pool: Pool, request: Request, now_s: float) -> Iterator[Action]:
        """Send a request to the server of its model."""
        del pool.queue[request.id]
        pool.waiting[request.model] -= 1
        if not pool.waiting[request.model]:
            del pool.waiting[request.model]
        server = pool.servers[request.model]
        server.serving += 1
        server.used_s = now_s
        self.sent[request.id] = request.model
        yield Admit(request.id, server.batch)
        if self.timed(request.model) and server.serving == 1:
            yield Wake(math.inf, f"idle {request.model}")

    def make_way(self, pool: Pool, m: str, now_s: float) -> Iterator[Action]:
        """Stop servers until a server of model m has room, and start it.

        The model waits while a server that has to stop has requests, and until its own last server is gone.
        """
        if m in pool.stopping or m == pool.leaving:
            return
        while (place := self.room(pool, m)) is None:
            stay = {n: s.up_s + self.stay_s for n, s in pool.servers.items()}
            unused = [n for n, s in pool.servers.items() if not s.serving and stay[n] <= now_s]
            if stops := self.stops(pool, m, unused):
                for n in stops:
                    yield from self.stop(pool, n)
                continue
            if self.stay_s:
                yield Wake(min((at_s for at_s in stay.values() if at_s > now_s), default=math.inf), f"stay {m}")
            if self.victim == "name" and pool.leaving is None:
                pool.leaving = min(pool.servers)
            return
        if m not in pool.servers:
            yield from self.bring(pool, m, place, now_s)
        if self.passes(pool.servers[m], now_s):
            for request in [r for r in pool.queue.values() if r.model == m]:
                yield from self.send(pool, request, now_s)

    def stops(self, pool: Pool, m: str, unused: Sequence[str]) -> Sequence[str]:
        """Return the models whose servers stop next to make room for model m; empty if m has to wait."""
        if self.victim == "none" or not unused or pool.leaving is not None:
            return ()
        if self.victim == "group":
            others = self.excluded(pool, m)
            return others if all(n in unused for n in others) else ()
        if self.victim != "cost":
            return [min(unused) if self.victim == "name" else min(unused, key=lambda n: pool.servers[n].used_s)]
        up = sorted(pool.servers, key=self.rate)
        every = (out for n in range(1, len(up) + 1) for out in combinations(up, n))
        outside = (out for out in every if self.room(pool, m, out) is not None)
        cheapest = min(outside, key=lambda out: sum(self.cost[n] for n in out), default=())
        return cheapest if all(n in unused for n in cheapest) else ()

    # ------------------------------------------------------------ servers

    def room(self, pool: Pool, m: str, without: Collection[str] = ()) -> Gpus | None:
        """Return the place with the most free memory among those with room for a model's server, or None.

        Servers of the models `without` do not count.
        """
        if self.victim == "group":
            place = pool.places[m][0]
            return None if self.excluded(pool, m) or not self.beside(pool, m, place) else place
        if len(pool.servers) - len(without) >= pool.most:
            return None
        free = [gpu.mem_bytes for gpu in self.cluster.gpus]
        for n, server in pool.servers.items():
            for g in place_of(server) if n not in without else ():
                free[g] -= server.need if self.most > 1 else free[g]
        fit = [at for at in pool.places[m] if min(free[g] for g in at) >= self.need[m]]
        return max(fit, key=lambda at: min(free[g] for g in at), default=None)

    def beside(self, pool: Pool, m: str, place: Gpus) -> bool:
        """Tell whether a model's server has room on its GPUs beside the servers there; True without pinned models."""
        used = Counter[int]()
        for n, server in pool.servers.items():
            used.update(dict.fromkeys(place_of(server), server.need) if n != m else {})
        return not self.pinned or all(used[g] + self.need[m] <= self.cluster.gpus[g].mem_bytes for g in place)

    def excluded(self, pool: Pool, m: str) -> Sequence[str]:
        """Return the models with servers that cannot run beside the server of model m.

        They are those of its own group and, if m is `exclusive`, those of other groups unless they are `persistent`.
        Pinned models neither exclude others nor are excluded.
        """
        mine = {g for at in pool.places[m] for g in at}
        others = [n for n in pool.servers if n != m and not self.pins[n]] if not self.pins[m] else []
        return [n for n in others if (self.alone[m] and not self.lasting[n]) or mine & set(place_of(pool.servers[n]))]

    def bring(self, pool: Pool, m: str, place: Gpus, now_s: float) -> Iterator[Action]:
        """Start the server of a model."""
        batch = Batch(Inst(m, place))
        pool.servers[m] = Server(batch, self.need[m], now_s, now_s)
        yield Load(batch.inst, self.way)
        yield Run(batch)

    def stop(self, pool: Pool, m: str) -> Iterator[Action]:
        """Stop a server that has no requests."""
        pool.stopping.add(m)
        yield Evict(pool.servers.pop(m).batch.inst)
        if self.timed(m):
            yield Wake(math.inf, f"idle {m}")
        if pool.leaving == m:
            pool.leaving = None

    def idle(self, m: str, now_s: float) -> Iterator[Action]:
        """Start the keep-alive timer of a server without requests."""
        if self.timed(m):
            yield Wake(now_s + self.keeps_s[m], f"idle {m}")

    def timed(self, m: str) -> bool:
        """Tell whether a model's keep-alive ends by a timer of its own instead of at a regular look."""
        return self.keeps_s[m] > 0.0 and not self.look_s

    def rate(self, m: str) -> float:
        """Return the forecast rate of a model in requests per second."""
        plan = self.cluster.plan.get(m)
        return plan.rate_rps if plan else 0.0


def place_of(server: Server) -> Gpus:
    """Return the GPUs of a server."""
    place = server.batch.inst.place
    assert isinstance(place, tuple)
    return place
