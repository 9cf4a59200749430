"""NVIDIA cards as devices; device.py describes a device. Workers are threads of one process that has all the memory.

A device's memory is a heap of physical handles, one for each granule, which are created once (cuMemCreate). Each handle
is mapped in the flat range of its device, which the links use for copies (cuda_links.py). It is also mapped in a space
of each worker that uses it (cuMemMap, cuMemSetAccess). The first granule of every space is always mapped to the heap's
sink: Triton asks the driver about the base address of a pointer, so this address must be mapped.

A share of the SMs is a green context, one of the two parts of a split of the device's SMs. Prefills get the first part
of a split and decodes the second part. So the two are disjoint unless together they ask for more than all SMs. The
kernels that compute are in fused.py.

    Cards      all devices of a run, and the objects that workers pass to each other
    Heap       a device: its handles and its SMs
    Space      a range of addresses in which some granules of a heap are mapped
    Card       a device (a card, or a part of its SMs and memory) as one worker uses it, with streams and graphs
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.engines.torch import fused, model
from harness.engines.torch.device import UnderWay
from harness.engines.torch.model import Pass, Weights
from harness.engines.torch.wire import Given, Order, Part
from harness.policy.types import GIB
from probe import driver
from probe.compute import edges, varlen

# Graphs up to these sizes are captured before a run, larger ones when they are first used.
PREPARED = {fused.Decodes: 32, fused.Prefills: 1024}


def place(card: int) -> torch.device:
    """Return the torch device of a card."""
    return torch.device("cuda", card)


def bind() -> None:
    """Make the first card current in this thread, for the driver and for torch."""
    driver.bind(0)
    torch.cuda.set_device(0)


class Heap:
    """The memory of a device, and its SMs.

    `resource` is the driver's handle of the SMs. `green` is the green context of the SMs, or None for a whole card.
    """

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
        self._splits: dict[int, tuple[Any, Any]] = {}  # the two green contexts, by SMs of the first

    def stream(self, green: Any = None) -> Any:
        """Create a stream on the SMs of a green context or, without one, on all SMs of the device.

        The driver creates it, because torch has only 32 streams for a card, which the workers would share.
        """
        green = self.green if green is None else green
        made = driver.stream() if green is None else driver.green_stream(green)
        return torch.cuda.ExternalStream(made, device=place(self.card))

    def partition_stream(self, sms: int, rest: bool) -> tuple[Any, int]:
        """Create a stream on about `sms` SMs; return the stream, and the number of SMs that it really has.

        The SMs are split in two. The stream gets the first part or, with `rest`, the second part. If `sms` is at least
        the number of the device's SMs, the stream has all of them.
        """
        if sms >= self.sms:
            return self.stream(), self.sms
        least = int(self.resource.sm.minSmPartitionSize)
        group = self.sms - sms if rest else sms
        group = min(max(least, round(group / least) * least), (self.sms - 1) // least * least)  # the other gets some
        with self._lock:
            if group not in self._splits:
                dev = driver.device(self.card)
                first, second = (
                    driver.green(driver.describe(part), dev) for part in driver.split(self.resource, group)
                )
                self._splits[group] = first, second
            context = self._splits[group][rest]
        return self.stream(context), int(driver.green_sms(context).sm.smCount)


class Cards:
    """All devices of a run; `dtype` is the type of their weights and KV.

    Workers also pass objects to each other through `Cards`. One worker exports an object under a number, and another
    takes the object that has this number.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.heaps: list[Heap] = []  # one per device
        self._numbers = count()
        self._exported: dict[int, Any] = {}  # objects on their way between workers, by number

    def open(self, sizes: Sequence[int], granule: int, sms: int) -> str:
        """Create a heap with `sms` SMs for each of `sizes` (bytes); return the reason of a failure, or ""."""
        torch.cuda.init()
        cards = torch.cuda.device_count()
        per_card = -(-len(sizes) // cards)
        for card in range(-(-len(sizes) // per_card)):
            card_sms = torch.cuda.get_device_properties(card).multi_processor_count
            if (per_card == 1 and card_sms != sms) or per_card * sms > card_sms:
                return f"{per_card} devices of {sms} SMs on a card that has {card_sms}: name its kind by --gpu"
            torch.empty(1, device=place(card))  # makes torch's context on the card
            driver.bind(card)
            dev = driver.device(card)
            whole = driver.all_sms(dev)
            groups = driver.groups(whole, per_card, sms) if per_card > 1 else []
            for k, size in enumerate(sizes[card * per_card : (card + 1) * per_card]):
                green = driver.green(driver.describe(groups[k]), dev) if groups else None
                resource = driver.green_sms(green) if groups else whole
                try:
                    self.heaps.append(Heap(size, granule, card, resource, green))
                except driver.DriverError as error:
                    return f"{size / GIB:.1f} GiB of a card for device {len(self.heaps)}: {error.name}"
        bind()
        return ""

    def export(self, what: Any) -> int:
        """Store an object until another worker takes it; return the number that `take` needs for it."""
        number = next(self._numbers)
        self._exported[number] = what
        return number

    def take(self, number: int) -> Any:
        """Return the object that was exported under a number, and remove it."""
        return self._exported.pop(number)


class Space:
    """A range of addresses, parts of which are mapped to the heap; see device.Space."""

    def __init__(self, heap: Heap, size: int, dtype: torch.dtype) -> None:
        self.heap, self.granule, self.dtype = heap, heap.granule, dtype
        self.size = -(-size // self.granule) * self.granule
        self._mapped: dict[int, Any] = {}  # mapped handles, by index of the granule in the range
        self._base = driver.reserve(self.granule + self.size, self.granule)
        driver.map_at(self._base, self.granule, heap.sink)
        driver.allow(self._base, self.granule, heap.card)

    def map(self, at: int, offset: int, size: int) -> None:
        """Map `size` bytes of the heap, from `offset` on, at position `at` of the range; see device.Space."""
        first = offset // self.granule
        self._map(at, self.heap.handles[first : first + size // self.granule])

    def map_sink(self, at: int, size: int) -> None:
        """Map every granule of a part of the range to the heap's sink, so that data written there is lost."""
        self._map(at, [self.heap.sink] * (size // self.granule))

    def _map(self, at: int, handles: Sequence[Any]) -> None:
        """Map handles one after another, from position `at` of the range on.

        Skip handles that are already mapped at their position, because a driver call takes 40 us for each granule.
        """
        first, base = at // self.granule, self._base + self.granule
        # The granules whose mapping changes, by their number in the range.
        fresh = [k for k, handle in enumerate(handles, first) if self._mapped.get(k) is not handle]
        for k in fresh:
            if k in self._mapped:
                driver.unmap(base + k * self.granule, self.granule)
            self._mapped[k] = handles[k - first]
            driver.map_at(base + k * self.granule, self.granule, self._mapped[k])
        for _, run in groupby(enumerate(fresh), lambda pair: pair[1] - pair[0]):  # neighbours in one driver call
            places = [k for _, k in run]
            driver.allow(base + places[0] * self.granule, len(places) * self.granule, self.heap.card)

    def unmap(self, at: int, size: int) -> None:
        """Unmap `size` bytes of the range, from position `at` on; see device.Space."""
        driver.unmap(self._base + self.granule + at, size)
        for k in range(at // self.granule, (at + size) // self.granule):
            del self._mapped[k]

    def leave(self, size: int) -> None:
        """Do nothing; the granules stay mapped, so mapping them again needs no driver call; see device.Space."""

    def tensor(self) -> Tensor:
        """Return the whole range, mapped or not, as one flat tensor; see device.Space."""
        here, nbytes = place(self.heap.card), self.granule + self.size
        make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001 - as_tensor refuses addresses of holes
        storage = make(self._base, here, nbytes)
        first, numbers = self.granule // self.dtype.itemsize, self.size // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=here).set_(storage, first, (numbers,), (1,))


class Card:
    """A device as one worker uses it; each worker has separate streams; see device.Device."""

    def __init__(self, cards: Cards, number: int, memory: int) -> None:
        os.close(memory)  # an unused placeholder: the memory of a card is no file
        self.cards, self.heap = cards, cards.heaps[number]
        self.place = place(self.heap.card)
        torch.cuda.set_device(self.place)
        driver.bind(self.heap.card)
        self.sms = self.heap.sms  # SMs of the lane that computes now; a graph has those of its capture
        self.meanwhile: Callable[[], None] | None = None
        self._streams: dict[tuple[int, bool] | str, tuple[Any, int]] = {
            name: (self.heap.stream(), self.heap.sms) for name in ("own", "attend")
        }
        self._graphs: dict[int, tuple[fused.Decodes, fused.Prefills]] = {}  # keyed by the address of the KV
        self._unfused: set[int] = set()  # addresses of KV of models with more queries per KV head than kernels take
        self._spaces: list[Space] = []

    def space(self, size: int) -> Space:
        """Reserve a range of `size` bytes of addresses; see Device."""
        self._spaces.append(Space(self.heap, size, self.cards.dtype))
        return self._spaces[-1]

    def prepare(self, given: Mapping[str, Given], weights: Mapping[str, Weights], kv: Mapping[str, Tensor]) -> None:
        """Compile kernels and capture graphs for each model; see Device.

        During this work, the address range of the model's weights is mapped to memory, and that of one KV block to the
        heap's sink. Both are unmapped at the end.
        """
        # A model's embedding lies first in its weights.
        by_base = {space.tensor().data_ptr(): space for space in self._spaces}
        for name, (net, pages) in given.items():
            weight_space, kv_space = by_base[weights[name].embedding.data_ptr()], by_base[kv[name].data_ptr()]
            if net.shape.q_heads > fused.QUERIES * kv[name].shape[4]:
                self._unfused.add(kv[name].data_ptr())
            if weight_space.size > len(self.heap.handles) * self.heap.granule:
                continue  # the model does not fit; its load is refused
            weight_space.map(0, 0, weight_space.size)
            kv_space.map_sink(0, pages.block_bytes)
            with torch.inference_mode(), self.lane(None, "mixed"):
                tokens = min(32, pages.block_tokens)
                under_way = Pass(self, weights[name], kv[name], [Part(0, tokens, 0, tokens, (), (0,))], [0] * tokens)
                under_way.run(net.shape.layers, lambda: None, _no_remote)
                under_way.logits()
                if self._fuses(kv[name]):
                    shared = fused.tables(weights[name], kv[name], lambda: self.sms)
                    both = self._graphs[kv[name].data_ptr()] = fused.Decodes(shared), fused.Prefills(shared)
                    for graphs in both:
                        for size in (n for n in graphs.sizes if n <= PREPARED[type(graphs)]):
                            graphs.graph(size, 0, net.shape.layers)
            weight_space.unmap(0, weight_space.size)
            kv_space.unmap(0, pages.block_bytes)

    @contextmanager
    def lane(self, share: float | None, phase: str) -> Iterator[None]:
        """Return a context in which kernels run on a stream with a share of the SMs; see Device.

        The context waits for its kernels at its end, except in the phase "attend". The worker that imports the result
        of this phase waits for its kernels instead.
        """
        before = self.sms
        stream, self.sms = self._stream(share, phase)
        with torch.cuda.stream(stream):
            yield
            if phase != "attend":
                self.wait()
        self.sms = before

    def wait(self) -> None:
        """Wait until all launched kernels are done; until then, call `meanwhile` repeatedly; see Device."""
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
            self._streams[key] = self.heap.partition_stream(*key)
        return self._streams[key]

    def _fuses(self, kv: Tensor) -> bool:
        """Tell whether the fused kernels can compute attention over this KV.

        The answer depends on the data type and the sizes of the KV, and on the number of queries per KV head.
        """
        return fused.serves(kv) and kv.data_ptr() not in self._unfused

    def contexts(self, parts: Sequence[Part], kv: Tensor) -> Any:
        """Return the contexts of a step's decodes for the fused kernels, or a block table; see Attention.

        The block table is for a network that the fused kernels cannot serve.
        """
        if not self._fuses(kv):
            return model.block_table(parts, kv)
        first, stride = fused.units(kv)
        offsets = [torch.tensor(p.blocks[: -(-p.context // kv.shape[3])]) * stride + first for p in parts]
        table = torch.nn.utils.rnn.pad_sequence(offsets, batch_first=True).to(torch.int32)
        wide = functional.pad(table, (0, -table.shape[1] % 16))  # Triton sees a multiple of 16; 0 is the sink
        tokens = torch.tensor([p.context for p in parts], dtype=torch.int32)
        return fused.Contexts(wide.to(kv.device), tokens.to(kv.device), *fused.scratch(kv, len(parts), self.sms))

    def decode_attention(self, kv: Tensor, layer: int, contexts: Any, q: Tensor) -> Tensor:
        """Return decode attention, one query for each context, by the fused kernel or by torch; see Attention."""
        if not isinstance(contexts, fused.Contexts):
            return model.decode_attention(kv, layer, contexts, q)
        q = q.contiguous()
        out = torch.empty_like(q)
        fused.attention(kv, layer, contexts, q, out)
        return out

    def prompt(self, part: Part, kv: Tensor) -> Any:
        """Copy the block numbers of a prompt piece to the card, once per step; see Attention.

        A copy between two layers would wait until the earlier layer is computed. The block numbers are part of the
        result.
        """
        return part, model.block_ids(part, kv), edges(part.tokens, part.context, self.place)

    def prompt_attention(self, kv: Tensor, layer: int, prompt: Any, q: Tensor) -> Tensor:
        """Return the attention of a prompt piece, by torch's attention over packed sequences; see Attention.

        This kernel of torch accepts a piece with fewer queries than keys. Networks in float32 use
        `model.prompt_attention` instead.
        """
        part, blocks, ends = prompt
        if kv.dtype == torch.float32:
            return model.prompt_attention(kv, layer, part, blocks, q)
        key, value = (kv[:, layer, half].index_select(0, blocks).flatten(0, 1)[: part.context] for half in (0, 1))
        return varlen(q.contiguous(), key, value, ends)

    def rope_write(self, step: Pass, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Apply RoPE and write keys and values to the KV in one kernel; see Attention.

        Return None if the kernel cannot serve the step.
        """
        kv, net, norms = step.kv, step.weights.net, step.weights.layers[layer].norms
        if step.remote or not fused.serves(kv):
            return None
        fused.rms_norm_heads(qkv, norms, net)
        q = fused.rope_write(qkv, step.cos, step.sin, step.row, step.slots.number, kv, layer, net.shape)
        return q, q[:0], q[:0]

    def graphs(self, order: Order, ids: Sequence[int], weights: Weights, kv: Tensor) -> UnderWay | None:  # noqa: ARG002
        """Begin a step as CUDA graphs; return None if no graphs can run this step; see Device.

        The graphs have the size of the step, or the next larger size that was captured.
        """
        chosen = next((each for each in self._graphs.get(kv.data_ptr(), ()) if each.takes(order)), None)
        return None if chosen is None else chosen.begin(order, ids)

    def export(self, *tensors: Tensor) -> Any:
        """Export tensors with an event that marks the end of their computation; return their number; see Device."""
        event = torch.cuda.Event()
        event.record()
        return self.cards.export((tensors, event))

    def imported(self, handle: Any) -> list[Tensor]:
        """Return the tensors that another worker exported, copied to this device; see Device."""
        tensors, event = self.cards.take(handle)
        event.wait()
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())
        return [tensor.to(self.place) for tensor in tensors]

    def export_attention(self, kv: Tensor, slots: model.Slots, contexts: Any) -> Any:
        """Export a callable that computes attention over this KV; return its number, as a handle.

        Another worker passes this handle to `imported_attention`; see Device.
        """
        return self.cards.export(partial(self._attention_for, kv, slots, contexts))

    def imported_attention(self, handle: Any) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Return the callable that another worker exported; see Device.

        It launches the kernels from this worker's thread, on the "attend" stream of the other device.
        """
        return self.cards.take(handle)

    def _attention_for(
        self, kv: Tensor, slots: model.Slots, contexts: Any, layer: int, q: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write the new keys and values to the KV, and return the attention over it, computed on this device.

        The worker that needs the attention calls this in its own thread. The streams of the two devices wait for each
        other; the thread does not wait.
        """
        asking, (attending, _) = torch.cuda.current_stream(), self._stream(None, "attend")
        attending.wait_stream(asking)
        with torch.cuda.stream(attending):
            model.write(kv, layer, slots, key.to(self.place), value.to(self.place))
            out = self.decode_attention(kv, layer, contexts, q.to(self.place)).to(q.device)
        asking.wait_stream(attending)
        out.record_stream(asking)
        return out


def _no_remote(*_: Any) -> Tensor:
    raise AssertionError("nothing lies elsewhere")
