"""Fit the cost tables on public profiles: `PROFILES_DIR=... python -m harness.engines.costs.fit` rewrites `tables/`.

(a) kernels per GPU and op on AIConfigurator's measurements; (b) engine overhead c0 + c1 B + s x kernels on Aegaeon's
whole steps; (c) SM shares on MuxServe's table. Deterministic: the same profiles give the same bytes. Every error that
is stored is that of the rounded coefficients, computed by the functions that the simulator uses.

Before a fit every measured row is clamped to physics: it may not beat 95 % of the card's peak bandwidth or arithmetic.
On L40S, whose 96 MB cache holds what a benchmark repeats, rows whose bytes fit it are dropped unless HBM would take
under a tenth of their time anyway: the layers of a model do not share that cache.

Over 600 lines: it is one offline tool that runs from its first line to its last: measured rows, the fit of each
quantity, its errors, and the TOML that is written. What others need of it is the form of its rows (`Rows`, `dumps`).
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import coo_matrix, csr_matrix, identity
from scipy.sparse.linalg import spsolve

from harness.engines.costs import coefficients, kernels, profile, quantities
from harness.engines.costs.coef import Tables
from harness.engines.costs.quantities import sig
from harness.policy.types import Shape, UserError

F8 = NDArray[np.float64]
Mask = NDArray[np.bool_]
Quantity = dict[str, Any]

OLD, NEW = "aiconfigurator", "aiconfigurator-2026"
FOLDERS = {
    "a100-80g": f"{OLD}/a100_sxm", "h100": f"{OLD}/h100_sxm", "h200": f"{OLD}/h200_sxm", "l40s": f"{OLD}/l40s",
    "b200": f"{NEW}/b200_sxm", "rtx-pro-6000": f"{NEW}/rtx_pro_6000_server",
}  # fmt: skip
AIC = "AIConfigurator 095f58a ({}), vLLM {}, Apache-2.0"
AIC_NEW = "AIConfigurator, PyPI aisimulate 0.13.0.dev202610270000000085 ({}), vLLM {}, Apache-2.0"
VERSION = {
    "a100-80g": "0.14.0", "h100": "0.24.0", "h200": "0.24.0", "l40s": "0.24.0", "b200": "0.25.0",
    "rtx-pro-6000": "0.24.0",
}  # fmt: skip
KERNELS = {"b200": "flashinfer"}  # of attention, in the names of kernels; others: flash_attn
HELD_HEADS = ((24, 8), (40, 8))


class Rows(NamedTuple):
    """Measured calls: features by name, clamped seconds, and which rows are left out of the fit (and why)."""

    x: Mapping[str, Any]  # of arrays
    y: F8
    held: Mapping[str, Mask]  # by reason; a row may have several

    @property
    def out(self) -> Mask:
        """Mask of the rows that are held out for any reason."""
        return cast("Mask", np.logical_or.reduce(list(self.held.values())))

    def pick(self, rows: Mask | NDArray[np.int64]) -> Rows:
        """Return some of the rows, by mask or index."""
        return Rows({k: v[rows] for k, v in self.x.items()}, self.y[rows], {k: v[rows] for k, v in self.held.items()})


def profiles() -> Path:
    """Return the folder of the public profiles, from `PROFILES_DIR`. Raises UserError if they are not there."""
    where = os.environ.get("PROFILES_DIR", "")
    if not (Path(where) / "aiconfigurator").is_dir():
        raise UserError(f"PROFILES_DIR={where!r} has no aiconfigurator folder; set it to the public latency profiles")
    return Path(where)


def source_of(kind: str, op: str) -> str:
    """Return the source of a quantity that is fitted on a profile."""
    return (AIC if FOLDERS[kind].startswith(f"{OLD}/") else AIC_NEW).format(op, VERSION[kind])


# ---------------------------------------------------------------------------------------------------- measured rows


def _clamp(kind: str, seconds: F8, nbytes: F8, flops: F8) -> tuple[F8, Mask]:
    """Return seconds no better than 95 % of peak, and the rows to keep (see the module's text)."""
    spec = quantities.gpu(kind)
    y = np.maximum(seconds, np.maximum(nbytes / (0.95 * spec.hbm), flops / (0.95 * spec.flops)))
    cached = (nbytes < 96e6) & (nbytes / spec.hbm > 0.1 * y)
    return y, ~cached if kind == "l40s" else np.ones(len(y), dtype=bool)


def gemm_rows(kind: str) -> Rows:
    """Return bf16 GEMMs of a layer's size (n and k >= 512)."""
    d = pd.read_parquet(profiles() / FOLDERS[kind] / "gemm_perf.parquet")
    d = d[(d.gemm_dtype == "bfloat16") & (d.n >= 512) & (d.k >= 512)].sort_values(["m", "n", "k"])
    m, n, k = (d[c].to_numpy(np.float64) for c in "mnk")
    y, keep = _clamp(kind, d.latency.to_numpy(np.float64) * 1e-3, 2 * (m * k + n * k + m * n), 2 * m * n * k)
    held = {"m 128 to 512": (m >= 128) & (m <= 512), "largest m": m == m.max()}
    return Rows({"m": m, "n": n, "k": k}, y, held).pick(keep)


def _attention(kind: str, op: str) -> pd.DataFrame:
    d = pd.read_parquet(profiles() / FOLDERS[kind] / f"{op}_attention_perf.parquet")
    if "window_size" in d:  # a100 has no such column
        d = d[d.window_size == 0]
    d = d[(d.kv_cache_dtype == "bfloat16") & d.head_dim.isin([64, 128, 256])]
    d = d[d.kernel_source.str.contains(KERNELS.get(kind, "flash_attn"))]
    return d.sort_values(["head_dim", "num_heads", "num_key_value_heads", "batch_size", "isl", "step"])


def decode_rows(kind: str) -> Rows:
    """Return decode attention of one layer, up to 256 sequences (the simulator's largest batch)."""
    d = _attention(kind, "generation")
    d = d[d.batch_size <= 256]
    names = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "step")
    B, heads, kv, dim, step = (d[c].to_numpy(np.float64) for c in names)
    ctx = step + 1
    y, keep = _clamp(kind, d.latency.to_numpy(np.float64) * 1e-3, 4 * B * ctx * kv * dim, 4 * B * ctx * heads * dim)
    return Rows({"B": B, "ctx": ctx, "heads": heads, "kv": kv, "d": dim}, y, _held(heads, kv, "step", ctx)).pick(keep)


