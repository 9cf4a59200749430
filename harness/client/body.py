"""Bodies of completion requests as bytes: the prompt is a list of token ids, and `max_tokens` is the output's length.

All prompts are slices of one seeded random sequence of token ids. Each slice begins at a different offset, so that a
server's prefix cache finds no prompt within another one. A nonzero salt makes the prompts differ from those of earlier
runs. Every id is padded with spaces, which JSON allows, to the same number of characters. A prompt is therefore a slice
of prepared bytes, and building a request only copies bytes.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from harness.policy.types import Jobs, UserError

OFFSETS = 1 << 20  # distinct prompts; later requests repeat them
STRIDE = 0x9E375  # odd, so that offsets repeat only after OFFSETS requests


class Server(NamedTuple):
    """The address and name under which a model is served."""

    url: str  # without /v1/completions
    model: str  # the name under which the server serves it


class Style(NamedTuple):
    """Settings that differ between servers: members of the request's JSON body, ids in prompts, use of connections."""

    ignore_eos: bool = True
    min_tokens: bool = False  # sent as well as max_tokens
    counts: bool = False  # chunks carry the number of tokens so far, with `stream_options.continuous_usage_stats`
    extra: tuple[tuple[str, bool | float | str], ...] = ()  # further members
    ids: tuple[int, int] = (300, 1000)  # prompts are of token ids from the first to before the second
    keep_alive: bool = True  # False: a connection for each request
    spare: int = 48  # connections that are kept open for a burst
    salt: int = 0  # drawn for a run on servers that others warm: prompts differ from those of any run before
    key_env: str = ""  # the environment variable that holds a bearer key; it is read where it is sent, and kept nowhere


OPENAI = Style(ignore_eos=False)  # as OpenAI's documents say, and no more


class Bodies:
    """The HTTP requests of a workload, built as bytes."""

    def __init__(self, jobs: Jobs, seed: int, style: Style) -> None:
        self._prompt, self._output = jobs.prompt_tokens, jobs.output_tokens
        self._style = style
        self._key = _key(style.key_env)
        low, high = style.ids
        width = len(str(high - 1))
        fields = np.array([f"{i:{width}d}," for i in range(low, high)], f"S{width + 1}")
        length = OFFSETS + (int(self._prompt.max()) if len(self._prompt) else 0)
        draw = np.random.default_rng([seed, style.salt] if style.salt else seed)
        self._ids = fields[draw.integers(0, high - low, length, np.uint16)].tobytes()
        self._width = width + 1
        self._heads: dict[Server, tuple[bytes, bytes]] = {}

    def request(self, rid: int, to: Server) -> bytes:
        """Build the HTTP request, head and body, that is sent to a server."""
        if to not in self._heads:
            self._heads[to] = self._head(to)
        head, opening = self._heads[to]
        n, w = self._output.item(rid), self._width
        at = rid * STRIDE % OFFSETS * w
        closing = self._closing(n)
        prompt = self._ids[at : at + self._prompt.item(rid) * w - 1]
        length = len(opening) + len(prompt) + len(closing)
        return b"%b%d\r\nContent-Length: %d\r\n\r\n%b%b%b" % (head, rid, length, opening, prompt, closing)

    def redacted(self, text: str) -> str:
        """Return a server's text with the bearer key replaced by ***, because a server may echo the key."""
        return text.replace(self._key, "***") if self._key else text

    def _head(self, to: Server) -> tuple[bytes, bytes]:
        url = urlsplit(to.url)
        path = url.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        lines = [f"POST {path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {self._key}"] if self._key else []
        lines += [] if self._style.keep_alive else ["Connection: close"]
        head = "\r\n".join([*lines, "X-Request-Id: "])
        return head.encode(), f'{{"model":{json.dumps(to.model)},"prompt":['.encode()

    def _closing(self, tokens: int) -> bytes:
        style = self._style
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if style.counts else {})
        members = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": usage}
        members |= {"ignore_eos": True} if style.ignore_eos else {}
        members |= {"min_tokens": tokens} if style.min_tokens else {}
        return b"]," + json.dumps(members | dict(style.extra)).encode()[1:]


def _key(name: str) -> str:
    """Return the bearer key that the environment variable `name` contains; "" if `name` is empty.

    Raises UserError if the variable is unset or empty, or if the key is not printable ASCII without spaces. The message
    names the variable and never the key.
    """
    if not name:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise UserError(f"the environment variable {name} holds no key")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"the key in the environment variable {name} is not printable ASCII")
    return key
