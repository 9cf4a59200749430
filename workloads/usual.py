"""Defaults of specs, studies, comparisons and sizes. The module imports nothing heavy, so any module may use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every system of the bench fits this world. The pool is prism-research 595ec1f, README.md, --max-mem-usage of the full
# run, 67.28 GiB; on another machine memory is the card's, by mem_fraction.
WORLD: Mapping[str, Any] = {"models": "light8", "gpus": 1, "gpu": "h100", "engine": "sim"}
POOL_BYTES = 72_241_349_919
MEM_FRACTION = 0.9  # stating it changes no memory
MEMORY = frozenset({"pool_bytes", "process", "process_bytes", "table"})
TRACE = "hyperbolic-like+span_s=600"  # is used with a set that names no trace
SIZED = ("prism", "elastic", "static:replicas", "static:rate", "static", "muxserve", "qlm", "swap")  # systems


def memory(given: Mapping[str, Any]) -> dict[str, int]:
    """Return {"pool_bytes": POOL_BYTES} if the settings agree with WORLD and set no size of memory; else {}."""
    world = all(given.get(key, value) == value for key, value in {**WORLD, "mem_fraction": MEM_FRACTION}.items())
    return {"pool_bytes": POOL_BYTES} if world and not given.keys() & MEMORY else {}
