"""Defaults of specs, studies, comparisons and sizes, from any side. The module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every system that is here has room in it. The pool is prism-research 595ec1f, README.md, --max-mem-usage of the full
# run, 67.28 GiB; on another machine memory is the card's, by mem_fraction.
WORLD: Mapping[str, Any] = {"models": "light8", "gpus": 1, "gpu": "h100", "engine": "sim"}
POOL_BYTES = 72_241_349_919
MEM_FRACTION = 0.9  # who states it changes no memory
MEMORY = frozenset({"pool_bytes", "process", "process_bytes", "table"})
TRACE = "hyperbolic-like+span_s=600"  # a set that names none has this
SIZED = ("prism", "elastic", "static:replicas", "static:rate", "static", "muxserve", "qlm", "swap")  # systems


def memory(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the memory of the world above for a setting that is in it and sets no memory; else nothing."""
    world = all(given.get(key, value) == value for key, value in {**WORLD, "mem_fraction": MEM_FRACTION}.items())
    return {"pool_bytes": POOL_BYTES} if world and not given.keys() & MEMORY else {}
