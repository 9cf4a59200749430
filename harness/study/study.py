"""A study as data: systems under conditions, the choice of each curve's points, and the claims of a paper.

`studies/NAME.toml` is the study that `bench study NAME` runs; users may write files of the same form. Comparisons,
figures of papers, fleets, bridges, regimes and ablations are all studies:

    condition   changes to the common setting; a condition may vary fields and replace systems of the study
    panel       one setting of a condition: each field that the condition varies has one value
    curve       attainment of a system in a panel over x; x is the field `along`
    sample      how the x of a curve are chosen: all given, around a knee, by bisection, or by bracketing
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows.definitions import DEFINITIONS
from harness.run.spec import Spec, asked, from_dict
from harness.toml import Count, Natural, NonNegative, Seconds, Share
from workloads.usual import memory

STUDIES = Path(__file__).parent / "studies"
ORIGINS = ("paper states", "released code", "unknown")
AXES = ("rate_scale", "rate_rps", "slo_scale", "gpus", "models")  # fields that may run along x
HELD = "held"  # as a rate: the highest at which the study's first system holds the level
UNSHARED = "unshared"  # leaves out what sharing costs
CONTROLS = ("dedicated", UNSHARED, "static:oracle")  # references of every figure, which contend for nothing
PRECISION = 0.1  # relative half-width of a ratio's interval
AA_SEED = 504  # first seed of the A/A copy, apart from those of evaluations and tuning
AA = " (A/A)"  # ending of the name of an A/A copy
START = "fair default"  # the condition without changes of a cumulative study
BESIDE = ("rate_rps", "slo_scale")  # keys of a setting that are no fields of a spec
SET_BY_STUDY = frozenset(
    {"system", "preset", "fields", "seed", "slo_s", "trace_sha256", "workload", "measured_on", "token_times", "homes"}
)
AND, OR = " and ", " or "  # between the systems of a claim: AND joins several, OR the readings of one
BEST = "best "  # before a system's file: the best of the study's systems of that file
OTHER = ("system", "over", "definition")  # fields that further evidence may change, beside facts
Paper = float | str | tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The rule by which the x of curves are chosen.

    fixed    all x are given
    knee     x are doubled or halved with the first seed, until attainment falls; then all seeds run a grid around the
             knee
    bisect   the given x run first. Then x near the crossing of the level are added, until there are `points` x
    bracket  whole numbers between the lowest and the highest given, until the fewest that reach the level are known
    """

    rule: Literal["fixed", "knee", "bisect", "bracket"] = "fixed"  # one of the four above
    points: Natural = 0  # knee: the fewest points of each curve; bisect: the most
    each: Literal["system", "panel"] = "system"  # the unit of sampling; all seeds run the same x
    digits: Count = 6  # significant digits of an x that is searched
    below: NonNegative = (
        0.0  # bisect: how many times lower than the lowest x a search goes; 0: as far as requests suffice
    )


