"""Formats of quantised checkpoints: what each method states, and which modules stay in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engines.costs import shapes
from harness.policy.parameters import stored_bytes
from tests.there import there
from tests.workloads.test_checkpoint import DENSE, MOE, written
from workloads import checkpoint, quantised


def test_a_multimodal_mixture_in_four_bits_has_its_published_size() -> None:
    """moonshotai/Kimi-K2.5 has 595 GB of weight files; keys of its text as NVIDIA's copy of the config prints them."""
    kept = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    int4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
    text = {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18432, "vocab_size": 163840, "max_position_embeddings": 262144,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": kept,
                                "config_groups": {"group_0": {"targets": ["Linear"], "weights": int4}}},
    }  # fmt: skip
    tower = {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "patch_size": 14}
    config = {"model_type": "kimi_k25", "ignore_index": -100, "text_config": text, "vision_config": tower}
    assert stored_bytes(checkpoint.of_config("m", config, "m").shape) == pytest.approx(595e9, rel=0.01)


def test_formats_of_each_method() -> None:
    def stored(**config: Any) -> tuple[str, float, str]:
        entry = there(checkpoint.of_config("m", MOE | {"quantization_config": config}, "m").shape.formats)
        assert entry.embedding == quantised.PLAIN
        return (*entry.experts, entry.head.name)

    integer = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    assert stored(quant_method="fp8") == ("fp8", 1.0, "bf16")
    assert stored(quant_method="fp8", weight_block_size=[128, 128]) == ("fp8_block", 1 + 4 / 16384, "bf16")
    assert stored(quant_method="mxfp4") == ("mxfp4", 0.53125, "bf16")
    assert stored(quant_method="awq", bits=4, group_size=128) == ("int4", 0.5 + 2.5 / 128, "bf16")
    assert stored(quant_method="gptq", bits=8, group_size=-1) == ("int8", 1.0, "bf16")
    assert stored(quant_method="gptq", bits=4, group_size=128, lm_head=True)[2] == "int4"
    assert stored(quant_method="modelopt", quant_algo="NVFP4") == ("nvfp4", 0.5625, "bf16")
    packed = stored(quant_method="compressed-tensors", config_groups={"g": {"weights": integer}})
    assert packed == ("int4", 0.5 + 2 / 32, "int4")
    but_head = stored(quant_method="compressed-tensors", config_groups={"g": {"weights": fp8}}, ignore=["lm_head"])
    assert but_head == ("fp8", 1.0, "bf16")


@pytest.mark.parametrize(
    "ignored",
    ["re:.*self_attn.*", "model.layers.*.self_attn*", "model.language_model.layers.{i}.self_attn", "self_attn"],
)
def test_modules_that_stay_in_16_bits(ignored: str) -> None:
    names = [ignored.format(i=i) for i in range(4)] if "{i}" in ignored else [ignored]
    config = MOE | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": names}}
    entry = there(checkpoint.of_config("m", config, "m").shape.formats)
    assert (entry.attention.name, entry.experts.name) == ("bf16", "fp8")


def test_a_group_quantised_in_part_has_the_mean() -> None:
    part = {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]}
    entry = there(checkpoint.of_config("m", DENSE | {"quantization_config": part}, "m").shape.formats)
    # A layer's q and o have 8 heads and k and v 2 each: 8 of 20, in one layer of four.
    assert entry.attention.name == "fp8"
    assert entry.attention.weight_bytes == pytest.approx(1 + 8 / 20 / 4)


def test_a_file_beside_the_config_states_formats(tmp_path: Path) -> None:
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    read = checkpoint.read(written(tmp_path / "m", MOE, hf_quant_config=beside))
    plain = checkpoint.read(written(tmp_path / "n", MOE))
    assert (there(read.formats).experts.name, read.kv_format) == ("fp8", "fp8")
    assert 2 * shapes.kv_token_bytes(read) == shapes.kv_token_bytes(plain)