def prefill_rows(kind: str) -> Rows:
    """Return causal attention of one layer, in steps of up to 65,536 tokens (four times the simulator's largest)."""
    d = _attention(kind, "context")
    d = d[(d.batch_size * d.isl <= 1 << 16) & (d.isl > 1)]
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    n, tokens, heads, kv, dim = (d[c].to_numpy(np.float64) for c in names)
    flops = 4 * heads * dim * n * tokens * tokens / 2
    y, keep = _clamp(kind, d.latency.to_numpy(np.float64) * 1e-3, 4 * n * tokens * (heads + kv) * dim, flops)
    x = {"n": n, "tokens": tokens, "heads": heads, "kv": kv, "d": dim}
    return Rows(x, y, _held(heads, kv, "prompt", tokens)).pick(keep)


def _held(heads: F8, kv: F8, name: str, size: F8) -> dict[str, Mask]:
    out: dict[str, Mask] = {f"heads ({q},{g})": (heads == q) & (kv == g) for q, g in HELD_HEADS}
    return {**out, f"largest {name}": size == size.max()}


# ---------------------------------------------------------------------------------------------------- fitting


def _minimise(
    seconds: Callable[[F8], F8], y: F8, starts: Sequence[Sequence[float]], steps: Sequence[float] = (1e-4,)
) -> F8:
    """Return the positive parameters with the least robust error of ln(seconds / y), the best from several starts."""

    def residuals(x: F8) -> F8:
        return np.clip(np.log(seconds(np.exp(x)) / y), -1, 1)

    best: Any = None
    for start in starts:
        at = np.log(np.array(start))
        for step in steps:  # larger difference steps see past the plateaus of whole waves
            got = least_squares(
                residuals,
                at,
                loss="soft_l1",
                f_scale=0.1,
                diff_step=np.full(len(at), step),
                bounds=(np.log(1e-9), np.log(1e4)),
                max_nfev=80,
            )
            at = got.x
            best = got if best is None or got.cost < best.cost else best
    return cast("F8", np.exp(best.x))


def _weights(axes: Sequence[Sequence[float]], at: Sequence[F8]) -> csr_matrix:
    """Return the rows of multilinear weights over the grid of `axes`, as `kernels` interpolates."""
    parts = []
    for x, axis in zip(at, axes, strict=True):
        u = np.interp(np.log2(np.maximum(x, 1)), np.log2(axis), np.arange(len(axis)))
        i = np.minimum(u.astype(np.int64), len(axis) - 2)
        parts.append(((i, 1 - (u - i)), (i + 1, u - i)))
    cols, vals = [], []
    for corner in product(*parts):
        cols.append(np.ravel_multi_index([i for i, _ in corner], [len(a) for a in axes]))
        vals.append(np.prod([w for _, w in corner], axis=0))
    n = len(at[0])
    entries = (np.concatenate(vals), (np.tile(np.arange(n), len(cols)), np.concatenate(cols)))
    return coo_matrix(entries, shape=(n, int(np.prod([len(a) for a in axes])))).tocsr()


def _factors(axes: Sequence[Sequence[float]], at: Sequence[F8], log_error: F8) -> list[float]:
    """Return the factors on the grid that take up `log_error`, by ridge regression reweighted towards the median."""
    A, w = _weights(axes, at), np.ones(len(log_error))
    c = np.zeros(A.shape[1])
    for _ in range(5):
        At = A.multiply(w[:, None]).T
        c = spsolve((At @ A + identity(A.shape[1])).tocsc(), At @ log_error)
        w = 1 / np.maximum(np.abs(log_error - A @ c), 0.02)
        w /= w.max()
    return [round(float(f), 3) for f in np.exp(c)]


def error(predicted: F8, y: F8) -> dict[str, float | int]:
    """Return the median and P95 of the relative error of predicted seconds."""
    e = np.abs(predicted / y - 1)
    return {"median": round(float(np.median(e)), 4), "p95": round(float(np.quantile(e, 0.95)), 4), "n": len(e)}


def _errors(predicted: F8, rows: Rows) -> Quantity:
    """Return the errors on fitted rows, on all held-out rows and on each kind of them."""
    out: Quantity = {"fit": error(predicted[~rows.out], rows.y[~rows.out])}
    out["held"] = error(predicted[rows.out], rows.y[rows.out])
    out["held_parts"] = {why: error(predicted[s], rows.y[s]) for why, s in rows.held.items() if s.any()}
    return out


