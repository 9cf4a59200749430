"""WEKA's traces of coding agents (a session an object, its calls in `requests`): with blocks of 64 tokens.

Fields as in vllm-project/guidellm 0fb0fbb docs/guides/trace_replay.md and callanjfox/agentic-coding-analysis
docs/TRACE_FORMAT.md: `t` counts from the session's begin, `in` and `out` are tokens, `hash_ids` blocks of the prompt; a
group of `type` subagent has calls of its own, whose `t` count from the group's where they begin before it. A session
has no date, so each begins where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from traces import log
from traces.records import Record

KEYS = ({"id", "requests"},)
NAMES = {"arrival_s": "t", "model": "model", "prompt_tokens": "in", "output_tokens": "out"}
BLOCK_TOKENS = 64


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as seconds, sessions one after the other."""
    begin_s, known_model = 0.0, asked.pop("model", None)

    def expand(session: Record) -> Iterable[Record]:
        nonlocal begin_s
        calls = list(_calls(session.get("requests"), 0.0))
        scope = session.get("id") if session.get("hash_id_scope") == "local" else None
        model = session.get("model") or next(iter(_strings(session.get("models"))), None)
        last_s = 0.0
        for call, after_s in calls:
            at = call.get("t")
            if isinstance(at, int | float) and not isinstance(at, bool):
                at = begin_s + after_s + at
                last_s = max(last_s, at - begin_s)
            yield {
                **call,
                "t": at,
                "model": known_model or call.get("model") or model,
                "session": session.get("id"),
                "scope": scope,
            }
        begin_s += last_s

    def request(call: Record) -> log.Reading:
        blocks = call.get("hash_ids")
        if isinstance(blocks, list) and call.get("scope") is not None:
            blocks = [_local(call["scope"], block) for block in blocks]
        return log.Request(
            call.get("t"),
            call.get("model"),
            call.get("in"),
            call.get("out"),
            call.get("session"),
            blocks,
        )

    known: dict[str, Any] = {"licence": "Apache-2.0", "block_tokens": BLOCK_TOKENS}
    return log.read(path, request, NAMES, expand=expand, **known | asked)


def _local(scope: object, block: object) -> int:
    """Return the number of a block of one session apart from those of others."""
    return int.from_bytes(f"{scope} {block}".encode()[:64])


def _calls(requests: Any, after_s: float) -> Iterator[tuple[Mapping[str, Any], float]]:
    for call in requests if isinstance(requests, list) else ():
        if not isinstance(call, Mapping):
            continue
        if isinstance(call.get("requests"), list):  # a subagent
            spawn = call.get("t")
            spawn_s = float(spawn) if isinstance(spawn, int | float) else 0.0
            first = next((c.get("t") for c in call["requests"] if isinstance(c, Mapping)), None)
            relative = isinstance(first, int | float) and first < spawn_s
            yield from _calls(call["requests"], after_s + spawn_s if relative else after_s)
        else:
            yield call, after_s


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
