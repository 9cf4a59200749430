"""Checkpoints read by their keys: bytes as published, and one line for what is not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.engines.costs import shapes
from harness.policy.parameters import attention, kept_numbers, parameters
from harness.policy.types import Experts, Sliding, UserError
from harness.run.spec import Spec, canonical
from tests.cases import cases
from tests.there import there
from workloads import checkpoint, models
from workloads.models import checkpoints, model_set, shape

DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE = DENSE | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLA = DENSE | {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
# 2 numbers (K and V) x layers x KV heads x head size x 2 bytes; of latent attention layers x (512 + 64) x 2 bytes.
KV_BYTES = {
    "qwen-3-0.6b": 2 * 28 * 8 * 128 * 2,
    "qwen-3-1.7b": 2 * 28 * 8 * 128 * 2,
    "qwen-3-4b": 2 * 36 * 8 * 128 * 2,
    "qwen-3-8b": 2 * 36 * 8 * 128 * 2,
    "qwen-3-14b": 2 * 40 * 8 * 128 * 2,
    "qwen-3-30b-a3b": 2 * 48 * 4 * 128 * 2,
    "qwen-3-235b-a22b": 2 * 94 * 4 * 128 * 2,
    "qwen-3-coder-480b-a35b": 2 * 62 * 8 * 128 * 2,
    "qwen-1.5-moe-a2.7b": 2 * 24 * 16 * 128 * 2,
    "qwen-2.5-72b": 2 * 80 * 8 * 128 * 2,
    "gemma-3-1b": 2 * 26 * 1 * 256 * 2,
    "gemma-3-4b": 2 * 34 * 4 * 256 * 2,
    "gemma-3-12b": 2 * 48 * 8 * 256 * 2,
    "gemma-3-27b": 2 * 62 * 16 * 128 * 2,
    "gpt-oss-20b": 2 * 24 * 8 * 64 * 2,
    "gpt-oss-120b": 2 * 36 * 8 * 64 * 2,
    "phi-4": 2 * 40 * 10 * 128 * 2,
    "mixtral-8x7b": 2 * 32 * 8 * 128 * 2,
    "mistral-small-3.1-24b": 2 * 40 * 8 * 128 * 2,
    "deepseek-v2-lite": 27 * 576 * 2,
    "deepseek-v3": 61 * 576 * 2,
    "deepseek-r1": 61 * 576 * 2,
    "kimi-k2": 61 * 576 * 2,
    "llama-4-scout": 2 * 48 * 8 * 128 * 2,
    "glm-4.7": 2 * 92 * 8 * 128 * 2,
    "minimax-m2": 2 * 62 * 8 * 128 * 2,
    "olmoe-1b-7b": 2 * 16 * 16 * 128 * 2,
}


def written(folder: Path, config: dict[str, Any], **beside: Any) -> str:
    """Write a checkpoint's config, and files beside it by their stem; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for stem, content in beside.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return str(folder)


def refused(config: dict[str, Any]) -> str:
    """Return the one line with which a config is refused."""
    with pytest.raises(UserError) as error:
        checkpoint.of_config("m", config, "m/config.json")
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith("m/config.json: ")
    return line.removeprefix("m/config.json: ")


# ------------------------------------------------------------------ public checkpoints


@pytest.mark.parametrize("name", KV_BYTES)
def test_weights_are_as_published_and_kv_bytes_exact(name: str) -> None:
    entry = checkpoints()[name]
    read = checkpoint.of_config(name, entry.config, name)
    assert shapes.kv_token_bytes(read.shape) == KV_BYTES[name]
    draft = read.draft_bytes  # files hold the layers of speculative decoding too, which are not served
    if (published := entry.published).bytes is not None:
        assert shapes.weight_bytes(read.shape) + draft == pytest.approx(published.bytes, rel=0.01)
    else:
        stored = sum(parameters(read.shape)) + read.shape.other_bytes // 2
        assert stored + draft // 2 == pytest.approx(published.params, rel=0.01)


# ------------------------------------------------------------------ keys


def test_dimensions_under_any_name() -> None:
    old = {
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 8,
        "n_inner": 512,
        "vocab_size": 1000,
        "n_positions": 4096,
        "activation_function": "gelu_new",
    }
    read = checkpoint.of_config("m", old, "m").shape
    assert (read.layers, read.hidden, read.q_heads, read.kv_heads, read.head_dim) == (4, 256, 8, 8, 32)
    assert (read.ffn, read.gated, read.tied) == (512, False, False)
    assert checkpoint.of_config("m", DENSE | {"architectures": ["NobodyKnows"]}, "m").shape.layers == 4


