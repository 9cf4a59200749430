"""Prompt and output lengths by name: drawn from a law with a data set's means, or from the rows of a log.

A paper may give only the means of a data set's lengths. Results under two laws with the same means show how much the
rest of the distribution matters.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import UserError

I4 = NDArray[np.int32]

LAWS: Mapping[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {  # numbers of mean 1, before rounding
    "geometric": lambda rng, n: rng.exponential(1.0, n),
    "lognormal": lambda rng, n: rng.lognormal(-0.5, 1.0, n),  # coefficient of variation 1.31
}
MEANS: Mapping[str, tuple[float, float]] = {  # prompt and output tokens (PagedAttention, section 6.1, figure 11)
    "sharegpt": (161.31, 337.99),
    "alpaca": (19.31, 58.45),
}


AZURE, CONV = "azure-conv", "azure2023/AzureLLMInferenceTrace_conv.csv"
NAMES = (*(f"{law}-{data}" for law in LAWS for data in MEANS), AZURE)


def law(name: str) -> str:
    """Return the law, a key of LAWS, that the name of a length distribution begins with; "" if the name has none."""
    return name.partition("-")[0] if name in NAMES and name != AZURE else ""


def draw(name: str, n: int, rng: np.random.Generator, longest: int) -> I4:
    """Draw prompt and output tokens of n requests, shape (n, 2); prompt + output is at most `longest`."""
    if name == AZURE:
        return rows(longest)[rng.integers(0, len(rows(longest)), n)]
    kind, _, data = name.partition("-")
    return lengths(data, kind, n, rng, longest=longest)


def source() -> Path:
    """Return the path of the file with Azure-Conv's requests. UserError if the folder TRACES_DIR lacks it."""
    folder = os.environ.get("TRACES_DIR", "")
    path = Path(folder) / CONV
    if not path.is_file():
        raise UserError(f"no file {CONV} in TRACES_DIR ({folder or 'not set'}); see traces/manifest.toml")
    return path


@cache
def rows(longest: int) -> I4:
    """Read prompt and output tokens of Azure-Conv's requests, shape (requests, 2).

    Requests of more than `longest` tokens, and those without a prompt or an output, are left out.
    """
    with source().open(encoding="utf-8") as file:
        pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return np.array([pair for pair in pairs if min(pair) > 0 and sum(pair) <= longest], np.int32)


def lengths(data: str, law: str, n: int, rng: np.random.Generator, *, longest: int) -> I4:
    """Draw prompt and output tokens of n requests, shape (n, 2), with the means of a data set.

    A request of more than `longest` tokens is drawn again, which lowers the means. To make up for this, the draws are
    scaled so that the requests returned have the data set's means.
    """
    numbers, scale = LAWS[law], np.array(_scale(data, law, longest))
    kept = np.empty((0, 2))
    while len(kept) < n:
        some = np.ceil(np.stack([numbers(rng, n), numbers(rng, n)], 1) * scale)
        kept = np.concatenate([kept, some[some.sum(1) <= longest]])
    return kept[:n].astype(np.int32)


@cache
def _scale(data: str, law: str, longest: int) -> tuple[float, ...]:
    """Return the factors for prompt and output lengths with which a law's draws have the data set's means.

    Before it is scaled and rounded up, a law's draw has the mean 1. Draws of more than `longest` tokens do not count.
    """
    numbers, means = LAWS[law], np.array(MEANS[data])
    pairs = np.stack([numbers(np.random.default_rng(k), 1 << 16) for k in (1, 2)], 1)
    scale = means.copy()
    for _ in range(20):
        whole = np.ceil(pairs * scale)
        scale *= means / whole[whole.sum(1) <= longest].mean(0)
    return tuple(scale.tolist())
