"""The kernels that serve models on cards, interpreted on an emulated one.

This runs behind test_kernels.py: what is interpreted once cannot be compiled in the same process any more.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("cuda.bindings.driver")

from harness.engines.torch import cuda, fused  # noqa: E402
from harness.validate import torch_scenarios  # noqa: E402
from harness.validate.torch_scenarios import SCENARIOS  # noqa: E402
from probe import kernels  # noqa: E402
from tests.gpu import emulated  # noqa: E402
from tests.gpu.test_kernels import cpu  # noqa: E402, F401 - a fixture
from tests.test_torch_logits import (  # noqa: E402
    checkpoints,  # noqa: F401 - a fixture
    compare,
    served,
)


class OneByOne:
    """An interpreted kernel: the interpreter is one for all threads."""

    lock = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **more: Any) -> None:
            with self.lock:
                self.kernel[grid](*args, **more)

        return launch


@pytest.mark.parametrize(("kind", "scenario"), [("Llama", "batched"), ("Qwen3", "attended elsewhere")])
@pytest.mark.usefixtures("cpu")
def test_kernels_in_bfloat16_give_nearly_those(
    kind: str, scenario: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    emulated.card(monkeypatch, "bfloat16")
    prompts, outputs = (9, 70), (4, 5)  # few, for a program of a kernel takes the interpreter milliseconds
    monkeypatch.setattr(torch_scenarios, "PROMPTS", prompts)
    monkeypatch.setattr(torch_scenarios, "OUTPUTS", outputs)
    scratch = fused.scratch
    monkeypatch.setattr(fused, "scratch", lambda kv, rows, sms: scratch(kv, rows, 1))  # a context is one part
    monkeypatch.setattr(cuda, "FIRST", 0)
    for name in ("decode", "merge", "add_norm", "rope_write", "silu_mul"):
        monkeypatch.setattr(kernels, name, OneByOne(getattr(kernels, name)))
    compare(served(checkpoints, kind, SCENARIOS[scenario], monkeypatch), checkpoints / kind)
