"""Quantiles, in tokens, of the measured prompt and output lengths to which generators are fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Law(NamedTuple):
    """The distribution of a length: `tokens` has the quantiles at the probabilities `at`.

    Between quantiles the logarithm of the length is interpolated, or the length itself if `log` is False.
    """

    at: tuple[float, ...]
    tokens: tuple[float, ...]
    log: bool = True


AT = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
# Quantiles of Arena-Chat's 1,500 rows (VTC-artifact 192c2e2, fair_bench/real_trace.pkl). A tenth of outputs is 513.
ARENA_PROMPT = Law(AT, (2, 5, 13, 40, 161, 432, 653.15, 902.27, 1021))
ARENA_OUTPUT = Law(AT, (2, 17.9, 62, 211, 458.25, 513, 513, 785, 977))
# The released notebook of Prism's Hyperbolic figure draws both from 8 to 512, each as likely (its JSON has none).
UNIFORM = Law((0.0, 1.0), (7.5, 512.5), log=False)
# Quantiles of 63,195 rows, those of 76 of Aegaeon's released synth-*-1.0-1.0.csv (25SOSP-Aegaeon 1c3b110,
# aegaeon/sim/simdata): ShareGPT, history in the prompt.
SHAREGPT_PROMPT = Law((*AT[:-1], 0.999, 1.0), (1, 14, 108, 589, 1114, 1555, 1760, 2187, 5053, 26276))
SHAREGPT_OUTPUT = Law(AT, (16, 45, 130, 265, 400, 569, 735, 955, 1309))


def ranged(tokens: int, ratio: float) -> Law:
    """Return the law of lengths that are uniform from `tokens` x (1 - ratio) to `tokens` x (1 + ratio).

    With a ratio of 0 all lengths are `tokens`.
    """
    least, most = math.ceil(tokens * (1 - ratio)), math.floor(tokens * (1 + ratio))
    return Law((0.0, 1.0), (least - 0.5, most + 0.5) if ratio else (tokens, tokens), log=False)


def doubled(law: Law) -> Law:
    """Return the law of lengths that are twice as long."""
    return law._replace(tokens=tuple(2 * x for x in law.tokens))


LENGTHS: Mapping[str, tuple[Law, Law]] = {
    "arena": (ARENA_PROMPT, ARENA_OUTPUT),
    "uniform": (UNIFORM, UNIFORM),
    "sharegpt": (SHAREGPT_PROMPT, SHAREGPT_OUTPUT),
    "sharegpt-ix2": (doubled(SHAREGPT_PROMPT), SHAREGPT_OUTPUT),  # as synth-*-2.0-1.0.csv
    "sharegpt-ox2": (SHAREGPT_PROMPT, doubled(SHAREGPT_OUTPUT)),  # as synth-*-1.0-2.0.csv
}
RANK_CORRELATION = {  # Spearman's, of prompt and output
    "arena": 0.264,
    "uniform": 0.0,
    "fixed": 0.0,
    **dict.fromkeys(("sharegpt", "sharegpt-ix2", "sharegpt-ox2"), 0.064),
}


def quantile(u: NDArray[np.float64], law: Law) -> NDArray[np.int32]:
    """Return the quantiles of a law at the probabilities `u`, in whole tokens."""
    tokens = np.exp(np.interp(u, law.at, np.log(law.tokens))) if law.log else np.interp(u, law.at, law.tokens)
    return np.clip(np.rint(tokens), math.ceil(law.tokens[0]), math.floor(law.tokens[-1])).astype(np.int32)
