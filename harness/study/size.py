"""The fewest GPUs of each kind on which a strategy holds the target, for every model and for all together.

Each strategy of each kind is searched by itself, from the fewest GPUs that its weights fit on: doubled until the target
holds, then halved between the last count that fails and the first that holds. All strategies see the same windows: the
log in parts, each planned from another part, and its busiest hour. A count holds where it holds in every view. The
first strategy that has an answer goes before the others: these stop where their next count costs more than its answer.
So what is tried of a strategy depends on no other one but the first, and shards of a question try what one call tries.

Runs are those of a sweep: they are stored, checked and resumed as all others are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from harness.engines.costs.prices import Price
from harness.policy import mix
from harness.policy.types import GIB, Cluster, Inst, UserError
from harness.rows import pooled, record
from harness.rows.held import DAY_H
from harness.run import room, score, streams, sweep
from harness.run.estimates import Costs
from harness.run.resolve import resolve, traits
from harness.run.server_line import server_line
from harness.run.setup import Setup, load_trace
from harness.run.shard import Progress, Shard
from harness.run.slo import SloTarget
from harness.run.spec import Spec, from_dict
from harness.run.spec import asked as asked_system
from harness.run.teller import Silent, Teller
from harness.study.bases import slo_target, tails
from harness.study.binds import by_view, summed
from harness.study.degrees import NoRoom, fitting
from harness.study.offers import usd_hour
from harness.study.search import bracket
from harness.study.shared import placed
from harness.study.study import UNSHARED, named
from harness.study.traffic import View, million_tokens_hour, views

BOUNDS = (UNSHARED, "dedicated")  # recommended never: a bound, and the base to save from
WINDOWS = 3  # drawn of a generator
GROWTH = (1.25, 1.5, 2.0)  # times the traffic, of what is recommended
PAIR, SAME = 2, 0.0005  # counts that are compared; of attainment, within which they are alike
ONE_KIND = "not tried: it takes GPUs of one kind"
Criterion = Literal["each", "pooled"]


@dataclass(frozen=True)
class Asked:
    """A question: what is served, on what, how well. Raises UserError for spares or nodes of a mix of kinds."""

    setting: Mapping[str, Any]  # fields of a spec: trace, models, served ...
    kinds: tuple[str, ...]  # of GPUs, or mixes of kinds: a cluster of one has whole copies of it
    least: int
    most: int
    systems: tuple[str, ...]  # as --systems takes them
    rule: str  # of SLOs
    definition: str
    target: float  # share of requests that meet their SLO
    prices: Mapping[str, Price]
    spare: int = 0  # GPUs beside those that the target takes
    node: int = 1  # whole nodes of so many GPUs are bought
    growth: tuple[float, ...] = GROWTH
    windows: int = WINDOWS

    def __post_init__(self) -> None:
        mixed = next((kind for kind in self.kinds if mix.mixed(kind)), None)
        if mixed is not None and (self.spare or self.node > 1):
            what = "spare" if self.spare else "node"
            raise UserError(f"{what}: {mixed} has GPUs of several kinds, so it does not say which")

    def bought(self, gpus: int) -> int:
        """Return the GPUs that are bought where so many are needed: spares, then whole nodes."""
        return self.node * math.ceil((gpus + self.spare) / self.node)

    def usd_hour(self, kind: str, gpus: int) -> float | None:
        """Return the price of what is bought for so many GPUs; None where a kind has none."""
        return usd_hour(self.prices, kind, self.bought(gpus))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a strategy on a number of GPUs, over the windows of each view."""

    gpus: int
    share: Mapping[str, float] = field(default_factory=dict)  # attainment by view, all requests
    interval: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)  # of it; None: too few blocks
    models: Mapping[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)  # attainment, requests
    failing: tuple[str, ...] = ()  # models below the target in some view
    unfit: str = ""  # why it could not run; "": it did
    runs: tuple[Path, ...] = field(default=(), compare=False)

    def holds(self, target: float, by: Criterion) -> bool:
        """Tell whether the target holds in every view."""
        if self.unfit:
            return False
        return not self.failing if by == "each" else min(self.share.values()) >= target

    @property
    def worst(self) -> tuple[str, float]:
        """The model with the least attainment in any view."""
        each = [(share, name) for models in self.models.values() for name, (share, _) in models.items()]
        share, name = min(each, default=(0.0, "-"))
        return name, share


