"""What the probes share: the machine's facts, partitions, graphs, clocks, and a small Llama over paged KV.

Data is random (zeros draw less power and time too well); buffers rotate over more than the L2 cache.
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
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.engines.probes import driver, kernels

MIB, GIB = 1 << 20, 1 << 30
BF16 = 2  # bytes
LOG2E = 1.4426950408889634
CACHES = 1.5  # buffers that rotate hold so many times the L2 cache
DEVICE = "cuda:0"
LARGE = 16 * MIB  # a page of KV or weights


# ---------------------------------------------------------------------------------------------------- machine


def short(name: str) -> str:
    """A card's name as a folder: "NVIDIA H200" is h200."""
    words = name.lower().replace("nvidia", " ").replace("/", " ").split()
    return "-".join(words) or "gpu"


def hello() -> dict[str, Any]:
    """Facts of the machine; raises where torch sees no device."""
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
    """Between two probes: raises where the context is broken."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@cache
def sms() -> int:
    """SMs of the card."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


@cache
def l2_bytes() -> int:
    """Its L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def free_bytes() -> int:
    """Device memory that a probe may take, a GiB kept back."""
    gc.collect()
    torch.cuda.empty_cache()
    return driver.memory()[0] - GIB


def random(numbers: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    """bf16 numbers on the device."""
    return noise(torch.empty(numbers, dtype=torch.bfloat16, device=DEVICE), scale, seed)


def noise(x: Tensor, scale: float = 0.02, seed: int = 0) -> Tensor:
    """Fill with normal numbers, piece by piece."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    for piece in x.view(-1).split(1 << 28):
        piece.normal_(0.0, scale, generator=generator)
    return x


