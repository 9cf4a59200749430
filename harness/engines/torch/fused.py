"""The fused kernels with which cards serve a model, and the model's steps as CUDA graphs.

A step of decodes is one graph; a step of whole prompts and decodes is also one graph. There is a graph for each size
and stream. The addresses in a graph stay the same, whatever memory is mapped there. A step that is computed in slices
uses one graph for each layer, because slices differ from step to step. Each share of the SMs has its own stream. A
graph of this stream is captured when the stream first has a step of that size. Other steps, such as those with later
pieces of prompts, are launched kernel by kernel. They are slower: the workers of a card are threads of one interpreter,
so each launch waits for the interpreter's lock. The kernels, which the probe measures, need bfloat16 and sizes that are
powers of two. Torch's kernels serve all other networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional

from harness.engines.torch import model
from harness.engines.torch.model import Computed, Remote, Weights
from harness.engines.torch.nets import Net
from harness.engines.torch.wire import Order, Part
from harness.policy.types import Shape
from probe import kernels
from probe.compute import varlen

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sizes of the graphs of decodes
TOKENS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)  # sizes of the graphs of prompts
PROMPTS, DECODES = 8, 32  # most prompts, and most decodes beside them, in a graph of prompts
LOG2E = 1.4426950408889634
UNIT_BYTES = 256  # block tables count in units of so many bytes (probe/kernels.py)
QUERIES = 16  # queries per KV head that decode attention takes; fewer are padded to as many
MOST_POSITIONS = 1 << 16  # graphs' tables of rotary angles end there
WIDE = ("slot", "block", "within", "last")  # these buffers take 8 bytes a number


class Contexts(NamedTuple):
    """The contexts of a batch of decodes, in the form that the attention kernel takes, and its scratch memory."""

    table: Tensor  # int32 (contexts, blocks): where each block's keys of the first layer lie, in 256 bytes
    tokens: Tensor  # int32
    acc: Tensor
    ml: Tensor
    splits: int


def serves(kv: Tensor) -> bool:
    """Tell whether the fused kernels can serve the network that has this KV.

    They need bfloat16, and a block size and a head dimension that are powers of two and at least 16.
    """
    return kv.dtype == torch.bfloat16 and all(n >= 16 and n & (n - 1) == 0 for n in (kv.shape[3], kv.shape[5]))


def anchor(kv: Tensor) -> Tensor:
    """Return a tensor at the base address of the space in which the KV is mapped; this address is always mapped."""
    return kv.as_strided((1,), (1,), 0)


def units(kv: Tensor) -> tuple[int, int]:
    """Return two offsets in units of 256 bytes: from the anchor to the first block, and between adjacent blocks."""
    return kv.storage_offset() * kv.itemsize // UNIT_BYTES, kv.stride(0) * kv.itemsize // UNIT_BYTES


def scratch(kv: Tensor, rows: int, sms: int) -> tuple[Tensor, Tensor, int]:
    """Return two scratch tensors for `rows` contexts, and the number of parts into which each context is split.

    The number is the smallest power of two that gives each SM at least two programs, but at most 32.
    """
    heads, dim, splits = kv.shape[4], kv.shape[5], 1
    while splits < 32 and rows * heads * splits < 2 * sms:
        splits *= 2
    sizes = rows * heads * splits * QUERIES * dim, rows * heads * splits * QUERIES * 2
    acc, ml = (torch.empty(size, dtype=torch.float32, device=kv.device) for size in sizes)
    return acc, ml, splits


def attention(kv: Tensor, layer: int, c: Contexts, q: Tensor, out: Tensor) -> None:
    """Launch decode attention with one query for each context, and write the result to `out`.

    `q` and `out` have the dimensions (contexts, heads, dimension).
    """
    rows, heads, dim, block = len(q), kv.shape[4], kv.shape[5], kv.shape[3]
    group = q.shape[1] // heads
    kernels.decode[(rows, heads, c.splits)](
        q, anchor(kv), c.table, c.tokens, c.acc, c.ml, c.table.stride(0), layer * kv.stride(1), kv.stride(2),
        dim**-0.5 * LOG2E, G=group, HKV=heads, D=dim, BS=block, S=c.splits, GP=QUERIES, num_warps=4, num_stages=7,
    )  # fmt: skip
    kernels.merge[(rows, heads, group)](c.acc, c.ml, out, G=group, D=dim, S=c.splits, GP=QUERIES, num_warps=1)


def rms_norm_heads(qkv: Tensor, norms: Sequence[Tensor] | None, net: Net) -> None:
    """Normalise each head's queries and keys in place, if the network has norms for them."""
    at = 0
    for heads, weight in zip((net.shape.q_heads, net.shape.kv_heads), norms or (), strict=False):
        part = qkv[:, at : at + heads]
        part.copy_(functional.rms_norm(part, (net.shape.head_dim,), weight, net.eps))
        at += heads


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, kv: Tensor, layer: int, s: Shape
) -> Tensor:
    """Launch RoPE on queries and keys, write keys and values to the KV, and return the queries."""
    q = qkv.new_empty(len(qkv), s.q_heads, s.head_dim)
    kernels.rope_write[(len(qkv), s.q_heads + s.kv_heads)](
        qkv,
        cos,
        sin,
        position,
        slot,
        q,
        anchor(kv),
        anchor(kv),
        layer * kv.stride(1),
        kv.stride(2),
        HQ=s.q_heads,
        HKV=s.kv_heads,
        D=s.head_dim,
        num_warps=1,
    )
    return q


