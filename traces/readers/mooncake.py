"""A Mooncake trace (NAME_trace.jsonl): a single stream with the ids of its blocks of 512 tokens.

Stamps are as released: those of the conversations come in bunches of about ten, every 3 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces.convert import convert

FILES = ("*_trace.jsonl",)
KEYS = ({"timestamp", "input_length", "output_length", "hash_ids"},)
COLUMNS = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_hashes": "hash_ids",
}
BLOCK_TOKENS = 512


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as milliseconds; the stream is named as the file is."""
    stream = path.stem.removesuffix("_trace")
    known: dict[str, Any] = {
        "time_unit": "ms",
        "model": stream,
        "name": f"mooncake-{stream}",
        "licence": "Apache-2.0",
        "tier": "synthetic" if stream == "synthetic" else "replayed",
        "block_tokens": BLOCK_TOKENS,
    }
    return convert(path, COLUMNS, **known | asked)
