"""The start of a user's own vLLM server: its weights and KV memory, as logged and as simulated.

A log states the server's release, model, formats, tensor parallel degree, and the settings that were not the defaults.
From these the simulator computes the weights. If the user names a card, it also computes the KV memory that the weights
leave on this card. Settings that a log does not state are the release's defaults (`engines/costs/servers.toml`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines import machine
from harness.engines.costs import quantities, servers, shapes
from harness.engines.machine import Config, Served
from harness.policy.types import GIB, Shape, UserError
from harness.validate import names

NONE = "-"
BLOCK_TOKENS = 16  # vllm/config/cache.py, CacheConfig.DEFAULT_BLOCK_SIZE
MOST_BYTES = 64 << 20  # a larger log is refused
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ENGINE = re.compile(r"Initializing an? (?:V\d )?LLM engine \(v([\d.]+)[^)]*\) with config: (.*)")
STATED = re.compile(r"non-default args: (\{.*\})")
WEIGHTS = re.compile(r"(?:Model loading took|Loading model weights took) (-?[\d.]+) (?:GiB|GB)")
KV = re.compile(r"(?:Available KV cache memory: (?=-?[\d.]+ GiB)|Explicitly set \((?=[\d.]+/))(-?[\d.]+)")  # GPU, CPU
TOKENS = re.compile(r"(?:GPU|CPU)? ?KV cache size: ([\d,]+) tokens")
BLOCKS = re.compile(r"# (?:GPU|CUDA|cuda|CPU|cpu) blocks: (\d+)")
PAIR = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|[^,\s]+)(?=,|\s|$)")  # matches a pair of the engine's config
# Options of vLLM, each with the type of its value, by the fields of a spec.
OPTIONS: Mapping[str, tuple[str, type]] = {
    "chunk_tokens": ("max_num_batched_tokens", int),
    "batch_cap": ("max_num_seqs", int),
    "mem_fraction": ("gpu_memory_utilization", float),
}
NUMBERS = {**dict(OPTIONS.values()), "kv_cache_memory_bytes": int, "block_size": int}  # options that are read
FORMATS = {"fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4"}
SIXTEEN = frozenset({"torch.bfloat16", "torch.float16", "bfloat16", "float16"})


class Start(NamedTuple):
    """The start of a server, as its log states it; None for a value that no line states."""

    version: str
    model: str
    tp: int
    dtype: str
    kv_dtype: str
    quantization: str
    longest: int  # tokens of the longest request, max_model_len
    device: str
    stated: Mapping[str, Any]  # settings that are not the defaults, by the names of vLLM's options
    weights_gib: float | None
    kv_gib: float | None
    tokens: int | None
    blocks: int | None

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a KV block: as the log states them, else 16 on a GPU.

        None on a CPU, whose backend chooses a size that no line names.
        """
        stated = self.stated.get("block_size")
        return int(stated) if stated else None if self.device == "cpu" else BLOCK_TOKENS

    @property
    def name(self) -> str:
        """The release, by its first two numbers: vllm-0.15."""
        return f"vllm-{'.'.join(self.version.split('.')[:2])}"


def read(path: Path) -> Start:
    """Read the start-up log of a vLLM server. Raises UserError, which names the file, if it is not such a log."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(
                f"{path}: {path.stat().st_size >> 20} MiB; the start is within the first {MOST_BYTES >> 20}"
            )
        text = COLOURS.sub("", path.read_text("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    engine = ENGINE.search(text)
    if engine is None:
        raise UserError(
            f'{path}: no start of vLLM here (a line "Initializing a V1 LLM engine (v...) with config: ...")'
        )
    config = {key: value.strip("'\"") for key, value in PAIR.findall(engine[2])}
    return Start(
        engine[1],
        _value(path, config, "model"),
        _count(path, config, "tensor_parallel_size"),
        _value(path, config, "dtype"),
        config.get("kv_cache_dtype", "auto"),
        config.get("quantization", "None"),
        _count(path, config, "max_seq_len"),
        config.get("device_config", "cuda"),
        _stated(path, text),
        _first(WEIGHTS, text),
        _first(KV, text),
        *(None if (number := _first(form, text)) is None else int(number) for form in (TOKENS, BLOCKS)),
    )


def _value(path: Path, config: Mapping[str, str], key: str) -> str:
    if key not in config:
        raise UserError(f"{path}: the line of the engine's config has no {key}")
    return config[key]


def _count(path: Path, config: Mapping[str, str], key: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,9}", text := _value(path, config, key)):
        raise UserError(f"{path}: {key} is {text[:60]}, not a count")
    return int(text)


def _first(form: re.Pattern[str], text: str) -> float | None:
    """Return the number in the first match of `form`; None if nothing matches."""
    return None if (match := form.search(text)) is None else float(match[1].replace(",", ""))


def _stated(path: Path, text: str) -> Mapping[str, Any]:
    match = STATED.search(text)
    if match is None:
        return {}
    try:
        stated = ast.literal_eval(match[1])
    except (SyntaxError, ValueError):
        stated = None
    if not isinstance(stated, dict):
        raise UserError(f"{path}: its non-default args are no dictionary: {match[1][:60]}")
    for name, kind in NUMBERS.items():
        value = stated.get(name)
        if value is not None and not (type(value) in {kind, int} and value > 0):
            raise UserError(f"{path}: {name} is {value!r}, not a number above 0")
    return dict(stated)


class Ours(NamedTuple):
    """A server's start in the simulator; if no card is given, settings and KV memory are None."""

    weights_gib: float
    kv_token_bytes: int  # on each GPU
    settings: servers.Settings | None
    kv_gib: float | None


