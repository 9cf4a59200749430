"""The links of cards: they copy between heaps and host memory with copy engines.

On cores, `links.py` copies between files instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from harness.engines.torch import cuda, nets
from harness.engines.torch.ending import bound
from harness.engines.torch.links import CHUNK_S, Job
from harness.engines.torch.nets import Net
from harness.engines.torch.wire import Copied, Copy, take_files
from harness.policy.types import GIB
from probe import driver

AHEAD = 2  # chunks of a link on their way: the copy engine has the next one while a thread notes the last


class Store(NamedTuple):
    """A memory that links copy from and to."""

    at: int
    on_host: bool


class Flying(NamedTuple):
    """A chunk of a copy that is in flight."""

    event: Any  # recorded after it
    due_s: float  # it is done no sooner, by the monotonic clock
    ends: int | None  # number of the copy whose last chunk it is; None: it is not the last


class Line:
    """One link, which does its copies one after another, in its own thread and stream."""

    def __init__(self, stores: Mapping[int, Store], done: Callable[[int], None]) -> None:
        self.stores, self.done = stores, done
        self.jobs: list[Job] = []  # whose chunks are not all on their way
        self.ended = False
        self.more = threading.Condition()

    def run(self) -> None:
        """Do the link's copies chunk by chunk until the link ends; copies of KV go first.

        Up to AHEAD chunks are in flight at the same time. A chunk counts as done no sooner than the link's rate allows.
        """
        stream, flying, free_s = torch.cuda.Stream(), deque[Flying](), 0.0
        while True:
            with self.more:
                self.more.wait_for(lambda: self.jobs or flying or self.ended)
                if self.ended:
                    return
                job = next((job for job in self.jobs if job.copy.kv), self.jobs[0] if self.jobs else None)
            if job is not None and len(flying) < AHEAD:
                begun_s, moved, event = time.monotonic(), 0, torch.cuda.Event()
                for source, a, target, b, size in job.cut():
                    self._copy(self.stores[target], b, self.stores[source], a, size, stream.cuda_stream)
                    moved += size
                event.record(stream)
                free_s = max(free_s, begun_s - CHUNK_S) + moved / job.copy.rate
                flying.append(Flying(event, free_s, None if job.parts else job.copy.number))
                if not job.parts:
                    with self.more:
                        self.jobs.remove(job)
                continue
            chunk = flying.popleft()
            chunk.event.synchronize()
            if (early_s := chunk.due_s - time.monotonic()) > 0:
                time.sleep(early_s)
            if chunk.ends is not None:
                self.done(chunk.ends)

    def _copy(self, to: Store, b: int, source: Store, a: int, size: int, stream: int) -> None:
        if to.on_host and source.on_host:
            ctypes.memmove(to.at + b, source.at + a, size)
            return
        copied = driver.to_host if to.on_host else driver.to_device if source.on_host else driver.between
        copied(to.at + b, source.at + a, size, stream)


class Links:
    """All links of a run; each has its own thread."""

    def __init__(self, cards: cuda.Cards, engine: Connection) -> None:
        self.cards, self.engine, self.stores = cards, engine, dict[int, Store]()
        self.lines: dict[str, Line] = {}
        self._send = threading.Lock()
        self._memory: list[mmap.mmap] = []

    def serve(self) -> None:
        """Carry out the copies that the engine orders. Raises EOFError once the engine has ended."""
        try:
            while True:
                self._do(self.engine.recv())
        finally:
            for line in self.lines.values():
                with line.more:
                    line.ended = True
                    line.more.notify()

    def _do(self, message: Any) -> None:
        if not isinstance(message, Copy):
            self._take(*message)
            self.engine.send("ready")
            return
        if message.link not in self.lines:
            line = self.lines[message.link] = Line(self.stores, self._done)
            threading.Thread(target=bound, args=(cuda.bind, line.run), daemon=True).start()
        line = self.lines[message.link]
        with line.more:
            line.jobs.append(Job(message))
            line.more.notify()

    def _done(self, number: int) -> None:
        with self._send:
            self.engine.send(Copied(number, time.monotonic()))

    def _take(self, numbers: Sequence[int], served: Sequence[Net]) -> None:
        """Register heaps and files of host memory as stores of the links.

        The files are locked in memory. Then the models' weights are written to the files of models.
        """
        files = take_files(self.engine, len(numbers))
        by_inode: dict[int, Store] = {}  # weights on disk have the file of those in host memory
        for number, file in zip(numbers, files, strict=True):
            inode = os.fstat(file).st_ino
            if number < len(self.cards.heaps):
                self.stores[number] = Store(self.cards.heaps[number].flat, on_host=False)
            else:
                if inode not in by_inode:
                    by_inode[inode] = self._locked(file)
                self.stores[number] = by_inode[inode]
            os.close(file)
        for k, net in enumerate(served):
            draw(net, k, self.stores[len(self.cards.heaps) + 1 + k].at, self.cards.dtype)

    def _locked(self, file: int) -> Store:
        """Map a file of host memory, touch its pages in several threads, and lock them; return the file as a store."""
        memory = mmap.mmap(file, os.fstat(file).st_size)
        self._memory.append(memory)
        at, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        pieces = [(at + first, min(GIB, size - first)) for first in range(0, size, GIB)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
        driver.pin(at, size)  # as one range, since a copy may not cross from one to another
        return Store(at, on_host=True)


def draw(net: Net, seed: int, at: int, dtype: torch.dtype) -> None:
    """Write a network's weights to host memory: those of its checkpoint, or else weights drawn on the card."""
    if net.folder:
        whole = torch.from_numpy(nets.blob(net, seed)).to(dtype)
        ctypes.memmove(at, whole.data_ptr(), whole.nbytes)
        return
    generator = torch.Generator(cuda.place(0)).manual_seed(seed)
    stream = torch.cuda.current_stream()
    for name, size in nets.tensors(net):
        drawn = torch.empty(size, dtype=dtype, device=cuda.place(0))
        if len(size) == 1:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            drawn.normal_(0.0, size[-1] ** -0.5, generator=generator)
        driver.to_host(at, drawn.data_ptr(), drawn.nbytes, stream.cuda_stream)
        stream.synchronize()
        at += drawn.nbytes
    torch.cuda.empty_cache()
