"""The tidy table of a sweep: a row for each run, model and measure; and estimates over its runs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import causes, record, setting
from harness.rows.attainment import Limits, Slo, jain, limits, share
from harness.rows.definitions import DEFINITIONS
from harness.rows.pooled import Counts
from harness.rows.record import plain as plain_schema
from harness.rows.requests import Rows, extent, in_window, of_models, rows, take
from harness.rows.sealed import WAY_OUT, Damaged
from harness.rows.statistics import Curve, interval
from harness.rows.tally import Tally

if TYPE_CHECKING:
    import pandas as pd


P = ParamSpec("P")
T = TypeVar("T")

WEIGHTS = ("loads", "evicts", "migrations")  # how often weights came, went, and changed their place
CAPS: Mapping[str, str] = {
    "cap_bound": "batch_cap",
    "chunk_bound": "chunk_tokens",
    "prefill_bound": "prefill_tokens",
}  # the share of steps that this field of the spec bound
HELD = "gpu_held"  # share of GPU time with weights on the GPU or on their way to it; of the simulator's runs only
WAKES = "wakes"  # of servers by themselves, which sleep when idle; of runs only where servers do
HITS = "hit_share"  # of prompts' tokens, found in the prefix cache; of engines' statistics only where there is one
BINDS = 0.01  # above this share a cap is part of the result, and reported


@dataclass(frozen=True, slots=True)
class Run:
    """A run to score: its folder's name, facts (record.meta), rows (record.read) and the SLO seconds that apply."""

    name: str
    meta: Mapping[str, Any]
    table: pa.Table | record.Pieces
    slo_s: Slo
    label: str = ""  # in tables and legends; the system's name (and preset) if empty


_WORD = pa.dictionary(pa.int32(), pa.string())
RUN_SCHEMA = [
    ("run", _WORD),
    ("label", _WORD),
    ("system", _WORD),
    ("preset", _WORD),
    ("trace", _WORD),
    ("models", _WORD),
    ("gpu", _WORD),
    ("gpus", pa.int32()),
    ("machine", _WORD),  # its processes and links where they are not the default; else null
    ("engine", _WORD),
    ("host", _WORD),
    ("scaling", _WORD),
    ("rate_scale", pa.float64()),
    ("seed", pa.int64()),
    ("slo", _WORD),
    ("plan_origin", _WORD),
    ("tier", _WORD),
    ("fit", _WORD),  # of a synthetic trace to its target: "within" or where it is off; null where nothing was measured
    ("fidelity", _WORD),
    ("departs", _WORD),  # how its engine differs from its paper's; null: as published
    ("degrees", _WORD),  # of parallelism: "own", chosen by the system; null: the model set's
    ("invalid", _WORD),  # why a run on real servers is not valid; null: it is, or it is of another kind
    ("skipped", _WORD),  # reason; its rows have no value
    ("infeasible", _WORD),  # reason; its attainment is 0
]
TABLE_SCHEMA = pa.schema(
    [
        *RUN_SCHEMA,
        ("definition", _WORD),  # of attainment (definitions.py), or a measure with its unit in the name
        ("over", _WORD),  # pooled | model | mean (over models) | worst (model) | jain
        ("model", _WORD),  # null unless over = model
        ("n", pa.int64()),  # offered requests under the value
        ("value", pa.float64()),  # null: not defined for this run, shown as "-"; infinite: did not come
        # by stretch of the window, of attainment pooled and by model; tokens where a definition counts them; else null
        ("missed", pa.list_(pa.float64())),
        ("offered", pa.list_(pa.float64())),
    ]
)
_TOLD = {"condition", "x", "run", "label", "system", "trace", "models", "gpu", "gpus", "rate_scale", "seed", "slo",
         "fidelity", "definition", "over", "n"}  # fmt: skip  # of each row; other columns may be null
STORED = pa.schema(  # of a table on disk: panels first
    [
        field.with_nullable(field.name not in _TOLD)
        for field in (pa.field("condition", _WORD), pa.field("x", pa.float64()), *TABLE_SCHEMA)
    ]
)
LATER = frozenset(  # not in tables of every release
    {"condition", "x", "machine", "fit", "departs", "degrees", "invalid", "missed", "offered"}
)
ORDER = ("trace", "models", "gpu", "label", "gpus", "rate_scale", "seed", "run", "over", "definition", "model")


