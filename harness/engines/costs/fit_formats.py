"""Fit GEMMs and routed experts by number format: `PROFILES_DIR=... python -m harness.engines.costs.fit_formats`.

Adds to `tables/` what `fit` does not: `gemm_FORMAT` (torch and CUTLASS kernels of vLLM; on A100 the weight-only ones of
TensorRT-LLM) and `experts_FORMAT` (fused MoE), on AIConfigurator's measurements of 2026. Tables of 16 bits stay as they
are. Rows are clamped to physics as in `fit`. Of experts, two shapes a format are left out of the fit (`held`), and all
rows of expert parallelism (`parallel_parts`); their errors stand beside the fit's.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from harness.engines.costs import experts, fit, kernels, quantities
from harness.engines.costs.fit import F8, Quantity, Rows

FOLDERS = {
    "a100-80g": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s", "b200": "b200_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
VERSION = {
    "a100-80g": "0.14.0", "h100": "0.25.0", "h200": "0.25.0", "l40s": "0.24.0", "b200": "0.25.0",
    "rtx-pro-6000": "0.24.0",
}  # fmt: skip


class Kind(NamedTuple):
    """A number format as the profiles name it, with its bytes, and its arithmetic in bf16's."""

    name: str  # in the profiles
    weight_bytes: float
    input_bytes: float
    flops_x: int


GEMMS = {
    "fp8": Kind("fp8", 1, 1, 2),
    "fp8_block": Kind("fp8_block", 1 + 4 / 128**2, 1, 2),
    "nvfp4": Kind("nvfp4", 0.5625, 0.5625, 4),
    "int4": Kind("int4_wo", 0.5 + 2 / 128, 2, 1),
    "int8": Kind("int8_wo", 1, 2, 1),
}
EXPERTS = {
    "bf16": Kind("bfloat16", 2, 2, 1),
    "fp8": Kind("fp8", 1, 1, 2),
    "fp8_block": Kind("fp8_block", 1 + 4 / 128**2, 1, 2),
    "nvfp4": Kind("nvfp4", 0.5625, 0.5625, 4),
    "mxfp4": Kind("w4a16_mxfp4", 0.53125, 2, 1),
    "int4": Kind("int4_wo", 0.5 + 2 / 128, 2, 1),
}
# On Blackwell vLLM multiplies MXFP4 weights with MXFP8 inputs.
OF_KIND = {("b200", "mxfp4"): Kind("w4a8_mxfp4_mxfp8", 0.53125, 1 + 1 / 32, 2)}
# Kernels of which rows are taken, where a format has several: gpt-oss's, the one checkpoint in MXFP4 here.
KERNEL = {"w4a16_mxfp4": "gptoss"}


class Instead(NamedTuple):
    """A quantity whose rows are of no kernel that a server would run, and the one by which it is priced."""

    of: str
    slower: float  # of the arithmetic
    why: str


EXPORTED = (
    "Its rows are of one kernel, by which checkpoints that ModelOpt exported run on FlashInfer's CUTLASS. Steps of up"
    " to 64 tokens take {} times as long as in 16 bits, in the median"
)
PRICED_AS = {
    ("h100", "experts_fp8"): Instead("experts_fp8_block", 1.0, EXPORTED.format(2.4)),
    ("h200", "experts_fp8"): Instead("experts_fp8_block", 1.0, EXPORTED.format(3.1)),
    ("l40s", "gemm_fp8_block"): Instead(
        "gemm_fp8",
        1.34,
        "Its rows take 0.29 ms and more whatever their size: a launch outside of CUDA graphs. At 8,192 tokens, where"
        " that does not show, they take 1.34 times as long as fp8's, in the median",
    ),
}
# Shapes (hidden, width, top, routed) left out of the fit, where a format has others.
HELD = ((2880, 2880, 4, 32), (4096, 1536, 8, 128), (6144, 2560, 8, 160), (4096, 14336, 2, 8))
DEGREES = (2, 4, 8)  # of expert parallelism: as many GPUs as an instance may have
LONG = 1024  # tokens of a step from which errors of expert parallelism are stated apart
# Starts of the fit of experts (us, ns, shares of peaks, multiple): one bound by weights, and one by launches.
STARTS = ([20, 100, 0.7, 0.4, 2.0], [40, 1000, 0.2, 0.15, 5.0])
FEW = 1500  # rows that find the mechanism's parameters; the factors take all
AXES = (
    ("tokens", [1, 2, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384]),
    ("experts", [8, 32, 128, 512]),
    ("KiB an expert", [512, 2048, 8192, 32768, 131072]),
)


