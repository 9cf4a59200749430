"""AlpaServe: copies of models on groups of GPUs, placed where simulated arrivals meet their SLOs best.

Li et al., "AlpaServe: Statistical Multiplexing with Model Parallelism for Deep Learning Serving", OSDI 2023, section
4.2; its code alpa-projects/mms 01f3976 (alpa_serve/placement_policy, base_policy.py 0c51fc6;
alpa_serve/simulator/controller.py 0273baa).

    g     a group of GPUs: a tensor-parallel group, which serves every model that has a copy on it
    S     a selection: which models have a copy on each group
    k     number of selections that are kept after each step (replica_placement_beam_search, `beam_size`: 3)
    W     a workload drawn from the forecast: Poisson arrivals of every model, `samples` in all
    t_g   time at which group g has finished all that was sent to it (simulate_requests, `group_clocks`)

Algorithm 1 (`select`) starts without copies. At each step, each of the k best selections gets one more copy, at every
place with room, and the best k of the results are kept. It ends when nothing has room or nothing could be better, and
returns the best selection seen. A selection is scored by simulating one queue a group: a request goes to the copy whose
group is free first, and is good if its first token comes within its TTFT SLO. The score is the share of good requests,
less a ten-thousandth of their mean seconds. Algorithm 2 (`place`) runs Algorithm 1 for each group size at which all
models are served. If there is no such size, each model has groups of its own degree.

`search=fast` is the heuristic for many models (section 4.2; replica_placement_fast_greedy, d8c0079): only one selection
grows. The group that served fewest requests gets a copy of the model that has the most requests that are not good.

A request goes to the copy whose group has the fewest requests (`select_group_id`). It is dropped if its first token
would come too late by the same estimate (`handle_request`); `late=serve` keeps it.

Not repeated here: pipeline stages, which no engine here has, so groups are tensor-parallel. Nor one batch at a time:
engines here batch continuously, so a request occupies its group as long as its tokens take in a full batch. Nor the
bonus of a millionth for each copy: copies take KV memory here, so one that gains less is not made. W has a coefficient
of variation of 1, because a forecast does not state one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from harness.policy.actions import Action, Admit, Drop, Load, Run
from harness.policy.chance import draw
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import busy, footprint, instances, one_request
from harness.policy.types import Batch, Cluster, Gpus, Inst, Option, Request, Unsupported
from harness.policy.view import View

DECISION_S = 0.0  # it searches before the start, and then compares a few counts for each request
Selection = tuple[tuple[int, ...], ...]  # models with a copy, by group
Copies = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # the same as flags: (models, groups)
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
LEAST = 1e-6  # least gain in score for which a copy is made
MOST = 1.5e9  # requests in queues that a beam search may simulate: 40 s on an x86-64 core


@dataclass(slots=True)
class AlpaServe:
    """A policy that places copies of models on groups of GPUs; each group serves first come first served."""

    cluster: Cluster
    k: int = number(3, 1, 16)
    samples: int = number(2000, 100, 100_000)  # the release draws 30,000 (simulation_min_samples)
    search: str = choice("beam", "fast")
    late: str = choice("drop", "serve")
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Finished}), init=False)
    uses: frozenset[str] = field(
        default=frozenset({"Load", "Run", "Admit", "Drop", "Request.slo", "Cluster.degrees"}), init=False
    )
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "elastic", "process": "gpu"}, init=False)
    groups: list[Gpus] = field(default_factory=list, init=False)
    homes: dict[str, list[int]] = field(default_factory=dict, init=False)  # groups with a copy, by model
    keeps_s: dict[tuple[str, int], float] = field(default_factory=dict, init=False)  # `held_s` by model and degree
    t: list[float] = field(default_factory=list, init=False)  # t_g
    queue: list[int] = field(default_factory=list, init=False)  # requests by group
    where: dict[int, int] = field(default_factory=dict, init=False)  # group by request

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place copies of the models at the start, then send each request to a copy of its model."""
        match event:
            case Woke("start"):
                yield from self.start()
            case Arrived(request):
                yield from self.arrived(request, view.now_s)
            case Finished(rid) if rid in self.where:
                self.queue[self.where.pop(rid)] -= 1

    # ------------------------------------------------------------ requests

    def start(self) -> Iterator[Action]:
        """Load the copies that Algorithm 2 selects."""
        self.groups, S = self.place()
        self.t, self.queue = [0.0] * len(self.groups), [0] * len(self.groups)
        names = list(self.cluster.models)
        self.keeps_s = {(m, len(at)): self.held_s(m, at) for i, m in enumerate(names)
                        for at, here in zip(self.groups, S, strict=True) if i in here}  # fmt: skip
        self.homes = {m: [g for g, here in enumerate(S) if i in here] for i, m in enumerate(names)}
        for m, homes in self.homes.items():
            for g in homes:
                yield Load(Inst(m, self.groups[g]))
                yield Run(Batch(Inst(m, self.groups[g])))

    def arrived(self, r: Request, now_s: float) -> Iterator[Action]:
        """Send a request to the group with the fewest requests, unless its first token would be late there."""
        homes = self.homes[r.model]
        if not homes:
            yield Drop(r.id)
            return
        g = min(homes, key=self.queue.__getitem__)
        begin_s = max(self.t[g], now_s)
        if self.late == "drop" and begin_s + self.first_s(r.model, g, r.prompt_tokens) > r.arrival_s + r.ttft_slo_s:
            yield Drop(r.id)
            return
        self.t[g] = begin_s + self.keeps_s[r.model, len(self.groups[g])]
        self.queue[g] += 1
        self.where[r.id] = g
        yield Admit(r.id, Batch(Inst(r.model, self.groups[g])))

    def first_s(self, m: str, g: int, tokens: int) -> float:
        """Return the seconds that a prompt of `tokens` tokens takes to prefill on model m's copy on group g."""
        return self.cluster.profile.prefill_s(Inst(m, self.groups[g]), tokens)

    def held_s(self, m: str, group: Gpus) -> float:
        """Return the seconds for which a model's request occupies a group, by the forecast; 0 without a forecast."""
        plan = self.cluster.plan.get(m)
        return busy(self.cluster, m, group) / plan.rate_rps if plan and plan.rate_rps > 0 else 0.0

    # ------------------------------------------------------------ where copies go

    def place(self) -> tuple[list[Gpus], Selection]:
        """Return the groups of the best size, and the best selection of copies on them (Algorithm 2)."""
        models, gpus = self.cluster.models, self.cluster.gpus
        sizes = set.intersection(*(set(model.degrees) for model in models.values()))
        nodes = [sum(gpu.node == node for gpu in gpus) for node in sorted({gpu.node for gpu in gpus})]
        even = sorted(size for size in sizes if all(n % size == 0 for n in nodes))
        cuts = [[tuple(range(g, g + size)) for g in range(0, len(gpus), size)] for size in even]
        if not cuts:
            work = {m: busy(self.cluster, m, tuple(range(model.tp))) * model.tp for m, model in models.items()}
            cuts = [instances(self.cluster, work)]
        search = self.select if self.search == "beam" else self.select_fast
        scored = [(search(cut), cut) for cut in cuts]
        (_, S), cut = max(scored, key=lambda pair: pair[0][0])
        return cut, S

    def select(self, groups: list[Gpus]) -> tuple[float, Selection]:
        """Return the best score that the beam search finds for these groups, and its selection (Algorithm 1).

        Raises Unsupported if the search would simulate more than MOST requests.
        """
        need, room, W = *self.sizes(groups), self.workload(groups)
        kept = [np.zeros(need.shape, bool)]  # which models have a copy on which groups
        best, most, work = (0.0, kept[0]), W.most(), 0
        least = self.k * need.size * len(W.model) * len(set(W.model))  # requests simulated until each model has a copy
        while kept and best[0] + LEAST < most:  # otherwise no selection is better
            if max(work, least) > MOST:
                raise Unsupported(
                    f"search=beam: to place {len(need)} models on {len(groups)} groups it would simulate more than "
                    f"{MOST:.2g} requests; search=fast is for many models, and fewer `samples` may do"
                )
            grown = []
            for x, S in enumerate(kept):
                more = ~S & (need <= (room - np.where(S, need, 0.0).sum(axis=0)))
                for S_ in kept[:x]:
                    if (S_ & ~S).sum() == 1:  # S with this copy is S_ with the one it lacks of S
                        more &= ~(S_ & ~S)
                grown += [(x, i, g) for g, i in np.argwhere(more.T).tolist()]
            scores = W.scores(kept, grown)
            work += len(grown) * len(W.model)
            order = sorted(range(len(grown)), key=lambda x: -scores[x])[: self.k]
            kept = [with_copy(kept[x], i, g) for x, i, g in (grown[y] for y in order)]
            if order and scores[order[0]] > best[0] + LEAST:
                best = scores[order[0]], kept[0]
        return best[0], by_group(best[1])

    def select_fast(self, groups: list[Gpus]) -> tuple[float, Selection]:
        """Return the best score among the selections that the fast heuristic passes through, and that selection."""
        need, room, W = *self.sizes(groups), self.workload(groups)
        S = np.zeros(need.shape, bool)
        best, most, free = (0.0, S), W.most(), room.copy()
        while True:
            score, late, served = W.queues(by_group(S))
            if score > best[0] + LEAST:
                best = score, S
            fits = ~S & (need <= free)
            if best[0] + LEAST >= most or not fits.any():
                return best[0], by_group(best[1])
            g = min(np.flatnonzero(fits.any(axis=0)).tolist(), key=served.__getitem__)
            i = max(np.flatnonzero(fits[:, g]).tolist(), key=late.__getitem__)
            S = with_copy(S, i, g)
            free[g] -= need[i, g]

    def sizes(self, groups: list[Gpus]) -> tuple[Bytes, Bytes]:
        """Return the bytes that each model needs on each GPU of each group, and the bytes that a GPU of each group has.

        The shapes are (models, groups) and (groups,). In each group, the GPU with least memory counts.
        """
        need = [[self.need(i, len(group)) for group in groups] for i in range(len(self.cluster.models))]
        return np.array(need), np.array([min(float(self.cluster.gpus[g].mem_bytes) for g in group) for group in groups])

    def need(self, i: int, degree: int) -> float:
        """Return the bytes that a copy of model i, with one longest request, needs on each of `degree` GPUs.

        They are infinite if the model is not served at that degree.
        """
        model = list(self.cluster.models.values())[i]
        if degree not in model.degrees:
            return math.inf
        model = model.at(degree)
        return footprint(model, elastic=True) + one_request(model)

    def workload(self, groups: list[Gpus]) -> Workload:
        """Return a workload drawn from the forecast, with the seconds of each model's requests on each group.

        The seconds are infinite if the model is not served at the group's degree.
        """
        models, plan = self.cluster.models, self.cluster.plan
        served = {m: [len(group) in model.degrees for group in groups] for m, model in models.items()}
        profile = self.cluster.profile
        first = [
            [profile.prefill_s(Inst(m, group), max(1, round(plan[m].prompt_tokens))) if ok and m in plan else math.inf
             for group, ok in zip(groups, served[m], strict=True)]
            for m in models
        ]  # fmt: skip
        held = [
            [self.held_s(m, group) if ok else math.inf for group, ok in zip(groups, served[m], strict=True)]
            for m in models
        ]
        rates = [plan[m].rate_rps if m in plan else 0.0 for m in models]
        slo = [model.ttft_slo_s for model in models.values()]
        return Workload.drawn(rates, self.samples, np.array(first), np.array(held), np.array(slo))


