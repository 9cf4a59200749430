"""Lanes of duels on a GPU: graphs of steps, streams and partitions, clocks by NVML."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, cached_property
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


class Card:
    """The duel device of this process on a GPU: models, graphs and streams, each made once and then reused."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, int], llama.Model] = {}
        self._kv: dict[str, llama.Kv] = {}
        self._launches: dict[tuple[Work, int], Callable[[], None]] = {}
        self._streams: dict[tuple[str, int, int], rig.Part] = {}
        self._clocks: dict[str, float] = {}

    # ----------------------------------------------------------------------------------------------- lanes

    def build(self, work: Work, twin: int) -> float:
        """Build the CUDA graph of a lane's unit; return the seconds that it took (see Device)."""
        begun = time.perf_counter()
        self._launch(work, twin)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def _launch(self, work: Work, twin: int) -> Callable[[], None]:
        key = work._replace(gap_ms=0.0), twin
        if key not in self._launches:
            # A graph's kernels keep the partition and the priority of the stream of their capture.
            graph = rig.graph_of(self._part(work, 0), self._unit(work, twin))
            self._launches[key] = graph.replay
        return self._launches[key]

    def _unit(self, work: Work, twin: int) -> Callable[[int], object]:
        part = self._part(work, 0)
        if work.act == "spin":
            out = torch.full((part.sms,), -1, dtype=torch.int32, device=rig.DEVICE)
            spin = torch.full((1,), int(1e9 * KERNEL_S), dtype=torch.int64, device=rig.DEVICE)
            return lambda _: kernels.where[(part.sms,)](out, spin, N=part.sms, num_warps=1)
        if work.act == "copy":
            a = rig.random(int(self.facts(work)["bytes"]) // (2 * rig.BF16))
            b = torch.empty_like(a)
            return lambda _: torch.neg(a, out=b)
        decodes = work.act == "decode"
        model = self._model(work.of, twin % COPIES if decodes else 0)
        if decodes:
            return model.decode(self._pool(work.of), work.size, CTX, part.sms).step
        if work.act == "mixed":
            return llama.Mixed(model, work.size, llama.attend(self._pool(work.of), MIXED_DECODES, CTX, part.sms)).step
        return model.prefill(work.size).step

    def _model(self, of: str, copy: int) -> llama.Model:
        if (of, copy) not in self._models:
            m = llama.DIMS[of]
            self._models[of, copy] = llama.Model(m, rig.random(m.weight_bytes() // rig.BF16, seed=copy))
        return self._models[of, copy]

    def _pool(self, of: str) -> llama.Kv:
        if of not in self._kv:
            self._kv[of] = llama.pool(llama.DIMS[of], (64, CTX))
        return self._kv[of]

    def _part(self, work: Work, lane: int) -> rig.Part:
        """Return a lane's partition of the SMs, with a stream of its own; `lane` is the lane's number in its cell."""
        key = work.part, work.priority, lane
        if key not in self._streams:
            if not work.part:
                self._streams[key] = rig.whole(work.priority, lane)
            else:
                part = rig.pair(int(work.part.rstrip("-")))[work.part.endswith("-")]
                if lane:
                    stream = torch.cuda.ExternalStream(driver.green_stream(part.green), device=torch.device("cuda", 0))
                    part = part._replace(stream=stream)
                self._streams[key] = part
        return self._streams[key]

    def facts(self, work: Work) -> dict[str, float]:
        """See Device."""
        if work.act == "spin":
            return {"layers": 1, "bytes": 0}
        if work.act == "copy":
            return {"layers": 1, "bytes": 2 * min(2 * rig.GIB, rig.free_bytes() // 8)}
        m = llama.DIMS[work.of]
        sequences = {"decode": work.size, "mixed": MIXED_DECODES}.get(work.act, 0)
        read = m.weight_bytes() - rig.BF16 * m.vocab * m.hidden  # a step reads few rows of the embedding
        return {"layers": m.layers, "bytes": read + sequences * CTX * m.kv_bytes}

    # ----------------------------------------------------------------------------------------------- duels

    def duel(self, cell: Sequence[tuple[Work, int]], seconds: float) -> list[Ran]:
        """Run lanes concurrently for `seconds` (see Device).

        Up to AHEAD units are queued in a lane's stream. A lane with gaps has only one unit queued at a time, and
        launches the next one `gap_ms` after its end.
        """
        parts = [self._part(work, k) for k, (work, _) in enumerate(cell)]
        launches = [self._launch(work, twin) for work, twin in cell]
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
                        launches[i]()
                    mark = torch.cuda.Event(enable_timing=True)
                    mark.record(parts[i].stream)
                    marks[i].append(mark)
                    pending[i].append(mark)
        self._clocks = self._nvml()
        torch.cuda.synchronize()
        ran = []
        for part, each in zip(parts, marks, strict=True):
            kept = each[1:-AHEAD]  # those that ended while all lanes ran
            ran.append(Ran([1e-3 * a.elapsed_time(b) for a, b in pairwise(kept)], part.sms))
        return ran

    def timeline(self, cell: Sequence[tuple[Work, int]], seconds: float) -> list[tuple[int, str, float, float]]:
        """Run lanes concurrently and record their kernels with CUPTI (see Device).

        One unit of each lane runs alone first, in the order of lanes, to tell which of CUPTI's stream ids belongs to
        which lane.
        """
        from torch.profiler import ProfilerActivity, profile

        self.duel(cell, seconds)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for k, (work, twin) in enumerate(cell):
                with torch.cuda.stream(self._part(work, k).stream):
                    self._launch(work, twin)()
                torch.cuda.synchronize()
            begun_ns = time.time_ns()
            self.duel(cell, seconds)
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

    # ----------------------------------------------------------------------------------------------- clocks

    def clocks(self) -> dict[str, float]:
        """See Device."""
        return self._clocks

    @cached_property
    def _library(self) -> tuple[Any, Any] | None:
        """The NVML library and its handle of the first GPU; None if NVML is missing or does not start."""
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
            return None
        return nvml, handle

    def _nvml(self) -> dict[str, float]:
        if self._library is None:
            return {}
        (nvml, handle), value, out = self._library, ctypes.c_uint(), dict[str, float]()
        for name, which in (("sm_mhz", SM_CLOCK), ("mem_mhz", MEM_CLOCK)):
            if not nvml.nvmlDeviceGetClockInfo(handle, which, ctypes.byref(value)):
                out[name] = value.value
        if not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)):
            out["watts"] = value.value / 1000
        return out


@cache
def device() -> Card:
    """Return the GPU as a machine that runs lanes; every call returns the same `Card`."""
    return Card()