def stored(path: Path) -> pa.Table:
    """Read the scored table of a sweep.

    Raises Damaged, also for rates, models or counts that are none, and FileNotFoundError.
    """
    record.present(path, record.footer(path))
    table = record.table(path, STORED, absent=LATER)
    rates = table["rate_scale"]
    if not pc.all(pc.and_(pc.is_finite(rates), pc.greater(rates, 0.0)), min_count=0).as_py():
        raise Damaged(f"{path}: column rate_scale has a value that is no number above 0; {WAY_OUT}")
    of_model = pc.equal(table["over"].cast(pa.string()), "model")
    if (row := pc.index(pc.and_(of_model, pc.is_null(table["model"])), value=True).as_py()) >= 0:
        raise Damaged(f"{path}: row {row}: model is null, and over is model; {WAY_OUT}")
    counts = [name for name in ("missed", "offered") if name in table.column_names]
    if len(counts) == 1:
        (gone,) = {"missed", "offered"} - set(counts)
        raise Damaged(f"{path}: column {gone} is missing; {WAY_OUT}")
    if counts:
        alone = pc.xor(pc.is_null(table["missed"]), pc.is_null(table["offered"]))
        if pc.any(alone, min_count=0).as_py():
            row = pc.index(alone, True).as_py()
            raise Damaged(f"{path}: row {row}: missed or offered is null, and not both; {WAY_OUT}")
    return table


def scores(runs: Iterable[Run]) -> pa.Table:
    """Score all runs into the tidy table (run x model x definition, `TABLE_SCHEMA`), sorted by spec; one at a time."""
    table = pa.concat_tables([TABLE_SCHEMA.empty_table(), *map(score, runs)])
    plain = plain_schema(TABLE_SCHEMA)
    # strings while sorting, so that the dictionaries come out in the order of the sorted rows: equal runs, equal bytes
    return table.cast(plain).sort_by([(name, "ascending") for name in ORDER]).cast(TABLE_SCHEMA).combine_chunks()


def score(
    run: Run, *, by_model: bool = True, definitions: Collection[str] = tuple(DEFINITIONS), more: Iterable[Value] = ()
) -> pa.Table:
    """Score one run into rows of the tidy table: these definitions and every measure, pooled and by model.

    Without `by_model` only attainment is there per model. `more` are further rows of a run that could run.
    """
    spec = run.meta.get("spec") or {}
    skipped, infeasible = run.meta.get("skipped"), run.meta.get("infeasible")
    values: list[Value] = []
    if skipped:
        values += [Value(name, "pooled", None, 0, None) for name in definitions]
    elif infeasible:
        values += [Value(name, over, None, 0, 0.0) for name in definitions for over in ("pooled", "mean", "worst")]
    else:
        values += [*_values(run, spec, by_model, definitions), *more]
    about = {
        **spec,
        "run": run.name,
        "label": run.label or ":".join(x for x in (spec.get("system"), spec.get("preset")) if x and x != "default"),
        "plan_origin": run.meta.get("plan_origin") or spec.get("plan"),
        "tier": run.meta.get("tier"),
        "fit": run.meta.get("fit"),
        "machine": setting.machine(spec),
        "fidelity": run.meta.get("fidelity"),
        "departs": run.meta.get("departs"),
        "degrees": run.meta.get("degrees"),
        "invalid": "; ".join((run.meta.get("verdict") or {}).get("reasons", ())) or None,
        "skipped": skipped,
        "infeasible": infeasible,
    }
    count = len(values)
    columns = {name: _repeat(about.get(name), kind, count) for name, kind in RUN_SCHEMA}
    names = TABLE_SCHEMA.names[len(RUN_SCHEMA) :]
    columns |= dict(zip(names, zip(*values, strict=True), strict=True))
    arrays = [_array(columns[f.name], f.type) for f in TABLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)


def _repeat(value: Any, kind: pa.DataType, count: int) -> Any:
    return pa.array([value] * count, pa.string() if kind == _WORD else kind)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if kind == _WORD:
        return pa.array(values, pa.string()).dictionary_encode()
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