def at(address: int, nbytes: int, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Tensor:
    """A flat tensor over memory that is somebody else's. The address is not looked at: holes are allowed."""
    place = torch.device(device or DEVICE)
    storage = torch._C._construct_storage_from_data_pointer(address, place, nbytes)
    return torch.empty(0, dtype=dtype, device=place).set_(storage, 0, (nbytes // dtype.itemsize,), (1,))


# ------------------------------------------------------------------------------------------------- partitions


class Part(NamedTuple):
    """A stream, and the SMs that its kernels may use; `green` keeps the partition alive."""

    sms: int
    stream: Any
    green: Any = None


@cache
def whole(priority: int = 0, lane: int = 0) -> Part:
    """All SMs; `lane` tells streams of the same priority apart."""
    del lane
    return Part(sms(), torch.cuda.Stream(priority=priority))


def on(resource: Any) -> Part:
    """A partition of its own over a resource."""
    dev = driver.device()
    context = driver.green(driver.describe(resource), dev)
    stream = torch.cuda.ExternalStream(driver.green_stream(context), device=torch.device("cuda", 0))
    return Part(int(driver.green_sms(context).sm.smCount), stream, context)


@cache
def pair(n: int) -> tuple[Part, Part]:
    """About n SMs and the rest, disjoint, from one split: the rest may lack thread-block clusters."""
    group, rest = driver.split(driver.all_sms(driver.device()), n)
    return on(group), on(rest)


def part(n: int) -> Part:
    """About n SMs, or all."""
    return whole() if n >= sms() else pair(n)[0]


def shares(counts: Sequence[int]) -> list[int]:
    """Those SM counts that are a true part of this card, and the whole card first."""
    return [sms(), *sorted((n for n in counts if n < sms()), reverse=True)]


# ----------------------------------------------------------------------------------------------------- clocks


@contextmanager
def capture(stream: Any) -> Iterator[Any]:
    """A graph of what is launched inside, each kernel bound to `stream`'s partition."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()


def graph_of(p: Part, work: Callable[[int], object], calls: int = 1) -> Any:
    """A graph of `calls` calls of `work(i)`; run once before, so that nothing compiles inside the capture."""
    p.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(p.stream):
        for i in range(min(2, calls)):
            work(i)
    torch.cuda.synchronize()
    with capture(p.stream) as graph:
        for i in range(calls):
            work(i)
    return graph


def replays(p: Part, graph: Any, n: int) -> list[float]:
    """Seconds of n replays, back to back."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    with torch.cuda.stream(p.stream):
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
    p.stream.synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in pairwise(marks)]


def timed(p: Part, work: Callable[[int], object], calls: int = 1, seconds: float = 0.1) -> list[float]:
    """Seconds of one call, from replays of a graph of `calls`; the first replays, cold, are left out."""
    graph = graph_of(p, work, calls)
    probe = min(replays(p, graph, 3))
    n = int(min(50, max(5, seconds / max(probe, 1e-6))))
    out = [s / calls for s in replays(p, graph, n + 1)[1:]]
    graph.reset()
    return out


def rotation(nbytes: int, least: int = 4, most: int = 64) -> int:
    """How many buffers of a size outgrow the L2 cache."""
    return int(min(most, max(least, -(-int(CACHES * l2_bytes()) // nbytes))))


# ------------------------------------------------------------------------------------------------------ pages


class Pages:
    """Addresses for `count` pages; handles come and go. Nothing is mapped at the start; page 0 stays mapped for ever.

    Triton asks the driver about the base pointer at each launch, so page 0 must be there.
    """

    def __init__(self, count: int, page: int = 0) -> None:
        page = page or LARGE
        self.count, self.page, self.size = count, page, count * page
        self.base = driver.reserve(self.size, page)
        self.handles: dict[int, Any] = {}

    def put(self, i: int, handle: Any) -> None:
        """Map a handle as page i, still closed."""
        driver.map_at(self.base + i * self.page, self.page, handle)
        self.handles[i] = handle

    def take(self, i: int) -> Any:
        """Unmap page i and hand its handle out."""
        driver.unmap(self.base + i * self.page, self.page)
        return self.handles.pop(i)

    def open(self, first: int = 0, count: int | None = None) -> None:
        """Let the device use pages that are mapped side by side."""
        driver.allow(self.base + first * self.page, (self.count if count is None else count) * self.page)

    def fill(self) -> Pages:
        """Map new handles everywhere."""
        for i in range(self.count):
            self.put(i, driver.create(self.page))
        self.open()
        return self

    def close(self) -> None:
        """Give everything back."""
        torch.cuda.synchronize()
        for i in list(self.handles):
            driver.release(self.take(i))
        driver.unreserve(self.base, self.size)


# ------------------------------------------------------------------------------------------------------ models


class Dims(NamedTuple):
    """A Llama's dimensions, from the public configuration."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv: int
    d: int
    ffn: int
    vocab: int

    @property
    def token(self) -> int:
        """Numbers of K, or of V, of a token in a layer."""
        return self.kv * self.d

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token in all layers."""
        return 2 * BF16 * self.layers * self.token

    def gemms(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the weights of a layer, and of the head."""
        return {
            "qkv": ((self.heads + 2 * self.kv) * self.d, self.hidden),
            "o": (self.hidden, self.heads * self.d),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
        }

    def weight_bytes(self) -> int:
        """Bytes of `weights`."""
        return BF16 * sum(prod(shape) for _, shape in _plan(self))


DIMS = {
    "1B": Dims("1B", 16, 2048, 32, 8, 64, 8192, 128256),
    "3B": Dims("3B", 28, 3072, 24, 8, 128, 8192, 128256),
    "8B": Dims("8B", 32, 4096, 32, 8, 128, 14336, 128256),
}


def _plan(m: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    for l in range(m.layers):
        yield from ((f"{l}.{name}", shape) for name, shape in m.gemms().items() if name != "head")
        yield from ((f"{l}.norm{i}", (m.hidden,)) for i in (1, 2))
    yield from (("norm", (m.hidden,)), ("head", (m.vocab, m.hidden)), ("embedding", (m.vocab, m.hidden)))


def weights(m: Dims, blob: Tensor) -> dict[str, Tensor]:
    """Views of one flat blob, in the order in which layers run."""
    out, first = {}, 0
    for name, shape in _plan(m):
        out[name] = blob[first : first + prod(shape)].view(shape)
        first += prod(shape)
    return out


@dataclass(frozen=True, slots=True)
class Kv:
    """A pool of pages `[layer][K, V][tokens][kv heads][d]` in flat bf16 `data`."""

    m: Dims
    data: Tensor
    tokens: int  # of a page
    stride: int  # numbers from a page to the next

    @property
    def layer(self) -> int:
        """Numbers from a layer's K to the next layer's."""
        return 2 * self.tokens * self.m.token

    @property
    def v_off(self) -> int:
        """Numbers from K to V."""
        return self.tokens * self.m.token

    def table(self, rows: int, ctx: int, block: int, seed: int = 0) -> Tensor:
        """Block table of `rows` sequences of `ctx` tokens on shuffled pages; int32, in units of 256 bytes."""
        each = -(-ctx // self.tokens)
        if rows * each * self.stride > self.data.numel():
            raise ValueError(
                f"{rows} sequences of {ctx} tokens do not fit into {self.data.numel() // self.stride} pages"
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(rows * each, generator=generator).view(rows, each, 1)
        inside = torch.arange(self.tokens // block) * block * self.m.token
        offsets = (order * self.stride + inside).view(rows, -1)[:, : -(-ctx // block)]
        width = -(-offsets.shape[1] // 16) * 16  # a stride that Triton sees as a multiple of 16
        out = torch.zeros(rows, width, dtype=torch.int64)
        out[:, : offsets.shape[1]] = offsets
        return (out // kernels.UNIT).to(torch.int32).to(self.data.device)

    def slots(self, table: Tensor, position: Tensor, block: int) -> Tensor:
        """Where the K of each row's token at `position` lies: int64, in numbers."""
        held = table.gather(1, (position // block).view(-1, 1).long()).view(-1).long()
        return held * kernels.UNIT + (position % block).long() * self.m.token


def page_tokens(m: Dims, page: int, block: int) -> int:
    """Tokens of a page: whole blocks."""
    return page // m.kv_bytes // block * block


def pool(m: Dims, *needs: tuple[int, int], page: int = 0, block: int = 64) -> Kv:
    """KV in plain memory, enough for any one of `needs`: (sequences, tokens of each)."""
    page = page or LARGE
    each = page_tokens(m, page, block)
    count = max(rows * -(-ctx // each) for rows, ctx in needs)
    return Kv(m, random(count * page // BF16, 1.0), each, page // BF16)


def splits(rows: int, kv: int, on_sms: int) -> int:
    """The least power of two, up to 32, that gives each SM two programs of decode attention."""
    n = 1
    while n < 32 and rows * kv * n < 2 * on_sms:
        n *= 2
    return n


@dataclass(frozen=True, slots=True)
class Attend:
    """Decode attention of some rows: static tensors, launched by `run(layer)`."""

    kv: Kv
    q: Tensor
    table: Tensor
    ctx: Tensor
    acc: Tensor
    ml: Tensor
    out: Tensor
    block: int
    splits: int
    stages: int

    def run(self, layer: int) -> None:
        """q to out in one layer."""
        m, rows = self.kv.m, self.q.shape[0]
        group, padded = m.heads // m.kv, 16
        kernels.decode[(rows, m.kv, self.splits)](
            self.q, self.kv.data, self.table, self.ctx, self.acc, self.ml, self.table.stride(0),
            layer * self.kv.layer, self.kv.v_off, m.d**-0.5 * LOG2E,
            G=group, HKV=m.kv, D=m.d, BS=self.block, S=self.splits, GP=padded, num_warps=4, num_stages=self.stages,
        )  # fmt: skip
        kernels.merge[(rows, m.kv, group)](
            self.acc, self.ml, self.out, G=group, D=m.d, S=self.splits, GP=padded, num_warps=1
        )


def attend(kv: Kv, rows: int, ctx: int, on_sms: int, block: int = 64, stages: int = 7, split: int = 0) -> Attend:
    """Static tensors for `rows` sequences of `ctx` tokens."""
    m, device = kv.m, kv.data.device
    s = split or splits(rows, m.kv, on_sms)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    q = noise(torch.empty(rows, m.heads, m.d, dtype=torch.bfloat16, device=device), 1.0, 1)
    return Attend(
        kv, q, kv.table(rows, ctx, block), torch.full((rows,), ctx, dtype=torch.int32, device=device),
        torch.empty(rows * m.kv * s * 16 * m.d, **fp32), torch.empty(rows * m.kv * s * 16 * 2, **fp32),
        torch.empty_like(q), block, s, stages,
    )  # fmt: skip


def reference(a: Attend, layer: int) -> Tensor:
    """What `a.run(layer)` should give, in fp32 by torch."""
    m, kv, out = a.kv.m, a.kv, []
    inside = torch.arange(a.block, device=a.q.device)[:, None] * m.token + torch.arange(m.token, device=a.q.device)
    for row, n in enumerate(a.ctx.tolist()):
        blocks = a.table[row, : -(-n // a.block)].long() * kernels.UNIT + layer * kv.layer
        where = (blocks[:, None, None] + inside).view(-1, m.token)[:n]
        k, v = (kv.data[where + off].view(n, m.kv, m.d).float() for off in (0, kv.v_off))
        q = a.q[row].float().view(m.kv, m.heads // m.kv, m.d)
        p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * m.d**-0.5, -1)
        out.append(torch.einsum("hgn,nhd->hgd", p, v).reshape(m.heads, m.d))
    return torch.stack(out) if out else torch.empty(0)


@cache
def rotary(d: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables."""
    turn = 500000.0 ** (-torch.arange(0, d, 2, device=DEVICE) / d)
    angle = torch.arange(positions, device=DEVICE)[:, None] * turn
    return angle.cos().contiguous(), angle.sin().contiguous()


class Model:
    """A Llama that runs whole steps over static buffers; `layers` of it, fewer where the rest is scaled up."""

    def __init__(self, m: Dims, blob: Tensor | None = None, layers: int | None = None) -> None:
        self.m = m if layers is None else m._replace(layers=layers)
        size = self.m.weight_bytes() // BF16
        self.blob = random(size) if blob is None else blob[:size]
        self.w = weights(self.m, self.blob)
        for name, w in self.w.items():
            if "norm" in name:
                w.fill_(1.0)

    def decode(self, kv: Kv, rows: int, ctx: int, on_sms: int) -> Decode:
        """Buffers of a decode step."""
        return Decode(self, attend(kv, rows, ctx, on_sms))

    def prefill(self, tokens: int, backend: str = "flash") -> Prefill:
        """Buffers of one prompt's prefill."""
        return Prefill(self, tokens, backend)


class Layers:
    """What decode and prefill share: the static activations of `rows` tokens and all kernels but attention's."""

    def __init__(self, model: Model, rows: int) -> None:
        m, self.model, self.rows = model.m, model, rows

        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)

        self.x, self.y, self.out = buffer(rows, m.hidden), buffer(rows, m.hidden), buffer(rows, m.hidden)
        self.qkv, self.q = buffer(rows, m.heads + 2 * m.kv, m.d), buffer(rows, m.heads, m.d)
        self.both, self.act = buffer(rows, 2 * m.ffn), buffer(rows, m.ffn)
        self.ids = torch.randint(m.vocab, (rows,), device=DEVICE)
        self.block = triton.next_power_of_2(m.hidden)

    def norm(self, add: Tensor, weight: Tensor) -> None:
        """x += add, y = norm of x."""
        m = self.model.m
        kernels.add_norm[(self.rows,)](self.x, add, weight, self.y, H=m.hidden, BLOCK=self.block, num_warps=8)

    def rope(self, position: Tensor, slot: Tensor, k: Tensor, v: Tensor, layer: int, v_off: int) -> None:
        """q, and K and V to their place."""
        m = self.model.m
        cosine, sine = rotary(m.d, 1 << 14)
        kernels.rope_write[(self.rows, m.heads + m.kv)](
            self.qkv, cosine, sine, position, slot, self.q, k, v, layer, v_off, HQ=m.heads, HKV=m.kv, D=m.d, num_warps=1
        )

    def activate(self) -> None:
        """act = silu(gate) * up."""
        m = self.model.m
        kernels.silu_mul[(self.rows, -(-m.ffn // 1024))](self.both, self.act, F=m.ffn, BLOCK=1024, num_warps=4)

    def project(self, name: str, x: Tensor, out: Tensor) -> None:
        """out = x @ weight^T."""
        torch.mm(x, self.model.w[name].t(), out=out)

    def attention(self, layer: int) -> Tensor:
        """qkv to attention's output, (rows, heads * d)."""
        raise NotImplementedError

    def body(self) -> None:
        """Token ids to the last layer's output."""
        m, w = self.model.m, self.model.w
        torch.index_select(w["embedding"], 0, self.ids, out=self.x)
        self.out.zero_()
        for l in range(m.layers):
            self.norm(self.out, w[f"{l}.norm1"])
            self.project(f"{l}.qkv", self.y, self.qkv.view(self.rows, -1))
            self.project(f"{l}.o", self.attention(l), self.out)
            self.norm(self.out, w[f"{l}.norm2"])
            self.project(f"{l}.gate_up", self.y, self.both)
            self.activate()
            self.project(f"{l}.down", self.act, self.out)
        self.norm(self.out, w["norm"])

    def small(self) -> None:
        """The kernels of a layer that are neither a GEMM nor attention."""
        raise NotImplementedError


class Decode(Layers):
    """One token of each row."""

    def __init__(self, model: Model, a: Attend) -> None:
        super().__init__(model, a.q.shape[0])
        self.a, self.q = a, a.q
        self.position = a.ctx - 1
        self.slot = a.kv.slots(a.table, self.position, a.block)
        self.logits = torch.empty(self.rows, model.m.vocab, dtype=torch.bfloat16, device=DEVICE)

    def _rope(self, layer: int) -> None:
        kv = self.a.kv
        self.rope(self.position, self.slot, kv.data, kv.data, layer * kv.layer, kv.v_off)

    def attention(self, layer: int) -> Tensor:
        """Writes the new token's K and V, then attends to all."""
        self._rope(layer)
        self.a.run(layer)
        return self.a.out.view(self.rows, -1)

    def small(self) -> None:
        """Two norms, rope and KV write, activation."""
        self.norm(self.out, self.model.w["0.norm1"])
        self._rope(0)
        self.norm(self.out, self.model.w["0.norm2"])
        self.activate()

    def step(self, _: int = 0) -> None:
        """The next ids, where the last ones were."""
        self.body()
        self.project("head", self.y, self.logits)
        torch.argmax(self.logits, 1, out=self.ids)


class Prefill(Layers):
    """One prompt from its start; K and V go to scratch, where torch's attention reads them, and once more to pages."""

    def __init__(self, model: Model, tokens: int, backend: str) -> None:
        super().__init__(model, tokens)
        m = model.m
        self.backend = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
        self.k, self.v = (torch.empty(tokens, m.kv, m.d, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        self.pages = torch.empty(2 * tokens * m.token, dtype=torch.bfloat16, device=DEVICE)
        self.position = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.slot = self.position.long() * m.token
        self.logits = torch.empty(1, m.vocab, dtype=torch.bfloat16, device=DEVICE)

    def attend(self) -> Tensor:
        """Causal attention of the prompt over itself."""
        q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (self.q, self.k, self.v))
        with sdpa_kernel(self.backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.rows, -1)

    def attention(self, layer: int) -> Tensor:
        """Rope, the page write, attention."""
        del layer
        self.rope(self.position, self.slot, self.k, self.v, 0, 0)
        self.rope(self.position, self.slot, self.pages, self.pages, 0, self.rows * self.model.m.token)
        return self.attend()

    def small(self) -> None:
        """Two norms, rope and KV write, activation."""
        self.norm(self.out, self.model.w["0.norm1"])
        self.rope(self.position, self.slot, self.k, self.v, 0, 0)
        self.norm(self.out, self.model.w["0.norm2"])
        self.activate()

    def step(self, _: int = 0) -> None:
        """The logits after the prompt."""
        self.body()
        torch.mm(self.y[-1:], self.model.w["head"].t(), out=self.logits)
