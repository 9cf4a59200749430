"""Checkpoints that cannot be: keys of a config and of files beside it, and headers of GGUF, odd one place at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import GONE, Changed, bits, changed, cuts, parts, written

DENSE: dict[str, Any] = json.loads("""{
"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
"intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 4096, "hidden_act": "silu",
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "model_type": "llama", "sliding_window": 128,
"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}""")
KINDS: Mapping[str, dict[str, Any]] = json.loads("""{
"dense": {},
"moe": {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
  "first_k_dense_replace": 1, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
"mla": {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
"gemma": {"model_type": "gemma4_text", "global_head_dim": 64, "num_global_key_value_heads": 1,
  "attention_k_eq_v": true, "enable_moe_block": true, "num_experts": 8, "top_k_experts": 2,
  "moe_intermediate_size": 128},
"seen": {"vision_config": {"hidden_size": 64, "depth": 2, "patch_size": 14, "mlp_ratio": 4.0,
  "intermediate_size": 128}},
"fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
  "ignored_layers": ["re:.*gate", "lm_head"]}},
"gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128,
  "dynamic": {"-:.*q_proj": {}}}},
"packed": {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:.*lm_head"],
  "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}},
"nvfp4": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]}}
}""")
SIZED = ("dense", "moe", "mla", "gemma")
DIMENSIONS = {key for name in SIZED for key, value in (DENSE | KINDS[name]).items() if type(value) is int}
WRONG: list[Any] = [-1, True, 1.5, [1], {"a": 1}, 10**9, 10**30, 1e300]  # whatever the dimension
ODD: list[Any] = [*WRONG, 0, "7", "", None, [], {}]
STEMS = ("model.safetensors.index", "hf_quant_config", "generation_config")
BESIDE = ["{", "[]", "3", '{"metadata": []}', '{"metadata": {"total_size": "x"}}', "[" * 5000, "\x00"]
BESIDE += ['{"quantization": []}', '{"quantization": {"quant_algo": 7}}', '{"top_p": "x"}']
_DEEP = "[" * 900 + "1" + "]" * 900
PATTERN = {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:(\\w+\\.?)+!"] * 500}}
TEXTS = {
    "deep": '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
    "none": "",
    "list": "[]",
    "NaN": '{"num_hidden_layers": NaN}',
    "digits": '{"num_hidden_layers": ' + "9" * 5000 + "}",
    "cut": json.dumps(DENSE)[:-9],
    "binary": "\x00\ud800",
    "deep unknown": json.dumps({**DENSE, "num_x": 7}).replace("7}", f"{_DEEP}}}"),
    "pattern": json.dumps(DENSE | PATTERN),
}


def _price(what: str, files: Mapping[str, str | bytes], name: str = "", *, accept: bool = True) -> Case:
    def put(here: Path) -> None:
        for file, content in files.items():
            written(file, content)(here)

    path = f"{{here}}/{name}".rstrip("/")
    return Case(f"checkpoints/{what}", ("price", f"{path}@h100", "--prompt", "64", "--output", "16"), "", accept, put)


def _configs(kind: str) -> st.SearchStrategy[Case]:
    def case(part: tuple[tuple[Any, ...], Any, Changed]) -> Case:
        place, other, (what, config) = part
        wrong = len(place) == 1 and place[0] in DIMENSIONS and repr(other) in map(repr, WRONG)
        return _price(f"{kind} {what}", {"config.json": json.dumps(config)}, accept=not wrong)

    known = DENSE | KINDS[kind]
    mine = (
        parts(known, ODD)
        if kind == "dense"
        else parts(KINDS[kind], ODD).map(lambda part: (part[0], part[1], (part[2][0], DENSE | part[2][1])))
    )
    return mine.map(case)


# ------------------------------------------------------------------ GGUF

Tensor = tuple[str, tuple[int, ...], int]
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
TENSORS: tuple[Tensor, ...] = (
    ("token_embd.weight", (256, 1024), 1),
    ("blk.0.attn_q.weight", (256, 256), 12),
    ("blk.0.ffn_up.weight", (256, 512), 12),
    ("blk.0.ffn_down.weight", (512, 256), 14),
    ("output.weight", (256, 1024), 14),
)
VALUES: list[Any] = [GONE, 0, 1, 2**31, 2**32 - 1, "", "x", ["a"], [], 1.5, True]
DATA = 1 << 20  # bytes behind the header


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


def _gguf(keys: Mapping[str, Any] = KEYS, tensors: Sequence[Tensor] = TENSORS, data: int = DATA) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(_text(key) + _value(of) for key, of in keys.items())
    for name, dims, kind in tensors:
        out += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
    return out + bytes(data)


WHOLE = _gguf()
FILES: Mapping[str, bytes] = {
    "no tensors": _gguf(tensors=()),
    "a tensor twice": _gguf(tensors=(*TENSORS, TENSORS[0])),
    "no data": _gguf(data=0),
    "2^128 numbers": _gguf(tensors=[("x", (2**32,) * 4, 1)]),
    "many dimensions": _gguf(tensors=[("x", (1,) * 100_000, 1)]),
    "a type": _gguf(tensors=[("x", (256,), 99)]),
    "blocks": _gguf(tensors=[("x", (3,), 12)]),
    "counts": WHOLE[:8] + struct.pack("<QQ", 2**63, 2**63) + WHOLE[24:],
    "a long text": WHOLE[:24] + struct.pack("<Q", 2**62) + WHOLE[32:],
    "version": WHOLE[:4] + b"\x09" + WHOLE[5:],
}


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw prices of such checkpoints."""
    keyed = st.builds(
        lambda key, value: (f"{key} {str(value)[:8]!r}", _gguf(changed(KEYS, (key,), value))),
        st.sampled_from([*KEYS]),
        st.sampled_from(VALUES),
    )
    head = len(WHOLE) - DATA
    ggufs = st.one_of(keyed, bits(WHOLE, head), cuts(WHOLE[: head + 1]), st.sampled_from([*FILES.items()]))
    texts = [_price(f"text {name}", {"config.json": text}, accept=name == "pattern") for name, text in TEXTS.items()]
    texts += [
        _price(f"{stem} {text!r:.40}", {"config.json": json.dumps(DENSE), f"{stem}.json": text})
        for stem in STEMS
        for text in BESIDE
    ]
    configs = [*map(_configs, KINDS)]
    gguf = ggufs.map(lambda of: _price(f"gguf {of[0]}", {"m.gguf": of[1]}, "m.gguf"))
    return st.one_of(*configs, *[configs[0]] * 3, gguf, gguf, gguf, gguf, st.sampled_from(texts))