def read(kind: str, stem: str) -> pd.DataFrame:
    """Read a table of a GPU kind's profile, with latencies in seconds; an empty one where there is none."""
    path = fit.profiles() / "aiconfigurator-2026" / FOLDERS[kind] / f"{stem}.parquet"
    d = pd.read_parquet(path) if path.is_file() else pd.DataFrame()
    return d.assign(seconds=d.latency * 1e-3) if len(d) else d


def gemm_rows(kind: str, form: Kind) -> Rows | None:
    """Return a format's GEMMs of a layer's size; None where none was measured."""
    d = read(kind, "gemm_perf_trtllm_weight_only" if form.name.endswith("_wo") else "gemm_perf")
    d = d[(d.gemm_dtype == form.name) & (d.n >= 512) & (d.k >= 512)] if len(d) else d
    if len(d) < FEW:
        return None
    d = d.sort_values(["m", "n", "k"])
    m, n, k = (d[c].to_numpy(np.float64) for c in "mnk")
    spec = quantities.gpu(kind)
    moved = form.input_bytes * m * k + form.weight_bytes * n * k + 2 * m * n
    physics = np.maximum(moved / spec.hbm, 2 * m * n * k / (form.flops_x * spec.flops))
    y = np.maximum(d.seconds.to_numpy(), physics / 0.95)
    held = {"m 128 to 512": (m >= 128) & (m <= 512), "largest m": m == m.max()}
    rows = Rows({"m": m, "n": n, "k": k}, y, held)
    if kind == "l40s":  # its cache holds what a benchmark repeats
        return rows.pick(~((moved < 96e6) & (moved / spec.hbm > 0.1 * y)))
    return rows


def fit_gemm(kind: str, name: str, plain: Quantity, rows: Rows) -> Quantity:
    """Fit launch, fill, bandwidth and rate of a format's GEMMs, tiles as bf16's, and their factors over (m, n, k)."""
    form, spec = GEMMS[name], quantities.gpu(kind)
    few = _few(rows)

    def quantity(x: F8) -> Quantity:
        tiles = [[tm, tn, min(0.95, rate * x[3])] for tm, tn, rate in plain["tiles"]]
        q = {"launch_s": x[0] * 1e-6, "fill_s": x[1] * 1e-6, "hbm_frac": min(x[2], 0.95), "tiles": tiles}
        return q | {"weight_bytes": form.weight_bytes, "input_bytes": form.input_bytes, "flops_x": form.flops_x}

    start = [1e6 * plain["launch_s"], 1e6 * plain["fill_s"], plain["hbm_frac"], 0.9]
    x = _minimise(lambda x: kernels.gemm_s(quantity(x), spec, **few.x), few.y, [start])
    q = fit._finish(
        quantity(x),
        [(of, list(knots), rows.x[of]) for of, knots in zip("mnk", plain["axes"], strict=True)],
        rows,
        lambda q: kernels.gemm_s(q, spec, **rows.x),
    )
    whose = "TensorRT-LLM 1.0.0" if form.name.endswith("_wo") else f"vLLM {VERSION[kind]}"
    return {"source": fit.AIC_NEW.format(f"gemm, {form.name}", VERSION[kind]).replace(f"vLLM {VERSION[kind]}", whose),
            "formula": "as gemm, by the bytes and arithmetic of the format", **q}  # fmt: skip


