"""Shapes from `.gguf` files; only the header is read, which states the dimensions and the type of each tensor.

The format is that of ggml-org/ggml docs/gguf.md (version 2 and 3, little-endian). The bytes of a type are those of its
blocks in ggml-common.h, as in `gguf.constants.GGML_QUANT_SIZES`. A name such as Q4_K_M or Q8_0 does not set the format
of a file: the types of its tensors do. The counts in the header and the offsets of the tensors are checked against the
size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harness.policy.types import Experts, Format, Formats, Shape, UserError
from workloads import bounds

MOST_TEXTS = 1 << 22  # a longer list is refused: vocabularies have 0.3 million
MOST_DIMS = 4  # a tensor has no more, as in ggml
ALIGNMENT = 32  # bytes, of the tensors' data, unless a key says another
KINDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# The number of a type, with the numbers in its block and the block's bytes.
TYPES: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
GROUPS = {  # a part of a tensor's name, and its group of `Formats`
    "_exps": "experts",
    "_shexp": "shared",
    "attn_": "attention",
    "ffn_gate_inp": "",
    "ffn_": "ffn",
    "token_embd": "embedding",
    "output.": "head",
}
REFUSED = ("attention.kv_lora_rank", "ssm.state_size", "wkv.head_size", "full_attention_interval")


def read(path: Path, label: str) -> Shape:
    """Read the shape of a `.gguf` file.

    UserError says in one line that the file is not GGUF, or names the key that is missing or not understood.
    """
    with path.open("rb") as file:
        try:
            keys, tensors = Header(file, path.stat().st_size).read()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
            raise UserError(f"{path}: no GGUF header ({bounds.shown(str(error))[1:-1]})") from None
    try:
        return bounds.sound(_shape(label, keys, tensors, str(path)), str(path))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a value of another kind than its key has ({bounds.shown(str(error))})") from None


def _shape(label: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, int]], where: str) -> Shape:
    family = keys.get("general.architecture")
    if not isinstance(family, str):
        raise UserError(f"{where}: general.architecture is {bounds.shown(family)}, not a name")
    if type(parts := keys.get("split.count", 1)) is not int or parts > 1:
        raise UserError(f"{where}: one of {bounds.shown(parts)} files of a model (llama-gguf-split --merge makes one)")

    def of(name: str, limit: str, default: int | None = None) -> int:
        value = keys.get(f"{family}.{name}", default)
        value = value[0] if isinstance(value, list) and len({*value}) == 1 else value
        if value is None:
            raise UserError(f"{where}: {family}.{name} is missing")
        return bounds.count(value, limit, f"{family}.{name}", where)

    if (refused := next((key for key in REFUSED if f"{family}.{key}" in keys), None)) is not None:
        raise UserError(f"{where}: {family}.{refused}: no model of it")
    layers, hidden, heads = (
        of("block_count", "layers"),
        of("embedding_length", "hidden"),
        of("attention.head_count", "q_heads"),
    )
    count = of("expert_count", "experts", 0)
    ffn = of("feed_forward_length", "shared_ffn", 0)
    width = of("expert_feed_forward_length", "shared_ffn", ffn)
    sparse = sum(name.startswith("blk.") and "ffn_down_exps" in name for name in tensors)
    shared = of("expert_shared_feed_forward_length", "shared_ffn", of("expert_shared_count", "shared", 0) * width)
    vocab = keys.get("tokenizer.ggml.tokens", keys.get(f"{family}.vocab_size"))
    if vocab is None:
        raise UserError(f"{where}: neither tokenizer.ggml.tokens nor {family}.vocab_size")
    if not (ffn or width):
        raise UserError(f"{where}: {family}.feed_forward_length is missing")
    if not tensors:
        raise UserError(f"{where}: no tensors")
    if "attention.key_length" not in (name.partition(".")[2] for name in keys) and hidden % heads:
        raise UserError(f"{where}: embedding_length {hidden} does not divide among {heads} heads")
    return Shape(
        label,
        layers,
        hidden,
        heads,
        of("attention.head_count_kv", "kv_heads", heads),
        of("attention.key_length", "head_dim", hidden // heads),
        ffn or width,
        bounds.count(vocab, "vocab", "tokenizer.ggml.tokens", where),
        any("ffn_gate" in name and "inp" not in name for name in tensors),
        "output.weight" not in tensors,
        of("context_length", "context"),
        experts=Experts(sparse, count, of("expert_used_count", "top"), width, shared) if count and sparse else None,
        formats=_formats(tensors),
    )


def _formats(tensors: Mapping[str, tuple[int, int]]) -> Formats:
    """Return the format of each group of tensors, with the group's mean bytes per weight."""
    groups: dict[str, list[int]] = {group: [0, 0] for group in (*Formats._fields, "")}
    for name, (numbers, size) in tensors.items():
        group = next((g for part, g in GROUPS.items() if part in name and "norm" not in name), "")
        groups[group][0] += numbers
        groups[group][1] += size
    return Formats(*(Format("gguf", b / n if n else 2.0) for n, b in (groups[g] for g in Formats._fields)))


