"""Write a Llama of random weights as GGUF, which llama.cpp serves where no weights may be downloaded.

The interpreter of llama.cpp's environment runs this file by its path, so it imports nothing of ours:

    .venv-llamacpp/bin/python -I harness/engines/servers/gguf.py OUT.gguf '{"layers": 4, "hidden": 256, ...}'

The keys are those of `Shape`, and a seed. The tokenizer has `<unk>`, `<s>`, `</s>`, the 256 bytes that llama.cpp asks
for, and words. Rows of the output matrix are zero for all tokens but the words, so that greedy decoding generates only
words. Bytes would be held back until they make a character, and several would come in one chunk.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

RESERVED = 3 + 256  # ids below are special tokens and bytes; words follow


def write(path: Path, shape: dict[str, Any], seed: int) -> None:
    """Write a GGUF file under a temporary name and rename it to `path` at the end, so that no partial file appears."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(seed)
    layers, hidden, head_dim, vocab = shape["layers"], shape["hidden"], shape["head_dim"], shape["vocab"]
    q_size, kv_size = shape["q_heads"] * head_dim, shape["kv_heads"] * head_dim
    begun = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    out = gguf.GGUFWriter(begun, "llama")
    facts = {
        "context_length": shape["max_tokens"],
        "block_count": layers,
        "embedding_length": hidden,
        "feed_forward_length": shape["ffn"],
        "head_count": shape["q_heads"],
        "head_count_kv": shape["kv_heads"],
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": head_dim,
        "rope_freq_base": 10_000.0,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": vocab,
        "tokenizer_model": "llama",
    }
    for name, value in facts.items():
        getattr(out, f"add_{name}")(value)
    words = [f"\u2581w{k}" for k in range(RESERVED, vocab)]
    out.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    out.add_token_scores([0.0] * vocab)
    kinds = gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL
    out.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * len(words)])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_bos_token(False)  # prompts are lists of ids of exact length

    def matrix(rows: int, columns: int) -> Any:
        return (0.05 * rng.standard_normal((rows, columns), dtype=np.float32)).astype(np.float16)

    ones = np.ones(hidden, np.float32)
    embedding = matrix(vocab, hidden)
    head = embedding if shape["tied"] else matrix(vocab, hidden)
    head[:RESERVED] = 0.0
    out.add_tensor("token_embd.weight", embedding)
    out.add_tensor("output_norm.weight", ones)
    if not shape["tied"]:
        out.add_tensor("output.weight", head)
    sizes = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_gate": (shape["ffn"], hidden),
        "ffn_up": (shape["ffn"], hidden),
        "ffn_down": (hidden, shape["ffn"]),
    }
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, (rows, columns) in sizes.items():
            out.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, columns))
    try:
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[2])["seed"])