class Tables(NamedTuple):
    """Tensors and sizes that all graphs of a model on a device share."""

    weights: Weights
    kv: Tensor
    sms: Callable[[], int]  # returns those of the lane that computes now
    width: int  # blocks of a context at most; a stride that Triton sees as a multiple of 16
    cos: Tensor
    sin: Tensor
    pool: Any  # memory that graphs share, as they run one after another


def tables(weights: Weights, kv: Tensor, sms: Callable[[], int]) -> Tables:
    """Return the tables of a model's graphs, with the rotary angles of its positions."""
    most = min(weights.net.shape.max_tokens, MOST_POSITIONS, len(kv) * kv.shape[3])
    width = -(-most // kv.shape[3] // 16) * 16
    at = torch.arange(width * kv.shape[3], device=kv.device)
    cos, sin = (angle[:, 0].contiguous() for angle in model.rotary_angles(weights.net, at))
    return Tables(weights, kv, sms, width, cos, sin, torch.cuda.graph_pool_handle())


class Graphs:
    """The CUDA graphs of a model's steps on a device, and the buffers that they read and write.

    There is a graph for each size, range of layers and stream. The staging buffer consists of named arrays; `sizes` has
    the length of each array in int32 numbers. A step has at most `rows` tokens and at most `parts` requests.
    """

    def __init__(self, shared: Tables, sizes: Mapping[str, int], rows: int, parts: int) -> None:
        self.shared, self.block, self.layers = shared, shared.kv.shape[3], shared.weights.net.shape.layers
        self.under_way: Replay | None = None  # what is staged and not computed: nothing else is staged meanwhile
        self._sizes, words, here = sizes, sum(sizes.values()), shared.kv.device
        self.staged = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=here)
        self.on = self._views(self.buffer)
        self.on["slot"].fill_(-1)  # until a step comes nothing is written, and nothing attended
        self.arrays = {name: tensor.numpy() for name, tensor in self._views(self.staged).items()}
        self.made = torch.zeros(parts, dtype=torch.int64, pin_memory=True)
        s, like = shared.weights.net.shape, shared.weights.embedding
        self._x, self._out, self._y = (like.new_empty(rows, s.hidden) for _ in range(3))
        self._attended = like.new_empty(rows, s.q_heads, s.head_dim)
        self._graphs: dict[tuple[int, int, int, int], tuple[Any, tuple[Tensor, Tensor] | None]] = {}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = dict(zip(self._sizes, flat.split(list(self._sizes.values())), strict=True))
        wide = {name: views[name].view(torch.int64) for name in WIDE if name in views}
        return views | wide | {"table": views["table"].view(-1, self.shared.width)}

    def takes(self, order: Order) -> bool:
        """Tell whether these graphs can run a step; False while another step is using them."""
        return self.under_way is None and bool(order.parts) and all(map(self._within, order.parts))

    def _within(self, p: Part) -> bool:
        return p.remote < 0 and p.context <= len(self.shared.cos)

    def _decode(self, k: int, p: Part) -> None:
        """Write a decode to row `k` of the staging buffer.

        The decode computes the token at position `p.cached_tokens`, the first one that is not cached.
        """
        a, n = self.arrays, p.cached_tokens // self.block + 1
        first, stride = units(self.shared.kv)
        a["position"][k], a["tokens"][k] = p.cached_tokens, p.cached_tokens + 1
        a["slot"][k] = self._slot(p.blocks[n - 1], p.cached_tokens % self.block)
        a["table"][k, :n] = np.array(p.blocks[:n]) * stride + first

    def _slot(self, block: Any, within: Any) -> Any:
        """Return the index in the KV at which rope_write stores the first layer's key of each token.

        The index counts elements of the KV's storage. `block` is the number of the token's block, and `within` the
        token's position in the block. Both may be numbers or arrays.
        """
        kv = self.shared.kv
        return kv.storage_offset() + block * kv.stride(0) + within * kv.stride(3)

    def _empty(self, first: int, end: int) -> None:
        """Mark rows of the staging buffer as empty, from `first` to before `end`.

        The keys and values of empty rows are not written.
        """
        for name, value in (("ids", 0), ("position", 0), ("slot", -1)):
            self.arrays[name][first:end] = value

    def _staged(self, size: int, words: int, count: int) -> Replay:
        """Copy the staging buffer to the device on the current stream, and return the step that it describes."""
        self.buffer[:words].copy_(self.staged[:words], non_blocking=True)
        self.under_way = Replay(self, size, count)
        return self.under_way

    def graph(self, size: int, first: int, end: int) -> tuple[Any, tuple[Tensor, Tensor] | None]:
        """Return the graph of layers `first` to `end` for a size on the current stream; the first call captures it.

        Also return the logits and tokens that the graph computes, or None if `end` is not the last layer.
        """
        stream = torch.cuda.current_stream()
        key = size, first, end, int(stream.cuda_stream)
        if key not in self._graphs:
            before = self._x.clone(), self._out.clone()
            self.body(size, first, end)  # compiles, and computes what is staged, as the replay does again
            self._x.copy_(before[0])
            self._out.copy_(before[1])
            stream.synchronize()
            graph: Any = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.shared.pool, capture_error_mode="thread_local")
            try:
                result, graph.tensors = self.body(size, first, end)  # a graph holds addresses, not tensors
            finally:
                graph.capture_end()
            self._graphs[key] = graph, result
        return self._graphs[key]

    def body(self, size: int, first: int, end: int) -> tuple[tuple[Tensor, Tensor] | None, Any]:
        """Launch the kernels of layers `first` to `end` of a step.

        Return the logits and tokens (None before the last layer), and further tensors. These must stay alive, because a
        captured graph uses their memory.
        """
        raise NotImplementedError

    def _layers(
        self,
        ids: Tensor,
        at: tuple[Tensor, Tensor],
        attend: Callable[[int, Tensor, Tensor], None],
        first: int,
        end: int,
    ) -> Tensor:
        """Launch layers `first` to `end` on some tokens; after the last layer, return the output of the final norm.

        `at` has the tokens' positions and slots. The buffer `_x` stores the residual. The buffer `_out` stores the last
        output, which is still to be added to the residual. Both buffers keep their content from one graph to the next.
        """
        W, s, kv, n = self.shared.weights, self.shared.weights.net.shape, self.shared.kv, len(ids)
        x, out, y, attended = self._x[:n], self._out[:n], self._y[:n], self._attended[:n]
        if not first:
            torch.index_select(W.embedding, 0, ids, out=x)
            out.zero_()
        for k, layer in enumerate(W.layers[first:end], first):
            self._add_rms_norm(x, out, layer.norm_1, y)
            qkv = functional.linear(y, layer.qkv, layer.bias).view(n, -1, s.head_dim)
            rms_norm_heads(qkv, layer.norms, W.net)
            attend(k, rope_write(qkv, self.shared.cos, self.shared.sin, *at, kv, k, s), attended)
            torch.mm(attended.view(n, -1), layer.out.t(), out=out)
            self._add_rms_norm(x, out, layer.norm_2, y)
            ((wide, narrow),) = layer.blocks
            up = functional.linear(y, wide)
            if s.gated:
                act = up.new_empty(n, s.ffn)
                kernels.silu_mul[(n, -(-s.ffn // 1024))](up, act, F=s.ffn, BLOCK=1024, num_warps=4)
            else:
                act = functional.gelu(up)
            torch.mm(act, narrow.t(), out=out)
        if end == self.layers:
            self._add_rms_norm(x, out, W.norm, y)
        return y

    def _result(self, y: Tensor, end: int, last: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Launch the LM head, and return logits and tokens; return None if `end` is not the last layer.

        The head runs over the rows `last` of `y` or, without `last`, over all rows.
        """
        if end < self.layers:
            return None
        logits = functional.linear(y if last is None else y.index_select(0, last), self.shared.weights.head)
        return logits, logits.argmax(-1)

    def _add_rms_norm(self, x: Tensor, add: Tensor, weight: Tensor, out: Tensor) -> None:
        hidden, eps = x.shape[1], self.shared.weights.net.eps
        block = triton.next_power_of_2(hidden)
        kernels.add_norm[(len(x),)](x, add, weight, out, H=hidden, BLOCK=block, EPS=eps, num_warps=8)


class Replay:
    """A step that runs as graphs, and the number of its layers that have been replayed; see device.UnderWay."""

    def __init__(self, graphs: Graphs, size: int, count: int) -> None:
        self._graphs, self._size, self._count, self._layer = graphs, size, count, 0
        self._result: tuple[Tensor, Tensor] | None = None

    def run(self, until: int, after_kernel: Callable[[], None], remote: Remote) -> None:  # noqa: ARG002
        """Compute the layers before `until` that are not computed yet.

        If these are all layers of the network, one graph computes them; otherwise, each layer has its own graph.
        """
        whole = until - self._layer == self._graphs.layers
        cuts = [self._layer, until] if whole else range(self._layer, until + 1)
        for first, end in pairwise(cuts):
            graph, self._result = self._graphs.graph(self._size, first, end)
            graph.replay()
        self._layer = until

    def computed(self, wait: Callable[[], None]) -> Computed:
        """Return the tokens and logits of the step's parts; see device.UnderWay."""
        assert self._result is not None
        logits, made = self._result
        here = self._graphs.made
        here[: len(made)].copy_(made, non_blocking=True)
        wait()
        self._graphs.under_way = None
        return Computed(here[: self._count].tolist(), logits[: self._count])

    def kernels_s(self, times: int) -> float:
        """Return the mean seconds of `times` replays of the graph of all layers; see device.UnderWay.

        One replay before these is not timed.
        """
        graph, _ = self._graphs.graph(self._size, 0, self._graphs.layers)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begun.record()
        for _ in range(times):
            graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / times


class Decodes(Graphs):
    """The graphs of steps that have only decodes; the size of a graph is its number of decodes."""

    sizes = ROWS

    def __init__(self, shared: Tables) -> None:
        n = ROWS[-1]
        sizes = {"slot": 2 * n, "ids": n, "position": n, "tokens": n, "table": n * shared.width}
        super().__init__(shared, sizes, n, n)

    def takes(self, order: Order) -> bool:
        """Tell whether a step has only decodes, and at most as many as the largest graph can compute."""
        return super().takes(order) and len(order.parts) <= ROWS[-1] and all(p.tokens == 1 for p in order.parts)

    def begin(self, order: Order, ids: Sequence[int]) -> Replay:
        """Copy the step to the device on the current stream, and return it."""
        count = len(order.parts)
        rows = next(n for n in ROWS if n >= count)
        self.arrays["ids"][:count] = ids
        self.arrays["tokens"][count:rows] = 0
        self._empty(count, rows)
        for k, p in enumerate(order.parts):
            self._decode(k, p)
        return self._staged(rows, self.buffer.numel() - (ROWS[-1] - rows) * self.shared.width, count)

    def body(self, size: int, first: int, end: int) -> tuple[tuple[Tensor, Tensor] | None, Any]:
        """Launch the kernels of layers `first` to `end` of a step of decodes; see Graphs."""
        kv, on = self.shared.kv, {name: tensor[:size] for name, tensor in self.on.items()}
        contexts = Contexts(on["table"], on["tokens"], *scratch(kv, size, self.shared.sms()))

        def attend(layer: int, q: Tensor, out: Tensor) -> None:
            attention(kv, layer, contexts, q, out)

        y = self._layers(on["ids"], (on["position"], on["slot"]), attend, first, end)
        return self._result(y, end), contexts


class Prefills(Graphs):
    """The graphs of steps that have whole prompts, or whole prompts and decodes.

    The first rows are those of the decodes. The size of a graph is its number of prompt tokens.
    """

    sizes = TOKENS

    def __init__(self, shared: Tables) -> None:
        n = DECODES + TOKENS[-1]
        sizes = {"slot": 2 * n, "block": 2 * TOKENS[-1], "within": 2 * TOKENS[-1], "last": 2 * (DECODES + PROMPTS)}
        sizes |= {"ids": n, "position": n, "tokens": DECODES, "ends": PROMPTS + 1, "table": DECODES * shared.width}
        super().__init__(shared, sizes, n, DECODES + PROMPTS)

    def takes(self, order: Order) -> bool:
        """Tell whether these graphs can run a step: whole prompts, with or without decodes.

        The step must also be within the limits on prompts, decodes and tokens.
        """
        prompts = [p for p in order.parts if p.tokens > 1]
        return (
            super().takes(order)
            and 0 < len(prompts) <= PROMPTS
            and len(order.parts) - len(prompts) <= DECODES
            and sum(p.tokens for p in prompts) <= TOKENS[-1]
            and not any(p.cached_tokens for p in prompts)
        )

    def begin(self, order: Order, ids: Sequence[int]) -> Replay:
        """Copy the step to the device on the current stream, and return it."""
        a, alone, row, at, ends = self.arrays, 0, DECODES, 0, [0]
        for k, p in enumerate(order.parts):
            part_ids, at = ids[at : at + p.tokens], at + p.tokens
            if p.tokens == 1:
                self._decode(alone, p)
                a["ids"][alone], a["last"][k] = part_ids[0], alone
                alone += 1
                continue
            here, places = slice(row, row + p.tokens), np.arange(p.tokens)
            of = slice(row - DECODES, row - DECODES + p.tokens)
            block, within = np.array(p.blocks)[places // self.block], places % self.block
            a["ids"][here], a["position"][here], a["slot"][here] = part_ids, places, self._slot(block, within)
            a["block"][of], a["within"][of] = block, within
            row += p.tokens
            a["last"][k] = row - 1
            ends.append(row - DECODES)
        size = next(n for n in TOKENS if n >= ends[-1])
        self._empty(alone, DECODES)
        self._empty(row, DECODES + size)
        a["tokens"][alone:] = 0
        a["last"][len(order.parts) :] = 0
        a["ends"][:] = ends + ends[-1:] * (PROMPTS + 1 - len(ends))
        for name in ("block", "within"):
            a[name][ends[-1] : size] = a[name][0]  # unused slots point at a mapped block; unmapped ones would fault
        return self._staged(size, self.buffer.numel(), len(order.parts))

    def body(self, size: int, first: int, end: int) -> tuple[tuple[Tensor, Tensor] | None, Any]:
        """Launch the kernels of layers `first` to `end` of a step of prompts and decodes; see Graphs."""
        kv, on, n = self.shared.kv, self.on, DECODES + size
        contexts = Contexts(on["table"], on["tokens"], *scratch(kv, DECODES, self.shared.sms()))
        ends = on["ends"], on["ends"]

        def attend(layer: int, q: Tensor, out: Tensor) -> None:
            attention(kv, layer, contexts, q[:DECODES], out[:DECODES])
            key, value = (kv[on["block"][:size], layer, part, on["within"][:size]] for part in (0, 1))
            out[DECODES:] = varlen(q[DECODES:], key, value, ends)

        y = self._layers(on["ids"][:n], (on["position"][:n], on["slot"][:n]), attend, first, end)
        return self._result(y, end, on["last"]), contexts
