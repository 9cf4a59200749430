"""Weaver's figures 4 to 7: rates, TPOT, batches and KV of a hot and a cold model, beside the paper's numbers.

`bench study weaver` prints a line a claim (`weaving.toml`), with its verdict. `python -m harness.study.weaving -o`
writes them, and the points of the figures, which plots/fig_weaver.py draws. Runs are those of any sweep, kept in
`results/weaver`.

The setting is section 5's: two Llama-3-8B, lengths of Azure-Conv without sequences beyond 2,048 tokens (TRACES_DIR,
azure2023/), Poisson arrivals, the cold model at 1 req/s, vLLM 0.6 (`vllm-0.6`). Each system has four GPUs: each model
prefills on a GPU of its own, and the two decode GPUs are shared. Weaver and dedicated serving (`weaver:off`) give one
to each model. MuxServe has both models on both (TP2), with shared KV blocks and no quotas; each model's decodes have
half of the SMs, as the artifact sets it (gswxp2/weaver 2598e04, ae_exps/figure-4).

A highest rate is the number of requests finished a second when 30 are offered. The knee is the highest rate, in halves,
of which dedicated serving finishes all with every seed: beyond it a queue grows, and latencies measure the run time.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.machine import Config, Served, cluster
from harness.policy.chance import draw
from harness.policy.types import Inst, UserError
from harness.rows import record, requests
from harness.run import sweep
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.run.teller import Silent, Teller
from harness.study.claims import Line, Part, by_measures, paper_text, reason, stated
from traces import schema
from workloads.models import shape

PAPER = "Weaver, USENIX ATC 2025"
CLAIMS = Path(__file__).with_name("weaving.toml")
RESULTS = Path("results")
LENGTHS = "azure2023/AzureLLMInferenceTrace_conv.csv"
MODEL, HOST, MOST_TOKENS = "llama-3.1-8b", "vllm-0.6", 2048
COLD_RPS = 1.0
WARM_S, WINDOW_S = 50.0, 200.0
LONG_WARM_S, LONG_WINDOW_S = 200.0, 600.0  # where outputs have 1,024 tokens, which take a minute and more
LATE_S = 40.0  # requests that arrive so shortly before the end may not end by then, and are not counted
SEEDS = 5
KNEE_RPS = 12.0  # of dedicated serving on A100: at 12.5 one seed of five, at 13 three do not hold it
HIGH_RPS, LONG_RPS = 30.0, 10.0  # offered where a highest rate is measured
CONTROL_RPS = 2.0  # of figure 7a, which does not say its own; ours, CPU control being overloaded from 1 on
RATES = (2.0, 5.0, 8.0, 10.0, 12.0, 13.0, 14.0, 15.0, 18.0, 22.0)
HELD = 0.98  # of the requests offered, by every seed, where a line of a figure has a point
RATIOS = (0.05, 0.15, 0.25, 0.35, 0.4, 0.45, 0.5, 0.6)  # figure 5b
TABLE1_TOKENS = (1024, 128)  # prompt and output of table 1


@dataclass(frozen=True)
class Run:
    """A system on a platform under a load."""

    system: str = "weaver"
    preset: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    rps: float = 15.0  # of the hot model
    gpu: str = "a100-40g"
    fixed: tuple[int, int] | None = None  # tokens of each request; None: Azure-Conv's

    @property
    def window_s(self) -> float:
        """Seconds of the window."""
        return WINDOW_S if self.fixed is None else LONG_WINDOW_S

    def at(self, rps: float) -> Run:
        """Return the same run at another rate of the hot model."""
        return replace(self, rps=rps)

    def spec(self, seed: int, out: Path) -> Spec:
        """Return the run as a spec; its requests are written below `out`."""
        return Spec(
            self.system, self.preset, self.fields, gpu=self.gpu, gpus=4, host=HOST,
            models="weaver-tp2" if self.system == "muxserve" else "weaver", served=MOST_TOKENS,
            trace=str(written(self.rps, self.fixed, self.window_s, seed, out)), scaling="none", plan="trace", seed=seed,
            window_s=self.window_s, warmup_s=WARM_S if self.fixed is None else LONG_WARM_S, drain_s=0.0, slo="",
            chunk_tokens=2048, batch_cap=256, mem_fraction=0.9, admission="prompt",
        )  # fmt: skip


class Measured(NamedTuple):
    """The results of a run; latencies are of requests that came up to `LATE_S` before the window's end and ended."""

    hot_ms: float  # mean TPOT
    cold_ms: float
    cold_p99_ms: float
    hot_ttft_s: float  # mean
    done_rps: float  # of the hot model, finished in the window
    held: float  # of its requests that came, the share that ended
    batch: float  # of its requests, those that are in a step at a time
    kv_hot: float  # the share of KV memory in use on the hot model's decode GPU; of requests that end in time
    kv_cold: float  # and on the cold model's


