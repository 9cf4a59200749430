"""Probes of several at once: the interference matrix, a host that drives many models, hand-over between partitions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from probe import driver, kernels, llama, memory, rig
from probe.rig import GIB
from probe.worker import Box, Sample, sample

ACTS = ("decode1", "decode64", "prefill", "h2d", "d2h", "churn")
MODES = ("plain", "split", "priority")
CTX, PROMPT = 1024, 2048
AHEAD = 3  # units that wait in a stream, so that the host is never late
HAND = 1000  # hand-overs of a measurement


# ------------------------------------------------------------------------------------------------- interference


@dataclass(frozen=True, slots=True)
class Lane:
    """Units of one kind of work: `launch` puts one into `stream`, or does it at once where there is none."""

    launch: Callable[[], None]
    stream: Any = None
    sms: int | None = None


def duel(lanes: list[Lane], seconds: float) -> list[list[float]]:
    """Return the seconds between the ends of a lane's units while all lanes run, for each lane."""
    marks: list[list[Any]] = [[] for _ in lanes]
    pending: list[deque[Any]] = [deque() for _ in lanes]
    host: list[list[float]] = [[] for _ in lanes]
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, lane in enumerate(lanes):
            if lane.stream is None:
                host[i].append(memory.clocked(lane.launch))
                continue
            while pending[i] and pending[i][0].query():
                pending[i].popleft()
            if len(pending[i]) < AHEAD:
                lane.launch()
                mark = torch.cuda.Event(enable_timing=True)
                mark.record(lane.stream)
                marks[i].append(mark)
                pending[i].append(mark)
    torch.cuda.synchronize()
    return [
        host[i] if lane.stream is None
        else [1e-3 * a.elapsed_time(b) for a, b in zip(marks[i][1:-AHEAD], marks[i][2:-AHEAD], strict=False)]
        for i, lane in enumerate(lanes)
    ]  # fmt: skip


