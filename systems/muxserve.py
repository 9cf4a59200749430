"""MuxServe: models share GPUs by a placement made once, and KV memory by quotas that follow their batches.

Duan et al., "MuxServe: Flexible Spatial-Temporal Multiplexing for Multiple LLM Serving", ICML 2024 (arXiv 2404.02015);
rules and constants of its code, hao-ai-lab/MuxServe 2231480, muxsched/{placement,scheduler}.py. MuxServe++ is the port
by Prism's authors (arXiv 2505.04021, section 7.1: SGLang, memory on demand), which is not released. No weights are
evicted.

    W_m   forecast requests a second            l_p, l_o   mean prompt and output tokens
    B_m   sequences in a decode step            s_m        KV bytes of a token
    t_p   seconds to prefill B_m prompts        t_d        seconds of a decode step of B_m, on few SMs
    F_g   memory of GPU g beside weights        Q_gm       KV quota of m on g
    u_m   mean decode batch since the last look, over the number of mean requests, s (l_p + l_o), that Q holds

Placement: for each partition of the GPUs into meshes, models are placed by W x size, the largest first. Each goes where
the requests a second that stay unserved grow least. A model alone serves B / (t_p + l_o t_d). Models that share a GPU
serve B_m / (sum of t_p + l_o t_d), with t_d on the fewest SMs on which the model alone serves W. The code compares
rate-weighted means, by a mesh's index in a list that it sorts meanwhile. Here a model counts up to its rate, as in the
paper. Among equal placements, the least KV demand over free memory wins (ours).

`degrees` says who chooses the parallel degree. "own", as published: Algorithm 2 gives each model a candidate for each
degree, and Algorithm 1 puts it on a whole mesh, whose size is its degree (`published`). "set", as in MuxServe++: the
model set fixes the degree, so only a mesh is chosen (`place`). Ours with "set": the order with the heaviest model first
is tried too. If no order finds room for all, the placement with the least KV demand over free memory is searched.

ADBS: Q ~ W s. Every `adapt_s`, a model with u >= 0.9 and a queue grows its batch by a tenth. It takes this from the
models below 0.9, in proportion to what they can spare. A model that did not run has u = 0. A quota is either a number
of `sequences` in a pool that all models share (the code's max_num_seqs), or a limit in `bytes` of at least one longest
request (the paper's token blocks). Whether the port kept either is not stated. So `none`, a pool for whichever model
asks first, is a choice of `bench tune`.

`lanes`: "engine" leaves batching to the engines. "turns" runs one prefill step at a time on a GPU, models in turn,
beside open decode lanes. "shares" does so too, and gives both phases percentages of the SMs, which are caps as under
MPS. The code holds decodes back while a prefill lacks SMs, not memory. Lanes here compete for SMs and never lack them,
so nothing is held back.

Preset `plusplus`, like the defaults, is "engine". At MPS 100 % no pool of SMs runs out, which is what makes prefills
take turns, and SGLang's schedulers decide their own steps. Preset `turns` keeps the round robin, so that both can be
measured. Preset `temporal` is MuxServe without MPS (MuxServe-Temporal of Weaver, ATC 2025, section 5): the models of a
mesh step one at a time, without quotas (ours: where a model waits for its turn, ADBS' mean batches say little).

`prefill=apart` is how Weaver's paper runs it ("1p1d", and "we only multiplex the workload between decoding GPUs"). The
second half of the GPUs prefills, each model on GPUs of its own if there are enough. Models share the first half for
decodes, and a prompt's KV moves there. A prompt that is preempted is prefilled again where it decodes. `decode_share`
is what Weaver's artifact sets by hand (gswxp2/weaver 2598e04, ae_exps/figure-4/driver_muxserve.py: mps_percentage [100,
50]), where engines batch. Preset `weaver` sets both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import ClassVar, NamedTuple

from harness.policy.actions import Action, Admit, Limit, Load, Move, Run, Wake
from harness.policy.events import Arrived, Event, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import footprint, searched, shares, spread
from harness.policy.types import Batch, Cluster, Gpus, Infeasible, Inst, Option
from harness.policy.view import View

DECISION_S = 105e-6  # mean of 6,247, 8 models on 2 GPUs; 2 shared x86-64 cores, CPython 3.11, 2026-11-21

NEEDY, SPARE, GROWTH = 0.9, 0.95, 0.1  # scheduler.py, adapt_max_num_seqs
MOST_SEQS, STEP_TOKENS = 256, 2048  # placement.py, max_num_seqs; config.py, max_num_batched_tokens
L_P, L_O = 161.0, 337.0  # placement.py, means of ShareGPT: where there is no forecast
DECODE_SHARES, MOST_SHARES = (30, 40, 50, 60, 70, 80, 90), 120  # placement.py, % of SMs: profiled; overload_threshold
PREFILL_SHARES = ((20e9, 80), (40e9, 90))  # placement.py: 80 % for 7B, 90 % for 13B, else all; by bytes of weights

Lacks = Mapping[str, float]  # requests a second that are not served, by model


class Llm(NamedTuple):
    """A model's forecast and sizes, as the placement uses them before the start; bytes are per GPU."""

    name: str
    tp: int
    W: float
    l_p: float
    l_o: float
    weight: int  # weights, and the KV that its engine keeps while idle
    floor: int  # KV of one longest request, and a granule to spare
    seq: float  # KV of one mean request
    kv: float  # W s, in proportion to which quotas are set
    pre_sms: int | None = None  # SMs of its prefill lane; None: all
    dec_sms: int | None = None
    share: int = 0  # per cent of the SMs that `dec_sms` are