def test_layers_with_experts_are_counted() -> None:
    def layers(**keys: Any) -> int:
        return there(checkpoint.of_config("m", MOE | keys, "m").shape.experts).layers

    assert layers() == 4
    assert layers(first_k_dense_replace=1) == 3
    assert layers(decoder_sparse_step=2) == 2
    assert layers(mlp_only_layers=[0, 3]) == 2
    assert layers(moe_layer_freq=[0, 1, 1, 1]) == 3
    assert layers(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]) == 3


def test_shared_experts_by_number_or_width() -> None:
    by_number = checkpoint.of_config("m", MOE | {"n_shared_experts": 2}, "m").shape.experts
    by_width = checkpoint.of_config("m", MOE | {"shared_expert_intermediate_size": 256}, "m").shape.experts
    assert by_number == by_width == Experts(4, 16, 2, 128, 256)


def test_latent_attention_is_cut_over_heads_alone() -> None:
    read = checkpoint.of_config("m", MLA, "m").shape
    assert [n for _, n in attention(read)] == [256 * 96, 96 * 8 * 48, 256 * 80, 64 * 8 * 64, 8 * 32 * 256]
    assert [n for _, n in attention(read, 4)] == [256 * 96, 96 * 2 * 48, 256 * 80, 64 * 2 * 64, 2 * 32 * 256]
    assert shapes.kv_token_bytes(read, 4) == shapes.kv_token_bytes(read) == 4 * 80 * 2


@pytest.mark.parametrize(
    ("keys", "slide"),
    [
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
        ({"sliding_window": 128, "sliding_window_pattern": 4}, 3),
        ({"sliding_window": 128, "sliding_window_pattern": "LLLG"}, 3),
        ({"sliding_window": 128}, 4),
        ({"sliding_window": 128, "use_sliding_window": False}, 0),
        ({"sliding_window": None}, 0),
        ({"attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0]}, 3),
    ],
)
def test_sliding_layers(keys: dict[str, Any], slide: int) -> None:
    entry = checkpoint.of_config("m", DENSE | keys, "m").shape.sliding
    assert entry == (Sliding(slide, 128) if slide else None)


GEMMA_4: dict[str, Any] = {  # of 31 B
    "model_type": "gemma4_text",
    "num_hidden_layers": 60,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "attention_k_eq_v": True,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
}


def test_sliding_layers_of_heads_of_their_own() -> None:
    """50 layers of 16 heads x 256 and 10 of 4 x 512, whose one projection of keys and values leaves two vectors."""
    read = checkpoint.of_config("m", GEMMA_4, "m").shape
    assert shapes.kv_token_bytes(read) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512) == 901_120
    assert 2 * kept_numbers(read) == 2 * 2 * 10 * 4 * 512 == 81_920  # of a token that left the window
    parts = [shapes.kv_token_bytes(read, tp) for tp in (2, 4, 8)]
    assert parts == [901_120 // 2, 901_120 // 4, 2 * 2 * (50 * 2 * 256 + 10 * 512)]
    slide = 50 * 5376 * 256 * (32 + 16 + 16 + 32)
    whole = 10 * 5376 * 512 * (32 + 4 + 32)
    assert parameters(read).attention == slide + whole
    assert sum(parameters(read)) == pytest.approx(30.7e9, rel=0.001)  # as its card says


def test_a_dense_ffn_beside_the_experts_of_each_layer() -> None:
    """Gemma 4 of 26 B, of which its card says 25.2 B and 3.8 B of each token."""
    keys = GEMMA_4 | {
        "num_hidden_layers": 30,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "layer_types": GEMMA_4["layer_types"][:30],
    }
    read = checkpoint.of_config("m", keys, "m").shape
    assert read.experts == Experts(layers=30, routed=128, top=8, ffn=704, shared_ffn=2112)
    assert sum(parameters(read)) == pytest.approx(25.2e9, rel=0.005)
    assert shapes.kv_token_bytes(read) == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)


def test_global_heads_count_where_keys_are_values_alone() -> None:
    """As in transformers; where no layer slides, all are global."""
    apart = DENSE | {"global_head_dim": 64, "num_global_key_value_heads": 1}
    read = checkpoint.of_config("m", apart, "m").shape
    assert (read.kv_heads, read.head_dim, read.keys_as_values) == (2, 64, False)
    read = checkpoint.of_config("m", apart | {"attention_k_eq_v": True}, "m").shape
    assert (read.kv_heads, read.head_dim, read.keys_as_values) == (1, 64, True)
    assert attention(read) == [("q_proj", 256 * 8 * 64), ("k_proj", 256 * 64), ("o_proj", 256 * 8 * 64)]


def test_a_vision_tower_counts_as_bytes_alone() -> None:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "patch_size": 14}
    read = checkpoint.of_config("m", {"text_config": DENSE, "vision_config": tower}, "m").shape
    assert read._replace(other_bytes=0) == checkpoint.of_config("m", DENSE, "m").shape
    blocks = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    assert read.other_bytes == 2 * (blocks + 64 * 3 * 14 * 14 + 64 * 256)
    assert shapes.weight_bytes(read) - shapes.weight_bytes(read._replace(other_bytes=0)) == read.other_bytes


