"""The forward pass: RMSNorm, rotary positions, grouped-query attention over paged KV, SwiGLU.

The KV of a model on a device is one tensor (block, layer, key or value, token, head, dimension). Only its used blocks
are mapped to memory. A step is a list of parts, one for each request. A part computes tokens of its request, from the
first one that is not cached. Parts of one token share one call of attention, padded to the longest context. Each longer
part has its own call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from harness.engines.torch.nets import Net, blocks, tensors
from harness.engines.torch.wire import Part


class Attention(Protocol):
    """The attention operations of a device; see device.Device."""

    def contexts(self, parts: Sequence[Part], kv: Tensor) -> Any:
        """Return the block table of a step's decodes, in the form that `decode_attention` takes at every layer.

        Each of the `parts` computes one token.
        """

    def decode_attention(self, kv: Tensor, layer: int, contexts: Any, q: Tensor) -> Tensor:
        """Return decode attention, one query for each context; `q` and the result are (contexts, heads, dimension)."""

    def prompt(self, part: Part, kv: Tensor) -> Any:
        """Return the blocks of a prompt piece, in the form that `prompt_attention` takes at every layer of a step."""

    def prompt_attention(self, kv: Tensor, layer: int, prompt: Any, q: Tensor) -> Tensor:
        """Return the causal attention of one prompt piece: each query attends to its token and all tokens before it."""

    def rope_write(self, step: Pass, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Apply RoPE to queries and keys, and write keys and values to the KV, in one kernel.

        Return the queries, and empty tensors in place of keys and values, which only KV on other devices would need.
        Return None if the device has no such kernel for this step.
        """


class Computed(NamedTuple):
    """The result of a step: the token and the logits of each part."""

    tokens: list[int]
    logits: Tensor


Remote = Callable[[int, int, list[Part], Tensor, Tensor, Tensor], Tensor]  # device, layer, parts, q, k, v -> attention


class Layer(NamedTuple):
    """A layer's weights."""

    norm_1: Tensor
    qkv: Tensor
    bias: Tensor | None  # added by qkv
    norms: tuple[Tensor, ...] | None  # weights for queries, and for keys
    out: Tensor
    norm_2: Tensor
    router: Tensor | None  # from tokens to experts
    blocks: list[tuple[Tensor, Tensor]]  # feed-forward (gate and up, down): one pair, or one per expert


