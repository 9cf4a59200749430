"""Placement of requests: the share of each model's requests on each GPU, its home, and which models share one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.policy.types import Gpus
from harness.rows import record

SHARE = 0.01  # of a model's requests on a GPU: what is less is not listed
Shares = Mapping[str, Mapping[str, float]]  # by GPU and model: of the model's requests, those that ran there


def placed(runs: Iterable[Path]) -> dict[str, dict[str, float]]:
    """Return the share of each model's requests on each GPU, over all of these runs.

    A request of a group of GPUs ran on each of them, one that moved on its first and last.
    """
    total, on = Counter[str](), dict[str, Counter[str]]()
    for run in runs:
        rows = record.read(run, ["model", "gpus"])
        pairs = rows.group_by(["model", "gpus"]).aggregate([([], "count_all")]).to_pylist()
        for pair in pairs:
            if gpus := set(re.findall(r"\d+", pair["gpus"] or "")):
                total[pair["model"]] += pair["count_all"]
                for gpu in gpus:
                    on.setdefault(gpu, Counter())[pair["model"]] += pair["count_all"]
    keys = sorted(on, key=lambda gpu: (len(gpu), gpu))
    return {gpu: {model: n / total[model] for model, n in on[gpu].most_common()} for gpu in keys}


def places(runs: Iterable[Path]) -> dict[str, Gpus]:
    """Return the GPU or the group with most of each model's requests, over all of these runs; first ones of moves."""
    on: dict[str, Counter[Gpus]] = {}
    for run in runs:
        rows = record.read(run, ["model", "gpus"])
        for pair in rows.group_by(["model", "gpus"]).aggregate([([], "count_all")]).to_pylist():
            if gpus := tuple(map(int, re.findall(r"\d+", (pair["gpus"] or "").partition(">")[0]))):
                on.setdefault(pair["model"], Counter())[gpus] += pair["count_all"]
    return {model: counts.most_common(1)[0][0] for model, counts in on.items()}


def homes(shares: Shares) -> dict[str, str]:
    """Return the GPU with most of each model's requests; of a group its first."""
    models = dict.fromkeys(model for each in shares.values() for model in each)
    return {model: max(shares, key=lambda gpu: shares[gpu].get(model, 0.0)) for model in models}


def apart(shares: Shares) -> list[str]:
    """Return the models whose GPUs no other model ever ran on."""
    every = homes(shares)
    return [model for model in every if all(len(each) == 1 for each in shares.values() if model in each)]


def together(shares: Shares) -> dict[tuple[str, ...], list[str]]:
    """Return groups of models with a home on the same GPU, each with the GPUs on which they have it."""
    every, groups = homes(shares), dict[tuple[str, ...], list[str]]()
    for gpu, each in shares.items():
        here = tuple(sorted(model for model in each if every[model] == gpu))
        if len(here) > 1:
            groups.setdefault(here, []).append(gpu)
    return groups