class Header:
    """A reader of a GGUF header, which never reads more bytes than the file has."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
        """Return the header's keys and values, and each tensor's number of weights and bytes by name.

        The value of a list of strings is replaced by its length.
        """
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensors, entries = self._count(24), self._count(12)
        keys: dict[str, Any] = {}
        for _ in range(entries):
            if (name := self._text()) in keys:
                raise ValueError(f"key {name} is there twice")
            keys[name] = self._value(self._number("I"))
        sizes, end = dict[str, tuple[int, int]](), 0
        for _ in range(tensors):
            if (name := self._text()) in sizes:
                raise ValueError(f"tensor {name} is there twice")
            numbers, size, offset = self._tensor(name)
            sizes[name], end = (numbers, size), max(end, offset + size)
        align = keys.get("general.alignment", ALIGNMENT)
        if type(align) is not int or not 1 <= align <= 1 << 20:
            raise ValueError(f"general.alignment is {bounds.shown(align)}")
        if (least := -(-self._at // align) * align + end) > self._size and sizes:
            raise ValueError(f"it is cut at {self._size} bytes, its tensors end at {least}")
        return keys, sizes

    def _tensor(self, name: str) -> tuple[int, int, int]:
        """Read a tensor's entry; return its number of weights, its bytes and its offset."""
        dims, numbers = self._number("I"), 1
        if dims > MOST_DIMS:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        for _ in range(dims):
            numbers *= self._number("Q")
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise ValueError(f"tensor {name} is of type {kind}, which is not known")
        block, size = TYPES[kind]
        if not numbers or numbers % block:
            raise ValueError(f"tensor {name} of {numbers} numbers is not of whole blocks of {block}")
        return numbers, numbers // block * size, offset

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY:
            inner = self._number("I")
            if inner == TEXT:
                length = self._count(8)
                if length > MOST_TEXTS:
                    raise ValueError(f"a list of {length} texts")
                for _ in range(length):
                    self._text()
                return length
            if inner not in KINDS:
                raise ValueError(f"a list of type {inner}")
            each = struct.calcsize(KINDS[inner])
            length = self._count(each)
            return list(struct.unpack(f"<{length}{KINDS[inner]}", self._bytes(length * each)))
        if kind not in KINDS:
            raise ValueError(f"a value of type {kind}")
        return self._number(KINDS[kind])

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise ValueError(f"the file ends at {self._size} bytes, within its header")
        self._at += count
        return self._file.read(count)

    def _number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._bytes(struct.calcsize("<" + kind)))[0]

    def _text(self) -> str:
        return self._bytes(self._count(1)).decode("utf-8")

    def _count(self, each: int) -> int:
        """Read a count of items of at least `each` bytes; ValueError if the rest of the file is too short for them."""
        count = int(self._number("Q"))
        if count * each > self._size - self._at:
            raise ValueError(f"a count of {count}, and {self._size - self._at} bytes are left")
        return count
