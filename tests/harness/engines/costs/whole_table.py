"""A table of a machine that was measured whole, small enough to reckon with by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.calibrate.tables import dumps
from harness.engines.costs import quantities

MODEL = "llama-tiny"
SAID = {"source": "by hand", "formula": "a line"}
# 2 ms a step and 1 ms a token of it up to 8, half a ms beyond; 1/4 ms a sequence, 1/64 ms a token of context, and
# 1/1024 ms for each token before each token of a prompt.
STEPS = {
    "tokens": [1, 8, 512],
    "seconds": [0.003, 0.010, 0.262],
    "seq_s": 0.00025,
    "ctx_s": 2**-6 * 1e-3,
    "area_s": 2**-10 * 1e-3,
    **SAID,
}


def beside(share: float, factor: float) -> dict[str, dict[str, Any]]:
    """Return [co_run]; decode steps and those with prefill disturb others alike."""
    return {phase: {"share": share, "factor": factor, **SAID} for phase in ("prefill", "decode")}


def file(**changed: Any) -> dict[str, Any]:
    """Return the table; `changed` sections stand in for its own."""
    numbers = dict.fromkeys(quantities.GpuSpec._fields[2:], 1e8) | {"mem_bytes": 1 << 30, "sms": 2, "sm_step": 2}
    return {
        "kind": "desk",
        "name": "a desk",
        "settings": {"block_tokens": 256, "batch_cap": 4, "pool_bytes": 1 << 28, "sharing": "fluid"},
        "spec": {name: {"value": value, "source": "by hand"} for name, value in numbers.items()},
        "host": {"api_in_s": 0.0005, "sigma": 0.0, **SAID},
        "steps": {MODEL: STEPS},
        "co_run": beside(1.0, 1.5),
        "ladder": {
            "host": {"fixed_s": 0.5, "link": "disk", "source": "by hand"},
            "cold": {"fixed_s": 0.5, "link": "disk", "source": "by hand"},
        },
    } | changed


def write(folder: Path, **changed: Any) -> str:
    """Write the table as a file; return its path."""
    quantities.forget()
    path = folder / "desk.toml"
    path.write_text(dumps(file(**changed)))
    return str(path)
