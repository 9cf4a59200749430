"""Fit the cost tables of GPU kinds to public profiles (`profiles.py`): `bench calibrate profiles` rewrites `tables/`.

(a) Each kernel is fitted for each GPU, on a grid (`grid.py`) and by number format (`formats.py`). (b) The overhead of
engines is fitted to Aegaeon's measurements of whole steps. A step of B sequences, whose kernels take K seconds, is
assumed to take c0 + c1 B + s K seconds. The constants c0, c1 and s are fitted. (c) The speed on shares of the SMs is
fitted to MuxServe's measurements. The fits are deterministic: the same profiles give the same bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from harness.calibrate import formats, grid, profiles
from harness.calibrate.profiles import DENSE, ENGINES, FOLDERS, LLAMA13, source_of
from harness.calibrate.rows import F8, Rows
from harness.calibrate.tables import Quantity
from harness.engines.costs import coefficients, kernels, profile, quantities
from harness.engines.costs.coef import Tables
from harness.engines.costs.quantities import sig
from harness.policy.types import Shape

TILES = ((128, 256), (128, 128), (64, 128), (64, 64))


def fit_gemm(kind: str, rows: Rows) -> Quantity:
    """Fit the GEMMs of a GPU kind: tile rates, fill times, bandwidth and launch time; then correction factors.

    The axes of these factors are m, n and k.
    """
    spec, few = quantities.gpu(kind), rows.few(3000)

    def quantity(x: F8) -> Quantity:  # no tile is faster than a larger one
        rates = np.minimum(np.cumprod(np.minimum(x[3:], 1.0)), grid.CAP)
        tiles = [[*tile, rate] for tile, rate in zip(TILES, rates, strict=True)]
        return {"launch_s": x[0] * 1e-6, "fill_s": x[1] * 1e-6, "hbm_frac": min(x[2], grid.CAP), "tiles": tiles}

    x = grid.minimise(
        lambda x: kernels.gemm_s(quantity(x), spec, **few.at),
        few.seconds,
        [(3, fill, 0.8, 0.9, 0.95, 0.9, 0.8) for fill in (0.3, 1.0, 3.0)],
        grid.STEPS,
    )
    sizes = [512, 1024, 2048, 4096, 8192, 16384, 65536]
    knots = {"m": [1, 16, 64, 112, 768, 2048, 8192], "n": sizes, "k": sizes}
    axes = [(of, by, rows.at[of]) for of, by in knots.items()]
    q = grid.finish(quantity(x), axes, rows, lambda q: kernels.gemm_s(q, spec, **rows.at))
    rate = 2 * 8192.0**3 / float(kernels.gemm_s(q, spec, 8192, 8192, 8192))
    return {
        "source": source_of(kind, "gemm") + ", torch linear, n and k >= 512",
        "formula": "(launch + min over tiles (tm, tn, fraction of peak) and k-splits 1 to 8 of"
        " max(bytes / hbm, waves)) x factors(m, n, k)",
        **q,
        "best_flops_frac": sig(rate / spec.flops),
    }


def fit_decode(kind: str, rows: Rows) -> Quantity:
    """Fit decode attention of a layer, in two fits: grouped-query attention, and one query head per KV head."""
    mha = rows.at["heads"] == rows.at["kv"]
    q = {"gqa": _fit_decode(kind, rows.pick(~mha)), "mha": _fit_decode(kind, rows.pick(mha))}
    return {
        "source": source_of(kind, "generation_attention")
        + ", flash attention, batch <= 256; kv heads 1, 2, 4, 8 only: more are extrapolated by bytes"
        + (", head_dim 128 only" if kind == "a100-80g" else ""),
        "formula": "(floor + [ctx > 128] merge + B heads + max(bytes / hbm, one block's) + flops"
        " + tail sqrt(ctx) / (B kv)^p) x factors(ctx, B kv)",
        **grid.errors(kernels.decode_s(q, quantities.gpu(kind), **rows.at), rows),
        **q,
    }


def _fit_decode(kind: str, rows: Rows) -> Quantity:
    spec, fit = quantities.gpu(kind), rows.fitted

    def quantity(x: F8) -> Quantity:
        q = dict(zip(("floor_s", "merge_s", "kv_head_s", "head_s", "tail_s", "lone_s"), x[:6] * 1e-6, strict=True))
        return q | {"hbm_frac": min(x[6], grid.CAP), "flops_frac": x[7], "tail_power": x[8]}

    def seconds(q: Quantity, rows: Rows) -> F8:
        return kernels.decode_s({"gqa": q, "mha": q}, spec, **rows.at)

    start = (10, 3, 0.02, 1e-3, 0.05, 1e-3, 0.85, 1.0, 0.5)
    x = grid.minimise(lambda x: seconds(quantity(x), fit), fit.seconds, [start])
    axes = [
        ("ctx", [2, 16, 64, 128, 256, 1024, 4096, 16384, 65536], rows.at["ctx"]),
        ("B x kv", [1, 8, 64, 512, 2048], rows.at["B"] * rows.at["kv"]),
    ]
    return grid.finish(quantity(x), axes, rows, lambda q: seconds(q, rows))


def fit_prefill(kind: str, rows: Rows) -> Quantity:
    """Fit causal attention of a layer: its least time, its tile time and rates, then correction factors.

    The axes of these factors are tokens, prompts times query heads, and query heads per KV head.
    """
    spec, fit = quantities.gpu(kind), rows.fitted
    dims = sorted({int(d) for d in fit.at["d"]})

    def quantity(x: F8) -> Quantity:
        q = {"floor_s": x[0] * 1e-6, "tile_s": x[1] * 1e-6, "hbm_frac": min(x[2], grid.CAP)}
        return q | {"longest": x[3], "power": x[4], "head_dims": dims, "flops_frac": list(x[5:])}

    start = [9, 0.5, 0.5, 0.5, 1.5] + [0.6] * len(dims)
    x = grid.minimise(lambda x: kernels.prefill_s(quantity(x), spec, **fit.at), fit.seconds, [start])
    axes = [
        ("tokens", [16, 64, 256, 512, 1024, 2048, 4096, 8192], rows.at["tokens"]),
        ("n x heads", [1, 8, 64, 512, 4096], rows.at["n"] * rows.at["heads"]),
        ("heads a KV head", [1, 2, 4, 16], rows.at["heads"] / rows.at["kv"]),
    ]
    q = grid.finish(quantity(x), axes, rows, lambda q: kernels.prefill_s(q, spec, **rows.at))
    return {
        "source": source_of(kind, "context_attention")
        + ", flash attention; no chunk with a prefix was measured (area law)"
        + (", head_dim 128 only" if kind == "a100-80g" else ""),
        "formula": "(floor + max(bytes / hbm, (tiles over SMs ^ p + longest tile ^ p) ^ 1/p)) x factors",
        **q,
    }


def fit_all_reduce(kind: str) -> Quantity:
    """Fit the seconds of all-reduces in CUDA graphs."""
    source = source_of(kind, "custom_allreduce") + ", in a CUDA graph; sizes count bf16 elements"
    return {"source": source, **_by_size(profiles.all_reduce(kind))}


def _by_size(d: pd.DataFrame) -> Quantity:
    """Fit seconds at every second message size; the other sizes, which include the largest, are held out."""
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
    formula = "log-log interpolation over elements, linear beyond the last"
    return {"formula": formula, **q, **grid.errors(predicted, rows)}


# Bytes/s between GPUs of kinds whose collectives are those of a kind with faster links.
WIRES = {
    "h800": (160e9, "NVLink at the 160 GB/s that DeepSeek plans with"),
    "a10": (24.8e9, "PCIe 4 at 24.8 GB/s, for it has no NVLink"),
}


def fit_exchanges(kind: str) -> dict[str, Quantity]:
    """Fit NCCL's collectives for data-parallel attention; sizes count the elements of all ranks.

    B200's collectives were not measured. They are copied from H200, but their time beyond that of the shortest call is
    scaled by the ratio of the NVLink rates.
    """
    like = "h200" if kind == "b200" else kind
    d, source = profiles.exchanges(like)
    out: dict[str, Quantity] = {}
    for op in quantities.EXCHANGES:
        q: Quantity = {"source": f"{source}, {op}; sizes count 16-bit elements of all GPUs"}
        q |= _by_size(d[d.op_name == op])
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
    """Estimate the small kernels of a layer, which were not measured one by one, from a least time and their bytes.

    The least times of A100, H100 and H800 are known. For other GPU kinds, the least time is linear in 1 / bandwidth,
    along the line through A100 and H100.
    """
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

PRIOR_ROWS = 30  # the prior "scale = 1" weighs as many rows; 134 are measured


def predict_steps(d: pd.DataFrame, t: Tables, row_of: Mapping[str, int]) -> F8:
    """Return the seconds that cost tables predict for the rows of `whole_steps`."""
    rows = {model: profile.row(t, i) for model, i in row_of.items()}

    def seconds(model: str, phase: str, prompt: int, batch: int) -> float:
        if phase == "decode":
            return profile.step_s(rows[model], B=batch, C=batch * prompt)
        return profile.step_s(rows[model], p=batch * prompt, n=batch, area=batch * prompt * prompt / 2)

    return np.array([seconds(*r) for r in zip(d.model, d.phase, d.prompt, d.batch, strict=True)])


def fit_engine(kind: str, q: Quantity) -> tuple[Quantity, pd.DataFrame]:
    """Fit eager vLLM's overhead on one model: host seconds per step and per sequence, and two scales on kernel time.

    One scale is for prefill kernels, the other for decode kernels. The fit is by reweighted relative least squares.
    Return the fitted quantity, and all measured steps with their predicted seconds.
    """
    spec, base = quantities.gpu(kind), quantities.host("none", kind)
    q = {**q, "co_run": quantities.quantities(kind)["co_run"]}  # which is not fitted here
    d, fitted = profiles.whole_steps(kind), ENGINES[kind][1]
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
    out |= grid.errors(d.predicted.to_numpy(), Rows({}, d.seconds.to_numpy(), held))
    return out, d


# ---------------------------------------------------------------------------------------------------- SM shares


def share_speeds(d: pd.DataFrame, q: Quantity, share: Quantity, scale: float) -> F8:
    """Return the predicted speed of steps on shares of the SMs, as a fraction of their speed on all SMs.

    Only the kernels of a step slow down. MuxServe's kernels were slower than those in `q`. So a decode step's kernels
    are assumed to take `scale` times the seconds that `q` gives, but at most the whole step. A prefill is assumed to
    consist of kernels alone.
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
    """Fit the speed of kernels on shares of the SMs to MuxServe's 7B model; its 13B model is held out."""
    d = profiles.shares()
    seven = d[d.model == "7b"]

    def share(x: F8) -> Quantity:
        return {"arith_power": x[0], "saturation": x[1], "power": min(x[2], 16.0)}

    x = grid.minimise(
        lambda x: share_speeds(seven, q, share(x), x[3]),
        (seven.whole / seven.seconds).to_numpy(),
        [(0.8, 0.4, 3.0, 1.2)],
        (1e-3, 1e-2),
    )
    out, scale = grid.rounded(share(x)), sig(float(x[3]))
    d["predicted"] = share_speeds(d, q, out, scale)
    d["speed"] = d.whole / d.seconds
    held = {f"13b {p}": ((d.model == "13b") & (d.phase == p)).to_numpy() for p in ("prefill", "decoding")}
    return {
        "source": "MuxServe 2231480, examples/placement/llama.json (A100), 7B fitted, batch <= 128",
        "formula": "arithmetic x share^arith_power, HBM saturating at `saturation` of the SMs, floors and host"
        f" unchanged; in decode that engine's kernels taken as {scale} times ours",
        **out,
        **grid.errors(d.predicted.to_numpy(), Rows({}, d.speed.to_numpy(), held)),
    }, d


