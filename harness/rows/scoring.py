"""Scores of runs: attainment by every definition and other measures, as rows of a table (run x model x definition)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from harness.rows import causes, record, setting
from harness.rows.definitions import DEFINITIONS
from harness.rows.requests import Limits, Slo, extent, in_window, limits, of_models, rows, take
from harness.rows.tally import Tally, jain
from harness.rows.tidy import CAPS, HELD, HITS, ORDER, RUN_SCHEMA, TABLE_SCHEMA, WAKES, WEIGHTS, WORD


@dataclass(frozen=True, slots=True)
class Run:
    """A run to score: its folder's name, facts (record.meta), rows (record.read) and the SLO seconds that apply."""

    name: str
    meta: Mapping[str, Any]
    table: pa.Table | record.Pieces
    slo_s: Slo
    label: str = ""  # names it in tables and legends; empty: the system's name (and preset) does


def scores(runs: Iterable[Run]) -> pa.Table:
    """Score all runs, one at a time, into the tidy table (run x model x definition, `TABLE_SCHEMA`); sort it."""
    table = pa.concat_tables([TABLE_SCHEMA.empty_table(), *map(score, runs)])
    plain = record.plain(TABLE_SCHEMA)
    # strings while sorting, so that the dictionaries come out in the order of the sorted rows: equal runs, equal bytes
    return table.cast(plain).sort_by([(name, "ascending") for name in ORDER]).cast(TABLE_SCHEMA).combine_chunks()


def score(
    run: Run, *, by_model: bool = True, definitions: Collection[str] = tuple(DEFINITIONS), more: Iterable[Value] = ()
) -> pa.Table:
    """Score one run: return table rows for these definitions and every measure, pooled and by model.

    Without `by_model`, rows by model have attainment alone. `more` has further rows, which a skipped or infeasible run
    does not get.
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
    columns = {name: [about.get(name)] * count for name, _ in RUN_SCHEMA}
    names = TABLE_SCHEMA.names[len(RUN_SCHEMA) :]
    columns |= dict(zip(names, zip(*values, strict=True), strict=True))
    arrays = [_array(columns[f.name], f.type) for f in TABLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode() if kind == WORD else pa.array(values, kind)


class Value(NamedTuple):
    """A row of the table of scores, without the facts of its run."""

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
        yield Value(name, "mean", None, n, float(np.mean(list(each.values()))) if each else None)
        yield Value(name, "worst", None, n, _known(min(each.values(), default=math.nan)))
        yield Value(name, "jain", None, n, _known(jain(each.values())))
        for model, value in each.items():
            index = models.index(model)
            yield Value(name, "model", model, counts[index], value, of.missed[index], of.asked[index])
        for wait, value in causes.of_counts(of.causes).items():
            yield Value(f"missed_{name}_{wait}", "pooled", None, n, value)
    for name, value in sums.pooled.values(sums.window_s, sums.quantiles()).items():
        yield Value(name, "pooled", None, n, _known(value))
    for code, quantiles in sums.by_model().items() if by_model else ():
        for name, value in sums.each[code].values(sums.window_s, quantiles).items():
            yield Value(name, "model", models[code], counts[code], _known(value))
    for name, value in utilisation(run.meta.get("stats") or {}).items():
        yield Value(name, "pooled", None, n, _known(value))


def tallied(
    run: Run, spec: Mapping[str, Any], definitions: Collection[str], *, measured: bool = True, by_model: bool = True
) -> Tally:
    """Sum attainment over the offered requests of a run. A long run is read in pieces.

    With `measured`, also sum the other measures and the causes of misses. With `by_model` as well, sum these measures
    for each model too.
    """
    pieces = run.table if isinstance(run.table, record.Pieces) else [run.table]
    needed = pieces.columns(["model", "arrival_ns"]) if isinstance(pieces, record.Pieces) else pieces
    models, last_s, most = extent(needed)
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


def utilisation(stats: Mapping[str, float]) -> dict[str, float]:
    """Compute shares of capacity (KV bytes x seconds, GPU seconds) from an engine's statistics, and copy its counts.

    All shares refer to the window alone, without warm-up and drain.
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