@dataclass(frozen=True, slots=True)
class Scope:
    """The extent of the runs, such as the numbers of seeds and points, windows and budget."""

    seeds: Count = 5  # runs of each point
    points: Natural = 0  # instead of the sample's
    window_s: Seconds = 0.0  # s, for synthetic traces; 0: the trace's span
    replayed_s: Seconds = 0.0  # s, for replayed traces; 0: all that a seed replays
    budget: Natural = 0  # simulated requests, a panel, for more seeds of systems that are not yet told apart
    precision: Share = PRECISION  # a ratio with an interval this narrow, either way, asks for no more


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a study: changes to the common setting, and the x of its curves."""

    name: str  # unique in the study
    spec: Mapping[str, Any] = field(default_factory=dict)  # fields of a spec, rate_rps and slo_scale
    systems: Mapping[str, str] = field(default_factory=dict)  # keyed by name: replacements of the study's systems here
    among: tuple[str, ...] = ()  # only these of the study's systems; none: all
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # fields, a panel for each combination of values
    along: str = ""  # "": the study's
    at: tuple[Any, ...] = ()  # x; none: the study's, or searched
    at_rps: tuple[float, ...] = ()  # instead, along rate_scale: in requests per second of all models together
    full: tuple[Any, ...] = ()  # more x for --full
    extra: bool = False  # only for --full
    window_s: float = 0.0  # instead of the scope's
    seeds: Natural = 0  # instead of the scope's; 1 of a real trace is one case: the half that it replays
    band: Mapping[str, Any] = field(default_factory=dict)  # a step's fields of its spec at the other end
    origin: str = ""  # an assumption's origin, one of ORIGINS
    source: str = ""  # file and section
    kind: str = ""  # in a cumulative study: base, cumulative or alone
    other_end: bool = False  # it stands at the other end of a band


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of a paper, or a ratio that a study shows even if its papers do not state it.

    crossing    x at which the attainment of `system` crosses the level
    ratio       crossing of `system` divided by that of `over`. Along SLO scales or GPUs it is inverted: 2 means that
                `system` meets half the SLO, or needs half the GPUs
    fewest      the smallest whole x that reaches the level; with `over`, this x divided by that of `over`
    difference  attainment of `system` minus that of `over`, as a fraction of 1, for the model that loses most
    value       seconds that `system` takes to load a model of `shape` on `tp` GPUs; needs no run
    measure     a column of the study's `measures` (columns.py) in the system's runs. With `over`, it is divided by the
                column in the runs of `over`; if even = 0, the column of `over` is subtracted instead. Each panel has a
                verdict. If its trace draws from a law of lengths, the verdict is about that law. With `most`, there is
                one verdict, on the greatest value over all panels, for each seed. The measure "held_rps" is the highest
                rate of the traces' most popular stream at which the share `within` is at least the study's level. If
                `measure` is empty, the study has no number for the claim

    `system` and `over` may be several names. Names joined by "and" are all part of the statement. Names joined by "or"
    are readings: options that the paper leaves open. The statement has the class that all its readings share. For
    example, "a or b and c" is about c and either a or b. "best static" is every static partition of the study; in
    `over` it is the best of these.

    `paper` is a number, two numbers (a range), or a word. The words are `reached` and `never` (of the level, anywhere
    along x), `met` and `missed` (at x = `at`), `ahead`, `behind` and `equal` (compared with `even`). It is None if the
    paper states nothing. rule.py has the rule that gives the claim its class.
    """

    what: Literal["crossing", "ratio", "fewest", "difference", "value", "measure"]  # one of those above
    system: str  # the system that it is about
    over: str = ""  # the system that it is compared with
    definition: str = ""  # a definition of attainment; "": the study's first
    metric: str = ""  # the paper's own, in words, where `definition` does not say it
    on: Mapping[str, Any] = field(default_factory=dict)  # only panels with these facts: condition, axis, trace, slo ...
    paper: Paper = None  # the paper's number or word
    bound: Literal["", "up to", "at least"] = ""  # the kind of the paper's number
    even: float | None = None  # no difference; None: 1 for ratios, 0 for differences, and no such value for the rest
    at: NonNegative = 0.0  # x for `met` and `missed`; for a measure the least rate_rps of its panels' traces
    measure: str = ""  # the column
    model: str = ""  # model that the column is about; "": all together
    most: bool = False  # one verdict of all panels, the greatest seed by seed, in place of one each
    least: str = ""  # compares not the measure but this field's value under which the measure is least
    headline: str = ""  # over whom, in the answer's first line
    why: str = ""  # a sufficient cause of the paper's number if ours differs; or why it is not comparable
    comparable: bool = True  # false where the paper leaves out facts that a comparison needs
    lacks: str = ""  # the datum without which it cannot be tested
    input: str = ""  # the constant of ours that is the paper's number
    shape: str = ""  # shape of the loaded model
    tp: int = 1  # its GPUs
    subject: str = ""  # subject of a difference or a measure, in words
    says: str = ""  # the paper's statement in words
    section: str = ""  # the paper's section
    name: str = ""  # statement to which several claims belong, in whatever study
    evidence: bool = False  # stands beside the statement and is not judged with it
    also: tuple[Mapping[str, Any], ...] = ()  # further evidence: other facts, or another system, over or definition

    @property
    def label(self) -> str:
        """The name of the claim's systems for use in tables."""
        return f"{self.system} / {self.over}" if self.over else self.system