# ------------------------------------------------------------------ number formats


def test_the_index_must_be_explained(tmp_path: Path) -> None:
    right = shapes.weight_bytes(checkpoint.of_config("m", DENSE, "m").shape)
    index = "model.safetensors.index"
    assert checkpoint.read(written(tmp_path / "a", DENSE, **{index: {"metadata": {"total_size": right}}})).layers == 4
    with pytest.raises(UserError, match=r"its keys make 0\.01 GB of weights"):
        checkpoint.read(written(tmp_path / "b", DENSE, **{index: {"metadata": {"total_size": right * 1.1}}}))


def test_sampling_defaults_come_with_it(tmp_path: Path) -> None:
    assert checkpoint.read(written(tmp_path / "a", DENSE, generation_config={"top_p": 0.9})).sampled
    assert not checkpoint.read(written(tmp_path / "b", DENSE, generation_config={"top_p": 1.0})).sampled


# ------------------------------------------------------------------ sets


def test_names_and_paths_mix(tmp_path: Path) -> None:
    path = written(tmp_path / "mine", MOE)
    entry = model_set(f"gpt-oss-120b,{path}/config.json:tp=2:dtype=fp8*2,{path}:kv_dtype=fp8")
    assert entry.names == ("gpt-oss-120b/1", "mine/1", "mine/2", "mine/3")
    assert [m.tp for m in entry.members] == [1, 2, 2, 1]
    eight, forms = entry.members[1].shape, there(entry.members[1].shape.formats)
    assert (forms.experts.name, forms.head.name, eight.kv_format) == ("fp8", "bf16", "bf16")
    assert entry.members[3].shape.kv_format == "fp8"


def test_a_run_is_named_by_what_is_read_not_by_its_path(tmp_path: Path) -> None:
    def name(path: str) -> str:
        return canonical(Spec("static", models=f"{path}:tp=2*3,llama-3.1-8b"))

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = written(tmp_path / "a" / "mine", MOE)
    other = written(tmp_path / "b" / "mine", MOE | {"bos_token_id": 7})
    assert name(first) == name(other)
    written(Path(other), MOE | {"hidden_size": 512})
    assert name(first) != name(other)
    assert "llama-3.1-8b" in name(first)


