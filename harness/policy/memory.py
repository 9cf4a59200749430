"""The choice of a KV memory manager when models share a GPU, for systems whose papers describe only one model."""

from __future__ import annotations

from collections.abc import Iterable

from harness.policy.types import Gpus


def kv_manager(asked: str, places: Iterable[Gpus]) -> str:
    """Return the option `kv` for models at these places: `elastic` or `paged` for `auto`, else `asked` itself.

    `auto` becomes `elastic` if two places share a GPU, else `paged`. Each model is a separate process, and the blocks
    of a paged cache belong to one process. Processes can share the free memory of a GPU in pages that the driver maps,
    as with kvcached.
    """
    if asked != "auto":
        return asked
    seen = [g for place in places for g in place]
    return "elastic" if len(seen) > len(set(seen)) else "paged"