@dataclass(frozen=True)
class Study:
    """Conditions, and systems to compare under each; the first system is the subject of the study."""

    name: str
    systems: Mapping[str, str]  # keyed by the name in tables: as --systems takes them
    condition: tuple[Condition, ...]  # settings that are compared
    more: tuple[str, ...] = ()  # systems that --full runs beside them, as --systems takes them
    paper: str = ""  # the paper that it reproduces
    spec: Mapping[str, Any] = field(default_factory=dict)  # common to all conditions but for their changes
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # every condition has these unless it has its own
    along: str = "rate_scale"  # the field along x
    at: tuple[Any, ...] = ()  # values of x
    sample: Sample = Sample()
    quick: Scope = Scope()
    full: Scope | None = None  # for --full; None: there is no more
    definitions: tuple[str, ...] = ("both",)  # definitions of attainment; the first decides where a search ends
    level: Share = 0.99  # attainment at which curves are compared
    slo: str = "5xP95"  # a rule in full, or a base (P95) where slo_scale is set or runs along x
    base_engine: str = ""  # the engine on which SLO bases are measured; "": that of the runs
    cumulative: bool = False  # conditions are steps: each is measured with all before it, and alone
    requests: Natural = 0  # minimum requests per point, summed over seeds
    warmup_s: Seconds | None = None  # s, for windows that are not the trace's own
    bounds: tuple[str, ...] = ()  # systems that contend for nothing, as --systems takes them
    controls: bool = False  # bounds and an A/A copy stand at the ends of x
    by_model: bool = False  # the table has rows by model
    claim: tuple[Claim, ...] = ()  # statements that are compared with the results
    # layout of the figure and the table
    layout: Literal["lines", "steps", "matrix", "fleet", "parts", "tradeoff", "table", "claims", "ideas"] = "lines"
    titles: tuple[str, ...] = ()  # titles over columns of panels; none: the traces' names. A tradeoff has its settings'
    notes: tuple[str, ...] = ()  # for the caption
    for_system: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # fields that only a system's spec has, by system
    measures: tuple[str, ...] = ()  # columns of the table beside attainment (columns.py)
    setting: str = ""  # the setting of all runs in words, if claims are about measures
    headline: str = ""  # the first line of an answer in claims, with {} where the numbers stand; the name of ideas
    shown: tuple[str, ...] = ()  # measures of which such an answer has a table, a row a system and a column a condition

    # -------------------------------------------------------------- parts of it

    def scope(self, full: bool) -> Scope:
        """Return the extent of the runs: that of --full if `full`, else the usual one."""
        return self.full if full and self.full else self.quick

    @cached_property
    def first(self) -> str:
        """The subject of the study: its first system."""
        return next(iter(self.systems))

    def of(self, full: bool) -> Study:
        """Return the study to run; with `full`, it has the conditions and systems that only --full runs."""
        if full:
            return replace(self, systems={**self.systems, **named(self.more)})
        return replace(self.restricted(c for c in self.condition if not c.extra), more=())

    def without(self, gone: Collection[str]) -> Study | None:
        """Return the study without some systems; None if no remaining system occurs in every condition."""
        systems = {name: text for name, text in self.systems.items() if name not in gone}
        first = next((name for name in systems if all(name in (c.among or systems) for c in self.condition)), None)
        if first is None:
            return None
        conditions = tuple(replace(c, among=tuple(n for n in c.among if n not in gone)) for c in self.condition)
        return replace(
            self,
            systems={first: systems[first], **systems},
            condition=conditions,
            bounds=tuple(n for n in self.bounds if n not in gone),
        )

    def only(
        self,
        names: Collection[str] | None = None,
        systems: Sequence[str] | None = None,
        traces: Sequence[str] | None = None,
        models: Sequence[str] | None = None,
        seeds: int | None = None,
        precision: float | None = None,
        budget: int | None = None,
    ) -> Study:
        """Return the study with only the conditions `names`, or with other systems, traces, models or run limits.

        The run limits are seeds, precision and budget. If the study has several model sets, `models` must be some of
        these sets. Raises UserError for an unknown name.
        """
        refuse_unknown(f"{self.name} has no condition", names or (), [condition.name for condition in self.condition])
        study = self if names is None else self.restricted(c for c in self.condition if c.name in names)
        if systems:
            study = study.of_systems(systems)
        if traces:
            study = study.of_traces(traces)
        if models:
            study = study.of_models(models)
        changes: dict[str, Any] = {"seeds": seeds, "precision": precision, "budget": budget}
        changes = {key: value for key, value in changes.items() if value is not None}
        full = replace(study.full, **changes) if study.full else None
        return replace(study, quick=replace(study.quick, **changes), full=full)

    def of_systems(self, texts: Sequence[str]) -> Study:
        """Return the study with other systems."""
        systems = named(texts)
        conditions = tuple(
            replace(c, among=(), systems={name: c.systems[name] for name in c.systems if name in systems})
            for c in self.condition
        )
        return replace(self, systems=systems, condition=conditions, more=())

    def of_traces(self, traces: Sequence[str]) -> Study:
        """Return the study on other traces. Its figure has a column of panels for each trace."""
        plain = self._without("trace")
        return replace(plain, vary={"trace": tuple(traces), **plain.vary}, titles=())

    def of_models(self, models: Sequence[str]) -> Study:
        """Return the study with other model sets.

        If the study has several model sets, only the panels of the sets in `models` remain. In this case, a set that
        the study does not have raises UserError.
        """
        sets = dict.fromkeys(name for condition in self.condition for name in self.sets(condition))
        if len(sets) < 2:
            plain = self._without("models")
            if len(models) > 1:
                return replace(plain, vary={**plain.vary, "models": tuple(models)})
            return replace(plain, spec={**plain.spec, "models": models[0]})
        refuse_unknown(f"{self.name} has no model set", models, sets)
        parts = ((c, tuple(name for name in self.sets(c) if name in models)) for c in self.condition)
        part = self.restricted(self._of_sets(condition, mine) for condition, mine in parts if mine)
        return replace(part, vary={key: value for key, value in self.vary.items() if key != "models"})

    def _of_sets(self, condition: Condition, sets: tuple[str, ...]) -> Condition:
        """Return a condition with only some of its model sets."""
        if self.axis(condition) == "models":
            return replace(condition, at=sets, full=())
        if "models" in self.varied(condition):
            return replace(condition, vary={**condition.vary, "models": sets})
        return condition

    def _without(self, field_: str) -> Study:
        """Return the study without one field, in specs and among the fields that conditions vary."""

        def plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in mapping.items() if key != field_}

        conditions = tuple(replace(c, spec=plain(c.spec), vary=plain(c.vary)) for c in self.condition)
        return replace(self, spec=plain(self.spec), vary=plain(self.vary), condition=conditions)

    def restricted(self, conditions: Iterable[Condition]) -> Study:
        """Return the study with these conditions alone, and the claims that are about some of them."""
        conditions_ = tuple(conditions)
        names = {condition.name for condition in conditions_}
        claims = tuple(c for c in self.claim if c.on.get("condition") is None or c.on["condition"] in names)
        return replace(self, condition=conditions_, claim=claims)

    # -------------------------------------------------------------- a condition of it

    def steps(self) -> tuple[Condition, ...]:
        """Return the conditions to measure.

        A cumulative study first has the start without steps. A condition for each step follows, which applies this and
        all earlier steps. Last comes each step alone. A step may have a band: other values of its fields. The condition
        with the band's values then precedes the condition without them.
        """
        if not self.cumulative:
            return self.condition
        together = (self._all_up_to(k) for k in range(len(self.condition)))
        alone = (replace(condition, kind="alone") for condition in self.condition)
        return (Condition(START, kind="base"), *(end for condition in (*together, *alone) for end in _ends(condition)))

    def _all_up_to(self, k: int) -> Condition:
        spec, systems, band = dict[str, Any](), dict[str, str](), dict[str, Any]()
        for condition in self.condition[: k + 1]:
            spec |= condition.spec
            systems |= condition.systems
            band |= condition.band
        return replace(self.condition[k], spec=spec, systems=systems, band=band, kind="cumulative")

    def axis(self, condition: Condition) -> str:
        """Return the field of specs whose values are x."""
        return condition.along or self.along

    def along_x(self, condition: Condition, full: bool = False) -> tuple[Any, ...]:
        """Return the x that are given for a condition; rates in req/s (`at_rps`) are not included.

        With `full`, the x that only --full runs are included.
        """
        given = (*(condition.at or self.at), *(condition.full if full else ()))
        return given if self.axis(condition) == "models" else tuple(sorted({float(x) for x in given}))

    def varied(self, condition: Condition) -> dict[str, tuple[Any, ...]]:
        """Return the fields that a condition varies, with their values; each combination is a panel."""
        return {**self.vary, **condition.vary}

    def sets(self, condition: Condition) -> tuple[str, ...]:
        """Return the model sets of a condition, including those that only --full runs."""
        if self.axis(condition) == "models":
            return tuple(map(str, self.along_x(condition, full=True)))
        models = {**self.spec, **condition.spec}.get("models")
        return self.varied(condition).get("models", (models,) if models else ())

    def contestants(self, condition: Condition) -> tuple[str, ...]:
        """Return the names of the systems of a condition."""
        return tuple(name for name in self.systems if name in (condition.among or self.systems))

    def settings(self, condition: Condition) -> dict[str, Any]:
        """Return the common setting with a condition's changes.

        Its keys are fields of a spec, and also the keys in BESIDE, which a spec does not have.
        """
        return {**self.spec, **condition.spec}

    def spec_of(self, condition: Condition, name: str) -> Spec:
        """Return the spec of a system under a condition; the varied fields, x and the seed are set later.

        An A/A copy has the spec of its system, but other seeds.
        """
        of = name.removesuffix(AA)
        text = {**self.systems, **condition.systems}.get(of, of)
        fields = {key: value for key, value in self.settings(condition).items() if key not in BESIDE}
        fields |= self.for_system.get(of, {})
        if "profile" in fields:
            fields["profile"] = os.path.expandvars(str(fields["profile"]))
        if fields.get("rate_scale") == HELD:
            del fields["rate_scale"]
        changing = dict.fromkeys((*self.varied(condition), self.axis(condition)))
        token_times = any(DEFINITIONS[name].by_token for name in self.definitions)
        spec = from_dict({**fields, **memory({**fields, **changing}), **asked(text), "token_times": token_times})
        return replace(spec, seed=spec.seed + AA_SEED) if name.endswith(AA) else spec


