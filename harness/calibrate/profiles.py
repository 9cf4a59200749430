"""Read the public profiles in `PROFILES_DIR`: kernels of AIConfigurator, steps of Aegaeon, SM shares of MuxServe.

No measurement may beat physics. The least possible time is the time at 95 % of the card's peak bandwidth or arithmetic;
shorter measured times are raised to it. L40S has a cache of 96 MB. A benchmark that repeats a kernel finds its data in
this cache; the layers of a model do not. So rows of L40S whose bytes fit the cache are dropped, unless reading these
bytes from HBM would take at most a tenth of the measured time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from harness.calibrate.rows import F8, Mask, Rows
from harness.engines.costs import experts, quantities
from harness.policy.types import Shape, UserError

OLD, NEW = "aiconfigurator", "aiconfigurator-2026"
FOLDERS = {
    "a100-80g": f"{OLD}/a100_sxm",
    "h100": f"{OLD}/h100_sxm",
    "h200": f"{OLD}/h200_sxm",
    "l40s": f"{OLD}/l40s",
    "b200": f"{NEW}/b200_sxm",
    "rtx-pro-6000": f"{NEW}/rtx_pro_6000_server",
}
AIC = "AIConfigurator 095f58a ({}), {} {}, Apache-2.0"
AIC_NEW = "AIConfigurator, PyPI aisimulate 0.13.0.dev202610270000000085 ({}), {} {}, Apache-2.0"
VERSION = dict.fromkeys(FOLDERS, "0.24.0") | {"a100-80g": "0.14.0", "b200": "0.25.0"}
VERSION_FORMATS = VERSION | {"h100": "0.25.0", "h200": "0.25.0"}
ATTENTION = {"b200": "flashinfer"}  # a word in the names of attention's kernels; for other kinds: flash_attn
HELD_HEADS = ((24, 8), (40, 8))
CACHE_BYTES = {"l40s": 96e6}
LONGEST = 1 << 16  # tokens of a step: four times the simulator's largest
MOST_SEQS = 256  # the simulator's largest batch


def folder() -> Path:
    """Return the folder of the public profiles, from `PROFILES_DIR`. Raises UserError if they are not there."""
    where = os.environ.get("PROFILES_DIR", "")
    if not (Path(where) / OLD).is_dir():
        raise UserError(f"PROFILES_DIR={where!r} has no aiconfigurator folder; set it to the public latency profiles")
    return Path(where)


def source_of(kind: str, op: str) -> str:
    """Return the text that names the source of a quantity fitted to a profile in 16 bits."""
    return (AIC if FOLDERS[kind].startswith(f"{OLD}/") else AIC_NEW).format(op, "vLLM", VERSION[kind])


def within(kind: str, seconds: F8, nbytes: F8, flops: F8, flops_x: int = 1) -> tuple[F8, Mask]:
    """Return the measured seconds, raised where they are too short to be true, and a mask of the rows to keep.

    The module's docstring explains both rules. `flops_x` is the peak arithmetic of the format as a multiple of bf16's.
    """
    spec = quantities.gpu(kind)
    y = np.maximum(seconds, np.maximum(nbytes / (0.95 * spec.hbm), flops / (0.95 * flops_x * spec.flops)))
    return y, ~((nbytes < CACHE_BYTES.get(kind, 0.0)) & (nbytes / spec.hbm > 0.1 * y))


# ------------------------------------------------------------------------------------------------------------- GEMMs


class Form(NamedTuple):
    """A number format: its name in the profiles, its bytes, and its peak arithmetic as a multiple of bf16's."""

    name: str
    weight_bytes: float = 2
    input_bytes: float = 2
    flops_x: int = 1


BF16 = Form("bfloat16")


