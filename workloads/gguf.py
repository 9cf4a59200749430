"""Shapes from `.gguf` files: the header alone is read, which states dimensions, and each tensor with its type.

The form: ggml-org/ggml docs/gguf.md (version 2 and 3, little-endian). Bytes of a type: blocks of ggml-common.h, as
`gguf.constants.GGML_QUANT_SIZES` has them. A Q4_K_M or Q8_0 is no format of its own: it is the types of its tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harness.policy.types import Experts, Format, Formats, Shape, UserError

MOST = 1 << 24  # tensors, keys, elements or bytes of a text: no header has more
KINDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# Number of a type: numbers of a block, and its bytes.
TYPES: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
GROUPS = {  # a part of a tensor's name, and its group of `Formats`
    "_exps": "experts", "_shexp": "shared", "attn_": "attention", "ffn_gate_inp": "", "ffn_": "ffn",
    "token_embd": "embedding", "output.": "head",
}  # fmt: skip
REFUSED = ("attention.kv_lora_rank", "ssm.state_size", "wkv.head_size", "full_attention_interval")


def read(path: Path, label: str) -> Shape:
    """Read the shape of a `.gguf` file; UserError, of one line, where it is none or its keys are not understood."""
    with path.open("rb") as file:
        try:
            keys, tensors = _header(file)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise UserError(f"{path}: no GGUF header ({error})") from None
    return _shape(label, keys, tensors, str(path))


def _shape(label: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, int]], where: str) -> Shape:
    family = keys.get("general.architecture")

    def of(name: str, default: int | None = None) -> int:
        value = keys.get(f"{family}.{name}", default)
        if isinstance(value, list) and value and len({*value}) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            reason = "missing" if value is None else f"{str(value)[:40]}, not a count"
            raise UserError(f"{where}: {family}.{name} is {reason}")
        return value

    if (refused := next((key for key in REFUSED if f"{family}.{key}" in keys), None)) is not None:
        raise UserError(f"{where}: {family}.{refused}: no model of it")
    layers, hidden, heads = of("block_count"), of("embedding_length"), of("attention.head_count")
    if not heads or not layers:
        raise UserError(f"{where}: {layers} layers of {heads} heads")
    ffn, count = of("feed_forward_length", 0), of("expert_count", 0)
    width = of("expert_feed_forward_length", ffn)
    sparse = sum(name.startswith("blk.") and "ffn_down_exps" in name for name in tensors)
    shared = of("expert_shared_feed_forward_length", of("expert_shared_count", 0) * width)
    vocab = keys.get("tokenizer.ggml.tokens", keys.get(f"{family}.vocab_size"))
    if not isinstance(vocab, int):
        raise UserError(f"{where}: neither tokenizer.ggml.tokens nor {family}.vocab_size")
    groups: dict[str, list[int]] = {group: [0, 0] for group in (*Formats._fields, "")}
    for name, (numbers, size) in tensors.items():
        group = next((g for part, g in GROUPS.items() if part in name and "norm" not in name), "")
        groups[group][0] += numbers
        groups[group][1] += size
    return Shape(
        label, layers, hidden, heads, of("attention.head_count_kv", heads), of("attention.key_length", hidden // heads),
        ffn or width, vocab, any("ffn_gate" in name and "inp" not in name for name in tensors),
        "output.weight" not in tensors, of("context_length"),
        experts=Experts(sparse, count, of("expert_used_count"), width, shared) if count and sparse else None,
        formats=Formats(*(Format("gguf", b / n if n else 2.0) for n, b in (groups[g] for g in Formats._fields))),
    )  # fmt: skip


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Return the keys, and by tensor its numbers and bytes. A list of texts is its length."""
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = _number(file, "I")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    tensors, entries = _most(_number(file, "Q")), _most(_number(file, "Q"))
    keys = {}
    for _ in range(entries):
        name = _text(file)
        keys[name] = _value(file, _number(file, "I"))
    sizes = {}
    for _ in range(tensors):
        name, numbers = _text(file), 1
        for _ in range(_most(_number(file, "I"))):
            numbers *= _number(file, "Q")
        kind, _offset = _number(file, "I"), _number(file, "Q")
        if kind not in TYPES:
            raise ValueError(f"tensor {name} is of type {kind}, which is not known")
        block, size = TYPES[kind]
        sizes[name] = numbers, numbers // block * size
    return keys, sizes


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == TEXT:
        return _text(file)
    if kind == ARRAY:
        inner, length = _number(file, "I"), _most(_number(file, "Q"))
        if inner == TEXT:
            for _ in range(length):
                _text(file)
            return length
        return [_value(file, inner) for _ in range(length)]
    if kind not in KINDS:
        raise ValueError(f"a value of type {kind}")
    return _number(file, KINDS[kind])


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack("<" + kind, file.read(struct.calcsize(kind)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_most(_number(file, "Q"))).decode("utf-8")


def _most(count: int) -> int:
    if count > MOST:
        raise ValueError(f"a count of {count}")
    return int(count)
