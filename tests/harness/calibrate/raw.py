"""Raw lines of a made-up card whose every time a cost table tells: what `make gpu` would write there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibrate import card
from harness.engines.costs import kernels, quantities

SIZES = {"1B": (3072, 2048, 8192), "3B": (5120, 3072, 8192), "8B": (6144, 4096, 14336)}  # qkv, hidden, ffn
GEMMS = {
    name: {"qkv": (qkv, h), "o": (h, h), "gate_up": (2 * ffn, h), "down": (h, ffn), "head": (128256, h)}
    for name, (qkv, h, ffn) in SIZES.items()
}
HEADS = {"1B": (32, 8, 64), "3B": (24, 8, 128), "8B": (32, 8, 128)}
SHARES = (132, 96, 64, 48, 32, 16)
HOST = {"call": 1, "name": "NVIDIA H200", "short": "h200", "sms": 132, "cuda": "13.0", "driver": 13000}


def lines(q: Mapping[str, Any], spec: quantities.GpuSpec, noise: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield one line a measurement of the probes that a table is fitted on, each `noise` (1 sigma) off."""
    rng = np.random.default_rng(0)

    def line(
        probe: str, what: str, seconds: Any, sms: int | None, params: dict[str, Any], **facts: float
    ) -> dict[str, Any]:
        s = float(seconds) * float(np.exp(noise * rng.standard_normal()))
        base = {"quantity": what, "at": params, "seconds": s, "n": 9, "source": probe, "min": s, "p95": s}
        return {**base, "sms": sms, "facts": facts, "call": 1, "t": 0.0}

    def part(sms: int) -> kernels.Part:
        return kernels.WHOLE if sms == 132 else kernels.part_of(q["share"], np.array(sms / 132))

    for (model, named), m, sms in product(GEMMS.items(), (1, 8, 32, 64, 128, 256, 512, 2048, 8192), SHARES):
        for name, (n, k) in named.items():
            if m <= 256 or (name != "head" and sms == 132):
                params = {"of": f"{model}.{name}", "m": m, "n": n, "k": k, "ask": sms, "target": 0}
                taken, size = kernels.gemm_s(q["gemm"], spec, m, n, k, part(sms)), 2 * (m * k + n * k + m * n)
                yield line("gemm", "gemm", taken, sms, params, bytes=size, flops=2 * m * n * k)
    points = [(1, 8192), (8, 2048), (64, 2048), (128, 1024), (1, 512), (16, 512), (64, 256), (256, 512)]
    for model, (B, ctx), sms in product(("8B", "1B"), points, SHARES):
        heads, kv, d = HEADS[model]
        params = {"of": model, "B": B, "ctx": ctx, "heads": heads, "kv": kv, "d": d, "ask": sms}
        params |= {"splits": 0, "stages": 7, "page": 0}
        taken = kernels.decode_s(q["decode"], spec, B, ctx, heads, kv, d, part(sms))
        yield line("attention", "attention", taken, sms, params, bytes=4 * B * ctx * kv * d)
    for model, tokens, sms in product(HEADS, (128, 512, 2048, 8192), (132, 96, 64, 32)):
        if sms == 132 or model == "8B":
            heads, kv, d = HEADS[model]
            params = {"of": model, "tokens": tokens, "heads": heads, "kv": kv, "d": d, "ask": sms, "backend": "flash"}
            taken = kernels.prefill_s(q["prefill"], spec, 1, tokens, heads, kv, d, part(sms))
            yield line("prefill", "prefill_attention", taken, sms, params)
    for model, m in product(("8B", "1B"), (1, 64, 256, 2048, 8192)):
        taken = kernels.small_s(q["small"], spec, card.SHAPES[model], 1, np.array(float(m)))
        yield line("step", "small", taken, 132, {"of": model, "m": m})
    for what in ("h2d", "d2h"):
        yield line("copies", what, (1 << 30) / 50e9, None, {"chunk": 64 << 20, "beside": ""}, bytes=1 << 30)
    acts = ("decode1", "decode64", "prefill", "h2d", "d2h", "churn")
    for mode, victim, other in product(("plain", "split"), acts, ("", *acts)):
        params = {"victim": victim, "other": other, "mode": mode, "of": "8B"}
        facts = {"other_s": 0.006} if other else {}
        yield line("interfere", "unit", 0.004 * (1.5 if other else 1.0), 132, params, units=50, **facts)
    calls = {"create": 2e-4, "map": 2e-6, "allow": 4e-5, "unmap": 3e-5, "release": 1e-5}
    for mib, (what, s) in product((2, 16, 64, 256), calls.items()):
        yield line("vmm", what, s * mib / 2, None, {"size": mib << 20})


def write(folder: Path, q: Mapping[str, Any], noise: float = 0.0) -> Path:
    """Write a folder of results as `make gpu` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = [{"source": name, "state": "done", "s": 1.0, "call": 1, "t": 0.0} for name in ("gemm", "attention")]
    ends.append({"source": "hole", "state": "fault", "why": "killed by signal 6", "s": 1.0, "call": 1, "t": 0.0})
    text = "".join(json.dumps(line) + "\n" for line in [*lines(q, quantities.gpu("h200"), noise), *ends])
    (folder / "raw.jsonl").write_text(text, encoding="utf-8")
    host = {**HOST, "packages": {"torch": "2.11.0"}}
    (folder / "host.json").write_text(json.dumps({"calls": [host]}), encoding="utf-8")
    return folder
