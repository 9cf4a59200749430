"""NVIDIA cards as devices; see device.py. One process has the memory of all, and a worker is a thread of it.

A device's memory is a heap of physical handles, a granule each, made once (cuMemCreate). A handle is mapped in the flat
range of its device, by which the links copy, and in the space of whoever uses it (cuMemMap, cuMemSetAccess). The first
granule of every space is a sink that stays mapped: Triton asks the driver about the base of a pointer that it is given.

A share of the SMs is a green context; those of a batch's two phases are the two parts of one split, so they are
disjoint. The kernels that compute are in fused.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from harness.engines.torch import fused, model, nets
from harness.engines.torch.device import UnderWay
from harness.engines.torch.ending import bound
from harness.engines.torch.links import CHUNK_S, Job
from harness.engines.torch.model import Pass, Piece, Weights
from harness.engines.torch.nets import Net
from harness.engines.torch.wire import Copied, Copy, Given, Order, take_files
from harness.policy.types import GIB
from probe import driver
from probe.compute import edges, varlen

DTYPE = torch.float32 if os.environ.get("DTYPE") == "float32" else torch.bfloat16
FIRST = {fused.Decodes: 32, fused.Prefills: 1024}  # sizes up to which graphs are captured before a run
AHEAD = 2  # chunks of a link on their way: the copy engine has the next one while a thread notes the last
SWITCH_S = 2e-4  # a thread that wants the interpreter waits so long for another: far less than a step


class Heap:
    """The memory of a device, and its SMs."""

    def __init__(self, size: int, granule: int, card: int, resource: Any, green: Any) -> None:
        self.granule, self.card, self.green = granule, card, green
        self.resource, self.sms = resource, int(resource.sm.smCount)
        self.handles = [driver.create(granule, card) for _ in range(size // granule)]
        self.sink = driver.create(granule, card)
        self.flat = driver.reserve(size, granule)
        for k, handle in enumerate(self.handles):
            driver.map_at(self.flat + k * granule, granule, handle)
        driver.allow(self.flat, size, card)
        self._lock = threading.Lock()
        self._splits: dict[int, tuple[Any, Any]] = {}

    def stream(self) -> Any:
        """Make a stream on all its SMs."""
        if self.green is None:
            return torch.cuda.Stream(self.card)
        return _stream(self.green, self.card)

    def part(self, sms: int, rest: bool) -> tuple[Any, int]:
        """Make a stream on about so many SMs: the group of a split, or what it leaves; return it and their number."""
        step = int(self.resource.sm.minSmPartitionSize)
        group = self.sms - sms if rest else sms
        group = min(max(step, round(group / step) * step), (self.sms - 1) // step * step)
        with self._lock:
            if group not in self._splits:
                dev = driver.device(self.card)
                pair = driver.split(self.resource, group)
                a, b = (driver.green(driver.describe(part), dev) for part in pair)
                self._splits[group] = a, b
            context = self._splits[group][rest]
        return _stream(context, self.card), int(driver.green_sms(context).sm.smCount)


def _stream(green: Any, card: int) -> Any:
    return torch.cuda.ExternalStream(driver.green_stream(green), device=place(card))


HEAPS: list[Heap] = []
HANDED: dict[int, tuple[tuple[Tensor, ...], Any]] = {}  # on their way from one worker to another
LENT: dict[int, Callable[[int, Tensor, Tensor, Tensor], Tensor]] = {}  # likewise
NUMBERS = count()


def open_cards(sizes: Sequence[int], granule: int, sms: int) -> str:
    """Make the heaps of devices of so many bytes and SMs; the reason where the cards have not so much."""
    sys.setswitchinterval(SWITCH_S)
    torch.cuda.init()
    cards = torch.cuda.device_count()
    each = -(-len(sizes) // cards)
    for card in range(-(-len(sizes) // each)):
        there = torch.cuda.get_device_properties(card).multi_processor_count
        if (each == 1 and there != sms) or each * sms > there:
            return f"{each} devices of {sms} SMs on a card that has {there}: name its kind by --gpu"
        torch.empty(1, device=place(card))
        driver.bind(card)
        dev, mine = driver.device(card), sizes[card * each : (card + 1) * each]
        whole = driver.all_sms(dev)
        groups = driver.groups(whole, each, sms) if each > 1 else []
        for k, size in enumerate(mine):
            green = driver.green(driver.describe(groups[k]), dev) if groups else None
            resource = driver.green_sms(green) if groups else whole
            try:
                HEAPS.append(Heap(size, granule, card, resource, green))
            except driver.DriverError as error:
                return f"{size / GIB:.1f} GiB of a card for device {len(HEAPS)}: {error.name}"
    bind()
    return ""


def place(card: int) -> torch.device:
    """Return a card as torch names it."""
    return torch.device("cuda", card)


def bind() -> None:
    """Let this thread use the first card."""
    driver.bind(0)
    torch.cuda.set_device(0)


class Space:
    """An address range, and what of it is mapped; see device.Space."""

    def __init__(self, heap: Heap, size: int) -> None:
        self.heap, self.granule = heap, heap.granule
        self.size = -(-size // self.granule) * self.granule
        self._there: dict[int, Any] = {}  # what is mapped, by place
        self._base = driver.reserve(self.granule + self.size, self.granule)
        driver.map_at(self._base, self.granule, heap.sink)
        driver.allow(self._base, self.granule, heap.card)

    def map(self, at: int, offset: int, size: int) -> None:
        """See device.Space."""
        first = offset // self.granule
        self._map(at, self.heap.handles[first : first + size // self.granule])

    def sunk(self, at: int, size: int) -> None:
        """Show the sink throughout a part of the range: what is written there is lost."""
        self._map(at, [self.heap.sink] * (size // self.granule))

    def _map(self, at: int, handles: Sequence[Any]) -> None:
        """Map handles, each at its place; one that is there stays, for a call of the driver takes 40 us a granule."""
        first, base = at // self.granule, self._base + self.granule
        fresh = [k for k, handle in enumerate(handles, first) if self._there.get(k) is not handle]
        for k in fresh:
            if k in self._there:
                driver.unmap(base + k * self.granule, self.granule)
            self._there[k] = handles[k - first]
            driver.map_at(base + k * self.granule, self.granule, self._there[k])
        for _, run in groupby(enumerate(fresh), lambda pair: pair[1] - pair[0]):
            places = [k for _, k in run]
            driver.allow(base + places[0] * self.granule, len(places) * self.granule, self.heap.card)

    def unmap(self, at: int, size: int) -> None:
        """See device.Space."""
        driver.unmap(self._base + self.granule + at, size)
        for k in range(at // self.granule, (at + size) // self.granule):
            del self._there[k]

    def leave(self, size: int) -> None:
        """See device.Space: it stays mapped, and costs nothing where it comes back to the same granules."""

    def tensor(self) -> Tensor:
        """See device.Space."""
        here = place(self.heap.card)
        storage = torch._C._construct_storage_from_data_pointer(self._base, here, self.granule + self.size)
        lead, numbers = self.granule // DTYPE.itemsize, self.size // DTYPE.itemsize
        return torch.empty(0, dtype=DTYPE, device=here).set_(storage, lead, (numbers,), (1,))


class Card:
    """A device as one worker has it: streams of its own; see device.Device."""

    def __init__(self, number: int, memory: int) -> None:
        os.close(memory)  # the books' file of the device, of no pages
        self.heap = HEAPS[number]
        self.place = place(self.heap.card)
        torch.cuda.set_device(self.place)
        driver.bind(self.heap.card)
        self.sms = self.heap.sms  # of the lane that computes now
        self.meanwhile: Callable[[], None] | None = None
        self._streams: dict[tuple[int, bool] | str, tuple[Any, int]] = {
            name: (self.heap.stream(), self.heap.sms) for name in ("own", "attend")
        }
        self._graphs: dict[int, tuple[fused.Decodes, fused.Prefills]] = {}  # by the address of the KV
        self._spaces: list[Space] = []

    def space(self, size: int) -> Space:
        """See Device."""
        self._spaces.append(Space(self.heap, size))
        return self._spaces[-1]

    def prepare(self, given: Mapping[str, Given], weights: Mapping[str, Weights], kv: Mapping[str, Tensor]) -> None:
        """See Device: compile kernels and capture graphs, over weights that are mapped for that alone."""
        by_base = {space.tensor().data_ptr(): space for space in self._spaces}
        for name, each in given.items():
            mine, there = by_base[weights[name].embedding.data_ptr()], by_base[kv[name].data_ptr()]
            block = each.pages.block_bytes
            if mine.size > len(self.heap.handles) * self.heap.granule:
                continue  # it will be refused
            mine.map(0, 0, mine.size)
            there.sunk(0, block)
            with torch.inference_mode(), self.lane(None, "mixed"):
                piece = Piece(min(32, each.pages.block_tokens), 0, (0,))
                under_way = Pass(self, weights[name], kv[name], [piece], [0] * piece.tokens)
                under_way.run(each.net.shape.layers, lambda: None, _nobody)
                under_way.logits()
                if fused.serves(kv[name]) and weights[name].net.shape.q_heads <= 16 * kv[name].shape[4]:
                    shared = fused.tables(weights[name], kv[name], lambda: self.sms)
                    both = self._graphs[kv[name].data_ptr()] = fused.Decodes(shared), fused.Prefills(shared)
                    for graphs in both:
                        for size in (n for n in graphs.sizes if n <= FIRST[type(graphs)]):
                            graphs.graph(size, 0, each.net.shape.layers)
            mine.unmap(0, mine.size)
            there.unmap(0, block)

    @contextmanager
    def lane(self, share: float | None, phase: str) -> Iterator[None]:
        """See Device; "attend" waits for nothing: who takes what it gives does."""
        before = self.sms
        stream, self.sms = self._stream(share, phase)
        with torch.cuda.stream(stream):
            yield
            if phase != "attend":
                self.wait()
        self.sms = before

    def wait(self) -> None:
        """See Device."""
        end = torch.cuda.Event()
        end.record()
        while self.meanwhile is not None and not end.query():
            self.meanwhile()
        end.synchronize()

    def _stream(self, share: float | None, phase: str) -> tuple[Any, int]:
        if share is None:
            return self._streams["attend" if phase == "attend" else "own"]
        key = round(share * self.heap.sms), phase == "decode"
        if key not in self._streams:
            self._streams[key] = self.heap.part(*key)
        return self._streams[key]

    def contexts(self, pieces: Sequence[Piece], kv: Tensor) -> Any:
        """See Device."""
        if not fused.serves(kv):
            return model.table(pieces, kv)
        first, stride = fused.units(kv)
        blocks = [torch.tensor(p.blocks[: -(-p.context // kv.shape[3])]) * stride + first for p in pieces]
        table = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).to(torch.int32)
        wide = functional.pad(table, (0, -table.shape[1] % 16))  # a stride that Triton sees as a multiple of 16
        tokens = torch.tensor([p.context for p in pieces], dtype=torch.int32)
        return fused.Contexts(wide.to(kv.device), tokens.to(kv.device), *fused.scratch(kv, len(pieces), self.sms))

    def attend(self, kv: Tensor, layer: int, contexts: Any, q: Tensor) -> Tensor:
        """See Device."""
        if not isinstance(contexts, fused.Contexts):
            return model.attend(kv, layer, contexts, q)
        q = q.contiguous()
        out = torch.empty_like(q)
        fused.attended(kv, layer, contexts, q, out)
        return out

    def long(self, piece: Piece, kv: Tensor) -> Any:
        """See Device: nothing is copied to the card between two layers, for that would wait for the first."""
        return piece, model.spread(piece, kv), edges(piece.tokens, piece.context, self.place)

    def attend_long(self, kv: Tensor, layer: int, long: Any, q: Tensor) -> Tensor:
        """See Device: torch's attention of packed sequences, which takes queries that are fewer than keys."""
        piece, blocks, ends = long
        if kv.dtype == torch.float32:
            return model.attend_long(kv, layer, piece, blocks, q)
        key, value = (kv[:, layer, part].index_select(0, blocks).flatten(0, 1)[: piece.context] for part in (0, 1))
        return varlen(q.contiguous(), key, value, ends)

    def turned(self, step: Pass, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """See Device."""
        kv, net, norms = step.kv, step.weights.net, step.weights.layers[layer].norms
        if step.far or not fused.serves(kv):
            return None
        fused.normed(qkv, norms, net)
        q = fused.turned(qkv, step.cos, step.sin, step.row, step.slots.number, kv, layer, net.shape)
        return q, q[:0], q[:0]

    def graphs(self, order: Order, ids: Sequence[int], weights: Weights, kv: Tensor) -> UnderWay | None:  # noqa: ARG002
        """See Device: those of its size, or of the next larger size."""
        graphs = next((graphs for graphs in self._graphs.get(kv.data_ptr(), ()) if graphs.takes(order)), None)
        return None if graphs is None else graphs.begin(order, ids)

    def give(self, *tensors: Tensor) -> Any:
        """See Device: by number, behind an event."""
        number, event = next(NUMBERS), torch.cuda.Event()
        event.record()
        HANDED[number] = tensors, event
        return number

    def take(self, given: Any) -> list[Tensor]:
        """See Device."""
        tensors, event = HANDED.pop(given)
        event.wait()
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())
        return [tensor.to(self.place) for tensor in tensors]

    def lend(self, kv: Tensor, slots: model.Slots, contexts: Any) -> Any:
        """See Device: by number."""
        number = next(NUMBERS)
        LENT[number] = partial(self._attended, kv, slots, contexts)
        return number

    def borrow(self, lent: Any) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """See Device: its kernels are launched by this worker, on that device's stream for others."""
        return LENT.pop(lent)

    def _attended(
        self, kv: Tensor, slots: model.Slots, contexts: Any, layer: int, q: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write and attend here for another worker, which waits for no thread of this one."""
        asker, (here, _) = torch.cuda.current_stream(), self._stream(None, "attend")
        here.wait_stream(asker)
        with torch.cuda.stream(here):
            model.write(kv, layer, slots, key.to(self.place), value.to(self.place))
            out = self.attend(kv, layer, contexts, q.to(self.place)).to(q.device)
        asker.wait_stream(here)
        out.record_stream(asker)
        return out


def _nobody(*_: Any) -> Tensor:
    raise AssertionError("nothing lies elsewhere")


# ---------------------------------------------------------------------------------------------------------- links


class Store(NamedTuple):
    """Memory that links copy from and to."""

    at: int
    on_host: bool


class Flying(NamedTuple):
    """A chunk on its way."""

    event: Any  # behind it
    due_s: float  # done no sooner, by the monotonic clock
    ends: int | None  # the number of the copy whose last chunk it is


class Line:
    """A link: its copies one after another, in a thread with a stream of its own."""

    def __init__(self, stores: Mapping[int, Store], done: Callable[[int], None]) -> None:
        self.stores, self.done = stores, done
        self.jobs: list[Job] = []  # whose chunks are not all on their way
        self.ended = False
        self.more = threading.Condition()

    def run(self) -> None:
        """Copy AHEAD chunks at once, of KV where any waits; a chunk is done no sooner than its rate allows."""
        stream, flying, free_s = torch.cuda.Stream(), deque[Flying](), 0.0
        while True:
            with self.more:
                self.more.wait_for(lambda: self.jobs or flying or self.ended)
                if self.ended:
                    return
                job = next((job for job in self.jobs if job.copy.kv), self.jobs[0] if self.jobs else None)
            if job is not None and len(flying) < AHEAD:
                begun_s, moved, event = time.monotonic(), 0, torch.cuda.Event()
                for source, a, target, b, size in job.cut():
                    self._copy(self.stores[target], b, self.stores[source], a, size, stream.cuda_stream)
                    moved += size
                event.record(stream)
                free_s = max(free_s, begun_s - CHUNK_S) + moved / job.copy.rate
                flying.append(Flying(event, free_s, None if job.parts else job.copy.number))
                if not job.parts:
                    with self.more:
                        self.jobs.remove(job)
                continue
            chunk = flying.popleft()
            chunk.event.synchronize()
            if (early_s := chunk.due_s - time.monotonic()) > 0:
                time.sleep(early_s)
            if chunk.ends is not None:
                self.done(chunk.ends)

    def _copy(self, to: Store, b: int, of: Store, a: int, size: int, stream: int) -> None:
        if to.on_host and of.on_host:
            ctypes.memmove(to.at + b, of.at + a, size)
            return
        copied = driver.to_host if to.on_host else driver.to_device if of.on_host else driver.between
        copied(to.at + b, of.at + a, size, stream)


class Links:
    """The links of cards: copy engines move what `links.py` moves between files."""

    def __init__(self, engine: Connection) -> None:
        self.engine, self.stores = engine, dict[int, Store]()
        self.lines: dict[str, Line] = {}
        self._send = threading.Lock()
        self._memory: list[mmap.mmap] = []

    def serve(self) -> None:
        """Copy what is asked for, until EOFError: the engine is gone."""
        try:
            while True:
                self._do(self.engine.recv())
        finally:
            for line in self.lines.values():
                with line.more:
                    line.ended = True
                    line.more.notify()

    def _do(self, message: Any) -> None:
        if not isinstance(message, Copy):
            self._take(*message)
            self.engine.send("ready")
            return
        if message.link not in self.lines:
            line = self.lines[message.link] = Line(self.stores, self._done)
            threading.Thread(target=bound, args=(bind, line.run), daemon=True).start()
        line = self.lines[message.link]
        with line.more:
            line.jobs.append(Job(message))
            line.more.notify()

    def _done(self, number: int) -> None:
        with self._send:
            self.engine.send(Copied(number, time.monotonic()))

    def _take(self, numbers: Sequence[int], served: Sequence[Net]) -> None:
        """Take the heaps and the files of host memory, lock those, and fill the models' with their weights."""
        files = take_files(self.engine, len(numbers))
        held: dict[int, Store] = {}  # by inode: weights on disk are those in host memory
        for number, file in zip(numbers, files, strict=True):
            inode = os.fstat(file).st_ino
            if number < len(HEAPS):
                self.stores[number] = Store(HEAPS[number].flat, on_host=False)
            else:
                if inode not in held:
                    held[inode] = self._locked(file)
                self.stores[number] = held[inode]
            os.close(file)
        for k, net in enumerate(served):
            draw(net, k, self.stores[len(HEAPS) + 1 + k].at)

    def _locked(self, file: int) -> Store:
        """Map a file of host memory, touch it by several threads, and lock it."""
        memory = mmap.mmap(file, os.fstat(file).st_size)
        self._memory.append(memory)
        at, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        pieces = [(at + first, min(GIB, size - first)) for first in range(0, size, GIB)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
        driver.pin(at, size)  # as one: a copy may not cross the border of two
        return Store(at, on_host=True)


def draw(net: Net, seed: int, at: int) -> None:
    """Write a network's weights to host memory: those of its checkpoint, else drawn on the card."""
    if net.folder:
        whole = torch.from_numpy(nets.blob(net, seed)).to(DTYPE)
        ctypes.memmove(at, whole.data_ptr(), whole.nbytes)
        return
    generator = torch.Generator(place(0)).manual_seed(seed)
    stream = torch.cuda.current_stream()
    for name, size in nets.tensors(net):
        drawn = torch.empty(size, dtype=DTYPE, device=place(0))
        if len(size) == 1:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            drawn.normal_(0.0, size[-1] ** -0.5, generator=generator)
        driver.to_host(at, drawn.data_ptr(), drawn.nbytes, stream.cuda_stream)
        stream.synchronize()
        at += drawn.nbytes
    torch.cuda.empty_cache()
