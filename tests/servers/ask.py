"""One request to a server, and what came back: as an OpenAI client would see it."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit


def body(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return a streamed completion of exactly so many tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Answer(NamedTuple):
    """A stream's chunks, and what it says of itself."""

    texts: list[str]  # of chunks that carry some
    reasons: list[str]
    usage: dict[str, Any]
    done: bool  # ended by `[DONE]`


def complete(ready_url: str, model: str, prompt: list[int], tokens: int) -> Answer:
    """Ask for a completion, and read its stream to the end."""
    url = urlsplit(ready_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300.0)
    payload = json.dumps(body(model, prompt, tokens))
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    assert response.status == http.HTTPStatus.OK, lines
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Answer(
        [choice["text"] for choice in choices if choice["text"]],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), {}),
        "data: [DONE]" in lines,
    )
