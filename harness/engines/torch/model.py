"""The forward pass: RMSNorm, rotary positions, grouped-query attention over paged KV, SwiGLU.

The KV of a model on a device is one tensor (block, layer, key or value, token, head, dimension), mapped as far as it
is used. A step is a list of pieces, one a request, each behind `start` tokens whose KV is there. What has one token is
attended together, padded to the longest context; a longer piece by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from harness.engines.torch.nets import Net, blocks, tensors


class Piece(NamedTuple):
    """A request's part of a step."""

    tokens: int  # that are computed
    start: int  # tokens before them, whose KV is there
    blocks: Sequence[int]  # where its KV lies
    far: int = -1  # the device on which it lies and is attended; -1: this one

    @property
    def context(self) -> int:
        """Its tokens once the step is done."""
        return self.start + self.tokens


class Attention(Protocol):
    """The attention of a device; see device.Device."""

    def contexts(self, pieces: Sequence[Piece], kv: Tensor) -> Any:
        """Return what `attend` needs of the contexts of pieces of one token, for all layers of a step."""

    def attend(self, kv: Tensor, layer: int, contexts: Any, q: Tensor) -> Tensor:
        """Attend one query of each context: (contexts, heads, dimension)."""

    def long(self, piece: Piece, kv: Tensor) -> Any:
        """Return what `attend_long` needs of a piece of several tokens, for all layers of a step."""

    def attend_long(self, kv: Tensor, layer: int, long: Any, q: Tensor) -> Tensor:
        """Attend the queries of one piece, each to the tokens before it and itself."""

    def turned(self, step: Pass, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rotate queries and keys, and write keys and values to the KV, at once; None where a device cannot.

        Return queries, and no keys or values: only those that lie elsewhere are read again.
        """


class Computed(NamedTuple):
    """The result of a step: of each part, its token and its logits."""

    tokens: list[int]
    logits: Tensor


Far = Callable[[int, int, list[Piece], Tensor, Tensor, Tensor], Tensor]  # device, layer, pieces, q, k, v -> attention


class Layer(NamedTuple):
    """A layer's weights."""

    norm_1: Tensor
    qkv: Tensor
    bias: Tensor | None  # of qkv
    norms: tuple[Tensor, ...] | None  # of queries and of keys
    out: Tensor
    norm_2: Tensor
    router: Tensor | None  # of tokens to experts
    blocks: list[tuple[Tensor, Tensor]]  # of the feed-forward: gate and up, and down; an expert each, or one


class Weights:
    """Views of a blob: by layer, what is multiplied at once in one matrix."""

    def __init__(self, net: Net, flat: Tensor) -> None:
        self.net, at, parts = net, 0, dict[str, Tensor]()
        s = net.shape
        for name, size in tensors(net):
            parts[name] = flat[at : (at := at + math.prod(size))].view(size)
        width = (s.q_heads + 2 * s.kv_heads) * s.head_dim

        def joined(name: str, *size: int) -> Tensor:
            """Widen a tensor over those that lie behind it."""
            return parts[name].as_strided(size, (size[1], 1) if len(size) > 1 else (1,))

        self.embedding, self.norm = parts["model.embed_tokens.weight"], parts["model.norm.weight"]
        self.head = parts.get("lm_head.weight", self.embedding)
        self.layers = list[Layer]()
        for k in range(s.layers):
            at_k = f"model.layers.{k}."
            attention, up = f"{at_k}self_attn.", "gate_proj.weight" if s.gated else "up_proj.weight"
            mlps = [(f"{at_k}{mlp}", ffn) for mlp, ffn in blocks(s)]
            norms = tuple(parts[f"{attention}{name}_norm.weight"] for name in "qk") if net.qk_norm else None
            self.layers.append(
                Layer(
                    parts[f"{at_k}input_layernorm.weight"],
                    joined(f"{attention}q_proj.weight", width, s.hidden),
                    joined(f"{attention}q_proj.bias", width) if net.bias else None,
                    norms,
                    parts[f"{attention}o_proj.weight"],
                    parts[f"{at_k}post_attention_layernorm.weight"],
                    parts.get(f"{at_k}mlp.gate.weight"),
                    [
                        (joined(f"{mlp}{up}", (1 + s.gated) * ffn, s.hidden), parts[f"{mlp}down_proj.weight"])
                        for mlp, ffn in mlps
                    ],
                )
            )


class Pass:
    """A step under way: it may stop after any layer and go on later."""

    def __init__(
        self, device: Attention, weights: Weights, kv: Tensor, pieces: Sequence[Piece], tokens: Sequence[int]
    ) -> None:
        net, self.weights, self.kv, self.device = weights.net, weights, kv, device
        self.pieces, self.layer = pieces, 0
        self.x = weights.embedding[torch.tensor(tokens).to(kv.device)]
        at = torch.cat([torch.arange(p.start, p.context) for p in pieces]).to(kv.device)
        self.cos, self.sin = turns(net, at)
        self.row = torch.arange(len(at), dtype=torch.int32, device=kv.device)  # of a token in those
        ends = [0]
        for p in pieces:
            ends.append(ends[-1] + p.tokens)
        self.last = torch.tensor([b - 1 for b in ends[1:]]).to(kv.device)
        every = list(zip(pieces, ends, ends[1:], strict=False))
        self.long = [(device.long(p, kv), a, b) for p, a, b in every if p.far < 0 and p.tokens > 1]
        singles = [(p, a) for p, a, b in every if p.far < 0 and p.tokens == 1]
        self.single = torch.tensor([a for _, a in singles], dtype=torch.long).to(kv.device)
        self.contexts = device.contexts([p for p, _ in singles], kv) if singles else None
        away = {d: [(p, a) for p, a, _ in every if p.far == d] for d in {p.far for p in pieces} - {-1}}
        self.far = {d: ([p for p, _ in on], torch.tensor([a for _, a in on]).to(kv.device)) for d, on in away.items()}
        near = [(p, a, b) for p, a, b in every if p.far < 0]
        every_near = torch.cat([torch.arange(a, b) for _, a, b in near]) if near else torch.zeros(0, dtype=torch.long)
        self.near = every_near.to(kv.device)
        self.slots = slots([p for p, _, _ in near], kv)

    def run(self, until: int, breathe: Callable[[], None], far: Far) -> None:
        """Compute layers up to `until`; `breathe` is called after every kernel."""
        s = self.weights.net.shape
        n = len(self.x)
        for k in range(self.layer, until):
            W, x = self.weights.layers[k], self.x
            qkv = functional.linear(self._norm(x, W.norm_1), W.qkv, W.bias).view(n, -1, s.head_dim)
            breathe()
            q, key, value = self.device.turned(self, k, qkv) or self._written(k, qkv)
            mixed = torch.empty_like(q)
            if self.contexts is not None:
                mixed[self.single] = self.device.attend(self.kv, k, self.contexts, q[self.single])
            for long, a, b in self.long:
                mixed[a:b] = self.device.attend_long(self.kv, k, long, q[a:b])
            for device, (pieces, rows) in self.far.items():
                mixed[rows] = far(device, k, pieces, q[rows], key[rows], value[rows])
            breathe()
            x = x + functional.linear(mixed.view(n, -1), W.out)
            normed = self._norm(x, W.norm_2)
            if W.router is None:
                self.x = x + self._fed(normed, *W.blocks[0], breathe)
            else:
                self.x = x + self._mixed(normed, W.router, W.blocks, breathe)
        self.layer = until

    def _written(self, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values of what lies here; return queries, keys and values."""
        s, norms = self.weights.net.shape, self.weights.layers[layer].norms
        q, key, value = torch.split(qkv, [s.q_heads, s.kv_heads, s.kv_heads], 1)
        if norms is not None:
            q, key = self._norm(q, norms[0]), self._norm(key, norms[1])
        q, key = self._turned(q), self._turned(key)
        write(self.kv, layer, self.slots, key[self.near], value[self.near])
        return q, key, value

    def _fed(self, x: Tensor, up: Tensor, down: Tensor, breathe: Callable[[], None]) -> Tensor:
        """Return what a feed-forward block makes of tokens."""
        wide = functional.linear(x, up)
        breathe()
        if self.weights.net.shape.gated:
            gate, wide = wide.chunk(2, -1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        out = functional.linear(wide, down)
        breathe()
        return out

    def _mixed(
        self, x: Tensor, router: Tensor, experts: Sequence[tuple[Tensor, Tensor]], breathe: Callable[[], None]
    ) -> Tensor:
        """Return what each token's experts make of it, weighted by the router; only those that some token has run."""
        net = self.weights.net
        assert net.shape.experts
        weight, chosen = functional.linear(x, router).float().softmax(-1).topk(net.shape.experts.top, -1)
        if net.normed:
            weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in map(int, chosen.unique().tolist()):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = self._fed(x[token], *experts[expert], breathe)
            out.index_add_(0, token, part * weight[token, place, None].to(x.dtype))
        return out

    def computed(self, wait: Callable[[], None]) -> Computed:
        """Return the tokens and logits after the last layer; `wait` returns once all that was launched is computed."""
        logits = self.logits()
        tokens = logits.argmax(-1)
        wait()
        return Computed(tokens.tolist(), logits)

    def kernels_s(self, times: int) -> None:
        """See device.UnderWay: its kernels are launched one by one."""

    def logits(self) -> Tensor:
        """Return those after each piece's last token."""
        return functional.linear(self._norm(self.x[self.last], self.weights.norm), self.weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.weights.net.eps)

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1).to(x.dtype)


def turns(net: Net, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary angles at positions: (positions, 1, half of a head), in float32."""
    dim = net.shape.head_dim
    theta = at[:, None] * net.theta ** (-torch.arange(0, dim, 2, device=at.device) / dim)
    return theta.cos()[:, None], theta.sin()[:, None]


class Slots(NamedTuple):
    """Places of the KV of tokens."""

    block: Tensor  # a number a token, as the others
    within: Tensor  # the block
    number: Tensor  # of the first layer's key in all numbers of the KV


def slots(pieces: Sequence[Piece], kv: Tensor) -> Slots:
    """Return those of every token that pieces compute."""
    none, size = torch.zeros(0, dtype=torch.long), kv.shape[3]
    at = [torch.arange(p.start, p.context) for p in pieces]
    block = torch.cat([none, *(torch.tensor(p.blocks)[x // size] for p, x in zip(pieces, at, strict=True))])
    within = torch.cat([none, *at]) % size
    number = block * kv.stride(0) + within * kv.stride(3) + int(kv.storage_offset())
    return Slots(block.to(kv.device), within.to(kv.device), number.to(kv.device))


def table(pieces: Sequence[Piece], kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of contexts, padded by their own first, and which of their tokens count."""
    block = kv.shape[3]
    count = [-(-p.context // block) for p in pieces]
    rows = [[*p.blocks[:n], *([p.blocks[0]] * (max(count) - n))] for p, n in zip(pieces, count, strict=True)]
    there = torch.arange(max(count) * block) < torch.tensor([p.context for p in pieces])[:, None]
    return torch.tensor(rows).to(kv.device), there[:, None, None].to(kv.device)


def write(kv: Tensor, layer: int, at: Slots, key: Tensor, value: Tensor) -> None:
    """Put keys and values of new tokens where `slots` says."""
    kv[at.block, layer, 0, at.within], kv[at.block, layer, 1, at.within] = key, value


def attend(kv: Tensor, layer: int, contexts: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
    """Attend one query of each context: (contexts, heads, dimension)."""
    blocks, there = contexts
    seqs, (heads, dim) = len(blocks), kv.shape[4:]
    key, value = (
        kv[:, layer, part].index_select(0, blocks.flatten()).view(seqs, -1, heads, dim).transpose(1, 2)
        for part in (0, 1)
    )  # context, head, token, dimension; queries of a KV head attend together
    groups = q.view(seqs, heads, -1, dim)
    return functional.scaled_dot_product_attention(groups, key, value, attn_mask=there).flatten(1, 2)


def spread(piece: Piece, kv: Tensor) -> Tensor:
    """Return the blocks of a piece's context."""
    return torch.tensor(piece.blocks[: -(-piece.context // kv.shape[3])]).to(kv.device)


def attend_long(kv: Tensor, layer: int, piece: Piece, blocks: Tensor, q: Tensor) -> Tensor:
    """Attend the queries of one piece, each to the tokens before it and itself."""
    cached = kv[blocks, layer].transpose(0, 1).flatten(1, 2)[:, : piece.context].transpose(1, 2)[:, None]
    key, value = cached.unbind(0)
    mask = None
    if piece.start:
        mask = torch.ones(piece.tokens, piece.context, dtype=torch.bool, device=kv.device).tril(piece.start)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)
