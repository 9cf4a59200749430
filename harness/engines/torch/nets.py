"""The networks that stand for a run's models: dimensions, the order of their weights in memory, and the weights.

A card serves every shape at full size, in bfloat16. A core serves a shape of at most AS_IT_IS bytes at full size, in
float32. A larger shape is replaced by its twin, which has an eighth of its layers, a sixteenth of its widths and a
128th of its vocabulary. So each part of the twin has about the same share of the weights as in the shape. Weights are
drawn at random unless `MODELS_DIR` has a folder with the shape's name. They are stored in one flat blob, in the order
of `tensors`. Weights that one GEMM multiplies (query, key and value; gate and up) are adjacent, so one view covers
them.

Only cores serve a mixture of experts. Its tokens determine which experts a step reads, but a card captures its decode
graphs before the tokens are known. The weights of an FP8 checkpoint are converted to float32 when they are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import shapes
from harness.policy.types import MIB, Experts, Shape, UserError

AS_IT_IS = 64 * MIB  # float32 weights
F4 = NDArray[np.float32]


def _e4m3() -> F4:
    """Return the float32 value of each of the 256 bit patterns of FP8 E4M3.

    A pattern has a sign, 4 bits of exponent with bias 7, and 3 bits of fraction; there is no infinity. The format is
    that of Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), table 1.
    """
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    size[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


E4M3 = _e4m3()


class Net(NamedTuple):
    """A decoder network as the engine computes it, with Llama's or Qwen's architecture.

    It is dense, or a mixture of experts in all layers.
    """

    shape: Shape
    bias: bool = False  # Qwen 2 adds one to query, key and value
    qk_norm: bool = False  # Qwen 3 normalises each head of query and key
    theta: float = 10_000.0  # base of RoPE
    eps: float = 1e-5
    folder: str = ""  # its checkpoint lies there; "": weights are drawn
    float_bytes: int = 4  # bytes of a weight or a number of KV: 4 for float32, 2 for bfloat16
    norm_topk_prob: bool = True  # the weights of a token's experts add up to 1

    @property
    def weight_bytes(self) -> int:
        """The bytes of the network's weights."""
        return self.float_bytes * sum(math.prod(size) for _, size in tensors(self))

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        s = self.shape
        return self.float_bytes * 2 * s.layers * s.kv_heads * s.head_dim

    @property
    def text(self) -> str:
        """The network's dimensions in words, for the facts of a run."""
        s = self.shape
        return f"{s.name}, {s.layers} layers of {s.hidden}, {s.q_heads}/{s.kv_heads} heads of {s.head_dim}"


def net(shape: Shape, as_it_is: float = AS_IT_IS, float_bytes: int = 4, wide: int = 1) -> Net:
    """Return the network that is computed for a shape.

    If MODELS_DIR has a checkpoint of the shape, it is the network of this checkpoint. Otherwise, a shape whose weights
    take at most `as_it_is` bytes is computed at full size, and a larger one as its scaled twin. `wide` is as in `twin`.
    A shape in float32 is already a twin, with which a cost table was measured, so it is always computed at full size.
    Raises UserError for shapes and checkpoints that the engine does not serve.
    """
    folder = os.environ.get("MODELS_DIR", "")
    if folder and (Path(folder) / shape.name / "config.json").is_file():
        return described(Path(folder) / shape.name)._replace(float_bytes=float_bytes)
    single, moe = shape.formats == shapes.SINGLE, shape.experts
    plain = shape if moe is None else shape._replace(experts=None)
    if not single and (lacking := shapes.beyond_dense(plain)) is not None:
        raise UserError(f"{shape.name} has {lacking}: engine torch serves models in 16 bits with full attention")
    if moe and (moe.shared_ffn or moe.layers < shape.layers):
        lacking = "shared experts" if moe.shared_ffn else "dense layers beside its mixtures"
        raise UserError(f"{shape.name} has {lacking}: engine torch serves routed experts in all layers")
    whole = single or float_bytes * shapes.params(shape) <= as_it_is
    bias, qk_norm = (shape.name.startswith(f"qwen-{generation}") for generation in (2, 3))
    return Net(shape if whole else twin(shape, wide), bias, qk_norm, float_bytes=float_bytes)