class Side:
    """One of the two contestants: its own weights, KV, buffers and pages."""

    def __init__(self, m: llama.Dims, seed: int) -> None:
        self.m = m
        self.model = llama.Model(m, rig.random(m.weight_bytes() // rig.BF16, seed=seed))
        self.kv = llama.pool(m, (64, CTX))
        self.short = llama.Model(m, self.model.blob, layers=min(8, m.layers))
        self.host = torch.empty(memory.CHUNK, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(memory.CHUNK, dtype=torch.uint8, device=rig.DEVICE)
        self.pages = rig.Pages(64).fill()
        self._lanes: dict[tuple[str, int], Lane] = {}

    def lane(self, act: str, part: rig.Part) -> Lane:
        """Return the lane of an act on a partition; its graph is captured once."""
        if act in {"h2d", "d2h", "churn"}:
            part = rig.whole(0, id(self))  # copy engines and the driver know no partition
        at = (act, int(part.stream.cuda_stream))
        if at not in self._lanes:
            self._lanes[at] = self._lane(act, part)
        return self._lanes[at]

    def _lane(self, act: str, part: rig.Part) -> Lane:
        if act == "churn":
            return Lane(self._churn)
        if act in {"h2d", "d2h"}:
            to, of = (self.device, self.host) if act == "h2d" else (self.host, self.device)

            def copy() -> None:
                with torch.cuda.stream(part.stream):
                    to.copy_(of, non_blocking=True)

            return Lane(copy, part.stream)
        if act == "prefill":
            work = self.short.prefill(PROMPT).step
        else:
            work = self.model.decode(self.kv, int(act.removeprefix("decode")), CTX, part.sms).step
        graph = rig.graph_of(part, work)

        def replay() -> None:
            with torch.cuda.stream(part.stream):
                graph.replay()

        return Lane(replay, part.stream, part.sms)

    def _churn(self) -> None:
        """Unmap four pages and map them again, as a balloon does."""
        for i in range(1, 5):
            self.pages.put(i, self.pages.take(i))
        self.pages.open(1, 4)


def interfere(box: Box) -> Iterator[Sample]:
    """Measure a unit of each act alone and beside another, for all ordered pairs, in three modes."""
    room = rig.free_bytes()
    m = next(
        (
            d
            for d in (llama.DIMS[name] for name in ("8B", "3B", "1B"))
            if 2 * (d.weight_bytes() + 64 * (CTX + 128) * d.kv_bytes + 6 * GIB) < room
        ),
        None,
    )
    if m is None:
        raise RuntimeError(f"two models do not fit into {room / GIB:.0f} GiB")
    a, b = Side(m, 1), Side(m, 2)
    halves = rig.pair(64 if rig.sms() > 72 else rig.sms() // 16 * 8)
    streams: Any = torch.cuda.Stream
    least, most = streams.priority_range()
    places = {
        "plain": (rig.whole(0, 1), rig.whole(0, 2)),
        "split": halves,
        "priority": (rig.whole(most, 1), rig.whole(least, 2)),
    }
    bound = ("decode1", "decode64", "prefill")  # those that SMs bind
    for mode in MODES:
        left, right = places[mode]
        for victim in ACTS:
            for other in ("", *ACTS):
                if mode != "plain" and not (victim in bound or other in bound):
                    continue  # the same as plain
                params = {"victim": victim, "other": other, "mode": mode, "of": m.name}
                if not box.todo("unit", **params):
                    continue
                lanes = [a.lane(victim, left)] + ([b.lane(other, right)] if other else [])
                taken = duel(lanes, 0.25)
                facts: dict[str, float] = {"units": len(taken[0])}
                if other and taken[1]:
                    facts["other_s"] = sum(taken[1]) / len(taken[1])
                if taken[0]:
                    yield sample("unit", taken[0], "s", lanes[0].sms, facts, **params)


# --------------------------------------------------------------------------------------------------------- host


def host(box: Box) -> Iterator[Sample]:
    """Drive 1 to 8 models by one Python thread: host seconds a step, and the period of its looks at each."""
    m, rows, steps = llama.DIMS["1B"]._replace(layers=4), 8, 200
    blob = rig.random(m.weight_bytes() // rig.BF16)
    kv = llama.pool(m, (rows, 256))
    runs = []
    for i in range(8):
        decode = llama.Model(m, blob).decode(kv, rows, 256, rig.sms())
        p = rig.whole(0, 10 + i)
        graph = rig.graph_of(p, decode.step)
        meta = torch.zeros(4096, dtype=torch.int32, pin_memory=True)
        out = torch.empty(rows, dtype=torch.int64, pin_memory=True)
        runs.append((p, graph, meta, meta.to(rig.DEVICE), decode.ids, out))
    for n in (1, 2, 4, 8):
        if not box.todo("host_step", models=n):
            continue
        busy, looks, seen = [], [], [0] * n
        events: list[Any] = [None] * n
        last = [0.0] * n
        torch.cuda.synchronize()
        while min(seen) < steps and box.left_s() > 0:
            for i, (p, graph, meta, device, ids, out) in enumerate(runs[:n]):
                now = time.perf_counter()
                looks.append(now - last[i]) if last[i] else None
                last[i] = now
                if events[i] is not None and not events[i].query():
                    continue
                meta[:rows] += 1
                with torch.cuda.stream(p.stream):
                    device.copy_(meta, non_blocking=True)
                    graph.replay()
                    out.copy_(ids, non_blocking=True)
                    events[i] = torch.cuda.Event()
                    events[i].record()
                seen[i] += 1
                busy.append(time.perf_counter() - now)
        torch.cuda.synchronize()
        yield sample("host_step", busy[n:], "s", models=n)
        yield sample("look", looks[n:], "s", models=n)


# ---------------------------------------------------------------------------------- hand-over: own processes each


def places() -> dict[str, tuple[rig.Part, rig.Part]]:
    """Return two streams on the whole card, and two partitions."""
    return {"plain": (rig.whole(0, 1), rig.whole(0, 2)), "split": rig.pair(64 if rig.sms() > 72 else 16)}


def hand(x: torch.Tensor) -> None:
    """Launch the smallest kernel on the current stream."""
    kernels.touch[(1,)](x, num_warps=1)


def events(box: Box) -> Iterator[Sample]:
    """Time an edge between two streams: in one graph, and by events that the host records (device seconds)."""
    a, b = (torch.zeros(1, dtype=torch.int32, device=rig.DEVICE) for _ in range(2))
    hand(a)
    torch.cuda.synchronize()
    for mode, (left, right) in places().items():
        n = HAND // 4

        def chain(cross: bool, left: rig.Part = left, right: rig.Part = right) -> None:
            """Launch n pairs of kernels, each after the other, across the streams or all on one."""
            for _ in range(n):
                with torch.cuda.stream(left.stream):
                    hand(a)
                other = right if cross else left
                if cross:
                    other.stream.wait_stream(left.stream)
                with torch.cuda.stream(other.stream):
                    hand(b)
                if cross:
                    left.stream.wait_stream(other.stream)

        def graph_s(cross: bool, left: rig.Part = left, chain: Callable[[bool], None] = chain) -> float:
            """Return the device seconds of the chain as a graph, which is gone before the next one is captured."""
            chain(cross)
            with rig.capture(left.stream) as graph:
                chain(cross)
            taken = min(rig.replays(left, graph, 10))
            graph.reset()  # to destroy a graph while another is captured breaks that one
            return taken

        if box.todo("edge", by="graph", mode=mode):
            alone_s, cross_s = graph_s(False), graph_s(True)
            facts = {"chain_s": alone_s / (2 * n)}
            yield sample("edge", (cross_s - alone_s) / (2 * n), "s", left.sms, facts, by="graph", mode=mode)
        if box.todo("edge", by="host", mode=mode):
            taken = []
            for cross in (False, True):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                chain(cross)
                enqueued = time.perf_counter() - begun
                torch.cuda.synchronize()
                taken.append((enqueued, time.perf_counter() - begun))
            facts = {"host_s": (taken[1][0] - taken[0][0]) / (2 * n), "kernel_host_s": taken[0][0] / (2 * n)}
            yield sample("edge", (taken[1][1] - taken[0][1]) / (2 * n), "s", left.sms, facts, by="host", mode=mode)


def memops(box: Box) -> Iterator[Sample]:
    """Time a hand-over by words that streams write and wait for (device seconds); all is enqueued behind a gate."""
    words = torch.zeros(3 * 64, dtype=torch.int32, device=rig.DEVICE)  # apart by 256 bytes
    gate, ping, pong = (words.data_ptr() + 256 * i for i in range(3))
    opener, n = torch.cuda.Stream(), 200
    sequence = 0
    for mode, (left, right) in places().items():
        if not box.todo("hand_over", by="memops", mode=mode):
            continue
        taken = []
        for _ in range(5):
            a, b = left.stream.cuda_stream, right.stream.cuda_stream
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            for stream in (a, b):
                driver.wait_word(stream, gate, sequence + 1)
            marks[0].record(left.stream)
            for i in range(sequence + 1, sequence + n + 1):
                driver.wait_word(b, ping, i)
                driver.write_word(b, pong, i)
                driver.write_word(a, ping, i)
                driver.wait_word(a, pong, i)
            marks[1].record(left.stream)
            driver.write_word(opener.cuda_stream, gate, sequence + 1)
            torch.cuda.synchronize()
            taken.append(1e-3 * marks[0].elapsed_time(marks[1]) / (2 * n))
            sequence += n
        yield sample("hand_over", taken, "s", left.sms, by="memops", mode=mode)


def polling(box: Box) -> Iterator[Sample]:
    """Time a hand-over by two kernels that poll each other's word, each on its partition (device seconds)."""

    def word(value: int) -> torch.Tensor:
        return torch.full((64,), value, dtype=torch.int32, device=rig.DEVICE)

    left, right = places()["split"]
    cap = word(2_000_000)  # looks, some seconds; a partner that never comes is an error and no hang

    def volley(n: int) -> tuple[float, int]:
        mine, other, count, bad = word(0), word(0), word(n), (word(0), word(0))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(right.stream):
            kernels.volley[(1,)](other, mine, count, cap, bad[1], SERVES=False, num_warps=1)
        with torch.cuda.stream(left.stream):
            marks[0].record()
            kernels.volley[(1,)](mine, other, count, cap, bad[0], SERVES=True, num_warps=1)
            marks[1].record()
        torch.cuda.synchronize()
        return 1e-3 * marks[0].elapsed_time(marks[1]) / (2 * max(n, 1)), int(bad[0][0] + bad[1][0])

    volley(0)  # compiles
    if box.todo("hand_over", by="polling", mode="split"):
        taken, failed = zip(*(volley(HAND) for _ in range(5)), strict=True)
        yield sample("hand_over", taken, "s", left.sms, {"gave_up": sum(failed)}, by="polling", mode="split")