class Value(NamedTuple):
    """A row of the tidy table, without the facts of its run."""

    definition: str
    over: str
    model: str | None
    n: int
    value: float | None
    missed: Sequence[float] | None = None
    offered: Sequence[float] | None = None


def _values(run: Run, spec: Mapping[str, Any], by_model: bool, definitions: Collection[str]) -> Iterator[Value]:
    sums = tallied(run, spec, definitions, by_model=by_model)
    models, counts = sums.models, sums.offered.tolist()
    n = sum(counts)
    for name, of in sums.attained.items():
        if name in sums.lacks:
            yield Value(name, "pooled", None, n, None)
            continue
        each = of.per_model(models)
        yield Value(name, "pooled", None, n, _known(of.share), of.missed.sum(axis=0), of.asked.sum(axis=0))
        yield Value(name, "mean", None, n, _known(share(np.array(list(each.values())))))
        yield Value(name, "worst", None, n, _known(min(each.values(), default=math.nan)))
        yield Value(name, "jain", None, n, _known(jain(each.values())))
        for model, value in each.items():
            index = models.index(model)
            yield Value(name, "model", model, counts[index], value, of.missed[index], of.asked[index])
        for wait, value in causes.of_counts(of.causes).items():
            yield Value(f"missed_{name}_{wait}", "pooled", None, n, value)
    for name, value in sums.pooled.values(sums.window_s, sums.quantiles()).items():
        yield Value(name, "pooled", None, n, _known(value))
    for code, quantiles in sums.by_model() if by_model else ():
        for name, value in sums.each[code].values(sums.window_s, quantiles).items():
            yield Value(name, "model", models[code], counts[code], _known(value))
    for name, value in utilisation(run.meta.get("stats") or {}).items():
        yield Value(name, "pooled", None, n, _known(value))


def tallied(
    run: Run, spec: Mapping[str, Any], definitions: Collection[str], *, measured: bool = True, by_model: bool = True
) -> Tally:
    """Sum over the offered requests of a run, a piece after another.

    If asked for, the measures too, also by model, and what misses waited for.
    """
    pieces = run.table if isinstance(run.table, record.Pieces) else [run.table]
    models, last_s, most = extent(pieces)
    sums, begin = Tally(models, spec.get("window_s") or last_s, most, tuple(definitions)), 0
    for piece in pieces:
        every = of_models(rows(piece), models)
        inside = in_window(every, spec.get("window_s") or math.inf)
        each = run.slo_s.take(slice(begin, begin + len(every))) if isinstance(run.slo_s, Limits) else run.slo_s
        offered, slo = take(every, inside), limits(every, each).take(inside)
        sums.add(offered, slo, why=measured)
        if measured:
            sums.measure(offered, slo, by_model=by_model)
        begin += len(every)
    return sums


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def measures(offered: Rows, slo: Slo, window_s: float) -> dict[str, float]:
    """Compute the measures beside attainment, of offered rows: rates, latencies, shares; units in the names."""
    sums = Tally(offered.models, window_s, len(offered), ())
    sums.measure(offered, limits(offered, slo), by_model=False)
    return sums.pooled.values(window_s, sums.quantiles())


def utilisation(stats: Mapping[str, float]) -> dict[str, float]:
    """Compute shares of capacity (KV bytes x seconds, GPU seconds) from an engine's statistics; others as they are.

    All shares are over one span, the window: neither warm-up nor drain.
    """
    gpu_s = stats.get("gpus", 0.0) * stats.get("span_s", 0.0)
    kv_byte_s = stats.get("kv_cap_bytes", 0.0) * stats.get("span_s", 0.0)
    shares = {
        "kv_used": ("kv_byte_s", kv_byte_s),
        "gpu_busy": ("gpu_busy_s", gpu_s),
        HELD: ("gpu_held_s", gpu_s),
        "hbm_busy": ("gpu_hbm_s", gpu_s),
    }
    used = {name: stats[part] / whole for name, (part, whole) in shares.items() if part in stats and whole > 0.0}
    return used | {
        name: stats[name] for name in (*WEIGHTS, "moves", "preemptions", *CAPS, HITS, WAKES) if name in stats
    }


