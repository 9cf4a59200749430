"""The fewest GPUs on which each system reaches a level of attainment, found by bracketing over whole counts.

`fleets/NAME.toml` is `bench fleet NAME`; a file of the same form is one's own. A contest is a system on a workload
under an SLO. Each halves its bracket, all of them at once: one sweep a round. What decides is `statistics.fewest`, the
fit of the mean over seeds, so a count that holds by luck below one that fails is no answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.policy.types import UserError
from harness.rows import record, statistics, tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.statistics import Curve, Estimate
from harness.run import score, sweep, toml_tables
from harness.run.resolve import resolve
from harness.run.setup import Failed, load_models, load_trace
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import Spec, asked, canonical, digest, from_dict
from harness.run.teller import Silent, Teller
from harness.study.bases import slo_target
from harness.study.claims import judged
from harness.study.compare import Entry
from harness.study.rates import LEVEL, Workload

if TYPE_CHECKING:
    import pyarrow as pa

FLEETS = Path(__file__).parent / "fleets"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says of a system under an SLO: a number of GPUs, or two that it lies between.

    With `over` it is a ratio of counts, system / over. `comparable` is false where the paper leaves out what a
    comparison needs, as `why` then says; else `why` is printed where ours differs.
    """

    system: str
    slo: str
    paper: float | tuple[float, float]
    over: str = ""
    why: str = ""
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who is compared on which workloads under which SLOs, and between which counts of GPUs."""

    name: str
    paper: str
    systems: tuple[str, ...]  # as --systems takes them
    gpus: tuple[int, int]  # the least and the most that are tried
    slos: tuple[str, ...]  # rules in full, as 5/2xP95
    workload: tuple[Workload, ...]
    seeds: int
    bounds: tuple[str, ...] = ()  # systems that bring their own number of GPUs
    definition: str = "ttft"  # of attainment
    level: float = LEVEL
    spec: Mapping[str, Any] = field(default_factory=dict)  # what all runs have in common
    claim: tuple[Claim, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The contestants."""
        return tuple(_entry(name, self.spec) for name in self.systems)

    @property
    def bounding(self) -> tuple[Entry, ...]:
        """The bounds."""
        return tuple(_entry(name, self.spec) for name in self.bounds)

    def without(self, gone: Collection[str]) -> Fleet:
        """The fleet without some labels."""

        def left(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(name for name in names if _entry(name, self.spec).label not in gone)

        return replace(self, systems=left(self.systems), bounds=left(self.bounds))


def _entry(text: str, common: Mapping[str, Any]) -> Entry:
    spec = from_dict({**common, **asked(text)})
    return Entry(spec.label, spec)


def fleet(name: str) -> Fleet:
    """Load a fleet by name or the path of its TOML; UserError names the file and key of a mistake."""
    return toml_tables.load(name, FLEETS, "fleet", _fleet)


def _fleet(name: str, rows: dict[str, Any]) -> Fleet:
    workloads = toml_tables.each(Workload, "workload", rows.pop("workload", []))
    claims = toml_tables.each(Claim, "claim", rows.pop("claim", []))
    found = toml_tables.made(Fleet, "", {**rows, "name": name, "workload": workloads, "claim": claims})
    _whole(found)
    return found


def _whole(found: Fleet) -> None:
    """UserError where a value is not of its kind, or a claim is about nothing in the fleet."""
    least, most = found.gpus if len(found.gpus) == 2 else (0, 0)
    if not (type(least) is type(most) is int and 1 <= least < most):
        raise UserError(f"gpus is {list(found.gpus)}, not the least and the most GPUs that are tried")
    for key in ("systems", "slos", "workload"):
        if not getattr(found, key):
            raise UserError(f"{key} is empty")
    if type(found.seeds) is not int or found.seeds < 1:
        raise UserError(f"seeds is {found.seeds!r}, not a whole number above 0")
    if found.definition not in DEFINITIONS:
        raise UserError(f'definition is "{found.definition}" ({", ".join(DEFINITIONS)})')
    labels = [entry.label for entry in (*found.entries, *found.bounding)]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f'system "{twice}" is listed twice')
    for i, one in enumerate(found.claim, 1):
        for key, name, have in (("system", one.system, labels), ("over", one.over or one.system, labels),
                                ("slo", one.slo, found.slos)):  # fmt: skip
            if name not in have:
                raise UserError(f'claim {i}: {key} is "{name}", none of the fleet\'s ({", ".join(have)})')
        if not (one.comparable or one.why):
            raise UserError(f'claim {i}: comparable is false, and the key "why" is missing')


