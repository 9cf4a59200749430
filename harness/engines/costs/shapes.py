"""Bytes of a dense decoder from its dimensions, by default in bf16: the public checkpoints' own arithmetic.

Norms are counted and biases are not: they are below 0.2 % of every shape served here.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.policy.types import Shape, UserError

BF16 = 2  # bytes
DEGREES = (1, 2, 4, 8)  # of tensor parallelism: those whose all-reduces are in the cost tables


def params(shape: Shape) -> int:
    """Return the parameters of the whole model."""
    return _params(shape, 1)


def weight_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the weight bytes on each GPU of a tensor-parallel group of `tp`; UserError where heads do not divide."""
    _check(shape, tp)
    return shape.number_bytes * _params(shape, tp)


def kv_token_bytes(shape: Shape, tp: int = 1) -> int:
    """Return KV bytes of a token on each GPU of the group: K and V of all layers; heads are copied if tp > kv_heads."""
    _check(shape, tp)
    return shape.number_bytes * 2 * shape.layers * _kv_heads(shape, tp) * shape.head_dim


def degrees(shape: Shape) -> tuple[int, ...]:
    """Return the tensor-parallel degrees by which a shape's heads divide."""
    return tuple(tp for tp in DEGREES if _divides(shape, tp))


class Gemms(NamedTuple):
    """A layer's four GEMMs as (n, k) per GPU."""

    qkv: tuple[float, float]
    out: tuple[float, float]
    up: tuple[float, float]
    down: tuple[float, float]


def gemms(shape: Shape, tp: int) -> Gemms:
    """Return the GEMMs with QKV fused, gate and up fused; columns, then rows, split over `tp` GPUs."""
    heads, kv = shape.q_heads / tp, max(1.0, shape.kv_heads / tp)
    ffn = shape.ffn / tp
    return Gemms(
        ((heads + 2 * kv) * shape.head_dim, shape.hidden),
        (shape.hidden, heads * shape.head_dim),
        ((2 if shape.gated else 1) * ffn, shape.hidden),
        (shape.hidden, ffn),
    )


def parts_by_weights(shape: Shape) -> tuple[list[float], list[float]]:
    """Return the parts of a layer's time that its products before and after attention take, by the weights of each.

    It stands in where nothing tells kernels apart: on a machine that was measured whole.
    """
    weights = [n * k for n, k in gemms(shape, 1)]
    qkv, *after = (size / sum(weights) for size in weights)
    return [qkv], after


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
