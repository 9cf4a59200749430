"""KV memory that an idle model keeps for its prefix cache: measured on kvcached, and simulated.

The measurement is kvcached's `bench_idle_footprint` (ovg-project/kvcached 5315e34,
benchmarks/bench_idle_footprint/README.md): the KV memory that stays mapped after the traffic of `workload.py` has
ended. kvcached caches at most 16,000 tokens (KVCACHED_MAX_CACHED_TOKENS). It gives a page back only if no block in the
page is cached. Both kvcached and the simulator also keep pages for the next request (KVCACHED_MIN_RESERVED_PAGES); the
measured numbers leave these pages out. The simulated requests have the measured kinds, lengths and concurrency, but
other random draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness.engines.costs.shapes import kv_token_bytes
from harness.engines.machine import Config, Served, cluster, granule_bytes, machine
from harness.loop import system
from harness.loop.engine import find
from harness.loop.replay import replay
from harness.policy.types import GIB, KEPT_PAGES, Jobs, Prefix
from workloads.models import shape

MODEL, GPU, HOST = "qwen-3-4b", "l40s", "vllm-0.15"  # the runs had Qwen3-4B, an L40, vLLM 0.22.1
# GiB and pages after two runs each.
MEASURED = {
    "kvcached before its pull request 390": ((10.27, 10.55), (73, 75)),
    "with page-aware eviction (390)": ((5.20, 5.34), (37, 38)),
    "and page-aware allocation": ((3.09, 3.09), (22, 22)),
    "its floor: 1,000 cached blocks without holes": ((2.25,), (16,)),
}
HIT_TOKENS = 93_952  # prompt tokens that hit in each run
# The commands of the README: --requests 2500 --concurrency 96 --hot-prefixes 16 --hot-tokens 128 --suffix-tokens 64
# --cold-tokens-min 192 --cold-tokens-max 1024 --hot-ratio 0.3 --max-tokens-min 16 --max-tokens-max 256 --seed 1234
REQUESTS, CLIENTS, HOT, HOT_TOKENS, SUFFIX_TOKENS = 2500, 96, 16, 128, 64
COLD_TOKENS, HOT_RATIO, OUTPUT_TOKENS, SEED = (192, 1024), 0.3, (16, 256), 1234
BLOCK = 16


class Footprint(NamedTuple):
    """The memory that a model keeps, and its cached tokens, after its traffic has ended."""

    page_bytes: int
    parked_pages: float  # are mapped, so no other model can have them
    cached_tokens: int  # can be hit by later prompts, but lie in memory that counts as free
    hit_tokens: int  # prompt tokens that hit

    @property
    def cached_pages(self) -> float:
        """The pages that the cached tokens would take if every page were filled completely."""
        return self.cached_tokens * kv_token_bytes(shape(MODEL)) / self.page_bytes


def traffic() -> Jobs:
    """Return requests as kvcached's `build_requests` draws them.

    A prompt is cold, with a prefix of its own, or it begins with one of several hot prefixes. At first only one hot
    prefix is in use; the others are added one after another.
    """
    rng, n = np.random.default_rng(SEED), np.arange(REQUESTS)
    known = np.minimum(HOT, 1 + HOT * n // (REQUESTS - 1))
    hot = rng.random(REQUESTS) < HOT_RATIO
    which = rng.integers(0, known)
    prompt = np.where(hot, HOT_TOKENS + SUFFIX_TOKENS, rng.integers(COLD_TOKENS[0], COLD_TOKENS[1] + 1, REQUESTS))
    blocks = prompt // BLOCK
    ends = np.cumsum(blocks)
    place = np.arange(ends[-1]) - np.repeat(ends - blocks, blocks)  # a block's place in its prompt
    shared = np.repeat(hot, blocks) & (place < HOT_TOKENS // BLOCK)
    common = np.repeat(which, blocks) * (HOT_TOKENS // BLOCK) + place
    ids = np.where(shared, common, HOT * HOT_TOKENS + np.arange(ends[-1]))
    each, never = np.ones(REQUESTS, np.int32), np.full(REQUESTS, np.inf)
    return Jobs(
        ("model",),
        np.where(n < CLIENTS, 0.0, np.inf),
        0 * each,
        prompt.astype(np.int32),
        rng.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1, REQUESTS, np.int32),
        never,
        never,
        after=np.maximum(n - CLIENTS, -1).astype(np.int32),
        think_s=np.zeros(REQUESTS),
        prefix=Prefix(BLOCK, np.concatenate([[0], ends]), ids),
    )


def footprint() -> Footprint:
    """Simulate the traffic on one model with elastic KV memory; return what the model keeps after the last request."""
    model = Served("model", shape(MODEL)._replace(max_tokens=4096))
    config = Config((model,), gpu=GPU, gpus=1, host=HOST, block_tokens=BLOCK, chunk_tokens=8192, noise=0.0)
    make: Any = system.find("elastic")
    jobs, priced = traffic(), machine(config)
    options = make(cluster(config, elastic=True, priced=priced)).options
    engine: Any = find("sim")(config, options, priced)  # its state has the blocks that are cached
    replay(make(engine.cluster), engine, jobs)
    page = granule_bytes(config, model, elastic=True)
    cached = engine.S.insts["cached"].sum()
    hits = engine.stats()["hit_share"] * float(jobs.prompt_tokens.sum())
    return Footprint(page, KEPT_PAGES, int(cached) * BLOCK, round(hits))


def rows(ours: Footprint) -> list[tuple[str, ...]]:
    """Return a table of the KV memory that an idle model keeps, measured and simulated, with its heading."""

    def gib(pages: float) -> str:
        return f"{pages * ours.page_bytes / GIB:.2f}"

    measured = [
        (what, " / ".join(f"{x:.2f}" for x in each), " / ".join(map(str, pages)))
        for what, (each, pages) in MEASURED.items()
    ]
    held = ("ours, kept from others", "0.00", "0")
    free = ("ours, cached in memory that others may take", gib(ours.cached_pages), f"{ours.cached_pages:.0f}")
    parked = ("on top, in both: parked pages", gib(ours.parked_pages), f"{ours.parked_pages:g}")
    return [("what an idle model keeps", "GiB", "pages of 144 MiB"), *measured, held, free, parked]


def words(ours: Footprint) -> str:
    """Say how far the simulated footprint is from the measured ones, and why."""
    every = [gib for each, pages in MEASURED.values() if len(pages) > 1 for gib in each]
    return (
        f"Ours leaves {min(every):.1f} to {max(every):.1f} GiB more to others for each idle model than kvcached does."
        " Here blocks that no request holds lie in free memory. They are forgotten, the oldest first, as soon as any"
        " model needs room. kvcached keeps up to 16,000 tokens of them mapped, and with each the rest of its page."
        " Before page-aware allocation most of a page was such a rest. Requests find as much:"
        f" {ours.hit_tokens:,} tokens of prompts here, {HIT_TOKENS:,} measured, of other draws."
    )
