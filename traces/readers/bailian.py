"""A trace of Alibaba's Bailian (qwen_trace*_blksz_16.jsonl): one model, with conversations and blocks of 16 tokens.

The README.md of alibaba-edu/qwen-bailian-usagetraces-anon describes the fields. `timestamp` is seconds from the first
request. A turn's `parent_chat_id` is the `chat_id` of the previous turn, or -1 in the first turn of a conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traces.log import Lines

FILES = ("qwen_*blksz*.jsonl*",)
KEYS = ({"chat_id", "parent_chat_id", "timestamp", "input_length"},)
FIELDS = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "session_id": "conversation",
    "prefix_hashes": "hash_ids",
}
BLOCK_TOKENS = 16


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: its stream, named after the file, and the constants of the format."""
    stream = path.name.partition(".")[0].partition("_blksz")[0]
    return {"model": stream, "licence": "Apache-2.0", "block_tokens": BLOCK_TOKENS}


def expand(lines: Lines) -> Lines:
    """Add to each record the id of its conversation: the `chat_id` of the conversation's first turn."""
    first_turn: dict[str, str] = {}
    for line, record in lines:
        chat, parent = str(record.get("chat_id")), str(record.get("parent_chat_id"))
        first_turn[chat] = first_turn.get(parent, chat)
        yield line, {**record, "conversation": first_turn[chat]}