class Weights:
    """The weights of a network by layer, as views of one flat tensor.

    Weights that one GEMM multiplies (query, key and value; gate and up) are one view.
    """

    def __init__(self, net: Net, flat: Tensor) -> None:
        self.net, at, parts = net, 0, dict[str, Tensor]()
        s = net.shape
        for name, size in tensors(net):
            parts[name] = flat[at : (at := at + math.prod(size))].view(size)
        width = (s.q_heads + 2 * s.kv_heads) * s.head_dim

        def joined(name: str, *size: int) -> Tensor:
            """Return a view with dimensions `size` that begins at the tensor `name` and covers the tensors after it."""
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
    """A step whose kernels are launched one by one; it may stop after any layer and continue later."""

    def __init__(
        self, device: Attention, weights: Weights, kv: Tensor, parts: Sequence[Part], tokens: Sequence[int]
    ) -> None:
        net, self.weights, self.kv, self.device = weights.net, weights, kv, device
        self.parts, self.layer = parts, 0
        self.x = weights.embedding[torch.tensor(tokens).to(kv.device)]
        at = torch.cat([torch.arange(p.cached_tokens, p.context) for p in parts]).to(kv.device)
        self.cos, self.sin = rotary_angles(net, at)
        self.row = torch.arange(len(at), dtype=torch.int32, device=kv.device)  # a token's row in `cos` and `sin`
        ends = [0, *accumulate(p.tokens for p in parts)]
        self.last = torch.tensor([b - 1 for b in ends[1:]]).to(kv.device)
        every = list(zip(parts, ends, ends[1:], strict=False))
        near = [(p, a, b) for p, a, b in every if p.remote < 0]
        self.prompts = [(device.prompt(p, kv), a, b) for p, a, b in near if p.tokens > 1]
        singles = [(p, a) for p, a, _ in near if p.tokens == 1]
        self.single = torch.tensor([a for _, a in singles], dtype=torch.long).to(kv.device)
        self.contexts = device.contexts([p for p, _ in singles], kv) if singles else None
        elsewhere = {d: [(p, a) for p, a, _ in every if p.remote == d] for d in {p.remote for p in parts} - {-1}}
        self.remote = {
            d: ([p for p, _ in on], torch.tensor([a for _, a in on]).to(kv.device)) for d, on in elsewhere.items()
        }
        none = torch.zeros(0, dtype=torch.long)
        self.near = torch.cat([none, *(torch.arange(a, b) for _, a, b in near)]).to(kv.device)
        self.slots = slots([p for p, _, _ in near], kv)

    def run(self, until: int, after_kernel: Callable[[], None], remote: Remote) -> None:
        """Compute the layers before `until` that are not computed yet; `after_kernel` is called after every kernel."""
        s = self.weights.net.shape
        n = len(self.x)
        for k in range(self.layer, until):
            W, x = self.weights.layers[k], self.x
            qkv = functional.linear(self._rms_norm(x, W.norm_1), W.qkv, W.bias).view(n, -1, s.head_dim)
            after_kernel()
            q, key, value = self.device.rope_write(self, k, qkv) or self._rope_write(k, qkv)
            attended = torch.empty_like(q)
            if self.contexts is not None:
                attended[self.single] = self.device.decode_attention(self.kv, k, self.contexts, q[self.single])
            for prompt, a, b in self.prompts:
                attended[a:b] = self.device.prompt_attention(self.kv, k, prompt, q[a:b])
            for device, (parts, rows) in self.remote.items():
                attended[rows] = remote(device, k, parts, q[rows], key[rows], value[rows])
            after_kernel()
            x = x + functional.linear(attended.view(n, -1), W.out)
            y = self._rms_norm(x, W.norm_2)
            if W.router is None:
                self.x = x + self._feed_forward(y, *W.blocks[0], after_kernel)
            else:
                self.x = x + self._experts(y, W.router, W.blocks, after_kernel)
        self.layer = until

    def _rope_write(self, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values after RoPE; write keys and values of parts whose KV is on this device."""
        s, norms = self.weights.net.shape, self.weights.layers[layer].norms
        q, key, value = torch.split(qkv, [s.q_heads, s.kv_heads, s.kv_heads], 1)
        if norms is not None:
            q, key = self._rms_norm(q, norms[0]), self._rms_norm(key, norms[1])
        q, key = self._rope(q), self._rope(key)
        write(self.kv, layer, self.slots, key[self.near], value[self.near])
        return q, key, value

    def _feed_forward(self, x: Tensor, up: Tensor, down: Tensor, after_kernel: Callable[[], None]) -> Tensor:
        """Return the output of a feed-forward block."""
        wide = functional.linear(x, up)
        after_kernel()
        if self.weights.net.shape.gated:
            gate, wide = wide.chunk(2, -1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        out = functional.linear(wide, down)
        after_kernel()
        return out

    def _experts(
        self, x: Tensor, router: Tensor, experts: Sequence[tuple[Tensor, Tensor]], after_kernel: Callable[[], None]
    ) -> Tensor:
        """Return the sum of each token's experts, weighted by the router; experts that no token chose do not run."""
        net = self.weights.net
        assert net.shape.experts
        weight, chosen = functional.linear(x, router).float().softmax(-1).topk(net.shape.experts.top, -1)
        if net.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in map(int, chosen.unique().tolist()):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = self._feed_forward(x[token], *experts[expert], after_kernel)
            out.index_add_(0, token, part * weight[token, place, None].to(x.dtype))
        return out

    def computed(self, wait: Callable[[], None]) -> Computed:
        """Return the tokens and logits after the last layer; `wait` returns once all launched kernels are done."""
        logits = self.logits()
        tokens = logits.argmax(-1)
        wait()
        return Computed(tokens.tolist(), logits)

    def kernels_s(self, times: int) -> None:
        """Return None, because the kernels of this step are launched one by one; see device.UnderWay."""

    def logits(self) -> Tensor:
        """Return the logits after each part's last token."""
        return functional.linear(self._rms_norm(self.x[self.last], self.weights.norm), self.weights.head)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.weights.net.eps)

    def _rope(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1).to(x.dtype)


