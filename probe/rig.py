"""The common base of probes: the machine's facts, partitions, graphs, clocks.

Buffers contain random numbers, because zeros draw less power and take less time. Calls take turns on several buffers,
which together are larger than the L2 cache.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probe import driver

MIB, GIB = 1 << 20, 1 << 30
BF16 = 2  # bytes
CACHES = 1.5  # size of all buffers that rotate, in L2 caches
DEVICE = "cuda:0"
LARGE = 16 * MIB  # a page of KV or weights


# ---------------------------------------------------------------------------------------------------- machine


def short(name: str) -> str:
    """Return the name of a GPU as used for folders: "NVIDIA H200" becomes h200."""
    words = name.lower().replace("nvidia", " ").replace("/", " ").split()
    return "-".join(words) or "gpu"


def hello() -> dict[str, Any]:
    """Return the facts of the machine. Raises an error if torch sees no device."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    torch.cuda.init()
    torch.empty(1, device=DEVICE)  # the primary context exists, and is this thread's
    p, smi = torch.cuda.get_device_properties(0), ""
    if tool := shutil.which("nvidia-smi"):
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,pcie.link.gen.max,pcie.link.width.max"
        ask = [tool, f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
        smi = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("torch", "triton", "cuda-bindings", "numpy")
    return {
        "name": p.name,
        "short": short(p.name),
        "sms": p.multi_processor_count,
        "capability": f"{p.major}.{p.minor}",
        "mem_bytes": p.total_memory,
        "l2_bytes": p.L2_cache_size,
        "cuda": torch.version.cuda,
        "driver": driver.version(),
        "nvidia-smi": smi,
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gcc": shutil.which("gcc") or "",
    }


def tidy() -> None:
    """Clean up between two probes. Raises an error if a probe broke the CUDA context."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@cache
def sms() -> int:
    """Return the number of SMs of the card."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


@cache
def l2_bytes() -> int:
    """Return the bytes of the card's L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def free_bytes() -> int:
    """Return the bytes of device memory that a probe may take: all free memory except one GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    return driver.memory()[0] - GIB


def random(numbers: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    """Draw bf16 numbers on the device."""
    return noise(torch.empty(numbers, dtype=torch.bfloat16, device=DEVICE), scale, seed)


def noise(x: Tensor, scale: float = 0.02, seed: int = 0) -> Tensor:
    """Fill a tensor with normally distributed numbers, piece by piece."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    for piece in x.view(-1).split(1 << 28):
        piece.normal_(0.0, scale, generator=generator)
    return x


def at(address: int, nbytes: int, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Tensor:
    """Return a flat tensor over memory that something else has allocated.

    The address is not checked, so parts of the range may be unmapped.
    """
    place = torch.device(device or DEVICE)
    make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001 - as_tensor refuses addresses of holes
    storage = make(address, place, nbytes)
    return torch.empty(0, dtype=dtype, device=place).set_(storage, 0, (nbytes // dtype.itemsize,), (1,))


# ------------------------------------------------------------------------------------------------- partitions


class Part(NamedTuple):
    """A partition: a stream, and the number of SMs that its kernels may use; `green` keeps the partition alive."""

    sms: int
    stream: Any
    green: Any = None


@cache
def whole(priority: int = 0, lane: int = 0) -> Part:
    """Return a partition of all SMs; each pair of `lane` and priority has its own stream."""
    del lane
    return Part(sms(), torch.cuda.Stream(priority=priority))


def on(resource: Any) -> Part:
    """Create a partition, with its own stream, from a resource of SMs."""
    dev = driver.device()
    context = driver.green(driver.describe(resource), dev)
    stream = torch.cuda.ExternalStream(driver.green_stream(context), device=torch.device("cuda", 0))
    return Part(int(driver.green_sms(context).sm.smCount), stream, context)


@cache
def pair(n: int) -> tuple[Part, Part]:
    """Return a partition of about n SMs, and a partition of the rest.

    Both come from one split and share no SM. Thread-block clusters may be impossible on the rest.
    """
    group, rest = driver.split(driver.all_sms(driver.device()), n)
    return on(group), on(rest)


def part(n: int) -> Part:
    """Return a partition of about n SMs, or of all SMs if the card has at most n."""
    return whole() if n >= sms() else pair(n)[0]


def shares(counts: Sequence[int]) -> list[int]:
    """Return the SM count of the whole card, then the counts below it in descending order."""
    return [sms(), *sorted((n for n in counts if n < sms()), reverse=True)]


# ----------------------------------------------------------------------------------------------------- clocks


@contextmanager
def capture(stream: Any) -> Iterator[Any]:
    """Capture a CUDA graph of the kernels launched in the context; each kernel is bound to `stream`'s partition."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()


def graph_of(p: Part, work: Callable[[int], object], calls: int = 1) -> Any:
    """Capture `calls` calls of `work(i)` as a CUDA graph, after calls outside of it that compile the kernels.

    A graph stores addresses, not tensors. So it also keeps a reference to `work`, to keep the buffers of `work` alive.
    """
    p.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(p.stream):
        for i in range(min(2, calls)):
            work(i)
    torch.cuda.synchronize()
    with capture(p.stream) as graph:
        for i in range(calls):
            work(i)
    graph.work = work
    return graph


def replays(p: Part, graph: Any, n: int) -> list[float]:
    """Return the seconds of each of n replays, which run back to back."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    with torch.cuda.stream(p.stream):
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
    p.stream.synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in pairwise(marks)]


def timed(p: Part, work: Callable[[int], object], calls: int = 1, seconds: float = 0.1) -> list[float]:
    """Return the seconds of one call of `work`, measured by each replay of a graph of `calls` calls.

    The first replays are left out, because they are cold.
    """
    graph = graph_of(p, work, calls)
    probe = min(replays(p, graph, 3))
    n = int(min(50, max(5, seconds / max(probe, 1e-6))))
    out = [s / calls for s in replays(p, graph, n + 1)[1:]]
    graph.reset()
    return out


def rotation(nbytes: int, least: int = 4, most: int = 64) -> int:
    """Return the number of buffers of `nbytes` that are together `CACHES` times as large as the L2 cache.

    The number is at least `least` and at most `most`.
    """
    return int(min(most, max(least, -(-int(CACHES * l2_bytes()) // nbytes))))


# ------------------------------------------------------------------------------------------------------ pages


class Pages:
    """A range of addresses for `count` pages; memory handles can be mapped as pages. At first, no page is mapped.

    Triton asks the driver about the base address at each launch, so page 0 must be mapped then.
    """

    def __init__(self, count: int, page: int = 0) -> None:
        page = page or LARGE
        self.count, self.page, self.size = count, page, count * page
        self.base = driver.reserve(self.size, page)
        self.handles: dict[int, Any] = {}

    def put(self, i: int, handle: Any) -> None:
        """Map a handle as page i; the device may not use the page before `open` is called."""
        driver.map_at(self.base + i * self.page, self.page, handle)
        self.handles[i] = handle

    def take(self, i: int) -> Any:
        """Unmap page i and return its handle."""
        driver.unmap(self.base + i * self.page, self.page)
        return self.handles.pop(i)

    def open(self, first: int = 0, count: int | None = None) -> None:
        """Let the device use `count` pages from page `first` on; without `count`, as many as the range has.

        All of these pages must be mapped.
        """
        driver.allow(self.base + first * self.page, (self.count if count is None else count) * self.page)

    def fill(self) -> Pages:
        """Map a new handle as each page, and let the device use them all."""
        for i in range(self.count):
            self.put(i, driver.create(self.page))
        self.open()
        return self

    def close(self) -> None:
        """Unmap and release all pages, and release the range of addresses."""
        torch.cuda.synchronize()
        for i in list(self.handles):
            driver.release(self.take(i))
        driver.unreserve(self.base, self.size)
