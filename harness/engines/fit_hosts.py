"""Fit host profiles on public end-to-end runs: `MEASURED_DIR=... python -m harness.engines.fit_hosts`.

It writes them to `hosts.toml`. Each measured row is replayed under its own conditions by `replay`, a plain loop over
the steps of one engine with one model. Prices come from `cost.step_s`, so kernels are those of the tables, and only
what an engine adds to them is fitted. Nothing is random but Poisson arrivals, whose seed is fixed.

Two errors stand beside the constants: `fit` on the rows that they were fitted on, and `held`, in which each row is
predicted by a fit without its run (Poisson), its prompt and output length (closed loop), or its model and batch size
(offline). The rows state no sampling flags. Inference-perf, the client of the Poisson runs, sends none, so vLLM takes
the checkpoint's own; the same is assumed of the closed loops.
"""

from __future__ import annotations

import heapq
import math
import os
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness import shapes
from harness.engines import cost
from harness.engines.fit import dumps
from harness.types import GIB, Shape, UserError

F8 = NDArray[np.float64]

FITTED_ON = "2026-11-22"
GPU = "h100"  # of every row
CARD_BYTES = 79.2 * GIB  # what an H100-80G offers
OTHER_BYTES = 2.5 * GIB  # of an engine's process beside weights and KV
POISSON_SPAN_S = 300.0
POISSON = "sim-to-real-accuracy-validation dcec3fd, its training rows (Apache-2.0)"
CLOSED = "aiconfigurator 095f58a silicon_sample.csv, Qwen3-32B TP2 (Apache-2.0)"
OFFLINE = "LLM-Inference-Bench 4211f5d All_results.csv (BSD-3-Clause)"
# Dimensions: each checkpoint's config.json. The last column: whether its generation_config.json sets top-p or top-k.
SHAPES = {
    "llama-2-7b": Shape("Llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, True, False, 4096, True),
    "llama-3-70b": Shape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, True, False, 131072, True),
    "nemo-12b": Shape("Mistral-Nemo-12B", 40, 5120, 32, 8, 128, 14336, 131072, True, False, 131072, False),
    "qwen-2.5-7b": Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, True, False, 32768, True),
    "yi-34b": Shape("Yi-34B", 60, 7168, 56, 8, 128, 20480, 64000, True, False, 4096, False),
    "Qwen/Qwen3-32B": Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, True, False, 40960, True),
    "mistralai/Mistral-7B-v0.1": Shape("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, True, False, 32768, False),
}
SHAPES["meta-llama/Llama-2-7b-hf"] = SHAPES["llama-2-7b"]
# A token's way out is a published fit (BLIS, H100); the rows show only its sum with the way in.
API_OUT_S = 0.0008
SORT = "sorting in PyTorch (vllm PR 40376: 1.07 and 2.40 ms for 64 and 128 rows of 131,072, its GPU not stated)"
SAMPLE_S = 1.36e-10  # the mean of these two, a row and entry


class Served(NamedTuple):
    """How a run was loaded and how its engine forms steps."""

    prompt: int
    output: int
    arrival_s: F8 | None = None  # open loop; None: `clients` in a closed loop, all of whom start at 0
    clients: int = 0
    rounds: int = 4  # requests a client
    cached: int = 0  # tokens of each prompt that are found in the prefix cache
    step_tokens: int = 8192
    seqs: int = 256
    prefill_first: bool = False  # prompts stop the decodes; else a step holds both


class Times(NamedTuple):
    """Means over all requests, seconds."""

    ttft: float
    tpot: float
    e2e: float


