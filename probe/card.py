"""Lanes of duels on a GPU: graphs of steps, streams and partitions, clocks by NVML. It implements duels.Device."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from probe import driver, kernels, llama, rig
from probe.duels import CTX, Ran, Work

AHEAD = 3  # units that wait in a stream, so that the host is never late
COPIES = 4  # most copies of a model's weights; more lanes than that share some
MIXED_DECODES = 32
KERNEL_S = 1e-3  # seconds, about, of a unit that only waits or copies
SM_CLOCK, MEM_CLOCK = 1, 2  # nvmlClockType_t


CLOCKS: dict[str, float] = {}  # at the end of the last duel


# ------------------------------------------------------------------------------------------------------- lanes


def build(work: Work, twin: int) -> float:
    """Build the CUDA graph of one unit of a lane; return the seconds that the build took (see Device)."""
    begun = time.perf_counter()
    _graph(work, twin)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _graph(work: Work, twin: int) -> Any:
    return _captured(work._replace(gap_ms=0.0), twin)


@cache
def _captured(work: Work, twin: int) -> Any:
    # A graph's kernels keep the partition and the priority of the stream of their capture.
    return rig.graph_of(_part(work.part, work.priority), _unit(work, twin))


def _unit(work: Work, twin: int) -> Callable[[int], object]:
    part = _part(work.part, work.priority)
    if work.act == "spin":
        out = torch.full((part.sms,), -1, dtype=torch.int32, device=rig.DEVICE)
        spin = torch.full((1,), int(1e9 * KERNEL_S), dtype=torch.int64, device=rig.DEVICE)
        return lambda _: kernels.where[(part.sms,)](out, spin, N=part.sms, num_warps=1)
    if work.act == "copy":
        a = rig.random(int(facts(work)["bytes"]) // (2 * rig.BF16))
        b = torch.empty_like(a)
        return lambda _: torch.neg(a, out=b)
    decodes = work.act == "decode"
    model = _model(work.of, twin % COPIES if decodes else 0)
    if decodes:
        return model.decode(_pool(work.of), work.size, CTX, part.sms).step
    if work.act == "mixed":
        return llama.Mixed(model, work.size, llama.Attend(_pool(work.of), MIXED_DECODES, CTX, part.sms)).step
    return model.prefill(work.size).step


@cache
def _model(of: str, copy: int) -> llama.Model:
    m = llama.DIMS[of]
    return llama.Model(m, rig.random(m.weight_bytes() // rig.BF16, seed=copy))


@cache
def _pool(of: str) -> llama.Kv:
    return llama.pool(llama.DIMS[of], (64, CTX))


@cache
def _part(name: str, priority: int, lane: int = 0) -> rig.Part:
    """Return a lane's partition of the SMs, with its own stream.

    `lane` is the lane's number in its cell.
    """
    if not name:
        return rig.whole(priority, lane)
    part = rig.pair(int(name.rstrip("-")))[name.endswith("-")]
    if not lane:
        return part
    stream = torch.cuda.ExternalStream(driver.green_stream(part.green), device=torch.device("cuda", 0))
    return part._replace(stream=stream)


def facts(work: Work) -> dict[str, float]:
    """Return the number of layers in a lane's unit, and the bytes that the unit reads and writes (see Device)."""
    if work.act == "spin":
        return {"layers": 1, "bytes": 0}
    if work.act == "copy":
        return {"layers": 1, "bytes": 2 * min(2 * rig.GIB, rig.free_bytes() // 8)}
    m = llama.DIMS[work.of]
    sequences = {"decode": work.size, "mixed": MIXED_DECODES}.get(work.act, 0)
    read = m.weight_bytes() - rig.BF16 * m.vocab * m.hidden  # a step reads few rows of the embedding
    return {"layers": m.layers, "bytes": read + sequences * CTX * m.kv_bytes}


# ------------------------------------------------------------------------------------------------------- duels


def duel(cell: Sequence[tuple[Work, int]], seconds: float) -> list[Ran]:
    """Run lanes concurrently for `seconds` (see Device).

    Up to AHEAD units of a lane are queued in its stream. A lane with gaps has only one unit queued at a time: the next
    unit is launched `gap_ms` after that one ends.
    """
    parts = [_part(work.part, work.priority, k) for k, (work, _) in enumerate(cell)]
    graphs = [_graph(work, twin) for work, twin in cell]
    marks: list[list[Any]] = [[] for _ in cell]
    pending: list[deque[Any]] = [deque() for _ in cell]
    free_s = [0.0] * len(cell)  # since when a lane has nothing left
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        for i, (work, _) in enumerate(cell):
            while pending[i] and pending[i][0].query():
                pending[i].popleft()
                free_s[i] = time.perf_counter()
            ahead = 1 if work.gap_ms else AHEAD
            if len(pending[i]) < ahead and now >= free_s[i] + 1e-3 * work.gap_ms:
                with torch.cuda.stream(parts[i].stream):
                    graphs[i].replay()
                mark = torch.cuda.Event(enable_timing=True)
                mark.record(parts[i].stream)
                marks[i].append(mark)
                pending[i].append(mark)
    CLOCKS.clear()
    CLOCKS.update(_nvml())
    torch.cuda.synchronize()
    ran = []
    for part, each in zip(parts, marks, strict=True):
        kept = each[1:-AHEAD]  # those that ended while all lanes ran
        ran.append(Ran([1e-3 * a.elapsed_time(b) for a, b in pairwise(kept)], part.sms))
    return ran


def timeline(cell: Sequence[tuple[Work, int]], seconds: float) -> list[tuple[int, str, float, float]]:
    """Run lanes concurrently and record their kernels with CUPTI (see Device).

    First, one unit of each lane runs alone, in the order of lanes. This shows which lane uses which of CUPTI's stream
    ids.
    """
    from torch.profiler import ProfilerActivity, profile

    duel(cell, seconds)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for k, (work, twin) in enumerate(cell):
            with torch.cuda.stream(_part(work.part, work.priority, k).stream):
                _graph(work, twin).replay()
            torch.cuda.synchronize()
        begun_ns = time.time_ns()
        duel(cell, seconds)
    events = [e for e in profiler.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    events.sort(key=lambda e: e.start_ns())
    lanes = list(dict.fromkeys(e.device_resource_id() for e in events))[: len(cell)]
    kept = [e for e in events if e.start_ns() >= begun_ns and e.device_resource_id() in lanes]
    zero = kept[0].start_ns() if kept else 0
    return [
        (lanes.index(e.device_resource_id()), e.name()[:60], 1e-9 * (e.start_ns() - zero), 1e-9 * e.duration_ns())
        for e in kept
        if e.start_ns() - zero < 1e9 * seconds
    ]


# ------------------------------------------------------------------------------------------------------ clocks


def clocks() -> dict[str, float]:
    """Return clocks and power at the end of the last duel: sm_mhz, mem_mhz, watts (see Device)."""
    return dict(CLOCKS)


@cache
def _library() -> tuple[Any, Any] | None:
    """Return the NVML library and its handle of the first GPU; None if NVML is missing or does not start."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    return nvml, handle


def _nvml() -> dict[str, float]:
    if (library := _library()) is None:
        return {}
    (nvml, handle), value, out = library, ctypes.c_uint(), dict[str, float]()
    for name, which in (("sm_mhz", SM_CLOCK), ("mem_mhz", MEM_CLOCK)):
        if not nvml.nvmlDeviceGetClockInfo(handle, which, ctypes.byref(value)):
            out[name] = value.value
    if not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)):
        out["watts"] = value.value / 1000
    return out
