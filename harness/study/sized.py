"""A question of size and its answer: the outcome of each strategy on each number of GPUs that was tried."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.engines.costs import quantities
from harness.engines.costs.prices import Price, prices
from harness.policy import mix
from harness.policy.types import UserError
from harness.rows.by_window import Counted
from harness.rows.estimate import Estimate
from harness.rows.held import DAY_H
from harness.run.spec import FILES
from harness.run.spec import asked as asked_system
from harness.study.bases import judged_by
from harness.study.offers import usd_hour
from harness.study.study import UNSHARED, named
from harness.study.traffic import View

DEDICATED = "dedicated"  # the base that savings are counted from
WINDOWS = 3  # windows that are drawn from a generator
GROWTH = (1.25, 1.5, 2.0)  # multiples of the traffic for which the recommended strategy is sized too
PAIR, SAME = 2, 0.0005  # counts that `flat` compares; difference of attainment within which they are equal
NEVER = 1e-9  # tolerance in requests: sums of shares are no more exact

Criterion = Literal["each", "pooled"]


@dataclass(frozen=True)
class Question:
    """A question of size: the models and their traffic, the GPUs and strategies to try, and the SLO target.

    Raises UserError for spare GPUs, or nodes of several GPUs, with a mix of kinds of GPU.
    """

    setting: Mapping[str, Any]  # fields of a spec: trace, models, served ...
    kinds: tuple[str, ...]  # kinds of GPU, or mixes; a cluster of a mix has whole copies of it
    least: int
    most: int
    systems: tuple[str, ...]  # as --systems takes them
    rule: str  # an SLO rule
    definition: str
    target: float  # share of requests that meet their SLO
    prices: Mapping[str, Price]
    spare: int = 0  # GPUs beside those that the target takes
    node: int = 1  # GPUs of a node; whole nodes are bought
    growth: tuple[float, ...] = GROWTH
    windows: int = WINDOWS

    def __post_init__(self) -> None:
        mixed = next((kind for kind in self.kinds if mix.mixed(kind)), None)
        if mixed is not None and (self.spare or self.node > 1):
            what = "spare" if self.spare else "node"
            raise UserError(f"{what}: {mixed} has GPUs of several kinds, so it does not say which")

    @classmethod
    def of(
        cls,
        setting: Mapping[str, Any],
        kinds: Iterable[str],
        systems: Iterable[str],
        price: Mapping[str, str],
        rule: str,
        definition: str | None,
        growth: Iterable[float],
        **more: Any,
    ) -> Question:
        """Make a question from kinds and prices as users name them.

        If `definition` is None, the SLO rule sets it. Raises UserError for an unknown kind, and for a price that is not
        a number above 0.
        """
        kinds = dict.fromkeys(mix.canonical(kind, gpu_kind) for kind in kinds)
        usd = prices({gpu_kind(kind): text for kind, text in price.items()})
        return cls(
            located(setting),
            tuple(kinds),
            systems=tuple(systems),
            prices=usd,
            rule=rule,
            definition=definition or judged_by(rule),
            growth=tuple(map(float, growth)),
            **more,
        )

    @cached_property
    def bounds(self) -> set[str]:
        """Labels of strategies that are never recommended: `unshared`, and `dedicated` if there are others."""
        of = {label: str(asked_system(text)["system"]) for label, text in named(self.systems).items()}
        never = {UNSHARED, DEDICATED} if set(of.values()) - {UNSHARED, DEDICATED} else {UNSHARED}
        return {label for label, name in of.items() if name in never}

    def bought(self, gpus: int) -> int:
        """Return the number of GPUs to buy if `gpus` are needed: `gpus` plus the spares, rounded up to whole nodes."""
        return self.node * math.ceil((gpus + self.spare) / self.node)

    def usd_hour(self, kind: str, gpus: int) -> float | None:
        """Return the price in USD an hour of all GPUs to buy if `gpus` are needed; None if a kind has no price."""
        return usd_hour(self.prices, kind, self.bought(gpus))


class Best(NamedTuple):
    """The cheapest strategy with which every model meets the target."""

    gpu: str
    system: str
    gpus: int


class Met(NamedTuple):
    """The share of a view's requests that met their SLO: over all requests, and by model."""

    share: Estimate  # share over all requests; without ends if the blocks are too few
    models: Mapping[str, Counted]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a strategy on a number of GPUs, over the windows of each view."""

    gpus: int
    views: Mapping[str, Met] = field(default_factory=dict)
    unfit: str = ""  # why it could not run; "": it did
    runs: tuple[Path, ...] = field(default=(), compare=False)

    def holds(self, target: float, by: Criterion = "each") -> bool:
        """Tell whether the target is met in every view, by each model or by all requests together (`by`)."""
        if self.least is None:
            return False
        return not self.failing(target) if by == "each" else self.least.mean >= target

    def failing(self, target: float) -> tuple[str, ...]:
        """Return the models whose attainment is below the target in some view."""
        every = chain.from_iterable(met.models.items() for met in self.views.values())
        return tuple(dict.fromkeys(name for name, of in every if of.missed > allowed(target, of.offered)))

    @property
    def least(self) -> Estimate | None:
        """The attainment of all requests together in the view where it is lowest; None if the strategy did not run."""
        return min((met.share for met in self.views.values()), key=lambda share: share.mean, default=None)

    @property
    def worst(self) -> tuple[str, float]:
        """The model with the lowest attainment in any view, and this attainment."""
        worst = [(of.met, name) for met in self.views.values() for name, of in met.models.items()]
        share, name = min(worst, default=(0.0, "-"))
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
    """The outcomes of a strategy on the numbers of GPUs that were tried, all of one kind."""

    kind: str
    system: str
    tried: dict[int, Outcome] = field(default_factory=dict)  # keyed by GPUs
    stopped: str = ""  # why its search ended without an answer

    def fewest(self, target: float, by: Criterion = "each") -> int | None:
        """Return the smallest count of GPUs tried that meets the target; all larger counts tried must meet it too.

        The result is None if no count qualifies.
        """
        most_first = sorted(self.tried, reverse=True)
        return min(takewhile(lambda gpus: self.tried[gpus].holds(target, by), most_first), default=None)

    def below(self, gpus: int) -> Outcome | None:
        """Return the outcome on the largest count tried below `gpus`; None if there is no such count."""
        lower = [n for n in self.tried if n < gpus]
        return self.tried[max(lower)] if lower else None

    @property
    def flat(self) -> tuple[Outcome, Outcome] | None:
        """The outcomes on the two largest numbers of GPUs that were tried; None if more GPUs still help.

        More GPUs help if the attainment of the worst model is clearly higher on the larger of the two. Fewer than
        two numbers also give None.
        """
        ran = [self.tried[n] for n in sorted(self.tried) if not self.tried[n].unfit][-PAIR:]
        if len(ran) < PAIR or ran[1].worst[1] > ran[0].worst[1] + SAME:
            return None
        return ran[0], ran[1]

    def row(self, asked: Question, gpus: int) -> Tried:
        """Return the outcome on a number of GPUs as a row of the stored table."""
        verdict, usd = self.tried[gpus], asked.usd_hour(self.kind, gpus)
        met, (name, worst) = verdict.least, verdict.worst
        return Tried(
            self.kind,
            self.system,
            gpus,
            usd and usd * DAY_H,
            met.mean if met else None,
            met.low if met else None,
            met.high if met else None,
            worst if met else None,
            name if met else None,
            verdict.unfit,
            gpus == self.fewest(asked.target),
            verdict.runs,
        )


Curves = Mapping[tuple[str, str], Curve]  # keyed by kind and system


@dataclass(frozen=True)
class Sized:
    """An answered question."""

    asked: Question
    views: tuple[View, ...]
    curves: Curves
    degrees: Mapping[str, Mapping[str, int]]  # degrees of tensor parallelism by kind and model, where chosen
    best: Best | None
    grown: Mapping[float, int | None]  # GPUs of the best for more traffic; None: more than the most
    cold_s: Mapping[str, float]  # seconds in which each model is loaded from the host, on the best's kind
    placed: Mapping[str, Mapping[str, float]]  # the best's, by GPU and model: the share of its requests that ran there
    million_tokens_hour: float  # prompt and output of what the models serve, in the whole log
    dedicated: Mapping[str, int]  # keyed by kind: GPUs if each model has its own
    lacks: str  # memory that the best lacks on one GPU fewer; "": load binds
    tails: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # P95 of TTFT and TPOT in s, of the best
    rules: Mapping[str, str] = field(default_factory=dict)  # SLO rules by kind of GPU; a mix names the kind of the base
    servers: Mapping[str, str] = field(default_factory=dict)  # what a kind's servers do, and the KV that is left
    kept_share: float = 1.0  # share of the log's requests; the others' streams were dropped
    streams: tuple[str, ...] = ()  # the rule that assigns streams to models
    short: Mapping[tuple[str, str], str] = field(default_factory=dict)  # what binds, where more GPUs do not help
    refused: Mapping[str, str] = field(default_factory=dict)  # kinds that cannot hold a model, and why
    at_once: bool = False  # models of a GPU compute there at the same time, on the best's

    @property
    def failed(self) -> bool:
        """True if a number of GPUs below the answer failed, or if there is no answer.

        `bench explain` then gives the reasons.
        """
        return self.best is None or self.curves[self.best[:2]].below(self.best.gpus) is not None

    @property
    def tried(self) -> list[Tried]:
        """The outcomes on all numbers of GPUs that were tried."""
        return [curve.row(self.asked, n) for curve in self.curves.values() for n in sorted(curve.tried)]


def allowed(target: float, offered: float) -> int:
    """Return how many of `offered` requests may miss their SLO if the share `target` must meet it."""
    return math.ceil((1.0 - target) * offered - NEVER)


def gpu_kind(name: str) -> str:
    """Return the kind of GPU that a name stands for. Raises UserError for an unknown name."""
    return quantities.gpu(name).kind


def located(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a setting that have a value, with paths of files made absolute.

    A stored question then has the same meaning from any working directory.
    """
    given = {key: value for key, value in setting.items() if value is not None}
    files = [key for key in ("trace", "models", "table") if str(given.get(key, "")).endswith(FILES[key])]
    return given | {key: os.path.abspath(given[key]) for key in files}  # noqa: PTH100 - a link keeps its name
