"""PagedAttention's figures 2, 12, 13 and 15: KV memory that holds tokens, batches, rates and shared blocks.

`bench study pagedattention` prints a line a claim (`paging.toml`) and law of lengths, the paper's number beside the
result, with its verdict. Runs are those of any sweep, kept in `results/pagedattention`.

The setting is section 6.1's: OPT-13B, 66B and 175B on the cards of table 1, with its KV slots beside the weights; no
sequence is longer than 2,048 tokens; Poisson arrivals; whole prompts, at most 2,560 tokens of them in a step, as
vLLM 0.1 had it. Steps cost what they do on vLLM 0.6 (`vllm-0.6`), the earliest whose host costs were fitted.

The paper gives the mean lengths of ShareGPT and Alpaca, and no table of requests. Lengths are drawn from two laws of
these means, geometric and lognormal, prompts and outputs apart; each claim has a line for either, and what differs
between them is what the means leave open.

A highest rate is the number of requests finished a second when more are offered than any policy serves. Memory is
looked at in the same runs, as full memory is what figure 2 divides. Batches are those at the rates of figure 13.

Blocks that samples and beams share (section 6.3) depend on lengths alone, so no run is made for them (`sharing.py`).
The text has a range for each, over 2, 4 and 6 sequences; its ends are taken for those of 2 and of 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import power_above
from harness.rows import record, requests
from harness.run import sweep
from harness.run.spec import Spec
from harness.run.teller import Silent, Teller
from harness.study import sharing
from harness.study.claims import Line, Part, by_measures, stated
from traces import schema
from workloads.lengths import LAWS, lengths
from workloads.models import shape

PAPER = "PagedAttention, SOSP 2023"
CLAIMS = Path(__file__).with_name("paging.toml")
HOST, LONGEST, PROMPT_TOKENS = "vllm-0.6", 2048, 2560
WARM_S, WINDOW_S = 60.0, 240.0
SEEDS = 6
SHARING = 64  # requests whose blocks are counted, a seed


class Server(NamedTuple):
    """A row of table 1."""

    gpu: str
    gpus: int
    slots: int  # of KV


class Data(NamedTuple):
    """Rates of a data set."""

    rps: float  # of figure 13
    most_rps: float  # more than any policy serves: ours


SERVERS = {
    "opt-13b": Server("a100-40g", 1, 15_700),
    "opt-66b": Server("a100-40g", 4, 9_700),
    "opt-175b": Server("a100-80g", 8, 60_100),
}
DATA = {"sharegpt": Data(2.0, 10.0), "alpaca": Data(30.0, 100.0)}


@dataclass(frozen=True)
class Run:
    """A policy under a load of one law."""

    policy: str  # a preset of `contiguous`, or "paged"
    model: str = "opt-13b"
    data: str = "sharegpt"
    rps: float = 10.0

    def spec(self, law: str, seed: int, out: Path) -> Spec:
        """Return the run as a spec; its requests are written below `out`."""
        server, of = SERVERS[self.model], shape(self.model)
        kv_bytes = server.slots * kv_token_bytes(of, server.gpus)
        paged = self.policy == "paged"
        return Spec(
            "contiguous", None if paged else self.policy, (("kv", "paged"),) if paged else (),
            gpu=server.gpu, gpus=server.gpus, host=HOST, models=f"{self.model}:tp={server.gpus}", served=LONGEST,
            trace=str(written(self.data, law, self.rps, seed, out)), scaling="none", plan="trace", seed=seed,
            window_s=WINDOW_S, warmup_s=WARM_S, drain_s=0.0, slo="", chunk_tokens=0, prefill_tokens=PROMPT_TOKENS,
            batch_cap=256, mem_fraction=0.9, admission="prompt",
            pool_bytes=weight_bytes(of, server.gpus) + kv_bytes,
        )  # fmt: skip


class Measured(NamedTuple):
    """The results of a run: means over the window, shares of KV memory."""

    done_rps: float
    batch: float  # requests with KV at a time
    tokens: float  # KV of tokens that are there
    ahead: float  # reserved for tokens that will be there
    over: float  # reserved for tokens that never come
    rest: float  # all else: between chunks, above what was asked of them, free


# ------------------------------------------------------------------ a run


@cache
def written(data: str, law: str, rps: float, seed: int, out: Path) -> Path:
    """Write Poisson arrivals as a trace of warm-up and window; returns its path."""
    rng = np.random.default_rng(seed)
    n = int(rng.poisson(rps * WINDOW_S))
    drawn = lengths(data, law, n, rng, longest=LONGEST)
    arrival_s = np.sort(rng.uniform(0, WINDOW_S, n))
    path, note = out / f"{data}-{law}-{rps:g}-{seed}.parquet", f"Poisson arrivals, {law} lengths of {data}'s means"
    return schema.drawn(path, arrival_s, ["m"] * n, drawn, span_s=WINDOW_S, note=note)


def measured(run: Run, folder: Path) -> Measured:
    """Measure a run by its rows alone, from each request's first token to its end or the window's.

    Tokens between the two are taken to come evenly; what a request waits for KV after its first token, it has none.
    """
    rows, slots = requests.rows(record.read(folder)), SERVERS[run.model].slots
    done_s = rows.arrival_s + rows.e2e_s
    first, last = rows.arrival_s + rows.ttft_s, np.where(rows.done, done_s, WINDOW_S)
    in_ = (last > np.maximum(first, 0.0)) & (rows.made_tokens > 0)
    first, last = first[in_], last[in_]
    prompt, output, made = (x[in_].astype(np.int64) for x in (rows.prompt_tokens, rows.output_tokens, rows.made_tokens))
    waited = (rows.waits_s - rows.ttft_waits_s)[in_, record.WAITS.index("kv")]
    begin, span = np.maximum(first, 0.0), last - first
    part = (last - begin) * (1 - waited / span) / WINDOW_S  # of the window, with KV
    mean = prompt + 1 + (made - 1) * ((begin + last) / 2 - first) / span  # tokens in that time
    longest = np.full_like(prompt, LONGEST)
    chunks = {"max": longest, "fastertransformer": longest, "oracle": prompt + output,
              "pow2": prompt + power_above(output)}  # fmt: skip
    reserved = chunks.get(run.policy)
    tokens = float(part @ mean) / slots
    ahead = 0.0 if reserved is None else float(part @ (prompt + output - mean)) / slots
    over = 0.0 if reserved is None else float(part @ (reserved - prompt - output)) / slots
    return Measured(
        done_rps=float((rows.done & (done_s >= 0)).sum() / WINDOW_S),
        batch=float(part.sum()),
        tokens=tokens,
        ahead=ahead,
        over=over,
        rest=1 - tokens - ahead - over,
    )


# ------------------------------------------------------------------ measures of the claims


class Measure(NamedTuple):
    """A number of some runs with one seed."""

    runs: tuple[Run, ...]
    value: Callable[..., float]  # of their results, in order


def share(policy: str, part: str) -> Measure:
    """Return a share of KV memory under more load than is served as a measure."""
    return Measure((Run(policy),), lambda a: getattr(a, part))


def batch(policy: str, data: str) -> Measure:
    """Return the requests batched at the rate of figure 13 as a measure."""
    return Measure((Run(policy, data=data, rps=DATA[data].rps),), lambda a: a.batch)


def batches(policy: str) -> Measure:
    """Return how many times as many requests paged KV batches at that rate as a measure (ShareGPT)."""
    runs = (Run("paged", rps=DATA["sharegpt"].rps), Run(policy, rps=DATA["sharegpt"].rps))
    return Measure(runs, lambda a, b: a.batch / b.batch)


def gain(policy: str, model: str) -> Measure:
    """Return paged KV's highest rate over a policy's as a measure (ShareGPT)."""
    return Measure((Run("paged", model), Run(policy, model)), lambda a, b: a.done_rps / b.done_rps)


PARTS = {"max": ("tokens", "ahead", "over", "rest"), "pow2": ("tokens", "ahead", "over", "rest"),
         "oracle": ("tokens", "ahead", "rest"), "paged": ("tokens",)}  # fmt: skip
MEASURES: Mapping[str, Measure] = {
    **{f"{part}_{policy}": share(policy, part) for policy, parts in PARTS.items() for part in parts},
    **{f"batch_{policy}_{data}": batch(policy, data) for policy in ("max", "oracle", "paged") for data in DATA},
    **{f"batches_{policy}": batches(policy) for policy in ("oracle", "max")},
    **{f"gain_{policy}_{model}": gain(policy, model)
       for policy in ("oracle", "max", "fastertransformer") for model in SERVERS},
}  # fmt: skip


class Shared(NamedTuple):
    """The share of blocks that are saved where each request has several sequences, with one seed."""

    data: str
    sequences: int
    beams: bool

    def value(self, law: str, seed: int) -> float:
        """Count the blocks of `SHARING` requests; returns the saved ones over all that there would be."""
        rng = np.random.default_rng(seed)
        return sharing.saved(
            lengths(self.data, law, SHARING, rng, longest=LONGEST), self.sequences, rng if self.beams else None
        )


SHARED: Mapping[str, Shared] = {
    f"{'beams' if beams else 'samples'}_{n}_{data}": Shared(data, n, beams)
    for beams in (False, True) for n in (2, 6) for data in DATA
}  # fmt: skip


# ------------------------------------------------------------------ all of it


def ran(
    runs: Iterable[Run], seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> Mapping[tuple[Run, str, int], Measured]:
    """Run those that are not stored in `out`, with each law and seed; return each run's results."""
    keys = [(run, law, seed) for run in dict.fromkeys(runs) for law in LAWS for seed in range(seeds)]
    specs = [run.spec(law, seed, out) for run, law, seed in keys]
    folders = sweep.sweep(specs, out, workers=workers, teller=teller or Silent(), what="pagedattention")
    return {key: measured(key[0], folder) for key, folder in zip(keys, folders, strict=True)}


