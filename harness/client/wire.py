"""Parse HTTP/1.1 responses and their server-sent events into chunks of tokens; no socket or clock is used here.

If asked to, a server states in each chunk the number of tokens so far (`usage.completion_tokens`, or llama.cpp's
`timings.predicted_n`). The tokens of a chunk are then the increase of this number, whether or not the chunk has text.
Otherwise a chunk with text counts as one token, and a chunk without text (empty, a role, or usage alone) as none.

The last token count of a usage is stored separately (`usage_tokens`). It can differ from the sum over the chunks, for
two reasons. A server that was not asked to count may hold a token's bytes back until they form a character. Any server
may send several tokens in one event. The chunks then stay as they came, and the usage gives the number of tokens.
llama.cpp also reports the time that a prompt took (`timings.prompt_ms`).

A request fails, with the reason, if a count is not a whole number, falls, or exceeds the number of tokens asked for.
"""

from __future__ import annotations

import json
from typing import Any

import httptools

EXCERPT = 200  # characters of what a server said that enter an error
DECODE = json.JSONDecoder().decode  # json.loads guesses the encoding of bytes first
KEPT = 4096  # bytes that are kept of a body that is no stream
LINE = 1 << 20  # bytes of an event
FLUSHED = 8  # chunks allowed beyond the tokens asked for: some servers send a last text without a token
ANY = 1 << 30  # tokens of a request whose limit is not known
LONGEST_NS = 1 << 60  # 36 years: larger times are cut to it


class Response:
    """The response to the request that is open on a connection; call `begin` before each request."""

    def __init__(self, counts: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._counts = counts  # whether chunks were asked to carry the number of tokens so far
        self.begin()

    def begin(self, most: int = ANY) -> None:
        """Prepare for the response to a new request, of at most `most` tokens."""
        self._most = most
        self.status = 0  # HTTP's; 0: none yet
        self.error = ""  # why the request failed
        self.ended = False  # the stream said that it ends
        self.complete = False  # the response is read to its end: the connection is free again
        self.broken = False  # what came is not what was asked for: the connection is of no use
        self.usage_tokens = -1  # what the server says that it made; -1: it did not say
        self.cached_tokens = -1  # prompt tokens that the server had in a cache; -1: it did not say
        self.prompt_ns = -1  # how long its prompt took by the server's own account; -1: it did not say
        self.made = 0  # tokens of all chunks
        self._keeps = False  # the server does not close the connection after this response
        self._chunks: list[int] = []  # tokens of the chunks of this read
        self._rest = b""  # holds a line that is not complete

    def feed(self, data: bytes) -> list[int]:
        """Parse bytes of the response, and return the token count of each chunk that they complete."""
        self._chunks = []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not (self.complete or self.broken):  # a body without a length ends with the connection
                self._fail(f"not HTTP: {error}")
            self.broken = True
        return self._chunks

    def close(self) -> None:
        """Drop the parser, because no more bytes come.

        Parser and response refer to each other. Only the garbage collector would free them, and it is off.
        """
        del self._parser

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request after this response."""
        return self.complete and not self.broken and self._keeps

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        """Mark the connection as broken if bytes come after the end of a response (see httptools)."""
        self.broken |= self.complete

    def on_headers_complete(self) -> None:
        """Store the HTTP status; see httptools."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read the events in a piece of the body, or store the body of an HTTP error; see httptools."""
        if self.status != 200:
            self._rest = (self._rest + body)[:KEPT]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if self.ended or self.error:
                return
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
        if len(self._rest) > LINE:
            self._fail(f"an event of more than {LINE >> 20} MiB{_excerpt(self._rest[:EXCERPT])}")

    def on_message_complete(self) -> None:
        """Mark the response as complete, with an error unless its status is 200 and [DONE] came; see httptools."""
        if 100 <= self.status < 200:  # an interim response
            return
        self.complete, self._keeps = True, self._parser.should_keep_alive()
        if self.status != 200:
            self.error = f"HTTP {self.status}{_excerpt(self._rest)}"
        elif not self.ended and not self.error:
            self.error = f"the stream ended without [DONE]{_excerpt(self._rest)}"

    # ------------------------------------------------------------ events

    def _fail(self, error: str) -> None:
        self.error, self.broken = self.error or error, True

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = DECODE(data.decode())
            tokens = self._tokens(chunk)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            self._fail(f"malformed chunk{_excerpt(data)}")
            return
        if "error" in chunk:
            self._fail(f"the server said{_excerpt(data)}")
        elif tokens > 0:
            self.made += tokens
            self._chunks.append(tokens)
            if self.made > self._most + FLUSHED:
                self._fail(f"more than the {self._most} tokens that were asked for: the server does not end")

    def _tokens(self, chunk: dict[str, Any]) -> int:
        """Return the number of tokens that a chunk adds; fail the request if its count cannot be right."""
        choices, usage, timings = chunk.get("choices") or (), chunk.get("usage"), chunk.get("timings")
        total = usage.get("completion_tokens") if usage else timings.get("predicted_n") if timings else None
        if total is not None and (wrong := self._wrong(total)):
            self._fail(wrong)
            return 0
        if usage and total is not None:
            self.usage_tokens = total
        if usage and type(cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens")) is int:
            self.cached_tokens = min(max(-1, cached), ANY)
        if timings and (prompt_ms := timings.get("prompt_ms")) is not None:
            self.prompt_ns = min(max(-1, round(prompt_ms * 1e6)), LONGEST_NS)
        if self._counts and choices and total is not None:
            return int(total) - self.made
        return int(any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices))

    def _wrong(self, total: Any) -> str:
        """Return a text that says why a server's count of tokens so far cannot be right; "" if it can."""
        if type(total) is not int or total < 0:
            return f"the server counts {shown(json.dumps(total))} tokens, which is no whole number"
        if total > self._most:
            return f"the server counts {shown(str(total))} tokens, {self._most} were asked for"
        before = max(self.usage_tokens, self.made if self._counts else 0)
        return f"the server counts {total} tokens after {before}" if total < before else ""


def _excerpt(data: bytes) -> str:
    """Return an excerpt of a server's bytes, as text on one line."""
    text = shown(data.decode("utf-8", "replace"))
    return f": {text}" if text else ""


def shown(text: str, most: int = EXCERPT) -> str:
    """Return a server's text for printing: on one line, at most `most` characters, unprintable ones escaped."""
    short = " ".join(text[: 8 * most].split())[:most]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
