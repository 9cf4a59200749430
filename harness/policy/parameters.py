"""Parameters of a decoder from its dimensions, by group of modules: the public checkpoints' own arithmetic.

Norms are counted and biases are not: they are below 0.2 % of every shape served here.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.policy.types import Shape

PLAIN_BYTES = 2  # of a number in 16 bits


class Parameters(NamedTuple):
    """Counts of parameters by group: those of `Formats`, the last two of which are its `rest`."""

    attention: int
    ffn: int
    experts: int
    shared: int
    head: int
    embedding: int
    router: int
    norms: int


def parameters(shape: Shape, tp: int = 1) -> Parameters:
    """Count the parameters on each GPU of a tensor-parallel group of `tp`.

    Columns and rows are cut, KV heads copied where they are fewer than the GPUs; of latent attention the compressing
    matrices, and routers, are copied. Data-parallel attention has a copy in each of its `dp` groups, and expert
    parallelism deals whole experts. One GPU (`tp` 1) stands for the whole model.
    """
    d, mats, moe = shape.hidden, 3 if shape.gated else 2, shape.experts
    dense = shape.layers - (moe.layers if moe else 0)
    dealt = min(shape.ep, tp)
    matrix = d * -(-shape.vocab // tp)
    return Parameters(
        shape.layers * sum(count for _, count in attention(shape, tp)),
        dense * mats * d * -(-shape.ffn // tp),
        moe.layers * -(-moe.routed // dealt) * mats * d * -(-moe.ffn // (tp // dealt)) if moe else 0,
        moe.layers * mats * d * -(-moe.shared_ffn // tp) if moe else 0,
        0 if shape.tied else matrix,
        matrix,
        moe.layers * d * moe.routed if moe else 0,
        2 * shape.layers * d + d,
    )


def stored_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the bytes of the weights on each GPU of a group, in their formats, a vision tower's among them."""
    count, other = parameters(shape, tp), -(-shape.other_bytes // tp)
    if shape.formats is None:
        return PLAIN_BYTES * sum(count) + other
    stored = sum(n * f.weight_bytes for n, f in zip(count, (*shape.formats, shape.formats.rest), strict=True))
    return round(stored) + other


def attention_gpus(shape: Shape, tp: int) -> int:
    """Return over how many GPUs of a group of `tp` the attention of a sequence is cut."""
    return max(1, tp // shape.dp)


def attention(shape: Shape, tp: int = 1) -> list[tuple[str, int]]:
    """List the matrices of a layer's attention by name, with their parameters on each GPU."""
    tp = attention_gpus(shape, tp)
    d, heads = shape.hidden, shape.q_heads // tp
    if (mla := shape.latent) is None:
        kv, head = max(1, shape.kv_heads // tp), d * shape.head_dim
        return [("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head), ("o_proj", heads * head)]
    query = heads * (mla.nope_dim + mla.rope_dim)
    queries = (
        [("q_a_proj", d * mla.q_rank), ("q_b_proj", mla.q_rank * query)] if mla.q_rank else [("q_proj", d * query)]
    )
    return [
        *queries,
        ("kv_a_proj_with_mqa", d * (mla.kv_rank + mla.rope_dim)),
        ("kv_b_proj", mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)),
        ("o_proj", heads * mla.v_dim * d),
    ]