# ------------------------------------------------------------------ a run


def inputs() -> Sequence[Path]:
    """List the files outside of the repository that the answer rests on: Azure-Conv's lengths.

    Raises UserError where TRACES_DIR lacks the file.
    """
    folder = os.environ.get("TRACES_DIR", "")
    path = Path(folder) / LENGTHS
    if not path.is_file():
        raise UserError(f"no file {LENGTHS} in TRACES_DIR ({folder or 'not set'}); see traces/manifest.toml")
    return [path]


@cache
def lengths() -> NDArray[np.int32]:
    """Read prompt and output tokens of Azure-Conv's requests of at most 2,048 tokens, shape (requests, 2)."""
    (path,) = inputs()
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return np.array([row for row in rows if min(row) > 0 and sum(row) <= MOST_TOKENS], np.int32)


@cache
def written(rps: float, fixed: tuple[int, int] | None, span_s: float, seed: int, out: Path) -> Path:
    """Write Poisson arrivals of both models as a trace of one window; returns its path."""
    rng = np.random.default_rng(seed)
    times = [np.sort(rng.uniform(0, span_s, rng.poisson(rate * span_s))) for rate in (COLD_RPS, rps)]
    arrival_s, model = np.concatenate(times), np.repeat(["cold", "hot"], [len(t) for t in times])
    order, n = np.argsort(arrival_s, kind="stable"), len(arrival_s)
    drawn = lengths()[rng.integers(0, len(lengths()), n)] if fixed is None else np.tile(fixed, (n, 1))
    note = "Poisson arrivals of a hot and a cold model" + ("" if fixed else ", lengths of Azure-Conv")
    name = f"weaver-{rps:g}-{seed}" + (f"-{fixed[0]}-{fixed[1]}" if fixed else "")
    path = out / f"{name}.parquet"
    return schema.drawn(path, arrival_s[order], model[order].tolist(), drawn, span_s=span_s, note=note)


def measured(spec: Spec, folder: Path) -> Measured:
    """Measure a run by its rows alone: batches and KV by Little's law, of requests that end in the window."""
    table = record.read(folder)
    rows = requests.rows(table)
    hot, cold = (rows.model == rows.models.index(name) for name in ("hot", "cold"))
    window_s = spec.window_s or 0.0
    done_s = rows.arrival_s + rows.e2e_s
    came = (rows.arrival_s >= 0) & (rows.arrival_s < window_s - LATE_S)
    whole = came & rows.done & (rows.output_tokens > 1)
    tpot_ms = (rows.e2e_s - rows.ttft_s) / np.maximum(rows.output_tokens - 1, 1) * 1e3
    ended = rows.done & (done_s >= 0)  # in the window, after which nothing runs
    after_s = dict(zip(record.WAITS, (rows.waits_s - rows.ttft_waits_s).T, strict=True))  # their first token
    in_steps_s = after_s["compute"] + after_s["contention"] + after_s["time_slice"]
    here_s = rows.e2e_s - rows.ttft_s - after_s["transfer"] - after_s["kv"]
    held = np.where(ended, here_s * (rows.prompt_tokens + rows.output_tokens / 2), 0.0) * _token_share(spec)
    far = np.array([draw(0, int(rid)) < _ratio(spec) for rid in table["id"].to_pylist()]) & hot
    return Measured(
        hot_ms=mean(tpot_ms[whole & hot]),
        cold_ms=mean(tpot_ms[whole & cold]),
        cold_p99_ms=float(np.percentile(tpot_ms[whole & cold], 99)),
        hot_ttft_s=mean(rows.ttft_s[whole & hot]),
        done_rps=float((ended & hot).sum() / window_s),
        held=float(rows.done[came & hot].mean()),
        batch=float(in_steps_s[ended & hot].sum() / window_s),
        kv_hot=float(held[hot & ~far].sum() / window_s),
        kv_cold=float(held[far | cold].sum() / window_s),
    )