def gemm(kind: str, form: Form = BF16) -> Rows:
    """Return the measured GEMMs large enough for a layer (n and k >= 512); no rows if the format was not measured."""
    if form == BF16:
        d = pd.read_parquet(folder() / FOLDERS[kind] / "gemm_perf.parquet")
    else:
        d = newest(kind, "gemm_perf_trtllm_weight_only" if form.name.endswith("_wo") else "gemm_perf")
    d = d[(d.gemm_dtype == form.name) & (d.n >= 512) & (d.k >= 512)].sort_values(["m", "n", "k"]) if len(d) else d
    m, n, k = (_column(d, c) for c in "mnk")
    moved = form.input_bytes * m * k + form.weight_bytes * n * k + 2 * m * n
    y, keep = within(kind, 1e-3 * _column(d, "latency"), moved, 2 * m * n * k, form.flops_x)
    held = {"m 128 to 512": (m >= 128) & (m <= 512), "largest m": m == m.max(initial=0.0)}
    return Rows({"m": m, "n": n, "k": k}, y, held).pick(keep)


def newest(kind: str, stem: str) -> pd.DataFrame:
    """Read one table of a GPU kind from the 2026 profiles; return an empty table if there is none."""
    path = folder() / NEW / FOLDERS[kind].rpartition("/")[2] / f"{stem}.parquet"
    return pd.read_parquet(path) if path.is_file() else pd.DataFrame()


def _column(d: pd.DataFrame, name: str) -> F8:
    return d[name].to_numpy(np.float64) if name in d else np.empty(0)


# --------------------------------------------------------------------------------------------------------- attention


def _attention(kind: str, op: str) -> pd.DataFrame:
    d = pd.read_parquet(folder() / FOLDERS[kind] / f"{op}_attention_perf.parquet")
    if "window_size" in d:  # a100 has no such column
        d = d[d.window_size == 0]
    d = d[(d.kv_cache_dtype == "bfloat16") & d.head_dim.isin([64, 128, 256])]
    d = d[d.kernel_source.str.contains(ATTENTION.get(kind, "flash_attn"))]
    return d.sort_values(["head_dim", "num_heads", "num_key_value_heads", "batch_size", "isl", "step"])


def decode(kind: str) -> Rows:
    """Return the measurements of decode attention of one layer, up to 256 sequences."""
    d = _attention(kind, "generation")
    d = d[d.batch_size <= MOST_SEQS]
    names = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "step")
    B, heads, kv, dim, step = (_column(d, c) for c in names)
    ctx = step + 1
    y, keep = within(kind, 1e-3 * _column(d, "latency"), 4 * B * ctx * kv * dim, 4 * B * ctx * heads * dim)
    at = {"B": B, "ctx": ctx, "heads": heads, "kv": kv, "d": dim}
    return Rows(at, y, _held_out(heads, kv, "step", ctx)).pick(keep)


def prefill(kind: str) -> Rows:
    """Return the measurements of causal attention of one layer, in steps of up to 65,536 tokens."""
    d = _attention(kind, "context")
    d = d[(d.batch_size * d.isl <= LONGEST) & (d.isl > 1)]
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    n, tokens, heads, kv, dim = (_column(d, c) for c in names)
    flops = 4 * heads * dim * n * tokens * tokens / 2
    y, keep = within(kind, 1e-3 * _column(d, "latency"), 4 * n * tokens * (heads + kv) * dim, flops)
    at = {"n": n, "tokens": tokens, "heads": heads, "kv": kv, "d": dim}
    return Rows(at, y, _held_out(heads, kv, "prompt", tokens)).pick(keep)


def _held_out(heads: F8, kv: F8, name: str, size: F8) -> dict[str, Mask]:
    out: dict[str, Mask] = {f"heads ({q},{g})": (heads == q) & (kv == g) for q, g in HELD_HEADS}
    return {**out, f"largest {name}": size == size.max()}


# ------------------------------------------------------------------------------------------- collectives and experts


def all_reduce(kind: str) -> pd.DataFrame:
    """Return the measurements of all-reduces in CUDA graphs, by number of GPUs and of elements."""
    d = pd.read_parquet(folder() / FOLDERS[kind] / "custom_allreduce_perf.parquet")
    return d[d.backend == "vllm_graph"].sort_values(["num_gpus", "message_size"])


def exchanges(kind: str) -> tuple[pd.DataFrame, str]:
    """Return the measurements of NCCL's collectives in 16 bits, and their source.

    A row has the number of GPUs, and the number of elements on all GPUs together.
    """
    new = kind == "rtx-pro-6000"
    path = folder() / (NEW if new else OLD) / FOLDERS[kind].rpartition("/")[2] / "nccl_perf.parquet"
    d = pd.read_parquet(path)
    d = d[d.nccl_dtype == "half"].sort_values(["num_gpus", "message_size"])
    return d, (AIC_NEW if new else AIC).format("nccl", "NCCL", d.version.iloc[0])


