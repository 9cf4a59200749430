"""What an SLO rule comes to: seconds by model, from measured bases, or of each request, from what it takes alone.

A `Judge` is a rule with its seconds. The tables of a sweep say who judged which run, and runs are explained by that.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.policy.types import UserError
from harness.rows import attainment, record, requests
from harness.run.execute import solo_s
from harness.run.lookup import models_of, trace_of
from harness.run.resolve import resolve
from harness.run.spec import LINKS, Spec, stored
from harness.run.sweep import BASE, Teller, sweep

if TYPE_CHECKING:
    import pyarrow as pa

Pair = tuple[float, float]  # TTFT, TPOT in seconds

TUNING_SEEDS = tuple(range(1000, 1005))  # never those of an evaluation
DRAIN_SLOS = 10  # a run goes on for so many of the largest end-to-end SLO


def base_specs(spec: Spec) -> list[Spec]:
    """Runs that measure the SLO bases of a spec: each model alone, default engine settings, the tuning seeds."""
    one = Spec(BASE, engine=spec.engine, gpu=spec.gpu, node_gpus=spec.node_gpus, models=spec.models, trace=spec.trace,
               served=spec.served, prefix_cache=spec.prefix_cache, host=spec.host, table=spec.table,
               process_bytes=spec.process_bytes, pool_bytes=spec.pool_bytes, assign=spec.assign, plan="trace",
               workload="base", slo="",
               **{name: getattr(spec, name) for name in LINKS})  # fmt: skip
    return [replace(one, seed=seed) for seed in TUNING_SEEDS]


def bases(folders: Sequence[Path]) -> dict[str, Pair]:
    """P95 of TTFT and TPOT in seconds by model, over all requests of base runs that came in the window or after it."""
    import numpy as np

    columns = ["model", "arrival_ns", "first_ns", "done_ns", "prompt_tokens", "output_tokens", "made_tokens"]
    columns += ["first_tokens", "state", *(f"{cause}_ns" for cause in record.WAITS)]
    ttft: dict[str, list[Any]] = {}
    tpot: dict[str, list[Any]] = {}
    for folder in folders:
        rows = requests.rows(record.read(folder, columns))
        rows = requests.take(rows, rows.arrival_s >= 0)
        each = attainment.tpot_s(rows)
        for i, model in enumerate(rows.models):
            mine = rows.model == i
            ttft.setdefault(model, []).append(rows.ttft_s[mine])
            tpot.setdefault(model, []).append(each[mine][rows.output_tokens[mine] > 1])
    found = {}
    for model, parts in ttft.items():
        first = attainment.quantile(np.concatenate(parts), 0.95)
        later = attainment.quantile(np.concatenate(tpot[model]), 0.95)
        if not math.isfinite(first) or later == math.inf:
            raise UserError(f"{model} has no SLO base: over 5 % of its requests never end on a GPU of its own")
        found[model] = (first, first if math.isnan(later) else later)  # one-token outputs alone: any TPOT is met
    return found


class Judge(NamedTuple):
    """An SLO rule with what it takes to apply it to every run of a sweep."""

    rule: str
    seconds: Mapping[str, Pair] | None  # by model; None: by each request's own latency
    drain_s: float = math.nan  # how long runs go on after the window

    def spec(self, spec: Spec) -> Spec:
        """The spec under this rule."""
        rows = tuple((model, *pair) for model, pair in (self.seconds or {}).items())
        drain_s = self.drain_s if spec.drain_s is None else spec.drain_s
        return replace(spec, slo=self.rule, slo_s=spec.slo_s or rows, drain_s=drain_s)

    @property
    def definition(self) -> str:
        """The attainment that this rule is about."""
        return "both" if self.seconds is not None else "e2e"


def located(rule: str) -> str:
    """The rule with its file's path as it holds from any folder."""
    return f"classes:{Path(rule[8:]).resolve()}" if rule.startswith("classes:") else rule


def rule(base: str, scale: float) -> str:
    """The SLO rule that is `scale` times a base, as `judge` takes it; UserError where it has no scale."""
    from workloads.slo import scaled

    return scaled(base, scale)