def with_copy(S: Copies, i: int, g: int) -> Copies:
    """Return a selection that also has a copy of model i on group g."""
    S = S.copy()
    S[i, g] = True
    return S


def by_group(S: Copies) -> Selection:
    """Return, for each group, the models that have a copy on it."""
    return tuple(tuple(np.flatnonzero(here).tolist()) for here in S.T)


@dataclass(frozen=True, slots=True)
class Workload:
    """Drawn arrivals of models, and the seconds that a request of each model takes on each group.

    Arrays of seconds have the shape (models, groups).
    """

    arrival_s: list[float]
    model: list[int]
    first_s: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    held_s: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    slo_s: np.ndarray[tuple[int], np.dtype[np.float64]]

    @staticmethod
    def drawn(
        rates: list[float],
        samples: int,
        first_s: np.ndarray[tuple[int, int], np.dtype[np.float64]],
        held_s: np.ndarray[tuple[int, int], np.dtype[np.float64]],
        slo_s: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> Workload:
        """Return a workload of `samples` Poisson arrivals; a hash of each arrival's number is its random number.

        If all rates are 0, it has no arrivals.
        """
        total = sum(rates)
        n = samples if total > 0 else 0
        ends = np.cumsum(rates) / (total or 1.0)
        gaps, marks = (np.array([draw(seed, i) for i in range(n)]) for seed in (0, 1))
        arrival_s = np.cumsum(-np.log(1.0 - gaps) / (total or 1.0))
        model = np.minimum(np.searchsorted(ends, marks, side="right"), len(rates) - 1)
        return Workload(arrival_s.tolist(), model.tolist(), first_s, held_s, slo_s)

    def most(self) -> float:
        """Return an upper bound of all scores: the score if every request ran alone on its model's fastest group."""
        first_s: list[float] = [self.first_s[m].min().item() for m in self.model]
        met = [x for x, m in zip(first_s, self.model, strict=True) if x <= self.slo_s.item(m)]
        return (len(met) - 1e-4 * sum(met)) / max(1, len(self.model))

    def queues(self, S: Selection) -> tuple[float, list[int], list[int]]:
        """Return a selection's score, each model's requests that miss their SLO, and each group's that meet it."""
        homes: list[list[int]] = [[] for _ in self.slo_s]
        for g, here in enumerate(S):
            for m in here:
                homes[m].append(g)
        clock, served, late, spent = [0.0] * len(S), [0] * len(S), [0] * len(homes), 0.0
        for t, m in zip(self.arrival_s, self.model, strict=True):
            late[m] += 1
            if homes[m]:
                g = min(homes[m], key=clock.__getitem__)
                begin = max(clock[g], t)
                waited = begin - t + self.first_s.item(m, g)
                if waited <= self.slo_s.item(m):
                    clock[g] = begin + self.held_s.item(m, g)
                    late[m] -= 1
                    served[g] += 1
                    spent += waited
        return (sum(served) - 1e-4 * spent) / max(1, len(self.model)), late, served

    def scores(self, kept: Sequence[Copies], grown: Sequence[tuple[int, int, int]]) -> list[float]:
        """Return the scores of many selections, each of which is a selection of `kept` with one more copy.

        `grown` has them as (index in `kept`, model, group).
        """
        if not grown or not self.arrival_s:
            return [0.0] * len(grown)
        of, added, at = np.array(grown).T
        every = np.arange(len(grown))
        clock = np.zeros((kept[0].shape[1], len(grown)))
        good, spent = np.zeros(len(grown)), np.zeros(len(grown))
        homes, shut, adding = [], [], []
        for m in range(len(self.slo_s)):
            here = np.array([S[m] for S in kept])
            homes.append(np.flatnonzero(here.any(axis=0)))  # groups with a copy in any kept selection
            shut.append(np.where(here[:, homes[m]].T, 0.0, np.inf)[:, of])  # infinite where a selection has no copy
            adding.append(np.flatnonzero(added == m))  # selections that add a copy of it
        for t, m in zip(self.arrival_s, self.model, strict=True):
            x = every
            if len(homes[m]):
                free = clock[homes[m]] + shut[m]
                pick = free.argmin(axis=0)
                g, least = homes[m][pick], free[pick, every]
                if len(mine := adding[m]):
                    g_, least_ = at[mine], clock[at[mine], mine]
                    first = (least_ < least[mine]) | ((least_ == least[mine]) & (g_ < g[mine]))
                    g[mine[first]], least[mine[first]] = g_[first], least_[first]
            elif len(x := adding[m]):
                g = at[x]
                least = clock[g, x]
            else:
                continue
            begin = np.maximum(least, t)
            waited = begin - t + self.first_s[m][g]
            met = waited <= self.slo_s[m]
            g, x_, begin = g[met], x[met], begin[met]
            clock[g, x_] = begin + self.held_s[m][g]
            good[x_] += 1.0
            spent[x_] += waited[met]
        shares: list[float] = ((good - 1e-4 * spent) / len(self.arrival_s)).tolist()
        return shares
