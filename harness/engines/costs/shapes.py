"""Bytes of a dense decoder from its dimensions, in bf16: the public checkpoints' own arithmetic.

Norms are counted and biases are not: they are below 0.2 % of every shape served here.
"""

from __future__ import annotations

from harness.policy.types import Shape, UserError

BF16 = 2  # bytes
DEGREES = (1, 2, 4, 8)  # of tensor parallelism: those whose all-reduces are in the cost tables


def params(shape: Shape) -> int:
    """Return the parameters of the whole model."""
    return _params(shape, 1)


def weight_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the weight bytes on each GPU of a tensor-parallel group of `tp`; UserError where heads do not divide."""
    _check(shape, tp)
    return BF16 * _params(shape, tp)


def kv_token_bytes(shape: Shape, tp: int = 1) -> int:
    """Return KV bytes of a token on each GPU of the group: K and V of all layers; heads are copied if tp > kv_heads."""
    _check(shape, tp)
    return BF16 * 2 * shape.layers * _kv_heads(shape, tp) * shape.head_dim


def degrees(shape: Shape) -> tuple[int, ...]:
    """Return the tensor-parallel degrees by which a shape's heads divide."""
    return tuple(tp for tp in DEGREES if _divides(shape, tp))


def _params(shape: Shape, tp: int) -> int:
    d, heads, kv = shape.hidden, shape.q_heads // tp, _kv_heads(shape, tp)
    attention = d * shape.head_dim * (2 * heads + 2 * kv)  # q, o; k, v
    ffn = (3 if shape.gated else 2) * d * -(-shape.ffn // tp)
    vocab = (1 if shape.tied else 2) * d * -(-shape.vocab // tp)
    return vocab + shape.layers * (attention + ffn + 2 * d) + d


def _kv_heads(shape: Shape, tp: int) -> int:
    return max(1, shape.kv_heads // tp)


def _divides(shape: Shape, tp: int) -> bool:
    return tp >= 1 and shape.q_heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)


def _check(shape: Shape, tp: int) -> None:
    if not _divides(shape, tp):
        raise UserError(f"{shape.name}: {shape.q_heads} heads and {shape.kv_heads} KV heads do not split over tp {tp}")