# ---------------------------------------------------------------- placement


@dataclass(slots=True)
class Estimator:
    """Estimates of the throughput of models that share GPUs, from the profile (placement.py, CostEstimator)."""

    cluster: Cluster
    prefills: bool = True  # they run on the same GPUs
    by_degree: bool = False  # degrees are chosen: batches of up to 256 a GPU are tried, the largest that were profiled
    known: dict[tuple[Llm, int], tuple[float, float]] = field(default_factory=dict)
    units: dict[tuple[Llm, ...], Lacks] = field(default_factory=dict)

    def times(self, m: Llm, B: int) -> tuple[float, float]:
        """Return the seconds to prefill B requests (t_p), and the seconds to decode them as one batch (l_o t_d)."""
        if (m, B) not in self.known:
            inst, profile = Inst(m.name, tuple(range(m.tp))), self.cluster.profile
            full, rest = divmod(round(B * m.l_p), STEP_TOKENS)
            t_p = full * profile.prefill_s(inst, STEP_TOKENS) + (profile.prefill_s(inst, rest) if rest else 0.0)
            t_p *= self.prefills
            self.known[m, B] = t_p, m.l_o * profile.step_s(inst, B, round(B * (m.l_p + m.l_o / 2)), m.dec_sms)
        return self.known[m, B]

    def most(self, m: Llm) -> int:
        """Return the largest batch size that is tried for a model."""
        return MOST_SEQS * (m.tp if self.by_degree else 1)

    def alone(self, m: Llm, most: int) -> int:
        """Return the smallest batch with which a model alone on its GPUs serves its rate W; `most` if there is none."""
        return 1 + bisect_left(range(1, most), True, key=lambda B: meets(B / sum(self.times(m, B)), m.W))

    def unserved(self, unit: Sequence[Llm]) -> Lacks:
        """Return, for each model on a GPU, the requests a second that are not served at the best batch sizes.

        KV memory is split among the models in proportion to W s.
        """
        if (key := tuple(unit)) not in self.units:
            self.units[key] = min(self.tried(unit), key=lambda lacks: sum(lacks.values()))
        return self.units[key]

    def tried(self, unit: Sequence[Llm]) -> Iterator[Lacks]:
        """Yield each model's unserved requests a second for growing batches.

        The first batches would serve each model if it were alone. At each step the model that is served least, relative
        to its rate W, gets a larger batch. It ends when all rates are served or memory is used up.
        """
        F = self.cluster.gpus[0].mem_bytes - sum(m.weight for m in unit)
        total = sum(m.kv for m in unit) or 1.0
        most = [min(self.most(m), max(1, int(F * m.kv / total // m.seq))) for m in unit]
        B = [self.alone(m, top) for m, top in zip(unit, most, strict=True)]
        t = [self.times(m, b) for m, b in zip(unit, B, strict=True)]
        while True:
            prefill_s = sum(t_p for t_p, _ in t)
            served = [b / (prefill_s + decode_s) for b, (_, decode_s) in zip(B, t, strict=True)]
            yield {m.name: 0.0 if meets(x, m.W) else m.W - x for x, m in zip(served, unit, strict=True)}
            short = [k for k, m in enumerate(unit) if B[k] < most[k] and not meets(served[k], m.W)]
            if not short:
                return
            k = min(short, key=lambda k: served[k] / unit[k].W)
            B[k] += 1
            t[k] = self.times(unit[k], B[k])


def meets(served: float, W: float) -> bool:
    """Tell whether a throughput `served` is enough for the rate W, both in requests a second.

    As in placement.py, it may fall short of W by a tenth of `served`, but at most by half a request a second.
    """
    return served + min(0.5, served * 0.1) >= W


def partitions(gpus: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to split `gpus` GPUs into meshes of the given sizes, as tuples of sizes, largest size first.

    `sizes` has to be in descending order.
    """
    if gpus == 0:
        yield ()
    for k, size in enumerate(sizes):
        if size <= gpus:
            yield from ((size, *rest) for rest in partitions(gpus - size, sizes[k:]))


def meshes(cluster: Cluster, degrees: Iterable[int]) -> Iterator[list[Gpus]]:
    """Yield the ways to split the cluster into meshes of these degrees or 1, each mesh within one node.

    Ways that differ only in which of several equal nodes a mesh is on count once.
    """
    nodes = sorted({gpu.node for gpu in cluster.gpus})
    for cut in partitions(len(cluster.gpus), sorted({1, *degrees}, reverse=True)):
        left = [[g for g, gpu in enumerate(cluster.gpus) if gpu.node == node] for node in nodes]
        partition = []
        for size in cut:
            node = next((node for node in left if len(node) >= size), [])
            partition.append(tuple(node[:size]))
            del node[:size]
        if all(partition):
            yield partition


def greedy(estimator: Estimator, order: Sequence[Llm], cut: Sequence[Gpus]) -> tuple[float, float, dict[str, Gpus]]:
    """Place models in the given order; return the requests a second unserved, the highest KV pressure, and homes.

    KV pressure is a GPU's KV demand over its free memory. Both numbers are infinite if a model has no room. Each model
    goes where the unserved rates grow least; among equals, to the least busy GPUs, then to the emptiest (placement.py).
    It takes a mesh of its degree. If the partition `cut` has none, it takes part of a mesh of the next larger size.
    """
    gpus = estimator.cluster.gpus
    here: list[list[Llm]] = [[] for _ in gpus]
    homes: dict[str, Gpus] = {}

    def lost(g: int, more: Sequence[Llm] = ()) -> float:
        return sum(estimator.unserved([*here[g], *more]).values())

    def load(g: int) -> float:
        return sum(m.W * m.weight for m in here[g])

    for m in order:
        size = min((len(mesh) for mesh in cut if len(mesh) >= m.tp), default=m.tp)
        best: tuple[float, float, float, Gpus] | None = None
        for mesh in (mesh for mesh in cut if len(mesh) == size):
            for at in (mesh[k : k + m.tp] for k in range(0, size - m.tp + 1, m.tp)):
                left = min(gpus[g].mem_bytes - sum(x.weight + x.floor for x in [*here[g], m]) for g in at)
                if left < 0 or any(sum(x.share for x in [*here[g], m]) > MOST_SHARES for g in at):
                    continue
                loss = max(lost(g, [m]) - lost(g) for g in at)
                option = loss, max(load(g) for g in at), -left, at
                best = min(best or option, option)
        if best is None:
            return float("inf"), float("inf"), {}
        homes[m.name] = best[-1]
        for g in homes[m.name]:
            here[g].append(m)
    unserved = sum(max(estimator.unserved(here[g])[m] for g in at) for m, at in homes.items())
    demand = [sum(m.kv * (m.l_p + m.l_o) for m in unit) for unit in here]
    free = [gpu.mem_bytes - sum(m.weight for m in unit) for gpu, unit in zip(gpus, here, strict=True)]
    return unserved, max(d / f for d, f in zip(demand, free, strict=True)), homes


def place(cluster: Cluster, llms: Sequence[Llm], elastic: bool = False, *, prefills: bool = True) -> dict[str, Gpus]:
    """Return the best greedy placement over all partitions of the GPUs into meshes (Algorithm 1).

    `prefills` tells whether prompts are prefilled on the same GPUs. If no order of models finds room, all placements
    are searched, unless models have shares of the SMs. Raises Infeasible if no placement is found.
    """
    estimator = Estimator(cluster, prefills)
    popular = sorted(llms, key=lambda m: -m.W * m.weight * m.tp)
    heavy = sorted(llms, key=lambda m: -m.weight - m.floor)
    tried = (
        greedy(estimator, order, cut) for cut in meshes(cluster, [m.tp for m in llms]) for order in (popular, heavy)
    )
    *_, homes = min(tried, key=lambda placed: placed[:2])
    if not homes and not any(m.share for m in llms):
        homes = searched(cluster, {m.name: m.kv * (m.l_p + m.l_o) for m in llms}, elastic) or {}
    if not homes:
        raise no_room(cluster, llms)
    return {m.name: homes[m.name] for m in llms}


def no_room(cluster: Cluster, llms: Sequence[Llm]) -> Infeasible:
    """Return the error to raise when no placement was found."""
    m = max(llms, key=lambda m: (m.tp, m.weight + m.floor))
    return Infeasible(
        f"no placement found of {len(llms)} models with one request each on {len(cluster.gpus)} GPU(s)"
        f"{f', decode shares within {MOST_SHARES} % of each' if m.share else ''}; {m.name} alone takes "
        f"{(m.weight + m.floor) / 2**30:.1f} GiB on each of {m.tp}"
    )


# ---------------------------------------------------------------- placement that chooses degrees

Candidates = Mapping[int, Llm]  # one model at each of its degrees


def on_meshes(
    estimator: Estimator, models: Sequence[Candidates], cut: Sequence[Gpus]
) -> tuple[float, float, dict[str, Gpus]]:
    """Place models on the meshes `cut` by Algorithm 1 (smart_placement); return the same values as `greedy`.

    Each model goes to the mesh where the unserved rates grow least, at a degree that is the mesh's size. Among equals
    it goes to the smallest mesh, then to the least busy, then to the emptiest.
    """
    mem = estimator.cluster.gpus[0].mem_bytes
    here: dict[Gpus, list[Llm]] = {mesh: [] for mesh in cut}

    def lost(unit: Sequence[Llm]) -> float:
        return sum(estimator.unserved(unit).values())

    for model in models:
        best: tuple[float, int, float, int, Gpus] | None = None
        for mesh, unit in here.items():
            if (m := model.get(len(mesh))) is None:
                continue
            left = mem - sum(x.weight + x.floor for x in (*unit, m))
            if left < 0 or sum(x.share for x in (*unit, m)) > MOST_SHARES:
                continue
            load = sum(x.W * x.weight for x in unit)
            option = lost([*unit, m]) - lost(unit), len(mesh), load, -left, mesh
            best = min(best or option, option)
        if best is None:
            return float("inf"), float("inf"), {}
        mesh = best[-1]
        here[mesh].append(model[len(mesh)])
    full = [sum(m.kv * (m.l_p + m.l_o) for m in unit) / (mem - sum(m.weight for m in unit)) for unit in here.values()]
    homes = {m.name: mesh for mesh, unit in here.items() for m in unit}
    return sum(map(lost, here.values())), max(full), homes


def published(cluster: Cluster, models: Sequence[Candidates], *, prefills: bool = True) -> dict[str, Gpus]:
    """Return the best placement over all ways to split the GPUs into at most as many meshes as models.

    This is `optimize` of Algorithm 1. Models are placed by rate x size, the largest first. If every split has more
    meshes than there are models, the splits with the fewest meshes are tried. Raises Infeasible if no split has room.
    """
    estimator = Estimator(cluster, prefills, by_degree=True)
    every = [m for model in models for m in model.values()]
    groups = list(meshes(cluster, {m.tp for m in every}))
    most = max(len(models), min(map(len, groups)))
    order = sorted(models, key=lambda model: -min(m.W * m.weight * m.tp for m in model.values()))
    tried = (on_meshes(estimator, order, cut) for cut in groups if len(cut) <= most)
    *_, homes = min(tried, key=lambda placed: placed[:2])
    if not homes:
        raise no_room(cluster, [min(model.values(), key=lambda m: m.tp) for model in models])
    return homes


# ---------------------------------------------------------------- the policy


@dataclass(slots=True)
class MuxServe:
    """A policy that places models once, adapts KV quotas by ADBS, and can let models prefill in turn."""

    cluster: Cluster
    kv: str = choice("elastic", "paged")  # pages on demand (MuxServe++), or blocks (paged)
    degrees: str = choice("set", "own")  # of parallelism: the model set's (MuxServe++), or those of Algorithms 1 and 2
    adapt_s: float = number(8.0, 0, 64)  # between two adaptations of quotas (scheduler.py, adapt_interval); 0: none
    quotas: str = choice("none", "sequences", "bytes", tuned=True)  # none: first come first served
    lanes: str = choice("engine", "turns", "shares")  # who batches: see above
    sharing: str = choice("fluid", "turns")  # models of a mesh step side by side under MPS, or one at a time
    prefill: str = choice("beside", "apart")  # on the GPUs where a model decodes, or on others (Weaver, section 5)
    decode_share: int = number(0, 0, 100)  # per cent of the SMs that each model's decodes have, set by hand; 0: none is
    hears: frozenset[type] = field(default=frozenset({Woke}), init=False)
    uses: frozenset[str] = field(default=frozenset({"Load", "Run", "Admit", "Cluster.homes"}), init=False)
    options: Mapping[str, Option] = field(default_factory=dict, init=False)
    llms: dict[str, Llm] = field(default_factory=dict, init=False)
    home: dict[str, Gpus] = field(default_factory=dict, init=False)
    Q: dict[int, dict[str, int]] = field(default_factory=dict, init=False)  # bytes, by GPU and model
    seen: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)  # decode steps, tokens at the last look
    busy: dict[int, str] = field(default_factory=dict, init=False)  # the model whose prefill runs on a GPU
    last: dict[int, str] = field(default_factory=dict, init=False)  # the model whose prefill ran there last
    starved: set[str] = field(default_factory=set, init=False)  # prompts lacked memory (scheduler.py: wait_for_cache)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "plusplus": {"quotas": "sequences"},
        "turns": {"quotas": "sequences", "lanes": "turns"},
        "temporal": {"quotas": "none", "sharing": "turns"},
        "original": {"quotas": "sequences", "kv": "paged", "lanes": "shares", "degrees": "own"},
        "weaver": {"quotas": "none", "kv": "paged", "prefill": "apart", "decode_share": 50},
    }

    def __post_init__(self) -> None:
        process = "pair" if self.lanes == "shares" else "model"
        self.options = {"kv": self.kv, "process": process, "sharing": self.sharing}
        if self.quotas == "none":
            self.adapt_s = 0.0
        self.uses |= {"sequences": {"Run.seqs"}, "bytes": {"Limit"}, "none": set()}[self.quotas]
        if self.degrees == "own":
            self.uses |= {"Cluster.degrees"}
        if self.apart:
            self.hears |= {Prefilled}
            self.uses |= {"Run.phase:prefill", "Move", "Move.to:gpu"}
        if self.lanes != "engine":
            self.hears |= {Arrived, TurnEnded, Finished, Preempted}
            self.uses |= {"Run.phase:prefill", "Run.phase:decode", "Run.steps"}
        if self.lanes == "shares" or self.decode_share:
            self.uses |= {"Run.sms"}

    @property
    def apart(self) -> bool:
        """True if prompts are prefilled on separate GPUs, which takes at least two GPUs."""
        return self.prefill == "apart" and len(self.cluster.gpus) > 1

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place models and set quotas at the start; then adapt the quotas at intervals, and give out prefill turns."""
        match event:
            case Woke(key):
                yield from self.start() if key == "start" else self.adapt(view)
                if self.adapt_s > 0:
                    yield Wake((view.now_s // self.adapt_s + 1) * self.adapt_s, "adapt")
                yield from self.retry(view)
            case Arrived(request):
                yield from self.next(self.home[request.model], view)
            case Prefilled(rid, Batch(Inst(m)) as batch):
                if batch != self.batch(m):
                    yield from (Admit(rid, self.batch(m)), Move(rid, self.home[m]))
            case TurnEnded(Batch(Inst(m)), "prefill", why, steps):
                tokens = self.seen.get(m, (0, 0))
                self.seen[m] = tokens[0] + steps, tokens[1]
                yield from self.ended(m, why == "stuck", view)
            case Preempted(_, batch):
                self.starved.add(batch.inst.model)
            case Finished():
                yield from self.retry(view)

    def start(self) -> Iterable[Action]:
        """Load all weights, open lanes, route requests, and set the first quotas."""
        n = len(self.cluster.gpus) // (1 + self.apart)
        self.home.update(self.placed(replace(self.cluster, gpus=self.cluster.gpus[:n])))
        self.llms.update({m: self.llm(m, len(at)) for m, at in self.home.items()})
        for m in self.home:
            yield Load(self.batch(m).inst)
            yield from self.open(m) if self.quotas == "bytes" else ()
            yield from () if self.apart else (Admit(m, self.batch(m)),)
        yield from self.prefilling(n) if self.apart else ()
        for g, gpu in enumerate(self.cluster.gpus[:n]):
            here = [self.llms[m] for m, at in self.home.items() if g in at]
            F = gpu.mem_bytes - sum(m.weight for m in here)
            least = [self.least(m) for m in here]
            parts = shares(F, [x * min(1.0, F / sum(least)) for x in least], [m.kv for m in here])
            self.Q[g] = {m.name: int(part) for m, part in zip(here, parts, strict=True)}
        yield from (action for m in self.home for action in self.grant(m))

    def placed(self, shared: Cluster) -> Mapping[str, Gpus]:
        """Return the home of each model: the given one, or one chosen on the GPUs of `shared`.

        The field `degrees` decides whether its tensor-parallel degree is chosen too.
        """
        names, elastic, beside = list(shared.models), self.kv == "elastic", not self.apart
        if shared.homes:
            return spread(shared, elastic)
        if self.degrees == "set":
            return place(shared, [self.llm(m) for m in names], elastic, prefills=beside)
        homes = published(shared, [self.candidates(m) for m in names], prefills=beside)
        return {m: homes[m] for m in names}

    def prefilling(self, n: int) -> Iterable[Action]:
        """Load instances for prefill on the GPUs from the n-th on, and route prompts to them.

        Each has the largest degree with which every model can have GPUs of its own.
        """
        models, rest = dict(self.cluster.models), self.cluster.gpus[n:]
        each = max(1, len(rest) // len(models))
        for m, model in models.items():
            models[m] = model.at(max((tp for tp in model.degrees if tp <= min(each, model.tp)), default=model.tp))
        there = replace(self.cluster, gpus=rest, models=models, homes={})
        for m, at in spread(there, self.kv == "elastic").items():
            batch = Batch(Inst(m, tuple(g + n for g in at)))
            yield from (Load(batch.inst), Run(batch, "prefill"), Admit(m, batch))

    def open(self, m: str, seqs: int | None = None) -> Iterable[Action]:
        """Open the lane of a model that is never closed: for both phases with lanes=engine, else for decodes."""
        if self.lanes == "engine":
            yield Run(self.batch(m), seqs=seqs, sms=self.partition(self.decode_share) if self.decode_share else None)
        else:
            yield Run(self.batch(m), "decode", seqs=seqs, sms=self.llms[m].dec_sms if self.lanes == "shares" else None)

    def grant(self, m: str) -> Iterable[Action]:
        """Put a model's KV quota into force, as a limit in bytes or a number of sequences."""
        if self.quotas == "bytes":
            yield from (Limit(m, g, self.Q[g][m]) for g in self.home[m])
        else:
            yield from self.open(m, self.most(m) if self.quotas == "sequences" else None)

    def most(self, m: str) -> int:
        """Return the number of requests of mean length that a model's KV quota holds."""
        return max(1, int(min(self.Q[g][m] for g in self.home[m]) // self.llms[m].seq))

    def batch(self, m: str) -> Batch:
        """Return the batch of a model at its home."""
        return Batch(Inst(m, self.home[m]))

    def candidates(self, name: str) -> Candidates:
        """Return a model at each degree at which its parts fit a GPU (Algorithm 2, set_candidate_mesh_size).

        If there is no such degree, return it at all degrees.
        """
        each = {tp: self.llm(name, tp) for tp in self.cluster.models[name].degrees}
        fitting = {tp: m for tp, m in each.items() if m.weight + m.floor <= self.cluster.gpus[0].mem_bytes}
        return fitting or each  # the placement says then that there is no room

    def llm(self, name: str, tp: int | None = None) -> Llm:
        """Return a model's forecast and sizes at a degree, with the fewest SMs for decodes at its rate.

        If `tp` is None, the degree is that of the model set.
        """
        model, plan, gpu = self.cluster.models[name], self.cluster.plan.get(name), self.cluster.gpus[0]
        size = model.weight_bytes * model.tp
        model = model.at(tp or model.tp)
        W, l_p, l_o = (plan.rate_rps, plan.prompt_tokens, plan.output_tokens) if plan else (0.0, L_P, L_O)
        s, page = model.kv_token_bytes, model.page_bytes
        weight, floor = footprint(model, self.kv == "elastic"), page * (1 + ceil(model.max_tokens * s / page))
        m = Llm(name, model.tp, W, l_p, l_o, weight, floor, min(floor, s * (l_p + l_o)), W * s)

        m = m._replace(pre_sms=self.partition(next((share for top, share in PREFILL_SHARES if size < top), 100)))
        estimator = Estimator(self.cluster, by_degree=self.degrees == "own")
        most = max(1, min(estimator.most(m), int((gpu.mem_bytes - weight) // m.seq)))
        for share in DECODE_SHARES:
            m = m._replace(dec_sms=self.partition(share), share=share if self.lanes == "shares" else 0)
            B = estimator.alone(m, most)
            if meets(B / sum(estimator.times(m, B)), W):
                break
        return m

    def partition(self, share: int) -> int | None:
        """Return the smallest partition of at least `share` per cent of the SMs; None for all of them."""
        gpu = self.cluster.gpus[0]
        return next((n for n in gpu.sm_choices if 100 * n >= share * gpu.sms), None)

    def adapt(self, view: View) -> Iterable[Action]:
        """Adapt the KV quotas by ADBS.

        On each GPU, models that need more take quota from the others, in proportion to what these can spare. The model
        with the fullest quota is first.
        """
        mean, queue = dict[str, float](), dict[str, int]()
        for m in self.home:
            s, (steps, tokens) = view.batch(self.batch(m)), self.seen.get(m, (0, 0))
            mean[m] = (s.seq_steps - tokens) / (s.steps - steps) if s.steps > steps else 0.0
            queue[m] = s.waiting + s.decoding + s.away
            self.seen[m] = s.steps, s.seq_steps
        before = {m: [Q[m] for Q in self.Q.values() if m in Q] for m in self.home}
        most = {m: self.most(m) for m in self.home}
        for Q in self.Q.values():
            needy = sorted((m for m in Q if mean[m] >= NEEDY * most[m]), key=lambda m: -mean[m] / most[m])
            spare = {m: self.spare(m, Q[m], int(SPARE * most[m] - mean[m])) for m in Q if m not in needy}
            left, total = dict(spare), sum(spare.values())
            for m in needy:
                if queue[m] < (1 + GROWTH) * mean[m] or not total:
                    continue  # hardly any request waits
                more = min(max(1, int(GROWTH * mean[m])), int(queue[m] - mean[m])) * self.llms[m].seq
                for d, most_of in spare.items():
                    part = min(int(more * most_of / total), left[d])
                    left[d] -= part
                    Q[d] -= part
                    Q[m] += part
        for m in self.home:
            if before[m] != [Q[m] for Q in self.Q.values() if m in Q]:
                yield from self.grant(m)

    def spare(self, m: str, Q: int, seqs: int) -> int:
        """Return the bytes that a model can give away of its quota Q: those of its `seqs` free sequences, at least one.

        It always keeps its least quota (ours).
        """
        return max(0, min(int(max(1, seqs) * self.llms[m].seq), int(Q - self.least(self.llms[m]))))

    def least(self, m: Llm) -> float:
        """Return the least KV bytes of a model's quota: one longest request if quotas are in bytes, else a mean one."""
        return m.floor if self.quotas == "bytes" else m.seq

    # ------------------------------------------------------------ prefill round robin

    def ended(self, m: str, starved: bool, view: View) -> Iterable[Action]:
        """End a model's turn on its GPUs and begin the next model's."""
        if starved:
            self.starved.add(m)
        for g in self.home[m]:
            self.busy.pop(g, None)
        yield from self.next(self.home[m], view)

    def retry(self, view: View) -> Iterable[Action]:
        """Retry the models that lacked memory, now that some is free."""
        if self.starved:
            self.starved.clear()
            yield from self.next(tuple(self.Q), view)

    def next(self, gpus: Gpus, view: View) -> Iterable[Action]:
        """Begin a prefill turn on each free GPU, for the next model in round robin that has prompts and may prefill."""
        for g in gpus:
            names = list(self.Q[g])
            k = names.index(self.last[g]) + 1 if g in self.last else 0
            for m in names[k:] + names[:k]:
                if m in self.starved or any(at in self.busy for at in self.home[m]):
                    continue
                s = view.batch(self.batch(m))
                if not s.prefill_tokens:
                    continue
                seqs = self.most(m) - s.decoding - s.away if self.quotas == "sequences" else None
                if seqs is not None and seqs <= 0:
                    self.starved.add(m)
                    continue
                self.busy.update(dict.fromkeys(self.home[m], m))
                self.last.update(dict.fromkeys(self.home[m], m))
                sms = self.llms[m].pre_sms if self.lanes == "shares" else None
                yield Run(self.batch(m), "prefill", steps=1, seqs=seqs, sms=sms)
                break
