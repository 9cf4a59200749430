"""Times of each request's events, in ns of CLOCK_MONOTONIC: the sender records them, and a `Log` is the result."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.client.states import REQUEST

STATES = tuple(REQUEST.steps)
WAITING, CONNECTING, SENT, STREAMING, DONE, FAILED, DROPPED = range(len(STATES))
LEGAL = tuple(frozenset(map(STATES.index, to)) for to in REQUEST.steps.values())  # the states that may follow each


class Log(NamedTuple):
    """The log of a run: arrays with one element per request in the workload's order, unless a field's comment differs.

    The value -1 means that an event never occurred, or that a number is unknown.
    """

    intended_ns: NDArray[np.int64]  # intended arrival; a closed loop's is `think_s` after the end before it
    due_ns: NDArray[np.int64]  # when it was to leave: as intended, or when `send` asked for it
    write_ns: NDArray[np.int64]  # when the kernel had taken the request, or as much of it as it takes at once
    byte_ns: NDArray[np.int64]  # first bytes of the response
    done_ns: NDArray[np.int64]  # end of the stream, if the request is done
    end_ns: NDArray[np.int64]  # its end, whatever it was
    status: NDArray[np.int16]  # HTTP's; 0: no response
    state: NDArray[np.int8]  # an index of STATES
    error: list[str]  # why it failed; "" elsewhere
    usage_tokens: NDArray[np.int64]  # what the server says that it made; see wire.py where the chunks' sum differs
    prompt_ns: NDArray[np.int64]  # how long its prompt took by the server's own account
    cached_tokens: NDArray[np.int64]  # prompt tokens that the server says to have had in a cache
    offsets: NDArray[np.int64]  # n + 1: the chunks of request i are offsets[i] to before offsets[i + 1]
    chunk_ns: NDArray[np.int64]  # per chunk: when the read that completed it came
    chunk_tokens: NDArray[np.int32]  # per chunk
    chunk_shared: NDArray[np.bool_]  # per chunk: it came in the same read as the chunk before it
    precise: bool  # the timer was the kernel's
    cpu_s: float  # what the client's process took since `begin`
    wall_s: float  # since `begin`
    peak_bytes: int  # its resident memory
    illegal: tuple[str, ...] = ()  # steps that the diagram of requests does not have

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Number of tokens in all chunks of each request."""
        total = np.concatenate([[0], np.cumsum(self.chunk_tokens, dtype=np.int64)])
        return np.asarray(total[self.offsets[1:]] - total[self.offsets[:-1]], np.int64)

    @property
    def by_event(self) -> NDArray[np.bool_]:
        """Mask of the finished requests whose token count in the server's usage differs from the sum over their chunks.

        For these requests only the times of events are known, not the number of tokens in each event.
        """
        some = np.diff(self.offsets) > 0
        return np.asarray((self.done_ns >= 0) & some & (self.usage_tokens > 0) & (self.usage_tokens != self.tokens))

    @property
    def first_ns(self) -> NDArray[np.int64]:
        """The time of each request's first chunk; -1 if no chunk came."""
        some = np.diff(self.offsets) > 0
        first = np.full(len(self.intended_ns), -1, np.int64)
        first[some] = self.chunk_ns[self.offsets[:-1][some]]
        return first


NS = ("intended_ns", "due_ns", "write_ns", "byte_ns", "done_ns", "end_ns", "usage_tokens", "prompt_ns", "cached_tokens")
KINDS = {**dict.fromkeys(NS, "q"), "status": "h", "state": "b"}
CHUNKS = {"rid": "i", "ns": "q", "tokens": "i", "shared": "b"}


class Book:
    """The log of a run in progress; the process that sends requests keeps it, and passes it on at the run's end.

    Chunks are sent to its parent process earlier, in the order in which they were read. Columns are `array.array`,
    because writing a number into such an array takes only tens of nanoseconds.
    """

    def __init__(self, n: int) -> None:
        def column(name: str, of: int) -> array[int]:
            return array(KINDS[name], [of]) * n

        self.intended_ns, self.due_ns, self.write_ns = (column(name, -1) for name in NS[:3])
        self.byte_ns, self.done_ns, self.end_ns = (column(name, -1) for name in NS[3:6])
        self.usage_tokens, self.prompt_ns, self.cached_tokens = (column(name, -1) for name in NS[6:])
        self.status, self.state = (column(name, 0) for name in ("status", "state"))
        self.errors: dict[int, str] = {}
        self.illegal: list[str] = []
        self.precise, self.cpu_s, self.wall_s, self.peak_bytes = True, 0.0, 0.0, 0
        self._rid, self._ns, self._tokens, self._shared = (array(kind) for kind in CHUNKS.values())

    def step(self, rid: int, state: int) -> None:
        """Move a request to a state.

        A step that the state diagram does not allow is recorded in `illegal`. If BENCH_STRICT is set, it raises an
        error instead (see Diagram).
        """
        before = self.state[rid]
        if state not in LEGAL[before]:
            self.illegal.append(REQUEST.illegal(STATES[before], STATES[state], rid))
        self.state[rid] = state

    def chunks(self, rid: int, ns: int, tokens: list[int]) -> None:
        """Record the chunks of one read, which all have the time `ns`."""
        shared = 0
        for count in tokens:
            self._rid.append(rid)
            self._ns.append(ns)
            self._tokens.append(count)
            self._shared.append(shared)
            shared = 1

    def spill(self) -> tuple[bytes, ...]:
        """Remove and return the chunks recorded since the last call, as one column of bytes for each name in CHUNKS."""
        columns = (self._rid, self._ns, self._tokens, self._shared)
        spilt = tuple(column.tobytes() for column in columns)
        for column in columns:
            del column[:]
        return spilt


def assemble(book: Book, spilt: Sequence[tuple[bytes, ...]]) -> Log:
    """Build a run's log from the book and the chunks sent earlier; the log groups the chunks by request."""
    requests = {name: np.frombuffer(getattr(book, name), kind) for name, kind in KINDS.items()}
    rid, ns, tokens, shared = (
        np.frombuffer(b"".join(spill[k] for spill in spilt), kind) for k, kind in enumerate(CHUNKS.values())
    )
    n = len(requests["state"])
    order = np.argsort(rid, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rid, minlength=n))]).astype(np.int64)
    return Log(
        **requests,
        error=[book.errors.get(i, "") for i in range(n)],
        offsets=offsets,
        chunk_ns=ns[order],
        chunk_tokens=tokens[order],
        chunk_shared=shared[order].astype(bool),
        precise=book.precise,
        cpu_s=book.cpu_s,
        wall_s=book.wall_s,
        peak_bytes=book.peak_bytes,
        illegal=tuple(book.illegal),
    )
