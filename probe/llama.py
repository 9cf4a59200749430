"""A small Llama with paged KV: weights, pools of pages, attention, decode and prefill steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from probe import kernels, rig

LOG2E = 1.4426950408889634


class Dims(NamedTuple):
    """The dimensions of a Llama, from its public configuration."""

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
        """The number of elements of K for one token in one layer; V has as many."""
        return self.kv * self.d

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token in all layers."""
        return 2 * rig.BF16 * self.layers * self.token

    @property
    def attention(self) -> dict[str, int]:
        """The head counts and the head size of attention, as parameters of a sample."""
        return {"heads": self.heads, "kv": self.kv, "d": self.d}

    def gemms(self) -> dict[str, tuple[int, int]]:
        """Return the output and input sizes of each weight matrix of a layer and of the output head, by name."""
        return {
            "qkv": ((self.heads + 2 * self.kv) * self.d, self.hidden),
            "o": (self.hidden, self.heads * self.d),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
        }

    def weight_bytes(self) -> int:
        """Return the total bytes of the tensors that `weights` returns."""
        return rig.BF16 * sum(prod(shape) for _, shape in _plan(self))


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
    """Return the weights by name, as views of one flat blob, in the order in which the model uses them."""
    out, first = {}, 0
    for name, shape in _plan(m):
        out[name] = blob[first : first + prod(shape)].view(shape)
        first += prod(shape)
    return out


