"""Weights and KV bytes of every shape, against public parameter counts and Prism's released model_info.json."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from harness.engines.costs.shapes import kv_token_bytes, params, weight_bytes
from harness.policy.types import GIB, UserError
from tests.cases import cases
from workloads.models import as_asked, checkpoints, model_set, repos, shape, shapes, with_files

# Parameters of the checkpoints as their model cards count them.
PARAMS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "mistral-7b": 7_241_732_096,
    "nemo-12b": 12_247_782_400,
    "phi-3-mini": 3_821_079_552,
    "phi-2": 2_779_683_840,
    "phi-1.5": 1_418_270_720,
    "powerlm-3b": 3_510_000_000,  # rounded
    "olmo-1b": 1_176_764_416,
    "starcoder2-3b": 3_030_371_328,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-2.5-14b": 14_770_033_664,
    "qwen-2.5-32b": 32_763_876_352,
    "yi-1.5-9b": 8_829_407_232,
    "qwen-3-32b": 32_762_123_264,
    "yi-34b": 34_388_917_248,
    "codellama-34b": 33_743_970_304,
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-tiny": 4 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 2 * 1000 * 256 + 256,  # no checkpoint
    "llama-small": 4 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 2 * 1000 * 512 + 512,  # no checkpoint
}
BIASED = {
    "phi-2",
    "phi-1.5",
    "starcoder2-3b",
    "qwen-2.5-7b",
    "qwen-2.5-14b",
    "qwen-2.5-32b",
    "opt-13b",
    "opt-66b",
    "opt-175b",
}  # biases are not counted
EXACT = PARAMS.keys() - BIASED - {"powerlm-3b", "olmo-1b", "gemma-2-2b", "qwen-3-32b"}  # nor extra or missing norms
KV_TOKEN_BYTES = {  # bf16, all layers
    "llama-3.1-8b": 131072,
    "llama-3-8b": 131072,
    "llama-3.2-3b": 114688,
    "llama-3.2-1b": 32768,
    "llama-3.3-70b": 327680,
    "llama-2-7b": 524288,
    "llama-2-13b": 819200,
    "mistral-7b": 131072,
    "nemo-12b": 163840,
    "phi-3-mini": 393216,
    "phi-2": 327680,
    "phi-1.5": 196608,
    "powerlm-3b": 368640,
    "olmo-1b": 131072,
    "starcoder2-3b": 30720,
    "gemma-2b": 18432,
    "gemma-2-2b": 106496,
    "qwen-2.5-7b": 57344,
    "qwen-2.5-14b": 196608,
    "qwen-2.5-32b": 262144,
    "yi-1.5-9b": 98304,
    "qwen-3-32b": 262144,
    "yi-34b": 245760,
    "codellama-34b": 196608,
    "opt-13b": 819200,
    "opt-66b": 2359296,
    "opt-175b": 4718592,
    "llama-7b": 524288,
    "llama-13b": 819200,
    "llama-30b": 1597440,
    "llama-65b": 2621440,
    "llama-tiny": 4096,
    "llama-small": 8192,
}


def test_every_shape_is_listed_here_or_among_the_checkpoints() -> None:
    assert set(shapes()) - set(checkpoints()) == set(PARAMS) == set(KV_TOKEN_BYTES)


@cases("name", sorted(PARAMS))
def test_parameters_and_kv_bytes(name: str) -> None:
    shape = shapes()[name]
    assert params(shape) == pytest.approx(PARAMS[name], rel=0 if name in EXACT else 0.001)
    assert weight_bytes(shape) == 2 * params(shape)
    assert kv_token_bytes(shape) == KV_TOKEN_BYTES[name]


@cases(("name", "gib"), [("llama-3.2-1b", 2.28), ("llama-3.2-3b", 6.0), ("llama-2-13b", 24.38)])
def test_weights_are_within_three_percent_of_the_released_ones(name: str, gib: float) -> None:
    assert weight_bytes(shapes()[name]) / GIB == pytest.approx(gib, rel=0.03)


def test_page_granule_of_an_8b_is_128_mib() -> None:
    shape = shapes()["llama-3.1-8b"]
    assert shape.layers * 2 * (2 << 20) == 128 << 20


@cases(("name", "tp"), product(sorted(PARAMS), (1, 2, 4, 8)))
def test_tensor_parallel_parts_hold_the_whole(name: str, tp: int) -> None:
    shape = shapes()[name]
    splits = shape.q_heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    if not splits:
        with pytest.raises(UserError, match=f"tp {tp}"):
            weight_bytes(shape, tp)
        return
    assert weight_bytes(shape) <= tp * weight_bytes(shape, tp) <= 1.1 * weight_bytes(shape)
    copies = max(1, tp // shape.kv_heads)
    assert tp * kv_token_bytes(shape, tp) == copies * kv_token_bytes(shape)


# max_position_embeddings of each checkpoint's config.json: prompt + output that it can take.
CONTEXT = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", 131072),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", 8192),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct", 131072),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct", 131072),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", 131072),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", 4096),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", 4096),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.2", 32768),
    "nemo-12b": ("mistralai/Mistral-Nemo-Instruct-2407", 131072),
    "yi-1.5-9b": ("01-ai/Yi-1.5-9B-Chat", 4096),
    "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct", 4096),
    "phi-2": ("microsoft/phi-2", 2048),
    "phi-1.5": ("microsoft/phi-1_5", 2048),
    "powerlm-3b": ("ibm-research/PowerLM-3b", 4096),
    "olmo-1b": ("allenai/OLMo-1B-hf", 2048),
    "starcoder2-3b": ("bigcode/starcoder2-3b", 16384),
    "gemma-2b": ("google/gemma-2b", 8192),
    "gemma-2-2b": ("google/gemma-2-2b", 8192),
    "qwen-2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", 32768),
    "qwen-2.5-14b": ("Qwen/Qwen2.5-14B-Instruct", 32768),
    "qwen-2.5-32b": ("Qwen/Qwen2.5-32B-Instruct", 32768),
    "qwen-3-32b": ("Qwen/Qwen3-32B", 40960),
    "yi-34b": ("01-ai/Yi-34B-Chat", 4096),
    "codellama-34b": ("codellama/CodeLlama-34b-hf", 16384),
    "opt-13b": ("facebook/opt-13b", 2048),
    "opt-66b": ("facebook/opt-66b", 2048),
    "opt-175b": ("", 2048),  # weights on request
    "llama-7b": ("huggyllama/llama-7b", 2048),
    "llama-13b": ("huggyllama/llama-13b", 2048),
    "llama-30b": ("huggyllama/llama-30b", 2048),
    "llama-65b": ("huggyllama/llama-65b", 2048),
    "llama-tiny": ("", 4096),
    "llama-small": ("", 4096),
}


def test_a_model_serves_at_most_what_its_checkpoint_can() -> None:
    dense = {name: spec for name, spec in shapes().items() if name not in checkpoints()}
    ids = {name: repo for repo, name in repos().items()}
    assert {name: (ids.get(name, ""), spec.max_tokens) for name, spec in dense.items()} == CONTEXT


def test_llama_3_is_llama_3_1_with_a_shorter_context() -> None:
    old, new = shapes()["llama-3-8b"], shapes()["llama-3.1-8b"]
    assert old._replace(name=new.name, max_tokens=new.max_tokens) == new


def test_no_two_shapes_have_one_id() -> None:
    named = sum(bool(repo) for repo, _ in CONTEXT.values()) + len(checkpoints())
    assert len(repos()) == named


@cases(
    ("asked", "name"),
    [("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Qwen/Qwen3-14B:tp=2:dtype=fp8", "qwen-3-14b")],
)
def test_an_id_on_huggingface_is_a_name_of_its_shape(asked: str, name: str) -> None:
    by_name = asked.replace(asked.partition(":")[0], name)
    assert shape(asked) == shape(by_name)
    assert model_set(asked).members == model_set(by_name).members
    assert as_asked(asked) == as_asked(by_name)
    assert with_files(f"{asked}*2", lambda _: "") == f"{by_name}*2"  # a run by either has one identity


def test_a_folder_of_an_id_s_name_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shape("Qwen/Qwen3-14B").layers == 40
    (tmp_path / "Qwen/Qwen3-14B").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json in this folder"):
        shape("Qwen/Qwen3-14B")


def test_an_id_that_is_nearly_one_is_told_the_right_one() -> None:
    with pytest.raises(UserError, match=r"did you mean meta-llama/Llama-3\.1-8B-Instruct"):
        shape("meta-llama/Llama-3.1-8B")
