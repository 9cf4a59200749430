"""The engine's CUDA device on an emulated card: what a request goes through, and the logits that come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("cuda.bindings.driver")

from harness.engines.torch import cuda  # noqa: E402
from harness.engines.torch.nets import prompt_ids  # noqa: E402
from probe import kernels  # noqa: E402
from tests import test_torch_logits  # noqa: E402
from tests.gpu import emulated  # noqa: E402
from tests.gpu.test_kernels import cpu  # noqa: E402, F401 - a fixture
from tests.test_torch_logits import (  # noqa: E402
    SCENARIOS,
    SIZES,
    checkpoints,  # noqa: F401 - a fixture
    compare,
    served,
)

NEAR = 0.05  # of the logits together: bfloat16 has 8 bits, and errors of three layers add up


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


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated.Memory]:
    """Serve on an emulated card; every page that was mapped was open."""
    memory = emulated.card(monkeypatch, "float32")
    yield memory
    assert not memory.shut


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("card")
def test_logits_are_those_of_transformers(name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    compare(served(checkpoints, "Llama", SCENARIOS[name], monkeypatch), checkpoints / "Llama")


@pytest.mark.parametrize(("kind", "scenario"), [("Llama", "batched"), ("Qwen3", "attended elsewhere")])
@pytest.mark.usefixtures("cpu")
def test_kernels_in_bfloat16_give_nearly_those(
    kind: str, scenario: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    emulated.card(monkeypatch, "bfloat16")
    prompts, outputs = (9, 70), (4, 5)  # few, for a program of a kernel takes the interpreter milliseconds
    monkeypatch.setattr(test_torch_logits, "PROMPTS", prompts)
    monkeypatch.setattr(test_torch_logits, "OUTPUTS", outputs)
    scratch = cuda.scratch
    monkeypatch.setattr(cuda, "scratch", lambda kv, rows, sms: scratch(kv, rows, 1))  # a context is one part
    monkeypatch.setattr(cuda, "FIRST", 0)
    for name in ("decode", "merge", "add_norm", "rope_write", "silu_mul"):
        monkeypatch.setattr(kernels, name, OneByOne(getattr(kernels, name)))
    engine = served(checkpoints, kind, SCENARIOS[scenario], monkeypatch)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / kind, dtype=torch.bfloat16).float()
    assert engine.logits is not None
    for rid, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        mine = np.stack(engine.logits[rid])
        assert len(mine) == output
        ids = [*prompt_ids(rid, 0, prompt, SIZES["vocab_size"]).tolist(), *mine.argmax(-1).tolist()]
        with torch.inference_mode():
            whole = reference(torch.tensor([ids])).logits[0, prompt - 1 : -1].numpy()
        assert np.linalg.norm(mine - whole) < NEAR * np.linalg.norm(whole)
