"""WEKA's traces of coding agents (a session an object, its calls in `requests`): with blocks of 64 tokens.

The fields are described in vllm-project/guidellm 0fb0fbb docs/guides/trace_replay.md and
callanjfox/agentic-coding-analysis docs/TRACE_FORMAT.md. `t` is seconds from the begin of the session, `in` and `out`
are tokens, and `hash_ids` are the prompt's blocks. An entry of `type` subagent is a group with calls of its own, and
has a `t` too. If the `t` of its first call is smaller than that, the calls count their `t` from the begin of the group.
Sessions have no dates, so each session begins at the last call of the previous one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from traces.log import Lines

KEYS = ({"id", "requests"},)
FIELDS = {
    "arrival_s": "t",
    "model": "model",
    "prompt_tokens": "in",
    "output_tokens": "out",
    "session_id": "session",
    "prefix_hashes": "hash_ids",
}
OPTIONS = {"licence": "Apache-2.0", "block_tokens": 64}


def expand(lines: Lines) -> Lines:
    """Yield the model calls of each session; a session begins at the time of the previous session's last call."""
    begin_s = 0.0
    for line, session in lines:
        models = session.get("models")
        usual = [model for model in models if isinstance(model, str)] if isinstance(models, list) else []
        model = session.get("model") or next(iter(usual), None)
        last_s = 0.0
        for call, after_s in _calls(session.get("requests"), 0.0):
            at, blocks = call.get("t"), call.get("hash_ids")
            if isinstance(at, int | float) and not isinstance(at, bool):
                at = begin_s + after_s + at
                last_s = max(last_s, at - begin_s)
            if isinstance(blocks, list) and session.get("hash_id_scope") == "local" and session.get("id") is not None:
                blocks = [_local(session["id"], block) for block in blocks]
            named = {"model": call.get("model") or model, "session": session.get("id")}
            yield line, {**call, "t": at, **named, "hash_ids": blocks}
        begin_s += last_s


def _local(scope: object, block: object) -> int:
    """Return a number for a block whose id counts only within its session.

    Blocks of different sessions have different numbers.
    """
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
