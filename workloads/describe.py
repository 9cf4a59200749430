"""Checkpoints of a folder, a line each: `python -m workloads.describe FOLDER|FILE ...`.

Every `config.json`, `*_config.json` and `.gguf` below a folder is read; one that is not understood gets a line, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.policy.parameters import kept_numbers, kv_numbers, parameters, stored_bytes
from harness.policy.types import Shape, UserError
from workloads import checkpoint

KV = {"bf16": 2, "fp8": 1}


def files(path: Path) -> Iterator[Path]:
    """Yield the checkpoint files anywhere below a folder, sorted by path. A file is yielded itself."""
    if path.is_dir():
        every = (*path.rglob("*config.json"), *path.rglob("*.gguf"))
        skip = ("generation_config.json", "quant_config.json", "tokenizer_config.json", "preprocessor_config.json")
        yield from sorted(file for file in every if not file.name.endswith(skip))
    else:
        yield path


def line(path: Path) -> str:
    """Return a line on a checkpoint: its parameters, weights, KV and formats, or why it is not understood."""
    try:
        return f"{path}: {words(checkpoint.read(str(path)))}"
    except UserError as error:
        text = str(error)
        return text if text.startswith(str(path)) else f"{path}: {text}"


def words(shape: Shape) -> str:
    """Describe a shape in a phrase: parameters, bytes, KV per token, experts, kinds of attention and formats."""
    count, moe = sum(parameters(shape)) / 1e9, shape.experts
    parts = [
        f"{count:.2f} B parameters",
        f"{stored_bytes(shape) / 1e9:.2f} GB",
        f"{KV[shape.kv_format] * kv_numbers(shape)} B of KV a token",
    ]
    if moe is not None:
        parts.append(f"{moe.top} of {moe.routed} experts in {moe.layers} of {shape.layers} layers")
    if shape.latent is not None:
        parts.append("latent attention")
    if shape.sliding is not None:
        left = KV[shape.kv_format] * kept_numbers(shape)
        parts.append(
            f"{shape.sliding.layers} sliding layers of {shape.sliding.tokens} tokens, beyond which {left} B stay"
        )
    if shape.formats is not None:
        parts.append("/".join(dict.fromkeys(entry.name for entry in shape.formats)))
    return ", ".join(parts)


def main(paths: Sequence[str]) -> int:
    """Print a line for each checkpoint in the paths; return exit code 0."""
    for path in paths:
        for file in files(Path(path)):
            print(line(file))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
