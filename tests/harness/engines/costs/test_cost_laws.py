"""Laws that hold between prices, over every GPU, shape and number format, and the breaches that measured rows explain.

    a  a prompt in chunks of 2c takes no longer than in chunks of c
    b  a shape in fewer bits is no slower than in 16: in decode steps of up to 64 tokens, and in prompts where the card
       multiplies the format itself
    c  more tokens take no less
    d  a card is not faster than one that is better in everything

Host seconds are left out, which no kernel shortens, and so is the sampler's sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from harness.engines.costs import coefficients, quantities
from harness.engines.costs.coef import Tables
from harness.policy.parameters import parameters
from harness.policy.types import Shape
from tests.cases import cases
from workloads import models, quantised

F8 = NDArray[np.float64]

HOST = "vllm-0.15"  # whose kernels take longer in steps with prompts
SHAPES = {name: shape._replace(sampled=False) for name, shape in models.shapes().items()}
PLAIN = [name for name, shape in SHAPES.items() if shape.formats is None]  # checkpoints of 16 bits
FORMATS = [name for name in quantised.FORMATS if name != "bf16"]
NAMES = [*SHAPES, *(f"{name}:dtype={form}" for form in FORMATS for name in PLAIN)]
ROWS = [(models.shape(name)._replace(sampled=False), 1) for name in NAMES]
AT = {name: row for row, name in enumerate(NAMES)}
KINDS = quantities.gpu_kinds()
BETTER = [("a100-40g", "a100-80g"), ("h100", "h200"), ("h20", "h200"), ("l4", "l40s")]

PROMPT = 8192  # tokens
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
STEPS = (1, 2, 4, 8, 16, 32, 64)  # sequences of a decode step
CTX = 512  # tokens of context of each
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SLOWER_CHUNKS, SLOWER_BITS, FASTER_CARD = 1.02, 1.10, 1.01  # the last: two fits of one chip


@cache
def tables(kind: str) -> Tables:
    """Return the tables of all rows, which take 2 CPU-s a kind to make."""
    return coefficients.tables(ROWS, kind, HOST)


def at(t: Tables, f: F8, m: int) -> F8:
    """Interpolate every row of a table at m tokens."""
    i = min(int(np.searchsorted(t.grid, m, side="right")) - 1, len(t.grid) - 2)
    return np.asarray(f[:, i] + (f[:, i + 1] - f[:, i]) * ((m - t.grid[i]) / (t.grid[i + 1] - t.grid[i])))


def decode_s(t: Tables, B: int) -> F8:
    """Return the seconds of the kernels of a decode step, by row."""
    c = t.cost
    long = c["dec0"] + c["dec1"] * B + c["dec2"] * B * CTX
    return np.asarray(at(t, t.gemm, B) + at(t, t.head, B) + np.maximum(c["att0"] + c["att1"] * B, long))


def prompt_s(t: Tables, tokens: int, chunk: int) -> F8:
    """Return the seconds of the kernels of a prompt alone in chunks, by row."""
    c = t.cost
    each = c["pre_x"] * at(t, t.gemm, chunk) + c["pre0"] + c["pre1"] * chunk
    return np.asarray(tokens // chunk * each + c["pre2"] * tokens * tokens / 2 + at(t, t.head, 1))


# ------------------------------------------------------------------ breaches


class Calls(NamedTuple):
    """Measured calls: the milliseconds of one that is to be the slower, and of one that is faster nevertheless."""

    table: str  # of profiles
    call: Mapping[str, object]  # values of columns
    slower: tuple[str, str, float]  # the card's folder, number format, ms
    faster: tuple[str, str, float]


class Breach(NamedTuple):
    """Rows of the tables that break a law, by how much at most, and why."""

    law: str
    kinds: tuple[str, ...]
    formats: tuple[str, ...]
    small: bool  # of shapes that multiply a token with fewer than `SMALL` parameters; else of the others
    most: float
    why: str
    calls: Calls


SMALL = 4e9
KEYS = ("topk", "hidden_size", "inter_size", "num_experts", "distribution", "num_tokens", "moe_tp_size", "moe_ep_size")
EXPERTS = dict(zip(KEYS, (8, 7168, 2048, 384, "power_law_1.2", 2048, 1, 1), strict=True))
OSS = dict(zip(KEYS, (4, 2880, 2880, 32, "power_law_1.01", 384, 1, 1), strict=True))
BREACHES = (
    Breach(
        "b", KINDS, tuple(FORMATS), True, 2.7,
        "products of a few microseconds, before which their inputs are converted by a kernel of its own",
        Calls("gemm_perf", {"m": 256, "n": 1024, "k": 1024}, ("h100_sxm", "bfloat16", 0.0048),
              ("h100_sxm", "fp8", 0.01022)),
    ),
    Breach(
        "b", ("b200",), ("fp8_block",), False, 1.3,
        "the conversion of inputs takes 6 us and more on this card, a whole product in 16 bits 10 us",
        Calls("gemm_perf", {"m": 256, "n": 4096, "k": 4096}, ("b200_sxm", "bfloat16", 0.01034),
              ("b200_sxm", "fp8_block", 0.01484)),
    ),
    Breach(
        "d", ("h200",), ("int4",), False, 1.12,
        "INT4 experts were measured in one shape, and from 512 tokens on no faster on H200",
        Calls("moe_perf", EXPERTS, ("h100_sxm", "int4_wo", 8.825312), ("h200_sxm", "int4_wo", 9.190579)),
    ),
    Breach(
        "d", ("h200",), ("mxfp4", "own"), False, 1.05,
        "MXFP4 experts of long steps are bound by arithmetic, which both cards have alike",
        Calls("moe_perf", OSS, ("h100_sxm", "w4a16_mxfp4", 0.398394), ("h200_sxm", "w4a16_mxfp4", 0.415917)),
    ),
)  # fmt: skip


class Broken(NamedTuple):
    """A row that breaks a law."""

    law: str
    kind: str
    name: str
    ratio: float


def multiplied(shape: Shape) -> float:
    """Return the parameters with which a layer multiplies a token, in all layers."""
    count, moe = parameters(shape, 1), shape.experts
    part = count.experts * moe.top / moe.routed if moe is not None else 0.0
    return float(count.attention + count.ffn + count.shared + count.router + part)


def explains(breach: Breach, broken: Broken) -> bool:
    """Tell whether a row that breaks a law is one of a breach."""
    shape, _, form = broken.name.partition(":dtype=")
    of = breach.law == broken.law and broken.kind in breach.kinds and (form or "own") in breach.formats
    small = multiplied(SHAPES[shape]) < SMALL
    return of and (breach.law == "d" or breach.small == small) and broken.ratio <= breach.most


def by_format() -> Iterator[Broken]:
    """Yield the rows in fewer bits that are slower than in 16, each at its worst."""
    whole = np.array([AT[name] for name in PLAIN])
    mixed = np.array([SHAPES[name].experts is not None for name in PLAIN])
    for kind in KINDS:
        t, q = tables(kind), quantities.quantities(kind)
        decoded, filled = [decode_s(t, B) for B in STEPS], [prompt_s(t, m, m) for m in PROMPTS]
        for form in FORMATS:
            mine = np.array([AT[f"{name}:dtype={form}"] for name in PLAIN])
            products, routed = (q.get(f"{of}_{form}", {}).get("flops_x", 1) > 1 for of in ("gemm", "experts"))
            worst = np.max([s[mine] / s[whole] for s in decoded], axis=0)
            prompts = np.max([s[mine] / s[whole] for s in filled], axis=0)
            worst = np.where(products & (routed | ~mixed), np.maximum(worst, prompts), worst)
            for i in np.flatnonzero(worst > SLOWER_BITS):
                yield Broken("b", kind, NAMES[mine[i]], float(worst[i]))


def by_card() -> Iterator[Broken]:
    """Yield the rows that are slower on the better card, each at its worst."""
    for less, more in BETTER:
        pairs = [(decode_s(tables(more), B), decode_s(tables(less), B)) for B in (*STEPS, 128, 256)]
        pairs += [(prompt_s(tables(more), m, m), prompt_s(tables(less), m, m)) for m in PROMPTS]
        worst = np.max([ours / its for ours, its in pairs], axis=0)
        for i in np.flatnonzero(worst > FASTER_CARD):
            yield Broken("d", more, NAMES[i], float(worst[i]))


# ------------------------------------------------------------------ laws


@cases("kind", KINDS)
def test_a_longer_chunk_is_no_slower(kind: str) -> None:
    t = tables(kind)
    for chunk in CHUNKS:
        ratio = prompt_s(t, PROMPT, 2 * chunk) / prompt_s(t, PROMPT, chunk)
        worst = int(ratio.argmax())
        assert ratio[worst] <= SLOWER_CHUNKS, (NAMES[worst], chunk)


@cases("kind", KINDS)
def test_more_tokens_take_no_less(kind: str) -> None:
    t = tables(kind)
    assert (np.diff(t.gemm) >= 0).all()
    assert (np.diff(t.head) >= 0).all()
    for name in ("att0", "att1", "dec0", "dec1", "dec2", "pre0", "pre1", "pre2"):
        assert (t.cost[name] >= 0).all()
    assert (t.cost["pre_x"] >= 1).all()


def test_fewer_bits_and_better_cards_are_no_slower_but_for_known_breaches() -> None:
    broken = [*by_format(), *by_card()]
    assert [row for row in broken if not any(explains(breach, row) for breach in BREACHES)] == []
    for breach in BREACHES:  # each is as large as it says
        assert max(row.ratio for row in broken if explains(breach, row)) > breach.most - 0.05, breach.why


def test_known_breaches_are_few_and_each_has_a_measured_call() -> None:
    assert len(BREACHES) <= 5
    for breach in BREACHES:
        assert breach.calls.faster[2] > breach.calls.slower[2], breach.why


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.calls.faster[1])
def test_the_measured_calls_are_in_the_profiles(breach: Breach, profiles_dir: Path) -> None:
    calls, dtype = breach.calls, "moe_dtype" if breach.calls.table == "moe_perf" else "gemm_dtype"
    for folder, form, ms in (calls.slower, calls.faster):
        d = pd.read_parquet(profiles_dir / "aiconfigurator-2026" / folder / f"{calls.table}.parquet")
        d = d[(d[list(calls.call)] == pd.Series(calls.call)).all(axis=1) & (d[dtype] == form)]
        assert d.latency.round(5).tolist().count(round(ms, 5)) >= 1