@dataclass(frozen=True, slots=True)
class Kv:
    """A pool of KV pages in the flat bf16 tensor `data`; a page's layout is `[layer][K, V][tokens][kv heads][d]`."""

    m: Dims
    data: Tensor
    tokens: int  # tokens in a page
    stride: int  # numbers from a page to the next

    @property
    def layer(self) -> int:
        """Offset, in elements, between K of one layer and K of the next, within a page."""
        return 2 * self.tokens * self.m.token

    @property
    def v_off(self) -> int:
        """Offset, in elements, between K and V of the same layer, within a page."""
        return self.tokens * self.m.token

    def table(self, rows: int, ctx: int, block: int, seed: int = 0) -> Tensor:
        """Return a block table of `rows` sequences of `ctx` tokens on pages in random order.

        It is int32, in units of 256 bytes. `block` is the number of tokens in a block.
        """
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
        """Return the place of the first layer's K of each row's token at `position`, as int64 offsets in elements."""
        held = table.gather(1, (position // block).view(-1, 1).long()).view(-1).long()
        return held * kernels.UNIT + (position % block).long() * self.m.token


def page_tokens(m: Dims, page: int, block: int) -> int:
    """Return the number of tokens that fit in a page of `page` bytes, rounded down to whole blocks of tokens."""
    return page // m.kv_bytes // block * block


def pool(m: Dims, *needs: tuple[int, int], page: int = 0, block: int = 64) -> Kv:
    """Allocate KV in plain memory, enough for the largest of `needs`: pairs of (sequences, tokens of each sequence)."""
    page = page or rig.LARGE
    each = page_tokens(m, page, block)
    count = max(rows * -(-ctx // each) for rows, ctx in needs)
    return Kv(m, rig.random(count * page // rig.BF16, 1.0), each, page // rig.BF16)


def splits(rows: int, kv: int, on_sms: int) -> int:
    """Return the number of splits of KV for which each SM gets at least two programs of decode attention.

    It is the smallest such power of two, but at most 32.
    """
    n = 1
    while n < 32 and rows * kv * n < 2 * on_sms:
        n *= 2
    return n


class Attend:
    """Decode attention of `rows` sequences of `ctx` tokens on static tensors, launched by `run(layer)`.

    The addresses of static tensors do not change.
    """

    def __init__(
        self, kv: Kv, rows: int, ctx: int, on_sms: int, block: int = 64, stages: int = 7, split: int = 0
    ) -> None:
        m, device = kv.m, kv.data.device
        self.kv, self.block, self.stages, self.splits = kv, block, stages, split or splits(rows, m.kv, on_sms)
        self.q = rig.noise(torch.empty(rows, m.heads, m.d, dtype=torch.bfloat16, device=device), 1.0, 1)
        self.table = kv.table(rows, ctx, block)
        self.ctx = torch.full((rows,), ctx, dtype=torch.int32, device=device)
        programs = rows * m.kv * self.splits * 16
        self.acc, self.ml = (torch.empty(programs * n, dtype=torch.float32, device=device) for n in (m.d, 2))
        self.out = torch.empty_like(self.q)

    def run(self, layer: int) -> None:
        """Compute attention of the queries `q` in one layer, and write the result to `out`."""
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


def reference(a: Attend, layer: int) -> Tensor:
    """Return the result that `a.run(layer)` should have, computed in fp32 by torch."""
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
    """Return the cosine and sine tables."""
    turn = 500000.0 ** (-torch.arange(0, d, 2, device=rig.DEVICE) / d)
    angle = torch.arange(positions, device=rig.DEVICE)[:, None] * turn
    return angle.cos().contiguous(), angle.sin().contiguous()


class Model:
    """A Llama that runs whole steps on buffers with fixed addresses.

    If `layers` is given, it has only that many layers, and its times must be scaled up to the whole model.
    """

    def __init__(self, m: Dims, blob: Tensor | None = None, layers: int | None = None) -> None:
        self.m = m if layers is None else m._replace(layers=layers)
        size = self.m.weight_bytes() // rig.BF16
        self.blob = rig.random(size) if blob is None else blob[:size]
        self.w = weights(self.m, self.blob)
        for name, w in self.w.items():
            if "norm" in name:
                w.fill_(1.0)

    def decode(self, kv: Kv, rows: int, ctx: int, on_sms: int) -> Decode:
        """Return the buffers of a decode step."""
        return Decode(self, Attend(kv, rows, ctx, on_sms))

    def prefill(self, tokens: int, backend: str = "flash") -> Prefill:
        """Return the buffers of one prompt's prefill."""
        return Prefill(self, tokens, backend)


class Layers:
    """The common part of decode and prefill: buffers for `rows` tokens, and all kernels except attention."""

    def __init__(self, model: Model, rows: int) -> None:
        m, self.model, self.rows = model.m, model, rows

        def buffer(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=rig.DEVICE)

        self.x, self.y, self.out = buffer(rows, m.hidden), buffer(rows, m.hidden), buffer(rows, m.hidden)
        self.qkv, self.q = buffer(rows, m.heads + 2 * m.kv, m.d), buffer(rows, m.heads, m.d)
        self.both, self.act = buffer(rows, 2 * m.ffn), buffer(rows, m.ffn)
        self.ids = torch.randint(m.vocab, (rows,), device=rig.DEVICE)
        self.block = triton.next_power_of_2(m.hidden)

    def norm(self, add: Tensor, weight: Tensor) -> None:
        """Set x += add, and y = RMS norm of x times weight."""
        m = self.model.m
        kernels.add_norm[(self.rows,)](self.x, add, weight, self.y, H=m.hidden, BLOCK=self.block, num_warps=8)

    def rope(self, position: Tensor, slot: Tensor, k: Tensor, v: Tensor, layer: int, v_off: int) -> None:
        """Apply rotary embedding to q and K; write K and V to the tensors `k` and `v` at `slot`."""
        m = self.model.m
        cosine, sine = rotary(m.d, 1 << 14)
        kernels.rope_write[(self.rows, m.heads + m.kv)](
            self.qkv, cosine, sine, position, slot, self.q, k, v, layer, v_off, HQ=m.heads, HKV=m.kv, D=m.d, num_warps=1
        )

    def activate(self) -> None:
        """Set act = silu(gate) * up, the activation of the feed-forward block."""
        m = self.model.m
        kernels.silu_mul[(self.rows, -(-m.ffn // 1024))](self.both, self.act, F=m.ffn, BLOCK=1024, num_warps=4)

    def project(self, name: str, x: Tensor, out: Tensor) -> None:
        """Compute out = x @ weight^T, with the weight matrix called `name`."""
        torch.mm(x, self.model.w[name].t(), out=out)

    def attention(self, layer: int) -> Tensor:
        """Compute the output of attention in a layer, (rows, heads * d), from the buffer `qkv`."""
        raise NotImplementedError

    def body(self) -> None:
        """Compute all layers from token ids; the result, after the final norm, is in the buffer `y`."""
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

    def write(self, layer: int) -> None:
        """Apply rotary embedding to q and K; write K and V to the tensors that attention reads."""
        raise NotImplementedError

    def small(self) -> None:
        """Run the small kernels of a layer, which are neither GEMM nor attention: two norms, `write`, activation."""
        self.norm(self.out, self.model.w["0.norm1"])
        self.write(0)
        self.norm(self.out, self.model.w["0.norm2"])
        self.activate()


class Decode(Layers):
    """The buffers of a decode step, which computes one token of each of several sequences."""

    def __init__(self, model: Model, a: Attend) -> None:
        super().__init__(model, a.q.shape[0])
        self.a, self.q = a, a.q
        self.position = a.ctx - 1
        self.slot = a.kv.slots(a.table, self.position, a.block)
        self.logits = torch.empty(self.rows, model.m.vocab, dtype=torch.bfloat16, device=rig.DEVICE)

    def write(self, layer: int) -> None:
        """Apply rotary embedding to q and K, and write K and V to the pages of the sequences."""
        kv = self.a.kv
        self.rope(self.position, self.slot, kv.data, kv.data, layer * kv.layer, kv.v_off)

    def attention(self, layer: int) -> Tensor:
        """Write K and V of the new tokens, then compute attention over the whole contexts."""
        self.write(layer)
        self.a.run(layer)
        return self.a.out.view(self.rows, -1)

    def step(self, _: int = 0) -> None:
        """Decode one token of each sequence. The new token ids become the input of the next step."""
        self.body()
        self.project("head", self.y, self.logits)
        torch.argmax(self.logits, 1, out=self.ids)


class Prefill(Layers):
    """The buffers of the prefill of one prompt without a cached prefix.

    K and V are written twice: to scratch memory, from which torch's attention reads them, and to pages.
    """

    def __init__(self, model: Model, tokens: int, backend: str) -> None:
        super().__init__(model, tokens)
        m = model.m
        self.backend = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
        self.k, self.v = (torch.empty(tokens, m.kv, m.d, dtype=torch.bfloat16, device=rig.DEVICE) for _ in range(2))
        self.pages = torch.empty(2 * tokens * m.token, dtype=torch.bfloat16, device=rig.DEVICE)
        self.position = torch.arange(tokens, dtype=torch.int32, device=rig.DEVICE)
        self.slot = self.position.long() * m.token
        self.logits = torch.empty(1, m.vocab, dtype=torch.bfloat16, device=rig.DEVICE)

    def attend(self, tokens: int | None = None) -> Tensor:
        """Compute causal attention of the prompt, or of its first `tokens` tokens, over itself."""
        q, k, v = (x[:tokens].unsqueeze(0).transpose(1, 2) for x in (self.q, self.k, self.v))
        with sdpa_kernel(self.backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape[2], -1)

    def attention(self, layer: int) -> Tensor:
        """Write K and V to scratch and to pages, and compute causal attention of the prompt."""
        self.write(layer)
        self.rope(self.position, self.slot, self.pages, self.pages, 0, self.rows * self.model.m.token)
        return self.attend()

    def write(self, layer: int) -> None:
        """Apply rotary embedding to q and K, and write K and V to scratch memory, which all layers share."""
        del layer
        self.rope(self.position, self.slot, self.k, self.v, 0, 0)

    def step(self, _: int = 0) -> None:
        """Prefill the prompt, and compute the logits after its last token."""
        self.body()
        torch.mm(self.y[-1:], self.model.w["head"].t(), out=self.logits)


class Mixed(Prefill):
    """The buffers of a step that prefills a prompt and decodes one token of each of several sequences.

    K and V of the prompt and of the decoded tokens are written to scratch memory.
    """

    def __init__(self, model: Model, tokens: int, a: Attend) -> None:
        super().__init__(model, tokens + a.q.shape[0], "flash")
        self.tokens, self.a = tokens, a

    def attention(self, layer: int) -> Tensor:
        """Compute attention of the prompt over itself, then of the decoding sequences over their pages."""
        self.write(layer)
        prompt = self.attend(self.tokens)
        self.a.q.copy_(self.q[self.tokens :])
        self.a.run(layer)
        return torch.cat((prompt, self.a.out.view(len(self.a.q), -1)))
