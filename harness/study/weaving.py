"""Weaver's figures 4 to 7: rates, TPOT, batches and KV of a hot and a cold model, beside what the paper says.

`python -m harness.study.weaving` prints a line a claim (`weaving.toml`), with its verdict; `-o` writes them, and
the points of the figures, which plots/fig_weaver.py draws.

As section 5: two Llama-3-8B, lengths of Azure-Conv without sequences beyond 2,048 tokens (TRACES_DIR, azure2023/),
Poisson arrivals, the cold model at 1 req/s, vLLM 0.6 (`vllm-0.6`), decode GPUs alone are shared. Beside Weaver and
dedicated serving (`weaver:off`) each model has a prefill GPU. MuxServe has both models on both decode GPUs (TP2) and
prefills there, and so has what it is compared with (`prefill=beside`).

Prefill kernels take a tenth of their time in all of these runs: 22 req/s of 749 tokens are 264 TFLOP/s, more than one
A100 prefills, so prefill was not what bound the paper's runs, and its times to the first token are left out there too.
A highest rate is what is finished a second when 30 are offered.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.engines import sim
from harness.engines.costs import coefficients, quantities
from harness.engines.machine import Config, Machine, Served, cluster, machine
from harness.loop import system
from harness.loop.replay import replay
from harness.policy.actions import Action, Wake
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Gpus, Inst, Jobs, Plan, UserError
from harness.policy.view import View
from harness.rows import record
from harness.rows.estimate import NONE
from harness.rows.statistics import interval
from harness.run import sources
from harness.run.spec import Spec, digest
from harness.run.teller import Silent, Teller
from harness.study.claims import Verdict, by_number, paper_text
from harness.study.study import Claim
from workloads.models import shape

PAPER = "Weaver, USENIX ATC 2025"
CLAIMS = Path(__file__).with_name("weaving.toml")
LENGTHS = "azure2023/AzureLLMInferenceTrace_conv.csv"
MODEL, HOST, MOST_TOKENS = "llama-3.1-8b", "vllm-0.6", 2048
WARM_S, SPAN_S, LOOK_S = 50.0, 150.0, 1.0
PREFILL = 0.1  # of a prefill kernel's time: see above
SEEDS = 3
HIGH_RPS = 30.0  # offered where a highest rate is measured
RATIOS = (0.05, 0.15, 0.25, 0.35, 0.4, 0.45, 0.5, 0.6)  # figure 5b
OFF: Mapping[str, Any] = {"ratio": 0.0}


@dataclass(frozen=True)
class Setting:
    """A run: a system on a platform under a load."""

    system: str = "weaver"
    fields: tuple[tuple[str, Any], ...] = ()
    rps: float = 15.0  # of the hot model
    gpu: str = "a100-40g"
    gpus: int = 4
    tp: int = 1
    fixed: tuple[int, int] | None = None  # tokens of each request; None: Azure-Conv's


class Measured(NamedTuple):
    """What a run gave; of requests that came and ended between the warm-up and 20 s before the end."""

    hot_ms: float  # mean TPOT
    cold_ms: float
    cold_p99_ms: float
    done_rps: float  # of the hot model, finished
    batch: float  # of the hot model's decode steps
    kv_hot: float  # of KV memory in use where the hot model decodes, and where the cold one does
    kv_cold: float


@dataclass
class Watched:
    """A system whose KV memory and batch are looked at each second."""

    inner: Any
    place: Gpus  # where the hot model decodes
    seen: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hears, self.options = self.inner.hears | {Woke}, self.inner.options
        self.uses = self.inner.uses | {"Wake"}

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """The system's own answer, or a look."""
        if event == Woke("look"):
            kv = [sum(view.kv(m, g).used_bytes for m in ("cold", "hot")) for g in (0, 1)]
            state = view.batch(Batch(Inst("hot", self.place)))
            self.seen.append((view.now_s, state.steps, state.seq_steps, *kv))
            yield Wake(view.now_s + LOOK_S, "look")
            return
        yield from self.inner.on(event, view)
        if event == Woke("start"):
            yield Wake(WARM_S, "look")


@cache
def lengths() -> NDArray[np.int32]:
    """Prompt and output tokens of Azure-Conv's requests of at most 2,048 tokens."""
    folder = os.environ.get("TRACES_DIR", "")
    path = Path(folder) / LENGTHS
    if not path.is_file():
        raise UserError(f"no file {LENGTHS} in TRACES_DIR ({folder or 'not set'}); see traces/manifest.toml")
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return np.array([row for row in rows if min(row) > 0 and sum(row) <= MOST_TOKENS], np.int32)


