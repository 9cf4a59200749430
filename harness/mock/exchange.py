"""One completion request, from its reading to the last byte of its answer."""

from __future__ import annotations

import time
from typing import Protocol

from harness.mock.answer import BROKEN, Answer
from harness.mock.ask import ApiError, Ask
from harness.mock.faults import Order
from harness.mock.http import Connection
from harness.mock.model import Model
from harness.mock.pacing import ns
from harness.mock.sequence import Finish, Sequence
from harness.mock.settings import Settings
from harness.mock.stats import Row


class Server(Protocol):
    """The interface by which an exchange tells its server of its progress."""

    def end(self, row: Row, end: str) -> None:
        """Count a request that is over."""
        ...

    def now(self) -> int:
        """Return the time in ns, after all actions that are due by then."""
        ...

    def arm(self) -> None:
        """Set the timer anew: something may be due at another time than before."""
        ...


class Exchange:
    """A request under way: tokens become the client's bytes; ApiError where its model cannot answer."""

    def __init__(
        self,
        connection: Connection,
        row: Row,
        ask: Ask,
        model: Model,
        order: Order,
        settings: Settings,
        server: Server,
    ) -> None:
        self._server = server
        self._connection = connection
        self._row = row
        self._ask = ask
        self._model = model
        self._order = order
        self._answer = Answer(ask, row.model, row.number, settings.flavour, row.read_ns)
        self._sequences = [
            Sequence(prompt, output, self._token, index=i * ask.n + k, ends=ends)
            for i, prompt in enumerate(ask.prompts)
            for output, ends in [_length(ask, prompt, model.served.max_tokens, settings.output_tokens)]
            for k in range(ask.n)
        ]
        self._left = len(self._sequences)  # that go on
        self._light = ask.stream and order.fault is None
        wanted = sum(sequence.output_tokens for sequence in self._sequences)
        self._half = max(1, wanted // 2) if order.fault in {"cut", "malformed"} else 0  # at this token it goes wrong

    def begin(self, at_ns: int) -> None:
        """Answer from now on."""
        self._connection.lost = self._lost
        if self._order.fault == "hang":
            return
        if self._ask.stream:
            self._connection.stream()
        for sequence in self._sequences:
            self._model.submit(sequence, at_ns, ns(self._order.slow_s))

    def _token(self, sequence: Sequence, at_ns: int) -> None:
        """Send a token that a sequence made, or the end of an aborted one."""
        now_ns, row = time.monotonic_ns(), self._row
        if self._light and sequence.finish is None and sequence.made > 1:  # most tokens: nothing but a chunk
            row.tokens += 1
            self._connection.send(self._answer.chunk(sequence, now_ns))
            return
        if sequence.finish != "abort":
            row.tokens += 1
            if row.first_ns < 0:
                row.first_ns = self._answer.first_ns = now_ns
                self._answer.begun_ns = sequence.begun_ns
        if sequence.finish is not None:
            self._left -= 1
        if self._ask.stream:
            events = self._answer.chunk(sequence, now_ns)
            if row.tokens == self._half and sequence.finish != "abort":
                if self._order.fault == "cut":
                    self._connection.send(events)
                    self._cut(at_ns)
                    return
                events = BROKEN
            if self._left:
                self._connection.send(events)
                return
            events += self._answer.last(self._sequences, now_ns)
            self._end("200")
            self._connection.send(events, last=True)
        elif not self._left:
            body = self._answer.whole(self._sequences, now_ns)
            if self._order.fault == "cut":
                self._connection.cut(body[: len(body) // 2], len(body))
                self._end("cut")
                return
            self._end("200")
            self._connection.reply(200, body[: len(body) // 2] if self._order.fault == "malformed" else body)

    def _cut(self, at_ns: int) -> None:
        self._connection.cut()
        self._stop(at_ns)
        self._end("cut")

    def _lost(self) -> None:
        """Cancel the request of a client that left."""
        self._stop(self._server.now())
        self._end("hang" if self._order.fault == "hang" else "cancelled")
        self._server.arm()

    def _stop(self, at_ns: int) -> None:
        for sequence in self._sequences:
            self._model.cancel(sequence, at_ns)

    def _end(self, end: str) -> None:
        self._sequences = []  # which refer to this exchange
        self._server.end(self._row, "malformed" if end == "200" and self._order.fault == "malformed" else end)


def _length(ask: Ask, prompt_tokens: int, most: int, usual: int) -> tuple[int, Finish]:
    """Return how many tokens answer a prompt, and why no more: `max_tokens`, or the model's own end."""
    room = most - prompt_tokens
    if room < 1 or (ask.max_tokens or 1) > room:
        asked = f" and {ask.max_tokens} of output" if ask.max_tokens else ""
        message = f"{most} tokens of prompt and output are served; {prompt_tokens} of prompt{asked} were asked for"
        raise ApiError(400, message, "prompt" if room < 1 else "max_tokens", "context_length_exceeded")
    limit = ask.max_tokens or room
    length = max(usual, ask.min_tokens)
    return (limit, "length") if ask.ignore_eos or limit <= length else (length, "stop")
