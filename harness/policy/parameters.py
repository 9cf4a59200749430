"""Count a decoder's parameters from its dimensions, by group of modules, as in the public checkpoints.

Norms are counted. Biases are not counted: they are below 0.2 % of the parameters of every shape served here.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.policy.types import Shape, Sliding

PLAIN_BYTES = 2  # bytes of a 16-bit number


class Parameters(NamedTuple):
    """Numbers of parameters by group of modules. The groups are those of `Formats`.

    `router` and `norms` together are the `rest` of `Formats`; `embedding` has a format of its own.
    """

    attention: int
    ffn: int
    experts: int
    shared: int
    head: int
    embedding: int
    router: int
    norms: int


def parameters(shape: Shape, tp: int = 1) -> Parameters:
    """Count the parameters on each GPU of a tensor-parallel group of `tp` GPUs.

    Matrices are cut by columns or rows. KV heads are copied if they are fewer than the GPUs. Routers, and the
    compressing matrices of latent attention, are copied. Data-parallel attention has a copy in each of its `dp` groups,
    and expert parallelism assigns whole experts to GPUs. With `tp` 1, the result is the whole model.
    """
    d, mats, moe = shape.hidden, 3 if shape.gated else 2, shape.experts
    dense = shape.layers - (moe.layers if moe else 0)
    dealt = min(shape.ep, tp)
    matrix = d * -(-shape.vocab // tp)
    return Parameters(
        sum(part.layers * sum(count for _, count in attention(part, tp)) for part in alike(shape)),
        dense * mats * d * -(-shape.ffn // tp),
        moe.layers * -(-moe.routed // dealt) * mats * d * -(-moe.ffn // (tp // dealt)) if moe else 0,
        moe.layers * mats * d * -(-moe.shared_ffn // tp) if moe else 0,
        0 if shape.tied else matrix,
        matrix,
        moe.layers * d * moe.routed if moe else 0,
        2 * shape.layers * d + d,
    )


def stored_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the bytes of the weights on each GPU of a group, in their number formats, including a vision tower."""
    count, other = parameters(shape, tp), -(-shape.other_bytes // tp)
    if shape.formats is None:
        return PLAIN_BYTES * sum(count) + other
    stored = sum(n * f.weight_bytes for n, f in zip(count, (*shape.formats, shape.formats.rest), strict=True))
    return round(stored) + other


def attention_gpus(shape: Shape, tp: int) -> int:
    """Return the number of GPUs, out of a group of `tp`, that share the attention of one sequence."""
    return max(1, tp // shape.dp)


def kv_numbers(shape: Shape, tp: int = 1) -> int:
    """Return the number of KV elements of a token on each GPU of a group of `tp`, over all layers.

    Keys and values count as two vectors even if one projection makes both, because only keys are rotated.
    """
    if shape.latent is not None:
        return shape.layers * (shape.latent.kv_rank + shape.latent.rope_dim)
    cut = attention_gpus(shape, tp)
    return sum(2 * part.layers * max(1, part.kv_heads // cut) * part.head_dim for part in alike(shape))


def kept_numbers(shape: Shape) -> int:
    """Return the number of KV elements that are kept for a token after it has left the window of the sliding layers."""
    if shape.sliding is None:
        return kv_numbers(shape)
    rest = alike(shape)[-1]
    return kv_numbers(rest._replace(layers=shape.layers - shape.sliding.layers, sliding=None))


def alike(shape: Shape) -> tuple[Shape, ...]:
    """Split a shape by layers into shapes, so that all layers of one shape have equal attention matrices.

    The result is the shape itself or, if the heads of sliding layers differ, one shape of the sliding layers and one of
    the others.
    """
    near = shape.sliding
    if near is None or (near.kv_heads is near.head_dim is None and not shape.keys_as_values):
        return (shape,)
    return (
        shape._replace(
            layers=near.layers,
            kv_heads=near.kv_heads or shape.kv_heads,
            head_dim=near.head_dim or shape.head_dim,
            sliding=Sliding(near.layers, near.tokens),
            keys_as_values=False,
        ),
        shape._replace(layers=shape.layers - near.layers, sliding=None),
    )


def attention(shape: Shape, tp: int = 1) -> list[tuple[str, int]]:
    """List the matrices of a layer's attention, each with its name and its number of parameters on each GPU.

    `shape` is one that `alike` returns, so that all its layers have the same matrices.
    """
    tp = attention_gpus(shape, tp)
    d, heads = shape.hidden, shape.q_heads // tp
    if (mla := shape.latent) is None:
        kv, head = max(1, shape.kv_heads // tp), d * shape.head_dim
        values = [] if shape.keys_as_values else [("v_proj", kv * head)]
        return [("q_proj", heads * head), ("k_proj", kv * head), *values, ("o_proj", heads * head)]
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