def judge(spec: Spec, rule: str, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Judge:
    """Turn a rule (workloads/slo.py) into seconds for a spec's trace, models and GPU kind; runs the bases it needs.

    A spec that holds seconds already keeps them.
    """
    from workloads import slo

    rule = located(rule)
    parsed = slo.parse(rule)
    given = {model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s}
    spec = resolve(replace(spec, system=BASE, preset=None, fields=()))
    models = models_of(spec.models)
    if given:
        return Judge(rule, given, _drain_s(spec, given))
    if isinstance(parsed, slo.Scaled) and parsed.base == "solo":
        return Judge(rule, None, _drain_s(spec, _solo_slos(spec, parsed)))
    measured = None
    if isinstance(parsed, slo.Scaled) and parsed.base == "P95":
        measured = bases(sweep(base_specs(spec), out, workers=workers, teller=teller, what="SLO bases"))
    seconds = slo.resolve(parsed, models, measured)
    return Judge(rule, seconds, _drain_s(spec, seconds))


def _drain_s(spec: Spec, slos: Mapping[str, Pair]) -> float:
    """`DRAIN_SLOS` x the largest time that an SLO leaves a request, up to a power of 2: near SLOs share their runs."""
    longest = int(trace_of(spec.trace).output_tokens.max())
    largest = max(ttft_s + (longest - 1) * tpot_s for ttft_s, tpot_s in slos.values())
    return float(2.0 ** math.ceil(math.log2(DRAIN_SLOS * largest)))


def _solo_slos(spec: Spec, rule: Any) -> dict[str, Pair]:
    """The SLOs of each model's longest request under a rule by its own latency."""
    import numpy as np

    trace, models = trace_of(spec.trace), models_of(spec.models)
    n = len(models.members)
    prompt, output = (np.full(n, int(x.max()), np.int32) for x in (trace.prompt_tokens, trace.output_tokens))
    ttft_s, tpot_s = solo_s(spec, np.arange(n, dtype=np.int32), prompt, output)
    pairs = zip((rule.ttft_x * ttft_s).tolist(), (rule.tpot_x * tpot_s).tolist(), strict=True)
    return dict(zip(models.names, pairs, strict=True))


# ------------------------------------------------------------------ limits of a stored run


def limits(run: Path, under: Judge) -> attainment.Slo:
    """The SLO seconds of a run under a judge: by model, or of each of its requests from what its folder holds."""
    from workloads import slo

    if under.seconds is not None:
        return under.seconds
    rule = slo.parse(under.rule)
    assert isinstance(rule, slo.Scaled)  # only multiples of a request's own latency have no seconds by model
    alone = stored_solo(run)
    return attainment.Limits(rule.ttft_x * alone.ttft_s, rule.tpot_x * alone.tpot_s)


_SOLO = threading.Lock()  # one thread derives and writes, the others read


def stored_solo(run: Path) -> attainment.Limits:
    """Seconds that each request of a run takes alone (`solo_s`), in order of id, as `record.SOLO` beside its rows says.

    Where that file is missing, cut, or of other rows, it is derived from the rows and the cost table, and written. A
    run made by older sources is priced by the present table, once.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    about, path = record.meta(run), run / record.SOLO
    of = {key: about[key] for key in ("spec_hash", "code_hash")}
    with _SOLO:
        record.clean(run, record.SOLO)
        if (found := _read_solo(path, of)) is None or len(found) != sum(about["counts"].values()):
            rows = record.read(run, ["model", "prompt_tokens", "output_tokens"])
            spec = stored(about["spec"])
            names = pa.array(models_of(spec.models).names)
            model = pc.index_in(rows["model"].cast(pa.string()), names).to_numpy()
            lengths = (rows[name].to_numpy() for name in ("prompt_tokens", "output_tokens"))
            seconds = solo_s(spec, model.astype(np.int32), *lengths)
            found = pa.table(dict(zip(("ttft_s", "tpot_s"), seconds, strict=True)))
            record.write_table(path, found, {"of": of})
    return attainment.Limits(found["ttft_s"].to_numpy(), found["tpot_s"].to_numpy())


def _read_solo(path: Path, of: Mapping[str, str]) -> pa.Table | None:
    """The table at `path` if it is whole and was made for the run of these hashes."""
    import pyarrow.parquet as pq

    with suppress(OSError, ValueError, KeyError):  # whatever stands there, it is made anew
        about = pq.read_metadata(path).metadata or {}
        if json.loads(about[b"of"]) == of:
            return pq.read_table(path, columns=["ttft_s", "tpot_s"])
    return None


# ------------------------------------------------------------------ who judged a run


def judgements(pairs: Iterable[tuple[Judge, str]]) -> list[dict[str, Any]]:
    """What a table says of its judges: rule, seconds, and the names of the runs that each judged."""
    found: dict[str, dict[str, Any]] = {}
    for under, run in pairs:
        about = {"rule": under.rule, "seconds": under.seconds}
        found.setdefault(record.dumps(about), {**about, "runs": set()})["runs"].add(run)
    return [{**found[key], "runs": sorted(found[key]["runs"])} for key in sorted(found)]


class Ruling(NamedTuple):
    """A judge of a run, and the table that says so."""

    under: Judge
    table: Path  # its folder


def rulings(run: Path) -> list[Ruling]:
    """Judges of a run in the tables beside it, those of the newest table first; each (rule, seconds) once."""
    import pyarrow.parquet as pq

    tables = sorted(run.parent.glob(f"*/{record.SWEEP}"), key=lambda path: -path.stat().st_mtime_ns)
    found: dict[str, Ruling] = {}
    for path in tables:
        with suppress(Exception):  # a table that cannot be read says nothing
            stored = json.loads((pq.read_metadata(path).metadata or {}).get(b"judges", b"[]"))
            for rule, seconds in [(one["rule"], one["seconds"]) for one in stored if run.name in one["runs"]]:
                pairs = seconds and {model: (ttft_s, tpot_s) for model, (ttft_s, tpot_s) in seconds.items()}
                found.setdefault(record.dumps([rule, seconds]), Ruling(Judge(rule, pairs), path.parent))
    return list(found.values())
