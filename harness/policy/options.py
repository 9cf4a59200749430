"""Options of engines, the meaning of each value, and how a system asks for them: `options = {"kv": "elastic"}`.

If a system asks for no value of an option, the first value applies. If an engine lacks the value, the system is
skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "kv": {
        "paged": "blocks of one pool on each GPU, up to the `Limit` of each model; without limits a unified cache",
        "elastic": "pages that the driver maps from what its GPU has free, as under kvcached",
        "max": "one chunk a request, as large as the longest sequence",
        "pow2": "one chunk a request, for its prompt and the next power of two above its true output",
        "oracle": "one chunk a request, for its prompt and its true output",
    },
    "preempt": {
        "recompute": "a request that loses its KV computes it again",
        "swap": "its KV goes to host memory and comes back",
    },
    "sharing": {
        "fluid": "processes run side by side, as under MPS",
        "turns": "processes take turns, as without MPS",
        "none": "none slows another down",
    },
    "memory": {"real": "as much as the GPU has", "unlimited": "as much as is asked for"},
    "process": {
        "model": "one process a model",
        "pair": "two processes a model, for prompts and for decodes",
        "gpu": "one process a GPU, whatever model it serves",
        "kept": "one process a model on every GPU, which stays when its weights leave",
    },
}
