"""Messages between the engine and its processes: pickled tuples over a socket, together with open files."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from harness.engines.torch.nets import Net


class Pages(NamedTuple):
    """The layout of a model's KV on a device: block sizes and number of blocks."""

    block_tokens: int
    block_bytes: int  # from one block to the next, in whole granules
    blocks: int  # as many as fit in the device's memory


class Given(NamedTuple):
    """The facts that a worker gets about a model: its network, and the layout of its KV."""

    net: Net
    pages: Pages


class Part(NamedTuple):
    """The part of a step that computes tokens of one request."""

    rid: int
    prompt_tokens: int
    cached_tokens: int  # tokens already in the KV cache
    tokens: int  # tokens to compute, after the cached ones
    generated: tuple[int, ...]  # ids of the tokens to compute that come after the prompt
    blocks: tuple[int, ...]
    remote: int = -1  # the device on which its KV lies and is attended; -1: the batch's

    @property
    def context(self) -> int:
        """The number of tokens in the request's context at the end of the step."""
        return self.cached_tokens + self.tokens


class Order(NamedTuple):
    """An order to compute a step, or its next slice; the step or slice ends before layer `until`."""

    step: int
    model: str
    parts: tuple[Part, ...]
    until: int
    share: float | None = None  # its part of the device's SMs; None: all
    op_s: float | None = None  # if set, attention for other devices is computed after each kernel, else after the step
    phase: str = "mixed"  # its lane's; the partitions of prefills and of decodes are disjoint
    repeat: int = 0  # times that its kernels are run again when it is done, back to back, to be timed


class Stepped(NamedTuple):
    """The result of a step or slice; its times are read from the monotonic clock."""

    step: int
    begun_s: float
    ended_s: float
    cpu_s: float
    tokens: tuple[int, ...]  # one per part; empty until the last layer is done
    logits: Any = None  # None unless a test asks for them
    kernels_s: float | None = None  # what its kernels took back to back, if they were repeated as a graph


Bytes = tuple[int, int, int, int, int]  # source, offset, target, offset, bytes


class Copy(NamedTuple):
    """An order to copy bytes between stores over a link.

    A link does copies of KV first, then the other copies. Within each group, the oldest copy comes first.
    """

    number: int
    link: str
    rate: float  # bytes/s
    kv: bool
    parts: tuple[Bytes, ...]


class Copied(NamedTuple):
    """The message that a copy is done."""

    number: int
    ended_s: float


def pair() -> tuple[Connection, int]:
    """Create a connection; return one end of it, and the file descriptor of the other end."""
    mine, other = socket.socketpair()
    return Connection(mine.detach()), other.detach()


def send_files(to: Connection, files: Sequence[int]) -> None:
    """Send open files over a connection, after the message that announces them."""
    with socket.socket(fileno=os.dup(to.fileno())) as link:
        socket.send_fds(link, [b"f"], files)


def take_files(source: Connection, count: int) -> list[int]:
    """Return the file descriptors that follow a message. Raises EOFError if the sender has ended."""
    with socket.socket(fileno=os.dup(source.fileno())) as link:
        data, files, *_ = socket.recv_fds(link, 1, count)
    if not data:
        raise EOFError
    return files