def replay(run: Served, row: cost.Row, host: cost.HostProfile) -> Times:
    """Serve a run step by step. Memory never runs short: rows for which it does are not fitted."""
    open_loop = run.arrival_s is not None
    begin = list(run.arrival_s) if run.arrival_s is not None else [0.0] * run.clients
    came = [(t + host.api_in_s, t) for t in begin]  # (in the engine, at the client); a heap in order of time
    rest = 0 if open_loop else (run.rounds - 1) * run.clients
    waiting: deque[tuple[int, float, int]] = deque()  # joins after that many steps, came at, tokens still to compute
    running: list[tuple[int, float, float]] = []  # heap: last decode tick, came at, first token
    now, ended, ticks, ctx = 0.0, 0, 0, 0
    ttft: list[float] = []
    e2e: list[float] = []
    new = run.prompt - run.cached
    while came or waiting or running:
        if not waiting and not running:
            now = max(now, came[0][0])
        idle = not waiting and not running
        while came and came[0][0] <= now:
            t = heapq.heappop(came)[1]
            waiting.append((0 if idle else ended + host.lookahead_steps, t, new))
        B, left, pieces = len(running), run.step_tokens, list[tuple[float, int, int]]()
        if not run.prefill_first:
            left -= B
        may = ended if running or (waiting and waiting[0][0] <= ended) else math.inf
        while waiting and waiting[0][0] <= may and left > 0 and B + len(pieces) < run.seqs:
            joins, t, todo = waiting.popleft()
            c = min(todo, left)
            left -= c
            pieces.append((t, run.prompt - todo, c))
            if c < todo:
                waiting.appendleft((joins, t, todo - c))
        if run.prefill_first and pieces:
            B = 0
        C = ctx if B else 0
        steps = 1
        if not pieces:
            if not waiting:
                steps = running[0][0] - ticks
            one = cost.step_s(row, B=B, C=C)
            if steps > 1 and came:
                steps = max(1, min(steps, math.ceil((came[0][0] - now) / one)))
            now += steps * cost.step_s(row, B=B, C=C + B * (steps - 1) / 2)
        else:
            p = sum(c for _, _, c in pieces)
            area = sum(c * (s + c / 2) for _, s, c in pieces)
            out = B + sum(s + c == run.prompt for _, s, c in pieces)
            now += cost.step_s(row, B=B, C=C, p=p, n=len(pieces), area=area, out=out)
        ended += steps
        if B:
            ticks += steps
            ctx += B * steps
        for t, s, c in pieces:
            if s + c == run.prompt:
                ttft.append(now + host.api_out_s - t)
                heapq.heappush(running, (ticks + run.output - 1, t, now))
                ctx += run.prompt + 1
        while running and running[0][0] <= ticks:
            _, t, _ = heapq.heappop(running)
            ctx -= run.prompt + run.output
            e2e.append(now + host.api_out_s - t)
            if rest > 0:
                rest -= 1
                at = now + host.api_out_s
                heapq.heappush(came, (at + host.api_in_s, at))
    first, whole = float(np.mean(ttft)), float(np.mean(e2e))
    return Times(first, (whole - first) / max(1, run.output - 1), whole)


# ---------------------------------------------------------------------------------------------------- measured rows