def _rounded(q: Any) -> Any:
    if isinstance(q, float | np.floating):
        return sig(float(q))
    if isinstance(q, dict):
        return {k: _rounded(v) for k, v in q.items()}
    return [_rounded(v) for v in q] if isinstance(q, list | tuple) else q


def _finish(
    q: Quantity, axes: Sequence[tuple[str, list[int], F8]], rows: Rows, seconds: Callable[[Quantity], F8]
) -> Quantity:
    """Round the mechanism's parameters, add the factors that it misses and the errors of the whole.

    `axes`: what each axis counts, its knots, and its value at each row.
    """
    q, fit, knots = _rounded(q), ~rows.out, [k for _, k, _ in axes]
    log_error = np.log(rows.y / seconds(q))[fit]
    factors = _factors(knots, [x[fit] for _, _, x in axes], log_error)
    q |= {"axes_of": [name for name, _, _ in axes], "axes": knots, "factors": factors}
    return q | _errors(seconds(q), rows)


TILES = ((128, 256), (128, 128), (64, 128), (64, 64))


def fit_gemm(kind: str, rows: Rows) -> Quantity:
    """Fit tile rates, fill times, bandwidth and launch of a kind's GEMMs, and their factors over (m, n, k)."""
    spec, fit = quantities.gpu(kind), rows.pick(~rows.out)
    few = fit.pick(np.sort(np.random.default_rng(0).permutation(len(fit.y))[:3000]))

    def quantity(x: F8) -> Quantity:  # no tile is faster than a larger one
        rates = np.minimum(np.cumprod(np.minimum(x[3:], 1.0)), 0.95)
        tiles = [[*tile, rate] for tile, rate in zip(TILES, rates, strict=True)]
        return {"launch_s": x[0] * 1e-6, "fill_s": x[1] * 1e-6, "hbm_frac": min(x[2], 0.95), "tiles": tiles}

    x = _minimise(
        lambda x: kernels.gemm_s(quantity(x), spec, **few.x),
        few.y,
        [(3, fill, 0.8, 0.9, 0.95, 0.9, 0.8) for fill in (0.3, 1.0, 3.0)],
        (1e-3, 1e-2, 3e-2, 1e-1, 1e-2),
    )
    sizes = [512, 1024, 2048, 4096, 8192, 16384, 65536]
    q = _finish(
        quantity(x),
        [("m", [1, 16, 64, 112, 768, 2048, 8192], rows.x["m"]), ("n", sizes, rows.x["n"]), ("k", sizes, rows.x["k"])],
        rows,
        lambda q: kernels.gemm_s(q, spec, **rows.x),
    )
    rate = 2 * 8192.0**3 / float(kernels.gemm_s(q, spec, 8192, 8192, 8192))
    return {
        "source": source_of(kind, "gemm") + ", torch linear, n and k >= 512",
        "formula": "(launch + min over tiles (tm, tn, fraction of peak) and k-splits 1 to 8 of"
        " max(bytes / hbm, waves)) x factors(m, n, k)",
        **q,
        "best_flops_frac": sig(rate / spec.flops),
    }


def fit_decode(kind: str, rows: Rows) -> Quantity:
    """Fit decode attention of a layer, apart for grouped heads and for one query head a KV head."""
    mha = rows.x["heads"] == rows.x["kv"]
    q = {"gqa": _fit_decode(kind, rows.pick(~mha)), "mha": _fit_decode(kind, rows.pick(mha))}
    return {
        "source": source_of(kind, "generation_attention")
        + ", flash attention, batch <= 256; kv heads 1, 2, 4, 8 only: more are extrapolated by bytes"
        + (", head_dim 128 only" if kind == "a100-80g" else ""),
        "formula": "(floor + [ctx > 128] merge + B heads + max(bytes / hbm, one block's) + flops"
        " + tail sqrt(ctx) / (B kv)^p) x factors(ctx, B kv)",
        **_errors(kernels.decode_s(q, quantities.gpu(kind), **rows.x), rows),
        **q,
    }


def _fit_decode(kind: str, rows: Rows) -> Quantity:
    spec, fit = quantities.gpu(kind), rows.pick(~rows.out)

    def quantity(x: F8) -> Quantity:
        q = dict(zip(("floor_s", "merge_s", "kv_head_s", "head_s", "tail_s", "lone_s"), x[:6] * 1e-6, strict=True))
        return q | {"hbm_frac": min(x[6], 0.95), "flops_frac": x[7], "tail_power": x[8]}

    def seconds(q: Quantity, rows: Rows) -> F8:
        return kernels.decode_s({"gqa": q, "mha": q}, spec, **rows.x)

    start = (10, 3, 0.02, 1e-3, 0.05, 1e-3, 0.85, 1.0, 0.5)
    x = _minimise(lambda x: seconds(quantity(x), fit), fit.y, [start])
    axes = [
        ("ctx", [2, 16, 64, 128, 256, 1024, 4096, 16384, 65536], rows.x["ctx"]),
        ("B x kv", [1, 8, 64, 512, 2048], rows.x["B"] * rows.x["kv"]),
    ]
    return _finish(quantity(x), axes, rows, lambda q: seconds(q, rows))