def twin(shape: Shape, wide: int = 1) -> Shape:
    """Return the scaled twin of a shape: its widths are `wide` sixteenths of the shape's widths.

    The twin has a quarter of the heads if 4 divides both head counts, half of them if only 2 divides both, else all.
    The width of all heads together is `wide` sixteenths of the shape's. The twin has an eighth of the layers, at least
    2, and a 128th of the vocabulary.
    """
    part = next(n for n in (4, 2, 1) if shape.q_heads % n == 0 == shape.kv_heads % n)
    layers, moe = max(2, shape.layers // 8), shape.experts
    return shape._replace(
        name=f"twin of {shape.name}",
        layers=layers,
        experts=moe and moe._replace(layers=layers, ffn=wide * moe.ffn // 16),
        hidden=wide * shape.hidden // 16,
        q_heads=shape.q_heads // part,
        kv_heads=shape.kv_heads // part,
        head_dim=wide * shape.head_dim * part // 16,
        ffn=wide * shape.ffn // 16,
        vocab=shape.vocab // 128,
    )


def tensors(net: Net) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the dimensions of each weight, in the order of the blob.

    The names are those of Hugging Face checkpoints.
    """
    s = net.shape
    q, kv, d = s.q_heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden
    yield "model.embed_tokens.weight", (s.vocab, d)
    for k in range(s.layers):
        at = f"model.layers.{k}."
        yield f"{at}input_layernorm.weight", (d,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, d)
        if net.bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
        if net.qk_norm:
            yield f"{at}self_attn.q_norm.weight", (s.head_dim,)
            yield f"{at}self_attn.k_norm.weight", (s.head_dim,)
        yield f"{at}self_attn.o_proj.weight", (d, q)
        yield f"{at}post_attention_layernorm.weight", (d,)
        if s.experts:
            yield f"{at}mlp.gate.weight", (s.experts.routed, d)
        for mlp, ffn in blocks(s):
            if s.gated:
                yield f"{at}{mlp}gate_proj.weight", (ffn, d)
            yield f"{at}{mlp}up_proj.weight", (ffn, d)
            yield f"{at}{mlp}down_proj.weight", (d, ffn)
    yield "model.norm.weight", (d,)
    if not s.tied:
        yield "lm_head.weight", (s.vocab, d)


def blocks(shape: Shape) -> list[tuple[str, int]]:
    """List the feed-forward blocks of a layer, each as the common prefix of its tensors' names, and its width."""
    if shape.experts is None:
        return [("mlp.", shape.ffn)]
    return [(f"mlp.experts.{expert}.", shape.experts.ffn) for expert in range(shape.experts.routed)]


def blob(net: Net, seed: int) -> F4:
    """Return a network's weights in float32: those of its checkpoint or, if it has none, drawn at random."""
    out, at = np.empty(net.weight_bytes // net.float_bytes, np.float32), 0
    read = checkpoint(Path(net.folder)) if net.folder else {}
    draw = np.random.default_rng(seed)
    for name, size in tensors(net):
        part = out[at : (at := at + math.prod(size))]
        if net.folder:
            if name not in read or read[name].size != part.size:
                raise UserError(f"{net.folder}: no tensor {name} of {size}")
            part[:] = read[name].reshape(-1)
        elif len(size) == 1:
            part[:] = 0.0 if name.endswith("bias") else 1.0
        else:
            draw.standard_normal(out=part, dtype=np.float32)
            part *= size[-1] ** -0.5
    return out


def described(folder: Path) -> Net:
    """Return the network that a checkpoint's `config.json` describes.

    Raises UserError if the engine does not serve it.
    """
    has: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    if (kind := has.get("model_type")) not in {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral"}:
        raise UserError(f"{folder}: model_type is {kind}; llama, mistral, qwen2, qwen3 and qwen3_moe are served")
    if (method := (has.get("quantization_config") or {}).get("quant_method", "fp8")) != "fp8":
        raise UserError(f"{folder}: weights are quantised by {method}; 16 bits and fp8 are served")
    if kind == "qwen3_moe" and (has.get("mlp_only_layers") or has.get("decoder_sparse_step", 1) != 1):
        raise UserError(f"{folder}: mlp_only_layers or decoder_sparse_step: all layers must be mixtures")
    heads, hidden = has["num_attention_heads"], has["hidden_size"]
    rope = has.get("rope_parameters") or has.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"{folder}: rotary positions of type {rope['rope_type']}; only default ones are served")
    experts = None
    if kind == "qwen3_moe":
        routed = has.get("num_experts") or has["num_local_experts"]  # transformers 5 writes the latter
        experts = Experts(has["num_hidden_layers"], routed, has["num_experts_per_tok"], has["moe_intermediate_size"])
    shape = Shape(
        folder.name,
        has["num_hidden_layers"],
        hidden,
        heads,
        has.get("num_key_value_heads", heads),
        has.get("head_dim") or hidden // heads,
        has["intermediate_size"],
        has["vocab_size"],
        gated=True,
        tied=has.get("tie_word_embeddings", False),
        max_tokens=has["max_position_embeddings"],
        experts=experts,
    )
    theta = rope.get("rope_theta") or has.get("rope_theta") or 10_000.0
    return Net(
        shape,
        kind == "qwen2",
        kind.startswith("qwen3"),
        float(theta),
        float(has["rms_norm_eps"]),
        str(folder),
        norm_topk_prob=has.get("norm_topk_prob", False),
    )


def checkpoint(folder: Path) -> dict[str, F4]:
    """Read the tensors in a folder's safetensors files, and return them by name in float32.

    The files may hold float32, float16, bfloat16, or FP8 with scales. FP8 weights are multiplied by their scales.
    """
    weights: dict[str, F4] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        start = 8 + int(raw[:8].view("<u8")[0])
        for name, about in json.loads(bytes(raw[8:start])).items():
            if name == "__metadata__":
                continue
            a, b = (start + offset for offset in about["data_offsets"])
            weights[name] = _floats(np.array(raw[a:b]), about["dtype"], f"{path}: {name}").reshape(about["shape"])
    about = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config") or {}
    for scale in [name for name in weights if name.endswith(("weight_scale_inv", "weight_scale"))]:
        weight = scale[: scale.rindex("_scale")]
        weights[weight] = scaled(weights[weight], weights.pop(scale), about.get("weight_block_size"))
    return weights


def scaled(weight: F4, scale: F4, block: Sequence[int] | None) -> F4:
    """Multiply a matrix by its scales: one in all, one per row, or one per block of `block` rows and columns."""
    if block is None or scale.size == 1:
        return weight * scale
    rows, columns = weight.shape
    return weight * scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]


def _floats(raw: NDArray[np.uint8], kind: str, where: str) -> F4:
    match kind:
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "F8_E4M3":
            return E4M3[raw]
    raise UserError(f"{where} is of {kind}")


def prompt_ids(rid: int, first: int, last: int, vocab: int) -> NDArray[np.int64]:
    """Return made-up ids for tokens `first` to `last` of a request's prompt, because traces have only lengths."""
    k = np.arange(first, last, dtype=np.uint64) + np.uint64((rid + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    k = (k ^ (k >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((k ^ (k >> np.uint64(29))) % np.uint64(vocab)).astype(np.int64)
