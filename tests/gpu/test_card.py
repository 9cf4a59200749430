"""The engine's CUDA device on an emulated card: what a request goes through, and the logits that come out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("cuda.bindings.driver")

from harness.engines.torch import cuda  # noqa: E402
from harness.engines.torch.nets import prompt_ids  # noqa: E402
from tests.gpu import emulated  # noqa: E402
from tests.gpu.test_kernels import cpu  # noqa: E402, F401 - a fixture
from tests.test_torch_logits import (  # noqa: E402
    OUTPUTS,
    PROMPTS,
    SCENARIOS,
    SIZES,
    checkpoints,  # noqa: F401 - a fixture
    compare,
    served,
)

NEAR = 0.06  # of the largest logit: bfloat16 has 8 bits, and errors of three layers add up


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


@pytest.mark.parametrize(("kind", "name"), [("Llama", "batched"), ("Qwen3", "attended elsewhere")])
@pytest.mark.usefixtures("cpu")
def test_kernels_in_bfloat16_give_nearly_those(
    kind: str, name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    emulated.card(monkeypatch, "bfloat16")
    scratch = cuda.scratch
    monkeypatch.setattr(cuda, "scratch", lambda kv, rows, sms: scratch(kv, rows, 1))  # a context is one part: fewer programs
    engine = served(checkpoints, kind, SCENARIOS[name], monkeypatch)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / kind, dtype=torch.float32)
    assert engine.logits is not None
    for rid, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        mine = np.stack(engine.logits[rid])
        assert len(mine) == output
        ids = [*prompt_ids(rid, 0, prompt, SIZES["vocab_size"]).tolist(), *mine.argmax(-1).tolist()]
        with torch.inference_mode():
            whole = reference(torch.tensor([ids])).logits[0, prompt - 1 : -1].numpy()
        assert np.abs(mine - whole).max() < NEAR * np.abs(whole).max()