def jobs(s: Setting, seed: int) -> Jobs:
    """Poisson arrivals of both models."""
    rng = np.random.default_rng(seed)
    times = [np.sort(rng.uniform(0, SPAN_S, rng.poisson(rate * SPAN_S))) for rate in (1.0, s.rps)]
    arrival_s, model = np.concatenate(times), np.repeat([0, 1], [len(t) for t in times])
    order, n = np.argsort(arrival_s, kind="stable"), len(arrival_s)
    drawn = lengths()[rng.integers(0, len(lengths()), n)] if s.fixed is None else np.tile(s.fixed, (n, 1))
    never, prompt, output = np.full(n, math.inf), *(drawn[:, k].astype(np.int32) for k in (0, 1))
    return Jobs(("cold", "hot"), arrival_s[order], model[order].astype(np.int32), prompt, output, never, never)


def priced(s: Setting, config: Config) -> Machine:
    """The platform, whose prefills are not what binds."""
    found = machine(config)
    host = found.host._replace(scale_prefill=PREFILL * found.host.scale_prefill)
    rows = [(m.shape, m.tp) for m in config.models]
    tables = coefficients.coefficients(rows, quantities.quantities(s.gpu), found.spec, host)
    return found._replace(host=host, tables=tables)


@cache
def ran(s: Setting, seed: int) -> Measured:
    """Run a setting once."""
    its = shape(MODEL)._replace(max_tokens=MOST_TOKENS)
    plan = {"cold": Plan(1.0, 750, 230, "the load"), "hot": Plan(s.rps, 750, 230, "the load")}
    config = Config(
        tuple(Served(m, its, s.tp) for m in plan), gpu=s.gpu, gpus=s.gpus, host=HOST, plan=plan, seed=seed,
        noise=quantities.noise(s.gpu, HOST),
    )  # fmt: skip
    costs, load, make = priced(s, config), jobs(s, seed), system.find(s.system)
    named: dict[str, Any] = dict(s.fields)
    engine = sim.make(config, make(cluster(config, priced=costs), **named).options, costs)
    watched = Watched(make(engine.cluster, **named), tuple(range(s.tp)))
    replay(watched, engine, load, end_s=SPAN_S)
    rows = pa.Table.from_batches(engine.rows())
    stamps_s = {x: np.array(rows[f"{x}_ns"].to_pylist(), np.float64) / 1e9 for x in ("arrival", "first", "done")}
    arrival, first, done = stamps_s.values()
    tpot_ms = (done - first) / np.maximum(load.output_tokens - 1, 1) * 1e3
    ended = np.array(rows["state"].to_pylist()) == "done"
    whole = (arrival > WARM_S) & (arrival < SPAN_S - 20) & ended & (load.output_tokens > 1)
    hot, cold = tpot_ms[whole & (load.model == 1)], tpot_ms[whole & (load.model == 0)]
    seen = np.array(watched.seen)
    steps, tokens = seen[-1, 1:3] - seen[0, 1:3]
    room = [engine.cluster.gpus[g].mem_bytes - engine.cluster.models["hot"].weight_bytes for g in (0, 1)]
    return Measured(
        mean(hot), mean(cold), float(np.percentile(cold, 99)) if len(cold) else math.nan,
        float((ended & (done > WARM_S) & (load.model == 1)).sum() / (SPAN_S - WARM_S)), float(tokens / max(1.0, steps)),
        *(float(seen[:, 3 + g].mean() / room[g]) for g in (0, 1)),
    )  # fmt: skip


def mean(x: NDArray[np.float64]) -> float:
    """A mean; of nothing, none."""
    return float(x.mean()) if len(x) else math.nan


# ------------------------------------------------------------------ what the claims are about


def weaver(rps: float, seed: int, **fields: Any) -> Measured:
    """Weaver on two decode GPUs and two that prefill."""
    return ran(Setting(fields=tuple(sorted(fields.items())), rps=rps), seed)


def beside(rps: float, seed: int, **over: Any) -> Measured:
    """Weaver on the two GPUs that MuxServe has."""
    return ran(replace(Setting(fields=(("prefill", "beside"),), rps=rps, gpus=2), **over), seed)


def muxserve(rps: float, seed: int, sharing: str = "fluid", **over: Any) -> Measured:
    """MuxServe with both models on both GPUs; blocks of KV that both share, as Weaver's, and no quotas."""
    named = (("kv", "paged"), ("quotas", "none"), ("sharing", sharing))
    return ran(replace(Setting("muxserve", named, rps=rps, gpus=2, tp=2), **over), seed)


def tp2_loss(batch: int, gpu: str = "a100-40g") -> float:
    """Part of what two instances decode a second that one with TP2 does not, each at this batch (1,024 + 64 tokens)."""
    config = Config((Served("m", shape(MODEL), 1, degrees=(2,)),), gpu=gpu, gpus=2, host=HOST)
    profile = cluster(config).profile
    one, both = (profile.step_s(Inst("m", place), batch, batch * 1088) for place in ((0,), (0, 1)))
    return 1 - one / both / 2


