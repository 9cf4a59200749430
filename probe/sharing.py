"""Probes of sharing: one host thread that runs many models, and the time of a hand-over between two streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from probe import driver, kernels, llama, rig
from probe.worker import Box, Sample, sample

HAND = 1000  # hand-overs of a measurement


# --------------------------------------------------------------------------------------------------------- host


def host(box: Box) -> Iterator[Sample]:
    """Run 1 to 8 models from one Python thread.

    Time the thread's work for each step, and the interval between two polls of the same model.
    """
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
    """Return two pairs of streams: `plain` on the whole card, and `split` on two disjoint partitions of the SMs."""
    return {"plain": (rig.whole(0, 1), rig.whole(0, 2)), "split": rig.pair(64 if rig.sms() > 72 else 16)}


def hand(x: torch.Tensor) -> None:
    """Launch the smallest kernel on the current stream."""
    kernels.touch[(1,)](x, num_warps=1)


def events(box: Box) -> Iterator[Sample]:
    """Time a dependency between two streams, in device seconds: in one graph, and by events that the host records."""
    a, b = (torch.zeros(1, dtype=torch.int32, device=rig.DEVICE) for _ in range(2))
    hand(a)
    torch.cuda.synchronize()
    for mode, (left, right) in places().items():
        n = HAND // 4

        def chain(cross: bool, left: rig.Part = left, right: rig.Part = right) -> None:
            """Launch n pairs of kernels in sequence; with `cross`, a pair uses both streams, without it only one."""
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
            """Return the device seconds of a chain as a graph; destroy the graph before the next one is captured."""
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
    """Time a hand-over between two streams by words in memory: one stream writes a word, the other waits for it.

    All operations are enqueued before a gate opens and lets them run. Times are device seconds.
    """
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
    """Time a hand-over, in device seconds, between two kernels on two partitions that poll each other's word."""

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
