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

PAGE, SMS = 2 << 20, 132
LIBC = ctypes.CDLL(None)


class Stream:
    """A stream on which all is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = id(self)

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


def resource(count: int) -> Any:
    """Return a part of the card with so many SMs."""
    return SimpleNamespace(sm=SimpleNamespace(smCount=count, minSmPartitionSize=8, smCoscheduledAlignment=8))


def copy(dst: int, src: int, size: int, stream: int) -> None:
    """Copy within the host's memory."""
    ctypes.memmove(dst, src, size)


class Memory:
    """Handles are pages of one file; a range is mapped throughout and open before anything touches it."""

    def __init__(self) -> None:
        self.file = os.memfd_create("card")
        self.pages = 0
        self.handles: set[tuple[int, int]] = set()
        self.reserved: set[int] = set()
        self.mapped: dict[int, int] = {}  # size by address
        self.shut: set[int] = set()  # mapped, without access

    def create(self, size: int, ordinal: int = 0) -> tuple[int, int]:
        assert ordinal == 0
        handle, self.pages = (self.pages, size), self.pages + size
        os.ftruncate(self.file, self.pages)
        self.handles.add(handle)
        return handle

    def release(self, handle: tuple[int, int]) -> None:
        self.handles.remove(handle)

    def reserve(self, size: int, align: int) -> int:
        assert size % align == 0
        at = cpu._mmap(None, size, cpu.NONE, cpu.RESERVED, -1, 0)
        self.reserved.add(at)
        return at

    def unreserve(self, at: int, size: int) -> None:
        assert not [page for page in self.mapped if at <= page < at + size]
        self.reserved.remove(at)
        assert not LIBC.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))

    def map_at(self, at: int, size: int, handle: tuple[int, int], offset: int = 0) -> None:
        assert offset + size <= handle[1]
        assert at not in self.mapped
        cpu._mmap(at, size, cpu.NONE, mmap.MAP_SHARED | cpu.MAP_FIXED, self.file, handle[0] + offset)
        self.mapped[at] = size
        self.shut.add(at)

    def allow(self, at: int, size: int, ordinal: int = 0) -> None:
        for page in self._inside(at, size):
            assert not LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(self.mapped[page]), cpu.BOTH)
            self.shut.discard(page)

    def unmap(self, at: int, size: int) -> None:
        for page in self._inside(at, size):
            cpu._mmap(page, self.mapped.pop(page), cpu.NONE, cpu.RESERVED | cpu.MAP_FIXED, -1, 0)

    def _inside(self, at: int, size: int) -> list[int]:
        pages = [page for page in self.mapped if at <= page < at + size]
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


def driven(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Let the driver's and torch's calls be those of an emulated card of 132 SMs until the test ends."""
    memory = Memory()
    pages = ("create", "release", "reserve", "unreserve", "map_at", "allow", "unmap")
    calls: dict[str, Any] = {
        "device": lambda ordinal=0: 0,
        "bind": lambda ordinal=0: None,
        "all_sms": lambda dev: resource(SMS),
        "split": lambda whole, n: (resource(n), resource(whole.sm.smCount - n)),
        "groups": lambda whole, count, n: [resource(n)] * count,
        "describe": lambda resource: resource,
        "green": lambda desc, dev: desc,
        "green_sms": lambda context: context,
        "stream": lambda: 7,
        "green_stream": lambda context, priority=0: 7,
        "pin": lambda at, size: None,
        **dict.fromkeys(("to_device", "to_host", "between"), copy),
        **{name: getattr(memory, name) for name in pages},
    }
    for name, call in calls.items():
        monkeypatch.setattr(driver, name, call)
    facts: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda: getattr(CURRENT, "stream", None) or Stream(),
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=SMS, L2_cache_size=1 << 16),
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("empty", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, pin_memory=None, **k: make(*a, **k))
    return memory


def card(monkeypatch: pytest.MonkeyPatch, dtype: str) -> Memory:
    """Let DEVICE=cuda mean an emulated card until the test ends."""
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("DTYPE", dtype)
    monkeypatch.setattr(kind, "HOST", 64 * PAGE)
    monkeypatch.setattr(kind, "cards", lambda: ["an emulated card"])
    facts: dict[str, Any] = {
        "init": lambda: None,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "graph_pool_handle": lambda: 0,
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(cuda, "place", lambda card: torch.device("cpu"))
    monkeypatch.setattr(fused.Graphs, "graph", graph)
    monkeypatch.setattr(fused, "varlen", varlen)
    monkeypatch.setattr(cuda, "varlen", varlen)
    monkeypatch.setattr(cuda, "bind", lambda: None)
    monkeypatch.setattr(processes, "Nursery", Nursery)
    monkeypatch.setattr(os, "_exit", _exit)
    return driven(monkeypatch)


def _exit(code: int) -> None:
    """Let the thread that asks for it end alone."""
    raise RuntimeError(f"a thread of the cards' process has failed ({code})")