# ------------------------------------------------------------------ which count next


def next_count(curves: Mapping[int, Curve], least: int, most: int, level: float) -> int | None:
    """The count to sample next (seed -> GPUs -> attainment were); None once the answer stands.

    The most first, then the middle between the answer and the next smaller count that failed, or `least` - 1: systems
    are slow to simulate far below what they need. At last the count above the answer has to confirm it: where it fails,
    the fit takes a lone count that held by luck back, and the search goes on above.
    """
    sampled = set[float].intersection(*(set(curve) for curve in curves.values())) if curves else set[float]()
    if not sampled:
        return most
    at = statistics.fewest(curves, level).at
    if at.sign == ">":
        return None
    found = round(at.mean)
    below = round(max((x for x in sampled if x < found), default=least - 1))
    if found - below > 1:
        return (found + below) // 2
    return found + 1 if found < most and found + 1 not in sampled else None


# ------------------------------------------------------------------ runs


class Contest(NamedTuple):
    """A system on a workload under an SLO."""

    workload: Workload
    slo: str
    label: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The fewest GPUs in a contest, and what is attained on them."""

    workload: Workload
    slo: str
    label: str
    at: Estimate  # by the mean over seeds
    seeds: tuple[Estimate, ...]  # of each seed alone, over the same counts
    attained: float  # on so many GPUs (on the most, where they are too few), mean over seeds
    worst: float  # of the worst model, likewise
    counts: int  # of GPUs that were sampled
    cpu_s: float  # of all runs


@dataclass(frozen=True, slots=True)
class Found:
    """A scored fleet."""

    folder: Path
    table: pa.Table  # tidy.TABLE_SCHEMA, without rows by model
    about: Mapping[str, Any]
    answers: tuple[Answer, ...]
    failed: Mapping[str, str] = field(default_factory=dict)  # systems that left, as Failed has them


def fewest(asked_for: Fleet, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Found:
    """Bracket every contest and score what was run; stored runs that are current are kept. Raises UserError.

    A system whose policy fails leaves; Failed where none is left.
    """
    teller, failed = teller or Silent(), dict[str, str]()
    while True:
        left = asked_for.without(failed)
        if not left.systems:
            raise Failed(failed)
        try:
            return replace(_Search(left, out, workers, teller).done(), failed=failed)
        except Failed as why:  # again without it: finished runs cost nothing
            if not why.why.keys() - failed.keys():
                raise
            failed |= why.why


@dataclass(frozen=True)
class _Search:
    """One call of `fewest`: its arguments, and its steps in order."""

    fleet: Fleet
    out: Path
    workers: int | None
    teller: Teller

    def done(self) -> Found:
        """Bases, brackets, the table."""
        for name in dict.fromkeys(one.trace for one in self.fleet.workload):
            if notice := load_trace(name).notice:
                self.teller.say(notice)
        judges = {(w.trace, slo): self._judge(w, slo) for w in self.fleet.workload for slo in self.fleet.slos}
        cells = [*self._bracketed(judges), *self._bounds(judges)]
        return self._scored(cells, judges)

    def _judge(self, workload: Workload, slo: str) -> SloTarget:
        spec = replace(self.fleet.entries[0].spec, trace=workload.trace)
        return slo_target(spec, slo, self.out, workers=self.workers, teller=self.teller)

    def _specs(self, contest: Contest, entry: Entry, under: SloTarget, gpus: int) -> list[Spec]:
        one = replace(entry.spec, trace=contest.workload.trace, rate_scale=contest.workload.rate_scale, gpus=gpus)
        return [under.spec(replace(one, seed=one.seed + seed)) for seed in range(self.fleet.seeds)]

    def _contests(self, entries: Sequence[Entry]) -> dict[Contest, Entry]:
        return {Contest(w, slo, e.label): e for w in self.fleet.workload for slo in self.fleet.slos for e in entries}

    def _bracketed(self, judges: Mapping[tuple[str, str], SloTarget]) -> list[tuple[Contest, Spec]]:
        """Sample counts, a round of all contests at a time, until every answer stands."""
        fleet, contests = self.fleet, self._contests(self.fleet.entries)
        curves: dict[Contest, dict[int, dict[float, float]]] = {one: {} for one in contests}
        cells: list[tuple[Contest, Spec]] = []
        for turn in range(1, 2 + fleet.gpus[1]):
            new: list[tuple[Contest, Spec]] = []
            for one, entry in contests.items():
                if (gpus := next_count(curves[one], *fleet.gpus, fleet.level)) is not None:
                    new += [(one, spec) for spec in self._specs(one, entry, judges[one.workload.trace, one.slo], gpus)]
            if not new:
                break
            folders = self._run([spec for _, spec in new], f"GPUs, round {turn}")
            for (one, spec), folder in zip(new, folders, strict=True):
                under = judges[one.workload.trace, one.slo]
                share = score.attained(folder, under, [fleet.definition])[fleet.definition]
                curves[one].setdefault(spec.seed, {})[float(spec.gpus)] = share
            cells += new
        return cells

    def _bounds(self, judges: Mapping[tuple[str, str], SloTarget]) -> list[tuple[Contest, Spec]]:
        """The runs of the bounds, on as many GPUs as each takes."""
        cells = [
            (one, spec)
            for one, entry in self._contests(self.fleet.bounding).items()
            for spec in self._specs(one, entry, judges[one.workload.trace, one.slo], self.fleet.gpus[1])
        ]
        self._run([spec for _, spec in cells], "bounds")
        return cells

    def _run(self, specs: Sequence[Spec], what: str) -> list[Path]:
        return sweep.sweep(specs, self.out, workers=self.workers, teller=self.teller, what=what)

    # -------------------------------------------------------------- the table

    def _scored(self, cells: Sequence[tuple[Contest, Spec]], judges: Mapping[tuple[str, str], SloTarget]) -> Found:
        """The fleet's folder, table and answers; scored anew only if a run, a rule or the scoring changed."""
        fleet, ready = self.fleet, sweep.tasks(spec for _, spec in cells)
        under = [judges[one.workload.trace, one.slo] for one, _ in cells]
        runs = list(zip(cells, under, ready, strict=True))
        key = [[one.label, rule.rule, rule.seconds, canonical(task.spec)] for (one, _), rule, task in runs]
        folder = self.out / f"{fleet.name}-{digest(record.dumps(sorted(key, key=record.dumps)))}"
        about = {
            "fleet": fleet.name, "paper": fleet.paper, "level": fleet.level, "definition": fleet.definition,
            "gpus": fleet.gpus, "slos": fleet.slos, "seeds": fleet.seeds, "spec": dict(fleet.spec),
            "systems": [e.label for e in fleet.entries], "bounds": [e.label for e in fleet.bounding],
            "workloads": [self._facts(w) for w in fleet.workload],
            "claims": [asdict(one) for one in fleet.claim],
            "judges": judgements((rule, task.spec.folder) for _, rule, task in runs),
            "runs": dict(sorted((task.spec.folder, one.label) for (one, _), _, task in runs)),
        }  # fmt: skip

        def make() -> pa.Table:
            rules = [(one.label, rule, task) for (one, _), rule, task in runs]
            return scored(rules, self.out, fleet.definition)

        table = score.kept(folder / record.SWEEP, about, ready, __file__, make)
        spent: dict[Contest, dict[str, float]] = {}
        for (one, _), _, task in runs:
            spent.setdefault(one, {})[task.spec.folder] = cpu_s(self.out / task.spec.folder)
        return Found(folder, table, about, answers(table, about, {k: sum(x.values()) for k, x in spent.items()}))

    def _facts(self, workload: Workload) -> dict[str, Any]:
        """A workload as the table and captions name it."""
        from workloads.build import rate_rps

        spec = resolve(replace(self.fleet.entries[0].spec, trace=workload.trace, gpus=self.fleet.gpus[1], slo=""))
        trace = load_trace(spec.trace)
        unit_rps = rate_rps(trace, load_models(spec.models))
        return {**asdict(workload), "name": spec.trace, "tier": trace.tier, "rate_rps": unit_rps * workload.rate_scale}


