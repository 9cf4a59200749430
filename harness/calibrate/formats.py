"""Fit GEMMs and routed experts by number format: quantities `gemm_FORMAT` and `experts_FORMAT` of a cost table.

The GEMMs were measured in torch and in vLLM's CUTLASS kernels; on A100, in TensorRT-LLM's weight-only kernels. The
experts were measured in fused MoE kernels. The fit of experts leaves out two shapes of each format and all rows with
expert parallelism. The table stores the errors on these rows as `held` and `parallel_parts`, next to those of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate import grid, profiles
from harness.calibrate.profiles import AIC_NEW, VERSION_FORMATS, Form
from harness.calibrate.rows import F8, Rows
from harness.calibrate.tables import Quantity, error
from harness.engines.costs import experts, kernels, quantities

GEMMS = {
    "fp8": Form("fp8", 1, 1, 2),
    "fp8_block": Form("fp8_block", 1 + 4 / 128**2, 1, 2),
    "nvfp4": Form("nvfp4", 0.5625, 0.5625, 4),
    "int4": Form("int4_wo", 0.5 + 2 / 128, 2, 1),
    "int8": Form("int8_wo", 1, 2, 1),
}
EXPERTS = {
    "bf16": Form("bfloat16", 2, 2, 1),
    "fp8": Form("fp8", 1, 1, 2),
    "fp8_block": Form("fp8_block", 1 + 4 / 128**2, 1, 2),
    "nvfp4": Form("nvfp4", 0.5625, 0.5625, 4),
    "mxfp4": Form("w4a16_mxfp4", 0.53125, 2, 1),
    "int4": Form("int4_wo", 0.5 + 2 / 128, 2, 1),
}
# On Blackwell vLLM multiplies MXFP4 weights with MXFP8 inputs.
OF_KIND = {("b200", "mxfp4"): Form("w4a8_mxfp4_mxfp8", 0.53125, 1 + 1 / 32, 2)}


class Instead(NamedTuple):
    """A substitute for a quantity that was measured only on kernels that no server would run.

    `of` names the quantity whose numbers are used instead.
    """

    of: str
    slower: float  # factor by which arithmetic takes longer
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
DEGREES = (2, 4, 8)  # degrees of expert parallelism: as many GPUs as an instance may have
LONG = 1024  # tokens of a step from which errors of expert parallelism are stated apart
# Starts of the fit of experts (us, ns, shares of peaks, multiple): one bound by weights, and one by launches.
STARTS = ([20, 100, 0.7, 0.4, 2.0], [40, 1000, 0.2, 0.15, 5.0])
FEW = 1500  # rows on which the mechanism's parameters are fitted; factors are fitted on all
SOON = (1e-2,), 15  # steps of the derivative, and the most evaluations
AXES = (
    ("tokens", [1, 2, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384]),
    ("experts", [8, 32, 128, 512]),
    ("KiB an expert", [512, 2048, 8192, 32768, 131072]),
)


def fit_gemm(kind: str, name: str, plain: Quantity, rows: Rows) -> Quantity:
    """Fit the GEMMs of a number format; the tile sizes are those of the 16-bit fit.

    Four numbers are fitted first: the launch time, the seconds of a wave of tiles, the fraction of peak HBM bandwidth,
    and one factor on all tile rates. Then correction factors over (m, n, k) are fitted.
    """
    form, spec, few = GEMMS[name], quantities.gpu(kind), rows.few(FEW)

    def quantity(x: F8) -> Quantity:
        tiles = [[tm, tn, min(grid.CAP, rate * x[3])] for tm, tn, rate in plain["tiles"]]
        q = {"launch_s": x[0] * 1e-6, "fill_s": x[1] * 1e-6, "hbm_frac": min(x[2], grid.CAP), "tiles": tiles}
        return q | {"weight_bytes": form.weight_bytes, "input_bytes": form.input_bytes, "flops_x": form.flops_x}

    start = [1e6 * plain["launch_s"], 1e6 * plain["fill_s"], plain["hbm_frac"], 0.9]
    x = grid.minimise(lambda x: kernels.gemm_s(quantity(x), spec, **few.at), few.seconds, [start], *SOON)
    axes = [(of, knots, rows.at[of]) for of, knots in zip("mnk", plain["axes"], strict=True)]
    q = grid.finish(quantity(x), axes, rows, lambda q: kernels.gemm_s(q, spec, **rows.at))
    whose = ("TensorRT-LLM", "1.0.0") if form.name.endswith("_wo") else ("vLLM", VERSION_FORMATS[kind])
    return {
        "source": AIC_NEW.format(f"gemm, {form.name}", *whose),
        "formula": "as gemm, by the bytes and arithmetic of the format",
        **q,
    }


def experts_s(q: Quantity, kind: str, form: Form, x: Mapping[str, Any]) -> F8:
    """Return the predicted seconds of each measured call of a format's experts.

    Calls of equal shapes are predicted together.
    """
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


def parallel_errors(q: Quantity, kind: str, form: Form) -> dict[str, dict[str, float | int]]:
    """Return the errors on measurements with expert parallelism.

    Errors are grouped by the degree of parallelism, and by steps below LONG tokens and steps of at least LONG tokens.
    The `bias` of a group is the median of its signed relative errors.
    """
    rows = profiles.mixture(kind, form, DEGREES)
    if not len(rows.seconds):
        return {}
    predicted, ep, long = experts_s(q, kind, form, rows.at), rows.at["moe_ep_size"], rows.at["num_tokens"] >= LONG
    parts = {
        f"ep {degree}, {'from' if lengthy else 'below'} {LONG} tokens": (ep == degree) & (long == lengthy)
        for degree in DEGREES
        for lengthy in (False, True)
    }
    return {
        what: {
            **error(predicted[part], rows.seconds[part]),
            "bias": round(float(np.median(predicted[part] / rows.seconds[part] - 1)), 4),
        }
        for what, part in parts.items()
        if part.any()
    }


def fit_experts(kind: str, name: str, rows: Rows) -> Quantity:
    """Fit the fused experts of a number format.

    Five numbers are fitted first. They are the launch time, the seconds of an expert, the fractions of peak bandwidth
    and of peak arithmetic, and a factor on the time to move rows of activations. Then correction factors are fitted.
    Their axes are tokens, experts, and the KiB of an expert.
    """
    form = OF_KIND.get((kind, name), EXPERTS[name])
    few = rows.few(FEW)

    def quantity(x: F8) -> Quantity:
        q = {"launch_s": x[0] * 1e-6, "expert_s": x[1] * 1e-9, "hbm_frac": min(x[2], grid.CAP)}
        return q | {"flops_frac": min(x[3], grid.CAP), "move_x": x[4], "flops_x": form.flops_x}

    x = grid.minimise(lambda x: experts_s(quantity(x), kind, form, few.at), few.seconds, STARTS, *SOON)
    weights = 3 * rows.at["hidden_size"] * (rows.at["inter_size"] / rows.at["moe_tp_size"]) * form.weight_bytes / 1024
    at = (rows.at["num_tokens"], rows.at["num_experts"], weights)
    axes = [(of, knots, value.astype(np.float64)) for (of, knots), value in zip(AXES, at, strict=True)]
    q = grid.finish(quantity(x), axes, rows, lambda q: experts_s(q, kind, form, rows.at))
    fitted, spread = rows.fitted, rows.fitted.at["distribution"].astype(str)
    by_spread = {
        s: error(experts_s(q, kind, form, of.at), of.seconds)
        for s in experts.SPREADS
        if len((of := fitted.pick(spread == s)).seconds)
    }
    return {
        "source": AIC_NEW.format(f"moe, {form.name}", "vLLM", VERSION_FORMATS[kind]) + ", fused experts without router",
        "formula": "(launch + touched x expert_s + max(bytes of experts touched / hbm, tiled rows) + rows moved)"
        " x factors(tokens, experts, KiB an expert); engines/costs/experts.py",
        **q,
        "fit_parts": by_spread,
        "parallel_parts": parallel_errors(q, kind, form),
    }


def fit(kind: str, plain: Quantity) -> Quantity:
    """Fit GEMMs and experts of each number format that has enough measured rows on a GPU kind.

    Return the quantities by name: `gemm_FORMAT`, `experts_FORMAT`. `plain` is the fitted quantity of 16-bit GEMMs.
    """
    out: Quantity = {}
    for name, form in GEMMS.items():
        if len((rows := profiles.gemm(kind, form)).seconds) >= FEW:
            out[f"gemm_{name}"] = fit_gemm(kind, name, plain, rows)
    for name, form in EXPERTS.items():
        if len((rows := profiles.mixture(kind, OF_KIND.get((kind, name), form))).seconds):
            out[f"experts_{name}"] = fit_experts(kind, name, rows)
    return out | {name: priced_as(out[name], out[x.of], x) for (gpu, name), x in PRICED_AS.items() if gpu == kind}


def priced_as(replaced: Quantity, other: Quantity, instead: Instead) -> Quantity:
    """Return the quantity to use in place of `replaced`: a copy of `other`, without the errors of its fit.

    The rates of its tiles are divided by `instead.slower`.
    """
    kept = {key: value for key, value in other.items() if key not in quantities.ERRORS}
    if "tiles" in kept:
        kept["tiles"] = [[tm, tn, quantities.sig(rate / instead.slower)] for tm, tn, rate in kept["tiles"]]
    return {**kept, "source": f"roofline: as {instead.of}. {replaced['source']}. {instead.why}"}