class Case(NamedTuple):
    """A measured row: what ran, what was measured (nan: not stated), and what a fit may leave out with it."""

    shape: Shape
    tp: int
    run: Served
    measured: Times
    groups: tuple[str, ...]
    fits: bool = True  # nothing but its engine's host decides it


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a file of single-model runs from `MEASURED_DIR`."""
    path = Path(os.environ.get("MEASURED_DIR", "")) / "single" / name
    if not path.is_file():
        raise UserError(f"{path} is not there; set MEASURED_DIR to the folder of public end-to-end measurements")
    return cast("list[dict[str, Any]]", pd.read_csv(path).to_dict("records"))


def poisson() -> Iterator[Case]:
    """Stages of vLLM 0.15 under Poisson load, whose few prompts repeat: all of one but its last block is cached."""
    for r in measured("vllm015_poisson.csv"):
        if r["stage"] < 0:  # the whole run
            continue
        shape, prompt = SHAPES[r["model"]], r["system_tokens"] + r["question_tokens"]
        rate = float(r["stage_rates_s"].split(";")[r["stage"]].split("x")[0])
        arrival_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate, int(rate * POISSON_SPAN_S)))
        # A prefix cache that turns over before a prompt comes again keeps only what all prompts share.
        lost = 50 * (prompt + r["output_tokens"]) > kv_tokens(shape, r["tp"])
        cached = (r["system_tokens"] if lost else prompt - 1) // 16 * 16
        run = Served(prompt, r["output_tokens"], arrival_s, cached=cached, step_tokens=r["mbt"], seqs=r["max_num_seqs"])
        first, whole = 1e-3 * r["real_ttft_mean"], 1e-3 * r["real_e2e_mean"]
        times = Times(first, (whole - first) / (run.output - 1), whole)
        yield Case(shape, r["tp"], run, times, (str(r["exp"]),))


def closed(engine: str) -> Iterator[Case]:
    """Closed loops that start at once; where the KV pool is short, memory decides and not the host."""
    # How TTFT steps with the size of a wave shows that SGLang took 16,384 tokens a step here.
    how = {"vllm": Served(0, 0), "sglang": Served(0, 0, step_tokens=16384, prefill_first=True)}[engine]
    for r in measured("closed_loop_qwen3_32b_tp2.csv"):
        if r["backend"] != engine:
            continue
        shape, tp, clients = SHAPES[r["model_path"]], int(r["tp_size"]), int(r["concurrency"])
        run = how._replace(prompt=int(r["isl"]), output=int(r["osl"]), clients=clients)
        first, tpot = 1e-3 * r["silicon_ttft_ms"], 1e-3 * r["silicon_tpot_ms"]
        times = Times(first, tpot, first + (run.output - 1) * tpot)
        fits = clients * (run.prompt + run.output) <= kv_tokens(shape, tp)
        yield Case(shape, tp, run, times, (f"prompt {run.prompt}", f"output {run.output}"), fits)


def offline() -> Iterator[Case]:
    """One static batch each, whole prompts first.

    Left out are batches larger than the KV pool, and Mistral-7B above 512 sequences x heads: there its sliding window
    sends vLLM of that time to its first paged-attention kernel, which reads grouped KV once for every query head.
    """
    for r in measured("offline_batches_h100_7b.csv"):
        shape, tp, batch, length = SHAPES[r["Model"]], r["Num of Hardware"], r["Batch Size"], r["Input Output Length"]
        run = Served(length, length, clients=batch, rounds=1, prefill_first=True)
        old_kernel = "Mistral" in shape.name and batch * shape.q_heads // tp > 512
        fits = 2 * length * batch <= kv_tokens(shape, tp) and not old_kernel
        times = Times(math.nan, math.nan, r["Latency"])
        yield Case(shape, tp, run, times, (shape.name, f"batch {batch}"), fits)


def kv_tokens(shape: Shape, tp: int) -> float:
    """Tokens that an engine at 90 % of an H100 holds, about: enough to tell which rows memory decides."""
    pool = 0.9 * CARD_BYTES - OTHER_BYTES - shapes.weight_bytes(shape, tp)
    return pool / shapes.kv_token_bytes(shape, tp)


# ---------------------------------------------------------------------------------------------------- fits


@cache
def priced(shape: Shape, tp: int, host: cost.HostProfile) -> cost.Row:
    """Cost coefficients of a model under a host profile."""
    return cost.row(cost.coefficients([(shape, tp)], cost.quantities(GPU), cost.gpu(GPU), host), 0)


def predict(cases: Sequence[Case], host: cost.HostProfile) -> F8:
    """TTFT, TPOT and E2E of each case, seconds."""
    return np.array([replay(c.run, priced(c.shape, c.tp, host), host) for c in cases])


Fit = Callable[[Sequence[Case]], cost.HostProfile]


def first_token(base: cost.HostProfile) -> Fit:
    """Fit what API and tokeniser add to a first token: the median of what is left of TTFT."""

    def fit(cases: Sequence[Case]) -> cost.HostProfile:
        left = [c.measured.ttft - p for c, p in zip(cases, predict(cases, base)[:, 0], strict=True)]
        return base._replace(api_in_s=float(np.median(left)))

    return fit


def whole_requests(base: cost.HostProfile, start: Mapping[str, float]) -> Fit:
    """Fit the named constants to E2E times, which in a closed loop is to its throughput."""
    names, scale = list(start), np.array(list(start.values()))

    def with_(x: F8) -> cost.HostProfile:
        found: dict[str, Any] = dict(zip(names, (np.abs(x) * scale).tolist(), strict=True))
        return base._replace(**found)

    def fit(cases: Sequence[Case]) -> cost.HostProfile:
        y = np.array([c.measured.e2e for c in cases])

        def residuals(x: F8) -> F8:
            return np.asarray(np.log(predict(cases, with_(x))[:, 2] / y))

        steps = np.full(len(names), 0.02)  # wide: whole steps end whole requests
        got = least_squares(residuals, np.ones(len(names)), loss="soft_l1", f_scale=0.02, diff_step=steps, max_nfev=20)
        return with_(got.x)

    return fit


def errors(cases: Sequence[Case], predicted: F8) -> dict[str, dict[str, float | int]]:
    """Median and P95 of the absolute relative error, and the median signed one, by metric."""
    out = {}
    for k, name in enumerate(Times._fields):
        y = np.array([c.measured[k] for c in cases])
        if np.isfinite(y).all():
            e = predicted[:, k] / y - 1
            numbers = (np.median(np.abs(e)), np.quantile(np.abs(e), 0.95), np.median(e))
            out[name] = dict(zip(("median", "p95", "bias"), (round(float(v), 4) for v in numbers), strict=True))
            out[name]["n"] = len(e)
    return out


def left_out(cases: Sequence[Case], fit: Fit) -> tuple[list[Case], F8]:
    """Every case as a fit without each of its groups predicts it."""
    rows: list[Case] = []
    found: list[F8] = []
    for group in dict.fromkeys(g for c in cases for g in c.groups):
        held = [c for c in cases if group in c.groups]
        rows += held
        found.append(predict(held, fit([c for c in cases if group not in c.groups])))
    return rows, np.concatenate(found)


def profile(cases: Sequence[Case], fit: Fit, source: str, formula: str) -> tuple[cost.HostProfile, dict[str, Any]]:
    """A host profile, and its table for `hosts.toml`."""
    use = [c for c in cases if c.fits]
    host = fit(use)
    numbers: dict[str, Any] = {k: float(f"{v:.3g}") for k, v in host._asdict().items() if isinstance(v, float)}
    host = host._replace(**numbers)
    own, held = errors(use, predict(use, host)), errors(*left_out(use, fit))
    plain = {"fit": own["e2e"], "held": held["e2e"]}
    plain = {k: {n: e[n] for n in ("median", "p95", "n")} for k, e in plain.items()}
    parts = {f"{name} {kind}": e for kind, es in (("fit", own), ("held", held)) for name, e in es.items()}
    said = {"source": f"{source}; {len(use)} rows of {len(cases)}", "formula": formula, "fitted_on": FITTED_ON}
    return host, said | host._asdict() | plain | {"held_parts": parts}


def fit() -> dict[str, dict[str, Any]]:
    """The profiles of the engine generations that were measured, by name."""
    # Scheduling ahead hides the host's part of a step behind the GPU's; the rows only show that it fits there.
    hidden = cost.host("vllm-graph", GPU)._replace(
        api_in_s=0.0, api_out_s=API_OUT_S, sample_s=SAMPLE_S, lookahead_steps=1
    )
    serial = hidden._replace(host0=0.0, host1=0.0, serial=True, lookahead_steps=0)
    out: dict[str, dict[str, Any]] = {}
    runs, loops, waves, batches = list(poisson()), list(closed("vllm")), list(closed("sglang")), list(offline())
    # The prompts of vLLM 0.15 were hits, so it takes the sustained prefill of 0.12, on the same card and kernels.
    start = {"host0": 1e-3, "host1": 5e-5, "scale_prefill": 1.0}
    sustained = whole_requests(serial, start)([c for c in loops if c.fits]).scale_prefill
    hidden = hidden._replace(scale_prefill=float(f"{sustained:.3g}"))
    newest, out["vllm-0.15"] = profile(
        runs,
        first_token(hidden),
        f"vLLM 0.15.1, TP1 to 4: {POISSON}. Fitted: api_in_s. host0, host1: as vllm-graph, hidden in every row;"
        f" api_out_s: as vllm-graph, only its sum with api_in_s is seen; scale_prefill: as vllm-0.12; sample_s: {SORT}",
        "max(kernels + sampler, host0 + host1 x sequences); a new prompt joins behind the step already scheduled",
    )
    api_in_s = newest.api_in_s
    _, out["vllm-0.12"] = profile(
        loops,
        whole_requests(serial._replace(api_in_s=api_in_s), start),
        f"vLLM 0.12.0: {CLOSED}, clients at once. Fitted: host0, host1, scale_prefill (a sustained prefill, seen at TP2"
        f" only). API: as vllm-0.15; sample_s: {SORT}",
        "kernels + sampler + host0 + host1 x sequences",
    )
    _, out["sglang-0.5"] = profile(
        waves,
        whole_requests(hidden._replace(api_in_s=api_in_s, sample_s=0.0), {"scale_prefill": 1.0}),
        f"SGLang 0.5.1: {CLOSED}, clients at once. Fitted: scale_prefill (a sustained prefill, seen at TP2 only)."
        " API, host0, host1: as vllm-0.15, hidden in every row; sample_s: its sampler does not sort",
        "max(kernels, host0 + host1 x sequences); a new prompt joins behind the step already scheduled",
    )
    plain = serial._replace(api_in_s=api_in_s, sample_s=0.0)
    _, out["vllm-0.6"] = profile(
        batches,
        whole_requests(plain, {"host0": 1e-3, "host1": 5e-5, "host_tp": 5e-4}),
        f"vLLM 0.5 and 0.6, TP1 to 4: {OFFLINE}. Fitted: host0, host1, host_tp (the driver hands each step's inputs to"
        " its workers). API: as vllm-0.15, not in these rows; sample_s: these versions ignore generation_config",
        "kernels + host0 + host_tp x log2(GPUs) + host1 x sequences",
    )
    return out


def main() -> None:
    """Write the profiles into `hosts.toml` and say their errors."""
    path = cost.TABLES / "hosts.toml"
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    found = fit()
    old = {k: v for k, v in file["host"].items() if k not in found}
    path.write_text(dumps(file | {"host": found | old}), encoding="utf-8")
    for name, q in found.items():
        print(name, {k: q[k] for k in cost.HostProfile._fields})
        for part, e in q["held_parts"].items():
            print(f"  {part}: {cost.error({'fit': e})}, bias {e['bias']:+.1%}")


if __name__ == "__main__":
    main()