def ours(start: Start, model: str | None = None, gpu: str | None = None) -> Ours:
    """Return the simulator's weights for a start and, if `gpu` is given, its settings and KV memory.

    `model` replaces the model that the log states. Raises UserError for an unknown model, card or release.
    """
    shape = _shape(start, model)
    weights = shapes.weight_bytes(shape, start.tp)
    token = shapes.kv_token_bytes(shape, start.tp)
    if gpu is None:
        return Ours(weights / GIB, token, None, None)
    card = quantities.gpu(names.gpu(gpu))
    settings = servers.settings(start.name, card, start.tp, lambda: start.longest)
    told = {ours: start.stated[theirs] for ours, (theirs, _) in OPTIONS.items() if start.stated.get(theirs)}
    settings = settings._replace(**told)
    config = Config((Served("m", shape, start.tp),), gpu=card.kind, gpus=start.tp, **settings._asdict())
    held = machine.memory(config, card)
    kv_bytes = held.gpu_bytes - held.process_bytes[0] - weights
    kv_bytes = start.stated.get("kv_cache_memory_bytes") or kv_bytes
    return Ours(weights / GIB, token, settings, kv_bytes / GIB)


def _shape(start: Start, model: str | None) -> Shape:
    from workloads.models import parsed, shape

    text = model or (start.model if Path(start.model).exists() else names.model(start.model))
    if parsed(text).dtype is None and start.quantization in FORMATS and shape(text).formats is None:
        text += f":dtype={FORMATS[start.quantization]}"
    if parsed(text).kv_dtype is None and start.kv_dtype.startswith("fp8"):
        text += ":kv_dtype=fp8"
    if start.dtype not in SIXTEEN:
        raise UserError(
            f"dtype is {start.dtype}: the simulator's 16-bit formats have 2 bytes a number (--dtype bfloat16)"
        )
    its = shape(text)
    return its._replace(max_tokens=min(its.max_tokens, start.longest))


def heads(start: Start, of: Ours, gpu: str | None) -> Iterator[str]:
    """Yield the lines above the table: the server, and the settings that are simulated."""
    where = f"{start.tp} x {names.gpu(gpu)}" if gpu else start.device
    stated = " ".join(f"{name}={start.stated[name]}" for name in NUMBERS if start.stated.get(name))
    yield (
        f"vLLM {start.version}, {start.model} on {where}, requests up to {start.longest:,} tokens, "
        f"{stated or 'all settings the defaults of the release'}"
    )
    if of.settings is not None:
        s = of.settings
        step = f"{s.chunk_tokens:,}" if s.chunk_tokens else f"whole prompts up to {s.prefill_tokens:,}"
        yield f"simulated with {step} tokens a step, {s.batch_cap:,} sequences, {s.mem_fraction:g} of the card"


def notes(of: Ours) -> Iterator[str]:
    """Yield the notes to print below the table."""
    if of.kv_gib is None:
        yield "KV tokens and blocks: of the log's own KV memory; --gpu KIND compares what a card's memory leaves"


def rows(start: Start, of: Ours) -> Iterator[tuple[str, ...]]:
    """Yield the table's heading, and its rows: the log's value, the simulator's, and the simulator's error in %."""
    yield "", "log", "simulator", "error %"
    pool = start.kv_gib if of.kv_gib is None else of.kv_gib
    tokens = None if pool is None else int(pool * GIB / of.kv_token_bytes)
    size, theirs, blocks = start.block_tokens, start.tokens, start.blocks
    if size is not None:
        theirs = blocks * size if theirs is None and blocks is not None else theirs
        blocks = theirs // size if blocks is None and theirs is not None else blocks
    yield _row("weights GiB a GPU", start.weights_gib, of.weights_gib, 2)
    yield _row("KV GiB a GPU", start.kv_gib, of.kv_gib, 2)
    yield _row("KV tokens", theirs, tokens, 0)
    if size is not None:
        yield _row(f"KV blocks of {size}", blocks, None if tokens is None else tokens // size, 0)


def _row(name: str, theirs: float | None, mine: float | None, digits: int) -> tuple[str, ...]:
    error = NONE if not theirs or mine is None else f"{100 * (mine / theirs - 1):+.1f}"
    return (name, *(NONE if x is None else f"{x:,.{digits}f}" for x in (theirs, mine)), error)
