"""Every probe's own code, run to its end on an emulated device: nothing is timed truly, every line is walked.

Kernels only check their arguments, streams and graphs run at once, pages are host memory that never moves.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import mmap
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")

from probe import card, compute, driver, duels, kernels, llama, memory, rig  # noqa: E402
from probe.plan import PLAN  # noqa: E402
from probe.worker import Box, Sample, find, key, record  # noqa: E402
from tests.probe.driverless import CALLS, SMS, Stream  # noqa: E402

KIB = 1 << 10
NORESERVE = 0x4000  # Linux; `mmap` names it from Python 3.13 on
TINY = llama.Dims("8B", 2, 64, 4, 2, 32, 96, 128)
DIMS = {name: TINY._replace(name=name) for name in llama.DIMS}


class Event:
    """A point that has passed; a millisecond lies between any two."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.timing = enable_timing

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        assert self.timing
        assert other.timing
        return 1.0


class Graph:
    """A graph that captures nothing: what is launched runs at once. To destroy one breaks a capture under way."""

    capturing = broken = False

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        assert not Graph.capturing
        Graph.capturing = True

    def capture_end(self) -> None:
        Graph.capturing = False

    def __del__(self) -> None:
        Graph.broken |= Graph.capturing

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Kernel:
    """A kernel that takes the real one's arguments."""

    def __init__(self, kernel: Any) -> None:
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 1 <= len(grid) <= 3
        assert all(isinstance(n, int) and n >= 1 for n in grid)

        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **more: Any) -> None:
            assert num_warps & (num_warps - 1) == 0
            assert num_stages > 0
            self.signature.bind(*args, **more)

        return launch


