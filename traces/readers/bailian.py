"""A trace of Alibaba's Bailian (qwen_trace*_blksz_16.jsonl): one model, with conversations and blocks of 16 tokens.

Fields as in alibaba-edu/qwen-bailian-usagetraces-anon README.md. `timestamp` is seconds from the first request; a
turn's `parent_chat_id` is the `chat_id` of the turn before it, -1 at a conversation's begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

FILES = ("qwen_*blksz*.jsonl*",)
KEYS = ({"chat_id", "parent_chat_id", "timestamp", "input_length"},)
NAMES = {
    "arrival_s": "timestamp",
    "model": "model",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
}
BLOCK_TOKENS = 16


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as seconds; the stream is named as the file is."""
    stream = str(asked.pop("model", None) or path.name.partition(".")[0].partition("_blksz")[0])
    conversation: dict[Any, Any] = {}  # its first turn, by turn

    def request(record: Record) -> log.Reading:
        chat, parent = str(record.get("chat_id")), str(record.get("parent_chat_id"))
        conversation[chat] = conversation.get(parent, chat)
        blocks = record.get("hash_ids")
        return log.Request(
            record.get("timestamp"),
            stream,
            record.get("input_length"),
            record.get("output_length"),
            conversation[chat],
            blocks,
        )

    known: dict[str, Any] = {"licence": "Apache-2.0", "block_tokens": BLOCK_TOKENS}
    return log.read(path, request, NAMES, **known | asked)
