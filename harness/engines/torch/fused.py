"""The kernels by which cards serve a model, and its decode steps as CUDA graphs.

Decodes of a batch are one graph a batch size: its addresses stay, whatever is mapped behind them. The kernels, which
the probe measures, want bfloat16 and sizes that are powers of two; other networks are served by torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional

from harness.engines.torch import model
from harness.engines.torch.device import Decoded
from harness.engines.torch.model import Weights
from harness.engines.torch.nets import Net
from harness.engines.torch.wire import Order
from harness.policy.types import Shape
from probe import kernels

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of the decode graphs
LOG2E = 1.4426950408889634
UNIT_BYTES = 256  # in which block tables count (probe/kernels.py)
MOST_POSITIONS = 1 << 16  # of a decode graph's rotary tables


class Contexts(NamedTuple):
    """Contexts as the kernel takes them, and its scratch."""

    table: Tensor  # int32 (contexts, blocks): where each block's keys of the first layer lie, in 256 bytes
    tokens: Tensor  # int32
    acc: Tensor
    ml: Tensor
    splits: int


def serves(kv: Tensor) -> bool:
    """Tell whether the kernels serve a network: they want bfloat16 and powers of two."""
    return kv.dtype == torch.bfloat16 and all(n >= 16 and n & (n - 1) == 0 for n in (kv.shape[3], kv.shape[5]))


def anchor(kv: Tensor) -> Tensor:
    """Return a tensor at the base of the space that KV lies in, which is mapped."""
    return kv.as_strided((1,), (1,), 0)


def units(kv: Tensor) -> tuple[int, int]:
    """Return, in 256 bytes, where the first block lies behind the anchor, and the distance of two blocks."""
    return kv.storage_offset() * kv.itemsize // UNIT_BYTES, kv.stride(0) * kv.itemsize // UNIT_BYTES


def scratch(kv: Tensor, rows: int, sms: int) -> tuple[Tensor, Tensor, int]:
    """Return the scratch of so many contexts, and into how many parts each is split: two programs an SM, at most 32."""
    heads, dim, splits = kv.shape[4], kv.shape[5], 1
    while splits < 32 and rows * heads * splits < 2 * sms:
        splits *= 2
    sizes = rows * heads * splits * 16 * dim, rows * heads * splits * 16 * 2
    acc, ml = (torch.empty(size, dtype=torch.float32, device=kv.device) for size in sizes)
    return acc, ml, splits


def attended(kv: Tensor, layer: int, c: Contexts, q: Tensor, out: Tensor) -> None:
    """Launch the attention of one query of each context: q, out (contexts, heads, dimension)."""
    rows, heads, dim, block = len(q), kv.shape[4], kv.shape[5], kv.shape[3]
    group = q.shape[1] // heads
    kernels.decode[(rows, heads, c.splits)](
        q, anchor(kv), c.table, c.tokens, c.acc, c.ml, c.table.stride(0), layer * kv.stride(1), kv.stride(2),
        dim**-0.5 * LOG2E, G=group, HKV=heads, D=dim, BS=block, S=c.splits, GP=16, num_warps=4, num_stages=7,
    )  # fmt: skip
    kernels.merge[(rows, heads, group)](c.acc, c.ml, out, G=group, D=dim, S=c.splits, GP=16, num_warps=1)


def normed(qkv: Tensor, norms: Sequence[Tensor] | None, net: Net) -> None:
    """Normalise queries and keys of each head in place, where a network does."""
    at = 0
    for heads, weight in zip((net.shape.q_heads, net.shape.kv_heads), norms or (), strict=False):
        part = qkv[:, at : at + heads]
        part.copy_(functional.rms_norm(part, (net.shape.head_dim,), weight, net.eps))
        at += heads


def turned(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, kv: Tensor, layer: int, s: Shape
) -> Tensor:
    """Launch the rotation of tokens' heads; keys and values go to the KV, and the queries are returned."""
    q = qkv.new_empty(len(qkv), s.q_heads, s.head_dim)
    kernels.rope_write[(len(qkv), s.q_heads + s.kv_heads)](
        qkv, cos, sin, position, slot, q, anchor(kv), anchor(kv), layer * kv.stride(1), kv.stride(2),
        HQ=s.q_heads, HKV=s.kv_heads, D=s.head_dim, num_warps=1,
    )  # fmt: skip
    return q