def _ratio(spec: Spec) -> float:
    """Return the share of the hot model's requests whose KV cache lies on the cold model's GPU."""
    return float(Setup(spec).keywords.get("ratio", 0.45)) if spec.system == "weaver" else 0.0


def _token_share(spec: Spec) -> float:
    """Compute the part of a decode GPU's KV memory that a token takes."""
    machine = Setup(spec).cluster
    model = machine.models["hot"]
    return model.kv_token_bytes / (machine.gpus[0].mem_bytes - model.weight_bytes)


def mean(x: NDArray[np.float64]) -> float:
    """Return the mean of an array; NaN where it is empty."""
    return float(x.mean()) if len(x) else math.nan


def tokens_per_s(batch: int, tp: int, gpu: str = "a100-40g") -> float:
    """Compute tokens a second of two GPUs as in table 1: of two instances with a batch each, or one of TP2 with one.

    Decode steps alone count. At batch 128 the paper's 8,011 tokens/s leave 4.1 s for 128 requests of 128 tokens on each
    GPU; their prompts, 131,072 tokens of 2 x 6.98e9 FLOP, would take 5.9 s at the card's peak.
    """
    prompt, output = TABLE1_TOKENS
    config = Config((Served("m", shape(MODEL), 1, degrees=(2,)),), gpu=gpu, gpus=2, host=HOST)
    inst, profile = Inst("m", tuple(range(tp))), cluster(config).profile
    seconds = sum(profile.step_s(inst, batch, batch * (prompt + k)) for k in range(1, output))
    return 2 / tp * batch * (output - 1) / seconds


def tp2_loss(batch: int) -> float:
    """Compute the part of two instances' throughput that TP2 loses (table 1)."""
    return 1 - tokens_per_s(batch, 2) / tokens_per_s(batch, 1)


# ------------------------------------------------------------------ measures of the claims

WEAVER, OFF = Run(), Run(preset="off")
MUXSERVE = Run("muxserve", "weaver")  # as the artifact has it: half of the SMs for each model's decodes
TEMPORAL = Run("muxserve", "temporal", (("kv", "paged"), ("prefill", "apart")))
LONG = (512, 1024)
# Section 5.3, figure 7a: Azure-Conv on L40S
ON_L40S = Run(rps=CONTROL_RPS, gpu="l40s")
CPU, UNSPLIT, OFF_L40S = (replace(ON_L40S, preset=preset) for preset in ("cpu", "unsplit", "off"))


class Measure(NamedTuple):
    """A number of some runs with one seed."""

    runs: tuple[Run, ...]
    value: Callable[..., float]  # of their results, in order


def high(run: Run, **over: Any) -> Run:
    """Return the run under more load than it can serve."""
    run = replace(run, **over)
    return run.at(HIGH_RPS if run.fixed is None else LONG_RPS)


def gain(run: Run, other: Run) -> Measure:
    """Return the ratio of two systems' highest rates as a measure."""
    return Measure((high(run), high(other)), lambda a, b: a.done_rps / b.done_rps)


def shared(ratio: float, rps: float = 15.0) -> Run:
    """Return a run of Weaver that offloads another share of the hot model's requests."""
    return Run(fields=(("ratio", ratio),), rps=rps)


def at_knee(run: Run, value: Callable[..., float]) -> Measure:
    """Return a measure of a run and of dedicated serving, both at the knee of dedicated serving."""
    return Measure((run.at(KNEE_RPS), OFF.at(KNEE_RPS)), value)


def best(*each: Measured) -> float:
    """Return the offload ratio, of RATIOS, with the least mean TPOT of the hot model."""
    return min(zip(RATIOS, each, strict=True), key=lambda pair: pair[1].hot_ms)[0]


def over(name: str) -> Callable[[Measured, Measured], float]:
    """Return a function that divides a field of one run by that of another."""
    return lambda a, b: getattr(a, name) / getattr(b, name)


def more(name: str) -> Callable[[Measured, Measured], float]:
    """Return a function that subtracts a field of one run from that of another."""
    return lambda a, b: getattr(a, name) - getattr(b, name)


def field_of(name: str) -> Callable[..., float]:
    """Return a function that reads a field of the first of some runs."""
    return lambda a, *_: getattr(a, name)


