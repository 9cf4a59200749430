"""Every probe's own code, run to its end on an emulated device: nothing is timed truly, every line is walked.

Kernels only check their arguments, streams and graphs run at once, pages are host memory that never moves.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")

from probe import card, compute, driver, duels, kernels, llama, memory, rig  # noqa: E402
from probe.plan import PLAN  # noqa: E402
from probe.worker import Box, Sample, find, key, record  # noqa: E402
from tests.probe import emulated  # noqa: E402
from tests.probe.emulated import SMS  # noqa: E402

KIB = 1 << 10
NORESERVE = 0x4000  # Linux; `mmap` names it from Python 3.13 on
TINY = llama.Dims("8B", 2, 64, 4, 2, 32, 96, 128)
DIMS = {name: TINY._replace(name=name) for name in llama.DIMS}


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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated.Memory]:
    """Emulate a tiny H200 in host memory."""
    memory_of = emulated.driven(monkeypatch)
    calls: dict[str, Any] = {
        "attribute": lambda dev, name: SMS,
        "memory": lambda: (1 << 38, 1 << 38),
        "granularity": lambda ordinal=0: 1 << 21,
        "destroy_stream": lambda stream: None,
        "destroy_green": lambda context: None,
        "copy_batch": lambda *copies: [ctypes.memmove(*copy) for copy in zip(*copies[:3], strict=True)],
        "write_word": lambda stream, at, value: None,
        "wait_word": lambda stream, at, value: None,
    }
    for name, call in calls.items():
        monkeypatch.setattr(driver, name, call)
    for name, kernel in list(vars(kernels).items()):
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            monkeypatch.setattr(kernels, name, Kernel(kernel))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

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
    monkeypatch.setattr(card, "timeline", lambda *_: [(0, "kernel", 0.0, 1e-6)])  # CUPTI needs a card
    monkeypatch.setattr(duels, "PROCESSES", [])  # children import the real torch
    monkeypatch.setattr(duels, "MPS", "no-such-program")
    of_card = (card._captured, card._model, card._pool, card._part)
    cached: tuple[Any, ...] = (rig.sms, rig.l2_bytes, rig.whole, rig.pair, llama.rotary, *of_card)
    for lookup in cached:
        lookup.cache_clear()
    Graph.broken = False
    yield memory_of
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


# Checks, what leaves pages for the next, and what may find no time for a single unit here.
REPEATED = {"same_twice", "swap_equal", "seen", "error", "step_beside"}


@pytest.mark.parametrize("probe", PLAN.probes, ids=lambda p: p.name)
def test_a_probe_runs_to_its_end_and_does_nothing_twice(probe: Any, device: emulated.Memory) -> None:
    samples = list(find(probe.module, probe.name, Box(600.0)))
    assert samples
    assert all(finite(sample) for sample in samples)
    keys = [key(sample.what, sample.params) for sample in samples]
    assert len(set(keys)) == len(keys)
    assert all(record(probe.name, sample)["n"] == len(sample.values) for sample in samples)
    if probe.name in {"vmm", "attention", "evict", "unmap"}:
        assert not device.mapped  # what was taken was given back
        assert not device.reserved
        assert not device.handles
    more = {sample.what for sample in find(probe.module, probe.name, Box(600.0, keys))}
    assert more <= REPEATED


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
