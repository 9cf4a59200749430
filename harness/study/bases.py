"""The seconds of an SLO rule.

The rule states them, or it scales a latency. The latency is that of a request that runs alone, or the P95 of base runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.engines.costs import servers
from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import record, requests
from harness.run.realtime import Span, span
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_models
from harness.run.slo import Pair, SloTarget, located
from harness.run.spec import LINKS, Spec
from harness.run.sweep import BASE, sweep
from harness.run.teller import Teller
from harness.study.study import mistakes_in
from workloads import slo

TUNING_SEEDS = tuple(range(1000, 1005))  # never those of an evaluation
LARGEST_S = 1e9  # s, the longest SLO: thirty years
DRAIN_SLOS = 10  # a run drains for this multiple of the largest end-to-end SLO


def base_specs(spec: Spec, gpu: str = "") -> list[Spec]:
    """List the runs that measure a spec's SLO bases: each model alone, with the bench's settings, on tuning seeds.

    All runs use one kind of GPU (`Setup.base_gpu`), and as many GPUs as their models need. The limits on the tokens and
    sequences of a step are the same for all GPUs and servers. A strategy that sets its own limits is therefore judged
    by the same SLO as the others.
    """
    its = servers.bench()
    plain = Spec(BASE, engine=spec.engine, gpu=Setup(spec).base_gpu(gpu), node_gpus=spec.node_gpus,
               models=spec.models, trace=spec.trace, served=spec.served, prefix_cache=spec.prefix_cache,
               host=spec.host, table=spec.table,
               batch_cap=its.batch_cap, chunk_tokens=its.chunk_tokens, prefill_tokens=its.prefill_tokens,
               mem_fraction=its.mem_fraction, admission=its.admission, process_bytes=Setup(spec).settings.process_bytes,
               pool_bytes=spec.pool_bytes, assign=spec.assign, plan="trace",
               workload="base", slo="",
               **{name: getattr(spec, name) for name in LINKS})  # fmt: skip
    return [replace(plain, seed=seed) for seed in TUNING_SEEDS]


def bases(folders: Sequence[Path]) -> dict[str, Pair]:
    """Return P95 of TTFT and TPOT in seconds by model, from base runs.

    If all outputs of a model have one token, its P95 of TTFT is also returned as its TPOT; every request meets that
    TPOT. Raises UserError if over 5 % of the requests of a model never end.
    """
    pairs = tails(folders)
    for model, (first_s, later_s) in pairs.items():
        if not math.isfinite(first_s) or later_s == math.inf:
            raise UserError(f"{model} has no SLO base: over 5 % of its requests never end on a GPU of its own")
    # NaN: all outputs have one token, so any TPOT is met
    return {model: (first, first if math.isnan(later) else later) for model, (first, later) in pairs.items()}


def tails(folders: Iterable[Path]) -> dict[str, Pair]:
    """Compute P95 of TTFT and TPOT in seconds by model, over all requests that arrive after the warm-up of their run.

    Requests that never end count as infinite. If all outputs of a model have one token, its TPOT is NaN.
    """
    columns = ["model", "arrival_ns", "first_ns", "done_ns", "prompt_tokens", "output_tokens", "made_tokens"]
    columns += ["first_tokens", "state", *(f"{cause}_ns" for cause in record.WAITS)]
    ttft: dict[str, list[Any]] = {}
    tpot: dict[str, list[Any]] = {}
    for folder in folders:
        rows = requests.rows(record.read(folder, columns))
        rows = requests.take(rows, rows.arrival_s >= 0)
        tpot_s = requests.tpot_s(rows)
        for i, model in enumerate(rows.models):
            mine = rows.model == i
            ttft.setdefault(model, []).append(rows.ttft_s[mine])
            tpot.setdefault(model, []).append(tpot_s[mine][rows.output_tokens[mine] > 1])
    return {
        model: (requests.quantile(np.concatenate(parts), 0.95), requests.quantile(np.concatenate(tpot[model]), 0.95))
        for model, parts in ttft.items()
    }


def check_rule(rule: str, models: str) -> None:
    """Raise UserError if an SLO rule has no seconds for some model of a set.

    Only rules with stated or released seconds can be checked before anything is run. A rule that scales a measured
    latency always passes.
    """
    parsed = slo.parse(rule)
    if not isinstance(parsed, slo.Scaled) or parsed.base == "released":
        with mistakes_in(f"SLO {rule}"):
            slo.resolve(parsed, load_models(models))


def slo_target(
    spec: Spec, rule: str, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> SloTarget:
    """Return the SLO target in seconds of a rule (workloads/slo.py) for a spec's trace, models and kind of GPU.

    Base runs that the rule needs are executed and stored below `out`. If the spec states seconds, these are used. For a
    mix of kinds of GPU, the kind on which the base is measured is added to the rule.
    """
    rule = located(rule)
    given = {model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s}
    setup = Setup(resolve(replace(spec, system=BASE, preset=None, fields=())))
    parsed = slo.parse(rule)
    if mix.mixed(spec.gpu) and not given and isinstance(parsed, slo.Scaled) and not parsed.gpu and parsed.by_gpu:
        parsed = replace(parsed, gpu=setup.base_gpu())
        rule = f"{rule}@{parsed.gpu}"
    if given:
        return SloTarget(rule, given, _drain_s(setup, given))
    if isinstance(parsed, slo.Scaled) and parsed.base == "solo":
        return SloTarget(rule, None, _drain_s(setup, _solo_slos(setup, parsed)))
    measured = None
    if isinstance(parsed, slo.Scaled) and parsed.base == "P95":
        specs = base_specs(setup.spec, parsed.gpu)
        folders = sweep(specs, out, workers=workers, teller=teller, what="SLO bases")
        if why := record.meta(folders[0])["infeasible"]:
            raise UserError(f"no SLO base: {why}")
        measured = bases(folders)
    seconds = slo.resolve(parsed, setup.models, measured)
    return SloTarget(rule, seconds, _drain_s(setup, seconds))


class Ahead(NamedTuple):
    """The drain time and the base runs that an SLO rule needs before a spec can run in real time."""

    drain_s: float | None  # most seconds that a run drains after its window; None: base runs decide
    bases: list[Span]  # base runs in real time, stored or not


def ahead(spec: Spec, rule: str, out: Path) -> Ahead:
    """Return the drain time and base runs that an SLO rule needs before a spec runs in real time; nothing is run."""
    parsed = slo.parse(located(rule))
    if spec.slo_s or not (isinstance(parsed, slo.Scaled) and parsed.base == "P95"):
        return Ahead(slo_target(spec, rule, out).drain_s, [])
    alone = resolve(replace(spec, system=BASE, preset=None, fields=()))
    spans = (span(resolve(base)) for base in base_specs(alone, parsed.gpu))
    return Ahead(None, [period for period in spans if period])


def _drain_s(setup: Setup, slos: Mapping[str, Pair]) -> float:
    """Return the longest drain time in seconds: `DRAIN_SLOS` times the longest time that an SLO allows a request.

    The result is rounded up to a power of 2, so that similar SLOs share runs. Raises UserError if the longest time that
    an SLO allows is above LARGEST_S.
    """
    longest = setup.trace.longest_output_tokens
    largest = max(ttft_s + (longest - 1) * tpot_s for ttft_s, tpot_s in slos.values())
    if largest > LARGEST_S:
        raise UserError(
            f"an SLO of {largest:.3g} s for a request of {longest} tokens is too long (a lower --slo-scale)"
        )
    return float(2.0 ** math.ceil(math.log2(DRAIN_SLOS * largest)))


def _solo_slos(setup: Setup, rule: slo.Scaled) -> dict[str, Pair]:
    """Compute each model's TTFT and TPOT limits in seconds for the longest prompt and output of the trace.

    The rule is a multiple of the latency of a request alone on an idle GPU.
    """
    trace, models = setup.trace, setup.models
    n = len(models.members)
    prompt, output = (np.full(n, int(x.max()), np.int32) for x in (trace.prompt_tokens, trace.output_tokens))
    ttft_s, tpot_s = setup.solo_s(np.arange(n, dtype=np.int32), prompt, output, gpu=rule.gpu)
    pairs = zip((rule.ttft_x * ttft_s).tolist(), (rule.tpot_x * tpot_s).tolist(), strict=True)
    return dict(zip(models.names, pairs, strict=True))


def judged_by(rule: str) -> str:
    """Return the default definition of attainment of an SLO rule.

    It is "e2e" for multiples of a request's latency alone, else "both".
    """
    parsed = slo.parse(rule)
    return "e2e" if isinstance(parsed, slo.Scaled) and parsed.base == "solo" else "both"


def by_kind(rule: str) -> slo.Scaled | None:
    """Return the parsed rule if it scales a base measured on each run's kind of GPU; else None.

    The base of such a rule depends on the GPU, and the rule itself names no kind of GPU.
    """
    parsed = slo.parse(rule)
    return parsed if isinstance(parsed, slo.Scaled) and parsed.by_gpu and not parsed.gpu else None