# ------------------------------------------------------------------ a table is read once


def once(work: Callable[Concatenate[pa.Table, P], T]) -> Callable[Concatenate[pa.Table, P], T]:
    """Cache a function of a table and further arguments, as long as the table lives. Results are not to be changed."""
    known: dict[int, tuple[weakref.ref[pa.Table], dict[tuple[Any, ...], T]]] = {}

    @wraps(work)
    def kept(table: pa.Table, /, *args: P.args, **kwargs: P.kwargs) -> T:
        at = id(table)
        if at not in known:
            known[at] = weakref.ref(table, lambda _: known.pop(at, None)), {}
        answers, key = known[at][1], (*args, *sorted(kwargs.items()))
        if key not in answers:
            answers[key] = work(table, *args, **kwargs)
        return answers[key]

    return kept


@once
def column(table: pa.Table, name: str) -> list[Any]:
    """Return a column as Python's values."""
    array = table[name].combine_chunks()
    if pa.types.is_dictionary(array.type):
        words = [*array.dictionary.to_pylist(), None]
        return [words[code] for code in array.indices.fill_null(-1).to_numpy().tolist()]
    values: list[Any] = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
    return values


@once
def _places(table: pa.Table) -> dict[tuple[str, str, str], list[int]]:
    """Return the row indices of each label, definition and `over`."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for i, key in enumerate(zip(*(column(table, name) for name in ("label", "definition", "over")), strict=True)):
        places.setdefault(key, []).append(i)
    return places


@once
def invalid(table: pa.Table) -> dict[str, str]:
    """Return the labels with an invalid run, each with the first reason and the number of such runs."""
    if "invalid" not in table.column_names:  # stored before there were real servers
        return {}
    frame = table.select(["label", "run", "invalid"]).to_pandas().drop_duplicates("run")
    reasons = {}
    for label, runs in frame.groupby("label", observed=True, sort=False):
        bad = runs["invalid"].dropna()
        if len(bad):
            of = f"{len(bad)} of {len(runs)} runs: " if len(runs) > 1 else ""
            reasons[str(label)] = f"{of}{bad.iloc[0]}"
    return reasons


def infeasible(table: pa.Table) -> dict[str, str]:
    """Return the labels with an infeasible run, each with the first reason and the number of such runs."""
    point = ["label", "rate_scale", "seed"]
    frame = table.select([*point, "infeasible"]).to_pandas().drop_duplicates(point)
    reasons = {}
    for label, runs in frame.sort_values(point[1:]).groupby("label", observed=True):
        bad = runs["infeasible"].dropna()
        if len(bad):
            of = f"in {len(bad)} of {len(runs)} runs: " if len(bad) < len(runs) else ""
            reasons[str(label)] = f"{of}{bad.iloc[0]}"
    return reasons


def own_gpus(took: Mapping[str, Collection[int]], asked: int | None) -> set[str]:
    """Return the labels of a panel whose systems set their own number of GPUs (`dedicated`: one a model).

    `took` are the counts of each label; `asked` is None on an axis of GPUs, where such a label has one count alone.
    """
    several = len(set().union(*took.values())) > 1
    return {
        label
        for label, counts in took.items()
        if (several and len(counts) == 1 if asked is None else set(counts) != {asked})
    }


def with_gpus(label: str, counts: Collection[int]) -> str:
    """Add to a label the GPUs that it took: `dedicated (8 and 18 GPUs)`."""
    every = sorted(counts)
    text = " and ".join(map(str, every)) if len(every) < 3 else f"{every[0]} to {every[-1]}"
    return f"{label} ({text} GPUs)"


# ------------------------------------------------------------------ over the runs of a sweep

_SAME = ["trace", "models", "gpu", "engine", "scaling", "slo", "tier", "fidelity", "plan_origin"]
POINT = [*_SAME, "label", "system", "gpus", "rate_scale", "over", "model", "definition"]


def summary(
    table: pa.Table, definitions: Sequence[str], over: Sequence[str] = ("pooled",), by: Sequence[str] = POINT
) -> pd.DataFrame:
    """Estimate each point (`by`, the definition last) over seeds: columns mean, low, high, n, infeasible.

    A point without a value has NaN, one without an interval NaN bounds.
    """
    import pandas as pd

    wanted = pc.and_(
        pc.is_in(table.column("definition").cast(pa.string()), pa.array(list(definitions), pa.string())),
        pc.is_in(table.column("over").cast(pa.string()), pa.array(list(over), pa.string())),
    )
    frame = table.filter(pc.and_(wanted, pc.is_null(table.column("skipped")))).to_pandas()
    points = []
    for key, group in frame.groupby(list(by), dropna=False, observed=True, sort=True):
        values = group["value"].to_numpy(np.float64)
        bounds = (0.0, 1.0) if key[-1] in DEFINITIONS else (0.0, math.inf)
        e = interval(values, bounds)
        hollow = bool(group["infeasible"].notna().any())
        points.append((*key, e.mean, *(math.nan if x is None else x for x in (e.low, e.high)), e.n, hollow))
    return pd.DataFrame(points, columns=[*by, "mean", "low", "high", "n", "infeasible"])


class Bound(NamedTuple):
    """A cap of the engine that bound more than `BINDS` of a system's steps, in the mean over seeds."""

    cap: str  # the field of the spec
    label: str
    offered_rps: float  # the lowest rate at which it did
    share: float  # of steps at that rate
    most: float  # of steps at any point


