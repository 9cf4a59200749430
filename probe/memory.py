"""Probes of memory: driver pages, pinning and copies, eviction, KV swap, changes of mappings while kernels run."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

from probe import driver, kernels, llama, rig
from probe.rig import GIB, MIB
from probe.worker import Box, Sample, sample

CHUNK = 64 * MIB  # bytes that a copy moves at once
RAM = 0.6  # this share of the host's memory may be locked


def clocked(call: Callable[[], Any]) -> float:
    """Return the host seconds of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


# ------------------------------------------------------------------------------------------------------- pages


def vmm(box: Box) -> Iterator[Sample]:
    """Time each driver call that reserves or maps memory, by page size.

    Then map a handle from an offset, which some drivers refuse. Finally, measure the speed of Python code while another
    thread maps pages.
    """
    if box.todo("reserve", size=64 * GIB):
        spans: list[int] = []
        taken = [clocked(lambda: spans.append(driver.reserve(64 * GIB, 2 * MIB))) for _ in range(20)]
        for at in spans:
            driver.unreserve(at, 64 * GIB)
        yield sample("reserve", taken, "s", size=64 * GIB)
    for mib in (2, 16, 64, 256):
        size = mib * MIB
        count = min(256, rig.free_bytes() // size)
        if count >= 2 and box.todo("release", size=size):
            yield from paged(size, count)
    if box.todo("map_offset"):
        base, handle = driver.reserve(32 * MIB, 32 * MIB), driver.create(32 * MIB)
        refusal = refusable("map_offset", lambda: driver.map_at(base, 16 * MIB, handle, 16 * MIB))
        if not (refusal.facts or {}).get("refused"):
            driver.unmap(base, 16 * MIB)
        driver.release(handle)
        driver.unreserve(base, 32 * MIB)
        yield refusal
    if box.todo("thread"):
        yield sample("thread", beside_a_thread(), "1")


def paged(size: int, count: int) -> Iterator[Sample]:
    """Time each driver call on `count` pages of `size` bytes."""
    base = driver.reserve(count * size, size)
    handles: list[Any] = []
    taken = [clocked(lambda: handles.append(driver.create(size))) for _ in range(count)]
    yield sample("create", taken, "s", size=size)
    calls: dict[str, Callable[[int], None]] = {
        "map": lambda i: driver.map_at(base + i * size, size, handles[i]),
        "allow": lambda i: driver.allow(base + i * size, size),
        "unmap": lambda i: driver.unmap(base + i * size, size),
    }
    for what, call in calls.items():
        yield sample(what, [clocked(lambda: call(i)) for i in range(count)], "s", size=size)
    for i in range(count):
        calls["map"](i)
    many = min(64, count)
    yield sample("allow_run", clocked(lambda: driver.allow(base, many * size)), "s", size=size, pages=many)
    run = refusable("unmap_run", lambda: driver.unmap(base, many * size), size=size, pages=many)
    for i in range(0 if (run.facts or {})["refused"] else many, count):
        calls["unmap"](i)
    yield run
    yield sample("release", [clocked(lambda: driver.release(handle)) for handle in handles], "s", size=size)
    driver.unreserve(base, count * size)


def refusable(what: str, call: Callable[[], None], **params: Any) -> Sample:
    """Time a call that this driver may refuse; after a refusal, the sample also has the name of the error."""
    begun, name = time.perf_counter(), ""
    try:
        call()
    except driver.DriverError as error:
        name = error.name
    return sample(what, time.perf_counter() - begun, "s", facts={"refused": name}, **params)


def beside_a_thread() -> float:
    """Return the speed of Python code in this thread while another thread maps pages, divided by its speed alone.

    It is near 1 if the driver calls that map do not hold Python's interpreter lock.
    """

    def count(until: Callable[[], bool]) -> float:
        begun, n = time.perf_counter(), 0
        while not until():
            n += 1
        return n / (time.perf_counter() - begun)

    end = time.perf_counter() + 0.2
    alone = count(lambda: time.perf_counter() > end)
    pages = rig.Pages(64).fill()

    def churn() -> None:
        driver.bind()
        for i in range(pages.count):
            pages.put(i, pages.take(i))
        pages.open()

    thread = threading.Thread(target=churn)
    thread.start()
    beside = count(lambda: time.perf_counter() > end and not thread.is_alive())
    thread.join()
    pages.close()
    return beside / alone


# ------------------------------------------------------------------------------------------------- host memory


class Locked:
    """Pinned host memory in pieces of 1 GiB, which is kept for later probes."""

    def __init__(self) -> None:
        self.pieces: list[tuple[mmap.mmap, int]] = []

    def grow(self, count: int) -> tuple[float, list[float]]:
        """Make sure that there are at least `count` pieces; add the missing ones.

        Return the total seconds to touch the new pieces, and the seconds to pin each of them. Raises RuntimeError if
        the host has too little memory.
        """
        if count * GIB > RAM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise RuntimeError(f"the host has too little memory to lock {count} GiB")
        begun = time.perf_counter()
        with ThreadPoolExecutor(8) as threads:
            fresh = list(threads.map(lambda _: piece(), range(count - len(self.pieces))))
        touched = time.perf_counter() - begun
        taken = []
        for memory, at in fresh:
            taken.append(clocked(lambda: driver.pin(at, GIB)))
            self.pieces.append((memory, at))
        return touched, taken

    def chunks(self, nbytes: int, size: int = CHUNK) -> list[tuple[int, int, int]]:
        """Split a blob into chunks; return (host address, offset in the blob, bytes) of each chunk.

        The blob begins at the first piece; missing pieces are added.
        """
        self.grow(-(-nbytes // GIB))
        out, first = [], 0
        while first < nbytes:
            n = min(size, nbytes - first, GIB - first % GIB)
            out.append((self.pieces[first // GIB][1] + first % GIB, first, n))
            first += n
        return out


def piece() -> tuple[mmap.mmap, int]:
    """Map a GiB of host memory, in large pages if possible, and touch it; return the memory and its address."""
    memory = mmap.mmap(-1, GIB)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(at, 1, GIB)
    return memory, at


LOCKED = Locked()


def upload(dst: int, nbytes: int, stream: Any, size: int = CHUNK) -> None:
    """Copy `nbytes` from the locked host memory to the device address `dst`, in chunks."""
    for host, offset, n in LOCKED.chunks(nbytes, size):
        driver.to_device(dst + offset, host, n, stream.cuda_stream)


def download(src: int, nbytes: int, stream: Any, size: int = CHUNK) -> None:
    """Copy `nbytes` from the device address `src` to the locked host memory, in chunks."""
    for host, offset, n in LOCKED.chunks(nbytes, size):
        driver.to_host(host, src + offset, n, stream.cuda_stream)


def rounds(stream: Any, work: Callable[[], None], n: int = 3) -> list[float]:
    """Call `work`, which enqueues work on a stream, n times; return the device seconds of each call."""
    out = []
    for _ in range(n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(stream)
        work()
        b.record(stream)
        b.synchronize()
        out.append(1e-3 * a.elapsed_time(b))
    return out


def copies(box: Box) -> Iterator[Sample]:
    """Time pinning by two methods, then copies by chunk size.

    Copies are timed in each direction alone, in both directions at once, and at the same time as a decode step.
    """
    yield from pinning(box)
    LOCKED.grow(8)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    a, b = (torch.empty(GIB, dtype=torch.uint8, device=rig.DEVICE) for _ in range(2))
    facts = {"bytes": GIB}
    for mib in (64, 1, 4, 16, 256):
        chunk = mib * MIB
        for what, move, stream in (("h2d", upload, up), ("d2h", download, down)):
            if box.todo(what, chunk=chunk, beside=""):
                taken = rounds(stream, lambda: move(a.data_ptr(), GIB, stream, chunk))
                yield sample(what, taken, "s", facts=facts, chunk=chunk, beside="")
    if box.todo("h2d", chunk=CHUNK, beside="d2h"):
        yield sample("h2d", together(a, b, up, down), "s", facts=facts, chunk=CHUNK, beside="d2h")
    for rows in (1, 64):
        if box.todo("decode_beside", of="3B", B=rows, copy="d2h"):
            yield from under_decode(box, rows, up, down)


def pinning(box: Box) -> Iterator[Sample]:
    """Time two ways to get pinned memory: pinning memory that exists already, and allocating pinned memory.

    The memory of the first way stays pinned for later probes.
    """
    if box.todo("pin", method="register"):
        touched, taken = LOCKED.grow(8)
        if taken:
            yield sample("pin", taken, "s", facts={"bytes": GIB, "touch_s": touched / len(taken)}, method="register")
    if box.todo("pin", method="alloc"):
        held: list[torch.Tensor] = []
        taken = [clocked(lambda: held.append(torch.empty(GIB, dtype=torch.uint8, pin_memory=True))) for _ in range(4)]
        yield sample("pin", taken, "s", facts={"bytes": GIB}, method="alloc")


def together(a: torch.Tensor, b: torch.Tensor, up: Any, down: Any) -> list[float]:
    """Copy a GiB to the device and another GiB to the host at the same time, in three rounds.

    Return the seconds of each round, until both copies end.
    """
    out = []
    for _ in range(3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        marks[0].record(up)
        down.wait_event(marks[0])
        for (host, offset, n), (other, _, _) in zip(LOCKED.chunks(GIB), LOCKED.chunks(2 * GIB)[16:], strict=False):
            driver.to_device(a.data_ptr() + offset, host, n, up.cuda_stream)
            driver.to_host(other, b.data_ptr() + offset, n, down.cuda_stream)
        marks[1].record(up)
        marks[2].record(down)
        torch.cuda.synchronize()
        out.append(1e-3 * max(marks[0].elapsed_time(mark) for mark in marks[1:]))
    return out


def under_decode(box: Box, rows: int, up: Any, down: Any) -> Iterator[Sample]:
    """Time decode steps of the 3B model alone, during copies to the device, and during copies to the host."""
    m, ctx = llama.DIMS["3B"], 1024
    model, p = llama.Model(m), rig.whole()
    decode = model.decode(llama.pool(m, (rows, ctx)), rows, ctx, p.sms)
    graph = rig.graph_of(p, decode.step)
    buffer = torch.empty(GIB, dtype=torch.uint8, device=rig.DEVICE)
    for copy, move, stream in (("", None, None), ("h2d", upload, up), ("d2h", download, down)):
        if box.todo("decode_beside", of=m.name, B=rows, copy=copy):
            if move is not None:
                for _ in range(8):  # about 160 ms of copies, longer than the replays
                    move(buffer.data_ptr(), GIB, stream)
            yield sample("decode_beside", rig.replays(p, graph, 20)[1:], "s", p.sms, of=m.name, B=rows, copy=copy)
            torch.cuda.synchronize()
    graph.reset()


# --------------------------------------------------------------------------------------------- evict and restore


def evict(box: Box) -> Iterator[Sample]:
    """Evict an 8B model and restore it at the same addresses; time each part.

    Also compare the model's logits before and after, bit by bit.
    """
    m, page = llama.DIMS["8B"], rig.LARGE
    pages = rig.Pages(-(-m.weight_bytes() // page), page)
    if 2 * pages.size > rig.free_bytes():
        raise RuntimeError(f"the card has too little memory for the weights of {m.name}")
    pages.fill()
    other = rig.Pages(pages.count, page)
    blob = rig.noise(rig.at(pages.base, pages.size))
    model, p = llama.Model(m, blob), rig.whole()
    decode = model.decode(llama.pool(m, (1, 256)), 1, 256, p.sms)
    graph = rig.graph_of(p, decode.step)
    ids = decode.ids.clone()
    stream = torch.cuda.Stream()

    def logits() -> torch.Tensor:
        decode.ids.copy_(ids)
        torch.cuda.synchronize()
        with torch.cuda.stream(p.stream):
            graph.replay()
        torch.cuda.synchronize()
        return decode.logits.clone()

    first = logits()
    yield sample("same_twice", float(torch.equal(first, logits())), "1")
    if box.todo("save"):
        LOCKED.grow(-(-pages.size // GIB))
        taken = rounds(stream, lambda: download(pages.base, pages.size, stream), 1)
        yield sample("save", taken, "s", facts={"bytes": pages.size})
    else:
        download(pages.base, pages.size, stream)
    torch.cuda.synchronize()
    for part, turn in product((1.0, 0.5), range(2)):
        if not box.todo("restore", part=part, turn=turn):
            continue
        count = int(part * pages.count)
        nbytes = count * page
        held: list[Any] = []
        out_s = clocked(lambda: held.extend(pages.take(i) for i in range(count)))
        held = overwritten(held, other, turn + 7)
        begun = time.perf_counter()
        for i, handle in enumerate(held):
            pages.put(i, handle)
        mapped = time.perf_counter()
        pages.open(0, count)
        opened = time.perf_counter()
        upload(pages.base, nbytes, stream)
        stream.synchronize()
        ended = time.perf_counter()
        facts = {"bytes": nbytes, "map_s": mapped - begun, "allow_s": opened - mapped, "copy_s": ended - opened}
        yield sample("evict", out_s, "s", facts={"pages": count}, part=part, turn=turn)
        yield sample("restore_equal", float(torch.equal(first, logits())), "1", part=part, turn=turn)
        yield sample("restore", ended - begun, "s", facts=facts, part=part, turn=turn)
    graph.reset()
    pages.close()
    other.close()


def overwritten(handles: Sequence[Any], other: rig.Pages, seed: int) -> list[Any]:
    """Overwrite the pages of handles with random numbers, so that a restore must bring back all data.

    The pages are mapped at addresses of `other` while they are overwritten. Return the handles.
    """
    for i, handle in enumerate(handles):
        other.put(i, handle)
    other.open(0, len(handles))
    rig.noise(rig.at(other.base, len(handles) * other.page), 1.0, seed)
    torch.cuda.synchronize()
    return [other.take(i) for i in range(len(handles))]


# --------------------------------------------------------------------------------------------------------- swap


def swap(box: Box) -> Iterator[Sample]:
    """Time moving a request's KV to the host and back in three ways.

    The first way gathers the pieces into one buffer and copies that. The second copies the pieces as a batch in one
    call. The third copies whole pages.
    """
    m, block = llama.DIMS["8B"], 64
    kv = llama.pool(m, (1, 16384))
    stream = torch.cuda.Stream()
    words = block * m.token * rig.BF16 // 8  # a piece is a block's K, or V, in one layer
    flat = kv.data.view(torch.int64)
    for tokens in (2048, 256, 1024, 8192):
        table = kv.table(1, tokens, block)[0, : tokens // block].long() * kernels.UNIT
        layers = torch.arange(m.layers, device=rig.DEVICE)[:, None, None] * kv.layer
        halves = torch.arange(2, device=rig.DEVICE)[None, :, None] * kv.v_off
        offset = ((layers + halves + table).reshape(-1) * rig.BF16 // 8).contiguous()
        nbytes = tokens * m.kv_bytes
        stage = torch.empty(nbytes // 8, dtype=torch.int64, device=rig.DEVICE)
        host = [at for at, _, _ in LOCKED.chunks(nbytes, words * 8)]
        device = [kv.data.data_ptr() + 8 * o for o in offset.tolist()]
        sizes = [words * 8] * len(device)
        pages = sorted({(at - kv.data.data_ptr()) // rig.LARGE for at in device})
        grid = (offset.numel(), -(-words // 1024))

        def out() -> None:
            with torch.cuda.stream(stream):
                kernels.gather[grid](flat, offset, stage, N=words, BLOCK=1024)
            download(stage.data_ptr(), nbytes, stream)

        def back() -> None:
            upload(stage.data_ptr(), nbytes, stream)
            with torch.cuda.stream(stream):
                kernels.scatter[grid](stage, offset, flat, N=words, BLOCK=1024)

        def whole_pages(move: Callable[[int, int, int, int], None], *, up: bool) -> None:
            for i, n in enumerate(pages):
                at = kv.data.data_ptr() + n * rig.LARGE
                there = LOCKED.chunks((i + 1) * rig.LARGE, rig.LARGE)[i][0]
                dst, src = (at, there) if up else (there, at)
                move(dst, src, rig.LARGE, stream.cuda_stream)

        ways: dict[tuple[str, str], Callable[[], None]] = {
            ("gather", "out"): out,
            ("gather", "in"): back,
            ("batch", "out"): lambda: driver.copy_batch(host, device, sizes, stream.cuda_stream),
            ("batch", "in"): lambda: driver.copy_batch(device, host, sizes, stream.cuda_stream),
            ("pages", "out"): lambda: whole_pages(driver.to_host, up=False),
            ("pages", "in"): lambda: whole_pages(driver.to_device, up=True),
        }
        before = kv.data.clone()
        for (method, way), move in ways.items():

            def finished() -> None:
                move()
                stream.synchronize()

            if box.todo("swap", tokens=tokens, method=method, way=way):
                rounds(stream, move, 1)
                taken = [clocked(finished) for _ in range(5)]
                yield sample("swap", taken, "s", facts={"bytes": nbytes}, tokens=tokens, method=method, way=way)
        torch.cuda.synchronize()
        yield sample("swap_equal", float(torch.equal(before, kv.data)), "1", tokens=tokens)


# --------------------------------------------------------------------------------------- may fault: own processes


def unmap(box: Box) -> Iterator[Sample]:
    """Time decode steps of one model while a thread maps, unmaps or creates pages that the model does not use.

    The pages and the model share only the device.
    """
    m, ctx = llama.DIMS["1B"], 1024
    model, p = llama.Model(m), rig.whole()
    decode = model.decode(llama.pool(m, (8, ctx)), 8, ctx, p.sms)
    graph = rig.graph_of(p, decode.step)
    rig.replays(p, graph, 10)
    pages = rig.Pages(512).fill()

    def unmapping() -> None:
        for i in range(1, pages.count):
            driver.unmap(pages.base + i * pages.page, pages.page)

    def mapping() -> None:
        for i in range(1, pages.count):
            driver.map_at(pages.base + i * pages.page, pages.page, pages.handles[i])

    def creating() -> None:
        for _ in range(64):
            driver.release(driver.create(pages.page))

    changes: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "unmap": unmapping,
        "map": mapping,
        "allow": pages.open,
        "create": creating,
    }
    for change, work in changes.items():
        if not box.todo("step_beside", change=change) and change in {"", "create"}:
            continue  # the others leave pages as the next one needs them

        def body(work: Callable[[], None] = work) -> None:
            driver.bind()
            work()

        thread = threading.Thread(target=body)
        thread.start()
        taken = rig.replays(p, graph, 100)
        thread.join()
        yield sample("step_beside", taken, "s", p.sms, {"max": max(taken)}, change=change)
    pages.close()


def hole(box: Box) -> Iterator[Sample]:
    """Read a mapped address, then an unmapped one, and record the device's error.

    After that, this process cannot use the device any more.
    """
    del box
    pages = rig.Pages(2)
    pages.put(0, driver.create(pages.page))
    pages.open(0, 1)
    base = rig.at(pages.base, pages.size, torch.int64)
    out = torch.zeros(1, dtype=torch.int64, device=rig.DEVICE)
    for words, what in ((0, "mapped"), (pages.page // 8, "hole")):
        offset = torch.tensor([words], device=rig.DEVICE)
        message = ""
        try:
            kernels.peek[(1,)](base, offset, out)
            torch.cuda.synchronize()
        except RuntimeError as error:
            message = str(error).split("\n")[0][:120]
        yield sample("error", float(bool(message)), "1", facts={"said": message}, read=what)
