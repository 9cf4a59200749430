"""The memory for KV of models on a GPU, for systems whose papers serve one model."""

from __future__ import annotations

from collections.abc import Iterable

from harness.policy.types import Gpus


def kv_manager(asked: str, places: Iterable[Gpus]) -> str:
    """Return option `kv` of models at these places: `asked`; for `auto`, `elastic` if two share a GPU, else `paged`.

    Each model is a process of its own. The blocks of a paged cache belong to one process; processes share what a GPU
    has free in pages that the driver maps, as under kvcached.
    """
    if asked != "auto":
        return asked
    seen = [g for place in places for g in place]
    return "elastic" if len(seen) > len(set(seen)) else "paged"
