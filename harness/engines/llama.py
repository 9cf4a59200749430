"""A decoder of Llama's kind in torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a tied embedding.

Weights are random, in float32: the time of a step does not depend on them. Keys and values lie in the rows of one pool,
which any number of models of this shape may share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.costs import shapes
from harness.policy.types import Shape

TINY = Shape("tiny", layers=4, hidden=256, q_heads=8, kv_heads=2, head_dim=32, ffn=704, vocab=1024, gated=True,
             tied=True, max_tokens=1 << 17)  # fmt: skip
FLOAT = 4  # bytes; shapes count two
WEIGHT_BYTES = shapes.weight_bytes(TINY) * FLOAT // shapes.BF16
KV_TOKEN_BYTES = shapes.kv_token_bytes(TINY) * FLOAT // shapes.BF16


def weights(seed: int) -> list[Any]:
    """Draw random weights: embedding, six tensors a layer, last norm."""
    import torch

    s, draw = TINY, torch.Generator().manual_seed(seed)
    heads, d = (s.q_heads + 2 * s.kv_heads) * s.head_dim, s.hidden
    layer = [(d,), (heads, d), (d, s.q_heads * s.head_dim), (d,), (2 * s.ffn, d), (d, s.ffn)]
    sizes = [(s.vocab, d), *layer * s.layers, (d,)]
    return [torch.randn(n, generator=draw) * n[-1] ** -0.5 if len(n) > 1 else torch.ones(n) for n in sizes]


def pool(slots: int) -> Any:
    """Allocate room for the keys and values of so many tokens, by layer."""
    import torch

    return torch.empty(TINY.layers, 2, slots, TINY.kv_heads, TINY.head_dim)


def forward(W: Sequence[Any], tokens: Any, at: Any, pieces: Sequence[tuple[int, int, Any]], kv: Any) -> list[int]:
    """Return the next token of each piece: rows a to b of `tokens`, at positions `at`, of one request.

    `slots` of a piece are the rows of the pool `kv` where that request's keys and values lie, this step's last.
    """
    import torch
    from torch.nn import functional

    s, n = TINY, len(tokens)
    theta = at[:, None] * 10000.0 ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
    cos, sin = theta.cos()[:, None], theta.sin()[:, None]

    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (s.hidden,), weight, 1e-5)

    def rotated(x: Any) -> Any:
        x = x.view(n, -1, s.head_dim)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x, new = W[0][tokens], torch.cat([slots[a - b :] for a, b, slots in pieces])
    for layer in range(s.layers):
        norm_1, qkv, out, norm_2, gate_up, down = W[1 + 6 * layer : 7 + 6 * layer]
        q, k, v = (norm(x, norm_1) @ qkv.T).split([h * s.head_dim for h in (s.q_heads, s.kv_heads, s.kv_heads)], -1)
        kv[layer, 0, new], kv[layer, 1, new] = rotated(k), v.view(n, -1, s.head_dim)
        q, mixed = rotated(q).transpose(0, 1), []
        for a, b, slots in pieces:
            keys, values = kv[layer][:, slots].transpose(1, 2)
            mixed.append(functional.scaled_dot_product_attention(
                q[None, :, a:b], keys[None], values[None], is_causal=b - a > 1, enable_gqa=True)[0])  # fmt: skip
        x = x + torch.cat(mixed, 1).transpose(0, 1).reshape(n, -1) @ out.T
        gate, up = (norm(x, norm_2) @ gate_up.T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ down.T
    last = norm(x[[b - 1 for _, b, _ in pieces]], W[-1])
    ids: list[int] = (last @ W[0].T).argmax(-1).tolist()
    return ids