MEASURES: Mapping[str, Measure] = {
    **{f"tp2_loss_{b}": Measure((), lambda b=b: tp2_loss(b)) for b in (16, 128)},
    **{f"separate_tps_{b}": Measure((), lambda b=b: tokens_per_s(b, 1)) for b in (16, 128)},
    "dedicated_rps": Measure((high(OFF),), field_of("done_rps")),
    "weaver_rps": Measure((high(WEAVER),), field_of("done_rps")),
    "gain_dedicated": gain(WEAVER, OFF),
    "dedicated_batch": at_knee(OFF, field_of("batch")),
    "dedicated_kv": at_knee(OFF, field_of("kv_hot")),
    "weaver_kv_hot": Measure((WEAVER,), field_of("kv_hot")),
    "weaver_kv_cold": Measure((WEAVER,), field_of("kv_cold")),
    "weaver_batch": Measure((high(WEAVER),), field_of("batch")),
    "tpot_knee": at_knee(WEAVER, over("hot_ms")),
    "tpot_low": Measure((WEAVER.at(2.0), OFF.at(2.0)), over("hot_ms")),
    "cold_low": Measure((WEAVER.at(2.0), OFF.at(2.0)), over("cold_ms")),
    "cold_high_ms": Measure((WEAVER, OFF), more("cold_ms")),
    "cold_p99_ms": Measure((WEAVER,), field_of("cold_p99_ms")),
    "cold_p99_more_ms": Measure((WEAVER,), lambda a: a.cold_p99_ms - a.cold_ms),
    "gain_muxserve": gain(WEAVER, MUXSERVE),
    "gain_temporal": gain(WEAVER, TEMPORAL),
    "gain_temporal_l40s": gain(ON_L40S, replace(TEMPORAL, gpu="l40s")),
    "tpot_muxserve": Measure((WEAVER.at(10.0), MUXSERVE.at(10.0)), over("hot_ms")),
    "tpot_temporal": Measure((WEAVER.at(10.0), TEMPORAL.at(10.0)), over("hot_ms")),
    "cold_temporal": Measure((WEAVER.at(10.0), TEMPORAL.at(10.0)), over("cold_ms")),
    "best_ratio": Measure(tuple(shared(ratio) for ratio in RATIOS), best),
    "tpot_half": at_knee(shared(0.5), over("hot_ms")),
    "cold_half_ms": Measure((shared(0.5), OFF), more("cold_ms")),
    "gain_long": gain(replace(WEAVER, fixed=LONG), replace(MUXSERVE, fixed=LONG)),
    "cold_long_ms": Measure((high(WEAVER, fixed=LONG), high(OFF, fixed=LONG)), more("cold_ms")),
    "cpu_ms": Measure((CPU,), field_of("hot_ms")),
    "gpu_ms": Measure((UNSPLIT,), field_of("hot_ms")),
    "split_gain": Measure((ON_L40S, UNSPLIT), over("hot_ms")),
    "splits_ms": Measure((ON_L40S, UNSPLIT), more("cold_ms")),
    "polls_ms": Measure((UNSPLIT, OFF_L40S), more("cold_ms")),
    "ttft_muxserve": Measure((WEAVER.at(10.0), MUXSERVE.at(10.0)), over("hot_ttft_s")),
}


# ------------------------------------------------------------------ points of the figures


class Shown(NamedTuple):
    """A point of a figure, for each seed."""

    panel: str
    series: str
    x: float  # requests a second, or the share that is offloaded; 0 where the panel has bars
    run: Run
    field: str  # of `Measured`


class Point(NamedTuple):
    """A point of a figure."""

    panel: str
    series: str
    x: float
    seed: int
    value: float  # TPOT in ms, or requests a second


def shown() -> Iterator[Shown]:
    """Yield the points of figures 4 to 7 that one trace can show."""
    for rps in RATES:
        for name, run in (("Weaver", WEAVER), ("dedicated", OFF)):
            yield Shown("hot", name, rps, run.at(rps), "hot_ms")
            yield Shown("cold", name, rps, run.at(rps), "cold_ms")
        for name, run in (("Weaver", WEAVER), ("MuxServe", MUXSERVE), ("MuxServe-Temporal", TEMPORAL)):
            yield Shown("muxserve", name, rps, run.at(rps), "hot_ms")
    for ratio in RATIOS:
        yield Shown("share", "hot model", ratio, shared(ratio), "hot_ms")
        yield Shown("share", "cold model", ratio, shared(ratio), "cold_ms")
    for name, run in HIGHEST.items():
        yield Shown("highest", name, 0.0, high(run), "done_rps")
    for name, run in (("CPU", CPU), ("GPU", UNSPLIT), ("GPU, split", ON_L40S)):
        yield Shown("control", name, 0.0, run, "hot_ms")


