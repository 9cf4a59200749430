"""Checkpoints that cannot be: keys of a config and of files beside it, and headers of GGUF, odd one place at a time."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case

DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
    "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
MOE = {
    **DENSE,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
MLA = {**DENSE, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
GEMMA = {
    **DENSE,
    "model_type": "gemma4_text",
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
}
QUANTISED = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["re:.*gate", "lm_head"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*q_proj": {}}},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
        "ignore": ["re:.*lm_head"],
    },
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]},
]
SEEN = {"vision_config": {"hidden_size": 64, "depth": 2, "patch_size": 14, "mlp_ratio": 4.0, "intermediate_size": 128}}
DIMENSIONS = {key for key, value in (DENSE | MOE | MLA | GEMMA).items() if type(value) is int}
WRONG = {repr(odd) for odd in (-1, True, 1.5, [1], {"a": 1}, 10**9, 10**30, 1e300)}  # whatever the dimension
BESIDE = (
    "{",
    "[]",
    "3",
    '{"metadata": []}',
    '{"metadata": {"total_size": "x"}}',
    "[" * 5000,
    "\x00",
    '{"quantization": []}',
    '{"quantization": {"quant_algo": 7}}',
    '{"top_p": "x"}',
)
ODD: tuple[Any, ...] = (0, -1, True, 1.5, "7", "", None, [], [1], {}, {"a": 1}, 10**9, 10**30, 1e300)


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield prices of such checkpoints."""
    configs: list[tuple[str, dict[str, Any]]] = [
        ("dense", DENSE),
        ("moe", MOE),
        ("mla", MLA),
        ("gemma", GEMMA),
        ("seen", {**DENSE, **SEEN}),
    ]
    configs += [(f"quant{k}", {**DENSE, "quantization_config": each}) for k, each in enumerate(QUANTISED)]
    number = 0
    for name, config in configs:
        for place in _places(config):
            some = ODD if len(place) == 1 and name in {"dense", "moe"} else draw.sample(ODD, 4)
            if name not in {"dense"} and place[0] in DENSE:
                continue
            for odd in some:
                number += 1
                wrong = len(place) == 1 and place[0] in DIMENSIONS and repr(odd) in WRONG
                what = f"{name} {'.'.join(map(str, place))} {json.dumps(odd)[:14]}"
                (folder := here / f"{number:04d}").mkdir()
                (folder / "config.json").write_text(json.dumps(_put(config, place, odd)))
                yield _price(what, folder, accept=not wrong)
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    texts = {
        "deep": '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
        "none": "",
        "list": "[]",
        "NaN": '{"num_hidden_layers": NaN}',
        "digits": '{"num_hidden_layers": ' + "9" * 5000 + "}",
        "cut": json.dumps(DENSE)[:-9],
        "binary": "\x00\ud800",
        "deep unknown": json.dumps({**DENSE, "num_x": deep}),
        "pattern": json.dumps(
            {**DENSE, "quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:(\\w+\\.?)+!"] * 500}}
        ),
    }
    for name, text in texts.items():
        (folder := here / f"text {name}").mkdir()
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        yield _price(f"text {name}", folder, accept=name == "pattern")
    for stem in ("model.safetensors.index", "hf_quant_config", "generation_config"):
        for k, text in enumerate(BESIDE):
            (folder := here / f"{stem}-{k}").mkdir()
            (folder / "config.json").write_text(json.dumps(DENSE))
            (folder / f"{stem}.json").write_text(text)
            yield _price(f"{stem} {k}", folder)
    yield from _ggufs(here, draw)


def _price(name: str, path: Path, *, accept: bool = True) -> Case:
    argv = ("price", f"{path}@h100", "--prompt", "64", "--output", "16")
    return Case(f"checkpoints/{name}", argv, accept=accept)


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from _places(inner, (*before, key))


def _put(config: Any, place: tuple[Any, ...], odd: Any) -> dict[str, Any]:
    copy = deepcopy(config)
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return dict(copy)


# ------------------------------------------------------------------ GGUF

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 256,
    "llama.context_length": 4096,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 512,
    "llama.attention.key_length": 32,
    "tokenizer.ggml.tokens": ["a"] * 1024,
    "general.alignment": 32,
    "split.count": 1,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
}
TENSORS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("token_embd.weight", (256, 1024), 1),
    ("blk.0.attn_q.weight", (256, 256), 12),
    ("blk.0.ffn_up.weight", (256, 512), 12),
    ("blk.0.ffn_down.weight", (512, 256), 14),
    ("output.weight", (256, 1024), 14),
)
VALUES: tuple[Any, ...] = (0, 1, 2**31, 2**32 - 1, "", "x", ["a"], [], 1.5, True)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case _:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))


def _gguf(
    keys: Mapping[str, Any], tensors: tuple[tuple[str, tuple[int, ...], int], ...] = TENSORS, data: int = 1 << 20
) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(_text(key) + _value(of) for key, of in keys.items())
    for name, dims, kind in tensors:
        out += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
    return out + bytes(data)


def _ggufs(here: Path, draw: random.Random) -> Iterator[Case]:
    whole = _gguf(KEYS)
    head = len(whole) - (1 << 20)
    files: dict[str, bytes] = {
        **{f"{key} {str(value)[:8]!r}": _gguf(KEYS | {key: value}) for key in KEYS for value in VALUES},
        **{f"without {key}": _gguf({k: v for k, v in KEYS.items() if k != key}) for key in KEYS},
        "no tensors": _gguf(KEYS, ()),
        "a tensor twice": _gguf(KEYS, (*TENSORS, TENSORS[0])),
        "no data": _gguf(KEYS, data=0),
        "2^128 numbers": _gguf(KEYS, (("x", (2**32,) * 4, 1),)),
        "many dimensions": _gguf(KEYS, (("x", (1,) * 100_000, 1),)),
        "a type": _gguf(KEYS, (("x", (256,), 99),)),
        "blocks": _gguf(KEYS, (("x", (3,), 12),)),
        "counts": whole[:8] + struct.pack("<QQ", 2**63, 2**63) + whole[24:],
        "a long text": whole[:24] + struct.pack("<Q", 2**62) + whole[32:],
        "version": whole[:4] + b"\x09" + whole[5:],
        **{f"cut at {at}": whole[:at] for at in (0, 3, 4, 8, 23, 24, 100, head // 2, head - 1, head, len(whole) - 1)},
    }
    for k in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(head)] ^= 1 << draw.randrange(8)
        files[f"bit {k}"] = bytes(damaged)
    for number, (name, data) in enumerate(files.items()):
        (path := here / f"m{number:03d}.gguf").write_bytes(data)
        yield _price(f"gguf {name}", path)
