"""Bytes of a decoder from its dimensions and number formats; parameters are counted by `harness.policy.parameters`."""

from __future__ import annotations

from harness.policy.parameters import alike, attention, attention_gpus, kv_numbers, parameters, stored_bytes
from harness.policy.types import Format, Formats, Shape, UserError

BF16 = 2  # bytes
FP8 = 1
FP32 = 4  # on a processor
KV_BYTES = {"bf16": BF16, "fp8": FP8, "fp32": FP32}  # bytes of a number in the KV cache
BLOCK = 128  # rows and columns that share a scale in block-wise FP8: a GPU's part holds whole blocks
DEGREES = (1, 2, 4, 8)  # cost tables have the all-reduces of these degrees
PLAIN = Format("bf16", float(BF16))
SINGLE = Formats(*[Format("fp32", float(FP32))] * len(Formats._fields))


def params(shape: Shape) -> int:
    """Return the number of parameters of the whole model, without those of a vision tower."""
    return sum(parameters(shape))


def weight_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the weight bytes on each GPU of a tensor-parallel group of `tp`.

    Raises UserError if a part of the model does not divide over the GPUs.
    """
    _check(shape, tp)
    return stored_bytes(shape, tp)


def format_of(shape: Shape, group: str) -> Format:
    """Return the format of a group of modules, one of `Formats`."""
    return PLAIN if shape.formats is None else shape.formats[Formats._fields.index(group)]


def in_numbers(shape: Shape, number_bytes: int) -> Shape:
    """Return the shape with all weights and KV in bf16 (2 bytes a number) or in float32 (4 bytes)."""
    if number_bytes == FP32:
        return shape._replace(formats=SINGLE, kv_format="fp32")
    return shape._replace(formats=None, kv_format="bf16")


def beyond_dense(shape: Shape) -> str | None:
    """Return, in words, a feature of a shape that a dense decoder in bf16 with grouped-query heads lacks.

    Return None if the shape has no such feature.
    """
    if shape.dp > 1:
        return f"data-parallel attention (dp={shape.dp})"
    if shape.ep > 1:
        return f"expert parallelism (ep={shape.ep})"
    if shape.experts is not None:
        return "a mixture of experts"
    if shape.latent is not None:
        return "latent attention"
    if shape.sliding is not None:
        return "sliding layers"
    if shape.keys_as_values:
        return "attention without value projections"
    if shape.formats is not None:
        return f"weights in {format_of(shape, 'attention').name}"
    return None if shape.kv_format == "bf16" else f"a KV cache in {shape.kv_format}"


def heads_of(shape: Shape, tp: int) -> tuple[float, float]:
    """Return the query and KV heads on each GPU of the group; KV heads are copied if they are fewer than GPUs."""
    cut = attention_gpus(shape, tp)
    return shape.q_heads / cut, max(1.0, shape.kv_heads / cut)


def kv_token_bytes(shape: Shape, tp: int = 1) -> int:
    """Return the KV bytes of a token on each GPU of the group, in all layers; heads are copied if tp > KV heads.

    Latent KV is copied to every GPU. Layers with a sliding window count like the others, because blocks that have left
    a window are not freed. The scales of an FP8 cache are left out, because they are one number per layer. With
    data-parallel attention, a token lies in one of `dp` groups. The sequences are assumed to be balanced over the
    groups, so that each GPU has a share of every token.
    """
    _check(shape, tp)
    return -(-KV_BYTES[shape.kv_format] * kv_numbers(shape, tp) // min(shape.dp, tp))


def degrees(shape: Shape) -> tuple[int, ...]:
    """Return the numbers of GPUs over which a shape's heads, experts and groups can be divided."""
    return tuple(tp for tp in DEGREES if tp >= max(shape.dp, shape.ep) and _undivided(shape, tp) is None)


def parts_by_weights(shape: Shape) -> tuple[list[float], list[float]]:
    """Return each matrix product's fraction of a layer's time, for the products before and after attention.

    The fractions are in proportion to the products' weights; in a mixture of experts, those of one token's experts
    count. They are used for a machine that was measured whole (`whole.py`), whose kernels were not timed one by one.
    """
    each = [[count * part.layers / shape.layers for _, count in attention(part)] for part in alike(shape)]
    before, out = sum(sum(part[:-1]) for part in each), sum(part[-1] for part in each)
    width, moe = float(shape.ffn), shape.experts
    if moe is not None:
        dense = (shape.layers - moe.layers) * shape.ffn
        width = (dense + moe.layers * (moe.top * moe.ffn + moe.shared_ffn)) / shape.layers
    down = shape.hidden * width
    weights = [before, out, (2 if shape.gated else 1) * down, down]
    first, *after = (size / sum(weights) for size in weights)
    return [first], after


def _undivided(shape: Shape, tp: int) -> str | None:
    """Say which part of a shape cannot be divided over `tp` GPUs; None if all parts can."""
    for name, parts in (("dp", shape.dp), ("ep", shape.ep)):
        if tp > 1 and tp % parts:
            return f"{name}={parts} does"
    cut = attention_gpus(shape, tp)
    for part in alike(shape):
        kv = 1 if shape.latent is not None else part.kv_heads
        if not (tp >= 1 and shape.q_heads % cut == 0 and (kv % cut == 0 or cut % kv == 0)):
            return f"{shape.q_heads} heads and {part.kv_heads} KV heads do"
    if (moe := shape.experts) is not None:
        unit = BLOCK if format_of(shape, "experts").name == "fp8_block" else 1
        each = tp // min(shape.ep, tp)
        if moe.routed % shape.ep:
            return f"{moe.routed} experts in ep={shape.ep} parts do"
        if each > 1 and moe.ffn % (each * unit):
            return f"experts of width {moe.ffn}" + (f" in blocks of {BLOCK}" if unit > 1 else "") + " do"
    return None


def _check(shape: Shape, tp: int) -> None:
    if (what := _undivided(shape, tp)) is not None:
        raise UserError(f"{shape.name}: {what} not split over tp {tp}")
