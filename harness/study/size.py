"""The fewest GPUs of each kind with which a strategy meets the target, for each model and for all requests together.

Each strategy is searched on each kind of GPU by itself. The number of GPUs starts at the fewest that have room for all
weights, and doubles until the target is met. It is then bisected between the largest number that fails and the smallest
that succeeds. All strategies replay the same stretches of the trace: parts of the log, each planned from another part,
and the log's busiest hour. A number of GPUs meets the target if it does so in every stretch.

Strategies are first searched one by one, until one has an answer. The search of every other strategy stops at numbers
of GPUs that would cost more than this first answer. Later answers set no further limit. Shards of a question therefore
try the same numbers as a single call.

Runs are made by a sweep: they are stored, checked and resumed as all other runs are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain, count, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.policy import mix
from harness.policy.types import GIB, Cluster, Inst, UserError
from harness.rows import pooled, record
from harness.rows.by_window import Counted
from harness.rows.estimate import Estimate
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
from harness.study.binds import Hours, by_view, merged, total
from harness.study.degrees import NoRoom, fitting
from harness.study.offers import usd_hour
from harness.study.search import bracket
from harness.study.shared import Shares, at_once, placed
from harness.study.sized import Best, Criterion, Curve, Curves, Met, Outcome, Question, Sized
from harness.study.study import UNSHARED, named
from harness.study.traffic import View, million_tokens_hour, views

ONE_KIND = "not tried: it takes GPUs of one kind"


class Outlook(NamedTuple):
    """Upper bounds on the cost of the search for a strategy on a kind of GPU, known before anything is run."""

    kind: str
    system: str
    least: int  # GPUs that are tried first
    most: int
    runs: int  # at most
    seconds: float  # processor seconds, at most


class SizeSearch:
    """The search for the answer to a question of size; runs are stored below `out`.

    Raises UserError if the question has no meaning.
    """

    def __init__(self, asked: Question, out: Path, workers: int | None = None, teller: Teller | None = None) -> None:
        self.asked, self.out, self.workers, self.teller = asked, out, workers, teller or Silent()
        self.systems = named(asked.systems)
        self.views = views(str(asked.setting["trace"]), asked.windows, out)
        self.under = cache(self._under)
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
        self.found = 0  # runs of all counts so far

    def done(self) -> Sized:
        """Search all strategies; return the answer, with further facts about the best strategy."""
        curves, best, grown = self.search(list(self.curves()))
        runs = curves[best[:2]].tried[best.gpus].runs if best else ()
        trace, base, shares = load_trace(str(self.asked.setting["trace"])), self._setup(self.kinds[0]), placed(runs)
        alike = (kind for kind in self.kinds if not mix.mixed(kind))
        dedicated = {kind: sum(model.tp for model in self.cluster(kind).models.values()) for kind in alike}
        return Sized(
            self.asked,
            self.views,
            curves,
            {kind: degrees for kind, (_, degrees) in self.sets.items() if degrees},
            best,
            grown,
            self._cold_s(*best) if best else {},
            shares,
            million_tokens_hour(trace, base.models, base.spec.assign),
            dedicated,
            self._lacks(curves, best) if best else "",
            tails(runs),
            {kind: self.under(kind, self.views[0]).rule for kind in self.kinds},
            {kind: server_line(self._setup(kind)) for kind in self.kinds},
            trace.kept_share,
            tuple(streams.lines(base)),
            self._short(curves),
            self.refused,
            best is not None and self._at_once(best, shares),
        )

    def part(self, shard: Shard) -> tuple[int, int]:
        """Run the searches of a shard; return the number of its searches, and the number of all searches.

        Once all shards are done, `done` finds all runs that it needs below `out`.
        """
        mine = shard.part(self.searches, " ".join)
        if mine:
            self.search(mine)
        return len(mine), len(self.searches)

    def progress(self) -> Iterator[Progress]:
        """Yield the progress of the search of each strategy on each kind, judged by the stored runs; nothing is run."""
        for key in self.searches:
            self.found = 0
            yield sweep.stored_so_far((" ".join(key),), partial(self.search, [key]), lambda: self.found)

    def outlook(self) -> tuple[list[Outlook], list[str]]:
        """Return upper bounds on the cost of each search, and lines on the streams of the log; nothing is run."""
        costs, rows, windows = Costs.of(self.out), list[Outlook](), sum(len(view.seeds) for view in self.views)
        for kind, name in self.searches:
            least, most = mix.size(kind) * self.begins[kind][1], self.most(kind)
            counts = 1 if own_count(self.systems[name]) else 1 + 2 * math.ceil(math.log2(most / least))
            cost_s = costs.cpu_s(resolve(replace(self.spec(kind, name, least), slo="")))
            rows.append(Outlook(kind, name, least, most, counts * windows, counts * windows * cost_s))
        return rows, streams.lines(self._setup(self.kinds[0]), every=True)

    def curves(self) -> Curves:
        """Return an empty curve for each strategy on each kind of GPU. Raises UserError if none of them can run."""
        keys = product(self.asked.kinds, self.systems)
        curves = {(kind, name): Curve(kind, name, stopped=self._refused(kind, name)) for kind, name in keys}
        if all(curve.stopped for curve in curves.values()):
            mixes = ", ".join(kind for kind in self.asked.kinds if kind not in self.refused)
            raise UserError(f"{mixes}: GPUs of several kinds, and {', '.join(self.systems)} takes one")
        return curves

    @cached_property
    def searches(self) -> list[tuple[str, str]]:
        """The pairs of a kind of GPU and a strategy to search. Raises UserError if there is no pair."""
        return [key for key, curve in self.curves().items() if not curve.stopped]

    def search(self, mine: Iterable[tuple[str, str]]) -> tuple[Curves, Best | None, dict[float, int | None]]:
        """Search the curves `mine` for the fewest GPUs that meet the target.

        The search first requires that each model meets the target, then that all requests together meet it. Return all
        curves, the best answer, and the GPUs that its strategy needs for each growth of the traffic. The best answer is
        the cheapest among the curves `mine` and those of the first strategy that has an answer. The GPUs by growth are
        empty if the best answer's curve is not in `mine`.
        """
        curves, target = self.curves(), self.asked.target
        first = self._first(curves)
        searched = [curves[key] for key in curves if key in set(mine)]
        self._search(searched, "each", first)
        self._search([curve for curve in searched if curve.fewest(target)], "pooled")
        best = self._best(curve for curve in curves.values() if curve in (*first, *searched))
        grown: dict[float, int | None] = {}
        if best is not None and curves[best[:2]] in searched:
            for times in self.asked.growth:
                more = Curve(best.gpu, best.system)
                self._search([more], "each", times=times, least=best.gpus // mix.size(best.gpu))
                grown[times] = more.fewest(target)
        return curves, best, grown

    def _first(self, curves: Curves) -> list[Curve]:
        """Search the strategies one after the other until one has an answer on some kind; return its curves."""
        for name in (name for name in self.systems if name not in self.asked.bounds):
            mine = [curves[kind, name] for kind in self.asked.kinds]
            self._search(mine, "each", mine)
            if self._best(mine) is not None:
                return mine
        return []

    def _lacks(self, curves: Curves, best: Best) -> str:
        """Describe the memory that the best strategy lacks with one GPU less (or one copy of a mix less).

        The result is empty if that smaller number of GPUs was not tried, or if the models fit there.
        """
        below = curves[best[:2]].below(best.gpus)
        if below is None or not below.unfit or below.gpus != best.gpus - mix.size(best.gpu):
            return ""
        short = room.short_bytes(self.under(best.gpu, self.views[0]).spec(self.spec(*best[:2], below.gpus)))
        return "memory" if short is None else f"{short / GIB:.1f} GiB a GPU"

    def _short(self, curves: Curves) -> dict[tuple[str, str], str]:
        """Return the resource that causes most misses of a strategy, for each strategy that more GPUs do not help.

        The misses are those on the largest number of GPUs that ran. Keys are a kind of GPU and a strategy.
        """
        flat = {
            key: curve.flat[1].runs
            for key, curve in curves.items()
            if curve.flat is not None and curve.fewest(self.asked.target) is None
        }
        binds = {key: total(merged(self.misses(key[0], runs).values())).first for key, runs in flat.items()}
        return {key: name for key, name in binds.items() if name}

    # ------------------------------------------------------------ search

    def _search(
        self, curves: Sequence[Curve], by: Criterion, first: Sequence[Curve] = (), times: float = 1.0, least: int = 0
    ) -> None:
        """Try numbers of GPUs for all curves, in rounds, until the search of each is over.

        No number tried costs more than the cheapest answer among the curves `first`. Each has at least `least` copies.
        """
        for turn in count(1):
            asks = [(curve, n) for curve in curves if (n := self._next(curve, first, by, least)) is not None]
            if not asks:
                return
            what = f"{'sizes' if times == 1 else f'{times:g} x the traffic'}, round {turn}"
            self.run_counts(asks, times, what)

    def _next(self, curve: Curve, first: Iterable[Curve], by: Criterion, least: int) -> int | None:
        """Return the number of GPUs that a curve tries next; None if its search is over.

        Numbers are whole copies: a copy is one mix of GPUs, or one GPU of a single kind. If the search ends without an
        answer, the reason is written to `curve.stopped`.
        """
        tried, target, size = curve.tried, self.asked.target, mix.size(curve.kind)
        if curve.stopped:
            return None
        if own_count(self.systems[curve.system]):
            return None if tried else traits(self.spec(curve.kind, curve.system)).gpus
        answer = curve.fewest(target, by)
        failed = [
            n // size
            for n, verdict in tried.items()
            if not verdict.holds(target, by) and (answer is None or n < answer)
        ]
        floor, begin = (max(n, least) for n in self.begins[curve.kind])
        cap, answer_copies = self._cap(curve, first), None if answer is None else answer // size
        n = bracket(failed, answer_copies, floor, cap, begin=begin)
        if n is None and answer_copies is None:
            low, most = max(failed, default=floor - 1), self.most(curve.kind) // size
            curve.stopped = f"> {low * size}: more cost more than the answer" if cap < most else f"> {most * size}"
        return None if n is None else n * size

    def most(self, kind: str) -> int:
        """Return the most GPUs of a kind that may be tried; for a mix, a whole number of copies.

        Raises UserError if one copy of the mix has more GPUs than may be tried.
        """
        size = mix.size(kind)
        if size > self.asked.most:
            raise UserError(f"--gpus ends at {self.asked.most}, and {kind} is {size} GPUs")
        return self.asked.most - self.asked.most % size

    def _refused(self, kind: str, name: str) -> str:
        """Return the reason why a system is not tried on a kind of GPU; empty if it is tried."""
        return self.refused.get(kind) or ("" if takes(self.systems[name], kind) else ONE_KIND)

    def _cap(self, curve: Curve, first: Iterable[Curve]) -> int:
        """Return the most copies of a curve's kind that cost no more than the cheapest answer among `first`."""
        best, size = self._best(first), mix.size(curve.kind)
        most = self.most(curve.kind) // size
        if best is None or curve.system in self.asked.bounds:
            return most
        if best.gpu == curve.kind:
            return min(most, best.gpus // size)
        mine, its = (usd_hour(self.asked.prices, *of) for of in ((curve.kind, size), (best.gpu, best.gpus)))
        return most if mine is None or its is None else min(most, max(1, math.floor(its / mine)))

    def _best(self, curves: Iterable[Curve]) -> Best | None:
        """Return the cheapest answer; among equal prices, that with the fewest GPUs, then that of the first curve."""
        answers = [
            (self.asked.usd_hour(curve.kind, gpus) or math.inf, gpus, at, Best(curve.kind, curve.system, gpus))
            for at, curve in enumerate(curves)
            if curve.system not in self.asked.bounds and (gpus := curve.fewest(self.asked.target)) is not None
        ]
        return min(answers)[-1] if answers else None

    def _ends(self, kind: str) -> tuple[int, int]:
        """Return the smallest number of copies that may be tried, and the number that is tried first.

        The smallest number has enough GPUs for each model alone. The first number has room for the weights of all
        models, and is at least the question's `least`. If the first number meets the target, smaller ones are tried.
        Raises NoRoom if a model takes more GPUs than may be tried.
        """
        size, cluster = mix.size(kind), self.cluster(kind)
        weights = sum(model.weight_bytes * model.tp for model in cluster.models.values())
        largest = max(n for _, n in mix.parts(kind))
        floor = max(math.ceil(m.tp / largest) for m in cluster.models.values())
        most, least = self.most(kind) // size, math.ceil(self.asked.least / size)
        if self.asked.least == self.asked.most:  # one count, and no other
            floor = max(floor, least)
        if floor > most:
            raise NoRoom(f"--gpus ends at {self.asked.most}, and a model takes {floor * size} {kind}")
        return floor, min(most, max(floor, least, math.ceil(weights / sum(gpu.mem_bytes for gpu in cluster.gpus))))

    # ------------------------------------------------------------ runs

    def run_counts(self, asks: Sequence[tuple[Curve, int]], times: float, what: str) -> None:
        """Run each curve of `asks` on its number of GPUs, in all windows, and add the outcome to the curve."""
        specs = [
            self.under(curve.kind, view).spec(self.spec(curve.kind, curve.system, n, view, seed, times))
            for curve, n in asks
            for view in self.views
            for seed in view.seeds
        ]
        folders = iter(sweep.sweep(specs, self.out, workers=self.workers, teller=self.teller, what=what))
        self.found += len(specs)
        for curve, n in asks:
            runs = {view: [next(folders) for _ in view.seeds] for view in self.views}
            curve.tried[n] = self._verdict(curve.kind, n, runs)

    def _verdict(self, kind: str, gpus: int, runs: Mapping[View, Sequence[Path]]) -> Outcome:
        every = tuple(chain.from_iterable(runs.values()))
        for about in map(record.meta, every):
            if why := about["skipped"] or about["infeasible"]:
                return Outcome(gpus, unfit=str(why))
        met = {
            view.name: met_of(folders, self.under(kind, view), self.asked.definition) for view, folders in runs.items()
        }
        return Outcome(gpus, met, "", every)

    def misses(self, kind: str, runs: Iterable[Path], rule: str = "") -> Mapping[str, Hours]:
        """Count the misses of runs by view, model, hour and the resource that causes them.

        SLOs are those of `rule` (empty: of the question).
        """
        return by_view(runs, self.views, lambda view: self.under(kind, view, rule), self.asked.definition)

    def cluster(self, kind: str, gpus: int = 0) -> Cluster:
        """Return `gpus` GPUs of a kind (0: one GPU, or one copy of a mix) with all models, each at its degree."""
        spec = replace(self.spec(kind, gpus=gpus), system=UNSHARED, preset=None, fields=(), slo="")
        return Setup(resolve(spec)).cluster

    def _under(self, kind: str, view: View, rule: str = "") -> SloTarget:
        """Return the SLO in seconds on a kind of GPU, for the requests of a view."""
        spec, rule = self.spec(kind, view=view), rule or self.asked.rule
        return slo_target(spec, rule, self.out, workers=self.workers, teller=self.teller)

    def _setup(self, kind: str) -> Setup:
        """Return the setup of one GPU of a kind, or one copy of a mix, with all models, each at its degree."""
        return Setup(self.spec(kind))

    def spec(
        self,
        kind: str,
        system: str = "",
        gpus: int = 0,
        view: View | None = None,
        seed: int | None = None,
        times: float = 1.0,
    ) -> Spec:
        """Return the spec of one run.

        Defaults: the first system, view and seed, on one GPU or one copy of a mix.
        """
        view, of = view or self.views[0], self.systems[system or next(iter(self.systems))]
        place = {"trace": view.trace, "models": self.sets[kind][0], "gpu": kind, "gpus": gpus or mix.size(kind)}
        spec = from_dict({**self.asked.setting, **place, **asked_system(of)})
        return replace(spec, seed=view.seeds[0] if seed is None else seed, rate_scale=times)

    # ------------------------------------------------------------ of the best

    def _cold_s(self, kind: str, system: str, gpus: int) -> dict[str, float]:
        """Compute the seconds to load each model from the host, on idle links."""
        cluster = Setup(resolve(replace(self.spec(kind, system, gpus), slo=""))).cluster
        insts = [Inst(name, tuple(range(model.tp))) for name, model in cluster.models.items()]
        return {inst.model: cluster.profile.load_s(inst, "parallel") for inst in insts}

    def _at_once(self, best: Best, shares: Shares) -> bool:
        """Tell whether models that share a GPU under the best strategy compute at the same time."""
        several = any(len(models) > 1 for models in shares.values())
        return several and at_once(Setup(resolve(self.under(best.gpu, self.views[0]).spec(self.spec(*best)))))


def met_of(runs: Sequence[Path], under: SloTarget, definition: str) -> Met:
    """Return the share of requests that meet an SLO target, pooled over `runs`; the models must fit in each run."""
    scores = [score.by_model(run, under, [definition])[definition] for run in runs]
    blocks = zip(*((lost.sum(0), came.sum(0)) for _, lost, came in scores), strict=True)
    missed, offered = (np.concatenate(of)[None] for of in blocks)
    met, high, low = (1.0 - float(x[0]) for x in pooled.shares(pooled.Counts(np.ones(1), missed, offered)))
    share = Estimate(met, low, high, len(runs))
    models = dict[str, Counted]()
    for names, lost, came in scores:
        for name, *n in zip(names, lost.sum(1).tolist(), came.sum(1).tolist(), strict=True):
            before = models.get(name, (0.0, 0.0))
            models[name] = Counted(before[0] + n[0], before[1] + n[1])
    return Met(
        share if (low, high) != (0.0, 1.0) else replace(share, low=None, high=None),
        {name: of for name, of in models.items() if of.offered},
    )


def own_count(system: str) -> bool:
    """Tell whether a system, as --systems takes it, sets its number of GPUs itself and ignores that of its spec."""
    return hasattr(Setup(from_dict(asked_system(system))).make_policy, "gpus_needed")


def takes(system: str, kind: str) -> bool:
    """Tell whether a system, as --systems takes it, can place models on GPUs of this kind, or of this mix of kinds."""
    return not mix.mixed(kind) or getattr(Setup(from_dict(asked_system(system))).make_policy, "mixed", False)