def bound(table: pa.Table) -> list[Bound]:
    """Find the caps that bound, in the order of `CAPS`, and in which systems, by name."""
    names = pa.array([*CAPS, "offered_rps"])
    pooled = pc.equal(table.column("over").cast(pa.string()), "pooled")
    wanted = pc.and_(pooled, pc.is_in(table.column("definition").cast(pa.string()), names))
    frame = table.filter(wanted).to_pandas()
    by = [*(name for name in ("condition", "x") if name in frame), *POINT]  # a study has panels
    means = frame.groupby(by, dropna=False, observed=True)["value"].mean().reset_index()
    means = means.sort_values(["label", "rate_scale"], kind="stable")
    offered = (
        means[means["definition"] == "offered_rps"].groupby(["label", "rate_scale"], observed=True)["value"].mean()
    )
    bounds = []
    for name, cap in CAPS.items():
        binds = means[(means["definition"] == name) & (means["value"] > BINDS)]
        for label, points in binds.groupby("label", observed=True):
            first = points.iloc[0]
            rate = float(offered.get((label, first["rate_scale"]), math.nan))
            bounds.append(Bound(cap, str(label), rate, float(first["value"]), float(points["value"].max())))
    return bounds


def curves(
    table: pa.Table, label: str, definition: str = "both", axis: str = "offered_rps", over: str = "pooled"
) -> dict[int, Curve]:
    """Return attainment by rate of each seed: pooled values of `definition` (or `over` others) along `axis`.

    `axis` is offered_rps or a column of numbers; an infeasible run, which offered nothing, takes the rate of its peers.
    """
    by = column(table, "rate_scale" if axis == "offered_rps" else axis)
    seeds, values, places = column(table, "seed"), column(table, "value"), _places(table)
    rate = dict[tuple[int, float], float]()
    if axis == "offered_rps":
        offered = [i for key, at in places.items() if key[1:] == ("offered_rps", "pooled") for i in at]
        for i in (*sorted(offered), *places.get((label, "offered_rps", "pooled"), ())):  # its own come last, and stand
            if values[i] is not None:
                rate[seeds[i], by[i]] = values[i]
    by_seed: dict[int, dict[float, float]] = {}
    for i in places.get((label, definition, over), ()):
        x = rate.get((seeds[i], by[i])) if axis == "offered_rps" else by[i]
        if x is not None and not math.isnan(x):
            by_seed.setdefault(seeds[i], {})[float(x)] = math.nan if values[i] is None else values[i]
    return {seed: by_seed[seed] for seed in sorted(by_seed)}


class Counted(NamedTuple):
    """Misses and offered requests of a window."""

    missed: float
    offered: float

    @property
    def met(self) -> float:
        """Attainment; 0 where nothing was offered."""
        return 1.0 - self.missed / self.offered if self.offered else 0.0