def expert_rows(kind: str, form: Kind, degrees: Sequence[int] = (1,)) -> Rows | None:
    """Return a format's fused experts at degrees of expert parallelism; None where none was measured."""
    d = read(kind, "moe_perf")
    d = d[(d.moe_dtype == form.name) & d.kernel_source.str.contains(KERNEL.get(form.name, ""))] if len(d) else d
    if not len(d):
        return None
    keys = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution"]
    d = d[d.distribution.isin(experts.SPREADS) & d.moe_ep_size.isin(degrees)].sort_values([*keys, "num_tokens"])
    shape = list(zip(*(d[k] for k in keys[:4]), strict=True))
    shapes = set(shape)
    left = [s for s in HELD if s in shapes][: 2 if len(shapes) > 3 else max(0, len(shapes) - 2)]
    held = {f"experts {s}": np.array([at == s for at in shape]) for s in left}
    held["largest step"] = (d.num_tokens == d.num_tokens.max()).to_numpy()
    x = {k: d[k].to_numpy() for k in (*keys, "num_tokens")}
    return Rows(x, d.seconds.to_numpy(np.float64), held)


def experts_s(q: Quantity, kind: str, form: Kind, x: Mapping[str, Any]) -> F8:
    """Return the predicted seconds of measured calls, group by group of equal shapes."""
    spec = quantities.gpu(kind)
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    key = np.stack([x[name].astype(np.int64) for name in names])
    spread = x["distribution"].astype(str)
    out = np.empty(len(spread))
    _, group = np.unique(np.concatenate([key.astype(str), spread[None]]), axis=1, return_inverse=True)
    for g in range(group.max() + 1):
        at = np.flatnonzero(group.ravel() == g)
        hidden, width, top, routed, tp, ep = (int(v) for v in key[:, at[0]])
        tokens = x["num_tokens"][at].astype(np.float64)
        out[at] = experts.experts_s(
            q, spec, tokens, hidden, width / tp, top, routed, form.weight_bytes, str(spread[at[0]]), ep=ep
        )
    return out


def parallel_errors(q: Quantity, kind: str, form: Kind) -> dict[str, dict[str, float | int]]:
    """Return the errors on rows of expert parallelism, by degree and length of the step; `bias` is their median."""
    if (rows := expert_rows(kind, form, DEGREES)) is None:
        return {}
    predicted, ep, long = experts_s(q, kind, form, rows.x), rows.x["moe_ep_size"], rows.x["num_tokens"] >= LONG
    parts = {
        f"ep {degree}, {'from' if lengthy else 'below'} {LONG} tokens": (ep == degree) & (long == lengthy)
        for degree in DEGREES
        for lengthy in (False, True)
    }
    return {
        what: {
            **fit.error(predicted[part], rows.y[part]),
            "bias": round(float(np.median(predicted[part] / rows.y[part] - 1)), 4),
        }
        for what, part in parts.items()
        if part.any()
    }