def best_ratio(seed: int) -> float:
    """The ratio of the least TPOT at 15 req/s."""
    return min(RATIOS, key=lambda ratio: weaver(15.0, seed, ratio=ratio).hot_ms)


LONG = (512, 1024)
MEASURES: Mapping[str, Callable[[int], float]] = {
    "tp2_loss_16": lambda _: tp2_loss(16),
    "tp2_loss_128": lambda _: tp2_loss(128),
    "dedicated_rps": lambda seed: weaver(HIGH_RPS, seed, **OFF).done_rps,
    "weaver_rps": lambda seed: weaver(HIGH_RPS, seed).done_rps,
    "gain_dedicated": lambda seed: weaver(HIGH_RPS, seed).done_rps / weaver(HIGH_RPS, seed, **OFF).done_rps,
    "dedicated_batch": lambda seed: weaver(15.0, seed, **OFF).batch,
    "dedicated_kv": lambda seed: weaver(15.0, seed, **OFF).kv_hot,
    "weaver_kv_hot": lambda seed: weaver(15.0, seed).kv_hot,
    "weaver_kv_cold": lambda seed: weaver(15.0, seed).kv_cold,
    "weaver_batch": lambda seed: weaver(HIGH_RPS, seed).batch,
    "tpot_knee": lambda seed: weaver(13.0, seed).hot_ms / weaver(13.0, seed, **OFF).hot_ms,
    "tpot_low": lambda seed: weaver(2.0, seed).hot_ms / weaver(2.0, seed, **OFF).hot_ms,
    "cold_low": lambda seed: weaver(2.0, seed).cold_ms / weaver(2.0, seed, **OFF).cold_ms,
    "cold_high_ms": lambda seed: weaver(15.0, seed).cold_ms - weaver(15.0, seed, **OFF).cold_ms,
    "cold_p99_ms": lambda seed: weaver(15.0, seed).cold_p99_ms,
    "gain_muxserve": lambda seed: beside(HIGH_RPS, seed).done_rps / muxserve(HIGH_RPS, seed).done_rps,
    "gain_temporal": lambda seed: beside(HIGH_RPS, seed).done_rps / muxserve(HIGH_RPS, seed, "turns").done_rps,
    "gain_temporal_l40s": lambda seed: (
        beside(HIGH_RPS, seed, gpu="l40s").done_rps / muxserve(HIGH_RPS, seed, "turns", gpu="l40s").done_rps
    ),
    "tpot_muxserve": lambda seed: beside(10.0, seed).hot_ms / muxserve(10.0, seed).hot_ms,
    "tpot_temporal": lambda seed: beside(10.0, seed).hot_ms / muxserve(10.0, seed, "turns").hot_ms,
    "best_ratio": best_ratio,
    "cold_half_ms": lambda seed: weaver(15.0, seed, ratio=0.5).cold_ms - weaver(15.0, seed, **OFF).cold_ms,
    "gain_long": lambda seed: (
        beside(HIGH_RPS, seed, fixed=LONG).done_rps / muxserve(HIGH_RPS, seed, fixed=LONG).done_rps
    ),
    "cpu_ms": lambda seed: weaver(5.0, seed, control="cpu", split=False).hot_ms,
    "gpu_gain": lambda seed: (
        weaver(5.0, seed, control="cpu", split=False).hot_ms / weaver(5.0, seed, split=False).hot_ms
    ),
    "split_gain": lambda seed: weaver(5.0, seed).hot_ms / weaver(5.0, seed, split=False).hot_ms,
    "splits_ms": lambda seed: weaver(5.0, seed).cold_ms - weaver(5.0, seed, split=False).cold_ms,
    "polls_ms": lambda seed: weaver(0.5, seed, split=False).cold_ms - weaver(0.5, seed, **OFF).cold_ms,
}


# ------------------------------------------------------------------ what the figures show

RATES = (2.0, 5.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0)


class Point(NamedTuple):
    """A point of a figure."""

    panel: str
    series: str
    x: float  # requests a second, or the share that is offloaded; 0 where the panel has bars
    seed: int
    value: float  # TPOT in ms, or requests a second