def fit_prefill(kind: str, rows: Rows) -> Quantity:
    """Fit floor, tile and rate parts of a layer's causal attention, and its factors over (tokens, n x heads)."""
    spec, fit = quantities.gpu(kind), rows.pick(~rows.out)
    dims = sorted({int(d) for d in fit.x["d"]})

    def quantity(x: F8) -> Quantity:
        q = {"floor_s": x[0] * 1e-6, "tile_s": x[1] * 1e-6, "hbm_frac": min(x[2], 0.95), "longest": x[3], "power": x[4]}
        return q | {"head_dims": dims, "flops_frac": list(x[5:])}

    x = _minimise(
        lambda x: kernels.prefill_s(quantity(x), spec, **fit.x), fit.y, [[9, 0.5, 0.5, 0.5, 1.5] + [0.6] * len(dims)]
    )
    q = _finish(
        quantity(x),
        [
            ("tokens", [16, 64, 256, 512, 1024, 2048, 4096, 8192], rows.x["tokens"]),
            ("n x heads", [1, 8, 64, 512, 4096], rows.x["n"] * rows.x["heads"]),
            ("heads a KV head", [1, 2, 4, 16], rows.x["heads"] / rows.x["kv"]),
        ],
        rows,
        lambda q: kernels.prefill_s(q, spec, **rows.x),
    )
    return {
        "source": source_of(kind, "context_attention")
        + ", flash attention; no chunk with a prefix was measured (area law)"
        + (", head_dim 128 only" if kind == "a100-80g" else ""),
        "formula": "(floor + max(bytes / hbm, (tiles over SMs ^ p + longest tile ^ p) ^ 1/p)) x factors",
        **q,
    }


def fit_all_reduce(kind: str) -> Quantity:
    """Fit seconds of all-reduces in CUDA graphs."""
    d = pd.read_parquet(profiles() / FOLDERS[kind] / "custom_allreduce_perf.parquet")
    d = d[d.backend == "vllm_graph"].sort_values(["num_gpus", "message_size"])
    source = source_of(kind, "custom_allreduce") + ", in a CUDA graph; sizes count bf16 elements"
    return {"source": source, **_by_size(d)}


def _by_size(d: pd.DataFrame) -> Quantity:
    """Fit seconds at every other message size; the sizes between, and the largest, are held out."""
    t = d.pivot_table(index="message_size", columns="num_gpus", values="latency") * 1e-3
    sizes = t.index.to_numpy(np.float64)
    knot = (np.arange(len(sizes)) % 2 == 1) & (sizes < sizes.max())
    q: Quantity = {"elements": [int(s) for s in sizes[knot]]}
    q |= {f"tp{p}_s": [sig(float(s)) for s in t[p].to_numpy()[knot]] for p in t.columns}
    held = {
        "sizes between": np.tile(~knot & (sizes < sizes.max()), 3),
        "largest size": np.tile(sizes == sizes.max(), 3),
    }
    rows = Rows({}, np.concatenate([t[p].to_numpy() for p in t.columns]), held)
    predicted = np.concatenate([kernels.all_reduce_s(q, int(p), sizes) for p in t.columns])
    return {"formula": "log-log interpolation over elements, linear beyond the last", **q, **_errors(predicted, rows)}


# Bytes/s between GPUs of kinds whose collectives are those of a kind with faster links.
WIRES = {
    "h800": (160e9, "NVLink at the 160 GB/s that DeepSeek plans with"),
    "a10": (24.8e9, "PCIe 4 at 24.8 GB/s, for it has no NVLink"),
}


def fit_exchanges(kind: str) -> dict[str, Quantity]:
    """Fit the collectives of data-parallel attention, measured by NCCL; sizes count the elements of all ranks.

    B200's are not measured: H200's, of which what exceeds the shortest call shrinks as NVLink grows.
    """
    like = "h200" if kind == "b200" else kind
    new = like == "rtx-pro-6000"
    folder = profiles() / ("aiconfigurator-2026" if new else "aiconfigurator") / FOLDERS[like].rpartition("/")[2]
    d = pd.read_parquet(folder / "nccl_perf.parquet")
    d = d[d.nccl_dtype == "half"].sort_values(["num_gpus", "message_size"])
    nccl = d.version.iloc[0]
    source = (AIC_NEW.format("nccl", nccl) if new else AIC.format("nccl", nccl)).replace("vLLM", "NCCL")
    out: dict[str, Quantity] = {}
    for op in quantities.EXCHANGES:
        q: Quantity = {"source": f"{source}, {op}; sizes count 16-bit elements of all GPUs"} | _by_size(
            d[d.op_name == op]
        )
        if kind == "b200":
            faster = quantities.gpu(like).nvlink / quantities.gpu(kind).nvlink
            q = {k: v for k, v in q.items() if k not in quantities.ERRORS}
            q["source"] = "roofline: H200's NCCL, above its shortest call in the ratio of NVLink rates, unmeasured"
            for times in ("tp2_s", "tp4_s", "tp8_s"):
                least = min(q[times])
                q[times] = [sig(least + (s - least) * faster) for s in q[times]]
        out[op] = q
    return out