def fit(say: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Return all files of `tables/` by file stem: the committed tables, with every fitted quantity fitted again."""
    files: dict[str, dict[str, Any]] = {
        p.stem: tomllib.loads(p.read_text(encoding="utf-8")) for p in sorted(quantities.TABLES.glob("*.toml"))
    }
    for kind in FOLDERS:
        files[kind] |= {
            "gemm": fit_gemm(kind, profiles.gemm(kind)),
            "prefill": fit_prefill(kind, profiles.prefill(kind)),
            "decode": fit_decode(kind, profiles.decode(kind)),
            "all_reduce": fit_all_reduce(kind),
            **fit_exchanges(kind),
        }
        files[kind] |= formats.fit(kind, files[kind]["gemm"])
        fitted = [op for op in files[kind] if op.startswith(("gemm", "prefill", "decode", "all_reduce", "experts_"))]
        for op in fitted:
            say(f"{kind} {op}: {quantities.error(files[kind][op])}")
    for kind in quantities.gpu_kinds():
        files[kind]["small"] = small(kind)
        like = files[kind].get("like")
        if like and kind != "h800":  # H100's chip keeps H100's errors; other cards take coefficients on trust
            others = [op for op in files[like] if op.startswith(("gemm_", "experts_"))]
            ops = ("gemm", "prefill", "decode", "all_reduce", *quantities.EXCHANGES, *others)
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
    say(f"share: {quantities.error(share)}")
    for kind in quantities.gpu_kinds():
        files[kind]["share"] = share if kind == "a100-80g" else _unmeasured(share, "a100-80g")

    eager, sigma = files["hosts"]["host"]["vllm-eager"], {}
    eager["on"] = {}
    for kind in ENGINES:
        eager["on"][kind], steps = fit_engine(kind, of_kind(kind))
        say(f"vllm-eager {kind}: {quantities.error(eager['on'][kind])}")
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
    """Return the source text of a quantity that was not measured, but takes its coefficients from GPU kind `like`."""
    return f"roofline: coefficients of {like} at this card's own peaks, unmeasured"


def _unmeasured(q: Mapping[str, Any], like: str) -> Quantity:
    kept = {k: v for k, v in q.items() if k not in quantities.ERRORS}
    return kept | {"source": f"roofline: coefficients of {like}, unmeasured on this kind"}


# ---------------------------------------------------------------------------------------------------- looking at it


# Slowdowns that others published of Llama-3.1-8B on some SMs of a card: of decodes, 32 x 1k, and of prefills. All were
# measured on SGLang, whose host time does not overlap when phases are multiplexed.
PUBLISHED = (
    ("h800", 132, "SGLang", (8, 16, 32, 64, 96), (3.4, 1.9, 1.34, 1.06, 1.03), (6.5, 3.5, 2.1, 1.35, 1.15)),
    ("a100-80g", 104, "SGLang", (8, 16, 32, 64, 96), (3.0, 1.85, 1.26, 1.05, 1.0), (7.0, 3.7, 2.0, 1.26, 1.01)),
    ("h200", 132, "omni 1934", (32, 48, 64, 80, 96), (1.33, 1.21, 1.09, 1.08, 1.06), (2.5, 1.83, 1.49, 1.3, 1.18)),
)


def anchors() -> Iterator[tuple[str, float, float]]:
    """Yield (condition, slowdown in our tables, published slowdown) for steps on part of the SMs.

    The published slowdowns check the tables, because no table was fitted to them.
    """
    shape = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192)
    for kind, of, whose, sms, decode, prefill in PUBLISHED:
        t = coefficients.tables([(shape, 1)], kind, "sglang-eager-2024")
        at_32 = t.dec_rate[0, :, int(np.searchsorted(t.seqs, 32))]
        for what, rate, published in (("decode, 32 x 1k", at_32, decode), ("prefill", t.pre_rate[0], prefill)):
            for n, times in zip(sms, published, strict=True):
                yield f"{kind} {what}, {n} of {of} SMs ({whose})", float(1 / np.interp(n / of, t.share, rate)), times


def points() -> pd.DataFrame:
    """Return every measured kernel and step, with the seconds that the committed tables predict.

    Columns: panel, gpu, op, model, held, measured_s, predicted_s.
    """
    frames = list[pd.DataFrame]()

    def add(panel: str, gpu: str, op: Any, model: Any, held: Any, measured: Any, predicted: F8) -> None:
        columns = {"panel": panel, "gpu": gpu, "op": op, "model": model, "held": held}
        frames.append(pd.DataFrame({**columns, "measured_s": measured, "predicted_s": predicted}))

    ops: Sequence[tuple[str, Callable[[str], Rows], Callable[..., F8]]] = (
        ("gemm", profiles.gemm, kernels.gemm_s),
        ("prefill", profiles.prefill, kernels.prefill_s),
        ("decode", profiles.decode, kernels.decode_s),
    )
    for kind, (op, read, seconds) in product(FOLDERS, ops):
        rows = read(kind)
        predicted = seconds(quantities.quantities(kind)[op], quantities.gpu(kind), **rows.at)
        add("kernels", kind, op, "", rows.out, rows.seconds, predicted)
    for kind, (_, fitted) in ENGINES.items():
        d = profiles.whole_steps(kind)
        models = list(dict.fromkeys(d.model))
        t = coefficients.tables([(DENSE[m], 1) for m in models], kind, "vllm-eager")
        predicted = predict_steps(d, t, {m: i for i, m in enumerate(models)})
        add("steps", kind, d.phase, d.model, d.model != fitted, d.seconds, predicted)
    return pd.concat(frames, ignore_index=True)
