"""Messages between the engine and its processes: pickled tuples over a socket, with files sent beside them."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from harness.engines.torch.nets import Net


class Pages(NamedTuple):
    """The layout of a model's KV on a device."""

    block_tokens: int
    block_bytes: int  # from one block to the next: whole granules
    blocks: int  # as many as fit in the device's memory


class Given(NamedTuple):
    """A model as a worker needs it."""

    net: Net
    pages: Pages


class Part(NamedTuple):
    """A request's part of a step."""

    rid: int
    prompt_tokens: int
    cached_tokens: int  # tokens already in the KV cache
    tokens: int  # tokens to compute, behind those
    generated: tuple[int, ...]  # ids of the computed tokens that lie behind the prompt
    blocks: tuple[int, ...]
    remote: int = -1  # the device on which its KV lies and is attended; -1: the batch's

    @property
    def context(self) -> int:
        """Its tokens once the step is done."""
        return self.cached_tokens + self.tokens


class Order(NamedTuple):
    """A step, or a slice of one: up to layer `until`."""

    step: int
    model: str
    parts: tuple[Part, ...]
    until: int
    share: float | None = None  # its part of the device's SMs
    op_s: float | None = None  # with it, others' attention gets in after each kernel, not after the step
    phase: str = "mixed"  # its lane's: the partitions of prefills and of decodes are disjoint
    repeat: int = 0  # so often its kernels run again when it is done, back to back, to be timed


class Stepped(NamedTuple):
    """The result of a step or slice; times of the monotonic clock."""

    step: int
    begun_s: float
    ended_s: float
    cpu_s: float
    tokens: tuple[int, ...]  # one a part, once the last layer is done
    logits: Any = None  # None unless a test asks for them
    kernels_s: float | None = None  # what its kernels took back to back, if they were repeated as a graph


Bytes = tuple[int, int, int, int, int]  # source, offset, target, offset, bytes


class Copy(NamedTuple):
    """Bytes from one store to another, over a link; the link's next chunk is of KV, else of the oldest copy."""

    number: int
    link: str
    rate: float  # bytes/s
    kv: bool
    parts: tuple[Bytes, ...]


class Copied(NamedTuple):
    """A copy is done."""

    number: int
    ended_s: float


def pair() -> tuple[Connection, int]:
    """Return one end of a new connection, and the file of the other."""
    mine, other = socket.socketpair()
    return Connection(mine.detach()), other.detach()


def send_files(to: Connection, files: Sequence[int]) -> None:
    """Send open files behind a message that announces them."""
    with socket.socket(fileno=os.dup(to.fileno())) as link:
        socket.send_fds(link, [b"f"], files)


def take_files(source: Connection, count: int) -> list[int]:
    """Take the files that a message announced."""
    with socket.socket(fileno=os.dup(source.fileno())) as link:
        size = socket.CMSG_LEN(count * array.array("i").itemsize)
        data, ancillary, *_ = link.recvmsg(1, size)
        if not data:
            raise EOFError
        files = array.array("i")
        for _, _, raw in ancillary:
            files.frombytes(raw[: len(raw) - len(raw) % files.itemsize])
        return list(files)
