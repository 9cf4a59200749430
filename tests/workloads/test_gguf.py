"""GGUF files: sizes and formats of their tensors, and what is refused."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from harness.engines.costs import shapes
from harness.policy.types import UserError
from tests.cases import cases
from workloads import gguf
from workloads.models import model_set, shape


def header(path: Path, keys: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> str:
    """Write the header of a GGUF file."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def value(of: Any) -> bytes:
        if isinstance(of, str):
            return struct.pack("<I", 8) + text(of)
        if isinstance(of, list):
            return struct.pack("<IIQ", 9, 8, len(of)) + b"".join(text(word) for word in of)
        return struct.pack("<II", 4, of)

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(text(key) + value(of) for key, of in keys.items())
    for name, (dims, kind) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
    path.write_bytes(out + bytes(-len(out) % 32 + max(_bytes(*tensor) for tensor in tensors.values())))
    return str(path)


def _bytes(dims: tuple[int, ...], kind: int) -> int:
    """Return the bytes of a tensor: they all begin at 0, and the longest counts."""
    block, size = gguf.TYPES[kind]
    return math.prod(dims) // block * size


def q4(path: Path, **changed: Any) -> str:
    """Write a model of one layer whose tensors are Q4_K (12), Q6_K (14), F16 (1) and F32 (0)."""
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 256,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 512,
        "llama.context_length": 4096,
        "tokenizer.ggml.tokens": ["a"] * 1024,
    }
    tensors = {
        "token_embd.weight": ((256, 1024), 1),
        "blk.0.attn_norm.weight": ((256,), 0),
        "blk.0.attn_q.weight": ((256, 256), 12),
        "blk.0.attn_k.weight": ((256, 64), 12),
        "blk.0.attn_v.weight": ((256, 64), 14),
        "blk.0.attn_output.weight": ((256, 256), 12),
        "blk.0.ffn_gate.weight": ((256, 512), 12),
        "blk.0.ffn_up.weight": ((256, 512), 12),
        "blk.0.ffn_down.weight": ((512, 256), 14),
        "blk.0.ffn_norm.weight": ((256,), 0),
        "output.weight": ((256, 1024), 14),
        "output_norm.weight": ((256,), 0),
    }
    return header(path, keys | changed, tensors)


def test_a_gguf_has_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    read = shape(q4(tmp_path / "m.gguf"))
    assert (read.layers, read.hidden, read.q_heads, read.kv_heads, read.head_dim) == (1, 256, 8, 2, 32)
    assert (read.ffn, read.vocab, read.gated, read.tied, read.max_tokens) == (512, 1024, True, False, 4096)
    q4_k, q6_k = 144 / 256, 210 / 256
    whole = 256 * 1024 * 2 + (2 * 65536 + 16384) * q4_k + 16384 * q6_k + 131072 * (2 * q4_k + q6_k) + 262144 * q6_k
    assert shapes.weight_bytes(read) == round(whole) + 3 * 256 * 2
    assert model_set(str(tmp_path / "m.gguf")).names == ("m/1",)


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00")
    (tmp_path / "b.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(UserError, match="no GGUF header"):
        shape(str(tmp_path / "a.gguf"))
    with pytest.raises(UserError, match="does not begin with GGUF"):
        shape(str(tmp_path / "b.gguf"))
    with pytest.raises(UserError, match=r"llama\.attention\.kv_lora_rank: no model"):
        shape(q4(tmp_path / "c.gguf", **{"llama.attention.kv_lora_rank": 64}))


def test_blocks_hold_their_bits_and_scales() -> None:
    """ggml-common.h: QK_K = 256 numbers in super-blocks, 32 in others; scales of 6 bits in 12 bytes, and halves."""
    numbers = {12: 4, 13: 5, 14: 6, 11: 3, 10: 2, 8: 8, 2: 4, 6: 5, 20: 4, 39: 4}
    scales = {12: 12 + 4, 13: 12 + 4, 14: 16 + 2, 11: 12 + 2, 10: 16 + 4, 8: 2, 2: 2, 6: 2, 20: 2, 39: 1}
    for kind, bits in numbers.items():
        block, size = gguf.TYPES[kind]
        assert size == block * bits // 8 + scales[kind]


def test_a_gguf_is_held_against_its_bytes(tmp_path: Path) -> None:
    whole = Path(q4(tmp_path / "m.gguf")).read_bytes()
    for keep, says in ((len(whole) - 1, "it is cut"), (200, "GGUF header"), (30, "GGUF header")):
        (tmp_path / "cut.gguf").write_bytes(whole[:keep])
        with pytest.raises(UserError, match=says):
            shape(str(tmp_path / "cut.gguf"))
    twice = whole.replace(b"ffn_gate", b"ffn_down")
    (tmp_path / "twice.gguf").write_bytes(twice)
    with pytest.raises(UserError, match="is there twice"):
        shape(str(tmp_path / "twice.gguf"))


@cases(
    ("changed", "says"),
    [
        ({"split.count": 3}, "one of 3 files"),
        ({"llama.block_count": 10**9}, "block_count is 1000000000"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "do not divide"),
        ({"llama.context_length": 0}, "context_length is 0"),
        ({"llama.embedding_length": 2**31}, "embedding_length"),
        ({"llama.feed_forward_length": 0}, "feed_forward_length is missing"),
        ({"general.alignment": 0}, "alignment"),
    ],
)
def test_a_gguf_of_sizes_that_cannot_be_is_one_line(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        shape(q4(tmp_path / "m.gguf", **changed))


@cases(
    ("dims", "says"),
    [((2**32,) * 4, "is cut|parameters"), ((1,) * 5, "5 dimensions"), ((3,), "whole blocks"), ((0,), "0 numbers")],
)
def test_a_tensor_that_cannot_be_is_named(dims: tuple[int, ...], says: str, tmp_path: Path) -> None:
    keys = {"general.architecture": "llama"}
    path = header(tmp_path / "m.gguf", keys, {"x": ((256,), 12)})
    data = Path(path).read_bytes()
    place = data.index(struct.pack("<IQ", 1, 256))
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    (tmp_path / "m.gguf").write_bytes(data[:place] + packed + data[place + 12 :])
    with pytest.raises(UserError, match=says):
        shape(path)