OVER = {"gain_dedicated": "dedicated serving", "gain_muxserve": "MuxServe"}  # ratios of highest rates
HIGHEST: Mapping[str, Run] = {
    "dedicated": OFF, "Weaver": WEAVER, "MuxServe": MUXSERVE, "MuxServe-Temporal": TEMPORAL,
    "Weaver, long outputs": replace(WEAVER, fixed=LONG), "MuxServe, long outputs": replace(MUXSERVE, fixed=LONG),
}  # fmt: skip


# ------------------------------------------------------------------ all of it

Results = Mapping[tuple[Run, int], Measured]  # by run and seed


def ran(
    runs: Iterable[Run], seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> Results:
    """Run those that are not stored in `out`, with each seed; return each run's results."""
    keys = [(run, seed) for run in dict.fromkeys(runs) for seed in range(seeds)]
    specs = [run.spec(seed, out) for run, seed in keys]
    folders = sweep.sweep(specs, out, workers=workers, teller=teller or Silent(), what="weaver")
    return {key: measured(spec, folder) for key, spec, folder in zip(keys, specs, folders, strict=True)}


def needed() -> list[Run]:
    """List the runs that the claims need, once each."""
    measures = [claim["measure"] for claim in stated(CLAIMS) if "measure" in claim]
    return list(dict.fromkeys(chain.from_iterable(MEASURES[name].runs for name in measures)))


def count(seeds: int) -> int:
    """Count the runs of the claims."""
    return len(needed()) * seeds


def specs(seeds: int, out: Path) -> Iterator[Spec]:
    """Yield the specs of all runs that the claims need; their traces are written below `out`."""
    return (run.spec(seed, out) for run in needed() for seed in range(seeds))


def setting() -> str:
    """Describe models, GPUs and lengths of all runs."""
    return f"two {MODEL}, lengths of {Path(LENGTHS).stem}, {HOST}"


def values(name: str, results: Results, seeds: int) -> list[float]:
    """Compute a measure for each seed."""
    measure = MEASURES[name]
    return [measure.value(*(results[run, seed] for run in measure.runs)) for seed in range(seeds)]


def lines(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Line]:
    """Yield every claim with its verdict; runs are kept in `out`."""
    return judged(ran(needed(), seeds, out, workers=workers, teller=teller), seeds)


def judged(results: Results, seeds: int) -> Iterator[Line]:
    """Yield every claim with its verdict."""
    return by_measures(CLAIMS, "weaver", lambda name: [("", values(name, results, seeds))])


def parts(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Part]:
    """Yield the answer: Weaver's highest rate over those of others, then a line a claim."""
    results = ran(needed(), seeds, out, workers=workers, teller=teller)
    over = [f"{fmean(values(name, results, seeds)):.2f} times {other}'s" for name, other in OVER.items()]
    yield f"Weaver's highest rate is {', '.join(over)}"
    yield f"simulated, {setting()}; {seeds} seeds"
    yield from judged(results, seeds)


def curves(
    seeds: int = SEEDS, *, out: Path = RESULTS, workers: int | None = None, teller: Teller | None = None
) -> Iterator[Point]:
    """Yield the points of the figures; a line ends at the highest rate that is still served."""
    every = list(shown())
    results = ran((point.run for point in every), seeds, out / "weaver", workers=workers, teller=teller)
    for point in every:
        given = [results[point.run, seed] for seed in range(seeds)]
        if point.x and min(x.held for x in given) < HELD:
            continue  # beyond the knee latencies measure the run time
        yield from (Point(point.panel, point.series, point.x, s, getattr(x, point.field)) for s, x in enumerate(given))


def main(out: Path, results: Path = RESULTS) -> None:
    """Write the claims, and the points of the figures, as tables below `out`."""
    rows = ((v.claim.subject, section, paper_text(v.claim), v.text, v.says, reason(v))
            for section, v, _ in lines(SEEDS, results / "weaver"))  # fmt: skip
    _write(out / "weaver-claims.csv", ("claim", "section", "paper", "here", "verdict", "why"), rows)
    _write(out / "weaver.csv", Point._fields, curves(out=results))


def _write(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, whole or not at all."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows((head, *rows))
    record.write_bytes(path, text.getvalue().encode())


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    try:
        main(**vars(parser.parse_args()))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