class Tried(NamedTuple):
    """A strategy on a number of GPUs, as a row of the stored table."""

    gpu: str
    label: str
    gpus: int
    usd_day: float | None
    pooled: float | None  # the least attainment of all requests in a view
    low: float | None
    high: float | None
    worst: float | None  # the least attainment of a model in a view
    worst_model: str | None
    unfit: str  # why it could not run; "": it did
    answer: bool  # the fewest on which every model holds the target
    runs: tuple[Path, ...]


@dataclass
class Curve:
    """The known verdicts on a strategy on a kind of GPU."""

    kind: str
    system: str
    tried: dict[int, Verdict] = field(default_factory=dict)  # by GPUs
    stopped: str = ""  # why its search ended without an answer

    def fewest(self, target: float, by: Criterion = "each") -> int | None:
        """Return the least count from which on all that were tried hold the target."""
        held = None
        for gpus in sorted(self.tried, reverse=True):
            if not self.tried[gpus].holds(target, by):
                break
            held = gpus
        return held

    def below(self, gpus: int) -> Verdict | None:
        """Return the verdict on the largest count below this one."""
        lower = [n for n in self.tried if n < gpus]
        return self.tried[max(lower)] if lower else None

    @property
    def flat(self) -> tuple[Verdict, Verdict] | None:
        """The verdicts on the two largest counts, where the worst model meets no more on the larger; else None."""
        ran = [self.tried[n] for n in sorted(self.tried) if not self.tried[n].unfit][-PAIR:]
        if len(ran) < PAIR or ran[1].worst[1] > ran[0].worst[1] + SAME:
            return None
        return ran[0], ran[1]

    def row(self, asked: Asked, gpus: int) -> Tried:
        """Return a count that was tried as a row of the table."""
        verdict, usd = self.tried[gpus], asked.usd_hour(self.kind, gpus)
        view, share = min(verdict.share.items(), key=lambda pair: pair[1], default=("", None))
        low, high = verdict.interval.get(view) or (None, None)
        name, worst = (None, None) if verdict.unfit else verdict.worst
        return Tried(self.kind, self.system, gpus, usd and usd * DAY_H, share, low, high, worst, name, verdict.unfit,
                     gpus == self.fewest(asked.target), verdict.runs)  # fmt: skip


Curves = Mapping[tuple[str, str], Curve]  # by kind and system


@dataclass(frozen=True)
class Sized:
    """An answered question."""

    asked: Asked
    views: tuple[View, ...]
    curves: Curves
    degrees: Mapping[str, Mapping[str, int]]  # of tensor parallelism by kind and model, where it was chosen
    best: tuple[str, str, int] | None  # kind, system, GPUs: the cheapest on which every model holds the target
    grown: Mapping[float, int | None]  # GPUs of the best for more traffic; None: more than the most
    cold_s: Mapping[str, float]  # seconds in which each model is loaded from the host, on the best's kind
    placed: Mapping[str, Mapping[str, float]]  # by GPU and model: the share of its requests that ran there, of the best
    million_tokens_hour: float  # prompt and output of what the models serve, in the whole log
    dedicated: Mapping[str, int]  # by kind: GPUs where each model has its own
    lacks: str  # memory that the best lacks on one GPU fewer; "": load binds
    tails: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # P95 of TTFT and TPOT in s, of the best
    rules: Mapping[str, str] = field(default_factory=dict)  # of SLOs by kind of GPU; of a mix with the kind of the base
    servers: Mapping[str, str] = field(default_factory=dict)  # by kind: what the servers do, and the KV that is left
    kept_share: float = 1.0  # of the log's requests: the others' streams were dropped
    streams: tuple[str, ...] = ()  # by which rule streams and models meet
    short: Mapping[tuple[str, str], str] = field(default_factory=dict)  # what binds, where more GPUs do not help

    @property
    def tried(self) -> list[Tried]:
        """Every count that was tried."""
        return [curve.row(self.asked, n) for curve in self.curves.values() for n in sorted(curve.tried)]