def evidence_of(claim: Claim, other: Mapping[str, Any]) -> Claim:
    """Return a claim with the changes of one item of its further evidence.

    An item may name another `system`, `over` or `definition`, and add facts that choose the claim's panels.
    """
    changes: dict[str, Any] = {key: str(value) for key, value in other.items() if key in OTHER}
    facts = {key: value for key, value in other.items() if key not in OTHER}
    return replace(claim, also=(), evidence=True, on={**claim.on, **facts}, **changes)


def systems_of(text: str) -> list[list[str]]:
    """Split a claim's `system` or `over` at " and " into systems, and each of these at " or " into readings."""
    return [part.split(OR) for part in text.split(AND)]


def named(texts: Sequence[str]) -> dict[str, str]:
    """Return systems keyed by their label in tables, from texts as --systems takes them.

    Raises UserError for a system that is listed twice.
    """
    systems: dict[str, str] = {}
    for text in texts:
        label = from_dict(asked(text)).label
        if label in systems:
            raise UserError(f'system "{label}" is listed twice')
        systems[label] = text
    return systems


def refuse_unknown(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise UserError for the first name that is not among the known ones; its message begins with `what`."""
    for name in names:
        if name not in known:
            raise UserError(f'{what} "{name}"{meant(name, known)} ({", ".join(known)})')


@contextmanager
def mistakes_in(where: str) -> Iterator[None]:
    """Prefix the message of any UserError that the block raises with `where`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _ends(step: Condition) -> Iterator[Condition]:
    """Yield a condition; if it has a band (other values of its fields), first yield it with the values of the band."""
    if step.band:
        fields = ", ".join(f"{key} {value}" for key, value in step.band.items())
        yield replace(step, name=f"{step.name}; {fields}", spec={**step.spec, **step.band}, other_end=True)
    yield step


OCTAVE = 2.0
QUARTER = 2.0**0.25 * (1 + 1e-9)  # a crossing counts as located if a sampled rate lies within this ratio of it
HALF_OCTAVE = 2.0**0.5


@dataclass(frozen=True, slots=True)
class Range:
    """The limits of a search: the level, the given x, the lowest and the highest x, and the runs per point."""

    level: float
    given: tuple[float, ...]
    least: float
    most: float = math.inf
    seeds: int = 1  # runs a point takes


def rounded(x: float, digits: int = 6) -> float:
    """Round a number to the significant digits that specs have."""
    return float(f"{x:.{digits}g}")