def fit_experts(kind: str, name: str, rows: Rows) -> Quantity:
    """Fit launch, bandwidth, rate and moved rows of a format's experts, and factors over tokens, experts, bytes."""
    form = OF_KIND.get((kind, name), EXPERTS[name])
    few = _few(rows)

    def quantity(x: F8) -> Quantity:
        q = {"launch_s": x[0] * 1e-6, "expert_s": x[1] * 1e-9, "hbm_frac": min(x[2], 0.95)}
        return q | {"flops_frac": min(x[3], 0.95), "move_x": x[4], "flops_x": form.flops_x}

    x = _minimise(lambda x: experts_s(quantity(x), kind, form, few.x), few.y, STARTS)
    weights = 3 * rows.x["hidden_size"] * (rows.x["inter_size"] / rows.x["moe_tp_size"]) * form.weight_bytes / 1024
    at = (rows.x["num_tokens"], rows.x["num_experts"], weights)
    q = fit._finish(
        quantity(x),
        [(of, list(knots), value.astype(np.float64)) for (of, knots), value in zip(AXES, at, strict=True)],
        rows,
        lambda q: experts_s(q, kind, form, rows.x),
    )
    fitted = ~rows.out
    by_spread = {
        s: fit.error(experts_s(q, kind, form, rows.pick(mask).x), rows.pick(mask).y)
        for s in experts.SPREADS
        if (mask := fitted & (rows.x["distribution"].astype(str) == s)).any()
    }
    return {
        "source": fit.AIC_NEW.format(f"moe, {form.name}", VERSION[kind]) + ", fused experts without router",
        "formula": "(launch + touched x expert_s + max(bytes of experts touched / hbm, tiled rows) + rows moved)"
        " x factors(tokens, experts, KiB an expert); engines/costs/experts.py",
        **q,
        "fit_parts": by_spread,
        "parallel_parts": parallel_errors(q, kind, form),
    }


def _few(rows: Rows) -> Rows:
    fitted = np.flatnonzero(~rows.out)
    return rows.pick(np.sort(np.random.default_rng(0).permutation(fitted)[:FEW]))


def _minimise(seconds: Callable[[F8], F8], y: F8, starts: Sequence[Sequence[float]]) -> F8:
    """Return the parameters with the least loss, of the local minima that the starts lead to."""

    def residuals(x: F8) -> F8:
        return cast("F8", np.clip(np.log(seconds(np.exp(x)) / y), -1, 1))

    bounds = (np.log(1e-9), np.log(1e4))
    fits = [
        least_squares(
            residuals, np.log(start), loss="soft_l1", f_scale=0.1, diff_step=[1e-2] * len(start), bounds=bounds,
            max_nfev=15,
        )
        for start in starts
    ]  # fmt: skip
    return cast("F8", np.exp(min(fits, key=lambda got: got.cost).x))


def added(kind: str, q: Quantity, log: Callable[[str], None] = print) -> Quantity:
    """Return the quantities of formats for a GPU kind whose own are `q`."""
    out: Quantity = {}
    for name, form in GEMMS.items():
        if (rows := gemm_rows(kind, form)) is not None:
            out[f"gemm_{name}"] = fit_gemm(kind, name, q["gemm"], rows)
            log(f"{kind} gemm_{name}: {quantities.error(out[f'gemm_{name}'])}")
    for name, usual in EXPERTS.items():
        form = OF_KIND.get((kind, name), usual)
        if (measured := expert_rows(kind, form)) is not None:
            out[f"experts_{name}"] = fit_experts(kind, name, measured)
            log(f"{kind} experts_{name}: {quantities.error(out[f'experts_{name}'])}")
    return out | {name: priced_as(out[name], out[it.of], it) for (on, name), it in PRICED_AS.items() if on == kind}


def priced_as(q: Quantity, its: Quantity, instead: Instead) -> Quantity:
    """Return a quantity with the coefficients of another one, whose errors are none of its own."""
    kept = {key: value for key, value in its.items() if key not in quantities.ERRORS}
    if "tiles" in kept:
        kept["tiles"] = [[tm, tn, quantities.sig(rate / instead.slower)] for tm, tn, rate in kept["tiles"]]
    return {**kept, "source": f"roofline: as {instead.of}. {q['source']}. {instead.why}"}


def main(argv: Sequence[str]) -> None:
    """Rewrite the quantities of formats in `tables/`, of the GPU kinds named or of all."""
    for kind in argv or FOLDERS:
        path = quantities.TABLES / f"{kind}.toml"
        file = tomllib.loads(path.read_text(encoding="utf-8"))
        path.write_text(fit.dumps(file | added(kind, file)), encoding="utf-8")
    quantities.forget()


if __name__ == "__main__":
    main(sys.argv[1:])