def curves(seeds: int = SEEDS) -> Iterator[Point]:
    """Figures 4 to 7, as far as one trace and one platform show them."""
    for seed in range(seeds):
        for rps in RATES:
            for name, fields in (("Weaver", {}), ("dedicated", OFF)):
                one = weaver(rps, seed, **fields)
                yield Point("hot", name, rps, seed, one.hot_ms)
                yield Point("cold", name, rps, seed, one.cold_ms)
            yield Point("muxserve", "Weaver", rps, seed, beside(rps, seed).hot_ms)
            yield Point("muxserve", "MuxServe", rps, seed, muxserve(rps, seed).hot_ms)
            yield Point("muxserve", "MuxServe-Temporal", rps, seed, muxserve(rps, seed, "turns").hot_ms)
        for ratio in RATIOS:
            one = weaver(15.0, seed, ratio=ratio)
            yield Point("share", "hot model", ratio, seed, one.hot_ms)
            yield Point("share", "cold model", ratio, seed, one.cold_ms)
        for name, done in HIGHEST.items():
            yield Point("highest", name, 0.0, seed, done(seed).done_rps)
        for name, fields in CONTROLS.items():
            yield Point("control", name, 0.0, seed, weaver(5.0, seed, **fields).hot_ms)


HIGHEST: Mapping[str, Callable[[int], Measured]] = {
    "dedicated": lambda seed: weaver(HIGH_RPS, seed, **OFF),
    "Weaver": lambda seed: weaver(HIGH_RPS, seed),
    "Weaver, 2 GPUs": lambda seed: beside(HIGH_RPS, seed),
    "MuxServe": lambda seed: muxserve(HIGH_RPS, seed),
    "MuxServe-Temporal": lambda seed: muxserve(HIGH_RPS, seed, "turns"),
    "Weaver, long outputs": lambda seed: beside(HIGH_RPS, seed, fixed=LONG),
    "MuxServe, long outputs": lambda seed: muxserve(HIGH_RPS, seed, fixed=LONG),
}
CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "CPU": {"control": "cpu", "split": False},
    "GPU": {"split": False},
    "GPU, split": {},
}


class Line(NamedTuple):
    """A claim beside what came out, and the section that makes it."""

    section: str
    verdict: Verdict


def lines(seeds: int = SEEDS, *, out: Path | None = None, teller: Teller | None = None) -> Iterator[Line]:
    """Every claim with its verdict; with `out` what is measured is kept there."""
    stated = tomllib.loads(CLAIMS.read_text("utf-8"))["claim"]
    names = [claim["measure"] for claim in stated if "measure" in claim]
    values = measured(names, seeds, teller or Silent()) if out is None else kept(names, seeds, out, teller or Silent())
    for one in stated:
        paper = tuple(one["paper"]) if isinstance(one["paper"], list) else one["paper"]
        rest = {key: one[key] for key in ("bound", "even", "input", "why", "name", "evidence") if key in one}
        claim = Claim("measure", "weaver", subject=one["says"], paper=paper, **rest)
        if "lacks" in one:
            yield Line(one["section"], Verdict(claim, None, None, NONE, "not testable", NONE, f"lacks {one['lacks']}"))
            continue
        yield Line(one["section"], by_number(claim, None, interval(values[one["measure"]])))


def measured(names: Iterable[str], seeds: int, teller: Teller) -> dict[str, list[float]]:
    """What measures give, by seed."""
    found, asked = dict[str, list[float]](), list(dict.fromkeys(names))
    for k, name in enumerate(asked):
        teller.progress("measures", k, len(asked))
        found[name] = [MEASURES[name](seed) for seed in range(seeds)]
    teller.progress("measures", len(asked), len(asked))
    return found


def kept(names: Sequence[str], seeds: int, out: Path, teller: Teller) -> dict[str, list[float]]:
    """The same as stored in `out`; measured anew only where a source or the lengths changed."""
    code = [sources.code(Spec(name)) for name in ("weaver", "muxserve")]
    key = digest(record.dumps([code, sources.scoring(__file__), seeds, sorted(names), lengths().tolist()]))
    path = out / f"weaving-{key}" / "measures.json"
    with suppress(OSError, ValueError):  # whatever stands there, it is made anew
        found: dict[str, list[float]] = json.loads(path.read_text("utf-8"))
        return found
    found = measured(names, seeds, teller)
    record.write_bytes(path, record.dumps(found).encode())
    return found


def main(out: Path | None = None) -> None:
    """Print the claims; write them, and the points of the figures, as tables."""
    every = list(lines())
    for section, v in every:
        paper, why = paper_text(v.claim), v.note or v.claim.why
        print(f"{v.says:12} {paper:>12}  here {v.text:24} {v.claim.subject} ({section})")
        if why:
            print(f"{'':12} {why}")
    if out is not None:
        rows = ((v.claim.subject, section, paper_text(v.claim), v.text, v.says,
                 v.note or v.claim.why) for section, v in every)  # fmt: skip
        _write(out / "weaver-claims.csv", ("claim", "section", "paper", "here", "verdict", "why"), rows)
        _write(out / "weaver.csv", Point._fields, curves())


def _write(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, whole or not at all."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows((head, *rows))
    record.write_bytes(path, text.getvalue().encode())


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    try:
        main(parser.parse_args().out)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
