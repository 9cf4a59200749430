"""Translation of names in sources, papers and nvidia-smi to this project's, and errors for unknown names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import NamedTuple

from harness.engines.costs import quantities
from harness.policy.types import UserError

MODELS = {  # as sources name them; other names are shapes' own, or ids of their checkpoints
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "llama-3-70b": "llama-3.3-70b",  # all 70B of Llama 3 have one shape
    "llama-3.1-70b": "llama-3.3-70b",
}
# Words of a GPU's name that tell no two of our kinds apart. PCIe and NVL do: those cards have other clocks and memory.
EMPTY = frozenset("nvidia amd instinct gpu tensor core sxm sxm4 sxm5 oam hbm2 hbm2e hbm3 hbm3e".split())
TUNED = frozenset("base chat hf instruct it".split())  # words of an id that do not change the model's dimensions
NEAREST = 3


class Skipped(NamedTuple):
    """A row that is skipped, and the reason; row 0 stands for the whole file."""

    file: str
    row: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.row or 1}: {self.why}"


class UnknownName(UserError):
    """An error for a name that is unknown, or that could be either of two."""


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    """Return the error for an unknown name; it lists the nearest known names."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, NEAREST, 0.3) or names[:NEAREST]
    return UnknownName(f'unknown {what} "{name}"; nearest: {", ".join(near)}')


def gpu(name: str) -> str:
    """Return the kind of GPU that a name means: a kind itself, or a card's name as nvidia-smi and papers write it.

    An example is "NVIDIA H100 80GB HBM3". Raises UnknownName if no kind fits the name, or if several do.
    """
    parts = re.findall(r"[a-z0-9]+", re.sub(r"(\d+) ?gi?b\b", r"\1g", name.lower()))
    words = "-".join(word for word in parts if word not in EMPTY)
    if len(sizes := [kind for kind in quantities.gpu_kinds() if re.fullmatch(rf"{words}-\d+g", kind)]) > 1:
        raise UnknownName(f'GPU "{name}" is {" or ".join(sizes)}: the name has to say which')
    try:
        return quantities.gpu(words).kind
    except UserError:
        raise unknown("GPU", name, quantities.gpu_kinds()) from None


def model(name: str, given: Iterable[str] = ()) -> str:
    """Return the name of a model's shape. Raises UnknownName if there is none.

    `name` may be from `given`, from `workloads/`, or an id on huggingface.co.
    """
    from workloads.models import shapes

    known = {*given, *shapes()}
    ours = name if name in known else MODELS.get(name) or of_id(name)
    if ours not in known:
        raise unknown("model", name, known)
    return ours


def of_id(name: str) -> str | None:
    """Return the shape's name for an id on huggingface.co, in upper or lower case; None if there is none.

    A model and its tuned variants share a shape: `meta-llama/Meta-Llama-3.1-8B` has that of
    `meta-llama/Llama-3.1-8B-Instruct`.
    """
    from workloads.models import repos

    return {untuned(repo): ours for repo, ours in repos().items()}.get(untuned(name)) if "/" in name else None


def untuned(repo: str) -> str:
    """Return an id on huggingface.co in lower case, without "meta-" and without the words in TUNED."""
    owner, _, name = repo.lower().partition("/")
    return f"{owner}/{'-'.join(part for part in name.removeprefix('meta-').split('-') if part not in TUNED)}"


# Quantised checkpoints of measured rows that are no shapes of ours, and the format that counts: what the checkpoint
# states, whatever the columns say. NVIDIA's FP8 checkpoints state an FP8 KV cache too (hf_quant_config.json).
QUANTISED = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen-3-235b-a22b:dtype=fp8_block", "fp8_block", "MoE"),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("llama-3.1-8b:dtype=fp8:kv_dtype=fp8", "fp8", "dense"),
}
# Conditions that no column states but the source of the rows does: those of gpt-oss are of SemiAnalysisAI/InferenceX.
# `random-range-ratio: 0.8` (.github/workflows/benchmark-tmpl.yml) draws each length between 0.8 of the stated one and
# all of it (utils/bench_serving/benchmark_serving.py, `sample_random_requests`), and `kv-cache-dtype: fp8` is set for
# the B200 alone (benchmarks/single_node/gptoss_fp4_b200.sh, and _h100.sh, _h200.sh).
# The client counts every request, the first wave too: `calculate_metrics` there takes the means over all outputs.
LOADS = {"openai/gpt-oss-120b": (0.8, True)}
# Their client sends temperature 0 (utils/bench_serving/backend_request_func.py, `async_request_openai_completions`).
GREEDY = frozenset({"openai/gpt-oss-120b"})
KV_FORMAT = {("openai/gpt-oss-120b", "b200"): ":kv_dtype=fp8"}


def quantised(name: str, dtype: str) -> tuple[str, str, str]:
    """Return a model's name with its formats, its number format in a word, and "MoE" or "dense".

    A 16-bit checkpoint has the format in `dtype`, a column of the row. Any other checkpoint has a format of its own,
    and `dtype` is ignored. For example, all rows of gpt-oss have the `dtype` nvfp4, but the checkpoint is MXFP4. Raises
    UnknownName for an unknown model.
    """
    from workloads.models import repos, shape, shapes

    if name in QUANTISED:
        return QUANTISED[name]
    ours = name if name in shapes() else of_id(name)
    if ours is None:
        raise unknown("model", name, [*QUANTISED, *repos()])
    its = shape(ours)
    kind = "dense" if its.experts is None else "MoE"
    if its.formats is None:
        return f"{ours}:dtype={dtype}", dtype, kind
    return ours, (its.formats.ffn if its.experts is None else its.formats.experts).name, kind


def generation(name: str, version: str, known: Collection[str]) -> tuple[str, str]:
    """Return the host profile to use for an engine's version, and the version in words.

    A version without a profile uses the profile of the nearest earlier version, or else of the first version. The words
    then name both versions.
    """
    series, parts = name.lower(), version.split(".")[:2]
    keys = [key for key in known if key.startswith(f"{series}-")]
    mine = sorted((tuple(map(int, key.rpartition("-")[2].split("."))), key) for key in keys)
    if not mine or not all(part.isdigit() for part in parts):
        raise unknown("engine", f"{series}-{version}", known)
    at = tuple(map(int, parts))
    served = [key for numbers, key in mine if numbers <= at] or [mine[0][1]]
    exact = f"{series}-{'.'.join(parts)}"
    return served[-1], exact if served[-1] == exact else f"{exact} as {served[-1].rpartition('-')[2]}"


def engine(name: str, version: str, known: Collection[str]) -> str:
    """Return an engine's generation: its name and the first two numbers of its version.

    Raises UnknownName for an unknown generation.
    """
    ours = f"{name.lower()}-{'.'.join(version.split('.')[:2])}"
    if ours not in known:
        raise unknown("engine", ours, known)
    return ours
