"""Logits of the engine on the processor beside those of `transformers`, whatever happens to a request on its way.

The checkpoints are small and drawn here. What is compared is what a worker computed from the pages that it had mapped
(scenarios.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from harness.engines.torch import nets  # noqa: E402
from harness.engines.torch.engine import Torch  # noqa: E402
from tests.harness.engines.torch import scenarios  # noqa: E402
from tests.harness.engines.torch.scenarios import SCENARIOS, Scenario  # noqa: E402

S = scenarios.SHAPE
SIZES = {
    "hidden_size": S.hidden,
    "intermediate_size": S.ffn,
    "num_hidden_layers": S.layers,
    "vocab_size": S.vocab,
    "num_attention_heads": S.q_heads,
    "num_key_value_heads": S.kv_heads,
    "head_dim": S.head_dim,
    "max_position_embeddings": S.max_tokens,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a checkpoint of each kind, none of whose tensors is trivial."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe"):
        torch.manual_seed(0)
        more: dict[str, Any] = MIXTURE if name == "Qwen3Moe" else {}
        config = getattr(transformers, f"{name}Config")(**SIZES, **more, tie_word_embeddings=name == "Qwen3")
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for weight in made.parameters():
                weight.normal_(0.0, 0.2) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
        made.save_pretrained(folder / name)
    return folder


def served(folder: Path, name: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Run a scenario on a checkpoint, and return the engine with the logits that it kept."""
    monkeypatch.setenv("MODELS_DIR", str(folder))
    return scenarios.served(name, scenario)


def compare(engine: Torch, folder: Path) -> None:
    """Compare every token's logits with those of the whole context; in bfloat16, which cards serve, all together."""
    narrow = engine.kind.float_bytes == 2
    kept = torch.bfloat16 if narrow else torch.float32
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kept).float()
    assert engine.logits is not None

    def whole(ids: list[int]) -> scenarios.F8:
        with torch.inference_mode():
            logits: scenarios.F8 = reference(torch.tensor([ids])).logits[0].numpy()
        return logits

    wrong = [why for _, why in scenarios.off(engine.logits, whole, narrow) if why]
    assert wrong == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_logits_are_those_of_transformers(name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(served(checkpoints, "Llama", SCENARIOS[name], monkeypatch), checkpoints / "Llama")


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_biases_norms_of_heads_and_experts_are_those_of_transformers(
    kind: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(served(checkpoints, kind, SCENARIOS["chunked"], monkeypatch), checkpoints / kind)


def test_an_fp8_checkpoint_is_served_by_its_numbers(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of layers in FP8 with a scale for each block of 16 x 32, beside a checkpoint that torch dequantised."""
    folder, plain = tmp_path / "Fp8", tmp_path / "plain"
    for copy in (folder, plain):
        shutil.copytree(checkpoints / "Llama", copy)
    weights = dict(safetensors.load_file(folder / "model.safetensors"))
    numbers = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].unfold(0, 16, 16).unfold(1, 32, 32).abs().amax((2, 3)) / 448.0  # E4M3's largest number
        each = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
        stored = (weights[name] / each).to(torch.float8_e4m3fn)
        weights |= {name: stored, f"{name}_scale_inv": scale}
        numbers[name] = stored.float() * each
        assert not torch.equal(numbers[name], safetensors.load_file(checkpoints / "Llama" / "model.safetensors")[name])
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    safetensors.save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    keys = json.loads((folder / "config.json").read_text("utf-8"))
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (folder / "config.json").write_text(json.dumps(keys), "utf-8")
    compare(served(tmp_path, "Fp8", SCENARIOS["chunked"], monkeypatch), plain)


def test_bits_of_fp8_are_those_of_torch() -> None:
    mine = torch.from_numpy(nets.E4M3)
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(mine.nan_to_num(1e9), theirs.nan_to_num(1e9))