def small(kind: str) -> Quantity:
    """Estimate the kernels without measurements per GPU, from launch floors known for two kinds and from bytes."""
    known = {"a100-80g": 25e-6, "h100": 20e-6, "h800": 20e-6}
    ends = [(1 / quantities.gpu(k).hbm, known[k]) for k in ("a100-80g", "h100")]
    slope = (ends[0][1] - ends[1][1]) / (ends[0][0] - ends[1][0])
    at = ends[1][1] + slope * (1 / quantities.gpu(kind).hbm - ends[1][0])
    measured = "public profile sum of five kernels of a layer, <= 64 tokens (Vidur: 23-28 us A100, 19-22 us H100)"
    return {
        "source": measured
        if kind in known
        else "roofline, unmeasured: affine in 1 / bandwidth through A100 25 us and H100 20 us",
        "formula": "max(floor, bytes of two norms, rope, activation, cache write / hbm)",
        "floor_s": sig(known.get(kind, at), 3),
        "hbm_frac": 0.8,  # AIConfigurator's, InferSim's and BLIS's default for memory-bound kernels
    }


# ---------------------------------------------------------------------------------------------------- whole steps

LLAMA13 = Shape("Llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, True, False, 4096)
# Dimensions from the models' public configurations (config.json); qwen1_5_moe is no dense model and left out.
DENSE = {
    "llama2_7b": Shape("Llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, True, False, 4096),
    "llama2_13b_chat": LLAMA13,
    "llava1_5_13b": LLAMA13._replace(name="llava-1.5-13b, its language model", vocab=32064),
    "baichuan_7b": Shape("Baichuan-7B", 32, 4096, 32, 32, 128, 11008, 64000, True, False, 4096),
    "baichuan2_13b_chat": Shape("Baichuan2-13B-Chat", 40, 5120, 40, 40, 128, 13696, 125696, True, False, 4096),
    "internlm2_5_7b_chat": Shape("internlm2_5-7b-chat", 32, 4096, 32, 8, 128, 14336, 92544, True, False, 32768),
    "qwen1_5_14b_chat": Shape("Qwen1.5-14B-Chat", 40, 5120, 40, 40, 128, 13696, 152064, True, False, 32768),
    "qwen2_5_7b": Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, True, False, 32768),
    "qwen_14b_chat": Shape("Qwen-14B-Chat", 40, 5120, 40, 40, 128, 13696, 152064, True, False, 8192),
    "qwen_7b": Shape("Qwen-7B", 32, 4096, 32, 32, 128, 11008, 151936, True, False, 8192),
    "qwen_7b_chat": Shape("Qwen-7B-Chat", 32, 4096, 32, 32, 128, 11008, 151936, True, False, 8192),
    "yi1_5_6b_chat": Shape("Yi-1.5-6B-Chat", 32, 4096, 32, 4, 128, 11008, 64000, True, False, 4096),
}
PRIOR_ROWS = 30  # rows that the prior "scale = 1" weighs; 134 are measured
# GPU kind -> (name in the file, the model that is fitted). H100 and H20 have no llama2_7b. A10 has no kernel table.
ENGINES = {
    "a100-80g": ("A100", "llama2_7b"),
    "h800": ("H800", "llama2_7b"),
    "h100": ("H100", "qwen2_5_7b"),
    "h20": ("H20", "qwen2_5_7b"),
}


def whole_steps(kind: str) -> pd.DataFrame:
    """Return measured steps of dense models, by model, phase, prompt, batch; at most 4,096 prompt tokens in all."""
    d = pd.read_csv(profiles() / "aegaeon/latency.csv")
    d = d[(d.gpu == ENGINES[kind][0]) & d.model.isin(list(DENSE))]
    d = d.rename(columns={"prompt_tokens_per_sequence": "prompt", "prefill_p50_s": "prefill", "decode_p50_s": "decode"})
    d = d[d.prompt * d.batch <= 4096].melt(["model", "prompt", "batch"], ["prefill", "decode"], "phase", "seconds")
    return d.sort_values(["model", "phase", "prompt", "batch"], ignore_index=True)


def predict_steps(d: pd.DataFrame, t: Tables, row_of: Mapping[str, int]) -> F8:
    """Return the seconds of the rows of `whole_steps` by cost tables."""
    rows = {model: profile.row(t, i) for model, i in row_of.items()}

    def seconds(model: str, phase: str, prompt: int, batch: int) -> float:
        if phase == "decode":
            return profile.step_s(rows[model], B=batch, C=batch * prompt)
        return profile.step_s(rows[model], p=batch * prompt, n=batch, area=batch * prompt * prompt / 2)

    return np.array([seconds(*r) for r in zip(d.model, d.phase, d.prompt, d.batch, strict=True)])


def fit_engine(kind: str, q: Quantity) -> tuple[Quantity, pd.DataFrame]:
    """Fit c0, c1 and the kernel scales of eager vLLM, by reweighted relative least squares on one model."""
    spec, base = quantities.gpu(kind), quantities.host("none", kind)
    q = {**q, "co_run": quantities.quantities(kind)["co_run"]}  # which is not fitted here
    d, fitted = whole_steps(kind), ENGINES[kind][1]
    models = list(dict.fromkeys(d.model))
    rows, row_of = [(DENSE[m], 1) for m in models], {m: i for i, m in enumerate(models)}
    here = d[d.model == fitted]

    def kernels(decode: float, prefill: float) -> F8:
        h = base._replace(scale_decode=decode, scale_prefill=prefill)
        return predict_steps(here, coefficients.coefficients(rows, q, spec, h), row_of)

    y, batch, unscaled = here.seconds.to_numpy(), here.batch.to_numpy(np.float64), kernels(1, 1)
    X = np.stack([np.ones_like(y), batch, kernels(2, 1) - unscaled, kernels(1, 2) - unscaled], axis=1)
    # One model's kernels hardly vary in a decode step: what the data does not tell, keeps a scale at 1.
    X, y = np.concatenate([X, [[0, 0, 1, 0], [0, 0, 0, 1]]]), np.concatenate([y, [1, 1]])
    trust = np.where(np.arange(len(y)) < len(y) - 2, 1.0, PRIOR_ROWS**0.5)
    w = trust / y
    for _ in range(20):
        c = coefficients.nonnegative(X, y, w)
        w = trust / (y * np.sqrt(np.maximum(np.abs(X @ c / y - 1), 0.02)))
    names = ("host0", "host1", "scale_decode", "scale_prefill")
    out: Quantity = {k: sig(float(v)) for k, v in zip(names, c, strict=True)}
    host = base._replace(**out, serial=True)
    d["predicted"] = predict_steps(d, coefficients.coefficients(rows, q, spec, host), row_of)
    d["held"] = d.model != fitted
    out |= {"source": f"Aegaeon 1c3b110 latency.csv, Apache-2.0: {ENGINES[kind][0]}, fitted on {fitted} alone"}
    held = {f"{m} {p}": ((d.model == m) & (d.phase == p)).to_numpy() for m in models for p in ("prefill", "decode")}
    held = {k: s for k, s in held.items() if not k.startswith(f"{fitted} ")}
    out |= _errors(d.predicted.to_numpy(), Rows({}, d.seconds.to_numpy(), held))
    return out, d


# ---------------------------------------------------------------------------------------------------- SM shares


def share_rows() -> pd.DataFrame:
    """Read MuxServe's A100 table, one GPU: seconds at a share and at 100 %."""
    tree = json.loads((profiles() / "muxserve/llama-a100-sm-share.json").read_text(encoding="utf-8"))
    out = [
        (
            model,
            phase,
            int(b),
            int(length),
            int(s) / 100,
            1e-3 * cell[phase],
            1e-3 * tree[f"llama-{model}"]["1"]["100"][b][length][phase],
        )
        for model in ("7b", "13b")
        for s, batches in tree[f"llama-{model}"]["1"].items()
        for b, lengths in batches.items()
        for length, cell in lengths.items()
        for phase in ("prefill", "decoding")
    ]
    d = pd.DataFrame(out, columns=["model", "phase", "batch", "length", "share", "seconds", "whole"])
    d = d[(d.seconds > 0) & (d.whole > 0) & (d.share < 1) & (d.batch <= 128)]
    d = d[(d.phase == "decoding") | (d.batch * d.length).between(512, 16384)]
    return d.sort_values(["model", "phase", "share", "batch", "length"], ignore_index=True)


def share_speeds(d: pd.DataFrame, q: Quantity, share: Quantity, scale: float) -> F8:
    """Return the speed at a share: kernels stretch, the rest of a step does not.

    That engine's kernels were slower than ours: `scale` times in a decode step, all of its time in a prefill.
    """
    spec, out = quantities.gpu("a100-80g"), np.ones(len(d))
    for model, shape in (("7b", DENSE["llama2_7b"]), ("13b", LLAMA13)):
        for phase, length in product(("prefill", "decoding"), sorted(set(d.length))):
            s = ((d.model == model) & (d.phase == phase) & (d.length == length)).to_numpy()
            b, whole = d.batch.to_numpy(np.float64)[s], d.whole.to_numpy()[s]
            part = kernels.part_of(share, d.share.to_numpy()[s])
            if phase == "decoding":
                at, full = (kernels.decode_kernels_s(q, spec, shape, 1, b, length, p) for p in (part, kernels.WHOLE))
                slower = np.minimum(scale, whole / full)
            else:
                tokens = np.full(len(b), float(length))
                at, full = (kernels.prefill_kernels_s(q, spec, shape, 1, b, tokens, p) for p in (part, kernels.WHOLE))
                slower = whole / full
            out[s] = whole / (whole + slower * (at - full))
    return out


def fit_share(q: Quantity) -> tuple[Quantity, pd.DataFrame]:
    """Fit the worth of a share of SMs on the 7B model; the 13B one is held out."""
    d = share_rows()
    seven = d[d.model == "7b"]

    def share(x: F8) -> Quantity:
        return {"arith_power": x[0], "saturation": x[1], "power": min(x[2], 16.0)}

    x = _minimise(
        lambda x: share_speeds(seven, q, share(x), x[3]),
        (seven.whole / seven.seconds).to_numpy(),
        [(0.8, 0.4, 3.0, 1.2)],
        (1e-3, 1e-2),
    )
    out, scale = _rounded(share(x)), sig(float(x[3]))
    d["predicted"] = share_speeds(d, q, out, scale)
    d["speed"] = d.whole / d.seconds
    held = {f"13b {p}": ((d.model == "13b") & (d.phase == p)).to_numpy() for p in ("prefill", "decoding")}
    return {
        "source": "MuxServe 2231480, examples/placement/llama.json (A100), 7B fitted, batch <= 128",
        "formula": "arithmetic x share^arith_power, HBM saturating at `saturation` of the SMs, floors and host"
        f" unchanged; in decode that engine's kernels taken as {scale} times ours",
        **out,
        **_errors(d.predicted.to_numpy(), Rows({}, d.speed.to_numpy(), held)),
    }, d


# ---------------------------------------------------------------------------------------------------- files


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{json.dumps(k) if not k.replace('_', '').isalnum() else k} = {_toml(v)}" for k, v in value.items()
            )
            + " }"
        )
    if isinstance(value, list):
        text = [_toml(v) for v in value]
        if len(text) <= 24:
            return "[" + ", ".join(text) + "]"
        return "[\n" + "".join(f"    {', '.join(text[i : i + 14])},\n" for i in range(0, len(text), 14)) + "]"
    return str(value)