def test_paths_hold_from_any_folder() -> None:
    there = models.with_files("a/config.json:tp=2*3, gpt-oss-120b*2,b/m.gguf", lambda path: f"/x/{path}")
    assert there == "/x/a/config.json:tp=2*3,gpt-oss-120b*2,/x/b/m.gguf"
    assert models.with_files("sets/mine.toml", lambda _: "") == "sets/mine.toml"


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": None}, "no num_hidden_layers: not the config of a decoder"),
        ({"max_position_embeddings": None}, "no max_position_embeddings"),
        ({"hidden_size": "256"}, 'hidden_size is "256", not a count'),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, not a count"),
        ({"num_layers": 5}, "num_hidden_layers 4 and num_layers 5 contradict each other"),
        ({"num_key_value_heads": 3}, "8 attention heads do not divide among 3 KV heads"),
        ({"num_experts": 8}, "8 experts without num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "9 experts of each token, of 8"),
        ({"kv_lora_rank": 64}, "kv_lora_rank without qk_nope_head_dim"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 layers, num_hidden_layers says 4"),
        ({"layer_types": ["linear_attention"] * 4}, 'layer_types: no model of "linear_attention"'),
        ({"full_attention_interval": 4}, "full_attention_interval: no model of linear attention"),
        ({"index_topk": 2048}, "index_topk: no model of sparse attention"),
        ({"mamba_d_state": 16}, "mamba_d_state: no model of state-space layers"),
        ({"sliding_windows": [4, 5]}, "sliding_windows is not understood, and may change bytes or steps"),
        ({"model_type": "gemma4_text"}, "no global_head_dim"),
        ({"global_head_dim": 0}, "global_head_dim is 0, not a count"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v is 1, not true or false"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "8 attention heads do not divide among 3 KV"),
        ({"quantization_config": {"quant_method": "exl3"}}, 'quantization_config: quant_method "exl3" is not known'),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "quantization_config: bits 5 in groups of 128"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP3"}}, "quantization_config: quant_algo"),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8", not a table of keys'),
    ],
)
def test_what_is_not_understood_ends_in_one_line(change: dict[str, Any], line: str) -> None:
    assert refused(DENSE | change).startswith(line)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    def line(content: str) -> str:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError) as error:
            shape(str(tmp_path / "config.json"))
        assert "\n" not in str(error.value)
        return str(error.value).partition("config.json: ")[2]

    assert line("[1, 2").startswith("no JSON (")
    assert line("[1, 2]") == "[1, 2], not a table of keys"
    assert line("[" * 100_000).startswith("no JSON (")
    assert line(" " * 10_000_000) == "10.0 MB, no config (at most 4 MB)"
    with pytest.raises(UserError, match="no such file"):
        shape("nowhere/config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json in this folder"):
        shape(str(tmp_path))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("gpt-oss-120b:dtype=fp8", "gpt-oss-120b: dtype=fp8 is for checkpoints of 16 bits, and this one is quantised"),
        ("qwen-3-8b:dtype=fp9", 'qwen-3-8b: no dtype "fp9"; did you mean fp8?'),
        ("qwen-3-8b:kv_dtype=int4", 'qwen-3-8b: no kv_dtype "int4"'),
        ("qwen-3-8b:tp=0", 'model "qwen-3-8b:tp=0": tp is "0", not a count of GPUs'),
        ("qwen-3-8b:pp=2", 'model "qwen-3-8b:pp=2": "pp=2" is no qualifier'),
        ("qwen-3-8b:tp=2:tp=4", 'model "qwen-3-8b:tp=2:tp=4": "tp=4" is no qualifier'),
        ("gpt-oss-121b,qwen-3-8b", 'no model "gpt-oss-121b"'),
    ],
)
def test_a_model_asked_for_wrongly(asked: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        model_set(asked)
    assert str(error.value).startswith(line)


def test_degrees_divide_heads_and_experts() -> None:
    big = shape("qwen-3-235b-a22b:dtype=fp8_block")
    assert shapes.degrees(big) == (1, 2, 4)  # 1536 / 8 = 192 is no whole number of blocks of 128
    with pytest.raises(UserError, match="experts of width 1536 in blocks of 128 do not split over tp 8"):
        shapes.weight_bytes(big, 8)
    assert shapes.degrees(shape("qwen-3-235b-a22b")) == (1, 2, 4, 8)
    odd = checkpoint.of_config("odd", MOE | {"moe_intermediate_size": 129}, "m").shape
    assert shapes.degrees(odd) == (1,)
    mixtral = shape("mixtral-8x7b")
    assert 2 * shapes.weight_bytes(mixtral, 2) == pytest.approx(shapes.weight_bytes(mixtral), rel=1e-3)


@cases(
    ("changed", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a count from 1 to 1,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": True}, "head_dim is true"),
        ({"intermediate_size": 4096.0}, "intermediate_size is 4096.0"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"sliding_window": True}, "sliding_window is true"),
        ({"sliding_window": "4096"}, "sliding_window is"),
        ({"sliding_window": 64, "sliding_window_pattern": "GX"}, "sliding_window_pattern"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
        ({"vision_config": {"depth": "x"}}, "vision_config"),
        ({"num_local_experts": 10**9, "num_experts_per_tok": 2}, "num_local_experts is 1000000000"),
        ({"mlp_only_layers": [[1]], "num_local_experts": 8, "num_experts_per_tok": 2}, "another kind"),
        ({"hidden_size": 10**6, "intermediate_size": 10**7, "num_hidden_layers": 1000}, "parameters, above"),
    ],
)
def test_a_size_that_cannot_be_is_named_with_its_bounds(changed: dict[str, Any], says: str) -> None:
    assert says in refused(DENSE | changed)


@cases("index", ["{", "[]", '{"metadata": 3}', '{"metadata": {"total_size": "x"}}', '{"metadata": {"total_size": -1}}'])
def test_a_damaged_index_is_no_missing_one(index: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "m", DENSE)
    assert shape(folder)
    (tmp_path / "m" / checkpoint.INDEX).write_text(index)
    with pytest.raises(UserError, match="index"):
        shape(folder)