class Decoder:
    """The decode steps of a model on a device, as graphs over buffers of their own, a graph for rows and SMs."""

    def __init__(self, weights: Weights, kv: Tensor, wait: Callable[[], None]) -> None:
        self.weights, self.kv, self.wait, net = weights, kv, wait, weights.net
        s, self.block = net.shape, kv.shape[3]
        most = min(s.max_tokens, MOST_POSITIONS, len(kv) * self.block)
        self.width = -(-most // self.block // 16) * 16  # blocks; a stride that Triton sees as a multiple of 16
        self.positions = self.width * self.block
        at = torch.arange(self.positions, device=kv.device)
        self.cos, self.sin = (turn[:, 0].contiguous() for turn in model.turns(net, at))
        n = ROWS[-1]
        self._sizes = {"slot": 2 * n, "ids": n, "position": n, "tokens": n, "table": n * self.width}
        words = sum(self._sizes.values())
        self.staged = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.buffer = torch.zeros(words, dtype=torch.int32, device=kv.device)
        self.host = self._views(self.staged)
        self.on = self._views(self.buffer)
        self.arrays = {name: tensor.numpy() for name, tensor in self.host.items()}
        self.made = torch.zeros(n, dtype=torch.int64, pin_memory=True)
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = dict(zip(self._sizes, flat.split(list(self._sizes.values())), strict=True))
        return views | {"slot": views["slot"].view(torch.int64), "table": views["table"].view(-1, self.width)}

    def takes(self, order: Order) -> bool:
        """Tell whether a step is of decodes alone, and not too large."""
        parts = order.parts
        return 0 < len(parts) <= ROWS[-1] and all(
            p.tokens == 1 and p.far < 0 and p.start < self.positions for p in parts
        )

    def step(self, order: Order, ids: Sequence[int], sms: int) -> Decoded:
        """Compute the step on the current stream, to its end."""
        parts, a = order.parts, self.arrays
        rows = next(n for n in ROWS if n >= len(parts))
        graph, logits, made = self.graph(rows, sms)
        (first, stride), token = units(self.kv), self.kv.stride(3)
        base, between = self.kv.storage_offset(), self.kv.stride(0)
        a["ids"][: len(parts)] = ids
        a["ids"][len(parts) : rows] = 0
        a["position"][len(parts) : rows] = 0
        a["tokens"][len(parts) : rows] = 0  # nothing is attended
        a["slot"][len(parts) : rows] = -1  # nothing is written
        for k, p in enumerate(parts):
            a["position"][k], a["tokens"][k] = p.start, p.start + 1
            a["slot"][k] = base + p.blocks[p.start // self.block] * between + p.start % self.block * token
            n = p.start // self.block + 1
            a["table"][k, :n] = np.array(p.blocks[:n]) * stride + first
        words = self.buffer.numel() - (ROWS[-1] - rows) * self.width
        self.buffer[:words].copy_(self.staged[:words], non_blocking=True)
        graph.replay()
        self.made[:rows].copy_(made, non_blocking=True)
        self.wait()
        return Decoded(self.made[: len(parts)].tolist(), logits[: len(parts)])

    def graph(self, rows: int, sms: int) -> tuple[Any, Tensor, Tensor]:
        """Return the graph of so many rows on the current stream, its logits and its tokens; captured once."""
        stream = torch.cuda.current_stream()
        key = rows, int(stream.cuda_stream)
        if key not in self._graphs:
            for tensor in self.on.values():
                tensor.zero_()
            self.on["slot"].fill_(-1)
            self._body(rows, sms)  # compiles
            stream.synchronize()
            graph: Any = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                logits, made, *kept = self._body(rows, sms)
            finally:
                graph.capture_end()
            graph.kept = kept  # a graph holds addresses, not tensors
            self._graphs[key] = graph, logits, made
        return self._graphs[key]

    def _body(self, rows: int, sms: int) -> tuple[Any, ...]:
        W, s, kv = self.weights, self.weights.net.shape, self.kv
        on = {name: tensor[:rows] for name, tensor in self.on.items()}
        contexts = Contexts(on["table"], on["tokens"], *scratch(kv, rows, sms))
        x = torch.index_select(W.embedding, 0, on["ids"])
        out, y = torch.zeros_like(x), torch.empty_like(x)
        mixed = x.new_empty(rows, s.q_heads, s.head_dim)
        for k, layer in enumerate(W.layers):
            self._normed(x, out, layer.norm_1, y)
            qkv = functional.linear(y, layer.qkv, layer.bias).view(rows, -1, s.head_dim)
            normed(qkv, layer.norms, W.net)
            q = turned(qkv, self.cos, self.sin, on["position"], on["slot"], kv, k, s)
            attended(kv, k, contexts, q, mixed)
            out = functional.linear(mixed.view(rows, -1), layer.out)
            self._normed(x, out, layer.norm_2, y)
            ((wide, narrow),) = layer.blocks
            up = functional.linear(y, wide)
            if s.gated:
                act = up.new_empty(rows, s.ffn)
                kernels.silu_mul[(rows, -(-s.ffn // 1024))](up, act, F=s.ffn, BLOCK=1024, num_warps=4)
            else:
                act = functional.gelu(up)
            out = functional.linear(act, narrow)
        self._normed(x, out, W.norm, y)
        logits = functional.linear(y, W.head)
        return logits, logits.argmax(-1), contexts, x, y, mixed

    def _normed(self, x: Tensor, add: Tensor, weight: Tensor, out: Tensor) -> None:
        hidden = x.shape[1]
        block = triton.next_power_of_2(hidden)
        kernels.add_norm[(len(x),)](x, add, weight, out, H=hidden, BLOCK=block, EPS=self.weights.net.eps, num_warps=8)