def scored(runs: Sequence[tuple[str, SloTarget, Task]], out: Path, definition: str) -> pa.Table:
    """Rows of runs, pooled and over models, sorted by spec; a run is scored once a rule."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = pa.array([definition, "both", "offered_rps", "undefined_tpot", *tidy.WEIGHTS, *tidy.CAPS], pa.string())
    plain = record.plain(tidy.TABLE_SCHEMA)
    parts = []
    for label, under, task in {(label, rule.rule, task.spec.folder): (label, rule, task)
                               for label, rule, task in runs}.values():  # fmt: skip
        found = tidy.score(score.scorable(label, out / task.spec.folder, under), by_model=False).cast(plain)
        parts.append(found.filter(pc.is_in(found["definition"], names)))
    order = [(name, "ascending") for name in ("slo", *tidy.ORDER)]
    return pa.concat_tables(parts).sort_by(order).cast(tidy.TABLE_SCHEMA).combine_chunks()


def cpu_s(run: Path) -> float:
    """CPU seconds that a run took, as its folder says; NaN where it says nothing."""
    try:
        return float(json.loads((run / record.SIDE).read_text("utf-8"))["cpu_s"])
    except (OSError, ValueError, KeyError):
        return math.nan


# ------------------------------------------------------------------ answers


Curves = Mapping[int, Mapping[float, float]]  # seed -> GPUs -> attainment


def curves(table: pa.Table, about: Mapping[str, Any], over: str = "pooled") -> Mapping[Contest, Curves]:
    """Attainment by GPUs of each contest and seed, pooled or of the worst model."""
    of = {(one["name"], one["rate_scale"]): Workload(one["trace"], one["rate_scale"]) for one in about["workloads"]}
    columns = ["trace", "rate_scale", "slo", "label", "seed", "gpus", "over", "definition", "value"]
    found: dict[Contest, dict[int, dict[float, float]]] = {}
    for row in table.select(columns).to_pylist():
        if (row["over"], row["definition"]) == (over, about["definition"]):
            one = Contest(of[row["trace"], row["rate_scale"]], row["slo"], row["label"])
            share = math.nan if row["value"] is None else row["value"]
            found.setdefault(one, {}).setdefault(row["seed"], {})[float(row["gpus"])] = share
    return found


def answers(table: pa.Table, about: Mapping[str, Any], spent_s: Mapping[Contest, float]) -> tuple[Answer, ...]:
    """The answer of every contest by what the table holds, bounds last; `spent_s` are CPU seconds."""
    pooled, worst = curves(table, about), curves(table, about, "worst")
    order = [*about["systems"], *about["bounds"]]
    slos, workloads = list(about["slos"]), [Workload(x["trace"], x["rate_scale"]) for x in about["workloads"]]
    places = {one: (workloads.index(one.workload), slos.index(one.slo), order.index(one.label)) for one in pooled}
    return tuple(
        _answer(one, pooled[one], worst[one], about["level"], one.label in about["bounds"], spent_s.get(one, math.nan))
        for one in sorted(pooled, key=places.__getitem__)
    )


def _answer(
    one: Contest, pooled: Mapping[int, Curve], worst: Mapping[int, Curve], level: float, bound: bool, spent_s: float
) -> Answer:
    at = statistics.fewest(pooled, level).at
    each = tuple(statistics.fewest({seed: curve}, level).at for seed, curve in sorted(pooled.items()))
    if bound:  # it brings its own number of GPUs: not the least of many
        at, each = Estimate(at.mean, None, None, at.n), ()

    def there(by_seed: Mapping[int, Curve]) -> float:
        return sum(curve[at.mean] for curve in by_seed.values()) / len(by_seed)

    sampled = {x for curve in pooled.values() for x in curve}
    return Answer(*one, at, each, there(pooled), there(worst), len(sampled), spent_s)


# ------------------------------------------------------------------ claims


class Verdict(NamedTuple):
    """A claim beside what came out on one workload."""

    claim: Claim
    workload: Workload
    here: Estimate | None
    says: str  # of claims.SAYS


def verdicts(found: Found) -> list[Verdict]:
    """Every claim on every workload, by the rule of `claims.judged`."""
    at = {Contest(x.workload, x.slo, x.label): x.at for x in found.answers}
    out = []
    for one in (Claim(**{**c, "paper": _paper(c["paper"])}) for c in found.about["claims"]):
        for workload in dict.fromkeys(x.workload for x in found.answers):
            here = at.get(Contest(workload, one.slo, one.system))
            if one.over:
                here = ratio(here, at.get(Contest(workload, one.slo, one.over)))
            says = judged(one.paper, here) if one.comparable else "not comparable"
            out.append(Verdict(one, workload, here, says))
    return out


def _paper(value: Any) -> float | tuple[float, float]:
    return tuple(value) if isinstance(value, list | tuple) else value


def ratio(ours: Estimate | None, theirs: Estimate | None) -> Estimate | None:
    """Ours over theirs; a bound where one of them is, "~" where both pull apart."""
    if ours is None or theirs is None:
        return None
    signs = {ours.sign, statistics.MIRROR[theirs.sign]} - {"="}
    sign = "=" if not signs else "~" if len(signs) > 1 else signs.pop()
    return Estimate(ours.mean / theirs.mean, None, None, ours.n, sign)
