"""A Mooncake trace (NAME_trace.jsonl): a single stream with the ids of its blocks of 512 tokens.

Timestamps are kept as released. In the trace of conversations, requests come in bunches of about ten, every 3 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = ("*_trace.jsonl",)
KEYS = ({"timestamp", "input_length", "output_length", "hash_ids"},)
COLUMNS = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_hashes": "hash_ids",
}
BLOCK_TOKENS = 512


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: its stream, named after the file, and the constants of the format."""
    stream = path.stem.removesuffix("_trace")
    tier = "synthetic" if stream == "synthetic" else "replayed"
    known = {"time_unit": "ms", "licence": "Apache-2.0", "block_tokens": BLOCK_TOKENS}
    return known | {"model": stream, "name": f"mooncake-{stream}", "tier": tier}
