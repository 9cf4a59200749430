"""Checkpoints made here, without a download of weights: folders for vLLM and SGLang, GGUF files for llama.cpp.

A folder has no weights, and the server draws them; a GGUF has random weights. Both have the dimensions of a `Shape`:
servers run real kernels and generate noise. Checkpoints are cached under a hash of their contents, and are written
whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from harness.engines.costs import shapes
from harness.engines.servers import gguf
from harness.policy.types import Shape, UserError

TINY = Shape("llama-tiny", 4, 256, 4, 4, 64, 1024, 1000, gated=True, tied=False, max_tokens=4096)
SMALL_BYTES = 64 << 20  # weights up to this size are served on a host as they are
FORMAT = 1  # is hashed too: another number makes new files


def on_host(shape: Shape) -> Shape:
    """Return the shape that is served in place of `shape` on a host without cards.

    The result is `shape` itself if its weights take at most SMALL_BYTES, else TINY.
    """
    return shape if shapes.weight_bytes(shape) <= SMALL_BYTES else TINY


def dummy(shape: Shape, cache: Path) -> Path:
    """Return a Hugging Face folder of a Llama without weights (`--load-format dummy`); the first call writes it.

    The folder has a config and a tokenizer of words.
    """
    _check(shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_tokens,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    special = ["<unk>", "<s>", "</s>"]
    words = {**{word: k for k, word in enumerate(special)}, **{f"w{k}": k for k in range(3, shape.vocab)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": k, "content": word, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for k, word in enumerate(special)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_tokens,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": named}
    to = cache / f"llama-{_hash(files)}"
    if not to.is_dir():
        begun = cache / f"{to.name}.{secrets.token_hex(4)}"
        begun.mkdir(parents=True)
        for name, content in files.items():
            (begun / name).write_text(json.dumps(content))
        try:
            begun.rename(to)
        except OSError:  # another process was first
            shutil.rmtree(begun)
    return to


def weights(shape: Shape, cache: Path, python: Path, seed: int = 0) -> Path:
    """Return a GGUF file of random weights; the first call writes it, by an interpreter with the package `gguf`."""
    _check(shape)
    if shape.vocab <= gguf.RESERVED:
        raise UserError(f"a GGUF needs more than {gguf.RESERVED} tokens of vocabulary, {shape.name} has {shape.vocab}")
    fields = {name: x for name, x in shape._asdict().items() if name not in {"name", "sampled"}} | {"seed": seed}
    to = cache / f"llama-{_hash(fields)}.gguf"
    if not to.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-I", gguf.__file__, str(to), json.dumps(fields)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise UserError(f"{python} could not write {to}: {(run.stderr.strip() or 'no message').splitlines()[-1]}")
    return to


def _check(shape: Shape) -> None:
    if (lacking := shapes.beyond_dense(shape)) is not None:
        raise UserError(f"{shape.name} has {lacking}: a dense Llama in bf16, which stands for it, has not")
    if not shape.gated:
        raise UserError(f"{shape.name} has no gate in its FFN: a Llama, which stands for it, has one")


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, content], sort_keys=True).encode()).hexdigest()[:12]
