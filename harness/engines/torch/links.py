"""The links: a process that copies between stores at given rates, as copy engines do while kernels run.

On a GPU, a byte from the host takes about 60 times as long as a byte from the GPU's memory. On a CPU, both take equally
long. So a link copies one chunk after another, each of CHUNK_S seconds, and delays the end of a chunk until the link's
rate allows it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from harness.engines.torch.wire import Bytes, Copied, Copy, take_files

CHUNK_S = 0.002  # seconds of a chunk, which is not overtaken; 64 MiB take 1.2 ms over PCIe 5
LEAST = 16 * 1024  # bytes of a chunk
FASTEST = 1e12  # bytes/s by which copies without a rate are cut into chunks


class Job:
    """A copy that a link has begun or will begin."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.parts = copy, list(reversed(copy.parts))
        self.chunk = max(LEAST, int(min(copy.rate, FASTEST) * CHUNK_S))

    def cut(self) -> Iterator[Bytes]:
        """Yield the parts of the next chunk.

        Parts that are adjacent both at their source and at their target are joined.
        """
        room = self.chunk
        while room and self.parts:
            source, a, target, b, size = self.parts.pop()
            while size < room and self.parts and self.parts[-1][:4] == (source, a + size, target, b + size):
                size += self.parts.pop()[4]
            if size > room:
                self.parts.append((source, a + room, target, b + room, size - room))
                size = room
            yield source, a, target, b, size
            room -= size

    def move(self, stores: dict[int, int]) -> int:
        """Copy a chunk between files; return the number of bytes copied."""
        moved = 0
        for source, a, target, b, size in self.cut():
            os.pwrite(stores[target], os.pread(stores[source], size, a), b)
            moved += size
        return moved


def serve(engine: Connection) -> None:
    """Carry out the copies that the engine orders. Raises EOFError once the engine has ended."""
    stores: dict[int, int] = {}
    links: dict[str, list[Job]] = {}
    free_s: dict[str, float] = {}  # when a link has moved its last chunk
    while True:
        now_s = time.monotonic()
        for link, jobs in links.items():
            while jobs and free_s.get(link, 0.0) <= now_s:
                job = next((job for job in jobs if job.copy.kv), jobs[0])
                if not job.parts:  # the time of its last chunk is over
                    jobs.remove(job)
                    engine.send(Copied(job.copy.number, max(free_s.get(link, 0.0), now_s)))
                    continue
                free_s[link] = max(free_s.get(link, 0.0), now_s - CHUNK_S) + job.move(stores) / job.copy.rate
        due_s = min((free_s.get(link, 0.0) for link, jobs in links.items() if jobs), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        if not select.select([engine], [], [], wait_s)[0]:
            continue
        message = engine.recv()
        if isinstance(message, Copy):
            jobs = links.setdefault(message.link, [])
            if not jobs:  # idle time of a link is not made up for
                free_s[message.link] = max(free_s.get(message.link, 0.0), time.monotonic())
            jobs.append(Job(message))
        else:
            numbers, _ = message
            stores |= zip(numbers, take_files(engine, len(numbers)), strict=True)
            engine.send("ready")