# Kernels of which rows are taken, where a format has several: gpt-oss's, the one checkpoint in MXFP4 here.
KERNEL = {"w4a16_mxfp4": "gptoss"}
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution")
# Shapes (hidden, width, top, routed) left out of the fit, where a format has others.
HELD = ((2880, 2880, 4, 32), (4096, 1536, 8, 128), (6144, 2560, 8, 160), (4096, 14336, 2, 8))


def mixture(kind: str, form: Form, degrees: Sequence[int] = (1,)) -> Rows:
    """Return the measured fused experts of a number format, at the given degrees of expert parallelism.

    Return no rows if the format was not measured.
    """
    d = newest(kind, "moe_perf")
    d = d[(d.moe_dtype == form.name) & d.kernel_source.str.contains(KERNEL.get(form.name, ""))] if len(d) else d
    if not len(d):
        return Rows({}, np.empty(0), {"none": np.empty(0, bool)})
    d = d[d.distribution.isin(experts.SPREADS) & d.moe_ep_size.isin(degrees)].sort_values([*EXPERTS, "num_tokens"])
    shape = list(zip(*(d[k] for k in EXPERTS[:4]), strict=True))
    shapes = set(shape)
    left = [s for s in HELD if s in shapes][: 2 if len(shapes) > 3 else max(0, len(shapes) - 2)]
    held = {f"experts {s}": np.array([at == s for at in shape]) for s in left}
    held["largest step"] = (d.num_tokens == d.num_tokens.max()).to_numpy()
    return Rows({k: d[k].to_numpy() for k in (*EXPERTS, "num_tokens")}, (d.latency * 1e-3).to_numpy(np.float64), held)


# ------------------------------------------------------------------------------------------- whole steps, and shares

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
# GPU kind -> (name in the file, the model that is fitted). H100 and H20 have no llama2_7b. A10 has no kernel table.
ENGINES = {
    "a100-80g": ("A100", "llama2_7b"),
    "h800": ("H800", "llama2_7b"),
    "h100": ("H100", "qwen2_5_7b"),
    "h20": ("H20", "qwen2_5_7b"),
}


def whole_steps(kind: str) -> pd.DataFrame:
    """Return measured steps of dense models by model, phase, prompt and batch.

    Each step has at most 4,096 prompt tokens in all.
    """
    d = pd.read_csv(folder() / "aegaeon/latency.csv")
    d = d[(d.gpu == ENGINES[kind][0]) & d.model.isin(list(DENSE))]
    d = d.rename(columns={"prompt_tokens_per_sequence": "prompt", "prefill_p50_s": "prefill", "decode_p50_s": "decode"})
    d = d[d.prompt * d.batch <= 4096].melt(["model", "prompt", "batch"], ["prefill", "decode"], "phase", "seconds")
    return d.sort_values(["model", "phase", "prompt", "batch"], ignore_index=True)


def shares() -> pd.DataFrame:
    """Read MuxServe's measurements on one A100: the seconds of a step on a share of the SMs, and on all SMs."""
    tree = json.loads((folder() / "muxserve/llama-a100-sm-share.json").read_text(encoding="utf-8"))
    out = []
    for model in ("7b", "13b"):
        by_share = tree[f"llama-{model}"]["1"]
        for s, batches in by_share.items():
            for b, lengths in batches.items():
                for length, cell in lengths.items():
                    whole, at = by_share["100"][b][length], (int(b), int(length), int(s) / 100)
                    out += [(model, p, *at, 1e-3 * cell[p], 1e-3 * whole[p]) for p in ("prefill", "decoding")]
    d = pd.DataFrame(out, columns=["model", "phase", "batch", "length", "share", "seconds", "whole"])
    d = d[(d.seconds > 0) & (d.whole > 0) & (d.share < 1) & (d.batch <= 128)]
    d = d[(d.phase == "decoding") | (d.batch * d.length).between(512, 16384)]
    return d.sort_values(["model", "phase", "share", "batch", "length"], ignore_index=True)
