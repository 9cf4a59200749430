"""Placement of requests: the share of each model's requests on each GPU, and the GPU with most of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.policy.types import Gpus
from harness.rows import record
from harness.run.setup import Setup

SHARE = 0.01  # share of a model's requests on a GPU; smaller ones are not listed
Shares = Mapping[str, Mapping[str, float]]  # keyed by GPU and model: the share of the model's requests that ran there


def placed(runs: Iterable[Path]) -> dict[str, dict[str, float]]:
    """Return, by GPU and model, the share of the model's requests that ran on the GPU, over all of these runs.

    A request that used a group of GPUs counts for each of them. A request that moved counts for its first and last GPU.
    """
    total, on = Counter[str](), dict[str, Counter[str]]()
    for model, where, n in _counted(runs):
        total[model] += n
        for gpu in set(re.findall(r"\d+", where)):
            on.setdefault(gpu, Counter())[model] += n
    keys = sorted(on, key=lambda gpu: (len(gpu), gpu))
    return {gpu: {model: n / total[model] for model, n in on[gpu].most_common()} for gpu in keys}


def places(runs: Iterable[Path]) -> dict[str, Gpus]:
    """Return, for each model, the GPU or group of GPUs on which most of its requests ran.

    A request that moved counts where it began.
    """
    on: dict[str, Counter[Gpus]] = {}
    for model, where, n in _counted(runs):
        if gpus := tuple(map(int, re.findall(r"\d+", where.partition(">")[0]))):
            on.setdefault(model, Counter())[gpus] += n
    return {model: counts.most_common(1)[0][0] for model, counts in on.items()}


def at_once(setup: Setup) -> bool:
    """Tell whether processes on a GPU compute at the same time, as servers under MPS do, and not one at a time."""
    usual = setup.policy.options.get("sharing", "fluid")
    return (usual if setup.spec.sharing == "own" else setup.spec.sharing) == "fluid"


def _counted(runs: Iterable[Path]) -> Iterator[tuple[str, str, int]]:
    """Yield each model, GPUs on which its requests ran (as text), and the number of these requests."""
    for run in runs:
        pairs = record.read(run, ["model", "gpus"]).group_by(["model", "gpus"]).aggregate([([], "count_all")])
        for pair in pairs.to_pylist():
            if re.search(r"\d", pair["gpus"] or ""):
                yield pair["model"], pair["gpus"], pair["count_all"]


def homes(shares: Shares) -> dict[str, str]:
    """Return, for each model, the GPU with most of its requests; of a group of GPUs, the first."""
    models = dict.fromkeys(model for each in shares.values() for model in each)
    return {model: max(shares, key=lambda gpu: shares[gpu].get(model, 0.0)) for model in models}