def needed() -> list[Run]:
    """List the runs that the claims need, once each."""
    measures = [claim["measure"] for claim in stated(CLAIMS) if "measure" in claim]
    return list(dict.fromkeys(chain.from_iterable(MEASURES[name].runs for name in measures if name in MEASURES)))


def inputs() -> Sequence[Path]:
    """List the files outside of the repository that the answer rests on: none."""
    return ()


def count(seeds: int) -> int:
    """Count the runs of the claims."""
    return len(needed()) * len(LAWS) * seeds


def specs(seeds: int, out: Path) -> Iterator[Spec]:
    """Yield the specs of all runs that the claims need; their traces are written below `out`."""
    return (run.spec(law, seed, out) for run in needed() for law in LAWS for seed in range(seeds))


def setting() -> str:
    """Describe models, GPUs and lengths of all runs."""
    return f"OPT-13B, 66B and 175B on the cards of table 1, lengths of ShareGPT's and Alpaca's means, {HOST}"


def lines(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Line]:
    """Yield every claim with its verdict under each law; runs are kept in `out`."""
    results = ran(needed(), seeds, out, workers=workers, teller=teller)

    def measured_by_law(name: str) -> Iterator[tuple[str, list[float]]]:
        for law in LAWS:
            if name in SHARED:
                yield law, [SHARED[name].value(law, seed) for seed in range(seeds)]
                continue
            measure = MEASURES[name]
            yield law, [measure.value(*(results[run, law, seed] for run in measure.runs)) for seed in range(seeds)]

    return by_measures(CLAIMS, "contiguous", measured_by_law)


def parts(seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[Part]:
    """Yield the answer: who serves how much, then a line for each claim and law."""
    every = list(lines(seeds, out, workers=workers, teller=teller))
    yield answer(every)
    yield f"simulated, {HOST}; lengths of two laws of the paper's means; {seeds} seeds"
    yield from every


def answer(every: Iterable[Line]) -> str:
    """Say how many times the requests of Orca's versions paged KV serves, over models and laws."""
    means: dict[str, list[float]] = {}
    for line in every:
        here, subject = line.verdict.here, line.verdict.claim.subject
        for name in ("Orca (Oracle)", "Orca (Max)", "FasterTransformer"):
            if here is not None and f"rate over {name}" in subject and math.isfinite(here.mean):
                means.setdefault(name, []).append(here.mean)
    told = ", ".join(f"{min(x):.1f} to {max(x):.1f} times {name}'s" for name, x in means.items())
    return f"paged KV serves {told} highest rate (ShareGPT's means)"