Windows = dict[int, dict[float, Counted]]  # by seed and x


def windows(table: pa.Table, label: str, definition: str, over: str = "pooled") -> dict[str, Windows]:
    """Return the counts of each run of a label, by model ("" where pooled), seed and column x, or else the rate scale.

    `over` is pooled or model. Runs that did not run have none. In a table without counts they follow from the value.
    """
    names = ("infeasible", "skipped", "model", "seed", along(table), "n", "value")
    columns = [column(table, name) for name in names]
    stored = _counted(table)
    by_model: dict[str, Windows] = {}
    for i in _places(table).get((label, definition, over), ()):
        infeasible, skipped, model, seed, x, n, value = (values[i] for values in columns)
        if infeasible is not None or skipped is not None:
            continue
        counted = stored.get(i) or Counted(n * (1.0 - (value or 0.0)), float(n))
        if counted.offered > 0:
            by_model.setdefault(model or "", {}).setdefault(seed, {})[x] = counted
    return by_model


@once
def _counted(table: pa.Table) -> dict[int, Counted]:
    """Return the counts of each row that has some."""
    if "offered" not in table.column_names:
        return {}
    missed, offered = (table[name].combine_chunks() for name in ("missed", "offered"))
    ends = zip(*(each.offsets.to_numpy() for each in (missed, offered)), strict=True)
    values = [each.values.to_numpy() for each in (missed, offered)]
    return {
        i: Counted(*(float(all_[low:high].sum()) for all_, low, high in zip(values, lows, highs, strict=True)))
        for i, (there, (lows, highs)) in enumerate(zip(offered.is_valid().to_pylist(), pairwise(ends), strict=True))
        if there
    }


def along(table: pa.Table) -> str:
    """Return the name of the column that varies along a curve."""
    return "x" if "x" in table.column_names else "rate_scale"


def together(of: Windows, seeds: Collection[int]) -> Counts | None:
    """Line up the windows of these seeds, at the x that all of them have; None where there is no such x."""
    mine = {seed: of[seed] for seed in sorted(seeds) if seed in of}
    xs = sorted(set.intersection(*(set(curve) for curve in mine.values()))) if mine else []
    if not xs:
        return None
    counted = np.array([[curve[x] for curve in mine.values()] for x in xs], np.float64)
    return Counts(np.array(xs), counted[:, :, 0], counted[:, :, 1])


class Unfit(NamedTuple):
    """Seeds with which a system has no value at any x."""

    word: str  # does not fit: its models; skipped: it cannot be asked for this
    why: str  # of the first one
    seeds: int
    of: int

    @property
    def every(self) -> bool:
        """Tell whether no seed is left."""
        return self.seeds == self.of


def unfit(table: pa.Table, label: str) -> Unfit | None:
    """Return the seeds with which a label has no value at any x, and why; None where all have one."""
    seeds = _reasons(table).get(label, {})
    for k, word in enumerate(("does not fit", "skipped")):
        gone = [str(why[0][k]) for _, why in sorted(seeds.items()) if all(reason[k] is not None for reason in why)]
        if gone:
            return Unfit(word, gone[0], len(gone), len(seeds))
    return None


def ran(table: pa.Table, label: str) -> set[int]:
    """Return the seeds with which a label has a value at some x: neither skipped nor infeasible at all of them."""
    return {seed for seed, why in _reasons(table).get(label, {}).items() if (None, None) in why}


@once
def _reasons(table: pa.Table) -> dict[str, dict[int, list[tuple[str | None, str | None]]]]:
    """Collect the reasons why runs are infeasible and skipped, by label and seed, each pair once in order of rows."""
    reasons: dict[str, dict[int, dict[tuple[str | None, str | None], None]]] = {}
    columns = (column(table, name) for name in ("label", "seed", "infeasible", "skipped"))
    for label, seed, *why in zip(*columns, strict=True):
        reasons.setdefault(label, {}).setdefault(seed, {})[tuple(why)] = None
    return {label: {seed: list(why) for seed, why in seeds.items()} for label, seeds in reasons.items()}