def size(asked: Asked, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Sized:
    """Answer a question; runs are kept below `out`. UserError where it cannot be asked."""
    return Work(asked, out, workers, teller or Silent()).done()


def progress(asked: Asked, out: Path) -> Iterator[Progress]:
    """Yield how far the search of each strategy on each kind is, from the runs below `out`; nothing is run."""
    work = Work(asked, out, None, Silent())
    for key, curve in work.curves().items():
        if not curve.stopped:
            work.found = 0
            yield sweep.stored_so_far((" ".join(key),), partial(work.search, [key]), lambda: work.found)


class Outlook(NamedTuple):
    """The search of a strategy on a kind of GPU before anything is run; it ends earlier where it finds its answer."""

    kind: str
    system: str
    least: int  # GPUs that are tried first
    most: int
    runs: int  # at most
    seconds: float  # of a processor, at most


def outlook(asked: Asked, out: Path) -> tuple[list[Outlook], list[str]]:
    """Return the searches of a question with their cost, and the streams of its log; nothing is run."""
    work, costs = Work(asked, out, None, Silent()), Costs.of(out)
    rows = []
    for (kind, name), curve in work.curves().items():
        if curve.stopped:
            continue
        per, begin = mix.size(kind), work.begins[kind][1]
        doublings = math.ceil(math.log2(work.most(kind) / per / begin)) if work.most(kind) > per * begin else 0
        counts = 1 if own_count(work.systems[name]) else 1 + 2 * doublings
        cost_s = costs.cpu_s(resolve(replace(work.spec(kind, name, per * begin), slo="")))
        runs = counts * sum(len(view.seeds) for view in work.views)
        rows.append(Outlook(kind, name, per * begin, work.most(kind), runs, runs * cost_s))
    setup = Setup(work.spec(work.kinds[0], next(iter(work.systems)), 1, seed=0))
    return rows, streams.lines(setup, every=True)


class Work:
    """One call of `size`."""

    def __init__(self, asked: Asked, out: Path, workers: int | None, teller: Teller) -> None:
        self.asked, self.out, self.workers, self.teller = asked, out, workers, teller
        self.systems = named(asked.systems)
        self.views = views(str(asked.setting["trace"]), asked.windows, out)
        self.sets: dict[str, tuple[str, dict[str, int]]] = {}
        self.begins: dict[str, tuple[int, int]] = {}
        self.refused: dict[str, str] = {}  # kinds that cannot hold a model, and why
        for kind in asked.kinds:
            try:
                self.sets[kind] = fitting(asked.setting, kind, asked.most, out)
                self.begins[kind] = self._ends(kind)
            except NoRoom as why:
                self.refused[kind] = str(why)
        self.kinds = [kind for kind in asked.kinds if kind not in self.refused]
        if not self.kinds:
            raise NoRoom("; ".join(self.refused.values()))
        for kind in self.kinds:  # a mistake shows before anything is run
            for name in self.systems:
                traits(self.spec(kind, name, self.most(kind)))
        self._targets: dict[tuple[str, str], SloTarget] = {}
        self.found = 0  # runs of all counts so far

    def done(self) -> Sized:
        """Search all strategies, then ask more of the best."""
        curves, best, grown = self.search(list(self.curves()))
        runs = curves[best[:2]].tried[best[2]].runs if best else ()
        trace, base = load_trace(str(self.asked.setting["trace"])), self._setup(self.kinds[0])
        return Sized(
            self.asked, self.views, curves, {kind: degrees for kind, (_, degrees) in self.sets.items() if degrees},
            best, grown, self._cold_s(*best) if best else {}, placed(runs),
            million_tokens_hour(trace, base.models, base.spec.assign),
            {kind: sum(model.tp for model in self.cluster(kind).models.values())
             for kind in self.kinds if not mix.mixed(kind)},
            self._lacks(curves, best), tails(runs),
            {kind: self.under(kind, self.views[0]).rule for kind in self.kinds},
            {kind: server_line(self._setup(kind)) for kind in self.kinds},
            trace.kept_share, tuple(streams.lines(base)), self._short(curves),
        )  # fmt: skip

    def part(self, shard: Shard) -> tuple[int, int]:
        """Search a shard's strategies, each on each kind; returns how many searches these are, and how many there are.

        Once all shards are done, `size` finds every run there that it needs.
        """
        every = [key for key, curve in self.curves().items() if not curve.stopped]
        mine = shard.part(every, " ".join)
        if mine:
            self.search(mine)
        return len(mine), len(every)

    def curves(self) -> Curves:
        """Return a curve for each system on each kind, before anything is tried. UserError where none can be."""
        kinds = self.asked.kinds
        curves = {(kind, name): Curve(kind, name, stopped=self._refused(kind, name))
                  for kind in kinds for name in self.systems}  # fmt: skip
        if all(curve.stopped for curve in curves.values()):
            mixes = ", ".join(kind for kind in kinds if kind not in self.refused)
            raise UserError(f"{mixes}: GPUs of several kinds, and {', '.join(self.systems)} takes one")
        return curves

    def search(
        self, mine: Iterable[tuple[str, str]]
    ) -> tuple[Curves, tuple[str, str, int] | None, dict[float, int | None]]:
        """Search some curves for the fewest GPUs for every model, then for all models together.

        Returns all curves; the cheapest answer of these and of the first strategy; and the GPUs that it takes for more
        traffic, where it is one of these.
        """
        curves, target = self.curves(), self.asked.target
        first = self._first(curves)
        searched = [curves[key] for key in curves if key in set(mine)]
        self._search(searched, 1.0, "each", first)
        self._search([curve for curve in searched if curve.fewest(target)], 1.0, "pooled")
        best = self._best({key: curves[key] for key in curves if curves[key] in (*first, *searched)}.values())
        grown: dict[float, int | None] = {}
        if best is not None and curves[best[:2]] in searched:
            kind, name, gpus = best
            for times in self.asked.growth:
                more = Curve(kind, name)
                self._search([more], times, "each", least=gpus // mix.size(kind))
                grown[times] = more.fewest(target)
        return curves, best, grown

    def _first(self, curves: Curves) -> list[Curve]:
        """Search the strategies one after the other until one has an answer on some kind; returns its curves."""
        for name in (name for name in self.systems if not self._bound(name)):
            mine = [curves[kind, name] for kind in self.asked.kinds]
            self._search(mine, 1.0, "each", mine)
            if self._best(mine) is not None:
                return mine
        return []

    def _lacks(self, curves: Curves, best: tuple[str, str, int] | None) -> str:
        """Say how much memory the best lacks on one GPU fewer, where that is why it does not hold."""
        if best is None:
            return ""
        kind, name, gpus = best
        below = curves[kind, name].below(gpus)
        if below is None or not below.unfit or below.gpus != gpus - mix.size(kind):
            return ""
        short = room.short_bytes(self.under(kind, self.views[0]).spec(self.spec(kind, name, below.gpus)))
        return "memory" if short is None else f"{short / GIB:.1f} GiB a GPU"

    def _short(self, curves: Curves) -> dict[tuple[str, str], str]:
        """Return what binds in most misses on the most GPUs, of each strategy that more GPUs do not help."""
        short = {}
        for key, curve in curves.items():
            if curve.flat is None or curve.fewest(self.asked.target) is not None:
                continue
            views = by_view(curve.flat[1].runs, self.views, partial(self.under, curve.kind), self.asked.definition)
            total = summed(hour for of in views.values() for hours in of.values() for hour in hours.values())
            if total.first:
                short[key] = total.first
        return short

    # ------------------------------------------------------------ search

    def _search(
        self, curves: Sequence[Curve], times: float, by: Criterion, first: Sequence[Curve] = (), least: int = 0
    ) -> None:
        """Try counts until each curve has its answer, a round of all curves at a time; none dearer than the first's."""
        for turn in count(1):
            asks = [(curve, n) for curve in curves if (n := self._next(curve, first, by, least)) is not None]
            if not asks:
                return
            what = f"{'sizes' if times == 1 else f'{times:g} x the traffic'}, round {turn}"
            self.run_counts(asks, times, what)

    def _next(self, curve: Curve, first: Iterable[Curve], by: Criterion, least: int) -> int | None:
        """Return the GPUs that a curve tries next; None where its search is over.

        Counts are of copies of a mix in here; of one kind, a copy is a GPU.
        """
        tried, target, size = curve.tried, self.asked.target, mix.size(curve.kind)
        if curve.stopped:
            return None
        if own_count(self.systems[curve.system]):
            return None if tried else traits(self.spec(curve.kind, curve.system, size)).gpus
        answer = curve.fewest(target, by)
        failed = [n // size for n, verdict in tried.items()
                  if not verdict.holds(target, by) and (answer is None or n < answer)]  # fmt: skip
        floor, begin = (max(n, least) for n in self.begins[curve.kind])
        cap, held = self._cap(curve, first), None if answer is None else answer // size
        n = bracket(failed, held, floor, cap, begin=begin)
        if n is None and held is None:
            low, most = max(failed, default=floor - 1), self.most(curve.kind) // size
            curve.stopped = f"> {low * size}: a cheaper count is found" if cap < most else f"> {most * size}"
        return None if n is None else n * size

    def most(self, kind: str) -> int:
        """Return the most GPUs of a kind, or of whole copies of a mix, that may be tried. UserError for no copy."""
        size = mix.size(kind)
        if size > self.asked.most:
            raise UserError(f"--gpus ends at {self.asked.most}, and {kind} is {size} GPUs")
        return self.asked.most - self.asked.most % size

    def _refused(self, kind: str, name: str) -> str:
        """Say why a system is not tried on a kind; empty where it is."""
        if kind in self.refused:
            return self.refused[kind]
        return "" if takes(self.systems[name], kind) else ONE_KIND

    def _cap(self, curve: Curve, first: Iterable[Curve]) -> int:
        """Return the most copies of a curve's kind that cost no more than the cheapest answer of the first strategy."""
        best, size = self._best(first), mix.size(curve.kind)
        most = self.most(curve.kind) // size
        if best is None or self._bound(curve.system):
            return most
        kind, _, gpus = best
        if kind == curve.kind:
            return min(most, gpus // size)
        mine, its = (usd_hour(self.asked.prices, *what) for what in ((curve.kind, size), (kind, gpus)))
        return most if mine is None or its is None else min(most, max(1, math.floor(its / mine)))

    def _best(self, curves: Iterable[Curve]) -> tuple[str, str, int] | None:
        """Return the cheapest answer; between equal ones that of the strategy that was asked for first."""
        asked = self.asked
        answers = [(asked.usd_hour(curve.kind, gpus) or math.inf, gpus, at, (curve.kind, curve.system, gpus))
                   for at, curve in enumerate(curves) if not self._bound(curve.system)
                   and (gpus := curve.fewest(asked.target)) is not None]  # fmt: skip
        return min(answers)[-1] if answers else None

    def _bound(self, name: str) -> bool:
        """Tell whether a system is one of BOUNDS, whatever its preset and fields."""
        return str(asked_system(self.systems[name])["system"]) in BOUNDS

    def _ends(self, kind: str) -> tuple[int, int]:
        """Return the fewest copies that hold each model alone, and those that are tried first.

        These hold all weights, and are no fewer than asked for; where they hold the target, fewer are tried.
        """
        size, cluster = mix.size(kind), self.cluster(kind)
        weights = sum(model.weight_bytes * model.tp for model in cluster.models.values())
        largest = max(n for _, n in mix.parts(kind))
        floor = max(math.ceil(m.tp / largest) for m in cluster.models.values())
        most, asked = self.most(kind) // size, math.ceil(self.asked.least / size)
        if self.asked.least == self.asked.most:  # one count, and no other
            floor = max(floor, asked)
        if floor > most:
            raise NoRoom(f"--gpus ends at {self.asked.most}, and a model takes {floor * size} {kind}")
        return floor, min(most, max(floor, asked, math.ceil(weights / sum(gpu.mem_bytes for gpu in cluster.gpus))))

    # ------------------------------------------------------------ runs

    def run_counts(self, asks: Sequence[tuple[Curve, int]], times: float, what: str) -> None:
        """Run strategies on counts, in all windows, and add their verdicts."""
        specs = [self.under(curve.kind, view).spec(self.spec(curve.kind, curve.system, n, view, seed, times))
                 for curve, n in asks for view in self.views for seed in view.seeds]  # fmt: skip
        folders = iter(sweep.sweep(specs, self.out, workers=self.workers, teller=self.teller, what=what))
        self.found += len(specs)
        for curve, n in asks:
            runs = {view: [next(folders) for _ in view.seeds] for view in self.views}
            curve.tried[n] = self._verdict(curve.kind, n, runs)

    def _verdict(self, kind: str, gpus: int, runs: Mapping[View, Sequence[Path]]) -> Verdict:
        every = tuple(folder for folders in runs.values() for folder in folders)
        for about in map(record.meta, every):
            if why := about["skipped"] or about["infeasible"]:
                return Verdict(gpus, unfit=str(why))
        share: dict[str, float] = {}
        interval: dict[str, tuple[float, float] | None] = {}
        models: dict[str, dict[str, tuple[float, int]]] = {}
        failing: dict[str, None] = {}
        definition = self.asked.definition
        for view, folders in runs.items():
            under = self.under(kind, view)
            each = [score.by_model(folder, under, [definition])[definition] for folder in folders]
            missed = np.concatenate([lost.sum(0) for _, lost, _ in each])[None]
            offered = np.concatenate([came.sum(0) for _, _, came in each])[None]
            shares = pooled.shares(pooled.Counts(np.array([1.0]), missed, offered))
            share[view.name] = 1.0 - float(shares.share[0])
            low, high = 1.0 - float(shares.high[0]), 1.0 - float(shares.low[0])
            interval[view.name] = None if (low, high) == (0.0, 1.0) else (low, high)
            counts: dict[str, tuple[float, float]] = {}  # misses and requests by model
            for names, lost_by, came_by in each:
                for name, lost, came in zip(names, lost_by.sum(1).tolist(), came_by.sum(1).tolist(), strict=True):
                    before = counts.get(name, (0.0, 0.0))
                    counts[name] = before[0] + lost, before[1] + came
            models[view.name] = {m: (1.0 - lost / came, round(came)) for m, (lost, came) in counts.items() if came}
            most = 1.0 - self.asked.target
            failing |= {m: None for m, (lost, came) in counts.items() if came and lost > math.ceil(most * came - 1e-9)}
        return Verdict(gpus, share, interval, models, tuple(failing), "", every)

    def cluster(self, kind: str, gpus: int | None = None) -> Cluster:
        """Return so many GPUs of a kind (one, or one copy of a mix), with all models, each at its degree."""
        spec = self.spec(kind, next(iter(self.systems)), gpus or mix.size(kind))
        return Setup(resolve(replace(spec, system=UNSHARED, preset=None, fields=(), slo=""))).cluster

    def under(self, kind: str, view: View) -> SloTarget:
        """Return the SLO seconds on a kind of GPU, of the traffic of a view."""
        if (kind, view.trace) not in self._targets:
            spec = self.spec(kind, next(iter(self.systems)), mix.size(kind), view)
            self._targets[kind, view.trace] = slo_target(
                spec, self.asked.rule, self.out, workers=self.workers, teller=self.teller
            )
        return self._targets[kind, view.trace]

    def _setup(self, kind: str) -> Setup:
        """Return one GPU of a kind, or one copy of a mix, with all models, each at its degree."""
        return Setup(self.spec(kind, next(iter(self.systems)), mix.size(kind)))

    def spec(
        self, kind: str, system: str, gpus: int, view: View | None = None, seed: int | None = None, times: float = 1.0
    ) -> Spec:
        """Return the spec of one run, of the first view and its first seed unless others are given."""
        view = view or self.views[0]
        fields = {**self.asked.setting, "trace": view.trace, "models": self.sets[kind][0], "gpu": kind, "gpus": gpus}
        spec = from_dict({**fields, **asked_system(self.systems[system])})
        return replace(spec, seed=view.seeds[0] if seed is None else seed, rate_scale=times)

    # ------------------------------------------------------------ of the best

    def _cold_s(self, kind: str, system: str, gpus: int) -> dict[str, float]:
        """Compute the seconds in which each model comes in from the host, on idle links."""
        cluster = Setup(resolve(replace(self.spec(kind, system, gpus), slo=""))).cluster
        return {name: cluster.profile.load_s(Inst(name, tuple(range(model.tp))), "parallel")
                for name, model in cluster.models.items()}  # fmt: skip


def located(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths of files absolute, so that what is stored holds from any folder."""
    files = {"trace": ".parquet", "models": ".toml", "table": ".toml"}
    paths = {key: os.path.abspath(setting[key]) for key, suffix in files.items()  # noqa: PTH100 - a link keeps its name
             if str(setting.get(key, "")).endswith(suffix)}  # fmt: skip
    return {**setting, **paths}


def own_count(system: str) -> bool:
    """Tell whether a system, as --systems takes it, has as many GPUs as its models need, whatever it is given."""
    return hasattr(Setup(from_dict(asked_system(system))).make_policy, "gpus_needed")


def takes(system: str, kind: str) -> bool:
    """Tell whether a system, as --systems takes it, places on GPUs of this kind, or of this mix of kinds."""
    return not mix.mixed(kind) or getattr(Setup(from_dict(asked_system(system))).make_policy, "mixed", False)
