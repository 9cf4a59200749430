"""A card in host memory: the driver's calls on pages by real mappings, and streams that run at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.torch import cpu, cuda, fused, kind, nursery, processes
from harness.engines.torch.wire import pair
from probe import driver
from tests.probe import driverless

PAGE, SMS = 2 << 20, driverless.SMS
NONE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | cpu.MAP_NORESERVE


class Memory:
    """Handles are pages of one file; a range is mapped throughout and open before anything touches it."""

    def __init__(self) -> None:
        self.file = os.memfd_create("card")
        self.pages = 0
        self.released: list[int] = []
        self.mapped: dict[int, int] = {}  # size by address
        self.shut: set[int] = set()  # mapped, without access

    def create(self, size: int, ordinal: int = 0) -> tuple[int, int]:
        assert ordinal == 0
        at, self.pages = self.pages, self.pages + size
        os.ftruncate(self.file, self.pages)
        return at, size

    def reserve(self, size: int, align: int) -> int:
        assert size % align == 0
        return cpu._mmap(None, size, cpu.NONE, NONE, -1, 0)

    def map_at(self, at: int, size: int, handle: tuple[int, int], offset: int = 0) -> None:
        assert (handle[1], offset) == (size, 0)
        assert at not in self.mapped
        cpu._mmap(at, size, cpu.NONE, mmap.MAP_SHARED | cpu.MAP_FIXED, self.file, handle[0])
        self.mapped[at] = size
        self.shut.add(at)

    def allow(self, at: int, size: int, ordinal: int = 0) -> None:
        for page in self._inside(at, size):
            assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(self.mapped[page]), cpu.BOTH)
            self.shut.discard(page)

    def unmap(self, at: int, size: int) -> None:
        for page in self._inside(at, size):
            cpu._mmap(page, self.mapped.pop(page), cpu.NONE, NONE | cpu.MAP_FIXED, -1, 0)

    def _inside(self, at: int, size: int) -> list[int]:
        pages = list(range(at, at + size, PAGE))
        assert sum(self.mapped[page] for page in pages) == size  # exactly what was mapped
        return pages


class Event:
    """A point that has passed; the first look at it comes too early."""

    looks = 0

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def elapsed_time(self, end: Event) -> float:
        """Return the 12 ms between two events that keep the time."""
        assert self.timed
        assert end.timed
        return 12.0

    def record(self, _: Any = None) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 1


CURRENT = threading.local()


@contextmanager
def on(stream: Any) -> Iterator[None]:
    """Make a stream the thread's."""
    before, CURRENT.stream = getattr(CURRENT, "stream", None), stream
    yield
    CURRENT.stream = before


def graph(self: fused.Graphs, size: int, first: int, end: int) -> Any:
    """Return a graph that computes at its replay what it computed at its capture."""
    key = size, first, end, int(CURRENT.stream.cuda_stream)
    if key not in self._graphs:
        before = self._x.clone(), self._out.clone()
        result, _ = self.body(size, first, end)
        self._x.copy_(before[0])
        self._out.copy_(before[1])

        def replay() -> None:
            again, _ = self.body(size, first, end)
            for to, made in zip(result or (), again or (), strict=True):
                to.copy_(made)

        self._graphs[key] = SimpleNamespace(replay=replay), result
    return self._graphs[key]


class Nursery(processes.Nursery):
    """The cards' process as a thread of this one, whose driver is emulated."""

    def __init__(self, *, cuda: bool = False) -> None:
        assert cuda
        self._end, file = pair()
        threading.Thread(target=nursery.threads, args=(Connection(file),), daemon=True).start()
        assert self._end.recv() == "ready"

    @property
    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._end.close()


def varlen(q: Any, k: Any, v: Any, ends: Any) -> Any:
    """Compute torch's attention of packed sequences, each causal from its end; what is behind the last is no number."""
    out, (of_q, of_k) = torch.full_like(q, torch.nan), (x.tolist() for x in ends)
    for a, b, c, d in zip(of_q, of_q[1:], of_k, of_k[1:], strict=False):
        if b > a:
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            query, key, value = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
            out[a:b] = mixed[0].transpose(0, 1)
    return out


def card(monkeypatch: pytest.MonkeyPatch, dtype: str) -> Memory:
    """Let DEVICE=cuda mean an emulated card of 132 SMs until the test ends."""
    memory = Memory()
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("DTYPE", dtype)
    monkeypatch.setattr(kind, "HOST", 64 * PAGE)
    monkeypatch.setattr(kind, "cards", lambda: ["an emulated card"])

    pages = {name: getattr(memory, name) for name in ("create", "reserve", "map_at", "allow", "unmap")}
    for name, call in (driverless.CALLS | pages).items():
        monkeypatch.setattr(driver, name, call)
    facts: dict[str, Any] = {
        "Stream": driverless.Stream,
        "ExternalStream": driverless.Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda: getattr(CURRENT, "stream", None) or driverless.Stream(),
        "init": lambda: None,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=SMS),
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=None, **k: zeros(*a, **k))  # noqa: PLW0108 - one less
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(cuda, "place", lambda card: torch.device("cpu"))
    monkeypatch.setattr(fused.Graphs, "graph", graph)
    monkeypatch.setattr(fused, "varlen", varlen)
    monkeypatch.setattr(cuda, "varlen", varlen)
    monkeypatch.setattr(cuda, "bind", lambda: None)
    monkeypatch.setattr(processes, "Nursery", Nursery)
    monkeypatch.setattr(os, "_exit", _exit)
    return memory


def _exit(code: int) -> None:
    """Let the thread that asks for it end alone."""
    if code:
        raise RuntimeError("a thread of the cards' process has failed")