def rotary_angles(net: Net, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary angles at the positions `at`, in float32.

    Both have the dimensions (positions, 1, half of a head).
    """
    dim = net.shape.head_dim
    theta = at[:, None] * net.theta ** (-torch.arange(0, dim, 2, device=at.device) / dim)
    return theta.cos()[:, None], theta.sin()[:, None]


class Slots(NamedTuple):
    """The places in the KV at which a step's tokens are stored."""

    block: Tensor  # one number per token, as in the others
    within: Tensor  # the token's place in its block
    number: Tensor  # index of the first layer's key among all numbers of the KV


def slots(parts: Sequence[Part], kv: Tensor) -> Slots:
    """Return the places in the KV of all tokens that the parts compute."""
    none, size = torch.zeros(0, dtype=torch.long), kv.shape[3]
    at = [torch.arange(p.cached_tokens, p.context) for p in parts]
    block = torch.cat([none, *(torch.tensor(p.blocks)[x // size] for p, x in zip(parts, at, strict=True))])
    within = torch.cat([none, *at]) % size
    number = block * kv.stride(0) + within * kv.stride(3) + int(kv.storage_offset())
    return Slots(block.to(kv.device), within.to(kv.device), number.to(kv.device))


def block_table(parts: Sequence[Part], kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block table of the contexts, and a mask of the token positions in use.

    Each row of the table is padded with the first block of its context.
    """
    block = kv.shape[3]
    count = [-(-p.context // block) for p in parts]
    rows = [[*p.blocks[:n], *([p.blocks[0]] * (max(count) - n))] for p, n in zip(parts, count, strict=True)]
    mask = torch.arange(max(count) * block) < torch.tensor([p.context for p in parts])[:, None]
    return torch.tensor(rows).to(kv.device), mask[:, None, None].to(kv.device)


def write(kv: Tensor, layer: int, at: Slots, key: Tensor, value: Tensor) -> None:
    """Write the keys and values of new tokens to the places `at` in a layer's KV."""
    kv[at.block, layer, 0, at.within], kv[at.block, layer, 1, at.within] = key, value


def decode_attention(kv: Tensor, layer: int, contexts: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
    """Return decode attention, one query for each context; `q` and the result are (contexts, heads, dimension)."""
    blocks, mask = contexts
    seqs, (heads, dim) = len(blocks), kv.shape[4:]
    key, value = (
        kv[:, layer, part].index_select(0, blocks.flatten()).view(seqs, -1, heads, dim).transpose(1, 2)
        for part in (0, 1)
    )  # context, head, token, dimension; queries of a KV head attend together
    groups = q.view(seqs, heads, -1, dim)
    return functional.scaled_dot_product_attention(groups, key, value, attn_mask=mask).flatten(1, 2)


def block_ids(part: Part, kv: Tensor) -> Tensor:
    """Return the block numbers of a part's context."""
    return torch.tensor(part.blocks[: -(-part.context // kv.shape[3])]).to(kv.device)


def prompt_attention(kv: Tensor, layer: int, part: Part, blocks: Tensor, q: Tensor) -> Tensor:
    """Return the causal attention of one prompt piece: each query attends to its token and all tokens before it."""
    cached = kv[blocks, layer].transpose(0, 1).flatten(1, 2)[:, : part.context].transpose(1, 2)[:, None]
    key, value = cached.unbind(0)
    mask = None
    if part.cached_tokens:
        mask = torch.ones(part.tokens, part.context, dtype=torch.bool, device=kv.device).tril(part.cached_tokens)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)
