"""The line of an answer that describes the server: its release, its settings, and the KV memory that they leave."""

from __future__ import annotations

from pathlib import Path

from harness.engines.costs import servers, shapes
from harness.policy import fields
from harness.policy.types import GIB
from harness.run.setup import SIMULATOR, Setup

SERIES = {"vllm": "vLLM", "sglang": "SGLang"}
SHORT = 10_000  # tokens from which on thousands are counted


def server_line(setup: Setup) -> str:
    """Return a line that describes the server: its release, its settings, and the KV memory that they leave.

    Example: `server: vLLM 0.15, 8,192 tokens a step, 1,024 sequences, 0.90: 3.1 GiB of KV, 44k tokens`. KV memory is
    that of a model alone on its GPUs. With several models, it is that of the model with room for the fewest tokens.
    """
    spec, its = setup.spec, setup.settings
    step = (
        f"{its.chunk_tokens:,} tokens a step"
        if its.chunk_tokens
        else f"whole prompts up to {its.prefill_tokens:,} tokens a step"
    )
    share = f"{its.mem_fraction:.3f}".removesuffix("0")
    memory = share if spec.pool_bytes is None else f"{spec.pool_bytes / GIB:.1f} GiB a GPU"
    line = f"server: {name(setup)}, {step}, {its.batch_cap:,} sequences, {memory}"
    return f"{line}: {kv}" if (kv := _kv(setup)) else line


def name(setup: Setup) -> str:
    """Return the name of the server: its release, or else its engine, its measured table or its host profile."""
    spec = setup.spec
    if fields.asked(spec.engine).name != SIMULATOR:
        return spec.engine
    if spec.table is not None and setup.measured:
        return f"as measured ({Path(spec.table).name})"
    if spec.host in servers.unnamed():
        return f"{spec.host} (no release)"
    series, _, version = spec.host.rpartition("-")
    return f"{SERIES.get(series, series)} {version}"


def _kv(setup: Setup) -> str:
    """Return in words the KV memory of the model with room for the fewest tokens; empty if a server sizes KV itself."""
    if fields.asked(setup.spec.engine).name != SIMULATOR:
        return ""
    room = []
    for member in setup.served.members:
        kv_bytes = max(setup.kv_bytes(member, kind.spec) for kind in setup.machine.all)
        room.append((kv_bytes // shapes.kv_token_bytes(member.shape, member.tp), kv_bytes, member))
    tokens, kv_bytes, member = min(room, key=lambda unit: unit[0])
    if tokens < 1:
        return f"no KV for {member.name}"
    many = f"{tokens / 1000:.0f}k" if tokens >= SHORT else f"{tokens:,}"
    unit = " a GPU" if member.tp > 1 else ""
    alone = "" if len(room) == 1 else f" for {member.name} alone, the fewest"
    return f"{kv_bytes / GIB:.1f} GiB of KV{unit}, {many} tokens{alone}"