class Memory:
    """The driver's calls on pages, over host memory; maps and unmaps are only counted."""

    def __init__(self) -> None:
        self.spans: dict[int, mmap.mmap] = {}
        self.mapped: dict[int, int] = {}
        self.open: set[int] = set()
        self.handles = 0

    def reserve(self, size: int, align: int) -> int:
        assert align & (align - 1) == 0
        span = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(span))
        self.spans[at] = span
        return at

    def unreserve(self, at: int, size: int) -> None:
        assert not [page for page in self.mapped if at <= page < at + size]
        del self.spans[at]

    def create(self, size: int, ordinal: int = 0) -> int:
        self.handles += 1
        return size

    def release(self, handle: int) -> None:
        self.handles -= 1

    def map_at(self, at: int, size: int, handle: int, offset: int = 0) -> None:
        assert at not in self.mapped
        assert offset + size <= handle
        self.mapped[at] = size

    def allow(self, at: int, size: int, ordinal: int = 0) -> None:
        inside = {page: n for page, n in self.mapped.items() if at <= page < at + size}
        assert sum(inside.values()) == size
        self.open |= set(inside)

    def unmap(self, at: int, size: int) -> None:
        inside = [page for page in self.mapped if at <= page < at + size]
        assert sum(self.mapped[page] for page in inside) == size
        for page in inside:
            del self.mapped[page]
            self.open.discard(page)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Emulate a tiny H200 in host memory."""
    fake = Memory()
    pages = ("reserve", "unreserve", "create", "release", "map_at", "allow", "unmap")
    calls: dict[str, Any] = {
        **CALLS,
        **{name: getattr(fake, name) for name in pages},
        "attribute": lambda dev, name: SMS,
        "memory": lambda: (1 << 38, 1 << 38),
        "granularity": lambda ordinal=0: 1 << 21,
        "destroy_stream": lambda stream: None,
        "destroy_green": lambda context: None,
        "copy_batch": lambda dsts, srcs, sizes, stream: [
            ctypes.memmove(*copy) for copy in zip(dsts, srcs, sizes, strict=True)
        ],
        "write_word": lambda stream, at, value: None,
        "wait_word": lambda stream, at, value: None,
    }
    for name, call in calls.items():
        monkeypatch.setattr(driver, name, call)
    for name, kernel in list(vars(kernels).items()):
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            monkeypatch.setattr(kernels, name, Kernel(kernel))
    cuda: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=SMS, L2_cache_size=64 * KIB),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("empty", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, pin_memory=False, **k: make(*a, **k))

    def mm(a: Any, b: Any, *, out: Any) -> Any:
        assert a.shape[1] == b.shape[0]
        assert out.shape == (a.shape[0], b.shape[1])
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: q)
    monkeypatch.setattr(compute, "varlen", lambda q, k, v: q)
    monkeypatch.setattr(llama, "reference", lambda a, layer: torch.ones_like(a.q).float())
    monkeypatch.setattr(llama.Attend, "run", launched)
    monkeypatch.setattr(rig, "DEVICE", "cpu")
    monkeypatch.setattr(llama, "DIMS", DIMS)
    monkeypatch.setattr(rig, "LARGE", 64 * KIB)
    monkeypatch.setattr(rig, "MIB", 4 * KIB)
    for module in (rig, memory):
        monkeypatch.setattr(module, "GIB", 1 << 20)
    monkeypatch.setattr(memory, "CHUNK", 64 * KIB)
    monkeypatch.setattr(memory, "LOCKED", memory.Locked())
    monkeypatch.setattr(duels, "SHORT_S", 0.02)
    monkeypatch.setattr(duels, "LONG_S", 0.02)
    monkeypatch.setattr(card.Card, "timeline", lambda *_: [(0, "kernel", 0.0, 1e-6)])  # CUPTI needs a card
    monkeypatch.setattr(duels, "PROCESSES", [])  # children import the real torch
    monkeypatch.setattr(duels, "MPS", "no-such-program")
    cached = (rig.sms, rig.l2_bytes, rig.whole, rig.pair, llama.rotary, card.device)
    for lookup in cached:
        lookup.cache_clear()
    Graph.broken = False
    yield fake
    assert not Graph.broken
    for lookup in cached:
        lookup.cache_clear()


run = llama.Attend.run


def launched(a: llama.Attend, layer: int) -> None:
    """Launch it, and leave something to look at in its output."""
    assert 0 <= layer < a.kv.m.layers
    run(a, layer)
    a.out.fill_(1.0)


def finite(sample: Sample) -> bool:
    return all(math.isfinite(v) for v in sample.values) and len(sample.values) > 0


@pytest.mark.parametrize("probe", PLAN.probes, ids=lambda p: p.name)
def test_a_probe_runs_to_its_end(probe: Any, device: Memory) -> None:
    samples = list(find(probe.module, probe.name, Box(600.0)))
    assert samples
    assert all(finite(sample) for sample in samples)
    keys = [key(sample.what, sample.params) for sample in samples]
    assert len(set(keys)) == len(keys)
    assert all(record(probe.name, sample)["n"] == len(sample.values) for sample in samples)
    if probe.name in {"vmm", "attention", "evict", "unmap"}:
        assert not device.mapped  # what was taken was given back
        assert not device.spans
        assert device.handles == 0


@pytest.mark.usefixtures("device")
def test_a_graph_keeps_the_buffers_that_it_writes() -> None:
    model = llama.Model(TINY)
    decode = model.decode(llama.pool(TINY, (1, 64)), 1, 64, 132)
    buffers = weakref.ref(decode)
    graph = rig.graph_of(rig.whole(), decode.step)
    del decode
    gc.collect()
    assert buffers() is not None
    del graph
    gc.collect()
    assert buffers() is None


# Checks, what leaves pages for the next, and what may find no time for a single unit here.
REPEATED = {"same_twice", "swap_equal", "seen", "error", "step_beside"}


@pytest.mark.parametrize("probe", PLAN.probes, ids=lambda p: p.name)
@pytest.mark.usefixtures("device")
def test_a_probe_does_nothing_twice(probe: Any) -> None:
    done = [key(sample.what, sample.params) for sample in find(probe.module, probe.name, Box(600.0))]
    more = {sample.what for sample in find(probe.module, probe.name, Box(600.0, done))}
    assert more <= REPEATED