def dumps(file: Mapping[str, Any]) -> str:
    """Return TOML text: a section for every table that holds tables of its own names, errors inline.

    Grids of factors stand in rows of 14, for people read them; tomli-w has a line for every number.
    """

    def section(name: str, table: Mapping[str, Any]) -> Iterable[str]:
        plain = {k: v for k, v in table.items() if not isinstance(v, dict) or k in quantities.ERRORS}
        if plain or not table:
            if name:
                yield f"\n[{name}]\n"
            yield from (f"{key(k)} = {_toml(v)}\n" for k, v in plain.items())
        for k, v in table.items():
            if k not in plain:
                yield from section(f"{name}.{key(k)}" if name else key(k), v)

    def key(name: str) -> str:
        return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)

    return "".join(section("", file)).lstrip("\n")


def fit(log: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Return all files of `tables/`, by stem: the committed ones, with every fitted quantity fitted anew."""
    files: dict[str, dict[str, Any]] = {
        p.stem: tomllib.loads(p.read_text(encoding="utf-8")) for p in sorted(quantities.TABLES.glob("*.toml"))
    }
    for kind in FOLDERS:
        files[kind] |= {
            "gemm": fit_gemm(kind, gemm_rows(kind)),
            "prefill": fit_prefill(kind, prefill_rows(kind)),
            "decode": fit_decode(kind, decode_rows(kind)),
            "all_reduce": fit_all_reduce(kind),
            **fit_exchanges(kind),
        }
        for op in ("gemm", "prefill", "decode", "all_reduce"):
            log(f"{kind} {op}: {quantities.error(files[kind][op])}")
    for kind in quantities.gpu_kinds():
        files[kind]["small"] = small(kind)
        like = files[kind].get("like")
        if like and kind != "h800":  # H100's chip keeps H100's errors; other cards take coefficients on trust
            formats = [op for op in files[like] if op.startswith(("gemm_", "experts_"))]
            ops = ("gemm", "prefill", "decode", "all_reduce", *quantities.EXCHANGES, *formats)
            files[kind] |= {op: {"source": on_trust(like)} for op in ops}
    # Fewer and slower SMs: H100's rate in large GEMMs for every tile, without what its small tiles lose to latency.
    best = files["h100"]["gemm"]["best_flops_frac"]
    files["h20"]["gemm"] |= {
        "source": "roofline: every tile at H100's fraction of peak in large GEMMs, unmeasured",
        "tiles": [[tm, tn, best] for tm, tn in TILES],
        "factors": [],
    }
    # H100's INT4 experts wait for the conversion of their weights, which takes SMs; H20 has fewer of these than H100 by
    # 1.7 and less arithmetic by 6.7, so that it waits for arithmetic, as with experts in 16 bits.
    files["h20"]["experts_int4"] |= {"flops_frac": files["h100"]["experts_bf16"]["flops_frac"]}
    for kind, (wire, over) in WIRES.items():
        source = f"roofline: {files[kind]['like'].upper()}'s, or a ring over {over}, unmeasured"
        files[kind] |= {op: {"source": source, "wire": wire} for op in ("all_reduce", *quantities.EXCHANGES)}

    def of_kind(kind: str) -> Quantity:
        return dict(quantities.over(files.get(files[kind].get("like", ""), {}), files[kind]))

    share, _ = fit_share(of_kind("a100-80g"))
    log(f"share: {quantities.error(share)}")
    for kind in quantities.gpu_kinds():
        files[kind]["share"] = share if kind == "a100-80g" else _unmeasured(share, "a100-80g")

    eager, sigma = files["hosts"]["host"]["vllm-eager"], {}
    eager["on"] = {}
    for kind in ENGINES:
        eager["on"][kind], steps = fit_engine(kind, of_kind(kind))
        log(f"vllm-eager {kind}: {quantities.error(eager['on'][kind])} {eager['on'][kind]}")
        spread = 1.4826 * float(np.median(np.abs(np.log(steps.predicted / steps.seconds)[~steps.held])))
        sigma[kind] = {
            "value": sig(spread, 2),
            "source": "1.4826 x median |ln error| of whole steps, eager vLLM, fitted model",
        }
    middle = sig(float(np.median([s["value"] for s in sigma.values()])), 2)
    files["hosts"]["sigma"] = sigma | {
        "other": {"value": middle, "source": "no whole steps measured: median of the kinds"}
    }
    for kind, source in (("a100-40g", "a100-80g"), ("h200", "h100"), ("l40s", "a100-80g")):
        eager["on"][kind] = _unmeasured(eager["on"][source], source)
    old, high = (files["hosts"]["host"][f"sglang-eager-2024{end}"] for end in ("", "-high"))
    high["on"] = {kind: {"host0": old["host0"], "host1": q["host1"]} for kind, q in eager["on"].items()}
    return files


def on_trust(like: str) -> str:
    """Return the source of a quantity that a kind takes from another."""
    return f"roofline: coefficients of {like} at this card's own peaks, unmeasured"


def _unmeasured(q: Mapping[str, Any], like: str) -> Quantity:
    kept = {k: v for k, v in q.items() if k not in quantities.ERRORS}
    return kept | {"source": f"roofline: coefficients of {like}, unmeasured on this kind"}


# ---------------------------------------------------------------------------------------------------- looking at it


def anchors() -> list[tuple[str, float, float]]:
    """Return (what, slowdown by our tables, published slowdown): results to check, none was fitted."""
    qwen = Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True, True, 32768)
    llama8 = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192)
    out: list[tuple[str, float, float]] = []

    def at(
        kind: str, of: int, sms: Sequence[int], decode: Sequence[float], prefill: Sequence[float], whose: str
    ) -> None:
        # Both were measured on SGLang, whose host time does not overlap when phases are multiplexed.
        t = coefficients.tables([(llama8, 1)], kind, "sglang-eager-2024")
        share = np.array(sms) / of
        d = np.interp(share, t.share, t.dec_rate[0, :, int(np.searchsorted(t.seqs, 32))])
        p = np.interp(share, t.share, t.pre_rate[0])
        for what, speed, published in (("decode, 32 x 1k", d, decode), ("prefill", p, prefill)):
            rows = zip(sms, 1 / speed, published, strict=True)
            out.extend((f"{kind} {what}, {n} of {of} SMs ({whose})", float(r), x) for n, r, x in rows)

    at("h800", 132, (8, 16, 32, 64, 96), (3.4, 1.9, 1.34, 1.06, 1.03), (6.5, 3.5, 2.1, 1.35, 1.15), "SGLang")
    at("a100-80g", 104, (8, 16, 32, 64, 96), (3.0, 1.85, 1.26, 1.05, 1.0), (7.0, 3.7, 2.0, 1.26, 1.01), "SGLang")
    at("h200", 132, (32, 48, 64, 80, 96), (1.33, 1.21, 1.09, 1.08, 1.06), (2.5, 1.83, 1.49, 1.3, 1.18), "omni 1934")

    def pair(shape: Shape, host: str, B: int, ctx: int, weights: float, sms: float) -> float:
        """Return the slowdown of each of two equal decode lanes: capped at a share of SMs, HBM divided max-min."""
        t = coefficients.tables([(shape, 1)], "a100-80g", host)
        c = t.cost[0]
        step = profile.step_s(profile.row(t, 0), B=B, C=B * ctx) - (1 - weights) * c["wbytes"] / c["hbm"]
        demand = min(1.0, (weights * c["wbytes"] + c["kbytes"] * B * ctx) / (c["hbm"] * step))
        cap = float(np.interp(sms, t.share, t.dec_rate[0, :, int(np.searchsorted(t.seqs, B))]))
        return float(1 / min(cap, 1 / (2 * demand)))

    out.append(("two decodes that each saturate HBM, A100", pair(DENSE["llama2_7b"], "none", 128, 4096, 1.0, 1.0), 2.0))
    out.append(("two light Qwen3-4B-FP8 at 60 % MPS, A100, graphs", pair(qwen, "vllm-graph", 1, 512, 0.5, 0.6), 1.195))
    out.append(("the same, eager", pair(qwen, "vllm-eager", 1, 512, 0.5, 0.6), 1.195))
    return out


def points() -> pd.DataFrame:
    """Return measured and predicted seconds of every row, by committed table: panel, gpu, op, model, held, seconds."""
    frames = []
    ops: Sequence[tuple[str, Callable[[str], Rows], Callable[..., F8]]] = (
        ("gemm", gemm_rows, kernels.gemm_s),
        ("prefill", prefill_rows, kernels.prefill_s),
        ("decode", decode_rows, kernels.decode_s),
    )
    for kind, (op, read, seconds) in product(FOLDERS, ops):
        rows = read(kind)
        predicted = seconds(quantities.quantities(kind)[op], quantities.gpu(kind), **rows.x)
        frames.append(
            pd.DataFrame(
                {
                    "panel": "kernels",
                    "gpu": kind,
                    "op": op,
                    "model": "",
                    "held": rows.out,
                    "measured_s": rows.y,
                    "predicted_s": predicted,
                }
            )
        )
    for kind, (_, fitted) in ENGINES.items():
        d = whole_steps(kind)
        models = list(dict.fromkeys(d.model))
        t = coefficients.tables([(DENSE[m], 1) for m in models], kind, "vllm-eager")
        predicted = predict_steps(d, t, {m: i for i, m in enumerate(models)})
        frames.append(
            pd.DataFrame(
                {
                    "panel": "steps",
                    "gpu": kind,
                    "op": d.phase,
                    "model": d.model,
                    "held": d.model != fitted,
                    "measured_s": d.seconds,
                    "predicted_s": predicted,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def main(argv: Sequence[str]) -> None:
    """Rewrite `tables/`, say the errors and the anchors; with a path, write `points` there as Parquet instead."""
    if argv:
        points().to_parquet(argv[0], index=False)
        return
    for stem, file in fit().items():
        (quantities.TABLES / f"{stem}.toml").write_text(dumps(file), encoding="utf-8")
    quantities.forget()
    for what, ours, published in anchors():
        print(f"{what}: {ours:.2f}x, published {published:.2f}x ({ours / published - 1:+.0%})")


if __name__ == "__main__":
    main(sys.argv[1:])
